"""Groups that are drawn again: what belongs together stays together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.evaluate import Completions
from jax_grpo.sampled import Judged, refill
from jax_grpo.sharding import batch_sharding, make_mesh, put_batch
from jax_grpo.stages import Functions, choose_groups
from jax_grpo.types import PromptBatch, Rewards, Rollout

P, G, C = 8, 2, 3


def judged(first: int, logged: float) -> Judged:
    """Groups numbered from `first`, whose number is all that is in them."""
    number = np.arange(first, first + P)
    by = lambda *shape: np.broadcast_to(number.reshape(P, *[1] * len(shape)), (P, *shape)).copy()  # noqa: E731
    floats = by(G, C).astype(np.float32)
    rollout = Rollout(
        prompts=PromptBatch(by(4), by(), by()),  # type: ignore[arg-type]
        completion_ids=by(G, C),  # type: ignore[arg-type]
        lengths=by(G),  # type: ignore[arg-type]
        mask=by(G, C) > 0,  # type: ignore[arg-type]
        behavior_logps=floats,  # type: ignore[arg-type]
        kept_logmass=floats,  # type: ignore[arg-type]
        truncated=by(G) > 0,  # type: ignore[arg-type]
        temperature=np.float32(0.7),  # type: ignore[arg-type]
    )
    values = by(G, 1).astype(np.float32)
    return Judged(
        rollout,
        Completions(by(), by(G, C), by(G), by(G) > 0),
        Rewards(values, values >= 0),
        {"mine": [logged]},
        {"who": [str(n) for n in by(G).ravel()]},
    )


def test_a_refilled_group_brings_all_that_is_its_own():
    """Of the first draw 2, 5 and 7 are not wanted; of the second all but 11 and 14 are useless."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        some, more = judged(0, 1.0), judged(10, 3.0)
        some, more = (x._replace(rollout=put_batch(x.rollout, mesh)) for x in (some, more))
        again = np.isin(np.arange(P), [2, 5, 7])
        useless = ~np.isin(np.arange(P), [1, 4])
        run = Functions(*[None] * len(Functions._fields))  # type: ignore[list-item]
        run = run._replace(choose=jax.jit(choose_groups))
        found = refill(run, some, more, again, useless)
    expected = np.array([0, 1, 11, 3, 4, 14, 6, 7])  # too few: 7 stays
    np.testing.assert_array_equal(found.completions.rows, expected)
    np.testing.assert_array_equal(found.rewards.values[..., 0], np.stack([expected] * G, 1))
    assert found.extra == {"who": [str(n) for n in np.repeat(expected, G)]}
    assert found.logged == {"mine": [1.0, 3.0]}
    for x in jax.tree.leaves(found.rollout._replace(temperature=None)):
        wanted = expected > 0 if x.dtype == bool else expected
        np.testing.assert_array_equal(np.asarray(x).reshape(P, -1)[:, 0], wanted)
        assert x.sharding.is_equivalent_to(batch_sharding(mesh), x.ndim)  # as it was drawn
    assert found.rollout.temperature == jnp.float32(0.7)
