"""Deep learning recommendation model: dense features and looked-up vectors meet in pairwise products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.presets import DLRMConfig
from meshwright.ops.model_interface import Inputs, Model, ModelPart, Spans


class MLP(nn.Module):
    """Linears with a relu after each, but not after the last of one that `ends`."""

    def __init__(self, sizes: Sequence[int], ends: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in pairwise(sizes))
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if not (self.ends and place == len(self.layers) - 1):
                x = F.relu_(x)
        return x


class Tables(nn.Module):
    def __init__(self, config: DLRMConfig):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, config.embedding_size) for rows in config.tables)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(samples, tables) and the dense vector -> (samples, tables + 1, embedding)."""
        return torch.stack([dense, *self.look_up(ids, dense.dtype)], dim=1)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """Vectors of all samples from every table; the technique that shards tables replaces this function."""
        return [table(ids[:, place]).to(dtype) for place, table in enumerate(self.tables)]


class DLRM(Model):
    """Inputs: (dense features, ids), an id of each table."""

    kind = "dlrm"

    def __init__(self, config: DLRMConfig):
        super().__init__()
        self.config = config
        bottom, top = (config.num_dense, *config.bottom, config.embedding_size), (config.num_features, *config.top, 1)
        self.sizes = {"bottom": bottom, "top": top}
        self.bottom, self.tables, self.top = MLP(bottom), Tables(config), MLP(top, ends=True)

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        features, ids = inputs
        with self.casting(features.device):
            dense = self.bottom(features)
            vectors = self.tables(ids, dense)
            products = vectors @ vectors.transpose(1, 2)
            row, column = torch.tril_indices(*products.shape[1:], offset=-1, device=ids.device)
            logits = self.top(torch.cat((dense, products[:, row, column]), dim=1)).squeeze(1)
        if targets is None or weights is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
        return (each * weights).sum()

    def keep(self, spans: Spans) -> None:
        """There is one stage only."""

    def parts(self) -> Iterable[ModelPart]:
        for name in ("bottom", "tables", "top"):
            yield ModelPart(name=name, kind=name, module=getattr(self, name))

    def boundary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def init_value(self, name: str) -> float | tuple[float, float]:
        """Naumov et al.'s: linears by their sizes, tables by their rows."""
        if name.endswith("bias"):
            return 0.0
        owner, place = name.split(".")[0], int(name.split(".")[2])
        if owner == "tables":
            return 0.0, (3.0 * self.config.tables[place]) ** -0.5
        return 0.0, (2.0 / sum(self.sizes[owner][place : place + 2])) ** 0.5
