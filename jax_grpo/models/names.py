"""How Hugging Face names, shapes and stores the parameters of a Llama, and its scalar head's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jax_grpo.models.config import LlamaConfig
from jax_grpo.models.heads import scalar_shapes
from jax_grpo.models.llama import param_shapes

EMBED, LM_HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
NAMES = {"embed": EMBED, "norm": "model.norm.weight", "head": LM_HEAD, "score": SCORE}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
}
# How many leading axes a matrix takes in; Hugging Face stores [out, in] with axes run together.
INPUT_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}

SAFETENSORS_DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def layer_name(layer: int, leaf: str) -> str:
    """The name under which Hugging Face stores a parameter of one layer."""
    return f"model.layers.{layer}.{LAYER_NAMES[leaf]}"


def hf_shape(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which Hugging Face stores a parameter, of one layer where it has layers."""
    if leaf == "score":
        return (1, *shape)  # a linear map to one label
    if leaf in INPUT_AXES:
        split = INPUT_AXES[leaf]
        return math.prod(shape[split:]), math.prod(shape[:split])
    return shape if leaf in NAMES else (math.prod(shape),)


def expected_tensors(
    config: LlamaConfig, scalar_head: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The Hugging Face name and shape of every tensor of a model, in the order of the layers."""
    shapes = scalar_shapes(config) if scalar_head else param_shapes(config)
    layers = {leaf: hf_shape(leaf, x.shape[1:]) for leaf, x in shapes["layers"].items()}
    yield EMBED, hf_shape("embed", shapes["embed"].shape)
    for i in range(config.num_layers):
        yield from ((layer_name(i, leaf), shape) for leaf, shape in layers.items())
    for leaf in ("norm", "head", "score"):
        if leaf in shapes:
            yield NAMES[leaf], hf_shape(leaf, shapes[leaf].shape)
