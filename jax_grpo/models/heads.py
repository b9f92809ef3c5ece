"""A Llama that gives a number at each position in place of logits: critic and reward model.

Its parameters are the policy's with `score`, `[D]`, in place of `head`, so `forward` of llama.py
runs its trunk. A critic says before each token what is to come, a reward model after the last one
what the whole was worth; see `values` and `reward_scores` of scoring.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import Llama, axes_of, shapes_of
from jax_grpo.types import Params


class ScalarLlama(nnx.Module):
    """A Llama's trunk and a scalar head: definition and names of their parameters."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        """Creates every parameter in float32."""
        trunk = Llama(dataclasses.replace(config, tie_word_embeddings=True), rngs)  # without head
        self.embed, self.layers, self.norm = trunk.embed, trunk.layers, trunk.norm
        self.score = nnx.Param(jnp.zeros(config.hidden_size), axes=("norm",))


@functools.cache
def _abstract(config: LlamaConfig) -> ScalarLlama:
    return nnx.eval_shape(lambda: ScalarLlama(config, nnx.Rngs(0)))


def scalar_shapes(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree of `ShapeDtypeStruct` of a model with a scalar head, as `param_shapes`."""
    return shapes_of(_abstract(config), dtype)


def scalar_axes(config: LlamaConfig) -> Params:
    """The tree of logical axis names, a tuple for each parameter, as `param_axes`."""
    return axes_of(_abstract(config))


def from_policy(config: LlamaConfig, params: Params, key: Array | None = None) -> Params:
    """A policy's trunk with a fresh head.

    Without a key the head is 0, for a critic: so are its first values. With one it is normal with
    deviation 1 / √(D + 1), for a reward model: Stiennon et al. 2020, "Learning to summarize from
    human feedback", arXiv:2009.01325; Huang et al. 2024, "The N+ Implementation Details of RLHF
    with PPO", arXiv:2403.17031. The last norm leaves each number of a state near 1, so that first
    scores are, too.

    Args:
      config: the model's shape.
      params: the policy's, float32; the trunk is not copied.
      key: of the head's numbers.

    Returns:
      The tree of `scalar_shapes`.
    """
    D = config.hidden_size
    score = jnp.zeros(D) if key is None else jax.random.normal(key, (D,)) * (D + 1) ** -0.5
    return {**{name: params[name] for name in ("embed", "layers", "norm")}, "score": score}


def scalars(hidden: Array, params: Params) -> Array:
    """The number at each position, hᵀ w, of final hidden states `[..., D]`: `[...]` float32.

    >>> scalars(jnp.array([[1.0, 2.0]]), {"score": jnp.array([0.5, -1.0])}).tolist()
    [-1.5]
    """
    return jnp.einsum("...d,d->...", hidden, params["score"], preferred_element_type=jnp.float32)
