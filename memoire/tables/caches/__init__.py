"""Tables of caches: samples that actors made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from memoire.errors import ParameterError
from memoire.replay.parameters import Parameters, differing
from memoire.tables.registry import Kind, PoolPlace, PushLimits, TableSettings
from memoire.wire import layout

if TYPE_CHECKING:
    from memoire.replay.schema import Schema


class CachesKind(Kind):
    """Caches: samples that actors have drawn from their own memories."""

    name = holds = "caches"
    unit, room = "samples", "caches"
    weighed = "Of held samples, which actors drew in proportion to them."
    pool = "memoire.tables.caches.pool:Pool"
    saved = "memoire.tables.caches.inspection:ClientRecord CacheRecord"
    actor = "memoire.client.caches:CachesSide"
    offers = ("TakesPushes", "HearsSums", "BelongsToRun", "DrawsAtRandom", "DrawsBatches", "ShowsSamples")

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse room for entries, which are at their actors."""
        if settings.capacity:
            expected = (
                "0 where caches are stored, since entries are at their actors: client_capacity says how many each "
                "keeps, cache_limit how many caches are held here"
            )
            raise ParameterError("capacity", settings.capacity, expected)
        self._check_rest(settings, is_full_said=is_full_said)

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Of caches, what the table may hold counts, too."""
        most = {"message_bytes": limits.push_bytes}
        if limits.byte_limit is not None and parameters.compression == "none":  # compressed ones are held as they come
            most["byte_limit"] = limits.byte_limit
        size_of = partial(layout.cache_bytes, settings.schema, parameters, settings.client_capacity)
        limits.check(("cache_size", parameters.cache_size, "samples that share no frame", "sample"), size_of, most)

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Of a cache."""
        return layout.usual_bytes(schema, parameters)

    def differing_parameters(self, schema: Schema, mine: Parameters, theirs: Parameters) -> dict[str, tuple[Any, Any]]:
        """Caches hold finished samples."""
        return differing(schema, mine, theirs)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"cache_limit": settings.cache_limit, "seed": place.seed}


KIND: Final = CachesKind()
