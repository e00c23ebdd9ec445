"""Checkpoints that no plan owns: a piece says where it lies in its tensor, so any mesh can read any other's.

Import from the modules: `manifest` and `step_folders` need no torch.
"""
