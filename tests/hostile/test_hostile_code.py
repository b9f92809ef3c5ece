"""Programs that would rather not solve the task: each scores 0, in time, and leaves nothing.

Every attack but those of one form runs in all three forms of tests, each of which wants a word
that cannot be guessed: an attack that reads or forges its way to it scores 1, and the test fails.
"""

from __future__ import annotations

import os
import resource
import secrets
import socket
import subprocess
import sys
import time

import pytest
from attacks_on_code import (
    CRASHES,
    DANGEROUS,
    ENDLESS,
    FIND,
    FLOODS,
    FORGERIES,
    NETWORK,
    POISON,
    READS,
    SCRIPTS,
    TEXTS,
    VALUES,
)

from jax_grpo.rewards import sandbox
from jax_grpo.rewards.code import unit_tests

SECONDS = 1.0
SECRET = "CANARY" + secrets.token_hex(8)
HONEST = [
    ("def f(x): return x + 1", {"function": "f", "inputs": [[1], [2]], "outputs": [2, 3]}),
    ("print(int(input()) + 1)", {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}),
    (
        "def f(x): return x + 1",
        {"script": "def check(f):\n    assert f(1) == 2 and f(2) == 3", "function": "f"},
    ),
]

# `f` of an attack is called in all three forms.
CALL = {"function": "f", "inputs": [[1]], "outputs": [SECRET]}
TEXT = {"inputs": ["1\n"], "outputs": [SECRET]}
SCRIPT = {"script": f"def check(f):\n    assert f(1) == {SECRET!r}", "function": "f"}
PRINT = "\nif __name__ == '__main__':\n    print(f(1))\n"


@pytest.fixture(scope="module")
def holds():
    return all(sandbox.probe())


@pytest.fixture
def only_where_it_holds(request, holds):
    if not holds:
        pytest.skip(f"the sandbox does not hold here, so it was not tried: {request.node.name}")


@pytest.fixture(scope="module")
def canary(private_tmp):
    """A file that all users may read, in a directory that is nobody's."""
    path = private_tmp / "canary"
    path.write_text(SECRET)
    path.chmod(0o666)
    sandbox.level()  # starts what stays
    return path


@pytest.fixture(scope="module", autouse=True)
def memory_stays_flat():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


@pytest.fixture(autouse=True)
def environment(monkeypatch, canary, nothing_left):
    monkeypatch.setenv("EVIL_TOKEN", SECRET)
    monkeypatch.setenv("HOME", str(canary.parent))


def fenced(code):
    return f"```python\n{code}\n```"


def attack(items, statuses=()):
    """Run attacks among honest programs; (completion, tests) each."""
    logged = {}
    honest = [(fenced(code), tests) for code, tests in HONEST]
    completions, tests = zip(*items, *honest, strict=True)
    began = time.perf_counter()
    values = unit_tests(
        ["?"] * len(tests),
        completions,
        tests,
        seconds=SECONDS,
        total=SECONDS,
        workers=len(tests),
        log_extra=lambda name, column: logged.update({name: column}),
    )
    seconds = time.perf_counter() - began
    found = list(zip(values, *logged.values(), strict=True))
    assert values == [0.0] * len(items) + [1.0] * len(honest), found
    assert seconds < SECONDS + 1.0, found
    assert not statuses or {status for _, status, _ in found[: len(items)]} <= set(statuses), found


def in_all_forms(code, **names):
    for name, value in names.items():
        code = code.replace(f"{{{name}}}", str(value))
    return [(fenced(code), CALL), (fenced(code + PRINT), TEXT), (fenced(code), SCRIPT)]


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries(name):
    attack(in_all_forms(FORGERIES[name]), ("failed", "error", "output"))


@pytest.mark.parametrize("name", READS)
def test_reads(name, canary):
    if sandbox.level() == "limits":
        pytest.skip("without walls a program reads what its user can")
    code = FIND + READS[name]
    attack(in_all_forms(code, canary=canary, home=canary.parent), ("failed", "error"))


@pytest.mark.parametrize("name", ["arguments and environment", "files", "the user's secrets"])
def test_the_same_reads_find_it_where_there_are_no_walls(name, canary):
    code = FIND + READS[name] + PRINT
    code = code.replace("{canary}", str(canary)).replace("{home}", str(canary.parent))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == SECRET


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs(name):
    attack(in_all_forms(ENDLESS[name]), ("timeout", "error", "failed"))


@pytest.mark.parametrize("name", CRASHES)
def test_crashes(name):
    attack(in_all_forms(CRASHES[name]))


@pytest.mark.parametrize("name", FLOODS)
def test_floods(name):
    attack(in_all_forms(FLOODS[name]))


@pytest.mark.parametrize("name", NETWORK)
def test_network(name):
    if sandbox.level() == "limits":
        pytest.skip("without walls a program reaches the network")
    kind = socket.SOCK_DGRAM if "datagram" in name else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as inet, socket.socket(socket.AF_UNIX) as unix:
        inet.bind(("127.0.0.1", 0))
        port = inet.getsockname()[1]
        unix.bind(f"\0evil-{port}")
        for listener in (inet, unix):
            listener.setblocking(False)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        attack(in_all_forms(NETWORK[name], port=port), ("error", "failed"))
        for listener in (inet, unix):
            with pytest.raises(BlockingIOError):
                listener.recv(1) if listener.type == socket.SOCK_DGRAM else listener.accept()


@pytest.mark.usefixtures("only_where_it_holds")
@pytest.mark.parametrize("name", POISON)
def test_poison(name, canary):
    attack(in_all_forms(POISON[name], canary=canary), ("failed", "error"))
    attack(in_all_forms("def f(x): return 'evil' in dir(__builtins__)"), ("failed",))
    assert canary.read_text() == SECRET


@pytest.mark.usefixtures("only_where_it_holds")
@pytest.mark.parametrize("name", DANGEROUS)
def test_dangerous_programs(name):
    attack(in_all_forms(DANGEROUS[name], parent=os.getpid()))


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    code, outputs, form = VALUES[name]
    tests = {"inputs": ["1\n"] if form == "text" else [[[1] if form == "list" else 1]]}
    tests |= {"outputs": outputs} | ({} if form == "text" else {"function": "f"})
    attack([(fenced(code), tests)], ("failed", "error", "output"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name):
    code, script = SCRIPTS[name]
    attack([(fenced(code), {"script": script, "function": "f"})], ("failed", "error"))


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    honest, tests = HONEST[0]
    text = TEXTS[name].replace("OK", honest).replace("BAD", "def f(x): return 0")
    attack([(text, tests)], ("no_code", "failed", "error", "timeout"))


def test_the_next_hundred_honest_programs_pass():
    items = [HONEST[i % 3] for i in range(100)]
    completions = [fenced(code) for code, _ in items]
    assert unit_tests(["?"] * 100, completions, [tests for _, tests in items]) == [1.0] * 100
