"""Meshwright: describe the model and the machines; it finds the fastest training plan that fits, says what it will
cost before you start, runs it on PyTorch, and shows what it really did.

Names are imported when they are first used, so `import meshwright` costs nothing and never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "Cluster": "meshwright.core.cluster",
    "DecoderConfig": "meshwright.models.presets",
    "Forecast": "meshwright.simulator.forecast",
    "MeshwrightError": "meshwright.core.errors",
    "OptimizerConfig": "meshwright.run.run_file",
    "Plan": "meshwright.core.plan",
    "Problem": "meshwright.core.errors",
    "Profile": "meshwright.core.profile",
    "RunConfig": "meshwright.run.run_file",
    "Technique": "meshwright.core.technique",
    "Timeline": "meshwright.core.timeline",
    "build": "meshwright.runtime.api",
    "check": "meshwright.verify.check",
    "cluster": "meshwright.machine.named_clusters",
    "forecast": "meshwright.simulator.forecast",
    "open_text": "meshwright.data.open_data",
    "profile": "meshwright.models.named_profile",
    "probe": "meshwright.machine.probe",
    "read_run": "meshwright.run.run_file",
    "search": "meshwright.planner.search",
    "simulate": "meshwright.simulator.simulate",
    "technique_named": "meshwright.core.technique",
    "technique_names": "meshwright.core.technique",
    "train": "meshwright.runtime.api",
}
__all__ = ["__version__", *sorted(_NAMES)]

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster as Cluster
    from meshwright.core.errors import MeshwrightError as MeshwrightError
    from meshwright.core.plan import Plan as Plan
    from meshwright.core.profile import Profile as Profile
    from meshwright.core.timeline import Timeline as Timeline


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
