"""The commands: flags and configs become objects here and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import flags


class BadInput(Exception):
    """What the user gave cannot be used; the message is the one line that says why."""


@contextlib.contextmanager
def refusing_bad_input(
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, flags.Error),
) -> Iterator[None]:
    """Turns the errors by which our functions refuse their input into `BadInput`."""
    try:
        yield
    except kinds as error:
        raise BadInput(" ".join(str(error).split())) from error
