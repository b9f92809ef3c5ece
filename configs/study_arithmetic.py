"""The study in small, without a download: five ways to go on from one base model, minutes on a CPU.

    python -m jax_grpo compare --config=configs/study_arithmetic.py --workdir=DIR

The base is the quickstart's after its stage `sft`: it is often wrong, and seldom thinks first. From
there every method gets about the same number of optimizer tokens, and those that sample about the
same number of sampled tokens. One verifier judges all: whether the answer in the box is right.
"""

import runpy
from pathlib import Path

import ml_collections

SAMPLED = 17_920  # completions that a method draws: 70 steps of 32 groups of 8
REWARDS = {"correctness": {"reward": 1.0}}


def get_config() -> ml_collections.ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name("quickstart.py")))["get_config"]()
    quickstart_grpo = config.grpo.to_dict()
    del config.stages

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
        "measure": "accuracy",
        "curves": ("rewards/correctness/mean", "completions/mean_length"),
    }
    config.evaluation.num_generations = 8
    config.evaluation.pass_at = (8,)
    config.evaluation.batch = 256

    # Problems that no demonstration has shown, for all that learn from their own answers.
    shared = {
        **quickstart_grpo,
        "rewards": REWARDS,
        "checkpoint_every": 1000,
    }
    del shared["algorithm"], shared["num_steps"]
    constant = {"schedule": "linear", "final_scale": 0.1, "b2": 0.99}

    config.longer = {
        **config.sft.to_dict(),
        "optimizer": {"learning_rate": 1e-3, **constant},
        "num_steps": 320,
        "checkpoint_every": 1000,
    }
    config.rft = {
        **shared,
        "algorithm": {"name": "sft"},
        "collect": {"num_prompts": SAMPLED // 8},
        "optimizer": {"learning_rate": 1e-3, **constant},
        "prompts_per_step": 64,
        "num_steps": 260,
    }
    config.dpo = {
        **shared,
        "algorithm": {"name": "dpo", "beta": 0.1},
        "collect": {"num_prompts": SAMPLED // 8},
        "optimizer": {"learning_rate": 2e-4, **constant},
        "prompts_per_step": 64,
        "num_steps": 160,
    }
    config.reward = {
        **shared,
        "algorithm": {"name": "reward_model", "centering": 0.01},
        "collect": {"num_prompts": SAMPLED // 35},
        "optimizer": {"learning_rate": 5e-4, **constant},
        "num_steps": 100,
    }
    config.ppo = {
        **shared,
        "algorithm": {"name": "ppo", "kl_weight": 0.02},
        "reward_model": {"stage": "reward", "weight": 0.1},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "sampling": {"num_generations": 1},
        "optimizer": {"learning_rate": 3e-4, **constant},
        "prompts_per_step": 256,
        "minibatches": 2,
        "num_steps": 54,
    }
    config.grpo = {
        **shared,
        "algorithm": {"name": "grpo", "kl_weight": 0.04},
        "optimizer": {"learning_rate": 5e-4, **constant},
        "num_steps": 70,
    }
    return config
