"""The study in small: a tiny Llama learns arithmetic, and that thinking pays. No download.

Stage `sft` teaches both ways to answer, thinking first being the rarer habit, and stops while the
model is still often wrong. Stage `grpo` rewards correctness and format, on fresh problems.
"""

import ml_collections

NUMBERS = {"min_terms": 6, "max_terms": 6, "max_operand": 5, "max_partial": 9}
REWARDS = {"correctness": {"reward": 2.0}, "thinking": {"reward": 1.0}}


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dtype = "auto"
    config.model = {"preset": "tiny", "tokenizer": "jax_grpo.arithmetic.tokenizer"}
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 1}
    config.stages = ("sft", "grpo")

    config.evaluation = {
        "data": {
            "source": "jax_grpo.arithmetic.problems",
            "split": "heldout",
            "count": 512,
            "seed": 1,
            **NUMBERS,
        },
        "rewards": REWARDS,
        "measures": {"accuracy": "correctness", "format": "thinking"},
        "max_prompt_length": 13,
        "max_new_tokens": 36,
        "batch": 512,
    }

    config.sft = {
        "algorithm": {"name": "sft"},
        "data": {
            "source": "jax_grpo.arithmetic.demonstrations",
            "count": 20_000,
            "seed": 2,
            "thinking_share": 0.3,
            **NUMBERS,
        },
        "optimizer": {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "warmup_steps": 30,
            "final_scale": 0.1,
            "b2": 0.99,
            "weight_decay": 0.01,
        },
        "num_steps": 250,
        "prompts_per_step": 64,
        "max_prompt_length": 13,
        "max_completion_length": 36,
        "remat": "none",
        "checkpoint_every": 100,
        "log_every": 25,
    }

    config.grpo = {
        "algorithm": {"name": "grpo", "kl_weight": 0.04},
        "data": {
            "source": "jax_grpo.arithmetic.problems",
            "split": "fresh",  # none that a demonstration has shown
            "count": 20_000,
            "seed": 3,
            **NUMBERS,
        },
        "rewards": REWARDS,
        "sampling": {"num_generations": 8, "temperature": 1.0},
        "optimizer": {
            "learning_rate": 5e-4,
            "schedule": "linear",
            "final_scale": 0.1,
            "b2": 0.99,
        },
        "num_steps": 70,
        "prompts_per_step": 32,
        "max_prompt_length": 13,
        "max_completion_length": 36,
        "remat": "none",
        "checkpoint_every": 20,
        "log_every": 5,
    }
    return config
