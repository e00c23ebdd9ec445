"""The optimizers: one file each, all of them a `UpdateRule` over a rank's pieces."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.optimizers.adafactor import Adafactor
from meshwright.optimizers.adamw import AdamW
from meshwright.optimizers.lamb import Lamb
from meshwright.optimizers.lars import Lars
from meshwright.optimizers.lion import Lion
from meshwright.optimizers.muon import Muon
from meshwright.optimizers.rule import UpdateRule
from meshwright.optimizers.sgd import SGD

RULES: Mapping[str, type[UpdateRule]] = {
    "adafactor": Adafactor,
    "adamw": AdamW,
    "lamb": Lamb,
    "lars": Lars,
    "lion": Lion,
    "muon": Muon,
    "sgd": SGD,
}
