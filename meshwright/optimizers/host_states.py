"""Masters and optimizer states in host memory: gradients leave the device as backward makes them, host cores update,
and the new weights are back before the layer's next forward."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.core.build import Build, OptimizerState
from meshwright.ops.fsdp import local
from meshwright.ops.host_memory import CopyLanes, HostUnit, flat_views, pinned_empty
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, RuleMaker, Shapes, UpdateRule

CPU = torch.device("cpu")


class FlatRule(UpdateRule):
    """A rule on the flat tensors of a unit, compiled to one pass over them that makes the working copy too.

    With `has_spare` it reads one set of tensors and writes another; `commit` makes that the valid one.
    """

    def __init__(
        self,
        plain: Any,
        unit: HostUnit,
        gradients: Tensor,
        has_spare: bool,
        config: OptimizerConfig,
        pieces: list[ParameterPiece],
        build: Build,
    ):
        super().__init__(config, pieces, build, {})
        self.plain, self.unit, self.flat_gradients, self.build = plain, unit, gradients, build
        masters = unit.flat_masters
        self.sets = [[masters, *(self._zeros() for _ in plain.flat_states)]]
        """Masters and states; the first set is the valid one."""
        if has_spare:
            self.sets.append([self._zeros(build.mesh.device), *(self._zeros() for _ in plain.flat_states)])
        self.is_narrow = unit.flat_working.dtype != masters.dtype
        self.runs: list[tuple[float, float, slice, slice]] = []
        """(scale of the rate, decay, where in the flat tensors, where in the gradients) of what is updated at once."""
        at = 0
        for piece, own in zip(pieces, unit.own, strict=True):
            size, key = own.stop - own.start, (piece.lr_scale, piece.weight_decay)
            if self.runs and self.runs[-1][:2] == key and self.runs[-1][2].stop == own.start:
                _, _, before, landed = self.runs.pop()
                self.runs.append((*key, slice(before.start, own.stop), slice(landed.start, at + size)))
            elif size:
                self.runs.append((*key, own, slice(at, at + size)))
            at += size
        self.update: Any = compiled_update(plain, not has_spare)

    def _zeros(self, device: torch.device = CPU) -> Tensor:
        """As many as there are masters, for copies to and from the device; this rank's rows are written now, so that no
        step waits for the system to find the memory."""
        masters, share = self.unit.flat_masters, self.unit.share
        result = pinned_empty(masters.numel(), masters.dtype, device, share)
        for own in self.unit.own:
            result[own].zero_()
        return result

    def step(self, lr: float, count: int) -> None:
        for lr_scale, decay, here, landed in self.runs:
            numbers = self.plain.flat_numbers(self.config, lr * lr_scale, decay, count, self.factor)
            gradient, narrow = self.flat_gradients[landed], None
            if self.is_narrow:
                is_shared = self.flat_gradients is self.unit.flat_working
                narrow = gradient if is_shared else self.unit.flat_working[here]
            old, *new = ([each[here] for each in each_set] for each_set in self.sets)
            given = (old, gradient, torch.tensor(numbers, dtype=old[0].dtype), narrow, *new)
            while not _called(self.update, *given):
                time.sleep(0.01)

    def commit(self) -> None:
        if len(self.sets) == 1:
            return
        self.sets.reverse()
        unit = self.unit
        unit.flat_masters = self.sets[0][0]
        unit.masters = flat_views(unit.flat_masters, unit.masters)
        self.build.masters.update(zip(unit.names, unit.masters, strict=True))
        if not self.is_narrow:
            unit.flat_working, unit.working = unit.flat_masters, unit.masters

    def kept(self) -> Iterator[OptimizerState]:
        for kind, flat in zip(self.plain.flat_states, self.sets[0][1:], strict=True):
            for piece, value in zip(self.pieces, flat_views(flat, self.unit.masters), strict=True):
                yield OptimizerState(kind, piece.name, value, piece.box)

    def storage(self) -> Iterator[Tensor]:
        for flat in self.sets[0][1:]:
            yield from self.unit.own_rows(flat)

    @property
    def flat_values(self) -> list[Tensor]:
        """The states of all parameters, a flat tensor of each kind."""
        return self.sets[0][1:]

    def apart(self, count: int) -> UpdateRule:
        """The plain rule in its place."""
        pieces = zip(self.pieces, self.unit.own_rows(self.unit.flat_masters), strict=True)
        rule = self.plain(self.config, [replace(piece, value=value) for piece, value in pieces], self.build, {})
        for mine, its in zip(self.storage(), rule.kept(), strict=True):
            its.value.copy_(mine)
        rule.set_num_steps(count)
        return rule


def compiles_updates(build: Build) -> bool:
    """On a CPU, where plans are compared, updates are bit for bit those of the device."""
    return build.mesh.device.type == "cuda"


@cache
def compiled_update(plain: Any, is_in_place: bool) -> Callable[..., None]:
    """(masters and states, gradients, numbers, working copy or None, new masters and states unless in place)."""

    def write(new: list[Tensor], results: tuple[Tensor, ...], narrow: Tensor | None) -> None:
        for target, result in zip(new, results, strict=True):
            target.copy_(result)
        if narrow is not None:
            narrow.copy_(results[0])

    def in_place(old: list[Tensor], gradient: Tensor, numbers: Tensor, narrow: Tensor | None) -> None:
        write(old, plain.flat_update(old[0], gradient, old[1:], numbers), narrow)

    def into(old: list[Tensor], gradient: Tensor, numbers: Tensor, narrow: Tensor | None, new: list[Tensor]) -> None:
        write(new, plain.flat_update(old[0], gradient, old[1:], numbers), narrow)

    # The thread that launches kernels must not wait for a core. Graphs of torch's cache, told apart by less than which
    # inputs they write, have been the wrong ones (torch 2.13).
    options = {"cpp.threads": max(1, torch.get_num_threads() - 2), "fx_graph_cache": False}
    return torch.compile(in_place if is_in_place else into, dynamic=True, options=options)


def _called(update: Callable[..., None], *given: Any) -> bool:
    """Call a compiled update; False while another thread traces a graph, during which torch calls none."""
    try:
        update(*given)
    except RuntimeError as error:
        if "FX to symbolically trace" not in str(error):
            raise
        return False
    return True


@cache
@torch.no_grad()
def can_compile(
    plain: Any, wide: torch.dtype, narrow: torch.dtype, given: torch.dtype, has_spare: bool, shares: bool
) -> bool:
    """Whether the compiled update runs here and is right, compiled by the time that this returns. `shares`: the working
    copy is written over the gradients."""
    if not plain.flat_states:
        return False
    config = OptimizerConfig()
    numbers = torch.tensor(plain.flat_numbers(config, 0.1, 0.1, 1, 0.5), dtype=wide)
    size = 1 << 22  # whether the code is for several threads is decided by the first size
    old = [torch.rand(size, dtype=wide) for _ in (0, *plain.flat_states)]
    new = [torch.empty_like(each) for each in old] if has_spare else old
    gradient, copy = torch.rand(size, dtype=given), torch.empty(size, dtype=narrow)
    try:
        for here in (slice(0, size // 2), slice(size // 2, size - 1024)):
            before = [each[here] for each in old]
            wanted = plain.flat_update(before[0], gradient[here], before[1:], numbers)
            into = None if narrow == wide else gradient[here] if shares else copy[here]
            after = [[each[here] for each in new]] if has_spare else []
            arrived = gradient[here] if into is None or not shares else into
            compiled_update(plain, not has_spare)(before, arrived, numbers, into, *after)
            for each, value in zip(new, wanted, strict=True):
                torch.testing.assert_close(each[here], value, rtol=1e-5, atol=1e-6)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"updates on the host are not compiled, and take longer: {reason}", stacklevel=2)
        return False
    return True


class UnitStates:
    """What the host has of one unit. All of its methods but `arrive` run on the updating thread."""

    def __init__(
        self,
        unit: HostUnit,
        pieces: list[ParameterPiece],
        make: RuleMaker,
        config: OptimizerConfig,
        build: Build,
        *,
        num_microbatches: int,
        keeps_old: bool,
    ):
        """`pieces`: of the device."""
        self.unit, self.pieces, self.build = unit, pieces, build
        values = unit.own_rows(unit.flat_masters)
        size, device = sum(value.numel() for value in values), build.mesh.device
        self.shares = unit.flat_working is not unit.flat_masters and num_microbatches == 1 and not keeps_old
        """Gradients come into the memory of the working copy, which the update writes anew."""
        self.landing = unit.flat_working if self.shares else pinned_empty(size, pieces[0].value.dtype, device)
        """Gradients as they come, of the rows that are updated here."""
        self.landed = flat_views(self.landing, values)
        flat = torch.empty(size, dtype=build.dtype) if num_microbatches > 1 else self.landing
        self.sums = flat_views(flat, values)
        """Gradients of the step."""
        on_host = [replace(piece, value=own) for piece, own in zip(pieces, values, strict=True)]
        plain: Any = make
        is_flat = isinstance(plain, type) and compiles_updates(build)
        if is_flat and can_compile(plain, build.dtype, unit.flat_working.dtype, flat.dtype, keeps_old, self.shares):
            self.rule: UpdateRule = FlatRule(plain, unit, flat, keeps_old, config, on_host, build)
        else:
            self.rule = make(config, on_host, build, {})
        self.whole_states: list[OptimizerState] = []
        """Where ranks share them, and each has a rule for its rows."""
        self._join_states()
        if unit.on_disk is not None:
            rule = self.rule
            unit.on_disk.add(rule.flat_values if isinstance(rule, FlatRule) else list(rule.storage()))
            unit.on_disk.watch(unit.flat_masters, values)
        self.num_arrivals = len(pieces) * num_microbatches
        self.added: list[Future[None] | None] = [None] * len(pieces)
        """The last addition to each of the sums."""
        self.event: torch.cuda.Event | None = None
        """When the last gradient has arrived."""
        self.old: list[Tensor] = []
        """What an update that may be undone has changed, as it was."""
        if keeps_old and not isinstance(self.rule, FlatRule):
            self.old = [torch.empty_like(value) for value in self._changed()]
        self.is_ahead = False
        """Updated, and nobody knows yet whether by the right gradient."""
        self.counts_apart = False
        """Some parameter took no part in a step: from then on rules that count steps do so for each parameter."""
        self.early: Future[None] | None = None
        """An update that was begun before the norm was known."""
        self.future: Future[torch.cuda.Event | None] | None = None
        """The event of the weights' return."""
        self.begin()

    @torch.no_grad()
    def _join_states(self) -> None:
        """What a plain rule remembers of its rows becomes a part of memory that ranks share."""
        share = self.unit.share
        if share is None or isinstance(self.rule, FlatRule):
            return
        self.whole_states.clear()
        pieces = {piece.name: piece for piece in self.pieces}
        for state in self.rule.kept():
            num_rows, value = pieces[state.name].value.shape[0], state.value
            shape = (num_rows, *value.shape[1:])
            whole = share.empty(math.prod(shape), value.dtype).view(shape)
            part = whole[share.rows(num_rows)].copy_(value)
            value.set_(part)
            self.whole_states.append(state._replace(value=whole))

    def kept(self) -> Iterable[OptimizerState]:
        return self.whole_states or self.rule.kept()

    def begin(self) -> None:
        self.arrivals = [0] * len(self.pieces)

    def _changed(self) -> list[Tensor]:
        return [*self.unit.own_rows(self.unit.flat_masters), *self.rule.storage()]

    def update(self, lr: float, count: int, factor: float, used: list[int], *, is_ahead: bool = False) -> None:
        """By the gradients, each multiplied by `factor`; `used`: 0 for a parameter that has none."""
        if self.event is not None:
            self.event.synchronize()
        self.is_ahead = is_ahead
        if is_ahead and self.old:
            for old, value in zip(self.old, self._changed(), strict=True):
                old.copy_(value)
        if isinstance(self.rule, FlatRule) and all(used):
            self.rule.factor = factor
            self.rule.step(lr, count)
            return
        if isinstance(self.rule, FlatRule):
            flat, self.rule = self.rule, self.rule.apart(count - 1)
            self._join_states()
            if (layer := self.unit.on_disk) is not None:
                layer.watch(self.unit.flat_masters, [piece.value for piece in self.rule.pieces])
                for whole, parts in zip(flat.flat_values, self.rule.state.values(), strict=True):
                    layer.watch(whole, parts)
        masters, dtype = [piece.value for piece in self.rule.pieces], self.build.dtype
        unused = {piece.name for piece, times in zip(self.pieces, used, strict=True) if not times}
        self.counts_apart |= bool(unused)
        untouched = [master for piece, master in zip(self.pieces, masters, strict=True) if piece.name in unused]
        untouched += [state.value for state in self.rule.kept() if state.name in unused] if unused else []
        before = [value.clone() for value in untouched]
        for piece, master, gradient in zip(self.pieces, masters, self.sums, strict=True):
            master.grad = None if piece.name in unused else gradient.to(dtype)
        self.rule.divisor = None
        if factor != 1.0 and self.rule.decides_on_device and dtype == torch.float32:
            self.rule.divisor = torch.tensor(1.0 / factor, dtype=torch.float32)
        elif factor != 1.0:
            torch._foreach_mul_([master.grad for master in masters if master.grad is not None], factor)
        self.rule.step(lr, count)
        for master in masters:
            master.grad = None
        for value, old in zip(untouched, before, strict=True):
            value.copy_(old)
        self.narrow()

    def roll_back(self, count: int) -> None:
        """Undo an update that was made ahead in step `count`."""
        if self.is_ahead and self.old:
            for value, old in zip(self._changed(), self.old, strict=True):
                value.copy_(old)
            self.rule.set_num_steps(count - 1)
        self.is_ahead = False

    def narrow(self) -> None:
        """Make the working copy of the masters."""
        if self.unit.working is not self.unit.masters and self.unit.flat_working.dtype != self.build.dtype:
            for working, master in zip(self.unit.working, self.unit.masters, strict=True):
                working.copy_(master)

    def send(self, lanes: CopyLanes, *, commits: bool = True) -> torch.cuda.Event | None:
        """The device gets the weights; with `commits` those of an update, which stands."""
        self.is_ahead, event = False, None
        self.unit.wait_for_others()
        if commits and isinstance(self.rule, FlatRule):
            self.rule.commit()
        if not self.unit.is_streamed:
            for piece, working in zip(self.pieces, self.unit.working, strict=True):
                event = lanes.copy_in(piece.value, working, waits=False)
        self.unit.renew()
        return event


class HostStatesRule(UpdateRule):
    """A rule for each unit that lives on the host, called by a thread of its own, and one for all other pieces.

    `early`: gradients are whole when backward makes them, and leave then; otherwise they leave when `step` is called.
    `ahead`: a unit is updated as soon as all its gradients are there, before the norm of all is known. `step` lets that
    stand if they are not to be scaled, and otherwise restores what was and updates again.
    """

    rolls_back = True

    def __init__(
        self,
        units: Sequence[HostUnit],
        early: bool,
        ahead: bool,
        make: RuleMaker,
        config: OptimizerConfig,
        pieces: list[ParameterPiece],
        build: Build,
        shapes: Shapes,
    ):
        super().__init__(config, pieces, build, shapes)
        self.build, self.early, self.ahead = build, early, ahead
        self.num_microbatches = build.plan.num_microbatches if early else 1
        axes = {each.axis for each in build.plan.techniques if each.makes_whole_gradients and each.axis}
        self.is_sharded = any(build.mesh.size(axis) > 1 for axis in axes)
        self.lanes = CopyLanes(build.mesh.device)
        self.worker, self.adder = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        by_name = {piece.name: piece for piece in pieces}
        self.units: list[UnitStates] = []
        """In the order of forward."""
        for unit in units:
            own = [by_name[name] for name in unit.names]
            if own:
                settings: dict[str, Any] = {"num_microbatches": self.num_microbatches, "keeps_old": ahead}
                self.units.append(UnitStates(unit, own, make, config, build, **settings))
        self.on_disk = [states.unit.on_disk for states in self.units if states.unit.on_disk is not None]
        for layer in self.on_disk[:1]:
            layer.file.moved = self.lanes.moved
        self.later = frozenset(piece.name for states in self.units for piece in states.pieces)
        self.others = make(config, [piece for piece in pieces if piece.name not in self.later], build, shapes)
        rules = (self.others, *(states.rule for states in self.units))
        self.rounds_states = any(rule.rounds_states for rule in rules)  # type: ignore[misc]
        self.lr, self.count = 0.0, 0
        self.norms: dict[str, Tensor] = {}
        own_rule = weakref.ref(self)  # hooks of autograd are out of the garbage collector's sight
        for states in self.units:
            self._hook(own_rule, states)

    def _hook(self, rule: weakref.ref[HostStatesRule], states: UnitStates) -> None:
        def take(at: int, gradient: Tensor) -> None:
            here = rule()
            assert here is not None, "a gradient arrived after its optimizer was given up"
            with torch.no_grad():
                here.arrive(states, at, gradient)

        def made(at: int) -> Callable[[Tensor], None]:
            def call(parameter: Tensor) -> None:
                assert parameter.grad is not None
                take(at, local(parameter.grad))
                parameter.grad = None

            return call

        def wait(*_: Any) -> None:
            if (here := rule()) is not None:
                here.wait(states)

        states.unit.take = take
        if self.early and not states.unit.leaves_summed:
            for at, parameter in enumerate(states.unit.parameters):
                parameter.register_post_accumulate_grad_hook(made(at))
        # Sharded layers are gathered ahead of their turn.
        module = None if self.is_sharded else states.unit.module
        if states.unit.is_streamed:
            states.unit.wait = wait
        else:
            (module or self.build.model).register_forward_pre_hook(wait, prepend=True)

    def begin(self, lr: float, count: int) -> None:
        self.norms.clear()
        self.updated.clear()
        for states in self.units:
            if not states.unit.is_current.is_set() and states.future is None:
                self.worker.submit(self._restore, states, self.count).result()
            states.begin()
        self.lr, self.count = lr, count

    def _restore(self, states: UnitStates, count: int) -> None:
        """After a step that began and was not taken."""
        if states.event is not None:
            states.event.synchronize()  # gradients on their way into the working copy
        states.early = None
        if states.unit.on_disk is not None:
            states.unit.on_disk.settle()
        states.roll_back(count)
        states.narrow()
        states.unit.wait_for_others()
        states.unit.renew()

    def arrive(self, states: UnitStates, at: int, gradient: Tensor) -> None:
        """A gradient of a microbatch is there, whole: take it to the host."""
        piece, share = states.pieces[at], states.unit.share
        if (added := states.added[at]) is not None:
            added.result()  # what came before is out of the way
        states.event = event = self._send_out(states, at, gradient)
        for look in self.on_gradient if share else ():  # nobody has the whole afterwards
            look(piece.name, gradient)
        states.arrivals[at] += 1
        if states.shares:
            states.unit.is_current.clear()
        if self.num_microbatches > 1:
            states.added[at] = self.adder.submit(self._add, states, at, event, states.arrivals[at])
        elif piece.is_owned:
            self.norms[piece.name] = _norm(gradient)
        self.updated.add(piece.name)
        if self.ahead and sum(states.arrivals) == states.num_arrivals and not states.counts_apart:
            states.unit.is_current.clear()
            states.early = self.worker.submit(self._update_ahead, states, self.lr, self.count, list(states.arrivals))

    def _send_out(self, states: UnitStates, at: int, gradient: Tensor) -> torch.cuda.Event | None:
        share = states.unit.share
        own = gradient if share is None or not gradient.ndim else gradient[share.rows(gradient.shape[0])]
        return self.lanes.copy_out(states.landed[at], own)

    @torch.no_grad()
    def _add(self, states: UnitStates, at: int, event: torch.cuda.Event | None, arrivals: int) -> None:
        if event is not None:
            event.synchronize()
        total = states.sums[at]
        if arrivals == 1:
            total.copy_(states.landed[at])
        else:
            total.add_(states.landed[at])

    @torch.no_grad()
    def _update_ahead(self, states: UnitStates, lr: float, count: int, used: list[int]) -> None:
        for added in states.added:
            if added is not None:
                added.result()
        states.update(lr, count, 1.0, used, is_ahead=True)

    def squared_norm(self) -> Tensor:
        device = self.build.mesh.device
        if self.num_microbatches > 1:
            for states in self.units:
                for piece, added, total in zip(states.pieces, states.added, states.sums, strict=True):
                    if added is not None and piece.name in self.updated and piece.is_owned:
                        added.result()
                        self.norms[piece.name] = _norm(total)
        if not self.norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = [self.norms[piece.name] for piece in self.pieces if piece.name in self.norms]
        return torch.stack(norms).double().square().sum().to(device)

    def leave_out(self, names: Collection[str]) -> None:
        for states in self.units:
            for at, piece in enumerate(states.pieces):
                if piece.name in names:
                    states.arrivals[at] = 0
                    self.norms.pop(piece.name, None)

    @torch.no_grad()
    def step(self, lr: float, count: int) -> None:
        self.others.step(lr, count)
        for states in self.units:
            if not self.early:
                for at, piece in enumerate(states.pieces):
                    if piece.value.grad is not None:
                        states.event = self._send_out(states, at, piece.value.grad)
                        states.arrivals[at] += 1
            for look in self.on_gradient if self.early and not states.unit.share else ():
                if states.event is not None:
                    states.event.synchronize()
                for piece, gradient, arrivals in zip(states.pieces, states.sums, states.arrivals, strict=True):
                    if arrivals:
                        look(piece.name, gradient)
            states.unit.is_current.clear()
            factor = self.factor if self.early else 1.0  # others have been scaled on the device
            states.future = self.worker.submit(self._finish, states, lr, count, factor, states.arrivals)

    @torch.no_grad()
    def _finish(
        self, states: UnitStates, lr: float, count: int, factor: float, used: list[int]
    ) -> torch.cuda.Event | None:
        if states.early is not None:
            early, states.early = states.early, None
            early.result()  # raises what it has raised
        if not states.is_ahead or factor != 1.0 or not all(used):
            states.roll_back(count)
            with self._in_memory(states):
                states.update(lr, count, factor, used)
        return states.send(self.lanes)

    def _in_memory(self, states: UnitStates) -> AbstractContextManager[None]:
        """What is on disk of a unit, while it is updated; what is needed next is read meanwhile."""
        layers, layer = self.on_disk, states.unit.on_disk
        if layer is None:
            return nullcontext()
        at = layers.index(layer)
        for each in (layers[at:] + layers[:at])[: layer.file.num_buffers]:
            each.prefetch()
        return layer.in_memory()

    def wait(self, states: UnitStates) -> None:
        """Before somebody uses a unit's weights on the device."""
        if states.future is not None:
            event, states.future = states.future.result(), None
            if event is not None:
                torch.cuda.current_stream(self.lanes.device).wait_event(event)
        elif not states.unit.is_current.is_set():  # a step began and was not taken
            self.worker.submit(self._restore, states, self.count).result()

    def finish(self) -> None:
        for states in self.units:
            self.wait(states)
        for layer in self.on_disk:
            layer.settle()

    def reload(self) -> None:
        self.finish()
        for states in self.units:
            self._written(states)
            states.narrow()
            states.future = self.worker.submit(states.send, self.lanes, commits=False)

    def kept(self) -> Iterator[OptimizerState]:
        self.finish()
        yield from self.others.kept()
        for states in self.units:
            if states.unit.on_disk is not None:
                states.unit.on_disk.verify()
            yield from states.kept()

    def restore(self, state: OptimizerState) -> None:
        owners = [states for states in self.units if state.name in states.unit.names]
        (owners[0].rule if owners else self.others).restore(state)
        for states in owners:
            self._written(states)

    def _written(self, states: UnitStates) -> None:
        """Masters or states were changed by somebody else."""
        if states.unit.on_disk is not None:
            self.worker.submit(states.unit.on_disk.written_by_others).result()

    def storage(self) -> Iterator[Tensor]:
        yield from self.others.storage()
        for states in self.units:
            yield from states.rule.storage()

    def set_num_steps(self, count: int) -> None:
        for rule in (self.others, *(states.rule for states in self.units)):
            rule.set_num_steps(count)


def _norm(gradient: Tensor) -> Tensor:
    """In float32 at least."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide)
