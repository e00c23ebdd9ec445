"""Recomputation's price against torch: what stays after a forward, what runs again, and what is refused.

Tests of `core/revolve.py`, `ops/recompute.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import combinations
from typing import Any, ClassVar

import foreign
import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.revolve import forwards_again, places_kept
from meshwright.core.technique import Technique
from meshwright.core.work import Work
from meshwright.foreign.trace import trace_module
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig
from meshwright.ops.recompute import Chain, recomputed, selectively_recomputed
from meshwright.simulator.peak_memory import stage_memory
from meshwright.simulator.pricing import price, price_sizes, sizes_of
from meshwright.zoo.decoder import Decoder

BLOCKS, SAMPLES, SEQUENCE = 8, 2, 64
WIDER: dict[str, Any] = {
    "num_layers": BLOCKS, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 80, "max_sequence": 128,
}  # fmt: skip
MIXTRAL = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny.LLAMA | WIDER,
    "qwen": tiny.QWEN | WIDER,
    "gpt2": tiny.GPT | WIDER | {"num_kv_heads": 4},
    "mixtral": tiny.LLAMA | WIDER | MIXTRAL,
    "shared": tiny.MOE | WIDER | {"num_shared_experts": 1, "expert_ffn_size": 24},
}
KEEP = tiny.t("recompute", layers="none")
SELECTIVE = tiny.t("recompute", layers="none", selective=BLOCKS)
ATTENTION = tiny.t("recompute", layers="none", attention=BLOCKS)
FULL = tiny.t("recompute")
TWO_SLOTS = tiny.t("recompute", slots=2)
ONE_SLOT = tiny.t("recompute", slots=1)
MIXED = tiny.t("recompute", layers="first 3", attention="first 1", selective="first 2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operators made and somebody still holds."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def now_bytes(self) -> int:
        self.sizes = {key: found for key, found in self.sizes.items() if not found[0].expired()}
        return sum(size for _, size in self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else (made,):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.sizes.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.now_bytes())
        return made


def wrapped(blocks: list[nn.Module], technique: Technique, profile: Profile) -> None:
    """As `apply` does it to a model of one stage."""

    class Build:
        spans = ((0, len(blocks)),)
        replayed_blocks: ClassVar[set[int]] = set()

        class model:
            block_modules = staticmethod(lambda: blocks)

    Build.profile = profile  # type: ignore[attr-defined]
    technique._wrap(Build)  # type: ignore[attr-defined]


def decoder(config: dict[str, Any], technique: Technique) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**config))
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.1)
            value.grad = torch.zeros_like(value)
    wrapped(model.block_modules(), technique, tiny.profile_of(config))
    return model


def step_of(model: Decoder) -> Tensor:
    tokens = torch.randint(36, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return model(tokens, tokens, torch.ones(SAMPLES, SEQUENCE))


def measured(config: dict[str, Any], technique: Technique) -> tuple[int, int, Tensor]:
    """Bytes after forward, the most there are, gradients."""
    model = decoder(config, technique)
    values = list(model.parameters())
    step_of(model).backward()
    with Alive([*values, *(value.grad for value in values if value.grad is not None)]) as alive:
        loss = step_of(model)
        kept_bytes = alive.now_bytes()
        loss.backward()
    gradients = torch.cat([value.grad.flatten() for value in values if value.grad is not None])
    return kept_bytes, alive.peak_bytes, gradients


def flops_of(config: dict[str, Any], technique: Technique) -> int:
    model = decoder(config, technique)
    with FlopCounterMode(display=False) as counter:  # it holds tensors: not while bytes are counted
        step_of(model).backward()
    return counter.get_total_flops()


def priced(profile: Profile, technique: Technique, **sizes: Any) -> Work:
    plan = Plan(techniques=(technique,), batch=SAMPLES, microbatch=SAMPLES)
    assert plan.check(profile) == ()
    return price(profile, plan, **{"sequence": SEQUENCE, **sizes})


def kept_by(work: Work) -> float:
    return float(sum(item.repeat * item.bytes for item in work.residents if item.life == "microbatch"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stays_after_a_forward_is_what_was_priced(family: str) -> None:
    profile, gradients = tiny.profile_of(FAMILIES[family]), None
    for technique in (KEEP, SELECTIVE, ATTENTION, MIXED, FULL, TWO_SLOTS):
        kept_bytes, _, found = measured(FAMILIES[family], technique)
        assert kept_by(priced(profile, technique)) == pytest.approx(kept_bytes, rel=0.02, abs=2600), technique
        gradients = found if gradients is None else gradients
        assert torch.equal(found, gradients), technique


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_runs_again_in_a_selective_block(family: str) -> None:
    plain, some, whole = (flops_of(FAMILIES[family], technique) for technique in (KEEP, SELECTIVE, FULL))
    assert some == plain < whole
    work = priced(tiny.profile_of(FAMILIES[family]), SELECTIVE)
    again = [task for task in work.computes if task.phase == "recompute" and task.repeat]
    assert again
    assert not any(task.flops for task in again)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_that_are_not_kept_run_again_and_no_others(family: str) -> None:
    again = flops_of(FAMILIES[family], ATTENTION) - flops_of(FAMILIES[family], KEEP)
    work = priced(tiny.profile_of(FAMILIES[family]), ATTENTION)
    assert again == sum(task.repeat * task.flops for task in work.computes if task.phase == "recompute") > 0


@pytest.mark.parametrize("policy", ["layers", "attention", "selective"])
def test_a_compiled_block_keeps_what_was_priced(policy: str) -> None:
    technique, config = tiny.t("recompute", **{"layers": "none", policy: 1}), FAMILIES["llama"] | {"num_layers": 1}
    model = decoder(config, technique)
    block = model.block_modules()[0]
    given = [torch.randn(SAMPLES, SEQUENCE, 32), torch.randn(SEQUENCE, 4), torch.randn(SEQUENCE, 4)]
    given[0].requires_grad_()
    compiled, known = torch.compile(block.forward, backend="aot_eager"), [*model.parameters(), *given[1:]]
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_given = storage._cdata in {each.untyped_storage()._cdata for each in known}
        if tensor.is_floating_point() and not is_given:  # not the state of the generator of random numbers
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = compiled(*given, None)
    work = priced(tiny.profile_of(config), technique)
    kept = [item for item in work.residents if item.layer == "blocks" and item.life == "microbatch"]
    assert sum(sizes.values()) == sum(item.repeat * item.bytes for item in kept)
    out.sum().backward()


def test_less_is_held_the_more_is_computed_again() -> None:
    """Kept and at the fullest moment, in torch and by price; and the time it takes goes the other way."""
    config = FAMILIES["llama"]
    chosen = (KEEP, SELECTIVE, ATTENTION, FULL, TWO_SLOTS, ONE_SLOT)
    found = [measured(config, technique) for technique in chosen]
    works = [priced(tiny.profile_of(config), technique) for technique in chosen]
    peaks = [float(stage_memory(work, cluster("8xh100").device).peak_bytes()) for work in works]
    for falling in ([f[0] for f in found], [f[1] for f in found], peaks[:3], list(map(kept_by, works))):
        assert sorted(falling, reverse=True) == falling
        assert len(set(falling)) == len(falling)
    moved = [sum(float(t.repeat * t.moved_bytes) for t in work.computes) for work in works]
    assert sorted(moved) == moved


def test_blocks_run_again_as_often_as_was_priced() -> None:
    """Counted by calls of what each block calls first."""
    for slots in (1, 2, 3, 5):
        model = decoder(FAMILIES["llama"], tiny.t("recompute", slots=slots))
        calls: list[int] = []
        for block in model.block_modules():
            block.attention_norm.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(2):
            step_of(model).backward()
        again = len(calls) // 2 - BLOCKS
        work = priced(tiny.profile_of(FAMILIES["llama"]), tiny.t("recompute", slots=slots))
        norm = next(t for t in work.computes if t.phase == "recompute" and t.name == "attention_norm")
        assert again == norm.repeat == BLOCKS + forwards_again(slots, BLOCKS)[BLOCKS]


def squared(out: Any) -> Tensor:
    scores: Tensor = getattr(out, "logits", out)
    return scores.square().sum()


@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_a_module_of_others(name: str) -> None:
    """By the operators that it dispatches: exact, no product again, and priced within a few percent."""
    module, tokens = getattr(foreign, name)(), torch.randint(36, (SAMPLES, 16))
    profile = trace_module(module, tokens[:1], name=name)
    blocks = list(module.get_submodule(profile.block_path).children())
    own, found = [block.forward for block in blocks], {}
    for technique in (KEEP, tiny.t("recompute", layers="none", selective="first 3"), FULL, ONE_SLOT):
        for block, forward in zip(blocks, own, strict=True):
            block.forward = forward
        wrapped(blocks, technique, profile)
        module.zero_grad(set_to_none=True)
        with Alive([*module.parameters(), *module.buffers()]) as alive:
            loss = squared(module(tokens))
            kept_bytes = alive.now_bytes()
            loss.backward()
        gradients = torch.cat([v.grad.flatten() for v in module.parameters() if v.grad is not None])
        with FlopCounterMode(display=False) as counter:
            squared(module(tokens)).backward()
        found[technique] = kept_bytes, counter.get_total_flops(), gradients, priced(profile, technique, sequence=16)
    plain, some, full, slots = found.values()
    assert all(torch.equal(each[2], plain[2]) for each in found.values())
    assert some[1] == plain[1] < full[1] < slots[1]
    assert kept_by(some[3]) - kept_by(full[3]) == pytest.approx(some[0] - full[0], rel=0.03)
    assert kept_by(full[3]) - kept_by(slots[3]) == pytest.approx(full[0] - slots[0], rel=0.03)


class Careless(nn.Module):
    """Writes over its products, throws coins, looks at numbers, and has a product that only its output needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        doubled = y * 2.0
        y.relu_()
        z = self.second(torch.dropout(y, 0.5, True)).tanh_()
        if z.abs().max().item() > 1e9:
            return x
        best = z.topk(4, dim=-1).indices
        return x + doubled.sigmoid() * z + self.third(z.gather(-1, best).repeat_interleave(2, -1))


@pytest.mark.parametrize("how", ["selective", "full", "slots"])
def test_blocks_that_write_over_their_tensors_and_throw_coins(how: str) -> None:
    def trained(is_wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        blocks = [Careless() for _ in range(5)]
        if is_wrapped and how == "slots":
            Chain(list(blocks), 2)
        for block in blocks if is_wrapped and how != "slots" else ():
            block.forward = (selectively_recomputed if how == "selective" else recomputed)(block.forward)
        x = torch.randn(3, 8, requires_grad=True)
        for _ in range(3):  # what is learnt of the first time serves the others
            y = x
            for block in blocks:
                y = block(y)
            y.square().sum().backward()
        values = [value for block in blocks for value in block.parameters()]
        return torch.cat([each.grad.flatten() for each in (x, *values) if each.grad is not None])

    assert torch.equal(trained(True), trained(False))


def test_a_replay_that_takes_another_way_is_told() -> None:
    class Fickle(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x).exp() if self.calls == 1 else (x @ x.t() @ x).exp() + super().forward(x)

    block = Fickle(4, 4)
    block.forward = selectively_recomputed(block.forward)
    with pytest.raises(RuntimeError, match="cannot be recomputed"):
        block(torch.randn(4, 4, requires_grad=True)).sum().backward()


def fewest(stored: frozenset[int], count: int, slots: int) -> int:
    """Forwards to go back through `count` blocks, by trying everything: (inputs in slots, the one in hand, blocks
    left to go back through)."""
    states: list[tuple[int, int, frozenset[int], int, int]] = [(0, 0, stored, -1, count - 1)]
    seen, order = set(), 0
    while states:
        cost, _, held, hand, wanted = heapq.heappop(states)
        if wanted < 0:
            return cost
        if (held, hand, wanted) in seen:
            continue
        seen.add((held, hand, wanted))
        nexts = [(cost, held, each, wanted) for each in held] + [(cost, held - {each}, hand, wanted) for each in held]
        if hand == wanted:
            nexts.append((cost, held - {hand}, -1, wanted - 1))
        if 0 <= hand < wanted:
            nexts.append((cost + 1, held, hand + 1, wanted))
        if hand >= 0 and len(held) < slots:
            nexts.append((cost, held | {hand}, hand, wanted))
        for each in nexts:
            order += 1
            heapq.heappush(states, (each[0], order, *each[1:]))
    raise AssertionError("no way back")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_no_other_order_runs_fewer_forwards(count: int) -> None:
    for slots in range(1, count + 1):
        left = [frozenset({0, *more}) for n in range(slots) for more in combinations(range(1, count), n)]
        best = min(fewest(each, count, slots) for each in left)
        assert forwards_again(slots, count)[count] == best
        kept = places_kept(slots, count)
        assert len(kept) <= slots
        assert fewest(frozenset(kept), count, slots) == best


def test_known_chains() -> None:
    """One slot: every block runs all before it; as many as there are blocks: none runs again."""
    assert list(forwards_again(1, 5)) == [0, 0, 1, 3, 6, 10]
    assert list(forwards_again(5, 5)) == [0] * 6
    assert forwards_again(8, 32)[32] == 24


def test_many_counts_at_once_are_each_alone() -> None:
    """As search asks: counts of both policies as arrays, with slots and without."""
    profile = tiny.profile_of(FAMILIES["llama"])
    for slots in (0, 3):
        technique = tiny.t("recompute", slots=slots)
        plan = Plan(techniques=(tiny.SEQUENCED, technique), batch=SAMPLES, microbatch=SAMPLES)
        sizes = sizes_of(plan, profile, sequence=SEQUENCE, stage=0)
        sizes = {name: value for name, value in sizes.items() if not name.startswith("recompute")}
        full, some = (each.ravel() for each in np.meshgrid(np.arange(BLOCKS + 1), np.arange(BLOCKS + 1)))
        fits = full + some <= BLOCKS
        full, some = full[fits], some[fits]
        counts = {"recompute.layers.blocks": full, "recompute.selective.blocks": some}
        many = price_sizes(profile, plan.in_phase_order(), sizes | counts)
        for row in range(len(full)):
            alone = tiny.t("recompute", layers=int(full[row]), selective=int(some[row]), slots=slots)
            if slots and not full[row]:
                continue
            one = price(profile, Plan(techniques=(tiny.SEQUENCED, alone), batch=2, microbatch=2), sequence=SEQUENCE)
            for mine, theirs in zip((*one.tasks, *one.residents), (*many.tasks, *many.residents), strict=True):
                for field in ("repeat", "bytes", "flops", "moved_bytes"):
                    if hasattr(mine, field):
                        value = np.broadcast_to(getattr(theirs, field), len(full))[row]
                        assert float(value) == pytest.approx(float(getattr(mine, field))), (mine, field)


def test_numbers_name_full_blocks_first_and_selective_ones_after_them() -> None:
    spans = ((0, 3), (6, 9))
    followed = {
        (2, 0, 2): ["layers", "layers", "selective", "selective", "", ""],
        (2, 1, 2): ["layers", "layers", "attention", "selective", "selective", ""],
        (None, 0, 2): ["layers"] * 4 + ["selective"] * 2,
        (None, 2, 1): ["layers"] * 3 + ["attention"] * 2 + ["selective"],
        ("1,7", 0, 3): ["selective", "layers", "selective", "selective", "layers", ""],
        (1, 2, "1,7"): ["layers", "selective", "attention", "attention", "selective", ""],
        (None, 0, "0-1"): ["selective"] * 2 + ["layers"] * 4,
        (0, 0, 6): ["selective"] * 6,
        ("first 2", "none", "last 1"): ["layers"] * 2 + [""] * 3 + ["selective"],
        ("all", "none", "first 2"): ["selective"] * 2 + ["layers"] * 4,
        ("all", "last 2", "last 1"): ["layers"] * 3 + ["attention"] * 2 + ["selective"],
    }
    for (layers, attention, selective), expected in followed.items():
        technique = tiny.t("recompute", layers=layers, attention=attention, selective=selective)
        assert [technique.policy_of(block, spans) for block in (0, 1, 2, 6, 7, 8)] == expected
        counts = technique.counts_in(tiny.profile_of(FAMILIES["llama"] | {"num_layers": 9}), spans)
        assert counts == {f"recompute.{each}.blocks": expected.count(each) for each in technique.policies}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": "0-3", "selective": "2-4"}, "another setting"),
        ({"layers": "3-1"}, '"3-1"'),
        ({"layers": 0, "selective": "1,99"}, "0 to 7"),
        ({"selective": "last 9"}, 'selective is "last 9"; the model has 8 blocks'),
        ({"selective": "some"}, 'selective is "some"'),
        ({"layers": "first 5", "selective": "first 4"}, "8 blocks"),
        (
            {"layers": "first 3", "attention": "first 3", "selective": "first 3"},
            "layers and attention and selective are first 3 and first 3 and first 3",
        ),
        ({"slots": -1}, "slots is -1"),
        ({"layers": 0, "slots": 2}, "no block is recomputed"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], words: str) -> None:
    profile = tiny.profile_of(FAMILIES["llama"])
    problems = Plan(techniques=(tiny.t("recompute", **settings),), batch=2).check(profile)
    assert words in " ".join(map(str, problems))
    assert all(problem.where == "recompute" for problem in problems)


@pytest.mark.parametrize("other", [tiny.SHARD3, tiny.COMPILE], ids=str)
def test_what_slots_cannot_go_with_is_refused_and_not_searched(other: Technique) -> None:
    profile = tiny.profile_of(FAMILIES["llama"])
    for slots, is_refused in ((2, True), (0, False)):
        plan = Plan(techniques=(tiny.t("recompute", slots=slots), other), batch=2)
        assert bool(plan.check(profile)) == is_refused
        assert bool(np.any(price(profile, plan, sequence=16).facts.forbidden)) == is_refused
