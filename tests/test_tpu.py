"""The real TPU compiler, without a TPU: the jitted functions compile for a slice of v5e.

libtpu is noisy in the environment that runs the tests, so it is asked in a process of its own, by
the interpreter that JAX_GRPO_TPU_PYTHON names (or this one, when it has libtpu).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PYTHON = os.environ.get("JAX_GRPO_TPU_PYTHON", sys.executable)
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

PROGRAM = r"""
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax_grpo.algorithms import grpo
from jax_grpo.evaluate import Verifiers
from jax_grpo.models.config import LlamaConfig
from jax_grpo.optimizer import make_optimizer
from jax_grpo.sampling import Truncation
from jax_grpo.sharding import make_mesh
from jax_grpo.stages import Model, Sampling, Stage, abstract_calls

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = make_mesh(data=1, fsdp=4, tensor=2, devices=devices)
config = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, max_position_embeddings=512,
)
optimizer, schedule = make_optimizer(learning_rate=1e-6, total_steps=10)
stage = Stage(
    name="grpo", number=0, seed=0, algorithm=grpo(), optimizer=optimizer, learning_rate=schedule,
    data=None, num_steps=10, prompts_per_step=8, prompt_length=128, completion_length=128,
    sampling=Sampling(4, 128, lambda step: 1.0, Truncation()),
    verifiers=Verifiers((None,), ("correctness",), (1.0,)),
    passes=1, minibatches=1, micro_batches=2, remat="full", attention_impl="xla",
    logits_chunk=64, max_skipped=0, checkpoint_every=1, keep_checkpoints=1, log_every=1,
)
found = {}
with jax.set_mesh(mesh):
    calls = abstract_calls(Model(config, None, (1,), mesh, jnp.bfloat16), stage)
    for name, (function, arguments, _) in calls.items():
        compiled = function.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        gathers = re.findall(r"= (\w+\[[\d,]*\])[^=]*? all-gather(?:-start)?\(", text)
        found[name] = {
            "argument": memory.argument_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "all_gather": gathers,
        }
    params = calls["update"].arguments[0].params
    found["params"] = sum(x.size * 4 for x in jax.tree.leaves(params))
print("FOUND" + json.dumps(found))
"""


def _has_libtpu() -> bool:
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('libtpu') is None)"
    return subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0


@pytest.fixture(scope="module")
def found():
    if not _has_libtpu():
        pytest.skip("libtpu is not installed: JAX_GRPO_TPU_PYTHON can name an interpreter with it")
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND"))


def test_all_functions_compile_for_a_tpu(found):
    names = {"sampling_copy", "generate", "score", "experience", "update", "params"}
    assert set(found) == names


def test_the_update_gives_its_state_back_in_place(found):
    # Parameters and two moments, spread over 8 devices (norms are replicated): all donated.
    # (A chip pads small arrays to its tiles, so its share is somewhat more than an eighth.)
    state = 3 * found["params"]
    assert state / 8 <= found["update"]["alias"] <= found["update"]["argument"] < state / 4


def test_the_decode_loop_gathers_no_weights(found):
    # What is gathered is drawn tokens and scores of the heads' parts, never a weight matrix.
    widths = {256, 512}
    for shape in found["generate"]["all_gather"]:
        sizes = [int(n) for n in shape[shape.index("[") + 1 : -1].split(",") if n]
        assert not (len(sizes) >= 2 and set(sizes[-2:]) <= widths), shape
