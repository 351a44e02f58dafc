"""Routes of requests and replies at a proxy, and its list of servers, without sockets and with a manual clock."""

import pytest

from memoire.errors import ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.models import model
from memoire.models.model import ModelStore
from memoire.proxy.requests import (
    HELD_FETCH_TIMEOUT,
    AnswerRequest,
    ForwardRequest,
    ModelCache,
    Replies,
    Requests,
)
from memoire.proxy.router import (
    MAX_REMOVED,
    MAX_SERVERS,
    RETIRE_TIMEOUT,
    SETTLE_INTERVAL,
    START_GRACE,
    Backend,
    ProxyCounts,
    Router,
    rendezvous,
)
from memoire.security.roles import OPEN, EnvelopedRequest
from memoire.wire import messages, types
from memoire.wire.frames import MessageHeader, encode, name_hash, parse, parse_header, parse_notice
from memoire.wire.receivers import Receivers, ReplyLimits

LIMITS = Limits()
RUN = name_hash("one")
HOME = name_hash
ADDRESS = [b"connection", b""]
"""Routing frames before a client's request."""


class Arriving:
    """Stub of the models that a proxy requests from one server address."""

    def __init__(self):
        self.coming, self.announcements, self.runs = set(), [], 0
        self.wanted, self.most = set(), 256

    def is_coming(self, topic, version):
        return (topic, version) in self.coming

    def follow_topic(self, topic):
        if topic not in self.wanted and len(self.wanted) >= self.most:
            raise ParameterError("topic", topic, "one of few")
        self.wanted.add(topic)

    def receive_versions(self, versions):
        self.announcements.append(versions)

    def begin_run(self):
        self.runs += 1


class Back(Backend):
    """Server address; if names are passed, the address has sent a WELCOME that lists these servers."""

    is_away, denial_reason = False, ""

    def __init__(self, *names, endpoint="tcp://a", run=RUN):
        super().__init__(endpoint)
        self.topics = Arriving()
        if names:
            self.apply_welcome(header(messages.Welcome, run=run), welcome(names[0], servers=list(names)))


def header(body, run=RUN, home=0, client=b"c" * 16, sequence=1):
    return MessageHeader(body.type, 0, client, run, home, sequence, 0, 0, 0)


def welcome(name="a", **facts):
    return messages.Welcome(**{"schema": "{}", "home_name": name} | facts)


def router_of(*backs, now=100.0):
    """Return a router that has the servers and homes of these addresses."""
    router = Router(now)
    router.backs = list(backs)
    for back in backs:
        router.update_homes(back)
    return router


def request(body, client=b"c" * 16, sequence=1, home="", run=RUN, payload=None):
    """Return a client's request in its envelope."""
    hashed = HOME(home) if home else 0
    frames = encode(body, client=client, sequence=sequence, home=hashed, run=run, payload=payload)
    return EnvelopedRequest(OPEN, ADDRESS, frames, True)


def header_of(asked):
    return parse_header(asked.message)[0]


pytestmark = pytest.mark.usefixtures("without_io")

# --- Destination of a request: its home server, a chosen server, the proxy's own models, or no server yet

NOW = 100.0
HELLO = messages.Hello(role="actor")
OTHER = name_hash("two")


def fetch(version=0, topic="policy", offset=0, size=0):
    return messages.Fetch(topic=topic, version=version, offset=offset, size=size)


class World:
    """Routing decisions of a proxy without sockets."""

    def __init__(self, *backs, now=NOW):
        self.router, self.counts = router_of(*backs, now=now), ProxyCounts()
        self.cache = ModelCache(self.router, LIMITS)
        self.requests = Requests(self.router, self.cache, LIMITS, self.counts)

    def take(self, asked, now=NOW):
        return self.requests.take(asked, header_of(asked), now)

    def put(self, back, version, body=b"weights", topic="policy", is_renewed=False, noticed=(0, 0)):
        published = model.Model(topic, version, body, False, model.make(topic, body, version).checksum)
        return self.cache.put(back, published, is_renewed=is_renewed, noticed=noticed), published


def chunk_of(step):
    """Return the message of a reply, and check that the reply has the envelope of its request."""
    assert isinstance(step, AnswerRequest) and step.frames[:2] == ADDRESS
    return parse(step.frames[2:])


def test_a_hello_says_what_client_and_proxy_both_take_of_replies():
    world = World(Back("a"))
    for takes, passed_on in (
        ({}, {}),
        ({"message_bytes": 1 << 40, "tail_bytes": 4096}, {"tail_bytes": 4096}),
        ({"message_bytes": 5, "request_bytes": 6}, {"message_bytes": 5, "request_bytes": 6}),
    ):
        step = world.take(request(messages.Hello(role="actor", name="me", takes=takes)))
        hello = parse(step.request.message).body
        assert (hello.takes, hello.role, hello.name) == (passed_on, "actor", "me")
        assert world.requests.receivers.limits_of(b"c" * 16) == ReplyLimits.from_hello(passed_on)
    introduction = parse(world.take(request(messages.Update(), home="a")).introduction[2:])
    assert introduction.body.takes == passed_on and introduction.header.sequence == 0, "its reply answers no request"


def test_a_request_for_a_server_that_is_not_here_is_refused_once_that_is_sure():
    world = World(Back("a"), Back())
    asked = request(messages.Update(), home="x")
    assert world.take(asked) is None and world.counts.homeless == 1
    with pytest.raises(ProtocolError, match="your server is not behind this proxy") as raised:
        world.take(asked, NOW + START_GRACE + 0.1)
    assert raised.value.code == "client" and world.counts.homeless == 2 and world.counts.requests == 0


def test_a_hello_for_a_server_that_may_still_come_is_given_to_no_other_one():
    late = Back()
    world = World(Back("a"), late)
    asked = request(HELLO, home="x")
    for seconds in (0.0, SETTLE_INTERVAL + 0.1, START_GRACE):
        assert world.take(asked, NOW + seconds) is None
    assert not world.requests.pending  # the client sends the request again
    assert world.take(asked, NOW + START_GRACE + 0.1) == ForwardRequest(world.router.backs[0], asked)
    late.names = ("x",)
    world.router.update_homes(late)
    assert world.take(asked, NOW) == ForwardRequest(late, asked)


def test_a_hello_is_refused_while_no_server_lets_this_proxy_in_or_a_welcome_is_longer_than_it_takes():
    back = Back()
    back.denial_reason = "No key."
    with pytest.raises(ProtocolError, match=r"No key\.") as raised:
        World(back).take(request(HELLO))
    assert raised.value.code == "denied"
    back = Back()
    back.receive_answer(Refused("tcp://a", "too_large", "WELCOME takes 7340 bytes"))
    back.denial_reason = back.refusal
    with pytest.raises(ProtocolError, match="this proxy's own limits are too low: WELCOME takes 7340 bytes") as raised:
        World(back).take(request(HELLO))
    assert raised.value.code == "too_large"


def test_a_stretch_that_a_model_does_not_have_is_refused():
    back = Back("a")
    world = World(back)
    world.put(back, 3)
    with pytest.raises(ProtocolError, match="offset 99 is beyond"):
        world.take(request(fetch(3, offset=99), home="a"))


def test_a_client_that_asks_for_any_version_has_heard_of_none():
    back = Back("a")
    world = World(back)
    asked = request(fetch(0), home="a")
    assert world.take(asked) == ForwardRequest(back, asked) and not back.topics.announcements
    assert back.topics.wanted == {"policy"}  # the client subscribes to the topic itself


def test_a_model_of_a_run_that_another_server_counts_is_asked_of_the_server():
    first, second = Back("a"), Back("b", run=OTHER)
    world = World(first, second)
    world.put(first, 3)
    asked = request(fetch(3), home="b", run=OTHER)
    assert world.take(asked) == ForwardRequest(second, asked) and not second.topics.announcements
    assert isinstance(world.take(request(fetch(3), home="b", run=0)), AnswerRequest)  # run 0 accepts any run


def test_a_request_for_a_model_on_its_way_is_answered_once_it_is_here_and_held_no_longer_than_its_first_copy():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3), ("policy", 4)}
    asked = request(fetch(3), home="a")
    assert world.take(asked) is None and world.take(asked) is None  # the second call repeats the request
    later = request(fetch(4), home="a", sequence=2)
    assert world.take(later) is None and world.take(later, NOW + 3.0) is None  # the first of both counts
    assert world.cache.next_time() == NOW + HELD_FETCH_TIMEOUT and world.counts.requests == 0
    _, stored = world.put(back, 3)
    assert world.cache.release_for_model(stored) == [asked]
    assert bytes(chunk_of(world.requests.release(asked, NOW)).payload) == b"weights"
    assert world.cache.overdue(NOW + HELD_FETCH_TIMEOUT - 0.1) == []
    assert world.cache.overdue(NOW + HELD_FETCH_TIMEOUT) == [later] and world.cache.next_time() == float("inf")
    assert world.requests.release(later, NOW + HELD_FETCH_TIMEOUT) == ForwardRequest(back, later)


def test_a_request_that_is_released_and_has_no_home_any_more_is_refused():
    back = Back("a")
    world = World(back)
    back.topics.coming = {("policy", 3)}
    asked = request(fetch(3), home="x")
    assert world.take(asked) is None
    with pytest.raises(ProtocolError, match="not behind this proxy"):
        world.requests.release(asked, NOW + HELD_FETCH_TIMEOUT)


def test_an_older_model_is_not_kept_and_the_notice_says_where_the_newest_came_from():
    first, second = Back("a"), Back("b", run=OTHER)
    world = World(first, second)
    assert world.put(first, 3, noticed=(1, 5))[0]
    assert not world.put(second, 3)[0] and not world.put(second, 2)[0]
    notice = parse_notice(world.cache.notice_frames(world.cache.store.newest("policy")))
    assert (notice.header.home, notice.body.epoch, notice.body.version) == (HOME("a"), 5, 3)
    is_new, newest = world.put(second, 4, noticed=(1, 6))
    notice = parse_notice(world.cache.notice_frames(newest, again=True))
    assert is_new and (notice.header.home, notice.header.run, notice.body.epoch) == (HOME("b"), OTHER, 6)
    assert notice.payload is None and parse_notice(world.cache.notice_frames(newest)).payload is not None


def test_a_publisher_that_began_again_counts_from_1_unless_the_newest_is_another_servers():
    first, second = Back("a"), Back("b")
    world = World(first, second)
    world.put(first, 3, b"old")
    assert not world.put(second, 1, b"new", is_renewed=True)[0]
    assert world.put(first, 1, b"new", is_renewed=True)[0]
    assert world.cache.store.newest("policy").body == b"new"
    assert world.put(second, 1, topic="fresh", is_renewed=True)[0]


def test_another_run_at_an_address_takes_its_models_away_and_no_others():
    first, second = Back("a"), Back("b")
    world = World(first, second)
    world.put(first, 3)
    world.put(second, 3, topic="other")
    world.cache.begin_run(first)
    assert world.cache.store.versions() == {"other": 3} and (first.topics.runs, second.topics.runs) == (1, 0)
    assert world.cache.has_run("policy", OTHER)  # the proxy has no model of this topic
    assert world.put(first, 1)[0]


# --- Replies of servers on their way through a proxy

OWN = messages.NodeEndpoints(request="tcp://me")


class WorldOfProxyReplies:
    """Replies of two servers, a and b, on their way through one proxy without sockets."""

    def __init__(self):
        self.first, self.second = Back("a", endpoint="tcp://a"), Back("b", endpoint="tcp://b")
        self.router, self.counts, self.store = router_of(self.first, self.second), ProxyCounts(), ModelStore(1 << 20)
        self.receivers = Receivers()
        self.replies = Replies(self.router, OWN, self.store, LIMITS, self.counts, self.receivers)

    def retire_first(self):
        self.router.relist(["tcp://b"], Back, 100.0)

    def take(self, frames, back=None):
        return self.replies.take(back or self.first, frames)


def reply(body, home="a", payload=None):
    return [*ADDRESS, *encode(body, client=b"c" * 16, home=HOME(home), sequence=4, payload=payload)]


def read(frames):
    assert frames[:2] == ADDRESS
    return parse(frames[2:])


def test_clients_of_a_server_that_was_taken_off_the_list_are_told_to_leave_it():
    world = WorldOfProxyReplies()
    frames = reply(messages.Updated(caches=3), payload=b"feedback")
    assert world.take(frames) is frames
    world.retire_first()
    updated = read(world.take(frames))
    assert (updated.body.leaving, updated.body.caches, bytes(updated.payload)) == (True, 3, b"feedback")
    assert world.take(reply(messages.Updated()), world.second) == reply(messages.Updated())
    refused = reply(messages.Refusal(code="busy", text="not now"))
    assert world.take(refused) is refused


def test_a_damaged_reply_is_refused_if_it_is_looked_into():
    world = WorldOfProxyReplies()
    frames = reply(welcome("a"))
    frames[2] = bytes(frames[2][:-1]) + bytes([frames[2][-1] ^ 1])
    assert world.take(frames) is None and world.take([b"no", b"envelope"]) is None
    assert world.counts.refused == {"checksum": 1, "frames": 1} and world.counts.replies == 2


def test_a_welcome_that_grew_beyond_what_its_client_takes_is_refused():
    world = WorldOfProxyReplies()
    world.receivers.register(b"c" * 16, ReplyLimits(tail_bytes=2000))
    assert read(world.take(reply(welcome("a")))).type is types.WELCOME
    refused = read(
        world.take(reply(welcome("a", software="s" * 250, models={f"{i} {'t' * 100}": 1 for i in range(20)})))
    )
    assert refused.body.code == "too_large" and "WELCOME, whose tail takes" in refused.body.text
    assert world.counts.refused == {"too_large": 1}


# --- WELCOMEs and notices of one server address


def learn(back, body, run=RUN):
    return back.apply_welcome(header(messages.Welcome, run=run), body)


def test_a_server_that_is_heard_of_again_is_not_the_oldest():
    back = Back()
    for name in ("stays", *(f"server-{number}" for number in range(MAX_SERVERS - 1)), "stays", "one more"):
        learn(back, welcome(name, epoch=5))
    assert learn(back, welcome("stays", epoch=6)).has_restarted
    assert not learn(back, welcome("server-0", epoch=6)).has_restarted, "forgotten in its place"


def test_a_notice_of_another_run_is_not_taken_and_has_hello_ask():
    back = Back("a")
    back.hello.due = 99.0
    assert back.is_notice_current(header(messages.Notice)) and back.is_notice_current(header(messages.Notice, run=0))
    assert not back.hello.is_due(98.0)
    assert not back.is_notice_current(header(messages.Notice, run=OTHER))
    assert back.hello.is_due(0.0)


def test_a_model_of_the_only_server_there_is_that_servers_in_its_newest_life():
    back = Back()
    assert back.publisher((3, 4)) == (3, 4)
    learn(back, welcome("a", epoch=7))
    assert back.publisher((3, 4)) == (HOME("a"), 7) and back.publisher((3, 8)) == (HOME("a"), 8)
    learn(back, welcome("b", servers=["a", "b"], epoch=9))
    assert back.publisher((3, 4)) == (3, 4)


def test_a_client_is_shown_as_many_pages_as_a_welcome_has_room_for():
    router = router_of(back := Back("a"))
    router.pages, back.pages = ["http://a:1"], [f"http://b:{port}" for port in range(1, 5000)]
    shown = router.welcome(welcome(), messages.NodeEndpoints(), {}, Limits())
    assert parse(encode(shown, client=b"c" * 16, sequence=1)).body.pages == [*router.pages, *back.pages[:4095]]


# --- Choice of servers for clients, and the lists of servers that clients receive


def listed(*names):
    """Return a router with one address for each server name; an address without a name has not answered."""
    return router_of(*(Back(*filter(None, [name]), endpoint=f"tcp://{place}") for place, name in enumerate(names)))


def relist(router, *endpoints, now=100.0):
    opened = []
    changed = router.relist(
        [f"tcp://{each}" for each in endpoints], lambda url: opened.append(url) or Back(endpoint=url), now
    )
    return changed, opened


def clients(count):
    return [number.to_bytes(16, "little") for number in range(count)]


def test_new_clients_are_shared_out_when_all_have_answered_or_had_their_time():
    router = listed("a", "")
    ready = [router.is_ready(100.0 + later) for later in (0.0, SETTLE_INTERVAL, SETTLE_INTERVAL + 0.1)]
    assert ready == [False, False, True]
    assert router.ready_at() == 100.0 + SETTLE_INTERVAL
    router.backs[1].names = ("b",)
    assert router.is_ready(100.0)
    silent = listed("", "")
    assert not silent.is_ready(999.0) and silent.ready_at() == float("inf")


def test_a_name_more_moves_only_the_clients_that_it_gets():
    before, after = (["a", "b"], ["a", "b", "c"])
    moved = [(rendezvous(client, before), rendezvous(client, after)) for client in clients(300)]
    assert {new for old, new in moved if old != new} == {"c"} and 60 < sum(old != new for old, new in moved) < 140


def test_an_address_that_was_taken_off_serves_its_clients_for_a_while_and_is_known_to_be_gone_then():
    router = listed("a", "b")
    old = router.backs[0]
    assert relist(router, 1, 0, now=200.0) == (False, []) and router.listed_at == 100.0, "only the order differs"
    assert relist(router, 1, 2, now=200.0) == (True, ["tcp://2"]) and router.listed_at == 200.0
    assert router.servers == ("b",) and router.retiring == {old: 200.0 + RETIRE_TIMEOUT} and old in router.all_addresses
    assert router.retire(200.0 + RETIRE_TIMEOUT - 0.1) == set() and router.homes[HOME("a")] is old
    assert not router.is_server_absent(HOME("a"), 200.0)  # tcp://2 has not answered
    assert router.retire(200.0 + RETIRE_TIMEOUT) == {old}
    assert HOME("a") not in router.homes and router.retiring == {} and old not in router.all_addresses
    assert router.is_server_absent(HOME("a"), 200.0) and not router.is_server_absent(HOME("x"), 200.0)


def test_of_very_many_homes_that_were_removed_only_the_newest_are_known():
    router = listed("a")
    router.backs[0].names = ("a", *(f"old-{number}" for number in range(MAX_REMOVED)))
    router.update_homes(router.backs[0])
    relist(router, 1)
    router.retire(200.0)
    unknown = [router.is_server_absent(HOME(name), 100.0) for name in ("a", "old-0", f"old-{MAX_REMOVED - 1}")]
    assert unknown == [False, True, True]  # tcp://1 has not answered, and may serve the forgotten home server


def test_a_welcome_on_its_way_to_a_client_has_this_proxys_addresses_list_and_limits():
    router = listed("a", "b", "")
    router.backs[0].leaving, router.backs[1].unmet = ("a",), ("tcp://further",)
    relist(router, 0, 2)
    received = messages.Welcome(
        schema="{}", servers=["b"], leaving=["z"], models={"policy": 5, "old": 2}, home_name="b", unmet=["tcp://x"],
        limits={"request_bytes": 10, "message_bytes": 1 << 50, "unheard_of": 7},
    )  # fmt: skip
    passed_on = router.welcome(received, OWN, {"policy": 4, "new": 1}, Limits())
    assert passed_on.endpoints == OWN and passed_on.servers == ["a"] and passed_on.leaving == ["z", "a", "b"]
    assert passed_on.models == {"policy": 5, "old": 2, "new": 1} and passed_on.unmet == ["tcp://2"]
    assert passed_on.limits == {"request_bytes": 10, "message_bytes": Limits().message_bytes, "unheard_of": 7}
    assert (passed_on.home_name, passed_on.schema) == ("b", "{}")


def test_a_model_is_found_by_version_and_checksum():
    back = Back("a")
    world = World(back)
    _, stored = world.put(back, 3)
    assert world.cache.find("policy", 3, stored.checksum) == stored
    assert world.cache.find("policy", 3, stored.checksum ^ 1) is world.cache.find("policy", 2, stored.checksum) is None
