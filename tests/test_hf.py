from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models

from jax_grpo.models import export, hf
from jax_grpo.models.config import LlamaConfig, RopeScaling, config_from_hf, config_to_hf
from jax_grpo.models.heads import from_policy, scalar_axes
from jax_grpo.models.llama import forward, head, init_params, param_axes
from jax_grpo.models.names import expected_tensors
from jax_grpo.scoring import Layout, reward_scores
from jax_grpo.types import PromptBatch

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = sorted(path.stem.removeprefix("llama_") for path in FIXTURES.glob("llama_*.npz"))

TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def make_tokenizer(chat_template: str | None = None) -> transformers.PreTrainedTokenizerFast:
    vocab = {"<eos>": 0, "<bos>": 1, "<|im_start|>": 2, "<|im_end|>": 3}
    vocab |= {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz-W ", 4)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in list(vocab)[:4]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=chat_template,
    )


def make_params(config: LlamaConfig = TINY) -> dict[str, Any]:
    """Random parameters, biases and norms too."""
    params = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def logits_of(config: LlamaConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of token ids `[B, T]`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(config, params, jnp.asarray(tokens)[:, None], positions[:, None])
    return np.asarray(hidden[:, 0] @ head(params).T)


def relative_gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, dict(a), dict(b))


def write_directory(
    directory: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Path:
    """A Hugging Face directory, its weights written by the safetensors package."""
    directory.mkdir(exist_ok=True)
    make_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """TINY as a Hugging Face directory in one file of float32."""
    export.export_model(
        tmp_path / "model", TINY, make_params(), make_tokenizer(), (0,), jnp.float32
    )
    return tmp_path / "model"


def edit_weights(directory: Path, **changes: np.ndarray | None) -> None:
    """Adds, replaces or (None) removes tensors, dots of whose names are written as `__`."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): x for name, x in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


# ------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    with np.load(FIXTURES / f"llama_{kind}.npz") as z:
        weights = {
            name.removeprefix("weight/"): z[name].astype(np.float32)
            for name in z.files
            if name.startswith("weight/")
        }
        directory = write_directory(tmp_path / kind, weights, json.loads(str(z["config"])))
        tokens, theirs = z["tokens"], z["logits"]
    loaded = hf.load_model(directory)
    assert relative_gap(logits_of(loaded.config, loaded.params, tokens), theirs) <= 1e-5


def test_every_kind_has_its_fixture() -> None:
    assert len(KINDS) == 11


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_we_export(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with np.load(FIXTURES / f"llama_{kind}.npz") as z:
        config, tokens = config_from_hf(json.loads(str(z["config"]))), z["tokens"]
    params = make_params(config)
    export.export_model(tmp_path / "model", config, params, make_tokenizer(), (0, 3), jnp.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generation_config.eos_token_id == [0, 3]
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    assert relative_gap(logits_of(config, params, tokens), theirs) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_fixtures_are_what_transformers_says_today(kind: str) -> None:
    pytest.importorskip("torch")
    make = import_script()
    with np.load(FIXTURES / f"llama_{kind}.npz") as z:
        logits = make.logits_of(make.make_model(kind), make.make_tokens())
        assert relative_gap(logits, z["logits"]) <= 1e-5


def import_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make", FIXTURES / "make_llama_parity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"rope_scaling": RopeScaling("llama3", 8.0)},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_export_and_load_is_the_identity(
    changes: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    config = dataclasses.replace(TINY, **changes)
    params = jax.tree.map(lambda x: x.astype(dtype), make_params(config))
    export.export_model(tmp_path / "model", config, params, make_tokenizer(), (0, 3), dtype)
    loaded = hf.load_model(tmp_path / "model", dtype)
    assert loaded.config == config
    assert loaded.end_ids == (0, 3)
    assert_same(loaded.params, params)
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}


def test_shards_with_an_index(tmp_path: Path) -> None:
    params = make_params()
    directory = tmp_path / "model"
    export.export_model(
        directory, TINY, params, make_tokenizer(), (0,), jnp.float32, max_shard_bytes=8000
    )
    files = sorted(directory.glob("model-*.safetensors"))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert not (directory / "model.safetensors").exists()
    assert all(file.stat().st_size < 8000 + 3000 for file in files)  # and the header
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    for file in files:  # as the safetensors package reads them
        assert {index["weight_map"][name] for name in load_file(file)} == {file.name}
    assert_same(hf.load_model(directory).params, params)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    args = (TINY, make_params(), make_tokenizer(), (0,), jnp.float32)
    export.export_model(tmp_path / "model", *args, max_shard_bytes=8000)
    gone = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        hf.load_model(tmp_path / "model")


def test_layout_on_disk_by_hand(exported: Path) -> None:
    disk, params = load_file(exported / "model.safetensors"), make_params()
    q, o = np.asarray(params["layers"]["q"]), np.asarray(params["layers"]["o"])
    assert disk["model.layers.1.self_attn.q_proj.weight"].shape == (24, 16)
    # head 2, its dimension 5, from input 7
    assert disk["model.layers.1.self_attn.q_proj.weight"][2 * 6 + 5, 7] == q[1, 7, 2, 5]
    assert disk["model.layers.2.self_attn.o_proj.weight"][7, 2 * 6 + 5] == o[2, 2, 5, 7]
    gate = np.asarray(params["layers"]["gate"])
    assert disk["model.layers.0.mlp.gate_proj.weight"][3, 4] == gate[0, 4, 3]
    assert disk["lm_head.weight"].shape == disk["model.embed_tokens.weight"].shape == (32, 16)


def test_sharded_parameters_export_the_same(exported: Path, tmp_path: Path) -> None:
    params = jax.tree.map(jax.device_put, make_params(), spread(TINY))
    again = tmp_path / "again"
    export.export_model(again, TINY, params, make_tokenizer(), (0,), jnp.float32)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (exported / name).read_bytes()


# ----------------------------------------------------------------------------------- sharding


def spread(config: LlamaConfig) -> Any:
    """Shardings over eight devices in which every axis of a parameter but heads' is cut."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    cut = {"embed": "a", "heads": "b", "kv_heads": "b", "mlp": "b", "vocab": "b", "head_dim": "c"}
    axes = param_axes(config)
    return jax.tree.map(
        lambda names: NamedSharding(mesh, PartitionSpec(*[cut.get(n) for n in names])),
        axes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("as_tree", [True, False])
def test_sharded_loading_equals_unsharded(exported: Path, as_tree: bool) -> None:
    loaded = hf.load_model(exported, shardings=spread(TINY) if as_tree else spread)
    assert_same(loaded.params, make_params())
    assert loaded.params["layers"]["q"].sharding == spread(TINY)["layers"]["q"]
    assert loaded.params["layers"]["q"].addressable_shards[0].data.shape == (3, 8, 2, 3)


def test_each_shard_is_read_once_and_alone(exported: Path) -> None:
    sizes: dict[str, list[int]] = {}

    def record(name: str, tensor: hf.Tensor) -> hf.Tensor:
        def read(index: hf.Index) -> np.ndarray:
            part = tensor.read(index)
            sizes.setdefault(name, []).append(part.size)
            return part

        return tensor._replace(read=read)

    tensors = hf.open_checkpoint(exported).tensors
    tensors = {name: record(name, tensor) for name, tensor in tensors.items()}
    hf.load_params(TINY, tensors, jnp.float32, spread(TINY))
    assert sizes["model.embed_tokens.weight"] == [16 * 8] * 4  # the other four are replicas
    assert sizes["model.norm.weight"] == [16]
    assert sizes["model.layers.0.mlp.gate_proj.weight"] == [12 * 8] * 4


def test_long_tensors_are_read_in_chunks(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_CHUNK_BYTES", 100)
    assert_same(hf.load_model(exported).params, make_params())
    assert_same(hf.load_model(exported, shardings=spread).params, make_params())


def test_loaded_parameters_can_be_donated(exported: Path) -> None:
    loaded = hf.load_model(exported, shardings=spread).params
    update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    assert_same(update(loaded), jax.tree.map(lambda x: x + 1, make_params()))
    assert_same(hf.load_model(exported, shardings=spread).params, make_params())


# ------------------------------------------------------------------------------ reward models

QWEN2 = dataclasses.replace(TINY, qkv_bias=True)
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


def make_reward_model(config: LlamaConfig = TINY) -> Any:
    return from_policy(config, make_params(config), jax.random.key(2))


def export_reward_model(directory: Path, config: LlamaConfig = TINY, **settings: Any) -> Path:
    settings = {"tokenizer": make_tokenizer(), "end_ids": (0,), "dtype": jnp.float32, **settings}
    export.export_model(directory, config, make_reward_model(config), **settings)
    return directory


@pytest.mark.parametrize("config", [TINY, TIED, QWEN2], ids=["llama", "tied", "qwen2"])
def test_a_reward_model_comes_back_as_it_went(config: LlamaConfig, tmp_path: Path) -> None:
    directory = export_reward_model(tmp_path / "m", config)
    loaded = hf.load_model(directory, scalar_head=True)
    assert loaded.config == config and loaded.end_ids == (0,)
    assert_same(loaded.params, make_reward_model(config))
    disk, raw = load_file(directory / "model.safetensors"), hf.read_json(directory / "config.json")
    policy = {name for name, _ in expected_tensors(config)} - {"lm_head.weight"}
    assert disk.keys() == policy | {"score.weight"} and disk["score.weight"].shape == (1, 16)
    family = "Qwen2" if config.qkv_bias else "Llama"
    assert raw["architectures"] == [f"{family}ForSequenceClassification"]
    assert transformers.AutoConfig.from_pretrained(directory).num_labels == 1


def test_a_reward_model_is_read_straight_into_its_shards(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    cut = {"embed": "a", "mlp": "b", "norm": "b"}
    where = lambda names: NamedSharding(mesh, PartitionSpec(*[cut.get(n) for n in names]))  # noqa: E731
    spread = jax.tree.map(where, scalar_axes(TINY), is_leaf=lambda x: isinstance(x, tuple))
    directory = export_reward_model(tmp_path / "m")
    loaded = hf.load_model(directory, shardings=spread, scalar_head=True)
    assert_same(loaded.params, make_reward_model())
    assert loaded.params["score"].addressable_shards[0].data.shape == (4,)


@pytest.mark.parametrize(
    ("given", "end_ids", "expected"),
    [
        (None, (0, 3), "<bos>"),
        ("<eos>", (0, 3), "<bos>"),  # as many a script sets it
        ("<|im_end|>", (0, 3), "<bos>"),  # which ends completions, too
        (None, (0, 1, 3), "<|im_start|>"),
        ("a", (0, 3), "a"),
    ],
)
def test_a_reward_model_pads_with_what_ends_nothing(
    given: str | None, end_ids: tuple[int, ...], expected: str, tmp_path: Path
) -> None:
    """transformers scores at the last token that is no padding: it must not be the end token."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = given
    export_reward_model(tmp_path / "m", tokenizer=tokenizer, end_ids=end_ids)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    raw = hf.read_json(tmp_path / "m" / "config.json")
    assert written.pad_token == expected and raw["pad_token_id"] == written.pad_token_id
    assert tokenizer.pad_token == given  # the one given stays as it was


def test_a_reward_model_without_a_token_to_pad_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pads with a token that ends no completion"):
        export_reward_model(tmp_path / "m", end_ids=(0, 1, 2, 3))
    assert not (tmp_path / "m").exists()


def test_what_is_no_reward_model_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    right = "LlamaForSequenceClassification or Qwen2ForSequenceClassification with num_labels=1"
    with pytest.raises(ValueError) as error:
        hf.load_model(exported, scalar_head=True)
    assert str(error.value) == (
        f"{exported}: a model without score.weight, such as a language model; "
        f"a reward model is a {right}"
    )
    directory = export_reward_model(tmp_path / "m")
    with pytest.raises(ValueError, match=r"missing: lm_head.weight; unexpected: score.weight"):
        hf.load_model(directory)
    edit_weights(directory, score__weight=np.zeros((3, 16), np.float32))
    with pytest.raises(ValueError, match=f"a classifier with num_labels=3; .* {right}"):
        hf.load_model(directory, scalar_head=True)
    # of tokens, not of sequences: it has a bias
    edit_weights(
        directory, score__weight=np.zeros((1, 16), np.float32), score__bias=np.ones(1, np.float32)
    )
    with pytest.raises(ValueError, match=r"unexpected: score.bias"):
        hf.load_model(directory, scalar_head=True)
    raw = hf.read_json(directory / "config.json")
    (directory / "config.json").write_text(json.dumps({**raw, "model_type": "modernbert"}))
    with pytest.raises(ValueError, match="model_type 'modernbert' is not one of: llama, qwen2"):
        hf.load_model(directory, scalar_head=True)


@pytest.mark.parametrize("config", [TINY, TIED, QWEN2], ids=["llama", "tied", "qwen2"])
def test_scores_equal_transformers(config: LlamaConfig, tmp_path: Path) -> None:
    """Of a batch that transformers pads: ours at the end token, theirs at the last but padding."""
    torch = pytest.importorskip("torch")
    directory = export_reward_model(tmp_path / "m", config)
    kind = transformers.AutoModelForSequenceClassification
    model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    lengths = np.array([9, 4, 6])
    tokens = np.random.default_rng(0).integers(4, 32, (3, 9))
    tokens[np.arange(3), lengths - 1] = 0  # <eos>
    exists = np.arange(9) < lengths[:, None]
    padded = np.where(exists, tokens, model.config.pad_token_id)
    with torch.no_grad():
        theirs = model(torch.from_numpy(padded), torch.from_numpy(exists)).logits.numpy()
    prompts = PromptBatch(jnp.asarray(tokens[:, :2]), jnp.full(3, 2), jnp.arange(3))
    completions, ends = jnp.asarray(tokens[:, None, 2:]), jnp.asarray(lengths[:, None] - 2)
    layout = Layout(*prompts[:2], completions, ends, jnp.ones(3))
    ours = reward_scores(config, make_reward_model(config), layout)
    assert relative_gap(np.asarray(ours), theirs) <= 1e-5


# --------------------------------------------------------------------------------- bad input


def test_one_error_lists_all_that_does_not_fit(exported: Path) -> None:
    edit_weights(
        exported,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__0__self_attn__q_proj__weight=np.zeros((16, 24), np.float32),
        model__layers__0__mlp__experts__weight=np.zeros(3, np.float32),
        lm_head__weight=np.zeros((32, 16), np.int32),
    )
    with pytest.raises(ValueError) as error:
        hf.load_model(exported)
    said = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight;" in said
    assert "unexpected: model.layers.0.mlp.experts.weight;" in said
    assert "misshapen: model.layers.0.self_attn.q_proj.weight [16, 24] instead of [24, 16]" in said
    assert "unreadable: lm_head.weight (of type I32)" in said
    assert "\n" not in said


def test_inv_freq_of_old_checkpoints_is_passed_over(exported: Path) -> None:
    edit_weights(exported, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(3, np.float32))
    assert_same(hf.load_model(exported).params, make_params())


def test_a_tied_head_may_be_there_twice(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    params = make_params(config)
    export.export_model(tmp_path / "m", config, params, make_tokenizer(), (0,), jnp.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    edit_weights(tmp_path / "m", lm_head__weight=np.asarray(params["embed"]))
    assert_same(hf.load_model(tmp_path / "m").params, params)
    edit_weights(tmp_path / "m", lm_head__weight=np.asarray(params["embed"]) + 1)
    with pytest.raises(ValueError, match="differs from the embedding"):
        hf.load_model(tmp_path / "m")


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_every_float_dtype_is_read(dtype: Any, exported: Path) -> None:
    kinds = {"float64": "F64", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    weights = load_file(exported / "model.safetensors")
    header, data = {}, b""
    for name, value in weights.items():
        raw = value.astype(dtype).tobytes()
        header[name] = {
            "dtype": kinds[np.dtype(dtype).name],
            "shape": value.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file = exported / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), make_params())
    assert_same(hf.load_model(exported).params, rounded)


def test_files_that_are_broken(exported: Path) -> None:
    file = exported / "model.safetensors"
    whole = file.read_bytes()
    for content, said in [
        (whole[:-10], "cut short"),
        (whole[:100], "cut short"),
        (b"", "cut short"),
        ((12).to_bytes(8, "little") + b"no json here", "no safetensors file"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=said) as error:
            hf.load_model(exported)
        assert str(error.value).startswith(str(exported))
    file.unlink()
    with pytest.raises(ValueError, match="missing: model.safetensors"):
        hf.load_model(exported)
    (exported / "tokenizer.json").unlink()
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="there is no tokenizer"):
        hf.load_model(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        hf.load_model(exported)


@pytest.mark.parametrize("source", ["no/such/directory", "nowhere/no-such-model", "lost.gguf"])
def test_a_model_that_is_nowhere(source: str) -> None:
    with pytest.raises(FileNotFoundError) as error:
        hf.load_model(source)
    assert str(error.value).startswith(f"{source}: ")
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------- ends


def test_end_ids_are_the_union() -> None:
    tokenizer = make_tokenizer(CHATML)
    assert hf.find_end_ids(tokenizer) == (0, 3)  # the tokenizer's own, the template's
    assert hf.find_end_ids(tokenizer, {"eos_token_id": [9, 3]}, {"eos_token_id": 7}) == (0, 3, 7, 9)
    assert hf.find_end_ids(make_tokenizer(), {"eos_token_id": None}, {}) == (0,)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{{ raise_exception('no') }}", (0,)),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", (0,)),
        ("{% for m in messages %}{{ m['content'] }} <bos>{% endfor %}", (0, 1)),
        ("{% for m in messages %}<bos>{{ m['role'] }}{% endfor %}", (0,)),
    ],
)
def test_end_of_turn_of_odd_templates(template: str, ends: tuple[int, ...]) -> None:
    assert hf.find_end_ids(make_tokenizer(template)) == ends


def test_end_ids_survive_the_round_trip(tmp_path: Path) -> None:
    args = (TINY, make_params(), make_tokenizer(CHATML), (0, 3, 5))
    export.export_model(tmp_path / "m", *args)
    loaded = hf.load_model(tmp_path / "m")
    assert loaded.end_ids == (0, 3, 5)
    turns = [{"role": "user", "content": "abc"}]
    assert loaded.tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>user\nabc<|im_end|>\n"
    )
    assert loaded.tokenizer.encode("ab<|im_end|>") == [4, 5, 3]


# ------------------------------------------------------------------------------------- export


def test_export_does_not_overwrite_unasked(exported: Path) -> None:
    args = (TINY, make_params(), make_tokenizer(), (0,), jnp.float32)
    with pytest.raises(FileExistsError, match="not an empty directory"):
        export.export_model(exported, *args)
    (exported / "config.json").unlink()
    export.export_model(exported, *args, overwrite=True)
    assert_same(hf.load_model(exported).params, make_params())
    assert [path.name for path in exported.parent.iterdir()] == ["model"]
    (exported.parent / "empty").mkdir()
    export.export_model(exported.parent / "empty", *args)


def test_a_failed_export_loses_nothing(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(export, "_save_tokenizer", fail)
    params = jax.tree.map(lambda x: x + 1, make_params())
    with pytest.raises(OSError, match="disk full"):
        export.export_model(exported, TINY, params, make_tokenizer(), (0,), overwrite=True)
    assert_same(hf.load_model(exported).params, make_params())


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    other = dataclasses.replace(TINY, num_layers=2)
    with pytest.raises(ValueError, match="shapes"):
        export.export_model(tmp_path / "m", other, make_params(), make_tokenizer())
    with pytest.raises(ValueError, match="int8"):
        export.export_model(tmp_path / "m", TINY, make_params(), make_tokenizer(), (), jnp.int8)
    assert not list(tmp_path.iterdir())


def test_exports_are_in_a_spelling_that_transformers_4_reads(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    export.export_model(tmp_path / "m", TINY, make_params(), tokenizer)
    content = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert content["additional_special_tokens"] == ["<|im_end|>"]
    assert "extra_special_tokens" not in content
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["rope_theta"] == 10000.0 and "rope_parameters" not in raw
    assert {**raw, **config_to_hf(TINY)} == raw
