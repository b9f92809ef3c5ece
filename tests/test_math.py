"""The final answer of a completion, and whether it is the right one by value."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jax_grpo.rewards import format, math
from jax_grpo.rewards.contract import RewardError, score
from jax_grpo.rewards.equality import NotHere, Settings, judge
from jax_grpo.rewards.expressions import walk
from jax_grpo.rewards.parsing import parse
from jax_grpo.rewards.tokens import TooComplex, Unparsable

FIXTURES = Path(__file__).parent / "fixtures"


def chat(text):
    return [{"role": "assistant", "content": text}]


def correct(completions, golds, **settings):
    """Values and statuses of completions."""
    logged = {}
    settings.setdefault("prompts", ["?"] * len(golds))
    values = math.correctness(
        completions=completions, answer=golds, log_extra=logged.__setitem__, **settings
    )
    return values, logged["correctness/status"]


def table(text):
    """Lines of `answer ;; gold`."""
    return [tuple(part.strip() for part in line.split(";;")) for line in text.strip().splitlines()]


# ----------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{17}", ["17"]),
        (r"so \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
        (r"\boxed{1} and \fbox{2}", ["1", "2"]),
        (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
        (r"\boxed{\}}", [r"\}"]),
        (r"\boxed {5} \boxed{}", ["5", ""]),
        (r"\boxed{a \boxed{5} b}", [r"a \boxed{5} b"]),
        (r"{ \boxed{5}", ["5"]),
        (r"} \boxed{5}} {", ["5"]),
        (r"\\boxed{5}", []),  # a line break and the word boxed
        (r"\\\boxed{5}", ["5"]),
        (r"boxed{5} \boxedly{5} \boxed", []),
        ("\\boxed{a\x00b\n}", ["a\x00b\n"]),
        ("\\", []),
        ("", []),
        # without braces
        (r"\boxed 5", ["5"]),
        (r"$\boxed 5$, so", ["5"]),
        (r"\boxed5.", ["5"]),
        (r"\boxed -1/2, that is", ["-1/2"]),
        (r"\fbox x", ["x"]),
        (r"to be \boxed means", []),
        # not closed: no box at all
        (r"\boxed{3", []),
        (r"\boxed{3\}", []),
        (r"\boxed{a \boxed{5}", []),
        (r"\boxed{5} \boxed{6", []),
        (r"\boxed{5 \boxed 5", []),
    ],
)
def test_boxed_answers(text, boxes):
    assert math.boxed_answers(text) == boxes


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("6 * 12 = 72\n#### 72", ["72"]),
        ("####72", ["72"]),
        ("#### **72**", ["72"]),
        ("#### 71\nno\n#### 72", ["71", "72"]),
        ("#### Step 1\n#### 72\n##### 3", ["72"]),
        ("####  Step 1\n#### (C)\r\n", ["(C)"]),
        ("it is 72 #### 72", []),
        ("#### 72\nSo \\boxed{73}", ["73"]),
        ("#### 72\nSo \\boxed{", []),
        (r"\boxed{1} \boxed{2} \boxed{1}", ["2", "1"]),
        (r"\boxed{1} \boxed{}", []),
        (r"<think>\boxed{1}</think>", []),
        ("<think>#### 1</think>#### 2", ["2"]),
        ("The answer is 72.", []),
    ],
)
def test_final_answers(text, answers):
    assert math.final_answers(text) == answers


def test_the_sentence_counts_when_asked():
    texts = ["The answer is 72. Good.", "So the final answer is: $5$", "The answer is 1 or 2.", "5"]
    values, statuses = correct(texts, ["72", "5", "1", "5"], sentence=True)
    assert values == [1, 1, 0, 0] and statuses == ["found", "found", "found", "none"]
    assert correct(texts, ["72", "5", "1", "5"])[1] == ["none"] * 4


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        (r"\boxed{5}", "found"),
        (r"\boxed{6}", "found"),
        ("5", "none"),
        (r"\boxed{}", "none"),
        (r"\boxed{5", "none"),
        (r"<think>\boxed{5}</think>", "none"),
        (r"\boxed{5} \boxed{5.0} \boxed{10/2} \boxed 5", "found"),
        (r"\boxed{5} \boxed{6}", "several"),
        (r"\boxed{6} \boxed{7}", "several"),
        (r"\boxed{\sqrt2} \boxed{\sqrt3}", "several"),
        (r"\boxed{2\sqrt2} \boxed{\sqrt8}", "found"),
        ("".join(rf"\boxed{{{k}}}" for k in range(100)), "several"),
        (r"\boxed{3=5}", "unparsable"),
        (r"\boxed{1=2=5}", "unparsable"),
        (r"\boxed{\text{area}=5=6=7}", "unparsable"),
        (r"\boxed{5 \approx 5.1}", "unparsable"),
        (r"\boxed{\int_0^5 1dx}", "unparsable"),
        (r"\boxed{5)}", "unparsable"),
        (r"\boxed{" + "5+" * 1000 + "5}", "too_complex"),
        (r"\boxed{" + "(" * 200 + "5" + ")" * 200 + "}", "too_complex"),
        (r"\boxed{" + "5" * 60 + "}", "too_complex"),
        (r"\boxed{1e999999999}", "too_complex"),
        (r"\boxed{9^{9^{9^9}}}", "too_complex"),
        (r"\boxed{9^9^9}", "too_complex"),
        (r"\boxed{2^{2501}}", "too_complex"),
        (r"\boxed{10000000!}", "too_complex"),
        (r"\boxed{x" + "/x" * 200 + "}", "too_complex"),
    ],
)
def test_statuses(completion, status):
    assert correct([completion], ["5"])[1] == [status]


def test_statuses_are_logged():
    logged = {}
    math.correctness(
        ["?"] * 4,
        [r"\boxed{1}", r"\boxed{2}", "", r"\boxed{3=5}"],
        ["1", "1", "1", None],
        log_metric=logged.__setitem__,
        log_extra=logged.__setitem__,
    )
    whys = logged.pop("correctness/why")
    assert logged == {
        "correctness/found": 0.75,
        "correctness/none": 0.25,
        "correctness/status": ["found", "found", "none", "found"],
    }
    assert whys[0] != whys[1] and all(why and "\n" not in why for why in whys)


# ------------------------------------------------------------------------------------- equality

RIGHT = r"""
    .5 ;; \frac{1}{2}
    1/2 ;; 0.5
    \dfrac12 ;; 1/2
    \frac{2}{4} ;; \tfrac12
    -\dfrac{1}{2} ;; \frac{-1}{2}
    \frac{270}7 ;; 270/7
    3 / 4 ;; .75
    1\frac12 ;; 3/2
    -1\frac{1}{2} ;; -1.5
    1 1/2 ;; \frac{3}{2}
    0.\overline{3} ;; \frac13
    5.0 ;; 5
    \frac{10}{2} ;; 5
    10/2 ;; 5
    5. ;; 5
    +5 ;; 5
    −5 ;; -5
    1,000 ;; 1000
    1{,}000 ;; 1000
    1\,000 ;; 1000
    1\!,000 ;; 1000
    1,\!000 ;; 1,000
    1 000 ;; 1000
    1~000 ;; 1000
    {1,000} ;; 1000
    1\,000\,000.50 ;; 1000000.5
    11 111 111 100 ;; 11,\! 111,\! 111,\! 100
    1.5e3 ;; 1500
    1.5 \times 10^{3} ;; 1500
    6.72\cdot10^{-5} ;; .0000672
    \$5 ;; 5
    $5$ ;; \$5
    5\text{ dollars} ;; \$5.00
    \$32,348 ;; \$32,\!348
    5\text{ cm} ;; 5
    5 cm ;; 5 \mbox{ centimeters}
    864\text{ square inches} ;; 864 \mbox{ inches}^2
    864\text{ in}^2 ;; 864 \mbox{ inches}^2
    5\text{ cups} ;; 5
    90 ;; 90^\circ
    90° ;; 90^\circ
    90^{\circ} ;; 90\text{ degrees}
    5 \% ;; 5\%
    52_{8} ;; 52_8
    \mathbf{5} ;; 5
    \text{5} ;; 5
    x=5 ;; 5
    5=x ;; 5
    5 ;; x=5
    \text{area} = 5 ;; 5
    AB = 5 ;; 5
    x_1 = 5 ;; 5
    \angle ABC = 60^\circ ;; 60
    \theta=\frac{\pi}{4} ;; \frac{\pi}{4}
    f(x)=2x+3 ;; 2x+3
    2x+3 ;; y=2x+3
    y-2x=3 ;; y = 2x+3
    2x+3=y ;; y=2x+3
    10x - 14y + 8 = 0 ;; 5x - 7y + 4 = 0
    (x-1)(x-2)=0 ;; x^2-3x+2=0
    2\sqrt{3} ;; \sqrt{12}
    \frac{\sqrt2}{2} ;; \frac{1}{\sqrt{2}}
    √12 ;; 2\sqrt3
    3·π ;; \pi \cdot 3
    \frac{20000}{\pi} ;; 20000/\pi
    \sqrt[3]{-8}x ;; -2x
    (x+1)^2 ;; x^2+2x+1
    (x+1)**2 ;; x^2+2x+1
    x^{2}+2\cdot x+1 ;; x²+2x+1
    (b+2)(a+5) ;; (a+5)(b+2)
    \frac{x^2-1}{x-1} ;; x+1
    \frac{1}{x+1} ;; (x+1)^{-1}
    2^{2k} ;; 4^k
    |x-1| ;; |1-x|
    x^{500} \cdot x ;; x^{501}
    \ln 4 ;; 2\ln 2
    \log_2 8x ;; 3+\log_2 x
    \sin^2 x ;; 1-\cos^2 x
    \frac{\cos x}{\sin x} ;; \cot x
    \sin 30^\circ \cdot x ;; \cos(60^\circ) x
    9i+6 ;; 6+9i
    \exp(2) ;; e^2
    e^{i\pi/3} ;; \frac12+\frac{\sqrt3}{2}i
    \binom{5}{2} ;; \binom{5}{3}
    n! \cdot (n+1) ;; (n+1)!
    1024 ;; 2^{10}
    2, 1 ;; 1,2
    1 \text{ and } 2 ;; 1,2
    1, 2, \text{ and } 3 ;; 3,2,1
    x=1 \text{ or } x=2 ;; 2,1
    \{2,1\} ;; \{1,2\}
    1, 2 ;; \{1,2\}
    1+\sqrt{19}, 1-\sqrt{19} ;; 1 \pm \sqrt{19}
    \pm 2 ;; -2,2
    2 \mp \sqrt3 ;; 2+\sqrt3,2-\sqrt3
    \{-2, 1+\sqrt5, 1-\sqrt5\} ;; \{1\pm\sqrt{5},-2\}
    \left(\dfrac{3}{2}, -13\right) ;; (1.5,-13)
    x=1,y=2 ;; y=2,x=1
    (3,+\infty) ;; (3,\infty)
    x>3 ;; (3,\infty)
    3<x ;; (3,\infty)
    x \le 0 ;; (-\infty, 0]
    -2 \leq x \leq 7 ;; [-2,7]
    7 \ge x \ge -2 ;; x \in [-2,7]
    (3,\infty) \cup (-\infty,2) ;; (-\infty,2)\cup(3,\infty)
    x<2 \text{ or } x>3 ;; (-\infty,2)\cup(3,\infty)
    x+y<3 ;; 3>y+x
    \begin{bmatrix} -1/3 \\ 2/3 \end{bmatrix} ;; \begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}
    \text{ Monday } ;; Monday
    monday. ;; \text{Monday}
    \textbf{no real} \text{ solutions} ;; No real solutions
    No ;; \text{no}
    (C) ;; C
    C. ;; \text{(C)}
    \text{C} ;; (C)
    \mathrm{(C)} ;; C
    x # y ;; x # y
    \sum_{k=1}^n k^k. ;; $\sum_{k=1}^n  k^k$
    \textbf{(C)}\ 12 ;; C
    (C)\ \frac{\pi}{2} ;; \text{(C)}
    January 5 ;; \text{January 5}
    5:30\text{ PM} ;; \text{5:30 PM}
    5 eggs ;; 5
    \text{12 eggs} ;; 12
    5\text{ people} ;; 5
    5\text{ miles per hour} ;; 5\text{ mph}
    5\text{ dollars per hour} ;; 5
    5¢ ;; 5\text{ cents}
    18\$ ;; 18
    \$-7 ;; -7
    \approx 3.14 ;; 3.14
    x ≈ 3.14 ;; 3.14
    = 5 ;; 5
    \boxed{5} ;; 5
    (x, y) = (2, 3) ;; (2,3)
    (2,3) ;; (x,y)=(2,3)
    (x,y)=(1,2),(3,4) ;; (3,4),(1,2)
    \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2} ;; \frac{1\pm\sqrt{5}}{2}
    \varnothing ;; \emptyset
    \{\} ;; \emptyset
    \mathbb{R} ;; (-\infty,\infty)
    x \in \mathbb R ;; (-\infty,\infty)
    \tan^{-1}(2x) ;; \arctan 2x
    \binom{n}{2} ;; \frac{n(n-1)}{2}
    2^{2024} ;; 4^{1012}
    \frac{4^{1012}-1}{3} ;; \frac{2^{2024}-1}{3}
"""

WRONG = r"""
    7,2 ;; 72
    1,00 ;; 100
    1,0000 ;; 10000
    0,005 ;; 5
    1.000 ;; 1000
    1.2.3 ;; 1.23
    1,2 ;; 1.2
    (1,000) ;; 1000
    1 2 3 ;; 123
    1{2} ;; 2
    2\frac{1}{2} ;; 1
    \frac{1}{2}3 ;; 1.5
    5000001 ;; 5000000
    5.00001 ;; 5
    3.1416 ;; 3.14
    0.333333 ;; \frac13
    22/7 ;; \pi
    3.14159265358979323846264338327950288419716939937510 ;; \pi
    3=5 ;; 5
    5=5 ;; 5
    1=2=3 ;; 3
    x=1=5 ;; 5
    4 = 5 ;; 5
    \pi=3 ;; \pi
    37+58 ;; 95
    (37+58) ;; 95
    x=37+58 ;; 95
    \frac{37+58}{1} ;; 95
    2^{10} ;; 1024
    10^{3} ;; 1000
    300\times10^2 ;; 30000
    6! ;; 720
    \sqrt{25} ;; 5
    5 \cdot 4 ;; 20
    \int_0^5 1dx ;; 5
    \sin 60^\circ ;; \frac{\sqrt3}{2}
    \frac{x}{x} ;; 1
    x-x ;; 0
    x/x+4 ;; 5
    0/0 ;; 0
    1/0 ;; 0
    1/0 ;; 2/0
    \infty ;; 5
    -\infty ;; \infty
    \infty-\infty ;; 0
    nan ;; 5
    10\% ;; 10
    10\% ;; 0.1
    10\% ;; \frac{1}{10}
    10 ;; 10\%
    5\text{ cm} ;; 5\text{ m}
    5\text{ cm} ;; 5\text{ cm}^2
    5 \text{ million} ;; 5
    5\text{ is wrong} ;; 5
    cm 5 ;; 5
    52 ;; 52_8
    42 ;; 52_8
    52_9 ;; 52_8
    90^\circ ;; \frac{\pi}{2}
    y=5 ;; x=5
    2x=10 ;; x=5
    2x+3=13 ;; x=5
    x \ne 5 ;; x=5
    x>5 ;; 5
    x=y ;; 5
    y=2x+3 ;; y=2x+4
    0=0 ;; y=2x+3
    y-y=0 ;; y=2x+3
    0(y-2x-3)=0 ;; y=2x+3
    y=2x+3 ;; y^2=(2x+3)^2
    2,1 ;; x=1,y=2
    x=2,y=1 ;; x=1,y=2
    \sqrt{x^2} ;; x
    |xy| ;; xy
    5x ;; 5
    x ;; X
    2k ;; 2n
    72,73 ;; 72
    72 or 73 ;; 72
    \{72, 73\} ;; 72
    \{5\} ;; 5
    1,2,3 ;; 1,2
    1,1 ;; 1
    1,1,2 ;; 1,2,2
    (1,2) ;; \{1,2\}
    (1,2) ;; 1,2
    (2,1) ;; (1,2)
    [1,2] ;; (1,2)
    [2,7) ;; [2,7]
    x<3 ;; (3,\infty)
    x\ge3 ;; (3,\infty)
    (1,2,3) ;; (1,2)
    \begin{pmatrix} 1 & 2 \end{pmatrix} ;; \begin{pmatrix} 1 \\ 2 \end{pmatrix}
    Mondya ;; Monday
    Not Monday ;; Monday
    squaresquare5 ;; 5
    E ;; C
    CE ;; C
    C,E ;; C
    C or D ;; C
    A,B,C,D,E ;; C
    (C)(E) ;; C
    C=C ;; C
    \text{integer}\frac12 ;; \frac12
    5, ;; 5
    (5] ;; 5
    5+ ;; 5
    5? ;; 5
    0x5 ;; 5
    (C)(E) 12 ;; C
    (C) E ;; C
    (C)\text{ is wrong} ;; C
    (C)\ 12 ;; 12
    \text{January 5} ;; January 6
    5\text{ eggs} ;; 5\text{ apples}
    5\text{ millions} ;; 5
    5 dozens ;; 5
    5\text{ tenths} ;; 5
    5\text{ thirds} ;; 5
    5\text{ minus} ;; 5
    5\text{cm}^x ;; 5
    5^\circ^\circ ;; 5
    \text{yes}5 ;; 5
    \$-7 ;; 7
    5 \approx 5 ;; 5
    (x,y)=5 ;; 5
    (x,y)=(3,2) ;; (2,3)
    (x,y,z)=(2,3) ;; (2,3)
    (2,3)=(2,3) ;; (2,3)
    \frac{1+\sqrt5}{2} ;; \frac{1\pm\sqrt{5}}{2}
    \{\emptyset\} ;; \emptyset
    0 ;; \emptyset
    \tan^{-1} x ;; \frac{1}{\tan x}
    \binom{5}{2}x ;; 10x
    4\boxed{5} ;; 45
    1\left2 ;; 12
    2000^{1000}+1 ;; 2000^{1000}
    2^{1000}\pi+1 ;; 2^{1000}\pi
    \sqrt{10^{200}+1} ;; 10^{100}
    \sqrt{2}+10^{-99} ;; \sqrt{2}
    \sqrt{2}(1+10^{-999}) ;; \sqrt{2}
"""


@pytest.mark.parametrize(("answer", "gold"), table(RIGHT))
def test_equal_by_value(answer, gold):
    assert judge([answer], gold).right


@pytest.mark.parametrize(("answer", "gold"), table(WRONG))
def test_not_equal(answer, gold):
    assert not judge([answer], gold).right


@pytest.mark.parametrize(
    "text",
    [
        "5\u200b",
        "\u0665",
        "\uff15",
        "5\x00",
        "\u202e5",
        "5\u0301",
        "5\u00a0",
        "\u2460",
        "5\\\u2003",
    ],
)
def test_other_characters_are_not_what_they_look_like(text):
    assert not judge([text], "5").right


def random_expression(chooser, depth):
    """A random expression of x and y: two ways to write it, and its value by Python."""
    pick = chooser.random()
    if depth == 0 or pick < 0.15:
        if chooser.random() < 0.5:
            number = chooser.randint(1, 30)
            return str(number), f"{{{number}}}", lambda x, y: Fraction(number)
        name = chooser.choice("xy")
        return name, f"({name})", lambda x, y: {"x": x, "y": y}[name]
    a1, a2, a = random_expression(chooser, depth - 1)
    b1, b2, b = random_expression(chooser, depth - 1)
    if pick < 0.4:
        return f"({a1}+{b1})", f"\\left[{b2} + {a2}\\right]", lambda x, y: a(x, y) + b(x, y)
    if pick < 0.55:
        return f"({a1}-{b1})", f"(-{b2}+{a2})", lambda x, y: a(x, y) - b(x, y)
    if pick < 0.75:
        return f"({a1})({b1})", f"{b2} \\cdot {a2}", lambda x, y: a(x, y) * b(x, y)
    if pick < 0.9:
        return f"(({a1})/({b1}))", f"\\frac{{{a2}}}{{{b2}}}", lambda x, y: a(x, y) / b(x, y)
    power = chooser.randint(2, 3)
    return f"({a1})^{power}", f"{{({a2})}}^{{{power}}}", lambda x, y: a(x, y) ** power


def agree(f, g):
    """Whether two functions agree where both are defined; None when they never are."""
    found = []
    for k in range(1, 9):
        try:
            x, y = Fraction(3 * k + 1, 7), Fraction(-5 * k, 11)
            found.append(f(x, y) == g(x, y))
        except ZeroDivisionError:
            continue
    return all(found) if found else None


def test_random_expressions_agree_with_python():
    chooser = random.Random(0)
    settings = Settings(worked=False)  # values alone
    same = different = 0
    before = None
    for _ in range(300):
        first, second, f = random_expression(chooser, 3)
        if agree(f, f):
            assert judge([first], second, settings).right, (first, second)
            same += 1
            if before is not None and agree(f, before[1]) is False:
                assert not judge([first], before[0], settings).right, (first, before[0])
                different += 1
            before = second, f
    assert same > 250 and different > 200


def test_random_tokens_raise_nothing_else():
    pieces = r"""1 2 10 .5 1,000 7,2 x i \pi \infty + - * / ^ _ ! % ' | ( ) [ ] { } \{ \} , = < \le
        \in \cup \pm \frac \sqrt \sin \log \binom \text{cm} \text{Monday} \$ ^\circ \left( \right)
        \begin{pmatrix} \end{pmatrix} & \\ exp floor and cm abc \lfloor \rfloor ^{9} ^{x} {2} (x)
        \overline{3} \boxed{5} \text{area}= x=""".split()
    golds = [r"\sqrt{2}", "x=5", "y=2x+3", r"\{1,2\}", "(1,2)", r"x^2+1", r"\text{Monday}", "??"]
    chooser = random.Random(0)
    statuses = set()
    for _ in range(5000):
        length = chooser.randint(1, 12)
        answer = "".join(chooser.choice(pieces) + chooser.choice(["", " "]) for _ in range(length))
        statuses.add(judge([answer], chooser.choice(golds)).status)
    assert statuses == {"found", "unparsable", "too_complex"}


def test_what_is_written_out_is_judged_without_evaluation():
    here = Settings(evaluate=False)
    for answer, gold in [
        ("1,000", "1000"),
        ("(1/2, 3)", "(0.5,3)"),
        ("x=5", "5"),
        ("Monday", "monday"),
    ]:
        assert judge([answer], gold, here).status == "found"
    with pytest.raises(NotHere):
        judge([r"\sqrt{8}"], r"2\sqrt{2}", here)


def test_a_tree_is_bounded():
    for text in ("x" + "/x" * 400, "5" + "%" * 900, r"\sin " * 150 + "x", "|x" * 400):
        try:
            assert sum(1 for _ in walk(parse(text))) < 1000
        except (TooComplex, Unparsable):
            pass


# ------------------------------------------------------------------------------------- settings


def test_measures_may_be_left_out_by_the_flags():
    answers = [r"5\%", "5^\\circ", r"\$5", r"5\text{ cm}", "5_8"]
    completions = [f"\\boxed{{{answer}}}" for answer in answers]
    assert correct(completions, ["5"] * 5)[0] == [0, 1, 1, 1, 0]
    assert correct(completions, ["5"] * 5, optional=())[0] == [0] * 5
    assert correct(completions, ["5"] * 5, optional=["percent", "base"])[0] == [1, 0, 0, 0, 1]
    assert correct([r"\boxed{5}"] * 5, answers, optional=["percent"])[0] == [1, 0, 0, 0, 0]
    assert correct(completions, answers, optional=())[0] == [1] * 5


@pytest.mark.parametrize(
    ("answer", "gold", "tolerance", "value"),
    [
        ("3.15", "3.14", 0.01, 1),
        ("3.18", "3.14", 0.01, 0),
        ("22/7", "3.14", 0.01, 1),
        ("3.1415927", "3.14159265", 1e-6, 1),
        ("0.3", repr(0.1 + 0.2), 1e-6, 1),
        ("315", "314", 0.01, 0),  # no decimal
        ("315.0", "314.0", 0.01, 0),
        ("3.15", r"\frac{314}{100}", 0.01, 0),
        (r"\pi", "3.14159265", 0.01, 0),  # not written out
        ("(1,3.15)", "(1,3.14)", 0.01, 1),
        ("1.4\\sqrt2", "1.41\\sqrt2", 0.01, 0),
        ("3.14000001", "3.14", 0, 0),
    ],
)
def test_tolerance_is_for_decimals(answer, gold, tolerance, value):
    assert correct([f"\\boxed{{{answer}}}"], [gold], tolerance=tolerance)[0] == [value]


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("(x+1)^2", "x^2+2x+1", 0),
        ("1+2x+x^2", "x^2+2x+1", 1),
        ("(b+2)(a+5)", "(a+5)(b+2)", 1),
        ("ab+5b+2a+10", "(a+5)(b+2)", 0),
        (r"\sqrt{18}", r"3\sqrt2", 0),
        ("2x-y+3=0", "y=2x+3", 0),
        ("3+2x=y", "y=2x+3", 1),
        ("1/4", "0.25", 0),
        ("0.250", "0.25", 1),
        ("1,000", "1000", 1),
        ("2,1", r"\{1,2\}", 1),
    ],
)
def test_form(answer, gold, value):
    assert correct([f"\\boxed{{{answer}}}"], [gold], form=True)[0] == [value]


@pytest.mark.parametrize(
    ("prompt", "answer", "gold", "value"),
    [
        ("What is 144/12?", "144/12", "12", 0),
        ("Share 144 among 12.", "144/12", "12", 1),
        ("What is 144 ÷ 12?", "144/12", "12", 0),
        (r"What is $144 \div 12$?", r"\frac{144}{12}", "12", 0),
        (r"What is \frac{144}{12}?", "144/12", "12", 0),
        ("A tank is 11/2 full.", "1/2", "0.5", 1),
        (r"Simplify $\sqrt{242}$.", r"\sqrt{242}", r"11\sqrt2", 0),
        (r"Simplify $\sqrt{242}$.", r"11\sqrt{2}", r"11\sqrt2", 1),
        (r"What is $\sqrt{53}$ in simplest form?", r"\sqrt{53}", r"\sqrt{53}", 1),
        (r"Factor $ab + 5b+2a+10$.", "ab+5b+2a+10", "(a+5)(b+2)", 0),
        (r"Write $\dfrac{3}{20}$ as a decimal.", r"\frac{3}{20}", "0.15", 0),
        (r"A side of 1,000 and $90^\circ$", "1,000", "1000", 1),
        (r"Divide $x^2-1$ by $x+1$.", "x-1", "-1+x", 1),
        (r"Two of $1+x$", "x+1", "1+x", 1),
        ([{"role": "user", "content": r"Expand $(x+1)^2$"}], "(x+1)^2", "x^2+2x+1", 0),
        ([{"role": "system", "content": r"\boxed{\frac12}"}, {"content": ""}], r"\frac12", ".5", 1),
        ([], r"\frac12", ".5", 1),
    ],
)
def test_the_question_is_no_answer(prompt, answer, gold, value):
    assert correct([f"\\boxed{{{answer}}}"], [gold], prompts=[prompt])[0] == [value]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optional": ["percents"]}, "optional: no measure 'percents'; there are: base, currency,"),
        ({"tolerance": 1.0}, "tolerance is 1.0, and not from 0 to below 1"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"optional": "percents"}, "optional: no measure 'percents'"),
        ({"seconds": 0}, "seconds is 0, and not above 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        correct([r"\boxed{1}"], ["1"], **settings)


# --------------------------------------------------------------------------------- the function


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        (r"\boxed{17}", 17, 1),
        (r"\boxed{17}", 17.0, 1),
        (r"\boxed{17}", np.int64(17), 1),
        (r"\boxed{0.1}", np.float32(0.1), 1),
        (r"\boxed{1/3}", Fraction(1, 3), 1),
        (r"\boxed{.1}", Decimal("0.10"), 1),
        (r"\boxed{0.0000001}", 1e-7, 1),
        ("17", "17", 0),
        (r"\boxed{$72$.}", "72", 1),
        (r"\boxed{**72**}", "72", 1),
        (r"\boxed{**\$72**}", "72", 1),
        (r"\boxed{" + "9" * 200 + "}", "9" * 200, 1),  # as text
        (r"\boxed{" + "9" * 200 + ".0}", "9" * 200, 0),
        (r"\boxed{" + "9+" * 1000 + "9}", "9+" * 1000 + "9", 1),
        (r"\boxed{\sqrt2} \boxed{\sqrt{2}}", "9+" * 1000 + "9", 0),
        # several
        (r"\boxed{1} then \boxed{2}", "2", 0),
        (r"\boxed{2} then \boxed{2.0}", "2", 1),
        (r"\boxed{37+58} = \boxed{95}", "95", 1),
        (r"\boxed{95} = \boxed{37+58}", "95", 0),
        (r"\boxed{\sqrt{8}} = \boxed{2\sqrt2}", r"2\sqrt{2}", 1),
        # thinking
        (r"<thinking>\boxed{2}</thinking>", "2", 0),
        (r"<thinking>\boxed{1}</thinking>\boxed{2}", "2", 1),
        (r"<thinking>\boxed{2}</thinking>\boxed{1}", "2", 0),
        (r"<thinking>\boxed{2}", "2", 0),
        (r"so far \boxed{2}</thinking>", "2", 0),  # opened in the prompt
        (r"<thinking>a<thinking>b</thinking>\boxed{2}</thinking>", "2", 0),
        (r"<thinking>a</thinking><thinking>b</thinking>\boxed{2}", "2", 1),
        (r"\boxed{2}<thinking>or is it \boxed{3}?", "2", 1),
        # forms of the data
        (r"\boxed{72}", "6 * 12 = <<6*12=72>>72\n#### 72", 1),
        (r"\boxed{1000}", "#### 1,000", 1),
        (r"\boxed{72}", r"It follows that $x = \boxed{72}$.", 1),
        (r"\boxed{True}", True, 1),
        (r"\boxed{1}", True, 0),
        # no right answer: nothing to say
        (r"\boxed{}", "", None),
        (r"\boxed{1}", None, None),
        (r"\boxed{1}", " ", None),
        (r"\boxed{1}", "it is unknown ####", None),
        (r"\boxed{1}", float("nan"), None),
        (r"\boxed{nan}", float("inf"), None),
    ],
)
def test_correctness(completion, gold, value):
    assert math.correctness(["p"], [completion], [gold]) == [value]
    assert math.correctness(["p"], [chat(completion)], [gold]) == [value]


def test_correctness_is_worth_what_is_asked():
    assert math.correctness(["p"] * 2, [r"\boxed{1}", ""], ["1", "1"], reward=2.0) == [2.0, 0.0]
    assert math.correctness([], [], []) == []


def test_correctness_refuses_other_answers():
    with pytest.raises(RewardError, match="an answer is text or a number, not list"):
        score([math.correctness], ["p"], [r"\boxed{1}"], [[1]], {"answer": [[1]]})


@pytest.mark.parametrize(
    "text",
    [
        "{" * 100_000,
        "}" * 100_000,
        r"\boxed{" * 100_000,
        r"\boxed{" * 100_000 + "}" * 100_000,
        r"\boxed{" + "{" * 100_000 + "5" + "}" * 100_000 + "}",
        r"\boxed{5}" * 100_000,
        r"\boxed" + " " * 100_000,
        r"\boxed 5" + "," * 100_000,
        r"\boxed 5 " * 100_000,
        r"\boxed{" + "." * 100_000 + "x}",
        r"\boxed{a" + " " * 100_000 + "b}",
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{" + "1,000" * 100_000 + "}",
        r"\boxed{" + "1/" * 100_000 + "}",
        "".join(f"\\boxed{{{k}}}" for k in range(50_000)),
        "#### " * 100_000,
        "####" + " " * 100_000 + "x\n" + "#### 5\n" * 50_000,
        "the answer is " * 50_000,
        "the answer is" + " " * 100_000 + "x",
        "<thinking>" * 100_000 + r"\boxed{5}",
        "</thinking>" * 100_000,
        "\\" * 100_001,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_texts_take_no_time(text):
    began = time.perf_counter()
    math.correctness(["p"], [text], ["5"], sentence=True)
    format.thinking(["p"], ["<thinking>x</thinking>" + text])
    assert time.perf_counter() - began < 1.0


# --------------------------------------------------------------------------- answers of data sets


def answers_of(name):
    return (FIXTURES / name).read_text(encoding="utf-8").splitlines()


def wrapped(answer):
    return f"<thinking>Let me see.</thinking>The answer is $\\boxed{{{answer}}}$."


@pytest.mark.parametrize("name", ["math_answers.txt", "gsm8k_answers.txt"])
def test_right_answers_are_right(name):
    golds = answers_of(name)
    assert len(golds) > 100
    values, _ = correct([wrapped(gold) for gold in golds], golds)
    assert [gold for gold, value in zip(golds, values, strict=True) if value != 1] == []
    # written in another way
    respelt = [gold.replace("\\frac", "\\dfrac ").replace("{", "{ ") + "." for gold in golds]
    values, _ = correct([wrapped(gold) for gold in respelt], golds)
    assert [gold for gold, value in zip(golds, values, strict=True) if value != 1] == []
    assert all(judge([gold], gold).right for gold in golds)


def test_other_problems_numbers_are_wrong():
    golds = answers_of("gsm8k_answers.txt")
    pairs = [
        (a, b) for a in golds for b in golds if int(a.replace(",", "")) != int(b.replace(",", ""))
    ]
    values, _ = correct([wrapped(a) for a, _ in pairs], [b for _, b in pairs])
    assert len(values) > 10_000 and sum(values) == 0


def test_other_problems_expressions_are_wrong():
    golds = answers_of("math_answers.txt")
    pairs = [(a, b) for a in golds for b in golds if a != b]
    values, _ = correct([wrapped(a) for a, _ in pairs], [b for _, b in pairs])
    equal = {frozenset(pair) for pair, value in zip(pairs, values, strict=True) if value}
    assert equal == {  # all that are equal indeed
        frozenset(("-2,1", "1,-2")),
        frozenset((r"\frac14", r"\frac{1}{4}")),
        frozenset((r"2\sqrt{5}", r"2 \sqrt{5}")),
    }
