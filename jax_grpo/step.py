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

from jax_grpo.scoring import Layout
from jax_grpo.types import Algorithm, Experience, Outputs, Params, PyTree, TrainState

GAP_MEAN = "sampling/sampling_logp_difference/mean"
GAP_MAX = "sampling/sampling_logp_difference/max"

Metrics = dict[str, Array]
Update = Callable[[TrainState, Layout, Experience], tuple[TrainState, Metrics]]
# (params, critic, layout) -> Outputs: what the models of a stage say, see `scoring.make_models`
Models = Callable[[Params, PyTree, Layout], Outputs]


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    critic: PyTree = (),
    critic_optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
    """The state before the first step of a stage."""
    state = TrainState(jnp.int32(0), params, optimizer.init(params), algorithm.state)
    if critic_optimizer is None:
        return state
    return state._replace(critic=critic, critic_opt_state=critic_optimizer.init(critic))


def make_update(
    models: Models,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    *,
    critic_optimizer: optax.GradientTransformation | None = None,
    micro_batches: int = 1,
) -> Update:
    """Builds the update of one algorithm, to be jitted with the state donated.

    Args:
      models: what the stage's models say of a layout, with gradient.
      optimizer: an Optax chain.
      algorithm: whose loss it is.
      critic_optimizer: another one, for the critic where there is one. The two models share no
        parameter, so the gradient of the one loss is each one's own.
      micro_batches: slices of P run one after the other; must divide P.

    Returns:
      `update(state, layout, experience) -> (state, metrics)`. When loss or gradient is not
      finite the state comes back as it was and `metrics["finite"]` is 0.
    """

    def losses(
        trained: tuple[Params, PyTree], totals: Metrics, layout: Layout, experience: Experience
    ) -> tuple[Array, tuple[Metrics, Array]]:
        outputs = models(*trained, layout)
        terms = algorithm.loss(outputs, experience)
        means = {name: term.sum / totals[name] for name, term in terms.items()}
        loss = jnp.float32(0)
        for name, term in terms.items():
            if not (isinstance(term.coefficient, int | float) and term.coefficient == 0):
                loss += jnp.asarray(term.coefficient, jnp.float32) * means[name]
        widest = jnp.float32(0)
        if algorithm.source == "policy" and outputs.logps is not None:
            gap = sampler_gap(outputs.logps, experience)
            means[GAP_MEAN], widest = jnp.sum(gap) / totals[GAP_MEAN], jnp.max(gap)
        return loss, ({"loss": loss, **means}, widest)

    def micro_step(
        carry: Any,
        micro: tuple[Layout, Experience],
        trained: tuple[Params, PyTree],
        totals: Metrics,
    ) -> tuple[Any, None]:
        value_and_grad = jax.value_and_grad(losses, has_aux=True)
        (_, (means, gap)), grads = value_and_grad(trained, totals, *micro)
        sums, widest = carry
        return (jax.tree.map(jnp.add, sums, (means, grads)), jnp.maximum(widest, gap)), None

    def update(
        state: TrainState, layout: Layout, experience: Experience
    ) -> tuple[TrainState, Metrics]:
        trained = (state.params, state.critic)
        totals = total_weights(algorithm, experience)
        names = {"loss": jnp.float32(0), **{name: jnp.float32(0) for name in totals}}
        start = ((names, jax.tree.map(jnp.zeros_like, trained)), jnp.float32(0))
        body = lambda carry, micro: micro_step(carry, micro, trained, totals)  # noqa: E731
        batch = (layout, experience)
        if micro_batches == 1:
            ((means, (grads, critic_grads)), gap), _ = body(start, batch)
        else:
            ((means, (grads, critic_grads)), gap), _ = jax.lax.scan(
                body, start, split(batch, micro_batches)
            )

        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = state._replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        if critic_optimizer is not None:
            critic_norm = optax.tree.norm(critic_grads)
            finite &= jnp.isfinite(critic_norm)
            means["critic/grad_norm"] = critic_norm
            updates, critic_opt_state = critic_optimizer.update(
                critic_grads, state.critic_opt_state, state.critic
            )
            critic = optax.apply_updates(state.critic, updates)
            new = new._replace(critic=critic, critic_opt_state=critic_opt_state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        if algorithm.source == "policy":
            means[GAP_MAX] = gap
        return new, means | {"grad_norm": norm, "finite": finite.astype(jnp.float32)}

    return update


def make_assessment(
    models: Models, algorithm: Algorithm
) -> Callable[[Params, Layout, Experience], dict[str, tuple[Array, Array]]]:
    """Builds the loss without its gradient: each term as its sum and weight, for held-out rows."""

    def assess(
        params: Params, layout: Layout, experience: Experience
    ) -> dict[str, tuple[Array, Array]]:
        terms = algorithm.loss(models(params, (), layout), experience)
        return {name: (term.sum, term.weight) for name, term in terms.items()}

    return assess


def total_weights(algorithm: Algorithm, experience: Experience) -> Metrics:
    """The weight of each term over all of `experience`, 1 where nothing counts.

    A weight may not depend on `Outputs`, so zeros stand for them and the sums are never computed.
    """
    zeros = jnp.zeros_like(experience.behavior_logps)
    if algorithm.trains == "reward_model":
        outputs = Outputs(scores=zeros[..., 0])
    else:
        entropy = zeros if algorithm.needs_entropy else None
        outputs = Outputs(zeros, entropy, zeros if algorithm.needs_critic else None)
    weights = {name: term.weight for name, term in algorithm.loss(outputs, experience).items()}
    if algorithm.source == "policy":
        weights[GAP_MEAN] = jnp.sum(experience.mask)
    return {name: jnp.where(weight > 0, weight, 1.0) for name, weight in weights.items()}


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
