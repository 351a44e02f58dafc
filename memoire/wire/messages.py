"""Messages to frames and back: pure functions, one parser, so that every byte from outside is checked in one place.

Frame 0 is a header of 96 bytes and a msgpack tail, frame 1 the payload where a message has one; docs/wire.md has the
layout bit by bit, `tests/vectors/` holds an example of every message. No socket, clock or file is touched here.
"""

import enum
import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memoire.errors import MemoireError, ProtocolError
from memoire.limits import Limits
from memoire.replay.limiter import NO_LIMIT

from . import _bytes

MAGIC: Final = b"MEMR"
VERSION: Final = 1
HEADER_BYTES: Final = 96
NO_CLIENT: Final = bytes(16)

Buffer: TypeAlias = Any
"""Anything with the buffer protocol and contiguous bytes: bytes, memoryview, zmq.Frame, a NumPy array."""

CODES: Final = {
    "frames": "not one or two frames, or a payload that this type of message must or must not have",
    "short": "frame 0 is shorter than its header and tail",
    "long": "frame 0 is longer than its header and tail",
    "magic": "not a memoire message",
    "version": "another version of the protocol",
    "checksum": "header or tail changed on the way",
    "type": "a type of message this version does not have",
    "flags": "flags this version does not have",
    "tail": "a tail that is not this type's msgpack map",
    "size": "a payload of another size than the header says",
    "payload": "payload changed on the way",
    "too_large": "larger than this node allows",
    "topic": "topic frame and notice disagree",
    "unexpected": "a type of message that does not belong on this channel",
    "schema": "made for another schema",
    "table": "a table that this node does not have",
    "run": "made for another run",
    "container": "a payload whose head, table or blocks are not as docs/wire.md says",
    "index": "an index, count or step outside of what it points into",
    "value": "a weight, total or discount that is not finite or not in its range",
    "codec": "a compression that this node does not have, or compressed bytes that are damaged",
    "client": "a client id that this node does not know, or that may not be used here",
    "owner": "in the name of a client id that belongs to another key",
    "role": "sent by the key of a role that may not send this",
    "denied": "sent to a proxy that no server lets in",
    "revoked": "sent by a key that is not authorized any more",
    "passport": "passed on by a proxy that does not say for whom, or says it without being one",
    "parameters": "parameters that do not fit the schema",
    "busy": "too much is waiting already",
    "disk": "the disk of this node's state folder is full, so that nothing can be acknowledged until there is room",
    "closed": "this node is closing",
    "missing": "asked for something that is not stored here (any more)",
}
"""Every refusal code and what it says; a refusal's text adds which value and what was expected."""
PASSING: Final = ("busy", "closed", "denied", "disk")
"""Codes of refusals that end by themselves: what was asked is asked again."""


MOST_RETURN: Final = 1e280
"""Most that one episode may have returned, either way: sums over all episodes of all clients stay finite."""
MOST_RETURNS: Final = 1e300
"""The same of all episodes of one client."""
DRAWS_IN_FLIGHT = 2
"""Draws that a reader may have on their way to one server: the replies to these are kept, so that a resend eats
nothing.
"""


class Type(enum.IntEnum):
    """The number of each message in its header; numbers are never reused."""

    HELLO = 1
    WELCOME = 2
    UPDATE = 3
    UPDATED = 4
    CACHE = 5
    EPISODE = 6
    FEEDBACK = 7
    TAKEN = 8
    NOTICE = 9
    FETCH = 10
    CHUNK = 11
    PUBLISH = 12
    PUBLISHED = 13
    SUMS = 14
    SUMMED = 15
    DRAW = 16
    DRAWN = 17
    CONTROL = 18
    REFUSED = 19
    NEWS = 20
    LEDGER = 21
    ACCOUNTS = 22
    INHERIT = 23
    TAKE_SNAPSHOT = 24
    SNAPSHOT = 25


class Payload(enum.Enum):
    """Whether a message has frame 1."""

    NEVER = 0
    MAYBE = 1
    ALWAYS = 2


# What tails are made of. All texts, lists and numbers have bounds; counts stay below 2**53, which a float64 holds.

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Parts: TypeAlias = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=2.0**40)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Signed: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Word: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash: TypeAlias = Annotated[int, Meta(ge=0)]  # of 64 bits, which is all that msgpack has
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=16384)]
Topic: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[^\x00]*$")]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Versions: TypeAlias = Annotated[dict[Name, Count], Meta(max_length=1024)]
Parameter: TypeAlias = (
    bool | int | float | str | Annotated[list[bool | int | float | str], Meta(max_length=1024)] | None
)
Parameters: TypeAlias = Annotated[dict[Name, Parameter], Meta(max_length=64)]


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tail of a message: a msgpack map of the fields that differ from their defaults; unknown ones are ignored."""

    type: ClassVar[Type]
    payload: ClassVar[Payload] = Payload.NEVER


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A row inside of a tail: a msgpack array of all its fields; further elements are ignored."""


class Standing(Part, frozen=True, array_like=True):
    """How drawing stands beside recording, as a server sees it; see `rate`."""

    surplus: Signed
    is_told: bool  # whether it is that of all servers, as a reader told
    inserted: Count  # entries that clients of this server reported, since it began
    drawn: Count  # samples that anybody drew here
    ratio: Weight  # samples_per_insert and its tolerance, under which this is so
    tolerance: Weight


class Band(Part, frozen=True, array_like=True):
    """The same for all servers together, as a reader tells each of them."""

    surplus: Signed
    inserted: Count  # what this server had said of its own when the reader knew that surplus
    drawn: Count
    entries: Count  # that can be drawn at the other servers
    share: Annotated[float, Meta(ge=0.0, le=1.0)]  # of what may be recorded, for this server's clients
    ratio: Weight
    tolerance: Weight


class Hello(Body, frozen=True, kw_only=True, omit_defaults=True):
    """First request of a client, reader or publisher, answered by WELCOME. The header's home is 0 or its last one."""

    type: ClassVar = Type.HELLO
    role: Annotated[str, Meta(max_length=16)] = "actor"  # actor, reader, publisher
    table: Name = ""  # name of the table it wants; "": the first
    label: Small = 0  # the 32-bit uuid of log lines
    software: Name = ""  # "memoire 0.1.0"
    host: Name = ""
    pid: Count = 0
    codecs: Annotated[list[Name], Meta(max_length=8)] = []  # compressions it can undo and make
    scalars: Annotated[dict[Name, float], Meta(max_length=64)] = {}  # of a reader: what its learner shows
    figures: Annotated[dict[Name, float], Meta(max_length=32)] = {}  # of a reader: what it has counted by itself
    inserted: Count = 0  # of an actor: steps of this run, less passed_steps, that it has recorded until now


class Endpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a client connects to; the first hop fills in its own."""

    request: Annotated[str, Meta(max_length=1024)] = ""
    push: Annotated[str, Meta(max_length=1024)] = ""
    publish: Annotated[str, Meta(max_length=1024)] = ""


class Welcome(Body, frozen=True, kw_only=True, omit_defaults=True):
    """All that a client needs to begin. The header's home, run and fingerprint are the ones it uses from now on."""

    type: ClassVar = Type.WELCOME
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
    since: Word = 0  # epoch of the home in which it opened this client's account: pushes are counted from then
    durable: bool = False  # replies of this home mean "on disk"
    leaving: Annotated[list[Name], Meta(max_length=4096)] = []  # those of the servers that take no new clients
    granted_steps: Count = NO_LIMIT  # as in UPDATED
    unmet: Annotated[list[Name], Meta(max_length=4096)] = []  # addresses behind proxies where nobody has answered yet


class Line(Part, frozen=True, array_like=True):
    """One log line of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    label: Small
    text: Text


class Ended(Part, frozen=True, array_like=True):
    """One closed episode of a client, numbered from 1."""

    number: Count
    time: Seconds  # unix
    length: Count
    returned: float  # sum of its rewards (first reward dimension first, all added up)


class Update(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a client has done since it was made, cumulative, so that a resend or a lost reply changes nothing."""

    type: ClassVar = Type.UPDATE
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
    feedback_through: Count = 0  # number of the newest feedback that was applied
    leaving: bool = False
    finished: bool = False  # it knows that the run is over


class Updated(Body, frozen=True, kw_only=True, omit_defaults=True):
    """What the home has of a client. The payload, where there is one, is a feedback container for this client."""

    type: ClassVar = Type.UPDATED
    payload: ClassVar = Payload.MAYBE
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
    run_name: Name = ""  # the run that is counted now; UPDATE says the rest about a former one before HELLO
    finished: bool = False
    time: Seconds = 0.0  # unix, of the home's clock when it answered
    leaving: bool = False  # the home is being drained: say HELLO to be given another one
    granted_steps: Count = NO_LIMIT  # steps less passed_steps that it may come to before it has to ask again
    wait: Text = ""  # why not more, where it may not go on


class Cache(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A cache on its way to the home; the payload is a container of kind CACHE. Pushed, never answered."""

    type: ClassVar = Type.CACHE
    payload: ClassVar = Payload.ALWAYS
    since: Word = 0  # the account that it belongs to, as WELCOME said; 0: whichever there is
    number: Count = 0  # caches and episodes pushed to this home since then, this one included
    pushed_bytes: Count = 0  # their payload bytes, this one's included


class Episode(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A whole episode on its way to the home; the payload is a container of kind EPISODE. Pushed, never answered."""

    type: ClassVar = Type.EPISODE
    payload: ClassVar = Payload.ALWAYS
    since: Word = 0
    number: Count = 0
    pushed_bytes: Count = 0
    has_final: bool = False  # FINAL blocks are there
    multiplier: Weight = 1.0  # episodic weight multiplier
    update_value: bool = True
    update_weight: bool = True
    terminated: bool | None = None  # None: nobody said how it ended
    bootstrap: Annotated[list[float], Meta(max_length=65536)] | None = (
        None  # value of the final state, per reward dimension
    )


class Feedback(Body, frozen=True, kw_only=True, omit_defaults=True):
    """New TD errors for samples of one home's clients: a container of kind FEEDBACK. Answered by TAKEN."""

    type: ClassVar = Type.FEEDBACK
    payload: ClassVar = Payload.ALWAYS


class Taken(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to FEEDBACK and CONTROL."""

    type: ClassVar = Type.TAKEN
    samples: Count = 0  # that were handed on
    lost: Count = 0  # whose client is not known here (any more)
    parameters_version: Count = 0
    finished: bool = False


class Notice(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A new version of a model, published; a body of at most `inline_model` bytes is the payload."""

    type: ClassVar = Type.NOTICE
    payload: ClassVar = Payload.MAYBE
    topic: Topic
    version: Count
    size: Count
    sha256: Digest
    text: bool = False  # it was published as str
    epoch: Word = 0


class Fetch(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a stretch of a model's body; answered by CHUNK, or REFUSED with code missing."""

    type: ClassVar = Type.FETCH
    topic: Topic
    version: Count = 0  # 0: the newest
    offset: Count = 0
    size: Count = 0  # most bytes wanted; 0: as the node likes


class Chunk(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of a model's body, the payload; an empty body has none."""

    type: ClassVar = Type.CHUNK
    payload: ClassVar = Payload.MAYBE
    topic: Topic
    version: Count
    size: Count  # of the whole body
    sha256: Digest
    offset: Count = 0
    text: bool = False
    home: Hash = 0  # of the name of the server that it was published at, and its epoch, as in the notice
    epoch: Word = 0


class Publish(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Brings a stretch of a new model to a server; stretches come in order, each is answered by PUBLISHED."""

    type: ClassVar = Type.PUBLISH
    payload: ClassVar = Payload.MAYBE
    topic: Topic
    size: Count
    sha256: Digest
    offset: Count = 0
    text: bool = False
    version: Count = 0  # 0: the next one


class Published(Body, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a model the server has; `version` is set when that is all of it and everyone is told."""

    type: ClassVar = Type.PUBLISHED
    topic: Topic
    received: Count = 0
    version: Count = 0


class Sums(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A reader asks for a server's clients and keeps samples for itself; answered by SUMMED."""

    type: ClassVar = Type.SUMS
    reserve: Small = 0  # unused samples to hold back for this reader, over all clients
    elsewhere: Count = 0  # samples that it has drawn from other servers so far
    part: Small = 0  # its clients are every `of`-th one in the order in which they came, beginning with this one
    of: Parts = 1
    wanted: Small = 0  # samples of a batch that cannot be drawn for want of entries or samples
    band: Band | None = None  # how it stands with all servers, where that is limited

    def __post_init__(self) -> None:
        _check_part(self.part, self.of)


class Summed(Body, frozen=True, kw_only=True, omit_defaults=True):
    """One row for each client that holds something: `CLIENT_SUMS`, packed."""

    type: ClassVar = Type.SUMMED
    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    standing: Standing | None = None  # where drawing or recording is limited

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


class Draw(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Takes samples of a server's clients: `CLIENT_COUNTS`, packed; answered by DRAWN. A resend has its sequence."""

    type: ClassVar = Type.DRAW
    counts: Annotated[bytes, Meta(max_length=2**27)] = b""
    reserve: Small = 0
    elsewhere: Count = 0
    part: Small = 0
    of: Parts = 1
    wanted: Small = 0
    band: Band | None = None

    def __post_init__(self) -> None:
        unpack_counts(self.counts)
        _check_part(self.part, self.of)


class Drawn(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The samples, a container of kind DRAWN (none when all clients were gone), and the sums after the draw."""

    type: ClassVar = Type.DRAWN
    payload: ClassVar = Payload.MAYBE
    epoch: Word = 0
    clients: Annotated[bytes, Meta(max_length=2**27)] = b""
    finished: bool = False
    standing: Standing | None = None  # where drawing or recording is limited

    def __post_init__(self) -> None:
        unpack_sums(self.clients)


class Control(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A learner or operator changes parameters, begins or ends a run, or drains a server; answered by TAKEN."""

    type: ClassVar = Type.CONTROL
    parameters: Parameters = {}  # those to change
    finish: bool = False
    run: Name = ""  # begin this run, or go on with it
    drain: bool = False  # give all clients to other servers


class News(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Published to everyone by a server that has something to tell its clients: whoever hears it sends UPDATE soon."""

    type: ClassVar = Type.NEWS
    epoch: Word = 0


ACCOUNT_KEY_BYTES: Final = 32
"""What an `ACCOUNT` begins with: client, home and since."""


class Ledger(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a server what it has counted; answered by ACCOUNTS."""

    type: ClassVar = Type.LEDGER
    run: Name = ""  # of which run; "": the one that is counted now
    after: Annotated[bytes, Meta(max_length=ACCOUNT_KEY_BYTES)] = b""  # key of the last row of the page before


class Accounts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A page of a server's accounts: one row for each client, home and since, `ACCOUNT`, packed, in ascending order."""

    type: ClassVar = Type.ACCOUNTS
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

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


class Inherit(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Brings accounts of a server that is being drained to another one, which keeps them; answered by TAKEN."""

    type: ClassVar = Type.INHERIT
    run_name: Name
    finished: bool = False
    accounts: Annotated[bytes, Meta(max_length=2**18)] = b""

    def __post_init__(self) -> None:
        unpack_accounts(self.accounts)


class TakeSnapshot(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Orders a snapshot of what a server holds, or asks how an order stands; answered by SNAPSHOT."""

    type: ClassVar = Type.TAKE_SNAPSHOT
    name: Name  # of the file in the server's state folder
    order: Annotated[bytes, Meta(min_length=16, max_length=16)]  # names the order: said again, it is the same one


class Snapshot(Body, frozen=True, kw_only=True, omit_defaults=True):
    """How the order of a snapshot stands, and when it is done, what was written."""

    type: ClassVar = Type.SNAPSHOT
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


class Refused(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a request that was understood, or not, and declined."""

    type: ClassVar = Type.REFUSED
    code: Annotated[str, Meta(max_length=64)]  # one of CODES, or of a newer node's
    text: Text = ""
    field: Name = ""
    limit: Count = 0
    versions: Annotated[list[Small], Meta(max_length=16)] = msgspec.field(default_factory=lambda: [VERSION])
    """Of the protocol, that the refusing node speaks."""


BODIES: Final[dict[int, type[Body]]] = {
    body.type: body
    for body in (
        Hello, Welcome, Update, Updated, Cache, Episode, Feedback, Taken, Notice, Fetch, Chunk, Publish, Published,
        Sums, Summed, Draw, Drawn, Control, Refused, News, Ledger, Accounts, Inherit,
        TakeSnapshot, Snapshot,
    )
}  # fmt: skip

CLIENT_SUMS: Final = np.dtype(
    [
        ("client", "<u8", (2,)),  # the client id's 16 bytes
        ("sequence", "<u8"),  # of the message its sums came with: readers of two homes take the newest
        ("total_weight", "<f8"),  # S_c
        ("positives", "<u8"),  # N_c
        ("minimum", "<f8"),  # smallest positive weight, 0 when there is none
        ("drawn_between", "<f8"),  # D_c, scaled: u_c / drawn_between is the cap of its share
        ("reserved", "<u4"),  # u_c: unused samples that are this reader's
        ("flags", "<u4"),  # 1: reuse_cache, can serve any count
    ]
)
CLIENT_COUNTS: Final = np.dtype([("client", "<u8", (2,)), ("count", "<u4"), ("zero", "<u4")])
ACCOUNT: Final = np.dtype(
    [
        ("client", "<u8", (2,)),
        ("home", "<u8"),  # hash of the name of the server that counted this
        ("since", "<u8"),  # epoch of that server in which it opened the account: one that it opened later is another
        ("episodes", "<u8"),  # cumulative since the client was made: of two accounts' rows the greater counts
        ("steps", "<u8"),
        ("generated_bytes", "<u8"),
        ("skipped", "<u8"),
        ("dropped_lines", "<u8"),
        ("lines_through", "<u8"),
        ("ended_through", "<u8"),
        ("applied", "<u8"),
        ("stale", "<u8"),
        ("lost_feedback", "<u8"),  # from here on for this account alone: rows add up
        ("pushed_caches", "<u8"),
        ("pushed_bytes", "<u8"),
        ("received_caches", "<u8"),
        ("received_bytes", "<u8"),
        ("accepted_caches", "<u8"),
        ("accepted_bytes", "<u8"),
        ("accepted_samples", "<u8"),
        ("rejected_caches", "<u8"),
        ("lost_caches", "<u8"),
        ("lost_bytes", "<u8"),
        ("returns_count", "<u8"),
        ("returns_sum", "<f8"),
        ("first_seen", "<f8"),  # unix
        ("last_seen", "<f8"),
        ("label", "<u4"),
        ("flags", "<u4"),  # 1: said goodbye
    ]
)
_ACCOUNT_COUNTS: Final = [
    name for name in ACCOUNT.names or () if ACCOUNT[name] == np.dtype("<u8") and name not in ("home", "since")
]


def _check_part(part: int, of: int) -> None:
    if part >= of:
        raise ValueError(f"part {part} of {of}: parts are counted from 0")


def unpack_sums(packed: bytes) -> NDArray[np.void]:
    """Rows of `CLIENT_SUMS`, read-only, totals checked: finite and not negative. Raises ValueError."""
    rows = _unpack(packed, CLIENT_SUMS)
    for name in ("total_weight", "minimum", "drawn_between"):
        if not (np.isfinite(rows[name]).all() and (rows[name] >= 0.0).all()):
            raise ValueError(f"{name} of a client is negative or not finite")
    return rows


def unpack_counts(packed: bytes) -> NDArray[np.void]:
    """Rows of `CLIENT_COUNTS`, read-only, each client once at most. Raises ValueError."""
    rows = _unpack(packed, CLIENT_COUNTS)
    if rows["zero"].any():
        raise ValueError("bytes that must be 0 are not")
    if len(np.unique(rows["client"], axis=0)) != len(rows):
        raise ValueError("a client is named twice")
    return rows


def unpack_accounts(packed: bytes) -> NDArray[np.void]:
    """Rows of `ACCOUNT`, read-only: counts below 2**53, times finite, sums within `MOST_RETURNS`. Raises ValueError."""
    rows = _unpack(packed, ACCOUNT)
    for name in _ACCOUNT_COUNTS:
        if (rows[name] >= 2**53).any():
            raise ValueError(f"{name} of a client is not below 2**53")
    if (rows["since"] >= 2**63).any():
        raise ValueError("since of a client is not below 2**63")
    for name in ("returns_sum", "first_seen", "last_seen"):
        if not np.isfinite(rows[name]).all():
            raise ValueError(f"{name} of a client is not finite")
    if (np.abs(rows["returns_sum"]) > MOST_RETURNS).any():
        raise ValueError(f"returns_sum of a client is beyond {MOST_RETURNS:g}")
    if (rows["flags"] > 1).any():
        raise ValueError("flags of a client that this version does not have")
    return rows


def _unpack(packed: bytes, row: np.dtype[np.void]) -> NDArray[np.void]:
    if len(packed) % row.itemsize:
        raise ValueError(f"{len(packed)} bytes are no whole number of rows of {row.itemsize}")
    return np.frombuffer(packed, row)


class Header(msgspec.Struct, frozen=True, gc=False):
    """What stands in front of every message, in the order of its 96 bytes."""

    type: Type
    table: int
    client: bytes
    """Id of the client that sent it; in a reply, that it is for. 16 zero bytes: nobody's (a notice)."""
    run: int
    home: int
    sequence: int
    """Counts up over all messages of a client; a reply has its request's."""
    fingerprint: int
    """Of the schema of the table; 0 where none is meant."""
    payload_bytes: int
    payload_checksum: int


class Message(msgspec.Struct, frozen=True):
    """A message that `parse` found whole. `payload` is the frame as it was received, or None."""

    header: Header
    body: Body
    payload: Buffer | None

    @property
    def type(self) -> Type:
        """Which message it is: the header's type, and its body's."""
        return self.header.type


Answer = Message | MemoireError
"""How a request ends: its reply, or why there is none."""

_HEADER: Final = struct.Struct("<4sHHII16sQQQQQQII")
_SUMMED_HEADER: Final = struct.Struct(_HEADER.format + "Q")  # with its checksum
_CHECKSUM: Final = struct.Struct("<Q")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {number: msgspec.msgpack.Decoder(body) for number, body in BODIES.items()}
_TYPES: Final = {int(kind): kind for kind in Type if kind in BODIES}
_PAYLOADS: Final = {kind: body.payload for kind, body in BODIES.items()}
_LARGE: Final = frozenset({Type.CACHE, Type.EPISODE, Type.FEEDBACK, Type.UPDATED, Type.DRAWN})
_DEFAULTS: Final = Limits()


def name_hash(name: str) -> int:
    """What headers say for a run or a home: the first 8 bytes of BLAKE2b of its name, never 0 (0: not assigned)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


DEFAULT_TABLE: Final = "default"
"""Name of the table of a server that has one and was told no name."""


def table_number(name: str) -> int:
    """What headers say for a table: 0 for `DEFAULT_TABLE`, else 4 bytes of BLAKE2b of its name, never 0. All servers of
    a cluster agree on it, whatever the order of their tables.
    """
    if name == DEFAULT_TABLE:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") or 1


NEWS_FRAME: Final = b"\x00"
"""Subscription and first frame of NEWS: no topic has it, since a topic has at least one character before its zero."""


def topic_frame(topic: str) -> bytes:
    """The subscription and first frame of a topic; the zero byte keeps "a" from matching "ab"."""
    return topic.encode() + b"\x00"


def encode(
    body: Body,
    *,
    client: bytes = NO_CLIENT,
    sequence: int = 0,
    run: int = 0,
    home: int = 0,
    table: int = 0,
    fingerprint: int = 0,
    payload: Buffer | None = None,
    payload_checksum: int | None = None,
) -> list[Buffer]:
    """Frames of a message: the header with its tail, and the payload as it is (not copied), unless it is empty.

    Args:
        payload_checksum: `_bytes.checksum(payload)` if it is known already (a message handed on); computed otherwise.
    """
    size = 0 if payload is None else memoryview(payload).nbytes
    if (body.payload is Payload.NEVER and size) or (body.payload is Payload.ALWAYS and not size):
        raise ValueError(f"{body.type.name} {'has no' if size else 'needs a'} payload")
    if payload_checksum is None:
        payload_checksum = _bytes.checksum(payload) if size else 0
    tail = _ENCODER.encode(body)
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        body.type,
        0,
        table,
        client,
        run,
        home,
        sequence,
        fingerprint,
        size,
        payload_checksum,
        len(tail),
        0,
    )
    frame = b"".join((head, _CHECKSUM.pack(_bytes.checksum(tail, _bytes.checksum(head))), tail))
    return [frame, payload] if size else [frame]


def reply(request: Header, body: Body, *, payload: Buffer | None = None, **changed: int) -> list[Buffer]:
    """Frames of the answer to a request: its client, sequence, run, home, table and fingerprint, unless `changed`."""
    facts: dict[str, Any] = {
        "client": request.client, "sequence": request.sequence, "run": request.run, "home": request.home,
        "table": request.table, "fingerprint": request.fingerprint,
    }  # fmt: skip
    return encode(body, payload=payload, **(facts | changed))


def parse(frames: Sequence[Buffer], limits: Limits = _DEFAULTS, *, verify_payload: bool = True) -> Message:
    """The message in one or two frames (envelope or topic taken off), completely checked.

    Nothing is allocated for a size that a message only declares. The insides of containers are for `cache.check`.

    Args:
        frames: As received; frame 1 becomes `Message.payload` without a copy.
        limits: `tail_bytes`, `message_bytes` and `request_bytes` that this node allows.
        verify_payload: Compare the payload's checksum (one pass over it, GIL released). A proxy that hands it on leaves
            that to the end, and a server to `cache.check`, which is told the checksum.

    Raises:
        ProtocolError: and nothing else, whatever the bytes; `code` is one of `CODES`.
    """
    header, tail = parse_header(frames, limits)
    if header.payload_bytes and verify_payload and _bytes.checksum(frames[1]) != header.payload_checksum:
        raise ProtocolError("payload", f"{header.type.name}: the payload's checksum is wrong; it changed on the way")
    return Message(header, _decode(header.type, tail), frames[1] if header.payload_bytes else None)


def parse_notice(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> Message:
    """`parse` for what a SUB socket received: [topic, frame 0, frame 1?]; its body is a `Notice` or `News`."""
    message = parse(frames[1:], limits)
    if isinstance(message.body, News):
        if bytes(frames[0]) != NEWS_FRAME:
            raise ProtocolError("topic", "NEWS came on the topic of a model")
        return message
    if not isinstance(message.body, Notice):
        raise ProtocolError("unexpected", f"{message.type.name} was published; only NOTICE and NEWS are")
    if topic_frame(message.body.topic) != bytes(frames[0]):
        raise ProtocolError("topic", f"a notice of {message.body.topic!r} came on another topic")
    return message


def peek(frames: Sequence[Buffer]) -> Header | None:
    """Who a refused message says it is from, unchecked: enough to answer that it was refused. None where it says
    nothing.

    The first 96 bytes mean the same in every version of the protocol, so that an old node can refuse a new one
    politely.
    """
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if frame.nbytes < HEADER_BYTES:
        return None
    magic, _, _, _, table, client, run, home, sequence, fingerprint, *_ = _HEADER.unpack_from(frame)
    return Header(Type.REFUSED, table, client, run, home, sequence, fingerprint, 0, 0) if magic == MAGIC else None


def parse_header(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> tuple[Header, memoryview]:
    """Header and undecoded tail, both checked against their checksum: all that a proxy needs. Raises ProtocolError."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError("frames", f"a message has 1 or 2 frames, got {len(frames)}")
    frame = memoryview(frames[0])
    if frame.nbytes < HEADER_BYTES:
        raise ProtocolError("short", f"frame 0 has {frame.nbytes} bytes, a header has {HEADER_BYTES}")
    (magic, version, number, flags, table, client, run, home, sequence, fingerprint, payload_bytes, payload_checksum,
     tail_bytes, reserved, checksum) = _SUMMED_HEADER.unpack_from(frame)  # fmt: skip
    if magic != MAGIC:
        raise ProtocolError("magic", f"expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ProtocolError(
            "version", f"version {version} of the protocol; this node speaks {VERSION}. Upgrade the older of the two"
        )
    if tail_bytes > limits.tail_bytes:
        raise ProtocolError("too_large", f"a tail of {tail_bytes} bytes; {limits.tail_bytes} are allowed (tail_bytes)")
    if frame.nbytes != HEADER_BYTES + tail_bytes:
        code = "short" if frame.nbytes < HEADER_BYTES + tail_bytes else "long"
        raise ProtocolError(code, f"frame 0 has {frame.nbytes} bytes, its header says {HEADER_BYTES + tail_bytes}")
    if _bytes.header_checksum(frame) != checksum:
        raise ProtocolError("checksum", "the header's checksum is wrong; it changed on the way")
    if (named := _TYPES.get(number)) is None:
        raise ProtocolError("type", f"type {number}; this node knows 1 to {max(BODIES)}. Upgrade the older of the two")
    if flags or reserved:
        raise ProtocolError("flags", f"flags {flags:#x} and reserved {reserved:#x} must be 0 in version {VERSION}")
    header = Header(named, table, client, run, home, sequence, fingerprint, payload_bytes, payload_checksum)
    _check_payload(header, frames, limits)
    return header, frame[HEADER_BYTES:]


def _check_payload(header: Header, frames: Sequence[Buffer], limits: Limits) -> None:
    wants, size = _PAYLOADS[header.type], header.payload_bytes
    if (wants is Payload.NEVER and size) or (wants is Payload.ALWAYS and not size) or bool(size) != (len(frames) == 2):
        raise ProtocolError("frames", f"{header.type.name} with {len(frames)} frames and a payload of {size} bytes")
    if not size:
        if header.payload_checksum:
            raise ProtocolError("size", f"{header.type.name} has a checksum for a payload it does not have")
        return
    allowed = limits.message_bytes if header.type in _LARGE else limits.request_bytes
    if size > allowed:
        raise ProtocolError("too_large", f"{header.type.name} with a payload of {size} bytes; {allowed} are allowed")
    if (given := memoryview(frames[1]).nbytes) != size:
        raise ProtocolError("size", f"frame 1 has {given} bytes, the header says {size}")


def tail_of(body: Body) -> bytes:
    """A body without its header, to be kept."""
    return _ENCODER.encode(body)


def update_of(tail: bytes) -> Update:
    """The UPDATE whose tail was kept. Raises ProtocolError."""
    update = _decode(Type.UPDATE, memoryview(tail))
    assert isinstance(update, Update)
    return update


def _decode(number: Type, tail: memoryview) -> Body:
    if not _bytes.is_plain_msgpack(tail):
        raise ProtocolError("tail", f"{number.name}: the tail is not one plain msgpack value")
    try:
        return _DECODERS[number].decode(tail)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as problem:
        raise ProtocolError("tail", f"{number.name}: {problem}") from None
