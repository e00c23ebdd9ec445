"""Documents as they lie in files with fields: lines of JSON, and what can be wrong with one.

A record is a text, with a prompt before it or not, or a conversation (`messages`; ShareGPT's and Alpaca's fields are
read as such), which a chat template makes a text of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwright.core.errors import Problem

_MAX_PROBLEMS_PER_FILE = 3
CHAT_FIELDS = ("messages", "conversations", "instruction", "input", "output", "tools")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_OTHER_FORMATS = (("question", "answer"), ("prompt", "completion"), ("prompt", "response"), ("query", "response"))

Span = tuple[int, int]
"""Characters of a text, from the first up to the second."""


class ChatTemplateLike(Protocol):
    """`data.chat.ChatTemplate`."""

    @property
    def name(self) -> str: ...

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """The text of a conversation, and what of it the assistant said."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKeys:
    """The names of a record's fields, or of a table's columns."""

    text: str = "text"
    prompt: str = "prompt"
    template: ChatTemplateLike | None = None
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
    """Of conversations: what the assistant said."""
    num_records: int = 0
    """Empty ones too."""

    def add(self, record: Mapping[str, Any], keys: TextKeys) -> None:
        """Raises BadRecord."""
        said = None
        if keys.text in record:
            given = record.get(keys.prompt)
            prompt = b"" if given is None else text_field(given, keys.prompt)
            text = text_field(record[keys.text], keys.text)
        elif has_messages(record):
            prompt = b""
            text, said = conversation(record, keys.template)
        else:
            found = ", ".join(f'"{key}"' for key in list(record)[:8]) or "none"
            raise BadRecord(f'has no "{keys.text}" key.', f"Its keys: {found}. {nearest_format(record)}".rstrip())
        self.num_records += 1
        if prompt or text:
            self.prompts.append(prompt)
            self.texts.append(text)
            self.said.append(said)


@dataclass(kw_only=True)
class FileProblems:
    """The first few of a file one by one, the others counted."""

    path: str
    problems: list[Problem]
    name: str = "bad lines"
    num_bad: int = 0

    def add(self, where: str, bad: BadRecord) -> None:
        self.num_bad += 1
        if self.num_bad <= _MAX_PROBLEMS_PER_FILE:
            self.problems.append(Problem(where=where, what=bad.what, fix=bad.fix))

    def close(self) -> None:
        if self.num_bad > _MAX_PROBLEMS_PER_FILE:
            what = f"and {self.num_bad - _MAX_PROBLEMS_PER_FILE} more {self.name} in this file."
            self.problems.append(Problem(where=self.path, what=what))


class BadRecord(Exception):
    def __init__(self, what: str, fix: str = ""):
        self.what, self.fix = what, fix


def parse_lines(
    path: str, content: bytes, keys: TextKeys, num_lines_before: Callable[[], int], problems: list[Problem]
) -> Records:
    """The records of whole lines. `num_lines_before` is asked only to say where a problem is."""
    records, bad_lines = Records(), FileProblems(path=path, problems=problems)
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.add(_record(line, keys), keys)
        except BadRecord as bad:
            bad_lines.add(f"{path}:{num_lines_before() + number}", bad)
    bad_lines.close()
    return records


def _record(line: bytes, keys: TextKeys) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(f"is not valid JSON: {error.msg} (column {error.colno}).") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a thousand nested lists
        raise BadRecord(f"is not usable JSON: {error}.") from None
    if not isinstance(record, dict):
        what = f"holds a {type(record).__name__}, not an object."
        raise BadRecord(what, f'Write {{"{keys.text}": "..."}} on each line.')
    return record


def has_messages(names: Collection[str]) -> bool:
    """Whether a record with these fields is a conversation."""
    return "messages" in names or "conversations" in names or ("instruction" in names and "output" in names)


def conversation(record: Mapping[str, Any], template: ChatTemplateLike | None) -> tuple[bytes, list[Span]]:
    """The text of a conversation, and what of it the assistant said."""
    if template is None:
        fix = 'Set data.chat_template = "chatml", or a file.jinja.'
        raise BadRecord("is a conversation, and the tokenizer has no chat template.", fix)
    messages = messages_of(record)
    text, said = template.spans(messages, record.get("tools")) if messages else ("", [])
    return text_field(text, "messages"), said


def messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record: `messages`, ShareGPT's `conversations`, or Alpaca's `instruction` and `output`."""
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            if not isinstance(record[key], list):
                raise BadRecord(f'"{key}" is a {type(record[key]).__name__}, not a list of messages.')
            return [_message(each, f'"{key}"[{number}]') for number, each in enumerate(record[key])]
    fields = ("instruction", "input", "output") if record.get("input") else ("instruction", "output")
    for key in fields:
        text_field(record.get(key), key)
    given = "\n\n".join(record[key] for key in fields[:-1])
    return [{"role": "user", "content": given}, {"role": "assistant", "content": record["output"]}]


def _message(message: Any, where: str) -> dict[str, Any]:
    """One message, `from` and `value` as `role` and `content`; what else it has is the template's."""
    if not isinstance(message, Mapping):
        raise BadRecord(f"{where} is a {type(message).__name__}, not a message.")
    found = {name: value for name, value in message.items() if name not in ("from", "value") and value is not None}
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRecord(f"{where} has no text as role or content.", 'Write {"role": "user", "content": "..."}.')
    return {**found, "role": _SHAREGPT_ROLES.get(role, role), "content": content}


def nearest_format(names: Collection[str]) -> str:
    """What to set for records with these fields."""
    for prompt, text in _OTHER_FORMATS:
        if prompt in names and text in names:
            return f'Set data.prompt_key = "{prompt}" and data.text_key = "{text}".'
    if "chosen" in names:
        return 'Preferences are not learnt; data.text_key = "chosen" takes the chosen texts.'
    return ""


def text_field(value: object, key: str) -> bytes:
    if not isinstance(value, str):
        raise BadRecord(f'"{key}" is a {type(value).__name__}, not text.')
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f'"{key}" holds half of a surrogate pair at character {error.start}: not valid Unicode.'
        raise BadRecord(what) from None
