"""What a completion is worth, relative to the other completions of its prompt.

A group is the last axis of `[..., G]`; any axes may lead. A completion for which no reward
function had an answer is not `valid`: it leaves the group's mean and deviation, and its advantage
is 0. The advantages of a constant group (`constant_groups`) are exactly 0 everywhere: the float
mean of equal numbers need not be that number, and what is left of the difference would be divided
by a standard deviation as small as itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_grpo.arrays import Axes, check_same_shape, divide, masked_sum, sum_and_count


def total_reward(values: ArrayLike, valid: ArrayLike, weights: ArrayLike) -> tuple[Array, Array]:
    """Adds up the reward functions of each completion.

        r = Σₖ vₖ wₖ Rₖ

    A function without an answer (vₖ = 0) drops out with its weight; the other weights are not
    scaled up in its place, so a completion that is judged by fewer functions can earn less.

    Args:
        values: rewards, [..., G, R]. Where not valid they are ignored, whatever they are.
        valid: whether a function had an answer, [..., G, R] bool.
        weights: weight of each function, [R].

    Returns:
        The total rewards, [..., G] float32, 0 where not valid; and whether any function had an
        answer, [..., G] bool.

    Raises:
        ValueError: if the shapes do not fit.

    >>> values = jnp.array([[2.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    >>> valid = jnp.array([[True, True], [True, False], [False, False]])
    >>> rewards, valid = total_reward(values, valid, jnp.array([1.0, 0.5]))
    >>> rewards.tolist(), valid.tolist()
    ([2.5, 2.0, 0.0], [True, True, False])
    """
    check_same_shape(values=values, valid=valid)
    if jnp.shape(weights) != jnp.shape(values)[-1:]:
        raise ValueError(
            f"weights {jnp.shape(weights)} must match the last axis of values {jnp.shape(values)}"
        )
    values, weights = jnp.asarray(values, jnp.float32), jnp.asarray(weights, jnp.float32)
    weighted = values * jnp.broadcast_to(weights, values.shape)
    return masked_sum(weighted, valid, axis=-1), jnp.any(jnp.asarray(valid, bool), axis=-1)


def constant_groups(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Finds the groups that have nothing to teach.

        max{rᵢ : vᵢ} = min{rᵢ : vᵢ}, or fewer than two vᵢ

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.

    Returns:
        Whether a group is constant, [...] bool.

    Raises:
        ValueError: if the shapes differ.

    >>> rewards = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    >>> constant_groups(rewards, jnp.array([[True, True, False], [True, True, False]])).tolist()
    [True, False]
    """
    check_same_shape(rewards=rewards, valid=valid)
    rewards, valid = jnp.asarray(rewards, jnp.float32), jnp.asarray(valid, bool)
    largest = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=-1)
    smallest = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=-1)
    return largest <= smallest  # "<" when none is valid


def centered(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Reward less the group's mean.

        Aᵢ = rᵢ - mean(r)

    Liu et al., 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783.

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> centered(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.ones(4, bool)).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    check_same_shape(rewards=rewards, valid=valid)
    mean, _ = _mean_and_std(rewards, valid, axis=-1)
    return _where_it_varies(jnp.asarray(rewards, jnp.float32) - mean, rewards, valid)


def standardized(rewards: ArrayLike, valid: ArrayLike, eps: float = 1e-4) -> Array:
    """Reward less the group's mean, over the group's standard deviation.

        Aᵢ = (rᵢ - mean(r)) / (std(r) + ε)

    Shao et al., 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300. The standard deviation is the
    unbiased one (over n - 1) and ε is 1e-4, both as in TRL; the biased one would make advantages
    larger by √(n / (n - 1)), which is 1.07 at G = 8.

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.
        eps: ε, in units of reward.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> standardized(jnp.array([3.0, 2.0, 1.0]), jnp.ones(3, bool)).round(3).tolist()
    [1.0, 0.0, -1.0]
    """
    check_same_shape(rewards=rewards, valid=valid)
    mean, std = _mean_and_std(rewards, valid, axis=-1)
    scaled = (jnp.asarray(rewards, jnp.float32) - mean) / (std + eps)
    return _where_it_varies(scaled, rewards, valid)


def batch_standardized(rewards: ArrayLike, valid: ArrayLike, eps: float = 1e-4) -> Array:
    """Reward less the group's mean, over the standard deviation of the whole batch.

        Aᵢ = (rᵢ - mean(r_group)) / (std(r_batch) + ε)

    Liu et al., 2025, "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning" (Lite PPO),
    arXiv:2508.08221. Groups keep their relative sizes: one that is nearly constant is not blown
    up. The deviation is of the rewards round the mean of the batch, unbiased, over every valid
    completion of every group, constant ones too, as in TRL.

    Args:
        rewards: total rewards, [..., G]: the whole batch, of which all leading axes are part.
        valid: which completions have one, [..., G] bool.
        eps: ε, in units of reward.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> rewards = jnp.array([[2.0, 0.0], [0.0, 0.0]])  # the batch: mean 1/2, variance 3 / 3
    >>> batch_standardized(rewards, jnp.ones((2, 2), bool)).round(3).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    check_same_shape(rewards=rewards, valid=valid)
    mean, _ = _mean_and_std(rewards, valid, axis=-1)
    _, std = _mean_and_std(rewards, valid, axis=None)
    scaled = (jnp.asarray(rewards, jnp.float32) - mean) / (std + eps)
    return _where_it_varies(scaled, rewards, valid)


def leave_one_out(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Reward less the mean of the other completions.

        Aᵢ = rᵢ - mean{rⱼ : j ≠ i} = n / (n - 1) · (rᵢ - mean(r))

    Ahmadian et al., 2024, "Back to Basics" (RLOO), arXiv:2402.14740. The baseline does not depend
    on the completion that it judges, which makes the gradient unbiased.

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool; n of them.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> leave_one_out(jnp.array([3.0, 0.0, 0.0]), jnp.ones(3, bool)).tolist()
    [3.0, -1.5, -1.5]
    """
    check_same_shape(rewards=rewards, valid=valid)
    n = masked_sum(1.0, valid, axis=-1, keepdims=True)
    return centered(rewards, valid) * divide(n, n - 1.0)


def _mean_and_std(rewards: ArrayLike, valid: ArrayLike, axis: Axes) -> tuple[Array, Array]:
    """Mean and unbiased standard deviation over the valid ones; the axes stay, with size 1."""
    total, count = sum_and_count(rewards, valid, axis, keepdims=True)
    mean = divide(total, count)
    squares = jnp.square(jnp.asarray(rewards, jnp.float32) - mean)
    return mean, jnp.sqrt(divide(masked_sum(squares, valid, axis, keepdims=True), count - 1.0))


def _where_it_varies(advantages: Array, rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Puts the exact 0 where a completion is not valid and in constant groups."""
    varies = jnp.logical_not(constant_groups(rewards, valid))[..., None]
    return jnp.where(jnp.logical_and(jnp.asarray(valid, bool), varies), advantages, 0.0)
