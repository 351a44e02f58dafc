"""Removal of a server from a cluster: its clients move to other servers, and another server keeps its accounts.

    1 drain     the server tells its clients in every reply to move, and takes no new clients
    2 wait      until each client has moved, left, or been silent for SILENCE_TIMEOUT
    3 copy      its accounts of every run to one other server, on disk if this one has a state folder
    4 compare   the accounts of the other server with the copy
    5 wait      until each of its prompts is answered, drawn and committed: prompts do not move

After step 5 the server may be stopped. Totals stay the same with and without the server, since accounts merge by
maximum. Every step may be repeated.
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

SETTLE_TIME = 1.0
"""Seconds of silence at the drained server, after which a client seen at another server has moved."""
POLL_INTERVAL = 0.5
MAX_DRAINED = 64
"""Server numbers from `keep` upwards whose names are looked up."""
LOOKUP_TIMEOUT = 20.0
"""Seconds to wait for a name server's answer."""


def drain(
    leaving: str, to: Sequence[str], *, timeout: float = 60.0, say: Callable[[str], object] = print, **options: Any
) -> int:
    """Drain the server at `leaving` into one of the servers at `to`, and return the number of copied accounts.

    Args:
        leaving: The server's own address.
        to: Addresses of servers that stay. The first one with a state folder, or else the first, gets the accounts.
        timeout: Seconds in all.
        say: Called with a line for each step.
        options: Options of the `Reader` that asks the servers.

    Raises:
        MemoireTimeout: a server did not answer, or clients did not leave in time; `drain` may be called again.
        ParameterError: `leaving` leads to several servers, `to` has no other server, or `leaving` has a state folder
            and no server at `to` has one.
    """
    deadline = time.monotonic() + timeout
    with Reader([leaving, *to], timeout=min(10.0, timeout), **options) as reader:
        name = _leaving_server(leaving, reader)
        others = _staying_servers(to, name, reader, say)
        accounts = _accounts(reader, [name, *others], deadline)
        heir = _choose_heir(name, accounts, others, to)
        reader.tell(name, messages.Control(drain=True), deadline - time.monotonic())
        say(f"{name} sends its clients to other servers")
        _await_clients(reader, name, others, deadline)
        copied = 0
        for run in accounts[name].runs:
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
    """Drain every server numbered `keep` or above into the servers below, before a StatefulSet is scaled down.

    A server exists if its name resolves to an address. Returns the number of drained servers.

    Args:
        template: Own address of a server, with {n} for its number: "tcp://server-{n}.servers.rl.svc:5560".
        keep: Number of servers that stay: numbers 0 to keep - 1.
        timeout: Seconds in all.
        known: Resolver of names; the process's own by default.

    Raises:
        ParameterError: `template` has no {n} in its host name, or `keep` is below 1.
        MemoireTimeout: no name server answered; also as `drain`.
    """
    host = template.removeprefix("tcp://").rpartition(":")[0]
    if "{n}" not in host:
        raise ParameterError("the servers to drain", template, "an address with {n} in its host name")
    deadline = time.monotonic() + timeout
    keep = whole("--keep", keep, 1)
    stay = [template.replace("{n}", str(number)) for number in range(keep)]
    numbers = range(keep, keep + MAX_DRAINED)
    existing = _resolvable({number: host.replace("{n}", str(number)) for number in numbers}, known, deadline)
    if not existing:
        say(f"no server is numbered {keep} or above: nothing is drained")
    for number in existing:
        remaining = deadline - time.monotonic()
        drain(template.replace("{n}", str(number)), stay, timeout=remaining, say=say, **options)
    return len(existing)


def _resolvable(hosts: dict[int, str], known: NameResolver | None, deadline: float) -> list[int]:
    """Return the numbers of the hosts whose names resolve to an address, ascending.

    Raises:
        MemoireTimeout: no name server answered.
    """
    results: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def put_result(number: int, result: LookupResult) -> None:
        results.put((number, bool(result.addresses)))

    for number, host in hosts.items():
        (known or shared_names()).ask(host, functools.partial(put_result, number))
    resolved = []
    for _ in hosts:
        try:
            number, has_address = results.get(timeout=max(0.0, min(LOOKUP_TIMEOUT, deadline - time.monotonic())))
        except queue.Empty:
            first_host = next(iter(hosts.values()))
            advice = "Nothing was drained. Try again when the name server answers."
            raise MemoireTimeout(f"address of {first_host}", "the name server", LOOKUP_TIMEOUT, advice) from None
        resolved += [number] * has_address
    return sorted(resolved)


def _leaving_server(url: str, reader: Reader) -> str:
    """Return the name of the server to drain; raise an error unless exactly one answers at `url`."""
    names = reader.servers_at(url)
    if len(names) > 1:
        raise ParameterError(
            "the server to drain", url, f"one server's own address (this one leads to {', '.join(names)})"
        )
    if not names:
        advice = (
            f"{reader.trouble_at(url)} Only a running server can hand over its accounts: start it again, then drain it."
        )
        raise MemoireTimeout("answer", url, LEFT_OUT_TIMEOUT, advice)
    return names[0]


def _staying_servers(to: Sequence[str], name: str, reader: Reader, say: Callable[[str], object]) -> list[str]:
    """Return the names of the servers at `to`, without `name`; raise MemoireTimeout if no address answers."""
    silent = [url for url in to if not reader.servers_at(url)]
    if len(silent) == len(to):
        advice = f"{reader.trouble_at(silent[0])} Nothing was drained: {name}'s accounts need a server that keeps them."
        raise MemoireTimeout("answer", ", ".join(silent), LEFT_OUT_TIMEOUT, advice)
    for url in silent:
        say(f"no server answers at {url}, so that it gets no accounts. {reader.trouble_at(url)}")
    return [other for url in to for other in reader.servers_at(url) if other != name]


def _accounts(
    reader: Reader, names: Sequence[str], deadline: float, run: str | None = None
) -> dict[str, ServerAccounts]:
    """Return each server's accounts by its name; raise the error of the first server that does not answer."""
    accounts = {}
    for name, answer in reader.accounts(run, deadline - time.monotonic(), names).items():
        if isinstance(answer, MemoireError):
            raise answer
        accounts[name] = answer
    return accounts


def _choose_heir(name: str, accounts: dict[str, ServerAccounts], others: Sequence[str], to: Sequence[str]) -> str:
    durable = [other for other in others if accounts[other].durable]
    if not others or (accounts[name].durable and not durable):
        expected = f"addresses of other servers, at least one with a state folder (--state-dir), since {name} has one"
        raise ParameterError("the servers that stay", list(to), expected if others else "another server's address")
    return (durable or list(others))[0]


def _await_clients(reader: Reader, name: str, others: Sequence[str], deadline: float) -> None:
    began = time.monotonic()
    clients: list[bytes] = []
    guests = 0  # clients without counts yet: each sends counts after the copy
    while True:
        try:
            accounts = _accounts(reader, [name, *others], deadline)
            clients = clients_here(accounts[name], name_hash(name), [accounts[other] for other in others])
            guests = accounts[name].guests
        except MemoireTimeout:
            if not (clients or guests):
                raise  # report the clients of the former poll, which says more than this timeout
        if not (clients or guests):
            return
        if time.monotonic() + POLL_INTERVAL >= deadline:
            ids = (
                [client.hex()[:8] for client in clients[:5]]
                + ["..."] * (len(clients) > 5)
                + ["new ones"] * (guests > 0)
            )
            advice = (
                f"{len(clients) + guests} clients have not left: {', '.join(ids)}. Clients that know only this "
                "server's address cannot move: end them, or give them a proxy's address. Then drain again."
            )
            raise MemoireTimeout("report that all clients have left", name, time.monotonic() - began, advice)
        time.sleep(POLL_INTERVAL)


def _await_unfinished(reader: Reader, name: str, deadline: float, say: Callable[[str], object]) -> None:
    """Wait until all prompts at `name` are answered, drawn and committed, and all keyed rows are cleared."""
    began, unfinished = time.monotonic(), _accounts(reader, [name], deadline)[name].unfinished
    if unfinished:
        say(f"{name} has {unfinished} prompts or rows that workers and trainers have yet to finish or clear")
    while unfinished:
        if time.monotonic() + POLL_INTERVAL >= deadline:
            advice = (
                f"{unfinished} remain: keep workers and trainers running, and drain again. Or take a snapshot of "
                f"{name} and restore it into the servers that stay (for memoire.tq: save a checkpoint and load it "
                f"there); then {name} may be stopped. Clients and counts have moved already."
            )
            raise MemoireTimeout(
                "report that all prompts and rows are finished", name, time.monotonic() - began, advice
            )
        time.sleep(POLL_INTERVAL)
        unfinished = _accounts(reader, [name], deadline)[name].unfinished


def clients_here(accounts: ServerAccounts, home: int, others: Sequence[ServerAccounts]) -> list[bytes]:
    """Return ids of clients still at home at the server of `accounts`: not gone, silent or moved to `others`."""
    elsewhere: dict[bytes, int] = {}
    for other in others:
        for row in other.rows[other.rows["last_seen"] > other.time - SILENCE_TIMEOUT]:
            elsewhere[row["client"].tobytes()] = int(row["steps"])
    quiet = accounts.time - accounts.rows["last_seen"]
    active = (accounts.rows["home"] == home) & (quiet < SILENCE_TIMEOUT) & (accounts.rows["flags"] & GONE == 0)
    remaining = []
    for row, seconds in zip(accounts.rows[active], quiet[active], strict=True):
        client = row["client"].tobytes()
        if seconds < SETTLE_TIME or elsewhere.get(client, -1) < int(row["steps"]):
            remaining.append(client)
    return remaining


def _copy(reader: Reader, name: str, heir: str, run: str, deadline: float) -> int:
    """Copy a run's accounts to the server `heir`, check that it has all of them, and return their number."""
    accounts = _accounts(reader, [name], deadline, run)[name]
    for begin in range(0, max(1, len(accounts.rows)), PAGE_ROWS):
        rows = accounts.rows[begin : begin + PAGE_ROWS].tobytes()
        body = messages.Inherit(run_name=run, finished=accounts.finished, accounts=rows)
        reader.tell(heir, body, deadline - time.monotonic())
    copied = _accounts(reader, [heir], deadline, run)[heir].rows
    if not _has_all(copied, accounts.rows):
        advice = f"{heir} lacks some of the copied accounts; drain again."
        raise MemoireTimeout(f"complete copy of the accounts of run {run!r}", heir, 0.0, advice)
    return len(accounts.rows)


def _has_all(rows: Rows, expected: Rows) -> bool:
    return bool(np.array_equal(merge(rows, expected), rows))
