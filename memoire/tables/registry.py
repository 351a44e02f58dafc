"""Kinds of tables: what each does with the settings of a table, which pool it has, and what that pool offers.

    Table(storage="rollouts") ──▶ named("rollouts") ──▶ check, limiter ──▶ "memoire.tables.rollouts.pool:RolloutPool"

The registry of kinds, and with a kind's own files the only place that names one: others ask `Kind`, or a table for what
its pool can do (`base`). A pool is found by the name of its module, so that this may be loaded everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol

from memoire.arguments import one_of
from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters, differing
from memoire.replay.schema import Schema, schema_from
from memoire.wire import layout

from .base import (
    AnswersPrompts,
    BelongsToRun,
    DrawsAtRandom,
    DrawsBatches,
    DrawsEpisodes,
    HandsOutOnce,
    HasRoom,
    HearsSums,
    HoldsRows,
    KeepsLayout,
    SavesRows,
    ShowsSamples,
    TablePool,
    TakesPriorities,
    TakesPushes,
)

if TYPE_CHECKING:
    from memoire.replay.limiter import Limiter

    from .prompts.settings import PromptSettings
    from .saved import RecordBody


class TableSettings(Protocol):
    """What a kind reads of a `Table`."""

    @property
    def schema(self) -> Schema:
        """What an entry is."""

    @property
    def parameters(self) -> Parameters:
        """Those that it begins with."""

    @property
    def capacity(self) -> int:
        """Entries that there is room for."""

    @property
    def cache_limit(self) -> int:
        """Maximum number of held caches."""

    @property
    def client_capacity(self) -> int:
        """Entries that each client's memory has room for."""

    @property
    def on_full(self) -> str:
        """What happens where it is full."""

    @property
    def prompts(self) -> PromptSettings | None:
        """Of prompts."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where a pool is made: in which table of which server."""

    name: str
    """The table's."""
    byte_limit: int
    """Bytes that it may hold at first."""
    limits: Limits
    """The server's."""
    seed: int | None
    """Of its draws; None is a random one."""


class PushLimits(NamedTuple):
    """Bytes that a push to a table may have."""

    push_bytes: int
    """Of a message now."""
    message_bytes: int
    """Of a message to a server that began with larger ones."""
    byte_limit: int | None = None
    """That the table may hold, if that limits a push, too."""

    def check(self, counted: tuple[str, int, str, str], size_of: Callable[[int], int], most: Mapping[str, int]) -> None:
        """Refuse so much in a message that it has more bytes than one of `most` allows.

        Args:
            counted: The parameter that says how much, its value, what is counted, and one of it.
            size_of: Bytes of so much.
            most: Bytes, by the name of their limit.
        """
        name, count, what, one = counted
        limit, allowed = min(most.items(), key=itemgetter(1))
        if size_of(count) <= allowed:
            return
        fitting = layout.most_fitting(size_of, allowed)
        if fitting < 1:
            raise ParameterError(limit, allowed, f"at least {size_of(1)}, which one {one} takes")
        taken = f"{count} {what} take {size_of(count)} bytes, and {limit} is {allowed}"
        where = f"{name}={fitting} is an argument of every server, of Table and of configure"
        larger = f"{limit} larger; {where}"
        if limit == "message_bytes" and allowed < self.message_bytes:
            taken = f"{count} {what} take {size_of(count)} bytes, and a push to this server at most {allowed}"
            larger = f"a server that begins with {name}={count}"
        raise ParameterError(name, count, f"at most {fitting} ({taken}), or {larger}")


class Kind:
    """A kind of table, where storage says its name."""

    name: ClassVar[str]
    holds: ClassVar[str]
    """What a table holds, as its figures call it."""
    pool: ClassVar[str]
    """Its pool, "module:class"."""
    saved: ClassVar[str] = ""
    """The records of a snapshot that are its own, "module:class class"."""
    offers: ClassVar[tuple[type, ...]]
    """What its pool can do."""
    instead: ClassVar[str] = "get_batch(batch_size)"
    """How a learner gets what is held."""
    no_pushes: ClassVar[str] = ""
    """Why nothing is pushed to it, where nothing is."""
    has_columns: ClassVar[bool] = True
    """Whether its entries have columns that a schema names."""
    why_whole: ClassVar[str] = ""
    """Why a snapshot of it cannot be shared out among servers, where it cannot."""

    def pool_class(self) -> type[Any]:
        """The class of its pools."""
        module, _, name = self.pool.partition(":")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found

    def record_bodies(self) -> list[type[RecordBody]]:
        """What its pools write into a snapshot."""
        module, _, names = self.saved.partition(":")
        return [getattr(importlib.import_module(module), name) for name in names.split() if names]

    def schema_class(self) -> type[Schema]:
        """What describes its columns."""
        return Schema

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """The columns that somebody asks for. Raises SchemaError, WrongType."""
        return schema_from(given)

    def own_settings(self, given: Mapping[str, Any]) -> PromptSettings | None:
        """Settings that only tables of prompts have, made of keywords. Raises ParameterError."""
        from .prompts.settings import refuse_elsewhere

        refuse_elsewhere(given, self.name)
        return None

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse settings that this kind has no use for, or that do not fit. Raises ParameterError.

        Args:
            is_full_said: Whether `on_full` was given.
        """
        if settings.cache_limit:
            expected = f"0 where {self.name} are stored: capacity says how many entries"
            raise ParameterError("cache_limit", settings.cache_limit, expected)
        self._check_rollouts(settings, is_full_said=is_full_said)

    def _check_rollouts(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse what only rollouts have."""
        said = {"on_full": is_full_said and settings.on_full, "rollout_length": settings.parameters.rollout_length}
        for name, value in said.items():
            if value:
                raise ParameterError(name, value, f"nothing with storage={self.name!r}: it is for storage='rollouts'")

    def check_parameters(self, parameters: Parameters) -> None:
        """Refuse parameters that this kind has no use for. Raises ParameterError."""
        if parameters.rollout_length:
            expected = f"0 with storage={self.name!r}: it is for storage='rollouts'"
            raise ParameterError("rollout_length", parameters.rollout_length, expected)

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Refuse parameters with which an actor would find out that what it pushes is too large to be sent, or to be
        held. Raises ParameterError.
        """
        size_of = partial(layout.episode_bytes, settings.schema)
        count = "rollout_length", max(1, parameters.rollout_length), "entries", "entry"
        limits.check(count, size_of, {"message_bytes": limits.push_bytes})

    def limiter(self, settings: TableSettings, pool: TablePool) -> Parameters | Limiter:
        """What limits drawing and recording."""
        return settings.parameters

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Size of the largest messages that usually come, by `container.usual_bytes`; 0 where it cannot be known."""
        return 0

    def making(self, settings: TableSettings) -> dict[str, Any]:
        """Settings beside the parameters that what is held is made with: plain values, by name."""
        return {}

    def differing_parameters(self, schema: Schema, mine: Parameters, theirs: Parameters) -> dict[str, tuple[Any, Any]]:
        """Parameters that what is held was made with otherwise: name -> (mine, theirs). None where entries are held as
        they were recorded: what follows from them is computed here.
        """
        return {}

    def make_pool(self, settings: TableSettings, place: PoolPlace) -> TablePool:
        """A pool with nothing in it. Raises ParameterError."""
        made: TablePool = self.pool_class()(
            settings.schema,
            settings.parameters,
            byte_limit=place.byte_limit,
            client_timeout=place.limits.client_timeout,
            **self._pool_options(settings, place),
        )
        return made

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity}


class CachesKind(Kind):
    """Caches: samples that actors have drawn from their own memories."""

    name = holds = "caches"
    pool = "memoire.tables.caches.pool:Pool"
    saved = "memoire.tables.caches.inspection:ClientRecord CacheRecord"
    offers = (TakesPushes, HearsSums, BelongsToRun, DrawsAtRandom, DrawsBatches, ShowsSamples)

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse room for entries, which are at their actors."""
        if settings.capacity:
            expected = (
                "0 where caches are stored, since entries are at their actors: client_capacity says how many each "
                "keeps, cache_limit how many caches are held here"
            )
            raise ParameterError("capacity", settings.capacity, expected)
        self._check_rollouts(settings, is_full_said=is_full_said)

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


class EpisodesKind(Kind):
    """Whole episodes, from which the server draws."""

    name = holds = "episodes"
    pool = "memoire.tables.episodes.pool:EpisodePool"
    saved = "memoire.tables.episodes.saving:EpisodeRecord"
    offers = (
        TakesPushes, HasRoom, BelongsToRun, DrawsAtRandom, DrawsBatches, DrawsEpisodes, TakesPriorities, ShowsSamples,
        KeepsLayout,
    )  # fmt: skip

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity, "seed": place.seed}


class RolloutsKind(Kind):
    """Parts of episodes, each entry handed out once, in order."""

    name, holds = "rollouts", "fragments"
    pool = "memoire.tables.rollouts.pool:RolloutPool"
    offers = (TakesPushes, HasRoom, BelongsToRun, HandsOutOnce)
    instead = "take(steps)"

    def _check_rollouts(self, settings: TableSettings, *, is_full_said: bool) -> None:
        check_once(settings.parameters, self.name)

    def check_parameters(self, parameters: Parameters) -> None:
        """Refuse parameters of samples that are drawn again, or paced."""
        check_once(parameters, self.name)

    def limiter(self, settings: TableSettings, pool: TablePool) -> Parameters | Limiter:
        """The room that there is."""
        from .rollouts.queue import RoomLimiter

        assert isinstance(pool, HasRoom)
        return RoomLimiter(settings.parameters, pool.capacity if settings.on_full == "wait" else 0)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity, "is_bounded": settings.on_full == "oldest"}


class PromptsKind(Kind):
    """Prompts for language models, the columns being those of an answer."""

    name = holds = "prompts"
    pool = "memoire.tables.prompts.pool:PromptPool"
    saved = "memoire.tables.prompts.pool:PromptRecord"
    offers = (HasRoom, AnswersPrompts, SavesRows)
    instead = "memoire.Prompts"
    no_pushes = "this table stores prompts, which are answered by ANSWERS: use memoire.Prompts"

    def schema_class(self) -> type[Schema]:
        """No column of an answer has a role."""
        from memoire.replay.schema import RowSchema

        return RowSchema

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """The columns of an answer."""
        from memoire.replay.schema import row_schema_from

        return row_schema_from("schema", given)

    def own_settings(self, given: Mapping[str, Any]) -> PromptSettings | None:
        """Of groups and their answers."""
        from .prompts.settings import PromptSettings

        return PromptSettings(**given)

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse what does not fit the columns, and parameters of samples that are drawn again."""
        super().check(settings, is_full_said=False)
        assert settings.prompts is not None
        settings.prompts.check(settings.schema, settings.parameters)
        check_once(settings.parameters, self.name)

    def check_parameters(self, parameters: Parameters) -> None:
        """Refuse parameters of samples that are drawn again, or paced."""
        check_once(parameters, self.name)
        super().check_parameters(parameters)

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Nothing is pushed."""

    def making(self, settings: TableSettings) -> dict[str, Any]:
        """Those that groups and scores follow from."""
        assert settings.prompts is not None
        return settings.prompts.making(settings.schema)

    def make_pool(self, settings: TableSettings, place: PoolPlace) -> TablePool:
        """Refuse columns of which a request has no room for a value, too."""
        from .prompts.columns import check_requests

        check_requests(place.name, settings.schema, place.limits.request_bytes)
        return super().make_pool(settings, place)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        is_bounded = settings.on_full == "oldest"
        return {"capacity": settings.capacity, "is_bounded": is_bounded, "settings": settings.prompts}


class KeyedKind(Kind):
    """Rows by partition and key, with the fields that their writers name: what `memoire.tq` keeps."""

    name, holds = "keyed", "rows"
    pool = "memoire.tables.keyed.pool:KeyedPool"
    saved = "memoire.tables.keyed.pool:PartitionRecord KeyedRecord"
    offers = (HoldsRows,)
    instead = "memoire.tq"
    no_pushes = "this table stores rows by key, which are written by CHANGE_ROWS: use memoire.tq"
    has_columns = False
    why_whole = "clients of memoire.tq look for a key at one address alone. Save with tq.save_checkpoint, and load that"

    def schema_class(self) -> type[Schema]:
        """Rows have no columns."""
        from memoire.replay.schema import NoColumns

        return NoColumns

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """None is to be given, or a mapping without columns."""
        if given is not None and len(given):
            raise ParameterError(
                "schema", given, "left out with storage='keyed': rows have the fields that writers name"
            )
        return self.schema_class()({})

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse room for entries, which bytes alone limit, and parameters of samples."""
        super().check(settings, is_full_said=is_full_said)
        for name in ("capacity", "client_capacity"):
            if value := getattr(settings, name):
                raise ParameterError(name, value, "0 with storage='keyed': byte_limit says how much is held")
        check_once(settings.parameters, self.name)

    def check_parameters(self, parameters: Parameters) -> None:
        """Refuse parameters of samples that are drawn again, or paced."""
        check_once(parameters, self.name)
        super().check_parameters(parameters)

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Nothing is pushed."""

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {}


def check_once(parameters: Parameters, storage: str) -> None:
    """Refuse parameters of samples that are drawn again, or paced, for entries that are taken once.

    Raises:
        ParameterError: one is set.
    """
    instead = {
        "samples_per_insert_tolerance": f"None with storage={storage!r}: capacity says how far actors may be ahead",
        "min_size": f"0 with storage={storage!r}: take(steps) and draw(step, groups) wait for what they need",
        "max_times_sampled": f"0 with storage={storage!r}: each entry is handed out once",
        "sequence_length": f"0 with storage={storage!r}: fragments and answers are sequences already",
    }
    for name, expected in instead.items():
        if value := getattr(parameters, name):
            raise ParameterError(name, value, expected)


Storage = Literal["caches", "episodes", "rollouts", "prompts", "keyed"]
CACHES: Final = CachesKind()
KINDS: Final[dict[str, Kind]] = {
    kind.name: kind for kind in (CACHES, EpisodesKind(), RolloutsKind(), PromptsKind(), KeyedKind())
}
"""All kinds, by name."""


def named(storage: Any) -> Kind:
    """The kind of this name. Raises ParameterError."""
    try:
        return KINDS[storage]
    except (KeyError, TypeError):
        raise ParameterError("storage", storage, one_of(storage, KINDS)) from None


def names_of(capability: type) -> tuple[str, ...]:
    """The kinds whose pools offer this."""
    return tuple(kind.name for kind in KINDS.values() if capability in kind.offers)


def held_in(storage: str) -> str:
    """What tables of this storage hold, as figures call it."""
    kind = KINDS.get(storage)
    return storage if kind is None else kind.holds


def offers(storage: str, capability: type) -> bool:
    """Whether pools of tables of this storage can do this; not if the kind is not known here."""
    kind = KINDS.get(storage)
    return kind is not None and capability in kind.offers
