"""Optimizers over a rank's pieces: what a run file says of them, their updates and their prices."""
