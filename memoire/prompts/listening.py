"""The calls of those who look at prompts and change nothing: reward models, evaluations, people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from memoire.arguments import text, whole
from memoire.errors import ParameterError
from memoire.replay.schema import Schema
from memoire.suggestions import checked_names, one_of

from . import messages
from .columns import gathered, mask_of, places_of
from .rows import Key, PromptState
from .servers import PromptRequest, keys_of
from .trainer import fetched
from .users import TableCalls, checked_keys, checked_tags

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
            name: PromptRequest(messages.Prompts(call="list", since=(since or {}).get(name, 0), **facts))
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
                    requests[name] = PromptRequest(page)
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
        request = PromptRequest(messages.Prompts(call="payloads", keys=keys_of(checked_keys([key]))))
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
