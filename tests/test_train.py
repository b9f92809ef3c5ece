"""The loop, through its command: what a run leaves, and that it goes on where it was."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_run
from small_run import Ended, read_lines, run

from jax_grpo import checkpoint
from jax_grpo import train as loop
from jax_grpo.commands.common import load
from jax_grpo.commands.train import table
from jax_grpo.models.config import PRESETS
from jax_grpo.models.llama import init_params
from jax_grpo.sharding import make_mesh

STEPS = [(stage, step) for stage in ("sft", "grpo") for step in (1, 2, 3, 4)]


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture
def one_device() -> Iterator[None]:
    with small_run.one_device():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small config; with `:silent` it has no evaluation."""
    return small_run.write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def whole(config: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run that nothing interrupted: its workdir, and how it ended."""
    workdir = tmp_path_factory.mktemp("whole") / "w"
    with small_run.one_device():
        return workdir, run("train", f"--config={config}", f"--workdir={workdir}")


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what the clock says."""
    timed = ("seconds/", "tokens_per_second/")
    lines = read_lines(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in lines]


def params(workdir: Path) -> Any:
    """The newest parameters of a run, on the host."""
    return jax.device_get(load(str(workdir), make_mesh(devices=jax.devices()[:1])).params)


def assert_identical(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- What a run leaves ---------------------------------------------------------------------------


def test_a_run_says_what_it_found_and_where_it_is(whole):
    workdir, ended = whole
    assert ended.code == 0, ended.err
    summary = json.loads((workdir / "summary.json").read_text())
    assert ended.out == f"{table(summary)}\nfiles: {workdir}\n"
    assert list(summary) == ["stages", "before"]
    assert list(summary["stages"]) == ["sft", "grpo"]
    measures = ["accuracy", "format", "mean_length", "truncated"]
    greedy = [f"{name}_greedy" for name in measures[:3]]
    for name, found in {**summary["stages"], "before": summary["before"]}.items():
        took = ["seconds", "sampled_tokens", "optimizer_tokens"] * (name != "before")
        assert list(found) == measures + greedy + took
        for share in ("accuracy", "format", "truncated", "accuracy_greedy", "format_greedy"):
            assert 0 <= found[share] <= 1
            assert (found[share] * 12) % 1 == pytest.approx(0, abs=1e-6)  # of 12 problems
        assert 1 <= found["mean_length"] <= 8
        assert found.get("seconds", 1) > 0
    lines = ended.out.splitlines()
    assert lines[0].split() == [*measures, *greedy, "seconds"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["before", "after sft", "after grpo"]


def test_a_run_leaves_a_line_for_each_step(whole):
    workdir, ended = whole
    lines = read_lines(workdir / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in lines] == STEPS
    every = {"stage", "step", "loss", "grad_norm", "finite", "learning_rate", "num_tokens", "epoch"}
    every |= {"seconds/update", "tokens_per_second/update"}
    kinds = [f"{kind}_{what}" for kind in ("mean", "min", "max") for what in ("", "terminated_")]
    own = {f"completions/{name}length" for name in kinds} | {"completions/clipped_ratio"}
    own |= {f"rewards/{name}/{x}" for name in ("correctness", "thinking") for x in ("mean", "std")}
    own |= {"reward", "reward_std", "frac_reward_zero_std"}
    own |= {"frac_groups_all_right", "frac_groups_all_wrong"}
    own |= {f"clip_ratio/{name}_mean" for name in ("low", "high", "region")}
    own |= {"policy_loss", "kl", "entropy", "ratio", "temperature"}
    own |= {f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")}
    own |= {"seconds/rollout", "seconds/rewards", "tokens_per_second/rollout"}
    for row in lines[:4]:
        assert set(row) == every | {"nll"}
        assert row["loss"] == row["nll"]
    for row in lines[4:]:
        assert set(row) >= every | own
        assert row["temperature"] == 1.0
        assert row["loss"] == pytest.approx(row["policy_loss"] + 0.04 * row["kl"], abs=1e-6)
        assert row["reward"] == pytest.approx(
            row["rewards/correctness/mean"] + row["rewards/thinking/mean"]
        )
        assert 1 <= row["completions/min_length"] <= row["completions/mean_length"]
        assert row["completions/mean_length"] <= row["completions/max_length"] <= 8
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert 0 < row["entropy"] <= math.log(24) + 1e-6
    for row in lines:
        assert row["finite"] == 1
        assert row["epoch"] == row["step"] * 8 / 40
    # the first update is on policy, and the reference is the policy that the stage began with
    first = lines[4]
    assert abs(first["kl"]) < 1e-6
    assert first["ratio"] == pytest.approx(1, abs=1e-5)
    assert first["clip_ratio/region_mean"] == 0
    assert lines[5]["kl"] > 1e-4
    # from 0 to 1e-3 in one step and then down a cosine to a tenth; down a line to a tenth
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 3)) / 2 for i in range(3)]
    expected = [0, *(1e-3 * x for x in cosine), *(3e-4 * (1 - 0.9 * i / 4) for i in range(4))]
    np.testing.assert_allclose([row["learning_rate"] for row in lines], expected, rtol=1e-5)
    # a token is counted once, each stage for itself: prompts once, and completions
    assert lines[0]["num_tokens"] == 8 * (9 + 4)  # "1+2-1+4=?" and "\boxed{", "6", "}", the end
    assert lines[3]["num_tokens"] == 4 * lines[0]["num_tokens"]


def test_num_tokens_of_a_rollout(whole):
    lines = metrics(whole[0])[4:]
    tokens = [0, *(row["num_tokens"] for row in lines)]
    for row, before, after in zip(lines, tokens, tokens[1:], strict=False):
        assert after - before == 8 * 9 + round(32 * row["completions/mean_length"])


def test_a_run_leaves_files(whole, config):
    workdir, ended = whole
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["grpo"]["num_steps"] == 4
    assert saved["stages"] == ["sft", "grpo"]
    assert saved["evaluation"]["data"]["source"] == "jax_grpo.arithmetic.problems"
    for stage in ("sft", "grpo"):
        steps = sorted(path.name for path in (workdir / "checkpoints" / stage).iterdir())
        assert steps == ["2", "4"]
        (events,) = (workdir / "tensorboard" / stage).glob("events.out.tfevents.*")
        assert b"grad_norm" in events.read_bytes()
    assert {path.name for path in workdir.iterdir()} == {
        "checkpoints",
        "config.json",
        "extra",
        "metrics.jsonl",
        "model",
        "summary.json",
        "tensorboard",
    }
    said = [json.loads((workdir / "extra" / f"grpo-{step}.json").read_text()) for step in (1, 4)]
    for column in ("correctness/status", "correctness/why"):
        assert len(said[0][column]) == len(said[1][column]) > 0
    # not a terminal, so there is a line at the first step and at every second one
    shown = [line.split()[:2] for line in ended.err.splitlines()]
    pairs = [[stage, f"{step}/4"] for stage in ("sft", "grpo") for step in (1, 2, 4)]
    assert shown == [["workdir", str(workdir)], *pairs]


def test_a_finished_run_prints_its_table_again(whole, config, one_device):
    workdir, ended = whole
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    again = run("train", f"--config={config}", f"--workdir={workdir}")
    assert again == (0, ended.out, "")
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    # how often it speaks does not make another run of it; the seed does
    flags = (f"--config={config}", f"--workdir={workdir}")
    assert run("train", *flags, "--config.grpo.log_every=7").out == ended.out
    other = run("train", *flags, "--config.seed=1")
    expected = f"jax_grpo train: {workdir} holds a run with another config: seed was 0, is 1\n"
    assert other == (2, "", expected)


def test_without_a_workdir_there_is_a_dated_one(config, one_device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    ended = run(
        "train", f"--config={config}:silent", "--config.stages=('sft',)", "--config.sft.log_every=9"
    )
    assert ended.code == 0
    (workdir,) = (tmp_path / "runs").iterdir()
    assert ended.out.endswith(f"files: runs/{workdir.name}\n")
    assert ended.err.startswith(f"workdir runs/{workdir.name}\n")
    took = json.loads((workdir / "summary.json").read_text())["stages"]["sft"]
    assert list(took) == ["seconds", "sampled_tokens", "optimizer_tokens"]


# --- Interrupted, and again ----------------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, kind: str, step: int) -> None:
    """Interrupts the run in a step (from 0) of a kind, `policy` or `dataset`."""
    original: Callable[..., Any] = getattr(loop, f"{kind}_step")
    position = list(inspect.signature(original).parameters).index("step")

    def taken(*args: Any) -> Any:
        found = original(*args)
        if args[position] == step:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(loop, f"{kind}_step", taken)


def test_a_run_goes_on_where_it_was(whole, config, one_device, tmp_path, monkeypatch):
    """Bit for bit, whether it ended in the first stage, between stages, or in the second."""
    workdir, _ = whole
    command = ("train", f"--config={config}:silent", f"--workdir={tmp_path / 'w'}")
    taken = []
    for kind, step in [("dataset", 3), ("policy", 0), ("policy", 3)]:
        with monkeypatch.context() as patch:
            interrupt_at(patch, kind, step)
            ended = run(*command)
        assert (ended.code, ended.out) == (130, "")
        assert "goes on from the last checkpoint" in ended.err.splitlines()[-1]
        taken.append([(row["stage"], row["step"]) for row in metrics(tmp_path / "w")])
    # a line more than there are steps in checkpoints: the third step is taken again
    assert taken == [STEPS[:3], STEPS[:4], STEPS[:7]]
    assert list(json.loads((tmp_path / "w/summary.json").read_text())["stages"]) == ["sft"]
    stages: list[str] = []
    compile_stage = loop.compile_stage
    monkeypatch.setattr(
        loop, "compile_stage", lambda *args: stages.append(args[1].name) or compile_stage(*args)
    )
    ended = run(*command)
    assert (ended.code, stages) == (0, ["grpo"])
    assert ended.err.splitlines()[1].startswith("grpo 3/4 ")
    assert metrics(tmp_path / "w") == metrics(workdir)
    assert_identical(params(tmp_path / "w"), params(workdir))
    assert_identical(newest_state(tmp_path / "w"), newest_state(workdir))
    assert list(json.loads((tmp_path / "w/summary.json").read_text())["stages"]) == ["sft", "grpo"]


def newest_state(workdir: Path) -> list[Any]:
    """All arrays of the newest checkpoint but the parameters: moments and counts."""
    manager = checkpoint.open_checkpoints(workdir / "checkpoints" / "grpo", every=1)
    restored = manager.restore(
        manager.latest_step(), args=ocp.args.Composite(state=ocp.args.StandardRestore())
    )
    checkpoint.close(manager)
    leaves = [np.asarray(x) for x in jax.tree.leaves(restored["state"])]
    assert len(leaves) > 20
    return leaves


# --- Rewards, and no rewards ---------------------------------------------------------------------

REWARDS = r'''
import asyncio


def constant(completions, **_):
    return [0.1] * len(completions)


async def length(completion_ids, trainer_state, **_):
    """Async; worth the number of tokens."""
    await asyncio.sleep(0)
    assert trainer_state.max_steps == 4
    return [float(len(ids)) for ids in completion_ids]


def digits(prompts, completions, answer, log_metric, log_extra, **_):
    """Has nothing to say of the second completion of each group; reads a column."""
    log_extra("asked", prompts)
    for prompt, right in zip(prompts, answer):
        assert eval(prompt.removesuffix("=?")) == int(right)
    log_metric("mine/characters", sum(map(len, completions)) / len(completions))
    return [None if i % 4 == 1 else float(text[:1].isdigit()) for i, text in enumerate(completions)]


def alternating(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def breaks(completions, trainer_state, **_):
    if trainer_state.global_step == 3:
        raise RuntimeError("no more")
    return [1.0] * len(completions)
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(REWARDS)
    return file


def train_alone(
    config: str, workdir: Path, rewards: dict[str, dict[str, Any]], *flags: str
) -> Ended:
    """Runs GRPO without KL, without SFT before it."""
    return run(
        "train",
        f"--config={config}:silent",
        f"--workdir={workdir}",
        "--config.stages=('grpo',)",
        "--config.grpo.algorithm.kl_weight=0.0",
        f"--config.grpo.rewards={rewards}",
        *flags,
    )


def test_constant_rewards_move_nothing(config, one_device, tmp_path, rewards):
    section = {"constant": {"function": f"{rewards}:constant"}}
    ended = train_alone(config, tmp_path / "w", section, "--config.grpo.keep_checkpoints=4")
    assert ended.code == 0, ended.err
    for row in metrics(tmp_path / "w"):
        assert row["reward"] == pytest.approx(0.1)
        assert (row["reward_std"], row["frac_reward_zero_std"]) == (0, 1)
        assert (row["frac_groups_all_right"], row["frac_groups_all_wrong"]) == (1, 0)
        assert (row["loss"], row["grad_norm"]) == (0, 0)
        assert "kl" not in row
    shape = dataclasses.replace(PRESETS["tiny"], vocab_size=24)
    expected = jax.jit(lambda key: init_params(shape, key))(jax.random.key(0))
    assert_identical(params(tmp_path / "w"), jax.device_get(expected))


def test_rewards_of_all_kinds_and_several_updates(config, one_device, tmp_path, rewards):
    """Async, None, columns, weights and what is logged; two passes over two minibatches."""
    section = {
        "length": {"function": f"{rewards}:length", "weight": -0.5},
        "digits": {"function": f"{rewards}:digits"},
    }
    flags = ["--config.grpo.passes=2", "--config.grpo.minibatches=2"]
    flags += ["--config.grpo.micro_batches=2", "--config.grpo.optimizer.learning_rate=1e-3"]
    ended = train_alone(config, tmp_path / "w", section, *flags)
    assert ended.code == 0, ended.err
    lines = metrics(tmp_path / "w")
    assert [row["step"] for row in lines] == [1, 2, 3, 4]
    for row in lines:
        assert row["rewards/length/mean"] == row["completions/mean_length"]
        # of 32 completions 24 have a number of digits, the mean of which is k / 24
        assert (row["rewards/digits/mean"] * 24) % 1 == pytest.approx(0, abs=1e-6)
        expected = -0.5 * row["rewards/length/mean"] + row["rewards/digits/mean"] * 24 / 32
        assert row["reward"] == pytest.approx(expected, rel=1e-6)
        assert 0 < row["mine/characters"] <= 8 * len("</thinking>")
        extra = json.loads((tmp_path / f"w/extra/grpo-{row['step']}.json").read_text())
        asked = extra.pop("asked")
        assert extra == {}
        assert asked == [prompt for prompt in asked[::4] for _ in range(4)]
        assert len(set(asked)) == 8
        # of the first update only; the means of the others tell of updates in between
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert abs(row["ratio"] - 1) > 1e-6
    # four updates in each step, and the schedule counts updates
    expected = [1e-3 * (1 - 0.9 * 4 * i / 16) for i in range(4)]
    np.testing.assert_allclose([row["learning_rate"] for row in lines], expected, rtol=1e-5)
    count = [x for x in newest_state(tmp_path / "w") if x.shape == () and x == 16]
    assert len(count) >= 2  # the state's steps and Adam's


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the third step of a run one advantage is not a number."""
    compile_stage = loop.compile_stage

    def compiled(*args: Any) -> Any:
        run, taken = compile_stage(*args), []

        def experience(rollout: Any, *rest: Any) -> Any:
            made, state = run.experience(rollout, *rest)
            taken.append(made)
            if len(taken) == 3:
                made = made._replace(advantages=made.advantages.at[5, 2].set(jnp.nan))
            return made, state

        return run._replace(experience=experience)

    monkeypatch.setattr(loop, "compile_stage", compiled)


def test_a_loss_that_is_not_finite_stops_the_run(config, one_device, tmp_path, rewards, poisoned):
    section = {"alternating": {"function": f"{rewards}:alternating"}}
    flags = ["--config.grpo.checkpoint_every=1"]
    ended = train_alone(config, tmp_path / "w", section, *flags)
    assert (ended.code, ended.out) == (1, "")
    last = ended.err.splitlines()[-1]
    file = tmp_path / "w/debug/grpo-3.npz"
    good = tmp_path / "w/checkpoints/grpo/2"
    assert last.startswith("jax_grpo train: stage grpo, step 3: loss nan, grad_norm nan are not")
    assert last.endswith(f"its batch is in {file}; last good checkpoint: {good}")
    assert "Traceback" not in ended.err
    with np.load(file) as saved:
        arrays = dict(saved)
    assert arrays["batch/0/completion_ids"].shape == (8, 4, 8)
    assert np.argwhere(np.isnan(arrays["batch/1/advantages"])).tolist() == [[5, 2]]
    assert arrays["metrics/finite"] == 0
    assert [row["step"] for row in metrics(tmp_path / "w")] == [1, 2, 3]
    assert metrics(tmp_path / "w")[-1]["loss"] is None
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(params(tmp_path / "w")))
    # the same again goes on behind the last good checkpoint (and this time nothing is wrong)
    again = train_alone(config, tmp_path / "w", section, *flags)
    assert again.code == 0
    assert [(row["step"], row["finite"]) for row in metrics(tmp_path / "w")][2:] == [(3, 1), (4, 1)]


def test_an_update_that_is_not_finite_may_be_skipped(
    config, one_device, tmp_path, rewards, poisoned
):
    section = {"alternating": {"function": f"{rewards}:alternating"}}
    flags = ["--config.grpo.checkpoint_every=1", "--config.grpo.keep_checkpoints=4"]
    ended = train_alone(config, tmp_path / "w", section, *flags, "--config.grpo.max_skipped=1")
    assert ended.code == 0, ended.err
    assert [row["finite"] for row in metrics(tmp_path / "w")] == [1, 1, 0, 1]
    assert not (tmp_path / "w/debug").exists()
    found = []
    for step in (2, 3, 4):
        manager = checkpoint.open_checkpoints(tmp_path / "w/checkpoints/grpo", every=1)
        args = ocp.args.Composite(params=ocp.args.StandardRestore())
        found.append(jax.device_get(manager.restore(step, args=args)["params"]))
        checkpoint.close(manager)
    assert_identical(found[1], found[0])  # skipped: nothing moved
    assert np.any(found[2]["embed"] != found[1]["embed"])


def test_a_reward_that_breaks_is_one_line(config, one_device, tmp_path, rewards):
    section = {"breaks": {"function": f"{rewards}:breaks"}}
    ended = train_alone(config, tmp_path / "w", section)
    assert (ended.code, ended.out) == (1, "")
    last = ended.err.splitlines()[-1]
    assert last.startswith(
        "jax_grpo train: the reward 'breaks' raised RuntimeError('no more'), for completion 0 of 32"
    )
    assert "Traceback" not in ended.err
    # what was done before is kept
    assert [path.name for path in (tmp_path / "w/checkpoints/grpo").iterdir()] == ["2"]
    assert [row["step"] for row in metrics(tmp_path / "w")] == [1, 2, 3]


# --- On a mesh -----------------------------------------------------------------------------------


def test_a_mesh_of_eight_does_what_one_device_does(whole, config, tmp_path):
    workdir, _ = whole
    sizes = [f"--config.mesh.{name}=2" for name in ("data", "fsdp", "tensor")]
    ended = run("train", f"--config={config}:silent", f"--workdir={tmp_path / 'w'}", *sizes)
    assert ended.code == 0, ended.err
    found, expected = metrics(tmp_path / "w"), metrics(workdir)
    exact = ("stage", "step", "num_tokens", "reward", "completions/mean_length", "learning_rate")
    close = ("loss", "nll", "grad_norm", "kl", "entropy", "policy_loss")
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name in exact:
            assert row.get(name) == other.get(name), (row["stage"], row["step"], name)
        for name in close:
            if name in row:
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    for x, y in zip(*(jax.tree.leaves(params(w)) for w in (tmp_path / "w", workdir)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)
    # and the state was spread: a mesh that does not fit is refused, this one was used
    restored = load(str(tmp_path / "w"), make_mesh(data=2, fsdp=2, tensor=2))
    assert restored.params["embed"].addressable_shards[0].data.shape == (12, 64)


# --- Learning ------------------------------------------------------------------------------------

PARITY = r'''
import random


def parity(prompts, completion_ids, **_):
    """Whether the only token is as even as the number that the prompt asks for."""
    return [float(ids[0] % 2 == int(p[0]) % 2) for p, ids in zip(prompts, completion_ids)]


def noise(completions, trainer_state, **_):
    draw = random.Random(trainer_state.global_step)
    return [float(draw.random() < 0.5) for _ in completions]
'''


@pytest.mark.slow
def test_a_run_that_blows_up_stops(config, one_device, tmp_path):
    """Parameters of 1e30 are finite; what they make of a prompt is not."""
    flags = ["optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint_every=1"]
    ended = run(
        "train",
        f"--config={config}:silent",
        f"--workdir={tmp_path / 'w'}",
        *(f"--config.sft.{flag}" for flag in flags),
    )
    assert ended.code == 1
    good = tmp_path / "w/checkpoints/sft/1"
    assert "stage sft, step 2: loss " in ended.err.splitlines()[-1]
    assert ended.err.endswith(f"last good checkpoint: {good}\n")
    assert list((tmp_path / "w/debug").iterdir()) == [tmp_path / "w/debug/sft-2.npz"]


@pytest.mark.slow
def test_learning(config, one_device, tmp_path):
    """A task of one token, from a model that knows nothing and is right half of the time.

    Rewards for it raise it above 0.95; rewards at random leave it alone; inverted ones take it
    below 0.05. A weight of 0 makes a reward a mere metric.
    """
    file = tmp_path / "mine.py"
    file.write_text(PARITY)

    def learn(name: str, parity: float, noise: float) -> float:
        section = {
            "parity": {"function": f"{file}:parity", "weight": parity},
            "noise": {"function": f"{file}:noise", "weight": noise},
        }
        flags = ["num_steps=60", "max_completion_length=1", "max_prompt_length=3"]
        flags += ["data.min_terms=1", "data.max_terms=1", "data.count=200", "log_every=20"]
        flags += ["optimizer.learning_rate=3e-4", "sampling.num_generations=8"]
        flags += ["checkpoint_every=60", "prompts_per_step=16"]
        ended = train_alone(
            config, tmp_path / name, section, *(f"--config.grpo.{flag}" for flag in flags)
        )
        assert ended.code == 0, ended.err
        found = [row["rewards/parity/mean"] for row in metrics(tmp_path / name)]
        assert 0.35 < found[0] < 0.65
        return float(np.mean(found[-10:]))

    assert learn("right", 1.0, 0.0) > 0.95
    assert 0.25 < learn("random", 0.0, 1.0) < 0.75  # a walk: 0.45 to 0.56 on three seeds
    assert learn("inverted", -1.0, 0.0) < 0.05
