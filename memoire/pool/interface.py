"""What a table's pool is to those who use it, whatever the form in which its samples came.

    Intake       what arrives: caches or episodes, clients' sums and signs of life; and the limits that make room
    Drawable     what goes out, here and to far readers, and what learners correct
    Inspectable  figures, and copies of what is held

A caller asks for the smallest of them that it needs. `AnyPool` is all three, for what owns a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from memoire.limits import Limits
from memoire.replay.batch import GatheredSamples
from memoire.replay.memory_state import SavedLayout
from memoire.replay.parameters import Parameters
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page

from .draw import PooledBatch
from .inspection import MAX_INSPECTED, Distribution, PeekedSample
from .stats import PoolStats

DEFAULTS: Final = Limits()


class Intake(Protocol):
    """Takes in what clients push and report. Thread-safe."""

    @property
    def byte_limit(self) -> int:
        """Bytes that it may hold."""

    @property
    def capacity(self) -> int:
        """Entries there is room for; 0 where it holds no entries, but samples of them."""

    @property
    def least_bytes(self) -> int:
        """Bytes that it can be limited to at least."""

    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> Any:
        """What was pushed, completely checked, ready for `add`; its `samples` says how many.

        Args:
            body: The message, of the type that is stored here.
            checksum: The header's, where `messages.parse` was told not to compare it.

        Raises:
            ProtocolError: and nothing else, whatever the bytes.
        """

    def add(self, client_id: bytes, sequence: int, held: Any) -> int:
        """Hold what `check` returned; returns how much had to make room. Raises ProtocolError."""

    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A client's newest sums; returns whether they were newer than those known."""

    def heard(self, client_id: bytes) -> None:
        """A sign of life without news."""

    def goodbye(self, client_id: bytes) -> None:
        """A client has ended."""

    def forget(self, client_id: bytes) -> int:
        """Drop a client and what it alone holds; returns the samples lost."""

    def expire(self) -> int:
        """Let silent clients and readers go now; returns how many clients left."""

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters; returns how many caches or episodes had to go.

        Args:
            discard_mismatched: Let go what was made with other values, and is a reason to refuse them else.

        Raises:
            ParameterError: nothing was changed.
        """

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches or episodes had to go."""

    def clear(self) -> int:
        """Let everything go that is held; clients, readers and those who wait stay. Returns how much went."""


class Drawable(Protocol):
    """Hands samples out, and takes corrections of their priorities. Thread-safe."""

    @property
    def owner(self) -> bytes:
        """The id under which ids name its entries: priorities for them are set here. b"" where clients own them."""

    @property
    def parameters(self) -> Parameters:
        """Those that draws follow now."""

    def entries(self) -> int:
        """Entries that can be drawn, or whose samples can come."""

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: GatheredSamples | Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a batch, all of it or nothing; its ids are [B] of dtype `batch.ID`. Raises as `Pool.get`."""

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """What a reader may draw: rows [C] of `rows.CLIENT_SUMS`, one for each client."""

    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: Page | None = None,
    ) -> Payload | None:
        """The payload of a DRAWN message, for rows [C] of `rows.CLIENT_COUNTS`; None where nothing was there.
        Raises ProtocolError, and takes nothing, where the page of the reply has no room.
        """

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set priorities of entries by a learner's TD errors, both [N]: (applied, stale); None where `owner` is not
        this pool's.
        """

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""


class Inspectable(Protocol):
    """Shows what it holds, and goes on meanwhile. Thread-safe."""

    def stats(self) -> PoolStats:
        """A frozen picture."""

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How what is held is spread; `most` samples of it are looked at, and nothing is changed."""

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """A copy of a random sample, as likely as in a draw, or of the entry that owner and number name. It is not
        taken by that; None where nothing is held, or that entry is not.
        """

    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said, before anything is put back.

        Args:
            is_same: Whether this is the pool that it was, in its next life: then its generator, if `state` has one, and
                the counts of one life go on, too.
        """

    def saved_layout(self) -> tuple[SavedLayout, int] | None:
        """Where entries lie, and a number that is another one after any change of an entry. None where what `walk`
        gives, in its order, says all.
        """

    @property
    def is_untouched(self) -> bool:
        """Whether nothing ever came in or was drawn: then it can go on as another pool that was saved."""

    def walk(self) -> Iterator[Any]:
        """All that is held, one by one: for a snapshot. `put_back` takes it."""


class AnyPool(Intake, Drawable, Inspectable, Protocol):
    """Where a table's samples are."""

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on, which has no more than the others leave; before anything comes in."""

    def close(self) -> None:
        """Wake everyone who waits (they raise Closed) and let everything go."""
