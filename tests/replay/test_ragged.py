"""Ragged columns in one process: values of any length, stored without padding and handed out padded."""

import pickle
import resource
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import memoire
from memoire.errors import DataError, EntryError, ParameterError, SchemaError
from memoire.replay import dataset
from memoire.replay.columns import Column, Ragged
from memoire.replay.conversion import exact_array
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memory_checks import check_memory

POINTS = Column(np.float32, (None, 3), "state")


def points(rng, low: int = 0, high: int = 7) -> np.ndarray:
    return rng.normal(size=(rng.integers(low, high + 1), 3)).astype(np.float32)


def test_ragged_values_are_views_and_slices_and_choices_of_them_ragged_again() -> None:
    rng = np.random.default_rng(0)
    clouds = [points(rng) for _ in range(9)]
    ragged = Ragged.from_arrays(clouds, np.float32, (3,))
    assert len(ragged) == 9
    for array, value in zip(clouds, ragged, strict=True):
        np.testing.assert_array_equal(array, value)
        assert not value.size or np.shares_memory(value, ragged.values)
    for index in (slice(2, 5), slice(None), slice(7, 3), slice(-2, None)):
        for array, value in zip(clouds[index], ragged[index], strict=True):
            np.testing.assert_array_equal(array, value)
    mask = rng.random(9) < 0.5
    for array, value in zip([clouds[i] for i in np.flatnonzero(mask)], ragged[mask], strict=True):
        np.testing.assert_array_equal(array, value)
    np.testing.assert_array_equal(ragged[-1], clouds[-1])
    assert repr(ragged) == "Ragged(9 values of float32[any, 3])"


@pytest.mark.parametrize("lengths", [[1, 2], [5, -1], [[4]], [3, 2]])
def test_lengths_that_are_not_those_of_the_values_are_refused(lengths) -> None:
    with pytest.raises(ParameterError, match="that add up to"):
        Ragged(np.zeros((4, 2)), lengths)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"obs": POINTS, "reward": Column(np.float32, (None,), "reward")}, "role 'reward', so it cannot be ragged"),
        ({"obs": (np.float32, (3, None))}, "not a shape|declared as"),
        ({"obs": POINTS, "obs_length": np.int32}, "the lengths of the ragged column 'obs'"),
        ({"obs": Column(np.float32, (None, *[1] * 8), "state")}, "has 9 axes"),
        ({"obs": Column(np.float32, (None, 0), "state")}, "its elements have no bytes"),
    ],
)
def test_a_free_axis_where_it_cannot_be_is_refused_by_name(columns, problem) -> None:
    with pytest.raises(SchemaError, match=problem):
        Schema(columns)


def test_a_free_axis_in_front_of_a_structure_is_one_of_each_of_its_fields() -> None:
    structure = np.dtype([("at", np.float32, (2,)), ("kind", np.uint8)])
    schema = Schema({"obs": Column(structure, (None,), "state")})
    assert {name: str(column) for name, column in schema.items()} == {
        "obs.at": "float32[any, 2]",
        "obs.kind": "uint8[any]",
    }


def test_sequence_graph_and_text_spaces_are_ragged_columns() -> None:
    spaces = gym.spaces
    node = spaces.Box(-1, 1, (2,), np.float64)
    observation = spaces.Dict(
        {
            "set": spaces.Sequence(spaces.Box(-1, 1, (3,), np.float32)),
            "stacked": spaces.Sequence(spaces.Discrete(4), stack=True),
            "graph": spaces.Graph(node, spaces.Discrete(5)),
            "words": spaces.Text(12),
        }
    )
    schema = Schema({"obs": observation, "action": np.int32})
    shapes = {name: (column.dtype.str, column.shape) for name, column in schema.items() if name != "action"}
    assert shapes == {
        "obs.graph.nodes": ("<f8", (None, 2)),
        "obs.graph.edges": ("<i8", (None,)),
        "obs.graph.edge_links": ("<i4", (None, 2)),
        "obs.set": ("<f4", (None, 3)),
        "obs.stacked": ("<i8", (None,)),
        "obs.words": ("|u1", (None,)),
    }
    observation.seed(1)
    for each in (observation.sample() for _ in range(50)):
        flat = zip(schema.leaves("obs"), schema.flatten("obs", each), strict=True)
        stored = {name: exact_array(name, schema[name], value, ()) for name, value in flat}
        assert bytes(stored["obs.words"]).decode() == each["words"]
        np.testing.assert_array_equal(stored["obs.stacked"], each["stacked"])


def graph_spaces() -> dict[str, Any]:
    box, spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces
    nodes = {
        "box": box,
        "discrete": spaces.Discrete(4),
        "dict": spaces.Dict({"a": box, "b": spaces.Discrete(3)}),
        "tuple": spaces.Tuple((box, spaces.Dict({"c": spaces.Discrete(2)}))),
    }
    return {
        f"{node} {edge}": spaces.Graph(nodes[node], nodes.get(edge))
        for node in nodes
        for edge in ("none", "box", "dict")
    }


@pytest.mark.parametrize("kind", graph_spaces())
@pytest.mark.parametrize("num_envs", [None, 3])
def test_graphs_of_any_nodes_are_stored_also_of_vector_environments(
    kind: str, num_envs: int | None, tmp_path: Path
) -> None:
    space = graph_spaces()[kind]
    space.seed(3)
    is_edgeless = space.edge_space is not None
    schema = Schema.from_env(SimpleNamespace(observation_space=space, action_space=gym.spaces.Discrete(2)))
    buffer = memoire.Buffer(schema, 60, seed=1)
    writer = buffer.writer() if num_envs is None else buffer.writer(num_envs=num_envs, autoreset="disabled")
    lanes: list[list[Any]] = [[space.sample() for _ in range(6)] for _ in range(num_envs or 1)]
    if is_edgeless:
        lanes[-1][2] = lanes[-1][2]._replace(edges=None, edge_links=None)
    zeros = np.zeros(num_envs or 1)
    for t in range(5):
        before, after = (tuple(lane[t + place] for lane in lanes) for place in (0, 1))
        ends = np.full(num_envs or 1, t == 4)
        if num_envs is None:
            writer.step(before[0], 0, 0.0, t == 4, False, after[0])
        else:
            writer.step(before, zeros.astype(int), zeros, ends, zeros > 0, after)
    buffer.save(tmp_path / "graphs.npz")
    episodes = list(memoire.dataset.load(tmp_path / "graphs.npz"))
    for lane, episode in zip(lanes, episodes, strict=True):
        for t, graph in enumerate(lane[:5]):
            for name, leaf in zip(schema.leaves("obs"), schema.flatten("obs", graph), strict=True):
                stored = episode.columns[name][t]
                np.testing.assert_array_equal(stored, np.reshape(leaf, stored.shape))
                assert len(stored) == len(leaf)


def test_a_sequence_of_what_has_no_fixed_shape_is_refused() -> None:
    words = gym.spaces.Graph(gym.spaces.Dict({"words": gym.spaces.Sequence(gym.spaces.Discrete(3))}), None)
    with pytest.raises(SchemaError, match=r"'obs.nodes.words': nodes or edges of the space .* have no fixed shape"):
        Schema({"obs": words})
    nested = gym.spaces.Sequence(gym.spaces.Sequence(gym.spaces.Discrete(3)))
    with pytest.raises(SchemaError, match="'obs': the space .* is a sequence of elements without a fixed shape"):
        Schema({"obs": nested})


@pytest.mark.parametrize(
    ("value", "axes", "problem"),
    [
        (np.zeros((4, 2)), (), r"float32\[any, 3\], but got float64\[4, 2\]"),
        (1.5, (), r"got 1\.5"),
        ([["a", "b", "c"]], (), r"float32\[any, 3\], but got <U1\[1, 3\]"),
        ([[1e60, 0, 0]], (), r"with 1e\+60 at \[0, 0\]"),
        (np.zeros(3), (), r"got float64\[3\]"),
        (np.zeros((3, 3)), (3,), r"got float64\[3\]"),
        ([np.zeros((1, 3))], (2,), "got 1 values"),
        (7, (2,), r"2 times float32\[any, 3\], but got 7"),
        (Ragged(np.zeros((2, 4)), [2]), (1,), r"float32\[any, 3\], but got float64\[2, 4\]"),
    ],
)
def test_what_does_not_fit_a_ragged_column_is_refused_with_both_forms(value, axes, problem) -> None:
    with pytest.raises(EntryError, match=problem):
        exact_array("obs", POINTS, value, axes)


def test_a_value_beyond_the_limit_of_an_entry_is_refused() -> None:
    large = np.broadcast_to(np.zeros(3, np.float32), ((64 << 20) // 12 + 1, 3))
    memory = Memory(Schema({"obs": POINTS}), 4)
    memory.open()
    with pytest.raises(EntryError, match="of at most 67108864 bytes"):
        memory.add(0, (large,))
    check_memory(memory)


def test_a_batch_cannot_be_drawn_into_arrays_of_the_caller() -> None:
    buffer = buffer_of(30)
    for name in ("obs", "next_obs", "obs_length"):
        with pytest.raises(ParameterError, match="a new array of a ragged column, as wide as its longest value"):
            buffer.sample(2, out={name: np.zeros((2, 3, 3), np.float32)})
    reward = np.empty(2, np.float32)
    assert buffer.sample(2, out={"reward": reward})["reward"] is reward


def buffer_of(count: int, capacity: int = 100) -> memoire.Buffer:
    schema = Schema({"obs": POINTS, "action": np.int32, "reward": np.float32})
    buffer = memoire.Buffer(schema, capacity, seed=0)
    rng = np.random.default_rng(0)
    states = [points(rng) for _ in range(count + 1)]
    with buffer.writer() as writer:
        for t, (state, next_state) in enumerate(pairwise(states)):
            writer.step(state, t, 1.0, t % 10 == 9, False, next_state)
            if t % 10 == 9:
                writer.reset(next_state)
    return buffer


@pytest.mark.slow
def test_a_million_bytes_of_random_lengths_stay_as_they_are_and_take_little_more_room() -> None:
    """One of four lanes has an episode that never ends, and would pin every segment if values were never moved."""
    rng = np.random.default_rng(3)
    memory = Memory(Schema({"obs": Column(np.uint8, (None,), "state")}), 3000, page_rows=16)
    held: dict[int, bytes] = {}
    for lane in range(4):
        memory.open(lane)
    worst = 0.0
    for step in range(30_000):
        lane = 0 if step % 50 == 0 and memory.open_length(0) < 550 else int(rng.integers(1, 4))
        size = int(rng.choice([0, 40, 3000, 50_000], p=[0.1, 0.6, 0.299, 0.001]))
        value = rng.bytes(size)
        held[memory.add(lane, (np.frombuffer(value, np.uint8),))] = value
        if lane and memory.open_length(lane) > rng.integers(2, 60):
            memory.close(lane, terminated=True)
            memory.open(lane)
        if step > 5000 and step % 200 == 0:
            worst = max(worst, memory.ragged_room / (1.5 * memory.ragged_bytes + (1 << 21)))
    assert memory.open_length(0) > 500
    assert worst <= 1.0
    check_memory(memory)
    rows = np.flatnonzero(memory.contents()["meta"]["episode"] >= 0)
    stored = memory.ragged("obs", rows)
    for row, value in zip(rows, stored, strict=True):
        assert value.tobytes() == held[int(memory.contents()["meta"]["number"][row])]
    assert memory.ragged_bytes >= stored.nbytes
    # An eighth of a segment is unused at most; headers and rounding take 23 bytes of a value at most.
    assert memory.ragged_bytes <= stored.nbytes + 23 * len(rows)


@pytest.mark.slow
def test_a_limit_of_bytes_has_the_oldest_episodes_make_room_for_values() -> None:
    rng = np.random.default_rng(5)
    memory = Memory(Schema({"obs": POINTS, "words": Column(np.int16, (None,))}), 1000, ragged_limit=4000)
    kept: list[list[int]] = []
    for lane in (0, 1):
        memory.open(lane)
    for step in range(400):
        lane = step % 2
        memory.add(lane, (points(rng, 1), np.arange(rng.integers(0, 9), dtype=np.int16)))
        assert memory.ragged_bytes <= 4000
        if memory.open_length(lane) > rng.integers(3, 9):
            memory.close(lane, final_state=points(rng), terminated=False)
            memory.open(lane)
            assert memory.ragged_bytes <= 4000
            kept.append([len(each) for each in dataset.episodes(memory) if not each.is_open])
        check_memory(memory)
    assert all(one[1:] == other[: len(one) - 1] or one == other[:-1] or len(other) < len(one) for one, other in
               pairwise(kept))  # the oldest episodes leave  # fmt: skip
    assert max(map(len, kept)) > 4
    before = memory.num_episodes
    memory.limit_ragged(2000)
    assert memory.ragged_bytes <= 2000 and memory.num_episodes < before
    for wrong in (-1, 2**62 + 1):
        with pytest.raises(ParameterError, match="ragged_limit"):
            memory.limit_ragged(wrong)
    memory.limit_ragged(2**62)
    memory.limit_ragged(0)
    memory.extend(0, (np.ones((100, 9, 3), np.float32), [[]] * 100))
    assert memory.ragged_bytes > 10_000


@pytest.mark.parametrize("call", ["add", "extend", "add_many"])
def test_values_that_do_not_fit_beside_open_episodes_are_refused_and_nothing_is_added(call) -> None:
    memory = Memory(Schema({"obs": POINTS}), 100, ragged_limit=1000)
    for lane in (0, 1):
        memory.open(lane)
        memory.extend(lane, (np.ones((5, 5, 3), np.float32),))
    before = memory.ragged_bytes, memory.num_entries
    large = np.ones((20, 3), np.float32)
    with pytest.raises(memoire.errors.EpisodeTooLong, match=r"over 1000 bytes \(ragged_limit\)") as caught:
        if call == "add":
            memory.add(0, (large,))
        elif call == "extend":
            memory.extend(0, ([large[:1], large, large],))
        else:
            memory.add_many([0, 1], ([large, large],))
    assert (memory.ragged_bytes, memory.num_entries) == before and caught.value.length == 5
    assert pickle.loads(pickle.dumps(caught.value)).ragged_limit == 1000
    memory.close(0)
    memory.add(1, (large,))
    assert memory.num_episodes == 0 and memory.open_length(1) == 6
    check_memory(memory)


@pytest.mark.slow
def test_a_writer_cuts_open_episodes_whose_values_have_no_more_room() -> None:
    schema = Schema({"obs": POINTS, "action": np.int32, "reward": np.float32})
    buffer = memoire.Buffer(schema, 1000, ragged_limit=3000)
    writer = buffer.writer(num_envs=2, autoreset="disabled")
    rng = np.random.default_rng(1)
    states = [[points(rng, 3) for _ in range(2)] for _ in range(300)]
    flat = {state.tobytes(): (t, i) for t, both in enumerate(states) for i, state in enumerate(both)}
    cut = 0
    for state, after in pairwise(states):
        writer.step(state, [0, 0], [1.0, 1.0], [False, False], [False, False], after)
        assert buffer.memory.ragged_bytes <= 3000
        for each in dataset.episodes(buffer.memory):
            if not each.is_open:
                assert each.terminated is False and each.final_state is not None
                whole = [*each.columns["obs"], each.final_state["obs"]]
                places = [flat[state.tobytes()] for state in whole]
                assert all(later == (t + 1, i) for (t, i), later in pairwise(places))
                cut += 1
    assert cut > 50
    with pytest.raises(memoire.errors.EpisodeTooLong):  # this step alone exceeds the limit
        writer.step(states[-1], [0, 0], [1.0, 1.0], [False, False], [False, False], [np.ones((150, 3))] * 2)
        writer.step([np.ones((150, 3))] * 2, [0, 0], [1.0, 1.0], [False, False], [False, False], states[0])


def test_a_memory_gives_its_values_back_when_it_goes() -> None:
    schema = Schema({"obs": Column(np.uint8, (None,), "state")})
    small, large = np.ones(20_000, np.uint8), np.ones(1 << 20, np.uint8)

    def use() -> None:
        memory = Memory(schema, 300)
        memory.open()
        for _ in range(200):
            memory.add(0, (small,))
        for _ in range(4):
            memory.add(0, (large,))
        memory.close(final_state=large)

    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        use()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB; 180 MB were used


@pytest.mark.parametrize("length", [-1, 1 << 40, 10_000])
def test_a_file_whose_lengths_are_not_those_of_its_values_is_refused(tmp_path, length) -> None:
    buffer_of(30).save(tmp_path / "some.npz")
    with zipfile.ZipFile(tmp_path / "some.npz") as source, zipfile.ZipFile(tmp_path / "bad.npz", "w") as target:
        for member in source.infolist():
            data = bytearray(source.read(member))
            if member.filename == "obs_length.npy":
                data[-8:] = length.to_bytes(8, "little", signed=True)
            target.writestr(member, bytes(data), zipfile.ZIP_STORED)
    with pytest.raises(DataError, match="'obs'"):
        memoire.Buffer.load(tmp_path / "bad.npz")
