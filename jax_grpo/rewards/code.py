r"""Code: programs against tests that they cannot see.

A program runs in one sandbox, what judges it elsewhere: it gets inputs and gives plain values or
text, and the expected outputs are compared with those in this process, on built-in types. So a
program can forge what it likes and gains nothing by it.

`tests` of a row is a dictionary, or JSON text of one, in one of three forms:

    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}
        Standard input and output; each test is a run of its own.
    {"function": "add", "inputs": [[1, 2], {"a": 1, "b": 2}, ...], "outputs": [3, 3, ...]}
        Calls of a function, with positional arguments in a list or keyword arguments in a
        dictionary; `"Solution.add"`, or `"Solution().add"`, is a method of a new `Solution()`
        for each call.
    {"script": "def check(candidate): ...", "function": "add"}
        A test script, as HumanEval, MBPP or KodCode have it: its top level runs, then
        `check(function)` if it defines that, else its functions `test...()`.

The last two may have a `"setup"`: code, such as imports and helpers, that runs before the
program's and before the script. A program sees the setup, so it must not hold a test.

A script runs in a second sandbox, and the program's functions are there only by name: a call goes
to the program's sandbox with its arguments and comes back with the value, or with the built-in
exception. So the test stays out of the program's reach, at a price: only plain values (see
`driver.encode`) go either way. A script cannot look into objects of the program's classes, pass a
function, or see an argument changed in place, and one that evaluates text it is given lets the
program in. Nothing keeps a program from listing the answers to tests it has guessed: have many.

A row whose verdict does not depend on the program is an error of the data: one without tests,
with outputs that are all empty, or with a script that ends without calling the program, such as
one that imports what is not there. There is the standard library alone, for programs and scripts.
"""

from __future__ import annotations

import ast
import concurrent.futures
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from jax_grpo.rewards import driver, sandbox
from jax_grpo.rewards.contract import log_statuses, text_of
from jax_grpo.rewards.programs import BadScript, Settings, Task, Verdict, judge


def unit_tests(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    tests: Sequence[Any],
    *,
    reward: float = 1.0,
    partial: bool = False,
    seconds: float = 10.0,
    total: float = 60.0,
    memory: int = 1 << 30,
    tolerance: float = 1e-6,
    require: str = "",
    workers: int | None = None,
    log_metric: Callable[[str, float], Any] | None = None,
    log_extra: Callable[[str, list[Any]], Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Reward a completion whose Python program passes the tests.

    The program is the last fenced block after the thinking that is marked as Python, or the last
    unmarked one when none is (`texts.code_in`). A test that is over its time, or ends the
    process, ends the tests: those behind it count as failed.

    Args:
        prompts: n prompts, not looked at.
        completions: n completions, text or message lists.
        tests: n rows of tests, in the forms above. Where there is none (None) the reward is None.
        reward: what a program that passes all tests is worth; any other is worth 0.
        partial: give the share of the tests that pass instead.
        seconds: wall clock of one test, with the start of its process; a script is one test.
        total: seconds of all tests of a completion.
        memory: bytes of one program.
        tolerance: relative, absolute below 1, where an expected number is a float or a decimal.
        require: the least isolation to run with, such as "namespaces"; see `sandbox`.
        workers: how many programs run at once; by default one per core.
        log_metric: gets the shares of the statuses of `Verdict`.
        log_extra: gets the status of each completion, and why.
        **columns: not looked at.

    Returns:
        n numbers; None where the row has no tests or the sandbox could not be started.

    Raises:
        ValueError: one line, for a row whose tests are none, or an isolation out of reach.

    >>> tests = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "6\n"]}
    >>> unit_tests(["Double it."], ["```python\nprint(2 * int(input()))\n```"], [tests])
    [1.0]
    """
    if not (seconds > 0 and total > 0 and memory > 0 and tolerance >= 0):
        raise ValueError("seconds, total and memory must be above 0, and tolerance 0 or more")
    sandbox.level(require)
    settings = Settings(partial, seconds, total, memory, tolerance, require)
    if len(tests) != len(completions):
        raise ValueError(f"{len(tests)} tests for {len(completions)} completions")
    known: dict[int, Task | None] = {}  # by identity: a group shares its row, which may be large
    for row, value in enumerate(tests):
        if id(value) not in known:
            known[id(value)] = read_tests(value, row)
    items = [(text_of(c), known[id(value)]) for c, value in zip(completions, tests, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(workers or _cores()) as pool:
        futures = [pool.submit(judge, *item, settings) for item in items]
        try:
            verdicts = [_of_row(row, future) for row, future in enumerate(futures)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    statuses, whys, shares = zip(*verdicts, strict=True) if verdicts else ((), (), ())
    log_statuses("unit_tests", statuses, whys, log_metric, log_extra)
    return [
        None if status in ("no_tests", "sandbox") else reward * share
        for status, share in zip(statuses, shares, strict=True)
    ]


def _of_row(row: int, future: concurrent.futures.Future[Verdict]) -> Verdict:
    try:
        return future.result()
    except BadScript as error:
        raise ValueError(f"tests of row {row}: {error}") from None


def _cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# ------------------------------------------------------------------------------------ the tests


def read_tests(value: Any, row: int = 0) -> Task | None:
    """Check the tests of a row; None when it has none.

    Raises:
        ValueError: one line that names the row.

    >>> read_tests('{"function": "add", "inputs": [[1, 2]], "outputs": [3]}')
    Task(inputs=[[1, 2]], outputs=[3], function='add', script='', setup='')
    """
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"not a dictionary but {type(value).__name__}")
        given = {key: item for key, item in value.items() if item is not None}
        unknown = given.keys() - set(Task._fields)
        if unknown:
            raise ValueError(f"unknown {min(unknown)!r}; known: {', '.join(Task._fields)}")
        lists = [given.get(name, []) for name in ("inputs", "outputs")]
        texts = [given.get(name, "") for name in ("function", "script", "setup")]
        if not all(isinstance(pairs, list | tuple) for pairs in lists):
            raise ValueError("inputs and outputs are lists")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("function, script and setup are text")
        texts[0] = texts[0].replace("().", ".")  # as LeetCode's data have it
        tests = Task(*lists, *texts)
        (_check_script if tests.script else _check_pairs)(tests)
        compile(tests.setup, "setup", "exec", dont_inherit=True)
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"tests of row {row}: {type(error).__name__}: {error}") from None
    return tests


def _check_pairs(tests: Task) -> None:
    """Refuse pairs that are none, do not fit the form, or pass whatever says nothing."""
    if not tests.inputs or len(tests.inputs) != len(tests.outputs):
        raise ValueError(f"{len(tests.inputs)} inputs and {len(tests.outputs)} outputs")
    if not any(
        output.strip() if isinstance(output, str) else output is not None
        for output in tests.outputs
    ):
        raise ValueError("all outputs are empty")
    if tests.function:
        driver.encode([*tests.inputs, *tests.outputs])
        if not all(_are_arguments(given) for given in tests.inputs):
            raise ValueError("an input of a function is a list or a dictionary of arguments")
    elif tests.setup or not all(isinstance(t, str) for t in [*tests.inputs, *tests.outputs]):
        raise ValueError("without a function inputs and outputs are text, and there is no setup")


def _are_arguments(given: Any) -> bool:
    return isinstance(given, list | tuple) or (
        isinstance(given, dict) and all(isinstance(name, str) for name in given)
    )


def _check_script(tests: Task) -> None:
    """Refuse a script that cannot run."""
    if tests.inputs or tests.outputs:
        raise ValueError("a script has no inputs and outputs")
    tree = ast.parse(tests.script)
    compile(tree, "script", "exec", dont_inherit=True)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in defined and not tests.function:
        raise ValueError("a script with a check needs a function")
