"""What a server is told beside its tables: what survives it, where it listens, and what it shares with its process.

Each setting is declared once: `Server` takes these objects, and `memoire server` has their fields as flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from memoire.arguments import FOR_EVER, Setting, check_settings, checked_fields, says_instead
from memoire.errors import StateUnusable
from memoire.limits import wall_clock


@checked_fields
@says_instead("Make another one: State(..., NAME=...).")
@dataclass(frozen=True)
class State:
    """What survives a server, in files of a folder of its own: totals, log lines, models and runs live on in it, and a
    reply to a client means "on disk".

    Raises:
        ParameterError: a value is out of its range.
    """

    folder: Annotated[str | Path, Setting(show="FOLDER", flag="state-dir")]
    """Folder of this server's own, where totals, log lines, models and runs survive it; made when it is not there
    (default: everything is in memory)."""
    _: KW_ONLY
    snapshot_caches: Annotated[bool, Setting()] = False
    """Keep what the server holds in the state folder over an orderly restart; one that is killed loses it."""
    snapshot_every: Annotated[float | None, Setting(unit="s", above=0.0, high=FOR_EVER)] = None
    """Keep it there while the server goes on, too, so that one that is killed has again what it held then (of caches,
    samples that were drawn since may be drawn once more)."""
    discard_mismatched: Annotated[bool, Setting()] = False
    """Start without what was kept so, if it is damaged or was made with other values than hold now, such as another
    discount; else the start is refused, and the file stays."""

    must_exist: Annotated[bool, Setting(flag="state-must-exist")] = False
    """Refuse a state folder that is not there, as where its volume is not mounted: a server would begin at zero."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, given: str | Path | Self | None) -> Self | None:
        """A folder is one with nothing else; None is none. Raises StateUnusable: it is not there, and has to be."""
        state = given if given is None or isinstance(given, cls) else cls(given)  # type: ignore[arg-type]
        if state is not None and state.must_exist and not Path(state.folder).is_dir():
            raise StateUnusable(
                str(state.folder), "it is not there", "Mount it, or leave must_exist out to have it made."
            )
        return state

    @property
    def saves_memory(self) -> bool:
        """Whether the server saves the content of its tables, to have it again after a restart."""
        return self.snapshot_caches or self.snapshot_every is not None


@checked_fields
@says_instead("Make others: Endpoints(..., NAME=...).")
@dataclass(frozen=True)
class Endpoints:
    """Addresses of a server, such as "tcp://*:5560", where those for caches and notices are not beside the first."""

    request: str | None
    """For requests; None opens none: workers are added afterwards."""
    _: KW_ONLY
    push: str | None = None
    """Where caches come in."""
    publish: str | None = None
    """Where notices go out."""

    @classmethod
    def of(cls, given: str | Self | None) -> Self:
        """Those beside an address."""
        return given if isinstance(given, cls) else cls(given)  # type: ignore[arg-type]


@checked_fields
@says_instead("Make another one: Process(NAME=...).")
@dataclass(frozen=True, kw_only=True)
class Process:
    """What a server shares with its process."""

    context: Any = None
    """ZeroMQ context; None is the one for the process. Addresses inproc:// need the same one on both sides."""
    clock: Callable[[], float] = wall_clock
    """Seconds since 1970."""
    tune: bool = True
    """Let this process be tuned for nodes, the first time that one asks for it: see docs/operations.md."""
