"""Bytes that the compiler counts, against bytes worked by hand, on eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_grpo import algorithms
from jax_grpo.evaluate import Verifiers
from jax_grpo.memory import QUICK, Memory, measure, peak, resident
from jax_grpo.models.config import LlamaConfig
from jax_grpo.optimizer import make_optimizer
from jax_grpo.sampling import Truncation
from jax_grpo.sharding import make_mesh
from jax_grpo.stages import Call, Critic, Model, RewardModel, Sampling, Stage, abstract_calls
from jax_grpo.types import Algorithm

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


@pytest.mark.parametrize("options", [None, QUICK])
@pytest.mark.parametrize("donated", [True, False])
def test_a_function_by_hand(donated, options):
    jitted = jax.jit(step, donate_argnums=0 if donated else (), out_shardings=OUT)
    (memory,) = measure({"step": Call(jitted, (WEIGHTS, BATCH), REFERENCE)}, options).values()
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
    calls = {
        "forward": Call(jax.jit(loss), (x,), ()),
        "gradient": Call(jax.jit(jax.grad(loss)), (x,), ()),
    }
    kept = measure(calls)
    assert kept == measure(calls, QUICK)
    layer = 1024 * 64 * 4
    assert kept["forward"].temporaries < 4 * layer
    assert kept["gradient"].temporaries >= 4 * layer  # the input of each sine at least


def test_the_peak_is_of_one_function():
    small, large = Memory(5, 5, 0, 0, 0, 0), Memory(7, 1, 2, 3, 0, 1)
    assert peak({"generate": small, "update": large, "score": small}) == ("update", large)


# --- What the methods hold while they learn ------------------------------------------------------

SHAPE = LlamaConfig(32, 16, 32, 2, 2, 2, 8, 64, tie_word_embeddings=True)
EMBEDDING, NORM = 32 * 16, 16
BLOCK = 4 * 16 * 16 + 3 * 16 * 32 + 2 * NORM  # of q, k, v and o; of gate, up and down
TRUNK = EMBEDDING + 2 * BLOCK + NORM
POLICY, SCALAR = TRUNK, TRUNK + 16  # tied embeddings; a head of one number


def stage(algorithm: Algorithm, **more: Any) -> Stage:
    optimizer, schedule = make_optimizer(learning_rate=1e-3, total_steps=1)
    settings: dict[str, Any] = {
        "name": "s",
        "number": 0,
        "seed": 0,
        "algorithm": algorithm,
        "optimizer": optimizer,
        "learning_rate": schedule,
        "data": None,
        "num_steps": 1,
        "prompts_per_step": 8,
        "prompt_length": 4,
        "completion_length": 4,
        "sampling": Sampling(2, 4, lambda step: 1.0, Truncation()),
        "verifiers": Verifiers((None,), ("right",), (1.0,)),  # type: ignore[arg-type]
        "passes": 1,
        "minibatches": 1,
        "micro_batches": 1,
        "remat": "none",
        "attention_impl": "xla",
        "logits_chunk": 0,
        "max_skipped": 0,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "log_every": 1,
    }
    return Stage(**(settings | more))


def test_ppo_holds_four_models_and_grpo_two():
    """By hand, on one device: policy and critic with two moments each, the others in bfloat16."""
    mesh = make_mesh(devices=jax.devices()[:1])
    model = Model(SHAPE, None, (1,), mesh, jnp.bfloat16)  # type: ignore[arg-type]
    critic = Critic("policy", SHAPE, *make_optimizer(learning_rate=1e-3, total_steps=1))
    scorer = RewardModel("reward_model", 1.0, SHAPE, lambda workdir: {})
    ppo_stage = stage(algorithms.ppo(), critic=critic, reward_model=scorer)
    numbers = 4 * 100  # at most a hundred that count steps
    with jax.set_mesh(mesh):
        ppo, plain, free = (
            abstract_calls(model, each)
            for each in (
                ppo_stage,
                stage(algorithms.grpo(kl_weight=0.1)),
                stage(algorithms.grpo(kl_weight=0.0)),
            )
        )
    for calls, trained, frozen in (
        (ppo, 12 * (POLICY + SCALAR), 2 * (POLICY + SCALAR)),
        (plain, 12 * POLICY, 2 * POLICY),
        (free, 12 * POLICY, 0),
    ):
        state = calls["update"].arguments[0]
        assert trained <= resident(state) <= trained + numbers
        assert resident(calls["update"].beside) == frozen
        # while the sampler runs, all of them wait, and its copy of the policy is one more
        assert resident(calls["generate"].beside) == resident(state) + frozen
        assert resident(calls["generate"].arguments[0]) == 2 * POLICY
    # what is taken does not wait
    assert resident(ppo["score"].beside) == resident(ppo["update"].arguments[0]) + 2 * SCALAR
    assert resident(ppo["reward_scores"].beside) == (
        resident(ppo["update"].arguments[0]) + 2 * POLICY
    )
    assert resident(ppo["values"].beside) == (
        resident(ppo["update"].arguments[0]) - 4 * SCALAR + 2 * (POLICY + SCALAR)
    )
