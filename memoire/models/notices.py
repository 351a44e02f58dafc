"""Notices of models: what they say, and to whom and when each is said again.

A model is announced once when it is published, with its body where that is small. Who was not there yet, or whose
notice or subscription was lost on the way, hears of it from the repetitions, which carry no body: whoever has the
version already ignores them. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memoire.limits import Limits
from memoire.wire import messages
from memoire.wire.frames import encode
from memoire.wire.identity import topic_frame

from .model import Model, ModelStore

MAX_INLINE = Limits().request_bytes // 2
"""Bytes of a body that a notice may have: a publisher cannot know what its subscribers take, and all take this."""
REPEAT_INTERVAL = 5.0
"""Seconds between two notices of the newest model of each topic."""
GATHER_INTERVAL = 0.05
"""Seconds for which subscriptions are gathered before their topics are announced again: a notice goes to everybody, so
one for each of a thousand actors that join would be a million.
"""


class Notices:
    """Which models are to be announced again, and when. Belongs to the thread that publishes.

    Args:
        now: time.monotonic().
    """

    def __init__(self, now: float) -> None:
        self._all_at = now + REPEAT_INTERVAL
        self._asked: set[bytes] = set()
        self._asked_at = float("inf")

    def subscribed(self, subscriptions: Iterable[bytes], models: ModelStore, now: float) -> None:
        """Peers subscribed to this; an empty subscription is to everything."""
        known = {b"", *(topic_frame(topic) for topic in models.versions())}
        self._asked.update(known.intersection(subscriptions))  # a stranger's topics are not kept
        if self._asked:
            self._asked_at = min(self._asked_at, now + GATHER_INTERVAL)

    def next_time(self) -> float:
        """When `due` has something."""
        return min(self._all_at, self._asked_at)

    def due(self, models: ModelStore, now: float) -> list[Model]:
        """The models to announce again now."""
        if now >= self._all_at:
            self._all_at, asked = now + REPEAT_INTERVAL, {b""}
        elif now >= self._asked_at:
            asked = self._asked
        else:
            return []
        self._asked, self._asked_at = set(), float("inf")
        return newest_of(models, asked)


def notice_of(model: Model, limits: Limits, *, home: int = 0, epoch: int, run: int, again: bool = False) -> list[Any]:
    """Frames that tell subscribers of a model; a small body is in them, unless the notice is repeated.

    Args:
        home, epoch: Hash of the name of the server that it was published at, and its epoch.
        run: Hash of the run's name: clients of another run ignore the notice.
    """
    body = messages.Notice(
        topic=model.topic,
        version=model.version,
        size=model.size,
        checksum=model.checksum,
        text=model.is_text,
        epoch=epoch,
    )
    inline = model.body if 0 < model.size <= min(limits.inline_model, MAX_INLINE) and not again else None
    return [topic_frame(model.topic), *encode(body, home=home, run=run, payload=inline)]


def newest_of(models: ModelStore, subscriptions: Iterable[bytes]) -> list[Model]:
    """The newest model of each topic that was subscribed to; an empty subscription is to all of them."""
    asked = set(subscriptions)
    return [
        model
        for topic in models.versions()
        if (b"" in asked or topic_frame(topic) in asked) and (model := models.newest(topic)) is not None
    ]
