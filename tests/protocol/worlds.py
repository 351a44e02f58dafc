"""Worlds that `make protocol` searches, and smaller ones for `make test`.

Clients begin at the first of two servers. Each world has one subject, so that all of its orders can be searched; other
worlds cover the rest.
"""

from __future__ import annotations

from typing import Final

from .explore import World

DRAIN: Final = (("drain", "alpha"), ("hand over", "alpha", "beta"), ("remove", "alpha", "beta"))

WORLDS: Final = {
    world.name: world
    for world in (
        World("counts", works=2, losses=1, doubles=1),
        World("restart", kills=1),
        World("move", doubles=1, script=DRAIN),
        World("run", doubles=1, script=(("run", "alpha", "two"),)),
        World("end", leaves=True, losses=1, script=(("finish", "alpha"),)),
        World("caches", works=0, pushes=1, heartbeats=1, losses=1),
        World("forgotten", clients=1, works=0, pushes=2, kills=1, is_durable=False),
        World("moved", clients=1, pushes=1, losses=1, script=DRAIN),
        World("all runs", clients=1, works=2, script=(("run", "alpha", "two"), ("run", "alpha", "one"))),
    )
}
"""Worlds of `make protocol` by name."""

SMALL: Final = {
    world.name: world
    for world in (
        World("counts", losses=1, doubles=1),
        World("move", clients=1, doubles=1, script=DRAIN),
        World("end", works=0, leaves=True, script=(("finish", "alpha"),)),
        World("forgotten", clients=1, pushes=1, kills=1, is_durable=False),
    )
}
"""Worlds of `make test` by name."""
