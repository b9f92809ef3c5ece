"""The study in small, without a download: five ways to go on from one base, minutes on a CPU.

    python -m jax_grpo compare --config=configs/study_arithmetic.py --workdir=DIR

The base is the quickstart's after its stage `sft`: right about half of the time, and it seldom
thinks first, which would make it right nearly always. `sft` goes on with the same demonstrations;
the others learn from their own answers to problems that no demonstration has shown, and from one
verifier, which looks at nothing but the number in the box. All see about as many tokens in the
optimizer as 40 steps of GRPO do, and those that sample draw about as many.
"""

import runpy
from pathlib import Path

import ml_collections

REWARDS = {"correctness": {"reward": 1.0}}
SCHEDULE = {"schedule": "linear", "final_scale": 0.1, "b2": 0.99}


def get_config() -> ml_collections.ConfigDict:
    config = runpy.run_path(str(Path(__file__).with_name("quickstart.py")))["get_config"]()
    demonstrations, problems = config.sft.data.to_dict(), config.grpo.data.to_dict()
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
        "curves": ("rewards/correctness/mean", "completions/mean_length"),
    }
    config.evaluation.update(num_generations=8, pass_at=(8,), batch=256)

    shared = {
        "data": problems,
        "max_prompt_length": 13,
        "max_completion_length": 36,
        "remat": "none",
        "checkpoint_every": 1000,
        "log_every": 10,
    }
    samples = {
        **shared,
        "rewards": REWARDS,
        "sampling": {"num_generations": 8, "temperature": 1.0},
        "prompts_per_step": 32,
    }
    config.longer = {
        **shared,
        "algorithm": {"name": "sft"},
        "data": demonstrations,
        "optimizer": {"learning_rate": 1e-3, **SCHEDULE},
        "prompts_per_step": 128,
        "num_steps": 115,
    }
    config.dpo = {
        **samples,
        "algorithm": {"name": "dpo", "beta": 0.1},
        "collect": {"num_prompts": 3200},
        "optimizer": {"learning_rate": 3e-4, **SCHEDULE},
        "prompts_per_step": 128,
        "num_steps": 75,
    }
    config.rft = {
        **samples,
        "algorithm": {"name": "sft"},
        "collect": {"num_prompts": 1280, "rounds": 2},
        "optimizer": {"learning_rate": 1e-3, **SCHEDULE},
        "prompts_per_step": 128,
        "num_steps": 90,
    }
    config.reward = {
        **samples,
        "algorithm": {"name": "reward_model", "centering": 0.01},
        "collect": {"num_prompts": 256},
        "optimizer": {"learning_rate": 5e-4, **SCHEDULE},
        "num_steps": 40,
    }
    config.ppo = {
        **samples,
        "algorithm": {"name": "ppo", "kl_weight": 0.02},
        "reward_model": {"stage": "reward", "weight": 0.1},
        "optimizer": {"learning_rate": 5e-4, **SCHEDULE},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "num_steps": 36,
    }
    config.grpo = {
        **samples,
        "algorithm": {"name": "grpo", "kl_weight": 0.04},
        "optimizer": {"learning_rate": 5e-4, **SCHEDULE},
        "num_steps": 40,
    }
    return config
