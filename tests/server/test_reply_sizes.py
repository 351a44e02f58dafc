"""Every kind of reply at its largest comes in pages, or is refused by name before anything has changed. What a server
acknowledges does come. All limits are small here; `soak/large_replies.py` has those of real clients.
"""

import itertools
import time

import numpy as np
import pytest

import memoire
from memoire.errors import Refused
from memoire.limits import Limits
from memoire.pool.prompts import PromptPool
from memoire.pool.tables import Tables
from memoire.prompts.calls import PromptCalls
from memoire.server.dispatch import Dispatcher
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from memoire.wire.identity import table_number
from serverkit import NOW

SMALL = Limits(message_bytes=4096, request_bytes=2048, tail_bytes=2048)
"""What the client takes that everything here is sent to."""
LONG = "\u00e9" * 200
"""A name of 400 bytes."""


class SmallEnd:
    """A client of one server, without sockets: what is said goes through the wire's frames, and only what this client
    takes comes.
    """

    names = itertools.count(1)

    def __init__(self, dispatcher, limits=SMALL, table="", role="prompts"):
        self.dispatcher, self.limits, self.name = dispatcher, limits, table
        self.client = next(self.names).to_bytes(16, "big")
        self.number, self.replies = itertools.count(1), []
        self.told = self.one(messages.Hello(role=role, table=table, takes=_takes(limits))).body

    def one(self, body, payload=None, **header):
        """The reply to a request, or why it was refused; an error here is a reply that this client would throw away."""
        facts = {"table": table_number(self.name) if self.name else 0} | header
        sequence = facts.pop("sequence", None) or next(self.number)
        asked = parse(encode(body, client=self.client, sequence=sequence, payload=payload, **facts))
        reply = self.dispatcher.answer(asked)
        came = parse(self.dispatcher.frames_of(asked.header, reply, reply.payload), self.limits)
        self.replies.append(came)
        if isinstance(came.body, messages.Refused):
            return Refused("home", came.body.code, came.body.text)
        return came

    # What the client of prompts needs

    def ask(self, requests, deadline):
        return {name: self.one(request.body, request.payload) for name, request in requests.items()}

    def table(self, deadline):
        return self.name, self.dispatcher.tables.named(self.name).schema

    def servers(self):
        return ["home"]

    def unmet(self):
        return []

    leaving = unmet

    def where(self):
        return "home"

    trouble = where

    def now(self):
        return time.monotonic()

    def pause(self, seconds):
        raise AssertionError("nothing has to be waited for")


def _takes(limits):
    return {name: getattr(limits, name) for name in ("message_bytes", "request_bytes", "tail_bytes")}


def dispatcher_of(name, table, pool):
    return Dispatcher(
        tables=Tables({name: table}, pool), run="run", name="home", limits=Limits(), clock=lambda: NOW, epoch=7
    )


# ------------------------------------------------------------------------------------------------------------ prompts


def prompts_of(limits=SMALL, **settings):
    """A table of prompts: as a client with small limits has it, and as one with those of most."""
    columns = {"tokens": (np.int32, (None,)), "reward": np.float32}
    table = memoire.Table(columns, storage="prompts", **{"group": 3, **settings})
    made = dispatcher_of(
        "t", table, lambda _, each: PromptPool(each.schema, each.parameters, each.prompts, clock=lambda: NOW)
    )
    ends = SmallEnd(made, limits, "t"), SmallEnd(made, Limits(), "t")
    return [PromptCalls(end, (0, 1), 5.0, f"session {place}") for place, end in enumerate(ends)], ends[0]


def answer_all(prompts, size):
    for lease in prompts.lease(1000):
        prompts.answers(
            lease, {i: {"tokens": np.full(size(lease.index, i), i, np.int32), "reward": i} for i in lease.missing}
        )


def test_prompts_that_fit_into_no_reply_are_listed_drawn_and_fetched_in_pages():
    (small, usual), end = prompts_of()
    usual.add(dict.fromkeys(range(40), b"x"), LONG)
    answer_all(usual, lambda index, answer: 1 + 700 * (index % 7 == answer))
    listed, cursor = small.list(limit=1000)
    assert sorted(info.key[2] for info in listed) == list(range(40)) and len(end.replies) > 20
    assert small.list(since=cursor)[0] == [] and len(small.list(limit=7)[0]) == 7
    step, before = small.draw(0, 40), len(end.replies)
    assert sorted(key[2] for key in step.keys) == list(range(40)) and before > 40
    lengths = [1 + 700 * (key[2] % 7 == answer) for key in step.keys for answer in range(3)]
    assert step["tokens"].lengths.tolist() == lengths and step["reward"].tolist() == [0.0, 1.0, 2.0] * 40
    assert all((step["tokens"][place] == place % 3).all() for place in range(120))
    fetched = small.fetch([(LONG, 0, 3)], ["tokens"])
    assert [len(each) for each in fetched[LONG, 0, 3]["tokens"]] == lengths[9:12]


def test_one_answer_that_is_longer_than_a_message_comes_in_parts():
    (small, usual), end = prompts_of()
    usual.add({0: b"", 1: b""}, "d")
    answer_all(usual, lambda index, answer: 5000 * (answer == 1) + index)
    step = small.draw(0, 2)
    assert step["tokens"].lengths.tolist() == [0, 5000, 0, 1, 5001, 1] and len(end.replies) > 20
    assert all((step["tokens"][place] == place % 3).all() for place in range(6))


def test_a_lease_takes_as_many_prompts_as_its_reply_has_room_for():
    (small, usual), _ = prompts_of()
    usual.add({i: bytes([i]) * 1500 for i in range(6)}, LONG)
    leases = [lease for _ in range(6) for lease in small.lease(10)]
    assert [lease.payload for lease in leases] == [bytes([i]) * 1500 for i in range(6)]
    assert usual.counts()["leased"] == 6


def test_a_prompt_that_fits_into_no_reply_is_refused_and_waits_for_others():
    (small, usual), _ = prompts_of()
    usual.add({0: bytes(5000)}, "d")
    for call in (lambda: small.lease(3), lambda: small.payload(("d", 0, 0))):
        with pytest.raises(
            Refused, match=r"prompt \('d', 0, 0\), whose payload takes 5000 bytes; client .* 4096"
        ) as caught:
            call()
        assert caught.value.code == "too_large" and "larger Limits(message_bytes=...)" in str(caught.value)
    (info,), _ = usual.list()
    assert (info.state, info.attempts) == ("waiting", 0)
    assert usual.lease(1)[0].payload == bytes(5000)


def test_a_draw_that_asks_for_no_pages_is_refused_before_anything_is_drawn():
    (_, usual), end = prompts_of()
    usual.add(dict.fromkeys(range(9), b"x"), LONG)
    answer_all(usual, lambda index, answer: 1)
    asked = messages.Groups(call="draw", session="a", count=9, wanted=9)
    refused = end.one(asked)
    assert refused.code == "too_large" and "9 groups takes" in refused.text
    assert usual.counts()["ready"] == 9
    assert len(end.one(messages.Groups(call="draw", session="a", count=2, wanted=2)).body.groups) == 2
