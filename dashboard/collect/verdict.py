"""What is wrong with a cluster, in a sentence that names what to turn. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "notice", "bad"]

MUCH_WAITING = 0.3
"""Share of its time that a learner waits, above which that limits the run."""
MUCH_SKIPPED = 0.1
"""Share of the caches that clients could not push, above which actors are ahead."""
LITTLE = 0.02
"""Share of time or caches that is not worth a word."""
MUCH_LEFT_OUT = 0.2
"""Share of the weight that a draw had to leave out, above which batches are not what they should be."""
NEARLY_FULL = 0.95
FAR_BEHIND = 0.5
"""Share of the samples that were asked for, below which a learner does not keep up."""
MUCH_REJECTED = 0.01
"""Share of the caches that arrived, above which rejected ones are worth a word."""
MUCH_BUSY = 0.9
"""Share of its time that an inference node computes, above which it has no room for more."""
SLOW_ANSWER = 0.25
"""Seconds that one in a hundred answers of an inference node takes, above which actors wait for it."""
MUCH_REFUSED = 0.1
"""Requests that an inference node refuses each second, above which that is worth a word."""
MUCH_LAG = 8.0
"""Model versions between acting and learning, as a mean, above which rollouts are old."""
MUCH_OF_TURNOVER = 0.5
"""Part of the time for which actors hold an entry, above which TD errors come too late."""
MUCH_STALE = 0.1
"""Share of what arrives that is skipped as too old, above which that is worth a word."""


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

    level: Level
    code: str
    """For programs: the same whatever the figures."""
    text: str
    """What it is, and what to do about it."""
    knob: str = ""
    """What to turn: a parameter, flag, command or method that the text names; "" where all is well."""


@dataclass(frozen=True, slots=True)
class TableRatio:
    """How many samples are drawn from a table for each step, beside how many should be."""

    table: str
    drawn: float
    asked: float


@dataclass(frozen=True, slots=True)
class TableFigure:
    """One figure of a table."""

    table: str
    value: float


@dataclass(frozen=True, slots=True)
class InferenceSigns:
    """An inference node, over the newest ten seconds."""

    name: str
    busy: float | None
    """Share of its time in which the function runs."""
    p99: float | None
    """Seconds that 99 in 100 answers stay below."""
    refused_per_second: float
    is_outdated: bool
    """Whether its model was replaced more than a minute ago."""


@dataclass(frozen=True, slots=True)
class VerdictInputs:
    """What verdicts are made of."""

    nodes: int
    nodes_down: tuple[str, ...]
    unready: tuple[str, ...]
    servers_up: int
    finished: bool
    active: int
    silent: int
    idle: int
    """Of the active ones, those that are connected and recorded nothing yet."""
    expected: int
    steps: int
    steps_per_second: float
    samples_per_second: float
    waiting_share: float | None
    skipped_share: float
    disk_used: float | None
    """Share of the fullest disk of a state folder."""
    refused_per_second: float
    disk_trouble: str = ""
    """Which server cannot write its state folder, and why; "" if all can."""
    draws_wait: tuple[str, ...] = ()
    """Tables whose learners have to wait for entries, with the reason."""
    inserts_wait: tuple[str, ...] = ()
    """Tables whose actors have to wait for draws, with the reason."""
    is_idle: bool = False
    """Whether nobody has drawn for a minute."""
    left_out: float | None = None
    """Share of all weight that a recent draw could not draw from."""
    lost: int = 0
    """Actors that have been silent for so long that they will not come back."""
    gone: int = 0
    """Actors that reported their end."""
    proxies_up: int = 0
    expected_servers: int = 0
    expected_proxies: int = 0
    is_still: bool = False
    """Whether no step was recorded for a minute."""
    nothing_arrives: bool = False
    """Whether actors drew caches for a minute, and none of them arrived."""
    rejected_share: float = 0.0
    """Of the caches that arrived in the newest minute."""
    ratios: tuple[TableRatio, ...] = ()
    """Over the newest minute; tables without one are not among them."""
    early_ratios: tuple[TableRatio, ...] = ()
    """The same of tables that were not watched for long enough to judge: half a minute."""
    sample_age: float | None = None
    """Seconds that nine in ten samples of recent batches are younger than."""
    stale_after: float = float("inf")
    """Age from which samples are called old."""
    outdated: int = 0
    """Active actors whose model was no longer the newest one more than a minute ago."""
    expected_inference: int = 0
    inference: tuple[InferenceSigns, ...] = ()
    """Nodes that answer."""
    lags: tuple[TableFigure, ...] = ()
    """Of tables of rollouts without a `max_model_lag`: model versions between acting and learning."""
    feedback: tuple[float, float] | None = None
    """Seconds that TD errors wait for their actors, and in which the memories of these turn over."""
    stale: tuple[TableFigure, ...] = ()
    """Of tables of rollouts: entries whose model was too old, as a share of those that left in the newest minute."""
    only_rollouts: bool = False
    """Whether all tables store rollouts, which have no `samples_per_insert`."""


def verdicts(signs: VerdictInputs) -> list[Verdict]:
    """All findings, the worst first; the first one is the headline."""
    found = [*_nodes(signs), *_attendance(signs), *_actors(signs), *_flow(signs), *_quality(signs), *_room(signs)]
    order = {"bad": 0, "notice": 1, "good": 2}
    return sorted(found, key=lambda verdict: order[verdict.level])


def _nodes(signs: VerdictInputs) -> list[Verdict]:
    if signs.nodes and len(signs.nodes_down) == signs.nodes:
        text = "No node answers. Start the nodes, or correct the addresses of their pages (--http)."
        return [Verdict("bad", "no_node", text, "--http")]
    found = []
    if not signs.servers_up:
        text = (
            "No server answers: nothing is counted, and nothing can be drawn. Start one with `memoire server`, or "
            "name its pages (--http) to this dashboard."
        )
        found.append(Verdict("bad", "no_server", text, "memoire server"))
    if signs.nodes_down:
        does, it, its = _agree(len(signs.nodes_down), "does it its", "do them their")
        text = f"{_listed(signs.nodes_down)} {does} not answer. Start {it} again, or correct {its} address (--http)."
        found.append(Verdict("bad", "node_down", text, "--http"))
    if signs.unready:
        (be,) = _agree(len(signs.unready), "is", "are")
        text = f"{_listed(signs.unready)} {be} not ready for new clients: /readyz gives the reasons."
        found.append(Verdict("notice", "node_unready", text, "/readyz"))
    return found


def _attendance(signs: VerdictInputs) -> list[Verdict]:
    """Servers, proxies and inference nodes that should be there."""
    found = []
    for role, plural, up, expected in (
        ("server", "servers", signs.servers_up, signs.expected_servers),
        ("proxy", "proxies", signs.proxies_up, signs.expected_proxies),
        ("inference node", "inference nodes", len(signs.inference), signs.expected_inference),
    ):
        missing = expected - up
        if missing > 0 and not signs.finished:
            (be,), short = _agree(missing, "is", "are"), plural.split()[0]
            text = (
                f"{missing} of {expected} {plural if expected > 1 else role} {be} missing. Start what is missing, or "
                f"correct --expected-{short}."
            )
            is_bad = role == "server" or not up
            found.append(Verdict("bad" if is_bad else "notice", f"{short}_missing", text, f"--expected-{short}"))
    return found


def _actors(signs: VerdictInputs) -> list[Verdict]:
    if signs.finished:
        return [Verdict("good", "finished", "The run is over.")]
    found = [*_absent(signs)] if signs.servers_up else []
    if signs.idle:
        actors, be = _agree(signs.idle, "actor is", "actors are")
        text = (
            f"{signs.idle} {actors} {be} connected and recorded nothing yet. An environment may not start, or no model "
            "may come: `memoire logs` shows what actors report."
        )
        found.append(Verdict("notice", "actors_idle", text, "memoire logs"))
    if signs.silent:
        actors, its, it, counts = _agree(signs.silent, "actor its it counts", "actors their they count")
        server = f"If {its} server is away, start it again. Otherwise look" if signs.nodes_down else "Look"
        text = (
            f"{signs.silent} {actors} fell silent and did not report an end. {server} at {its} machine and network; "
            f"after --lost-after seconds {it} {counts} as lost."
        )
        found.append(Verdict("notice", "actors_silent", text, "--lost-after"))
    return found


def _absent(signs: VerdictInputs) -> list[Verdict]:
    """Actors that should be there."""
    missing = signs.expected - signs.active
    if signs.active:
        if missing <= 0:
            return []
        (be,) = _agree(missing, "is", "are")
        text = (
            f"{missing} of {signs.expected} actors {be} missing. Start what is missing, or correct --expected-actors."
        )
        return [Verdict("notice", "actors_missing", text, "--expected-actors")]
    if signs.silent or signs.lost:
        number = signs.silent + signs.lost
        ended = "the only one" if number == 1 else f"all {number}"
        text = (
            f"No actor is active: {ended} fell silent and did not report an end. Start actors again (memoire.connect)."
        )
        return [Verdict("bad", "no_actors", text, "memoire.connect")]
    if signs.gone:
        text = (
            f"No actor is active: {'the only one' if signs.gone == 1 else f'all {signs.gone}'} ended. Start others "
            "(memoire.connect), or end the run with finish()."
        )
        return [Verdict("notice", "actors_gone", text, "finish()")]
    text = "No actor has connected yet. Start one that calls memoire.connect with the address of a proxy or server."
    return [Verdict("notice", "waiting_for_actors", text, "memoire.connect")]


def _flow(signs: VerdictInputs) -> list[Verdict]:
    """What limits the run: who waits for whom. The line of figures if nobody does."""
    if signs.finished or not signs.active:
        return []
    asked = (_stopped, _held_back, _for_inference, _limited, _waiting, _behind, _settling, _balanced)
    return next(found for found in (each(signs) for each in asked) if found)


def _stopped(signs: VerdictInputs) -> list[Verdict]:
    if signs.is_still and signs.active > signs.idle and not signs.inserts_wait:
        many = signs.active - signs.idle
        text = (
            f"Nothing comes in: {'the active actor has' if many == 1 else f'{many} active actors have'} not recorded a "
            "step for a minute. An environment may hang, or no model may come: see `memoire logs`, then start the "
            "actors again."
        )
        return [Verdict("bad", "no_inserts", text, "memoire logs")]
    if signs.nothing_arrives:
        text = (
            "Actors record, but none of their caches has arrived for a minute. Open the port for caches (--beside) "
            "between actors and servers; `memoire doctor --roundtrip` tries it."
        )
        return [Verdict("bad", "no_caches", text, "--beside")]
    return []


def _held_back(signs: VerdictInputs) -> list[Verdict]:
    """Actors wait for the learner. Where rollouts are taken in turns, each side waits while the other works: there the
    learner's share says who limits the run, and not that a look came while it learned.
    """
    if not signs.inserts_wait or (signs.only_rollouts and _waits_much(signs)):
        return []
    knob = "capacity" if signs.only_rollouts else "samples_per_insert_tolerance"
    text = (
        f"Actors wait for the learner, as the limits of the table say ({_listed(signs.inserts_wait)}). A faster "
        f"learner, fewer actors or a larger {knob} lets them go on."
    )
    return [Verdict("notice", "inserts_limited", text, knob)]


def _for_inference(signs: VerdictInputs) -> list[Verdict]:
    """The learner waits for its actors, and these wait for inference."""
    if not _waits_much(signs):
        return []
    busy = max(signs.inference, key=lambda each: each.busy or 0.0, default=None)
    slow = max(signs.inference, key=lambda each: each.p99 or 0.0, default=None)
    if busy is not None and busy.busy is not None and busy.busy > MUCH_BUSY:
        why = (
            f"{busy.name} computes {busy.busy:.0%} of its time. More inference nodes, a larger max_batch or a GPU helps"
        )
    elif slow is not None and slow.p99 is not None and slow.p99 > SLOW_ANSWER:
        why = (
            f"one in a hundred answers of {slow.name} takes longer than {slow.p99:.2g} s. A smaller max_wait, a larger "
            "max_batch or a faster function helps"
        )
    else:
        return []
    text = f"The learner waits {signs.waiting_share:.0%} of its time, because actors wait for inference: {why}."
    return [Verdict("notice", "waits_for_inference", text, "max_batch")]


def _limited(signs: VerdictInputs) -> list[Verdict]:
    if not signs.draws_wait or not signs.waiting_share:
        return []
    waits = f"Learners wait for entries, as the limits of the table say ({_listed(signs.draws_wait)})."
    if signs.only_rollouts:
        text = f"{waits} More actors, or more environments for each (num_envs), let them go on."
        return [Verdict("notice", "draws_limited", text, "num_envs")]
    text = f"{waits} More actors, a smaller min_size or a larger samples_per_insert lets them go on."
    return [Verdict("notice", "draws_limited", text, "samples_per_insert")]


def _waits_much(signs: VerdictInputs) -> bool:
    return (signs.waiting_share or 0.0) > MUCH_WAITING


def _waiting(signs: VerdictInputs) -> list[Verdict]:
    if _waits_much(signs):
        waits = f"The learner waits for samples {signs.waiting_share:.0%} of its time: actors limit the run."
        if signs.only_rollouts:
            text = f"{waits} More actors, or more environments for each (num_envs), make it faster."
            return [Verdict("notice", "learner_waits", text, "num_envs")]
        text = f"{waits} More actors or a larger samples_per_insert make it faster."
        return [Verdict("notice", "learner_waits", text, "samples_per_insert")]
    if signs.skipped_share > MUCH_SKIPPED:
        text = (
            f"Actors skip {signs.skipped_share:.0%} of their caches, because there is no room on the way: the server "
            "or the network limits the run. More servers, a larger credit or compression (lz4) helps."
        )
        return [Verdict("notice", "actors_ahead", text, "credit")]
    if signs.is_idle or (signs.waiting_share is None and not signs.samples_per_second):
        text = "Nobody draws samples. Start a learner that calls get_batch of a memoire.Reader or memoire.Server."
        return [Verdict("notice", "no_learner", text, "get_batch")]
    return []


def _behind(signs: VerdictInputs) -> list[Verdict]:
    """The learner does not keep up with its actors."""
    worst = _worst(signs.ratios)
    if worst is None:
        return []
    text = (
        f"The learner does not keep up: it draws {worst.drawn:.2g} samples for each step, and samples_per_insert of "
        f"table {worst.table} asks for {worst.asked:g}. Make the learner faster, use fewer actors, lower "
        "samples_per_insert, or set samples_per_insert_tolerance: then actors wait for it."
    )
    return [Verdict("notice", "learner_behind", text, "samples_per_insert")]


def _settling(signs: VerdictInputs) -> list[Verdict]:
    """The learner draws too little so far, which may only be its start."""
    worst = _worst(signs.early_ratios)
    if worst is None:
        return []
    text = (
        f"It is too early to judge: so far the learner draws {worst.drawn:.2g} samples for each step, and "
        f"samples_per_insert of table {worst.table} asks for {worst.asked:g}."
    )
    return [Verdict("good", "settling", text)]


def _worst(ratios: tuple[TableRatio, ...]) -> TableRatio | None:
    """Of the tables from which far too little is drawn; None if there is none."""
    behind = [each for each in ratios if each.drawn < FAR_BEHIND * each.asked]
    return min(behind, key=lambda each: each.drawn / each.asked, default=None)


def _balanced(signs: VerdictInputs) -> list[Verdict]:
    come, go = f"{signs.steps_per_second:,.0f} steps/s come in", f"{signs.samples_per_second:,.0f} samples/s go out"
    waiting, skipped = signs.waiting_share or 0.0, signs.skipped_share
    waits = [f"the learner waits {waiting:.0%} of its time"] * (waiting > LITTLE)
    waits += [f"actors skip {skipped:.0%} of their caches"] * (skipped > LITTLE)
    return [Verdict("good", "balanced", f"{come}, {go}; {' and '.join(waits) or 'nobody waits'}.")]


def _quality(signs: VerdictInputs) -> list[Verdict]:
    """Whether what is learned from is what it should be."""
    if signs.finished or not signs.active:
        return []
    found = []
    if signs.left_out is not None and signs.left_out > MUCH_LEFT_OUT:
        text = (
            f"Draws leave out {signs.left_out:.0%} of all weight, because its actors had no unused sample. A larger "
            "samples_per_insert or smaller batches make draws whole again."
        )
        found.append(Verdict("notice", "left_out", text, "samples_per_insert"))
    if signs.sample_age is not None and signs.sample_age > signs.stale_after and not signs.is_idle:
        text = (
            f"Samples are old: one in ten was recorded more than {_duration(signs.sample_age)} before it was drawn. "
            "max_age keeps old ones out; if they are wanted, raise --stale-after."
        )
        found.append(Verdict("notice", "samples_old", text, "max_age"))
    if signs.outdated:
        (use,) = _agree(signs.outdated, "uses", "use")
        text = (
            f"{signs.outdated} of {signs.active} actors still {use} a model that was replaced more than a minute ago. "
            "Open the port for notices (--beside) between servers and actors; `memoire doctor` tries it."
        )
        found.append(Verdict("notice", "models_behind", text, "--beside"))
    found += [*_inference(signs), *_lag(signs)]
    if signs.feedback is not None and signs.feedback[0] > MUCH_OF_TURNOVER * signs.feedback[1]:
        delay, turnover = signs.feedback
        text = (
            f"TD errors come late: they reach their actors after {delay:.1f} s, and the actors' memories hold "
            f"{turnover:.1f} s of steps, so that many find their entry gone. Give actors a larger capacity, or store "
            "episodes, whose priorities the server sets itself."
        )
        found.append(Verdict("notice", "feedback_late", text, "capacity"))
    if signs.rejected_share > MUCH_REJECTED:
        text = (
            f"Servers reject {signs.rejected_share:.0%} of the caches that arrive. Bring their actors to the version "
            "and schema of the servers; the page of each actor has the reasons."
        )
        found.append(Verdict("notice", "caches_rejected", text, "schema"))
    return found


def _inference(signs: VerdictInputs) -> list[Verdict]:
    """Whether inference nodes answer, and with the newest model."""
    found = []
    outdated = tuple(each.name for each in signs.inference if each.is_outdated)
    if outdated:
        (use,) = _agree(len(outdated), "uses", "use")
        text = (
            f"{_listed(outdated)} still {use} a model that was replaced more than a minute ago. Its log says why; "
            "the address for models (connect) and the keys have to be right."
        )
        found.append(Verdict("notice", "inference_behind", text, "connect"))
    refusing = tuple(each.name for each in signs.inference if each.refused_per_second > MUCH_REFUSED)
    if refusing:
        (refuse, it) = _agree(len(refusing), "refuses it", "refuse them")
        text = (
            f"{_listed(refusing)} {refuse} requests: the page of {it} has the codes. If the code is busy, start more "
            "nodes or raise queue_rows; if it is failed, the log has the error."
        )
        found.append(Verdict("notice", "inference_refuses", text, "queue_rows"))
    return found


def _lag(signs: VerdictInputs) -> list[Verdict]:
    """Whether what is learned from was made by models that are too old."""
    found = []
    worst = max(signs.lags, key=lambda each: each.value, default=None)
    if worst is not None and worst.value > MUCH_LAG and not signs.is_idle:
        text = (
            f"The learner learns from what old models did: entries of table {worst.table} are {worst.value:.0f} "
            "versions behind. Set max_model_lag, lower capacity, or publish less often; vtrace corrects a few versions."
        )
        found.append(Verdict("notice", "lag", text, "max_model_lag"))
    stale = max(signs.stale, key=lambda each: each.value, default=None)
    if stale is not None and stale.value > MUCH_STALE:
        text = (
            f"{stale.value:.0%} of what arrives in table {stale.table} is skipped, because its model is too old. Fewer "
            "actors, shorter fragments (length), a smaller capacity or a larger max_model_lag helps."
        )
        found.append(Verdict("notice", "learner_skips_stale", text, "max_model_lag"))
    return found


def _room(signs: VerdictInputs) -> list[Verdict]:
    found = []
    if signs.disk_trouble:
        found.append(Verdict("bad", "disk_full", f"{signs.disk_trouble.rstrip('.')}.", "--state-dir"))
    elif signs.disk_used is not None and signs.disk_used > NEARLY_FULL:
        text = (
            f"The disk of a state folder is {signs.disk_used:.0%} full: if it is full, nothing is acknowledged. "
            "Enlarge the disk of --state-dir, or delete old snapshots there."
        )
        found.append(Verdict("bad", "disk_full", text, "--state-dir"))
    if signs.refused_per_second > 1.0:
        text = (
            f"{signs.refused_per_second:.0f} messages a second are refused. The page of each node has the reasons: "
            "bring their senders to the same version and schema."
        )
        found.append(Verdict("notice", "refused", text, "schema"))
    return found


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown + f" and {len(names) - 3} more" * (len(names) > 3)


def _agree(number: int, one: str, many: str) -> list[str]:
    """Words that agree with a number."""
    return (one if number == 1 else many).split()


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
