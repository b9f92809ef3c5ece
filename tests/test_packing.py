"""Several demonstrations in one row: which, and where they stand there."""

from __future__ import annotations

import numpy as np
import pytest

from jax_grpo.data import Demonstrations, demonstration_rollout
from jax_grpo.packing import pack, packed_rollout


def examples(sizes, seed=0):
    """Demonstrations of those sizes, of different tokens, with holes in what counts."""
    draw = np.random.default_rng(seed)
    prompts, groups, counts, start = [], [], [], 1
    for size in sizes:
        cut = int(draw.integers(1, size))
        tokens = list(range(start, start + size))
        prompts.append(tokens[:cut])
        groups.append([tokens[cut:]])
        counts.append([[bool(x) for x in draw.integers(0, 2, size - cut)]])
        start += size
    return Demonstrations(prompts, groups, [{}] * len(prompts), 0, counts)


def first_fit_decreasing(sizes, length):
    """The definition, with a look at every row."""
    rows = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for row in rows:
            if sum(sizes[k] for k in row) + sizes[i] <= length:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 64, 200])
@pytest.mark.parametrize("longest", [3, 10, 40])
def test_the_longest_first_where_it_first_fits(count, longest):
    sizes = np.random.default_rng((count, longest)).integers(2, longest, count, endpoint=True)
    rows = pack(examples(sizes), 40).rows
    assert rows == first_fit_decreasing(sizes, 40)
    assert sorted(i for row in rows for i in row) == list(range(count))  # each exactly once
    assert max(sum(sizes[i] for i in row) for row in rows) <= 40


def test_what_is_not_packed_gives_one_line():
    with pytest.raises(ValueError, match="example 1 has 6 tokens: it does not fit in 5"):
        pack(examples([5, 6, 7]), 5)
    pair = Demonstrations([[1]], [[[2], [3]]], [{}], 0)
    with pytest.raises(ValueError, match="only groups of one are packed, and example 0 has 2"):
        pack(pair, 5)


def test_packed_rollout():
    shown = Demonstrations(
        prompt_ids=[[1, 2], [3], [4, 5, 6]],
        completion_ids=[[[11, 12, 9]], [[13, 9]], [[14, 7, 8, 9]]],
        rows=[{}] * 3,
        dropped=0,
    )
    packed = pack(shown, 8)
    assert packed.rows == [[2], [0, 1]]
    rollout = packed_rollout(shown, packed, np.array([1, 0, 1]), 8)
    first, second = [1, 2, 11, 12, 9, 3, 13, 9], [4, 5, 6, 14, 7, 8, 9, 0]
    np.testing.assert_array_equal(rollout.completion_ids, [[first], [second], [first]])
    np.testing.assert_array_equal(rollout.lengths, [[8], [7], [8]])
    said, also = [0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 0]
    np.testing.assert_array_equal(rollout.mask, [[said], [also], [said]])
    two, one = [0] * 5 + [1] * 3, [0] * 7 + [-1]
    np.testing.assert_array_equal(rollout.segments, [two, one, two])
    assert rollout.prompts.token_ids.shape == (3, 0)
    np.testing.assert_array_equal(rollout.prompts.lengths, [0, 0, 0])
    np.testing.assert_array_equal(rollout.prompts.rows, [1, 0, 1])
    assert rollout.mask.dtype == bool and rollout.temperature == 1
    integers = (*rollout.prompts, rollout.completion_ids, rollout.lengths, rollout.segments)
    assert {array.dtype for array in integers} == {np.dtype(np.int32)}
    for array in (rollout.behavior_logps, rollout.kept_logmass):
        assert array.dtype == np.float32 and array.shape == (3, 1, 8) and not array.any()
    counted = shown._replace(counts=[[[True, False, True]], [[False, True]], [[True] * 4]])
    holes = packed_rollout(counted, packed, np.array([1]), 8).mask
    np.testing.assert_array_equal(holes, [[[0, 0, 1, 0, 1, 0, 0, 1]]])


def test_packed_rows_hold_what_unpacked_ones_do():
    """Taken apart by its segments, a packed batch is the unpacked one, token by token."""
    sizes = np.random.default_rng(1).integers(2, 20, 50)
    shown = examples(sizes)
    packed = pack(shown, 32)
    rollout = packed_rollout(shown, packed, np.arange(len(packed.rows)), 32)
    plain = demonstration_rollout(shown, np.arange(50), 20, 20)
    for p, row in enumerate(packed.rows):
        np.testing.assert_array_equal(rollout.segments[p] >= 0, np.arange(32) < rollout.lengths[p])
        for segment, i in enumerate(row):
            here = rollout.segments[p] == segment
            prompt = shown.prompt_ids[i]
            completion = plain.completion_ids[i, 0, : plain.lengths[i, 0]]
            tokens = [*prompt, *completion]
            np.testing.assert_array_equal(rollout.completion_ids[p, 0, here], tokens)
            counts = [*[False] * len(prompt), *plain.mask[i, 0, : plain.lengths[i, 0]]]
            np.testing.assert_array_equal(rollout.mask[p, 0, here], counts)
            assert not rollout.mask[p, 0, here][0]  # nothing predicts an example's first token
    assert not rollout.mask[rollout.segments[:, None] < 0].any()
