"""All calls of those who use a table of prompts: givers, workers, listeners and trainers.

  giver ──add──▶                        ──lease, answer──  worker
                   Table(storage="prompts")
trainer ◀─draw──                        ──list, amend────  reward model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from memoire import Schema
from memoire.building import Given, checked_names, finite, mapping, model_version, one_of, seconds, text, whole
from memoire.errors import ParameterError, WrongType
from memoire.kinds import DEFAULT_TIMEOUT, Context, FarCalls, Request
from memoire.limits import Limits

from . import messages
from .columns import Key, gathered, mask_of, places_of
from .rows import PromptState
from .servers import TableCalls, checked_dataset, checked_keys, checked_rank, checked_tags, keys_of
from .trainer import TrainerCalls, fetched
from .worker import WorkerCalls

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
        deadline = self._deadline(timeout)
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
            self._learn([row.key for row in rows], name)
        return [row for rows in found.values() for row in rows], cursor

    @checked_names()
    def forget_consumer(self, consumer: str, timeout: float | None = None) -> None:
        """Let the place of a consumer go that does not come again, since servers keep those of 256. If it comes again
        all the same, it begins with the first prompt.
        """
        request = messages.Prompts(call="forget", consumer=text("consumer", consumer))
        self._servers.every(request, self._deadline(timeout))

    def fetch(
        self, keys: Iterable[Key], columns: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[Key, dict[str, Any]]:
        """The whole answers to prompts: for each prompt its columns, `Ragged` or arrays [n, *F] of its n answers, and
        "answer" [n], their places in the group. Prompts that have none are left out.
        """
        deadline, schema = self._deadline(timeout), self.schema
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
        return bytes(self._at_home(key, request, self._deadline(timeout)).payload)

    def counts(self, timeout: float | None = None) -> dict[str, int]:
        """Prompts in each state, and those that were forgotten: their sum is the number of prompts given."""
        figures = self.figures(timeout)
        return {name: figures[name] for name in (*STATES, "forgotten")}

    def figures(self, timeout: float | None = None) -> dict[str, int]:
        """The same and all other figures of the table, added up over servers: leases, late answers, bytes, ..."""
        told = self._servers.every(messages.Prompts(call="counts"), self._deadline(timeout))
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
        deadline = self._deadline(timeout)
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
        deadline = self._deadline(timeout)
        keys = facts.pop("keys", None)
        if keys is None:
            return self._sum(messages.Groups(call=call, **facts), deadline)
        done = 0
        for begin in range(0, len(keys), 4096):
            body = messages.Groups(call=call, keys=keys_of(keys[begin : begin + 4096]), **facts)
            done += self._sum(body, deadline)
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
