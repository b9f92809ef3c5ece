"""The command `compare`: a study of seconds, from the base to its files, and what it refuses."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small_run
from small_run import CONFIG, CONFIGS, read_lines, run

from jax_grpo.commands import compare, train
from jax_grpo.commands.stage import build_stage
from jax_grpo.memory import Memory

STUDY = """
    config.study = {
        "base": ("sft",),
        "methods": {"longer": ("sft",), "twice": ("sft", "grpo")},
        "seeds": (3, 4),
        "curves": ("loss", "nowhere"),
    }
    del config.stages
    return config
"""
MEMORY = Memory(2**20, 2**19, 2**19, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_cache_of_its_own(tmp_path: Path) -> Iterator[None]:
    """The command sets one for the process, unless there is one already."""
    with small_run.compiled_once(tmp_path / "compiled"):
        yield


def write_study(directory: Path) -> str:
    """The small config of the commands' tests, as a study."""
    quickstart = repr(str(CONFIGS / "quickstart.py"))
    text = CONFIG.replace("QUICKSTART", quickstart).replace("    return config\n", STUDY)
    (directory / "study.py").write_text(text)
    return f"--config={directory / 'study.py'}"


# --- What is run, without running it --------------------------------------------------------------


class Asked(NamedTuple):
    """A recipe that was to be run."""

    name: str
    seed: int
    stages: tuple[str, ...]
    model: dict[str, str]
    before: dict[str, float] | None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Instead of running recipes: notes them, and says what could have come out."""
    pytest.importorskip("matplotlib")
    asked: list[Asked] = []

    def measures(x: float) -> dict[str, float]:
        names = ("accuracy", "accuracy_greedy", "mean_length")
        return dict(zip(names, (x, x / 2, 10 * x), strict=True))

    def run_recipe(
        config: dict[str, Any], workdir: Path, before: dict[str, float] | None = None
    ) -> dict[str, Any]:
        stages, seed = config["stages"], config["seed"]
        asked.append(Asked(workdir.name, seed, stages, config["model"], before))
        workdir.mkdir(parents=True, exist_ok=True)
        lines = [
            {"stage": stage, "step": step, "loss": len(stage) / step}
            for stage in stages
            for step in (1, 2)
        ]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        spent = {"seconds": 1.5, "sampled_tokens": 10, "optimizer_tokens": 20 + seed}
        after = {name: {**measures((seed + i) / 10), **spent} for i, name in enumerate(stages)}
        return {"before": before or measures(0.9), "stages": after}

    monkeypatch.setattr(train, "run_recipe", run_recipe)
    monkeypatch.setattr(compare, "measure", lambda calls, *_: dict.fromkeys(calls, MEMORY))
    monkeypatch.setattr(compare, "abstract_calls", lambda model, stage: ["update"])
    return asked


def test_each_method_begins_at_the_base_with_its_seed(asked, tmp_path):
    ended = run("compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}")
    assert ended.code == 0, ended.err
    files = tmp_path / "w"
    base, *runs = asked
    assert base[:3] == ("base", 0, ("sft",))
    assert base.model["preset"] == "tiny"
    stages = {"longer": ("sft",), "twice": ("sft", "grpo")}
    assert [each[:3] for each in runs] == [
        (f"{method}-{seed}", seed, stages[method]) for seed in (3, 4) for method in stages
    ]
    # what the base's last stage left, measured once
    left = {"accuracy": 0.0, "accuracy_greedy": 0.0, "mean_length": 0.0}
    assert all(each.model == {"path": str(files / "base")} for each in runs)
    assert all(each.before == left for each in runs)

    text = (files / "study.md").read_text()
    assert ended.out == f"{text}\nfiles: {files}\n"
    assert "12 held-out prompts; means over seeds 3, 4" in text
    assert (files / "study.png").read_bytes().startswith(b"\x89PNG")
    # from the worst to the best, base first
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["method", "base", "longer", "twice", "method", "longer", "twice"]


def test_what_was_measured_and_spent(asked, tmp_path):
    run("compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}")
    with (tmp_path / "w" / "study.csv").open(newline="") as file:
        rows = {(row["method"], int(row["seed"])): row for row in csv.DictReader(file)}
    assert rows.keys() == {(method, seed) for method in ("longer", "twice") for seed in (3, 4)}
    for (method, seed), row in rows.items():
        stages = 2 if method == "twice" else 1
        # measured after the last stage; spent in all of them
        assert float(row["after/accuracy"]) == pytest.approx((seed + stages - 1) / 10)
        assert float(row["before/accuracy"]) == 0
        assert float(row["seconds"]) == 1.5 * stages
        assert int(row["sampled_tokens"]) == 10 * stages
        assert int(row["optimizer_tokens"]) == (20 + seed) * stages
        assert (row["memory/during"], int(row["memory/total"])) == ("update", 2**20)


def test_memory_is_asked_for_once(asked, tmp_path, monkeypatch):
    line = ["compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}"]
    first = run(*line)
    assert first.err.count("asking the compiler what memory") == 2
    monkeypatch.setattr(compare, "measure", None)
    again = run(*line)
    assert (again.code, again.out, again.err) == (0, first.out, "")


def test_a_model_that_is_there_is_the_base(asked, tmp_path):
    run("compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}", "--config.study.base=()")
    assert [each.name for each in asked] == ["longer-3", "twice-3", "longer-4", "twice-4"]
    assert all(each.model["preset"] == "tiny" for each in asked)
    # the first run measures it for all
    assert [each.before and each.before["accuracy"] for each in asked] == [None, 0.9, 0.9, 0.9]


def test_curves_are_of_the_last_stage(tmp_path):
    lines = [
        {"stage": "reward", "step": 1, "loss": 5.0},
        {"stage": "ppo", "step": 1, "loss": 3.0},
        {"stage": "ppo", "step": 2, "loss": None},  # was not finite
        {"stage": "ppo", "step": 3, "loss": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.read_curves(file, "ppo", ("loss", "nowhere")) == {"loss": {1: 3.0, 3: 1.0}}


@pytest.mark.slow
def test_a_study_from_end_to_end(tmp_path):
    """Of one method and seed; the second time it runs nothing, or what is missing."""
    pytest.importorskip("matplotlib")
    line = ["compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}"]
    line += ["--config.study.seeds=(3,)", "--config.study.methods.twice=('sft',)"]
    files = tmp_path / "w"
    with small_run.one_device():
        ended = run(*line)
        assert ended.code == 0, ended.err
        base = json.loads((files / "base" / "summary.json").read_text())["stages"]["sft"]
        before = json.loads((files / "longer-3" / "summary.json").read_text())["before"]
        assert before == {name: base[name] for name in before}
        # from where the base ended, and not from where it began
        began, goes_on = (read_lines(files / x / "metrics.jsonl")[0] for x in ("base", "longer-3"))
        assert goes_on["loss"] < began["loss"]
        when = {path: path.stat().st_mtime_ns for path in files.rglob("metrics.jsonl")}
        assert len(when) == 3
        again = run(*line)
        assert (again.code, again.out, again.err) == (0, ended.out, "")
        shutil.rmtree(files / "longer-3")
        again = run(*line)
        assert again.err.startswith(f"workdir {files / 'longer-3'}\n")
        changed = {path for path, at in when.items() if path.stat().st_mtime_ns != at}
        assert changed == {files / "longer-3" / "metrics.jsonl"}
        accuracy = [[x.split("|")[:5] for x in e.out.splitlines()] for e in (ended, again)]
        assert accuracy[0] == accuracy[1]


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


def test_no_path_is_needed_for_the_memory_alone():
    """Rows that stand in are enough for every stage of the real study."""
    config = train._load_config(str(CONFIGS / "study_llama3_8b.py"))
    stands = compare.without_data(config)
    for stages in compare.read_plan(**config.study.to_dict()).methods.values():
        own = compare.recipe(stands, stages)
        assert all(own[name]["data"]["source"].endswith("stand_in") for name in stages)
    assert config.grpo.data.to_dict() == {"path": None}  # as it was
    with pytest.raises(ValueError, match=r"config.grpo.data.path is missing"):
        compare.recipe(config, ("grpo",))
    config.sft.data.path = "rows.json"  # one path is that of all
    assert compare.recipe(config, ("grpo",))["grpo"]["data"] == {"path": "rows.json"}


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.study.methods.grpo=('none',)"], "names 'none', but there is no section"),
        (["--config.study.seeds=()"], "at least one of methods, and one of seeds, is needed"),
        (["--config.study.measure=right"], "config.evaluation.measures has no 'right'"),
        (["--config.study.curve=('loss',)"], "config.study: no key 'curve'; valid keys: methods"),
        (["--config.grpo.algorithm.betta=1.0"], "config.grpo.algorithm: no key 'betta'"),
        (["--config.study.base=('none',)"], "names 'none', but there is no section"),
        (["--topology=v5e:4x4"], "config.study.preset is '', which is not one of: tiny"),
    ],
)
def test_refusals(flags, message, tmp_path):
    ended = run("compare", write_study(tmp_path), f"--workdir={tmp_path / 'w'}", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("jax_grpo compare: ")
    assert ended.err.count("\n") == 1
    assert message in ended.err
    assert not (tmp_path / "w").exists()


def test_a_study_needs_a_workdir(tmp_path):
    ended = run("compare", write_study(tmp_path))
    assert (ended.code, ended.err) == (
        2,
        "jax_grpo compare: --workdir=DIR is missing: a study takes long, and goes on there\n",
    )


def test_a_method_must_end_with_a_policy(tmp_path):
    line = write_study(tmp_path)
    pairs = """
    config.sft.algorithm = {"name": "reward_model"}
    config.sft.data = {"source": "jax_grpo.arithmetic.preferences", "count": 40}
    config.sft.max_prompt_length, config.sft.max_completion_length = 13, 64
    config.study.base = ()
    return config
"""
    file = tmp_path / "study.py"
    file.write_text(file.read_text().replace("    return config\n", pairs))
    ended = run("compare", line, f"--workdir={tmp_path / 'w'}")
    assert ended == (
        2,
        "",
        "jax_grpo compare: config.study.methods.longer ends with a stage that trains no policy\n",
    )
