"""Conversations: text and tokens as transformers makes them, and the loss only on what the assistant said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import arrays

from meshwright.core.errors import MeshwrightError
from meshwright.data.data_section import DataSection
from meshwright.data.open_data import open_data
from meshwright.data.prepare import prepare
from meshwright.data.records import BadRecord, ChatTemplate, open_template
from meshwright.data.tokenizer import open_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, who are you?"}],
    [
        {"role": "system", "content": "Be brief; naïve 🙂 is fine."},
        {"role": "user", "content": "Was heißt œuvre?"},
        {"role": "assistant", "content": "Werk 🙂."},
        {"role": "user", "content": "And one more?"},
        {"role": "assistant", "content": "<b>No</b>.\n\nNever."},
    ],
]
# Without marks, in the manner of Llama 3, Mistral (no header before an answer) and Zephyr.
TEMPLATES = {
    "headers": "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim"
    " + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}",
    "brackets": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}",
    "marks": "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}\n"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
}


def write_chat_tokenizer(folder: Path, template: str) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([message["content"] * 3 for chat in CHATS for message in chat], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, chats: list[Any] = CHATS, key: str = "messages") -> Path:
    path.write_text("\n".join(json.dumps({key: chat}) for chat in chats))
    return path


def opened(path: Path, **settings: Any) -> Any:
    chosen = {"sequence": 16, "held_out_fraction": 0.0, **settings}
    return open_data(DataSection(train=str(path), **chosen), cache=None)


def learnt(data: Any) -> str:
    corpus = data.source.corpus
    return data.tokenizer.decode(corpus.tokens[corpus.weights == 1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_chat_tokenizer(tmp_path / "words", TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = TEMPLATES[name]
    data = opened(write_chats(tmp_path / "chats.jsonl"), tokenizer=str(folder))
    template = open_template("", str(folder))
    assert template is not None
    expected = []
    for chat in CHATS:
        text = theirs.apply_chat_template(chat, tokenize=False)
        assert template.spans(chat)[0] == text
        expected += [*theirs(text, add_special_tokens=False)["input_ids"], data.tokenizer.separator]
    assert data.source.corpus.tokens.tolist() == expected
    if name == "marks":
        masks: list[int] = []
        for chat in CHATS:
            found = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            masks += [*found["assistant_masks"], 0]
        assert data.source.corpus.weights.tolist() == masks
    ends = {"headers": "<|eot|>", "brackets": "</s>", "marks": "</s>"}[name]
    before = " " if name == "brackets" else ""
    answers = [message["content"] for chat in CHATS for message in chat if message["role"] == "assistant"]
    assert learnt(data) == "".join(before + answer + ends for answer in answers)


def test_the_same_conversations_in_every_format_packing_and_file(tmp_path: Path) -> None:
    """Messages, ShareGPT; lines, Parquet, `mw data prepare`; and Alpaca."""
    import pyarrow
    import pyarrow.parquet

    roles = {"user": "human", "assistant": "gpt"}
    sharegpt = [[{"from": roles.get(m["role"], m["role"]), "value": m["content"]} for m in chat] for chat in CHATS]
    pyarrow.parquet.write_table(pyarrow.table({"messages": CHATS, "id": [1, 2]}), tmp_path / "chats.parquet")
    paths = [write_chats(tmp_path / "a.jsonl"), write_chats(tmp_path / "b.jsonl", sharegpt, "conversations")]
    prepare([str(paths[0])], str(tmp_path / "made"), num_workers=1)
    paths += [tmp_path / "chats.parquet", tmp_path / "made.bin"]
    for packing in ("stream", "documents"):
        batches = []
        for path in paths:
            data = opened(path, packing=packing)
            batches.append([array.tolist() for array in arrays(data.batch(0, data.num_samples))])
        assert batches[0] == batches[1] == batches[2] == batches[3]
        assert learnt(data) == "Hello, who are you?<|im_end|>Werk 🙂.<|im_end|><b>No</b>.\n\nNever.<|im_end|>"
        assert 0 < data.batch(0, data.num_samples).num_tokens < data.num_samples * 16
    alpaca = {"instruction": "Add.", "input": "1 and 2", "output": "The sum is 3."}
    (tmp_path / "alpaca.jsonl").write_text(json.dumps(alpaca))
    data = opened(tmp_path / "alpaca.jsonl")
    assert b"user\nAdd.\n\n1 and 2<|im_end|>" in data.source.corpus.tokens.tobytes()
    assert learnt(data) == "The sum is 3.<|im_end|>"


def test_texts_and_conversations_in_one_file_keep_their_order(tmp_path: Path) -> None:
    lines = [{"text": "first text"}, {"messages": CHATS[0]}, {"text": "b", "prompt": "a: "}, {"messages": CHATS[0]}]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus = opened(tmp_path / "all.jsonl").source.corpus
    chat = b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, who are you?<|im_end|>\n"
    assert corpus.tokens.tobytes() == b"\0".join([b"first text", chat, b"a: b", chat, b""])
    assert bytes(corpus.tokens[corpus.weights == 1]) == (
        b"first text\0Hello, who are you?<|im_end|>b\0Hello, who are you?<|im_end|>"
    )
    assert corpus.starts.tolist() == [0, 11, 11 + len(chat) + 1, 11 + len(chat) + 1 + 5]


def test_another_template_is_another_cache(tmp_path: Path) -> None:
    path, kept = write_chats(tmp_path / "chats.jsonl"), tmp_path / "cache"
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    section = DataSection(train=str(path), sequence=16, held_out_fraction=0.0)
    first = open_data(section, cache=kept)
    other = DataSection(train=str(path), sequence=16, held_out_fraction=0.0, chat_template=f"{tmp_path}/plain.jinja")
    second = open_data(other, cache=kept)
    assert first.fingerprint != second.fingerprint
    assert learnt(second).startswith("assistant: Hello"), "this template does not say how an answer begins"
    assert np.array_equal(open_data(section, cache=kept).batch(0, 4).weights, first.batch(0, 4).weights)


def test_what_is_wrong_is_told_by_line(tmp_path: Path) -> None:
    lines: list[Any] = [
        {"messages": "Hi"},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    others: list[Any] = [{"question": "?", "answer": "!"}, {"chosen": "a", "rejected": "b"}, {"messages": []}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, others)))
    with pytest.raises(MeshwrightError) as error:
        opened(tmp_path / "*.jsonl")
    text = str(error.value).replace(f"{tmp_path}/", "")
    assert text.splitlines() == [
        'a.jsonl:1: "messages" is a str, not a list of messages.',
        'a.jsonl:2: "messages"[0] has no text as role or content. Write {"role": "user", "content": "..."}.',
        "a.jsonl:3: has no message of the assistant: there is nothing to learn. Leave it out.",
        'b.jsonl:1: has no "text" key. Its keys: "question", "answer". '
        'Set data.prompt_key = "question" and data.text_key = "answer".',
        'b.jsonl:2: has no "text" key. Its keys: "chosen", "rejected". '
        'Preferences are not learnt; data.text_key = "chosen" takes the chosen texts.',
    ]
    folder = write_chat_tokenizer(tmp_path / "words", "")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(MeshwrightError, match=r'no chat template\. Set data\.chat_template = "chatml"'):
        opened(write_chats(tmp_path / "c.jsonl"), tokenizer=str(folder))
    assert open_tokenizer(str(folder)).vocab_size > 256


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for m in messages %}", "is not a chat template: "),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses it: "),
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate."),
        ("{{ 'x' * 10**12 }}", "is not allowed in a chat template"),
        ("{% include '/etc/passwd' %}", "the chat template refuses it: "),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "message 2 differently"),
    ],
)
def test_a_template_that_does_not_work_or_should_not(source: str, what: str) -> None:
    with pytest.raises((BadRecord, MeshwrightError)) as error:
        ChatTemplate(source=source, where="chat_template.jinja").spans(CHATS[1])
    said = error.value.what if isinstance(error.value, BadRecord) else str(error.value)
    assert what in said
