"""Rules that must hold after each event and in each final state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .ends import HOMES, ClientFacts, RunRows, ServerFacts

Rows = tuple[tuple[str, int, RunRows], ...]


def broken(
    clients: Sequence[ClientFacts], servers: Sequence[ServerFacts], gone: Sequence[int], *, is_durable: bool
) -> str:
    """Return the first broken rule in words, or "" if all hold.

    Args:
        gone: Servers that were taken away. Only their logs remain.
    """
    there = [server for home, server in enumerate(servers) if home not in gone]
    for client, facts in enumerate(clients):
        for what in (*_counts(client, facts, there, is_durable), *_lines(client, facts, servers, is_durable)):
            return what
    for home, server in enumerate(servers):
        for what in () if home in gone else _accounts(clients, home, server):
            return what
    return ""


def _counts(client: int, facts: ClientFacts, servers: Sequence[ServerFacts], is_durable: bool) -> Iterator[str]:
    """Check acknowledged <= on disk, merged over servers and added over runs, and in memory <= begun."""
    held = merged([server.memory for server in servers], client)
    kept = merged([server.disk for server in servers], client)
    for name, least, safe, have in zip(("episodes", "steps"), facts.acked, kept, held, strict=True):
        if have > facts.begun:
            yield f"client {client} has begun {facts.begun} {name}, and {have} are counted"
        if is_durable and safe < least:
            yield f"client {client} was told that {least} {name} are safe, and {safe} are on disk"


def merged(tables: Sequence[Rows], client: int) -> tuple[int, int]:
    """Return a client's episodes and steps: the greatest counts of each run on any server, added up."""
    runs: dict[str, tuple[int, int]] = {}
    for rows in tables:
        for run, owner, counts in rows:
            if owner == client:
                former = runs.get(run, (0, 0))
                runs[run] = max(former[0], counts.episodes), max(former[1], counts.steps)
    return sum(episodes for episodes, _ in runs.values()), sum(steps for _, steps in runs.values())


def _lines(client: int, facts: ClientFacts, servers: Sequence[ServerFacts], is_durable: bool) -> Iterator[str]:
    """Check that each line is written once, in order at each server, and that no acknowledged line is missing."""
    everywhere = Counter(number for server in servers for owner, number in server.lines if owner == client)
    doubled = [number for number, count in everywhere.items() if count > 1]
    if doubled and is_durable:
        yield f"line {doubled[0]} of client {client} is written {everywhere[doubled[0]]} times"
    for home, server in enumerate(servers):
        here = [number for owner, number in server.lines if owner == client]
        if here != sorted(here):
            yield f"lines of client {client} are out of order at server {home}: {here}"
    missing = set(range(1, facts.acked_line + 1)) - everywhere.keys()
    if missing and is_durable:
        yield f"client {client} was told that line {min(missing)} is written, and it is nowhere"


def _accounts(clients: Sequence[ClientFacts], home: int, server: ServerFacts) -> Iterator[str]:
    """Check that no account counts more pushed caches than its client pushed."""
    for account in server.accounts:
        pushed = dict(clients[account.client].pushed).get((account.run, HOMES[home], account.since), 0)
        if account.pushed > pushed:
            yield (
                f"server {home} says that client {account.client} has pushed {account.pushed} caches to its account "
                f"there, and it has pushed {pushed}"
            )


def unsettled(
    clients: Sequence[ClientFacts], servers: Sequence[ServerFacts], gone: Sequence[int], *, has_losses: bool
) -> str:
    """Return the error of a state without pending messages and work, or "" if the state is right."""
    there = [server for home, server in enumerate(servers) if home not in gone]
    for client, facts in enumerate(clients):
        held = merged([server.memory for server in there], client)
        if facts.acked != (facts.begun, facts.begun):
            return f"client {client} has {facts.begun} episodes and steps, and stops at {facts.acked} acknowledged ones"
        if held != (facts.begun, facts.begun):
            return f"client {client} has {facts.begun} episodes and steps, and {held} are counted"
        if facts.acked_line != facts.begun:
            return f"client {client} stops with {facts.begun - facts.acked_line} lines that no server has"
        if facts.in_flight and not has_losses:
            return f"client {client} never hears of {facts.in_flight} caches"
        if HOMES.index(facts.home) in gone:
            return f"client {client} stays at a server that was taken away"
        if facts.epoch != servers[HOMES.index(facts.home)].epoch:
            return f"client {client} takes its home for the one that was killed"
        if facts.is_leaving and not facts.is_delivered:
            return f"client {client} leaves, and never hears that everything is delivered"
    return ""
