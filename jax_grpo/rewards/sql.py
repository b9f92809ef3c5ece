"""SQL: does a query give the gold query's result, on SQLite databases?

The text of a query means nothing here, only its result does. One database lets a query be right
by luck, as `SELECT 17` is where the answer is 17: name several that differ, for example by
`databases.thin`, and a query must be right on all. Everything that a policy wrote runs in worker
processes, read-only: `queries.py` says what is allowed, `results.py` when results agree.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.rewards.contract import log_statuses, shorten, text_of
from jax_grpo.rewards.texts import after_thinking, code_in, fenced_blocks
from jax_grpo.rewards.workers import Pool

_MAX_JSON = 12_000  # bytes of a query, escaped: two and the paths fit what a worker takes
_GRACE = 0.5  # seconds that a worker has to stop by itself before it is killed


def execution_match(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    query: Sequence[Any],
    database: Sequence[Any],
    *,
    reward: float = 1.0,
    ordered: bool = True,
    tolerance: float = 1e-10,
    seconds: float = 5.0,
    max_rows: int = 10_000,
    root: str = "",
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Reward a completion whose SQL query gives the gold query's result on every database.

    The query is the completion's last fenced block of `sql` (or `sqlite`), else the last one of
    no language, else, where nothing is fenced, the whole text; thinking is left out. It must be
    one SELECT, WITH or VALUES. Rows may come in any order, unless the outermost part of the gold
    query has an ORDER BY; then only its ties may. Columns count by place and not by name.

    Logs the statuses `right`, `wrong`; `none` (no query), `refused` (not allowed), `error` (of
    SQLite), `timeout`, `too_large`, `died` (the worker did), all worth 0; and those without a
    value: `no_gold`, `empty_gold` (its result has no value on any database, so that every
    query without a result would be right) and `gold_timeout` (it took half of the seconds).

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        query: n gold queries; where there is none (None or empty) the reward is None.
        database: n paths of SQLite files, or lists of several. They must not change during
            the run; their virtual tables, such as full-text indexes, cannot be read.
        reward: what a right query is worth; another is worth 0.
        ordered: whether an order that the gold asks for counts.
        tolerance: between numbers that are not whole, relative or absolute.
        seconds: for one completion, on all its databases, gold query included.
        max_rows: that a gold result may have.
        root: the directory that the paths are relative to; by default the working directory.
        log_metric: see `contract.log_statuses`.
        log_extra: the same.
        **columns: not looked at.

    Raises:
        ValueError: when a gold query fails or a database is not there, with the row.
    """
    if not tolerance >= 0 or not seconds > 0 or max_rows < 1:
        raise ValueError("tolerance must be 0 or more, seconds above 0 and max_rows 1 or more")
    settings = {"ordered": ordered, "tolerance": tolerance}
    settings |= {"seconds": seconds, "max_rows": max_rows}
    verdicts: list[tuple[str, str]] = [("no_gold", "the row has no gold query")] * len(completions)
    rows, items = [], []
    for i, (completion, gold, paths) in enumerate(zip(completions, query, database, strict=True)):
        if not isinstance(gold, str | float | None):
            raise ValueError(f"row {i}: a gold query is text, not {shorten(gold)}")
        if isinstance(gold, str) and gold.strip():
            paths = _existing(paths, root, i)
            candidate = _candidate(text_of(completion))
            item = {"gold": gold, "candidate": candidate, "databases": paths, **settings}
            if len(json.dumps({**item, "candidate": ""})) > 1.5 * _MAX_JSON:
                raise ValueError(
                    f"row {i}: too long, with its paths, for a worker: {shorten(gold)}"
                )
            rows.append(i)
            items.append(item)
    for i, answer in zip(rows, _pool(seconds + _GRACE).map(items), strict=True):
        status, why = answer.value if answer.status == "done" else answer
        if status == "bad_gold":
            raise ValueError(f"row {i}: the gold query fails ({why}): {shorten(query[i])}")
        verdicts[i] = "error" if status == "raised" else status, why
    statuses = [status for status, _ in verdicts]
    log_statuses("execution_match", statuses, [why for _, why in verdicts], log_metric, log_extra)
    worth = {"right": float(reward), "no_gold": None, "empty_gold": None, "gold_timeout": None}
    return [worth.get(status, 0.0) for status in statuses]


@functools.cache
def _pool(seconds: float) -> Pool:
    return Pool("jax_grpo.rewards.queries:judge", seconds=seconds)


def _existing(paths: Any, root: str, row: int) -> list[str]:
    """The absolute paths of a row's databases."""
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    fits = isinstance(paths, list | tuple) and all(isinstance(p, str | os.PathLike) for p in paths)
    if not fits or not paths:
        raise ValueError(f"row {row}: a database is a path or a list of paths, not {paths!r}")
    found = [os.path.abspath(os.path.join(root, path)) for path in paths]
    for path in found:
        if not os.path.isfile(path):
            raise ValueError(f"row {row}: no such database: {path}")
    return found


def _candidate(text: str) -> str | tuple[str, str]:
    """The query of a completion, or the status and why there is none."""
    query = query_in(text)
    if query is None:
        return "none", "no fenced block, and more than a query without one"
    if len(json.dumps(query)) > _MAX_JSON:
        return "too_large", f"a query of {len(query)} characters"
    return query


def query_in(text: str) -> str | None:
    r"""The query that a completion hands in, as `execution_match` finds it.

    >>> query_in("I count.\n```sql\nSELECT count(*) FROM t;\n```\nThat is all.")
    'SELECT count(*) FROM t;\n'
    >>> query_in("SELECT 1")
    'SELECT 1'
    """
    code = code_in(text, ("sql", "sqlite", "sqlite3"))
    if code is not None or fenced_blocks(text):
        return code
    said = after_thinking(text).strip()
    return said if said[:6].upper().startswith(("SELECT", "WITH", "VALUES")) else None
