"""Every test runs on eight fake CPU devices and without a network."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"  # also for the commands that tests start
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402
import pytest  # noqa: E402

# Not in the environment: a command started by a test sees one device, as its user does.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def strict() -> Iterator[None]:
    """No silent promotion of dtypes or ranks; for the tests of layer 1, since Optax promotes."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
