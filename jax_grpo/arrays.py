"""Masked sums, shape checks, and the place of a batch on the mesh.

Every mean in this package is a pair `(sum, weight)` until the last division, so that sums over
micro-batches, minibatches and devices leave it unchanged. The pair is made by `sum_and_count` and
divided by `divide`, in float32 whatever came in.

What does not count is replaced by 0, never multiplied by it: `0 * nan` is `nan`. And it is replaced
before any function that has a derivative of its own (exp, square), since in the backward pass that
derivative is multiplied by 0. A mask may be bool or the float 0 and 1 of `Experience.mask`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

Axes = int | tuple[int, ...] | None

BATCH_AXES = ("data", "fsdp")  # the mesh axes that the prompts of a step are spread over


def masked(x: ArrayLike, mask: ArrayLike) -> Array:
    """Keeps what counts; all else becomes 0.

        mₜ xₜ

    Args:
        x: values, of the mask's shape or broadcasting to it.
        mask: 1 where a value counts.

    Returns:
        The values, float32. Nothing of what does not count reaches them, nor a gradient back to it.

    >>> masked(jnp.array([1.0, jnp.nan]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    return jnp.where(jnp.asarray(mask, bool), jnp.asarray(x, jnp.float32), 0.0)


def masked_sum(x: ArrayLike, mask: ArrayLike, axis: Axes = None, keepdims: bool = False) -> Array:
    """Sums what counts.

        Σₜ mₜ xₜ

    Args:
        x: values, of the mask's shape or broadcasting to it.
        mask: 1 where a value counts.
        axis: axis or axes to sum over; all of them by default.
        keepdims: whether these axes stay, with size 1.

    Returns:
        The sum, float32.

    >>> float(masked_sum(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])))
    3.0
    """
    return jnp.sum(masked(x, mask), axis=axis, keepdims=keepdims)


def sum_and_count(
    x: ArrayLike, mask: ArrayLike, axis: Axes = None, keepdims: bool = False
) -> tuple[Array, Array]:
    """A mean that is not divided yet.

        (Σₜ mₜ xₜ, Σₜ mₜ)

    Args:
        x: values, of the mask's shape or broadcasting to it.
        mask: 1 where a value counts.
        axis: axis or axes to sum over; all of them by default.
        keepdims: whether these axes stay, with size 1.

    Returns:
        The sum and the number of values that count, both float32.

    >>> total, count = sum_and_count(jnp.array([1.0, 2.0, 9.0]), jnp.array([True, True, False]))
    >>> float(total), float(count)
    (3.0, 2.0)
    """
    return masked_sum(x, mask, axis, keepdims), masked_sum(1.0, mask, axis, keepdims)


def divide(total: ArrayLike, count: ArrayLike) -> Array:
    """Makes a mean of its `(sum, count)`; of nothing, 0.

        Σ / max(n, 1)

    Args:
        total: sums.
        count: how many values went into each, of the same shape.

    Returns:
        The mean, float32.

    >>> float(divide(3.0, 2.0)), float(divide(0.0, 0.0))
    (1.5, 0.0)
    """
    return jnp.asarray(total, jnp.float32) / jnp.maximum(jnp.asarray(count, jnp.float32), 1.0)


def check_same_shape(**arrays: ArrayLike) -> None:
    """Checks that arrays have one shape.

    Args:
        **arrays: arrays by the names that the caller's caller knows them by.

    Raises:
        ValueError: if two differ, naming both with their shapes.

    >>> check_same_shape(rewards=jnp.zeros((2, 8)), valid=jnp.zeros((2, 7)))
    Traceback (most recent call last):
    ValueError: rewards (2, 8) and valid (2, 7) must have the same shape
    """
    (first, head), *others = arrays.items()
    for name, x in others:
        if jnp.shape(x) != jnp.shape(head):
            shapes = f"{first} {jnp.shape(head)} and {name} {jnp.shape(x)}"
            raise ValueError(f"{shapes} must have the same shape")


def check_leads(**arrays: ArrayLike) -> None:
    """Checks that the first array has the axes of the second, without the last one.

    Args:
        **arrays: two arrays by name, such as `rewards` [..., G] and `mask` [..., G, C].

    Raises:
        ValueError: if the shapes do not fit, naming both.

    >>> check_leads(rewards=jnp.zeros((2, 8)), mask=jnp.zeros((2, 7, 5)))
    Traceback (most recent call last):
    ValueError: rewards (2, 8) must have the shape of mask (2, 7, 5) without its last axis
    """
    (first, lead), (second, whole) = arrays.items()
    if jnp.ndim(whole) == 0 or jnp.shape(lead) != jnp.shape(whole)[:-1]:
        raise ValueError(
            f"{first} {jnp.shape(lead)} must have the shape of "
            f"{second} {jnp.shape(whole)} without its last axis"
        )


@partial(jax.jit, static_argnums=1, inline=True)  # so that it works outside of jit, too
def _constrain(x: Array, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, spec)


def shard_batch(x: Array) -> Array:
    """Spreads the leading axis over the mesh axes `data` and `fsdp`; the other axes stay free.

    Without this the compiler may well decide to gather a batch rather than the weights.

    Args:
        x: an array that leads with P, or with a slice of it.

    Returns:
        The same values. `x` itself where there is nothing to spread over: no mesh was set by
        `jax.set_mesh`, it lacks these axes as `AxisType.Auto` (as inside of `jax.shard_map`), or
        the leading axis does not divide over them.

    >>> shard_batch(jnp.arange(3))
    Array([0, 1, 2], dtype=int32)
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types.get(name) is not AxisType.Auto for name in BATCH_AXES):
        return x
    shards = mesh.shape[BATCH_AXES[0]] * mesh.shape[BATCH_AXES[1]]
    if x.ndim == 0 or x.shape[0] % shards != 0:
        return x
    return _constrain(x, PartitionSpec(BATCH_AXES, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)))
