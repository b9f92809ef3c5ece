r"""Whether what a program gave is what was expected: its text, or a value of its.

What is expected is trusted, what a program gave is not: it comes as text, or as a tree of JSON
(see `driver.encode`) that is walked beside the expected value, so that nothing is ever made of
it, no method of it is called, and it is hashed as text alone, which nobody can make collide.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jax_grpo.rewards.driver import encode

_BLANKS = " \t\r"
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_MAX_DECIMAL = 100  # characters


def same_text(expected: str, text: str, tolerance: float = 0.0) -> bool:
    r"""Whether two outputs have the same lines.

    White space at the end of a line and empty lines at the end do not count. Where a word
    between single spaces is a decimal (`0.5`, `1e-3`; not `5`) any number within the tolerance
    will do.

    Args:
        expected: what should have been printed.
        text: what was printed.
        tolerance: how far from a decimal a number may be: relative, absolute below 1.

    >>> same_text("1 0.333\n", "1 0.3333 \n\n", 1e-3), same_text("1 2", "1\n2")
    (True, False)
    """
    wanted, given = _lines(expected), _lines(text)
    if wanted == given:
        return True
    if not tolerance or len(wanted) != len(given):
        return False
    return all(_same_line(*pair, tolerance) for pair in zip(wanted, given, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip(_BLANKS) for line in text.rstrip(_BLANKS + "\n").split("\n")]


def _same_line(expected: str, line: str, tolerance: float) -> bool:
    """Compare word by word."""
    wanted, given = expected.split(" "), line.split(" ")
    return len(wanted) == len(given) and all(
        a == b or (_is_decimal(a) and _is_number(b) and _close(float(a), float(b), tolerance))
        for a, b in zip(wanted, given, strict=True)
    )


def _is_number(word: str) -> bool:
    return len(word) <= _MAX_DECIMAL and _DECIMAL.fullmatch(word) is not None


def _is_decimal(word: str) -> bool:
    return _is_number(word) and not word.lstrip("+-").isdigit()


def same_value(expected: Any, tree: Any, tolerance: float = 0.0) -> bool:
    """Whether a tree holds the expected value.

    Numbers are equal by value, but True is not 1. A list may be a tuple, since JSON has no
    tuples, but where a tuple is expected it must be one. A key of a dictionary that is expected
    as text may be an integer, since JSON has no others. Sets have no order, and neither they nor
    keys have a tolerance.

    Args:
        expected: a plain value.
        tree: as `driver.encode` makes it, or anything else that JSON gives.
        tolerance: how far a number may be from an expected float: relative, absolute below 1.

    Raises:
        RecursionError: for a tree that is nested too deeply.

    >>> same_value([1, 0.5], encode((1.0, 0.5001)), 1e-3), same_value(1, encode(True))
    (True, False)
    """
    if expected is None or isinstance(expected, bool | str):
        return type(tree) is type(expected) and tree == expected
    if isinstance(expected, int | float):
        return _same_number(expected, tree, tolerance)
    if type(tree) is not list or not tree:
        return False
    kind, *items = tree
    match expected:
        case list() | tuple():
            kinds = ("tuple",) if isinstance(expected, tuple) else ("list", "tuple")
            return (
                kind in kinds
                and len(items) == len(expected)
                and all(map(same_value, expected, items, [tolerance] * len(items)))
            )
        case set() | frozenset():
            wanted = {_key(encode(item)) for item in expected}
            return kind in ("set", "frozenset") and {_key(item) for item in items} == wanted
        case dict():
            return kind == "dict" and _same_dict(expected, items, tolerance)
    return tree == encode(expected)  # bytes


def _same_number(expected: float, tree: Any, tolerance: float) -> bool:
    """Compare a number with a tree; an expected float with the tolerance."""
    number: float
    match tree:
        case float():
            number = tree
        case ["int", str(digits)]:
            try:
                number = int(digits, 16)
            except ValueError:
                return False
        case _:
            return False
    if isinstance(expected, float):
        return _close(expected, number, tolerance)
    return expected == number


def _close(expected: float, number: float, tolerance: float) -> bool:
    """Whether a number is an expected float, or near it. Not a number is itself."""
    if math.isnan(expected):
        return number != number
    try:
        return math.isclose(expected, number, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float holds
        return False


def _same_dict(expected: dict[Any, Any], items: list[Any], tolerance: float) -> bool:
    """Compare a dictionary with the items of a tree, key and value in turn."""
    given = dict(zip(map(_key, items[::2]), items[1::2], strict=False))
    if 2 * len(given) != len(items) or len(given) != len(expected):
        return False
    for key, value in expected.items():
        name = _key(encode(key))
        if name not in given and isinstance(key, str):
            name = _integer_key(key)
        if name not in given or not same_value(value, given.pop(name), tolerance):
            return False
    return True


def _integer_key(text: str) -> str:
    """The key of the integer that a text spells, or of the text."""
    try:
        return _key(encode(int(text)))
    except ValueError:
        return _key(text)


def _key(tree: Any) -> str:
    """A text that trees share when their values are equal, as keys and as set items are."""
    if type(tree) is float and tree.is_integer():
        tree = encode(int(tree))
    if type(tree) is not list:
        return json.dumps(tree)
    kind, *items = tree or [None]
    keys = [_key(item) for item in items]
    return f"{kind}({','.join(sorted(keys) if kind in ('set', 'frozenset') else keys)})"
