"""What do prompts come to on TransferQueue with verl 0.9.1's asynchronous buffer, if processes are killed?

    python benchmarks/peers/verl_kills.py --prompts 120 --kills 6       # in an environment with verl and Ray

A trainer process draws groups by verl's `ReplayBufferAsync`, submits prompts and reissues those in flight by verl's own
methods. Every few steps it saves a checkpoint: TransferQueue's, its own list of what it has trained on, then the
pointer to both. Two Ray actors answer. Trainer and actors are killed in turn by SIGKILL, and the trainer starts again
from its checkpoint. In the end each prompt should be in the list once. Printed beside it: groups that were trained on
and are in no checkpoint, answers that were made in vain, waits without an end (30 s without a step), failed starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from pathlib import Path

BATCH, ANSWERS, WORKERS, SAVE_EVERY, AHEAD = 4, 4, 2, 4, 3
PATIENCE = 30.0
warnings.filterwarnings("ignore")


class Folder:
    """What the processes tell each other."""

    def __init__(self, path) -> None:
        self.path = Path(path)

    def note(self, name, line) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def lines(self, name) -> list[str]:
        path = self.path / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def answerer_of(folder):
    """The class of Ray actors that answer prompts as verl's agent loops do."""
    import ray

    @ray.remote(num_cpus=0)
    class Answerer:
        def __init__(self) -> None:
            import transfer_queue as tq

            tq.init()
            self.tq, self.folder = tq, Folder(folder)
            self.folder.note("workers", os.getpid())

        def generate_sequences(self, uids) -> None:
            for uid in uids:
                threading.Thread(target=self.answer, args=(uid,), daemon=True).start()

        def answer(self, uid) -> None:
            import torch
            from tensordict import TensorDict

            self.tq.kv_put(uid, "train", tag={"status": "running"})
            for session in range(ANSWERS):
                time.sleep(random.uniform(0.0, 0.2))
                row = TensorDict({"rm_scores": torch.tensor([[float(session % 2)]])}, batch_size=1)
                self.tq.kv_batch_put([f"{uid}_{session}_0"], "train", row, [{"status": "success"}])
                self.folder.note("answers", uid)
            self.tq.kv_put(uid, "train", tag={"status": "finished"})

    return Answerer


def train(path, prompts, address) -> None:
    """The trainer's process, from its newest checkpoint on."""
    import ray

    ray.init(address=address, namespace="verl", log_to_driver=False, logging_level="ERROR")
    import torch
    import transfer_queue as tq
    from tensordict import NonTensorStack, TensorDict
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    folder, tq_conf = Folder(path), {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    tq.init(tq_conf)
    answerers = [answerer_of(path).remote() for _ in range(WORKERS)]

    def generate(batch) -> None:
        uids = list(batch["uid"])
        ray.get([each.generate_sequences.remote(uids[place::WORKERS]) for place, each in enumerate(answerers)])

    manager = types.SimpleNamespace(generate_sequences=generate)
    trainer = types.SimpleNamespace(trainer_mode="separate_async", global_steps=1, agent_loop_manager=manager)
    trained, given = [], 0
    if newest := folder.lines("newest"):
        state = json.loads((folder.path / newest[-1] / "state.json").read_text(encoding="utf-8"))
        trained, given, trainer.global_steps = state["trained"], state["given"], state["step"] + 1
        tq.load_checkpoint(folder.path / newest[-1] / "queue")
        PPOTrainer._reissue_inflight_prompts(trainer)

    def submit(count) -> None:
        nonlocal given
        uids = [f"u{place}" for place in range(given, min(given + count, prompts))]
        if uids:
            rows = {"uid": NonTensorStack(*uids), "index": torch.arange(len(uids))}
            PPOTrainer._submit_batch_to_rollout(trainer, TensorDict(rows, batch_size=len(uids)))
        given += len(uids)

    buffer = ReplayBufferAsync(
        "separate_async", None, max_off_policy_threshold=None, max_off_policy_strategy="wait", sampler_kwargs={},
        poll_interval=0.05,
    )  # fmt: skip
    if not given:
        submit(AHEAD * BATCH)
    while len(trained) < prompts:
        submit(BATCH)
        meta, _ = buffer.sample(trainer.global_steps, "train", min(BATCH, prompts - len(trained)))
        tq.kv_batch_get(meta.keys, meta.partition_id)
        groups = sorted({key.split("_")[0] for key in meta.keys})
        trained += groups
        folder.note("steps", " ".join(groups))
        tq.kv_clear(meta.keys, meta.partition_id)
        if trainer.global_steps % SAVE_EVERY == 0 or len(trained) >= prompts:
            name = f"step-{trainer.global_steps}"
            (folder.path / name).mkdir(exist_ok=True)
            tq.save_checkpoint(folder.path / name / "queue")
            state = {"trained": trained, "given": given, "step": trainer.global_steps}
            (folder.path / name / "state.json").write_text(json.dumps(state), encoding="utf-8")
            folder.note("newest", name)
        trainer.global_steps += 1
    tq.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options.trainer[0], options.prompts, options.trainer[1])
        return
    import ray

    address = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR").address_info[
        "address"
    ]
    rng, found = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(path)
        while run_once(folder, options.prompts, address, options.kills - found["killed"], rng, found):
            continue
        report(folder, options.prompts, found)
    ray.shutdown()


def run_once(folder, prompts, address, left, rng, found) -> int:
    """One life of the trainer; its exit status."""
    command = [sys.executable, __file__, "--prompts", str(prompts), "--trainer", str(folder.path), address]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    begun = steps = len(folder.lines("steps"))
    moved, at = time.monotonic(), begun + rng.randint(1, 2 * SAVE_EVERY)
    while process.poll() is None:
        time.sleep(0.05)
        now = len(folder.lines("steps"))
        if now != steps:
            steps, moved = now, time.monotonic()
        if time.monotonic() - moved > PATIENCE + (60.0 if steps == begun else 0.0):
            found["waits without an end"] += 1
            process.kill()
            process.wait()
        elif left and steps >= at:
            time.sleep(rng.uniform(0.0, 0.3))
            victim = process.pid if left % 2 else int(folder.lines("workers")[-1])
            found["killed"] += 1
            found["trainers killed" if left % 2 else "workers killed"] += 1
            left, at = left - 1, steps + rng.randint(1, 2 * SAVE_EVERY) if left > 1 else 10**9
            os.kill(victim, signal.SIGKILL)
    if process.returncode not in (0, -signal.SIGKILL):
        found["trainer ended with an error"] += 1
    return process.returncode


def report(folder, prompts, found) -> None:
    newest = folder.lines("newest")[-1]
    trained = Counter(json.loads((folder.path / newest / "state.json").read_text(encoding="utf-8"))["trained"])
    done = Counter(uid for line in folder.lines("steps") for uid in line.split())
    made = len(folder.lines("answers"))
    print(dict(found))
    print(f"{prompts} prompts: {prompts - len(trained)} lost, {sum(count > 1 for count in trained.values())} doubled")
    again, vain = sum(done.values()) - prompts, made - prompts * ANSWERS
    print(f"{again} groups were trained on again; {vain} of {made} answers were made in vain")


if __name__ == "__main__":
    main()
