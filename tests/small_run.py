"""A run that takes seconds, for the tests of the commands and of the loop."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental.compilation_cache import compilation_cache

from jax_grpo import sharding
from jax_grpo.__main__ import main

CONFIGS = Path(__file__).parents[1] / "configs"

# The quickstart with few steps of few short sequences; `FILE:silent` is it without evaluation.
# P = 8 is divided by the eight devices that tests have.
CONFIG = """
import runpy

def get_config(what=""):
    config = runpy.run_path(QUICKSTART)["get_config"]()
    config.evaluation.data.count = 12
    config.evaluation.batch = 8
    config.evaluation.max_new_tokens = 8
    for data in (config.evaluation.data, config.sft.data, config.grpo.data):
        data.min_terms = data.max_terms = 4
        data.max_operand, data.max_partial = 5, 9
    for stage in (config.sft, config.grpo):
        stage.data.count = 40
        stage.optimizer.b2 = 0.99
        stage.optimizer.final_scale = 0.1
        stage.num_steps = 4
        stage.prompts_per_step = 8
        stage.max_prompt_length = 9
        stage.checkpoint_every = 2
        stage.log_every = 2
    config.sft.data.thinking_share = 0.0
    config.sft.max_completion_length = 4
    config.sft.optimizer.learning_rate = 1e-3
    config.sft.optimizer.warmup_steps = 1
    config.grpo.optimizer.learning_rate = 3e-4
    config.grpo.max_completion_length = 8
    config.grpo.sampling.num_generations = 4
    config.grpo.data.split = "train"
    config.grpo.data.seed = 13  # where a model that knows nothing is right once in the first step
    if what == "silent":
        del config.evaluation
    return config
"""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(*args: object) -> Ended:
    """Runs a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["jax_grpo", *map(str, args)])
    return Ended(code, out.getvalue(), err.getvalue())


def write_config(directory: Path, what: str = "") -> str:
    """Writes the small config and returns what `--config` is given for it."""
    file = directory / "small.py"
    file.write_text(CONFIG.replace("QUICKSTART", repr(str(CONFIGS / "quickstart.py"))))
    return f"{file}:{what}" if what else str(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def compiled_once(directory: Path) -> Iterator[None]:
    """Keeps what is compiled, so that the same run is not compiled again within the session."""
    options = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Lets the commands see one of the eight devices, which is much faster here."""
    make = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])

    def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Any = None) -> Any:
        return make(data, fsdp, tensor)

    with contextlib.ExitStack() as stack:
        for command in ("recipe", "generate", "score", "export"):
            name = f"jax_grpo.commands.{command}.make_mesh"
            stack.enter_context(mock.patch(name, make_mesh))
        yield
