"""Checkpoints that no plan owns: a piece says where it lies in its tensor, so any mesh can read any other's.

Import from the modules (`format`, `save`, `load`, `inspect`): only `save` and `load` need torch.
"""
