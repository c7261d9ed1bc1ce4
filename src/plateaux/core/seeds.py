"""Seeds that are derived from their purpose."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and their order.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
