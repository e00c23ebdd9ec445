"""Split every sequence: each rank has some of its tokens, and attention still sees all of them.

What: ranks along `cp` have the same samples and other tokens of them. `ring`: keys and values go round the ranks while
they attend, in chunks from both ends of the sequence so that all are equally busy; going backward they go round again,
followed by their gradients. `ulysses`: before attention each rank trades heads of its tokens for all tokens of fewer
heads, and back after it.
When it helps: sequences so long that one sample's activations do not fit, or that there are fewer samples than devices.
When it does not: short sequences (attention is too short to hide the ring behind), or memory full of parameters, which
every rank still has.
Cost: activations / n. Per block and microbatch, ring: n - 1 messages of this rank's keys and values forward, as many
again and as many of their gradients (float32) backward, beside attention (Liu et al. 2023; chunks from both ends: Zhu
2024). Ulysses: all_to_all of q, k, v and of the output, and the same backward, not hidden; n must divide the key heads
(Jacobs et al. 2023). Gradients are summed over cp once a step. Choices of experts are gathered where a capacity or a
balance of theirs is a sequence's.
Exactness: reordered: the order of the sum over keys changes. Axis: cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Op, Profile
from meshwright.core.technique import Axis, Choice, Option, Technique
from meshwright.core.work import Collective, Num, Resident, Work

LONG = 16384
"""Tokens from which on search tries it: shorter samples are shared out whole."""
MOST_RANKS = 64
CHOICE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Context(Technique):
    name: ClassVar[str] = "context"
    phase: ClassVar[str] = "split"
    axis: ClassVar[str] = "cp"
    closeness: ClassVar[int] = 4
    splits_sequence: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True

    size: int
    """Ranks that share every sequence."""
    kind: Literal["ring", "ulysses"] = "ring"
    """How a token sees the others' keys: they go round, or heads are traded for tokens."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        if "sequence" in profile.uncut or profile.max_sequence < LONG:
            return ()
        most = min(cluster.num_devices, MOST_RANKS)
        powers = [1 << bit for bit in range(1, most.bit_length()) if profile.max_sequence % (2 << bit) == 0]
        sizes = tuple(size for size in powers if size <= most)
        kinds = ("ring", "ulysses") if any(_key_heads(profile) % size == 0 for size in sizes) else ("ring",)
        return (Axis("size", sizes), Choice("kind", kinds)) if sizes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if "sequence" in profile.uncut:
            return (self.problem(f"this model's sequence cannot be cut: {profile.uncut['sequence']}"),)
        ways, heads = self.size * plan.mesh.get("tp", 1), _key_heads(profile)
        if self.kind == "ulysses" and heads % ways:
            what = f"{heads} key heads cannot be shared by {ways} ranks (axes cp and tp)."
            sizes = [n for n in range(2, heads + 1) if heads % (n * (ways // self.size)) == 0]
            listed = f"size = {' or '.join(map(str, sizes))}, or " if sizes else ""
            return (self.problem(what, f'Use {listed}kind = "ring".'),)
        return ()

    def check_sequence(self, sequence: int) -> Problems:
        chunks = 2 * self.size if self.kind == "ring" else self.size
        if sequence % chunks:
            what = f"a sequence of {sequence} cannot be cut into {chunks} equal chunks (axis cp, {self.kind})."
            return (self.problem(what, f"Use a multiple of {chunks}."),)
        return ()

    def price(self, work: Work) -> Work:
        talk: list[Collective] = []
        held: list[Resident] = []
        for layer in work.profile.layers:
            for op in layer.ops:
                if op.kind == "attention":
                    told, kept = (self._ring if self.kind == "ring" else self._ulysses)(work, layer, op)
                    talk, held = [*talk, *told], [*held, *kept]
            # Capacity and balance are a sequence's: its tokens' choices of experts are gathered.
            tokens = work.size("microbatch"), work.size("sequence") * work.size(self.axis)
            for site in (site for site in layer.sites if site.kind == "choices"):
                size, here = site.elements(*tokens) * CHOICE_BYTES, work.repeat_of(layer.name)
                talk.append(self._told(layer, "all_gather", "forward", here, size, cut="none"))
        return work.with_tasks(*talk).with_residents(*held).owing(self.axis, self.name)

    def _ring(self, work: Work, layer: Layer, op: Op) -> tuple[list[Collective], list[Resident]]:
        tokens = work.size("microbatch") * work.size("sequence")
        query, keys = op.shape[0] * op.shape[1], 2 * _key_width(layer)
        width, wide = _widths(work)
        turns = work.size(self.axis) - 1
        here = work.repeat_of(layer.name)
        back = _attending_back(work, layer)
        told = [
            self._told(layer, "ring", phase, repeat * turns, tokens * keys * each, hidden=True)
            for phase, repeat, each in (("forward", here, width), ("backward", back, width), ("backward", back, wide))
        ]
        # Keys and values under way and in use, their gradients likewise and at home, and the query's.
        size = (turns > 0) * tokens * (2 * keys * width + 3 * keys * wide + query * wide)
        return told, [self._held(layer, "buffers", here, size, "moment")]

    def _ulysses(self, work: Work, layer: Layer, op: Op) -> tuple[list[Collective], list[Resident]]:
        tokens = work.size("microbatch") * work.size("sequence")
        query, keys = op.shape[0] * op.shape[1], 2 * _key_width(layer)
        width, _ = _widths(work)
        here = work.repeat_of(layer.name)
        told = [
            self._told(layer, "all_to_all", phase, repeat, tokens * elements * width)
            for phase, repeat in (("forward", here), ("backward", _attending_back(work, layer)))
            for elements in (query + keys, query)
        ]
        # The output is kept with its heads here and with its tokens here; by some layouts it is kept twice anyway.
        again = query - sum(each.saved.bs for each in layer.ops if each.role == "layout")
        size = (work.size(self.axis) > 1) * tokens * width
        traded = self._held(layer, "buffers", here, size * 2 * (query + keys), "moment")
        return told, [traded, self._held(layer, "activations", here, size * again, "microbatch")]

    def _told(
        self, layer: Layer, kind: Any, phase: Any, repeat: Num, size: Num, *, hidden: bool = False, cut: Any = "tensor"
    ) -> Collective:
        common: dict[str, Any] = {"layer": layer.name, "axis": self.axis, "origin": self.name, "repeat": repeat}
        return Collective(**common, kind=kind, phase=phase, bytes=size, hidden=hidden, cut=cut)

    def _held(self, layer: Layer, category: Any, repeat: Num, size: Num, life: Any) -> Resident:
        common: dict[str, Any] = {"layer": layer.name, "origin": self.name, "cut": "tensor"}
        return Resident(**common, category=category, repeat=repeat, bytes=size, life=life)

    def apply(self, build: Build) -> None:
        build.at("split", self._split)

    def _split(self, build: Build) -> None:
        from meshwright.ops.context_parallel import Ring, TokenSplit, Ulysses

        model, group = build.model, build.mesh.group(self.axis)
        is_ring = self.kind == "ring"
        tokens = TokenSplit(group=group, index=build.mesh.index(self.axis), is_folded=is_ring)
        model.own_tokens = tokens.own
        for block in model.block_modules():
            attention = block.attention
            ring, traded = Ring(tokens, model.config.sliding_window), Ulysses(group, attention.attend)
            attention.attend = ring if is_ring else traded
            if hasattr(block.mlp, "all_choices"):
                block.mlp.own_tokens, block.mlp.all_choices = tokens.own, tokens.all_choices
        if is_ring:  # each turn makes its own small mask
            model.mask = lambda sequence, window, documents, device, head_size: documents
        _, head = model.ends()
        if head is not None:  # called only for scores without targets, which are asked of whole sequences
            head.output.register_forward_hook(lambda module, args, scores: tokens.all(scores))
        build.sum_rest_late(self)
        build.sequence_ways *= self.size


def _key_heads(profile: Profile) -> int:
    return next(p.units for layer in profile.block_layers for p in layer.params if p.name == "attention.key.weight")


def _key_width(layer: Layer) -> int:
    return next(param.shape[0] for param in layer.params if param.name == "attention.key.weight")


def _attending_back(work: Work, layer: Layer) -> Num:
    """Instances whose attention has a backward: something that its input depends on is trained."""
    names = [param.name for param in layer.params]
    return work.passing_back(layer.name, names.index("attention.output.weight"))


def _widths(work: Work) -> tuple[Num, Num]:
    """Bytes of an element as it is computed, and as it is summed."""
    return work.facts.widths.stream, max(4, work.facts.widths.state)
