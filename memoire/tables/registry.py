"""Registry of kinds of tables: the interface of a kind, the server's view for handlers, and the lookup by name.

    Table(storage="rollouts") ──▶ named("rollouts") ──▶ KIND of memoire.tables.rollouts
    Table(storage="stack")    ──▶ named("stack")    ──▶ add(kind), or an entry point "stack" of the group memoire.tables

    Kind ──▶ Table: settings, checks     a server: pool, handlers, records     a client: actor side

    request ──▶ the server's dispatcher ──▶ Handler(now, header, body, payload) ──▶ Reply
    └ HandlerContext: the table, the size of a reply, the start number of the server

A kind is loaded at the first use of its name, and its sides are loaded at their first use. Modules outside of a kind
ask `Kind`, or a table for the capabilities of its pool (`base`); only a kind's own package names the kind.
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
    from memoire.wire.receivers import ReplyPage

    from .base import RecordBody, TablePool

C = TypeVar("C")


class Reply(NamedTuple):
    """Body and payload of a reply, and the header fields that differ from the request's header."""

    body: messages.Body
    payload: Any = None
    changed: Mapping[str, int] = {}
    until_saved: bool = False
    """True if the reply must wait until its content is on disk, if the server has a store."""


Handler = Callable[[float, "MessageHeader", Any, Any], Reply]
"""Called with the time in seconds since 1970, header, body and payload of a request. May raise ProtocolError."""


class TableView(Protocol):
    """View of a table for request handlers."""

    limiter: Limiter

    def require_for(self, capability: type[C], what: str) -> C:
        """Return the pool if it has this capability, else raise ProtocolError; `what` names the message."""


class HandlerContext(Protocol):
    """View of the server for request handlers. No handler changes state that the dispatcher's lock guards."""

    epoch: int
    """Number of this start of the server, to tell restarts apart."""
    limits: Limits
    requests: ByteHolder
    """Holder of the bytes that a request needs while it is answered."""

    @property
    def finished(self) -> bool:
        """True if the run is over."""

    def table(self, header: MessageHeader) -> TableView:
        """Return the table that a header names. Raise ProtocolError if the table is unknown or its schema differs."""

    def empty_page(self, client: bytes, kind: types.Type) -> ReplyPage:
        """Return an empty reply of this type to a client, limited to a part of a message's bytes."""


def import_object(path: str) -> Any:
    """Return the object that "module:name" names, after importing the module."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class TableSettings(Protocol):
    """Settings of a `Table` that a kind reads."""

    @property
    def schema(self) -> Schema:
        """Columns of the table's entries."""

    @property
    def parameters(self) -> Parameters:
        """Parameters at the table's creation."""

    @property
    def capacity(self) -> int:
        """Maximum number of entries in the table."""

    @property
    def cache_limit(self) -> int:
        """Maximum number of held caches."""

    @property
    def client_capacity(self) -> int:
        """Maximum number of entries in each client's memory."""

    @property
    def on_full(self) -> str:
        """Behaviour of a full table: "block" or "drop_oldest"."""

    @property
    def own(self) -> Any:
        """Settings that only tables of this kind have: an object of `Kind.settings`, or None."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Server-side arguments for creating a pool: table name, limits and seed."""

    name: str
    byte_limit: int
    """Initial maximum number of bytes that the pool may hold."""
    limits: Limits
    seed: int | None
    """Seed of the pool's draws; None for a random one."""


class PushLimits(NamedTuple):
    """Maximum sizes of a push to a table, in bytes."""

    push_bytes: int
    """Current maximum size of a message."""
    message_bytes: int
    """Maximum size of a message if the server starts with larger messages."""
    byte_limit: int | None = None
    """Maximum bytes of the table, if they limit a push too."""

    def check(self, counted: tuple[str, int, str, str], size_of: Callable[[int], int], most: Mapping[str, int]) -> None:
        """Raise ParameterError if a message with this count of items exceeds one of the sizes in `most`.

        Args:
            counted: Name of the parameter that sets the count, its value, and the items' names in plural and singular.
            size_of: Function that returns the bytes of a count.
            most: Maximum bytes, by the name of the limit.
        """
        name, count, what, one = counted
        limit, allowed = min(most.items(), key=itemgetter(1))
        if size_of(count) <= allowed:
            return
        fitting = layout.most_fitting(size_of, allowed)
        if fitting < 1:
            raise ParameterError(limit, allowed, f"at least {size_of(1)}, the bytes of one {one}")
        reason = f"{count} {what} take {size_of(count)} bytes, and {limit} is {allowed}"
        where = f"{name}={fitting} is an argument of every server, of Table and of configure"
        larger = f"{limit} must be larger; {where}"
        if limit == "message_bytes" and allowed < self.message_bytes:
            reason = f"{count} {what} take {size_of(count)} bytes, and a push to this server has at most {allowed}"
            larger = f"the server must start with {name}={count}"
        raise ParameterError(name, count, f"at most {fitting} ({reason}), or {larger}")


RESAMPLING_PARAMETERS: Final = {
    "samples_per_insert_tolerance": "None with storage={0!r}, because capacity limits how far actors may be ahead",
    "min_size": "0 with storage={0!r}, because take(steps) and draw(step, groups) wait for the entries they need",
    "max_times_sampled": "0 with storage={0!r}, because each entry is handed out once",
    "sequence_length": "0 with storage={0!r}, because fragments and answers are already sequences",
}
"""Expected values of parameters for repeated or paced sampling, in tables that hand each entry out once."""


class Kind:
    """Description of a kind of table, available without loading any table code. Sides of a kind are named
    "module:name"; each process loads only the sides that it needs.
    """

    name: ClassVar[str]
    """Name of the kind in the setting `storage`."""
    holds: ClassVar[str]
    """Plural noun for the held items in the figures' texts."""
    unit: ClassVar[str] = "entries"
    """Plural noun for the drawn or taken items in the figures' texts."""
    room: ClassVar[str] = "entries"
    """Plural noun for the items that `capacity` counts, in the figures' texts."""
    weighed: ClassVar[str] = "Weights of the held items."
    """Sentence that explains the weights in a table's distribution."""
    counted: ClassVar[tuple[str, ...]] = ()
    """Settings of a table that are derived from other settings if omitted."""
    pool: ClassVar[str]
    """Class of the kind's pools, at a server."""
    figures: ClassVar[str] = ""
    """Class of the figures that only this kind has (`PoolStats.own`)."""
    saved: ClassVar[str] = ""
    """Classes of the kind's own snapshot records, "module:class class"."""
    answers: ClassVar[str] = ""
    """Function that maps a `HandlerContext` to the server's `Handler` for each body of the kind."""
    actor: ClassVar[str] = ""
    """The kind's `ActorSide`, at a client; "" if clients push nothing to the table."""
    settings: ClassVar[str] = ""
    """Dataclass or Struct of the settings that only this kind has. The class' `making(schema)` returns the values that
    content is made with, and `check(schema, parameters)` raises ParameterError for bad values.
    """
    offers: ClassVar[tuple[str, ...]]
    """Capabilities of the kind's pool: names of base classes, from `base` or from the kind's package."""
    instead: ClassVar[str] = "get_batch(batch_size)"
    """Call by which a learner gets the content, for error messages."""
    far: ClassVar[str] = ""
    """The `calls.LearnerSide` of a remote learner, for requests other than draws."""
    no_pushes: ClassVar[str] = ""
    """Reason why clients push nothing to the table, or ""."""
    is_once: ClassVar[bool] = False
    """True if each entry is handed out once."""
    may_wait: ClassVar[bool] = False
    """True if producers may wait for room (`on_full`)."""
    has_rollouts: ClassVar[bool] = False
    """True if `rollout_length` applies to the kind."""
    has_columns: ClassVar[bool] = True
    """True if a schema names the columns of the entries."""
    why_whole: ClassVar[str] = ""
    """Reason why a snapshot of the table cannot be shared out among servers, or ""."""

    def pool_class(self) -> type[Any]:
        """Return the class of the kind's pools."""
        pool: type[Any] = import_object(self.pool)
        return pool

    def own_figures(self) -> type[Any] | None:
        """Return the class of the figures that only this kind has, or None."""
        return import_object(self.figures) if self.figures else None

    def record_bodies(self) -> list[type[RecordBody]]:
        """Return the classes of the kind's own snapshot records."""
        module, _, names = self.saved.partition(":")
        return [import_object(f"{module}:{name}") for name in names.split()]

    def handlers(self, context: HandlerContext) -> Mapping[type[messages.Body], Handler]:
        """Return the handlers of the kind's own messages."""
        return import_object(self.answers)(context) if self.answers else {}

    def schema_class(self) -> type[Schema]:
        """Return the class of the kind's schemas."""
        return Schema

    def schema_from(self, columns: Schema | Mapping[str, Any] | None) -> Schema:
        """Return the schema for columns that a caller passed. Raise SchemaError or WrongType."""
        return schema_from(columns)

    def setting_names(self) -> tuple[str, ...]:
        """Return the names of the settings that only this kind has."""
        return tuple(inspect.signature(import_object(self.settings)).parameters) if self.settings else ()

    def own_settings(self, options: Mapping[str, Any]) -> Any:
        """Return the kind's own settings, made of keywords, or None if the kind has none. Raise ParameterError."""
        return import_object(self.settings)(**options) if self.settings else None

    def check(self, settings: TableSettings, *, is_full_said: bool) -> None:
        """Raise ParameterError if settings do not apply to this kind, or do not fit together.

        Args:
            is_full_said: True if the caller passed `on_full`.
        """
        if settings.cache_limit:
            expected = f"0 with storage={self.name!r}, because capacity limits the number of {self.room}"
            raise ParameterError("cache_limit", settings.cache_limit, expected)
        self._check_rest(settings, is_full_said=is_full_said)

    def _check_rest(self, settings: TableSettings, *, is_full_said: bool) -> None:
        if is_full_said and settings.on_full and not self.may_wait:
            expected = f"omitted with storage={self.name!r}; it is a setting of storage='rollouts'"
            raise ParameterError("on_full", settings.on_full, expected)
        self.check_parameters(settings.parameters)
        if settings.own is not None:
            settings.own.check(settings.schema, settings.parameters)

    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if parameters do not apply to this kind."""
        if parameters.rollout_length and not self.has_rollouts:
            expected = f"0 with storage={self.name!r}; it is a setting of storage='rollouts'"
            raise ParameterError("rollout_length", parameters.rollout_length, expected)
        for name, expected in RESAMPLING_PARAMETERS.items() if self.is_once else ():
            if value := getattr(parameters, name):
                raise ParameterError(name, value, expected.format(self.name))

    def check_messages(self, settings: TableSettings, parameters: Parameters, limits: PushLimits) -> None:
        """Raise ParameterError if actors' pushes would be too large to send or to hold under these parameters."""
        if self.no_pushes:
            return
        size_of = partial(layout.episode_bytes, settings.schema)
        count = "rollout_length", max(1, parameters.rollout_length), "entries", "entry"
        limits.check(count, size_of, {"message_bytes": limits.push_bytes})

    def limiter(self, settings: TableSettings, pool: TablePool) -> Limiter:
        """Return the rate limiter of drawing and recording."""
        from memoire.replay.limiter import Limiter

        return Limiter(settings.parameters, pool.entries)

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Return the usual size of the largest messages, by `container.usual_bytes`; 0 if the size is unknown."""
        return 0

    def content_settings(self, settings: TableSettings) -> dict[str, Any]:
        """Return settings, beside the parameters, that content is made with: plain values, by name."""
        values: dict[str, Any] = {} if settings.own is None else settings.own.content_settings(settings.schema)
        return values

    def differing_parameters(self, schema: Schema, ours: Parameters, others: Parameters) -> dict[str, tuple[Any, Any]]:
        """Return parameters that held content was made with and that differ: name -> (our value, other value). The
        default is empty: entries are held as recorded, and derived values are computed by the server.
        """
        return {}

    def make_pool(self, settings: TableSettings, place: PoolPlace) -> TablePool:
        """Return an empty pool. Raise ParameterError if the settings do not fit."""
        pool: TablePool = self.pool_class()(
            settings.schema,
            settings.parameters,
            byte_limit=place.byte_limit,
            client_timeout=place.limits.client_timeout,
            **self._pool_options(settings, place),
        )
        return pool

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"capacity": settings.capacity}


DEFAULT: Final = "caches"
"""Kind of a table without the setting `storage`."""
BUILT_IN: Final = {
    "caches": "tables.caches", "episodes": "tables.episodes", "rollouts": "tables.rollouts", "prompts": "prompts",
    "keyed": "keyed",
}  # fmt: skip
"""Kinds of memoire with their packages, each of which has a `KIND`. The last two kinds are extensions."""
_ADDED: Final[dict[str, Kind]] = {}


def add(kind: Kind) -> Kind:
    """Register a kind from outside of memoire in this process and return the kind. Raise ParameterError if another kind
    has the same name.
    """
    if kind.name in BUILT_IN or _ADDED.setdefault(kind.name, kind) is not kind:
        raise ParameterError("storage", kind.name, "a name that no other kind of table has")
    return kind


def find(storage: Any) -> Kind | None:
    """Return the kind of this name, or None if the name is unknown in this process."""
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
            return None  # this installation lacks the kind's folder
        return kind
    for point in importlib.metadata.entry_points(group=types.GROUP, name=storage):
        return add(point.load())
    return None


def built_in() -> tuple[Kind, ...]:
    """Return the kinds of memoire that are installed."""
    return tuple(filter(None, map(find, BUILT_IN)))


def known_kinds() -> tuple[Kind, ...]:
    """Return the installed kinds of memoire, then the registered kinds."""
    return (*built_in(), *_ADDED.values())


def require_kind(storage: Any) -> Kind:
    """Return the kind of this name. Raise ParameterError, or NotInstalled if this installation lacks the kind."""
    kind = find(storage)
    if kind is None and storage in BUILT_IN:
        raise NotInstalled(f"memoire.{BUILT_IN[storage]}", "pip install --force-reinstall memoire-rl")
    if kind is None:
        raise ParameterError("storage", storage, one_of(storage, [each.name for each in known_kinds()]))
    return kind


def names_of(capability: type) -> tuple[str, ...]:
    """Return the names of known kinds whose pools have this capability."""
    return tuple(kind.name for kind in known_kinds() if capability.__name__ in kind.offers)


def items_noun(storage: str) -> str:
    """Return the figures' noun for the items in tables of this storage."""
    kind = find(storage)
    return storage if kind is None else kind.holds


def kind_or_default(storage: str) -> Kind | type[Kind]:
    """Return the kind of this storage for its nouns, or `Kind` with the general nouns if the storage is unknown."""
    return find(storage) or Kind


def has_capability(storage: str, capability: type) -> bool:
    """Return True if the storage is known and its pools have this capability."""
    kind = find(storage)
    return kind is not None and capability.__name__ in kind.offers


def setting_names(storage: Any = None) -> tuple[str, ...]:
    """Return the names of settings that belong to a single kind, of the known kinds and the kind named by `storage`."""
    kinds = dict.fromkeys((*known_kinds(), *filter(None, [find(storage)])))
    return tuple(name for kind in kinds for name in kind.setting_names())


def own_settings(kind: Kind, options: dict[str, Any]) -> Any:
    """Remove the settings of this kind from `options`; return them as an object, or None if the kind has none.

    Raises:
        ParameterError: a setting belongs to another kind.
    """
    values = {name: options.pop(name) for name in kind.setting_names() if name in options}
    for name, value in options.items():
        if others := [each.name for each in known_kinds() if name in each.setting_names()]:
            storage = " or ".join(map(repr, others))
            expected = f"omitted with storage={kind.name!r}; it is a setting of storage={storage}"
            raise ParameterError(name, value, expected)
    return kind.own_settings(values)
