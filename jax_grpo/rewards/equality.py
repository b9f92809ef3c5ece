r"""Is an answer the right one? By structure, then by the value of the parts.

Three rules keep a policy from being paid for the question:

- where the right answer is a rational number written out (`5`, `0.25`, `\frac{3}{4}`), so must
  the answer be: `37+58`, `2^{10}` or `\sqrt{25}` is work that was not done. A fraction need not
  be reduced;
- where the right answer has no function such as a sine or a logarithm, neither may the answer;
- an expression or fraction that stands in the question is no answer, unless it has the right
  one's form.

Other expressions are equal when they have the same value, so that `2(x+1)` is as right as `2x+2`.
A policy can learn to write the question in another order: where a data set asks to expand, factor
or simplify, set `form`, and the answer must be the right one up to the order of terms and factors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax_grpo.rewards.expressions import MIRRORED, Node, negative, variables, walk
from jax_grpo.rewards.parsing import parse
from jax_grpo.rewards.tokens import TooComplex, Unparsable, trimmed, words
from jax_grpo.rewards.values import is_equal, is_multiple

_WORK = frozenset(("sum", "product", "quotient", "power", "call"))
# Markup that is silent, and a division or a product as another one writes it.
_SILENT = re.compile(
    r"(?<!\\)\\(?:(?:left|right)(?![A-Za-z0-9])|(?:text[a-z]*|mbox|mathrm)\s*\{(?P<said>[^{}]*)\})"
)
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}|\\frac(\d)(\d)")
# `\textbf{(C)}\ 12`: a letter and what it stands for.
_CHOICE = re.compile(
    r"(?:\\text(?:bf|rm)?\s*\{\s*)?\((?P<letter>[A-Z])\)\s*\}?(?:[ ~]|\\[ ,;]|\\quad)*(?P<rest>.+)"
)
MEASURES = ("base", "currency", "degree", "percent", "unit")


class Settings(NamedTuple):
    """How strictly answers are compared.

    optional: which measures of `MEASURES` may be left out or added; two that differ never pass.
    tolerance: relative, for a decimal of the data that is not whole.
    form: whether an expression must also be in the form of the right one.
    worked: whether a rational number must be written out.
    evaluate: False to raise `NotHere` where expressions would be evaluated.
    """

    optional: tuple[str, ...] = ("currency", "degree", "unit")
    tolerance: float = 1e-6
    form: bool = False
    worked: bool = True
    evaluate: bool = True


_DEFAULT = Settings()


class Verdict(NamedTuple):
    """The status of a completion's answers, whether the last is right, and why, in one line."""

    status: str
    right: bool
    why: str


class NotHere(Exception):
    """The answer must be evaluated, which is a worker's task."""


def judge_item(item: tuple[list[str], str, list[Any]]) -> Verdict:
    """`judge` for a worker, which gets JSON."""
    answers, gold, (optional, *others) = item
    return judge(answers, gold, Settings(tuple(optional), *others))


def judge(answers: Sequence[str], gold: str, settings: Settings = _DEFAULT) -> Verdict:
    r"""Compare the answers that a completion gave, which must be one by value, with the gold.

    >>> judge([r"\frac{2}{4}"], "0.5")
    Verdict(status='found', right=True, why='equal')
    >>> judge(["1", "2"], "2").status, judge(["3=5"], "5").status
    ('several', 'unparsable')
    """
    answer = answers[-1]
    try:
        same = settings._replace(tolerance=0.0, form=False, worked=False)
        for other in answers[:-1]:
            if not equal(parse(other), parse(answer), same):
                return Verdict("several", False, f"{other[:50]!a} and {answer[:50]!a} differ")
        if spelling(answer) == spelling(gold):
            return Verdict("found", True, "written as the right answer")
        wanted = _read(gold)
        if wanted is not None and wanted.kind == "words":
            right = words(answer) == wanted.text
            return Verdict("found", right, "the same words" if right else "other words")
        choice = _CHOICE.fullmatch(trimmed(answer)) if wanted and _is_letter(wanted) else None
        given = parse(choice["letter"] if choice and _is_value(choice["rest"]) else answer)
        if wanted is None:
            return Verdict("found", False, "the right answer cannot be read, and is not this text")
        right = equal(given, wanted, settings)
        return Verdict("found", right, "equal" if right else "not equal")
    except Unparsable as error:
        return Verdict("unparsable", False, str(error))
    except TooComplex as error:
        return Verdict("too_complex", False, str(error))


def _read(text: str) -> Node | None:
    """The tree of an answer; None when it cannot be read."""
    try:
        return parse(text)
    except (Unparsable, TooComplex):
        return None


def _is_letter(node: Node) -> bool:
    return node.kind == "name" and len(node.text) == 1 and node.text.isupper()


def _is_value(text: str) -> bool:
    """Whether a text is one value, without words or another letter to choose."""
    node = _read(text)
    other = ("list", "words", "named", "relation")
    return node is not None and not any(n.kind in other or _is_letter(n) for n in walk(node))


def spelling(text: str) -> str:
    r"""An answer without what never matters: spaces, `$`, `\left`, `\text`, a full stop at the end.

    >>> spelling(r" $\left( 1, \dfrac{1}{2} \right)$. ")
    '(1,\\frac{1}{2})'
    """
    text = _SILENT.sub(lambda match: match["said"] or "", text)
    text = trimmed(text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    # A space counts only between two letters or digits.
    return re.sub(r"(?<![A-Za-z0-9])[ \t\r\n]+|[ \t\r\n]+(?![A-Za-z0-9 \t\r\n])", "", text)


# ------------------------------------------------------------------------------------- structure


def equal(a: Node, gold: Node, settings: Settings) -> bool:
    """Whether an answer is the right one: the same structure, with equal parts.

    Raises:
        TooComplex: to compare them would take too much.
        NotHere: to compare them would take an evaluation, and the settings forbid it.
    """
    if a == gold:
        return True
    if "measure" in (a.kind, gold.kind):
        return _equal_measures(a, gold, settings)
    if "named" in (a.kind, gold.kind) or "relation" in (a.kind, gold.kind):
        return _equal_relations(a, gold, settings)
    if _is_collection(a) and _is_collection(gold):
        return _match(a.parts, gold.parts, settings)
    if a.kind in ("bracket", "matrix") and (a.kind, a.text) == (gold.kind, gold.text):
        return len(a.parts) == len(gold.parts) and all(
            equal(x, y, settings) for x, y in zip(a.parts, gold.parts, strict=True)
        )
    if not {"list", "bracket", "matrix", "words"}.isdisjoint((a.kind, gold.kind)):
        return False
    return _equal_values(a, gold, settings)


def _is_collection(node: Node) -> bool:
    """A list or a set: what has no order. A tuple is neither."""
    return node.kind == "list" or (node.kind, node.text) == ("bracket", "{}")


def _match(parts: Sequence[Node], golds: Sequence[Node], settings: Settings) -> bool:
    """Whether each right member has an answer of its own, in any order."""
    if len(parts) != len(golds):
        return False
    names = {gold.parts[0] for gold in golds if gold.kind == "named"}
    if len(names) > 1 and any(part.kind != "named" for part in parts):
        return False  # `x=1, y=2` is not `2, 1`
    rest = list(parts)
    for gold in golds:
        found = next((part for part in rest if equal(part, gold, settings)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _equal_measures(a: Node, gold: Node, settings: Settings) -> bool:
    """Numbers with a unit: the same one, or one that may be missing on one side."""
    if a.kind == gold.kind:
        return a.text == gold.text and equal(a.parts[0], gold.parts[0], settings)
    measure = a if a.kind == "measure" else gold
    if _measure_kind(measure.text) not in settings.optional:
        return False
    a, gold = (n.parts[0] if n is measure else n for n in (a, gold))
    return equal(a, gold, settings)


def _measure_kind(text: str) -> str:
    kinds = {"%": "percent", "°": "degree", **dict.fromkeys("$¢€£", "currency")}
    return "base" if text.startswith("base") else kinds.get(text, "unit")


def _equal_relations(a: Node, gold: Node, settings: Settings) -> bool:
    """`5` is `x=5` and the reverse; equations of curves are equal up to a constant factor."""
    if "relation" not in (a.kind, gold.kind):
        if a.kind == gold.kind and a.parts[0] != gold.parts[0]:
            return _proportional(a, gold, settings)
        a, gold = (n.parts[1] if n.kind == "named" else n for n in (a, gold))
        return equal(a, gold, settings)
    if not {a.kind, gold.kind} <= {"named", "relation"}:
        return False
    if (a.text or "=") == (gold.text or "=") == "=":
        return _proportional(a, gold, settings)
    sides = a.parts if a.text == gold.text else a.parts[::-1]
    return gold.text in (a.text, MIRRORED.get(a.text)) and all(
        equal(x, y, settings) for x, y in zip(sides, gold.parts, strict=True)
    )


def _proportional(a: Node, gold: Node, settings: Settings) -> bool:
    """Whether two equations differ by a constant factor; a solution is none (`x=5`, `2x=10`)."""
    if gold.kind == "named" and not variables(gold.parts[1]):
        return False
    if settings.form:
        return in_order(a) == in_order(gold)
    left, right = (Node("sum", (n.parts[0], negative(n.parts[1]))) for n in (a, gold))
    _needs_evaluation(settings)
    return is_multiple(left, right)


# ---------------------------------------------------------------------------------------- values


def _equal_values(a: Node, gold: Node, settings: Settings) -> bool:
    """Whether two expressions have the same value, and the work was done where it must be."""
    if gold.kind == "number" and a.kind == "number":
        return _equal_numbers(a, gold, settings)
    if settings.worked and (gold.kind == "number" or (_functions(a) and not _functions(gold))):
        return False
    if settings.form:
        return in_order(a) == in_order(gold)
    _needs_evaluation(settings)
    return is_equal(a, gold)


def _equal_numbers(a: Node, gold: Node, settings: Settings) -> bool:
    if settings.form and (a.text == "fraction") != (gold.text == "fraction"):
        return False
    allowed = Fraction(settings.tolerance) if gold.text == "decimal" else 0
    return abs(a.value - gold.value) <= allowed * abs(gold.value)


def _functions(node: Node) -> bool:
    return any(
        n.kind == "call"
        and n.text not in ("sqrt", "abs", "exp")
        and not (n.text == "binom" and variables(n))
        for n in walk(node)
    )


def _needs_evaluation(settings: Settings) -> None:
    if not settings.evaluate:
        raise NotHere


def in_order(node: Node) -> Node:
    """A node with its terms and factors in one order: trees that differ by nothing else."""
    parts = [in_order(part) for part in node.parts]
    return node._replace(parts=tuple(sorted(parts) if node.kind in ("sum", "product") else parts))


def is_copied(answer: str, gold: str, question: str) -> bool:
    r"""Whether an answer with something to compute in it stands in the question as it is.

    >>> is_copied(r"\sqrt{18}", r"3\sqrt{2}", r"Simplify $\sqrt{18}$.")
    True
    """
    copy, line = _on_one_line(answer), _on_one_line(question)
    if copy not in line:
        return False
    if not re.search(rf"(?<![A-Za-z0-9.]){re.escape(copy)}(?![A-Za-z0-9])", line):
        return False
    node, wanted = _read(answer), _read(gold)
    if node is None or wanted is None:
        return False
    is_work = any(n.kind in _WORK or n.text == "fraction" for n in walk(node))
    return is_work and in_order(node) != in_order(wanted)


@functools.lru_cache(maxsize=1024)  # a question is looked at for each of its completions
def _on_one_line(text: str) -> str:
    r"""A text with `/` for `\frac` and `\div`, and `*` for `\times`, so that a copy is seen."""
    text = _FRACTION.sub(
        lambda match: f" {'/'.join(filter(None, match.groups()))} ", spelling(text)
    )
    for old, new in (("÷", "/"), ("\\div", "/"), ("×", "*"), ("\\times", "*"), ("\\cdot", "*")):
        text = text.replace(old, new)
    return spelling(text)
