"""The study at full size: Llama-3-8B, five ways to go on from one base, on rows of yours.

    python -m jax_grpo compare --config=configs/study_llama3_8b.py --workdir=DIR \
        --config.sft.data.path=ROWS.json --config.evaluation.data.path=HELDOUT.json

Rows have the columns `prompt`, `answer`, and `completion` to imitate; one path is that of all
stages. 16 prompts with 8 completions each make an update of PPO and of GRPO. The memory alone, on
TPUs that need not be there:

    python -m jax_grpo compare --config=configs/study_llama3_8b.py --topology=v5p:2x2x4
"""

import ml_collections
from ml_collections import config_dict

SAMPLED = 25_600  # completions that a method draws: 200 steps of 16 groups of 8
REWARDS = {"correctness": {"reward": 1.0}}


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dtype = "bfloat16"
    config.model = {"path": "meta-llama/Meta-Llama-3-8B"}
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 4}
    config.study = {
        "base": ("sft",),
        "methods": {
            "sft": ("longer",),
            "dpo": ("dpo",),
            "rft": ("rft",),
            "ppo": ("reward", "ppo"),
            "grpo": ("grpo",),
        },
        "seeds": (0, 1, 2),
        "curves": ("rewards/correctness/mean", "completions/mean_length"),
        "preset": "llama3-8b",
    }
    rows = config_dict.placeholder(str)
    lengths = {"max_prompt_length": 256, "max_completion_length": 512}
    config.evaluation = {
        "data": {"path": config_dict.placeholder(str)},
        "rewards": REWARDS,
        "measures": {"accuracy": "correctness"},
        "max_prompt_length": 256,
        "max_new_tokens": 512,
        "num_generations": 8,
        "pass_at": (8,),
        "batch": 64,
    }
    shared = {
        "data": {"path": rows},
        "optimizer": {"learning_rate": 1e-6},
        "prompts_per_step": 16,
        "micro_batches": 4,
        **lengths,
        "remat": "full",
        "logits_chunk": 64,
        "checkpoint_every": 50,
        "log_every": 1,
    }
    samples = {
        **shared,
        "rewards": REWARDS,
        "sampling": {"num_generations": 8, "temperature": 1.0},
    }
    collects = {**samples, "collect": {"num_prompts": SAMPLED // 8}}

    config.sft = {
        **shared,
        "algorithm": {"name": "sft"},
        "optimizer": {"learning_rate": 1e-5, "schedule": "cosine", "warmup_steps": 20},
        "num_steps": 400,
        "prompts_per_step": 64,
    }
    config.longer = {**shared, "algorithm": {"name": "sft"}, "num_steps": 400}
    config.longer.update(prompts_per_step=64)
    config.rft = {**collects, "algorithm": {"name": "sft"}, "num_steps": 400}
    config.rft.update(prompts_per_step=64)
    config.dpo = {**collects, "algorithm": {"name": "dpo"}, "num_steps": 400}
    config.dpo.update(prompts_per_step=32)
    config.reward = {**collects, "algorithm": {"name": "reward_model"}, "num_steps": 200}
    config.reward.update(prompts_per_step=32)
    config.ppo = {
        **samples,
        "algorithm": {"name": "ppo"},
        "reward_model": {"stage": "reward"},
        "critic": {"optimizer": {"learning_rate": 1e-5}},
        "num_steps": 200,
    }
    config.grpo = {**samples, "algorithm": {"name": "grpo", "kl_weight": 0.04}, "num_steps": 200}
    return config
