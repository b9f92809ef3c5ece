"""Drawing a token: frequencies, kept sets worked by hand, and keys that say what a draw is for."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.sampling import Truncation, draw, draw_keys, purpose_key

pytestmark = pytest.mark.usefixtures("strict")

KEY = purpose_key(7, 0, 0, 0)
ANY_TOKEN = Truncation()
PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.25, 0.2])


@functools.cache
def drawer(truncation: Truncation = ANY_TOKEN, greedy: bool = False) -> Any:
    return jax.jit(functools.partial(draw, truncation=truncation, greedy=greedy))


def many(position: int = 0, truncation: Truncation = ANY_TOKEN) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and kept mass [500, 16], all drawn with the same probabilities."""
    scores = jnp.broadcast_to(jnp.log(jnp.float32(PROBABILITIES)) - 3.0, (500, 16, 5))
    keys = draw_keys(KEY, jnp.arange(500), 16)
    tokens, kept = drawer(truncation)(keys, jnp.int32(position), scores)
    assert (tokens.dtype, kept.dtype) == (jnp.int32, jnp.float32)
    return np.asarray(tokens), np.asarray(kept)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(np.sum((counts - expected) ** 2 / expected))


# What chi-square exceeds once in 10,000 samples, by degrees of freedom.
RARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 24: 58.61}


# --- Frequencies ---------------------------------------------------------------------------------


def test_frequencies_match_softmax():
    tokens, kept = many()
    counts = np.bincount(tokens.ravel(), minlength=5)
    assert chi_square(counts, PROBABILITIES) < RARE[4]
    # a test that could fail: the same counts are not those of slightly other probabilities
    assert chi_square(counts, np.array([0.05, 0.4, 0.1, 0.2, 0.25])) > RARE[4]
    np.testing.assert_array_equal(kept, 0.0)


def test_draws_for_different_things_are_independent():
    tokens, later = many()[0], many(position=1)[0]
    pairs = {
        "positions": (tokens, later),
        "completions": (tokens[:, :8], tokens[:, 8:]),
        "rows": (tokens[:250], tokens[250:]),
        "the next completion at the position before": (tokens[:, 1:], later[:, :-1]),
    }
    for name, (a, b) in pairs.items():
        counts = np.bincount(a.ravel() * 5 + b.ravel(), minlength=25)
        both = np.outer(PROBABILITIES, PROBABILITIES).ravel()
        assert chi_square(counts, both) < RARE[24], name


@pytest.mark.parametrize(
    "truncation, kept",
    [
        (Truncation(top_k=3), [1, 3, 4]),
        (Truncation(top_p=0.5), [1, 3]),
        (Truncation(min_p=0.2), [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_truncated_frequencies_match_what_is_kept(truncation, kept):
    tokens, logmass = many(truncation=truncation)
    counts = np.bincount(tokens.ravel(), minlength=5)
    mass = PROBABILITIES[kept].sum()
    assert counts[kept].sum() == tokens.size
    assert chi_square(counts[kept], PROBABILITIES[kept] / mass) < RARE[len(kept) - 1]
    np.testing.assert_allclose(logmass, np.log(mass), rtol=1e-5)


# --- What is kept, by hand -----------------------------------------------------------------------
#
# Of 0.05 0.4 0.1 0.25 0.2, by falling likelihood: 1 (0.4), 3 (0.25), 4 (0.2), 2 (0.1), 0 (0.05);
# the mass before each: 0, 0.4, 0.65, 0.85, 0.95.

ALL = [0, 1, 2, 3, 4]
KEPT: list[tuple[dict[str, Any], list[int]]] = [
    ({}, ALL),
    ({"top_k": 1}, [1]),
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 4}, [1, 2, 3, 4]),
    ({"top_k": 5}, ALL),
    ({"top_k": 99}, ALL),
    ({"top_p": 1e-6}, [1]),  # one is always kept
    ({"top_p": 0.39}, [1]),
    ({"top_p": 0.41}, [1, 3]),  # 0.4 does not reach it, 0.65 does
    ({"top_p": 0.64}, [1, 3]),
    ({"top_p": 0.66}, [1, 3, 4]),
    ({"top_p": 0.94}, [1, 2, 3, 4]),
    ({"top_p": 0.96}, ALL),
    ({"min_p": 0.12}, ALL),  # at least 0.048
    ({"min_p": 0.13}, [1, 2, 3, 4]),  # 0.052
    ({"min_p": 0.26}, [1, 3, 4]),  # 0.104
    ({"min_p": 0.6}, [1, 3]),  # 0.24
    ({"min_p": 1.0}, [1]),
    # together they keep what each of them keeps
    ({"top_k": 3, "top_p": 0.41}, [1, 3]),
    ({"top_k": 2, "top_p": 0.94}, [1, 3]),
    ({"top_k": 4, "top_p": 0.94, "min_p": 0.26}, [1, 3, 4]),
]


@pytest.mark.parametrize("settings, kept", KEPT, ids=str)
def test_kept_sets_worked_by_hand(settings, kept):
    truncation = Truncation(**settings)
    logps = jnp.log(jnp.float32(PROBABILITIES))
    found = truncation.keeps(logps)
    np.testing.assert_array_equal(np.flatnonzero(found), kept)
    # each row by itself: the same in another order beside one that is flat
    both = jnp.stack([logps[::-1], jnp.log(jnp.full(5, 0.2, jnp.float32))])
    np.testing.assert_array_equal(truncation.keeps(both)[0], found[::-1])
    # the draw says the log of their mass: 0, exactly, where nothing was cut
    keys = draw_keys(KEY, jnp.arange(1), 1)
    _, logmass = draw(keys, jnp.int32(0), (logps + 2.0)[None, None], truncation)
    np.testing.assert_allclose(
        logmass[0, 0], np.log(PROBABILITIES[kept].sum()), rtol=1e-5, atol=1e-7
    )
    assert (logmass[0, 0] == 0.0) == (kept == ALL)


def test_the_kept_mass_of_all_is_exactly_1():
    """And not 1 but for rounding: a log-mass that is not 0 says that something was cut."""
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(500, 16, 5)), jnp.float32)
    keys = draw_keys(KEY, jnp.arange(500), 16)
    for truncation in (Truncation(top_k=5), Truncation(min_p=1e-6)):
        _, kept = drawer(truncation)(keys, jnp.int32(0), scores)
        np.testing.assert_array_equal(kept, 0.0)


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 1.0}], ids=str)
def test_those_as_likely_as_the_last_are_kept_with_it(settings):
    logps = jnp.log(jnp.array([0.1, 0.3, 0.3, 0.3]))
    np.testing.assert_array_equal(Truncation(**settings).keeps(logps), [False, True, True, True])


def test_nothing_is_drawn_outside_what_is_kept_even_where_all_is_alike():
    scores = jnp.zeros((500, 16, 5)).at[..., 2].set(-0.01)
    keys = draw_keys(KEY, jnp.arange(500), 16)
    tokens, kept = drawer(Truncation(top_k=3))(keys, jnp.int32(0), scores)
    assert set(np.unique(tokens)) == {0, 1, 3, 4}
    np.testing.assert_allclose(kept, np.log(4 / (4 + np.exp(-0.01))), rtol=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": float("nan")}, "min_p is nan"),
    ],
)
def test_truncation_refuses_what_keeps_nothing_or_means_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        Truncation(**settings)


# --- Keys ----------------------------------------------------------------------------------------


def test_every_part_of_a_key_matters_and_nothing_else_does():
    def noise(seed, stage, purpose, step, row, completion, position):
        """What is drawn of very many tokens alike: it tells keys apart."""
        key = draw_keys(purpose_key(seed, stage, purpose, step), jnp.array([row]), completion + 1)
        flat = jnp.zeros((1, 1, 1 << 18))
        token, _ = drawer()(key[:, completion:], jnp.int32(position), flat)
        return int(token[0, 0])

    base = (3, 0, 0, 0, 0, 0, 0)
    found = {base: noise(*base)}
    for part, value in itertools.product(range(7), (1, 2)):
        parts = tuple(value if i == part else x for i, x in enumerate(base))
        found[parts] = noise(*parts)
    # and swapped values of any two parts are another key
    for i, j in itertools.combinations(range(1, 7), 2):
        for a, b in ((1, 2), (2, 1)):
            parts = tuple({i: a, j: b}.get(k, x) for k, x in enumerate(base))
            found[parts] = noise(*parts)
    assert len(found) == 1 + 14 + 2 * 15
    # of 262,144 tokens alike: 45 keys that differ meet by chance four times in a thousand
    assert len(set(found.values())) == len(found)
    assert all(noise(*parts) == token for parts, token in list(found.items())[:5])


def test_keys_do_not_know_where_a_row_stands():
    rows = jnp.array([5, 2, 9, 4_000_000])
    keys = jax.random.key_data(draw_keys(KEY, rows, 4))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(jax.random.key_data(draw_keys(KEY, rows[order], 4)), keys[order])
    np.testing.assert_array_equal(jax.random.key_data(draw_keys(KEY, rows[1:2], 4)), keys[1:2])
    np.testing.assert_array_equal(jax.random.key_data(draw_keys(KEY, rows, 2)), keys[:, :2])
    assert len({tuple(k) for k in np.asarray(keys).reshape(16, -1)}) == 16


def test_traced_and_plain_steps_give_one_key():
    traced = jax.jit(lambda step: jax.random.key_data(purpose_key(1, 2, 3, step)))(jnp.int32(4))
    np.testing.assert_array_equal(traced, jax.random.key_data(purpose_key(1, 2, 3, 4)))


# --- Greedy --------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_most_likely_whatever_the_key():
    scores = jnp.array([[[0.0, 2.0, 1.0], [3.0, 3.0, -1.0]], [[-9.0, -8.0, -7.0], [0.0, 0.0, 0.0]]])
    for seed, position in ((0, 0), (1, 5)):
        keys = draw_keys(purpose_key(seed, 0, 0, 0), jnp.arange(2), 2)
        tokens, kept = drawer(greedy=True)(keys, jnp.int32(position), scores)
        np.testing.assert_array_equal(tokens, [[1, 0], [2, 0]])
        np.testing.assert_array_equal(kept, np.zeros((2, 2), np.float32))
        assert tokens.dtype == jnp.int32
    # truncation changes nothing about it, and cuts nothing
    tokens, kept = drawer(Truncation(top_k=2, top_p=0.5), greedy=True)(keys, jnp.int32(0), scores)
    np.testing.assert_array_equal(tokens, [[1, 0], [2, 0]])
    np.testing.assert_array_equal(kept, 0.0)


def test_top_1_is_greedy():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(500, 16, 5)), jnp.float32)
    keys = draw_keys(KEY, jnp.arange(500), 16)
    tokens, kept = drawer(Truncation(top_k=1))(keys, jnp.int32(0), scores)
    np.testing.assert_array_equal(tokens, np.argmax(scores, -1))
    expected = np.max(np.asarray(jax.nn.log_softmax(scores, axis=-1)), -1)
    np.testing.assert_allclose(kept, expected, rtol=1e-5)
