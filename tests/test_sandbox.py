"""The sandbox, with harmless programs: what they see, what they may use, and that they end.

Every method that works on this machine is tried. What could do harm is in tests/hostile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from jax_grpo.rewards import nursery, sandbox
from jax_grpo.rewards.sandbox import Ended, Limits, Session, _Method

ROOT = os.geteuid() == 0
METHODS = [_Method("user", False), _Method("", False)]
if ROOT:
    METHODS = [_Method("root", True), _Method("user", True), _Method("", True), _Method("", False)]


def run(program, method, stdin=b"", **limits):
    program = textwrap.dedent(program)
    with Session(program, stdin=stdin, limits=Limits(**limits), _method=method) as session:
        outcome = session.wait()
    return outcome, session._flags


def flags_of(method):
    outcome, flags = run("", method)
    return flags if outcome.status == "ended" else None


FLAGS = {method: flags_of(method) for method in METHODS}


@pytest.fixture(params=METHODS, ids=lambda m: f"{m.namespaces or 'none'}{'-drop' * m.drop}")
def method(request):
    if FLAGS[request.param] is None:
        pytest.skip("this machine does not allow it")
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left():
    def left():
        # Children of ours that are still there, alive or not, and what is open.
        pids: list[str] = []
        for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                pids += file.read_text().split()
        return len(pids), len(os.listdir("/proc/self/fd"))

    sandbox.level()  # starts what stays
    before = left()
    yield
    assert left() == before


# ------------------------------------------------------------------------------- what it gives


def test_output_input_and_exit_code(method):
    program = """
    import sys
    print("é", input(), sep="\\n")
    print("why", file=sys.stderr)
    sys.exit(3)
    """
    outcome, _ = run(program, method, stdin="ü\n".encode())
    assert outcome[:4] == ("ended", "é\nü\n".encode(), b"why\n", 3)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("1/0", 1, "ZeroDivisionError"),
        ("def", 1, "SyntaxError"),
        ("\0", 1, "null bytes"),
        ("'\ud800'", 1, "surrogates not allowed"),
        ("import numpy", 1, "No module named 'numpy'"),
        ("os.getpid()", 1, "name 'os' is not defined"),  # none of the jail's names is left
        ("start", 1, "name 'start' is not defined"),
    ],
)
def test_programs_that_fail(program, code, words):
    outcome = sandbox.run(program)
    assert outcome.status == "ended" and outcome.code == code
    assert words in outcome.stderr.decode()


def test_programs_that_were_forked_alike_differ():
    program = (
        "import random, secrets, uuid; print(random.random(), secrets.token_hex(), uuid.uuid4())"
    )
    first, second = (sandbox.run(program).stdout.split() for _ in range(2))
    assert len(first) == len(second) == 3 and not set(first) & set(second)


def test_code_runs_like_its_text():
    code = compile("import sys; print(__name__, sys.argv)", "a.py", "exec")
    assert sandbox.run(code).stdout == b"__main__ ['main.py']\n"


def test_the_end_of_a_program_is_an_interpreters(method):
    program = """
    import atexit, dataclasses, threading, time
    @dataclasses.dataclass
    class Point:
        x: int = 3
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread", Point()))).start()
    print(__name__)
    """
    outcome, _ = run(program, method)
    assert outcome.stdout.decode().split("\n") == ["__main__", "thread Point(x=3)", "at exit", ""]


FAST_OUTPUT = """
import io, os, sys
class Fast:
    def __init__(self):
        self.buffer = io.BytesIO()
        self.write = lambda text: self.buffer.write(text.encode())
    def flush(self):
        os.write(1, self.buffer.getvalue())
        self.buffer = io.BytesIO()
sys.stdout = Fast()
sys.stdout.write("fast")
"""


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("out = open(1, 'w')\nout.write('not closed')", "not closed"),
        ("out = [open(1, 'w')]\nout.append(out)\nout[0].write('in a cycle')", "in a cycle"),
        ("import io, sys\nsys.stdout = io.StringIO()\nsys.__stdout__.write('kept')", "kept"),
        ("import sys\nsys.stdout = open(1, 'w')\nprint('another')", "another\n"),
        (FAST_OUTPUT, "fast"),
        ("import sys\nsys.stdout.write('closed')\nsys.stdout.close()", "closed"),
        ("class A:\n def __del__(self): print('deleted')\na = A()", "deleted\n"),
        ("import os\nif os.fork(): os.wait()\nprint('both')", "both\nboth\n"),
        ("import atexit\natexit._clear()\nprint('cleared')", "cleared\n"),
    ],
)
def test_what_was_written_comes_out_at_the_end(program, output):
    outcome = sandbox.run(program)
    assert (outcome.code, outcome.stdout.decode()) == (0, output), outcome


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import atexit, os\natexit.register(os._exit, 4)", 4),
        ("import atexit, sys\natexit.register(print)\nsys.exit(5)", 5),
        ("raise SystemExit", 0),
        ("raise SystemExit('no')", 1),
    ],
)
def test_exit_codes(program, code):
    assert sandbox.run(program).code == code


def test_large_input_and_output(method):
    data = os.urandom(3_000_000).hex().encode()
    program = "import sys; sys.stdout.write(sys.stdin.read()[::-1])"
    outcome, _ = run(program, method, stdin=data, output=len(data))
    assert outcome.status == "ended" and outcome.stdout == data[::-1]
    # It need not read its input.
    assert run("print(1)", method, stdin=data)[0].stdout == b"1\n"


def test_standard_streams_have_paths(method):
    program = """
    print(open("/dev/stdin").read(), file=open("/dev/stdout", "w"))
    print(*open("/dev/fd/0"), file=open("/dev/stderr", "w"))
    """
    outcome, _ = run(program, method, stdin=b"in")
    assert outcome[:4] == ("ended", b"in\n", b"\n", 0)


# -------------------------------------------------------------------------------- what it sees


def seen_by(method, expression):
    program = f"import json, os, sys\nprint(json.dumps({expression}))"
    outcome, _ = run(program, method)
    assert outcome.status == "ended", outcome
    return json.loads(outcome.stdout)


def test_nothing_of_the_parents_reaches_it(method, monkeypatch):
    monkeypatch.setenv("CANARY", "secret")
    environment = seen_by(method, "dict(os.environ)")
    assert environment.keys() == {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE"}
    home = seen_by(method, "[os.getcwd(), os.listdir(), os.path.expanduser('~')]")
    assert home == [home[0], [], home[0]]
    look = "[fd for fd in range(4096) if os.path.exists(f'/dev/fd/{fd}')]"
    if "landlock" not in FLAGS[method]:  # it hides /proc
        assert set(seen_by(method, look)) <= {0, 1, 2, 3, 4, 5}  # 5: the look's own
    assert seen_by(method, "sys.argv") == ["main.py"]
    assert not any("site-packages" in path for path in seen_by(method, "sys.path"))
    assert seen_by(method, "sys.version") == sys.version


def test_walls_are_where_the_flags_say(method):
    flags = FLAGS[method]
    if "unprivileged" in flags:
        assert seen_by(method, "os.getuid()") != 0
        assert seen_by(method, "os.getgroups()") in ([], [seen_by(method, "os.getgid()")])
    if "namespaces" in flags:
        assert seen_by(method, "os.getpid()") == 1
        names = {"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "tmp", "usr"}
        prefix = Path(os.path.realpath(sys.base_prefix)).parts[1]
        assert set(seen_by(method, "os.listdir('/')")) <= names | {prefix}


def test_other_files_are_hidden_or_closed(method, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("secret")
    for directory in [tmp_path, *tmp_path.parents]:
        if directory != Path("/") and directory.owner() != "root":
            directory.chmod(0o755)
    program = f"""
    try:
        print(open({str(canary)!r}).read())
    except OSError as error:
        print(type(error).__name__)
    try:
        open("/usr/lib/planted", "w")
    except OSError:
        print("refused")
    """
    outcome, flags = run(program, method)
    if flags & {"namespaces", "landlock"}:
        assert outcome.stdout.split() in (
            [b"FileNotFoundError", b"refused"],
            [b"PermissionError", b"refused"],
        )


def test_no_network(method):
    if not FLAGS[method] & {"namespaces", "seccomp"}:
        pytest.skip("nothing here shuts it off")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        program = f"""
        import socket
        try:
            socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), 1)
        except OSError as error:
            print("refused")
        """
        outcome, _ = run(program, method)
        assert outcome.stdout == b"refused\n"
        with pytest.raises(TimeoutError):
            listener.accept()


def test_calls_that_no_honest_program_needs_are_refused(method):
    if "seccomp" not in FLAGS[method]:
        pytest.skip("no seccomp here")
    program = """
    import ctypes, os, resource, subprocess, sys, threading
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ("unshare", "setns", "ptrace", "chroot"):
        print(getattr(libc, call)(0x10000000 if call == "unshare" else 0, 0, 0, 0), end=" ")
    print(libc.prctl(1, 0, 0, 0, 0), end=" ")  # the signal of the parent's death
    print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, 0))
    # and these work
    thread = threading.Thread(target=print, args=("thread",))
    thread.start()
    thread.join()
    print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout)
    print(resource.getrlimit(resource.RLIMIT_CORE), os.kill(os.getpid(), 0))
    """
    outcome, _ = run(program, method)
    lines = outcome.stdout.decode().splitlines()
    assert lines == ["-1 -1 -1 -1 -1 -1", "thread", "b'1\\n'", "(0, 0) None"], outcome


OUTSIDE_OF_LIMITS = """
import ctypes, os, socket
libc = ctypes.CDLL(None)
for kind in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG):
    try:
        socket.socket(kind, socket.SOCK_STREAM)
        print("a socket of family", kind)
    except PermissionError:
        pass
for get in (libc.shmget, libc.semget, libc.msgget):
    if get(0, 1, 0o1600) != -1:
        print("an object of", get.__name__)
try:
    os.memfd_create("x")
    print("memory without a limit")
except PermissionError:
    pass
"""


def test_what_namespaces_and_limits_do_not_bound_is_refused(method):
    if "seccomp" not in FLAGS[method]:
        pytest.skip("no seccomp here")
    outcome, _ = run(OUTSIDE_OF_LIMITS, method)
    assert outcome[:4] == ("ended", b"", b"", 0)


OTHERS = """
import fcntl, os
def own(request):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, request, {pid})
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"x")  # and the kernel signals the owner
attempts = [
    (os.kill, {pid}, 10),
    (own, fcntl.F_SETOWN),
    (os.setpriority, os.PRIO_PROCESS, {pid}, 1),
    (os.sched_setaffinity, {pid}, {{0}}),
    (os.sched_setscheduler, {pid}, os.SCHED_BATCH, os.sched_param(0)),
]
for attempt, *arguments in attempts:
    try:
        attempt(*arguments)
        print(attempt.__name__)
    except OSError:
        pass
"""


def test_no_signal_reaches_another_and_no_other_is_slowed_down(method):
    if not FLAGS[method] & {"namespaces", "seccomp"}:
        pytest.skip("nothing here keeps it from that")
    with subprocess.Popen(["sleep", "60"]) as other:  # of this user, as the program may be
        outcome, _ = run(OTHERS.format(pid=other.pid), method)
        assert outcome[:4] == ("ended", b"", b"", 0)
        assert other.poll() is None and os.getpriority(os.PRIO_PROCESS, other.pid) == 0
        other.kill()


def test_honest_libraries_work(method):
    program = """
    import asyncio, bisect, collections, concurrent.futures, ctypes, dataclasses, decimal, enum
    import fractions, functools, hashlib, heapq, itertools, json, math, multiprocessing, random, re
    import sqlite3, ssl, statistics, string, tempfile, time, typing, unicodedata, uuid, zlib
    async def twice(x):
        await asyncio.sleep(0)
        return 2 * x
    print(asyncio.run(twice(21)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        print(sum(pool.map(lambda x: x * x, range(10))))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(100_000))
        print(file.tell())
    print(random.SystemRandom().random() < 1, hashlib.sha256(b"").hexdigest()[:4])
    """
    outcome, _ = run(program, method)
    assert outcome.stdout.decode().split() == ["42", "285", "100000", "True", "e3b0"], outcome


# -------------------------------------------------------------------------------- what it may use


def test_memory_of_one_process(method):
    outcome, _ = run("bytearray(1 << 29)", method, memory=1 << 28)
    assert outcome.status == "ended" and b"MemoryError" in outcome.stderr
    assert run("print(len(bytearray(1 << 27)))", method, memory=1 << 28)[0].stdout == b"134217728\n"


def test_memory_of_all_processes(method):
    program = """
    import os, time
    for _ in range(3):
        if not os.fork():
            break
    kept = bytearray(b"x") * (40 << 20)
    time.sleep(20)
    """
    began = time.monotonic()
    outcome, _ = run(program, method, memory=1 << 27)
    assert outcome.status == "memory" and time.monotonic() - began < 10


def test_memory_of_orphans(method):
    program = """
    import os, time
    for _ in range(3):
        if not os.fork():
            if os.fork():
                os._exit(0)
            kept = bytearray(b"x") * (60 << 20)
            time.sleep(20)
    time.sleep(20)
    """
    assert run(program, method, memory=1 << 27)[0].status == "memory"


def test_files(method):
    program = """
    try:
        for name in range(8):
            with open(str(name), "wb") as file:
                file.write(bytes(1 << 20))
    except OSError:
        print("full", name)
    """
    outcome, flags = run(program, method, files=4 << 20)
    if "namespaces" in flags:  # all together
        assert outcome.stdout.startswith(b"full ")
    outcome, _ = run("open('x', 'wb').write(bytes(2 << 20))", method, files=1 << 20)
    assert outcome.code == 1 and b"OSError" in outcome.stderr


def test_processes(method):
    program = """
    import threading
    event, threads = threading.Event(), []
    try:
        for _ in range(20):
            threads.append(threading.Thread(target=event.wait))
            threads[-1].start()
    except RuntimeError:
        print(len(threads))
    event.set()
    """
    outcome, flags = run(program, method, processes=8)
    if "unprivileged" in flags:
        assert outcome.stdout == b"8\n"  # seven and the main thread, one was refused


def test_output_is_capped_while_it_is_read(method):
    began = time.monotonic()
    outcome, _ = run("while True: print('a' * 1000)", method, output=100_000)
    assert outcome.status == "output" and outcome.stdout == (b"a" * 1000 + b"\n") * 99 + b"a" * 901
    assert time.monotonic() - began < 5
    chatter = "import sys\nfor _ in range(1000): print('a' * 1000, file=sys.stderr)\nprint(1)"
    outcome, _ = run(chatter, method, output=100)
    assert outcome.status == "ended" and outcome.stdout == b"1\n" and len(outcome.stderr) == 65536
    began = time.monotonic()
    assert run("import os\nwhile True: os.write(2, bytes(65536))", method)[0].status == "output"
    assert time.monotonic() - began < 5


def test_output_drop_by_drop_is_little_work():
    before = time.process_time()
    program = "import os\nwhile True: os.write(2, b'x')"
    assert sandbox.run(program, limits=Limits(seconds=1.0)).status == "timeout"
    assert time.process_time() - before < 0.4


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "sum(range(10**12))",
        "while True:\n try:\n  while True: pass\n except BaseException: pass",
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass",
        "import os; os.closerange(0, 10)\nwhile True: pass",
    ],
)
def test_the_deadline_holds(program):
    began = time.monotonic()
    outcome = sandbox.run(program, limits=Limits(seconds=0.5))
    assert outcome.status == "timeout" and 0.5 <= time.monotonic() - began < 1.5


def test_what_a_program_starts_ends_with_it(method):
    # Two children of each kind: that waits, and that has left the group and the parent.
    name = f"left-{os.urandom(4).hex()}"
    program = f"""
    import ctypes, os, time
    ctypes.CDLL(None).prctl(15, {name.encode()})
    for kind in range(4):
        if not os.fork():
            if kind % 2:
                try:
                    os.setsid()
                except OSError:
                    pass
                if os.fork():
                    os._exit(0)
            time.sleep(300)
    print("started", flush=True)
    """
    outcome, _ = run(program, method)
    assert outcome.status == "ended" and b"started" in outcome.stdout
    assert not processes(name)
    outcome, _ = run(program + "time.sleep(100)", method, seconds=1.0)
    assert outcome.status == "timeout" and b"started" in outcome.stdout
    assert not processes(name)


def processes(name):
    """The processes of that name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [file.parent.name] * (file.read_text().strip() == name)
        except OSError:
            pass
    return found


# ------------------------------------------------------------------------------------ sessions

ECHO = """
import os
def read(n):
    data = b""
    while len(data) < n:
        data += os.read(3, n - len(data))
    return data
while True:
    frame = read(int.from_bytes(read(4), "big"))
    if frame == b"hang":
        while True: pass
    if frame == b"end":
        raise SystemExit(7)
    if frame == b"large":
        frame = bytes(1 << 21)
    if frame == b"flood":
        while True: os.write(4, b"xxxxxxxxx")
    print(frame[:10], flush=True)
    frame = len(frame).to_bytes(4, "big") + frame
    while frame:
        frame = frame[os.write(4, frame):]
"""


def test_frames_go_and_come(method):
    with Session(ECHO, _method=method) as session:
        for frame in (b"", b"a", os.urandom(1 << 20), "é".encode()):
            assert session.ask(frame) == frame
        outcome = session.close()
    assert outcome.status == "stopped" and outcome.code == -9
    assert outcome.stdout.startswith(b"b''\nb'a'\n")


@pytest.mark.parametrize(
    ("frame", "status", "code"),
    [
        (b"hang", "timeout", -9),
        (b"end", "ended", 7),
        (b"large", "output", -9),
        (b"flood", "output", -9),
    ],
)
def test_sessions_that_end_say_how(frame, status, code):
    with Session(ECHO, limits=Limits(seconds=1.0)) as session:
        assert session.ask(b"x") == b"x"
        with pytest.raises(Ended) as ended:
            session.ask(frame, seconds=0.5)
    assert ended.value.outcome.status == status and ended.value.outcome.code == code
    assert session.close() == ended.value.outcome
    with pytest.raises(Ended):
        session.ask(b"x")


def test_the_clock_of_a_session_runs_while_it_is_asked():
    with Session(ECHO, limits=Limits(seconds=0.5)) as session:
        time.sleep(0.7)
        assert session.ask(b"x") == b"x"
        with pytest.raises(Ended):
            session.ask(b"hang")


def test_sessions_in_many_threads():
    def double(number):
        return int(sandbox.run("print(2 * int(input()))", stdin=str(number).encode()).stdout)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(double, range(12))) == list(range(0, 24, 2))


# --------------------------------------------------------------------------------------- levels


def test_the_level_is_returned_and_can_be_required(monkeypatch):
    reached = sandbox.level()
    assert sandbox.run("", require=reached).level == reached
    with pytest.raises(ValueError, match="require='walls' is no level of isolation: limits, filt"):
        sandbox.run("", require="walls")
    monkeypatch.setattr(sandbox, "_best", lambda _: sandbox._Reached(METHODS[-1], "limits", "so"))
    with pytest.raises(ValueError, match="reaches the level 'limits' here, and 'filters' is requ"):
        sandbox.run("", require="filters")


def test_the_best_method_that_works_is_taken():
    order = {"root": 0, "user": 1, "": 2}
    works = [method for method in METHODS if FLAGS[method] is not None]
    method, level, _ = sandbox._best(os.getpid())
    assert method == works[0] == min(works, key=lambda m: order[m.namespaces])
    assert (level == "namespaces") == ("namespaces" in FLAGS[method])


def test_a_nursery_that_was_killed_is_replaced():
    process, _ = nursery._nursery()
    with Session("import time; time.sleep(300)", limits=Limits(seconds=5.0)) as session:
        os.kill(process.pid, 9)
        assert session.wait().status == "stopped"
    assert sandbox.run("print(1)").stdout == b"1\n"
    assert nursery._nursery()[0] is not process


def test_probe_agrees_with_the_level():
    found = sandbox.probe()
    if sandbox.level() == "namespaces":
        assert found == (True, True, True)


SCRIPT = """
import os, sys
from jax_grpo.rewards import nursery, sandbox
session = sandbox.Session("import time; time.sleep(300)")
pids = [session._pid]
for _ in range(2):  # the keeper and the nursery
    stat = open(f"/proc/{pids[-1]}/stat").read()
    pids.append(int(stat.rpartition(")")[2].split()[1]))
print(*pids, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_programs_end_with_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        pids = parent.stdout.readline().split()
    assert len(pids) == 3
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def place(monkeypatch):
    """Where temporary files are made; every user may go there."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(RuntimeError), Session("import time; time.sleep(300)"):
        raise RuntimeError


@pytest.mark.parametrize("when", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["_move", "_send", "_pump"])
def test_an_interrupt_leaves_nothing_behind(place, monkeypatch, name, when):
    method = getattr(Session, name)
    calls = []

    def interrupted(self, *arguments):
        calls.append(name)
        if len(calls) == when:
            raise KeyboardInterrupt
        return method(self, *arguments)

    monkeypatch.setattr(Session, name, interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        sandbox.run("print(1)")
    assert len(calls) > 0
    assert not list(place.iterdir())


@pytest.mark.parametrize("spare", [3, 9])
def test_too_few_descriptors_leave_nothing_behind(place, spare):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd"))
    filling = [os.open("/dev/null", os.O_RDONLY) for _ in range(most)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(filling) + 1 + spare, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            sandbox.run("")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filling:
            os.close(descriptor)
    assert not list(place.iterdir())


def test_a_directory_is_removed_however_deep_and_closed(method, place):
    program = """
    import os
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    open("file", "w").close()
    os.symlink("/", "link")
    os.chmod(".", 0)
    """
    assert run(program, method)[0].code == 0
    assert not list(place.iterdir())


def test_a_link_in_the_place_of_a_directory_is_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    (kept / "file").touch()
    (tmp_path / "link").symlink_to(kept)
    sandbox._remove(str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["kept"] and (kept / "file").exists()
    assert kept.stat().st_mode & 0o777 == 0o755
