"""TD errors on their way back: to each server those of its own clients. Pure: no lock, no socket, no clock.

a batch's ids      7 9 7 8      server a has clients 7, 8      server b has client 9
a gets             7 7 8        b gets  9
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.pool.far import FarServer
from memoire.replay.schema import Schema
from memoire.wire import messages, pack
from memoire.wire.frames import Answer, Message
from memoire.wire.parts import Payload

from .server_stock import clients_of

MAX_FEEDBACK_SAMPLES = 1 << 14
"""Samples in one FEEDBACK message: below the longest request, whatever the size of a batch."""


@dataclass(frozen=True, slots=True)
class FeedbackPiece:
    """One FEEDBACK message; what ends it goes to `FeedbackRouter.answered`."""

    server: FarServer
    payload: Payload
    samples: int


class FeedbackRouter:
    """Parts feedback by server, and counts what became of it. Belongs to the reader's thread."""

    def __init__(self) -> None:
        self.lost = 0
        """Samples whose client no server has, or whose message was not answered."""

    def route(
        self,
        ids: NDArray[Any],
        errors: NDArray[np.float32],
        schema: Schema | None,
        clients: Iterable[tuple[FarServer, NDArray[np.uint64]]],
    ) -> list[FeedbackPiece]:
        """The messages to send.

        Args:
            ids: [B] of the samples.
            errors: [B], their TD errors.
            schema: Of the table; None before any server has answered, so that none has clients.
            clients: Each server with its clients, as `stock.clients_of` makes them; the first one that has a client
                gets its samples.
        """
        owners, left = clients_of(ids), np.ones(len(ids), bool)
        pieces = []
        for server, present in clients:
            mine = np.flatnonzero(left & np.isin(owners, present))
            left[mine] = False
            if not len(mine):
                continue
            assert schema is not None  # it came with the first clients
            rows, samples = (ids, errors) if len(mine) == len(ids) else (ids[mine], errors[mine])
            count = -(-len(mine) // MAX_FEEDBACK_SAMPLES)
            for begin in range(count):
                piece = slice(len(mine) * begin // count, len(mine) * (begin + 1) // count)
                payload = pack.pack_feedback(schema, rows[piece], samples[piece])
                pieces.append(FeedbackPiece(server, payload, piece.stop - piece.start))
        self.lost += int(left.sum())
        return pieces

    def answered(self, piece: FeedbackPiece, answer: Answer) -> None:
        """A message has ended by a reply or an error."""
        said = answer.body if isinstance(answer, Message) else None
        self.lost += said.lost if isinstance(said, messages.Taken) else piece.samples
