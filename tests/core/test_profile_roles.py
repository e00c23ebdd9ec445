"""Every op says what it is for, and files of before there were roles stay what they were."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.core.profile import Poly, Profile
from meshwright.models.presets import PRESETS
from meshwright.models.presets import profile as profile_named


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
