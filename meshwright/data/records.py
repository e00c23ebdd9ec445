"""Documents as they lie in files with fields (lines of JSON, columns), and what can be wrong with one.

A record is a text, with a prompt before it or not, or a conversation (`messages`; ShareGPT's and Alpaca's fields are
read as such), which a chat template makes a text of.

A template is Jinja, as Hugging Face folders hold it; it runs in Jinja's sandbox, which reaches no file and no module.
What the assistant said is what the template puts between {% generation %} and {% endgeneration %}. Without these marks
each turn of the assistant is rendered twice more: the conversation before it, as the model would be asked to answer,
and the conversation up to its end. The first must be the beginning of the second, and that of the whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from meshwright.core.errors import MeshwrightError, Problem, error_at
from meshwright.core.units import MIB
from meshwright.data.data_section import DataSection
from meshwright.data.file_list import collect_problems, readable
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer, special_token, tokenizer_settings

_MAX_PROBLEMS_PER_FILE = 3
CHAT_FIELDS = ("messages", "conversations", "instruction", "input", "output", "tools")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_OTHER_FORMATS = (("question", "answer"), ("prompt", "completion"), ("prompt", "response"), ("query", "response"))

Row = TypeVar("Row")
Span = tuple[int, int]
"""Characters of a text, from the first up to the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKeys:
    """The names of a record's fields, or of a table's columns."""

    text: str = "text"
    prompt: str = "prompt"
    template: ChatTemplate | None = None
    """For conversations."""

    @property
    def facts(self) -> tuple[str, ...]:
        """What, beside the tokenizer, decides the tokens of a record."""
        return (self.text, self.prompt, self.template.name if self.template else "")

    def wanted(self, names: Collection[str]) -> list[str]:
        """The columns to read of a table that has these; none where no document can be made of them."""
        if self.text in names:
            return [self.text, *([self.prompt] if self.prompt in names else [])]
        return [name for name in CHAT_FIELDS if name in names] if has_messages(names) else []


@dataclass(kw_only=True, slots=True)
class Records:
    """Documents of one chunk as UTF-8: all that have something in them."""

    texts: list[bytes] = field(default_factory=list)
    prompts: list[bytes] = field(default_factory=list)
    said: list[list[Span] | None] = field(default_factory=list)
    """For conversations: what the assistant said."""
    num_records: int = 0
    """Empty ones too."""

    def add(self, record: Mapping[str, Any], keys: TextKeys) -> None:
        """Raises BadRecord."""
        said = None
        if keys.text in record:
            given = record.get(keys.prompt)
            prompt = b"" if given is None else _text_field(given, keys.prompt)
            text = _text_field(record[keys.text], keys.text)
        elif has_messages(record):
            if keys.template is None:
                fix = 'Set data.chat_template = "chatml", or a file.jinja.'
                raise BadRecord("is a conversation, and the tokenizer has no chat template.", fix)
            messages = _messages_of(record)
            spoken, said = keys.template.spans(messages, record.get("tools")) if messages else ("", [])
            prompt, text = b"", _text_field(spoken, "messages")
        else:
            names = ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"
            raise BadRecord(f'has no "{keys.text}" key.', f"Its keys: {names}. {nearest_format(record)}".rstrip())
        self.num_records += 1
        if prompt or text:
            self.prompts.append(prompt)
            self.texts.append(text)
            self.said.append(said)


class BadRecord(Exception):
    def __init__(self, what: str, fix: str = ""):
        self.what, self.fix = what, fix


def read_records(
    path: str,
    rows: Iterable[tuple[int, Row]],
    parse: Callable[[Row], Mapping[str, Any]],
    place: Callable[[int], str],
    keys: TextKeys,
    problems: list[Problem],
    name: str,
) -> Records:
    """The records that `parse` makes of numbered rows. Of the bad ones (`name`) the first few are told, others counted.

    `place` is asked only to say where a problem is.
    """
    records, num_bad = Records(), 0
    for number, row in rows:
        try:
            records.add(parse(row), keys)
        except BadRecord as bad:
            num_bad += 1
            if num_bad <= _MAX_PROBLEMS_PER_FILE:
                problems.append(Problem(where=place(number), what=bad.what, fix=bad.fix))
    if num_bad > _MAX_PROBLEMS_PER_FILE:
        what = f"and {num_bad - _MAX_PROBLEMS_PER_FILE} more {name} in this file."
        problems.append(Problem(where=path, what=what))
    return records


def parse_line(line: bytes, keys: TextKeys) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not valid JSON: {error.msg} (column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a thousand nested lists
        raise BadRecord(f"is not usable JSON: {error}.") from None
    if not isinstance(record, dict):
        raise BadRecord(
            f"holds a {type(record).__name__}, not an object.", f'Write {{"{keys.text}": "..."}} on each line.'
        )
    return record


def has_messages(names: Collection[str]) -> bool:
    """Whether a record with these fields is a conversation."""
    return "messages" in names or "conversations" in names or ("instruction" in names and "output" in names)


def _messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record: `messages`, ShareGPT's `conversations`, or Alpaca's `instruction` and `output`."""

    def message_at(where: str, message: Any) -> dict[str, Any]:
        """One message, `from` and `value` as `role` and `content`; its other fields are for the template."""
        if not isinstance(message, Mapping):
            raise BadRecord(f"{where} is a {type(message).__name__}, not a message.")
        others = {name: value for name, value in message.items() if name not in ("from", "value") and value is not None}
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list) and all(
            isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
        ):
            content = "".join(part["text"] for part in content)
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRecord(f"{where} has no text as role or content.", 'Write {"role": "user", "content": "..."}.')
        return {**others, "role": _SHAREGPT_ROLES.get(role, role), "content": content}

    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            if not isinstance(record[key], list):
                raise BadRecord(f'"{key}" is a {type(record[key]).__name__}, not a list of messages.')
            return [message_at(f'"{key}"[{number}]', each) for number, each in enumerate(record[key])]
    fields = ("instruction", "input", "output") if record.get("input") else ("instruction", "output")
    for key in fields:
        _text_field(record.get(key), key)
    given = "\n\n".join(record[key] for key in fields[:-1])
    return [{"role": "user", "content": given}, {"role": "assistant", "content": record["output"]}]


def nearest_format(names: Collection[str]) -> str:
    """What to set for records with these fields."""
    for prompt, text in _OTHER_FORMATS:
        if prompt in names and text in names:
            return f'Set data.prompt_key = "{prompt}" and data.text_key = "{text}".'
    if "chosen" in names:
        return 'Preferences are not learnt; data.text_key = "chosen" takes the chosen texts.'
    return ""


def _text_field(value: object, key: str) -> bytes:
    if not isinstance(value, str):
        raise BadRecord(f'"{key}" is a {type(value).__name__}, not text.')
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f'"{key}" holds half of a surrogate pair at character {error.start}: not valid Unicode.'
        raise BadRecord(what) from None


CHATML = "chatml"
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MAX_TEMPLATE_BYTES = MIB
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Drawn anew in each process, so that no text can hold them.
_BEGIN, _END = f"\x02{secrets.token_hex(8)}\x02", f"\x03{secrets.token_hex(8)}\x03"


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    where: str
    tokens: tuple[tuple[str, str], ...] = ()
    """What the template may call the special tokens of its tokenizer."""

    @property
    def name(self) -> str:
        """Another name wherever the same messages give another text."""
        return xxhash.xxh3_64_hexdigest(json.dumps([self.source, self.tokens]).encode())

    @cached_property
    def _render(self) -> Callable[..., str]:
        try:
            return _environment().from_string(self.source).render
        except ImportError:
            raise error_at(self.where, "needs the jinja2 package.", "Run: pip install meshwright[text]") from None
        except Exception as error:
            raise error_at(self.where, f"is not a chat template: {str(error)[:200]}.") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, asks: bool = False) -> str:
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": asks}
        try:
            return self._render(**dict(self.tokens), **values)
        except MeshwrightError:
            raise
        except Exception as error:  # what a template does with an odd record is its own affair
            raise BadRecord(f"the chat template refuses it: {str(error)[:200]}.") from None

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """The text of a conversation, and what of it the assistant said."""
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRecord("has no message of the assistant: there is nothing to learn.", "Leave it out.")
        marked = self.render(messages, tools=tools)
        spans: list[Span] = []
        if _BEGIN in marked:
            text = ""
            for number, piece in enumerate(marked.split(_BEGIN)):
                said, mark, rest = piece.partition(_END)
                if number and mark:
                    spans.append((len(text), len(text) + len(said)))
                text += said + rest
            return text, spans
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], tools=tools, asks=True)
            until = self.render(messages[: number + 1], tools=tools)
            if not (until.startswith(before) and marked.startswith(until)):
                what = f"the chat template shows message {number} differently when others follow, so what the "
                fix = f'Use a template with {{% generation %}} marks, or data.chat_template = "{CHATML}".'
                raise BadRecord(f"{what}assistant said cannot be told.", fix)
            if spans and spans[-1][1] == len(before):
                spans[-1] = (spans[-1][0], len(until))
            else:
                spans.append((len(before), len(until)))
        return marked, spans


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not all(isinstance(value, int | float) for value in (left, right)):
                raise ValueError(f"{operator} of texts, lists or powers is not allowed in a chat template")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise ValueError(message)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def open_template(name: str, tokenizer: str) -> ChatTemplate | None:
    """The template called so ("": the tokenizer's own); None where the tokenizer has none."""
    folder = Path(tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    settings = {} if tokenizer == "byte" else tokenizer_settings(folder)
    tokens = tuple((key, word) for key in _SPECIAL_TOKENS if (word := special_token(settings, key)) is not None)
    if name == CHATML or (not name and tokenizer == "byte"):
        return ChatTemplate(source=_CHATML, where=CHATML, tokens=tokens)
    path = Path(name).expanduser() if name else folder / "chat_template.jinja"
    if name or path.exists():
        with readable(str(path), "a chat template"):
            if path.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has more than {_MAX_TEMPLATE_BYTES:,} bytes")
            return ChatTemplate(source=path.read_text(encoding="utf-8"), where=str(path), tokens=tokens)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, Mapping)}
        source = named.get("default")
    where = str(folder / "tokenizer_config.json")
    return ChatTemplate(source=source, where=where, tokens=tokens) if isinstance(source, str) else None


def open_words(section: DataSection, problems: list[Problem]) -> tuple[Tokenizer, TextKeys]:
    """The tokenizer and the fields of a section; where problems are appended, others stand for them."""
    words: Tokenizer = ByteTokenizer()
    template = None
    with collect_problems(problems):
        words = open_tokenizer(section.tokenizer)
    with collect_problems(problems):
        template = open_template(section.chat_template, section.tokenizer)
    return words, TextKeys(text=section.text_key, prompt=section.prompt_key, template=template)
