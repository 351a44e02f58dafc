"""Tests of TransferQueue's calls on memoire: recorded answers of 0.1.11, values of all kinds, and many processes."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed: memoire.tq gives TensorDicts")

import tq_calls  # noqa: E402

from memoire import Server, tq  # noqa: E402
from memoire.errors import DataError, NotPlain, ProtocolError  # noqa: E402
from memoire.keyed.messages import PutRow  # noqa: E402
from memoire.limits import Limits  # noqa: E402
from memoire.tq import client as values  # noqa: E402
from memoire.tq.client import KeyedClient  # noqa: E402

pytestmark = pytest.mark.torch
TensorDict = tensordict.TensorDict
HERE = "tcp://127.0.0.1:*"

BETTER = {'tq.kv_batch_get("h", "p")': "z", 'tq.kv_batch_get("u", "p")': "u"}
"""Field that TransferQueue leaves out of an answer, by call: the eighth field of a partition."""


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.delenv("MEMOIRE_TQ", raising=False)
    tq.init()
    yield tq
    tq.close()


@pytest.fixture
def servers():
    with Server(HERE, storage="keyed") as one, Server(HERE, storage="keyed") as two:
        yield one, two


def test_each_call_returns_or_raises_what_transfer_queue_did(queue, tmp_path):
    record = json.loads(tq_calls.RECORD.read_text(encoding="utf-8"))
    assert [call for call, _ in record["answers"]] == tq_calls.CALLS, "python tests/frameworks/tq_calls.py"
    for (call, theirs), answer in zip(record["answers"], tq_calls.answers(queue, tmp_path), strict=True):
        ours = json.loads(json.dumps(answer))
        if call in BETTER:
            ours["fields"].pop(BETTER[call])
        assert ours == theirs, call


@pytest.fixture
def far(servers, monkeypatch):
    """Yield an interface whose rows are on two servers."""
    monkeypatch.delenv("MEMOIRE_TQ", raising=False)
    tq.init({"memoire": {"servers": [server.endpoint for server in servers]}})
    yield tq
    tq.close()


def test_more_long_values_than_a_server_takes_at_once_all_arrive():
    limits = Limits.of(request_bytes=16 << 10)
    with Server(HERE, storage="keyed", limits=limits) as server:
        client = KeyedClient([server.endpoint], limits=limits)

        rows = [PutRow(f"k{i}", {}, {"x": values.encode(bytes([i]) * 30_000)}) for i in range(80)]
        with ThreadPoolExecutor(80) as threads:
            assert len(list(threads.map(lambda row: client.put("p", [row]), rows))) == 80
        stored = client.values("p", [row.key for row in rows], [])
        assert [values.decode(row.fields["x"]) for row in stored] == [bytes([i]) * 30_000 for i in range(80)]
        client.close()


KINDS = [
    None, True, -3, 2**70, 2.5, "text", b"bytes", [1, [2]], {"a": {1: "x"}}, {1, 2},
    np.float32(1.5), np.arange(6).reshape(2, 3), np.zeros((0, 2), np.int8), np.array("2020-01-01", "datetime64[D]"),
]  # fmt: skip


@pytest.mark.parametrize("value", KINDS, ids=repr)
def test_a_plain_value_comes_back_as_it_was(value):
    decoded = values.decode(values.encode(value))
    assert type(decoded) is type(value)
    np.testing.assert_equal(decoded, value)


def test_a_tuple_comes_back_as_a_list():
    assert values.decode(values.encode({"turns": ((1, 2), [3])})) == {"turns": [[1, 2], [3]]}


def test_what_could_only_be_pickled_is_refused_by_name(queue):
    with pytest.raises(NotPlain, match=r"a value of type Event cannot be stored, because memoire does not pickle"):
        queue.kv_put("a", "p", {"x": {"deep": [threading.Event()]}})
    with pytest.raises(ValueError, match="not found"):
        queue.kv_batch_get("a", "p")


DAMAGED = [b"", b"\xc1", b"\xc7\x02\x01ab", b"\xd4\x09\x01", b"\xc7\x0c\x01\x08\0\0\0\x92\xa4evil\x91\x01"]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_bytes_of_a_value_are_refused(damaged):
    with pytest.raises(ProtocolError, match="a value cannot be read"):
        values.decode(damaged)


def test_values_longer_than_a_message_come_whole(servers):
    limits = Limits.of(request_bytes=64 * 1024)
    fields = [{"long": bytes([i]) * 300_000, "short": b"s", "middle": bytes(40_000)} for i in range(9)]
    raw = [
        PutRow(f"k{i}", {}, {name: values.encode(value) for name, value in each.items()})
        for i, each in enumerate(fields)
    ]
    with contextlib.closing(KeyedClient([server.endpoint for server in servers], limits=limits)) as client:
        client.put("p", raw)
        stored = client.values("p", [row.key for row in raw], ())
    assert [each.fields for each in stored] == [row.fields for row in raw]


def test_rows_spread_over_servers_and_a_checkpoint_goes_into_another_number_of_them(
    far, servers, tmp_path, monkeypatch
):
    keys, batch = [f"k{i}" for i in range(200)], TensorDict({"x": torch.arange(200)}, batch_size=200)
    far.kv_batch_put(keys, "p", batch, [{"i": i} for i in range(200)])
    held = [KeyedClient([server.endpoint]) for server in servers]
    parts = [len(client.rows("p").get("p", [])) for client in held]
    assert sum(parts) == 200 and min(parts) > 60
    assert torch.equal(far.kv_batch_get(keys[::-1], "p")["x"], torch.arange(200).flip(0))
    far.save_checkpoint(tmp_path / "one")
    far.close()
    monkeypatch.setenv("MEMOIRE_TQ", "")
    tq.init()
    tq.load_checkpoint(tmp_path / "one")
    assert torch.equal(tq.kv_batch_get(keys, "p")["x"], torch.arange(200))
    assert tq.kv_list("p")["p"] == {key: {"i": i} for i, key in enumerate(keys)}
    [client.close() for client in held]


COLUMNS = {
    "texts of NumPy": np.array(["a", "b", "c"]),
    "bytes of NumPy": np.array([b"a", b"bb", b"c"]),
    "objects of NumPy": np.array([{"k": 1}, None, "x"], object),
    "dates": np.array(["2020-01-01", "2021-01-01", "2022-01-01"], "datetime64[D]"),
    "rows of texts": np.array([["a", "b"], ["c", "d"], ["e", "f"]]),
    "numbers of NumPy": np.array([1.0, 2.0, 3.0]),
    "list of texts": ["a", "b", "c"],
    "list of objects": [{"k": 1}, {"k": 2}, {"k": [3]}],
    "lists": [["a"], ["b", "c"], ["d"]],
    "tuple": ("a", "b", "c"),
    "list in one piece": tensordict.NonTensorData(["a", "b", "c"]),
    "stack": tensordict.NonTensorStack("a", {"k": 1}, None),
    "tensor": torch.arange(6).reshape(3, 2),
    "nested": torch.nested.as_nested_tensor([torch.arange(2), torch.arange(5), torch.arange(1)], layout=torch.jagged),
    "one text": "abc",
    "nothing": None,
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_kind_gives_each_row_its_own_value_with_a_parser_or_without(queue, name):
    column, keys = COLUMNS[name], ["k0", "k1", "k2"]
    if isinstance(column, torch.Tensor):
        rows = list(column.unbind())
    elif isinstance(column, tensordict.NonTensorStack | tensordict.NonTensorData):
        rows = list(column.tolist())
    else:
        rows = [column] * 3 if name in ("one text", "nothing") else list(column)
    batch = TensorDict({"x": column}, batch_size=3)
    queue.kv_batch_put(keys, "plain", batch)
    queue.kv_batch_put(keys, "parsed", batch, data_parser=lambda columns: columns)
    for partition in ("plain", "parsed"):
        for key, value in zip(keys, rows, strict=True):
            stored = queue.kv_batch_get(key, partition).get("x")
            (stored,) = stored.unbind() if isinstance(stored, torch.Tensor) else stored.tolist()
            np.testing.assert_equal(np.asarray(stored), np.asarray(value))


def test_a_column_of_another_length_is_refused_before_a_row_is_written(queue):
    for column in (np.array(["a", "b"]), ("a", "b", "c", "d")):
        for parser in (None, dict):
            with pytest.raises(ValueError, match=r"field 'x' has [24] values for 3 rows\. Nothing was written"):
                queue.kv_batch_put(["a", "b", "c"], "p", TensorDict({"x": column}, batch_size=3), data_parser=parser)
    assert queue.kv_list("p") == {}


def test_a_parser_changes_columns_in_place_and_the_callers_batch_stays(queue):
    def parse(columns):
        columns["x"][1] = "z"
        columns["y"][1] = 9
        return columns

    batch = TensorDict({"x": np.array(["a", "b"]), "y": torch.arange(2)}, batch_size=2)
    queue.kv_batch_put(["a", "b"], "p", batch, data_parser=parse)
    assert queue.kv_batch_get(["a", "b"], "p", "x")["x"] == ["a", "z"] and batch["x"].tolist() == ["a", "b"]
    assert queue.kv_batch_get(["a", "b"], "p", "y")["y"].tolist() == [0, 9] and batch["y"].tolist() == [0, 1]


def test_rows_are_listed_in_the_order_of_making_over_several_servers(far):
    keys = [f"k{i * 37 % 101}" for i in range(101)]
    for start in range(0, 101, 10):
        some = keys[start : start + 10]
        far.kv_batch_put(some, "p", tags=[{} for _ in some])
    far.kv_put(keys[3], "p", tag={"again": True})
    assert list(far.kv_list("p")["p"]) == keys


def test_rows_by_number_are_read_and_written_as_verls_workers_do(far):
    keys = [f"k{number}" for number in range(12)]
    fields = TensorDict({"x": torch.arange(12), "name": tensordict.NonTensorStack(*keys)}, batch_size=12)
    tq.kv_batch_put(keys, "train", fields, [{"place": place} for place in range(12)])
    tq.kv_put("other", "val", {"x": torch.zeros(1)})
    client, order, run = tq.get_client(), [7, 0, 11, 3], asyncio.run  # run on the caller's event loop
    assert len(client.by_home("train", keys)) == 2, "both servers have some of them"
    batch = run(client.async_kv_retrieve_meta([*(keys[place] for place in order), "gone"], "train"))
    assert batch.is_ready and batch.field_names == ["name", "x"] and batch.custom_meta[1] == {"place": 0}
    assert len(set(run(client.async_kv_retrieve_meta(keys, "train")).global_indexes)) == 12
    assert run(client.async_kv_retrieve_keys(batch.global_indexes, "train")) == [keys[place] for place in order]
    data = run(client.async_get_data(batch))
    assert data["x"].tolist() == order and list(data["name"]) == [keys[place] for place in order]
    assert list(run(client.async_get_data(batch.select_fields(["x"]))).keys()) == ["x"]
    part = batch.select_samples([2, 1])
    written = run(client.async_put(TensorDict({"y": data["x"][[2, 1]] * 10}, batch_size=2), metadata=part))
    assert written.field_names == ["name", "x", "y"] and written.is_ready
    assert tq.kv_batch_get(["k11", "k0"], "train", "y")["y"].tolist() == [110, 0]
    assert tq.kv_list("train")["train"]["k11"] == {"place": 11}

    tq.kv_clear("k0", "train")
    before = tq.kv_list("train")
    three, two = (TensorDict({"y": torch.zeros(rows)}, batch_size=rows) for rows in (3, 2))
    for call, error, text in (
        (lambda: client.async_put(two, part), RuntimeError, "no corresponding keys"),
        (lambda: client.async_get_data(batch), RuntimeError, "no corresponding keys"),
        (lambda: client.async_put(three, part), ValueError, "2 rows, and the data 3"),
        (lambda: client.async_kv_retrieve_meta([], "train"), ValueError, "empty list"),
        (lambda: client.async_kv_retrieve_meta("new", "train", create=True), ValueError, "kv_put"),
        (lambda: client.async_get_data(tq.BatchMeta([0, 1], ["train", "val"], {"x": {}})), ValueError, "several"),
    ):
        with pytest.raises(error, match=text):
            run(call())
    assert tq.kv_list("train") == before and not len(run(client.async_kv_retrieve_meta("gone", "train")))


def test_rows_of_several_partitions_are_parted_in_order():
    mixed = tq.BatchMeta([4, 5, 6], ["b", "a", "b"], custom_meta=[{"place": place} for place in range(3)])
    parts = mixed.chunk_by_partition()
    assert [each.global_indexes for each in parts] == [[4, 6], [5]] and parts[0].custom_meta[1] == {"place": 2}


def test_the_version_is_that_of_the_interface(queue):
    assert tq.__version__ == json.loads(tq_calls.RECORD.read_text(encoding="utf-8"))["version"]


def test_a_checkpoint_that_ends_early_is_refused(queue, tmp_path):
    queue.kv_put("a", "p", {"x": torch.arange(100)})
    queue.save_checkpoint(tmp_path / "one")
    (path,) = (tmp_path / "one").glob("rows-*.msgpack")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="is cut off"):
        queue.load_checkpoint(tmp_path / "one")
    assert list(queue.kv_list("p")["p"]) == ["a"], "the servers hold what they held"


def test_writers_of_different_fields_of_one_row_lose_nothing(queue):
    def write(name):
        for i in range(20):
            queue.kv_put(f"k{i}", "p", {name: torch.tensor(i)}, {name: i})

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    [thread.start() for thread in threads]
    [thread.join(30.0) for thread in threads]
    batch = queue.kv_batch_get([f"k{i}" for i in range(20)], "p")
    assert all(torch.equal(batch[name], torch.arange(20)) for name in "abcd")
    assert list(queue.kv_list("p")["p"].values()) == [dict.fromkeys("abcd", i) for i in range(20)]


def test_a_process_that_is_started_later_finds_the_servers(queue):
    queue.kv_put("a", "p", {"x": torch.tensor(7)})
    program = "from memoire import tq; print(int(tq.kv_batch_get('a', 'p')['x'])); tq.close()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "7", done.stderr
