"""Losses of sampled tokens, and the reductions to one number.

Pure functions of log-probs (nats), masks and advantages; none knows a model. Those of the first
part give one number per token, those of the second a `(sum, weight)` pair, to be divided when all
micro-batches and devices are in:

    ratio = policy_ratio(logps, behavior_logps, mask)
    per_token = clipped_ratio_loss(ratio, advantages)
    per_token += 0.04 * kl_penalty("k3", logps, reference_logps, mask)  # of kl.py
    total, weight = token_mean(per_token, mask)

Any axes may lead `[..., G, C]`. Positions that do not count become 0 before any exp and again
before any sum, so what lies there (infinities and NaN included) reaches no value and no gradient.
Weights depend on the mask alone, never on a log-prob or an advantage.
"""

from __future__ import annotations

from typing import Literal

import jax
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


# --- Likelihood, ratio and losses of a token ----------------------------------------------------


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
    level: Literal["token", "sequence", "product"] = "token",
) -> Array:
    """How much likelier the policy makes what was sampled.

        token:     ρₜ = exp(log π(yₜ) - log μ(yₜ))
        sequence:  ρ = exp(1/|y| Σₜ (log π(yₜ) - log μ(yₜ)))
        product:   ρ = exp(Σₜ (log π(yₜ) - log μ(yₜ))) = π(y) / μ(y)

    Schulman et al., 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347; and Zheng
    et al., 2025, "Group Sequence Policy Optimization" (GSPO), arXiv:2507.18071, whose sequence
    ratio is a geometric mean over the tokens: ∇ρ = ρ · 1/|y| Σₜ ∇log π(yₜ), one weight for all.
    The product is the ratio of whole completions, as RLOO has it: exact, and wild when they are
    long.

    Args:
        logps: log-probs of the policy now, [..., C] nats, with gradient.
        anchor_logps: log-probs of what it is measured against, μ, [..., C] nats: those of the
            sampler, or of the policy before its first update.
        mask: 1 where a token counts, [..., C].
        level: one ratio per token, or one per completion: a mean or a product of them.

    Returns:
        The ratio, float32: [..., C], 1 where a token does not count; or [..., 1]. The log of it
        is cut off at 20, without gradient beyond.

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
    elif level == "product":
        log_ratio = masked_sum(log_ratio, mask, axis=-1, keepdims=True)
    elif level != "token":
        raise ValueError(f"level must be 'token', 'sequence' or 'product', not {level!r}")
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def truncated_importance(
    proximal_logps: ArrayLike,
    sampler_logps: ArrayLike,
    mask: ArrayLike,
    cap: float = 2.0,
    level: Literal["token", "sequence", "product"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
) -> Array:
    """What tokens weigh because the sampler is not quite the policy that is trained.

        w = π(y) / q(y), per token or completion as in `policy_ratio`
        truncate:  min(w, c)
        mask:      w where w <= c, else 0

    Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    https://fengyao.notion.site/off-policy-rl, for `truncate`; `mask` is that of IcePop (Ling Team,
    2025, "Every Step Evolves", arXiv:2510.18855) with its upper bound alone, as in TRL. Where top-k
    drew the tokens, the gradient so weighted is the exact one restricted to what was kept: by
    `product` of whole completions, by `token` of each given those before it.

    Args:
        proximal_logps: log-probs by the training path before the first update, [..., C] nats.
        sampler_logps: log-probs that the tokens were drawn with, [..., C] nats: those of the full
            softmax less the log of the mass that top-k, top-p or min-p kept.
        mask: 1 where a token counts, [..., C].
        cap: c.
        level: one weight per token, or one per completion: a geometric mean or a product.
        mode: what becomes of weights above c.

    Returns:
        The weights, [..., C] float32, without gradient.

    Raises:
        ValueError: if the shapes differ, or the level or the mode is unknown.

    >>> proximal, sampler = jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.1, 0.6]))
    >>> truncated_importance(proximal, sampler, jnp.ones(2), cap=2.0).round(3).tolist()
    [2.0, 0.5]
    >>> truncated_importance(proximal, sampler, jnp.ones(2), 2.0, mode="mask").round(3).tolist()
    [0.0, 0.5]
    """
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode must be 'truncate' or 'mask', not {mode!r}")
    weight = policy_ratio(proximal_logps, sampler_logps, mask, level)
    bounded = jnp.minimum(weight, cap) if mode == "truncate" else masked(weight, weight <= cap)
    return jax.lax.stop_gradient(jnp.broadcast_to(bounded, jnp.shape(mask)))


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
    ratio, advantages = _per_token(advantages, ratio=ratio)
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
    ratio, advantages = _per_token(advantages, ratio=ratio)
    low = jnp.logical_and(ratio < 1.0 - clip_low, advantages < 0.0)
    high = jnp.logical_and(ratio > 1.0 + clip_high, advantages > 0.0)
    return low.astype(jnp.float32), high.astype(jnp.float32)


def reinforce_loss(logps: ArrayLike, advantages: ArrayLike) -> Array:
    """The plain policy gradient: no ratio, no clip.

        lₜ = -A log π(yₜ)

    Williams, 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist
    Reinforcement Learning". Right for the first update of a rollout alone: nothing corrects for a
    policy that has moved since.

    Args:
        logps: log-probs of the policy now, [..., G, C] nats, with gradient.
        advantages: [..., G], or [..., G, C] for an advantage per token.

    Returns:
        The loss per token, [..., G, C] float32.

    Raises:
        ValueError: if the shapes do not fit.

    >>> reinforce_loss(jnp.array([[-1.0, -2.0]]), jnp.array([0.5])).tolist()
    [[0.5, 1.0]]
    """
    logps, advantages = _per_token(advantages, logps=logps)
    return -advantages * logps


def weighted_reinforce_loss(
    logps: ArrayLike,
    ratio: ArrayLike,
    advantages: ArrayLike,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Array:
    """CISPO: the clip bounds the weight of a token and takes none out of the gradient.

        lₜ = -sg(clip(ρₜ, 1 - ε_low, 1 + ε_high)) A log π(yₜ),  sg: without gradient

    MiniMax, 2025, "MiniMax-M1" (CISPO), arXiv:2506.13585. At a ratio of 1 the gradient is
    REINFORCE's, -A ∇log π(yₜ).

    Args:
        logps: log-probs of the policy now, [..., G, C] nats, with gradient.
        ratio: policy over anchor, [..., G, C], or [..., G, 1] for one ratio per completion.
        advantages: [..., G], or [..., G, C] for an advantage per token.
        clip_low: ε_low; 1 is no lower bound, as in the paper.
        clip_high: ε_high; 4 lets a token weigh 5 times.

    Returns:
        The loss per token, [..., G, C] float32.

    Raises:
        ValueError: if the shapes do not fit.

    >>> logps, ratio = jnp.array([[-1.0, -1.0]]), jnp.array([[0.5, 9.0]])
    >>> weighted_reinforce_loss(logps, ratio, jnp.array([2.0])).tolist()
    [[1.0, 10.0]]
    """
    _check_tokens(ratio=ratio, logps=logps)
    weight = jnp.clip(jnp.asarray(ratio, jnp.float32), 1.0 - clip_low, 1.0 + clip_high)
    return jax.lax.stop_gradient(weight) * reinforce_loss(logps, advantages)


def soft_gate_loss(
    ratio: ArrayLike,
    advantages: ArrayLike,
    temperature: float = 1.0,
    negative_temperature: float = 1.05,
) -> Array:
    """SAPO: a gate that closes softly where PPO's clip cuts off.

        lₜ = -4/τ σ(τ (ρₜ - 1)) A,  τ = τ₊ where A > 0, else τ₋

    Gao et al., 2025, "Soft Adaptive Policy Optimization" (SAPO), arXiv:2511.20347. The gradient
    is that of -ρₜ A times 4 σ (1 - σ), which is 1 at a ratio of 1 and falls off on both sides.

    Args:
        ratio: policy over anchor, [..., G, C], or [..., G, 1] for one ratio per completion.
        advantages: [..., G], or [..., G, C] for an advantage per token.
        temperature: τ₊, more than 0; a larger one closes sooner.
        negative_temperature: τ₋, more than 0.

    Returns:
        The loss per token, float32, of the ratio's shape ([..., G, C] with token advantages).

    Raises:
        ValueError: if the shapes do not fit.

    >>> soft_gate_loss(jnp.array([[1.0, 1.0]]), jnp.array([[1.0, -1.0]]), 1.0, 2.0).tolist()
    [[-2.0, 1.0]]
    """
    ratio, advantages = _per_token(advantages, ratio=ratio)
    tau = jnp.where(advantages > 0.0, jnp.float32(temperature), jnp.float32(negative_temperature))
    return -4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages


def top_entropy(entropy: ArrayLike, mask: ArrayLike, share: float) -> Array:
    """Finds the tokens at which the policy was least sure: the forks in its reasoning.

        Hₜ >= the (1 - share) quantile of H over all tokens that count

    Wang et al., 2025, "Beyond the 80/20 Rule" (share 0.2), arXiv:2506.01939. A quantile of what is
    given: micro-batches have each their own.

    Args:
        entropy: of the policy at each token, [..., C] nats; no gradient flows back to it.
        mask: 1 where a token counts, [..., C].
        share: how many of the tokens to find, 0 to 1; more where some tie.

    Returns:
        Whether a token is one of them, [..., C] bool.

    Raises:
        ValueError: if the shapes differ.

    >>> entropy = jnp.array([0.1, 2.0, 0.3, 1.0, 9.0])
    >>> top_entropy(entropy, jnp.array([1, 1, 1, 1, 0]), share=0.5).tolist()
    [False, True, False, True, False]
    """
    check_same_shape(entropy=entropy, mask=mask)
    counts = jnp.asarray(mask, bool)
    entropy = jax.lax.stop_gradient(masked(entropy, mask))
    threshold = jnp.nanquantile(jnp.where(counts, entropy, jnp.nan), 1.0 - share)
    return jnp.logical_and(counts, entropy >= threshold)


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
        rewards: [..., G], or [..., G, R] for those of each function.
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
    check_leads(truncated=truncated, mask=mask)
    mask, rewards = jnp.asarray(mask), jnp.asarray(rewards, jnp.float32)
    truncated = jnp.asarray(truncated, bool)
    by_function = rewards.ndim == mask.ndim
    check_leads(rewards=rewards[..., 0] if by_function else rewards, mask=mask)
    if how == "mask":
        mask = jnp.where(truncated[..., None], jnp.zeros_like(mask), mask)
    elif how == "zero":
        rewards = jnp.where(truncated[..., None] if by_function else truncated, 0.0, rewards)
    elif how != "keep":
        raise ValueError(f"truncated completions: 'keep', 'mask' or 'zero', not {how!r}")
    return mask, rewards


# --- Helpers ------------------------------------------------------------------------------------


def _per_token(advantages: ArrayLike, **given: ArrayLike) -> tuple[Array, Array]:
    """What is given and the advantages, float32 and of one rank: one may be for all tokens."""
    ((name, given_x),) = given.items()
    x, advantages = jnp.asarray(given_x, jnp.float32), jnp.asarray(advantages, jnp.float32)
    if advantages.ndim == x.ndim:
        _check_tokens(**{name: x, "advantages": advantages})
        return x, advantages
    check_leads(**{"advantages": advantages, name: x})
    return x, advantages[..., None]


def _check_tokens(**arrays: ArrayLike) -> None:
    """Checks that the first has a number for each token of the second, or one for all of them."""
    (_, x), (_, tokens) = arrays.items()
    if jnp.shape(x) != (*jnp.shape(tokens)[:-1], 1):
        check_same_shape(**arrays)


def _completions(mask: ArrayLike) -> Array:
    """Number of completions with at least one token that counts, [] float32."""
    return jnp.sum(jnp.any(jnp.asarray(mask, bool), axis=-1), dtype=jnp.float32)
