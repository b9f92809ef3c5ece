"""Rows to prompts and completions in tokens, and a stateless index from (seed, step).

Which rows a step takes is a pure function of (seed, step). Nothing about the data is ever saved or
restored, and every host builds the same batch.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_grpo.encoding import (
    Messages,
    Row,
    as_chat,
    completion_of,
    encode,
    encode_turns,
    join,
    margin_of,
    prompt_of,
    rendered,
    split_conversation,
    split_pair,
    turns,
)
from jax_grpo.rewards.naming import RESERVED
from jax_grpo.types import PromptBatch, Rewards, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class Prompts(NamedTuple):
    """The prompts that fit, as they are encoded and as rewards see them."""

    token_ids: list[list[int]]
    prompts: list[str | Messages]  # text where the row has text, messages where it has messages
    rows: list[Row]
    dropped: int  # longer than the limit


class Demonstrations(NamedTuple):
    """Prompts with completions to learn from: one each, or two, the chosen before the rejected."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[list[int]]]  # G for each prompt, end tokens included
    rows: list[Row]
    dropped: int  # longer than the limits
    counts: list[list[list[bool]]] | None = None  # which of their tokens count; None is all
    rewards: list[list[float]] | None = None  # what the data say each is worth; None is nothing


# ------------------------------------------------------------------------------------ indexing


def row_indices(seed: int | Sequence[int], step: int, num_rows: int, count: int) -> np.ndarray:
    """Rows of a step: shuffled epochs without replacement, one after the other.

    Args:
        seed: an int or several, not negative.
        step: from 0.
        num_rows: rows of the data set.
        count: rows of a step; may cross the end of an epoch, or be more than `num_rows`.

    Returns:
        int32 [count].

    >>> both = np.concatenate([row_indices(0, step, 6, 3) for step in (0, 1)])
    >>> sorted(both.tolist())
    [0, 1, 2, 3, 4, 5]
    """
    if num_rows < 1 or count < 1 or step < 0:
        raise ValueError(f"no rows to take: {num_rows=}, {count=}, {step=}")
    seeds = (seed,) if isinstance(seed, int | np.integer) else tuple(seed)
    first, last = step * count, (step + 1) * count
    parts = []
    for epoch in range(first // num_rows, (last - 1) // num_rows + 1):
        order = np.random.default_rng((*seeds, epoch)).permutation(num_rows)
        start = epoch * num_rows
        parts.append(order[max(first - start, 0) : last - start])
    return np.concatenate(parts).astype(np.int32)


def num_steps(num_rows: int, count: int, epochs: float = 1.0) -> int:
    """Least number of steps of `count` rows that covers the epochs.

    >>> num_steps(num_rows=10, count=4)
    3
    """
    return int(np.ceil(num_rows * epochs / count))


# ------------------------------------------------------------------------------------ encoding


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    chat: bool = False,
    system: str | None = None,
    template: str | None = None,
) -> Prompts:
    r"""Encode the column `prompt` of each row; prompts that are too long are dropped and counted.

    Text is encoded with the tokenizer's special tokens (never a second start token), messages
    by its chat template with the generation prompt.

    Args:
        rows: dicts with a `prompt`, which is text or a list of messages.
        tokenizer: of transformers.
        max_prompt_length: in tokens.
        chat: put a text through the chat template, as the user's turn.
        system: a system message before messages that have none.
        template: makes the text from the row's columns by `str.format`, such as
            "{prompt} Put the answer in \boxed{{}}".

    Raises:
        ValueError: one line, when rows do not fit these options or no prompt is short enough.
    """
    prompts = [prompt_of(row, i, template) for i, row in enumerate(rows)]
    chats = [as_chat(prompt, chat, system) for prompt in prompts]
    texts = [rendered(shown, i, tokenizer) for i, shown in enumerate(chats)]
    ids = encode(texts, tokenizer, [isinstance(shown, str) for shown in chats])
    _check_not_empty(ids)
    keep = [i for i, row_ids in enumerate(ids) if len(row_ids) <= max_prompt_length]
    dropped = _report_dropped(len(rows), keep, f"prompts longer than {max_prompt_length} tokens")
    return Prompts(
        [ids[i] for i in keep], [prompts[i] for i in keep], [rows[i] for i in keep], dropped
    )


def encode_demonstrations(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    max_prompt_length: int,
    max_completion_length: int,
    *,
    chat: bool = False,
    system: str | None = None,
    template: str | None = None,
) -> Demonstrations:
    """Encode the columns `prompt` and `completion`, or `messages`; too long rows are dropped.

    Only what the assistant says counts, each turn with its end token.

    Args:
        rows: dicts with a `prompt` (as for `encode_prompts`) and a `completion`, which is text
            or a list of messages that begins and ends with the assistant's; or, instead of both,
            with `messages`, of which all before the assistant's first are the prompt.
        tokenizer: of transformers.
        end_id: the token that generation stops on; each turn ends with it.
        max_prompt_length: in tokens.
        max_completion_length: in tokens, all turns and end tokens included.
        chat: as for `encode_prompts`.
        system: as for `encode_prompts`.
        template: as for `encode_prompts`; of the prompt only.

    Raises:
        ValueError: one line, when rows do not fit these options or no row is short enough.
    """
    explicit = [split_conversation(row, i) for i, row in enumerate(rows)]
    options = (tokenizer, end_id, chat, system, template)
    shown = _encode_groups(explicit, ("completion",), *options)
    return _drop_long(shown, max_prompt_length, max_completion_length)


def encode_pairs(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    max_prompt_length: int,
    max_completion_length: int,
    *,
    chat: bool = False,
    system: str | None = None,
    template: str | None = None,
) -> Demonstrations:
    """Encode the columns `prompt`, `chosen` and `rejected` as groups of two, the chosen first.

    Dropped are rows that are too long, and those whose completions are the same tokens: they
    teach nothing.

    Args:
        rows: dicts with a `prompt`, `chosen` and `rejected`, each as prompt and completion of
            `encode_demonstrations`; or with whole conversations as `chosen` and `rejected`, whose
            first messages, as far as they are the same, are the prompt. A number `margin`, by
            which the chosen one is better, becomes its reward; all rows have it, or none.
        tokenizer: of transformers.
        end_id: as for `encode_demonstrations`.
        max_prompt_length: in tokens.
        max_completion_length: in tokens, of each of the two.
        chat: as for `encode_prompts`.
        system: as for `encode_prompts`.
        template: as for `encode_prompts`; of the prompt only.

    Raises:
        ValueError: one line, when rows do not fit these options or none is left.
    """
    explicit = [split_pair(row, i) for i, row in enumerate(rows)]
    options = (tokenizer, end_id, chat, system, template)
    shown = _encode_groups(explicit, ("chosen", "rejected"), *options)
    if any("margin" in row for row in rows):
        shown = shown._replace(rewards=[[margin_of(row, i), 0.0] for i, row in enumerate(rows)])
    distinct = [i for i, (a, b) in enumerate(shown.completion_ids) if a != b]
    shown = _take(shown, distinct, "pairs whose two completions are the same: they teach nothing")
    return _drop_long(shown, max_prompt_length, max_completion_length)


def _encode_groups(
    rows: Sequence[Row],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    chat: bool,
    system: str | None,
    template: str | None,
) -> Demonstrations:
    """Encode the completions of those names of each row, as a group; nothing is dropped."""
    end = str(tokenizer.convert_ids_to_tokens(end_id))
    found = []  # the turns of all completions, a group after the other
    for i, row in enumerate(rows):
        shown = as_chat(prompt_of(row, i, template), chat, system)
        found += [turns(shown, completion_of(row, n, i), i, tokenizer, end) for n in names]
    encoded = iter(encode_turns([turn for said in found for turn in said], tokenizer))
    joined = [join(list(itertools.islice(encoded, len(said))), end_id) for said in found]
    groups = [joined[i : i + len(names)] for i in range(0, len(joined), len(names))]
    prompt_ids = [group[0][0] for group in groups]
    _check_not_empty(prompt_ids)
    completion_ids = [[ids for _, ids, _ in group] for group in groups]
    counts = [[counted for _, _, counted in group] for group in groups]
    all_count = all(len(said) == 1 for said in found)
    return Demonstrations(prompt_ids, completion_ids, list(rows), 0, None if all_count else counts)


def _check_not_empty(prompt_ids: Sequence[list[int]]) -> None:
    for i, ids in enumerate(prompt_ids):
        if not ids:
            raise ValueError(f"the prompt of row {i} is empty")


def _drop_long(shown: Demonstrations, prompt: int, completion: int) -> Demonstrations:
    """Leave out rows whose prompt or a completion is longer than the limit."""
    keep = [
        i
        for i, (ids, group) in enumerate(zip(shown.prompt_ids, shown.completion_ids, strict=True))
        if len(ids) <= prompt and max(map(len, group)) <= completion
    ]
    limits = f"{prompt} tokens or completions longer than {completion}"
    return _take(shown, keep, f"rows with prompts longer than {limits}")


def _take(shown: Demonstrations, keep: Sequence[int], what: str) -> Demonstrations:
    """The rows `keep`; of the others the log says what they are."""
    dropped = shown.dropped + _report_dropped(len(shown.rows), keep, what)
    chosen = {
        name: [values[i] for i in keep]
        for name, values in shown._asdict().items()
        if isinstance(values, list)
    }
    return shown._replace(**chosen, dropped=dropped)


def _report_dropped(count: int, keep: Sequence[int], what: str) -> int:
    """Warn of rows that are dropped; refuse when none is left."""
    dropped = count - len(keep)
    if not keep:
        raise ValueError(f"no rows left: dropped all {count} {what}" if count else "no rows")
    if dropped:
        log.warning("dropped %d of %d %s", dropped, count, what)
    return dropped


# --------------------------------------------------------------------------- the step's arrays


def prompt_batch(prompts: Prompts, indices: np.ndarray, length: int) -> PromptBatch:
    """Lay out the prompts of a step as NumPy arrays.

    Args:
        prompts: of `encode_prompts`.
        indices: int [P], rows of `prompts`. Where a step has one twice (at the end of an epoch),
            the second goes by another number, as rows decide the sampler's draws.
        length: L, at least the longest prompt's.
    """
    seen: Counter[int] = Counter()
    distinct = np.zeros(len(indices), np.int32)
    for place, i in enumerate(int(i) for i in indices):
        distinct[place] = i + seen[i] * len(prompts.token_ids)
        seen[i] += 1
    return _prompt_batch([prompts.token_ids[i] for i in indices], distinct, length)


def demonstration_rollout(
    demonstrations: Demonstrations, indices: np.ndarray, prompt_length: int, completion_length: int
) -> Rollout:
    """Lay out the demonstrations of a step as a rollout, with a hole where a token does not count.

    Args:
        demonstrations: of `encode_demonstrations` or `encode_pairs`.
        indices: int [P], rows of `demonstrations`.
        prompt_length: L.
        completion_length: C.

    Returns:
        A rollout of NumPy arrays, [P, G, C]; log-probs are 0, as the data set spoke.
    """
    prompts = _prompt_batch([demonstrations.prompt_ids[i] for i in indices], indices, prompt_length)
    groups = [demonstrations.completion_ids[i] for i in indices]
    rollout = given_rollout(prompts, groups, completion_length)
    if demonstrations.counts is None:
        return rollout
    counts, _ = _padded([c for i in indices for c in demonstrations.counts[i]], completion_length)
    mask: Any = counts.reshape(rollout.mask.shape).astype(bool)
    return rollout._replace(mask=mask)


def demonstration_rewards(demonstrations: Demonstrations, indices: np.ndarray) -> Rewards:
    """What the data say that the completions of a step are worth, as NumPy arrays.

    Args:
        demonstrations: of `encode_demonstrations` or `encode_pairs`.
        indices: int [P], rows of `demonstrations`.

    Returns:
        Rewards [P, G, 1], all valid; [P, G, 0] where the data say nothing.
    """
    if demonstrations.rewards is None:
        values = np.zeros((len(indices), len(demonstrations.completion_ids[0]), 0), np.float32)
    else:
        values = np.array([demonstrations.rewards[i] for i in indices], np.float32)[..., None]
    return Rewards(values, np.ones(values.shape, bool))


def given_rollout(
    prompts: PromptBatch,
    groups: Sequence[Sequence[Sequence[int]]],
    completion_length: int,
    temperature: float = 1.0,
) -> Rollout:
    """Lay out completions that are given, end tokens included, as a rollout.

    Args:
        prompts: P of them.
        groups: the completions of each, G or fewer; missing ones are empty.
        completion_length: C.
        temperature: at which they are to be scored.

    Returns:
        A rollout of NumPy arrays, [P, G, C]; log-probs are 0.
    """
    size = max(len(group) for group in groups)
    flat = [list(ids) for group in groups for ids in [*group, *[[]] * (size - len(group))]]
    completion_ids, lengths = _padded(flat, completion_length)
    shape = (len(groups), size)
    lengths = lengths.reshape(shape)
    silent = np.zeros((*shape, completion_length), np.float32)
    arrays: dict[str, Any] = {  # Any: the records are annotated with the arrays of devices
        "completion_ids": completion_ids.reshape(*shape, completion_length),
        "lengths": lengths,
        "mask": np.arange(completion_length) < lengths[..., None],
        "behavior_logps": silent,
        "kept_logmass": silent.copy(),
        "truncated": np.zeros(shape, bool),
        "temperature": np.float32(temperature),
    }
    return Rollout(prompts=prompts, **arrays)


def _prompt_batch(
    token_ids: Sequence[Sequence[int]], indices: np.ndarray, length: int
) -> PromptBatch:
    """Lay out chosen prompts, with the rows that they are."""
    arrays: Any = (*_padded(token_ids, length), np.asarray(indices, np.int32))
    return PromptBatch(*arrays)


def _padded(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [P, length] int32, padded with 0 on the right, and true lengths [P] int32."""
    token_ids = np.zeros((len(rows), length), np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise ValueError(f"{len(row)} tokens do not fit in {length}")
        token_ids[i, : len(row)] = row
    return token_ids, lengths


# ------------------------------------------------------------------------------ back to text


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[Sequence[int]]
) -> list[str]:
    """Decode completions for the verifiers; special tokens are left out, nothing is tidied."""
    return tokenizer.batch_decode(
        [list(ids) for ids in completion_ids],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def reward_arguments(
    prompts: Prompts, indices: np.ndarray, texts: Sequence[str]
) -> tuple[list[str | Messages], list[str | Messages], dict[str, list[Any]]]:
    """What rewards get for G completions of each of P prompts, in lists of P * G.

    Args:
        prompts: of `encode_prompts`.
        indices: int [P], rows of `prompts` as `prompt_batch` numbers them.
        texts: P * G completions, a group after the other.

    Returns:
        prompts: as the data have them.
        completions: text, or a list of one assistant message where the prompt is messages.
        columns: every other column of the rows; None where a row lacks it.
    """
    group, rest = divmod(len(texts), len(indices))
    if rest:
        raise ValueError(f"{len(texts)} completions for {len(indices)} prompts")
    repeated = [int(i) % len(prompts.rows) for i in indices for _ in range(group)]
    shown = [prompts.prompts[i] for i in repeated]
    completions: list[str | Messages] = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(shown, texts, strict=True)
    ]
    rows = [prompts.rows[i] for i in repeated]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {
        name: [row.get(name) for row in rows]
        for name in names
        if name not in ("prompt", "completion", *RESERVED)
    }
    return shown, completions, columns
