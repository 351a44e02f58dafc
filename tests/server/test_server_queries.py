"""What a server knows of its runs, asked of a dispatcher without a socket; and the figures that follow from it."""

import pytest

from memoire.accounting.logbook import MAX_FOUND_LINES, LineFilter
from memoire.accounting.merge import key_of, merge
from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.models.model import make
from memoire.server.dispatch import Dispatcher
from memoire.server.stats import KNOWN_RUNS, Queries, figures_of, table_stats
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import SCHEMA

ACTORS = [bytes([number]) * 16 for number in (3, 1, 2)]


class Served:
    """A dispatcher with a clock that the test sets, and what is asked of it."""

    def __init__(self):
        self.now = 1000.0
        tables = Tables({"default": Table(SCHEMA)}, lambda name, table: Pool(table.schema, table.parameters, seed=0))
        self.dispatcher = Dispatcher(
            tables=tables, run="one", name="home", limits=Limits(), clock=lambda: self.now, epoch=7
        )
        self.queries = Queries(self.dispatcher, None)
        self.number = 0

    def ask(self, client, body):
        self.number += 1
        frames = encode(body, client=client, sequence=self.number)
        return self.dispatcher.answer(parse(frames)).body

    def report(self, client, **facts):
        return self.ask(client, messages.Update(**facts))

    def log(self, client, *texts):
        lines = [messages.Line(number=n, time=self.now, label=5, text=text) for n, text in enumerate(texts, 1)]
        return self.report(client, lines=lines)


@pytest.fixture
def served():
    return Served()


class Folder:
    """A state folder that is asked for lines."""

    def __init__(self):
        self.asked = []

    def search(self, run, wanted, *, most, newest_first):
        self.asked.append((run, wanted, most, newest_first))
        return iter(["a line"])


def test_totals_are_of_the_run_that_is_asked_for(served):
    served.report(ACTORS[0], episodes=1, steps=10)
    served.dispatcher.begin_run("two")
    served.report(ACTORS[1], episodes=2, steps=5)
    assert (served.queries.totals(None).steps, served.queries.totals("one").steps) == (5, 10)
    assert [facts.name for facts in served.queries.runs()] == ["one", "two"]


def test_a_client_is_shown_with_the_models_that_were_the_newest_when_it_reported(served):
    served.dispatcher.models.put(make("policy", b"weights", 4))
    served.report(ACTORS[0], steps=1, models={"policy": 3})
    served.dispatcher.models.put(make("policy", b"weights", 9))
    (client,) = served.queries.clients("", None)
    assert (client.models, client.newest_models) == ({"policy": 3}, {"policy": 4})


def test_totals_add_what_drained_servers_have_brought(served):
    served.report(ACTORS[0], episodes=1, steps=10)
    other = Served()
    other.dispatcher.name, other.dispatcher.home = "other", 99
    other.report(ACTORS[1], episodes=1, steps=4)
    served.dispatcher.inherit("one", False, merge(*other.dispatcher.pages(other.dispatcher.runs.current)))
    assert served.queries.totals(None).steps == 14
    assert len(served.queries.accounts(None).rows) == 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda queries: queries.totals("three"),
        lambda queries: queries.accounts("three"),
        lambda queries: queries.account_page("three", b"", 0.0, 10),
        lambda queries: queries.lines(0, 10, "three"),
        lambda queries: queries.search(LineFilter(), "three", most=1, newest_first=False),
    ],
)
def test_a_run_that_there_is_not_is_refused_with_those_that_there_are(served, ask):
    served.dispatcher.begin_run("two")
    with pytest.raises(ParameterError, match="one of 'one', 'two'"):
        ask(served.queries)


def test_an_error_names_the_newest_runs_alone(served):
    for number in range(KNOWN_RUNS + 5):
        served.dispatcher.begin_run(f"r{number}")
    with pytest.raises(ParameterError) as refused:
        served.queries.totals("none")
    named = refused.value.expected.split(", ")
    assert len(named) == KNOWN_RUNS and named[-1] == f"'r{KNOWN_RUNS + 4}'"


def test_accounts_say_whose_they_are_and_when(served):
    served.report(ACTORS[0], steps=10, episodes=1)
    served.dispatcher.finish()
    told = served.queries.accounts(None)
    assert (told.run, told.runs, told.finished, told.durable) == ("one", ("one",), True, False)
    assert (told.epoch, told.time, told.rows["steps"].tolist()) == (7, 1000.0, [10])


def test_accounts_come_in_pages_in_the_order_of_their_keys(served):
    for actor in ACTORS:
        served.report(actor, steps=1, episodes=1)
    first, more = served.queries.account_page(None, b"", 0.0, 2)
    assert more and [row["client"].tobytes()[0] for row in first.rows] == [1, 2]

    rest, more = served.queries.account_page(None, key_of(first.rows[-1]), 0.0, 2)
    assert not more and [row["client"].tobytes()[0] for row in rest.rows] == [3]


def test_accounts_that_were_heard_lately_come_whole(served):
    served.report(ACTORS[0], steps=1, episodes=1)
    served.now += 10.0
    for actor in ACTORS[1:]:
        served.report(actor, steps=1, episodes=1)
    told, more = served.queries.account_page(None, b"", 1005.0, 1)
    assert not more and sorted(row["client"].tobytes()[0] for row in told.rows) == [1, 2]
    told, more = served.queries.account_page(None, b"", served.now - Limits().client_timeout, 1)
    assert more and len(told.rows) == 1  # so long ago that some may have left memory: page by page


def test_clients_come_in_the_order_of_their_ids_guests_among_them(served):
    served.report(ACTORS[0], steps=1, episodes=1)
    served.ask(ACTORS[1], messages.Hello(role="actor", host="here"))
    clients = served.queries.clients("", None)
    assert [each.client for each in clients] == [ACTORS[1].hex(), ACTORS[0].hex()]
    assert (clients[0].host, clients[1].steps, clients[1].table) == ("here", 1, "default")
    assert [each.client for each in served.queries.clients("", 1)] == [ACTORS[1].hex()]
    assert [each.client for each in served.queries.clients(ACTORS[1].hex(), None)] == [ACTORS[0].hex()]


def test_closed_episodes_come_with_their_client_and_from_a_number_on(served):
    ended = [messages.Ended(number=n, time=1.0, length=n, returned=0.0) for n in (1, 2, 3)]
    served.report(ACTORS[0], episodes=3, steps=6, ended=ended)
    assert [(client, each.length) for client, each in served.queries.episodes(2)] == [
        (ACTORS[0].hex(), 2),
        (ACTORS[0].hex(), 3),
    ]
    run, first, found = served.queries.episodes_after(1, 1)
    assert (run, first, [(client, each.length) for client, each in found]) == ("one", 2, [(ACTORS[0].hex(), 2)])
    with pytest.raises(ParameterError, match="after"):
        served.queries.episodes_after(-1, 1)


def test_lines_in_memory_are_searched_from_either_end(served):
    served.log(ACTORS[0], "up", "down", "up\nagain")
    assert [entry.line.text for entry in served.queries.lines(1, 10, None)] == ["down", "up\nagain"]
    wanted = LineFilter(text="up")
    found = served.queries.search(wanted, None, most=10, newest_first=True)
    assert [entry.line.text for entry in found] == ["up\\nagain", "up"]
    assert [entry.line.text for entry in served.queries.search(wanted, None, most=1, newest_first=False)] == ["up"]


def test_a_state_folder_searches_all_of_its_lines(served):
    folder = Folder()
    queries, wanted = Queries(served.dispatcher, folder), LineFilter(text="up")
    assert queries.search(wanted, None, most=3, newest_first=True) == ["a line"]
    assert folder.asked == [("one", wanted, 3, True)]


@pytest.mark.parametrize("most", [0, MAX_FOUND_LINES + 1])
def test_a_page_of_lines_has_bounds(served, most):
    with pytest.raises(ParameterError, match=f"from 1 to {MAX_FOUND_LINES}"):
        served.queries.search(LineFilter(), None, most=most, newest_first=False)


def figures(served):
    table = table_stats(served.dispatcher, served.dispatcher.tables.first, batches=3, waited=0.5, freshness=None)
    return figures_of(served.dispatcher, {"default": table, "twin": table}, {"loss": 2.0})


def test_figures_of_a_server_are_sums_over_its_tables(served):
    found = figures(served)
    assert (found["batches"], found["waited"]) == (6, 1.0)
    assert found["byte_limit"] == 2 * served.dispatcher.tables.first.pool.byte_limit
    assert found["learner_scalars"] == {"loss": 2.0} and found["run"] == "one" and not found["durable"]


def test_clients_are_active_silent_or_gone(served):
    served.report(ACTORS[0], steps=1, episodes=1)
    served.ask(ACTORS[1], messages.Hello(role="actor"))
    served.now += Limits().client_timeout + 1.0
    served.report(ACTORS[2], steps=1, episodes=1)
    assert figures(served)["presence"] == {"active": 1, "silent": 2, "gone": 0}
    served.report(ACTORS[2], steps=1, episodes=1, leaving=True)
    found = figures(served)
    assert found["presence"] == {"active": 0, "silent": 2, "gone": 1}
    assert (found["guests"], found["tables"]["default"].steps) == (1, 2)
