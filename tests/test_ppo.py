"""PPO: experience and loss by hand, its refusals, the KL's weight, and an arm that is better."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_grpo.algorithms import ppo
from jax_grpo.types import Experience, Outputs, PromptBatch, Rewards, Rollout, Scores, Term

# --- Experience by hand --------------------------------------------------------------------------
#
# One prompt, three completions of two, one and two tokens; nobody judged the third. NaN where there
# is no token. γ = 1/2 and λ = 1/2.

MASK = np.array([[[1, 1], [1, 0], [1, 1]]], bool)
JUDGED = MASK & np.array([1, 1, 0], bool)[:, None]
BEHAVIOR = jnp.array([[[-1, -2], [-1, jnp.nan], [-1, -1]]])
REFERENCE = jnp.array([[[-2, -1], [-3, jnp.nan], [-9, -9]]])  # k1: 1 -1, 2
VALUES = jnp.array([[[1, 2], [4, jnp.nan], [5, 5]]])
ROLLOUT = Rollout(
    PromptBatch(jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(1)),
    jnp.zeros((1, 3, 2), jnp.int32),
    jnp.array([[2, 1, 2]]),
    jnp.asarray(MASK),
    BEHAVIOR,
    jnp.zeros((1, 3, 2)),
    jnp.array([[False, True, False]]),
    jnp.float32(1),
)
REWARDS = Rewards(
    jnp.array([[[6, 2], [8, 0], [0, 0]]]), jnp.array([[[1, 1], [1, 0], [0, 0]]], bool)
)
SCORES = Scores(reference_logps=REFERENCE, values=VALUES)
# β = 1/4, weights 1 and 1/2, so that the first is worth 7 and the second 8:
#   rewards      -1/4, 1/4 + 7       -1/2 + 8
#   δ            -1/4 + 1 - 1, 7.25 - 2       7.5 - 4
#   advantages   -1/4 + 5.25 / 4, 5.25        3.5
SETTINGS: dict[str, Any] = {
    "discount": 0.5, "decay": 0.5, "kl_weight": 0.25, "reward_weights": (1.0, 0.5), "whiten": False,
}  # fmt: skip
ADVANTAGES = np.array([[[1.0625, 5.25], [3.5, 0], [0, 0]]])


def experience_of(state: Any = (), **settings: Any) -> tuple[Experience, Any]:
    return ppo(**{**SETTINGS, **settings}).experience(ROLLOUT, REWARDS, SCORES, state)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [1.0625, 5.25, 3.5]),
        # -1/4 and 1/4 + 7 less 1/4 · 1/2 twice; k2 is 1/2, 1/2, 2
        ({"kl_estimator": "k2"}, [-0.125 + 4.875 / 4, 4.875, 3.5]),
        ({"kl_weight": 0.0}, [5 / 4, 5, 4]),
        # the second was cut
        ({"truncated": "zero"}, [1.0625, 5.25, -4.5]),
        ({"missing_eos_penalty": 3.0}, [1.0625, 5.25, 0.5]),
        ({"truncated": "zero", "missing_eos_penalty": 3.0}, [1.0625, 5.25, -7.5]),
        ({"truncated": "mask"}, [1.0625, 5.25]),
        # all that follows: 7 - 1, 7.25 - 2
        ({"discount": 1.0, "decay": 1.0}, [6, 5.25, 3.5]),
        # mean 3.2708, deviation 2.1031
        ({"whiten": True}, (lambda x: (x - x.mean()) / x.std(ddof=1))(ADVANTAGES[JUDGED])),
    ],
    ids=str,
)
def test_advantages_by_hand(settings, expected):
    found, state = experience_of(**settings)
    counts = JUDGED.copy()
    counts[0, 1] &= settings.get("truncated") != "mask"
    np.testing.assert_array_equal(found.mask, counts.astype(np.float32), strict=True)
    np.testing.assert_allclose(found.advantages[counts], expected, rtol=1e-5)
    np.testing.assert_array_equal(found.advantages[~counts], 0)
    # what the critic should say is not whitened
    raw = experience_of(**{**settings, "whiten": False})[0].advantages
    assert found.values is not None and found.returns is not None
    np.testing.assert_allclose(found.values, np.where(counts, VALUES, 0))
    np.testing.assert_allclose(found.returns, raw + found.values, rtol=1e-6)
    assert state == ()


def test_importance_makes_the_training_path_what_is_measured_against():
    scores = SCORES._replace(proximal_logps=BEHAVIOR - 0.5)
    found, _ = ppo(**SETTINGS, importance_cap=2.0).experience(ROLLOUT, REWARDS, scores, ())
    np.testing.assert_array_equal(found.proximal_logps, scores.proximal_logps)
    np.testing.assert_allclose(found.importance[JUDGED], np.exp(-0.5), rtol=1e-6)
    # k1 is 1/2 less of each token: of the last one of the first -1.5
    np.testing.assert_allclose(found.advantages[0, 0, 1], 7 + 0.375 - 2)


def test_the_kl_weight_follows_what_the_rollout_says():
    settings = {"kl_target": 0.8, "kl_gain": 0.5}
    algorithm = ppo(**SETTINGS, **settings)
    assert (
        algorithm.state == {"kl_weight": 0.25} and algorithm.state["kl_weight"].dtype == np.float32
    )
    assert ppo(**SETTINGS).state == ()
    # KL is 1 - 1 and 2 of two completions: 1 in the mean, 25 % above 0.8 and cut off at 20 %
    found, state = experience_of({"kl_weight": jnp.float32(0.125)}, **settings)
    assert state.keys() == {"kl_weight"} and state["kl_weight"] == pytest.approx(0.125 * 1.1)
    assert state["kl_weight"].dtype == jnp.float32 and state["kl_weight"].shape == ()
    # this rollout still pays by the weight that it began with
    np.testing.assert_allclose(found.advantages, experience_of(kl_weight=0.125)[0].advantages)


def test_flags_say_what_is_needed():
    algorithm = ppo()
    assert algorithm.source == "policy" and algorithm.group == 1
    assert algorithm.needs_critic and algorithm.needs_reference and not algorithm.needs_proximal
    assert not ppo(kl_weight=0.0).needs_reference and ppo(importance_cap=2.0).needs_proximal


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kl_target": 6.0, "kl_weight": 0.0}, "kl_target adapts kl_weight, which is 0"),
        ({"kl_target": -1.0}, "kl_target is -1.0"),
        ({"kl_target": 6.0, "kl_gain": 0.0}, "kl_gain is 0.0"),
        ({"kl_weight": -0.1}, "kl_weight is -0.1"),
        ({"kl_estimator": "k3_weighted"}, "not 'k3_weighted'"),
        ({"discount": 1.5}, "discount is 1.5: it must be 0 to 1"),
        ({"decay": -0.1}, "decay is -0.1"),
        ({"value_clip": -0.2}, "value_clip is -0.2"),
        ({"value_weight": float("nan")}, "value_weight is nan"),
        ({"clip_low": -0.2}, "clip_low is -0.2"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5"),
        ({"missing_eos_penalty": 1.0, "truncated": "mask"}, "'mask' leaves out"),
        ({"importance_level": "product"}, "want an importance_cap"),
    ],
    ids=str,
)  # fmt: skip
def test_refuses_what_makes_no_sense_when_it_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        ppo(**settings)
    with pytest.raises(TypeError, match="advantage"):
        ppo(advantage="centered")


def test_what_is_needed_and_not_there_is_not_passed_over():
    for lacking in ("reference_logps", "values"):
        with pytest.raises(ValueError, match=lacking.split("_")[0]):
            ppo().experience(ROLLOUT, REWARDS, SCORES._replace(**{lacking: None}), ())
    without = SCORES._replace(reference_logps=None)
    ppo(kl_weight=0.0).experience(ROLLOUT, REWARDS, without, ())


# --- Loss by hand --------------------------------------------------------------------------------
#
#   advantage   2     -1       1
#   ratio       1.5   0.5      1       clip 0.2:  -2.4  0.8  -1
#   value       2     3        1
#   before      1     3        0       clip 1/2:  1.5  3  0.5
#   return      3     1        0       ½ of (1.5)², 2², 1²; the first is clipped

LOGPS = np.log([[[0.6, 0.2], [0.5, 0.9]]])
HAND = Experience(
    jnp.array([[[2.0, -1.0], [1.0, 9.0]]]),
    jnp.array([[[1.0, 1.0], [1.0, 0.0]]]),
    jnp.asarray(LOGPS - np.log([[[1.5, 0.5], [1, 7]]]), jnp.float32),
    values=jnp.array([[[1.0, 3.0], [0.0, 0.0]]]),
    returns=jnp.array([[[3.0, 1.0], [0.0, 0.0]]]),
)
NOW = jnp.array([[[2.0, 3.0], [1.0, jnp.nan]]])
OUTPUTS = Outputs(jnp.asarray(LOGPS, jnp.float32), jnp.ones((1, 2, 2)), NOW)


def pair(term: Any) -> tuple[float, float]:
    return float(term.sum), float(term.weight)


def total(terms: dict[str, Term]) -> jax.Array:
    """The loss that the trainer makes of its terms."""
    pulls = [t for t in terms.values() if t.coefficient]
    return sum((t.coefficient * t.sum / t.weight for t in pulls), jnp.float32(0))


def test_terms_by_hand():
    terms = ppo(value_clip=0.5, value_weight=0.7).loss(OUTPUTS, HAND)
    assert pair(terms["policy_loss"]) == pytest.approx((-2.4 + 0.8 - 1, 3))
    assert pair(terms["value_loss"]) == pytest.approx((1.125 + 2 + 0.5, 3))
    assert pair(terms["critic/clip_ratio"]) == (1, 3)
    # (3 - 2)² + (1 - 3)² + (0 - 1)² of 3, 1, 0: mean 4/3, squares 25/9, 1/9, 16/9
    assert pair(terms["critic/unexplained_variance"]) == pytest.approx((6, 42 / 9))
    coefficients = {name: term.coefficient for name, term in terms.items()}
    assert (coefficients.pop("policy_loss"), coefficients.pop("value_loss")) == (1.0, 0.7)
    assert set(coefficients.values()) == {0.0}
    plain = ppo(value_clip=0.0).loss(OUTPUTS, HAND)
    assert pair(plain["value_loss"]) == pytest.approx((0.5 + 2 + 0.5, 3))
    assert pair(plain["critic/clip_ratio"]) == (0, 3)


def test_a_kl_in_the_reward_is_shown_in_the_loss_and_pulls_nowhere():
    found, _ = experience_of()
    terms = ppo(**SETTINGS).loss(Outputs(BEHAVIOR, None, VALUES), found)
    # k3 of d = -1, 1, -2
    k3 = np.exp(-1) + (np.e - 2) + (np.exp(-2) + 1)
    assert pair(terms["kl"]) == pytest.approx((k3, 3), rel=1e-5)
    assert terms["kl"].coefficient == 0


def test_gradients_are_those_of_the_naive_formula():
    """Off policy, and off the old values."""
    rng = np.random.default_rng(0)
    shape = (3, 2, 4)
    logps, anchor, now, old, returns, advantages = rng.normal(size=(6, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.7
    batch = Experience(advantages, jnp.float32(mask), anchor, values=old, returns=returns)

    def naive(logps, now):
        ratio, a, r = jnp.exp(logps - anchor)[mask], advantages[mask], returns[mask]
        policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        bounded = jnp.clip(now, old - 0.3, old + 0.3)[mask]
        critic = 0.5 * jnp.maximum((now[mask] - r) ** 2, (bounded - r) ** 2)
        return jnp.mean(policy + 0.6 * critic)

    def ours(logps, now):
        return total(ppo(value_clip=0.3, value_weight=0.6).loss(Outputs(logps, None, now), batch))

    expected = jax.jit(jax.value_and_grad(naive, argnums=(0, 1)))(logps, now)
    found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(logps, now)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_weights_do_not_depend_on_what_the_models_say():
    said = ppo().loss(OUTPUTS, HAND)
    silent = ppo().loss(Outputs(*[jnp.zeros((1, 2, 2))] * 3), HAND)
    assert {k: float(t.weight) for k, t in said.items()} == {
        k: float(t.weight) for k, t in silent.items()
    }


# --- Two arms ------------------------------------------------------------------------------------


def two_arms(steps: int, **settings: Any) -> tuple[Any, Any, Any]:
    """Logits, values and the algorithm's state after PPO with a critic that is a table.

    The first token decides nothing, the second is the arm: 1 pays 1, 0 pays 0. Both are tried as
    often as the policy would, by their quantiles.
    """
    prompts, places = 16, np.arange(16) / 16 + 1 / 32
    algorithm = ppo(**settings)
    optimizers = optax.adam(0.05), optax.sgd(0.5)
    mask = jnp.ones((prompts, 1, 2), bool)
    batch = PromptBatch(jnp.ones((prompts, 1)), jnp.ones(prompts), jnp.arange(prompts))

    def logps_of(logits, arms):
        chosen = jax.nn.log_softmax(logits)[arms]
        return jnp.stack([jnp.zeros(prompts), chosen], axis=-1)[:, None]

    def values_of(critic):
        return jnp.broadcast_to(critic, mask.shape)

    def step(carry, _):
        logits, critic, states, state = carry
        arms = jnp.int32(places > jax.nn.softmax(logits)[0])
        rollout = Rollout(
            batch, jnp.stack([jnp.zeros_like(arms), arms], axis=-1)[:, None],
            jnp.full((prompts, 1), 2), mask, logps_of(logits, arms), jnp.zeros(mask.shape),
            jnp.zeros((prompts, 1), bool), jnp.float32(1),
        )  # fmt: skip
        rewards = Rewards(jnp.float32(arms)[:, None, None], jnp.ones((prompts, 1, 1), bool))
        scores = Scores(logps_of(jnp.zeros(2), arms), values=values_of(critic))
        experience, state = algorithm.experience(rollout, rewards, scores, state)

        def loss(parameters):
            outputs = Outputs(logps_of(parameters[0], arms), None, values_of(parameters[1]))
            return total(algorithm.loss(outputs, experience))

        parameters = logits, critic
        for _ in range(2):  # passes over one rollout
            slopes, moved, kept = jax.grad(loss)(parameters), [], []
            for i, optimizer in enumerate(optimizers):
                update, opt_state = optimizer.update(slopes[i], states[i])
                moved.append(optax.apply_updates(parameters[i], update))
                kept.append(opt_state)
            parameters, states = tuple(moved), tuple(kept)
        return (*parameters, states, state), None

    zeros = jnp.zeros(2), jnp.zeros(2)
    states = tuple(o.init(z) for o, z in zip(optimizers, zeros, strict=True))
    carry = (*zeros, states, jax.tree.map(jnp.asarray, algorithm.state))
    (logits, critic, _, state), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=steps))(carry)
    return jax.nn.softmax(logits), critic, state


def test_ppo_on_two_arms_reaches_the_best():
    policy, critic, _ = two_arms(80, kl_weight=0.0)
    assert policy[1] > 0.97
    np.testing.assert_allclose(critic, 1.0, atol=0.05)  # what the best arm pays


@pytest.mark.slow
def test_a_kl_in_the_reward_stops_where_it_is_best():
    """The optimum of E[r] - β KL(π || even) is π(1) = σ(1 / β)."""
    policy, _, _ = two_arms(150, kl_weight=0.7, whiten=False, decay=1.0)
    np.testing.assert_allclose(policy[1], jax.nn.sigmoid(1 / 0.7), atol=0.005)


@pytest.mark.slow
def test_an_adapted_kl_weight_settles_where_the_optimum_has_the_target():
    """π(1) = 0.72 is 0.1 from even: 0.72 ln 1.44 + 0.28 ln 0.56; so 1 / β = ln(0.72 / 0.28)."""
    settings = {"kl_weight": 0.3, "kl_target": 0.1, "whiten": False, "decay": 1.0}
    _, _, state = two_arms(400, **settings)
    assert state["kl_weight"] == pytest.approx(1 / np.log(0.72 / 0.28), rel=0.1)
