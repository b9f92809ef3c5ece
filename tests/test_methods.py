"""Every method through the one loop: what each stage leaves, and that it goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run
from small_run import Ended, read_lines, run

from jax_grpo import train as loop
from jax_grpo.commands.common import load, open_reward_model
from jax_grpo.sharding import make_mesh

# What a completion is worth here: whether its tokens add up to an odd number, which is as good as
# a coin for a model that knows nothing.
REWARD = """
def odd(completion_ids, **_):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""

CONFIG = """
import runpy

def get_config():
    config = runpy.run_path(SMALL)["get_config"]("silent")
    grpo = config.grpo.to_dict()
    del config.sft, config.grpo
    grpo["rewards"] = {"odd": {"function": REWARD}}
    grpo["sampling"]["num_generations"] = 6
    config.stages = ("reward", "ppo", "dpo", "rft", "dapo", "moving")
    config.reward = {
        **grpo, "algorithm": {"name": "reward_model"}, "collect": {"num_prompts": 16},
    }
    pairs = {
        "source": "jax_grpo.arithmetic.preferences", "padded_share": 1.0, "count": 200,
        "min_terms": 4, "max_terms": 4, "max_operand": 5, "max_partial": 9,
    }
    config.pairs = {
        **grpo, "algorithm": {"name": "reward_model"}, "data": pairs, "num_steps": 30,
        "heldout": {**pairs, "split": "heldout", "count": 50}, "max_completion_length": 64,
        "optimizer": {"learning_rate": 1e-3, "b2": 0.99},
    }
    del config.pairs["rewards"], config.pairs["sampling"]
    config.ppo = {
        **grpo, "algorithm": {"name": "ppo", "kl_target": 0.1}, "reward_model": {"stage": "reward"},
        "critic": {"optimizer": {"learning_rate": 1e-3}}, "minibatches": 2, "passes": 2,
        "sampling": {"num_generations": 1}, "reference": {"every": 1},
    }
    config.dpo = {**grpo, "algorithm": {"name": "dpo"}, "collect": {}}
    config.rft = {**grpo, "algorithm": {"name": "sft"}, "num_steps": 6,
                  "collect": {"num_prompts": 16, "rounds": 2, "max_per_prompt": 1}, "pack": 48}
    config.dapo = {**grpo, "algorithm": {"name": "dapo", "truncated": "keep"}, "max_redraws": 2}
    config.moving = {**grpo, "algorithm": {"name": "grpo", "importance_cap": 2.0},
                     "sampling": {"num_generations": 6, "top_k": 12},
                     "reference": {"every": 1, "mix": 0.5}}
    return config
"""
STAGES = ("reward", "ppo", "dpo", "rft", "dapo", "moving")


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Compiling is most of the work here, and less optimised code is as right.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def one_device() -> Iterator[None]:
    with small_run.one_device():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("methods")
    small = small_run.write_config(directory)
    (directory / "mine.py").write_text(REWARD)
    file = directory / "methods.py"
    reward = f"{directory / 'mine.py'}:odd"
    file.write_text(CONFIG.replace("SMALL", repr(small)).replace("REWARD", repr(reward)))
    return file


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run of all of them that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "w"
    with small_run.one_device():
        return workdir, run("train", f"--config={config}", f"--workdir={workdir}")


def lines(workdir: Path, stage: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(workdir / "metrics.jsonl") if row["stage"] == stage]


def collected(workdir: Path, name: str) -> dict[str, Any]:
    return json.loads((workdir / "collected" / f"{name}.json").read_text())


def test_every_stage_takes_its_steps(whole):
    workdir, ended = whole
    assert ended.code == 0, ended.err
    for stage in STAGES:
        rows = lines(workdir, stage)
        assert [row["step"] for row in rows] == list(range(1, 7 if stage == "rft" else 5))
        assert all(row["finite"] == 1 and row["grad_norm"] > 0 for row in rows)
    summary = json.loads((workdir / "summary.json").read_text())["stages"]
    assert tuple(summary) == STAGES
    # 8 prompts of 9 tokens, once each, and 8 completions or 48; PPO goes over them twice
    for stage, group, passes in (("ppo", 1, 2), ("moving", 6, 1)):
        drawn = sum(8 * group * row["completions/mean_length"] for row in lines(workdir, stage))
        tokens = (4 * 8 * 9 + round(drawn)) * passes
        assert summary[stage]["optimizer_tokens"] == tokens


def test_what_is_collected_is_what_the_verifier_says(whole):
    for name, group in [("reward-0", 2), ("dpo-0", 2), ("rft-0", 1), ("rft-1", 1)]:
        content = collected(whole[0], name)
        counts, rows = content["counts"], content["rows"]
        prompts = 40 if name == "dpo-0" else 16
        assert (counts["prompts"], counts["completions"]) == (prompts, prompts * 6)
        assert 0 < counts["solved"] <= prompts
        assert 0 <= counts["duplicates"] < counts["accepted"] < prompts * 6
        assert rows
        for row in rows:
            ids = row["completion_ids"]
            assert [sum(each) % 2 for each in ids] == [1, 0][:group] == row["rewards"]
            assert len(row["completions"]) == group
        pairs = [(row["row"], *map(tuple, row["completion_ids"])) for row in rows]
        assert len(set(pairs)) == len(pairs)
    first, second = lines(whole[0], "rft")[0], lines(whole[0], "rft")[3]
    for row, name in ((first, "rft-0"), (second, "rft-1")):
        counts = collected(whole[0], name)["counts"]
        assert row["collected/yield"] == pytest.approx(counts["accepted"] / 96)
        assert row["collected/prompts_solved"] == pytest.approx(counts["solved"] / 16)
    assert "collected/yield" not in lines(whole[0], "rft")[1]
    # one completion of a prompt at most, and the second round is of other prompts or other answers
    each = [row["row"] for row in collected(whole[0], "rft-0")["rows"]]
    assert len(set(each)) == len(each)
    assert collected(whole[0], "rft-0") != collected(whole[0], "rft-1")


def test_sampled_tokens_are_counted(whole):
    summary = json.loads((whole[0] / "summary.json").read_text())["stages"]
    rft = [collected(whole[0], f"rft-{i}")["counts"]["tokens"] for i in (0, 1)]
    assert summary["rft"]["sampled_tokens"] == sum(rft)
    drawn = [8 * row["completions/mean_length"] for row in lines(whole[0], "ppo")]
    assert summary["ppo"]["sampled_tokens"] == round(sum(drawn))


def test_the_first_steps_are_what_they_must_be(whole):
    workdir, _ = whole
    dpo = lines(workdir, "dpo")[0]  # the policy is its own reference
    assert dpo["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert dpo["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert lines(workdir, "dpo")[3]["rewards/margins"] > 0
    kept = np.load(workdir / "reference" / "dpo-0.npy")
    assert kept.shape == (len(collected(workdir, "dpo-0")["rows"]), 2, 8)
    ppo = lines(workdir, "ppo")
    assert ppo[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert ppo[0]["rewards/reward_model/mean"] != ppo[3]["rewards/reward_model/mean"]
    # adaptive, in 10% steps of at most a fifth
    weights = [row["kl_weight"] for row in ppo]
    assert weights[0] == pytest.approx(0.05)
    assert all(0.979 < b / a < 1.021 for a, b in zip(weights, weights[1:], strict=False))
    assert weights[-1] != 0.05
    assert {"rewards/odd/mean", "value_loss", "critic/grad_norm"} <= ppo[0].keys()
    assert ppo[0]["critic/learning_rate"] == pytest.approx(1e-3)
    moving = lines(workdir, "moving")
    assert abs(moving[0]["kl"]) < 1e-6 < moving[2]["kl"]
    assert 0 < moving[2]["sampling/sampling_logp_difference/max"] < 1e-4
    # top-k kept less than all, so a token weighs less than 1
    assert 0 < moving[0]["sampling/importance_sampling_ratio/mean"] < 1
    dapo = lines(workdir, "dapo")
    assert all(row["frac_reward_zero_std"] == 0 or row["redraws"] == 2 for row in dapo)
    assert any(row["redraws"] > 0 for row in dapo)


def test_the_reward_model_is_one_of_its_own_and_the_policy_goes_on(whole):
    workdir, mesh = whole[0], make_mesh(devices=jax.devices()[:1])
    opened = open_reward_model(str(workdir), mesh)
    params = jax.device_get(opened.read())
    assert params["score"].shape == (opened.config.hidden_size,) and "head" not in params
    policy = load(str(workdir), mesh)
    assert np.any(np.asarray(policy.params["embed"]) != params["embed"])


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_in_every_stage(whole, config, one_device, tmp_path):
    """Bit for bit, with the critic, the adaptive weight, a round's data and a moving reference."""
    command = ("train", f"--config={config}", f"--workdir={tmp_path / 'w'}")
    for stage in STAGES:
        step = "policy_step" if stage in ("ppo", "dapo", "moving") else "dataset_step"
        original = getattr(loop, step)

        def interrupted(*args: Any, original: Any = original, stage: str = stage) -> Any:
            found = original(*args)
            # Both take the step there; the last of six is in the second round.
            if args[1].name == stage and args[5] == (5 if stage == "rft" else 3):
                raise KeyboardInterrupt
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, step, interrupted)
            assert run(*command).code == 130
    assert run(*command).code == 0
    timed = ("seconds/", "tokens_per_second/")
    for stage in STAGES:
        found, expected = (
            [{k: v for k, v in row.items() if not k.startswith(timed)} for row in lines(w, stage)]
            for w in (tmp_path / "w", whole[0])
        )
        assert found == expected
    counts = ("sampled_tokens", "optimizer_tokens")
    found, expected = (
        {
            stage: [values[name] for name in counts]
            for stage, values in json.loads((w / "summary.json").read_text())["stages"].items()
        }
        for w in (tmp_path / "w", whole[0])
    )
    assert found == expected


def test_a_reward_model_is_exported_and_scores_again(whole, config, one_device, tmp_path):
    """As a Hugging Face directory, and as the workdir that it is in."""
    exported = tmp_path / "exported"
    flags = (f"--model={whole[0]}", f"--out={exported}", "--dtype=float32", "--reward_model")
    assert run("export", *flags).code == 0
    means = []
    for path in (whole[0], exported):
        workdir = tmp_path / f"from-{Path(path).name}"
        ended = run(
            "train",
            f"--config={config}",
            f"--workdir={workdir}",
            "--config.stages=('ppo',)",
            f"--config.ppo.reward_model={{'path':'{path}','name':'taste','weight':0.5}}",
            "--config.ppo.num_steps=1",
            "--config.ppo.critic.start=policy",
        )
        assert ended.code == 0, ended.err
        (row,) = lines(workdir, "ppo")
        means.append(row["rewards/taste/mean"])
        assert row["reward"] == pytest.approx(
            row["rewards/odd/mean"] + 0.5 * row["rewards/taste/mean"], abs=1e-5
        )
    assert means[0] == pytest.approx(means[1], abs=1e-5)
    ended = run(
        "train",
        f"--config={config}",
        f"--workdir={tmp_path / 'x'}",
        "--config.stages=('ppo',)",
        f"--config.ppo.reward_model={{'path':'{tmp_path}'}}",
    )
    assert (ended.code, ended.err.count("\n")) == (2, 1)


def test_held_out_pairs_are_measured(config, one_device, tmp_path):
    """A reward model that learns which answer is longer knows it of pairs that it has not seen."""
    flags = (f"--config={config}", f"--workdir={tmp_path / 'w'}", "--config.stages=('pairs',)")
    ended = run("train", *flags)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "w" / "summary.json").read_text())["stages"]["pairs"]
    assert found["heldout/accuracy"] > 0.95
    assert found["sampled_tokens"] == 0


# --- Learning ------------------------------------------------------------------------------------

PARITY = r'''
import random


def parity(prompts, completion_ids, **_):
    """Whether the first token is as even as the number that the prompt begins with."""
    return [float(ids[0] % 2 == int(p[0]) % 2) for p, ids in zip(prompts, completion_ids)]


def noise(completion_ids, **_):
    """A coin for each, whatever it says."""
    coin = random.Random(repr([list(map(int, ids)) for ids in completion_ids]))
    return [float(coin.random() < 0.5) for _ in completion_ids]
'''

LEARN = """
import runpy

def get_config(method):
    config = runpy.run_path(SMALL)["get_config"]()
    grpo = config.grpo.to_dict()
    del config.sft
    data = {**grpo["data"], "min_terms": 2, "max_terms": 2, "count": 400}
    config.evaluation.data.update(min_terms=2, max_terms=2, count=64, split="train", seed=99)
    config.evaluation.rewards = {"parity": {"function": FILE + ":parity"}}
    config.evaluation.measures = {"accuracy": "parity"}
    config.evaluation.max_new_tokens, config.evaluation.max_prompt_length = 8, 5
    config.evaluation.num_generations, config.evaluation.batch = 8, 64
    grpo.update(
        data=data, num_steps=60, prompts_per_step=16, max_completion_length=8, max_prompt_length=5,
        checkpoint_every=60, sampling={"num_generations": 8},
        optimizer={"learning_rate": 1e-3, "b2": 0.99},
        rewards={"parity": {"function": FILE + ":parity", "weight": 1.0},
                 "noise": {"function": FILE + ":noise", "weight": 0.0}},
    )
    config.stages = ("learn",)
    config.learn = {**grpo, **{
        "grpo": {"algorithm": {"name": "grpo", "kl_weight": 0.0}},
        "rft_online": {"algorithm": {"name": "rft", "threshold": 0.0}},
        "rft": {"algorithm": {"name": "sft"}, "collect": {"rounds": 3, "threshold": 0.0}},
        "dpo": {"algorithm": {"name": "dpo"}, "collect": {"rounds": 2, "threshold": 0.0}},
        "ppo": {"algorithm": {"name": "ppo"}, "critic": {"optimizer": {"learning_rate": 1e-3}}},
    }[method]}
    del config.grpo
    return config
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rft_online", "rft", "dpo", "ppo"])
def test_learning(method, one_device, tmp_path):
    """A task of the first token, from a model that knows nothing and is right half of the time.

    Rewards for it raise it above 0.9; rewards that have nothing to do with it leave it near a half;
    inverted ones take it below 0.1.
    """
    (tmp_path / "mine.py").write_text(PARITY)
    small = small_run.write_config(tmp_path)
    file = tmp_path / "learn.py"
    mine = repr(str(tmp_path / "mine.py"))
    file.write_text(LEARN.replace("SMALL", repr(small)).replace("FILE", mine))

    def learn(name: str, parity: float, noise: float) -> float:
        threshold = [f"algorithm.threshold={-0.5 * (parity < 0)}"] * (method == "rft_online")
        threshold += [f"collect.threshold={-0.5 * (parity < 0)}"] * (method in ("rft", "dpo"))
        flags = [f"rewards.parity.weight={parity}", f"rewards.noise.weight={noise}", *threshold]
        ended = run(
            "train",
            f"--config={file}:{method}",
            f"--workdir={tmp_path / name}",
            *(f"--config.learn.{flag}" for flag in flags),
        )
        assert ended.code == 0, ended.err
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert 0.3 < summary["before"]["accuracy"] < 0.7
        return summary["stages"]["learn"]["accuracy"]

    assert learn("right", 1.0, 0.0) > 0.9
    assert 0.2 < learn("random", 0.0, 1.0) < 0.8
    assert learn("inverted", -1.0, 0.0) < 0.1
