"""The records of a recipe, and the compiled functions of its stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_grpo import data
from jax_grpo.arrays import shard_batch
from jax_grpo.evaluate import Verifiers, evaluate
from jax_grpo.models import heads
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params, param_axes, param_shapes
from jax_grpo.rollout import generate, make_sampling_copy
from jax_grpo.sampling import Truncation, purpose_key
from jax_grpo.scoring import Layout, make_models, plan, reward_scores, score, values
from jax_grpo.sharding import batch_sharding, param_shardings, replicated, state_shardings
from jax_grpo.step import init_state, make_assessment, make_update, split
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

TRAINING, EVALUATION, COLLECTION = 0, 1, 2  # the purpose, as a part of sampling keys


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


class RewardModel(NamedTuple):
    """A model that says what completions are worth: one more reward."""

    name: str
    weight: float
    config: LlamaConfig
    read: Callable[[Path], Params]  # from the run's workdir, float32


class Critic(NamedTuple):
    """PPO's critic: which model it begins as, and how it learns."""

    start: Literal["policy", "reward_model"]
    config: LlamaConfig
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule


class Collection(NamedTuple):
    """A data set that the policy writes and the verifiers choose from, see collect.py."""

    rounds: int
    num_prompts: int  # in each
    max_per_prompt: int  # completions, or pairs
    threshold: float  # what an accepted completion's total reward exceeds


class MovingReference(NamedTuple):
    """A reference that follows the policy: every so many steps, this share of the way."""

    every: int
    mix: float


class Evaluation(NamedTuple):
    """What is measured when a stage ends."""

    prompts: data.Prompts
    verifiers: Verifiers
    measures: Mapping[str, str]
    batch: int
    prompt_length: int
    max_new_tokens: int
    num_generations: int = 1  # sampled, of each prompt
    pass_at: tuple[int, ...] = ()  # each k of which pass@k is measured


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
    verifiers: Verifiers
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
    max_redraws: int = 0  # of groups that the algorithm does not keep, in a step
    reward_model: RewardModel | None = None
    critic: Critic | None = None
    collection: Collection | None = None
    moving_reference: MovingReference | None = None
    pack: int = 0  # tokens of a packed row; 0 is a row for each example
    heldout: data.Demonstrations | None = None


class Functions(NamedTuple):
    """The compiled functions of a stage."""

    # Parameters of policy and, where a critic begins as one, reward model, both float32
    begin: Callable[[Params, Params | None], TrainState]
    sampling_copy: Callable[[Params], Params]
    frozen_copy: Callable[[Params], Params]  # of a model that the stage does not train
    generate: Callable[[Params, PromptBatch, Array, float, int], Rollout]
    logps: Callable[[Params, Layout], Array]  # of the policy or its reference, [P, G, C]
    values: Callable[[Params, Layout], Array]  # of the critic, [P, G, C]
    reward_scores: Callable[[Params, Layout], Array]  # of the reward model, [P, G]
    experience: Callable[[Rollout, Rewards, Scores, PyTree], tuple[Experience, PyTree]]
    update: Callable[[TrainState, Layout, Experience], tuple[TrainState, dict[str, Array]]]
    assess: Callable[[Params, Layout, Experience], dict[str, tuple[Array, Array]]]
    choose: Callable[[Rollout, Rollout, Any], Rollout]  # P of 2 P groups
    move_reference: Callable[[TrainState], TrainState]
    split: Callable[[Batch], list[Batch]]
    state: TrainState  # shapes and shardings


class Taken(NamedTuple):
    """A step that was dispatched."""

    state: TrainState
    metrics: dict[str, Any]  # device arrays among them
    batch: Batch
    extra: Mapping[str, list[Any]] = {}  # columns that rewards gave by `log_extra`


def reward_columns(stage: Stage) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names and weights of the R columns of rewards: the verifiers', then the reward model's."""
    _, names, weights = stage.verifiers
    if stage.reward_model is None:
        return names, weights
    return (*names, stage.reward_model.name), (*weights, stage.reward_model.weight)


# --------------------------------------------------------------------------- shapes and shardings


def abstract_params(model: Model) -> Params:
    """Shapes and training shardings of the policy's float32 parameters."""
    return _spread(param_shapes(model.config), param_axes(model.config), model.mesh)


def abstract_scalar(config: LlamaConfig, mesh: Mesh) -> Params:
    """Those of a critic or a reward model."""
    return _spread(heads.scalar_shapes(config), heads.scalar_axes(config), mesh)


def _spread(shapes: Params, axes: PyTree, mesh: Mesh) -> Params:
    return _shaped(shapes, param_shardings(axes, shapes, mesh, "training"))


def _shaped(shapes: PyTree, shardings: PyTree) -> PyTree:
    """A tree of shapes, each with its sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)


def abstract_state(model: Model, stage: Stage) -> TrainState:
    """Shapes and shardings of all that an update changes."""
    policy = abstract_params(model)
    trained, critic_optimizer = policy, None
    critic: PyTree = ()
    if stage.algorithm.trains == "reward_model":
        trained = abstract_scalar(model.config, model.mesh)
    if stage.critic is not None:
        critic = abstract_scalar(stage.critic.config, model.mesh)
        critic_optimizer = stage.critic.optimizer

    def begin(params: Params, critic: PyTree) -> TrainState:
        state = init_state(params, stage.optimizer, stage.algorithm, critic, critic_optimizer)
        if stage.moving_reference is not None:
            state = state._replace(reference=cast_params(params, model.compute_dtype))
        return state

    shapes = jax.eval_shape(begin, trained, critic)
    where = state_shardings(shapes, trained, _shardings(trained), model.mesh)
    if stage.critic is not None:
        beside = (shapes.critic, shapes.critic_opt_state)
        spread = state_shardings(beside, critic, _shardings(critic), model.mesh)
        where = where._replace(critic=spread[0], critic_opt_state=spread[1])
    return _shaped(shapes, where)


# -------------------------------------------------------------------------- the compiled functions


def compile_stage(model: Model, stage: Stage) -> Functions:
    """Jits the functions of a stage for the model's mesh; nothing is compiled yet."""
    config, mesh, dtype = model.config, model.mesh, model.compute_dtype
    algorithm, critic, moving = stage.algorithm, stage.critic, stage.moving_reference
    state = abstract_state(model, stage)
    where = _shardings(state)
    how: Any = {"remat": stage.remat, "attention_impl": stage.attention_impl}

    def begin(params: Params, reward_model: Params | None) -> TrainState:
        trained = params
        second: PyTree = ()
        if algorithm.trains == "reward_model":
            trained = heads.from_policy(config, params, jax.random.key(stage.seed))
        if critic is not None:
            second = reward_model if reward_model else heads.from_policy(config, params)
        optimizer = critic.optimizer if critic else None
        state = init_state(trained, stage.optimizer, algorithm, second, optimizer)
        return state._replace(reference=frozen_copy(params)) if moving else state

    def frozen_copy(params: Params) -> Params:
        # A real copy: a cast to the same dtype would alias, and a donated update delete it.
        return jax.tree.map(jnp.copy, cast_params(params, dtype))

    def logps(params: Params, layout: Layout) -> Array | None:
        params = cast_params(params, dtype)
        return score(config, params, layout, chunk=stage.logits_chunk, **how).logps

    def critic_values(params: Params, layout: Layout) -> Array:
        assert critic is not None
        return values(critic.config, cast_params(params, dtype), layout, **how)

    def scores(params: Params, layout: Layout) -> Array:
        assert stage.reward_model is not None
        return reward_scores(stage.reward_model.config, params, layout, **how)

    def move_reference(state: TrainState) -> TrainState:
        assert moving is not None

        def mix(old: Array, new: Array) -> Array:  # in float32: bfloat16 would lose a small step
            wide = old.astype(jnp.float32)
            return (wide + moving.mix * (new - wide)).astype(old.dtype)

        return state._replace(reference=jax.tree.map(mix, state.reference, state.params))

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
    models = make_models(
        config,
        reward_model=algorithm.trains == "reward_model",
        entropy=algorithm.needs_entropy,
        critic=critic.config if critic else None,
        compute_dtype=dtype,
        chunk=stage.logits_chunk,
        **how,
    )
    update = make_update(
        models,
        stage.optimizer,
        algorithm,
        critic_optimizer=critic.optimizer if critic else None,
        micro_batches=stage.micro_batches,
    )
    # A reward model begins as a copy of the policy, which the next stage goes on with.
    given_up = () if algorithm.trains == "reward_model" else 0
    return Functions(
        begin=jax.jit(begin, donate_argnums=given_up, out_shardings=where),
        sampling_copy=make_sampling_copy(config, mesh, dtype),
        frozen_copy=jax.jit(frozen_copy),
        generate=sampler,
        logps=jax.jit(logps),
        values=jax.jit(critic_values),
        reward_scores=jax.jit(scores),
        experience=jax.jit(algorithm.experience),
        update=jax.jit(update, donate_argnums=0, out_shardings=(where, replicated(mesh))),
        assess=jax.jit(make_assessment(models, algorithm)),
        choose=jax.jit(choose_groups),
        move_reference=jax.jit(move_reference, donate_argnums=0, out_shardings=where),
        split=jax.jit(minibatches),
        state=state,
    )


def choose_groups(some: Rollout, more: Rollout, which: Array) -> Rollout:
    """P of the 2 P groups of two rollouts, `which` is `[P]` int, spread as they were."""

    def take(x: Array, y: Array) -> Array:
        return shard_batch(jnp.concatenate([x, y])[which]) if x.ndim else x

    return jax.tree.map(take, some, more)


class Call(NamedTuple):
    """A jitted function of a stage, what it is called with, and what is held at that time."""

    function: Any
    arguments: tuple[Any, ...]
    beside: PyTree  # models that it does not take


def abstract_calls(model: Model, stage: Stage) -> dict[str, Call]:
    """Every jitted function of a stage, with shapes and shardings for its arguments.

    What it takes to lower and compile the stage, or to check its shapes, on a mesh of devices that
    are not there: `call.function.lower(*call.arguments)` under `jax.set_mesh(model.mesh)`.
    """
    run, mesh, algorithm = compile_stage(model, stage), model.mesh, stage.algorithm
    state, P, G = run.state, stage.prompts_per_step, algorithm.group

    def spread(tree: Any) -> Any:
        where = lambda x: batch_sharding(mesh) if x.ndim else replicated(mesh)  # noqa: E731
        struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))  # noqa: E731
        return jax.tree.map(struct, tree)

    def frozen(params: Params) -> Params:
        return _shaped(jax.eval_shape(run.frozen_copy, params), _shardings(params))

    reference, reward_model = None, None
    if algorithm.needs_reference and algorithm.source == "policy":
        reference = frozen(state.params) if stage.moving_reference is None else state.reference
    if stage.reward_model is not None:
        reward_model = frozen(abstract_scalar(stage.reward_model.config, mesh))
    kept = None if stage.moving_reference else reference  # a moving one is a part of the state
    calls: dict[str, Call] = {}
    if stage.sampling is not None:
        G = stage.sampling.num_generations
        L = stage.prompt_length
        whole: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((P, L), (P,), (P,))]
        prompts = PromptBatch(*whole)
        key = spread(jax.eval_shape(lambda: jax.random.key(0)))
        scalars = (jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
        copied = jax.eval_shape(run.sampling_copy, state.params)
        drawing = (copied, spread(prompts), key, *scalars)
        others = (state._replace(params={}), kept, reward_model)
        calls["sampling_copy"] = Call(run.sampling_copy, (state.params,), others)
        calls["generate"] = Call(run.generate, drawing, (state, kept, reward_model))
    if algorithm.source == "policy":
        rollout = spread(jax.eval_shape(run.generate, *calls["generate"].arguments))
    else:
        rollout = spread(_given_shapes(stage))
    layout = spread(jax.eval_shape(plan, rollout))
    per_token = jax.ShapeDtypeStruct(rollout.mask.shape, jnp.float32)
    if reference is not None:
        beside = (state if kept else state._replace(reference=()), reward_model)
        calls["score"] = Call(run.logps, (reference, layout), beside)
    if stage.critic is not None:
        others = (state._replace(critic=()), kept, reward_model)
        calls["values"] = Call(run.values, (state.critic, layout), others)
    if reward_model is not None:
        calls["reward_scores"] = Call(run.reward_scores, (reward_model, layout), (state, kept))
    columns = len(reward_columns(stage)[0]) if algorithm.source == "policy" else int(G == 2)
    given = jax.ShapeDtypeStruct((*rollout.lengths.shape, columns), jnp.float32)
    rewards = Rewards(*spread((given, given.update(dtype=jnp.bool_))))
    asked = (algorithm.needs_reference, algorithm.needs_proximal, algorithm.needs_critic)
    scores = Scores(*(spread(per_token) if needed else None for needed in asked))
    judging = (rollout, rewards, scores, state.algorithm_state)
    calls["experience"] = Call(run.experience, judging, (state, kept, reward_model))
    experience = spread(jax.eval_shape(run.experience, *judging)[0])
    part = lambda x: x.update(shape=(x.shape[0] // stage.minibatches, *x.shape[1:]))  # noqa: E731
    learning = (state, *jax.tree.map(part, (layout, experience)))
    calls["update"] = Call(run.update, learning, (kept, reward_model))
    return calls


def _given_shapes(stage: Stage) -> Rollout:
    """Shapes of a rollout that the data set gives."""
    P, G = stage.prompts_per_step, stage.algorithm.group
    L, C = (0, stage.pack) if stage.pack else (stage.prompt_length, stage.completion_length)
    ints, floats, bools = np.int32(0), np.float32(0), np.bool_(0)
    shape = lambda x, *axes: np.broadcast_to(x, axes)  # noqa: E731
    made: Any = {
        "completion_ids": shape(ints, P, G, C),
        "lengths": shape(ints, P, G),
        "mask": shape(bools, P, G, C),
        "behavior_logps": shape(floats, P, G, C),
        "kept_logmass": shape(floats, P, G, C),
        "truncated": shape(bools, P, G),
        "temperature": floats,
        "segments": shape(ints, P, C) if stage.pack else None,
    }
    prompts: Any = (shape(ints, P, L), shape(ints, P), shape(ints, P))
    return Rollout(prompts=PromptBatch(*prompts), **made)


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
            num_generations=1 if greedy else evaluation.num_generations,
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
            pass_at=evaluation.pass_at,
        )

    return measure
