"""The records of a recipe, and the compiled functions of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_grpo import data
from jax_grpo.evaluate import Verifiers, evaluate
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params, param_axes, param_shapes
from jax_grpo.rollout import generate, make_sampling_copy
from jax_grpo.sampling import Truncation, purpose_key
from jax_grpo.scoring import Layout, plan, score
from jax_grpo.sharding import batch_sharding, param_shardings, replicated, state_shardings
from jax_grpo.step import init_state, make_update, split
from jax_grpo.types import (
    Algorithm,
    Experience,
    Params,
    PromptBatch,
    PyTree,
    Rewards,
    Rollout,
    Scores,
    TrainState,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINING, EVALUATION = 0, 1  # the purpose, as a part of sampling keys


Batch = tuple[Layout, Experience]


class Model(NamedTuple):
    """The model of a run, without its parameters."""

    config: LlamaConfig
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    mesh: Mesh
    compute_dtype: DTypeLike


class Sampling(NamedTuple):
    """How completions are drawn in a stage."""

    num_generations: int  # G
    max_new_tokens: int  # at most C
    temperature: Callable[[int], float]  # by step, on the host
    truncation: Truncation


class Evaluation(NamedTuple):
    """What is measured when a stage ends."""

    prompts: data.Prompts
    verifiers: Verifiers
    measures: Mapping[str, str]
    batch: int
    prompt_length: int
    max_new_tokens: int


class Stage(NamedTuple):
    """One section of a recipe, as objects."""

    name: str
    number: int  # its place in the recipe: a part of every key
    seed: int
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    data: data.Prompts | data.Demonstrations
    num_steps: int
    prompts_per_step: int  # P
    prompt_length: int  # L
    completion_length: int  # C
    sampling: Sampling | None
    verifiers: Verifiers | None
    passes: int
    minibatches: int
    micro_batches: int
    remat: str
    attention_impl: str
    logits_chunk: int
    max_skipped: int
    checkpoint_every: int
    keep_checkpoints: int
    log_every: int


class Functions(NamedTuple):
    """The compiled functions of a stage."""

    sampling_copy: Callable[[Params], Params]
    reference_copy: Callable[[Params], Params]
    generate: Callable[[Params, PromptBatch, Array, float, int], Rollout]
    score: Callable[[Params, Layout], Array]
    experience: Callable[[Rollout, Rewards, Scores, PyTree], tuple[Experience, PyTree]]
    update: Callable[[TrainState, Layout, Experience], tuple[TrainState, dict[str, Array]]]
    split: Callable[[Batch], list[Batch]]
    state: TrainState  # shapes and shardings


class Taken(NamedTuple):
    """A step that was dispatched."""

    state: TrainState
    metrics: dict[str, Any]  # device arrays among them
    batch: Batch
    extra: Mapping[str, list[Any]] = {}  # columns that rewards gave by `log_extra`


def abstract_params(model: Model) -> Params:
    """Shapes and training shardings of the float32 parameters."""
    shapes = param_shapes(model.config)
    shardings = param_shardings(param_axes(model.config), shapes, model.mesh, "training")
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def compile_stage(model: Model, stage: Stage) -> Functions:
    """Jits the functions of a stage for the model's mesh; nothing is compiled yet."""
    config, mesh, dtype = model.config, model.mesh, model.compute_dtype
    abstract = abstract_params(model)
    training = jax.tree.map(lambda x: x.sharding, abstract)
    shapes = jax.eval_shape(lambda p: init_state(p, stage.optimizer, stage.algorithm), abstract)
    shardings = state_shardings(shapes, abstract, training, mesh)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )

    def reference_copy(params: Params) -> Params:
        # A real copy: a cast to the same dtype would alias, and a donated update delete it.
        return jax.tree.map(jnp.copy, cast_params(params, dtype))

    def reference_logps(params: Params, layout: Layout) -> Array:
        return score(
            config,
            params,
            layout,
            chunk=stage.logits_chunk,
            remat=stage.remat,
            attention_impl=stage.attention_impl,
        ).logps

    def minibatches(batch: Batch) -> list[Batch]:
        parts = split(batch, stage.minibatches)
        part = lambda i: jax.tree.map(lambda x: x[i], parts)  # noqa: E731
        return [part(i) for i in range(stage.minibatches)]

    sampler: Any = None
    if stage.sampling is not None:
        sampler = jax.jit(
            functools.partial(
                generate,
                config,
                end_ids=model.end_ids,
                num_generations=stage.sampling.num_generations,
                max_completion_length=stage.completion_length,
                truncation=stage.sampling.truncation,
                attention_impl=stage.attention_impl,
            )
        )
    update = make_update(
        config,
        stage.optimizer,
        stage.algorithm,
        compute_dtype=dtype,
        micro_batches=stage.micro_batches,
        remat=stage.remat,
        logits_chunk=stage.logits_chunk,
        attention_impl=stage.attention_impl,
    )
    return Functions(
        sampling_copy=make_sampling_copy(config, mesh, dtype),
        reference_copy=jax.jit(reference_copy, out_shardings=training),
        generate=sampler,
        score=jax.jit(reference_logps),
        experience=jax.jit(stage.algorithm.experience),
        update=jax.jit(update, donate_argnums=0, out_shardings=(shardings, replicated(mesh))),
        split=jax.jit(minibatches),
        state=state,
    )


def abstract_calls(model: Model, stage: Stage) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every jitted function of a policy stage, with shapes and shardings for its arguments.

    What it takes to lower and compile the stage, or to check its shapes, on a mesh of devices that
    are not there: `function.lower(*arguments)` under `jax.set_mesh(model.mesh)`.
    """
    assert stage.sampling is not None and stage.verifiers is not None
    run, mesh = compile_stage(model, stage), model.mesh
    P, G, R = stage.prompts_per_step, stage.sampling.num_generations, len(stage.verifiers.names)

    def spread(tree: Any) -> Any:
        where = lambda x: batch_sharding(mesh) if x.ndim else replicated(mesh)  # noqa: E731
        struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))  # noqa: E731
        return jax.tree.map(struct, tree)

    params = run.state.params
    L = stage.prompt_length
    whole: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((P, L), (P,), (P,))]
    prompts = PromptBatch(*whole)
    key = spread(jax.eval_shape(lambda: jax.random.key(0)))
    scalars = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    drawing = (jax.eval_shape(run.sampling_copy, params), spread(prompts), key, *scalars)
    rollout = spread(jax.eval_shape(run.generate, *drawing))
    layout = spread(jax.eval_shape(plan, rollout))
    scoring = (jax.eval_shape(run.reference_copy, params), layout)
    values = jax.ShapeDtypeStruct((P, G, R), jnp.float32)
    rewards = Rewards(*spread((values, values.update(dtype=jnp.bool_))))
    reference = spread(jax.eval_shape(run.score, *scoring))
    scores = Scores(reference_logps=reference if stage.algorithm.needs_reference else None)
    judging = (rollout, rewards, scores, run.state.algorithm_state)
    experience = spread(jax.eval_shape(run.experience, *judging)[0])
    part = lambda x: x.update(shape=(x.shape[0] // stage.minibatches, *x.shape[1:]))  # noqa: E731
    return {
        "sampling_copy": (run.sampling_copy, (params,)),
        "generate": (run.generate, drawing),
        "score": (run.score, scoring),
        "experience": (run.experience, judging),
        "update": (run.update, (run.state, *jax.tree.map(part, (layout, experience)))),
    }


def compile_evaluation(
    model: Model, evaluation: Evaluation
) -> Callable[[Params, int], dict[str, float]]:
    """A function from float32 parameters and a seed to measures on held-out prompts."""
    sampling_copy = make_sampling_copy(model.config, model.mesh, model.compute_dtype)

    @functools.partial(jax.jit, static_argnums=3)
    def draw(params: Params, prompts: PromptBatch, key: Array, greedy: bool) -> Rollout:
        limit = evaluation.max_new_tokens
        return generate(
            model.config,
            params,
            prompts,
            key,
            1.0,
            limit,
            end_ids=model.end_ids,
            num_generations=1,
            max_completion_length=limit,
            greedy=greedy,
        )

    def measure(params: Params, seed: int) -> dict[str, float]:
        return evaluate(
            lambda *args: draw(*args, False),
            lambda *args: draw(*args, True),
            sampling_copy(params),
            purpose_key(seed, 0, EVALUATION, 0),
            evaluation.prompts,
            evaluation.verifiers,
            model.tokenizer,
            batch=evaluation.batch,
            prompt_length=evaluation.prompt_length,
            measures=evaluation.measures,
        )

    return measure
