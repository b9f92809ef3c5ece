"""KL(policy || reference), estimated from the sampled token: in the loss or in the reward.

With d = log π_ref(y) - log π(y). As the term of a loss an estimator is used for its gradient, and
that need not be the gradient of its expected value:

    name         value             gradient in expectation
    k1           unbiased          0
    k2           biased,   >= 0    reverse KL's, ∇KL(π || π_ref)
    k3           unbiased, >= 0    forward KL's, ∇KL(π_ref || π)
    k3_weighted  unbiased, >= 0    reverse KL's, also when y was not sampled from π

All is per token, given the tokens before it: that a token changes what comes after is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_grpo.arrays import check_leads, check_same_shape, masked

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: large, and finite when squared or multiplied


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


def sampled_kl(
    logps: ArrayLike, reference_logps: ArrayLike, mask: ArrayLike, estimator: str = "k1"
) -> Array:
    """The KL that a rollout has cost, per token: what a reward takes off.

    Args:
        logps: log-probs of the policy that sampled, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.
        mask: 1 where a token counts, [..., C].
        estimator: `k1`, `k2` or `k3`.

    Returns:
        The estimate per token, [..., C] float32 nats, 0 where a token does not count.

    Raises:
        ValueError: if the shapes differ or the estimator is not one of these.

    >>> logps, mask = jnp.array([-1.0, jnp.inf]), jnp.array([True, False])
    >>> sampled_kl(logps, jnp.array([-2.0, jnp.nan]), mask).tolist()
    [1.0, 0.0]
    """
    check_kl_estimator(estimator, use="reward")
    check_same_shape(logps=logps, reference_logps=reference_logps, mask=mask)
    return KL_ESTIMATORS[estimator](masked(logps, mask), masked(reference_logps, mask))


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
    check_leads(rewards=rewards, mask=mask)
    kl = jnp.sum(sampled_kl(logps, reference_logps, mask, estimator), axis=-1)
    return jnp.asarray(rewards, jnp.float32) - jnp.asarray(coefficient, jnp.float32) * kl


def kl_to_go(
    logps: ArrayLike, reference_logps: ArrayLike, mask: ArrayLike, estimator: str = "k1"
) -> Array:
    """The KL from each token on: what choosing it led to, and nothing of what came before.

        Σ_{i≥t} kl(yᵢ)

    Hu et al., 2025, "REINFORCE++", arXiv:2501.03262. Taken off the advantage it has the gradient
    that `kl_in_reward` has, with less variance: what came before a token is not its doing.

    Args:
        logps: log-probs of the policy that sampled, [..., C] nats.
        reference_logps: log-probs of the reference, [..., C] nats.
        mask: 1 where a token counts, [..., C].
        estimator: `k1`, `k2` or `k3`.

    Returns:
        The sums, [..., C] float32 nats.

    Raises:
        ValueError: if the shapes differ or the estimator is not one of these.

    >>> kl_to_go(jnp.array([-1.0, -1.0]), jnp.array([-2.0, -1.5]), jnp.ones(2)).tolist()
    [1.5, 0.5]
    """
    kl = sampled_kl(logps, reference_logps, mask, estimator)
    return jnp.cumsum(kl[..., ::-1], axis=-1)[..., ::-1]
