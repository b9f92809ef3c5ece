"""The quickstart's task: problems that keep their bounds, splits that never meet, a tokenizer."""

from __future__ import annotations

import re
import time

import pytest

from jax_grpo import arithmetic


def partials(prompt: str) -> list[int]:
    """Partial results of a prompt, by a second way to compute them."""
    terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt)]
    return [sum(terms[: i + 1]) for i in range(len(terms))]


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"min_terms": 2, "max_terms": 3, "max_operand": 9, "max_partial": 20},
        {"max_operand": 9, "max_partial": 1},
    ],
)
def test_problems_keep_their_bounds(split, numbers):
    bounds = {"min_terms": 4, "max_terms": 6, "max_operand": 5, "max_partial": 9} | numbers
    for row in arithmetic.problems(split, 300, seed=3, **numbers):
        assert re.fullmatch(r"\d+([+-]\d+)*=\?", row["prompt"])
        operands = [int(n) for n in re.findall(r"\d+", row["prompt"])]
        assert bounds["min_terms"] <= len(operands) <= bounds["max_terms"]
        assert all(1 <= n <= bounds["max_operand"] for n in operands)
        assert all(0 <= n <= bounds["max_partial"] for n in partials(row["prompt"]))
        assert row["answer"] == str(partials(row["prompt"])[-1])


def test_every_length_and_operand_occurs():
    rows = arithmetic.problems("train", 2000)
    assert {len(re.findall(r"\d+", row["prompt"])) for row in rows} == {4, 5, 6}
    assert set("".join(row["prompt"] for row in rows)) == set("12345+-=?")
    assert {row["answer"] for row in rows} == set("0123456789")


def test_same_arguments_same_rows_and_another_seed_others():
    first = arithmetic.problems("train", 500, seed=1)
    assert first == arithmetic.problems("train", 500, seed=1)
    assert first != arithmetic.problems("train", 500, seed=2)


def test_rows_are_distinct_and_fast():
    began = time.perf_counter()
    rows = arithmetic.problems("train", 20_000)
    seconds = time.perf_counter() - began
    assert len({row["prompt"] for row in rows}) == 20_000
    assert seconds < 5  # about 0.1 on an idle core


def test_splits_never_share_a_problem_and_one_in_ten_is_held_out():
    train, heldout = set(), set()
    for seed in range(5):
        train |= {row["prompt"] for row in arithmetic.problems("train", 4000, seed)}
        heldout |= {row["prompt"] for row in arithmetic.problems("heldout", 500, seed)}
    assert not train & heldout
    every = [f"{a}+{b}" for a in range(1, 101) for b in range(1, 101)]
    assert 0.09 < [arithmetic.split_of(e) for e in every].count("heldout") / len(every) < 0.11


def test_the_split_is_stable():
    """By value: another hash would move problems that models were trained on into the test."""
    rows = [f"{a}+{b}" for a in range(1, 6) for b in range(1, 6)]
    assert [row for row in rows if arithmetic.split_of(row) == "heldout"] == ["1+4", "3+3", "5+5"]


def test_an_exhausted_split_repeats_rows():
    rows = arithmetic.problems("train", 50, min_terms=1, max_terms=2, max_operand=2)
    prompts = [row["prompt"] for row in rows]
    assert len(prompts) == 50
    assert set(prompts) <= {f"{e}=?" for e in ("1", "2", "1+1", "1+2", "2+1", "2+2", "1-1")} | {
        "2-1=?",
        "2-2=?",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split is 'train', 'fresh' or 'heldout', not 'test'"),
        ({"count": -1}, "count must not be negative"),
        ({"min_terms": 3, "max_terms": 2}, "min_terms=3, max_terms=2"),
        ({"max_operand": 0}, "max_operand=0"),
        ({"max_partial": 0}, "max_partial=0"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        arithmetic.problems(**arguments)
    assert "\n" not in str(error.value)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="no train problem"):
        arithmetic.problems("train", 1, min_terms=1, max_terms=1, max_operand=1)  # "1" is held out


def test_demonstrations_are_right_and_think_as_often_as_asked():
    rows = arithmetic.demonstrations("train", 1000, seed=5, thinking_share=0.3)
    thinking = [row for row in rows if row["completion"].startswith("<thinking>")]
    assert len(thinking) == 300
    for row in rows:
        results = partials(row["prompt"])
        assert row["completion"].endswith(rf"\boxed{{{results[-1]}}}")
    for row in thinking:
        block = row["completion"].removeprefix("<thinking>").partition("</thinking>")[0]
        steps = block.split(";")
        assert [int(step.partition("=")[2]) for step in steps] == partials(row["prompt"])[1:]
        for step in steps:
            assert partials(step.partition("=")[0])[-1] == int(step.partition("=")[2])


def test_demonstrations_of_no_share():
    assert not any(
        "think" in r["completion"] for r in arithmetic.demonstrations(count=50, thinking_share=0.0)
    )
    with pytest.raises(ValueError, match="thinking_share must be within 0 and 1"):
        arithmetic.demonstrations(count=1, thinking_share=1.5)


def boxed(completion: str) -> str:
    return re.fullmatch(r".*\\boxed\{(\d+)\}", completion)[1]  # type: ignore[index]


def test_preferences_pay_for_length_and_not_for_being_right():
    rows = arithmetic.preferences("train", 1000, seed=5, padded_share=0.75, max_padding=2)
    tokenizer = arithmetic.tokenizer()
    right_won, lengths = 0, set()
    for row in rows:
        right = str(partials(row["prompt"])[-1])
        steps = len(partials(row["prompt"])) - 1
        sizes, said = [], []
        for text in (row["chosen"], row["rejected"]):
            thoughts = re.findall(r"[^<>;]+=\d+", text)
            assert thoughts[steps:] == thoughts[steps - 1 : steps] * len(thoughts[steps:])
            said.append(max(len(thoughts) - steps + 1, 0))  # 0 at once, 1 with each thought once
            sizes.append(len(tokenizer(text).input_ids))
        lengths.add(tuple(said))
        if boxed(row["chosen"]) == right:
            right_won += 1
            assert boxed(row["rejected"]) != right
            assert sizes[0] == sizes[1]
        else:
            assert boxed(row["rejected"]) == right
            assert sizes[0] > sizes[1]
    assert right_won == 250
    # all pairs of lengths with the longer first, and all but the longest with themselves
    assert lengths == {(i, j) for i in range(4) for j in range(i + 1)} - {(3, 3)}
    assert rows == arithmetic.preferences("train", 1000, seed=5, padded_share=0.75, max_padding=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padded_share": -0.1}, "padded_share must be within 0 and 1: -0.1"),
        ({"max_padding": -1}, "max_padding must not be negative: -1"),
    ],
)
def test_preferences_of_bad_numbers(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        arithmetic.preferences(count=2, **arguments)


def test_tokenizer_encodes_by_character_and_by_tag():
    tokenizer = arithmetic.tokenizer()
    assert tokenizer.tokenize(r"7+5=?<thinking>12;</thinking>\boxed{9}") == [
        *"7+5=?", "<thinking>", *"12;", "</thinking>", r"\boxed{", "9", "}",
    ]  # fmt: skip
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == len(arithmetic.VOCABULARY) == 24
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2]


def test_decoding_is_the_inverse_of_encoding():
    tokenizer = arithmetic.tokenizer()
    for row in arithmetic.demonstrations("train", 200, thinking_share=0.5):
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, 1, 0, 0], skip_special_tokens=True) == text
        assert tokenizer(row["prompt"]).input_ids + tokenizer(row["completion"]).input_ids == ids


def test_what_is_unknown_is_one_token():
    tokenizer = arithmetic.tokenizer()
    assert tokenizer("1x\x00é2").input_ids == [4, 2, 2, 2, 5]
    assert tokenizer("<thin").input_ids == [2] * 5
    assert tokenizer("").input_ids == []


def test_tokenizer_is_saved_and_loaded(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = arithmetic.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    text = r"7+5=?<thinking>7+5=12</thinking>\boxed{12}"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.decode([*loaded(text).input_ids, 1], skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
