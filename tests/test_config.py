from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jax_grpo.models.config import (
    PRESETS,
    LlamaConfig,
    RopeScaling,
    config_from_hf,
    config_to_hf,
)
from jax_grpo.models.llama import num_params

# As the model cards' safetensors have them.
PUBLISHED_SIZES = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(**changes: Any) -> LlamaConfig:
    return config_from_hf({k: v for k, v in (LLAMA | changes).items() if v is not ...})


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_presets_have_the_published_sizes(name: str) -> None:
    assert num_params(PRESETS[name]) == PUBLISHED_SIZES[name]


def test_tiny_is_tiny() -> None:
    assert num_params(PRESETS["tiny"]) <= 1_000_000
    assert set(PRESETS) == {"tiny", *PUBLISHED_SIZES}


def test_llama_3_2_1b_by_hand() -> None:
    c = PRESETS["llama3.2-1b"]
    assert (c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads) == (2048, 16, 32, 8)
    assert (c.head_dim, c.max_position_embeddings, c.tie_word_embeddings) == (64, 131072, True)
    assert c.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert c.rope_theta == 500000.0


@pytest.mark.parametrize("name", PRESETS)
def test_export_and_import_are_inverse_for_presets(name: str) -> None:
    assert config_from_hf(config_to_hf(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True},
        {"mlp_bias": True},
        {"head_dim": 6},
        {"rope_scaling": RopeScaling("linear", 2.0)},
        {"rope_scaling": RopeScaling("dynamic", 4.0)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 2.0, 3.0, 16)},
    ],
)
def test_export_and_import_are_inverse(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(read(), **changes)
    assert config_from_hf(config_to_hf(config)) == config


def test_biases_that_no_model_has_are_not_exported() -> None:
    config = dataclasses.replace(read(), o_bias=True)
    with pytest.raises(ValueError, match="no Hugging Face model has biases"):
        config_to_hf(config)


def test_what_is_left_out_is_derived() -> None:
    config = read(num_key_value_heads=..., max_position_embeddings=..., rope_theta=...)
    assert (config.num_kv_heads, config.head_dim) == (4, 4)
    assert (config.max_position_embeddings, config.rope_theta) == (2048, 10000.0)
    assert read(head_dim=10).head_dim == 10
    assert read(head_dim=None).head_dim == 4
    assert not config.tie_word_embeddings


def test_attention_bias_is_on_all_four() -> None:
    config = read(attention_bias=True, mlp_bias=True)
    assert config.qkv_bias and config.o_bias and config.mlp_bias


def test_qwen2() -> None:
    config = read(
        model_type="qwen2",
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=...,
    )
    assert config.qkv_bias and not config.o_bias and not config.mlp_bias
    assert config.max_position_embeddings == 32768


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_both_spellings_of_rope(kind: str, name: str) -> None:
    old = read(rope_scaling={name: kind, "factor": 2})
    new = read(
        rope_theta=..., rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 500000}
    )
    assert old == new
    assert old.rope_scaling == RopeScaling(kind, 2.0)  # type: ignore[arg-type]


def test_both_spellings_of_llama3_rope() -> None:
    old = read(rope_scaling=LLAMA3_ROPE)
    new = read(rope_theta=..., rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0})
    both = read(rope_scaling=LLAMA3_ROPE, rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0})
    assert old == new == both
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
)
def test_plain_rope(rope: dict[str, Any]) -> None:
    config = read(**rope)
    assert config.rope_scaling is None
    assert config.rope_theta == 500000.0


def test_metadata_and_inert_values_are_passed_over() -> None:
    noise = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": False,
        "transformers_version": "5.24.0",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "pretraining_tp": 1,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_interleaved": False,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "is_llama_config": True,
        "pruned_heads": {},
        "transformers.js_config": {"dtype": "q4"},
    }
    assert read(**noise) == read()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "disagree"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": "16"}, "hidden_size='16'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"hidden_size": 18}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError) as error:
        read(**changes)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_one_error_names_all() -> None:
    with pytest.raises(ValueError) as error:
        read(hidden_act="gelu", logit_scale=2.0, vocab_size=..., rope_scaling={"type": "yarn"})
    for name in ("hidden_act", "logit_scale", "vocab_size", "yarn"):
        assert name in str(error.value)
