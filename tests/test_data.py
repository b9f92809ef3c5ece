"""Rows, their stateless index, and their way into arrays of tokens; no network anywhere."""

from __future__ import annotations

import json
import logging
import re
import socket

import numpy as np
import pytest

from jax_grpo import arithmetic, data
from jax_grpo.rows import load_rows

WORDS = "<pad> <s> </s> <|user|> <|assistant|> <|system|> <unk> a b c d e ab".split()
ID = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a test of the data went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def llama_like(start: bool = True, end: bool = False, template: str | None = TEMPLATE):
    """A tokenizer of letters (and of the pair "ab") that adds a start token to plain text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    single = f"{'<s> ' if start else ''}$A{' </s>' if end else ''}"
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", ID["<s>"]), ("</s>", ID["</s>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


# ------------------------------------------------------------------------------------- loading

ROWS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "Größe\u2028\n{}", "answer": "1/2"}]


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.json", "d.csv", "e.parquet", "F.JSONL"])
def test_files_of_every_kind(tmp_path, name):
    file = tmp_path / name
    if name == "c.json":
        file.write_text(json.dumps(ROWS, indent=1))
    elif name.endswith(".csv"):
        import csv

        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)
    elif name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), file)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
        file.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    assert load_rows(str(file), columns=("prompt", "answer")) == ROWS


def test_types_may_differ_between_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n{"prompt": [], "answer": "1/2", "level": 3}\n')
    assert load_rows(str(file)) == [
        {"prompt": "a", "answer": 1},
        {"prompt": [], "answer": "1/2", "level": 3},
    ]


def test_columns_are_renamed(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "a", "answer": 1}\n')
    rows = load_rows(str(file), rename={"question": "prompt"}, columns=("prompt",))
    assert rows == [{"prompt": "a", "answer": 1}]
    with pytest.raises(ValueError, match="no column 'problem' to rename; it has: question, answer"):
        load_rows(str(file), rename={"problem": "prompt"})


def test_a_source_is_a_function_of_rows():
    rows = load_rows(source="jax_grpo.arithmetic.problems", count=3, split="heldout")
    assert rows == arithmetic.problems("heldout", 3)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "a.jsonl", "no rows"),
        ("[]", "a.json", "no rows"),
        ("prompt,answer\n", "a.csv", "no rows"),
        ('{"prompt": 1}\n{"prompt": \n', "a.jsonl", "line 2 is not JSON"),
        ('{"prompt": 1}\n\n3\n', "a.jsonl", "line 3 is not an object but 3"),
        ('[{"prompt": 1},\n 3]', "a.json", "row 1 is not an object but 3"),
        ('[{"prompt": 1},\n oh]', "a.json", "line 2 is not JSON"),
        ('{"prompt": 1}\n{"answer": 1}\n', "a.jsonl", "row 1 has no column 'prompt'; it has: answ"),
        ("prompt,answer\n1\n", "a.csv", "row 0 has not as many values as the header names"),
        ("prompt,answer\n1,2,3\n", "a.csv", "row 0 has not as many values as the header names"),
        ("PAR1", "a.parquet", "a.parquet: "),
        ("a", "a.txt", "a.txt: not one of the known kinds: .json, .jsonl, .csv, .parquet"),
    ],
)
def test_bad_files_give_one_line(tmp_path, text, name, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_rows(str(file), columns=("prompt",))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8 text"):
        load_rows(str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "data come from a path or from a source: give one of the two"),
        ({"path": "a.json", "source": "b.c"}, "give one of the two"),
        ({"path": "missing.jsonl"}, "no such data file: missing.jsonl"),
        ({"path": "./missing"}, "no such data file: ./missing"),
        ({"source": "jax_grpo.arithmetic.problem"}, "jax_grpo.arithmetic has no 'problem'"),
        ({"source": "jax_grpo.arithmetic.problems", "cont": 3}, "it takes: split, count, seed"),
        ({"source": "jax_grpo.arithmetic.split_of", "expression": "1"}, "not a list of rows but"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_rows(**arguments)
    assert "\n" not in str(error.value)


def test_a_file_takes_no_options(tmp_path):
    (tmp_path / "a.json").write_text("[{}]")
    with pytest.raises(ValueError, match="a data file takes no options, but got: split"):
        load_rows(str(tmp_path / "a.json"), split="test")


def test_a_directory_goes_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(path, **kwargs):
        calls.append((path, kwargs))
        if path == "no/such":
            raise RuntimeError("offline\nand more")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows(str(tmp_path)) == ROWS
    assert load_rows("openai/gsm8k", name="main", split="test") == ROWS
    assert calls == [
        (str(tmp_path), {"split": "train"}),
        ("openai/gsm8k", {"split": "test", "name": "main"}),
    ]
    with pytest.raises(ValueError, match=r"neither .* can be loaded: no/such \(offline\)"):
        load_rows("no/such")


# ------------------------------------------------------------------------------------ indexing


@pytest.mark.parametrize(("num_rows", "count"), [(10, 5), (10, 4), (7, 3), (3, 10), (1, 4), (5, 5)])
def test_each_epoch_is_covered_once(num_rows, count):
    steps = num_rows * 3
    rows = np.concatenate([data.row_indices(7, step, num_rows, count) for step in range(steps)])
    assert rows.dtype == np.int32 and len(rows) == steps * count
    for epoch in rows[: len(rows) // num_rows * num_rows].reshape(-1, num_rows):
        assert sorted(epoch.tolist()) == list(range(num_rows))


def test_the_index_is_shuffled_anew_in_each_epoch_and_by_each_seed():
    first = data.row_indices(0, 0, 50, 50)
    assert first.tolist() != list(range(50))
    for other in (
        data.row_indices(0, 1, 50, 50),
        data.row_indices(1, 0, 50, 50),
        data.row_indices((0, 1), 0, 50, 50),
    ):
        assert sorted(other.tolist()) == list(range(50)) and other.tolist() != first.tolist()


def test_the_index_is_stable():
    """By value: a resumed run must take the rows that it would have taken."""
    assert data.row_indices(0, 1, 10, 4).tolist() == [3, 5, 9, 0]
    assert data.row_indices((0,), 1, 10, 4).tolist() == data.row_indices(0, 1, 10, 4).tolist()


def test_no_rows_to_take():
    with pytest.raises(ValueError, match="num_rows=0"):
        data.row_indices(0, 0, 0, 4)


def test_num_steps():
    assert data.num_steps(7473, 16) == 468
    assert data.num_steps(10, 4, epochs=2.0) == 5
    assert data.num_steps(10, 4, epochs=0.5) == 2


# ------------------------------------------------------------------------------------- prompts


def encoded(rows, tokenizer, length=100, **options):
    return data.encode_prompts(rows, tokenizer, length, **options).token_ids


def test_text_gets_the_special_tokens_of_the_tokenizer():
    rows = [{"prompt": "abc"}, {"prompt": "d"}]
    assert encoded(rows, llama_like()) == [ids("<s> ab c"), ids("<s> d")]
    assert encoded(rows, llama_like(start=False)) == [ids("ab c"), ids("d")]


def test_there_is_never_a_second_start_token_nor_an_end_token_in_a_prompt():
    assert encoded([{"prompt": "<s>abc"}], llama_like()) == [ids("<s> ab c")]
    assert encoded([{"prompt": "abc"}], llama_like(end=True)) == [ids("<s> ab c")]
    assert encoded([{"prompt": "a</s>"}], llama_like()) == [ids("<s> a </s>")]


def test_messages_go_through_the_chat_template():
    messages = [{"role": "user", "content": "ab"}]
    turn = ids("<s> <|user|> ab </s> <|assistant|>")
    prompts = data.encode_prompts([{"prompt": messages}, {"prompt": "d"}], llama_like(), 100)
    assert prompts.token_ids == [turn, ids("<s> d")]
    assert prompts.prompts == [messages, "d"]
    assert (
        llama_like().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        == turn
    )


def test_chat_wraps_a_text_and_a_system_message_comes_first():
    rows = [{"prompt": "ab"}]
    assert encoded(rows, llama_like(), chat=True) == [ids("<s> <|user|> ab </s> <|assistant|>")]
    prompts = data.encode_prompts(rows, llama_like(), 100, chat=True, system="c")
    assert prompts.token_ids == [ids("<s> <|system|> c </s> <|user|> ab </s> <|assistant|>")]
    assert prompts.prompts == ["ab"]  # rewards see the form of the data
    own = [{"role": "system", "content": "d"}, {"role": "user", "content": "a"}]
    assert encoded([{"prompt": own}], llama_like(), system="c") == [
        ids("<s> <|system|> d </s> <|user|> a </s> <|assistant|>")
    ]


def test_a_template_makes_the_text():
    rows = [{"question": "a", "prompt": "d"}]
    prompts = data.encode_prompts(rows, llama_like(), 100, template="{question}{prompt}{{}}b")
    assert prompts.prompts == ["ad{}b"]
    assert prompts.rows == rows


def test_long_prompts_are_dropped_with_a_warning(caplog):
    rows = [{"prompt": "a"}, {"prompt": "aaa"}, {"prompt": "bb"}]
    with caplog.at_level(logging.WARNING):
        prompts = data.encode_prompts(rows, llama_like(), 3)
    assert prompts.token_ids == [ids("<s> a"), ids("<s> b b")]
    assert prompts.prompts == ["a", "bb"]
    assert prompts.rows == [rows[0], rows[2]]
    assert prompts.dropped == 1
    assert caplog.messages == ["dropped 1 of 3 prompts longer than 3 tokens"]


def test_a_long_prompt_gives_no_other_warning(caplog):
    tokenizer = llama_like()
    tokenizer.model_max_length = 4
    data.encode_prompts([{"prompt": "a" * 50}], tokenizer, 100)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "no rows"),
        ([{"prompt": "aaaa"}] * 2, {}, "dropped all 2 prompts longer than 3 tokens"),
        ([{"question": "a"}], {}, "row 0 has no column 'prompt'; it has: question"),
        ([{"prompt": 3}], {}, "prompt of row 0 is neither text nor a list of messages"),
        ([{"prompt": []}], {}, "prompt of row 0 is neither text nor a list of messages"),
        ([{"prompt": [{"content": "a"}]}], {}, "prompt of row 0 is neither text nor a list of"),
        ([{"prompt": "a"}], {"system": "b"}, "a system message needs messages as prompts, or chat"),
        ([{"prompt": "a"}], {"template": "{q}"}, "does not work for row 0, with prompt: KeyError"),
        ([{"prompt": "a"}], {"template": r"\boxed{}"}, "(a brace that stands for itself is writ"),
        ([{"prompt": "a"}], {"template": "{"}, "the prompt template does not work"),
        (
            [{"prompt": [{"role": "user", "content": "a"}]}],
            {"template": "{prompt}"},
            "a template is for text, but the prompt of row 0 is messages",
        ),
    ],
)
def test_prompts_that_do_not_fit_give_one_line(rows, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        data.encode_prompts(rows, llama_like(), 3, **options)
    assert "\n" not in str(error.value)


USER = {"role": "user", "content": "a"}


def test_chats_need_a_chat_template():
    for row, options in [({"prompt": "a"}, {"chat": True}), ({"prompt": [USER]}, {})]:
        with pytest.raises(ValueError, match="row 0 is a chat, but the tokenizer has no chat temp"):
            data.encode_prompts([row], llama_like(template=None), 9, **options)


def test_a_chat_template_may_refuse():
    tokenizer = llama_like(template="{{ raise_exception('only users') }}")
    with pytest.raises(ValueError, match="refuses the prompt of row 0: only users"):
        data.encode_prompts([{"prompt": [USER]}], tokenizer, 9)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt of row 1 is empty"):
        data.encode_prompts([{"prompt": "a"}, {"prompt": ""}], llama_like(start=False), 9)


# ------------------------------------------------------------------------------ demonstrations

END = ID["<|user|>"]  # an end token that is not the tokenizer's


def demonstrations(rows, tokenizer=None, lengths=(100, 100), end_id=END, **options):
    tokenizer = tokenizer or llama_like()
    return data.encode_demonstrations(rows, tokenizer, end_id, *lengths, **options)


def test_demonstrations_end_with_the_end_token():
    shown = demonstrations([{"prompt": "d", "completion": "abc"}])
    assert shown.prompt_ids == [ids("<s> d")]
    assert shown.completion_ids == [[*ids("ab c"), END]]


def test_a_completion_never_changes_the_tokens_of_its_prompt():
    """Together "a" and "bc" would be the tokens "ab" and "c", which generation never sees."""
    shown = demonstrations([{"prompt": "a", "completion": "bc"}])
    assert shown.prompt_ids == [ids("<s> a")]
    assert shown.completion_ids == [[*ids("b c"), END]]


def test_demonstrations_of_chats():
    messages = [{"role": "user", "content": "d"}]
    rows = [
        {"prompt": messages, "completion": [{"role": "assistant", "content": "ab"}]},
        {"prompt": messages, "completion": "c"},
    ]
    shown = demonstrations(rows, end_id=ID["</s>"])
    assert shown.prompt_ids == [ids("<s> <|user|> d </s> <|assistant|>")] * 2
    assert shown.completion_ids == [ids("ab </s>"), ids("c </s>")]


def test_an_end_token_in_the_text_is_not_doubled():
    shown = demonstrations([{"prompt": "d", "completion": "c</s>"}], end_id=ID["</s>"])
    assert shown.completion_ids == [ids("c </s>")]


def test_long_demonstrations_are_dropped_with_a_warning(caplog):
    rows = [
        {"prompt": "d", "completion": "c"},
        {"prompt": "dd", "completion": "c"},
        {"prompt": "d", "completion": "cc"},
    ]
    shown = demonstrations(rows, lengths=(2, 2))
    assert (shown.rows, shown.dropped) == (rows[:1], 2)
    assert caplog.messages == [
        "dropped 2 of 3 rows with prompts longer than 2 tokens or completions longer than 2"
    ]


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (None, "the completion of row 0 is not text or one assistant message: missing"),
        (3, "message: 3"),
        ([{"role": "user", "content": "a"}], "is not text or one assistant message"),
    ],
)
def test_bad_completions_give_one_line(completion, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        demonstrations([{"prompt": "a", "completion": completion}])


# --------------------------------------------------------------------------- the step's arrays


def test_prompt_batch():
    prompts = data.encode_prompts([{"prompt": "a"}, {"prompt": "bcd"}], llama_like(), 9)
    batch = data.prompt_batch(prompts, np.array([1, 0, 1]), 5)
    np.testing.assert_array_equal(
        batch.token_ids, [[1, 8, 9, 10, 0], [1, 7, 0, 0, 0], [1, 8, 9, 10, 0]]
    )
    np.testing.assert_array_equal(batch.lengths, [4, 2, 4])
    # a row's second place is another number, for its own draws: 1 + 2 rows
    np.testing.assert_array_equal(batch.rows, [1, 0, 3])
    assert data.reward_arguments(prompts, batch.rows, ["x"] * 3)[0] == ["bcd", "a", "bcd"]
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}
    with pytest.raises(ValueError, match="4 tokens do not fit in 3"):
        data.prompt_batch(prompts, np.array([1]), 3)


def test_demonstration_rollout():
    rows = [{"prompt": "a", "completion": "c"}, {"prompt": "d", "completion": "ccc"}]
    shown = demonstrations(rows, end_id=ID["</s>"])
    rollout = data.demonstration_rollout(shown, np.array([1, 0]), 3, 4)
    np.testing.assert_array_equal(rollout.prompts.token_ids, [[1, 10, 0], [1, 7, 0]])
    np.testing.assert_array_equal(rollout.prompts.rows, [1, 0])
    np.testing.assert_array_equal(rollout.completion_ids, [[[9, 9, 9, 2]], [[9, 2, 0, 0]]])
    np.testing.assert_array_equal(rollout.lengths, [[4], [2]])
    np.testing.assert_array_equal(rollout.mask, [[[1, 1, 1, 1]], [[1, 1, 0, 0]]])
    np.testing.assert_array_equal(rollout.truncated, [[False], [False]])
    for array in (rollout.behavior_logps, rollout.kept_logmass):
        assert array.dtype == np.float32 and array.shape == (2, 1, 4) and not array.any()
    assert rollout.temperature == 1 and rollout.mask.dtype == bool
    assert rollout.completion_ids.dtype == rollout.lengths.dtype == np.int32


def test_the_quickstart_from_rows_to_text():
    tokenizer = arithmetic.tokenizer()
    rows = load_rows(source="jax_grpo.arithmetic.demonstrations", count=50)
    shown = data.encode_demonstrations(rows, tokenizer, tokenizer.eos_token_id, 13, 50)
    texts = data.completion_texts(tokenizer, shown.completion_ids)
    assert texts == [row["completion"] for row in rows]
    assert data.completion_texts(tokenizer, shown.prompt_ids) == [row["prompt"] for row in rows]


# ------------------------------------------------------------------------------ back to text


def test_completion_texts_leave_special_tokens_out_and_tidy_nothing():
    assert data.completion_texts(llama_like(), [ids("ab c </s>"), [], ids("<|user|> d")]) == [
        "abc",
        "",
        "d",
    ]


def test_reward_arguments():
    messages = [{"role": "user", "content": "d"}]
    rows = [
        {"prompt": "a", "answer": 1, "completion": "x", "completion_ids": 0},
        {"prompt": messages, "answer": 2, "level": 3},
    ]
    prompts = data.encode_prompts(rows, llama_like(), 9)
    shown, completions, columns = data.reward_arguments(prompts, np.array([1, 0]), list("wxyz"))
    assert shown == [messages, messages, "a", "a"]
    assert completions == [
        [{"role": "assistant", "content": "w"}],
        [{"role": "assistant", "content": "x"}],
        "y",
        "z",
    ]
    assert columns == {"answer": [2, 2, 1, 1], "level": [3, 3, None, None]}
    with pytest.raises(ValueError, match="3 completions for 2 prompts"):
        data.reward_arguments(prompts, np.array([1, 0]), list("xyz"))
