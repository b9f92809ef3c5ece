"""Samples completions of a model to JSON lines.

    python -m jax_grpo generate --model=MODEL --prompts=FILE.jsonl --out=FILE.jsonl

MODEL is a Hugging Face directory or hub id, a GGUF file, or a workdir. Each row of the prompts has
a "prompt", text or messages; each line that comes out is one completion: prompt_index,
completion_index, text, token_ids, logps, prompt_ids, finish_reason. token_ids and logps include
the end token; logps are of the full softmax at the temperature (1 when greedy).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from jax_grpo.commands import refusing_bad_input
from jax_grpo.commands.common import (
    check_out,
    compute_dtype,
    load,
    pad_to_multiple,
    write_lines,
)
from jax_grpo.data import completion_texts, encode_prompts, prompt_batch
from jax_grpo.rollout import generate, make_sampling_copy
from jax_grpo.rows import load_rows
from jax_grpo.sampling import Truncation, purpose_key
from jax_grpo.sharding import batch_shards, make_mesh, put_batch

GENERATION = 2  # the purpose, as a part of sampling keys; train has 0 and 1


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command; they are the same for every command line."""
    del line
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    whole = functools.partial(flags.DEFINE_integer, flag_values=values)
    real = functools.partial(flags.DEFINE_float, flag_values=values)
    text("model", None, "A Hugging Face directory or hub id, a GGUF file, or a workdir.")
    text("prompts", None, "Rows with a prompt: .jsonl, .json, .csv or .parquet.")
    text("out", None, "Where the JSON lines go.")
    text("dtype", "auto", "auto, float32 or bfloat16.")
    text("system", None, "A system message before each chat.")
    whole("num_generations", 8, "Completions per prompt.", lower_bound=1)
    whole("max_new_tokens", 64, "Limit on the tokens of a completion.", lower_bound=1)
    seed = "The same seed gives the same completions."
    whole("seed", 0, seed, lower_bound=0, upper_bound=2**32 - 1)
    whole("top_k", 0, "Draw from the k most likely tokens; 0 is all.")
    whole("batch", 32, "Prompts at a time.", lower_bound=1)
    whole("tensor", 1, "Devices that share each matrix product.", lower_bound=1)
    real("temperature", 1.0, "Above 0.")
    real("top_p", 1.0, "Draw from the fewest tokens whose mass reaches p.")
    real("min_p", 0.0, "Draw from tokens at least min_p times as likely as the likeliest.")
    flags.DEFINE_bool("greedy", False, "Take the likeliest token.", flag_values=values)
    flags.DEFINE_bool("chat", False, "Put texts through the chat template.", flag_values=values)
    for name in ("model", "prompts", "out"):
        flags.mark_flag_as_required(name, flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Generates; returns the exit code."""
    with refusing_bad_input():
        check_out(values.out)
        if not 0 < values.temperature < math.inf:
            raise ValueError(f"--temperature is {values.temperature}: above 0, or use --greedy")
        truncation = Truncation(values.top_k, values.top_p, values.min_p)
        mesh = make_mesh(data=-1, fsdp=1, tensor=values.tensor)
        dtype = compute_dtype(values.dtype)
        rows = load_rows(values.prompts, columns=("prompt",))
        model = load(values.model, mesh, dtype)
        limit = model.config.max_position_embeddings - values.max_new_tokens
        if limit < 1:
            raise ValueError(
                f"--max_new_tokens={values.max_new_tokens} exceeds the model's context"
            )
        prompts = encode_prompts(
            [{**row, "prompt_index": i} for i, row in enumerate(rows)],
            model.tokenizer,
            limit,
            chat=values.chat,
            system=values.system,
        )

    sampler = jax.jit(
        functools.partial(
            generate,
            model.config,
            end_ids=model.end_ids,
            num_generations=values.num_generations,
            max_completion_length=values.max_new_tokens,
            truncation=truncation,
            greedy=values.greedy,
        )
    )
    key = purpose_key(values.seed, 0, GENERATION, 0)
    index = np.array([row["prompt_index"] for row in prompts.rows])
    length = max(len(ids) for ids in prompts.token_ids)
    size = pad_to_multiple(min(values.batch, len(index)), batch_shards(mesh))

    def lines() -> Iterator[dict[str, Any]]:
        params = make_sampling_copy(model.config, mesh, dtype)(model.params)
        for start in range(0, len(index), size):
            at = np.arange(start, start + size) % len(index)
            rows_at: Any = index[at].astype(np.int32)
            batch = prompt_batch(prompts, at, length)._replace(rows=rows_at)
            rollout = sampler(
                params, put_batch(batch, mesh), key, values.temperature, values.max_new_tokens
            )
            rollout = jax.device_get(rollout)
            for p, row in enumerate(at[: len(index) - start]):
                for g in range(values.num_generations):
                    n = int(rollout.lengths[p, g])
                    ids = rollout.completion_ids[p, g, :n].tolist()
                    yield {
                        "prompt_index": int(index[row]),
                        "completion_index": g,
                        "text": completion_texts(model.tokenizer, [ids])[0],
                        "token_ids": ids,
                        "logps": [float(x) for x in rollout.behavior_logps[p, g, :n]],
                        "prompt_ids": list(prompts.token_ids[row]),
                        "finish_reason": "length" if rollout.truncated[p, g] else "stop",
                    }

    with refusing_bad_input((OSError,)), jax.set_mesh(mesh):
        count = write_lines(values.out, lines())
    print(f"{count} completions in {values.out}", file=sys.stderr)
    return 0
