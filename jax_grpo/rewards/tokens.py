r"""From the spelling of an answer, LaTeX or plain, to its tokens; bounded and in one pass.

Whatever is not in the tables below is `Unparsable`: an answer that cannot be read is compared by
its spelling alone. A comma between digits separates thousands only in groups of three, and only
outside of brackets: `1,000` is a number, `7,2` a list, and `(1,000)` the pair of 1 and 0; inside
of brackets thousands are written `1{,}000`, `1\,000` or `1 000`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, NamedTuple

MAX_CHARACTERS = 1000
MAX_DIGITS = 50  # of a number; far below the precision that anything is evaluated with
MAX_NESTING = 25


class Unparsable(ValueError):
    """An answer that is no mathematics that we read; says why in one line."""


class TooComplex(ValueError):
    """An answer over a bound; says which in one line."""


class Token(NamedTuple):
    """A piece of an answer; a number has its exact value, and its form is its text."""

    kind: Literal["number", "name", "text", "function", "unit", "symbol", "end"]
    text: str
    value: Fraction = Fraction(0)


FUNCTIONS = frozenset(
    "sqrt frac binom abs exp ln log lg floor ceil sin cos tan cot sec csc arcsin arccos arctan "
    "asin acos atan sinh cosh tanh".split()
)
_SAME_FUNCTION = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom"} | {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "lg": "log",
}
# Names with a value of their own; all other names are variables.
CONSTANTS = frozenset(("pi", "e", "i", "infty"))
_SAME_NAME = {"infinity": "infty", "inf": "infty", "varphi": "phi", "varepsilon": "epsilon"}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega pi infty "
    "ell".split()
)

_SYMBOLS = {  # commands and characters that are one symbol to the parser
    **{"cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "%": "%"},
    **{"le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">="},
    **{"lt": "<", "gt": ">", "approx": "=", "ne": "!=", "neq": "!="},
    **{"in": "∈", "cup": "∪"},
    **{"{": "{{", "}": "}}", "lbrace": "{{", "rbrace": "}}", "degree": "°"},
    **{"lvert": "|(", "rvert": "|)", "lfloor": "floor(", "rfloor": "floor)"},
    **{"lceil": "ceil(", "rceil": "ceil)", "langle": "<(", "rangle": ">)", "\\": "\\\\"},
}
_UNICODE = str.maketrans(
    {
        **{"−": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "°": r"\degree ", "π": r"\pi "},
        **{"√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "≤": "<=", "≥": ">=", "≠": r"\ne "},
        **{"≈": r"\approx ", "∅": r"\emptyset ", "ℝ": r"(-\infty,\infty)"},
        **{"∪": r"\cup ", "∈": r"\in ", "²": "^2", "³": "^3"},
    }
)
# Commands that say how a formula looks, and nothing about what it is.
_SILENT = frozenset(
    "left right big Big bigl bigr Bigl Bigr displaystyle textstyle quad qquad mathbf mathrm "
    "mathit boldsymbol bf rm boxed fbox underline text textbf textrm mbox operatorname angle "
    "triangle limits , ; : ! ( ) [ ]".split()
) | frozenset(" \t\r\n")

UNITS = {
    alias: words.split()[0]
    for words in (
        "$ dollar dollars usd|¢ cent cents|€ euro euros|£|% percent|° degree degrees|"
        "in inch inches|ft foot feet|yd yard yards|mi mile miles|mm millimeter millimeters|"
        "cm centimeter centimeters|m meter meters metre metres|km kilometer kilometers|"
        "mg milligram milligrams|g gram grams|kg kilogram kilograms|oz ounce ounces|"
        "lb lbs pound pounds|ml milliliter milliliters|l L liter liters|gal gallon gallons|"
        "cup cups|pint pints|"
        "s sec second seconds|min minute minutes|h hr hour hours|day days|week weeks|"
        "month months|year years|mi/h mph|km/h kmh|m/s|rad radian radians|unit units"
    ).split("|")
    for alias in words.split()
}
CURRENCIES = frozenset("$¢€£")  # they stand before the number
_UNIT_PHRASE = re.compile(r"(?P<power>(?:square|sq\.?|cubic|cu\.?) )?(?P<unit>[a-z/%$]+)\.?")
# Behind a number, what was counted: `5 eggs`; but neither millions nor tenths, which multiply it.
_COUNTED = re.compile(
    r"(?!hundred|thousand|[a-z]*illion|dozen|score|ten|quarter|half|halve|time|plus|minus|"
    r"[a-z]*(?:th|ird|s)s)"
    r"[a-z]{3,}s|people|children|men|women"
)

# Thousands with a separator that cannot be meant otherwise, then with a comma, then without.
_APART = r"(?:\{,\}|,?\\[,!;: ],? *|~| )"
_DIGITS = rf"[1-9][0-9]{{0,2}}(?:{_APART}[0-9]{{3}})+(?![0-9])|%s[0-9]+"
_COMMAS = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])|"
_PIECE = (
    rf"(?P<number>(?:(?:{_DIGITS})(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]+(?![0-9A-Za-z])|(?<=[.0-9])\\overline\s*\{[0-9]+\})?)|"
    r"\\(?:text|textbf|textrm|textit|mbox|mathrm)\s*\{(?P<words>[A-Za-z '.,/%%-]*)\}|"
    r"\\(?P<begin>begin|end)\s*\{(?P<matrix>[pb]?matrix|array)\}(?:\{[lcr| ]*\})?|"
    r"(?P<degree>\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}))|"
    r"\\(?P<command>[A-Za-z]+|[^A-Za-z])|(?P<letters>[A-Za-z]+)|"
    r"(?P<symbol><=|>=|!=|\*\*|[-+*/^_=<>()\[\]{}|!,%%&'¢€£])|(?P<space>[ \t\n\r$~]+)"
)
_INSIDE, _OUTSIDE = re.compile(_PIECE % ""), re.compile(_PIECE % _COMMAS)
_PROSE = re.compile(r"[A-Za-z][A-Za-z' ,.]*")
_OPENING, _CLOSING = frozenset("( [ {{ <(".split()), frozenset(") ] }} >)".split())


def tokens(text: str) -> list[Token]:
    r"""Cut an answer into tokens, an `end` behind them.

    Raises:
        Unparsable: a character or a command that is in no table.
        TooComplex: over a bound.

    >>> [token.text for token in tokens(r"5\,\text{cm}^2 + 1,000x")]
    ['integer', 'cm', '^', 'integer', '+', 'integer', 'x', '']
    """
    if len(text) > MAX_CHARACTERS:
        raise TooComplex(f"longer than {MAX_CHARACTERS} characters")
    text = re.sub(r"\\mathbb\s*(?:\{R\}|R(?![A-Za-z]))", "ℝ", trimmed(text)).translate(_UNICODE)
    if _PROSE.fullmatch(text) and any(map(_is_word, re.findall("[A-Za-z]+", text))):
        return [*_prose(text), Token("end", "")]
    found: list[Token] = []
    brackets = braces = 0
    at = 0
    while at < len(text):
        piece = (_INSIDE if brackets else _OUTSIDE).match(text, at)
        if piece is None:
            raise Unparsable(f"the character {text[at]!a}")
        at = piece.end()
        for token in _read(piece, found):
            if token.text == "," and found and found[-1].text == ",":
                continue  # "2, and 3"
            found.append(token)
            brackets += (token.text in _OPENING) - (token.text in _CLOSING)
            braces += (token.text == "{") - (token.text == "}")
            if brackets + braces > MAX_NESTING:
                raise TooComplex(f"nested more than {MAX_NESTING} deep")
    return [*found, Token("end", "")]


def trimmed(text: str) -> str:
    r"""An answer without the spaces, `$` and full stops around it; `5\$` stays.

    >>> trimmed(r" $5\$$. ")
    '5\\$'
    """
    text = text.lstrip(" \t\n\r$")
    end = len(text.rstrip(" \t\n\r$."))
    return text[: end + text[:end].endswith("\\")]


def words(text: str) -> str:
    r"""What an answer in words says: without markup, spaces and case.

    >>> words(r"\text{ Not  Monday }.")
    'notmonday'
    """
    text = re.sub(r"\\(?:text[a-z]*|mbox|math[a-z]+)\s*\{|\\[ ,;]|[{}$~ \t\r\n]", "", text)
    return text.rstrip(".").lower()


def _read(piece: re.Match[str], before: list[Token]) -> list[Token]:
    """The tokens of one piece: none where it says nothing, several where it is letters."""
    kind, text = piece.lastgroup, piece[0]
    if kind == "number":
        return [_number(text)]
    if kind == "words":
        return _words(piece["words"], _ends_number(before))
    if kind == "matrix":
        return [Token("symbol", "[[" if piece["begin"] == "begin" else "]]")]
    if kind == "degree":
        return [Token("symbol", "°")]
    if kind == "command":
        return _command(piece["command"])
    if kind == "letters":
        return _letters(text, _ends_number(before))
    if kind == "space":
        return []
    if text == "|":
        bar = next((token.text for token in reversed(before) if token.text in ("|(", "|)")), "")
        after_value = before and (
            before[-1].kind in ("number", "name") or before[-1].text in (")", "}", "]", "!", "'")
        )
        return [Token("symbol", "|)" if after_value and bar == "|(" else "|(")]
    if text in CURRENCIES:
        return [Token("unit", text)]
    return [Token("symbol", "^" if text == "**" else text)]


def _ends_number(before: list[Token]) -> bool:
    return bool(before) and (before[-1].kind == "number" or before[-1].text == "}")


def _number(text: str) -> Token:
    """A number as it is written out: an integer, or a decimal where it is not whole."""
    text, _, repeated = text.partition("\\overline")
    text = re.sub(r"[^0-9.eE+-]", "", text)
    repeated = re.sub(r"[^0-9]", "", repeated)
    mantissa, _, exponent = text.lower().partition("e")
    if max(len(mantissa + repeated), abs(int(exponent or 0))) > MAX_DIGITS:
        raise TooComplex(f"a number of more than {MAX_DIGITS} digits")
    value = Fraction(text.rstrip("."))
    if repeated:
        if "." not in text:
            raise Unparsable("a bar over the digits of an integer")
        places = len(text.partition(".")[2])
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places)
    return Token("number", "integer" if value.denominator == 1 else "decimal", value)


def _is_word(letters: str) -> bool:
    """Whether a run of letters is a word of English and not a product of variables."""
    known = letters in FUNCTIONS | _GREEK or letters in _SAME_NAME or letters.lower() in UNITS
    return (len(letters) > 2 or letters.lower() == "no") and letters != "and" and not known


def _prose(text: str) -> list[Token]:
    """An answer in plain words; commas, "and" and "or" separate several."""
    parts = re.split(r"\s*,\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+", text)
    found = [Token("text", words(part)) for part in parts]
    return [token for text in found for token in (Token("symbol", ","), text)][1:]


def _words(text: str, behind_number: bool) -> list[Token]:
    r"""What stands in a `\text{}`: a separator, a unit, or words; a letter is a name."""
    plain = " ".join(text.split())
    if plain.strip(", ") in ("and", "or"):
        return [Token("symbol", ",")]
    units = [_unit(part, behind_number) for part in plain.split(" per ")]
    if all(units):
        return [Token("unit", "/".join(units))]
    if len(plain) == 1 and plain.isalpha():
        return [Token("name", plain)]
    return [Token("text", words(plain))] if plain else []


def _unit(phrase: str, behind_number: bool) -> str:
    """The unit that a phrase names; empty when it is none."""
    phrase = phrase.lower() if len(phrase) > 1 else phrase
    unit = _UNIT_PHRASE.fullmatch(phrase)
    if unit and unit["unit"] in UNITS:
        return UNITS[unit["unit"]] + {"s": "^2", "c": "^3"}.get((unit["power"] or " ")[0], "")
    return phrase if behind_number and _COUNTED.fullmatch(phrase) else ""


def _command(name: str) -> list[Token]:
    """What a backslash and a name stand for."""
    if name in _SILENT:
        return []
    name = _SAME_NAME.get(name, _SAME_FUNCTION.get(name, name))
    if name in ("emptyset", "varnothing"):
        return [Token("symbol", "{{"), Token("symbol", "}}")]
    if name == "$":
        return [Token("unit", "$")]
    if name in FUNCTIONS:
        return [Token("function", name)]
    if name in _GREEK:
        return [Token("name", name)]
    if name in _SYMBOLS:
        return [Token("symbol", _SYMBOLS[name])]
    raise Unparsable(f"the command {name[:20]!a}")


def _letters(text: str, behind_number: bool) -> list[Token]:
    """A run of letters: a word with a meaning, or the product of one-letter variables."""
    if text in ("and", "or"):
        return [Token("symbol", ",")]
    if text in FUNCTIONS:
        return [Token("function", _SAME_FUNCTION.get(text, text))]
    if text in ("pi", "infinity", "inf", "infty"):
        return [Token("name", _SAME_NAME.get(text, text))]
    unit = _unit(text, behind_number) if len(text) > 1 and text.islower() else ""
    if unit:
        return [Token("unit", unit)]
    return [Token("name", letter) for letter in text]
