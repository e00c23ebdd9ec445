"""A plan is a value: JSON and back is the identity, and nothing unknown is let in, however deep."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named, technique_names
from meshwright.schedules import SCHEDULES

laws = settings(max_examples=60, deadline=None)

layers = st.sampled_from(["none", "all", "first 3", "last 12", "0-3,8", "7-7"])
sizes = st.integers(1, 8)
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked_loss": {"chunks": st.integers(1, 64)},
    "compile": {
        "backend": st.sampled_from(["inductor", "aot_eager"]),
        "scope": st.sampled_from(["block", "model"]),
        "graphs": st.booleans(),
    },
    "compress_activations": {"bits": st.sampled_from([8, 4, 2]), "layers": layers},
    "context": {"size": sizes, "kind": st.sampled_from(["ring", "ulysses"])},
    "expert": {"size": sizes},
    "compress_gradients": {"codec": st.sampled_from(["int8", "topk"]), "keep": st.sampled_from([0.01, 1.0])},
    "gossip": {"size": sizes, "graph": st.sampled_from(["ring", "exponential", "pairs", "push", "tree"])},
    "local_loss": {"every": st.integers(1, 64)},
    "local_steps": {"size": sizes, "every": st.integers(1, 64)},
    "lowbit_optimizer": {"bits": st.sampled_from([4, 8])},
    "multi_rate": {"layers": layers, "every": st.integers(1, 64)},
    "offload_activations": {"layers": layers, "inputs": st.booleans(), "smallest": st.integers(0, 1 << 24)},
    "offload_states": {"share": st.floats(0.01, 1.0), "ahead": st.booleans()},
    "parameter_server": {"size": sizes, "mode": st.sampled_from(["sync", "ssp", "async"]), "shards": sizes},
    "pipeline": {
        "size": sizes,
        "schedule": st.sampled_from(sorted(SCHEDULES)),
        "chunks": st.integers(0, 4),
        "stages": st.lists(st.integers(1, 9), max_size=4).map(tuple),
    },
    "precision": {
        "dtype": st.sampled_from(["bf16", "fp32"]),
        "weights": st.sampled_from(["bf16", "fp32"]),
        "matmul": st.sampled_from(["", "fp8_tensorwise", "fp8_rowwise"]),
        "edge_blocks": st.integers(0, 3),
    },
    "recompute": {
        "layers": layers,
        "selective": layers,
        "slots": st.integers(0, 9),
    },
    "replicate": {"size": sizes, "sparse_rows": st.booleans()},
    "rows": {"size": sizes, "by": st.sampled_from(["rows", "tables"])},
    "shard": {"size": sizes, "stage": st.sampled_from([1, 2, 3]), "prefetch": st.integers(0, 3)},
    "stream_weights": {"buffers": st.integers(2, 4)},
    "tensor": {"size": sizes, "sequence": st.booleans(), "overlap": st.integers(1, 3)},
    "update_in_backward": {},
}


@st.composite
def plans(draw: st.DrawFn, at_least: int = 0) -> Plan:
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), unique=True, min_size=at_least))
    techniques = [technique_named(name)(**draw(st.fixed_dictionaries(SETTINGS[name]))) for name in names]
    axes = [each.axis for each in techniques if each.axis]
    order = tuple(draw(st.permutations(axes))) if draw(st.booleans()) else ()
    batch, microbatch = draw(st.integers(1, 4096)), draw(st.integers(1, 64))
    return Plan(techniques=tuple(techniques), batch=batch, microbatch=microbatch, axis_order=order)


def test_every_technique_is_drawn() -> None:
    assert set(SETTINGS) == set(technique_names())


@laws
@given(plan=plans())
def test_json_and_back_is_the_identity(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.fingerprint == plan.fingerprint
    assert again.to_json() == plan.to_json()
    assert plan.diff(again) == ()


@laws
@given(first=plans(), second=plans())
def test_plans_differ_exactly_when_diff_says_how(first: Plan, second: Plan) -> None:
    assert (first == second) == (first.diff(second) == ())
    assert (first == second) == (first.fingerprint == second.fingerprint)


@laws
@given(plan=plans(), data=st.data())
def test_the_order_of_techniques_means_nothing(plan: Plan, data: st.DataObject) -> None:
    shuffled = tuple(data.draw(st.permutations(plan.techniques)))
    assert plan == Plan(techniques=shuffled, batch=plan.batch, microbatch=plan.microbatch, axis_order=plan.axis_order)


@laws
@given(plan=plans())
def test_the_mesh_multiplies_to_the_ranks(plan: Plan) -> None:
    total = 1
    for size in plan.mesh.values():
        total *= size
    assert plan.num_ranks == total
    assert set(plan.mesh) == {each.axis for each in plan.techniques if each.axis}


def _misspelt(key: str, place: int) -> str:
    return key[:place] + "x" + key[place:]


@laws
@given(plan=plans(at_least=1), data=st.data())
def test_an_unknown_key_is_refused_where_it_is_with_the_nearest_known_one(plan: Plan, data: st.DataObject) -> None:
    written = json.loads(plan.to_json())
    places: list[tuple[dict[str, Any], str, str]] = [(written, "p", key) for key in written]
    for number, table in enumerate(written["techniques"]):
        places += [(table, f"p.techniques[{number}]", key) for key in table if key != "name"]
    table, where, key = data.draw(st.sampled_from(places))
    wrong = _misspelt(key, data.draw(st.integers(1, len(key))))
    table[wrong] = table[key]
    with pytest.raises(MeshwrightError) as caught:
        Plan.from_json(json.dumps(written), source="p")
    (problem,) = caught.value.problems
    assert problem.where == f"{where}.{wrong}"
    assert problem.fix == f'Did you mean "{key}"?'


@laws
@given(plan=plans(at_least=1), data=st.data())
def test_a_wrong_type_is_refused_where_it_is(plan: Plan, data: st.DataObject) -> None:
    written = json.loads(plan.to_json())
    number = data.draw(st.integers(0, len(written["techniques"]) - 1))
    table = written["techniques"][number]
    key = data.draw(st.sampled_from([key for key in table if key != "name"]))
    types = {each.name: str(each.type) for each in fields(technique_named(table["name"]))}
    names_blocks = "str" in types[key]  # which words name blocks is known only with the model
    wrong = [{"a": 1}, [None], *([] if "float" in types[key] else [1.5]), *([] if names_blocks else ["seven"])]
    table[key] = data.draw(st.sampled_from(wrong))
    with pytest.raises(MeshwrightError) as caught:
        Plan.from_json(json.dumps(written), source="p")
    assert all(each.where.startswith(f"p.techniques[{number}].{key}") for each in caught.value.problems)


def test_everything_wrong_is_said_at_once() -> None:
    text = '{"techniques": [{"name": "tenser", "size": 2}, {"name": "shard"}], "batch": "8", "bach": 1}'
    with pytest.raises(MeshwrightError) as caught:
        Plan.from_json(text, source="p")
    said = {problem.where: str(problem) for problem in caught.value.problems}
    assert set(said) == {"p.techniques[0]", "p.techniques[1].size", "p.batch", "p.bach"}
    assert 'Did you mean "tensor"?' in said["p.techniques[0]"]
    assert 'Did you mean "batch"?' in said["p.bach"]


@pytest.mark.parametrize("text", ["{", "[]", '{"batch": NaN}', '{"batch": 1e999}', '{"version": 2, "new": 1}', "7"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(MeshwrightError):
        Plan.from_json(text)
