"""Losses: values worked by hand, a slow NumPy reference, and what must hold.

A new loss or reduction joins as one row of `LOSSES` or `REDUCTIONS`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import kl as kls
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
    per_token += 0.5 * kls.kl_penalty(kl, logps, reference_logps, mask, token_ratio)
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


# --- Every loss of a token ----------------------------------------------------------------------
#
# name: (loss of log-probs, ratio and advantages; by the textbook, one token at a time).


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


LOSSES = {
    "clipped": (
        lambda logps, ratio, a: losses.clipped_ratio_loss(ratio, a, 0.2, 0.28),
        lambda logp, r, a: -min(r * a, min(max(r, 0.8), 1.28) * a),
    ),
    "dual clip": (
        lambda logps, ratio, a: losses.clipped_ratio_loss(ratio, a, 0.2, 0.28, 1.4),
        lambda logp, r, a: (lambda x: min(x, -1.4 * a) if a < 0 else x)(
            -min(r * a, min(max(r, 0.8), 1.28) * a)
        ),
    ),
    "reinforce": (
        lambda logps, ratio, a: losses.reinforce_loss(logps, a),
        lambda logp, r, a: -a * logp,
    ),
    "cispo": (
        lambda logps, ratio, a: losses.weighted_reinforce_loss(logps, ratio, a, 0.1, 0.3),
        lambda logp, r, a: -min(max(float(jax.lax.stop_gradient(r)), 0.9), 1.3) * a * logp,
    ),
    "sapo": (
        lambda logps, ratio, a: losses.soft_gate_loss(ratio, a, 1.5, 2.0),
        lambda logp, r, a: (
            -(4 / 1.5) * sigmoid(1.5 * (r - 1)) * a
            if a > 0
            else -(4 / 2.0) * sigmoid(2.0 * (r - 1)) * a
        ),
    ),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def loss_of(name, logps, inputs, level="token"):
    """Its sum over what counts."""
    ratio = losses.policy_ratio(logps, inputs["anchor_logps"], inputs["mask"], level)
    per_token = LOSSES[name][0](logps, ratio, inputs["advantages"])
    return losses.token_mean(per_token, inputs["mask"])[0]


@every_loss
def test_values_and_gradients_are_those_of_the_textbook(name):
    inputs = batch(2)
    value, slope = jax.value_and_grad(partial(loss_of, name))(inputs["logps"], inputs)
    total = 0.0
    for p, g, t in np.argwhere(inputs["mask"]):
        logp, anchor = (float(inputs[x][p, g, t]) for x in ("logps", "anchor_logps"))
        a = float(inputs["advantages"][p, g])
        # The ratio is min-ed and max-ed in Python: central differences stand for its gradient,
        # but for CISPO's, which is that of the log-prob alone.
        textbook = LOSSES[name][1]
        loss = lambda x, r: float(textbook(x, r, a))  # noqa: B023, E731
        r, e = np.exp(logp - anchor), 1e-3
        total += loss(logp, r)
        moved = [(logp + d, r if name == "cispo" else np.exp(logp + d - anchor)) for d in (e, -e)]
        expected = (loss(*moved[0]) - loss(*moved[1])) / (2 * e)
        np.testing.assert_allclose(slope[p, g, t], expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    np.testing.assert_array_equal(slope[inputs["mask"] == 0], 0)


@every_loss
@pytest.mark.parametrize("level", ["token", "sequence", "product"])
def test_a_ratio_of_1_gives_the_gradient_of_reinforce(name, level):
    inputs = batch()
    inputs["anchor_logps"] = inputs["logps"]
    slope = jax.grad(partial(loss_of, name, level=level))(inputs["logps"], inputs)
    expected = -inputs["advantages"][..., None] * inputs["mask"]
    if level == "product" and name not in ("reinforce", "cispo"):
        # every token stands for the whole completion: by sequence_mean that is its gradient
        expected = expected * inputs["mask"].sum(-1, keepdims=True)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-6)


@every_loss
def test_padding_reaches_no_loss_and_no_gradient(name):
    clean, dirty, rng = batch(), batch(), np.random.default_rng(1)
    padding = clean["mask"] == 0
    for x in ("logps", "anchor_logps"):
        dirty[x][padding] = rng.choice(GARBAGE, padding.sum())
    gradient = jax.value_and_grad(partial(loss_of, name))
    expected, expected_slope = gradient(clean["logps"], clean)
    value, slope = gradient(dirty["logps"], dirty)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-6)


@every_loss
def test_advantages_of_tokens_are_taken_as_they_are(name):
    inputs = batch()
    by_token = {**inputs, "advantages": np.repeat(inputs["advantages"][..., None], C, axis=-1)}
    np.testing.assert_allclose(
        loss_of(name, inputs["logps"], by_token), loss_of(name, inputs["logps"], inputs), rtol=1e-6
    )


def test_cispo_worked_by_hand():
    logps = jnp.log(jnp.array([[0.5, 0.25, 0.125]]))
    ratio, ln2 = jnp.array([[0.1, 2.0, 50.0]]), np.log(2)
    loss = losses.weighted_reinforce_loss(logps, ratio, jnp.array([-2.0]))
    np.testing.assert_allclose(loss, [[-0.2 * ln2, -8 * ln2, -30 * ln2]], rtol=1e-5)
    low = losses.weighted_reinforce_loss(logps, ratio, jnp.array([-2.0]), clip_low=0.5)
    np.testing.assert_allclose(low[0, 0], -1 * ln2, rtol=1e-6)


def test_the_soft_gate_worked_by_hand():
    # 4/τ σ(τ (ρ - 1)): σ(0) = 1/2, σ(ln 3) = 3/4, σ(-ln 3) = 1/4
    step = float(np.log(3))
    ratio = jnp.array([[1.0, 1 + step, 1 - step]] * 2)
    found = losses.soft_gate_loss(ratio, jnp.array([2.0, 0.0]), 1.0, 2.0)
    np.testing.assert_allclose(found, [[-4, -6, -2], [0, 0, 0]], rtol=1e-6)
    half = jnp.array([[1.0, 1 + step / 2, 1 - step / 2]])
    found = losses.soft_gate_loss(half, jnp.array([-2.0]), 1.0, 2.0)
    np.testing.assert_allclose(found, [[2, 3, 1]], rtol=1e-6)


def test_the_soft_gate_closes_on_both_sides():
    slope = jax.vmap(jax.grad(lambda r: losses.soft_gate_loss(r, jnp.float32(-1.0))))(
        jnp.array([1.0, 0.2, 3.0, 1e6])
    )
    assert slope[0] == pytest.approx(1.0) and slope[1] < 0.9 and slope[2] < 0.5 and slope[3] == 0


def test_product_is_the_ratio_of_whole_completions():
    logps = jnp.log(jnp.array([[0.8, 0.1, 0.5], [0.5, 0.5, 0.5]]))
    anchor = jnp.log(jnp.array([[0.2, 0.2, 0.1], [0.25, 0.5, 1.0]]))
    mask = jnp.array([[1, 1, 0], [1, 1, 1]])
    found = losses.policy_ratio(logps, anchor, mask, "product")
    np.testing.assert_allclose(found, [[4 * 0.5], [2 * 1 * 0.5]], rtol=1e-6)


# --- The sampler is not quite the policy ---------------------------------------------------------

# π / q of two completions: 3 and 1/2; 1/4 and (of a token that does not count) anything.
Q = jnp.log(jnp.array([[0.1, 0.8], [0.4, 0.0]]))
PROXIMAL = jnp.log(jnp.array([[0.3, 0.4], [0.1, 0.0]]))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [[2, 0.5], [0.25, 1]]),
        ({"cap": 4.0}, [[3, 0.5], [0.25, 1]]),
        ({"mode": "mask"}, [[0, 0.5], [0.25, 1]]),
        ({"level": "product"}, [[1.5, 1.5], [0.25, 0.25]]),
        ({"level": "product", "cap": 1.0, "mode": "mask"}, [[0, 0], [0.25, 0.25]]),
        ({"level": "sequence", "cap": 1.0}, [[1, 1], [0.25, 0.25]]),
        ({"level": "sequence"}, [[1.5**0.5, 1.5**0.5], [0.25, 0.25]]),
    ],
    ids=str,
)
def test_truncated_importance_worked_by_hand(settings, expected):
    mask = jnp.array([[1, 1], [1, 0]])
    found = losses.truncated_importance(PROXIMAL, Q, mask, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_importance_holds_no_gradient():
    slope = jax.grad(lambda x: jnp.sum(losses.truncated_importance(x, Q, jnp.ones((2, 2)))))
    np.testing.assert_array_equal(slope(PROXIMAL), 0)


# --- Tokens of high entropy ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "share, expected",
    [
        # of five that count, the (1 - share) quantile: 0.4 -> between 2 and 3, at 2.4
        (0.4, [[0, 1, 0], [0, 0, 1]]),
        (0.2, [[0, 1, 0], [0, 0, 0]]),
        (1.0, [[1, 1, 1], [1, 0, 1]]),
        (1e-6, [[0, 1, 0], [0, 0, 0]]),
    ],
)
def test_top_entropy_worked_by_hand(share, expected):
    entropy = jnp.array([[0.0, 4.0, 1.0], [2.0, 99.0, 3.0]])
    mask = jnp.array([[1, 1, 1], [1, 0, 1]])
    np.testing.assert_array_equal(losses.top_entropy(entropy, mask, share), expected)
    dirty = entropy.at[1, 1].set(jnp.nan)
    np.testing.assert_array_equal(losses.top_entropy(dirty, mask, share), expected)
    assert not jnp.any(losses.top_entropy(dirty, jnp.zeros((2, 3)), share))


def test_no_gradient_flows_back_to_the_entropy():
    def chosen(entropy):
        return jnp.sum(jnp.where(losses.top_entropy(entropy, jnp.ones(3), 0.5), entropy, 0.0))

    np.testing.assert_array_equal(jax.grad(chosen)(jnp.array([1.0, 2.0, 3.0])), [0, 1, 1])


# --- Extremes -----------------------------------------------------------------------------------


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
    assert jnp.all(jnp.isfinite(kls.kl_k3(far, near)))
    # However far the policy has run, k3 goes on pulling it back: 1 - exp(-200) nats per nat.
    assert jax.grad(kls.kl_k3)(0.0, -200.0) == 1


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


def test_truncated_rewards_of_each_function():
    rewards, truncated = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([True, False])
    _, found = losses.handle_truncated("zero", jnp.ones((2, 3)), rewards, truncated)
    np.testing.assert_array_equal(found, [[0, 0], [3, 4]])


z = jnp.zeros
REFUSED = [
    (lambda: losses.policy_ratio(z((2, 3)), z((2, 4)), z((2, 3))), r"logps \(2, 3\) and anchor_"),
    (lambda: losses.policy_ratio(z(3), z(3), z(3), "word"), "level must be .* not 'word'"),
    (lambda: losses.truncated_importance(z(3), z(2), z(3)), r"logps \(3,\) and anchor_logps"),
    (lambda: losses.truncated_importance(z(3), z(3), z(3), mode="x"), "'truncate' or 'mask', not"),
    (lambda: losses.reinforce_loss(z((2, 3)), z(3)), r"advantages \(3,\) .* logps \(2, 3\)"),
    (
        lambda: losses.weighted_reinforce_loss(z((2, 3)), z((2, 2)), z(2)),
        r"ratio \(2, 2\) and logps \(2, 3\)",
    ),
    (lambda: losses.soft_gate_loss(z((2, 3)), z(3)), r"advantages \(3,\) .* ratio \(2, 3\)"),
    (lambda: losses.top_entropy(z(3), z(2), 0.2), r"entropy \(3,\) and mask \(2,\)"),
    (
        lambda: losses.handle_truncated("zero", z((2, 3)), z((3, 4)), z(2)),
        r"rewards \(3,\) .* mask",
    ),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z(3)), r"advantages \(3,\) .* ratio \(2, 3\)"),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z((2, 4))), r"\(2, 3\) and advantages \(2, 4\)"),
    (lambda: losses.clipped_ratio_loss(z((2, 3)), z(2), dual_clip=1.0), "dual_clip .* not 1.0"),
    (lambda: losses.token_mean(z((2, 4)), z((2, 3))), r"per_token \(2, 4\) and mask \(2, 3\)"),
    (lambda: losses.sequence_mean(z(3), z((2, 3))), r"per_token \(3,\) and mask \(2, 3\)"),
    (lambda: losses.constant_length(z((2, 3, 1)), z((2, 3)), 3), r"per_token \(2, 3, 1\) and"),
    (lambda: losses.handle_truncated("keep", z((2, 3)), z(2), z(3)), r"truncated \(3,\) .* mask"),
    (lambda: losses.handle_truncated("drop", z((2, 3)), z(2), z(2)), "not 'drop'"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refuses_in_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
