"""Completions that try to be paid for answers they do not have, and odd ones that are right."""

from __future__ import annotations

import time

import pytest

from jax_grpo.rewards.math import correctness

SECONDS = 2.0  # the deadline of an answer that must be evaluated


def box(answer: str) -> str:
    return f"<think>So be it.</think>It is $\\boxed{{{answer}}}$."


def rewards(completions, golds, seconds=SECONDS, **settings):
    """Values and statuses."""
    logged = {}
    values = correctness(
        prompts=["?"] * len(golds),
        completions=completions,
        answer=golds,
        seconds=seconds,
        log_extra=logged.__setitem__,
        **settings,
    )
    return values, logged["correctness/status"]


# (completion, right answer): none of them may pay.
HOSTILE = {
    # what well-known graders pay for
    "an equation between numbers": (box("3 = 5"), "5"),
    "a true equation": (box("5 = 5"), "5"),
    "a chain": (box("1=2=3=4=5"), "5"),
    "a chain with a name": (box(r"\text{the answer}=1=2=5"), "5"),
    "digits apart": (box("1 2 3"), "123"),
    "a list for a number": (box("7,2"), "72"),
    "either of two": (box("72 or 73"), "72"),
    "glued to words": (box("squaresquare5"), "5"),
    "percent for a number": (box(r"10\%"), "10"),
    "percent for its value": (box(r"10\%"), "0.1"),
    "a tuple for a set": (box("(1,2)"), r"\{1,2\}"),
    "letters of a word": (box("yadnoM"), "Monday"),
    "without a box": ("The answer is 5", "5"),
    "a long decimal": (box("3.14159265358979323846264338327950288419716939937510"), r"\pi"),
    "an empty box": (box(""), "5"),
    # the work that was not done
    "the sum itself": (box("37+58"), "95"),
    "the power itself": (box("2^{10}"), "1024"),
    "the root itself": (box(r"\sqrt{25}"), "5"),
    "the factorial itself": (box("6!"), "720"),
    "an integral": (box(r"\int_0^5 1dx"), "5"),
    "a limit": (box(r"\lim_{x\to5} x"), "5"),
    "the sine itself": (box(r"\sin 60^\circ"), r"\frac{\sqrt3}{2}"),
    "the equation itself": (box("2x+3=13"), "x=5"),
    "an identity": (box("y-y=0"), "y=2x+3"),
    "zero times the equation": (box("0(y-2x-3)=0"), "y=2x+3"),
    # several guesses
    "a spray": ("".join(map(box, map(str, range(100)))), "5"),
    "a spray ending right": ("".join(map(box, "12345")), "5"),
    "a spray in one box": (box(",".join(map(str, range(100)))), "5"),
    "a spray as a set": (box(r"\{" + ",".join(map(str, range(9))) + r"\}"), "5"),
    "a spray with plus-minus": (box(r"0 \pm 5"), "5"),
    "all letters": (box("A,B,C,D,E"), "C"),
    "a box in a box": (r"\boxed{4 \boxed{5}}", "5"),
    "a spray of lines": ("#### 4\n#### 5", "5"),
    "every number": (box(r"x \in (-\infty,\infty)"), "5"),
    "every number but": (box(r"x \ne 4"), "5"),
    # hiding
    "thought only": (r"<think>\boxed{5}</think> I am sure.", "5"),
    "thought without an end": (r"<think>\boxed{5}", "5"),
    "never closed": (r"\boxed{5", "5"),
    "closed by an escape": (r"\boxed{5\}", "5"),
    "closed and not": (r"\boxed{5} and \boxed{6", "5"),
    "a line break and the word": (r"\\boxed{5}", "5"),
    # characters
    "arabic digits": (box("\u0665"), "5"),
    "wide digits": (box("\uff15"), "5"),
    "zero width": (box("5\u200b0"), "50"),
    "zero width alone": (box("\u200b5"), "5"),
    "cyrillic": (box("\u0421"), "C"),
    "right to left": (box("\u202e21"), "12"),
    "a null": (box("5\x00"), "5"),
    "a surrogate": (box("5\ud800"), "5"),
    "infinite": (box(r"\infty"), "5"),
    "not a number": (box("nan"), "5"),
    "undefined": (box("0/0"), "0"),
    # endless work
    "a tower": (box("9^{9^{9^9}}"), "5"),
    "a tower for a root": (box("9^{9^{9^9}}"), r"\sqrt{2}"),
    "a slow tower": (box("((9^{999})^{999})^{999}"), r"\sqrt{2}"),
    "a tower of e": (box(r"\exp(\exp(\exp(\exp(9))))"), r"e^2"),
    "a tower of x": (box("x^{x^{x^{x^x}}}"), "x^2"),
    "a tower of roots": (box(r"\sqrt" * 150 + "2"), r"\sqrt2"),
    "a factorial": (box("10000000!"), "5"),
    "a factorial for a root": (box("10000000!"), r"\sqrt{2}"),
    "factorials of factorials": (box("((20!)!)!"), r"3!"),
    "a binomial": (box(r"\binom{10^{15}}{10^{14}}"), r"\binom{5}{2}"),
    "a sum of powers": (box(r"\sum_{k=1}^{10^9} k^k"), r"\sqrt{2}"),
    "a sine of the large": (box(r"\sin(10^{999})"), r"\sin 2"),
    "a huge exponent": (box("1e999999999"), "5"),
    "a huge integer": (box("9" * 100_000), "5"),
    "a huge fraction": (box("1/" * 50_000 + "1"), "1"),
    "nested braces": (box("{" * 100_000 + "5" + "}" * 100_000), "5"),
    "nested brackets": (box("(" * 100_000 + "5" + ")" * 100_000), r"\sqrt2"),
    "nested boxes": (r"\boxed{" * 100_000 + "5" + "}" * 100_000, "5"),
    "a megabyte": (box("5 " * 500_000), "5"),
    "a megabyte of text": ("blah " * 200_000 + box("6"), "5"),
    "a megabyte of boxes": (box("6") * 40_000, "5"),
    "many factors": (box("(x^{999}+1)" * 80), "x^2"),
    "a product of roots": (box(r"\sqrt[97]{x+1}" * 60), "x^2"),
    "a large set": (
        box(r"\{" + ",".join(f"x+{k}" for k in range(130)) + r"\}"),
        r"\{" + ",".join(f"x+{k}" for k in range(130, 0, -1)) + r"\}",
    ),
}

# (completion, right answer): each of them must pay.
CONTROLS = [
    (box(".5"), "1/2"),
    (box("x=5"), "5"),
    (box("5"), "x = 5"),
    (box("5.0"), "5"),
    (box("5."), "5"),
    (box(r"\dfrac12"), "0.5"),
    (box(r"\frac{2}{4}"), r"\frac{1}{2}"),
    (box("1 1/2"), r"\frac{3}{2}"),
    (box(r"1\,000"), "1000"),
    (box("1{,}000"), "#### 1,000"),
    (box("1 000 000"), "1,000,000"),
    (box("\u22125"), "-5"),
    (box(r"1.5\times10^3"), "1500"),
    (box(r"\$5.00"), "5"),
    (box("90\u00b0"), r"90^\circ"),
    (box(r"5\text{ centimeters}"), "5 cm"),
    (box(r"\text{ Monday }"), "monday"),
    (box("monday."), r"\text{Monday}"),
    (box(r"\textbf{(C)}"), "C"),
    (box("C."), r"\text{(C)}"),
    (box(r"3, \text{ and } -2"), "-2,3"),
    (box(r"\{3,1,2\}"), r"\{1,2,3\}"),
    (box(r"x=2 \text{ or } x=1"), "1,2"),
    (box(r"1-\sqrt{2}, 1+\sqrt{2}"), r"1\pm\sqrt2"),
    (box(r"\left[-2,\,7\right]"), r"x \in [-2,7]"),
    (box("-2 <= x <= 7"), r"[-2,7]"),
    (box(r"(3,\infty)\cup(-\infty,2)"), r"(-\infty, 2) \cup (3, \infty)"),
    (box("2x+3=y"), "y = 2x + 3"),
    (box("(x+2)(x+1)"), "x^2+3x+2"),
    (box(r"\sqrt{12}"), r"2\sqrt{3}"),
    (box(r"1/\sqrt3"), r"\frac{\sqrt{3}}{3}"),
    (box(r"-5i+6"), "6 - 5i"),
    (box(r"\begin{bmatrix}0.5\\1\end{bmatrix}"), r"\begin{pmatrix}\frac12\\1\end{pmatrix}"),
    (box("1024"), "2^{10}"),
    (box("5") + " Again: " + box("5.0"), "5"),
    (r"\boxed 5", "5"),
    (r"\fbox{5}", "5"),
    ("5 * 1 = 5\n#### $5", "5"),
    ("{ { \\} " + box("5"), "5"),
    ("x" * 500_000 + box("5"), "5"),
    (r"<think>\boxed{4}</think>" + box("5"), "5"),
]

HONEST = [(box(r"\sqrt{8}"), r"2\sqrt2"), (box("1,000"), "1000")] * 50


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_is_not_paid(name):
    completion, gold = HOSTILE[name]
    began = time.monotonic()
    values, [status] = rewards([completion], [gold])
    assert values == [0]
    assert status in ("found", "none", "several", "unparsable", "too_complex", "timeout")
    assert time.monotonic() - began < SECONDS + 1


def test_the_hostile_delay_the_honest_by_their_deadlines_and_change_nothing():
    hostile = list(HOSTILE.values())
    mixed = hostile + HONEST
    began = time.monotonic()
    values, statuses = rewards(*zip(*mixed, strict=True))
    slow = statuses.count("timeout")
    assert time.monotonic() - began < SECONDS * slow + 3
    assert values == [0] * len(hostile) + [1] * len(HONEST)
    assert rewards(*zip(*HONEST, strict=True))[0] == [1] * len(HONEST)


def test_what_takes_too_long_is_killed_and_the_next_is_answered():
    slow = box(r"x\frac{" + r"x^{\pi}" * 65 + "}{" + r"x^{\pi}" * 65 + "}")
    values, statuses = rewards([slow, box("1,000")], ["x", "1000"], seconds=0.02)
    assert values == [0, 1] and statuses == ["timeout", "found"]
    assert any(  # an honest one in time, also where the machine is busy
        rewards([box(r"\sqrt{8}")], [r"2\sqrt2"], seconds=0.02)[0] == [1] for _ in range(20)
    )
    assert rewards([slow], ["x"])[0] == [1]  # given time, it is right


def test_percent_by_the_flag():
    assert rewards([box(r"50\%")], ["50"], optional=("percent",))[0] == [1]
    assert rewards([box(r"50\%")], ["0.5"], optional=("percent",))[0] == [0]


@pytest.mark.parametrize(("completion", "gold"), CONTROLS, ids=lambda text: text[-50:])
def test_an_odd_completion_is_paid(completion, gold):
    assert rewards([completion], [gold])[0] == [1]
