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
from jax_grpo.models.heads import from_policy
from jax_grpo.models.llama import cast_params, forward, head, param_shapes
from jax_grpo.scoring import Layout, plan, reward_scores, score, values
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
    arrays = (prompts, PROMPT_LENGTHS, completions, LENGTHS)
    return Layout(*(jnp.asarray(x, jnp.int32) for x in arrays), jnp.asarray(TEMPERATURES))


def plain_hidden(params: Any) -> jax.Array:
    """Final hidden states [P, G, L + C, D] of rows that repeat their prompt, right-padded."""
    rows = np.zeros((P * G, 1, L + C), np.int32)
    for p, g in np.ndindex(P, G):
        n, c = PROMPT_LENGTHS[p], LENGTHS[p, g]
        rows[p * G + g, 0, :n] = PROMPTS[p, :n]
        rows[p * G + g, 0, n : n + c] = COMPLETIONS[p, g, :c]
    positions = np.broadcast_to(np.arange(L + C), rows.shape)
    hidden, _ = forward(CONFIG, params, jnp.asarray(rows), positions)
    return hidden.reshape(P, G, L + C, -1)


def before_tokens(x: jax.Array) -> jax.Array:
    """Of what plain rows say at each position, that which stands before each completion token."""
    return jnp.stack([x[p, :, n - 1 : n - 1 + C] for p, n in enumerate(PROMPT_LENGTHS)])


def plain(params: Any, _: Layout) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [P, G, C] of plain rows."""
    scores = plain_hidden(params) @ head(params).T
    logps = jax.nn.log_softmax(scores / TEMPERATURES[:, None, None, None], axis=-1)
    logps = before_tokens(logps)
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
    for found, given in zip(whole[:4], base[:4], strict=True):
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


# --- Critic and reward model ---------------------------------------------------------------------

RATES = np.random.default_rng(3).normal(size=(P, G))  # of a weighted sum of scores


@functools.cache
def scalar_params() -> Any:
    """Of policy, critic and reward model at once: `forward` looks at the trunk alone."""
    return {**params(), "score": jnp.asarray(np.random.default_rng(4).normal(size=16), jnp.float32)}


def grouped_scalars(params: Any, layout: Layout) -> tuple[jax.Array, jax.Array]:
    return values(CONFIG, params, layout), reward_scores(CONFIG, params, layout)


def plain_scalars(params: Any, _: Layout) -> tuple[jax.Array, jax.Array]:
    said = plain_hidden(params) @ params["score"]
    last = [[said[p, g, PROMPT_LENGTHS[p] + LENGTHS[p, g] - 1] for g in range(G)] for p in range(P)]
    return before_tokens(said), jnp.stack([jnp.stack(row) for row in last])


@functools.cache
def scalars_and_grad(scalars: Any) -> Any:
    def loss(params, layout):
        found, scores = scalars(params, layout)
        total = jnp.sum(jnp.where(EXISTS, found, 0.0) * WEIGHTS) + jnp.sum(scores * RATES)
        return total, (found, scores)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_values_and_reward_scores_equal_those_of_plain_rows_with_their_gradients():
    (_, (found, scores)), grads = scalars_and_grad(grouped_scalars)(scalar_params(), layout(5, 9))
    (_, (plain_found, plain_scores)), plain_grads = scalars_and_grad(plain_scalars)(
        scalar_params(), layout()
    )
    assert found.shape == (P, G, C) and scores.shape == (P, G)
    assert found.dtype == scores.dtype == jnp.float32
    close(np.where(EXISTS, found, 0), np.where(EXISTS, plain_found, 0))
    close(scores, plain_scores)
    jax.tree.map(close, grads, plain_grads)
    assert np.std(plain_found[EXISTS]) > 0.2 and np.std(plain_scores) > 0.2
    assert not np.any(grads["head"]) and np.max(np.abs(grads["score"])) > 1e-2


def test_a_value_is_said_before_its_token_and_a_score_after_the_last():
    run = lambda layout: scalars_and_grad(grouped_scalars)(scalar_params(), layout)[0][1]  # noqa: E731
    base = layout()
    found, scores = run(base)
    changed = base.completion_ids.at[0, 0, 6].add(1).at[0, 1, 1].add(1).at[0, 2, 0].add(1) % 24
    after, scores_after = run(base._replace(completion_ids=changed))
    # the last token of 7, then what stands behind completions of one and of no token
    moved = scores != scores_after
    assert np.argwhere(moved).tolist() == [[0, 0]]
    np.testing.assert_array_equal(np.where(EXISTS, found, 0), np.where(EXISTS, after, 0))
    # an empty completion is worth what the prompt is: what the critic says before its first token
    np.testing.assert_array_equal(scores[LENGTHS == 0], found[LENGTHS == 0][:, 0])


def test_a_fresh_critic_says_0():
    fresh = from_policy(CONFIG, params())
    found, scores = scalars_and_grad(grouped_scalars)({**params(), **fresh}, layout())[0][1]
    assert not np.any(found) and not np.any(scores)


# --- Packed rows ---------------------------------------------------------------------------------

LONGEST = 16  # tokens of a packed row
SIZES = [(3, 4), (1, 5), (2, 1), (5, 4), (4, 3), (1, 6)]  # tokens of prompt and completion
ROWS = [[0, 1, 2], [3], [4, 5]]  # which examples each row holds: full, and with padding
PROMPT_OF = [_RNG.integers(0, 24, n) for n, _ in SIZES]
COMPLETION_OF = [_RNG.integers(0, 24, c) for _, c in SIZES]


def rollout_of(prompts: np.ndarray, lengths: Any, completions: np.ndarray, mask: Any) -> Rollout:
    silent = jnp.zeros(mask.shape, jnp.float32)
    batch = PromptBatch(jnp.asarray(prompts), jnp.asarray(lengths), jnp.arange(len(prompts)))
    # `lengths` of completions is what exists; both kinds of row have no holes before their end
    exist = jnp.asarray(mask.shape[-1] - np.argmax(mask[..., ::-1], axis=-1))
    ids, counts = jnp.asarray(completions), jnp.asarray(mask)
    ended = jnp.zeros(exist.shape, bool)
    return Rollout(batch, ids, exist, counts, silent, silent, ended, jnp.float32(0.7))


def one_by_one() -> Rollout:
    """The examples as groups of one, right-padded."""
    prompts, completions = np.zeros((6, 5), np.int32), np.zeros((6, 1, 6), np.int32)
    for e, (n, c) in enumerate(SIZES):
        prompts[e, :n], completions[e, 0, :c] = PROMPT_OF[e], COMPLETION_OF[e]
    mask = np.arange(6) < np.array([[[c]] for _, c in SIZES])
    return rollout_of(prompts, [n for n, _ in SIZES], completions, mask)


def packed() -> Rollout:
    """The examples one after the other, in three rows; garbage where there is padding."""
    ids, segments = np.full((3, 1, LONGEST), 11, np.int32), np.full((3, LONGEST), -1, np.int32)
    mask = np.zeros((3, 1, LONGEST), bool)
    for row, examples in enumerate(ROWS):
        at = 0
        for segment, e in enumerate(examples):
            n, end = SIZES[e][0], at + sum(SIZES[e])
            ids[row, 0, at:end] = np.concatenate([PROMPT_OF[e], COMPLETION_OF[e]])
            segments[row, at:end], mask[row, 0, at + n : end] = segment, True
            at = end
    rollout = rollout_of(np.zeros((3, 0), np.int32), np.zeros(3, np.int32), ids, mask)
    return rollout._replace(segments=jnp.asarray(segments))


@functools.cache
def packed_or_not(remat: str) -> Any:
    """Log-probs, and the gradient of the sum of their squares where the mask is."""

    def loss(params, layout, mask):
        logps = score(CONFIG, params, layout, chunk=5, remat=remat).logps
        return jnp.sum(jnp.where(mask, logps**2, 0.0)), logps

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def said_of(rollout: Rollout, remat: str = "none") -> Any:
    return packed_or_not(remat)(params(), plan(rollout), rollout.mask)


def test_packed_rows_equal_their_examples_one_by_one_in_values_and_gradients():
    alone, together = one_by_one(), packed()
    (total, logps), grads = said_of(together, "full")
    (expected_total, expected_logps), expected_grads = said_of(alone)
    # rows hold the examples in order, so the tokens that count are in one order, too
    close(logps[together.mask], expected_logps[alone.mask])
    close(total, expected_total)
    jax.tree.map(close, grads, expected_grads)
    assert np.all(np.isfinite(logps)) and np.std(expected_logps[alone.mask]) > 0.5


def test_a_packed_example_does_not_see_its_neighbours():
    rollout = packed()
    changed = rollout._replace(completion_ids=rollout.completion_ids.at[0, 0, 7].add(1) % 24)
    before, after = said_of(rollout, "full")[0][1], said_of(changed, "full")[0][1]
    mine = np.zeros(rollout.mask.shape, bool)
    mine[0, 0, 8:13] = True  # what follows the one token of prompt that the second example has
    np.testing.assert_array_equal(before[rollout.mask & ~mine], after[rollout.mask & ~mine])
    assert np.all(np.abs(before - after)[mine] > 1e-5)


def test_a_reward_model_refuses_packed_rows():
    with pytest.raises(ValueError, match="cannot be packed"):
        reward_scores(CONFIG, scalar_params(), plan(packed()))
