"""Hostile completions for `execution_match`, and odd ones that are right.

The gold is always the same count. Nothing here could harm the machine: what takes time or memory
is stopped by limits on a worker process, and files are named in the test's own directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

import pytest

from jax_grpo.rewards import sql
from jax_grpo.rewards.sql import execution_match

CHINOOK = Path(__file__).parents[1] / "fixtures" / "chinook.sqlite"
GOLD = "SELECT COUNT(*) FROM Genre"  # 25
SECONDS = 0.5

# Name: query, and the statuses that it may end with. %s is the test's directory.
HOSTILE = {
    "commit": ("COMMIT", "refused"),
    "begin": ("BEGIN", "refused"),
    "savepoint": ("SAVEPOINT s", "refused"),
    "empty": ("SELECT 1 WHERE 0", "wrong"),
    "nothing": ("", "refused"),
    "null": ("SELECT NULL", "wrong"),
    "text": ("SELECT '25'", "wrong"),
    "attach": ("ATTACH DATABASE '%s/evil.db' AS e", "refused"),
    "attach after": ("SELECT 25; ATTACH DATABASE '%s/evil.db' AS e", "refused"),
    "vacuum into": ("VACUUM INTO '%s/evil.db'", "refused"),
    "two statements": ("SELECT 1; SELECT 25", "refused"),
    "hidden by a comment": ("SELECT 25 /* ; */; DROP TABLE Genre -- */", "refused"),
    "unclosed comment": ("SELECT 24 /* + 1", "wrong"),
    "insert": ("INSERT INTO Genre VALUES (26, 'x') RETURNING 25", "refused"),
    "delete": ("WITH a AS (SELECT 1) DELETE FROM Genre RETURNING 25", "refused"),
    "update": ("WITH a AS (SELECT 1) UPDATE Genre SET Name = 'x' RETURNING 25", "refused"),
    "insert behind with": (
        "WITH a AS (SELECT 1) INSERT INTO Genre VALUES (99, '') RETURNING 25",
        "refused",
    ),
    "temporary table": ("CREATE TEMP TABLE t AS SELECT 25", "refused"),
    "explain": ("EXPLAIN SELECT COUNT(*) FROM Genre", "refused"),
    "pragma": ("PRAGMA writable_schema = ON", "refused"),
    "pragma function": ("SELECT * FROM pragma_writable_schema", "refused error"),
    "database list": ("SELECT file FROM pragma_database_list", "refused"),
    "pragma count": ("SELECT COUNT(*) * 25 FROM pragma_database_list", "refused"),
    "statements": ("SELECT sql FROM sqlite_stmt", "refused error"),
    "pages": ("SELECT * FROM dbstat", "refused error"),
    "load_extension": ("SELECT load_extension('%s/evil.so')", "refused"),
    "tokenizer": ("SELECT fts3_tokenizer('simple')", "refused"),
    "tokenizer table": ("SELECT * FROM fts3tokenize", "refused error"),
    "readfile": ("SELECT readfile('/etc/hostname')", "error"),
    "writefile": ("SELECT writefile('%s/evil', 'x')", "error"),
    "edit": ("SELECT edit('x', 'true')", "error"),
    "random": ("SELECT abs(random() % 50)", "refused"),
    "connection": ("SELECT changes() + 25", "refused"),
    "parameters": ("SELECT ?", "error"),
    "nul": ("SELECT 25\0 + 1", "refused"),
    "homoglyph": ("SEL\u0415CT 25", "refused"),
    "full width": ("SELECT COUNT(*) FROM Genre WHERE GenreId > \uff10", "error"),
    "right to left": ("SELECT 25 \u202e + 1", "error"),
    "lone surrogate": ("SELECT '\ud800'", "error"),
    "a megabyte": ("SELECT 25 -- " + "x" * (1 << 20), "too_large"),
    "a megabyte of quotes": ("SELECT " + "'" * (1 << 20), "too_large"),
    "quotes": ("SELECT " + "[" * 10_000, "error"),
    "many unions": (" UNION ".join(["SELECT 25"] * 100_000), "too_large"),
    "some unions": (" UNION ".join(["SELECT 25"] * 700), "error"),
    "parentheses": ("SELECT " + "(" * 5000 + "25" + ")" * 5000, "error"),
    "depth": ("SELECT " + "-" * 3000 + "25", "error wrong"),  # a comment, of course
    "sum": ("SELECT " + "1+" * 5000 + "1", "error"),
    "nots": ("SELECT " + "NOT " * 2900 + "25", "error"),
    "many columns": ("SELECT " + ",".join("1" * 2000), "error"),
    "recursion": (
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r",
        "timeout",
    ),
    "recursive rows": (
        "WITH RECURSIVE r(x) AS (SELECT 25 UNION ALL SELECT 25 FROM r) SELECT x FROM r",
        "wrong",
    ),
    "recursive memory": (
        "WITH RECURSIVE r(x) AS (SELECT hex(zeroblob(400000)) UNION ALL SELECT x || '' FROM r)"
        " SELECT COUNT(DISTINCT x || random) FROM r, (SELECT 1 AS random)",
        "timeout too_large",
    ),
    "distinct memory": (
        "WITH RECURSIVE r(n, x) AS (SELECT 1, zeroblob(500000) UNION"
        " SELECT n + 1, zeroblob(500000) FROM r) SELECT COUNT(*) FROM r",
        "timeout too_large",
    ),
    "cartesian": ("SELECT COUNT(*) FROM Track a, Track b, Track c, Track d", "timeout"),
    "sorted cartesian": ("SELECT a.Name FROM Track a, Track b, Track c ORDER BY 1", "timeout"),
    "zeroblob": ("SELECT length(zeroblob(1000000000))", "too_large"),
    "hex of zeroblob": ("SELECT hex(zeroblob(1000000000))", "too_large"),
    "replace": (
        "SELECT length(replace(hex(zeroblob(500000)), '0', hex(zeroblob(500000))))",
        "too_large",
    ),
    "printf": ("SELECT length(printf('%%.*c', 1000000000, 'x'))", "timeout too_large"),
    "printf of width": ("SELECT printf('%%1000000000d', 1)", "wrong too_large"),
    "group_concat": (
        "SELECT group_concat(hex(zeroblob(10000))) FROM Track a, Track b",
        "too_large",
    ),
    "json": ("SELECT json_group_array(a.Name) FROM Track a, Track b, Track c", "too_large timeout"),
    "json depth": (
        "SELECT json(replace(hex(zeroblob(200000)), '0', '['))",
        "error",
    ),
    "like": (
        "SELECT hex(zeroblob(500000)) LIKE '" + "%%0" * 300 + "1'",
        "timeout wrong",
    ),
    "search in C": (
        "SELECT instr(hex(zeroblob(499999)), hex(zeroblob(200000)) || '1')",
        "timeout",
    ),
    "parsing": (  # doubles with each name, before anything runs
        "WITH c0 AS (SELECT 1 AS x), "
        + ", ".join(f"c{i + 1} AS (SELECT c{i}.x FROM c{i}, c{i} AS y)" for i in range(24))
        + " SELECT COUNT(*) FROM c24",
        "error timeout too_large",
    ),
}  # fmt: skip

# Odd, and right.
HONEST = {
    "lower case": "select count(*) from genre",
    "no spaces": "SELECT(COUNT(*))FROM[Genre]",
    "semicolons": "SELECT COUNT(*) FROM Genre;;",
    "comments": "-- how many?\nSELECT /* all */ COUNT(*) FROM Genre -- ; DROP TABLE Genre",
    "a comment at the end": "SELECT COUNT(*) FROM Genre; /* COMMIT",
    "forbidden words in text": "SELECT COUNT(*) FROM Genre WHERE Name <> '; ATTACH; random()'",
    "forbidden words as names": 'SELECT COUNT(*) AS "COMMIT" FROM Genre AS random',
    "values": "VALUES ((SELECT COUNT(*) FROM Genre))",
    "a float": "SELECT total(1) FROM Genre",
    "an order": "SELECT COUNT(*) FROM Genre ORDER BY 1 LIMIT 1",
    "a window": "SELECT DISTINCT COUNT(*) OVER () FROM Genre",
    "recursion": (
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r WHERE x < 25)"
        " SELECT MAX(x) FROM r"
    ),
    "a hundred thousand steps": (
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 100000)"
        " SELECT COUNT(*) / 4000 FROM r"
    ),
    "json": "SELECT json_array_length(json_group_array(Name)) FROM Genre",
    "json_each": (
        "SELECT COUNT(*) FROM json_each((SELECT json_group_array(GenreId) FROM Genre))"
    ),
    "a table of its own": "WITH dbstat AS (SELECT * FROM Genre) SELECT COUNT(*) FROM dbstat",
    "the schema": "SELECT COUNT(*) FROM Genre, sqlite_schema AS s WHERE s.name = 'Genre'",
    "a pragma": "SELECT COUNT(*) + 23 FROM pragma_table_info('Genre')",
    "long": f"SELECT COUNT(*) FROM Genre WHERE GenreId IN {tuple(range(1000))}",
    "many conditions": "SELECT COUNT(*) FROM Genre WHERE 1" + " AND 1" * 300,
    "large text": "SELECT length(hex(zeroblob(400000))) / 32000 FROM Genre LIMIT 1",
    "emoji": "SELECT COUNT(*) AS '\U0001f3b5' FROM Genre WHERE Name <> '\U0001f3b5'",
    "Windows lines": "SELECT COUNT(*)\r\nFROM Genre\r\n;\r\n",
}  # fmt: skip


def judge(*queries, text="```sql\n{}\n```"):
    extras = {}
    values = execution_match(
        ["?"] * len(queries),
        [text.replace("{}", query) for query in queries],
        [GOLD] * len(queries),
        [str(CHINOOK)] * len(queries),
        seconds=SECONDS,
        log_extra=extras.__setitem__,
    )
    return values, extras["execution_match/status"]


def digest():
    return hashlib.sha256(CHINOOK.read_bytes()).hexdigest()


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Worker processes that have started: only then does a deadline begin."""
    assert judge(*[GOLD] * 8)[0] == [1.0] * 8
    yield
    sql._pool(SECONDS + sql._GRACE).close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_queries_score_nothing_in_time(name, tmp_path):
    query, statuses = HOSTILE[name]
    before, files = digest(), sorted(CHINOOK.parent.iterdir())
    began = time.monotonic()
    values, found = judge(query.replace("%s", str(tmp_path)).replace("%%", "%"))
    assert time.monotonic() - began < SECONDS + 1.0
    assert values == [0.0] and found[0] in statuses.split()
    assert digest() == before and sorted(CHINOOK.parent.iterdir()) == files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "<think>```sql\nSELECT 25\n```</think>",
        "<think>```sql\nSELECT 25\n```",
        "```sql\nSELECT 25",
        "```sql\nSELECT 25\n```\n```sql\nSELECT 24\n```",
        "```python\nSELECT 25\n```",
        "The answer is SELECT 25",
        "```sql\n" * 100_000,
        "`" * (1 << 20),
        "SELECT 25 " * 100_000,
        "<think>" * 100_000,
        "\0```sql\nSELECT 25\n```",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_hostile_texts_score_nothing_in_time(text):
    began = time.monotonic()
    assert judge("", text=text)[0] == [0.0]
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("name", HONEST)
def test_odd_queries_that_are_right(name):
    assert judge(HONEST[name]) == ([1.0], ["right"])


def test_one_hostile_query_among_honest_ones():
    slow = HOSTILE["search in C"][0]
    began = time.monotonic()
    values, statuses = judge(*[GOLD] * 50, slow, *[GOLD] * 50)
    assert values == [1.0] * 50 + [0.0] + [1.0] * 50 and statuses[50] == "timeout"
    assert time.monotonic() - began < SECONDS + 2.0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_no_process_is_left_and_honest_queries_still_score():
    def children():
        pids: set[str] = set()
        for path in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                pids |= set(path.read_text().split())
        return pids

    assert judge(*[GOLD] * 100)[0] == [1.0] * 100
    before = children()
    for name in ("search in C", "recursion"):
        judge(*[HOSTILE[name][0]] * 3)
    assert len(children()) == len(before)
    sql._pool(SECONDS + sql._GRACE).close()
    workers = len(before) - len(children())
    assert 1 <= workers <= (os.cpu_count() or 1)
    assert judge(*[GOLD] * 100)[0] == [1.0] * 100
