"""Checkpoints: a thin face over Orbax, asynchronous, restored onto whatever mesh is there.

A checkpoint holds three items: `params`, which can be read alone (a reference, an export), `state`,
the rest of a `TrainState`, and `meta`, a JSON dict (seconds, tokens). Orbax writes into a temporary
directory and renames it when all is on disk, so a half-written checkpoint is never seen. `save`
copies off the device before it returns: the state may be donated to the next update at once.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_grpo.types import Params, PyTree, TrainState

_managers = ocp.checkpoint_managers


def open_checkpoints(
    directory: str | os.PathLike[str], *, every: int, keep: int = 2
) -> ocp.CheckpointManager:
    """Opens (or makes) a directory of checkpoints; `close` it when done.

    Args:
      directory: local, or a bucket such as `gs://...`; the same one for all processes.
      every: `save` writes at the multiples of this step, and when the machine is preempted.
      keep: how many of the newest to keep.

    Raises:
      ValueError: `every` or `keep` is less than 1.
    """
    if every < 1 or keep < 1:
        raise ValueError(f"every and keep must be at least 1, got every={every}, keep={keep}")
    return _open(
        directory,
        save_decision_policy=_managers.AnySavePolicy(
            [_managers.FixedIntervalPolicy(every), _managers.PreemptionCheckpointingPolicy()]
        ),
        preservation_policy=_managers.LatestN(keep),
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
    )


def _open(directory: str | os.PathLike[str], **options: Any) -> ocp.CheckpointManager:
    _quieten_orbax()
    return ocp.CheckpointManager(
        _absolute(directory),
        options=ocp.CheckpointManagerOptions(**options),
        item_names=("params", "state", "meta"),
    )


def save(
    manager: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    meta: dict[str, Any],
    *,
    force: bool = False,
) -> bool:
    """Begins to write a checkpoint if one is due, or `force` is set, and this step has none yet.

    Args:
      manager: from `open_checkpoints`.
      step: steps of the loop taken; an update for each minibatch in each.
      state: NamedTuples and empty nodes come back as they were.
      meta: JSON values only; tuples come back as lists.
      force: write whether or not it is due.

    Returns:
      Whether a checkpoint is being written.
    """
    if step in manager.all_steps():  # else the last, forced one may raise
        return False
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        state=ocp.args.StandardSave(state._replace(params={})),
        meta=ocp.args.JsonSave(meta),
    )
    return manager.save(step, args=items, force=force)


def restore_latest(
    manager: ocp.CheckpointManager, abstract_state: TrainState
) -> tuple[int, TrainState, dict[str, Any]] | None:
    """Reads the newest whole checkpoint, each array straight into its shards.

    Args:
      manager: from `open_checkpoints`.
      abstract_state: the state as `jax.ShapeDtypeStruct`s with shardings; the mesh may be
          another one than at the time of saving.

    Returns:
      (step, state, meta), or None when there is no checkpoint.

    Raises:
      ValueError: the checkpoint holds other arrays than `abstract_state` asks for.
    """
    restored = _restore(
        manager,
        params=ocp.args.StandardRestore(abstract_state.params),
        state=ocp.args.StandardRestore(abstract_state._replace(params={})),
    )
    if restored is None:
        return None
    step, items = restored
    return step, items.state._replace(params=items.params), items.meta


def read_params(
    directory: str | os.PathLike[str], abstract_params: Params
) -> tuple[int, Params] | None:
    """Reads the parameters of the newest whole checkpoint of a directory, and nothing else.

    A run may be writing there: what it has not finished is left alone.

    Args:
      directory: as of `open_checkpoints`.
      abstract_params: the parameters as `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      (step, params), or None when there is no checkpoint.

    Raises:
      ValueError: the checkpoint holds other arrays than `abstract_params` asks for.
    """
    if not os.path.isdir(directory) and "://" not in os.fspath(directory):
        return None
    manager = _open(directory, create=False)
    try:
        restored = _restore(manager, params=ocp.args.StandardRestore(abstract_params))
    finally:
        manager.close()
    return restored and (restored[0], restored[1].params)


def _restore(manager: ocp.CheckpointManager, **items: Any) -> tuple[int, Any] | None:
    """Reads some items of the newest whole checkpoint, and its meta."""
    manager.wait_until_finished()
    step = manager.latest_step()
    if step is None:
        return None
    args = ocp.args.Composite(**items, meta=ocp.args.JsonRestore())
    try:
        return step, manager.restore(step, args=args)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"the checkpoint {manager.directory / str(step)} does not fit this run's model and "
            f"optimizer: {why[:300]}"
        ) from error


def close(manager: ocp.CheckpointManager) -> None:
    """Waits until all that was begun is on disk, then lets go."""
    manager.wait_until_finished()
    manager.close()


def save_debug(directory: str | os.PathLike[str], name: str, tree: PyTree) -> Path:
    """Writes what helps to find out why a step went wrong, as one `.npz` of named arrays.

    Args:
      directory: a local one, made if missing.
      name: file name without the ending.
      tree: of arrays; a leaf's path in it, joined by `/`, is its name in the file.

    Returns:
      The file.
    """
    path = Path(directory) / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {
        jax.tree_util.keystr(key, simple=True, separator="/"): _plain(leaf) for key, leaf in leaves
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]  # NumPy's own flag is a bool
    return path


def _plain(array: Any) -> np.ndarray:
    """Returns a NumPy array of a dtype that any reader of `.npz` knows (bfloat16 is widened)."""
    plain = np.asarray(array)
    return plain.astype(np.float32) if plain.dtype.kind == "V" else plain


def _absolute(directory: str | os.PathLike[str]) -> str:
    """Returns the absolute path that Orbax asks for; a bucket is one already."""
    text = os.fspath(directory)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _from_orbax_below_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "orbax" not in Path(record.pathname).parts


def _quieten_orbax() -> None:
    """Drops Orbax's dozens of INFO lines per save, and nothing else that goes through absl."""
    logging.getLogger("absl").addFilter(_from_orbax_below_warning)
