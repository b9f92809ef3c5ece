"""Masked sums keep garbage out; shape checks name both shapes; batches lie where they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_grpo import arrays

pytestmark = pytest.mark.usefixtures("strict")

GARBAGE = [jnp.nan, jnp.inf, -jnp.inf]


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("data", "fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32])
def test_what_does_not_count_reaches_neither_sum_nor_gradient(garbage, dtype):
    x = jnp.array([[1.0, 2.0, garbage], [4.0, garbage, garbage]])
    mask = jnp.array([[1, 1, 0], [1, 0, 0]]).astype(dtype)
    total, count = arrays.sum_and_count(x, mask, axis=-1)
    np.testing.assert_array_equal(total, [3.0, 4.0])
    np.testing.assert_array_equal(count, [2.0, 1.0])
    gradient = jax.grad(lambda x: jnp.sum(jnp.exp(arrays.masked(x, mask))))(x)
    e = np.exp(np.array([1, 2, 4], np.float32))
    np.testing.assert_allclose(gradient, [[e[0], e[1], 0], [e[2], 0, 0]], rtol=1e-6)


def test_sums_are_float32_and_keep_axes_on_demand():
    x, mask = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((2, 3, 4), bool)
    for axis, shape in [(None, (1, 1, 1)), (-1, (2, 3, 1)), ((0, 2), (1, 3, 1))]:
        total, count = arrays.sum_and_count(x, mask, axis, keepdims=True)
        assert total.shape == count.shape == shape
        assert total.dtype == count.dtype == jnp.float32
    # bfloat16 has 8 bits: it cannot count beyond 256.
    assert arrays.masked_sum(jnp.ones(1000, jnp.bfloat16), jnp.ones(1000, bool)) == 1000


def test_one_number_for_a_row_is_counted_once_per_token():
    total, count = arrays.sum_and_count(jnp.array([[2.0], [5.0]]), jnp.array([[1, 1], [1, 0]]))
    assert (total, count) == (2 + 2 + 5, 3)


def test_the_mean_of_nothing_is_zero():
    np.testing.assert_array_equal(
        arrays.divide(jnp.array([3.0, 0.0]), jnp.array([2.0, 0.0])), [1.5, 0.0]
    )


def test_checks_accept_what_fits():
    arrays.check_same_shape(a=jnp.zeros((2, 3)), b=np.zeros((2, 3)), c=jnp.ones((2, 3), bool))
    arrays.check_leads(rewards=jnp.zeros((2, 3)), mask=jnp.zeros((2, 3, 4)))
    arrays.check_leads(rewards=jnp.zeros(()), mask=jnp.zeros(4))


@pytest.mark.parametrize(
    "check, shapes, message",
    [
        (arrays.check_same_shape, dict(a=(2,), b=(2, 1)), r"a \(2,\) and b \(2, 1\)"),
        (arrays.check_same_shape, dict(a=(2,), b=(2,), c=(3,)), r"a \(2,\) and c \(3,\)"),
        (arrays.check_leads, dict(a=(2,), b=(3, 4)), r"a \(2,\) .* b \(3, 4\) without"),
        (arrays.check_leads, dict(a=(), b=()), r"a \(\) .* b \(\) without"),
    ],
)
def test_checks_name_both_shapes_in_one_line(check, shapes, message):
    with pytest.raises(ValueError, match=message) as error:
        check(**{name: jnp.zeros(shape) for name, shape in shapes.items()})
    assert "\n" not in str(error.value)


def test_shard_batch_without_a_mesh_is_the_identity():
    x = jnp.arange(8.0)
    assert arrays.shard_batch(x) is x


@pytest.mark.parametrize("outer", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_shard_batch_spreads_the_leading_axis(outer):
    x = jnp.arange(32.0).reshape(8, 4)
    mesh = mesh_of((2, 2, 2))
    with jax.set_mesh(mesh):
        y = outer(arrays.shard_batch)(x)
        gradient = outer(jax.grad(lambda x: jnp.sum(arrays.shard_batch(x) ** 2)))(x)
    expected = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    assert y.sharding.is_equivalent_to(expected, 2)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(gradient, 2 * x)


def test_shard_batch_leaves_the_other_axes_free():
    mesh = mesh_of((2, 2, 2))
    along_tensor = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    x = jax.device_put(jnp.zeros((8, 4)), along_tensor)
    with jax.set_mesh(mesh):
        y = jax.jit(arrays.shard_batch)(x)
    expected = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    assert y.sharding.is_equivalent_to(expected, 2)


@pytest.mark.parametrize(
    "mesh_shape, names, shape",
    [
        ((4, 2, 1), ("data", "fsdp", "tensor"), (6, 4)),  # 6 does not divide over 8
        ((4, 2, 1), ("data", "fsdp", "tensor"), ()),
        ((4, 2), ("data", "tensor"), (8, 4)),  # no fsdp
    ],
)
def test_shard_batch_lets_be_what_cannot_be_spread(mesh_shape, names, shape):
    with jax.set_mesh(mesh_of(mesh_shape, names)):
        x = jnp.zeros(shape)
        assert arrays.shard_batch(x) is x


def test_shard_batch_lets_be_what_shard_map_has_spread():
    with jax.set_mesh(mesh_of((4, 2, 1))):
        spec = PartitionSpec(("data", "fsdp"))
        spread = jax.shard_map(arrays.shard_batch, in_specs=spec, out_specs=spec)
        np.testing.assert_array_equal(jax.jit(spread)(jnp.arange(64.0)), jnp.arange(64.0))
