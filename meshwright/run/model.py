"""The model of a run, from wherever it comes: described for planning, then opened with its weights.

One of ours, by name or by a Hugging Face folder that maps onto it, is described without torch. Anything else is built
and looked at (foreign/adapt.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.profile import Profile
from meshwright.models.dimensions import DecoderConfig
from meshwright.models.frozen_parameters import check_patterns, freeze, frozen_by, mark
from meshwright.models.presets import Config, config_kind, profile_of, sequence_problem
from meshwright.run.run_file import ModelSection, RunConfig

if TYPE_CHECKING:
    from meshwright.ops.initial_weights import Source
    from meshwright.ops.model_interface import Model

TAKES = {"decoder": "tokens", "vit": "images", "conv": "images", "dlrm": "table"}
"""What kind of data a model of ours learns from."""
_DESCRIBING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The result of analysing a model, as data. It is sufficient for planning, and for the ranks to build the model
    without analysing it again."""

    section: ModelSection | None
    """Where it comes from; None: from its dimensions alone."""
    kind: str
    config: Config | None
    """The dimensions of a model of ours."""
    profile: Profile
    sequence: int
    """Tokens in the samples that it was looked at with; 0: they have none, or their number does not matter."""
    vocab_size: int
    """0: not known, or no tokens."""
    num_scores: int = 0
    """Classes that somebody else's module tells apart; 0: not known."""
    sample_shape: tuple[int, ...] = ()
    """Shape of an image in the module's sample inputs; empty if they are not images."""
    num_inputs: int = 0
    """Tensors that module is called with; 0: whatever its data gives."""
    findings: Mapping[str, Any] | None = None
    """How that module may be cut (foreign/adapt.py: ModuleFindings); None for models of ours."""

    @classmethod
    def of_config(cls, config: Config) -> ModelDescription:
        kind, vocab = config_kind(config), int(getattr(config, "vocab_size", 0))
        profile = profile_of(config, kind)
        return cls(section=None, kind=kind, config=config, profile=profile, sequence=0, vocab_size=vocab)

    @property
    def takes(self) -> str:
        if self.kind == "module":
            return "tokens" if self.profile.counts == "tokens" else "images" if self.sample_shape else ""
        return TAKES.get(self.kind, "")

    def about(self) -> dict[str, Any]:
        """What a checkpoint tells of its model, so that it can be exported by itself."""
        told: dict[str, Any] = {"model_kind": self.kind}
        if self.config is not None:
            told["model_config"] = encode(self.config)
        if self.section is not None and self.section.hf:
            from meshwright.hf.config_json import read_folder

            told |= {"hf_config": read_folder(self.section.hf).raw, "hf_folder": self.section.hf}
        return told


@dataclass(kw_only=True)
class OpenedModel:
    """A model that lies on the meta device, and where its weights come from."""

    model: Model
    profile: Profile
    source: Source


def describe_run(config: RunConfig) -> ModelDescription:
    """The model of a run, looked at once. What is wrong with it, or with samples of this length, is raised with its
    line of the run file."""
    sequence = config.data.sequence
    try:
        description = describe(config.model, sequence, config.train.seed)
        profile = description.profile
        if profile.counts == "tokens" and sequence < 1:
            what = f"is {sequence}." if sequence else "missing: how many tokens a sample has."
            raise error_at("data.sequence", what, "Use at least 1.")
        if profile.counts == "tokens" and (problem := sequence_problem(profile, sequence, "data.sequence")):
            raise MeshwrightError([problem])
    except MeshwrightError as error:
        problems = [replace(problem, where=problem.where or "model") for problem in error.problems]
        raise MeshwrightError(config.origin.placed(problems)) from None
    return description


def describe(section: ModelSection, sequence: int, seed: int = 0) -> ModelDescription:
    """Describe a model. For somebody else's module this takes seconds: it is built, run and traced. `seed`: as ranks
    will be seeded when they build it, for a factory that draws numbers."""
    config, made = section.config(), None
    if config is not None:
        profile = profile_of(config, section.title)
        vocab = int(getattr(config, "vocab_size", 0))
    else:
        import torch

        from meshwright.foreign.adapt import ModuleFindings, adapt

        # Random numbers and stdout belong to the process: one thread at a time, and it draws on afterwards as if
        # nothing had been seeded.
        with _DESCRIBING, torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(sys.stderr):
            states = random.getstate(), np.random.get_state()
            try:
                module, loss, example = _module(section, sequence, seed)
                made, profile = adapt(module, example, name=section.title, loss=loss)
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])
        vocab = made.vocab_size or int(getattr(getattr(made.module, "config", None), "vocab_size", 0) or 0)
    if section.freeze or section.train:
        check_patterns(profile, section.freeze, section.train)
    if section.freeze or section.train or made is not None:  # a user's module may come with frozen parameters
        is_frozen = _is_frozen(section, made)
        # What a module brings frozen is so in its traced costs.
        is_counted = made is not None and not all(value.requires_grad for value in made.module.parameters())
        profile = (mark if is_counted else freeze)(profile, is_frozen)
    if section.imbalance != 1:
        if not any(param.shared_out == "experts" for layer in profile.layers for param in layer.params):
            raise error_at("imbalance", f"{section.title} has no experts that ranks could share out.", "Leave it out.")
        profile = replace(profile, imbalance=section.imbalance)
    about: dict[str, Any] = {"section": section, "config": config, "profile": profile}
    about |= {"sequence": sequence, "vocab_size": vocab}
    if config is not None:
        return ModelDescription(kind=config_kind(config), **about)
    assert made is not None
    if idle := [name for name in made.idle if not is_frozen(name)]:
        # A parameter without a gradient would be decayed by one plan and waited for by another.
        what = f"its scores do not depend on {', '.join(idle[:4])}{' and others' if idle[4:] else ''}."
        raise error_at(f"model {section.title}", what, f"Remove them, or set model.freeze = {json.dumps(idle[:4])}.")
    is_image = not isinstance(example, tuple) and example.is_floating_point() and example.ndim == 4
    findings = ModuleFindings.of(made)
    return ModelDescription(
        kind="module",
        num_scores=made.num_scores,
        sample_shape=tuple(example.shape[1:]) if is_image else (),
        num_inputs=len(example) if isinstance(example, tuple) else 1,
        findings=None if findings is None else encode(findings),
        **about,
    )


def section_named(text: str, **more: Any) -> ModelSection:
    """A named model, a Hugging Face folder by its path, or a factory; `more`: other keys of the section."""
    if os.path.isdir(text):
        return ModelSection(hf=text, **more)
    return ModelSection(factory=text, **more) if ":" in text else ModelSection(name=text, **more)


def _module(section: ModelSection, sequence: int, seed: int) -> tuple[Any, Any, Any]:
    """The user's module, its loss (None: the default one) and sample inputs. Whatever it draws from is seeded, and
    stdout, which is for results, is closed to what its code prints."""
    import torch

    from meshwright.foreign.factory import call_factory
    from meshwright.hf.weights_module import transformers_module

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    with contextlib.redirect_stdout(sys.stderr):
        if section.factory:
            return call_factory(section.factory, section.arguments, sequence)
        module, example = transformers_module(section.hf, sequence)
        return module, None, example


def _is_frozen(section: ModelSection, made: Any) -> Callable[[str], bool]:
    """By the run file, or by the module itself."""
    by_name = frozen_by(section.freeze, section.train)
    if made is None:
        return by_name
    own = {name for name, value in made.module.named_parameters() if not value.requires_grad}
    return lambda name: name in own or by_name(name)


def open_model(description: ModelDescription, seed: int) -> OpenedModel:
    """The module itself, as it was described; nothing of it is run."""
    section, config = description.section, description.config
    if config is not None:
        opened = open_config(config, description.profile.name, seed)
        if section is None:
            return opened
        model, source = opened.model, opened.source
        if section.hf:
            from meshwright.hf.weights_read import source_of_folder
            from meshwright.ops.packed_weights import source_of_adapted

            assert isinstance(config, DecoderConfig)
            weights = source_of_folder(section.hf, replace(config, adapter=None))
            source = weights if config.adapter is None else source_of_adapted(weights, source)
    else:
        from meshwright.foreign.adapt import ModuleFindings, adapt
        from meshwright.ops.initial_weights import from_tensors

        assert section is not None
        # The module draws its own first weights, the same on every rank.
        module, loss, example = _module(section, description.sequence, seed)
        with contextlib.redirect_stdout(sys.stderr):
            if description.findings is None:
                model, _ = adapt(module, example, name=section.title, loss=loss)
            else:
                findings = decode(ModuleFindings, description.findings, "findings")
                model = findings.adapted(module, example, loss)
        if section.hf:
            from meshwright.hf.weights_read import source_of_named

            source = source_of_named(section.hf, model.module)
        else:
            source = from_tensors({n: p.detach() for n, p in model.module.named_parameters()})
            model.empty()
    is_frozen = _is_frozen(section, model if config is None else None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not is_frozen(model.public_name(name)))
    return OpenedModel(model=model, profile=description.profile, source=source)


def fitting(described: ModelDescription, data: Any) -> None:
    """Whether the data is of the kind and size that the model takes; raises all that is wrong."""
    problems: list[Problem] = []
    name, where = described.profile.name, data.files[0].path if data.files else "data"

    def wrong(what: str, fix: str = "") -> None:
        problems.append(Problem(where=where, what=what, fix=fix))

    if described.takes and data.kind != described.takes:
        raise error_at(where, f"the files hold {data.kind}; {name} learns from {described.takes}.")
    config: Any = described.config
    if data.kind == "tokens" and described.vocab_size:
        problems += data.check_vocabulary(described.vocab_size)
    if described.num_inputs:
        inputs = data.batch(0, 1, 0, 1).inputs
        num_given, num_taken = len(inputs) if isinstance(inputs, tuple) else 1, described.num_inputs
        if num_given != num_taken:
            what = f"a sample is {num_given} tensors; {name} is called with {num_taken}."
            packed = 'Documents come with their numbers: set data.packing = "stream", or write'
            wrong(what, f"{packed if described.takes == 'tokens' else 'Write'} a module that takes {num_given}.")
    num_targets = data.vocab_size if data.kind == "tokens" and described.num_scores else data.info.num_classes
    if described.num_scores > 1 and num_targets > described.num_scores:
        what = f"targets go up to {num_targets - 1}; {name} has scores for {described.num_scores}."
        wrong(what, "Give the module's last layer more outputs.")
    if data.kind == "images" and described.sample_shape not in ((), tuple(data.info.shape)):
        what = f"images are {_by(data.info.shape)}; the sample inputs of {name} {_by(described.sample_shape)}."
        wrong(what, "Resize them, or return sample inputs like them from the factory.")
    if data.kind == "images" and config is not None:
        wanted = (config.channels, config.image_size, config.image_size)
        if tuple(data.info.shape) != wanted:
            what = f"images are {_by(data.info.shape)}; {name} takes {_by(wanted)} (channels, height, width)."
            changes = f"{{ channels = {data.info.shape[0]}, image_size = {data.info.shape[1]} }}"
            wrong(what, f"Resize them, or set model.change = {changes}.")
        if data.info.num_classes > config.num_classes:
            what = f"the data has {data.info.num_classes} classes, {name} {config.num_classes}."
            wrong(what, f"Set model.change.num_classes = {data.info.num_classes}.")
    if data.kind == "table" and config is not None:
        dense, columns, *sizes = data.info.shape
        if dense != config.num_dense or columns != len(config.tables):
            takes = f"{config.num_dense} and {len(config.tables)}"
            what = f"has {dense} dense and {columns} id columns; {name} takes {takes}."
            wrong(what, f"Set model.change = {{ num_dense = {dense}, tables = {list(sizes)} }}.")
        for i, (size, rows) in enumerate(zip(sizes, config.tables, strict=False)):
            if size > rows and not problems:
                wrong(f"id column {i} has ids up to {size - 1}; its table has {rows} rows.")
    raise_problems(problems)


def _by(shape: Any) -> str:
    return " x ".join(map(str, shape))


def open_config(config: Config, name: str, seed: int) -> OpenedModel:
    """A model of ours from its dimensions, filled from a seed."""
    import torch

    from meshwright.ops.initial_weights import seeded
    from meshwright.ops.packed_weights import source_of_adapted
    from meshwright.zoo import module_of

    with torch.device("meta"):
        model = module_of(config)
    source = seeded(model.init_value, seed)
    if getattr(config, "adapter", None) is not None:
        source = source_of_adapted(source, source)
    return OpenedModel(model=model, profile=profile_of(config, name), source=source)
