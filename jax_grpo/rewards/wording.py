"""Wording: keywords and regular expressions, in what a completion says outside of its thinking."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.rewards.contract import log_statuses, text_of
from jax_grpo.rewards.texts import after_thinking
from jax_grpo.rewards.workers import MAX_ITEM, Answer, Pool


def keywords(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    keywords: Sequence[Any] | None = None,
    *,
    words: Sequence[str] = (),
    forbidden: Sequence[str] = (),
    reward: float = 1.0,
    **columns: Any,
) -> list[float | None]:
    """Reward the share of the keywords that a completion says, unless it says a forbidden one.

    A keyword is a word or several in a row, in any case, and no part of a longer word.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        keywords: n lists of keywords, or single ones; where there are none, the reward is None.
        words: keywords of every row, besides.
        forbidden: what makes it worth 0.
        reward: what all keywords are worth.
        **columns: not looked at.

    >>> keywords(["?"] * 3, ["Cats and dogs", "cats", "cats, dogs, mice"],
    ...          words=("cats", "dogs"), forbidden=("mice",))
    [1.0, 0.5, 0.0]
    """
    words = (words,) if isinstance(words, str) else words
    forbidden = (forbidden,) if isinstance(forbidden, str) else forbidden
    values: list[float | None] = []
    for completion, own in zip(completions, keywords or [()] * len(completions), strict=True):
        own = [own] if isinstance(own, str) else own or ()
        wanted = {word for word in (*words, *own) if word.strip()}
        said = after_thinking(text_of(completion))
        if not wanted:
            values.append(None)
        elif any(_says(said, word) for word in forbidden):
            values.append(0.0)
        else:
            values.append(reward * sum(_says(said, word) for word in wanted) / len(wanted))
    return values


def _says(text: str, word: str) -> bool:
    words = r"\s+".join(re.escape(part) for part in word.split())
    return re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) is not None


def pattern(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    regex: str = "",
    whole: bool = False,
    reward: float = 1.0,
    seconds: float = 1.0,
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
    **columns: Any,
) -> list[float]:
    """Reward a completion that a regular expression matches.

    On a hostile text an expression can take for ever: it runs in a worker process, which is
    killed at the deadline. Logs the statuses `match`, `none`, `timeout`, `died`, and `too_large`
    for what says more than a worker takes, some 30,000 characters.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        regex: in the syntax of Python's `re`, flags in front, as in `(?is)`; must be given.
        whole: whether it must match all that the completion says, but for spaces around it;
            else a part will do.
        reward: what a match is worth; none is worth 0.
        seconds: for one completion.
        log_metric: see `contract.log_statuses`.
        log_extra: the same.
        **columns: not looked at.

    Raises:
        ValueError: for an expression that is empty or none, and for no seconds.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}, and not above 0")
    try:
        if not regex:
            raise re.error("empty")
        re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {regex!r}: {error}") from None
    items = [[regex, whole, after_thinking(text_of(c)).strip()] for c in completions]
    fits = [len(json.dumps(item)) < MAX_ITEM for item in items]
    answers = iter(_pool(seconds).map([item for item, fit in zip(items, fits, strict=True) if fit]))
    statuses, whys = [], []
    for fit in fits:
        answer = next(answers) if fit else Answer("done", ("too_large", "more than a worker takes"))
        status, why = answer.value if answer.status == "done" else answer
        statuses.append(status)
        whys.append(why)
    log_statuses("pattern", statuses, whys, log_metric, log_extra)
    return [float(reward) if status == "match" else 0.0 for status in statuses]


def search(item: tuple[str, bool, str]) -> tuple[str, str]:
    """What a worker of `pattern` runs: the status of an expression on a text, and why.

    >>> search(("b+", False, "abba"))
    ('match', 'at character 1')
    """
    regex, whole, text = item
    found = (re.fullmatch if whole else re.search)(regex, text)
    return ("match", f"at character {found.start()}") if found else ("none", "no match")


@functools.cache
def _pool(seconds: float) -> Pool:
    return Pool("jax_grpo.rewards.wording:search", seconds=seconds)
