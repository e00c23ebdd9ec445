"""Imports go one way, and planning never pays for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import ROOT, imports, sources

# A package imports those before it, lazily or not: so no circle can be hidden in a function.
ORDER = (
    *("core", "schedules", "ops", "models", "optimizers", "techniques", "simulator", "planner", "ask", "report"),
    *("data", "launch", "zoo", "checkpoint", "hf", "foreign", "machine", "run", "runtime", "verify", "cli"),
)
MAY_NOT_IMPORT = {
    "techniques": {"models"},
    "data": {"schedules", "ops", "models", "optimizers", "techniques", "simulator", "planner", "ask", "report"},
}
EXCEPTIONS: set[tuple[str, str]] = set()
# Techniques are found by name, through `core.technique`: nobody imports their files.
WITH_TORCH = ("ops", "zoo", "foreign", "checkpoint", "runtime", "verify", "optimizers")
WITH_TORCH_IN_PARTS = {"hf": ("weights_",), "machine": ("measure", "timing")}
"""Files that may import torch begin so: weights are tensors, and measurements are child processes."""
TORCH_FREE = (
    *(
        "verify/check.py",
        "optimizers/optimizer_config.py",
        "optimizers/rule.py",
        "optimizers/rules/",
        "optimizers/low_bit_states.py",
    ),
    *(f"checkpoint/{name}.py" for name in ("step_folders", "manifest", "memory_folder")),
)
"""What the command line imports of packages that use torch."""


def ours(name: str) -> str:
    """`meshwright.core.plan.Plan` -> `core.plan.Plan`; empty for others' modules."""
    return name.removeprefix("meshwright.") if name.startswith("meshwright.") else ""


def test_every_package_has_its_place() -> None:
    assert {source.room for source in sources()} == {*ORDER, ""}


def test_packages_import_only_packages_before_them() -> None:
    wrong, seen = [], 0
    for source in sources():
        for name, line in imports(source):
            target = ours(name)
            if not target or not source.room:
                continue
            seen += 1
            room = target.split(".")[0]
            is_before = ORDER.index(room) <= ORDER.index(source.room) and room not in MAY_NOT_IMPORT.get(
                source.room, ()
            )
            if not is_before and not any((source.room, module) in EXCEPTIONS for module in _prefixes(target)):
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


def test_whole_packages_do_not_import_torch_when_they_are_imported() -> None:
    guarded = [
        source
        for source in sources()
        if source.place.startswith(TORCH_FREE)
        or (
            source.room not in WITH_TORCH
            and not source.path.stem.startswith(WITH_TORCH_IN_PARTS.get(source.room, ("no torch",)))
        )
    ]
    assert len(guarded) > 100
    wrong = [
        f"{source.place}:{line} imports {name}"
        for source in guarded
        for name, line in imports(source, top_level_only=True)
        if name.split(".")[0] in ("torch", "safetensors", "triton") or ours(name).split(".")[0] in WITH_TORCH
        if not any(ours(name).startswith(free.removesuffix(".py").replace("/", ".")) for free in TORCH_FREE)
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
    (reference,) = (source for source in sources() if source.place == "verify/reference.py")
    assert [name for name, _ in imports(reference) if ours(name)] == []
    (model,) = (source for source in sources() if source.place == "verify/reference_model.py")
    shared = ("runtime.loop", "optimizers", "runtime.build", "verify.parity", "ops.cross_entropy", "techniques")
    assert [name for name, _ in imports(model) if ours(name).startswith(shared)] == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRICED = """
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named, technique_names
from meshwright.models.presets import preset
from meshwright.models.cost_decoder import decoder_profile
from meshwright.machine.named_clusters import cluster
from meshwright.simulator.pricing import price
profile, machines = decoder_profile(preset("llama3-8b"), "llama3-8b"), cluster("8xh100")
for name in technique_names():
    kind = technique_named(name)
    options = kind.options(profile, machines)
    chosen = kind(size=2) if kind.axis else kind()
    plan = Plan(techniques=(chosen,), batch=8)
    whole = Plan(techniques=(chosen,), batch=8, microbatch=8 // plan.num_replicas)  # some take one microbatch only
    assert not options or () in (plan.check(profile, machines), whole.check(profile, machines))
    assert price(profile, plan, sequence=4096).tasks
"""


@pytest.mark.parametrize("code", ["import meshwright", PRICED], ids=["import", "price a named model"])
def test_planning_never_imports_torch(code: str) -> None:
    assert run(f"{code}\nimport sys\nprint('torch' in sys.modules, 'meshwright' in sys.modules)") == "False True"
