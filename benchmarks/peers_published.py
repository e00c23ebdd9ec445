"""Our forecasts of published rows beside those of Calculon and llm-analysis, on the rows that all three can express.

Both are run from checkouts of their repositories (calculon-ai/calculon, cli99/llm-analysis), which are given by path;
without one it is left out. Each gets the settings that do best on the calibration rows of a source (or of all, where a
source has none): of Calculon the system file, a share of its matmuls' rates and what is overlapped, of llm-analysis the
efficiencies.
Common rows are decoders without experts in 16 bits on A100s and H100s, split by tensor, pipeline (1F1B, interleaved),
and data, with at most a sharded optimizer: Calculon has no more. It gets gated MLPs as plain ones of equal flops.

Run: python -m benchmarks.peers_published --calculon PATH --llm-analysis PATH CALIBRATE.csv [...] [--check VALIDATE.csv]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_plans import remembering, simulated
from benchmarks.published_rows import Row, Unscored, read_rows
from benchmarks.published_scores import ScoredPlan, score
from meshwright.core.errors import MeshwrightError, Problem, raise_problems
from meshwright.models.dimensions import DecoderConfig

RESULT = Path(__file__).parent / "results" / "peers_published.json"
LEAST_ROWS = 20
OURS, CALCULON, LLM_ANALYSIS = "ours", "Calculon", "llm-analysis"
Setting = tuple[Any, ...]
Peer = Callable[[Row, DecoderConfig, Setting], float]
_SYSTEMS = {"a100": ("a100_80g", "a100_80e"), "h100": ("h100_80g_nvl8",)}
_GPUS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
SHARES = (1.0, 0.85, 0.7, 0.6)
"""Of the rates of matmuls in Calculon's system files (up to 95 % of the peak) that are tried."""
_FIT_ALL_GIB = 2000
"""Memory is not what is compared."""


def is_common(each: ScoredPlan) -> bool:
    case, row = each.case, each.row
    if each.time_error is None or case is None or not isinstance(case.config, DecoderConfig) or not case.is_told:
        return False
    if case.config.num_experts or case.variant.latent or not case.variant.is_causal or case.numerics.matmul:
        return False
    names = {technique.name for technique in case.plans[0].techniques}
    stages = [getattr(technique, "stage", 0) for technique in case.plans[0].techniques]
    schedules = [getattr(technique, "schedule", "1f1b") for technique in case.plans[0].techniques]
    return (
        case.numerics.is_16_bit
        and device_of(each) in _GPUS
        and names <= {"precision", "compile", "tensor", "pipeline", "replicate", "shard", "recompute"}
        and all(stage in (0, 1) for stage in stages if isinstance(stage, int))
        and all(schedule in ("1f1b", "interleaved") for schedule in schedules)
        and row.text("recompute").lower().startswith(("full", "none", "selective", "disabled", "0"))
    )


def device_of(each: ScoredPlan) -> str:
    assert each.case
    return {"a100-80": "a100", "h100": "h100"}.get(each.case.machine.device, "")


def sizes(row: Row) -> dict[str, int]:
    return {name: row.whole(name, 1) for name in ("tp", "pp", "vpp", "micro_batch")} | {"dp": row.replicas}


def calculon(path: Path) -> Peer:
    """Its `Llm` on a row; a setting is (place of the system file, share of its matmuls' rates, tensor overlap, data
    overlap)."""
    sys.modules.setdefault("psutil", types.SimpleNamespace(cpu_count=lambda logical=False: 1))  # type: ignore[arg-type]
    sys.path.insert(0, str(path))
    from calculon.llm.llm import Llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    systems: dict[tuple[str, float], Any] = {}
    for name, share in itertools.product(itertools.chain(*_SYSTEMS.values()), SHARES):
        facts = json.loads((path / "systems" / f"{name}.json").read_text(encoding="utf-8"))
        facts["mem1"]["GiB"] = _FIT_ALL_GIB
        matmul = facts["matrix"]["float16"]
        matmul["gflops_efficiency"] = [[size, each * share] for size, each in matmul["gflops_efficiency"]]
        systems[name, share] = System(facts)

    def seconds(row: Row, config: DecoderConfig, setting: Setting) -> float:
        place, share, tensor_overlap, data_overlap = setting
        known = _SYSTEMS["h100" if "H100" in row.text("hardware") else "a100"]
        n, text = sizes(row), row.text("recompute").lower()
        per_node, gated = 8, config.mlp == "swiglu"
        app = Llm.Application(
            {
                "name": "row",
                "hidden": config.hidden_size,
                "feedforward": config.ffn_size * 3 // 2 if gated else config.ffn_size,
                "seq_size": row.whole("seq_len"),
                "attn_heads": config.num_heads,
                "attn_size": config.hidden_size // config.num_heads,
                "num_blocks": config.num_layers,
            }
        )
        execution = Llm.Execution.from_json(
            {
                "num_procs": row.gpus,
                "tensor_par": n["tp"],
                "pipeline_par": n["pp"],
                "data_par": n["dp"],
                "tensor_par_net": int(n["tp"] > per_node),
                "pipeline_par_net": int(n["tp"] * n["pp"] > per_node),
                "data_par_net": int(row.gpus > per_node),
                "batch_size": row.batch,
                "microbatch_size": n["micro_batch"],
                "datatype": "float16",
                "fused_activation": True,
                "attention_type": "multihead",
                "activation_recompute": "full" if text.startswith("full") else "attn_only" if "sel" in text else "none",
                "pipeline_interleaving": n["vpp"] if n["pp"] > 1 else 1,
                "optimizer_sharding": n["dp"] > 1 and row.text("zero_stage").startswith("1"),
                "tensor_par_comm_type": "rs_ag" if n["tp"] > 1 and row.text("sp") not in ("", "0") else "ar",
                "tensor_par_overlap": tensor_overlap if n["tp"] > 1 else "none",
                "seq_par_ag_redo": False,
                "data_par_overlap": data_overlap and n["dp"] > 1,
                "weight_offload": False,
                "activations_offload": False,
                "optimizer_offload": False,
                "training": True,
            }
        )
        model = Llm(app, logging.getLogger("calculon"))
        system = systems[known[min(place, len(known) - 1)], share]
        model.compile(system, execution)
        model.run(system)
        return float(model.get_total_time())

    return seconds


def llm_analysis(path: Path) -> Peer:
    """Its `LLMAnalysis.training`; a setting is (efficiency of compute, of links between nodes)."""
    sys.modules.setdefault("fire", types.ModuleType("fire"))
    sys.path.insert(0, str(path))
    from llm_analysis import analysis, config  # type: ignore[import-not-found]

    logging.disable(logging.WARNING)
    # It checks its flops against 6 N, which models with few layers and a large vocabulary do not have.
    analysis.within_range = lambda *_: True

    def seconds(row: Row, model: DecoderConfig, setting: Setting) -> float:
        compute, outer = setting
        n, text = sizes(row), row.text("recompute").lower()
        stage = row.text("zero_stage")
        name = _GPUS["h100" if "H100" in row.text("hardware") else "a100"]
        facts = json.loads((path / "llm_analysis" / "gpu_configs" / f"{name}.json").read_text(encoding="utf-8"))
        one = analysis.LLMAnalysis(
            config.ModelConfig(
                name="row",
                num_layers=model.num_layers,
                n_head=model.num_heads,
                hidden_dim=model.hidden_size,
                vocab_size=model.vocab_size,
                max_seq_len=row.whole("seq_len"),
                num_key_value_heads=model.num_kv_heads,
                ffn_embed_dim=model.ffn_size,
                mlp_gated_linear_units=model.mlp == "swiglu",
            ),
            config.GPUConfig(**{**facts, "mem_per_GPU_in_GB": _FIT_ALL_GIB}),
            config.DtypeConfig(),
            config.ParallelismConfig(
                tp_size=n["tp"], pp_size=n["pp"], dp_size=n["dp"], sp_size=n["tp"] if row.text("sp") == "1" else 1
            ),
            flops_efficiency=compute,
            hbm_memory_efficiency=0.9,
            inter_node_memory_efficiency=outer,
        )
        kinds = analysis.ActivationRecomputation
        found = one.training(
            batch_size_per_gpu=n["micro_batch"],
            global_batch_size=row.batch,
            seq_len=row.whole("seq_len"),
            activation_recomputation=kinds.FULL
            if text.startswith("full")
            else kinds.ATTN_COMPUTE
            if "sel" in text
            else kinds.NONE,
            ds_zero=analysis.DSZeRO(int(stage[0]) if stage[:1].isdigit() else 0),
            flash_attn="flash" in row.text("attention_kernel").lower(),
        )
        return float(found["latency_per_iter"])

    return seconds


SETTINGS: dict[str, list[Setting]] = {
    CALCULON: list(itertools.product((0, 1), SHARES, ("none", "ring"), (False, True))),
    LLM_ANALYSIS: list(itertools.product((0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7), (1.0, 0.5, 0.25))),
}


def errors_of(peer: Peer, name: str, rows: Sequence[ScoredPlan]) -> np.ndarray:
    """|forecast / measured - 1| by row and setting; NaN where the peer refuses."""
    result = np.full((len(rows), len(SETTINGS[name])), np.nan)
    for at, each in enumerate(rows):
        assert each.case
        assert isinstance(each.case.config, DecoderConfig)
        assert each.real_seconds
        for place, setting in enumerate(SETTINGS[name]):
            try:
                result[at, place] = abs(peer(each.row, each.case.config, setting) / each.real_seconds - 1)
            except (AssertionError, ZeroDivisionError, ValueError, KeyError, Unscored):
                continue  # its own checks
            except Exception as error:
                if type(error).__name__ != "Error":  # Calculon's own
                    raise
    return result


def compared(tables: Mapping[str, Sequence[ScoredPlan]], peers: Mapping[str, Peer], check: str) -> dict[str, Any]:
    rows = [(table, each) for table, some in tables.items() for each in some if is_common(each)]
    plans = [each for _, each in rows]
    errors = {name: errors_of(peer, name, plans) for name, peer in peers.items()}
    known = np.array([all(np.isfinite(errors[name][at, 0]) for name in peers) for at in range(len(rows))])
    mine = np.array([each.time_error for each in plans])
    fits = np.array([table != check for table, _ in rows]) & known
    found: dict[str, Any] = {}
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, (table, each) in enumerate(rows):
        if known[at]:
            places["validate" if table == check else "calibrate", each.source].append(at)
    for (table, source), at in sorted(places.items()):
        if len(at) < LEAST_ROWS:
            continue
        one: dict[str, Any] = {"rows": len(at), OURS: round(float(np.median(mine[at])), 4)}
        fitting = [i for i in range(len(rows)) if fits[i] and plans[i].source == source] or list(np.flatnonzero(fits))
        for name in peers:
            best = int(np.nanargmin(np.nanmedian(errors[name][fitting], axis=0)))
            # Where it refuses that setting for a row, its plain one counts.
            mine_of = np.where(np.isfinite(errors[name][:, best]), errors[name][:, best], errors[name][:, 0])
            one[name] = round(float(np.median(mine_of[at])), 4)
            one[f"{name} setting"] = list(SETTINGS[name][best])
        found.setdefault(table, {})[source] = one
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_published")
    parser.add_argument("files", nargs="+", type=Path, metavar="CALIBRATE.csv")
    parser.add_argument("--check", type=Path, metavar="VALIDATE.csv", help="rows that are shown, never fitted to")
    parser.add_argument("--calculon", type=Path, help="a checkout of calculon-ai/calculon")
    parser.add_argument("--llm-analysis", type=Path, help="a checkout of cli99/llm-analysis")
    asked = parser.parse_args(arguments)
    makers = {
        CALCULON: (asked.calculon, "calculon/llm/llm.py", calculon),
        LLM_ANALYSIS: (asked.llm_analysis, "llm_analysis/analysis.py", llm_analysis),
    }
    try:
        raise_problems(
            Problem(where=f"--{name.lower()}", what=f"{path} has no {inside}.", fix=f"Give a checkout of {name}.")
            for name, (path, inside, _) in makers.items()
            if path is not None and not (path / inside).is_file()
        )
        peers = {name: maker(path.resolve()) for name, (path, _, maker) in makers.items() if path is not None}
        for name in makers.keys() - peers.keys():
            print(f"{name} is left out: no checkout was given (--{name.lower()} PATH)", file=sys.stderr)
        files = [*asked.files, *([asked.check] if asked.check else [])]
        tables = {path.name: score(read_rows(path)[0], remembering(simulated)) for path in files}
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = compared(tables, peers, asked.check.name if asked.check else "")
    for table, sources in found.items():
        for source, one in sources.items():
            shown = ", ".join(f"{name} {one[name]:.1%}" for name in (OURS, *peers))
            print(f"{table} {source}: {one['rows']} rows, median error {shown}")
    if len(peers) == len(makers):
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
