"""The techniques whose axis may lie across groups of devices, and the pins that are theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.core.technique import Technique, technique_named, technique_names


def sharer() -> type[Technique]:
    """Whose ranks may run different numbers of microbatches."""
    return _first(lambda kind: kind.takes_shares)


def stage_cutter() -> type[Technique]:
    return _first(lambda kind: kind.blocks_of_stages is not Technique.blocks_of_stages)


def _first(is_it: Callable[[type[Technique]], bool]) -> type[Technique]:
    return next(kind for kind in map(technique_named, technique_names()) if is_it(kind))


def without(pin: Sequence[str], kind: type[Technique], setting: str = "") -> list[str]:
    """The pins that are not this technique's, or not of this setting."""

    def is_left(text: str) -> bool:
        target, equals, _ = (part.strip() for part in text.partition("="))
        name, _, own = target.partition(".")
        return name != kind.name or (bool(setting) and (own or ("size" if equals else "")) != setting)

    return [text for text in pin if is_left(text)]
