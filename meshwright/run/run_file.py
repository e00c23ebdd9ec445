"""A run file: TOML as short as the user's intent, strict about every key, complaining by line. No torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshwright.ask.question import MOST_HEADROOM
from meshwright.ask.what_if import read_memory
from meshwright.core.codec import decode, decode_into, encode
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.plan import Plan
from meshwright.core.technique import PHASES, Exactness
from meshwright.data.data_section import DataSection
from meshwright.models.dimensions import Adapter
from meshwright.models.presets import Config, DecoderConfig, preset
from meshwright.optimizers.optimizer_config import OptimizerConfig

__all__ = ["DataSection", "ModelSection", "OptimizerConfig", "PlanSection", "RunConfig", "RunSection", "TrainSection"]


def _below(section: Any, least: int, *keys: str) -> list[Problem]:
    """A problem for each key of a section whose number is less than `least`."""
    values, fix = {key: getattr(section, key) for key in keys}, "Use at least 1." if least else "Use zero or more."
    return [Problem(where=key, what=f"is {value}.", fix=fix) for key, value in values.items() if value < least]


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
    imbalance: float = 1.0
    """Times the mean that the busiest rank's experts get rows: what plans of a mixture of experts are priced by."""
    adapter: Adapter | None = None
    """Low-rank adapters that alone are trained, such as { rank = 16, base = "nf4" }."""

    def __post_init__(self) -> None:
        given = [key for key in ("name", "hf", "factory") if getattr(self, key)]
        if len(given) != 1:
            what = f"gives {' and '.join(given)}." if given else "says no model."
            fix = 'Give one: name = "llama3.2-1b", hf = "FOLDER" or factory = "package.module:function".'
            raise error_at("", what, fix)
        problems = []
        if not 1 <= self.imbalance < 1000:
            fix = "Use at least 1: times the mean that the busiest rank gets."
            problems.append(Problem(where="imbalance", what=f"is {self.imbalance:g}.", fix=fix))
        if self.change and not self.name:
            problems.append(Problem(where="change", what="is for a model by name."))
        if self.arguments and not self.factory:
            problems.append(Problem(where="arguments", what="are for a factory."))
        if self.adapter and (self.freeze or self.train):
            what = "alone is trained: all else is frozen."
            problems.append(Problem(where="adapter", what=what, fix="Leave out freeze and train."))
        if self.factory and self.factory.count(":") != 1:
            what = f'"{self.factory}" is not of the form package.module:function.'
            problems.append(Problem(where="factory", what=what))
        raise_problems(problems)

    @property
    def title(self) -> str:
        return self.name or (Path(self.hf).name if self.hf else self.factory)

    def config(self) -> Config | None:
        """The dimensions, where it is a model of ours; None where it runs as somebody else's module."""
        config: Config | None = None
        if self.name:
            config = preset(self.name)
            config = decode(type(config), {**encode(config), **self.change}, "model.change") if self.change else config
        elif self.hf:
            from meshwright.hf.config_json import read_folder

            config = read_folder(self.hf).config
        if self.adapter is None:
            return config
        if not isinstance(config, DecoderConfig):
            what = f"is for linear layers of our own decoders, and {self.title} is none."
            raise error_at("model.adapter", what, "Leave it out; modules of your own may bring adapters with them.")
        return decode(DecoderConfig, {**encode(config), "adapter": encode(self.adapter)}, "model")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """`[train]` of a run file: how much to train, with which optimizer, and when to evaluate, save and sample."""

    batch: int
    """Samples per step, the same whatever the plan."""
    steps: int
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    evaluate_every: int = 0
    """Steps between evaluations on held-out data; 0: only at the end."""
    evaluate_batches: int = 8
    save_minutes: float | Literal["auto"] = "auto"
    """Minutes between checkpoints, beside those of `save_every` and the one at the end; 0: none by time; "auto": from
    what a checkpoint is measured to cost and how often failures are expected, at most 10."""
    save_every: int = 0
    """Steps between checkpoints; 0: by time alone."""
    save_async: bool | Literal["auto"] = "auto"
    """Whether training goes on while a checkpoint is written, from a copy in host memory; "auto": if there is room."""
    memory_save_seconds: float = 0.0
    """Seconds between copies of the state in host memory, which a restart after a crash goes on from; 0: none."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of it are kept, too; 0: none."""
    sample_every: int = 0
    """Steps between texts that the model writes, to be read by people; 0: none."""
    sample_tokens: int = 64
    """The most tokens such a text goes on for; each costs a forward pass of a microbatch."""
    sample_prompt: str = ""
    """How the texts begin; empty: as a new document."""
    memory_cap: str = ""
    """Memory of each device that an eager step may use, such as "20GiB"; empty: all of it. Where the plan needs more,
    what blocks save for backward is evicted, and computed again or brought back from host memory."""
    on_nan: Literal["stop", "skip", "roll_back"] = "stop"
    """What to do about a step whose loss or gradient is not finite; nothing is updated by it in any case."""
    on_spike: Literal["ignore", "warn", "skip", "roll_back", "stop"] = "warn"
    """What to do about a step whose loss or gradient norm is far above those of the steps before."""
    most_bad_steps: int = 5
    """Steps in a row that may be skipped, and roll backs without progress; then the run stops."""
    compare_replicas_every: int = 50
    """Steps between comparisons of what several ranks hold alike, beside those before each checkpoint; 0: none."""
    on_mismatch: Literal["stop", "roll_back"] = "stop"
    """What to do where one of them differs."""

    def __post_init__(self) -> None:
        problems = _below(self, 1, "batch", "steps", "evaluate_batches", "keep", "sample_tokens", "most_bad_steps")
        problems += _below(
            self, 0, "compare_replicas_every", "save_every", "keep_every", "evaluate_every", "sample_every"
        )
        problems += _below(self, 0, "memory_save_seconds")
        problems += _below(self, 0, "save_minutes") if self.save_minutes != "auto" else []
        if self.memory_cap:
            read_memory(self.memory_cap, "memory_cap", problems)
        raise_problems(problems)

    @property
    def cap_bytes(self) -> int:
        """0: there is no cap."""
        return read_memory(self.memory_cap, "", []) or 0 if self.memory_cap else 0

    def problems_with(self, plan: Plan) -> list[Problem]:
        """Why the memory cap cannot hold with a plan, and why it cannot skip steps."""
        problems, fix = [], "Leave the cap out, or plan without it (plan.ban, or another schedule)."
        for each in plan.techniques:
            for key in ("on_nan", "on_spike") if each.overlaps_steps or each.updates_in_backward else ():
                if getattr(self, key) == "skip":
                    what = f'is "skip", and with {each} a step has updated parameters before all of it is known.'
                    other = 'Use "roll_back" or "stop", or plan without it (plan.ban, or another schedule).'
                    problems.append(Problem(where=f"train.{key}", what=what, fix=other))
        for each in plan.techniques:
            if each.paces_apart and self.on_spike not in ("ignore", "warn"):
                what = (
                    f'is "{self.on_spike}", and with {each} each rank has a loss of its own, which others do not know.'
                )
                problems.append(Problem(where="train.on_spike", what=what, fix='Use "warn" or "ignore".'))
        for each in plan.techniques if self.memory_cap else ():
            reasons = {
                "it makes single pieces of whole blocks, from which nothing can be evicted.": each.phase == PHASES[4],
                "its schedule keeps what gradients of weights need longer than backward does.": each.splits_backward,
                "its steps overlap, and a cap is for one step at a time.": each.overlaps_steps,
                "it moves tensors out of the device's memory by itself.": each.uses_tiers,
            }
            told = [f"cannot hold with {each}: {why}" for why, applies in reasons.items() if applies]
            problems += [Problem(where="train.memory_cap", what=what, fix=fix) for what in told]
        return problems

    def require_tokenizer(self, data: Any) -> None:
        """Raises where texts are to be written and the data cannot say how."""
        if self.sample_every and data.tokenizer is None:
            what = f"the data holds {data.kind} without a tokenizer, so no text can be written."
            fix = "Set it to 0, or train on text or on token files of `mw data prepare`."
            raise error_at("train.sample_every", what, fix)


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    file: str = ""
    """A plan to use as it is."""
    allow: Exactness = "rounded"
    pin: tuple[str, ...] = ()
    """Settings the search must keep, such as "replicate=2"."""
    ban: tuple[str, ...] = ()
    """Techniques the search must not use."""
    headroom: float | None = None
    """Percent of a device's memory that the forecast of a searched plan leaves free; by default 6."""

    def __post_init__(self) -> None:
        if not 0 <= (self.headroom or 0) <= MOST_HEADROOM:
            raise error_at("headroom", f"is {self.headroom:g} percent.", f"Use 0 to {MOST_HEADROOM:g}.")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    folder: str
    cluster: str = ""
    """A cluster by name or file; empty: this machine, measured."""
    ranks: int = 0
    """Processes to start; 0: one for each device found."""
    disk: str = ""
    """A folder on the disk that holds optimizer states, where a plan has them there; empty: the run's own folder."""
    timeline_steps: int = 2
    """Steps recorded for the measured timeline."""
    track: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Tools that follow the run, beside metrics.jsonl and TensorBoard."""
    remote: str = ""
    """Object storage that gets every checkpoint, too: "s3://BUCKET/PREFIX", a prefix of this run's own."""
    restarts: int = 3
    """After failures in a row without a new checkpoint; then the run stops. 0: it stops at the first failure."""
    grace_seconds: float = 30.0
    """From a stop signal until ranks that have not saved and ended are killed."""
    patience_minutes: float = 30.0
    """Without a sign of life, in the first steps, an evaluation or a save, until a rank counts as hung; in later steps
    their usual time decides. 0: hangs are not looked for."""
    standby: bool = False
    """Processes that have imported everything wait beside the ranks, so that a restart takes a second or two."""

    on_oom: Literal["stop", "retry"] = "stop"
    """What to do where a step runs out of memory; retry: in smaller microbatches, with the same batch."""
    replan: Literal["never", "when_slow"] = "never"
    """Whether another plan is searched for, and changed to, where steps steadily take longer than forecast."""
    elastic: bool = False
    """Go on with fewer ranks, planned anew, where one fails again and again, or fewer devices are found at a start."""
    min_ranks: int = 1
    """The fewest to go on with."""
    hosts: str | int = ""
    """Several hosts, on each of which `mw train` is started once: "4", or "2:4" to go on with as few as 2."""
    rendezvous: str = ""
    """Where they meet: "HOST:PORT" of one of them, or several by commas, which take over in this order."""
    wait_minutes: float = 10.0
    """For hosts that are missing; then the run ends."""

    def __post_init__(self) -> None:
        problems = _below(self, 0, "ranks", "timeline_steps", "restarts", "grace_seconds", "patience_minutes")
        problems += _below(self, 1, "min_ranks")
        least, most = self.host_range
        if self.hosts and not 1 <= least <= most:
            problems.append(Problem(where="hosts", what=f'is "{self.hosts}".', fix='Use the form "4" or "2:4".'))
        if self.hosts and not all(re.fullmatch(r"\S+:\d{1,5}", each) for each in self.endpoints):
            what, fix = f'is "{self.rendezvous}".', 'Name where hosts meet: "10.0.0.1:29500".'
            problems.append(Problem(where="rendezvous", what=what, fix=fix))
        problems += _below(self, 0, "wait_minutes")
        if not self.folder.strip():
            problems.append(Problem(where="folder", what="is empty.", fix="Name a folder for this run."))
        if self.remote and not re.fullmatch(r"s3://[a-z0-9.-]{3,63}(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+/?", self.remote):
            what = f'is "{self.remote[:100]}".'
            problems.append(Problem(where="remote", what=what, fix="Use the form s3://BUCKET/PREFIX."))
        raise_problems(problems)

    @property
    def host_range(self) -> tuple[int, int]:
        """The fewest hosts and the most; zeros where `hosts` says neither."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(self.hosts))
        return (int(found[1]), int(found[2] or found[1])) if found else (0, 0)

    @property
    def endpoints(self) -> list[str]:
        return [each.strip() for each in self.rendezvous.split(",")]


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """The file that a run was read from, so that what is found wrong later is told with its line."""

    path: str = ""
    text: str = ""
    changed: frozenset[str] = frozenset()
    """Keys that the command line changed."""

    def placed(self, problems: Sequence[Problem]) -> list[Problem]:
        """The same problems with the file and line of each."""
        if not self.path:
            return list(problems)
        placed = []
        for problem in problems:
            key = problem.where.strip(".")
            line = None if key in self.changed or key.startswith("--set") else line_of(self.text, key)
            place = f"{self.path}:{line}: {key}" if line else f"{self.path}: {key}"
            if key in self.changed:
                place = f"--set {key}"
            placed.append(replace(problem, where=key if key.startswith("--set") else place))
        return placed


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The content of a run file. Settings that depend on the model (the longest sequence, the parameters that a pattern
    matches) are validated by `run.model.describe_run`, not here: reading a file executes no code."""

    model: ModelSection
    data: DataSection
    train: TrainSection
    run: RunSection
    plan: PlanSection = PlanSection()
    origin: ClassVar[RunOrigin] = RunOrigin()
    """The file that the config was read from (`read_run` sets it); not a key of the file."""

    @property
    def sequence(self) -> int:
        """Tokens in a sample; 1 where it has none."""
        return self.data.sequence or 1


def read_run(source: str | Path | RunConfig, changes: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `--set a.b=c` changes; raise one error with all problems and their lines.

    No code is executed and no model is analysed. A `RunConfig` is returned unchanged.
    """
    if isinstance(source, RunConfig):
        if changes:
            raise error_at("changes", "are for a run file.", "Change the RunConfig itself.")
        return source
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise error_at(path, f"cannot be read: {reason}.") from None
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers too long to read, and tables nested too deeply
        raise error_at(path, f"is not valid TOML: {error}.") from None
    problems: list[Problem] = []
    changed = frozenset([apply_change(table, change, problems) for change in changes])
    origin = RunOrigin(path=str(path), text=text, changed=changed)
    config: RunConfig = decode_into(RunConfig, table, "", problems)
    if problems:
        raise MeshwrightError(origin.placed(problems))
    object.__setattr__(config, "origin", origin)
    return config


def apply_change(table: dict[str, Any], change: str, problems: list[Problem], flag: str = "--set") -> str:
    """Set a key of a table as the command line has it, `a.b=c`; the key."""
    name, equals, value = change.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        problems.append(Problem(where=f"{flag} {change}", what="is not of the form a.b=c."))
        return ""
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        parsed = value  # plain text needs no quotes on a command line
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            problems.append(Problem(where=f"{flag} {change}", what=f"{key} is not a table."))
            return ""
        table = inner
    table[keys[-1]] = parsed
    return ".".join(keys)


_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"-]+)\s*=")


def line_of(text: str, key: str) -> int | None:
    """The line that sets `key` (a dotted path), or that of its nearest table."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    best, depth, table = None, 0, ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = tuple(header.group(1).replace('"', "").split("."))
            here = table
        elif match := _KEY.match(line):
            here = (*table, *match.group(1).replace('"', "").split("."))
        else:
            continue
        if list(here) == parts[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    return best
