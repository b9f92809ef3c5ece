"""Losses of sampled tokens: the clipped ratio, the KL penalty, and the reductions to one number.

Pure functions of log-probs (nats), masks and advantages; none knows a model. Those of the first
two parts give one number per token, those of the third a `(sum, weight)` pair, to be divided when
all micro-batches and devices are in:

    ratio = policy_ratio(logps, behavior_logps, mask)
    per_token = clipped_ratio_loss(ratio, advantages)
    per_token += 0.04 * kl_penalty("k3", logps, reference_logps, mask)
    total, weight = token_mean(per_token, mask)

Any axes may lead `[..., G, C]`. Positions that do not count become 0 before any exp and again
before any sum, so what lies there (infinities and NaN included) reaches no value and no gradient.
Weights depend on the mask alone, never on a log-prob or an advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_grpo.arrays import (
    check_leads,
    check_same_shape,
    divide,
    masked,
    masked_sum,
    sum_and_count,
)

# exp(20) is 5e8: far beyond what any clip lets through, far below float32's largest, and still
# finite when squared or multiplied by an advantage of 0 (inf * 0 is NaN).
MAX_LOG_RATIO = 20.0


# --- Likelihood, and the clipped ratio ----------------------------------------------------------


def negative_log_likelihood(logps: ArrayLike) -> Array:
    """What a token costs by maximum likelihood: the loss of SFT, and of RFT.

        lₜ = -log π(yₜ)

    Args:
        logps: log-probs of the tokens, [..., C] nats, with gradient.

    Returns:
        The loss per token, [..., C] float32.

    >>> negative_log_likelihood(jnp.array([-0.5, -2.0])).tolist()
    [0.5, 2.0]
    """
    return -jnp.asarray(logps, jnp.float32)


def policy_ratio(
    logps: ArrayLike,
    anchor_logps: ArrayLike,
    mask: ArrayLike,
    level: Literal["token", "sequence"] = "token",
) -> Array:
    """How much likelier the policy makes what was sampled.

        token:     ρₜ = exp(log π(yₜ) - log μ(yₜ))
        sequence:  ρ = exp(1/|y| Σₜ (log π(yₜ) - log μ(yₜ)))

    Schulman et al., 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347; and Zheng
    et al., 2025, "Group Sequence Policy Optimization" (GSPO), arXiv:2507.18071, whose sequence
    ratio is a geometric mean over the tokens: ∇ρ = ρ · 1/|y| Σₜ ∇log π(yₜ), one weight for all.

    Args:
        logps: log-probs of the policy now, [..., C] nats, with gradient.
        anchor_logps: log-probs of what it is measured against, μ, [..., C] nats: those of the
            sampler, or of the policy before its first update.
        mask: 1 where a token counts, [..., C].
        level: one ratio per token, or one per completion.

    Returns:
        The ratio, float32: [..., C], 1 where a token does not count; or [..., 1]. The log-ratio
        (its mean, for a sequence) is cut off at 20, without gradient beyond.

    Raises:
        ValueError: if the shapes differ or the level is unknown.

    >>> logps, mask = jnp.log(jnp.array([0.5, 0.25, 0.0])), jnp.array([True, True, False])
    >>> anchor_logps = jnp.log(jnp.array([0.25, 0.5, 0.0]))
    >>> policy_ratio(logps, anchor_logps, mask).tolist()
    [2.0, 0.5, 1.0]
    >>> policy_ratio(logps, anchor_logps, mask, level="sequence").tolist()
    [1.0]
    """
    check_same_shape(logps=logps, anchor_logps=anchor_logps, mask=mask)
    log_ratio = masked(logps, mask) - masked(anchor_logps, mask)
    if level == "sequence":
        log_ratio = divide(*sum_and_count(log_ratio, mask, axis=-1, keepdims=True))
    elif level != "token":
        raise ValueError(f"level must be 'token' or 'sequence', not {level!r}")
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def clipped_ratio_loss(
    ratio: ArrayLike,
    advantages: ArrayLike,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Array:
    """The clipped surrogate of PPO and GRPO, and its dual clip.

        lₜ = -min(ρₜ A, clip(ρₜ, 1 - ε_low, 1 + ε_high) A)
        lₜ = min(lₜ, -c A)   where A < 0, with dual clip c

    Schulman et al., 2017, arXiv:1707.06347; Yu et al., 2025, "DAPO", arXiv:2503.14476, for the
    higher high clip; Ye et al., 2020, "Mastering Complex Control in MOBA Games", arXiv:1912.09729,
    for the dual clip: a token that was bad and has become c times likelier no longer pulls.

    At a ratio of 1 the gradient is REINFORCE's, -A ∇log π(yₜ).

    Args:
        ratio: policy over anchor, [..., G, C], or [..., G, 1] for one ratio per completion.
        advantages: [..., G], or [..., G, C] for an advantage per token.
        clip_low: ε_low, how far the ratio may fall and still be rewarded for it.
        clip_high: ε_high, how far it may rise.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        The loss per token, float32, of the ratio's shape ([..., G, C] with token advantages).

    Raises:
        ValueError: if the shapes do not fit or the dual clip is not above 1.

    >>> clipped_ratio_loss(jnp.array([[0.5, 1.0, 1.5]]), jnp.array([1.0]), 0.25, 0.25).tolist()
    [[-0.5, -1.0, -1.25]]
    >>> clipped_ratio_loss(jnp.array([[0.5, 9.0]]), jnp.array([-1.0]), 0.25, 0.25, 3.0).tolist()
    [[0.75, 3.0]]
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    ratio, advantages = _ratio_and_advantages(ratio, advantages)
    within = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = -jnp.minimum(ratio * advantages, within * advantages)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0.0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return loss


def clipped_tokens(
    ratio: ArrayLike, advantages: ArrayLike, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Array, Array]:
    """Finds the tokens that the clip takes out of the gradient.

        low:   ρₜ < 1 - ε_low  and A < 0
        high:  ρₜ > 1 + ε_high and A > 0

    Their token means are TRL's `clip_ratio/low_mean` and `clip_ratio/high_mean`. No token is both,
    so that of their sum is `clip_ratio/region_mean`.

    Args:
        ratio: policy over anchor, [..., G, C], or [..., G, 1] for one ratio per completion.
        advantages: [..., G], or [..., G, C] for an advantage per token.
        clip_low: ε_low of the loss.
        clip_high: ε_high of the loss.

    Returns:
        Low and high, both float32 0 or 1 of the shape that the loss has.

    Raises:
        ValueError: if the shapes do not fit.

    >>> low, high = clipped_tokens(jnp.array([[0.5, 1.0, 1.5]]), jnp.array([1.0]))
    >>> low.tolist(), high.tolist()
    ([[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]])
    """
    ratio, advantages = _ratio_and_advantages(ratio, advantages)
    low = jnp.logical_and(ratio < 1.0 - clip_low, advantages < 0.0)
    high = jnp.logical_and(ratio > 1.0 + clip_high, advantages > 0.0)
    return low.astype(jnp.float32), high.astype(jnp.float32)


# --- KL(policy || reference), estimated from the sampled token ----------------------------------
#
# With d = log π_ref(y) - log π(y). As the term of a loss an estimator is used for its gradient, and
# that need not be the gradient of its expected value:
#
#     name         value             gradient in expectation
#     k1           unbiased          0
#     k2           biased,   >= 0    reverse KL's, ∇KL(π || π_ref)
#     k3           unbiased, >= 0    forward KL's, ∇KL(π_ref || π)
#     k3_weighted  unbiased, >= 0    reverse KL's, also when y was not sampled from π
#
# All is per token, given the tokens before it: that a token changes what comes after is left out.


def kl_k1(logps: ArrayLike, reference_logps: ArrayLike) -> Array:
    """The log-ratio itself: unbiased for KL(π || π_ref), of either sign.

        k1 = -d = log π(y) - log π_ref(y)

    Schulman, 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    Gradient on policy: ∇log π(y), 0 in expectation, so in a loss it adds noise and no pull. Its
    place is in the reward, where it gives reverse KL's gradient.

    Args:
        logps: log-probs of the policy, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.

    Returns:
        The estimate per token, [..., C] float32 nats.

    >>> kl_k1(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0])).tolist()
    [1.0, -1.0]
    """
    return jnp.asarray(logps, jnp.float32) - jnp.asarray(reference_logps, jnp.float32)


def kl_k2(logps: ArrayLike, reference_logps: ArrayLike) -> Array:
    """Half the squared log-ratio: biased for KL(π || π_ref), never negative.

        k2 = d² / 2

    Schulman, 2020 (see `kl_k1`); Liu et al., 2025, "Rethinking KL Regularization in RLHF",
    arXiv:2510.01555.

    Gradient on policy: (log π(y) - log π_ref(y)) ∇log π(y), reverse KL's in expectation.

    Args:
        logps: log-probs of the policy, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.

    Returns:
        The estimate per token, [..., C] float32 nats.

    >>> kl_k2(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0])).tolist()
    [0.5, 0.5]
    """
    return 0.5 * jnp.square(kl_k1(logps, reference_logps))


def kl_k3(logps: ArrayLike, reference_logps: ArrayLike) -> Array:
    """GRPO's estimate: unbiased for KL(π || π_ref), never negative.

        k3 = exp(d) - 1 - d

    Schulman, 2020 (see `kl_k1`); Shao et al., 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300.

    Gradient on policy: (1 - π_ref(y) / π(y)) ∇log π(y), forward KL's in expectation (Tang and
    Munos, 2025, "On a few pitfalls in KL divergence gradient estimation for RL",
    arXiv:2506.09477). Near the reference the two KLs agree to second order.

    Args:
        logps: log-probs of the policy, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.

    Returns:
        The estimate per token, [..., C] float32 nats. d is cut off at 20, without gradient beyond.
        It has no lower limit: k3 is linear there, and the pull on a policy that ran away stays.

    >>> print(f"{kl_k3(-1.0, 0.0):.3f}")  # e - 2
    0.718
    """
    d = jnp.minimum(-kl_k1(logps, reference_logps), MAX_LOG_RATIO)
    return jnp.expm1(d) - d  # exp(d) - 1 would be all rounding near the reference


def kl_k3_weighted(logps: ArrayLike, reference_logps: ArrayLike, ratio: ArrayLike) -> Array:
    """k3 weighted by the ratio: unbiased in value and in gradient, whoever sampled the token.

        ρ k3,  ρ = π(y) / μ(y),  y ~ μ

    DeepSeek-AI, 2025, "DeepSeek-V3.2", arXiv:2512.02556.

    Gradient on policy and off it: ρ (log π(y) - log π_ref(y)) ∇log π(y), reverse KL's in
    expectation. Part of it flows through the ratio, whose anchor must hold no gradient.

    Args:
        logps: log-probs of the policy, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.
        ratio: `policy_ratio` of the tokens, not clipped, [..., C].

    Returns:
        The estimate per token, [..., C] float32 nats.

    Raises:
        ValueError: if the ratio is not one per token.

    >>> print(f"{kl_k3_weighted(-1.0, 0.0, 2.0):.3f}")  # 2 (e - 2)
    1.437
    """
    check_same_shape(logps=logps, ratio=ratio)  # a sequence's ratio would give another gradient
    return jnp.asarray(ratio, jnp.float32) * kl_k3(logps, reference_logps)


KL_ESTIMATORS: dict[str, Callable[[ArrayLike, ArrayLike], Array]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}


def check_kl_estimator(estimator: str, use: Literal["loss", "reward"]) -> None:
    """Refuses an estimator that has no place where it is to be used.

    The functions below ask it themselves; whoever knows the name long before the first rollout
    does well to ask it then.

    Args:
        estimator: its name.
        use: whether the KL is a term of the loss or part of the reward.

    Raises:
        ValueError: if it is unknown, `k1` in the loss, or weighted by the ratio in the reward.

    >>> check_kl_estimator("k3", use="loss")
    >>> check_kl_estimator("k1", use="loss")
    Traceback (most recent call last):
    ValueError: KL estimator k1 in the loss has a gradient of 0 in expectation: use k2 or \
k3_weighted there, or k1 in the reward
    """
    if use == "loss" and estimator == "k1":
        raise ValueError(
            "KL estimator k1 in the loss has a gradient of 0 in expectation: "
            "use k2 or k3_weighted there, or k1 in the reward"
        )
    known = {"loss": ("k2", "k3", "k3_weighted"), "reward": tuple(KL_ESTIMATORS)}
    if use not in known:
        raise ValueError(f"KL belongs in the 'loss' or in the 'reward', not in {use!r}")
    if estimator not in known[use]:
        names = ", ".join(known[use])
        raise ValueError(f"KL estimator in the {use} must be one of {names}; not {estimator!r}")


def kl_penalty(
    estimator: str,
    logps: ArrayLike,
    reference_logps: ArrayLike,
    mask: ArrayLike,
    ratio: ArrayLike | None = None,
) -> Array:
    """The KL term of a loss, per token, by the name of its estimator.

    Args:
        estimator: `k2`, `k3` or `k3_weighted`.
        logps: log-probs of the policy now, [..., C] nats, with gradient.
        reference_logps: log-probs of the reference, [..., C] nats.
        mask: 1 where a token counts, [..., C].
        ratio: for `k3_weighted`, the ratio of the tokens, [..., C].

    Returns:
        The estimate per token, [..., C] float32 nats, 0 where a token does not count.

    Raises:
        ValueError: if the shapes differ, the estimator is unknown or `k1`, or the ratio is missing.

    >>> logps, mask = jnp.array([-2.0, -jnp.inf]), jnp.array([True, False])
    >>> kl_penalty("k2", logps, jnp.array([-1.0, jnp.nan]), mask).tolist()
    [0.5, 0.0]
    """
    check_kl_estimator(estimator, use="loss")
    check_same_shape(logps=logps, reference_logps=reference_logps, mask=mask)
    logps, reference_logps = masked(logps, mask), masked(reference_logps, mask)
    if estimator != "k3_weighted":
        return KL_ESTIMATORS[estimator](logps, reference_logps)
    if ratio is None:
        raise ValueError("KL estimator k3_weighted needs the ratio of the tokens")
    return kl_k3_weighted(logps, reference_logps, ratio)


def kl_in_reward(
    rewards: ArrayLike,
    logps: ArrayLike,
    reference_logps: ArrayLike,
    mask: ArrayLike,
    coefficient: ArrayLike,
    estimator: str = "k1",
) -> Array:
    """Takes the KL of a whole completion off its reward.

        r - β Σₜ kl(yₜ)

    Ouyang et al., 2022, "InstructGPT", arXiv:2203.02155. With `k1` the policy gradient of this
    reward has reverse KL's gradient, effects on later tokens included; with `k2` and `k3` it has
    that of neither KL, however good their values are (Liu et al., 2025, arXiv:2510.01555).

    Args:
        rewards: total rewards, [..., G].
        logps: log-probs of the policy that sampled, [..., G, C] nats.
        reference_logps: log-probs of the reference, [..., G, C] nats.
        mask: 1 where a token counts, [..., G, C].
        coefficient: β, in units of reward per nat.
        estimator: `k1`, `k2` or `k3`.

    Returns:
        The rewards left, [..., G] float32.

    Raises:
        ValueError: if the shapes do not fit or the estimator is not one of these.

    >>> logps, reference_logps = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.5]])
    >>> kl_in_reward(jnp.array([2.0]), logps, reference_logps, jnp.ones((1, 2)), 0.5).tolist()
    [1.25]
    """
    check_kl_estimator(estimator, use="reward")
    check_same_shape(logps=logps, reference_logps=reference_logps, mask=mask)
    check_leads(rewards=rewards, mask=mask)
    kl = KL_ESTIMATORS[estimator](masked(logps, mask), masked(reference_logps, mask))
    coefficient = jnp.asarray(coefficient, jnp.float32)
    return jnp.asarray(rewards, jnp.float32) - coefficient * masked_sum(kl, mask, axis=-1)


# --- From tokens to one number: reductions, each a (sum, weight) pair ---------------------------


def token_mean(per_token: ArrayLike, mask: ArrayLike) -> tuple[Array, Array]:
    """Mean over all tokens: long completions weigh more.

        Σᵢₜ lᵢₜ / Σᵢ |yᵢ|

    Yu et al., 2025, "DAPO", arXiv:2503.14476.

    Args:
        per_token: [..., G, C], or [..., G, 1] for one number per completion.
        mask: 1 where a token counts, [..., G, C].

    Returns:
        The sum, and the number of tokens that count; both [] float32.

    Raises:
        ValueError: if the shapes do not fit.

    >>> per_token, mask = jnp.array([[1.0, 3.0], [5.0, 0.0]]), jnp.array([[1, 1], [1, 0]])
    >>> [float(x) for x in token_mean(per_token, mask)]
    [9.0, 3.0]
    """
    _check_tokens(per_token=per_token, mask=mask)
    return sum_and_count(per_token, mask)


def sequence_mean(per_token: ArrayLike, mask: ArrayLike) -> tuple[Array, Array]:
    """Mean over completions of the mean over their tokens: every completion weighs the same.

        1/N Σᵢ 1/|yᵢ| Σₜ lᵢₜ

    Shao et al., 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300.

    Args:
        per_token: [..., G, C], or [..., G, 1] for one number per completion.
        mask: 1 where a token counts, [..., G, C].

    Returns:
        The sum, and N, the number of completions with at least one token that counts; both []
        float32. A completion without one (masked, or not there) adds to neither.

    Raises:
        ValueError: if the shapes do not fit.

    >>> per_token, mask = jnp.array([[1.0, 3.0], [5.0, 0.0]]), jnp.array([[1, 1], [1, 0]])
    >>> [float(x) for x in sequence_mean(per_token, mask)]
    [7.0, 2.0]
    """
    _check_tokens(per_token=per_token, mask=mask)
    means = divide(*sum_and_count(per_token, mask, axis=-1))
    return jnp.sum(means), _completions(mask)


def constant_length(
    per_token: ArrayLike, mask: ArrayLike, length: ArrayLike
) -> tuple[Array, Array]:
    """Sum over tokens, over a length that is the same for all: no bias by length.

        1/N Σᵢ 1/L Σₜ lᵢₜ

    Liu et al., 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783: to divide
    by the completion's own length makes long wrong answers cheap.

    Args:
        per_token: [..., G, C], or [..., G, 1] for one number per completion.
        mask: 1 where a token counts, [..., G, C].
        length: L, tokens; usually the limit on completions.

    Returns:
        The sum, and N L with N the number of completions with at least one token that counts; both
        [] float32.

    Raises:
        ValueError: if the shapes do not fit.

    >>> per_token, mask = jnp.array([[1.0, 3.0], [5.0, 0.0]]), jnp.array([[1, 1], [1, 0]])
    >>> [float(x) for x in constant_length(per_token, mask, length=8)]
    [9.0, 16.0]
    """
    _check_tokens(per_token=per_token, mask=mask)
    return masked_sum(per_token, mask), _completions(mask) * jnp.asarray(length, jnp.float32)


# --- Completions cut at the length limit --------------------------------------------------------


def handle_truncated(
    how: Literal["keep", "mask", "zero"], mask: ArrayLike, rewards: ArrayLike, truncated: ArrayLike
) -> tuple[Array, Array]:
    """Says what becomes of completions that the length limit has cut.

    Each choice has its bias, so watch how many there are:

    - `keep`: nothing; they are judged by what is there.
    - `mask`: they leave the loss but stay in their group's baseline, with the reward that they
      have (overlong filtering; Yu et al., 2025, "DAPO", arXiv:2503.14476).
    - `zero`: their reward is 0, so the policy learns to finish.

    Args:
        how: one of these.
        mask: 1 where a token counts, [..., G, C].
        rewards: total rewards, [..., G].
        truncated: whether the limit has cut a completion, [..., G] bool.

    Returns:
        The mask, of the dtype it had, and the rewards, float32.

    Raises:
        ValueError: if the shapes do not fit or the choice is unknown.

    >>> mask, rewards, truncated = jnp.ones((2, 2)), jnp.ones(2), jnp.array([True, False])
    >>> [x.tolist() for x in handle_truncated("mask", mask, rewards, truncated)]
    [[[0.0, 0.0], [1.0, 1.0]], [1.0, 1.0]]
    >>> [x.tolist() for x in handle_truncated("zero", mask, rewards, truncated)]
    [[[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0]]
    """
    check_leads(rewards=rewards, mask=mask)
    check_leads(truncated=truncated, mask=mask)
    mask, rewards = jnp.asarray(mask), jnp.asarray(rewards, jnp.float32)
    truncated = jnp.asarray(truncated, bool)
    if how == "mask":
        mask = jnp.where(truncated[..., None], jnp.zeros_like(mask), mask)
    elif how == "zero":
        rewards = jnp.where(truncated, 0.0, rewards)
    elif how != "keep":
        raise ValueError(f"truncated completions: 'keep', 'mask' or 'zero', not {how!r}")
    return mask, rewards


# --- Helpers ------------------------------------------------------------------------------------


def _ratio_and_advantages(ratio: ArrayLike, advantages: ArrayLike) -> tuple[Array, Array]:
    """Both float32 and of one rank: an advantage per completion is one for all of its tokens."""
    ratio, advantages = jnp.asarray(ratio, jnp.float32), jnp.asarray(advantages, jnp.float32)
    if advantages.ndim == ratio.ndim:
        _check_tokens(ratio=ratio, advantages=advantages)
        return ratio, advantages
    check_leads(advantages=advantages, ratio=ratio)
    return ratio, advantages[..., None]


def _check_tokens(**arrays: ArrayLike) -> None:
    """Checks that the first has a number for each token of the second, or one for all of them."""
    (_, x), (_, tokens) = arrays.items()
    if jnp.shape(x) != (*jnp.shape(tokens)[:-1], 1):
        check_same_shape(**arrays)


def _completions(mask: ArrayLike) -> Array:
    """Number of completions with at least one token that counts, [] float32."""
    return jnp.sum(jnp.any(jnp.asarray(mask, bool), axis=-1), dtype=jnp.float32)
