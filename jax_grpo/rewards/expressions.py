r"""What an answer is made of: a small tree, and how its nodes are put together.

Two trees are equal when they are written in the same way. A rational number that is written out,
such as `1,000`, `-.5`, `\frac12`, `1\frac45` or `1.5\cdot10^3`, is one node and not a product or a
quotient, so that it can be told from an expression with the same value. The kinds of a node:

    number                   a rational number written out; text is integer, decimal or fraction
    name, words              a variable or constant; `\text{Monday}`
    sum, product, quotient, power, minus, plusminus, call
    measure                  a number with a unit, `%`, `°`, a currency or a base, which is the text
    named                    `x = 5`, or `x > 5`: that is x in an interval
    relation                 any other equation or inequality; text is its sign
    list                     a bare list, or a union; has no order
    bracket                  tuple `()`, interval `(]`, set `{}` and so on, which is the text
    matrix                   its rows are brackets
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

from jax_grpo.rewards.tokens import CONSTANTS, MAX_NESTING, TooComplex, Unparsable

MAX_EXPONENT = 2500  # written as a number; what comes out is bounded where it is evaluated
MAX_FACTORIAL = 20
_MAX_DEPTH = 4 * MAX_NESTING  # of the tree: brackets hold sums of products of powers
_INTERVALS = {"<": "()", "<=": "(]", ">": "()", ">=": "[)"}
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
RELATIONS = (*MIRRORED, "∈")


class Node(NamedTuple):
    """A node of the tree; two are equal when they are written in the same way."""

    kind: Literal[
        "number",
        "name",
        "words",
        "sum",
        "product",
        "quotient",
        "power",
        "minus",
        "plusminus",
        "call",
        "measure",
        "named",
        "relation",
        "list",
        "bracket",
        "matrix",
    ]
    parts: tuple[Node, ...] = ()
    text: str = ""
    value: Fraction = Fraction(0)


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it; without recursion, as a tree may still be too deep."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.parts


def variables(node: Node) -> set[str]:
    """The names that have no value of their own."""
    return {n.text for n in walk(node) if n.kind == "name" and n.text not in CONSTANTS}


def negative(node: Node) -> Node:
    """The negative of a node; of a number written out, a number written out."""
    if node.kind == "number":
        return node._replace(value=-node.value)
    if node.kind == "measure":
        return node._replace(parts=(negative(node.parts[0]),))
    return Node("minus", (node,))


def _check_depth(node: Node) -> None:
    """Refuse a tree that is too deep to recurse over, such as that of `x/x/x/x ...`."""
    level = [node]
    for _ in range(_MAX_DEPTH):
        level = [part for above in level for part in above.parts]
        if not level:
            return
    raise TooComplex(f"nested more than {_MAX_DEPTH} deep")


def pieces(node: Node) -> tuple[Node, ...]:
    """The members of a list, or the node alone."""
    return node.parts if node.kind == "list" else (node,)


def _sides(node: Node) -> list[Node]:
    """A node once with the upper signs of its plus-minuses and once with the lower ones."""
    if all(n.kind != "plusminus" for n in walk(node)):
        return [node]
    return [_side(node, upper) for upper in (True, False)]


def _side(node: Node, upper: bool) -> Node:
    parts = tuple(_side(part, upper) for part in node.parts)
    if node.kind == "plusminus":
        return parts[0] if (node.text == "±") == upper else negative(parts[0])
    return node._replace(parts=parts)


def listed(items: list[Node]) -> Node:
    """A list without lists in it; one item is itself."""
    flat = [part for item in items for part in pieces(item)]
    return flat[0] if len(flat) == 1 else Node("list", tuple(flat))


def sided(node: Node) -> Node:
    """A node or list with each plus-minus as the two that it stands for."""
    _check_depth(node)
    return listed([side for item in pieces(node) for side in _sides(item)])


def related(a: Node, sign: str, b: Node) -> Node:
    """`x = 5`, `(x, y) = (5, 6)`, `x > 5` and `x in [5, 6]` name a value, nothing else does."""
    if sign != "∈" and _is_name(b) and not _is_name(a):
        a, sign, b = b, MIRRORED[sign], a
    is_function = a.kind == "product" and a.parts[0].text in ("f", "g", "h", "p", "P")
    own = variables(a.parts[0] if is_function else a)  # `f(x) = x + 1` names f(x)
    are_named = a.kind == b.kind == "bracket" and sign == "=" and len(a.parts) == len(b.parts)
    is_named = all(map(_is_name, a.parts)) if are_named else _is_name(a) and sign != "!="
    if not is_named or own & variables(b):
        return Node("relation", (a, b), sign)
    if sign in _INTERVALS:
        infinity = Node("name", (), "infty")
        ends = (negative(infinity), b) if "<" in sign else (b, infinity)
        b = Node("bracket", ends, _INTERVALS[sign])
    return Node("named", (a, b))


def between(values: list[Node], signs: list[str]) -> Node:
    """`1 < x <= 3`: x in an interval. Any other chain is no answer."""
    if set(signs) <= {">", ">="}:
        values, signs = values[::-1], [MIRRORED[sign] for sign in signs[::-1]]
    a, name, b = values
    if not set(signs) <= {"<", "<="} or not _is_name(name) or variables(name) & variables(a):
        raise Unparsable("a chain of relations")
    text = "[("[signs[0] == "<"] + "])"[signs[1] == "<"]
    return Node("named", (name, Node("bracket", (a, b), text)))


def _is_name(node: Node) -> bool:
    """Whether a node names a quantity: `x`, `f(x)`, `area`, `AB`."""
    names = node.parts if node.kind == "product" else (node,)
    return all(n.kind in ("name", "words") for n in names) and (
        node.kind == "words" or bool(variables(node))
    )


def number(value: Fraction, form: str = "") -> Node:
    """A number written out; by default as a decimal, or an integer where it is whole."""
    return Node("number", (), form or ("integer" if value.denominator == 1 else "decimal"), value)


def times(a: Node, b: Node) -> Node:
    """A product; `1.5 * 10^3` is a number written out."""
    if b.kind == "power" and _is_plain(a) and 1 <= abs(a.value) < 10:
        base, exponent = b.parts
        if base == number(Fraction(10)) and _is_plain(exponent, "integer"):
            return number(a.value * base.value ** int(exponent.value))
    return Node("product", (*(a.parts if a.kind == "product" else (a,)), b))


def divided(a: Node, b: Node) -> Node:
    """A quotient; of two numbers without fractions, a number written out."""
    if _is_plain(a) and _is_plain(b) and b.value:
        return number(a.value / b.value, "fraction")
    return Node("quotient", (a, b))


def mixed(whole: Node, part: Node) -> Node:
    r"""`1\frac45`, which is no product."""
    if not (_is_plain(whole, "integer") and _is_plain(part, "fraction") and 0 < part.value < 1):
        raise Unparsable("two numbers in a row")
    return number(whole.value + part.value, "fraction")


def _is_plain(node: Node, *forms: str) -> bool:
    """Whether a node is a number written out in one of the forms, by default no fraction."""
    return node.kind == "number" and node.text in (forms or ("integer", "decimal"))


def subscripted(node: Node, script: Node) -> Node:
    """`x_1` is a name, and `52_8` a number in a base, which is never converted."""
    text = str(script.value) if script.kind == "number" else script.text
    if script.kind not in ("number", "name", "words"):
        raise Unparsable("a subscript that is no name")
    if node.kind == "number":
        return Node("measure", (node,), f"base {text}")
    return node._replace(text=f"{node.text}_{text}")


def raised_to(base: Node, exponent: Node) -> Node:
    """A power, where the exponent is small: no towers of numbers."""
    if exponent.kind == "number" and abs(exponent.value) > MAX_EXPONENT:
        raise TooComplex(f"an exponent over {MAX_EXPONENT}")
    if not variables(exponent) and any(n.kind in ("power", "call") for n in walk(exponent)):
        raise TooComplex("a tower of powers")
    return Node("power", (base, exponent))
