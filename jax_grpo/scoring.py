"""Log-probs of given completions by the training path.

How rows are laid out inside the model is this module's secret: `plan` lays them out on the host,
`score` takes that layout and gives `[P, G, C]`. No loss, reward or algorithm sees a row. Today's
layout is the prompt once, `[P, 1, L]`, and its completions behind it, `[P, G, C]`, each attending
to the prompt's keys and to itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_grpo.logprobs import token_logprobs
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import forward, head
from jax_grpo.types import Outputs, Params, Rollout


class Layout(NamedTuple):
    """How the rows of a slice of P are laid out; every array leads with P."""

    prompt_ids: Array  # [P, L] int32
    prompt_lengths: Array  # [P] int32
    completion_ids: Array  # [P, G, C] int32
    temperature: Array  # [P] float32


def plan(rollout: Rollout) -> Layout:
    """Lays out the rows of a rollout, or of a slice of P of one."""
    prompts = rollout.prompts
    temperature = jnp.broadcast_to(rollout.temperature, prompts.lengths.shape)
    return Layout(prompts.token_ids, prompts.lengths, rollout.completion_ids, temperature)


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
      `Outputs` of `[P, G, C]` float32; what stands at padding is finite and means nothing.
    """
    P, L = layout.prompt_ids.shape
    C = layout.completion_ids.shape[-1]
    lengths = layout.prompt_lengths[:, None, None]
    prompt_positions = jnp.broadcast_to(jnp.arange(L), (P, 1, L))
    run = functools.partial(forward, config, params, remat=remat, attention_impl=attention_impl)
    prompt, prefix = run(layout.prompt_ids[:, None], prompt_positions)
    # All C positions are run, though the last predicts nothing that is scored: C is a round number,
    # C - 1 is not.
    completion, _ = run(
        layout.completion_ids,
        jnp.broadcast_to(lengths + jnp.arange(C), layout.completion_ids.shape),
        prefix=prefix,
        prefix_lengths=layout.prompt_lengths,
    )
    # A token is predicted from its left neighbour, the first one from the prompt's last token.
    last = jnp.take_along_axis(prompt, lengths[..., None] - 1, axis=2)
    last = jnp.broadcast_to(last, completion[:, :, :1].shape)
    hidden = jnp.concatenate([last, completion[:, :, :-1]], axis=2)
    temperature = layout.temperature[:, None, None, None]
    return Outputs(
        *token_logprobs(
            hidden, head(params), layout.completion_ids, temperature, entropy=entropy, chunk=chunk
        )
    )
