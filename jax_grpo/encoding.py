"""Texts and chats to token ids, as generation would have seen and made them.

A chat goes through the tokenizer's template up to where the assistant's turn begins, and that turn
is what the data say. A completion of several turns goes on so, turn after turn, which needs a
template that leaves what was said before as it was: one that takes thoughts out of earlier turns
has no text of which the model would have said all of the turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_grpo.rewards.contract import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Messages = list[dict[str, Any]]


class Turn(NamedTuple):
    """What the assistant says, and what it is given since it last spoke."""

    given: str  # the prompt; of later turns, from the end token of the one before
    said: str  # without its end token
    plain: bool  # no chat, whose template writes special tokens itself


# ------------------------------------------------------------------------------ columns of a row


def prompt_of(row: Row, i: int, template: str | None = None) -> str | Messages:
    """The prompt of a row, after the template of `str.format`.

    Raises:
        ValueError: one line, when it is missing or is neither text nor messages.
    """
    if template is not None:
        if isinstance(row.get("prompt"), list):
            raise ValueError(f"a template is for text, but the prompt of row {i} is messages")
        try:
            return template.format(**row)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the prompt template does not work for row {i}, with {', '.join(row)}: "
                f"{type(error).__name__} {error} (a brace that stands for itself is written twice)"
            ) from None
    prompt = column(row, "prompt", i)
    if not isinstance(prompt, str) and not is_messages(prompt):
        raise ValueError(
            f"the prompt of row {i} is neither text nor a list of messages with role and content: "
            f"{shorten(prompt)}"
        )
    return prompt


def completion_of(row: Row, name: str, i: int) -> str | Messages:
    """What the assistant says in a row: text, or messages that begin and end with its own.

    Raises:
        ValueError: one line, when it is missing or something else.
    """
    completion = column(row, name, i)
    if isinstance(completion, str):
        return completion
    if is_messages(completion):
        said = [m.get("content") for m in completion if m["role"] == "assistant"]
        ends = {completion[0]["role"], completion[-1]["role"]}
        if ends == {"assistant"} and all(isinstance(text, str | None) for text in said):
            return completion
    raise ValueError(
        f"the {name} of row {i} is neither text nor messages that begin and end with the "
        f"assistant's: {shorten(completion)}"
    )


def split_conversation(row: Row, i: int) -> Row:
    """The row with a prompt and a completion, where it has a whole conversation."""
    if "completion" in row or "messages" not in row:
        return row
    messages = row["messages"]
    roles = [message["role"] for message in messages] if is_messages(messages) else []
    first = roles.index("assistant") if "assistant" in roles else 0
    if not first:
        raise ValueError(
            f"the messages of row {i} are no prompt and then an assistant's turn: "
            f"{shorten(messages)}"
        )
    return {**row, "prompt": messages[:first], "completion": messages[first:]}


def split_pair(row: Row, i: int) -> Row:
    """The row with a prompt and what follows it, where both hold it as whole conversations."""
    pair = [column(row, name, i) for name in ("chosen", "rejected")]
    whole = all(is_messages(messages) and messages[0]["role"] != "assistant" for messages in pair)
    if not whole:
        return row
    most = min(len(messages) for messages in pair) - 1
    same = next((k for k in range(most) if pair[0][k] != pair[1][k]), most)
    if not same:
        raise ValueError(
            f"chosen and rejected of row {i} are whole conversations, but they do not begin with "
            "the same message and then go on"
        )
    chosen, rejected = (messages[same:] for messages in pair)
    return {**row, "prompt": pair[0][:same], "chosen": chosen, "rejected": rejected}


def margin_of(row: Row, i: int) -> float:
    """By how much the chosen one of a pair is better, in units of reward.

    Raises:
        ValueError: one line, when it is missing or not a finite number.
    """
    value = column(row, "margin", i)
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"the margin of row {i} is not a finite number: {shorten(value)}")
    return margin


def column(row: Row, name: str, i: int) -> Any:
    """A value of row i, or one line that says which there are."""
    if name not in row:
        raise ValueError(f"row {i} has no column {name!r}; it has: {', '.join(row) or 'none'}")
    return row[name]


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, at least one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, Mapping) and "role" in m and ("content" in m or "tool_calls" in m)
            for m in value
        )
    )


# ------------------------------------------------------------------------------ chats to text


def as_chat(prompt: str | Messages, chat: bool, system: str | None) -> str | Messages:
    """The prompt as messages, with the system's before them; plain text stays text."""
    if isinstance(prompt, str):
        if not chat:
            if system is not None:
                raise ValueError("a system message needs messages as prompts, or chat=True")
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if system is not None and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt


def rendered(chat: str | Messages, i: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a chat up to where the assistant's turn begins; plain text as it is.

    Raises:
        ValueError: one line, when the tokenizer has no chat template or that refuses row i.
    """
    if isinstance(chat, str):
        return chat
    if not tokenizer.chat_template:
        raise ValueError(f"the prompt of row {i} is a chat, but the tokenizer has no chat template")
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises: jinja's errors, or a TypeError
        raise ValueError(f"the chat template refuses the prompt of row {i}: {error}") from error
    assert isinstance(text, str)
    return text


def turns(
    chat: str | Messages,
    completion: str | Messages,
    i: int,
    tokenizer: PreTrainedTokenizerBase,
    end: str,
) -> list[Turn]:
    """What is given and what is said, turn by turn.

    The last turn is what the data say, whatever the template would make of it; the turns before it
    are what the template makes of them, as the later ones saw that.

    Args:
        chat: the prompt, of `as_chat`.
        completion: of `completion_of`.
        i: the row, for errors.
        tokenizer: of transformers.
        end: the text of the end token, which the template must put after each turn.

    Raises:
        ValueError: one line, when a plain prompt gets several turns, or a template changes them.
    """
    before = rendered(chat, i, tokenizer)
    if isinstance(completion, str):
        return [Turn(before, completion, isinstance(chat, str))]
    if isinstance(chat, str):
        if len(completion) > 1:
            raise ValueError(f"row {i} has several turns after a plain text: they need a chat")
        return [Turn(before, completion[0].get("content") or "", True)]
    found, given = [], before
    starts = [k for k, message in enumerate(completion) if message["role"] == "assistant"]
    for start, after in itertools.zip_longest(starts, starts[1:]):
        content = completion[start].get("content") or ""
        if after is None and not completion[start].get("tool_calls"):
            found.append(Turn(given, content, False))
            break
        whole = rendered([*chat, *completion[:after]], i, tokenizer)
        said, ended, rest = whole[len(before) :].partition(end)
        if not whole.startswith(before) or not ended or content.strip() not in said:
            raise ValueError(
                f"the chat template does not keep the turns of row {i} as they were said, each "
                f"with {end!r} after it (some take thoughts out of earlier turns): give such a "
                "conversation as rows of one turn"
            )
        found.append(Turn(given, said, False))
        before, given = whole, ended + rest
    return found


# ------------------------------------------------------------------------------ text to tokens


def encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, plain: Sequence[bool]
) -> list[list[int]]:
    """Token ids of texts; special tokens are added to those that are plain."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [i for i, is_plain in enumerate(plain) if is_plain == special]
        if not chosen:
            continue
        encoded = tokenizer([texts[i] for i in chosen], add_special_tokens=special, verbose=False)
        for i, row_ids in zip(chosen, encoded["input_ids"], strict=True):
            ids[i] = _one_start(list(row_ids), texts[i], tokenizer) if special else list(row_ids)
    return ids


def _one_start(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Take away a second start token, and an end token that the text does not have."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is not None and ids[:2] == [start, start]:  # the text brought its own
        ids = ids[1:]
    if end is not None and ids[-1:] == [end] and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]  # a prompt is to be continued
    return ids


def encode_turns(
    found: Sequence[Turn], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Token ids of what is given and of what is said, for each turn.

    What is said is what follows the given in the encoding of both, where the given's tokens stay
    the same, and is encoded alone where not: the given ends where generation would start.
    """
    plain = [turn.plain for turn in found]
    given = encode([turn.given for turn in found], tokenizer, plain)
    both = encode([turn.given + turn.said for turn in found], tokenizer, plain)
    alone = encode([turn.said for turn in found], tokenizer, [False] * len(found))
    return [
        (before, whole[len(before) :] if whole[: len(before)] == before else said)
        for before, whole, said in zip(given, both, alone, strict=True)
    ]


def join(
    encoded: Sequence[tuple[list[int], list[int]]], end_id: int
) -> tuple[list[int], list[int], list[bool]]:
    """The prompt, all that follows it, and which of that counts.

    >>> join([([1, 2], [3]), ([9, 5, 6], [7])], end_id=9)
    ([1, 2], [3, 9, 5, 6, 7, 9], [True, True, False, False, True, True])
    """
    (prompt, said), *later = encoded
    ids, counts = list(said), [True] * len(said)
    for given, said in later:  # the end token that `given` begins with is said, too
        ids += given + said
        counts += [True] + [False] * (len(given) - 1) + [True] * len(said)
    if ids[-1:] != [end_id]:  # the text may have brought its own
        ids, counts = [*ids, end_id], [*counts, True]
    return prompt, ids, counts
