"""Drawing one token: truncation, keys, and the draw itself.

Truncation decides which tokens can be drawn; it never changes what a token's log-prob is called.
`behavior_logps` are those of the full softmax, and the log of the mass that truncation kept is
returned beside them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens can be drawn: the conjunction of top-k, top-p and min-p.

    Attributes:
      top_k: the k most likely; 0 is all.
      top_p: the fewest most likely whose mass reaches p (Holtzman et al. 2020, arXiv:1904.09751).
      min_p: those at least min_p times as likely as the most likely (arXiv:2407.01082).
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what would keep no token or means nothing."""
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 (off) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}: it must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}: it must be in [0, 1]")

    def keeps(self, logps: Array) -> Array:
        """Which tokens can be drawn, `[..., V]` bool of log-probs `[..., V]`.

        The most likely token is always kept; ties with the last kept token are kept.

        Example:
          >>> import jax.numpy as jnp
          >>> logps = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
          >>> Truncation(top_p=0.7).keeps(logps).tolist()
          [True, True, False, False]
        """
        keep = jnp.ones(logps.shape, bool)
        if 0 < self.top_k < logps.shape[-1]:
            keep &= logps >= jax.lax.top_k(logps, self.top_k)[0][..., -1:]
        if self.min_p > 0.0:
            floor = jnp.max(logps, axis=-1, keepdims=True) + jnp.log(jnp.float32(self.min_p))
            keep &= logps >= floor
        if self.top_p < 1.0:
            ordered = jnp.flip(jnp.sort(logps, axis=-1), axis=-1)
            before = jnp.cumsum(jnp.exp(ordered), axis=-1) - jnp.exp(ordered)
            last = jnp.where(before < self.top_p, ordered, jnp.inf)  # the least likely that is in
            keep &= logps >= jnp.min(last, axis=-1, keepdims=True)
        return keep


EVERYTHING = Truncation()  # nothing is cut off


def purpose_key(seed: int, stage: int, purpose: int, step: Array | int) -> Array:
    """The key of one rollout, from which `draw_keys` derives that of every draw."""
    key = jax.random.key(seed)
    for part in (stage, purpose, step):
        key = jax.random.fold_in(key, part)
    return key


def draw_keys(key: Array, rows: Array, G: int) -> Array:
    """Keys of completions, from what they are and not from where they stand in a batch.

    Args:
      key: of the rollout, see `purpose_key`.
      rows: `[P]` int32, data rows.
      G: completions per prompt.

    Returns:
      `[P, G]` keys.
    """
    per_row = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
    return jax.vmap(lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(G)))(per_row)


def draw(
    keys: Array, position: Array, scores: Array, truncation: Truncation, *, greedy: bool = False
) -> tuple[Array, Array]:
    """Draws one token per row and says how much mass truncation kept.

    argmax(z + Gumbel noise) is a sample of softmax(z) (Maddison et al. 2014, arXiv:1411.0030).

    Args:
      keys: `[...]` keys of the completions.
      position: `[]` int32, the position in the completion: the last part of the key.
      scores: `[..., V]` float32 at the rollout's temperature.
      truncation: which tokens can be drawn.
      greedy: take the most likely, and ignore the keys.

    Returns:
      tokens `[...]` int32 and the log of the kept mass `[...]` float32 (0 without truncation).
    """
    if greedy:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32), jnp.zeros(scores.shape[:-1])
    lead, V = scores.shape[:-1], scores.shape[-1]
    kept = jnp.zeros(lead, jnp.float32)
    if truncation != EVERYTHING:
        logps = jax.nn.log_softmax(scores, axis=-1)
        keep = truncation.keeps(logps)
        kept = jnp.where(jnp.all(keep, axis=-1), 0.0, jax.nn.logsumexp(logps, axis=-1, where=keep))
        scores = jnp.where(keep, scores, -jnp.inf)
    noise = jax.vmap(lambda k: jax.random.gumbel(jax.random.fold_in(k, position), (V,)))
    gumbel = noise(keys.reshape(-1)).reshape(*lead, V)
    return jnp.argmax(scores + gumbel, axis=-1).astype(jnp.int32), kept
