"""Calls of programs that use a table of prompts: those that add prompts, answer them, list them and train on them.

  giver ──add──▶                        ──lease, answer──  worker
                   Table(storage="prompts")
trainer ◀─draw──                        ──list, amend────  reward model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from memoire import Schema
from memoire.building import KeysLike, checked_names, finite, mapping, model_version, one_of, seconds, text, whole
from memoire.errors import ParameterError, WrongType
from memoire.kinds import DEFAULT_TIMEOUT, Context, RemoteCalls, Request
from memoire.limits import Limits

from . import messages
from .columns import Key, gather_column, mask_of, places_of
from .rows import PromptState
from .servers import TableCalls, checked_dataset, checked_keys, checked_rank, checked_tags, keys_of
from .trainer import TrainerCalls, fetched
from .worker import WorkerCalls

STATES = tuple(state.name.lower() for state in PromptState)
Cursor: TypeAlias = dict[str, int]
"""Position of a listener in the list of changes: a number for each server."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Description of one prompt in `Prompts.list`, without payload and columns."""

    key: Key
    """Data set, epoch and index."""
    state: str
    """waiting, leased, answered, ready, drawn, committed or dropped."""
    reason: str
    """Reason why the prompt was dropped; "" if it was not."""
    step: int
    """Step that drew the prompt; -1 before it is drawn."""
    priority: float
    score: float
    version: int
    """Version of the model that made the group's oldest token; 0 without answers."""
    tokens: int
    attempts: int
    """Number of leases so far."""
    is_evaluation: bool
    tags: Mapping[str, str]
    columns: tuple[tuple[str, ...], ...]
    """Names of the columns of each answer."""
    server: str


class ListenerCalls(TableCalls):
    """Calls that list prompts and fetch their answers."""

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
        """Return the prompts that changed after a cursor, in the order of their changes, and the new cursor.

        Args:
            state: State of the prompts, or several states; None takes all.
            tags: Tags that the prompts must have.
            since: Cursor of a former call; None begins with the first change, or at the saved cursor of `consumer`.
            consumer: Name under which servers save the cursor over a restart of the listener. A client that lists
                without `since` becomes this consumer. Another client that lists with `since` is then refused.
            limit: Largest number of prompts from each server.
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
            name: Request(messages.PromptsRequest(call="list", since=(since or {}).get(name, 0), **facts))
            for name in self._servers.names
        }
        infos: dict[str, list[PromptInfo]] = {name: [] for name in requests}
        cursor: Cursor = {}
        facts |= {"consumer": "", "is_going_on": False}  # the first page has moved the consumer's cursor
        while requests:
            for name, reply in self._servers.replies_by_server(requests, deadline).items():
                infos[name] += [_info(row, self.schema, name) for row in reply.body.prompts]
                cursor[name], remaining = reply.body.cursor, limit - len(infos[name])
                if reply.body.is_whole or remaining <= 0:
                    del requests[name]
                else:
                    page = messages.PromptsRequest(call="list", since=cursor[name], **(facts | {"most": remaining}))
                    requests[name] = Request(page)
        for name, rows in infos.items():
            self._learn([row.key for row in rows], name)
        return [row for rows in infos.values() for row in rows], cursor

    @checked_names()
    def forget_consumer(self, consumer: str, timeout: float | None = None) -> None:
        """Remove a consumer that does not list again: servers save the cursors of 256 consumers. A removed consumer
        that lists again begins with the first change.
        """
        request = messages.PromptsRequest(call="forget", consumer=text("consumer", consumer))
        self._servers.replies_to_same(request, self._deadline(timeout))

    def fetch(
        self, keys: Iterable[Key], columns: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[Key, dict[str, Any]]:
        """Return the whole answers to prompts, without prompts that have none.

        The value of a prompt maps its columns, `Ragged` or arrays [n, *F] of its n answers, and "answer" [n], the
        answers' places in the group.
        """
        deadline, schema = self._deadline(timeout), self.schema
        places = list(range(len(schema.names))) if columns is None else places_of(mask_of(schema, columns))
        wanted, answers_by_key = checked_keys(keys), dict[Key, dict[str, Any]]()
        for name in self._servers.names:
            for key, answers in zip(
                wanted, fetched(self._servers, name, wanted, schema, places, deadline), strict=True
            ):
                if answers:
                    raws = [raw for _, raw in answers.values()]
                    answers_by_key[key] = {
                        schema.names[place]: gather_column(schema, place, [raw.get(place) for raw in raws])
                        for place in places
                    } | {"answer": list(answers)}
        return answers_by_key

    def payload(self, key: Key, timeout: float | None = None) -> bytes:
        """Return the payload of a prompt. Raise Refused (code "missing") if the table does not hold the prompt."""
        request = Request(messages.PromptsRequest(call="payloads", keys=keys_of(checked_keys([key]))))
        return bytes(self._ask_home(key, request, self._deadline(timeout)).payload)

    def counts(self, timeout: float | None = None) -> dict[str, int]:
        """Return the number of prompts in each state, and of removed ones ("forgotten"); their sum is all prompts."""
        figures = self.figures(timeout)
        return {name: figures[name] for name in (*STATES, "forgotten")}

    def figures(self, timeout: float | None = None) -> dict[str, int]:
        """Return `counts` and all other figures of the table, summed over servers: leases, late answers, bytes, ..."""
        replies = self._servers.replies_to_same(messages.PromptsRequest(call="counts"), self._deadline(timeout))
        sums: dict[str, int] = {}
        for reply in replies.values():
            for name, count in reply.body.counts.items():
                sums[name] = max(sums.get(name, 0), count) if name == "newest_model" else sums.get(name, 0) + count
        return sums


def _info(row: messages.PromptFacts, schema: Schema, server: str) -> PromptInfo:
    names = tuple(tuple(schema.names[place] for place in places_of(mask)) for mask in row.columns)
    return PromptInfo(
        (row.dataset, row.epoch, row.index), STATES[row.state] if row.state < len(STATES) else str(row.state),
        row.reason, row.step, row.priority, row.score, row.version, row.tokens, row.attempts, row.is_evaluation,
        row.tags, names, server,
    )  # fmt: skip


Order = Literal["cancel", "prioritise", "finish", "forget", "shares", "model"]


class ProducerCalls(TableCalls):
    """Calls that add prompts and change their order."""

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
        """Add prompts, and return how many are new. Known prompts stay unchanged.

        Args:
            prompts: Payload (bytes or str) of each prompt, by its index in the data set.
            dataset, epoch: Names of the prompts, together with the index.
            priority: Priority in leases and draws; higher ones come first.
            evaluation: True for prompts that workers answer but trainers never draw; see `list` and `fetch`.
            tags: Names and values by which `list` selects prompts.

        Raises:
            Refused: the table has no room until the deadline (code "busy"), or the epoch is finished ("value").
            MemoireTimeout: a server does not answer.
        """
        deadline = self._deadline(timeout)
        payloads = _payloads(prompts)
        epoch, dataset = whole("epoch", epoch, 0, 2**32 - 1), checked_dataset(dataset)
        facts: dict[str, Any] = {
            "dataset": dataset, "epoch": epoch, "priority": finite("priority", priority), "is_evaluation": evaluation,
            "tags": checked_tags(tags),
        }  # fmt: skip
        new, chunk = 0, dict[int, bytes]()
        limit, size = self._transport.limits.tuning.request_bytes // 2, 0
        for index, payload in payloads.items():
            if len(payload) > limit:
                raise ParameterError("prompts", f"{len(payload)} bytes at {index}", f"at most {limit} bytes each")
            if chunk and (size + len(payload) > limit or len(chunk) >= 4096):
                new, chunk, size = new + self._add(chunk, facts, deadline), {}, 0
            chunk[index], size = payload, size + len(payload)
        return new + (self._add(chunk, facts, deadline) if chunk else 0)

    def _add(self, chunk: Mapping[int, bytes], facts: Mapping[str, Any], deadline: float) -> int:
        """Add prompts that no server knows to the servers where they belong. Return how many are new."""
        dataset, epoch = facts["dataset"], facts["epoch"]
        keys = [(dataset, epoch, index) for index in chunk]
        unknown = set(chunk)
        self._servers.wait_all_answered(deadline)
        if len(self._servers.names) > 1:
            replies = self._servers.replies_to_same(messages.Groups(call="known", keys=keys_of(keys)), deadline)
            for reply in replies.values():
                unknown -= {index for index, is_known in zip(chunk, reply.body.flags, strict=True) if is_known}
        shares: dict[str, list[int]] = {}
        for index in chunk:
            if index in unknown:
                shares.setdefault(self._servers.home_of(f"{dataset}/{index}".encode()), []).append(index)
        requests = {}
        for name, indexes in shares.items():
            new = [messages.NewPrompt(index, len(chunk[index])) for index in indexes]
            data = b"".join(chunk[index] for index in indexes)
            requests[name] = Request(messages.Groups(call="add", new=new, **facts), data)
        return sum(reply.body.done for reply in self._servers.replies_by_server(requests, deadline).values())

    def cancel(self, keys: Iterable[Key], timeout: float | None = None) -> int:
        """Drop prompts that are not drawn yet, and return how many; drawn prompts stay."""
        return self._order("cancel", timeout, keys=checked_keys(keys))

    def prioritise(self, keys: Iterable[Key], priority: float, timeout: float | None = None) -> int:
        """Change the priority of prompts, and return the number of known prompts."""
        return self._order("prioritise", timeout, keys=checked_keys(keys), priority=finite("priority", priority))

    def finish(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> None:
        """Mark an epoch as finished, without more prompts: its last step may be shorter, and `groups` ends after it."""
        self._order("finish", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def forget(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> int:
        """Remove the prompts of an epoch, which must be committed or dropped, and return how many; `counts` keeps them.

        Raises:
            Refused: a server holds prompts that are neither; other servers have removed theirs.
        """
        return self._order("forget", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def shares(self, shares: Mapping[str, float], timeout: float | None = None) -> None:
        """Set the shares of data sets in leases and draws, such as {"math": 0.7, "code": 0.3}; {} goes by age alone."""
        checked = {checked_dataset(name): float(share) for name, share in mapping("shares", shares).items()}
        if any(not 0.0 < share < float("inf") for share in checked.values()):
            raise ParameterError("shares", shares, "positive numbers by data set")
        self._order("shares", timeout, shares=checked)

    def saw_model(self, version: int, timeout: float | None = None) -> None:
        """Report the version of a model that is published elsewhere than at these servers, for `max_model_lag`."""
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
        payload_by_index = dict(prompts)
    except (TypeError, ValueError):
        expected = "a mapping from index to payload, or pairs of index and payload"
        raise WrongType("prompts", expected, type(prompts).__name__) from None
    encoded = {}
    for index, payload in payload_by_index.items():
        if not isinstance(payload, str | bytes | bytearray | memoryview):
            raise WrongType(f"prompts[{index!r}]", "bytes or str", type(payload).__name__)
        if isinstance(payload, str):
            payload = text(f"prompts[{index!r}]", payload).encode()
        encoded[whole("index", index, 0)] = bytes(payload)
    return encoded


class PromptCalls(ProducerCalls, WorkerCalls, ListenerCalls, TrainerCalls):
    """All calls of a table of prompts; `memoire.Prompts` describes them."""


class Prompts(PromptCalls, RemoteCalls):
    """Client of a table of prompts at one or several servers.

    Any thread may call the methods, but only one thread at a time those of a trainer. The keys of a process limit its
    calls: an actor's key may lease, answer and amend; a reader's key may list and fetch; a learner's key may do all.

    Args:
        addresses: Addresses of servers, proxies or both.
        table: Name of the table; None takes the first table of prompts.
        keys: Keys folder of this process. None takes $MEMOIRE_KEYS; without this variable, no key.
        rank: (rank, number of ranks) of a trainer whose ranks learn together: each rank draws its part of a step.
        timeout: Default seconds of each call, and seconds of the constructor.
        session: Text that is the same for all ranks of one start of the trainer, such as one that rank 0 sent to the
            others. "" makes one, for a single rank.
        name: Name of this process on pages and in logs.

    Raises:
        MemoireTimeout, AuthError: no server answered within `timeout` seconds.
        ParameterError: the table is not a table of prompts.
        Refused: the servers have no table of this name.

    Example:
        with memoire.Prompts("tcp://server:5560") as prompts:
            prompts.add({0: "1 + 1 = ?"}, dataset="math")
            print(prompts.counts()["waiting"])
    """

    CALLED = "this user of prompts"

    @checked_names()
    def __init__(
        self,
        addresses: str | Sequence[str],
        table: str | None = None,
        *,
        keys: KeysLike = None,
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
        RemoteCalls.__init__(self, addresses, "prompts", table=table, keys=keys, name=name, **facts)
        patience = seconds(timeout, DEFAULT_TIMEOUT)
        PromptCalls.__init__(self, self._far, self.rank, patience, session)
        self._meet(patience)

    def __repr__(self) -> str:
        return f"<memoire.Prompts {self.client_id.hex()[:8]} of {', '.join(self.urls)}>"
