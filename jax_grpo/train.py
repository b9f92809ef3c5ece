"""The loop: prompts, rollout, rewards, advantages, loss, update; stage after stage.

    prompts ──► rollout ──► rewards ──► advantages ──► loss ──► update

`policy_step` and `dataset_step` are this line written out. The rest compiles a stage, resumes
it, and keeps the host from blocking the device: metrics of a step are fetched after the next
rollout has been dispatched.

A run is a recipe of stages on one model. Each stage has its own algorithm, data and optimizer,
starts from the parameters that the stage before left, and takes those as its reference.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_grpo import checkpoint, data, dataset, metrics, sampled
from jax_grpo.evaluate import fetch
from jax_grpo.scoring import Layout, plan
from jax_grpo.stages import (
    Batch,
    Evaluation,
    Functions,
    Model,
    Stage,
    Taken,
    abstract_params,
    compile_evaluation,
    compile_stage,
    reward_columns,
)
from jax_grpo.types import (
    Params,
    Rewards,
    Rollout,
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
    frozen: sampled.Frozen,
    step: int,
    dispatched: Callable[[], None],
) -> Taken:
    """One step on completions that the policy draws: the way of the data, written out.

    Args:
      model: the model.
      stage: what to do.
      run: its compiled functions.
      state: donated.
      frozen: the models that are not trained.
      step: from 0; with the stage's seed it decides prompts and draws.
      dispatched: called while the device samples.
    """
    rollout = sampled.draw(model, stage, run, state, step)  # [P, G, C]
    layout = plan(rollout)
    scores = sampled.ask(stage, run, state, frozen, layout)  # [P, G, C]
    dispatched()  # the update before this one has ended when it returns
    start = time.monotonic()
    completions = fetch(rollout)
    arrived = time.monotonic()

    # Verifiers run here while the device scores.
    judged = sampled.judge(model, stage, run, frozen, rollout, completions, step)  # [P, G, R]
    done = time.monotonic()
    first = int(completions.lengths.sum())
    drawn, redraws = first, 0
    while (again := sampled.unkept(stage, judged.rewards)).any() and redraws < stage.max_redraws:
        redraws += 1
        rollout = sampled.draw(model, stage, run, state, step, redraws)
        more = sampled.judge(model, stage, run, frozen, rollout, fetch(rollout), step)
        drawn += int(more.completions.lengths.sum())
        judged = sampled.refill(run, judged, more, again, sampled.unkept(stage, more.rewards))
    redrawn = time.monotonic()
    rollout, completions, rewards, logged, extra = judged
    if redraws:
        layout = plan(rollout)
        scores = sampled.ask(stage, run, state, frozen, layout)
    jax.block_until_ready(scores)  # the update needs them anyway
    scored = time.monotonic()

    weights_now = dict(state.algorithm_state)  # such as PPO's adaptive KL weight
    state, measured, batch = _learn(stage, run, state, rollout, layout, rewards, scores)
    measured |= weights_now
    names, weights = reward_columns(stage)
    tokens = int(completions.lengths.sum())
    prompt_tokens = int(np.sum(jax.device_get(rollout.prompts.lengths)))
    values, valid = np.asarray(rewards.values), np.asarray(rewards.valid)
    measured |= metrics.reward_metrics(values, valid, weights, names)
    measured |= metrics.completion_metrics(completions.lengths, completions.truncated)
    measured |= {name: sum(values) / len(values) for name, values in logged.items()}
    if stage.algorithm.keep is not None:
        measured |= {"redraws": redraws, "seconds/redraws": redrawn - done}
    measured |= {
        "temperature": float(rollout.temperature),
        "tokens": tokens + prompt_tokens,
        "sampled_tokens": drawn,
        "tokens_per_second/rollout": first / max(arrived - start, 1e-9),
        "seconds/rollout": arrived - start,
        "seconds/rewards": done - arrived,
        "seconds/scores": scored - redrawn,  # what is left of them when the rewards are there
    }
    return Taken(state, measured, batch, extra)


def dataset_step(
    model: Model,
    stage: Stage,
    run: Functions,
    state: TrainState,
    given: dataset.Given,
    step: int,
    dispatched: Callable[[], None],
) -> Taken:
    """One step on completions of the data set: the same way with another source."""
    number, into_round = round_of(stage, step)
    seed = (stage.seed, stage.number, *([number] if stage.collection else []))
    count, P = dataset.num_rows(given), stage.prompts_per_step
    rows = data.row_indices(seed, into_round, count, P)
    rollout, rewards, scores, tokens = dataset.batch(model, stage, given, rows)  # [P, G, C]
    state, measured, batch = _learn(stage, run, state, rollout, plan(rollout), rewards, scores)
    dispatched()
    return Taken(state, {**measured, "tokens": tokens}, batch)


def _learn(
    stage: Stage,
    run: Functions,
    state: TrainState,
    rollout: Rollout,
    layout: Layout,
    rewards: Rewards,
    scores: Scores,
) -> tuple[TrainState, dict[str, Any], Batch]:
    """Advantages and updates: what every step ends with."""
    experience, algorithm_state = run.experience(rollout, rewards, scores, state.algorithm_state)
    state, batch = state._replace(algorithm_state=algorithm_state), (layout, experience)
    state, measured = _updates(stage, run, state, batch)
    return state, measured, batch


def _updates(
    stage: Stage, run: Functions, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Any]]:
    """The optimizer steps over one batch: every minibatch in every pass."""
    rates = {"learning_rate": stage.learning_rate(state.step)}
    if stage.critic is not None:
        rates["critic/learning_rate"] = stage.critic.learning_rate(state.step)
    parts = run.split(batch) if stage.minibatches > 1 else [batch]
    seen = []
    for _ in range(stage.passes):
        for part in parts:
            state, measured = run.update(state, *part)
            seen.append(measured)
    # The sampler gap speaks of the first update: after it the policy has moved on.
    means = {name: sum(m[name] for m in seen) / len(seen) for name in seen[0]}
    first = {name: x for name, x in seen[0].items() if name.startswith("sampling/")}
    return state, {**means, **first, **rates}


class Ended(NamedTuple):
    """How a stage ended."""

    params: Params  # of the policy
    measures: dict[str, float]  # on held-out rows of its own, and what it took


def train_stage(model: Model, stage: Stage, params: Params, workdir: Path) -> Ended:
    """Runs a stage to its end, from its beginning or from its newest checkpoint.

    Args:
      model: the model.
      stage: what to do.
      params: float32, of the policy that the stage begins with; given up to the updates, unless
        it is a reward model that is trained.
      workdir: for checkpoints, metrics and what is needed to find out why it went wrong.

    Raises:
      Diverged: when more than `max_skipped` updates were not finite.
    """
    run = compile_stage(model, stage)
    began = time.monotonic()
    manager = checkpoint.open_checkpoints(
        workdir / "checkpoints" / stage.name,
        every=stage.checkpoint_every,
        keep=stage.keep_checkpoints,
    )
    restored = checkpoint.restore_latest(manager, run.state)
    state, frozen = _models(stage, run, params, workdir, None if restored is None else restored[1])
    kept = params if stage.algorithm.trains == "reward_model" else None
    del params
    counts = {"seconds": 0.0, "num_tokens": 0, "sampled_tokens": 0, "optimizer_tokens": 0}
    start, counts = (
        (0, {**counts, "skipped": 0}) if restored is None else (restored[0], restored[2])
    )
    del restored
    before = counts["seconds"]
    writers = metrics.open_writers(
        workdir,
        stage.name,
        total_steps=stage.num_steps,
        start_step=start,
        log_every=stage.log_every,
    )
    pending: tuple[int, float, Taken] | None = None
    given: dataset.Given | None = None

    def finish() -> None:
        """Waits for the update that was dispatched last, writes its metrics and looks at them."""
        nonlocal pending
        if pending is None:
            return
        (step, dispatched, taken), pending = pending, None
        jax.block_until_ready(taken.metrics["finite"])
        seconds = time.monotonic() - dispatched
        tokens = taken.metrics.pop("tokens")
        counts["num_tokens"] += tokens
        counts["optimizer_tokens"] += tokens * stage.passes
        counts["sampled_tokens"] += taken.metrics.pop("sampled_tokens", 0)
        rows = dataset.num_rows(given) if given else len(stage.data.rows)
        into_round = round_of(stage, step - 1)[1] + 1
        taken.metrics.update(
            {
                "num_tokens": counts["num_tokens"],
                "epoch": into_round * stage.prompts_per_step / rows,
                "seconds/update": seconds,
                "tokens_per_second/update": tokens / max(seconds, 1e-9),
            }
        )
        if taken.extra and jax.process_index() == 0:
            # What rewards said by log_extra: a step that is taken again replaces its own file.
            write_json(workdir / "extra" / f"{stage.name}-{step}.json", taken.extra)
        values = writers.write(step, taken.metrics)
        counts["skipped"] += round((1 - values["finite"]) * stage.passes * stage.minibatches)
        if counts["skipped"] > stage.max_skipped:
            manager.wait_until_finished()
            _stop(stage.name, step, taken, values, manager, workdir)

    def take(step: int) -> Taken:
        nonlocal given
        if stage.algorithm.source == "policy":
            return policy_step(model, stage, run, state, frozen, step, finish)
        number, into_round = round_of(stage, step)
        new = {}
        if given is None or into_round == 0:
            finish()
            policy = state.params if kept is None else kept
            given = dataset.prepare(model, stage, run, policy, number, workdir)
            if into_round == 0:
                new = {**given.metrics, "sampled_tokens": given.sampled_tokens}
        taken = dataset_step(model, stage, run, state, given, step, finish)
        taken.metrics.update(new)
        return taken

    try:
        for step in range(start, stage.num_steps):
            taken = take(step)
            state, pending = taken.state, (step + 1, time.monotonic(), taken)
            if stage.moving_reference and (step + 1) % stage.moving_reference.every == 0:
                state = run.move_reference(state)
            last = step + 1 == stage.num_steps
            if last or manager.should_save(step + 1):
                finish()
                counts["seconds"] = before + time.monotonic() - began
                checkpoint.save(manager, step + 1, state, dict(counts), force=last)
        measures = dataset.assess(model, stage, run, state.params)
    finally:
        writers.close()
        checkpoint.close(manager)
    took = {"seconds": before + time.monotonic() - began}
    took |= {name: counts[name] for name in ("sampled_tokens", "optimizer_tokens")}
    return Ended(state.params if kept is None else kept, {**measures, **took})


def _models(
    stage: Stage, run: Functions, params: Params, workdir: Path, restored: TrainState | None
) -> tuple[TrainState, sampled.Frozen]:
    """The state that a stage begins or goes on with, and the models that it does not train."""
    frozen, reward_model = sampled.Frozen(), None
    if stage.algorithm.needs_reference and stage.algorithm.source == "policy":
        if stage.moving_reference is None:
            frozen = frozen._replace(reference=run.frozen_copy(params))
    if stage.reward_model is not None:
        reward_model = stage.reward_model.read(workdir)
        frozen = frozen._replace(reward_model=run.frozen_copy(reward_model))
    if restored is None:
        begins = stage.critic is not None and stage.critic.start == "reward_model"
        return run.begin(params, reward_model if begins else None), frozen
    if stage.algorithm.trains == "policy":
        jax.tree.map(lambda x: x.delete(), params)  # whoever called holds them still
    return restored, frozen


def round_of(stage: Stage, step: int) -> tuple[int, int]:
    """The round of a stage that a step is in, and which of the round's steps it is."""
    rounds = stage.collection.rounds if stage.collection else 1
    return divmod(step, stage.num_steps // rounds)


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
                params = _params_before(model, initial, stages[:i], workdir)
            if "before" not in summary:
                summary["before"] = measure(params, stage.seed)
                save(summary)
            params, measures = train_stage(model, stage, params, workdir)
            if stage.algorithm.trains == "policy":
                measures = {**measure(params, stage.seed), **measures}
            summary["stages"][stage.name] = measures
            save(summary)
    return summary


def _params_before(
    model: Model, initial: Callable[[], Params], finished: Sequence[Stage], workdir: Path
) -> Params:
    """The policy that the finished stages left."""
    policies = [stage for stage in finished if stage.algorithm.trains == "policy"]
    return _params_after(model, policies[-1], workdir) if policies else initial()


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
