"""Writes a model as a Hugging Face directory: safetensors, config, tokenizer.

python -m jax_grpo export --model=WORKDIR --out=DIR [--dtype=bfloat16]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax.numpy as jnp
from absl import flags

from jax_grpo.commands import refusing_bad_input
from jax_grpo.commands.common import open_model, open_reward_model
from jax_grpo.models import export
from jax_grpo.sharding import make_mesh


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command; they are the same for every command line."""
    del line
    flags.DEFINE_string(
        "model", None, "A workdir, a Hugging Face directory or a GGUF file.", flag_values=values
    )
    flags.DEFINE_string("out", None, "The directory to make.", flag_values=values)
    flags.DEFINE_string("dtype", "bfloat16", "float32, bfloat16 or float16.", flag_values=values)
    flags.DEFINE_bool(
        "reward_model", False, "Export the last reward model of a run.", flag_values=values
    )
    flags.DEFINE_bool("overwrite", False, "Replace what is in --out.", flag_values=values)
    for name in ("model", "out"):
        flags.mark_flag_as_required(name, flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Exports; returns the exit code."""
    with refusing_bad_input():
        if values.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"--dtype={values.dtype} is not one of: float32, bfloat16, float16")
        opener = open_reward_model if values.reward_model else open_model
        model = opener(values.model, make_mesh(fsdp=-1))
        export.export_model(
            values.out,
            model.config,
            model.read(),
            model.tokenizer,
            model.end_ids,
            jnp.dtype(values.dtype),
            overwrite=values.overwrite,
        )
    print(f"exported to {values.out}", file=sys.stderr)
    return 0
