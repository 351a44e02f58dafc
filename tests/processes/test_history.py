"""Nothing is lost and nothing is counted twice while processes die: trials with real processes, and their checks.

The long form (50 clients, three servers, more than twenty kills) is tests/soak/history.py.
"""

import copy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from history import checks, trial
from history.checks import Kept
from history.record import Event, Recorder, read
from history.schedule import faults

TARGETS = ["server-0", "server-1", "proxy-0", "actor-0", "actor-1", "actor-2"]
COUNTS = {"kill": 9, "stop": 3}

# ------------------------------------------------------------------------------------------------- the schedule


def test_a_seed_gives_the_same_faults_every_time() -> None:
    assert faults(7, 60, TARGETS, COUNTS) == faults(7, 60, TARGETS, COUNTS)
    assert faults(7, 60, TARGETS, COUNTS) != faults(8, 60, TARGETS, COUNTS)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_process_is_killed_and_nobody_twice_at_once(seed: int) -> None:
    made = faults(seed, 60, TARGETS, COUNTS)
    assert Counter(fault.kind for fault in made) == COUNTS
    killed = Counter(fault.target.partition("-")[0] for fault in made if fault.kind == "kill")
    assert set(killed) == {"server", "proxy", "actor"}
    for target in TARGETS:
        mine = [fault for fault in made if fault.target == target]
        assert all(one.until < other.at for one, other in zip(mine, mine[1:], strict=False))


# --------------------------------------------------------------------------------------------------- the checks

ONE, TWO = "1" * 32, "2" * 32


def event(at: float, do: str, client: str | None = None, by: str = "actor-0", **facts: Any) -> Event:
    return {"t": at, "by": by, "do": do, **({"client": client} if client else {}), **facts}


def updated(at: float, client: str, *, episodes: int, steps: int, lines: int, **facts: Any) -> Event:
    return event(
        at,
        "updated",
        client,
        episodes=episodes,
        steps=steps,
        lines=lines,
        **{"ok": True, "took": 0.1, "timeout": 1.0} | facts,
    )


def logged(server: str, *lines: tuple[str, int]) -> list[str]:
    return [f"2026-01-31T12:00:00.000000+00:00,0000abcd,{client} {number}" for client, number in lines]


def stats(at: float, client: str, **facts: Any) -> Event:
    numbers = {"pushed_caches": 2, "accepted_caches": 1, "pushed": 20, "received": 10, "lost": 4, "in_flight": 6}
    return event(at, "stats", client, **{**numbers, "rejected": {}, "faults": 0, **facts})


def well() -> tuple[list[Event], Kept]:
    """A client that stayed to the end, and one that was killed; all as it should be."""
    events = [
        event(0.0, "started", by="nemesis", target="actor-0", life=1),
        event(1.0, "join", ONE, took=0.1, home="server-0", tag=5),
        event(1.1, "join", TWO, by="actor-1", took=0.1, home="server-1", tag=6),
        event(1.2, "publish", by="learner-0", number=1, last=False),
        event(2.0, "count", ONE, episodes=1, steps=10),
        event(2.1, "count", TWO, by="actor-1", episodes=1, steps=7),
        event(2.2, "log", ONE, number=1),
        event(2.3, "logged", ONE, number=1, ok=True, took=0.0, timeout=1.0),
        event(2.4, "saw", ONE, content="1", version=1),
        event(2.5, "push", ONE, ok=True, reason="", took=0.0, timeout=0.2),
        stats(2.6, ONE),
        updated(2.7, ONE, episodes=1, steps=10, lines=1),
        event(2.8, "drew", by="learner-0", samples=3, torn=0, newest={"5": 9}),
        event(3.0, "count", ONE, episodes=2, steps=15),
        event(3.1, "log", ONE, number=2),
        event(3.2, "logged", ONE, number=2, ok=True, took=0.0, timeout=1.0),
        event(3.3, "count", TWO, by="actor-1", episodes=2, steps=9),
        event(3.4, "killed", by="nemesis", target="actor-1", life=1),
        event(4.0, "publish", by="learner-0", number=2, last=True),
        event(4.1, "saw", ONE, content="2 last", version=2),
        event(4.2, "left", ONE, delivered=True, finished=True, took=0.1, episodes=2, steps=15, lines=2),
        event(4.5, "healed", by="nemesis"),
        event(5.0, "ended", by="nemesis", target="server-0", life=1, status=0, took=0.4, grace=10.0, tail=[]),
    ]
    lines = {"server-0": logged("server-0", (ONE, 1), (ONE, 2)), "server-1": []}
    earlier = {"server-0": {ONE: (1, 10), TWO: (0, 0)}, "server-1": {TWO: (1, 7), ONE: (1, 10)}}
    counted = {"server-0": {ONE: (1, 5), TWO: (0, 0)}}  # the second one was silent for long
    kept = Kept(
        {"earlier": earlier, "now": counted},
        {"server-0": {ONE: 1}},
        {ONE: (2, 2)},
        lines,
        said={"server-0": {ONE: (1, 5)}},
        folded={"server-0": 1},
        found=copy.deepcopy(lines),
    )
    return events, kept


def test_a_history_in_order_passes_every_check() -> None:
    events, kept = well()
    assert checks.check(events, kept) == []


def counted(client: str, episodes: int, steps: int) -> Any:
    def change(events: list[Event], kept: Kept) -> None:
        for servers in kept.counted.values():
            for clients in servers.values():
                clients.pop(client, None)
        kept.said.clear()
        kept.counted["now"]["server-1"] = {client: (episodes, steps)}

    return change


def said(do: str, **facts: Any) -> Any:
    """Change the first event of this kind."""

    def change(events: list[Event], kept: Kept) -> None:
        next(event for event in events if event["do"] == do).update(facts)

    return change


def wrote(*lines: tuple[str, int] | str) -> Any:
    def change(events: list[Event], kept: Kept) -> None:
        kept.found.clear()
        kept.lines["server-0"] = [line if isinstance(line, str) else logged("server-0", line)[0] for line in lines]

    return change


def added(*more: Event) -> Any:
    def change(events: list[Event], kept: Kept) -> None:
        events.extend(more)
        events.sort(key=lambda event: event["t"])

    return change


def accepted(count: int) -> Any:
    def change(events: list[Event], kept: Kept) -> None:
        kept.accepted["server-0"][ONE] = count

    return change


def rollouts_of(*numbers: int, torn: int = 0) -> Any:
    """Client ONE records rollouts, pushes them all, and these of its entries are handed out."""

    def change(events: list[Event], kept: Kept) -> None:
        kept.pushed[ONE] = (2, 2)
        next(event for event in events if event["do"] == "join")["storage"] = "rollouts"
        next(event for event in events if event["do"] == "stats")["lost"] = 0
        next(event for event in events if event["do"] == "stats")["received"] = 14
        took = event(2.9, "took", by="learner-0", samples=len(numbers), torn=torn, entries={"5": list(numbers)})
        added(took)(events, kept)

    return change


def pushed(*counts: int) -> Any:
    def change(events: list[Event], kept: Kept) -> None:
        kept.pushed[ONE] = counts  # type: ignore[assignment]

    return change


def put(name: str, value: Any) -> Any:
    """Change what server-0 has."""

    def change(events: list[Event], kept: Kept) -> None:
        getattr(kept, name)["server-0"] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (counted(ONE, 1, 15), "counts: 1 episodes of client 11111111 (actor-0); 2 were acknowledged, 2 begun"),
        (counted(ONE, 2, 16), "counts: 16 steps of client 11111111 (actor-0); 15 were acknowledged, 15 begun"),
        (counted(TWO, 3, 9), "counts: 3 episodes of client 22222222 (actor-1); 0 were acknowledged, 2 begun"),
        (put("said", {ONE: (1, 4)}), "server-0 said (1, 4) of client 11111111, and has (1, 5) on disk"),
        (put("said", {}), "server-0 said None of client 11111111, and has (1, 5) on disk"),
        (put("folded", 0), "server-0 said None of client 22222222, and has (0, 0) on disk"),
        (
            added(event(4.9, "totals", by="nemesis", run="earlier", episodes=2, steps=18, missing=[])),
            "totals: the servers have (2, 17) of run 'earlier', and (2, 18) was told",
        ),
        (
            added(event(4.9, "totals", by="nemesis", run="now", episodes=1, steps=5, missing=["server-1"])),
            "totals: ['server-1'] did not answer",
        ),
        (put("found", logged("server-0", (ONE, 1))), "server-0 finds 1 lines and has 2 in its files; they part at -1"),
        (counted("3" * 32, 1, 1), "counts: client 33333333 is counted (1, 1) and never said so"),
        (wrote((ONE, 1)), "lines [2] are missing; those up to 2 were acknowledged, 2 written"),
        (wrote((ONE, 1), (ONE, 2), (ONE, 1)), "lines [1] are there more than once"),
        (wrote((ONE, 2), (ONE, 1)), "lines are out of order at server-0: [2, 1]"),
        (wrote((ONE, 1), (ONE, 2), (ONE, 3)), "lines [3] are there and were not written"),
        (wrote((ONE, 1), (ONE, 2), "garbage"), "server-0 has a line that nobody wrote: 'garbage'"),
        (wrote((ONE, 1), (ONE, 2), ("4" * 32, 1)), "lines of client 44444444, which never wrote one"),
        (said("logged", ok=False), "lines [1] are there and were not written"),
        (said("stats", in_flight=5), "does not add up: pushed_caches 2"),
        (said("stats", accepted_caches=3), "has more answered than pushed"),
        (said("stats", faults=1), "had 1 faults of its own"),
        (added(stats(2.65, ONE, accepted_caches=0)), "had more before"),
        (said("drew", torn=2), "2 of 3 samples of a batch are torn"),
        (said("drew", newest={"5": 15}), "entry 15 of tag 5 was drawn, and nobody recorded it"),
        (accepted(3), "server-0 accepted 3 of client 11111111, which pushed 1"),
        (rollouts_of(0, 1, 2, 2), "entries [2] of tag 5 were handed out more than once"),
        (rollouts_of(0, 1, 3), "entries [2] of tag 5 are lost: those up to 3 were taken"),
        (rollouts_of(0, 15), "entry 15 of tag 5 was taken, and nobody recorded it"),
        (rollouts_of(0, torn=1), "1 of 1 entries that were taken are torn"),
        (pushed(1, 1), "client 11111111 left and has pushed 2; the servers have 1, of which 1 were received or are lost"),
        (pushed(2, 1), "client 11111111 left and has pushed 2; the servers have 2, of which 1 were received or are lost"),
        (said("saw", content="7"), "has '7', which nobody published"),
        (added(event(4.15, "saw", ONE, content="1", version=1)), "had model 2 and went back to 1"),
        (said("publish", number=3, last=True), "has '1', which nobody published"),
        (
            added(event(5.1, "left", TWO, by="actor-1", delivered=True, finished=True, took=0.1, episodes=2, steps=9, lines=0)),
            "ended with model None; the last one is 2",
        ),
        (said("push", took=2.3), "deadlines: push of actor-0 took 2.3 s (0.0 s of it stopped); it was given 0.2 s"),
        (said("ended", status=-9), "endings: server-0 ended with -9"),
        (said("ended", took=10.1), "ended with 0 after 10.1 s"),
        (said("left", delivered=False), "stayed to the end and did not deliver"),
        (added(event(2.0, "died", by="nemesis", target="proxy-0", status=1, tail=["words"])), "proxy-0 died by itself"),
        (added(event(2.0, "failed", error="Boom()")), "actor-0 failed: Boom()"),
        (added(event(6.0, "late", by="nemesis", target="actor-0", what="did not leave")), "actor-0 did not leave"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_found(change: Any, words: str) -> None:
    events, kept = copy.deepcopy(well())
    change(events, kept)
    assert any(words in violation for violation in checks.check(events, kept)), checks.check(events, kept)


def test_the_time_for_which_a_process_was_stopped_is_not_held_against_it() -> None:
    events, kept = well()
    late = updated(10.0, ONE, episodes=1, steps=10, lines=1, took=5.0, ok=False)
    events.insert(11, late)
    assert any("took 5.0 s (0.0 s" in violation for violation in checks.check(events, kept))
    events.append(event(9.0, "continued", by="nemesis", target="actor-0", since=6.0))
    assert checks.check(events, kept) == []


def test_a_history_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path / "a.jsonl", "a"), Recorder(tmp_path / "b.jsonl", "b")
    began = time.monotonic()
    second("one", number=1)
    first("two")
    second("three", text="ä\n")
    assert [event["do"] for event in read(tmp_path)] == ["one", "two", "three"]
    assert read(tmp_path)[0] == {"t": pytest.approx(began, abs=5.0), "by": "b", "do": "one", "number": 1}


# --------------------------------------------------------------------------------------------------- the trials


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_while_processes_are_killed(tmp_path: Path) -> None:
    """With real processes, signals and disks; simulated trials have the other faults, storages and plants."""
    outcome = trial.run(trial.Settings(seed=1, seconds=6, kills=3, stops=1, terms=1, runs=2), tmp_path)
    print(outcome)
    assert not outcome.violations, outcome
    assert sum(outcome.figures["killed"].values()) == 3
    assert outcome.figures["delivered"] >= 12
    assert outcome.figures["caches_accepted"] > 0 < outcome.figures["samples_drawn"]
