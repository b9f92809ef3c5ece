"""Meshes: what is spread where, on devices that are there and on those that are not."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_grpo.algorithms import grpo
from jax_grpo.models.config import PRESETS, LlamaConfig
from jax_grpo.models.llama import cast_params, param_axes, param_shapes, unstack_layers
from jax_grpo.optimizer import make_optimizer
from jax_grpo.rollout import generate, make_sampling_copy
from jax_grpo.sampling import purpose_key
from jax_grpo.scoring import Layout, make_models, plan, score
from jax_grpo.sharding import (
    batch_sharding,
    batch_shards,
    make_mesh,
    param_shardings,
    replicated,
    state_shardings,
)
from jax_grpo.step import init_state, make_update
from jax_grpo.types import Experience, PromptBatch, Rollout, TrainState

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rope_theta=100.0,
)
P, G, L, C = 8, 4, 5, 6
UNEVEN = PRESETS["smollm2-135m"]  # 9 and 3 heads
ADAMW, _ = make_optimizer(learning_rate=1e-3, total_steps=10)


def shardings(config: LlamaConfig, mesh: Any, role: Any) -> Any:
    return param_shardings(param_axes(config), param_shapes(config), mesh, role)


def specs(config: LlamaConfig, mesh: Any, role: Any) -> dict[str, tuple[Any, ...]]:
    """The spec of each parameter by name, one entry per dimension."""
    found = {}
    for path, sharding in jax.tree.leaves_with_path(shardings(config, mesh, role)):
        found[path[-1].key] = tuple(sharding.spec)
    return found


# --- The mesh ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, devices, shape",
    [
        ((), 8, (1, 8, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((-1, 4, 1), 8, (2, 4, 1)),
        ((1, 2, -1), 8, (1, 2, 4)),
        ((8, 1, 1), 8, (8, 1, 1)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((8, -1, 1), 8, (8, 1, 1)),
        ((-1, 3, 1), 6, (2, 3, 1)),
        ((1, 1, 1), 1, (1, 1, 1)),
    ],
)
def test_mesh_sizes(asked, devices, shape):
    mesh = make_mesh(*asked, devices=jax.devices()[:devices])
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(jax.devices()[:devices])
    assert batch_shards(mesh) == shape[0] * shape[1]


def test_the_default_mesh_is_of_all_devices():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    "asked, message",
    [
        ((3, -1, 1), r"data 3 x fsdp -1 x tensor 1 does not fit 8 devices"),
        ((16, -1, 1), r"data 16 x fsdp -1 x tensor 1 does not fit 8 devices"),
        ((1, 4, 1), r"data 1 x fsdp 4 x tensor 1 does not fit 8 devices"),
        ((-1, -1, 1), r"at most one is -1"),
        ((-1, -1, -1), r"at most one is -1"),
        ((0, -1, 1), r"sizes are positive"),
        ((-2, -4, 1), r"sizes are positive"),
        ((1, 1, -8), r"sizes are positive"),
    ],
)
def test_mesh_refuses_what_does_not_fit(asked, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*asked)


def test_batches_are_spread_over_data_and_fsdp():
    mesh = make_mesh(2, 2, 2)
    x = jax.device_put(np.arange(8 * 3).reshape(8, 3), batch_sharding(mesh))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 3)}
    starts = {shard.device: shard.index[0].start for shard in x.addressable_shards}
    for d, f, t in np.ndindex(2, 2, 2):
        assert starts[mesh.devices[d, f, t]] == 2 * (2 * d + f)
    y = jax.device_put(np.arange(5), replicated(mesh))
    assert {shard.data.shape for shard in y.addressable_shards} == {(5,)}


# --- Parameters ----------------------------------------------------------------------------------


def test_training_spreads_over_fsdp_and_tensor_and_sampling_over_tensor(caplog):
    mesh = make_mesh(1, 4, 2)
    config = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True)
    training = {
        "embed": ("tensor", "fsdp"),
        "head": ("tensor", "fsdp"),
        "q": (None, "fsdp", "tensor", None),
        "k": (None, "fsdp", "tensor", None),
        "v": (None, "fsdp", "tensor", None),
        "o": (None, "tensor", None, "fsdp"),
        "gate": (None, "fsdp", "tensor"),
        "up": (None, "fsdp", "tensor"),
        "down": (None, "tensor", "fsdp"),
        "q_bias": (None, "tensor", None),
        "k_bias": (None, "tensor", None),
        "v_bias": (None, "tensor", None),
        "gate_bias": (None, "tensor"),
        "up_bias": (None, "tensor"),
        **dict.fromkeys(["o_bias", "down_bias", "attn_norm", "mlp_norm"], (None, None)),
        "norm": (None,),
    }
    assert specs(config, mesh, "training") == training
    without = {
        name: tuple(axis if axis != "fsdp" else None for axis in spec)
        for name, spec in training.items()
    }
    assert specs(config, mesh, "sampling") == without
    assert not caplog.records  # all divides


def test_what_does_not_divide_is_replicated_and_said_once(caplog):
    mesh = make_mesh(1, 4, 2)
    with caplog.at_level(logging.WARNING):
        specs(UNEVEN, mesh, "training")
        training = specs(UNEVEN, mesh, "training")
    [record] = caplog.records
    said = record.getMessage()
    assert said.count("heads (9) over tensor (2)") == 1
    assert said.count("kv_heads (3) over tensor (2)") == 1
    assert said.count(" over ") == 2  # 49152, 576 and 1536 divide
    assert training["q"] == training["k"] == (None, "fsdp", None, None)
    assert training["o"] == (None, None, None, "fsdp")
    assert training["gate"] == (None, "fsdp", "tensor") and training["embed"] == ("tensor", "fsdp")
    caplog.clear()
    sampling = specs(UNEVEN, mesh, "sampling")
    assert not caplog.records
    assert "fsdp" not in {axis for spec in sampling.values() for axis in spec}
    assert sampling["q"] == (None, None, None, None) and sampling["gate"] == (None, None, "tensor")


def test_an_uneven_width_is_replicated_over_fsdp(caplog):
    config = dataclasses.replace(CONFIG, hidden_size=18, vocab_size=23)
    found = specs(config, make_mesh(1, 4, 2), "training")
    assert found["q"] == (None, None, "tensor", None) and found["embed"] == (None, None)
    assert "embed (18) over fsdp (4)" in caplog.text and "vocab (23) over tensor (2)" in caplog.text


@pytest.mark.parametrize("name", ["llama3-8b", "smollm2-360m", "tinyllama-1.1b"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_every_shard_of_a_preset_is_a_whole_number(name, shape):
    config, mesh = PRESETS[name], make_mesh(*shape)
    for role in ("training", "sampling"):
        tree = shardings(config, mesh, role)
        jax.tree.map(lambda x, s: s.shard_shape(x.shape), param_shapes(config), tree)


def bytes_per_device(tree: Any, where: Any) -> int:
    sizes = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, tree, where
    )
    return sum(jax.tree.leaves(sizes))


def abstract_state(config: LlamaConfig, optimizer: Any) -> TrainState:
    return jax.eval_shape(
        lambda params: init_state(params, optimizer, grpo())._replace(
            algorithm_state={"weight": jnp.float32(1)}
        ),
        param_shapes(config),
    )


def test_moments_are_spread_like_their_parameters():
    config, mesh = PRESETS["llama3-8b"], make_mesh(1, 4, 2)
    state = abstract_state(config, ADAMW)
    params = shardings(config, mesh, "training")
    where = state_shardings(state, state.params, params, mesh)
    assert jax.tree.structure(where) == jax.tree.structure(state)
    assert where.params == params
    has_moments = lambda x: hasattr(x, "mu")  # noqa: E731
    adam, adam_where = (
        next(filter(has_moments, jax.tree.leaves(tree.opt_state, is_leaf=has_moments)))
        for tree in (state, where)
    )
    assert adam_where.mu == adam_where.nu == params
    assert jax.tree.structure(adam.mu) == jax.tree.structure(state.params)
    everywhere = replicated(mesh)
    assert where.step == adam_where.count == where.algorithm_state["weight"] == everywhere
    # 8 billion parameters and two moments, over eight devices: norms alone are whole everywhere
    total = bytes_per_device(state, jax.tree.map(lambda _: everywhere, state))
    assert total == pytest.approx(3 * 4 * 8.03e9, rel=1e-3)
    assert bytes_per_device(state, where) == pytest.approx(total / 8, rel=1e-3)


def test_states_without_moments_have_shardings_too():
    mesh = make_mesh()
    state = abstract_state(CONFIG, optax.sgd(1.0))
    params = shardings(CONFIG, mesh, "training")
    where = state_shardings(state, state.params, params, mesh)
    assert jax.tree.structure(where) == jax.tree.structure(state)
    assert where.params == params and where.step == replicated(mesh)


# --- Devices that are not there ------------------------------------------------------------------

POD = AbstractMesh((4, 16, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def like(tree: Any, where: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )


def spread(mesh: Any, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def abstract_prompts(mesh: Any, P: int, L: int) -> PromptBatch:
    lengths = spread(mesh, jnp.int32, P)
    return PromptBatch(spread(mesh, jnp.int32, P, L), lengths, lengths)


def abstract_layout(mesh: Any, P: int, G: int, L: int, C: int) -> Layout:
    batch = functools.partial(spread, mesh)
    prompts, completions = abstract_prompts(mesh, P, L), batch(jnp.int32, P, G, C)
    lengths = batch(jnp.int32, P, G)
    return Layout(prompts.token_ids, prompts.lengths, completions, lengths, batch(jnp.float32, P))


def scalar(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def trace_generate(config: LlamaConfig, mesh: Any, params: Any, sizes: Any) -> Any:
    P, G, L, C = sizes
    run = functools.partial(
        generate, config, end_ids=(1, 2), num_generations=G, max_completion_length=C
    )
    key = jax.eval_shape(lambda: purpose_key(0, 0, 0, 0))
    scalars = (scalar(jnp.float32), scalar(jnp.int32))
    return jax.jit(run).trace(params, abstract_prompts(mesh, P, L), key, *scalars)


def parameters_of(text: str) -> list[str]:
    """The parameters of a lowered program's main function, with their shardings."""
    [line] = [line for line in text.splitlines() if "func.func public @main" in line]
    return re.findall(r"%arg\d+: (tensor<.*?>) \{([^%]*)\}", line)


def test_the_study_lowers_for_a_pod_that_is_not_there():
    """Llama-3 8B in bfloat16, 64 prompts x 8 completions, on 128 TPU devices; nothing is made."""
    config, sizes = PRESETS["llama3-8b"], (64, 8, 256, 512)
    tpu = functools.partial(dict, lowering_platforms=("tpu",))
    with jax.sharding.use_abstract_mesh(POD):
        sampling, training = (shardings(config, POD, role) for role in ("sampling", "training"))
        params = like(param_shapes(config, jnp.bfloat16), sampling)
        sampled = trace_generate(config, POD, params, sizes).lower(**tpu())

        params = like(param_shapes(config, jnp.bfloat16), training)
        layout = abstract_layout(POD, *sizes)
        scored = jax.jit(functools.partial(score, config, chunk=128)).trace(params, layout)

        state = abstract_state(config, ADAMW)
        where = state_shardings(state, state.params, training, POD)
        batch = functools.partial(spread, POD, jnp.float32)
        experience = Experience(batch(64, 8), *(batch(64, 8, 512) for _ in range(3)))
        settings = {"remat": "full", "chunk": 128, "compute_dtype": jnp.bfloat16}
        models = make_models(config, entropy=True, **settings)
        update = make_update(models, ADAMW, grpo())
        updated = jax.jit(update, donate_argnums=0).trace(like(state, where), layout, experience)
        programs = [sampled, scored.lower(**tpu()), updated.lower(**tpu())]
    for program in programs:
        text = program.as_text()
        assert "mhlo.num_partitions = 128" in text
        assert '"data"=4, "fsdp"=16, "tensor"=2' in text
    # the weights come as they are spread: the gate [32, 4096, 14336] of each role
    gate = {"sampling": '[{}, {}, {"tensor"}]', "training": '[{}, {"fsdp"}, {"tensor"}]'}
    kinds = ("sampling", "training", "training")
    for program, role, dtype in zip(programs, kinds, ("bf16", "bf16", "f32"), strict=True):
        kind = f"tensor<32x4096x14336x{dtype}>"
        found = [where for tensor, where in parameters_of(program.as_text()) if tensor == kind]
        assert found and all(gate[role] in where for where in found)
    # [P, G, C, V] is 64 x 8 x 512 x 128256: it exists nowhere, nor does it in one device's part
    for program in programs:
        assert not re.search(r"tensor<(64x8x512|8x512|262144)x128256x", program.as_text())
    assert all("tensor<64x8x128x128256x" in x.as_text() for x in programs[1:])  # a chunk does


# --- Devices that are there ----------------------------------------------------------------------


def computations(hlo: str) -> dict[str, list[str]]:
    """The instructions of each computation of a compiled program."""
    found: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if start:
            found[start.group(1)] = []
        elif line.startswith("  ") and found:
            found[list(found)[-1]].append(line)
    return found


def inside_loops(hlo: str) -> list[str]:
    """All instructions that some `while` loop runs, called computations included."""
    parts = computations(hlo)
    todo = [
        m for lines in parts.values() for x in lines for m in re.findall(r"body=%?([\w.\-]+)", x)
    ]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for line in parts[name]:
                todo += re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", line)
    return [line for name in seen for line in parts[name]]  # fmt: skip


def gathered(lines: list[str]) -> list[int]:
    """How many numbers each all-gather among the instructions gives."""
    sizes = []
    for line in lines:
        found = re.search(r" = (.*?) all-gather(?:-start)?\(", line)
        if found:
            shapes = re.findall(r"\w+\[([\d,]*)\]", found.group(1))
            sizes += [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    return sizes


SMALLEST_WEIGHT = 16 * 2 * 6 // 2  # a device's half of one layer's keys


def test_decoding_gathers_no_weights():
    mesh = make_mesh(1, 4, 2)
    training = like(param_shapes(CONFIG), shardings(CONFIG, mesh, "training"))
    with jax.set_mesh(mesh):
        sampling = jax.eval_shape(make_sampling_copy(CONFIG, mesh, jnp.float32), training)
        hlo = {
            role: trace_generate(CONFIG, mesh, params, (P, G, L, C)).lower().compile().as_text()
            for role, params in {"sampling": sampling, "training": training}.items()
        }
    loop = inside_loops(hlo["sampling"])
    assert any("dot(" in line or "custom-call" in line for line in loop)  # the model is in there
    # the most that is gathered is one best token per completion and half of the vocabulary
    assert 0 < max(gathered(loop)) <= (P // 4) * G * 2 < SMALLEST_WEIGHT
    assert max(gathered(hlo["sampling"].splitlines())) < SMALLEST_WEIGHT
    # what is spread over fsdp has to be gathered, and this test sees it
    assert max(gathered(hlo["training"].splitlines())) >= SMALLEST_WEIGHT


def test_the_sampling_copy_is_cast_gathered_and_unstacked():
    mesh = make_mesh(1, 4, 2)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), param_shapes(CONFIG))
    with jax.set_mesh(mesh):
        given = jax.device_put(params, shardings(CONFIG, mesh, "training"))
        copy = make_sampling_copy(CONFIG, mesh, jnp.bfloat16)(given)
    expected = unstack_layers(cast_params(params, jnp.bfloat16))
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(same, jax.device_get(copy), jax.device_get(expected))
    for path, x in jax.tree.leaves_with_path(copy):
        spec = specs(CONFIG, mesh, "sampling")[path[-1].key]
        spec = spec[1:] if path[0].key == "layers" else spec
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), x.ndim), path


def test_uneven_heads_score_alike_on_eight_devices():
    config = dataclasses.replace(CONFIG, num_heads=3, num_kv_heads=3, vocab_size=23)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(0.5 * (x.shape[-1] == 16), 0.3, x.shape).astype(np.float32),
        param_shapes(config),
    )
    ints = lambda high, *shape: rng.integers(1, high, shape).astype(np.int32)  # noqa: E731
    prompts = PromptBatch(ints(23, P, L), ints(L + 1, P), np.arange(P, dtype=np.int32))
    zeros, lengths = np.zeros((P, G, C), np.float32), ints(C + 1, P, G)
    mask = np.arange(C) < lengths[..., None]
    rollout = Rollout(
        prompts, ints(23, P, G, C), lengths, mask, zeros, zeros, zeros[..., 0] > 0, np.float32(0.7)
    )
    expected = jax.jit(functools.partial(score, config))(params, plan(rollout)).logps
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        spread_params = jax.device_put(params, shardings(config, mesh, "training"))
        layout = jax.device_put(plan(rollout), batch_sharding(mesh))
        found = jax.jit(functools.partial(score, config))(spread_params, layout).logps
    assert len(found.sharding.device_set) == 8
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
