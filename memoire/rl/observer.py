"""An observer: asks an agent for jobs, runs an episode for each, and returns what it recorded.

    WORK ──▶ job ──▶ run_episode(start, ask, options) ──▶ RESULT ──▶ WORK ...
                        ask(columns): one row, in one batch with those of the other observers

It sleeps in its question for work. It needs NumPy, pyzmq and msgspec, and no torch.

The entries that its function yields become a fragment, as rollouts are made of.

Its thread sends requests to one of several agents, and says that a job goes on while it is done:

observer ──WORK, INFER, RESULT──▶ its agent by rendezvous hash    down or silent: the next one, until it returns
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memoire import Schema, __version__
from memoire.building import (
    Fragment,
    Given,
    Keys,
    RowSchema,
    checked_names,
    is_finite,
    packed_row,
    process_name,
    seconds,
    whole,
)
from memoire.dataset import Episode
from memoire.errors import (
    AuthError,
    Closed,
    EntryError,
    JobCancelled,
    MemoireError,
    MemoireTimeout,
    ParameterError,
    ProtocolError,
    Refused,
    WrongType,
    escape,
)
from memoire.kinds import (
    PASSING,
    Answer,
    Asker,
    AskingThread,
    Context,
    Message,
    checked_urls,
    exact_rows,
    messages,
    shared_context,
    unpack_rows,
)
from memoire.kinds import fragments as rollout_fragments
from memoire.limits import Limits

_log = logging.getLogger(__name__)

POLL: Final = 5.0
"""Seconds that an observer waits for a job at its own agent, until it asks again."""
SHORT_POLL: Final = 1.0
"""The same at another agent: its own one may be back."""
HELLO_TIMEOUT: Final = 1.0
PAUSE: Final = 0.2
"""Seconds before an agent is asked again that did not answer, or declined."""
_MAX_TEXT: Final = 500  # characters of an error that the agent is told

Entries = Iterator[Mapping[str, Any]]
"""What `run_episode` returns: a generator of entries, which may return the final state's columns."""


def fragment_of(
    schema: Schema,
    entries: Sequence[Mapping[str, Any]],
    versions: Sequence[int],
    final: Mapping[str, Any] | None = None,
    *,
    terminated: bool = False,
    client: bytes = bytes(16),
    number: int = 0,
) -> Fragment:
    """Entries as an observer yields them, checked.

    Args:
        entries: Of each entry its columns [*F], by their full names.
        versions: Of the weights that acted.
        final: State columns [*F] after the last entry.

    Raises:
        EntryError: a value does not fit its column, is missing or is not finite.
    """
    if not entries:
        raise ParameterError("entries", "none", "at least one: an episode has a step")
    if schema.qvest is not None:
        raise ParameterError("entries", schema.qvest, "columns without a return: it follows from rewards")
    columns = _exact(schema, entries, schema.entry_names)
    last = None
    if final is not None:
        try:
            last = {name: values[0] for name, values in _exact(schema, [final], schema.states).items()}
        except EntryError as error:
            raise EntryError(error.column, error.expected, f"{error.received}, in the final state") from None
    count = len(entries)
    episode = Episode(
        columns=columns,
        init_w=np.ones(count, np.float32),
        priority=None,
        learned=np.zeros(count, np.bool_),
        born=None,
        model_version=np.asarray(versions, np.int64),
        terminated=terminated,
        final_state=last,
    )
    return Fragment(client, number, episode, np.zeros(count, np.float32), 0.0)


def _exact(schema: Schema, entries: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Columns [T, *F] of these entries, or of a final state."""
    chosen: Any = {name: schema[name] for name in names}
    for name in chosen:
        for entry in entries:
            if name not in entry:
                known = ", ".join(map(str, entry))
                raise EntryError(name, "a value in each entry and in the final state", f"only {known}")
    columns = exact_rows(chosen, {name: [entry[name] for entry in entries] for name in chosen}, len(entries))
    for name in chosen:
        if name in schema.finite and not is_finite(columns[name]):
            raise EntryError(name, f"finite values of {schema[name]}", "NaN or infinity")
    return columns


GRACE = 0.5
"""Seconds after a deadline in which the thread still says how a request has ended."""
RENEWALS = 3
"""Times that an agent hears of a job during one lease."""


@dataclass(eq=False)
class _Call:
    """One request until it is answered."""

    url: str
    number: int = 0
    is_watched: bool = False
    """Whether there was a connection when it was sent: the request ends with it."""
    answer: Answer | None = None


@dataclass(eq=False)
class HeldJob:
    """A job that an observer is at. `is_over` is set by the thread."""

    url: str
    number: int
    lease: float
    renew_at: float = 0.0
    is_over: bool = False
    """Whether its agent does not want it any more, or is gone."""


class ObserverThread(AskingThread):
    """Asks agents, and tells them that jobs go on."""

    def __init__(self, urls: Sequence[str], **facts: Any) -> None:
        self._open: set[_Call] = set()
        self._held: set[HeldJob] = set()
        super().__init__("memoire-observer", urls, **facts)

    # From any thread

    def pick(self) -> str:
        """The agent to ask now."""
        return self.choice.pick(self._is_down)

    def silent(self, url: str) -> None:
        """An agent did not answer: ask others until it does."""
        self.worker.post(lambda: self.choice.silent(url, time.monotonic()))

    def connections(self, url: str) -> int:
        """How often a connection to this agent came about: after a new one it may be another process."""
        return self._channels[url].connections

    def denied(self, url: str) -> MemoireError | None:
        """Why this process is not let in there, once that has been so for a while."""
        return self._channels[url].denied_for_good

    def request(
        self, url: str, body: messages.Body, seconds: float, *, payload: Any = None, fingerprint: int = 0
    ) -> Answer:
        """Ask, and wait for the answer: these seconds at most, and no longer than the connection lasts.

        Returns:
            The reply, or `Refused`, `MemoireTimeout`, `Closed`.
        """
        call, began = _Call(url), time.monotonic()
        facts: dict[str, Any] = {"payload": payload}
        if isinstance(body, messages.Work):  # which is answered late
            facts["patience"] = body.patience

        def begin() -> None:
            channel = self._channels[url]
            channel.fingerprint, call.is_watched = fingerprint, not channel.link.is_down
            self._open.add(call)
            call.number = channel.ask(body, lambda answer: self._end(call, answer), began + seconds, **facts)

        self.worker.run(begin)
        self.worker.wait_for(lambda: call.answer is not None, began + seconds + GRACE)
        took = time.monotonic() - began
        return call.answer or MemoireTimeout("answer", url, took, self._channels[url].link.explain(probe=False))

    def hold(self, job: HeldJob) -> None:
        """Tell its agent from time to time that this job goes on."""
        job.renew_at = time.monotonic() + job.lease / RENEWALS
        self.worker.post(lambda: self._held.add(job))

    def release(self, job: HeldJob) -> None:
        """A job is done, or given up."""
        self.worker.post(lambda: self._held.discard(job))

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        return min(super()._next_time(), *(job.renew_at for job in self._held), math.inf)

    def _turn(self, ready: dict[object, int]) -> None:
        super()._turn(ready)
        now = time.monotonic()
        down = {url for url, channel in self._channels.items() if channel.link.is_down}
        for call in [call for call in self._open if call.is_watched and call.url in down]:
            self._channels[call.url].drop(call.number)
            why = self._channels[call.url].link.explain(probe=False)
            self._end(call, MemoireTimeout("answer", call.url, 0.0, why))
        for job in self._held:
            if job.url in down:  # nobody is told that it goes on: nothing is due for it any more
                job.is_over, job.renew_at = True, math.inf
            elif now >= job.renew_at:
                self._renew(job, now)

    def _renew(self, job: HeldJob, now: float) -> None:
        def heard(answer: Answer) -> None:
            if not isinstance(answer, MemoireError) and isinstance(answer.body, messages.Job):
                job.is_over = job.is_over or answer.body.cancelled

        job.renew_at = now + job.lease / RENEWALS
        self._channels[job.url].ask(messages.Work(patience=0.0, job=job.number), heard, now + job.lease)

    def _end(self, call: _Call, answer: Answer) -> None:
        self._open.discard(call)
        call.answer = answer

    def _at_end(self) -> None:
        for call in list(self._open):
            self._end(call, Closed("this observer"))
        for job in self._held:
            job.is_over = True


@dataclass(frozen=True, slots=True)
class _Agent:
    """What an agent has said of itself, by one connection."""

    connections: int
    inputs: RowSchema
    outputs: RowSchema
    starts: RowSchema | None
    entries: Schema


class Ask:
    """Asks the agent for the outputs of one row; `run_episode` gets it.

    Called with columns [*F], it returns each output [*F], a ragged one in its own length. It waits for the batch.

    Raises (besides what `RemotePolicy.act` raises):
        JobCancelled: the agent does not want this job any more. Let it pass.
    """

    def __init__(self, thread: ObserverThread, agent: _Agent, job: HeldJob, timeout: float, limits: Limits) -> None:
        self._thread, self._agent, self._job = thread, agent, job
        self._timeout, self._limits = timeout, limits
        self.version = 0
        """Of the weights that the last outputs were computed with."""

    def __call__(self, columns: Mapping[str, Any], min_version: int = 0) -> dict[str, Any]:
        """Outputs [*F] of the columns [*F] of one row."""
        agent, job = self._agent, self._job
        if job.is_over:
            raise JobCancelled(job.number)
        payload = packed_row(agent.inputs, columns)
        body = messages.Infer(patience=self._timeout, min_version=min_version, job=job.number)
        answer = self._answer(body, payload, agent.inputs.fingerprint)
        if not isinstance(answer.body, messages.Inferred) or answer.header.fingerprint != agent.outputs.fingerprint:
            raise Refused(job.url, "schema", f"{answer.type.name} of other columns answered INFER")
        try:
            found, _ = unpack_rows(answer.payload, agent.outputs, self._limits)
        except ProtocolError as error:
            raise Refused(job.url, error.code, error.detail) from error
        self.version = answer.body.version
        return {name: values[0] for name, values in found.items()}

    def _answer(self, body: messages.Infer, payload: Any, fingerprint: int) -> Message:
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            answer = self._thread.request(self._job.url, body, left, payload=payload, fingerprint=fingerprint)
            if isinstance(answer, Message):
                return answer
            if isinstance(answer, Refused) and answer.code == "cancelled":
                raise JobCancelled(self._job.number)
            if not (isinstance(answer, Refused) and answer.code in PASSING) or time.monotonic() + PAUSE > deadline:
                raise answer
            time.sleep(PAUSE / 4)  # the queue of the agent is full

    @property
    def is_cancelled(self) -> bool:
        """Whether the job is not wanted any more: for episodes that ask seldom."""
        return self._job.is_over


class Observer(Asker):
    """Runs episodes for an agent: for one of several, the first in an order of its own that answers.

    Args:
        urls: Addresses of agents, or one. Each observer has its own order of them; it goes on to the next one if its
            own is down or silent, and returns when that is back.
        run_episode: Called as run_episode(start, ask, options) for each job. `start` has the columns [*F] of the state
            to begin with, or is None; `ask` is an `Ask`; `options` are those of `Agent.run_episode`. It is a generator
            of entries, each a mapping of columns [*F]. With "terminated": True, the last one says how the episode
            ended. It may return the columns [*F] of the final state.
        timeout: Seconds that `ask` waits.
        name: By which `Agent.run_episode` may choose this observer; see `Server`.
        keys: This process' keys folder: an actor's key.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this observer"

    @checked_names()
    def __init__(
        self,
        urls: str | Sequence[str],
        run_episode: Callable[[Any, Ask, dict[str, Any]], Entries],
        timeout: float = 10.0,
        *,
        name: str | None = None,
        keys: Given = None,
        limits: Limits | None = None,
        context: Context | None = None,
    ) -> None:
        if not callable(run_episode):
            raise WrongType("run_episode", "a function", type(run_episode).__name__)
        super().__init__(limits)
        self._run_episode, self._timeout = run_episode, seconds(timeout)
        self.name = process_name(name)
        self.done = self.failed = self.cancelled = 0
        """Episodes that were returned, whose function raised an error, and that the agent did not want any more."""
        self._agents: dict[str, _Agent] = {}
        self._thread = ObserverThread(
            checked_urls(urls), client=self._client, limits=self._limits, keys=Keys.of(keys, "actor"),
            context=context or shared_context(),
        )  # fmt: skip
        self._start()

    @property
    def _asking(self) -> ObserverThread:
        return self._thread

    @property
    def id(self) -> str:
        """By which `Agent.run_episode` may choose this observer, too."""
        return self._client.hex()

    def run(self, episodes: int | None = None, timeout: float | None = None) -> int:
        """Do jobs until so many episodes were returned, the time is over, or somebody calls `close`.

        Returns:
            How many were returned.

        Raises:
            Refused, AuthError: an agent declines for good, such as for the wrong key.
        """
        most = None if episodes is None else whole("episodes", episodes, 0)
        deadline, before = time.monotonic() + seconds(timeout), self.done
        while not self._closing.is_set() and time.monotonic() < deadline:
            if most is not None and self.done - before >= most:
                break
            try:
                self._turn(deadline)
            except Closed:
                break
        return self.done - before

    def _turn(self, deadline: float) -> None:
        """Ask for one job, and do it."""
        url = self._thread.pick()
        try:
            agent = self._agent(url)
            poll = POLL if url == self.urls[0] else SHORT_POLL
            patience = min(poll, max(0.0, deadline - time.monotonic()))
            answer = self._asked(url, messages.Work(patience=patience), patience + HELLO_TIMEOUT)
        except (MemoireTimeout, Refused, AuthError) as error:
            self._look_on(url, error)
            return
        body = answer.body
        if isinstance(body, messages.Job) and body.number:
            self._do(url, agent, answer, body)
        elif isinstance(body, messages.Job) and body.leaving:
            self._thread.silent(url)
            self._closing.wait(PAUSE)

    def _agent(self, url: str) -> _Agent:
        """What the agent at this address says of itself; asked again after each new connection."""
        known = self._agents.get(url)
        if known is not None and known.connections == self._thread.connections(url):
            return known
        facts: dict[str, Any] = {"name": self.name, "pid": os.getpid()}
        hello = messages.Hello(role="actor", software=f"memoire {__version__}", **facts)
        told = self._asked(url, hello, HELLO_TIMEOUT).body
        if not isinstance(told, messages.Welcome) or not told.entries:
            raise Refused(url, "unexpected", "it gives no jobs. Give observers the address of an rl.Agent")
        starts = RowSchema.from_json(told.starts) if told.starts else None
        schemas = RowSchema.from_json(told.schema), RowSchema.from_json(told.outputs), starts
        self._agents[url] = _Agent(self._thread.connections(url), *schemas, Schema.from_json(told.entries))
        return self._agents[url]

    def _asked(self, url: str, body: messages.Body, patience: float, **facts: Any) -> Message:
        """The answer to a request. Raises what it is refused by, or MemoireTimeout."""
        answer = self._thread.request(url, body, patience, **facts)
        if isinstance(answer, MemoireError):
            raise answer
        return answer

    def _look_on(self, url: str, error: MemoireError) -> None:
        """An agent did not answer, or declined. Raises the error if it stays so."""
        if isinstance(error, AuthError) or (isinstance(error, Refused) and error.code not in PASSING):
            raise error
        if (denied := self._thread.denied(url)) is not None:
            raise denied
        self._agents.pop(url, None)
        self._thread.silent(url)
        self._closing.wait(PAUSE)

    def _do(self, url: str, agent: _Agent, answer: Message, body: messages.Job) -> None:
        """Run an episode, and return what was recorded."""
        job = HeldJob(url, body.number, body.lease)
        self._thread.hold(job)
        try:
            result, payload = self._recorded(agent, job, answer, body)
            answer = self._asked(url, result, self._timeout, payload=payload, fingerprint=agent.entries.fingerprint)
            counts = isinstance(answer.body, messages.Taken) and bool(answer.body.samples)
            self.done += counts and result.status == "done"
            self.failed += counts and result.status == "failed"
        except JobCancelled:
            self.cancelled += 1
        except (MemoireTimeout, Refused) as error:
            _log.warning("job %d is given up: %s", job.number, error)
        finally:
            self._thread.release(job)

    def _recorded(
        self, agent: _Agent, job: HeldJob, answer: Message, body: messages.Job
    ) -> tuple[messages.Result, Any]:
        """The result of a job, and its payload.

        Raises:
            JobCancelled: it is not wanted any more, or its agent is gone.
        """
        ask = Ask(self._thread, agent, job, self._timeout, self._limits)
        try:
            start = None
            if agent.starts is not None and answer.payload is not None:
                rows, _ = unpack_rows(answer.payload, agent.starts, self._limits)
                start = {name: values[0] for name, values in rows.items()}
            episode = self._run_episode(start, ask, dict(body.options))
            entries, versions, final = _record(episode, ask, job)
            ended = bool(entries) and bool(entries[-1].get("terminated"))
            facts: dict[str, Any] = {"terminated": ended, "client": self._client, "number": job.number}
            made = fragment_of(agent.entries, entries, versions, final, **facts)
            rows_of, payload = rollout_fragments.packed([made], agent.entries, now=made.arrived, wall=0.0)
        except JobCancelled:
            raise
        except Exception as error:
            if job.is_over:  # the agent is gone, so that it could not be asked
                raise JobCancelled(job.number) from error
            _log.exception("job %d failed", job.number)
            text = escape(f"{type(error).__name__}: {error}".strip().splitlines()[0])[:_MAX_TEXT].rstrip(".")
            return messages.Result(job=job.number, status="failed", text=text), None
        return messages.Result(job=job.number, fragments=rows_of), payload

    def __repr__(self) -> str:
        return f"<rl.Observer {self.name or self.id[:8]} of {', '.join(self.urls)}>"


def _record(episode: Any, ask: Ask, job: HeldJob) -> tuple[list[Mapping[str, Any]], list[int], Any]:
    """Entries of an episode, the versions that acted, and the final state.

    Raises:
        JobCancelled: the job is over.
    """
    if not isinstance(episode, Generator):
        raise WrongType("run_episode", "a generator of entries: a function that yields them", type(episode).__name__)
    entries: list[Mapping[str, Any]] = []
    versions: list[int] = []
    try:
        while True:
            if job.is_over:
                raise JobCancelled(job.number)
            try:
                entries.append(next(episode))
            except StopIteration as stop:
                return entries, versions, stop.value
            versions.append(ask.version)
    finally:
        episode.close()
