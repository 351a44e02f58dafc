"""Calls of TransferQueue's key-value interface, with the recorded answers of TransferQueue 0.1.11.

    python tests/frameworks/tq_calls.py        in an environment with TransferQueue and Ray: writes tests/recordings/transfer_queue.json

Each call is a line of Python that runs after those before it; `tests/frameworks/test_tq.py` runs the same ones on memoire.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

RECORD = Path(__file__).parents[1] / "recordings" / "transfer_queue.json"

CALLS = [
    # calls that put and get single rows
    'tq.kv_put("a", "p", {"x": torch.tensor([1, 2, 3])}, {"s": 1})',
    'tq.kv_put("a", "p", {"y": torch.tensor(2.5)})',
    'tq.kv_put("a", "p", tag={"t": [1, None, "two"], "s": 2})',
    'tq.kv_batch_get("a", "p")',
    'tq.kv_batch_get("a", "p", "x")',
    'tq.kv_batch_get("a", "p", ["y", "x"])',
    'tq.kv_put("b", "p", {"x": torch.arange(4), "s": "text", "d": {"k": (1, 2)}, "l": [1, 2], "n": np.arange(3), "o": None})',
    'tq.kv_batch_get("b", "p")',
    'tq.kv_batch_get(["a", "b"], "p")',
    'tq.kv_batch_get(["b", "a", "b"], "p")',
    'tq.kv_put("c", "p", {"x": torch.arange(4.0)})',
    'tq.kv_put("c", "p", {"x": torch.arange(2)}, {})',
    'tq.kv_batch_get(["a", "c"], "p")',
    'tq.kv_put("e", "p", {"x": torch.zeros(0)})',
    'tq.kv_batch_get("e", "p")',
    'tq.kv_put("h", "p", {"x": torch.ones(2, dtype=torch.bfloat16), "z": torch.tensor([True])})',
    'tq.kv_batch_get("h", "p")',
    # calls for missing rows
    'tq.kv_batch_get("zz", "p")',
    'tq.kv_batch_get("zz", "nowhere")',
    'tq.kv_batch_get(["a", "zz"], "p")',
    'tq.kv_batch_get("a", "p", "nope")',
    'tq.kv_batch_get("a", "p", ["x", "nope"])',
    'tq.kv_batch_get(["a", "b"], "p", "s")',
    'tq.kv_put("only-y", "p", {"w": torch.tensor(1)})',
    'tq.kv_batch_get(["a", "only-y"], "p")',
    'tq.kv_batch_get([], "p")',
    # batches
    'tq.kv_batch_put(["k1", "k2", "k3"], "q", TensorDict({"f": torch.arange(3.0), "g": torch.ones(3, 2)}, batch_size=3), [{"a": i} for i in range(3)])',
    'tq.kv_batch_get(["k3", "k1"], "q")',
    'tq.kv_batch_put(["t1", "t2"], "q", tags=[{"a": 1}, {"b": 2}])',
    'tq.kv_batch_get(["t1"], "q")',
    'tq.kv_batch_get(["t1", "k1"], "q")',
    'tq.kv_batch_put(["k1", "new"], "q", TensorDict({"f": torch.arange(2.0)}, batch_size=2))',
    'tq.kv_batch_get(["k1", "new"], "q")',
    'tq.kv_batch_put(["n1", "n2"], "n", TensorDict({"f": torch.nested.as_nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)}, batch_size=2))',
    'tq.kv_batch_get(["n2", "n1"], "n")',
    'tq.kv_batch_put(["m1", "m2"], "n", TensorDict({"f": NonTensorStack("a", {"b": 1}), "g": torch.ones(2, 3, 2)}, batch_size=2))',
    'tq.kv_batch_get(["m1", "m2"], "n")',
    'tq.kv_batch_get(["m1", "n1"], "n")',
    'tq.kv_put("n4", "n", TensorDict({"f": torch.ones(1, 4)}, batch_size=[1]))',
    'tq.kv_batch_get("n4", "n")',
    'tq.kv_put("k1", "q", {"g": torch.ones(2, 2)})',
    'tq.kv_batch_get(["k1", "k2"], "q", "g")',
    # wrong calls
    'tq.kv_put("a", "p")',
    'tq.kv_batch_put(["a"], "p")',
    'tq.kv_batch_put(["a"], "p", TensorDict({"f": torch.arange(3.0)}, batch_size=3))',
    'tq.kv_batch_put(["a"], "p", tags=[{}, {}])',
    'tq.kv_batch_put([], "p", tags=[])',
    'tq.kv_put("a", "p", {"x": torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.jagged)})',
    'tq.kv_put("a", "p", [1])',
    'tq.kv_clear([], "p")',
    # lists
    'tq.kv_list()',
    'tq.kv_list("p")',
    'tq.kv_list(partition_id="nowhere")',
    # calls with the metadata that a put returned
    'setattr(box, "meta", tq.kv_batch_put(["k1", "k2"], "q", tags=[{"z": 9}, {"z": 8}]))',
    'box.meta',
    'tq.kv_batch_get_by_meta(box.meta)',
    'tq.kv_batch_get_by_meta(box.meta, "f")',
    'tq.kv_batch_get_by_meta(box.meta, ["f", "h"])',
    'tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["k1"], tags=[{}]))',
    'tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["k1"], tags=[{}], partition_id="q"))',
    # calls of a parser of references
    'tq.kv_put("u", "p", {"x": torch.ones(2), "u": "there"}, data_parser=lambda d: {**d, "u": [each.upper() for each in d["u"]]})',
    'tq.kv_batch_get("u", "p")',
    # checkpoints
    'tq.save_checkpoint(box.folder / "one", metadata={"step": 3})',
    'json.loads((box.folder / "one" / "metadata.json").read_text())',
    'tq.kv_put("later", "p", {"x": torch.ones(2)})',
    'tq.kv_clear("a", "p")',
    'tq.load_checkpoint(box.folder / "one")',
    'tq.kv_batch_get("a", "p")',
    'sorted(tq.kv_list("p")["p"])',
    'tq.save_checkpoint(box.folder / "one")',
    'sorted(each.name for each in box.folder.iterdir())',
    'tq.load_checkpoint(box.folder / "none")',
    # removal
    'tq.kv_clear("k1", "q")',
    'tq.kv_clear(["zz", "k2"], "q")',
    'tq.kv_clear("zz", "nowhere")',
    'tq.kv_list("q")',
    'tq.kv_clear(["n1", "n2", "n4", "m1", "m2"], "n")',
    'tq.kv_list("n")',
    'tq.kv_batch_get("n1", "n")',
    'tq.kv_put("n1", "n", {"f": torch.arange(2)})',
    'tq.kv_list("n")',
    'tq.kv_batch_get("n1", "n")',
    # calls that await asynchronous functions
    'run(tq.async_kv_put("z", "as", {"x": torch.arange(3)}, {"s": 1}))',
    'run(tq.async_kv_batch_put(["y", "x"], "as", TensorDict({"x": torch.arange(2)}, batch_size=2), [{"t": 1}, {"t": 2}]))',
    'run(tq.async_kv_batch_get(["x", "y"], "as"))',
    'run(tq.async_kv_batch_get_by_meta(tq.KVBatchMeta(keys=["x"], tags=[{}], partition_id="as", fields=["x"]), "x"))',
    'run(tq.async_kv_list("as"))',
    'run(tq.async_kv_clear(["x", "y"], "as"))',
    'run(tq.async_kv_list("as"))',
    'run(tq.async_kv_batch_get("x", "as"))',
    # calls with metadata of a batch
    'tq.KVBatchMeta(keys=["a"], tags=[])',
    'tq.KVBatchMeta(keys=["a", "a"], tags=[{}, {}])',
    'tq.KVBatchMeta(keys=["a"], tags=[{}], fields=["f", "f"])',
    'setattr(box, "meta", tq.KVBatchMeta(keys=list("abcde"), tags=[{"i": i} for i in range(5)], partition_id="p", fields=["f"], extra_info={"e": 1}))',
    '(len(box.meta), box.meta.size, str(box.meta))',
    'box.meta.chunk(2)',
    'box.meta.chunk(7)[6]',
    'box.meta.select_keys(["d", "b"])',
    'box.meta.select_keys(["b", "b"])',
    'box.meta.select_keys(["q"])',
    'tq.KVBatchMeta.concat(box.meta.chunk(2)[::-1])',
    'tq.KVBatchMeta.concat([])',
    'tq.KVBatchMeta.concat([box.meta, tq.KVBatchMeta(["z"], [{}], "q", ["f"])])',
    'tq.KVBatchMeta.concat([box.meta, tq.KVBatchMeta(["z"], [{}], "p", ["g"])])',
    'box.meta.reorder([4, 3, 2, 1, 0])',
    'box.meta',
    'box.meta.reorder([0, 0, 1, 2, 3])',
    'box.meta.reorder([0])',
    'setattr(box, "rows", tq.BatchMeta([3, 4, 5], ["p"] * 3, {"f": {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": [(1,), (2,), (3,)]}}, production_status=[1, 1, 1], custom_meta=[{"i": i} for i in range(3)]))',
    '(len(box.rows), box.rows.size, box.rows.field_names, box.rows.is_ready)',
    'box.rows.select_samples([2, 0]).global_indexes',
    'box.rows.select_samples([2, 0]).field_schema["f"]["per_sample_shapes"]',
    'box.rows.select_samples([3])',
    '[part.global_indexes for part in box.rows.chunk(2)]',
    'tq.BatchMeta.concat(box.rows.chunk(2)[::-1]).custom_meta',
    'tq.BatchMeta.concat(box.rows.chunk(2)[::-1]).field_schema["f"]["per_sample_shapes"]',
    'box.rows.select_fields([]).field_names',
    'tq.BatchMeta([1], [])',
    'tq.BatchMeta.empty().is_ready',
    # the end
    'tq.get_metrics_endpoint()',
    'type(tq.get_client().close).__name__',
    'tq.close()',
    'tq.kv_list()',
    'tq.get_client()',
    'tq.save_checkpoint(box.folder / "two")',
    'tq.load_checkpoint(box.folder / "two")',
    'tq.close()',
]  # fmt: skip


class Box:
    """Namespace in which calls leave values for later ones."""


def answers(tq: Any, folder: Path) -> list[Any]:
    """Return the result or error of each call as JSON values."""
    box = Box()
    box.folder = folder  # type: ignore[attr-defined]
    known = {"tq": tq, "box": box, "run": asyncio.run, "torch": torch, "np": np, "json": json}
    known |= {"TensorDict": TensorDict, "NonTensorStack": NonTensorStack}
    results = []
    for call in CALLS:
        try:
            results.append(shown(eval(call, known)))  # noqa: S307 (the calls of this file)
        except Exception as error:  # the test compares errors
            results.append({"raises": message_of(error, folder)})
    return results


def message_of(error: Exception, folder: Path) -> str:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    return f"{kinds[0]}: {error}".replace(str(folder), "FOLDER")


def shown(value: Any) -> Any:
    """Return a result as JSON values: types, dtypes, shapes and all numbers."""
    if isinstance(value, TensorDict):
        return {
            "batch": list(value.batch_size),
            "fields": {name: shown(value.get(name)) for name in sorted(value.keys())},
        }
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return {"nested": str(value.layout), "rows": [shown(each) for each in value.unbind()]}
        return {"tensor": str(value.dtype), "shape": list(value.shape), "values": value.tolist()}
    if isinstance(value, NonTensorStack):
        return {"stack": [shown(each) for each in value.tolist()]}
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "values": value.tolist()}
    if type(value).__name__ == "KVBatchMeta":
        names = ("keys", "tags", "partition_id", "fields", "extra_info")
        return {"KVBatchMeta": {name: shown(getattr(value, name)) for name in names}}
    if isinstance(value, dict):
        return {"dict": [[key, shown(each)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [shown(each) for each in value]}
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def main() -> None:
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()
    folder = Path(tempfile.mkdtemp())
    try:
        results = answers(tq, folder)
    finally:
        shutil.rmtree(folder)
    record = {"version": "0.1.11", "answers": [list(pair) for pair in zip(CALLS, results, strict=True)]}
    RECORD.write_text(json.dumps(record, indent=0, ensure_ascii=False) + "\n")
    print(f"{len(CALLS)} calls recorded", file=sys.stderr)


if __name__ == "__main__":
    main()
