"""GGUF files: llama.cpp's container of quantised weights, configuration and tokenizer.

The file is seen as one more checkpoint with Hugging Face names: rows are dequantised when they are
asked for, so `hf.load_params` streams them into shards like any other tensor. llama.cpp stores q
and k of `llama` (not of `qwen2`) with the rows of each head interleaved, and Llama-3.1's scaling as
a tensor of divisors; both are undone here. The tokenizer is built from the file's own fields.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from jax_grpo.models.config import LlamaConfig, RopeScaling, config_from_hf
from jax_grpo.models.hf import Checkpoint, Index, Tensor, find_end_ids
from jax_grpo.models.llama import rope_frequencies

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Checked elsewhere, or without effect.
_PASSED_OVER = frozenset(
    "vocab_size tensor_data_layout attention.value_length rope.dimension_count rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned".split()
)
_INERT_VALUES = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}

# `tokenizer.ggml.token_type`
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def open_gguf(path: str | Path) -> Checkpoint:
    """Reads everything of a GGUF file but its weights.

    Args:
      path: the file, of architecture llama or qwen2, in one part.

    Returns:
      Its configuration, unread tensors under Hugging Face names, tokenizer and end ids.

    Raises:
      ValueError: when the file, its architecture or its tokenizer is not one that we know.
      ModuleNotFoundError: without the `gguf` package.
    """
    gguf = _package()
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is cut short or no GGUF file ({error})") from error
    fields = {key: field.contents() for key, field in reader.fields.items()}
    try:
        return _checkpoint(gguf, reader, fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading GGUF files needs a package more: pip install 'jax_grpo[gguf]'"
        ) from error
    return gguf


def _checkpoint(gguf: Any, reader: Any, fields: Mapping[str, Any]) -> Checkpoint:
    arch = fields.get("general.architecture")
    if arch not in ("llama", "qwen2"):
        raise ValueError(f"architecture {arch!r} is not one of: llama, qwen2")
    if fields.get("split.count", 1) > 1:
        raise ValueError("a file in several parts is not read; join them with llama-gguf-split")
    parts = {tensor.name: tensor for tensor in reader.tensors}
    config = _read_config(gguf, arch, fields, parts)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if arch == "llama" else {}
    tensors = {}
    for name, part in parts.items():
        if name != _ROPE_FACTORS:
            kind = name.split(".")[2] if name.startswith("blk.") else ""
            tensors[_hf_name(name)] = _tensor(gguf, part, heads.get(kind, 0))
    tokenizer = build_tokenizer(fields, config.max_position_embeddings)
    ends = (fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    end_ids = find_end_ids(tokenizer, {"eos_token_id": [i for i in ends if i is not None]})
    return Checkpoint(config, tensors, tokenizer, end_ids)


# -------------------------------------------------------------------------------- configuration


def _read_config(
    gguf: Any, arch: str, fields: Mapping[str, Any], parts: Mapping[str, Any]
) -> LlamaConfig:
    """The configuration: of the file's fields what `config_from_hf` knows, and its tensors."""
    if "token_embd.weight" not in parts:
        raise ValueError("there is no tensor token_embd.weight")
    own = {
        key.removeprefix(f"{arch}."): _decimal(value)
        for key, value in fields.items()
        if key.startswith(f"{arch}.")
    }
    raw = {
        "model_type": arch,
        "vocab_size": int(parts["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in parts,
        "mlp_bias": "blk.0.ffn_gate.bias" in parts,
    }
    for key, value in own.items():
        if key in _CONFIG:
            raw[_CONFIG[key]] = value
        elif key not in _PASSED_OVER and value != _INERT_VALUES.get(key):
            raw[f"{arch}.{key}"] = value  # to be refused by name
    kind = own.get("rope.scaling.type", "none")
    if kind != "none":
        raw["rope_scaling"] = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    config = config_from_hf(raw)
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, config.head_dim) != config.head_dim:
            raise ValueError(f"{arch}.{key}={own[key]} is not head_dim={config.head_dim}")
    if arch == "llama":
        config = dataclasses.replace(
            config,
            qkv_bias="blk.0.attn_q.bias" in parts,
            o_bias="blk.0.attn_output.bias" in parts,
        )
    if _ROPE_FACTORS in parts:
        tensor = parts[_ROPE_FACTORS]
        factors = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        config = dataclasses.replace(config, rope_scaling=_llama3_scaling(factors, config))
    return config


def _decimal(value: Any) -> Any:
    """A float32 as the decimal number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_scaling(factors: np.ndarray, config: LlamaConfig) -> RopeScaling | None:
    """The scaling whose divisors of the rotary frequencies `[d / 2]` are these.

    All published Llamas blend between 1 and 4 turns in 8192 positions; only the factor differs.
    """
    if config.rope_scaling is not None:
        raise ValueError(f"{_ROPE_FACTORS} and rope.scaling.type are both given")
    if np.all(factors == 1):
        return None
    scaling = RopeScaling("llama3", float(factors.max()))
    plain = rope_frequencies(config)
    scaled = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    if factors.shape != plain.shape or not np.allclose(plain / factors, scaled, rtol=1e-5, atol=0):
        raise ValueError(f"{_ROPE_FACTORS} is not a scaling that Llama 3.1 or 3.2 have")
    return scaling


# -------------------------------------------------------------------------------------- tensors


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; an unknown name stays, to be refused."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_TENSORS:
        return _TENSORS.get(name, name)
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{match[3]}"


def _tensor(gguf: Any, part: Any, heads: int) -> Tensor:
    """An unread tensor in Hugging Face's layout; `heads` of 0: its rows are as they should be."""
    shape = tuple(int(size) for size in reversed(part.shape))
    rows = None
    if heads and shape[0] % (2 * heads) == 0:
        # row (head, half, i) of Hugging Face is row (head, i, half) of llama.cpp
        rows = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    try:
        gguf.quants.dequantize(part.data[:1] if len(shape) > 1 else part.data, part.tensor_type)
    except NotImplementedError:
        return Tensor(shape, _unreadable, f"of type {part.tensor_type.name}")
    return Tensor(shape, functools.partial(_read_part, gguf, part, rows))


def _unreadable(index: Index) -> np.ndarray:
    raise NotImplementedError(index)


def _read_part(gguf: Any, part: Any, rows: np.ndarray | None, index: Index) -> np.ndarray:
    """A part of a tensor, float32; only the blocks that it touches are dequantised."""
    chosen = index[0] if rows is None else rows[index[0]]
    if len(index) == 1:
        return gguf.quants.dequantize(part.data, part.tensor_type)[chosen]
    block, block_bytes = gguf.GGML_QUANT_SIZES[part.tensor_type]
    width = block_bytes if part.data.dtype == np.uint8 else 1  # of a block, in items of `data`
    first, last = index[1].start // block, math.ceil(index[1].stop / block)
    data = part.data[chosen, first * width : last * width]
    values = gguf.quants.dequantize(data, part.tensor_type)
    return values[:, index[1].start - first * block : index[1].stop - first * block]


# ------------------------------------------------------------------------------------ tokenizer


def build_tokenizer(fields: Mapping[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """Builds the tokenizer that the `tokenizer.*` fields of a GGUF file describe.

    Args:
      fields: contents of the file's fields by key.
      max_length: the model's context, for the tokenizer's record.

    Returns:
      A tokenizer with special tokens, start token and chat template as the file says.

    Raises:
      ValueError: for a kind of tokenizer, or a way of splitting text, that we do not know.
    """
    said = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = said.get("model"), said.get("tokens", [])
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(f"tokenizer of kind {kind!r} is not one of: gpt2, llama")
    types = said.get("token_type", [1] * len(tokens))
    ranks = said.get("merges" if kind == "gpt2" else "scores", [])
    if len(types) != len(tokens) or not ranks or (kind == "llama" and len(ranks) != len(tokens)):
        raise ValueError("the tokenizer's token_type, merges or scores are missing or cut short")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    split = said.get("pre", "default")
    if kind == "gpt2":
        backend = _byte_level(vocab, ranks, split)
    else:
        scores = dict(zip(tokens, ranks, strict=True))
        unknown = tokens[said.get("unknown_token_id", 0)]
        backend = _sentencepiece(vocab, scores, unknown, bool(said.get("add_space_prefix", True)))
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=types[i] == _CONTROL)
            for i, token in enumerate(tokens)
            if types[i] in (_CONTROL, _USER_DEFINED)
        ]
    )
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: said.get(f"{key}_token_id") for short, key in keys.items()}
    special = {f"{short}_token": tokens[i] for short, i in ids.items() if i is not None}
    # llama.cpp's defaults where the file is silent
    add_bos = said.get("add_bos_token", kind == "llama" or split == "llama-bpe")
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    add_eos = said.get("add_eos_token", False) and "eos_token" in special
    after = [special["eos_token"]] if add_eos else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocab[token]) for token in {*before, *after}],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        **special,
    )


def _byte_level(vocab: dict[str, int], merges: Iterable[str], split: str) -> Tokenizer:
    """A byte-level BPE, as of GPT-2, with the split of text that `tokenizer.ggml.pre` names."""
    # llama.cpp's `ignore_merges`: a piece that is a token as a whole is never taken apart
    parts = (merge.partition(" ") for merge in merges)
    pairs = [(left, right) for left, _, right in parts]
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split == "llama-bpe"))
    if split in ("gpt-2", "default"):
        before: list[Any] = []
    elif split == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif split in ("llama-bpe", "qwen2"):
        digits = "{1,3}" if split == "llama-bpe" else ""
        pattern = Regex(_GPT4_SPLIT.replace("DIGITS", digits))
        before = [pre_tokenizers.Split(pattern, behavior="isolated")]
    else:
        raise ValueError(
            f"tokenizer.ggml.pre={split!r} is not one of: gpt-2, default, smollm, llama-bpe, qwen2"
        )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    own_split = split not in ("llama-bpe", "qwen2")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    vocab: dict[str, int], scores: Mapping[str, float], unknown: str, space_prefix: bool
) -> Tokenizer:
    """A SentencePiece BPE, as of Llama-2; its merges follow from the scores of its tokens."""
    backend = Tokenizer(
        models.BPE(
            vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, tokens of higher score first."""
    found = []
    for token in vocab:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in vocab and b in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(-scores[token], pair) for pair in pairs]
    return [pair for _, pair in sorted(found, key=lambda item: item[0])]
