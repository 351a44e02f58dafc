"""The loops: entry store, trees, TD(lambda), windows, cache building, draws over held caches, gathering, checksum."""

from typing import Any

CHECKED: bool
"""Whether bounds checks and assertions were compiled in (MEMOIRE_CHECKED=1)."""

# ---------------------------------------------------------------------------------------------------------- engine

# ----------------------------------------------------------------------------------------------------- wire and pool

def checksum(data: Any, seed: int = 0) -> int: ...
def is_plain_msgpack(data: Any) -> bool: ...
