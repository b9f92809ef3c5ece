"""Scoring: the layout is a secret, so it must equal plain rows in values and in gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params, forward, head, param_shapes
from jax_grpo.scoring import Layout, plan, score
from jax_grpo.types import PromptBatch, Rollout

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
P, L, G, C = 3, 5, 4, 7
PROMPT_LENGTHS = np.array([5, 1, 3])
# empty, one token, all but one, full
LENGTHS = np.array([[7, 1, 0, 6], [2, 7, 5, 1], [4, 3, 7, 0]])
EXISTS = np.arange(C) < LENGTHS[..., None]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling is most of the work here, and less optimised code is as right."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def params() -> Any:
    rng = np.random.default_rng(0)
    shapes = param_shapes(CONFIG)
    values = lambda x: rng.normal(0.5 * (x.shape[-1] == CONFIG.hidden_size), 0.3, x.shape)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(values(x), jnp.float32), shapes)


_RNG = np.random.default_rng(1)
PROMPTS, COMPLETIONS = _RNG.integers(0, 24, (P, L)), _RNG.integers(0, 24, (P, G, C))
TEMPERATURES = np.array([0.7, 1.0, 1.9], np.float32)  # a layout has one for each prompt


def layout(prompt_padding: int = 0, completion_padding: int = 0) -> Layout:
    prompts = np.where(np.arange(L) < PROMPT_LENGTHS[:, None], PROMPTS, prompt_padding)
    completions = np.where(EXISTS, COMPLETIONS, completion_padding)
    arrays = (prompts, PROMPT_LENGTHS, completions)
    return Layout(*(jnp.asarray(x, jnp.int32) for x in arrays), jnp.asarray(TEMPERATURES))


def plain(params: Any, _: Layout) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [P, G, C] of rows that repeat their prompt, padded on the right."""
    rows = np.zeros((P * G, 1, L + C), np.int32)
    for p, g in np.ndindex(P, G):
        n, c = PROMPT_LENGTHS[p], LENGTHS[p, g]
        rows[p * G + g, 0, :n] = PROMPTS[p, :n]
        rows[p * G + g, 0, n : n + c] = COMPLETIONS[p, g, :c]
    positions = np.broadcast_to(np.arange(L + C), rows.shape)
    hidden, _ = forward(CONFIG, params, jnp.asarray(rows), positions)
    scores = (hidden[:, 0] @ head(params).T).reshape(P, G, L + C, -1)
    logps = jax.nn.log_softmax(scores / TEMPERATURES[:, None, None, None], axis=-1)
    logps = jnp.stack([logps[p, :, n - 1 : n - 1 + C] for p, n in enumerate(PROMPT_LENGTHS)])
    chosen = jnp.take_along_axis(logps, COMPLETIONS[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


WEIGHTS = np.where(EXISTS, np.random.default_rng(2).normal(size=(P, G, C)), 0.0)


def value_and_grad(logps: Any) -> Any:
    """Of a weighted sum of what exists, with the arrays that it came from."""

    def loss(params, layout):
        found = logps(params, layout)
        return jnp.sum(jnp.where(EXISTS, found[0], 0.0) * WEIGHTS), (found[0], found[1])

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def scored(remat: str, chunk: int) -> Any:
    return value_and_grad(functools.partial(score, CONFIG, entropy=True, remat=remat, chunk=chunk))


@functools.cache
def expected() -> Any:
    return jax.device_get(value_and_grad(plain)(params(), layout()))


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("remat, chunk", [("none", 0), ("full", 3)])
def test_the_group_layout_equals_plain_rows_in_values_and_gradients(remat, chunk):
    (value, (logps, entropy)), grads = scored(remat, chunk)(params(), layout())
    (plain_value, (plain_logps, plain_entropy)), plain_grads = expected()
    assert logps.shape == entropy.shape == (P, G, C)
    assert logps.dtype == entropy.dtype == jnp.float32
    close(np.where(EXISTS, logps, 0), np.where(EXISTS, plain_logps, 0))
    close(np.where(EXISTS, entropy, 0), np.where(EXISTS, plain_entropy, 0))
    close(value, plain_value)
    jax.tree.map(close, grads, plain_grads)
    assert np.std(plain_logps[EXISTS]) > 0.5
    assert min(np.max(np.abs(g)) for g in jax.tree.leaves(plain_grads)) > 1e-2


@pytest.mark.parametrize("garbage", [(9, 9), (23, -100), (10**6, 2**31 - 1)])
def test_what_stands_at_padding_changes_not_one_bit(garbage):
    clean, dirty = (
        scored("none", 0)(params(), layout()),
        scored("none", 0)(params(), layout(*garbage)),
    )
    for a, b in zip(clean[0][1], dirty[0][1], strict=True):
        np.testing.assert_array_equal(np.where(EXISTS, a, 0), np.where(EXISTS, b, 0))
        assert np.all(np.isfinite(b))  # it means nothing there, but it breaks nothing
    jax.tree.map(np.testing.assert_array_equal, clean[1], dirty[1])


@pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 2, 1, 0], [2, 0, 1, 3]])
def test_order_within_a_group_permutes_and_nothing_else(order):
    base, order = layout(), np.array(order)
    shuffled = base._replace(completion_ids=base.completion_ids[:, order])
    found, whole = score_alone()(params(), shuffled), score_alone()(params(), base)
    close(found.logps, whole.logps[:, order])


def test_order_of_prompts_permutes_and_nothing_else():
    order = np.array([2, 0, 1])
    found = score_alone()(params(), jax.tree.map(lambda x: x[order], layout()))
    close(found.logps, score_alone()(params(), layout()).logps[order])


@functools.cache
def score_alone() -> Any:
    return jax.jit(functools.partial(score, CONFIG))


def test_completions_of_a_group_do_not_see_each_other():
    base = layout()
    other = base._replace(completion_ids=base.completion_ids.at[:, 1].set(3))
    found, whole = score_alone()(params(), other), score_alone()(params(), base)
    rest = np.array([0, 2, 3])
    np.testing.assert_array_equal(found.logps[:, rest], whole.logps[:, rest])
    assert np.max(np.abs(found.logps[:, 1] - whole.logps[:, 1])) > 0.1


def test_a_token_is_scored_before_it_is_seen():
    base = layout()
    before = score_alone()(params(), base).logps
    changed = (base.completion_ids[0, 0, 3] + 1) % 24
    after = score_alone()(
        params(), base._replace(completion_ids=base.completion_ids.at[0, 0, 3].set(changed))
    ).logps
    np.testing.assert_array_equal(after[0, 0, :3], before[0, 0, :3])
    assert np.all(np.abs(after[0, 0, 3:] - before[0, 0, 3:]) > 1e-5)
    # what the model says of position 3 is one distribution: over all tokens it sums to 1
    total = 0.0
    for token in range(24):
        ids = base.completion_ids.at[0, 0, 3].set(token)
        total += np.exp(score_alone()(params(), base._replace(completion_ids=ids)).logps[0, 0, 3])
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_entropy_is_only_there_when_asked():
    assert score_alone()(params(), layout()).entropy is None


def test_plan_of_a_slice_is_the_slice_of_the_plan():
    base = layout()
    prompts = PromptBatch(base.prompt_ids, base.prompt_lengths, jnp.arange(P))
    zeros = jnp.zeros((P, G, C))
    holes = jnp.asarray(EXISTS).at[0, 0, 2].set(False)  # what counts is no business of a layout
    rollout = Rollout(
        prompts, base.completion_ids, jnp.asarray(LENGTHS), holes, zeros, zeros,
        jnp.zeros((P, G), bool), jnp.float32(0.7),
    )  # fmt: skip
    whole = plan(rollout)
    np.testing.assert_array_equal(whole.temperature, np.full(P, 0.7, np.float32))
    for found, given in zip(whole[:3], base[:3], strict=True):
        np.testing.assert_array_equal(found, given)
    for rows in (slice(0, 1), slice(1, 3)):
        cut = lambda x: x[rows] if x.ndim else x  # noqa: B023, E731
        part, of_whole = plan(jax.tree.map(cut, rollout)), jax.tree.map(cut, whole)
        for a, b in zip(part, of_whole, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)


def test_bfloat16_scores_are_float32_and_near():
    rough = score_alone()(cast_params(params(), jnp.bfloat16), layout())
    assert rough.logps.dtype == jnp.float32
    exact = expected()[0][1][0]
    gap = np.abs(np.asarray(rough.logps) - exact)[EXISTS]
    assert gap.max() < 0.3 and 1e-4 < gap.mean() < 0.05
    # logits rounded to bfloat16 would stand on a grid of 2^-6 or so; these do not
    assert len(np.unique(np.asarray(rough.logps)[EXISTS])) > EXISTS.sum() * 0.9
