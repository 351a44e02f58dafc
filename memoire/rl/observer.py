"""Observer: asks an agent for jobs, runs an episode for each job, and returns its entries.

    WORK ──▶ job ──▶ run_episode(start, ask, options) ──▶ RESULT ──▶ WORK ...
                        ask(columns): one row, in one batch with those of the other observers

A request for work blocks until the agent has a job. An observer needs NumPy, pyzmq and msgspec, and no torch.

The entries that its function yields become one `Fragment`, the unit of rollouts.

The observer's thread sends requests to one of several agents, and renews the lease of a running job:

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
    Keys,
    KeysLike,
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

POLL_TIMEOUT: Final = 5.0
"""Seconds that an observer waits for a job at its first agent before it asks again."""
SHORT_POLL_TIMEOUT: Final = 1.0
"""Seconds that an observer waits for a job at another agent; shorter, because the first one may be back."""
HELLO_TIMEOUT: Final = 1.0
RETRY_INTERVAL: Final = 0.2
"""Seconds until the next request after an agent did not answer or declined."""
_MAX_TEXT: Final = 500  # characters of an error text that an observer reports

Entries = Iterator[Mapping[str, Any]]
"""Result of `run_episode`: a generator of entries, which may return the columns of the final state."""


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
    """Check the entries of an episode and return them as a fragment.

    Args:
        entries: For each entry its columns [*F], by their full names.
        versions: Versions of the weights that acted, for each entry.
        final: State columns [*F] after the last entry.

    Raises:
        EntryError: a value does not fit its column, is missing or is not finite.
        ParameterError: there are no entries, or the schema has a column of returns.
    """
    if not entries:
        raise ParameterError.with_text("run_episode yielded no entry: an episode has at least one.")
    if schema.qvest is not None:
        expected = "columns without the role return (the learner computes returns from rewards)"
        raise ParameterError("entries", schema.qvest, expected)
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
    """Return the columns [T, *F] of entries; raise EntryError if a value is missing, does not fit, or is not finite."""
    expected: Any = {name: schema[name] for name in names}
    for name in expected:
        for entry in entries:
            if name not in entry:
                raise EntryError.with_text(
                    f"Column {name!r} is missing in an entry or the final state: it has {', '.join(map(str, entry))}."
                )
    columns = exact_rows(expected, {name: [entry[name] for entry in entries] for name in expected}, len(entries))
    for name in expected:
        if name in schema.finite and not is_finite(columns[name]):
            raise EntryError(name, f"finite values of {schema[name]}", "NaN or infinity")
    return columns


ANSWER_GRACE = 0.5
"""Seconds after a request's deadline in which the thread may still report the outcome."""
RENEWALS_PER_LEASE = 3
"""Number of messages that renew a job during one lease."""


@dataclass(eq=False)
class _Call:
    """Pending request to an agent."""

    url: str
    number: int = 0
    is_watched: bool = False
    """True if a connection existed when the request was sent, so that the request fails with the connection."""
    answer: Answer | None = None


@dataclass(eq=False)
class HeldJob:
    """Job that an observer is running. The thread sets `is_over`."""

    url: str
    number: int
    lease: float
    renew_at: float = 0.0
    is_over: bool = False
    """True if the agent has cancelled the job, or is gone."""


class ObserverThread(AskingThread):
    """Thread of an observer: sends requests to agents, and renews the leases of running jobs."""

    def __init__(self, urls: Sequence[str], **facts: Any) -> None:
        self._open: set[_Call] = set()
        self._held: set[HeldJob] = set()
        super().__init__("memoire-observer", urls, **facts)

    # Calls from any thread

    def pick(self) -> str:
        """Return the address of the agent to ask now."""
        return self.choice.pick(self._is_down)

    def record_silence(self, url: str) -> None:
        """Record that an agent did not answer, so that `pick` prefers other agents until it does."""
        self.worker.post(lambda: self.choice.record_silence(url, time.monotonic()))

    def connections(self, url: str) -> int:
        """Return the number of connections made to this address; after a new one, the process may be another."""
        return self._channels[url].connections

    def denied(self, url: str) -> MemoireError | None:
        """Return the error by which the agent has persistently denied access, or None."""
        return self._channels[url].denied_for_good

    def request(
        self, url: str, body: messages.Body, seconds: float, *, payload: Any = None, fingerprint: int = 0
    ) -> Answer:
        """Send a request and wait for the answer, at most `seconds` seconds and while the connection lasts.

        Returns:
            The reply, or `Refused`, `MemoireTimeout`, `Closed`.
        """
        call, began = _Call(url), time.monotonic()
        facts: dict[str, Any] = {"payload": payload}
        if isinstance(body, messages.WorkRequest):  # an agent without a job answers only after this patience
            facts["patience"] = body.patience

        def begin() -> None:
            channel = self._channels[url]
            channel.fingerprint, call.is_watched = fingerprint, not channel.link.is_down
            self._open.add(call)
            call.number = channel.ask(body, lambda answer: self._end(call, answer), began + seconds, **facts)

        self.worker.run(begin)
        self.worker.wait_for(lambda: call.answer is not None, began + seconds + ANSWER_GRACE)
        elapsed = time.monotonic() - began
        return call.answer or MemoireTimeout("answer", url, elapsed, self._channels[url].link.explain(probe=False))

    def keep_lease(self, job: HeldJob) -> None:
        """Renew the lease of this job regularly until `release`."""
        job.renew_at = time.monotonic() + job.lease / RENEWALS_PER_LEASE
        self.worker.post(lambda: self._held.add(job))

    def release(self, job: HeldJob) -> None:
        """Stop renewing the lease of a job that is done or abandoned."""
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
            advice = self._channels[call.url].link.explain(probe=False)
            self._end(call, MemoireTimeout("answer", call.url, 0.0, advice))
        for job in self._held:
            if job.url in down:  # only the agent can renew the lease
                job.is_over, job.renew_at = True, math.inf
            elif now >= job.renew_at:
                self._renew(job, now)

    def _renew(self, job: HeldJob, now: float) -> None:
        def on_answer(answer: Answer) -> None:
            if not isinstance(answer, MemoireError) and isinstance(answer.body, messages.Job):
                job.is_over = job.is_over or answer.body.cancelled

        job.renew_at = now + job.lease / RENEWALS_PER_LEASE
        self._channels[job.url].ask(messages.WorkRequest(patience=0.0, job=job.number), on_answer, now + job.lease)

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
    """Schemas of an agent, as received by one connection."""

    connections: int
    inputs: RowSchema
    outputs: RowSchema
    starts: RowSchema | None
    entries: Schema


class Ask:
    """Function that asks the agent for the outputs of one row; the argument `ask` of `run_episode`.

    A call with columns [*F] waits for the agent's batch, and returns each output [*F], a ragged one in its own length.

    Raises (besides the errors of `RemotePolicy.act`):
        JobCancelled: the agent has cancelled this job. `run_episode` should not catch this error.
    """

    def __init__(self, thread: ObserverThread, agent: _Agent, job: HeldJob, timeout: float, limits: Limits) -> None:
        self._thread, self._agent, self._job = thread, agent, job
        self._timeout, self._limits = timeout, limits
        self.version = 0
        """Version of the weights that computed the last outputs."""

    def __call__(self, columns: Mapping[str, Any], min_version: int = 0) -> dict[str, Any]:
        """Return the outputs [*F] for the columns [*F] of one row."""
        agent, job = self._agent, self._job
        if job.is_over:
            raise JobCancelled(job.number)
        payload = packed_row(agent.inputs, columns)
        body = messages.Infer(patience=self._timeout, min_version=min_version, job=job.number)
        answer = self._answer(body, payload, agent.inputs.fingerprint)
        if not isinstance(answer.body, messages.Inferred) or answer.header.fingerprint != agent.outputs.fingerprint:
            raise Refused(job.url, "schema", f"the answer to INFER, {answer.type.name}, has other columns")
        try:
            rows, _ = unpack_rows(answer.payload, agent.outputs, self._limits)
        except ProtocolError as error:
            raise Refused(job.url, error.code, error.detail) from error
        self.version = answer.body.version
        return {name: values[0] for name, values in rows.items()}

    def _answer(self, body: messages.Infer, payload: Any, fingerprint: int) -> Message:
        deadline = time.monotonic() + self._timeout
        while True:
            remaining = deadline - time.monotonic()
            answer = self._thread.request(self._job.url, body, remaining, payload=payload, fingerprint=fingerprint)
            if isinstance(answer, Message):
                return answer
            if isinstance(answer, Refused) and answer.code == "cancelled":
                raise JobCancelled(self._job.number)
            is_passing = isinstance(answer, Refused) and answer.code in PASSING
            if not is_passing or time.monotonic() + RETRY_INTERVAL > deadline:
                raise answer
            time.sleep(RETRY_INTERVAL / 4)  # the queue of the agent is full

    @property
    def is_cancelled(self) -> bool:
        """True if the job is cancelled: for episodes that seldom call this object."""
        return self._job.is_over


class Observer(Asker):
    """Worker of an agent: asks for jobs, runs an episode for each, and returns its entries.

    Args:
        urls: Address of an agent, or several. Each observer has its own order of them; it uses the next agent while the
            first agent is down or silent.
        run_episode: Generator function, called as run_episode(start, ask, options) for each job. `start` has the
            columns [*F] of the state to begin with, or is None; `ask` is an `Ask`; `options` are those of
            `Agent.run_episode`. The generator yields entries, each a mapping of columns [*F]; the last entry has
            "terminated": True if the episode terminated. The generator may return the columns [*F] of the final state.
        timeout: Seconds that `ask` waits.
        name: Name by which `Agent.run_episode` may choose this observer; see `Server`.
        keys: Keys folder of this process, with an actor's key.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.

    Example:
        with Observer("tcp://127.0.0.1:5570", run_episode) as observer:
            observer.run(episodes=100)
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
        keys: KeysLike = None,
        limits: Limits | None = None,
        context: Context | None = None,
    ) -> None:
        if not callable(run_episode):
            raise WrongType("run_episode", "a function", type(run_episode).__name__)
        super().__init__(limits)
        self._run_episode, self._timeout = run_episode, seconds(timeout)
        self.name = process_name(name)
        self.done = self.failed = self.cancelled = 0
        """Numbers of episodes that were returned, failed with an error, and were cancelled by the agent."""
        self._agents: dict[str, _Agent] = {}
        self._thread = ObserverThread(
            checked_urls(urls), client=self._client, limits=self._limits, keys=Keys.from_setting(keys, "actor"),
            context=context or shared_context(),
        )  # fmt: skip
        self._start()

    @property
    def _asking(self) -> ObserverThread:
        return self._thread

    @property
    def id(self) -> str:
        """Id in hex by which `Agent.run_episode` may choose this observer, like its name."""
        return self._client.hex()

    def run(self, episodes: int | None = None, timeout: float | None = None) -> int:
        """Run jobs until `episodes` episodes were returned, the timeout is over, or `close` is called.

        Returns:
            Number of returned episodes.

        Raises:
            Refused, AuthError: an agent declines permanently, for a wrong key for example.
        """
        max_episodes = None if episodes is None else whole("episodes", episodes, 0)
        deadline, done_before = time.monotonic() + seconds(timeout), self.done
        while not self._closing.is_set() and time.monotonic() < deadline:
            if max_episodes is not None and self.done - done_before >= max_episodes:
                break
            try:
                self._turn(deadline)
            except Closed:
                break
        return self.done - done_before

    def _turn(self, deadline: float) -> None:
        url = self._thread.pick()
        try:
            agent = self._agent(url)
            poll = POLL_TIMEOUT if url == self.urls[0] else SHORT_POLL_TIMEOUT
            patience = min(poll, max(0.0, deadline - time.monotonic()))
            answer = self._request(url, messages.WorkRequest(patience=patience), patience + HELLO_TIMEOUT)
        except (MemoireTimeout, Refused, AuthError) as error:
            self._skip_agent(url, error)
            return
        body = answer.body
        if isinstance(body, messages.Job) and body.number:
            self._run_job(url, agent, answer, body)
        elif isinstance(body, messages.Job) and body.leaving:
            self._thread.record_silence(url)
            self._closing.wait(RETRY_INTERVAL)

    def _agent(self, url: str) -> _Agent:
        """Return the schemas of the agent at this address; ask the agent again after each new connection."""
        cached = self._agents.get(url)
        if cached is not None and cached.connections == self._thread.connections(url):
            return cached
        facts: dict[str, Any] = {"name": self.name, "pid": os.getpid()}
        hello = messages.Hello(role="actor", software=f"memoire {__version__}", **facts)
        welcome = self._request(url, hello, HELLO_TIMEOUT).body
        if not isinstance(welcome, messages.Welcome) or not welcome.entries:
            raise Refused(url, "unexpected", "the node there has no jobs. Give observers the address of an rl.Agent")
        starts = RowSchema.from_json(welcome.starts) if welcome.starts else None
        schemas = RowSchema.from_json(welcome.schema), RowSchema.from_json(welcome.outputs), starts
        self._agents[url] = _Agent(self._thread.connections(url), *schemas, Schema.from_json(welcome.entries))
        return self._agents[url]

    def _request(self, url: str, body: messages.Body, patience: float, **facts: Any) -> Message:
        answer = self._thread.request(url, body, patience, **facts)
        if isinstance(answer, MemoireError):
            raise answer
        return answer

    def _skip_agent(self, url: str, error: MemoireError) -> None:
        """Prefer other agents after an error of the present agent; raise the error if it is permanent."""
        if isinstance(error, AuthError) or (isinstance(error, Refused) and error.code not in PASSING):
            raise error
        if (denied := self._thread.denied(url)) is not None:
            raise denied
        self._agents.pop(url, None)
        self._thread.record_silence(url)
        self._closing.wait(RETRY_INTERVAL)

    def _run_job(self, url: str, agent: _Agent, answer: Message, body: messages.Job) -> None:
        job = HeldJob(url, body.number, body.lease)
        self._thread.keep_lease(job)
        try:
            result, payload = self._run_and_pack(agent, job, answer, body)
            answer = self._request(url, result, self._timeout, payload=payload, fingerprint=agent.entries.fingerprint)
            counts = isinstance(answer.body, messages.Taken) and bool(answer.body.samples)
            self.done += counts and result.status == "done"
            self.failed += counts and result.status == "failed"
        except JobCancelled:
            self.cancelled += 1
        except (MemoireTimeout, Refused) as error:
            _log.warning("job %d is abandoned: %s", job.number, error)
        finally:
            self._thread.release(job)

    def _run_and_pack(
        self, agent: _Agent, job: HeldJob, answer: Message, body: messages.Job
    ) -> tuple[messages.Result, Any]:
        """Run the episode of a job, and return the message RESULT and its payload.

        Raises:
            JobCancelled: the agent has cancelled the job, or is gone.
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
            fragment = fragment_of(agent.entries, entries, versions, final, **facts)
            rows_of, payload = rollout_fragments.packed([fragment], agent.entries, now=fragment.arrived, wall=0.0)
        except JobCancelled:
            raise
        except Exception as error:
            if job.is_over:  # the agent is gone, which may have caused the error
                raise JobCancelled(job.number) from error
            _log.exception("job %d failed", job.number)
            text = escape(f"{type(error).__name__}: {error}".strip().splitlines()[0])[:_MAX_TEXT].rstrip(".")
            return messages.Result(job=job.number, status="failed", text=text), None
        return messages.Result(job=job.number, fragments=rows_of), payload

    def __repr__(self) -> str:
        return f"<rl.Observer {self.name or self.id[:8]} of {', '.join(self.urls)}>"


def _record(episode: Any, ask: Ask, job: HeldJob) -> tuple[list[Mapping[str, Any]], list[int], Any]:
    """Run an episode; return its entries, the versions that acted, and the final state.

    Raises:
        JobCancelled: the job is over.
    """
    if not isinstance(episode, Generator):
        raise WrongType("run_episode", "a function that yields entries (a generator)", type(episode).__name__)
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
