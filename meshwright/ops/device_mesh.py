"""The ranks of a plan as a grid: one process group per axis, passed around, never global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.ops.staged_collectives import is_shared, stage


@dataclass(frozen=True, kw_only=True)
class Mesh:
    sizes: Mapping[str, int]
    device: torch.device
    grid: DeviceMesh | None = None
    """None on one device without axes: nothing is distributed then."""
    control: dist.ProcessGroup | None = None
    """All ranks, on the CPU: what the loop itself agrees on, apart from every axis's traffic."""
    extra: dict[str, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)
    """Groups beyond one per axis, by what their traffic is counted under: an axis, or neighbours of it (`fsdp/8`)."""

    @classmethod
    def make(cls, sizes: Mapping[str, int], device: torch.device) -> Mesh:
        if not sizes:
            return cls(sizes=sizes, device=device)
        names = tuple(sizes)
        grid = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=names)
        return cls(sizes=sizes, device=device, grid=grid, control=dist.new_group(backend="gloo"))

    @property
    def num_ranks(self) -> int:
        return 1 if self.grid is None else self.grid.size()

    @property
    def rank(self) -> int:
        return 0 if self.grid is None else dist.get_rank()

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return 0 if self.grid is None or axis not in self.sizes else self.grid.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        assert self.grid is not None
        return self.grid.get_group(axis)

    def submesh(self, *axes: str) -> DeviceMesh:
        """The grid of some axes in this order, which need not be the order of the mesh."""
        assert self.grid is not None
        places = [list(self.sizes).index(axis) for axis in axes]
        if places == sorted(places):  # torch slices in the order of the mesh only
            return self.grid[axes]
        here = tuple(
            slice(None) if place in places else index for place, index in enumerate(self.grid.get_coordinate() or ())
        )
        kept = self.grid.mesh[here].permute([sorted(places).index(place) for place in places])
        groups = [self.group(axis) for axis in axes]
        return DeviceMesh.from_group(groups, self.device.type, kept, mesh_dim_names=axes)

    def neighbour(self, axis: str, index: int) -> int:
        """Global rank of the one at `index` along `axis`, equal to this rank elsewhere."""
        return dist.get_global_rank(self.group(axis), index)

    def part(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(which, how many) of the shares that several axes cut together."""
        which, many = 0, 1
        for axis in axes:
            which, many = which * self.size(axis) + self.index(axis), many * self.size(axis)
        return which, many

    def new_group(self, axis: str, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        """One group per list; every rank calls this with the same lists. Mine, or None."""
        mine = None
        for members in ranks:
            group = dist.new_group(members)
            if self.rank in members:
                mine = group
        if mine is not None:
            self.extra[axis] = (*self.extra.get(axis, ()), mine)
        return mine

    def control_group(self, ranks: list[list[int]]) -> dist.ProcessGroup:
        """The same on the CPU, apart from every axis's traffic; each rank is in one list."""
        groups = [dist.new_group(members, backend="gloo") for members in ranks]
        return next(group for group, members in zip(groups, ranks, strict=True) if self.rank in members)

    def along(self, axis: str) -> list[list[int]]:
        """The global ranks of every group of an axis."""
        assert self.grid is not None
        table = self.grid.mesh.movedim(list(self.sizes).index(axis), -1)
        return table.reshape(-1, self.size(axis)).tolist()

    def axis_of_group(self) -> dict[str, str]:
        """Process group name -> axis, for whoever watches the traffic."""
        if self.grid is None:
            return {}
        named = {self.group(axis).group_name: axis for axis in self.sizes}
        for axis, groups in self.extra.items():
            named |= {group.group_name: axis for group in groups}
        # One rank alone sends nothing.
        return {name: axis for name, axis in named.items() if self.sizes[axis.partition("/")[0]] > 1}


def join(
    rank: int,
    num_ranks: int,
    device: torch.device,
    *,
    rendezvous: str = "",
    store: dist.Store | None = None,
    timeout_seconds: float = 600.0,
) -> None:
    """Enter the process group: by a file for ranks of one machine, by a store, or by torchrun's environment."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if is_shared(device):
        stage()
        backend = "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if rendezvous:
        store = dist.FileStore(rendezvous, num_ranks)
    if store is not None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
