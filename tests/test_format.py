"""Rewards of form: whole texts in tags, each once and in order."""

from __future__ import annotations

import time

import pytest

from jax_grpo.rewards import format


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"<thinking>7+5=12</thinking>\boxed{12}", 1),
        (" \n<thinking>7+5=12</thinking>\nSo it is \\boxed{12}, I think.\n", 1),
        (r"<thinking>\boxed{1}</thinking>\boxed{\frac{1}{2}}", 1),
        (r"<thinking>wrong</thinking>\boxed{13}", 1),  # form, not truth
        (r"\boxed{12}", 0),
        (r"<thinking></thinking>\boxed{12}", 0),
        ("<thinking> \n</thinking>\\boxed{12}", 0),
        (r"<thinking>7+5=12</thinking>12", 0),
        (r"<thinking>7+5=12</thinking>\boxed{12", 0),
        (r"<thinking>7+5=12</thinking>\boxed{ }", 0),
        (r"<thinking>7+5=12 \boxed{12}</thinking>", 0),
        (r"<thinking>7+5=12 \boxed{12}", 0),
        (r"So <thinking>7+5=12</thinking>\boxed{12}", 0),
        (r"7+5=12</thinking>\boxed{12}", 0),
        (r"<thinking>a</thinking><thinking>b</thinking>\boxed{12}", 0),
        (r"<thinking>a<thinking>b</thinking>\boxed{12}", 0),
        (r"<thinking>a</thinking>\boxed{12}</thinking>", 0),
        ("\x00<thinking>a</thinking>\\boxed{12}", 0),
        ("<THINKING>a</THINKING>\\boxed{12}", 0),
        ("", 0),
    ],
)
def test_thinking(completion, value):
    assert format.thinking(["p"], [completion]) == [value]
    assert format.thinking(["p"], [chat(completion)], reward=0.5) == [0.5 * value]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1),
        ("<think>a < b</think><answer><b>4</b></answer>", 1),
        ("<think>a</think>", 0),
        ("<answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>so<answer>b</answer>", 0),
        ("so<think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>so", 0),
        ("<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think>a</answer></think><answer>b", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think></think><answer>b</answer>", 0),
        ("<think>the tag <answer></think><answer>b</answer>", 0),
        ("<think>a<think>b</think></think><answer>b</answer>", 0),
        ("<THINK>a</THINK><answer>b</answer>", 0),
        ("<think >a</think><answer>b</answer>", 0),
        ("<thinking>a</thinking><answer>b</answer>", 0),
        ("<th\u0456nk>a</th\u0456nk><answer>b</answer>", 0),
        ("\0<think>a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags(completion, value):
    assert format.tags(["p"], [completion]) == [value]
    assert format.tags(["p"], [chat(completion)], reward=0.5) == [0.5 * value]


@pytest.mark.parametrize(
    ("completion", "settings", "value"),
    [
        ("<think>a</think>b", {"names": ("think",), "rest": True}, 1),
        ("<think>a</think> ", {"names": ("think",), "rest": True}, 0),
        ("<think>a</think>b", {"names": ("think",)}, 0),
        ("<think>a</think>", {"names": ("think",)}, 1),
        ("a</think>b", {"names": ("think",), "rest": True, "opened": True}, 1),
        ("<think>a</think>b", {"names": ("think",), "rest": True, "opened": True}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        ("</think><answer>b</answer>", {"opened": True}, 0),
        ("<a.*>1</a.*><b>2</b><c>3</c>", {"names": ("a.*", "b", "c")}, 1),
        ("<aaa>1</aaa><b>2</b><c>3</c>", {"names": ("a.*", "b", "c")}, 0),
    ],
)
def test_tags_of_other_names(completion, settings, value):
    assert format.tags(["p"], [completion], **settings) == [value]


def test_names_are_one_or_more():
    assert format.tags(["p"], ["<think>x</think>"], names="think") == [1.0]
    with pytest.raises(ValueError, match="names must have one tag or more"):
        format.tags(["p"], ["x"], names=())


def test_tagged_parts_are_what_stands_in_them():
    text = "<think>1 + 1\n</think> <answer>2</answer> "
    assert format.tagged_parts(text, ("think", "answer")) == ["1 + 1\n", "2"]
    text = "<think>a</think> it is 2"
    assert format.tagged_parts(text, ("think",), rest=True) == ["a", "it is 2"]


@pytest.mark.parametrize("text", ["<think>" * 150_000, "<think>" + "<" * 10**6, " " * 10**6])
def test_hostile_texts_take_no_time(text):
    began = time.perf_counter()
    assert format.tags(["p"], [text]) == [0.0]
    assert time.perf_counter() - began < 1.0
