"""The threads beside an inference node's sockets: one runs batches, one after the other, one makes weights ready.

io ──batch, weights──▶ memoire-batches ──outputs──▶ io     weights are chosen when it begins
io ──newest model────▶ memoire-weights ──weights──▶ io
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class SerialThread:
    """Runs functions one after the other in a thread of its own.

    Args:
        is_newest_only: A function that has not begun makes room for the next one.
    """

    def __init__(self, name: str, *, is_newest_only: bool = False) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_newest_only = is_newest_only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def run(self, function: Callable[[], None]) -> None:
        """Have the thread call this. From any thread."""
        self._waiting.put(function)

    def trouble(self) -> list[str]:
        """Why a restart is needed, in words: the thread died. Empty while it lives or was never started."""
        is_dead = self._thread.ident is not None and not self._thread.is_alive()
        return [f"thread {self._thread.name} has died: its log says why"] if is_dead else []

    def stop(self, timeout: float) -> bool:
        """End after the function that runs now; False if it has not ended after these seconds."""
        self._waiting.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            try:
                function()
            except Exception:
                _log.exception("%s: a function failed", self._thread.name)

    def _next(self) -> Callable[[], None] | None:
        function = self._waiting.get()
        while self._is_newest_only and function is not None and not self._waiting.empty():
            function = self._waiting.get()
        return function
