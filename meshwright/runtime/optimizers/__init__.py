"""The optimizers: one file each, all of them a `Rule` over a rank's pieces."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.runtime.optimizers.adafactor import Adafactor
from meshwright.runtime.optimizers.adamw import AdamW
from meshwright.runtime.optimizers.lamb import Lamb
from meshwright.runtime.optimizers.lars import Lars
from meshwright.runtime.optimizers.lion import Lion
from meshwright.runtime.optimizers.muon import Muon
from meshwright.runtime.optimizers.piece import Rule
from meshwright.runtime.optimizers.sgd import SGD

RULES: Mapping[str, type[Rule]] = {
    "adafactor": Adafactor,
    "adamw": AdamW,
    "lamb": Lamb,
    "lars": Lars,
    "lion": Lion,
    "muon": Muon,
    "sgd": SGD,
}
