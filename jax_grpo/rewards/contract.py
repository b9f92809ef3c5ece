"""The reward contract: what a reward function gets, what it gives, and who calls it.

A reward is a function, plain or async, or any callable:

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

All arguments are keyword arguments and lists of one entry per completion: the prompts as the
data have them, the completions as text (message lists where the prompt is one), the token ids
(with the end token, without padding), and every other column of the data set, repeated for each
completion. `trainer_state`, `log_metric(name, value)` and `log_extra(column, values)` come too.
A function without `**kwargs` gets only what it names. It gives one number per completion, or
None where it has nothing to say; NaN counts as None.

Whatever goes wrong in a reward is one `RewardError` with the reward's name and, where one
completion is to blame, that completion.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_grpo.rewards.naming import RESERVED, Reward, resolve, reward_name, reward_names

__all__ = [
    "Reward",
    "RewardError",
    "log_statuses",
    "resolve",
    "reward_name",
    "reward_names",
    "score",
    "shorten",
    "text_of",
]

_BLAME_SECONDS = 20.0  # how long to search for the completion that made a reward raise
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RewardError(ValueError):
    """A reward broke its contract; says which, how, and for which completion."""


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or what the last assistant message says.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion if m.get("role") == "assistant"]
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):  # content in parts, as multi-modal chats have it
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def score(
    functions: Sequence[Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]] | None = None,
    trainer_state: Any = None,
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Call every reward on n completions: the async ones at once, the others one by one.

    Args:
        functions: R rewards, as `resolve` gives them.
        prompts: n prompts, text or message lists.
        completions: n completions, text or message lists.
        completion_ids: n lists of token ids.
        columns: the other columns of the data set, n values each.
        trainer_state: passed on.
        log_metric: passed on; by default what is logged goes nowhere.
        log_extra: passed on; the same.

    Returns:
        values: float32 [n, R], 0 where invalid.
        valid: bool [n, R], False where the reward gave None.

    Raises:
        RewardError: when a reward raises, or gives what the contract does not allow.
        ValueError: when the arguments do not fit together.

    >>> score([lambda completions: [len(c) for c in completions]], "pp", ["a", "bc"], [[1], [2, 3]])
    (array([[1.],
           [2.]], dtype=float32), array([[ True],
           [ True]]))
    """
    count = len(completions)
    columns = dict(columns or {})
    for name, column in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
        if len(column) != count:
            raise ValueError(f"{len(column)} {name} for {count} completions")
    for name in columns:
        if name in RESERVED:
            raise ValueError(f"rewards get {name!r} from the trainer: rename the data's column")
    batch = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        **columns,
    }
    extras = {
        "trainer_state": trainer_state,
        "log_metric": log_metric or _ignore,
        "log_extra": log_extra or _ignore,
    }
    values = np.zeros((count, len(functions)), np.float32)
    valid = np.zeros((count, len(functions)), bool)
    if not count:
        return values, valid
    for r, numbers in enumerate(_call_all(functions, batch, extras)):
        for i, number in enumerate(numbers):
            if number is not None:
                values[i, r], valid[i, r] = number, True
    return values, valid


def _ignore(*_: Any) -> None:
    """Log nowhere."""


def log_statuses(
    name: str,
    statuses: Sequence[str],
    whys: Sequence[str],
    log_metric: Callable[[str, float], Any] | None,
    log_extra: Callable[[str, list[Any]], Any] | None,
) -> None:
    """Log what became of each completion: shares as `NAME/STATUS`, all as columns.

    Args:
        name: the reward's.
        statuses: n words, such as "found" or "timeout".
        whys: n short lines for a person.
        log_metric: the reward's own argument; None logs nothing.
        log_extra: the same.
    """
    if log_metric is not None:
        for status, count in collections.Counter(statuses).items():
            log_metric(f"{name}/{status}", count / len(statuses))
    if log_extra is not None:
        log_extra(f"{name}/status", list(statuses))
        log_extra(f"{name}/why", list(whys))


def _call_all(
    functions: Sequence[Reward], batch: Mapping[str, Sequence[Any]], extras: Mapping[str, Any]
) -> list[list[float | None]]:
    """Numbers of each reward; coroutines are collected on the way and then run together."""
    names = reward_names(functions)
    results: list[Any] = []
    try:
        for function, name in zip(functions, names, strict=True):
            arguments = _arguments(function, name, batch, extras)
            try:
                results.append(function(**arguments))
            except Exception as error:
                raise _blame(function, name, batch, extras, error) from error
    except BaseException:
        for result in results:
            if inspect.iscoroutine(result):
                result.close()  # or it would warn that nobody awaited it
        raise
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        for i, done in zip(waiting, _run([results[i] for i in waiting]), strict=True):
            results[i] = done
    numbers = []
    for function, name, result in zip(functions, names, results, strict=True):
        if isinstance(result, Exception):
            raise _blame(function, name, batch, extras, result) from result
        try:
            numbers.append(_numbers(result, batch["completions"], name))
        except _WrongLength as error:
            raise _blame(function, name, batch, extras, error) from None
    return numbers


def _arguments(
    function: Reward, name: str, batch: Mapping[str, Sequence[Any]], extras: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments that a reward takes, in lists of its own."""
    given: dict[str, Any] = {key: list(values) for key, values in batch.items()} | dict(extras)
    if isinstance(function, functools.partial):  # a column must not undo a setting
        given = {key: value for key, value in given.items() if key not in function.keywords}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none to read
        return given
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    bound = function.keywords if isinstance(function, functools.partial) else {}
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in given and key not in bound:
            columns = ", ".join(k for k in batch if k not in RESERVED) or "none"
            raise RewardError(
                f"the reward {name!r} needs the column {key!r}; the data have: {columns}"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {key: value for key, value in given.items() if key in named}


class _WrongLength(Exception):
    """How many values a reward gave for how many completions."""


def _numbers(result: Any, completions: Sequence[Any], name: str) -> list[float | None]:
    """Check what a reward gave and make it floats, None where it gave None or NaN."""
    if hasattr(result, "tolist"):  # arrays of any library
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(
            f"the reward {name!r} gave {type(result).__name__} and not a list of numbers "
            f"(for {len(completions)} completions, the first: {shorten(completions[0])})"
        )
    if len(result) != len(completions):
        raise _WrongLength(f"gave {len(result)} values for {len(completions)} completions")
    numbers: list[float | None] = []
    for value, completion in zip(result, completions, strict=True):
        try:
            number = _number(value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(
                f"the reward {name!r} gave {shorten(value)} ({type(value).__name__}) and not a "
                f"finite number or None for the completion {shorten(completion)}"
            ) from None
        numbers.append(number)
    return numbers


def _number(value: Any) -> float | None:
    """One value as a float that float32 holds; TypeError or ValueError if it is none."""
    if value is None:
        return None
    if getattr(value, "ndim", 0) or not hasattr(value, "__float__"):
        raise TypeError
    number = float(value)
    if math.isnan(number):
        return None
    if abs(number) > _FLOAT32_MAX:
        raise ValueError
    return number


def shorten(value: Any, limit: int = 200) -> str:
    """Show a value on one line, its middle left out when it is long.

    >>> shorten("abcdefghijklmnopqrstuvwxyz", limit=12)
    "'abcd ... wxyz'"
    """
    if isinstance(value, str) and len(value) > limit:
        edge = limit // 3
        value = f"{value[:edge]} ... {value[-edge:]}"
        return repr(value)
    shown = repr(value)
    return shown if len(shown) <= 2 * limit else f"{shown[:limit]} ... {shown[-limit // 2 :]}"


def _blame(
    function: Reward,
    name: str,
    batch: Mapping[str, Sequence[Any]],
    extras: Mapping[str, Any],
    error: Exception,
) -> RewardError:
    """Find the completion that a reward fails on, by asking for each alone, and say so.

    The run ends here anyway, so the search may call the reward again; it logs nowhere.
    """
    if isinstance(error, RewardError):
        return error
    if isinstance(error, _WrongLength):
        what = str(error)
    else:
        what = f"raised {type(error).__name__}({shorten(str(error)) if str(error) else ''})"
    quiet = {**extras, "log_metric": _ignore, "log_extra": _ignore}
    completions = batch["completions"]
    deadline = time.monotonic() + _BLAME_SECONDS
    for i, completion in enumerate(completions):
        if time.monotonic() > deadline:
            break
        alone = {key: [values[i]] for key, values in batch.items()}
        try:
            result = function(**_arguments(function, name, alone, quiet))
            if inspect.isawaitable(result):
                [result] = _run([result])
            if isinstance(result, Exception):
                raise result
            _numbers(result, [completion], name)
        except Exception:
            return RewardError(
                f"the reward {name!r} {what}, for completion {i} of {len(completions)}: "
                f"{shorten(completion)}"
            )
    return RewardError(
        f"the reward {name!r} {what}, for {len(completions)} completions together, the first: "
        f"{shorten(completions[0])}"
    )


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results or exceptions of awaitables that run at once, from any thread, loop or no loop."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*awaitables, return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(gather(), _event_loop())
    try:
        return future.result()
    except BaseException:  # an interrupt: stop what still runs
        future.cancel()
        raise


_loops: list[tuple[threading.Thread, asyncio.AbstractEventLoop]] = []
_loops_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process for rewards, in a thread of its own.

    It lives on between calls, since the clients that async rewards keep are bound to their
    loop; and as it is not the caller's, a notebook's running loop does not matter.
    """
    with _loops_lock:
        if not _loops or not _loops[0][0].is_alive():  # not alive: this process was forked
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="rewards", daemon=True)
            thread.start()
            _loops[:] = [(thread, loop)]
        return _loops[0][1]
