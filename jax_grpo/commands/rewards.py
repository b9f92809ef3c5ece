"""Lists the rewards, or tries one on a completion.

    python -m jax_grpo rewards
    python -m jax_grpo rewards --check=NAME --completion=TEXT --answer=TEXT

NAME is a short name, a dotted path or file.py:name. TEXT may be @FILE, or - for standard input.
Other columns and settings are --column=NAME=VALUE and --setting=NAME=VALUE, as often as needed; a
VALUE that is JSON is taken as that. Tokens are the completion's words, as there is no tokenizer.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jax_grpo.commands import refusing_bad_input
from jax_grpo.rewards.contract import score
from jax_grpo.rewards.naming import RESERVED, Reward, known_rewards, resolve


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command; they are the same for every command line."""
    del line
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    several = functools.partial(flags.DEFINE_multi_string, flag_values=values)
    text("check", None, "The reward to try: a short name, a dotted path or file.py:name.")
    text("completion", None, "The completion: its text, @FILE, or - for standard input.")
    text("answer", None, "The column `answer`, as text; or @FILE.")
    text("prompt", "", "The prompt.")
    several("column", [], "NAME=VALUE: another column of the data.")
    several("setting", [], "NAME=VALUE: a setting of the reward.")


def run(values: flags.FlagValues) -> int:
    """Lists or tries; returns the exit code."""
    with refusing_bad_input():
        if values.check is None:
            if values.completion or values.answer or values.column or values.setting:
                raise ValueError("--check=NAME is missing")
            print(describe(known_rewards()))
            return 0
        if values.completion is None:
            raise ValueError("--completion is missing")
        columns = _pairs("column", values.column)
        if values.answer is not None:
            columns["answer"] = _text(values.answer)
        reward = resolve(values.check, **_pairs("setting", values.setting))
        print(check(reward, values.prompt, _text(values.completion), columns))
    return 0


def describe(rewards: dict[str, Reward]) -> str:
    """What each reward does, in one line, and under it the columns and settings that it takes."""
    lines = []
    for name, reward in sorted(rewards.items()):
        parameters = inspect.signature(reward).parameters.values()
        taken = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in RESERVED]
        settings = [p for p in taken if p.kind is p.KEYWORD_ONLY]
        columns = ", ".join(p.name for p in taken if p not in settings)
        shown = ", ".join(f"{p.name}={p.default!r}" for p in settings)
        lines.append(f"{name:<16} {(inspect.getdoc(reward) or '').partition(chr(10))[0]}")
        lines.append(f"{'':<16} columns: {columns or 'none'}; settings: {shown or 'none'}")
    return "\n".join(lines)


def check(reward: Reward, prompt: str, completion: str, columns: dict[str, Any]) -> str:
    """The score of one completion, and the columns that the reward logs, such as why.

    Raises:
        RewardError: when the reward fails.
    """
    extras: dict[str, Any] = {}
    ids: dict[str, int] = {}
    [values], [valid] = score(
        [reward],
        [prompt],
        [completion],
        [[ids.setdefault(word, len(ids)) for word in completion.split()]],
        {name: [value] for name, value in columns.items()},
        log_extra=extras.__setitem__,
    )
    lines = {"score": f"{values[0]:g}" if valid[0] else "none"}
    lines |= {name.rpartition("/")[2]: column[0] for name, column in extras.items()}
    return "\n".join(f"{name:<8}{value}" for name, value in lines.items())


def _text(given: str) -> str:
    """The text of a flag, of a file, or of standard input."""
    try:
        if given == "-":
            return sys.stdin.read()
        return Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given
    except UnicodeDecodeError as error:
        raise ValueError(f"{given}: not UTF-8 text: {error}") from error


def _pairs(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, with values of JSON where they are that."""
    pairs: dict[str, Any] = {}
    for pair in given:
        name, found, value = pair.partition("=")
        if not found or not name:
            raise ValueError(f"--{flag} is NAME=VALUE, not {pair!r}")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs
