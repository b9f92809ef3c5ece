"""What commands share: one line for bad input, and models from wherever they lie."""

from __future__ import annotations

import inspect
import json
import os
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jax_grpo import checkpoint
from jax_grpo.commands import BadInput
from jax_grpo.models import hf
from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.llama import cast_params, param_axes, param_shapes
from jax_grpo.sharding import param_shardings
from jax_grpo.stages import abstract_scalar
from jax_grpo.types import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_DIRECTORY = "model"  # in a workdir: config and tokenizer, without weights


def configure(
    function: Callable[..., Any], section: Mapping[str, Any], path: str, **given: Any
) -> Any:
    """Calls a function with a section of a config: its signature is the schema.

    Args:
      function: takes the section's keys as keyword arguments.
      section: keys and values; a value of None was never given.
      path: the section's name in the config, for messages.
      **given: what does not come from the section.

    Raises:
      BadInput: for a key that the function does not take, a value of another type than it is
        annotated with, or a key that is missing.
    """
    parameters = inspect.signature(function).parameters
    keys = {name: value for name, value in section.items() if value is not None}
    valid = [n for n, p in parameters.items() if n not in given and p.kind is not p.VAR_KEYWORD]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in keys:
        if key not in valid and not anything:
            raise BadInput(f"config.{path}: no key {key!r}; valid keys: {', '.join(valid)}")
    for name in valid:
        if parameters[name].default is inspect.Parameter.empty and name not in keys:
            raise BadInput(f"config.{path}: {name} is missing")
    try:
        check_types(function, keys)
        return function(**keys, **given)
    except (ValueError, OSError, ImportError) as error:
        raise BadInput(f"config.{path}: {' '.join(str(error).split())}") from error


def check_types(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuses a setting of another type than the function's parameter is annotated with.

    Raises:
      ValueError: with the setting's name.
    """
    parameters = inspect.signature(function).parameters
    for name, value in settings.items():
        hint = parameters[name].annotation if name in parameters else Any
        try:
            meant = eval(hint, function.__globals__) if isinstance(hint, str) else hint
        except (AttributeError, NameError):  # a name for type checkers only
            continue
        if meant is not inspect.Parameter.empty and not _is_a(value, meant):
            raise ValueError(f"{name} is {value!r}, which is no {getattr(hint, '__name__', hint)}")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value of a config is what an annotation says; a whole number is a float, too."""
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, part) for part in get_args(hint))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind is Literal:  # which it is, the function says
        return isinstance(value, str)
    return not isinstance(kind, type) or isinstance(value, kind)


def compute_dtype(name: str) -> DTypeLike:
    """The dtype of that name; `auto` is float32 on CPU and bfloat16 elsewhere.

    float32 then means float32: by default TPUs and GPUs multiply it in fewer bits.

    Raises:
      ValueError: for another name.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {name!r} is not one of: auto, float32, bfloat16")
    if name == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    return jnp.dtype(name)


class Opened(NamedTuple):
    """A model whose weights have not been read yet."""

    config: LlamaConfig
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    read: Callable[[], Params]  # once


def open_model(model: str, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> Opened:
    """Opens a workdir, a Hugging Face directory or hub id, or a GGUF file.

    Args:
      model: which.
      mesh: `read` puts each parameter straight into its shards on it.
      dtype: of the parameters.

    Raises:
      ValueError, OSError: when it is not there or does not fit.
    """

    def shardings(config: LlamaConfig) -> Any:
        return param_shardings(param_axes(config), param_shapes(config), mesh, "training")

    if (Path(model) / MODEL_DIRECTORY).is_dir():
        return _open_workdir(Path(model), shardings, dtype)
    found = hf.open_checkpoint(model)
    hf.check_tensors(found.config, found.tensors, model)

    config, tensors = found.config, [found.tensors]

    def read() -> Params:
        # Lets go of the tensors: the reader behind those of a GGUF file is large.
        return hf.load_params(config, tensors.pop(), dtype, shardings(config), model)

    return Opened(config, found.tokenizer, found.end_ids, read)


def load(model: str, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> hf.Loaded:
    """Opens a model and reads its weights; arguments and errors as of `open_model`."""
    opened = open_model(model, mesh, dtype)
    return hf.Loaded(opened.config, opened.read(), opened.tokenizer, opened.end_ids)


def _open_workdir(
    workdir: Path, shardings: Callable[[LlamaConfig], Any], dtype: DTypeLike
) -> Opened:
    """The newest parameters of a run."""
    config, tokenizer, end_ids = hf.read_metadata(workdir / MODEL_DIRECTORY)
    stages = _stages_of(workdir, reward_models=False)
    begun = [stage for stage in reversed(stages) if any(stage.glob("[0-9]*"))]
    if not begun:
        raise ValueError(f"{os.fspath(workdir)}: this run has no checkpoint yet")

    def read() -> Params:
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            param_shapes(config),
            shardings(config),
        )
        found = (checkpoint.read_params(stage, abstract) for stage in begun)
        _, params = next(restored for restored in found if restored is not None)
        return cast_params(params, dtype)

    return Opened(config, tokenizer, end_ids, read)


def _stages_of(workdir: Path, reward_models: bool) -> list[Path]:
    """Checkpoints of a run's stages that train reward models, or of those that train the policy."""
    recipe = json.loads((workdir / "config.json").read_text())
    names = {
        name: recipe.get(name, {}).get("algorithm", {}).get("name") for name in recipe["stages"]
    }
    chosen = [name for name in names if (names[name] == "reward_model") == reward_models]
    return [workdir / "checkpoints" / name for name in chosen]


def open_reward_model(model: str, mesh: Mesh, dtype: DTypeLike = jnp.float32) -> Opened:
    """Opens a reward model: the last one of a workdir, or a sequence classifier with one label.

    Args:
      model: a workdir, or a Hugging Face directory or hub id.
      mesh: `read` puts each parameter straight into its shards on it.
      dtype: of the parameters.

    Raises:
      ValueError, OSError: when it is not there or is none.
    """
    workdir = Path(model)
    if (workdir / MODEL_DIRECTORY).is_dir():
        config, tokenizer, end_ids = hf.read_metadata(workdir / MODEL_DIRECTORY)
        trained = _stages_of(workdir, reward_models=True)
        if not trained:
            raise ValueError(f"{model}: no stage of this run trains a reward model")
        shapes = abstract_scalar(config, mesh)

        def restore() -> Params:
            return cast_params(read_reward_model(trained[-1], shapes), dtype)

        return Opened(config, tokenizer, end_ids, restore)
    found = hf.open_checkpoint(model)
    hf.check_tensors(found.config, found.tensors, model, scalar_head=True)
    where = jax.tree.map(lambda x: x.sharding, abstract_scalar(found.config, mesh))

    def read() -> Params:
        return hf.load_params(found.config, found.tensors, dtype, where, model, scalar_head=True)

    return Opened(found.config, found.tokenizer, found.end_ids, read)


def read_reward_model(stage: Path, abstract: Params) -> Params:
    """The reward model that a finished stage left.

    Args:
      stage: its directory of checkpoints.
      abstract: shapes and shardings.
    """
    restored = checkpoint.read_params(stage, abstract)
    if restored is None:
        raise ValueError(f"there is no checkpoint of a reward model in {stage}")
    return restored[1]


def pad_to_multiple(count: int, multiple: int) -> int:
    """The least multiple that is at least `count`."""
    return -(-count // multiple) * multiple


def check_out(path: str) -> None:
    """Refuses an output file that cannot be written, before there is anything to write.

    Raises:
      ValueError: when it is a directory, or in none.
    """
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ValueError(f"--out={path} is not a file in a directory that is there")


def write_lines(path: str, lines: Iterable[Mapping[str, Any]]) -> int:
    """Writes JSON lines beside the file and renames at the end: all of them, or none.

    Returns:
      How many.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.partial")
    count = 0
    try:
        with draft.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return count
