"""What a completion says, and which code it holds: the parts of a text that verifiers share."""

from __future__ import annotations

import re

_TAGS = re.compile(r"<(/?)(?:thinking|think)>")
# A fence: at most three spaces, three or more of one mark, and for an opening one a language.
_FENCE = re.compile(r"^ {0,3}(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)


def after_thinking(text: str) -> str:
    """What a completion says outside of its thinking, `<thinking>` or `<think>`.

    An unclosed block is thought to the end. A block that only closes was opened in the prompt,
    or inside another: all before is thought.

    >>> after_thinking("<thinking>1+1</thinking>2")
    '2'
    >>> after_thinking("1+1</think>2<thinking>or 3?")
    '2'
    """
    said: list[str] = []
    start: int | None = 0  # of what is being said; None while thinking
    for tag in _TAGS.finditer(text):
        if not tag[1]:
            if start is not None:
                said.append(text[start : tag.start()])
            start = None
        else:
            if start is not None:
                said.clear()
            start = tag.end()
    if start is not None:
        said.append(text[start:])
    return "".join(said)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    r"""The closed fenced blocks of a Markdown text: (language in lower case, contents).

    A block ends at the first line that is a fence of the same mark, at least as long and with
    nothing behind it; what is never closed is no block.

    >>> fenced_blocks("```python\nx = 1\n```\n~~~~\n```\n~~~~\n```\nunclosed")
    [('python', 'x = 1\n'), ('', '```\n')]
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        mark, info = fence["mark"], fence["info"].strip(" \t\r")
        if opened is None:
            if "`" not in info:  # else it is code in a line: ```x```
                opened = fence
        elif not info and mark.startswith(opened["mark"]):
            words = opened["info"].split()
            contents = text[opened.end() + 1 : fence.start()]
            blocks.append((words[0].lower() if words else "", contents))
            opened = None
    return blocks


def code_in(text: str, languages: tuple[str, ...]) -> str | None:
    r"""The code that a completion hands in: its last fenced block, outside of the thinking.

    The last block that names one of the languages counts; where none does, the last that names
    no language. So a block of sample output behind the code does no harm when it is marked as
    `text`. None when there is no such block.

    >>> code_in("```python\nx = 1\n```\nIt prints\n```text\n1\n```", ("python", "py"))
    'x = 1\n'
    """
    blocks = fenced_blocks(after_thinking(text))
    named = [contents for language, contents in blocks if language in languages]
    found = named or [contents for language, contents in blocks if not language]
    return found[-1] if found else None
