"""A published row's machines: the preset its hardware is called after, in nodes, with the links it tells of."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.published_rows import Row, Unscored
from meshwright.core.cluster import MOST_OF_PEAK, Cluster, Device, Link
from meshwright.machine.named_clusters import preset

MORE_MEMORY = 1.1
"""Times the usual memory of a card that a row must tell for it to be another one: GB are told for GiB, and rounded."""
RATE_BY_POWER = 0.5
"""Exponent of a power limit by which arithmetic slows: between a cube root (voltage falls with the clock) and
proportional (it no longer does)."""
NODE, RACK = 8, 72
"""GPUs that NVLink joins where a row does not say; of GB200 and GB300, a rack."""

# First match wins: a name that contains another's stands before it. PCIe and NVL are other machines.
_DEVICES = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"\bB300\b", "b300"),
    (r"\bB200\b", "b200"),
    (r"GH200", "gh200"),
    (r"\bH200\b", "h200"),
    (r"\bH20\b", "h20"),
    (r"H800", "h800"),
    (r"H100.*NVL\b", "h100-nvl"),
    (r"H100.*PCIe|PCIe.*H100", "h100-pcie"),
    (r"H100", "h100"),
    (r"A800", "a800"),
    (r"A100.*PCIe|PCIe.*A100", "a100-pcie-80"),
    (r"A100", "a100-80"),
    (r"V100|DGX-[12]\b", "v100"),
    (r"\bA10G\b", "a10g"),
    (r"\bA10\b", "a10"),
    (r"\bA40\b", "a40"),
    (r"\bA6000\b", "a6000"),
    (r"6000 ?-?Ada|Ada ?-?6000", "rtx6000-ada"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"5090", "rtx5090"),
    (r"4090", "rtx4090"),
    (r"3090(?! ?Ti)", "rtx3090"),
    (r"RTX ?8000", "rtx8000"),
    (r"TITAN ?RTX", "titan-rtx"),
    (r"MI355X", "mi355x"),
    (r"MI325X", "mi325x"),
    (r"MI300X", "mi300x"),
    (r"MI250X", "mi250x"),
)
_SMALLER = {"a100-80": (40, "a100-40"), "a100-pcie-80": (40, "a100-pcie-40"), "v100": (16, "v100-16")}
"""Cards that were also made with less memory: GB, preset."""
_WITH_EFA = ("h100", "h200")
EFA = Link(
    bytes_per_second=45e9,
    latency_seconds=65e-6,
    name="EFA",
    step_seconds=21e-6,
    sum_step_seconds=21e-6,
    fractions={"all_gather": 0.57, "reduce_scatter": 0.57},
    by_nodes=((1, 1.0), (2, 1.05), (4, 0.68), (8, 0.46), (16, 0.46), (32, 0.35), (64, 0.16)),
)
"""H100 nodes at AWS as Hugging Face measured them (Ultra-Scale Playbook): fitted to its collectives of 256 MB on 2 to
64 nodes and, up to 32, to its calibration rows without stages whose tensor parallelism stays in a node. Each rank of a
ring costs a step whatever the kind; gathers and scatters have 0.57 of the rate of sums. Of 64 nodes the collectives
alone count: all its runs there but one have an MFU below 5 %."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hashable, unlike a cluster: forecasts are remembered by it."""

    device: str
    devices_per_node: int
    num_nodes: int
    outer_bytes_per_second: float | None = None
    """As the row tells; None: as the preset has it."""
    is_efa: bool = False
    watts: float | None = None
    memory_bytes_per_second: float | None = None
    memory_bytes: int | None = None
    """Of a card that is not the usual one of its name."""


def machine(row: Row) -> Machine:
    gpus, device = row.gpus, _device(row)
    joined = _joined(row, device)
    per_node = next(count for count in range(min(gpus, joined), 0, -1) if gpus % count == 0)
    outer = _outer_bytes_per_second(row.text("interconnect"), row.whole("gpus_per_node", joined))
    watts = re.search(r"(\d{3,4}) ?W\b", row.text("hardware"))
    memory = re.search(r"(\d+(?:\.\d+)?) ?TB/s", row.text("hardware"))
    told = (row.number("gpu_mem_gb") or 0.0) * 1e9
    usual = preset(device).device.memory_bytes
    return Machine(
        device=device,
        devices_per_node=per_node,
        num_nodes=gpus // per_node,
        outer_bytes_per_second=outer,
        is_efa=device in _WITH_EFA and re.search(r"\bEFA\b", row.text("interconnect")) is not None,
        watts=float(watts[1]) if watts else None,
        memory_bytes_per_second=float(memory[1]) * 1e12 if memory else None,
        memory_bytes=int(told) if told > MORE_MEMORY * usual else None,
    )


def _joined(row: Row, device: str) -> int:
    """GPUs of a node, or of as many nodes as NVLink joins."""
    usual = RACK if device in ("gb200", "gb300") else NODE
    domain = re.search(r"NVLink domain (?:of )?(\d+)|NVL ?(\d+)", row.text("interconnect"), re.IGNORECASE)
    if domain:
        return int(domain[1] or domain[2])
    told = row.whole("gpus_per_node", usual)
    return usual if usual == RACK and told <= NODE else told  # trays of a rack are joined too


def _device(row: Row) -> str:
    hardware, memory_gb = row.text("hardware"), row.number("gpu_mem_gb")
    name = next((name for pattern, name in _DEVICES if re.search(pattern, hardware, re.IGNORECASE)), None)
    if name is None:
        uncounted = re.sub(r"\b\d+ ?x ?", "", hardware)
        raise Unscored(f"no preset for {uncounted or 'hardware that is not named'}")
    if name in _SMALLER:
        size, smaller = _SMALLER[name]
        is_named = re.search(rf"(?<!or )\b{size} ?G?B?\b", hardware) is not None and "or 80" not in hardware
        return smaller if memory_gb == size or (memory_gb is None and is_named) else name
    return name


def _outer_bytes_per_second(interconnect: str, devices_per_node: int) -> float | None:
    """A device's share of its node's cards: `1600 Gbps/node`, `4x100Gb RoCE per node`, `4x OmniPath 100Gb/s per node`,
    `3.2 Tbps EFA per node`."""
    amount = r"(\d+(?:\.\d+)?) ?([GT])b(?:ps|/s|it/s)?"
    if whole := re.search(rf"{amount}[ \w]*(?:/| per )(node|GPU)", interconnect, re.IGNORECASE):
        cards = re.search(r"(\d+) ?x ?(?:[A-Za-z][\w-]* )*$", interconnect[: whole.start()])
        bits = float(whole[1]) * (1e12 if whole[2].lower() == "t" else 1e9) * (int(cards[1]) if cards else 1)
        return bits / 8 / (devices_per_node if whole[3].lower() == "node" else 1)
    if each := re.search(r"(\d+) ?x ?(\d+) ?Gb", interconnect):
        return int(each[1]) * int(each[2]) * 1e9 / 8 / devices_per_node
    return None


def capped(device: Device, watts: float) -> Device:
    """The same card under another power limit; as it is where its own is not known. Matmuls and attention follow the
    clock, memory does not."""
    if not device.power_watts:
        return device
    slower = (watts / device.power_watts) ** RATE_BY_POWER
    names = ("matmul_fraction", "attention_fraction", "attention_backward_fraction")
    fractions = {name: min(getattr(device, name) * slower, MOST_OF_PEAK) for name in names}
    return replace(device, power_watts=watts, **fractions)


@cache
def cluster(machine: Machine) -> Cluster:
    name = f"{machine.num_nodes}x{machine.devices_per_node}x{machine.device}"
    found = preset(machine.device).resized(machine.devices_per_node, machine.num_nodes, name=name)
    rates = found.device.flops_per_second
    if "bf16" not in rates and "fp16" in rates:
        # Either 16-bit type is the same work; the plans are written in one of them.
        found = replace(found, device=replace(found.device, flops_per_second={**rates, "bf16": rates["fp16"]}))
    device = capped(found.device, machine.watts) if machine.watts else found.device
    own = {name: value for name in ("memory_bytes_per_second", "memory_bytes") if (value := getattr(machine, name))}
    found = replace(found, device=replace(device, **own))
    if machine.is_efa:
        return replace(found, outer=EFA)
    if machine.outer_bytes_per_second is None:
        return found
    return replace(found, outer=replace(found.outer, bytes_per_second=machine.outer_bytes_per_second))
