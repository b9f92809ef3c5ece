"""The main job: the quickstart discovers that thinking pays, on three seeds out of three."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in (1, 2))]
)
def test_accuracy_and_length_rise_on_held_out_problems(seed, tmp_path):
    command = [sys.executable, "-m", "jax_grpo", "train", f"--config={CONFIG}"]
    command += [f"--workdir={tmp_path / 'run'}", f"--config.seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["stages"]["sft"], summary["stages"]["grpo"]
    print(done.stdout)
    for name in ("accuracy", "accuracy_greedy"):
        assert before[name] <= 0.6
        assert after[name] >= 0.9
    for name in ("mean_length", "mean_length_greedy"):
        assert after[name] >= 1.5 * before[name]
    assert after["format"] >= 0.9
    assert before["seconds"] + after["seconds"] <= 300  # with the cores to itself: `-n 0`

    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert again.stdout == done.stdout
