"""Advantages: values worked by hand, a slow NumPy reference, and what must hold for all of them.

A new advantage joins as one row of `ADVANTAGES`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import advantages

pytestmark = pytest.mark.usefixtures("strict")

# Two groups of four; the third completion of the second has no reward, whatever stands there.
#   group 0:  2 0 1 1   mean 1, squares 1 1 0 0, unbiased variance 2/3
#   group 1:  3 0 - 0   mean 1, squares 4 1 - 1, unbiased variance 6/2
#   batch:    mean 7/7 = 1, squares 2 + 6 = 8, unbiased variance 8/6
REWARDS = np.array([[2, 0, 1, 1], [3, 0, np.nan, 0]], np.float32)
VALID = np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)
CENTERED = np.array([[1, -1, 0, 0], [2, -1, 0, -1]])
EPS = 1e-4


def slow(kind: str, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The textbook, one completion at a time, in float64."""
    rewards = rewards.astype(np.float64)
    out = np.zeros(rewards.shape)
    for group in np.ndindex(*rewards.shape[:-1]):
        members = [i for i in range(rewards.shape[-1]) if valid[group][i]]
        group_rewards = [rewards[group][i] for i in members]
        if len(set(group_rewards)) < 2:
            continue
        for i in members:
            baseline = np.mean(group_rewards)
            scale = 1.0
            if kind == "leave_one_out":
                baseline = np.mean([rewards[group][j] for j in members if j != i])
            if kind == "standardized":
                scale = np.std(group_rewards, ddof=1) + EPS
            if kind == "standardized_biased":
                scale = np.std(group_rewards) + EPS
            if kind == "batch_standardized":
                scale = np.std(rewards[valid], ddof=1) + EPS
            if kind == "mean_normalized":
                scale = np.mean(group_rewards)
            if kind == "rescaled":
                rows = zip(
                    rewards.reshape(-1, rewards.shape[-1]),
                    valid.reshape(-1, valid.shape[-1]),
                    strict=True,
                )
                sizes = [len(set(row[counts])) for row, counts in rows]
                scale = sum(n > 1 for n in sizes) / sum(n > 0 for n in sizes)
            out[group][i] = (rewards[group][i] - baseline) / scale
    return out


ADVANTAGES = {
    "centered": (advantages.centered, CENTERED),
    "standardized": (
        advantages.standardized,
        CENTERED / (np.sqrt([[2 / 3], [6 / 2]]) + EPS),
    ),
    # biased variances 2/4 and 6/3
    "standardized_biased": (
        partial(advantages.standardized, bessel=False),
        CENTERED / (np.sqrt([[2 / 4], [6 / 3]]) + EPS),
    ),
    "mean_normalized": (advantages.mean_normalized, CENTERED),  # both means are 1
    "rescaled": (advantages.rescaled, CENTERED),  # both groups vary
    "batch_standardized": (
        advantages.batch_standardized,
        CENTERED / (np.sqrt(8 / 6) + EPS),
    ),
    # n / (n - 1) is 4/3 and 3/2: for the first, 2 - (0 + 1 + 1) / 3 = 4/3.
    "leave_one_out": (
        advantages.leave_one_out,
        [[4 / 3, -4 / 3, 0, 0], [3, -1.5, 0, -1.5]],
    ),
}
every_advantage = pytest.mark.parametrize("name", ADVANTAGES)


def random_rewards(seed: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.1, 1.0, 2.0], shape).astype(np.float32)
    return rewards, rng.random(shape) < 0.8


@every_advantage
def test_values_worked_by_hand(name):
    function, expected = ADVANTAGES[name]
    np.testing.assert_allclose(function(jnp.array(REWARDS), VALID), expected, rtol=1e-6)


@every_advantage
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 4)])
def test_agrees_with_the_slow_reference_under_jit(name, shape):
    rewards, valid = random_rewards(len(shape), shape)
    actual = jax.jit(ADVANTAGES[name][0])(rewards, valid)
    assert actual.dtype == jnp.float32 and actual.shape == shape
    np.testing.assert_allclose(actual, slow(name, rewards, valid), rtol=1e-5, atol=1e-6)


@every_advantage
def test_sums_to_zero_in_a_group_and_is_zero_where_not_valid(name):
    rewards, valid = random_rewards(0, (64, 8))
    values = ADVANTAGES[name][0](rewards, valid)
    np.testing.assert_allclose(jnp.sum(values, axis=-1), 0.0, atol=1e-5)
    np.testing.assert_array_equal(values[~valid], 0.0)


@every_advantage
def test_a_constant_group_gets_exactly_zero(name):
    rewards = np.full((4, 7), 0.1 + 0.2, np.float32)
    rewards[1:3] = [[0.1], [0.7]]
    rewards[3, 0] = 5.0  # the one group that varies, so that the batch has a deviation
    # What the rule is for: the float32 mean of equal numbers need not be that number.
    assert np.any(np.mean(rewards, axis=-1)[:3] != rewards[:3, 0])
    values = ADVANTAGES[name][0](rewards, np.ones(rewards.shape, bool))
    np.testing.assert_array_equal(values[:3], 0.0)
    assert values[3, 0] > 0


@every_advantage
@pytest.mark.parametrize("valid", [[0, 0, 0], [0, 1, 0], [1, 1, 0]])
def test_small_and_empty_groups_give_zero_not_nan(name, valid):
    rewards = jnp.array([1.0, 1.0, jnp.nan])
    np.testing.assert_array_equal(ADVANTAGES[name][0](rewards, jnp.array(valid, bool)), 0.0)


@every_advantage
def test_order_within_a_group_and_of_groups_only_permutes(name):
    rewards, valid = random_rewards(1, (16, 8))
    rng = np.random.default_rng(2)
    groups, members = rng.permutation(16), rng.permutation(8)
    function = ADVANTAGES[name][0]
    np.testing.assert_allclose(
        function(rewards[groups][:, members], valid[groups][:, members]),
        function(rewards, valid)[groups][:, members],
        atol=1e-6,
    )


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "mean_normalized"])
def test_shift_of_a_group_changes_nothing(name):
    rewards, valid = random_rewards(3, (4, 8))
    function = ADVANTAGES[name][0]
    np.testing.assert_allclose(
        function(rewards + np.float32(10), valid), function(rewards, valid), atol=1e-4
    )


def test_scale_of_rewards_changes_nothing_of_the_mean_normalized():
    """Nor does it matter how rare a success is: all of them together weigh the same."""
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0], [-1, -3, 0, 0]])
    values = advantages.mean_normalized(rewards.astype(np.float32), np.ones((5, 4), bool))
    expected = [[3, -1, -1, -1], [1, 1, -1, -1], [3, -1, -1, -1], [0] * 4, [0] * 4]
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_rescaled_makes_up_for_the_groups_that_teach_nothing():
    rewards = np.array([[2, 0], [1, 1], [0, 0], [5, 7]], np.float32)
    valid = np.array([[1, 1], [1, 1], [1, 0], [0, 0]], bool)
    # of three groups with a reward, one varies
    np.testing.assert_allclose(
        advantages.rescaled(rewards, valid), [[3, -3], [0, 0], [0, 0], [0, 0]], rtol=1e-6
    )
    np.testing.assert_array_equal(advantages.rescaled(rewards[1:3], valid[1:3]), 0.0)


def test_advantages_without_a_baseline():
    rewards, valid = (
        np.array([2, 0.5, 0.5, -1, np.nan], np.float32),
        np.array([1, 1, 0, 1, 0], bool),
    )
    np.testing.assert_array_equal(advantages.raw(rewards, valid), [2, 0.5, 0, -1, 0])
    np.testing.assert_array_equal(advantages.accepted(rewards, valid), [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(advantages.accepted(rewards, valid, 0.5), [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(advantages.accepted(rewards, valid, -2.0), [1, 1, 0, 1, 0])


def test_whitened_worked_by_hand():
    # 5 1 3 3 of mean 3, squares 4 4 0 0, unbiased variance 8/3
    x = jnp.array([[5.0, 1.0, jnp.nan], [3.0, 3.0, jnp.inf]])
    mask = jnp.array([[1, 1, 0], [1, 1, 0]])
    scale = np.sqrt(3 / 8)
    expected = [[2 * scale, -2 * scale, 0], [0, 0, 0]]
    np.testing.assert_allclose(advantages.whitened(x, mask), expected, rtol=1e-6)


@pytest.mark.parametrize("counts", [0, 1, 35])
def test_whitened_gives_exactly_zero_where_there_is_nothing_to_compare(counts):
    mask = np.arange(35) < counts
    same = np.where(mask, np.float32(0.1 + 0.2), np.nan)
    np.testing.assert_array_equal(advantages.whitened(same, mask), 0.0)


def test_whitened_has_mean_0_and_deviation_1():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3, 7, (4, 5, 6)).astype(np.float32), rng.random((4, 5, 6)) < 0.7
    white = np.asarray(jax.jit(advantages.whitened)(x, mask))
    assert abs(white[mask].mean()) < 1e-6 and abs(white[mask].std(ddof=1) - 1) < 1e-5
    assert not white[~mask].any()


def test_total_standardized_reward_worked_by_hand():
    """GDPO's case: sums that are the same of rewards that are not."""
    #           large     small     none
    values = [
        [[300, 0.0, 7], [200, 0.2, 7], [100, 0.1, jnp.nan]],
        [[1, 1, 0], [1, 0, 0], [1, 0, 0]],
    ]
    valid = np.ones((2, 3, 3), bool)
    valid[0, 2, 2] = False
    # deviations 100 and 0.1; then 0, and of 1 0 0: (2/3, -1/3, -1/3) over sqrt(1/3)
    total, any_valid = advantages.total_standardized_reward(
        jnp.array(values, jnp.float32), valid, jnp.array([1.0, 0.5, 1.0])
    )
    large, small = 100 / (100 + EPS), 0.1 / (0.1 + EPS)
    third = 0.5 / 3 / (np.sqrt(1 / 3) + EPS)
    expected = [[large - small / 2, small / 2, -large], [2 * third, -third, -third]]
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
    assert np.all(any_valid)


def test_one_reward_is_standardized_as_ever():
    rewards, valid = random_rewards(5, (6, 8))
    total, _ = advantages.total_standardized_reward(
        rewards[..., None], valid[..., None], jnp.ones(1)
    )
    np.testing.assert_allclose(total, advantages.standardized(rewards, valid), rtol=1e-6)


def test_constant_groups():
    rewards = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], np.float32)
    valid = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    np.testing.assert_array_equal(
        advantages.constant_groups(rewards, valid), [True, False, True, True, True]
    )


def test_total_reward_drops_a_function_without_an_answer_with_its_weight():
    #            correctness (1), format (1/2), length (-1)
    values = [[2, 1, 3], [2, np.nan, 3], [np.inf, 1, np.nan], [np.nan, np.nan, np.nan]]
    valid = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    # 2 + 1/2 - 3 = -1/2;  2 - 3 = -1, not scaled up;  1/2;  nothing
    rewards, any_valid = advantages.total_reward(
        jnp.array(values, jnp.float32), valid, jnp.array([1.0, 0.5, -1.0])
    )
    np.testing.assert_array_equal(rewards, [-0.5, -1.0, 0.5, 0.0])
    np.testing.assert_array_equal(any_valid, [True, True, True, False])


def test_total_reward_accepts_leading_axes():
    values, valid = random_rewards(4, (2, 3, 4, 5))
    weights = np.arange(5, dtype=np.float32)
    rewards, any_valid = advantages.total_reward(values, valid, weights)
    np.testing.assert_allclose(rewards, np.sum(values * valid * weights, -1), rtol=1e-6)
    np.testing.assert_array_equal(any_valid, valid.any(-1))


@pytest.mark.parametrize("function", [f for f, _ in ADVANTAGES.values()])
def test_shapes_must_fit(function):
    with pytest.raises(ValueError, match=r"rewards \(2, 8\) and valid \(2, 7\)"):
        function(jnp.zeros((2, 8)), jnp.ones((2, 7), bool))


def test_total_reward_shapes_must_fit():
    with pytest.raises(ValueError, match=r"values \(8, 2\) and valid \(8, 3\)"):
        advantages.total_reward(jnp.zeros((8, 2)), jnp.ones((8, 3), bool), jnp.ones(2))
    with pytest.raises(ValueError, match=r"weights \(3,\) must match .* values \(8, 2\)"):
        advantages.total_reward(jnp.zeros((8, 2)), jnp.ones((8, 2), bool), jnp.ones(3))
