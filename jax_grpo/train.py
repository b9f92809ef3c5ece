"""The loop: prompts, rollout, rewards, advantages, loss, update; stage after stage.

    prompts ──► rollout ──► rewards ──► advantages ──► loss ──► update

`policy_step` and `dataset_step` are this line written out. The rest compiles a stage, resumes
it, and keeps the host from blocking the device: metrics of a step are fetched after the next
rollout has been dispatched.

A run is a recipe of stages on one model. Each stage has its own algorithm, data and optimizer,
starts from the parameters that the stage before left, and takes those as its reference.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo import checkpoint, data, metrics
from jax_grpo.evaluate import fetch, judge
from jax_grpo.sampling import purpose_key
from jax_grpo.scoring import plan
from jax_grpo.sharding import put_batch
from jax_grpo.stages import (
    TRAINING,
    Batch,
    Evaluation,
    Functions,
    Model,
    Stage,
    Taken,
    abstract_params,
    compile_evaluation,
    compile_stage,
)
from jax_grpo.step import init_state
from jax_grpo.types import (
    Params,
    Rewards,
    Scores,
    TrainState,
)


class Diverged(FloatingPointError):
    """More updates were not finite than the stage lets pass."""


def policy_step(
    model: Model,
    stage: Stage,
    run: Functions,
    state: TrainState,
    reference: Params | None,
    step: int,
    dispatched: Callable[[], None],
) -> Taken:
    """One step on completions that the policy draws: the way of the data, written out.

    Args:
      model: the model.
      stage: what to do.
      run: its compiled functions.
      state: donated.
      reference: parameters of the reference model, where the algorithm needs one.
      step: from 0; with the stage's seed it decides prompts and draws.
      dispatched: called while the device samples.
    """
    assert stage.sampling is not None and stage.verifiers is not None
    assert isinstance(stage.data, data.Prompts)
    rows = _rows(stage, step)  # [P]
    prompts = data.prompt_batch(stage.data, rows, stage.prompt_length)  # [P, L]
    prompts = put_batch(prompts, model.mesh)
    temperature = stage.sampling.temperature(step)
    key = purpose_key(stage.seed, stage.number, TRAINING, step)
    rollout = run.generate(
        run.sampling_copy(state.params), prompts, key, temperature, stage.sampling.max_new_tokens
    )  # [P, G, C]
    layout = plan(rollout)
    scores = Scores()
    if reference is not None:
        scores = Scores(reference_logps=run.score(reference, layout))  # [P, G, C]
    dispatched()  # the update before this one has ended when it returns
    start = time.monotonic()
    completions = fetch(rollout)
    sampled = time.monotonic()

    # Verifiers run here while the device scores the reference.
    logged: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    rewards = judge(
        stage.verifiers,
        model.tokenizer,
        stage.data,
        completions,
        trainer_state=SimpleNamespace(global_step=step, max_steps=stage.num_steps),
        log_metric=lambda name, value: logged.setdefault(name, []).append(float(value)),
        log_extra=lambda column, values: extra.update({column: list(values)}),
    )  # [P, G, R]
    judged = time.monotonic()
    jax.block_until_ready(scores)  # the update needs them anyway
    scored = time.monotonic()

    experience, algorithm_state = run.experience(rollout, rewards, scores, state.algorithm_state)
    state, batch = state._replace(algorithm_state=algorithm_state), (layout, experience)
    state, measured = _updates(stage, run, state, batch)
    names, weights = stage.verifiers.names, stage.verifiers.weights
    tokens = int(completions.lengths.sum())
    values, valid = np.asarray(rewards.values), np.asarray(rewards.valid)
    measured |= metrics.reward_metrics(values, valid, weights, names)
    measured |= metrics.completion_metrics(completions.lengths, completions.truncated)
    measured |= {name: sum(values) / len(values) for name, values in logged.items()}
    measured |= {
        "temperature": temperature,
        "tokens": tokens + sum(len(stage.data.token_ids[row]) for row in rows),
        "tokens_per_second/rollout": tokens / max(sampled - start, 1e-9),
        "seconds/rollout": sampled - start,
        "seconds/rewards": judged - sampled,
        "seconds/reference": scored - sampled if reference is not None else 0.0,
    }
    return Taken(state, measured, batch, extra)


def dataset_step(
    model: Model,
    stage: Stage,
    run: Functions,
    state: TrainState,
    step: int,
    dispatched: Callable[[], None],
) -> Taken:
    """One step on completions of the data set: the same way with another source."""
    assert isinstance(stage.data, data.Demonstrations)
    rows = _rows(stage, step)
    rollout = data.demonstration_rollout(
        stage.data, rows, stage.prompt_length, stage.completion_length
    )
    tokens = int(rollout.lengths.sum() + rollout.prompts.lengths.sum())
    rollout = put_batch(rollout, model.mesh)
    none = jnp.zeros((*rollout.lengths.shape, 0), jnp.float32)  # R = 0
    rewards = Rewards(none, none.astype(bool))
    experience, algorithm_state = run.experience(rollout, rewards, Scores(), state.algorithm_state)
    state, batch = state._replace(algorithm_state=algorithm_state), (plan(rollout), experience)
    state, measured = _updates(stage, run, state, batch)
    dispatched()
    return Taken(state, {**measured, "tokens": tokens}, batch)


def _rows(stage: Stage, step: int) -> Any:
    """Which rows of the data a step takes, `[P]`."""
    seed = (stage.seed, stage.number)
    return data.row_indices(seed, step, len(stage.data.rows), stage.prompts_per_step)


def _updates(
    stage: Stage, run: Functions, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Any]]:
    """The optimizer steps over one batch: every minibatch in every pass."""
    rate = stage.learning_rate(state.step)
    parts = run.split(batch) if stage.minibatches > 1 else [batch]
    seen = []
    for _ in range(stage.passes):
        for part in parts:
            state, measured = run.update(state, *part)
            seen.append(measured)
    # The sampler gap speaks of the first update: after it the policy has moved on.
    means = {name: sum(m[name] for m in seen) / len(seen) for name in seen[0]}
    first = {name: x for name, x in seen[0].items() if name.startswith("sampling/")}
    if stage.algorithm.source == "dataset":
        means = {name: x for name, x in means.items() if name not in first}
        first = {}
    return state, {**means, **first, "learning_rate": rate}


def train_stage(model: Model, stage: Stage, params: Params, workdir: Path) -> tuple[Params, float]:
    """Runs a stage to its end, from its beginning or from its newest checkpoint.

    Args:
      model: the model.
      stage: what to do.
      params: float32, those that the stage begins with; given up to the updates.
      workdir: for checkpoints, metrics and what is needed to find out why it went wrong.

    Returns:
      The parameters at its end, and the seconds that it took, earlier parts included.

    Raises:
      Diverged: when more than `max_skipped` updates were not finite.
    """
    run = compile_stage(model, stage)
    began = time.monotonic()
    reference = run.reference_copy(params) if stage.algorithm.needs_reference else None
    manager = checkpoint.open_checkpoints(
        workdir / "checkpoints" / stage.name,
        every=stage.checkpoint_every,
        keep=stage.keep_checkpoints,
    )
    restored = checkpoint.restore_latest(manager, run.state)
    if restored is not None:
        start, state, meta = restored
        jax.tree.map(lambda x: x.delete(), params)  # whoever called holds them still
    else:
        start, meta = 0, {"seconds": 0.0, "num_tokens": 0, "skipped": 0}
        make = functools.partial(init_state, optimizer=stage.optimizer, algorithm=stage.algorithm)
        shardings = jax.tree.map(lambda x: x.sharding, run.state)
        state = jax.jit(make, donate_argnums=0, out_shardings=shardings)(params)
    del params
    writers = metrics.open_writers(
        workdir,
        stage.name,
        total_steps=stage.num_steps,
        start_step=start,
        log_every=stage.log_every,
    )
    pending: tuple[int, float, Taken] | None = None
    skipped, tokens, before = meta["skipped"], meta["num_tokens"], meta["seconds"]

    def finish() -> None:
        """Waits for the update that was dispatched last, writes its metrics and looks at them."""
        nonlocal pending, skipped, tokens
        if pending is None:
            return
        (step, dispatched, taken), pending = pending, None
        jax.block_until_ready(taken.metrics["finite"])
        seconds = time.monotonic() - dispatched
        new_tokens = taken.metrics.pop("tokens")
        tokens += new_tokens
        taken.metrics.update(
            {
                "num_tokens": tokens,
                "epoch": step * stage.prompts_per_step / len(stage.data.rows),
                "seconds/update": seconds,
                "tokens_per_second/update": new_tokens / max(seconds, 1e-9),
            }
        )
        if taken.extra and jax.process_index() == 0:
            # What rewards said by log_extra: a step that is taken again replaces its own file.
            write_json(workdir / "extra" / f"{stage.name}-{step}.json", taken.extra)
        values = writers.write(step, taken.metrics)
        skipped += round((1 - values["finite"]) * stage.passes * stage.minibatches)
        if skipped > stage.max_skipped:
            manager.wait_until_finished()
            _stop(stage.name, step, taken, values, manager, workdir)

    def take(step: int) -> Taken:
        if stage.algorithm.source == "policy":
            return policy_step(model, stage, run, state, reference, step, finish)
        return dataset_step(model, stage, run, state, step, finish)

    try:
        for step in range(start, stage.num_steps):
            taken = take(step)
            state, pending = taken.state, (step + 1, time.monotonic(), taken)
            last = step + 1 == stage.num_steps
            if last or manager.should_save(step + 1):
                finish()
                seconds = before + time.monotonic() - began
                meta = {"seconds": seconds, "num_tokens": tokens, "skipped": skipped}
                checkpoint.save(manager, step + 1, state, meta, force=last)
    finally:
        writers.close()
        checkpoint.close(manager)
    return state.params, before + time.monotonic() - began


def _stop(
    stage: str, step: int, taken: Taken, values: Mapping[str, float], manager: Any, workdir: Path
) -> None:
    """Saves what helps to find out why an update was not finite, and raises."""
    file = checkpoint.save_debug(
        workdir / "debug", f"{stage}-{step}", {"batch": taken.batch, "metrics": dict(values)}
    )
    good = manager.latest_step()
    where = f"{manager.directory / str(good)}" if good is not None else "none was written yet"
    raise Diverged(
        f"stage {stage}, step {step}: loss {values['loss']}, grad_norm {values['grad_norm']} are "
        f"not finite; its batch is in {file}; last good checkpoint: {where}"
    )


def train(
    model: Model,
    initial: Callable[[], Params],
    stages: Sequence[Stage],
    evaluation: Evaluation | None,
    workdir: Path,
) -> dict[str, Any]:
    """Runs the stages of a recipe that are not finished yet.

    Args:
      model: the model.
      initial: makes or loads the parameters that the first stage begins with.
      stages: in order.
      evaluation: what to measure before the first and after each stage.
      workdir: where everything goes; a run that is there goes on where it was.

    Returns:
      The summary, as it is in `WORKDIR/summary.json`: `before`, and each of `stages` by name.
    """
    file = workdir / "summary.json"
    summary: dict[str, Any] = {"stages": {}}
    if file.exists():
        summary = json.loads(file.read_text())

    def save(summary: Mapping[str, Any]) -> None:
        if jax.process_index() == 0:
            write_json(file, summary)

    measure = compile_evaluation(model, evaluation) if evaluation else lambda params, seed: {}
    params: Params | None = None
    with jax.set_mesh(model.mesh):
        for i, stage in enumerate(stages):
            if stage.name in summary["stages"]:
                continue
            if params is None:
                params = initial() if i == 0 else _params_after(model, stages[i - 1], workdir)
            if "before" not in summary:
                summary["before"] = measure(params, stage.seed)
                save(summary)
            params, seconds = train_stage(model, stage, params, workdir)
            summary["stages"][stage.name] = {**measure(params, stage.seed), "seconds": seconds}
            save(summary)
    return summary


def _params_after(model: Model, stage: Stage, workdir: Path) -> Params:
    """The parameters that a finished stage left."""
    directory = workdir / "checkpoints" / stage.name
    restored = checkpoint.read_params(directory, abstract_params(model))
    if restored is None:
        raise ValueError(
            f"stage {stage.name} is finished but there is no checkpoint in {directory}"
        )
    return restored[1]


def write_json(file: Path, content: Any) -> None:
    """Replaces a JSON file at once, so that a kill leaves the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=2, default=str) + "\n")
    os.replace(draft, file)
