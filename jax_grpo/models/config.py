"""The shape of a Llama: one frozen record, its presets, and its Hugging Face spelling.

A `config.json` is read strictly. Every attribute is either used, or known not to change what the
model computes, or refused by name: a model that runs with an attribute ignored gives numbers that
look right and are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `dynamic` equals no scaling up to `max_position_embeddings`, which is as far as we go.
    """

    kind: Literal["linear", "dynamic", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as the two below
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A decoder of the Llama family (qwen2 is this with biases on q, k and v)."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int
    num_layers: int  # N
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Refuses shapes that no decoder has."""
        for field in dataclasses.fields(self)[:8]:
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} is not positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide by {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and rotary pairs need it even")


def _preset(
    V: int, D: int, F: int, N: int, heads: tuple[int, int], context: int, **rest: Any
) -> LlamaConfig:
    H, K = heads
    return LlamaConfig(V, D, F, N, H, K, D // H, context, **{"rms_norm_eps": 1e-5, **rest})


def _llama3(
    D: int, F: int, N: int, heads: tuple[int, int], factor: float = 0, **rest: Any
) -> LlamaConfig:
    scaling = RopeScaling("llama3", factor) if factor else None
    rest = {"rope_theta": 500000.0, "rope_scaling": scaling, **rest}
    return _preset(128256, D, F, N, heads, 131072 if factor else 8192, **rest)


_SMOL: dict[str, Any] = {"rope_theta": 100000.0, "tie_word_embeddings": True}

# As their authors published them. The quickstart replaces `vocab_size` of `tiny`.
PRESETS: Mapping[str, LlamaConfig] = {
    "tiny": _preset(32, 128, 384, 2, (4, 4), 512, tie_word_embeddings=True, initializer_range=0.06),
    "smollm2-135m": _preset(49152, 576, 1536, 30, (9, 3), 8192, initializer_range=1 / 24, **_SMOL),
    "smollm2-360m": _preset(49152, 960, 2560, 32, (15, 5), 8192, **_SMOL),
    "smollm2-1.7b": _preset(
        49152, 2048, 8192, 24, (32, 32), 8192, **{**_SMOL, "rope_theta": 130000.0}
    ),
    "tinyllama-1.1b": _preset(32000, 2048, 5632, 22, (32, 4), 2048),
    "llama2-7b": _preset(32000, 4096, 11008, 32, (32, 32), 4096),
    "llama3-8b": _llama3(4096, 14336, 32, (32, 8)),
    "llama3.1-8b": _llama3(4096, 14336, 32, (32, 8), 8.0),
    "llama3.1-70b": _llama3(8192, 28672, 80, (64, 8), 8.0),
    "llama3.1-405b": _llama3(16384, 53248, 126, (128, 8), 8.0),
    "llama3.2-1b": _llama3(2048, 8192, 16, (32, 8), 32.0, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(3072, 8192, 28, (24, 8), 32.0, tie_word_embeddings=True),
}

# What `config_from_hf` reads.
_USED = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rope_theta rope_scaling rope_parameters "
    "rms_norm_eps tie_word_embeddings attention_bias mlp_bias initializer_range".split()
)

# What cannot change a logit: names, dtypes on disk, token ids, defaults for text generation.
_METADATA = frozenset(
    "_name_or_path name_or_path architectures transformers_version torch_dtype dtype use_cache "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id "
    "tokenizer_class prefix task_specific_params finetuning_task problem_type id2label label2id "
    "num_labels _num_labels _attn_implementation attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal _commit_hash output_attentions output_hidden_states "
    "output_scores return_dict return_dict_in_generate use_return_dict tie_last_hidden_states "
    "torchscript tf_legacy_loss use_bfloat16 is_decoder max_sequence_length model_max_length "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p min_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty is_llama_config unsloth_fixed "
    "unsloth_version transformers.js_config max_window_layers".split()
)

# What would change the result, and the values with which it does not: transformers' defaults.
_INERT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "per_layer_config": (None, {}),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (0, None),
}

_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def config_from_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """Reads the content of a Hugging Face `config.json`.

    Args:
      raw: the JSON object, of `model_type` llama or qwen2, written by transformers 4 or 5.

    Returns:
      The configuration.

    Raises:
      ValueError: for what is missing, malformed or would change the result in a way that this
        decoder does not know; one message names all of it.
    """
    kind = raw.get("model_type")
    if kind not in ("llama", "qwen2"):
        raise ValueError(f"model_type {kind!r} is not one of: llama, qwen2")
    problems = _unknown_attributes(raw, kind)
    size = {key: _number(raw, key, None, problems) for key in _SIZES}
    D, H = size["hidden_size"], size["num_attention_heads"]
    if raw.get("head_dim") is None and D % H:
        problems.append(f"head_dim is missing, and {H} heads do not divide hidden_size={D}")
    theta, scaling = _read_rope(raw, problems)
    attention_bias = _flag(raw, "attention_bias", problems)
    fields: dict[str, Any] = {_SIZES[key]: value for key, value in size.items()} | {
        "num_kv_heads": _number(raw, "num_key_value_heads", H, problems),
        "head_dim": _number(raw, "head_dim", D // H or 1, problems),
        "max_position_embeddings": _number(
            raw, "max_position_embeddings", 2048 if kind == "llama" else 32768, problems
        ),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": _number(raw, "rms_norm_eps", 1e-6, problems, float),
        "tie_word_embeddings": _flag(raw, "tie_word_embeddings", problems),
        "qkv_bias": attention_bias or kind == "qwen2",
        "o_bias": attention_bias,
        "mlp_bias": _flag(raw, "mlp_bias", problems),
        "initializer_range": _number(raw, "initializer_range", 0.02, problems, float),
    }
    if kind == "qwen2" and (attention_bias or fields["mlp_bias"]):
        problems.append("attention_bias or mlp_bias, which qwen2 does not have")
    if problems:
        raise ValueError(f"this model configuration cannot be used: {'; '.join(problems)}")
    return LlamaConfig(**fields)


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}


def _unknown_attributes(raw: Mapping[str, Any], kind: str) -> list[str]:
    """What the configuration says that is neither used nor known to be without effect."""
    unknown = []
    for key, value in raw.items():
        if key in _USED or key in _METADATA:
            continue
        if key == "sliding_window" and kind == "qwen2" and not raw.get("use_sliding_window"):
            continue
        if key == "layer_types" and all(x == "full_attention" for x in value or ()):
            continue
        if not any(value == inert for inert in _INERT_VALUES.get(key, ())):
            unknown.append(f"{key}={value!r}"[:100] + " is not supported")
    return unknown


def _number(
    raw: Mapping[str, Any], key: str, default: float | None, problems: list[str], kind: type = int
) -> Any:
    """A positive number of `kind`; it must be given where the default is None."""
    value = default if raw.get(key) is None else raw[key]
    accepted = (int,) if kind is int else (int, float)
    if value is None:
        problems.append(f"{key} is missing")
    elif isinstance(value, bool) or not isinstance(value, accepted):
        problems.append(f"{key}={value!r} is not {'an integer' if kind is int else 'a number'}")
    elif value <= 0:
        problems.append(f"{key}={value!r} is not positive")
    else:
        return kind(value)
    return kind(1)  # never seen: the problems are raised


def _flag(raw: Mapping[str, Any], key: str, problems: list[str]) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        problems.append(f"{key}={value!r} is neither true nor false")
    return bool(value)


def _read_rope(raw: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling from either spelling, or from both where they agree."""
    top = _number(raw, "rope_theta", 10000.0, problems, float)
    found = [_rope_dict(raw, key, top, problems) for key in ("rope_scaling", "rope_parameters")]
    said = [x for x in found if x is not None]
    if len(set(said)) > 1:
        problems.append("rope_scaling and rope_parameters disagree")
    theta, scaling = said[0] if said else (top, None)
    # transformers 4 believes the outer one, transformers 5 the inner one
    if raw.get("rope_theta") is not None and theta != top:
        problems.append(f"rope_theta={top} and the rotary parameters' {theta} disagree")
    return theta, scaling


def _rope_dict(
    raw: Mapping[str, Any], name: str, theta: float, problems: list[str]
) -> tuple[float, RopeScaling | None] | None:
    """Base and scaling of a `rope_scaling` or `rope_parameters` object; None where it is absent."""
    rope = raw.get(name)
    if not rope:
        return None
    if not isinstance(rope, Mapping):
        problems.append(f"{name}={rope!r} is not an object")
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KEYS:
        problems.append(f"{name} of type {kind!r} is not one of: {', '.join(_ROPE_KEYS)}")
        return None
    # transformers 4 fills in `original_max_position_embeddings` where only llama3 reads it
    known = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
    for key in sorted(set(rope) - known - set(_ROPE_KEYS[kind])):
        if key != "partial_rotary_factor" or rope[key] not in (1, None):
            problems.append(f"{name}.{key}={rope[key]!r} is not supported")
    base = _number(rope, "rope_theta", theta, problems, float)
    if kind == "default":
        return base, None
    wrong: list[str] = []
    values: dict[str, Any] = {}
    for key in _ROPE_KEYS[kind]:
        whole = key == "original_max_position_embeddings"
        values[key] = _number(rope, key, None, wrong, int if whole else float)
    problems.extend(f"{name}.{problem}" for problem in wrong)
    if kind == "llama3" and not wrong and values["low_freq_factor"] >= values["high_freq_factor"]:
        problems.append(f"{name}.low_freq_factor is not below high_freq_factor")
    return base, RopeScaling(kind, **values)


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The content of a `config.json`, in the spelling that transformers 4 and 5 both read.

    Raises:
      ValueError: for a combination of biases that neither llama nor qwen2 has.
    """
    c = config
    biases = (c.qkv_bias, c.o_bias, c.mlp_bias)
    if c.qkv_bias != c.o_bias and biases != (True, False, False):
        raise ValueError(f"no Hugging Face model has biases on (qkv, o, mlp) = {biases}")
    is_qwen2 = c.qkv_bias and not c.o_bias
    own = {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "pretraining_tp": 1}
    if is_qwen2:
        own = {"use_sliding_window": False}
    return {
        "architectures": ["Qwen2ForCausalLM" if is_qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if is_qwen2 else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": c.rope_theta,
        "rope_scaling": _rope_to_hf(c.rope_scaling),
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": c.initializer_range,
        "use_cache": True,
        **own,
    }


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": scaling.kind} | {k: getattr(scaling, k) for k in _ROPE_KEYS[scaling.kind]}
