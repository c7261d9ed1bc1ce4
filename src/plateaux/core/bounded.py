"""Types of numbers in stored files. Where a file is read, pydantic checks their ranges; elsewhere they are plain."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, lt=1 << 53)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
FiniteSeconds = Annotated[float, Field(strict=True, ge=0, lt=1e12)]
