"""Take a server out of a cluster: its clients go elsewhere, and another server keeps what it has counted.

    1 drain     the server says in every reply that its clients are to go elsewhere, and takes no new ones
    2 wait      until each client was heard elsewhere, said goodbye, or has been silent for too long to come again
    3 copy      its accounts of every run to one other server, which has them on disk if it has a disk
    4 compare   what that server says it has with what was copied
    5 wait      until each prompt that it has was answered, drawn and committed: these are not moved

Then it may be stopped: totals are the same whether it is still there or not, since accounts merge by maximum. Every
step may be done again.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memoire.accounting.ledger import SILENCE_TIMEOUT
from memoire.accounting.merge import GONE, PAGE_ROWS, Rows, ServerAccounts, merge
from memoire.arguments import whole
from memoire.errors import MemoireError, MemoireTimeout, ParameterError
from memoire.net.addresses import LookupResult, NameResolver, shared_names
from memoire.reader.reader import Reader
from memoire.tables.calls import LEFT_OUT_TIMEOUT
from memoire.wire import messages
from memoire.wire.frames import name_hash

SETTLED = 1.0
"""Seconds without a word at the server that is drained, after which a client that was heard elsewhere has moved."""
POLL_INTERVAL = 0.5
MAX_BEYOND = 64
"""Numbers above those that stay at which a server is looked for."""
LOOKUP_TIMEOUT = 20.0
"""Seconds that a name server may be silent."""


def drain(
    leaving: str, to: Sequence[str], *, timeout: float = 60.0, say: Callable[[str], object] = print, **options: Any
) -> int:
    """Drain the server at `leaving`, to one of those at `to`; how many accounts were copied.

    Args:
        leaving: The server's own address.
        to: Addresses of servers that stay. The first one with a state folder, or the first, gets the accounts.
        timeout: Seconds in all.
        say: Takes a line for each step.
        options: Of the `Reader` that asks them.

    Raises:
        MemoireTimeout: somebody did not answer, or clients were still there; what is missing can be done again.
        ParameterError: an address leads to no one server, or nobody at `to` keeps what `leaving` has on disk.
    """
    deadline = time.monotonic() + timeout
    with Reader([leaving, *to], timeout=min(10.0, timeout), **options) as reader:
        name = _only(leaving, reader)
        others = _staying(to, name, reader, say)
        told = _accounts(reader, [name, *others], deadline)
        heir = _heir(name, told, others, to)
        reader.tell(name, messages.Control(drain=True), deadline - time.monotonic())
        say(f"{name} sends its clients elsewhere")
        _await_clients(reader, name, others, deadline)
        copied = 0
        for run in told[name].runs:
            rows = _copy(reader, name, heir, run, deadline)
            copied += rows
            say(f"{heir} has the {rows} accounts of run {run!r}")
        _await_unfinished(reader, name, deadline, say)
        say(f"{name} may be stopped, and taken off its proxies' lists")
        return copied


def drain_above(
    template: str,
    keep: int,
    *,
    timeout: float = 60.0,
    say: Callable[[str], object] = print,
    known: NameResolver | None = None,
    **options: Any,
) -> int:
    """Before a StatefulSet is made smaller, drain every server with the number `keep` or above to those with numbers
    below. Returns how many servers were drained. A server is there if its name has an address.

    Args:
        template: Own address of a server, with {n} for its number: "tcp://server-{n}.servers.rl.svc:5560".
        keep: Servers that stay: those numbered 0 to keep - 1.
        timeout: Seconds in all.
        known: Look-ups of names; the process's own by default.

    Raises:
        ParameterError: the address has no {n} in a host name, or nobody would stay.
        MemoireTimeout: see `drain`.
    """
    host = template.removeprefix("tcp://").rpartition(":")[0]
    if "{n}" not in host:
        raise ParameterError("the servers to drain", template, "an address with {n} in its host name")
    deadline = time.monotonic() + timeout
    keep = whole("--keep", keep, 1)
    stay = [template.replace("{n}", str(number)) for number in range(keep)]
    numbers = range(keep, keep + MAX_BEYOND)
    there = _with_address({number: host.replace("{n}", str(number)) for number in numbers}, known, deadline)
    if not there:
        say(f"no server is numbered {keep} or above: nothing is drained")
    for number in there:
        left = deadline - time.monotonic()
        drain(template.replace("{n}", str(number)), stay, timeout=left, say=say, **options)
    return len(there)


def _with_address(hosts: dict[int, str], known: NameResolver | None, deadline: float) -> list[int]:
    """Numbers of those hosts whose name has an address, ascending.

    Raises:
        MemoireTimeout: no name server answered.
    """
    found: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def note(number: int, said: LookupResult) -> None:
        found.put((number, bool(said.addresses)))

    for number, host in hosts.items():
        (known or shared_names()).ask(host, functools.partial(note, number))
    there = []
    for _ in hosts:
        try:
            number, is_there = found.get(timeout=max(0.0, min(LOOKUP_TIMEOUT, deadline - time.monotonic())))
        except queue.Empty:
            some = next(iter(hosts.values()))
            advice = "Nothing was drained. Try again when names are found."
            raise MemoireTimeout(f"address of {some}", "the name server", LOOKUP_TIMEOUT, advice) from None
        there += [number] * is_there
    return sorted(there)


def _only(url: str, reader: Reader) -> str:
    """The name of the server that leaves."""
    names = reader.servers_at(url)
    if len(names) > 1:
        raise ParameterError(
            "the server to drain", url, f"the own address of one server; it leads to {', '.join(names)}"
        )
    if not names:
        advice = (
            f"{reader.trouble_at(url)} Only a server that runs can hand on what it has: start it again, then drain it."
        )
        raise MemoireTimeout("answer of the server that leaves", url, LEFT_OUT_TIMEOUT, advice)
    return names[0]


def _staying(to: Sequence[str], name: str, reader: Reader, say: Callable[[str], object]) -> list[str]:
    """Names of the servers that stay; it is enough that one of their addresses answers."""
    silent = [url for url in to if not reader.servers_at(url)]
    if len(silent) == len(to):
        advice = f"{reader.trouble_at(silent[0])} Nothing was drained: somebody has to keep what {name} has counted."
        raise MemoireTimeout("answer of a server that stays", ", ".join(silent), LEFT_OUT_TIMEOUT, advice)
    for url in silent:
        say(f"nobody answers at {url}, so it gets nothing. {reader.trouble_at(url)}")
    return [other for url in to for other in reader.servers_at(url) if other != name]


def _accounts(
    reader: Reader, names: Sequence[str], deadline: float, run: str | None = None
) -> dict[str, ServerAccounts]:
    """What each of these servers has; all of them have to answer."""
    found = {}
    for name, answer in reader.accounts(run, deadline - time.monotonic(), names).items():
        if isinstance(answer, MemoireError):
            raise answer
        found[name] = answer
    return found


def _heir(name: str, told: dict[str, ServerAccounts], others: Sequence[str], to: Sequence[str]) -> str:
    durable = [other for other in others if told[other].durable]
    if not others or (told[name].durable and not durable):
        expected = f"addresses of other servers, one with a state folder as {name} has, where its accounts stay on disk"
        raise ParameterError("the servers that stay", list(to), expected if others else "another server's address")
    return (durable or list(others))[0]


def _await_clients(reader: Reader, name: str, others: Sequence[str], deadline: float) -> None:
    """Wait until nobody is at home there any more."""
    began = time.monotonic()
    here: list[bytes] = []
    guests = 0  # they have counted nothing, and would count it after the copy
    while True:
        try:
            told = _accounts(reader, [name, *others], deadline)
            here = clients_here(told[name], name_hash(name), [told[other] for other in others])
            guests = told[name].guests
        except MemoireTimeout:
            if not (here or guests):
                raise  # else the time was over in the middle of a look: what the one before it saw says more
        if not (here or guests):
            return
        if time.monotonic() + POLL_INTERVAL >= deadline:
            some = [client.hex()[:8] for client in here[:5]] + ["..."] * (len(here) > 5) + ["new ones"] * (guests > 0)
            advice = (
                f"{len(here) + guests} are still there: {', '.join(some)}. Clients that know only this server's "
                "address cannot go elsewhere: end them, or give them a proxy's address. Then drain again."
            )
            raise MemoireTimeout(f"clients to leave {name}", name, time.monotonic() - began, advice)
        time.sleep(POLL_INTERVAL)


def _await_unfinished(reader: Reader, name: str, deadline: float, say: Callable[[str], object]) -> None:
    """Wait until no prompt there is left to be answered, drawn or committed, and no row by key to be cleared."""
    began, left = time.monotonic(), _accounts(reader, [name], deadline)[name].unfinished
    if left:
        say(f"{name} has {left} prompts or rows that workers and trainers have yet to finish or clear")
    while left:
        if time.monotonic() + POLL_INTERVAL >= deadline:
            advice = (
                f"{left} are left: let workers and trainers go on, and drain again. Or take a snapshot of {name} and "
                "restore it into the servers that stay (of memoire.tq, save a checkpoint and load it there); then it "
                "may be stopped. Clients and counts have moved already."
            )
            raise MemoireTimeout(f"prompts and rows of {name} to be finished", name, time.monotonic() - began, advice)
        time.sleep(POLL_INTERVAL)
        left = _accounts(reader, [name], deadline)[name].unfinished


def clients_here(mine: ServerAccounts, home: int, others: Sequence[ServerAccounts]) -> list[bytes]:
    """Ids of the clients that are still at home at a server, which says `mine`; `others` say who is with them."""
    elsewhere: dict[bytes, int] = {}
    for other in others:
        for row in other.rows[other.rows["last_seen"] > other.time - SILENCE_TIMEOUT]:
            elsewhere[row["client"].tobytes()] = int(row["steps"])
    quiet = mine.time - mine.rows["last_seen"]
    active = (mine.rows["home"] == home) & (quiet < SILENCE_TIMEOUT) & (mine.rows["flags"] & GONE == 0)
    here = []
    for row, seconds in zip(mine.rows[active], quiet[active], strict=True):
        client = row["client"].tobytes()
        if seconds < SETTLED or elsewhere.get(client, -1) < int(row["steps"]):
            here.append(client)
    return here


def _copy(reader: Reader, name: str, heir: str, run: str, deadline: float) -> int:
    """Bring the accounts of a run to another server, and see that it has them."""
    mine = _accounts(reader, [name], deadline, run)[name]
    for begin in range(0, max(1, len(mine.rows)), PAGE_ROWS):
        rows = mine.rows[begin : begin + PAGE_ROWS].tobytes()
        body = messages.Inherit(run_name=run, finished=mine.finished, accounts=rows)
        reader.tell(heir, body, deadline - time.monotonic())
    theirs = _accounts(reader, [heir], deadline, run)[heir].rows
    if not _has_all(theirs, mine.rows):
        raise MemoireTimeout(f"accounts of run {run!r}", heir, 0.0, f"{heir} does not have all of them; drain again.")
    return len(mine.rows)


def _has_all(theirs: Rows, mine: Rows) -> bool:
    return bool(np.array_equal(merge(theirs, mine), theirs))
