"""The study: Llama-3-8B-Instruct on prompt/answer rows in JSON, for correctness and format.

    python -m jax_grpo train --config=configs/llama3_8b_math.py --config.grpo.data.path=ROWS.json

One group of 8 completions for each of 16 prompts makes an update, as one global number. The mesh
is that of 16 chips of 16 GB (a v5e-16).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dtype = "bfloat16"
    config.model = {"path": "meta-llama/Meta-Llama-3-8B-Instruct"}
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 4}
    config.stages = ("grpo",)
    config.grpo = {
        "algorithm": {"name": "grpo", "kl_weight": 0.04},
        "data": {"path": config_dict.placeholder(str), "chat": True},
        "rewards": {"correctness": {"reward": 2.0}, "thinking": {"reward": 1.0}},
        "sampling": {"num_generations": 8, "temperature": 1.0},
        "optimizer": {"learning_rate": 1e-6},
        "num_epochs": 1.0,
        "prompts_per_step": 16,
        "micro_batches": 4,
        "max_prompt_length": 256,
        "max_completion_length": 512,
        "remat": "full",
        "logits_chunk": 64,
        "checkpoint_every": 50,
        "log_every": 1,
    }
    return config
