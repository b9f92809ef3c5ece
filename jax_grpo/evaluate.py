"""What completions are worth: verifiers on the host, and held-out accuracy.

`judge` is the one place where token ids become text, for training and evaluation alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from jax_grpo import data
from jax_grpo.rewards import contract
from jax_grpo.types import Params, PromptBatch, Rewards, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generate = Callable[[Params, PromptBatch, Array], Rollout]


class Verifiers(NamedTuple):
    """The reward functions of a stage, with their names and weights in the total reward."""

    functions: tuple[contract.Reward, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]


class Completions(NamedTuple):
    """A rollout's completions on the host."""

    rows: np.ndarray  # [P] int, which prompts
    ids: np.ndarray  # [P, G, C] int
    lengths: np.ndarray  # [P, G] int
    truncated: np.ndarray  # [P, G] bool


def fetch(rollout: Rollout) -> Completions:
    """Waits for a rollout and copies what the host needs of it."""
    return Completions(
        *jax.device_get(
            (rollout.prompts.rows, rollout.completion_ids, rollout.lengths, rollout.truncated)
        )
    )


def judge(
    verifiers: Verifiers,
    tokenizer: PreTrainedTokenizerBase,
    prompts: data.Prompts,
    completions: Completions,
    **context: Any,
) -> Rewards:
    """Decodes completions and asks every reward function what they are worth.

    Args:
      verifiers: R reward functions.
      tokenizer: decodes; special tokens are skipped.
      prompts: the data set that `completions.rows` index.
      completions: P x G of them.
      **context: `trainer_state`, `log_metric` and `log_extra`, for the functions that take them.

    Returns:
      `Rewards` of NumPy arrays `[P, G, R]`.

    Raises:
      RewardError: when a function fails or gives something else than one number per completion.
    """
    P, G, C = completions.ids.shape
    flat = zip(completions.ids.reshape(-1, C), completions.lengths.reshape(-1), strict=True)
    ids = [row[:length].tolist() for row, length in flat]
    texts = data.completion_texts(tokenizer, ids)
    asked, answered, columns = data.reward_arguments(prompts, completions.rows, texts)
    values, valid = contract.score(verifiers.functions, asked, answered, ids, columns, **context)
    return Rewards(values.reshape(P, G, -1), valid.reshape(P, G, -1))


def pass_at_k(n: int, c: ArrayLike, k: int) -> np.ndarray:
    """The chance that at least one of k completions is right, when c of n that were drawn are.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Chen et al., 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374. Without
    bias, where 1 - (1 - c/n)^k is too low.

    Args:
      n: completions drawn of each prompt.
      c: how many of them are right, [...] int.
      k: 1 to n.

    Returns:
      [...] float64.

    Raises:
      ValueError: when k completions cannot be taken of n.

    >>> pass_at_k(4, [0, 1, 2, 3], 2).round(3).tolist()
    [0.0, 0.5, 0.833, 1.0]
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 to n completions of each prompt, and n is {n}")
    missed = np.array([math.comb(n - right, k) / math.comb(n, k) for right in range(n + 1)])
    return 1 - missed[np.asarray(c)]


def evaluate(
    sample: Generate,
    greedy: Generate,
    params: Params,
    key: Array,
    prompts: data.Prompts,
    verifiers: Verifiers,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch: int,
    prompt_length: int,
    measures: Mapping[str, str],
    pass_at: Sequence[int] = (),
) -> dict[str, float]:
    """Measures a policy on prompts that it was not trained on.

    Args:
      sample: samples G completions per prompt.
      greedy: decodes one greedily.
      params: the sampling copy.
      key: of this evaluation.
      prompts: all are used, `batch` at a time; the last batch is filled up with repeats.
      verifiers: reward functions.
      tokenizer: decodes.
      batch: prompts at a time.
      prompt_length: L.
      measures: name of each measure and the reward function that decides it: the share of
        completions to which it gives more than 0.
      pass_at: each k, at most G, of which pass@k is wanted.

    Returns:
      Each measure sampled (over all completions), as `NAME_pass@K` (the mean over prompts; what a
      reward function gave None for is not right) and, as `NAME_greedy`, greedily; `mean_length` and
      `mean_length_greedy` in tokens; `truncated`, the share of sampled completions that the length
      limit ended.
    """
    total = len(prompts.rows)
    result: dict[str, float] = {}
    for suffix, generate in (("", sample), ("_greedy", greedy)):
        parts = []
        for start in range(0, total, batch):
            indices = np.arange(start, start + batch) % total
            rollout = generate(params, data.prompt_batch(prompts, indices, prompt_length), key)
            parts.append(fetch(rollout))
        joined = (np.concatenate(column)[:total] for column in zip(*parts, strict=True))
        completions = Completions(*joined)
        rewards = judge(verifiers, tokenizer, prompts, completions)
        for measure, name in measures.items():
            column = verifiers.names.index(name)
            right = np.asarray(rewards.values[..., column] > 0)  # [P, G]
            hits = right[rewards.valid[..., column]]
            result[measure + suffix] = float(hits.mean()) if hits.size else 0.0
            for k in () if suffix else pass_at:
                solved = pass_at_k(right.shape[1], right.sum(axis=1), k)  # [P]
                result[f"{measure}_pass@{k}"] = float(solved.mean())
        result["mean_length" + suffix] = float(completions.lengths.mean())
        if not suffix:
            result["truncated"] = float(completions.truncated.mean())
    return result
