"""Losses of pairs: DPO and its variants for a policy, Bradley-Terry for a reward model.

A pair is a group of two, chosen before rejected: `[..., 2, C]` for tokens, `[..., 2]` for
completions, `[...]` for pairs.

    rewards = implicit_rewards(logps, reference_logps, mask, beta=0.1)
    loss = dpo_loss(rewards, "sigmoid", beta=0.1)
    metrics = pair_metrics(rewards)

A pair counts if both of its completions have a token that does (`pairs_that_count`).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_grpo.arrays import check_same_shape, divide, masked, sum_and_count

DPO_LOSSES = ("sigmoid", "hinge", "ipo")


def implicit_rewards(
    logps: ArrayLike,
    reference_logps: ArrayLike,
    mask: ArrayLike,
    beta: float,
    length_normalized: bool = False,
) -> Array:
    """The reward of which the policy would be the optimum: what DPO trains.

        r = β Σₜ (log π(yₜ) - log π_ref(yₜ)),  and that over |y| when normalised by length

    Rafailov et al., 2023, "Direct Preference Optimization", arXiv:2305.18290. The mean over tokens
    is Meng et al., 2024, "SimPO", arXiv:2405.14734, with a reference, and Lambert et al., 2024,
    "Tülu 3", arXiv:2411.15124; it wants a larger β (2 to 10 where the sum has 0.1).

    Args:
        logps: log-probs of the policy, [..., 2, C] nats, with gradient.
        reference_logps: log-probs of the reference, [..., 2, C] nats.
        mask: 1 where a token counts, [..., 2, C].
        beta: β.
        length_normalized: whether to divide by the number of tokens that count.

    Returns:
        Rewards, [..., 2] float32.

    Raises:
        ValueError: if the shapes differ.

    >>> logps, reference = jnp.array([[-1.0, -2.0], [-3.0, 0.0]]), jnp.full((2, 2), -2.0)
    >>> implicit_rewards(logps, reference, jnp.array([[1, 1], [1, 0]]), beta=0.5).tolist()
    [0.5, -0.5]
    """
    check_same_shape(logps=logps, reference_logps=reference_logps, mask=mask)
    log_ratio = masked(logps, mask) - masked(reference_logps, mask)
    total, count = sum_and_count(log_ratio, mask, axis=-1)
    return beta * (divide(total, count) if length_normalized else total)


def dpo_loss(
    rewards: ArrayLike,
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Array:
    """What a pair costs, from the margin of its implicit rewards, m = r_chosen - r_rejected.

        sigmoid:  -(1 - ε) log σ(m) - ε log σ(-m)
        hinge:    max(0, 1 - m)
        ipo:      (m / β - 1 / (2β))²

    Rafailov et al., 2023, arXiv:2305.18290, and Mitchell, 2023, "A note on DPO with noisy
    preferences" (conservative DPO), for ε; Zhao et al., 2023, "SLiC-HF", arXiv:2305.10425; Azar et
    al., 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences" (IPO),
    arXiv:2310.12036. The paper of IPO sums over tokens; for TRL's mean, give it rewards that are
    normalised by length.

    Args:
        rewards: implicit rewards, [..., 2].
        loss: which one.
        beta: β of the rewards, for `ipo`, which takes it out again.
        label_smoothing: ε, the share of pairs believed to be the wrong way round; `sigmoid` only.

    Returns:
        The loss per pair, [...] float32.

    Raises:
        ValueError: for rewards that are not in pairs, an unknown loss, or a combination that makes
            no sense.

    >>> rewards = jnp.array([[0.2, -0.3], [0.0, 0.0]])
    >>> dpo_loss(rewards, "hinge").tolist(), dpo_loss(rewards, "ipo", beta=0.5).tolist()
    ([0.5, 1.0], [0.0, 1.0])
    """
    check_dpo_loss(loss, beta, label_smoothing)
    chosen, rejected = _pair(rewards)
    margin = chosen - rejected
    if loss == "hinge":
        return jax.nn.relu(1.0 - margin)
    if loss == "ipo":
        return jnp.square(margin / beta - 0.5 / beta)
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


def check_dpo_loss(loss: str, beta: float, label_smoothing: float) -> None:
    """Refuses settings of `dpo_loss` that make no sense; it asks this itself.

    Raises:
        ValueError: with the reason.
    """
    if loss not in DPO_LOSSES:
        raise ValueError(f"loss {loss!r} is not one of: {', '.join(DPO_LOSSES)}")
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be positive")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be 0 to less than 0.5")
    if label_smoothing and loss != "sigmoid":
        raise ValueError(f"label_smoothing is for the loss sigmoid, not for {loss}")


def bradley_terry_loss(scores: ArrayLike, margin: ArrayLike = 0.0, centering: float = 0.0) -> Array:
    """What a pair costs a reward model.

        -log σ(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)²

    Bradley and Terry, 1952, "Rank Analysis of Incomplete Block Designs"; the margin from Touvron
    et al., 2023, "Llama 2", arXiv:2307.09288; the centring, since pairs say nothing about where 0
    is, from Eisenstein et al., 2023, "Helping or Herding?", arXiv:2312.09244.

    Args:
        scores: of the reward model, [..., 2], with gradient.
        margin: by how much the chosen one should be better, [...] or one for all.
        centering: c, 0 for none; 0.01 is usual.

    Returns:
        The loss per pair, [...] float32.

    Raises:
        ValueError: for scores that are not in pairs.

    >>> loss = bradley_terry_loss(jnp.array([1.0, 1.0]), centering=0.25)  # ln 2 + 1
    >>> print(f"{loss:.3f}")
    1.693
    """
    chosen, rejected = _pair(scores)
    margin = jnp.broadcast_to(jnp.asarray(margin, jnp.float32), chosen.shape)
    preference = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return preference + centering * jnp.square(chosen + rejected)


def pair_metrics(rewards: ArrayLike) -> dict[str, Array]:
    """What to watch, by TRL's names.

    Args:
        rewards: implicit rewards, or a reward model's scores, [..., 2].

    Returns:
        `rewards/chosen`, `rewards/rejected`, `rewards/margins`, and `rewards/accuracies`, 1 where
        the chosen one has more (a tie is wrong); each [...] float32.

    Raises:
        ValueError: for rewards that are not in pairs.

    >>> {k: v.tolist() for k, v in pair_metrics(jnp.array([[2.0, 0.5]])).items()}
    {'rewards/chosen': [2.0], 'rewards/rejected': [0.5], 'rewards/accuracies': [1.0], \
'rewards/margins': [1.5]}
    """
    chosen, rejected = _pair(rewards)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "rewards/margins": chosen - rejected,
    }


def pairs_that_count(mask: ArrayLike) -> Array:
    """The pairs of which neither completion is empty, to reduce what is above.

    Args:
        mask: 1 where a token counts, [..., 2, C].

    Returns:
        Whether a pair counts, [...] bool.

    >>> pairs_that_count(jnp.array([[[1, 1], [1, 0]], [[1, 1], [0, 0]]])).tolist()
    [True, False]
    """
    return jnp.all(jnp.any(jnp.asarray(mask, bool), axis=-1), axis=-1)


def _pair(x: ArrayLike) -> tuple[Array, Array]:
    """Chosen and rejected, float32."""
    if jnp.shape(x)[-1:] != (2,):
        raise ValueError(f"pairs are chosen and rejected, [..., 2], not {jnp.shape(x)}")
    x = jnp.asarray(x, jnp.float32)
    return x[..., 0], x[..., 1]
