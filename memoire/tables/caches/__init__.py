"""Tables of caches: samples that actors have drawn from their own memories."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from memoire.errors import ParameterError
from memoire.replay.parameters import Parameters, differing_fields
from memoire.tables.registry import Kind, PoolPlace, PushLimits, TableSettings
from memoire.wire import layout

if TYPE_CHECKING:
    from memoire.replay.schema import Schema


class CachesKind(Kind):
    """Kind of tables that hold caches: samples that actors have drawn from their own memories."""

    name = holds = "caches"
    unit, room = "samples", "caches"
    weighed = "Weights of held samples, which actors drew in proportion to their weights."
    pool = "memoire.tables.caches.pool:Pool"
    saved = "memoire.tables.caches.inspection:ClientRecord CacheRecord"
    actor = "memoire.client.caches:CachesSide"
    offers = ("TakesPushes", "ReceivesSums", "BelongsToRun", "DrawsAtRandom", "DrawsBatches", "ShowsSamples")

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Raise ParameterError if `capacity` is set, because the actors hold the entries."""
        if settings.capacity:
            expected = (
                "0 with storage='caches', because actors hold the entries: client_capacity limits the entries of each "
                "actor, cache_limit the held caches"
            )
            raise ParameterError("capacity", settings.capacity, expected)
        self._check_rest(settings, is_full_said=is_full_said)

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Raise ParameterError if a cache exceeds the message size or the table's byte limit."""
        most = {"message_bytes": limits.push_bytes}
        if limits.byte_limit is not None and parameters.compression == "none":  # compressed caches are held as received
            most["byte_limit"] = limits.byte_limit
        size_of = partial(layout.cache_bytes, settings.schema, parameters, settings.client_capacity)
        limits.check(("cache_size", parameters.cache_size, "samples that share no frame", "sample"), size_of, most)

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Return the usual size of a cache, 0 if the size is unknown."""
        return layout.usual_bytes(schema, parameters)

    def differing_parameters(self, schema: Schema, ours: Parameters, others: Parameters) -> dict[str, tuple[Any, Any]]:
        """Return the parameters that held samples depend on and that differ: name -> (our value, other value)."""
        return differing_fields(schema, ours, others)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"cache_limit": settings.cache_limit, "seed": place.seed}


KIND: Final = CachesKind()
