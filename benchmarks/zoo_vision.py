"""Models of torchvision and timm, where those are installed: for the zoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo_plain import CLASSES, Made


def _image(module: nn.Module, size: int) -> Made:
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        for name, value in vars(each).items():
            if name in ("drop_prob", "p", "stochastic_depth_prob") and isinstance(value, float):
                setattr(each, name, 0.0)
    with torch.no_grad():
        module.eval()
    return module.train(), None, [([3, size, size], 0)], ([], CLASSES)


def torchvision_model(name: str) -> Made:
    import torchvision

    settings: dict[str, Any] = {"num_classes": CLASSES, "weights": None}
    if name == "vit_b_16":
        made = torchvision.models.VisionTransformer(
            image_size=16, patch_size=4, num_layers=3, num_heads=2, hidden_dim=12, mlp_dim=24, num_classes=CLASSES
        )
        return _image(made, 16)
    if name == "googlenet":
        settings |= {"aux_logits": False, "init_weights": True}
    return _image(getattr(torchvision.models, name)(**settings), 64)


def timm_model(name: str) -> Made:
    import timm

    size = 64 if not any(part in name for part in ("224", "eva")) else 224
    return _image(timm.create_model(name, pretrained=False, num_classes=CLASSES), size)
