"""Settings of a server beside its tables: state folder, addresses, and objects shared with its process.

Each setting is declared once: `Server` takes these objects, and `memoire server` has their fields as flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from memoire.arguments import MAX_SECONDS, Setting, check_settings, checked_fields, explain_assignment_error
from memoire.errors import StateUnusable
from memoire.limits import wall_clock


@checked_fields
@explain_assignment_error("Make another one: State(..., NAME=...).")
@dataclass(frozen=True)
class State:
    """State folder of a server: totals, log lines, models and runs survive in its files, and a reply to a client means
    "on disk".

    Example:
        with memoire.Server("tcp://127.0.0.1:*", schema, state=memoire.State(folder)) as server:
            print(server.total_steps)  # of all servers that ran with this folder

    Raises:
        ParameterError: a value is out of its range.
    """

    folder: Annotated[str | Path, Setting(show="FOLDER", flag="state-dir")]
    """Folder of this server's own, where totals, log lines, models and runs survive; made if it does not exist
    (default: everything is in memory)."""
    _: KW_ONLY
    snapshot_caches: Annotated[bool, Setting()] = False
    """Keep the content of the tables in the state folder over an orderly restart; a killed server loses it."""
    snapshot_every: Annotated[float | None, Setting(unit="s", above=0.0, high=MAX_SECONDS)] = None
    """Save the content of the tables every so many seconds, too, so that a killed server restores the newest snapshot
    (samples drawn since then may be drawn once more)."""
    discard_mismatched: Annotated[bool, Setting()] = False
    """Start without saved content that is damaged or was made with other values than the present ones, such as another
    discount; else the start is refused, and the file stays."""

    must_exist: Annotated[bool, Setting(flag="state-must-exist")] = False
    """Refuse a state folder that does not exist, for example an unmounted volume: a server would begin at zero."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def from_setting(cls, state: str | Path | Self | None) -> Self | None:
        """Return a `State` for a folder, or the given `State` or None. Raises StateUnusable if `must_exist` fails."""
        state = state if state is None or isinstance(state, cls) else cls(state)  # type: ignore[arg-type]
        if state is not None and state.must_exist and not Path(state.folder).is_dir():
            raise StateUnusable(
                str(state.folder), "it does not exist", "Mount it, or leave must_exist out to create it."
            )
        return state

    @property
    def saves_memory(self) -> bool:
        """True if the server saves the content of its tables for a restart."""
        return self.snapshot_caches or self.snapshot_every is not None


@checked_fields
@explain_assignment_error("Make others: Endpoints(..., NAME=...).")
@dataclass(frozen=True)
class Endpoints:
    """Addresses of a server, such as "tcp://*:5560"; caches and notices use the next two ports by default.

    Example:
        endpoints = memoire.Endpoints("tcp://127.0.0.1:*", push="tcp://127.0.0.1:*")
        with memoire.Server(endpoints, schema) as server:
            print(server.endpoint)
    """

    request: str | None
    """Address for requests; None opens no address, and the caller adds workers later."""
    _: KW_ONLY
    push: str | None = None
    """Address for pushed caches and episodes."""
    publish: str | None = None
    """Address for notices of models."""

    @classmethod
    def from_setting(cls, endpoints: str | Self | None) -> Self:
        """Return `Endpoints` for a request address, or the given `Endpoints`."""
        return endpoints if isinstance(endpoints, cls) else cls(endpoints)  # type: ignore[arg-type]


@checked_fields
@explain_assignment_error("Make another one: Process(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Process:
    """Objects that a server shares with its process: context, clock and tuning.

    Example:
        with memoire.Server("tcp://127.0.0.1:*", schema, process=memoire.Process(tune=False)) as server:
            print(server.endpoint)
    """

    context: Any = None
    """ZeroMQ context; None is the one for the process. Addresses inproc:// need the same context on both sides."""
    clock: Callable[[], float] = wall_clock
    """Clock that returns seconds since 1970."""
    tune: bool = True
    """Tune this process for nodes at the first node that allows it: see docs/operations.md."""
