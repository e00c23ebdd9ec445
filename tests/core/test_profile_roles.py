"""Every op says what it is for, and files of before there were roles stay what they were."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Param, Poly, Profile
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import PRESETS
from meshwright.models.presets import profile as profile_named
from meshwright.simulator.forecast import forecast


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_op_of_a_formula_has_a_role(name: str) -> None:
    without = [(layer.name, op.name) for layer in profile_named(name).layers for op in layer.ops if not op.role]
    assert without == []


def test_roles_of_a_decoders_block() -> None:
    (block,) = profile_named("llama3-8b").block_layers
    roles = [op.role for op in block.ops]
    assert roles.count("linear") == 7
    assert roles.count("norm") == roles.count("residual") == 2
    assert roles.count("rope") == roles.count("activation") == 1
    experts = profile_named("mixtral-8x7b").block_layers[0].ops
    assert {op.role for op in experts if op.flops != Poly()} == {"linear", "attention", "experts", "router"}


def test_a_matmul_without_its_two_numbers_is_refused_and_a_scalar_parameter_is_priced() -> None:
    data = json.loads(profile_named("byte-tiny").to_json())
    linear = next(op for op in data["layers"][1]["ops"] if op["kind"] == "matmul")
    linear["shape"] = linear["shape"][:1]
    with pytest.raises(MeshwrightError, match=rf"layers\[1\]\.ops\.{linear['name']}\.shape: has 1 numbers"):
        Profile.from_json(json.dumps(data))
    layer, name = profile_named("byte-tiny").layers[1], "scale"
    scalar = replace(layer, params=(*layer.params, Param(name=name, shape=())))
    layers = (profile_named("byte-tiny").layers[0], scalar, *profile_named("byte-tiny").layers[2:])
    profile = replace(profile_named("byte-tiny"), layers=layers)
    plan = Plan.from_json(
        '{"techniques": [{"name": "replicate", "size": 2}], "batch": 4, "microbatch": 1, "version": 1}'
    )
    assert forecast(profile, plan, cluster("2xh100"), sequence=32).step_seconds > 0


def test_a_profile_without_roles_is_read_and_has_the_same_fingerprint() -> None:
    profile = profile_named("byte-tiny")
    data = json.loads(profile.to_json())
    for layer in data["layers"]:
        for op in layer["ops"]:
            del op["role"]
    old = Profile.from_json(json.dumps(data))
    assert old.fingerprint == profile.fingerprint
    changed = replace(profile, hidden_size=profile.hidden_size + 1)
    assert changed.fingerprint != profile.fingerprint
