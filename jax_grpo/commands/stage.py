"""One stage of a recipe: from its section of a config to an object, or to one line of why not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from jax_grpo import algorithms, packing
from jax_grpo import data as rows_to_tokens
from jax_grpo.commands.common import configure, open_reward_model, read_reward_model
from jax_grpo.commands.inputs import (
    build_verifiers,
    check_context,
    check_positive,
    load_demonstrations,
    load_prompts,
)
from jax_grpo.evaluate import Verifiers
from jax_grpo.models.attention import IMPLEMENTATIONS
from jax_grpo.optimizer import make_optimizer
from jax_grpo.sampling import Truncation
from jax_grpo.sharding import batch_shards
from jax_grpo.stages import (
    Collection,
    Critic,
    Model,
    MovingReference,
    RewardModel,
    Sampling,
    Stage,
    abstract_scalar,
)
from jax_grpo.types import Algorithm, Params


def build_stage(
    *,
    name: str,
    number: int,
    seed: int,
    model: Model,
    earlier: Sequence[Stage],
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
    reward_model: Mapping[str, Any] | None = None,
    critic: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
    collect: Mapping[str, Any] | None = None,
    heldout: Mapping[str, Any] | None = None,
    pack: int = 0,
    max_redraws: int = 9,
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
      earlier: the stages before it.
      algorithm: `name`, and the arguments of that constructor in algorithms.py.
      data: `path` or `source` of rows, and `chat`, `system`, `template`; see data.py.
      optimizer: arguments of `make_optimizer`, without `total_steps`.
      prompts_per_step: P, over all devices; of packed rows where rows are packed.
      max_prompt_length: L; a longer prompt is dropped.
      max_completion_length: C.
      num_steps: rollouts (or batches of demonstrations); or give `num_epochs`.
      num_epochs: passes over the data.
      sampling: arguments of `build_sampling`, for an algorithm that samples, or to collect.
      rewards: for each reward its settings, see `build_verifiers`.
      reward_model: arguments of `build_reward_model`: one more reward.
      critic: arguments of `build_critic`, for an algorithm that has one.
      reference: arguments of `MovingReference`: `every` how many steps it moves and by what `mix`,
        the share of the way to the policy (TRL's `ref_model_sync_steps`, `ref_model_mixup_alpha`).
      collect: arguments of `build_collection`: the policy writes the data itself.
      heldout: rows as `data`, on which a loss of given completions is measured at the end.
      pack: tokens of a row that holds several demonstrations; 0 is a row for each.
      max_redraws: how often a step draws again what its algorithm does not keep; what is left then
        is taken as it is (verl's `max_num_gen_batches` less 1).
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
    check_positive(**counts, log_every=log_every)
    if min(logits_chunk, max_skipped, max_redraws, pack) < 0:
        raise ValueError("logits_chunk, max_skipped, max_redraws and pack must not be negative")
    if remat not in ("none", "dots", "full"):
        raise ValueError(f"remat {remat!r} is not one of: none, dots, full")
    if attention not in IMPLEMENTATIONS:
        raise ValueError(f"attention {attention!r} is not one of: {', '.join(IMPLEMENTATIONS)}")
    check_context(model, max_prompt_length, max_completion_length)
    check_batch(model.mesh, prompts_per_step, minibatches, micro_batches)

    verifiers = build_verifiers(rewards) if rewards else Verifiers((), (), ())
    scorer = None
    if reward_model is not None:
        where = f"{name}.reward_model"
        scorer = configure(build_reward_model, reward_model, where, model=model, earlier=earlier)
    weights = (*verifiers.weights, *([scorer.weight] if scorer else []))
    made = build_algorithm(algorithm, f"{name}.algorithm", weights)
    sections = {"sampling": sampling, "rewards": rewards or None, "reward_model": reward_model}
    sections |= {"critic": critic, "reference": reference, "collect": collect}
    _check_sections(made, algorithm, {**sections, "heldout": heldout, "pack": pack or None})

    samples = made.source == "policy" or collect is not None
    lengths = (max_prompt_length, max_completion_length)
    rows: rows_to_tokens.Prompts | rows_to_tokens.Demonstrations
    if samples:
        rows = load_prompts(data, model, max_prompt_length)
        taken = len(rows.rows)
    else:
        rows = load_demonstrations(data, model, *lengths, made.group)
        taken = len(packing.pack(rows, pack).rows if pack else rows.rows)
    if pack and collect is not None and pack < sum(lengths):
        raise ValueError(
            f"pack is {pack}, but a row that is collected may have {sum(lengths)} tokens, "
            "max_prompt_length + max_completion_length"
        )
    if prompts_per_step > taken and collect is None:
        what = "packed rows" if pack else "rows"
        raise ValueError(
            f"prompts_per_step is {prompts_per_step}, but the data have {taken} {what}"
        )
    steps = _num_steps(num_steps, num_epochs, taken, prompts_per_step, collect is not None)
    total = steps * passes * minibatches
    if total >= 2**31:
        raise ValueError(f"{total} optimizer steps are too many: they are counted in 32 bits")
    where = f"{name}.optimizer"
    transform, schedule = configure(make_optimizer, optimizer, where, total_steps=total)

    def section(build: Any, settings: Mapping[str, Any] | None, key: str, **given: Any) -> Any:
        """What a section of the stage makes, None without it."""
        return None if settings is None else configure(build, settings, f"{name}.{key}", **given)

    draws = None
    if samples:
        sizes = {"total_steps": steps, "completion_length": max_completion_length}
        draws = section(build_sampling, sampling or {}, "sampling", **sizes)
        if collect is not None and sampling and "final_temperature" in sampling:
            raise ValueError("final_temperature is for rollouts, not for collect, which has one")
        if draws.num_generations < made.group:
            raise ValueError(
                f"sampling.num_generations is {draws.num_generations}, but algorithm "
                f"{algorithm['name']} compares completions of one prompt, and a group of 1 is "
                f"constant: it must be {made.group} or more"
            )
    settings = None
    if made.needs_critic:
        settings = dict(critic or {})
        own = settings.get("optimizer") or {}
        if not isinstance(own, Mapping):
            raise ValueError(f"critic.optimizer is {own!r} and not a section")
        settings["optimizer"] = {**optimizer, **own}
    given = {"model": model, "scorer": scorer, "total": total, "name": name}
    second = section(build_critic, settings, "critic", **given)
    collection = section(build_collection, collect, "collect", rows=taken, steps=steps)
    held = None
    if heldout is not None:
        held = load_demonstrations(heldout, model, *lengths, made.group)
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
        max_redraws=max_redraws,
        reward_model=scorer,
        critic=second,
        collection=collection,
        moving_reference=section(build_moving_reference, reference, "reference"),
        pack=pack,
        heldout=held,
    )


def _check_sections(
    algorithm: Algorithm, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Refuses sections that say nothing to an algorithm, and the lack of those that it needs."""
    label = f"algorithm {settings['name']}"

    def refuse(names: Sequence[str], why: str) -> None:
        for name in names:
            if given[name] is not None:
                raise ValueError(f"{name} is given, but {why}")

    scored = given["rewards"] is not None or given["reward_model"] is not None
    if algorithm.source == "policy":
        offline = "; RFT's offline form is algorithm sft" if settings["name"] == "rft" else ""
        own = f"{label} samples its completions itself{offline}"
        refuse(("collect", "heldout", "pack"), own)
        if not scored:
            raise ValueError("rewards are missing: at least one is needed, or a reward_model")
    else:
        refuse(("reward_model",), f"{label} does not sample")
        if given["collect"] is None:
            why = f"{label} takes completions of the data set (unless it has a section collect)"
            refuse(("sampling", "rewards"), why)
        elif given["rewards"] is None:
            raise ValueError("rewards are missing: collect needs at least one, to choose by")
    if not algorithm.needs_critic:
        refuse(("critic",), f"{label} has none")
    if not algorithm.needs_reference:
        refuse(("reference",), f"{label} has none: its kl_weight is 0, or it has no KL at all")
    if algorithm.source == "dataset":
        refuse(("reference",), f"{label} scores its data by the reference once")
    if algorithm.needs_reference:
        refuse(("heldout",), f"{label} needs a reference's log-probs, which are kept for data only")
    if given["pack"] is not None:
        if algorithm.group > 1:
            raise ValueError(f"pack is given, but {label} compares two completions of a prompt")
        if settings.get("reduction", "token_mean") != "token_mean":
            raise ValueError(
                "packed rows hold several demonstrations each, so that a mean over rows means "
                "nothing: use reduction 'token_mean', or pack 0"
            )


def _num_steps(steps: int, epochs: float, rows: int, per_step: int, collects: bool) -> int:
    """Steps of a stage, from one of steps and epochs."""
    fit = 0 <= epochs < math.inf
    if steps < 0 or not fit or (steps > 0) == (epochs > 0):
        raise ValueError("give one of num_steps and num_epochs, more than 0")
    if collects and not steps:
        raise ValueError("give num_steps: how many rows are collected is not known before")
    return steps or rows_to_tokens.num_steps(rows, per_step, epochs)


def build_reward_model(
    *,
    model: Model,
    earlier: Sequence[Stage],
    stage: str = "",
    path: str = "",
    weight: float = 1.0,
    name: str = "reward_model",
) -> RewardModel:
    """A reward model: one more reward of a stage, beside its verifiers or alone.

    Args:
      model: the policy, whose tokens it must read.
      earlier: the stages before.
      stage: one of them that trained it.
      path: or a Hugging Face directory or hub id of a sequence classifier with one label, or the
        workdir of a run whose last reward model it is.
      weight: in the total reward; 0 to watch it alone.
      name: by which metrics go.
    """
    if bool(stage) == bool(path):
        raise ValueError("give one of stage and path")
    if path:
        opened = open_reward_model(path, model.mesh)
        if opened.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise ValueError(f"{path} reads other tokens than the policy: their tokenizers differ")
        return RewardModel(name, weight, opened.config, lambda workdir: opened.read())
    trained = [each.name for each in earlier if each.algorithm.trains == "reward_model"]
    if stage not in trained:
        known = ", ".join(trained) or "none"
        raise ValueError(
            f"no earlier stage {stage!r} trains a reward model; those that do: {known}"
        )
    config, shapes = model.config, abstract_scalar(model.config, model.mesh)

    def read(workdir: Path) -> Params:
        return read_reward_model(workdir / "checkpoints" / stage, shapes)

    return RewardModel(name, weight, config, read)


def build_critic(
    *,
    model: Model,
    scorer: RewardModel | None,
    total: int,
    name: str,
    optimizer: Mapping[str, Any],
    start: Literal["auto", "policy", "reward_model"] = "auto",
) -> Critic:
    """PPO's critic.

    Args:
      model: the policy.
      scorer: the reward model of the stage, if it has one.
      total: optimizer steps of the stage.
      name: of the stage.
      optimizer: what differs from the stage's own, such as `learning_rate`.
      start: the model that it begins as, `reward_model` with its head or the `policy` with a fresh
        one; `auto` is the reward model where there is one, as in InstructGPT.
    """
    if start not in ("auto", "policy", "reward_model"):
        raise ValueError(f"start {start!r} is not one of: auto, policy, reward_model")
    if start == "reward_model" and scorer is None:
        raise ValueError("start is 'reward_model', but the stage has none")
    made = configure(make_optimizer, optimizer, f"{name}.critic.optimizer", total_steps=total)
    if start == "policy" or scorer is None:
        return Critic("policy", model.config, *made)
    return Critic("reward_model", scorer.config, *made)


def build_collection(
    *,
    rows: int,
    steps: int,
    rounds: int = 1,
    num_prompts: int = 0,
    max_per_prompt: int = 4,
    threshold: float = 0.0,
) -> Collection:
    """How a stage collects its data.

    Args:
      rows: prompts of the data.
      steps: of the stage.
      rounds: how often it collects, each time from the policy as it is then.
      num_prompts: in each round; 0 is all.
      max_per_prompt: completions (or pairs) kept of a prompt.
      threshold: a completion is accepted whose total reward is more.
    """
    check_positive(rounds=rounds, max_per_prompt=max_per_prompt)
    if steps % rounds:
        raise ValueError(f"rounds is {rounds}, which does not divide num_steps, {steps}")
    if not 0 <= num_prompts <= rows:
        raise ValueError(f"num_prompts is {num_prompts}: it must be 0 to {rows}, the rows")
    return Collection(rounds, num_prompts or rows, max_per_prompt, threshold)


def build_moving_reference(*, every: int, mix: float = 1.0) -> MovingReference:
    """A reference that follows the policy.

    Args:
      every: how many steps it moves.
      mix: the share of the way, more than 0 and at most 1 (TRL's default is 0.6).
    """
    check_positive(every=every)
    if not 0 < mix <= 1:
        raise ValueError(f"mix is {mix}: it must be more than 0 and at most 1")
    return MovingReference(every, mix)


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


def check_batch(mesh: Mesh, prompts: int, minibatches: int, micro_batches: int) -> None:
    """Refuses a P that the mesh and the slices of a step do not divide."""
    shards = batch_shards(mesh)
    if prompts < 1 or prompts % (shards * minibatches * micro_batches):
        raise ValueError(
            f"prompts_per_step is {prompts}: it must divide by data x fsdp ({shards}) x "
            f"minibatches ({minibatches}) x micro_batches ({micro_batches})"
        )
