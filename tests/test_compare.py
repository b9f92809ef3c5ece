"""The command `compare`: a study of seconds, from the base to its files, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_run
from small_run import CONFIG, CONFIGS, Ended, read_lines, run

STUDY = """
    config.study = {
        "base": ("sft",),
        "methods": {"longer": ("sft",), "grpo": ("grpo",), "twice": ("sft", "grpo")},
        "seeds": (3, 4),
        "curves": ("rewards/correctness/mean", "loss"),
    }
    del config.stages
    config.evaluation.num_generations = 2
    config.evaluation.pass_at = (2,)
    return config
"""


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"),
        small_run.one_device(),
    ):
        yield


def write_study(directory: Path, more: str = "") -> Path:
    """The small config of the commands' tests, as a study."""
    quickstart = repr(str(CONFIGS / "quickstart.py"))
    text = CONFIG.replace("QUICKSTART", quickstart).replace("    return config\n", more + STUDY)
    file = directory / "study.py"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Ended]:
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("study")
    line = [f"--config={write_study(directory)}", f"--workdir={directory / 'w'}"]
    return line, run("compare", *line)


def workdir(done: tuple[list[Any], Ended]) -> Path:
    return Path(done[0][1].removeprefix("--workdir="))


def test_a_study_ends_with_its_files(done):
    _, ended = done
    assert ended.code == 0, ended.err
    files = workdir(done)
    text = (files / "study.md").read_text()
    assert ended.out == f"{text}\nfiles: {files}\n"
    methods = [line.split()[1] for line in text.splitlines() if line.startswith("| ")]
    assert sorted(methods[:5]) == ["base", "grpo", "longer", "method", "twice"]
    assert sorted(methods[5:]) == ["grpo", "longer", "method", "twice"]
    assert "12 held-out prompts; means over seeds 3, 4" in text
    assert len((files / "study.csv").read_text().splitlines()) == 1 + 3 * 2
    assert (files / "study.png").read_bytes().startswith(b"\x89PNG")


def test_each_method_begins_at_the_base_with_its_seed(done):
    files = workdir(done)
    base = json.loads((files / "base" / "summary.json").read_text())["stages"]["sft"]
    for method, stages in {"longer": ["sft"], "grpo": ["grpo"], "twice": ["sft", "grpo"]}.items():
        for seed in (3, 4):
            own = files / f"{method}-{seed}"
            config = json.loads((own / "config.json").read_text())
            assert (config["seed"], config["stages"]) == (seed, stages)
            assert config["model"] == {"path": str(files / "base")}
            before = json.loads((own / "summary.json").read_text())["before"]
            assert before == {name: base[name] for name in before}
            assert {"accuracy", "accuracy_pass@2", "accuracy_greedy"} <= before.keys()
    first = [read_lines(files / f"longer-{seed}" / "metrics.jsonl")[0] for seed in (3, 4)]
    assert first[0]["loss"] != first[1]["loss"]
    # from where the base ended, and not from where it began
    began = read_lines(files / "base" / "metrics.jsonl")[0]
    assert max(line["loss"] for line in first) < began["loss"]


def test_tokens_are_added_up_over_stages(done):
    rows = [line.split(",") for line in (workdir(done) / "study.csv").read_text().splitlines()]
    names, *runs = rows
    column = {name: names.index(name) for name in ("method", "sampled_tokens", "optimizer_tokens")}
    tokens: dict[str, list[int]] = {}
    for row in runs:
        found = [int(row[column[n]]) for n in ("sampled_tokens", "optimizer_tokens")]
        tokens.setdefault(row[column["method"]], found)
    assert tokens["longer"][0] == 0
    # 4 steps of 8 prompts of 8 tokens, each with its completion of 4
    assert tokens["longer"][1] == 4 * 8 * (8 + 4)
    assert 4 * 8 * 4 <= tokens["grpo"][0] <= 4 * 8 * 4 * 8  # G = 4, at most 8 tokens
    assert tokens["twice"][1] > tokens["longer"][1]


def test_the_same_command_again_runs_nothing(done):
    line, ended = done
    before = {path: path.stat().st_mtime_ns for path in workdir(done).rglob("metrics.jsonl")}
    assert len(before) == 7
    again = run("compare", *line)
    assert (again.code, again.out, again.err) == (0, ended.out, "")
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_what_is_missing_is_run_again(done):
    line, ended = done
    shutil.rmtree(workdir(done) / "grpo-4")
    again = run("compare", *line)
    assert again.code == 0
    assert again.err.startswith(f"workdir {workdir(done) / 'grpo-4'}\n")
    shown = [line.split("|")[1:6] for line in again.out.splitlines() if line.startswith("| grpo")]
    assert (
        shown[0]
        == [line.split("|")[1:6] for line in ended.out.splitlines() if line.startswith("| grpo")][0]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.study.methods.grpo=('none',)"], "names 'none', but there is no section"),
        (["--config.study.seeds=()"], "at least one of methods, and one of seeds, is needed"),
        (["--config.study.measure=right"], "config.evaluation.measures has no 'right'"),
        (["--config.study.curve=('loss',)"], "config.study: no key 'curve'; valid keys: methods"),
        (["--config.grpo.algorithm.betta=1.0"], "config.grpo.algorithm: no key 'betta'"),
        (["--topology=v5e:4x4"], "--topology needs config.study.preset, one of: tiny"),
    ],
)
def test_refusals(flags, message, tmp_path):
    ended = run(
        "compare", f"--config={write_study(tmp_path)}", f"--workdir={tmp_path / 'w'}", *flags
    )
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("jax_grpo compare: ")
    assert ended.err.count("\n") == 1
    assert message in ended.err
    assert not (tmp_path / "w").exists()


def test_a_study_needs_a_workdir(tmp_path):
    ended = run("compare", f"--config={write_study(tmp_path)}")
    assert (ended.code, ended.err) == (
        2,
        "jax_grpo compare: --workdir=DIR is missing: a study takes long, and goes on there\n",
    )
