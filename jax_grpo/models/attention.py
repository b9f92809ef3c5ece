"""Attention through one small function, with a choice of implementation.

Queries of a group attend to several *parts* of keys: the prompt's, kept once and shared by its
G completions, and the completion's own. One softmax runs over all parts together, so decoding
token by token, scoring whole completions and plain causal attention are the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

IMPLEMENTATIONS = ("xla",)
MASKED = -1e30  # finite: a row of padding attends evenly instead of giving NaN


class KeyValues(NamedTuple):
    """Keys and values: of one sequence per completion, or of one shared by the group."""

    keys: Array  # [P, S, K, d] shared, or [P, G, S, K, d]
    values: Array  # the same shape


class Part(NamedTuple):
    """Some keys and which queries see them."""

    kv: KeyValues
    visible: Array  # bool, broadcastable to [P, G, T, S]


def attention(queries: Array, parts: Sequence[Part], implementation: str = "xla") -> Array:
    """Grouped-query attention of `queries` over all `parts` in one softmax.

    softmax(q kᵀ / √d) v (Vaswani et al. 2017, arXiv:1706.03762), with H / K queries to a key
    (Ainslie et al. 2023, arXiv:2305.13245).

    Args:
      queries: `[P, G, T, H, d]`; query head h reads key head h // (H / K).
      parts: keys, values and visibility of each part.
      implementation: `xla`; kernels for TPU and GPU join here.

    Returns:
      `[P, G, T, H, d]` in the dtype of `queries`; scores and softmax are float32.

    Raises:
      ValueError: for an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"attention implementation {implementation!r} is not one of: {known}")
    P, G, T, H, d = queries.shape
    K = parts[0].kv.keys.shape[-2]
    q = queries.reshape(P, G, T, K, H // K, d)
    scores = jnp.concatenate([_scores(q, part) for part in parts], axis=-1) * d**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(queries.dtype)
    out, start = jnp.float32(0), 0
    for part in parts:
        stop = start + part.kv.keys.shape[-3]
        w, values = weights[..., start:stop], part.kv.values
        equation = "pkgrts,pskd->pgtkrd" if values.ndim == 4 else "pkgrts,pgskd->pgtkrd"
        out = out + jnp.einsum(equation, w, values, preferred_element_type=jnp.float32)
        start = stop
    return out.reshape(P, G, T, H, d).astype(queries.dtype)


def _scores(q: Array, part: Part) -> Array:
    """Products of queries `[P, G, T, K, r, d]` and a part's keys: `[P, K, G, r, T, S]` float32."""
    shared = part.kv.keys.ndim == 4
    equation = "pgtkrd,pskd->pkgrts" if shared else "pgtkrd,pgskd->pkgrts"
    scores = jnp.einsum(equation, q, part.kv.keys, preferred_element_type=jnp.float32)
    visible = part.visible[:, None, :, None]  # [P, 1, G, 1, T, S]
    return jnp.where(visible, scores, MASKED)
