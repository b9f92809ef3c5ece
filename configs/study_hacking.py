"""A known failure, shown: a reward model that loves length, optimised by PPO until truth suffers.

    python -m jax_grpo compare --config=configs/study_hacking.py --workdir=DIR

In the pairs that the reward model learns from, the longer answer, richer in symbols, happened to
win although it is wrong. PPO gives that reward model what it wants; GRPO learns from a verifier,
and the same reward model looks on. The picture has both scores over the steps: with PPO the proxy
goes up while truth goes down; with GRPO truth goes up, whatever the proxy says.
"""

import runpy
from pathlib import Path

import ml_collections

LENGTH = 64  # room for answers that are longer than any right one


def get_config() -> ml_collections.ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name("quickstart.py")))["get_config"]()
    del config.stages
    numbers = {
        k: config.sft.data[k] for k in ("min_terms", "max_terms", "max_operand", "max_partial")
    }

    config.study = {
        "base": ("sft",),
        "methods": {"ppo": ("reward", "ppo"), "grpo": ("reward", "grpo")},
        "seeds": (0, 1, 2),
        "measure": "accuracy",
        "curves": (
            "rewards/reward_model/mean",
            "rewards/correctness/mean",
            "completions/mean_length",
        ),
    }
    config.evaluation.max_new_tokens = LENGTH

    config.reward = {
        "algorithm": {"name": "reward_model", "centering": 0.01},
        "data": {
            "source": "jax_grpo.arithmetic.preferences",
            "split": "train",
            "count": 10_000,
            "seed": 4,
            **numbers,
        },
        "optimizer": {"learning_rate": 1e-3, "schedule": "linear", "final_scale": 0.1, "b2": 0.99},
        "num_steps": 100,
        "prompts_per_step": 32,
        "max_prompt_length": 13,
        "max_completion_length": LENGTH,
        "remat": "none",
        "checkpoint_every": 1000,
        "log_every": 10,
    }
    shared = {
        **config.grpo.to_dict(),
        "max_completion_length": LENGTH,
        "checkpoint_every": 1000,
    }
    config.ppo = {
        **shared,
        "algorithm": {"name": "ppo", "kl_weight": 0.0},
        "reward_model": {"stage": "reward"},
        "rewards": {"correctness": {"reward": 1.0, "weight": 0.0}},  # looks on
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "num_steps": 40,
    }
    config.grpo = {
        **shared,
        "rewards": {"correctness": {"reward": 1.0}},
        "reward_model": {"stage": "reward", "weight": 0.0},  # looks on
        "num_steps": 40,
    }
    return config
