"""Check that verl 0.9.1's replay buffer and its reissue of prompts in flight work on memoire with one replaced import.

    python benchmarks/peers/verl_replay.py memoire            # in an environment with verl; transfer_queue is replaced
    python benchmarks/peers/verl_replay.py transfer_queue     # the same on TransferQueue, which needs Ray

verl's own classes run: `ReplayBufferAsync` with group filtering, stale groups and failed ones, `ReplayBuffer`, and the
trainer's `_submit_batch_to_rollout` and `_reissue_inflight_prompts`. A stand-in answers prompts: it writes the same as
verl's agent loops. Half way a checkpoint is saved, everything is closed, and a new queue loads the checkpoint. All
printed lines except the first are the same on both.
"""

from __future__ import annotations

import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import torch
from tensordict import NonTensorStack, TensorDict

ANSWERS, PROMPTS, BATCH = 4, 24, 4
warnings.filterwarnings("ignore")


def queue_of(name):
    """Return the module that verl imports as transfer_queue."""
    if name == "memoire":
        import memoire.tq as tq

        sys.modules["transfer_queue"] = tq
        return tq
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return tq


def as_batch(rows):
    """Return a batch of rows as verl makes it; verl is imported late, after transfer_queue has been replaced."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    return list_of_dict_to_tensordict(rows)


class Answerer:
    """Stand-in for verl's agent loops that answers prompts, except those in `left`, which stay in flight."""

    def __init__(self, tq) -> None:
        self.tq, self.left, self.asked = tq, set(), []

    def generate_sequences(self, batch) -> None:
        """Answer each prompt of a batch: the fields and tags of verl's agent loops."""
        for place, uid in enumerate(batch["uid"]):
            self.asked.append(uid)
            self.answer(uid, int(batch["index"][place]))

    def answer(self, uid, index) -> None:
        if index in self.left and index % 2:
            return  # the prompt stays pending
        self.tq.kv_put(uid, "train", tag={"status": "running"})
        answers = ANSWERS // 2 if index in self.left else ANSWERS
        for session in range(answers):
            self.put(uid, index, session)
        if index not in self.left:
            failed = index % 11 == 10
            self.tq.kv_put(uid, "train", tag={"status": "failure" if failed else "finished"})

    def put(self, uid, index, session) -> None:
        length = 1 + (index + session) % 5
        reward = 1.0 if index % 5 == 0 else float(session % 2)  # every fifth group has no signal
        fields = [
            {
                "prompts": torch.tensor([index]), "responses": torch.arange(length), "loss_mask": torch.ones(length),
                "rm_scores": torch.tensor([0.0] * (length - 1) + [reward]),
                "extra_fields": {"reward_extra_info": {"acc": reward}, "min_global_steps": 1},
            }
        ]  # fmt: skip
        tags = [{"status": "success", "seq_len": 1 + length, "global_steps": 1}]
        batch = as_batch(fields)
        self.tq.kv_batch_put([f"{uid}_{session}_0"], "train", batch, tags)


def prompts_of(indexes):
    """Return a batch of prompts as verl's data loader makes it."""
    rows = [
        {"uid": f"u{index}", "index": torch.tensor(index), "raw_prompt": [{"role": "user", "content": str(index)}]}
        for index in indexes
    ]
    return as_batch(rows)


def trained(tq, meta):
    """Return the groups, the rows and the sum of the values of a batch; clear the batch, as verl's loop does."""
    data = tq.kv_batch_get(meta.keys, meta.partition_id, select_fields=["responses", "rm_scores", "loss_mask"])
    total = sum(float(each.sum()) for name in sorted(data.keys()) for each in data[name].unbind())
    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
    return sorted({key.split("_")[0] for key in meta.keys}), len(meta.keys), total


def main(name) -> None:
    tq = queue_of(name)
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    print(f"verl on {tq.__name__}")
    began = time.perf_counter()
    tq.init()
    answerer, fresh, seen = Answerer(tq), iter(range(PROMPTS, 10 * PROMPTS)), []
    # the attributes that the two methods of verl's trainer read
    trainer = types.SimpleNamespace(trainer_mode="separate_async", global_steps=1, agent_loop_manager=answerer)

    def refill(count) -> None:
        PPOTrainer._submit_batch_to_rollout(trainer, prompts_of([next(fresh) for _ in range(count)]))

    options = {"trainer_config": None, "sampler_kwargs": {}, "poll_interval": 0.01, "refill_fn": refill}
    stale = {"max_off_policy_threshold": 3, "max_off_policy_strategy": "drop"}
    buffer = ReplayBufferAsync("separate_async", **stale, filter_groups_metric="reward", **options)
    answerer.left = {20, 21, 22, 23}
    PPOTrainer._submit_batch_to_rollout(trainer, prompts_of(range(PROMPTS)))

    def train(step, asked) -> None:
        meta, metrics = buffer.sample(asked, "train", BATCH)
        groups, rows, total = trained(tq, meta)
        seen.extend(groups)
        print(f"step {step}: {groups}, {rows} answers, sum {total:g}, {dict(sorted(metrics.items()))}")

    for step in (1, 2):
        train(step, step)
    fresh_enough, left = buffer.get_sampleable_count(2, "train"), buffer.get_sampleable_count(4, "train")
    print(f"sampleable: {fresh_enough}; at step 4, when older ones are stale: {left}")

    with tempfile.TemporaryDirectory() as folder:
        tq.save_checkpoint(Path(folder) / "one", metadata={"global_steps": 2})
        tq.close()  # as if all processes had been killed
        tq.init()
        tq.load_checkpoint(Path(folder) / "one")
    answerer = Answerer(tq)
    trainer.agent_loop_manager, trainer.global_steps = answerer, 3
    again = PPOTrainer._reissue_inflight_prompts(trainer)
    print(f"reissued {again} prompts in flight: {sorted(answerer.asked)}")
    for step in (3, 4, 5):
        train(step, 3)
    print(f"{len(seen)} groups trained, {len(set(seen))} different; left: {len(tq.kv_list('train')['train'])} rows")

    sync = ReplayBuffer("sync", max_off_policy_threshold=None, max_off_policy_strategy="drop", **options)
    prompt = TensorDict({"uid": NonTensorStack("v1")}, batch_size=1)
    tq.kv_batch_put(["v1"], "val", prompt, [{"is_prompt": True, "status": "finished", "global_steps": 1}])
    answerer.put("w", 3, 0)
    tq.kv_batch_put(["v1_0_0"], "val", tq.kv_batch_get("w_0_0", "train"), [{"status": "success"}])
    meta, _ = sync.sample(1, "val", 1)
    print(f"validation: {meta.keys} {meta.tags}; prompts left {list(tq.kv_list('val')['val'])}")
    print(f"took {time.perf_counter() - began:.1f} s", file=sys.stderr)
    tq.close()


if __name__ == "__main__":
    main(sys.argv[1])
