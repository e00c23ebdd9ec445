"""Artefacts are read strictly: what is unknown, missing, of the wrong type or too new is said, with its place.

Tests of `core/errors.py`, `core/plan.py`, `core/units.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.cluster import Cluster, parse_cluster_name
from meshwright.core.codec import encode, load_artefact, to_json
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import axis_sizes
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import PRESETS, profile_of


def changed(value: Any, path: tuple[Any, ...], new: Any) -> str:
    """JSON of a value with one place changed."""
    plain = json.loads(to_json(value))
    inner = plain
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return json.dumps(plain)


@pytest.mark.parametrize("name", PRESETS)
def test_a_profile_survives_json(name: str) -> None:
    profile = profile_of(PRESETS[name], name)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.fingerprint == profile.fingerprint


def test_a_cluster_survives_json() -> None:
    machines = cluster("2x8xh100")
    assert machines.num_devices == 16
    assert Cluster.from_json(machines.to_json()) == machines


@pytest.mark.parametrize(
    ("path", "new", "where", "says"),
    [
        (("device", "memory_byte"), 1, "c.device.memory_byte", 'unknown key. Did you mean "memory_bytes"?'),
        (("devices_per_node",), "8", "c.devices_per_node", 'expected a whole number, found "8".'),
        (("devices_per_node",), True, "c.devices_per_node", "expected a whole number, found true."),
        (("inner", "shared"), 0, "c.inner.shared", "expected true or false, found 0."),
        (("device", "flops_per_second", "bf16"), "fast", "c.device.flops_per_second.bf16", "expected a number"),
        (("inner", "bytes_per_second"), 0, "c.inner.bytes_per_second", "must be above zero"),
        (("outer",), [], "c.outer", "expected a table"),
        (("device", "kind"), "cud", "c.device.kind", 'Did you mean "cuda"?'),
        (("device", "flops_per_second", "bf61"), 1e12, "c.device.flops_per_second.bf61", 'Did you mean "bf16"?'),
        (("device", "matmul_fraction"), 1.6, "c.device.matmul_fraction", "at most 1.5"),
        (("device", "attention_fraction"), 0.0, "c.device.attention_fraction", "above zero"),
        (("device", "bandwidth_fraction"), -1.0, "c.device.bandwidth_fraction", "above zero"),
        (("device", "launch_seconds"), -1e-6, "c.device.launch_seconds", "zero or more"),
        (("outer", "latency_seconds"), -1.0, "c.outer.latency_seconds", "zero or more"),
        (("device", "reserved_bytes"), 1 << 50, "c.device.reserved_bytes", "less than the memory"),
        (("device", "reserved_bytes"), -1, "c.device.reserved_bytes", "zero or more"),
        (("errors", "compute"), 3.0, "c.errors.compute", "less than 3"),
        (("num_nodes",), 1 << 18, "c.num_nodes", "Use at most 1048576 devices"),
        (("num_nodes",), 10**400, "c.num_nodes", "at most"),
        (("jitter_fraction",), 10**400, "c.jitter_fraction", "a finite number"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: tuple[Any, ...], new: Any, where: str, says: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        Cluster.from_json(changed(cluster("8xh100"), path, new), "c")
    (problem,) = caught.value.problems
    assert problem.where == where
    assert says in str(problem)


def test_every_wrong_number_of_a_cluster_is_said_at_once() -> None:
    plain = json.loads(cluster("8xh100").to_json())
    plain["device"] |= {"matmul_fraction": 0, "launch_seconds": -1, "kind": "tpu"}
    plain["jitter_fraction"] = -0.5
    with pytest.raises(MeshwrightError) as caught:
        Cluster.from_json(json.dumps(plain))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("text", ["[" * 100_000, '{"batch": ' + "[" * 900 + "]" * 900 + "}"])
def test_what_is_nested_without_end_is_refused(text: str) -> None:
    with pytest.raises(MeshwrightError, match=r"nested too deeply|expected a whole number"):
        Plan.from_json(text)


def test_true_is_not_one_and_an_axis_is_listed_once() -> None:
    with pytest.raises(MeshwrightError, match="True is not one of its values"):
        Plan.from_json('{"techniques": [{"name": "shard", "size": 2, "stage": true}]}')
    with pytest.raises(MeshwrightError, match="List each axis once"):
        Plan.from_json('{"techniques": [{"name": "replicate", "size": 2}], "axis_order": ["dp", "dp"]}')


@pytest.mark.parametrize(("name", "sizes"), [("h100", ()), ("12xh100", (2, 3, 4, 6, 12)), ("7xh100", (7,))])
def test_an_axis_has_a_size_that_divides_the_devices(name: str, sizes: tuple[int, ...]) -> None:
    assert axis_sizes(cluster(name)) == sizes


def test_a_deep_key_of_a_profile_is_refused_with_its_place() -> None:
    profile = profile_of(PRESETS["byte-tiny"], "tiny")
    with pytest.raises(MeshwrightError) as caught:
        Profile.from_json(changed(profile, ("layers", 1, "ops", 2, "flops", "bsss"), 1.0), "p")
    (problem,) = caught.value.problems
    assert problem.where == "p.layers[1].ops[2].flops.bsss"
    assert problem.fix == 'Did you mean "bss"?'


def test_a_missing_key_is_said() -> None:
    plain = json.loads(cluster("8xh100").to_json())
    del plain["device"]["kind"]
    with pytest.raises(MeshwrightError, match=r"^c\.device\.kind: missing\.$"):
        Cluster.from_json(json.dumps(plain), "c")


def test_a_newer_version_is_said_first() -> None:
    text = '{"version": 9, "what_is_this": 1}'
    for kind in (Plan, Profile, Cluster):
        with pytest.raises(
            MeshwrightError, match=f"{kind.__name__} of version 9; this program reads up to {kind.VERSION}"
        ):
            kind.from_json(text)
    with pytest.raises(MeshwrightError, match="Cluster of version 1; this program reads from 2 on"):
        Cluster.from_json('{"version": 1, "error_fraction": 0.1}')


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_neither_read_nor_written(number: str) -> None:
    with pytest.raises(MeshwrightError, match=number):
        Plan.from_json(f'{{"batch": {number}}}')
    with pytest.raises(ValueError):
        to_json({"value": float(number.replace("Infinity", "inf"))})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"missing\.json: cannot be read: No such file"):
        load_artefact(Plan, tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MeshwrightError, match="is not a text file"):
        load_artefact(Plan, tmp_path / "binary.json")


def test_plain_values_encode_to_plain_values() -> None:
    assert encode({"a": (1, 2.5, None, "x", {"b": ()})}) == {"a": [1, 2.5, None, "x", {"b": []}]}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("h100", (1, 1, "h100")),
        ("8xh100", (1, 8, "h100")),
        ("64x8xh100", (64, 8, "h100")),
        ("8 h100", None),
        ("", None),
    ],
)
def test_cluster_names(name: str, parts: tuple[int, int, str] | None) -> None:
    assert parse_cluster_name(name) == parts


def test_sizes_are_shown() -> None:
    assert pretty_bytes(80 * 2**30) == "80.0 GiB"
    assert [pretty_seconds(value) for value in (7384, 61, 1.5, 0.0123, 5e-6)] == [
        "2 h 03 min",
        "1 min 01 s",
        "1.50 s",
        "12.3 ms",
        "5 µs",
    ]
    assert pretty_count(8.03e9) == "8.03 B"
