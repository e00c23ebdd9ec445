"""Conversations as text: a list of messages through a chat template, and which characters the assistant said.

A template is Jinja, as Hugging Face folders hold it; it runs in Jinja's sandbox, which reaches no file and no module.
What the assistant said is what the template puts between {% generation %} and {% endgeneration %}. Without these marks
each turn of the assistant is rendered twice more: the conversation before it, as the model would be asked to answer,
and the conversation up to its end. The first must be the beginning of the second, and that of the whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import MIB
from meshwright.data.arrays import readable
from meshwright.data.json_records import BadRecord, Span
from meshwright.data.tokenizer import special_token, tokenizer_settings

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
            what, fix = "needs the jinja2 package.", "Run: pip install meshwright[text]"
            raise MeshwrightError([Problem(where=self.where, what=what, fix=fix)]) from None
        except Exception as error:
            what = f"is not a chat template: {str(error)[:200]}."
            raise MeshwrightError([Problem(where=self.where, what=what)]) from None

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
        if _BEGIN in marked:
            return _take_marks(marked)
        spans: list[Span] = []
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


def _take_marks(marked: str) -> tuple[str, list[Span]]:
    text, spans = "", []
    for number, piece in enumerate(marked.split(_BEGIN)):
        said, mark, rest = piece.partition(_END)
        if number and mark:
            spans.append((len(text), len(text) + len(said)))
        text += said + rest
    return text, spans


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
