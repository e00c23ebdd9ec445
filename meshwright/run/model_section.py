"""What a run file says about its model: one of ours by name, a Hugging Face folder, or anybody's function. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.models.presets import Config, preset


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    name: str = ""
    """A preset such as llama3.2-1b; `mw profile` lists them."""
    hf: str = ""
    """A Hugging Face folder: config.json and safetensors."""
    factory: str = ""
    """package.module:function that returns a module, (module, loss) or (module, loss, sample inputs)."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Dimensions that differ from the preset's, such as { num_layers = 2 }."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the factory."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names: "embed.*"."""
    train: tuple[str, ...] = ()
    """If given, only these are trained."""

    def __post_init__(self) -> None:
        given = [key for key in ("name", "hf", "factory") if getattr(self, key)]
        if len(given) != 1:
            what = f"gives {' and '.join(given)}." if given else "says no model."
            fix = 'Give one: name = "llama3.2-1b", hf = "FOLDER" or factory = "package.module:function".'
            raise MeshwrightError([Problem(where="", what=what, fix=fix)])
        problems = []
        if self.change and not self.name:
            problems.append(Problem(where="change", what="is for a model by name."))
        if self.arguments and not self.factory:
            problems.append(Problem(where="arguments", what="are for a factory."))
        if self.factory and self.factory.count(":") != 1:
            what = f'"{self.factory}" is not of the form package.module:function.'
            problems.append(Problem(where="factory", what=what))
        if problems:
            raise MeshwrightError(problems)

    @property
    def title(self) -> str:
        return self.name or (Path(self.hf).name if self.hf else self.factory)

    def config(self) -> Config | None:
        """The dimensions, where it is a model of ours; None where it runs as somebody else's module."""
        if self.name:
            base = preset(self.name)
            if not self.change:
                return base
            values = {name: getattr(base, name) for name in base.__dataclass_fields__}
            return decode(type(base), {**values, **self.change}, "model.change")
        if self.hf:
            from meshwright.hf.config_json import read_folder

            return read_folder(self.hf).config
        return None
