"""Dimensions, presets and costs of our models, without torch. The modules themselves are in `zoo`."""
