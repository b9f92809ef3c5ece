"""Rewards: completion text to a number. Never imports JAX, and is useful on its own.

    from jax_grpo.rewards import correctness, execution_match, unit_tests

A reward is a function that a user of TRL has written already; `contract.py` says what it gets
and gives, and calls it. To add one, write it in a file of this package: a public function with
a parameter named `completions` is known by its name, here and in configs, with no other
registration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    """A reward by its name; looked for when it is asked for, as a worker needs few of the files."""
    if not name.startswith("_") and not Path(__file__).with_name(f"{name}.py").exists():
        from jax_grpo.rewards.naming import known_rewards

        if name in known_rewards():
            return known_rewards()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
