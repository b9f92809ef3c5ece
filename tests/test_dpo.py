"""What pairs train: DPO's policy and the reward model, by hand and at their optimum."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_grpo.algorithms import dpo, reward_model
from jax_grpo.arrays import divide
from jax_grpo.types import Algorithm, Experience, Outputs, PromptBatch, Rewards, Rollout, Scores

LN2, LN3 = float(np.log(2)), float(np.log(3))

# Three pairs; of the third the rejected side is empty. 9 and 7 where there is no token.
#   chosen           rejected        Σ (log π - log π_ref)
#   -1 -2 of -2 -3   -3 of -2        2     -1
#   -1 of -1         -1 -1 of -1 -1  0      0
LOGPS = jnp.array([[[-1.0, -2], [-3, 9]], [[-1, 9], [-1, -1]], [[-5, -5], [9, 9]]])
REFERENCE = jnp.array([[[-2.0, -3], [-2, 7]], [[-1, 7], [-1, -1]], [[-1, -1], [7, 7]]])
LENGTHS = jnp.array([[2, 1], [1, 2], [2, 0]])
MASK = jnp.arange(2) < LENGTHS[..., None]


def rollout_of(tokens: Any, mask: Any = MASK) -> Rollout:
    """Pairs of the data set."""
    count, lengths = len(mask), mask.sum(-1)
    return Rollout(
        PromptBatch(jnp.ones((count, 1), jnp.int32), jnp.ones(count, jnp.int32), jnp.arange(count)),
        tokens, lengths, mask, jnp.zeros(mask.shape), jnp.zeros(mask.shape),
        jnp.zeros(lengths.shape, bool), jnp.float32(1),
    )  # fmt: skip


ROLLOUT = rollout_of(jnp.zeros((3, 2, 2), jnp.int32))
NOTHING = Rewards(jnp.zeros((3, 2, 0)), jnp.zeros((3, 2, 0), bool))


def experience_of(algorithm: Algorithm, rewards: Rewards = NOTHING) -> Experience:
    scores = Scores(REFERENCE) if algorithm.needs_reference else Scores()
    experience, state = algorithm.experience(ROLLOUT, rewards, scores, algorithm.state)
    assert state == ()
    return experience


def means(terms: dict[str, Any]) -> dict[str, float]:
    return {name: float(divide(term.sum, term.weight)) for name, term in terms.items()}


def total(terms: dict[str, Any]) -> jax.Array:
    """The loss that the trainer makes of its terms."""
    pulls = [t for t in terms.values() if t.coefficient]
    return sum((t.coefficient * divide(t.sum, t.weight) for t in pulls), jnp.float32(0))


def test_flags_say_what_is_needed():
    for algorithm in (dpo(), reward_model()):
        assert (algorithm.source, algorithm.group) == ("dataset", 2)
        assert not (algorithm.needs_critic or algorithm.needs_proximal or algorithm.needs_entropy)
    assert dpo().needs_reference and dpo().trains == "policy"
    assert not reward_model().needs_reference and reward_model().trains == "reward_model"


# --- DPO -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, margins",
    [({}, [1.5, 0]), ({"length_normalized": True}, [1, 0]), ({"loss": "hinge"}, [1.5, 0])],
    ids=str,
)
def test_dpo_by_hand(settings, margins):
    algorithm = dpo(beta=0.5, **settings)
    experience = experience_of(algorithm)
    np.testing.assert_array_equal(experience.advantages, [[1, -1]] * 3)
    terms = algorithm.loss(Outputs(LOGPS), experience)
    assert all(float(term.weight) == 2 for term in terms.values())
    loss = [max(0, 1 - m) if "loss" in settings else np.log(1 + np.exp(-m)) for m in margins]
    chosen = 0.5 if "length_normalized" in settings else 1.0
    assert means(terms) == pytest.approx(
        {
            "dpo_loss": sum(loss) / 2,
            "logps/chosen": (-3 - 1) / 2,
            "logps/rejected": (-3 - 2) / 2,
            "rewards/chosen": chosen / 2,
            "rewards/rejected": -0.5 / 2,
            "rewards/accuracies": 1 / 2,
            "rewards/margins": sum(margins) / 2,
        }
    )
    pulls = {name: term.coefficient for name, term in terms.items() if term.coefficient}
    assert pulls == {"dpo_loss": 1.0}


def test_a_likelihood_of_the_chosen_one_beside_it():
    algorithm = dpo(sft_weight=0.25)
    terms = algorithm.loss(Outputs(LOGPS), experience_of(algorithm))
    # (1 + 2) / 2 and 1; the third pair does not count
    assert tuple(map(float, terms["nll"])) == (1.5 + 1, 2, 0.25)
    assert "nll" not in dpo().loss(Outputs(LOGPS), experience_of(dpo()))


def test_what_does_not_count_gets_no_gradient():
    algorithm = dpo(sft_weight=1.0)
    experience = experience_of(algorithm)
    slope = jax.jit(jax.grad(lambda x: total(algorithm.loss(Outputs(x), experience))))(LOGPS)
    np.testing.assert_array_equal(slope != 0, MASK & jnp.array([1, 1, 0], bool)[:, None, None])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"beta": 0.0}, "beta is 0.0"),
        ({"loss": "kto"}, "'kto' is not one of: sigmoid, hinge, ipo"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ({"label_smoothing": 0.1, "loss": "hinge"}, "for the loss sigmoid, not for hinge"),
        ({"sft_weight": -1.0}, "sft_weight is -1.0"),
    ],
    ids=str,
)
def test_refuses_what_makes_no_sense_when_it_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        dpo(**settings)
    with pytest.raises(ValueError, match="centering is -0.1"):
        reward_model(centering=-0.1)


def test_a_reference_that_is_not_there_is_not_passed_over():
    with pytest.raises(ValueError, match="reference"):
        dpo().experience(ROLLOUT, NOTHING, Scores(), ())


# --- The reward model ----------------------------------------------------------------------------

SCORED = Outputs(scores=jnp.array([[LN3, 0.0], [2.0, 2.0], [50.0, jnp.nan]]))


def test_reward_model_by_hand():
    algorithm = reward_model(centering=0.5)
    terms = algorithm.loss(SCORED, experience_of(algorithm))
    assert all(float(term.weight) == 2 for term in terms.values())
    assert means(terms) == pytest.approx(
        {
            # σ = 3/4 and 1/2; half of (ln 3)² and 4²
            "reward_loss": (np.log(4 / 3) + LN2 + (LN3**2 + 16) / 2) / 2,
            "accuracy": 1 / 2,  # a tie is wrong
            "margin": LN3 / 2,
            "mean_reward": (LN3 + 4) / 4,
            "min_reward": 0,
            "max_reward": 2,
        },
        rel=1e-5,
    )
    assert {n for n, term in terms.items() if term.coefficient} == {"reward_loss"}
    slope = jax.grad(lambda s: total(algorithm.loss(Outputs(scores=s), experience_of(algorithm))))
    assert np.all(np.isfinite(slope(SCORED.scores))) and not np.any(slope(SCORED.scores)[2])


def test_the_margin_is_what_the_data_say():
    values = jnp.array([[[LN3], [0]], [[1], [1]], [[0], [0]]])
    margins = Rewards(values, jnp.ones(values.shape, bool))
    experience = experience_of(reward_model(), margins)
    np.testing.assert_allclose(experience.advantages, values[..., 0])
    terms = reward_model().loss(SCORED, experience)
    # ln 3 - ln 3 and 0: σ = 1/2 twice
    assert means(terms)["reward_loss"] == pytest.approx(LN2)
    assert means(terms)["margin"] == pytest.approx(LN3 / 2)
    assert not np.any(experience_of(reward_model()).advantages)  # R = 0


@pytest.mark.parametrize("make", [partial(dpo, sft_weight=0.5), reward_model])
def test_nothing_that_counts_is_0(make):
    algorithm = make()
    experience = experience_of(algorithm)._replace(mask=jnp.zeros(MASK.shape))
    terms = algorithm.loss(Outputs(LOGPS, scores=SCORED.scores), experience)
    assert set(means(terms).values()) == {0.0}


@pytest.mark.parametrize("make", [partial(dpo, sft_weight=0.5), reward_model])
def test_slices_add_up_and_weights_ask_no_model(make):
    algorithm = make()
    experience, outputs = experience_of(algorithm), Outputs(LOGPS, scores=SCORED.scores)
    whole = algorithm.loss(outputs, experience)
    part = lambda p: jax.tree.map(lambda x: x[p : p + 1], (outputs, experience))  # noqa: E731
    parts = [algorithm.loss(*part(p)) for p in range(3)]
    silent = algorithm.loss(jax.tree.map(jnp.zeros_like, outputs), experience)
    for name, term in whole.items():
        assert term.weight == silent[name].weight == sum(terms[name].weight for terms in parts)
        if name not in ("min_reward", "max_reward"):
            added = float(sum(terms[name].sum for terms in parts))
            assert float(term.sum) == pytest.approx(added, rel=1e-5)


# --- The optimum ---------------------------------------------------------------------------------
#
# Three answers, each preferred to another as Bradley and Terry have it, with odds of 1 : 2 : 4.

ODDS = np.array([1, 2, 4])
PAIRS = np.array([p for p in permutations(range(3), 2) for _ in range(ODDS[p[0]])])
PREFERRED = rollout_of(jnp.asarray(PAIRS)[..., None], jnp.ones((len(PAIRS), 2, 1), bool))
START = jnp.array([0.5, -0.3, 0.1])


def trained(loss: Any, start: Any) -> Any:
    """Where Adam ends."""
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 300))

    def step(carry, _):
        x, state = carry
        updates, state = optimizer.update(jax.grad(loss)(x), state)
        return (optax.apply_updates(x, updates), state), None

    end = jax.jit(lambda x: jax.lax.scan(step, (x, optimizer.init(x)), length=300)[0][0])
    return end(start)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_dpo_goes_to_the_closed_form(beta):
    """π ∝ π_ref exp(r / β), with r = ln(odds)."""
    algorithm = dpo(beta=beta)

    def logps_of(logits):
        return jax.nn.log_softmax(logits)[PAIRS][..., None]

    scores = Scores(logps_of(START))
    experience, _ = algorithm.experience(PREFERRED, NOTHING, scores, ())
    found = trained(lambda x: total(algorithm.loss(Outputs(logps_of(x)), experience)), START)
    expected = jax.nn.softmax(START + np.log(ODDS) / beta)
    np.testing.assert_allclose(jax.nn.softmax(found), expected, atol=1e-3)


@pytest.mark.parametrize("length_normalized, tokens", [(False, 1), (False, 2), (True, 2)])
def test_ipo_stops_at_its_margin(length_normalized, tokens):
    """A log-ratio of 1 / (2β), however surely one is preferred: of sums, or as in TRL of means."""
    algorithm = dpo(beta=0.4, loss="ipo", length_normalized=length_normalized)
    mask = jnp.ones((1, 2, tokens), bool)

    def logps_of(x):  # of two answers, whose every token tells them apart
        return jnp.broadcast_to(jax.nn.log_sigmoid(jnp.stack([x, -x]))[None, :, None], mask.shape)

    rollout, start = rollout_of(jnp.zeros(mask.shape, jnp.int32), mask), jnp.array(0.3)
    experience, _ = algorithm.experience(rollout, NOTHING, Scores(logps_of(start)), ())
    found = trained(lambda x: total(algorithm.loss(Outputs(logps_of(x)), experience)), start)
    expected = 1 / (2 * 0.4) / (1 if length_normalized else tokens)
    assert float(found - start) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_a_reward_model_finds_the_odds_and_centring_their_zero(centering):
    algorithm = reward_model(centering=centering)
    nothing = Rewards(jnp.zeros((len(PAIRS), 2, 0)), jnp.zeros((len(PAIRS), 2, 0), bool))
    experience, _ = algorithm.experience(PREFERRED, nothing, Scores(), ())

    def loss(scores):
        return total(algorithm.loss(Outputs(scores=scores[PAIRS]), experience))

    found = trained(loss, jnp.full(3, 2.0))
    np.testing.assert_allclose(np.diff(found), LN2, atol=0.05 if centering else 0.005)
    assert abs(found.mean()) < 0.2 if centering else found.mean() > 1
