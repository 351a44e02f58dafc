"""Tables of rollouts: fragments of episodes whose entries are handed out once, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memoire.tables.registry import Kind, PoolPlace, TableSettings

if TYPE_CHECKING:
    from memoire.replay.limiter import Limiter
    from memoire.tables.base import TablePool


class RolloutsKind(Kind):
    """Kind of tables that hold fragments of episodes and hand each entry out once, in order."""

    name, holds = "rollouts", "fragments"
    weighed = "Weights of held entries, by their actors. Each entry is taken once, in order."
    pool = "memoire.tables.rollouts.pool:RolloutPool"
    answers = "memoire.tables.rollouts.pool:request_handlers"
    actor = "memoire.client.episodes:RolloutsSide"
    far = "memoire.tables.rollouts.far:RolloutTaker"
    offers = ("TakesPushes", "HasRoom", "BelongsToRun", "DeliversOnce")
    instead = "take(steps)"
    is_once = may_wait = has_rollouts = True

    def limiter(self, settings: TableSettings, pool: TablePool) -> Limiter:
        """Return the limiter, which grants clients the free room."""
        from memoire.tables.base import HasRoom

        from .pool import RoomLimiter

        assert isinstance(pool, HasRoom)
        return RoomLimiter(pool.capacity if settings.on_full == "block" else 0, pool.entries)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity, "is_bounded": settings.on_full == "drop_oldest"}


KIND: Final = RolloutsKind()
