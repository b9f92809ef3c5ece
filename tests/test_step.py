"""The update: one gradient, however it is cut, spread or accumulated.

What the update does with a model's log-probs is tested on a table of bigrams, whose gradient a few
lines of NumPy give exactly; that it holds for a Llama, on one device and on eight, follows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_grpo.algorithms import grpo, sft
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params, param_axes, param_shapes
from jax_grpo.optimizer import make_optimizer
from jax_grpo.rollout import generate
from jax_grpo.sampling import purpose_key
from jax_grpo.scoring import Layout, make_models, plan, score
from jax_grpo.sharding import (
    batch_sharding,
    make_mesh,
    param_shardings,
    replicated,
    state_shardings,
)
from jax_grpo.step import GAP_MAX, GAP_MEAN, init_state, make_update, split, total_weights
from jax_grpo.types import (
    Algorithm,
    Experience,
    Outputs,
    PromptBatch,
    Rewards,
    Rollout,
    Scores,
    Term,
    TrainState,
)

P, G, C = 8, 4, 6
SGD = optax.sgd(1.0)  # the step is the gradient


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling is most of the work here, and less optimised code is as right."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# --- A table of bigrams in the place of the model ------------------------------------------------

V = 7
LENGTHS = np.random.default_rng(0).integers(0, C + 1, (P, G))
LENGTHS[0], LENGTHS[5] = 1, C  # very unequal, and so are the micro-batches
LENGTHS[2, 1] = LENGTHS[3, 3] = 0
MASK = np.arange(C) < LENGTHS[..., None]
MASK[5, 0, 2] = MASK[5, 1, 0] = False  # holes
MASK[5, 2] = False  # a whole completion that does not count


def bigram_score(params, layout, entropy=False) -> Outputs:
    """Each token is predicted from the one before it alone: `params["table"][before]`."""
    last = jnp.take_along_axis(layout.prompt_ids, layout.prompt_lengths[:, None] - 1, axis=1)
    first = jnp.broadcast_to(last[:, :, None], layout.completion_ids[..., :1].shape)
    before = jnp.concatenate([first, layout.completion_ids[..., :-1]], axis=-1)
    scores = params["table"][before] / layout.temperature[:, None, None, None]
    logps = jax.nn.log_softmax(scores, axis=-1)
    chosen = jnp.take_along_axis(logps, layout.completion_ids[..., None], axis=-1)[..., 0]
    return Outputs(chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1) if entropy else None)


def bigram_params() -> dict[str, jax.Array]:
    return {"table": jnp.asarray(np.random.default_rng(1).normal(0, 1, (V, V)), jnp.float32)}


def bigram_layout() -> Layout:
    rng = np.random.default_rng(2)
    arrays = (rng.integers(0, V, (P, 3)), rng.integers(1, 4, P), rng.integers(0, V, (P, G, C)))
    ints = [jnp.asarray(x, jnp.int32) for x in (*arrays, LENGTHS)]
    return Layout(*ints, jnp.full(P, 0.8, jnp.float32))


def bigram_experience(off_policy: float = 0.3, garbage: float = np.nan) -> Experience:
    """Ratios on both sides of the clip; what does not count is garbage."""
    rng = np.random.default_rng(3)
    logps = np.asarray(bigram_score(bigram_params(), bigram_layout()).logps)
    noise = lambda scale: np.where(MASK, logps + rng.normal(0, scale, MASK.shape), garbage)  # noqa: E731
    advantages = rng.normal(0, 1, (P, G))
    arrays = (advantages, MASK, noise(off_policy), noise(0.5))
    return Experience(*(jnp.asarray(x, jnp.float32) for x in arrays))


def slow_update(
    weight_of: Any, kl_weight: float, clip: float = 0.2
) -> tuple[np.ndarray, dict[str, float]]:
    """The gradient of the whole loss, token by token in float64, and what it says of itself.

    Args:
      weight_of: of a completion's number of tokens, what each of its tokens weighs.
      kl_weight: of k3.
      clip: on both sides.
    """
    table = np.asarray(bigram_params()["table"], np.float64)
    layout, experience = jax.device_get((bigram_layout(), bigram_experience()))
    gradient, tokens = np.zeros((V, V)), MASK.sum()
    said = dict.fromkeys(["policy_loss", "kl", "entropy", "ratio", "low", "high", "gap"], 0.0)
    gaps = []
    for p, g, c in np.argwhere(MASK):
        ids = layout.completion_ids[p, g]
        before = ids[c - 1] if c else layout.prompt_ids[p, layout.prompt_lengths[p] - 1]
        likely = np.exp(table[before] / 0.8)
        likely /= likely.sum()
        logp, A = np.log(likely[ids[c]]), float(experience.advantages[p, g])
        ratio = np.exp(logp - experience.behavior_logps[p, g, c])
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        d = experience.reference_logps[p, g, c] - logp
        weight = weight_of(MASK[p, g].sum())
        said["policy_loss"] -= weight * min(ratio * A, clipped * A)
        said["kl"] += weight * (np.exp(d) - 1 - d)
        said["entropy"] -= np.sum(likely * np.log(likely)) / tokens
        said["ratio"] += ratio / tokens
        said["low"] += (ratio < 1 - clip and A < 0) / tokens
        said["high"] += (ratio > 1 + clip and A > 0) / tokens
        gaps.append(abs(logp - experience.behavior_logps[p, g, c]))
        pull = -A * ratio if ratio * A <= clipped * A else 0.0
        pull += kl_weight * (1 - np.exp(d))
        gradient[before] += weight * pull * (np.eye(V)[ids[c]] - likely) / 0.8
    metrics = {
        "loss": said["policy_loss"] + kl_weight * said["kl"],
        "policy_loss": said["policy_loss"],
        "kl": said["kl"],
        "entropy": said["entropy"],
        "ratio": said["ratio"],
        "clip_ratio/low_mean": said["low"],
        "clip_ratio/high_mean": said["high"],
        "clip_ratio/region_mean": said["low"] + said["high"],
        GAP_MEAN: np.mean(gaps),
        GAP_MAX: np.max(gaps),
        "grad_norm": np.linalg.norm(gradient),
        "finite": 1.0,
    }
    return gradient, metrics


COMPLETIONS = MASK.any(-1).sum()
REDUCTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "token_mean": ({}, lambda n: 1 / MASK.sum()),
    "sequence_mean": ({}, lambda n: 1 / (COMPLETIONS * n)),
    "constant_length": ({"reduction_length": 9}, lambda n: 1 / (COMPLETIONS * 9)),
}


def bigram_update(
    algorithm: Algorithm, optimizer: Any = SGD, compute_dtype: Any = jnp.float32, **settings: Any
) -> Any:
    def models(params: Any, critic: Any, layout: Layout) -> Outputs:
        return bigram_score(cast_params(params, compute_dtype), layout, algorithm.needs_entropy)

    return jax.jit(make_update(models, optimizer, algorithm, **settings))


def gradient_of(update: Any, algorithm: Algorithm, experience: Experience) -> np.ndarray:
    state = init_state(bigram_params(), SGD, algorithm)
    new, _ = update(state, bigram_layout(), experience)
    return np.asarray(state.params["table"] - new.params["table"])


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_accumulated_gradient_and_metrics_equal_the_slow_reference(reduction, micro_batches):
    settings, weight_of = REDUCTIONS[reduction]
    algorithm = grpo(reduction=reduction, kl_weight=0.3, **settings)
    update = bigram_update(algorithm, micro_batches=micro_batches)
    state = init_state(bigram_params(), SGD, algorithm)
    new, metrics = update(state, bigram_layout(), bigram_experience())
    gradient, said = slow_update(weight_of, 0.3)
    assert min(said["clip_ratio/low_mean"], said["clip_ratio/high_mean"]) > 0.05
    np.testing.assert_allclose(
        state.params["table"] - new.params["table"], gradient, rtol=1e-4, atol=2e-7
    )
    assert metrics.keys() == said.keys()
    for name, value in said.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert new.step == 1 and new.step.dtype == jnp.int32


def test_sft_is_the_gradient_of_the_mean_log_prob():
    algorithm = sft()
    found = gradient_of(bigram_update(algorithm, micro_batches=4), algorithm, bigram_experience())
    nll = lambda params: -jnp.mean(bigram_score(params, bigram_layout()).logps[MASK])  # noqa: E731
    expected = jax.grad(nll)(bigram_params())["table"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_ratio_of_1_gives_the_gradient_of_reinforce(reduction):
    settings, weight_of = REDUCTIONS[reduction]
    algorithm = grpo(reduction=reduction, kl_weight=0.0, **settings)
    experience = bigram_experience(off_policy=0.0)
    found = gradient_of(bigram_update(algorithm), algorithm, experience)
    weights = np.vectorize(weight_of)(np.maximum(MASK.sum(-1, keepdims=True), 1)) * MASK
    weights = jnp.float32(weights) * experience.advantages[..., None]

    def reinforce(params):
        return -jnp.sum(weights * bigram_score(params, bigram_layout()).logps)

    expected = jax.grad(reinforce)(bigram_params())["table"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    if reduction == "sequence_mean":  # and the inverted advantage is the inverted gradient
        inverted = experience._replace(advantages=-experience.advantages)
        opposite = gradient_of(bigram_update(algorithm), algorithm, inverted)
        np.testing.assert_allclose(opposite, -found, rtol=1e-4, atol=1e-6)


# --- Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_are_of_the_whole_batch_and_do_not_depend_on_outputs(reduction):
    settings, _ = REDUCTIONS[reduction]
    algorithm = grpo(reduction=reduction, **settings)
    experience = bigram_experience()
    # by hand: tokens that count; completions with one; times the length
    weight = {
        "token_mean": MASK.sum(),
        "sequence_mean": MASK.any(-1).sum(),
        "constant_length": 9 * MASK.any(-1).sum(),
    }[reduction]
    tokens = [
        "entropy",
        "ratio",
        GAP_MEAN,
        *(f"clip_ratio/{x}_mean" for x in ("low", "high", "region")),
    ]  # noqa: E501
    expected = {"policy_loss": weight, "kl": weight, **dict.fromkeys(tokens, MASK.sum())}
    totals = total_weights(algorithm, experience)
    assert {k: float(v) for k, v in totals.items()} == expected
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logps, entropy = (jnp.asarray(rng.normal(-3, 2, MASK.shape), jnp.float32) for _ in "ab")
        terms = algorithm.loss(Outputs(logps, entropy), experience)
        assert {k: float(t.weight) for k, t in terms.items()} | {
            GAP_MEAN: float(MASK.sum())
        } == expected
    # and micro-batches' weights add up to it
    parts = [jax.tree.map(lambda x: x[p : p + 2], experience) for p in range(0, P, 2)]  # noqa: B023
    sums = {k: sum(float(total_weights(algorithm, e)[k]) for e in parts) for k in totals}
    assert sums == expected


def test_the_weight_of_nothing_is_1():
    nothing = bigram_experience()._replace(mask=jnp.zeros((P, G, C)))
    assert set(map(float, total_weights(grpo(), nothing).values())) == {1.0}


def test_an_algorithm_sees_no_entropy_unless_it_asks():
    """A loss may look at `outputs.entropy`; when it did not ask, there is none to be seen."""
    algorithm = grpo(kl_weight=0.3)._replace(needs_entropy=False)
    assert "entropy" not in total_weights(algorithm, bigram_experience())
    expected, _ = slow_update(REDUCTIONS["sequence_mean"][1], 0.3)
    found = gradient_of(bigram_update(algorithm, micro_batches=2), algorithm, bigram_experience())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-7)


def test_split_strides_over_prompts():
    rows = jnp.arange(6)
    np.testing.assert_array_equal(split(rows, 2), [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(split(rows, 3), [[0, 3], [1, 4], [2, 5]])
    pairs = split({"a": jnp.stack([rows, 10 * rows], axis=-1), "b": None}, 2)
    np.testing.assert_array_equal(pairs["a"][1], [[1, 10], [3, 30], [5, 50]])
    with pytest.raises(ValueError, match="4 slices do not divide 6 prompts"):
        split(rows, 4)


# --- What is not finite, and what must not move --------------------------------------------------

ADAMW, _ = make_optimizer(learning_rate=0.1, total_steps=10, max_grad_norm=1.0)


def assert_identical(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_is_not_finite_leaves_the_state_as_it_was_and_is_said(micro_batches):
    algorithm = grpo(kl_weight=0.3)._replace(state={"weight": jnp.float32(0.5)})
    update = bigram_update(algorithm, ADAMW, micro_batches=micro_batches)
    good, layout = bigram_experience(), bigram_layout()
    state, metrics = update(init_state(bigram_params(), ADAMW, algorithm), layout, good)
    assert metrics["finite"] == 1 and state.algorithm_state == {"weight": 0.5}
    at = tuple(np.argwhere(MASK)[-1])  # one token, in the last micro-batch
    bad = {
        "a NaN advantage": good._replace(advantages=good.advantages.at[at[:2]].set(np.nan)),
        "an infinite advantage": good._replace(advantages=good.advantages.at[at[:2]].set(np.inf)),
        "a NaN reference": good._replace(reference_logps=good.reference_logps.at[at].set(np.nan)),
        # the loss is finite, but the squares of its gradient are not
        "a gradient that overflows": good._replace(advantages=good.advantages * 1e25),
    }
    for name, experience in bad.items():
        kept, metrics = update(state, layout, experience)
        assert metrics["finite"] == 0, name
        assert_identical(kept, state)
    assert np.isfinite(metrics["loss"])  # of the last
    # at a token that does not count they are nobody's business
    hidden = tuple(np.argwhere(~MASK & MASK.any(-1, keepdims=True))[0])
    fine = good._replace(reference_logps=good.reference_logps.at[hidden].set(np.inf))
    new, metrics = update(state, layout, fine)
    assert metrics["finite"] == 1 and new.step == 2
    assert_identical(new, update(state, layout, good)[0])


def test_constant_rewards_without_kl_do_not_move_a_table():
    algorithm = grpo(kl_weight=0.0)
    update = bigram_update(algorithm, ADAMW)
    state = init_state(bigram_params(), ADAMW, algorithm)
    same = bigram_experience()._replace(advantages=jnp.zeros((P, G)), reference_logps=None)
    new, metrics = update(state, bigram_layout(), same)
    assert_identical(new.params, state.params)
    assert metrics["grad_norm"] == 0 and metrics["policy_loss"] == 0 and new.step == 1


def test_the_compute_dtype_is_not_that_of_parameters():
    algorithm = grpo(kl_weight=0.0)
    update = bigram_update(algorithm, compute_dtype=jnp.bfloat16)
    state = init_state(bigram_params(), SGD, algorithm)
    # steps far too small for bfloat16, whose 1 is followed by 1.0078
    tiny = bigram_experience()._replace(reference_logps=None)
    tiny = tiny._replace(advantages=tiny.advantages * 1e-5)
    new, _ = update(state, bigram_layout(), tiny)
    moved = np.abs(np.asarray(new.params["table"] - state.params["table"]))
    assert new.params["table"].dtype == jnp.float32
    assert 0 < moved.max() < 1e-4


# --- A Llama -------------------------------------------------------------------------------------

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
L, TEMPERATURE = 5, 0.7
# With ε of the size of the gradients the step is smooth, and rounding stays rounding.
SMOOTH, _ = make_optimizer(learning_rate=0.3, total_steps=10, eps=0.1, max_grad_norm=0.5)
ALGORITHM = grpo(kl_weight=0.1)


@functools.cache
def llama_params() -> Any:
    rng = np.random.default_rng(0)
    shapes = param_shapes(CONFIG)
    values = lambda x: rng.normal(0.5 * (x.shape[-1] == CONFIG.hidden_size), 0.3, x.shape)  # noqa: E731
    return jax.tree.map(lambda x: values(x).astype(np.float32), shapes)


def prompts() -> PromptBatch:
    rng = np.random.default_rng(4)
    arrays = (rng.integers(0, 24, (P, L)), [5, 1, 3, 2, 4, 5, 1, 2], 7 * np.arange(P))
    return PromptBatch(*(np.asarray(x, np.int32) for x in arrays))


def new_generate() -> Any:
    return jax.jit(
        functools.partial(
            generate, CONFIG, end_ids=(1, 2, 5), num_generations=G, max_completion_length=C
        )
    )


def new_score() -> Any:
    return jax.jit(functools.partial(score, CONFIG))


def new_update(algorithm: Algorithm = ALGORITHM, micro_batches: int = 1, **how: Any) -> Any:
    models = make_models(CONFIG, entropy=algorithm.needs_entropy, **how)
    update = make_update(models, SMOOTH, algorithm, micro_batches=micro_batches)
    return jax.jit(update, donate_argnums=0)


def new_state(algorithm: Algorithm = ALGORITHM) -> TrainState:
    """A fresh copy each time, since an update eats it."""
    return jax.tree.map(jnp.copy, init_state(llama_params(), SMOOTH, algorithm))


@functools.cache
def one_device() -> tuple[Any, Any, Any]:
    return new_generate(), new_score(), new_update()


@functools.cache
def rolled_out(step: int = 0) -> tuple[Rollout, np.ndarray]:
    """A rollout on one device, and its log-probs by the training path."""
    sample, logps_of, _ = one_device()
    rollout = sample(llama_params(), prompts(), purpose_key(0, 0, 0, step), TEMPERATURE, C)
    return jax.device_get((rollout, logps_of(llama_params(), plan(rollout)).logps))


def experience_of(
    rollout: Rollout, reference: np.ndarray, values: np.ndarray | None = None, algorithm=ALGORITHM
) -> Experience:
    if values is None:
        values = np.random.default_rng(5).choice([0.0, 1.0, 2.0], (P, G, 1))
    rewards = Rewards(jnp.asarray(values, jnp.float32), jnp.ones(values.shape, bool))
    scores = Scores(reference_logps=jnp.asarray(reference))
    return jax.device_get(algorithm.experience(rollout, rewards, scores, ())[0])


def test_the_first_update_after_a_rollout_is_on_policy():
    rollout, logps = rolled_out()
    assert len(np.unique(rollout.lengths)) > 3
    experience = experience_of(rollout, logps)
    _, metrics = one_device()[2](new_state(), plan(rollout), experience)
    metrics = jax.device_get(metrics)
    assert abs(metrics["ratio"] - 1) < 1e-5
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0
    assert metrics["clip_ratio/region_mean"] == 0
    # k3 is half the square of what rounding left between the two log-probs
    assert 0 <= metrics["kl"] < 1e-10
    assert 0 < metrics[GAP_MEAN] <= metrics[GAP_MAX] < 1e-4
    gap = np.abs(logps - rollout.behavior_logps)[rollout.mask]
    np.testing.assert_allclose(
        [metrics[GAP_MEAN], metrics[GAP_MAX]], [gap.mean(), gap.max()], atol=1e-6
    )  # noqa: E501
    assert metrics["grad_norm"] > 0.01 and metrics["finite"] == 1


def test_the_update_compiles_once_and_eats_its_state():
    update = one_device()[2]
    state = new_state()
    for step in range(3):
        rollout, logps = rolled_out(step)
        values = np.random.default_rng(step).normal(size=(P, G, 1))
        before = state
        state, metrics = update(state, plan(rollout), experience_of(rollout, logps, values))
        assert metrics["finite"] == 1 and state.step == step + 1
        assert all(x.is_deleted() for x in jax.tree.leaves((before.params, before.opt_state)))
    assert update._cache_size() == 1


def test_constant_rewards_without_kl_do_not_move_a_llama():
    algorithm = grpo(kl_weight=0.0)
    update = new_update(algorithm)
    rollout, logps = rolled_out()
    # right or wrong, by prompt; 0.1 has no exact float, so its mean need not be 0.1
    values = np.broadcast_to(np.array([0.1, 0, 1, 0.7] * 2)[:, None, None], (P, G, 1))
    state = new_state(algorithm)
    for _ in range(2):
        state, metrics = update(
            state, plan(rollout), experience_of(rollout, logps, values, algorithm)
        )
        assert metrics["grad_norm"] == 0
    assert_identical(jax.device_get(state.params), llama_params())
    moments = jax.tree.leaves(jax.tree.map(lambda x: float(np.max(np.abs(x))), state.opt_state))
    assert sorted(set(moments)) == [0.0, 2.0]  # but the steps are counted


def spread_out(rollout: Rollout) -> tuple[Layout, Experience]:
    """Off policy, so that ratios, clip and KL all have something to say."""
    rng = np.random.default_rng(6)
    moved = rollout._replace(
        behavior_logps=np.where(
            rollout.mask, rollout.behavior_logps + rng.normal(0, 0.2, rollout.mask.shape), 0
        ).astype(np.float32)
    )
    reference = moved.behavior_logps + rng.normal(0, 0.3, rollout.mask.shape).astype(np.float32)
    return plan(moved), experience_of(moved, reference)


@functools.cache
def twice_on_one_device() -> Any:
    """State and metrics after two updates."""
    update, state = one_device()[2], new_state()
    for _ in range(2):
        state, metrics = update(state, *spread_out(rolled_out()[0]))
    assert metrics["clip_ratio/region_mean"] > 0.02 and metrics["kl"] > 0.01
    return jax.device_get((state, metrics))


def assert_equal_but_for_rounding(found: Any, expected: Any) -> None:
    (state, metrics), (expected_state, expected_metrics) = jax.device_get((found, expected))
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(close, state, expected_state)


def test_micro_batches_remat_and_chunks_leave_the_update_as_it_is():
    update, state = new_update(micro_batches=4, remat="full", chunk=4), new_state()
    for _ in range(2):
        state, metrics = update(state, *spread_out(rolled_out()[0]))
    assert_equal_but_for_rounding((state, metrics), twice_on_one_device())
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), state.params, llama_params())
    assert min(jax.tree.leaves(moved)) > 1e-2


@pytest.mark.parametrize(
    "shape, micro_batches", [((8, 1, 1), 1), ((1, 8, 1), 1), ((2, 2, 2), 2), ((1, 4, 2), 1)]
)
def test_eight_devices_equal_one(shape, micro_batches):
    rollout, logps = rolled_out()
    mesh = make_mesh(*shape)
    axes, shapes = param_axes(CONFIG), param_shapes(CONFIG)
    training = param_shardings(axes, shapes, mesh, "training")
    sampling = param_shardings(axes, shapes, mesh, "sampling")
    sharded = functools.partial(jax.device_put, device=batch_sharding(mesh))
    with jax.set_mesh(mesh):
        found = new_generate()(
            jax.device_put(llama_params(), sampling),
            sharded(prompts()),
            purpose_key(0, 0, 0, 0),
            TEMPERATURE,
            C,
        )
        assert found.completion_ids.sharding.is_equivalent_to(batch_sharding(mesh), 3)
        np.testing.assert_array_equal(found.completion_ids, rollout.completion_ids)
        np.testing.assert_array_equal(found.lengths, rollout.lengths)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(found.behavior_logps, rollout.behavior_logps)

        params = jax.device_put(llama_params(), training)
        scored = new_score()(params, sharded(plan(rollout))).logps
        close(np.where(rollout.mask, scored, 0), np.where(rollout.mask, logps, 0))

        state = init_state(llama_params(), SMOOTH, ALGORITHM)
        where = state_shardings(state, llama_params(), training, mesh)
        state = jax.device_put(state, where)
        models = make_models(CONFIG, entropy=ALGORITHM.needs_entropy)
        update = jax.jit(
            make_update(models, SMOOTH, ALGORITHM, micro_batches=micro_batches),
            donate_argnums=0,
            out_shardings=(where, replicated(mesh)),
        )
        batch = sharded(spread_out(rollout))
        for _ in range(2):
            state, metrics = update(state, *batch)
        assert update._cache_size() == 1
        spread = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, where)
        assert all(jax.tree.leaves(spread))
    assert_equal_but_for_rounding((state, metrics), twice_on_one_device())


def test_a_term_with_a_coefficient_of_0_is_a_metric_and_no_loss():
    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        weight = jnp.sum(experience.mask)
        masked = jnp.where(experience.mask > 0, outputs.logps, 0.0)
        return {
            "nll": Term(-jnp.sum(masked), weight, 2.0),
            "watched": Term(jnp.sum(masked**2), weight),
        }

    algorithm = sft()._replace(loss=loss)
    state = init_state(bigram_params(), SGD, algorithm)
    new, metrics = bigram_update(algorithm)(state, bigram_layout(), bigram_experience())
    logps = np.asarray(bigram_score(bigram_params(), bigram_layout()).logps)[MASK]
    np.testing.assert_allclose(metrics["watched"], np.mean(logps**2), rtol=1e-5)
    np.testing.assert_allclose(metrics["nll"], -np.mean(logps), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -2 * np.mean(logps), rtol=1e-5)
    alone = sft()
    single = gradient_of(bigram_update(alone), alone, bigram_experience())
    moved = np.asarray(state.params["table"] - new.params["table"])
    np.testing.assert_allclose(moved, 2 * single, rtol=1e-4, atol=1e-6)
