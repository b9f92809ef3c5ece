"""Checkpoints: what is restored is what was saved, on any mesh."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grpo import checkpoint
from jax_grpo.optimizer import make_optimizer
from jax_grpo.types import TrainState

TRANSFORM, _ = make_optimizer(learning_rate=1e-2, total_steps=10, warmup_steps=2)


def _initial_state() -> TrainState:
    key = jax.random.key(0)
    params = {"embed": jax.random.normal(key, (16, 8)), "layers": {"norm": jnp.ones((2, 8))}}
    return TrainState(jnp.int32(0), params, TRANSFORM.init(params))


def _loss(params, step):
    scaled = params["embed"] * params["layers"]["norm"][0]
    return jnp.sum((scaled - step) ** 2)


@jax.jit
def _update(state: TrainState) -> TrainState:
    grads = jax.grad(_loss)(state.params, state.step.astype(jnp.float32))
    updates, opt_state = TRANSFORM.update(grads, state.opt_state, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    return TrainState(state.step + 1, params, opt_state, state.algorithm_state)


def _abstract(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes of a state, matrices spread over the mesh's last axis."""

    def describe(x):
        spec = P(None, mesh.axis_names[-1]) if x.ndim == 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(describe, state)


def _mesh(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def _assert_identical(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_nothing_to_restore(tmp_path):
    manager = checkpoint.open_checkpoints(tmp_path / "new", every=1)
    assert checkpoint.restore_latest(manager, _initial_state()) is None
    checkpoint.close(manager)


def test_resume_is_bit_for_bit(tmp_path):
    straight = _initial_state()
    for _ in range(4):
        straight = _update(straight)
    state = _update(_update(_initial_state()))
    manager = checkpoint.open_checkpoints(tmp_path, every=2)
    meta = {"stage": "sft", "step": 2, "config": {"learning_rate": 1e-2}}
    assert checkpoint.save(manager, 2, state, meta)
    checkpoint.close(manager)

    manager = checkpoint.open_checkpoints(tmp_path, every=2)
    step, resumed, found_meta = checkpoint.restore_latest(manager, _abstract(state, _mesh(1, 1)))
    checkpoint.close(manager)
    assert (step, found_meta) == (2, meta)
    _assert_identical(resumed, state)
    _assert_identical(_update(_update(resumed)), straight)


def test_restores_onto_another_mesh(tmp_path):
    state = _update(_initial_state())
    narrow, wide = _abstract(state, _mesh(4, 2)), _abstract(state, _mesh(1, 8))
    spread = jax.device_put(state, jax.tree.map(lambda x: x.sharding, narrow))
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    checkpoint.save(manager, 1, spread, {})
    _, restored, _ = checkpoint.restore_latest(manager, wide)
    checkpoint.close(manager)
    _assert_identical(restored, state)
    assert restored.params["embed"].sharding == NamedSharding(_mesh(1, 8), P(None, "fsdp"))
    assert restored.params["embed"].addressable_shards[0].data.shape == (16, 1)


def test_saves_when_due_keeps_the_newest_and_no_step_twice(tmp_path):
    state = _initial_state()
    manager = checkpoint.open_checkpoints(tmp_path, every=2, keep=2)
    saved = [checkpoint.save(manager, step, state, {}) for step in range(1, 7)]
    assert saved == [False, True, False, True, False, True]
    assert not checkpoint.save(manager, 6, state, {}, force=True)  # it is being written
    assert checkpoint.save(manager, 7, state, {}, force=True)
    checkpoint.close(manager)
    manager = checkpoint.open_checkpoints(tmp_path, every=2)
    assert sorted(manager.all_steps()) == [6, 7]
    assert not checkpoint.save(manager, 7, state, {}, force=True)
    checkpoint.close(manager)


def test_the_state_may_be_donated_at_once(tmp_path):
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    array = jnp.ones((1024, 1024))
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    checkpoint.save(manager, 1, TrainState(jnp.int32(0), {"x": array}, ()), {})
    for _ in range(3):
        array = double(array)
    checkpoint.close(manager)
    step, restored = checkpoint.read_params(tmp_path, {"x": jax.eval_shape(lambda: array)})
    assert step == 1
    np.testing.assert_array_equal(restored["x"], 1.0)


def test_a_half_written_checkpoint_is_invisible_and_swept_up(tmp_path):
    state = _initial_state()
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    checkpoint.save(manager, 1, state, {})
    checkpoint.close(manager)
    torn = tmp_path / "2.orbax-checkpoint-tmp"
    (torn / "state").mkdir(parents=True)
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    step, _, _ = checkpoint.restore_latest(manager, _abstract(state, _mesh(1, 1)))
    assert step == 1
    assert checkpoint.save(manager, 2, state, {})
    checkpoint.close(manager)
    assert not torn.exists()


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path):
    state = _initial_state()
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    checkpoint.save(manager, 1, state, {})
    other = state._replace(
        params={"embed": jnp.ones((17, 8)), "layers": {"norm": jnp.ones((2, 8))}}
    )
    with pytest.raises(ValueError, match=r"does not fit this run's model.*\(17, 8\)") as error:
        checkpoint.restore_latest(manager, _abstract(other, _mesh(1, 1)))
    assert "\n" not in str(error.value)
    checkpoint.close(manager)


def test_relative_directories_and_bad_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = checkpoint.open_checkpoints("run/checkpoints", every=1)
    checkpoint.save(manager, 1, _initial_state(), {})
    checkpoint.close(manager)
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()
    with pytest.raises(ValueError, match="at least 1, got every=0, keep=2"):
        checkpoint.open_checkpoints(tmp_path, every=0)


def test_orbax_is_quiet_and_others_are_not(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    manager = checkpoint.open_checkpoints(tmp_path, every=1)
    checkpoint.save(manager, 1, _initial_state(), {})
    checkpoint.close(manager)
    logging.getLogger("absl").info("ours")
    assert [record.getMessage() for record in caplog.records] == ["ours"]


def test_save_debug_names_arrays_by_their_path(tmp_path):
    tree = {"grads": {"q": np.array([1.0, np.nan])}, "state": TrainState(np.int32(3), {}, ())}
    tree["half"] = jnp.array([0.5], jnp.bfloat16)
    path = checkpoint.save_debug(tmp_path / "debug", "grpo-3", tree)
    assert path == tmp_path / "debug" / "grpo-3.npz"
    with np.load(path) as found:
        assert set(found) == {"grads/q", "half", "state/step"}
        np.testing.assert_array_equal(found["grads/q"], [1.0, np.nan])
        assert found["half"].dtype == np.float32
        assert found["state/step"] == 3
