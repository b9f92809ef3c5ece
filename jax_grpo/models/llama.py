"""The one decoder: Llama in Flax NNX, and its forward pass over groups.

NNX defines, initialises and names the parameters. After that the model is a nested dict of plain
arrays: `params["layers"]` is one dict whose arrays lead with the layer axis N and are scanned
(training, scoring), or a tuple of N dicts that are unrolled (sampling, so that no step of the
decode loop slices the stacked weights).

`forward` runs `[P, G, T]` tokens at once. The prompts of a batch are `[P, 1, L]`; its completions
are `[P, G, C]` that attend to their prompt's keys and to themselves, so a prompt is run once per
group and not G times.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jax_grpo.arrays import shard_batch
from jax_grpo.models.attention import KeyValues, Part, attention
from jax_grpo.models.config import LlamaConfig
from jax_grpo.types import Params


class Block(nnx.Module):
    """All decoder layers, stacked on a leading axis; one slice of its parameters is one layer."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        """Creates the stacked parameters, each naming its logical axes."""
        c, N = config, config.num_layers
        D, F, H, K, d = c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim

        def weight(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            noise = jax.random.normal(rngs.params(), (N, *shape))
            return nnx.Param(noise * c.initializer_range, axes=("layers", *axes))

        def bias(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            return nnx.Param(jnp.zeros((N, *shape)), axes=("layers", *axes))

        self.config = config
        self.attn_norm = nnx.Param(jnp.ones((N, D)), axes=("layers", "norm"))
        self.q = weight((D, H, d), ("embed", "heads", "head_dim"))
        self.k = weight((D, K, d), ("embed", "kv_heads", "head_dim"))
        self.v = weight((D, K, d), ("embed", "kv_heads", "head_dim"))
        self.o = weight((H, d, D), ("heads", "head_dim", "embed"))
        self.mlp_norm = nnx.Param(jnp.ones((N, D)), axes=("layers", "norm"))
        self.gate = weight((D, F), ("embed", "mlp"))
        self.up = weight((D, F), ("embed", "mlp"))
        self.down = weight((F, D), ("mlp", "embed"))
        if c.qkv_bias:
            self.q_bias = bias((H, d), ("heads", "head_dim"))
            self.k_bias = bias((K, d), ("kv_heads", "head_dim"))
            self.v_bias = bias((K, d), ("kv_heads", "head_dim"))
        if c.o_bias:
            self.o_bias = bias((D,), ("norm",))
        if c.mlp_bias:
            self.gate_bias = bias((F,), ("mlp",))
            self.up_bias = bias((F,), ("mlp",))
            self.down_bias = bias((D,), ("norm",))

    def attend(
        self,
        x: Array,
        rope: Array,
        segments: Array | None,
        prefix: Part | None,
        cache: KeyValues | None,
        index: Array,
        implementation: str,
    ) -> tuple[Array, KeyValues]:
        """Self-attention of one layer, `[P, G, T, D]` to the same, and its own keys and values."""
        c, h = self.config, rms_norm(x, self.attn_norm[...], self.config.rms_norm_eps)
        q, k, v = project(h, self.q[...]), project(h, self.k[...]), project(h, self.v[...])
        if c.qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is None:
            own, T = KeyValues(k, v), x.shape[2]
            visible = jnp.tril(jnp.ones((1, T, T), bool))
            if segments is not None:
                visible &= segments[:, :, None] == segments[:, None]
        else:
            own = KeyValues(
                *(_write(old, new, index) for old, new in zip(cache, (k, v), strict=True))
            )
            visible = (jnp.arange(own.keys.shape[2]) <= index)[None, None]
        parts = [Part(own, visible[:, None])]
        seen = parts if prefix is None else [prefix, *parts]
        attended = attention(q, seen, implementation)
        out = project(attended, self.o[...], axes=2)
        return (out + self.o_bias[...] if c.o_bias else out), own

    def mlp(self, x: Array) -> Array:
        """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""
        c, h = self.config, rms_norm(x, self.mlp_norm[...], self.config.rms_norm_eps)
        gate, up = project(h, self.gate[...]), project(h, self.up[...])
        if c.mlp_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        down = project(jax.nn.silu(gate) * up, self.down[...])
        return down + self.down_bias[...] if c.mlp_bias else down


class Llama(nnx.Module):
    """A Llama: definition, initialisation and names of its parameters. See `forward`."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        """Creates every parameter in float32."""
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")

        def table() -> nnx.Param:
            noise = jax.random.normal(rngs.params(), shape)
            return nnx.Param(noise * config.initializer_range, axes=axes)

        self.embed = table()
        self.layers = Block(config, rngs)
        self.norm = nnx.Param(jnp.ones(config.hidden_size), axes=("norm",))
        if not config.tie_word_embeddings:
            self.head = table()


def init_params(config: LlamaConfig, key: Array) -> Params:
    """Random parameters as a nested dict of float32 arrays. Jit it with shardings for a big one."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(params=key)), nnx.Param))


@functools.cache
def _abstract(config: LlamaConfig) -> Llama:
    return nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))


def param_shapes(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree of `ShapeDtypeStruct` of a model, without making it."""
    return shapes_of(_abstract(config), dtype)


def param_axes(config: LlamaConfig) -> Params:
    """The tree of logical axis names, a tuple for each parameter."""
    return axes_of(_abstract(config))


def shapes_of(module: nnx.Module, dtype: DTypeLike) -> Params:
    """The tree of `ShapeDtypeStruct` of an abstract module's parameters."""
    shapes = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def axes_of(module: nnx.Module) -> Params:
    """The tree of logical axis names that an abstract module's parameters have."""
    state = nnx.state(module, nnx.Param)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda v: v.get_metadata()["axes"], state, is_leaf=is_variable)
    return nnx.to_pure_dict(axes)


def num_params(config: LlamaConfig) -> int:
    """How many numbers the model has."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(param_shapes(config)))


def cast_params(params: Params, dtype: DTypeLike) -> Params:
    """The parameters in the compute dtype, for training, sampler and reference alike."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def unstack_layers(params: Params) -> Params:
    """The same parameters with a tuple of layers, for loops that must not slice weights."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    layer = lambda i: jax.tree.map(lambda x: x[i], params["layers"])  # noqa: E731
    return {**params, "layers": tuple(layer(i) for i in range(count))}


def head(params: Params) -> Array:
    """The output embedding `[V, D]`: the tied one where there is no other."""
    return params["head"] if "head" in params else params["embed"]


def forward(
    config: LlamaConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    *,
    segments: Array | None = None,
    prefix: Any = None,
    prefix_lengths: Array | int = 0,
    cache: Any = None,
    index: Array | int = 0,
    remat: str = "none",
    attention_impl: str = "xla",
) -> tuple[Array, Any]:
    """Final hidden states of `tokens`, and the keys and values of each layer.

    Without a cache the tokens attend causally to themselves; with one they are one position,
    `index`, whose keys are written into it. With a prefix they also attend to all of the prefix.
    Padding must be on the right, where causality hides it. Rows may be packed: with segments a
    token attends only to tokens of its own.

    Args:
      config: the model's shape.
      params: its parameters, in the compute dtype.
      tokens: `[P, G, T]` int32.
      positions: `[P, G, T]` int32, rotary positions.
      segments: `[P, T]` int32, of which example of a packed row each token is; for no cache.
      prefix: keys and values of a prompt as this function returned them for `[P, 1, L]` tokens.
      prefix_lengths: `[P]` int32, how much of the prefix exists.
      cache: keys and values of S positions, laid out as this function returns them.
      index: where the one token goes in the cache.
      remat: `none`, `full` (keep only each layer's input), `dots` (keep products too).
      attention_impl: see `attention`.

    Returns:
      `[P, G, T, D]` hidden states after the last norm, in the compute dtype, and `KeyValues` of
      `[N, P, G, T, K, d]`; with a cache, the cache as it is now; a tuple of N without the axis N
      when `params["layers"]` is a tuple.
    """
    block_def = nnx.graphdef(_abstract(config).layers)
    x = shard_batch(params["embed"][tokens])
    rope = rope_angles(config, positions)

    def layer(x: Array, inputs: tuple[Params, Any, Any]) -> tuple[Array, KeyValues]:
        weights, prompt_kv, own_cache = inputs
        block, part = nnx.merge(block_def, weights), None
        if prompt_kv is not None:
            exists = jnp.arange(prompt_kv.keys.shape[2]) < jnp.reshape(prefix_lengths, (-1, 1))
            part = Part(jax.tree.map(lambda a: a[:, 0], prompt_kv), exists[:, None, None])
        out, own = block.attend(
            x, rope, segments, part, own_cache, jnp.asarray(index), attention_impl
        )
        x = x + out
        return shard_batch(x + block.mlp(x)), own

    layers = params["layers"]
    unrolled = isinstance(layers, tuple)
    run = _remat(layer, remat, prevent_cse=unrolled)  # a scan keeps the recomputation apart itself
    if unrolled:
        caches = []
        for i, weights in enumerate(layers):
            x, own = run(x, (weights, prefix and prefix[i], cache and cache[i]))
            caches.append(own)
        kv: Any = tuple(caches)
    else:
        N = config.num_layers
        unroll = N if N <= 4 else 1  # a handful is faster without stacking what each layer keeps
        x, kv = jax.lax.scan(run, x, (layers, prefix, cache), unroll=unroll)
    return rms_norm(x, params["norm"], config.rms_norm_eps), kv


def _remat(layer: Any, policy: str, prevent_cse: bool) -> Any:
    """Wraps a layer so that its backward pass recomputes what the policy does not keep."""
    if policy == "none":
        return layer
    if policy not in ("full", "dots"):
        raise ValueError(f"remat {policy!r} is not one of: none, full, dots")
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None
    return jax.checkpoint(layer, policy=keep, prevent_cse=prevent_cse)


def empty_cache(
    config: LlamaConfig, P: int, G: int, S: int, dtype: DTypeLike
) -> tuple[KeyValues, ...]:
    """A cache of zeros for S positions of each completion, layer by layer."""
    shape = (P, G, S, config.num_kv_heads, config.head_dim)
    zeros = lambda: shard_batch(jnp.zeros(shape, dtype))  # noqa: E731
    return tuple(KeyValues(zeros(), zeros()) for _ in range(config.num_layers))


def _write(cache: Array, new: Array, index: Array) -> Array:
    """Puts `[P, G, 1, K, d]` at position `index` of a cache `[P, G, S, K, d]`."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new, index, axis=2)


def project(x: Array, weight: Array, axes: int = 1) -> Array:
    """Contracts the last `axes` of `[P, G, T, ...]` with the first of a weight.

    One plain matrix product of all tokens: with the leading axes kept apart, XLA's CPU backward
    pass of the same sum takes more than twice as long.
    """
    lead, inner = x.shape[: x.ndim - axes], math.prod(weight.shape[:axes])
    out = x.reshape(-1, inner) @ weight.reshape(inner, -1)
    return out.reshape(*lead, *weight.shape[axes:])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotary frequencies `[d / 2]` in radians per position, float32.

    θᵢ = base^(-2i/d) (Su et al. 2021, arXiv:2104.09864). `linear` divides all by the factor;
    `llama3` divides wavelengths longer than the original context over `low_freq_factor`, keeps
    those shorter than it over `high_freq_factor`, and blends in between (Llama 3.1,
    arXiv:2407.21783).
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    freqs = (1.0 / (np.float32(config.rope_theta) ** half)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return freqs
    if scaling.kind == "linear":
        return (freqs / np.float32(scaling.factor)).astype(np.float32)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * freqs / (2 * np.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * freqs / scaling.factor + blend * freqs).astype(np.float32)


def rope_angles(config: LlamaConfig, positions: Array) -> Array:
    """Cosines and sines `[2, P, G, T, 1, d / 2]` float32 of integer positions `[P, G, T]`."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: Array, rope: Array) -> Array:
    """Turns pairs (i, i + d/2) of heads `[P, G, T, H, d]` by their position's angle, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rope
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
