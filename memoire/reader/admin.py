"""What a learner or an operator orders and asks of all servers of a cluster: configure, finish, begin_run, totals,
snapshots. They are the calls of `Reader` that are about no batch.

Each call is one request to each of some servers, all at once, and then waits for the answers. It does no I/O of its
own: the reader's thread sends, and its monitor waits.
"""

from __future__ import annotations

import copy
import functools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from memoire.accounting.merge import ClusterTotals, Rows, ServerAccounts, key_of, merge, totals_of
from memoire.arguments import checked_names, mapping, seconds, text
from memoire.errors import MemoireError, MemoireTimeout, ParameterError, Refused, WrongType
from memoire.replay.parameters import NAMES
from memoire.replay.sampling import Sampler, changes_of
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, name_hash
from memoire.wire.rows import unpack_accounts

from .calls import FarNode
from .io import ANSWER_GRACE

_log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL = 0.1
"""Seconds between two questions how a snapshot stands."""
_SAID = "finished", "durable", "epoch", "time", "applied", "stale", "guests", "unfinished"
"""What ACCOUNTS says under the names that `ServerAccounts` has for it."""
DISK_INTERVAL = 0.25
"""Seconds between two questions to a server whose disk is full."""


class ClusterOrders(FarNode):
    """Orders to every server that a reader knows, and questions to them. Each call returns within its timeout. A server
    whose disk is full is asked again until then; its `Refused` (code "disk") is what the call raises or returns.
    """

    def _seconds(self, timeout: float | None) -> float:
        return seconds(timeout, self._limits.request_timeout)

    @checked_names(NAMES, called="Reader.configure")
    def configure(
        self,
        timeout: float | None = None,
        *,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        discard_mismatched: bool = False,
        **fields: Any,
    ) -> None:
        """Change parameters at every known server, and so at all clients; returns when the servers have them. Takes
        what `Buffer.configure` takes.

        Args:
            discard_mismatched: Have servers drop caches whose samples were made with other values, such as another
                discount. A server that holds such caches refuses these parameters without it.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. The others have the change: servers that are read
                together need the same parameters, so call again when it is back.
            Refused: a server does not take them.
        """
        changes = _plain(changes_of(sampler, discount, fields))
        self._order(messages.Control(parameters=changes, discard_mismatched=discard_mismatched), timeout)

    def finish(self, timeout: float | None = None) -> None:
        """Declare the run over at every server; returns when all of them know it.

        Servers that are away are waited for until `timeout`. If they are not back then, a warning names them: their
        clients work on until this is called again.

        Raises:
            MemoireTimeout: none of them answered in time.
        """
        self._monitor.check_open()
        deadline = self._monitor.now() + self._seconds(timeout)
        # Servers that are away are waited for, too: a proxy that has just started does not reach its servers yet, or
        # has not even met them, and their clients would work on.
        # Without a run's name: the end is of the run that each address counts.
        end = messages.Control(finish=True)
        answers = self._control(end, deadline, None)
        have_met = self._monitor.wait(lambda: not self._directory.unmet(), max(0.0, deadline - self._monitor.now()))
        if have_met and self._directory.servers.keys() - answers.keys():
            answers = self._control(end, deadline, None)
        silent = [name for name, answer in answers.items() if isinstance(answer, MemoireTimeout)]
        for name, answer in answers.items():
            if len(silent) == len(answers) or name not in silent:
                _raise_error(name, answer)
        if missing := [*silent, *sorted(self._directory.unmet())]:
            _log.warning(
                "the run is over, and these servers did not answer within %.1f s: %s. Their clients work on; "
                "call finish() again when they are back",
                self._seconds(timeout),
                ", ".join(map(repr, missing)),
            )

    def begin_run(self, name: str, timeout: float | None = None) -> None:
        """Have every server count in the run called `name` from now on; see `Server.begin_run`. A new run starts at
        zero. A former run goes on from its totals.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. Call again when it is back.
            Refused: `name` is not allowed as a name.
        """
        name = text("name", name)
        self._order(messages.Control(run=name), timeout)
        self._thread.worker.post(lambda: self._thread.enter(name_hash(name)))

    def totals(self, run: str | None = None, timeout: float | None = None) -> ClusterTotals:
        """What all servers together have counted, each client once, wherever it was at home.

        A server that does not answer in time is named in `missing`, and so is an address on a proxy's list where nobody
        has answered since the proxy began. Exact for what clients have told; they tell it twice a second.

        Args:
            run: Name of the experiment; None is the one that is counted now.

        Raises:
            MemoireTimeout: no server answered.
            Refused: the servers that answered know no such run.
        """
        deadline = self._monitor.now() + self._seconds(timeout)
        told = self.accounts(run, deadline - self._monitor.now())
        found = _found(told)
        if not found:
            where = ", ".join(address.endpoint for address in self._directory.addresses)
            nobody = MemoireTimeout("server", where, self._seconds(timeout), "None has answered yet.")
            raise next((error for error in told.values() if isinstance(error, MemoireError)), nobody)
        # Servers hear of a new run one after the other: the one that most of them count.
        names = Counter(answer.run for answer in found.values())
        chosen = max(names, key=lambda name: names[name])
        mine = [answer for answer in found.values() if answer.run == chosen]
        if len(names) > 1:  # the others may have counted it before
            others = [name for name, answer in found.items() if answer.run != chosen]
            mine += _found(self.accounts(chosen, deadline - self._monitor.now(), others)).values()
        missing = {name for name, answer in told.items() if isinstance(answer, MemoireTimeout)}
        return _cluster_totals(chosen, mine, found, missing | self._directory.unmet())

    def accounts(
        self, run: str | None = None, timeout: float | None = None, servers: Sequence[str] | None = None
    ) -> dict[str, ServerAccounts | MemoireError]:
        """Every server's accounts of a run, by its name, or why there are none.

        Args:
            run: Name of the experiment; None is the one that each server counts now.
            servers: Names of those to ask; None asks all.
        """
        run = None if run is None else text("run", run)
        deadline = self._monitor.now() + self._seconds(timeout)
        told: dict[str, ServerAccounts | MemoireError] = {}
        pages: dict[str, list[Rows]] = {
            name: [] for name in ([*self._directory.servers] if servers is None else servers)
        }
        asked: dict[str, messages.Body] = {name: messages.Ledger(run=run or "") for name in pages}
        while asked:  # a page of each server at a time
            answers, asked = self.ask(asked, deadline - self._monitor.now()), {}
            for name, answer in answers.items():
                if not isinstance(answer, messages.Accounts):
                    told[name] = answer if isinstance(answer, MemoireError) else self._unexpected(name, answer)
                    continue
                pages[name].append(unpack_accounts(answer.accounts))
                if answer.more and len(pages[name][-1]):
                    asked[name] = messages.Ledger(run=answer.run_name, after=key_of(pages[name][-1][-1:]))
                else:
                    facts = {fact: getattr(answer, fact) for fact in _SAID}
                    told[name] = ServerAccounts(answer.run_name, merge(*pages[name]), runs=tuple(answer.runs), **facts)
        return told

    def ask(
        self, bodies: Mapping[str, messages.Body], timeout: float | None = None
    ) -> dict[str, messages.Body | MemoireError]:
        """One request to each of some servers, by their names, all at once; the answers, or why there are none.

        Raises:
            ParameterError: a name is none of the servers'.
            Closed: the reader was closed.
        """
        deadline = self._monitor.now() + self._seconds(timeout)
        for name, body in mapping("bodies", bodies).items():
            if text("server", name) not in self._directory.servers:
                raise ParameterError("server", name, f"one of {', '.join(sorted(self._directory.servers))}")
            if not isinstance(body, messages.Body):
                raise WrongType("body", "one of wire's requests", type(body).__name__)
        answers = self._gather(lambda: bodies, lambda _: None, deadline, 0)  # whatever run it counts
        return {name: answer if isinstance(answer, MemoireError) else answer.body for name, answer in answers.items()}

    def snapshot(self, name: str, timeout: float | None = 600.0) -> dict[str, messages.Snapshot | MemoireError]:
        """Have every server write what it holds into its own state folder, as `snapshots/NAME.snapshot`, while it goes
        on; each server's answer when its file is on disk, or why it is not there.

        Args:
            name: Letters, digits, "_", "." and "-", at most 100. A file of this name is replaced.

        Raises:
            MemoireTimeout: an address leads to nobody, so that a server would not hear of it; nothing was ordered.
        """
        self._monitor.check_open()
        deadline = self._monitor.now() + self._seconds(timeout)
        self._await_all(min(self._limits.request_timeout, self._seconds(timeout)))
        body = messages.TakeSnapshot(name=text("name", name), order=secrets.token_bytes(16))
        told: dict[str, messages.Snapshot | MemoireError] = {}
        asked = dict.fromkeys(self._directory.servers, body)
        while asked:
            left = deadline - self._monitor.now()
            for server, answer in self.ask(asked, min(self._limits.request_timeout, max(0.0, left))).items():
                if isinstance(answer, messages.Snapshot) and answer.state == "writing" and left > 0:
                    continue
                told[server] = _snapshot_of(server, answer, self._seconds(timeout))
                del asked[server]
            self._monitor.pause(SNAPSHOT_INTERVAL if asked else 0.0)
        return told

    def tell(self, name: str, body: messages.Body, timeout: float | None = None) -> messages.Taken:
        """One request that is answered by TAKEN to one server.

        Raises:
            MemoireTimeout: it did not answer in time.
            Refused: it does not do it.
        """
        answer = self.ask({name: body}, timeout)[name]
        if isinstance(answer, MemoireError):
            raise answer
        if not isinstance(answer, messages.Taken):
            raise self._unexpected(name, answer)
        return answer

    def _order(self, body: messages.Control, timeout: float | None) -> None:
        """What every server has to take, whichever run it counts: behind one proxy they may count several.

        Raises:
            MemoireTimeout: an address leads to nobody, so that nothing was ordered; or a server did not answer.
            Refused: a server does not do it.
        """
        self._monitor.check_open()
        patience = self._seconds(timeout)
        deadline = self._monitor.now() + patience
        self._await_all(patience)
        for name, answer in self._control(body, deadline, 0).items():
            _raise_error(name, answer)

    def _await_all(self, patience: float) -> None:
        """Wait until somebody has answered at every address, those on proxies' lists too."""
        if not self._monitor.wait(lambda: not self._directory.unmet(), patience):
            where = ", ".join(sorted(self._directory.unmet()))
            advice = "A server there would not hear of it, so nothing was changed. Start it, or take it off the list."
            raise MemoireTimeout("server", where, patience, advice)

    def _control(self, body: messages.Control, deadline: float, run: int | None) -> dict[str, Answer]:
        """Tell all servers that are known inside of the thread, away or not; their answers."""

        def bodies() -> dict[str, messages.Body]:
            return dict.fromkeys(self._directory.servers, body)

        def heard(answer: Answer) -> None:
            self._directory.ask_soon()  # see what came of it
            if isinstance(answer, Message) and isinstance(answer.body, messages.Taken):
                self._directory.is_finished = self._directory.is_finished or answer.body.finished

        return self._gather(bodies, heard, deadline, run)

    # How a call asks and waits

    def _gather(
        self,
        bodies: Callable[[], Mapping[str, messages.Body]],
        heard: Callable[[Answer], None],
        deadline: float,
        run: int | None,
    ) -> dict[str, Answer]:
        """One request to each of some servers, by their names, all at once; their answers. A server whose disk is full
        is asked again: it goes on by itself when there is room. At the deadline its refusal is its answer.

        Args:
            bodies: Called inside of the thread: which servers are known may change until then.
            heard: Called inside of the thread with each answer; under the lock.
            run: See `ReaderThread.ask`.
        """
        answers: dict[str, Answer] = {}
        full: set[str] = set()

        def begin(settle: Callable[[str, Answer], None]) -> Collection[str]:
            def settled(name: str, answer: Answer) -> None:
                with self._monitor.changed:
                    heard(answer)
                    settle(name, answer)

            requests = {name: body for name, body in bodies().items() if name in full or name not in answers}
            for name, body in requests.items():
                server = self._directory.servers.get(name)
                if server is None:
                    settled(name, ParameterError("server", name, "a server that is still listed"))
                else:
                    self._thread.ask(server, body, functools.partial(settled, name), deadline, run=run)
            return requests

        while True:
            patience = deadline - self._monitor.now() + ANSWER_GRACE
            came, is_whole = self._thread.gather(begin, patience)
            if not is_whole:
                raise self._thread.silence("answer", patience)
            for name, answer in came.items():
                if not (name in full and isinstance(answer, MemoireTimeout)):  # it has said why
                    answers[name] = answer
            full = {name for name, each in answers.items() if isinstance(each, Refused) and each.code == "disk"}
            if not full or self._monitor.now() + DISK_INTERVAL >= deadline:
                return answers
            self._monitor.pause(DISK_INTERVAL)

    def _unexpected(self, name: str, answer: messages.Body | MemoireError) -> Refused:
        return Refused(self._directory.servers[name].address.endpoint, "unexpected", f"answered {answer}")


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as they travel: tuples and arrays become lists, and lists are copies.

    Raises:
        ParameterError: a value cannot travel; found out here, before the thread has the request.
    """
    return {name: _plain_value(name, value) for name, value in changes.items()}


def _plain_value(name: str, value: Any) -> Any:
    try:
        plain = np.asarray(value).tolist() if isinstance(value, (tuple, np.ndarray)) else copy.deepcopy(value)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ParameterError(name, value, "a number, a text, a bool, None, or a list or array of them") from None
    return plain


def _raise_error(server: str, answer: Answer) -> None:
    """Raise what ended an order to a server, if that is an error."""
    if isinstance(answer, MemoireTimeout):
        advice = f"{answer.advice} The other servers have the change; call again when {server!r} is back."
        raise MemoireTimeout(f"answer of server {server!r}", answer.endpoint, answer.seconds, advice)
    if isinstance(answer, MemoireError):
        raise answer


def _found(told: Mapping[str, ServerAccounts | MemoireError]) -> dict[str, ServerAccounts]:
    return {name: answer for name, answer in told.items() if isinstance(answer, ServerAccounts)}


def _cluster_totals(
    run: str, mine: Sequence[ServerAccounts], found: Mapping[str, ServerAccounts], missing: Iterable[str]
) -> ClusterTotals:
    """The totals of `run` out of the accounts that count it; `found` are all that came, each by its server."""
    totals = totals_of(merge(*(answer.rows for answer in mine)))
    applied = totals.applied + sum(answer.applied for answer in mine)
    stale = totals.stale + sum(answer.stale for answer in mine)
    return ClusterTotals(
        run=run,
        totals=replace(totals, applied=applied, stale=stale),
        finished=all(answer.finished for answer in mine),
        durable=all(answer.durable for answer in mine),
        runs=tuple(dict.fromkeys(name for answer in found.values() for name in answer.runs)),
        servers=tuple(sorted(found)),
        missing=tuple(sorted(missing)),
    )


def _snapshot_of(server: str, answer: messages.Body | MemoireError, timeout: float) -> messages.Snapshot | MemoireError:
    """What came of the order of a snapshot at a server."""
    if isinstance(answer, MemoireError):
        return answer
    if not isinstance(answer, messages.Snapshot):
        return Refused(server, "unexpected", f"answered {answer}")
    if answer.state == "writing":
        advice = "It goes on writing; `memoire snapshot --show FILE` reads the file when it is there."
        return MemoireTimeout(f"snapshot {answer.name!r}", server, timeout, advice)
    return answer if answer.state == "done" else Refused(server, answer.state, answer.text)
