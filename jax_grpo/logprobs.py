"""The one way from final hidden states to token log-probs: sampler, reference, policy and SFT.

What the sampler and the trainer say about a token must agree, so both call `logits` here: float32
accumulation and output, temperature included. (bfloat16 logits alone were seen to move log-probs
by 0.8 nats.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


class TokenLogprobs(NamedTuple):
    """Of each token: its log-prob and, when asked, the entropy of the distribution it came from."""

    logps: Array  # [...] float32, nats
    entropy: Array | None  # [...] float32, nats


def logits(hidden: Array, head: Array, temperature: ArrayLike) -> Array:
    """Scores of every token, z = h Wᵀ / τ, in float32.

    Args:
      hidden: `[..., D]`, the compute dtype.
      head: `[V, D]`, the compute dtype.
      temperature: τ > 0.

    Returns:
      `[..., V]` float32.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])  # one plain product: faster in the backward pass
    scores = jnp.einsum("nd,vd->nv", flat, head, preferred_element_type=jnp.float32)
    scores = scores.reshape(*hidden.shape[:-1], -1)
    return scores / jnp.asarray(temperature, jnp.float32)


def log_softmax_at(scores: Array, tokens: Array) -> Array:
    """Log-prob of each token under its scores, log softmax(z)[token].

    Args:
      scores: `[..., V]` float32.
      tokens: `[...]` int32.

    Returns:
      `[...]` float32, nats.

    Example:
      >>> import jax.numpy as jnp
      >>> float(jnp.exp(log_softmax_at(jnp.log(jnp.array([0.25, 0.75])), jnp.array(1))))
      0.75
    """
    # A masked sum rather than a gather: it stays local where V is spread over devices.
    ids = jax.lax.broadcasted_iota(tokens.dtype, scores.shape, scores.ndim - 1)
    hit = ids == tokens[..., None]
    # With the largest taken off first, no digits are lost to large scores.
    scores = scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    picked = jnp.sum(jnp.where(hit, scores, 0.0), axis=-1)
    return picked - jnp.log(jnp.sum(jnp.exp(scores), axis=-1))


def entropy_of(scores: Array) -> Array:
    """Entropy of softmax(z), H = log Z - Σ softmax(z) z, in nats.

    Args:
      scores: `[..., V]` float32.

    Returns:
      `[...]` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(entropy_of(jnp.zeros(4))), 4)
      1.3863
    """
    weights = jax.nn.softmax(scores, axis=-1)
    return jax.nn.logsumexp(scores, axis=-1) - jnp.sum(weights * scores, axis=-1)


def token_logprobs(
    hidden: Array,
    head: Array,
    tokens: Array,
    temperature: ArrayLike,
    *,
    entropy: bool = False,
    chunk: int = 64,
) -> TokenLogprobs:
    """Log-probs of given tokens, without holding `[..., T, V]` at once.

    The position axis is cut into chunks that are scanned, and recomputed in the backward pass; the
    gradient of the head is summed over them in float32.

    Args:
      hidden: `[..., T, D]`: the state that predicts each token.
      head: `[V, D]`.
      tokens: `[..., T]` int32.
      temperature: τ > 0.
      entropy: also the entropy at each position (no gradient flows through it).
      chunk: positions at a time; 0 is all T.

    Returns:
      `TokenLogprobs` of `[..., T]` float32.
    """
    wide = head.astype(jnp.float32)  # so that what the chunks add up to it is float32, too

    @jax.checkpoint
    def one(hidden: Array, tokens: Array) -> tuple[Array, Array | None]:
        scores = logits(hidden, wide.astype(head.dtype), temperature)
        spread = entropy_of(jax.lax.stop_gradient(scores)) if entropy else None
        return log_softmax_at(scores, tokens), spread

    T = tokens.shape[-1]
    if not 0 < chunk < T:
        return TokenLogprobs(*one(hidden, tokens))
    count = -(-T // chunk)
    pad = count * chunk - T
    lead = [(0, 0)] * (tokens.ndim - 1)
    h = jnp.pad(hidden, [*lead, (0, pad), (0, 0)]).reshape(*tokens.shape[:-1], count, chunk, -1)
    t = jnp.pad(tokens, [*lead, (0, pad)]).reshape(*tokens.shape[:-1], count, chunk)
    axis = tokens.ndim - 1  # scan over the chunks; the leading axes stay spread as they are
    xs = (jnp.moveaxis(h, axis, 0), jnp.moveaxis(t, axis, 0))
    _, parts = jax.lax.scan(lambda _, x: (None, one(*x)), None, xs)
    join = lambda y: jnp.moveaxis(y, 0, axis).reshape(*tokens.shape[:-1], -1)[..., :T]  # noqa: E731
    return TokenLogprobs(*jax.tree.map(join, parts))
