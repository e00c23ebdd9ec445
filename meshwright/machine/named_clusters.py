"""A cluster by name (`64x8xh100`) or from a file. Stdlib only: `mw plan` on a named cluster must start fast.

Presets hold one device each, from its data sheet; the counts in the name put them in nodes.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

from meshwright.core.cluster import Cluster, Errors, parse_cluster_name
from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError, Problem, nearest

PRESETS_FOLDER = Path(__file__).parent / "presets"
ALIASES = {"a100": "a100-80", "a100-pcie": "a100-pcie-80", "v100-32": "v100", "rtx-a6000": "a6000"}

# What torch.cuda.get_device_name() says, for cards whose links we know. Word boundaries matter: GH200 is no
# H200, GB200 no B200, and the PCIe and NVL versions of A100 and H100 are other machines.
_DEVICE_NAMES = (
    (r"\bV100-SXM\d-16GB\b", "v100-16"),
    (r"\bV100-SXM\d-32GB\b", "v100"),
    (r"\bA100-SXM\d-40GB\b", "a100-40"),
    (r"\bA100-SXM\d-80GB\b", "a100-80"),
    (r"\bH100 80GB HBM3\b", "h100"),
    (r"\bH100 PCIe\b", "h100-pcie"),
    (r"\bH200$", "h200"),
    (r"\bB200$", "b200"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4$", "l4"),
    (r"\bT4$", "t4"),
    (r"\bA10G$", "a10g"),
    (r"\bA10$", "a10"),
    (r"\bA40$", "a40"),
    (r"\bRTX A6000$", "a6000"),
    (r"\bRTX 6000 Ada\b", "rtx6000-ada"),
    (r"\bRTX 3090$", "rtx3090"),
    (r"\bRTX 4090$", "rtx4090"),
    (r"\bRTX 5090$", "rtx5090"),
    (r"\bA800-SXM\d-80GB\b", "a800"),
    (r"\bH800$", "h800"),
    (r"\bH20$", "h20"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bMI325X\b", "mi325x"),
)


def preset_names() -> tuple[str, ...]:
    """The devices `cluster` knows, sorted, aliases included."""
    return tuple(sorted({path.stem for path in PRESETS_FOLDER.glob("*.json")} | set(ALIASES)))


def preset(name: str) -> Cluster:
    """One device as its data sheet has it."""
    return load_artefact(Cluster, PRESETS_FOLDER / f"{ALIASES.get(name, name)}.json")


def preset_of_device(torch_name: str) -> Cluster | None:
    """The preset of the card that torch calls `torch_name`, or None."""
    for pattern, name in _DEVICE_NAMES:
        if re.search(pattern, torch_name.strip(), re.IGNORECASE):
            return preset(name)
    return None


def cluster(name_or_path: str) -> Cluster:
    """`h200`, `8xh100` (one node), `64x8xh100` (64 nodes of 8), groups joined by `+`, or a JSON file by `mw probe`."""
    text = name_or_path.strip()
    if text.lower().endswith(".json"):
        return load_artefact(Cluster, text)
    problems: list[Problem] = []
    groups = [_named(part.strip(), name_or_path, problems) for part in text.lower().split("+")]
    # A known name wins over a file that happens to be called `h100`.
    if problems and Path(text).is_file():
        return load_artefact(Cluster, text)
    if problems:
        raise MeshwrightError(problems)
    return _joined([group for group in groups if group is not None], text.lower())


def _named(text: str, whole: str, problems: list[Problem]) -> Cluster | None:
    """One group by name, or None and what is wrong with it."""
    parsed, known = parse_cluster_name(text), preset_names()
    if parsed is None:
        fix = f"Write 8xh100, 64x8xh100, 8xh100+8xa100 or a .json file. {nearest(text, known)}"
        problems.append(Problem(where="cluster", what=f'"{text or whole}" is no cluster name.', fix=fix))
        return None
    num_nodes, devices_per_node, device = parsed
    if device not in known:
        problems.append(Problem(where="cluster", what=f'no device is called "{device}".', fix=nearest(device, known)))
        return None
    if num_nodes < 1 or devices_per_node < 1:
        what = f'"{text}" has {num_nodes} x {devices_per_node} devices; both counts must be at least 1.'
        problems.append(Problem(where="cluster", what=what))
        return None
    try:
        return preset(device).resized(devices_per_node, num_nodes, name=text)
    except MeshwrightError as error:
        problems.extend(error.problems)
        return None


def _joined(clusters: list[Cluster], name: str) -> Cluster:
    """One cluster of several groups. What a cluster says once (errors, jitter) is the widest of them."""
    first, *rest = clusters
    if not rest:
        return first
    bounds = {f.name: max(getattr(each.errors, f.name) for each in clusters) for f in fields(Errors)}
    sources = {f"{each.name} {key}": text for each in clusters for key, text in each.sources.items()}
    return replace(
        first,
        name=name,
        errors=Errors(**bounds),
        jitter_fraction=max(each.jitter_fraction for each in clusters),
        others=tuple(each.groups[0] for each in rest),
        sources=sources,
    )
