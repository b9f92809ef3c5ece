"""The decoder: against a slow NumPy one, and every way of running it against every other."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.logprobs import logits
from jax_grpo.models.attention import MASKED, KeyValues, Part, attention
from jax_grpo.models.config import PRESETS, LlamaConfig, RopeScaling
from jax_grpo.models.llama import (
    cast_params,
    empty_cache,
    forward,
    head,
    init_params,
    num_params,
    param_axes,
    param_shapes,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rotate,
    unstack_layers,
)

# No two sizes are alike, and H d is not D, so that no axis can pass for another. A small base makes
# the angles differ over a few positions.
PLAIN = LlamaConfig(
    vocab_size=23,
    hidden_size=10,
    intermediate_size=14,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rope_theta=50.0,
    rms_norm_eps=1e-5,
)
LLAMA3 = RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_position_embeddings=24)
BIASED = dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True, rope_scaling=LLAMA3)
CONFIGS = {
    "grouped, all biases, stretched": BIASED,
    "every head its own": dataclasses.replace(PLAIN, num_kv_heads=4),
    "one for all, tied": dataclasses.replace(PLAIN, num_kv_heads=1, tie_word_embeddings=True),
}
P, G, L, C = 2, 3, 5, 4
PROMPT_LENGTHS = np.array([5, 2])


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiling is most of the work here, and less optimised code is as right."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def random_params(config: LlamaConfig, seed: int = 0) -> Any:
    """Parameters that all matter: also biases are not 0 and norms not 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape) + (x.shape[-1:] == (10,)), jnp.float32),
        param_shapes(config),
    )


@functools.cache
def run(config: LlamaConfig) -> Any:
    return jax.jit(functools.partial(forward, config), static_argnames="remat")


def tokens_of(*shape: int, seed: int = 1, config: LlamaConfig = PLAIN) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def arange_like(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)


def join(prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """Plain rows [P, G, L + C]: the true prompt, the completion, then padding."""
    rows = np.full((P, G, L + C), 7)
    for p, length in enumerate(PROMPT_LENGTHS):
        rows[p, :, :length] = prompts[p, :length]
        rows[p, :, length : length + C] = completions[p]
    return rows


def behind_the_prompt(x: np.ndarray) -> np.ndarray:
    """What the plain rows [P, G, L + C, ...] hold at the completions' positions."""
    return np.stack([x[p, :, n : n + C] for p, n in enumerate(PROMPT_LENGTHS)])


# --- The slow reference: one row, one head and one position at a time, in float64 ----------------


def slow_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def slow_frequencies(config: LlamaConfig) -> list[float]:
    """As the papers say it, in wavelengths."""
    found = []
    for i in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        if scaling is not None and scaling.kind == "llama3":
            context = scaling.original_max_position_embeddings
            wavelength = 2 * math.pi / frequency
            if wavelength > context / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength >= context / scaling.high_freq_factor:
                smooth = (context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        found.append(frequency)
    return found


def slow_rotate(x: np.ndarray, position: int, config: LlamaConfig) -> np.ndarray:
    """Turns the complex numbers x[i] + i x[i + d/2] by their angle."""
    half = config.head_dim // 2
    turn = np.exp(1j * position * np.array(slow_frequencies(config)))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def slow_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """q [T, H, d]; k, v [S, K, d]; visible [T, S]: key heads repeated, one query at a time."""
    H, K = q.shape[1], k.shape[1]
    k, v = np.repeat(k, H // K, axis=1), np.repeat(v, H // K, axis=1)
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        seen = np.flatnonzero(visible[t])
        for h in range(H):
            scores = k[seen, h] @ q[t, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[seen, h]
    return out


def slow_forward(config: LlamaConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Hidden states [T, D] of one row [T]."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, T = params["embed"][tokens], len(tokens)
    for n in range(config.num_layers):
        w = {name: value[n] for name, value in params["layers"].items()}
        bias = lambda name: w.get(name, 0.0)  # noqa: B023, E731
        h = slow_norm(x, w["attn_norm"], config.rms_norm_eps)
        q = np.tensordot(h, w["q"], 1) + bias("q_bias")
        k = np.tensordot(h, w["k"], 1) + bias("k_bias")
        v = np.tensordot(h, w["v"], 1) + bias("v_bias")
        q = np.stack([slow_rotate(q[t], t, config) for t in range(T)])
        k = np.stack([slow_rotate(k[t], t, config) for t in range(T)])
        attended = slow_attention(q, k, v, np.tril(np.ones((T, T), bool)))
        x = x + np.tensordot(attended, w["o"], 2) + bias("o_bias")
        h = slow_norm(x, w["mlp_norm"], config.rms_norm_eps)
        gate = h @ w["gate"] + bias("gate_bias")
        up = h @ w["up"] + bias("up_bias")
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"] + bias("down_bias")
    return slow_norm(x, params["norm"], config.rms_norm_eps)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_agrees_with_the_slow_reference(name):
    config = CONFIGS[name]
    params, rows = random_params(config), tokens_of(P, G, L + C)
    hidden, _ = run(config)(params, rows, arange_like(rows))
    expected = [[slow_forward(config, params, row) for row in group] for group in rows]
    assert np.std(expected) > 0.3  # it would be easy to agree on nothing
    np.testing.assert_allclose(hidden, expected, rtol=2e-5, atol=2e-5)
    table = params["embed"] if config.tie_word_embeddings else params["head"]
    assert head(params) is table


# --- One model, many ways to run it --------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False], ids=["scanned", "unrolled"])
def test_prefix_shared_and_cached_decode_equal_the_plain_forward(stacked):
    config = BIASED
    params = random_params(config) if stacked else unstack_layers(random_params(config))
    prompts, completions = tokens_of(P, 1, L, seed=2), tokens_of(P, G, C, seed=3)
    rows = join(prompts[:, 0], completions)
    plain, _ = run(config)(random_params(config), rows, arange_like(rows))
    expected = behind_the_prompt(np.asarray(plain))

    prompt, prefix = run(config)(params, prompts, arange_like(prompts))
    for p, n in enumerate(PROMPT_LENGTHS):  # the prompt itself, whatever pads it
        np.testing.assert_allclose(prompt[p, 0, :n], plain[p, 0, :n], rtol=1e-5, atol=1e-5)
    prefixed = {"prefix": prefix, "prefix_lengths": jnp.asarray(PROMPT_LENGTHS)}
    positions = np.broadcast_to(PROMPT_LENGTHS[:, None, None] + np.arange(C), (P, G, C))
    shared, own = run(config)(params, completions, positions, **prefixed)
    np.testing.assert_allclose(shared, expected, rtol=1e-5, atol=1e-5)

    cache: Any = empty_cache(config, P, G, C, jnp.float32)
    if stacked:
        cache = jax.tree.map(lambda *xs: jnp.stack(xs), *cache)
    for i in range(C):
        decoded, cache = run(config)(
            params, completions[..., i : i + 1], positions[..., i : i + 1],
            cache=cache, index=i, **prefixed,
        )  # fmt: skip
        np.testing.assert_allclose(decoded[..., 0, :], expected[..., i, :], rtol=1e-5, atol=1e-5)
    # what was written position by position is what all positions give at once
    assert jax.tree.structure(cache) == jax.tree.structure(own)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), cache, own)


def test_scanned_and_unrolled_layers_are_one_model():
    params = random_params(BIASED)
    layers = unstack_layers(params)["layers"]
    assert len(layers) == 2
    for n, layer in enumerate(layers):
        expected = {name: x[n] for name, x in params["layers"].items()}
        jax.tree.map(np.testing.assert_array_equal, layer, expected)
    rows = tokens_of(P, G, L + C)
    scanned, kv = run(BIASED)(params, rows, arange_like(rows))
    unrolled, per_layer = run(BIASED)(unstack_layers(params), rows, arange_like(rows))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-5)
    for n in range(2):
        np.testing.assert_allclose(kv.keys[n], per_layer[n].keys, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(kv.values[n], per_layer[n].values, rtol=1e-5, atol=1e-5)
    # with the layers' order changed it would be another model
    swapped = {**params, "layers": jax.tree.map(lambda x: x[::-1], params["layers"])}
    other, _ = run(BIASED)(swapped, rows, arange_like(rows))
    assert np.max(np.abs(other - scanned)) > 0.1


def test_remat_changes_neither_values_nor_gradients_but_memory():
    params, rows = random_params(PLAIN), jnp.asarray(tokens_of(P, G, L))
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(P, G, L, PLAIN.hidden_size)))

    def loss(params, remat):
        hidden, _ = forward(PLAIN, params, rows, arange_like(rows), remat=remat)
        return jnp.sum(hidden * weights)

    value_and_grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, grads = value_and_grad(params, "none")
    sizes = jax.tree.map(lambda g: float(np.max(np.abs(g))), grads)
    assert sizes.pop("head") == 0 and all(size > 1e-3 for size in jax.tree.leaves(sizes))
    kept = {}
    for remat in ("none", "full", "dots"):
        other, other_grads = value_and_grad(params, remat)
        np.testing.assert_allclose(other, value, rtol=1e-6)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, other_grads, grads)
        # the function that `vjp` returns is a tree whose leaves are what the forward pass kept
        pullback = jax.eval_shape(lambda p, r=remat: jax.vjp(lambda q: loss(q, r), p)[1], params)
        kept[remat] = sum(math.prod(x.shape) for x in jax.tree.leaves(pullback))
    assert kept["full"] < kept["dots"] < kept["none"]


@pytest.mark.parametrize("remat", ["all", "", "Full", None])
def test_unknown_remat_is_refused(remat):
    rows = tokens_of(1, 1, 2)
    with pytest.raises(ValueError, match="not one of: none, full, dots"):
        forward(PLAIN, random_params(PLAIN), rows, rows, remat=remat)


def test_unknown_attention_is_refused():
    kv = KeyValues(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 1, 1, 2)))
    with pytest.raises(ValueError, match="'flash' is not one of: xla"):
        attention(jnp.zeros((1, 1, 1, 1, 2)), [Part(kv, jnp.ones((1, 1, 1, 1), bool))], "flash")


# --- What sees what ------------------------------------------------------------------------------


def test_nothing_reaches_back_in_time_nor_across_rows_by_exact_gradients():
    """Every token has an embedding of its own here, so its gradient says who saw the token."""
    prompts = jnp.arange(P * L).reshape(P, 1, L)  # 0 .. 9
    completions = jnp.arange(P * L, P * L + P * 2 * 3).reshape(P, 2, 3)  # 10 .. 21
    lengths = jnp.asarray(PROMPT_LENGTHS)
    mix = jnp.asarray(np.random.default_rng(0).normal(size=PLAIN.hidden_size), jnp.float32)

    def outputs(embed):
        params = {**random_params(PLAIN), "embed": embed}
        prompt, prefix = forward(PLAIN, params, prompts, jnp.arange(L) + 0 * prompts)
        positions = lengths[:, None, None] + jnp.arange(3) + 0 * completions
        completion, _ = forward(
            PLAIN, params, completions, positions, prefix=prefix, prefix_lengths=lengths
        )
        return jnp.concatenate([(prompt @ mix).ravel(), (completion @ mix).ravel()])

    jacobian = jax.jit(jax.jacrev(outputs))(random_params(PLAIN)["embed"])  # [22, V, D]
    influence = np.abs(np.asarray(jacobian)).max(-1)
    sees = np.zeros((22, 23), bool)
    for p in range(P):
        for t in range(L):
            sees[p * L + t, p * L : p * L + t + 1] = True
        for g in range(2):
            first = P * L + (p * 2 + g) * 3
            for t in range(3):
                sees[first + t, p * L : p * L + PROMPT_LENGTHS[p]] = True
                sees[first + t, first : first + t + 1] = True
    assert np.all(influence[~sees] == 0.0)
    assert np.all(influence[sees] > 1e-6)


def test_what_stands_at_padding_changes_not_one_bit():
    params = random_params(PLAIN)
    prompts, completions = tokens_of(P, 1, L, seed=2), tokens_of(P, G, C, seed=3)
    positions = np.broadcast_to(PROMPT_LENGTHS[:, None, None] + np.arange(C), (P, G, C))

    def run_with(padding):
        padded = np.where(np.arange(L) < PROMPT_LENGTHS[:, None, None], prompts, padding)
        hidden, prefix = run(PLAIN)(params, padded, arange_like(padded))
        lengths = jnp.asarray(PROMPT_LENGTHS)
        found, _ = run(PLAIN)(params, completions, positions, prefix=prefix, prefix_lengths=lengths)
        return hidden[0], hidden[1, :, : PROMPT_LENGTHS[1]], found

    for a, b in zip(run_with(0), run_with(19), strict=True):
        np.testing.assert_array_equal(a, b)


# --- Attention -----------------------------------------------------------------------------------


def test_attention_over_parts_agrees_with_repeated_heads():
    rng = np.random.default_rng(0)
    H, K, d, S, T = 6, 2, 4, 5, 3
    q = rng.normal(size=(P, G, T, H, d))
    shared_k, shared_v = rng.normal(size=(2, P, S, K, d))
    own_k, own_v = rng.normal(size=(2, P, G, T, K, d))
    sees_shared = rng.random((P, 1, T, S)) < 0.6
    sees_own = np.broadcast_to(np.tril(np.ones((T, T), bool)), (P, G, T, T))

    def run_with(garbage):
        # what no query sees may hold anything finite
        unseen = ~sees_shared.any((1, 2))[..., None, None]
        keys = np.where(unseen, garbage, shared_k).astype(np.float32)
        values = np.where(unseen, garbage, shared_v).astype(np.float32)
        parts = [
            Part(KeyValues(jnp.asarray(keys), jnp.asarray(values)), jnp.asarray(sees_shared)),
            Part(KeyValues(*map(jnp.float32, (own_k, own_v))), jnp.asarray(sees_own)),
        ]
        return attention(jnp.float32(q), parts)

    sees_shared[0, ..., 2] = sees_shared[1, ..., 4] = False
    found = run_with(0.0)
    for p, g in np.ndindex(P, G):
        expected = slow_attention(
            q[p, g],
            np.concatenate([shared_k[p], own_k[p, g]]),
            np.concatenate([shared_v[p], own_v[p, g]]),
            np.concatenate([sees_shared[p, 0], sees_own[p, g]], axis=-1),
        )
        np.testing.assert_allclose(found[p, g], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run_with(1e15), found)


def test_a_query_that_sees_nothing_stays_finite():
    kv = KeyValues(jnp.ones((1, 3, 1, 2)), jnp.arange(6.0).reshape(1, 3, 1, 2))
    found = attention(jnp.ones((1, 1, 1, 1, 2)), [Part(kv, jnp.zeros((1, 1, 1, 3), bool))])
    np.testing.assert_allclose(found.ravel(), [2.0, 3.0], rtol=1e-6)  # the mean of all
    assert np.isfinite(np.float32(MASKED))


# --- Rotary positions ----------------------------------------------------------------------------

SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 3.0),
    "dynamic": RopeScaling("dynamic", 3.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "llama3 of 3.2": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    "llama3, odd factors": RopeScaling("llama3", 5.0, 0.5, 9.0, 512),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_frequencies_agree_with_the_papers(name):
    for theta, d in ((500000.0, 128), (10000.0, 64), (50.0, 6)):
        config = dataclasses.replace(
            PLAIN, rope_theta=theta, head_dim=d, rope_scaling=SCALINGS[name]
        )
        found = rope_frequencies(config)
        assert found.dtype == np.float32 and found.shape == (d // 2,)
        np.testing.assert_allclose(found, slow_frequencies(config), rtol=2e-6)


def test_llama3_frequencies_keep_blend_and_divide():
    """Of 64 frequencies of Llama 3.1, by hand: wavelength 2 pi 500000^(i / 64).

    Shorter than 8192 / 4 = 2048: i < 64 ln(2048 / 2 pi) / ln 500000 = 28.2, so 0 .. 28 are kept;
    longer than 8192: i > 64 ln(8192 / 2 pi) / ln 500000 = 34.98, so 35 .. 63 are divided by 8.
    """
    config = dataclasses.replace(
        PLAIN, rope_theta=500000.0, head_dim=128, rope_scaling=SCALINGS["llama3"]
    )
    plain = 500000.0 ** (-np.arange(64) / 64)
    stretch = plain / rope_frequencies(config)
    np.testing.assert_allclose(stretch[:29], 1.0, rtol=2e-6)
    assert np.all(np.diff(stretch[28:36]) > 0.01) and len(stretch[29:35]) == 6
    np.testing.assert_allclose(stretch[35:], 8.0, rtol=2e-6)


def test_rotation_by_hand_and_by_its_purpose():
    config = dataclasses.replace(PLAIN, head_dim=4, rope_theta=100.0)  # angles: position, / 10
    x = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 1, 4)
    found = rotate(x, rope_angles(config, jnp.array([[[3]]]))).ravel()
    # pairs (x0, x2) = (1, 0) by 3 and (x1, x3) = (0, 1) by 0.3
    np.testing.assert_allclose(
        found, [np.cos(3), -np.sin(0.3), np.sin(3), np.cos(0.3)], rtol=1e-6, atol=1e-7
    )
    # a product of query and key depends on how far apart they are, and length on nothing
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 1, 4)).astype(np.float32)
    turned = lambda x, at: rotate(jnp.asarray(x), rope_angles(config, jnp.array([[[at]]])))  # noqa: E731
    near, far = (jnp.sum(turned(q, 7 + at) * turned(k, at)) for at in (0, 40))
    np.testing.assert_allclose(near, far, rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(turned(q, 40) ** 2), np.sum(q**2), rtol=1e-6)


# --- Parameters ----------------------------------------------------------------------------------


def test_num_params_by_hand():
    # tiny: V 32, D 128, F 384, N 2, H = K = 4, d 32, tied
    #   layer: q, k, v, o 4 x 128 x 128; gate, up, down 3 x 128 x 384; two norms 2 x 128
    layer = 65_536 + 147_456 + 256
    assert num_params(PRESETS["tiny"]) == 32 * 128 + 2 * layer + 128 == 430_720
    # all biases, V 23, D 10, F 14, H 4, K 2, d 6, not tied
    #   layer: q, o 2 x 10 x 24, k, v 2 x 10 x 12, biases 24 + 12 + 12 + 10;
    #   gate, up, down 3 x 10 x 14, biases 14 + 14 + 10; norms 2 x 10
    layer = 480 + 240 + 58 + 420 + 38 + 20
    assert num_params(BIASED) == 2 * 23 * 10 + 2 * layer + 10 == 2_982


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_name_their_axes(name):
    config = CONFIGS[name]
    shapes, axes = param_shapes(config, jnp.bfloat16), param_axes(config)
    sizes = {
        "layers": 2, "vocab": 23, "embed": 10, "norm": 10, "mlp": 14, "heads": 4,
        "kv_heads": config.num_kv_heads, "head_dim": 6,
    }  # fmt: skip
    named = jax.tree.map(
        lambda names, x: (tuple(sizes[n] for n in names), x.dtype) == (x.shape, jnp.bfloat16),
        axes, shapes, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    assert all(jax.tree.leaves(named)), named


def test_parameters_start_as_said():
    config = dataclasses.replace(BIASED, initializer_range=0.2)
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), param_shapes(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == expected
    matrices = []
    for path, x in jax.tree.leaves_with_path(params):
        name = path[-1].key
        if name.endswith("norm"):
            np.testing.assert_array_equal(x, 1.0)
        elif name.endswith("_bias"):
            np.testing.assert_array_equal(x, 0.0)
        else:
            assert 0.16 < np.std(x) < 0.24 and abs(np.mean(x)) < 0.05, name
            matrices.extend(x if path[0].key == "layers" else [x])
    # drawn apart: no two matrices, nor two layers of one, begin alike
    assert len({float(x.ravel()[0]) for x in matrices}) == len(matrices) == 2 * 7 + 2


def test_cast_params_changes_the_dtype_and_nothing_else():
    cast = cast_params(random_params(PLAIN), jnp.bfloat16)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16), strict=True),
        cast,
        random_params(PLAIN),
    )


# --- Precision -----------------------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of scans, checkpoints and the like included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_bfloat16_keeps_softmax_norms_and_rotation_in_float32():
    params = cast_params(random_params(PLAIN), jnp.bfloat16)
    rows = jnp.asarray(tokens_of(P, G, L))

    def whole(params):
        hidden, kv = forward(PLAIN, params, rows, arange_like(rows))
        return hidden, kv, logits(hidden, head(params), 0.7)

    jaxpr, (hidden, kv, scores) = jax.make_jaxpr(whole, return_shape=True)(params)
    assert (hidden.dtype, scores.dtype) == (jnp.bfloat16, jnp.float32)
    assert {x.dtype for x in kv} == {jnp.dtype(jnp.bfloat16)}
    found = {"exp": 0, "rsqrt": 0, "cos": 0, "sin": 0, "reduce_max": 0}
    products = []
    for equation in equations(jaxpr.jaxpr):
        name, out = equation.primitive.name, equation.outvars[0].aval
        if name in found:
            found[name] += 1
            assert out.dtype == jnp.float32, equation
        if name == "dot_general":
            products.append(equation)
            assert {x.aval.dtype for x in equation.invars} == {jnp.dtype(jnp.bfloat16)}, equation
    # per layer, scanned once: one softmax, two norms; a norm and the angles outside
    assert found == {"exp": 1, "rsqrt": 3, "cos": 1, "sin": 1, "reduce_max": 1}
    # q, k, v, o, gate, up, down; q k and weights v add up and stay in float32, as do the logits
    assert len(products) == 10
    in_float32 = [e for e in products if e.outvars[0].aval.dtype == jnp.float32]
    assert len(in_float32) == 3


def test_a_norm_of_bfloat16_rounds_once():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(0, 30, (50, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(1, 0.2, 64), jnp.bfloat16)
    found = rms_norm(x, weight, 1e-5)
    exact = slow_norm(np.asarray(x, np.float64), np.asarray(weight, np.float64), 1e-5)
    assert found.dtype == jnp.bfloat16
    # half a unit in the last of bfloat16's 8 digits; two roundings could make twice of it
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2.0**-8 * 1.001)


def test_bfloat16_stays_near_float32():
    params, rows = random_params(PLAIN), tokens_of(P, G, L)
    exact, _ = run(PLAIN)(params, rows, arange_like(rows))
    rough, _ = run(PLAIN)(cast_params(params, jnp.bfloat16), rows, arange_like(rows))
    error = np.abs(np.asarray(rough, np.float32) - exact)
    assert 1e-4 < np.mean(error) < 0.02
