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


def test_text_of_takes_the_last_assistant_message():
    messages = [
        {"role": "assistant", "content": "a call"},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "image"}]},
    ]
    assert contract.text_of(messages) == "b"
    assert contract.text_of([{"role": "assistant", "content": None}]) == ""
    assert contract.text_of([]) == ""


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
    ids=lambda value: repr(value).split(" at 0x")[0],  # the same in every process
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
        ("corectness", {}, "unknown reward 'corectness'; known: choice, correctness, "),
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


# ------------------------------------------------------------------------------------ statuses


def test_statuses_are_logged_as_shares_and_as_columns():
    metrics, extras = {}, {}
    statuses, whys = ["found", "none", "found", "found"], ["a", "b", "c", "d"]
    contract.log_statuses("name", statuses, whys, metrics.__setitem__, extras.__setitem__)
    assert metrics == {"name/found": 0.75, "name/none": 0.25}
    assert extras == {"name/status": statuses, "name/why": whys}
    contract.log_statuses("name", statuses, whys, None, None)
    contract.log_statuses("name", [], [], metrics.__setitem__, None)
    assert len(metrics) == 2


@pytest.mark.parametrize("name", naming.known_rewards())
def test_known_rewards_take_no_completions_and_log_nowhere(name):
    settings = {"overlong": {"max_length": 9, "buffer": 3}, "cosine": {"max_length": 9}}
    settings["pattern"] = {"regex": "a"}
    reward = naming.resolve(name, **settings.get(name, {}))
    columns = {column: [] for column in naming.columns_of(reward)}
    assert score([reward], [], [], [], columns)[0].shape == (0, 1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("correctness", {"tolerance": 2.0}, "tolerance"),
        ("execution_match", {"seconds": 0.0}, "seconds"),
        ("unit_tests", {"seconds": 0}, "seconds, total and memory must be above 0"),
        ("unit_tests", {"require": "walls"}, "require='walls' is no level of isolation"),
    ],
)
def test_bad_settings_are_refused_before_there_is_a_completion(name, settings, message):
    with pytest.raises(ValueError, match=message):
        naming.resolve(name, **settings)


@pytest.mark.parametrize("name", naming.known_rewards())
def test_rewards_are_imported_by_their_names(name):
    space = {}
    exec(f"from jax_grpo.rewards import {name}", space)
    assert space[name] is naming.known_rewards()[name]


def test_importing_rewards_is_light():
    program = "import sys; from jax_grpo.rewards import correctness, workers; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = set(subprocess.run(command, capture_output=True, text=True).stdout.split())
    assert "jax_grpo.rewards.math" in loaded
    assert not loaded & {"jax", "flax", "optax", "transformers", "datasets", "absl"}
    with pytest.raises(ImportError, match="cannot import name 'no_such'"):
        exec("from jax_grpo.rewards import no_such")
