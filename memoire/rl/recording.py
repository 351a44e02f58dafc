"""Recorders of a `RolloutWorker`'s samples: `Columns` writes a table, `Packets` sends samples of any form.

reset ──▶ begin      step ──▶ record      end of an episode ──▶ end      before the process exits ──▶ flush
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
"""Seconds between two log lines about a server that does not answer yet."""
STREAM_TIMEOUT: Final = 0.0
"""Seconds that a step waits for room to send: 0, because a device cannot wait."""
FLUSH_TIMEOUT: Final = 10.0
"""Seconds that a flush waits for room."""

Compressor = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EnvStep:
    """One step of an environment."""

    obs: Any
    """Observation before the step."""
    action: Any
    reward: Any
    terminated: bool
    truncated: bool
    next_obs: Any
    info: dict[str, Any]
    version: int
    """Version of the model that acted."""


class Recorder:
    """Recorder of a worker's training episodes. The base class keeps nothing; a worker without a server uses it."""

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """Begin an episode with this observation, during which the device did `action`."""

    def record(self, step: EnvStep) -> None:
        """Record one step of the open episode."""

    def end(self) -> None:
        """End the open episode, complete or not."""

    def record_test_episode(self, length: int, returned: float) -> None:
        """Note a test episode, which has no samples; its length and return may be reported."""

    def flush(self) -> None:
        """Send all samples that are still held."""


class Columns(Recorder):
    """Recorder that writes entries into a table with the environment's columns. The writer sends whole episodes."""

    def __init__(self, client: Client) -> None:
        self._writer = client.writer()
        self._is_open = False

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """End an episode that is still open."""
        self.end()

    def record(self, step: EnvStep) -> None:
        """Write the step as an entry of the table."""
        self._writer.step(
            step.obs, step.action, step.reward, step.terminated, step.truncated, step.next_obs, step.info,
            model_version=step.version,
        )  # fmt: skip
        self._is_open = not (step.terminated or step.truncated)

    def end(self) -> None:
        """Store the open entries as a truncated episode."""
        if self._is_open:
            self._writer.reset()
            self._is_open = False

    def flush(self) -> None:
        """Call `end`, since entries are sent as whole episodes only."""
        self.end()


class Packets(Recorder):
    """Recorder that sends samples of any form at the end of an episode, as soon as there are enough samples.

    Args:
        client: Client of a table that `samples.samples_table` made.
        compressor: Called as f(act, obs, rew, done, info) with each sample, or as f(act, obs, rew, terminated,
            truncated, info) if it takes six values. The function's result is sent. None sends samples unchanged.
        least: Samples that are collected before they are sent.
        stream: True sends samples within episodes, too, as soon as `least` are held.
        marks: Adds a mark to `info`, by which a memory checks the transitions that it rebuilds; None adds nothing.
        preprocessor: Preprocessor of observations that a memory has to call, too; each reset carries its digest.
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
        self._tested = (0, 0.0)  # length and return of a test episode that no sample carries yet
        self.dropped = 0
        """Samples that were lost because there was no room on the way to the server."""

    def __len__(self) -> int:
        return len(self._samples)

    def begin(self, action: Any, obs: Any, info: dict[str, Any]) -> None:
        """Record the reset as a sample, which counts as no step."""
        self._episode, self._step, self._returned = self._episode + 1, 0, 0.0
        test_result, self._tested = self._tested, (0, 0.0)
        self._keep(Sample(action, obs, 0.0, False, False, info, True, self._episode, 0, 0.0, *test_result))

    def record(self, step: EnvStep) -> None:
        """Record one step as a sample; send samples if `stream` is set and enough are held."""
        self._step, self._version = self._step + 1, step.version
        self._returned += float(step.reward)
        outcome = (step.terminated, step.truncated, step.info, False, self._episode, self._step, float(step.reward))
        self._keep(Sample(step.action, step.next_obs, step.reward, *outcome))
        if self._stream and len(self._samples) >= self._least:
            self._send(STREAM_TIMEOUT)

    def end(self) -> None:
        """Report the episode to the server, and send the samples if enough are held."""
        if self._step:
            self._client.on_episode(0, self._step, self._returned)
        self._step = 0
        if len(self._samples) >= self._least:
            self._send(FLUSH_TIMEOUT)

    def record_test_episode(self, length: int, returned: float) -> None:
        """Keep the test episode's length and return for the next reset."""
        self._tested = (length, returned)

    def flush(self) -> None:
        """Send all samples that are held."""
        self._send(FLUSH_TIMEOUT)

    def _keep(self, sample: Sample) -> None:
        """Compress a sample and keep it. `info` repeats the truncation, for memories of five values."""
        raw = sample._replace(info=dict(sample.info))
        packed = self._compress(raw)
        if sample.is_reset and isinstance(self._compressor, Codec):
            packed = packed._replace(info=self._compressor.marked(packed.info))
        if sample.is_reset and self._preprocessor:
            packed = packed._replace(info={**packed.info, PREPROCESSOR: self._preprocessor})
        if self._marks is not None:
            packed = packed._replace(info=self._marks.mark(packed.info, self._transition(raw), raw.episode, raw.step))
        self._last_obs = raw.obs
        # The recorder keeps copies: environments may write into returned arrays.
        self._samples.append(packed._replace(act=copied(packed.act), obs=copied(packed.obs)))

    def _compress(self, raw: Sample) -> Sample:
        """Return a sample as it is sent. Raises WrongType if the compressor changes the number of values."""
        if self._compressor is None:
            return _with_no_done(raw)
        raw = raw if self._has_six else _with_no_done(raw)
        values = raw[:6] if self._has_six else (*raw[:4], raw.info)
        result = self._compressor(*values)
        if not isinstance(result, tuple | list) or len(result) != len(values):
            kind = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
            raise WrongType("sample_compressor's result", f"a tuple of the {len(values)} values that it takes", kind)
        if self._has_six:
            return _with_no_done(Sample._make((*result, *raw[6:])))
        act, obs, rew, done, info = result
        return raw._replace(act=act, obs=obs, rew=rew, terminated=done, info=info)

    def _transition(self, raw: Sample) -> tuple[Any, ...] | None:
        """Return (last_obs, act, rew, new_obs, done) of a step's sample; None for a reset."""
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
                    "%d samples were lost: no room on the way to %s (%s); %d samples lost in all",
                    len(part), self._client.endpoint, self._client.push_reason, self.dropped,
                )  # fmt: skip


def _takes_six(compressor: Compressor | None) -> bool:
    """Return True if a compressor takes six values and not five. Raises ParameterError if it takes neither."""
    if compressor is None:
        return False
    try:
        signature = inspect.signature(compressor)
    except (TypeError, ValueError):  # a function in C, for instance, has no signature
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
    """Return an episode's maximum of samples as an integer; infinity becomes 2**62."""
    return 1 << 62 if math.isinf(samples) else int(samples)


def connected(
    connect_once: Callable[[float], Any], url: str, timeout: float, interval: float = CONNECT_INTERVAL
) -> Any:
    """Call `connect_once(seconds)` until it succeeds, and return its result; log a warning each `interval` seconds.

    Raises:
        MemoireTimeout: no server answered in `timeout` seconds.
        Refused: the server refused for good, or for a passing reason during all of `timeout`.
    """
    deadline = time.monotonic() + timeout
    while True:
        seconds = deadline - time.monotonic()
        try:
            return connect_once(max(0.01, min(interval, seconds)))
        except (MemoireTimeout, Refused) as error:
            is_passing = isinstance(error, MemoireTimeout) or error.code in PASSING
            if seconds <= interval or not is_passing:
                raise
            refusal = "" if isinstance(error, MemoireTimeout) else f", which refuses so far: {error.text}"
            _log.warning("waiting for the server at %s%s; giving up in %.0f s", url, refusal, seconds - interval)
