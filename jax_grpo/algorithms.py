"""Algorithms: each a constructor that composes advantages, a loss and a reduction.

An `Algorithm` says what to do with rewards and log-probs and knows no model; see `types.py` for
the contract. To add one, write one constructor here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jax_grpo import advantages as adv
from jax_grpo import losses
from jax_grpo.types import Algorithm, Experience, Outputs, PyTree, Rewards, Rollout, Scores, Term

Reduce = Callable[[Array, Array], tuple[Array, Array]]

ADVANTAGES = {
    "standardized": adv.standardized,
    "centered": adv.centered,
    "leave_one_out": adv.leave_one_out,
    "batch_standardized": adv.batch_standardized,
}


def make_reduction(name: str, length: int = 0) -> Reduce:
    """The reduction of that name: `token_mean`, `sequence_mean` or `constant_length`.

    Raises:
      ValueError: for an unknown name, or a constant length without a length.
    """
    if name == "constant_length":
        if length < 1:
            raise ValueError("reduction 'constant_length' needs a reduction_length of at least 1")
        return lambda x, mask: losses.constant_length(x, mask, length)
    table = {"token_mean": losses.token_mean, "sequence_mean": losses.sequence_mean}
    if name not in table:
        raise ValueError(f"reduction {name!r} is not one of: {', '.join(table)}, constant_length")
    return table[name]


def sft(reduction: str = "token_mean", reduction_length: int = 0) -> Algorithm:
    """Supervised fine-tuning: the data set's completions, each worth 1.

    L = -mean log π(token), by the one log-prob function that every other method uses.
    """
    reduce = make_reduction(reduction, reduction_length)

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        del rewards, scores
        ones = jnp.ones(rollout.lengths.shape, jnp.float32)
        mask = rollout.mask.astype(jnp.float32)
        return Experience(ones, mask, rollout.behavior_logps), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        return {
            "nll": Term(
                *reduce(losses.negative_log_likelihood(outputs.logps), experience.mask), 1.0
            )
        }

    return Algorithm("dataset", experience, loss)


def grpo(
    *,
    reward_weights: Sequence[float] = (),
    advantage: str = "standardized",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    ratio_level: Literal["token", "sequence"] = "token",
    reduction: str = "sequence_mean",
    reduction_length: int = 0,
    kl_weight: float = 0.04,
    kl_estimator: str = "k3",
    kl_in: Literal["loss", "reward"] = "loss",
    truncated: Literal["keep", "mask", "zero"] = "keep",
) -> Algorithm:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    A = (r - mean(r)) / std(r) over the G completions of a prompt; with ρ = π / π_behavior,
    L = -mean min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) + β KL(π || π_reference).

    Args:
      reward_weights: one for each reward function; empty is 1 each.
      advantage: `standardized`, `centered`, `leave_one_out` or `batch_standardized`.
      clip_low: ε_low.
      clip_high: ε_high (DAPO's clip-higher when above `clip_low`).
      dual_clip: c > 1 bounds the loss at -c A where A < 0; 0 is off.
      ratio_level: of each `token`, or of the whole `sequence` (GSPO).
      reduction: `sequence_mean`, `token_mean` or `constant_length`.
      reduction_length: what `constant_length` divides by, in tokens.
      kl_weight: β; 0 means no reference model at all.
      kl_estimator: `k1` (reward only), `k2`, `k3` or `k3_weighted` (loss only).
      kl_in: `loss` (per token) or `reward` (summed over the completion).
      truncated: completions cut at the length limit are kept, masked out of the loss, or scored 0.

    Raises:
      ValueError: for a combination that makes no sense, with the reason.
    """
    if advantage not in ADVANTAGES:
        raise ValueError(f"advantage {advantage!r} is not one of: {', '.join(ADVANTAGES)}")
    for name, number in (
        ("kl_weight", kl_weight),
        ("clip_low", clip_low),
        ("clip_high", clip_high),
    ):
        if not number >= 0:  # NaN, too
            raise ValueError(f"{name} is {number}: it must be 0 or positive")
    for name, value, known in (
        ("ratio_level", ratio_level, ("token", "sequence")),
        ("truncated", truncated, ("keep", "mask", "zero")),
        ("kl_in", kl_in, ("loss", "reward")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of: {', '.join(known)}")
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}: it must be 0 (off) or more than 1")
    losses.check_kl_estimator(kl_estimator, kl_in)
    reduce = make_reduction(reduction, reduction_length)
    # A KL in the reward is shown by k3, whatever estimates it there.
    shown_estimator = kl_estimator if kl_in == "loss" else "k3"

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        if kl_weight > 0 and scores.reference_logps is None:
            raise ValueError("kl_weight is not 0, so log-probs of the reference are needed")
        weights = jnp.asarray(reward_weights or [1.0] * rewards.values.shape[-1], jnp.float32)
        total, valid = adv.total_reward(rewards.values, rewards.valid, weights)
        mask = (rollout.mask & valid[..., None]).astype(jnp.float32)
        counted, total = losses.handle_truncated(truncated, mask, total, rollout.truncated)
        behavior, reference = rollout.behavior_logps, scores.reference_logps
        if reference is not None and kl_in == "reward":  # those cut pay for their KL, too
            total = losses.kl_in_reward(total, behavior, reference, mask, kl_weight, kl_estimator)
        advantages = ADVANTAGES[advantage](total, valid)
        return Experience(advantages, counted, behavior, reference), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        mask, logps = experience.mask, outputs.logps
        ratio = losses.policy_ratio(logps, experience.behavior_logps, mask, ratio_level)
        policy = losses.clipped_ratio_loss(
            ratio, experience.advantages, clip_low, clip_high, dual_clip or None
        )
        terms = {"policy_loss": Term(*reduce(policy, mask), 1.0)}
        if experience.reference_logps is not None:
            token_ratio = losses.policy_ratio(logps, experience.behavior_logps, mask)
            kl = losses.kl_penalty(
                shown_estimator, logps, experience.reference_logps, mask, token_ratio
            )
            terms["kl"] = Term(*reduce(kl, mask), kl_weight if kl_in == "loss" else 0.0)
        if outputs.entropy is not None:
            terms["entropy"] = Term(*losses.token_mean(outputs.entropy, mask))
        low, high = losses.clipped_tokens(ratio, experience.advantages, clip_low, clip_high)
        for name, x in {"low": low, "high": high, "region": low + high}.items():
            terms[f"clip_ratio/{name}_mean"] = Term(*losses.token_mean(x, mask))
        terms["ratio"] = Term(*losses.token_mean(ratio, mask))
        return terms

    return Algorithm("policy", experience, loss, needs_reference=kl_weight > 0, needs_entropy=True)
