"""What holds a cluster up, in a sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "notice", "bad"]

MUCH_WAITING = 0.3
"""Share of its time that a learner waits, above which that is what holds the run up."""
MUCH_SKIPPED = 0.1
"""Share of the caches that clients could not push, above which actors are ahead."""
LITTLE = 0.02
"""Share of time or caches that is not worth a word."""
MUCH_LEFT_OUT = 0.2
"""Share of the weight that a draw had to leave out, above which batches are not what they should be."""
NEARLY_FULL = 0.95


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding."""

    level: Level
    code: str
    """For programs: the same whatever the figures."""
    text: str
    """What it is, and what to look at."""


@dataclass(frozen=True, slots=True)
class Signs:
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
    draws_wait: tuple[str, ...] = ()
    """Tables whose learners have to wait for entries, with the reason."""
    inserts_wait: tuple[str, ...] = ()
    """Tables whose actors have to wait for draws, with the reason."""
    is_idle: bool = False
    """Whether nobody has drawn for a minute."""
    left_out: float | None = None
    """Share of all weight that a recent draw could not draw from."""


def verdicts(signs: Signs) -> list[Verdict]:
    """All findings, the worst first; the first one is the headline."""
    found = [*_nodes(signs), *_actors(signs), *_flow(signs), *_bias(signs), *_room(signs)]
    order = {"bad": 0, "notice": 1, "good": 2}
    return sorted(found, key=lambda verdict: order[verdict.level])


def _nodes(signs: Signs) -> list[Verdict]:
    if signs.nodes and len(signs.nodes_down) == signs.nodes:
        return [Verdict("bad", "no_node", "No node answers. Are they running, and is their --http address right?")]
    found = []
    if not signs.servers_up:
        found.append(Verdict("bad", "no_server", "No server answers: nothing is counted, and nothing can be drawn."))
    if signs.nodes_down:
        found.append(Verdict("bad", "node_down", f"{_listed(signs.nodes_down)} does not answer."))
    if signs.unready:
        found.append(Verdict("notice", "node_unready", f"{_listed(signs.unready)} is not ready: see its reasons."))
    return found


def _actors(signs: Signs) -> list[Verdict]:
    if signs.finished:
        return [Verdict("good", "finished", "The run is over.")]
    found = []
    missing = signs.expected - signs.active
    if not signs.active and signs.servers_up:
        found.append(Verdict("bad", "no_actors", "No actor is active: nothing new comes in."))
    elif missing > 0:
        found.append(Verdict("notice", "actors_missing", f"{missing} of {signs.expected} actors are missing."))
    if signs.idle:
        text = f"{signs.idle} actor{'s are' if signs.idle != 1 else ' is'} connected and recorded nothing yet."
        found.append(Verdict("notice", "actors_idle", text))
    if signs.silent:
        text = f"{signs.silent} actor{'s' * (signs.silent != 1)} fell silent without saying goodbye."
        found.append(Verdict("notice", "actors_silent", text))
    return found


def _flow(signs: Signs) -> list[Verdict]:
    if signs.finished or not signs.active:
        return []
    if signs.inserts_wait:
        text = f"Actors are held back, as the limits of the table say ({_listed(signs.inserts_wait)})."
        return [Verdict("notice", "inserts_limited", text)]
    if signs.draws_wait and signs.waiting_share:
        text = f"Learners are held back, as the limits of the table say ({_listed(signs.draws_wait)})."
        return [Verdict("notice", "draws_limited", text)]
    if signs.waiting_share is not None and signs.waiting_share > MUCH_WAITING:
        text = (
            f"The learner waits for samples {signs.waiting_share:.0%} of its time: actors are what holds the run up. "
            "More actors, or more samples_per_insert, make it quicker."
        )
        return [Verdict("notice", "learner_waits", text)]
    if signs.skipped_share > MUCH_SKIPPED:
        text = (
            f"Actors skip {signs.skipped_share:.0%} of their caches for want of room: the server or the way to it is "
            "what holds the run up. More servers, a larger credit, or compression help."
        )
        return [Verdict("notice", "actors_ahead", text)]
    if signs.is_idle or (signs.waiting_share is None and not signs.samples_per_second):
        return [Verdict("notice", "no_learner", "Nobody draws samples: is a learner running?")]
    come, go = f"{signs.steps_per_second:,.0f} steps/s come in", f"{signs.samples_per_second:,.0f} samples/s go out"
    waiting, skipped = signs.waiting_share or 0.0, signs.skipped_share
    waits = [f"the learner waits {waiting:.0%} of its time"] * (waiting > LITTLE)
    waits += [f"actors skip {skipped:.0%} of their caches"] * (skipped > LITTLE)
    text = f"{come}, {go}; {' and '.join(waits) or 'nobody waits'}."
    return [Verdict("good", "balanced", text)]


def _bias(signs: Signs) -> list[Verdict]:
    if signs.finished or not signs.active or signs.left_out is None or signs.left_out <= MUCH_LEFT_OUT:
        return []
    text = (
        f"Draws leave out {signs.left_out:.0%} of all weight: its actors had no unused sample. More samples_per_insert "
        "or smaller batches make draws whole again."
    )
    return [Verdict("notice", "left_out", text)]


def _room(signs: Signs) -> list[Verdict]:
    found = []
    if signs.disk_used is not None and signs.disk_used > NEARLY_FULL:
        text = f"The disk of a state folder is {signs.disk_used:.0%} full: when it is full, nothing is acknowledged."
        found.append(Verdict("bad", "disk_full", text))
    if signs.refused_per_second > 1.0:
        text = f"{signs.refused_per_second:.0f} messages a second are refused: see the reasons at the nodes."
        found.append(Verdict("notice", "refused", text))
    return found


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown + f" and {len(names) - 3} more" * (len(names) > 3)
