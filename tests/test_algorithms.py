"""Algorithms: constructors and their refusals, experience and loss by hand, and a bandit.

A new algorithm joins as one row of `RELATIVES`, and with its settings of `LEARNS`.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import advantages, algorithms
from jax_grpo.algorithms import dapo, grpo, reinforce_pp, rft, sft
from jax_grpo.policy_gradient import ADVANTAGES, make_reduction
from jax_grpo.types import (
    Algorithm,
    Experience,
    Outputs,
    PromptBatch,
    Rewards,
    Rollout,
    Scores,
)

# --- Constructors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"advantage": "std"}, "'std' is not one of: standardized, centered, leave_one_out, "),
        ({"kl_weight": -0.1}, "kl_weight is -0.1"),
        ({"kl_weight": float("nan")}, "kl_weight is nan"),
        ({"kl_estimator": "k1"}, "k1 in the loss has a gradient of 0"),
        ({"kl_estimator": "k4"}, "not 'k4'"),
        ({"kl_estimator": "k3_weighted", "kl_in": "reward"}, "not 'k3_weighted'"),
        ({"kl_in": "both"}, "'both'"),
        ({"reduction": "mean"}, "'mean' is not one of: token_mean, sequence_mean, constant_length"),
        ({"reduction": "constant_length"}, "reduction_length of at least 1"),
        ({"reduction": "constant_length", "reduction_length": -3}, "length of at least 1"),
        ({"ratio_level": "word"}, "'word'"),
        ({"truncated": "drop"}, "'drop'"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"dual_clip": -3.0}, "dual_clip"),
        ({"clip_low": -0.2}, "clip_low"),
        ({"clip_high": -0.2}, "clip_high"),
        ({"reduction_length": 8}, "reduction_length is for 'constant_length', not for 'sequence_"),
        ({"top_entropy": 0.0}, "top_entropy is 0.0"),
        ({"top_entropy": 1.5}, "top_entropy is 1.5"),
        ({"top_entropy": 0.2, "ratio_level": "sequence"}, "top_entropy picks tokens"),
        ({"kl_in": "reward_to_go", "kl_estimator": "k3_weighted"}, "not 'k3_weighted'"),
        ({"advantage": "mean_normalized", "standardize_each": True}, "not negative"),
        ({"advantage": "mean_normalized", "kl_in": "reward"}, "not negative"),
        ({"importance_cap": 0.5}, "importance_cap is 0.5: it must be 0 .off. or at least 1"),
        ({"importance_cap": float("nan")}, "importance_cap is nan"),
        ({"importance_level": "product"}, "want an importance_cap"),
        ({"importance_mode": "mask"}, "want an importance_cap"),
        ({"importance_mode": "drop"}, "importance_mode 'drop' is not one of: truncate, mask"),
        ({"importance_cap": 2.0, "importance_level": "word"}, "importance_level 'word'"),
    ],
    ids=str,
)  # fmt: skip
def test_grpo_refuses_what_makes_no_sense_when_it_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        grpo(**settings)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("dr_grpo", {"reduction_length": 0}, "reduction_length of at least 1"),
        ("dr_grpo", {"reduction_length": 9, "clip_low": -1.0}, "clip_low is -1.0"),
        ("dapo", {"dynamic_sampling": False, "filter_weights": (1.0,)}, "dynamic_sampling, which"),
        ("dapo", {"filter_weights": (1.0,), "reward_weights": (1.0, 1.0)}, "there are 2 rewards"),
        ("cispo", {"clip_high": float("nan")}, "clip_high is nan"),
        ("sapo", {"temperature": 0.0}, "temperature is 0.0"),
        ("sapo", {"negative_temperature": -1.0}, "negative_temperature is -1.0"),
        ("rloo", {"kl_in": "loss"}, "k1 in the loss has a gradient of 0"),
        ("reinforce_pp_baseline", {"kl_estimator": "k1"}, "k1 in the loss has a gradient of 0"),
        ("gpg", {"advantage": "none"}, "'none' is not one of"),
        ("gspo", {"top_entropy": 0.2}, "top_entropy picks tokens"),
        ("maxrl", {"kl_in": "reward"}, "not negative"),
    ],
    ids=str,
)  # fmt: skip
def test_its_relatives_refuse_what_makes_no_sense_when_they_are_made(name, settings, message):
    with pytest.raises(ValueError, match=message):
        getattr(algorithms, name)(**settings)


def settings_of(name: str) -> dict[str, Any]:
    """The settings that an algorithm has, with their defaults."""
    parameters = inspect.signature(getattr(algorithms, name)).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    return {p.name: p.default for p in parameters}


def test_signatures_say_all_settings_with_the_defaults_that_hold():
    shared = settings_of("grpo").keys() - {"clip_low", "clip_high", "dual_clip"}
    assert {"reward_weights", "standardize_each", "advantage", "top_entropy", "kl_in"} <= shared
    left_out = {
        "dr_grpo": {"reduction"},
        "gpg": {"ratio_level"},
        "rft": {"advantage", "standardize_each", "whiten", "ratio_level", "kl_in"},
    }
    for name, (given, *_) in RELATIVES.items():
        settings = settings_of(name)
        assert shared - settings.keys() == left_out.get(name, set())
        constructor = getattr(algorithms, name)
        spelt_out, left_to_it = constructor(**{**settings, **given}), constructor(**given)
        assert spelt_out.needs_reference == left_to_it.needs_reference
        for terms in zip(
            *(a.loss(OUTPUTS, HAND).items() for a in (spelt_out, left_to_it)), strict=True
        ):
            assert terms[0] == terms[1], name
        found = [a.experience(ROLLOUT, REWARDS, SCORES, ())[0] for a in (spelt_out, left_to_it)]
        np.testing.assert_array_equal(found[0].advantages, found[1].advantages)
    assert settings_of("grpo")["kl_weight"] == 0.04
    assert settings_of("rloo")["advantage"] == "leave_one_out"
    assert settings_of("dapo")["truncated"] == "mask"
    assert settings_of("dr_grpo")["reduction_length"] is inspect.Parameter.empty


def test_an_unknown_setting_is_no_setting():
    with pytest.raises(TypeError, match="clip_lo"):
        algorithms.gspo(clip_lo=0.1)
    with pytest.raises(TypeError, match="advantage"):
        algorithms.rft(advantage="centered")


def test_sft_refuses_what_makes_no_sense_when_it_is_made():
    with pytest.raises(ValueError, match="'sum' is not one of"):
        sft(reduction="sum")
    with pytest.raises(ValueError, match="reduction_length"):
        sft(reduction="constant_length")


def test_flags_say_what_is_needed():
    assert (sft().source, grpo().source) == ("dataset", "policy")
    assert not sft().needs_reference and not sft().needs_entropy
    assert grpo().needs_reference and grpo().needs_entropy
    assert not grpo(kl_weight=0.0).needs_reference
    assert not grpo(kl_weight=0.0, kl_in="reward", kl_estimator="k1").needs_reference
    assert grpo(kl_in="reward", kl_estimator="k1").needs_reference
    assert not (sft().needs_critic or grpo().needs_critic or sft().keep or grpo().keep)
    assert not grpo().needs_proximal and grpo(importance_cap=2.0).needs_proximal
    assert sft().trains == grpo().trains == "policy"
    assert dapo().keep and not dapo(dynamic_sampling=False).keep


def test_every_advantage_goes_by_its_name():
    for name, function in ADVANTAGES.items():
        if name != "standardized_biased":
            assert function is getattr(advantages, name)
    rewards, valid = jnp.array([1.0, 0.0]), jnp.ones(2, bool)
    biased = ADVANTAGES["standardized_biased"](rewards, valid)
    np.testing.assert_allclose(biased, [1, -1], rtol=1e-3)


ALONE = Rewards(jnp.array([[[1.0]], [[3.0]], [[-2.0]]]), jnp.ones((3, 1, 1), bool))


@pytest.mark.parametrize(
    "name, settings, group",
    [
        *[("grpo", {"advantage": name}, 1 if name == "raw" else 2) for name in ADVANTAGES],
        ("grpo", {"advantage": "raw", "standardize_each": True}, 2),
        ("grpo", {"advantage": advantages.raw}, 1),
        ("rloo", {}, 2),
        ("gpg", {}, 2),
        ("rft", {}, 1),
        ("reinforce_pp", {}, 1),
        ("reinforce_pp", {"advantage": "centered"}, 2),
        ("reinforce_pp_baseline", {}, 2),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_a_group_of_one_teaches_where_it_is_enough_and_nowhere_else(name, settings, group):
    algorithm = getattr(algorithms, name)(**settings, kl_weight=0.0)
    assert algorithm.group == group
    rollout = jax.tree.map(lambda x: x[[0, 1, 0], :1] if x.ndim > 1 else x, ROLLOUT)
    found, _ = algorithm.experience(rollout, ALONE, Scores(), ())
    assert bool(jnp.any(found.advantages != 0)) == (group == 1)


def test_dynamic_sampling_needs_a_group_to_vary():
    assert dapo(advantage="raw").group == 2
    assert dapo(advantage="raw", dynamic_sampling=False).group == 1
    assert sft().group == 1


def test_dapo_keeps_the_groups_that_vary():
    # 2 1 1 of both rewards together; the first alone is constant
    values = jnp.array([[[1.0, 1], [1, 0], [1, 0]], [[1, 0], [0, 1], [0, 1]], [[3, 3]] * 3])
    rewards = Rewards(values, jnp.ones((3, 3, 2), bool))
    for settings, expected in [
        ({}, [True, False, False]),
        ({"filter_weights": (1.0, 0.0)}, [False, True, False]),
        ({"reward_weights": (1.0, 0.0)}, [False, True, False]),
        ({"reward_weights": (1.0, 0.0), "filter_weights": (0.0, 1.0)}, [True, True, False]),
    ]:
        keep = dapo(**settings).keep
        assert keep is not None and keep(rewards).tolist() == expected, settings


def test_reductions_by_hand():
    per_token, mask = jnp.array([[1.0, 3.0], [5.0, 7.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
    pairs = {"token_mean": (9, 3), "sequence_mean": (2 + 5, 2), "constant_length": (9, 2 * 4)}
    for name, pair in pairs.items():
        length = 4 if name == "constant_length" else 0
        assert tuple(map(float, make_reduction(name, length)(per_token, mask))) == pair


# --- Experience by hand --------------------------------------------------------------------------
#
# Two prompts, four completions each, two reward functions of weights 1 and 1/2. "-" is None.
#
#   prompt 0:  first 2 0 2 -   second 1 1 - -   total 2.5 0.5 2 -   mean of three 5/3
#   prompt 1:  first 1 1 1 1   second 0 - 0 0   total 1 1 1 1       constant
#
# The second completion of prompt 0 and the first of prompt 1 were cut at the length limit.

REWARDS = Rewards(
    jnp.array([[[2, 1], [0, 1], [2, 0], [0, 0]], [[1, 0]] * 4], jnp.float32),
    jnp.array([[[1, 1], [1, 1], [1, 0], [0, 0]], [[1, 1], [1, 0], [1, 1], [1, 1]]], bool),
)
WEIGHTS = (1.0, 0.5)
LENGTHS = np.array([[1, 2, 2, 1], [2, 1, 0, 1]])
MASK = np.arange(2) < LENGTHS[..., None]
TRUNCATED = np.array([[0, 1, 0, 0], [1, 0, 0, 0]], bool)
BEHAVIOR = np.array(
    [[[-1, 9], [-1, -2], [-0.5, -0.5], [-1, 9]], [[-1, -1], [-2, 9], [9, 9], [-3, 9]]], np.float32
)  # 9 where there is no token
REFERENCE = np.array(
    [[[-2, 7], [-1, -1], [-1.5, -1], [-5, 7]], [[-1, -1], [-4, 7], [7, 7], [-3, 7]]], np.float32
)
ROLLOUT = Rollout(
    PromptBatch(jnp.ones((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.arange(2)),
    jnp.zeros((2, 4, 2), jnp.int32),
    jnp.asarray(LENGTHS),
    jnp.asarray(MASK),
    jnp.asarray(BEHAVIOR),
    jnp.zeros((2, 4, 2)),
    jnp.asarray(TRUNCATED),
    jnp.float32(1),
)
SCORES = Scores(reference_logps=jnp.asarray(REFERENCE))
CENTERED = [[2.5 - 5 / 3, 0.5 - 5 / 3, 2 - 5 / 3, 0], [0, 0, 0, 0]]
JUDGED = MASK & np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)[..., None]  # all but the "- -"
WITHOUT_CUT = JUDGED & ~TRUNCATED[..., None]


def experience_of(**settings: Any) -> Experience:
    settings = {"reward_weights": WEIGHTS, "advantage": "centered", **settings}
    experience, state = grpo(**settings).experience(ROLLOUT, REWARDS, SCORES, {"kept": 1})
    assert state == {"kept": 1}
    return experience


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, CENTERED),
        # the mean of the others: n / (n - 1) = 3/2 of it
        ({"advantage": "leave_one_out"}, 1.5 * np.array(CENTERED)),
        # squares of 5/6, 7/6, 2/6: (25 + 49 + 4) / 36 over 2
        ({"advantage": "standardized"}, np.array(CENTERED) / (np.sqrt(78 / 72) + 1e-4)),
        # seven of mean 9/7: squares of 17 11 10 4 (/14, 14ths: 2.5 = 35, 0.5 = 7, 2 = 28, 1 = 14;
        # 9/7 = 18): 17² + 11² + 10² + 4 · 4² = 289 + 121 + 100 + 64 = 574, over 14² · 6
        (
            {"advantage": "batch_standardized"},
            np.array(CENTERED) / (np.sqrt(574 / (196 * 6)) + 1e-4),
        ),
        # all of weight 1: 3 1 2, mean 2
        ({"reward_weights": ()}, [[1, -1, 0, 0], [0, 0, 0, 0]]),
        # by the second alone: 1 1 0 (its "-" counts as nothing), mean 2/3
        ({"reward_weights": (0.0, 1.0)}, [[1 / 3, 1 / 3, -2 / 3, 0], [0, 0, 0, 0]]),
        # those cut stay in the mean
        ({"truncated": "mask"}, CENTERED),
        # 2.5 0 2, mean 1.5; and 0 1 1 1, mean 3/4
        ({"truncated": "zero"}, [[1, -1.5, 0.5, 0], [-0.75, 0.25, 0.25, 0.25]]),
    ],
    ids=str,
)
def test_advantages_by_hand(settings, expected):
    found = experience_of(**settings)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-5, atol=1e-7)
    where = WITHOUT_CUT if settings.get("truncated") == "mask" else JUDGED
    np.testing.assert_array_equal(found.mask, where.astype(np.float32), strict=True)
    np.testing.assert_array_equal(found.behavior_logps, BEHAVIOR)
    np.testing.assert_array_equal(found.reference_logps, REFERENCE)


@pytest.mark.parametrize(
    "settings, kl",
    [
        # k1, behavior - reference, summed over what counts:
        #   -1 + 2 = 1;  0 - 1 = -1;  1 + 0.5 = 1.5;  (not judged)
        #   0 + 0 = 0;  -2 + 4 = 2;  (empty) 0;  0
        ({"kl_estimator": "k1"}, [[1, -1, 1.5, 0], [0, 2, 0, 0]]),
        # half of squares: 1/2;  1/2;  (1 + 1/4) / 2;  and 0;  4/2;  0;  0
        ({"kl_estimator": "k2"}, [[0.5, 0.5, 0.625, 0], [0, 2, 0, 0]]),
        # those cut leave the loss but not the baseline, where they pay for their KL
        ({"kl_estimator": "k1", "truncated": "mask"}, [[1, -1, 1.5, 0], [0, 2, 0, 0]]),
    ],
    ids=str,
)
def test_kl_in_the_reward_by_hand(settings, kl):
    found = experience_of(kl_weight=0.5, kl_in="reward", **settings)
    total = np.array([[2.5, 0.5, 2, 0], [1, 1, 1, 1]]) - 0.5 * np.array(kl)
    means = np.array([[total[0, :3].mean()], [total[1].mean()]])
    expected = (total - means) * [[1, 1, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-5, atol=1e-6)
    # what it has said in the reward, the loss shows and no more
    terms = grpo(kl_weight=0.5, kl_in="reward", **settings).loss(
        Outputs(found.behavior_logps), found
    )
    assert terms["kl"].coefficient == 0.0
    where = WITHOUT_CUT if "truncated" in settings else JUDGED
    np.testing.assert_array_equal(found.mask, where)


def test_without_a_reference_there_is_none_and_nobody_asks_for_it():
    for settings in ({}, {"kl_in": "reward", "kl_estimator": "k1"}):
        algorithm = grpo(reward_weights=WEIGHTS, kl_weight=0.0, advantage="centered", **settings)
        experience, _ = algorithm.experience(ROLLOUT, REWARDS, Scores(), ())
        np.testing.assert_allclose(experience.advantages, CENTERED, rtol=1e-5)
        assert experience.reference_logps is None
        assert "kl" not in algorithm.loss(Outputs(jnp.asarray(BEHAVIOR)), experience)


@pytest.mark.parametrize("kl_in, estimator", [("loss", "k3"), ("reward", "k1")])
def test_a_reference_that_is_needed_and_not_there_is_not_passed_over(kl_in, estimator):
    algorithm = grpo(reward_weights=WEIGHTS, kl_in=kl_in, kl_estimator=estimator)
    with pytest.raises(ValueError, match="reference"):
        algorithm.experience(ROLLOUT, REWARDS, Scores(), ())


def test_weights_must_be_one_for_each_reward():
    with pytest.raises(ValueError, match=r"weights \(3,\).*\(2, 4, 2\)"):
        experience_of(reward_weights=(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "settings", [{}, {"advantage": "leave_one_out", "truncated": "zero"}], ids=str
)
def test_experience_of_a_slice_is_the_slice_of_the_experience(settings):
    whole = experience_of(**settings)
    algorithm = grpo(reward_weights=WEIGHTS, **{"advantage": "centered", **settings})
    for p in range(2):
        cut = lambda x: x[p : p + 1] if x.ndim else x  # noqa: B023, E731
        part, _ = algorithm.experience(*jax.tree.map(cut, (ROLLOUT, REWARDS, SCORES)), ())
        for a, b in zip(*map(jax.tree.leaves, (part, whole)), strict=True):
            np.testing.assert_allclose(a, b[p : p + 1], rtol=1e-6)


def test_sft_is_worth_1_wherever_the_data_speaks():
    experience, state = sft().experience(ROLLOUT, REWARDS, Scores(), ())
    np.testing.assert_array_equal(experience.advantages, np.ones((2, 4), np.float32), strict=True)
    np.testing.assert_array_equal(experience.mask, MASK.astype(np.float32), strict=True)
    assert state == () and experience.reference_logps is None
    logps = jnp.asarray(np.where(MASK, BEHAVIOR, np.nan))
    terms = sft().loss(Outputs(logps), experience)
    assert list(terms) == ["nll"]
    # 1 + (1 + 2) + (0.5 + 0.5) + 1 + (1 + 1) + 2 + 3 = 13, of 10 tokens
    assert tuple(map(float, terms["nll"])) == (13.0, 10.0, 1.0)
    # 1 + 3/2 + 1/2 + 1 + 1 + 2 + 3 = 10, of 7 completions
    by_sequence = sft(reduction="sequence_mean").loss(Outputs(logps), experience)["nll"]
    assert tuple(map(float, by_sequence)) == (10.0, 7.0, 1.0)


def test_packed_rows_are_no_completions():
    packed = ROLLOUT._replace(segments=jnp.zeros((2, 2), jnp.int32))
    sft().experience(packed, REWARDS, Scores(), ())
    with pytest.raises(ValueError, match="'sequence_mean' would mix its examples"):
        sft(reduction="sequence_mean").experience(packed, REWARDS, Scores(), ())


# --- Importance between sampler and trainer ------------------------------------------------------
#
# The training path finds the tokens of prompt 0 these times as likely as the sampler did; and of
# prompt 1, whose sampler kept half of the mass, half as likely as it was for what was kept.

GAP = np.array([[[3, 9], [2, 0.5], [0.5, 1], [9, 9]], [[1, 1], [1, 9], [9, 9], [1, 9]]])
KEPT = np.array([1, 0.5])[:, None, None]
CORRECTED = ROLLOUT._replace(kept_logmass=jnp.broadcast_to(jnp.log(KEPT), MASK.shape))
PROXIMAL = SCORES._replace(proximal_logps=jnp.asarray(BEHAVIOR + np.log(GAP), jnp.float32))


@pytest.mark.parametrize(
    "settings, first, second",
    [
        ({}, [[2, 1], [2, 0.5], [0.5, 1]], [[0.5, 0.5], [0.5, 1], [1, 1], [0.5, 1]]),
        ({"importance_mode": "mask"}, [[0, 1], [2, 0.5], [0.5, 1]], None),
        # 3, then 2 · 0.5 and 0.5 · 1; 0.5 · 0.5, 0.5, of nothing 1
        (
            {"importance_level": "product"},
            [[2, 2], [1, 1], [0.5, 0.5]],
            [[0.25, 0.25], [0.5, 0.5], [1, 1], [0.5, 0.5]],
        ),
        # their roots
        (
            {"importance_level": "sequence"},
            [[2, 2], [1, 1], [0.5**0.5, 0.5**0.5]],
            [[0.5, 0.5], [0.5, 0.5], [1, 1], [0.5, 0.5]],
        ),
    ],
    ids=str,
)
def test_importance_by_hand(settings, first, second):
    algorithm = grpo(reward_weights=WEIGHTS, importance_cap=2.0, **settings)
    found, _ = algorithm.experience(CORRECTED, REWARDS, PROXIMAL, ())
    assert found.importance is not None
    np.testing.assert_allclose(found.importance[0, :3], first, rtol=1e-5)
    if second is not None:
        np.testing.assert_allclose(found.importance[1], second, rtol=1e-5)
    # the ratio is to the training path, and 1 in the first update
    np.testing.assert_array_equal(found.proximal_logps, PROXIMAL.proximal_logps)
    terms = algorithm.loss(Outputs(PROXIMAL.proximal_logps), found)
    assert pair(terms["ratio"]) == pytest.approx((9, 9))
    weight = np.asarray(found.importance)
    policy = -np.sum(np.where(JUDGED, weight * np.asarray(found.advantages)[..., None], 0), -1)
    means = policy / np.maximum(JUDGED.sum(-1), 1)  # five of six have a token that is judged
    assert pair(terms["policy_loss"]) == pytest.approx((means.sum(), 6), rel=1e-5)
    ratio = "sampling/importance_sampling_ratio"
    assert pair(terms[f"{ratio}/mean"]) == pytest.approx((weight[JUDGED].sum(), 9), rel=1e-5)
    lost = 0.0 if settings.get("importance_mode") == "mask" else 2.0
    assert pair(terms[f"{ratio}/capped"]) == ((weight[JUDGED] == lost).sum(), 9)


def test_importance_off_is_as_if_it_were_not_there():
    found, _ = grpo().experience(CORRECTED, REWARDS, PROXIMAL, ())
    assert found.importance is None
    np.testing.assert_array_equal(found.behavior_logps, BEHAVIOR)
    with pytest.raises(ValueError, match="proximal log-probs are needed"):
        grpo(importance_cap=2.0).experience(CORRECTED, REWARDS, SCORES, ())


def test_importance_weighs_the_policy_and_not_its_kl():
    settings: dict[str, Any] = {"reduction": "token_mean", "kl_weight": 0.3, "importance_cap": 2.0}
    weight = jnp.array([[[2.0, 1.0], [0.5, 1.0], [2.0, 7.0], [7.0, 7.0]]])
    terms = grpo(**settings).loss(OUTPUTS, HAND._replace(importance=weight))
    assert pair(terms["policy_loss"]) == pytest.approx((-4.8 - 1 + 0.4 + 4 + 2, 5), rel=1e-5)
    assert pair(terms["kl"]) == pytest.approx((K3.sum(), 5), rel=1e-5)
    # one ratio for a completion, a weight for each of its tokens
    by_sequence = grpo(ratio_level="sequence", **settings)
    terms = by_sequence.loss(OUTPUTS, HAND._replace(importance=weight))
    expected = -2 * np.sqrt(0.75) * 3 + np.sqrt(2) * 1.5 + 2
    assert pair(terms["policy_loss"]) == pytest.approx((expected, 5), rel=1e-5)


@pytest.mark.parametrize(
    "length, level, exact", [(1, "token", True), (2, "product", True), (2, "token", False)]
)
def test_corrected_top_k_has_the_exact_gradient_of_what_was_kept(length, level, exact):
    """Every completion that top-3 of five tokens lets through, each as often as it is drawn.

    Exact is the gradient of Σ π(y) r(y) over these. A sampler that is not quite the policy draws.
    """
    vocabulary, kept = 5, np.array([0, 2, 3])
    theta = jnp.array([[0.3, -1.0, 0.8, 0.1, -0.4]] * length) * jnp.arange(1, length + 1)[:, None]
    sampler = jax.nn.log_softmax(theta + 0.1 * jnp.sin(jnp.arange(vocabulary)))
    places = np.arange(length)
    tokens = np.stack(np.meshgrid(*[kept] * length), axis=-1).reshape(-1, 1, length)
    logmass = jax.nn.logsumexp(sampler[:, kept], axis=-1)
    behavior, worth = sampler[places, tokens], 1.0 + np.sin(tokens.sum(-1) + tokens[..., 0])
    drawn = jnp.exp(jnp.sum(behavior - logmass, axis=-1))  # [P, 1]
    np.testing.assert_allclose(drawn.sum(), 1, rtol=1e-5)

    def logps_of(theta):
        return jax.nn.log_softmax(theta)[places, tokens]

    algorithm = grpo(
        advantage="raw", kl_weight=0.0, reduction="constant_length", reduction_length=1,
        importance_cap=1e6, importance_level=level,
    )  # fmt: skip
    count = len(tokens)
    rollout = Rollout(
        PromptBatch(jnp.ones((count, 1)), jnp.ones(count), jnp.arange(count)),
        jnp.asarray(tokens), jnp.full((count, 1), length), jnp.ones(tokens.shape, bool), behavior,
        jnp.broadcast_to(logmass, tokens.shape), jnp.zeros((count, 1), bool), jnp.float32(1),
    )  # fmt: skip
    # Advantages are raw, so that a completion's frequency can go into its reward.
    rewards = Rewards((drawn * worth)[..., None], jnp.ones((count, 1, 1), bool))

    def corrected(x):
        scores = Scores(proximal_logps=logps_of(theta))
        experience, _ = algorithm.experience(rollout, rewards, scores, ())
        return algorithm.loss(Outputs(logps_of(x)), experience)["policy_loss"].sum

    found = jax.jit(jax.grad(corrected))(theta)
    expected = jax.grad(lambda x: -jnp.sum(jnp.exp(logps_of(x).sum(-1)) * worth))(theta)
    gap = jnp.max(jnp.abs(found - expected))
    assert gap < 1e-6 if exact else gap > 1e-2


# --- Loss by hand --------------------------------------------------------------------------------
#
# One prompt, four completions; the last token of the third does not count, nor the whole fourth.
#
#   advantage   2           -1           -1          2
#   ratio       1.5  0.5    0.5  4       1  -        -  -
#   loss at a clip of 0.2: -min(ratio A, clip A)
#               -2.4 -1     0.8  4       1
#   clipped     high        low

LOG2 = float(np.log(2))
RATIO = np.array([[[1.5, 0.5], [0.5, 4.0], [1.0, 77.0], [3.0, 3.0]]])
COUNTS = np.array([[[1, 1], [1, 1], [1, 0], [0, 0]]], np.float32)
LOGPS = np.log(np.array([[[0.6, 0.2], [0.25, 0.8], [0.5, 0.9], [0.3, 0.6]]]))
# π_ref / π: 2 1  1/2 1  2 -  - -
REFERENCE_RATIO = np.array([[[2.0, 1.0], [0.5, 1.0], [2.0, 99.0], [9.0, 9.0]]])
HAND = Experience(
    jnp.array([[2.0, -1.0, -1.0, 2.0]]),
    jnp.asarray(COUNTS),
    jnp.asarray(LOGPS - np.log(RATIO), jnp.float32),
    jnp.asarray(LOGPS + np.log(REFERENCE_RATIO), jnp.float32),
)
OUTPUTS = Outputs(jnp.asarray(LOGPS, jnp.float32), jnp.asarray(np.arange(8.0).reshape(1, 4, 2)))
# k3 of d = ln(π_ref / π): ln 2, 0 | -ln 2, 0 | ln 2
K3 = np.array([1 - LOG2, 0, LOG2 - 0.5, 0, 1 - LOG2])
# settings, the sum of the policy loss, that of k3, the weight of both
REDUCTIONS: dict[str, tuple[dict[str, Any], float, float, float]] = {
    # the first four halved, of three completions
    "sequence_mean": ({}, -1.7 + 2.4 + 1, K3 @ [0.5, 0.5, 0.5, 0.5, 1], 3),
    "token_mean": ({}, -3.4 + 4.8 + 1, K3.sum(), 5),
    "constant_length": ({"reduction_length": 10}, -3.4 + 4.8 + 1, K3.sum(), 3 * 10),
}


def pair(term: Any) -> tuple[float, float]:
    return float(term.sum), float(term.weight)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_terms_by_hand(reduction):
    settings, policy, kl, weight = REDUCTIONS[reduction]
    terms = grpo(reduction=reduction, kl_weight=0.3, **settings).loss(OUTPUTS, HAND)
    assert pair(terms["policy_loss"]) == pytest.approx((policy, weight), rel=1e-5)
    assert pair(terms["kl"]) == pytest.approx((kl, weight), rel=1e-5)
    # of five tokens: ratios 1.5 + 0.5 + 0.5 + 4 + 1; entropies 0 + 1 + 2 + 3 + 4; one high, one low
    assert pair(terms["ratio"]) == pytest.approx((7.5, 5), rel=1e-5)
    assert pair(terms["entropy"]) == (10, 5)
    assert pair(terms["clip_ratio/high_mean"]) == pair(terms["clip_ratio/low_mean"]) == (1, 5)
    assert pair(terms["clip_ratio/region_mean"]) == (2, 5)
    coefficients = {name: float(term.coefficient) for name, term in terms.items()}
    assert coefficients.pop("policy_loss") == 1 and coefficients.pop("kl") == 0.3
    assert set(coefficients.values()) == {0.0}  # the others are metrics
    without = grpo(reduction=reduction, **settings).loss(Outputs(OUTPUTS.logps), HAND)
    assert terms.keys() - without.keys() == {"entropy"}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, K3.sum()),
        # half of squares of ln 2, thrice
        ({"kl_estimator": "k2"}, 1.5 * LOG2**2),
        # by the tokens' ratios 1.5, 0.5, 1, however the loss weighs its own
        ({"kl_estimator": "k3_weighted"}, 2.5 * (1 - LOG2) + 0.5 * (LOG2 - 0.5)),
        (
            {"kl_estimator": "k3_weighted", "ratio_level": "sequence"},
            2.5 * (1 - LOG2) + 0.5 * (LOG2 - 0.5),
        ),
    ],
    ids=str,
)
def test_kl_in_the_loss_by_hand(settings, expected):
    terms = grpo(reduction="token_mean", kl_weight=0.3, **settings).loss(OUTPUTS, HAND)
    assert pair(terms["kl"]) == pytest.approx((expected, 5), rel=1e-5)


@pytest.mark.parametrize(
    "settings, expected",
    [
        # 1.5 is let through below 1.6, 0.5 above 0.4
        ({"clip_low": 0.6, "clip_high": 0.6}, -3 - 1 + 0.5 + 4 + 1),
        ({"clip_high": 0.6}, -3 - 1 + 0.8 + 4 + 1),
        ({"clip_low": 0.6}, -2.4 - 1 + 0.5 + 4 + 1),
        # the dual clip bounds the 4 of a bad token
        ({"dual_clip": 3.0}, -2.4 - 1 + 0.8 + 3 + 1),
        # of sequences: sqrt(1.5 · 0.5), sqrt(0.5 · 4), 1; all tokens of one alike
        ({"ratio_level": "sequence"}, 2 * -2 * np.sqrt(0.75) + 2 * np.sqrt(2) + 1),
    ],
    ids=str,
)
def test_clips_and_levels_by_hand(settings, expected):
    terms = grpo(reduction="token_mean", kl_weight=0.0, **settings).loss(OUTPUTS, HAND)
    assert pair(terms["policy_loss"]) == pytest.approx((expected, 5), rel=1e-5)


def test_metrics_of_sequence_ratios_are_of_tokens_too():
    terms = grpo(ratio_level="sequence", clip_high=0.2).loss(OUTPUTS, HAND)
    # sqrt(3/4) and sqrt(2), each twice, and 1; none is outside and pulled: A < 0 where it is high
    ratios = 2 * np.sqrt(0.75) + 2 * np.sqrt(2) + 1
    assert pair(terms["ratio"]) == pytest.approx((ratios, 5), rel=1e-5)
    assert pair(terms["clip_ratio/region_mean"]) == (0, 5)


# --- Its relatives by hand -----------------------------------------------------------------------
#
# name: settings; the advantages of `REWARDS`; sum and weight of the policy's loss of `HAND`.

CLIPPED = -2.4 - 1 + 0.8 + 4 + 1
LOG = np.log([0.6, 0.2, 0.25, 0.8, 0.5])  # of the tokens that count
SCALED = np.array(CENTERED) / (np.sqrt(78 / 72) + 1e-4)


def gate(ratio: float, tau: float) -> float:
    return float(4 / tau / (1 + np.exp(-tau * (ratio - 1))))


def white(tokens: list[float]) -> np.ndarray:
    """Of mean 0 and deviation 1, at the nine tokens that are judged."""
    found = np.zeros((2, 4, 2))
    found[JUDGED] = (np.array(tokens) - np.mean(tokens)) / np.std(tokens, ddof=1)
    return found


RELATIVES: dict[str, tuple[dict[str, Any], Any, float, float]] = {
    "dr_grpo": ({"reduction_length": 10}, CENTERED, CLIPPED, 3 * 10),
    "dapo": ({}, SCALED, -2.56 - 1 + 0.8 + 4 + 1, 5),
    "bnpo": ({}, SCALED, CLIPPED, 5),
    # sqrt(3/4), sqrt(2) and 1, each within its clip or on the side that is not clipped
    "gspo": ({}, SCALED, -2 * np.sqrt(0.75) + np.sqrt(2) + 1, 3),
    # 1.5 · 2, 0.5 · 2, then -1 times 0.5, 4, 1
    "cispo": ({}, SCALED, -np.dot([3, 1, -0.5, -4, -1], LOG), 5),
    "sapo": (
        {},
        SCALED,
        -(gate(1.5, 1) + gate(0.5, 1)) + (gate(0.5, 1.05) + gate(4, 1.05)) / 2 + gate(1, 1.05),
        3,
    ),
    # 1.5 · 0.5 = 0.75, 0.5 · 4 = 2 and 1; the 0.75 of what is good is not clipped
    "rloo": ({"kl_weight": 0.0}, 1.5 * np.array(CENTERED), -1.5 + 2 + 1, 3),
    "reinforce_pp": (
        {"kl_weight": 0.0},
        white([2.5, 0.5, 0.5, 2, 2, 1, 1, 1, 1]),
        CLIPPED,
        5,
    ),
    "reinforce_pp_baseline": (
        {"kl_weight": 0.0},
        white([5 / 6, -7 / 6, -7 / 6, 1 / 3, 1 / 3, 0, 0, 0, 0]),
        CLIPPED,
        5,
    ),
    # one of the two groups varies
    "gpg": ({}, 2 * np.array(CENTERED), -np.dot([2, 2, -1, -1, -1], LOG), 5),
    "maxrl": ({}, np.array(CENTERED) / (5 / 3), CLIPPED, 5),
    # 2.5 and 2 are more than 1
    "rft": (
        {"threshold": 1.0},
        [[1, 0, 1, 0], [0, 0, 0, 0]],
        -np.dot([1, 1, -0.5, -0.5, -1], LOG),
        3,
    ),
}
every_relative = pytest.mark.parametrize("name", RELATIVES)


@every_relative
def test_relatives_by_hand(name):
    settings, expected, total, weight = RELATIVES[name]
    algorithm = getattr(algorithms, name)(reward_weights=WEIGHTS, **settings)
    scores = SCORES if algorithm.needs_reference else Scores()
    found, _ = algorithm.experience(ROLLOUT, REWARDS, scores, ())
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-4, atol=1e-6)
    where = WITHOUT_CUT if name == "dapo" else JUDGED
    np.testing.assert_array_equal(found.mask, where.astype(np.float32), strict=True)
    terms = algorithm.loss(OUTPUTS, HAND)
    assert pair(terms["policy_loss"]) == pytest.approx((total, weight), rel=1e-5)
    assert terms["policy_loss"].coefficient == 1


@every_relative
def test_weights_do_not_depend_on_what_the_model_says(name):
    share = 1.0 if name in ("gspo", "rloo") else 0.5
    algorithm = getattr(algorithms, name)(top_entropy=share, **RELATIVES[name][0])
    said = algorithm.loss(OUTPUTS, HAND)
    silent = algorithm.loss(Outputs(jnp.zeros_like(OUTPUTS.logps), jnp.zeros((1, 4, 2))), HAND)
    assert {k: float(t.weight) for k, t in said.items()} == {
        k: float(t.weight) for k, t in silent.items()
    }


def test_kl_of_reinforce_pp_is_of_what_comes_after():
    algorithm = reinforce_pp(reward_weights=WEIGHTS, kl_weight=0.5)
    found, _ = algorithm.experience(ROLLOUT, REWARDS, SCORES, ())
    # k1 from each token on: 1 | -1 -1 | 1.5 0.5 || 0 0 | 2 | 0
    tokens = [2.5 - 0.5, 1, 1, 2 - 0.75, 2 - 0.25, 1, 1, 1 - 1, 1]
    np.testing.assert_allclose(found.advantages, white(tokens), rtol=1e-4, atol=1e-6)
    assert algorithm.loss(Outputs(found.behavior_logps), found)["kl"].coefficient == 0


def test_gdpo_by_hand():
    found = experience_of(advantage="batch_standardized", standardize_each=True)
    # The first reward of prompt 0: 2 0 2, of deviation sqrt(4/3); all others are constant. Over all
    # seven that are judged: squares of 1/√3, 2/√3, 1/√3 and four 0, of 6.
    z = np.array([2 / 3, -4 / 3, 2 / 3, 0]) / (np.sqrt(4 / 3) + 1e-4)
    expected = [z / (np.sqrt(2 / 6) + 1e-4), np.zeros(4)]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-3, atol=1e-6)


def test_gdpo_scores_what_was_cut_0():
    found = experience_of(advantage="raw", standardize_each=True, truncated="zero")
    # prompt 0: 2 0 2 as before, and 1 0 of the second; prompt 1: 0 1 1 1 and 0 - 0 0
    first = np.array([2 / 3, -4 / 3, 2 / 3, 0]) / np.sqrt(4 / 3)
    second = np.array([0.5, -0.5, 0, 0]) / np.sqrt(1 / 2)
    expected = [first + second / 2, np.array([-0.75, 0.25, 0.25, 0.25]) / 0.5]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-3)


def test_only_tokens_of_high_entropy_pull():
    settings: dict[str, Any] = {"reduction": "token_mean", "kl_weight": 0.3}
    # entropies 0 to 4 of the five that count: the 0.6 quantile is 2.4, so 3 and 4 are left
    terms = grpo(**settings, top_entropy=0.4).loss(OUTPUTS, HAND)
    assert pair(terms["policy_loss"]) == pytest.approx((4 + 1, 5), rel=1e-5)
    assert pair(terms["kl"]) == pytest.approx((K3.sum(), 5), rel=1e-5)
    with pytest.raises(ValueError, match="the entropy of tokens is needed"):
        grpo(top_entropy=0.4).loss(Outputs(OUTPUTS.logps), HAND)


def test_metrics_of_the_clip_are_those_of_its_kind():
    terms = algorithms.cispo(clip_high=0.2).loss(OUTPUTS, HAND)
    assert pair(terms["cispo_clip_ratio"]) == (1, 5)  # 1.5 of what is good
    for name, metrics in [("gspo", 3), ("sapo", 0), ("gpg", 0), ("rft", 0)]:
        terms = getattr(algorithms, name)().loss(OUTPUTS, HAND)
        assert sum(key.startswith("clip_ratio/") for key in terms) == metrics


def test_rft_pulls_at_what_is_accepted_and_at_nothing_else():
    algorithm = rft(threshold=0.5)
    before, after = descend(algorithm, bandit(), [1, 0.5, 0, 0], START, START)
    assert likely(after) > likely(before) + 0.004
    before, after = descend(algorithm, bandit(), [0.5, 0.5, 0, 0], START, START)
    np.testing.assert_array_equal(after, before)


# --- A bandit ------------------------------------------------------------------------------------
#
# A policy of four logits that says the same everywhere. Each group tries every arm once, arm 0
# being right; a completion says its arm once (arm 0) or twice (the others).

ARMS = 4
START = jnp.array([-0.3, 0.2, 0.4, 0.1])
SKEWED = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))


def logps_of(logits: Any) -> jax.Array:
    """[P, G, C]."""
    logps = jax.nn.log_softmax(logits)
    return jnp.broadcast_to(logps[:, None], (2, ARMS, 2))


def bandit(behavior: Any = START, cut: int | None = None) -> Rollout:
    lengths = jnp.array([[1, 2, 2, 2]] * 2)
    mask = jnp.arange(2) < lengths[..., None]
    prompts = PromptBatch(jnp.ones((2, 1), jnp.int32), jnp.ones(2, jnp.int32), jnp.arange(2))
    arms = jnp.broadcast_to(jnp.arange(ARMS)[:, None], (2, ARMS, 2))
    truncated = jnp.zeros((2, ARMS), bool)
    if cut is not None:
        truncated = truncated.at[:, cut].set(True)
    return Rollout(
        prompts, jnp.where(mask, arms, 0), lengths, mask,
        jnp.where(mask, logps_of(behavior), 0), jnp.zeros(mask.shape), truncated, jnp.float32(1),
    )  # fmt: skip


def descend(
    algorithm: Algorithm,
    rollout: Rollout,
    rewards: Any,
    start: Any,
    reference: Any,
    passes: int = 1,
) -> list[jax.Array]:
    """The logits before and after each step on one rollout."""
    values = jnp.broadcast_to(jnp.asarray(rewards, jnp.float32)[:, None], (2, ARMS, 1))
    scores = Scores(reference_logps=logps_of(reference) if algorithm.needs_reference else None)
    judged = Rewards(values, jnp.ones(values.shape, bool))
    experience, _ = algorithm.experience(rollout, judged, scores, algorithm.state)

    def loss(logits: jax.Array) -> jax.Array:
        terms = algorithm.loss(Outputs(logps_of(logits)), experience).values()
        return sum((t.coefficient * t.sum / t.weight for t in terms), jnp.float32(0))

    gradient = jax.jit(jax.grad(loss)) if passes > 1 else jax.grad(loss)
    path = [start]
    for _ in range(passes):
        path.append(path[-1] - 0.3 * gradient(path[-1]))
    return path


LEARNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo without kl": ("grpo", {"kl_weight": 0.0}),
    "grpo with k2": ("grpo", {"kl_estimator": "k2"}),
    "grpo with weighted k3": ("grpo", {"kl_estimator": "k3_weighted"}),
    "grpo with kl in the reward": ("grpo", {"kl_in": "reward", "kl_estimator": "k1"}),
    "grpo with kl to go": ("grpo", {"kl_in": "reward_to_go", "kl_estimator": "k1"}),
    "gdpo": ("grpo", {"standardize_each": True, "advantage": "batch_standardized"}),
    "dual clip": ("grpo", {"dual_clip": 3.0}),
    "cut ones score 0": ("grpo", {"truncated": "zero"}),
    "lite ppo": ("grpo", {"advantage": "batch_standardized", "reduction": "token_mean"}),
    "dr. grpo": ("dr_grpo", {"reduction_length": 2}),
    **{name: (name, {}) for name in RELATIVES if name not in ("dr_grpo", "rft")},
}


def learner(name: str, **more: Any) -> Algorithm:
    constructor, settings = LEARNS[name]
    return getattr(algorithms, constructor)(**{**settings, **more})


def likely(logits: Any) -> float:
    return float(jax.nn.softmax(logits)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_a_step_makes_what_was_rewarded_likelier(name):
    algorithm = learner(name)
    before, after = descend(algorithm, bandit(cut=3), [1, 0, 0, 0], START, START)
    assert likely(after) > likely(before) + 0.004
    before, after = descend(algorithm, bandit(cut=3), [0, 1, 1, 1], START, START)
    assert likely(after) < likely(before) - 0.004
    # what is the same for all teaches nothing: exactly
    before, after = descend(algorithm, bandit(), [0.1] * 4, START, START)
    np.testing.assert_allclose(
        after, before, atol=0 if algorithm.needs_reference is False else 1e-7
    )


@pytest.mark.parametrize("name", ["grpo without kl", "dr. grpo", "dapo", "maxrl"])
def test_more_passes_go_further_until_the_clip_stops_them(name):
    algorithm = learner(name, kl_weight=0.0)
    path = descend(algorithm, bandit(), [1, 0, 0, 0], START, START, passes=60)
    likelihoods = [likely(logits) for logits in path]
    assert all(b > a for a, b in zip(likelihoods[:3], likelihoods[1:4], strict=True))
    # at last every token that is still pulled was clipped: nothing moves any more
    np.testing.assert_array_equal(path[-1], path[-2])
    ratio = np.exp(np.asarray(logps_of(path[-1]) - logps_of(START)))[0, :, 0]
    high = 1.28 if name == "dapo" else 1.2
    assert ratio[0] > high and np.all(ratio[1:] < 0.8)


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3"},
        {"kl_estimator": "k3_weighted"},
        {"kl_in": "reward", "kl_estimator": "k1", "advantage": "centered"},
    ],
    ids=str,
)
def test_kl_pulls_towards_the_reference(settings):
    """From the even policy, of which a group of every arm once is a fair sample."""
    even = jnp.zeros(ARMS)
    algorithm = grpo(kl_weight=1.0, reduction="sequence_mean", **settings)
    before, after = descend(algorithm, bandit(even), [0.5] * 4, even, SKEWED)

    def kl(logits: Any) -> float:
        logps = jax.nn.log_softmax(logits)
        return float(jnp.sum(jnp.exp(logps) * (logps - SKEWED)))

    assert kl(after) < kl(before) - 0.01
    # the order of the arms becomes the reference's
    assert np.all(np.diff(after) > 0)


def test_sft_makes_the_data_likelier():
    rollout = bandit(behavior=jnp.zeros(ARMS))
    rollout = rollout._replace(mask=rollout.mask & (jnp.arange(ARMS) == 0)[:, None])
    path = descend(sft(), rollout, [0, 0, 0, 0], START, START, passes=2)
    assert likely(path[0]) + 0.05 < likely(path[1]) < likely(path[2])
