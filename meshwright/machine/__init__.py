"""What a machine gives, measured or looked up by name.

Only the `measure` modules, which run in child processes, import torch.
"""
