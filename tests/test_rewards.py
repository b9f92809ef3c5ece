"""The reward contract and the two rewards of the study, on plain and on hostile texts."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from jax_grpo.rewards import contract, format, math, naming
from jax_grpo.rewards.contract import RewardError, score


def one(function, completion="ab", **columns):
    """Score a single completion by a single reward."""
    values, valid = score(
        [function], ["p"], [completion], [[1]], {k: [v] for k, v in columns.items()}
    )
    return values[0, 0], valid[0, 0]


def chat(text):
    return [{"role": "assistant", "content": text}]


# ------------------------------------------------------------------------------- boxed answers


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{17}", ["17"]),
        (r"so \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
        (r"\boxed{1} and \boxed{2}", ["1", "2"]),
        (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
        (r"\boxed{\}}", [r"\}"]),
        (r"\boxed {5} \boxed{}", ["5", ""]),
        (r"\boxed{3", []),
        (r"\boxed{3\}", []),
        (r"\boxed{a \boxed{5}", ["5"]),
        (r"\boxed{a \boxed{5} b}", [r"a \boxed{5} b"]),
        (r"{ \boxed{5}", ["5"]),
        (r"} \boxed{5}} {", ["5"]),
        (r"\\boxed{5}", []),  # a line break and the word boxed
        (r"\\\boxed{5}", ["5"]),
        (r"boxed{5} \boxedly{5} \boxed 5", []),
        ("\\boxed{a\x00b\n}", ["a\x00b\n"]),
        ("\\", []),
        ("", []),
    ],
)
def test_boxed_answers(text, boxes):
    assert math.boxed_answers(text) == boxes


@pytest.mark.parametrize(
    "text",
    [
        "{" * 100_000,
        "}" * 100_000,
        r"\boxed{" * 100_000,
        r"\boxed{" * 100_000 + "}" * 100_000,
        r"\boxed{" + "{" * 100_000 + "5" + "}" * 100_000 + "}",
        r"\boxed{5}" * 100_000,
        r"\boxed" + " " * 100_000,
        r"\boxed{" + "." * 100_000 + "x}",
        r"\boxed{a" + " " * 100_000 + "b}",
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{" + "1,000" * 100_000 + "}",
        r"\boxed{" + "1/" * 100_000 + "}",
        r"\boxed{9^{9^{9^{9}}}} \boxed{10000000!} \boxed{1e999999999}",
        "<thinking>" * 100_000 + r"\boxed{5}",
        "</thinking>" * 100_000,
        "\\" * 100_001,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_texts_take_no_time(text):
    began = time.perf_counter()
    math.correctness(["p"], [text], ["5"])
    format.thinking(["p"], ["<thinking>x</thinking>" + text])
    assert time.perf_counter() - began < 1.0


# --------------------------------------------------------------------------------- correctness


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        (r"\boxed{17}", "17", 1),
        (r"\boxed{17}", 17, 1),
        (r"\boxed{17}", 17.0, 1),
        (r"\boxed{17}", np.int64(17), 1),
        (r"\boxed{16}", "17", 0),
        ("17", "17", 0),
        (r"\boxed{17", "17", 0),
        (r"\boxed{}", "17", 0),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{1\,000\,000.50}", "1000000.5", 1),
        (r"\boxed{10,\!000}", "10000", 1),
        (r"\boxed{7,2}", "72", 0),
        (r"\boxed{1 000}", "1000", 0),
        (r"\boxed{1 2 3}", "123", 0),
        (r"\boxed{$72$.}", "72", 1),
        (r"\boxed{\$72}", "$72", 1),
        (r"\boxed{72.0}", "72", 1),
        (r"\boxed{+72}", "72", 1),
        (r"\boxed{-.5}", "-1/2", 1),
        ("\\boxed{\u22125}", "-5", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{-\dfrac{1}{2}}", r"\frac{-1}{2}", 1),
        (r"\boxed{\frac12}", "2/4", 1),
        (r"\boxed{1 / 3}", r"\tfrac{1}{3}", 1),
        (r"\boxed{0.333333}", "1/3", 0),
        (r"\boxed{1/0}", "0", 0),
        (r"\boxed{1/0}", "1/0", 1),  # as text
        (r"\boxed{2+3}", "5", 0),  # nothing is evaluated
        (r"\boxed{3 = 5}", "5", 0),
        (r"\boxed{10\%}", "10", 0),
        (r"\boxed{10\%}", "10%", 1),
        (r"\boxed{x + 1}", "x+1", 1),
        (r"\boxed{(3, \frac{\pi}{2})}", r"(3,\frac{\pi}{2})", 1),
        (r"\boxed{Monday}", "Tuesday", 0),
        (r"\boxed{\{1,2\}}", r"(1,2)", 0),
        (r"\boxed{٥}", "5", 0),  # other digits are text
        ("\\boxed{5\x00}", "5", 0),
        (r"\boxed{" + "9" * 200 + "}", "9" * 200, 1),  # as text
        (r"\boxed{" + "9" * 200 + ".0}", "9" * 200, 0),
        # several
        (r"\boxed{1} then \boxed{2}", "2", 0),
        (r"\boxed{2} then \boxed{2.0}", "2", 1),
        (r"\boxed{} then \boxed{2}", "2", 0),
        # thinking
        (r"<thinking>\boxed{2}</thinking>", "2", 0),
        (r"<thinking>\boxed{1}</thinking>\boxed{2}", "2", 1),
        (r"<thinking>\boxed{2}</thinking>\boxed{1}", "2", 0),
        (r"<thinking>\boxed{2}", "2", 0),
        (r"so far \boxed{2}</thinking>", "2", 0),  # opened in the prompt
        (r"<thinking>a<thinking>b</thinking>\boxed{2}</thinking>", "2", 0),
        (r"<thinking>a</thinking><thinking>b</thinking>\boxed{2}", "2", 1),
        (r"\boxed{2}<thinking>or is it \boxed{3}?", "2", 1),
        # forms of the data
        (r"\boxed{72}", "6 * 12 = <<6*12=72>>72\n#### 72", 1),
        (r"\boxed{1000}", "#### 1,000", 1),
        (r"\boxed{72}", r"It follows that $x = \boxed{72}$.", 1),
        (r"\boxed{True}", True, 1),
        (r"\boxed{1}", True, 0),
        # no right answer: nothing to say
        (r"\boxed{}", "", None),
        (r"\boxed{1}", None, None),
        (r"\boxed{1}", " ", None),
        (r"\boxed{1}", "it is unknown ####", None),
        (r"\boxed{1}", float("nan"), None),
        (r"\boxed{nan}", float("inf"), None),
    ],
)
def test_correctness(completion, gold, value):
    assert math.correctness(["p"], [completion], [gold]) == [value]
    assert math.correctness(["p"], [chat(completion)], [gold]) == [value]


def test_correctness_is_worth_what_is_asked():
    assert math.correctness(["p"] * 2, [r"\boxed{1}", ""], ["1", "1"], reward=2.0) == [2.0, 0.0]


def test_correctness_refuses_other_answers():
    with pytest.raises(RewardError, match="an answer is text or a number, not list"):
        one(math.correctness, completion=r"\boxed{1}", answer=[1])


def test_normalise_reads_numbers_exactly():
    assert math.normalise("0.1") == Fraction(1, 10)
    assert math.normalise("1,234,567.25") == Fraction(4938269, 4)
    assert math.normalise("") == ""
    assert math.normalise(" . ") == ""


def test_text_of_takes_the_last_assistant_message():
    messages = [
        {"role": "assistant", "content": "a call"},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "image"}]},
    ]
    assert contract.text_of(messages) == "b"
    assert contract.text_of([{"role": "assistant", "content": None}]) == ""
    assert contract.text_of([]) == ""


# -------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"<thinking>7+5=12</thinking>\boxed{12}", 1),
        (" \n<thinking>7+5=12</thinking>\nSo it is \\boxed{12}, I think.\n", 1),
        (r"<thinking>\boxed{1}</thinking>\boxed{\frac{1}{2}}", 1),
        (r"<thinking>wrong</thinking>\boxed{13}", 1),  # form, not truth
        (r"\boxed{12}", 0),
        (r"<thinking></thinking>\boxed{12}", 0),
        ("<thinking> \n</thinking>\\boxed{12}", 0),
        (r"<thinking>7+5=12</thinking>12", 0),
        (r"<thinking>7+5=12</thinking>\boxed{12", 0),
        (r"<thinking>7+5=12</thinking>\boxed{ }", 0),
        (r"<thinking>7+5=12 \boxed{12}</thinking>", 0),
        (r"<thinking>7+5=12 \boxed{12}", 0),
        (r"So <thinking>7+5=12</thinking>\boxed{12}", 0),
        (r"7+5=12</thinking>\boxed{12}", 0),
        (r"<thinking>a</thinking><thinking>b</thinking>\boxed{12}", 0),
        (r"<thinking>a<thinking>b</thinking>\boxed{12}", 0),
        (r"<thinking>a</thinking>\boxed{12}</thinking>", 0),
        ("\x00<thinking>a</thinking>\\boxed{12}", 0),
        ("<THINKING>a</THINKING>\\boxed{12}", 0),
        ("", 0),
    ],
)
def test_thinking(completion, value):
    assert format.thinking(["p"], [completion]) == [value]
    assert format.thinking(["p"], [chat(completion)], reward=0.5) == [0.5 * value]


# ------------------------------------------------------------------------------------ contract


def test_score_gives_values_and_validity():
    def length(completions, **kwargs):
        return [len(text) for text in completions]

    def some(completion_ids, **kwargs):
        return [None, float("nan"), -0.5]

    values, valid = score([length, some], ["p"] * 3, ["a", "bc", ""], [[1], [2], []])
    assert values.dtype == np.float32 and valid.dtype == bool
    np.testing.assert_array_equal(values, [[1, 0], [2, 0], [0, -0.5]])
    np.testing.assert_array_equal(valid, [[1, 0], [1, 0], [1, 1]])


def test_score_of_nothing():
    values, valid = score([math.correctness], [], [], [], {"answer": []})
    assert values.shape == valid.shape == (0, 1)
    values, valid = score([], ["p"], ["c"], [[1]])
    assert values.shape == valid.shape == (1, 0)


def test_rewards_get_what_they_take():
    seen = {}

    def greedy(**kwargs):
        seen["greedy"] = kwargs
        kwargs["log_metric"]("x", 1.0)
        return [0.0]

    def modest(completions, answer):
        seen["modest"] = {"completions": completions, "answer": answer}
        completions.clear()  # its own list
        return [0.0]

    def nosy(prompts, trainer_state, log_extra, other="default"):
        seen["nosy"] = {"trainer_state": trainer_state, "other": other}
        log_extra("column", ["a"])
        return [0.0]

    logged = []
    score(
        [modest, greedy, nosy],
        ["p"],
        ["c"],
        [[7]],
        {"answer": ["a"], "level": [3]},
        trainer_state="state",
        log_metric=lambda *a: logged.append(a),
        log_extra=lambda *a: logged.append(a),
    )
    assert seen["modest"]["answer"] == ["a"]
    assert seen["nosy"] == {"trainer_state": "state", "other": "default"}
    assert seen["greedy"] | {"log_metric": 0, "log_extra": 0} == {
        "prompts": ["p"],
        "completions": ["c"],
        "completion_ids": [[7]],
        "answer": ["a"],
        "level": [3],
        "trainer_state": "state",
        "log_metric": 0,
        "log_extra": 0,
    }
    assert logged == [("x", 1.0), ("column", ["a"])]


def test_logging_without_a_logger_goes_nowhere():
    def logs(completions, log_metric, log_extra):
        log_metric("a", 1.0)
        log_extra("b", [1])
        return [0.0]

    assert one(logs) == (0.0, True)


def test_a_setting_wins_over_a_column_of_its_name():
    reward = naming.resolve("correctness", reward=2.0)
    assert one(reward, completion=r"\boxed{1}", answer="1", reward="gold")[0] == 2.0


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Fraction(1)],
    ids=repr,
)
def test_numbers_of_all_kinds(value):
    assert one(lambda completions: [value]) == (1.0, True)


def test_arrays_and_tuples_are_lists():
    assert one(lambda completions: np.array([1.5])) == (1.5, True)
    assert one(lambda completions: (1.5,)) == (1.5, True)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "gave NoneType and not a list of numbers (for 1 completions, the first: 'ab')"),
        ("1", "gave str and not a list"),
        (1.0, "gave float and not a list"),
        ({0: 1.0}, "gave dict and not a list"),
        ([1.0, 2.0], "gave 2 values for 1 completions, for completion 0 of 1: 'ab'"),
        ([], "gave 0 values for 1 completions"),
        (["1"], "gave '1' (str) and not a finite number or None for the completion 'ab'"),
        ([[1.0]], "gave [1.0] (list) and not a finite number"),
        ([1j], "gave 1j (complex) and not a finite number"),
        ([float("inf")], "gave inf (float) and not a finite number"),
        ([float("-inf")], "gave -inf (float) and not a finite number"),
        ([1e39], "gave 1e+39 (float) and not a finite number"),  # inf in float32
        ([10**400], "(int) and not a finite number"),
        ([np.array([1.0, 2.0])], "and not a finite number"),
    ],
)
def test_bad_results_give_one_line(result, message):
    def bad(completions):
        return result

    with pytest.raises(RewardError) as error:
        one(bad)
    assert str(error.value).startswith("the reward 'bad' ")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_exception_names_the_reward_and_the_completion():
    def fragile(completions, **kwargs):
        return [1.0 / len(text) for text in completions]

    with pytest.raises(RewardError) as error:
        score([fragile], ["p"] * 3, ["a", "", "c"], [[]] * 3)
    assert str(error.value) == (
        "the reward 'fragile' raised ZeroDivisionError('float division by zero'), "
        "for completion 1 of 3: ''"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert isinstance(error.value, ValueError)


def test_an_exception_of_the_batch_only():
    def odd(completions):
        if len(completions) > 1:
            raise RuntimeError("two\nlines")
        return [0.0]

    with pytest.raises(RewardError) as error:
        score([odd], ["p"] * 2, ["a", "b"], [[]] * 2)
    assert str(error.value) == (
        r"the reward 'odd' raised RuntimeError('two\nlines'), for 2 completions together, "
        "the first: 'a'"
    )


def test_a_wrong_length_names_the_completion():
    def skips(completions):
        return [1.0 for text in completions if text]

    with pytest.raises(RewardError, match=r"gave 1 values for 2 completions, for completion 1 of"):
        score([skips], ["p"] * 2, ["a", ""], [[]] * 2)


def test_a_long_completion_is_shortened():
    with pytest.raises(RewardError) as error:
        one(lambda completions: ["x"], completion="a" * 100_000)
    assert len(str(error.value)) < 500


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="'correctness' needs the column 'answer'; .*: level"):
        one(math.correctness, level=1)
    with pytest.raises(RewardError, match="the data have: none"):
        one(math.correctness)


def test_columns_that_do_not_fit():
    with pytest.raises(ValueError, match="2 answer for 1 completions"):
        score([], ["p"], ["c"], [[1]], {"answer": [1, 2]})
    with pytest.raises(ValueError, match="1 prompts for 2 completions"):
        score([], ["p"], ["c", "d"], [[1], [2]])
    with pytest.raises(ValueError, match="rewards get 'prompts' from the trainer: rename"):
        one(math.correctness, prompts=1)


# --------------------------------------------------------------------------------------- async


async def slow(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [float(len(text)) for text in completions]


def test_async_rewards_run_at_once_and_sync_ones_between():
    class Judge:
        async def __call__(self, completions):
            return await slow(completions)

    began = time.perf_counter()
    functions = [slow, lambda completions: [5.0], Judge(), functools.partial(slow)]
    values, _ = score(functions, ["p"], ["ab"], [[1]])
    assert time.perf_counter() - began < 0.5
    np.testing.assert_array_equal(values, [[2, 5, 2, 2]])


def test_async_rewards_work_inside_a_running_loop():
    async def notebook():
        return one(slow)

    assert asyncio.run(notebook()) == (2.0, True)


def test_async_rewards_keep_their_loop_between_calls():
    loops = []

    async def remembers(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0]

    one(remembers)
    one(remembers)
    assert loops[0] is loops[1] and not loops[0].is_closed()


def test_async_errors_are_like_others():
    async def fragile(completions):
        await asyncio.sleep(0)
        return [1.0 / len(text) for text in completions]

    with pytest.raises(RewardError, match=r"'fragile' raised ZeroDivision.* completion 1 of 2: ''"):
        score([slow, fragile], ["p"] * 2, ["a", ""], [[]] * 2)


@pytest.mark.filterwarnings("error")
def test_a_sync_error_leaves_no_coroutine_behind():
    def fails(completions):
        raise KeyError("x")

    with pytest.raises(RewardError, match="'fails' raised KeyError"):
        score([slow, fails], ["p"], ["a"], [[]])


# --------------------------------------------------------------------------------------- names


def test_names_of_all_kinds_of_callables():
    class Judge:
        def __call__(self, completions):
            return [0.0]

    functions = [math.correctness, functools.partial(math.correctness, reward=2.0), Judge()]
    assert naming.reward_names([*functions, Judge()]) == [
        "correctness",
        "correctness_2",
        "Judge",
        "Judge_2",
    ]


def test_resolve_by_name_path_file_and_class(tmp_path):
    assert naming.resolve("correctness") is math.correctness
    assert naming.resolve("jax_grpo.rewards.format.thinking") is format.thinking
    assert naming.resolve(format.thinking) is format.thinking
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Constant:\n"
        "    value: float = 1.0\n"
        "    def __call__(self, completions):\n"
        "        return [self.value] * len(completions)\n"
    )
    assert one(naming.resolve(f"{file}:Constant", value=3.0)) == (3.0, True)
    with pytest.raises(ValueError, match="Constant.*unexpected keyword argument 'valu'"):
        naming.resolve(f"{file}:Constant", valu=3.0)


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        ("corectness", {}, "unknown reward 'corectness'; known: correctness, thinking, or a path"),
        ("no_such_package.f", {}, "no module 'no_such_package', wanted for 'no_such_package.f'"),
        ("jax_grpo.rewards.math.x", {}, "jax_grpo.rewards.math has no 'x'"),
        ("jax_grpo.rewards.naming.RESERVED", {}, "is not a function but tuple"),
        ("missing.py:f", {}, "no such file: missing.py"),
        (".f", {}, "not a dotted path"),
        (3, {}, "the reward 3 is not a function but int"),
        ("correctness", {"rewrd": 2}, "'correctness' has no setting 'rewrd'; it has: answer, rewa"),
        ("correctness", {"prompts": 2}, "'correctness' has no setting 'prompts'"),
    ],
)
def test_what_cannot_be_resolved_gives_one_line(reward, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        naming.resolve(reward, **settings)
    assert "\n" not in str(error.value)


def test_rewards_never_import_jax():
    code = (
        "import sys; from jax_grpo.rewards import contract, format, math, naming; "
        "naming.known_rewards(); "
        "sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
