"""The recipes in configs/: their numbers, their shapes at full size, and one step of each in small.

The quickstart at full size is tests/test_quickstart.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from absl import flags
from small_run import CONFIGS, read_lines, run

from jax_grpo import arithmetic
from jax_grpo.commands import recipe
from jax_grpo.commands import train as command
from jax_grpo.commands.common import configure
from jax_grpo.data import Demonstrations, Prompts
from jax_grpo.models import export
from jax_grpo.models.config import PRESETS, LlamaConfig
from jax_grpo.models.llama import init_params, num_params
from jax_grpo.sharding import make_mesh
from jax_grpo.stages import Model, Stage, abstract_calls

CHAT = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
TINY = LlamaConfig(24, 16, 32, 1, 2, 1, 8, 256, tie_word_embeddings=True, initializer_range=0.3)
ROWS = [{"prompt": f"What is {i} + 5 - 3?", "answer": str(i + 2)} for i in range(16)]


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture
def one_device() -> Iterator[None]:
    with small_run.one_device():
        yield


def chatty() -> Any:
    """The arithmetic tokenizer, with a chat template; letters are unknown to it."""
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of few numbers."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    params = init_params(TINY, jax.random.key(0))
    export.export_model(directory, TINY, params, chatty(), (1,), jnp.float32)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same rows as JSON lines and as one JSON array."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "rows.json").write_text(json.dumps(ROWS))
    return {"jsonl": directory / "rows.jsonl", "json": directory / "rows.json"}


def read(name: str, *overrides: str) -> dict[str, Any]:
    """A config as its command reads it."""
    line = ["train", f"--config={CONFIGS / name}", *(f"--config.{x}" for x in overrides)]
    values = flags.FlagValues()
    command.define_flags(values, line)
    values(line)
    return command.read_config(values.config)


STUDIES = {path.name for path in CONFIGS.glob("study_*.py")}  # see test_compare.py


@pytest.mark.parametrize("name", sorted({p.name for p in CONFIGS.glob("*.py")} - STUDIES))
def test_every_config_is_read(name):
    """Tuples, never lists; and a stage has no key that there is not."""
    given = dict.fromkeys(("grpo.data.path", "data.path"), "x") if "llama3" in name else {}
    path = [f"--config.{key}={value}" for key, value in given.items()][:1]
    path = path or ["--config.grpo.data.path=x"] * ("smollm2" in name)
    command = "compare" if name.startswith("study") else "train"
    ended = run(command, f"--config={CONFIGS / name}", "--workdir=gs://x", *path)
    assert ended.err == f"jax_grpo {command}: --workdir is a local directory, not gs://x\n"


@pytest.mark.parametrize("name", ["smollm2_arithmetic.py", "llama3_8b_math.py"])
def test_rows_are_asked_for_before_a_model_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flag = "--config.grpo.data.path"
    assert run("train", f"--config={CONFIGS / name}", "--workdir=w") == (
        2,
        "",
        f"jax_grpo train: {flag[2:]} is missing (or a source): give it by {flag}=...\n",
    )
    ended = run("train", f"--config={CONFIGS / name}", "--workdir=w", f"{flag}=rows.jsonl")
    assert ended.code == 2
    assert "nor to be had from the hub" in ended.err
    assert list(tmp_path.iterdir()) == []


# --- Their numbers -------------------------------------------------------------------------------


def test_the_quickstart(one_device):
    config = read("quickstart.py")
    model, _, (sft, grpo), evaluation = recipe.build(config)
    assert num_params(model.config) < 1_000_000
    assert (sft.name, grpo.name, sft.number, grpo.number) == ("sft", "grpo", 0, 1)
    assert isinstance(sft.data, Demonstrations)
    assert isinstance(grpo.data, Prompts)
    assert evaluation is not None
    # nothing is dropped, and no problem that is held out is trained on
    assert (sft.data.dropped, grpo.data.dropped, evaluation.prompts.dropped) == (0, 0, 0)
    held_out = set(map(str, evaluation.prompts.prompts))
    assert len(held_out) >= 500
    assert not held_out & {row["prompt"] for row in (*sft.data.rows, *grpo.data.rows)}
    # thinking is the rarer habit, and both kinds of completion fit as they are
    tokenizer = model.tokenizer
    open_tag = tokenizer.convert_tokens_to_ids("<thinking>")
    completions = [ids for (ids,) in sft.data.completion_ids]
    assert 0.2 < np.mean([ids[0] == open_tag for ids in completions]) < 0.4
    assert max(map(len, completions)) <= sft.completion_length
    assert all(ids[-1] in model.end_ids for ids in completions)
    # the study's method: G = 8, KL weight 0.04, 2 for what is right and 1 for its form
    assert grpo.sampling is not None
    assert grpo.sampling.num_generations == 8
    assert config["grpo"]["algorithm"]["kl_weight"] == 0.04
    assert grpo.algorithm.needs_reference
    assert_rewards(grpo)


def assert_rewards(stage: Stage) -> None:
    """Correctness is worth 2 and format 1, weighed alike."""
    assert stage.verifiers is not None
    assert stage.verifiers.names == ("correctness", "thinking")
    assert stage.verifiers.weights == (1.0, 1.0)
    asked = {"prompts": ["?"], "completions": [r"<thinking>1</thinking>\boxed{5}"]}
    right, form = stage.verifiers.functions
    assert right(**asked, answer=["5"]) == [2.0]
    assert right(**asked, answer=["6"]) == [0.0]
    assert form(**asked) == [1.0]
    assert form(prompts=["?"], completions=[r"\boxed{5}"]) == [0.0]


def test_smollm2(model, data, one_device):
    path = [f"model.path={model}", f"grpo.data.path={data['jsonl']}"]
    config = read("smollm2_arithmetic.py", *path, "grpo.max_prompt_length=96")
    assert read("smollm2_arithmetic.py", path[1])["model"]["path"] == (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    _, _, (stage,), evaluation = recipe.build(config)
    assert evaluation is None
    assert isinstance(stage.data, Prompts)
    assert len(stage.data.rows) == 16
    assert stage.data.prompts[3] == (
        "What is 3 + 5 - 3?\nThink first, then answer, in exactly this form: "
        r"<thinking>your steps</thinking>\boxed{the number}"
    )
    ids = chatty()(stage.data.prompts[3] + "=").input_ids  # by the chat template
    assert stage.data.token_ids[3] == ids
    assert (stage.prompts_per_step, stage.completion_length) == (4, 64)
    assert_rewards(stage)


def llama3(data: dict[str, Path], mesh: jax.sharding.Mesh) -> tuple[Model, Stage]:
    """The study at full size, but for tokenizer and data."""
    config = read("llama3_8b_math.py", f"grpo.data.path={data['json']}")
    model = Model(PRESETS["llama3-8b"], chatty(), (1,), mesh, jnp.bfloat16)
    made = {"name": "grpo", "number": 0, "seed": config["seed"], "model": model, "earlier": ()}
    return model, configure(recipe.build_stage, config["grpo"], "grpo", **made)


def test_llama3_is_the_study(data):
    config = read("llama3_8b_math.py", f"grpo.data.path={data['json']}")
    assert config["model"] == {"path": "meta-llama/Meta-Llama-3-8B-Instruct"}
    assert config["dtype"] == "bfloat16"
    assert config["grpo"]["algorithm"] == {"name": "grpo", "kl_weight": 0.04}
    assert config["grpo"]["num_epochs"] == 1.0
    _, stage = llama3(data, make_mesh(data=1, fsdp=-1, tensor=4))
    assert stage.sampling is not None
    assert stage.prompts_per_step == 16
    assert (stage.sampling.num_generations, stage.completion_length) == (8, 512)
    assert stage.sampling.max_new_tokens == 512
    assert stage.num_steps == 1  # 16 rows, 16 prompts in a step
    assert (stage.learning_rate(0), stage.learning_rate(1)) == (1e-6, 1e-6)
    assert stage.algorithm.needs_reference
    assert_rewards(stage)


# --- Shapes at full size -------------------------------------------------------------------------


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


def test_llama3_has_the_right_shapes_everywhere(data):
    """Every jitted function of the study, with nothing of it in memory."""
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    model, stage = llama3(data, mesh)
    P, G, C, L, R, V = 16, 8, 512, 256, 2, 128256
    with jax.set_mesh(mesh):
        calls = abstract_calls(model, stage)
        out = {name: jax.eval_shape(call.function, *call.arguments) for name, call in calls.items()}
    assert list(out) == ["sampling_copy", "generate", "score", "experience", "update"]

    state = calls["update"].arguments[0]
    assert sum(x.size for x in jax.tree.leaves(state.params)) == 8_030_261_248
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    assert state.params["embed"].shape == state.params["head"].shape == (V, 4096)
    # spread: an eighth of each matrix on each device, moments alike
    biggest = [x for x in jax.tree.leaves(state) if x.size >= 4096 * 1024]
    assert len(biggest) == 3 * 9
    for x in biggest:
        assert np.prod(x.sharding.shard_shape(x.shape)) * 8 == x.size

    assert isinstance(out["sampling_copy"]["layers"], tuple)
    assert len(out["sampling_copy"]["layers"]) == 32
    assert {x.dtype for x in jax.tree.leaves(out["sampling_copy"])} == {jnp.dtype("bfloat16")}

    assert shapes(out["generate"]._asdict()) == {
        "prompts": (((P, L), "int32"), ((P,), "int32"), ((P,), "int32")),
        "completion_ids": ((P, G, C), "int32"),
        "lengths": ((P, G), "int32"),
        "mask": ((P, G, C), "bool"),
        "behavior_logps": ((P, G, C), "float32"),
        "kept_logmass": ((P, G, C), "float32"),
        "truncated": ((P, G), "bool"),
        "temperature": ((), "float32"),
        "segments": None,
    }
    assert shapes(out["score"]) == ((P, G, C), "float32")
    rewards = calls["experience"].arguments[1]
    assert shapes(rewards) == (((P, G, R), "float32"), ((P, G, R), "bool"))
    experience, algorithm_state = out["experience"]
    assert algorithm_state == ()
    assert shapes(experience._asdict()) == {
        "advantages": ((P, G), "float32"),
        "mask": ((P, G, C), "float32"),
        "behavior_logps": ((P, G, C), "float32"),
        "reference_logps": ((P, G, C), "float32"),
        **dict.fromkeys(("proximal_logps", "values", "returns", "importance")),
    }
    after, metrics = out["update"]
    assert shapes(after) == shapes(state)
    assert {"loss", "kl", "policy_loss", "entropy", "grad_norm", "finite"} < set(metrics)
    assert set(jax.tree.leaves(shapes(metrics), is_leaf=lambda x: x == ((), "float32"))) == {
        ((), "float32")
    }


def test_llama3_keeps_no_logits_of_a_whole_rollout(data):
    """`[P, G, C, V]` would be 33 GB in bfloat16: a chunk of 64 positions is what exists."""
    mesh = make_mesh(data=1, fsdp=2, tensor=4)
    model, stage = llama3(data, mesh)
    with jax.set_mesh(mesh):
        for call in (
            abstract_calls(model, stage)["score"],
            abstract_calls(model, stage)["update"],
        ):
            text = call.function.trace(*call.arguments).jaxpr.pretty_print(use_color=False)
            assert "128256" in text
            assert ",512,128256]" not in text
            assert ",64,128256]" in text


# --- One step in small ---------------------------------------------------------------------------


def take_one_step(name: str, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    given = [f"--config={CONFIGS / name}", f"--workdir={tmp_path / 'w'}"]
    ended = run("train", *given, *(f"--config.{x}" for x in overrides))
    assert ended.code == 0, ended.err
    (row,) = read_lines(tmp_path / "w" / "metrics.jsonl")
    assert (row["step"], row["finite"]) == (1, 1)
    assert row["completions/max_length"] <= 8
    assert 0 <= row["frac_reward_zero_std"] <= 1
    return row


def test_a_step_of_smollm2(model, data, one_device, tmp_path):
    row = take_one_step(
        "smollm2_arithmetic.py",
        tmp_path,
        f"model.path={model}",
        f"grpo.data.path={data['jsonl']}",
        "grpo.num_steps=1",
        "grpo.max_completion_length=8",
    )
    assert (row["epoch"], row["learning_rate"]) == (0.25, pytest.approx(1e-6))
    assert abs(row["kl"]) < 1e-6
    assert row["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_step_of_llama3(model, data, one_device, tmp_path):
    """In bfloat16, sampler and trainer agree as well as bfloat16 can."""
    row = take_one_step(
        "llama3_8b_math.py",
        tmp_path,
        f"model.path={model}",
        f"grpo.data.path={data['json']}",
        "mesh.tensor=1",
        "grpo.max_prompt_length=32",
        "grpo.max_completion_length=8",
    )
    assert (row["epoch"], row["learning_rate"]) == (1, pytest.approx(1e-6))
    assert abs(row["kl"]) < 1e-3
    assert row["sampling/sampling_logp_difference/mean"] < 0.02
