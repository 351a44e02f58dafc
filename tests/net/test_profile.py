"""docs/sockets.md says what every socket has: each option is read back from each role, and from the nodes' own sockets."""

import re
from pathlib import Path

import pytest
import zmq

from memoire.limits import Limits
from memoire.net import sockets
from memoire.replay.parameters import Parameters
from memoire.wire import layout
from netkit import Cluster, KeepingContext, record, until

ROOT = Path(__file__).parents[2]
LIMITS = Limits(request_bytes=700_000, message_bytes=5_000_000)


def table(heading):
    """Rows of the first table under a heading, each a dictionary by column."""
    text = (ROOT / "docs" / "sockets.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in re.findall(r"^\|.*$", text.partition("\n## ")[0], re.M)
    ]
    return [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]


COMMON = {row["option"]: row["value"] for row in table("What every socket has")}
ROLES = {row["role"]: row for row in table("What each role has")}


def expected(text, usual=0):
    """ "message_bytes + 65536" in numbers, where a usual push has so many bytes."""
    sizes = {
        "largest push": sockets.largest_push(usual, LIMITS.message_bytes),
        "reply_bytes": LIMITS.reply_bytes,
        **vars(LIMITS),
    }
    return sum(sizes[word] if word in sizes else int(word) for word in text.split(" + "))


def make(role, context):
    longest = expected(ROLES[role]["MAXMSGSIZE"])
    return getattr(sockets, role)(context, *([] if longest == 1024 else [longest]))


def check(made, row, usual=(0,)):
    special = {option: row[option] for option in ("SNDHWM", "RCVHWM", "IMMEDIATE", "TCP_MAXRT")}
    for option, value in {**COMMON, **special}.items():
        low, _, high = value.partition("-")
        assert int(low) <= made.getsockopt(getattr(zmq, option)) <= int(high or low), option
    assert made.getsockopt(zmq.MAXMSGSIZE) in [expected(row["MAXMSGSIZE"], size) for size in usual]


@pytest.fixture
def context():
    with KeepingContext() as made:
        yield made


def test_the_page_names_every_role_and_every_option():
    source = (ROOT / "memoire" / "net" / "sockets.py").read_text(encoding="utf-8")
    made = set(re.findall(r"^def (\w+)\(context: Context.*\) -> Socket:", source, re.M))
    assert made == set(ROLES) | {"authenticator"}  # which only ZeroMQ itself talks to, inside of the process
    options = set(re.findall(r"zmq\.([A-Z0-9_]+): ", source))
    assert options == set(COMMON) | {"SNDHWM", "RCVHWM", "MAXMSGSIZE", "IMMEDIATE", "TCP_MAXRT"}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_what_the_page_says(context, role):
    made = make(role, context)
    assert made.getsockopt(zmq.TYPE) == getattr(zmq, ROLES[role]["type"])
    check(made, ROLES[role])


def test_the_sockets_of_living_nodes_have_it_too():
    cluster = Cluster()
    try:
        server = cluster.server(limits=LIMITS)
        usual = 0, layout.usual_bytes(server.schema, server.parameters)  # a proxy does not know what comes
        proxy = cluster.proxy([server], limits=LIMITS)
        client = cluster.client(proxy, limits=LIMITS)
        record(client)
        assert client.push_cache()
        until(lambda: server.total_caches == 1)
        cluster.reader([proxy], limits=LIMITS)
        by_type = {getattr(zmq, row["type"]): row for role, row in ROLES.items() if role != "plain_dealer"}
        seen = set()
        for made in cluster.context.__dict__["kept"]:
            if made.closed or made.getsockopt(zmq.TYPE) == zmq.PAIR:  # a monitor
                continue
            check(made, by_type[made.getsockopt(zmq.TYPE)], usual)
            seen.add(made.getsockopt(zmq.TYPE))
        assert seen == set(by_type)
    finally:
        cluster.close()


def marks(context, option, kind):
    """Of the sockets of this kind that are open, one after the other."""
    living = [made for made in context.__dict__["kept"] if not made.closed]
    return [made.getsockopt(option) for made in living if made.getsockopt(zmq.TYPE) == kind]


@pytest.mark.parametrize(("cache_size", "messages"), [(64, 64), (100_000, 2)])
def test_the_mark_of_sockets_for_caches_follows_from_their_size(cache_size, messages):
    cluster = Cluster()
    try:
        server = cluster.server(parameters=Parameters(cache_size=cache_size))
        cluster.client(server)
        assert (
            marks(cluster.context, zmq.RCVHWM, zmq.PULL) == marks(cluster.context, zmq.SNDHWM, zmq.PUSH) == [messages]
        )
    finally:
        cluster.close()


def test_where_a_cache_may_have_any_size_there_is_room_for_two():
    cluster = Cluster()
    try:
        cluster.client(cluster.server(storage="episodes", byte_limit=1 << 24))
        assert marks(cluster.context, zmq.RCVHWM, zmq.PULL) == marks(cluster.context, zmq.SNDHWM, zmq.PUSH) == [2]
    finally:
        cluster.close()


def test_nobody_else_makes_a_socket_or_sets_its_options():
    """Apart from subscriptions, and from the sockets on which ZeroMQ tells of connections."""
    found = {}
    for path in (ROOT / "memoire").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        uses = [
            use
            for use in re.findall(r"setsockopt\((zmq[\w. ]+)|context\.(socket)\(", text)
            if not use[0].startswith("zmq.SUBSCRIBE")
        ]
        if uses and path.name not in ("sockets.py", "context.py"):
            found[path.name] = len(uses)
    assert found == {}
