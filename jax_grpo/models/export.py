"""Models out: a directory that transformers loads, written tensor by tensor."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from jax_grpo.models.config import LlamaConfig, config_to_hf
from jax_grpo.models.heads import scalar_shapes
from jax_grpo.models.hf import read_json
from jax_grpo.models.llama import param_shapes
from jax_grpo.models.names import (
    INPUT_AXES,
    LAYER_NAMES,
    NAMES,
    SAFETENSORS_DTYPES,
    expected_tensors,
    hf_shape,
)
from jax_grpo.types import Params, PyTree


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

    Parameters with a scalar head (models/heads.py) become a sequence classifier of one label.
    Tensors are gathered and written one at a time. All is written beside the directory and
    renamed at the end, so a failure leaves what was there. With several processes all of them
    must call this; the first one writes.

    Args:
      directory: where to; it may exist only if it is empty, or with `overwrite`.
      config: the model's shape.
      params: the tree of parameters of `llama.py` or `heads.py`, layers stacked.
      tokenizer: written along, with its chat template.
      end_ids: what ends a completion, for `generation_config.json`.
      dtype: of the weights on disk: float32, bfloat16 or float16.
      max_shard_bytes: the largest file of weights.
      overwrite: whether to replace what is in the directory.

    Raises:
      FileExistsError: when the directory has content and `overwrite` is False.
      ValueError: when parameters do not have the shapes of `config`, or the dtype is another,
        or when a scalar head finds no token to pad with.
    """
    target, dtype = Path(directory).absolute(), jnp.dtype(dtype)
    if dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"weights are not exported as {dtype.name}")
    if not overwrite and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory")
    scalar_head = "score" in params
    shapes = scalar_shapes(config) if scalar_head else param_shapes(config)
    if _shape_dict(params) != _shape_dict(shapes):
        raise ValueError("the parameters do not have the shapes of the configuration")
    writes = jax.process_index() == 0
    partial = target.with_name(f".{target.name}.partial")
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _write_weights(partial, config, params, dtype, max_shard_bytes, writes)
    if writes:
        save_metadata(partial, config, tokenizer, end_ids, dtype, scalar_head=scalar_head)
        _replace(partial, target)


def save_metadata(
    directory: Path,
    config: LlamaConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int] = (),
    dtype: DTypeLike = jnp.float32,
    *,
    scalar_head: bool = False,
) -> None:
    """Writes all of a model but its weights; arguments as of `export_model`."""
    directory.mkdir(parents=True, exist_ok=True)
    if scalar_head:
        tokenizer = _with_padding(tokenizer, end_ids, config.vocab_size)
    ids = {f"{k}_token_id": getattr(tokenizer, f"{k}_token_id") for k in ("bos", "eos", "pad")}
    model = {**config_to_hf(config), **ids, "torch_dtype": jnp.dtype(dtype).name}
    if scalar_head:
        [language_model] = model["architectures"]
        name = language_model.replace("CausalLM", "SequenceClassification")
        model |= {"architectures": [name], "num_labels": 1}
    _write_json(directory / "config.json", model)
    generation = {**ids, "eos_token_id": sorted(end_ids) or ids["eos_token_id"]}
    _write_json(directory / "generation_config.json", generation)
    _save_tokenizer(tokenizer, directory)


def _with_padding(
    tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], vocab_size: int
) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy that pads with a token that ends no completion.

    transformers scores a row at its last token that is no padding. Where the end token is the
    padding, as so often, that is the token before it, and without padding it takes no batch.
    """
    t, ends = tokenizer, {tokenizer.eos_token_id, *end_ids}
    special = [i for i, token in t.added_tokens_decoder.items() if token.special]
    for i in (t.pad_token_id, t.unk_token_id, t.bos_token_id, *special):
        if isinstance(i, int) and i < vocab_size and i not in ends:
            padded = copy.deepcopy(tokenizer)
            padded.pad_token = tokenizer.convert_ids_to_tokens(i)
            return padded
    raise ValueError(
        "a reward model pads with a token that ends no completion, and the tokenizer has no such "
        "special token: add one"
    )


def _shape_dict(params: Params) -> PyTree:
    return jax.tree.map(lambda x: tuple(x.shape), dict(params))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Saves a tokenizer so that transformers 4 reads it too: 5 renamed its class and a list."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    content = read_json(path)
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
    tensors = expected_tensors(config, scalar_head="score" in params)
    shards = _plan_shards(tensors, dtype.itemsize, max_shard_bytes)
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
    tensors: Iterable[tuple[str, tuple[int, ...]]], itemsize: int, max_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in tensors:
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
    kinds = {np.dtype(kind): name for name, kind in SAFETENSORS_DTYPES.items()}
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
    top = {hf_name: leaf for leaf, hf_name in NAMES.items()}
    if name in top:
        leaf = top[name]
        value = jnp.asarray(params[leaf], dtype)
    else:
        _, _, layer, rest = name.split(".", 3)
        leaf = next(leaf for leaf, hf_name in LAYER_NAMES.items() if hf_name == rest)
        value = _layer(params["layers"][leaf], int(layer), dtype)
    if not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    host = np.asarray(value)
    shape = hf_shape(leaf, host.shape)
    return host.reshape(shape[::-1]).T if leaf in INPUT_AXES else host.reshape(shape)
