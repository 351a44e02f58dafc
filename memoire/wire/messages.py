"""The messages: what the tail of each one holds, with all bounds in the types. Those of a kind of table are with it.

`frames` turns a message into bytes and back, `rows` is what some of them carry packed, `identity` how names are said.
docs/wire.md has each message on its own.
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

# What tails are made of. All texts, lists and numbers have bounds; counts stay below 2**53, which a float64 holds.

MAX_INFERENCE = 64
"""Addresses of inference nodes that a WELCOME has room for."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Parts: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
StepNumber: TypeAlias = Annotated[int, Meta(ge=-1, le=2**53 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=2.0**40)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Signed: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Word: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash: TypeAlias = Annotated[int, Meta(ge=0)]  # of 64 bits, which is all that msgpack has
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
    """The tail of a message: a msgpack map of the fields that differ from their defaults; unknown ones are ignored."""

    type: ClassVar[Type]
    changes: ClassVar[bool] = False
    """Whether its reply waits until what it changes is on disk."""

    @property
    def is_saved_first(self) -> bool:
        """Whether a server takes it only while its state folder can be written."""
        return self.changes


class PushedBody(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The tail of a message that is pushed, and never answered: how a server counts what its clients push."""

    since: Word = 0  # the account that it belongs to, as WELCOME said; 0: whichever there is
    number: Count = 0  # messages pushed to this home since then, this one included
    pushed_bytes: Count = 0  # their payload bytes, this one's included


_B = TypeVar("_B", bound=Body)
BODIES: Final[dict[Type, type[Body]]] = {}
DECODERS: Final[dict[Type, msgspec.msgpack.Decoder[Body]]] = {}
"""By type, the bodies that this process has loaded, and what reads them."""
WITH_PAYLOAD: Final[dict[int, tuple[Type, Callable[[Any], Body]]]] = {}
"""By number, what reads those of messages that may have a payload: `frames` looks here first."""


def body(kind: Type) -> Callable[[type[_B]], type[_B]]:
    """Decorates the class of a type's body: messages of this type can be made and read from then on.

    Raises:
        ParameterError: the type has a body already, or is pushed, and this is no `PushedBody`.
    """

    def register(made: type[_B]) -> type[_B]:
        if kind.pushed and not issubclass(made, PushedBody):
            raise ParameterError("body", made, f"a PushedBody: messages of type {kind.name} are pushed")
        if kind in BODIES:
            raise ParameterError("body", made, f"of a type without one; that of {kind.name} is {BODIES[kind]}")
        decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(made)
        made.type, BODIES[kind], DECODERS[kind] = kind, made, decoder
        if kind.payload is not PayloadRule.NEVER:
            WITH_PAYLOAD[kind.number] = kind, decoder.decode
        return made

    return register


class TailRow(msgspec.Struct, frozen=True, array_like=True):
    """A row inside of a tail: a msgpack array of all its fields; further elements are ignored."""


class ServerRate(TailRow, frozen=True, array_like=True):
    """How drawing stands beside recording, as a server sees it; see `rate`."""

    surplus: Signed
    is_told: bool  # whether it is that of all servers, as a reader told
    inserted: Count  # entries that clients of this server reported, since it began
    drawn: Count  # samples that anybody drew here
    ratio: Weight  # samples_per_insert and its tolerance, under which this is so
    tolerance: Weight


class ClusterRate(TailRow, frozen=True, array_like=True):
    """The same for all servers together, as a reader tells each of them."""

    surplus: Signed
    inserted: Count  # what this server had said of its own when the reader knew that surplus
    drawn: Count
    entries: Count  # that can be drawn at the other servers
    share: Annotated[float, Meta(ge=0.0, le=1.0)]  # of what may be recorded, for this server's clients
    ratio: Weight
    tolerance: Weight


@body(types.HELLO)
class Hello(Body, frozen=True, kw_only=True, omit_defaults=True):
    """First request of a client, reader or publisher, answered by WELCOME. The header's home is 0 or its last one."""

    role: Annotated[str, Meta(max_length=16)] = "actor"  # actor, reader, publisher
    table: Name = ""  # name of the table it wants; "": the first
    label: Small = 0  # the 32-bit uuid of log lines
    software: Name = ""  # "memoire 0.1.0"
    host: Name = ""
    name: ProcessName = ""  # that a person or Kubernetes gave to the process; several may have the same
    pid: Count = 0
    codecs: Annotated[list[Name], Meta(max_length=8)] = []  # compressions it can undo and make
    scalars: Annotated[dict[Name, float], Meta(max_length=64)] = {}  # of a reader: what its learner shows
    figures: Annotated[dict[Name, float], Meta(max_length=32)] = {}  # of a reader: what it has counted by itself
    inserted: Count = 0  # of an actor: steps of this run, less passed_steps, that it has recorded until now
    takes: Annotated[dict[Name, Count], Meta(max_length=32)] = {}  # limits on replies to it that are not the default

    @property
    def is_saved_first(self) -> bool:
        """`memoire doctor` asks whether all is well. Clients that count are heard while a disk fails: one that is not
        heard from has gone.
        """
        return self.role == "doctor"


class Endpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a client connects to; the first hop fills in its own."""

    request: Annotated[str, Meta(max_length=1024)] = ""
    push: Annotated[str, Meta(max_length=1024)] = ""
    publish: Annotated[str, Meta(max_length=1024)] = ""


@body(types.WELCOME)
class Welcome(Body, frozen=True, kw_only=True, omit_defaults=True):
    """All that a client needs to begin. The header's home, run and fingerprint are the ones it uses from now on."""

    schema: Annotated[str, Meta(max_length=262144)]  # Schema.to_json()
    parameters: Parameters = {}  # Parameters.to_wire()
    parameters_version: Count = 0
    max_step: Count = 0  # entries a client's memory has room for; 0: the client decides
    storage: Annotated[str, Meta(max_length=16)] = "caches"  # caches, episodes
    run_name: Name = ""
    home_name: Name = ""
    epoch: Word = 0  # grows at each start of the home
    servers: Annotated[list[Name], Meta(max_length=4096)] = []
    endpoints: Endpoints = Endpoints()
    table: Small = 0  # the table's number, for headers
    table_name: Name = ""  # its name
    credit: Count = 0  # bytes of caches and episodes that may be on the way
    models: Versions = {}
    codecs: Annotated[list[Name], Meta(max_length=8)] = []  # those of the client's that this node has too
    limits: Annotated[dict[Name, Count], Meta(max_length=32)] = {}  # message_bytes, request_bytes, tail_bytes, ...
    finished: bool = False
    software: Name = ""  # of the home
    since: Word = 0  # epoch since which the home has forgotten nothing of this client: pushes are counted from then
    durable: bool = False  # replies of this home mean "on disk"
    leaving: Annotated[list[Name], Meta(max_length=4096)] = []  # those of the servers that take no new clients
    granted_steps: Count = NO_LIMIT  # as in UPDATED
    unmet: Annotated[list[Name], Meta(max_length=4096)] = []  # addresses behind proxies where nobody has answered yet
    pages: Annotated[list[Name], Meta(max_length=4096)] = []  # of nodes on the way: "http://HOST:PORT"
    outputs: Annotated[str, Meta(max_length=262144)] = ""  # RowSchema.to_json(), of an inference node
    inference: Annotated[list[Name], Meta(max_length=MAX_INFERENCE)] = []  # addresses of nodes that act for actors
    starts: Annotated[str, Meta(max_length=262144)] = ""  # RowSchema.to_json(), of an agent: where episodes begin
    entries: Annotated[str, Meta(max_length=262144)] = ""  # Schema.to_json(), of an agent: what observers record


class Line(TailRow, frozen=True, array_like=True):
    """One log line of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    label: Small
    text: Text


TRAIN: Final = 0
TEST: Final = 1
"""Kinds of episodes."""


class Ended(TailRow, frozen=True, array_like=True):
    """One closed episode of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    length: Count
    returned: float  # sum of its rewards (first reward dimension first, all added up)
    kind: Small = 0  # 0 of training, 1 a test; only those of training count


@body(types.UPDATE)
class Update(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a client has done since it was made, cumulative, so that a resend or a lost reply changes nothing."""

    epoch: Word = 0  # of the home, as last heard
    episodes: Count = 0
    steps: Count = 0
    passed_steps: Count = 0  # those of them that are no inserts: recorded beyond granted_steps, and not pushed
    caches: Count = 0  # and episodes pushed to this home
    cache_bytes: Count = 0  # payload bytes of caches and episodes pushed to this home
    skipped: Count = 0  # caches not pushed for want of credit
    generated_bytes: Count = 0  # bytes of all entries ever recorded
    total_weight: Weight = 0.0  # S_c, N_c and the smallest positive weight, from one moment
    positives: Count = 0
    minimum: Weight = 0.0
    parameters_version: Count = 0
    models: Versions = {}  # version of each topic that it uses now
    scalars: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    lines: Annotated[list[Line], Meta(max_length=4096)] = []  # not yet acknowledged
    dropped_lines: Count = 0  # dropped because too many waited
    ended: Annotated[list[Ended], Meta(max_length=4096)] = []  # not yet acknowledged
    applied: Count = 0  # feedback: samples whose priority was set, were gone, or could not be used
    stale: Count = 0
    gone: Count = 0  # of the stale ones, those that were gone before the home was given their TD error
    entries: Count = 0  # that its memory holds
    feedback_through: Count = 0  # number of the newest feedback that was applied
    leaving: bool = False
    finished: bool = False  # it knows that the run is over


@body(types.UPDATED)
class Updated(Body, frozen=True, kw_only=True, omit_defaults=True):
    """What the home has of a client. The payload, where there is one, is a feedback container for this client."""

    epoch: Word = 0
    durable: bool = False  # totals and lines below are on disk, not only in memory
    episodes: Count = 0
    steps: Count = 0
    lines_through: Count = 0
    ended_through: Count = 0
    caches: Count = 0  # and episodes accepted
    received_bytes: Count = 0  # payload bytes of caches and episodes that came, accepted or not
    rejected: Annotated[dict[Name, Count], Meta(max_length=64)] = {}  # messages by code
    lost: Count = 0  # messages that cannot come any more
    lost_bytes: Count = 0
    credit: Count = 0
    parameters_version: Count = 0
    parameters: Parameters | None = None  # only when newer than the client's
    models: Versions = {}
    feedback_through: Count = 0  # number of the newest feedback in the payload
    feedback_age: Seconds = 0.0  # since the home was given the oldest of it
    feedback_waiting: Count = 0  # samples of feedback that wait beyond the payload: ask again at once
    run_name: Name = ""  # the run that is counted now; UPDATE says the rest about a former one before HELLO
    finished: bool = False
    time: Seconds = 0.0  # unix, of the home's clock when it answered
    leaving: bool = False  # the home is being drained: say HELLO to be given another one
    granted_steps: Count = NO_LIMIT  # steps less passed_steps that it may come to before it has to ask again
    wait: Text = ""  # why not more, where it may not go on


@body(types.CACHE)
class Cache(PushedBody, frozen=True, kw_only=True, omit_defaults=True):
    """A cache on its way to the home; the payload is a container of kind CACHE. Pushed, never answered."""


@body(types.EPISODE)
class Episode(PushedBody, frozen=True, kw_only=True, omit_defaults=True):
    """A whole episode on its way to the home; the payload is a container of kind EPISODE. Pushed, never answered."""

    has_final: bool = False  # FINAL blocks are there
    multiplier: Weight = 1.0  # episodic weight multiplier
    update_value: bool = True
    update_weight: bool = True
    terminated: bool | None = None  # None: nobody said how it ended
    cut: bool = False  # by its writer: the episode goes on in the next one
    bootstrap: Annotated[list[float], Meta(max_length=65536)] | None = (
        None  # value of the final state, per reward dimension
    )


@body(types.FEEDBACK)
class Feedback(Body, frozen=True, kw_only=True, omit_defaults=True):
    """New TD errors for samples of one home's clients: a container of kind FEEDBACK. Answered by TAKEN."""


@body(types.TAKEN)
class Taken(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to FEEDBACK and CONTROL."""

    samples: Count = 0  # that were handed on
    lost: Count = 0  # whose client is not known here (any more)
    parameters_version: Count = 0
    finished: bool = False


@body(types.NOTICE)
class Notice(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A new version of a model, published; a body of at most `inline_model` bytes is the payload."""

    topic: Topic
    version: Count
    size: Count
    checksum: Hash  # XXH3 of the body
    text: bool = False  # it was published as str
    epoch: Word = 0


@body(types.FETCH)
class Fetch(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a stretch of a model's body; answered by CHUNK, or REFUSED with code missing."""

    topic: Topic
    version: Count = 0  # 0: the newest
    offset: Count = 0
    size: Count = 0  # most bytes wanted; 0: as the node likes


@body(types.CHUNK)
class Chunk(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of a model's body, the payload; an empty body has none."""

    topic: Topic
    version: Count
    size: Count  # of the whole body, as its checksum
    checksum: Hash
    offset: Count = 0
    text: bool = False
    home: Hash = 0  # of the name of the server that it was published at, and its epoch, as in the notice
    epoch: Word = 0


@body(types.PUBLISH)
class Publish(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Brings a stretch of a new model to a server; stretches come in order, each is answered by PUBLISHED."""

    changes: ClassVar = True
    topic: Topic
    size: Count
    checksum: Hash  # XXH3 of the whole body
    offset: Count = 0
    text: bool = False
    version: Count = 0  # 0: the next one


@body(types.PUBLISHED)
class Published(Body, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a model the server has; `version` is set when that is all of it and everyone is told."""

    topic: Topic
    received: Count = 0
    version: Count = 0


@body(types.SUMS)
class Sums(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A reader asks for a server's clients and keeps samples for itself; answered by SUMMED."""

    reserve: Small = 0  # unused samples to hold back for this reader, over all clients
    elsewhere: Count = 0  # samples that it has drawn from other servers so far
    part: Small = 0  # its clients are every `of`-th one in the order in which they came, beginning with this one
    of: Parts = 1
    wanted: Small = 0  # samples of a batch that cannot be drawn for want of entries or samples
    band: ClusterRate | None = None  # how it stands with all servers, where that is limited
    after: Annotated[bytes, Meta(max_length=16)] | None = None  # client of the last row that came; null: no pages

    def __post_init__(self) -> None:
        _check_part(self.part, self.of)


@body(types.SUMMED)
class Summed(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answers SUMS: for each client of which the server holds samples, one row of `CLIENT_SUMS`, packed."""

    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    is_whole: bool = True  # whether no further rows are to be asked for
    standing: ServerRate | None = None  # where drawing or recording is limited
    parameters: Hash = 0  # fingerprint of those that the table has; 0: an older server does not say it

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


@body(types.DRAW)
class Draw(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Takes samples of a server's clients: `CLIENT_COUNTS`, packed; answered by DRAWN. A resend has its sequence."""

    counts: Annotated[bytes, Meta(max_length=2**27)] = b""
    reserve: Small = 0
    elsewhere: Count = 0
    part: Small = 0
    of: Parts = 1
    wanted: Small = 0
    band: ClusterRate | None = None
    in_pages: bool = False  # the reply may have a part of the rows, and SUMS asks for the others
    packed: bool = False  # where compression is "auto": this reader has found that packed frames come sooner

    def __post_init__(self) -> None:
        unpack_counts(self.counts)
        _check_part(self.part, self.of)


@body(types.DRAWN)
class Drawn(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The samples, a container of kind DRAWN (none when all clients were gone), and the sums after the draw."""

    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    is_whole: bool = True  # whether no further rows are to be asked for
    standing: ServerRate | None = None  # where drawing or recording is limited
    parameters: Hash = 0  # fingerprint of those that the samples were drawn by, as in SUMMED

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


class FragmentRow(TailRow, frozen=True, array_like=True):
    """A fragment of rollouts: where its entries are from, and how it ends."""

    client: Annotated[bytes, Meta(min_length=16, max_length=16)]
    number: Count  # what its client calls it, the same after a split
    bytes: Count  # of its container
    has_final: bool
    terminated: bool | None
    cut: bool
    bootstrap: Annotated[list[float], Meta(max_length=65536)] | None


@body(types.INFER)
class Infer(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks an inference node for its function's value of some rows: a container of kind ROWS. Answered by INFERRED."""

    patience: Seconds  # after which whoever asks needs no answer any more
    min_version: Count = 0  # of the weights: the rows wait until these are there
    job: Count = 0  # that the rows are for, which goes on; 0: none


@body(types.INFERRED)
class Inferred(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The value of each row, a container of kind ROWS of the outputs; all are of one version of the weights."""

    version: Count = 0  # of the weights; 0: nobody has said one
    batch: Small = 0  # rows that were given to the function together
    waited: Seconds = 0.0  # for others


@body(types.WORK)
class Work(Body, frozen=True, kw_only=True, omit_defaults=True):
    """An observer asks an agent for a job, or tells that it is still at one; answered by JOB, late if there is none."""

    patience: Seconds  # after which the answer comes, although there is no job
    job: Count = 0  # that goes on: it is told at once whether it is still wanted. 0: whatever it had is given up


@body(types.JOB)
class Job(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A job, with its start as a container of kind ROWS if it has one; or that there is none."""

    number: Count = 0  # 0: there is none
    lease: Seconds = 0.0  # after which it is somebody else's, unless something is heard of it before
    options: Parameters = {}
    cancelled: bool = False  # the job that WORK named is not wanted any more
    leaving: bool = False  # the agent is closing: ask another one


@body(types.RESULT)
class Result(Body, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a job: containers of kind EPISODE, one after the other. Answered by TAKEN."""

    job: Count
    status: Literal["done", "failed"] = "done"
    text: Text = ""  # why it failed
    fragments: Annotated[list[FragmentRow], Meta(max_length=1024)] = []


@body(types.CONTROL)
class Control(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A learner or operator changes parameters, begins or ends a run, or drains a server; answered by TAKEN."""

    changes: ClassVar = True
    parameters: Parameters = {}  # those to change
    finish: bool = False
    run: Name = ""  # begin this run, or go on with it
    drain: bool = False  # give all clients to other servers
    discard_mismatched: bool = False  # let caches go that were made with other values than these


@body(types.NEWS)
class News(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Published to everyone by a server that has something to tell its clients: whoever hears it sends UPDATE soon."""

    epoch: Word = 0


@body(types.LEDGER)
class Ledger(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a server what it has counted; answered by ACCOUNTS."""

    run: Name = ""  # of which run; "": the one that is counted now
    after: Annotated[bytes, Meta(max_length=ACCOUNT_KEY_BYTES)] = b""  # key of the last row of the page before


@body(types.ACCOUNTS)
class Accounts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A page of a server's accounts: one row for each client, home and since, `ACCOUNT`, packed, in ascending order."""

    run_name: Name
    epoch: Word = 0
    finished: bool = False
    durable: bool = False
    runs: Annotated[list[Name], Meta(max_length=1024)] = []  # all that this server knows, the newest last
    accounts: Annotated[bytes, Meta(max_length=2**18)] = b""
    more: bool = False  # ask for what comes after the last row
    applied: Count = 0  # priorities that this server set of entries that it stores, since it began
    stale: Count = 0  # and of entries that had made room
    time: Seconds = 0.0  # unix, of the server's clock
    guests: Count = 0  # clients that have counted nothing and were heard lately, and do not know that it is drained
    unfinished: Count = 0  # what users of tables have yet to answer, draw, commit or clear

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


@body(types.INHERIT)
class Inherit(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Brings accounts of a server that is being drained to another one, which keeps them; answered by TAKEN."""

    changes: ClassVar = True
    run_name: Name
    finished: bool = False
    accounts: Annotated[bytes, Meta(max_length=2**18)] = b""

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


@body(types.TAKE_SNAPSHOT)
class TakeSnapshot(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Orders a snapshot of what a server holds, or asks how an order stands; answered by SNAPSHOT."""

    name: Name  # of the file in the server's state folder
    order: Annotated[bytes, Meta(min_length=16, max_length=16)]  # names the order: said again, it is the same one


@body(types.SNAPSHOT)
class Snapshot(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answers TAKE_SNAPSHOT: how far the ordered snapshot is, and when it is done, what was written."""

    name: Name
    state: Annotated[str, Meta(max_length=16)]  # writing, done, failed
    text: Text = ""  # why it failed
    path: Text = ""
    bytes: Count = 0
    seconds: Seconds = 0.0
    caches: Count = 0
    samples: Count = 0
    episodes: Count = 0
    entries: Count = 0


@body(types.REFUSED)
class Refused(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a request that was understood, or not, and declined."""

    code: Annotated[str, Meta(max_length=64)]  # one of CODES, or of a newer node's
    text: Text = ""
    field: Name = ""
    limit: Count = 0
    versions: Annotated[list[Small], Meta(max_length=16)] = msgspec.field(default_factory=lambda: [VERSION])
    """Of the protocol, that the refusing node speaks."""


def _check_part(part: int, of: int) -> None:
    if part >= of:
        raise ValueError(f"part {part} of {of}: parts are counted from 0")
