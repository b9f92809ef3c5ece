"""Rows to token prompts, and a stateless index from (seed, step).

Which rows a step takes is a pure function of (seed, step). Nothing about the data is ever saved or
restored, and every host builds the same batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_grpo.rewards.contract import shorten
from jax_grpo.rewards.naming import RESERVED
from jax_grpo.types import PromptBatch, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Row = dict[str, Any]
Messages = list[dict[str, Any]]


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
    prompts, _, ids = _encode_prompt_column(rows, tokenizer, chat, system, template)
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
    """Encode the columns `prompt` and `completion`; rows that are too long are dropped.

    The completion is what follows the prompt in the encoding of both, where the prompt's tokens
    stay the same, and is encoded alone where not: the prompt ends where generation would start.

    Args:
        rows: dicts with a `prompt` (as for `encode_prompts`) and a `completion`, which is text
            or a list of one assistant message.
        tokenizer: of transformers.
        end_id: the token that generation stops on; each completion ends with it.
        max_prompt_length: in tokens.
        max_completion_length: in tokens, the end token included.
        chat: as for `encode_prompts`.
        system: as for `encode_prompts`.
        template: as for `encode_prompts`; of the prompt only.

    Raises:
        ValueError: one line, when rows do not fit these options or no row is short enough.
    """
    prompts, texts, prompt_ids = _encode_prompt_column(rows, tokenizer, chat, system, template)
    completions = [_completion(row, i) for i, row in enumerate(rows)]
    whole = [text + completion for text, completion in zip(texts, completions, strict=True)]
    whole_ids = _encode(whole, tokenizer, [_is_chat(prompt, chat) for prompt in prompts])
    alone_ids = _encode(completions, tokenizer, [True] * len(rows))
    completion_ids = []
    for before, both, alone in zip(prompt_ids, whole_ids, alone_ids, strict=True):
        ids = both[len(before) :] if both[: len(before)] == before else alone
        completion_ids.append(ids if ids[-1:] == [end_id] else [*ids, end_id])
    keep = [
        i
        for i in range(len(rows))
        if len(prompt_ids[i]) <= max_prompt_length
        and len(completion_ids[i]) <= max_completion_length
    ]
    limits = f"{max_prompt_length} tokens or completions longer than {max_completion_length}"
    dropped = _report_dropped(len(rows), keep, f"rows with prompts longer than {limits}")
    return Demonstrations(
        [prompt_ids[i] for i in keep],
        [completion_ids[i] for i in keep],
        [rows[i] for i in keep],
        dropped,
    )


def _encode_prompt_column(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    system: str | None,
    template: str | None,
) -> tuple[list[str | Messages], list[str], list[list[int]]]:
    """Prompts as rewards see them, as they are encoded, and their token ids."""
    prompts = [_prompt(row, i, template) for i, row in enumerate(rows)]
    texts = [_rendered(prompt, i, tokenizer, chat, system) for i, prompt in enumerate(prompts)]
    ids = _encode(texts, tokenizer, [_is_chat(prompt, chat) for prompt in prompts])
    for i, row_ids in enumerate(ids):
        if not row_ids:
            raise ValueError(f"the prompt of row {i} is empty")
    return prompts, texts, ids


def _prompt(row: Row, i: int, template: str | None) -> str | Messages:
    """The prompt of a row, after the template."""
    prompt = row.get("prompt")
    if template is not None:
        if isinstance(prompt, list):
            raise ValueError(f"a template is for text, but the prompt of row {i} is messages")
        try:
            return template.format(**row)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the prompt template does not work for row {i}, with {', '.join(row)}: "
                f"{type(error).__name__} {error} (a brace that stands for itself is written twice)"
            ) from None
    if "prompt" not in row:
        raise ValueError(f"row {i} has no column 'prompt'; it has: {', '.join(row) or 'none'}")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(_is_message(m) for m in prompt):
        raise ValueError(
            f"the prompt of row {i} is neither text nor a list of messages with role and content: "
            f"{shorten(prompt)}"
        )
    return prompt


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and "content" in message


def _completion(row: Row, i: int) -> str:
    """The text of a row's completion."""
    completion = row.get("completion")
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and len(completion) == 1 and _is_message(completion[0]):
        content = completion[0]["content"]
        if completion[0]["role"] == "assistant" and isinstance(content, str):
            return content
    what = "missing" if completion is None else shorten(completion)
    raise ValueError(f"the completion of row {i} is not text or one assistant message: {what}")


def _is_chat(prompt: str | Messages, chat: bool) -> bool:
    """Whether a prompt goes through the chat template, which writes special tokens itself."""
    return chat or isinstance(prompt, list)


def _rendered(
    prompt: str | Messages,
    i: int,
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    system: str | None,
) -> str:
    """The text of a prompt as it is encoded."""
    if not _is_chat(prompt, chat):
        if system is not None:
            raise ValueError("a system message needs messages as prompts, or chat=True")
        assert isinstance(prompt, str)
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not tokenizer.chat_template:
        raise ValueError(f"the prompt of row {i} is a chat, but the tokenizer has no chat template")
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # whatever a template raises: jinja's errors, or a TypeError
        raise ValueError(f"the chat template refuses the prompt of row {i}: {error}") from error
    assert isinstance(rendered, str)
    return rendered


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, chats: Sequence[bool]
) -> list[list[int]]:
    """Token ids of texts; special tokens are added to those that are no chats."""
    ids: list[list[int]] = [[] for _ in texts]
    for chat in (False, True):
        chosen = [i for i, is_chat in enumerate(chats) if is_chat == chat]
        if not chosen:
            continue
        encoded = tokenizer([texts[i] for i in chosen], add_special_tokens=not chat, verbose=False)
        for i, row_ids in zip(chosen, encoded["input_ids"], strict=True):
            ids[i] = list(row_ids) if chat else _one_start(list(row_ids), texts[i], tokenizer)
    return ids


def _one_start(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Take away a second start token, and an end token that the text does not have."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is not None and ids[:2] == [start, start]:  # the text brought its own
        ids = ids[1:]
    if end is not None and ids[-1:] == [end] and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]  # a prompt is to be continued
    return ids


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
    """Lay out the demonstrations of a step as a rollout of one completion per prompt.

    Args:
        demonstrations: of `encode_demonstrations`.
        indices: int [P], rows of `demonstrations`.
        prompt_length: L.
        completion_length: C.

    Returns:
        A rollout of NumPy arrays, [P, 1, C]; log-probs are 0, as the data set spoke.
    """
    chosen = [demonstrations.prompt_ids[i] for i in indices]
    groups = [[demonstrations.completion_ids[i]] for i in indices]
    return given_rollout(_prompt_batch(chosen, indices, prompt_length), groups, completion_length)


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
