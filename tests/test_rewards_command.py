"""`python -m jax_grpo rewards`: the list, and a reward tried on one completion."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from jax_grpo.__main__ import main
from jax_grpo.rewards.naming import known_rewards

CHINOOK = Path(__file__).parent / "fixtures" / "chinook.sqlite"

MINE = """
def short(completions, level, log_extra, *, most=3):
    \"\"\"Reward short texts.\"\"\"
    log_extra("short/why", [f"{len(text)} of {most}" for text in completions])
    return [float(len(text) <= most * n) for text, n in zip(completions, level)]

def silent(completions):
    return [None]

def broken(completions):
    return [1 / 0]
"""


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty directory; gives code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)

    def run(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["jax_grpo", "rewards", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_list_has_every_reward_with_one_line(command):
    code, out, err = command()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    names = [line.split()[0] for line in lines[::2]]
    assert names == sorted(known_rewards()) and len(lines) == 2 * len(names)
    assert {"correctness", "unit_tests", "execution_match", "thinking", "tags"} < set(names)
    assert {"overlong", "repetition", "cosine", "keywords", "pattern", "choice"} < set(names)
    assert all(len(line.split()) > 3 for line in lines[::2])
    described = dict(zip(names, lines[1::2], strict=True))
    assert (
        described["execution_match"]
        .strip()
        .startswith(
            "columns: query, database; settings: reward=1.0, ordered=True, tolerance=1e-10, "
        )
    )
    assert described["overlong"].strip() == (
        "columns: none; settings: max_length=0, buffer=0, penalty=1.0"
    )
    assert not any("log_" in line for line in described.values())


@pytest.mark.parametrize(
    ("args", "out"),
    [
        (["--check", "thinking", "--completion", "no"], "score   0\n"),
        (
            ["--check=choice", "--completion=Answer: B", "--answer=B", "--setting=reward=2.5"],
            "score   2.5\nstatus  found\nwhy     B for B\n",
        ),
        (
            ["--check=keywords", "--completion=a b", '--column=keywords=["a", "c"]'],
            "score   0.5\n",
        ),
        (["--check=tags", "--completion=<a>1</a>", '--setting=names=["a"]'], "score   1\n"),
        (
            ["--check=pattern", "--completion=cab", "--setting=regex=a|b"],
            "score   1\nstatus  match\nwhy     at character 1\n",
        ),
        (
            ["--check=jax_grpo.rewards.multiple_choice.choice", "--completion=C", "--answer="],
            "score   none\nstatus  no_gold\nwhy     C for None\n",
        ),
        (
            ["--check=mine.py:short", "--completion=abcd", "--column=level=1"],
            "score   0\nwhy     4 of 3\n",
        ),
        (
            ["--check=mine.py:short", "--completion=abcd", "--column=level=1", "--setting=most=4"],
            "score   1\nwhy     4 of 4\n",
        ),
        (["--check=mine.py:silent", "--completion="], "score   none\n"),
    ],
)
def test_a_reward_is_tried(command, args, out):
    assert command(*args) == (0, out, "")


def test_correctness_shows_status_and_why(command):
    code, out, _ = command("--check=correctness", r"--completion=\boxed{3=5}", "--answer=5")
    assert code == 0
    score, status, why = out.splitlines()
    assert score == "score   0" and status.startswith("status  ") and why.startswith("why     ")
    _, out, _ = command("--check=correctness", r"--completion=\boxed{5.0}", "--answer=5")
    assert out.startswith("score   1\nstatus  found\n")


def test_sql_shows_status_and_why(command):
    args = ["--check=execution_match", "--column=query=SELECT COUNT(*) FROM Genre"]
    args.append(f"--column=database={CHINOOK}")
    assert command(*args, "--completion=SELECT 25") == (
        0,
        "score   1\nstatus  right\nwhy     the same result\n",
        "",
    )
    assert command(*args, "--completion=COMMIT")[1].startswith("score   0\nstatus  none\nwhy     ")


def test_words_are_tokens(command):
    args = ["--check=jax_grpo.rewards.length.repetition", "--completion=a b a b"]
    assert command(*args, "--setting=size=2")[1] == "score   -0.333333\n"


def test_completions_from_files_and_standard_input(command, tmp_path):
    (tmp_path / "text").write_text("Answer: B\n", encoding="utf-8")
    (tmp_path / "gold").write_text("b", encoding="utf-8")
    assert command("--check=choice", "--completion=@text", "--answer=@gold")[1][:9] == "score   1"
    out = command("--check=choice", "--completion=-", "--answer=B", stdin="Answer: B")[1]
    assert out.startswith("score   1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--completion=x"], "--check=NAME is missing"),
        (["--column=a=b"], "--check=NAME is missing"),
        (["--check=choice"], "--completion is missing"),
        (["--check=chioce", "--completion=x"], "unknown reward 'chioce'; known: choice, "),
        (["--check=choice", "--completion=x"], "the reward 'choice' needs the column 'answer'"),
        (["--check=choice", "--completion=x", "--setting=reward"], "--setting is NAME=VALUE, not"),
        (["--check=choice", "--completion=x", "--column==x"], "--column is NAME=VALUE, not '=x'"),
        (["--check=choice", "--completion=x", "--setting=rewrd=1"], "has no setting 'rewrd'"),
        (["--check=choice", "--completion=x", "--answer=Z"], "the answer 'Z' is none of ABCDE"),
        (["--check=choice", "--completion=x", "--column=prompts=1"], "rename the data's column"),
        (["--check=choice", "--completion=@nothing"], "No such file or directory: 'nothing'"),
        (["--check=choice", "--completion=@binary"], "@binary: not UTF-8 text: "),
        (
            ["--check=correctness", "--completion=x", "--setting=tolerance=a"],
            "the reward 'correctness' and its settings: ",
        ),
        (["--check=no.py:f", "--completion=x"], "no such file: no.py"),
        (["--check=mine.py:broken", "--completion=x"], "'broken' raised ZeroDivisionError("),
        (["stray"], "not a flag: stray"),
    ],
)
def test_what_is_refused_gives_one_line(command, args, message, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert err.startswith("jax_grpo rewards: ") and message in err and err.count("\n") == 1


def test_it_starts_without_jax():
    code = (
        "import sys; from jax_grpo.__main__ import main; "
        "assert main(['', 'rewards']) == 0; "
        "sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'transformers') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "execution_match" in done.stdout
