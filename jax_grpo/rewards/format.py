r"""Form: does a completion think first and then box an answer, right or wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.contract import text_of
from jax_grpo.rewards.math import boxed_answers

_OPEN, _CLOSE = "<thinking>", "</thinking>"


def thinking(
    prompts: Sequence[Any], completions: Sequence[Any], *, reward: float = 1.0, **columns: Any
) -> list[float]:
    r"""Reward a completion that is one block of thinking and then text with a boxed answer.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        reward: what the right form is worth; any other is worth 0.
        **columns: not looked at.

    >>> thinking(["?"] * 2, [r"<thinking>1+1=2</thinking>\boxed{2}", r"\boxed{2}"])
    [1.0, 0.0]
    """
    return [float(reward) if thinks_first(text_of(c)) else 0.0 for c in completions]


def thinks_first(text: str) -> bool:
    r"""Whether a text is one non-empty thinking block, then text with a closed, filled box.

    >>> thinks_first("<thinking>1+1=2</thinking> It is 2.")
    False
    """
    text = text.lstrip()
    if not text.startswith(_OPEN) or text.count(_OPEN) != 1 or text.count(_CLOSE) != 1:
        return False
    thought, _, said = text.removeprefix(_OPEN).partition(_CLOSE)
    return bool(thought.strip()) and any(box.strip() for box in boxed_answers(said))
