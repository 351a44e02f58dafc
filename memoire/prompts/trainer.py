"""Calls of a trainer on a table of prompts: draws of steps, commits and rewinds. No socket.

rank 0    asks all servers for step 7    none has it: 90 and 30 groups are ready
          plan {a: 48, b: 16} ──▶ kept at a and b, with the draw
          a and b fix their groups ──▶ the same lists for every rank, also after a restart
others    ask until the plan exists, and every server of it has fixed its groups
each      takes its part of the groups by `balance_groups`, and fetches only the columns of that part

A `Step` has the groups of one rank, with their columns packed or padded.
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
from .columns import NOTHING, Key, RawColumns, checked, gather_column, mask_of, mask_of_places, places_of, unpacked
from .servers import TableCalls, balance_groups, deal_groups, keys_of, max_step_groups, plan_groups, revise_plan


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Concatenated answers of a step, without padding."""

    columns: Mapping[str, NDArray[Any]]
    """Ragged columns [T, *F], with the T elements of all answers; plain ones [R, *F], with a value for each answer."""
    lengths: NDArray[np.int64]
    """[R], number of elements of each answer."""
    positions: NDArray[np.int64]
    """[T], place of each element in its answer."""
    segment: NDArray[np.int64]
    """[T], answer of each element, a place in `lengths`."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[R + 1], start of each answer, and the end of the last one, as attention over packed sequences needs them."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column: [T, *F] if it is ragged, else [R, *F]."""
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class Step:
    """Groups of one rank at one step: G groups with R answers together. `step["tokens"]` is a column of the answers."""

    step: int
    keys: list[Key]
    """[G], data set, epoch and index of each group's prompt."""
    group: NDArray[np.int64]
    """[R], group of each answer, a place in `keys`."""
    answer: NDArray[np.int64]
    """[R], place of each answer in its prompt's group."""
    version: NDArray[np.int64]
    """[R], version of the model that made each answer's oldest token."""
    columns: dict[str, Any]
    """Columns by name: `Ragged` with R values, or an array [R, *F]."""
    scores: NDArray[np.float64]
    """[G], score of each group."""
    weights: NDArray[np.float64]
    """[G], importance of each group: 1, or less for a replayed one."""
    is_replayed: NDArray[np.bool_]
    """[G], True for each replayed group."""
    total_groups: int
    """Number of groups of all ranks."""
    rank_tokens: tuple[int, ...] = ()
    """Number of tokens of each rank."""
    _update: Callable[[Mapping[Key, float]], int] = field(default=lambda scores: 0, repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return a column of all R answers: `Ragged`, or an array [R, *F]."""
        if name not in self.columns:
            raise NoSuchField("step", repr(name), (), tuple(self.columns))
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def packed(self) -> PackedStep:
        """Return all answers concatenated. A ragged column is left out if its answers have other lengths than those of
        the first ragged column.
        """
        lengths = self._lengths()
        ends = np.cumsum(lengths)
        segment = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        columns = {name: value.values if isinstance(value, Ragged) else value for name, value in self._even(lengths)}
        return PackedStep(columns, lengths, positions, segment)

    def padded(self) -> dict[str, NDArray[Any]]:
        """Return ragged columns padded with zeros [R, L, *F], plain ones [R, *F], and "is_token", bool [R, L]."""
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
        raise ParameterError("columns", ", ".join(self.columns), "columns with a ragged one, such as tokens")

    def _even(self, lengths: NDArray[np.int64]) -> Iterator[tuple[str, Any]]:
        for name, value in self.columns.items():
            if not isinstance(value, Ragged) or np.array_equal(value.lengths, lengths):
                yield name, value

    @property
    def tokens(self) -> int:
        """Number of elements of the first ragged column, of all answers."""
        return int(self._lengths().sum())

    def update_scores(self, values: Sequence[float] | NDArray[np.float64]) -> int:
        """Set the scores [G] by which committed groups are replayed. Return how many of these groups are known."""
        scores = np.asarray(values, np.float64).reshape(-1)
        if len(scores) != len(self.keys) or not np.isfinite(scores).all() or (scores < 0).any():
            raise ParameterError("values", values, f"{len(self.keys)} finite numbers, 0 or more: one for each group")
        return self._update(dict(zip(self.keys, scores.tolist(), strict=True)))


class StepAnswer(NamedTuple):
    """Fetched answer for a step: its places, model version and columns."""

    group: int
    """Place of the group among the groups of the rank."""
    answer: int
    version: int
    raw: RawColumns


REPLAN_TIMEOUT = 1.0
"""Seconds that a server has to fix the groups of a plan before other servers replace them."""


class DrawnGroup(NamedTuple):
    """Group of a step, with the server that holds it."""

    server: str
    facts: messages.GroupFacts

    @property
    def key(self) -> Key:
        """Name of the group's prompt."""
        return self.facts.dataset, self.facts.epoch, self.facts.index


BALANCE = ("tokens", None)


class TrainerCalls(TableCalls):
    """Calls that draw, commit and rewind steps. One thread at a time."""

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        super().__init__(transport, rank, timeout, session)
        self._rank, self._ranks = rank
        self._base, self._rewinds = session or secrets.token_hex(8), 0
        self._short_since: dict[int, float] = {}  # steps with servers that lack groups of the plan, and since when

    @property
    def _session(self) -> str:
        """Name of this trainer's session at the servers; each rewind begins a new one."""
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
        """Draw the groups of a step, and return the groups of this rank.

        A repeated step gives the same groups, also after a restart of the trainer or of servers, until the step and
        `keep` further steps are committed.

        Args:
            step: Number of the step, from 0; each once in the order of training.
            groups: Groups of all ranks together.
            balance: "tokens" gives ranks equal numbers of groups, and about equal tokens. None deals groups in turn.
            columns: Columns to fetch; None fetches all.
            replay: Share of the groups that is drawn from committed ones by their scores (`Table(replay_limit=...)`),
                as far as there are enough. With 1 a step waits for no new group once enough are committed.

        Raises:
            MemoireTimeout: too few groups were ready in time; the message has the reason.
            EpochOver: no more groups become ready, because all epochs are finished.
            Refused: another trainer draws from this table (code "session"): see `rewind`.
        """
        if balance not in BALANCE:
            raise ParameterError("balance", balance, "'tokens', or None to deal groups in turn")
        if not 0.0 <= replay <= 1.0:
            raise ParameterError("replay", replay, "a share from 0 to 1")
        step, groups, replay = whole("step", step, 0), whole("groups", groups, 1, 65536), float(replay)
        patience, schema = self._patience(timeout), self.schema
        deadline = self._transport.now() + patience
        drawn = self._servers.wait(f"step {step}", patience, lambda end: self._poll(step, groups, replay, end))
        tokens = [each.facts.tokens for each in drawn]
        parts = balance_groups(tokens, self._ranks) if balance == "tokens" else deal_groups(len(drawn), self._ranks)
        own_groups = [drawn[place] for place in parts[self._rank]]
        places = list(range(len(schema.names))) if columns is None else places_of(mask_of(schema, columns))
        answers = self._fetch(own_groups, schema, places, deadline)
        return Step(
            step=step, keys=[each.key for each in own_groups],
            group=np.array([each.group for each in answers], np.int64),
            answer=np.array([each.answer for each in answers], np.int64),
            version=np.array([each.version for each in answers], np.int64),
            columns={
                schema.names[place]: gather_column(schema, place, [each.raw.get(place) for each in answers])
                for place in places
            },
            scores=np.array([each.facts.score for each in own_groups], np.float64),
            weights=np.array([each.facts.importance for each in own_groups], np.float64),
            is_replayed=np.array([each.facts.is_replayed for each in own_groups], np.bool_),
            total_groups=len(drawn), rank_tokens=tuple(sum(tokens[place] for place in part) for part in parts),
            _update=self._update_scores,
        )  # fmt: skip

    def groups(self, groups: int, first: int = 0, timeout: float | None = None, **options: Any) -> Iterator[Step]:
        """Yield steps of `groups` groups from `first` on until all epochs are finished. See `draw` for options."""
        step = first
        while True:
            try:
                drawn = self.draw(step, groups, timeout, **options)
            except EpochOver:
                return
            yield drawn
            step += 1

    def commit(self, step: int, timeout: float | None = None) -> int:
        """Commit all groups that steps up to `step` drew. Return how many prompts this call committed.

        Call it from any rank or all ranks, after the trainer has written a checkpoint of the step.
        """
        body = messages.Groups(call="commit", session=self._session, step=whole("step", step, 0))
        return self._sum(body, self._deadline(timeout))

    def rewind(self, step: int, timeout: float | None = None, *, version: int | None = None) -> int:
        """Return to the step of a checkpoint, or with -1 to before the first one. Return the first step to draw.

        Groups of steps up to `step` are committed, also if their commit was lost. Groups of later steps come back once,
        before all other groups. Another trainer that drew before is refused from now on.

        Args:
            version: Version of the newest model from now on: that of the checkpoint.
        """
        newest = None if version is None else model_version(version, "version")
        facts: dict[str, Any] = {"step": max(0, whole("step", step, -1)), "is_before_first": step < 0}
        deadline = self._deadline(timeout)
        self._rewinds += 1
        try:
            self._sum(messages.Groups(call="rewind", session=self._session, version=newest, **facts), deadline)
        except MemoireTimeout:
            self._rewinds -= 1  # a repeated call uses the same session
            raise
        return step + 1

    resume = rewind

    def _update_scores(self, scores: Mapping[Key, float]) -> int:
        """Set scores of groups at all servers, and return how many are known."""
        values = [finite(f"scores[{key!r}]", score, 0.0) for key, score in scores.items()]
        body = messages.Groups(call="score", keys=keys_of(scores), values=values)
        return self._sum(body, self._transport.now() + self._transport.limits.request_timeout)

    # Drawing a step

    def _poll(self, step: int, groups: int, replay: float, deadline: float) -> tuple[list[DrawnGroup] | None, str]:
        body = self._body(step, groups, replay, None, count=0)
        replies = self._fetch_remaining(self._servers.replies_to_same(body, deadline), step, deadline)
        plan = max(
            (each.body.plan for each in replies.values() if each.body.plan), key=lambda plan: plan.version, default=None
        )
        if plan is not None and plan.wanted not in (0, groups):
            raise ParameterError("groups", groups, f"{plan.wanted}, as in the first draw of step {step}")
        if plan is None:
            if self._rank:
                return None, f"rank 0 has not drawn step {step} yet"
            plan, why = self._propose(step, groups, replay, replies)
            if plan is None:
                return None, why
        elif (drawn := _complete(plan, replies)) is not None:
            if not drawn:
                raise EpochOver(step)
            return drawn, ""
        if self._rank:
            return None, f"rank 0 is drawing step {step}: {_reasons(replies)}"
        return self._fix(step, groups, replay, plan, deadline)

    def _propose(
        self, step: int, groups: int, replay: float, replies: Mapping[str, CallReply]
    ) -> tuple[messages.StepPlan | None, str]:
        """Return the first plan of a step, or the reason why too few groups are ready. Raise EpochOver at the end."""
        fixed = {name: len(each.body.groups) for name, each in replies.items() if each.body.groups}
        spare = {name: _spare(each.body, replay, groups) for name, each in replies.items()}
        is_over = self._is_over(replies)
        available = sum(spare.values()) + sum(fixed.values())
        if available < groups and not is_over:
            return None, _reasons(replies)
        if not fixed and not any(each.body.counts.get("ready", 0) for each in replies.values()) and is_over:
            raise EpochOver(step)
        shares = plan_groups(spare, max(0, groups - sum(fixed.values())))
        names = sorted({*shares, *fixed})
        return messages.StepPlan(1, {name: shares.get(name, 0) + fixed.get(name, 0) for name in names}, groups), ""

    def _is_over(self, replies: Mapping[str, CallReply]) -> bool:
        """Return True if no more groups become ready: every server that has prompts reports its end."""
        bodies = [each.body for each in replies.values() if each.body.is_over or not each.body.is_empty]
        return bool(bodies) and all(body.is_over for body in bodies)

    def _fix(
        self, step: int, groups: int, replay: float, plan: messages.StepPlan, deadline: float
    ) -> tuple[list[DrawnGroup] | None, str]:
        """Have the servers of a plan fix their groups. Return all groups, or the reason why some are missing."""
        requests = {
            name: Request(self._body(step, groups, replay, plan, count=count)) for name, count in plan.groups.items()
        }
        replies = self._fetch_remaining(self._servers.replies_by_server(requests, deadline), step, deadline)
        if (drawn := _complete(plan, replies)) is not None:
            self._short_since.pop(step, None)
            return drawn or None, ""
        now = self._transport.now()
        since = self._short_since.setdefault(step, now)
        if now - since >= REPLAN_TIMEOUT or self._is_over(replies):
            self._replan(step, groups, replay, plan, replies, deadline)
            self._short_since[step] = now
        return None, _reasons(replies)

    def _replan(
        self, step: int, groups: int, replay: float, plan: messages.StepPlan, replies: Mapping[str, CallReply],
        deadline: float,
    ) -> None:  # fmt: skip
        """Change a plan so that other servers replace missing groups, if they can or if no more groups become ready."""
        short = [name for name, count in plan.groups.items() if len(replies[name].body.groups or ()) < count]
        states = self._servers.replies_to_same(self._body(step, 0, 0.0, None, count=0), deadline)
        spare = {name: _spare(each.body, replay, groups) for name, each in states.items()}
        lacking = sum(plan.groups[name] - spare.pop(name) for name in short)
        if sum(spare.values()) < lacking and not self._is_over(states):
            return
        closing = {
            name: Request(self._body(step, groups, replay, None, count=plan.groups[name], is_last=True))
            for name in short
        }
        fixed = {name: each.body.done for name, each in self._servers.replies_by_server(closing, deadline).items()}
        changed = messages.StepPlan(plan.version + 1, revise_plan(plan.groups, fixed, spare), plan.wanted)
        for name in sorted(changed.groups):
            body = self._body(step, groups, replay, changed, count=changed.groups[name])
            self._servers.reply_of(name, Request(body), deadline)

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

    def _fetch_remaining(self, replies: Mapping[str, CallReply], step: int, deadline: float) -> dict[str, CallReply]:
        """Fetch the remaining groups of a step, and return the replies with all groups."""
        whole = dict(replies)
        for name, reply in replies.items():
            if reply.body.is_whole:
                continue
            groups, page = list(reply.body.groups or ()), reply.body
            while not page.is_whole:
                body = messages.Groups(call="draw", session=self._session, step=step, after=len(groups))
                former, page = page, self._servers.reply_of(name, Request(body), deadline).body
                if page.done != former.done or not page.groups:  # the step got more groups meanwhile: begin again
                    groups, page = [], msgspec.structs.replace(page, is_whole=False)
                    continue
                groups += page.groups
            whole[name] = CallReply(msgspec.structs.replace(reply.body, groups=groups), reply.payload)
        return whole

    def _fetch(
        self, own_groups: Sequence[DrawnGroup], schema: Schema, places: Sequence[int], deadline: float
    ) -> list[StepAnswer]:
        found_answers: list[StepAnswer] = []
        for name in {each.server for each in own_groups}:
            places_here = [place for place, each in enumerate(own_groups) if each.server == name]
            keys = [own_groups[place].key for place in places_here]
            rank = self._rank, self._ranks
            groups = fetched(self._servers, name, keys, schema, places, deadline, rank)
            for place, answers in zip(places_here, groups, strict=True):
                found_answers += [StepAnswer(place, index, version, raw) for index, (version, raw) in answers.items()]
        return sorted(found_answers, key=lambda each: (each.group, each.answer))


def fetched(
    servers: CalledServers,
    name: str,
    keys: Sequence[Key],
    schema: Schema,
    places: Sequence[int],
    deadline: float,
    rank: tuple[int, int] = (0, 0),
) -> list[dict[int, tuple[int, RawColumns]]]:
    """Return the answers to prompts at one server: for each prompt model version and columns by place in the group.

    Args:
        rank: (rank, number of ranks) of a trainer if the prompts are its groups of a step; else (0, 0).
    """
    whole_prompts: list[dict[int, tuple[int, RawColumns]]] = []
    mask = mask_of_places(places)
    open_answers: dict[int, tuple[int, RawColumns]] = {}  # answers up to the first unfinished prompt
    part, changed = bytearray(), 0  # bytes of the next answer; the answer's newest change
    while len(whole_prompts) < len(keys):
        page_keys = keys_of(keys[len(whole_prompts) :][:4096])
        body = messages.PromptsRequest(
            call="fetch", keys=page_keys, columns=mask, rank=rank[0], ranks=rank[1], after=len(open_answers),
            offset=len(part), changed=changed,
        )  # fmt: skip
        reply = servers.reply_of(name, Request(body), deadline)
        received: list[dict[int, tuple[int, RawColumns]]] = [open_answers, *({} for _ in page_keys)]
        begin = 0
        for facts in reply.body.columns:
            data = reply.payload[begin : begin + facts.bytes]
            begin += facts.bytes
            if reply.body.rest or part:  # the only or the first answer of the reply
                part += data
                if reply.body.rest:
                    break
                data, part = memoryview(part), bytearray()
            answer = checked(schema, facts.columns, facts.lengths, data) if facts.columns else NOTHING
            received[facts.key][facts.answer] = facts.version, unpacked(schema, answer)
        if not (reply.body.columns or reply.body.answered):
            if changed != reply.body.changed and (part or open_answers):  # the received parts are of different moments
                open_answers, part = {}, bytearray()
                continue
            raise Refused(name, "unexpected", "the reply to a fetch has no answers")
        whole_prompts += received[: reply.body.answered]
        open_answers, changed = received[reply.body.answered], reply.body.changed
    return whole_prompts


def _complete(plan: messages.StepPlan, replies: Mapping[str, CallReply]) -> list[DrawnGroup] | None:
    """Return all groups of a plan in the order that every rank computes, or None while some are not fixed."""
    drawn: list[DrawnGroup] = []
    for name in sorted(plan.groups):
        groups = replies[name].body.groups if name in replies else None
        if groups is None or len(groups) != plan.groups[name]:
            return None
        drawn += [DrawnGroup(name, facts) for facts in groups]
    return drawn


def _spare(body: messages.Prompted, replay: float, groups: int) -> int:
    """Return the number of groups that a server could give beside its fixed ones."""
    counts = body.counts
    if body.is_closed or body.groups:  # the fixed groups include the replayed ones
        return 0 if body.is_closed else counts.get("ready", 0)
    return max_step_groups(counts.get("ready", 0), counts.get("replayable", 0), replay, groups)


def _reasons(replies: Mapping[str, CallReply]) -> str:
    reasons = {name: each.body.wait for name, each in replies.items() if each.body.wait}
    if len(replies) == 1:
        return next(iter(reasons.values()), "")
    return "; ".join(f"server {name!r}: {why}" for name, why in sorted(reasons.items()))
