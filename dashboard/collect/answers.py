"""Response types of the dashboard's API: dataclasses for JSON, its OpenAPI description and the event stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from memoire.accounting.account import Totals
from memoire.figures import (
    FAULTS,
    MODEL_VERSION,
    UPTIME,
    Figure,
    by,
    counter,
    figure_of,
    figures_of,
    gauge,
    shown,
    within,
)
from memoire.inference.batching import InferenceStats, StartsStats
from memoire.nodes.metrics import PageGuard
from memoire.server.stats import RecentEpisodes, TableStats
from memoire.tables import registry
from memoire.tables.inspection import SampleFreshness

from .nodes import ClusterDistribution


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second over the newest ten seconds; `samples_per_insert` over the newest minute."""

    # fmt: off
    episodes: float = 0.0
    steps: float = 0.0
    caches: float = 0.0
    samples: float = 0.0
    batches: float = 0.0
    generated_bytes: float = 0.0
    received_bytes: float = 0.0
    log_lines: float = 0.0
    refused: float = 0.0
    skipped_share: Annotated[float, gauge("skipped_ratio", "Caches skipped", "Share of the caches that clients drew "
        "and could not push, over the newest ten seconds.")] = 0.0
    waiting_share: Annotated[float | None, gauge("learner_waiting_ratio", "Learner waits",
        "Share of its time that a learner waits for samples; of several learners the largest.")] = None
    samples_per_insert: Annotated[float | None, gauge("samples_per_insert_ratio", "Samples per insert",
        "Samples drawn for each step recorded, over the newest minute.", unit="")] = None
    # fmt: on


ACTORS: Final = gauge(
    "actors", "Actors", "Actors of this run: active (sent a message in the last 20 seconds), silent, lost (silent for "
    "longer than --lost-after), or gone (ended in order).", label="state", docs="metrics.md",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Actors:
    """Number of actors in each state."""

    # fmt: off
    active: Annotated[int, ACTORS("active")] = 0
    silent: Annotated[int, ACTORS("silent")] = 0
    lost: Annotated[int, ACTORS("lost")] = 0
    gone: Annotated[int, ACTORS("gone")] = 0
    expected: Annotated[int, gauge("expected_actors", "Expected", "Expected actors (--expected-actors); 0 if no "
        "number is set.")] = 0
    missing: Annotated[int, gauge("missing_actors", "Missing", "Expected actors that are not active.")] = 0
    idle: int = 0
    """Active actors that are connected and have recorded nothing yet; the actor list does not contain these actors."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorLag:
    """Model versions by which active actors lag behind the newest model, over the actors that report their model."""

    # fmt: off
    actors: int
    mean: Annotated[float, gauge("actor_model_lag_mean", "Actors behind", "Mean number of model versions by which "
        "active actors are behind the newest model.")]
    max: Annotated[int, gauge("actor_model_lag_max", "Most behind", "Largest number of model versions by which an "
        "active actor is behind the newest model.")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Numbers of nodes of one role that answer, are expected and are missing, among the nodes that are polled."""

    # fmt: off
    role: str
    up: Annotated[int, gauge("nodes", "Up", "Nodes that answer the dashboard.")]
    expected: Annotated[int, gauge("expected_nodes", "Expected", "Expected nodes (--expected-servers and others); "
        "0 if no number is set.")]
    missing: Annotated[int, gauge("missing_nodes", "Missing", "Expected nodes that do not answer, or whose address "
        "the dashboard does not know.")]
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow(TableStats):
    """Figures of one table, added up over all servers that answer, and figures derived from these."""

    # fmt: off
    full: Annotated[float | None, gauge("table_full_ratio", "Full", "Share of the table's room that is used: of bytes, "
        "or of caches or entries, whichever is larger. A full table overwrites its oldest entries.",
        formula="held ÷ limit", of="cluster")] = None
    """None if the table has no limit."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the table that each server reports, by server name."""
    samples_per_insert: Annotated[float | None, gauge("table_samples_per_insert_ratio", "Samples per insert",
        "How often an entry is drawn on average: samples drawn from a table for each step recorded, over the newest "
        "minute.", formula="samples drawn ÷ steps recorded", docs="tables.md", of="cluster", unit="")] = None
    """None if no step was recorded, or the ratio is not known yet."""
    lag_mean: float | None = None
    """Mean model versions between acting and learning, of recent batches or takes; the largest of all learners."""
    lag_max: float | None = None
    max_model_lag: Annotated[int | None, shown("Limit (max_model_lag)", "Learners skip entries whose model is more "
        "versions behind than this limit. Without a limit they learn from all entries.", docs="on-policy.md")] = None
    """Parameter of the table; None if there is no limit, or the dashboard has not read the parameter yet."""
    stale_share: Annotated[float | None, gauge("rollouts_stale_ratio", "Skipped as too old",
        "Entries of rollouts whose model was too old, as a share of those that left the table in the newest minute.",
        formula="too old ÷ (taken + too old)", docs="on-policy.md", of="cluster", curve=True)] = None
    holds: str = ""
    """Noun for the things that the table holds, such as "caches"."""
    unit: str = "entries"
    """Noun for the things that learners draw or take from the table."""
    room: str = "entries"
    """Noun for the things that the table's `capacity` counts."""
    is_taken: bool = False
    """True if the table hands out each entry once."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class Learning(RecentEpisodes):
    """Returns of the newest episodes of all servers, and reported scalars by name."""

    client_scalars: dict[str, float] = field(default_factory=dict)
    """Mean of each scalar over all active actors."""
    learner_scalars: dict[str, float] = field(default_factory=dict)
    goal: float | None = None
    """Return that the run should reach, from the dashboard's settings; None if no goal is set."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of the seconds that servers took for requests, over the newest ten seconds."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until memory or a disk is full or a goal is reached, at the present pace; None if unknown or never."""

    # fmt: off
    memory_full: Annotated[float | None, gauge("memory_full_seconds", "Memory is full", "Seconds until a table has no "
        "room left, at the pace of the last twenty minutes; 0 if a table is full. New entries then overwrite the "
        "oldest; nothing fails.", docs="tables.md")] = None
    disk_full: Annotated[float | None, gauge("disk_full_seconds", "Disk is full", "Seconds until the disk of a state "
        "folder is full, at the pace of the last twenty minutes. A server with a full disk acknowledges no data.",
        docs="state.md")] = None
    goal: Annotated[float | None, gauge("goal_seconds", "Goal reached", "Seconds until the goal is reached (steps or "
        "episodes, as set for the dashboard), at the pace of the last twenty minutes.")] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of all servers since this dashboard first saw each server, added up over restarts."""

    # fmt: off
    samples: Annotated[int, counter("samples", "Samples drawn", "Samples that servers handed out since this dashboard "
        "first saw them, restarts included.")] = 0
    overwritten: Annotated[int, counter("overwritten_caches", "Overwritten", "Caches that were overwritten unused, "
        "since this dashboard first saw the servers.")] = 0
    refused: Annotated[int, counter("refused", "Refused messages", "Messages that servers refused, since this "
        "dashboard first saw them.")] = 0
    # fmt: on


@dataclass(frozen=True, slots=True)
class NodeRow:
    """State and figures of one node that the dashboard polls."""

    # fmt: off
    name: str
    url: str
    role: Annotated[str, shown("Role", "Role of the node: server, proxy, actor, learner or inference.")]
    state: Annotated[str, shown("State", "Up (the node answers), not ready (the node should get no new clients) "
        "or away (the node does not answer).")]
    """State of the node: "up", "unready" or "down"."""
    since: float
    """Time at which `state` began, in seconds since 1970."""
    reasons: list[str]
    software: str
    uptime: Annotated[float | None, UPTIME]
    memory_bytes: Annotated[int | None, shown("Memory", "Resident memory of the process: its pages in RAM, shared "
        "pages included.", unit="bytes", curve=True)]
    descriptors: Annotated[int | None, shown("Open files", "Open file descriptors of the process, and their limit. "
        "Each client takes up to three.", docs="development/wire.md")]
    most_descriptors: int | None
    faults: Annotated[int, FAULTS]
    took: Annotated[float, shown("Answer", "Seconds that the node took to send its status page to the dashboard.",
        unit="s", curve=True)]
    keys: bool | None = None
    """True if the node admits only peers with a key; None if the node does not report this setting."""
    open: Annotated[tuple[str, ...], shown("Access", "Requirement to connect: a key, a process on this machine, or "
        "nothing (open to everybody).", docs="security.md")] = ()
    """Addresses that other machines can reach and that require no key or token."""
    refused: Annotated[int, figure_of(PageGuard, "refused")] = 0
    cpu: Annotated[float | None, shown("CPU", "Processor time of the process over the newest 10 s. 100 % is one fully "
        "used core.", unit="share", formula="processor seconds ÷ seconds", curve=True)] = None
    requests_per_second: Annotated[float | None, shown("Requests/s", "Requests that the node answered or forwarded "
        "each second, over the newest 10 s.", docs="metrics.md", curve=True)] = None
    """None if nodes of this role answer no requests, or the rate is not known yet."""
    endpoint: str = ""
    """Address that actors connect to, as seen from the dashboard's machine; "" if the node accepts no actors."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class InferenceRow:
    """Figures of one inference node. Rates and times cover the newest ten seconds."""

    # fmt: off
    name: str
    url: str
    version: Annotated[int, figure_of(InferenceStats, "version")]
    behind: int | None
    """Versions behind the newest model of its topic; None if the node follows no server."""
    is_outdated: bool
    """True if the node's model was replaced more than a minute ago."""
    clients: Annotated[int, figure_of(InferenceStats, "clients")]
    queue_rows: Annotated[int, figure_of(InferenceStats, "queue_rows")]
    rows_per_second: Annotated[float | None, shown("Rows/s", "Observations in the requests of actors; an actor with "
        "eight environments requests eight rows at a time.", docs="remote-policies.md", curve=True)]
    batch_rows: Annotated[float | None, shown("Batch", "Mean number of rows in one call of the function. Large "
        "batches cost less per row.", formula="rows ÷ batches", docs="remote-policies.md", curve=True)]
    batches: Annotated[dict[str, float], figure_of(InferenceStats, "batches")]
    """Share of the batches by the reason that started them; {} if no batch was computed."""
    wait: Annotated[float | None, shown("Wait", "Mean seconds from the arrival of a request to the start of its batch.",
        unit="s", docs="remote-policies.md", curve=True)]
    p50: Annotated[float | None, shown("Answer, median", "Median seconds from the arrival of a request at the node "
        "until its answer is sent: the wait and the call of the function, without the network.",
        unit="s", docs="remote-policies.md", curve=True)]
    p99: Annotated[float | None, shown("99 % below", "Seconds from the arrival of a request to its answer: 99 in 100 "
        "requests take less.", unit="s", docs="remote-policies.md", curve=True)]
    busy: Annotated[float | None, shown("Busy", "Share of its time in which the node computes. Near 100 %, actors wait "
        "for it.", unit="share", formula="seconds in the function ÷ seconds", docs="remote-policies.md",
        curve=True)]
    refused: Annotated[dict[str, int], shown("Refused requests", "Requests without an answer since the node was "
        "started: busy (too many rows wait), failed (the function raised), another schema, or a wrong key.",
        docs="remote-policies.md")]
    refused_per_second: Annotated[float, shown("Refused/s", "Requests without an answer each second.",
        docs="remote-policies.md", curve=True)]
    failures: Annotated[int, figure_of(InferenceStats, "failures")]
    weights_failures: Annotated[int, figure_of(InferenceStats, "weights_failures")]
    expired: Annotated[int, figure_of(InferenceStats, "expired")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class OwnRow:
    """Figures that only one kind of table has, of one table, added up over all servers that answer."""

    table: str
    servers: int
    figures: Any
    """Struct that the table's kind declares. Each element of a list in it has the name of its `server`."""


@dataclass(frozen=True, slots=True)
class StartsRow:
    """Archive of one node with the best states found so far, from which episodes start."""

    name: str
    """Name of the archive, or of its node."""
    node: str
    kept: Annotated[int, figure_of(StartsStats, "kept")]
    draws: Annotated[int, figure_of(StartsStats, "draws")]
    best: Annotated[float | None, figure_of(StartsStats, "best")]
    first: float | None
    """Cost of the first state of the search."""
    lineage: Annotated[list[tuple[float, int]], figure_of(StartsStats, "lineage")]
    """Ancestors of the best state, the first state first: (cost, steps from the first state)."""


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """Figures of one learner, in a server's process or remote."""

    # fmt: off
    learner: str
    """Id of the learner in hex; for a learner in a server's process "server:" and the server's name."""
    where: Annotated[str, shown("At", "Host of the learner, or its server.")]
    last_seen: Annotated[float, shown("Last seen", "Time of the learner's last message.", unit="ago")]
    batches: Annotated[float, shown("Batches", "Batches that the learner received.")]
    samples: Annotated[float, figure_of(TableStats, "samples")]
    waited: float
    waiting_share: Annotated[float | None, shown("Waits", "The share of its time that a learner spends waiting for "
        "samples.", unit="share", formula="seconds in get_batch ÷ seconds", docs="cluster.md")]
    scalars: dict[str, float]
    name: str = ""
    """Display name from the user or Kubernetes, shown in place of the id; "" if the learner has none."""
    lag: tuple[float, float] | None = None
    """(mean, maximum) of the model versions between acting and learning in a recent batch; None if unknown, and for a
    learner in a server's process, whose lag the table reports."""
    # fmt: on


CODES = (
    "no_node", "no_server", "node_down", "node_unready", "servers_missing", "proxies_missing", "inference_missing",
    "finished", "no_actors", "actors_gone", "waiting_for_actors", "actors_missing", "actors_idle", "actors_silent",
    "no_inserts", "no_caches", "inserts_limited", "waits_for_inference", "draws_limited", "learner_waits",
    "actors_ahead", "no_learner", "learner_behind", "settling", "balanced", "left_out", "samples_old", "models_behind",
    "inference_behind", "inference_refuses", "lag", "learner_skips_stale", "feedback_late", "caches_rejected",
    "disk_full", "refused",
)  # fmt: skip
"""Codes of all verdicts that the dashboard can report."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Finding about the state of the cluster, with advice."""

    level: Literal["good", "notice", "bad"]
    code: str
    """Identifier for programs, one of `CODES`; independent of the figures in `text`."""
    text: str
    """Description of the finding, and advice what to do."""
    knob: str = ""
    """Parameter, flag, command or method to change, as `text` names it; "" if no change is needed."""


@dataclass(frozen=True, slots=True)
class Overview:
    """State and figures of the whole cluster at one moment."""

    # fmt: off
    number: int
    """Sequence number of the overview, from 0."""
    time: float
    """Time of the overview in seconds since 1970."""
    run: str
    runs: list[str]
    finished: Annotated[bool, gauge("run_finished", "Finished", "1 when the run is finished, 0 before.")]
    durable: Annotated[bool, shown("Counts survive a crash", "Yes if every server keeps its counts in a state folder "
        "(--state-dir).", docs="state.md")]
    totals: Totals
    missing: list[str]
    """Names or addresses of nodes that do not answer. Newer counts of servers among these are not in `totals` yet."""
    rates: Rates
    actors: Annotated[Actors, shown("Actors", "An active actor sent a message in the last 20 seconds. A silent actor "
        "did not, and did not end in order. A gone actor ended in order.", docs="metrics.md")]
    tables: Annotated[list[TableRow], by("table", "name", own=True)]
    learning: Annotated[Learning, within("", "(at most 100 of each server)", "of all servers (at most 100 of each)")]
    freshness: SampleFreshness
    """Least fresh figures that learners report."""
    latency: Annotated[Latency, shown("Request time", "Time that servers take to answer: half of the requests take "
        "less than the first figure, 99 in 100 less than the second.", unit="s", docs="metrics.md")]
    forecast: Forecast
    verdicts: list[Verdict]
    nodes: list[NodeRow]
    learners: Annotated[list[LearnerRow], gauge("learners", "Learners", "Learners that were active recently.")]
    roles: Annotated[list[RoleCount], by("role", "role")] = field(default_factory=list)
    """Node counts of each role that has nodes or expected nodes."""
    models: Annotated[dict[str, int], MODEL_VERSION] = field(default_factory=dict)
    outdated: Annotated[int, gauge("outdated_actors", "Replaced a minute ago", "Active actors whose model was "
        "replaced more than a minute ago. Their connection for models may be cut.",
        docs="alerts.md")] = 0
    inference: list[InferenceRow] = field(default_factory=list)
    """Figures of the inference nodes that answer."""
    starts: list[StartsRow] = field(default_factory=list)
    """Archives of start states, one for each node that keeps an archive."""
    own: dict[str, list[OwnRow]] = field(default_factory=dict)
    """Figures that only some kinds of table have, by kind."""
    actor_lag: ActorLag | None = None
    """Model lag of the active actors; None if no active actor reports its model."""
    open: list[str] = field(default_factory=list)
    """Addresses open without a key or token, each with the node's name; includes the dashboard's address."""
    recorded: float | None = None
    """Time at which a run opened from a file was exported; None for a live cluster."""
    counted: Counted = field(default_factory=Counted)

    @property
    def rollouts_lag(self) -> Annotated[float | None, gauge("rollouts_lag_mean", "Rollouts behind", "Model versions "
        "between acting and learning in rollouts; of several tables the largest mean.")]:
        """Largest mean model lag of the tables that hand out each entry once; None if no such lag is known."""
        return max((each.lag_mean for each in self.tables if each.is_taken and each.lag_mean is not None), default=None)

    @property
    def inference_behind(self) -> Annotated[int, gauge("outdated_inference_nodes", "Inference behind", "Inference "
        "nodes whose model was replaced more than a minute ago.")]:
        """Number of inference nodes whose model was replaced more than a minute ago."""
        return sum(each.is_outdated for each in self.inference)

    @property
    def findings(self) -> Annotated[dict[str, int], gauge("verdict", "Findings", "1 for each finding that the overview "
        "shows now; 0 for all others.", label="code")]:
        """1 for each code with a verdict in this overview and 0 for all other `CODES`."""
        return dict.fromkeys(CODES, 0) | {each.code: 1 for each in self.verdicts}
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorRow:
    """Figures of one actor. Times are in seconds since 1970."""

    # fmt: off
    client: Annotated[str, shown("Id", "The id of the actor in hex.")]
    label: str
    """Label of the actor's log lines: 8 hex digits."""
    host: Annotated[str, shown("Host", "Host on which the actor runs, as the actor reports.")]
    table: Annotated[str, shown("Table", "The table that the actor fills.")]
    home: Annotated[str, shown("Server", "The server that counts the actor now.")]
    state: Annotated[str, shown("State", "active, silent, lost or gone.")]
    first_seen: float
    last_seen: float
    episodes: Annotated[int, figure_of(Totals, "episodes")]
    steps: Annotated[int, figure_of(Totals, "steps")]
    steps_per_second: Annotated[float, shown("Steps/s", "Entries recorded each second.",
        formula="steps gained in the newest 10 s ÷ 10 s", docs="metrics.md")]
    return_mean: Annotated[float | None, shown("Return, whole run", "Mean return of all episodes that the actor closed "
        "in this run, the first ones included.", formula="Σ return ÷ episodes")]
    generated_bytes: Annotated[int, figure_of(Totals, "generated_bytes")]
    pushed_caches: Annotated[int, figure_of(Totals, "pushed_caches")]
    accepted_caches: Annotated[int, figure_of(Totals, "accepted_caches")]
    rejected_caches: Annotated[int, figure_of(Totals, "rejected_caches")]
    lost_caches: Annotated[int, figure_of(Totals, "lost_caches")]
    skipped_caches: Annotated[int, figure_of(Totals, "skipped_caches")]
    received_bytes: Annotated[int, figure_of(Totals, "received_bytes")]
    dropped_lines: Annotated[int, figure_of(Totals, "dropped_lines")]
    name: str = ""
    """Display name from the user or Kubernetes, shown in place of the id; "" if none. Actors may share a name."""
    return_recent: Annotated[float | None, shown("Return, last 20", "Mean return of the actor's newest 20 episodes, of "
        "those that the dashboard has seen end.", formula="Σ return ÷ episodes")] = None
    """None if the dashboard has seen no episode of the actor end."""
    model_version: Annotated[int | None, shown("Acts with", "Version of the model with which the actor acted, as last "
        "reported. An actor that asks an inference node reports the version of the answers.",
        docs="on-policy.md")] = None
    """None if the actor has reported no version."""
    model_lag: Annotated[int | None, shown("Behind", "Versions newer than the actor's model, at the moment of its last "
        "report; of several topics the most.",
        formula="newest version then - version that acted", docs="on-policy.md")] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorPage:
    """Page of the actor list, with the sizes of the whole list."""

    total: int
    """Number of actors in the run."""
    matching: int
    """Number of actors that match the filters."""
    rows: list[ActorRow]


@dataclass(frozen=True, slots=True)
class ActorDetail:
    """Figures, accounts, facts and newest episodes of one actor."""

    actor: ActorRow
    homes: list[dict[str, Any]]
    """Accounts of the actor, one for each home server and server life."""
    facts: dict[str, Any]
    """Facts that the actor's home server reports: weights, models, scalars, refusals."""
    episodes: list[EpisodeRow]
    """Newest episodes of the actor, the newest first."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """Return and length of one closed episode. `time` is in seconds since 1970."""

    client: str
    time: float
    length: int
    returned: float
    is_test: bool = False


@dataclass(frozen=True, slots=True)
class ShownArray:
    """Array of a sample, encoded for JSON."""

    dtype: str
    """NumPy dtype string, such as "|u1" or "<f4"."""
    shape: list[int]
    axes: int
    """Number of leading axes before the field's own shape: frames of a stack, entries of a sequence."""
    data: str
    """Bytes of the array in C order, in base64."""


@dataclass(frozen=True, slots=True)
class HeldSample:
    """Held sample in the form that learners get; reading the sample does not take it from the table."""

    # fmt: off
    server: str
    """Name of the server that holds the sample."""
    table: str
    client: str
    """Id of the actor that pushed the sample, or of the server's own memory if that memory keeps episodes."""
    number: int
    """Number of the sampled entry."""
    age: Annotated[float, shown("Age", "Seconds since the entry was recorded.", unit="s")]
    weight: Annotated[float, shown("Weight", "Draws are proportional to the weight.",
        formula="init_w · multiplier · priority ^ priority_exponent", docs="sampling.md")]
    probability: Annotated[float, shown("Chance at each draw", "Probability that one draw from the server returns "
        "this sample.", formula="weight ÷ Σ weight", docs="sampling.md")]
    importance: Annotated[float, shown("Importance", "Factor in a learner's loss that corrects for unequal chances. An "
        "entry of mean chance has 1. A batch divides by its largest.",
        formula="(N · chance) ^ -importance_exponent", docs="sampling.md")]
    model_version: Annotated[int, shown("Model that acted", "Version of the published model with which the actor chose "
        "this entry's action; 0 if not reported.")]
    model_lag: Annotated[int | None, shown("Models behind", "Versions published since the model that acted.",
        formula="newest version - version that acted")]
    """None if no model was published, or the actor reported no version."""
    earlier: int | None
    """Number of the previous entry in the episode, or of the actor's previous held entry if the episode is unknown."""
    later: int | None
    """Number of the next entry in the episode, or of the actor's next held entry."""
    step: int | None
    """Position of the entry in its episode, from 1; None if the server does not know the episode."""
    episode: int | None
    """Number of entries in the episode; None if the server does not know the episode."""
    td_error: Annotated[float | None, shown("TD error, last update", "TD error that a learner last reported for this "
        "entry. The priority is its absolute value plus priority_epsilon.",
        formula="|TD error| = priority - priority_epsilon", docs="sampling.md")]
    """None if no learner reported an error, or only the actor knows the error."""
    arrays: dict[str, ShownArray]
    # fmt: on


# fmt: off
WORDS: Final[Mapping[str, Figure]] = {
    "bytes_factor": shown("Sent for each byte recorded", "Above 1, entries are sent several times, because a cache "
        "repeats sampled frames and entries. Below 1, only a part is sent, or it is compressed.",
        formula="bytes received ÷ bytes recorded", docs="tables.md"),
    "bytes_sent": shown("Bytes received", "Bytes of caches that reached servers, beside the bytes of all entries "
        "that actors recorded.", docs="tables.md"),
    "priority": shown("Priority", "How surprising an entry is: the size of its TD error plus a small constant, so that "
        "every entry can be drawn.", formula="|TD error| + priority_epsilon", docs="sampling.md"),
    "trainer_waits": shown("Trainer", "State of the trainer. It pauses until start_training samples have arrived, and "
        "after max_training_steps_per_env_step steps for each sample.", docs="trainers.md"),
    "trainer_ratio": shown("Steps per sample", "Training steps for each sample that arrived since the trainer started.",
        formula="training steps ÷ samples", docs="trainers.md"),
    "test_return": shown("Test return", "Return of episodes that are played to measure the policy and are not "
        'learned from, by workers (client.report with kind="test"), or as the program reports it under the name '
        "test_return.", docs="on-policy.md"),
    "policy_loss": shown("Policy loss", "Loss that the optimizer lowers so that good actions become more likely. Its "
        "size says little; the loss need not fall while returns rise.",
        formula="-mean of min(ratio · advantage, clipped ratio · advantage)", docs="on-policy.md"),
    "value_loss": shown("Value loss", "Error of the value function against the observed returns. It grows with the "
        "size of returns.", formula="½ mean of (value - return)²", docs="on-policy.md"),
    "entropy": shown("Entropy", "Randomness of the policy. It falls while the policy learns; near 0 the policy no "
        "longer explores.", formula="-Σ p log p", docs="on-policy.md"),
    "kl": shown("KL divergence", "Estimated change of the policy by an update. Values above 0.05 often mean a step "
        "size that is too large.", formula="mean of (ratio - 1) - log ratio", docs="on-policy.md"),
    "clip_fraction": shown("Clipped ratios", "Share of the entries whose probability ratio left the range that the "
        "update allows.", formula="|ratio - 1| > clip", docs="on-policy.md"),
    "ratio": shown("Probability ratio", "Probability of an action now, relative to the policy that chose it. Far from "
        "1, entries are old or steps too large.",
        formula="π new(action) ÷ π old(action)", docs="on-policy.md"),
    "explained_variance": shown("Explained variance", "Share of the returns' variance that the value function "
        "predicts: 1 is all; 0 is no better than their mean.",
        formula="1 - Var(return - value) ÷ Var(return)", docs="on-policy.md"),
    "grad_norm": shown("Gradient norm", "Length of the gradient before it is clipped. Jumps often precede "
        "the collapse of a policy.", docs="on-policy.md"),
}
"""Glossary terms that are not fields of a response: chart figures, and scalars that learners and trainers report."""
# fmt: on


def terms() -> Iterator[tuple[str, Figure]]:
    """Yield the terms that the pages explain: figures of responses, as "Class.field", and `WORDS`. The glossary merges
    terms with the same title and sentence.
    """
    explained = (
        Overview, Totals, Learning, Actors, Forecast, TableRow, SampleFreshness, ActorRow, LearnerRow, InferenceRow,
        StartsRow, NodeRow, HeldSample, ClusterDistribution,
    )  # fmt: skip
    for kind in (*explained, *filter(None, [each.own_figures() for each in registry.known_kinds()])):
        for name, figure in figures_of(kind).items():
            if figure.title:
                yield f"{kind.__name__}.{name}", figure
    yield from WORDS.items()
