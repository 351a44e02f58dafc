"""Costs of groups of answers: draws from small and large stores, balance of ranks, answers from workers to trainers.

    draw       64 groups out of 1,000 and out of 100,000 ready groups, with their columns, in the server's process.
    balance    most tokens of a rank over the mean of all ranks: 64 groups of 8, 4 ranks, mean of 1,000 steps.
    answers    whole groups from two worker processes over one server process to a trainer, answers a second.
    first      seconds from the start of the server's process to the trainer's first group.
    peer       `answers` in turn with the methods of TransferQueue (peers/with_transferqueue.py), the same load for
               both; --peer-path is the PYTHONPATH of an environment with TransferQueue.

Answers are log-normal with mean 380 tokens and sigma 1: int32 tokens, float32 logprobs, a bool mask and a reward.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from measure import Child
from measure import serve as serve_alone

import memoire
from memoire.errors import MemoireTimeout
from memoire.prompts.servers import balance_groups, deal_groups

GROUP, GROUPS, RANKS, LEASED = 8, 64, 4, 32
KINDS = {"tokens": np.int32, "logprob": np.float32, "mask": np.bool_}
COLUMNS = {**{name: (kind, (None,)) for name, kind in KINDS.items()}, "reward": np.float32}


def answer_of(rng: np.random.Generator, mean: float = 380.0) -> dict:
    size = max(1, int(rng.lognormal(math.log(mean) - 0.5, 1.0)))
    tokens = rng.integers(0, 32_000, size, dtype=np.int32)
    logprob, reward = rng.random(size, np.float32), np.float32(size % 2)
    return {"tokens": tokens, "logprob": logprob, "mask": tokens > 9, "reward": reward}


def filled(prompts: int) -> tuple[memoire.Server, object]:
    """Return a server with so many ready groups of short answers, and the calls of its table."""
    table = memoire.Table(COLUMNS, storage="prompts", group=GROUP, keep=0, byte_limit=8 << 30)
    server = memoire.Server(f"inproc://groups{prompts}", tables={"t": table})
    calls, rng = server.table("t").calls(), np.random.default_rng(0)
    calls.add(dict.fromkeys(range(prompts), b"2+2="), timeout=600.0)
    answers = {index: answer_of(rng, 8.0) for index in range(GROUP)}
    missing = prompts
    while missing:
        for lease in calls.lease(256):
            calls.answers(lease, answers)
            missing -= 1
    return server, calls


def draw(rounds: int) -> None:
    medians = {}
    for prompts in (1_000, 100_000):
        server, calls = filled(prompts)
        with server:
            seconds = []
            for step in range(min(rounds, prompts // GROUPS)):
                began = time.perf_counter()
                calls.draw(step, GROUPS)
                seconds.append(time.perf_counter() - began)
            medians[prompts] = statistics.median(seconds)
            print(f"{GROUPS} groups of {GROUP} out of {prompts}: {1e3 * medians[prompts]:.2f} ms (median of {rounds})")
    print(f"ratio: {medians[100_000] / medians[1_000]:.2f}")


def balance(steps: int) -> None:
    for name, shared in (("each answer's length by itself", False), ("lengths that a prompt's answers share", True)):
        rng = np.random.default_rng(0)
        ratios: dict[str, list[float]] = {"balanced": [], "round robin": []}
        for _ in range(steps):
            shape = (GROUPS, 1) if shared else (GROUPS, GROUP)
            tokens = (np.ones((GROUPS, GROUP)) * rng.lognormal(math.log(380.0) - 0.5, 1.0, shape)).sum(1).astype(int)
            for way, parts in (
                ("balanced", balance_groups(tokens, RANKS)),
                ("round robin", deal_groups(GROUPS, RANKS)),
            ):
                sums = [tokens[part].sum() for part in parts]
                ratios[way].append(max(sums) / np.mean(sums))
        text = ", ".join(f"{way} {np.mean(each):.4f}" for way, each in ratios.items())
        print(f"most tokens of {RANKS} ranks over their mean, {name}, mean of {steps} steps: {text}")


def serve(pipe, address: str, folder: str | None) -> None:
    table = memoire.Table(COLUMNS, storage="prompts", group=GROUP)
    serve_alone(pipe, memoire.Server(address, tables={"t": table}, state=folder))


def work(pipe, address: str, batch: int) -> None:
    """Run a worker, which leases prompts and answers `batch` groups in each request."""
    rng = np.random.default_rng(os.getpid())
    pool = [answer_of(rng) for _ in range(256)]
    with memoire.Prompts(address, "t", timeout=60.0) as prompts, suppress(MemoireTimeout):
        pipe.send("ready")
        while True:
            leases = prompts.lease(LEASED, timeout=10.0)
            picks = iter(rng.integers(0, len(pool), GROUP * LEASED).tolist())
            groups = [(lease, {i: pool[next(picks)] for i in lease.missing}) for lease in leases]
            for first in range(0, len(groups), batch):
                prompts.answer_all(groups[first : first + batch], 1)


@contextmanager
def cluster(workers: int, batch: int = 32, *, durable: bool = False) -> Iterator[memoire.Prompts]:
    """Start a server and workers as processes, and yield a trainer in this process."""
    started: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/server"
        try:
            started.append(Child(serve, address, f"{folder}/state" if durable else None))
            with memoire.Prompts(address, "t", timeout=60.0) as trainer:
                started += [Child(work, address, batch) for _ in range(workers)]
                yield trainer
        finally:
            for child in started:
                child.process.kill()
                child.process.join()


def answers(prompts: int, batch: int = 32, *, durable: bool = False) -> float:
    """Return the answers a second, from adding the first prompt to drawing the last group."""
    with cluster(2, batch, durable=durable) as trainer:
        trainer.add({0: b""}, "warm")
        trainer.finish("warm")
        assert len(list(trainer.groups(1))) == 1
        trainer.commit(0)
        began = time.perf_counter()
        trainer.add(dict.fromkeys(range(prompts), b"What is 2 + 2?"), "d")
        trainer.finish("d")
        drawn = 0
        for step in trainer.groups(GROUPS, first=1):
            drawn += len(step.group)
            trainer.commit(step.step)
        return drawn / (time.perf_counter() - began)


def first() -> float:
    """Return the seconds from the start of a server's process to the first group, with a worker in this process."""
    began = time.perf_counter()
    with cluster(0) as prompts:
        prompts.add({0: b"2+2="})
        for lease in prompts.lease():
            prompts.answers(lease, dict.fromkeys(range(GROUP), answer_of(np.random.default_rng(0))))
        prompts.draw(0, 1)
        return time.perf_counter() - began


LOADS = ((4096, 32, ("sampler", "padded")), (1024, 32, ("sampler", "padded")), (512, 1, ("sampler", "padded", "keys")))
"""Prompts, groups in a request, and the methods of TransferQueue that are measured: keys are the slowest."""


def peer(path: str, rounds: int) -> None:
    """Measure both sides in turn with the same load, so that both share the noise of the machine."""
    firsts: list[float] = []
    for prompts, groups, ways in LOADS:
        ours: list[float] = []
        theirs: dict[str, list[float]] = {way: [] for way in ways}
        for way in ways * rounds:
            ours.append(answers(prompts, groups))
            rate, first_group = transfer_queue(path, prompts, way, groups)
            theirs[way].append(rate)
            firsts.append(first_group)
        medians = {way: statistics.median(rates) for way, rates in theirs.items()}
        memoire_rate, best = statistics.median(ours), max(medians.values())
        text = ", ".join(f"{way} {rate:,.0f}" for way, rate in medians.items())
        print(
            f"{prompts} prompts, {groups} groups a request: memoire {memoire_rate:,.0f} answers/s, TransferQueue {text}"
        )
        print(f"{memoire_rate / best:.1f} times its best", flush=True)
    print(f"first group of TransferQueue after {min(firsts):.1f} to {max(firsts):.1f} s, Ray's start included")


def transfer_queue(path: str, prompts: int, way: str, groups: int) -> tuple[float, float]:
    """Run TransferQueue; return its answers a second, and the seconds until its first group."""
    script = Path(__file__).parent / "peers" / "with_transferqueue.py"
    command, environment = [sys.executable, script, str(prompts), way, str(groups)], {**os.environ, "PYTHONPATH": path}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    rate, first_group = re.findall(r"(\d+) answers/s, first group after ([\d.]+) s", output)[0]
    return float(rate), float(first_group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["draw", "balance", "answers", "first"])
    parser.add_argument("--prompts", type=int, default=8192, help="number of prompts of `answers`")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of `draw` and of `peer`")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH with TransferQueue and Ray, for `peer`")
    args = parser.parse_args()
    if "draw" in args.what:
        draw(args.rounds)
    if "balance" in args.what:
        balance(1000)
    if "answers" in args.what:
        for durable, where in ((False, "in memory"), (True, "with a state folder")):
            print(f"whole groups end to end: {answers(args.prompts, durable=durable):.0f} answers/s {where}")
    if "peer" in args.what:
        peer(args.peer_path, args.rounds)
    if "first" in args.what:
        seconds = statistics.median(first() for _ in range(3))
        print(f"first group after the server's start: {seconds:.2f} s, median of 3")


if __name__ == "__main__":
    main()
