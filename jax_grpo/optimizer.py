"""The optimizer: global-norm clip, AdamW and a learning-rate schedule, all from Optax."""

from __future__ import annotations

from typing import Literal

import jax
import optax

from jax_grpo.types import Params, PyTree

Schedule = Literal["constant", "linear", "cosine"]


def make_optimizer(
    *,
    learning_rate: float,
    total_steps: int,
    schedule: Schedule = "constant",
    warmup_steps: int = 0,
    final_scale: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds AdamW with decoupled weight decay behind a clip by the global norm.

        mₜ = β₁mₜ₋₁ + (1-β₁)gₜ,  vₜ = β₂vₜ₋₁ + (1-β₂)gₜ²,  θₜ = θₜ₋₁ - ηₜ(m̂ₜ/(√v̂ₜ + ε) + λθₜ₋₁)

    Loshchilov and Hutter 2019, arXiv:1711.05101. Norms and biases are not decayed.

    Args:
      learning_rate: the largest η, reached at the end of the warm-up.
      total_steps: optimizer steps of the stage; the schedule ends there.
      schedule: how η goes on after the warm-up; "linear" and "cosine" fall to
          `final_scale * learning_rate`.
      warmup_steps: steps of linear warm-up from 0, as in TRL: the first step's η is then 0.
      final_scale: the last η as a fraction of `learning_rate`; not used by "constant".
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the root of the second moment.
      weight_decay: λ.
      max_grad_norm: gradients of a larger global norm are scaled down to it; 0 turns this off.

    Returns:
      The transformation, and η as a function of the steps already taken.

    Raises:
      ValueError: an argument is out of its range.
    """
    _check_range("learning_rate", learning_rate, 0.0)
    _check_range("final_scale", final_scale, 0.0)
    _check_range("b1", b1, 0.0, 1.0)
    _check_range("b2", b2, 0.0, 1.0)
    _check_range("eps", eps, 0.0)
    _check_range("weight_decay", weight_decay, 0.0)
    _check_range("max_grad_norm", max_grad_norm, 0.0)
    rate = make_schedule(
        learning_rate,
        total_steps,
        schedule=schedule,
        warmup_steps=warmup_steps,
        final_scale=final_scale,
    )
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    adamw = optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)
    return optax.chain(clip, adamw), rate


def make_schedule(
    learning_rate: float,
    total_steps: int,
    *,
    schedule: Schedule,
    warmup_steps: int,
    final_scale: float,
) -> optax.Schedule:
    """Returns the learning rate as a function of the steps already taken.

    Raises:
      ValueError: an unknown name, or a warm-up that does not end before the stage does.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps must be at least 0 and less than total_steps = {total_steps}, "
            f"got {warmup_steps}"
        )
    fall_steps = total_steps - warmup_steps
    match schedule:
        case "constant":
            main = optax.constant_schedule(learning_rate)
        case "linear":
            main = optax.linear_schedule(learning_rate, final_scale * learning_rate, fall_steps)
        case "cosine":
            main = optax.cosine_decay_schedule(learning_rate, fall_steps, alpha=final_scale)
        case _:
            raise ValueError(f"schedule must be constant, linear or cosine, got {schedule!r}")
    if not warmup_steps:
        return main
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, main], [warmup_steps])


def decay_mask(params: Params) -> PyTree:
    """Says which parameters weight decay touches: all but norms and biases.

    The name decides, since layers are stacked: a norm of all layers is a matrix `[N, D]`.

    Args:
      params: nested dicts of arrays; a norm's name ends in `norm`, a bias's in `_bias`.

    Returns:
      The same tree of bools.
    """

    def decays(path: tuple[jax.tree_util.DictKey, ...], _: jax.Array) -> bool:
        return not str(path[-1].key).endswith(("norm", "_bias"))

    return jax.tree_util.tree_map_with_path(decays, params)


def _check_range(name: str, value: float, low: float, below: float = float("inf")) -> None:
    """Raises ValueError unless `low <= value < below`; a NaN is in no range."""
    if not low <= value < below:
        raise ValueError(f"{name} must be at least {low:g} and less than {below:g}, got {value}")
