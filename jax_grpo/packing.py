"""Several demonstrations in one row, so that little of a batch is padding.

Which examples share a row is decided once, before the first step: a step shuffles rows, not what
is in them. The examples of a row do not see each other: `segments` says which token is of which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_grpo.data import Demonstrations, given_rollout
from jax_grpo.types import PromptBatch, Rollout


class Packed(NamedTuple):
    """Which examples stand in which row."""

    rows: list[list[int]]  # indices of demonstrations, each in exactly one row


def pack(demonstrations: Demonstrations, length: int) -> Packed:
    """Put the examples into rows by first fit decreasing: the longest first, where it first fits.

    That needs no more rows than 11/9 of the fewest possible and 6/9 (Dósa 2007,
    doi:10.1007/978-3-540-74450-4_1).

    Args:
        demonstrations: groups of one.
        length: of a row, in tokens of prompt and completion.

    Raises:
        ValueError: for groups of two, or an example that is longer than `length`.

    >>> lengths = [3, 5, 2, 4]
    >>> demonstrations = Demonstrations([[1]] * 4, [[[2] * (n - 1)] for n in lengths], [{}] * 4, 0)
    >>> pack(demonstrations, length=7).rows
    [[1, 2], [3, 0]]
    """
    sizes = []
    examples = zip(demonstrations.prompt_ids, demonstrations.completion_ids, strict=True)
    for i, (prompt, group) in enumerate(examples):
        if len(group) != 1:
            raise ValueError(f"only groups of one are packed, and example {i} has {len(group)}")
        sizes.append(len(prompt) + len(group[0]))
        if sizes[i] > length:
            raise ValueError(f"example {i} has {sizes[i]} tokens: it does not fit in {length}")
    # A binary tree: its leaves are the space that is left in each row, at first all of it, and a
    # parent is the larger of its children. To go left where that is enough is to find the first.
    leaves = 1 << (len(sizes) - 1).bit_length()
    space = [length] * (2 * leaves)  # the root is 1, the children of k are 2 k and 2 k + 1
    rows: list[list[int]] = [[] for _ in range(leaves)]
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        node = 1
        while node < leaves:
            node *= 2
            node += space[node] < sizes[i]
        rows[node - leaves].append(i)
        space[node] -= sizes[i]
        while node > 1:
            node //= 2
            space[node] = max(space[2 * node], space[2 * node + 1])
    return Packed([row for row in rows if row])


def packed_rollout(
    demonstrations: Demonstrations, packed: Packed, indices: np.ndarray, length: int
) -> Rollout:
    """Lay out the packed rows of a step as a rollout of one long completion per row.

    Args:
        demonstrations: that were packed.
        packed: of `pack`.
        indices: int [P], rows of `packed`.
        length: that they were packed to; C.

    Returns:
        A rollout of NumPy arrays, [P, 1, C]. Prompts and completions stand one after the other in
        `completion_ids`, `mask` is True at the completions' tokens that count, and `segments` says
        which example each token is of. `prompts` are empty, [P, 0].
    """
    rows = [packed.rows[int(index)] for index in indices]
    segments = np.full((len(rows), length), -1, np.int32)
    mask = np.zeros((len(rows), 1, length), bool)
    tokens: list[list[int]] = [[] for _ in rows]
    for p, row in enumerate(rows):
        for segment, i in enumerate(row):
            prompt, (completion,) = demonstrations.prompt_ids[i], demonstrations.completion_ids[i]
            counts = True if demonstrations.counts is None else demonstrations.counts[i][0]
            start = len(tokens[p])
            tokens[p] += prompt + completion
            segments[p, start : len(tokens[p])] = segment
            mask[p, 0, start + len(prompt) : len(tokens[p])] = counts
    # Any: the records are annotated with the arrays of devices
    no_prompts: Any = (np.zeros((len(rows), 0)), np.zeros(len(rows)), indices)
    prompts = PromptBatch(*(x.astype(np.int32) for x in no_prompts))
    arrays: Any = {"mask": mask, "segments": segments}
    return given_rollout(prompts, [[row] for row in tokens], length)._replace(**arrays)
