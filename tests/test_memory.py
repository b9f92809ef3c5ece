"""Bytes that the compiler counts, against bytes worked by hand, on eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_grpo.memory import Memory, measure, peak, resident
from jax_grpo.stages import Call

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))


def struct(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    where = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ((), 0),
        (None, 0),
        (struct((64, 128)), 64 * 128 * 4),
        (struct((64, 128), "fsdp"), 16 * 128 * 4),
        (struct((64, 128), "fsdp", "tensor"), 16 * 64 * 4),
        (struct((64, 128), None, ("fsdp", "tensor")), 64 * 16 * 4),
        (struct((64,), "tensor", dtype=jnp.bfloat16), 32 * 2),
        (struct((), dtype=jnp.int32), 4),
        (jax.ShapeDtypeStruct((7,), jnp.int8), 7),  # nobody said where: everywhere
        ({"a": struct((8,), "fsdp"), "b": [struct((3,)), None]}, 8 + 12),
    ],
)
def test_resident(tree, expected):
    assert resident(tree) == expected


def test_resident_of_arrays_is_what_a_device_holds():
    array = jax.device_put(jnp.zeros((64, 128)), NamedSharding(MESH, PartitionSpec("fsdp")))
    assert resident(array) == array.addressable_shards[0].data.nbytes


def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives weights as they were given, and one number for each row."""
    return weights + 1, jnp.sin(batch) @ jnp.ones((batch.shape[1],))


WEIGHTS, BATCH = struct((256, 32), "fsdp", "tensor"), struct((16, 8), "fsdp")
OUT = (WEIGHTS.sharding, NamedSharding(MESH, PartitionSpec("fsdp")))
REFERENCE = {"w": struct((1000, 2), None, "tensor", dtype=jnp.bfloat16)}


@pytest.mark.parametrize("donated", [True, False])
def test_a_function_by_hand(donated):
    jitted = jax.jit(step, donate_argnums=0 if donated else (), out_shardings=OUT)
    (memory,) = measure({"step": Call(jitted, (WEIGHTS, BATCH), REFERENCE)}).values()
    weights, batch, rows = 64 * 16 * 4, 4 * 8 * 4, 4 * 4
    assert memory.arguments == weights + batch
    assert memory.outputs - 64 <= weights + rows <= memory.outputs  # and a table of two pointers
    assert memory.aliases == (weights if donated else 0)
    assert memory.beside == 1000 * 2
    assert memory.total == (
        memory.arguments + memory.temporaries + memory.outputs - memory.aliases + memory.beside
    )


def test_temporaries_grow_with_what_a_backward_pass_keeps():
    def loss(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.sin(jnp.sin(x) @ jnp.ones((64, 64)))
        return jnp.sum(x)

    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    kept = measure(
        {
            "forward": Call(jax.jit(loss), (x,), ()),
            "gradient": Call(jax.jit(jax.grad(loss)), (x,), ()),
        }
    )
    layer = 1024 * 64 * 4
    assert kept["forward"].temporaries < 4 * layer
    assert kept["gradient"].temporaries >= 4 * layer  # the input of each sine at least


def test_the_peak_is_of_one_function():
    small, large = Memory(5, 5, 0, 0, 0, 0), Memory(7, 1, 2, 3, 0, 1)
    assert peak({"generate": small, "update": large, "score": small}) == ("update", large)
