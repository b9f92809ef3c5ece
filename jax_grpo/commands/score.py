"""Log-probs of given completions by the training path.

    python -m jax_grpo score --model=MODEL --completions=FILE.jsonl --out=FILE.jsonl

Reads the lines that `generate` writes (prompt_ids and token_ids are what it needs), adds
scored_logps to each, and says how far they are from the line's logps where it has some.
"""

from __future__ import annotations

import functools
import itertools
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
from jax_grpo.data import Prompts, given_rollout, prompt_batch
from jax_grpo.rows import load_rows
from jax_grpo.scoring import plan, score
from jax_grpo.sharding import batch_shards, make_mesh, put_batch

Row = dict[str, Any]


def define_flags(values: flags.FlagValues, line: Sequence[str]) -> None:
    """Defines the flags of this command; they are the same for every command line."""
    del line
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    whole = functools.partial(flags.DEFINE_integer, flag_values=values)
    text("model", None, "A Hugging Face directory or hub id, a GGUF file, or a workdir.")
    text("completions", None, "The lines that `generate` wrote.")
    text("out", None, "Where the JSON lines go.")
    text("dtype", "auto", "auto, float32 or bfloat16.")
    whole("batch", 8, "Prompts at a time.", lower_bound=1)
    whole("tensor", 1, "Devices that share each matrix product.", lower_bound=1)
    flags.DEFINE_float("temperature", 1.0, "Of the softmax; above 0.", flag_values=values)
    for name in ("model", "completions", "out"):
        flags.mark_flag_as_required(name, flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Scores; returns the exit code."""
    with refusing_bad_input():
        check_out(values.out)
        if not 0 < values.temperature < math.inf:
            raise ValueError(f"--temperature is {values.temperature}: it must be above 0")
        mesh = make_mesh(data=-1, fsdp=1, tensor=values.tensor)
        dtype = compute_dtype(values.dtype)
        rows = load_rows(values.completions, columns=("prompt_ids", "token_ids"))
        model = load(values.model, mesh, dtype)
        _check(rows, model.config.vocab_size, model.config.max_position_embeddings)

    # Completions of one prompt are one group: the prompt is run once.
    same = itertools.groupby(rows, key=lambda row: row["prompt_ids"])
    groups = [list(group) for _, group in same]
    prompts = Prompts([group[0]["prompt_ids"] for group in groups], [], [], 0)
    L = max(len(ids) for ids in prompts.token_ids)
    C = max(1, *(len(row["token_ids"]) for row in rows))
    G = max(len(group) for group in groups)
    size = pad_to_multiple(min(values.batch, len(groups)), batch_shards(mesh))
    scorer = jax.jit(functools.partial(score, model.config, chunk=16))
    gaps: list[np.ndarray] = []

    def lines() -> Iterator[Row]:
        for start in range(0, len(groups), size):
            at = np.arange(start, start + size) % len(groups)
            ids = [[row["token_ids"] for row in groups[i]] for i in at]
            ids[0] += [[]] * (G - len(ids[0]))
            batch = prompt_batch(prompts, at, L)
            rollout = put_batch(given_rollout(batch, ids, C, values.temperature), mesh)
            logps = jax.device_get(scorer(model.params, plan(rollout)).logps)
            for p, i in enumerate(at[: len(groups) - start]):
                for g, row in enumerate(groups[i]):
                    scored = logps[p, g, : len(row["token_ids"])]
                    if "logps" in row:
                        gaps.append(np.abs(scored - np.asarray(row["logps"], np.float32)))
                    yield {**row, "scored_logps": [float(x) for x in scored]}

    with refusing_bad_input((OSError,)), jax.set_mesh(mesh):
        count = write_lines(values.out, lines())
    print(f"{count} completions in {values.out}", file=sys.stderr)
    if gaps and (gap := np.concatenate(gaps)).size:
        print(f"|logps - scored_logps|: mean {gap.mean():.3g}, largest {gap.max():.3g} nats")
    return 0


def _check(rows: list[Row], vocab_size: int, context: int) -> None:
    """Refuses lines that cannot be scored, naming the first."""
    for number, row in enumerate(rows, 1):
        for name in ("prompt_ids", "token_ids"):
            ids = row[name]
            whole = isinstance(ids, list) and all(type(i) is int for i in ids)
            if not whole or not all(0 <= i < vocab_size for i in ids):
                raise ValueError(f"line {number}: {name} are not token ids below {vocab_size}")
        if not row["prompt_ids"]:
            raise ValueError(f"line {number}: prompt_ids are empty")
        if len(row["prompt_ids"]) + len(row["token_ids"]) > context:
            raise ValueError(f"line {number}: longer than the model's context of {context}")
        logps = row.get("logps", [0.0] * len(row["token_ids"]))
        numbers = isinstance(logps, list) and all(type(x) in (int, float) for x in logps)
        if not numbers or len(logps) != len(row["token_ids"]):
            raise ValueError(f"line {number}: logps are not one number for each of token_ids")
