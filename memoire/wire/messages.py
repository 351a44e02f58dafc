"""Bodies of messages: the fields of each message's tail, with all bounds in the types.

Table kinds define their own messages. `frames` converts messages to bytes and back; `rows` has the packed rows that
some messages carry. docs/development/wire.md describes each message.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from memoire.arguments import NAME_OF_PROCESS
from memoire.errors import ParameterError
from memoire.limits import NO_LIMIT

from . import types
from .rows import ACCOUNT_KEY_BYTES, unpack_accounts, unpack_counts, unpack_sums
from .types import PayloadRule, Type

VERSION: Final = 2

# Types of fields. All texts, lists and numbers have bounds; counts stay below 2**53, which a float64 holds exactly.

MAX_INFERENCE = 64
"""Most addresses of inference nodes in a WELCOME."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Parts: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
StepNumber: TypeAlias = Annotated[int, Meta(ge=-1, le=2**53 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=2.0**40)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Signed: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Word: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash: TypeAlias = Annotated[int, Meta(ge=0)]  # 64 bits: msgpack has no larger numbers
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=16384)]
ProcessName: TypeAlias = Annotated[str, Meta(max_length=253, pattern=rf"\A({NAME_OF_PROCESS})?\Z")]
Topic: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[^\x00]*$")]
Versions: TypeAlias = Annotated[dict[Name, Count], Meta(max_length=1024)]
Parameter: TypeAlias = (
    bool | int | float | str | Annotated[list[bool | int | float | str], Meta(max_length=1024)] | None
)
Parameters: TypeAlias = Annotated[dict[Name, Parameter], Meta(max_length=64)]


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tail of a message: a msgpack map of the fields that differ from their defaults. Unknown fields are ignored."""

    type: ClassVar[Type]
    changes: ClassVar[bool] = False
    """True if the reply waits until the changes of this request are on disk."""

    @property
    def is_saved_first(self) -> bool:
        """True if a server accepts the request only while its state folder can be written."""
        return self.changes


class PushedBody(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Tail of a message that is pushed and never answered, with totals by which a server counts lost messages."""

    since: Word = 0  # account of the message, from WELCOME; 0: any account
    number: Count = 0  # messages pushed to the home server so far, with this message
    pushed_bytes: Count = 0  # payload bytes of the pushed messages


_B = TypeVar("_B", bound=Body)
BODIES: Final[dict[Type, type[Body]]] = {}
DECODERS: Final[dict[Type, msgspec.msgpack.Decoder[Body]]] = {}
"""Decoders of the bodies that this process has loaded, by type; `BODIES` has the classes."""
WITH_PAYLOAD: Final[dict[int, tuple[Type, Callable[[Any], Body]]]] = {}
"""Types that may have a payload and the decoders of their bodies, by number, for the fast path of `frames.parse`."""


def body(kind: Type) -> Callable[[type[_B]], type[_B]]:
    """Return a decorator that registers a class as the body of a message type, so that messages can be read.

    Raises:
        ParameterError: the type has a body already, or the type is pushed and the class is no `PushedBody`.
    """

    def register(body_class: type[_B]) -> type[_B]:
        if kind.pushed and not issubclass(body_class, PushedBody):
            raise ParameterError("body", body_class, f"a PushedBody: messages of type {kind.name} are pushed")
        if kind in BODIES:
            raise ParameterError("body", body_class, f"the only body of {kind.name}, which has {BODIES[kind]}")
        decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(body_class)
        body_class.type, BODIES[kind], DECODERS[kind] = kind, body_class, decoder
        if kind.payload is not PayloadRule.NEVER:
            WITH_PAYLOAD[kind.number] = kind, decoder.decode
        return body_class

    return register


class TailRow(msgspec.Struct, frozen=True, array_like=True):
    """Row inside a tail: a msgpack array of all its fields; further elements are ignored."""


class ServerRate(TailRow, frozen=True, array_like=True):
    """State of the rate limiter of one server: samples drawn against entries recorded; see `rate`."""

    surplus: Signed
    is_told: bool  # True if a reader reported surplus, which is that of all servers
    inserted: Count  # entries that this server's clients reported since its start
    drawn: Count  # samples that all readers drew from this server
    ratio: Weight  # samples_per_insert and its tolerance, at which surplus was computed
    tolerance: Weight


class ClusterRate(TailRow, frozen=True, array_like=True):
    """State of the rate limiter of all servers together, as a reader reports it to each server."""

    surplus: Signed
    inserted: Count  # `inserted` and `drawn` of this server's ServerRate from which the reader computed surplus
    drawn: Count
    entries: Count  # entries that can be drawn from the other servers
    share: Annotated[float, Meta(ge=0.0, le=1.0)]  # fraction of the entries to record that this server's clients get
    ratio: Weight
    tolerance: Weight


@body(types.HELLO)
class Hello(Body, frozen=True, kw_only=True, omit_defaults=True):
    """First request of a client, reader or publisher; answered by WELCOME. The header has 0 or the last home."""

    role: Annotated[str, Meta(max_length=16)] = "actor"  # actor, reader, publisher
    table: Name = ""  # name of the requested table; "": the first
    label: Small = 0  # 32-bit uuid of log lines
    software: Name = ""  # "memoire 0.1.0"
    host: Name = ""
    name: ProcessName = ""  # name of the process from a person or Kubernetes; need not be unique
    pid: Count = 0
    codecs: Annotated[list[Name], Meta(max_length=8)] = []  # codecs that the client can pack and unpack
    scalars: Annotated[dict[Name, float], Meta(max_length=64)] = {}  # from a reader: scalars that its learner reports
    figures: Annotated[dict[Name, float], Meta(max_length=32)] = {}  # from a reader: the reader's own counters
    inserted: Count = 0  # from an actor: recorded steps of this run, less passed_steps
    takes: Annotated[dict[Name, Count], Meta(max_length=32)] = {}  # limits on replies that differ from the default

    @property
    def is_saved_first(self) -> bool:
        """True for `memoire doctor`, which checks the whole server. All other clients may send HELLO while a disk
        fails, since a server takes silent clients for gone.
        """
        return self.role == "doctor"


class NodeEndpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Addresses that a client connects to; the first node on the way fills in its own addresses."""

    request: Annotated[str, Meta(max_length=1024)] = ""
    push: Annotated[str, Meta(max_length=1024)] = ""
    publish: Annotated[str, Meta(max_length=1024)] = ""


@body(types.WELCOME)
class Welcome(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to HELLO: schema and parameters. The client uses the header's home, run and fingerprint from now on."""

    schema: Annotated[str, Meta(max_length=262144)]  # Schema.to_json()
    parameters: Parameters = {}  # Parameters.to_wire()
    parameters_version: Count = 0
    max_step: Count = 0  # capacity of the client's memory in entries; 0: the client decides
    storage: Annotated[str, Meta(max_length=16)] = "caches"  # caches, episodes
    run_name: Name = ""
    home_name: Name = ""
    epoch: Word = 0  # grows at each start of the server
    servers: Annotated[list[Name], Meta(max_length=4096)] = []
    endpoints: NodeEndpoints = NodeEndpoints()
    table: Small = 0  # number of the table, for headers
    table_name: Name = ""
    credit: Count = 0  # bytes of caches and episodes that may be in flight
    models: Versions = {}
    codecs: Annotated[list[Name], Meta(max_length=8)] = []  # codecs of the client that this node has too
    limits: Annotated[dict[Name, Count], Meta(max_length=32)] = {}  # message_bytes, request_bytes, tail_bytes, ...
    finished: bool = False
    software: Name = ""  # version of the server's software
    since: Word = 0  # the server's epoch at the opening of the account; pushes count from here
    durable: bool = False  # the server replies when data is on disk
    leaving: Annotated[list[Name], Meta(max_length=4096)] = []  # servers that accept no new clients
    granted_steps: Count = NO_LIMIT  # meaning as in UPDATED
    unmet: Annotated[list[Name], Meta(max_length=4096)] = []  # addresses behind proxies that have not answered yet
    pages: Annotated[list[Name], Meta(max_length=4096)] = []  # web pages of nodes on the way: "http://HOST:PORT"
    outputs: Annotated[str, Meta(max_length=262144)] = ""  # RowSchema.to_json(), from an inference node
    inference: Annotated[list[Name], Meta(max_length=MAX_INFERENCE)] = []  # addresses of nodes that act for actors
    starts: Annotated[str, Meta(max_length=262144)] = ""  # RowSchema.to_json() of start states, from an agent
    entries: Annotated[str, Meta(max_length=262144)] = ""  # Schema.to_json() of observers' entries, from an agent


class Line(TailRow, frozen=True, array_like=True):
    """Log line of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    label: Small
    text: Text


TRAIN: Final = 0
TEST: Final = 1
"""Kinds of episodes: training (0) and test (1)."""


class Ended(TailRow, frozen=True, array_like=True):
    """Closed episode of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    length: Count
    returned: float  # sum of the rewards over steps and dimensions
    kind: Small = 0  # TRAIN or TEST; only training episodes count


@body(types.UPDATE)
class Update(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Report of a client's totals since its start, so that a resend or a lost reply changes nothing."""

    epoch: Word = 0  # newest epoch of the home server that the client knows
    episodes: Count = 0
    steps: Count = 0
    passed_steps: Count = 0  # steps that are no inserts: recorded beyond granted_steps, and not pushed
    caches: Count = 0  # caches and episodes pushed to this server
    cache_bytes: Count = 0  # payload bytes of caches and episodes pushed to this server
    skipped: Count = 0  # caches not pushed because the credit was used up
    generated_bytes: Count = 0  # bytes of all entries ever recorded
    total_weight: Weight = 0.0  # S_c, N_c and the smallest positive weight, read at one moment
    positives: Count = 0
    minimum: Weight = 0.0
    parameters_version: Count = 0
    models: Versions = {}  # version of each topic that the client uses now
    scalars: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    lines: Annotated[list[Line], Meta(max_length=4096)] = []  # lines without acknowledgement
    dropped_lines: Count = 0  # lines dropped from a full queue
    ended: Annotated[list[Ended], Meta(max_length=4096)] = []  # closed episodes without acknowledgement
    applied: Count = 0  # feedback: samples whose priority was set, were gone, or could not be used
    stale: Count = 0
    gone: Count = 0  # stale samples whose entries were gone before the home server received their TD errors
    entries: Count = 0  # entries in the client's memory
    feedback_through: Count = 0  # number of the newest feedback that was applied
    leaving: bool = False
    finished: bool = False  # the client knows that the run is over


@body(types.UPDATED)
class Updated(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to UPDATE: totals of a client at its home server. A payload is a feedback container for the client."""

    epoch: Word = 0
    durable: bool = False  # totals and lines below are on disk, not only in memory
    episodes: Count = 0
    steps: Count = 0
    lines_through: Count = 0
    ended_through: Count = 0
    caches: Count = 0  # accepted caches and episodes
    received_bytes: Count = 0  # payload bytes of received caches and episodes, accepted or not
    rejected: Annotated[dict[Name, Count], Meta(max_length=64)] = {}  # rejected messages by code
    lost: Count = 0  # messages that cannot arrive any more
    lost_bytes: Count = 0
    credit: Count = 0
    parameters_version: Count = 0
    parameters: Parameters | None = None  # parameters if the client's are older
    models: Versions = {}
    feedback_through: Count = 0  # number of the newest feedback in the payload
    feedback_age: Seconds = 0.0  # seconds since the home server received the payload's oldest feedback
    feedback_waiting: Count = 0  # samples of feedback that do not fit into the payload: send UPDATE again at once
    run_name: Name = ""  # current run; after a change, the client reports the end of the former run before HELLO
    finished: bool = False
    time: Seconds = 0.0  # unix time of the answering server's clock
    leaving: bool = False  # the server is being drained: HELLO gets another
    granted_steps: Count = NO_LIMIT  # most steps, less passed_steps, that the client may record before it asks again
    wait: Text = ""  # reason if the client may not go on


@body(types.CACHE)
class Cache(PushedBody, frozen=True, kw_only=True, omit_defaults=True):
    """Cache that a client pushes to its home server, without an answer; the payload is a container of kind CACHE."""


@body(types.EPISODE)
class EpisodePush(PushedBody, frozen=True, kw_only=True, omit_defaults=True):
    """Whole episode that a client pushes to its home server without an answer; the payload is an EPISODE container."""

    has_final: bool = False  # the container has FINAL blocks
    multiplier: Weight = 1.0  # episodic weight multiplier
    update_value: bool = True
    update_weight: bool = True
    terminated: bool | None = None  # None: unknown
    cut: bool = False  # the writer cut the episode, which continues in the next one
    bootstrap: Annotated[list[float], Meta(max_length=65536)] | None = (
        None  # value of the final state, per reward dimension
    )


@body(types.FEEDBACK)
class Feedback(Body, frozen=True, kw_only=True, omit_defaults=True):
    """TD errors for samples of one server's clients; the payload is a container of kind FEEDBACK. Answered by TAKEN."""


@body(types.TAKEN)
class Taken(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to FEEDBACK and CONTROL."""

    samples: Count = 0  # samples whose TD errors the server accepted for clients
    lost: Count = 0  # samples whose client the server does not know (any more)
    parameters_version: Count = 0
    finished: bool = False


@body(types.NOTICE)
class Notice(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Notice of a new model version, published; the payload is the model if it has at most `inline_model` bytes."""

    topic: Topic
    version: Count
    size: Count
    checksum: Hash  # XXH3 of the body
    text: bool = False  # the model was published as str
    epoch: Word = 0


@body(types.FETCH)
class Fetch(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for a range of a model's bytes; answered by CHUNK, or by REFUSED with code missing."""

    topic: Topic
    version: Count = 0  # 0: the newest
    offset: Count = 0
    size: Count = 0  # most bytes of the range; 0: the node decides


@body(types.CHUNK)
class Chunk(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to FETCH: a range of a model's bytes as the payload; an empty model has no payload."""

    topic: Topic
    version: Count
    size: Count  # size and checksum of the whole model
    checksum: Hash
    offset: Count = 0
    text: bool = False
    home: Hash = 0  # name's hash and epoch of the publishing server, as in a notice
    epoch: Word = 0


@body(types.PUBLISH)
class Publish(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Range of a new model's bytes for a server. Ranges come in order; PUBLISHED answers each range."""

    changes: ClassVar = True
    topic: Topic
    size: Count
    checksum: Hash  # XXH3 of the whole model
    offset: Count = 0
    text: bool = False
    version: Count = 0  # 0: the next one


@body(types.PUBLISHED)
class Published(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to PUBLISH: the bytes that the server has; `version` is set once the whole model is published."""

    topic: Topic
    received: Count = 0
    version: Count = 0


@body(types.SUMS)
class Sums(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request of a reader for the sums of a server's clients, which also reserves samples; answered by SUMMED."""

    reserve: Small = 0  # unused samples to reserve for this reader, over all clients
    elsewhere: Count = 0  # samples that the reader has drawn from other servers so far
    part: Small = 0  # the reader has every `of`-th client in the order of registration, beginning with client `part`
    of: Parts = 1
    wanted: Small = 0  # size of a batch that cannot be drawn because entries or samples are missing
    band: ClusterRate | None = None  # rate of all servers, if the rate is limited
    after: Annotated[bytes, Meta(max_length=16)] | None = None  # client of the last received row; null: no pages

    def __post_init__(self) -> None:
        _check_part(self.part, self.of)


@body(types.SUMMED)
class Summed(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to SUMS: one packed row of `CLIENT_SUMS` for each client of which the server holds samples."""

    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    is_whole: bool = True  # True if these are the last rows
    standing: ServerRate | None = None  # rate of this server, if drawing or recording is limited
    parameters: Hash = 0  # fingerprint of the table's parameters; 0: from an older server

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


@body(types.DRAW)
class Draw(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for samples by packed `CLIENT_COUNTS`; answered by DRAWN. A resend keeps its sequence number."""

    counts: Annotated[bytes, Meta(max_length=2**27)] = b""
    reserve: Small = 0
    elsewhere: Count = 0
    part: Small = 0
    of: Parts = 1
    wanted: Small = 0
    band: ClusterRate | None = None
    in_pages: bool = False  # the reply may have a part of the rows, and the reader requests the others by SUMS
    packed: bool = False  # if compression is "auto": this reader measured that packed frames are faster

    def __post_init__(self) -> None:
        unpack_counts(self.counts)
        _check_part(self.part, self.of)


@body(types.DRAWN)
class Drawn(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to DRAW: samples as a container of kind DRAWN (none if all clients were gone), and sums after the draw."""

    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    is_whole: bool = True  # True if these are the last rows
    standing: ServerRate | None = None  # rate of this server, if drawing or recording is limited
    parameters: Hash = 0  # fingerprint of the parameters of the samples, as in SUMMED

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


class FragmentRow(TailRow, frozen=True, array_like=True):
    """Fragment of a rollout: its client, its number, the size of its container, and its end."""

    client: Annotated[bytes, Meta(min_length=16, max_length=16)]
    number: Count  # number by its client, the same after a split
    bytes: Count  # bytes of the fragment's container
    has_final: bool
    terminated: bool | None
    cut: bool
    bootstrap: Annotated[list[float], Meta(max_length=65536)] | None


@body(types.INFER)
class Infer(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for an inference node's outputs of rows, a container of kind ROWS; answered by INFERRED."""

    patience: Seconds  # seconds until the client needs no answer any more
    min_version: Count = 0  # least version of the weights: the rows wait for it
    job: Count = 0  # running job that the rows belong to; 0: none


@body(types.INFERRED)
class Inferred(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to INFER: the outputs of the rows, a container of kind ROWS, all from one version of the weights."""

    version: Count = 0  # version of the weights; 0: unknown
    batch: Small = 0  # rows of the batch that the function computed together
    waited: Seconds = 0.0  # time in the queue until its batch began


@body(types.WORK)
class WorkRequest(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request of an observer for a job, or heartbeat of a job; answered by JOB, after a wait if no job is available."""

    patience: Seconds  # longest wait for a job
    job: Count = 0  # running job: the answer comes at once and says if it is cancelled. 0: gives up a former job


@body(types.JOB)
class Job(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to WORK: a job, with its start state as a container of kind ROWS if it has one; or no job."""

    number: Count = 0  # 0: no job
    lease: Seconds = 0.0  # seconds without a heartbeat until another observer may get the job
    options: Parameters = {}
    cancelled: bool = False  # the job in WORK is cancelled
    leaving: bool = False  # the agent is closing: ask another agent


@body(types.RESULT)
class Result(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a job: the payload is containers of kind EPISODE, one after the other. Answered by TAKEN."""

    job: Count
    status: Literal["done", "failed"] = "done"
    text: Text = ""  # reason of a failure
    fragments: Annotated[list[FragmentRow], Meta(max_length=1024)] = []


@body(types.CONTROL)
class Control(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request of a learner or operator to change parameters, begin or end a run, or drain a server; gets TAKEN."""

    changes: ClassVar = True
    parameters: Parameters = {}  # parameters to change
    finish: bool = False
    run: Name = ""  # begin or continue this run
    drain: bool = False  # move all clients to other servers
    discard_mismatched: bool = False  # discard caches that were made with other parameters than the new ones


@body(types.NEWS)
class News(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Notice that a server publishes if it has news for its clients; its clients then send UPDATE soon."""

    epoch: Word = 0


@body(types.LEDGER)
class LedgerRequest(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for a server's accounts; answered by ACCOUNTS."""

    run: Name = ""  # "": the current run
    after: Annotated[bytes, Meta(max_length=ACCOUNT_KEY_BYTES)] = b""  # key of the last row of the former page


@body(types.ACCOUNTS)
class Accounts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Page of a server's accounts: one packed row of `ACCOUNT` for each client, home and since, in ascending order."""

    run_name: Name
    epoch: Word = 0
    finished: bool = False
    durable: bool = False
    runs: Annotated[list[Name], Meta(max_length=1024)] = []  # all runs that this server knows, the newest last
    accounts: Annotated[bytes, Meta(max_length=2**18)] = b""
    more: bool = False  # rows follow the last one
    applied: Count = 0  # priorities that this server set for entries that it stores, since its start
    stale: Count = 0  # TD errors for entries that were overwritten
    time: Seconds = 0.0  # unix, of the server's clock
    guests: Count = 0  # clients without counts, heard lately, that do not know yet that the server is drained
    unfinished: Count = 0  # prompts or rows that users of tables have yet to answer, draw, commit or clear

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


@body(types.INHERIT)
class Inherit(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Transfer of accounts from a server that is being drained to a server that keeps them; answered by TAKEN."""

    changes: ClassVar = True
    run_name: Name
    finished: bool = False
    accounts: Annotated[bytes, Meta(max_length=2**18)] = b""

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


@body(types.TAKE_SNAPSHOT)
class TakeSnapshot(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for a snapshot of a server's data, or for the progress of an earlier request; answered by SNAPSHOT."""

    name: Name  # name of the file in the state folder
    order: Annotated[bytes, Meta(min_length=16, max_length=16)]  # id of the snapshot: a repeated id asks for progress


@body(types.SNAPSHOT)
class SnapshotReply(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to TAKE_SNAPSHOT: state of the snapshot and, once it is done, its path, size and contents."""

    name: Name
    state: Annotated[str, Meta(max_length=16)]  # writing, done, failed
    text: Text = ""  # reason of a failure
    path: Text = ""
    bytes: Count = 0
    seconds: Seconds = 0.0
    caches: Count = 0
    samples: Count = 0
    episodes: Count = 0
    entries: Count = 0


@body(types.REFUSED)
class Refusal(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a request that a node rejects, with the reason."""

    code: Annotated[str, Meta(max_length=64)]  # one of `frames.CODES`, or a code of a newer node
    text: Text = ""
    field: Name = ""
    limit: Count = 0
    versions: Annotated[list[Small], Meta(max_length=16)] = msgspec.field(default_factory=lambda: [VERSION])
    """Versions of the protocol that the refusing node speaks."""


def _check_part(part: int, of: int) -> None:
    if part >= of:
        raise ValueError(f"part {part} of {of}: parts are counted from 0")
