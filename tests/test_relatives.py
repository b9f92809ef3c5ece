"""Every algorithm that samples, by its name in a config: two steps of the trainer each.

The tiny model samples. For the policy in the updates, and the reference, a table of bigrams made of
its embeddings stands: to compile the whole of it for each algorithm would take minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import small_run

from jax_grpo.types import Outputs

# Beside the small config: a stage for each algorithm, with a reward that varies from the start.
CONFIG = """
import copy, pathlib, runpy

def letters(prompts, completions, **columns):
    return [len(set(text)) / 8 for text in completions]

def get_config():
    small = runpy.run_path(str(pathlib.Path(__file__).with_name("small.py")))
    config = small["get_config"]("silent")
    config.grpo.num_steps = 2
    config.grpo.checkpoint_every = 100
    config.grpo.passes = 2
    config.grpo.rewards = {"letters": {"function": __file__ + ":letters"}}
    for name, settings in ALGORITHMS.items():
        config[name] = copy.deepcopy(config.grpo)
        config[name].algorithm = {"name": name, **settings}
    config.stages = tuple(ALGORITHMS)
    return config
"""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"reduction_length": 8},
    "dapo": {"dynamic_sampling": False, "truncated": "keep"},
    "bnpo": {},
    "gspo": {"importance_cap": 2.0, "importance_level": "product"},
    "cispo": {},
    "sapo": {},
    "rloo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "gpg": {},
    "maxrl": {"top_entropy": 0.2},
    "rft": {},
}


def bigram_score(config: Any, params: Any, layout: Any, **_: Any) -> Outputs:
    """Each token is predicted from the one before it alone."""
    del config
    last = jnp.take_along_axis(layout.prompt_ids, layout.prompt_lengths[:, None] - 1, axis=1)
    first = jnp.broadcast_to(last[:, :, None], layout.completion_ids[..., :1].shape)
    before = jnp.concatenate([first, layout.completion_ids[..., :-1]], axis=-1)
    table = params["embed"]
    logps = jax.nn.log_softmax(table[before] @ table.T)
    chosen = jnp.take_along_axis(logps, layout.completion_ids[..., None], axis=-1)[..., 0]
    return Outputs(chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1))


@contextlib.contextmanager
def compiled_in_haste() -> Iterator[None]:
    """What is compiled here runs four times, so to compile it fast is worth more than speed."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of one run of them all."""
    directory: Path = tmp_path_factory.mktemp("relatives")
    small_run.write_config(directory)
    config = directory / "relatives.py"
    config.write_text(CONFIG.replace("ALGORITHMS", repr(ALGORITHMS)))
    compiled = small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled")
    table = mock.patch("jax_grpo.stages.score", bigram_score)
    with compiled, compiled_in_haste(), small_run.one_device(), table:
        ended = small_run.run("train", f"--config={config}", f"--workdir={directory / 'w'}")
    assert ended.code == 0, ended.err
    return small_run.read_lines(directory / "w" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps(lines, name):
    steps = [row for row in lines if row["stage"] == name]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["finite"] == 1 and row["grad_norm"] > 0


def test_what_is_no_algorithm_or_no_setting_is_refused_in_one_line(tmp_path):
    config = small_run.write_config(tmp_path)
    line = ["train", f"--config={config}", f"--workdir={tmp_path / 'w'}"]
    ended = small_run.run(*line, "--config.grpo.algorithm={'name':'policy_gradient'}")
    assert ended.code != 0
    known = "bnpo, cispo, dapo, dpo, dr_grpo, gpg, grpo, gspo, maxrl, ppo, reinforce_pp, "
    assert f"'policy_gradient' is not one of: {known}" in ended.err
    ended = small_run.run(*line, "--config.grpo.algorithm={'name':'dr_grpo'}")
    assert "config.grpo.algorithm: reduction_length is missing" in ended.err
    ended = small_run.run(*line, "--config.grpo.algorithm={'name':'rft','advantage':'raw'}")
    assert "no key 'advantage'; valid keys: threshold, top_entropy, reduction, " in ended.err
