"""KL: values worked by hand, and each estimator's gradient against the exact KL's.

A new estimator joins as one row of `KL_GRADIENTS`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import kl as kls
from jax_grpo.losses import policy_ratio

pytestmark = pytest.mark.usefixtures("strict")


def test_kl_estimators_worked_by_hand():
    # d = log π_ref - log π = log 2, 0, log 1/4
    logps, reference_logps = jnp.log(jnp.array([[0.2, 0.5, 0.4], [0.4, 0.5, 0.1]]))
    ln2, mask = np.log(2), jnp.ones(3)
    ratio = jnp.array([1.0, 1.0, 2.0])
    for actual, expected in [
        (kls.kl_k1(logps, reference_logps), [-ln2, 0, 2 * ln2]),
        (kls.kl_k2(logps, reference_logps), [ln2**2 / 2, 0, 2 * ln2**2]),
        (kls.kl_k3(logps, reference_logps), [1 - ln2, 0, 2 * ln2 - 3 / 4]),
        (kls.kl_k3_weighted(logps, reference_logps, ratio), [1 - ln2, 0, 4 * ln2 - 3 / 2]),
        (kls.kl_penalty("k3", logps, reference_logps, mask), [1 - ln2, 0, 2 * ln2 - 3 / 4]),
    ]:
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


THETA = jnp.array([0.3, -1.0, 0.8, 0.1, -0.4])  # a policy over five tokens, and its reference
REFERENCE = jax.nn.log_softmax(jnp.array([-0.5, 0.2, 0.4, 1.0, -1.5]))
ELSEWHERE = jax.nn.log_softmax(jnp.array([0.5, 0.5, -0.3, 0.2, 0.0]))


def reverse_kl(theta):
    logps = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(logps) * (logps - REFERENCE))


def forward_kl(theta):
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(theta)))


def estimate(name: str, theta, behavior_logps):
    """All five tokens' estimates of KL, each as if it had been sampled."""
    logps = jax.nn.log_softmax(theta)
    if name == "k3_weighted":
        ratio = policy_ratio(logps, behavior_logps, jnp.ones(5))
        return kls.kl_k3_weighted(logps, REFERENCE, ratio)
    return kls.KL_ESTIMATORS[name](logps, REFERENCE)


def expected_gradient(name: str, behavior_logps):
    """E over y ~ behavior of ∇θ estimate(y), every token counted with its probability."""
    weights = jnp.exp(behavior_logps)
    return jax.grad(lambda theta: jnp.sum(weights * estimate(name, theta, behavior_logps)))(THETA)


REVERSE, FORWARD = jax.grad(reverse_kl), jax.grad(forward_kl)
KL_GRADIENTS = {"k1": jnp.zeros_like, "k2": REVERSE, "k3": FORWARD, "k3_weighted": REVERSE}


@pytest.mark.parametrize("name", KL_GRADIENTS)
def test_gradient_of_each_kl_estimator_on_policy(name):
    on_policy = jax.nn.log_softmax(THETA)
    np.testing.assert_allclose(
        expected_gradient(name, on_policy), KL_GRADIENTS[name](THETA), rtol=1e-5, atol=1e-6
    )
    assert jnp.max(jnp.abs(REVERSE(THETA) - FORWARD(THETA))) > 0.01  # they can be told apart


def test_weighted_k3_stays_right_off_policy_and_the_others_do_not():
    reverse = REVERSE(THETA)
    np.testing.assert_allclose(expected_gradient("k3_weighted", ELSEWHERE), reverse, atol=1e-6)
    for name in ("k2", "k3"):
        assert jnp.max(jnp.abs(expected_gradient(name, ELSEWHERE) - reverse)) > 0.01
    value = jnp.sum(jnp.exp(ELSEWHERE) * estimate("k3_weighted", THETA, ELSEWHERE))
    np.testing.assert_allclose(value, reverse_kl(THETA), rtol=1e-5)


@pytest.mark.parametrize(
    "name, unbiased", [("k1", True), ("k2", False), ("k3", True), ("k3_weighted", True)]
)
def test_value_of_each_kl_estimator_on_policy(name, unbiased):
    on_policy = jax.nn.log_softmax(THETA)
    value = jnp.sum(jnp.exp(on_policy) * estimate(name, THETA, on_policy))
    assert (abs(value - reverse_kl(THETA)) < 1e-6) == unbiased


@pytest.mark.parametrize("name", kls.KL_ESTIMATORS)
def test_policy_gradient_of_kl_in_the_reward(name):
    """E of -reward(y) ∇log π(y): k1 gives reverse KL's gradient, k2 and k3 that of neither."""
    on_policy = jax.nn.log_softmax(THETA)
    reward = kls.kl_in_reward(
        jnp.zeros(5), on_policy[:, None], REFERENCE[:, None], jnp.ones((5, 1)), 1.0, name
    )
    weights = -jnp.exp(on_policy) * reward
    actual = jax.grad(lambda theta: jnp.sum(weights * jax.nn.log_softmax(theta)))(THETA)
    expected = {"k1": REVERSE(THETA), "k3": REVERSE(THETA) - FORWARD(THETA)}
    if name in expected:
        np.testing.assert_allclose(actual, expected[name], rtol=1e-5, atol=1e-6)
    else:
        assert jnp.max(jnp.abs(actual - REVERSE(THETA))) > 0.01


@pytest.mark.parametrize("name", kls.KL_ESTIMATORS)
def test_kl_of_a_rollout_is_the_estimate_where_a_token_counts(name):
    logps, reference_logps = jnp.array([-1.0, jnp.nan, -2.0]), jnp.array([-2.0, 0.0, -1.0])
    found = kls.sampled_kl(logps, reference_logps, jnp.array([1, 0, 1]), name)
    estimated = kls.KL_ESTIMATORS[name](logps, reference_logps)
    np.testing.assert_array_equal(found, estimated.at[1].set(0))


def test_kl_in_reward_sums_over_the_completion():
    # 2 - 1/2 · (1 + 0.5) and 1 - 1/2 · (-1)
    logps = jnp.array([[-1.0, -1.0, jnp.nan], [-2.0, jnp.inf, jnp.nan]])
    reference_logps = jnp.array([[-2.0, -1.5, 0.0], [-1.0, jnp.inf, -jnp.inf]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    rewards = kls.kl_in_reward(jnp.array([2.0, 1.0]), logps, reference_logps, mask, 0.5)
    np.testing.assert_allclose(rewards, [1.25, 1.5])


def test_k3_is_never_negative():
    d = np.concatenate([np.geomspace(1e-12, 90, 4001), [0.0, 1e9]]).astype(np.float32)
    d = np.concatenate([d, -d])
    assert jnp.min(kls.kl_k3(jnp.zeros(d.shape), d)) >= 0


def test_kl_to_go_sums_from_each_token_on():
    # k1: 1, 0.5, -, -1; what does not count is stepped over
    logps = jnp.array([[-1.0, -1.0, jnp.nan, -2.0], [jnp.inf, -1.0, -1.0, -1.0]])
    reference_logps = jnp.array([[-2.0, -1.5, 0.0, -1.0], [0.0, -1.0, -1.0, -1.0]])
    mask = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0]])
    found = kls.kl_to_go(logps, reference_logps, mask)
    np.testing.assert_allclose(found, [[0.5, -0.5, -1, -1], [0, 0, 0, 0]])
    whole = kls.kl_in_reward(jnp.zeros(2), logps, reference_logps, mask, 1.0)
    np.testing.assert_allclose(found[:, 0], -whole)


@pytest.mark.parametrize("to_go", [False, True])
def test_kl_of_completions_in_the_reward_has_the_gradient_of_theirs(to_go):
    """Of two tokens, the second after the first: every completion with its probability."""
    rng = np.random.default_rng(0)
    theta, reference = (
        (jnp.float32(rng.normal(size=3)), jnp.float32(rng.normal(size=(3, 3)))) for _ in range(2)
    )
    y = np.array([(a, b) for a in range(3) for b in range(3)])

    def logps_of(theta):
        first, second = jax.nn.log_softmax(theta[0]), jax.nn.log_softmax(theta[1])
        return jnp.stack([first[y[:, 0]], second[y[:, 0], y[:, 1]]], axis=-1)  # [9, 2]

    def exact(theta):
        logps = logps_of(theta).sum(-1)
        return jnp.sum(jnp.exp(logps) * (logps - logps_of(reference).sum(-1)))

    logps, mask = logps_of(theta), jnp.ones((9, 2))
    costs = -kls.kl_in_reward(jnp.zeros(9), logps, logps_of(reference), mask, 1.0)[:, None]
    if to_go:
        costs = kls.kl_to_go(logps, logps_of(reference), mask)
    costs = jnp.exp(logps.sum(-1, keepdims=True)) * costs
    found = jax.grad(lambda theta: jnp.sum(costs * logps_of(theta)))(theta)
    for a, b in zip(found, jax.grad(exact)(theta), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


z = jnp.zeros
REFUSED = [
    (lambda: kls.kl_penalty("k1", z(3), z(3), z(3)), "k1 in the loss .* k1 in the reward"),
    (lambda: kls.kl_penalty("k4", z(3), z(3), z(3)), "one of k2, k3, k3_weighted; not 'k4'"),
    (lambda: kls.kl_penalty("k3_weighted", z(3), z(3), z(3)), "k3_weighted needs the ratio"),
    (lambda: kls.kl_penalty("k3_weighted", z(3), z(3), z(3), z(1)), r"\(3,\) and ratio \(1,\)"),
    (lambda: kls.kl_in_reward(z(2), z(2), z(2), z(2), 1.0), r"rewards \(2,\) .* mask \(2,\)"),
    (lambda: kls.check_kl_estimator("k3", "rewards"), "not in 'rewards'"),
    (
        lambda: kls.check_kl_estimator("k3_weighted", "reward"),
        "one of k1, k2, k3; not 'k3_weighted'",
    ),
    (lambda: kls.kl_to_go(z(3), z(3), z(3), "k3_weighted"), "one of k1, k2, k3; not 'k3_weig"),
    (lambda: kls.kl_to_go(z(3), z(2), z(3)), r"logps \(3,\) and reference_logps \(2,\)"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refuses_in_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
