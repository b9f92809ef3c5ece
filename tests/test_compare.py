"""The command `compare`: a study of seconds, from the base to its files, and what it refuses."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import small_run
from small_run import CONFIG, CONFIGS, Ended, read_lines, run

from jax_grpo.commands import compare, train
from jax_grpo.commands.stage import build_stage
from jax_grpo.memory import Memory

STUDY = """
    config.study = {
        "base": ("sft",),
        "methods": {"longer": ("sft",), "twice": ("grpo", "sft")},
        "seeds": (3, 4),
        "curves": ("loss", "nowhere"),
    }
    del config.stages
    config.evaluation.pass_at = (1,)
    return config
"""


MEMORY = Memory(2**20, 2**19, 2**19, 0, 0, 0)


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other tests have compiled; what the compiler says of it is asked in test_memory.py."""
    with (
        small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"),
        small_run.one_device(),
        mock.patch.object(compare, "measure", lambda calls, options: dict.fromkeys(calls, MEMORY)),
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
    first, second = text.split("On each device")[0].split("By sampled accuracy, seed by seed:")
    for part in (first, second):
        assert {"longer", "twice"} < {x.split()[1] for x in part.splitlines() if x[:2] == "| "}
    assert "12 held-out prompts; means over seeds 3, 4" in first
    assert (files / "study.png").read_bytes().startswith(b"\x89PNG")


def test_each_method_begins_at_the_base_with_its_seed(done):
    files = workdir(done)
    base = json.loads((files / "base" / "summary.json").read_text())["stages"]["sft"]
    for method, stages in {"longer": ["sft"], "twice": ["grpo", "sft"]}.items():
        for seed in (3, 4):
            own = files / f"{method}-{seed}"
            config = json.loads((own / "config.json").read_text())
            assert (config["seed"], config["stages"]) == (seed, stages)
            assert config["model"] == {"path": str(files / "base")}
            before = json.loads((own / "summary.json").read_text())["before"]
            assert before == {name: base[name] for name in before}
            assert {"accuracy", "accuracy_pass@1", "accuracy_greedy"} <= before.keys()
    first = [read_lines(files / f"longer-{seed}" / "metrics.jsonl")[0]["loss"] for seed in (3, 4)]
    assert first[0] != first[1]
    # from where the base ended, and not from where it began
    assert max(first) < read_lines(files / "base" / "metrics.jsonl")[0]["loss"]


def test_what_was_spent_is_added_up_over_stages(done):
    with (workdir(done) / "study.csv").open(newline="") as file:
        rows = {(row["method"], int(row["seed"])): row for row in csv.DictReader(file)}
    assert rows.keys() == {(method, seed) for method in ("longer", "twice") for seed in (3, 4)}
    for (method, seed), row in rows.items():
        file = workdir(done) / f"{method}-{seed}" / "summary.json"
        stages = json.loads(file.read_text())["stages"].values()
        for name in ("seconds", "sampled_tokens", "optimizer_tokens"):
            assert float(row[name]) == pytest.approx(sum(stage[name] for stage in stages))
        drawn = 4 * 8 * 4 * 8  # 4 steps of 8 groups of 4, of at most 8 tokens
        assert float(row["sampled_tokens"]) <= (drawn if method == "twice" else 0)
        last = json.loads(file.read_text())["stages"]["sft"]
        assert float(row["after/accuracy"]) == last["accuracy"]


def test_curves_are_of_the_last_stage(done):
    file = workdir(done) / "twice-3" / "metrics.jsonl"
    lines = [line for line in read_lines(file) if line["stage"] == "sft"]
    curves = compare.read_curves(file, "sft", ("loss", "nowhere"))
    assert curves == {"loss": {line["step"]: line["loss"] for line in lines}}
    assert list(curves["loss"]) == [1, 2, 3, 4]


def test_the_same_command_again_runs_what_is_missing(done):
    line, ended = done
    files = workdir(done)
    before = {path: path.stat().st_mtime_ns for path in files.rglob("metrics.jsonl")}
    assert len(before) == 5
    again = run("compare", *line)
    assert (again.code, again.out, again.err) == (0, ended.out, "")
    shutil.rmtree(files / "longer-4")
    again = run("compare", *line)
    assert again.err.startswith(f"workdir {files / 'longer-4'}\n")
    changed = {path for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {files / "longer-4" / "metrics.jsonl"}
    # the same draws: all but the seconds comes out as it did
    assert [x.split("|")[:6] for x in again.out.splitlines()] == [
        x.split("|")[:6] for x in ended.out.splitlines()
    ]


def test_no_path_is_needed_for_the_memory_alone():
    """Rows that stand in are enough for every stage of the real study."""
    config = train._load_config(str(CONFIGS / "study_llama3_8b.py"))
    plan = compare.read_plan(**config.study.to_dict())
    stands = compare.without_data(config)
    for stages in plan.methods.values():
        own = compare.recipe(stands, stages)
        assert all(own[name]["data"]["source"].endswith("stand_in") for name in stages)
    assert config.grpo.data.to_dict() == {"path": None}  # as it was
    with pytest.raises(ValueError, match=r"config.grpo.data.path is missing"):
        compare.recipe(config, ("grpo",))
    config.sft.data.path = "rows.json"  # one path is that of all
    assert compare.recipe(config, ("grpo",))["grpo"]["data"] == {"path": "rows.json"}


# --- The studies that are there -------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("study_*.py")))
def test_every_study_is_read(name):
    """Tuples, never lists; and no stage has a key that there is not."""
    config = train._load_config(str(CONFIGS / name))
    plan = compare.read_plan(**config.study.to_dict())
    assert len(plan.seeds) == 3
    known = inspect.signature(build_stage).parameters.keys()
    for stages in (plan.base, *plan.methods.values()):
        own = compare.recipe(compare.without_data(config), stages)
        assert plan.measure in own["evaluation"]["measures"]
        assert all(own[name].keys() <= known for name in stages)
        assert "[" not in repr(own)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.study.methods.grpo=('none',)"], "names 'none', but there is no section"),
        (["--config.study.seeds=()"], "at least one of methods, and one of seeds, is needed"),
        (["--config.study.measure=right"], "config.evaluation.measures has no 'right'"),
        (["--config.study.curve=('loss',)"], "config.study: no key 'curve'; valid keys: methods"),
        (["--config.grpo.algorithm.betta=1.0"], "config.grpo.algorithm: no key 'betta'"),
        (["--topology=v5e:4x4"], "config.study.preset is '', which is not one of: tiny"),
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
