"""Tables of whole episodes, from which the server draws samples."""

from __future__ import annotations

from typing import Any, Final

from memoire.tables.registry import Kind, PoolPlace, TableSettings


class EpisodesKind(Kind):
    """Kind of tables that hold whole episodes, from which the server draws."""

    name = holds = "episodes"
    weighed = "Weights of stored entries. Draws are in proportion to weights."
    counted = ("capacity",)
    pool = "memoire.tables.episodes.pool:EpisodePool"
    saved = "memoire.tables.episodes.saving:EpisodeRecord"
    actor = "memoire.client.episodes:EpisodesSide"
    offers = (
        "TakesPushes", "HasRoom", "BelongsToRun", "DrawsAtRandom", "DrawsBatches", "DrawsEpisodes", "TakesPriorities",
        "ShowsSamples", "KeepsLayout",
    )  # fmt: skip

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity, "seed": place.seed}


KIND: Final = EpisodesKind()
