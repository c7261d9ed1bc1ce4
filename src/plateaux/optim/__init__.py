"""Losses, update rules of the SAM family, weight averaging, and per-sample gradient norms.

Methods that combine these for an ensemble belong in `methods`. The training loop belongs in `training`."""
