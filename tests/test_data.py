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
WORDS += ["<|tool|>", "<think>", "</think>", "\n", " "]
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
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|</?think>|[\s\S]"), behavior="isolated")
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
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"],
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


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


USER = user("a")


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
    assert shown.completion_ids == [[[*ids("ab c"), END]]]
    assert (shown.counts, shown.rewards) == (None, None)


def test_a_completion_never_changes_the_tokens_of_its_prompt():
    """Together "a" and "bc" would be the tokens "ab" and "c", which generation never sees."""
    shown = demonstrations([{"prompt": "a", "completion": "bc"}])
    assert shown.prompt_ids == [ids("<s> a")]
    assert shown.completion_ids == [[[*ids("b c"), END]]]


def test_demonstrations_of_chats():
    messages = [user("d")]
    rows = [
        {"prompt": messages, "completion": [assistant("ab")]},
        {"prompt": messages, "completion": "c"},
        {"messages": [user("d"), assistant("e")]},
        {"prompt": "of ultrachat", "messages": [user("d"), assistant("e")]},
    ]
    shown = demonstrations(rows, end_id=ID["</s>"])
    assert shown.prompt_ids == [ids("<s> <|user|> d </s> <|assistant|>")] * 4
    assert shown.completion_ids == [[ids(f"{said} </s>")] for said in ("ab", "c", "e", "e")]
    assert shown.counts is None


def test_an_end_token_in_the_text_is_not_doubled():
    shown = demonstrations([{"prompt": "d", "completion": "c</s>"}], end_id=ID["</s>"])
    assert shown.completion_ids == [[ids("c </s>")]]


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
    ("row", "message"),
    [
        ({"prompt": "a"}, "row 0 has no column 'completion'; it has: prompt"),
        ({"prompt": "a", "completion": None}, "completion of row 0 is neither text nor messages"),
        ({"prompt": "a", "completion": 3}, "that begin and end with the assistant's: 3"),
        ({"prompt": "a", "completion": [USER]}, "that begin and end with the assistant's"),
        (
            {"prompt": "a", "completion": [assistant("b"), USER]},
            "that begin and end with the assistant's",
        ),
        (
            {"prompt": "a", "completion": [assistant([3])]},
            "that begin and end with the assistant's",
        ),
        (
            {"prompt": "a", "completion": [assistant("b")] * 2},
            "row 0 has several turns after a plain text: they need a chat",
        ),
        ({"messages": [USER]}, "messages of row 0 are no prompt and then an assistant's turn"),
        ({"messages": "a"}, "messages of row 0 are no prompt and then an assistant's turn: 'a'"),
        (
            {"messages": [assistant("b")]},
            "messages of row 0 are no prompt and then an assistant's turn",
        ),
    ],
)
def test_bad_completions_give_one_line(row, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        demonstrations([row])
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------- several turns

EACH = "{% for m in messages %}<|{{ m.role }}|>"
ASSISTANT_NEXT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHATML = EACH + "\n{{ m.content }}</s>\n{% endfor %}" + ASSISTANT_NEXT.replace("t|>", "t|>\n")
TRIMMING = "<s>" + EACH + "{{ m.content | trim }}</s>{% endfor %}" + ASSISTANT_NEXT
SPACED = EACH + "{{ m.content }} </s><s>{% endfor %}" + ASSISTANT_NEXT
# As Qwen3's: thoughts are taken out of all turns but the last.
FORGETTING = (
    EACH + "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}"
    "{% endif %}</s>{% endfor %}" + ASSISTANT_NEXT
)


def test_only_the_assistants_turns_count():
    rows = [
        {"prompt": [user("d")], "completion": [assistant("ab"), user("c"), assistant("de")]},
        {"prompt": [user("d")], "completion": "e"},
    ]
    shown = demonstrations(rows, end_id=ID["</s>"])
    assert shown.prompt_ids == [ids("<s> <|user|> d </s> <|assistant|>")] * 2
    assert shown.completion_ids == [
        [ids("ab </s> <|user|> c </s> <|assistant|> d e </s>")],
        [ids("e </s>")],
    ]
    assert shown.counts == [[[c == "x" for c in "xx....xxx"]], [[True, True]]]
    whole = [{"messages": [*row["prompt"], *row["completion"]]} for row in rows[:1]]
    assert demonstrations(whole, end_id=ID["</s>"]).completion_ids == shown.completion_ids[:1]


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, TRIMMING, SPACED, FORGETTING])
@pytest.mark.parametrize("seed", range(5))
def test_a_conversation_is_what_the_template_writes(template, seed):
    """The tokens are the whole text's, those that count are what the assistant said."""
    draw = np.random.default_rng(seed)
    text = lambda: "".join(draw.choice(list("cde"), draw.integers(1, 5)))  # noqa: E731
    messages = [user(text())]
    for _ in range(draw.integers(2, 5)):
        messages += [assistant(text()), {"role": draw.choice(["user", "tool"]), "content": text()}]
    messages.append(assistant(text()))
    tokenizer = llama_like(template=template)
    shown = demonstrations([{"messages": messages}], tokenizer, end_id=ID["</s>"])

    (prompt,), ((completion,),), ((counts,),) = shown[0], shown[1], shown.counts
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = whole[: whole.rindex("</s>")].rstrip(" ") + "</s>"
    assert prompt + completion == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert prompt == tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=False
    )
    said = [token for token, counted in zip(completion, counts, strict=True) if counted]
    turns = tokenizer.decode(said).replace(" ", "").split("</s>")
    assert turns == [m["content"] for m in messages if m["role"] == "assistant"] + [""]


def test_a_template_may_trim_what_was_said():
    row = {"prompt": [user("d")], "completion": [assistant(" c\n"), user("e"), assistant(" c")]}
    shown = demonstrations([row], llama_like(template=TRIMMING), end_id=ID["</s>"])
    last = [ID[" "], *ids("c </s>")]  # as the data have it
    expected = ids("c </s> <|user|> e </s> <|assistant|>")
    assert shown.completion_ids == [[[*expected, *last]]]


def test_a_later_turn_begins_where_generation_would():
    """Where the generation prompt ends in "a", what is said is "b", never half of "ab"."""
    template = EACH.replace("<|{{ m.role }}|>", "{{ 'a' if m.role == 'assistant' else '' }}")
    template += "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    row = {"prompt": [user("d")], "completion": [assistant("b"), user("c"), assistant("b")]}
    shown = demonstrations([row], llama_like(template=template), end_id=ID["</s>"])
    assert shown.prompt_ids == [ids("d </s> a")]
    assert shown.completion_ids == [[ids("b </s> c </s> a b </s>")]]
    assert shown.counts == [[[c == "x" for c in "xx...xx"]]]


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_tool_calls_are_said_as_the_template_writes_them(content):
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content or '' }}{{ m.tool_calls }}")
    call = {"role": "assistant", "tool_calls": "de", **content}
    result = {"role": "tool", "content": "c"}
    row = {"prompt": [user("d")], "completion": [call, result, assistant("a"), user("b"), call]}
    shown = demonstrations([row], llama_like(template=template), end_id=ID["</s>"])
    first, second = ids("d e </s> <|tool|> c </s> <|assistant|>"), ids("a </s> <|user|> b </s>")
    assert shown.completion_ids == [[[*first, *second, *ids("<|assistant|> d e </s>")]]]
    assert shown.counts == [[[c == "x" for c in "xxx....xx....xxx"]]]


def test_one_turn_keeps_its_thoughts_whatever_the_template_does():
    row = {"prompt": [user("d")], "completion": [assistant("<think>a</think>b")]}
    shown = demonstrations([row], llama_like(template=FORGETTING), end_id=ID["</s>"])
    assert shown.completion_ids == [[ids("<think> a </think> b </s>")]]


@pytest.mark.parametrize(
    ("template", "first"),
    [
        (FORGETTING, "<think>a</think>b"),
        (TEMPLATE.replace("{{ eos_token }}", ""), "b"),  # nothing ends a turn
        ("{% if messages | length > 1 %}d{% else %}e{% endif %}" + TEMPLATE, "b"),
        (TEMPLATE.replace("%}<|assistant|>{", "%}<|assistant|><think>{"), "b"),
    ],
)
def test_a_template_that_changes_turns_is_refused(template, first):
    row = {"prompt": [user("d")], "completion": [assistant(first), user("c"), assistant("e")]}
    with pytest.raises(ValueError, match="does not keep the turns of row 0 as they were") as error:
        demonstrations([row], llama_like(template=template), end_id=ID["</s>"])
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------- pairs


def pairs(rows, lengths=(100, 100), tokenizer=None, **options):
    return data.encode_pairs(rows, tokenizer or llama_like(), ID["</s>"], *lengths, **options)


def test_pairs_are_groups_of_two_with_the_chosen_first():
    shown = pairs([{"prompt": "d", "chosen": "abc", "rejected": "e"}])
    assert shown.prompt_ids == [ids("<s> d")]
    assert shown.completion_ids == [[ids("ab c </s>"), ids("e </s>")]]
    assert (shown.counts, shown.rewards, shown.dropped) == (None, None, 0)


D, AB, C = user("d"), assistant("ab"), user("c")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [D], "chosen": [assistant("e")], "rejected": "b"},
        {"chosen": [D, assistant("e")], "rejected": [D, assistant("b")]},
        {"prompt": "d", "chosen": [D, assistant("e")], "rejected": [D, assistant("b")]},
    ],
)
def test_pairs_of_chats(row):
    shown = pairs([row])
    assert shown.prompt_ids == [ids("<s> <|user|> d </s> <|assistant|>")]
    assert shown.completion_ids == [[ids("e </s>"), ids("b </s>")]]
    assert shown.counts is None


def test_pairs_of_conversations_begin_where_they_part():
    rows = [
        {"chosen": [D, AB, C, assistant("e")], "rejected": [D, AB, C, assistant("b")]},
        {"chosen": [D, AB, C, assistant("e")], "rejected": [D, assistant("b")]},
        {"chosen": [D, AB], "rejected": [D, AB, C, assistant("e")]},
    ]
    shown = pairs(rows)
    short, long = "<s> <|user|> d </s> <|assistant|>", "ab </s> <|user|> c </s> <|assistant|>"
    assert shown.prompt_ids == [ids(f"{short} {long}"), ids(short), ids(short)]
    assert shown.completion_ids == [
        [ids("e </s>"), ids("b </s>")],
        [ids(f"{long} e </s>"), ids("b </s>")],
        [ids("ab </s>"), ids(f"{long} e </s>")],
    ]
    turns = [c == "x" for c in "xx....xx"]
    assert shown.counts == [[[True] * 2] * 2, [turns, [True] * 2], [[True] * 2, turns]]


def test_pairs_that_teach_nothing_or_are_too_long_are_dropped(caplog):
    rows = [
        {"prompt": "d", "chosen": "c", "rejected": "c</s>", "margin": 1},
        {"prompt": "d", "chosen": "c", "rejected": "ab", "margin": "2.5"},
        {"prompt": "d", "chosen": "c", "rejected": "ccc", "margin": 3},
        {"prompt": "dd", "chosen": "a", "rejected": "c", "margin": 4},
    ]
    shown = pairs(rows, (2, 3))
    assert shown.rows == [rows[1]] and shown.dropped == 3
    assert shown.rewards == [[2.5, 0.0]]
    assert caplog.messages == [
        "dropped 1 of 4 pairs whose two completions are the same: they teach nothing",
        "dropped 2 of 3 rows with prompts longer than 2 tokens or completions longer than 3",
    ]


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{"prompt": "a", "completion": "b"}], "row 0 has no column 'chosen'; it has: prompt, com"),
        ([PAIR, {"prompt": "a", "chosen": "b"}], "row 1 has no column 'rejected'"),
        ([PAIR, {"chosen": "ab", "rejected": "ac"}], "row 1 has no column 'prompt'"),
        ([{"chosen": [D, AB], "rejected": [C, AB]}], "do not begin with the same message"),
        ([{"chosen": [D, AB], "rejected": [D]}], "do not begin with the same message and then go"),
        ([{"chosen": [D, AB, C], "rejected": [D, AB, D]}], "chosen of row 0 is neither text nor"),
        ([PAIR, {**PAIR, "rejected": 3}], "rejected of row 1 is neither text nor messages"),
        ([{**PAIR, "rejected": "b"}] * 2, "no rows left: dropped all 2 pairs whose two completio"),
        ([PAIR, {**PAIR, "margin": 1}], "row 0 has no column 'margin'"),
        ([{**PAIR, "margin": None}], "the margin of row 0 is not a finite number: None"),
        ([{**PAIR, "margin": "nan"}], "the margin of row 0 is not a finite number: 'nan'"),
        ([{**PAIR, "margin": "much"}], "the margin of row 0 is not a finite number: 'much'"),
        ([{**PAIR, "prompt": ""}], "the prompt of row 0 is empty"),
    ],
)
def test_bad_pairs_give_one_line(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pairs(rows, tokenizer=llama_like(start=False))
    assert "\n" not in str(error.value)


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


def test_demonstration_rollout_of_groups_with_holes():
    rows = [
        {"prompt": [D], "chosen": [AB, C, assistant("e")], "rejected": "c", "margin": 0.5},
        {"prompt": [D], "chosen": "e", "rejected": "ab", "margin": 2},
    ]
    shown = pairs(rows)
    rollout = data.demonstration_rollout(shown, np.array([1, 0, 1]), 6, 9)
    assert rollout.prompts.token_ids.shape == (3, 6)
    np.testing.assert_array_equal(rollout.lengths, [[2, 2], [8, 2], [2, 2]])
    mask = ["xx.......", "xx.......", "xx....xx.", "xx.......", "xx.......", "xx......."]
    np.testing.assert_array_equal(
        rollout.mask, np.array([[c == "x" for c in row] for row in mask]).reshape(3, 2, 9)
    )
    assert rollout.mask.dtype == bool
    chosen = ids("ab </s> <|user|> c </s> <|assistant|> e </s> <pad>")
    np.testing.assert_array_equal(rollout.completion_ids[1, 0], chosen)

    rewards = data.demonstration_rewards(shown, np.array([1, 0, 1]))
    np.testing.assert_array_equal(rewards.values, [[[2], [0]], [[0.5], [0]], [[2], [0]]])
    assert rewards.values.dtype == np.float32 and rewards.valid.dtype == bool
    assert rewards.valid.shape == (3, 2, 1) and rewards.valid.all()
    silent = data.demonstration_rewards(shown._replace(rewards=None), np.array([1, 0, 1]))
    assert silent.values.shape == silent.valid.shape == (3, 2, 0)


def test_the_quickstart_from_rows_to_text():
    tokenizer = arithmetic.tokenizer()
    rows = load_rows(source="jax_grpo.arithmetic.demonstrations", count=50)
    shown = data.encode_demonstrations(rows, tokenizer, tokenizer.eos_token_id, 13, 50)
    texts = data.completion_texts(tokenizer, [group[0] for group in shown.completion_ids])
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
