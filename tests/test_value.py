"""PPO's pages: values worked by hand, slow NumPy references, and what must hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import value

pytestmark = pytest.mark.usefixtures("strict")


def random_batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and a mask with holes, one row of it empty; garbage where it is 0."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, 3, 4, 7)).astype(np.float32)
    mask = rng.random((3, 4, 7)) < 0.7
    mask[0, 0] = False
    for x in (rewards, values):
        x[~mask] = rng.choice([np.nan, np.inf, -np.inf], (~mask).sum())
    return rewards, values, mask


# --- Rewards of tokens --------------------------------------------------------------------------


def test_token_rewards_worked_by_hand():
    kl = jnp.array([[1.0, jnp.nan, -2.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = jnp.array([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    # -1/2 of each kl; the score at the last that counts
    expected = [[-0.5, 0, 1 + 10, 0], [-2 + 20, 0, 0, 0], [0, 0, 0, 0]]
    found = value.token_rewards(jnp.array([10.0, 20.0, 30.0]), kl, mask, 0.5)
    np.testing.assert_allclose(found, expected)


# --- Advantages ---------------------------------------------------------------------------------


def test_gae_worked_by_hand():
    # γ = 1/2, λ = 1/2, γ λ = 1/4. Of three tokens:
    #   δ = 0 + 2/2 - 1 = 0,  0 + 4/2 - 2 = 0,  8 - 4 = 4
    #   A = 0 + 1/4 · 1 = 1/4,  0 + 1/4 · 4 = 1,  4
    # of the second the middle one does not count: δ = 0 + 4/2 - 1 = 1, 8 - 4 = 4; A = 1 + 1, 4
    rewards = jnp.array([[0.0, 0.0, 8.0], [0.0, 7.0, 8.0]])
    values = jnp.array([[1.0, 2.0, 4.0], [1.0, jnp.nan, 4.0]])
    mask = jnp.array([[1, 1, 1], [1, 0, 1]])
    found = value.generalized_advantages(rewards, values, mask, discount=0.5, decay=0.5)
    np.testing.assert_allclose(found, [[0.25, 1, 4], [2, 0, 4]])


@pytest.mark.parametrize("discount, decay", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_agrees_with_its_definition_under_jit(discount, decay):
    """A_t = Σ_k (γ λ)^k δ_{t+k}, written out over the tokens that count."""
    rewards, values, mask = random_batch()
    expected = np.zeros(mask.shape)
    for row in np.ndindex(mask.shape[:-1]):
        tokens = np.flatnonzero(mask[row])
        r, v = rewards[row][tokens].astype(float), np.append(values[row][tokens], 0).astype(float)
        delta = r + discount * v[1:] - v[:-1]
        for i, t in enumerate(tokens):
            powers = (discount * decay) ** np.arange(len(tokens) - i)
            expected[row][t] = np.sum(powers * delta[i:])
    found = jax.jit(value.generalized_advantages, static_argnums=(3, 4))(
        rewards, values, mask, discount, decay
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_decay_of_1_is_return_less_value():
    rewards, values, mask = random_batch(1)
    found = value.generalized_advantages(rewards, values, mask, 1.0, 1.0)
    to_go = np.cumsum(np.where(mask, rewards, 0)[..., ::-1], axis=-1)[..., ::-1]
    np.testing.assert_allclose(
        found, np.where(mask, to_go - np.where(mask, values, 0), 0), atol=1e-5
    )


def test_true_values_leave_no_advantage():
    rewards = jnp.array([1.0, 2.0, 3.0])
    values = jnp.array([6.0, 5.0, 3.0])
    np.testing.assert_allclose(
        value.generalized_advantages(rewards, values, jnp.ones(3), 1.0, 0.7), 0.0, atol=1e-6
    )


def test_no_gradient_flows_back_to_the_values():
    rewards, mask = jnp.ones(3), jnp.ones(3)
    slope = jax.grad(lambda v: jnp.sum(value.generalized_advantages(rewards, v, mask)))
    np.testing.assert_array_equal(slope(jnp.ones(3)), 0)


# --- The critic's loss --------------------------------------------------------------------------

# Clip 1/2: value, old value, return, loss, clipped.
VALUES = [
    (1.0, 1.0, 3.0, 2.0, 0),
    (1.5, 1.0, 3.0, 1.125, 0),
    (2.0, 1.0, 3.0, 1.125, 1),  # towards its target, but too far: what 1.5 would cost
    (0.0, 1.0, 3.0, 4.5, 0),  # away from it: all of it
    (4.0, 1.0, 3.0, 1.125, 1),  # past it
    (9.0, 1.0, 3.0, 18.0, 0),  # far past it
]


def test_value_clip_worked_by_hand():
    now, old, returns, loss, clipped = np.array(VALUES, np.float32).T
    found = value.clipped_value_loss(now, old, returns, 0.5)
    np.testing.assert_allclose(found[0], loss)
    np.testing.assert_array_equal(found[1], clipped)
    plain, none = value.clipped_value_loss(now, old, returns, np.inf)
    np.testing.assert_allclose(plain, (now - returns) ** 2 / 2)
    assert not none.any()


def test_clipped_values_are_those_without_gradient():
    rng = np.random.default_rng(0)
    now, old, returns = rng.normal(size=(3, 200)).astype(np.float32)
    _, clipped = value.clipped_value_loss(now, old, returns)
    slope = jax.grad(lambda v: jnp.sum(value.clipped_value_loss(v, old, returns)[0]))(now)
    np.testing.assert_allclose(slope, np.where(clipped, 0, now - returns), rtol=1e-5, atol=1e-6)
    assert 0 < clipped.sum() < 200


def test_unexplained_variance_worked_by_hand():
    # returns 1, 3, 5: squares 4 + 0 + 4 round their mean, and 1 + 4 + 0 round the values
    values = jnp.array([[2.0, 1.0, jnp.nan], [5.0, jnp.inf, 0.0]])
    returns = jnp.array([[1.0, 3.0, jnp.inf], [5.0, jnp.nan, 0.0]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    np.testing.assert_allclose(value.unexplained_variance(values, returns, mask), [5, 8])
    # the mean explains nothing, the truth all
    below = value.unexplained_variance(jnp.full((2, 3), 3.0), returns, mask)
    np.testing.assert_allclose(below, [8, 8])
    np.testing.assert_allclose(value.unexplained_variance(returns, returns, mask)[0], 0)


# --- The KL's weight ----------------------------------------------------------------------------


def test_the_kl_weight_follows_the_kl():
    # KL 6.6 is 10 % above 6: up by K · 0.1; 5.4 down by that; beyond 20 % it is cut off
    for kl, factor in [(6.6, 1.01), (5.4, 0.99), (6.0, 1.0), (60.0, 1.02), (-3.0, 0.98)]:
        np.testing.assert_allclose(
            value.adapted_kl_coefficient(0.2, kl, target=6.0), 0.2 * factor, rtol=1e-5
        )
    np.testing.assert_allclose(
        value.adapted_kl_coefficient(0.2, 60.0, target=6.0, gain=256 / 10_000),
        0.2 * (1 + 0.2 * 0.0256),
        rtol=1e-6,
    )


z = jnp.zeros
REFUSED = [
    (lambda: value.token_rewards(z(2), z((2, 3)), z((2, 4)), 1.0), r"kl \(2, 3\) and mask"),
    (lambda: value.token_rewards(z(3), z((2, 3)), z((2, 3)), 1.0), r"scores \(3,\) .* mask"),
    (lambda: value.generalized_advantages(z(3), z(2), z(3)), r"rewards \(3,\) and values \(2,\)"),
    (lambda: value.unexplained_variance(z(3), z(2), z(3)), r"values \(3,\) and returns \(2,\)"),
    (lambda: value.clipped_value_loss(z(3), z(3), z(2)), r"values \(3,\) and returns \(2,\)"),
    (lambda: value.adapted_kl_coefficient(0.1, 1.0, target=0.0), "target is 0.0"),
    (lambda: value.adapted_kl_coefficient(0.1, 1.0, target=float("nan")), "target is nan"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refuses_in_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_kl_weight_outlives_a_rollout_that_went_wrong():
    assert value.adapted_kl_coefficient(0.5, np.nan, target=6.0) == 0.5
    assert value.adapted_kl_coefficient(0.5, np.inf, target=6.0) == pytest.approx(0.51)
