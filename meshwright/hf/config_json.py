"""Hugging Face `config.json` to our decoder and back, by known keys only. No torch, and nothing of the folder is run.

A model whose every setting our decoder computes becomes a `DecoderConfig`. For any other there is a reason, and it runs
as transformers' own module. Unknown keys are a reason too, unless they are off: they may change what is computed.
Dropout and expert capacity are of training only and are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meshwright.core.codec import decode, decode_into
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.files import json_object, read_plain
from meshwright.models.presets import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What transformers' class of that name does where config.json is silent, and what our decoder cannot do of it."""

    keys: Mapping[str, str]
    """Our field -> its key."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the values we can honour, the default first."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that the architecture decides."""
    has_rope: bool = True
    default_theta: float = 10_000.0
    has_mixed_windows: bool = False
    weights: str = "llama"
    """Which names its stored weights have. Mistral, Qwen and Mixtral differ from Llama in which of the names exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFamilies:
    """What `families.json` has."""

    harmless: tuple[str, ...]
    """Keys that decide nothing our decoder computes: tokens of generation, training's dropout, names, versions."""
    families: Mapping[str, Family]
    """By architecture."""
    weights: Mapping[str, Mapping[str, str]]
    """Names of stored weights, by our names of a block's layers; {}: the number of an expert."""


KNOWN = decode(KnownFamilies, json.loads(Path(__file__).with_name("families.json").read_bytes()), "families.json")
FAMILIES = KNOWN.families
LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_sequence": "original_max_position_embeddings",
}
NULLABLE = ("n_inner", "head_dim", "num_key_value_heads")
"""null: 4 * n_embd, hidden_size / heads, as many as heads."""
HINTS = {"tied": bool, "norm_epsilon": float, "init_std": float}

DECIDED = ("positions", "norm", "mlp", "bias", "qkv_bias", "qk_norm")
DECIDED_OF_EXPERTS = ("num_shared_experts", "num_dense_layers", "router", "routed_scale")
"""Our fields that an architecture decides: as it implies, else our default. It takes the others as they are, or they
are of training only."""

CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 << 20
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000
MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HFModel:
    architecture: str
    config: DecoderConfig | None
    reason: str = ""
    """Why our decoder cannot be this model; empty when it can."""
    raw: dict[str, Any] = field(repr=False)


def read_folder(folder: str | Path) -> HFModel:
    """What the folder's config.json says; everything wrong with it at once."""
    folder = Path(folder)
    where = str(folder / CONFIG)
    raw = json_object(read_plain(folder, CONFIG, MAX_CONFIG_BYTES), where)
    if raw.get("auto_map"):
        fix = "Use a folder of an architecture that transformers itself has, without auto_map."
        raise error_at(where, "asks for code of its own (auto_map); custom code is not run.", fix)
    names = raw.get("architectures") or [""]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or len(names[0]) > 200:
        raise error_at(f"{where}: architectures", "expected a list of one class name.")
    architecture = names[0]
    family = FAMILIES.get(architecture)
    if family is None:
        named = architecture or "no architecture"
        return HFModel(architecture=architecture, config=None, reason=f"config.json names {named}.", raw=raw)
    return _ConfigReader(raw, family, where).model(architecture)


class _ConfigReader:
    """One config.json: the problems and the reasons are collected while its keys are looked at."""

    def __init__(self, raw: dict[str, Any], family: Family, where: str):
        self.raw, self.family, self.where = raw, family, where
        self.problems: list[Problem] = []
        self.reasons: list[str] = []

    def model(self, architecture: str) -> HFModel:
        read = {key: self.value(name, key) for name, key in self.family.keys.items()}
        fields = {name: read[key] for name, key in self.family.keys.items()}
        self.unsupported()
        if self.family.has_rope:
            fields |= self.rope() | self.window()
        if "num_experts" in fields and self.raw.get("output_router_logits") is True:
            fields["balance"] = self.number(float, "router_aux_loss_coef", self.raw.get("router_aux_loss_coef", 0.001))
        raise_problems(self.problems)
        if self.reasons:
            reason = "Our decoder cannot be it: " + "; ".join(self.reasons[:5]) + "."
            return HFModel(architecture=architecture, config=None, reason=reason, raw=self.raw)
        return HFModel(architecture=architecture, config=self.decoder(fields), raw=self.raw)

    def refuse(self, key: str, what: str, fix: str = "") -> None:
        self.problems.append(Problem(where=f"{self.where}: {key}", what=what, fix=fix))

    def number(self, hint: type, key: str, value: Any, bounds: tuple[float, float] | None = None) -> Any:
        """A value of that type and within its bounds."""
        value = decode_into(hint, value, f"{self.where}: {key}", self.problems)
        if bounds is not None and value is not None and not bounds[0] <= value <= bounds[1]:
            self.refuse(key, f"is {value}.", f"Use {bounds[0]} to {bounds[1]}.")
        return value

    def value(self, name: str, key: str) -> Any:
        """A key as its field's type and within sane bounds; None where the family has a rule for it."""
        if key not in self.raw and key not in self.family.defaults:
            self.refuse(key, "is missing.")
            return None
        value = self.raw.get(key, self.family.defaults.get(key))
        if value is None and key in NULLABLE:
            return None
        hint = HINTS.get(name, int)
        most = {"num_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS}.get(name, MOST)
        return self.number(hint, key, value, {int: (1, most), float: (0, 1)}.get(hint))

    def unsupported(self) -> None:
        for key, allowed in self.family.only.items():
            value = self.raw.get(key, allowed[0])
            if value not in allowed and value is not None:
                self.reasons.append(f"{key} is {_shown(value)}")
        known = {*self.family.keys.values(), *self.family.only, *self.family.defaults, *KNOWN.harmless}
        if self.family.has_rope:
            known |= {"rope_theta", "rope_scaling", "rope_parameters"}
        if self.family.has_mixed_windows:
            known |= {"use_sliding_window", "layer_types"}
        for key, value in self.raw.items():
            if key not in known and value not in (None, False, "", [], {}):
                self.reasons.append(f"{key[:80]} is {_shown(value)}, which is not known here")

    def rope(self) -> dict[str, Any]:
        """Both spellings: transformers 5 keeps theta and scaling together as `rope_parameters`."""
        given: Any = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(given, dict):
            self.refuse("rope_parameters", f"expected a table of keys and values, found {_shown(given)}.")
            return {}
        theta = given.get("rope_theta", self.raw.get("rope_theta", self.family.default_theta))
        fields = {"rope_theta": self.number(float, "rope_theta", theta)}
        if fields["rope_theta"] is not None and not fields["rope_theta"] > 0:
            self.refuse("rope_theta", f"is {theta}.", "Use a number above 0.")
        kind = given.get("rope_type", given.get("type", "default"))
        left = {k: v for k, v in given.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
        if left.pop("partial_rotary_factor", 1.0) != 1.0:
            self.reasons.append("only a part of each head is rotated")
        if kind == "llama3":
            fields["rope_scaling"] = "llama3"
            for name, key in LLAMA3.items():
                hint = int if name == "rope_original_sequence" else float
                fields[name] = self.number(hint, key, left.pop(key, None))
        elif kind != "default":
            self.reasons.append(f"its rope_type is {_shown(kind)}")
        elif any(isinstance(value, dict) for value in left.values()):
            self.reasons.append("layers differ in their rope parameters")
        if kind == "llama3" and left:
            self.reasons.append(f"rope has the unknown keys {', '.join(map(str, left))[:80]}")
        return fields

    def window(self) -> dict[str, Any]:
        width = self.raw.get("sliding_window", self.family.defaults.get("sliding_window"))
        if self.family.has_mixed_windows:
            width = width if self.raw.get("use_sliding_window", False) else None
            kinds = self.raw.get("layer_types")
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                first, layers = self.raw.get("max_window_layers", 28), self.raw.get("num_hidden_layers")
                is_full = width is None or not isinstance(first, int) or not isinstance(layers, int) or first >= layers
                kinds = ["full_attention"] * (is_full or first > 0) + ["sliding_attention"] * (not is_full)
            kinds = set(kinds)
            if len(kinds) > 1:
                self.reasons.append("some layers have a sliding window and some do not")
            width = width if kinds == {"sliding_attention"} else None
        if width is None:
            return {}
        return {"sliding_window": self.number(int, "sliding_window", width, (1, MOST))}

    def decoder(self, fields: dict[str, Any]) -> DecoderConfig:
        fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
        fields["ffn_size"] = fields["ffn_size"] or 4 * fields["hidden_size"]
        if fields.get("head_size") in (None, fields["hidden_size"] // fields["num_heads"]):
            fields["head_size"] = 0
        try:
            return DecoderConfig(**fields, **self.family.implied)
        except MeshwrightError as error:
            keys = {**self.family.keys, **LLAMA3}
            raise MeshwrightError(
                Problem(where=f"{self.where}: {keys.get(p.where, p.where)}", what=p.what, fix=p.fix)
                for p in error.problems
            ) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def family_of(config: DecoderConfig) -> str:
    """The architecture that computes what this decoder does, or a problem for each field that none can hold."""
    names = [name for name, family in FAMILIES.items() if ("num_experts" in family.keys) == (config.num_experts > 0)]
    defaults = {field.name: field.default for field in fields(DecoderConfig)}
    misfits: dict[str, dict[str, str]] = {}  # architecture -> field it cannot hold -> what it needs
    for name in names:
        family = FAMILIES[name]
        decided = (*DECIDED, *(DECIDED_OF_EXPERTS if "num_experts" in family.keys else ()))
        needs: dict[str, tuple[Any, ...]] = {each: (family.implied.get(each, defaults[each]),) for each in decided}
        if "sliding_window" not in family.defaults:
            needs["sliding_window"] = (0,)
        if name == "GPT2LMHeadModel":
            needs |= {"num_kv_heads": (config.num_heads,), "head_size": (0, config.hidden_size // config.num_heads)}
        if name == "LlamaForCausalLM":  # its class insists; Mistral's does not
            needs["hidden_size"] = (config.hidden_size // config.num_heads * config.num_heads,)
        misfits[name] = {
            part: f"The nearest, {name}, needs {' or '.join(map(repr, allowed))}."
            for part, allowed in needs.items()
            if getattr(config, part) not in allowed
        }
    name = min(misfits, key=lambda each: len(misfits[each]))
    if misfits[name]:
        raise MeshwrightError(
            Problem(where=part, what=f"is {getattr(config, part)!r}; no Hugging Face family here holds that.", fix=fix)
            for part, fix in misfits[name].items()
        )
    return name


def config_for(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of this decoder, in the spelling that transformers 4 and 5 both read."""
    architecture = family_of(config)
    family = FAMILIES[architecture]
    kind = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    made: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    made |= {key: getattr(config, name) for name, key in family.keys.items()}
    made |= {key: allowed[0] for key, allowed in family.only.items() if key != "partial_rotary_factor"}
    made |= {"bos_token_id": None, "eos_token_id": None}
    if not family.has_rope:
        return made
    made["head_dim"] = config.size_of_head
    made["rope_theta"] = config.rope_theta
    if config.rope_scaling == "llama3":
        made["rope_scaling"] = {"rope_type": "llama3", **{key: getattr(config, n) for n, key in LLAMA3.items()}}
    if config.num_experts:
        made["intermediate_size"] = config.expert_ffn_size
        made |= {"router_aux_loss_coef": config.balance, "output_router_logits": config.balance > 0}
    if "sliding_window" in family.defaults:
        made["sliding_window"] = config.sliding_window or None
    if family.has_mixed_windows:
        made["use_sliding_window"] = config.sliding_window > 0
        made["max_window_layers"] = 0 if config.sliding_window else config.num_layers
        kind = "sliding_attention" if config.sliding_window else "full_attention"
        made["layer_types"] = [kind] * config.num_layers
    return made
