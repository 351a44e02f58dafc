"""Cluster calls of a reader: configure, finish, begin_run, totals, snapshots. `Reader` inherits them.

Each call sends one request to each of some servers, all at once, and waits for the answers. The module does no I/O: the
reader's thread sends, and its monitor waits.
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

from .calls import RemoteNode
from .io import ANSWER_GRACE

_log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL = 0.1
"""Seconds between two requests for the state of a snapshot."""
_SHARED_FIELDS = "finished", "durable", "epoch", "time", "applied", "stale", "guests", "unfinished"
"""Fields of ACCOUNTS that `ServerAccounts` has under the same names."""
DISK_INTERVAL = 0.25
"""Seconds between two requests to a server whose disk is full."""


class ClusterOrders(RemoteNode):
    """Orders and questions to every server that a reader knows. Each call returns within its timeout. A server whose
    disk is full is asked again until the timeout; then the call raises or returns its `Refused` (code "disk").
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
        """Change parameters at every known server and, after their next message, at all clients. Takes the arguments of
        `Buffer.configure`; returns after the servers have the parameters.

        Args:
            discard_mismatched: Drop caches at the servers whose samples were made with other values, such as another
                discount. Without it a server that holds such caches refuses the parameters.

        Raises:
            MemoireTimeout: a server, named in the error, did not answer in time. The other servers have the change.
                Call again when the server is back: servers that are read together need the same parameters.
            Refused: a server refuses the parameters.
        """
        changes = _plain(changes_of(sampler, discount, fields))
        self._order(messages.Control(parameters=changes, discard_mismatched=discard_mismatched), timeout)

    def finish(self, timeout: float | None = None) -> None:
        """Finish the run at every server; return after all servers have confirmed.

        Waits up to `timeout` for servers that are away. If some stay away, a warning names them: their clients continue
        until the next call of `finish`.

        Raises:
            MemoireTimeout: no server answered in time.
        """
        self._monitor.check_open()
        deadline = self._monitor.now() + self._seconds(timeout)
        # The call waits for servers that are away: a proxy that has just started does not reach or know all servers,
        # and the clients of an unknown server would continue.
        # The request names no run: each server finishes the run that the server counts.
        end = messages.Control(finish=True)
        answers = self._control(end, deadline, None)
        is_met = self._monitor.wait(lambda: not self._directory.unanswered_addresses(), deadline - self._monitor.now())
        if is_met and self._directory.servers.keys() - answers.keys():
            answers = self._control(end, deadline, None)
        silent = [name for name, answer in answers.items() if isinstance(answer, MemoireTimeout)]
        for name, answer in answers.items():
            if len(silent) == len(answers) or name not in silent:
                _raise_error(name, answer)
        if missing := [*silent, *sorted(self._directory.unanswered_addresses())]:
            _log.warning(
                "the run is over, but these servers did not answer within %.1f s: %s. Their clients continue; "
                "call finish() again when the servers are back",
                self._seconds(timeout),
                ", ".join(map(repr, missing)),
            )

    def begin_run(self, name: str, timeout: float | None = None) -> None:
        """Begin a run at every server, or continue a former run of this name; see `Server.begin_run`. A new run starts
        at zero, a former run continues from its totals.

        Raises:
            MemoireTimeout: a server, named in the error, did not answer in time. Call again when it is back.
            Refused: `name` is not allowed as a name.
        """
        name = text("name", name)
        self._order(messages.Control(run=name), timeout)
        self._thread.worker.post(lambda: self._thread.enter_run(name_hash(name)))

    def totals(self, run: str | None = None, timeout: float | None = None) -> ClusterTotals:
        """Return the counts of all servers together; each client counts once, also if its home server changed.

        `missing` names servers that do not answer in time, and addresses of a proxy's list that have not answered since
        the start of the proxy. Exact for what clients have reported; they report twice a second.

        Args:
            run: Name of the experiment; None is the present run.

        Raises:
            MemoireTimeout: no server answered.
            Refused: the servers that answered do not know the run.
        """
        deadline = self._monitor.now() + self._seconds(timeout)
        replies = self.accounts(run, deadline - self._monitor.now())
        accounts = _accounts_of(replies)
        if not accounts:
            where = ", ".join(address.endpoint for address in self._directory.addresses)
            timed_out = MemoireTimeout("server", where, self._seconds(timeout), "No server has answered yet.")
            raise next((error for error in replies.values() if isinstance(error, MemoireError)), timed_out)
        # Servers learn of a new run one after another: the call takes the run that most servers count.
        names = Counter(answer.run for answer in accounts.values())
        chosen = max(names, key=lambda name: names[name])
        matching = [answer for answer in accounts.values() if answer.run == chosen]
        if len(names) > 1:  # the other servers may have counted the run before
            others = [name for name, answer in accounts.items() if answer.run != chosen]
            matching += _accounts_of(self.accounts(chosen, deadline - self._monitor.now(), others)).values()
        missing = {name for name, answer in replies.items() if isinstance(answer, MemoireTimeout)}
        return _cluster_totals(chosen, matching, accounts, missing | self._directory.unanswered_addresses())

    def accounts(
        self, run: str | None = None, timeout: float | None = None, servers: Sequence[str] | None = None
    ) -> dict[str, ServerAccounts | MemoireError]:
        """Return every server's accounts of a run, by the server's name; an error if a server sent none.

        Args:
            run: Name of the experiment; None is the run that each server counts now.
            servers: Names of the servers to ask; None asks all.
        """
        run = None if run is None else text("run", run)
        deadline = self._monitor.now() + self._seconds(timeout)
        results: dict[str, ServerAccounts | MemoireError] = {}
        pages: dict[str, list[Rows]] = {
            name: [] for name in ([*self._directory.servers] if servers is None else servers)
        }
        asked: dict[str, messages.Body] = {name: messages.LedgerRequest(run=run or "") for name in pages}
        while asked:  # a page of each server at a time
            answers, asked = self.ask(asked, deadline - self._monitor.now()), {}
            for name, answer in answers.items():
                if not isinstance(answer, messages.Accounts):
                    results[name] = answer if isinstance(answer, MemoireError) else self._unexpected(name, answer)
                    continue
                pages[name].append(unpack_accounts(answer.accounts))
                if answer.more and len(pages[name][-1]):
                    asked[name] = messages.LedgerRequest(run=answer.run_name, after=key_of(pages[name][-1][-1:]))
                else:
                    facts = {fact: getattr(answer, fact) for fact in _SHARED_FIELDS}
                    results[name] = ServerAccounts(
                        answer.run_name, merge(*pages[name]), runs=tuple(answer.runs), **facts
                    )
        return results

    def ask(
        self, bodies: Mapping[str, messages.Body], timeout: float | None = None
    ) -> dict[str, messages.Body | MemoireError]:
        """Send one request to each of some servers, by their names, all at once; return the answers or errors.

        Raises:
            ParameterError: no server has this name.
            Closed: the reader was closed.
        """
        deadline = self._monitor.now() + self._seconds(timeout)
        for name, body in mapping("bodies", bodies).items():
            if text("server", name) not in self._directory.servers:
                raise ParameterError("server", name, f"one of {', '.join(sorted(self._directory.servers))}")
            if not isinstance(body, messages.Body):
                raise WrongType("body", "a request of memoire.wire.messages", type(body).__name__)
        answers = self._gather(lambda: bodies, lambda _: None, deadline, 0)  # accounts of any run
        return {name: answer if isinstance(answer, MemoireError) else answer.body for name, answer in answers.items()}

    def snapshot(self, name: str, timeout: float | None = 600.0) -> dict[str, messages.SnapshotReply | MemoireError]:
        """Order a snapshot at every server, which writes `snapshots/NAME.snapshot` into its state folder. Returns
        each server's answer after its file is on disk, or an error if the file was not written.

        Args:
            name: Letters, digits, "_", "." and "-", at most 100. A file of this name is replaced.

        Raises:
            MemoireTimeout: an address has not answered, so that its server would not get the order; nothing was
                ordered.
        """
        self._monitor.check_open()
        deadline = self._monitor.now() + self._seconds(timeout)
        self._await_all(min(self._limits.request_timeout, self._seconds(timeout)))
        body = messages.TakeSnapshot(name=text("name", name), order=secrets.token_bytes(16))
        results: dict[str, messages.SnapshotReply | MemoireError] = {}
        asked = dict.fromkeys(self._directory.servers, body)
        while asked:
            remaining = deadline - self._monitor.now()
            for server, answer in self.ask(asked, min(self._limits.request_timeout, max(0.0, remaining))).items():
                if isinstance(answer, messages.SnapshotReply) and answer.state == "writing" and remaining > 0:
                    continue
                results[server] = _snapshot_of(server, answer, self._seconds(timeout))
                del asked[server]
            self._monitor.pause(SNAPSHOT_INTERVAL if asked else 0.0)
        return results

    def tell(self, name: str, body: messages.Body, timeout: float | None = None) -> messages.Taken:
        """Send one request to one server, which answers by TAKEN; return the answer.

        Raises:
            MemoireTimeout: the server did not answer in time.
            Refused: the server refuses the request.
        """
        answer = self.ask({name: body}, timeout)[name]
        if isinstance(answer, MemoireError):
            raise answer
        if not isinstance(answer, messages.Taken):
            raise self._unexpected(name, answer)
        return answer

    def _order(self, body: messages.Control, timeout: float | None) -> None:
        """Send an order to every server, whichever run it counts: servers behind one proxy may count several runs.

        Raises:
            MemoireTimeout: an address has not answered, so that nothing was ordered; or a server did not answer.
            Refused: a server refuses the order.
        """
        self._monitor.check_open()
        patience = self._seconds(timeout)
        deadline = self._monitor.now() + patience
        self._await_all(patience)
        for name, answer in self._control(body, deadline, 0).items():
            _raise_error(name, answer)

    def _await_all(self, patience: float) -> None:
        if not self._monitor.wait(lambda: not self._directory.unanswered_addresses(), patience):
            where = ", ".join(sorted(self._directory.unanswered_addresses()))
            advice = "No server answers there, so nothing was changed. Start the server, or remove its address."
            raise MemoireTimeout("server", where, patience, advice)

    def _control(self, body: messages.Control, deadline: float, run: int | None) -> dict[str, Answer]:
        """Send an order to all servers known at that time, away or not; return their answers."""

        def bodies_by_server() -> dict[str, messages.Body]:
            return dict.fromkeys(self._directory.servers, body)

        def process_answer(answer: Answer) -> None:
            self._directory.ask_soon()  # the next HELLO fetches the new state
            if isinstance(answer, Message) and isinstance(answer.body, messages.Taken):
                self._directory.is_finished = self._directory.is_finished or answer.body.finished

        return self._gather(bodies_by_server, process_answer, deadline, run)

    # Requests and waiting

    def _gather(
        self,
        bodies: Callable[[], Mapping[str, messages.Body]],
        heard: Callable[[Answer], None],
        deadline: float,
        run: int | None,
    ) -> dict[str, Answer]:
        """Send one request to each of some servers, by their names, all at once; return their answers. A server whose
        disk is full is asked again: it continues when there is room. At the deadline its refusal is its answer.

        Args:
            bodies: Returns the requests; called in the thread, since the known servers may change until then.
            heard: Called in the thread with each answer; under the lock.
            run: See `ReaderThread.ask`.
        """
        answers: dict[str, Answer] = {}
        full: set[str] = set()

        def begin(settle: Callable[[str, Answer], None]) -> Collection[str]:
            def finish_request(name: str, answer: Answer) -> None:
                with self._monitor.condition:
                    heard(answer)
                    settle(name, answer)

            requests = {name: body for name, body in bodies().items() if name in full or name not in answers}
            for name, body in requests.items():
                server = self._directory.servers.get(name)
                if server is None:
                    finish_request(name, ParameterError.with_text(f"Server {name!r} is no longer listed."))
                else:
                    self._thread.ask(server, body, functools.partial(finish_request, name), deadline, run=run)
            return requests

        while True:
            patience = deadline - self._monitor.now() + ANSWER_GRACE
            replies, is_whole = self._thread.gather(begin, patience)
            if not is_whole:
                raise self._thread.no_answer_error("answer", patience)
            for name, answer in replies.items():
                if not (name in full and isinstance(answer, MemoireTimeout)):  # a refusal stays
                    answers[name] = answer
            full = {name for name, each in answers.items() if isinstance(each, Refused) and each.code == "disk"}
            if not full or self._monitor.now() + DISK_INTERVAL >= deadline:
                return answers
            self._monitor.pause(DISK_INTERVAL)

    def _unexpected(self, name: str, answer: messages.Body | MemoireError) -> Refused:
        return Refused(self._directory.servers[name].address.endpoint, "unexpected", f"answered {answer}")


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in wire form: tuples and arrays become lists, and lists are copied.

    Raises:
        ParameterError: a value has no wire form; raised here, before the thread has the request.
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
    if isinstance(answer, MemoireTimeout):
        advice = f"{answer.advice} The other servers have the change; call again when {server!r} is back."
        raise MemoireTimeout(f"answer of server {server!r}", answer.endpoint, answer.seconds, advice)
    if isinstance(answer, MemoireError):
        raise answer


def _accounts_of(replies: Mapping[str, ServerAccounts | MemoireError]) -> dict[str, ServerAccounts]:
    return {name: answer for name, answer in replies.items() if isinstance(answer, ServerAccounts)}


def _cluster_totals(
    run: str, matching: Sequence[ServerAccounts], accounts: Mapping[str, ServerAccounts], missing: Iterable[str]
) -> ClusterTotals:
    """Return the totals of `run` from the accounts `matching` that count it; `accounts` are those of all servers."""
    totals = totals_of(merge(*(answer.rows for answer in matching)))
    applied = totals.applied + sum(answer.applied for answer in matching)
    stale = totals.stale + sum(answer.stale for answer in matching)
    return ClusterTotals(
        run=run,
        totals=replace(totals, applied=applied, stale=stale),
        finished=all(answer.finished for answer in matching),
        durable=all(answer.durable for answer in matching),
        runs=tuple(dict.fromkeys(name for answer in accounts.values() for name in answer.runs)),
        servers=tuple(sorted(accounts)),
        missing=tuple(sorted(missing)),
    )


def _snapshot_of(
    server: str, answer: messages.Body | MemoireError, timeout: float
) -> messages.SnapshotReply | MemoireError:
    if isinstance(answer, MemoireError):
        return answer
    if not isinstance(answer, messages.SnapshotReply):
        return Refused(server, "unexpected", f"answered {answer}")
    if answer.state == "writing":
        advice = "The server is still writing; `memoire snapshot --show FILE` reads the file after it is complete."
        return MemoireTimeout(f"snapshot {answer.name!r}", server, timeout, advice)
    return answer if answer.state == "done" else Refused(server, answer.state, answer.text)
