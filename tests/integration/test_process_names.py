"""Names that people give to actors, learners and proxies, from where they are given to where they are shown."""

import contextlib
import json
import urllib.request

import msgspec
import pytest

from memoire.arguments import process_name
from memoire.errors import ParameterError
from memoire.nodes.http import NodePages
from memoire.server.state import ClientNames
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget
from netkit import Cluster, record, until


@pytest.fixture
def cluster():
    with contextlib.closing(Cluster()) as made:
        yield made


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "actor-7d9f-x2x"}


@pytest.mark.parametrize(
    ("given", "surroundings", "name"),
    [
        ("actor-3", {"MEMOIRE_NAME": "other"}, "actor-3"),
        ("", {"MEMOIRE_NAME": "other"}, ""),
        (None, {"MEMOIRE_NAME": "from.outside"}, "from.outside"),
        (None, POD | {"MEMOIRE_NAME": "from.outside"}, "from.outside"),
        (None, POD, "actor-7d9f-x2x"),
        (None, {"HOSTNAME": "laptop"}, ""),
        (None, {}, ""),
    ],
)
def test_a_name_is_the_one_that_was_given_or_that_of_the_pod(given, surroundings, name):
    assert process_name(given, surroundings) == name


@pytest.mark.parametrize("wrong", ["a b", "-a", "é", "a,b", "x" * 254, "a\n", 7, b"a"])
def test_a_name_that_could_not_stand_in_a_line_is_refused_with_what_is_expected(wrong):
    with pytest.raises(ParameterError, match="^name must be 1 to 253 letters, digits") as refused:
        process_name(wrong, {})
    assert refused.value.name == "name"


def test_a_wrong_name_of_the_environment_is_refused_under_the_name_of_the_variable():
    with pytest.raises(ParameterError, match=r"^\$MEMOIRE_NAME must be"):
        process_name(None, {"MEMOIRE_NAME": "a b"})


@pytest.mark.parametrize(("name", "is_taken"), [("", True), ("a", True), ("x" * 253, True), ("x" * 254, False), ("a b", False),
                                                ("a\n", False), ("\x1b[2J", False), (".a", False)])  # fmt: skip
def test_the_wire_takes_no_other_name(name, is_taken):
    packed = msgspec.msgpack.encode({"name": name})
    if is_taken:
        assert msgspec.msgpack.decode(packed, type=messages.Hello).name == name
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(packed, type=messages.Hello)


def test_names_reach_servers_pages_and_lines(cluster):
    server = cluster.server()
    proxy = cluster.proxy([server], name="front-1")
    client = cluster.client(proxy, name="actor-3")
    other = cluster.client(proxy, name="")
    reader = cluster.reader([proxy], name="learner-0")
    record(client, episodes=1, length=5)
    client.log("hello")
    client.update(20.0)
    other.update(20.0)
    until(lambda: server.stats().log_lines == 1)
    until(lambda: server.stats().learners)
    assert {row.client: row.name for row in server.clients()} == {
        client.client_id.hex(): "actor-3",
        other.client_id.hex(): "",
    }
    assert [learner.name for learner in server.stats().learners] == ["learner-0"]
    assert (client.stats().name, reader.stats().name, proxy.stats().name) == ("actor-3", "learner-0", "front-1")
    assert "actor-3" in repr(client) and "front-1" in repr(proxy)
    with NodePages("127.0.0.1:0", server) as pages:
        with urllib.request.urlopen(f"{pages.url}/logs", timeout=60) as answer:
            (row,) = json.load(answer)["rows"]
    assert (row["name"], row["text"]) == ("actor-3", "hello")
    client.close()
    assert server.client_name(client.client_id) == "actor-3"  # its lines are still there


def test_a_server_remembers_the_newest_names_of_many_clients():
    names = ClientNames(ByteBudget(1 << 30).holder("names"))
    for number in range(1 << 14):
        names.note(number.to_bytes(16, "big"), f"actor-{number}")
    first, second, new = (number.to_bytes(16, "big") for number in (0, 1, 1 << 14))
    names.note(first, "")  # says nothing
    assert names.of(first) == "actor-0"
    names.note(first, "again")
    names.note(new, "newest")
    assert [names.of(each) for each in (first, second, new)] == ["again", "", "newest"]
