"""What hostile tests share: a place for temporary files, and a look at what was left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_SUBREAPER = 36  # of prctl: what has lost its parent becomes a child of this process
_PLACES = ("/dev/shm", "/var/tmp", "/tmp", os.path.expanduser("~"), os.getcwd())


@pytest.fixture(scope="module")
def private_tmp() -> Iterator[Path]:
    """The directory where Python makes temporary files meanwhile; others may enter it."""
    directory = tempfile.mkdtemp(prefix="hostile-tests-")
    os.chmod(directory, 0o755)
    before, tempfile.tempdir = tempfile.tempdir, directory
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    yield Path(directory)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
    tempfile.tempdir = before
    shutil.rmtree(directory)


@pytest.fixture
def nothing_left(private_tmp: Path) -> Iterator[None]:
    """Afterwards there is no process and no file more than before."""
    processes, files = descendants(), traces(private_tmp)
    yield
    deadline = time.monotonic() + 1.0
    while (new := descendants() - processes) and time.monotonic() < deadline:
        for pid in new:  # an orphan that is dead is ours to bury, as it would be init's
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    assert not descendants() - processes
    assert traces(private_tmp) == files


def descendants() -> set[int]:
    """The processes, dead or alive, that came of this one."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parents[int(name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def traces(private_tmp: Path) -> set[str]:
    """Files of the temporary directory, and those elsewhere that hostile programs would name so."""
    found = {str(path) for path in private_tmp.rglob("*")}
    for place in filter(os.path.isdir, _PLACES):
        found |= {f"{place}/{name}" for name in os.listdir(place) if name.startswith("evil")}
    return found
