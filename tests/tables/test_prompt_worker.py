"""A worker's list of its leases, over a server that is a function: no socket, and a clock that is set."""

import functools
import itertools

import numpy as np
import pytest

from interrupts import everywhere
from memoire.limits import Limits
from memoire.replay.schema import RowSchema
from memoire.tables.prompts import messages
from memoire.tables.prompts.servers import PromptServers
from memoire.tables.prompts.worker import PromptWorker
from netkit import in_thread
from readerkit import message

SCHEMA = RowSchema({"reward": np.float32})


class OneServer:
    """Leases prompts without an end, 30 seconds each, and takes every answer."""

    limits = Limits()

    def __init__(self):
        self.time, self.numbers, self.having = 0.0, itertools.count(1), ()

    def servers(self):
        return ["a"]

    def now(self):
        return self.time

    def ask(self, requests, deadline):
        return {name: message(self.reply(request.body)) for name, request in requests.items()}

    def reply(self, body):
        if body.call == "lease":
            self.having = body.leases
            number = next(self.numbers)
            leased = messages.LeasedPrompt("d", 0, number, number, 30.0, [0, 1], False, {}, 0)
            return messages.Prompted(leases=[leased])
        flags = [1] * len(body.leases) if body.call in ("renew", "release") else [0] * len(body.pieces)
        return messages.Prompted(flags=bytes(flags))


@pytest.fixture
def server():
    return OneServer()


@pytest.fixture
def worker(server):
    return PromptWorker(PromptServers(server))


def lease(worker):
    (leased,) = worker.lease(1, 0.0, None, 1.0)
    return leased


def answer(worker, leased, *indexes):
    facts = {"version": 1, "piece": None, "is_last": True, "patience": 1.0}
    worker.answer([(leased, {index: {"reward": 1.0} for index in indexes})], SCHEMA, **facts)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_lease_is_listed_until_its_last_answer_comes_each_by_itself_or_all_together(server, worker, is_renewed):
    first = lease(worker)
    if is_renewed:
        assert worker.keep("renew", [first], 0.0, 1.0) == [True]
    answer(worker, first, 0)
    second = lease(worker)
    assert list(server.having) == [first.number]
    answer(worker, first, 1)
    answer(worker, second, 0, 1)
    lease(worker)
    assert list(server.having) == []


def test_an_answer_that_failed_for_good_is_not_wanted_and_one_that_may_come_again_is(server, worker):
    first, second = lease(worker), lease(worker)
    for leased, is_again in ((first, False), (second, True)):
        answer(worker, leased, 0)
        worker.fail(leased, 1, "too long", is_again, 1.0)
    lease(worker)
    assert list(server.having) == [second.number]


def test_leases_whose_time_has_passed_are_not_listed(server, worker):
    first, second, third = lease(worker), lease(worker), lease(worker)
    worker.keep("renew", [second], 100.0, 1.0)
    worker.keep("renew", [third], 0.0, 1.0)
    server.time = 31.0
    lease(worker)
    assert first.number not in server.having and list(server.having) == [second.number, third.number]


CALLS = {
    "lease": lambda worker, leased: lease(worker),
    "answer": lambda worker, leased: answer(worker, leased, 0, 1),
    "fail": lambda worker, leased: worker.fail(leased, 0, "too long", False, 1.0),
    "renew": lambda worker, leased: worker.keep("renew", [leased], 20.0, 1.0),
    "release": lambda worker, leased: worker.keep("release", [leased], 0.0, 1.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_after_a_call_that_is_interrupted_others_go_on_and_no_lease_is_listed_for_good(call):
    for interrupted in everywhere():
        server = OneServer()
        worker = PromptWorker(PromptServers(server))
        leased = lease(worker)
        place = interrupted(functools.partial(CALLS[call], worker, leased))
        thread, box = in_thread(lease, worker)
        thread.join(20.0)
        assert "value" in box, f"interrupted at {place}: {box.get('error', 'no end')!r}"
        CALLS[call](worker, leased)
        server.time += 60.0
        lease(worker)
        assert list(server.having) == [], place
