"""Our models as `nn.Module`s. Their dimensions, presets and costs, without torch, are in `models`."""
