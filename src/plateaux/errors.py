"""The errors of Plateaux. All of them are a `PlateauxError`."""

from plateaux.core.errors import (
    DataError,
    DivergedError,
    Interrupted,
    PlateauxError,
    RecipeError,
    RunError,
    StorageError,
    TrainingLoopError,
    UnknownNameError,
    UntrustedCodeError,
    suggest,
)

__all__ = [
    "DataError",
    "DivergedError",
    "Interrupted",
    "PlateauxError",
    "RecipeError",
    "RunError",
    "StorageError",
    "TrainingLoopError",
    "UnknownNameError",
    "UntrustedCodeError",
    "suggest",
]
