"""One jitted optimizer step: gradients over micro-batches, Optax update, and a finite check.

Every term of the loss is a pair `(sum, weight)`. The weights of the whole step are added up first
(they depend on the experience alone), and each micro-batch then divides its sums by them, so
accumulation, data parallelism and padding leave the gradient unchanged up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params
from jax_grpo.scoring import Layout, score
from jax_grpo.types import Algorithm, Experience, Outputs, Params, TrainState

GAP_MEAN = "sampling/sampling_logp_difference/mean"
GAP_MAX = "sampling/sampling_logp_difference/max"

Metrics = dict[str, Array]
Update = Callable[[TrainState, Layout, Experience], tuple[TrainState, Metrics]]


def init_state(
    params: Params, optimizer: optax.GradientTransformation, algorithm: Algorithm
) -> TrainState:
    """The state before the first step of a stage."""
    return TrainState(jnp.int32(0), params, optimizer.init(params), algorithm.state)


def make_update(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    micro_batches: int = 1,
    remat: str = "none",
    logits_chunk: int = 64,
    attention_impl: str = "xla",
) -> Update:
    """Builds the update of one algorithm, to be jitted with the state donated.

    Args:
      config: the model's shape.
      optimizer: an Optax chain.
      algorithm: whose loss it is.
      compute_dtype: of the forward and backward pass; parameters stay float32.
      micro_batches: slices of P run one after the other; must divide P.
      remat: see `forward`.
      logits_chunk: completion positions whose logits exist at once; 0 is all.
      attention_impl: see `attention`.

    Returns:
      `update(state, layout, experience) -> (state, metrics)`. When loss or gradient is not
      finite the state comes back as it was and `metrics["finite"]` is 0.
    """

    def losses(
        params: Params, totals: Metrics, layout: Layout, experience: Experience
    ) -> tuple[Array, tuple[Metrics, Array]]:
        outputs = score(
            config,
            cast_params(params, compute_dtype),
            layout,
            entropy=algorithm.needs_entropy,
            chunk=logits_chunk,
            remat=remat,
            attention_impl=attention_impl,
        )
        terms = algorithm.loss(outputs, experience)
        means = {name: term.sum / totals[name] for name, term in terms.items()}
        loss = jnp.float32(0)
        for name, term in terms.items():
            if not (isinstance(term.coefficient, int | float) and term.coefficient == 0):
                loss += jnp.asarray(term.coefficient, jnp.float32) * means[name]
        gap = sampler_gap(outputs.logps, experience)
        means[GAP_MEAN] = jnp.sum(gap) / totals[GAP_MEAN]
        return loss, ({"loss": loss, **means}, jnp.max(gap))

    def micro_step(
        carry: Any, micro: tuple[Layout, Experience], params: Params, totals: Metrics
    ) -> tuple[Any, None]:
        value_and_grad = jax.value_and_grad(losses, has_aux=True)
        (_, (means, gap)), grads = value_and_grad(params, totals, *micro)
        sums, widest = carry
        return (jax.tree.map(jnp.add, sums, (means, grads)), jnp.maximum(widest, gap)), None

    def update(
        state: TrainState, layout: Layout, experience: Experience
    ) -> tuple[TrainState, Metrics]:
        totals = total_weights(algorithm, experience)
        names = {"loss": jnp.float32(0), **{name: jnp.float32(0) for name in totals}}
        start = ((names, jax.tree.map(jnp.zeros_like, state.params)), jnp.float32(0))
        body = lambda carry, micro: micro_step(carry, micro, state.params, totals)  # noqa: E731
        batch = (layout, experience)
        if micro_batches == 1:
            ((means, grads), gap), _ = body(start, batch)
        else:
            ((means, grads), gap), _ = jax.lax.scan(body, start, split(batch, micro_batches))

        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, state.algorithm_state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        means |= {GAP_MAX: gap, "grad_norm": norm, "finite": finite.astype(jnp.float32)}
        return new, means

    return update


def total_weights(algorithm: Algorithm, experience: Experience) -> Metrics:
    """The weight of each term over all of `experience`, at least 1.

    A weight may not depend on `Outputs`, so zeros stand for them and the sums are never computed.
    """
    zeros = jnp.zeros_like(experience.behavior_logps)
    entropy = zeros if algorithm.needs_entropy else None
    values = zeros if algorithm.needs_critic else None
    terms = algorithm.loss(Outputs(zeros, entropy, values), experience)
    weights = {name: term.weight for name, term in terms.items()}
    weights[GAP_MEAN] = jnp.sum(experience.mask)
    return {name: jnp.maximum(weight, 1.0) for name, weight in weights.items()}


def sampler_gap(logps: Array, experience: Experience) -> Array:
    """|behavior_logps - policy_logps| of the tokens that count, 0 elsewhere: `[P, G, C]` nats."""
    gap = jnp.abs(jax.lax.stop_gradient(logps) - experience.behavior_logps)
    return jnp.where(experience.mask > 0, gap, 0.0)


def split(batch: Any, count: int) -> Any:
    """Cuts P into `count` slices on a new leading axis, row p into slice p mod count.

    Strided, so that each device's rows are cut alike and nothing moves between devices.

    Raises:
      ValueError: when `count` does not divide P.
    """

    def one(x: Array) -> Array:
        if x.shape[0] % count:
            raise ValueError(f"{count} slices do not divide {x.shape[0]} prompts")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(one, batch)
