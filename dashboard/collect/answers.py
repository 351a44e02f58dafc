"""What the API answers with: plain data, the same for JSON, its OpenAPI description and the stream."""

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
    """Per second, over the newest ten seconds; samples_per_insert over the newest minute."""

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
    "actors", "Actors", "Actors of this run: active (heard in the last 20 seconds), silent, lost (silent for so long "
    "that they will hardly come back), or gone (they ended in order).", label="state", docs="metrics.md",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Actors:
    """How many there are, by state."""

    # fmt: off
    active: Annotated[int, ACTORS("active")] = 0
    silent: Annotated[int, ACTORS("silent")] = 0
    lost: Annotated[int, ACTORS("lost")] = 0
    gone: Annotated[int, ACTORS("gone")] = 0
    expected: Annotated[int, gauge("expected_actors", "Expected", "Actors that there should be (--expected-actors); 0 "
        "if that is not known.")] = 0
    missing: Annotated[int, gauge("missing_actors", "Missing", "Expected actors that are not active.")] = 0
    idle: int = 0
    """Of the active ones, those that are connected and have recorded nothing yet; no list has them."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorLag:
    """How many versions behind the newest model the active actors act; of those that have said so."""

    # fmt: off
    actors: int
    mean: Annotated[float, gauge("actor_model_lag_mean", "Actors behind", "Model versions that active actors are "
        "behind the newest one, as a mean.")]
    max: Annotated[int, gauge("actor_model_lag_max", "Most behind", "Model versions that the active actor farthest "
        "behind is behind the newest one.")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class RoleCount:
    """How many nodes of one role there are, of those that this dashboard asks."""

    # fmt: off
    role: str
    up: Annotated[int, gauge("nodes", "Up", "Nodes that answer the dashboard.")]
    expected: Annotated[int, gauge("expected_nodes", "Expected", "Nodes that there should be (--expected-servers and "
        "others); 0 if that is not known.")]
    missing: Annotated[int, gauge("missing_nodes", "Missing", "Expected nodes that do not answer, or are not there to "
        "be asked.")]
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow(TableStats):
    """One table over all servers that answer: their figures, added up, and what follows from them."""

    # fmt: off
    full: Annotated[float | None, gauge("table_full_ratio", "Full", "Share of its room that is taken: of bytes, or of "
        "caches or entries, whichever is more. A full table overwrites its oldest.", formula="held ÷ limit",
        of="cluster")] = None
    """None: there is no limit."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What its servers say, server by server."""
    samples_per_insert: Annotated[float | None, gauge("table_samples_per_insert_ratio", "Samples per insert",
        "How often an entry is drawn on average: samples drawn from a table for each step recorded, over the newest "
        "minute.", formula="samples drawn ÷ steps recorded", docs="rate.md", of="cluster", unit="")] = None
    """None: nothing was recorded, or it is not known yet."""
    lag_mean: float | None = None
    """Model versions between acting and learning, of recent batches or takes: the worst of what learners say."""
    lag_max: float | None = None
    max_model_lag: Annotated[int | None, shown("Limit (max_model_lag)", "Entries whose model is more versions behind "
        "than this are not learned from. Without a limit all are.", docs="on-policy.md")] = None
    """The parameter; None: there is no limit, or the dashboard has not read it yet."""
    stale_share: Annotated[float | None, gauge("rollouts_stale_ratio", "Skipped as too old",
        "Entries of rollouts whose model was too old, as a share of those that left the table in the newest minute.",
        formula="too old ÷ (taken + too old)", docs="on-policy.md", of="cluster", curve=True)] = None
    holds: str = ""
    """What it holds, in words: "caches"."""
    unit: str = "entries"
    """What is drawn or taken of that."""
    room: str = "entries"
    """What `capacity` counts."""
    is_taken: bool = False
    """Whether each entry is handed out once."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class Learning(RecentEpisodes):
    """Returns of the newest episodes of all servers, and figures by name."""

    client_scalars: dict[str, float] = field(default_factory=dict)
    """Mean over all active actors."""
    learner_scalars: dict[str, float] = field(default_factory=dict)
    goal: float | None = None
    """Return that the run should reach, as the dashboard was told."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that servers took for requests, over the newest ten seconds."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until something happens if it goes on like this; None where it will not, or nobody knows."""

    # fmt: off
    memory_full: Annotated[float | None, gauge("memory_full_seconds", "Memory is full", "Seconds until a table has no "
        "room left, at the pace of the last twenty minutes; 0 of a full one. From then on the oldest makes room for "
        "the new; nothing fails.", docs="choose.md")] = None
    disk_full: Annotated[float | None, gauge("disk_full_seconds", "Disk is full", "Seconds until the disk of a state "
        "folder is full, at the pace of the last twenty minutes. Then nothing is acknowledged any more.",
        docs="state.md")] = None
    goal: Annotated[float | None, gauge("goal_seconds", "Goal reached", "Seconds until the goal is reached (steps or "
        "episodes, as the dashboard was told), if it goes on like this.")] = None
    # fmt: on


@dataclass(frozen=True, slots=True)
class Counted:
    """What servers counted since this dashboard first saw them, in all of their lives."""

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
    """One node."""

    # fmt: off
    name: str
    url: str
    role: Annotated[str, shown("Role", "What the node is: server, proxy, actor, learner or inference.")]
    state: Annotated[str, shown("State", "Whether the node answers (up), should get no new clients (not ready), or "
        "does not answer (away).")]
    """up, unready or down."""
    since: float
    """Seconds since 1970: when that began."""
    reasons: list[str]
    software: str
    uptime: Annotated[float | None, UPTIME]
    memory_bytes: Annotated[int | None, shown("Memory", "Resident memory of the process: what it holds in RAM, shared "
        "pages included.", unit="bytes", curve=True)]
    descriptors: Annotated[int | None, shown("Open files", "File descriptors that the process has open, and how many "
        "it may have. Each client takes up to three.", docs="sockets.md")]
    most_descriptors: int | None
    faults: Annotated[int, FAULTS]
    took: Annotated[float, shown("Answer", "Seconds that the node took to send its status page to the dashboard.",
        unit="s", curve=True)]
    keys: bool | None = None
    """Whether only peers with a key are let in; None where it has not said."""
    open: Annotated[tuple[str, ...], shown("Access", "What a peer needs to come in: a key, nothing beyond being on "
        "this machine, or nothing at all (open to everybody).", docs="security.md")] = ()
    """Addresses that other machines reach and that ask for no key or token."""
    refused: Annotated[int, figure_of(PageGuard, "refused")] = 0
    cpu: Annotated[float | None, shown("CPU", "Processor time that the process used over the newest 10 s. 100 % is one "
        "core at work all the time.", unit="share", formula="processor seconds ÷ seconds", curve=True)] = None
    requests_per_second: Annotated[float | None, shown("Requests/s", "Requests that the node answered or forwarded "
        "each second, over the newest 10 s.", docs="metrics.md", curve=True)] = None
    """None of a node that is asked nothing."""
    endpoint: str = ""
    """Address that actors connect to, as seen from where the dashboard runs; "" of a node that takes none."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class InferenceRow:
    """One inference node. Rates and times are those of the newest ten seconds."""

    # fmt: off
    name: str
    url: str
    version: Annotated[int, figure_of(InferenceStats, "version")]
    behind: int | None
    """Versions behind the newest model of its topic; None if it follows no server."""
    is_outdated: bool
    """Whether its model was replaced more than a minute ago."""
    clients: Annotated[int, figure_of(InferenceStats, "clients")]
    queue_rows: Annotated[int, figure_of(InferenceStats, "queue_rows")]
    rows_per_second: Annotated[float | None, shown("Rows/s", "Observations for which actors ask; an actor with eight "
        "environments asks for eight rows at a time.", docs="inference.md", curve=True)]
    batch_rows: Annotated[float | None, shown("Batch", "How many rows one call of the function gets, as a mean. More "
        "rows a call cost less each.", formula="rows ÷ batches", docs="inference.md", curve=True)]
    batches: Annotated[dict[str, float], figure_of(InferenceStats, "batches")]
    """Shares of the batches; {} if there was none."""
    wait: Annotated[float | None, shown("Wait", "Seconds from the arrival of a request to the start of its batch, as a "
        "mean.", unit="s", docs="inference.md", curve=True)]
    p50: Annotated[float | None, shown("Answer, median", "Seconds from the arrival of a request at the node until its "
        "answer is sent that half of them stay below: the wait and the call of the function. The network comes on top.",
        unit="s", docs="inference.md", curve=True)]
    p99: Annotated[float | None, shown("99 % below", "Seconds from the arrival of a request to its answer that 99 in "
        "100 stay below.", unit="s", docs="inference.md", curve=True)]
    busy: Annotated[float | None, shown("Busy", "The share of its time in which the node computes. Near 100 % actors "
        "wait for it.", unit="share", formula="seconds in the function ÷ seconds", docs="inference.md", curve=True)]
    refused: Annotated[dict[str, int], shown("Refused requests", "Requests without an answer since the node was "
        "started: busy (too many rows wait), failed (the function raised), or those of another schema or key.",
        docs="inference.md")]
    refused_per_second: Annotated[float, shown("Refused/s", "Requests without an answer each second.",
        docs="inference.md", curve=True)]
    failures: Annotated[int, figure_of(InferenceStats, "failures")]
    weights_failures: Annotated[int, figure_of(InferenceStats, "weights_failures")]
    expired: Annotated[int, figure_of(InferenceStats, "expired")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class OwnRow:
    """Figures of a table that only its kind has, added up over all servers that answer."""

    table: str
    servers: int
    figures: Any
    """As the kind declares them. Of a list, each element has the name of its `server`."""


@dataclass(frozen=True, slots=True)
class StartsRow:
    """States that episodes start from, as one node keeps them: the best that were found."""

    name: str
    """Of the archive, or of its node."""
    node: str
    kept: Annotated[int, figure_of(StartsStats, "kept")]
    draws: Annotated[int, figure_of(StartsStats, "draws")]
    best: Annotated[float | None, figure_of(StartsStats, "best")]
    first: float | None
    """Cost of the first state: where the search began."""
    lineage: Annotated[list[tuple[float, int]], figure_of(StartsStats, "lineage")]
    """The first state first: cost, and steps from the first one."""


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """One learner: in a server's process, or far away."""

    # fmt: off
    learner: str
    """Its id in hex; of an embedded one "server:" and the server's name."""
    where: Annotated[str, shown("At", "Its host, or its server.")]
    last_seen: Annotated[float, shown("Last seen", "When the learner was heard last.", unit="ago")]
    batches: Annotated[float, shown("Batches", "Batches that the learner was given.")]
    samples: Annotated[float, figure_of(TableStats, "samples")]
    waited: float
    waiting_share: Annotated[float | None, shown("Waits", "The share of its time that a learner spends waiting for "
        "samples.", unit="share", formula="seconds in get_batch ÷ seconds", docs="rate.md")]
    scalars: dict[str, float]
    name: str = ""
    """That a person or Kubernetes gave it, in place of the id for people; "" for none."""
    lag: tuple[float, float] | None = None
    """Mean and most of the model versions between acting and learning, of a recent batch; None of an embedded one,
    whose table says it, and where nobody knows."""
    # fmt: on


CODES = (
    "no_node", "no_server", "node_down", "node_unready", "servers_missing", "proxies_missing", "inference_missing",
    "finished", "no_actors", "actors_gone", "waiting_for_actors", "actors_missing", "actors_idle", "actors_silent",
    "no_inserts", "no_caches", "inserts_limited", "waits_for_inference", "draws_limited", "learner_waits",
    "actors_ahead", "no_learner", "learner_behind", "settling", "balanced", "left_out", "samples_old", "models_behind",
    "inference_behind", "inference_refuses", "lag", "learner_skips_stale", "feedback_late", "caches_rejected",
    "disk_full", "refused",
)  # fmt: skip
"""All that a verdict can say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding."""

    level: Literal["good", "notice", "bad"]
    code: str
    """For programs: the same whatever the figures."""
    text: str
    """What it is, and what to do about it."""
    knob: str = ""
    """What to turn: a parameter, flag, command or method that the text names; "" where all is well."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole cluster at one moment."""

    # fmt: off
    number: int
    """Grows with each one."""
    time: float
    """Seconds since 1970."""
    run: str
    runs: list[str]
    finished: Annotated[bool, gauge("run_finished", "Finished", "1 when the run is finished, 0 before.")]
    durable: Annotated[bool, shown("Counts survive a crash", "Whether every server keeps its counts in a state folder "
        "(--state-dir).", docs="state.md")]
    totals: Totals
    missing: list[str]
    """Nodes that do not answer: of servers among them, what was counted since is not in the totals yet."""
    rates: Rates
    actors: Annotated[Actors, shown("Actors", "An active actor was heard in the last 20 seconds. A silent one was not, "
        "and did not say goodbye. One that is gone did.", docs="metrics.md")]
    tables: Annotated[list[TableRow], by("table", "name", own=True)]
    learning: Annotated[Learning, within("", "(at most 100 of each server)", "of all servers (at most 100 of each)")]
    freshness: SampleFreshness
    """The worst of what learners say."""
    latency: Annotated[Latency, shown("Request time", "How long servers take to answer: half of the requests take less "
        "than the first figure, 99 in 100 less than the second.", unit="s", docs="metrics.md")]
    forecast: Forecast
    verdicts: list[Verdict]
    nodes: list[NodeRow]
    learners: Annotated[list[LearnerRow], gauge("learners", "Learners", "Learners that servers heard lately.")]
    roles: Annotated[list[RoleCount], by("role", "role")] = field(default_factory=list)
    """Of each role that there is, or that there should be."""
    models: Annotated[dict[str, int], MODEL_VERSION] = field(default_factory=dict)
    outdated: Annotated[int, gauge("outdated_actors", "Replaced a minute ago", "Active actors that act with a model "
        "for which a newer one was there already a minute ago. Their connection for models may be cut.",
        docs="runbooks.md")] = 0
    inference: list[InferenceRow] = field(default_factory=list)
    """Inference nodes that answer."""
    starts: list[StartsRow] = field(default_factory=list)
    """Archives of start states, of all nodes that keep one."""
    own: dict[str, list[OwnRow]] = field(default_factory=dict)
    """Of tables with figures that only their kind has, by the kind."""
    actor_lag: ActorLag | None = None
    """None if no active actor has said which model it uses."""
    open: list[str] = field(default_factory=list)
    """Where everybody may come in: a node's name and its address; the dashboard's own among them."""
    recorded: float | None = None
    """When this was exported, of a run that was opened from a file; None of a cluster that is watched."""
    counted: Counted = field(default_factory=Counted)

    @property
    def rollouts_lag(self) -> Annotated[float | None, gauge("rollouts_lag_mean", "Rollouts behind", "Model versions "
        "between acting and learning in rollouts; of several tables the largest mean.")]:
        """Of tables whose entries are handed out once."""
        return max((each.lag_mean for each in self.tables if each.is_taken and each.lag_mean is not None), default=None)

    @property
    def inference_behind(self) -> Annotated[int, gauge("outdated_inference_nodes", "Inference behind", "Inference "
        "nodes whose model was replaced more than a minute ago.")]:
        """How many there are."""
        return sum(each.is_outdated for each in self.inference)

    @property
    def findings(self) -> Annotated[dict[str, int], gauge("verdict", "Findings", "1 for each finding that the overview "
        "shows now; 0 for all others.", label="code")]:
        """By code of all verdicts."""
        return dict.fromkeys(CODES, 0) | {each.code: 1 for each in self.verdicts}
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorRow:
    """One actor. Times are seconds since 1970."""

    # fmt: off
    client: Annotated[str, shown("Id", "The id of the actor in hex.")]
    label: str
    """Of its log lines."""
    host: Annotated[str, shown("Host", "Where the actor runs, as it says.")]
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
    """That a person or Kubernetes gave it, in place of the id for people; "" for none. Several may have the same."""
    return_recent: Annotated[float | None, shown("Return, last 20", "Mean return of the actor's newest 20 episodes, of "
        "those that the dashboard has seen end.", formula="Σ return ÷ episodes")] = None
    """None if it has seen none."""
    model_version: Annotated[int | None, shown("Acts with", "The version of the model with which the actor acted when "
        "it reported last. An actor that asks an inference node says the version of the answers.",
        docs="on-policy.md")] = None
    """None if it has not said one."""
    model_lag: Annotated[int | None, shown("Behind", "Versions that were newer than the one with which the actor "
        "acted, at the moment of its last report; of several topics the most.", formula="newest version then - version "
        "that acted", docs="on-policy.md")] = None
    # fmt: on


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

    # fmt: off
    server: str
    """Where it is held."""
    table: str
    client: str
    """Id of the actor that pushed it; of the server's own memory where that keeps episodes."""
    number: int
    """Of the entry."""
    age: Annotated[float, shown("Age", "Seconds since the entry was recorded.", unit="s")]
    weight: Annotated[float, shown("Weight", "Draws are in proportion to it.", formula="init_w · multiplier · priority "
        "^ priority_exponent", docs="sampling.md")]
    probability: Annotated[float, shown("Chance at each draw", "How likely this sample is to be the one that a draw "
        "from its server gives.", formula="weight ÷ Σ weight", docs="sampling.md")]
    importance: Annotated[float, shown("Importance", "What a learner multiplies into its loss to correct for unequal "
        "chances. 1 is an entry of the mean chance. A batch divides by its largest.",
        formula="(N · chance) ^ -importance_exponent", docs="sampling.md")]
    model_version: Annotated[int, shown("Model that acted", "The version of the published model with which the actor "
        "chose this entry's action; 0 if it did not say.")]
    model_lag: Annotated[int | None, shown("Models behind", "Versions that were published since the one that acted.",
        formula="newest version - version that acted")]
    """None where no model was published, or the actor did not say."""
    earlier: int | None
    """Number of the entry before it: in its episode, or of its actor's held ones where the server knows no episode."""
    later: int | None
    """And of the one after it."""
    step: int | None
    """Its place in its episode, from 1; None where the server knows no episode."""
    episode: int | None
    """Entries of its episode; None where the server does not know."""
    td_error: Annotated[float | None, shown("TD error, last update", "What a learner reported for this entry the last "
        "time. Its priority is this size and priority_epsilon.", formula="|TD error| = priority - priority_epsilon",
        docs="sampling.md")]
    """None where no learner did, or its actor alone knows."""
    arrays: dict[str, ShownArray]
    # fmt: on


# fmt: off
WORDS: Final[Mapping[str, Figure]] = {
    "bytes_factor": shown("Sent for each byte recorded", "Above 1, entries are sent several times, because a cache "
        "repeats the frames and entries that it samples. Below 1, only a part is sent, or it is compressed.",
        formula="bytes received ÷ bytes recorded", docs="choose.md"),
    "bytes_sent": shown("Bytes received", "Bytes of caches that reached servers, beside the bytes of all entries "
        "that actors recorded.", docs="choose.md"),
    "priority": shown("Priority", "How surprising an entry is: the size of its TD error, and a little more so that "
        "nothing becomes unreachable.", formula="|TD error| + priority_epsilon", docs="sampling.md"),
    "trainer_waits": shown("Trainer", "What a trainer does now. It pauses until start_training samples have come, "
        "and while it has made max_training_steps_per_env_step steps for each sample.", docs="trainers.md"),
    "trainer_ratio": shown("Steps per sample", "Training steps that the trainer made for each sample that came since "
        "it was started.", formula="training steps ÷ samples", docs="trainers.md"),
    "test_return": shown("Test return", "Return of episodes that are played to measure the policy and are not "
        'learned from, by workers (client.report with kind="test"), or as the program reports it under the name '
        "test_return.", docs="on-policy.md"),
    "policy_loss": shown("Policy loss", "What the optimizer lowers so that good actions become more likely. Its size "
        "says little; it need not fall while returns rise.",
        formula="-mean of min(ratio · advantage, clipped ratio · advantage)", docs="on-policy.md"),
    "value_loss": shown("Value loss", "How far the value function is from the returns that were seen. It rises with "
        "the size of returns.", formula="½ mean of (value - return)²", docs="on-policy.md"),
    "entropy": shown("Entropy", "How undecided the policy is. It falls while the policy learns; near 0 it explores "
        "no more.", formula="-Σ p log p", docs="on-policy.md"),
    "kl": shown("KL divergence", "How far an update moved the policy, as an estimate. Values above 0.05 often mean a "
        "step size that is too large.", formula="mean of (ratio - 1) - log ratio", docs="on-policy.md"),
    "clip_fraction": shown("Clipped ratios", "The share of the entries whose probability ratio left the range that "
        "the update allows.", formula="|ratio - 1| > clip", docs="on-policy.md"),
    "ratio": shown("Probability ratio", "How much more likely the policy makes an action than the policy that chose "
        "it. Far from 1, entries are old or steps too large.",
        formula="π new(action) ÷ π old(action)", docs="on-policy.md"),
    "explained_variance": shown("Explained variance", "How much of the differences between returns the value "
        "function foretells: 1 is all, 0 as much as their mean, below 0 less.",
        formula="1 - Var(return - value) ÷ Var(return)", docs="on-policy.md"),
    "grad_norm": shown("Gradient norm", "Length of the gradient before it is clipped. Jumps go before a policy that "
        "breaks down.", docs="on-policy.md"),
}
"""What is no field of an answer: figures of charts, and what learners and trainers say of themselves."""
# fmt: on


def terms() -> Iterator[tuple[str, Figure]]:
    """What the pages explain: the figures of answers, as "Class.field", and `WORDS`. The glossary shows those with the
    same title and sentence once.
    """
    explained = (
        Overview, Totals, Learning, Actors, Forecast, TableRow, SampleFreshness, ActorRow, LearnerRow, InferenceRow,
        StartsRow, NodeRow, HeldSample, ClusterDistribution,
    )  # fmt: skip
    for kind in (*explained, *filter(None, [each.own_figures() for each in registry.known()])):
        for name, figure in figures_of(kind).items():
            if figure.title:
                yield f"{kind.__name__}.{name}", figure
    yield from WORDS.items()
