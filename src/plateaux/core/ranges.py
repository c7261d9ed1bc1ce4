"""Types of numbers in recipes and stored files. Each has a range, which pydantic checks where they are read.

A factory annotates its options with them: `def sam(loss: LossFn, *, rho: NonNegative = 0.05)`. The upper limits are far
above useful values; they keep a misplaced digit from becoming an overflow or an endless loop. In a stored file, a
number is never a string or a boolean.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_COUNT = 2**31 - 1
MAX_SIZE = 1_000_000
MAX_DEPTH = 2_000
MAX_NUMBER = 1e30  # far below the largest float32

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A number of samples, steps, or epochs, at least 1."""
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of something that may be absent."""
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
"""A width, or a number of pixels, at least 1."""
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]
"""A number of layers or blocks, at least 1: building a module for each takes time."""
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""The seed of random choices."""
Fraction = Annotated[float, Field(ge=0, le=1)]
"""A fraction or a probability, from 0 to 1."""
NonNegative = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
"""A radius, a weight, or another number that is not negative."""
Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
"""A number above 0."""
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""Any number of reasonable size."""

StoredCount = Annotated[int, Field(strict=True, ge=1, lt=1 << 53)]
"""A number of samples, classes, or pixels in a stored file, at least 1."""
StoredInt = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
"""An integer in a stored file, at least 0: a position, or a number of something that may be absent."""
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number in a stored file, neither infinite nor NaN."""
FiniteSeconds = Annotated[float, Field(strict=True, ge=0, lt=1e12)]
"""A duration in a stored file."""
