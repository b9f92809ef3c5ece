"""The study's account: intervals against slow references, tables against numbers by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_grpo import study
from jax_grpo.study import Run, student_interval, student_quantile, wilson_interval

MEMORY = {
    "during": "update",
    "total": 3 * 2**20,
    "arguments": 2 * 2**20,
    "temporaries": 2**20,
    "outputs": 2**19,
    "aliases": 2**19,
    "beside": 0,
}


def run(method: str, seed: int, accuracy: float, **changes: Any) -> Run:
    before = {"accuracy": 0.4, "accuracy_greedy": 0.5, "accuracy_pass@8": 0.8, "mean_length": 12.0}
    after = {
        "accuracy": accuracy,
        "accuracy_greedy": accuracy,
        "accuracy_pass@8": 1.0,
        "mean_length": 30.0 + seed,
    }
    made = Run(method, seed, before, after, 60.0 + seed, 1000, 2000, MEMORY, {})
    return made._replace(**changes)


# --- Intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 10, 11, 20, 30, 100])
def test_student_quantile_by_summing_up_the_density(freedom):
    """The share of the t distribution below it, in small steps from 0, is 97.5 %."""
    at = np.linspace(0, student_quantile(freedom), 200_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    density = density * (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
    below = 0.5 + np.sum((density[1:] + density[:-1]) / 2) * (at[1] - at[0])
    assert below == pytest.approx(0.975, abs=2e-5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 0.7], (0.6, 0.6 - 12.7062 * 0.1, 0.6 + 12.7062 * 0.1)),  # s / √2 is 0.1
        ([1.0, 2.0, 3.0], (2.0, 2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3))),
        ([0.9, 0.9, 0.9], (0.9, 0.9, 0.9)),
    ],
)
def test_student_interval_by_hand(values, expected):
    assert student_interval(values) == pytest.approx(expected)


def test_one_seed_says_nothing_of_the_others():
    mean, low, high = student_interval([0.7])
    assert (mean, math.isnan(low), math.isnan(high)) == (0.7, True, True)


@pytest.mark.parametrize(("share", "count"), [(0.0, 20), (0.3, 10), (0.5, 512), (1.0, 100)])
def test_wilson_interval_is_where_the_score_test_turns(share, count):
    """At its ends the observed share is z standard deviations of the *true* share away."""
    mean, low, high = wilson_interval(share, count)
    assert mean == share
    for end, bound in ((low, 0), (high, 1)):
        if share == bound:
            assert end == pytest.approx(bound, abs=1e-12)
        else:
            assert abs(share - end) == pytest.approx(
                study.Z * math.sqrt(end * (1 - end) / count), rel=1e-6
            )


def test_shares_stay_shares():
    assert study.interval([0.9, 1.0], 512).high == 1.0
    assert study.interval([0.0, 0.1], 512).low == 0.0
    assert study.interval([0.5], 100) == wilson_interval(0.5, 100)
    assert study.interval([1.0], 100).high == 1.0


# --- The table -----------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


def test_table_by_hand():
    runs = [run("ppo", 0, 0.5), run("ppo", 1, 0.7), run("grpo", 0, 0.9), run("grpo", 1, 0.9)]
    text = study.table(runs, "accuracy", 100)
    lines = text.splitlines()
    assert cells(lines[0]) == [
        "method",
        "accuracy greedy",
        "accuracy sampled",
        "pass@8",
        "length",
        "seconds",
        "sampled tokens",
        "optimizer tokens",
        "memory",
    ]
    assert len({len(line) for line in lines[:5]}) == 1
    base, ppo, grpo = (cells(line) for line in lines[2:5])
    wilson = wilson_interval(0.5, 100)
    assert base[:2] == ["base", f"0.500 ({wilson.low:.3f} to {wilson.high:.3f})"]
    assert base[4:] == ["12.0", "", "", "", ""]
    # within 0 and 1, though Student's t of two seeds reaches far
    assert ppo[:2] == ["ppo", "0.600 (0.000 to 1.000)"]
    assert ppo[4:] == ["30.5", "60", "1,000", "2,000", "3 MiB"]
    assert grpo[2:4] == ["0.900 (0.900 to 0.900)", "1.000 (1.000 to 1.000)"]
    assert "100 held-out prompts; means over seeds 0, 1" in text


def test_ranking_pairs_seeds():
    """Methods that differ by the same in every seed differ for sure, whatever the seeds do."""
    accuracy = {"a": [0.1, 0.5, 0.9], "b": [0.2, 0.6, 1.0], "c": [0.5, 0.5, 0.49]}
    runs = [run(m, seed, x) for m, xs in accuracy.items() for seed, x in enumerate(xs)]
    _, _, *lines = study.ranking(runs, "accuracy")
    assert lines[0] == "- b over a by 0.100 (0.100 to 0.100)"
    assert lines[1].startswith("- a over c by 0.003 (")
    assert lines[1].endswith(": no clear difference")


def test_ranking_of_one_seed_claims_nothing():
    lines = study.ranking([run("a", 0, 0.25), run("b", 0, 0.5)], "accuracy")
    assert lines[-1] == "- b over a by 0.250"
    assert study.ranking([run("a", 0, 0.5)], "accuracy") == []


def test_memory_table():
    small = {**MEMORY, "total": 2**20 + 2**19, "during": "generate"}
    lines = study.memory_table({"ppo": MEMORY, "grpo": small}).splitlines()
    total = ["2 MiB", "1 MiB", "512 KiB", "512 KiB", "0 B", "3 MiB", "100%"]
    assert cells(lines[2]) == ["ppo", "update", *total]
    assert cells(lines[3])[:2] == ["grpo", "generate"]
    assert cells(lines[3])[-2:] == ["1.5 MiB", "50%"]


# --- The files -----------------------------------------------------------------------------------


def test_csv(tmp_path: Path):
    runs = [run("sft", 0, 0.5), run("grpo", 0, 0.9, after={"accuracy": 0.9, "more": 1.0})]
    study.write_csv(tmp_path / "study.csv", runs)
    with (tmp_path / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["sft", "grpo"]
    assert (rows[0]["before/accuracy"], rows[0]["after/accuracy_pass@8"]) == ("0.4", "1.0")
    assert (rows[0]["after/more"], rows[1]["after/more"]) == ("", "1.0")
    assert (rows[1]["memory/total"], rows[1]["optimizer_tokens"]) == (str(3 * 2**20), "2000")


def curve(*values: float) -> dict[str, dict[int, float]]:
    return {"reward": dict(enumerate(values, 1))}


def test_picture(tmp_path: Path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    runs = [
        run("sft", 0, 0.5),
        run("grpo", 0, 0.8, curves=curve(0.0, 1.0, 2.0)),
        run("grpo", 1, 0.9, curves=curve(1.0, 2.0)),
    ]
    study.draw(tmp_path / "study.png", runs, "accuracy", 100)
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    bars, panel = drawn[0].axes
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == pytest.approx([0.5, 0.5, 0.85, 0.4, 0.5, 0.85])  # greedy, then sampled
    assert [label.get_text() for label in bars.get_xticklabels()] == ["base", "sft", "grpo"]
    (line,) = panel.lines  # of grpo alone: the steps that both seeds took
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 2], [0.5, 1.5])
    assert panel.get_title() == "reward"


def test_without_matplotlib_one_line_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jax_grpo\[study\]'"):
        study.check_plotting()
