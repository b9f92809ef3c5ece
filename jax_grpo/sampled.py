"""The completions of a stage that samples, as its steps take them: drawn, judged, drawn again.

What `dataset.py` is to a stage of given completions, this is to one whose policy speaks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_grpo import data, evaluate
from jax_grpo.evaluate import Completions
from jax_grpo.sampling import purpose_key
from jax_grpo.scoring import Layout, plan
from jax_grpo.sharding import put_batch
from jax_grpo.stages import TRAINING, Functions, Model, Stage
from jax_grpo.types import Params, PyTree, Rewards, Rollout, Scores, TrainState


class Frozen(NamedTuple):
    """The models that a stage holds and does not train, in the compute dtype."""

    reference: Params | None = None  # where it does not move with the policy
    reward_model: Params | None = None


class Judged(NamedTuple):
    """A rollout and what it is worth."""

    rollout: Rollout
    completions: Completions
    rewards: Rewards  # [P, G, R]
    logged: dict[str, list[float]]
    extra: dict[str, list[Any]]


def draw(
    model: Model, stage: Stage, run: Functions, state: TrainState, step: int, redraw: int = 0
) -> Rollout:
    """Dispatches a step's rollout; the prompts of a redraw are others.

    The sampling copy is gone when it has been drawn: it is made again for each.
    """
    assert stage.sampling is not None and isinstance(stage.data, data.Prompts)
    count, P = len(stage.data.rows), stage.prompts_per_step
    seed, key = (stage.seed, stage.number), purpose_key(stage.seed, stage.number, TRAINING, step)
    rows = data.row_indices(seed, step, count, P)
    if redraw:
        rows = data.row_indices((*seed, step, redraw), 0, count, P)
        key = jax.random.fold_in(key, redraw)
    prompts = put_batch(data.prompt_batch(stage.data, rows, stage.prompt_length), model.mesh)
    temperature = stage.sampling.temperature(step)
    sampler, limit = run.sampling_copy(state.params), stage.sampling.max_new_tokens
    return run.generate(sampler, prompts, key, temperature, limit)


def ask(stage: Stage, run: Functions, state: TrainState, frozen: Frozen, layout: Layout) -> Scores:
    """Dispatches what the algorithm's flags ask for, `[P, G, C]` each."""
    wanted, scores = stage.algorithm, Scores()
    if wanted.needs_reference:
        reference: PyTree = state.reference if stage.moving_reference else frozen.reference
        scores = scores._replace(reference_logps=run.logps(reference, layout))
    if wanted.needs_proximal:
        scores = scores._replace(proximal_logps=run.logps(state.params, layout))
    if wanted.needs_critic:
        scores = scores._replace(values=run.values(state.critic, layout))
    return scores


def judge(
    model: Model,
    stage: Stage,
    run: Functions,
    frozen: Frozen,
    rollout: Rollout,
    completions: Completions,
    step: int,
) -> Judged:
    """What the verifiers say, and the reward model, whose column is the last."""
    assert isinstance(stage.data, data.Prompts)
    scores = None
    if frozen.reward_model is not None:
        scores = run.reward_scores(frozen.reward_model, plan(rollout))
    logged: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}
    rewards = evaluate.judge(
        stage.verifiers,
        model.tokenizer,
        stage.data,
        completions,
        trainer_state=SimpleNamespace(global_step=step, max_steps=stage.num_steps),
        log_metric=lambda name, value: logged.setdefault(name, []).append(float(value)),
        log_extra=lambda column, values: extra.update({column: list(values)}),
    )
    if scores is not None:
        column = np.asarray(scores)[..., None]
        rewards = Rewards(
            np.concatenate([rewards.values, column], axis=-1),
            np.concatenate([rewards.valid, np.ones_like(column, bool)], axis=-1),
        )
    return Judged(rollout, completions, rewards, logged, extra)


def unkept(stage: Stage, rewards: Rewards) -> np.ndarray:
    """The groups that the algorithm would rather draw again, `[P]` bool."""
    if stage.algorithm.keep is None:
        return np.zeros(rewards.values.shape[0], bool)
    return ~np.asarray(stage.algorithm.keep(rewards))


def refill(
    run: Functions, some: Judged, more: Judged, again: np.ndarray, useless: np.ndarray
) -> Judged:
    """Puts groups of a redraw that are of use in the places of those that are not."""
    P = len(again)
    which, spare = np.arange(P), P + np.flatnonzero(~useless)
    places = np.flatnonzero(again)[: len(spare)]
    which[places] = spare[: len(places)]

    def take(a: Any, b: Any) -> Any:
        return np.concatenate([a, b])[which]

    def column(a: list[Any], b: list[Any]) -> list[Any]:
        G = len(a) // P
        whole = [*a, *b]
        return [value for p in which for value in whole[p * G : (p + 1) * G]]

    return Judged(
        run.choose(some.rollout, more.rollout, which),
        Completions(*map(take, some.completions, more.completions)),
        Rewards(*map(take, some.rewards, more.rewards)),
        {
            name: some.logged.get(name, []) + more.logged.get(name, [])
            for name in {**some.logged, **more.logged}
        },
        {
            name: column(some.extra[name], more.extra[name])
            for name in some.extra.keys() & more.extra.keys()
        },
    )
