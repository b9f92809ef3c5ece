"""The commands, as a hostile user calls them: one line and exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from ml_collections import ConfigDict
from small_run import read_lines, run

from jax_grpo import arithmetic
from jax_grpo.commands import BadInput
from jax_grpo.commands.common import configure, load, write_lines
from jax_grpo.commands.train import build, read_config
from jax_grpo.models import export
from jax_grpo.sharding import make_mesh
from jax_grpo.types import Rewards, Rollout, Scores

PROMPTS = ["1+2-1+4=?", "3=?", "5-4=?", "2+2+2+2=?", "1+1=?", "4-3+2=?"]
CHAT = "{% for m in messages %}{{ m['content'] }}={% endfor %}"


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        small_run.one_device(),
        small_run.compiled_once(tmp_path_factory.getbasetemp() / "compiled"),
    ):
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that `train` has finished: its first stage alone."""
    directory = tmp_path_factory.mktemp("run")
    config = small_run.write_config(directory, "silent")
    ended = run(
        "train",
        f"--config={config}",
        f"--workdir={directory / 'w'}",
        "--config.stages=('sft',)",
    )
    assert (ended.code, ended.err.splitlines()[0]) == (0, f"workdir {directory / 'w'}")
    return directory / "w"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to work in, with the small config beside it."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_run.write_config(tmp_path_factory.mktemp("config"), "silent")


def tree(directory: Path) -> dict[str, Any]:
    """Every file below a directory with what is in it."""
    paths = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): p.is_file() and p.read_bytes() for p in paths}


def refused(*args: object) -> str:
    """Runs what must be refused in one line, and changes nothing; returns that line."""
    before = tree(Path.cwd())
    ended = run(*args)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    assert "Traceback" not in ended.err
    assert tree(Path.cwd()) == before
    return ended.err.removesuffix("\n")


# --- The program ---------------------------------------------------------------------------------

USAGE = (
    "usage: python -m jax_grpo COMMAND --flag=value ...; "
    "commands: compare, export, generate, rewards, score, train"
)


def test_which_commands_there_are(here):
    assert refused() == f"jax_grpo: {USAGE}"
    assert refused("nope") == f"jax_grpo: no command 'nope'; {USAGE}"
    assert refused("common") == f"jax_grpo: no command 'common'; {USAGE}"
    assert refused("--config=x.py") == f"jax_grpo: no command '--config=x.py'; {USAGE}"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(here, flag):
    ended = run(flag)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(USAGE)
    flags = {
        "train": ["--config", "--workdir"],
        "generate": ["--model", "--prompts", "--out", "--[no]greedy", "--num_generations"],
        "score": ["--model", "--completions", "--out", "--temperature"],
        "export": ["--model", "--out", "--dtype", "--[no]overwrite"],
    }
    for command, names in flags.items():
        ended = run(command, "--model=x", flag) if command != "train" else run(command, flag)
        assert (ended.code, ended.err) == (0, "")
        assert f"python -m jax_grpo {command} --" in ended.out
        for name in names:
            assert f"\n  {name}: " in ended.out


@pytest.mark.parametrize("command", ["train", "generate", "score", "export"])
def test_flags_that_there_are_not(here, command):
    assert refused(command, "--nope=1") == f"jax_grpo {command}: Unknown command line flag 'nope'"
    required = {
        "generate": ["--model=x", "--prompts=x", "--out=x"],
        "score": ["--model=x", "--completions=x", "--out=x"],
        "export": ["--model=x", "--out=x"],
    }.get(command, [])
    line = refused(command, *required, "stray", "words")
    assert line == f"jax_grpo {command}: not a flag: stray words (flags are --name=value)"
    if required:
        line = refused(command)
        for flag in required:
            assert f"Flag {flag.removesuffix('=x')} must have a value" in line


def test_as_a_program(here, workdir):
    """The one path that is not in this process."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def start(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "jax_grpo", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    ended = start("train", "--config=missing.py", "--workdir=w")
    expected = "jax_grpo train: no such config file: 'missing.py'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", expected)
    assert tree(here) == {}

    (here / "prompts.jsonl").write_text('{"prompt": "1+2=?"}\n')
    flags = ["--prompts=prompts.jsonl", "--out=out.jsonl", "--num_generations=2", "--greedy"]
    ended = start("generate", f"--model={workdir}", *flags, "--max_new_tokens=3")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == "2 completions in out.jsonl\n"
    assert [row["prompt_ids"] for row in read_lines(here / "out.jsonl")] == [[4, 13, 5, 15, 16]] * 2


# --- Config files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such config file: 'c.py'"),
        ("def get_config(:\n", "c.py: SyntaxError: invalid syntax (c.py, line 1)"),
        ("x = 1\n", "c.py: there is no get_config() that gives a ConfigDict"),
        (
            "def get_config():\n    return {}\n",
            "c.py: there is no get_config() that gives a ConfigDict",
        ),
        (
            "def half(x):\n    return x / 0\n\n\ndef get_config():\n    return half(1)\n",
            "c.py: line 2: ZeroDivisionError: division by zero",
        ),
        (
            "def get_config():\n    raise ValueError('two\\nlines')\n",
            "c.py: line 2: ValueError: two lines",
        ),
        ("import nonono\n", "c.py: line 1: ModuleNotFoundError: No module named 'nonono'"),
    ],
)
def test_config_files_that_cannot_be_read(here, text, expected):
    if text is not None:
        Path("c.py").write_text(text)
    for more in ([], ["--config.seed=1"]):
        assert refused("train", "--config=c.py", "--workdir=w", *more) == (
            f"jax_grpo train: {expected}"
        )


def test_a_config_must_be_given(here, config):
    assert refused("train", "--workdir=w") == (
        "jax_grpo train: --config=configs/NAME.py is missing"
    )
    assert refused("train", "--config=") == "jax_grpo train: no such config file: ''"
    assert refused("train", "--config") == "jax_grpo train: Missing value for flag --config"
    assert "before a value for --config" in refused(
        "train", "--config.seed=1", f"--config={config}"
    )
    assert "config.seed" in refused("train", "--config.seed=1")


COMPLETE = {
    "seed": 0,
    "model": {"preset": "tiny", "tokenizer": "jax_grpo.arithmetic.tokenizer"},
    "stages": ("one",),
    "one": {"algorithm": {"name": "sft"}},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": ...}, "config: seed is missing"),
        ({"model": ...}, "config: model is missing"),
        ({"stages": ...}, "config: stages is missing"),
        ({"stages": ()}, "config.stages must be a tuple of names, each once; got ()"),
        ({"stages": ("one", "one")}, "each once; got ('one', 'one')"),
        ({"stages": "one"}, "config.stages must be a tuple of names, each once; got 'one'"),
        ({"stages": ["one"]}, "must be a tuple"),
        ({"stages": ("two",)}, "config.stages names 'two', but there is no section config.two"),
        ({"stages": ("model",)}, "config.stages names 'model', but there is no section"),
        ({"one": 3}, "config.one is 3 and not a section"),
        ({"model": "tiny"}, "config.model is 'tiny' and not a section"),
        ({"seeds": 3}, "no key 'seeds'; valid keys: seed, dtype, model, mesh, stages, evaluation"),
        ({"two": {"num_steps": 3}}, "config: no key 'two'; valid keys: seed, dtype, model, mesh, "),
        ({"seed": -1}, "config.seed is -1: a whole number, 0 to 2**32 - 1"),
        ({"seed": 1.0}, "config.seed is 1.0: a whole number, 0 to 2**32 - 1"),
        ({"seed": 2**32}, "config.seed is 4294967296: a whole number, 0 to 2**32 - 1"),
    ],
)
def test_what_a_config_must_hold(changes, expected):
    content = {k: v for k, v in {**COMPLETE, **changes}.items() if v is not ...}
    with pytest.raises(ValueError) as error:
        read_config(ConfigDict(content))
    assert expected in str(error.value)


def test_sections_of_stages_that_are_left_out_are_not_read():
    left_out = {"algorithm": {"name": "grpo"}, "what": ConfigDict({})}
    assert read_config(ConfigDict({**COMPLETE, "two": left_out})) == COMPLETE


def test_placeholders(here):
    text = f"""
from ml_collections import ConfigDict, config_dict

def get_config():
    config = ConfigDict({COMPLETE!r})
    config.one.data = {{"path": config_dict.placeholder(str)}}
    config.mesh = {{"data": config_dict.placeholder(int)}}
    return config
"""
    Path("c.py").write_text(text)
    command = ("train", "--config=c.py", "--workdir=w")
    flag = "--config.one.data.path="
    assert refused(*command) == (
        f"jax_grpo train: config.one.data.path is missing (or a source): give it by {flag}..."
    )
    # filled, it goes on to what is wrong next; the one that may stay empty was never given
    assert refused(*command, f"{flag}x") == "jax_grpo train: config.one: optimizer is missing"
    # ml_collections cannot fill these from a command line
    Path("c.py").write_text(text.replace(".placeholder(str)", ".required_placeholder(str)"))
    for more in ([], [f"{flag}x"]):
        assert refused(*command, *more) == (
            "jax_grpo train: config.one.data.path is a required_placeholder, which no flag can "
            "fill: use placeholder"
        )


# --- Keys and values of a config -----------------------------------------------------------------

STAGE_KEYS = (
    "algorithm, data, optimizer, prompts_per_step, max_prompt_length, max_completion_length, "
    "num_steps, num_epochs, sampling, rewards, reward_model, critic, reference, collect, heldout, "
    "pack, max_redraws, passes, minibatches, micro_batches, remat, attention, logits_chunk, "
    "max_skipped, checkpoint_every, keep_checkpoints, log_every"
)
PROBLEM_KEYS = "split, count, seed, min_terms, max_terms, max_operand, max_partial"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        # misspelt at every level: the line names the valid keys
        ("typo=1", "config: no key 'typo'; valid keys: seed, dtype, model, mesh, stages, eval"),
        ("gppo.num_steps=3", "config: no section 'gppo'; its sections: grpo, mesh, model, sft"),
        ("seed.x=3", "config: no section 'seed'; its sections: grpo, mesh, model, sft"),
        ("grpo.optimiser.b1=0.5", "config.grpo: no section 'optimiser'; its sections: algorithm,"),
        ("grpo.num_stepz=3", f"config.grpo: no key 'num_stepz'; valid keys: {STAGE_KEYS}"),
        ("grpo.algorithm.kl=1.0", "config.grpo.algorithm: no key 'kl'; valid keys: clip_low, clip"),
        ("grpo.optimizer.lr=1.0", "config.grpo.optimizer: no key 'lr'; valid keys: learning_rate,"),
        ("grpo.sampling.topk=1", "config.grpo.sampling: no key 'topk'; valid keys: num_generatio"),
        ("grpo.data.countt=1", f"unexpected keyword argument 'countt'; it takes: {PROBLEM_KEYS}"),
        ("grpo.rewards.thinking.rewardd=1", "'thinking' has no setting 'rewardd'; it has: reward"),
        ("model.pathh=x", "config.model: no key 'pathh'; valid keys: path, preset, tokenizer"),
        ("mesh.dat=1", "config.mesh: no key 'dat'; valid keys: data, fsdp, tensor"),
        # values of another type
        ("grpo.num_steps=abc", "--config.grpo.num_steps=abc: invalid literal for int()"),
        ("grpo.num_steps=1.5", "--config.grpo.num_steps=1.5: invalid literal for int()"),
        ("grpo.optimizer.learning_rate=fast", "could not convert string to float: 'fast'"),
        ("grpo.max_skipped=abc", "config.grpo: max_skipped is 'abc', which is no int"),
        ("grpo.passes=1.5", "config.grpo: passes is 1.5, which is no int"),
        ("grpo.passes=True", "config.grpo: passes is True, which is no int"),
        ("grpo.algorithm.clip_low=a", "config.grpo.algorithm: clip_low is 'a', which is no float"),
        ("grpo.sampling.final_temperature=a", "final_temperature is 'a', which is no float | None"),
        ("grpo.algorithm=grpo", "Failed to parse 'grpo' as a ConfigDict"),
        ("grpo=3", "--config.grpo=3: Failed to parse '3' as a ConfigDict"),
        ("grpo.data={'source':3}", "config.grpo: source is 3, which is no str | None"),
        ("grpo.data.chat=yes", "config.grpo: chat is 'yes', which is no bool"),
        (
            "grpo.data={'source':'jax_grpo.arithmetic.problems','count':'many'}",
            "config.grpo: count is 'many', which is no int",
        ),
        ("grpo.rewards={'thinking':2.0}", "rewards.thinking is 2.0 and not a section of settings"),
        ("grpo.rewards={'thinking':{'reward':'a'}}", "reward is 'a', which is no float"),
        ("grpo.rewards={'thinking':{'weight':'a'}}", "thinking.weight is 'a' and not a number"),
        ("seed=-1", "config.seed is -1: a whole number, 0 to 2**32 - 1"),
        # names that there are not
        ("model.preset=huge", "config.model: preset 'huge' is not one of: tiny, smollm2-135m, "),
        ("model.tokenizer=", "config.model: a preset needs a tokenizer"),
        ("model.tokenizer=x.y", "config.model: no module 'x', wanted for 'x.y'"),
        ("model.path=x", "config.model: give one of path and preset"),
        ("model={'path':'./x'}", "config.model: ./x: no such model directory or .gguf file"),
        ("dtype=int8", "dtype 'int8' is not one of: auto, float32, bfloat16"),
        ("grpo.algorithm.name=gppo", "config.grpo: algorithm.name 'gppo' is not one of: "),
        ("grpo.algorithm={}", "config.grpo: algorithm.name None is not one of: "),
        ("grpo.algorithm.advantage=z", "advantage 'z' is not one of: standardized, centered, "),
        ("grpo.algorithm.reduction=mean", "reduction 'mean' is not one of: token_mean, sequence_"),
        ("grpo.algorithm.truncated=drop", "truncated 'drop' is not one of: keep, mask, zero"),
        ("grpo.optimizer.schedule=exp", "schedule must be constant, linear or cosine, got 'exp'"),
        ("grpo.remat=some", "config.grpo: remat 'some' is not one of: none, dots, full"),
        ("grpo.rewards={'unit_tests':{'require':'walls'}}", "'walls' is no level of isolation"),
        ("grpo.rewards={'thinkin':{}}", "unknown reward 'thinkin'; known: choice, correctness"),
        ("grpo.rewards={'r':{'function':'no.py:f'}}", "config.grpo: no such file: no.py"),
        ("grpo.rewards={}", "config.grpo: rewards are missing"),
        ("grpo.data.source=jax_grpo.arithmetic.nope", "jax_grpo.arithmetic has no 'nope'"),
        ("grpo.data={'path':'no.jsonl'}", "config.grpo: no such data file: no.jsonl"),
        ("grpo.data.path=no.jsonl", "data come from a path or from a source: give one of the two"),
        (
            "grpo.data.chat=True",
            "config.grpo: the prompt of row 0 is a chat, but the tokenizer has",
        ),
        # numbers that do not fit
        ("grpo.prompts_per_step=0", "prompts_per_step is 0: it must divide by data x fsdp (1) x "),
        ("grpo.minibatches=3", "x fsdp (1) x minibatches (3) x micro_batches (1)"),
        ("grpo.micro_batches=5", "x fsdp (1) x minibatches (1) x micro_batches (5)"),
        ("mesh.data=3", "config.mesh: mesh data 3 x fsdp -1 x tensor 1 does not fit 1 devices"),
        ("grpo.max_prompt_length=505", "505 and a completion of 8 tokens exceed the model's conte"),
        ("grpo.max_prompt_length=2", "no rows left: dropped all 40 prompts longer than 2 tokens"),
        ("grpo.max_completion_length=0", "max_completion_length must be at least 1, got 0"),
        ("grpo.sampling.num_generations=1", "completions of one prompt, and a group of 1 is const"),
        ("grpo.sampling.temperature=0.0", "config.grpo.sampling: temperatures must be more than 0"),
        ("grpo.sampling.max_new_tokens=9", "max_new_tokens must be 1 to max_completion_length, 8"),
        ("grpo.algorithm.kl_estimator=k1", "KL estimator k1 in the loss has a gradient of 0"),
        ("grpo.algorithm.kl_weight=-1.0", "config.grpo.algorithm: kl_weight is -1.0: it must be 0"),
        ("grpo.optimizer.warmup_steps=4", "warmup_steps must be at least 0 and less than total_st"),
        ("grpo.optimizer.learning_rate=inf", "learning_rate must be at least 0 and less than inf"),
        ("grpo.num_epochs=1.0", "config.grpo: give one of num_steps and num_epochs, more than 0"),
        ("grpo.num_steps=0", "config.grpo: give one of num_steps and num_epochs, more than 0"),
        ("grpo.num_steps=-1", "config.grpo: give one of num_steps and num_epochs, more than 0"),
        ("grpo.num_steps=2147483648", "2147483648 optimizer steps are too many"),
        ("grpo.sampling.temperature=nan", "config.grpo.sampling: temperatures must be more than"),
        ("grpo.passes=0", "config.grpo: passes must be at least 1, got 0"),
        ("grpo.checkpoint_every=0", "config.grpo: checkpoint_every must be at least 1, got 0"),
        ("grpo.log_every=0", "config.grpo: log_every must be at least 1, got 0"),
        ("grpo.logits_chunk=-1", "logits_chunk, max_skipped, max_redraws and pack must not be ne"),
        # sections that an algorithm has no use for, or lacks
        ("sft.rewards={'thinking':{}}", "rewards is given, but algorithm sft takes completions of"),
        ("grpo.algorithm={'name':'sft'}", "sampling is given, but algorithm sft takes completions"),
        ("sft.collect={'rounds':1}", "rewards are missing: collect needs at least one, to choose"),
        ("sft.algorithm={'name':'dpo'}", "config.sft: row 0 has no column 'chosen'; it has: promp"),
        (
            "sft.algorithm={'name':'reward_model'}",
            "config.sft: row 0 has no column 'chosen'; it ha",
        ),
        ("sft.reward_model={'stage':'x'}", "no earlier stage 'x' trains a reward model; those th"),
        (
            "grpo.reward_model={'stage':'sft'}",
            "no earlier stage 'sft' trains a reward model; those",
        ),
        (
            "grpo.reward_model={'weight':1.0}",
            "config.grpo.reward_model: give one of stage and path",
        ),
        ("grpo.reward_model={'path':'./x'}", "config.grpo.reward_model: ./x: no such model direct"),
        ("grpo.critic={'start':'policy'}", "critic is given, but algorithm grpo has none"),
        (
            "grpo.heldout={'path':'x'}",
            "heldout is given, but algorithm grpo samples its completion",
        ),
        ("grpo.pack=64", "pack is given, but algorithm grpo samples its completions itself"),
        ("sft.pack=8", "config.sft: example 0 has 13 tokens: it does not fit in 8"),
        ("grpo.reference={'every':0}", "config.grpo.reference: every must be at least 1, got 0"),
        ("grpo.reference={'every':1,'mix':1.5}", "mix is 1.5: it must be more than 0 and at most"),
        ("sft.reference={'every':1}", "reference is given, but algorithm sft has none: its kl_we"),
        ("grpo.algorithm.importance_cap=0.5", "importance_cap is 0.5: it must be 0 (off) or at le"),
        (
            "grpo.algorithm={'name':'ppo','kl_weight':0.0,'kl_target':1.0}",
            "kl_target adapts kl_weight, which is 0 and would stay so",
        ),
        (
            "stages=('sft','nope')",
            "config.stages names 'nope', but there is no section config.nope",
        ),
        # flags that are none
        ("grpo.num_steps", "Missing value for flag --config.grpo.num_steps"),
    ],
)
def test_configs_that_are_refused(here, config, flag, expected):
    line = refused("train", f"--config={config}", "--workdir=w", f"--config.{flag}")
    assert line.startswith("jax_grpo train: ")
    assert expected in line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["algorithm={'name':'grpo','kl_weight':0.0}", "reference={'every':1}"],
            "its kl_weight is 0",
        ),
        (["algorithm={'name':'ppo'}", "critic={'start':'reward_model'}"], "but the stage has none"),
        (
            ["algorithm={'name':'ppo'}", "critic={'start':'x'}"],
            "is not one of: auto, policy, rewar",
        ),
        (
            ["algorithm={'name':'ppo'}", "critic={'optimizer':{'lr':1.0}}"],
            "grpo.critic.optimizer: no k",
        ),
        (
            ["algorithm={'name':'ppo'}", "critic={'optimizer':1e-5}"],
            "optimizer is 1e-05 and not a sec",
        ),
        (
            ["algorithm={'name':'dpo'}", "collect={}", "sampling={'num_generations':1}"],
            "it must be 2 or more",
        ),
        (
            ["algorithm={'name':'sft'}", "collect={}", "pack=16"],
            "may have 17 tokens, max_prompt_le",
        ),
        (
            ["algorithm={'name':'sft'}", "collect={}", "sampling={'final_temperature':0.5}"],
            "final_temperature is for rollouts, not for collect",
        ),
        (["algorithm={'name':'rft'}", "collect={}"], "RFT's offline form is algorithm sft"),
        (
            ["algorithm={'name':'sft'}", "collect={'rounds':3}"],
            "rounds is 3, which does not divide",
        ),
        (
            ["algorithm={'name':'sft'}", "collect={'num_prompts':99}"],
            "it must be 0 to 40, the rows",
        ),
        (
            ["algorithm={'name':'dpo'}", "collect={}", "pack=64"],
            "compares two completions of a pro",
        ),
        (
            ["algorithm={'name':'sft','reduction':'sequence_mean'}", "collect={}", "pack=64"],
            "packed rows hold several demonstrations each, so that a mean over rows means nothing",
        ),
        (
            ["algorithm={'name':'dpo'}", "collect={}", "heldout={'path':'x'}"],
            "needs a reference's l",
        ),
    ],
    ids=str,
)
def test_combinations_that_are_refused(here, config, flags, expected):
    given = [f"--config.grpo.{flag}" for flag in flags]
    assert expected in refused("train", f"--config={config}", "--workdir=w", *given)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("measures.accuracy=nope", "measures.accuracy names the reward 'nope', which is not one o"),
        ("batch=0", "config.evaluation: batch must be at least 1, got 0"),
        ("num_prompts=-1", "config.evaluation: num_prompts must not be negative, got -1"),
        ("num_prompt=3", "config.evaluation: no key 'num_prompt'; valid keys: data, rewards, meas"),
        ("max_new_tokens=504", "a prompt of 13 and a completion of 504 tokens exceed the model's"),
        (
            "data.split=trainn",
            "config.evaluation: split is 'train', 'fresh' or 'heldout', not 'trainn'",
        ),
    ],
)
def test_evaluations_that_are_refused(here, config, flag, expected):
    whole = config.removesuffix(":silent")
    line = refused("train", f"--config={whole}", "--workdir=w", f"--config.evaluation.{flag}")
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "rows.jsonl: no rows"),
        ('{"prompt": "1=?", "answer": "1"}\n{"prompt":\n', "rows.jsonl: line 2 is not JSON"),
        ("[1, 2]", "rows.jsonl: row 0 is not an object but 1"),
        ('{"answer": "1"}\n', "rows.jsonl: row 0 has no column 'prompt'; it has: answer"),
        ('{"prompt": 3}\n', "the prompt of row 0 is neither text nor a list of messages"),
        ('{"prompt": ""}\n', "the prompt of row 0 is empty"),
    ],
)
def test_data_that_are_refused(here, config, text, expected):
    Path("rows.jsonl").write_text(text)
    flag = "--config.grpo.data={'path':'rows.jsonl'}"
    assert expected in refused("train", f"--config={config}", "--workdir=w", flag)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", "mine.py: SyntaxError: invalid syntax (mine.py, line 1)"),
        ("1 / 0\n", "mine.py: ZeroDivisionError: division by zero"),
        ("import nonono\n", "nonono"),
        ("g = 1\n", "mine.py has no 'f'"),
        ("f = 1\n", "the reward 'mine.py:f' is not a function but int"),
    ],
)
def test_files_of_rewards_that_are_refused(here, config, text, expected):
    Path("mine.py").write_text(text)
    flag = "--config.grpo.rewards={'mine':{'function':'mine.py:f'}}"
    assert expected in refused("train", f"--config={config}", "--workdir=w", flag)


def test_flags_override_the_file_before_anything_is_made(here, config):
    """In the order of the line; keys that the file does not name are taken if there are such."""
    ended = run(
        "train",
        f"--config={config}",
        "--workdir=w",
        "--config.seed=5",
        "--config.grpo.num_steps",
        "3",
        "--config.grpo.max_skipped=7",
        "--config.grpo.optimizer.b1=0.5",
        "--config.grpo.optimizer.b1=0.75",
        "--config.stages=('grpo',)",
        "--config.mesh.data=2",  # does not fit, so it all ends in a line that comes late
    )
    assert ended.err == (
        "jax_grpo train: config.mesh: mesh data 2 x fsdp -1 x tensor 1 does not fit 1 devices\n"
    )
    from absl import flags

    from jax_grpo.commands import train

    line = ["jax_grpo train", f"--config={config}", "--config.seed=5", "--config.grpo.num_steps"]
    line += ["3", "--config.grpo.max_skipped=7", "--config.grpo.optimizer.b1=0.5"]
    line += ["--config.grpo.optimizer.b1=0.75", "--config.stages=('grpo',)"]
    values = flags.FlagValues()
    train.define_flags(values, line)
    assert values(line) == ["jax_grpo train"]
    found = read_config(values.config)
    assert (found["seed"], found["stages"], found["grpo"]["num_steps"]) == (5, ("grpo",), 3)
    assert found["grpo"]["optimizer"]["b1"] == 0.75
    _, _, (stage,), _ = build(found)
    assert (stage.seed, stage.num_steps, stage.max_skipped) == (5, 3, 7)


def test_weights_of_rewards_reach_the_advantages(config):
    """Of two rewards that contradict each other the heavier one decides."""
    from absl import flags

    from jax_grpo.commands import train

    def advantages(first: float, second: float) -> np.ndarray:
        rewards = {"correctness": {"weight": first}, "thinking": {"weight": second}}
        line = ["p", f"--config={config}", "--config.stages=('grpo',)"]
        line += [f"--config.grpo.rewards={rewards}", "--config.grpo.algorithm.kl_weight=0.0"]
        line += ["--config.grpo.algorithm.advantage=centered"]
        values = flags.FlagValues()
        train.define_flags(values, line)
        values(line)
        _, _, (stage,), _ = build(read_config(values.config))
        assert stage.verifiers is not None
        assert stage.verifiers.weights == (first, second)
        shape, zeros = (1, 2, 3), jnp.zeros((1, 2, 3))
        rollout = Rollout(
            prompts=None,  # type: ignore[arg-type]
            completion_ids=zeros,
            lengths=jnp.full((1, 2), 3),
            mask=jnp.ones(shape, bool),
            behavior_logps=zeros,
            kept_logmass=zeros,
            truncated=jnp.zeros((1, 2), bool),
            temperature=jnp.float32(1),
        )
        values_ = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
        given = Rewards(values_, jnp.ones((1, 2, 2), bool))
        experience, _ = stage.algorithm.experience(rollout, given, Scores(), ())
        return np.asarray(experience.advantages)

    np.testing.assert_array_equal(advantages(3.0, 1.0), [[1.0, -1.0]])
    np.testing.assert_array_equal(advantages(0.0, 1.0), [[-0.5, 0.5]])
    np.testing.assert_array_equal(advantages(-2.0, 0.0), [[-1.0, 1.0]])


def test_configure_takes_the_signature_for_the_schema():
    def function(a: int, *, b: float = 0.5, c: str | None = None, given: object = None) -> Any:
        return a, b, c, given

    assert configure(function, {"a": 1, "c": None}, "x", given=3) == (1, 0.5, None, 3)
    assert configure(function, {"a": 1, "b": 2}, "x") == (1, 2, None, None)
    for section, expected in [
        ({"b": 1.0}, "config.x: a is missing"),
        ({"a": None}, "config.x: a is missing"),
        ({"a": 1, "d": 1}, "config.x: no key 'd'; valid keys: a, b, c"),
        ({"a": 1, "given": 1}, "config.x: no key 'given'; valid keys: a, b, c"),
        ({"a": "1"}, "config.x: a is '1', which is no int"),
        ({"a": 1, "c": 1}, "config.x: c is 1, which is no str | None"),
    ]:
        with pytest.raises(BadInput) as error:
            configure(function, section, "x", given=3)
        assert str(error.value) == expected


# --- Workdirs ------------------------------------------------------------------------------------


def test_workdirs_that_are_refused(here, config):
    command = ("train", f"--config={config}")
    assert refused(*command, "--workdir=gs://bucket/x") == (
        "jax_grpo train: --workdir is a local directory, not gs://bucket/x"
    )
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert refused(*command, "--workdir=full") == (
        "jax_grpo train: full is not empty and not a run's workdir (no config.json)"
    )
    assert "full/file" in refused(*command, "--workdir=full/file")
    assert "full/file" in refused(*command, "--workdir=full/file/w")
    Path("torn").mkdir()
    Path("torn/config.json").write_text('{"seed": ')
    assert "torn/config.json is not JSON" in refused(*command, "--workdir=torn")


def test_the_workdir_of_another_run(here, config):
    """All differences are listed, and none of what cannot matter."""
    assert run("train", f"--config={config}", "--workdir=w", "--config.mesh.data=3").code == 2
    assert tree(here) == {}
    Path("w").mkdir()
    first = {"seed": 1, "stages": ["sft"], "sft": {"rewards": {"a": {}}, "log_every": 3}}
    Path("w/config.json").write_text(json.dumps({**COMPLETE, **first, "one": 0}))
    Path("c.py").write_text(
        f"from ml_collections import ConfigDict\n\ndef get_config():\n"
        f"    return ConfigDict({ {**COMPLETE, 'one': {'algorithm': {}, 'log_every': 5}}!r})\n"
    )
    assert refused("train", "--config=c.py", "--workdir=w") == (
        "jax_grpo train: w holds a run with another config: "
        "one was 0, is not there; one.algorithm was not there, is {}; seed was 1, is 0; "
        "sft.rewards.a was {}, is not there; stages was ['sft'], is ['one']"
    )


# --- generate and score --------------------------------------------------------------------------


def write_prompts(rows: list[Any]) -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(workdir: Path | str, out: str, *flags: str) -> list[dict[str, Any]]:
    common = (f"--model={workdir}", "--prompts=prompts.jsonl", f"--out={out}")
    ended = run("generate", *common, "--num_generations=3", "--max_new_tokens=12", *flags)
    assert (ended.code, ended.out) == (0, ""), ended.err
    rows = read_lines(Path(out))
    assert ended.err == f"{len(rows)} completions in {out}\n"
    return rows


def test_generate_and_score_agree(here, workdir):
    tokenizer = arithmetic.tokenizer()
    write_prompts([{"prompt": prompt, "more": i} for i, prompt in enumerate(PROMPTS)])
    rows = generate(workdir, "a.jsonl", "--temperature=0.7", "--seed=3")
    names = "prompt_index completion_index text token_ids logps prompt_ids finish_reason".split()
    assert [list(row) for row in rows] == [names] * 18
    assert [(r["prompt_index"], r["completion_index"]) for r in rows] == list(np.ndindex(6, 3))
    for row in rows:
        ids = row["token_ids"]
        assert row["prompt_ids"] == tokenizer(PROMPTS[row["prompt_index"]]).input_ids
        assert row["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert len(row["logps"]) == len(ids)
        assert max(row["logps"]) < 0
        end = tokenizer.eos_token_id
        if row["finish_reason"] == "stop":
            assert ids.index(end) == len(ids) - 1
        else:
            assert (row["finish_reason"], len(ids), end in ids) == ("length", 12, False)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert len({tuple(row["token_ids"]) for row in rows}) > 9

    flags = ("--completions=a.jsonl", "--out=b.jsonl")
    ended = run("score", f"--model={workdir}", *flags, "--temperature=0.7", "--batch=4")
    assert (ended.code, ended.err) == (0, "18 completions in b.jsonl\n")
    scored = read_lines(Path("b.jsonl"))
    assert [{k: v for k, v in row.items() if k != "scored_logps"} for row in scored] == rows
    for row in scored:
        np.testing.assert_allclose(row["scored_logps"], row["logps"], atol=1e-4, rtol=0)
    gap = max(np.abs(np.subtract(row["scored_logps"], row["logps"])).max() for row in scored)
    assert ended.out.startswith("|logps - scored_logps|: mean ")
    assert float(ended.out.split()[-2]) == pytest.approx(gap, rel=5e-3, abs=1e-7)

    # at another temperature they are not these
    flags = ("--completions=a.jsonl", "--out=c.jsonl", "--batch=4")
    assert run("score", f"--model={workdir}", *flags).code == 0
    other = read_lines(Path("c.jsonl"))
    assert abs(other[0]["scored_logps"][0] - rows[0]["logps"][0]) > 1e-3


def test_the_seed_decides_and_the_batch_does_not(here, workdir):
    write_prompts([{"prompt": prompt} for prompt in PROMPTS])
    whole = generate(workdir, "a.jsonl", "--seed=3")
    parts = generate(workdir, "b.jsonl", "--seed=3", "--batch=4")  # 4 and a filled-up 2
    for x, y in zip(whole, parts, strict=True):
        np.testing.assert_allclose(x.pop("logps"), y.pop("logps"), atol=1e-4, rtol=0)
    assert whole == parts
    assert generate(workdir, "c.jsonl", "--seed=3", "--batch=4") == read_lines(Path("b.jsonl"))
    other = generate(workdir, "d.jsonl", "--seed=4", "--batch=4")
    same = [x["token_ids"] == y["token_ids"] for x, y in zip(whole, other, strict=True)]
    assert sum(same) < 9


def test_greedy(here, workdir):
    write_prompts([{"prompt": prompt} for prompt in PROMPTS])
    rows = generate(workdir, "a.jsonl", "--greedy", "--seed=1", "--temperature=2.0")
    for i in range(0, 18, 3):
        assert rows[i]["token_ids"] == rows[i + 1]["token_ids"] == rows[i + 2]["token_ids"]
    flags = ("--completions=a.jsonl", "--out=b.jsonl", "--batch=4")
    assert run("score", f"--model={workdir}", *flags).code == 0
    for row in read_lines(Path("b.jsonl")):  # log-probs are those at a temperature of 1
        np.testing.assert_allclose(row["scored_logps"], row["logps"], atol=1e-4, rtol=0)

    # with one token left to draw from, sampling is greedy, and log-probs are of the whole
    only = generate(workdir, "c.jsonl", "--top_k=1")
    assert [row["token_ids"] for row in only] == [row["token_ids"] for row in rows]
    for x, y in zip(only, rows, strict=True):
        np.testing.assert_allclose(x["logps"], y["logps"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--temperature=0", "--temperature is 0.0: above 0, or use --greedy"),
        ("--temperature=nan", "--temperature is nan: above 0, or use --greedy"),
        ("--temperature=inf", "--temperature is inf: above 0, or use --greedy"),
        ("--top_p=0", "top_p is 0.0: it must be in (0, 1]"),
        ("--top_k=-1", "top_k is -1: it must be 0 (off) or positive"),
        ("--min_p=2", "min_p is 2.0: it must be in [0, 1]"),
        ("--num_generations=0", "flag --num_generations=0: 0 is not a positive integer"),
        ("--max_new_tokens=512", "--max_new_tokens=512 exceeds the model's context"),
        ("--max_new_tokens=511", "no rows left: dropped all 1 prompts longer than 1 tokens"),
        ("--seed=-1", "flag --seed=-1: -1 is not an integer in the range [0, 4294967295]"),
        ("--seed=4294967296", "is not an integer in the range [0, 4294967295]"),
        ("--tensor=3", "mesh data -1 x fsdp 1 x tensor 3 does not fit 1 devices"),
        ("--dtype=int8", "dtype 'int8' is not one of: auto, float32, bfloat16"),
        ("--system=Hi", "a system message needs messages as prompts, or chat=True"),
        ("--chat", "the prompt of row 0 is a chat, but the tokenizer has no chat template"),
        ("--model=./none", "./none: no such model directory or .gguf file"),
        ("--model=some/model", "some/model: neither a directory here nor to be had from the hub"),
        ("--model=.", "there is no config.json"),
        ("--prompts=none.jsonl", "no such data file: none.jsonl"),
        ("--out=none/out.jsonl", "--out=none/out.jsonl is not a file in a directory"),
        ("--out=.", "--out=. is not a file in a directory that is there"),
        ("--out=", "--out= is not a file in a directory that is there"),
    ],
)
def test_generations_that_are_refused(here, workdir, flag, expected):
    write_prompts([{"prompt": "1+2=?"}])
    Path("out.jsonl").write_text("what was there before")
    flags = (f"--model={workdir}", "--prompts=prompts.jsonl", "--out=out.jsonl", flag)
    line = refused("generate", *flags)
    assert line.startswith("jax_grpo generate: ")
    assert expected in line


def test_prompts_that_are_refused(here, workdir):
    flags = (f"--model={workdir}", "--prompts=prompts.jsonl", "--out=out.jsonl")
    for row, expected in [
        ({"prompt": [{"role": "user", "content": "1+2"}]}, "the tokenizer has no chat template"),
        ({"text": "1+2=?"}, "prompts.jsonl: row 0 has no column 'prompt'; it has: text"),
        ({"prompt": None}, "the prompt of row 0 is neither text nor a list of messages"),
        ("1+2=?", "prompts.jsonl: line 1 is not an object but '1+2=?'"),
    ]:
        write_prompts([row])
        assert expected in refused("generate", *flags)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("{", "c.jsonl: line 1 is not JSON"),
        ("[1]", "c.jsonl: row 0 is not an object but 1"),
        ({"token_ids": ...}, "c.jsonl: row 0 has no column 'token_ids'; it has: prompt_ids, logps"),
        ({"token_ids": [5, 24]}, "line 1: token_ids are not token ids below 24"),
        ({"token_ids": [5, -1]}, "line 1: token_ids are not token ids below 24"),
        ({"token_ids": [True, 1]}, "line 1: token_ids are not token ids below 24"),
        ({"token_ids": "51"}, "line 1: token_ids are not token ids below 24"),
        ({"prompt_ids": [2.0]}, "line 1: prompt_ids are not token ids below 24"),
        ({"prompt_ids": []}, "line 1: prompt_ids are empty"),
        ({"prompt_ids": [3] * 511}, "line 1: longer than the model's context of 512"),
        ({"logps": [-1.0]}, "line 1: logps are not one number for each of token_ids"),
        ({"logps": 3}, "line 1: logps are not one number for each of token_ids"),
        ({"logps": None}, "line 1: logps are not one number for each of token_ids"),
        ({"logps": ["a", "b"]}, "line 1: logps are not one number for each of token_ids"),
    ],
)
def test_completions_that_are_refused(here, workdir, changes, expected):
    row: dict[str, Any] = {"prompt_ids": [3, 4], "token_ids": [5, 1], "logps": [-1.0, -2.0]}
    text = changes
    if isinstance(changes, dict):
        text = json.dumps({k: v for k, v in {**row, **changes}.items() if v is not ...})
    Path("c.jsonl").write_text(text)
    flags = (f"--model={workdir}", "--completions=c.jsonl", "--out=out.jsonl")
    line = refused("score", *flags)
    assert line.startswith("jax_grpo score: ")
    assert expected in line


def test_scores_that_are_refused(here, workdir):
    Path("c.jsonl").write_text('{"prompt_ids": [3], "token_ids": [5]}\n')
    for flag, expected in [
        ("--temperature=0", "--temperature is 0.0: it must be above 0"),
        ("--temperature=nan", "--temperature is nan: it must be above 0"),
        ("--completions=none.jsonl", "no such data file: none.jsonl"),
        ("--model=./none", "./none: no such model directory or .gguf file"),
        ("--out=none/out.jsonl", "--out=none/out.jsonl is not a file in a directory"),
        ("--batch=0", "flag --batch=0: 0 is not a positive integer"),
    ]:
        flags = (f"--model={workdir}", "--completions=c.jsonl", "--out=out.jsonl", flag)
        assert expected in refused("score", *flags)


def test_score_takes_what_generate_did_not_write(here, workdir):
    """No log-probs to compare with, groups of different sizes, and empty completions."""
    rows = [
        {"prompt_ids": [3, 4], "token_ids": [5, 6, 1], "mine": {"x": 1}},
        {"prompt_ids": [3, 4], "token_ids": []},
        {"prompt_ids": [7], "token_ids": [5, 1]},
        {"prompt_ids": [3, 4], "token_ids": [5, 6, 1]},  # the first again, in another group
    ]
    Path("c.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    flags = (f"--model={workdir}", "--completions=c.jsonl", "--out=out.jsonl")
    ended = run("score", *flags)
    assert ended == (0, "", "4 completions in out.jsonl\n")
    found = read_lines(Path("out.jsonl"))
    logps = [row.pop("scored_logps") for row in found]
    assert found == rows
    assert [len(x) for x in logps] == [3, 0, 2, 3]
    np.testing.assert_allclose(logps[0], logps[3], atol=1e-5, rtol=0)
    assert all(x < 0 for row in logps for x in row)

    Path("c.jsonl").write_text('{"prompt_ids": [3, 4], "token_ids": []}')
    assert run("score", *flags).code == 0
    assert read_lines(Path("out.jsonl"))[0]["scored_logps"] == []


def test_lines_are_written_whole_or_not_at_all(here):
    Path("out.jsonl").write_text("before\n")

    def lines() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_lines("out.jsonl", lines())
    assert tree(here) == {"out.jsonl": b"before\n"}
    assert write_lines("out.jsonl", [{"a": "\u2028é"}, {"b": 2}]) == 2
    assert tree(here) == {"out.jsonl": '{"a": "\u2028é"}\n{"b": 2}\n'.encode()}


def test_a_run_is_read_while_it_writes(here, workdir):
    """A checkpoint that `train` is still writing is left alone by whoever reads older ones."""
    copy = here / "live"
    shutil.copytree(workdir, copy)
    checkpoints = copy / "checkpoints" / "sft"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4"]
    shutil.copytree(checkpoints / "2", checkpoints / "1")  # more than are kept by default
    (checkpoints / "6.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    before = tree(copy)
    write_prompts([{"prompt": prompt} for prompt in PROMPTS])
    rows = generate(copy, "a.jsonl", "--seed=3")
    assert run("export", f"--model={copy}", "--out=new").code == 0
    assert tree(copy) == before
    assert rows == generate(workdir, "b.jsonl", "--seed=3")


# --- export --------------------------------------------------------------------------------------


def test_what_is_exported_scores_alike(here, workdir):
    write_prompts([{"prompt": prompt} for prompt in PROMPTS])
    rows = generate(workdir, "a.jsonl", "--seed=3")
    ended = run("export", f"--model={workdir}", "--out=there/model", "--dtype=float32")
    assert ended == (0, "", "exported to there/model\n")
    for model, out in ((workdir, "b.jsonl"), ("there/model", "c.jsonl")):
        flags = ("--completions=a.jsonl", f"--out={out}", "--batch=4")
        assert run("score", f"--model={model}", *flags).code == 0
    assert read_lines(Path("b.jsonl")) == read_lines(Path("c.jsonl"))
    assert generate("there/model", "d.jsonl", "--seed=3") == rows

    before = tree(here)
    line = refused("export", f"--model={workdir}", "--out=there/model")
    assert line == "jax_grpo export: there/model exists and is not an empty directory"
    flags = ("--out=there/model", "--dtype=bfloat16", "--overwrite")
    assert run("export", f"--model={workdir}", *flags).code == 0
    after = tree(here)
    assert before.keys() == after.keys()
    weights = "there/model/model.safetensors"
    assert len(after[weights]) < 0.51 * len(before[weights])
    params = load("there/model", make_mesh(devices=jax.devices()[:1]), jnp.float32).params
    exact = load(str(workdir), make_mesh(devices=jax.devices()[:1]), jnp.float32).params
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), exact)
    jax.tree.map(np.testing.assert_array_equal, params, rounded)


def test_chats_go_through_the_template_that_is_exported(here, workdir):
    tokenizer = arithmetic.tokenizer()
    tokenizer.chat_template = CHAT
    loaded = load(str(workdir), make_mesh(devices=jax.devices()[:1]))
    export.export_model(
        "chat", loaded.config, loaded.params, tokenizer, loaded.end_ids, jnp.float32
    )

    def asked(*flags: str) -> list[str]:
        rows = generate("chat", "a.jsonl", *flags)
        return [tokenizer.decode(row["prompt_ids"]) for row in rows][::3]

    # as many prompts as above, and as long, so that nothing is compiled again
    write_prompts([{"prompt": "1+2"}] * 5 + [{"prompt": [{"role": "user", "content": "1+2-1+4+"}]}])
    assert asked() == ["1+2"] * 5 + ["1+2-1+4+="]
    assert asked("--chat") == ["1+2="] * 5 + ["1+2-1+4+="]
    write_prompts([{"prompt": "1+2"}] * 5 + [{"prompt": "1+2-1+"}])
    assert asked("--chat", "--system=5") == ["5=1+2="] * 5 + ["5=1+2-1+="]


def test_exports_that_are_refused(here, workdir):
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    for flags, expected in [
        ([f"--model={workdir}", "--out=full"], "full exists and is not an empty directory"),
        ([f"--model={workdir}", "--out=full/file"], "full/file exists and is not an empty"),
        ([f"--model={workdir}", "--out=full/file/x"], "Not a directory"),
        ([f"--model={workdir}", "--out=new", "--dtype=int8"], "--dtype=int8 is not one of: float"),
        (["--model=./none", "--out=new"], "./none: no such model directory or .gguf file"),
        (["--model=full", "--out=new"], "full: there is no config.json"),
    ]:
        assert expected in refused("export", *flags)
    Path("begun").mkdir()  # a run that has not come to its first checkpoint
    export.save_metadata(
        Path("begun/model"), *load(str(workdir), make_mesh(devices=jax.devices()[:1]))[::2]
    )
    Path("begun/config.json").write_text('{"stages": ["sft"]}')
    assert refused("export", "--model=begun", "--out=new") == (
        "jax_grpo export: begun: this run has no checkpoint yet"
    )
