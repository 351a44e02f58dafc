"""Largest replies of every kind: they come in pages, or are refused by name before anything has changed.

A value that a server acknowledges does arrive. All limits in this file are small.
"""

import itertools
import time

import msgspec
import numpy as np
import pytest

import memoire
import readerkit
from dispatchkit import made_dispatcher
from memoire.errors import EntryError, ParameterError, ProtocolError, Refused
from memoire.keyed import handlers
from memoire.keyed import messages as keyed
from memoire.limits import Limits
from memoire.models.model import make, notice_of
from memoire.prompts import messages as prompt_messages
from memoire.prompts.calls import PromptCalls
from memoire.prompts.columns import check_requests
from memoire.replay.memory import Memory
from memoire.replay.schema import RowSchema
from memoire.rl.jobs import JobContent, Jobs, JobService
from memoire.tables.base import TakeRequest
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes.pool import EpisodePool
from memoire.tables.rollouts import fragments
from memoire.tables.rollouts.far import RolloutTaker
from memoire.tables.rollouts.fragments import packed, unpacked
from memoire.wire import containers, messages, types
from memoire.wire.frames import encode, parse, table_number
from memoire.wire.receivers import ReplyLimits, ReplyPage
from memoire.wire.rows import ACCOUNT, CLIENT_COUNTS, unpack_accounts, unpack_sums
from poolkit import held_of
from rolloutkit import TakesServer, fragment
from serverkit import dispatcher_of, tables_of

SMALL = Limits.of(message_bytes=4096, request_bytes=2048, tail_bytes=2048)
"""Limits of the client that receives the replies."""
LONG = "\u00e9" * 200
"""Name of 400 bytes in UTF-8."""


class SmallEnd:
    """Client of one server without sockets; requests and replies pass as frames, within the client's limits."""

    names = itertools.count(1)

    def __init__(self, dispatcher, limits=SMALL, table="", role="prompts"):
        self.dispatcher, self.limits, self.name = dispatcher, limits, table
        self.client = next(self.names).to_bytes(16, "big")
        self.number, self.replies = itertools.count(1), []
        self.told = self.one(messages.Hello(role=role, table=table, takes=_takes(limits))).body

    def one(self, body, payload=None, **header):
        """Return the reply to a request, or its refusal; an error means that the client would drop the reply."""
        facts = {"table": table_number(self.name) if self.name else 0} | header
        sequence = facts.pop("sequence", None) or next(self.number)
        asked = parse(encode(body, client=self.client, sequence=sequence, payload=payload, **facts))
        reply = self.dispatcher.answer(asked)
        came = parse(self.dispatcher.frames_of(asked.header, reply, reply.payload), self.limits)
        self.replies.append(came)
        if isinstance(came.body, messages.Refusal):
            return Refused("home", came.body.code, came.body.text)
        return came

    # Methods for the calls of prompts

    def ask(self, requests, deadline):
        return {name: self.one(request.body, request.payload) for name, request in requests.items()}

    def table(self, deadline):
        return self.name, self.dispatcher.tables.named(self.name).schema

    def servers(self):
        return ["home"]

    def unanswered_addresses(self):
        return []

    draining_servers = unanswered_addresses

    def addresses_text(self):
        return "home"

    problem = addresses_text

    def now(self):
        return time.monotonic()

    def pause(self, seconds):
        raise AssertionError("nothing has to be waited for")


def _takes(limits):
    return {name: int(limits.get(name)) for name in ("message_bytes", "request_bytes", "tail_bytes")}


# ------------------------------------------------------------------------------------------------------------ prompts


def prompts_of(limits=SMALL, columns=None, **settings):
    """Return two clients of a prompt table, with small and with default limits, and the end of the first."""
    columns = columns or {"tokens": (np.int32, (None,)), "reward": np.float32}
    table = memoire.Table(columns, storage="prompts", **{"group": 3, **settings})
    dispatcher = dispatcher_of(tables_of(t=table))
    ends = SmallEnd(dispatcher, limits, "t"), SmallEnd(dispatcher, Limits(), "t")
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


def test_an_answer_that_is_amended_between_its_parts_comes_as_it_is_then():
    (small, usual), end = prompts_of(required=("reward",))
    usual.add({0: b""}, "d")
    (lease,) = usual.lease(1)
    usual.answers(lease, {index: {"tokens": np.zeros(5000, np.int32)} for index in range(3)})
    ask, amended = end.ask, []

    def ask_and_amend(requests, deadline):
        body = requests["home"].body
        if body.offset and body.after == 2 * len(amended):
            amended.append(len(end.replies))
            for index in range(3):
                assert usual.amend(("d", 0, 0), index, {"tokens": np.full(4000, len(amended), np.int32)})
        return ask(requests, deadline)

    end.ask = ask_and_amend
    answers = small.fetch([("d", 0, 0)], ["tokens"])["d", 0, 0]
    assert len(amended) == 2 and len(end.replies) > amended[1] + 20
    assert [set(each.tolist()) for each in answers["tokens"]] == [{2}] * 3


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


def test_an_answer_comes_in_pieces_whatever_its_columns_are_and_a_column_that_fits_into_none_is_refused_by_name():
    columns = {"tokens": (np.int32, (None,)), "none": (np.int32, (None,)), "a": (np.uint8, (1500,))}
    columns |= dict.fromkeys("bc", (np.uint8, (1400,)))
    (small, usual), end = prompts_of(columns=columns, group=1)
    usual.add({0: b""}, "d")
    (lease,) = small.lease(1)
    answer = {name: np.full(shape[0], ord(name), np.uint8) for name, (_, shape) in columns.items() if len(name) == 1}
    answer |= {"tokens": np.arange(3000, dtype=np.int32), "none": np.zeros(0, np.int32)}
    end.limits = Limits.of(request_bytes=1999)
    with pytest.raises(
        EntryError, match="column 'a' stores values of at most 1499 bytes, .*request_bytes.* 1500 bytes"
    ):
        small.answers(lease, {0: answer})
    assert small.counts()["leased"] == 1
    with pytest.raises(ParameterError, match="request_bytes must be at least 2000: a value of column 'a' of table 't'"):
        check_requests("t", RowSchema(columns), 1999)
    check_requests("t", RowSchema(columns), 2000)
    end.limits = SMALL
    assert small.answers(lease, {0: answer}) == [True] and usual.counts()["ready"] == 1
    step = usual.draw(0, 1)
    assert step["tokens"][0].tolist() == list(range(3000)) and step["none"].lengths.tolist() == [0]
    assert all((step[name] == ord(name)).all() and step[name].shape == (1, *columns[name][1]) for name in "abc")


def test_a_draw_that_asks_for_no_pages_is_refused_before_anything_is_drawn():
    (_, usual), end = prompts_of()
    usual.add(dict.fromkeys(range(9), b"x"), LONG)
    answer_all(usual, lambda index, answer: 1)
    asked = prompt_messages.Groups(call="draw", session="a", count=9, wanted=9)
    refused = end.one(asked)
    assert refused.code == "too_large" and "9 groups takes" in refused.text
    assert usual.counts()["ready"] == 9
    assert len(end.one(prompt_messages.Groups(call="draw", session="a", count=2, wanted=2)).body.groups) == 2


# ---------------------------------------------------------------------------------------------------------- samples


def pool_of(clients, entries=20):
    """Return a server of caches with this number of clients, which hold a few samples each, and its pool."""
    table = memoire.Table(readerkit.SCHEMA, parameters=readerkit.PARAMETERS)
    dispatcher = dispatcher_of(tables_of(t=table))
    memory = Memory(readerkit.SCHEMA, entries, readerkit.PARAMETERS, seed=1)
    memory.open(0)
    for step in range(entries):
        memory.add(0, (np.full(3, step, np.float32), 1, 1.0))
    memory.close(0)
    pool = dispatcher.tables.named("t").pool
    for client in range(clients):
        pool.add(
            (client << 32).to_bytes(16, "big"), 1, containers.check(containers.build(memory, 8, now=0.0), pool.layout)
        )
    return dispatcher, pool


def test_sums_of_more_clients_than_a_reply_has_room_for_come_in_pages_and_batches_are_drawn_of_all():
    dispatcher, _ = pool_of(200)
    end = SmallEnd(dispatcher, SMALL, "t", "reader")
    owners, after, is_whole = [], b"", False
    while not is_whole:
        page = end.one(messages.Sums(reserve=8, after=after)).body
        rows = unpack_sums(page.clients)
        assert 1 <= len(rows) <= 16
        owners += [row["client"].tobytes() for row in rows]
        after, is_whole = owners[-1], page.is_whole
    assert owners == [(client << 32).to_bytes(16, "big") for client in range(200)]
    world = readerkit.World({"home": end}, batch_size=8)
    end.answer = end.one
    batches = [each.batch(readerkit.SCHEMA, None) for each in world.run(12)]
    assert len(batches) == 12 and len(np.unique(np.concatenate([each.ids["client"] for each in batches]), axis=0)) > 40


def test_a_batch_that_fits_into_no_reply_ends_the_call_that_waits_for_it_and_takes_no_sample():
    dispatcher, pool = pool_of(40)
    end = SmallEnd(dispatcher, Limits(message_bytes=2048), "t", "reader")
    end.answer = end.one
    world = readerkit.World({"home": end}, batch_size=256)
    assert world.run(1) == [] and not world.begin()
    with pytest.raises(Refused, match="DRAWN with 256 samples, whose payload takes .* has room for 2048") as caught:
        world.prefetch.check()
    assert caught.value.code == "too_large" and pool.stats().drawn == 0
    world.prefetch.resize(8)
    assert len(world.run(1)) == 1


def test_a_reader_that_asks_for_no_pages_is_refused_before_a_sample_is_taken():
    dispatcher, pool = pool_of(40)
    end = SmallEnd(dispatcher, SMALL, "t", "reader")
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["count"] = 1
    for body in (messages.Sums(), messages.Draw(counts=counts.tobytes())):
        assert end.one(body).code == "too_large" and pool.stats().drawn == 0
    assert end.one(messages.Draw(counts=counts.tobytes(), in_pages=True)).payload is not None


RAGGED = {"obs": (np.float32, (None,)), "reward": np.float32}
FORMS = {
    "caches of frame stacks": (readerkit.SCHEMA, {"frame_stack": 4}),
    "caches of ragged columns": (RAGGED, {}),
    "caches that are drawn again": (RAGGED, {"reuse_cache": True}),
    "caches that are drawn again two times": (RAGGED, {"reuse_cache": True, "max_times_sampled": 2}),
    "episodes": (RAGGED, {}),
    "episodes that are drawn two times": (RAGGED, {"max_times_sampled": 2}),
    "sequences": (RAGGED, {"sequence_length": 4}),
}


def server_with(form):
    """Return a server with 20 or 30 entries of each of 3 clients in one of the forms, and its pool."""
    schema, facts = FORMS[form]
    storage, body, pack = "episodes", messages.EpisodePush(cut=True), episode_of
    if form.startswith("caches"):
        storage, body, pack = "caches", messages.Cache(), caches_of
    table = memoire.Table(schema, storage=storage, parameters=memoire.Parameters(cache_size=16, **facts))
    dispatcher = dispatcher_of(tables_of(t=table))
    pool = dispatcher.tables.named("t").pool
    for client in range(3):
        name = (client << 32).to_bytes(16, "big")
        for number, payload in enumerate(pack(pool)):
            pool.add(name, number + 1, pool.check(body, payload))
    return dispatcher, pool


def caches_of(pool):
    memory = Memory(pool.schema, 30, pool.parameters, seed=1)
    memory.open(0)
    for step in range(30):
        memory.add(0, (np.full(step % 7, step, np.float32), 1.0) if pool.schema.ragged else (np.full(3, step), 1, 1.0))
    memory.close(0)
    return [containers.build(memory, now=0.0) for _ in range(3)]


def episode_of(pool):
    lengths = np.arange(20, dtype=np.int32) % 7

    def fill(name, target):
        target.view(np.float32)[:] = 1.0

    facts = np.ones(20, np.float32), np.zeros(20, np.float32), np.zeros(20, np.int64), {"obs": lengths}
    return [containers.pack_episode(pool.schema, fill, *facts, now=0.0)]


def counted(pool):
    """Return everything that a draw changes, except the generator of episodes."""
    facts = [pool.stats(), pool.entries()]
    if isinstance(pool, EpisodePool):
        return [*facts, pool.memory.draws_left, pool.memory.sums()]
    held = held_of(pool)
    clients = [(client.id, client.unused, client.held, client.reserved, client.caches) for client in held]
    caches = [(cache.drawn, cache.left_over()) for client in held for cache in client.queued()]
    return [*facts, pool.state(), clients, caches]


@pytest.mark.parametrize("form", FORMS)
def test_a_draw_that_is_refused_spends_no_sample_and_changes_no_count(form):
    ends, asks = [], []
    for dispatcher, _ in (server_with(form), server_with(form)):
        ends.append(SmallEnd(dispatcher, Limits(), "t", "reader"))
        rows = unpack_sums(ends[-1].one(messages.Sums(reserve=96)).body.clients)
        counts = np.zeros(len(rows), CLIENT_COUNTS)
        counts["client"], counts["count"] = rows["client"], 60 // len(rows)
        asks.append(messages.Draw(counts=counts.tobytes(), reserve=96, in_pages=True))
    (end, twin), (asked, of_twin) = ends, asks
    pool, size = end.dispatcher.tables.named("t").pool, len(twin.one(of_twin).payload)
    before = counted(pool)
    for end.limits in (Limits(message_bytes=size // 3), Limits(message_bytes=size - 1)):
        end.one(messages.Hello(role="reader", table="t", takes=_takes(end.limits)))
        refused, taken = end.one(asked), pool.stats().drawn
        if isinstance(pool, EpisodePool) and not isinstance(refused, Refused):
            break  # another draw of episodes may be smaller
        assert refused.code == "too_large" and "60 samples, whose payload takes" in refused.text and taken == 0
        assert counted(pool) == before
    end.limits = Limits(message_bytes=size if isinstance(pool, Pool) else 2 * size)
    end.one(messages.Hello(role="reader", table="t", takes=_takes(end.limits)))
    drawn = end.one(asked) if taken == 0 else refused
    assert containers.samples_of(np.frombuffer(drawn.payload, np.uint8)) == pool.stats().drawn == 60


# --------------------------------------------------------------------------------------------------------- rollouts


def test_rollouts_come_in_pages_of_what_their_reader_takes():
    served = TakesServer()
    for first in range(0, 1000, 20):
        served.push(first.to_bytes(16, "big"), range(first, first + 20))
    end, numbers = SmallEnd(served.dispatcher, SMALL, "rollouts", "reader"), []
    while len(numbers) < 1000:
        reply = end.one(fragments.Take(steps=1000 - len(numbers)))
        parts = unpacked(reply.body.fragments, reply.payload, served.pool.schema, now=5.0, limits=SMALL)
        numbers += [int(number) for part in parts for number in part.episode.columns["obs"]]
    assert numbers == list(range(1000)) and len(end.replies) > 10


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_fragment_that_fits_into_no_reply_comes_in_parts(is_exact):
    served = TakesServer()
    served.push(b"a" * 16, range(500), terminated=True)
    served.push(b"b" * 16, range(500, 510))
    end, came = SmallEnd(served.dispatcher, SMALL, "rollouts", "reader"), []
    while sum(map(len, came)) < 510:
        reply = end.one(fragments.Take(steps=510 - sum(map(len, came)), exact=is_exact))
        came += unpacked(reply.body.fragments, reply.payload, served.pool.schema, now=5.0, limits=SMALL)
    episodes = [each.episode for each in came]
    assert np.concatenate([each.columns["obs"] for each in episodes]).tolist() == list(range(510)) and len(came) > 9
    *_, last, behind = came
    assert [each.client for each in came] == [b"a" * 16] * (len(came) - 1) + [b"b" * 16] and len(behind) == 10
    assert last.episode.terminated and not any(each.terminated or not each.is_cut for each in episodes[:-2])
    for part, following in itertools.pairwise(episodes[:-1]):
        assert part.final_state["obs"] == following.columns["obs"][0]
    assert served.pool.stats().drawn == 510 and served.pool.entries() == 0


def test_an_entry_that_fits_into_no_reply_is_refused_where_it_is_pushed_and_else_stays_for_other_learners():
    served = TakesServer()
    served.push(bytes(16), range(500))
    tiny = Limits(message_bytes=256)
    takes = RolloutTaker(readerkit.directory_of("home"), tiny)
    end = SmallEnd(served.dispatcher, tiny, "rollouts", "reader")
    takes.set_request(TakeRequest(500))
    (order,) = takes.due_requests(1.0)
    takes.receive_answer(order, end.one(order.body), [], 1.0)
    assert takes.due_requests(10.0) == []
    with pytest.raises(Refused, match="a fragment of 1 entries, whose payload takes .* has room for 256"):
        takes.take({})
    assert served.pool.entries() == 500 and served.pool.stats().split == 0
    rollout = fragment(bytes(16), range(3))
    payload = packed([rollout], served.pool.schema, now=0.0, wall=0.0)[1]
    body = messages.EpisodePush(has_final=True, cut=True, bootstrap=[0.5])
    assert served.pool.check(body, payload, limits=Limits(message_bytes=1024)).samples == 3
    with pytest.raises(ProtocolError, match="an entry and its next state take .* bytes") as caught:
        served.pool.check(body, payload, limits=Limits(message_bytes=len(payload)))
    assert caught.value.code == "too_large"


def test_a_row_that_no_reply_has_room_for_is_refused_and_names_the_limit():
    page = ReplyPage(ReplyLimits(tail_bytes=2048, message_bytes=500), types.DRAWN, b"s" * 16)
    for row, payload, limit in (("x" * 2048, 0, "tail_bytes"), ("x", 501, "message_bytes")):
        with pytest.raises(ProtocolError, match=rf"DRAWN with a row, whose .* bytes.*{limit}"):
            page.count_row("a row", row, payload)
    assert page.is_empty and page.count_row("a row", "x" * 1200, 500) and not page.count_row("another", "x", 1)


# -------------------------------------------------------------------------------------------------------- keyed rows


def keyed_end():
    return SmallEnd(made_dispatcher(table=memoire.Table(storage="keyed")))


def put(end, partition, *rows):
    return end.one(keyed.ChangeRows(call="put", partition=partition), keyed.pack(list(rows)))


def test_partitions_and_rows_come_in_pages():
    end = keyed_end()
    for number in range(60):
        name = f"{number}{LONG[:150]}"
        put(end, name, keyed.PutRow("k", {"t": bytes(100)}, {"x": bytes(200)}, []))
    names, rows, after, is_whole = [], [], 0, False
    while not is_whole:
        asked = keyed.FindRows(call="tags", is_everywhere=True, after=after, known=len(names))
        reply = end.one(asked)
        names += reply.body.partitions
        rows += keyed.unpack_facts(reply.payload)
        after, is_whole = reply.body.after, reply.body.is_whole
    assert len(names) == len(set(names)) == 60 and [row.partition for row in rows] == names
    assert end.one(keyed.FindRows(call="tags", is_everywhere=True)).code == "too_large"


def test_one_reply_lists_no_more_rows_than_may_be_looked_at_for_it(monkeypatch):
    monkeypatch.setattr(handlers, "FACTS_PER_REPLY", 2)
    end, pages, after = keyed_end(), [], 0
    put(end, "p", *(keyed.PutRow(f"k{number}", {}, {}, []) for number in range(5)))
    for _ in range(3):
        reply = end.one(keyed.FindRows(call="tags", partition="p", after=after))
        pages.append([row.key for row in keyed.unpack_facts(reply.payload)])
        after = reply.body.after
    assert pages == [["k0", "k1"], ["k2", "k3"], ["k4"]] and reply.body.is_whole


@pytest.mark.parametrize("call", ["facts", "values"])
def test_rows_of_many_keys_come_in_pages(call):
    end, keys = keyed_end(), [f"k{number}" for number in range(40)]
    for key in keys:
        put(end, "p", keyed.PutRow(key, {"t": bytes(150)}, {"x": bytes(150)}, []))
    rows, after, is_whole = [], 0, False
    unpack_rows = keyed.unpack_facts if call == "facts" else keyed.unpack_values
    while not is_whole:
        body = keyed.FindRows(call=call, partition="p", after=after, known=0)
        reply = end.one(body, keyed.pack(keys))
        rows += unpack_rows(reply.payload)
        after, is_whole = reply.body.after, reply.body.is_whole
    assert len(rows) == 40 and len(end.replies) > 44


def test_a_row_that_is_longer_than_a_message_comes_in_parts():
    end, fields = keyed_end(), {f"field {number}": bytes([number]) * 700 for number in range(20)}
    for name, value in fields.items():
        put(end, "p", keyed.PutRow("long", {}, {name: value}, []))
    put(end, "p", keyed.PutRow("short", {}, {"x": b"1"}, []))
    keys, rows, reading = ["short", "long", "none", "short"], [], keyed.ValuesReading("p")
    while not reading.is_whole:
        reply = end.one(reading.request, keyed.pack(keys))
        rows += reading.take(reply.body, reply.payload)
    assert len(end.replies) > 25
    assert [row.fields for row in rows] == [{"x": b"1"}, fields, {}, {"x": b"1"}] and not rows[2].is_there
    asked = keyed.FindRows(call="values", partition="p")
    assert end.one(asked, keyed.pack(["long"])).code == "too_large"


CHANGES = {
    "written": keyed.PutRow("long", {}, {f"field {number}": bytes([100 + number]) * 700 for number in range(20)}, []),
    "longer": keyed.PutRow("long", {}, {"another": b"1"}, []),
    "tagged": keyed.PutRow("long", {"status": b"1"}, {}, []),
    "replaced": keyed.PutRow("long", {}, {f"field {number}": bytes([200 + number]) * 700 for number in range(20)}, []),
    "gone": None,
}
"""Changes of a row between two of its parts."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [1, 5])
def test_all_parts_of_a_row_that_is_changed_between_two_of_them_are_of_one_version(change, part):
    end, row = keyed_end(), CHANGES[change]
    former = {f"field {number}": bytes([number]) * 700 for number in range(20)}
    for name, value in former.items():
        put(end, "p", keyed.PutRow("long", {}, {name: value}, []))
    rows, reading, replies = [], keyed.ValuesReading("p"), itertools.count(1)
    while not reading.is_whole:
        reply = end.one(reading.request, keyed.pack(["long", "none"]))
        rows += reading.take(reply.body, reply.payload)
        if next(replies) == part:
            if change in ("gone", "replaced"):
                end.one(keyed.ChangeRows(call="clear", partition="p"), keyed.pack(["long"]))
            for field in {} if row is None else row.fields or {"": b""}:
                put(end, "p", keyed.PutRow("long", row.tags, {field: row.fields[field]} if field else {}, []))
    expected = {} if row is None else row.fields if change == "replaced" else former | row.fields
    assert [(each.fields, each.is_there) for each in rows] == [(expected, row is not None), ({}, False)]
    assert list(rows[0].fields) == rows[0].names


def test_a_row_that_is_written_between_any_two_of_its_parts_is_given_up_by_name():
    end, reading = keyed_end(), keyed.ValuesReading("p")
    with pytest.raises(ProtocolError, match="row of partition 'p' was written 17 times while it was read in parts"):
        while not reading.is_whole:
            for name in ("one", "two", "three"):
                put(end, "p", keyed.PutRow("long", {}, {name: bytes(2000)}, []))
            reply = end.one(reading.request, keyed.pack(["long"]))
            reading.take(reply.body, reply.payload)


def test_a_row_that_no_reply_could_have_is_refused_before_it_is_written():
    end = keyed_end()
    for number in range(16):
        put(end, "p", keyed.PutRow("k", {f"t{number}": bytes(240)}, {}, []))
    refused = put(end, "p", keyed.PutRow("k", {"last": bytes(400)}, {}, []), keyed.PutRow("other", {}, {}, []))
    assert refused.code == "too_large" and "row 'k'" in refused.text
    usual = SmallEnd(end.dispatcher, Limits())
    (row,) = keyed.unpack_facts(usual.one(keyed.FindRows(call="tags", partition="p", known=0)).payload)
    assert sorted(row.tags) == sorted(f"t{number}" for number in range(16))
    many = [
        keyed.PutRow("many", {}, {f"{number}": b"" for number in range(first, first + 600)}, []) for first in (0, 600)
    ]
    assert isinstance(put(usual, "p", many[0]).body, keyed.KeyedRows)
    assert "1200 fields" in put(usual, "p", many[1]).text


def test_accounts_and_names_of_runs_come_as_far_as_they_fit():
    dispatcher, _ = pool_of(0)
    end, rows = SmallEnd(dispatcher, SMALL, "t", "reader"), np.zeros(60, ACCOUNT)
    rows["client"][:, 0], rows["home"] = np.arange(60) + 1, 1
    for number in range(40):
        dispatcher.store_inherited(f"{number}-{'r' * 100}", True, rows[:0])
    dispatcher.store_inherited("run", False, rows)
    clients, after, more = [], b"", True
    while more:
        ledger = end.one(messages.LedgerRequest(after=after)).body
        assert 1 <= len(ledger.runs) < 40
        page = unpack_accounts(ledger.accounts)
        clients += page["client"][:, 0].tolist()
        after, more = page[-1:].tobytes()[:32], ledger.more
    assert clients == list(range(1, 61))


def test_what_has_no_pages_is_refused_by_its_size():
    dispatcher, _ = pool_of(0)
    end = SmallEnd(dispatcher, SMALL, "t", "actor")
    for number in range(20):
        dispatcher.publish(f"{number}{LONG[:100]}", b"weights")
    for body in (messages.Hello(role="actor", table="t", takes=_takes(SMALL)), messages.Update(steps=1)):
        refused = end.one(body)
        assert refused.code == "too_large" and "whose tail takes" in refused.text
        assert "2048 (tail_bytes)" in refused.text


def test_a_model_is_fetched_in_stretches_of_what_its_reader_takes_and_no_notice_is_longer_than_all_take():
    for size, frames in ((1 << 20, 2), (1 << 19, 3)):
        model = make("topic", bytes(size), 1)
        assert len(notice_of(model, Limits.of(inline_model=1 << 30), epoch=1, run=1)) == frames


def test_a_job_that_fits_into_no_reply_is_refused_where_it_is_given_and_stays_for_others():
    sent, number = [], itertools.count(1)
    service = JobService(Jobs(10.0), None, readerkit.SCHEMA)
    service.send = sent.append

    def work(client):
        frames = encode(messages.WorkRequest(patience=0.0), client=client, sequence=next(number))
        asked = parse(frames)
        service.work([], asked.header, asked.body, 1)
        return parse(sent[-1]).body

    service.receivers.register(b"s" * 16, ReplyLimits(tail_bytes=2048))
    service.post = lambda function: function()
    service.run(JobContent(None, {"names": ["x" * 100] * 100}))
    refused = work(b"s" * 16)
    assert refused.code == "too_large" and "JOB, whose tail takes" in refused.text
    assert (service.jobs.unleased_jobs, work(b"o" * 16).number, service.jobs.unleased_jobs) == (1, 1, 0)
    for options in ({"names": ["x" * 10_000] * 100}, {str(name): 1 for name in range(65)}):
        with pytest.raises(ParameterError, match="options"):
            service.run(JobContent(None, options))


TESTS = {
    "WELCOME UPDATED": test_what_has_no_pages_is_refused_by_its_size,
    "CHUNK NOTICE": test_a_model_is_fetched_in_stretches_of_what_its_reader_takes_and_no_notice_is_longer_than_all_take,
    "SUMMED": test_sums_of_more_clients_than_a_reply_has_room_for_come_in_pages_and_batches_are_drawn_of_all,
    "DRAWN": test_a_batch_that_fits_into_no_reply_ends_the_call_that_waits_for_it_and_takes_no_sample,
    "ACCOUNTS": test_accounts_and_names_of_runs_come_as_far_as_they_fit,
    "JOB": test_a_job_that_fits_into_no_reply_is_refused_where_it_is_given_and_stays_for_others,
    "ROLLOUTS": test_rollouts_come_in_pages_of_what_their_reader_takes,
    "PROMPTED": test_prompts_that_fit_into_no_reply_are_listed_drawn_and_fetched_in_pages,
    "KEYED_ROWS": test_partitions_and_rows_come_in_pages,
}
"""Test at the largest size, by kind of reply or publication that grows."""
IN_INFERENCE = {"INFERRED"}
"""Kinds that `tests/inference` tests at their largest size, with an inference node."""
BOUNDED = {"TAKEN", "PUBLISHED", "REFUSED", "NEWS", "SNAPSHOT"}
"""Kinds whose fields all have bounds, together below the limits of any client."""
REQUESTS = {
    "HELLO", "UPDATE", "CACHE", "EPISODE", "FEEDBACK", "FETCH", "PUBLISH", "SUMS", "DRAW", "CONTROL", "LEDGER", "INHERIT",
    "TAKE_SNAPSHOT", "INFER", "WORK", "RESULT", "TAKE", "PROMPTS", "ANSWERS", "GROUPS", "FIND_ROWS", "CHANGE_ROWS",
}  # fmt: skip


def test_every_kind_of_reply_is_tried_at_its_largest():
    grow = {kind for kinds in TESTS for kind in kinds.split()}
    parts = [grow, IN_INFERENCE, BOUNDED, REQUESTS]
    assert set.union(*parts) == {kind.name for kind in types.TYPES.values()}
    assert sum(map(len, parts)) == len(types.TYPES)


@pytest.mark.parametrize("kind", sorted(BOUNDED))
def test_a_kind_that_is_said_not_to_grow_has_no_lists_but_those_of_versions(kind):
    body = messages.BODIES[getattr(types, kind)]
    for field in msgspec.structs.fields(body):
        assert field.name == "versions" or not any(word in str(field.type) for word in ("list", "dict", "bytes")), field
