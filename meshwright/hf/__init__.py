"""Hugging Face folders: `config.json` both ways, and weights. Only the `weights_*` files import torch."""
