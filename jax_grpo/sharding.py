"""The mesh, and which of its axes each parameter is spread over, role by role.

Every parameter names its logical axes where it is defined (models/llama.py); the tables here map
them to the mesh axes `data`, `fsdp` and `tensor`. *Training* spreads parameters and optimizer
state over `fsdp` and `tensor`; *sampling* uses a copy spread over `tensor` alone, so that the
decode loop gathers no weights. Batches lead with P, spread over `data` and `fsdp` in both.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_grpo.types import Params, PyTree

log = logging.getLogger(__name__)

Role = Literal["training", "sampling"]

_TENSOR = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
RULES: Mapping[Role, Mapping[str, str]] = {
    "training": {**_TENSOR, "embed": "fsdp"},
    "sampling": _TENSOR,
}


def make_mesh(
    data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh `data` x `fsdp` x `tensor`; one of them may be -1 and takes what is left.

    Args:
      data: copies of the whole training state.
      fsdp: devices that share one copy of parameters and optimizer state.
      tensor: devices that share each matrix product.
      devices: those to use; all of them by default.

    Raises:
      ValueError: when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    spelled = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if len(free) > 1 or any(size < 1 for size in sizes.values() if size != -1):
        raise ValueError(f"mesh {spelled}: sizes are positive, and at most one is -1")
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"mesh {spelled} does not fit {len(devices)} devices")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def batch_shards(mesh: Mesh) -> int:
    """Over how many devices P is spread."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """P, the leading axis, over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def put_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Puts a tree of host arrays on the mesh: what leads with P spread over it, scalars copied.

    Every process holds the whole batch and gives its devices their part of it.
    """
    where = lambda x: batch_sharding(mesh) if x.ndim else replicated(mesh)  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, where(x)), batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same everywhere."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(axes: PyTree, shapes: Params, mesh: Mesh, role: Role) -> Params:
    """The sharding of each parameter; a dimension that does not divide is replicated, and said so.

    Args:
      axes: a tree of tuples of logical axis names, see `param_axes` of the model.
      shapes: the same tree of arrays or `ShapeDtypeStruct`.
      mesh: where they will live.
      role: which table of `RULES` holds.

    Returns:
      A tree of `NamedSharding` like the parameters.
    """
    uneven: dict[str, None] = {}

    def one(axes: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = []
        for name, size in zip(axes, shape.shape, strict=True):
            mesh_axis = RULES[role].get(name)
            parts = mesh.shape[mesh_axis] if mesh_axis else 1
            if size % parts:
                uneven[f"{name} ({size}) over {mesh_axis} ({parts})"] = None
                mesh_axis = None
            spec.append(mesh_axis)
        return NamedSharding(mesh, PartitionSpec(*spec))

    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    tree = jax.tree.map(one, axes, shapes, is_leaf=is_axes)
    if uneven and role == "training":
        _warn_once(f"replicated because they do not divide: {', '.join(uneven)}")
    return tree


@functools.cache
def _warn_once(message: str) -> None:
    """A run asks for its shardings many times; the user hears of it once."""
    log.warning(message)


def state_shardings(state: PyTree, params: Params, shardings: Params, mesh: Mesh) -> PyTree:
    """Shardings of a training state: every tree in it that looks like `params` is spread like it.

    Args:
      state: a `TrainState` of arrays or `ShapeDtypeStruct`.
      params: the parameters' tree, whose structure marks the moments in the optimizer state.
      shardings: the parameters' shardings.
      mesh: for all that is left, which is replicated.
    """
    structure: Any = jax.tree.structure(params)
    alike = lambda x: bool(structure == jax.tree.structure(x))  # noqa: E731
    return jax.tree.map(lambda x: shardings if alike(x) else replicated(mesh), state, is_leaf=alike)
