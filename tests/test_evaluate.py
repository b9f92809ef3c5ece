"""What completions are worth: from token ids to rewards, and held-out measures, worked by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo import arithmetic
from jax_grpo.data import Prompts
from jax_grpo.evaluate import Completions, Verifiers, evaluate, fetch, judge, pass_at_k
from jax_grpo.rewards.contract import RewardError
from jax_grpo.types import PromptBatch, Rollout

TOKENIZER = arithmetic.tokenizer()
PAD, END = 0, 1
ROWS = [{"prompt": f"{i}=?", "answer": str(i), "more": {"i": i}} for i in range(7)]
PROMPTS = Prompts(
    [TOKENIZER(str(row["prompt"])).input_ids for row in ROWS],
    [str(row["prompt"]) for row in ROWS],
    ROWS,
    0,
)


def ids(text: str) -> list[int]:
    return TOKENIZER(text).input_ids


def completions(rows: Sequence[int], groups: Sequence[Sequence[list[int]]]) -> Completions:
    """Lays out groups of token ids; what is behind a completion is no padding but rubbish."""
    lengths = np.array([[len(x) for x in group] for group in groups])
    laid_out = np.full((*lengths.shape, 6), 9)
    for at in np.ndindex(*lengths.shape):
        laid_out[at][: lengths[at]] = groups[at[0]][at[1]]
    return Completions(np.array(rows), laid_out, lengths, lengths == 6)


def test_judge_decodes_and_asks_everyone():
    seen: dict[str, Any] = {}

    def remember(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.5, 1.5, 2.5, 3.5]

    def even(completions: list[str], **_: Any) -> list[float | None]:
        return [None if not text else float(len(text)) for text in completions]

    verifiers = Verifiers((remember, even), ("remember", "even"), (1.0, 1.0))
    given = completions(
        [5, 2], [[[*ids("12"), END], [END]], [ids("<thinking>;3+4"), [PAD, *ids("7"), END]]]
    )
    rewards = judge(verifiers, TOKENIZER, PROMPTS, given, trainer_state="state")
    # [P, G, R], and None is 0 and not valid
    np.testing.assert_array_equal(
        rewards.values, [[[0.5, 2], [1.5, 0]], [[2.5, len("<thinking>;3+4")], [3.5, 1]]]
    )
    np.testing.assert_array_equal(
        rewards.valid, [[[True, True], [True, False]], [[True, True], [True, True]]]
    )
    assert rewards.values.dtype == np.float32
    # ordinary tags stay, special tokens go, and nothing behind the end is seen
    assert seen["completions"] == ["12", "", "<thinking>;3+4", "7"]
    assert seen["completion_ids"] == [
        [*ids("12"), END],
        [END],
        ids("<thinking>;3+4"),
        [PAD, *ids("7"), END],
    ]
    assert seen["prompts"] == ["5=?", "5=?", "2=?", "2=?"]
    assert seen["answer"] == ["5", "5", "2", "2"]
    assert seen["more"] == [{"i": 5}, {"i": 5}, {"i": 2}, {"i": 2}]
    assert seen["trainer_state"] == "state"
    assert {"log_metric", "log_extra"} < set(seen)


def test_judge_speaks_in_messages_where_prompts_do():
    seen: dict[str, Any] = {}

    def remember(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    asked = [{"role": "user", "content": "1=?"}]
    prompts = Prompts([ids("1=?")], [asked], [{"prompt": asked}], 0)
    judge(
        Verifiers((remember,), ("r",), (1.0,)),
        TOKENIZER,
        prompts,
        completions([0], [[[*ids("12"), END]]]),
    )
    assert seen["prompts"] == [asked]
    assert seen["completions"] == [[{"role": "assistant", "content": "12"}]]


def test_judge_names_the_reward_that_breaks():
    def broken(completions: list[str], **_: Any) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="'broken' gave 1 values for 2 completions"):
        judge(
            Verifiers((broken,), ("mine",), (1.0,)),
            TOKENIZER,
            PROMPTS,
            completions([0], [[ids("1"), ids("2")]]),
        )


def test_fetch_copies_to_the_host():
    zeros = jnp.zeros((2, 1, 3))
    rollout = Rollout(
        prompts=PromptBatch(zeros, zeros, jnp.array([4, 3])),
        completion_ids=jnp.arange(6).reshape(2, 1, 3),
        lengths=jnp.array([[2], [3]]),
        mask=zeros,
        behavior_logps=zeros,
        kept_logmass=zeros,
        truncated=jnp.array([[False], [True]]),
        temperature=jnp.float32(1),
    )
    found = fetch(rollout)
    assert all(isinstance(x, np.ndarray) for x in found)
    assert [x.tolist() for x in found] == [
        [4, 3],
        [[[0, 1, 2]], [[3, 4, 5]]],
        [[2], [3]],
        [[False], [True]],
    ]


class Answers:
    """A policy that answers `said[row]`, and remembers what it was asked."""

    def __init__(self, said: Sequence[str]) -> None:
        self.said, self.batches, self.keys = said, [], []  # type: ignore[var-annotated]

    def __call__(self, params: Any, prompts: PromptBatch, key: Any) -> Rollout:
        assert params == "params"
        rows = np.asarray(prompts.rows) % len(PROMPTS.rows)  # repeats go by another number
        self.batches.append(rows.tolist())
        self.keys.append(key)
        width = prompts.token_ids.shape[1]
        for row, line, length in zip(rows, prompts.token_ids, prompts.lengths, strict=True):
            asked = PROMPTS.token_ids[row]
            assert (line.tolist(), length) == (asked + [0] * (width - len(asked)), len(asked))
        made = completions(rows.tolist(), [[[*ids(self.said[row]), END][:6]] for row in rows])
        return Rollout(
            prompts,
            made.ids,
            made.lengths,
            None,
            None,
            None,
            made.truncated,
            None,  # type: ignore
        )


@pytest.mark.parametrize("batch", [1, 3, 7, 16])
def test_evaluate_by_hand(batch):
    sampled = Answers(["0", "1", "2", "9", "4", "123456", ""])  # 4 right, one cut, one empty
    greedy = Answers(["0", "1", "2", "3", "4", "5", "9"])  # 6 right
    right = lambda completions, answer, **_: [  # noqa: E731
        float(c == a) for c, a in zip(completions, answer, strict=True)
    ]
    # has nothing to say of 9, and takes half a point off for what is longer than a character
    short = lambda completions, **_: [  # noqa: E731
        None if c == "9" else 1.0 if len(c) == 1 else -0.5 for c in completions
    ]
    found = evaluate(
        sampled,
        greedy,
        "params",  # type: ignore[arg-type]
        "key",  # type: ignore[arg-type]
        PROMPTS,
        Verifiers((right, short), ("right", "short"), (5.0, -1.0)),
        TOKENIZER,
        batch=batch,
        prompt_length=4,
        measures={"accuracy": "right", "brevity": "short", "again": "right"},
    )
    expected = {
        "accuracy": 4 / 7,
        "brevity": 4 / 6,
        "again": 4 / 7,
        "mean_length": (2 * 5 + 6 + 1) / 7,
        "truncated": 1 / 7,
        "accuracy_greedy": 6 / 7,
        "brevity_greedy": 6 / 6,
        "again_greedy": 6 / 7,
        "mean_length_greedy": 2.0,
    }
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)
    # all prompts in order, the last batch filled up from the start; one key for all
    batches = -(-7 // batch)
    asked = [i % 7 for i in range(batches * batch)]
    for policy in (sampled, greedy):
        assert [row for rows in policy.batches for row in rows] == asked
        assert [len(rows) for rows in policy.batches] == [batch] * batches
        assert policy.keys == ["key"] * batches


def test_a_measure_that_nobody_answers_is_0():
    policy = Answers(["0"] * 7)
    nothing = lambda completions, **_: [None] * len(completions)  # noqa: E731
    found = evaluate(
        policy,
        policy,
        "params",  # type: ignore[arg-type]
        "key",  # type: ignore[arg-type]
        PROMPTS,
        Verifiers((nothing,), ("nothing",), (1.0,)),
        TOKENIZER,
        batch=7,
        prompt_length=3,
        measures={"accuracy": "nothing"},
    )
    assert (found["accuracy"], found["accuracy_greedy"]) == (0, 0)


# --- Several completions of each prompt ----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_one_that_is_right(n):
    """By enumeration: of all ways to take k of the n completions."""
    for k, c in itertools.product(range(1, n + 1), range(n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]))


def test_pass_at_k_has_the_shape_of_c():
    found = pass_at_k(4, np.array([[0, 1], [2, 4]]), 1)
    np.testing.assert_allclose(found, [[0, 0.25], [0.5, 1]])
    # of 200 completions, C(200, 100) is far beyond what floats multiply up to
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_of_too_few_is_refused(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs 1 to n completions .* n is 2"):
        pass_at_k(2, 0, k)


def groups_of(said: Sequence[Sequence[str]]) -> Any:
    """A policy that gives the completions `said[row]` of each prompt."""

    def generate(params: Any, prompts: PromptBatch, key: Any) -> Rollout:
        rows = np.asarray(prompts.rows) % len(said)
        made = completions(rows.tolist(), [[[*ids(x), END] for x in said[row]] for row in rows])
        rest: Any = (made.ids, made.lengths, None, None, None, made.truncated, None)
        return Rollout(prompts, *rest)

    return generate


def test_groups_by_hand():
    # of 3 each: all right, one right and one that has no say, none right
    said = [["0", "0", "0"], ["9", "1", ""], ["7", "8", "9"]]
    right = lambda completions, answer, **_: [  # noqa: E731
        None if not c else float(c == a) for c, a in zip(completions, answer, strict=True)
    ]
    found = evaluate(
        groups_of(said),
        groups_of([["0"], ["0"], ["2"]]),
        "params",  # type: ignore[arg-type]
        "key",  # type: ignore[arg-type]
        Prompts(*(part[:3] for part in PROMPTS[:3]), 0),
        Verifiers((right,), ("right",), (1.0,)),
        TOKENIZER,
        batch=2,
        prompt_length=4,
        measures={"accuracy": "right"},
        pass_at=(1, 2, 3),
    )
    assert found == pytest.approx(
        {
            "accuracy": 4 / 8,
            "accuracy_pass@1": (1 + 1 / 3 + 0) / 3,
            "accuracy_pass@2": (1 + 2 / 3 + 0) / 3,
            "accuracy_pass@3": (1 + 1 + 0) / 3,
            "mean_length": (8 * 2 + 1) / 9,
            "truncated": 0,
            "accuracy_greedy": 2 / 3,
            "mean_length_greedy": 2.0,
        }
    )
