"""Execution match: which query is meant, when two results agree, and the Chinook questions."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sqlite3
from pathlib import Path

import pytest

from jax_grpo.rewards.contract import RewardError, score
from jax_grpo.rewards.databases import thin
from jax_grpo.rewards.queries import Stopped, parse
from jax_grpo.rewards.results import Gold, difference, plain, tie_ends
from jax_grpo.rewards.sql import execution_match, query_in

FIXTURES = Path(__file__).parent / "fixtures"
CHINOOK = str(FIXTURES / "chinook.sqlite")


def fenced(query):
    return f"So:\n```sql\n{query}\n```"


def judge(gold, candidate, database=CHINOOK, **settings):
    """Value and status of one candidate."""
    extras = {}
    values = execution_match(
        ["?"], [fenced(candidate)], [gold], [database], log_extra=extras.__setitem__, **settings
    )
    return values[0], extras["execution_match/status"][0]


def make(path, script):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return str(path)


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """Ann and Bob tie at 3, Cy and Di at 2."""
    return make(
        tmp_path_factory.mktemp("marks") / "marks.db",
        "CREATE TABLE mark (name TEXT, points INT);"
        "INSERT INTO mark VALUES ('Ann', 3), ('Bob', 3), ('Cy', 2), ('Di', 2), ('Ed', 1);",
    )


# ------------------------------------------------------------------------- which query is meant


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("```sql\nSELECT 1\n```", "SELECT 1\n"),
        ("```SQLite\nSELECT 1\n```", "SELECT 1\n"),
        ("```\nSELECT 1\n```", "SELECT 1\n"),
        ("```sql\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```", "SELECT 2\n"),
        ("```sql\nSELECT 1\n```\nIt gives\n```\n1\n```", "SELECT 1\n"),
        ("<think>```sql\nSELECT 1\n```</think>\n```sql\nSELECT 2\n```", "SELECT 2\n"),
        ("```sql\nSELECT 2\n```\n<think>\n```sql\nSELECT 1\n```", "SELECT 2\n"),
        ("```python\nSELECT 1\n```", None),
        ("```sql\nSELECT 1", None),  # cut off
        ("select 1", "select 1"),
        (
            "<think>I count.</think>\n\nWITH a AS (SELECT 1) SELECT 2\n",
            "WITH a AS (SELECT 1) SELECT 2",
        ),
        ("VALUES (1)", "VALUES (1)"),
        ("The query is SELECT 1", None),
        ("<think>SELECT 1", None),
        ("", None),
    ],
)
def test_which_query_is_meant(text, query):
    assert query_in(text) == query


@pytest.mark.parametrize(
    ("text", "tie_break"),
    [
        ("SELECT a FROM t", None),
        ("SELECT a FROM t ORDER BY a", 26),
        ("SELECT a FROM t ORDER BY a ;; -- the end", 26),
        ("SELECT a FROM t order/**/by a LIMIT 3", 30),
        ("SELECT a FROM t ORDER -- why\n BY a\nLIMIT 3 OFFSET 1", 35),
        ("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1", 48),
        ("WITH w AS (SELECT a FROM t ORDER BY a) SELECT a FROM w", None),
        ("SELECT * FROM (SELECT a FROM t ORDER BY a LIMIT 2)", None),
        ("SELECT rank() OVER (ORDER BY a) FROM t", None),
        ("SELECT rank() OVER w FROM t WINDOW w AS (ORDER BY a)", None),
        ("SELECT 'x ORDER BY a' FROM t", None),
        ("SELECT 'it''s ORDER BY a' FROM t", None),
        ('SELECT "ORDER" BY, [ORDER BY a], `ORDER BY a` FROM t', None),
        ("SELECT a FROM t -- ORDER BY a", None),
        ("SELECT a FROM t /* ORDER BY a */", None),
        ("SELECT a FROM t /* ORDER BY a", None),
        ("SELECT ')' FROM t ORDER BY a", 28),
        ("SELECT border, by_ FROM t", None),
    ],
)
def test_the_outermost_order(text, tie_break):
    assert parse(text).tie_break == tie_break


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "-- SELECT 1",
        "COMMIT",
        "EXPLAIN SELECT 1",
        "PRAGMA table_info(t)",
        "(SELECT 1)",
        "SELECT 1; SELECT 2",
        "; SELECT 1",
        "SELECT 1; /* a */ COMMIT",
        "'SELECT' 1",
        "\u0405ELECT 1",  # a Cyrillic letter
        "SELECT 1\0",
        "SELECT '\0'",
    ],
)
def test_what_is_no_query(text):
    with pytest.raises(Stopped) as stop:
        parse(text)
    assert stop.value.args[0] == "refused"


# -------------------------------------------------------------------------- when results agree


@pytest.mark.parametrize(
    ("gold", "rows", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], True),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False),  # as sets they are equal
        ([(1,)], [(1,), (1,)], False),
        ([(1,), (1,)], [(1,)], False),
        ([], [], True),
        ([(1,)], [(1.0,)], True),
        ([(1,)], [("1",)], False),
        ([(1,)], [(b"1",)], False),
        ([("1",)], [(b"1",)], False),
        ([("a",)], [("A",)], False),
        ([("a",)], [("a ",)], False),
        ([(None,)], [(None,)], True),
        ([(None,)], [(0,)], False),
        ([(None,)], [("",)], False),
        ([(None,)], [("NULL",)], False),
        ([(0.3,)], [(0.1 + 0.2,)], True),
        ([(0.3,)], [(0.30001,)], False),
        ([(0.0,)], [(-0.0,)], True),
        ([(0,)], [(1e-12,)], True),
        ([(0,)], [(1e-6,)], False),
        ([(1e12,)], [(1e12 + 1,)], False),  # whole numbers are exact
        ([(10**12,)], [(10**12 + 1,)], False),
        ([(2**63 - 1,)], [(2**63 - 2,)], False),
        ([(123456.78,)], [(123456.79,)], False),
        ([(12345678.9,)], [(12345678,)], False),
        ([(float("inf"),)], [(float("inf"),)], True),
        ([(float("inf"),)], [(-float("inf"),)], False),
        ([(float("inf"),)], [(1e308,)], False),
        # However the rows are sorted, near numbers in one column must not part rows.
        ([(0.3, 7), (0.1 + 0.2, 5)], [(0.3, 5), (0.1 + 0.2, 7)], True),
        ([(0.3, 7), (0.1 + 0.2, 5)], [(0.3, 5), (0.1 + 0.2, 5)], False),
        ([(0.3, 0.3)], [(0.3, 0.1 + 0.2)], True),
        ([(1, 2)], [(2, 1)], False),
        ([(1, "a"), (2, "b")], [(1, "b"), (2, "a")], False),  # columns alone agree
    ],
)
def test_multisets(gold, rows, same):
    width = len((gold or [(0,)])[0])
    rows = [tuple(plain(value) for value in row) for row in rows]
    gold = [tuple(plain(value) for value in row) for row in gold]
    for a, b in ((gold, rows), (rows, gold)):
        assert (difference(Gold(width, a, [len(a)]), width, b, 1e-10) == "") is same


def test_multisets_agree_when_some_pairing_does():
    draw = random.Random(0)
    values = [0.3, 0.1 + 0.2, 0.31, 1, 1 + 1e-11, 2, "1", b"1", None]
    near = {0.3: 0.1 + 0.2, 1: 1 + 1e-11}

    def equal(a, b):
        if not all(isinstance(value, int | float) for value in (a, b)):
            return a == b
        return math.isclose(a, b, rel_tol=1e-10)

    outcomes = set()
    for _ in range(2000):
        gold = [(draw.choice(values), draw.choice(values)) for _ in range(draw.randint(1, 4))]
        rows = [tuple(near.get(v, v) if draw.random() < 0.5 else v for v in row) for row in gold]
        draw.shuffle(rows)
        if draw.random() < 0.5:
            rows[0] = (draw.choice(values), rows[0][1])
        paired = any(
            all(map(equal, sum(gold, ()), sum(order, ()))) for order in itertools.permutations(rows)
        )
        assert (difference(Gold(2, gold, [len(gold)]), 2, rows, 1e-10) == "") is paired
        outcomes.add(paired)
    assert outcomes == {True, False}


def test_columns_are_counted_also_where_there_are_no_rows():
    assert difference(Gold(2, [], [0]), 1, [], 0.0) == "1 columns and not 2"


def test_without_tolerance_numbers_are_exact():
    gold = Gold(1, [(0.3,)], [1])
    assert difference(gold, 1, [(0.1 + 0.2,)], 0.0) == "other values"
    assert difference(gold, 1, [(0.3,)], 0.0) == ""


def test_order_counts_between_blocks_only():
    gold = Gold(1, [(1,), (2,), (3,)], [1, 3])
    assert difference(gold, 1, [(1,), (3,), (2,)], 0.0) == ""
    assert difference(gold, 1, [(2,), (1,), (3,)], 0.0) == (
        "the right rows in another order, from row 1 on"
    )


@pytest.mark.parametrize(
    ("up", "down", "ends"),
    [
        ([], [], []),
        ("abc", "abc", [1, 2, 3]),  # no ties
        ("abc", "cba", [3]),  # nothing but
        ("abXcd", "baXdc", [2, 3, 5]),
        ("aab", "baa", [3]),
        ("aab", "aab", [1, 2, 3]),
        ("aXbc", "aXed", [1, 2, 4]),  # a LIMIT cut through the last tie
    ],
)
def test_where_ties_end(up, down, ends):
    assert tie_ends([(c,) for c in up], [(c,) for c in down]) == ends


@pytest.mark.parametrize(
    ("gold", "names", "value"),
    [
        ("ORDER BY points DESC", "Ann Bob Cy Di Ed", 1),
        ("ORDER BY points DESC", "Bob Ann Di Cy Ed", 1),
        ("ORDER BY points DESC", "Ann Cy Bob Di Ed", 0),
        ("ORDER BY points DESC", "Ed Di Cy Bob Ann", 0),
        ("ORDER BY points", "Ed Di Cy Bob Ann", 1),
        ("ORDER BY points DESC, name", "Bob Ann Di Cy Ed", 0),
        ("ORDER BY 1", "Bob Ann Cy Di Ed", 0),
        ("ORDER BY points DESC LIMIT 2", "Bob Ann", 1),
        ("ORDER BY points DESC LIMIT 3", "Bob Ann Cy", 1),
        ("ORDER BY points DESC LIMIT 3", "Bob Ann Di", 0),  # the gold's choice counts
        ("ORDER BY points DESC LIMIT 3", "Cy Ann Bob", 0),
        ("ORDER BY points DESC LIMIT 2 OFFSET 3 -- LIMIT", "Di Ed", 1),
        ("", "Ed Di Cy Bob Ann", 1),
    ],
)
def test_ties_may_come_in_any_order(marks, gold, names, value):
    rows = ", ".join(f"('{name}')" for name in names.split())
    gold = f"SELECT name FROM mark {gold}"
    assert judge(gold, f"VALUES {rows}", marks)[0] == value


def test_ties_of_distinct_and_compound_queries(marks):
    gold = "SELECT DISTINCT name, points FROM mark UNION SELECT 'Fay', 3 ORDER BY points DESC"
    rows = "('Fay', 3), ('Ann', 3), ('Bob', 3), ('Di', 2), ('Cy', 2), ('Ed', 1)"
    assert judge(gold, f"VALUES {rows}", marks) == (1.0, "right")
    assert judge(gold, f"SELECT * FROM (VALUES {rows}) ORDER BY 2", marks) == (0.0, "wrong")


def test_order_can_be_left_out_of_account(marks):
    gold, other = (f"SELECT name FROM mark ORDER BY name {way}" for way in ("", "DESC"))
    assert judge(gold, other, marks)[0] == 0
    assert judge(gold, other, marks, ordered=False)[0] == 1


# ------------------------------------------------------------------------------------- Chinook


def questions():
    """Question, gold, right and wrong queries."""
    found = []
    for line in (FIXTURES / "chinook_queries.txt").read_text(encoding="utf-8").splitlines():
        kind, _, text = line.partition(" ")
        if kind == "#":
            found.append((text, [], [], []))
        elif kind in ("=", "+", "-"):
            found[-1][1 + "=+-".index(kind)].append(text)
    return found


QUESTIONS = questions()


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    target = str(tmp_path_factory.mktemp("thin") / "thin.sqlite")
    thin(CHINOOK, target)
    return target


def test_there_are_fifty_questions_with_right_and_wrong_answers():
    assert len(QUESTIONS) == 50
    assert all(len(gold) == 1 and right and len(wrong) > 1 for _, gold, right, wrong in QUESTIONS)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_questions(thinned, copies):
    cases = [
        (gold, candidate, value)
        for _, [gold], right, wrong in QUESTIONS
        for candidates, value in (([gold], 1.0), (right, 1.0), (wrong, 0.0))
        for candidate in candidates
    ]
    golds, candidates, wanted = zip(*cases, strict=True)
    values = execution_match(
        ["?"] * len(cases),
        [fenced(candidate) for candidate in candidates],
        golds,
        [[CHINOOK, thinned][:copies]] * len(cases),
        seconds=20.0,
    )
    assert [c for c, value in zip(cases, values, strict=True) if value != c[2]] == []
    assert len(cases) > 230 and set(wanted) == {0.0, 1.0}


def test_another_database_finds_out_what_is_right_by_luck(thinned):
    gold = "SELECT COUNT(*) FROM Album"
    for lucky in ("SELECT 82", "SELECT COUNT(*) + 23 FROM Customer"):
        assert judge(gold, lucky)[0] == 1
        assert judge(gold, lucky, [CHINOOK, thinned]) == (0.0, "wrong")
    assert judge(gold, "SELECT COUNT(Title) FROM Album", [CHINOOK, thinned])[0] == 1


def test_thin_keeps_references_and_small_tables(tmp_path):
    left = thin(CHINOOK, str(tmp_path / "a"), share=0.3, seed=1)
    assert left == thin(CHINOOK, str(tmp_path / "b"), share=0.3, seed=1)
    assert left != thin(CHINOOK, str(tmp_path / "c"), share=0.3, seed=2)
    with contextlib.closing(sqlite3.connect(CHINOOK)) as connection:
        [before] = connection.execute("SELECT COUNT(*) FROM Track").fetchone()
    assert 0 < left["Track"] < 0.7 * before and left["Genre"] == 25
    with contextlib.closing(sqlite3.connect(tmp_path / "a")) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with pytest.raises(ValueError, match="one must be there and the other not"):
        thin(CHINOOK, str(tmp_path / "a"))
    with pytest.raises(ValueError, match="one must be there and the other not"):
        thin(str(tmp_path / "none"), str(tmp_path / "d"))


# ------------------------------------------------------------------------------- golds and rows


@pytest.mark.parametrize(
    "gold",
    [
        "SELECT name FROM mark WHERE 0",
        "SELECT MAX(points) FROM mark WHERE 0",  # one row, of NULL
        "SELECT NULL, NULL",
    ],
)
def test_an_empty_gold_never_pays(marks, tmp_path, gold):
    for candidate in (gold, "SELECT 1 WHERE 0", "COMMIT", "nonsense"):
        assert judge(gold, candidate, marks) == (None, "empty_gold")


def test_an_empty_gold_counts_beside_one_that_is_not(marks, tmp_path):
    empty = make(tmp_path / "empty.db", "CREATE TABLE mark (name TEXT, points INT);")
    gold = "SELECT name FROM mark WHERE points > 2"
    assert judge(gold, "SELECT name FROM mark WHERE points = 3", [empty, marks])[0] == 1
    assert judge(gold, "SELECT 1 WHERE 0", [empty, marks]) == (0.0, "wrong")
    assert judge(gold, "VALUES ('Ann'), ('Bob')", [marks])[0] == 1
    assert judge(gold, "VALUES ('Ann'), ('Bob')", [marks, empty]) == (0.0, "wrong")
    assert judge(gold, gold, [empty, empty]) == (None, "empty_gold")


@pytest.mark.parametrize("gold", [None, "", "  ", float("nan")])
def test_a_row_without_a_gold_has_no_value(gold):
    assert judge(gold, "SELECT 1", None) == (None, "no_gold")


@pytest.mark.parametrize(
    ("gold", "database", "message"),
    [
        ("SELECT x FROM mark", None, r"row 1: the gold query fails \(no such column: x"),
        ("DELETE FROM mark", None, r"row 1: the gold query fails \(not a SELECT"),
        ("SELECT random()", None, r"row 1: the gold query fails \(not allowed: function random"),
        ("SELECT 1; SELECT 2", None, "row 1: the gold query fails .more than one statement"),
        ("SELECT '" + "x" * 20_000 + "'", None, "row 1: too long, with its paths, for a worker"),
        (17, None, "row 1: a gold query is text, not 17"),
        ("SELECT 1", "missing.db", "row 1: no such database: .*missing.db"),
        ("SELECT 1", 17, "row 1: a database is a path or a list of paths, not 17"),
        ("SELECT 1", [17], r"row 1: a database is a path or a list of paths, not \[17\]"),
        ("SELECT 1", [], "row 1: a database is a path or a list of paths"),
        ("SELECT name FROM sqlite_master", __file__, "row 1: .*file is not a database"),
    ],
)
def test_wrong_rows_give_one_line(marks, gold, database, message):
    database = marks if database is None else database
    with pytest.raises(ValueError, match=message) as error:
        execution_match(["?"] * 2, ["SELECT 1"] * 2, ["SELECT 1", gold], [marks, database])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_a_gold_of_too_many_rows(marks):
    gold = "SELECT name FROM mark"
    assert judge(gold, gold, marks, max_rows=5)[0] == 1
    with pytest.raises(ValueError, match="row 0: .*more than 4 rows"):
        judge(gold, gold, marks, max_rows=4)


def test_a_gold_that_is_too_slow_has_no_value(marks):
    gold = "WITH RECURSIVE r(x) AS (VALUES (1) UNION ALL SELECT x + 1 FROM r) SELECT MAX(x) FROM r"
    assert judge(gold, "SELECT 1", marks, seconds=0.2) == (None, "gold_timeout")


@pytest.mark.parametrize("settings", [{"tolerance": -1}, {"seconds": 0}, {"max_rows": 0}])
def test_settings_that_are_refused(settings):
    with pytest.raises(ValueError, match="tolerance must be 0 or more, seconds above 0"):
        judge("SELECT 1", "SELECT 1", **settings)


def test_statuses_are_logged(marks):
    metrics, extras = {}, {}
    values = execution_match(
        ["?"] * 5,
        ["SELECT 5", "SELECT count(*) FROM mark", "SELECT 4", "five", "SELECT x"],
        ["SELECT count(*) FROM mark"] * 4 + [None],
        [marks] * 5,
        reward=2.0,
        log_metric=metrics.__setitem__,
        log_extra=extras.__setitem__,
    )
    assert values == [2.0, 2.0, 0.0, 0.0, None]
    assert extras["execution_match/status"] == ["right", "right", "wrong", "none", "no_gold"]
    assert extras["execution_match/why"][2] == "other values"
    assert metrics == {
        "execution_match/right": 0.4,
        "execution_match/wrong": 0.2,
        "execution_match/none": 0.2,
        "execution_match/no_gold": 0.2,
    }


def test_by_the_contract_with_chats_and_a_root():
    chat = [{"role": "assistant", "content": fenced("SELECT COUNT(*) FROM Genre")}]
    columns = {"query": ["SELECT 25"], "database": ["chinook.sqlite"], "level": [3]}

    def rooted(**given):
        return execution_match(root=str(FIXTURES), **given)

    values, valid = score([rooted], ["?"], [chat], [[1]], columns)
    assert values.tolist() == [[1.0]] and valid.all()
    with pytest.raises(RewardError, match="no such database"):
        score([execution_match], ["?"], [chat], [[1]], columns)


def test_paths_of_all_kinds(marks, tmp_path):
    for name in ("a b.db", "a?mode=rw.db", "a#b.db", "100%25.db", "ö'\".db"):
        path = tmp_path / name
        path.write_bytes(Path(marks).read_bytes())
        assert judge("SELECT count(*) FROM mark", "SELECT 5", str(path))[0] == 1


def test_text_that_is_no_utf8(tmp_path):
    path = make(
        tmp_path / "latin.db",
        "CREATE TABLE t (a TEXT); INSERT INTO t VALUES (CAST(x'e4' AS TEXT)), ('ä');",
    )
    assert judge("SELECT a FROM t", "SELECT a FROM t ORDER BY a DESC", path)[0] == 1
    assert judge("SELECT a FROM t", "VALUES ('ä'), ('ä')", path)[0] == 0
