"""Runs the stages of a config, or goes on with them.

    python -m jax_grpo train --config=configs/NAME.py [--workdir=DIR] [--config.a.b=value]

Without `--workdir` a fresh dated directory under `runs/` is made. The same command again goes on
where the run was; for one that is finished it prints the table.
"""

from __future__ import annotations

import datetime
import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from jax_grpo.collect import NothingCollected
from jax_grpo.commands import refusing_bad_input
from jax_grpo.commands.common import (
    MODEL_DIRECTORY,
)
from jax_grpo.commands.recipe import build
from jax_grpo.models import export
from jax_grpo.rewards.contract import RewardError
from jax_grpo.train import Diverged, train, write_json

NO_STAGE = ("seed", "dtype", "model", "mesh", "stages", "evaluation")
TOKENS = ("sampled_tokens", "optimizer_tokens")  # in a summary; its table has no room for them
HARMLESS = ("log_every",)  # keys that may differ from those that the run began with


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command; every key of the config in `line` is one.

    New keys are taken too: whether there is such a key, the function that takes it says.
    """
    first = flags.FlagValues()
    flags.DEFINE_string("config", None, "The recipe.", flag_values=first)
    first(line, known_only=True)
    if first.config is not None:
        _check_overrides(_load_config(first.config), line)
    config_flags.DEFINE_config_file(
        "config",
        None,
        "The recipe.",
        lock_config=False,
        accept_new_attributes=True,
        flag_values=values,
        sys_argv=list(line),
    )
    flags.DEFINE_string("workdir", None, "Where everything goes.", flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Trains; returns the exit code."""
    with refusing_bad_input():
        config = read_config(given_config(values))
        workdir = local_directory(values.workdir) if values.workdir else _fresh_directory()
    return reporting(
        "train", workdir, lambda: table(run_recipe(config, workdir)) + f"\nfiles: {workdir}"
    )


def run_recipe(
    config: Mapping[str, Any], workdir: Path, before: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Runs the stages of a recipe that are not finished yet in a workdir that is free, or its own.

    Args:
      config: of `read_config`.
      workdir: where everything goes.
      before: what was measured of the first parameters, where that is known.

    Returns:
      The summary, see `train`.
    """
    with refusing_bad_input():
        _check_workdir(workdir, config)
        summary = _read_json(workdir / "summary.json")
    if all(name in summary.get("stages", ()) for name in config["stages"]):
        return summary
    model, initial, stages, evaluation = build(config)
    with refusing_bad_input():  # from here on there is a workdir
        _claim(workdir, config)
        export.save_metadata(
            workdir / MODEL_DIRECTORY, model.config, model.tokenizer, model.end_ids
        )
        if before is not None and not summary and jax.process_index() == 0:
            write_json(workdir / "summary.json", {"before": before, "stages": {}})
    print(f"workdir {workdir}", file=sys.stderr)
    return train(model, initial, stages, evaluation, workdir)


def reporting(command: str, workdir: Path, work: Callable[[], str]) -> int:
    """Prints what some work gives, or one line of why it ended early; returns the exit code."""
    try:
        text = work()
    except (Diverged, NothingCollected, RewardError) as error:
        print(f"jax_grpo {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = f"the same command with --workdir={workdir} goes on from the last checkpoint"
        print(f"\njax_grpo {command}: interrupted; {again}", file=sys.stderr)
        return 130
    if jax.process_index() == 0:
        print(text)
    return 0


# ------------------------------------------------------------------------------ from the config


def given_config(values: flags.FlagValues) -> ConfigDict:
    """The config that the flags name, with what they change.

    Raises:
      ValueError: without one.
    """
    if values["config"].value is None:
        raise ValueError("--config=configs/NAME.py is missing")
    return values.config


def _load_config(path: str) -> ConfigDict:
    """What a config file gives; whatever is wrong with the file is one line.

    Raises:
      ValueError: with the line of the file where there is one.
    """
    file, *argument = path.split(":", 1)
    if not Path(file).is_file():
        raise ValueError(f"no such config file: {file!r}")
    try:
        names = runpy.run_path(file)
        config = names["get_config"](*argument) if "get_config" in names else None
    except Exception as error:  # it is a program of the user's
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [f.lineno for f in frames if Path(f.filename).name == Path(file).name]
        at = f" line {numbers[-1]}:" if numbers else ""
        raise ValueError(f"{file}:{at} {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(f"{file}: there is no get_config() that gives a ConfigDict")
    for key in config:
        _plain(config, key, "config")
    return config


def _check_overrides(config: ConfigDict, line: Sequence[str]) -> None:
    """Refuses a `--config.a.b=value` of a section `config.a` that is not there."""
    for arg in line:
        match = re.match(r"--?config\.([^=]+)\.[^.=]+(=|$)", arg)
        section, path = config, "config"
        for name in match[1].split(".") if match else ():
            sections = [key for key in section if section.get_type(key) is ConfigDict]
            if name not in sections:
                known = ", ".join(sections) or "none"
                raise ValueError(f"{path}: no section {name!r}; its sections: {known}")
            section, path = section[name], f"{path}.{name}"


def read_config(config: ConfigDict) -> dict[str, Any]:
    """The config as plain dicts, without the sections of stages that are left out.

    Raises:
      ValueError: when something is missing, or there is a key that means nothing.
    """
    for key in ("seed", "model", "stages"):
        if key not in config:
            raise ValueError(f"config: {key} is missing")
    stages = _plain(config, "stages", "config")
    if not isinstance(stages, tuple) or not stages or len(set(stages)) != len(stages):
        raise ValueError(f"config.stages must be a tuple of names, each once; got {stages!r}")
    for name in stages:
        if name in NO_STAGE or name not in config:
            raise ValueError(f"config.stages names {name!r}, but there is no section config.{name}")
    used = [key for key in config if key in (*NO_STAGE, *stages)]
    for key in config:
        is_section = config.get_type(key) is ConfigDict
        if key not in used and not (is_section and "algorithm" in config[key]):
            valid = ", ".join((*NO_STAGE, *stages))
            raise ValueError(f"config: no key {key!r}; valid keys: {valid}")
        if key in ("model", "mesh", "evaluation", *stages) and not is_section:
            raise ValueError(f"config.{key} is {config[key]!r} and not a section")
    plain = {key: _plain(config, key, "config") for key in used}
    for name in stages:
        data = plain[name].get("data")
        if isinstance(data, Mapping) and not data.get("path") and not data.get("source"):
            path = f"config.{name}.data.path"
            raise ValueError(f"{path} is missing (or a source): give it by --{path}=...")
    if type(plain["seed"]) is not int or not 0 <= plain["seed"] < 2**32:
        raise ValueError(f"config.seed is {plain['seed']!r}: a whole number, 0 to 2**32 - 1")
    return plain


def _plain(section: ConfigDict, key: str, path: str) -> Any:
    """A value of a config, sections as dicts; a placeholder that was not filled is None."""
    path = f"{path}.{key}"
    try:
        value = section[key]
    except config_dict.RequiredValueError:
        raise ValueError(
            f"{path} is a required_placeholder, which no flag can fill: use placeholder"
        ) from None
    if isinstance(value, ConfigDict):
        return {name: _plain(value, name, path) for name in value}
    return value


# ------------------------------------------------------------------------------------ the workdir


def local_directory(path: str) -> Path:
    """A workdir that a flag names.

    Raises:
      ValueError: for a bucket.
    """
    if "://" in path:
        raise ValueError(f"--workdir is a local directory, not {path}")
    return Path(path)


def _fresh_directory() -> Path:
    """A dated directory under runs/ that is not there yet."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (f"{stamp}{suffix}" for suffix in ("", *(f"_{i}" for i in range(2, 1000))))
    return next(path for name in names if not (path := Path("runs") / name).exists())


def _check_workdir(workdir: Path, config: Mapping[str, Any]) -> None:
    """Checks that the workdir is free, or this run's.

    Raises:
      ValueError: when the directory belongs to another run, with the differences.
    """
    if not (workdir / "config.json").exists():
        if workdir.exists() and any(workdir.iterdir()):
            raise ValueError(f"{workdir} is not empty and not a run's workdir (no config.json)")
        return
    theirs, mine = _flat(_read_json(workdir / "config.json")), _flat(_jsonable(config))
    differ = [
        f"{key} was {theirs.get(key, 'not there')}, is {mine.get(key, 'not there')}"
        for key in sorted(theirs.keys() | mine.keys())
        if theirs.get(key) != mine.get(key) and key.split(".")[-1] not in HARMLESS
    ]
    if differ:
        raise ValueError(f"{workdir} holds a run with another config: {'; '.join(differ)}")


def _claim(workdir: Path, config: Mapping[str, Any]) -> None:
    """Makes the workdir and writes the config there, if it is not there yet."""
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "config.json"
    if jax.process_index() == 0 and not file.exists():
        file.write_text(json.dumps(_jsonable(config), indent=2) + "\n")


def _jsonable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as JSON gives it back."""
    return json.loads(json.dumps(config, default=str))


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file, empty without the file."""
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def table(summary: Mapping[str, Any]) -> str:
    """A run's summary as a small table."""
    rows = {"before": summary.get("before") or {}, **summary["stages"]}
    names = dict.fromkeys(name for values in rows.values() for name in values)
    columns = [c for c in names if c not in ("seconds", *TOKENS)] + ["seconds"]
    width = max(12, *(len(name) for name in rows))
    lines = ["".join([" " * width, *(f"{c:>{len(c) + 3}}" for c in columns)])]
    for name, values in rows.items():
        cells = []
        for column in columns:
            value = values.get(column)
            digits = 1 if column.startswith("mean_length") or column == "seconds" else 3
            text = "" if value is None else f"{value:.{digits}f}"
            cells.append(f"{text:>{len(column) + 3}}")
        label = name if name == "before" else f"after {name}"
        lines.append(f"{label:<{width}}" + "".join(cells))
    return "\n".join(lines)
