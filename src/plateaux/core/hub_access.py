"""What the builder of a Hugging Face model or data set is told besides its options in the recipe.

A recipe cannot set any of this: downloads are allowed on the command line or in Python only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "hf:"  # of names of models and data sets


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Whether files may be downloaded, and what is known about the model already."""

    download: bool = False
    model: str | None = None  # for data sets: `PATH_OR_ID` of the recipe's Hugging Face model
    config: Mapping[str, Any] | None = None  # for models of a run: its config.json; the weights come from the run
    has_weights: bool = False  # for models of a run: it has all weights, so pretrained ones are not needed


NO_HUB_ACCESS = HubAccess()
