"""Verdicts on a cluster: findings in a few sentences, with the setting or command that helps. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from memoire.dashboard.settings import Settings

from .answers import Actors, Overview, TableRow, Verdict

MUCH_WAITING = 0.3
"""Share of a learner's time spent waiting, above which actors limit the run."""
MUCH_SKIPPED = 0.1
"""Share of the caches that clients could not push, above which actors are ahead."""
LITTLE = 0.02
"""Share of time or caches, up to which a verdict does not mention waiting or skipping."""
MUCH_LEFT_OUT = 0.2
"""Share of the weight that a draw had to leave out, above which batches are not representative."""
NEARLY_FULL = 0.95
FAR_BEHIND = 0.5
"""Share of the samples that samples_per_insert asks for, below which a learner does not keep up."""
MUCH_REJECTED = 0.01
"""Share of rejected caches among the arrived ones, above which a verdict reports them."""
MUCH_BUSY = 0.9
"""Share of its time that an inference node computes, above which the node is overloaded."""
SLOW_ANSWER = 0.25
"""99th percentile of an inference node's answer time in seconds, above which actors wait for the node."""
MUCH_REFUSED = 0.1
"""Requests that an inference node refuses each second, above which a verdict reports the node."""
MUCH_LAG = 8.0
"""Mean number of model versions between acting and learning, above which rollouts are old."""
MUCH_OF_TURNOVER = 0.5
"""Share of the time for which actors hold an entry, above which TD errors come too late."""
MUCH_STALE = 0.1
"""Share of a table's entries skipped as too old, above which a verdict reports the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictInputs:
    """Facts from which verdicts are derived: an overview, and measurements that the overview lacks."""

    seen: Overview
    settings: Settings
    servers_up: int = 0
    disk_used: float | None = None
    """Used share of the fullest disk that holds a state folder; None if unknown."""
    disk_trouble: str = ""
    """Server that cannot write its state folder, and the reason; "" if all servers can."""
    is_idle: bool = False
    """True if no sample was drawn for a minute."""
    is_still: bool = False
    """True if no step was recorded for a minute."""
    nothing_arrives: bool = False
    """True if actors drew caches for a minute, but no cache arrived."""
    rejected_share: float = 0.0
    """Share of rejected caches among those that arrived in the newest minute."""
    early_ratios: Mapping[str, float] = field(default_factory=dict)
    """Samples drawn for each step, by table, for tables observed for at most half a minute, too short to judge."""
    feedback: tuple[float, float] | None = None
    """Seconds until TD errors reach their actors, and seconds in which the actors' memories turn over."""

    @property
    def is_training_active(self) -> bool:
        """True if actors are active in an unfinished run, so that verdicts on flow and quality apply."""
        return bool(self.seen.actors.active) and not self.seen.finished

    @property
    def only_rollouts(self) -> bool:
        """True if all tables hand out each entry once; these tables have no `samples_per_insert`."""
        return bool(self.seen.tables) and all(table.is_taken for table in self.seen.tables)

    @property
    def waits_much(self) -> bool:
        """True if the learner waits for more than `MUCH_WAITING` of its time."""
        return (self.seen.rates.waiting_share or 0.0) > MUCH_WAITING

    @property
    def tables_awaiting_draws(self) -> list[str]:
        """Tables whose actors have to wait for draws, with the reason."""
        return [f"{table.name}: {table.rate.inserts_wait}" for table in self.seen.tables if table.rate.inserts_wait]

    def nodes(self, state: str) -> list[str]:
        """Return the names of the nodes in this state."""
        return [node.name or node.url for node in self.seen.nodes if node.state == state]


def verdicts(facts: VerdictInputs) -> list[Verdict]:
    """Return all verdicts, worst first; the first verdict is the headline."""
    findings = [*_nodes(facts), *_missing_nodes(facts), *_actors(facts), *_flow(facts), *_quality(facts), *_room(facts)]
    order = {"bad": 0, "notice": 1, "good": 2}
    return sorted(findings, key=lambda verdict: order[verdict.level])


def _nodes(facts: VerdictInputs) -> Iterator[Verdict]:
    away, unready = facts.nodes("down"), facts.nodes("unready")
    if away and len(away) == len(facts.seen.nodes):
        text = "No node answers. Start the nodes, or correct the addresses of their pages (--http)."
        yield Verdict("bad", "no_node", text, "--http")
        return
    if not facts.servers_up:
        text = (
            "No server answers: no steps are counted, and no samples can be drawn. Start one with `memoire server`, or "
            "give this dashboard the address of its pages (--http)."
        )
        yield Verdict("bad", "no_server", text, "memoire server")
    if away:
        does, it, its = _agree(len(away), "does it its", "do them their")
        text = f"{_listed(away)} {does} not answer. Start {it} again, or correct {its} address (--http)."
        yield Verdict("bad", "node_down", text, "--http")
    if unready:
        (be,) = _agree(len(unready), "is", "are")
        text = f"{_listed(unready)} {be} not ready for new clients: /readyz has the reasons."
        yield Verdict("notice", "node_unready", text, "/readyz")


def _missing_nodes(facts: VerdictInputs) -> Iterator[Verdict]:
    """Yield verdicts on missing servers, proxies and inference nodes."""
    seen, settings = facts.seen, facts.settings
    proxies = sum(each.up for each in seen.roles if each.role == "proxy")
    for role, plural, up, expected in (
        ("server", "servers", facts.servers_up, settings.expected_servers),
        ("proxy", "proxies", proxies, settings.expected_proxies),
        ("inference node", "inference nodes", len(seen.inference), settings.expected_inference),
    ):
        missing = expected - up
        if missing > 0 and not seen.finished:
            (be,), short = _agree(missing, "is", "are"), plural.split()[0]
            text = (
                f"{missing} of {expected} {plural if expected > 1 else role} {be} missing. Start more, or "
                f"correct --expected-{short}."
            )
            is_bad = role == "server" or not up
            yield Verdict("bad" if is_bad else "notice", f"{short}_missing", text, f"--expected-{short}")


def _actors(facts: VerdictInputs) -> Iterator[Verdict]:
    actors = facts.seen.actors
    if facts.seen.finished:
        yield Verdict("good", "finished", "The run is over.")
        return
    if facts.servers_up:
        yield from _absent(actors)
    if actors.idle:
        words, be = _agree(actors.idle, "actor is", "actors are")
        text = (
            f"{actors.idle} {words} {be} connected, but recorded no step yet. An environment may not start, or no "
            "model may arrive: `memoire logs` shows the actors' log lines."
        )
        yield Verdict("notice", "actors_idle", text, "memoire logs")
    if actors.silent:
        words, its, it, counts = _agree(actors.silent, "actor its it counts", "actors their they count")
        server = f"If {its} server is away, start it again. Otherwise look" if facts.nodes("down") else "Look"
        text = (
            f"{actors.silent} {words} fell silent and did not report an end. {server} at {its} machine and network; "
            f"after --lost-after seconds {it} {counts} as lost."
        )
        yield Verdict("notice", "actors_silent", text, "--lost-after")


def _absent(actors: Actors) -> list[Verdict]:
    """Return the verdict on missing actors, if any."""
    missing = actors.expected - actors.active
    if actors.active:
        if missing <= 0:
            return []
        (be,) = _agree(missing, "is", "are")
        text = f"{missing} of {actors.expected} actors {be} missing. Start more, or correct --expected-actors."
        return [Verdict("notice", "actors_missing", text, "--expected-actors")]
    if actors.silent or actors.lost:
        number = actors.silent + actors.lost
        ended = "the only one" if number == 1 else f"all {number}"
        text = (
            f"No actor is active: {ended} fell silent and did not report an end. Start actors again (memoire.connect)."
        )
        return [Verdict("bad", "no_actors", text, "memoire.connect")]
    if actors.gone:
        text = (
            f"No actor is active: {'the only one' if actors.gone == 1 else f'all {actors.gone}'} ended. Start others "
            "(memoire.connect), or end the run with finish()."
        )
        return [Verdict("notice", "actors_gone", text, "finish()")]
    text = "No actor has connected yet. Start one that calls memoire.connect with the address of a proxy or server."
    return [Verdict("notice", "waiting_for_actors", text, "memoire.connect")]


def _flow(facts: VerdictInputs) -> list[Verdict]:
    """Return the first verdict on the flow of data that applies; `_balanced` always applies."""
    if not facts.is_training_active:
        return []
    checks = (_stopped, _held_back, _waits_for_inference, _limited, _waiting, _behind, _settling, _balanced)
    return next(findings for findings in (check(facts) for check in checks) if findings)


def _stopped(facts: VerdictInputs) -> list[Verdict]:
    number = facts.seen.actors.active - facts.seen.actors.idle
    if facts.is_still and number > 0 and not facts.tables_awaiting_draws:
        text = (
            f"No steps come in: {'the active actor has' if number == 1 else f'{number} active actors have'} recorded "
            "no step for a minute. An environment may hang, or no model may arrive: see `memoire logs`, then restart "
            "the actors."
        )
        return [Verdict("bad", "no_inserts", text, "memoire logs")]
    if facts.nothing_arrives:
        text = (
            "Actors record steps, but none of their caches has arrived for a minute. Open the port for caches "
            "(--beside) between actors and servers; `memoire doctor --roundtrip` tries it."
        )
        return [Verdict("bad", "no_caches", text, "--beside")]
    return []


def _held_back(facts: VerdictInputs) -> list[Verdict]:
    """Return a verdict if actors wait for the learner. With rollouts, learner and actors may take turns, so actors also
    wait in a run that actors limit; then the learner waits for a large share of its time.
    """
    if not facts.tables_awaiting_draws or (facts.only_rollouts and facts.waits_much):
        return []
    knob = "capacity" if facts.only_rollouts else "samples_per_insert_tolerance"
    text = (
        f"Actors wait for the learner, because of the limits of a table ({_listed(facts.tables_awaiting_draws)}). Use "
        f"a faster learner, fewer actors or a larger {knob}."
    )
    return [Verdict("notice", "inserts_limited", text, knob)]


def _waits_for_inference(facts: VerdictInputs) -> list[Verdict]:
    """Return a verdict if the learner waits for actors that wait for inference."""
    if not facts.waits_much:
        return []
    inference = facts.seen.inference
    busy = max(inference, key=lambda each: each.busy or 0.0, default=None)
    slow = max(inference, key=lambda each: each.p99 or 0.0, default=None)
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
    text = (
        f"The learner waits {facts.seen.rates.waiting_share:.0%} of its time, because actors wait for inference: {why}."
    )
    return [Verdict("notice", "waits_for_inference", text, "max_batch")]


def _limited(facts: VerdictInputs) -> list[Verdict]:
    draws_wait = [f"{table.name}: {table.rate.draws_wait}" for table in facts.seen.tables if table.rate.draws_wait]
    if not draws_wait or not facts.seen.rates.waiting_share:
        return []
    waits = f"Learners wait for entries, because of the limits of a table ({_listed(draws_wait)})."
    if facts.only_rollouts:
        text = f"{waits} More actors, or more environments for each (num_envs), let them go on."
        return [Verdict("notice", "draws_limited", text, "num_envs")]
    text = f"{waits} More actors, a smaller min_size or a larger samples_per_insert lets them go on."
    return [Verdict("notice", "draws_limited", text, "samples_per_insert")]


def _waiting(facts: VerdictInputs) -> list[Verdict]:
    if facts.waits_much:
        waits = f"The learner waits for samples {facts.seen.rates.waiting_share:.0%} of its time: actors limit the run."
        if facts.only_rollouts:
            text = f"{waits} More actors, or more environments for each (num_envs), make it faster."
            return [Verdict("notice", "learner_waits", text, "num_envs")]
        text = f"{waits} More actors or a larger samples_per_insert make it faster."
        return [Verdict("notice", "learner_waits", text, "samples_per_insert")]
    skipped = facts.seen.rates.skipped_share
    if skipped > MUCH_SKIPPED:
        text = (
            f"Actors skip {skipped:.0%} of their caches, because there is no room on the way: the server "
            "or the network limits the run. More servers, a larger credit or compression (lz4) helps."
        )
        return [Verdict("notice", "actors_ahead", text, "credit")]
    if facts.is_idle or (facts.seen.rates.waiting_share is None and not facts.seen.rates.samples):
        text = "No learner draws samples. Start one that calls get_batch of a memoire.Reader or memoire.Server."
        return [Verdict("notice", "no_learner", text, "get_batch")]
    return []


def _behind(facts: VerdictInputs) -> list[Verdict]:
    """Return a verdict if the learner does not keep up with its actors."""
    worst = _worst(facts.seen.tables, {table.name: table.samples_per_insert for table in facts.seen.tables})
    if worst is None:
        return []
    table, drawn = worst
    text = (
        f"The learner does not keep up: it draws {drawn:.2g} samples for each step, and samples_per_insert of "
        f"table {table.name} asks for {table.samples_per_insert_target:g}. Make the learner faster, use fewer actors, "
        "lower samples_per_insert, or set samples_per_insert_tolerance: then actors wait for it."
    )
    return [Verdict("notice", "learner_behind", text, "samples_per_insert")]


def _settling(facts: VerdictInputs) -> list[Verdict]:
    """Return a verdict if the learner draws too little so far, perhaps only because it has just started."""
    worst = _worst(facts.seen.tables, facts.early_ratios)
    if worst is None:
        return []
    table, drawn = worst
    text = (
        f"It is too early to judge: so far the learner draws {drawn:.2g} samples for each step, and "
        f"samples_per_insert of table {table.name} asks for {table.samples_per_insert_target:g}."
    )
    return [Verdict("good", "settling", text)]


def _worst(tables: Iterable[TableRow], drawn: Mapping[str, float | None]) -> tuple[TableRow, float] | None:
    """Return the table with the lowest share of the samples that it asks for, and its samples for each step; None if no
    table is below `FAR_BEHIND`.

    Args:
        drawn: Samples for each step, by table; None or no item if unknown.
    """
    known = [(table, ratio) for table in tables if (ratio := drawn.get(table.name)) is not None]
    behind = [each for each in known if each[1] < FAR_BEHIND * each[0].samples_per_insert_target]
    return min(behind, key=lambda each: each[1] / each[0].samples_per_insert_target, default=None)


def _balanced(facts: VerdictInputs) -> list[Verdict]:
    come, go = f"{facts.seen.rates.steps:,.0f} steps/s come in", f"{facts.seen.rates.samples:,.0f} samples/s go out"
    waiting, skipped = facts.seen.rates.waiting_share or 0.0, facts.seen.rates.skipped_share
    waits = [f"the learner waits {waiting:.0%} of its time"] * (waiting > LITTLE)
    waits += [f"actors skip {skipped:.0%} of their caches"] * (skipped > LITTLE)
    return [Verdict("good", "balanced", f"{come}, {go}; {' and '.join(waits) or 'neither side waits'}.")]


def _quality(facts: VerdictInputs) -> Iterator[Verdict]:
    """Yield verdicts on the samples that the learner learns from."""
    if not facts.is_training_active:
        return
    fresh, outdated = facts.seen.freshness, facts.seen.outdated
    if fresh.left_out is not None and fresh.left_out > MUCH_LEFT_OUT:
        text = (
            f"Draws leave out {fresh.left_out:.0%} of all weight, because some actors had no unused sample. Use a "
            "larger samples_per_insert or smaller batches."
        )
        yield Verdict("notice", "left_out", text, "samples_per_insert")
    if fresh.age_p90 is not None and fresh.age_p90 > facts.settings.stale_after and not facts.is_idle:
        text = (
            f"Samples are old: one in ten was recorded more than {_duration(fresh.age_p90)} before its draw. "
            "Set max_age to keep old samples out, or raise --stale-after if old samples are wanted."
        )
        yield Verdict("notice", "samples_old", text, "max_age")
    if outdated:
        (use,) = _agree(outdated, "uses", "use")
        text = (
            f"{outdated} of {facts.seen.actors.active} actors still {use} a model that was replaced more than a minute "
            "ago. Open the port for notices (--beside) between servers and actors; `memoire doctor` tries it."
        )
        yield Verdict("notice", "models_behind", text, "--beside")
    yield from _inference(facts)
    yield from _lag(facts)
    if facts.feedback is not None and facts.feedback[0] > MUCH_OF_TURNOVER * facts.feedback[1]:
        delay, turnover = facts.feedback
        text = (
            f"TD errors come late: they reach their actors after {delay:.1f} s, and the actors' memories hold "
            f"{turnover:.1f} s of steps: many entries are evicted by then. Give actors a larger capacity, or store "
            "episodes, whose priorities the server sets itself."
        )
        yield Verdict("notice", "feedback_late", text, "capacity")
    if facts.rejected_share > MUCH_REJECTED:
        text = (
            f"Servers reject {facts.rejected_share:.0%} of the caches that arrive. Bring their actors to the version "
            "and schema of the servers; the page of each actor shows the reasons."
        )
        yield Verdict("notice", "caches_rejected", text, "schema")


def _inference(facts: VerdictInputs) -> Iterator[Verdict]:
    """Yield verdicts on inference nodes that use old models or refuse requests."""
    outdated = [each.name for each in facts.seen.inference if each.is_outdated]
    if outdated:
        (use,) = _agree(len(outdated), "uses", "use")
        text = (
            f"{_listed(outdated)} still {use} a model that was replaced more than a minute ago. The log has the "
            "reason; check the address for models (connect) and the keys."
        )
        yield Verdict("notice", "inference_behind", text, "connect")
    refusing = [each.name for each in facts.seen.inference if each.refused_per_second > MUCH_REFUSED]
    if refusing:
        refuse, page = _agree(len(refusing), "refuses page", "refuse pages")
        text = (
            f"{_listed(refusing)} {refuse} requests: see the codes on the node {page}. If the code is busy, start more "
            "nodes or raise queue_rows; if it is failed, the log has the error."
        )
        yield Verdict("notice", "inference_refuses", text, "queue_rows")


def _lag(facts: VerdictInputs) -> Iterator[Verdict]:
    """Yield verdicts on learning from entries of models that are too old."""
    taken = [table for table in facts.seen.tables if table.is_taken]
    free = [table for table in taken if table.max_model_lag is None]
    worst = max(free, key=lambda table: table.lag_mean or 0.0, default=None)
    if worst is not None and (worst.lag_mean or 0.0) > MUCH_LAG and not facts.is_idle:
        text = (
            f"The learner learns from actions of old models: entries of table {worst.name} are {worst.lag_mean:.0f} "
            "versions behind. Set max_model_lag, lower capacity, or publish less often; vtrace corrects a few versions."
        )
        yield Verdict("notice", "lag", text, "max_model_lag")
    stale = max(taken, key=lambda table: table.stale_share or 0.0, default=None)
    if stale is not None and (stale.stale_share or 0.0) > MUCH_STALE:
        text = (
            f"{stale.stale_share:.0%} of the entries of table {stale.name} are skipped, because their models are too "
            "old. Use fewer actors, shorter fragments (length), a smaller capacity or a larger max_model_lag."
        )
        yield Verdict("notice", "learner_skips_stale", text, "max_model_lag")


def _room(facts: VerdictInputs) -> Iterator[Verdict]:
    if facts.disk_trouble:
        yield Verdict("bad", "disk_full", f"{facts.disk_trouble.rstrip('.')}.", "--state-dir")
    elif facts.disk_used is not None and facts.disk_used > NEARLY_FULL:
        text = (
            f"The disk of a state folder is {facts.disk_used:.0%} full: a server with a full disk acknowledges no "
            "data. Enlarge the disk of --state-dir, or delete old snapshots there."
        )
        yield Verdict("bad", "disk_full", text, "--state-dir")
    if facts.seen.rates.refused > 1.0:
        text = (
            f"{facts.seen.rates.refused:.0f} messages a second are refused. The page of each node shows the reasons: "
            "bring their senders to the same version and schema."
        )
        yield Verdict("notice", "refused", text, "schema")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown + f" and {len(names) - 3} more" * (len(names) > 3)


def _agree(number: int, one: str, many: str) -> list[str]:
    """Return the words of `one` or `many` that agree with a number."""
    return (one if number == 1 else many).split()


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
