"""How much memory a stage needs on each device, by the compiler's account: measured, not guessed.

    stage's peak = max over its functions of arguments + temporaries + outputs - aliases + beside

`beside` are the models that are held while a function runs although it does not take them (during
PPO's update: reference and reward model), which the compiler of that one function cannot know of.
What a function is given and gives (batches, log-probs) counts while it runs; between functions the
same arrays are a few numbers for each token, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_grpo.stages import Call
from jax_grpo.types import PyTree


class Memory(NamedTuple):
    """Bytes on each device while one function runs."""

    total: int
    arguments: int
    temporaries: int  # activations, gradients
    outputs: int
    aliases: int  # outputs that take the place of donated arguments
    beside: int  # models that are held but not taken


# Of a CPU's compiler: less work on code that is never run, and the same arrays.
QUICK = {"xla_backend_optimization_level": 0}


def measure(
    calls: Mapping[str, Call],
    options: Mapping[str, Any] | None = None,
    known: dict[str, Any] | None = None,
) -> dict[str, Memory]:
    """Compiles the functions of a stage and asks what they hold.

    Args:
      calls: of `stages.abstract_calls`; their devices need not be there.
      options: of the compiler, such as `QUICK`.
      known: what the compiler said of a program, by its text: methods share some, such as an 8B
        model's sampler, which takes minutes. What is new is added.

    Returns:
      The memory of each function, by its name.
    """
    known = {} if known is None else known
    return {name: _measure_one(call, options, known) for name, call in calls.items()}


def _measure_one(call: Call, options: Mapping[str, Any] | None, known: dict[str, Any]) -> Memory:
    lowered = call.function.lower(*call.arguments)
    text = lowered.as_text()
    if text not in known:
        known[text] = lowered.compile(compiler_options=options).memory_analysis()
    found = known[text]
    held = {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "outputs": found.output_size_in_bytes,
        "aliases": found.alias_size_in_bytes,
        "beside": resident(call.beside),
    }
    return Memory(sum(held.values()) - 2 * held["aliases"], **held)


def peak(memories: Mapping[str, Memory]) -> tuple[str, Memory]:
    """The function during which the most is held, and its memory."""
    return max(memories.items(), key=lambda item: item[1].total)


def resident(tree: PyTree) -> int:
    """Bytes on each device of a tree of arrays, or of shapes with shardings.

    What has no sharding is whole on every device. A device may pad an array to its tiles, of which
    this knows nothing.

    >>> resident({"a": jax.ShapeDtypeStruct((3, 5), "float32"), "b": None})
    60
    """

    def size(x: jax.Array | jax.ShapeDtypeStruct) -> int:
        shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(tree))
