"""Algorithms: each a constructor that composes advantages, a loss and a reduction.

An `Algorithm` says what to do with rewards and log-probs and knows no model; see `types.py` for
the contract. To add one, write one constructor here: the defaults of its paper above it, settings
of its own in its signature, what a token costs in its body. The rest `_policy_gradient` does, whose
settings every algorithm has that samples. Those of both kinds are keys of its section in a config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from jax_grpo import advantages as adv
from jax_grpo import kl as kls
from jax_grpo import losses
from jax_grpo.arrays import masked
from jax_grpo.types import Algorithm, Experience, Outputs, PyTree, Rewards, Rollout, Scores, Term

Reduce = Callable[[Array, Array], tuple[Array, Array]]
# (rewards [P, G], valid [P, G]) -> advantages [P, G]
Advantage = Callable[[Array, Array], Array]
# (logps, ratio, advantages) -> the loss per token, and metrics per token
TokenLoss = Callable[[Array, Array, Array], tuple[Array, dict[str, Array]]]

ADVANTAGES: dict[str, Advantage] = {
    "standardized": adv.standardized,
    "centered": adv.centered,
    "leave_one_out": adv.leave_one_out,
    "batch_standardized": adv.batch_standardized,
    "standardized_biased": partial(adv.standardized, bessel=False),
    "mean_normalized": adv.mean_normalized,
    "rescaled": adv.rescaled,
    "raw": adv.raw,
}


def make_reduction(name: str, length: int = 0) -> Reduce:
    """The reduction of that name: `token_mean`, `sequence_mean` or `constant_length`.

    Raises:
      ValueError: for an unknown name, a constant length without a length, or a length without it.
    """
    if name == "constant_length":
        if length < 1:
            raise ValueError("reduction 'constant_length' needs a reduction_length of at least 1")
        return lambda x, mask: losses.constant_length(x, mask, length)
    table = {"token_mean": losses.token_mean, "sequence_mean": losses.sequence_mean}
    if name not in table:
        raise ValueError(f"reduction {name!r} is not one of: {', '.join(table)}, constant_length")
    if length:
        raise ValueError(f"reduction_length is for 'constant_length', not for {name!r}")
    return table[name]


# --- What all algorithms share that sample ------------------------------------------------------


def _policy_gradient(
    token_loss: TokenLoss,
    *,
    reward_weights: Sequence[float] = (),
    standardize_each: bool = False,
    advantage: str | Advantage = "standardized",
    whiten: bool = False,
    ratio_level: Literal["token", "sequence", "product"] = "token",
    top_entropy: float = 1.0,
    reduction: str = "sequence_mean",
    reduction_length: int = 0,
    kl_weight: float = 0.0,
    kl_estimator: str = "k3",
    kl_in: Literal["loss", "reward", "reward_to_go"] = "loss",
    truncated: Literal["keep", "mask", "zero"] = "keep",
) -> Algorithm:
    """An algorithm that samples, from what a token costs it.

    Args:
      token_loss: of log-probs, ratio and advantages.
      reward_weights: one for each reward function; empty is 1 each.
      standardize_each: whether each function's rewards are standardized in their group before they
        are added up (GDPO, arXiv:2601.05242, with the advantage `batch_standardized`).
      advantage: the name of one of `ADVANTAGES`; from Python, a function like those.
      whiten: whether advantages are made mean 0 and deviation 1 over all tokens, at last. Then
        those of a constant group are no longer 0.
      ratio_level: of each `token`, or of the whole completion: `sequence` (geometric mean, GSPO)
        or `product` (RLOO).
      top_entropy: the share of tokens, those of the highest entropy, that the policy's loss is
        taken of (0.2: Wang et al. 2025, arXiv:2506.01939); the others still count in what it is
        divided by, and pay their KL, as in TRL.
      reduction: `sequence_mean`, `token_mean` or `constant_length`.
      reduction_length: what `constant_length` divides by, in tokens.
      kl_weight: β; 0 means no reference model at all.
      kl_estimator: `k1` (reward only), `k2`, `k3` or `k3_weighted` (loss only).
      kl_in: `loss` (per token), `reward` (summed over the completion) or `reward_to_go` (summed
        from each token on, and taken off its advantage, after the baseline).
      truncated: completions cut at the length limit are kept, masked out of the loss, or scored 0.

    Raises:
      ValueError: for a combination that makes no sense, with the reason.
    """
    if isinstance(advantage, str) and advantage not in ADVANTAGES:
        raise ValueError(f"advantage {advantage!r} is not one of: {', '.join(ADVANTAGES)}")
    relative = ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
    _check_not_negative(kl_weight=kl_weight)
    if advantage == "mean_normalized" and (standardize_each or kl_in == "reward"):
        raise ValueError(
            "advantage 'mean_normalized' wants rewards that are not negative: neither "
            "standardize_each nor kl_in 'reward' leaves them so"
        )
    if not 0 < top_entropy <= 1:
        raise ValueError(f"top_entropy is {top_entropy}: it must be more than 0 and at most 1")
    if top_entropy < 1 and ratio_level != "token":
        raise ValueError(
            "top_entropy picks tokens, but a ratio of the whole completion pulls at all of them: "
            "use ratio_level 'token'"
        )
    for name, value, known in (
        ("ratio_level", ratio_level, ("token", "sequence", "product")),
        ("truncated", truncated, ("keep", "mask", "zero")),
        ("kl_in", kl_in, ("loss", "reward", "reward_to_go")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of: {', '.join(known)}")
    kls.check_kl_estimator(kl_estimator, "loss" if kl_in == "loss" else "reward")
    reduce = make_reduction(reduction, reduction_length)
    add_up = adv.total_standardized_reward if standardize_each else adv.total_reward
    # A KL in the reward is shown by k3, whatever estimates it there.
    shown_estimator = kl_estimator if kl_in == "loss" else "k3"

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        behavior, reference = rollout.behavior_logps, scores.reference_logps
        if kl_weight > 0 and reference is None:
            raise ValueError("kl_weight is not 0, so log-probs of the reference are needed")
        kept, values = losses.handle_truncated(
            truncated, rollout.mask, rewards.values, rollout.truncated
        )
        total, valid = add_up(values, rewards.valid, _weights(reward_weights, rewards))
        judged, counted = rollout.mask & valid[..., None], kept & valid[..., None]
        if reference is not None and kl_in == "reward":  # those cut pay for their KL, too
            total = kls.kl_in_reward(total, behavior, reference, judged, kl_weight, kl_estimator)
        advantages = relative(total, valid)
        if reference is not None and kl_in == "reward_to_go":
            kl = kls.kl_to_go(behavior, reference, judged, kl_estimator)
            advantages = advantages[..., None] - kl_weight * kl
        if whiten:
            by_token = advantages if advantages.ndim == counted.ndim else advantages[..., None]
            advantages = adv.whitened(jnp.broadcast_to(by_token, counted.shape), counted)
        return Experience(advantages, counted.astype(jnp.float32), behavior, reference), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        mask, logps = experience.mask, masked(outputs.logps, experience.mask)
        ratio = losses.policy_ratio(logps, experience.behavior_logps, mask, ratio_level)
        policy, metrics = token_loss(logps, ratio, experience.advantages)
        if top_entropy < 1:
            if outputs.entropy is None:
                raise ValueError("top_entropy is less than 1, so the entropy of tokens is needed")
            policy = masked(policy, losses.top_entropy(outputs.entropy, mask, top_entropy))
        terms = {"policy_loss": Term(*reduce(policy, mask), 1.0)}
        if experience.reference_logps is not None:
            token_ratio = losses.policy_ratio(logps, experience.behavior_logps, mask)
            kl = kls.kl_penalty(
                shown_estimator, logps, experience.reference_logps, mask, token_ratio
            )
            terms["kl"] = Term(*reduce(kl, mask), kl_weight if kl_in == "loss" else 0.0)
        if outputs.entropy is not None:
            terms["entropy"] = Term(*losses.token_mean(outputs.entropy, mask))
        for name, x in {**metrics, "ratio": ratio}.items():
            terms[name] = Term(*losses.token_mean(x, mask))
        return terms

    return Algorithm("policy", experience, loss, needs_reference=kl_weight > 0, needs_entropy=True)


def _with(
    *fixed: str, **defaults: Any
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Gives a constructor's `**shared` the defaults of its paper, and spells its signature out.

    That signature is the schema of the algorithm's section in a config, and what `help` shows.

    Args:
      *fixed: settings of `_policy_gradient` that the constructor leaves no choice of.
      **defaults: those of the others.
    """

    def decorate(constructor: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @wraps(constructor)
        def with_defaults(**settings: Any) -> Algorithm:
            return constructor(**{**defaults, **settings})

        written, shared = inspect.signature(constructor), inspect.signature(_policy_gradient)
        parameters = [p for p in written.parameters.values() if p.kind is p.KEYWORD_ONLY]
        taken = {"token_loss", *fixed, *written.parameters}
        parameters += [
            p.replace(default=defaults.get(name, p.default))
            for name, p in shared.parameters.items()
            if name not in taken
        ]
        with_defaults.__dict__["__signature__"] = written.replace(parameters=parameters)
        return with_defaults

    return decorate


def _clipped(clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """The loss of the clipped ratio, and which tokens each side of the clip takes out."""
    _check_not_negative(clip_low=clip_low, clip_high=clip_high)
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


def _check_not_negative(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:  # NaN, too
            raise ValueError(f"{name} is {number}: it must be 0 or positive")


def _weights(weights: Sequence[float], rewards: Rewards) -> Array:
    """The weights of the reward functions, [R] float32; empty is 1 each."""
    return jnp.asarray(weights or [1.0] * rewards.values.shape[-1], jnp.float32)


# --- The algorithms -----------------------------------------------------------------------------


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


@_with(kl_weight=0.04)
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
      **shared: settings of `_policy_gradient`.

    Raises:
      ValueError: for a combination that makes no sense, with the reason; as all that follow.
    """
    return _policy_gradient(_clipped(clip_low, clip_high, dual_clip), **shared)


@_with("reduction", advantage="centered")
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
    return _policy_gradient(
        _clipped(clip_low, clip_high),
        reduction="constant_length",
        reduction_length=reduction_length,
        **shared,
    )


@_with(reduction="token_mean", truncated="mask")
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
    algorithm = _policy_gradient(
        _clipped(clip_low, clip_high), reward_weights=reward_weights, **shared
    )
    if filter_weights and not dynamic_sampling:
        raise ValueError("filter_weights are for dynamic_sampling, which is off")
    if filter_weights and reward_weights and len(filter_weights) != len(reward_weights):
        raise ValueError(
            f"filter_weights are {len(filter_weights)}, but there are {len(reward_weights)} rewards"
        )

    def keep(rewards: Rewards) -> Array:
        weights = _weights(filter_weights or reward_weights, rewards)
        return ~adv.constant_groups(*adv.total_reward(rewards.values, rewards.valid, weights))

    return algorithm._replace(keep=keep if dynamic_sampling else None)


@_with(reduction="token_mean")
def bnpo(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """TRL's loss `bnpo`: GRPO with the mean over all tokens of the batch, and no KL.

    TRL takes that mean of each micro-batch by itself; here it is of the whole step, however it is
    cut. The paper of that name (Xiao et al. 2025, "Beta Normalization Policy Optimization",
    arXiv:2506.02864) has another advantage, which is not here.
    """
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with(ratio_level="sequence")
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **shared: Any) -> Algorithm:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

    GRPO with one ratio for a completion, the geometric mean of its tokens', and a clip to match,
    that of the paper's section 5.1. No KL, as in verl's and TRL's recipes.
    """
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with(reduction="token_mean")
def cispo(*, clip_low: float = 1.0, clip_high: float = 4.0, **shared: Any) -> Algorithm:
    """Clipped importance sampling policy optimisation (MiniMax-M1 2025, arXiv:2506.13585).

    L = -mean sg(clip(ρ, 1 - ε_low, 1 + ε_high)) A log π: every token keeps its gradient, and the
    clip bounds its weight.

    As in the paper there is no lower bound. The paper does not give the upper one; a cap of 5 is
    what TRL advises, after ScaleRL (Khatri et al. 2025, arXiv:2510.13786). TRL's `epsilon_high` is
    that cap, 1 + ε_high. The paper's dynamic sampling is not part of it here.
    """
    _check_not_negative(clip_low=clip_low, clip_high=clip_high)

    def token_loss(logps: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
        loss = losses.weighted_reinforce_loss(logps, ratio, advantages, clip_low, clip_high)
        _, high = losses.clipped_tokens(ratio, advantages, clip_low, clip_high)
        return loss, {"cispo_clip_ratio": high}

    return _policy_gradient(token_loss, **shared)


@_with()
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

    return _policy_gradient(token_loss, **shared)


@_with(
    advantage="leave_one_out",
    ratio_level="product",
    kl_weight=0.05,
    kl_estimator="k1",
    kl_in="reward",
)
def rloo(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """REINFORCE with the mean of the others as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

    A whole completion is one action: L = -mean ρ A with ρ = π(y) / π_behavior(y), whose gradient at
    a ratio of 1 is -A ∇log π(y), the sum over its tokens. The KL is in the reward.

    As in TRL the ratio is clipped, for more than one update of a rollout (the paper makes one), and
    β is TRL's. verl has the ratio, the clip and the mean of tokens (`ratio_level="token"`,
    `reduction="token_mean"`).
    """
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with(
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
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with(advantage="centered", whiten=True, reduction="token_mean", kl_weight=0.01, kl_estimator="k2")
def reinforce_pp_baseline(
    *, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any
) -> Algorithm:
    """REINFORCE++-baseline, the mean of the group (Hu et al. 2025, arXiv:2501.03262).

    A = r - mean(r), whitened over all tokens of the batch; then PPO's clip. The KL is in the loss.

    Where completions differ in length the mean over tokens is not 0, so that a group whose rewards
    are all the same gets a small advantage, alike for all of it: so it is in verl, too.
    """
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with("ratio_level", advantage="rescaled", reduction="token_mean")
def gpg(**shared: Any) -> Algorithm:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546).

    L = -mean A log π with A = B / (B - M) · (r - mean(r)), M of the B groups being constant: no
    ratio, no clip and no KL, so take one update of each rollout. F_norm is 1; with the paper's
    other, std(r), groups are not rescaled here (`advantage="standardized"`).
    """
    return _policy_gradient(_reinforce, **shared)


@_with(advantage="mean_normalized", reduction="token_mean")
def maxrl(*, clip_low: float = 0.2, clip_high: float = 0.2, **shared: Any) -> Algorithm:
    """Maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710).

    A = (r - mean(r)) / mean(r): of log p(right) what REINFORCE is of p(right), to the order G.
    Rewards must not be negative; those of a group whose mean is 0 are worth 0. No KL.
    """
    return _policy_gradient(_clipped(clip_low, clip_high), **shared)


@_with("advantage", "standardize_each", "whiten", "ratio_level", "kl_in")
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
    return _policy_gradient(_reinforce, advantage=accepted, **shared)
