"""Kinds of tables: what each says of itself, what answers for its tables may know of their server, and how it is found.

    Table(storage="rollouts") ──▶ named("rollouts") ──▶ KIND of memoire.tables.rollouts
    Table(storage="stack")    ──▶ named("stack")    ──▶ add(kind), or an entry point "stack" of the group memoire.tables

    Kind ──▶ Table: settings, checks     a server: pool, handlers, records     a client: actor side

    request ──▶ the server's dispatcher ──▶ Handler(now, header, body, payload) ──▶ Reply
    └ Desk: which table, how large a reply, which life of the server

A kind is loaded when its name is first said, and its sides when they are needed. Others ask `Kind`, or a table for what
its pool can do (`base`): only a kind's own package names it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from memoire.arguments import one_of
from memoire.errors import NotInstalled, ParameterError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema, schema_from
from memoire.wire import layout, messages, types

if TYPE_CHECKING:
    from memoire.replay.limiter import Limiter
    from memoire.wire.byte_budget import ByteHolder
    from memoire.wire.frames import MessageHeader
    from memoire.wire.receivers import Page

    from .base import RecordBody, TablePool

C = TypeVar("C")


class Reply(NamedTuple):
    """Body and payload of an answer, and the header's fields that differ from the request's."""

    body: messages.Body
    payload: Any = None
    changed: Mapping[str, int] = {}
    until_saved: bool = False
    """Whether it must not leave before what it says is on disk, if the server saves anything."""


Handler = Callable[[float, "MessageHeader", Any, Any], Reply]
"""Called with the time in seconds since 1970, header, body and payload of a request. It may raise ProtocolError."""


class AskedTable(Protocol):
    """What an answer may know of a table."""

    limiter: Limiter

    def asked(self, capability: type[C], what: str) -> C:
        """Its pool, which can do this. Raises ProtocolError if it cannot; `what` names the message."""


class Desk(Protocol):
    """What an answer may know of its server. Nothing here changes what the lock of the server's dispatcher guards."""

    epoch: int
    """Number of this start of the server."""
    limits: Limits
    requests: ByteHolder
    """What a request takes while it is answered."""

    @property
    def finished(self) -> bool:
        """Whether the run is over."""

    def table(self, header: MessageHeader) -> AskedTable:
        """The table that a header names. Raises ProtocolError if there is none, or it has another schema."""

    def page(self, client: bytes, kind: types.Type) -> Page:
        """An empty reply of this type to a client: a part of what a message may have, the rest is for the next one."""


def loaded(place: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


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
    def own(self) -> Any:
        """Those that only tables of this kind have: an object of `Kind.settings`; None if it has none."""


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


ONLY_AGAIN: Final = {
    "samples_per_insert_tolerance": "None with storage={0!r}: capacity says how far actors may be ahead",
    "min_size": "0 with storage={0!r}: take(steps) and draw(step, groups) wait for what they need",
    "max_times_sampled": "0 with storage={0!r}: each entry is handed out once",
    "sequence_length": "0 with storage={0!r}: fragments and answers are sequences already",
}
"""Parameters of samples that are drawn again, or paced, and what is expected of them where entries are taken once."""


class Kind:
    """What is said of a kind of table where no table needs to be loaded. Its sides are named "module:name", and each
    process loads those that it needs.
    """

    name: ClassVar[str]
    """As `storage` says it."""
    holds: ClassVar[str]
    """What a table holds, as its figures call it."""
    unit: ClassVar[str] = "entries"
    """What is drawn or taken of that, as its figures call it."""
    room: ClassVar[str] = "entries"
    """What `capacity` counts, as its figures call it."""
    weighed: ClassVar[str] = "Of what is held."
    """What the weights are whose spread is shown, as a sentence."""
    counted: ClassVar[tuple[str, ...]] = ()
    """Settings of a table that follow from others if they are not given."""
    pool: ClassVar[str]
    """The class of its pools, at a server."""
    figures: ClassVar[str] = ""
    """The class of the figures that only its tables have (`PoolStats.own`)."""
    saved: ClassVar[str] = ""
    """The records of a snapshot that are its own, "module:class class"."""
    answers: ClassVar[str] = ""
    """What its server answers: a function of a `Desk` that returns a `Handler` for each body."""
    actor: ClassVar[str] = ""
    """Its `ActorSide`, at a client; "" if clients push nothing to it."""
    settings: ClassVar[str] = ""
    """A dataclass or Struct of the settings that only its tables have. It says what it is made of by `making(schema)`,
    and `check(schema, parameters)` refuses values."""
    offers: ClassVar[tuple[str, ...]]
    """What its pool can do: names of the classes that it derives from, of `base` or of the kind's own."""
    instead: ClassVar[str] = "get_batch(batch_size)"
    """How a learner gets what is held."""
    far: ClassVar[str] = ""
    """What a learner far away asks of it beside draws: a `calls.FarSide`."""
    no_pushes: ClassVar[str] = ""
    """Why nothing is pushed to it, where nothing is."""
    is_once: ClassVar[bool] = False
    """Whether each entry is handed out once."""
    may_wait: ClassVar[bool] = False
    """Whether those who bring something may wait for room (`on_full`)."""
    has_rollouts: ClassVar[bool] = False
    """Whether `rollout_length` has a meaning."""
    has_columns: ClassVar[bool] = True
    """Whether its entries have columns that a schema names."""
    why_whole: ClassVar[str] = ""
    """Why a snapshot of it cannot be shared out among servers, where it cannot."""

    def pool_class(self) -> type[Any]:
        """The class of its pools."""
        found: type[Any] = loaded(self.pool)
        return found

    def own_figures(self) -> type[Any] | None:
        """The class of the figures that only its tables have; None if they have none."""
        return loaded(self.figures) if self.figures else None

    def record_bodies(self) -> list[type[RecordBody]]:
        """What its pools write into a snapshot."""
        module, _, names = self.saved.partition(":")
        return [loaded(f"{module}:{name}") for name in names.split()]

    def handlers(self, desk: Desk) -> Mapping[type[messages.Body], Handler]:
        """What answers the messages that are its own."""
        return loaded(self.answers)(desk) if self.answers else {}

    def schema_class(self) -> type[Schema]:
        """What describes its columns."""
        return Schema

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """The columns that somebody asks for. Raises SchemaError, WrongType."""
        return schema_from(given)

    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings that only its tables have."""
        return tuple(inspect.signature(loaded(self.settings)).parameters) if self.settings else ()

    def own_settings(self, given: Mapping[str, Any]) -> Any:
        """The settings that only its tables have, made of keywords; None if it has none. Raises ParameterError."""
        return loaded(self.settings)(**given) if self.settings else None

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Refuse settings that this kind has no use for, or that do not fit. Raises ParameterError.

        Args:
            is_full_said: Whether `on_full` was given.
        """
        if settings.cache_limit:
            expected = f"0 with storage={self.name!r}: capacity says how many {self.room}"
            raise ParameterError("cache_limit", settings.cache_limit, expected)
        self._check_rest(settings, is_full_said=is_full_said)

    def _check_rest(self, settings: TableSettings, *, is_full_said: bool) -> None:
        if is_full_said and settings.on_full and not self.may_wait:
            expected = f"nothing with storage={self.name!r}: it is for storage='rollouts'"
            raise ParameterError("on_full", settings.on_full, expected)
        self.check_parameters(settings.parameters)
        if settings.own is not None:
            settings.own.check(settings.schema, settings.parameters)

    def check_parameters(self, parameters: Parameters) -> None:
        """Refuse parameters that this kind has no use for. Raises ParameterError."""
        if parameters.rollout_length and not self.has_rollouts:
            expected = f"0 with storage={self.name!r}: it is for storage='rollouts'"
            raise ParameterError("rollout_length", parameters.rollout_length, expected)
        for name, expected in ONLY_AGAIN.items() if self.is_once else ():
            if value := getattr(parameters, name):
                raise ParameterError(name, value, expected.format(self.name))

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Refuse parameters with which an actor would find out that what it pushes is too large to be sent, or to be
        held. Raises ParameterError.
        """
        if self.no_pushes:
            return
        size_of = partial(layout.episode_bytes, settings.schema)
        count = "rollout_length", max(1, parameters.rollout_length), "entries", "entry"
        limits.check(count, size_of, {"message_bytes": limits.push_bytes})

    def limiter(self, settings: TableSettings, pool: TablePool) -> Limiter:
        """What limits drawing and recording."""
        from memoire.replay.limiter import Limiter

        return Limiter(settings.parameters, pool.entries)

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Size of the largest messages that usually come, by `container.usual_bytes`; 0 where it cannot be known."""
        return 0

    def making(self, settings: TableSettings) -> dict[str, Any]:
        """Settings beside the parameters that what is held is made with: plain values, by name."""
        made: dict[str, Any] = {} if settings.own is None else settings.own.making(settings.schema)
        return made

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


DEFAULT: Final = "caches"
"""The kind of a table that names none."""
BUILT_IN: Final = {
    "caches": "tables.caches", "episodes": "tables.episodes", "rollouts": "tables.rollouts", "prompts": "prompts",
    "keyed": "keyed",
}  # fmt: skip
"""Those of memoire, and the package of each, which has its `KIND`. The last two are extensions."""
_ADDED: Final[dict[str, Kind]] = {}


def add(kind: Kind) -> Kind:
    """Register a kind from outside of memoire in this process; returns it. Raises ParameterError if another one has its
    name.
    """
    if kind.name in BUILT_IN or _ADDED.setdefault(kind.name, kind) is not kind:
        raise ParameterError("storage", kind.name, "a name that no other kind of table has")
    return kind


def find(storage: Any) -> Kind | None:
    """The kind of this name; None if it is not known here."""
    if not isinstance(storage, str):
        return None
    return _ADDED.get(storage) or _installed(storage)


@lru_cache(256)
def _installed(storage: str) -> Kind | None:
    if storage in BUILT_IN:
        try:
            kind: Kind = importlib.import_module(f"memoire.{BUILT_IN[storage]}").KIND
        except ModuleNotFoundError as error:
            if error.name != f"memoire.{BUILT_IN[storage]}":
                raise
            return None  # its folder was left out of this installation
        return kind
    for point in importlib.metadata.entry_points(group=types.GROUP, name=storage):
        return add(point.load())
    return None


def built_in() -> tuple[Kind, ...]:
    """Those of memoire that this installation has."""
    return tuple(filter(None, map(find, BUILT_IN)))


def known() -> tuple[Kind, ...]:
    """Those of memoire, and those that are registered."""
    return (*built_in(), *_ADDED.values())


def named(storage: Any) -> Kind:
    """The kind of this name. Raises ParameterError, or NotInstalled: its folder was left out of this installation."""
    kind = find(storage)
    if kind is None and storage in BUILT_IN:
        raise NotInstalled(f"memoire.{BUILT_IN[storage]}", "pip install --force-reinstall memoire-rl")
    if kind is None:
        raise ParameterError("storage", storage, one_of(storage, [each.name for each in known()]))
    return kind


def names_of(capability: type) -> tuple[str, ...]:
    """The known kinds whose pools offer this."""
    return tuple(kind.name for kind in known() if capability.__name__ in kind.offers)


def held_in(storage: str) -> str:
    """What tables of this storage hold, as figures call it."""
    kind = find(storage)
    return storage if kind is None else kind.holds


def words_of(storage: str) -> Kind | type[Kind]:
    """The words for tables of this storage; those of any kind if it is not known here."""
    return find(storage) or Kind


def offers(storage: str, capability: type) -> bool:
    """Whether pools of tables of this storage can do this; not if the kind is not known here."""
    kind = find(storage)
    return kind is not None and capability.__name__ in kind.offers


def setting_names(storage: Any = None) -> tuple[str, ...]:
    """Names of the settings that only tables of some kind have, of those that are known or that `storage` names."""
    kinds = dict.fromkeys((*known(), *filter(None, [find(storage)])))
    return tuple(name for kind in kinds for name in kind.setting_names())


def own_settings(kind: Kind, given: dict[str, Any]) -> Any:
    """Take from keywords the settings that only tables of this kind have; None if it has none.

    Raises:
        ParameterError: one is for another kind.
    """
    own = {name: given.pop(name) for name in kind.setting_names() if name in given}
    for name, value in given.items():
        if others := [each.name for each in known() if name in each.setting_names()]:
            expected = f"nothing with storage={kind.name!r}: it is for storage={' or '.join(map(repr, others))}"
            raise ParameterError(name, value, expected)
    return kind.own_settings(own)
