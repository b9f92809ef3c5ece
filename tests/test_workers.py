"""The worker pool: answers in order, deadlines that hold, and workers that come back."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from jax_grpo.rewards.workers import MAX_ITEM, Answer, Pool

# --- what the workers run; they import this file by its name, since `tests/` is on their path


def behave(item):
    """Do what the item says."""
    what, value = item
    if what == "hang":
        sum(itertools.repeat(0))  # a loop in C, which no signal handler ends
    if what == "die":
        os._exit(value)
    if what == "raise":
        raise ValueError(value)
    if what == "fill":
        return len(bytearray(value))
    if what == "print":
        print(value)
    if what == "pid":
        return os.getpid()
    return value


@pytest.fixture
def pool():
    made = Pool("test_workers:behave", seconds=1.0, workers=2)
    made.map([("echo", 0)] * 2)  # started, so that a test's clock shows the work alone
    yield made
    made.close()


def echoes(count):
    return [("echo", i) for i in range(count)]


def done(count):
    return [Answer("done", i) for i in range(count)]


def test_answers_come_in_order(pool):
    assert pool.map(echoes(1000)) == done(1000)
    assert pool.map([]) == []


def test_large_items_and_answers(pool):
    text = "x" * (MAX_ITEM - 20)
    assert pool.map([("echo", text)] * 20) == [Answer("done", text)] * 20
    with pytest.raises(ValueError, match="more than 32768 bytes"):
        pool.map([("echo", "x" * MAX_ITEM)])
    assert pool.map([("echo", "\ud800\0é\n")]) == [Answer("done", "\ud800\0é\n")]


def test_what_an_item_does_is_its_own_matter(pool):
    items = [
        ("raise", "no"),
        ("print", "noise\n"),
        ("die", 3),
        ("fill", 8 << 30),
        *echoes(100),
    ]
    answers = pool.map(items)
    assert answers[:2] == [Answer("raised", "ValueError: no"), Answer("done", "noise\n")]
    assert answers[2].status == "died"
    assert answers[3] == Answer("raised", "MemoryError: ")
    assert answers[4:] == done(100)


def test_a_hanging_item_costs_its_deadline_and_no_other_item(pool):
    items = echoes(200)
    items[70] = ("hang", None)
    began = time.monotonic()
    answers = pool.map(items)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert answers[70] == Answer("timeout", "no answer within 1 s")
    assert [a for i, a in enumerate(answers) if i != 70] == [a for a in done(200) if a.value != 70]


def test_a_worker_that_died_idle_is_replaced(pool):
    pids = {answer.value for answer in pool.map([("pid", 0)] * 40)}
    for pid in pids:
        os.kill(pid, 9)
    for worker in pool._workers:
        worker.process.wait()
    assert pool.map(echoes(10)) == done(10)


def test_any_thread_may_ask(pool):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(pool.map, [echoes(50)] * 8))
    assert found == [done(50)] * 8


def test_workers_outlive_the_thread_that_asked_first():
    pool = Pool("test_workers:behave", seconds=1.0, workers=1)
    pids = []
    thread = threading.Thread(target=lambda: pids.extend(pool.map([("pid", 0)])))
    thread.start()
    thread.join()
    time.sleep(0.1)  # for a signal to arrive
    assert pool.map([("pid", 0)]) == pids
    pool.close()


@pytest.mark.parametrize("module", ["no_such_module:f", "test_workers:no_such_function"])
def test_a_worker_that_cannot_start_is_an_error(module):
    pool = Pool(module, seconds=1.0)
    with pytest.raises(RuntimeError, match="a worker cannot start: .*no_such"):
        pool.map([1])


def test_close_ends_the_workers_and_map_starts_others(pool):
    [pid] = {answer.value for answer in pool.map([("pid", 0)])}
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.map(echoes(3)) == done(3)


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from jax_grpo.rewards.workers import Pool
print("script", flush=True)
pool = Pool("test_workers:behave", seconds=60.0, workers=1)
print(pool.map([("pid", 0)])[0].value, flush=True)
pool.map([("hang", 0)]) if sys.argv[1] == "busy" else None
os.kill(os.getpid(), 9) if sys.argv[1] == "killed" else None
"""


def is_gone(pid):
    """Whether a process ends within five seconds; a zombie that nobody reaps has ended."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
@pytest.mark.parametrize("how", ["leaves", "killed", "busy"])
def test_workers_end_with_their_parent_and_never_run_its_script(how, tmp_path):
    script = tmp_path / "script.py"  # without a main guard
    script.write_text(SCRIPT.format(tests=os.path.dirname(__file__)))
    command = [sys.executable, str(script), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "script\n"
        pid = int(parent.stdout.readline())
        if how == "busy":
            time.sleep(0.2)
            parent.kill()
        assert parent.stdout.read() == ""
    assert is_gone(pid)
