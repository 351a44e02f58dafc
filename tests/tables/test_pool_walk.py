"""A walk over held caches and the way back, step by step, while caches come and go between two steps."""

import math

from memoire.tables.caches.inspection import CacheRestore, CacheWalk, KeptCache, KeptClient
from memoire.tables.caches.queues import CacheQueues
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from poolkit import PLAIN, SCHEMA, cache_of, name


def queues_of(*counts: int) -> CacheQueues:
    """Client i has counts[i] caches of 4 samples, each of which came at 100 + its number."""
    made = CacheQueues(SCHEMA, PLAIN, byte_limit=1 << 30, cache_limit=0, seed=1)
    for i, count in enumerate(counts):
        made.sums(name(i), 1, 10.0, 50, 0.5, 100.0)
        for number in range(count):
            made.add(name(i), 2 + number, cache_of(4, 100 * i + 10 * number), 100.0 + number)
    return made


def rest_of(walk: CacheWalk, now: float = 110.0) -> list[KeptClient | KeptCache]:
    """What all steps give that are left."""
    found = []
    while not walk.is_over:
        kept = walk.step(now)
        found += [] if kept is None else [kept]
    return found


def words(kept: list[KeptClient | KeptCache]) -> list[bytes | float]:
    """Of a client its id, of a cache its age."""
    return [each.id if isinstance(each, KeptClient) else each.age for each in kept]


def test_each_client_that_has_entries_comes_before_its_caches_the_oldest_first() -> None:
    queues = queues_of(2, 0, 1)
    kept = rest_of(CacheWalk(queues))
    assert words(kept) == [name(0), 10.0, 9.0, name(1), name(2), 10.0]
    assert kept[0] == KeptClient(name(0), 3, 10.0, 50.0, 0.5, 0.0)
    assert kept[1] == KeptCache(4, 0, 10.0, queues.clients[name(0)].queued()[0].payload)
    assert kept[3] == KeptClient(name(1), 1, 10.0, 50.0, 0.5, 0.0, has_caches=False)
    assert rest_of(CacheWalk(queues_of())) == []


def test_caches_that_leave_between_two_steps_are_passed_by_and_newcomers_do_not_lengthen_the_walk() -> None:
    queues = queues_of(4)
    walk = CacheWalk(queues)
    walk.step(110.0), walk.step(110.0)
    for _ in range(2):  # the one that was given, and the next
        queues.held.drop_oldest(queues.clients[name(0)])
    for sequence in (20, 21):
        queues.add(name(0), sequence, cache_of(4), 110.0)
    assert words(rest_of(walk)) == [8.0, 7.0, 0.0], "four caches of this client at most"


def test_a_client_that_has_left_before_its_turn_does_not_come() -> None:
    queues = queues_of(1, 1)
    walk = CacheWalk(queues)
    walk.step(110.0)
    queues.forget(name(0))
    queues.forget(name(1))
    queues.add(name(5), 1, cache_of(4), 110.0)
    assert rest_of(walk) == []


def test_a_walk_ends_where_caches_of_another_form_are_held() -> None:
    queues = queues_of(2)
    walk = CacheWalk(queues)
    walk.step(110.0), walk.step(110.0)
    queues.configure(PLAIN.replace(frame_stack=2), discard_mismatched=True)
    queues.add(name(0), 9, cache_of(4, parameters=queues.parameters), 110.0)
    assert rest_of(walk) == []


def put_back(restore: CacheRestore, client: KeptClient, kept: KeptCache, **options: object) -> tuple[bool, int]:
    held = unpack.check(kept.payload, layout_of(SCHEMA, PLAIN))
    return restore.put_back(client, held, **{"age": kept.age, "stays": True, "now": 50.0} | options)


def test_what_was_walked_over_comes_back_once() -> None:
    client, *kept = rest_of(CacheWalk(queues_of(3)))
    again = CacheQueues(SCHEMA, PLAIN, byte_limit=1 << 30, cache_limit=2, seed=1)
    restore = CacheRestore(again)
    assert [put_back(restore, client, each) for each in kept] == [(True, 0), (True, 0), (True, 1)]
    held = again.clients[name(0)]
    assert [cache.arrived for cache in held.queued()] == [41.0, 42.0]
    assert (held.sequence, held.total_weight, held.between, held.heard) == (4, 10.0, 0.0, math.inf)
    assert put_back(restore, client, kept[1]) == (False, 0) and held.caches == 2
    assert put_back(restore, client, kept[0]) == (True, 1), "it was overwritten meanwhile"


def test_a_cache_that_only_looks_like_a_held_one_is_another() -> None:
    queues = queues_of(1)
    restore = CacheRestore(queues)
    client = KeptClient(name(0), 1, 10.0, 50.0, 0.5, 7.0)
    for seed, expected in ((0, False), (1, True), (1, False)):
        cache = cache_of(4, seed=seed)
        assert restore.put_back(client, cache, age=0.0, stays=True, now=100.0)[0] is expected
    assert queues.clients[name(0)].between == 7.0
    queues.add(name(0), 9, cache_of(4, total=11.0), 100.0)  # the queue changed without the restore
    assert not restore.put_back(client, cache_of(4, total=11.0), age=0.0, stays=True, now=100.0)[0]


def test_a_client_known_from_a_snapshot_alone_stays_or_counts_as_heard_now() -> None:
    client, kept = rest_of(CacheWalk(queues_of(1)))
    for stays, heard in ((True, math.inf), (False, 50.0)):
        again = CacheQueues(SCHEMA, PLAIN, byte_limit=1 << 30, cache_limit=0, seed=1)
        put_back(CacheRestore(again), client, kept, stays=stays)
        assert again.clients[name(0)].heard == heard
    again.heard(name(0), 60.0)
    put_back(CacheRestore(again), client, kept)
    assert again.clients[name(0)].heard == 60.0, "an actor of its own was heard"
