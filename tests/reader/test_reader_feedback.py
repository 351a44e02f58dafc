"""TD errors go to the servers that have their clients, in messages that are not too long; what is lost is counted."""

import numpy as np
import pytest

from memoire.errors import MemoireTimeout
from memoire.reader.directory import MAX_FEEDBACK_SAMPLES, FeedbackRouter, clients_of
from memoire.replay.batch import ID
from memoire.replay.parameters import Parameters
from memoire.wire import containers as unpack
from memoire.wire import messages
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part
from readerkit import SCHEMA, directory_of, message

pytestmark = pytest.mark.usefixtures("without_io")


def ids_of(*clients):
    ids = np.zeros(len(clients), ID)
    ids["client"][:, 0], ids["number"] = clients, np.arange(len(clients))
    return ids


def route(made, ids, **has):
    """What is sent, where each server has some clients."""
    servers = directory_of(*has).servers
    clients = [(servers[name], clients_of(ids_of(*numbers))) for name, numbers in has.items()]
    return made.route(ids, np.arange(len(ids), dtype=np.float32), SCHEMA, clients)


def numbers_in(piece):
    layout = layout_of(SCHEMA, Parameters(), ContainerKind.FEEDBACK)
    held = unpack.check(piece.payload, layout)
    return np.frombuffer(held.part(Part.NUMBER), "<i8").tolist()


def test_each_server_gets_the_samples_of_its_clients_and_the_first_one_those_of_both():
    made = FeedbackRouter()
    pieces = route(made, ids_of(7, 9, 7, 8), a=[7, 8], b=[8, 9])
    assert [(piece.server.name, piece.samples) for piece in pieces] == [("a", 3), ("b", 1)]
    assert [numbers_in(piece) for piece in pieces] == [[0, 2, 3], [1]] and made.lost == 0


def test_samples_of_clients_that_nobody_has_are_lost():
    made = FeedbackRouter()
    assert len(route(made, ids_of(1, 7, 2), a=[7], b=[3])) == 1 and made.lost == 2
    assert made.route(ids_of(1), np.zeros(1, np.float32), None, []) == [] and made.lost == 3


def test_a_long_batch_goes_in_several_messages():
    samples = 2 * MAX_FEEDBACK_SAMPLES + 1
    pieces = route(FeedbackRouter(), ids_of(*[7] * samples), a=[7])
    assert [piece.samples for piece in pieces] == [10923, 10923, 10923]
    assert sum(map(numbers_in, pieces), []) == list(range(samples))


def test_what_a_server_lost_or_did_not_answer_is_counted():
    made = FeedbackRouter()
    (piece,) = route(made, ids_of(7, 7, 7), a=[7])
    made.answered(piece, message(messages.Taken(samples=2, lost=1)))
    assert made.lost == 1
    made.answered(piece, MemoireTimeout("reply", "tcp://a", 1.0, ""))
    assert made.lost == 4
    made.answered(piece, message(messages.Summed()))
    assert made.lost == 7
