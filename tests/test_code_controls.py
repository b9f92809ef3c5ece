"""Programs that are odd but right: each must score 1, however strict the sandbox is."""

from __future__ import annotations

import pytest

from jax_grpo.rewards.code import unit_tests

SQUARES = {"inputs": ["3\n1\n2\n3\n"], "outputs": ["1\n4\n9\n"]}  # a count, then numbers


def calls(*pairs, function="f"):
    inputs, outputs = zip(*pairs, strict=True)
    return {"function": function, "inputs": [list(i) for i in inputs], "outputs": list(outputs)}


SQUARE = calls(((3,), 9), ((-1,), 1))
TEXT_PROGRAMS = {
    "main guard": """
def main():
    for _ in range(int(input())):
        print(int(input()) ** 2)

if __name__ == "__main__":
    main()
""",
    "input until its end": """
input()
try:
    while True:
        print(int(input()) ** 2)
except EOFError:
    pass
""",
    "sys.stdin.buffer": """
import sys
_, *numbers = sys.stdin.buffer.read().split()
sys.stdout.buffer.write(b"".join(b"%d\\n" % int(n) ** 2 for n in numbers))
""",
    "os.read": """
import os
_, *numbers = map(int, os.read(0, 1 << 16).split())
os.write(1, "\\n".join(str(n * n) for n in numbers).encode())
""",
    "open(0)": "print(*[int(n) ** 2 for n in open(0)][1:], sep='\\n')",
    "/dev/stdin": "print(*[int(n) ** 2 for n in open('/dev/stdin')][1:], sep='\\n')",
    "streams that are wrapped again": """
import io, sys
sys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8")
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
for n in range(int(input())): print(int(input()) ** 2)
""",
    "streams that are detached": """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach())
for n in range(int(input())): print(int(input()) ** 2)
""",
    "output that is never closed": """
out = open("/dev/stdout", "w")
for n in range(int(input())): out.write(f"{int(input()) ** 2}\\n")
""",
    "reads slowly": """
import sys, time
for line in list(sys.stdin)[1:]:
    time.sleep(0.05)
    print(int(line) ** 2, flush=True)
""",
    "exit(0) at the end": "for n in range(int(input())): print(int(input()) ** 2)\nexit(0)",
    "sys.exit() at the end": """
import sys
for n in range(int(input())): print(int(input()) ** 2)
sys.exit()
""",
    "os._exit(0) at the end": """
import os, sys
for n in range(int(input())): print(int(input()) ** 2)
sys.stdout.flush(); os._exit(0)
""",
    "stderr chatter": """
import sys, warnings
warnings.warn("odd")
print("x" * 300_000, file=sys.stderr)
for n in range(int(input())): print(int(input()) ** 2)
""",
    "recursion in a thread with a large stack": """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return n and 1 + depth(n - 1)
def main():
    for _ in range(int(input())): print(int(input()) ** 2 + depth(5000) - 5000)
thread = threading.Thread(target=main)
thread.start()
thread.join()
""",
    "a stream for output": """
import io, sys
sys.stdout = out = io.StringIO()
for n in range(int(input())): print(int(input()) ** 2)
sys.__stdout__.write(out.getvalue())
""",
    "trailing spaces and empty lines": (
        "for n in range(int(input())): print(int(input()) ** 2, end='  \\r\\n')\nprint('\\n')"
    ),
    "atexit prints": """
import atexit
numbers = [int(input()) ** 2 for _ in range(int(input()))]
atexit.register(lambda: print(*numbers, sep="\\n"))
""",
    "a temporary file": """
import os, tempfile
with tempfile.NamedTemporaryFile("w+", delete=False) as file:
    for n in range(int(input())): print(int(input()) ** 2, file=file)
print(open(file.name).read(), end="")
""",
    "a child process": """
import subprocess, sys
code = "for n in range(int(input())): print(int(input()) ** 2)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
""",
    "fork and wait": """
import os
numbers = [int(input()) for _ in range(int(input()))]
if os.fork() == 0:
    print(*[n ** 2 for n in numbers], sep="\\n", flush=True)
    os._exit(0)
os.wait()
""",
    "a from __future__ import and a docstring": '''
"""Squares."""
from __future__ import annotations
for n in range(int(input())): print(int(input()) ** 2)
''',
    "Windows line ends and tabs": "for n in range(int(input())):\r\n\tprint(int(input()) ** 2)\r\n",
}

CALL_PROGRAMS = {
    "a comment that says threading": ("# import os, threading\ndef f(x): return x * x", SQUARE),
    "half a megabyte printed before": (
        "def f(x):\n    print('x' * 500_000)\n    return x * x",
        SQUARE,
    ),
    "prints no text": (
        "import sys\ndef f(x):\n    sys.stdout.buffer.write(b'\\xff\\0')\n    return x * x",
        SQUARE,
    ),
    "closes stdout": ("import sys\nsys.stdout.close()\ndef f(x): return x * x", SQUARE),
    "recursion of 5,000": (
        "import sys\nsys.setrecursionlimit(10_000)\n"
        "def f(x):\n    def d(n): return n and 1 + d(n - 1)\n    return x * x + d(5000) - 5000",
        SQUARE,
    ),
    "a class": (
        "class Solution:\n    def f(self, x: int) -> int:\n        return x * x",
        calls(((3,), 9), function="Solution.f"),
    ),
    "a static method": (
        "class Solution:\n    @staticmethod\n    def f(x):\n        return x * x",
        calls(((3,), 9), function="Solution.f"),
    ),
    "a thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def f(x):\n    with ThreadPoolExecutor(4) as pool:\n"
        "        return sum(pool.map(lambda _: 1, range(x * x)))",
        SQUARE,
    ),
    "a process": (
        "import os\ndef f(x):\n    r, w = os.pipe()\n"
        "    if not os.fork():\n        os.write(w, str(x * x).encode()); os._exit(0)\n"
        "    os.wait()\n    return int(os.read(r, 99))",
        SQUARE,
    ),
    "a generator made a list": (
        "def g(n):\n    yield from range(n)\ndef f(x): return list(g(x))",
        calls(((3,), [0, 1, 2])),
    ),
    "dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field, astuple\n"
        "@dataclass(order=True)\nclass P:\n    x: int\n"
        "    y: list[int] = field(default_factory=list)\n"
        "def f(x): return astuple(P(x))",
        calls(((3,), (3, []))),
    ),
    "lru_cache": (
        "from functools import lru_cache\n@lru_cache(None)\n"
        "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
        calls(((90,), 2880067194370816120)),
    ),
    "an async function behind a plain one": (
        "import asyncio\nasync def g(x):\n    await asyncio.sleep(0.01)\n    return x * x\n"
        "def f(x): return asyncio.run(g(x))",
        SQUARE,
    ),
    "annotations that are evaluated": (
        "def f(x: int): return x * f.__annotations__['x'](x)",
        SQUARE,
    ),
    "a lambda": ("f = lambda x: x * x", SQUARE),
    "functools.partial": (
        "from functools import partial\nf = partial(lambda y, x: x * x, 1)",
        SQUARE,
    ),
    "a callable object": ("class F:\n    def __call__(self, x): return x * x\nf = F()", SQUARE),
    "builtins under other names": (
        "def len(x): return 0\ndef isinstance(*a): return False\nlist = type = str = None\n"
        "def f(x): return x * x",
        SQUARE,
    ),
    "a module of its own name": (
        "import sys\nassert __name__ in sys.modules\ndef f(x): return x * x",
        SQUARE,
    ),
    "main guard with tests": (
        "def f(x): return x * x\nif __name__ == '__main__':\n    raise SystemExit(f(int(input())))",
        SQUARE,
    ),
    "a float for an integer": ("def f(x): return float(x * x)", SQUARE),
    "a tuple for a list": ("def f(x): return x, x", calls(((3,), [3, 3]))),
    "a Counter": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        calls((("aab",), {"a": 2, "b": 1})),
    ),
    "integer keys, which JSON has not": ("def f(x): return {x: x}", calls(((3,), {"3": 3}))),
    "a set in another order": (
        "def f(x): return set(reversed(x))",
        calls((([3, 1, 2],), {1, 2, 3})),
    ),
    "an integer of 30,000 digits": (
        "def f(x): return 10**x + 1",
        calls(((30_000,), 10**30_000 + 1)),
    ),
    "rounding": ("def f(x): return sum([x] * 10)", calls(((0.1,), 1.0))),
    "infinity and not a number": (
        "def f(x): return [float('inf'), -float('inf'), float('nan')]",
        calls(((1,), [float("inf"), -float("inf"), float("nan")])),
    ),
    "a large value": ("def f(n): return list(range(n))", calls(((200_000,), list(range(200_000))))),
    "text of all planes": (
        "def f(s): return s[::-1]",
        calls((("a\u00e9\u4e2d\U0001f600\x00\n",), "\n\x00\U0001f600\u4e2d\u00e9a")),
    ),
    "a slow import or two": (
        "import decimal, statistics, unittest, typing\ndef f(x): return x * x",
        SQUARE,
    ),
    "a trace function": (
        "import sys\nsys.settrace(lambda *a: None)\ndef f(x): return x * x",
        SQUARE,
    ),
    "a thread that goes on": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\ndef f(x): return x * x",
        SQUARE,
    ),
    "a changed argument": ("def f(v):\n    v.sort()\n    return v", calls((([3, 1],), [1, 3]))),
    "signals and limits": (
        "import signal, resource\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "resource.getrlimit(resource.RLIMIT_NPROC)\ndef f(x): return x * x",
        SQUARE,
    ),
}

COMPLETIONS = {
    "two blocks, the last one counts": "```py\ndef f(x): return 0\n```\nNo:\n```py\nCODE\n```",
    "sample output behind it": "```py\nCODE\n```\nIt prints\n```text\n9\n```\nor\n```\n9\n```",
    "an unmarked block": "So:\n```\nCODE\n```",
    "a block marked py, tildes": "~~~~py\nCODE\n~~~~",
    "a guess while thinking": "<think>```python\ndef f(x): return 0\n```</think>```py\nCODE\n```",
    "an open block in the thinking": "<think>\n```python\n</think>\n```python3\nCODE\n```",
    "Windows line ends": "Here:\r\n```python\r\nCODE\r\n```\r\n",
    "a fence in a text of the code": '```python\ns = """\n  x ```\n"""\nCODE\n```',
}


def score(completions, tests):
    logged = {}
    values = unit_tests(
        ["?"] * len(completions), completions, tests, log_extra=lambda n, v: logged.update({n: v})
    )
    return list(zip(values, logged["unit_tests/why"], strict=True))


@pytest.mark.parametrize("name", TEXT_PROGRAMS)
def test_programs_on_standard_input(name):
    [(value, why)] = score([f"```python\n{TEXT_PROGRAMS[name]}\n```"], [SQUARES])
    assert value == 1.0, why


@pytest.mark.parametrize("name", CALL_PROGRAMS)
def test_functions(name):
    code, tests = CALL_PROGRAMS[name]
    [(value, why)] = score([f"```python\n{code}\n```"], [tests])
    assert value == 1.0, why


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(name):
    completion = COMPLETIONS[name].replace("CODE", "def f(x): return x * x")
    [(value, why)] = score([completion], [SQUARE])
    assert value == 1.0, why
