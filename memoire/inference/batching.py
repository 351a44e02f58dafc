"""Batching of waiting rows, and state of each request. Pure: time is passed in.

    ask ──▶ waiting ──▶ due? ──▶ take: one batch ──▶ running ──▶ answered: kept for resends
              │    full: rows reach max_batch; everyone: each alive client has a request; wait: the oldest waited
              └──▶ expired: its patience is over, so the function never gets it

A barrier of all clients would stop when one of them dies. With `max_wait`, a dead client costs `max_wait` for each
batch, for at most `alive` seconds after its last request; if its connection is known to have ended, it costs nothing.

Inference statistics: counts and figures of an inference node.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from memoire.errors import ProtocolError
from memoire.figures import (
    BUDGET_BYTES,
    FAULTS,
    HOLDER_BYTES,
    REFUSED,
    UPTIME,
    Timing,
    Timings,
    by,
    counter,
    gauge,
    histogram,
    shown,
)
from memoire.security.access import Security
from memoire.wire.byte_budget import ByteHolder

KEPT_REPLIES = 4
"""Maximum replies kept for resends, by client; an older request that is resent is computed again."""
KEPT_TIMEOUT = 15.0
"""Seconds after a client's last request for which replies are kept: longer than the interval of resends."""
KEPT_BYTES = 64 << 20
"""Maximum bytes of kept replies; beyond, the replies of the clients silent longest are dropped."""
CLIENT_PART = 2
"""Reciprocal of the fraction of the queue that one client may fill."""
PADDING = 2
"""Maximum bytes of a padded batch, as a multiple of its separately padded requests: a long row does not pad the rows of
all requests.
"""


REASONS = ("full", "everyone", "wait")
"""Reasons that make a batch due."""


class InferenceRequest(NamedTuple):
    """Rows in one request of a client."""

    client: bytes
    """Client id of 16 bytes."""
    number: int
    """Number of the request; a resend has the same number."""
    rows: int
    content: Any
    """Data that the owner needs to answer the request."""
    arrived: float
    expires: float
    """Time after which the client needs no answer any more."""
    min_version: int = 0
    """Minimum version of the weights: the request waits for it."""
    size: int = 0
    """Bytes that the request takes until it is answered."""
    widths: tuple[int, ...] = ()
    """Bytes of a row of each ragged column, padded to the longest row."""

    @property
    def padded_size(self) -> int:
        """Bytes of the padded ragged columns."""
        return self.rows * sum(self.widths)


class RequestBatch(NamedTuple):
    """Requests of one call of the function."""

    requests: list[InferenceRequest]
    reason: str
    """Reason that made the batch due, one of `REASONS`."""

    @property
    def rows(self) -> int:
        """Number of rows of all requests."""
        return sum(request.rows for request in self.requests)


class KeptReply(NamedTuple):
    """Sent reply, kept for resends."""

    content: Any
    size: int


@dataclass(slots=True)
class _Client:
    asked_at: float
    rows: int = 0
    early: int = 0
    """Number of waiting rows that need a later version of the weights."""
    is_awaited: bool = True
    """True if the client's connection may bring a further request."""
    waiting: int = 0
    numbers: set[int] = field(default_factory=set)
    """Numbers of waiting and running requests."""
    replies: OrderedDict[int, KeptReply] = field(default_factory=OrderedDict)


class Batching:
    """Queue of a node's waiting requests.

    Args:
        max_batch: Maximum rows of a batch.
        max_wait: Maximum seconds that the oldest request waits for further requests.
        alive: Seconds after a client's last request for which batches wait for its next request.
        queue_rows: Maximum rows that wait; one client may have half of them. As many again may wait for a later
            version of the weights: they do not take room from rows that can be computed now.
        kept_bytes: Maximum bytes of replies kept for resends.
        room: Holder of the bytes of unanswered requests; None sets no limit.
    """

    def __init__(
        self,
        max_batch: int,
        max_wait: float,
        alive: float,
        queue_rows: int,
        kept_bytes: int = KEPT_BYTES,
        room: ByteHolder | None = None,
    ) -> None:
        self.max_batch, self.max_wait, self.alive, self.queue_rows = max_batch, max_wait, alive, queue_rows
        self.rows = 0
        """Number of waiting rows of all clients."""
        self.early = 0
        """Number of waiting rows that need a later version of the weights."""
        self._version = 0  # version of the weights at the last count of `early`
        self.expired = 0
        """Number of requests dropped because their clients needed no answer any more."""
        self.resends = 0
        """Number of requests that were resent."""
        self.batches: Counter[str] = Counter()
        """Number of batches by reason."""
        self._queue: deque[InferenceRequest] = deque()  # requests by time of arrival
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()  # clients by their newest request
        self._max_kept, self.kept_bytes, self._room = kept_bytes, 0, room

    @property
    def most_rows(self) -> int:
        """Maximum waiting rows; as many again may wait for a later version of the weights."""
        return max(self.queue_rows, self.max_batch)

    @property
    def client_rows(self) -> int:
        """Maximum waiting rows of one client."""
        return max(self.max_batch, self.queue_rows // CLIENT_PART)

    def clients(self, now: float) -> int:
        """Return the number of clients that sent a request within `alive` seconds."""
        return sum(now - client.asked_at < self.alive for client in list(self._clients.values()))

    # Requests

    def is_open(self, client: bytes, number: int) -> bool:
        """Return True if a request waits or runs."""
        known = self._clients.get(client)
        return known is not None and number in known.numbers

    def ask(self, request: InferenceRequest, version: int = 0) -> KeptReply | None:
        """Queue a request; `version` is that of the weights. Return the kept reply if the request is a resend.

        Raises:
            ProtocolError: the queue has no room (code "busy"), or the request has more rows than a batch ("too_large").
        """
        client = self._asked(request)
        if (kept := client.replies.get(request.number)) is not None or request.number in client.numbers:
            self.resends += 1
            return kept
        self._recount_early(version)
        self._check_room(request, client)
        if self._room is not None:
            self._room.take(request.size)
        self._queue.append(request)
        client.numbers.add(request.number)
        client.waiting += 1
        self._count(request, client, request.rows)
        return None

    def _asked(self, request: InferenceRequest) -> _Client:
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _Client(request.arrived)
        client.asked_at, client.is_awaited = request.arrived, True
        self._clients.move_to_end(request.client)
        return client

    def _check_room(self, request: InferenceRequest, client: _Client) -> None:
        if request.rows > self.max_batch:
            text = f"the request has {request.rows} rows; at most {self.max_batch} (max_batch) fit. Send fewer rows"
            raise ProtocolError("too_large", text)
        is_early = request.min_version > self._version
        of_client = client.rows, client.early, self.client_rows, "of this client wait already"
        of_all = self.rows, self.early, self.most_rows, "of all clients wait already"
        for rows, early, most, wait in (of_client, of_all):
            queued = early if is_early else rows - early
            if queued + request.rows > most or rows + request.rows > 2 * most:
                awaited = f" for weights after version {self._version}" if is_early else ""
                raise ProtocolError("busy", f"{queued} rows {wait}{awaited}; the limit is {most} (queue_rows)")

    def _recount_early(self, version: int) -> None:
        """Count again the rows that wait for a later version than this one."""
        if version == self._version:
            return
        self._version, self.early = version, 0
        for client in self._clients.values():
            client.early = 0
        for request in self._queue:
            self._count(request, self._clients[request.client], request.rows, is_new=False)

    def _count(self, request: InferenceRequest, client: _Client, rows: int, *, is_new: bool = True) -> None:
        """Add a request's rows to the counts; negative `rows` remove them."""
        if is_new:
            client.rows += rows
            self.rows += rows
        if request.min_version > self._version:
            client.early += rows
            self.early += rows

    def remove_client(self, client: bytes) -> None:
        """Stop waiting for the next request of a client whose connection has ended. Present requests of the
        client stay: the client may connect again and resend these requests.
        """
        if client in self._clients:
            self._clients[client].is_awaited = False

    # Batches

    def next_time(self, now: float, version: int) -> float:
        """Return the time of the next `take` without a further request; `version` is that of the weights."""
        oldest = next(iter(self._clients.values()), None)
        time = math.inf if oldest is None or oldest.numbers else oldest.asked_at + KEPT_TIMEOUT
        ready: InferenceRequest | None = None
        for request in self._queue:
            time = min(time, request.expires)
            if ready is None and request.min_version <= version:
                ready = request
        if ready is None:
            return time
        missing = self._missing(now)
        if missing:
            time = min(time, missing[-1].asked_at + self.alive)
        return min(time, now if self._reason(now, version) else ready.arrived + self.max_wait)

    def take(self, now: float, version: int) -> RequestBatch | None:
        """Return the batch that is due now; None if there is none. Call this only while no batch runs."""
        self._recount_early(version)
        self._drop_expired(now)
        self._forget(now)
        reason = self._reason(now, version)
        if not reason:
            return None
        taken = self._fitting_requests(version)
        chosen = {id(request) for request in taken}
        self._queue = deque(request for request in self._queue if id(request) not in chosen)
        for request in taken:
            self._dequeue(request)
        self.batches[reason] += 1
        return RequestBatch(taken, reason)

    def _fitting_requests(self, version: int) -> list[InferenceRequest]:
        """Return the oldest requests that fit into a batch, except those that would need too much padding."""
        taken: list[InferenceRequest] = []
        rows, padded, widths = 0, 0, tuple[int, ...]()
        for request in self._queue:
            if request.min_version > version:
                continue
            if rows + request.rows > self.max_batch:
                break
            if request.widths:
                wider = tuple(map(max, request.widths, widths or request.widths))
                if (rows + request.rows) * sum(wider) > PADDING * (padded + request.padded_size):
                    continue
                padded, widths = padded + request.padded_size, wider
            taken.append(request)
            rows += request.rows
        return taken

    def _give_back(self, request: InferenceRequest) -> None:
        if self._room is not None:
            self._room.take(-request.size)

    def receive_answer(self, request: InferenceRequest, reply: KeptReply | None) -> None:
        """Record a request's reply; None for a refused request, which is computed again if it is resent."""
        self._give_back(request)
        client = self._clients.get(request.client)
        if client is None:
            return
        client.numbers.discard(request.number)
        if reply is None:
            return
        client.replies[request.number] = reply
        self.kept_bytes += reply.size
        if len(client.replies) > KEPT_REPLIES:
            self.kept_bytes -= client.replies.popitem(last=False)[1].size
        for other in self._clients.values():
            if self.kept_bytes <= self._max_kept:
                return
            self._forget_replies(other)

    def _reason(self, now: float, version: int) -> str:
        """Return the reason that makes a batch due now; "" if no batch is due."""
        rows, arrived = 0, math.inf
        for request in self._queue:
            if request.min_version <= version and request.expires > now:
                rows += request.rows
                arrived = min(arrived, request.arrived)
        if arrived == math.inf:
            return ""
        if rows >= self.max_batch:
            return "full"
        if now >= arrived + self.max_wait:
            return "wait"
        return "" if self._missing(now) else "everyone"

    def _missing(self, now: float) -> list[_Client]:
        missing = []
        for client in reversed(self._clients.values()):
            if now >= client.asked_at + self.alive:
                break
            if client.is_awaited and not client.waiting:
                missing.append(client)
        return missing

    def _drop_expired(self, now: float) -> None:
        if all(request.expires > now for request in self._queue):
            return
        for request in [each for each in self._queue if each.expires <= now]:
            self._queue.remove(request)
            self._dequeue(request)
            self._give_back(request)
            self._clients[request.client].numbers.discard(request.number)
            self.expired += 1

    def _dequeue(self, request: InferenceRequest) -> None:
        client = self._clients[request.client]
        client.waiting -= 1
        self._count(request, client, -request.rows)

    def _forget(self, now: float) -> None:
        """Forget clients that have been silent for `KEPT_TIMEOUT`."""
        while self._clients:
            name, client = next(iter(self._clients.items()))
            if client.numbers or now < client.asked_at + KEPT_TIMEOUT:
                return
            self._forget_replies(client)
            del self._clients[name]

    def _forget_replies(self, client: _Client) -> None:
        self.kept_bytes -= sum(reply.size for reply in client.replies.values())
        client.replies.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if a sum differs from its parts. For tests."""
        for name, client in self._clients.items():
            queued = [request for request in self._queue if request.client == name]
            assert (client.waiting, client.rows) == (len(queued), sum(request.rows for request in queued))
            assert client.early == sum(request.rows for request in queued if request.min_version > self._version)
            assert {request.number for request in queued} <= client.numbers
            assert len(client.replies) <= KEPT_REPLIES
        assert self.rows == sum(request.rows for request in self._queue) <= 2 * self.most_rows
        assert self.early == sum(client.early for client in self._clients.values()) <= self.rows
        kept = sum(reply.size for client in self._clients.values() for reply in client.replies.values())
        assert self.kept_bytes == kept <= self._max_kept


MAX_LINEAGE = 200
"""Maximum ancestors of a start state in the statistics."""


@dataclass(slots=True)
class InferenceCounts:
    """Counts of an inference node, written by the node's thread; any thread may read."""

    requests: int = 0
    rows: int = 0
    batched_rows: int = 0
    failures: int = 0
    weights_failures: int = 0
    computed: float = 0.0
    waits: Timings = field(default_factory=lambda: Timings(REASONS))
    """Seconds from a request's arrival to its batch."""
    durations: Timings = field(default_factory=lambda: Timings(REASONS))
    """Seconds from a request's arrival to its answer."""
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class JobStats:
    """Jobs of an agent at one moment; all zero for a node without jobs."""

    # fmt: off
    open: Annotated[int, gauge("jobs_open", "Open", "Jobs of an agent that no observer has.")] = 0
    leased: Annotated[int, gauge("jobs_leased", "Leased", "Jobs of an agent that an observer has.")] = 0
    observers: Annotated[int, gauge("jobs_observers", "Observers", "Observers that sent a message within the time of a "
        "lease.")] = 0
    done: Annotated[int, counter("jobs_done", "Done", "Jobs whose result arrived.")] = 0
    failed: Annotated[int, counter("jobs_failed", "Failed", "Jobs whose observer's function raised an error.")] = 0
    cancelled: Annotated[int, counter("jobs_cancelled", "Cancelled", "Jobs that were cancelled.")] = 0
    lost: Annotated[int, counter("jobs_lost", "Lost", "Jobs whose last lease ended without a result.")] = 0
    expired: Annotated[int, counter("jobs_expired", "Expired", "Leases that ended without a result.")] = 0
    late: Annotated[int, counter("jobs_late", "Late", "Results not used because they came too late or from too old "
        "weights.")] = 0
    # fmt: on


@dataclass(frozen=True, slots=True)
class StartsStats:
    """Start states of one origin at one moment, as kept by `rl.StartStates`."""

    # fmt: off
    name: str
    """Name of the origin of the states."""
    kept: Annotated[int, gauge("starts_kept", "States kept", "States from which episodes may start now: the best "
        "ones.")]
    draws: Annotated[int, counter("starts_draws", "Episodes started from them", "Number of states handed out to start "
        "an episode.")]
    best: Annotated[float, gauge("starts_best_cost", "Best cost", "Lowest cost of all states ever kept.", adds="min")]
    first: float
    """Cost of the first state."""
    lineage: Annotated[tuple[tuple[float, int], ...], shown("Lineage", "Ancestors of the best state, from the first "
        "state on, with their costs if still known.")]
    """Cost and number of steps from the first state, for each ancestor of the best; the newest `MAX_LINEAGE`."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class InferenceStats:
    """Figures of an inference node at one moment."""

    # fmt: off
    name: str
    endpoint: str
    topic: str
    """Topic of the models that the node follows; "" if it follows none."""
    uptime: Annotated[float, UPTIME]
    requests: Annotated[int, counter("inference_requests", "Requests", "Requests that were answered or refused, "
        "repeated ones included.")]
    rows: Annotated[int, counter("inference_rows", "Rows", "Rows (observations) in the requests of clients; an actor "
        "with eight environments requests eight rows at a time.", docs="remote-policies.md")]
    batches: Annotated[dict[str, int], counter("inference_batches", "Reasons that start batches",
        "Calls of the function, by reason: the batch is full, every alive client has a request, or the oldest request "
        "waited max_wait.", label="reason", docs="remote-policies.md")]
    batched_rows: Annotated[int, counter("inference_batch_rows", "Rows of batches", "Rows passed to the function, "
        "without padding.")]
    expired: Annotated[int, counter("inference_expired", "Expired", "Requests dropped before their batch, because "
        "their clients no longer needed an answer.")]
    resends: Annotated[int, counter("inference_resends", "Resends", "Repeated requests.")]
    failures: Annotated[int, counter("inference_failures", "Failures", "Batches for which the function failed.")]
    weights_failures: Annotated[int, counter("inference_weights_failures", "Models not read",
        "Models that the node could not read; it still uses the former weights.")]
    refused: Annotated[dict[str, int], REFUSED]
    queue_rows: Annotated[int, gauge("inference_queue_rows", "Rows that wait", "Rows that wait for their batch now. "
        "Rows above queue_rows are refused (busy).", docs="remote-policies.md", curve=True)]
    holders: Annotated[dict[str, int], HOLDER_BYTES]
    budget: Annotated[int, BUDGET_BYTES]
    clients: Annotated[int, gauge("inference_clients", "Clients", "Actors that sent a request within the last second, "
        "or the node's `alive` seconds.", docs="remote-policies.md")]
    version: Annotated[int, gauge("inference_model_version", "Version", "Version of the weights with which the next "
        "batch is computed. The node changes it between two batches.", docs="remote-policies.md", curve=True)]
    waited_seconds: float
    """Total seconds that requests waited for their batch."""
    computed_seconds: Annotated[float, counter("inference_forward_seconds", "Computed",
        "Total seconds that the function took.")]
    waits: Annotated[dict[str, Timing], counter("inference_wait_seconds", "Waited", "Seconds from the arrival of "
        "requests to the start of their batch, by its reason.", label="reason")]
    durations: Annotated[dict[str, Timing], histogram("inference_request_duration_seconds", "Time of an answer",
        "Seconds from the arrival of a request to its answer, by the reason of its batch, without the network.",
        label="reason", docs="remote-policies.md")]
    security: Security
    faults: Annotated[int, FAULTS]
    jobs: JobStats = field(default_factory=JobStats)
    """Jobs of the node's agent, if the node belongs to an agent."""
    starts: Annotated[tuple[StartsStats, ...], by("origin", "name")] = ()
    """Start states of the node's agent, by origin."""
    # fmt: on
