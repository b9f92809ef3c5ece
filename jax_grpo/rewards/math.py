r"""Correctness: the one final answer of a completion against the data's.

The answer stands outside of the thinking, in a `\boxed{}` or `\fbox{}` (also `\boxed 5`), or where
nothing is boxed on a line `#### 72`. Several are fine when they agree in value, and then the last
one counts; several that differ are no answer, or a policy would learn to try its luck. For the
same reason a box that is empty or never closed is no answer, whatever else is boxed.

What is written as the right answer is, and numbers written out, is decided here; all that must be
evaluated goes to worker processes with a deadline.
"""

from __future__ import annotations

import decimal
import functools
import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.rewards.contract import log_statuses, text_of
from jax_grpo.rewards.equality import MEASURES, NotHere, Settings, Verdict, is_copied, judge
from jax_grpo.rewards.texts import after_thinking
from jax_grpo.rewards.tokens import MAX_CHARACTERS
from jax_grpo.rewards.workers import Pool

_MAX_ANSWERS = 8  # of one completion that are spelt differently: more are not compared

_BOX = re.compile(r"(?<!\\)(?:\\\\)*\\(?:boxed|fbox)(?![A-Za-z])")
# One pass over what matters: a box, an escaped character (so that `\{` is no brace), a brace.
_BRACES = re.compile(
    r"\\(?:boxed|fbox)(?:\s*(?P<box>\{)"
    r"|\s*(?P<bare>[-+.0-9](?:[^\s${}\\]*[^\s${}\\.,;:!?)*])?|(?<=\s)[A-Za-z](?![A-Za-z])))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
# GSM8K's line; one that goes on with a word is a heading of Markdown.
_LINE = re.compile(r"^####(?!#)[ \t]*+(?![A-Za-z]{2})([^\n]+)$", re.MULTILINE)
_SENTENCE = re.compile(r"\bthe (?:final )?answer is:?([^\n]+)", re.IGNORECASE)


def correctness(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    reward: float = 1.0,
    sentence: bool = False,
    optional: Sequence[str] = ("currency", "degree", "unit"),
    tolerance: float = 1e-6,
    form: bool = False,
    seconds: float = 2.0,
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Reward a completion whose one final answer is the right one, by value.

    Logs the statuses found (right or wrong), none, several, unparsable, too_complex and timeout.

    Args:
        prompts: n prompts, text or message lists: an answer must not be copied from there.
        completions: n completions, text or message lists.
        answer: n right answers: a number, text, or a solution that ends in `#### 72` or boxes
            its answer. Where there is none (None or empty) the reward is None.
        reward: what a right answer is worth; a wrong one, or none, is worth 0.
        sentence: whether "The answer is 72." counts where nothing is boxed and no line is marked.
        optional: the measures that may be left out or added: of base, currency, degree, percent
            and unit. Two that differ are never equal, and 10% is never 0.1.
        tolerance: relative; only for a right answer that is a decimal and not whole.
        form: whether an expression must be in the form of the right one, up to the order of its
            terms and factors; for data that ask to expand, factor or simplify.
        seconds: the deadline of what must be evaluated, for each completion.
        log_metric: given by the caller.
        log_extra: given by the caller.
        **columns: not looked at.

    Raises:
        ValueError: a right answer is no number and no text, or a setting has no such value.

    >>> correctness(["?"] * 3, [r"\boxed{\frac{1}{2}}", r"\boxed{2}", "0.5"], [0.5] * 3, reward=2.0)
    [2.0, 0.0, 0.0]
    """
    settings = _settings(optional, tolerance, form)
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}, and not above 0")
    golds = [gold_answer(value) for value in answer]
    offered = [final_answers(text_of(completion), sentence) for completion in completions]
    verdicts = [_judge_here(a, gold, settings) for a, gold in zip(offered, golds, strict=True)]
    waiting = [i for i, verdict in enumerate(verdicts) if verdict is None]
    items = [(offered[i], golds[i] or "") for i in waiting]
    for i, verdict in zip(waiting, _judge_there(items, settings, seconds), strict=True):
        verdicts[i] = verdict
    done = [
        verdict._replace(right=False, why="copied from the question")
        if verdict.right and is_copied(answers[-1], gold or "", _question(prompt))
        else verdict
        for verdict, answers, gold, prompt in zip(verdicts, offered, golds, prompts, strict=True)
        if verdict is not None  # by now, that is all of them
    ]
    statuses, whys = [verdict.status for verdict in done], [verdict.why for verdict in done]
    log_statuses("correctness", statuses, whys, log_metric, log_extra)
    return [
        None if gold is None else float(reward) if verdict.right else 0.0
        for gold, verdict in zip(golds, done, strict=True)
    ]


def final_answers(text: str, sentence: bool = False) -> list[str]:
    r"""What a completion offers as its answer: each that is written differently, the last one last.

    None where a box is empty or not closed, whatever else is boxed.

    >>> final_answers(r"<thinking>\boxed{1}</thinking> \boxed{5}, no, $\boxed{ 6 }$, \boxed{6}.")
    ['5', '6']
    >>> final_answers("6 * 12 = 72\n#### $72"), final_answers("The answer is 72.", sentence=True)
    (['$72'], ['72'])
    """
    text = after_thinking(text)
    found = boxed_answers(text)
    if not _BOX.search(text):
        found = [line.strip("*_ \t\r") for line in _LINE.findall(text)]
        if not found and sentence:
            found = [line.partition(". ")[0].rstrip(". \t\r") for line in _SENTENCE.findall(text)]
    found = [answer.strip().removeprefix("**").removesuffix("**").strip() for answer in found]
    return [] if "" in found else list(dict.fromkeys(reversed(found)))[::-1]


def gold_answer(value: Any) -> str | None:
    r"""The right answer in a row of the data, as text; None when it is missing or empty.

    Raises:
        ValueError: it is no number and no text.

    >>> gold_answer("6 * 12 = 72\n#### 72"), gold_answer(0.5), gold_answer(float("nan"))
    ('72', '0.5', None)
    """
    if value is None:
        return None
    if isinstance(value, numbers.Real | decimal.Decimal) and not isinstance(value, bool):
        if not math.isfinite(value):  # an empty cell of a table
            return None
        return str(value)
    if not isinstance(value, str | bool):
        raise ValueError(f"an answer is text or a number, not {type(value).__name__}")
    value = str(value)
    _, mark, after = value.rpartition("####")
    boxes = [] if mark else boxed_answers(value)
    return (boxes[-1] if boxes else after).strip() or None


def boxed_answers(text: str) -> list[str]:
    r"""Contents of the outermost boxes, by balanced braces, in one pass.

    One that is never closed takes all the others with it: what it was to hold is not known.

    >>> boxed_answers(r"\boxed{\frac{1}{2}} or \fbox{\{1, 2\}} or \boxed 3.")
    ['\\frac{1}{2}', '\\{1, 2\\}', '3']
    >>> boxed_answers(r"\boxed{1} or \boxed{2")
    []
    """
    opened: list[int | None] = []  # where each open brace's box began, None for a plain brace
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        start: int | None = None
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(None)
        elif match["close"] and opened:
            start, end = opened.pop(), match.start()
        elif match["bare"]:
            start, end = match.start("bare"), match.end()
        if start is not None:
            while boxes and boxes[-1][0] > start:  # boxes inside of this one
                boxes.pop()
            boxes.append((start, end))
    return [] if any(opened) else [text[start:end] for start, end in boxes]


def _judge_here(answers: Sequence[str], gold: str | None, settings: Settings) -> Verdict | None:
    """The verdict where nothing must be evaluated, else None."""
    if not answers:
        return Verdict("none", False, "no answer, or a box that is empty or not closed")
    if len(answers) > _MAX_ANSWERS:
        return Verdict("several", False, f"{len(answers)} answers")
    if gold is None:
        return Verdict("found", False, "the data have no answer")
    try:
        return judge(answers, gold, settings)
    except NotHere:
        return None


def _judge_there(
    items: Sequence[tuple[Sequence[str], str]], settings: Settings, seconds: float
) -> list[Verdict]:
    """Verdicts of the worker processes."""
    if not items:
        return []
    verdicts = []
    # A right answer that is longer than what is read is only text, and no answer was that text.
    shared = settings._replace(evaluate=True)
    for result in _pool(seconds).map(
        [(a, gold[: MAX_CHARACTERS + 1], shared) for a, gold in items]
    ):
        if result.status == "done":
            verdicts.append(Verdict(*result.value))
        elif result.status == "raised":
            verdicts.append(Verdict("unparsable", False, result.value))
        else:
            verdicts.append(Verdict("timeout", False, result.value))
    return verdicts


def _question(prompt: Any) -> str:
    """The text of a prompt, or of its last message."""
    if isinstance(prompt, str):
        return prompt
    return text_of([{**message, "role": "assistant"} for message in prompt[-1:]])


@functools.cache
def _pool(seconds: float) -> Pool:
    return Pool("jax_grpo.rewards.equality:judge_item", seconds=seconds)


def _settings(optional: Sequence[str], tolerance: float, form: bool) -> Settings:
    """The settings of a comparison; evaluation is the workers'."""
    optional = (optional,) if isinstance(optional, str) else optional
    for name in optional:
        if name not in MEASURES:
            raise ValueError(f"optional: no measure {name!r}; there are: {', '.join(MEASURES)}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}, and not from 0 to below 1")
    return Settings(tuple(optional), float(tolerance), form, evaluate=False)
