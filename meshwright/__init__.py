"""Meshwright plans and runs the training of large models on PyTorch: it finds the fastest parallelisation plan that
fits a model and a cluster, predicts its cost, runs it, and compares the prediction with the measurement.

Names are imported when they are first used, so `import meshwright` is fast and never imports torch. docs/api.md has an
example of each.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    **dict.fromkeys(("check", "cluster", "forecast", "model", "plan", "probe", "simulate", "train"), "meshwright.api"),
    **dict.fromkeys(
        ("EvaluationEvent", "MessageEvent", "RestartEvent", "Run", "SaveEvent", "StepEvent"), "meshwright.run.run"
    ),
    **dict.fromkeys(("RunResult", "RunSummary"), "meshwright.run.result"),
    **dict.fromkeys(("OptimizerConfig", "RunConfig", "TrainSection", "read_run"), "meshwright.run.run_file"),
    **dict.fromkeys(("Built", "build", "train_steps"), "meshwright.runtime.api"),
    **dict.fromkeys(("MeshwrightError", "Problem"), "meshwright.core.errors"),
    **dict.fromkeys(("Technique", "technique_named", "technique_names"), "meshwright.core.technique"),
    "Cluster": "meshwright.core.cluster",
    "DecoderConfig": "meshwright.models.dimensions",
    "Forecast": "meshwright.simulator.forecast",
    "ModelDescription": "meshwright.run.model",
    "Plan": "meshwright.core.plan",
    "Profile": "meshwright.core.profile",
    "Timeline": "meshwright.core.timeline",
    "open_text": "meshwright.data.open_data",
}
_RENAMED = {
    "profile": ("meshwright.models.presets", "mw.model(...).profile"),
    "search": ("meshwright.planner.search", "mw.plan"),
}
"""Deprecated names, removed in the next release."""
__all__ = ["__version__", *sorted(_NAMES)]

if TYPE_CHECKING:
    from meshwright.api import check as check
    from meshwright.api import cluster as cluster
    from meshwright.api import forecast as forecast
    from meshwright.api import model as model
    from meshwright.api import plan as plan
    from meshwright.api import probe as probe
    from meshwright.api import simulate as simulate
    from meshwright.api import train as train
    from meshwright.core.cluster import Cluster as Cluster
    from meshwright.core.errors import MeshwrightError as MeshwrightError
    from meshwright.core.errors import Problem as Problem
    from meshwright.core.plan import Plan as Plan
    from meshwright.core.profile import Profile as Profile
    from meshwright.core.technique import Technique as Technique
    from meshwright.core.technique import technique_named as technique_named
    from meshwright.core.technique import technique_names as technique_names
    from meshwright.core.timeline import Timeline as Timeline
    from meshwright.data.open_data import open_text as open_text
    from meshwright.models.dimensions import DecoderConfig as DecoderConfig
    from meshwright.run.model import ModelDescription as ModelDescription
    from meshwright.run.result import RunResult as RunResult
    from meshwright.run.result import RunSummary as RunSummary
    from meshwright.run.run import EvaluationEvent as EvaluationEvent
    from meshwright.run.run import MessageEvent as MessageEvent
    from meshwright.run.run import RestartEvent as RestartEvent
    from meshwright.run.run import Run as Run
    from meshwright.run.run import SaveEvent as SaveEvent
    from meshwright.run.run import StepEvent as StepEvent
    from meshwright.run.run_file import OptimizerConfig as OptimizerConfig
    from meshwright.run.run_file import RunConfig as RunConfig
    from meshwright.run.run_file import TrainSection as TrainSection
    from meshwright.run.run_file import read_run as read_run
    from meshwright.runtime.api import Built as Built
    from meshwright.runtime.api import build as build
    from meshwright.runtime.api import train_steps as train_steps
    from meshwright.simulator.forecast import Forecast as Forecast


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        module, now = _RENAMED[name]
        text = f"meshwright.{name} is called {now} now, and goes in the next release."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), name)
    if name not in _NAMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
