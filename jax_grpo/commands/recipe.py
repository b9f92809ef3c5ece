"""From a config's sections to the objects of a run; what can be refused is refused here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_grpo import algorithms
from jax_grpo.commands import refusing_bad_input
from jax_grpo.commands.common import (
    check_types,
    compute_dtype,
    configure,
    open_model,
)
from jax_grpo.data import Demonstrations, Prompts, encode_demonstrations, encode_prompts
from jax_grpo.data import num_steps as steps_of_epochs
from jax_grpo.evaluate import Verifiers
from jax_grpo.models import hf
from jax_grpo.models.attention import IMPLEMENTATIONS
from jax_grpo.models.config import PRESETS
from jax_grpo.models.llama import init_params, param_axes, param_shapes
from jax_grpo.optimizer import make_optimizer
from jax_grpo.rewards.naming import import_object, resolve
from jax_grpo.rows import load_rows
from jax_grpo.sampling import Truncation
from jax_grpo.sharding import batch_shards, make_mesh, param_shardings
from jax_grpo.stages import Evaluation, Model, Sampling, Stage
from jax_grpo.types import Algorithm, Params

Built = tuple[Model, Any, list[Stage], Evaluation | None]


def build(config: Mapping[str, Any]) -> Built:
    """Makes all objects of a run: everything that can be refused is refused here.

    Returns:
      The model, a function that makes or loads its first parameters, the stages and evaluation.
    """
    mesh = configure(make_mesh, config.get("mesh", {}), "mesh", devices=None)
    with refusing_bad_input():
        dtype = compute_dtype(config.get("dtype") or "auto")
    seed = config["seed"]
    model, initial = configure(
        build_model, config["model"], "model", mesh=mesh, dtype=dtype, seed=seed
    )
    evaluation = None
    if config.get("evaluation"):
        evaluation = configure(build_evaluation, config["evaluation"], "evaluation", model=model)
    stages = [
        configure(build_stage, config[name], name, name=name, number=number, seed=seed, model=model)
        for number, name in enumerate(config["stages"])
    ]
    return model, initial, stages, evaluation


def build_model(
    path: str = "",
    preset: str = "",
    tokenizer: str = "",
    *,
    mesh: Mesh,
    dtype: Any,
    seed: int,
) -> tuple[Model, Any]:
    """A model from files, or a fresh one.

    Args:
      path: a Hugging Face directory or hub id, a GGUF file, or a workdir.
      preset: instead of a path, the shape of a model to initialise.
      tokenizer: for a preset, dotted path of a function that makes the tokenizer; the
        vocabulary is as large as its.
      mesh: where the model lives.
      dtype: compute dtype.
      seed: of the initialisation.
    """
    if bool(path) == bool(preset):
        raise ValueError("give one of path and preset")
    if path:
        opened = open_model(path, mesh)
        model = Model(opened.config, opened.tokenizer, opened.end_ids, mesh, dtype)
        return model, opened.read
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not one of: {', '.join(PRESETS)}")
    if not tokenizer:
        raise ValueError("a preset needs a tokenizer")
    made = import_object(tokenizer)()
    shape = dataclasses.replace(PRESETS[preset], vocab_size=len(made))
    shardings = param_shardings(param_axes(shape), param_shapes(shape), mesh, "training")

    def initial() -> Params:
        make = jax.jit(lambda key: init_params(shape, key), out_shardings=shardings)
        return make(jax.random.key(seed))

    return Model(shape, made, (made.eos_token_id,), mesh, dtype), initial


def build_verifiers(section: Mapping[str, Mapping[str, Any]]) -> Verifiers:
    """Reward functions from a section: for each name its settings.

    `function` is a short name, a dotted path or `file.py:name` (the section's name if left out),
    `weight` its weight in the total reward; the rest are keyword arguments of the function.
    """
    functions, weights = [], []
    for name, settings in section.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"rewards.{name} is {settings!r} and not a section of settings")
        rest = {k: v for k, v in settings.items() if v is not None}
        weights.append(rest.pop("weight", 1.0))
        if not isinstance(weights[-1], int | float):
            raise ValueError(f"rewards.{name}.weight is {weights[-1]!r} and not a number")
        reward = resolve(rest.pop("function", name), **rest)
        check_types(reward.func if isinstance(reward, functools.partial) else reward, rest)
        functions.append(reward)
    if not functions:
        raise ValueError("at least one reward is needed")
    return Verifiers(tuple(functions), tuple(section), tuple(weights))


def build_sampling(
    total_steps: int,
    completion_length: int,
    *,
    num_generations: int = 8,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
    final_temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampling:
    """How completions are drawn.

    Args:
      total_steps: of the stage.
      completion_length: C, the size of the buffers.
      num_generations: G.
      max_new_tokens: limit on completion tokens; 0 is C.
      temperature: at the first step.
      final_temperature: at the last step, if it changes on the way (linearly).
      top_k: see `Truncation`, as the two below.
      top_p: nucleus.
      min_p: relative to the most likely token.
    """
    final = temperature if final_temperature is None else final_temperature
    if not all(0 < t < math.inf for t in (temperature, final)):
        raise ValueError("temperatures must be more than 0")
    limit = max_new_tokens or completion_length
    if not 0 < limit <= completion_length:
        raise ValueError(f"max_new_tokens must be 1 to max_completion_length, {completion_length}")

    def schedule(step: int) -> float:  # on the host: a device array would make it wait
        return float(np.interp(step, [0, max(1, total_steps - 1)], [temperature, final]))

    return Sampling(num_generations, limit, schedule, Truncation(top_k, top_p, min_p))


def build_algorithm(
    section: Mapping[str, Any], path: str, reward_weights: tuple[float, ...] = ()
) -> Algorithm:
    """The algorithm that a section names, a constructor in algorithms.py, with its settings.

    Args:
      section: `name`, and the constructor's arguments.
      path: of the section, for messages.
      reward_weights: those of the stage's rewards, for an algorithm that takes some.
    """
    constructors = {
        n: f
        for n, f in vars(algorithms).items()
        if inspect.isfunction(f)
        and not n.startswith("_")
        and inspect.signature(f).return_annotation == "Algorithm"
    }
    settings = dict(section)
    name = settings.pop("name", None)
    if name not in constructors:
        raise ValueError(
            f"algorithm.name {name!r} is not one of: {', '.join(sorted(constructors))}"
        )
    parameters = inspect.signature(constructors[name]).parameters
    given = {"reward_weights": reward_weights} if "reward_weights" in parameters else {}
    return configure(constructors[name], settings, path, **given)


def load_data(
    section: Mapping[str, Any],
    model: Model,
    prompt_length: int,
    completion_length: int,
    limit: int = 0,
) -> tuple[Prompts, Demonstrations | None]:
    """Rows of a data section, encoded as prompts, and as demonstrations where they hold one."""
    given = {k: v for k, v in section.items() if v is not None}
    keys = ("chat", "system", "template")
    encoding: dict[str, Any] = {k: given.pop(k) for k in keys if k in given}
    check_types(encode_prompts, encoding)
    check_types(load_rows, given)
    if "source" in given:
        settings = {k: v for k, v in given.items() if k not in ("source", "path", "rename")}
        check_types(import_object(given["source"]), settings)
    columns = ("prompt", *given.pop("columns", ()))
    rows = load_rows(**given, columns=columns)[: limit or None]
    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        raise ValueError("some prompts are text and some are chats: a data set has one kind")
    if completion_length and "completion" in rows[0]:
        chat = encoding.get("chat") or not isinstance(rows[0]["prompt"], str)
        turn = hf.end_of_turn(model.tokenizer) if chat else None
        end_id = model.tokenizer.eos_token_id if turn is None else turn
        demonstrations = encode_demonstrations(
            rows, model.tokenizer, end_id, prompt_length, completion_length, **encoding
        )
        return Prompts([], [], [], 0), demonstrations
    return encode_prompts(rows, model.tokenizer, prompt_length, **encoding), None


def build_evaluation(
    *,
    model: Model,
    data: Mapping[str, Any],
    rewards: Mapping[str, Mapping[str, Any]],
    measures: Mapping[str, str],
    max_prompt_length: int,
    max_new_tokens: int,
    num_prompts: int = 0,
    batch: int = 64,
) -> Evaluation:
    """What is measured when a stage ends.

    Args:
      model: the model.
      data: held-out rows, as a stage's `data`.
      rewards: as a stage's.
      measures: by name, the reward that decides it: the share of completions above 0.
      max_prompt_length: L.
      max_new_tokens: limit on completion tokens.
      num_prompts: how many rows; 0 is all.
      batch: prompts at a time, rounded up to what the mesh divides.
    """
    if num_prompts < 0:
        raise ValueError(f"num_prompts must not be negative, got {num_prompts}")
    verifiers = build_verifiers(rewards)
    for measure, name in measures.items():
        if name not in verifiers.names:
            raise ValueError(
                f"measures.{measure} names the reward {name!r}, which is not one of: "
                f"{', '.join(verifiers.names)}"
            )
    _check_positive(batch=batch)
    _check_context(model, max_prompt_length, max_new_tokens)
    prompts, _ = load_data(data, model, max_prompt_length, 0, num_prompts)
    shards = batch_shards(model.mesh)
    batch = -(-min(batch, len(prompts.rows)) // shards) * shards
    return Evaluation(prompts, verifiers, measures, batch, max_prompt_length, max_new_tokens)


def build_stage(
    *,
    name: str,
    number: int,
    seed: int,
    model: Model,
    algorithm: Mapping[str, Any],
    data: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    prompts_per_step: int,
    max_prompt_length: int,
    max_completion_length: int,
    num_steps: int = 0,
    num_epochs: float = 0.0,
    sampling: Mapping[str, Any] | None = None,
    rewards: Mapping[str, Mapping[str, Any]] | None = None,
    passes: int = 1,
    minibatches: int = 1,
    micro_batches: int = 1,
    remat: str = "full",
    attention: str = "xla",
    logits_chunk: int = 64,
    max_skipped: int = 0,
    checkpoint_every: int = 100,
    keep_checkpoints: int = 2,
    log_every: int = 10,
) -> Stage:
    """One stage of a recipe.

    Args:
      name: of its section.
      number: its place in the recipe.
      seed: of the run.
      model: the model.
      algorithm: `name`, and the arguments of that constructor in algorithms.py.
      data: `path` or `source` of rows, and `chat`, `system`, `template`; see data.py.
      optimizer: arguments of `make_optimizer`, without `total_steps`.
      prompts_per_step: P, over all devices.
      max_prompt_length: L; a longer prompt is dropped.
      max_completion_length: C.
      num_steps: rollouts (or batches of demonstrations); or give `num_epochs`.
      num_epochs: passes over the data.
      sampling: arguments of `build_sampling`, for an algorithm that samples.
      rewards: for each reward its settings, see `build_verifiers`.
      passes: over one rollout.
      minibatches: optimizer steps in a pass, each on a slice of P.
      micro_batches: slices of a minibatch whose gradients are accumulated.
      remat: what the backward pass recomputes: `none`, `dots` or `full`.
      attention: its implementation: `xla`.
      logits_chunk: completion positions whose logits exist at once; 0 is all.
      max_skipped: updates that may be skipped because they are not finite.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: how many of the newest to keep.
      log_every: steps between lines, where there is no progress bar.
    """
    counts = {"passes": passes, "minibatches": minibatches, "micro_batches": micro_batches}
    counts |= {"checkpoint_every": checkpoint_every, "keep_checkpoints": keep_checkpoints}
    _check_positive(**counts, log_every=log_every)
    if min(logits_chunk, max_skipped) < 0:
        raise ValueError("logits_chunk and max_skipped must not be negative")
    verifiers = build_verifiers(rewards) if rewards else None
    weights = verifiers.weights if verifiers else ()
    made = build_algorithm(algorithm, f"{name}.algorithm", weights)
    if made.keep is not None:
        raise ValueError(
            f"algorithm {algorithm['name']} draws prompts again whose group has nothing to teach, "
            "which the trainer cannot do yet: set algorithm.dynamic_sampling to False"
        )
    _check_context(model, max_prompt_length, max_completion_length)
    _check_batch(model.mesh, prompts_per_step, minibatches, micro_batches)
    if remat not in ("none", "dots", "full"):
        raise ValueError(f"remat {remat!r} is not one of: none, dots, full")
    if attention not in IMPLEMENTATIONS:
        raise ValueError(f"attention {attention!r} is not one of: {', '.join(IMPLEMENTATIONS)}")
    prompts, demonstrations = load_data(
        data, model, max_prompt_length, max_completion_length if made.source == "dataset" else 0
    )
    rows = demonstrations or prompts
    if prompts_per_step > len(rows.rows):
        raise ValueError(
            f"prompts_per_step is {prompts_per_step}, but the data have {len(rows.rows)}"
        )
    if made.source == "dataset" and demonstrations is None:
        raise ValueError(f"algorithm {algorithm['name']} needs rows with a 'completion'")
    epochs_fit = 0 <= num_epochs < math.inf
    if num_steps < 0 or not epochs_fit or (num_steps > 0) == (num_epochs > 0):
        raise ValueError("give one of num_steps and num_epochs, more than 0")
    steps = num_steps or steps_of_epochs(len(rows.rows), prompts_per_step, num_epochs)
    total = steps * passes * minibatches
    if total >= 2**31:
        raise ValueError(f"{total} optimizer steps are too many: they are counted in 32 bits")
    transform, schedule = configure(
        make_optimizer, optimizer, f"{name}.optimizer", total_steps=total
    )
    draws = None
    if made.source == "dataset" and (rewards or sampling):
        raise ValueError(f"algorithm {algorithm['name']} takes neither rewards nor sampling")
    if made.source == "policy":
        if verifiers is None:
            raise ValueError("rewards are missing: at least one is needed")
        draws = configure(
            build_sampling,
            sampling or {},
            f"{name}.sampling",
            total_steps=steps,
            completion_length=max_completion_length,
        )
        if draws.num_generations < 2:
            raise ValueError("sampling.num_generations must be 2 or more: a group of 1 is constant")
    return Stage(
        name=name,
        number=number,
        seed=seed,
        algorithm=made,
        optimizer=transform,
        learning_rate=schedule,
        data=rows,
        num_steps=steps,
        prompts_per_step=prompts_per_step,
        prompt_length=max_prompt_length,
        completion_length=max_completion_length,
        sampling=draws,
        verifiers=verifiers,
        passes=passes,
        minibatches=minibatches,
        micro_batches=micro_batches,
        remat=remat,
        attention_impl=attention,
        logits_chunk=logits_chunk,
        max_skipped=max_skipped,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        log_every=log_every,
    )


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _check_context(model: Model, prompt: int, completion: int) -> None:
    _check_positive(max_prompt_length=prompt, max_completion_length=completion)
    context = model.config.max_position_embeddings
    if prompt + completion > context:
        raise ValueError(
            f"a prompt of {prompt} and a completion of {completion} tokens exceed the model's "
            f"context of {context}"
        )


def _check_batch(mesh: Mesh, prompts: int, minibatches: int, micro_batches: int) -> None:
    shards = batch_shards(mesh)
    if prompts < 1 or prompts % (shards * minibatches * micro_batches):
        raise ValueError(
            f"prompts_per_step is {prompts}: it must divide by data x fsdp ({shards}) x "
            f"minibatches ({minibatches}) x micro_batches ({micro_batches})"
        )
