"""From a config's sections to the objects of a run; what can be refused is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jax_grpo.commands import refusing_bad_input
from jax_grpo.commands.common import compute_dtype, configure, open_model
from jax_grpo.commands.inputs import build_verifiers, check_context, check_positive, load_prompts
from jax_grpo.commands.stage import build_stage
from jax_grpo.evaluate import pass_at_k
from jax_grpo.models.config import PRESETS
from jax_grpo.models.llama import init_params, param_axes, param_shapes
from jax_grpo.rewards.naming import import_object
from jax_grpo.sharding import batch_shards, make_mesh, param_shardings
from jax_grpo.stages import Evaluation, Model, Stage
from jax_grpo.types import Params

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
    return model, initial, build_stages(config, model), evaluation


def build_stages(config: Mapping[str, Any], model: Model) -> list[Stage]:
    """The stages that a config names, on a model."""
    stages: list[Stage] = []
    for number, name in enumerate(config["stages"]):
        given = {"name": name, "number": number, "seed": config["seed"], "model": model}
        stages.append(configure(build_stage, config[name], name, **given, earlier=stages))
    return stages


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
    num_generations: int = 1,
    pass_at: tuple[int, ...] = (),
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
      num_generations: completions that are sampled of each prompt, beside the greedy one.
      pass_at: each k, at most `num_generations`, of which pass@k is measured, too.
    """
    if num_prompts < 0:
        raise ValueError(f"num_prompts must not be negative, got {num_prompts}")
    for k in pass_at:
        pass_at_k(num_generations, 0, k)  # refuses what cannot be measured
    verifiers = build_verifiers(rewards)
    for measure, name in measures.items():
        if name not in verifiers.names:
            raise ValueError(
                f"measures.{measure} names the reward {name!r}, which is not one of: "
                f"{', '.join(verifiers.names)}"
            )
    check_positive(batch=batch, num_generations=num_generations)
    check_context(model, max_prompt_length, max_new_tokens)
    prompts = load_prompts(data, model, max_prompt_length, num_prompts)
    shards = batch_shards(model.mesh)
    batch = -(-min(batch, len(prompts.rows)) // shards) * shards
    return Evaluation(
        prompts,
        verifiers,
        measures,
        batch,
        max_prompt_length,
        max_new_tokens,
        num_generations,
        pass_at,
    )
