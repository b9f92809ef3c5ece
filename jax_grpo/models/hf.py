"""Models in and out: Hugging Face directories and hub ids, and the door to GGUF files.

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
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import ml_dtypes
import numpy as np
import transformers
from jax.experimental import multihost_utils
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from jax_grpo.models.config import LlamaConfig, config_from_hf, config_to_hf
from jax_grpo.models.llama import param_shapes
from jax_grpo.types import Params, PyTree

Index = tuple[slice, ...]  # one slice with start and stop for each axis

_CHUNK_BYTES = 1 << 22  # of a shard, converted at a time: what a cache holds
_EMBED, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {"embed": _EMBED, "norm": "model.norm.weight", "head": _LM_HEAD}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
}
# How many leading axes a matrix takes in; Hugging Face stores [out, in] with axes run together.
_INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}

_SAFETENSORS_DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


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
) -> Loaded:
    """Loads a model with its tokenizer.

    Args:
      source: a Hugging Face directory, a `.gguf` file, or the id of a model on the hub.
      dtype: what the parameters become.
      shardings: a tree like the parameters of `jax.sharding.Sharding`, or a function from the
        configuration to one; None puts all on the first local device.

    Returns:
      The configuration, parameters `[N, ...]` stacked over layers, tokenizer and end ids.

    Raises:
      FileNotFoundError: when there is no such model.
      ValueError: when there is one that this decoder cannot represent; one line says all of why.
    """
    checkpoint = open_checkpoint(source)
    tree = shardings(checkpoint.config) if callable(shardings) else shardings
    params = load_params(checkpoint.config, checkpoint.tensors, dtype, tree, str(source))
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
    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    said = [raw, _read_json(generation)] if generation.exists() else [raw]
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


def _read_json(path: Path) -> dict[str, Any]:
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
        shards = _read_json(index).get("weight_map")
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
        shape, dtype = tuple(entry["shape"]), _SAFETENSORS_DTYPES.get(entry["dtype"])
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
) -> Params:
    """Reads the parameters of a model, each straight into its shards.

    Args:
      config: the model's shape.
      tensors: unread tensors by Hugging Face name.
      dtype: what the parameters become.
      shardings: a tree like the parameters; None puts all on the first local device.
      source: what to call the checkpoint in an error.

    Returns:
      The tree of parameters of `llama.py`.

    Raises:
      ValueError: names every missing, unexpected and misshapen tensor at once.
    """
    shapes = param_shapes(config, dtype)
    _check_tensors(config, tensors, source)
    if shardings is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, shapes)

    def load(path: Any, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        names = [key.key for key in path]
        if names[0] == "layers":
            stack = [tensors[_layer_name(i, names[1])] for i in range(config.num_layers)]
        else:
            stack = [tensors[_NAMES[names[0]]]]
        return _place(names[-1], stack, shape, sharding, stacked=names[0] == "layers")

    return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def _layer_name(layer: int, leaf: str) -> str:
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def _hf_shape(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which Hugging Face stores a parameter of one layer."""
    if leaf in _INPUT_AXES:
        split = _INPUT_AXES[leaf]
        return math.prod(shape[split:]), math.prod(shape[:split])
    return shape if leaf in _NAMES else (math.prod(shape),)


def _expected(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Hugging Face name and shape of every tensor of a model, in the order of the layers."""
    shapes = param_shapes(config)
    layers = {leaf: _hf_shape(leaf, x.shape[1:]) for leaf, x in shapes["layers"].items()}
    yield _EMBED, _hf_shape("embed", shapes["embed"].shape)
    for i in range(config.num_layers):
        yield from ((_layer_name(i, leaf), shape) for leaf, shape in layers.items())
    for leaf in ("norm", "head"):
        if leaf in shapes:
            yield _NAMES[leaf], _hf_shape(leaf, shapes[leaf].shape)


def _check_tensors(config: LlamaConfig, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises one ValueError that lists all that does not fit."""
    expected = dict(_expected(config))
    missing = [name for name in expected if name not in tensors]
    unexpected, misshapen, unreadable = [], [], []
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints: derived from the config
            continue
        if name == _LM_HEAD and config.tie_word_embeddings:
            if _EMBED in tensors and not _equal(tensor, tensors[_EMBED]):
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
    axis = _INPUT_AXES.get(leaf, 0)  # our axis that runs along the file's rows
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
    if leaf in _NAMES:
        return tensor.read(index).astype(dtype, copy=False)
    split = _INPUT_AXES.get(leaf, 0)
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


# --------------------------------------------------------------------------------------- out


def export_model(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int] = (),
    dtype: DTypeLike = jnp.bfloat16,
    *,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Writes a directory that transformers (4 or 5) loads.

    Tensors are gathered and written one at a time. All is written beside the directory and
    renamed at the end, so a failure leaves what was there. With several processes all of them
    must call this; the first one writes.

    Args:
      directory: where to; it may exist only if it is empty, or with `overwrite`.
      config: the model's shape.
      params: the tree of parameters of `llama.py`, layers stacked.
      tokenizer: written along, with its chat template.
      end_ids: what ends a completion, for `generation_config.json`.
      dtype: of the weights on disk: float32, bfloat16 or float16.
      max_shard_bytes: the largest file of weights.
      overwrite: whether to replace what is in the directory.

    Raises:
      FileExistsError: when the directory has content and `overwrite` is False.
      ValueError: when parameters do not have the shapes of `config`, or the dtype is another.
    """
    target, dtype = Path(directory).absolute(), jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"weights are not exported as {dtype.name}")
    if not overwrite and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory")
    if _shape_dict(params) != _shape_dict(param_shapes(config)):
        raise ValueError("the parameters do not have the shapes of the configuration")
    writes = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _write_weights(partial, config, params, dtype, max_shard_bytes, writes)
    if writes:
        save_metadata(partial, config, tokenizer, end_ids, dtype)
        _replace(partial, target)


def save_metadata(
    directory: Path,
    config: LlamaConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int] = (),
    dtype: DTypeLike = jnp.float32,
) -> None:
    """Writes all of a model but its weights; arguments as of `export_model`."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = {f"{k}_token_id": getattr(tokenizer, f"{k}_token_id") for k in ("bos", "eos", "pad")}
    model = {**config_to_hf(config), **ids, "torch_dtype": jnp.dtype(dtype).name}
    _write_json(directory / "config.json", model)
    generation = {**ids, "eos_token_id": sorted(end_ids) or ids["eos_token_id"]}
    _write_json(directory / "generation_config.json", generation)
    _save_tokenizer(tokenizer, directory)


def _shape_dict(params: Params) -> PyTree:
    return jax.tree.map(lambda x: tuple(x.shape), dict(params))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Saves a tokenizer so that transformers 4 reads it too: 5 renamed its class and a list."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    content = _read_json(path)
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    _write_json(path, content)


def _replace(partial: Path, target: Path) -> None:
    """Puts a finished directory in its place; what was there goes last."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(
    directory: Path,
    config: LlamaConfig,
    params: Params,
    dtype: np.dtype,
    max_shard_bytes: int,
    writes: bool,
) -> None:
    """Writes the shards and, if there are several, their index."""
    shards = _plan_shards(config, dtype.itemsize, max_shard_bytes)
    many, where = len(shards) > 1, {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if many else ""
        name = f"model{suffix}.safetensors"
        where.update(dict.fromkeys(shard, name))
        arrays = (_gather(params, tensor, dtype) for tensor in shard)
        if writes:
            with (directory / name).open("wb") as file:
                _write_file(file, shard, dtype, arrays)
        else:
            for _ in arrays:  # the gathers are collective
                pass
    if many and writes:
        total = sum(math.prod(shape) for shard in shards for shape in shard.values())
        index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": where}
        _write_json(directory / "model.safetensors.index.json", index)


def _plan_shards(
    config: LlamaConfig, itemsize: int, max_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in _expected(config):
        size = math.prod(shape) * itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _write_file(
    file: BinaryIO,
    shard: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    arrays: Iterator[np.ndarray],
) -> None:
    """Writes one safetensors file; the header is known before any tensor is gathered."""
    kinds = {np.dtype(kind): name for name, kind in _SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, shape in shard.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays:
        file.write(np.ascontiguousarray(array).view(np.uint8).data)


@functools.partial(jax.jit, static_argnames="dtype")
def _layer(stacked: jax.Array, i: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, i, keepdims=False).astype(dtype)


def _gather(params: Params, name: str, dtype: np.dtype) -> np.ndarray:
    """One tensor of a checkpoint on the host, in Hugging Face's layout."""
    top = {hf_name: leaf for leaf, hf_name in _NAMES.items()}
    if name in top:
        leaf = top[name]
        value = jnp.asarray(params[leaf], dtype)
    else:
        _, _, layer, rest = name.split(".", 3)
        leaf = next(leaf for leaf, hf_name in _LAYER_NAMES.items() if hf_name == rest)
        value = _layer(params["layers"][leaf], int(layer), dtype)
    if not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    host = np.asarray(value)
    shape = _hf_shape(leaf, host.shape)
    return host.reshape(shape[::-1]).T if leaf in _INPUT_AXES else host.reshape(shape)
