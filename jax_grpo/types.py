"""The records that travel through a run, and the one glossary of their axes.

Axes, used in names, docstrings and annotations everywhere:

    P  prompts per step            D  model width
    G  completions per prompt      H  query heads
    C  completion length           K  key/value heads
    L  prompt length               N  layers
    R  reward functions            V  vocabulary
    T  positions of a row          S  positions that can be attended to

A group is a row of an array: everything is `[P]`, `[P, G]` or `[P, G, C]`, and nothing is
repeated, reshaped or crossed over. `P` is the axis that is spread over devices and cut into
minibatches and micro-batches, so a group is never split.

Log-probs are named by who computed them and are all of the full softmax at the rollout's
temperature (1 when greedy), in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array
from jax.typing import ArrayLike

PyTree = Any
Params = Mapping[str, Any]  # nested dict of arrays, see models/llama.py


class PromptBatch(NamedTuple):
    """The prompts of one step, right-padded."""

    token_ids: Array  # [P, L] int32
    lengths: Array  # [P] int32, true lengths; positions at or after it are padding
    rows: Array  # [P] int32, index of the data row: part of every sampling key


class Rollout(NamedTuple):
    """Completions, from the policy or from the data set (then G is what the row holds).

    `lengths` says what exists (attention, packing), `mask` what counts (the loss; it may have
    holes). Both include the end token, exclude everything after it, and are written once, by
    whoever made the tokens.
    """

    prompts: PromptBatch
    completion_ids: Array  # [P, G, C] int32
    lengths: Array  # [P, G] int32
    mask: Array  # [P, G, C] bool
    behavior_logps: Array  # [P, G, C] float32, by the sampler; 0 where the data set spoke
    kept_logmass: Array  # [P, G, C] float32, log of the mass that truncation kept; 0 without
    truncated: Array  # [P, G] bool: ended by the length limit, not by an end token
    temperature: Array  # [] float32
    # Of packed rows, [P, C] int32: which example a token is of, from 0; -1 is padding. Then G is 1,
    # the prompts stand in `completion_ids` with their mask False, and `prompts` are empty.
    segments: Array | None = None


class Rewards(NamedTuple):
    """What the reward functions said, or the data set (R = 0 where it says nothing); never NaN."""

    values: Array | np.ndarray  # [P, G, R] float32, 0 where invalid
    valid: Array | np.ndarray  # [P, G, R] bool: False where the function gave None


class Scores(NamedTuple):
    """What the algorithm's flags asked for, computed before the first update of a rollout."""

    reference_logps: Array | None = None  # [P, G, C] float32
    proximal_logps: Array | None = None  # [P, G, C] float32, by the training path
    values: Array | None = None  # [P, G, C] float32, by the critic


class Experience(NamedTuple):
    """What a loss sees of a rollout. Every array leads with P, so a slice of P is an Experience."""

    advantages: Array  # [P, G] or [P, G, C] float32
    mask: Array  # [P, G, C] float32: 1 where a token counts in the loss
    behavior_logps: Array  # [P, G, C] float32, by the sampler
    reference_logps: Array | None = None  # [P, G, C] float32
    proximal_logps: Array | None = None  # [P, G, C] float32, where the sampler is corrected for
    values: Array | None = None  # [P, G, C] float32, by the critic before the first update
    returns: Array | None = None  # [P, G, C] float32, what the critic should say
    # [P, G, C] float32: by how much likelier trainer than sampler found a token, bounded
    importance: Array | None = None


class Outputs(NamedTuple):
    """What the models of a stage say now, with gradient."""

    logps: Array | None = None  # [P, G, C] float32: policy_logps; None of a reward model
    entropy: Array | None = None  # [P, G, C] float32, nats
    values: Array | None = None  # [P, G, C] float32, by the critic before each token
    scores: Array | None = None  # [P, G] float32, by a reward model after the last token


class Term(NamedTuple):
    """One named part of a loss: `coefficient * sum / weight`, divided only at the very end.

    `weight` must not depend on `Outputs`: it is added up over all micro-batches and devices of
    an optimizer step before the first gradient is taken, which makes accumulation exact. A
    coefficient of 0 makes the term a metric.
    """

    sum: Array  # [] float32
    weight: Array  # [] float32
    coefficient: ArrayLike = 0.0


class Algorithm(NamedTuple):
    """What to do with rewards and log-probs. Pure; knows no model.

    The trainer is blind to it: it looks at the flags and calls the functions.
    """

    source: Literal["policy", "dataset"]
    # (Rollout, Rewards, Scores, state) -> (Experience, state)
    experience: Callable[[Rollout, Rewards, Scores, PyTree], tuple[Experience, PyTree]]
    # (Outputs, Experience) -> {name: Term}
    loss: Callable[[Outputs, Experience], dict[str, Term]]
    # Rewards -> bool [P]; the other prompts are drawn again (DAPO)
    keep: Callable[[Rewards], Array] | None = None
    trains: Literal["policy", "reward_model"] = "policy"
    group: int = 1  # G: of a data set exactly this (2: chosen, rejected), of the policy at least
    needs_reference: bool = False
    needs_proximal: bool = False
    needs_critic: bool = False
    needs_entropy: bool = False
    state: Mapping[str, Any] | tuple[()] = ()  # adaptive weights by name, which are logged


class TrainState(NamedTuple):
    """All that an update changes; what a checkpoint holds."""

    step: Array  # [] int32, optimizer steps taken in this stage
    params: Params  # float32, of the policy, or of the reward model that the stage trains
    opt_state: PyTree
    algorithm_state: PyTree = ()
    critic: PyTree = ()  # its parameters, float32, and its optimizer's state
    critic_opt_state: PyTree = ()
    reference: PyTree = ()  # in the compute dtype, where it moves with the policy
