"""PPO's pages: rewards of tokens, advantages by a critic, the critic's loss, the KL's weight.

    rewards = token_rewards(scores, kl, mask, 0.05)
    advantages = generalized_advantages(rewards, values, mask, discount=1.0, decay=0.95)
    returns = advantages + values
    advantages = whitened(advantages, mask)  # of advantages.py
    loss = clipped_value_loss(values_now, values, returns, 0.2)

Any axes may lead `[..., C]`. What does not count (masks may have holes) is stepped over: the token
after it follows upon the token before it.
"""

from __future__ import annotations

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


def token_rewards(
    scores: ArrayLike, kl: ArrayLike, mask: ArrayLike, coefficient: ArrayLike
) -> Array:
    """The reward of each token: its KL penalty, and at the last one what the completion is worth.

        rₜ = -β klₜ + (score at the last token)

    Ziegler et al., 2019, "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593;
    Ouyang et al., 2022, "InstructGPT", arXiv:2203.02155.

    Args:
        scores: of whole completions, [..., G].
        kl: estimate per token, [..., G, C] nats, such as `kl_k1`.
        mask: 1 where a token counts, [..., G, C].
        coefficient: β, in units of reward per nat.

    Returns:
        Rewards, [..., G, C] float32, 0 where a token does not count.

    Raises:
        ValueError: if the shapes do not fit.

    >>> kl, mask = jnp.array([[2.0, 4.0, 0.0]]), jnp.array([[1, 1, 0]])
    >>> token_rewards(jnp.array([1.0]), kl, mask, 0.25).tolist()
    [[-0.5, 0.0, 0.0]]
    """
    check_same_shape(kl=kl, mask=mask)
    check_leads(scores=scores, mask=mask)
    counts = jnp.asarray(mask, bool)
    later = jnp.cumsum(counts[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]  # itself included
    last = jnp.logical_and(counts, later == 1)
    penalty = jnp.asarray(coefficient, jnp.float32) * masked(kl, mask)
    return masked(jnp.asarray(scores, jnp.float32)[..., None], last) - penalty


def generalized_advantages(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    discount: float = 1.0,
    decay: float = 0.95,
) -> Array:
    """Generalized advantage estimation, by one scan from the last token to the first.

        δₜ = rₜ + γ Vₜ₊₁ - Vₜ,  Aₜ = δₜ + γ λ Aₜ₊₁;  V and A are 0 after the last token

    Schulman et al., 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv:1506.02438. A completion that was cut at the length limit ends there like
    any other, as in TRL and verl: there is no value of what it would have gone on to say. λ = 1 is
    return less value; with values of 0, too, it is the reward to go.

    Args:
        rewards: [..., C].
        values: of the critic before each token, [..., C]; no gradient flows back to them.
        mask: 1 where a token counts, [..., C].
        discount: γ.
        decay: λ.

    Returns:
        Advantages, [..., C] float32, 0 where a token does not count; with `values` added they are
        the critic's targets.

    Raises:
        ValueError: if the shapes differ.

    >>> rewards, values = jnp.array([0.0, 1.0, 9.0]), jnp.array([0.5, 0.5, 9.0])
    >>> mask = jnp.array([1, 1, 0])  # 1 - 0.5, then 0.5 - 0.5 + 0.5 · 0.5
    >>> generalized_advantages(rewards, values, mask, decay=0.5).tolist()
    [0.25, 0.5, 0.0]
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    rewards, values = masked(rewards, mask), jax.lax.stop_gradient(masked(values, mask))

    def step(
        carry: tuple[Array, Array], token: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        next_advantage, next_value = carry
        reward, value, counts = token
        advantage = reward + discount * next_value - value + discount * decay * next_advantage
        kept = jnp.where(counts, advantage, next_advantage), jnp.where(counts, value, next_value)
        return kept, jnp.where(counts, advantage, 0.0)

    by_token = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, jnp.asarray(mask, bool))]
    nothing = jnp.zeros_like(rewards[..., 0])
    _, advantages = jax.lax.scan(step, (nothing, nothing), tuple(by_token), reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def clipped_value_loss(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, clip: float = 0.2
) -> tuple[Array, Array]:
    """The critic's squared error, which a step away from its old values cannot make smaller.

        lₜ = ½ max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)

    Schulman et al., 2017, arXiv:1707.06347, in its code; the half and the max as in TRL and verl.

    Args:
        values: of the critic now, [..., C], with gradient.
        old_values: of the critic before the rollout's first update, [..., C].
        returns: its targets, [..., C].
        clip: ε, in units of value; infinity for no clip.

    Returns:
        The loss per token, and 1 where the clip took a token out of the gradient; both [..., C]
        float32.

    Raises:
        ValueError: if the shapes differ.

    >>> values, old, returns = jnp.array([1.0, 1.0]), jnp.array([0.0, 0.0]), jnp.array([2.0, -2.0])
    >>> [x.tolist() for x in clipped_value_loss(values, old, returns, 0.5)]
    [[1.125, 4.5], [1.0, 0.0]]
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    values, old = jnp.asarray(values, jnp.float32), jnp.asarray(old_values, jnp.float32)
    returns = jnp.asarray(returns, jnp.float32)
    plain = jnp.square(values - returns)
    within = jnp.square(jnp.clip(values, old - clip, old + clip) - returns)
    return 0.5 * jnp.maximum(plain, within), (within > plain).astype(jnp.float32)


def unexplained_variance(
    values: ArrayLike, returns: ArrayLike, mask: ArrayLike
) -> tuple[Array, Array]:
    """The share of the returns' variance that the critic does not explain: 0 at best.

        Σ (R - V)² / Σ (R - mean(R))²

    1 less what is called explained variance; a critic that says the mean everywhere has 1.

    Args:
        values: of the critic now, [..., C].
        returns: its targets, [..., C].
        mask: 1 where a token counts, [..., C].

    Returns:
        What is above the line and what is below; both [] float32.

    Raises:
        ValueError: if the shapes differ.

    >>> values, returns = jnp.array([0.0, 1.0, 9.0]), jnp.array([0.0, 2.0, 9.0])
    >>> [float(x) for x in unexplained_variance(values, returns, jnp.array([1, 1, 0]))]
    [1.0, 2.0]
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    values, returns = masked(values, mask), masked(returns, mask)
    mean = divide(*sum_and_count(returns, mask))
    return jnp.sum(jnp.square(returns - values)), masked_sum(jnp.square(returns - mean), mask)


def adapted_kl_coefficient(
    coefficient: ArrayLike, kl: ArrayLike, target: float, gain: float = 0.1
) -> Array:
    """The KL's weight after a step: raised where the KL was above its target, else lowered.

        β ← β (1 + K clip(KL / target - 1, -0.2, 0.2))

    Ziegler et al., 2019, arXiv:1909.08593, whose K is 0.1; TRL's and verl's is the number of
    completions in a step over a horizon of 10000.

    Args:
        coefficient: β, [].
        kl: the mean KL that was seen, [] nats, summed over a completion or not as the target is.
        target: what it should be, more than 0.
        gain: K.

    Returns:
        The next β, [] float32.

    Raises:
        ValueError: for a target that is not positive.

    >>> [round(float(adapted_kl_coefficient(0.5, kl, target=6.0)), 3) for kl in (60.0, 6.0, 0.0)]
    [0.51, 0.5, 0.49]
    """
    if not target > 0:
        raise ValueError(f"target is {target}: it must be positive")
    error = jnp.clip(jnp.asarray(kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    error = jnp.where(
        jnp.isnan(error), 0.0, error
    )  # of a rollout that went wrong nothing is learnt
    return jnp.asarray(coefficient, jnp.float32) * (1.0 + gain * error)
