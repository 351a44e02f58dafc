"""Claim of docs/sampling.md from end to end: with beta = 1, importance-weighted means equal the promised means.

A promised mean counts each client by its newest N_c, and represents the client by the entries that it held when the
drawn cache was built. The error of a batch is its weighted mean minus the promised mean. Samples of a cache are
independent draws, no sample is handed out twice, and shares and counts depend on the past only. The errors of
successive batches are therefore uncorrelated with mean 0 (martingale differences), and yield their own standard error.
Each test bounds that error: a mean that is 3 % off fails.
"""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest

from memoire.client.client import Client
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Prioritized, RankBased
from memoire.replay.schema import Schema
from memoire.tables import draws
from memoire.tables.table import Table
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.parts import Part
from netkit import in_thread, until

SCHEMA = Schema(
    {
        "obs": Column(np.float32, (2,), "state"),
        "reward": Column(np.float32, (), "reward"),
        "quantity": Column(np.float32),
    }
)
EXACT = Parameters(importance_exponent=1.0, priority_exponent=1.0, cache_size=512)
QUICK = Limits.of(resend_after=0.1, resend_most=0.3, update_every=0.05)


def errors_are_none(errors, truth, most=0.005):
    """Check that the mean of uncorrelated errors is 0 within 4 standard errors, which are small enough to show 3 %."""
    errors = np.asarray(errors) / np.mean(truth)
    standard = errors.std(ddof=1) / np.sqrt(len(errors))
    print(f"{len(errors)} batches: {errors.mean():+.4f} +- {standard:.4f}")  # pytest -s shows the margin
    assert standard < most
    assert abs(errors.mean()) < 4.0 * standard


def weights_of(memory, numbers):
    """Return the weights of an episode's entries, or None if the memory has evicted the episode."""
    try:
        return memory.weights(numbers)
    except LookupError:
        return None


class Entries:
    """Record of a memory's contents: numbers, quantities and weights of whole episodes."""

    def __init__(self, memory, rng):
        self.memory, self.rng, self.episodes = memory, rng, []

    def make(self, length, level=1.0, scale=1.0, none=0.15):
        """Return values and weights of an episode: the quantity grows with the weight, and some weights are 0."""
        weights = np.exp(self.rng.normal(0.0, 0.6, length)).astype(np.float32)
        weights[self.rng.random(length) < none] = 0.0
        quantity = (level * (0.5 + weights + self.rng.random(length))).astype(np.float32)
        obs, reward = np.zeros((length, 2), np.float32), np.zeros(length, np.float32)
        return (obs, reward, quantity), weights * np.float32(scale)

    def record(self, length, lane=0, **form):
        values, weights = self.make(length, **form)
        self.memory.open(lane)
        numbers = self.memory.extend(lane, values, weights)
        self.memory.close(lane, terminated=True)
        self.episodes.append((numbers, values[2].astype(float), weights.astype(float)))

    def forget(self):
        """Drop the episodes that the memory has evicted."""
        self.episodes = [episode for episode in self.episodes if weights_of(self.memory, episode[0]) is not None]

    def columns(self):
        self.forget()
        return tuple(np.concatenate(column) for column in zip(*self.episodes, strict=True))

    def mean(self):
        """Return the mean quantity of the entries that can be drawn."""
        _, quantity, weight = self.columns()
        assert (weight > 0.0).sum() == self.memory.num_positive
        return quantity[weight > 0.0].mean()


class Actor:
    """Client whose memory changes all the time, with the promised mean of each of its caches."""

    def __init__(self, client, seed, *, level, scale, length, every, swing):
        self.client, self.level, self.scale, self.length = client, level, scale, length
        self.every, self.swing = every, swing
        self.entries = Entries(client.memory, np.random.default_rng(seed))
        self.turn = self.newest = 0
        self.caches = []  # mean of the entries that were held when each cache was built
        for _ in range(12):
            self.live()

    @property
    def id(self):
        return self.client.client_id

    def live(self, none=0.05):
        """Record an episode; weights and quantities drift, and the number of entries goes up and down."""
        self.turn += 1
        level = self.level * (1.0 + 0.5 * np.sin(self.turn / 9.0))
        scale = self.scale * np.exp(0.6 * np.sin(self.turn / 4.0 + self.level))
        length = int(self.length * (1.0 + 0.8 * np.sin(self.turn / 5.0)))
        self.entries.record(length, level=level, scale=scale, none=none)
        self.client.on_entries(length)

    def push(self):
        self.caches.append(self.entries.mean())
        assert self.client.push_cache(100.0), self.client.push_reason

    def tell(self):
        self.client.update(100.0)
        self.newest = self.client.memory.num_positive


class Tap:
    """Recorder of the cache of each pushed sample: in a later cache, the same entry is older."""

    def __init__(self, monkeypatch):
        self.pushed = Counter()
        self.origin = {}
        self.caches = defaultdict(int)
        build = containers.build

        def tapped(memory, *arguments, **options):
            payload = build(memory, *arguments, **options)
            held = containers.check(payload, layout_of(memory.schema, memory.parameters))
            numbers, ages = (np.frombuffer(held.part(p), d) for p, d in ((Part.NUMBER, "<i8"), (Part.AGE, "<f4")))
            client = self.clients[id(memory)]
            for key in zip(numbers.tolist(), ages.tolist(), strict=True):
                self.pushed[(client, *key)] += 1
                self.origin[(client, *key)] = self.caches[client]
            self.caches[client] += 1
            return payload

        self.clients = {}
        monkeypatch.setattr(containers, "build", tapped)
        # Ages as pushed, without the time at the server: a number and an age identify a sample.
        monkeypatch.setattr(draws, "waits_of", lambda picks, *_, **__: np.zeros(picks.size, np.float32))

    def watch(self, client):
        self.clients[id(client.memory)] = client.client_id

    def keys(self, batch):
        ids = batch["ids"]
        owners = (client.tobytes() for client in ids["client"])
        return list(zip(owners, ids["number"].tolist(), batch["age"].tolist(), strict=True))


class Promise:
    """Promised means of batches, their errors, and a check that no sample is handed out twice."""

    def __init__(self, tap, actors):
        self.tap, self.actors = tap, {actor.id: actor for actor in actors}
        self.drawn = Counter()
        self.left_out = []
        self.errors, self.truth = [], []

    def take(self, batch, newest=None):
        """Count a batch; `newest` maps the clients that it is drawn from to their N_c (None: no error is measured)."""
        keys = self.tap.keys(batch)
        self.drawn.update(keys)
        self.left_out.append(batch.left_out)
        if newest is None or batch.left_out > 1e-9:
            return
        held = defaultdict(list)
        for key in keys:
            held[key[0]].append(self.actors[key[0]].caches[self.tap.origin[key]])
        assert held.keys() <= newest.keys()
        weighed = batch["importance"].astype(float) * batch.divisor * batch["quantity"]
        population = sum(newest.values())
        # A client whose share is below one sample is not in every batch; its next sample would come from its last
        # the client.
        means = {name: np.mean(held[name]) if name in held else self.actors[name].caches[-1] for name in newest}
        self.truth.append(sum(newest[name] / population * means[name] for name in newest))
        self.errors.append(weighed.mean() - self.truth[-1])

    def holds(self, most=0.005):
        assert not self.drawn - self.tap.pushed  # no sample is drawn more often than pushed
        errors_are_none(self.errors, self.truth, most)


@pytest.fixture
def tap(monkeypatch):
    return Tap(monkeypatch)


FORMS = [
    {"level": 1.0, "scale": 1.0, "length": 30, "every": 1, "swing": 1},
    {"level": 3.0, "scale": 2.0, "length": 15, "every": 1, "swing": 6},
    {"level": 0.3, "scale": 0.3, "length": 50, "every": 2, "swing": 1},
    {"level": 2.5, "scale": 3.0, "length": 30, "every": 5, "swing": 8},
]
"""Four unequal clients; the last one pushes far less than its weight asks to be drawn.

Between two caches, the number of entries that can be drawn swings, for some clients by far.
"""


def join(cluster, tap, node, number, home=None, **options):
    """Return an actor of this form at this home; a home follows from the random id of a client."""
    while True:
        shared = {"context": cluster.context, "limits": QUICK}
        client = cluster.keep(Client(node.endpoint, seed=number, capacity=700, **shared, **options))
        if home in (None, client.home):
            break
        client.close(0.0)
    tap.watch(client)
    return Actor(client, number, **FORMS[number % len(FORMS)])


def step_all(actors, turn, servers):
    """Record with all actors, push with some, report all sums; return the N_c that the servers then know."""
    homes = {server.name: server for server in servers}
    before = {name: server.total_caches for name, server in homes.items()}
    for actor in actors:
        if turn % actor.every == 0 or turn < 3:
            # When the client builds the cache, far fewer entries can be drawn than later, when readers draw samples.
            for _ in range(actor.swing):
                actor.live(none=0.9)
            actor.push()
            before[actor.client.home] += 1
            for _ in range(actor.swing):
                actor.live()
        actor.live()
    until(lambda: all(server.total_caches == before[name] for name, server in homes.items()))
    for actor in actors:
        actor.tell()
    return {actor.id: actor.newest for actor in actors}


@pytest.mark.parametrize(
    ("sampler", "turns"),
    [(Prioritized(1.0, beta=1.0), 150), (RankBased(0.5, beta=1.0), 100), (Prioritized(0.0, beta=1.0), 100)],
    ids=["proportional", "rank", "uniform"],
)
def test_a_server_keeps_the_promise_to_four_unequal_clients_that_drift(cluster, tap, sampler, turns):
    parameters = EXACT.replace(**sampler.fields())
    server = cluster.server(schema=SCHEMA, parameters=parameters, seed=3, limits=QUICK)
    actors = [join(cluster, tap, server, number) for number in range(4)]
    promise = Promise(tap, actors)
    for turn in range(turns):
        newest = step_all(actors, turn, [server])
        for _ in range(4):
            promise.take(server.get_batch(256), newest if turn > 20 else None)
    promise.holds(0.006)
    assert np.mean(promise.left_out[80:]) < 0.02


def test_each_part_of_a_mix_keeps_the_promise_to_the_clients_of_its_table(cluster, tap):
    tables = {"online": Table(SCHEMA, parameters=EXACT), "demo": Table(SCHEMA, parameters=EXACT)}
    server = cluster.server(schema=None, tables=tables, seed=3, limits=QUICK)
    actors = {
        name: [join(cluster, tap, server, number, table=name) for number in numbers]
        for name, numbers in (("online", (0, 2)), ("demo", (1, 3)))
    }
    promises = {name: Promise(tap, mine) for name, mine in actors.items()}
    sizes = {"online": 160, "demo": 96}
    batches = server.batches(sizes, timeout=100.0)
    errors, truth = [], []
    for turn in range(80):
        newest = step_all([actor for mine in actors.values() for actor in mine], turn, [server])
        for batch in itertools.islice(batches, 4):
            counted = turn > 20 and not any(part.left_out > 1e-9 for part in batch.values())
            for name, part in batch.items():
                promises[name].take(part, {actor.id: newest[actor.id] for actor in actors[name]} if counted else None)
            if counted:  # the whole batch: a table counts by its size, not its weights
                joined = batch.joined
                whole = (joined.importance.astype(float) * joined.divisor * joined.quantity).sum()
                truth.append(sum(sizes[name] * promises[name].truth[-1] for name in sizes))
                errors.append(whole - truth[-1])
    for promise in promises.values():
        promise.holds(0.009)
    errors_are_none(errors, truth)


AHEAD = 1
STALE = AHEAD + 2
"""Batches after a change of sums that may be planned before: those ahead, one on its way, one by the last table."""


def draw(reader, count, size):
    return [reader.get_batch(size, 100.0) for _ in range(count)]


def test_three_servers_behind_two_proxies_keep_it_also_while_one_is_away(cluster, tap):
    servers = [cluster.server(schema=SCHEMA, parameters=EXACT, name=f"s{i}", seed=i, limits=QUICK) for i in range(3)]
    proxies = [cluster.proxy(servers, limits=QUICK) for _ in range(2)]
    # A plain proxy before two more workers: the first client pushes through the plain proxy to its home server.
    more = f"inproc://more-{id(servers)}"
    front = more + "-front"
    loop, _ = in_thread(servers[0].run_pull_proxy, front, more)
    for _ in range(2):
        servers[0].add_pull_worker(more, bind=False)
    actors = [join(cluster, tap, servers[0], 0, push=front)]
    actors += [join(cluster, tap, proxies[i % 2], i, servers[i % 3].name) for i in range(1, 6)]
    reader = cluster.reader(proxies, seed=1, ahead=AHEAD, limits=QUICK)
    promise, phases = Promise(tap, actors), []

    def turns(count, there, up, first):
        begin = len(promise.errors)
        for turn in range(first, first + count):
            newest = step_all(there, turn, up)
            for number, batch in enumerate(draw(reader, STALE + 5, 200)):
                promise.take(batch, newest if number >= STALE and turn >= first + 5 else None)
        phases.append((promise.errors[begin:], promise.truth[begin:]))

    turns(20, actors, servers, 0)
    gone = servers[1]
    gone.close()
    here = [actor for actor in actors if actor.client.home != "s1"]
    up = [servers[0], servers[2]]
    step_all(here, 20, up)
    # The test draws one sample at a time: large batches may lack samples until the reader sees that a server is away.
    until(lambda: draw(reader, 1, 1) and reader.stats().away == ("s1",))
    turns(14, here, up, 20)
    servers[1] = cluster.restart(gone, parameters=EXACT, limits=QUICK)
    until(lambda: draw(reader, 1, 10) and not reader.stats().away)
    # The server holds caches that a client pushes before the client knows of the restart, but counts no old number.
    back = [actor for actor in actors if actor.client.home == "s1"]
    until(lambda: all(actor.client._session.welcome.epoch == servers[1].stats().epoch for actor in back))
    turns(20, actors, servers, 34)
    for errors, truth in phases:
        errors_are_none(errors, truth, 0.02)
    promise.holds(0.007)
    assert reader.stats().faults == 0
