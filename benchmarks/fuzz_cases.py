"""A seed -> a case for the oracle: a model with odd sizes, a plan, an optimizer. No torch.

Sizes are drawn to divide nothing; about three plans in four are then made possible (heads a multiple of the tensor
axis, enough layers for the stages), and the rest are left for `check` to refuse.
"""

from __future__ import annotations

import json
import random
from typing import Any

from meshwright.core.technique import technique_named

Case = dict[str, Any]
SCHEDULES = (
    "1f1b", "gpipe", "interleaved", "looped_bfs", "zero_bubble_h1", "zero_bubble_h2", "zbv", "dualpipe_v", "greedy",
    "async",
)  # fmt: skip
CHUNKED = ("interleaved", "looped_bfs", "zbv", "dualpipe_v")
AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert", "rows")
RATES = {"lion": 1e-3, "lars": 10.0, "sgd": 5e-2}
FOREIGN = ("llama", "qwen3", "gpt2", "bert", "mixer", "encoder", "perceptron", "convolutions")


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    kind = rng.choices(("decoder", "experts", "vit", "vgg", "resnet", "dlrm", "foreign"), (46, 16, 6, 4, 4, 6, 18))[0]
    ranks = rng.choices(range(1, 9), (3, 26, 10, 24, 3, 13, 2, 19))[0]
    sizes = _mesh(rng, kind, ranks)
    settings = {name: _axis_settings(rng, name, size) for name, size in sizes.items()}
    obliging = rng.random() < 0.8
    sequence, model = _model(rng, kind, settings, obliging)
    settings |= _other_settings(rng, kind, model, sequence, settings, obliging)
    dtype = "float32" if "precision" in settings or settings.get("shard", {}).get("reduce") == "bf16" else "float64"
    plan = _plan(rng, kind, model, settings)
    return {
        "seed": seed,
        "model": model,
        "plan": plan,
        "optimizer": _optimizer(rng, model, settings, dtype),
        "sequence": sequence,
        "steps": 4,
        "mask": rng.choices(("none", "some", "parts", "samples", "all"), (4, 8, 4, 4, 1))[0],
        "documents": kind in ("decoder", "experts") and rng.random() < 0.15,
        "dtype": dtype,
    }


def _mesh(rng: random.Random, kind: str, ranks: int) -> dict[str, int]:
    """Axes whose sizes multiply to `ranks`."""
    weights = {"replicate": 3, "shard": 4, "tensor": 4, "pipeline": 4}
    if kind in ("decoder", "experts"):
        weights["context"] = 3
    if kind == "experts":
        weights["expert"] = 5
    if kind == "dlrm":
        weights = {"replicate": 3, "shard": 3, "rows": 6}
    if kind in ("resnet", "convolutions"):
        weights |= {"tensor": 1}
    if rng.random() < 0.05:
        weights = dict.fromkeys(AXES, 1)
    sizes: dict[str, int] = {}
    for factor in _factors(ranks):
        name = rng.choices(list(weights), list(weights.values()))[0]
        sizes[name] = sizes.get(name, 1) * factor
    if rng.random() < 0.04:  # an axis of one rank must change nothing
        sizes.setdefault(rng.choice(("replicate", "shard", "pipeline", "tensor")), 1)
    return sizes


def _factors(number: int) -> list[int]:
    found = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def _axis_settings(rng: random.Random, name: str, size: int) -> dict[str, Any]:
    told: dict[str, Any] = {"size": size}
    if name == "shard":
        told |= {"stage": rng.choice((1, 2, 3, 3)), "prefetch": rng.choice((0, 1, 1, 2))}
        if rng.random() < 0.05:
            told["reduce"] = "bf16"
    elif name == "tensor":
        told["sequence"] = rng.random() < 0.45
        if told["sequence"] and rng.random() < 0.3:
            told["overlap"] = rng.choice((2, 3))
    elif name == "context":
        told["kind"] = rng.choice(("ring", "ulysses"))
    elif name == "rows":
        told["by"] = rng.choice(("rows", "tables"))
    elif name == "pipeline":
        told["schedule"] = rng.choice(SCHEDULES)
        if told["schedule"] in ("interleaved", "looped_bfs") and rng.random() < 0.3:
            told["chunks"] = 3
        if told["schedule"] == "greedy" and rng.random() < 0.5:
            told["times"] = [1.0, rng.choice((0.7, 1.0, 1.4)), rng.choice((0.5, 1.0))]
            told["most_held"] = rng.choice((0, 2, 3))
    return told


def _model(rng: random.Random, kind: str, settings: Any, obliging: bool) -> tuple[int, dict[str, Any]]:
    tp = settings.get("tensor", {}).get("size", 1) if obliging else 1
    cp = settings.get("context", {}).get("size", 1) if obliging else 1
    layers = rng.choice((1, 2, 3, 3, 5, 5, 7))
    if obliging and "pipeline" in settings:
        pipe = settings["pipeline"]
        chunks = pipe.get("chunks") or (2 if pipe["schedule"] in CHUNKED else 1)
        layers = max(layers, pipe["size"] * chunks + rng.choice((0, 0, 1, 2)))
    sequence = rng.choice((5, 7, 9, 11, 12, 15))
    if obliging:
        ways = 2 * cp if settings.get("context", {}).get("kind") == "ring" else cp
        tensor = settings.get("tensor", {})
        ways *= tp * tensor.get("overlap", 1) if tensor.get("sequence") else 1
        sequence = ways * max(1, round(sequence / ways)) * rng.choice((1, 1, 1, 2)) if ways > 1 else sequence
    makers = {"decoder": _decoder, "experts": _experts, "vit": _vit, "vgg": _vgg, "resnet": _resnet, "dlrm": _dlrm}
    if kind == "foreign":
        return sequence, _foreign(rng, layers, sequence, tp)
    model = makers[kind](rng, layers, tp, cp if settings.get("context", {}).get("kind") == "ulysses" else 1, settings)
    if rng.random() < 0.2 and kind in ("decoder", "experts"):
        patterns = ["embed.*", "blocks.0.*", "blocks.*.attention.*", "*norm*", "head.*", f"blocks.{layers - 1}.*"]
        model["freeze"] = rng.sample(patterns, rng.choice((1, 1, 2)))
    return sequence, model


def _decoder(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    rope = rng.random() < 0.7
    kv = tp * cp * rng.choice((1, 1, 2, 3) if tp * cp < 4 else (1,))
    heads = kv * rng.choice((1, 1, 2, 3) if kv < 5 else (1, 2))
    head = rng.choice((2, 4, 6, 8)) if rope else rng.choice((1, 3, 4, 5))
    change: dict[str, Any] = {
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_size": head,
        "hidden_size": rng.choice((heads * head, 10, 13, 16, 18, 24)),
        "ffn_size": tp * rng.choice((3, 5, 7, 11, 12)),
        "vocab_size": rng.choice((17, 29, 31, 36, 37, 50, 51)),
        "max_sequence": 64,
        "init_std": 0.2,
        "positions": "rope" if rope else "learned",
        "norm": rng.choice(("rms", "layer")),
        "mlp": rng.choice(("swiglu", "gelu")),
        "qkv_bias": rng.random() < 0.4,
        "bias": rng.random() < 0.3,
        "qk_norm": rng.random() < 0.3,
        "tied": rng.random() < 0.4,
    }
    if rng.random() < 0.2:
        change["sliding_window"] = rng.choice((1, 3, 4, 7))
    return {"config": "decoder", "change": change}


def _experts(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    model = _decoder(rng, layers, tp, cp, settings)
    ways = settings.get("expert", {}).get("size", 1)
    count = ways * rng.choice((1, 2, 3)) if ways * 3 <= 8 else ways
    count = max(2, count) if ways < 2 else count
    model["change"] |= {
        "mlp": "swiglu",
        "bias": False,
        "num_experts": count,
        "experts_per_token": rng.randint(1, min(3, count)),
        "expert_ffn_size": tp * rng.choice((3, 5, 6)),
        "balance": rng.choice((0.0, 0.1)),
        "capacity_factor": rng.choice((0.0, 0.0, 1.0, 1.5)),
        "router": rng.choice(("softmax", "sigmoid")),
        "routed_scale": rng.choice((1.0, 2.5)),
        "num_shared_experts": rng.choice((0, 0, 1, 2)),
        "num_dense_layers": rng.choice((0, 0, 1)) if layers > 1 else 0,
    }
    return model


def _vit(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    heads = tp * rng.choice((1, 2, 3))
    return {
        "config": "vit",
        "change": {
            "num_layers": layers, "num_heads": heads, "hidden_size": heads * rng.choice((3, 4, 5)),
            "ffn_size": tp * rng.choice((5, 7, 12)), "patch_size": rng.choice((2, 4)), "image_size": 8,
            "channels": rng.choice((1, 3)), "num_classes": rng.choice((7, 10)), "init_std": 0.2,
        },
    }  # fmt: skip


def _vgg(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    stages = [rng.choice((1, 2, 3)) for _ in range(2)] if layers > 2 else [1, 1]
    return {
        "config": "vgg",
        "change": {
            "stages": stages, "widths": [tp * rng.choice((2, 3)), tp * rng.choice((3, 5))],
            "fc_size": tp * rng.choice((5, 8)), "image_size": 8, "channels": rng.choice((1, 3)),
            "num_classes": tp * rng.choice((5, 7)),
        },
    }  # fmt: skip


def _resnet(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    return {
        "config": "resnet",
        "change": {
            "stages": [rng.choice((1, 2)), rng.choice((1, 2))], "widths": [3, 5], "stem_width": 4,
            "image_size": rng.choice((16, 18)), "channels": rng.choice((1, 3)), "num_classes": 7,
        },
    }  # fmt: skip


def _dlrm(rng: random.Random, layers: int, tp: int, cp: int, settings: Any) -> dict[str, Any]:
    return {
        "config": "dlrm",
        "change": {
            "tables": [rng.choice((9, 11, 17, 23)) for _ in range(rng.choice((2, 3, 5, 8)))],
            "embedding_size": rng.choice((3, 4, 5)), "num_dense": rng.choice((3, 5)),
            "bottom": [7], "top": [9, 5],
        },
    }  # fmt: skip


def _foreign(rng: random.Random, layers: int, sequence: int, tp: int) -> dict[str, Any]:
    name = rng.choice(FOREIGN)
    heads = tp * rng.choice((1, 2))
    arguments: dict[str, Any] = {"layers": layers}
    if name not in ("perceptron", "convolutions"):
        arguments |= {"heads": heads, "hidden": heads * rng.choice((2, 4, 6)), "sequence": sequence,
                      "vocab": rng.choice((17, 31, 36, 37)), "ffn": tp * rng.choice((5, 7, 12))}  # fmt: skip
    else:
        arguments |= {"width": tp * rng.choice((3, 5, 6))}
    return {"factory": f"benchmarks.fuzz_models:{name}", "arguments": arguments}


def _other_settings(
    rng: random.Random, kind: str, model: Any, sequence: int, settings: Any, obliging: bool
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    blocks = model.get("change", {}).get("num_layers") or model.get("arguments", {}).get("layers") or 2
    if rng.random() < 0.4:
        told: dict[str, Any] = {}
        form = rng.choice(("all", "count", "named", "selective", "both", "slots"))
        if form == "count":
            told["layers"] = f"first {rng.randint(0, blocks)}"
        elif form == "named":
            told["layers"] = ",".join(map(str, sorted(rng.sample(range(blocks), rng.randint(1, blocks)))))
        elif form == "selective":
            told |= {"layers": "none", "selective": f"first {rng.randint(1, blocks)}"}
        elif form == "both" and blocks > 1:
            told |= {"layers": "first 1", "selective": f"first {rng.randint(1, blocks - 1)}"}
        elif form == "slots":
            told["slots"] = rng.choice((1, 2, 3))
        found["recompute"] = told
    if kind in ("decoder", "experts") and rng.random() < 0.25:
        length = sequence // settings.get("context", {}).get("size", 1)
        divisors = [n for n in range(1, length + 1) if length % n == 0]
        found["chunked_loss"] = {"chunks": rng.choice(divisors) if obliging else rng.choice((2, 3, 4))}
    if rng.random() < 0.12:
        found["precision"] = {"dtype": "bf16"}
    if rng.random() < 0.05:
        found["compile"] = {"backend": "aot_eager"}
    return found


def _plan(rng: random.Random, kind: str, model: Any, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    splitting = ("replicate", "shard", "expert", "rows")
    replicas = 1
    for name in splitting:
        replicas *= settings.get(name, {}).get("size", 1)
    whole = kind == "resnet" or model.get("factory", "").endswith("convolutions")
    microbatches = 1 if whole and rng.random() < 0.9 else rng.choice((1, 2, 3, 3, 4, 5))
    microbatch = rng.choice((1, 1, 2, 3)) if not whole else rng.choice((2, 3))
    batch = replicas * microbatch * microbatches
    pipe = settings.get("pipeline")
    if pipe is not None and rng.random() < 0.4:
        blocks = model.get("change", {}).get("num_layers") or model.get("arguments", {}).get("layers") or 0
        count = pipe["size"] * (pipe.get("chunks") or (2 if pipe["schedule"] in CHUNKED else 1))
        if blocks > count:
            cuts = sorted(rng.sample(range(1, blocks), count - 1))
            pipe["stages"] = [b - a for a, b in zip([0, *cuts], [*cuts, blocks], strict=True)]
    if "replicate" in settings and settings["replicate"]["size"] > 1 and rng.random() < 0.3:
        shares = [rng.randint(1, 4) for _ in range(settings["replicate"]["size"])]
        settings["replicate"]["shares"] = shares
        batch = sum(shares) * replicas // settings["replicate"]["size"] * microbatch
    if rng.random() < 0.04:
        batch += 1
    plan: dict[str, Any] = {
        "techniques": [{"name": name, **told} for name, told in settings.items()],
        "batch": batch,
        "microbatch": microbatch,
    }
    if rng.random() < 0.4:
        axes = [technique_named(name).axis for name in settings if technique_named(name).axis]
        rng.shuffle(axes)
        plan["axis_order"] = axes
    return json.loads(json.dumps(plan))


def _optimizer(rng: random.Random, model: Any, settings: Any, dtype: str) -> dict[str, Any]:
    name = rng.choice(("adamw", "adamw", "sgd", "lion", "lamb", "lars", "adafactor", "muon"))
    overlapping = settings.get("pipeline", {}).get("schedule") == "async"
    if overlapping and rng.random() < 0.85:
        name = rng.choice(("adamw", "sgd", "lion"))
    told: dict[str, Any] = {"name": name, "lr": RATES.get(name, 1e-2), "clip": rng.choice((0.0, 0.5, 0.5))}
    if (overlapping and rng.random() < 0.9) or dtype != "float64":
        told["clip"] = 0.0
    if rng.random() < 0.3:
        told["weight_decay"] = rng.choice((0.0, 0.3))
    if name in ("sgd", "lars") and rng.random() < 0.4:
        told["momentum"] = rng.choice((0.0, 0.5))
    if rng.random() < 0.2 and "config" in model and model["config"] in ("decoder",):
        told["groups"] = [{"match": "embed.*", "lr_scale": 0.5}, {"match": ["*norm.weight"], "weight_decay": 0.2}]
    return told
