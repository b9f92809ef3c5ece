"""Losses: values worked by hand, a slow NumPy reference, exact KL gradients, and what must hold.

A new reduction or KL estimator joins as one row of `REDUCTIONS` or `KL_GRADIENTS`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import losses
from jax_grpo.arrays import divide

pytestmark = pytest.mark.usefixtures("strict")

P, G, C = 4, 3, 6
GARBAGE = [np.nan, np.inf, -np.inf]

# name: (reduction, by the textbook in NumPy). The constant length is C.
REDUCTIONS = {
    "token_mean": (losses.token_mean, lambda rows: np.mean(np.concatenate(rows))),
    "sequence_mean": (losses.sequence_mean, lambda rows: np.mean([np.mean(r) for r in rows])),
    "constant_length": (
        lambda per_token, mask: losses.constant_length(per_token, mask, C),
        lambda rows: np.mean([np.sum(r) / C for r in rows]),
    ),
}
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_level = pytest.mark.parametrize("level", ["token", "sequence"])
every_penalty = pytest.mark.parametrize("kl", ["k2", "k3", "k3_weighted"])


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of ragged completions: one is empty, and one has a hole in its mask."""
    rng = np.random.default_rng(seed)
    mask = np.arange(C) < rng.integers(1, C, (P, G, 1))
    mask[0, 0], mask[1, 1] = False, [1, 0, 1, 1, 0, 0]
    logps = -rng.gamma(2.0, 1.0, (P, G, C)).astype(np.float32)
    return dict(
        logps=logps,
        anchor_logps=logps + rng.normal(0, 0.3, logps.shape).astype(np.float32),
        reference_logps=logps + rng.normal(0, 0.5, logps.shape).astype(np.float32),
        advantages=rng.normal(0, 1, (P, G)).astype(np.float32),
        mask=mask.astype(np.float32),
    )


def objective(
    logps, anchor_logps, reference_logps, advantages, mask, level="token", kl="k3", reduction=None
):
    """The whole way of a loss; with a reduction, its sum and weight."""
    ratio = losses.policy_ratio(logps, anchor_logps, mask, level)
    token_ratio = losses.policy_ratio(logps, anchor_logps, mask)
    per_token = losses.clipped_ratio_loss(ratio, advantages, 0.2, 0.28, 3.0)
    per_token += 0.5 * losses.kl_penalty(kl, logps, reference_logps, mask, token_ratio)
    return per_token if reduction is None else REDUCTIONS[reduction][0](per_token, mask)


# --- Likelihood, and the clipped ratio ----------------------------------------------------------


def test_negative_log_likelihood_worked_by_hand():
    logps = jnp.log(jnp.array([[0.5, 0.25], [1.0, 0.0]]))
    mask = jnp.array([[1, 1], [1, 0]])
    total, weight = losses.token_mean(losses.negative_log_likelihood(logps), mask)
    np.testing.assert_allclose([total, weight], [np.log(2) + np.log(4) + 0, 3], rtol=1e-6)


def test_ratio_worked_by_hand():
    logps = jnp.log(jnp.array([[0.8, 0.1, 0.5], [0.5, 0.5, 0.5]]))
    anchor = jnp.log(jnp.array([[0.2, 0.1, 0.1], [0.25, 0.5, 1.0]]))
    mask = jnp.array([[1, 1, 0], [1, 1, 1]])
    # 0.8/0.2, 0.1/0.1, masked; 0.5/0.25, 0.5/0.5, 0.5/1
    np.testing.assert_allclose(
        losses.policy_ratio(logps, anchor, mask), [[4, 1, 1], [2, 1, 0.5]], rtol=1e-6
    )
    # geometric means: (4 · 1)^(1/2); (2 · 1 · 1/2)^(1/3)
    np.testing.assert_allclose(
        losses.policy_ratio(logps, anchor, mask, "sequence"), [[2], [1]], rtol=1e-6
    )


# Clips 0.2 and 0.3, dual clip 3: ratio, advantage, loss, with dual clip, low, high.
CLIP = [
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (1.2, 2.0, -2.4, -2.4, 0, 0),
    (1.5, 2.0, -2.6, -2.6, 0, 1),  # 1.3 · 2: risen enough
    (0.5, 2.0, -1.0, -1.0, 0, 0),  # min keeps the worse: still pulled up
    (0.5, -2.0, 1.6, 1.6, 1, 0),  # 0.8 · 2: fallen enough
    (1.5, -2.0, 3.0, 3.0, 0, 0),  # still pushed down
    (5.0, -2.0, 10.0, 6.0, 0, 0),  # 3 · 2: dual clip
    (5.0, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize("advantage_per", ["completion", "token"])
def test_clip_worked_by_hand(advantage_per):
    ratio, advantages, loss, dual, low, high = np.array(CLIP, np.float32).T
    ratio = ratio[:, None]
    if advantage_per == "token":
        advantages = advantages[:, None]
    np.testing.assert_allclose(
        losses.clipped_ratio_loss(ratio, advantages, 0.2, 0.3)[:, 0], loss, rtol=1e-6
    )
    np.testing.assert_allclose(
        losses.clipped_ratio_loss(ratio, advantages, 0.2, 0.3, 3.0)[:, 0], dual, rtol=1e-6
    )
    actual = losses.clipped_tokens(ratio, advantages, 0.2, 0.3)
    np.testing.assert_array_equal(np.concatenate(actual, axis=-1).T, [low, high])


def test_clipped_tokens_are_those_without_gradient():
    rng = np.random.default_rng(0)
    ratio = rng.uniform(0.2, 2.0, (8, 50)).astype(np.float32)
    advantages = rng.normal(size=8).astype(np.float32)
    slope = jax.grad(lambda r: jnp.sum(losses.clipped_ratio_loss(r, advantages)))(ratio)
    low, high = losses.clipped_tokens(ratio, advantages)
    np.testing.assert_array_equal(slope == 0, low + high)
    assert 0 < jnp.sum(low) and 0 < jnp.sum(high) and not jnp.any(low * high)


def slow_loss(logps, anchor_logps, reference_logps, advantages, mask, level, kl):
    """The textbook, one token at a time, in float64: the per-token losses of each completion."""
    rows = []
    for p, g in np.ndindex(advantages.shape):
        tokens = np.flatnonzero(mask[p, g])
        new, old, ref = (
            x[p, g, tokens].astype(float) for x in (logps, anchor_logps, reference_logps)
        )
        row = []
        for t in range(len(tokens)):
            token_ratio = np.exp(new[t] - old[t])
            r = token_ratio if level == "token" else np.exp(np.mean(new - old))
            a = float(advantages[p, g])
            loss = -min(r * a, min(max(r, 0.8), 1.28) * a)
            loss = min(loss, -3 * a) if a < 0 else loss
            d = ref[t] - new[t]
            k3 = np.exp(d) - 1 - d
            loss += 0.5 * {"k2": d * d / 2, "k3": k3, "k3_weighted": token_ratio * k3}[kl]
            row.append(loss)
        if row:
            rows.append(row)
    return rows


@every_reduction
@every_level
@every_penalty
def test_agrees_with_the_slow_reference_under_jit(reduction, level, kl):
    inputs = batch()
    total, weight = jax.jit(objective, static_argnames=("level", "kl", "reduction"))(
        **inputs, level=level, kl=kl, reduction=reduction
    )
    expected = REDUCTIONS[reduction][1](slow_loss(**inputs, level=level, kl=kl))
    np.testing.assert_allclose(total / weight, expected, rtol=1e-5)
    assert total.dtype == weight.dtype == jnp.float32 and total.shape == weight.shape == ()


@every_level
def test_ratio_1_gives_the_gradient_of_reinforce(level):
    inputs = batch()
    logps, advantages, mask = inputs["logps"], inputs["advantages"], inputs["mask"]

    def loss(logps):
        ratio = losses.policy_ratio(logps, inputs["logps"], mask, level)
        return losses.sequence_mean(losses.clipped_ratio_loss(ratio, advantages), mask)[0]

    # -A ∇log π(y), in the mean over the tokens of a completion
    expected = -advantages[..., None] * mask / np.maximum(mask.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(jax.grad(loss)(logps), expected, rtol=1e-6)


# --- KL -----------------------------------------------------------------------------------------


def test_kl_estimators_worked_by_hand():
    # d = log π_ref - log π = log 2, 0, log 1/4
    logps, reference_logps = jnp.log(jnp.array([[0.2, 0.5, 0.4], [0.4, 0.5, 0.1]]))
    ln2, mask = np.log(2), jnp.ones(3)
    ratio = jnp.array([1.0, 1.0, 2.0])
    for actual, expected in [
        (losses.kl_k1(logps, reference_logps), [-ln2, 0, 2 * ln2]),
        (losses.kl_k2(logps, reference_logps), [ln2**2 / 2, 0, 2 * ln2**2]),
        (losses.kl_k3(logps, reference_logps), [1 - ln2, 0, 2 * ln2 - 3 / 4]),
        (losses.kl_k3_weighted(logps, reference_logps, ratio), [1 - ln2, 0, 4 * ln2 - 3 / 2]),
        (losses.kl_penalty("k3", logps, reference_logps, mask), [1 - ln2, 0, 2 * ln2 - 3 / 4]),
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
        ratio = losses.policy_ratio(logps, behavior_logps, jnp.ones(5))
        return losses.kl_k3_weighted(logps, REFERENCE, ratio)
    return losses.KL_ESTIMATORS[name](logps, REFERENCE)


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


@pytest.mark.parametrize("name", losses.KL_ESTIMATORS)
def test_policy_gradient_of_kl_in_the_reward(name):
    """E of -reward(y) ∇log π(y): k1 gives reverse KL's gradient, k2 and k3 that of neither."""
    on_policy = jax.nn.log_softmax(THETA)
    reward = losses.kl_in_reward(
        jnp.zeros(5), on_policy[:, None], REFERENCE[:, None], jnp.ones((5, 1)), 1.0, name
    )
    weights = -jnp.exp(on_policy) * reward
    actual = jax.grad(lambda theta: jnp.sum(weights * jax.nn.log_softmax(theta)))(THETA)
    expected = {"k1": REVERSE(THETA), "k3": REVERSE(THETA) - FORWARD(THETA)}
    if name in expected:
        np.testing.assert_allclose(actual, expected[name], rtol=1e-5, atol=1e-6)
    else:
        assert jnp.max(jnp.abs(actual - REVERSE(THETA))) > 0.01


def test_kl_in_reward_sums_over_the_completion():
    # 2 - 1/2 · (1 + 0.5) and 1 - 1/2 · (-1)
    logps = jnp.array([[-1.0, -1.0, jnp.nan], [-2.0, jnp.inf, jnp.nan]])
    reference_logps = jnp.array([[-2.0, -1.5, 0.0], [-1.0, jnp.inf, -jnp.inf]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]])
    rewards = losses.kl_in_reward(jnp.array([2.0, 1.0]), logps, reference_logps, mask, 0.5)
    np.testing.assert_allclose(rewards, [1.25, 1.5])


def test_k3_is_never_negative():
    d = np.concatenate([np.geomspace(1e-12, 90, 4001), [0.0, 1e9]]).astype(np.float32)
    d = np.concatenate([d, -d])
    assert jnp.min(losses.kl_k3(jnp.zeros(d.shape), d)) >= 0


def test_no_log_ratio_overflows():
    far = jnp.array([0.0, -200.0, -jnp.inf])
    near = jnp.zeros(3)
    ones = jnp.ones(3)

    def total(logps, anchor_logps, reference_logps, advantage):
        return jnp.sum(
            objective(logps, anchor_logps, reference_logps, advantage, ones, kl="k3_weighted")
        )

    for advantage in (0.0, -1.0, 1.0):
        advantage = jnp.array(advantage)
        for logps, other in [(near, far), (far, near)]:
            value, slope = jax.value_and_grad(total)(logps, other, near, advantage)
            assert jnp.isfinite(value) and jnp.all(jnp.isfinite(slope))
    assert jnp.all(jnp.isfinite(losses.kl_k3(far, near)))
    # However far the policy has run, k3 goes on pulling it back: 1 - exp(-200) nats per nat.
    assert jax.grad(losses.kl_k3)(0.0, -200.0) == 1


# --- Reductions ---------------------------------------------------------------------------------


def test_reductions_worked_by_hand():
    per_token = jnp.array([[1.0, 3.0, 8.0, 7.0], [5.0, 7.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]])
    mask = jnp.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(losses.token_mean(per_token, mask), [1 + 3 + 8 + 5, 4])
    np.testing.assert_array_equal(losses.sequence_mean(per_token, mask), [12 / 3 + 5 / 1, 2])
    np.testing.assert_array_equal(losses.constant_length(per_token, mask, 10), [17, 2 * 10])


@every_reduction
@pytest.mark.parametrize("last", [C, 1], ids=["per token", "per completion"])
def test_a_per_token_loss_of_1_reduces_to_1(reduction, last):
    mask = batch()["mask"]
    if reduction == "constant_length":  # where every completion that counts has that length
        mask = np.repeat(mask[..., :1], C, axis=-1)
    total, weight = REDUCTIONS[reduction][0](jnp.ones((P, G, last)), mask)
    np.testing.assert_allclose(divide(total, weight), 1.0, rtol=1e-6)


@every_reduction
def test_nothing_that_counts_reduces_to_0(reduction):
    total, weight = REDUCTIONS[reduction][0](jnp.full((G, C), jnp.nan), jnp.zeros((G, C), bool))
    assert total == weight == divide(total, weight) == 0


@every_reduction
@every_level
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_add_up(reduction, level, size):
    inputs = batch()

    def loss(logps, rest):
        return objective(logps, **rest, level=level, reduction=reduction)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    parts = []
    for start in range(0, P, size):
        part = {name: x[start : start + size] for name, x in inputs.items()}
        parts.append(gradient(part.pop("logps"), part))
    (total, weight), slope = gradient(inputs.pop("logps"), inputs)
    np.testing.assert_allclose(sum(p[0][0] for p in parts), total, rtol=1e-5)
    np.testing.assert_allclose(sum(p[0][1] for p in parts), weight)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), slope, rtol=1e-6)


@every_reduction
@every_level
@every_penalty
def test_padding_garbage_reaches_no_value_and_no_gradient(reduction, level, kl):
    def loss(logps, anchor_logps, reference_logps, advantages, mask):
        inputs = (logps, anchor_logps, reference_logps, advantages, mask)
        return objective(*inputs, level=level, kl=kl, reduction=reduction)

    clean, dirty, rng = batch(), batch(), np.random.default_rng(1)
    padding = clean["mask"] == 0
    for name in ("logps", "anchor_logps", "reference_logps"):
        dirty[name][padding] = rng.choice(GARBAGE, padding.sum())
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (expected, weight), expected_slopes = gradient(*clean.values())
    (actual, same_weight), slopes = gradient(*dirty.values())
    assert weight == same_weight
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-5, atol=1e-7)
        assert slope.ndim == 2 or not np.any(slope[padding])


@every_reduction
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_any_leading_axes_and_kinds_of_mask(reduction, dtype):
    inputs = batch()
    expected = objective(**inputs, reduction=reduction)
    shaped = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in inputs.items()}
    shaped["mask"] = shaped["mask"].astype(dtype)
    np.testing.assert_allclose(objective(**shaped, reduction=reduction), expected, rtol=1e-6)


# --- Truncation and refusals --------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, mask, rewards",
    [
        ("keep", [[1, 1], [1, 0], [1, 1]], [3, 2, 1]),
        ("mask", [[0, 0], [1, 0], [0, 0]], [3, 2, 1]),
        ("zero", [[1, 1], [1, 0], [1, 1]], [0, 2, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [bool, jnp.float32])
def test_truncated_completions(how, mask, rewards, dtype):
    actual = losses.handle_truncated(
        how,
        jnp.array([[1, 1], [1, 0], [1, 1]], dtype),
        jnp.array([3.0, 2.0, 1.0]),
        jnp.array([True, False, True]),
    )
    np.testing.assert_array_equal(actual[0], np.array(mask, dtype))
    np.testing.assert_array_equal(actual[1], rewards)
    assert actual[0].dtype == dtype


z = jnp.zeros
REFUSED = [
    (lambda: losses.policy_ratio(z((2, 3)), z((2, 4)), z((2, 3))), r"logps \(2, 3\) and anchor_"),
    (lambda: losses.policy_ratio(z(3), z(3), z(3), "word"), "level must be .* not 'word'"),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z(3)), r"advantages \(3,\) .* ratio \(2, 3\)"),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z((2, 4))), r"\(2, 3\) and advantages \(2, 4\)"),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z(2), dual_clip=1.0), "dual_clip .* not 1.0"),
    (lambda: losses.token_mean(z((2, 4)), z((2, 3))), r"per_token \(2, 4\) and mask \(2, 3\)"),
    (lambda: losses.sequence_mean(z(3), z((2, 3))), r"per_token \(3,\) and mask \(2, 3\)"),
    (lambda: losses.constant_length(z((2, 3, 1)), z((2, 3)), 3), r"per_token \(2, 3, 1\) and"),
    (lambda: losses.kl_penalty("k1", z(3), z(3), z(3)), "k1 in the loss .* k1 in the reward"),
    (lambda: losses.kl_penalty("k4", z(3), z(3), z(3)), "one of k2, k3, k3_weighted; not 'k4'"),
    (lambda: losses.kl_penalty("k3_weighted", z(3), z(3), z(3)), "k3_weighted needs the ratio"),
    (lambda: losses.kl_penalty("k3_weighted", z(3), z(3), z(3), z(1)), r"\(3,\) and ratio \(1,\)"),
    (lambda: losses.kl_in_reward(z(2), z(2), z(2), z(2), 1.0), r"rewards \(2,\) .* mask \(2,\)"),
    (
        lambda: losses.check_kl_estimator("k3_weighted", "reward"),
        "one of k1, k2, k3; not 'k3_weighted'",
    ),
    (lambda: losses.check_kl_estimator("k3", "rewards"), "not in 'rewards'"),
    (lambda: losses.handle_truncated("keep", z((2, 3)), z(2), z(3)), r"truncated \(3,\) .* mask"),
    (lambda: losses.handle_truncated("drop", z((2, 3)), z(2), z(2)), "not 'drop'"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refuses_in_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
