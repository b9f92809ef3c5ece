"""The data of a stage that does not sample, as its steps take them.

What is given or collected is packed where asked, and scored once by the reference that the
algorithm needs: its log-probs are kept, on the host and in a file, so that no second model is held.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_grpo import data
from jax_grpo.arrays import divide
from jax_grpo.collect import collect
from jax_grpo.packing import Packed, pack, packed_rollout
from jax_grpo.scoring import plan
from jax_grpo.sharding import put_batch
from jax_grpo.stages import Functions, Model, Stage
from jax_grpo.types import Params, Rewards, Rollout, Scores


class Given(NamedTuple):
    """The data of a round (all of the stage, unless it collects)."""

    demonstrations: data.Demonstrations
    packed: Packed | None
    reference: np.ndarray | None  # [rows, G, C] float32, log-probs
    sampled_tokens: int = 0
    metrics: Mapping[str, float] = {}


def num_rows(given: Given) -> int:
    """How many there are of what a step takes P of."""
    return len(given.packed.rows if given.packed else given.demonstrations.rows)


def prepare(
    model: Model, stage: Stage, run: Functions, params: Params, number: int, workdir: Path
) -> Given:
    """The data of a round.

    Args:
      model: the model.
      stage: one whose algorithm's source is the data set.
      run: its compiled functions.
      params: float32, of the policy at the round's beginning: what writes the data where they are
        collected, and what the reference is.
      number: the round's, from 0.
      workdir: of the run.
    """
    tokens = 0
    metrics: Mapping[str, float] = {}
    if stage.collection is None:
        assert isinstance(stage.data, data.Demonstrations)
        demonstrations = stage.data
    else:
        demonstrations, tokens, metrics = collect(model, stage, run, params, number, workdir)
    packed = pack(demonstrations, stage.pack) if stage.pack else None
    given, reference = Given(demonstrations, packed, None, tokens, metrics), None
    if stage.algorithm.needs_reference:
        file = workdir / "reference" / f"{stage.name}-{number}.npy"
        reference = _kept(file, lambda: _score_all(model, stage, run, params, given))
    return given._replace(reference=reference)


def batch(
    model: Model, stage: Stage, given: Given, rows: np.ndarray
) -> tuple[Rollout, Rewards, Scores, int]:
    """Rollout, rewards and scores of P rows of what a step takes, on the mesh, and their tokens."""
    shown = given.demonstrations
    if given.packed is None:
        rollout = data.demonstration_rollout(
            shown, rows, stage.prompt_length, stage.completion_length
        )
        rewards = data.demonstration_rewards(shown, rows)
    else:
        rollout = packed_rollout(shown, given.packed, rows, stage.pack)
        none = np.zeros((*rollout.lengths.shape, 0), np.float32)
        rewards = Rewards(none, none.astype(bool))
    reference = None if given.reference is None else given.reference[rows]
    # Counted on the host: asked of the device, a number waits for all that was dispatched before.
    tokens = int(rollout.lengths.sum() + rollout.prompts.lengths.sum())
    scores: Any = Scores(reference_logps=reference)
    return *put_batch((rollout, rewards, scores), model.mesh), tokens


def _score_all(
    model: Model, stage: Stage, run: Functions, params: Params, given: Given
) -> np.ndarray:
    """Log-probs of all completions by the model as it is now, [rows, G, C]."""
    parts = []
    for rows, real in _batches(num_rows(given), stage.prompts_per_step):
        rollout, *_ = batch(model, stage, given, rows)
        parts.append(np.asarray(run.logps(params, plan(rollout)))[:real])
    return np.concatenate(parts)


def _batches(count: int, size: int) -> list[tuple[np.ndarray, int]]:
    """All rows in batches of one size, the last filled with repeats, and how many are new."""
    starts = range(0, count, size)
    return [(np.arange(i, i + size) % count, min(size, count - i)) for i in starts]


def _kept(file: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in a file, made if it is not there."""
    if file.exists():
        return np.load(file)
    array = make()
    if jax.process_index() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".tmp.npy")
        np.save(draft, array)
        os.replace(draft, file)
    return array


def assess(model: Model, stage: Stage, run: Functions, params: Params) -> dict[str, float]:
    """The terms of the stage's loss on its held-out rows, as `heldout/NAME`; none without any."""
    if stage.heldout is None:
        return {}
    given = Given(stage.heldout, None, None)
    sums: dict[str, np.ndarray] = {}
    for rows, real in _batches(num_rows(given), stage.prompts_per_step):
        rollout, rewards, scores, _ = batch(model, stage, given, rows)
        rollout = _without(rollout, real)
        experience, _ = run.experience(rollout, rewards, scores, stage.algorithm.state)
        terms = run.assess(params, plan(rollout), experience)
        for name, pair in jax.device_get(terms).items():
            sums[name] = sums.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {f"heldout/{name}": float(divide(*pair)) for name, pair in sums.items()}


def _without(rollout: Rollout, real: int) -> Rollout:
    """A rollout of whose groups only the first `real` count."""
    counts = np.arange(rollout.mask.shape[0]) < real
    return rollout._replace(mask=rollout.mask & counts[:, None, None])
