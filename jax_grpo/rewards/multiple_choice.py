r"""Multiple choice: the one letter that a completion ends up with."""

from __future__ import annotations

import numbers
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.rewards.contract import log_statuses, text_of
from jax_grpo.rewards.math import boxed_answers
from jax_grpo.rewards.texts import after_thinking

_ANSWER = re.compile(r"(?:<answer>|\banswer\b)[\s:*]*(?P<rest>[^\n]*)", re.IGNORECASE)
_LETTER = re.compile(r"(?<!\w)(?<!\w')[A-Z](?!\w|'\w)")  # neither in NASA nor in A's


def choice(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    letters: str = "ABCDE",
    reward: float = 1.0,
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Reward a completion whose one final letter, outside of the thinking, is the right one.

    It stands in a `\boxed{}`, else behind the word "answer" or the tag `<answer>`, on its line or
    the next, else it is all that is said. Two different letters there are no answer.

    Logs the statuses `found`, `none`, `several`, and `no_gold`, which has no value.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        answer: n right answers: a letter, or its place from 0 on; where there is none (None or
            empty) the reward is None.
        letters: those that there are to choose from, capitals.
        reward: what the right one is worth; another, or none, is worth 0.
        log_metric: see `contract.log_statuses`.
        log_extra: the same.
        **columns: not looked at.

    Raises:
        ValueError: for an answer that is none of the letters.

    >>> choice(["?"] * 3, ["The answer is (B).", r"\boxed{B}", "Answer: A or B"], ["B", 1, "B"])
    [1.0, 1.0, 0.0]
    """
    if not letters or not set(letters) <= set(string.ascii_uppercase):
        raise ValueError(f"letters are capitals from A to Z, not {letters!r}")
    values: list[float | None] = []
    statuses, whys = [], []
    for i, (completion, value) in enumerate(zip(completions, answer, strict=True)):
        gold = _gold(value, letters, i)
        found = chosen(text_of(completion), letters)
        whys.append(f"{', '.join(found) or 'none'} for {gold}")
        if gold is None:
            statuses.append("no_gold")
            values.append(None)
        else:
            statuses.append("several" if len(found) > 1 else "found" if found else "none")
            values.append(float(reward) if found == [gold] else 0.0)
    log_statuses("choice", statuses, whys, log_metric, log_extra)
    return values


def chosen(text: str, letters: str = "ABCDE") -> list[str]:
    r"""The letters that a completion ends up with, in order and each once.

    >>> chosen("Not A.\nAnswer: B) a D minor chord"), chosen("b")
    (['B', 'D'], [])
    """
    said = after_thinking(text)
    places = boxed_answers(said) or [match["rest"] for match in _ANSWER.finditer(said)]
    if not places and len(said.strip(" \t\n*().")) == 1:
        places = [said]
    return sorted({letter for place in places for letter in _LETTER.findall(place)} & set(letters))


def _gold(value: Any, letters: str, row: int) -> str | None:
    """The right letter of a row."""
    if value is None or value == "" or value != value:  # NaN is an empty cell of a table
        return None
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = letters[int(value)] if 0 <= int(value) < len(letters) else value
    letter = str(value).strip(" ().").upper()
    if len(letter) != 1 or letter not in letters:
        raise ValueError(f"row {row}: the answer {value!r} is none of {letters}")
    return letter
