"""Timeouts and byte limits of the library, and the memory that the process's container allows; times are seconds, sizes
are bytes.

The clock of the machine: the default of everything that takes a clock.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from .arguments import (
    BYTES,
    FORMER,
    NUMBER,
    SECONDS,
    Setting,
    check_settings,
    checked_fields,
    declared,
    refuse_unknown,
    says_instead,
)  # fmt: skip
from .errors import ParameterError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
HELD_BYTES = 1 * GiB
"""Bytes that a server holds by default, if no container allows less."""
MODEL_BYTES = 1 * GiB
"""Bytes of models that a node keeps by default, if no container allows less."""
QUEUE_BYTES = 256 * MiB
"""Bytes that a proxy keeps for each server by default, if no container allows less."""
UNLIMITED_GROUP = 1 << 60
"""Bytes from which on a control group of version 1 means that there is no limit."""
NO_LIMIT = 2**53 - 1
"""Entries that a client may record where nothing holds it back: the most that a message can say."""
HEADER_BYTES = 96
"""What stands in front of each message's tail."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a table stores, and how much of it: settings of `memoire.Table`, flags of `memoire server`."""

    storage: Annotated[str, Setting(show="KIND")] = "caches"
    """What is stored: caches, episodes, rollouts, prompts, keyed, or a kind that an installed package adds."""
    capacity: Annotated[int, NUMBER] = 0
    """Entries of episodes that are stored; of rollouts, entries that may be recorded and not taken; prompts that are
    not over."""
    on_full: Annotated[str | None, Setting(choices=("wait", "oldest"))] = None
    """Of rollouts and prompts: if there is no room, others wait, or the oldest leave (default: wait)."""
    cache_limit: Annotated[int, NUMBER] = 0
    """Caches held; 0: limited by bytes only."""
    byte_limit: Annotated[int | None, Setting(unit="bytes", low=1)] = None
    """Of what is held, such as 4GiB (default: 1GiB, or half of the memory of its container)."""
    client_capacity: Annotated[int, NUMBER] = 0
    """Entries that each client's memory has room for; 0: the client chooses."""


class UsualSize(int):
    """A default size, of which a node takes less in a container that has no room for it."""


@checked_fields
@says_instead("Make others: Limits.of(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Limits for tests and experts: how often peers speak, and the sizes of what they say it with.

    Raises:
        ParameterError: a value is out of its range.
    """

    resend_after: Annotated[float, SECONDS] = 1.0
    """Seconds before the first resend of a request; doubles up to `resend_most`."""
    resend_most: Annotated[float, SECONDS] = 10.0
    """Most seconds between two resends."""
    update_every: Annotated[float, SECONDS] = 0.5
    """Seconds between two UPDATE messages of a client that has news."""
    account_timeout: Annotated[float, SECONDS] = 600.0
    """Seconds of silence after which a client's account leaves a server's memory; it comes back when the client speaks.
    That of a client that has ended leaves after `client_timeout`.
    """
    patience: Annotated[float, SECONDS] = 3600.0
    """Longest time that rows wait at an inference node, and that an observer waits for a job; more is refused."""
    new_clients_rate: Annotated[float, NUMBER] = 25.0
    """Clients that it may bring a second after that."""
    connection_clients_rate: Annotated[float, NUMBER] = 1.0
    """Clients that it may bring a second after that."""
    expected_clients: Annotated[int, NUMBER] = 300
    """Clients that a server or proxy should have file descriptors for; it warns at its start where it has not."""
    request_bytes: Annotated[int, BYTES] = 1 * MiB
    """Largest request or reply without a draw in it."""
    tail_bytes: Annotated[int, BYTES] = 512 * KiB
    """Largest msgpack tail of a message."""
    model_chunk: Annotated[int, BYTES] = 1 * MiB
    """Bytes of one chunk of a model body. A publisher sends a little less than `request_bytes` at most."""
    model_window: Annotated[int, NUMBER] = 4
    """Chunks of one body that may be asked for before the first of them has come."""
    model_spread: Annotated[float, SECONDS] = 0.5
    """Seconds within which clients begin with a large body if many ask for it, each at a random moment; less for
    smaller ones."""
    inline_model: Annotated[int, BYTES] = 16 * KiB
    """Largest body that travels inside its notice."""
    log_buffer_bytes: Annotated[int, BYTES] = 16 * MiB
    """Bytes of those lines; beyond, log() waits."""
    log_line_bytes: Annotated[int, BYTES] = 8 * KiB
    """Longest log line; the rest is cut off."""
    log_bytes: Annotated[int, BYTES] = 128 * MiB
    """Text of log lines that a state folder keeps; the oldest segment goes beyond, and leaves the search with it."""
    backup_every: Annotated[float, SECONDS] = 600.0
    """Seconds between two backups of a state folder's database; another one is made when it is closed."""

    def __post_init__(self) -> None:
        check_settings(self)


@checked_fields
@says_instead("Make others: Limits(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a node or client allows itself and its peers; every field can be set when one is made.

    Raises:
        ParameterError: a value is out of its range.
    """

    request_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds a request waits for its reply in all, resends included."""
    client_timeout: Annotated[float, SECONDS] = 60.0
    """Seconds of silence after which a client no longer counts, once its samples are used."""
    close_timeout: Annotated[float, SECONDS] = 2.0
    """Seconds that close() gives to what is still to be sent."""
    max_actors: Annotated[int, NUMBER] = 0
    """Actors that a server takes at once; further ones wait until one leaves. 0 is no bound."""
    held_bytes: Annotated[int, BYTES] = 0
    """Bytes that a server or inference node holds for its peers: caches, episodes, prompts, keyed rows, rows that wait
    for a batch, reports of clients, TD errors. Caches, episodes and rollouts overwrite their oldest; the others are
    refused. 0 is 1 GiB; in a container at most half of what its memory limit leaves.
    """
    credit: Annotated[int, BYTES] = 64 * MiB
    """Bytes of caches a client may have on the way to its home."""
    on_way_bytes: Annotated[int, BYTES] = 256 * MiB
    """Bytes of caches that all clients of a server together may have on the way, though each may always have one. A
    proxy's queue (`queue_bytes`) has room for as many, so that a server that is slow for a while loses none there.
    """
    message_bytes: Annotated[int, BYTES] = UsualSize(256 * MiB)
    """Largest cache or episode payload. A server has as many for requests, for pushes, for replies on their way and for
    kept replies, beside `held_bytes`; in a container, the default is so small that all four take at most a
    fourth of what its memory limit leaves beside `held_bytes`.
    """
    model_bytes: Annotated[int, BYTES] = 0
    """Bytes of models a node keeps over all topics; at least the newest of each is kept. A server refuses a model for
    which the newest ones of other topics leave no room. 0 is 1 GiB; in a container at most a fourth of what its memory
    limit leaves beside all others or a proxy's queues, and half of that for a server, which has as many for models on
    their way.
    """
    log_lines: Annotated[int, NUMBER] = 10_000
    """Lines a client keeps until its home has them; beyond, log() waits."""
    block_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds that a writer waits for room in the byte window where it may (on_full="block"); then it skips."""
    new_clients: Annotated[int, NUMBER] = 16384
    """Clients that one key (or everybody, without keys) may bring to a server at once; further ones have to wait."""
    connection_clients: Annotated[int, NUMBER] = 1024
    """Clients that one connection may bring at once to the server or proxy where it ends."""
    log_timeout: Annotated[float, SECONDS] = 1.0
    """Seconds that log() waits for room; then the line is not taken, and counted as dropped."""
    tuning: Tuning = Tuning()
    """The others, which a user has no reason to set."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Those in which these hold, by name; those of `tuning` are named as if they were here."""
        return cls().replace(**values)

    def replace(self, **changes: Any) -> Self:
        """The same with some changed; those of `tuning` are named as if they were here."""
        refuse_unknown("Limits", changes, LIMITS)
        own: dict[str, Any] = {}
        tuned: dict[str, Any] = {}
        for name, value in changes.items():
            (tuned if name in TUNED else own)[name] = value
        if tuned:
            own["tuning"] = replace(self.tuning, **tuned)
        return replace(self, **own)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of one, also of `tuning`; `default` where there is none of this name."""
        return getattr(self.tuning if name in TUNED else self, name, default)

    @property
    def reply_bytes(self) -> int:
        """Largest frame of a reply: a batch that is drawn far away, or what any other request is answered with."""
        tuning = self.tuning
        return max(self.message_bytes, tuning.request_bytes, tuning.tail_bytes + HEADER_BYTES)


TUNED = declared(Tuning)
"""Fields of `Tuning`, by name."""
LIMITS = declared(Limits) | TUNED
"""Every limit, by name."""
FORMER.update({name: ("tuning", f"It is one of limits.tuning: write Limits.of({name}=...).") for name in TUNED})


class ContainerLimit(NamedTuple):
    """The memory limit of a container: of a control group (cgroup) of Linux."""

    size: int
    """Bytes that all processes in it may have together; the kernel kills one of them beyond that."""
    file: Path
    """The file that says so."""


class Container:
    """The container that this process runs in, and the memory that its buffers and nodes reserve there.

    Processes do not know of each other: each may reserve the whole limit. The memory of a machine without such a limit
    refuses nothing: the machine may have swap, and a buffer takes pages only when entries fill them.

    Args:
        root: Where `/proc` and `/sys` are.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)
        self.sizes: dict[int, int] = {}
        """Bytes of each reservation, by its id."""

    @property
    def limit(self) -> ContainerLimit | None:
        """The least limit of this process's control group and of those around it, read now; None if there is none."""
        return min(self._limits(), default=None)

    def _limits(self) -> Iterator[ContainerLimit]:
        try:
            groups = (self._root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):  # no Linux
            return
        mounts = self._root / "sys" / "fs" / "cgroup"
        for group in groups:
            controllers, _, path = group.partition(":")[2].partition(":")
            if controllers == "":  # version 2; it is in "unified" if version 1 is mounted, too
                yield from _limits_of((mounts, mounts / "unified"), path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _limits_of((mounts / "memory",), path, "memory.limit_in_bytes")


class Reservation:
    """Memory of a container that one buffer or node may fill: until `release`, or until the reservation is garbage.

    Args:
        container: None has no limit.
    """

    def __init__(self, container: Container | None) -> None:
        self._container = container
        self._parts: dict[str, int] = {}

    def reserve(self, name: str, value: object, size: int, part: str = "") -> None:
        """Reserve so many bytes, in place of those before, for what a caller has asked for by a parameter.

        Args:
            name: The parameter.
            value: What it was set to.
            size: Bytes that this makes.
            part: What they are for, if this node reserves for several things.

        Raises:
            ParameterError: the container does not allow so much beside the other reservations. This one stays.
        """
        if self._container is None:
            return
        former = self._parts.get(part, 0)
        self._note(self._container, part, size)  # before it is checked: another thread may reserve meanwhile
        limit, others = self._limit_and_others(self._container, part)
        if limit is None or others + size <= limit.size:
            return
        self._note(self._container, part, former)
        reserved = f", of which other buffers and nodes of this process may fill {_mib(others)}" if others else ""
        expected = (
            f"smaller (it makes {_mib(size)} of memory, and the limit of this process's container is "
            f"{_mib(limit.size)} in {limit.file}{reserved}), or the limit larger"
        )
        raise ParameterError(name, value, expected)

    def _note(self, container: Container, part: str, size: int) -> None:
        self._parts[part] = size
        container.sizes[id(self)] = sum(self._parts.values())

    def default(self, name: str, usual: int, part: str = "", share: int = 2) -> int:
        """Return a size for what no caller has asked for: `usual`, or half of what the limit leaves beside the other
        reservations, if that is less. 0 for `usual` is any size; without a limit, it is returned.

        Args:
            name: The parameter that would have said it.
            part: As of `reserve`.
            share: In place of the half, this part.

        Raises:
            ParameterError: the limit leaves nothing.
        """
        limit, others = (None, 0) if self._container is None else self._limit_and_others(self._container, part)
        if limit is None:
            return usual
        left = (limit.size - others) // share
        if left < 1:
            expected = (
                f"set: the limit of this process's container is {_mib(limit.size)} in {limit.file}, and other buffers "
                f"and nodes of this process may fill {_mib(others)}, which leaves nothing for a default"
            )
            raise ParameterError(name, 0, expected)
        return min(usual or left, left)

    def limits(self, limits: Limits, others: Callable[[Limits], Limits], **copies: int) -> Limits:
        """Reserve what a node may fill of some limits: first those that were asked for, then what `others` reserves,
        and last the defaults, of which all copies of each take at most a fourth of what is left.

        Args:
            others: Is given the limits, and returns them with what it has set.
            copies: How often the node may fill `model_bytes`, and `message_bytes`: defaults are shared in this order.

        Returns:
            The limits with all of these sizes as they are.

        Raises:
            ParameterError: as `reserve` and `default`.
        """
        usual = {name: size for name in copies if (size := _usual(name, getattr(limits, name)))}
        for name in (each for each in copies if each not in usual):
            self.reserve(name, getattr(limits, name), copies[name] * getattr(limits, name), name)
        limits = others(limits)
        for name, size in usual.items():
            most = self.default(name, size, name, 4 * copies[name])
            self.reserve(name, most, copies[name] * most, name)
            limits = limits.replace(**{name: most})
        return limits

    def _limit_and_others(self, container: Container, part: str) -> tuple[ContainerLimit | None, int]:
        limit = container.limit
        if limit is not None and sum(container.sizes.values()) > limit.size:
            gc.collect()  # garbage reserves nothing
        return limit, sum(container.sizes.values()) - self._parts.get(part, 0)

    def release(self) -> None:
        """Leave the memory to others."""
        if self._container is not None:
            self._container.sizes.pop(id(self), None)
        self._parts.clear()

    __del__ = release


def _usual(name: str, size: int) -> int:
    """The default of a limit that was not asked for; 0 for one that was."""
    if name == "model_bytes" and not size:
        return MODEL_BYTES
    return int(size) if isinstance(size, UsualSize) else 0


def _limits_of(mounts: Iterable[Path], path: str, file: str) -> Iterator[ContainerLimit]:
    """Limits of a control group and of those around it, wherever they can be seen.

    In a container the mount may begin at the group itself, and `path` may be that outside: then the mount's own file
    has the limit.
    """
    parts = [part for part in path.split("/") if part]
    for mount in mounts:
        for depth in range(0 if ".." in parts else len(parts), -1, -1):
            where = mount.joinpath(*parts[:depth], file)
            try:
                size = int(where.read_text(encoding="ascii"))  # "max" is no limit
            except (OSError, ValueError):
                continue
            if size < UNLIMITED_GROUP:
                yield ContainerLimit(size, where)


def _mib(size: int) -> str:
    return f"{size / MiB:,.1f} MiB"


CONTAINER = Container()
"""That of this process."""


wall_clock: Callable[[], float] = time.time  # noqa: TID251
"""Seconds since 1970."""
