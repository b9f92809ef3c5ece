"""What runs inside the sandboxes of `code.py`: beside a candidate's code, or as the judge.

The text of this file is the program there, with a call of `serve_candidate` or `serve_judge` at
its end, so it needs the standard library alone. Each answers frames, a nonce and then JSON. The
candidate's code shares a process with `serve_candidate` and can forge whatever that says; it
gains nothing, since nothing there knows what is right.

Values travel as trees of JSON, which only exact built-in types have and which make nothing but
such types again: None, bool, str and float as they are, every other one as a list that begins
with its type's name, such as `["tuple", 1.5, ["int", "ff"]]`. Integers are hexadecimal, which
reads and writes in linear time.
"""

from __future__ import annotations

import ast
import builtins
import collections
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_DEPTH = 100  # of nested values
_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
_FOREIGN = "solution"  # the module that the candidate's code is, for itself and for a script
NONCE = 32  # bytes before the JSON of a frame
_QUIET_ENDS = (StopIteration, StopAsyncIteration)  # what a loop round a call would swallow


def encode(value: Any, depth: int = _DEPTH) -> Any:
    """Make a plain value a tree of JSON.

    Raises:
        TypeError: for anything but a built-in type and the dictionaries of `collections`.
        ValueError: for a value that is nested too deeply, or holds itself.

    >>> encode([255, (1.5, None), {"a": b"b"}])
    ['list', ['int', 'ff'], ['tuple', 1.5, None], ['dict', 'a', ['bytes', '62']]]
    """
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return ["int", format(value, "x")]
    if kind is bytes:
        return ["bytes", value.hex()]
    if depth == 0:
        raise ValueError("nested too deeply")
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *[encode(item, depth - 1) for item in value]]
    if kind in _DICTS:
        return ["dict", *[encode(item, depth - 1) for pair in value.items() for item in pair]]
    raise TypeError(f"not a plain value: {kind.__name__}")


def decode(tree: Any) -> Any:
    """Make a tree a value again.

    Raises:
        ValueError or TypeError: for what `encode` does not give.

    >>> decode(["list", ["int", "ff"], ["tuple", 1.5, None], ["dict", "a", ["bytes", "62"]]])
    [255, (1.5, None), {'a': b'b'}]
    """
    if tree is None or type(tree) in (bool, str, float):
        return tree
    match tree:
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["list" | "tuple" | "set" | "frozenset" as kind, *items]:
            return getattr(builtins, kind)([decode(item) for item in items])
        case ["dict", *items] if len(items) % 2 == 0:
            values = [decode(item) for item in items]
            return dict(zip(values[::2], values[1::2], strict=True))
    raise ValueError("not a tree of plain values")


def receive() -> tuple[bytes, Any]:
    """Wait for a frame: its nonce and its message. Ends the process when no more will come."""
    size = int.from_bytes(_read(4), "big")
    frame = _read(size)
    return frame[:NONCE], json.loads(frame[NONCE:])


def _read(size: int) -> bytes:
    """Exactly `size` bytes of descriptor 3."""
    parts = b""
    while len(parts) < size:
        part = os.read(3, size - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts


def send(nonce: bytes, message: Any) -> None:
    """Answer the frame of this nonce, on descriptor 4."""
    frame = nonce + json.dumps(message).encode()
    frame = len(frame).to_bytes(4, "big") + frame
    while frame:
        frame = frame[os.write(4, frame) :]


def execute(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a text as it would run in a file of its own, asserts and all."""
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True, optimize=0), namespace)


# ----------------------------------------------------------------------------------- candidate


def serve_candidate() -> None:
    """Load a candidate's code, then call its functions, until no more frames come.

    Messages are `["load", setup, code, function]` and `["call", name, arguments, keywords]`,
    the answers `["value", tree]` or `["raised", type, text]`.
    """
    module = types.ModuleType(_FOREIGN)
    sys.modules[_FOREIGN] = module  # dataclasses look their module up
    while True:
        nonce, message = receive()
        try:
            answer = ["value", encode(_act(vars(module), *message))]
        except BaseException as error:  # SystemExit and what else a candidate may raise
            answer = ["raised", *_describe(error)]
        send(nonce, answer)


def _act(namespace: dict[str, Any], kind: str, *message: Any) -> Any:
    """Do what a message asks for, and give the value."""
    if kind == "load":
        setup, code, function = message
        execute(setup, "setup", namespace)
        namespace.pop(function.partition(".")[0], None)  # the setup may hold a stub of it
        execute(code, "code", namespace)
        return None
    name, arguments, keywords = message
    first, _, method = name.partition(".")
    if first not in namespace:
        raise NameError(f"the code defines no {first!r}")
    function = getattr(namespace[first](), method) if method else namespace[first]
    return function(*decode(arguments), **decode(keywords))


def _describe(error: BaseException) -> tuple[str, str]:
    """The built-in type that an exception is, and its text."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        return kind.__name__, str(error)[:200]
    except BaseException:  # its `__str__` is the candidate's
        return kind.__name__, ""


# --------------------------------------------------------------------------------------- judge


def serve_judge() -> None:
    """Run a test script here, with the candidate's functions elsewhere.

    The message is `[setup, script, function]`. Each call of the candidate's is answered as a
    message of its own, `["call", name, arguments, keywords]`; the next frame holds what came of
    it. The last answer is `["passed"]`, or `["failed" or "error", why]`.
    """
    nonce, (setup, script, function) = receive()

    def remote(name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # what Python asks a module for, such as `__path__`
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal nonce
            send(nonce, ["call", name, encode(arguments), encode(keywords)])
            nonce, answer = receive()
            return _result(answer)

        return call

    try:
        _run_script(setup, script, function, remote)
    except BaseException as error:
        kind, text = _describe(error)
        verdict = ["failed" if kind == "AssertionError" else "error", f"{kind}: {text}"]
    else:
        verdict = ["passed"]
    send(nonce, verdict)


def _run_script(setup: str, script: str, function: str, remote: Callable[[str], Any]) -> None:
    """Run a script, and then its `check`, or its functions whose names begin with `test`."""
    namespace: dict[str, Any] = {"__name__": "script"}
    execute(setup, "setup", namespace)
    foreign = types.ModuleType(_FOREIGN)
    foreign.__getattr__ = remote  # type: ignore[method-assign]
    sys.modules[_FOREIGN] = foreign
    tree = ast.parse(script)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            if node.id not in namespace and not node.id.startswith("__"):
                namespace[node.id] = remote(node.id)  # until the script defines it
    namespace[function] = candidate = remote(function)
    execute(script, "script", namespace)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "check" in functions:
        namespace["check"](candidate)
    else:
        for name in functions:
            if name.startswith("test"):
                namespace[name]()


def _result(answer: Any) -> Any:
    """What a call gave: its value, or its exception again, as the built-in one of its name."""
    match answer:
        case ["value", tree]:
            return decode(tree)
        case ["raised", str(name), str(text)]:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                if not issubclass(kind, _QUIET_ENDS):
                    raise kind(text)
            raise RuntimeError(f"{name}: {text}")
    raise RuntimeError("the answer is garbled")
