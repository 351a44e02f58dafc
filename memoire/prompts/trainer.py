"""A trainer's calls of a table of prompts: one step's groups of all servers, the part of this rank, commits. No socket.

rank 0    asks all servers for step 7    none has it: 90 and 30 groups are ready
          plan {a: 48, b: 16} ──▶ kept at a and b, with the draw
          a and b fix their groups ──▶ the same lists for everybody, also after a restart
others    ask until the plan is there, and every server of it has fixed its groups
each      takes its part of them by `plan.balanced`, and fetches the columns of that part alone

What a trainer gets of one step: the groups of its rank, with their columns packed or padded.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire import Ragged, Schema
from memoire.building import checked_names, finite, model_version, whole
from memoire.errors import EpochOver, MemoireTimeout, NoSuchField, ParameterError, Refused
from memoire.kinds import CalledServers, CallReply, Request, Transport

from . import messages
from .columns import NOTHING, Key, RawColumns, checked, gathered, mask_of, mask_of_places, places_of, unpacked
from .servers import TableCalls, balanced, dealt, keys_of, most_of, planned, revised


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Answers one behind the other, without padding."""

    columns: Mapping[str, NDArray[Any]]
    """Ragged columns [T, *F], the T elements of all answers; plain ones [R, *F], one for each answer."""
    lengths: NDArray[np.int64]
    """[R], elements of each answer."""
    positions: NDArray[np.int64]
    """[T], place of each element in its answer."""
    segment: NDArray[np.int64]
    """[T], answer of each element."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[R + 1], where each answer begins, and the end: what attention over packed sequences is given."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column: [T, *F] or [R, *F]."""
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of one rank at one step: G groups of R answers together. `step["tokens"]` is a column of theirs."""

    step: int
    keys: list[Key]
    """[G], data set, epoch and index of each group's prompt."""
    group: NDArray[np.int64]
    """[R], group of each answer, a place in `keys`."""
    answer: NDArray[np.int64]
    """[R], place of each answer in its prompt's group."""
    version: NDArray[np.int64]
    """[R], of the model that made each answer's oldest token."""
    columns: dict[str, Any]
    """By name: `Ragged` of R values, or an array [R, *F]."""
    scores: NDArray[np.float64]
    """[G]"""
    weights: NDArray[np.float64]
    """[G], importance of each group: 1, or less for one that is replayed."""
    is_replayed: NDArray[np.bool_]
    """[G]"""
    total_groups: int
    """Of all ranks."""
    rank_tokens: tuple[int, ...] = ()
    """Tokens of each rank."""
    _update: Callable[[Mapping[Key, float]], int] = field(default=lambda scores: 0, repr=False)

    def __getitem__(self, name: str) -> Any:
        """A column of all R answers: `Ragged`, or [R, *F]."""
        if name not in self.columns:
            raise NoSuchField("step", repr(name), (), tuple(self.columns))
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def packed(self) -> PackedStep:
        """All answers one behind the other. Ragged columns whose answers have the lengths of the first one are packed
        with it; others are left out.
        """
        lengths = self._lengths()
        ends = np.cumsum(lengths)
        segment = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        columns = {name: value.values if isinstance(value, Ragged) else value for name, value in self._even(lengths)}
        return PackedStep(columns, lengths, positions, segment)

    def padded(self) -> dict[str, NDArray[Any]]:
        """Ragged columns side by side [R, L, *F], zeros behind; plain ones [R, *F]; "is_token", bool [R, L]."""
        lengths = self._lengths()
        longest = max(1, int(lengths.max(initial=0)))
        columns = {
            name: value.padded(longest) if isinstance(value, Ragged) else value for name, value in self._even(lengths)
        }
        return columns | {"is_token": np.arange(longest) < lengths[:, None]}

    def _lengths(self) -> NDArray[np.int64]:
        for value in self.columns.values():
            if isinstance(value, Ragged):
                return value.lengths
        raise ParameterError("columns", ", ".join(self.columns), "a ragged column, such as tokens")

    def _even(self, lengths: NDArray[np.int64]) -> Iterator[tuple[str, Any]]:
        for name, value in self.columns.items():
            if not isinstance(value, Ragged) or np.array_equal(value.lengths, lengths):
                yield name, value

    @property
    def tokens(self) -> int:
        """Elements of the first ragged column, of all answers."""
        return int(self._lengths().sum())

    def update_scores(self, values: Sequence[float] | NDArray[np.float64]) -> int:
        """Set the scores [G] of these groups, by which committed ones are replayed; returns how many are known."""
        scores = np.asarray(values, np.float64).reshape(-1)
        if len(scores) != len(self.keys) or not np.isfinite(scores).all() or (scores < 0).any():
            raise ParameterError("values", values, f"{len(self.keys)} finite numbers, 0 or more: one for each group")
        return self._update(dict(zip(self.keys, scores.tolist(), strict=True)))


class StepAnswer(NamedTuple):
    """One answer on its way into a step."""

    group: int
    """Place of its group among the rank's."""
    answer: int
    version: int
    raw: RawColumns


REPLAN_TIMEOUT = 1.0
"""Seconds that a server has for the groups of its plan, before others give them."""


class DrawnGroup(NamedTuple):
    """One group of a step, and who has it."""

    server: str
    facts: messages.GroupFacts

    @property
    def key(self) -> Key:
        """Its prompt."""
        return self.facts.dataset, self.facts.epoch, self.facts.index


BALANCE = ("tokens", None)


class TrainerCalls(TableCalls):
    """Draws groups, commits and rewinds. One thread at a time."""

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        super().__init__(transport, rank, timeout, session)
        self._rank, self._ranks = rank
        self._base, self._rewinds = session or secrets.token_hex(8), 0
        self._short_since: dict[int, float] = {}  # steps whose plan some server cannot fulfil yet

    @property
    def _session(self) -> str:
        """What servers know this trainer by."""
        return f"{self._base}:{self._rewinds}"

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
        step, groups, replay = whole("step", step, 0), whole("groups", groups, 1, 65536), float(replay)
        patience, schema = self._patience(timeout), self.schema
        deadline = self._transport.now() + patience
        drawn = self._servers.wait(f"step {step}", patience, lambda end: self._look(step, groups, replay, end))
        tokens = [each.facts.tokens for each in drawn]
        parts = balanced(tokens, self._ranks) if balance == "tokens" else dealt(len(drawn), self._ranks)
        mine = [drawn[place] for place in parts[self._rank]]
        places = list(range(len(schema.names))) if columns is None else places_of(mask_of(schema, columns))
        answers = self._fetch(mine, schema, places, deadline)
        return Step(
            step=step, keys=[each.key for each in mine],
            group=np.array([each.group for each in answers], np.int64),
            answer=np.array([each.answer for each in answers], np.int64),
            version=np.array([each.version for each in answers], np.int64),
            columns={
                schema.names[place]: gathered(schema, place, [each.raw.get(place) for each in answers])
                for place in places
            },
            scores=np.array([each.facts.score for each in mine], np.float64),
            weights=np.array([each.facts.importance for each in mine], np.float64),
            is_replayed=np.array([each.facts.is_replayed for each in mine], np.bool_),
            total_groups=len(drawn), rank_tokens=tuple(sum(tokens[place] for place in part) for part in parts),
            _update=self._update_scores,
        )  # fmt: skip

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
        body = messages.Groups(call="commit", session=self._session, step=whole("step", step, 0))
        return self._sum(body, self._deadline(timeout))

    def rewind(self, step: int, timeout: float | None = None, *, version: int | None = None) -> int:
        """Go on behind the step of a checkpoint, -1 being before the first one; returns the first step to draw.

        Everything that was drawn up to that step is committed, also if the commit never left. Everything that was drawn
        later comes back once, in front of all others. A trainer that drew before is refused from now on.

        Args:
            version: Of the newest model from now on: that of the checkpoint.
        """
        newest = None if version is None else model_version(version, "version")
        facts: dict[str, Any] = {"step": max(0, whole("step", step, -1)), "is_before_first": step < 0}
        deadline = self._deadline(timeout)
        self._rewinds += 1
        try:
            self._sum(messages.Groups(call="rewind", session=self._session, version=newest, **facts), deadline)
        except MemoireTimeout:
            self._rewinds -= 1  # called again, it goes on with the same session
            raise
        return step + 1

    resume = rewind

    def _update_scores(self, scores: Mapping[Key, float]) -> int:
        """Set scores of groups at all servers; returns how many are known."""
        values = [finite(f"scores[{key!r}]", score, 0.0) for key, score in scores.items()]
        body = messages.Groups(call="score", keys=keys_of(scores), values=values)
        return self._sum(body, self._transport.now() + self._transport.limits.request_timeout)

    # How a step is drawn

    def _look(self, step: int, groups: int, replay: float, deadline: float) -> tuple[list[DrawnGroup] | None, str]:
        body = self._body(step, groups, replay, None, count=0)
        told = self._whole(self._servers.every(body, deadline), step, deadline)
        plan = max(
            (each.body.plan for each in told.values() if each.body.plan), key=lambda plan: plan.version, default=None
        )
        if plan is not None and plan.wanted not in (0, groups):
            raise ParameterError("groups", groups, f"{plan.wanted}, with which step {step} was drawn before")
        if plan is None:
            if self._rank:
                return None, f"rank 0 has not drawn step {step} yet"
            plan, why = self._propose(step, groups, replay, told)
            if plan is None:
                return None, why
        elif (found := _complete(plan, told)) is not None:
            if not found:
                raise EpochOver(step)
            return found, ""
        if self._rank:
            return None, f"rank 0 is drawing step {step}: {_reasons(told)}"
        return self._fix(step, groups, replay, plan, deadline)

    def _propose(
        self, step: int, groups: int, replay: float, told: Mapping[str, CallReply]
    ) -> tuple[messages.StepPlan | None, str]:
        """The first plan of a step, once enough groups are ready. Raises EpochOver if none come any more."""
        fixed = {name: len(each.body.groups) for name, each in told.items() if each.body.groups}
        spare = {name: _spare(each.body, replay, groups) for name, each in told.items()}
        is_over = self._is_over(told)
        there = sum(spare.values()) + sum(fixed.values())
        if there < groups and not is_over:
            return None, _reasons(told)
        if not fixed and not any(each.body.counts.get("ready", 0) for each in told.values()) and is_over:
            raise EpochOver(step)
        shares = planned(spare, max(0, groups - sum(fixed.values())))
        names = sorted({*shares, *fixed})
        return messages.StepPlan(1, {name: shares.get(name, 0) + fixed.get(name, 0) for name in names}, groups), ""

    def _is_over(self, told: Mapping[str, CallReply]) -> bool:
        """Whether no more groups come: every server that was given prompts says so."""
        given = [each.body for each in told.values() if each.body.is_over or not each.body.is_empty]
        return bool(given) and all(body.is_over for body in given)

    def _fix(
        self, step: int, groups: int, replay: float, plan: messages.StepPlan, deadline: float
    ) -> tuple[list[DrawnGroup] | None, str]:
        """Have the servers of a plan fix their groups; the list if all have."""
        requests = {
            name: Request(self._body(step, groups, replay, plan, count=count)) for name, count in plan.groups.items()
        }
        told = self._whole(self._servers.all(requests, deadline), step, deadline)
        if (found := _complete(plan, told)) is not None:
            self._short_since.pop(step, None)
            return found or None, ""
        now = self._transport.now()
        since = self._short_since.setdefault(step, now)
        if now - since >= REPLAN_TIMEOUT or self._is_over(told):
            self._replan(step, groups, replay, plan, told, deadline)
            self._short_since[step] = now
        return None, _reasons(told)

    def _replan(
        self, step: int, groups: int, replay: float, plan: messages.StepPlan, told: Mapping[str, CallReply],
        deadline: float,
    ) -> None:  # fmt: skip
        """Servers that lack groups give what they have, if others can give the rest, or nothing more comes."""
        short = [name for name, count in plan.groups.items() if len(told[name].body.groups or ()) < count]
        asked = self._servers.every(self._body(step, 0, 0.0, None, count=0), deadline)
        spare = {name: _spare(each.body, replay, groups) for name, each in asked.items()}
        lacking = sum(plan.groups[name] - spare.pop(name) for name in short)
        if sum(spare.values()) < lacking and not self._is_over(asked):
            return
        closing = {
            name: Request(self._body(step, groups, replay, None, count=plan.groups[name], is_last=True))
            for name in short
        }
        fixed = {name: each.body.done for name, each in self._servers.all(closing, deadline).items()}
        changed = messages.StepPlan(plan.version + 1, revised(plan.groups, fixed, spare), plan.wanted)
        for name in sorted(changed.groups):
            body = self._body(step, groups, replay, changed, count=changed.groups[name])
            self._servers.one(name, Request(body), deadline)

    def _body(
        self,
        step: int,
        groups: int,
        replay: float,
        plan: messages.StepPlan | None,
        *,
        count: int,
        is_last: bool = False,
    ) -> messages.Groups:
        return messages.Groups(
            call="draw", session=self._session, step=step, wanted=groups, count=count, replay=replay, plan=plan,
            is_last=is_last, after=0,
        )  # fmt: skip

    def _whole(self, told: Mapping[str, CallReply], step: int, deadline: float) -> dict[str, CallReply]:
        """The same replies with all groups of a step: what was left of them is asked for."""
        whole = dict(told)
        for name, reply in told.items():
            if reply.body.is_whole:
                continue
            groups, page = list(reply.body.groups or ()), reply.body
            while not page.is_whole:
                body = messages.Groups(call="draw", session=self._session, step=step, after=len(groups))
                former, page = page, self._servers.one(name, Request(body), deadline).body
                if page.done != former.done or not page.groups:  # it was given more meanwhile: from the beginning
                    groups, page = [], msgspec.structs.replace(page, is_whole=False)
                    continue
                groups += page.groups
            whole[name] = CallReply(msgspec.structs.replace(reply.body, groups=groups), reply.payload)
        return whole

    def _fetch(
        self, mine: Sequence[DrawnGroup], schema: Schema, places: Sequence[int], deadline: float
    ) -> list[StepAnswer]:
        found: list[StepAnswer] = []
        for name in {each.server for each in mine}:
            places_here = [place for place, each in enumerate(mine) if each.server == name]
            keys = [mine[place].key for place in places_here]
            rank = self._rank, self._ranks
            groups = fetched(self._servers, name, keys, schema, places, deadline, rank)
            for place, answers in zip(places_here, groups, strict=True):
                found += [StepAnswer(place, index, version, raw) for index, (version, raw) in answers.items()]
        return sorted(found, key=lambda each: (each.group, each.answer))


def fetched(
    servers: CalledServers,
    name: str,
    keys: Sequence[Key],
    schema: Schema,
    places: Sequence[int],
    deadline: float,
    rank: tuple[int, int] = (0, 0),
) -> list[dict[int, tuple[int, RawColumns]]]:
    """Model version and columns of each answer to these prompts, which are at one server, by its place.

    Args:
        rank: Which trainer of how many, if these are its groups of a step.
    """
    found: list[dict[int, tuple[int, RawColumns]]] = []
    mask = mask_of_places(places)
    open_answers: dict[int, tuple[int, RawColumns]] = {}  # to the first prompt that is not whole
    part, changed = bytearray(), 0  # of the next one of these; number of the prompt's newest change when they came
    while len(found) < len(keys):
        asked = keys_of(keys[len(found) :][:4096])
        body = messages.Prompts(
            call="fetch", keys=asked, columns=mask, rank=rank[0], ranks=rank[1], after=len(open_answers),
            offset=len(part), changed=changed,
        )  # fmt: skip
        reply = servers.one(name, Request(body), deadline)
        come: list[dict[int, tuple[int, RawColumns]]] = [open_answers, *({} for _ in asked)]
        begin = 0
        for told in reply.body.columns:
            data = reply.payload[begin : begin + told.bytes]
            begin += told.bytes
            if reply.body.rest or part:  # it is the only one, or the first one
                part += data
                if reply.body.rest:
                    break
                data, part = memoryview(part), bytearray()
            made = checked(schema, told.columns, told.lengths, data) if told.columns else NOTHING
            come[told.key][told.answer] = told.version, unpacked(schema, made)
        if not (reply.body.columns or reply.body.answered):
            if changed != reply.body.changed and (part or open_answers):  # what came is not of one moment
                open_answers, part = {}, bytearray()
                continue
            raise Refused(name, "unexpected", "answered a fetch of answers with none of them")
        found += come[: reply.body.answered]
        open_answers, changed = come[reply.body.answered], reply.body.changed
    return found


def _complete(plan: messages.StepPlan, told: Mapping[str, CallReply]) -> list[DrawnGroup] | None:
    """All groups of a plan, in an order that is the same everywhere; None while some are not fixed."""
    drawn: list[DrawnGroup] = []
    for name in sorted(plan.groups):
        groups = told[name].body.groups if name in told else None
        if groups is None or len(groups) != plan.groups[name]:
            return None
        drawn += [DrawnGroup(name, facts) for facts in groups]
    return drawn


def _spare(body: messages.Prompted, replay: float, groups: int) -> int:
    """Groups that a server could give beside those that it has fixed."""
    counts = body.counts
    if body.is_closed or body.groups:  # what it has fixed has its share of replayed groups
        return 0 if body.is_closed else counts.get("ready", 0)
    return most_of(counts.get("ready", 0), counts.get("replayable", 0), replay, groups)


def _reasons(told: Mapping[str, CallReply]) -> str:
    reasons = {name: each.body.wait for name, each in told.items() if each.body.wait}
    if len(told) == 1:
        return next(iter(reasons.values()), "")
    return "; ".join(f"server {name!r}: {why}" for name, why in sorted(reasons.items()))
