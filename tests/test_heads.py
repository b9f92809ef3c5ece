"""A scalar head on a Llama's trunk: its tree, how it begins, and what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.heads import from_policy, scalar_axes, scalar_shapes, scalars
from jax_grpo.models.llama import param_axes, param_shapes
from jax_grpo.sharding import make_mesh, param_shardings

CONFIG = LlamaConfig(
    vocab_size=23,
    hidden_size=10,
    intermediate_size=14,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    qkv_bias=True,
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def without(tree: Any, leaf: str) -> dict[str, Any]:
    return {name: x for name, x in tree.items() if name != leaf}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["own head", "tied"])
def test_the_tree_is_the_policys_with_score_in_place_of_head(config):
    shapes, axes = scalar_shapes(config), scalar_axes(config)
    assert without(shapes, "score") == without(param_shapes(config), "head")
    assert without(axes, "score") == without(param_axes(config), "head")
    assert shapes["score"] == jax.ShapeDtypeStruct((10,), jnp.float32)
    halves = jax.tree.leaves(scalar_shapes(config, jnp.bfloat16))
    assert {x.dtype for x in halves} == {jnp.dtype(jnp.bfloat16)}


def test_the_head_is_replicated():
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    shardings = param_shardings(scalar_axes(CONFIG), scalar_shapes(CONFIG), mesh, "training")
    assert shardings["score"].is_fully_replicated
    assert not shardings["embed"].is_fully_replicated


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["own head", "tied"])
@pytest.mark.parametrize("key", [None, 3])
def test_it_begins_with_the_policys_trunk(config, key):
    shapes = param_shapes(config)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5 + len(x.shape)), shapes)
    begin = jax.jit(lambda p: from_policy(config, p, None if key is None else jax.random.key(key)))
    made = begin(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), scalar_shapes(config)
    )
    jax.tree.map(np.testing.assert_array_equal, without(made, "score"), without(params, "head"))
    assert np.any(made["score"]) == (key is not None)


def test_a_reward_models_head_has_the_published_deviation():
    D = 9999
    wide = dataclasses.replace(CONFIG, hidden_size=D)
    trunk = dict.fromkeys(("embed", "layers", "norm"), jnp.zeros(1))
    draw = lambda seed: np.asarray(from_policy(wide, trunk, jax.random.key(seed))["score"])  # noqa: E731
    score = draw(0)
    # 1 / √(D + 1) = 0.01; the deviation of 9999 numbers is known to 1 / √(2 · 9999) = 0.7 %
    np.testing.assert_allclose(np.std(score), 0.01, rtol=0.03)
    assert abs(np.mean(score)) < 4 * 0.01 / D**0.5
    np.testing.assert_array_equal(score, draw(0))
    assert np.any(score != draw(1))


def test_scalars_by_hand():
    hidden = jnp.array([[[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]]])
    found = scalars(hidden, {"score": jnp.array([1.0, 10.0, 100.0])})
    np.testing.assert_array_equal(found, [[321.0, 390.0]])


def test_scalars_add_up_in_float32():
    # bfloat16 has 8 bits: it cannot say 513, let alone count to it
    ones = jnp.ones(513, jnp.bfloat16)
    found = scalars(ones, {"score": ones})
    assert found.dtype == jnp.float32 and found == 513
