"""What readers draw: sums of clients' weights, and samples by these. Pure.

Nothing here changes what the dispatcher's lock guards: pools and limiters, which do the work, have locks of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.replay.limiter import ClusterSurplus
from memoire.server.state import ServerState
from memoire.tables.base import DrawsBatches
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import compression, containers, messages, types
from memoire.wire.frames import MessageHeader
from memoire.wire.receivers import ROW_PART, Page, Receiver, too_large
from memoire.wire.rows import counts_of


class DrawsHandler:
    """Answers readers.

    Args:
        can_undo: Whether a reader (its id) said that it can undo a compression. It holds the lock by itself.
    """

    def __init__(self, state: ServerState, can_undo: Callable[[bytes, str], bool]) -> None:
        self._state, self._can_undo = state, can_undo

    def sums(self, _: float, header: MessageHeader, body: messages.Sums, payload: Any) -> Reply:
        """Reserve samples for a reader, and tell it what there is of each client."""
        table, pool = self._asked(header)
        rows, is_whole = self._page(_reserve(pool, header.client, body), header.client, body.after)
        return Reply(
            messages.Summed(
                epoch=self._state.epoch,
                clients=rows.tobytes(),
                finished=self._state.run.finished,
                is_whole=is_whole,
                standing=_standing(table, header.client, body),
                parameters=table.parameters.fingerprint,
            )
        )

    def draw(self, now: float, header: MessageHeader, body: messages.Draw, _: Any) -> Reply:
        """Draw as many samples of each client as a reader asks for, and tell it what there is now."""
        (table, pool), reader = self._asked(header), header.client
        parameters = table.parameters
        counts = counts_of(body.counts)
        self._check_rows(pool, reader, body)
        page = Page(self._receiver(reader), types.DRAWN, reader)
        codec = self._compression(table, reader, body.packed)
        payload = pool.draw_counts(reader, counts, now=now, compression=codec, page=page)
        rows, is_whole = self._page(_reserve(pool, reader, body), reader, b"" if body.in_pages else None)
        if payload is not None:
            table.limiter.drew(containers.samples_of(payload), has_band=body.band is not None)
        drawn = messages.Drawn(
            epoch=self._state.epoch,
            clients=rows.tobytes(),
            finished=self._state.run.finished,
            is_whole=is_whole,
            standing=_standing(table, reader, body),
            parameters=parameters.fingerprint,
        )
        return Reply(drawn, payload)

    def _asked(self, header: MessageHeader) -> tuple[OpenTable, DrawsBatches]:
        """The table that a request is about, and its pool. Raises ProtocolError (code "table") if none draws there."""
        table = self._state.table(header)
        return table, table.asked(DrawsBatches, header.type.name)

    def _check_rows(self, pool: DrawsBatches, reader: bytes, body: messages.Draw) -> None:
        """Refuse a draw whose reply has more rows of clients than its reader takes, before a sample is taken.

        Raises:
            ProtocolError: (code "too_large") it has.
        """
        if not body.in_pages:
            size, most = _reserve(pool, reader, body).nbytes, int(self._receiver(reader).tail_bytes * ROW_PART)
            if size > most:
                raise too_large("DRAWN, whose rows", size, most, "tail_bytes", reader)

    def _page(self, rows: NDArray[np.void], reader: bytes, after: bytes | None) -> tuple[NDArray[np.void], bool]:
        """As many rows as fit into half of a tail, and whether these are all that are left.

        Args:
            after: Client of the last row that came; None takes all of them.
        """
        room = max(1, self._receiver(reader).tail_bytes // 2 // rows.itemsize)
        if after is None or (not after and len(rows) <= room):
            return rows, True
        names = np.frombuffer(rows["client"].tobytes(), "S16")
        order = np.argsort(names, kind="stable")
        begin = int(np.searchsorted(names[order], np.bytes_(after), "right")) if after else 0
        return rows[order[begin : begin + room]], begin + room >= len(rows)

    def _receiver(self, reader: bytes) -> Receiver:
        return self._state.receivers.of(reader)

    def _compression(self, table: OpenTable, reader: bytes, is_chosen: bool) -> str:
        """How frames travel to a reader: by lz4 if the parameters say so, or leave it to the reader, and both have it.
        zlib is for actors: a server that packed every batch by it would do little else.
        """
        wanted = table.parameters.compression
        if not (wanted == "lz4" or (wanted == "auto" and is_chosen)) or "lz4" not in compression.codecs():
            return "none"
        return "lz4" if self._can_undo(reader, "lz4") else "none"


def _reserve(pool: DrawsBatches, reader: bytes, body: messages.Sums | messages.Draw) -> NDArray[np.void]:
    """Keep for a reader what it asks for: see `Pool.reserve`."""
    return pool.reserve(reader, body.reserve, body.elsewhere, (body.part, body.of), body.wanted)


def _standing(table: OpenTable, reader: bytes, body: messages.Sums | messages.Draw) -> messages.ServerRate | None:
    """Tell a table's limiter what a reader says of all servers, and the reader what the limiter says of this one."""
    table.limiter.wants(reader, body.wanted)
    if body.band is not None:
        table.limiter.told(ClusterSurplus(*msgspec.structs.astuple(body.band)))
    standing = table.limiter.standing()
    return None if standing is None else messages.ServerRate(*standing)
