"""Rows and reward functions from a config's sections, for stages and evaluation alike."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jax_grpo import data as rows_to_tokens
from jax_grpo.commands.common import check_types
from jax_grpo.encoding import split_conversation, split_pair
from jax_grpo.evaluate import Verifiers
from jax_grpo.models import hf
from jax_grpo.rewards.naming import import_object, resolve
from jax_grpo.rows import Row, load_rows
from jax_grpo.stages import Model

Encoding = dict[str, Any]


def build_verifiers(section: Mapping[str, Mapping[str, Any]]) -> Verifiers:
    """Reward functions from a section: for each name its settings.

    `function` is a short name, a dotted path or `file.py:name` (the section's name if left out),
    `weight` its weight in the total reward; the rest are keyword arguments of the function.
    """
    functions, weights = [], []
    for name, settings in section.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"rewards.{name} is {settings!r} and not a section of settings")
        rest = {k: v for k, v in settings.items() if v is not None}
        weights.append(rest.pop("weight", 1.0))
        if not isinstance(weights[-1], int | float):
            raise ValueError(f"rewards.{name}.weight is {weights[-1]!r} and not a number")
        reward = resolve(rest.pop("function", name), **rest)
        check_types(reward.func if isinstance(reward, functools.partial) else reward, rest)
        functions.append(reward)
    if not functions:
        raise ValueError("at least one reward is needed")
    return Verifiers(tuple(functions), tuple(section), tuple(weights))


def load_prompts(
    section: Mapping[str, Any], model: Model, prompt_length: int, limit: int = 0
) -> rows_to_tokens.Prompts:
    """Rows of a data section, encoded as prompts.

    Args:
      section: `path` or `source` of rows, and `chat`, `system`, `template`; see data.py.
      model: whose tokenizer it is.
      prompt_length: L; a longer prompt is dropped.
      limit: how many rows; 0 is all.
    """
    rows, encoding = _load(section, ("prompt",))
    return rows_to_tokens.encode_prompts(
        rows[: limit or None], model.tokenizer, prompt_length, **encoding
    )


def load_demonstrations(
    section: Mapping[str, Any], model: Model, prompt_length: int, completion_length: int, group: int
) -> rows_to_tokens.Demonstrations:
    """Rows of a data section, encoded to learn from.

    Args:
      section: as of `load_prompts`.
      model: whose tokenizer it is.
      prompt_length: L.
      completion_length: C; a longer row is dropped.
      group: 1 for rows with a completion, 2 for those with a chosen and a rejected one.
    """
    rows, encoding = _load(section, ())
    encode = rows_to_tokens.encode_pairs if group == 2 else rows_to_tokens.encode_demonstrations
    first = split_pair(rows[0], 0) if group == 2 else split_conversation(rows[0], 0)
    chat = encoding.get("chat") or not isinstance(first.get("prompt", ""), str)
    turn = hf.end_of_turn(model.tokenizer) if chat else None
    end_id = model.tokenizer.eos_token_id if turn is None else turn
    return encode(rows, model.tokenizer, end_id, prompt_length, completion_length, **encoding)


def _load(section: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[list[Row], Encoding]:
    """Rows, and how they are to be encoded."""
    given = {k: v for k, v in section.items() if v is not None}
    keys = ("chat", "system", "template")
    encoding: Encoding = {k: given.pop(k) for k in keys if k in given}
    check_types(rows_to_tokens.encode_prompts, encoding)
    check_types(load_rows, given)
    if "source" in given:
        settings = {k: v for k, v in given.items() if k not in ("source", "path", "rename")}
        check_types(import_object(given["source"]), settings)
    columns = (*columns, *given.pop("columns", ()))
    rows = load_rows(**given, columns=columns)
    kinds = {isinstance(row.get("prompt"), str) for row in rows}
    if len(kinds) > 1:
        raise ValueError("some prompts are text and some are chats: a data set has one kind")
    return rows, encoding


def check_positive(**counts: int) -> None:
    """Refuses a count that is less than 1, by its name."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_context(model: Model, prompt: int, completion: int) -> None:
    """Refuses lengths that the model's positions do not hold."""
    check_positive(max_prompt_length=prompt, max_completion_length=completion)
    context = model.config.max_position_embeddings
    if prompt + completion > context:
        raise ValueError(
            f"a prompt of {prompt} and a completion of {completion} tokens exceed the model's "
            f"context of {context}"
        )
