"""A data set that the policy writes itself, and the verifiers choose from.

The offline form of rejection fine-tuning (Yuan et al. 2023, arXiv:2308.01825; several rounds are
Dong et al. 2023, RAFT, arXiv:2304.06767): a frozen policy answers each prompt N times, what the
verifiers accept becomes the data of a stage that imitates. A stage of pairs gets an accepted answer
and one that was not (iterative DPO, Pang et al. 2024, arXiv:2404.19733).

What is kept goes into a file of the workdir, where a person can read it, and a run that resumes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_grpo import advantages, data
from jax_grpo.evaluate import Completions, fetch, judge
from jax_grpo.sampling import purpose_key
from jax_grpo.sharding import put_batch
from jax_grpo.stages import COLLECTION, Functions, Model, Stage, reward_columns
from jax_grpo.types import Params, Rewards

log = logging.getLogger(__name__)


class NothingCollected(RuntimeError):
    """The verifiers accepted nothing to learn from."""


class Choice(NamedTuple):
    """What is kept of P groups of completions."""

    groups: list[tuple[int, tuple[int, ...]]]  # a prompt, and its completion or its pair
    accepted: int  # completions, duplicates among them
    duplicates: int  # of an accepted completion of the same prompt
    solved: int  # prompts of which a completion was accepted


def choose(
    completions: Completions, accepted: np.ndarray, rejected: np.ndarray, group: int, limit: int
) -> Choice:
    """Chooses what to learn from: the first different completions of each prompt.

    A completion that the length limit cut is never one to imitate: it has no end.

    Args:
      completions: P x G of them.
      accepted: bool [P, G].
      rejected: bool [P, G]; the rest nobody has judged.
      group: 1 for accepted ones, 2 for pairs of an accepted and a rejected one.
      limit: completions, or pairs, for a prompt.

    >>> ids = np.array([[[5, 1], [5, 1], [6, 1], [7, 1]]])
    >>> given = Completions(np.arange(1), ids, np.full((1, 4), 2), np.zeros((1, 4), bool))
    >>> right = np.array([[True, True, True, False]])
    >>> choose(given, right, ~right, group=1, limit=4)
    Choice(groups=[(0, (0,)), (0, (2,))], accepted=3, duplicates=1, solved=1)
    >>> choose(given, right, ~right, group=2, limit=4).groups
    [(0, (0, 3))]
    """
    accepted = accepted & ~completions.truncated
    groups, different, solved = [], 0, 0
    for p, (ids, lengths) in enumerate(zip(completions.ids, completions.lengths, strict=True)):
        texts = [row[:length].tobytes() for row, length in zip(ids, lengths, strict=True)]
        first = [texts.index(text) == g for g, text in enumerate(texts)]
        right = [g for g in np.flatnonzero(accepted[p]).tolist() if first[g]]
        wrong = [g for g in np.flatnonzero(rejected[p]).tolist() if first[g]]
        members = zip(right) if group == 1 else zip(right, wrong, strict=False)
        groups += [(p, each) for each in list(members)[:limit]]
        different, solved = different + len(right), solved + bool(right)
    return Choice(groups, int(accepted.sum()), int(accepted.sum()) - different, solved)


class Collected(NamedTuple):
    """A round's data, and how they came about."""

    demonstrations: data.Demonstrations
    sampled_tokens: int
    metrics: dict[str, float]


def collect(
    model: Model, stage: Stage, run: Functions, params: Params, number: int, workdir: Path
) -> Collected:
    """Collects the data of a round, or reads what was collected before.

    Args:
      model: the model.
      stage: one with a `collection`.
      run: its compiled functions.
      params: float32, of the policy that is frozen for this.
      number: the round's, from 0.
      workdir: of the run.

    Raises:
      NothingCollected: when the verifiers accept nothing to learn from.
    """
    file = workdir / "collected" / f"{stage.name}-{number}.json"
    if file.exists():
        return _collected(stage, json.loads(file.read_text()))
    assert stage.collection is not None and stage.sampling is not None
    assert isinstance(stage.data, data.Prompts)
    wanted, sampler = stage.collection, run.sampling_copy(params)
    seed, P = (stage.seed, stage.number, COLLECTION, number), stage.prompts_per_step
    rows = data.row_indices(seed, 0, len(stage.data.rows), wanted.num_prompts)  # none twice
    starts = range(0, len(rows), P)
    found: list[dict[str, Any]] = []
    counts = dict.fromkeys(("prompts", "completions", "tokens", *Choice._fields[1:]), 0)
    for batch, start in enumerate(starts):
        indices = np.resize(rows[start : start + P], P)  # the last batch is filled with repeats
        real = len(rows[start : start + P])
        prompts = data.prompt_batch(stage.data, indices, stage.prompt_length)
        key = purpose_key(stage.seed, stage.number, COLLECTION, number * len(starts) + batch)
        rollout = run.generate(
            sampler,
            put_batch(prompts, model.mesh),
            key,
            stage.sampling.temperature(0),
            stage.sampling.max_new_tokens,
        )
        completions = Completions(*(x[:real] for x in fetch(rollout)))
        rewards = judge(stage.verifiers, model.tokenizer, stage.data, completions)
        total, valid = _total(stage, rewards)
        right = valid & (total > wanted.threshold)
        group = stage.algorithm.group
        choice = choose(completions, right, valid & ~right, group, wanted.max_per_prompt)
        found += _rows(model, stage, completions, total, choice)
        counts["prompts"] += real
        counts["completions"] += completions.lengths.size
        counts["tokens"] += int(completions.lengths.sum())
        for name, value in choice._asdict().items():
            if name != "groups":
                counts[name] += value
    content = {"counts": counts, "rows": found}
    if not found:
        raise NothingCollected(
            f"stage {stage.name}: nothing to learn from: of {counts['completions']} completions "
            f"{counts['accepted']} were accepted, and no prompt had what the algorithm needs"
        )
    if jax.process_index() == 0:
        _write(file, content)
    return _collected(stage, content)


def _total(stage: Stage, rewards: Rewards) -> tuple[np.ndarray, np.ndarray]:
    """Total rewards [P, G], and which are valid."""
    weights = np.asarray(reward_columns(stage)[1], np.float32)
    total, valid = advantages.total_reward(rewards.values, rewards.valid, weights)
    return np.asarray(total), np.asarray(valid)


def _rows(
    model: Model, stage: Stage, completions: Completions, total: np.ndarray, choice: Choice
) -> Iterable[dict[str, Any]]:
    """What is kept, as the file has it."""
    for p, members in choice.groups:
        lengths = completions.lengths[p]
        ids = [completions.ids[p, g, : lengths[g]].tolist() for g in members]
        row = int(completions.rows[p]) % len(stage.data.rows)
        yield {
            "row": row,
            "prompt": stage.data.rows[row].get("prompt"),
            "completions": data.completion_texts(model.tokenizer, ids),
            "completion_ids": ids,
            "rewards": [float(total[p, g]) for g in members],
        }


def _collected(stage: Stage, content: Mapping[str, Any]) -> Collected:
    """The data of a round, from the content of its file."""
    assert isinstance(stage.data, data.Prompts)
    found, counts = content["rows"], content["counts"]
    rows = [each["row"] for each in found]
    demonstrations = data.Demonstrations(
        prompt_ids=[stage.data.token_ids[row] for row in rows],
        completion_ids=[each["completion_ids"] for each in found],
        rows=[stage.data.rows[row] for row in rows],
        dropped=0,
    )
    accepted, completions = counts["accepted"], counts["completions"]
    metrics = {
        "collected/yield": accepted / completions,
        "collected/duplicates": counts["duplicates"] / max(accepted, 1),
        "collected/prompts_solved": counts["solved"] / counts["prompts"],
        "collected/rows": float(len(found)),
    }
    return Collected(demonstrations, counts["tokens"], metrics)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Writes the file at once, so that a kill leaves all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(content, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    os.replace(draft, file)
