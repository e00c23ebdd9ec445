"""Split the inside of every layer: attention heads, MLP columns, vocabulary rows.

What: ranks along `tp` hold a share of each matrix (Megatron's column-then-row split), so a region needs one sum at its
exit and, going backward, one at its entry. With `sequence` the parts between regions (norms, residuals) are split along
the sequence: the sums become reduce_scatter + all_gather, the same bytes, and those activations are divided too. With
`overlap` k an exit's message leaves in k pieces, all but one behind the matmuls of the linear before it (and comes back
so in the backward pass); entries, the embedding and the exit of experts stay whole. Recomputation then replays a
block's last exit too.
When it helps: a layer is too big for a device, or latency of the batch matters; inside a fast link domain.
When it does not: over slow links (two exposed collectives of the whole activation per region), or for small layers
whose pieces no longer fill the device.
Cost: per block and microbatch, 2 all_reduces of b·s·d forward and 2 backward (Shoeybi et al. 2019); sequence:
activations between regions / t (Korthikanti et al. 2022).
Exactness: reordered: the order of sums over hidden columns changes. Axis: tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Profile, Site
from meshwright.core.technique import Axis, Choice, Option, Technique, listed
from meshwright.core.work import Collective, Compute, Num, ParameterSlot, Resident, Work, replace


@dataclass(frozen=True, kw_only=True)
class Tensor(Technique):
    name: ClassVar[str] = "tensor"
    phase: ClassVar[str] = "split"
    axis: ClassVar[str] = "tp"
    closeness: ClassVar[int] = 4

    size: int
    """Ranks that share a layer."""
    sequence: bool = False
    """Split what lies between the regions along the sequence."""
    overlap: int = 1
    """Pieces in which a region's exit leaves, so that one is on its way while the next is computed."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        most = 1 if "inside" in profile.uncut else cluster.devices_per_node
        sizes = tuple(n for n in _divisors(profile) if 2 <= n <= most)
        sequence = (False,) if "sequence" in profile.uncut else (True, False)
        return (Axis("size", sizes), Choice("sequence", sequence)) if sizes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if "inside" in profile.uncut and self.size > 1:
            return (self.problem(f"the layers of this model cannot be cut: {profile.uncut['inside']}"),)
        if self.size > 1 and not any(param.cut is not None for layer in profile.layers for param in layer.params):
            return (self.problem("no layer of this model has an inside that can be cut."),)
        allowed = _divisors(profile)
        problems = []
        if self.sequence and "sequence" in profile.uncut:
            what = f"this model's sequence cannot be cut: {profile.uncut['sequence']}"
            problems.append(self.problem(what, "Use sequence = false."))
        if self.overlap < 1:
            problems.append(self.problem(f"overlap is {self.overlap}.", "Use at least 1: the message as a whole."))
        elif self.overlap > 1 and not self.sequence:
            what = f"overlap is {self.overlap}, but without `sequence` a sum is whole on every rank before any goes on."
            problems.append(self.problem(what, "Use sequence = true, or overlap = 1."))
        elif self.overlap > 1 and any(layer.has_adapters for layer in profile.layers):
            what = f"overlap is {self.overlap}, and what a linear layer with an adapter makes leaves as a whole."
            problems.append(self.problem(what, "Use overlap = 1."))
        for layer in profile.layers:
            for param in layer.params:
                if param.cut is not None and param.units and param.units % self.size:
                    what = f"{param.units} units of {layer.name}.{param.name} cannot be cut {self.size} ways (axis tp)."
                    problems.append(self.problem(what, f"Use {listed(allowed)}."))
        return tuple(problems)

    def check_sequence(self, sequence: int) -> Problems:
        ways = self.size * self.overlap
        if self.sequence and sequence % ways:
            pieces = f" in {self.overlap} pieces each" if self.overlap > 1 else ""
            what = f"a sequence of {sequence} cannot be cut {self.size} ways (axis tp){pieces}."
            return (self.problem(what, f"Use a multiple of {ways}, or sequence = false."),)
        return ()

    def price(self, work: Work) -> Work:
        ways = work.size(self.axis)

        def slot(item: ParameterSlot) -> ParameterSlot:
            if item.cut is not None:
                shape = list(item.shape)
                shape[item.cut] = -(-shape[item.cut] // ways)
                return replace(item, shape=tuple(shape), cut_axis=self.axis)
            # Seen on a split tensor: each rank has a part of the gradient.
            late = item.inside or self.sequence
            return replace(item, late=(*item.late, (self.axis, self.name))) if late else item

        def share(item: Any) -> Num:
            return ways if item.cut == "tensor" or (self.sequence and item.cut == "sequence") else 1

        def task(item: Any) -> Any:
            if not isinstance(item, Compute):
                return replace(item, bytes=item.bytes // share(item))
            return item.divided(share(item))

        def resident(item: Resident) -> Resident:
            return replace(item, bytes=item.bytes / share(item))

        talk = [
            collective
            for layer in work.profile.layers
            for site in layer.sites
            if site.kind in ("enter", "exit", "loss")
            for collective in self._site(work, layer, site)
        ]
        work = work.map_slots(slot).map_tasks(task).map_residents(resident).with_tasks(*talk)
        return work.with_facts(inside_ways=ways, sequence_ways=ways if self.sequence else 1)

    def _site(self, work: Work, layer: Layer, site: Site) -> list[Collective]:
        b, s = work.size("microbatch"), work.size("sequence")
        common: dict[str, Any] = {"layer": layer.name, "axis": self.axis, "origin": self.name}
        common["repeat"] = work.repeat_of(layer.name)
        if site.kind == "loss":
            # Largest log of a sum of exponents, then their sum with the target's logit.
            calls = work.facts.loss_calls
            common |= {"kind": "all_reduce", "repeat": common["repeat"] * calls}
            size = site.elements(b, s) * max(4, work.facts.widths.state) // calls  # float32 at least
            return [Collective(**common, phase="forward", bytes=size * times) for times in (1, 2)]
        common["bytes"] = site.elements(b, s) * work.facts.widths.stream
        kinds = ("all_gather", "reduce_scatter") if site.kind == "enter" else ("reduce_scatter", "all_gather")
        if not self.sequence:
            kinds = ("", "all_reduce") if site.kind == "enter" else ("all_reduce", "")
        back = {**common, "repeat": work.passing_back(layer.name, site.after)}
        # Not the embedding's lookups, nor a sum over experts, at the end of their layer.
        is_sum = site.tail and any(param.shared_out == "experts" for param in layer.params)
        if self.overlap > 1 and layer.is_block and site.kind == "exit" and not is_sum:
            # Piece by piece, not by `repeat`: whoever replays a layer counts its tasks anew. The last has nothing to
            # hide behind, nor has the first to come back.
            size = common["bytes"] // self.overlap
            pieces: list[dict[str, Any]] = [{"bytes": size, "hidden": j > 0} for j in range(self.overlap)]
        else:
            pieces = [{}]
        common["tail"] = back["tail"] = site.tail
        told = []
        for piece in pieces:
            if kinds[0]:
                told.append(Collective(**{**common, **piece, "kind": kinds[0]}, phase="forward"))
            if kinds[1]:
                told.append(Collective(**{**back, **piece, "kind": kinds[1]}, phase="backward"))
        return told

    def apply(self, build: Build) -> None:
        build.at("split", self._split)

    def _split(self, build: Build) -> None:
        import functools

        from meshwright.ops.cross_entropy import SplitVocabulary
        from meshwright.ops.tensor_parallel import Region, VocabLookup

        group, index = build.mesh.group(self.axis), build.mesh.index(self.axis)
        model = build.model
        summed_in = build.dtype if build.profile.stream == "parameters" else None
        region = Region(group, self.sequence, summed_in, self.overlap)
        for name, param in build.named_params():
            if param.cut is not None:
                build.cut(name, param.cut, index, self.size, self.axis)
            elif param.inside or self.sequence:
                build.sum_late(self, name, group)
        for each in model.regions():
            region.wrap(each)
        model.set_split(index, self.size)
        embed, _ = model.ends()
        if embed is not None:
            first = build.boxes["embed.tokens.weight"].offset[0]
            embed.tokens.forward = VocabLookup(embed.tokens, first, region, embed.dtype)
            if self.sequence and embed.positions is not None:
                embed.offsets = functools.partial(_part_of_positions, embed.positions, index)
        for name, head in model.heads():
            first = build.boxes[build.canonical[f"{name}.output.weight"]].offset[0]
            head.split_vocabulary = SplitVocabulary(first, group)

            def score(head: Any, x: Any, targets: Any, weights: Any, whole: Any = head.score) -> Any:
                return whole(head, region.enter(x), targets, weights)

            head.score = score
            # Scores without targets: each rank has those of its own words, from `first_word` on.
            head.first_word = first
            head.output.register_forward_pre_hook(lambda _, args: (region.enter(args[0]),))
        if self.sequence:
            build.sequence_ways *= self.size


def _part_of_positions(positions: Any, index: int, x: Any, places: Any) -> Any:
    part = x.shape[1]
    return positions(places[..., index * part : (index + 1) * part])


def _divisors(profile: Profile) -> tuple[int, ...]:
    units = [p.units for layer in profile.layers for p in layer.params if p.cut is not None and p.units]
    return tuple(n for n in range(1, min(units) + 1) if all(u % n == 0 for u in units)) if units else ()
