"""What the API answers with: plain data, the same for JSON, its OpenAPI description and the stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memoire.accounting.account import Totals

from .verdict import Verdict


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the newest ten seconds; samples_per_insert over the newest minute."""

    episodes: float = 0.0
    steps: float = 0.0
    caches: float = 0.0
    samples: float = 0.0
    batches: float = 0.0
    generated_bytes: float = 0.0
    received_bytes: float = 0.0
    log_lines: float = 0.0
    refused: float = 0.0
    skipped_share: float = 0.0
    """Of the caches that clients drew, those that they could not push."""
    waiting_share: float | None = None
    """Of the time of the learner that waits most; None where nobody learns."""
    samples_per_insert: float | None = None


@dataclass(frozen=True, slots=True)
class Actors:
    """How many there are, by state."""

    active: int = 0
    silent: int = 0
    """Not heard for a while, and they did not say goodbye."""
    lost: int = 0
    """The same, for so long that they will hardly come back: killed, or cut off."""
    gone: int = 0
    """They said goodbye."""
    expected: int = 0
    """As the dashboard was told; 0: nobody knows."""
    missing: int = 0
    """Of those expected, those that are not active."""
    idle: int = 0
    """Of the active ones, those that are connected and have recorded nothing yet; no list has them."""


@dataclass(frozen=True, slots=True)
class ActorLag:
    """How many versions behind the newest model the active actors act; of those that have said so."""

    actors: int
    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class RoleCount:
    """How many nodes of one role there are, of those that this dashboard asks."""

    role: str
    up: int
    """They answer."""
    expected: int
    """As the dashboard was told; 0: nobody knows."""
    missing: int
    """Of those expected, those that do not answer, or are not there to be asked."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One table over all servers."""

    name: str
    storage: str
    clients: int
    held_caches: int
    held_bytes: int
    byte_limit: int
    unused_samples: int
    samples: int
    batches: int
    waited: float
    overwritten_caches: int
    episodes: int
    steps: int
    samples_per_insert_target: float
    draws_wait: str
    """Why learners have to wait for entries; "" when they have not."""
    inserts_wait: str
    """Why actors have to wait for draws; "" when they have not."""
    capacity: int = 0
    """Caches, or entries of episodes, that there is room for; 0: only bytes are limited."""
    full: float | None = None
    """Share of its room that is taken, of bytes or of that number, whichever is more; None: there is no limit."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else its servers say, server by server."""
    samples_per_insert: float | None = None
    """Samples drawn for each step recorded, over the newest minute; None: nothing was recorded, or nobody knows yet."""
    overwritten_samples: int = 0
    """Samples, or entries of rollouts, in what made room that nobody had drawn."""
    passed_over_samples: int = 0
    """Let go because they had become too old (`max_age`, `max_model_lag`)."""
    split_fragments: int = 0
    """Of rollouts: those that a take has split."""
    lag_mean: float | None = None
    """Model versions between acting and learning, of recent batches or takes: the worst of what learners say."""
    lag_max: float | None = None
    max_model_lag: int | None = None
    """The parameter; None: there is no limit, or the dashboard has not read it yet."""
    stale_share: float | None = None
    """Of rollouts: entries whose model was too old, as a share of those that left in the newest minute."""


@dataclass(frozen=True, slots=True)
class Learning:
    """Returns of the newest episodes of all servers, and figures by name."""

    return_mean: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    length_mean: float | None = None
    client_scalars: dict[str, float] = field(default_factory=dict)
    """Mean over all active actors."""
    learner_scalars: dict[str, float] = field(default_factory=dict)
    goal: float | None = None
    """Return that the run should reach, as the dashboard was told."""


@dataclass(frozen=True, slots=True)
class SampleFreshness:
    """How fresh the samples of recent batches are: the worst of what learners say."""

    age_median: float | None = None
    age_p90: float | None = None
    age_max: float | None = None
    lag_mean: float | None = None
    lag_max: float | None = None
    left_out: float | None = None
    effective: float | None = None
    """Effective size of a batch as a share of its samples: the least."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that servers took for requests, over the newest ten seconds."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until something happens if it goes on like this; None where it will not, or nobody knows."""

    memory_full: float | None = None
    """Until what is held reaches its limit; from then on the oldest is overwritten, as in a table that is full: 0."""
    disk_full: float | None = None
    """Until the disk of a state folder is full; then nothing is acknowledged."""
    goal: float | None = None
    """Until the goal is reached (steps or episodes, as the dashboard was told)."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node."""

    name: str
    url: str
    role: str
    state: str
    """up, unready or down."""
    since: float
    """Seconds since 1970: when that began."""
    reasons: list[str]
    software: str
    uptime: float | None
    memory_bytes: int | None
    descriptors: int | None
    most_descriptors: int | None
    faults: int
    took: float
    """Seconds of the newest answer."""
    keys: bool | None = None
    """Whether only peers with a key are let in; None where it has not said."""
    open: tuple[str, ...] = ()
    """Addresses that other machines reach and that ask nobody for a key or token."""
    refused: int = 0
    """Connections and requests that were refused for who they came from."""
    cpu: float | None = None
    """Processor time over time, of the newest ten seconds: 1 is one core at work; None where it is not known."""
    requests_per_second: float | None = None
    """Requests that it answered or forwarded, over the newest ten seconds; None of a node that is asked nothing."""
    endpoint: str = ""
    """Address that actors connect to, as seen from where the dashboard runs; "" of a node that takes none."""


@dataclass(frozen=True, slots=True)
class InferenceRow:
    """One inference node. Rates and times are those of the newest ten seconds."""

    name: str
    url: str
    version: int
    """Of the weights that the next batch is computed with."""
    behind: int | None
    """Versions behind the newest model of its topic; None if it follows no server."""
    is_outdated: bool
    """Whether its model was replaced more than a minute ago."""
    clients: int
    """That asked within its `alive` seconds."""
    queue_rows: int
    """Rows that wait now."""
    rows_per_second: float | None
    batch_rows: float | None
    """Rows of a batch, as a mean; None if there was none."""
    batches: dict[str, float]
    """Batches by what made them due (full, everyone, wait), as shares; {} if there was none."""
    wait: float | None
    """Seconds from the arrival of a request to its batch, as a mean."""
    p50: float | None
    """Seconds from the arrival of a request to its answer that half of them stay below."""
    p99: float | None
    """The same of 99 in 100."""
    busy: float | None
    """Share of its time in which the function runs."""
    refused: dict[str, int]
    """Requests that it refused since it was started, by code."""
    refused_per_second: float
    failures: int
    """Batches for which the function failed, since it was started."""
    weights_failures: int
    """Models of which it could make no weights."""
    expired: int
    """Requests that it dropped: nobody needed the answer any more."""


@dataclass(frozen=True, slots=True)
class HolderRow:
    """A worker that has leases of prompts at a server."""

    worker: str
    """Its id in hex."""
    leases: int
    oldest: float
    """Seconds since the oldest of them began."""
    left: float
    """Seconds until the first of them ends."""
    server: str


@dataclass(frozen=True, slots=True)
class PromptsRow:
    """A table of prompts over all servers that answer."""

    table: str
    servers: int
    states: dict[str, int]
    """Prompts by state, from waiting to forgotten: their sum is `given`."""
    given: int
    workers: int
    """That have a lease."""
    oldest_lease: float
    """Seconds since the oldest lease began."""
    expired: int
    """Leases that ended unfinished."""
    late: int
    failed: int
    """Answers that came too late to count, and that failed for good."""
    stale: int
    """Groups that were too old when they were to be drawn."""
    replayable: int
    tokens_drawn: int
    lag: int
    """Model versions between the oldest token of the newest step and the newest model."""
    reasons: dict[str, int]
    """Prompts that were dropped, by reason."""
    holders: list[HolderRow]
    """Those with the most leases."""
    rank_tokens: list[int]
    """Tokens that each rank of the trainer has fetched."""


@dataclass(frozen=True, slots=True)
class StartsRow:
    """States that episodes start from, as one node keeps them: the best that were found."""

    name: str
    """Of the archive, or of its node."""
    node: str
    kept: int
    draws: int
    """How often a start state was handed out."""
    best: float | None
    """Least cost of all."""
    first: float | None
    """Cost of the first state: where the search began."""
    lineage: list[tuple[float, int]]
    """How the best one came about, the first state first: cost, and steps from the first one."""


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """One learner: in a server's process, or far away."""

    learner: str
    """Its id in hex; of an embedded one "server:" and the server's name."""
    where: str
    """Its host, or its server."""
    last_seen: float
    batches: float
    samples: float
    waited: float
    waiting_share: float | None
    scalars: dict[str, float]
    name: str = ""
    """That a person or Kubernetes gave it, in place of the id for people; "" for none."""
    lag: tuple[float, float] | None = None
    """Mean and most of the model versions between acting and learning, of a recent batch; None of an embedded one,
    whose table says it, and where nobody knows."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole cluster at one moment."""

    number: int
    """Grows with each one."""
    time: float
    """Seconds since 1970."""
    run: str
    runs: list[str]
    finished: bool
    durable: bool
    totals: Totals
    missing: list[str]
    """Nodes that do not answer: of servers among them, what was counted since is not in the totals yet."""
    rates: Rates
    actors: Actors
    tables: list[TableRow]
    learning: Learning
    freshness: SampleFreshness
    latency: Latency
    forecast: Forecast
    verdicts: list[Verdict]
    nodes: list[NodeRow]
    learners: list[LearnerRow]
    roles: list[RoleCount] = field(default_factory=list)
    """Of each role that there is, or that there should be."""
    models: dict[str, int] = field(default_factory=dict)
    """Newest version of each topic, over all servers."""
    outdated: int = 0
    """Active actors whose model was replaced more than a minute ago."""
    inference: list[InferenceRow] = field(default_factory=list)
    """Inference nodes that answer."""
    starts: list[StartsRow] = field(default_factory=list)
    """Archives of start states, of all nodes that keep one."""
    prompts: list[PromptsRow] = field(default_factory=list)
    """Tables that store prompts."""
    actor_lag: ActorLag | None = None
    """None if no active actor has said which model it uses."""
    open: list[str] = field(default_factory=list)
    """Where everybody may come in: a node's name and its address; the dashboard's own among them."""
    recorded: float | None = None
    """When this was exported, of a run that was opened from a file; None of a cluster that is watched."""


@dataclass(frozen=True, slots=True)
class ActorRow:
    """One actor. Times are seconds since 1970."""

    client: str
    """Its id in hex."""
    label: str
    """Of its log lines."""
    host: str
    table: str
    home: str
    """Name of the server that counts it now."""
    state: str
    """active, silent, lost or gone."""
    first_seen: float
    last_seen: float
    episodes: int
    steps: int
    steps_per_second: float
    return_mean: float | None
    """Of all its episodes."""
    generated_bytes: int
    pushed_caches: int
    accepted_caches: int
    rejected_caches: int
    lost_caches: int
    skipped_caches: int
    received_bytes: int
    dropped_lines: int
    name: str = ""
    """That a person or Kubernetes gave it, in place of the id for people; "" for none. Several may have the same."""
    return_recent: float | None = None
    """Of its newest twenty episodes, of those that the dashboard has seen end; None where it has seen none."""
    model_version: int | None = None
    """Of the model that it acts with; None if it has not said one."""
    model_lag: int | None = None
    """Versions behind the newest model; of several topics the most."""


@dataclass(frozen=True, slots=True)
class ActorPage:
    """A page of actors."""

    total: int
    """All that there are."""
    matching: int
    """Those that the filters let through."""
    rows: list[ActorRow]


@dataclass(frozen=True, slots=True)
class ActorDetail:
    """One actor with all that is known of it."""

    actor: ActorRow
    homes: list[dict[str, Any]]
    """Its account at each server."""
    facts: dict[str, Any]
    """As its home says it: weights, models, scalars, refusals."""
    episodes: list[EpisodeRow]
    """The newest ones, the newest first."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One closed episode."""

    client: str
    time: float
    length: int
    returned: float
    is_test: bool = False


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a run at one moment: a mark on its curves."""

    time: float
    """Seconds since 1970."""
    kind: str
    """run_began, run_finished, node_down, node_back or node_restarted."""
    node: str
    """Name of the node; "" of the run itself."""
    text: str
    """What happened, in a sentence."""


@dataclass(frozen=True, slots=True)
class ClusterHistogram:
    """How many values lie where."""

    bounds: list[float]
    """Where buckets begin, and where the last one ends: one more than `counts`, or none."""
    counts: list[int]
    zeros: int
    """Values that are 0: in no bucket."""
    least: float | None
    greatest: float | None


@dataclass(frozen=True, slots=True)
class ClusterDistribution:
    """How what a table holds is spread, over all servers."""

    table: str
    storage: str
    """caches: samples that were drawn by weight already; episodes: entries."""
    looked: int
    """How many were looked at, of `held`."""
    held: int
    """Samples, or entries of episodes, that can be drawn."""
    population: float
    """Entries of positive weight, in the actors' memories or in the servers' episodes."""
    effective: float | None
    """1 / sum p**2 over their chances: so many entries of equal chances would be repeated as often."""
    weights: ClusterHistogram
    """What draws are proportional to."""
    ages: ClusterHistogram
    """Seconds since the entries were recorded."""
    servers: list[str]
    missing: list[str]
    """Servers that did not answer."""


@dataclass(frozen=True, slots=True)
class ActorSpread:
    """How the actors of a run are spread by one figure."""

    figure: str
    actors: int
    """Those that have the figure."""
    median: float | None
    mean: float | None
    histogram: ClusterHistogram
    """In buckets of equal width."""


@dataclass(frozen=True, slots=True)
class ShownArray:
    """One array of a sample."""

    dtype: str
    """As NumPy writes it: "|u1", "<f4"."""
    shape: list[int]
    axes: int
    """How many of them come before those of the column: frames of a stack, entries of a sequence."""
    data: str
    """Its bytes in C order, in base64."""


@dataclass(frozen=True, slots=True)
class HeldSample:
    """One held sample, as a learner would get it; it was not taken."""

    server: str
    """Where it is held."""
    table: str
    client: str
    """Id of the actor that pushed it; of the server's own memory where that keeps episodes."""
    number: int
    """Of the entry."""
    age: float
    """Seconds since the entry was recorded."""
    weight: float
    probability: float
    """Its chance at each draw from its server."""
    importance: float
    """Before it is divided by the batch's largest: 1 is an entry of the mean chance."""
    model_version: int
    """0: nobody said."""
    model_lag: int | None
    """Versions behind the newest model; None where no model was published, or nobody said."""
    earlier: int | None
    """Number of the entry before it: in its episode, or of its actor's held ones where the server knows no episode."""
    later: int | None
    """And of the one after it."""
    step: int | None
    """Its place in its episode, from 1; None where the server knows no episode."""
    episode: int | None
    """Entries of its episode; None where the server does not know."""
    td_error: float | None
    """Size of the TD error that a learner reported last; None where none did, or its actor alone knows."""
    arrays: dict[str, ShownArray]


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log line."""

    server: str
    index: int
    """At its server, growing."""
    received: float
    time: str
    client: str
    label: str
    text: str
    """As the actor sent it: never to be taken for markup."""
    name: str = ""
    """That a person or Kubernetes gave to the actor; "" for none."""


@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines of all servers together, and how to go on."""

    rows: list[LogRow]
    older: str
    """Give this as `cursor` with direction=older for the lines before these."""
    newer: str
    """Give this as `cursor` with direction=newer for the lines after these: later ones too, that are not there yet."""
    more: bool
    """Whether there are more in the direction that was asked for."""
    missing: list[str]
    """Servers that did not answer."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as it was seen last. Times are seconds since 1970."""

    name: str
    began: float
    seen: float
    is_current: bool
    facts: dict[str, Any]
    """totals, finished, return_mean: as they were then."""
