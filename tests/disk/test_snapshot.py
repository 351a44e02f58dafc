"""Tests of a server's snapshot and its restore: no entry twice, each loss counted, and draws as before."""

import random
import struct
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import mutations
from memoire.disk import snapshot_file, snapshots
from memoire.disk.snapshot_file import SnapshotFile, SnapshotRecord
from memoire.errors import Closed, DataError, ParameterError, ProtocolError, SnapshotMismatch
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import NAMES, Parameters
from memoire.replay.schema import Schema
from memoire.server.server import Server
from memoire.server.settings import State
from memoire.tables.caches.inspection import ClientRecord
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import plan
from memoire.tables.episodes import saving as episode_records
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import _bytes, containers
from memoire.wire.parts import Part
from memoire.wire.rows import ACCOUNT
from memory_checks import check_memory, with_episode
from netkit import pool_in
from poolkit import PLAIN, SCHEMA, made, name, pool_of
from statekit import STATES, episodes_of, memory_of

LIMITS = Limits()


def table(pool, title="default", storage="caches"):
    return SimpleNamespace(
        name=title,
        storage=storage,
        schema=pool.schema,
        parameters=pool.parameters,
        parameters_version=1,
        content_settings={},
        state=pool.state,
        check_parameters=getattr(pool, "check_parameters", lambda parameters: None),
        pool=pool,
    )


def save(path, *tables, server="home"):
    about = snapshots.read_header(tables, server=server, run="ant")
    rows = np.empty(0, ACCOUNT)
    return snapshot_file.write(path, about, snapshots.records(tables, "ant", False, rows))


def load(paths, *tables, **options):
    return snapshots.restore(paths, tables, limits=LIMITS, **options)


def content(memory):
    episodes = []
    for _, episode in dataset.walk(memory):
        arrays = [*episode.columns.values(), *(getattr(episode, fact) for fact in dataset.FACTS)]
        arrays += [] if episode.final_state is None else list(episode.final_state.values())
        arrays += [] if episode.bootstrap_value is None else [episode.bootstrap_value]
        episodes.append((episode.multiplier, episode.terminated, *(array.tobytes() for array in arrays)))
    return episodes


@pytest.mark.parametrize("drawn", [0, 7, 30])
def test_what_was_not_drawn_comes_back_and_nothing_else(tmp_path, drawn):
    pool = pool_of([12, 18])
    ids = [] if not drawn else pool.get(drawn).gathered.ids["number"].tolist()
    save(tmp_path / "a", table(pool))
    again = Pool(SCHEMA, PLAIN, seed=2)
    done = load([tmp_path / "a"], table(again))
    left = 30 - drawn
    assert (again.stats().unused, done.unused) == (left, left)
    if left:
        ids += again.get(left).gathered.ids["number"].tolist()
        rows = {bytes(row["client"].tobytes()): row for row in again.reserve(name(9), 1)}
        for row in pool.reserve(name(9), 1):  # the sums are equal, too
            same = rows.get(bytes(row["client"].tobytes()), row)
            for fact in ("total_weight", "sequence", "positives", "minimum", "drawn_between"):
                assert same[fact] == row[fact], fact
    assert sorted(ids) == sorted([*range(12), *range(18)])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 60))
@settings(max_examples=30)
def test_parts_share_everything_out_and_each_client_goes_to_one(tmp_path_factory, counts, of, drawn):
    path = tmp_path_factory.mktemp("shared") / "a"
    pool = pool_of(counts)
    drawn = min(drawn, sum(counts))
    if drawn:
        pool.get(drawn)
    before = pool.stats()
    save(path, table(pool))
    pools = [Pool(SCHEMA, PLAIN) for _ in range(of)]
    done = [load([path], table(part), part=(rank, of)) for rank, part in enumerate(pools)]
    after = [part.stats() for part in pools]
    assert sum(each.caches for each in after) == sum(each.caches for each in done) == before.caches
    assert sum(each.unused for each in after) == before.unused
    assert sum(each.clients for each in after) == len({c for c, held in pool.clients.items() if held.positives})
    for each in done:
        assert each.caches + each.elsewhere == before.caches and each.known == 0


def test_nothing_is_held_twice(tmp_path):
    pool = pool_of([12, 18])
    save(tmp_path / "a", table(pool))
    assert load([tmp_path / "a"], table(pool)).known == 7
    again = Pool(SCHEMA, PLAIN)
    done = load([tmp_path / "a", tmp_path / "a"], table(again))
    assert (done.caches, done.known, again.stats().held) == (7, 7, 30)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_draws_are_spread_after_a_restore_as_before(tmp_path, of):
    """Draws are counted by client over many batches; reused caches do not run out."""
    reuse = Parameters(reuse_cache=True)
    pool = pool_of([5, 10, 15, 20, 25], reuse)  # total weights 10 to 50
    save(tmp_path / "a", table(pool))
    parts = [Pool(SCHEMA, reuse, seed=3 + rank) for rank in range(of)]
    for rank, part in enumerate(parts):
        load([tmp_path / "a"], table(part), part=(rank, of))
    counts, rng = np.zeros(5), random.Random(1)
    for _ in range(60):
        rows = [part.reserve(name(9), 64) for part in parts]
        for wanted in plan(rows, 64, rng.random()).counts:
            for row in wanted:
                counts[int(row["client"][0])] += row["count"]
    expected = np.arange(1, 6) / 15 * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    assert counts.sum() == 60 * 64


def test_the_pool_goes_on_while_it_is_walked(tmp_path):
    """While caches come and go, the walk yields each client, and no cache twice."""
    pool = pool_of([15, 15, 15])
    seen, clients = [], []
    for step, (kept, payload) in enumerate(pool.records()):
        if isinstance(kept, ClientRecord):
            clients.append(kept.id)
            continue
        held = containers.check(payload, pool.layout)
        seen.append((clients[-1], np.frombuffer(held.part(Part.NUMBER), "<i8")[0]))
        for i in range(3):  # new entries soon overwrite all entries of the start
            pool.add(name(i), 100 + step, made(5, first=1000 * step + 5, total=10.0 * (i + 1)))
        pool.limit_bytes(max(1, pool.stats().bytes * 3 // 4))
    assert clients == [name(0), name(1), name(2)]
    assert len(set(seen)) == len(seen) <= 9
    assert Counter(client for client, _ in seen).keys() == set(clients)


def test_what_has_no_room_is_overwritten_and_counted_and_a_closed_pool_takes_nothing_back(tmp_path):
    pool = pool_of([50])
    save(tmp_path / "a", table(pool))
    small = Pool(SCHEMA, PLAIN, cache_limit=4)
    done = load([tmp_path / "a"], table(small))
    assert (done.caches, done.overwritten, small.stats().caches) == (10, 6, 4)
    tiny = Pool(SCHEMA, PLAIN, byte_limit=10)
    assert load([tmp_path / "a"], table(tiny)).refused == {"too_large": 10}
    tiny.close()
    with pytest.raises(Closed):
        load([tmp_path / "a"], table(tiny))


@pytest.mark.parametrize("of", [1, 3])
def test_episodes_come_back_with_all_that_is_known_of_them(tmp_path, of):
    memory = memory_of([5, 1, 8, 13, 2, 6, 9], multi_step=2, priority_exponent=0.7)
    save(tmp_path / "a", table(episodes_of(memory), storage="episodes"))
    pools = [episodes_of(Memory(STATES, 1000, memory.parameters)) for _ in range(of)]
    done = [load([tmp_path / "a"], table(each, storage="episodes"), part=(i, of)) for i, each in enumerate(pools)]
    parts = [pool.memory for pool in pools]
    assert Counter(each for part in parts for each in content(part)) == Counter(content(memory))
    assert [each.episodes for each in done] == [part.num_episodes for part in parts]
    assert sum(each.entries for each in done) == memory.num_entries
    sums = [part.sums() for part in parts]
    assert sum(each[0] for each in sums) == pytest.approx(memory.total_weight, rel=1e-12)
    assert sum(each[1] for each in sums) == memory.num_positive
    assert max(part.max_priority for part in parts) == memory.max_priority


def test_episodes_of_states_of_any_length_come_back(tmp_path):
    schema = Schema({"set": Column(np.float32, (None, 2), "state"), "word": Column(np.uint8, (None,)), "reward": "f4"})
    memory, rng = Memory(schema, 100), np.random.default_rng(1)
    for length in (4, 3):
        memory.open()
        for _ in range(length):
            value = rng.random((rng.integers(0, 4), 2), np.float32)
            memory.add(0, (value, rng.integers(0, 9, rng.integers(0, 3)).astype(np.uint8), np.float32(1)))
        memory.close(final_state=rng.random((2, 2), np.float32) if length == 4 else None)
    save(tmp_path / "a", table(episodes_of(memory), storage="episodes"))
    again = episodes_of(Memory(schema, 100))
    assert load([tmp_path / "a"], table(again, storage="episodes")).episodes == 2
    for (_, one), (_, other) in zip(dataset.walk(memory), dataset.walk(again.memory), strict=True):
        for column in ("set", "word"):
            np.testing.assert_array_equal(one.columns[column].lengths, other.columns[column].lengths)
            np.testing.assert_array_equal(one.columns[column].values, other.columns[column].values)
        if one.final_state is not None:
            np.testing.assert_array_equal(one.final_state["set"], other.final_state["set"])
    for payload in (b"x" * 100, b"\xff" * 1000):
        with pytest.raises(ProtocolError):
            episode_records.unpack(episode_records.EpisodeRecord(owner=b"", number=1, length=2), payload, schema)


CHANGES = {
    "nothing": lambda memory: None,
    "a draw": lambda memory: memory.draw(1),
    "a draw by fractions": lambda memory: memory.draw(1, [0.5]),
    "a priority": lambda memory: memory.update_priorities([20], [9.0]),
    "an episode": lambda memory: dataset.put(memory, next(dataset.episodes(memory_of([4])))),
    "parameters": lambda memory: memory.configure(priority_exponent=0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_entries_lie_where_they_did_if_nothing_happened_while_they_were_saved(tmp_path, change):
    """After a change, entries are laid out again; the largest priority and the newest model stay in any case."""
    pool = episodes_of(memory_of([5, 9, 4, 8], capacity=23, max_times_sampled=9))
    pool.memory.update_priorities([7], [100.0])
    pool.memory.update_priorities([7], [1.0])
    whole = table(pool, storage="episodes")
    turns = iter([lambda: None, lambda: CHANGES[change](pool.memory), *[lambda: None] * 9])
    records = snapshots.records([whole], "ant", False, [], lambda: (next(turns)(), True)[1])
    snapshot_file.write(tmp_path / "a", snapshots.read_header([whole], server="home", run="ant"), records)
    again = episodes_of(Memory(STATES, 23, pool.parameters))
    done = load([tmp_path / "a"], table(again, storage="episodes"))
    assert (done.episodes, done.entries) == (again.memory.num_episodes, again.memory.num_entries)
    check_memory(again.memory)
    assert (again.memory.max_priority, again.memory.newest_model) == (100.0, 3)
    is_same = again.memory.sample(30).weights.tobytes() == pool.memory.sample(30).weights.tobytes()
    assert is_same == (change == "nothing")


def test_a_layout_that_cannot_be_is_refused_before_anything_is_taken(tmp_path):
    """A hostile or faulty program may write a wrong layout with right checksums."""
    rng, verdicts = random.Random(3), Counter()
    save(tmp_path / "a", table(episodes_of(memory_of([5, 9, 4])), storage="episodes"))
    with SnapshotFile(tmp_path / "a") as file:
        about, (first, *others) = file.about, list(file.records())
    for number in range(150):
        payload, text = bytearray(first.payload), first.body.memory
        if number == 0:
            text = "[" * 200_000
        elif number % 3:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        else:
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice("0915-}a,.") + text[place + 1 :]
        body = msgspec.structs.replace(first.body, memory=text)
        snapshot_file.write(tmp_path / "b", about, [SnapshotRecord(body, 0, bytes(payload)), *others])
        pool = episodes_of(Memory(STATES, 1000))
        try:
            load([tmp_path / "b"], table(pool, storage="episodes"))
        except DataError:
            verdicts["refused"] += 1
            assert pool.is_untouched and not pool.memory.num_entries
            continue
        assert pool.memory.num_episodes == 3, text
        assert not pool.memory.num_positive or pool.get(5)
    assert verdicts["refused"] > 75, verdicts


def test_no_episode_is_held_twice(tmp_path):
    pool = episodes_of(memory_of([5, 6, 7]))
    save(tmp_path / "a", table(pool, storage="episodes"))
    assert load([tmp_path / "a"], table(pool, storage="episodes")).known == 3
    again = episodes_of(Memory(STATES, 100))
    done = load([tmp_path / "a", tmp_path / "a"], table(again, storage="episodes"))
    assert (done.episodes, done.known, again.memory.num_episodes) == (3, 3, 3)
    pool.clear()
    assert load([tmp_path / "a"], table(pool, storage="episodes")).episodes == 3
    pool.limit_bytes(pool.byte_limit // 2)
    assert load([tmp_path / "a"], table(pool, storage="episodes")).known == 3, "also in a new memory"


def test_an_episode_that_is_too_long_is_counted_and_the_others_are_taken(tmp_path):
    save(tmp_path / "a", table(episodes_of(memory_of([5, 40, 6])), storage="episodes"))
    again = Memory(STATES, 20)
    done = load([tmp_path / "a"], table(episodes_of(again), storage="episodes"))
    assert (done.episodes, done.refused) == (2, {"container": 1})
    (why,) = done.refusals
    assert "episode 5 of memory " in why and "for 20 in all" in why and why in str(done)


def test_an_episode_that_cannot_be_is_refused():
    (kept,) = episodes_of(memory_of([5])).walk()
    body, payload = episode_records.pack(kept, STATES)
    assert episode_records.unpack(body, payload, STATES).episode.columns["obs"].shape == (5, 3)
    broken = bytearray(payload)
    broken[0:4] = np.float32(np.nan).tobytes()
    for record, held in [
        (body, payload[:-1]),
        (body, payload + b"x"),
        (body, bytes(broken)),
        (episode_records.EpisodeRecord(owner=b"", number=1, length=0), payload),
        (episode_records.EpisodeRecord(owner=b"", number=1, length=2**60), payload),
        (episode_records.EpisodeRecord(owner=b"", number=1, length=5, multiplier=float("nan")), payload),
    ]:
        with pytest.raises(ProtocolError):
            episode_records.unpack(record, held, STATES)


MAKING = {
    "discount": 0.5, "multi_step": 3, "frame_stack": 2, "priority_exponent": 0.9, "priority_epsilon": 0.5,
    "prioritization": "rank", "prev": ("obs",), "next": (), "sequence_length": 4, "sequence_overlap": 1, "burn_in": 1,
    "sequence_first": ("action",), "sequence_max_share": 0.5, "start": "zero", "reward_coeff": 2.0, "mix_lambda": 0.5,
}  # fmt: skip
"""Parameters that shape finished samples, each with a value that `made_with` does not use."""
APART = {
    "importance_exponent", "importance_final", "importance_batches", "stratified", "cache_size", "rollout_length",
    "max_episode", "reuse_cache", "samples_per_insert", "samples_per_insert_tolerance", "min_size", "max_times_sampled",
    "max_age", "max_model_lag", "model_topic", "normalize", "compression",
}  # fmt: skip
"""Parameters of drawing, pacing and packing, which leave samples unchanged."""
VALUED = Schema({"obs": (np.float32, (3,)), "action": np.int32, "reward": np.float32, "value": np.float32})


def made_with(field):
    """Return parameters under which `field` matters."""
    if field in ("sequence_overlap", "burn_in", "sequence_first", "sequence_max_share"):
        return PLAIN.replace(sequence_length=4)
    return PLAIN.replace(frame_stack=2) if field == "start" else PLAIN


def cached(parameters):
    """Return a pool with one cache that a memory built, and the cache."""
    memory = Memory(VALUED, 100, parameters, seed=1)
    for _ in range(2):
        with_episode(
            memory,
            [np.ones((20, *VALUED[name].shape), VALUED[name].dtype) for name in VALUED.entry_names],
            terminated=True,
        )
    pool = Pool(VALUED, parameters, seed=1)
    payload = containers.build(memory, 16, now=1.0)
    pool.add(name(1), 1, containers.check(payload, pool.layout))
    return pool, payload


def test_every_parameter_makes_samples_or_has_no_part_in_them():
    assert MAKING.keys() | APART == NAMES and MAKING.keys().isdisjoint(APART)


@pytest.mark.parametrize("field", MAKING)
def test_samples_that_were_made_with_another_value_are_refused_by_name_at_every_door(tmp_path, field):
    parameters = made_with(field)
    (pool, _), changed = cached(parameters), parameters.replace(**{field: MAKING[field]})
    with pytest.raises(ParameterError, match=f"^{field} must be .* caches are held .* made with this value"):
        pool.configure(changed)
    assert pool.parameters == parameters and pool.stats().caches == 1, "nothing was changed"
    save(tmp_path / "a", table(pool))
    other = Pool(VALUED, changed)
    with pytest.raises(SnapshotMismatch, match=f"made with .*{field}=.*, but this server has .*{field}="):
        load([tmp_path / "a"], table(other))
    assert load([tmp_path / "a"], table(other), discard_mismatched=True).refused == {"parameters": 1}
    held, payload = cached(changed)
    with pytest.raises(ProtocolError) as refused:  # the client's parameters differ from the pool's
        pool.add(name(2), 1, containers.check(payload, held.layout))
    assert refused.value.code == "parameters"
    assert pool.configure(changed, discard_mismatched=True) == 1 and pool.parameters == changed


def test_a_table_that_the_server_lacks_is_refused_or_left_out(tmp_path):
    pool, _ = cached(Parameters())
    save(tmp_path / "a", table(pool, "gone"))
    other = Pool(VALUED, Parameters())
    with pytest.raises(SnapshotMismatch, match="holds table 'gone', but this server has 'default'"):
        load([tmp_path / "a"], table(other))
    counts = load([tmp_path / "a"], table(other), discard_mismatched=True)
    assert counts.refused == {"parameters": 1} and other.stats().caches == 0 and counts.accounts == 0


@pytest.mark.parametrize("field", ["discount", "reward_coeff", "mix_lambda"])
def test_priorities_of_restored_episodes_follow_from_what_the_server_is_told(tmp_path, field):
    """Priorities that a learner reported stay as they were reported."""
    pool, changed = EpisodePool(VALUED, PLAIN, capacity=100), PLAIN.replace(**{field: MAKING[field]})
    rng = np.random.default_rng(1)
    values = [rng.random((20, 3), np.float32), np.ones(20, np.int32), *rng.random((2, 20), np.float32)]
    pool.memory.open()
    numbers = pool.memory.extend(0, values)
    pool.memory.close()
    pool.memory.update_priorities(numbers[:3], [7.0, 8.0, 9.0])
    save(tmp_path / "a", table(pool, storage="episodes"))
    again = EpisodePool(VALUED, changed, capacity=100)
    assert load([tmp_path / "a"], table(again, storage="episodes")).episodes == 1
    before = pool.memory.weights(numbers)
    pool.configure(changed)
    assert (pool.memory.weights(numbers)[3:-1] != before[3:-1]).all(), "the value matters"
    np.testing.assert_array_equal(again.memory.weights(np.arange(20)), pool.memory.weights(numbers))


def test_priorities_of_restored_episodes_without_values_stay_as_they_are(tmp_path):
    pool = EpisodePool(SCHEMA, PLAIN, capacity=100)
    entry = [np.zeros((20, *SCHEMA[name].shape), SCHEMA[name].dtype) for name in SCHEMA.entry_names]
    pool.memory.open()
    numbers = pool.memory.extend(0, entry)
    pool.memory.close()
    pool.memory.update_priorities(numbers[:3], [7.0, 8.0, 9.0])
    save(tmp_path / "a", table(pool, storage="episodes"))
    again = EpisodePool(SCHEMA, PLAIN.replace(discount=MAKING["discount"]), capacity=100)
    load([tmp_path / "a"], table(again, storage="episodes"))
    np.testing.assert_array_equal(again.memory.weights(np.arange(20)), pool.memory.weights(numbers))


def test_a_file_that_does_not_fit_is_refused_by_name_before_anything_is_taken(tmp_path):
    pool = pool_of([5])
    save(tmp_path / "a", table(pool), table(pool_of([7]), "demo"))
    again = Pool(SCHEMA, PLAIN)
    with pytest.raises(SnapshotMismatch, match="table 'demo', but this server has 'default'"):
        load([tmp_path / "a"], table(again))
    other = Pool(STATES, PLAIN)
    with pytest.raises(SnapshotMismatch, match="in table 'demo', but this server stores"):
        load([tmp_path / "a"], table(again), table(other, "demo"))
    stacked = Pool(SCHEMA, Parameters(next=()))
    with pytest.raises(SnapshotMismatch, match="made with next=None, but this server has next="):
        load([tmp_path / "a"], table(again), table(stacked, "demo"))
    with pytest.raises(SnapshotMismatch, match="stores episodes"):
        load([tmp_path / "a"], table(again), table(again, "demo", "episodes"))
    renamed = PLAIN.to_wire()
    renamed["gamma"] = renamed.pop("discount")
    about = snapshots.read_header([table(pool)], server="home", run="ant")
    about.tables[0].parameters.clear()
    about.tables[0].parameters.update(renamed)
    snapshot_file.write(tmp_path / "b", about, [])
    with pytest.raises(SnapshotMismatch, match="b has settings of table 'default'.*takes no 'gamma'"):
        load([tmp_path / "b"], table(again))
    assert again.stats().caches == 0
    beta = Pool(SCHEMA, Parameters(importance_exponent=0.5))
    assert load([tmp_path / "a"], table(beta), table(again, "demo")).caches == 3


def test_parts_that_are_none_and_paths_that_are_no_list_are_refused(tmp_path):
    save(tmp_path / "a", table(pool_of([5])))
    for part in ((1, 1), (-1, 2), (0, 0), (0.5, 2)):
        with pytest.raises(ParameterError, match="part"):
            load([tmp_path / "a"], table(Pool(SCHEMA, PLAIN)), part=part)
    for paths in ([], "file"):
        with pytest.raises(ParameterError, match="paths"):
            snapshots.read_headers(paths)


def of_two(path):
    """Save a snapshot with caches and episodes, and return its bytes."""
    pools = table(pool_of([12, 18, 3])), table(episodes_of(memory_of([5, 9, 4])), "whole", "episodes")
    save(path, *pools)
    return path.read_bytes()


def test_damage_is_refused_or_skipped_with_exact_counts(tmp_path):
    path, rng = tmp_path / "a", random.Random(5)
    whole = of_two(path)
    verdicts = Counter()
    for number in range(250):
        path.write_bytes(rng.choice([mutations.flip, mutations.cut, mutations.append, mutations.blank])(whole, rng))
        pool, whole_ones = Pool(SCHEMA, PLAIN), episodes_of(Memory(STATES, 1000 if number % 2 else 100))
        tables = table(pool), table(whole_ones, "whole", "episodes")
        try:
            done = load([path], *tables)
            assert (done.caches, done.episodes, done.damaged) == (8, 3, 0), "what is said to be whole is"
            verdicts["whole"] += 1
            continue
        except DataError as error:
            text = str(error)
        assert pool.stats().caches == whole_ones.memory.num_episodes == 0, "nothing was taken"
        try:
            done = load([path], *tables, skip_damaged=True)
        except DataError:
            verdicts["useless"] += 1  # no part tells the content of the file
            continue
        assert not done.refused, number
        there = done.caches + done.episodes
        assert there + done.damaged == 11 or ("an unknown" in text and there + done.damaged < 11), (number, text)
        assert pool.stats().caches == done.caches and whole_ones.memory.num_episodes == done.episodes
        verdicts["in part"] += 1
        verdicts["counted"] += "an unknown" not in text
    assert verdicts["in part"] > 80 and verdicts["counted"] > 40 and verdicts["useless"] > 5, verdicts
    assert verdicts["whole"] < 90, verdicts  # the change lies behind the end, or in zeros


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a"
    whole = of_two(path)
    for content, words in [
        (b"", "is not a snapshot of a server"),
        (b"x" * 1000, "is not a snapshot of a server"),
        (whole[:12] + bytes([whole[12] ^ 1]) + whole[13:], "damaged at its beginning"),
        (whole[:8] + b"\x09" + whole[9:], "form 9, .* reads form 7"),
        (whole[:60], "is cut off"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            load([path], table(Pool(SCHEMA, PLAIN)))
    former = struct.pack("<8sI16s", b"memosnap", 4, bytes(16))
    path.write_bytes(former + struct.pack("<Q", _bytes.checksum(former)))
    with pytest.raises(DataError, match=r"form 4, .* this version of memoire reads form 7"):
        snapshots.describe_file(path)


def test_facts_say_what_a_file_holds(tmp_path):
    path = tmp_path / "a"
    whole = of_two(path)
    facts = snapshots.describe_file(path, check=True)
    assert (facts["server"], facts["run"], facts["damage"], facts["complete"]) == ("home", "ant", "", True)
    held, episodes = facts["tables"]
    assert (held["name"], held["caches"], held["samples"], held["unused"], held["clients"]) == ("default", 8, 33, 33, 3)
    assert (episodes["name"], episodes["episodes"], episodes["entries"]) == ("whole", 3, 18)
    assert Schema.from_json(episodes["schema"]) == STATES
    path.write_bytes(whole[:-100])
    assert (
        "cut off" in snapshots.describe_file(path)["damage"]
        and "an unknown" in snapshots.describe_file(path, check=True)["damage"]
    )


def test_a_server_that_is_closed_again_leaves_what_a_later_life_saved(tmp_path):
    server = Server(
        "inproc://closed-again", SCHEMA, storage="episodes", capacity=50, state=State(tmp_path, snapshot_every=60.0)
    )
    entry = [np.zeros((1, *SCHEMA[name].shape), SCHEMA[name].dtype) for name in SCHEMA.entry_names]
    with_episode(pool_in(server).memory, entry, terminated=True)
    server.close()
    assert snapshots.describe_file(tmp_path / "memory.snapshot")["tables"]
    (tmp_path / "memory.snapshot").write_bytes(b"of a later life")
    server.close()
    assert (tmp_path / "memory.snapshot").read_bytes() == b"of a later life"
