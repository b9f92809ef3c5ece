"""One program on its tests: run it in a sandbox, and compare here what it gives."""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from jax_grpo.rewards import driver, sandbox
from jax_grpo.rewards.compare import same_text, same_value
from jax_grpo.rewards.contract import shorten
from jax_grpo.rewards.texts import code_in

_LANGUAGES = ("python", "py", "python3")
_DRIVER = inspect.getsource(driver)
_CANDIDATE = compile(_DRIVER + "\nserve_candidate()\n", "driver.py", "exec")
_JUDGE = compile(_DRIVER + "\nserve_judge()\n", "driver.py", "exec")
_OUTPUT = 1 << 20  # bytes that a program may print or answer, beyond what is expected
_CALL = b'["call", '  # how a judge's question to the candidate begins


class Task(NamedTuple):
    """The tests of a row; which fields are set says the form. See `code`."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    function: str
    script: str
    setup: str


class Settings(NamedTuple):
    """How programs run and are compared. See `code.unit_tests`."""

    partial: bool = False
    seconds: float = 10.0
    total: float = 60.0
    memory: int = 1 << 30
    tolerance: float = 1e-6
    require: str = ""


class Verdict(NamedTuple):
    """What became of a completion, or of one of its tests.

    The status is "passed", "failed" (a wrong answer), "error" (an exception or a crash),
    "timeout", "memory", "output" (too much of it), "stopped" (its sandbox was killed, twice),
    "no_code" (no fenced block), "no_tests" (in the row) or "sandbox" (none could be started,
    which is not the program's fault).
    """

    status: str
    why: str  # one line
    share: float = 0.0  # of the tests that count as passed


class BadScript(Exception):
    """A script whose verdict does not depend on the program."""


_Results = Generator[Verdict, None, None]  # one per test, until one ends the process


def judge(text: str, tests: Task | None, settings: Settings) -> Verdict:
    """Run the program of a completion on its tests.

    Raises:
        BadScript: when a script ends without calling the program.
        ValueError: one line, when the required isolation is out of reach.
    """
    if tests is None:
        return Verdict("no_tests", "the row has no tests")
    code = code_in(text, _LANGUAGES)
    if code is None:
        return Verdict("no_code", "no fenced block of Python")
    try:
        verdict = _run(code, tests, settings)
        if verdict.status == "stopped":  # it may be another's fault, as where memory is short
            verdict = _run(code, tests, settings)
    except OSError as error:  # no descriptors, a full disk
        return Verdict("sandbox", _line(str(error)))
    return verdict


def _run(code: str, tests: Task, settings: Settings) -> Verdict:
    """Run a program on its tests, until one fails where all must pass."""
    form = _run_script if tests.script else _run_calls if tests.function else _run_texts
    count = len(tests.inputs) or 1
    passed, first = 0, Verdict("passed", f"{count} of {count} tests")
    with contextlib.closing(form(code, tests, settings)) as results:
        for number, result in enumerate(results, 1):
            if result.status == "sandbox":
                return result
            if result.status == "passed":
                passed += 1
                continue
            if first.status == "passed":
                first = Verdict(result.status, f"test {number} of {count}: {result.why}")
            if not settings.partial or result.status not in ("failed", "error"):
                break
    share = passed / count
    return first._replace(share=share if settings.partial else float(share == 1))


# ------------------------------------------------------------------------------ the three forms


def _run_texts(code: str, tests: Task, settings: Settings) -> _Results:
    """A run for each input, with what it printed against the expected text."""
    end = time.monotonic() + settings.total
    for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
        seconds = min(settings.seconds, end - time.monotonic())
        if seconds <= 0:
            yield Verdict("timeout", "the tests together took too long")
            return
        limits = _limits(settings, seconds, len(wanted))
        stdin = given.encode(errors="replace")
        outcome = sandbox.run(code, stdin=stdin, limits=limits, require=settings.require)
        if outcome.status == "ended" and outcome.code == 0:
            yield _of_output(outcome.stdout, wanted, settings.tolerance)
        else:
            yield _of_end(outcome)


def _run_calls(code: str, tests: Task, settings: Settings) -> _Results:
    """One process, one question for each call, with the value against the expected one."""
    sizes = [len(json.dumps(driver.encode(output))) for output in tests.outputs]
    limits = _limits(settings, settings.total, max(sizes))
    with sandbox.Session(_CANDIDATE, limits=limits, require=settings.require) as program:
        try:
            if refused := _load(program, code, tests, settings.seconds):
                yield refused
                return
            for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
                arguments, keywords = ([], given) if isinstance(given, dict) else (given, {})
                message = ["call", tests.function, *map(driver.encode, (arguments, keywords))]
                answer = _ask(program, json.dumps(message).encode(), settings.seconds)
                yield _of_answer(json.loads(answer), wanted, settings.tolerance)
        except sandbox.Ended as ended:
            yield _of_end(ended.outcome)
        except (ValueError, TypeError, RecursionError):
            yield Verdict("error", "a forged answer")


def _run_script(code: str, tests: Task, settings: Settings) -> _Results:
    """Two processes, and this one carries the script's questions to the program and back."""
    limits = _limits(settings, settings.seconds, 0)
    end = time.monotonic() + settings.seconds
    with (
        sandbox.Session(_CANDIDATE, limits=limits, require=settings.require) as program,
        sandbox.Session(_JUDGE, limits=limits, require=settings.require) as script,
    ):
        calls = 0
        try:
            if refused := _load(program, code, tests, settings.seconds):
                yield refused
                return
            message = json.dumps([tests.setup, tests.script, tests.function]).encode()
            while (said := _ask(script, message, end - time.monotonic())).startswith(_CALL):
                calls += 1
                message = _ask(program, said, end - time.monotonic())
            status, *why = json.loads(said)
        except sandbox.Ended as ended:
            yield _of_end(ended.outcome)
            return
        except (ValueError, TypeError, RecursionError):
            yield Verdict("error", "a forged answer")
            return
    if not calls:
        does = f"ends ({_line(*why)})" if why else "passes"
        raise BadScript(f"the script {does} without calling the program")
    yield Verdict(status, _line(*why))


def _limits(settings: Settings, seconds: float, expected: int) -> sandbox.Limits:
    output = _OUTPUT + 4 * expected
    return sandbox.Limits(seconds=seconds, memory=settings.memory, output=output)


def _load(program: sandbox.Session, code: str, tests: Task, seconds: float) -> Verdict | None:
    """Have a program define what it defines; says why when it does not."""
    message = ["load", tests.setup, code, tests.function]
    answer = json.loads(_ask(program, json.dumps(message).encode(), seconds))
    if answer == ["value", None]:
        return None
    return _of_answer(answer, None, 0.0)._replace(status="error")


def _ask(process: sandbox.Session, body: bytes, seconds: float) -> bytes:
    """One question; the answer must begin with its nonce, so that none can be sent ahead.

    Raises:
        ValueError: when it does not.
        sandbox.Ended: when there is no answer.
    """
    nonce = secrets.token_hex(driver.NONCE // 2).encode()
    answer = process.ask(nonce + body, max(seconds, 0.0))
    if not answer.startswith(nonce):
        raise ValueError("the nonce is another one's")
    return answer[driver.NONCE :]


# ----------------------------------------------------------------------------- what it means


def _of_output(output: bytes, wanted: str, tolerance: float) -> Verdict:
    """Compare what was printed."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        return Verdict("failed", "the output is not UTF-8")
    if same_text(wanted, text, tolerance):
        return Verdict("passed", "")
    return Verdict("failed", f"printed {shorten(text, 40)} for {shorten(wanted, 40)}")


def _of_answer(answer: Any, wanted: Any, tolerance: float) -> Verdict:
    """Compare the value that a program answered, or say what it raised."""
    match answer:
        case ["value", tree]:
            if same_value(wanted, tree, tolerance):
                return Verdict("passed", "")
            return Verdict("failed", f"gave {_show(tree)} for {_show(driver.encode(wanted))}")
        case ["raised", str(kind), str(text)]:
            return Verdict("error", _line(f"{kind}: {text}"))
    raise ValueError("not an answer")


def _of_end(outcome: sandbox.Outcome) -> Verdict:
    """What the end of a process means for its program."""
    match outcome.status:
        case "timeout" | "memory" | "output" as status:
            return Verdict(status, f"over its limit of {status.replace('timeout', 'time')}")
        case "stopped":
            return Verdict("stopped", "its sandbox was killed")
        case "failed":
            return Verdict("sandbox", _line(outcome.stderr.decode(errors="replace")))
    lines = outcome.stderr.decode(errors="replace").strip().split("\n")
    return Verdict("error", f"{_line(lines[-1])} (exit code {outcome.code})".lstrip())


def _show(tree: Any) -> str:
    """A value for a person; what is long is not even made one."""
    text = json.dumps(tree)
    return repr(driver.decode(tree)) if len(text) <= 200 else shorten(text, 100)


def _line(text: str = "") -> str:
    """One short line that shows on any terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:200])
