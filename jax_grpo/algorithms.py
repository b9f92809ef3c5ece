"""Algorithms: each a constructor that composes advantages, a loss and a reduction.

An `Algorithm` says what to do with rewards and log-probs and knows no model; see `types.py` for
the contract. To add one, write one constructor here: the defaults of its paper above it, settings
of its own in its signature, what a token costs in its body. The rest `policy_gradient.py` does,
whose settings every algorithm has that samples. Those of both kinds are keys of its section in a
config, which finds an algorithm by its name among the functions of this module that make one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_grpo import advantages as adv
from jax_grpo import kl as kls
from jax_grpo import losses, preference, value
from jax_grpo import policy_gradient as pg
from jax_grpo.arrays import divide, masked, masked_sum, sum_and_count
from jax_grpo.types import Algorithm, Experience, Outputs, PyTree, Rewards, Rollout, Scores, Term

# --- What a token costs -------------------------------------------------------------------------


def _clipped(clip_low: float, clip_high: float, dual_clip: float = 0.0) -> pg.TokenLoss:
    """The loss of the clipped ratio, and which tokens each side of the clip takes out."""
    pg.check_not_negative(clip_low=clip_low, clip_high=clip_high)
    if dual_clip and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}: it must be 0 (off) or more than 1")

    def token_loss(logps: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
        del logps
        loss = losses.clipped_ratio_loss(ratio, advantages, clip_low, clip_high, dual_clip or None)
        low, high = losses.clipped_tokens(ratio, advantages, clip_low, clip_high)
        shares = {"low": low, "high": high, "region": low + high}
        return loss, {f"clip_ratio/{name}_mean": share for name, share in shares.items()}

    return token_loss


def _reinforce(logps: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
    """REINFORCE's loss, of the first update alone: it has no ratio."""
    del ratio
    return losses.reinforce_loss(logps, advantages), {}


# --- The algorithms -----------------------------------------------------------------------------


def sft(reduction: str = "token_mean", reduction_length: int = 0) -> Algorithm:
    """Supervised fine-tuning: the data set's completions, each worth 1.

    L = -mean log π(token), by the one log-prob function that every other method uses. The mean is
    over all tokens of the step, as in TRL; over examples, then tokens: `reduction="sequence_mean"`.

    Raises:
      ValueError: for a reduction that makes no sense.
    """
    reduce = pg.make_reduction(reduction, reduction_length)

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        del rewards, scores
        if rollout.segments is not None and reduction != "token_mean":
            raise ValueError(f"a packed row is no completion: {reduction!r} would mix its examples")
        ones = jnp.ones(rollout.lengths.shape, jnp.float32)
        mask = rollout.mask.astype(jnp.float32)
        return Experience(ones, mask, rollout.behavior_logps), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        assert outputs.logps is not None
        nll = losses.negative_log_likelihood(outputs.logps)
        return {"nll": Term(*reduce(nll, experience.mask), 1.0)}

    return Algorithm("dataset", experience, loss)


def dpo(
    *,
    beta: float = 0.1,
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
    sft_weight: float = 0.0,
) -> Algorithm:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

    L = -mean log σ(r_chosen - r_rejected) over pairs, with r = β Σ_t (log π - log π_reference).

    Args:
      beta: β; where length_normalized, 2 to 10 is usual.
      loss: of the margin, see `preference.dpo_loss`. TRL's `ipo` is that with length_normalized;
        here, as in the paper of IPO, log-probs are summed unless that is asked for.
      label_smoothing: the share of pairs believed to be the wrong way round (conservative DPO);
        TRL's loss `robust` is another correction, which is not here.
      length_normalized: whether r is a mean over tokens (Tülu 3; TRL's `sigmoid_norm`).
      sft_weight: of -log π(chosen) beside it, a mean over completions of means over tokens (Pang et
        al. 2024, "Iterative Reasoning Preference Optimization", arXiv:2404.19733, with 1; Llama 3
        has 0.2); TRL's `rpo_alpha` takes the mean over all tokens.

    Raises:
      ValueError: for a combination that makes no sense, with the reason.
    """
    pg.check_not_negative(sft_weight=sft_weight)
    preference.check_dpo_loss(loss, beta, label_smoothing)

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        del rewards
        if scores.reference_logps is None:
            raise ValueError("dpo needs log-probs of the reference")
        worth = jnp.broadcast_to(jnp.array([1.0, -1.0]), rollout.lengths.shape)
        mask = rollout.mask.astype(jnp.float32)
        return Experience(worth, mask, rollout.behavior_logps, scores.reference_logps), state

    def pair_loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        assert outputs.logps is not None and experience.reference_logps is not None
        mask, pairs = experience.mask, preference.pairs_that_count(experience.mask)
        logps = masked(outputs.logps, mask)
        rewards = preference.implicit_rewards(
            logps, experience.reference_logps, mask, beta, length_normalized
        )
        per_pair = preference.dpo_loss(rewards, loss, beta, label_smoothing)
        terms = {"dpo_loss": Term(*sum_and_count(per_pair, pairs), 1.0)}
        if sft_weight:
            chosen = masked(mask[..., :1, :], pairs[..., None, None])
            nll = losses.negative_log_likelihood(logps[..., :1, :])
            terms["nll"] = Term(*losses.sequence_mean(nll, chosen), sft_weight)
        chosen, rejected = jnp.moveaxis(jnp.sum(logps, axis=-1), -1, 0)
        metrics = {"logps/chosen": chosen, "logps/rejected": rejected}
        metrics |= preference.pair_metrics(rewards)
        return terms | {name: Term(*sum_and_count(x, pairs)) for name, x in metrics.items()}

    return Algorithm("dataset", experience, pair_loss, group=2, needs_reference=True)


def reward_model(*, centering: float = 0.0) -> Algorithm:
    """A reward model of pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155).

    L = -mean log σ(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)², over pairs. The
    margin is the difference of what the data say the two are worth, 0 where they say nothing.

    The metrics have TRL's names. `accuracy` is the share of pairs of which the chosen one scores
    more; `min_reward` and `max_reward` are of each micro-batch, and then their mean.

    Args:
      centering: c; 0.01 is usual (TRL's `center_rewards_coefficient`).

    Raises:
      ValueError: for a centering that is negative.
    """
    pg.check_not_negative(centering=centering)

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        del scores
        worth = masked_sum(rewards.values, rewards.valid, axis=-1)  # R = 0: 0
        return Experience(worth, rollout.mask.astype(jnp.float32), rollout.behavior_logps), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        assert outputs.scores is not None
        pairs, worth = preference.pairs_that_count(experience.mask), experience.advantages
        scores = masked(outputs.scores, pairs[..., None])
        margin = worth[..., 0] - worth[..., 1]
        per_pair = preference.bradley_terry_loss(scores, margin, centering)
        found = preference.pair_metrics(scores)
        metrics = {
            "accuracy": found["rewards/accuracies"],
            "margin": found["rewards/margins"],
            "mean_reward": jnp.mean(scores, axis=-1),
            "min_reward": jnp.min(jnp.where(pairs[..., None], scores, jnp.inf)),
            "max_reward": jnp.max(jnp.where(pairs[..., None], scores, -jnp.inf)),
        }
        return {"reward_loss": Term(*sum_and_count(per_pair, pairs), 1.0)} | {
            name: Term(*sum_and_count(x, pairs)) for name, x in metrics.items()
        }

    return Algorithm("dataset", experience, loss, trains="reward_model", group=2)


@pg.with_defaults(kl_weight=0.04)
def grpo(
    *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0, **shared: Any
) -> Algorithm:
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    A = (r - mean(r)) / std(r) over the G completions of a prompt; with ρ = π / π_behavior,
    L = -mean min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) + β KL(π || π_reference).

    β is the paper's, where TRL's default is 0. The mean is over completions of means over tokens,
    as in the paper, where TRL's default is now `dapo`'s. The standard deviation is the unbiased
    one, as in TRL and verl (`advantage="standardized_biased"` for the other).

    Args:
      clip_low: ε_low.
      clip_high: ε_high (DAPO's clip-higher when above `clip_low`).
      dual_clip: c > 1 bounds the loss at -c A where A < 0; 0 is off.
      **shared: settings of `policy_gradient`.

    Raises:
      ValueError: for a combination that makes no sense, with the reason; as all that follow.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high, dual_clip), **shared)


@pg.with_defaults("reduction", advantage="centered")
def dr_grpo(
    *, reduction_length: int, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any
) -> Algorithm:
    """GRPO without its biases by length and difficulty (Liu et al. 2025, arXiv:2503.20783).

    A = r - mean(r), and the sum over a completion's tokens is divided by a constant. No KL.

    Args:
      reduction_length: the constant, in tokens: the limit on completions, as in the paper's code
        and in TRL.
      clip_low: ε_low.
      clip_high: ε_high.
      **shared: as in `grpo`.
    """
    return pg.policy_gradient(
        _clipped(clip_low, clip_high),
        reduction="constant_length",
        reduction_length=reduction_length,
        **shared,
    )


@pg.with_defaults(reduction="token_mean", truncated="mask")
def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dynamic_sampling: bool = True,
    filter_weights: Sequence[float] = (),
    reward_weights: Sequence[float] = (),
    **shared: Any,
) -> Algorithm:
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv:2503.14476).

    GRPO with a higher upper clip, the mean over all tokens, no KL, and prompts drawn again whose
    completions are all worth the same. Its soft punishment of length is the reward `overlong`.

    Completions cut at the limit are masked, the paper's overlong filtering, as TRL advises; verl's
    recipe keeps them (`truncated="keep"`), so that `overlong` punishes them, too.

    Args:
      clip_low: ε_low.
      clip_high: ε_high.
      dynamic_sampling: whether groups that do not vary are drawn again.
      filter_weights: weights of the rewards that must vary, by default `reward_weights`. The paper
        asks for correctness alone: (1, 0) where `overlong` is the second reward.
      reward_weights: one for each reward function; empty is 1 each.
      **shared: as in `grpo`.
    """
    algorithm = pg.policy_gradient(
        _clipped(clip_low, clip_high), reward_weights=reward_weights, **shared
    )
    if filter_weights and not dynamic_sampling:
        raise ValueError("filter_weights are for dynamic_sampling, which is off")
    if filter_weights and reward_weights and len(filter_weights) != len(reward_weights):
        raise ValueError(
            f"filter_weights are {len(filter_weights)}, but there are {len(reward_weights)} rewards"
        )

    def keep(rewards: Rewards) -> Array:
        weights = pg.weights_of(filter_weights or reward_weights, rewards)
        return ~adv.constant_groups(*adv.total_reward(rewards.values, rewards.valid, weights))

    return algorithm._replace(keep=keep, group=2) if dynamic_sampling else algorithm


@pg.with_defaults(reduction="token_mean")
def bnpo(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """TRL's loss `bnpo`: GRPO with the mean over all tokens of the batch, and no KL.

    TRL takes that mean of each micro-batch by itself; here it is of the whole step, however it is
    cut. The paper of that name (Xiao et al. 2025, "Beta Normalization Policy Optimization",
    arXiv:2506.02864) has another advantage, which is not here.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults(ratio_level="sequence")
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **shared: Any) -> Algorithm:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

    GRPO with one ratio for a completion, the geometric mean of its tokens', and a clip to match,
    that of the paper's section 5.1. No KL, as in verl's and TRL's recipes.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults(reduction="token_mean")
def cispo(*, clip_low: float = 1.0, clip_high: float = 4.0, **shared: Any) -> Algorithm:
    """Clipped importance sampling policy optimisation (MiniMax-M1 2025, arXiv:2506.13585).

    L = -mean sg(clip(ρ, 1 - ε_low, 1 + ε_high)) A log π: every token keeps its gradient, and the
    clip bounds its weight.

    As in the paper there is no lower bound. The paper does not give the upper one; a cap of 5 is
    what TRL advises, after ScaleRL (Khatri et al. 2025, arXiv:2510.13786). TRL's `epsilon_high` is
    that cap, 1 + ε_high. The paper's dynamic sampling is not part of it here.
    """
    pg.check_not_negative(clip_low=clip_low, clip_high=clip_high)

    def token_loss(logps: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
        loss = losses.weighted_reinforce_loss(logps, ratio, advantages, clip_low, clip_high)
        _, high = losses.clipped_tokens(ratio, advantages, clip_low, clip_high)
        return loss, {"cispo_clip_ratio": high}

    return pg.policy_gradient(token_loss, **shared)


@pg.with_defaults()
def sapo(
    *, temperature: float = 1.0, negative_temperature: float = 1.05, **shared: Any
) -> Algorithm:
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347).

    L = -mean 4/τ σ(τ (ρ - 1)) A: GRPO with a soft gate in the clip's place, and no KL.

    Args:
      temperature: τ where A > 0.
      negative_temperature: τ elsewhere: larger, since to push one token down pushes many up.
      **shared: as in `grpo`.
    """
    for name, tau in {"": temperature, "negative_": negative_temperature}.items():
        if not tau > 0:
            raise ValueError(f"{name}temperature is {tau}: it must be positive")

    def token_loss(logps: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
        del logps
        return losses.soft_gate_loss(ratio, advantages, temperature, negative_temperature), {}

    return pg.policy_gradient(token_loss, **shared)


@pg.with_defaults(
    advantage="leave_one_out",
    ratio_level="product",
    kl_weight=0.05,
    kl_estimator="k1",
    kl_in="reward",
)
def rloo(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """REINFORCE with the mean of the others as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

    A whole completion is one action: L = -mean ρ A with ρ = π(y) / π_behavior(y), whose gradient at
    a ratio of 1 is -A ∇log π(y), the sum over its tokens. The KL is in the reward, before the
    baseline, as in the paper and TRL; in the loss: `kl_in="loss"` with `kl_estimator="k2"`.

    As in TRL the ratio is clipped, for more than one update of a rollout (the paper makes one), and
    β is TRL's. verl has the ratio, the clip and the mean of tokens (`ratio_level="token"`,
    `reduction="token_mean"`).
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults(
    advantage="raw",
    whiten=True,
    reduction="token_mean",
    kl_weight=0.01,
    kl_estimator="k1",
    kl_in="reward_to_go",
)
def reinforce_pp(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """REINFORCE++, PPO without a critic (Hu et al. 2025, arXiv:2501.03262).

    A_t = r - β Σ_{i≥t} k1_i, whitened over all tokens of the batch; then PPO's clip. β is that of
    OpenRLHF, its authors' code.

    A group whose rewards are all the same teaches, too: it is compared with the batch.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults(
    advantage="centered", whiten=True, reduction="token_mean", kl_weight=0.01, kl_estimator="k2"
)
def reinforce_pp_baseline(
    *, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any
) -> Algorithm:
    """REINFORCE++-baseline, the mean of the group (Hu et al. 2025, arXiv:2501.03262).

    A = r - mean(r), whitened over all tokens of the batch; then PPO's clip. The KL is in the loss.

    Where completions differ in length the mean over tokens is not 0, so that a group whose rewards
    are all the same gets a small advantage, alike for all of it: so it is in verl, too.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults("ratio_level", advantage="rescaled", reduction="token_mean")
def gpg(**shared: Any) -> Algorithm:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546).

    L = -mean A log π with A = B / (B - M) · (r - mean(r)), M of the B groups being constant: no
    ratio, no clip and no KL, so take one update of each rollout. F_norm is 1; with the paper's
    other, std(r), groups are not rescaled here (`advantage="standardized"`).
    """
    return pg.policy_gradient(_reinforce, **shared)


@pg.with_defaults(advantage="mean_normalized", reduction="token_mean")
def maxrl(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710).

    A = (r - mean(r)) / mean(r): of log p(right) what REINFORCE is of p(right), to the order G.
    Rewards must not be negative; those of a group whose mean is 0 are worth 0. No KL.
    """
    return pg.policy_gradient(_clipped(clip_low, clip_high), **shared)


@pg.with_defaults("advantage", "standardize_each", "whiten", "ratio_level", "kl_in")
def rft(*, threshold: float = 0.0, **shared: Any) -> Algorithm:
    """Rejection fine-tuning in its online form (Shao et al. 2024, arXiv:2402.03300, appendix A).

    L = -mean 1[r > threshold] log π: maximum likelihood of what the verifiers accept. The mean is
    over all completions, as in the paper, so that with few accepted a step is small.

    Args:
      threshold: what a completion's total reward must exceed; a weight of 0 takes a reward of form
        out of it.
      **shared: as in `grpo`.
    """
    accepted = partial(adv.accepted, threshold=threshold)
    return pg.policy_gradient(_reinforce, advantage=accepted, **shared)


@pg.with_defaults("advantage", "standardize_each", "ratio_level", "kl_in", reduction="token_mean")
def ppo(
    *,
    discount: float = 1.0,
    decay: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    value_clip: float = 0.2,
    value_weight: float = 1.0,
    whiten: bool = True,
    kl_weight: float = 0.05,
    kl_estimator: str = "k1",
    kl_target: float = 0.0,
    kl_gain: float = 0.1,
    missing_eos_penalty: float = 0.0,
    **shared: Any,
) -> Algorithm:
    """Proximal policy optimisation, with a critic (Schulman et al. 2017, arXiv:1707.06347).

    Each token costs its KL to the reference, β k1, and the last one earns what the completion is
    worth (Ziegler et al. 2019, arXiv:1909.08593). A_t is by GAE (arXiv:1506.02438), whitened; then
    L = -mean min(ρ A, clip(ρ, 1 - ε_low, 1 + ε_high) A) + value_weight · ½ mean (V - R)², clipped.

    Means are over tokens, that of the critic always. Since advantages are whitened, rewards that
    are all the same still move the policy: a group is nothing here, and one completion is enough.

    Args:
      discount: γ.
      decay: λ of GAE; 0.95 as in TRL, 1 in verl.
      clip_low: ε_low.
      clip_high: ε_high.
      dual_clip: as in `grpo`; verl's is 3.
      value_clip: how far a value may move from what it was in one rollout; 0 is no clip. TRL's is
        0.2, verl's 0.5.
      value_weight: with Adam it only matters for the clip of the critic's gradient, since that has
        an optimizer of its own. TRL's `vf_coef` is 0.1, of one optimizer for both; verl has none.
      whiten: advantages of mean 0 and deviation 1 over the tokens of all the batch. TRL and verl
        have it always. Rewards are never whitened (TRL's `whiten_rewards`, off by default).
      kl_weight: β; 0 means no reference model at all.
      kl_estimator: `k1`, `k2` or `k3`. `k1`, TRL's and the paper's, has reverse KL's gradient.
      kl_target: what KL, summed over a completion, β is adapted to; 0 leaves β as it is. TRL's was
        6; verl's is a mean over tokens.
      kl_gain: how fast, see `value.adapted_kl_coefficient`.
      missing_eos_penalty: taken off what a completion is worth that was cut at the length limit;
        TRL's of that name.
      **shared: as in `grpo`.

    Raises:
      ValueError: for a combination that makes no sense, with the reason.
    """
    pg.check_not_negative(
        value_clip=value_clip,
        value_weight=value_weight,
        kl_weight=kl_weight,
        kl_target=kl_target,
        missing_eos_penalty=missing_eos_penalty,
    )
    for name, share in {"discount": discount, "decay": decay}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}: it must be 0 to 1")
    if kl_target and not kl_weight:
        raise ValueError("kl_target adapts kl_weight, which is 0 and would stay so")
    if kl_target and not 0 < kl_gain < 5:
        raise ValueError(f"kl_gain is {kl_gain}: it must be more than 0 and less than 5")
    if missing_eos_penalty and shared.get("truncated") == "mask":
        raise ValueError("missing_eos_penalty is for completions that truncated 'mask' leaves out")
    # What a completion is worth comes as its advantage; the KL is this function's.
    base = pg.policy_gradient(
        _clipped(clip_low, clip_high, dual_clip),
        advantage="raw",
        kl_estimator=kl_estimator,
        kl_in="reward",
        **shared,
    )

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        if kl_weight and scores.reference_logps is None:
            raise ValueError("kl_weight is not 0, so log-probs of the reference are needed")
        if scores.values is None:
            raise ValueError("ppo needs the values of a critic")
        given, _ = base.experience(rollout, rewards, scores, ())
        mask, values = given.mask, masked(scores.values, given.mask)
        weight = state["kl_weight"] if kl_target else kl_weight
        kl = jnp.zeros_like(mask)
        if given.reference_logps is not None:
            kl = kls.sampled_kl(pg.ratio_anchor(given), given.reference_logps, mask, kl_estimator)
        worth = given.advantages - missing_eos_penalty * rollout.truncated
        earned = value.token_rewards(worth, kl, mask, weight)
        advantages = value.generalized_advantages(earned, values, mask, discount, decay)
        returns = advantages + values
        if whiten:
            advantages = adv.whitened(advantages, mask)
        if kl_target:
            seen = divide(*sum_and_count(jnp.sum(kl, axis=-1), jnp.any(mask > 0, axis=-1)))
            state = {"kl_weight": value.adapted_kl_coefficient(weight, seen, kl_target, kl_gain)}
        return given._replace(advantages=advantages, values=values, returns=returns), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        old, returns, mask = experience.values, experience.returns, experience.mask
        assert outputs.values is not None and old is not None and returns is not None
        now = masked(outputs.values, mask)
        error, clipped = value.clipped_value_loss(now, old, returns, value_clip or math.inf)
        return base.loss(outputs, experience) | {
            "value_loss": Term(*losses.token_mean(error, mask), value_weight),
            "critic/clip_ratio": Term(*losses.token_mean(clipped, mask)),
            "critic/unexplained_variance": Term(*value.unexplained_variance(now, returns, mask)),
        }

    return base._replace(
        experience=experience,
        loss=loss,
        needs_reference=kl_weight > 0,
        needs_critic=True,
        state={"kl_weight": np.float32(kl_weight)} if kl_target else (),
    )
