"""Runs the study: every method from one base model, as a table, a file and a picture.

    python -m jax_grpo compare --config=configs/study_NAME.py --workdir=DIR [--config.a.b=value]
    python -m jax_grpo compare --config=configs/study_NAME.py --topology=v5e:4x4

The config is that of a recipe with a section `study` in the place of `stages`: the base's stages
are run once, each method's for each seed from there. The same command again goes on where the study
was. What came out is in WORKDIR/study.md, study.csv and study.png, each run in a directory of its
own beside them.

With `--topology` nothing is run: the methods' last stages are compiled for TPUs that need not be
there, and the table says what memory they need.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jax.experimental import topologies
from ml_collections import ConfigDict

from jax_grpo import arithmetic, study
from jax_grpo.commands import BadInput, refusing_bad_input, train
from jax_grpo.commands.common import compute_dtype, configure
from jax_grpo.commands.recipe import Built, build, build_stages
from jax_grpo.memory import QUICK, measure, peak
from jax_grpo.models.config import PRESETS
from jax_grpo.sharding import make_mesh
from jax_grpo.stages import Model, Stage, abstract_calls
from jax_grpo.train import write_json


class Plan(NamedTuple):
    """The section `study`."""

    base: tuple[str, ...]
    methods: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    measure: str
    curves: tuple[str, ...]
    preset: str


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command."""
    train.define_flags(values, line)
    flags.DEFINE_string(
        "topology", None, "Only the memory, on TPUs such as v5e:4x4.", flag_values=values
    )


def run(values: flags.FlagValues) -> int:
    """Compares; returns the exit code."""
    with refusing_bad_input():
        config = train.given_config(values)
        plan = configure(read_plan, config.get("study", ConfigDict()).to_dict(), "study")
        if values.topology is not None:
            print(study.memory_table(memory_on(values.topology, config, plan)))
            return 0
        recipes = {name: recipe(config, stages) for name, stages in plan.methods.items()}
        base = [recipe(config, plan.base)] if plan.base else []
        evaluation = config.get("evaluation", ConfigDict())
        if plan.measure not in evaluation.get("measures", ()):
            raise ValueError(f"config.evaluation.measures has no {plan.measure!r} to compare by")
        if values.workdir is None:
            raise ValueError("--workdir=DIR is missing: a study takes long, and goes on there")
        workdir = train.local_directory(values.workdir)
        study.check_plotting()
    # All is built before anything runs, on the model that the base begins as: of the same shape.
    for own in base:
        build(own)
    built = {name: build(own) for name, own in recipes.items()}
    for name, (_, _, stages, _) in built.items():
        if stages[-1].algorithm.trains != "policy":
            raise BadInput(f"config.study.methods.{name} ends with a stage that trains no policy")
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        # What one seed compiles, the next one reads.
        jax.config.update("jax_compilation_cache_dir", str(workdir / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return train.reporting("compare", workdir, lambda: compare(config, plan, built, workdir))


def read_plan(
    *,
    methods: Mapping[str, tuple[str, ...]],
    base: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0,),
    measure: str = "accuracy",
    curves: tuple[str, ...] = (),
    preset: str = "",
) -> Plan:
    """The section `study` of a config.

    Args:
      methods: for each its stages, by the names of their sections.
      base: the stages that make the base model; none where `model` is it.
      seeds: of the methods' runs; the base has the config's.
      measure: the one of the evaluation's measures that is compared.
      curves: metrics to draw over the steps of each method's last stage.
      preset: the shape of the model for `--topology`, which downloads nothing.
    """
    if not methods or not seeds:
        raise ValueError("at least one of methods, and one of seeds, is needed")
    return Plan(base, methods, seeds, measure, curves, preset)


def recipe(
    config: ConfigDict, stages: tuple[str, ...], seed: int | None = None, path: str = ""
) -> dict[str, Any]:
    """The recipe of a run of the study, as `train` would read it.

    Args:
      config: of the study.
      stages: of the run.
      seed: of the run, where it is not the config's.
      path: of the model that it begins with, where it is not the config's.
    """
    own = config.copy_and_resolve_references()
    del own["study"]
    own.stages = stages
    if seed is not None:
        own.seed = seed
    if path:
        own.model = {"path": path}
    return train.read_config(own)


# -------------------------------------------------------------------------------------- the runs


def compare(config: ConfigDict, plan: Plan, built: Mapping[str, Built], workdir: Path) -> str:
    """Runs what is not finished yet and writes down what came out; returns it as text."""
    facts = _facts(built, workdir / "facts.json")
    path, before = "", None
    if plan.base:
        path = str(workdir / "base")
        summary = train.run_recipe(recipe(config, plan.base), workdir / "base")
        last = summary["stages"][plan.base[-1]]
        before = {name: last[name] for name in summary["before"]}
    summaries = {}
    for seed in plan.seeds:
        for method, stages in plan.methods.items():
            own, directory = recipe(config, stages, seed, path), workdir / f"{method}-{seed}"
            summaries[method, seed] = summary = train.run_recipe(own, directory, before)
            before = summary["before"]  # of one base, measured once
    runs = [
        _read_run(method, seed, plan, summary, workdir, facts["memory"][method])
        for (method, seed), summary in summaries.items()
    ]
    return write(workdir, runs, plan.measure, facts["prompts"])


def _read_run(
    method: str,
    seed: int,
    plan: Plan,
    summary: Mapping[str, Any],
    workdir: Path,
    memory: Mapping[str, Any],
) -> study.Run:
    """A finished run as the study wants it."""
    stages = [summary["stages"][name] for name in plan.methods[method]]
    last = plan.methods[method][-1]
    return study.Run(
        method=method,
        seed=seed,
        before=summary["before"],
        after={name: stages[-1][name] for name in summary["before"]},
        seconds=sum(stage["seconds"] for stage in stages),
        sampled_tokens=sum(stage["sampled_tokens"] for stage in stages),
        optimizer_tokens=sum(stage["optimizer_tokens"] for stage in stages),
        memory=memory,
        curves=read_curves(workdir / f"{method}-{seed}" / "metrics.jsonl", last, plan.curves),
    )


def write(workdir: Path, runs: Sequence[study.Run], measure: str, prompts: int) -> str:
    """Writes the study's files, methods from the worst to the best; returns the first's text."""
    worth = {
        method: np.mean([run.after[measure] for run in some])
        for method, some in study.by_method(runs).items()
    }
    runs = sorted(runs, key=lambda run: worth[run.method])
    memories = {run.method: run.memory for run in runs}
    text = f"{study.table(runs, measure, prompts)}\n\n{study.memory_table(memories)}\n"
    if jax.process_index() == 0:
        (workdir / "study.md").write_text(text, encoding="utf-8")
        study.write_csv(workdir / "study.csv", runs)
        study.draw(workdir / "study.png", runs, measure, prompts)
    return f"{text}\nfiles: {workdir}"


def read_curves(file: Path, stage: str, metrics: Sequence[str]) -> dict[str, dict[int, float]]:
    """What a run's `metrics.jsonl` says of some metrics in a stage, by step."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    own = [line for line in lines if line["stage"] == stage]
    found = {
        metric: {line["step"]: line[metric] for line in own if line.get(metric) is not None}
        for metric in metrics
    }
    return {metric: curve for metric, curve in found.items() if curve}


# ------------------------------------------------------------------------------------ the memory


def _facts(built: Mapping[str, Built], file: Path) -> dict[str, Any]:
    """What is the same for all seeds: how many held-out prompts, and each method's memory."""
    facts = json.loads(file.read_text()) if file.exists() else {"memory": {}}
    known: dict[str, Any] = {}
    for method, (model, _, stages, evaluation) in built.items():
        assert evaluation is not None
        facts["prompts"] = len(evaluation.prompts.rows)
        if method not in facts["memory"]:
            quick = QUICK if jax.default_backend() == "cpu" else None
            facts["memory"][method] = memory_of(method, model, stages[-1], known, quick)
    if jax.process_index() == 0:
        write_json(file, facts)
    return facts


def memory_of(
    method: str,
    model: Model,
    stage: Stage,
    known: dict[str, Any],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The memory of a method's stage at its peak, as the study wants it."""
    print(f"asking the compiler what memory {method} needs", file=sys.stderr)
    with jax.set_mesh(model.mesh):
        during, memory = peak(measure(abstract_calls(model, stage), options, known))
    return {"during": during, **memory._asdict()}


def memory_on(topology: str, config: ConfigDict, plan: Plan) -> dict[str, dict[str, Any]]:
    """The memory of each method's last stage on TPUs that need not be there.

    Neither the model is loaded nor the data, since shapes do not depend on what they say.

    Raises:
      ValueError: without libtpu, or for a topology or a preset that is not known.
    """
    if plan.preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ValueError(
            f"--topology needs the shape of the model: config.study.preset is {plan.preset!r}, "
            f"which is not one of: {known}"
        )
    devices = tpu_devices(topology)
    memories: dict[str, dict[str, Any]] = {}
    asked: dict[str, Any] = {}
    for method, stages in plan.methods.items():
        own = recipe(without_data(config), stages)
        mesh = configure(make_mesh, own.get("mesh", {}), "mesh", devices=devices)
        dtype = compute_dtype(own.get("dtype") or "bfloat16")
        tokenizer = arithmetic.tokenizer()
        model = Model(PRESETS[plan.preset], tokenizer, (tokenizer.eos_token_id,), mesh, dtype)
        memories[method] = memory_of(method, model, build_stages(own, model)[-1], asked)
    return memories


def tpu_devices(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology, as the compiler alone knows them.

    Raises:
      ValueError: without libtpu, or for a topology that it does not know.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("--topology needs the TPU compiler: pip install 'jax_grpo[tpu]'")
    jax.config.update("jax_platforms", "cpu")  # a TPU that is there is not touched
    settings = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for name, value in {**settings, "TPU_WORKER_HOSTNAMES": "localhost"}.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # whatever libtpu raises
        raise ValueError(f"--topology={topology}: {error}") from error


def without_data(config: ConfigDict) -> ConfigDict:
    """The same study, with rows that stand in for those of its stages."""
    config = config.copy_and_resolve_references()
    for section in config.values():
        if isinstance(section, ConfigDict) and "algorithm" in section:
            packed = section.prompts_per_step * max(1, section.get("pack", 0))
            count = max(packed, section.get("collect", {}).get("num_prompts", 0))
            for key in {"data", "heldout"} & set(section):
                section[key] = {"source": f"{__name__}.stand_in", "count": count}
    return config


def stand_in(count: int) -> list[dict[str, str]]:
    """Rows with the columns of every kind."""
    answers = {"answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}
    return [{"prompt": "1+1=?", **answers}] * count
