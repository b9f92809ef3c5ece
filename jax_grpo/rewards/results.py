"""When two results of SQL queries agree: as multisets, in order where the gold orders."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Row = tuple[Any, ...]  # of None, int, float, str and bytes


class Gold(NamedTuple):
    """The result of the data's query."""

    columns: int
    rows: list[Row]
    ends: list[int]  # of the blocks of rows, in order; the rows of one may come in any order


def plain(value: Any) -> Any:
    """A float that is a whole number as that, so that tolerance is for fractions only.

    >>> plain(2.0), plain(2.5), plain("2.0")
    (2, 2.5, '2.0')
    """
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def tie_ends(up: Sequence[Row], down: Sequence[Row]) -> list[int]:
    """Where blocks of ties end: after as many rows, both orders have had the same ones.

    >>> tie_ends([(1,), (2,), (3,), (5,)], [(1,), (3,), (2,), (6,)])
    [1, 3, 4]
    """
    ends = []
    ahead: collections.Counter[Row] = collections.Counter()
    for k, pair in enumerate(zip(up, down, strict=True), 1):
        for row, step in zip(pair, (1, -1), strict=True):
            ahead[row] += step
            if not ahead[row]:
                del ahead[row]
        if not ahead or k == len(up):
            ends.append(k)
    return ends


def difference(gold: Gold, columns: int, rows: Sequence[Row], tolerance: float) -> str:
    """What is wrong with a result, in one line; empty when nothing is.

    NULL equals NULL alone, text and numbers and blobs are never equal, whole numbers are equal
    exactly and other numbers within the tolerance, relative or absolute; a chain of numbers,
    each within it of the next, is one number. So equality is transitive, and multisets can be
    compared by counting.

    >>> difference(Gold(1, [(0.3,), (2,)], [2]), 1, [(2,), (0.1 + 0.2,)], 1e-9)
    ''
    """
    if columns != gold.columns:
        return f"{columns} columns and not {gold.columns}"
    if len(rows) != len(gold.rows):
        more = "or more " if len(rows) > len(gold.rows) else ""
        return f"{len(rows)} {more}rows and not {len(gold.rows)}"
    values = zip(*gold.rows, *rows, strict=True)
    merged = [_merge(column, tolerance) for column in values]
    wanted, given = (
        [tuple(m.get(value, value) for m, value in zip(merged, row, strict=True)) for row in part]
        for part in (gold.rows, rows)
    )
    if collections.Counter(wanted) != collections.Counter(given):
        return "other values"
    start = 0
    for end in gold.ends:
        if collections.Counter(wanted[start:end]) != collections.Counter(given[start:end]):
            return f"the right rows in another order, from row {start + 1} on"
        start = end
    return ""


def _merge(column: Sequence[Any], tolerance: float) -> dict[Any, Any]:
    """For each number of a column the least one of its chain."""
    numbers = sorted({value for value in column if isinstance(value, int | float)})
    merged: dict[Any, Any] = {}
    last: Any = None
    for number in numbers:
        exact = last is None or isinstance(last, int) and isinstance(number, int)
        near = not exact and math.isclose(last, number, rel_tol=tolerance, abs_tol=tolerance)
        merged[number] = merged[last] if near else number
        last = number
    return merged
