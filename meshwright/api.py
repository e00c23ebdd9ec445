"""Public functions with the names of the commands: `mw.plan` is `mw plan`, `mw.train` is `mw train`, ... No torch.

Models are given as on the command line (a preset, a Hugging Face folder, `package.module:function`), as the result of
`model`, or as a `Profile`; clusters by name, by file or as a `Cluster`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from meshwright.core.cluster import Cluster
from meshwright.core.errors import error_at, raise_problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness
from meshwright.models.presets import Config, sequence_problem
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import ModelDescription, describe, section_named
from meshwright.run.run_file import RunConfig, read_run

if TYPE_CHECKING:
    from meshwright.ask.answer import Answer
    from meshwright.core.timeline import Timeline
    from meshwright.run.result import RunResult
    from meshwright.runtime.trainer import TrainStep
    from meshwright.simulator.forecast import Forecast
    from meshwright.verify.check import Checked

AnyModel = str | Path | Config | ModelDescription | Profile
"""A model: its name, dimensions, description or profile."""
Report = Callable[[str], None]
DEFAULT_SEQUENCE = 4096


def model(
    source: str | Path | Config,
    *,
    sequence: int = DEFAULT_SEQUENCE,
    change: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    freeze: Sequence[str] = (),
    train: Sequence[str] = (),
) -> ModelDescription:
    """Describe a model from any source.

    Parameters
    ----------
    source
        A preset ("llama3-8b"; `mw profile` lists them), a Hugging Face folder, "package.module:function", or
        dimensions such as a `DecoderConfig`. A function is called, and its module is run on fake tensors to determine
        the cost of each layer and where it can be split.
    sequence
        Tokens per sample when a user module is analysed.
    change
        Dimensions of a preset to change: `{"num_layers": 2}`.
    arguments
        Keyword arguments of the function.
    freeze, train
        Patterns of parameter names to freeze, or of the only ones to train.

    Returns
    -------
    ModelDescription
        Its `profile` has the cost of each layer. `plan`, `forecast`, `simulate` and `build` accept it as a model.
    """
    if not isinstance(source, str | Path):
        if change or arguments or freeze or train:
            what = "dimensions take no change, arguments, freeze or train."
            fix = "Change the dimensions themselves, or name a preset."
            raise error_at("model", what, fix)
        return ModelDescription.of_config(source)
    more = {"change": change or {}, "arguments": arguments or {}, "freeze": tuple(freeze), "train": tuple(train)}
    return describe(section_named(str(source), **more), sequence)


def cluster(name_or_path: str) -> Cluster:
    """Load a cluster by name or from a file.

    "h200" is one GPU, "8xh100" a node of eight, "64x8xh100" 64 such nodes, "8xh100+8xa100" two kinds of nodes. A name
    that ends in .json is a file written by `mw probe -o`.
    """
    from meshwright.machine.named_clusters import cluster as named

    return named(name_or_path)


def probe(*, num_devices: int | None = None, quick: bool = False, report: Report | None = None) -> Cluster:
    """Benchmark this machine: compute by shape, memory, launches, host, disk and links, on all devices at once.

    Parameters
    ----------
    num_devices
        Number of devices to measure together. Default: all GPUs, or without a GPU all usable cores (at most 8).
    quick
        Take a few seconds, with results that vary by 10 to 20 %, instead of a minute on a CPU or three on a GPU.
    report
        Called with a description of each measurement.
    """
    from meshwright.machine.probe import probe as measured

    return measured(num_devices=num_devices, report=report or (lambda text: None), quick=quick)


def plan(
    model: AnyModel,
    cluster: Cluster | str,
    *,
    batch: int | str = 64,
    sequence: int | None = None,
    optimizer: OptimizerConfig | None = None,
    allow: Exactness = "rounded",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    max_memory: int | str | None = None,
    headroom: float | None = None,
    top: int = 8,
    time_limit: float | None = None,
    why: Sequence[str] = (),
    what_if: Sequence[str] = (),
    front: bool = False,
    devices: int | str | None = None,
    critical_batch: float | str | None = None,
    target_steps: float | str | None = None,
    target_tokens: float | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Answer:
    """Find the fastest training plans that fit, and answer questions about the best one.

    Parameters
    ----------
    model, cluster
        By name, or as returned by `model`, `cluster` and `probe`.
    batch
        Samples per step; "auto" selects the batch size that reaches the target first.
    sequence
        Tokens per sample. Default: 4096, or the number of positions of the model if that is smaller.
    allow
        Permitted deviation from one device in float32: "exact", "reordered" (order of sums), "rounded" (16-bit
        compute), "lossy" (fewer bits: fp8, 16-bit weights, low-bit optimizer states), "approximate" (stale gradients).
    pin, ban
        Required settings ("tensor=2"); excluded techniques ("pipeline").
    max_memory, headroom
        Memory to use on each device, in bytes or as "70GiB"; percentage of it to leave free (default 6).
    top, time_limit, why, what_if
        Number of plans to rank; seconds per search; settings to explain ("microbatch"); changes ("memory=+20GiB").
    front, devices
        Whether to search for the fastest plan at each memory size; device counts to compare ("16..64"), or one count.
    critical_batch, target_steps, target_tokens
        For batch="auto", as in `mw plan`; `target_tokens` ("300B") also applies to the comparison of `devices`. Values
        that are not given are estimated; `batch_goals.goal.sources` says how.
    progress
        Called with a description of the current search.

    Returns
    -------
    Answer
        `best` is (plan, forecast), or None if no plan fits; `ranked` has the others, and `explanation` the reasons as
        text. `why`, `what_if`, `front`, `device_counts` and `batch_goals` are set if they were requested.
    """
    from meshwright.ask.answer import answer_of, read_request

    request = read_request(
        profile := profile_of(model),
        _cluster_of(cluster),
        batch=batch,
        sequence=_sequence_of(profile, sequence),
        optimizer=optimizer or OptimizerConfig(),
        allow=allow,
        pin=pin,
        ban=ban,
        max_memory=max_memory,
        headroom=headroom,
        top=top,
        time_limit=time_limit,
        why=why,
        what_if=what_if,
        front=front,
        devices=devices,
        critical_batch=critical_batch,
        target_steps=target_steps,
        target_tokens=target_tokens,
    )
    return answer_of(request, progress or (lambda text: None))


def forecast(
    model: AnyModel,
    plan: Plan,
    cluster: Cluster | str,
    *,
    sequence: int | None = None,
    optimizer: OptimizerConfig | None = None,
    replays: bool = True,
) -> Forecast:
    """Predict a step of a plan: seconds with an interval, memory by category, tokens per second, MFU.

    `replays` simulates the allocator for every tensor. Without it, reserved memory equals allocated memory, and the
    forecast takes a tenth of the time.
    """
    from meshwright.simulator.forecast import forecast as told

    profile, machines, given = _judged(model, plan, cluster, sequence, optimizer)
    return told(profile, plan, machines, **given, replays=replays)


def simulate(
    model: AnyModel,
    plan: Plan,
    cluster: Cluster | str,
    *,
    sequence: int | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Timeline:
    """Simulate a step of a plan: spans on lanes, and memory over time. `Timeline.to_chrome` is for ui.perfetto.dev."""
    from meshwright.simulator.simulate import simulate as drawn

    profile, machines, given = _judged(model, plan, cluster, sequence, optimizer)
    return drawn(profile, plan, machines, **given)


def check(
    run: str | Path | RunConfig,
    plan: str | Path | Plan = "",
    *,
    changes: Sequence[str] = (),
    steps: int = 4,
    report: Report | None = None,
) -> Checked:
    """Train a few steps under a plan and on one device; compare losses, gradients, parameters and bytes sent.

    Parameters
    ----------
    run
        A run file, or its content as a `RunConfig`: the model, the data and the optimizer.
    plan
        A plan or its file. Default: the plan that `mw train` would use.
    changes
        Keys of the run file to change: `["train.batch=8"]`.
    steps
        Number of steps to compare.

    Returns
    -------
    Checked
        `passed` is true if the plan trains as one device would; `parts` has the deviations.
    """
    from meshwright.run.model import describe_run
    from meshwright.run.prepare import load_plan, prepare
    from meshwright.verify.check import check as compared

    report = report or (lambda text: None)
    config = read_run(run, changes)
    description = describe_run(config)
    # A plan that is given may need more devices than this machine has: its ranks are only processes here.
    given = load_plan(config, plan if isinstance(plan, Plan) else str(plan), description.profile)
    chosen = given or prepare(config, "", report, description=description).plan
    return compared(config, chosen, steps=steps, report=report, description=description)


@overload
def train(run: Plan, *old: Any, **more: Any) -> Iterator[TrainStep]: ...
@overload
def train(
    run: str | Path | RunConfig, *, changes: Sequence[str] = (), plan: str | Path | Plan = "", show: bool = False
) -> RunResult: ...
def train(run: Any = None, *old: Any, **more: Any) -> Any:
    """Train to the end, or resume, as `mw train` does, without a console.

    Parameters
    ----------
    run
        A run file, or its content as a `RunConfig`.
    changes
        Keys of the run file to change: `["train.steps=100"]`.
    plan
        A plan or its file. Default: the fastest plan that fits.
    show
        Write progress to stderr.

    Returns
    -------
    RunResult
        Summary, comparison with the forecast, and the files of the run. Use `Run` to follow events during training.
    """
    if run is None and isinstance(more.get("plan"), Plan):
        run = more.pop("plan")
    if isinstance(run, Plan):
        text = "mw.train(plan, model, data, settings) is called mw.train_steps now, and goes in the next release."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        from meshwright.runtime.api import train_steps

        return train_steps(run, *old, **more)
    from meshwright.run.run import Run

    show = bool(more.pop("show", False))
    with Run(run, *old, **more) as made:
        return made.start(show=show).result()


def profile_of(given: AnyModel) -> Profile:
    """The profile of a model: the cost of each layer."""
    if isinstance(given, Profile):
        return given
    return (given if isinstance(given, ModelDescription) else model(given)).profile


def _cluster_of(given: Cluster | str) -> Cluster:
    return given if isinstance(given, Cluster) else cluster(given)


def _sequence_of(profile: Profile, sequence: int | None) -> int:
    if profile.counts == "samples":
        return 1
    if sequence is None:
        return min(DEFAULT_SEQUENCE, profile.max_sequence)
    raise_problems(filter(None, [sequence_problem(profile, sequence, "sequence")]))
    return sequence


def _judged(
    model: AnyModel, plan: Plan, cluster: Cluster | str, sequence: int | None, optimizer: OptimizerConfig | None
) -> tuple[Profile, Cluster, dict[str, Any]]:
    """The model's costs, the cluster, sequence and optimizer; raises if the plan is invalid for them."""
    profile, machines = profile_of(model), _cluster_of(cluster)
    raise_problems(plan.check(profile, machines))
    return profile, machines, {"sequence": _sequence_of(profile, sequence), "optimizer": optimizer or OptimizerConfig()}
