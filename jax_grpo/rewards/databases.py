"""Databases that differ, so that a query that is right by luck on one is found out."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from pathlib import Path


def thin(
    source: str, target: str, *, share: float = 0.1, least: int = 50, seed: int = 0
) -> dict[str, int]:
    """Copy a SQLite database and drop some rows, with all that refers to them.

    Counts, sums and extremes then differ from the source's, while every declared foreign key
    still finds its row. What the schema does not declare may break, such as a total that is
    stored beside its parts: look at the copies before they decide rewards.

    Args:
        source: the database.
        target: the file to make.
        share: the probability that a row is dropped for its own sake.
        least: a table of fewer rows keeps them: it would take most of the others' along.
        seed: which rows.

    Returns:
        For each table how many rows are left.

    Raises:
        ValueError: when there is no source, or there is a target.
    """
    if os.path.exists(target) or not os.path.isfile(source):
        raise ValueError(f"copies {source} to {target}: one must be there and the other not")
    uri = Path(source).absolute().as_uri() + "?mode=ro"
    draw = random.Random(seed)
    with (
        contextlib.closing(sqlite3.connect(uri, uri=True)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
        named = new.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
            " ESCAPE '\\' ORDER BY name"
        ).fetchall()
        tables = {name: '"' + name.replace('"', '""') + '"' for (name,) in named}
        broken = set(new.execute("PRAGMA foreign_key_check"))  # already: let them be
        for table in tables.values():
            rows = new.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall()
            if len(rows) >= least:
                chosen = [row for row in rows if draw.random() < share]
                new.executemany(f"DELETE FROM {table} WHERE rowid = ?", chosen)
        while orphans := set(new.execute("PRAGMA foreign_key_check")) - broken:
            for name, row, *_ in orphans:
                new.execute(f"DELETE FROM {tables[name]} WHERE rowid = ?", (row,))
        new.commit()
        new.execute("VACUUM")
        return {
            name: new.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for name, table in tables.items()
        }
