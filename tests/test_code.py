"""Code: the tests of a row, the comparison of values and texts, programs that are odd but right,
and HumanEval with its solutions and with mutants of them."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest

from jax_grpo.rewards import programs
from jax_grpo.rewards.code import read_tests, unit_tests
from jax_grpo.rewards.compare import same_text, same_value
from jax_grpo.rewards.driver import decode, encode


def fenced(code):
    return f"Here it is.\n```python\n{code}\n```\n"


def judged(code, tests, **settings):
    """The status of one program, why, and its reward."""
    seen = {}
    [value] = unit_tests(
        ["?"], [fenced(code)], [tests], log_extra=lambda name, column: seen.update({name: column}),
        **settings,
    )  # fmt: skip
    return seen["unit_tests/status"][0], seen["unit_tests/why"][0], value


# -------------------------------------------------------------------------------------- values

Pair = namedtuple("Pair", "a b")  # noqa: PYI024


class Always(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [
        2**100_000,
        None,
        True,
        0,
        -255,
        0.1,
        -0.0,
        math.inf,
        "",
        "a\x00\ud800\u2028\U0001f600",
        b"\x00\xff",
        [],
        [1, [2.0, ("x", None)], {3, "y"}, frozenset([(4,)])],
        {1: [2], "1": {}, (1, "a"): {frozenset(): b""}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back_as_they_were(value):
    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value and type(again) is type(value)
    assert same_value(value, encode(value))


@pytest.mark.parametrize("value", [Counter(a=1), OrderedDict(a=1), defaultdict(int, a=1)])
def test_dictionaries_of_collections_are_dictionaries(value):
    assert encode(value) == ["dict", "a", ["int", "1"]]


@pytest.mark.parametrize(
    "value",
    [Always(1), Pair(1, 2), range(3), iter([1]), (x for x in ()), {}.keys(), 1j, object(), len]
    + [int, ..., NotImplemented, bytearray(b"x"), deque([1]), [Always(1)], {"a": Always(1)}],
    ids=lambda value: repr(value).split(" at 0x")[0],  # the same in every process
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(TypeError, match="not a plain value"):
        encode(value)


def test_values_that_are_deep_or_hold_themselves_are_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested too deeply"):
        encode(loop)


@pytest.mark.parametrize(
    "tree",
    [1, [], ["int"], ["int", 1], ["int", "x"], ["int", "1", "2"], ["exec", "1"], ["dict", "a"]]
    + [["set", ["list"]], ["bytes", "x"], {"a": 1}, [["list"]], ["list", 1], ["object"]],
    ids=lambda value: repr(value).split(" at 0x")[0],  # the same in every process
)
def test_what_is_no_tree_is_refused_and_equals_nothing(tree):
    with pytest.raises((ValueError, TypeError)):
        decode(tree)
    for expected in (1, 1.0, "", None, True, [], (), set(), {}, b"", ["a"], {"a": 1}, {1}):
        assert not same_value(expected, tree)


@pytest.mark.parametrize(
    ("expected", "value", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (True, True, True),
        (0, False, False),
        (0, None, False),
        (0, -0.0, True),
        (1, "1", False),
        ("1", 1, False),
        ("a", "a", True),
        ("a", "\u0430", False),  # the Cyrillic letter
        ("", None, False),
        ("a", b"a", False),
        (b"a", b"a", True),
        (b"a", [97], False),
        (10**400, 10**400, True),
        (10**400, 10**400 + 1, False),
        (1.5, 10**400, False),
        (2**53, 2.0**53, True),
        (2**53 + 1, 2.0**53, False),
        (3, 3.0000001, False),  # no tolerance: an integer is expected
        (0.3, 0.1 + 0.2, True),
        (2.0, 2.0000019, True),  # 1e-6 relative
        (2.0, 2.0000021, False),
        (0.0, 1e-6, True),  # 1e-6 absolute
        (0.0, 1.1e-6, False),
        (0.5, "0.5", False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (1, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e308, False),
        (1e308, math.inf, False),
        ([1, 2], [1, 2], True),
        ([1, 2], (1, 2), True),
        ((1, 2), (1, 2), True),
        ((1, 2), [1, 2], False),
        ([1, 2], [2, 1], False),
        ([1, 2], [1], False),
        ([1, 2], [1, 2, 3], False),
        ([1, 2], {1, 2}, False),
        ([1, 2], {1: 2}, False),
        ([], (), True),
        ([], {}, False),
        ([], None, False),
        ([[0.5]], [(0.5000001,)], True),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, frozenset([2, 1]), True),
        ({1, 2}, [1, 2], False),
        ({1, 2}, {1, 2, 3}, False),
        ({1, 2}, {1}, False),
        ({1}, {True}, False),
        ({1}, {1.0}, True),
        ({(1, "a")}, {(1.0, "a")}, True),
        ({frozenset([1, 2])}, {frozenset([2, 1])}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 0.5}, {"a": 0.5000001}, True),
        ({1: "a"}, {1: "a"}, True),
        ({1: "a"}, {True: "a"}, False),
        ({"1": "a"}, {1: "a"}, True),  # JSON has no integer keys
        ({1: "a"}, {"1": "a"}, False),
        ({"1": "a", "01": "b"}, {1: "a"}, False),
        ({}, [], False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_same_value(expected, value, same):
    assert same_value(expected, encode(value), tolerance=1e-6) is same


def test_hostile_trees_take_no_time():
    """Sizes are those of one frame."""
    began = time.perf_counter()
    colliding = [["int", format(i * (2**61 - 1), "x")] for i in range(40_000)]
    assert not same_value(set(range(40_000)), ["set", *colliding])
    pairs = [item for key in colliding for item in (key, None)]
    assert not same_value(dict.fromkeys(range(40_000)), ["dict", *pairs])
    assert not same_value(1, ["int", "f" * 1_000_000])
    assert not same_value(1.5, ["int", "f" * 1_000_000])
    nested = "x" * 500_000
    for _ in range(100):
        nested = ["frozenset", nested, '"\\']
    assert not same_value({1}, ["set", nested])
    assert time.perf_counter() - began < 3.0


@pytest.mark.parametrize(
    ("expected", "text", "same"),
    [
        ("3\n", "3", True),
        ("3", "3 \t\r\n\n \n", True),
        ("1\r\n2\r\n", "1\n2", True),
        ("1\n\n2", "1\n\n2", True),
        ("1\n\n2", "1\n2", False),
        ("3", "\n3", False),
        ("3", " 3", False),
        ("3", "3\n4", False),
        ("3\n4", "3", False),
        ("a b", "a  b", False),
        ("Yes", "yes", False),
        ("3", "3.0", False),  # an integer is expected
        ("3.0", "3", True),
        ("0.3333333", "0.33333333333", True),
        ("0.5", "0.500002", False),
        ("x 1e3 y", "x 1000 y", True),
        ("x 1e3 y", "x 1000  y", False),
        ("x 1e3 y", "z 1000 y", False),
        ("0.5", "nan", False),
        ("0.5", "inf", False),
        ("1.0", "1" + "0" * 100, False),
        ("1.0", "\u0661.\u0660", False),  # Arabic digits
        ("1.5", "1_5e-1", False),
        ("3", "3\x00", False),
        ("a", "a\x0b", False),
        ("a\nb", "a\u2028b", False),
        ("a\nb", "a\x0cb", False),
    ],
)
def test_same_text(expected, text, same):
    assert same_text(expected, text, tolerance=1e-6) is same


def test_without_tolerance_decimals_are_text():
    assert not same_text("0.50", "0.5") and same_text("0.50", "0.50")


# --------------------------------------------------------------------------------- tests of a row


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not a dictionary but list"),
        (3, "not a dictionary but int"),
        ({}, "0 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["1"], "output": ["1"]}, "unknown 'output'; known: inputs, outputs, function"),
        ({"inputs": 3, "outputs": ["1"]}, "inputs and outputs are lists"),
        ({"inputs": "12", "outputs": "12"}, "inputs and outputs are lists"),
        ({"inputs": [1], "outputs": ["1"]}, "inputs and outputs are text"),
        ({"inputs": [[1]], "outputs": [1]}, "inputs and outputs are text"),
        ({"inputs": ["1", "2"], "outputs": ["", ""]}, "all outputs are empty"),
        ({"inputs": ["1"], "outputs": [" \n"]}, "all outputs are empty"),
        ({"inputs": ["1"], "outputs": ["1"], "setup": "x = 1"}, "there is no setup"),
        ({"function": "f", "inputs": [[1]], "outputs": [None]}, "all outputs are empty"),
        ({"function": "f", "inputs": [1], "outputs": [1]}, "a list or a dictionary of arguments"),
        ({"function": "f", "inputs": ["12"], "outputs": [1]}, "a list or a dictionary of argum"),
        ({"function": "f", "inputs": [{1: 2}], "outputs": [1]}, "a list or a dictionary of arg"),
        ({"function": "f", "inputs": [[1]], "outputs": [object()]}, "not a plain value: object"),
        ({"function": 3, "inputs": [[1]], "outputs": [1]}, "function, script and setup are text"),
        ({"function": "f", "inputs": [[1]], "outputs": [1], "setup": "x ="}, "SyntaxError"),
        ({"script": "def check(f): pass"}, "a script with a check needs a function"),
        ({"script": "assert ("}, "SyntaxError"),
        ({"script": "x", "inputs": ["1"], "outputs": ["1"]}, "no inputs and outputs"),
        ({"function": "f"}, "0 inputs and 0 outputs"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],  # the same in every process
)
def test_wrong_tests_give_one_line_that_names_the_row(value, message):
    with pytest.raises(ValueError) as error:
        unit_tests(["?"] * 2, ["x"] * 2, [None, value])
    assert str(error.value).startswith("tests of row 1: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_tests_may_be_json_text_and_hold_empty_cells():
    value = {"function": "f", "inputs": [[1]], "outputs": [2], "script": None, "setup": None}
    assert read_tests(json.dumps(value)) == read_tests(value) == ([[1]], [2], "f", "", "")
    assert read_tests(None) is None and read_tests("null") is None


def test_a_script_that_passes_anything_is_an_error_of_the_data():
    for script in ("assert True", "def check(f): assert f", "def tests_nothing(): pass"):
        tests = {"script": script, "function": "f"}
        with pytest.raises(ValueError, match="row 1: the script passes without calling the prog"):
            unit_tests(["?"] * 2, ["", fenced("def f(): return 1")], [None, tests])
    tests = {"script": "import nowhere\nassert f() == 1", "function": "f"}
    with pytest.raises(ValueError, match="ends .ModuleNotFoundError: No module named 'nowhere'. w"):
        unit_tests(["?"], [fenced("def f(): return 1")], [tests])


def test_an_error_of_the_data_does_not_wait_for_the_rest():
    began = time.perf_counter()
    slow = [fenced("import time; time.sleep(0.5)")] * 20
    bad = {"script": "assert True", "function": "f"}
    with pytest.raises(ValueError, match="row 0"):
        unit_tests(["?"] * 21, [fenced("f = 1"), *slow], [bad, *[SUMS] * 20], workers=1)
    assert time.perf_counter() - began < 3.0


# ------------------------------------------------------------------------------ the three forms

ADD = "def add(a, b=2):\n    return a + b"
CALLS = {"function": "add", "inputs": [[1, 2], {"a": 3, "b": 4}, [5]], "outputs": [3, 7, 7]}
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
SUM = "print(sum(map(int, input().split())))"
CHECK = "def check(f):\n    assert f(1, 2) == 3\n    assert f(a=3, b=4) == 7\n"
SCRIPT = {"script": CHECK, "function": "add"}
TWICE = """
def add(a, b=2):
    main = sys.modules["__main__"]
    nonce = sys._getframe(2).f_locals["nonce"]
    main.send(nonce, ["value", main.encode(a + b)])  # and again when this returns
    return a + b
"""
WRONG = {"calls": "def add(a, b=2):\n    return 3", "texts": "print(3)"}


@pytest.mark.parametrize(
    ("code", "tests", "status", "why"),
    [
        (ADD, CALLS, "passed", "3 of 3 tests"),
        (WRONG["calls"], CALLS, "failed", "test 2 of 3: gave 3 for 7"),
        ("x = 1", CALLS, "error", "test 1 of 3: NameError: the code defines no 'add'"),
        ("add = 1", CALLS, "error", "test 1 of 3: TypeError: 'int' object is not callable"),
        ("def add(", CALLS, "error", "test 1 of 3: SyntaxError: '(' was never closed"),
        ("def add(a, b): 1 / 0", CALLS, "error", "test 1 of 3: ZeroDivisionError: division by"),
        ("def add(a, b): yield 3", CALLS, "error", "test 1 of 3: TypeError: not a plain value: g"),
        ("import sys; sys.exit(0)", CALLS, "error", "test 1 of 3: SystemExit: 0"),
        ("import os; os._exit(0)", CALLS, "error", "test 1 of 3: (exit code 0)"),
        ("import sys\n" + ADD + TWICE, CALLS, "error", "test 2 of 3: a forged answer"),
        ("import sys\n" + ADD + TWICE, SCRIPT, "error", "test 1 of 1: a forged answer"),
        (SUM, SUMS, "passed", "3 of 3 tests"),
        (WRONG["texts"], SUMS, "failed", r"test 2 of 3: printed '3\n' for '7\n'"),
        ("1 / 0", SUMS, "error", "test 1 of 3: ZeroDivisionError: division by zero (exit code 1)"),
        (f"{SUM}; raise SystemExit(2)", SUMS, "error", "test 1 of 3: (exit code 2)"),
        ("print(", SUMS, "error", "test 1 of 3: SyntaxError: '(' was never closed (exit code 1)"),
        (ADD, SCRIPT, "passed", "1 of 1 tests"),
        (WRONG["calls"], SCRIPT, "failed", "test 1 of 1: AssertionError: "),
        ("x = 1", SCRIPT, "error", "test 1 of 1: NameError: the code defines no 'add'"),
        ("def add(", SCRIPT, "error", "test 1 of 1: SyntaxError: '(' was never closed"),
    ],
)
def test_statuses(code, tests, status, why):
    found = judged(code, tests)
    assert found[0] == status and found[1].startswith(why) and "\n" not in found[1]
    assert found[2] == float(status == "passed")


@pytest.mark.parametrize(
    ("code", "tests", "status"),
    [
        ("def add(*a):\n    while True: pass", CALLS, "timeout"),
        ("while True: pass", CALLS, "timeout"),
        ("while True: pass", SUMS, "timeout"),
        ("def add(*a):\n    while True: pass", SCRIPT, "timeout"),
        ("print('x' * 2_000_000)", SUMS, "output"),
        ("def add(*a): return 'x' * 2_000_000", CALLS, "output"),
    ],
)
def test_limits_and_their_statuses(code, tests, status):
    assert judged(code, tests, seconds=1.0)[0] == status


def test_a_completion_without_code_and_a_row_without_tests():
    logged = {}
    values = unit_tests(
        ["?"] * 4,
        [
            "no code",
            "```text\nx\n```",
            fenced(ADD),
            [{"role": "assistant", "content": fenced(ADD)}],
        ],
        [CALLS, CALLS, None, json.dumps(CALLS)],
        reward=2.0,
        log_metric=lambda name, share: logged.update({name: share}),
    )
    assert values == [0.0, 0.0, None, 2.0]
    assert logged == {
        "unit_tests/no_code": 0.5,
        "unit_tests/no_tests": 0.25,
        "unit_tests/passed": 0.25,
    }
    assert unit_tests([], [], []) == []


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        (WRONG["calls"], CALLS, 1 / 3),
        (WRONG["texts"], SUMS, 1 / 3),
        ("def add(a, b):\n    if a == 1: raise OSError\n    return a + b", CALLS, 1 / 3),
        ("def add(a, b=2):\n    if a == 3: raise SystemExit\n    return a + b", CALLS, 2 / 3),
        ("def add(a, b=2):\n    if a == 3:\n        while 1: 0\n    return a + b", CALLS, 1 / 3),
        ("import os\n" + ADD + " if a != 3 else os._exit(0)", CALLS, 1 / 3),  # ends the tests
        (WRONG["calls"], SCRIPT, 0.0),
    ],
)
def test_partial_rewards(code, tests, share):
    assert judged(code, tests, partial=True, seconds=1.0)[2] == pytest.approx(share)


def test_a_test_over_its_time_ends_the_tests():
    began = time.perf_counter()
    code = f"{SUM}\nwhile True: pass"
    assert judged(code, SUMS, partial=True, seconds=0.5)[::2] == ("timeout", 0.0)
    assert time.perf_counter() - began < 1.5


def test_the_time_of_all_tests_is_bounded():
    began = time.perf_counter()
    slow = "import time; time.sleep(0.6); print(3)"
    tests = {"inputs": ["1"] * 50, "outputs": ["3"] * 50}
    assert judged(slow, tests, seconds=5.0, total=1.5)[0] == "timeout"
    tests = {"function": "f", "inputs": [[]] * 50, "outputs": [3] * 50}
    slow = "import time\ndef f():\n    time.sleep(0.6)\n    return 3"
    assert judged(slow, tests, seconds=5.0, total=1.5)[0] == "timeout"
    assert time.perf_counter() - began < 2 * (1.5 + 1.0)


def test_the_time_of_a_script_is_that_of_both_processes():
    began = time.perf_counter()
    slow = "import time\ndef f(): time.sleep(0.2)"
    script = "import time\nfor _ in range(9):\n    time.sleep(0.2)\n    f()"
    assert judged(slow, {"script": script}, seconds=1.0)[0] == "timeout"
    assert time.perf_counter() - began < 1.7  # and not twice one second


def test_arguments_are_fresh_for_each_call_and_types_are_kept():
    tests = {
        "function": "f",
        "inputs": [[[1, (2, {3})], 2.0], [[1, (2, {3})], 2.0]],
        "outputs": [[1, (2, {3}), 2.0]] * 2,
    }
    code = "def f(values, x):\n    values.append(x)\n    return values"
    assert judged(code, tests)[0] == "passed"
    del tests["inputs"][1]
    assert judged("def f(v, x): return [*v, int(x)]", {**tests, "outputs": [[1, (2, {3}), 2]]})[2]


def test_methods_are_called_on_a_new_object():
    tests = {"function": "Solution.count", "inputs": [[], []], "outputs": [1, 1]}
    code = (
        "class Solution:\n    def __init__(self): self.n = 0\n"
        "    def count(self):\n        self.n += 1\n        return self.n"
    )
    assert judged(code, tests)[0] == "passed"
    assert judged("def count(): return 1", tests)[0] == "error"
    for form in (tests, {"script": "def check(c):\n    assert c() == 1"}):
        assert judged(code, {**form, "function": "Solution().count"})[0] == "passed"


def test_a_setup_runs_before_the_code_but_is_no_solution():
    setup = "from typing import List\ndef twice(x): return 2 * x\ndef f(x): return 6"
    tests = {"function": "f", "inputs": [[3]], "outputs": [6], "setup": setup}
    assert judged("def f(x: List[int]): return twice(x)", tests)[0] == "passed"
    assert judged("def g(x): return 6", tests)[0] == "error"
    setup = "class Solution:\n    def f(self, x): return 6"
    tests |= {"function": "Solution.f", "setup": setup}
    assert judged("", tests)[1] == "test 1 of 1: NameError: the code defines no 'Solution'"


@pytest.mark.parametrize(
    "script",
    [
        "assert add(1, 2) == 3",  # MBPP
        "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3",  # KodCode
        "import solution\ndef test_add():\n    assert solution.add(a=1) == 3",
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
        "def check(candidate):\n    assert two(add(1)) == (two(3))\ndef two(x): return (x, x)",
        "try:\n    add('a', 1)\n    assert 0\nexcept TypeError as e:\n    assert 'str' in str(e)",
        "def check(f):\n    assert list(map(f, [1, 2])) == [3, 4]",
        "import random\nfor x in range(300):\n    y = random.random()\n    assert add(x, y) == x+y",
    ],
)
def test_scripts_of_all_kinds(script):
    tests = {"script": script, "function": "add"}
    assert judged(ADD, tests)[0] == "passed"
    assert judged("def add(a, b=2): return 4", tests)[0] in ("failed", "error")


def test_scripts_see_plain_values_and_built_in_exceptions_alone():
    code = (
        "class Odd(ValueError): pass\ndef f(x):\n    if x: raise Odd('no')\n    return (1, {2: 3})"
    )
    script = (
        "def check(f):\n    assert f(0) == (1, {2: 3}) and type(f(0)) is tuple\n"
        "    try:\n        f(1)\n        assert False\n    except ValueError as e:\n"
        "        assert type(e) is ValueError and str(e) == 'no'"
    )
    assert judged(code, {"script": script, "function": "f"})[0] == "passed"


def test_a_script_calls_the_program_and_not_the_stub_of_the_setup():
    tests = {"script": "assert f(1) == 2", "function": "f", "setup": "def f(x): return 2"}
    assert judged("def f(x): return x + 1", tests)[0] == "passed"
    assert judged("def f(x): return x", tests)[0] == "failed"


def test_the_setup_of_a_script_is_not_the_programs():
    setup = "def encode(x): return x + 1\ndef decode(x): ..."
    script = "def check(f):\n    assert f(encode(3)) == 3"
    tests = {"script": script, "function": "decode", "setup": setup}
    assert judged("def decode(x): return x - 1", tests)[0] == "passed"
    assert judged("def encode(x): return 3\ndef decode(x): return x - 1", tests)[0] == "passed"
    assert judged("def encode(x): return 3\ndef decode(x): return 3.5", tests)[0] == "failed"


def test_a_machine_without_a_sandbox_is_not_the_programs_fault(monkeypatch):
    failed = programs.sandbox.Outcome("failed", b"", b"no namespaces\nhere", None, "limits")
    monkeypatch.setattr(programs.sandbox, "run", lambda *a, **k: failed)
    assert judged(SUM, SUMS) == ("sandbox", "no namespaces here", None)


def test_an_isolation_that_is_no_level_is_refused():
    with pytest.raises(ValueError, match="require='walls'"):
        judged(SUM, SUMS, require="walls")


@pytest.mark.parametrize(("times", "status"), [(1, "passed"), (2, "stopped")])
def test_a_sandbox_that_was_killed_is_tried_once_more(monkeypatch, times, status):
    killed = [programs.sandbox.Outcome("stopped", b"", b"", None, "limits")] * times
    run = programs.sandbox.run
    monkeypatch.setattr(
        programs.sandbox, "run", lambda *a, **k: killed.pop() if killed else run(*a, **k)
    )
    assert judged(SUM, SUMS)[::2] == (status, float(status == "passed"))


def test_a_machine_that_is_full_is_not_the_programs_fault(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(programs.sandbox, "run", full)
    assert judged(SUM, SUMS) == ("sandbox", "[Errno 28] No space left on device", None)
