r"""Form: does a completion think first and then answer, as it was told, right or wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_grpo.rewards.contract import text_of
from jax_grpo.rewards.math import boxed_answers


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


def tags(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    names: Sequence[str] = ("think", "answer"),
    rest: bool = False,
    opened: bool = False,
    reward: float = 1.0,
    **columns: Any,
) -> list[float]:
    """Reward a completion that is its tagged parts: each once, in order, and not empty.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        names: of the tags.
        rest: whether the last tag is followed by text, the answer; else it is the end.
        opened: whether the prompt opens the first tag, as some chat templates do.
        reward: what the right form is worth; any other is worth 0.
        **columns: not looked at.

    Raises:
        ValueError: for no names.

    >>> tags(["?"] * 2, ["<think>1+1</think> <answer>2</answer>", "<answer>2</answer>"])
    [1.0, 0.0]
    >>> tags(["?"], ["1+1</think> It is 2."], names=("think",), rest=True, opened=True)
    [1.0]
    """
    names = (names,) if isinstance(names, str) else names
    if not names:
        raise ValueError("names must have one tag or more")
    start = f"<{names[0]}>" if opened else ""
    texts = (start + text_of(completion) for completion in completions)
    return [0.0 if tagged_parts(text, names, rest) is None else float(reward) for text in texts]


def thinks_first(text: str) -> bool:
    r"""Whether a text is one non-empty thinking block, then text with a closed, filled box.

    >>> thinks_first("<thinking>1+1=2</thinking> It is 2.")
    False
    """
    parts = tagged_parts(text, ("thinking",), rest=True)
    return parts is not None and any(box.strip() for box in boxed_answers(parts[-1]))


def tagged_parts(text: str, names: Sequence[str], rest: bool = False) -> list[str] | None:
    """What stands in the tags, and after them if `rest`; None unless that is the whole text.

    Every tag opens once and closes once, in order and none inside another; only spaces stand
    between them; and no part is empty.

    >>> tagged_parts("<think>a</think><answer>b</answer>", ("think", "answer"))
    ['a', 'b']
    """
    parts = []
    left = text.lstrip()
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not left.startswith(opening):
            return None
        part, found, left = left.removeprefix(opening).partition(closing)
        if not found:  # it closes in an earlier part
            return None
        parts.append(part)
        left = left.lstrip()
    if rest:
        parts.append(left)
    elif left:
        return None
    return parts if all(part.strip() for part in parts) else None
