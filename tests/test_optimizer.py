"""The optimizer against numbers worked by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_grpo.optimizer import decay_mask, make_optimizer


def _first_update(grads, params, **options):
    transform, _ = make_optimizer(learning_rate=0.1, total_steps=10, **options)
    updates, _ = transform.update(grads, transform.init(params), params)
    return updates


def test_first_adamw_step_is_the_sign_of_the_gradient():
    # m̂ = g and v̂ = g² at the first step, so θ moves by -η g / (|g| + ε), whatever |g|.
    updates = _first_update({"w": jnp.array([0.5, -0.002, 0.0])}, {"w": jnp.ones(3)})
    np.testing.assert_allclose(updates["w"], [-0.1, 0.1, 0.0], rtol=1e-4)


def test_second_adamw_step():
    # g = 1 then 3: m̂ = (0.09 + 0.3) / 0.19, v̂ = (0.000999 + 0.009) / 0.001999.
    transform, _ = make_optimizer(learning_rate=0.1, total_steps=10, max_grad_norm=0.0)
    params = {"w": jnp.zeros(())}
    state = transform.init(params)
    _, state = transform.update({"w": jnp.array(1.0)}, state, params)
    updates, _ = transform.update({"w": jnp.array(3.0)}, state, params)
    expected = -0.1 * (0.39 / 0.19) / math.sqrt(0.009999 / 0.001999)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("max_grad_norm", "expected"),
    # The gradient (3, 4) has norm 5. With ε = 1 the first step is -η g / (|g| + 1).
    [(1.0, [0.6, 0.8]), (2.5, [1.5, 2.0]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])],
)
def test_clip_is_by_the_global_norm(max_grad_norm, expected):
    grads = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
    params = jax.tree.map(jnp.zeros_like, grads)
    updates = _first_update(grads, params, eps=1.0, max_grad_norm=max_grad_norm)
    clipped = np.array(expected)
    found = np.array([updates["a"], updates["b"]])
    np.testing.assert_allclose(found, -0.1 * clipped / (clipped + 1), rtol=1e-5)


def test_weight_decay_leaves_norms_and_biases_alone():
    params = {
        "embed": jnp.full((4, 2), 2.0),
        "final_norm": jnp.full(2, 2.0),
        "layers": {
            "input_norm": jnp.full((3, 2), 2.0),
            "q_bias": jnp.full((3, 2), 2.0),
            "q": jnp.full((3, 2, 2), 2.0),
        },
    }
    assert decay_mask(params) == {
        "embed": True,
        "final_norm": False,
        "layers": {"input_norm": False, "q_bias": False, "q": True},
    }
    grads = jax.tree.map(jnp.zeros_like, params)
    updates = _first_update(grads, params, weight_decay=0.5)
    # -η λ θ = -0.1 * 0.5 * 2
    np.testing.assert_allclose(updates["embed"], -0.1, rtol=1e-6)
    np.testing.assert_allclose(updates["layers"]["q"], -0.1, rtol=1e-6)
    for kept in (updates["final_norm"], updates["layers"]["input_norm"]):
        np.testing.assert_array_equal(kept, 0.0)
    np.testing.assert_array_equal(updates["layers"]["q_bias"], 0.0)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, {0: 1.0, 5: 1.0, 10: 1.0}),
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 10: 1.0}),
        ({"schedule": "linear"}, {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0}),
        ({"schedule": "linear", "final_scale": 0.2}, {0: 1.0, 5: 0.6, 10: 0.2}),
        ({"schedule": "linear", "warmup_steps": 2}, {0: 0.0, 1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0}),
        ({"schedule": "cosine"}, {0: 1.0, 5: 0.5, 10: 0.0}),
        (
            {"schedule": "cosine", "warmup_steps": 4, "final_scale": 0.1},
            {2: 0.5, 4: 1.0, 6: 0.1 + 0.9 * 0.75, 7: 0.55, 10: 0.1},
        ),
    ],
)
def test_schedules_at_steps(options, rates):
    _, schedule = make_optimizer(learning_rate=3e-4, total_steps=10, **options)
    found = [schedule(step) for step in rates]
    np.testing.assert_allclose(found, [3e-4 * rate for rate in rates.values()], atol=1e-10)


def test_the_schedule_is_the_one_that_is_used():
    transform, schedule = make_optimizer(
        learning_rate=0.1, total_steps=4, schedule="linear", warmup_steps=2
    )
    params = {"w": jnp.ones(())}
    state = transform.init(params)
    for step in range(4):
        updates, state = transform.update({"w": jnp.array(1.0)}, state, params)
        np.testing.assert_allclose(updates["w"], -schedule(step), rtol=1e-4)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be at least 0"),
        ({"learning_rate": math.nan}, "learning_rate must be at least 0"),
        ({"b2": 1.0}, "b2 must be at least 0 and less than 1, got 1.0"),
        ({"max_grad_norm": -0.5}, "max_grad_norm"),
        ({"warmup_steps": 10}, "less than total_steps = 10, got 10"),
        ({"total_steps": 0}, "less than total_steps = 0"),
        ({"schedule": "square"}, "schedule must be constant, linear or cosine, got 'square'"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**{"learning_rate": 1e-3, "total_steps": 10, **options})
