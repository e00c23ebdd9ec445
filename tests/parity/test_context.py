"""One sequence over several ranks: one device's numbers, the bytes that were priced, and equally busy ranks.

Tests of `techniques/context.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import test_models
import tiny
from tiny import GPT, LLAMA, QWEN, plan_of, t

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection
from meshwright.simulator.pricing import price

Run = Callable[..., list[dict[str, Any]]]
RING, ULYSSES = (t("context", size=2, kind=kind) for kind in ("ring", "ulysses"))


@pytest.fixture
def right(ran: Run) -> Run:
    """Fails unless a plan trains one device's model and moves what was priced."""

    def check(plan: Plan, config: dict[str, Any]) -> list[dict[str, Any]]:
        answers = ran(plan, config)
        assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
        assert tiny.price_differences(answers) == []
        return answers

    return check


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("technique", [RING, ULYSSES], ids=str)
def test_two_ranks(family: str, technique: Any, right: Run) -> None:
    right(plan_of(technique), tiny.FAMILIES[family])


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_ring_of_four(config: dict[str, Any], right: Run) -> None:
    right(plan_of(t("context", size=4), microbatch=4), config)


def test_heads_traded_by_four(right: Run) -> None:
    right(plan_of(t("context", size=4, kind="ulysses"), microbatch=4), GPT)


TOGETHER = (
    (LLAMA, (RING, tiny.TENSOR)),
    (GPT, (RING, tiny.SEQUENCED)),
    (GPT, (ULYSSES, tiny.SEQUENCED)),
    (GPT, (ULYSSES, tiny.TENSOR)),
    (QWEN, (RING, tiny.PIPELINE)),
    (QWEN, (ULYSSES, tiny.UNEVEN)),
    (QWEN, (RING, tiny.SHARD3)),
    (GPT, (ULYSSES, tiny.SHARD1)),
    (QWEN, (RING, tiny.REPLICATE)),
    (QWEN, (RING, tiny.RECOMPUTE_ONE)),
    (QWEN, (ULYSSES, tiny.RECOMPUTE, tiny.CHUNKED)),
    (QWEN, (RING, tiny.CHUNKED)),
    (QWEN | {"num_layers": 2}, (RING, tiny.COMPILE, tiny.RECOMPUTE_ONE)),
    (QWEN, (RING, tiny.SEQUENCED, tiny.PIPELINE)),
    (GPT, (ULYSSES, tiny.REPLICATE, tiny.TENSOR)),
    (LLAMA, (t("context", size=4), tiny.SHARD2, tiny.RECOMPUTE)),
)


@pytest.mark.parametrize(("config", "techniques"), TOGETHER, ids=[tiny.joined(each) for _, each in TOGETHER])
def test_with_other_techniques(config: dict[str, Any], techniques: tuple[Any, ...], right: Run) -> None:
    answers = right(plan_of(*techniques, microbatch=2), config)
    if tiny.COMPILE in techniques:
        assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"


@pytest.mark.parametrize("technique", [RING, ULYSSES], ids=str)
def test_in_bf16(technique: Any, ran: Run) -> None:
    plan = plan_of(tiny.BF16, technique, microbatch=4)
    answers = ran(plan, QWEN, dtype="float32")
    assert tiny.departures(answers, tiny.ROUNDED) == []
    assert tiny.price_differences(answers) == []
    assert min(answer["errors"]["first gradient"][0] for answer in answers) > 1e-5, "nothing was rounded"


WITH_EXPERTS = ((RING, tiny.TENSOR), (ULYSSES, tiny.RECOMPUTE))


@pytest.mark.parametrize("techniques", WITH_EXPERTS, ids=tiny.joined)
@pytest.mark.parametrize("model", ["moe", "deepseek"])
def test_capacity_and_balance_are_a_whole_sequences(model: str, techniques: tuple[Any, ...], right: Run) -> None:
    right(plan_of(*techniques), test_models.MODELS[model])


@pytest.mark.parametrize("model", [name for name in test_models.TUNED if name.startswith("ours")])
def test_frozen_parameters(model: str, right: Run) -> None:
    right(plan_of(RING, tiny.PIPELINE), test_models.TUNED[model])
    if "outputs" in model:  # of several blocks on a rank, the first has no backward there
        right(plan_of(RING), test_models.TUNED[model])
        right(plan_of(ULYSSES), test_models.TUNED[model])


def sight_job(
    *, kind: str, size: int, cases: list[dict[str, Any]], rank: int, num_ranks: int, rendezvous: str
) -> list[float]:
    """Steps over packed documents, and with windows: largest difference from one device, relative to the largest."""
    import rank_jobs
    import torch

    from meshwright.optimizers.update import OptimizerConfig
    from meshwright.runtime.loop import Samples
    from meshwright.verify import parity

    parity.enter(rank, num_ranks, rendezvous)
    answers = []
    for case in cases:
        found = []
        for plan in (plan_of(microbatch=8), plan_of(t("context", size=size, kind=kind), microbatch=4)):
            opened, samples = rank_jobs.open_tiny(case["config"], 8, tiny.SEQUENCE, "float64")
            session = parity.open_session(plan, opened, OptimizerConfig(), dtype="float64", device=rank_jobs.CPU)
            given: Samples = samples(0, 0, 1)
            inputs = (given.inputs, torch.tensor(case["documents"])) if case["documents"] else given.inputs
            given = Samples(inputs=inputs, targets=given.targets, weights=given.weights, num_tokens=given.num_tokens)
            loss = session.loop.step(given, 0.0).loss
            gradients = {name: value.clone() for name, value in session.build.local_gradients()}
            evaluated, _, _ = session.loop.evaluate([given])
            found.append(gradients | {"loss": torch.tensor(loss), "evaluated": torch.tensor(evaluated)})
        whole, cut = found
        largest = max(float(value.abs().max()) for value in whole.values())
        answers.append(max(float((whole[name] - cut[name]).abs().max()) for name in whole) / largest)
    parity.leave()
    return answers


DOCUMENTS = [[min(place // (3 + row), 2) for place in range(tiny.SEQUENCE)] for row in range(8)]
SIGHTS = [
    {"config": config | {"sliding_window": window}, "documents": documents}
    for config in (LLAMA, GPT)
    for window in (0, 1, 3, 5)
    for documents in ([], DOCUMENTS)
]


@pytest.mark.parametrize(("kind", "size"), [("ring", 2), ("ring", 4), ("ulysses", 2)])
def test_windows_and_documents(kind: str, size: int, pool: RankPool) -> None:
    asked = {"kind": kind, "size": size, "cases": SIGHTS}
    for answer in pool.run("test_context:sight_job", asked, size, timeout_seconds=120):
        assert max(answer) < 1e-12, answer


def kept_job(*, kind: str, config: dict[str, Any], rank: int, num_ranks: int, rendezvous: str) -> list[int]:
    """Bytes that autograd keeps of a forward pass, on one device and on each of several ranks."""
    import rank_jobs
    import torch

    from meshwright.optimizers.update import OptimizerConfig
    from meshwright.verify import parity

    parity.enter(rank, num_ranks, rendezvous)
    sizes = []
    for plan in (plan_of(microbatch=8), plan_of(t("context", size=num_ranks, kind=kind), microbatch=8)):
        opened, samples = rank_jobs.open_tiny(config, 8, tiny.SEQUENCE, "float32")
        session = parity.open_session(plan, opened, OptimizerConfig(), dtype="float32", device=rank_jobs.CPU)
        given = samples(0, 0, 1)
        own = {parameter.untyped_storage().data_ptr() for parameter in session.build.model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.is_floating_point():
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = session.build.model(given.inputs, given.targets, given.weights.float(), None)
        sizes.append(sum(kept.values()))
        del loss
    parity.leave()
    return sizes


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_each_rank_keeps_its_share_of_the_activations(kind: str, family: str, pool: RankPool) -> None:
    config = tiny.FAMILIES[family]
    profile = decoder_profile(DecoderConfig(**config), "tiny")
    for whole, part in pool.run("test_context:kept_job", {"kind": kind, "config": config}, 2, timeout_seconds=60):
        priced = [
            _activations(profile, plan_of(*techniques, microbatch=8))
            for techniques in ((), (t("context", size=2, kind=kind),))
        ]
        assert part / whole == pytest.approx(priced[1] / priced[0], rel=0.05)
        assert 0.5 <= part / whole < 0.55


def _activations(profile: Profile, plan: Plan) -> float:
    residents = price(profile, plan, sequence=tiny.SEQUENCE).residents
    return sum(float(item.repeat * item.bytes) for item in residents if item.category == "activations")


def sample_job(*, techniques: list[dict[str, Any]], rank: int, num_ranks: int, rendezvous: str) -> list[list[float]]:
    """Scores of a text, as whoever writes samples asks for them."""
    import rank_jobs

    from meshwright.optimizers.update import OptimizerConfig
    from meshwright.runtime.loop import Interpreter
    from meshwright.verify import parity

    parity.enter(rank, num_ranks, rendezvous)
    plan = Plan.from_json(json.dumps({"techniques": techniques, "batch": 8, "microbatch": 8}))
    opened, samples = rank_jobs.open_tiny(GPT, 8, tiny.SEQUENCE, "float64")
    session = parity.open_session(plan, opened, OptimizerConfig(), dtype="float64", device=rank_jobs.CPU)
    scores = Interpreter(session.build).scores(samples(0, 0, 1).inputs)
    parity.leave()
    return [] if scores is None else scores[0].tolist()


@pytest.mark.parametrize("techniques", [(RING,), (ULYSSES, tiny.PIPELINE), (RING, tiny.SEQUENCED)], ids=tiny.joined)
def test_scores_are_of_whole_sequences(techniques: tuple[Any, ...], pool: RankPool) -> None:
    import numpy as np

    plan = plan_of(*techniques)
    asked = {"techniques": [each.encode_self() for each in techniques]}
    answers = [answer for answer in pool.run("test_context:sample_job", asked, plan.num_ranks) if answer]
    (whole,) = pool.run("test_context:sample_job", {"techniques": []}, 1)
    words = len(answers[0][0])
    assert words in (GPT["vocab_size"], GPT["vocab_size"] // 2)
    for answer in answers:
        assert any(np.allclose(answer, np.array(whole)[:, at : at + words], atol=1e-12) for at in (0, words))


def test_models_without_a_sequence_to_cut_are_refused() -> None:
    for name in ("vit", "vgg", "dlrm"):
        config = test_models.MODELS[name]
        profile = describe(decode(ModelSection, config["section"], "model"), tiny.SEQUENCE).profile
        (problem,) = plan_of(RING).check(profile)
        assert "sequence cannot be cut" in str(problem)


def test_heads_that_do_not_divide_are_refused() -> None:
    profile = decoder_profile(DecoderConfig(**LLAMA), "tiny")
    (problem,) = plan_of(t("context", size=4, kind="ulysses")).check(profile)
    assert "2 key heads cannot be shared by 4 ranks" in str(problem)
    assert 'size = 2, or kind = "ring"' in str(problem)
    (problem,) = plan_of(ULYSSES, tiny.TENSOR).check(profile)
    assert 'Use kind = "ring"' in str(problem)
    assert not plan_of(RING, tiny.TENSOR).check(profile)


def test_sequences_that_do_not_divide_are_refused() -> None:
    (problem,) = plan_of(RING).check_sequence(18)
    assert "18 cannot be cut into 4 equal chunks" in str(problem)
    assert "multiple of 4" in str(problem)
    assert not plan_of(ULYSSES).check_sequence(18)
    (problem,) = plan_of(ULYSSES, tiny.SEQUENCED).check_sequence(18)
    assert problem.where == "tensor", "the part of nine tokens is odd"


def test_search_tries_it_for_long_sequences_only() -> None:
    from meshwright.machine.named_clusters import cluster as named

    cluster = named("8xh100")
    short, long = (
        RING.options(decoder_profile(DecoderConfig(**LLAMA | {"max_sequence": length}), "tiny"), cluster)
        for length in (8192, 16384)
    )
    assert short == ()
    assert long == (Axis("size", (2, 4, 8)), Choice("kind", ("ring", "ulysses")))
