r"""Correctness: the boxed answer against the data's.

The text after the thinking must hold one answer in a `\boxed{}`; two that differ are no answer,
or a policy would learn to try its luck. Numbers are compared exactly, as fractions of bounded
length, everything else as text: nothing is evaluated, so nothing can hang.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jax_grpo.rewards.contract import text_of

_MAX_NUMBER = 100  # characters; what is longer is compared as text

# One pass over what matters: an escaped character (so that `\{` is no brace), a box, a brace.
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_TAGS = re.compile(r"</?thinking>")

# Digits, in groups of three or not. "7,2" is no number, and "1 000" neither.
_COMMA = r"(?:,\\!|,|\{,\}|\\,|\\!)"
_UNSIGNED = rf"(?:[0-9]{{1,3}}(?:{_COMMA}[0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"[+-]?(?:{_UNSIGNED})")
_SLASH = re.compile(rf"(?P<sign>)(?P<a>[+-]?(?:{_UNSIGNED}))/(?P<b>[+-]?(?:{_UNSIGNED}))")
_FRAC = re.compile(
    rf"(?P<sign>[+-]?)\\frac\{{(?P<a>[+-]?(?:{_UNSIGNED}))\}}\{{(?P<b>[+-]?(?:{_UNSIGNED}))\}}"
)
_SHORT_FRAC = re.compile(r"(?P<sign>[+-]?)\\frac(?P<a>[0-9])(?P<b>[0-9])")  # \frac12


def correctness(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    reward: float = 1.0,
    **columns: Any,
) -> list[float | None]:
    r"""Reward a completion whose boxed answer, after the thinking, is the right one.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        answer: n right answers: a number, text, or a solution that ends in `#### 72` or boxes
            its answer. Where there is none (None or empty) the reward is None.
        reward: what a right answer is worth; a wrong one, or none, is worth 0.
        **columns: not looked at.

    >>> correctness(["?"] * 3, [r"\boxed{\frac{1}{2}}", r"\boxed{2}", "0.5"], [0.5] * 3, reward=2.0)
    [2.0, 0.0, 0.0]
    """
    values: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        wanted = gold_answer(gold)
        if wanted is None:
            values.append(None)
        else:
            values.append(float(reward) if final_answer(text_of(completion)) == wanted else 0.0)
    return values


def final_answer(text: str) -> Fraction | str | None:
    r"""The one answer boxed after the thinking; None when there is none or several differ.

    >>> final_answer(r"<thinking>\boxed{1}</thinking>It is \boxed{1,000}.")
    Fraction(1000, 1)
    """
    answers = {normalise(box) for box in boxed_answers(after_thinking(text))}
    answer = answers.pop() if len(answers) == 1 else ""
    return None if answer == "" else answer


def gold_answer(value: Any) -> Fraction | str | None:
    r"""The data's answer in the form of `normalise`; None when it is missing or empty.

    >>> gold_answer("6 * 12 = 72\n#### 72")
    Fraction(72, 1)
    """
    if value is None:
        return None
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if not math.isfinite(value):  # an empty cell of a table
            return None
        return Fraction(int(value) if isinstance(value, numbers.Integral) else str(value))
    if not isinstance(value, str | bool):
        raise TypeError(f"an answer is text or a number, not {type(value).__name__}")
    value = str(value)
    _, mark, after = value.rpartition("####")
    boxes = [] if mark else boxed_answers(value)
    answer = normalise(boxes[-1] if boxes else after)
    return None if answer == "" else answer


def after_thinking(text: str) -> str:
    """What a completion says outside of its thinking.

    An unclosed block is thought to the end. A block that only closes was opened in the prompt,
    or inside another: all before is thought.

    >>> after_thinking("<thinking>1+1</thinking>2")
    '2'
    >>> after_thinking("1+1</thinking>2<thinking>or 3?")
    '2'
    """
    said: list[str] = []
    start: int | None = 0  # of what is being said; None while thinking
    for tag in _TAGS.finditer(text):
        if tag.group() == "<thinking>":
            if start is not None:
                said.append(text[start : tag.start()])
            start = None
        else:
            if start is not None:
                said.clear()
            start = tag.end()
    if start is not None:
        said.append(text[start:])
    return "".join(said)


def boxed_answers(text: str) -> list[str]:
    r"""Contents of the outermost closed boxes, by balanced braces, in one pass.

    >>> boxed_answers(r"\boxed{\frac{1}{2}} or \boxed{\{1, 2\}} or \boxed{3")
    ['\\frac{1}{2}', '\\{1, 2\\}']
    """
    opened: list[int | None] = []  # where each open brace's box began, None for a plain brace
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        if match.lastgroup == "box":
            opened.append(match.end())
        elif match.lastgroup == "open":
            opened.append(None)
        elif match.lastgroup == "close" and opened:
            start = opened.pop()
            if start is not None:
                while boxes and boxes[-1][0] > start:  # boxes inside of this one
                    boxes.pop()
                boxes.append((start, match.start()))
    return [text[start:end] for start, end in boxes]


def normalise(text: str) -> Fraction | str:
    r"""Give the answer as a fraction when it is a number, else as text that is spelt one way.

    Spaces, `$`, a full stop at the end and thousands separators do not count.

    >>> normalise(" $1,000.50$. "), normalise(r"-\dfrac{1}{2}"), normalise("3 / 4")
    (Fraction(2001, 2), Fraction(-1, 2), Fraction(3, 4))
    >>> normalise("x + 1") == normalise("x+1"), normalise("1 2") == normalise("12")
    (True, False)
    """
    text = text.replace("\\$", "$").replace("\\%", "%").replace("\u2212", "-")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.lstrip(" \t\r\n\f\v$").rstrip(" \t\r\n\f\v$.")
    text = " ".join(text.split())
    # A space counts only between two letters or digits.
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> Fraction | None:
    """Read an integer, a decimal or a fraction; None for anything else."""
    if len(text) > _MAX_NUMBER:
        return None
    if _NUMBER.fullmatch(text):
        return _fraction(text)
    match = _SLASH.fullmatch(text) or _FRAC.fullmatch(text) or _SHORT_FRAC.fullmatch(text)
    if match is None or not (below := _fraction(match["b"])):
        return None
    value = _fraction(match["a"]) / below
    return -value if match["sign"] == "-" else value


def _fraction(text: str) -> Fraction:
    """A matched number without its separators."""
    digits = re.sub(_COMMA, "", text)
    return Fraction(digits.rstrip(".") or "0")
