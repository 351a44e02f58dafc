"""All calls of those who use a table of prompts: givers, workers, listeners and trainers.

  giver ──add──▶                        ──lease, answer──  worker
                   Table(storage="prompts")
trainer ◀─draw──                        ──list, amend────  reward model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from memoire import Schema
from memoire.building import Given, checked_names, finite, mapping, model_version, one_of, seconds, text, whole
from memoire.errors import EpochOver, ParameterError, WrongType
from memoire.kinds import DEFAULT_TIMEOUT, Context, FarCalls, Request, Transport
from memoire.limits import Limits

from . import messages
from .columns import gathered, mask_of, places_of
from .rows import Key, PromptState
from .servers import PromptServers, keys_of
from .trainer import PromptTrainer, Step, fetched
from .worker import Lease, PromptWorker

MAX_RANKS = 65_536
"""Ranks that one trainer can have."""


class TableCalls:
    """A table of prompts, as one process uses it.

    Args:
        rank: Which trainer of how many.
        timeout: Seconds that a call takes at most if it is given no other number.
        session: See `memoire.Prompts`.
    """

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        self._timeout = timeout
        self._transport = transport
        self._servers = PromptServers(transport)
        self._worker = PromptWorker(self._servers)
        self._trainer = PromptTrainer(self._servers, rank, session)

    @property
    def schema(self) -> Schema:
        """The columns of an answer, as the servers say."""
        return self._transport.table(self._deadline(None))[1]

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._transport.table(self._deadline(None))[0]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that are known."""
        return tuple(self._servers.names)

    def _deadline(self, timeout: float | None) -> float:
        return self._transport.now() + seconds(timeout, self._timeout)

    def _patience(self, timeout: float | None) -> float:
        patience = seconds(timeout, self._timeout)
        self._transport.table(self._transport.now() + patience)
        return patience


def checked_dataset(name: Any) -> str:
    """The name of a data set. Raises ParameterError."""
    if not isinstance(name, str) or len(name) > 200:
        raise ParameterError("dataset", name, "a text of at most 200 characters")
    return text("dataset", name)


def checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Words by name. Raises WrongType, ParameterError."""
    return {text("tags", name): text("tags", word) for name, word in mapping("tags", tags or {}).items()}


def checked_keys(keys: Iterable[Any]) -> list[Key]:
    """Names of prompts. Raises ParameterError."""
    found: list[Key] = []
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 3:
            raise ParameterError("keys", key, "tuples of data set, epoch and index")
        found.append((checked_dataset(key[0]), whole("epoch", key[1], 0), whole("index", key[2], 0)))
    return found


def checked_rank(rank: tuple[int, int], session: str) -> tuple[int, int]:
    """Which trainer of how many, which need a session. Raises WrongType, ParameterError."""
    try:
        mine, ranks = rank
    except (TypeError, ValueError):
        raise ParameterError("rank", rank, "two numbers: which rank, of how many") from None
    text("session", session)
    ranks = whole("rank", ranks, 1, MAX_RANKS)
    mine = whole("rank", mine, 0, ranks - 1)
    if ranks > 1 and not session:
        expected = "a text that all ranks share, new at each start of the trainer, where there are several ranks"
        raise ParameterError("session", session, expected)
    return mine, ranks


STATES = tuple(state.name.lower() for state in PromptState)
Cursor: TypeAlias = dict[str, int]
"""How far a listener has come: a number of each server."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """One prompt as `Prompts.list` tells it, without payload and columns."""

    key: Key
    """Data set, epoch and index."""
    state: str
    """waiting, leased, answered, ready, drawn, committed or dropped."""
    reason: str
    """Why it was dropped; "" if it is not."""
    step: int
    """By which it was drawn; -1: by none."""
    priority: float
    score: float
    version: int
    """Of the model that made its oldest token; 0: nothing came yet."""
    tokens: int
    attempts: int
    """Leases that have begun."""
    is_evaluation: bool
    tags: Mapping[str, str]
    columns: tuple[tuple[str, ...], ...]
    """Names of the columns that each answer has."""
    server: str


class ListenerCalls(TableCalls):
    """Lists prompts and fetches what they hold."""

    @checked_names()
    def list(
        self,
        state: str | Sequence[str] | None = None,
        tags: Mapping[str, str] | None = None,
        *,
        since: Cursor | None = None,
        consumer: str = "",
        limit: int = 1000,
        timeout: float | None = None,
    ) -> tuple[list[PromptInfo], Cursor]:
        """Prompts that have changed since a cursor, in the order of their changes, and the cursor after them.

        Args:
            state: Only those in this state, or in one of these.
            tags: Only those that have these words.
            since: What a former call returned; None begins with the first one, or where `consumer` is.
            consumer: Who listens. Servers keep the cursor that it gave last, so that it goes on there after a restart:
                a client that lists without `since` is the consumer from then on. Another one that gives `since` is
                refused.
            limit: Prompts of each server at most.
        """
        deadline = self._transport.now() + self._patience(timeout)
        wanted = [] if state is None else [state] if isinstance(state, str) else [*state]
        for each in wanted:
            if each not in STATES:
                raise ParameterError("state", each, one_of(each, STATES))
        facts: dict[str, Any] = {
            "states": [STATES.index(each) for each in wanted], "tags": checked_tags(tags),
            "consumer": text("consumer", consumer),
            "most": whole("limit", limit, 1), "is_going_on": bool(consumer) and since is None,
        }  # fmt: skip
        requests = {
            name: Request(messages.Prompts(call="list", since=(since or {}).get(name, 0), **facts))
            for name in self._servers.names
        }
        found: dict[str, list[PromptInfo]] = {name: [] for name in requests}
        cursor: Cursor = {}
        facts |= {"consumer": "", "is_going_on": False}  # the first page has moved its cursor
        while requests:
            for name, reply in self._servers.all(requests, deadline).items():
                found[name] += [_info(row, self.schema, name) for row in reply.body.prompts]
                cursor[name], left = reply.body.cursor, limit - len(found[name])
                if reply.body.is_whole or left <= 0:
                    del requests[name]
                else:
                    page = messages.Prompts(call="list", since=cursor[name], **(facts | {"most": left}))
                    requests[name] = Request(page)
        for name, rows in found.items():
            self._worker.learn([row.key for row in rows], name)
        return [row for rows in found.values() for row in rows], cursor

    @checked_names()
    def forget_consumer(self, consumer: str, timeout: float | None = None) -> None:
        """Let the place of a consumer go that does not come again, since servers keep those of 256. If it comes again
        all the same, it begins with the first prompt.
        """
        request = messages.Prompts(call="forget", consumer=text("consumer", consumer))
        self._servers.every(request, self._transport.now() + self._patience(timeout))

    def fetch(
        self, keys: Iterable[Key], columns: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[Key, dict[str, Any]]:
        """The whole answers to prompts: for each prompt its columns, `Ragged` or arrays [n, *F] of its n answers, and
        "answer" [n], their places in the group. Prompts that have none are left out.
        """
        deadline, schema = self._transport.now() + self._patience(timeout), self.schema
        places = list(range(len(schema.names))) if columns is None else places_of(mask_of(schema, columns))
        wanted, found = checked_keys(keys), dict[Key, dict[str, Any]]()
        for name in self._servers.names:
            for key, answers in zip(
                wanted, fetched(self._servers, name, wanted, schema, places, deadline), strict=True
            ):
                if answers:
                    raws = [raw for _, raw in answers.values()]
                    found[key] = {
                        schema.names[place]: gathered(schema, place, [raw.get(place) for raw in raws])
                        for place in places
                    } | {"answer": list(answers)}
        return found

    def payload(self, key: Key, timeout: float | None = None) -> bytes:
        """The payload of a prompt. Raises Refused (code "missing")."""
        request = Request(messages.Prompts(call="payloads", keys=keys_of(checked_keys([key]))))
        return bytes(self._worker.at_home(key, request, self._transport.now() + self._patience(timeout)).payload)

    def counts(self, timeout: float | None = None) -> dict[str, int]:
        """Prompts in each state, and those that were forgotten: their sum is the number of prompts given."""
        figures = self.figures(timeout)
        return {name: figures[name] for name in (*STATES, "forgotten")}

    def figures(self, timeout: float | None = None) -> dict[str, int]:
        """The same and all other figures of the table, added up over servers: leases, late answers, bytes, ..."""
        told = self._servers.every(messages.Prompts(call="counts"), self._transport.now() + self._patience(timeout))
        found: dict[str, int] = {}
        for reply in told.values():
            for name, count in reply.body.counts.items():
                found[name] = max(found.get(name, 0), count) if name == "newest_model" else found.get(name, 0) + count
        return found


def _info(row: messages.PromptFacts, schema: Schema, server: str) -> PromptInfo:
    names = tuple(tuple(schema.names[place] for place in places_of(mask)) for mask in row.columns)
    return PromptInfo(
        (row.dataset, row.epoch, row.index), STATES[row.state] if row.state < len(STATES) else str(row.state),
        row.reason, row.step, row.priority, row.score, row.version, row.tokens, row.attempts, row.is_evaluation,
        row.tags, names, server,
    )  # fmt: skip


class WorkerCalls(TableCalls):
    """Leases prompts and answers them."""

    @checked_names()
    def lease(
        self, count: int = 1, seconds: float | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> list[Lease]:
        """Prompts for this worker: at least one, at most `count`.

        Args:
            seconds: For which they are leased, above 0; None is what the table says.
            timeout: Seconds to wait until there is one.
            version: Of the worker's model. With `max_model_lag`, one that is too old gets nothing.

        Raises:
            MemoireTimeout: none came in that time; it says why.
        """
        wanted, lasting = whole("count", count, 1, 1024), _lasting(seconds)
        acting = None if version is None else model_version(version, "version")
        return self._worker.lease(wanted, lasting, acting, self._patience(timeout))

    def renew(self, lease: Lease, seconds: float | None = None, timeout: float | None = None) -> bool:
        """Go on with a prompt for so many seconds from now; False if it is not wanted of this worker any more."""
        return self._worker.keep("renew", [checked_lease(lease)], _lasting(seconds), self._patience(timeout))[0]

    def release(self, lease: Lease, timeout: float | None = None) -> bool:
        """Give a prompt back, so that another worker gets it at once. Answers that are whole stay."""
        return self._worker.keep("release", [checked_lease(lease)], 0.0, self._patience(timeout))[0]

    @checked_names()
    def answer(
        self,
        lease: Lease,
        index: int,
        columns: Mapping[str, Any],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> bool:
        """Answer a prompt; whether this answer counts. It does not if the same one came before, from whoever had a
        lease of the prompt.

        Args:
            index: Which answer of the group, from 0.
            columns: Values by the schema's columns, not all of them. Of a ragged column an array [L, *F].
            version: Of the model that made it; 0 is unknown, which `max_model_lag` refuses. A group is as old as its
                oldest piece.
            piece: Number of a piece of an answer that comes in several; None counts them. Ragged columns are appended.
            last: Whether the answer is whole with this piece.

        Raises:
            EntryError, NoSuchField: a value does not fit its column.
        """
        return self.answers(lease, {index: columns}, version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answers(
        self,
        lease: Lease,
        answers: Mapping[int, Mapping[str, Any]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[bool]:
        """Several answers to one prompt in one request, by their places in the group; for each whether it counts."""
        return self.answer_all([(lease, answers)], version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answer_all(
        self,
        answers: Iterable[tuple[Lease, Mapping[int, Mapping[str, Any]]]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[list[bool]]:
        """Answers to several prompts, each with its lease, in as few requests as they fit into: the quickest way if a
        worker has several groups at once. For each prompt whether its answers count.
        """
        patience = self._patience(timeout)
        given = [(checked_lease(lease), mapping("answers", each)) for lease, each in answers]
        for _, each in given:
            for index in each:
                whole("index", index, 0)
        facts: dict[str, Any] = {
            "version": model_version(version, "version"),
            "piece": piece,
            "is_last": last,
        }
        return self._worker.answer(given, self.schema, patience=patience, **facts)

    def fail(self, lease: Lease, index: int, reason: str, *, again: bool = True, timeout: float | None = None) -> bool:
        """Tell that an answer does not come; whether it was still wanted.

        Args:
            again: Whether somebody may try once more. Without it the answer has failed for good, and its group is
                closed with the others, if those are `at_least` so many.
        """
        return self._worker.fail(
            checked_lease(lease), whole("index", index, 0), text("reason", str(reason)), again, self._patience(timeout)
        )

    def amend(self, key: Key, index: int, columns: Mapping[str, Any], timeout: float | None = None) -> bool:
        """Bring columns of an answer from elsewhere, such as a reward model; whether they came in time: before the
        group was ready.
        """
        patience = self._patience(timeout)
        return self._worker.amend(checked_keys([key])[0], whole("index", index, 0), columns, self.schema, patience)


def _lasting(given: float | None) -> float:
    """Seconds of a lease as they travel: 0 for what the table says. Raises ParameterError."""
    if given is None:
        return 0.0
    if not (found := seconds(given, 0.0)):
        raise ParameterError("seconds", given, "above 0, or None for what the table says (`lease`)")
    return found


def checked_lease(lease: Any) -> Lease:
    """The lease itself. Raises WrongType."""
    if not isinstance(lease, Lease):
        raise WrongType("lease", "a Lease, as lease() returns them", type(lease).__name__)
    return lease


Order = Literal["cancel", "prioritise", "finish", "forget", "shares", "model"]


class GiverCalls(TableCalls):
    """Adds prompts and changes their order."""

    @checked_names()
    def add(
        self,
        prompts: Mapping[int, Any] | Iterable[tuple[int, Any]],
        dataset: str = "",
        epoch: int = 0,
        *,
        priority: float = 0.0,
        evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Give prompts; returns how many are new. Those that are known change nothing.

        Args:
            prompts: Payload (bytes or str) of each, by its index in the data set.
            dataset, epoch: With the index, what names a prompt.
            priority: Prompts of a higher one are leased and drawn first.
            evaluation: They are answered, and never drawn: see `list` and `fetch`.
            tags: Words that listeners can select by.

        Raises:
            Refused: there is no room for them, also at the deadline (code "busy"); their epoch is finished ("value").
            MemoireTimeout: a server does not answer.
        """
        deadline = self._transport.now() + self._patience(timeout)
        given = _payloads(prompts)
        epoch, dataset = whole("epoch", epoch, 0, 2**32 - 1), checked_dataset(dataset)
        facts: dict[str, Any] = {
            "dataset": dataset, "epoch": epoch, "priority": finite("priority", priority), "is_evaluation": evaluation,
            "tags": checked_tags(tags),
        }  # fmt: skip
        new, chunk = 0, dict[int, bytes]()
        limit, size = self._transport.limits.tuning.request_bytes // 2, 0
        for index, payload in given.items():
            if len(payload) > limit:
                raise ParameterError("prompts", f"{len(payload)} bytes at {index}", f"at most {limit} bytes each")
            if chunk and (size + len(payload) > limit or len(chunk) >= 4096):
                new, chunk, size = new + self._add(chunk, facts, deadline), {}, 0
            chunk[index], size = payload, size + len(payload)
        return new + (self._add(chunk, facts, deadline) if chunk else 0)

    def _add(self, chunk: Mapping[int, bytes], facts: Mapping[str, Any], deadline: float) -> int:
        """Give some prompts to the servers that are to have them: those that no server knows."""
        dataset, epoch = facts["dataset"], facts["epoch"]
        keys = [(dataset, epoch, index) for index in chunk]
        unknown = set(chunk)
        self._servers.complete(deadline)
        if len(self._servers.names) > 1:
            told = self._servers.every(messages.Groups(call="known", keys=keys_of(keys)), deadline)
            for reply in told.values():
                unknown -= {index for index, is_known in zip(chunk, reply.body.flags, strict=True) if is_known}
        shares: dict[str, list[int]] = {}
        for index in chunk:
            if index in unknown:
                shares.setdefault(self._servers.home_of(f"{dataset}/{index}".encode()), []).append(index)
        requests = {}
        for name, mine in shares.items():
            new = [messages.NewPrompt(index, len(chunk[index])) for index in mine]
            data = b"".join(chunk[index] for index in mine)
            requests[name] = Request(messages.Groups(call="add", new=new, **facts), data)
        return sum(reply.body.done for reply in self._servers.all(requests, deadline).values())

    def cancel(self, keys: Iterable[Key], timeout: float | None = None) -> int:
        """Prompts are not wanted any more; returns how many are dropped by that. Those that are drawn go on."""
        return self._order("cancel", timeout, keys=checked_keys(keys))

    def prioritise(self, keys: Iterable[Key], priority: float, timeout: float | None = None) -> int:
        """Give prompts another priority; returns how many are known."""
        return self._order("prioritise", timeout, keys=checked_keys(keys), priority=finite("priority", priority))

    def finish(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> None:
        """No more prompts of this epoch come: its last step may be shorter, and `groups` ends after it."""
        self._order("finish", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def forget(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> int:
        """Let the prompts of an epoch leave, which must be committed or dropped; returns how many. They are counted on.

        Raises:
            Refused: some of them are not over yet; at servers where all are, they have left.
        """
        return self._order("forget", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def shares(self, shares: Mapping[str, float], timeout: float | None = None) -> None:
        """Lease and draw data sets in these shares from now on, such as {"math": 0.7, "code": 0.3}; {} by age alone."""
        given = {checked_dataset(name): float(share) for name, share in mapping("shares", shares).items()}
        if any(not 0.0 < share < float("inf") for share in given.values()):
            raise ParameterError("shares", shares, "numbers above 0")
        self._order("shares", timeout, shares=given)

    def saw_model(self, version: int, timeout: float | None = None) -> None:
        """There is a model of this version, from which `max_model_lag` counts: for those who publish it elsewhere."""
        self._order("model", timeout, version=model_version(version, "version"))

    def _order(self, call: Order, timeout: float | None, **facts: Any) -> int:
        deadline = self._transport.now() + self._patience(timeout)
        keys = facts.pop("keys", None)
        if keys is None:
            return sum(
                each.body.done for each in self._servers.every(messages.Groups(call=call, **facts), deadline).values()
            )
        done = 0
        for begin in range(0, len(keys), 4096):
            body = messages.Groups(call=call, keys=keys_of(keys[begin : begin + 4096]), **facts)
            done += sum(each.body.done for each in self._servers.every(body, deadline).values())
        return done


def _payloads(prompts: Any) -> dict[int, bytes]:
    try:
        given = dict(prompts)
    except (TypeError, ValueError):
        expected = "a mapping from index to payload, or pairs of them"
        raise WrongType("prompts", expected, type(prompts).__name__) from None
    found = {}
    for index, payload in given.items():
        if not isinstance(payload, str | bytes | bytearray | memoryview):
            raise WrongType(f"prompts[{index!r}]", "bytes or str", type(payload).__name__)
        if isinstance(payload, str):
            payload = text(f"prompts[{index!r}]", payload).encode()
        found[whole("index", index, 0)] = bytes(payload)
    return found


BALANCE = ("tokens", None)


class TrainerCalls(TableCalls):
    """Draws groups, commits and rewinds. One thread at a time."""

    @checked_names()
    def draw(
        self,
        step: int,
        groups: int,
        timeout: float | None = None,
        *,
        balance: str | None = "tokens",
        columns: Sequence[str] | None = None,
        replay: float = 0.0,
    ) -> Step:
        """Draw the groups of a step: those of this rank. The same step gives the same groups, also after a restart of
        the trainer or of servers, until it is committed and `keep` further steps are, too.

        Args:
            step: 0 or more, each once in the order of training.
            groups: Of all ranks together.
            balance: "tokens": ranks get as many groups each, and about as many tokens. None: one after the other.
            columns: Those that are fetched; None is all.
            replay: Share of the groups that is drawn from committed ones by their scores (`Table(replay_limit=...)`),
                as far as there are so many. With 1 a step waits for no new group once enough are committed.

        Raises:
            MemoireTimeout: not enough groups were ready in that time; says what is missing.
            EpochOver: none comes any more, since all epochs were finished.
            Refused: another trainer draws from this table (code "session"): see `rewind`.
        """
        if balance not in BALANCE:
            raise ParameterError("balance", balance, "'tokens' or None")
        if not 0.0 <= replay <= 1.0:
            raise ParameterError("replay", replay, "a share from 0 to 1")
        facts: dict[str, Any] = {"columns": columns, "by_tokens": balance == "tokens", "replay": float(replay)}
        step, groups = whole("step", step, 0), whole("groups", groups, 1, 65536)
        return self._trainer.draw(step, groups, self.schema, patience=self._patience(timeout), **facts)

    def groups(self, groups: int, first: int = 0, timeout: float | None = None, **options: Any) -> Iterator[Step]:
        """Steps of so many groups, from `first` on, until the finished epochs are over. See `draw` for the options."""
        step = first
        while True:
            try:
                drawn = self.draw(step, groups, timeout, **options)
            except EpochOver:
                return
            yield drawn
            step += 1

    def commit(self, step: int, timeout: float | None = None) -> int:
        """Everything that was drawn by steps up to this one is trained on, and in the trainer's checkpoint; returns the
        prompts that are committed by this call. Call it after the checkpoint was written, by any or all ranks.
        """
        return self._trainer.commit(whole("step", step, 0), self._patience(timeout))

    def rewind(self, step: int, timeout: float | None = None, *, version: int | None = None) -> int:
        """Go on behind the step of a checkpoint, -1 being before the first one; returns the first step to draw.

        Everything that was drawn up to that step is committed, also if the commit never left. Everything that was drawn
        later comes back once, in front of all others. A trainer that drew before is refused from now on.

        Args:
            version: Of the newest model from now on: that of the checkpoint.
        """
        newest = None if version is None else model_version(version, "version")
        self._trainer.rewind(whole("step", step, -1), newest, self._patience(timeout))
        return step + 1

    resume = rewind


class PromptCalls(GiverCalls, WorkerCalls, ListenerCalls, TrainerCalls):
    """See `memoire.Prompts`."""


class Prompts(PromptCalls, FarCalls):
    """A table of prompts at one or several servers. All methods may be called from any thread, those of a trainer by
    one at a time.

    What each process may call is for its key: an actor's key leases, answers and amends; a reader's lists and fetches;
    a learner's may do everything.

    Args:
        addresses: Of servers, proxies or both.
        table: Its name; None is the first table of prompts.
        keys: This process' keys folder. None takes $MEMOIRE_KEYS, and without it no key.
        rank: Which one of how many trainers that learn as one: each draws its part of a step.
        timeout: Seconds that a call takes at most if it is given no other number; also this one.
        session: What all ranks of one start of the trainer call it, such as a text that rank 0 made and sent to them.
            "" makes one, for a single rank.
        name: What people see of this process.

    Raises:
        MemoireTimeout, AuthError: no server answered in `timeout` seconds.
        ParameterError: the table stores something else.
        Refused: there is no such table.
    """

    CALLED = "this user of prompts"

    @checked_names()
    def __init__(
        self,
        addresses: str | Sequence[str],
        table: str | None = None,
        *,
        keys: Given = None,
        rank: tuple[int, int] = (0, 1),
        timeout: float = DEFAULT_TIMEOUT,
        session: str = "",
        name: str = "",
        limits: Limits | None = None,
        context: Context | None = None,
        tune_process: bool = True,
    ) -> None:
        self.rank = checked_rank(rank, session)
        facts: dict[str, Any] = {"limits": limits, "context": context, "tune_process": tune_process}
        FarCalls.__init__(self, addresses, "prompts", table=table, keys=keys, name=name, **facts)
        patience = seconds(timeout, DEFAULT_TIMEOUT)
        PromptCalls.__init__(self, self._far, self.rank, patience, session)
        self._meet(patience)

    def __repr__(self) -> str:
        return f"<memoire.Prompts {self.client_id.hex()[:8]} of {', '.join(self.urls)}>"
