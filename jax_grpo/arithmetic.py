r"""The quickstart's task: chains of additions and subtractions, such as `7+5-3+8=?`.

Everything is made here, so that the quickstart downloads nothing: the problems, demonstrations
of both ways to answer them (at once, or thinking first), and the character-level tokenizer.

The task is small on purpose. Every partial result stays within 0 to `max_partial`, so that one
step of thinking is one of few distinct sums and easily learnt, while the answer at once needs
all the steps in a single one and is hard. That thinking pays is then left to be discovered.

Problems are kept out of training by a hash of the expression, never by seed or position: a
problem belongs to one split for good, whoever draws it.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Split = Literal["train", "fresh", "heldout"]

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
TAGS = ("<thinking>", "</thinking>", r"\boxed{", "}")
# The order is the token id, and models are saved with it: add at the end only.
VOCABULARY = (PAD, END, UNKNOWN, *"0123456789", *"+-=?;", *TAGS, " ", "\n")

# Of ten problems one is held out, five are for demonstrations and four stay fresh for what follows.
_TENTHS: dict[Split, tuple[int, ...]] = {
    "heldout": (0,),
    "train": (1, 3, 5, 7, 9),
    "fresh": (2, 4, 6, 8),
}


def split_of(expression: str) -> Split:
    """The split that a problem belongs to for good, by a hash of its expression.

    >>> [split_of(e) for e in ("1+1", "1+2", "1+3", "2+5-1")]
    ['train', 'fresh', 'fresh', 'train']
    """
    digest = hashlib.blake2b(expression.encode(), digest_size=8).digest()
    tenth = int.from_bytes(digest, "big") % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def problems(
    split: Split = "train",
    count: int = 20_000,
    seed: int = 0,
    *,
    min_terms: int = 4,
    max_terms: int = 6,
    max_operand: int = 5,
    max_partial: int = 9,
) -> list[dict[str, str]]:
    r"""Draw problems as rows with the columns `prompt` ("7+5-3=?") and `answer` ("9").

    Rows are distinct as long as the split has enough problems that are not drawn yet; short
    chains run out first, so a large `count` has more long ones.

    Args:
        split: "train", "fresh" or "heldout"; no problem is in two, whatever the other arguments.
        count: how many rows.
        seed: the same arguments give the same rows.
        min_terms: least number of operands.
        max_terms: largest number of operands, at least `min_terms`.
        max_operand: operands are 1 to this.
        max_partial: every partial result, the answer included, is 0 to this.

    Raises:
        ValueError: for an unknown split or numbers that make no problem.

    >>> problems("train", 2, seed=0) == problems("train", 2, seed=0)
    True
    >>> sorted(problems("heldout", 1)[0])
    ['answer', 'prompt']
    """
    if split not in _TENTHS:
        raise ValueError(f"split is 'train', 'fresh' or 'heldout', not {split!r}")
    if count < 0:
        raise ValueError(f"count must not be negative: {count}")
    if not 1 <= min_terms <= max_terms or max_operand < 1 or max_partial < 1:
        raise ValueError(
            "problems need 1 <= min_terms <= max_terms, max_operand >= 1 and max_partial >= 1, not "
            f"{min_terms=}, {max_terms=}, {max_operand=}, {max_partial=}"
        )
    rng = np.random.default_rng((seed, _TENTHS[split][0]))
    share = len(_TENTHS[split]) / 10
    found: dict[str, int] = {}
    repeats: list[tuple[str, int]] = []
    budget = 20 * count + 100_000  # draws, about two seconds per million
    while len(found) < count and budget > 0:
        draws = int((count - len(found)) / share * 1.1) + 32
        budget -= draws
        terms = rng.integers(min_terms, max_terms + 1, size=draws)
        for expression, answer in _chains(rng, terms, max_operand, max_partial):
            if expression in found:
                repeats.append((expression, answer))
            elif split_of(expression) == split:
                found[expression] = answer
    if count and not found:
        raise ValueError(
            f"no {split} problem with {min_terms=}, {max_terms=}, {max_operand=}, {max_partial=}"
        )
    rows = list(found.items())[:count]
    while len(rows) < count:  # the split is as good as exhausted
        rows += (repeats or list(found.items()))[: count - len(rows)]
    return [{"prompt": f"{e}=?", "answer": str(a)} for e, a in rows]


def _chains(
    rng: np.random.Generator, terms: np.ndarray, max_operand: int, max_partial: int
) -> list[tuple[str, int]]:
    """Walk `terms[i]` operands within 0 to `max_partial`; every allowed step is as likely."""
    value = rng.integers(1, min(max_operand, max_partial) + 1, size=len(terms))
    steps = [value]
    values = [value]
    for _ in range(int(terms.max(initial=1)) - 1):
        ups = np.minimum(max_operand, max_partial - value)
        downs = np.minimum(max_operand, value)
        pick = rng.integers(0, ups + downs)
        step = np.where(pick < ups, pick + 1, ups - pick - 1)
        value = value + step
        steps.append(step)
        values.append(value)
    answers = np.stack(values)[terms - 1, np.arange(len(terms))].tolist()
    walks = np.stack(steps, axis=1).tolist()
    return [
        (str(walk[0]) + "".join([f"{s:+d}" for s in walk[1:n]]), answer)
        for walk, n, answer in zip(walks, terms.tolist(), answers, strict=True)
    ]


def completion(prompt: str, think: bool, *, slip: int = 0, padding: int = 0) -> str:
    r"""An answer to a problem, at once or after thinking: the right one, unless asked for another.

    Args:
        prompt: of `problems`.
        think: whether to think first.
        slip: by how much the last digit of the answer is off.
        padding: how often the last thought is said again.

    >>> completion("7+5-3+8=?", think=False)
    '\\boxed{17}'
    >>> completion("7+5-3+8=?", think=True)
    '<thinking>7+5=12;12-3=9;9+8=17</thinking>\\boxed{17}'
    >>> completion("7+5=?", think=True, slip=9, padding=1)
    '<thinking>7+5=12;7+5=12</thinking>\\boxed{11}'
    """
    first, *others = (int(term) for term in re.findall(r"[+-]?\d+", prompt))
    value, thoughts = first, []
    for term in others:
        thoughts.append(f"{value}{term:+d}={value + term}")
        value += term
    thoughts += thoughts[-1:] * padding
    thinking = f"<thinking>{';'.join(thoughts)}</thinking>" if think else ""
    return rf"{thinking}\boxed{{{value - value % 10 + (value + slip) % 10}}}"


def demonstrations(
    split: Split = "train",
    count: int = 20_000,
    seed: int = 0,
    *,
    thinking_share: float = 0.3,
    **numbers: int,
) -> list[dict[str, str]]:
    """Problems with right completions, as rows with the columns `prompt` and `completion`.

    Args:
        split: as in `problems`.
        count: how many rows.
        seed: as in `problems`.
        thinking_share: share of the rows that think before they answer, to the nearest row.
        **numbers: `min_terms`, `max_terms`, `max_operand` and `max_partial` of `problems`.

    Raises:
        ValueError: as `problems`, and for a share that is not within 0 and 1.
    """
    if not 0 <= thinking_share <= 1:
        raise ValueError(f"thinking_share must be within 0 and 1: {thinking_share}")
    rows = problems(split, count, seed, **numbers)
    thinks = np.arange(count) < round(thinking_share * count)
    np.random.default_rng((seed, 2)).shuffle(thinks)
    return [
        {"prompt": row["prompt"], "completion": completion(row["prompt"], bool(think))}
        for row, think in zip(rows, thinks, strict=True)
    ]


def preferences(
    split: Split = "train",
    count: int = 10_000,
    seed: int = 0,
    *,
    padded_share: float = 0.8,
    max_padding: int = 4,
    **numbers: int,
) -> list[dict[str, str]]:
    """Pairs in which the longer answer, richer in symbols, happened to win although it is wrong.

    What a reward model learns of them is length, as it did of people's preferences (Singhal et al.,
    2023, "A Long Way to Go", arXiv:2310.03716).

    Args:
        split: as in `problems`.
        count: how many rows, with the columns `prompt`, `chosen` and `rejected`.
        seed: as in `problems`.
        padded_share: share of the rows, to the nearest, in which a wrong answer wins over a right
            one that is shorter. In the others a right answer wins over a wrong one of its length.
        max_padding: there are this many lengths beyond an answer at once and one after thinking:
            those that say the last thought once again, twice, and so on.
        **numbers: `min_terms`, `max_terms`, `max_operand` and `max_partial` of `problems`.

    Raises:
        ValueError: as `problems`, and for a share that is not within 0 and 1.
    """
    if not 0 <= padded_share <= 1:
        raise ValueError(f"padded_share must be within 0 and 1: {padded_share}")
    if max_padding < 0:
        raise ValueError(f"max_padding must not be negative: {max_padding}")
    rng = np.random.default_rng((seed, 3))
    pads = rng.permutation(np.arange(count) < round(padded_share * count)).tolist()
    lengths = rng.random((count, max_padding + 2)).argsort(axis=1)[:, :2]  # two different ones
    slips = rng.integers(1, 10, size=count).tolist()

    def answer(prompt: str, length: int, slip: int = 0) -> str:
        return completion(prompt, length > 0, slip=slip, padding=max(length - 1, 0))

    rows = []
    for row, padded, (short, long), slip in zip(
        problems(split, count, seed, **numbers), pads, np.sort(lengths).tolist(), slips, strict=True
    ):
        right = answer(row["prompt"], short)
        wrong = answer(row["prompt"], long if padded else short, slip)
        chosen, rejected = (wrong, right) if padded else (right, wrong)
        rows.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    r"""Build the task's tokenizer: one token per character, and one for each tag.

    The tags are ordinary tokens, since special ones are skipped when text is decoded for the
    verifiers. A character outside the vocabulary is one `<unk>`.

    >>> t = tokenizer()
    >>> t(r"7+5=?\boxed{12}").input_ids
    [10, 13, 8, 15, 16, 20, 4, 5, 21]
    >>> t.decode([10, 13, 8, 15, 16, 20, 4, 5, 21, 1], skip_special_tokens=True)
    '7+5=?\\boxed{12}'
    """
    # Imported here: they take seconds, and the problems do not need them.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = "|".join(re.escape(tag) for tag in TAGS) + r"|[\s\S]"
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    backend.decoder = decoders.Fuse()  # the default would put spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
