"""Worker processes for verifiers: a bounded wait for work that may not end.

A worker is a fresh interpreter that imports one function of ours and answers one item after
another. The parent keeps the time: a worker over its deadline is killed, whatever it is doing and
whichever thread asks, and another takes its place. Not `fork`, which breaks under JAX's threads;
not `multiprocessing`, which runs a user's script again when that has no main guard; not a signal
handler, which never runs inside a C loop.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, Literal, NamedTuple

MAX_ITEM = 32_768  # bytes of JSON

_START_SECONDS = 60.0  # for an interpreter and its imports on a busy machine
_AHEAD = 64  # items that a worker may have waiting, so that it need not wait for the parent
_AHEAD_BYTES = 4096  # of them together: what every pipe holds, so that no write waits for work

# `-c` and not `-m`: the worker searches what its parent searches, and never runs its script.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from jax_grpo.rewards.workers import serve; serve(sys.argv[2], int(sys.argv[3]))"
)


class Answer(NamedTuple):
    """What became of an item."""

    status: Literal["done", "raised", "timeout", "died"]
    value: Any  # what the function gave when "done", else one line that says what happened


class Pool:
    """Workers that call one function; started at first use, kept until `close` or the exit.

    Args:
        function: `package.module:function`, of one JSON value, that gives a JSON value.
        seconds: for one item.
        workers: how many; by default one per core, at most eight.
        memory: bytes of address space of each.
    """

    def __init__(
        self, function: str, *, seconds: float, workers: int | None = None, memory: int = 1 << 30
    ):
        path = [entry or os.getcwd() for entry in sys.path]
        self.seconds = seconds
        self._command = [
            *(sys.executable, "-I", "-c", _PROGRAM, json.dumps(path), function),
            str(memory),
        ]
        self._size = workers or min(8, os.cpu_count() or 1)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    def map(self, items: Sequence[Any]) -> list[Answer]:
        """Answer every item, in order. From any thread; a second caller waits for the first.

        Raises:
            ValueError: for an item of more than `MAX_ITEM` bytes.
            RuntimeError: when a worker cannot start.
        """
        lines = [json.dumps(item).encode() + b"\n" for item in items]
        if any(len(line) > MAX_ITEM for line in lines):
            raise ValueError(f"an item for a worker has more than {MAX_ITEM} bytes")
        if self._owner != os.getpid():  # forked: the workers answer to the parent
            self._workers, self._lock, self._owner = [], threading.Lock(), os.getpid()
        waiting = collections.deque(enumerate(lines))
        answers: dict[int, Answer] = {}
        with self._lock:
            try:
                for worker in [w for w in self._workers if w.process.poll() is not None]:
                    worker.end()  # while it had nothing to do
                    self._workers.remove(worker)
                while len(self._workers) < min(self._size, len(items)):
                    self._workers.append(_Worker(self._command))
                while len(answers) < len(items):
                    for worker in self._workers:
                        ahead = min(_AHEAD, len(waiting) // (2 * self._size))
                        worker.give(waiting, 1 + ahead, self.seconds)
                    self._wait(waiting, answers)
            except BaseException:  # an interrupt: nobody waits for what the workers would say
                self._dismiss()
                raise
        return [answers[index] for index in range(len(items))]

    def _wait(
        self, waiting: collections.deque[tuple[int, bytes]], answers: dict[int, Answer]
    ) -> None:
        """Take the answers that come next; at a deadline, put another worker in place of one."""
        busy = [worker for worker in self._workers if worker.given]
        soonest = min(worker.deadline for worker in busy)
        with selectors.DefaultSelector() as selector:  # poll would do, but not on Windows
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            ready = selector.select(max(0.0, soonest - time.monotonic()))
        talking = [key.data for key, _ in ready]
        for worker in busy:
            if worker in talking:
                alive = worker.take(answers, self.seconds)
                ended = None if alive else Answer("died", "the worker ended without an answer")
            elif worker.deadline <= time.monotonic():
                ended = Answer("timeout", f"no answer within {self.seconds:g} s")
            else:
                ended = None
            if ended is not None:
                index, _ = worker.given.popleft()
                answers[index] = ended
                waiting.extendleft(reversed(worker.given))  # these are not to blame
                worker.end()
                self._workers[self._workers.index(worker)] = _Worker(self._command)

    def close(self) -> None:
        """End the workers; a later `map` starts others."""
        if self._owner == os.getpid():
            with self._lock:
                self._dismiss()

    def _dismiss(self) -> None:
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """One process, and the items that it was given and has not answered."""

    def __init__(self, command: Sequence[str]):
        self.process = start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.given: collections.deque[tuple[int, bytes]] = collections.deque()
        self.deadline = time.monotonic() + _START_SECONDS
        self._started = False
        self._text = b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None  # true of every Popen with PIPE
        return self.process.stdout

    def give(
        self, waiting: collections.deque[tuple[int, bytes]], most: int, seconds: float
    ) -> None:
        """Hand over the next items, `most` at a time."""
        if self._started and not self.given:
            self.deadline = time.monotonic() + seconds
        size = sum(len(line) for _, line in self.given)
        lines = []
        while waiting and len(self.given) < most:
            size += len(waiting[0][1])
            if self.given and size > _AHEAD_BYTES:
                break
            self.given.append(waiting.popleft())
            lines.append(self.given[-1][1])
        if lines:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # dead: `take` finds out
                self.process.stdin.write(b"".join(lines))
                self.process.stdin.flush()

    def take(self, answers: dict[int, Answer], seconds: float) -> bool:
        """Read the answers that are there; False when the worker has ended."""
        text = os.read(self.output.fileno(), 1 << 16)
        *lines, self._text = (self._text + text).split(b"\n")
        for line in lines:
            self.deadline = time.monotonic() + seconds
            answer = Answer(*json.loads(line))
            if self._started:
                index, _ = self.given.popleft()
                answers[index] = answer
            elif answer.status == "done":
                self._started = True
            else:
                raise RuntimeError(f"a worker cannot start: {answer.value}")
        return bool(text) or not self.given

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what was not written yet
                pipe.close()


def start_process(command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen` in a session of its own, from a thread that outlives all others.

    Linux sends the signal of a parent's death when the thread that started the child ends. An
    interrupt from the terminal is the parent's matter, hence the session.
    """

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=True, **settings)

    return _spawner(os.getpid()).submit(start).result()


@functools.cache
def _spawner(owner: int) -> concurrent.futures.ThreadPoolExecutor:
    """The thread that starts processes; a fork of `owner` has no thread, and makes its own."""
    del owner
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="verifiers")


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere it ends with its input."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(name: str, memory: int) -> None:
    """Run as a worker: answer the items of standard input with the function, one by one."""
    end_with_parent()
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer

    def say(answer: Answer) -> None:
        os.write(output, json.dumps(answer).encode() + b"\n")

    try:
        module, _, attribute = name.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        with contextlib.suppress(ImportError):  # Windows has no limits
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except Exception as error:
        return say(Answer("raised", f"{type(error).__name__}: {error}"))
    say(Answer("done", None))
    for line in sys.stdin.buffer:
        try:
            answer = Answer("done", function(json.loads(line)))
        except Exception as error:
            answer = Answer("raised", f"{type(error).__name__}: {str(error)[:200]}")
        say(answer)
