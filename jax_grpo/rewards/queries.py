"""What the workers of `sql.py` run: a policy's query and the gold, on the same SQLite files.

A query that a policy wrote gets a connection of its own, which reads one file that must not
change meanwhile, and through which nothing else can be done: an authorizer allows reading the
file's tables and calling listed functions, and nothing that it does not know. Limits bound
lengths, depth and memory, and a progress handler keeps the time. Calls in C that take long do
not reach it: those end with the process, killed by the parent. What this is not is a sandbox:
who finds a hole in SQLite itself has the rights of the user that trains.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.rewards.results import Gold, Row, difference, plain, tie_ends

_MAX_BYTES = 1 << 23  # of one result, where a number has 8
_HEAP_BYTES = 256 << 20  # that SQLite may allocate
_STEPS = 1000  # of SQLite's machine between two looks at the clock
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 20,  # bytes of a text, a blob or a row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1 << 16,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# Tables beside those of the file, and pragmas, as tables. The schema may be read: it says nothing
# about the gold, and some questions ask for it. dbstat and sqlite_stmt tell about the process.
_TABLES = {"sqlite_master", "sqlite_schema", "json_each", "json_tree"}
_PRAGMAS = {"table_info", "foreign_key_list"}
# Neither random() nor randomblob(), whose queries have no one result, nor what tells about the
# connection or acts on it, such as changes() and load_extension().
_FUNCTIONS = frozenset(
    """
    abs char coalesce concat concat_ws format glob hex if ifnull iif instr length like likelihood
    likely lower ltrim max min nullif octet_length printf quote replace round rtrim sign soundex
    substr substring trim typeof unhex unicode unlikely upper zeroblob
    avg count group_concat median string_agg sum total
    cume_dist dense_rank first_value lag last_value lead nth_value ntile percent_rank rank
    row_number
    current_date current_time current_timestamp date datetime julianday strftime time timediff
    unixepoch
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10
    log2 mod pi pow power radians sin sinh sqrt tan tanh trunc
    -> ->> json json_array json_array_length json_extract json_group_array json_group_object
    json_insert json_object json_patch json_quote json_remove json_replace json_set json_type
    json_valid
    """.split()
)
_TOKEN = re.compile(
    r"""(?P<skip> \s+ | --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<quoted> '(?:[^']|'')*+(?:'|\Z) | "(?:[^"]|"")*+(?:"|\Z) | `(?:[^`]|``)*+(?:`|\Z)
                | \[[^\]]*(?:\]|\Z) )
    | (?P<word> [^\W\d][\w$]* )
    | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)


class Stopped(Exception):
    """A query without a result: a status word, and one line that says why."""


class Query(NamedTuple):
    """One SELECT, WITH or VALUES statement."""

    text: str  # without the semicolon and comments at its end
    tie_break: int | None  # where further terms of the outermost ORDER BY go, if it has one


def judge(item: dict[str, Any]) -> tuple[str, str]:
    """Compare the candidate's results with the gold's, on all databases.

    Args:
        item: `gold` and `candidate`, texts, or for the candidate what is to be returned instead,
            once the gold is known to be good; `databases`, absolute paths; `ordered`,
            `tolerance`, `max_rows` and `seconds` as of `sql.execution_match`.

    Returns:
        A status as of `sql.execution_match`, or `bad_gold`, and one line that says why.
    """
    began = time.monotonic()
    paths, max_rows, seconds = item["databases"], item["max_rows"], item["seconds"]
    try:
        share = seconds / 2 / len(paths)
        golds = [gold_result(p, item["gold"], item["ordered"], max_rows, share) for p in paths]
    except Stopped as stop:
        status, why = stop.args
        return ("gold_timeout" if status == "timeout" else "bad_gold"), why
    if not any(value is not None for gold in golds for row in gold.rows for value in row):
        return "empty_gold", "the gold result has no value on any database"
    if not isinstance(item["candidate"], str):
        status, why = item["candidate"]
        return status, why
    try:
        candidate = parse(item["candidate"])
        for path, gold in zip(paths, golds, strict=True):
            most = len(gold.rows) + 1  # with one more it is wrong already
            columns, rows = run(path, candidate.text, began + seconds, most)
            why = difference(gold, columns, rows, item["tolerance"])
            if why:
                return "wrong", why if len(paths) == 1 else f"{why}, on {Path(path).name}"
    except Stopped as stop:
        status, why = stop.args
        return status, why
    return "right", "the same result"


@functools.lru_cache(maxsize=16)  # the completions of one prompt come one after another
def gold_result(path: str, text: str, ordered: bool, max_rows: int, seconds: float) -> Gold:
    """The result of a gold query, with the order that it asks for.

    Rows that tie under its ORDER BY may come in any order. Which ones tie, also when what it
    orders by is not selected, the database says: sorted further by all columns up and then
    down, rows that tie are reversed and others stay where they are. Where a LIMIT cuts through
    a tie, the gold's own choice counts.

    Raises:
        Stopped: when it has none, of at most `max_rows`, in `seconds`.
    """
    deadline = time.monotonic() + seconds
    query = parse(text)
    columns, rows = run(path, query.text, deadline, max_rows + 1)
    if len(rows) > max_rows:
        raise Stopped("too_large", f"more than {max_rows} rows")
    if query.tie_break is None or not ordered:
        return Gold(columns, rows, [len(rows)])
    head, tail = query.text[: query.tie_break], query.text[query.tie_break :]
    up, down = (
        run(path, f"{head} {terms} {tail}", deadline, max_rows)[1]
        for terms in (
            "".join(f", {c + 1} COLLATE BINARY {direction}" for c in range(columns))
            for direction in ("ASC", "DESC")
        )
    )
    return Gold(columns, rows, tie_ends(up, down))


def parse(text: str) -> Query:
    """Check that a text is one query, and find the end of its outermost ORDER BY.

    Only the outermost counts: neither one in parentheses (a subquery, a window) nor one in a
    string or a comment.

    Raises:
        Stopped: when it is anything else than one SELECT, WITH or VALUES.

    >>> parse("SELECT a FROM t ORDER BY b LIMIT 3; -- three")
    Query(text='SELECT a FROM t ORDER BY b LIMIT 3', tie_break=27)
    """
    words: list[tuple[str, int]] = []  # those outside of parentheses, and where they begin
    depth = end = 0
    closed = False
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "skip":
            continue
        if token[0] == ";":
            closed = True
            continue
        if closed:
            raise Stopped("refused", "more than one statement")
        end = token.end()
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token.lastgroup == "word" and not depth:
            words.append((token[0].upper(), token.start()))
    if not words or words[0][0] not in ("SELECT", "WITH", "VALUES"):
        raise Stopped("refused", "not a SELECT, WITH or VALUES statement")
    if "\0" in text:
        raise Stopped("refused", "a NUL character")
    names = [word for word, _ in words]
    orders = any(pair == ("ORDER", "BY") for pair in zip(names, names[1:], strict=False))
    limit = next((start for word, start in words if word == "LIMIT"), end)
    return Query(text[:end], limit if orders else None)


def run(path: str, text: str, deadline: float, most: int) -> tuple[int, list[Row]]:
    """Run one query on one file, read-only.

    Args:
        path: of the database, absolute.
        text: one statement.
        deadline: by `time.monotonic`.
        most: rows to fetch; what would follow is left.

    Returns:
        The number of columns, and the rows.

    Raises:
        Stopped: when it fails, is refused, or is too large.
    """
    denied: list[str] = []
    try:
        with contextlib.closing(connect(path, denied)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
            cursor = connection.execute(text)
            if cursor.description is None:
                raise Stopped("refused", "a statement without a result")
            rows, size = [], 0
            for row in cursor:
                rows.append(tuple(plain(value) for value in row))
                size += sum(len(v) if isinstance(v, str | bytes) else 8 for v in row)
                if size > _MAX_BYTES:
                    raise Stopped("too_large", f"a result of more than {_MAX_BYTES} bytes")
                if len(rows) == most:
                    break
            return len(cursor.description), rows
    except MemoryError:
        raise Stopped("too_large", f"more than {_HEAP_BYTES} bytes of memory") from None
    except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
        if denied:
            raise Stopped("refused", f"not allowed: {denied[0]}") from None
        code: int = getattr(error, "sqlite_errorcode", 0)
        status = {
            sqlite3.SQLITE_INTERRUPT: "timeout",
            sqlite3.SQLITE_TOOBIG: "too_large",
        }.get(code, "error")
        raise Stopped(status, " ".join(str(error).split())[:200]) from None


def connect(path: str, denied: list[str]) -> sqlite3.Connection:
    """Open a file for reading and for nothing else.

    Args:
        path: absolute.
        denied: where the authorizer says what it has denied.

    Raises:
        sqlite3.Error: when it is no database.
    """
    uri = Path(path).as_uri() + "?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        for setting in (
            f"hard_heap_limit={_HEAP_BYTES}",
            "query_only=on",
            "temp_store=memory",  # large sorts would make files
            "trusted_schema=off",
        ):
            connection.execute(f"PRAGMA {setting}").fetchall()
        if sys.version_info >= (3, 12):
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE)
        named = connection.execute("SELECT name FROM sqlite_master").fetchall()
        tables = {name for (name,) in named} | _TABLES | {f"pragma_{name}" for name in _PRAGMAS}
        # Once used they exist; to make them later would need the right to write.
        for table in ("json_each", "json_tree", *(f"pragma_{name}" for name in _PRAGMAS)):
            connection.execute(f"SELECT 1 FROM {table}('[]')").fetchall()
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.text_factory = lambda raw: raw.decode(errors="surrogateescape")

        def authorize(action: int, what: str | None, name: str | None, *_: str | None) -> int:
            rules = {
                sqlite3.SQLITE_SELECT: ("selecting", True),
                sqlite3.SQLITE_RECURSIVE: ("recursion", True),
                sqlite3.SQLITE_FUNCTION: (f"function {name}", str(name).lower() in _FUNCTIONS),
                # A table of which no column is read may be one of the query's own.
                sqlite3.SQLITE_READ: (f"table {what}", what in tables or name == ""),
                sqlite3.SQLITE_PRAGMA: (f"pragma {what}", what in _PRAGMAS),
            }
            action_name, allowed = rules.get(action, (f"writing {what}", False))
            if not allowed:
                denied.append(action_name)
            return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

        connection.set_authorizer(authorize)
    except BaseException:
        connection.close()
        raise
    return connection
