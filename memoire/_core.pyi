"""The loops: entry store, trees, TD(lambda), windows, cache building, draws over held caches, gathering, checksum."""

CHECKED: bool
"""Whether bounds checks and assertions were compiled in (MEMOIRE_CHECKED=1)."""

# ---------------------------------------------------------------------------------------------------------- engine

# ----------------------------------------------------------------------------------------------------- wire and pool
