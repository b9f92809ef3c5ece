"""The process that forks for every program of the sandbox, and the pipes to a program."""

from __future__ import annotations

import atexit
import inspect
import marshal
import os
import socket
import subprocess
import sys
import threading
from types import CodeType

from jax_grpo.rewards import jail, walls
from jax_grpo.rewards.workers import start_process

# Becomes the nursery, then in its forks a program, of which it leaves no name. Where a program
# ends as it should, what it has open is written and its objects go, as at any end, but the
# interpreter is not taken down: that takes longer than most programs.
_BOOT = """
def start(space):
    import atexit, builtins, gc, io, marshal, os, sys, types
    parts = []
    builtins.exit = builtins.quit = sys.exit  # which `-S` leaves out
    with open(0, "rb", closefd=False) as file:
        for name, code in marshal.load(file):
            module = sys.modules[name] = types.ModuleType(name)
            exec(code, vars(module))
            parts.append(name)
    program = sys.modules[parts[-1]].nurse(int(sys.argv[1]))
    for name in parts:
        del sys.modules[name]
    sys.argv[:] = ["main.py"]
    del space["start"]
    ended = []
    def flush():
        sys.stdout.flush()
        for thing in [sys.__stdout__, *gc.get_objects()]:
            if type(thing) in (io.TextIOWrapper, io.BufferedWriter) and not thing.closed:
                thing.flush()
    @atexit.register  # the first, so it comes last, behind all threads too
    def end():
        if ended:
            flush()
            try:
                space.clear()
                gc.collect()
                sys.__stdout__.flush()
            finally:
                os._exit(0)
    exec(compile(program, "main.py", "exec") if isinstance(program, str) else program, space)
    ended.append(True)
start(globals())
"""

WE_WRITE = ("stdin", "requests", "commands")


def fork() -> dict[str, int]:
    """Have the nursery fork for one program; our ends of its pipes, which do not block."""
    theirs: dict[str, int] = {}
    ours: dict[str, int] = {}
    try:
        for name in jail.PIPES:
            reading, writing = os.pipe()
            ends = (reading, writing) if name in WE_WRITE else (writing, reading)
            theirs[name], ours[name] = ends
            os.set_blocking(ours[name], False)
        with _lock:
            for _ in range(2):  # somebody may have killed the first
                process, control = _nursery()
                try:
                    socket.send_fds(control, [b"x"], list(theirs.values()))
                    break
                except ConnectionError:
                    _end_nursery(process, control)
    except BaseException:
        for descriptor in ours.values():
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs.values():
            os.close(descriptor)
    return ours


_lock = threading.Lock()
# By process, as a fork of one has none of its parent's.
_nurseries: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}


def _nursery() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that forks for this one's programs, and our end of the socket to it."""
    if os.getpid() not in _nurseries:
        ours, theirs = socket.socketpair()
        interpreter = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        nobody, output = os.pipe()  # streams remember what they were: /dev/null can be sought
        try:
            process = start_process(
                [interpreter, *("-I", "-S", "-B", "-X", "utf8", "-c"), _BOOT, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
            )
        finally:
            theirs.close()
            os.close(nobody)
            os.close(output)
        assert process.stdin is not None  # true of PIPE
        with process.stdin as pipe:
            marshal.dump(_code(), pipe)
        _nurseries[os.getpid()] = process, ours
        atexit.register(_end_nursery, process, ours)
    return _nurseries[os.getpid()]


def _end_nursery(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End the nursery, and by that all that came of it."""
    if _nurseries.pop(os.getpid(), None) is not None:
        control.close()
        process.kill()
        process.wait()


def _code() -> list[tuple[str, CodeType]]:
    """The modules that the nursery is made of, the last one on top."""
    modules = (walls, jail)
    return [
        (module.__name__, compile(inspect.getsource(module), f"{module.__name__}.py", "exec"))
        for module in modules
    ]
