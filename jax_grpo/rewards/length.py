"""Length: punishments for completions that are too long or go round in circles, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.contract import score
from jax_grpo.rewards.naming import RESERVED, resolve


def overlong(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int = 0,
    buffer: int = 0,
    penalty: float = 1.0,
    **columns: Any,
) -> list[float]:
    r"""Punish length softly: from 0 at the buffer's start to `-penalty` at its end and beyond.

    $r = -\operatorname{clip}((|y| - (L_{max} - L_{buffer})) / L_{buffer}, 0, 1)$; DAPO, equation
    13, https://arxiv.org/abs/2503.14476.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, not looked at.
        completion_ids: n lists of token ids, of length |y|, end token included.
        max_length: L_max in tokens; must be given.
        buffer: L_buffer, how many of those are punished; must be given.
        penalty: for the full length.
        **columns: not looked at.

    Raises:
        ValueError: for a buffer that is not 1 to max_length.

    >>> overlong("???", "abc", [[0] * 60, [0] * 90, [0] * 101], max_length=100, buffer=20)
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be 1 to max_length, {max_length}, got {buffer}")
    over = [(len(ids) - (max_length - buffer)) / buffer for ids in completion_ids]
    return [0.0 - penalty * min(max(share, 0.0), 1.0) for share in over]


def repetition(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    size: int = 3,
    penalty: float = 1.0,
    **columns: Any,
) -> list[float]:
    r"""Punish repetition: the share of n-grams of tokens that occurred before, times `-penalty`.

    $r = -(1 - |\text{distinct}| / |\text{all}|)$ over all runs of `size` tokens; as in
    https://arxiv.org/abs/2502.03373, section 4, and open-r1, which counts words. Even plain text
    repeats a few: a larger size forgives more.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, not looked at.
        completion_ids: n lists of token ids; one that is shorter than `size` repeats nothing.
        size: of an n-gram in tokens.
        penalty: for nothing but repetition.
        **columns: not looked at.

    Raises:
        ValueError: for a size below 1.

    >>> repetition("??", "ab", [[1, 2, 1, 2, 1], [1, 2, 3, 4, 5]], size=2)
    [-0.5, 0.0]
    """
    if size < 1:
        raise ValueError(f"size must be 1 or more, got {size}")
    values = []
    for ids in completion_ids:
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        values.append(0.0 - penalty * (1.0 - len(set(grams)) / len(grams)) if grams else 0.0)
    return values


def cosine(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int = 0,
    right: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
    verifier: str = "correctness",
    **columns: Any,
) -> list[float | None]:
    r"""Reward right answers more when short, and wrong ones less: thinking is worth its length.

    $r = r_L + (r_0 - r_L)(1 + \cos(\pi |y| / L_{max})) / 2$ and `exceeded` from $|y| = L_{max}$ on;
    https://arxiv.org/abs/2502.03373, section 4, whose values are the defaults.

    Args:
        prompts: n prompts.
        completions: n completions, text or message lists.
        completion_ids: n lists of token ids, of length |y|.
        max_length: L_max in tokens; must be given.
        right: r_0 and r_L of a completion to which the verifier gives more than 0.
        wrong: the same of another.
        exceeded: the value at full length, right or wrong.
        verifier: the reward that decides, with its own defaults and columns; where it has
            nothing to say this has not, either.
        **columns: for the verifier.

    Raises:
        ValueError: for a max_length below 1 or an unknown verifier.

    >>> cosine("??", [r"\boxed{2}", r"\boxed{3}"], [[0] * 5] * 2, max_length=10, answer=[2, 2])
    [1.5, -5.0]
    """
    if max_length < 1:
        raise ValueError(f"max_length must be 1 or more, got {max_length}")
    given = {name: column for name, column in columns.items() if name not in RESERVED}
    values, valid = score([resolve(verifier)], prompts, completions, completion_ids, given)
    rewards: list[float | None] = []
    for ids, value, is_valid in zip(completion_ids, values[:, 0], valid[:, 0], strict=True):
        first, last = right if value > 0 else wrong
        wave = (1.0 + math.cos(math.pi * len(ids) / max_length)) / 2.0
        reached = exceeded if len(ids) >= max_length else last + (first - last) * wave
        rewards.append(float(reached) if is_valid else None)
    return rewards
