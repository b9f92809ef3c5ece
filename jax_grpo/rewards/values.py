r"""The value of an expression at random points: exact while it is rational, else of 100 digits.

Two expressions are taken to be equal when they agree at all points where both are defined, to 60
digits, with fresh points each time; numbers are written with at most 50, so none can pass for pi.
Without a variable they are compared once more to some 5,000 digits, which is more than the largest
power has that we compute: adding 1 to it does not go unseen, nor adding a tiny power to a root.
No simplifier runs, so none can hang; what a value may cost is bounded before it is computed.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from jax_grpo.rewards.expressions import MAX_FACTORIAL, Node, variables, walk
from jax_grpo.rewards.tokens import TooComplex

_MP = mpmath.MPContext()  # a context of our own: the precision is nobody else's
_MP.dps = 100
_FINE_DIGITS = 5000
_UNCERTAIN_DIGITS = 40  # at the end of a value: not compared
_MAX_BITS = 10_000  # of an exact value; what is larger has 100 digits
_MAX_ARGUMENT = 10_000  # of exp and the like
# Signs of the variables at each point: a root needs positive ones, and |x| is x for no others.
_SIGNS = (*("+",) * 5, "-", "-", "+-", "-+", "++--", *("?",) * 4)
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "product": operator.mul,
    "quotient": operator.truediv,
}
_FUNCTIONS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
_RANDOM = random.SystemRandom()


class _Undefined(ArithmeticError):
    """An expression has no value at a point."""


def is_equal(a: Node, b: Node) -> bool:
    r"""Whether two expressions have the same value wherever both have one.

    Raises:
        TooComplex: a value is too large.

    >>> from jax_grpo.rewards.parsing import parse
    >>> is_equal(parse(r"\sqrt{8}"), parse(r"2\sqrt2")), is_equal(parse("x"), parse("|x|"))
    (True, False)
    """
    count = 0
    for x, y in _values_at_points(a, b):
        if not _same(x, y):
            return False
        count += 1
    if variables(a) | variables(b) or not count:
        return count >= 3
    with _MP.workdps(_FINE_DIGITS):
        return all(_same(x, y) for x, y in itertools.islice(_values_at_points(a, b), 1))


def is_multiple(a: Node, b: Node) -> bool:
    """Whether one expression is a constant times the other, neither of them zero."""
    ratios = [_apply(operator.truediv, x, y) for x, y in _values_at_points(a, b) if x and y]
    return len(ratios) > 2 and all(_same(ratio, ratios[0]) for ratio in ratios)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    x, y = _real(x), _real(y)
    tolerance = _MP.mpf(10) ** (_UNCERTAIN_DIGITS - _MP.dps)  # relative
    return abs(x - y) <= tolerance * max(abs(x), abs(y), tolerance)


def _values_at_points(a: Node, b: Node) -> Iterator[tuple[Any, Any]]:
    """Values of two expressions at random points, those where both are defined and real.

    With the imaginary unit in either, values need not be real.
    """
    names = sorted(variables(a) | variables(b))
    is_complex = any(n == Node("name", (), "i") for n in (*walk(a), *walk(b)))
    for signs in _SIGNS if names else _SIGNS[:1]:
        point = {
            name: _sign(signs, k) * Fraction(_RANDOM.randint(1, 3000), _RANDOM.choice((1009, 61)))
            for k, name in enumerate(names)
        }
        try:
            values = _evaluate(a, point), _evaluate(b, point)
        except (ArithmeticError, ValueError):
            continue
        if all(_is_value(x, is_complex) for x in values):
            yield values


def _sign(signs: str, k: int) -> int:
    """The sign of the k-th variable at a point: the signs are repeated, `?` is either."""
    sign = signs[k % len(signs)]
    return _RANDOM.choice((1, -1)) if sign == "?" else int(f"{sign}1")


def _evaluate(node: Node, point: Mapping[str, Fraction]) -> Any:
    """The value at a point: a fraction while it is rational, else of 100 digits.

    Raises:
        ArithmeticError, ValueError: it has none.
        TooComplex: it is too large.
    """
    if node.kind == "number":
        return node.value
    if node.kind == "name":
        return _constant(node.text) if node.text not in point else point[node.text]
    values = [_evaluate(part, point) for part in node.parts]
    if node.kind in _OPERATORS:
        return functools.reduce(functools.partial(_apply, _OPERATORS[node.kind]), values)
    if node.kind == "minus":
        return -values[0]
    if node.kind == "power":
        return _power(*values)
    if node.kind == "call":
        return _call(node.text, values)
    if node.kind == "measure" and node.text == "°":
        return _real(values[0]) * _MP.pi / 180
    raise _Undefined


def _constant(name: str) -> Any:
    if name == "infty":
        raise _Undefined
    return {"pi": +_MP.pi, "e": +_MP.e, "i": _MP.mpc(0, 1)}[name]


def _real(x: Any) -> Any:
    """A value with 100 digits."""
    return _MP.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


def _is_value(x: Any, is_complex: bool) -> bool:
    """Whether a value is finite, and real unless it may be complex."""
    if isinstance(x, Fraction):
        return True
    return not _MP.isinf(x) and not _MP.isnan(x) and (is_complex or not _MP.im(x))


def _apply(operation: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """A value of two, exact while both are and it is not too long."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        exact = operation(x, y)
        return exact if _bits(exact) <= _MAX_BITS else _real(exact)
    return operation(_real(x), _real(y))


def _bits(x: Fraction) -> int:
    return max(x.numerator.bit_length(), x.denominator.bit_length())


def _power(x: Any, y: Any) -> Any:
    """A power of bounded size."""
    exact = isinstance(x, Fraction) and isinstance(y, Fraction) and y.denominator == 1
    if exact and _bits(x) * abs(y) <= _MAX_BITS:
        return x ** int(y)
    x, y = _real(x), _real(y)
    if x and abs(y * _MP.log(abs(x))) > _MAX_ARGUMENT:
        raise TooComplex("a power that is too large")
    return x**y


def _call(name: str, values: list[Any]) -> Any:
    """The value of a function, at arguments of bounded size."""
    if name == "sqrt":
        return _root(values[0], values[1] if len(values) > 1 else Fraction(2))
    if name in ("abs", "floor", "ceil"):
        return {"abs": abs, "floor": _MP.floor, "ceil": _MP.ceil}[name](_real(values[0]))
    x, *more = map(_real, values)
    if name in ("!", "binom"):
        if any(abs(value) > (MAX_FACTORIAL if name == "!" else 1000) for value in (x, *more)):
            raise TooComplex("a factorial that is too large")
        return _MP.factorial(x) if name == "!" else _MP.binomial(x, *more)
    if abs(x) > _MAX_ARGUMENT and name not in ("ln", "log"):
        raise TooComplex(f"{name} of more than {_MAX_ARGUMENT}")
    if name in ("ln", "log"):
        return _MP.log(x) / _MP.log(more[0] if more else _MP.e if name == "ln" else 10)
    return getattr(_MP, _FUNCTIONS.get(name, name))(x)


def _root(x: Any, index: Any) -> Any:
    """A root: of a negative number, an odd one is real."""
    if not isinstance(index, Fraction) or index.denominator != 1 or not 0 < index <= 100:
        raise _Undefined
    x = _real(x)
    if not isinstance(x, _MP.mpc) and x < 0 and index % 2:
        return -_MP.root(-x, int(index))
    return _MP.sqrt(x) if index == 2 else _MP.root(x, int(index))
