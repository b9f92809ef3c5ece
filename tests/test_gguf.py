from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_grpo.models import export, hf
from jax_grpo.models.config import RopeScaling, config_to_hf
from jax_grpo.models.gguf import build_tokenizer
from jax_grpo.models.llama import forward, head, param_axes

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType

D, F, N, H, K, V = 256, 512, 2, 4, 2, 32
HEAD_DIM = D // H
LAYER = {
    "attn_q": ("q", (D, D)),
    "attn_k": ("k", (K * HEAD_DIM, D)),
    "attn_v": ("v", (K * HEAD_DIM, D)),
    "attn_output": ("o", (D, D)),
    "ffn_gate": ("gate", (F, D)),
    "ffn_up": ("up", (F, D)),
    "ffn_down": ("down", (D, F)),
}
BIASES = {"attn_q": "q_bias", "attn_k": "k_bias", "attn_v": "v_bias"}


def encode(rng: np.random.Generator, shape: tuple[int, int], kind: Any) -> np.ndarray:
    """Random weights as the file stores them; K-quants as random blocks of small scales."""
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quants.quantize(0.1 * rng.standard_normal(shape, np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    places = [size - 2] if kind.name == "Q6_K" else [0, 2]  # float16 scales
    for start in places:
        scale = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it, on rows of any content."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def write(
    path: Path, kind: Any, arch: str = "llama", extra: Any = None, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Writes a random model, and returns the parameters that it should have."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(N)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(K)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    for key, value in tokenizer_fields().items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    expected: dict[str, Any] = {"layers": {}}

    def add_matrix(name: str, shape: tuple[int, int], heads: int = 0) -> np.ndarray:
        data = encode(rng, shape, kind)
        stored = permute(data, heads) if heads and arch == "llama" else data
        if name not in without:
            writer.add_tensor(name, stored, raw_dtype=kind)
        return gguf.quants.dequantize(data, kind).reshape(shape)

    def add_vector(name: str, size: int, heads: int = 0) -> np.ndarray:
        data = rng.standard_normal(size, np.float32)
        if name not in without:
            writer.add_tensor(name, permute(data, heads) if heads and arch == "llama" else data)
        return data

    expected["embed"] = add_matrix("token_embd.weight", (V, D))
    expected["norm"] = add_vector("output_norm.weight", D)
    for i in range(N):
        layer = {
            "attn_norm": add_vector(f"blk.{i}.attn_norm.weight", D),
            "mlp_norm": add_vector(f"blk.{i}.ffn_norm.weight", D),
        }
        for name, (leaf, shape) in LAYER.items():
            heads = {"attn_q": H, "attn_k": K}.get(name, 0)
            layer[leaf] = add_matrix(f"blk.{i}.{name}.weight", shape, heads).T
            if arch == "qwen2" and name in BIASES:
                layer[BIASES[name]] = add_vector(f"blk.{i}.{name}.bias", shape[0])
        for leaf, heads in (("q", H), ("k", K), ("v", K)):
            layer[leaf] = layer[leaf].reshape(D, heads, HEAD_DIM)
            if f"{leaf}_bias" in layer:
                layer[f"{leaf}_bias"] = layer[f"{leaf}_bias"].reshape(heads, HEAD_DIM)
        layer["o"] = layer["o"].reshape(H, HEAD_DIM, D)
        for leaf, value in layer.items():
            expected["layers"].setdefault(leaf, []).append(value)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected["layers"] = {leaf: np.stack(values) for leaf, values in expected["layers"].items()}
    return expected


def byte_tokens() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    """The fields of a small byte-level tokenizer; None leaves one out."""
    merged = ["12", "123", "1234", "ab", "xyz", "<think>"]
    special = ["<eos>", "<bos>", "<|eot|>", "[PAD]"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": byte_tokens() + merged + special,
        "token_type": [1] * (256 + 5) + [4, 3, 3, 3, 5],
        "merges": ["1 2", "12 3", "123 4", "a b"],
        "eos_token_id": 262,
        "bos_token_id": 263,
    } | changes
    return {f"tokenizer.ggml.{key}": x for key, x in fields.items() if x is not None}


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, dict(a), dict(b))


# ------------------------------------------------------------------------------------- weights

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_dequantised(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", Kind[name])
    loaded = hf.load_model(tmp_path / "m.gguf")
    assert_same(loaded.params, expected)
    assert np.isfinite(expected["embed"]).all() and expected["embed"].std() > 1e-3
    assert loaded.config.tie_word_embeddings and loaded.config.head_dim == HEAD_DIM
    assert loaded.config.rms_norm_eps == 1e-5  # not 9.999999747378752e-06


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_K", "Q8_0"])
def test_sharded_loading_equals_unsharded(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", Kind[name])
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    cut = {"embed": "a", "heads": "b", "kv_heads": "b", "mlp": "b", "vocab": "b"}

    def spread(config: Any) -> Any:
        return jax.tree.map(
            lambda names: NamedSharding(mesh, PartitionSpec(*[cut.get(n) for n in names])),
            param_axes(config),
            is_leaf=lambda x: isinstance(x, tuple),
        )

    loaded = hf.load_model(tmp_path / "m.gguf", shardings=spread)
    assert_same(loaded.params, expected)
    gate = loaded.params["layers"]["gate"]
    assert gate.addressable_shards[0].data.shape == (N, D // 4, F // 2)


def test_qwen2_is_not_permuted_and_has_biases(tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", Kind.Q8_0, "qwen2")
    loaded = hf.load_model(tmp_path / "m.gguf")
    assert_same(loaded.params, expected)
    assert loaded.config.qkv_bias and not loaded.config.o_bias
    assert config_to_hf(loaded.config)["model_type"] == "qwen2"


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    matrix = np.random.default_rng(1).standard_normal((V, D), np.float32)
    write(tmp_path / "m.gguf", Kind.F32, extra=lambda w: w.add_tensor("output.weight", matrix))
    loaded = hf.load_model(tmp_path / "m.gguf")
    assert not loaded.config.tie_word_embeddings
    np.testing.assert_array_equal(loaded.params["head"], matrix)


def test_round_trip_through_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Kind.Q4_0)
    first = hf.load_model(tmp_path / "m.gguf")
    directory = tmp_path / "m"
    export.export_model(
        directory, first.config, first.params, first.tokenizer, first.end_ids, jnp.float32
    )
    second = hf.load_model(directory)
    assert (second.config, second.end_ids) == (first.config, first.end_ids)
    assert_same(second.params, first.params)
    for text in ("ab 1234 xyz", "<|eot|>ab", " é漢\n\n  x's"):
        assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
        assert first.tokenizer.decode(first.tokenizer.encode(text)) == text


# ----------------------------------------------------------------------------- rotary factors


def llama3_factors(factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """As llama.cpp's converter computes them for base 500000."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / high:
            out.append(1.0)
        elif wavelength > 8192 / low:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_from_its_tensor(factor: float, tmp_path: Path) -> None:
    factors = llama3_factors(factor)
    write(tmp_path / "m.gguf", Kind.F32, extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    config = hf.load_model(tmp_path / "m.gguf").config
    assert config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    assert config.rope_theta == 500000.0


def test_rotary_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, np.float32)
    write(tmp_path / "m.gguf", Kind.F32, extra=lambda w: w.add_tensor("rope_freqs.weight", ones))
    assert hf.load_model(tmp_path / "m.gguf").config.rope_scaling is None


@pytest.mark.parametrize("factors", [llama3_factors(8.0, high=3.0), llama3_factors(8.0)[:-1]])
def test_other_rotary_factors_are_refused(factors: np.ndarray, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Kind.F32, extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    with pytest.raises(ValueError, match=r"m\.gguf: rope_freqs\.weight is not a scaling"):
        hf.load_model(tmp_path / "m.gguf")


def test_linear_scaling_is_a_field(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write(tmp_path / "m.gguf", Kind.F32, extra=extra)
    assert hf.load_model(tmp_path / "m.gguf").config.rope_scaling == RopeScaling("linear", 4.0)


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn'"),
        (lambda w: w.add_expert_count(8), "llama.expert_count=8"),
        (lambda w: w.add_sliding_window(512), "llama.attention.sliding_window=512"),
        (lambda w: w.add_rope_dimension_count(32), "rope.dimension_count=32"),
        (lambda w: w.add_uint16("split.count", 2), "several parts"),
        (lambda w: w.add_tensor("blk.0.extra.weight", np.ones(3, np.float32)), "blk.0.extra"),
        (lambda w: w.add_tensor("output.weight", np.ones((V, D), np.int32)), "of type I32"),
    ],
)
def test_what_would_change_the_result_is_refused(extra: Any, named: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Kind.F32, extra=extra)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        hf.load_model(tmp_path / "m.gguf")
    assert str(error.value).startswith(str(tmp_path / "m.gguf"))
    assert "\n" not in str(error.value)


def test_missing_tensors_are_all_listed(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Kind.F32, without=("blk.1.ffn_up.weight", "output_norm.weight"))
    with pytest.raises(ValueError) as error:
        hf.load_model(tmp_path / "m.gguf")
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in str(error.value)


def test_files_that_are_broken(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write(file, Kind.F32, "gemma")
    with pytest.raises(ValueError, match="architecture 'gemma' is not one of: llama, qwen2"):
        hf.load_model(file)
    write(file, Kind.F32)
    whole = file.read_bytes()
    for content in (whole[:-5000], whole[:50], b"something else", b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="cut short or no GGUF file"):
            hf.load_model(file)


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", Kind.F32)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax_grpo\[gguf\]'"):
        hf.load_model(tmp_path / "m.gguf")


# ----------------------------------------------------------------------------------- tokenizer


def pieces(text: str, **changes: Any) -> list[str]:
    tokenizer = build_tokenizer(tokenizer_fields(**changes), 64)
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", " ", "1234", " ", "x", "y", "z"]),
        ("smollm", ["ab", " ", "1", "2", "3", "4", " ", "x", "y", "z"]),
        ("qwen2", ["ab", " ", "1", "2", "3", "4", " ", "x", "y", "z"]),
        ("llama-bpe", ["<bos>", "ab", " ", "123", "4", " ", "x", "y", "z"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, expected: list[str]) -> None:
    assert pieces("ab 1234 xyz", pre=pre) == expected


def test_llama_bpe_takes_whole_tokens_without_merges() -> None:
    assert pieces("xyz", pre="llama-bpe", add_bos_token=0) == ["xyz"]
    assert pieces("xyz", pre="gpt-2") == ["x", "y", "z"]


def test_start_and_end_tokens_are_added_as_the_file_says() -> None:
    assert pieces("ab", add_bos_token=1) == ["<bos>", "ab"]
    assert pieces("ab", add_bos_token=1, add_eos_token=1) == ["<bos>", "ab", "<eos>"]
    assert pieces("ab", pre="llama-bpe", add_bos_token=0) == ["ab"]
    assert pieces("ab") == ["ab"]


def test_control_tokens_are_special_and_user_tokens_are_not() -> None:
    tokenizer = build_tokenizer(tokenizer_fields(), 64)
    ids = tokenizer.encode("<think>ab<|eot|>")
    assert ids == [261, 259, 264]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>ab"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (262, 263)
    assert "[PAD]" not in tokenizer.get_vocab()  # of type unused


def test_end_of_turn_is_an_end_id(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}<|eot|>{% endfor %}"
    extra = lambda w: w.add_chat_template(template)  # noqa: E731
    write(tmp_path / "m.gguf", Kind.F32, extra=extra)
    loaded = hf.load_model(tmp_path / "m.gguf")
    assert loaded.end_ids == (262, 264)
    assert loaded.tokenizer.chat_template == template
    write(tmp_path / "n.gguf", Kind.F32, extra=lambda w: w.add_eot_token_id(264))
    assert hf.load_model(tmp_path / "n.gguf").end_ids == (262, 264)


SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "pre": None,
    "merges": None,
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    + ["▁ab", "ab", "▁a", "▁", "a", "b", "c"],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
    "scores": [0.0] * 259 + [-3.0, -1.0, -2.0, -4.0, -5.0, -6.0, -7.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def test_sentencepiece() -> None:
    tokenizer = build_tokenizer(tokenizer_fields(**SENTENCEPIECE), 64)
    names = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab c\n</s>"))
    assert names == ["<s>", "▁ab", "▁", "c", "<0x0A>", "</s>"]
    ids = tokenizer.encode("ab  é c", add_special_tokens=False)
    assert tokenizer.decode(ids) == "ab  é c"
    plain = tokenizer_fields(**SENTENCEPIECE, add_bos_token=0, add_space_prefix=0)
    tokenizer = build_tokenizer(plain, 64)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab")) == ["ab"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not one of"),
        ({"model": "t5"}, "tokenizer of kind 't5'"),
        ({"merges": None}, "merges"),
        ({"token_type": [1, 2]}, "token_type"),
        ({**SENTENCEPIECE, "scores": [1.0]}, "scores"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        build_tokenizer(tokenizer_fields(**changes), 64)


# -------------------------------------------------------------------------------- the real one


@pytest.fixture(scope="module")
def smollm2() -> hf.Loaded:
    file = os.environ.get("JAX_GRPO_SMOLLM2")
    if not file:
        pytest.skip("JAX_GRPO_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf")
    return hf.load_model(file)


@pytest.fixture(scope="module")
def reference() -> Any:
    with np.load(Path(__file__).parent / "fixtures" / "smollm2_135m.npz") as z:
        return {name: z[name] for name in z.files}


def logits_of(loaded: hf.Loaded, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of token ids `[B, T]`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(
        loaded.config, loaded.params, jnp.asarray(tokens)[:, None], positions[:, None]
    )
    return np.asarray(hidden[:, 0] @ head(loaded.params).T)


def test_smollm2_tokens_equal_transformers(smollm2: hf.Loaded, reference: Any) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode(str(reference["paragraph"])) == reference["ids"].tolist()
    for prompt, ids in zip(reference["prompts"], reference["prompt_ids"], strict=True):
        turn = [{"role": "user", "content": str(prompt)}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(text) == ids[ids >= 0].tolist()
    assert smollm2.end_ids == (2,)


def test_smollm2_logits_equal_transformers(smollm2: hf.Loaded, reference: Any) -> None:
    logits = logits_of(smollm2, reference["ids"][None])[0]
    ours = np.take_along_axis(logits, reference["top_ids"], axis=-1)
    theirs = reference["top_values"]
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    top = logits.max(-1)
    logsumexp = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    assert np.abs(logsumexp - reference["logsumexp"]).max() <= 1e-5 * reference["logsumexp"].max()


def test_smollm2_greedy_text_equals_transformers(smollm2: hf.Loaded, reference: Any) -> None:
    for prompt, said in zip(reference["prompt_ids"], reference["greedy_ids"], strict=True):
        prompt, said = prompt[prompt >= 0], said[said >= 0]
        logits = logits_of(smollm2, np.concatenate([prompt, said])[None])[0]
        # each token is the likeliest after those before it, so decoding would go the same way
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == said.tolist()
