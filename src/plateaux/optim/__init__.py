"""Losses, update rules of the SAM family, weight averaging, and per-sample gradient norms.

Methods that combine these for an ensemble belong in `methods`. The training loop belongs in `training`."""

import typing as _typing

# A public name is imported at its first use, because it imports torch.
if _typing.TYPE_CHECKING:
    from plateaux.optim.sample_sharpness import SampleSharpness
    from plateaux.optim.sharpness_aware import SharpnessAware

__all__ = ["SampleSharpness", "SharpnessAware"]
_MODULES = {"SampleSharpness": "sample_sharpness", "SharpnessAware": "sharpness_aware"}

if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        """Return a public name, which is imported now."""
        if name not in _MODULES:
            raise AttributeError(f"module 'plateaux.optim' has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(f"plateaux.optim.{_MODULES[name]}"), name)
        return value
