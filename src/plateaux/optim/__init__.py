"""Losses, update rules of the SAM family, weight averaging, and per-sample gradient norms.

Methods that combine these for an ensemble belong in `methods`. The training loop belongs in `training`."""

from plateaux.core.imports import attach_stub

__all__, __getattr__, __dir__ = attach_stub(__name__, __file__)
