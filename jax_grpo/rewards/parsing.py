r"""From an answer to its tree, by recursive descent; it evaluates nothing.

A parser of our own, since the well-known ones guess (`7,2` is 72, `Monday` a product of letters,
`3=5` the number 5) and evaluate while they parse. This one reads what final answers are written
in and no more of LaTeX than that, in one pass over at most a thousand characters:

    answer   = item {"," item}
    item     = union {relation union}
    union    = measured {"\cup" measured}
    measured = sum [unit]
    sum      = [sign] product {sign product}
    product  = power {["*" | "/"] power}
    power    = value {"!" | "%" | "_" script | "^" script}
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from fractions import Fraction

from jax_grpo.rewards.expressions import (
    MAX_FACTORIAL,
    RELATIONS,
    Node,
    between,
    divided,
    listed,
    mixed,
    negative,
    number,
    pieces,
    raised_to,
    related,
    sided,
    subscripted,
    times,
    variables,
)
from jax_grpo.rewards.tokens import CURRENCIES, MAX_NESTING, Token, TooComplex, Unparsable, tokens

_BRACKETS = {"(": (")", "]"), "[": (")", "]"), "{{": ("}}",), "<(": (">)",)}
_SIGNS = ("+", "-", "±", "∓")

_Tokens = collections.deque[Token]


@functools.lru_cache(maxsize=4096)  # a group of completions has one right answer
def parse(text: str) -> Node:
    r"""Read an answer.

    Raises:
        Unparsable: it is no answer: one line says why.
        TooComplex: it is over a bound of length, nesting, digits, exponents or factorials.

    >>> parse(r"-\frac{1}{2}").value, parse("x = 1,000").parts[1].value
    (Fraction(-1, 2), Fraction(1000, 1))
    >>> parse("3=5")
    Traceback (most recent call last):
    jax_grpo.rewards.tokens.Unparsable: an equation between numbers
    """
    left = collections.deque(tokens(text))
    node = sided(_answer(left, 0))
    if left[0].kind != "end":
        raise Unparsable(f"{left[0].text!a} is not expected")
    return node


def _answer(left: _Tokens, depth: int) -> Node:
    """A list of items, or the one that there is."""
    items = [_item(left, depth)]
    while left[0].text == ",":
        left.popleft()
        items.append(_item(left, depth))
    return listed(items)


def _item(left: _Tokens, depth: int) -> Node:
    """A value, or a relation between values; `= 5` is one side alone."""
    if left[0].text == "=":
        left.popleft()
    values, signs = [_union(left, depth)], []
    while left[0].kind == "symbol" and left[0].text in RELATIONS:
        signs.append(left.popleft().text)
        values.append(_union(left, depth))
    if not signs:
        return values[0]
    if len(signs) == 2:
        return between(values, signs)
    if len(signs) > 2:
        raise Unparsable("a chain of relations")
    if not any(variables(value) or value.kind == "words" for value in values):
        raise Unparsable("an equation between numbers")
    return related(values[0], signs[0], values[1])


def _union(left: _Tokens, depth: int) -> Node:
    """Sums with a unit, or a union of intervals, which is the list of them."""
    parts = [_measured(left, depth)]
    while left[0].text == "∪":
        left.popleft()
        parts.append(_measured(left, depth))
    return parts[0] if len(parts) == 1 else Node("list", tuple(parts))


def _measured(left: _Tokens, depth: int) -> Node:
    """A sum with its unit: `5 cm^2`."""
    node = _sum(left, depth)
    if left[0].kind != "unit":
        return node
    unit = left.popleft().text
    if left[0].text == "^":
        left.popleft()
        power = _script(left, depth)
        if power.kind != "number":
            raise Unparsable("a unit with a power that is no number")
        unit += f"^{power.value}"
    return Node("measure", (node,), unit)


# ------------------------------------------------------------------------------------ arithmetic


def _sum(left: _Tokens, depth: int) -> Node:
    terms = [_signed(left, depth)]
    while left[0].text in _SIGNS:
        terms.append(_signed(left, depth))
    return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))


def _signed(left: _Tokens, depth: int) -> Node:
    """A product with the signs before it: one, or one more that belongs to the number."""
    signs = []
    while left[0].text in _SIGNS:
        signs.append(left.popleft().text)
    if len(signs) > 2:
        raise Unparsable("many signs in a row")
    node = _product(left, depth)
    for sign in reversed(signs):
        if sign == "-":
            node = negative(node)
        elif sign != "+":
            node = Node("plusminus", (node,), sign)
    return node


def _product(left: _Tokens, depth: int) -> Node:
    """Factors and divisors from left to right: `1/2x` is half of x."""
    node = _power(left, depth)
    while True:
        if left[0].text in ("*", "/"):
            combine = times if left.popleft().text == "*" else divided
            node = combine(node, _signed_value(left, depth, _power))
        elif _starts_value(left[0]):
            node = _juxtaposed(node, left, depth)
        else:
            return node


def _juxtaposed(node: Node, left: _Tokens, depth: int) -> Node:
    r"""A product without a sign, as in `2x` and `2(3)`, or a mixed number; never `1 2` for 12."""
    first = left[0]
    factor = _power(left, depth)
    if first.kind == "number" and left[0].text == "/":
        left.popleft()
        return mixed(node, divided(factor, _primary(left, depth)))
    if first.text == "frac" and node.kind == factor.kind == "number":
        return mixed(node, factor)
    if first.kind == "number" or (factor.kind == "number" and first.text == "{"):
        raise Unparsable("two numbers in a row")
    return times(node, factor)


def _starts_value(token: Token) -> bool:
    """Whether a token can be the next factor of a product without a sign between."""
    return token.kind in ("number", "name", "text", "function") or (
        token.kind == "symbol"
        and token.text in ("(", "[", "{", "{{", "<(", "|(", "floor(", "ceil(", "[[")
    )


def _power(left: _Tokens, depth: int) -> Node:
    """A value with what stands behind it: powers, factorials, signs, subscripts."""
    node = _primary(left, depth)
    raised = False
    while True:
        sign = left[0].text if left[0].kind == "symbol" else ""
        if sign == "!":
            left.popleft()
            if node.kind == "number" and node.value > MAX_FACTORIAL:
                raise TooComplex(f"the factorial of more than {MAX_FACTORIAL}")
            node = Node("call", (node,), "!")
        elif sign in ("%", "°"):
            left.popleft()
            if node.kind == "measure":
                raise Unparsable("two units")
            node = Node("measure", (node,), sign)
        elif sign == "'" and node.kind == "name":
            left.popleft()
            node = node._replace(text=node.text + "'")
        elif sign == "_" and node.kind in ("name", "number"):
            left.popleft()
            node = subscripted(node, _script(left, depth))
        elif sign == "^":
            left.popleft()
            if raised:
                raise TooComplex("a tower of powers")
            raised = True
            node = raised_to(node, _script(left, depth))
        else:
            return node


def _script(left: _Tokens, depth: int) -> Node:
    """What is raised or lowered: a group, or one value with its sign."""
    return _signed_value(left, depth, _primary)


def _signed_value(left: _Tokens, depth: int, read: Callable[[_Tokens, int], Node]) -> Node:
    sign = left.popleft().text if left[0].text in ("+", "-") else "+"
    return negative(read(left, depth)) if sign == "-" else read(left, depth)


# ---------------------------------------------------------------------------------------- values


def _primary(left: _Tokens, depth: int) -> Node:
    """A number, a name, a function with its arguments, or whatever stands in brackets."""
    if depth > MAX_NESTING:
        raise TooComplex(f"nested more than {MAX_NESTING} deep")
    token = left.popleft()
    if token.kind == "number":
        return number(token.value, token.text)
    if token.kind == "name":
        return Node("name", (), token.text)
    if token.kind == "text":
        said = [token.text]
        while left[0].kind == "text":
            said.append(left.popleft().text)
        return Node("words", (), "".join(said))
    if token.kind == "function":
        return _function(token.text, left, depth + 1)
    if token.text in CURRENCIES and (left[0].kind == "number" or left[0].text == "-"):
        return Node("measure", (_signed_value(left, depth + 1, _primary),), token.text)
    if token.text == "{":
        node = _answer(left, depth + 1)
        _expect(left, "}")
        return node
    if token.text in _BRACKETS:
        return _bracket(token.text, left, depth + 1)
    if token.text in ("|(", "floor(", "ceil("):
        node = Node("call", (_sum(left, depth + 1),), token.text[:-1].replace("|", "abs"))
        _expect(left, token.text.replace("(", ")"))
        return node
    if token.text == "[[":
        return _matrix(left, depth + 1)
    raise Unparsable(f"{token.text!a} is not expected" if token.text else "it ends too soon")


def _expect(left: _Tokens, text: str) -> None:
    if left.popleft().text != text:
        raise Unparsable(f"{text} is missing")


def _bracket(opening: str, left: _Tokens, depth: int) -> Node:
    """A tuple, an interval or a set; one value in brackets is itself."""
    items = [] if left[0].text == "}}" else [_item(left, depth)]
    while left[0].text == ",":
        left.popleft()
        items.append(_item(left, depth))
    closing = left.popleft().text
    if closing not in _BRACKETS[opening]:
        raise Unparsable(f"{opening[0]} is not closed")
    if opening == "{{":
        return Node("bracket", pieces(sided(listed(items))) if items else (), "{}")
    if len(items) == 1 and opening + closing in ("()", "[]"):
        return items[0]
    return Node("bracket", tuple(items), opening[0] + closing[0])


def _matrix(left: _Tokens, depth: int) -> Node:
    rows: list[list[Node]] = [[_item(left, depth)]]
    while left[0].text in ("&", "\\\\"):
        if left.popleft().text == "&":
            rows[-1].append(_item(left, depth))
        elif left[0].text != "]]":
            rows.append([_item(left, depth)])
    _expect(left, "]]")
    return Node("matrix", tuple(Node("bracket", tuple(row), "[]") for row in rows))


def _function(name: str, left: _Tokens, depth: int) -> Node:
    r"""A function of what follows: `\sin^2 2x`, `\log_2 8`, `\sqrt[3]{x}`, `\frac12`."""
    if name in ("frac", "binom"):
        a, b = _argument(left, depth), _argument(left, depth)
        return divided(a, b) if name == "frac" else Node("call", (a, b), "binom")
    if name == "sqrt":
        index: tuple[Node, ...] = ()
        if left[0].text == "[":
            left.popleft()
            index = (_sum(left, depth),)
            _expect(left, "]")
        return Node("call", (_primary(left, depth), *index), "sqrt")
    base: tuple[Node, ...] = ()
    power = None
    while left[0].text in ("_", "^"):
        if left.popleft().text == "^":
            power = _script(left, depth)
        else:
            base = (_script(left, depth),)
    if left[0].text in ("(", "{", "|("):
        argument = _primary(left, depth)
    else:  # the factors that follow, up to the next function
        argument = _power(left, depth)
        while _starts_value(left[0]) and left[0].kind in ("name", "number"):
            argument = times(argument, _power(left, depth))
    node = Node("call", (argument, *base), name)
    if power is None:
        return node
    if power == number(Fraction(-1)) and name in ("sin", "cos", "tan"):
        return node._replace(text=f"arc{name}")
    if power.kind == "number" and power.value < 0:
        raise Unparsable("an inverse function")
    return raised_to(node, power)


def _argument(left: _Tokens, depth: int) -> Node:
    r"""An argument as TeX takes it: a group, or a single character: `\frac12`."""
    token = left[0]
    if token.kind == "number" and token.text == "integer" and token.value > 9:
        left.popleft()
        digits = str(token.value)
        left.appendleft(Token("number", "integer", Fraction(int(digits[1:]))))
        return number(Fraction(int(digits[0])))
    return _primary(left, depth)
