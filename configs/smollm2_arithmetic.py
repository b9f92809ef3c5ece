"""A real pretrained model on your rows: SmolLM2-135M-Instruct, GRPO on a JSON-lines file.

    python -m jax_grpo train --config=configs/smollm2_arithmetic.py \
        --config.model.path=MODEL --config.grpo.data.path=ROWS.jsonl

MODEL is a GGUF file, a Hugging Face directory or the hub id below; each row of ROWS.jsonl is
{"prompt": "What is 7 + 5 - 3?", "answer": "9"}.
"""

import ml_collections
from ml_collections import config_dict

TEMPLATE = (
    "{prompt}\nThink first, then answer, in exactly this form: "
    "<thinking>your steps</thinking>\\boxed{{the number}}"
)


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dtype = "auto"
    config.model = {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 1}
    config.stages = ("grpo",)
    config.grpo = {
        "algorithm": {"name": "grpo", "kl_weight": 0.04},
        "data": {
            "path": config_dict.placeholder(str),
            "chat": True,
            "template": TEMPLATE,
        },
        "rewards": {"correctness": {"reward": 2.0}, "thinking": {"reward": 1.0}},
        "sampling": {"num_generations": 8, "temperature": 1.0},
        "optimizer": {"learning_rate": 1e-6},
        "num_steps": 100,
        "prompts_per_step": 4,
        "micro_batches": 4,
        "max_prompt_length": 128,
        "max_completion_length": 64,
        "remat": "full",
        "logits_chunk": 16,
        "checkpoint_every": 50,
        "log_every": 1,
    }
    return config
