"""The thread of a client of keyed rows: one channel to each server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from memoire.errors import Closed, MemoireError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.net.channel import Channel, open_channels
from memoire.net.context import Context
from memoire.net.thread import Worker
from memoire.security.keyfolder import Keys
from memoire.wire import messages
from memoire.wire.frames import Answer, Message


class KeyedThread:
    """Owns the channels.

    Args:
        client: 16 bytes, the id of whoever asks.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self, urls: Sequence[str], *, client: bytes, limits: Limits, keys: Keys | None, context: Context
    ) -> None:
        self._limits = limits
        self._worker = Worker("memoire-tq", self._turn, self._next_time, self._at_end)
        self._channels: dict[str, Channel] = {}
        facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys, "numbers": itertools.count(1)}
        open_channels(self._channels, urls, self._worker, context, **facts)

    def start(self) -> None:
        """Begin."""
        self._worker.start()

    def ask(self, url: str, body: messages.Body, payload: Any = None) -> Future[Message]:
        """Send a request to one server. From any thread.

        The future has its reply, or MemoireTimeout after `limits.request_timeout`, or why it was refused.
        """
        made: Future[Message] = Future()

        def finish(answer: Answer) -> None:
            if made.cancelled():
                return
            if isinstance(answer, MemoireError):
                made.set_exception(answer)
            elif isinstance(answer.body, messages.KeyedRows | messages.Welcome):
                made.set_result(answer)
            else:
                made.set_exception(Refused(url, "unexpected", f"{answer.type.name} came"))

        deadline = time.monotonic() + self._limits.request_timeout
        self._worker.post(lambda: self._send(url, body, finish, deadline, payload))
        return made

    def _send(self, url: str, body: messages.Body, finish: Any, deadline: float, payload: Any) -> None:
        try:
            self._channels[url].ask(body, finish, deadline, payload=payload)
        except (MemoireError, ValueError) as error:
            finish(ProtocolError("value", str(error)))

    def stop(self, timeout: float) -> bool:
        """End; False if it has not ended in these seconds."""
        return self._worker.stop(timeout)

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        return min(channel.next_time() for channel in self._channels.values())

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self._channels.values():
            channel.turn(ready)

    def _at_end(self) -> None:
        for channel in self._channels.values():
            channel.close(Closed("this client"))
