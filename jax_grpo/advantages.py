"""What a completion is worth, relative to the other completions of its prompt.

A group is the last axis of `[..., G]`; any axes may lead. A completion for which no reward
function had an answer is not `valid`: it leaves the group's mean and deviation, and its advantage
is 0. The advantages of a constant group (`constant_groups`) are exactly 0 wherever they are
relative to the group: the float mean of equal numbers need not be that number, and what is left of
the difference would be divided by a standard deviation as small as itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_grpo.arrays import Axes, check_same_shape, divide, masked, masked_sum, sum_and_count


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


def total_standardized_reward(
    values: ArrayLike, valid: ArrayLike, weights: ArrayLike
) -> tuple[Array, Array]:
    """Adds up the reward functions of each completion, each standardized in its group before.

        r = Σₖ vₖ wₖ (Rₖ - mean(Rₖ)) / (std(Rₖ) + ε)

    Liu et al., 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization",
    arXiv:2601.05242: rewards of different scales count by their weights alone, and different mixes
    of rewards stay different. GDPO goes on with `batch_standardized`, as TRL does.

    Args:
        values: rewards, [..., G, R]. Where not valid they are ignored, whatever they are.
        valid: whether a function had an answer, [..., G, R] bool.
        weights: weight of each function, [R].

    Returns:
        As `total_reward`. A function that is constant in a group adds exactly 0 there.

    Raises:
        ValueError: if the shapes do not fit.

    >>> values = jnp.array([[300.0, 0.1], [200.0, 0.2], [100.0, 0.3]])
    >>> valid, weights = jnp.ones((3, 2), bool), jnp.array([1.0, 0.5])
    >>> total_standardized_reward(values, valid, weights)[0].round(2).tolist()
    [0.5, 0.0, -0.5]
    """
    check_same_shape(values=values, valid=valid)
    by_function = standardized(jnp.moveaxis(values, -1, 0), jnp.moveaxis(valid, -1, 0))
    return total_reward(jnp.moveaxis(by_function, 0, -1), valid, weights)


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


def standardized(
    rewards: ArrayLike, valid: ArrayLike, eps: float = 1e-4, bessel: bool = True
) -> Array:
    """Reward less the group's mean, over the group's standard deviation.

        Aᵢ = (rᵢ - mean(r)) / (std(r) + ε)

    Shao et al., 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300. The standard deviation is the
    unbiased one (over n - 1), as in TRL, verl and Tunix; the biased one makes advantages larger by
    √(n / (n - 1)), which is 1.07 at G = 8. ε is 1e-4, as in TRL, where verl and Tunix have 1e-6. A
    completion that is alone in its group is worth 0, where verl gives it its reward (`raw`).

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.
        eps: ε, in units of reward.
        bessel: False for the biased standard deviation, over n; `standardized_biased` in a config.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> standardized(jnp.array([3.0, 2.0, 1.0]), jnp.ones(3, bool)).round(3).tolist()
    [1.0, 0.0, -1.0]
    """
    check_same_shape(rewards=rewards, valid=valid)
    mean, std = _mean_and_std(rewards, valid, axis=-1, bessel=bessel)
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


def mean_normalized(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Reward less the group's mean, over that mean: what is rarely right counts more.

        Aᵢ = (rᵢ - mean(r)) / mean(r)

    Tajwar et al., 2026, "Maximum Likelihood Reinforcement Learning" (MaxRL), arXiv:2602.02710. With
    rewards 0 and 1 the gradient is unbiased for log p(right) cut off at order G, where REINFORCE's
    is for p(right).

    Args:
        rewards: total rewards, [..., G], none negative.
        valid: which completions have one, [..., G] bool.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group, and are 0 where its mean is not
        positive.

    Raises:
        ValueError: if the shapes differ.

    >>> mean_normalized(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.ones(4, bool)).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    check_same_shape(rewards=rewards, valid=valid)
    mean, _ = _mean_and_std(rewards, valid, axis=-1)
    positive = mean > 0.0
    return jnp.where(positive, centered(rewards, valid) / jnp.where(positive, mean, 1.0), 0.0)


def rescaled(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Reward less the group's mean, scaled up for the groups that have nothing to teach.

        Aᵢ = B / (B - M) · (rᵢ - mean(r)),  M of the B groups being constant

    Chu et al., 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model
    Reasoning", arXiv:2504.02546, with F_norm = 1. verl divides by the number of completions with a
    reward other than 0 instead, which is another thing. A group without a valid completion is none.

    Args:
        rewards: total rewards, [..., G]: the whole batch, of which all leading axes are part.
        valid: which completions have one, [..., G] bool.

    Returns:
        Advantages, [..., G] float32; they sum to 0 in a group.

    Raises:
        ValueError: if the shapes differ.

    >>> rescaled(jnp.array([[2.0, 0.0], [1.0, 1.0]]), jnp.ones((2, 2), bool)).tolist()
    [[2.0, -2.0], [0.0, 0.0]]
    """
    varying = jnp.sum(jnp.logical_not(constant_groups(rewards, valid)), dtype=jnp.float32)
    groups = jnp.sum(jnp.any(jnp.asarray(valid, bool), axis=-1), dtype=jnp.float32)
    return divide(groups, varying) * centered(rewards, valid)


def raw(rewards: ArrayLike, valid: ArrayLike) -> Array:
    """The reward itself: no baseline, and no zero for constant groups.

        Aᵢ = rᵢ

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.

    Returns:
        Advantages, [..., G] float32, 0 where not valid.

    Raises:
        ValueError: if the shapes differ.

    >>> raw(jnp.array([1.0, 1.0]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    check_same_shape(rewards=rewards, valid=valid)
    return masked(rewards, valid)


def accepted(rewards: ArrayLike, valid: ArrayLike, threshold: float = 0.0) -> Array:
    """1 for what the verifiers accept and 0 for all else: nothing is pushed away.

        Aᵢ = 1 where rᵢ > threshold, else 0

    Yuan et al., 2023, "Scaling Relationship on Learning Mathematical Reasoning with Large Language
    Models" (RFT), arXiv:2308.01825.

    Args:
        rewards: total rewards, [..., G].
        valid: which completions have one, [..., G] bool.
        threshold: what a reward must exceed.

    Returns:
        Advantages, [..., G] float32.

    Raises:
        ValueError: if the shapes differ.

    >>> accepted(jnp.array([1.0, 0.5, 0.0]), jnp.array([True, True, True]), 0.5).tolist()
    [1.0, 0.0, 0.0]
    """
    check_same_shape(rewards=rewards, valid=valid)
    return masked(jnp.asarray(rewards, jnp.float32) > threshold, valid)


def whitened(advantages: ArrayLike, mask: ArrayLike, eps: float = 1e-8) -> Array:
    """Advantages of mean 0 and deviation 1 over all tokens of the batch.

        Aₜ ← (Aₜ - mean(A)) / (std(A) + ε)

    As PPO's implementations have it (Huang et al., 2024, "The N+ Implementation Details of RLHF
    with PPO", arXiv:2403.17031), and Hu et al., 2025, "REINFORCE++", arXiv:2501.03262, without a
    critic. The deviation is the unbiased one, over tokens, as in TRL and verl: long completions
    count more.

    Args:
        advantages: [..., C], all axes the batch.
        mask: 1 where a token counts, [..., C].
        eps: ε, in units of the advantages.

    Returns:
        Advantages, [..., C] float32, 0 where a token does not count, and everywhere if all that
        count are equal.

    Raises:
        ValueError: if the shapes differ.

    >>> whitened(jnp.array([3.0, 2.0, 1.0, 9.0]), jnp.array([1, 1, 1, 0])).tolist()
    [1.0, 0.0, -1.0, 0.0]
    """
    check_same_shape(advantages=advantages, mask=mask)
    advantages, counts = jnp.asarray(advantages, jnp.float32), jnp.asarray(mask, bool)
    mean, std = _mean_and_std(advantages, counts, axis=None)
    varies = jnp.logical_not(constant_groups(advantages.reshape(-1), counts.reshape(-1)))
    return jnp.where(jnp.logical_and(counts, varies), (advantages - mean) / (std + eps), 0.0)


def _mean_and_std(
    rewards: ArrayLike, valid: ArrayLike, axis: Axes, bessel: bool = True
) -> tuple[Array, Array]:
    """Mean and standard deviation over the valid ones; the axes stay, with size 1."""
    total, count = sum_and_count(rewards, valid, axis, keepdims=True)
    mean = divide(total, count)
    squares = masked_sum(
        jnp.square(jnp.asarray(rewards, jnp.float32) - mean), valid, axis, keepdims=True
    )
    return mean, jnp.sqrt(divide(squares, count - 1.0 if bessel else count))


def _where_it_varies(advantages: Array, rewards: ArrayLike, valid: ArrayLike) -> Array:
    """Puts the exact 0 where a completion is not valid and in constant groups."""
    varies = jnp.logical_not(constant_groups(rewards, valid))[..., None]
    return jnp.where(jnp.logical_and(jnp.asarray(valid, bool), varies), advantages, 0.0)
