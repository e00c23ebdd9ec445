"""Imports go one way, and planning never pays for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import ROOT, imports, in_rooms, sources

# Room -> rooms it may import from. Data flows left to right and no arrow points back.
MAY_IMPORT = {
    "": set(),
    "core": {"core"},
    "schedules": {"core", "schedules"},
    "ops": {"core", "schedules", "ops"},
    "techniques": {"core", "ops", "schedules", "techniques"},
    "models": {"core", "ops", "models"},
    "probe": {"core", "ops", "models", "simulate", "probe"},
    "supervise": {"core", "supervise"},
    "simulate": {"core", "schedules", "techniques", "simulate"},
    "search": {"core", "schedules", "techniques", "simulate", "search"},
    "data": {"core", "data"},
    "checkpoint": {"core", "models", "checkpoint"},
}
RUNTIME = {"core", "ops", "schedules", "techniques", "models", "probe", "supervise", "simulate", "search"}
MAY_IMPORT["runtime"] = RUNTIME | {"data", "checkpoint", "runtime"}
MAY_IMPORT["cli"] = MAY_IMPORT["runtime"] | {"cli"}
EXCEPTIONS = {
    # A worker must tame bf16 before its first tensor op, whatever it will be asked to run.
    ("supervise/worker.py", "probe.cpu_bf16"),
}
# Techniques are found by name, through `core.technique`: nobody imports their files.
NO_TORCH_AT_TOP = ("core", "techniques", "schedules", "simulate", "search", "supervise", "data")
NO_TORCH_FILES = (
    *("models/config.py", "models/dimensions.py", "models/cost.py", "models/cost_ops.py", "models/cost_vit.py"),
    *(
        "models/cost_conv.py",
        "models/cost_dlrm.py",
        "models/cost_moe.py",
        "models/names.py",
        "models/section.py",
        "models/freeze.py",
    ),
    *("models/hf.py", "models/hf_families.py", "models/plain.py"),
    *("runtime/config.py", "runtime/model.py", "runtime/optimizer_config.py", "__init__.py", "cli/main.py"),
)


def ours(name: str) -> str:
    """`meshwright.core.plan.Plan` -> `core.plan.Plan`; empty for others' modules."""
    return name.removeprefix("meshwright.") if name.startswith("meshwright.") else ""


def test_every_room_has_its_place() -> None:
    assert {source.room for source in sources()} <= set(MAY_IMPORT)


def test_rooms_import_only_rooms_before_them() -> None:
    wrong, seen = [], 0
    for source in sources():
        for name, line in imports(source):
            target = ours(name)
            if not target:
                continue
            seen += 1
            allowed = any((source.place, module) in EXCEPTIONS for module in _prefixes(target))
            if target.split(".")[0] not in MAY_IMPORT[source.room] and not allowed and source.room:
                wrong.append(f"{source.place}:{line} imports {name}")
    assert seen > 100
    assert wrong == []


def _prefixes(target: str) -> list[str]:
    parts = target.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    modules = {source.module for source in sources()}
    graph = {
        source.module: {
            target
            for name, _ in imports(source, top_level_only=True)
            for target in (name, name.rpartition(".")[0])
            if target in modules and target != source.module
        }
        for source in sources()
    }
    assert sum(map(len, graph.values())) > 100
    while True:
        leaves = {module for module, targets in graph.items() if not targets}
        if not leaves:
            break
        graph = {module: targets - leaves for module, targets in graph.items() if module not in leaves}
    assert graph == {}, "these import each other in a circle"


def test_rooms_that_plan_do_not_import_torch_when_they_are_imported() -> None:
    guarded = in_rooms(*NO_TORCH_AT_TOP)
    files = [source for source in sources() if source.place in NO_TORCH_FILES]
    assert len(files) == len(NO_TORCH_FILES)
    wrong = [
        f"{source.place}:{line} imports {name}"
        for source in (*guarded, *files)
        for name, line in imports(source, top_level_only=True)
        if name.split(".")[0] in ("torch", "safetensors", "triton") or ours(name).startswith("ops")
        if not (source.room == "data" and name.split(".")[0] == "safetensors")
    ]
    assert wrong == []


def test_nobody_imports_a_technique_by_its_file() -> None:
    wrong = [
        f"{source.place}:{line} imports {name}"
        for source in sources()
        for name, line in imports(source)
        if ours(name).startswith("techniques.")
    ]
    assert wrong == []


def test_the_independent_reference_imports_nothing_of_the_package() -> None:
    (reference,) = (source for source in sources() if source.place == "runtime/reference.py")
    assert [name for name, _ in imports(reference) if ours(name)] == []
    (model,) = (source for source in sources() if source.place == "runtime/plain_model.py")
    shared = ("runtime.loop", "runtime.optimizer", "runtime.build", "runtime.parity", "ops.loss", "techniques")
    assert [name for name, _ in imports(model) if ours(name).startswith(shared)] == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRICED = """
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named, technique_names
from meshwright.models.config import preset
from meshwright.models.cost import decoder_profile
from meshwright.probe.names import cluster
from meshwright.simulate.price import price
profile, machines = decoder_profile(preset("llama3-8b"), "llama3-8b"), cluster("8xh100")
for name in technique_names():
    kind = technique_named(name)
    options = kind.options(profile, machines)
    chosen = kind(size=2) if kind.axis else kind()
    plan = Plan(techniques=(chosen,), batch=8)
    assert not options or plan.check(profile, machines) == ()
    assert price(profile, plan, sequence=4096).tasks
"""


@pytest.mark.parametrize("code", ["import meshwright", PRICED], ids=["import", "price a named model"])
def test_planning_never_imports_torch(code: str) -> None:
    assert run(f"{code}\nimport sys\nprint('torch' in sys.modules, 'meshwright' in sys.modules)") == "False True"
