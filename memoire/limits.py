"""Timeouts and byte limits of nodes and clients, and the memory limit of the container of the process.

Times are in seconds, sizes in bytes. `wall_clock` is the default of every argument `clock`.
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
    explain_assignment_error,
    refuse_unknown,
)  # fmt: skip
from .errors import ParameterError

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
HELD_BYTES = 1 * GiB
"""Default of the bytes that a server holds, if its container does not limit them further."""
MODEL_BYTES = 1 * GiB
"""Default of the bytes of models that a node keeps, if its container does not limit them further."""
QUEUE_BYTES = 256 * MiB
"""Default of the bytes in a proxy's queue for one server, if its container does not limit them further."""
UNLIMITED_GROUP = 1 << 60
"""Smallest number of bytes that means "no limit" in a control group of version 1."""
NO_LIMIT = 2**53 - 1
"""Entries that a client may record if its server sets no limit: the largest number in a message."""
HEADER_BYTES = 96
"""Bytes of a message before its tail, at most."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Kind and capacity of a table: settings of `memoire.Table`, and flags of `memoire server`."""

    storage: Annotated[str, Setting(show="KIND")] = "caches"
    """Kind of table: caches, episodes, rollouts, prompts, keyed, or a kind that an installed package adds."""
    capacity: Annotated[int, NUMBER] = 0
    """Episodes: number of entries that the table stores. Rollouts: entries that are recorded and not yet taken.
    Prompts: prompts that are not finished."""
    on_full: Annotated[str | None, Setting(choices=("block", "drop_oldest"))] = None
    """Rollouts and prompts: if the table is full, new ones wait ("block", the default), or the oldest are dropped."""
    cache_limit: Annotated[int, NUMBER] = 0
    """Number of caches that the table holds; 0: only byte_limit bounds them."""
    byte_limit: Annotated[int | None, Setting(unit="bytes", low=1)] = None
    """Bytes that the table holds, such as 4GiB (default: 1GiB, or half of the memory of the container)."""
    client_capacity: Annotated[int, NUMBER] = 0
    """Entries in the memory of each client; 0: the client chooses."""


class UsualSize(int):
    """Default size that a node reduces if its container has too little memory."""


@checked_fields
@explain_assignment_error("Create a new object: Limits.of(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Limits for tests and experts: intervals between messages, and sizes of messages.

    Raises:
        ParameterError: A value is out of its range.
    """

    resend_after: Annotated[float, SECONDS] = 1.0
    """Seconds before the first resend of a request; doubles up to `resend_most`."""
    resend_most: Annotated[float, SECONDS] = 10.0
    """Most seconds between two resends."""
    update_every: Annotated[float, SECONDS] = 0.5
    """Seconds between two UPDATE messages of a client that has something to report."""
    account_timeout: Annotated[float, SECONDS] = 600.0
    """Seconds without a message after which a server removes the account of a client from memory. The next message of
    the client brings it back. The account of a client that has ended is removed after `client_timeout`.
    """
    patience: Annotated[float, SECONDS] = 3600.0
    """Longest timeout in seconds of a request to an inference node, and of an observer's request for a job. Longer
    timeouts are refused."""
    new_clients_rate: Annotated[float, NUMBER] = 25.0
    """New clients a second that one key may bring to a server after the first `new_clients`."""
    connection_clients_rate: Annotated[float, NUMBER] = 1.0
    """New clients a second that one connection may bring after the first `connection_clients`."""
    expected_clients: Annotated[int, NUMBER] = 300
    """Clients for which a server or proxy needs file descriptors. If there are too few, it warns when it starts."""
    request_bytes: Annotated[int, BYTES] = 1 * MiB
    """Largest request or reply in bytes, except replies with a batch."""
    tail_bytes: Annotated[int, BYTES] = 512 * KiB
    """Largest msgpack tail of a message in bytes."""
    model_chunk: Annotated[int, BYTES] = 1 * MiB
    """Bytes of one chunk of a model. The chunks of a publisher are always a little smaller than `request_bytes`."""
    model_window: Annotated[int, NUMBER] = 4
    """Chunks of one model that a client requests before the first of them has arrived."""
    model_spread: Annotated[float, SECONDS] = 0.5
    """Longest random delay in seconds before a client downloads a large model that many clients want; shorter for
    smaller models."""
    inline_model: Annotated[int, BYTES] = 16 * KiB
    """Largest model in bytes that is sent inside the notice of its new version."""
    log_buffer_bytes: Annotated[int, BYTES] = 16 * MiB
    """Bytes of log lines that a client keeps until its home has them. If they are full, log() waits."""
    log_line_bytes: Annotated[int, BYTES] = 8 * KiB
    """Longest log line in bytes; the rest is cut off."""
    log_bytes: Annotated[int, BYTES] = 128 * MiB
    """Bytes of log lines that a state folder keeps. Beyond it, the oldest segment is deleted and no longer searched."""
    backup_every: Annotated[float, SECONDS] = 600.0
    """Seconds between two backups of the database in a state folder. Closing the server makes another backup."""

    def __post_init__(self) -> None:
        check_settings(self)


@checked_fields
@explain_assignment_error("Create a new object: Limits(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts and limits of a node or client, as keyword arguments.

    Raises:
        ParameterError: A value is out of its range.
    """

    request_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds that a request waits for its reply, including all resends."""
    client_timeout: Annotated[float, SECONDS] = 60.0
    """Seconds without a message after which a client no longer counts as present, once its samples are used."""
    close_timeout: Annotated[float, SECONDS] = 2.0
    """Seconds in which close() still sends queued messages."""
    max_actors: Annotated[int, NUMBER] = 0
    """Actors that a server accepts at the same time. Further actors wait until one leaves. 0 means no limit."""
    held_bytes: Annotated[int, BYTES] = 0
    """Bytes that a server or inference node holds for its peers: caches, episodes, prompts, keyed rows, rows that wait
    for a batch, reports of clients, TD errors. If they are full, new caches, episodes and rollouts overwrite the
    oldest; everything else is refused. 0 means 1 GiB, but in a container at most half of the remaining memory.
    """
    credit: Annotated[int, BYTES] = 64 * MiB
    """Bytes of caches that a client may have sent to its home without an acknowledgement."""
    on_way_bytes: Annotated[int, BYTES] = 256 * MiB
    """Bytes of caches that all clients of a server together may have sent without an acknowledgement. Each client may
    always send one. A proxy's queue (`queue_bytes`) has the same size, so that it loses none while a server is slow.
    """
    message_bytes: Annotated[int, BYTES] = UsualSize(256 * MiB)
    """Largest payload of a cache or episode in bytes. A server reserves this size four times beside `held_bytes`: for
    requests, for pushes, for replies that are being sent and for kept replies. In a container, the default is so small
    that all four take at most a fourth of the memory that `held_bytes` leaves.
    """
    model_bytes: Annotated[int, BYTES] = 0
    """Bytes of models that a node keeps for all topics together. A node always keeps the newest model of each topic; a
    server refuses a model for which the newest models of other topics leave no room. 0 means 1 GiB, but in a container
    at most a fourth of the memory that the other limits and a proxy's queues leave. A server takes half of that, since
    it reserves the same size for models that are being sent.
    """
    log_lines: Annotated[int, NUMBER] = 10_000
    """Log lines that a client keeps until its home has them. If they are full, log() waits."""
    block_timeout: Annotated[float, SECONDS] = 10.0
    """Seconds that a writer with on_full="block" waits for room in the byte window, before it skips the cache."""
    new_clients: Annotated[int, NUMBER] = 16384
    """New clients that one key may bring to a server at once, or all clients together if the server has no keys.
    Further clients have to wait."""
    connection_clients: Annotated[int, NUMBER] = 1024
    """New clients that one connection may bring at once to a server or proxy."""
    log_timeout: Annotated[float, SECONDS] = 1.0
    """Seconds that log() waits for room. After that, the line is dropped and counted."""
    tuning: Tuning = Tuning()
    """Further limits, for tests and experts."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return limits with these values, by name; names of `Tuning` are allowed, too."""
        return cls().replace(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some values changed, by name; names of `Tuning` are allowed, too."""
        refuse_unknown("Limits", changes, LIMITS)
        own: dict[str, Any] = {}
        tuned: dict[str, Any] = {}
        for name, value in changes.items():
            (tuned if name in TUNED else own)[name] = value
        if tuned:
            own["tuning"] = replace(self.tuning, **tuned)
        return replace(self, **own)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a limit, also one of `tuning`, or `default` if there is no limit of this name."""
        return getattr(self.tuning if name in TUNED else self, name, default)

    @property
    def reply_bytes(self) -> int:
        """Bytes of the largest frame in a reply, such as a batch for a learner in another process."""
        tuning = self.tuning
        return max(self.message_bytes, tuning.request_bytes, tuning.tail_bytes + HEADER_BYTES)


TUNED = declared(Tuning)
"""Fields of `Tuning`, by name."""
LIMITS = declared(Limits) | TUNED
"""Every limit, by name."""
FORMER.update({name: ("tuning", f"It is a field of limits.tuning: write Limits.of({name}=...).") for name in TUNED})


class ContainerLimit(NamedTuple):
    """Memory limit of a container, from a control group (cgroup) of Linux."""

    size: int
    """Bytes that all processes in the container may use together. Beyond this limit, the kernel kills a process."""
    file: Path
    """File of the control group that contains the limit."""


class MemoryLimits:
    """Container of this process, with the memory that buffers and nodes of the process have reserved in it.

    Processes do not share reservations: each may reserve the whole limit. Without a limit nothing is refused, since the
    machine may have swap, and a buffer takes pages only when entries fill them.

    Args:
        root: Folder that contains `/proc` and `/sys`.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self._root = Path(root)
        self.sizes: dict[int, int] = {}
        """Bytes of each `Reservation`, by the id of the object."""

    @property
    def limit(self) -> ContainerLimit | None:
        """Smallest limit of the control groups of this process, read at each access; None if there is no limit."""
        return min(self._limits(), default=None)

    def _limits(self) -> Iterator[ContainerLimit]:
        try:
            groups = (self._root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):  # no Linux
            return
        mounts = self._root / "sys" / "fs" / "cgroup"
        for group in groups:
            controllers, _, path = group.partition(":")[2].partition(":")
            if controllers == "":  # version 2, mounted in "unified" beside version 1
                yield from _limits_of((mounts, mounts / "unified"), path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _limits_of((mounts / "memory",), path, "memory.limit_in_bytes")


class Reservation:
    """Reservation of memory in a container by one buffer or node, until `release` or until it is garbage-collected.

    Args:
        container: Container of the process; None means no limit.
    """

    def __init__(self, container: MemoryLimits | None) -> None:
        self._container = container
        self._parts: dict[str, int] = {}

    def reserve(self, name: str, value: object, size: int, part: str = "") -> None:
        """Reserve the bytes that an argument of the caller needs, instead of the former bytes of the same part.

        Args:
            name: Name of the argument.
            value: Value of the argument.
            size: Bytes to reserve.
            part: Purpose of the bytes, if the node reserves several parts.

        Raises:
            ParameterError: The other reservations leave too little memory in the container. The former reservation
                of the part stays.
        """
        if self._container is None:
            return
        former = self._parts.get(part, 0)
        self._note(self._container, part, size)  # noted before the check: another thread may reserve meanwhile
        limit, others = self._limit_and_others(self._container, part)
        if limit is None or others + size <= limit.size:
            return
        self._note(self._container, part, former)
        reserved = f", of which other buffers and nodes of this process may fill {_mib(others)}" if others else ""
        raise ParameterError.with_text(
            f"{name}={value!r} needs {_mib(size)} of memory, but the limit of this process's container is "
            f"{_mib(limit.size)} ({limit.file}){reserved}. Set a smaller {name}, or raise the limit. Nothing was "
            f"changed."
        )

    def _note(self, container: MemoryLimits, part: str, size: int) -> None:
        self._parts[part] = size
        container.sizes[id(self)] = sum(self._parts.values())

    def default(self, name: str, usual: int, part: str = "", share: int = 2) -> int:
        """Return the default size of a part: `usual`, or a share of the free memory of the container, if that is less.

        Args:
            name: Name of the argument that the caller did not set.
            usual: Bytes if the container has enough memory; 0 means as many as possible. Without a limit, it is
            returned.
            part: Purpose of the bytes, as in `reserve`.
            share: Divisor of the free memory; 2 means at most half of it.

        Raises:
            ParameterError: The other reservations leave no memory.
        """
        limit, others = (None, 0) if self._container is None else self._limit_and_others(self._container, part)
        if limit is None:
            return usual
        left = (limit.size - others) // share
        if left < 1:
            raise ParameterError.with_text(
                f"{name} has no default here: the limit of this process's container is {_mib(limit.size)} "
                f"({limit.file}), and other buffers and nodes of this process may fill {_mib(others)}. Set {name}."
            )
        return min(usual or left, left)

    def limits(self, limits: Limits, others: Callable[[Limits], Limits], **copies: int) -> Limits:
        """Reserve the sizes in a node's limits: first sizes that the caller set, then sizes of `others`, then defaults.

        All copies of a default together take at most a fourth of the free memory.

        Args:
            others: Reserves further memory; takes the limits and returns them with the sizes that it has set.
            copies: Number of times that the node may fill `model_bytes` and `message_bytes`, in the order in which
                defaults are reserved.

        Returns:
            The limits with the reserved sizes.

        Raises:
            ParameterError: The container has too little memory, as in `reserve` and `default`.
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

    def _limit_and_others(self, container: MemoryLimits, part: str) -> tuple[ContainerLimit | None, int]:
        limit = container.limit
        if limit is not None and sum(container.sizes.values()) > limit.size:
            gc.collect()  # reservations of garbage are released
        return limit, sum(container.sizes.values()) - self._parts.get(part, 0)

    def release(self) -> None:
        """Give the reserved memory back to the container."""
        if self._container is not None:
            self._container.sizes.pop(id(self), None)
        self._parts.clear()

    __del__ = release


def _usual(name: str, size: int) -> int:
    """Return the default size of a limit that the caller did not set; 0 if the caller set it."""
    if name == "model_bytes" and not size:
        return MODEL_BYTES
    return int(size) if isinstance(size, UsualSize) else 0


def _limits_of(mounts: Iterable[Path], path: str, file: str) -> Iterator[ContainerLimit]:
    """Yield the limits of a control group and of the groups that contain it, as far as they are visible.

    Inside a container, the mount may begin at the group itself while `path` is the path outside of the container. In
    that case the file in the mount itself has the limit.
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


CONTAINER = MemoryLimits()
"""Container of this process."""


wall_clock: Callable[[], float] = time.time  # noqa: TID251
"""Clock of the machine: returns seconds since 1970."""
