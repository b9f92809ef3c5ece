"""Losses of pairs: values worked by hand, gradients by the published formulas, what must hold.

A new loss of DPO joins as one row of `DPO`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import preference

pytestmark = pytest.mark.usefixtures("strict")

LN2, LN3 = float(np.log(2)), float(np.log(3))

# Two pairs of three tokens. Σ (log π - log π_ref): 2 and -1 of 2 and 1 tokens; 0 and 0 of 3 and 2.
LOGPS = jnp.array([[[-1.0, -2, 9], [-3, 9, 9]], [[-1, -1, -1], [-2, -2, 9]]])
REFERENCE = jnp.array([[[-2.0, -3, 7], [-2, 7, 7]], [[-2, 0, -1], [-2, -2, 7]]])
MASK = jnp.array([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 0]]])


def rewards_of(logps=LOGPS, beta=0.5, **settings):
    return preference.implicit_rewards(logps, REFERENCE, MASK, beta, **settings)


def test_implicit_rewards_worked_by_hand():
    np.testing.assert_allclose(rewards_of(), [[1, -0.5], [0, 0]])
    np.testing.assert_allclose(rewards_of(length_normalized=True), [[0.5, -0.5], [0, 0]])


# Rewards of margin ln 3 and 0: σ = 3/4 and 1/2.
MARGINS = jnp.array([[1.0 + LN3, 1.0], [-2.0, -2.0]])
# loss, settings: values, and the derivatives by the margin
DPO = [
    ("sigmoid", {}, [np.log(4 / 3), LN2], [-1 / 4, -1 / 2]),
    # 0.9 of -ln(3/4), 0.1 of -ln(1/4); slopes σ - 0.9
    (
        "sigmoid",
        {"label_smoothing": 0.1},
        [0.9 * np.log(4 / 3) + 0.1 * np.log(4), LN2],
        [0.75 - 0.9, 0.5 - 0.9],
    ),
    ("hinge", {}, [0, 1], [0, -1]),  # ln 3 is more than 1
    # β = 1/2: (2 m - 1)², 4 (2 m - 1)
    ("ipo", {"beta": 0.5}, [(2 * LN3 - 1) ** 2, 1], [4 * (2 * LN3 - 1), -4]),
]


@pytest.mark.parametrize("loss, settings, values, slopes", DPO, ids=str)
def test_dpo_worked_by_hand(loss, settings, values, slopes):
    found = preference.dpo_loss(MARGINS, loss, **settings)
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda r: jnp.sum(preference.dpo_loss(r, loss, **settings)))(MARGINS)
    np.testing.assert_allclose(slope[:, 0], slopes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope[:, 1], -np.array(slopes), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("loss", preference.DPO_LOSSES)
def test_gradients_are_those_of_the_naive_formula(loss, length_normalized):
    """One pair at a time, written out as in the papers."""
    beta = 0.3

    def naive(logps):
        total = jnp.float32(0)
        for pair in range(2):
            h = []
            for side in range(2):
                n = int(MASK[pair, side].sum())
                ratio = jnp.sum(logps[pair, side, :n] - REFERENCE[pair, side, :n])
                h.append(ratio / n if length_normalized else ratio)
            m = h[0] - h[1]
            total += {
                "sigmoid": lambda m: jnp.log(1 + jnp.exp(-beta * m)),
                "hinge": lambda m: jnp.maximum(0.0, 1 - beta * m),
                "ipo": lambda m: (m - 1 / (2 * beta)) ** 2,
            }[loss](m)
        return total

    def ours(logps):
        rewards = rewards_of(logps, beta, length_normalized=length_normalized)
        return jnp.sum(preference.dpo_loss(rewards, loss, beta))

    expected, expected_slope = jax.value_and_grad(naive)(LOGPS)
    value, slope = jax.jit(jax.value_and_grad(ours))(LOGPS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", preference.DPO_LOSSES)
def test_padding_reaches_nothing(loss):
    def total(logps, reference_logps):
        rewards = preference.implicit_rewards(logps, reference_logps, MASK, 0.1)
        return jnp.sum(preference.dpo_loss(rewards, loss))

    padding = MASK == 0
    dirty = jnp.where(padding, jnp.nan, LOGPS), jnp.where(padding, jnp.inf, REFERENCE)
    expected, expected_slope = jax.value_and_grad(total)(LOGPS, REFERENCE)
    value, slope = jax.value_and_grad(total)(*dirty)
    assert value == expected
    np.testing.assert_array_equal(slope, expected_slope)
    assert not np.any(slope[padding]) and np.any(slope)


def test_the_smoothed_loss_is_least_where_its_doubt_says():
    """At ε = 1/4 a margin of ln 3: σ = 3/4."""
    slope = jax.grad(lambda r: preference.dpo_loss(r, "sigmoid", label_smoothing=0.25))
    np.testing.assert_allclose(slope(jnp.array([LN3, 0.0])), 0.0, atol=1e-6)


def test_far_margins_stay_finite():
    far = jnp.array([[-1e4, 1e4], [1e4, -1e4]])
    for loss in preference.DPO_LOSSES:
        value, slope = jax.value_and_grad(lambda r: jnp.sum(preference.dpo_loss(r, loss)))(far)  # noqa: B023
        assert np.isfinite(value) and np.all(np.isfinite(slope))
    np.testing.assert_allclose(preference.bradley_terry_loss(far), [2e4, 0])


def test_bradley_terry_worked_by_hand():
    scores = jnp.array([[LN3, 0.0], [1.0, 1.0]])
    np.testing.assert_allclose(
        preference.bradley_terry_loss(scores), [np.log(4 / 3), LN2], rtol=1e-5
    )
    # margins ln 3 and -ln 3: σ = 1/2 and 3/4; centring 1/2 of (ln 3)² and 2²
    found = preference.bradley_terry_loss(scores, jnp.array([LN3, -LN3]), centering=0.5)
    np.testing.assert_allclose(found, [LN2 + LN3**2 / 2, np.log(4 / 3) + 2], rtol=1e-5)
    same = preference.bradley_terry_loss(scores, LN3)
    np.testing.assert_allclose(same, [LN2, np.log(4)], rtol=1e-5)
    # σ(-m) = 1/4 and 1/2, from each side
    slope = jax.grad(lambda s: jnp.sum(preference.bradley_terry_loss(s)))(scores)
    np.testing.assert_allclose(slope, [[-0.25, 0.25], [-0.5, 0.5]], rtol=1e-5)


def test_only_centring_says_where_zero_is():
    scores = jnp.array([[2.0, -1.0]])
    for shift in (-3.0, 5.0):
        np.testing.assert_allclose(
            preference.bradley_terry_loss(scores + shift),
            preference.bradley_terry_loss(scores),
            rtol=1e-5,
        )
    assert preference.bradley_terry_loss(scores + 5.0, centering=0.01) > 1


def test_metrics_by_hand():
    found = preference.pair_metrics(jnp.array([[1.0, -0.5], [0.0, 0.0], [-1.0, 2.0]]))
    expected = {
        "rewards/chosen": [1, 0, -1],
        "rewards/rejected": [-0.5, 0, 2],
        "rewards/accuracies": [1, 0, 0],
        "rewards/margins": [1.5, 0, -3],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], np.array(values, np.float32), strict=True)


def test_a_pair_with_an_empty_side_does_not_count():
    mask = MASK.at[0, 1].set(0)
    np.testing.assert_array_equal(preference.pairs_that_count(mask), [False, True])


z = jnp.zeros
REFUSED = [
    (lambda: preference.dpo_loss(z((2, 2)), "kto"), "'kto' is not one of: sigmoid, hinge, ipo"),
    (lambda: preference.dpo_loss(z((2, 3))), r"chosen and rejected, \[..., 2\], not \(2, 3\)"),
    (lambda: preference.dpo_loss(z((2, 2)), beta=0.0), "beta is 0.0"),
    (lambda: preference.dpo_loss(z((2, 2)), label_smoothing=0.5), "label_smoothing is 0.5"),
    (lambda: preference.dpo_loss(z((2, 2)), label_smoothing=-0.1), "label_smoothing is -0.1"),
    (lambda: preference.dpo_loss(z((2, 2)), "ipo", label_smoothing=0.1), "sigmoid, not for ipo"),
    (lambda: preference.bradley_terry_loss(z(3)), r"not \(3,\)"),
    (lambda: preference.pair_metrics(z((2, 1))), r"not \(2, 1\)"),
    (
        lambda: preference.implicit_rewards(z((2, 3)), z((2, 4)), z((2, 3)), 0.1),
        r"logps \(2, 3\) and reference_logps \(2, 4\)",
    ),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refuses_in_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
