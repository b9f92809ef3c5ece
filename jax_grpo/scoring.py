"""What the models say of given completions, by the training path: log-probs, values, scores.

How rows are laid out inside the model is this module's secret: `plan` lays them out on the host,
`score` and its kin take that layout and give `[P, G, C]` or `[P, G]`. No loss, reward or algorithm
sees a row. There are two layouts. Of groups: the prompt once, `[P, 1, L]`, and its completions
behind it, `[P, G, C]`, each attending to the prompt's keys and to itself. Of packed rows,
`[P, 1, C]`: several examples one after the other, each attending to itself alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_grpo.logprobs import token_logprobs
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.heads import scalars
from jax_grpo.models.llama import cast_params, forward, head
from jax_grpo.types import Outputs, Params, PyTree, Rollout


class Layout(NamedTuple):
    """How the rows of a slice of P are laid out; every array leads with P."""

    prompt_ids: Array  # [P, L] int32
    prompt_lengths: Array  # [P] int32
    completion_ids: Array  # [P, G, C] int32
    completion_lengths: Array  # [P, G] int32
    temperature: Array  # [P] float32
    segments: Array | None = None  # [P, C] int32, of packed rows, as in `Rollout`


def plan(rollout: Rollout) -> Layout:
    """Lays out the rows of a rollout, or of a slice of P of one."""
    prompts = rollout.prompts
    return Layout(
        prompts.token_ids,
        prompts.lengths,
        rollout.completion_ids,
        rollout.lengths,
        jnp.broadcast_to(rollout.temperature, prompts.lengths.shape),
        rollout.segments,
    )


def score(
    config: LlamaConfig,
    params: Params,
    layout: Layout,
    *,
    entropy: bool = False,
    chunk: int = 64,
    remat: str = "none",
    attention_impl: str = "xla",
) -> Outputs:
    """Log-probs of every completion token, and the entropy where it was drawn when asked.

    Args:
      config: the model's shape.
      params: in the compute dtype, layers stacked.
      layout: what `plan` gave.
      entropy: also the entropy at each position.
      chunk: completion positions whose logits exist at once; 0 is all.
      remat: see `forward`.
      attention_impl: see `attention`.

    Returns:
      `Outputs` of `[P, G, C]` float32; what stands at padding, and at the first token of a packed
      example, is finite and means nothing.
    """
    states = _states(config, params, layout, remat, attention_impl)[:, :, :-1]
    temperature = layout.temperature[:, None, None, None]
    return Outputs(
        *token_logprobs(
            states, head(params), layout.completion_ids, temperature, entropy=entropy, chunk=chunk
        )
    )


def values(
    config: LlamaConfig,
    params: Params,
    layout: Layout,
    *,
    remat: str = "none",
    attention_impl: str = "xla",
) -> Array:
    """What a critic says before each completion token, at the state that predicts it.

    Args:
      config: the critic's shape.
      params: with a scalar head (models/heads.py), in the compute dtype, layers stacked.
      layout: what `plan` gave.
      remat: see `forward`.
      attention_impl: see `attention`.

    Returns:
      `[P, G, C]` float32; what stands at padding is finite and means nothing.
    """
    states = _states(config, params, layout, remat, attention_impl)
    return scalars(states[:, :, :-1], params)


def reward_scores(
    config: LlamaConfig,
    params: Params,
    layout: Layout,
    *,
    remat: str = "none",
    attention_impl: str = "xla",
) -> Array:
    """What a reward model says after a completion's last token, its end token where it has one.

    An empty completion is scored after its prompt. Arguments are as of `values`.

    Returns:
      `[P, G]` float32.

    Raises:
      ValueError: for packed rows, which have a last token for each example.
    """
    if layout.segments is not None:
        raise ValueError("a reward model scores one completion a row: its rows cannot be packed")
    states = _states(config, params, layout, remat, attention_impl)
    last = layout.completion_lengths[..., None, None]
    return scalars(jnp.take_along_axis(states, last, axis=2)[:, :, 0], params)


def make_models(
    config: LlamaConfig,
    *,
    reward_model: bool = False,
    entropy: bool = False,
    critic: LlamaConfig | None = None,
    compute_dtype: DTypeLike = jnp.float32,
    chunk: int = 64,
    remat: str = "none",
    attention_impl: str = "xla",
) -> Callable[[Params, PyTree, Layout], Outputs]:
    """What the models that a stage trains say of a layout, for `make_update`.

    Args:
      config: the shape of the policy, or of the reward model that is trained in its place.
      reward_model: whether it is one.
      entropy: as of `score`; the last three, too.
      critic: the shape of the critic, where there is one.
      compute_dtype: of the forward and backward pass; parameters stay float32.
      chunk: of positions.
      remat: what the backward pass recomputes.
      attention_impl: of attention.

    Returns:
      A function of their float32 parameters (the critic's are `()` without one) and a layout.
    """
    how: Any = {"remat": remat, "attention_impl": attention_impl}

    def models(params: Params, critic_params: PyTree, layout: Layout) -> Outputs:
        params = cast_params(params, compute_dtype)
        if reward_model:
            return Outputs(scores=reward_scores(config, params, layout, **how))
        outputs = score(config, params, layout, entropy=entropy, chunk=chunk, **how)
        if critic is None:
            return outputs
        critic_params = cast_params(critic_params, compute_dtype)
        return outputs._replace(values=values(critic, critic_params, layout, **how))

    return models


def _states(
    config: LlamaConfig, params: Params, layout: Layout, remat: str, attention_impl: str
) -> Array:
    """Final hidden states `[P, G, C + 1, D]`: before each completion token, and after the last.

    The state before a token is its left neighbour's, before the first one that of the prompt's
    last token; before the first token of a packed row there is none, and zeros stand for it.
    """
    tokens, segments = layout.completion_ids, layout.segments
    C, L = tokens.shape[-1], layout.prompt_ids.shape[-1]
    run = functools.partial(forward, config, params, remat=remat, attention_impl=attention_impl)
    if segments is not None:
        completion, _ = run(tokens, _restarting(segments)[:, None], segments=segments)
        return jnp.concatenate([jnp.zeros_like(completion[:, :, :1]), completion], axis=2)
    lengths = layout.prompt_lengths[:, None, None]
    prompt_ids = layout.prompt_ids[:, None]
    prompt, prefix = run(prompt_ids, jnp.broadcast_to(jnp.arange(L), prompt_ids.shape))
    # All C positions are run, though the last predicts nothing that is scored: C is a round number,
    # C - 1 is not.
    completion, _ = run(
        tokens,
        jnp.broadcast_to(lengths + jnp.arange(C), tokens.shape),
        prefix=prefix,
        prefix_lengths=layout.prompt_lengths,
    )
    last = jnp.take_along_axis(prompt, lengths[..., None] - 1, axis=2)
    last = jnp.broadcast_to(last, completion[:, :, :1].shape)
    return jnp.concatenate([last, completion], axis=2)


def _restarting(segments: Array) -> Array:
    """Positions `[P, C]` int32 that start at 0 with each segment.

    >>> _restarting(jnp.array([[0, 0, 0, 1, 1, 2, -1, -1]])).tolist()
    [[0, 1, 2, 0, 1, 0, 0, 1]]
    """
    at = jnp.arange(segments.shape[1])
    starts = jnp.diff(segments, prepend=segments[:, :1]) != 0
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1)
