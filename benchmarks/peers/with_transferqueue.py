"""Side of TransferQueue in benchmarks/groups.py: whole groups of answers from two processes to a trainer.

    python benchmarks/peers/with_transferqueue.py 1024 padded 32   # with TransferQueue 0.1.11 and Ray

The arguments are the number of prompts, a method, and the groups in one put; prompts are a multiple of twice these.
The load is that of `groups.py`: groups of 8 answers, log-normal lengths with mean 380 and sigma 1, tokens, logprobs, a
mask and a reward. A step has 64 groups and is cleared after it is read. The side has two storage units, and three
methods:

    keys       as in verl. `kv_batch_put` of a group, then the tag of its prompt. The trainer lists the tags until 64
               prompts are finished, reads their rows by key, and clears the rows.
    sampler    as in its tutorial. The controller's GRPOGroupNSampler chooses 64 whole groups (`get_meta`). The trainer
               reads (`get_data`) and clears these groups.
    padded     as `sampler`, with the rows of a group padded to one length before a put.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

GROUP, GROUPS, WORKERS = 8, 64, 2
FIELDS = ["tokens", "logprob", "mask", "reward"]
POLL = 0.005
"""Seconds between two requests for the tags."""


def answer_of(rng, mean=380.0):
    size = max(1, int(rng.lognormal(math.log(mean) - 0.5, 1.0)))
    tokens = torch.from_numpy(rng.integers(0, 32_000, size, dtype=np.int32))
    return {"tokens": tokens, "logprob": torch.rand(size), "mask": tokens > 9, "reward": torch.tensor(float(size % 2))}


def rows_of(answers, padded):
    """Return answers as TransferQueue takes them: nested tensors, or padded tensors."""
    columns = {}
    for name in FIELDS:
        rows = [each[name] for each in answers]
        if rows[0].dim() == 0:
            columns[name] = torch.stack(rows)
        elif padded:
            columns[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        else:
            columns[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict(columns, batch_size=len(answers))


@ray.remote(num_cpus=0)
class Worker:
    """Worker process that puts groups of answers, which are created beforehand."""

    def __init__(self, number, way, batch) -> None:
        torch.set_num_threads(1)
        tq.init()
        rng = np.random.default_rng(number)
        answers = [answer_of(rng) for _ in range(256)]
        self.number, self.way, self.batch = number, way, batch
        self.rows = {
            count: [
                rows_of([answers[pick] for pick in rng.integers(0, 256, count * GROUP)], way == "padded")
                for _ in range(max(1, 64 // count))
            ]
            for count in {1, batch}
        }

    def put(self, groups, partition) -> None:
        """Put so many groups into a partition, `batch` groups at once."""
        count = min(self.batch, groups)
        for first in range(0, groups, count):
            uids = [f"{self.number}-{place}" for place in range(first, first + count)]
            keys, tags = [f"{uid}_{i}_0" for uid in uids for i in range(GROUP)], [{"seq_len": 380}] * (GROUP * count)
            batches = self.rows[count]
            tq.kv_batch_put(keys, partition, batches[first // count % len(batches)], tags)
            if self.way == "keys":
                tq.kv_batch_put(uids, partition, tags=[{"is_prompt": True, "status": "finished"}] * count)


def by_keys(prompts, partition):
    """Read the answers of finished prompts by key; return the number of answers."""
    read = 0
    while read < prompts * GROUP:
        finished = [key for key, tag in tq.kv_list(partition).get(partition, {}).items() if tag.get("is_prompt")]
        wanted = min(GROUPS, prompts - read // GROUP)
        if len(finished) < wanted:
            time.sleep(POLL)
            continue
        keys = [f"{uid}_{i}_0" for uid in finished[:wanted] for i in range(GROUP)]
        data = tq.kv_batch_get(keys, partition, select_fields=FIELDS)
        read += len(data)
        tq.kv_clear([*finished[:wanted], *keys], partition)
    return read


def by_sampler(prompts, partition):
    """Read the answers that the controller's sampler chooses; return the number of answers."""
    client, read = tq.get_client(), 0
    while read < prompts * GROUP:
        wanted = min(GROUPS * GROUP, prompts * GROUP - read)
        meta = client.get_meta(
            data_fields=FIELDS, batch_size=wanted, partition_id=partition, mode="fetch", task_name="train"
        )
        if not meta.size:
            time.sleep(POLL)
            continue
        read += len(client.get_data(meta))
        client.clear_samples(meta)
    return read


def main(prompts: int, way: str, batch: int) -> None:
    """Print the answers a second from the first put to the last read, and the seconds until the first group."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=GROUP)
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
    tq.init(conf | ({} if way == "keys" else {"controller": {"sampler": sampler, "polling_mode": True}}))
    workers = [Worker.remote(number, way, batch) for number in range(WORKERS)]
    read = by_keys if way == "keys" else by_sampler
    ray.get(workers[0].put.remote(1, "warm"))
    read(1, "warm")
    first = time.perf_counter() - began
    ray.get([each.put.remote(1, "warm2") for each in workers])
    read(WORKERS, "warm2")
    clock = time.perf_counter()
    running = [each.put.remote(prompts // WORKERS, "train") for each in workers]
    rate = read(prompts, "train") / (time.perf_counter() - clock)
    ray.get(running)
    tq.close()
    ray.shutdown()
    print(f"TransferQueue 0.1.11, {way}, {batch} groups a put: {rate:.0f} answers/s, first group after {first:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
