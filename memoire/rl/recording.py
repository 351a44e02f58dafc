"""Where the samples of a `RolloutWorker` go: into a writer's table, in packets of any form, or nowhere.

reset ──▶ begin      step ──▶ record      end of an episode ──▶ end      before the process ends ──▶ flush
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memoire import Client
from memoire.errors import MemoireTimeout, ParameterError, Refused, WrongType
from memoire.kinds import PASSING

from .codec import PREPROCESSOR, Codec, copied, digest
from .crc import Marks
from .memory import NO_DONE
from .samples import Sample, columns_of, episodes_of

_log = logging.getLogger(__name__)

CONNECT_INTERVAL: Final = 10.0
"""Seconds between two lines about a server that does not answer yet."""
STREAM_TIMEOUT: Final = 0.0
"""Seconds that a step waits for room to send: none, since a device waits."""
FLUSH_TIMEOUT: Final = 10.0
"""Seconds that a flush waits for room."""

Compressor = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an environment."""

    obs: Any
    """Before it."""
    action: Any
    reward: Any
    terminated: bool
    truncated: bool
    next_obs: Any
    info: dict[str, Any]
    version: int
    """Of the model that acted."""


class Recorder:
    """Takes the samples of training episodes. This one keeps nothing: of a worker without a server."""

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """An episode begins with this observation, while the device did `action`."""

    def record(self, step: Step) -> None:
        """A step was made."""

    def end(self) -> None:
        """The episode is over, or given up."""

    def tested(self, length: int, returned: float) -> None:
        """A test episode was run: it has no samples, but a return that may be told."""

    def flush(self) -> None:
        """Send what is here."""


class Columns(Recorder):
    """Writes entries of a table with the environment's columns; its writer sends whole episodes."""

    def __init__(self, client: Client) -> None:
        self._writer = client.writer()
        self._is_open = False

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """What a former episode left open is given up."""
        self.end()

    def record(self, step: Step) -> None:
        """One entry."""
        self._writer.step(
            step.obs, step.action, step.reward, step.terminated, step.truncated, step.next_obs, step.info,
            model_version=step.version,
        )  # fmt: skip
        self._is_open = not (step.terminated or step.truncated)

    def end(self) -> None:
        """Store what is open as an episode that was truncated."""
        if self._is_open:
            self._writer.reset()
            self._is_open = False

    def flush(self) -> None:
        """As `end`: entries leave as whole episodes only."""
        self.end()


class Packets(Recorder):
    """Sends samples of any form, when an episode ends and there are enough of them.

    Args:
        client: Of a table that `samples.samples_table` made.
        compressor: Called as f(act, obs, rew, done, info) with each sample, or as f(act, obs, rew, terminated,
            truncated, info) if it takes six values; what it returns travels. None sends them as they are.
        least: Samples that are collected before they are sent.
        stream: Send within episodes, too, as soon as there are so many.
        marks: Puts into `info` by what a memory sees whether it rebuilds what was recorded; None is off.
        preprocessor: Of observations, which a memory has to call, too: its digest travels with each reset.
    """

    def __init__(
        self,
        client: Client,
        compressor: Compressor | None = None,
        least: int = 1,
        *,
        stream: bool = False,
        marks: Marks | None = None,
        preprocessor: Callable[..., Any] | None = None,
    ) -> None:
        self._preprocessor = digest(preprocessor)
        self._client, self._compressor = client, compressor
        self._least, self._stream, self._marks = least, stream, marks
        self._has_six = _takes_six(compressor)
        self._samples: list[Sample] = []
        self._episode = self._step = 0
        self._version = 0
        self._returned = 0.0
        self._last_obs: Any = None
        self._tested = (0, 0.0)  # length and return of a test episode that is not told yet
        self.dropped = 0
        """Samples that found no room on the way to the server."""

    def __len__(self) -> int:
        return len(self._samples)

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """The reset is a sample, and no step."""
        self._episode, self._step, self._returned = self._episode + 1, 0, 0.0
        tested, self._tested = self._tested, (0, 0.0)
        self._keep(Sample(action, obs, 0.0, False, False, info, True, self._episode, 0, 0.0, *tested))

    def record(self, step: Step) -> None:
        """One sample."""
        self._step, self._version = self._step + 1, step.version
        self._returned += float(step.reward)
        kept = (step.terminated, step.truncated, step.info, False, self._episode, self._step, float(step.reward))
        self._keep(Sample(step.action, step.next_obs, step.reward, *kept))
        if self._stream and len(self._samples) >= self._least:
            self._send(STREAM_TIMEOUT)

    def end(self) -> None:
        """Tell of the episode, and send if there is enough."""
        if self._step:
            self._client.on_episode(0, self._step, self._returned)
        self._step = 0
        if len(self._samples) >= self._least:
            self._send(FLUSH_TIMEOUT)

    def tested(self, length: int, returned: float) -> None:
        """Tell of it with the next reset."""
        self._tested = (length, returned)

    def flush(self) -> None:
        """Send all."""
        self._send(FLUSH_TIMEOUT)

    def _keep(self, sample: Sample) -> None:
        """Compress a sample and keep it. Truncation travels in `info`, too, as memories of five values expect it."""
        raw = sample._replace(info=dict(sample.info))
        made = self._compressed(raw)
        if sample.is_reset and isinstance(self._compressor, Codec):
            made = made._replace(info=self._compressor.marked(made.info))
        if sample.is_reset and self._preprocessor:
            made = made._replace(info={**made.info, PREPROCESSOR: self._preprocessor})
        if self._marks is not None:
            made = made._replace(info=self._marks.mark(made.info, self._transition(raw), raw.episode, raw.step))
        self._last_obs = raw.obs
        # Environments may write into the arrays that they returned: what is sent later is a copy.
        self._samples.append(made._replace(act=copied(made.act), obs=copied(made.obs)))

    def _compressed(self, raw: Sample) -> Sample:
        """A sample as it travels. Raises WrongType: the compressor returned something else than it was given."""
        if self._compressor is None:
            return _with_no_done(raw)
        raw = raw if self._has_six else _with_no_done(raw)
        given = raw[:6] if self._has_six else (*raw[:4], raw.info)
        made = self._compressor(*given)
        if not isinstance(made, tuple | list) or len(made) != len(given):
            found = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
            raise WrongType("sample_compressor's result", f"a tuple of the {len(given)} values that it takes", found)
        if self._has_six:
            return _with_no_done(Sample._make((*made, *raw[6:])))
        act, obs, rew, done, info = made
        return raw._replace(act=act, obs=obs, rew=rew, terminated=done, info=info)

    def _transition(self, raw: Sample) -> tuple[Any, ...] | None:
        """(last_obs, act, rew, new_obs, done) that ends with a sample; None of a reset's."""
        return None if raw.is_reset else (self._last_obs, raw.act, raw.rew, raw.obs, raw.terminated)

    def _send(self, timeout: float) -> None:
        samples, self._samples = self._samples, []
        for part in episodes_of(samples):
            steps = sum(not each.is_reset for each in part)
            columns = columns_of(part)
            if not self._client.push_episode(
                columns, model_version=self._version, steps=steps, is_cut=True, timeout=timeout
            ):
                self.dropped += len(part)
                _log.warning(
                    "%d samples found no room on the way to %s (%s); %d were lost so",
                    len(part), self._client.endpoint, self._client.push_reason, self.dropped,
                )  # fmt: skip


def _takes_six(compressor: Compressor | None) -> bool:
    """Whether a compressor takes terminated and truncated in place of done. Raises ParameterError: neither fits."""
    if compressor is None:
        return False
    try:
        signature = inspect.signature(compressor)
    except (TypeError, ValueError):  # of a function in C
        return False
    for count in (5, 6):
        with contextlib.suppress(TypeError):
            signature.bind(*range(count))
            return count == 6
    expected = "a function of (act, obs, rew, done, info), or of (act, obs, rew, terminated, truncated, info)"
    raise ParameterError("sample_compressor", f"a function of {signature}", expected)


def _with_no_done(sample: Sample) -> Sample:
    is_given_up = sample.truncated and not sample.terminated
    return sample._replace(info={**sample.info, NO_DONE: True}) if is_given_up else sample


def limit_of(samples: float) -> int:
    """Samples of an episode at most: a number, or infinity."""
    return 1 << 62 if math.isinf(samples) else int(samples)


def connected(
    connect_once: Callable[[float], Any], url: str, timeout: float, interval: float = CONNECT_INTERVAL
) -> Any:
    """What `connect_once(seconds)` makes, tried until it answers; says so each `interval` seconds.

    Raises:
        MemoireTimeout: nobody answered in `timeout` seconds.
        Refused: the server had no place for it all that time, or does not take it.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return connect_once(max(0.01, min(interval, left)))
        except (MemoireTimeout, Refused) as error:
            is_passing = isinstance(error, MemoireTimeout) or error.code in PASSING
            if left <= interval or not is_passing:
                raise
            why = "" if isinstance(error, MemoireTimeout) else f", which says: {error.text}"
            _log.warning("waiting for the server at %s%s; %.0f s more", url, why, left - interval)
