"""Measures the verifiers: what they accept on real data, and how fast they are on this machine.

    python benchmarks/verifiers.py [DIRECTORY]

DIRECTORY holds gsm8k_train.jsonl, gsm8k_test.jsonl and math500_test.jsonl, with `answer` in each
line; without it only speeds are measured, on the test suite's own problems.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.rewards import code, math, sandbox, sql

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"


def answers(path: Path) -> list[str]:
    """The right answers of a file's rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [str(math.gold_answer(json.loads(line)["answer"])) for line in lines]


def boxed(texts: Sequence[str]) -> list[str]:
    return [f"So it is $\\boxed{{{text}}}$." for text in texts]


def accepted(golds: Sequence[str]) -> None:
    """How many right answers are accepted for themselves, and which are not."""
    scores = math.correctness([""] * len(golds), boxed(golds), golds)
    print(f"  themselves: {sum(s == 1 for s in scores)} of {len(golds)}")
    for gold, value in zip(golds, scores, strict=True):
        if value != 1:
            print(f"    refused: {gold!r}")


def exchanged(
    golds: Sequence[str], differ: Callable[[str, str], bool], count: int = 10_000
) -> None:
    """How many are accepted for another problem's right answer, of pairs that differ."""
    draw = random.Random(0)
    pairs = []
    while len(pairs) < count:
        a, b = draw.choice(golds), draw.choice(golds)
        if differ(a, b):
            pairs.append((a, b))
    scores = math.correctness([""] * count, boxed([a for a, _ in pairs]), [b for _, b in pairs])
    wrong = sorted({pair for pair, score in zip(pairs, scores, strict=True) if score})
    print(f"  another's: {sum(score == 1 for score in scores)} of {count} pairs")
    for a, b in wrong:
        print(f"    accepted: {a!r} for {b!r}")


def speed(what: str, judge: Callable[..., list[Any]], count: int, **columns: Any) -> None:
    """Judges `count` completions, after a first call that starts what stays."""
    columns = {name: (list(values) * count)[:count] for name, values in columns.items()}
    judge(**{name: values[:2] for name, values in columns.items()})
    began = time.perf_counter()
    scores = judge(**columns)
    seconds = time.perf_counter() - began
    right = sum(score == 1 for score in scores)
    print(f"{what}: {count / seconds:,.0f} a second ({right} of {count} right)")


def speeds() -> None:
    easy = [str(17 * n) for n in range(1000)]
    speed("integers", math.correctness, 20_000, prompts=[""], completions=boxed(easy), answer=easy)
    hard = boxed([rf"\frac{{{n}\sqrt{{2}}}}{{2}} + x" for n in range(3, 1003, 2)])
    wanted = [rf"x + {n}/\sqrt{{2}}" for n in range(3, 1003, 2)]
    speed("evaluated", math.correctness, 5_000, prompts=[""], completions=hard, answer=wanted)

    with gzip.open(FIXTURES / "human_eval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file]
    programs = [f"```python\n{p['prompt']}{p['canonical_solution']}\n```" for p in problems]
    tests = [
        {"script": p["test"], "function": p["entry_point"], "setup": p["prompt"]} for p in problems
    ]
    speed("HumanEval", code.unit_tests, 164, prompts=[""], completions=programs, tests=tests)
    double = {"inputs": ["2\n"], "outputs": ["4\n"]}
    program = "```python\nprint(2 * int(input()))\n```"
    speed("stdin", code.unit_tests, 200, prompts=[""], completions=[program], tests=[double])

    columns = {"query": ["SELECT Name FROM Genre"], "database": [str(FIXTURES / "chinook.sqlite")]}
    asked = ["```sql\nSELECT Name FROM Genre ORDER BY GenreId\n```"]
    speed("SQL", sql.execution_match, 2_000, prompts=[""], completions=asked, **columns)


def main(directory: str = "") -> None:
    print(f"{os.cpu_count()} cores; programs are isolated by {sandbox.level()}: {sandbox.probe()}")
    if directory:
        files = [Path(directory) / f"gsm8k_{part}.jsonl" for part in ("train", "test")]
        golds = [gold for file in files for gold in answers(file)]
        print("GSM8K")
        accepted(golds)
        exchanged(golds, lambda a, b: float(a.replace(",", "")) != float(b.replace(",", "")))
        golds = answers(Path(directory) / "math500_test.jsonl")
        print("MATH-500")
        accepted(golds)
        # Texts that differ: what is accepted is printed, to be looked at.
        exchanged(golds, lambda a, b: a != b)
    speeds()


if __name__ == "__main__":
    main(*sys.argv[1:])
