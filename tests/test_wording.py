"""Keywords, regular expressions on hostile texts, and multiple choice."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jax_grpo.rewards.contract import score
from jax_grpo.rewards.multiple_choice import choice
from jax_grpo.rewards.naming import resolve
from jax_grpo.rewards.wording import keywords, pattern


def chat(text):
    return [{"role": "assistant", "content": text}]


# ------------------------------------------------------------------------------------ keywords


@pytest.mark.parametrize(
    ("text", "wanted", "value"),
    [
        ("The cat and the dog.", ["cat", "dog"], 1.0),
        ("The CAT!", ["cat", "dog"], 0.5),
        ("concatenate cats, cat_ 1cat", ["cat"], 0.0),
        ("New\n York", ["new york"], 1.0),
        ("york new", ["new york"], 0.0),
        ("c++ and .net", ["C++", ".NET"], 1.0),
        ("a.b", ["a*b"], 0.0),
        ("<think>cat</think>dog", ["cat"], 0.0),
        ("cat", "cat", 1.0),
        ("cat", ["cat", "cat", "dog"], 0.5),  # each counts once
        ("stra\u00dfe", ["STRASSE"], 0.0),
        ("cat", [], None),
        ("cat", None, None),
        ("cat", ["", " "], None),
        ("", ["cat"], 0.0),
    ],
)
def test_keywords(text, wanted, value):
    assert keywords(["p"], [text], [wanted]) == [value]
    assert keywords(["p"], [chat(text)], [wanted]) == [value]


def test_keywords_of_every_row_and_forbidden_ones():
    reward = resolve("keywords", words=("cat",), forbidden=("mouse",), reward=2.0)
    texts = ["cat", "cat dog", "dog", "cat dog mouse"]
    values, _ = score([reward], ["p"] * 4, texts, [[1]] * 4, {"keywords": [["dog"]] * 4})
    assert values[:, 0].tolist() == [1.0, 2.0, 1.0, 0.0]
    values, _ = score([reward], ["p"] * 4, texts, [[1]] * 4)
    assert values[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert keywords(["p"] * 2, ["cat", "c a t"], words="cat", forbidden="mouse") == [1.0, 0.0]


# ------------------------------------------------------------------------- regular expressions


def matches(text, **settings):
    extras = {}
    [value] = pattern(["p"], [text], log_extra=extras.__setitem__, **settings)
    return value, extras["pattern/status"][0], extras["pattern/why"][0]


@pytest.mark.parametrize(
    ("regex", "whole", "text", "value"),
    [
        ("b+", False, "abba", 1.0),
        ("b+", True, "abba", 0.0),
        ("[ab]+", True, " abba\n", 1.0),
        ("^a$", False, "b\na", 0.0),
        ("(?m)^a$", False, "b\na", 1.0),
        ("(?i)A", False, "a", 1.0),
        ("a", False, "<think>a</think>b", 0.0),
        ("$", False, "", 1.0),
        ("\ud800", False, "\ud800", 1.0),
    ],
)
def test_pattern(regex, whole, text, value):
    status = "match" if value else "none"
    assert matches(text, regex=regex, whole=whole)[:2] == (value, status)
    assert matches(chat(text), regex=regex, whole=whole, reward=2.0)[:2] == (2 * value, status)


def test_pattern_says_where():
    assert matches("abba", regex="b+")[2] == "at character 1"


@pytest.mark.parametrize("regex", ["", "(", "*", "a{2,1}", "(?P<a>.)(?P<a>.)", "(" * 200])
def test_patterns_that_are_refused(regex):
    with pytest.raises(ValueError, match="not a regular expression: ") as error:
        pattern(["p"], ["a"], regex=regex)
    assert "\n" not in str(error.value)


def test_a_deadline_is_above_0():
    with pytest.raises(ValueError, match="seconds is 0, and not above 0"):
        pattern(["p"], ["a"], regex="a", seconds=0)


def test_catastrophic_patterns_end_at_the_deadline():
    texts = ["aab"] * 20 + ["a" * 40] + ["aab"] * 20
    assert (
        pattern(["p"] * 41, texts, regex="(a|a)*b", seconds=0.5) == [1.0] * 20 + [0.0] + [1.0] * 20
    )
    began = time.perf_counter()
    assert matches("a" * 40, regex="(a|a)*b", seconds=0.5)[:2] == (0.0, "timeout")
    assert time.perf_counter() - began < 1.5


def test_long_texts_match_nothing():
    extras = {}
    values = pattern(
        ["p"] * 3,
        ["a", "a" * 10**6, f"<think>{'b' * 10**6}</think>a"],
        regex="a",
        log_extra=extras.__setitem__,
    )
    assert values == [1.0, 0.0, 1.0]
    assert extras["pattern/status"] == ["match", "too_large", "match"]
    assert pattern([], [], regex="a") == []


# ----------------------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("text", "status", "value"),
    [
        ("B", "found", 1),
        ("(B).", "found", 1),
        ("**B**\n", "found", 1),
        ("Answer: B", "found", 1),
        ("The answer is B.", "found", 1),
        ("the ANSWER is: **(B)** Paris", "found", 1),
        ("Final Answer:\n\nB", "found", 1),
        ("<answer>B</answer>", "found", 1),
        ("<think>A</think><answer>\nB\n</answer>", "found", 1),
        (r"\boxed{B}", "found", 1),
        (r"\boxed{\text{(B)}}", "found", 1),
        (r"Not A, so \boxed{B}", "found", 1),
        ("A? No.\nAnswer: B\nIndeed the answer is B.", "found", 1),
        ("Answer: 'B'", "found", 1),
        ("Answer: C", "found", 0),
        ("<think>Answer: B</think>Answer: C", "found", 0),
        ("Answer: A or B", "several", 0),
        ("Answer: B\nAnswer: C", "several", 0),
        (r"\boxed{B} \boxed{C}", "several", 0),
        (r"\boxed{A, B, C, D}", "several", 0),
        ("Answer: ABCDE", "none", 0),
        ("Answer: B's", "none", 0),
        ("Answer: BB", "none", 0),
        ("Answer: b", "none", 0),
        ("Answer: \u0412", "none", 0),  # Cyrillic
        ("Answer: \uff22", "none", 0),  # full width
        ("Answer: Z", "none", 0),
        ("I like B", "none", 0),
        ("Plan B", "none", 0),
        ("<think>Answer: B", "none", 0),
        ("A B C D E", "none", 0),
        ("", "none", 0),
    ],
)
def test_choice(text, status, value):
    extras = {}
    for completion in (text, chat(text)):
        assert choice(["p"], [completion], ["B"], log_extra=extras.__setitem__) == [value]
        assert extras["choice/status"] == [status]


@pytest.mark.parametrize(
    ("answer", "letters", "value"),
    [
        ("B", "AB", 3.0),
        (" (b) ", "AB", 3.0),
        (1, "AB", 3.0),
        (np.int64(1), "AB", 3.0),
        (0, "AB", 0.0),
        (0, "BA", 3.0),
    ]
    + [(None, "AB", None), ("", "AB", None), (float("nan"), "AB", None)],
)
def test_what_the_data_may_say(answer, letters, value):
    assert choice(["p"], ["Answer: B"], [answer], letters=letters, reward=3.0) == [value]


@pytest.mark.parametrize("answer", ["F", "AB", 5, -1, True, 1.5, "Paris", ["A"]])
def test_answers_that_are_none_of_the_letters(answer):
    with pytest.raises(ValueError, match="row 1: the answer .* is none of ABCDE"):
        choice(["p"] * 2, ["A"] * 2, ["A", answer])


@pytest.mark.parametrize("letters", ["", "ab", "A,B", "1"])
def test_letters_that_are_refused(letters):
    with pytest.raises(ValueError, match="letters are capitals from A to Z, not"):
        choice(["p"], ["A"], ["A"], letters=letters)


def test_statuses_of_choices():
    metrics, extras = {}, {}
    logs = {"log_metric": metrics.__setitem__, "log_extra": extras.__setitem__}
    assert choice(["p"] * 2, ["Answer: C or B", "B"], ["B", None], **logs) == [0.0, None]
    assert metrics == {"choice/several": 0.5, "choice/no_gold": 0.5}
    assert extras["choice/why"][0] == "B, C for B"


@pytest.mark.parametrize(
    "text",
    ["answer" * 200_000, "answer " * 150_000, "answer" + " " * 10**6, "A " * 500_000, "*" * 10**6],
    ids=lambda text: text[:12],
)
def test_hostile_texts_take_no_time(text):
    began = time.perf_counter()
    assert choice(["p"], [text], ["B"]) == [0.0]
    assert keywords(["p"], [text], [["answer b", "a"]])[0] is not None
    assert time.perf_counter() - began < 2.0
