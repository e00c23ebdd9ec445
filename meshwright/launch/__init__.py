"""Start ranks, watch them, and end them: this room owns processes and never imports torch.

`launch` runs a module once per rank, `RankPool` keeps rank processes warm for tests and `mw check`,
`run_rank` is the child's side, and `outside_launcher` recognises when torchrun or Slurm already started us.
(The pool's workers import torch, inside `rank_pool.work`; the process that owns them does not.)
"""
