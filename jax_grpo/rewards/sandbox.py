"""Run a Python program that nobody has read: what it can reach, and for how long, is bounded.

Without privileges and without installs. The program runs in a fresh, isolated interpreter (the
standard library alone) with an empty environment, a private temporary directory, limits on time,
memory, processes, files and output, and nothing of its parent's. How well it is shut in depends
on the system, and is one of three levels:

- `namespaces`: file system, processes, network and user of its own (Linux, where it is allowed);
- `filters`: an unprivileged user behind seccomp and Landlock: no network, no signals to others,
  no file outside of its directory but the interpreter's;
- `limits`: what is left: limits and the kill at the deadline. It can read what its user can and
  reach the network. Fit for code that is clumsy, not for code that is hostile.

A container or a virtual machine round the whole is the right outer wall for code of strangers.
`jail.py` is what happens inside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import marshal
import os
import resource
import selectors
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Literal, NamedTuple

from jax_grpo.rewards.nursery import WE_WRITE, fork

LEVELS = ("limits", "filters", "namespaces")

_SET_UP_SECONDS = 30.0  # for the interpreter and its walls on a busy machine
_GRACE_SECONDS = 5.0  # from the kill to the end
_WATCH_SECONDS = 0.05  # between looks at the memory
_STDERR_BYTES = 1 << 16  # kept; the rest is read and thrown away
_WASTED_BYTES = 1 << 26  # thrown away at most, since reading is work
_DROPS = 100  # small pieces of output that are read at once; then let some more gather
_DROP_BYTES, _DROP_SECONDS = 4096, 0.001
_READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")

_logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """What a program may use."""

    seconds: float = 10.0  # of the clock on the wall, from the program's start
    memory: int = 1 << 30  # bytes, of each process by the kernel, of all together by a watch
    output: int = 1 << 20  # bytes of standard output, and of each frame
    files: int = 1 << 26  # bytes of its temporary directory (of each file, below `namespaces`)
    processes: int = 16  # with threads


class Outcome(NamedTuple):
    """How a program ended."""

    status: Literal["ended", "timeout", "output", "memory", "stopped", "failed"]
    stdout: bytes
    stderr: bytes  # where "failed", why the sandbox could not start
    code: int | None  # exit code, or a signal's number below 0; never evidence of success
    level: str


class Ended(Exception):  # noqa: N818 - not an error but news
    """A program ended instead of answering."""

    def __init__(self, outcome: Outcome):
        super().__init__(f"the program ended: {outcome.status}")
        self.outcome = outcome


class _Method(NamedTuple):
    """A way of shutting in, as `jail.enter` takes it."""

    namespaces: Literal["root", "user", ""]  # made as root, inside a user namespace, or none
    drop: bool  # from root to an unprivileged user


class _Reached(NamedTuple):
    method: _Method
    level: str
    why: str  # not more


def run(
    program: str | CodeType,
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    require: str = "",
) -> Outcome:
    r"""Run a program to its end.

    Args:
        program: Python source text, or code compiled from it; runs as `__main__`.
        stdin: what it reads.
        limits: what it may use; by default as `Limits` says.
        require: the level that must be reached.

    Raises:
        ValueError: when this system does not reach the level.

    >>> run("print(2 * int(input()))", stdin=b"21").stdout
    b'42\n'
    """
    with Session(program, stdin=stdin, limits=limits, require=require) as session:
        return session.wait()


class Session:
    """A program that runs, and may answer frames.

    A frame is four bytes, the length (big-endian), and as many bytes. The program reads frames
    from descriptor 3 and writes its own to 4.

    Args:
        program: Python source text, or code compiled from it; runs as `__main__`.
        stdin: what it reads.
        limits: what it may use; `seconds` counts while somebody waits for it.
        require: the level that must be reached.

    Raises:
        ValueError: when this system does not reach the level.
    """

    def __init__(
        self,
        program: str | CodeType,
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        require: str = "",
        _method: _Method | None = None,
    ):
        self._limits = limits or Limits()
        method, self._level, _ = _reach(require) if _method is None else _Reached(_method, "", "")
        self._status: Any = None  # of the outcome, once it is known
        self._code: int | None = None
        self._pid: int | None = None
        self._keeper = 0  # the process that waits for it
        self._looked = 0.0  # when, at its memory
        self._flags: frozenset[str] | None = None  # what the jail reached, once it is ready
        self._left = self._limits.seconds
        self._cut = False  # more standard output than allowed
        self._wasted = 0  # bytes of output that were not kept
        self._drops = 0  # small pieces of output
        self._read = {name: bytearray() for name in ("stdout", "stderr", "reports", "frames")}
        self._unsent = {name: bytearray() for name in WE_WRITE}
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[str, int] = {}
        self._directory = tempfile.mkdtemp(prefix="sandbox-")
        config = {
            "namespaces": method.namespaces,
            "drop": method.drop,
            "limits": self._limits._asdict(),
            "directory": self._directory,
            "prefix": os.path.realpath(sys.base_prefix),
            "readable": [path for path in _READABLE if os.path.exists(path)],
        }
        try:
            self._pipes = fork()
            for name in self._read:
                self._selector.register(self._pipes[name], selectors.EVENT_READ, name)
            self._send("commands", _length(marshal.dumps((config, program))))
            self._send("stdin", stdin)
            self._pump(lambda: self._flags is not None, _SET_UP_SECONDS, "failed")
        except BaseException:  # an interrupt, or no descriptors: nobody else can clean up
            self._clean_up()  # the end of its commands ends the program
            raise
        if self._flags is None:
            self._status = "failed"

    def ask(self, frame: bytes, seconds: float | None = None) -> bytes:
        """Send a frame and wait for one.

        Args:
            frame: what the program shall read.
            seconds: at most so long, and at most what is left of the limit.

        Raises:
            Ended: when the program ends, or is ended, instead.
        """
        if not self._pipes:
            raise Ended(self.close())
        self._send("requests", _length(frame))
        limit = self._left if seconds is None else min(seconds, self._left)
        began = time.monotonic()
        self._pump(lambda: self._answer() is not None, limit, "timeout")
        self._left -= time.monotonic() - began
        answer = self._answer()
        if answer is None:
            raise Ended(self.close())
        del self._read["frames"][: 4 + len(answer)]
        return answer

    def wait(self) -> Outcome:
        """Wait for the program's own end, as long as its limits allow."""
        self._pump(lambda: self._cut, self._left, "timeout")
        if self._cut:
            self._stop("output")
        return self.close()

    def close(self) -> Outcome:
        """End the program if it still runs, with all that it started; leave nothing behind."""
        if self._pipes:
            try:
                self._stop("stopped")
                self._send("commands", b"x")  # the keeper may go, and must
                deadline = time.monotonic() + _GRACE_SECONDS
                while self._keeper_lives() and time.monotonic() < deadline:
                    self._move(_WATCH_SECONDS)
                while self._move(0.0) and time.monotonic() < deadline:
                    pass  # what it had written before its end
            finally:
                self._clean_up()
        stdout, stderr = bytes(self._read["stdout"]), bytes(self._read["stderr"])
        return Outcome(self._status, stdout, stderr, self._code, self._level)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------ within

    def _pump(self, done: Callable[[], bool], seconds: float, status: str) -> None:
        """Move bytes until it is done, or the program has ended, or must end."""
        deadline = time.monotonic() + seconds
        while self._status is None and not done():
            now = time.monotonic()
            if now >= deadline:
                self._stop(status)
            elif self._keeper and now - self._looked >= _WATCH_SECONDS:
                if _resident(self._keeper) > self._limits.memory:
                    self._stop("memory")
                self._looked = time.monotonic()
            else:
                self._move(min(deadline - now, _WATCH_SECONDS))

    def _send(self, name: str, data: bytes) -> None:
        """Queue bytes for a pipe."""
        self._unsent[name] += data
        if self._pipes[name] not in self._selector.get_map():
            self._selector.register(self._pipes[name], selectors.EVENT_WRITE, name)

    def _move(self, seconds: float) -> bool:
        """Read and write what can be at once, or after a while; whether there was anything."""
        events = self._selector.select(seconds)
        for key, _ in events:
            if key.data in self._read:
                data = os.read(key.fd, 1 << 16)
                if data:
                    self._take(key.data, data)
                else:
                    self._selector.unregister(key.fd)
                    if key.data == "reports":  # the keeper is gone, killed unless it said more
                        self._status = self._status or "stopped"
                continue
            unsent = self._unsent[key.data]
            try:
                del unsent[: os.write(key.fd, unsent)]
            except BrokenPipeError:
                unsent.clear()
            if not unsent:
                self._selector.unregister(key.fd)
                if key.data == "stdin":
                    os.close(self._pipes.pop("stdin"))
        return bool(events)

    def _take(self, name: str, data: bytes) -> None:
        """Keep what was read, within bounds."""
        kept = self._read[name]
        kept += data
        if name == "reports":
            *lines, rest = kept.split(b"\n")
            self._read[name] = rest
            for line in lines:
                self._report(*line.decode().split(" ", 1))
        elif name == "frames":
            if len(kept) > 4 + self._limits.output:
                self._stop("output")
        else:
            if len(data) < _DROP_BYTES:
                self._drops += 1
                if self._drops > _DROPS:
                    time.sleep(_DROP_SECONDS)
            if len(kept) > (most := self._limits.output if name == "stdout" else _STDERR_BYTES):
                self._wasted += len(kept) - most
                del kept[most:]
                self._cut = self._cut or name == "stdout"
            if self._wasted > _WASTED_BYTES:
                self._stop("output")

    def _report(self, word: str, rest: str) -> None:
        """Act on what the jail says."""
        if word == "pid":
            self._pid, self._keeper = map(int, rest.split())
            self._looked = time.monotonic()
        elif word == "ready":
            self._flags = frozenset(rest.split())
        elif word == "failed":
            self._status = self._status or "failed"
            self._read["stderr"] = bytearray(rest.encode())
        elif word == "ended":
            self._code = int(rest)
            self._status = self._status or "ended"

    def _answer(self) -> bytes | None:
        """The first frame, if it has come whole."""
        frames = self._read["frames"]
        size = int.from_bytes(frames[:4], "big")
        if len(frames) >= 4 and size > self._limits.output:
            self._stop("output")
        return bytes(frames[4 : 4 + size]) if 4 <= 4 + size <= len(frames) else None

    def _keeper_lives(self) -> bool:
        return self._pipes["reports"] in self._selector.get_map()

    def _stop(self, status: str) -> None:
        """Kill the program, unless it has ended; the keeper then kills what else there is."""
        if self._status is None:
            self._status = status
            if self._pid is not None and self._keeper_lives():  # so the number is still its own
                os.kill(self._pid, signal.SIGKILL)

    def _clean_up(self) -> None:
        """Close the pipes, remove the directory."""
        self._selector.close()
        for descriptor in self._pipes.values():
            os.close(descriptor)
        self._pipes = {}
        with contextlib.suppress(OSError):
            _remove(self._directory)


def _remove(directory: str) -> None:
    """Remove a tree of a program's: of any depth, closed to us, or a link in its place."""
    if os.path.islink(directory):
        return os.unlink(directory)
    os.chmod(directory, 0o700)
    here = os.open(directory, os.O_RDONLY)
    names: list[str] = []  # on the way from there to here
    try:
        while True:
            step = ".."
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        step = entry.name
                        os.chmod(step, 0o700, dir_fd=here)
                        break
                    os.unlink(entry.name, dir_fd=here)
            if step == ".." and not names:
                return os.rmdir(directory)
            there = os.open(step, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = there
            if step == "..":
                os.rmdir(names.pop(), dir_fd=here)
            else:
                names.append(step)
    finally:
        os.close(here)


def _length(data: bytes) -> bytes:
    """Bytes behind their length."""
    return struct.pack(">I", len(data)) + data


def _resident(pid: int) -> int:
    """Bytes of memory that a process and all that it started hold; 0 where it cannot be seen."""
    total, page = 0, resource.getpagesize()
    waiting = [str(pid)]
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{name}/statm").read_text().split()[1]) * page
            for task in os.listdir(f"/proc/{name}/task"):
                waiting += Path(f"/proc/{name}/task/{task}/children").read_text().split()
    return total


# -------------------------------------------------------------------------- what can be reached


def level(require: str = "") -> str:
    """The level of isolation that this system reaches, one of `LEVELS`.

    Raises:
        ValueError: when it is less than what is required.
    """
    return _reach(require).level


def _reach(require: str) -> _Reached:
    """The best that can be had; ValueError if that is less than is required."""
    if require and require not in LEVELS:
        raise ValueError(f"require={require!r} is no level of isolation: {', '.join(LEVELS)}")
    best = _best(os.getpid())
    if require and LEVELS.index(best.level) < LEVELS.index(require):
        raise ValueError(
            f"the sandbox reaches the level {best.level!r} here, and {require!r} is required: "
            f"{best.why}"
        )
    return best


@functools.cache
def _best(owner: int) -> _Reached:
    """Try the methods, the best first, with a program that does nothing."""
    del owner
    root = os.geteuid() == 0
    methods = [_Method("user", False), _Method("", False)]
    if root:
        methods = [_Method(n, True) for n in ("root", "user", "")] + [_Method("", False)]
    whys = []
    for method in methods:
        with Session("import json; print('ready')", _method=method) as session:
            outcome = session.wait()
        if outcome.stdout == b"ready\n":
            flags = session._flags or frozenset()
            reached = "limits"
            if {"unprivileged", "namespaces"} <= flags:
                reached = "namespaces"
            elif {"unprivileged", "landlock", "seccomp"} <= flags:
                reached = "filters"
            elif "unprivileged" not in flags:
                whys.append("it runs as root")
            log = _logger.info if reached == LEVELS[-1] else _logger.warning
            log("programs run at the isolation level %r (%s)", reached, ", ".join(sorted(flags)))
            return _Reached(method, reached, "; ".join(whys) or "the kernel lacks the filters")
        whys.append(f"{method.namespaces or 'no'} namespaces: {outcome.stderr.decode()[-200:]}")
    raise RuntimeError(f"no program can be run here: {'; '.join(whys)}")


class Probe(NamedTuple):
    """What harmless programs found out about their sandbox."""

    private_processes: bool  # they see no process of their parent's
    unprivileged: bool  # they are not root and cannot become it
    limits_bind: bool  # memory, processes and files end where they should


def probe() -> Probe:
    """Find out inside the sandbox whether it holds; only then run what could do harm."""
    limits = Limits(seconds=20.0, memory=1 << 28, files=1 << 22, processes=8)
    outcome = run(_PROBE.format(parent=os.getpid(), **limits._asdict()), limits=limits)
    try:
        return Probe(*json.loads(outcome.stdout))
    except (ValueError, TypeError):
        return Probe(False, False, False)


_PROBE = """
import json, os, threading

def refused(function, *arguments):
    try:
        function(*arguments)
    except (OSError, MemoryError, RuntimeError):
        return True
    return False

def write_much():
    for name in range(8):
        with open(f"much-{{name}}", "wb") as file:
            file.write(bytes({files} // 4))

def start_many():
    threads = [threading.Thread(target=enough.wait) for _ in range({processes})]
    try:
        for thread in threads:
            thread.start()
    finally:
        enough.set()

enough = threading.Event()
private = os.getpid() == 1 and refused(os.kill, {parent}, 0)
unprivileged = os.getuid() != 0 and refused(os.setuid, 0)
limits = [refused(bytearray, {memory}), refused(start_many), refused(write_much)]
print(json.dumps([private, unprivileged, all(limits)]))
"""
