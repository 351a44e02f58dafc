"""Checks of a history against the promises. Each check returns its violations in words.

The counts that a client had acknowledged ("updated" with ok) are the least that the servers may hold of it; the counts
that it recorded before counting are the most. For a client that left with everything delivered, both are equal.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .players import STATS, Event

SLACK = 2.0
"""Seconds by which a call may exceed its timeout; more on a machine that is over four times slower than alone."""
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00,[0-9a-f]{8},([0-9a-f]{32}) (\d+)")


@dataclass
class Story:
    """Summary of one client's events."""

    client: str
    by: str
    done: tuple[int, int] = (0, 0)
    """Episodes and steps that the client began to count."""
    acked: tuple[int, int] = (0, 0)
    lines: int = 0
    """Number of the newest line that the client began to log."""
    acked_line: int = 0
    dropped: set[int] = field(default_factory=set)
    """Numbers of the lines that log() refused."""
    delivered: bool = False
    """True if the client closed, and the servers confirmed everything."""
    left: Event | None = None
    pushed_caches: int = 0
    pushed_after: int = 0
    """Calls of push_cache that returned True."""
    storage: str = "caches"
    """Storage of the table that the client records for."""
    amiss: int = 0
    """Caches, bytes and steps that its servers may lack: refused, lost, or dropped for lack of space."""

    def __str__(self) -> str:
        return f"client {self.client[:8]} ({self.by})"


@dataclass
class Kept:
    """Data of the servers at the end of a trial."""

    counted: dict[str, dict[str, dict[str, tuple[int, int]]]]
    """run -> server -> client -> (episodes, steps), in the servers' state folders; the newest run last."""
    accepted: dict[str, dict[str, int]]
    """server -> client -> caches that it accepted."""
    pushed: dict[str, tuple[int, int]]
    """client -> caches that the client pushed, by all servers' accounts, and those that were received or lost."""
    lines: dict[str, list[str]]
    """server -> lines of its log files, in order, those of an older run first."""
    reported: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """server -> client -> (episodes, steps) of the newest run, by the server's last report."""
    folded: dict[str, int] = field(default_factory=dict)
    """server -> accounts of that run that were folded into sums: its last report does not name their clients."""
    indexed: dict[str, list[str]] = field(default_factory=dict)
    """server -> lines in its index, in order."""


def stories(events: Iterable[Event]) -> dict[str, Story]:
    """Return each client's story; `events` are in the order of time."""
    histories: dict[str, Story] = {}
    for event in events:
        if "client" not in event:
            continue
        story = histories.setdefault(event["client"], Story(event["client"], event["by"]))
        match event["do"]:
            case "join":
                story.storage = event.get("storage", story.storage)
            case "count":
                story.done = event["episodes"], event["steps"]
            case "log":
                story.lines = event["number"]
            case "logged" if not event["ok"]:
                story.dropped.add(event["number"])
            case "updated" if event["ok"]:
                story.acked = event["episodes"], event["steps"]
                story.acked_line = event["lines"]
            case "push" if event["ok"]:
                story.pushed_after += 1
            case "stats":
                story.pushed_caches = event["pushed_caches"]
                story.amiss = sum(event["rejected"].values()) + event["lost_bytes"] + event["passed_steps"]
            case "left":
                story.left, story.delivered = event, event["delivered"]
                if event["delivered"]:
                    story.acked, story.acked_line = (event["episodes"], event["steps"]), event["lines"]
    return histories


def check(events: list[Event], kept: Kept) -> list[str]:
    histories = stories(events)
    return [
        *counts(histories, kept),
        *copies(kept),
        *totals(events, kept),
        *log(histories, kept),
        *caches(events, histories, kept),
        *rollouts(events, histories),
        *models(events, histories),
        *deadlines(events),
        *endings(events, histories),
    ]


def counts(histories: Mapping[str, Story], kept: Kept) -> Iterator[str]:
    """Check acknowledged <= merged over servers, added over runs <= begun; the counts are equal after delivery."""
    merged = merge(kept.counted)
    # A client that was killed while it joined may have recorded and counted nothing.
    for client in sorted(client for client in merged.keys() - histories.keys() if merged[client] != (0, 0)):
        yield f"counts: client {client[:8]} is counted {merged[client]} and never said so"
    for story in histories.values():
        held = merged.get(story.client, (0, 0))
        for name, least, have, most in zip(("episodes", "steps"), story.acked, held, story.done, strict=True):
            if not least <= have <= most:
                yield f"counts: {have} {name} of {story}; {least} were acknowledged, {most} begun"
            elif story.delivered and have != most:
                yield f"counts: {have} {name} of {story}, which left with {most} delivered"


def copies(kept: Kept) -> Iterator[str]:
    """Compare a server's last report with its disk, and its log files with its index."""
    newest = list(kept.counted.values())[-1]
    for server, report in kept.reported.items():
        have = newest.get(server, {})
        # A client that joined and counted nothing may have no account on disk.
        known = {client: facts for client, facts in report.items() if client in have or facts != (0, 0)}
        different = sorted(client for client in known.keys() | have.keys() if known.get(client) != have.get(client))
        unnamed = have.keys() - report.keys()
        if len(unnamed) == kept.folded.get(server, 0):
            different = [client for client in different if client not in unnamed]
        for client in different[:3]:
            yield (
                f"copies: {server} said {report.get(client)} of client {client[:8]}, and has {have.get(client)} on disk"
            )
    for server, index in kept.indexed.items():
        lines = kept.lines[server]
        if index != lines:
            place = next((place for place, (one, two) in enumerate(zip(index, lines, strict=False)) if one != two), -1)
            yield f"copies: {server} finds {len(index)} lines and has {len(lines)} in its files; they part at {place}"


def totals(events: Iterable[Event], kept: Kept) -> Iterator[str]:
    """Compare the totals that a reader received at the end with the servers' accounts."""
    for event in events:
        if event["do"] == "totals":
            rows = of_run(kept.counted.get(event["run"], {})).values()
            have = (sum(episodes for episodes, _ in rows), sum(steps for _, steps in rows))
            if (event["episodes"], event["steps"]) != have:
                answer = event["episodes"], event["steps"]
                yield f"totals: the servers have {have} of run {event['run']!r}, and {answer} was told"
            if event["missing"]:
                yield f"totals: {event['missing']} did not answer"


def of_run(servers: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return client -> (episodes, steps), each the greatest that any server has."""
    merged: dict[str, tuple[int, int]] = {}
    for clients in servers.values():
        for client, (episodes, steps) in clients.items():
            former = merged.get(client, (0, 0))
            merged[client] = max(former[0], episodes), max(former[1], steps)
    return merged


def merge(counted: Mapping[str, Mapping[str, Mapping[str, tuple[int, int]]]]) -> dict[str, tuple[int, int]]:
    """Return client -> (episodes, steps) over all runs."""
    merged: dict[str, tuple[int, int]] = {}
    for servers in counted.values():
        for client, (episodes, steps) in of_run(servers).items():
            former = merged.get(client, (0, 0))
            merged[client] = former[0] + episodes, former[1] + steps
    return merged


def log(histories: Mapping[str, Story], kept: Kept) -> Iterator[str]:
    """Check that each line is there once, was written and is in order, and that no acknowledged line is missing."""
    numbers_at: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for server, lines in kept.lines.items():
        for line in lines:
            match = LINE.fullmatch(line)
            if match is None:
                yield f"log: {server} has a line that no client wrote: {line[:120]!r}"
                continue
            numbers_at[match[1]][server].append(int(match[2]))
    for client in numbers_at.keys() - histories.keys():
        yield f"log: lines of client {client[:8]}, which never wrote one"
    for story in histories.values():
        numbers = [number for here in numbers_at[story.client].values() for number in here]
        doubled = [number for number, count in Counter(numbers).items() if count > 1]
        if doubled:
            yield f"log: {story}: lines {doubled[:5]} are there more than once"
        for server, here in numbers_at[story.client].items():
            if here != sorted(here):
                yield f"log: {story}: lines are out of order at {server}: {here[:20]}"
        there = set(numbers)
        unknown = {number for number in there if number > story.lines} | there & story.dropped
        if unknown:
            yield f"log: {story}: lines {sorted(unknown)[:5]} are there and were not written"
        through = story.lines if story.delivered else max([story.acked_line, *there])
        missing = set(range(1, through + 1)) - there - story.dropped
        if missing:
            of = f"{story.acked_line} were acknowledged, {story.lines} written"
            yield f"log: {story}: lines {sorted(missing)[:5]} are missing; {of}"


def caches(events: Iterable[Event], histories: Mapping[str, Story], kept: Kept) -> Iterator[str]:
    """Check that pushed = received + lost + in flight at all times, accepted <= pushed, and no sample is torn."""
    tags: dict[int, list[str]] = defaultdict(list)
    last: dict[str, Event] = {}
    for event in events:
        match event["do"]:
            case "join":
                tags[event["tag"]].append(event["client"])
            case "stats":
                former = last.get(event["client"], event)
                last[event["client"]] = event
                ends = [event[f"{end}_bytes"] for end in ("received", "lost", "in_flight")]
                if event["pushed_bytes"] != sum(ends) or min(ends) < 0:
                    yield f"caches: client {event['client'][:8]} does not add up: {_numbers(event)}"
                if event["accepted_caches"] < former["accepted_caches"] or ends[0] < former["received_bytes"]:
                    yield f"caches: client {event['client'][:8]} had more before: {_numbers(former)}, {_numbers(event)}"
                if event["accepted_caches"] + sum(event["rejected"].values()) > event["pushed_caches"]:
                    yield f"caches: client {event['client'][:8]} has more answered than pushed: {_numbers(event)}"
                if event["faults"]:
                    yield f"caches: client {event['client'][:8]} had {event['faults']} faults of its own"
            case "drew" if event.get("torn"):
                yield f"caches: {event['torn']} of {event['samples']} samples of a batch are torn"
            case "drew":
                for tag, number in event.get("newest", {}).items():
                    owners = tags[int(tag)]
                    if all(number >= histories[owner].done[1] for owner in owners):
                        yield f"caches: entry {number} of tag {tag} was drawn, but never recorded"
    for story in histories.values():
        has = kept.pushed.get(story.client, (0, 0))
        if story.delivered and has != (story.pushed_caches, story.pushed_caches):
            servers = f"the servers have {has[0]}, of which {has[1]} were received or are lost"
            yield f"caches: {story} left and has pushed {story.pushed_caches}; {servers}"
    for server, clients in kept.accepted.items():
        for client, accepted in clients.items():
            # The client may have been killed between the push and its record.
            if client in histories and accepted > max_pushed(histories[client]):
                pushed = histories[client].pushed_after
                yield f"caches: {server} accepted {accepted} of {histories[client]}, which pushed {pushed}"


def max_pushed(story: Story) -> int:
    """Return the most caches that a client may have pushed: one more than recorded; for rollouts one for each entry."""
    return story.pushed_after + 1 if story.storage == "caches" else story.done[1]


def rollouts(events: Iterable[Event], histories: Mapping[str, Story]) -> Iterator[str]:
    """Check that each entry is handed out once, whole, and was recorded. Servers hand entries out in order: if every
    server survived, no earlier accepted entry may be missing.
    """
    events = list(events)
    owners: dict[int, list[Story]] = defaultdict(list)
    taken: dict[int, Counter[int]] = defaultdict(Counter)
    for event in events:
        if event["do"] == "join" and event.get("storage") == "rollouts":
            owners[event["tag"]].append(histories[event["client"]])
        elif event["do"] == "took" and event["samples"]:
            if event["torn"]:
                yield f"rollouts: {event['torn']} of {event['samples']} entries that were taken are torn"
            for tag, numbers in event["entries"].items():
                taken[int(tag)].update(numbers)
    for tag, counts in taken.items():
        whose = owners[tag]
        doubled = sorted(number for number, count in counts.items() if count > max(1, len(whose)))
        if doubled:
            yield f"rollouts: entries {doubled[:5]} of tag {tag} were handed out more than once"
        if max(counts) >= max((story.done[1] for story in whose), default=0):
            yield f"rollouts: entry {max(counts)} of tag {tag} was taken, but never recorded"
    if any(event["do"] in ("killed", "ended") and event["target"].startswith("server") for event in _torment(events)):
        return  # a server that ends without a snapshot loses its entries
    for tag, counts in taken.items():
        missing = sorted(set(range(max(counts))) - counts.keys())
        if missing and len(owners[tag]) == 1 and owners[tag][0].delivered and not owners[tag][0].amiss:
            yield f"rollouts: entries {missing[:5]} of tag {tag} are lost: those up to {max(counts)} were taken"


def _torment(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events before the last repair of all processes."""
    for event in events:
        if event["do"] == "healed":
            return
        yield event


def _numbers(event: Event) -> str:
    return ", ".join(f"{name} {event[name]}" for name in STATS)


def models(events: Iterable[Event], histories: Mapping[str, Story]) -> Iterator[str]:
    """Check that a client sees only published models, never an older one after a newer, and at the end the last one."""
    published, seen = set[str](), dict[str, int]()
    last = None
    contents: dict[str, str] = {}
    for event in events:
        if event["do"] == "publish":
            published.add(f"{event['number']} last" if event["last"] else str(event["number"]))
            last = event["number"] if event["last"] else last
        elif event["do"] == "saw":
            number = int(event["content"].split()[0])
            if event["content"] not in published:
                yield f"models: client {event['client'][:8]} has {event['content']!r}, which was never published"
            if number < seen.get(event["client"], 0):
                before = seen[event["client"]]
                yield f"models: {histories[event['client']]} had model {before} and went back to {number}"
            seen[event["client"]] = number
            contents[event["client"]] = event["content"]
    for story in histories.values():
        if story.left and story.left["finished"] and last and "last" not in contents.get(story.client, ""):
            have = contents.get(story.client)
            yield f"models: {story} ended with model {have!r}; the last one is {last}"


def deadlines(events: Iterable[Event]) -> Iterator[str]:
    """Check that no call exceeded its timeout, apart from the time for which its process was stopped."""
    stopped: dict[str, list[tuple[float, float]]] = defaultdict(list)
    events = list(events)
    slack = SLACK
    for event in events:
        if event["do"] == "continued":
            stopped[event["target"]].append((event["since"], event["t"]))
        elif event["do"] == "measured":
            slack = max(slack, SLACK * event["slower"] / 4.0)
    for event in events:
        if "timeout" not in event:
            continue
        end = event["t"]
        began = end - event["took"]
        away = sum(max(0.0, min(end, until) - max(began, since)) for since, until in stopped[event["by"]])
        if event["took"] - away > event["timeout"] + slack:
            yield (
                f"deadlines: {event['do']} of {event['by']} took {event['took']:.1f} s "
                f"({away:.1f} s of it stopped); it was given {event['timeout']:g} s"
            )


def endings(events: Iterable[Event], histories: Mapping[str, Story]) -> Iterator[str]:
    """Check that no process failed, that all ended in time, and that clients that stayed to the end delivered."""
    for event in events:
        match event["do"]:
            case "failed":
                yield f"endings: {event['by']} failed: {event['error']}"
            case "ended" if event["status"] != 0 or event["took"] > event["grace"]:
                how = f"{event['status']} after {event['took']:.1f} s: {event['tail']}"
                yield f"endings: {event['target']} ended with {how}"
            case "died":
                yield f"endings: {event['target']} died by itself with {event['status']}: {event['tail']}"
            case "late":
                yield f"endings: {event['target']} {event['what']}"
    for story in histories.values():
        if story.left and story.left["finished"] and not story.delivered:
            yield f"endings: {story} stayed to the end and did not deliver: {story.left}"
