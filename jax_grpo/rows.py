"""Rows of data: from files, from the hub, or from a function.

A data set is a list of dicts in memory: a prompt is hundreds of bytes, so a million of them fit.

Files on disk are read here and not through `datasets`, which asks the network even for them,
copies them into a cache, and guesses a type for each column (it refuses `1` next to `"1/2"`).
"""

from __future__ import annotations

import csv
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.rewards.contract import shorten
from jax_grpo.rewards.naming import import_object

Row = dict[str, Any]


def load_rows(
    path: str | None = None,
    source: str | None = None,
    *,
    columns: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Row]:
    """Load the rows of a data set, from exactly one of a path and a source.

    Args:
        path: a .json, .jsonl, .csv or .parquet file; a directory or hub id that
            `datasets.load_dataset` knows.
        source: dotted path of a function that returns rows.
        columns: names of columns that must be there.
        rename: new names of columns by their old ones, such as {"question": "prompt"}.
        **kwargs: for the function of `source`, or for `load_dataset` (`split` is "train" if not
            given). A file takes none.

    Raises:
        ValueError: one line, when there is no such data, it has no rows or lacks a column.
    """
    if (path is None) == (source is None):
        raise ValueError("data come from a path or from a source: give one of the two")
    if source is not None:
        name, rows = source, _call_source(source, kwargs)
    else:
        assert path is not None
        name, rows = path, _read(path, kwargs)
    if not rows:
        raise ValueError(f"{name}: no rows")
    for old in rename or {}:
        if old not in rows[0]:
            raise ValueError(f"{name}: no column {old!r} to rename; it has: {', '.join(rows[0])}")
    if rename:
        rows = [{rename.get(key, key): value for key, value in row.items()} for row in rows]
    for i, row in enumerate(rows):
        for column in columns:
            if column not in row:
                raise ValueError(
                    f"{name}: row {i} has no column {column!r}; it has: {', '.join(row) or 'none'}"
                )
    return rows


def _call_source(source: str, kwargs: Mapping[str, Any]) -> list[Row]:
    """Rows of a function that makes them."""
    function = import_object(source)
    signature = inspect.signature(function)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise ValueError(f"{source}: {error}; it takes: {takes}") from None
    return _as_rows(function(**kwargs), source)


def _as_rows(values: Any, name: str) -> list[Row]:
    """Check that values are rows."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ValueError(f"{name}: not a list of rows but {type(values).__name__}")
    rows = list(values)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{name}: row {i} is not an object but {shorten(row)}")
    return [dict(row) for row in rows]


def _read(path: str, kwargs: dict[str, Any]) -> list[Row]:
    """Rows of a local file, or of what `datasets` finds under the name."""
    file = Path(path).expanduser()
    readers = {".json": _read_json, ".jsonl": _read_json, ".csv": _read_csv}
    readers[".parquet"] = _read_parquet
    reader = readers.get(file.suffix.lower())
    if reader is None and not file.is_file() and not path.startswith((".", "/", "~")):
        return _read_hub(path, kwargs)
    if reader is None and file.is_dir():
        return _read_hub(str(file), kwargs)
    if not file.is_file():
        raise ValueError(f"no such data file: {path}")
    if reader is None:
        raise ValueError(f"{path}: not one of the known kinds: {', '.join(readers)}")
    if kwargs:
        raise ValueError(f"{path}: a data file takes no options, but got: {', '.join(kwargs)}")
    try:
        return reader(file)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None


def _read_json(file: Path) -> list[Row]:
    """An array of objects, or one object per line; blank lines are passed over."""
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        try:
            return _as_rows(json.loads(text), str(file))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}: line {error.lineno} is not JSON ({error.msg})") from None
    rows = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}: line {number} is not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{file}: line {number} is not an object but {shorten(row)}")
        rows.append(row)
    return rows


def _read_csv(file: Path) -> list[Row]:
    """A table with a header; every value stays text, so that "007" does."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            rows: list[Row] = list(reader)
        except csv.Error as error:
            raise ValueError(f"{file}: line {reader.line_num}: {error}") from None
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(f"{file}: row {number} has not as many values as the header names")
    return rows


def _read_parquet(file: Path) -> list[Row]:
    """A Parquet file, by way of Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: {str(error).splitlines()[0]}") from None


def _read_hub(path: str, kwargs: Mapping[str, Any]) -> list[Row]:
    """A data set of the hub, or a directory in its layout."""
    import datasets  # here, as it takes seconds

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(path, **{"split": "train", **kwargs})
    except Exception as error:  # it raises a dozen kinds, from those of other libraries too
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"neither a data file nor a data set that can be loaded: {path} ({reason})"
        ) from error
    return _as_rows(data, path)
