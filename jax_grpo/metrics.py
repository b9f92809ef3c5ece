"""Metrics: to `metrics.jsonl`, to TensorBoard and to the terminal.

The loop hands them over one step late, when the device has them and is busy with the next. Only
process 0 writes; all processes get the numbers back, to agree on what to do about them.

The names are those that TRL's users know. What the host knows without the device, rewards and
lengths, is summed up here in NumPy.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from tensorboardX import SummaryWriter
from tqdm import tqdm

Metrics = dict[str, float]
Sink = Callable[[int, Metrics], None]

# What a person sees while it runs: metric and its short name. The loss only where there is no
# reward, since a policy-gradient loss says nothing about progress.
_SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "completions/mean_length": "length",
    "kl": "kl",
    "grad_norm": "grad_norm",
}


class Writers:
    """Holds the open files."""

    def __init__(self, sinks: Sequence[Sink], resources: ExitStack) -> None:
        """Takes over `resources`; use `open_writers`."""
        self._sinks = sinks
        self._resources = resources

    def write(self, step: int, metrics: Mapping[str, ArrayLike]) -> Metrics:
        """Fetches a step's metrics and writes them everywhere.

        Args:
          step: steps taken, this one included.
          metrics: scalars, on the device or not; fetching them waits for the device.

        Returns:
          The metrics as floats.
        """
        fetched = jax.device_get(dict(metrics))
        floats = {name: float(value) for name, value in fetched.items()}
        for sink in self._sinks:
            sink(step, floats)
        return floats

    def close(self) -> None:
        """Closes all files."""
        self._resources.close()


def open_writers(
    workdir: str | PathLike[str],
    stage: str,
    *,
    total_steps: int,
    start_step: int = 0,
    progress: bool | None = None,
    log_every: int = 10,
) -> Writers:
    """Opens the writers of a stage, at its start or where it is resumed.

    Lines of `metrics.jsonl` about steps that will be taken again are cut off.

    Args:
      workdir: a local directory, made if missing.
      stage: name of the stage, the first field of each line.
      total_steps: optimizer steps of the stage.
      start_step: steps already taken.
      progress: a progress bar on stderr, or else a line every `log_every` steps; None means a bar
        if that is a terminal.
      log_every: steps between lines.

    Raises:
      ValueError: `log_every` is less than 1.
    """
    if log_every < 1:
        raise ValueError(f"log_every must be at least 1, got {log_every}")
    resources = ExitStack()
    if jax.process_index() != 0:
        return Writers([], resources)
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    bar = sys.stderr.isatty() if progress is None else progress
    sinks = [
        _jsonl_sink(resources, workdir / "metrics.jsonl", stage, start_step),
        _tensorboard_sink(resources, workdir / "tensorboard" / stage, start_step),
        _bar_sink(resources, stage, total_steps, start_step)
        if bar
        else _line_sink(stage, total_steps, start_step, log_every),
    ]
    return Writers(sinks, resources)


def _jsonl_sink(resources: ExitStack, path: Path, stage: str, start_step: int) -> Sink:
    """Appends one JSON object per step; what is not finite becomes null, as JSON has no NaN."""
    _cut_lines_after(path, stage, start_step)
    file = resources.enter_context(path.open("a", encoding="utf-8", buffering=1))

    def write(step: int, metrics: Metrics) -> None:
        finite = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        file.write(json.dumps({"stage": stage, "step": step, **finite}) + "\n")

    return write


def _cut_lines_after(path: Path, stage: str, step: int) -> None:
    """Cuts a `metrics.jsonl` before the first line of `stage` after `step`, or a broken one.

    The file is in the order of time, so what follows (later stages too) will be written again.
    """
    if not path.exists():
        return
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or (row["stage"] == stage and row["step"] > step):
                break
            kept += len(line)
        file.truncate(kept)


def _tensorboard_sink(resources: ExitStack, directory: Path, start_step: int) -> Sink:
    """Writes TensorBoard scalars; it hides what earlier event files say of the steps to come."""
    writer = resources.enter_context(SummaryWriter(str(directory), purge_step=start_step + 1))

    def write(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)

    return write


def _bar_sink(resources: ExitStack, stage: str, total_steps: int, start_step: int) -> Sink:
    """Draws a progress bar on stderr."""
    bar = resources.enter_context(
        tqdm(total=total_steps, initial=start_step, desc=stage, file=sys.stderr, dynamic_ncols=True)
    )

    def show(step: int, metrics: Metrics) -> None:
        bar.set_postfix_str(_summary(metrics), refresh=False)
        bar.update(step - bar.n)

    return show


def _line_sink(stage: str, total_steps: int, start_step: int, log_every: int) -> Sink:
    """Prints a line on stderr every few steps, and at the first and last."""
    last_time, last_step = time.monotonic(), start_step

    def show(step: int, metrics: Metrics) -> None:
        nonlocal last_time, last_step
        if step % log_every and step not in (start_step + 1, total_steps):
            return
        now = time.monotonic()
        pace = (now - last_time) / max(1, step - last_step)
        last_time, last_step = now, step
        print(
            f"{stage} {step}/{total_steps} {_summary(metrics)} {_short(pace)} s/step "
            f"eta {_duration(pace * (total_steps - step))}",
            file=sys.stderr,
            flush=True,
        )

    return show


def _summary(metrics: Metrics) -> str:
    """Says in a few words what is in `metrics` of what is shown."""
    return " ".join(
        f"{short} {_short(metrics[name])}"
        for name, short in _SHOWN.items()
        if name in metrics and not (name == "loss" and "reward" in metrics)
    )


def _short(value: float) -> str:
    """Returns a number in three digits, or all of them before the point."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Returns a time in the unit that a person would choose."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def reward_metrics(
    values: np.ndarray, valid: np.ndarray, weights: Sequence[float], names: Sequence[str]
) -> Metrics:
    """Sums up the rewards of a step, on the host.

    The reward of a completion is the weighted sum over the functions that gave it one; those
    without any are left out, and so are groups without any. A constant group is one whose largest
    and smallest reward are equal: it teaches nothing. It counts as all right when that reward is
    more than 0 and as all wrong otherwise. Standard deviations are unbiased and over the whole
    batch. What has nothing to average is NaN.

    Args:
      values: `[P, G, R]`.
      valid: `[P, G, R]` bool, False where the function gave None.
      weights: `[R]`.
      names: of the R functions.

    Returns:
      `reward`, `reward_std`, `rewards/NAME/mean`, `rewards/NAME/std`, `frac_reward_zero_std`,
      `frac_groups_all_right` and `frac_groups_all_wrong`.
    """
    # [P, G] in float32, so that what is constant here is what is constant on the device.
    totals = (np.where(valid, values, 0) * np.asarray(weights, np.float32)).sum(
        -1, dtype=np.float32
    )
    scored = np.asarray(valid.any(-1))
    groups = [total[there] for total, there in zip(totals, scored, strict=True) if there.any()]
    constant = [group[0] for group in groups if group.max() == group.min()]
    right = sum(reward > 0 for reward in constant)
    columns = zip(names, np.moveaxis(values, -1, 0), np.moveaxis(valid, -1, 0), strict=True)
    by_name = {
        f"rewards/{name}/{kind}": statistic(column[there])
        for name, column, there in columns
        for kind, statistic in (("mean", _mean), ("std", _std))
    }
    return {
        "reward": _mean(totals[scored]),
        "reward_std": _std(totals[scored]),
        **by_name,
        "frac_reward_zero_std": _share(len(constant), len(groups)),
        "frac_groups_all_right": _share(right, len(groups)),
        "frac_groups_all_wrong": _share(len(constant) - right, len(groups)),
    }


def completion_metrics(lengths: np.ndarray, truncated: np.ndarray) -> Metrics:
    """Sums up how long the completions of a step are, in tokens, end token included.

    Args:
      lengths: `[P, G]` int.
      truncated: `[P, G]` bool, True for what the length limit ended ("clipped" in TRL).

    Returns:
      `completions/mean_length` and `min`, `max`, the same of those that ended by themselves
      (`mean_terminated_length`, ...; NaN if none did), and `completions/clipped_ratio`.
    """
    kinds = {"length": lengths.ravel(), "terminated_length": lengths[~truncated]}
    statistics: dict[str, Callable[..., Any]] = {"mean": np.mean, "min": np.min, "max": np.max}
    return {
        f"completions/{name}_{kind}": float(statistic(some)) if some.size else math.nan
        for kind, some in kinds.items()
        for name, statistic in statistics.items()
    } | {"completions/clipped_ratio": float(truncated.mean())}


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else math.nan


def _std(values: np.ndarray) -> float:
    """Returns the unbiased standard deviation, 0 for a single value."""
    if values.size < 2:
        return 0.0 if values.size else math.nan
    return float(values.std(ddof=1, dtype=np.float64))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
