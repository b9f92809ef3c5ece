"""Sampling G completions per prompt: prefill once, fork G times, decode until all have ended.

One jitted function. The prompt's keys and values are computed once per prompt and shared by its
group; the decode loop's state is one record; temperature and length limit are traced, so that
changing them does not compile again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grpo.arrays import shard_batch
from jax_grpo.logprobs import log_softmax_at, logits
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import (
    cast_params,
    empty_cache,
    forward,
    head,
    param_axes,
    param_shapes,
    unstack_layers,
)
from jax_grpo.sampling import EVERYTHING, Truncation, draw, draw_keys
from jax_grpo.sharding import param_shardings
from jax_grpo.types import Params, PromptBatch, Rollout


class DecodeState(NamedTuple):
    """The decode loop's state before token `drawn` is drawn."""

    drawn: Array  # [] int32: tokens drawn so far
    ids: Array  # [P, G, C] int32
    behavior_logps: Array  # [P, G, C] float32
    kept_logmass: Array  # [P, G, C] float32
    lengths: Array  # [P, G] int32
    ended: Array  # [P, G] bool: an end token was drawn
    cache: Any  # N x KeyValues [P, G, C, K, d]


def make_sampling_copy(
    config: LlamaConfig, mesh: Mesh, dtype: DTypeLike
) -> Callable[[Params], Params]:
    """A jitted function from parameters to those that the sampler wants.

    They are cast, gathered over `fsdp` and spread over `tensor` alone, so that the decode loop
    moves no weights, and their layers are unstacked, so that it slices none.
    """
    shardings = param_shardings(param_axes(config), param_shapes(config), mesh, "sampling")
    per_layer = jax.tree.map(
        lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), shardings["layers"]
    )
    unstacked = {**shardings, "layers": (per_layer,) * config.num_layers}

    def copy(params: Params) -> Params:
        cast = cast_params(params, dtype)
        return unstack_layers(jax.lax.with_sharding_constraint(cast, shardings))

    return jax.jit(copy, out_shardings=unstacked)


def generate(
    config: LlamaConfig,
    params: Params,
    prompts: PromptBatch,
    key: Array,
    temperature: ArrayLike,
    max_new_tokens: ArrayLike,
    *,
    end_ids: tuple[int, ...],
    num_generations: int,
    max_completion_length: int,
    truncation: Truncation = EVERYTHING,
    greedy: bool = False,
    attention_impl: str = "xla",
) -> Rollout:
    """Samples `num_generations` completions of each prompt.

    Args:
      config: the model's shape.
      params: in the compute dtype; layers stacked or (faster here) a tuple, see `unstack_layers`.
      prompts: right-padded prompts `[P, L]`, each at least one token long.
      key: of this rollout; draws depend on it, the data row, the completion and the position.
      temperature: τ > 0, traced; ignored when greedy, where log-probs are at 1.
      max_new_tokens: traced limit on completion tokens, 1 to `max_completion_length`.
      end_ids: tokens that end a completion; they belong to it and to its mask.
      num_generations: G.
      max_completion_length: C, the size of the buffers.
      truncation: top-k, top-p, min-p.
      greedy: take the most likely token each time.
      attention_impl: see `attention`.

    Returns:
      A `Rollout` of `[P, G, C]`.
    """
    P, L = prompts.token_ids.shape
    G, C = num_generations, max_completion_length
    if not isinstance(params["layers"], tuple):
        params = unstack_layers(params)
    temperature = jnp.float32(1) if greedy else jnp.asarray(temperature, jnp.float32)
    limit = jnp.minimum(jnp.asarray(max_new_tokens, jnp.int32), C)
    keys, ends = draw_keys(key, prompts.rows, G), jnp.asarray(end_ids, jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(L), (P, 1, L))
    run = functools.partial(forward, config, params, attention_impl=attention_impl)
    hidden, prefix = run(prompts.token_ids[:, None], positions)
    last = jnp.take_along_axis(hidden, (prompts.lengths - 1)[:, None, None, None], axis=2)
    last = jnp.broadcast_to(last[:, :, 0], (P, G, hidden.shape[-1]))

    def take(state: DecodeState, hidden: Array) -> DecodeState:
        """Draws the token at `state.drawn` from the hidden states `[P, G, D]` before it."""
        scores = logits(hidden, head(params), temperature)
        tokens, kept = draw(keys, state.drawn, scores, truncation, greedy=greedy)
        live = ~state.ended
        put = lambda array, new: array.at[:, :, state.drawn].set(jnp.where(live, new, 0))  # noqa: E731
        return state._replace(
            drawn=state.drawn + 1,
            ids=put(state.ids, tokens),
            behavior_logps=put(state.behavior_logps, log_softmax_at(scores, tokens)),
            kept_logmass=put(state.kept_logmass, kept),
            lengths=state.lengths + live,
            ended=state.ended | jnp.isin(tokens, ends),
        )

    def step(state: DecodeState) -> DecodeState:
        """Runs the last token through the model and draws the next."""
        at = state.drawn - 1
        tokens = jax.lax.dynamic_slice_in_dim(state.ids, at, 1, axis=2)
        positions = jnp.broadcast_to(prompts.lengths[:, None, None] + at, (P, G, 1))
        hidden, cache = run(
            tokens,
            positions,
            prefix=prefix,
            prefix_lengths=prompts.lengths,
            cache=state.cache,
            index=at,
        )
        return take(state._replace(cache=cache), hidden[:, :, 0])

    floats = lambda: shard_batch(jnp.zeros((P, G, C), jnp.float32))  # noqa: E731
    start = DecodeState(
        drawn=jnp.int32(0),
        ids=shard_batch(jnp.zeros((P, G, C), jnp.int32)),
        behavior_logps=floats(),
        kept_logmass=floats(),
        lengths=shard_batch(jnp.zeros((P, G), jnp.int32)),
        ended=shard_batch(jnp.zeros((P, G), bool)),
        cache=empty_cache(config, P, G, C, hidden.dtype),
    )
    unfinished = lambda s: (s.drawn < limit) & ~jnp.all(s.ended)  # noqa: E731
    end = jax.lax.while_loop(unfinished, step, take(start, last))
    return Rollout(
        prompts=prompts,
        completion_ids=end.ids,
        lengths=end.lengths,
        mask=jnp.arange(C) < end.lengths[..., None],
        behavior_logps=end.behavior_logps,
        kept_logmass=end.kept_logmass,
        truncated=~end.ended,
        temperature=temperature,
    )
