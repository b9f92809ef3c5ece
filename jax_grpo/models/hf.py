"""Models in: Hugging Face directories and hub ids, and the door to GGUF files.

A checkpoint is a dict of tensors that have not been read. Each parameter is read straight into
its shards: for every shard we read the rows of the file that it needs, a chunk at a time, into
the one host array that goes to the device. So no device ever holds a whole model that is spread
over many, and the host never holds a parameter twice. A shape that does not fit is found from the
headers, before anything is read.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import transformers
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from jax_grpo.models.config import LlamaConfig, config_from_hf
from jax_grpo.models.heads import scalar_shapes
from jax_grpo.models.llama import param_shapes
from jax_grpo.models.names import (
    EMBED,
    INPUT_AXES,
    LM_HEAD,
    NAMES,
    SAFETENSORS_DTYPES,
    SCORE,
    expected_tensors,
    layer_name,
)
from jax_grpo.types import Params, PyTree

Index = tuple[slice, ...]  # one slice with start and stop for each axis

_CHUNK_BYTES = 1 << 22  # of a shard, converted at a time: what a cache holds


class Loaded(NamedTuple):
    """A model and what it takes to talk with it."""

    config: LlamaConfig
    params: Params
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # any of them ends a completion


class Tensor(NamedTuple):
    """A tensor of a checkpoint, in the checkpoint's layout, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]  # the part at an index, of any float dtype
    problem: str = ""  # why it cannot be read


class Checkpoint(NamedTuple):
    """A checkpoint with tensors under their Hugging Face names, whatever file they come from."""

    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]


# ---------------------------------------------------------------------------------------- in


def load_model(
    source: str | os.PathLike[str],
    dtype: DTypeLike = jnp.float32,
    shardings: PyTree | Callable[[LlamaConfig], PyTree] | None = None,
    *,
    scalar_head: bool = False,
) -> Loaded:
    """Loads a model with its tokenizer.

    Args:
      source: a Hugging Face directory, a `.gguf` file, or the id of a model on the hub.
      dtype: what the parameters become.
      shardings: a tree like the parameters of `jax.sharding.Sharding`, or a function from the
        configuration to one; None puts all on the first local device.
      scalar_head: whether it is a reward model (LlamaForSequenceClassification and
        Qwen2ForSequenceClassification of one label), see models/heads.py.

    Returns:
      The configuration, parameters `[N, ...]` stacked over layers, tokenizer and end ids.

    Raises:
      FileNotFoundError: when there is no such model.
      ValueError: when there is one that this decoder cannot represent; one line says all of why.
    """
    checkpoint = open_checkpoint(source)
    tree = shardings(checkpoint.config) if callable(shardings) else shardings
    params = load_params(
        checkpoint.config, checkpoint.tensors, dtype, tree, str(source), scalar_head=scalar_head
    )
    return Loaded(checkpoint.config, params, checkpoint.tokenizer, checkpoint.end_ids)


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Reads everything of a model but its weights; arguments and errors as of `load_model`."""
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        from jax_grpo.models import gguf  # which builds on this module

        return gguf.open_gguf(path)
    if not path.is_dir():
        path = _download(str(source))
    try:
        config, tokenizer, end_ids = read_metadata(path)
        tensors = open_safetensors(path)
    except ValueError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    return Checkpoint(config, tensors, tokenizer, end_ids)


def read_metadata(
    directory: Path,
) -> tuple[LlamaConfig, PreTrainedTokenizerBase, tuple[int, ...]]:
    """The shape, tokenizer and end tokens of a directory, without its weights."""
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    said = [raw, read_json(generation)] if generation.exists() else [raw]
    tokenizer = _tokenizer(directory)
    return config_from_hf(raw), tokenizer, find_end_ids(tokenizer, *said)


def _download(model_id: str) -> Path:
    """The local snapshot of a model on the hub."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model_id) or model_id.endswith(".gguf"):
        raise FileNotFoundError(f"{model_id}: no such model directory or .gguf file")
    import huggingface_hub  # slow to import and seldom needed

    patterns = ["model*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"{model_id}: neither a directory here nor to be had from the hub ({reason})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError names the file when there is none."""
    if not path.exists():
        raise ValueError(f"there is no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def _tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory, without the network."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ValueError("there is no tokenizer (neither tokenizer.json nor tokenizer.model)")
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def open_safetensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, or of the shards that its index names, by name.

    Raises:
      ValueError: when files are missing, cut short or malformed.
    """
    index = directory / "model.safetensors.index.json"
    files = [directory / "model.safetensors"]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index.name} has no weight_map")
        files = [directory / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)} (only safetensors are read)")
    return {name: tensor for file in files for name, tensor in _open_file(file).items()}


def _open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file: a length of 8 bytes, a JSON header, the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path.name} is cut short or no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path.name} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if 8 + length + stop > size:
            raise ValueError(f"{path.name} is cut short: {name} ends beyond it")
        shape, dtype = tuple(entry["shape"]), SAFETENSORS_DTYPES.get(entry["dtype"])
        read = functools.partial(_read_part, path, dtype, 8 + length + start, shape)
        problem = "" if dtype else f"of type {entry['dtype']}"
        tensors[name] = Tensor(shape, read, problem)
    return tensors


def _read_part(
    path: Path, dtype: Any, offset: int, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """A part of one tensor of a safetensors file, as a view of the file."""
    return np.memmap(path, dtype, "r", offset, shape)[index]


def load_params(
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    dtype: DTypeLike = jnp.float32,
    shardings: PyTree | None = None,
    source: str = "checkpoint",
    *,
    scalar_head: bool = False,
) -> Params:
    """Reads the parameters of a model, each straight into its shards.

    Args:
      config: the model's shape.
      tensors: unread tensors by Hugging Face name.
      dtype: what the parameters become.
      shardings: a tree like the parameters; None puts all on the first local device.
      source: what to call the checkpoint in an error.
      scalar_head: as of `load_model`.

    Returns:
      The tree of parameters of `llama.py`, or of `heads.py`.

    Raises:
      ValueError: names every missing, unexpected and misshapen tensor at once.
    """
    shapes = (scalar_shapes if scalar_head else param_shapes)(config, dtype)
    check_tensors(config, tensors, source, scalar_head=scalar_head)
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)

    def load(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        names = [key.key for key in path]
        if names[0] == "layers":
            stack = [tensors[layer_name(i, names[1])] for i in range(config.num_layers)]
        elif names[0] == "score":
            stack = [_only_row(tensors[SCORE])]
        else:
            stack = [tensors[NAMES[names[0]]]]
        return _place(names[-1], stack, shape, sharding, stacked=names[0] == "layers")

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def check_tensors(
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    scalar_head: bool = False,
) -> None:
    """Raises one ValueError that lists all that does not fit."""
    if scalar_head:
        _check_score(tensors, source)
    expected = dict(expected_tensors(config, scalar_head))
    missing = [name for name in expected if name not in tensors]
    unexpected, misshapen, unreadable = [], [], []
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints: derived from the config
            continue
        if name == LM_HEAD and config.tie_word_embeddings:
            if EMBED in tensors and not _equal(tensor, tensors[EMBED]):
                unexpected.append(f"{name} (differs from the embedding that it is tied to)")
        elif name not in expected:
            unexpected.append(name)
        elif tensor.shape != expected[name]:
            misshapen.append(f"{name} {list(tensor.shape)} instead of {list(expected[name])}")
        elif tensor.problem:
            unreadable.append(f"{name} ({tensor.problem})")
    lists = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    lists["unreadable"] = unreadable
    problems = [f"{kind}: {', '.join(names)}" for kind, names in lists.items() if names]
    if problems:
        raise ValueError(f"{source}: tensors do not fit; {'; '.join(problems)}")


def _check_score(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises a ValueError for a language model, and for a classifier of several labels."""
    if SCORE not in tensors:
        found = f"a model without {SCORE}, such as a language model"
    elif tensors[SCORE].shape[:1] != (1,):
        found = f"a classifier with num_labels={tensors[SCORE].shape[0]}"
    else:
        return
    right = "LlamaForSequenceClassification or Qwen2ForSequenceClassification with num_labels=1"
    raise ValueError(f"{source}: {found}; a reward model is a {right}")


def _only_row(tensor: Tensor) -> Tensor:
    """A tensor `[1, D]` as `[D]`."""
    return Tensor(tensor.shape[1:], lambda index: tensor.read((slice(0, 1), *index))[0])


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, a thousand rows at a time."""
    if a.shape != b.shape:
        return False
    rest = tuple(slice(0, size) for size in a.shape[1:])
    parts = (slice(i, min(i + 1000, a.shape[0])) for i in range(0, a.shape[0], 1000))
    return all(np.array_equal(a.read((rows, *rest)), b.read((rows, *rest))) for rows in parts)


def _place(
    leaf: str,
    stack: list[Tensor],
    shape: jax.ShapeDtypeStruct,
    sharding: jax.sharding.Sharding,
    stacked: bool,
) -> jax.Array:
    """One parameter, from the tensors of its layers, each shard read on its own."""
    read: dict[Any, np.ndarray] = {}  # so that replicas read once

    def callback(index: Any) -> np.ndarray:
        bounds = [s.indices(size)[:2] for s, size in zip(index, shape.shape, strict=True)]
        key = tuple(bounds)
        if key not in read:
            out = np.empty([stop - start for start, stop in bounds], shape.dtype)
            inner = tuple(slice(*b) for b in bounds[stacked:])
            chosen = stack[slice(*bounds[0])] if stacked else stack
            fill = functools.partial(_fill, leaf=leaf, shape=shape.shape[stacked:], index=inner)
            with ThreadPoolExecutor() as pool:  # NumPy transposes and converts without the GIL
                list(pool.map(fill, out if stacked else [out], chosen))
            read[key] = out
        return read[key]

    return jax.make_array_from_callback(shape.shape, sharding, callback, dtype=shape.dtype)


def _fill(out: np.ndarray, tensor: Tensor, leaf: str, shape: tuple[int, ...], index: Index) -> None:
    """Writes a part of one layer's parameter into `out`, a chunk of the file's rows at a time."""
    axis = INPUT_AXES.get(leaf, 0)  # our axis that runs along the file's rows
    start, stop = index[axis].start, index[axis].stop
    row_bytes = max(1, out.nbytes // max(1, stop - start))
    step = max(1, _CHUNK_BYTES // row_bytes)
    for row in range(start, stop, step):
        rows = slice(row, min(row + step, stop))
        part = _read_leaf(leaf, tensor, shape, (*index[:axis], rows, *index[axis + 1 :]), out.dtype)
        out[(*[slice(None)] * axis, slice(rows.start - start, rows.stop - start))] = part


def _read_leaf(
    leaf: str, tensor: Tensor, shape: tuple[int, ...], index: Index, dtype: DTypeLike
) -> np.ndarray:
    """A part of one layer's parameter in our layout."""
    if leaf in NAMES:
        return tensor.read(index).astype(dtype, copy=False)
    split = INPUT_AXES.get(leaf, 0)
    groups = [(index[:split], shape[:split]), (index[split:], shape[split:])]  # in, out
    groups = [(part, sizes) for part, sizes in groups if part]
    cover = tuple(_run_together(part, sizes) for part, sizes in groups)
    block = tensor.read(cover[::-1]).astype(dtype, copy=False).T  # converted while contiguous
    sizes = [n for part, rest in groups for n in (part[0].stop - part[0].start, *rest[1:])]
    within = [axis for part, _ in groups for axis in (slice(None), *part[1:])]
    return block.reshape(sizes)[tuple(within)]


def _run_together(index: Index, shape: tuple[int, ...]) -> slice:
    """The range of a flattened group of axes that covers an index of its first axis."""
    inner = math.prod(shape[1:])
    return slice(index[0].start * inner, index[0].stop * inner)


# -------------------------------------------------------------------------------------- ends


def find_end_ids(
    tokenizer: PreTrainedTokenizerBase, *configs: Mapping[str, Any]
) -> tuple[int, ...]:
    """All ids that end a completion, sorted (Llama-3 has three).

    The union of `eos_token_id` of the given configurations, the tokenizer's end token, and the
    token that its chat template puts after what the assistant said.

    Args:
      tokenizer: of the model.
      *configs: contents of `config.json` and `generation_config.json`.
    """
    ids: set[int] = set()
    for config in configs:
        eos = config.get("eos_token_id")
        ids.update(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    turn = end_of_turn(tokenizer)
    return tuple(sorted(ids if turn is None else ids | {turn}))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts after an assistant's turn."""
    if not tokenizer.chat_template:
        return None
    said = "What-the-assistant-said"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        logging.getLogger(__name__).warning("the chat template gives no end of turn: %s", error)
        return None
    if said not in text:
        return None
    after = tokenizer.encode(text.rpartition(said)[2], add_special_tokens=False)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in after if i in special), None)
