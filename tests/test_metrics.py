"""Metrics: one step late, never twice, and worked by hand."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.metrics import completion_metrics, open_writers, reward_metrics


def _rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _write(workdir, stage, steps, *, start_step=0, offset=0.0):
    writers = open_writers(
        workdir, stage, total_steps=10, start_step=start_step, progress=False, log_every=100
    )
    for step in steps:
        writers.write(step, {"loss": jnp.float32(step + offset)})
    writers.close()


def test_metrics_are_fetched_and_written_as_floats(tmp_path):
    writers = open_writers(tmp_path, "sft", total_steps=3, progress=False)
    found = writers.write(1, {"loss": jnp.float32(0.25), "tokens": 7})
    assert found == {"loss": 0.25, "tokens": 7.0}
    assert _rows(tmp_path) == [{"stage": "sft", "step": 1, "loss": 0.25, "tokens": 7.0}]
    assert math.isnan(writers.write(2, {"loss": jnp.float32(math.nan)})["loss"])
    writers.close()
    assert _rows(tmp_path)[1:] == [{"stage": "sft", "step": 2, "loss": None}]  # JSON has no NaN


def test_no_line_twice_after_resume(tmp_path):
    _write(tmp_path, "sft", [1, 2])
    _write(tmp_path, "grpo", [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "st')  # killed in the middle of a line
    _write(tmp_path, "grpo", [3, 4, 5], start_step=2, offset=0.5)
    assert [(row["stage"], row["step"], row["loss"]) for row in _rows(tmp_path)] == [
        ("sft", 1, 1.0),
        ("sft", 2, 2.0),
        ("grpo", 1, 1.0),
        ("grpo", 2, 2.0),
        ("grpo", 3, 3.5),
        ("grpo", 4, 4.5),
        ("grpo", 5, 5.5),
    ]


def test_resuming_a_stage_cuts_later_stages_too(tmp_path):
    _write(tmp_path, "sft", [1, 2])
    _write(tmp_path, "grpo", [1])
    _write(tmp_path, "sft", [], start_step=2)  # finished: nothing to do again
    assert len(_rows(tmp_path)) == 3
    _write(tmp_path, "sft", [], start_step=1)
    assert [(row["stage"], row["step"]) for row in _rows(tmp_path)] == [("sft", 1)]


def test_tensorboard_events_without_tensorflow(tmp_path):
    _write(tmp_path, "grpo", [1, 2])
    (events,) = (tmp_path / "tensorboard" / "grpo").glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()


def test_lines_show_what_is_there(tmp_path, capsys):
    writers = open_writers(tmp_path, "grpo", total_steps=4, progress=False, log_every=2)
    metrics = {"reward": 1.9312, "loss": 0.1, "completions/mean_length": 1234.5, "kl": 0.01234}
    for step in (1, 2, 3, 4):
        writers.write(step, {**metrics, "entropy": 2.0, "grad_norm": 0.8})
    writers.close()
    lines = capsys.readouterr().err.splitlines()
    shown = "reward 1.93 length 1234 kl 0.0123 grad_norm 0.8"
    assert [line.split(" s/step")[0].rsplit(" ", 1)[0] for line in lines] == [
        f"grpo 1/4 {shown}",
        f"grpo 2/4 {shown}",
        f"grpo 4/4 {shown}",
    ]
    assert lines[-1].endswith(" s/step eta 0 s")

    _write(tmp_path, "sft", [1])
    assert capsys.readouterr().err.startswith("sft 1/10 loss 1 ")


def test_progress_bar(tmp_path, capsys):
    writers = open_writers(tmp_path, "grpo", total_steps=4, start_step=2, progress=True)
    writers.write(3, {"reward": 2.5})
    writers.write(4, {"reward": 2.75})
    writers.close()
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert "grpo: 100%" in last
    assert "4/4" in last
    assert "reward 2.75" in last


def test_a_terminal_decides_between_bar_and_lines(tmp_path, capsys):
    writers = open_writers(tmp_path, "grpo", total_steps=2)  # under test stderr is none
    writers.write(1, {"reward": 2.5})
    writers.close()
    assert capsys.readouterr().err.startswith("grpo 1/2 reward 2.5 ")


def test_log_every_is_checked(tmp_path):
    with pytest.raises(ValueError, match="log_every must be at least 1, got 0"):
        open_writers(tmp_path, "grpo", total_steps=2, log_every=0)


def test_reward_metrics_by_hand():
    nan = np.float32(math.nan)  # where invalid, a value is ignored whatever it is
    values = np.array(
        [
            [[2, 1], [0, 1], [0, nan]],  # totals 2.5, 0.5, 0
            [[2, 0], [2, 0], [nan, nan]],  # 2, 2, none: constant and right
            [[0, 0], [0, 0], [0, 0]],  # constant and wrong
            [[nan, nan], [nan, nan], [nan, nan]],  # no reward at all: left out
        ],
        np.float32,
    )
    found = reward_metrics(values, ~np.isnan(values), [1.0, 0.5], ["correct", "format"])
    totals = [2.5, 0.5, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0]  # sum 7, sum of squares 14.5
    correct = [2, 0, 0, 2, 2, 0, 0, 0]  # sum 6, squares 12
    expected = {
        "reward": 7 / 8,
        "reward_std": math.sqrt((14.5 - 7**2 / 8) / 7),
        "rewards/correct/mean": 6 / 8,
        "rewards/correct/std": math.sqrt((12 - 6**2 / 8) / 7),
        "rewards/format/mean": 2 / 7,
        "rewards/format/std": math.sqrt((2 - 2**2 / 7) / 6),
        "frac_reward_zero_std": 2 / 3,
        "frac_groups_all_right": 1 / 3,
        "frac_groups_all_wrong": 1 / 3,
    }
    assert len(totals) == len(correct) == 8
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_constant_group_of_awkward_floats_is_constant():
    values = np.full((1, 8, 1), 0.1, np.float32)
    found = reward_metrics(values, np.ones_like(values, bool), [1.0], ["r"])
    assert found["frac_reward_zero_std"] == 1.0


def test_no_rewards_at_all_are_nan_and_warn_of_nothing():
    values = np.zeros((1, 2, 1), np.float32)
    found = reward_metrics(values, np.zeros_like(values, bool), [1.0], ["r"])
    assert all(math.isnan(value) for value in found.values())


def test_completion_metrics_by_hand():
    lengths = np.array([[3, 8], [5, 8]])
    truncated = np.array([[False, True], [False, False]])
    assert completion_metrics(lengths, truncated) == pytest.approx(
        {
            "completions/mean_length": 6.0,
            "completions/min_length": 3.0,
            "completions/max_length": 8.0,
            "completions/mean_terminated_length": 16 / 3,
            "completions/min_terminated_length": 3.0,
            "completions/max_terminated_length": 8.0,
            "completions/clipped_ratio": 0.25,
        }
    )
    found = completion_metrics(lengths, np.ones_like(truncated))
    assert math.isnan(found["completions/mean_terminated_length"])
    assert found["completions/mean_length"] == 6.0
