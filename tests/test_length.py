"""Rewards of length, with values worked by hand."""

from __future__ import annotations

import pytest

from jax_grpo.rewards import length
from jax_grpo.rewards.contract import score
from jax_grpo.rewards.naming import resolve


def ids(count):
    return list(range(count))


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        (0, 0.0),
        (12_288, 0.0),  # the paper's lengths: punished from here on
        (12_289, -1 / 4096),
        (14_336, -0.5),
        (16_384, -1.0),
        (16_385, -1.0),
        (99_999, -1.0),
    ],
)
def test_overlong(tokens, value):
    settings = {"max_length": 16_384, "buffer": 4096}
    assert length.overlong(["p"], ["c"], [ids(tokens)], **settings) == [value]
    assert length.overlong(["p"], ["c"], [ids(tokens)], penalty=4.0, **settings) == [4 * value]


@pytest.mark.parametrize("reward", [length.overlong, length.cosine])
def test_the_length_must_be_given(reward):
    with pytest.raises(ValueError, match="must be 1"):
        reward([], [], [])


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_needs_a_buffer(buffer):
    with pytest.raises(ValueError, match=f"buffer must be 1 to max_length, 100, got {buffer}"):
        length.overlong(["p"], ["c"], [ids(1)], max_length=100, buffer=buffer)


@pytest.mark.parametrize(
    ("tokens", "size", "value"),
    [
        ([], 3, 0.0),
        ([1, 1], 3, 0.0),  # too short to repeat
        ([1, 1, 1], 3, 0.0),
        ([1, 1, 1, 1], 3, -1 / 2),  # 1 of 2
        ([1] * 102, 3, -99 / 100),
        ([1, 2, 3, 1, 2, 3], 3, -1 / 4),  # 123 231 312 123
        ([1, 2, 3, 1, 2, 3], 1, -1 / 2),
        ([1, 2, 3, 4], 1, 0.0),
        ([1, 2, 1, 3, 1, 2], 2, -1 / 5),
    ],
)
def test_repetition(tokens, size, value):
    assert length.repetition(["p"], ["c"], [tokens], size=size) == [pytest.approx(value)]
    assert length.repetition(["p"], ["c"], [tokens], size=size, penalty=0.5) == [
        pytest.approx(value / 2)
    ]


def test_repetition_needs_a_size():
    with pytest.raises(ValueError, match="size must be 1 or more, got 0"):
        length.repetition(["p"], ["c"], [ids(1)], size=0)


@pytest.mark.parametrize(
    ("tokens", "right", "wrong"),
    [
        (0, 2.0, -10.0),
        (25, 1 + (1 + 2**-0.5) / 2, -10 * (1 + 2**-0.5) / 2),  # cos(pi / 4)
        (50, 1.5, -5.0),
        (75, 1 + (1 - 2**-0.5) / 2, -10 * (1 - 2**-0.5) / 2),
        (100, -10.0, -10.0),
        (200, -10.0, -10.0),
    ],
)
def test_cosine(tokens, right, wrong):
    values = length.cosine(
        ["p"] * 2, [r"\boxed{1}", r"\boxed{2}"], [ids(tokens)] * 2, max_length=100, answer=[1, 1]
    )
    assert values == [pytest.approx(right), pytest.approx(wrong)]


def test_cosine_has_nothing_to_say_where_the_verifier_has_not():
    given = (["p"], [r"\boxed{1}"], [ids(5)])
    assert length.cosine(*given, max_length=10, answer=[None]) == [None]


def test_cosine_of_another_verifier_through_the_contract():
    reward = resolve(
        "cosine", max_length=4, right=(1.0, 0.5), wrong=(0.0, 0.0), verifier="thinking"
    )
    texts = [r"<thinking>a</thinking>\boxed{1}", "no"]
    values, valid = score([reward], ["p"] * 2, texts, [ids(2)] * 2, {"level": [1, 2]})
    assert values.tolist() == [[0.75], [0.0]] and valid.all()
    with pytest.raises(ValueError, match="needs the column 'answer'; the data have: level"):
        score([resolve("cosine", max_length=4)], ["p"], ["c"], [[1]], {"level": [1]})
    with pytest.raises(ValueError, match="unknown reward 'nope'"):
        length.cosine(["p"], ["c"], [[1]], max_length=4, verifier="nope")
    with pytest.raises(ValueError, match="max_length must be 1 or more, got 0"):
        length.cosine(["p"], ["c"], [[1]], max_length=0, answer=[1])


def test_rewards_of_no_completions():
    assert length.overlong([], [], [], max_length=2, buffer=1) == []
    assert length.repetition([], [], []) == []
    assert length.cosine([], [], [], max_length=1, answer=[]) == []
