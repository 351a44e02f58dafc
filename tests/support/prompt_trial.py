"""A run of prompts in which everybody is killed: servers, proxies, workers and the trainer, in the middle of everything.

    giver, watcher      this process                   adds prompts; asks for counts all the time
    servers, proxies    killed and started again       at addresses ipc:// that stay
    workers             killed and started again       lengths of answers follow from the prompt's name
    trainer             kills itself between checkpoint and commit, and between commit and checkpoint;
                        is sent back to older checkpoints

Processes are forked from one that has imported everything, so that a new life begins in milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

GRACE = 3.0
"""Seconds beyond its timeout that a call may take on a busy machine."""
COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}


@dataclass
class Trial:
    """What is run, and what is killed."""

    folder: str
    prompts: int = 40
    group: int = 4
    epochs: int = 2
    step_groups: int = 4
    servers: int = 2
    proxies: int = 1
    workers: int = 2
    kills: int = 4
    """Of servers, proxies and workers together."""
    dies_after_checkpoint: int = 2
    dies_after_commit: int = 2
    returns: int = 1
    seconds: float = 60.0
    pause: float = 0.3
    """Seconds between two of these kills, about."""
    seed: int = 0
    plant: str = ""
    """A mistake that has to be found: "skip" or "double" by the trainer, "forget" by servers."""


@dataclass
class Outcome:
    """What was seen."""

    violations: list = field(default_factory=list)
    figures: dict = field(default_factory=dict)


def length_of(dataset: str, epoch: int, index: int, answer: int) -> int:
    """Tokens of an answer: log-normal, mean 380, sigma 1, the same in each life of a worker."""
    seed = hashlib.blake2b(f"{dataset}/{epoch}/{index}/{answer}".encode(), digest_size=8).digest()
    value = np.random.default_rng(int.from_bytes(seed, "big")).lognormal(math.log(380) - 0.5, 1.0)
    return max(1, int(value))


def address(trial: Trial, role: str, number: int) -> str:
    return f"ipc://{trial.folder}/{role}{number}"


# ---------------------------------------------------------------------------------------------------------- roles


def serve(trial: Trial, number: int) -> None:
    import memoire

    state = Path(trial.folder) / f"state{number}"
    if trial.plant == "forget":
        shutil.rmtree(state, ignore_errors=True)
    table = memoire.Table(COLUMNS, storage="prompts", group=trial.group, lease=2.0, attempts=1000, keep=2)
    with memoire.Server(address(trial, "server", number), tables={"t": table}, state_dir=state, name=f"s{number}"):
        signal.pause()


def forward(trial: Trial, number: int) -> None:
    import memoire

    servers = [address(trial, "server", each) for each in range(trial.servers)]
    with memoire.Proxy(address(trial, "proxy", number), servers):
        signal.pause()


def users_of(trial: Trial, number: int, **options):
    import memoire

    # The first user goes through the first proxy, and so on; the last one has the servers' own addresses.
    ways = [[address(trial, "proxy", each)] for each in range(trial.proxies)]
    ways.append([address(trial, "server", each) for each in range(trial.servers)])
    return memoire.Prompts(ways[number % len(ways)], "t", timeout=30.0, **options)


def timed(trial: Trial, call, *arguments, timeout: float = 10.0, **options):
    """Call something again until it succeeds; what takes longer than its timeout is written down."""
    from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError, Refused

    while True:
        began = time.monotonic()
        try:
            return call(*arguments, timeout=timeout, **options)
        except (MemoireTimeout, ParameterError):  # a server is away, or not listed just now
            pass
        except Refused as error:
            if error.code not in ("busy", "closed", "client", "unexpected"):
                raise
        except Closed:
            raise
        except MemoireError:
            raise
        finally:
            if (took := time.monotonic() - began) > timeout + GRACE:
                note(trial, "late", f"{call.__name__} took {took:.1f} s of {timeout:.1f} s")


def note(trial: Trial, kind: str, text: str) -> None:
    with open(f"{trial.folder}/{kind}.txt", "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def work(trial: Trial, number: int) -> None:
    prompts = users_of(trial, number)
    while True:
        for lease in timed(trial, prompts.lease, 2):
            for index in lease.missing:
                size = length_of(*lease.key, index)
                time.sleep(size * 2e-6)
                half = size // 2
                columns = {"tokens": np.arange(size, dtype=np.int32), "reward": np.float32(index % 2)}
                try:
                    if half and index == 0:
                        timed(
                            trial,
                            prompts.answer,
                            lease,
                            index,
                            {"tokens": columns["tokens"][:half]},
                            last=False,
                            piece=0,
                        )
                        rest = columns | {"tokens": columns["tokens"][half:]}
                        timed(trial, prompts.answer, lease, index, rest, piece=1)
                    else:
                        timed(trial, prompts.answer, lease, index, columns)
                except Exception as error:  # the lease has ended, or a restarted server knows less of a piece
                    note(trial, "workers", repr(error))
                    break


def train(trial: Trial, number: int) -> None:
    """One life of the trainer: from its newest checkpoint on, until it is killed or everything is trained."""
    from memoire.errors import EpochOver

    orders = json.loads((Path(trial.folder) / "orders.json").read_text())
    checkpoints = Path(trial.folder) / "checkpoints"
    newest = max((int(path.stem) for path in checkpoints.glob("*.json")), default=-1)
    for step in range(newest - orders.get("back", 0) + 1, newest + 1):
        (checkpoints / f"{step}.json").unlink(missing_ok=True)
    newest = max(-1, newest - orders.get("back", 0))
    wrong = {"skip": 1, "double": -1}.get(trial.plant, 0) if orders.get("after") else 0
    prompts = users_of(trial, 0)
    step = timed(trial, prompts.resume, max(-1, newest + wrong)) if newest >= 0 else timed(trial, prompts.resume, -1)
    step = step if trial.plant == "skip" else newest + 1
    die_at = newest + orders.get("steps", 1 << 30)
    while True:
        try:
            drawn = timed(trial, prompts.draw, step, trial.step_groups)
        except EpochOver:
            (Path(trial.folder) / "over").touch()
            return
        if orders.get("after") == "commit" and step >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        lengths = drawn["tokens"].lengths.tolist()
        rows = [[*drawn.keys[group], lengths[i]] for i, group in enumerate(drawn.group)]
        for key, row in zip(drawn.group, range(len(rows)), strict=True):
            tokens = drawn["tokens"][row]
            if (
                len(tokens) != length_of(*drawn.keys[key], int(drawn.answer[row]))
                or (tokens != np.arange(len(tokens))).any()
            ):
                note(trial, "torn", f"{drawn.keys[key]} answer {drawn.answer[row]} of step {step}")
        made = checkpoints / f"{step}.new"
        made.write_text(json.dumps(rows))
        made.rename(checkpoints / f"{step}.json")
        if orders.get("after") == "checkpoint" and step >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        timed(trial, prompts.commit, step)
        step += 1


ROLES = {"server": serve, "proxy": forward, "worker": work, "trainer": train}


# ------------------------------------------------------------------------------------------------- process of forks


def fork_for_ever(folder: str) -> None:
    """Fork a process for each line of standard input, and tell its id."""
    import memoire.proxy.proxy
    import memoire.reader.calls
    import memoire.server.server  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        trial = Trial(**order["trial"])
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        os.setpgid(0, 0)
        with open(f"{folder}/{order['role']}.log", "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            ROLES[order["role"]](trial, order["number"])
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(0)


class Forks:
    """The process that forks, and what it has forked."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, trial.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.running: dict[tuple[str, int], int] = {}

    def start(self, role: str, number: int) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"role": role, "number": number, "trial": asdict(self._trial)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self.running[role, number] = child = int(self._process.stdout.readline())
        return child

    def is_alive(self, role: str, number: int) -> bool:
        return Path(f"/proc/{self.running[role, number]}").exists()

    def kill(self, role: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.running[role, number], signal.SIGKILL)

    def close(self) -> None:
        for role, number in self.running:
            self.kill(role, number)
        self._process.stdin.close()
        self._process.wait(10.0)
        self._process.stdout.close()


# ------------------------------------------------------------------------------------------------------- the trial


def run(trial: Trial) -> Outcome:
    """Run it; what was violated is in the outcome."""
    outcome, rng, began = Outcome(), random.Random(trial.seed), time.monotonic()
    (Path(trial.folder) / "checkpoints").mkdir()
    forks = Forks(trial)
    try:
        for role, count in (("server", trial.servers), ("proxy", trial.proxies), ("worker", trial.workers)):
            for number in range(count):
                forks.start(role, number)
        watcher = Watcher(trial, outcome)
        _train_to_the_end(trial, forks, rng, began + trial.seconds, outcome, watcher)
        watcher.stop()
        outcome.figures["seconds"] = round(time.monotonic() - began, 1)
    finally:
        forks.close()
    _judge(trial, outcome)
    return outcome


class Watcher:
    """Gives the prompts, and asks for the counts of states all the time."""

    def __init__(self, trial: Trial, outcome: Outcome) -> None:
        self._trial, self._outcome = trial, outcome
        self.polls = 0
        self.last: dict = {}
        self._is_over = threading.Event()
        self._prompts = users_of(trial, trial.proxies)
        for epoch in range(trial.epochs):
            names = {index: f"prompt {index}" for index in range(trial.prompts)}
            timed(trial, self._prompts.add, names, "d", epoch)
            timed(trial, self._prompts.finish, "d", epoch)
        self._given = trial.prompts * trial.epochs
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        from memoire.errors import MemoireError

        while not self._is_over.wait(0.1):
            began = time.monotonic()
            try:
                self.last = self._prompts.counts(timeout=5.0)
            except MemoireError:  # a server is away just now
                continue
            finally:
                if time.monotonic() - began > 5.0 + GRACE:
                    self._outcome.violations.append(f"counts took {time.monotonic() - began:.1f} s")
            self.polls += 1
            if sum(self.last.values()) != self._given:
                self._outcome.violations.append(f"states add up to {sum(self.last.values())}: {self.last}")
                return

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            self.last = self._prompts.counts(timeout=10.0)
        self._is_over.set()
        self._thread.join()
        self._prompts.close()
        self._outcome.figures |= {"polls": self.polls, "states at the end": self.last}


def _train_to_the_end(trial, forks, rng, deadline, outcome, watcher) -> None:
    """One life of the trainer after the other, while others are killed."""
    lives = [{"after": "checkpoint"}] * trial.dies_after_checkpoint + [{"after": "commit"}] * trial.dies_after_commit
    steps = math.ceil(trial.prompts * trial.epochs / trial.step_groups)
    lives = [life | {"steps": rng.randint(1, max(1, steps // (len(lives) + 1)))} for life in lives]
    rng.shuffle(lives)
    for place in rng.sample(range(1, len(lives)), min(trial.returns, max(0, len(lives) - 1))):
        lives[place] = lives[place] | {"back": rng.randint(1, 3)}
    pause = trial.pause
    victims = [(role, number) for role, number in forks.running]
    kills, next_kill, done = Counter(), time.monotonic() + pause, Counter()
    _begin(trial, forks, lives.pop(0) if lives else {})
    while not (Path(trial.folder) / "over").exists():
        if time.monotonic() > deadline:
            outcome.violations.append(f"not over after {trial.seconds} s: {watcher.last}")
            break
        if not forks.is_alive("trainer", 0) and not (Path(trial.folder) / "over").exists():
            done["lives"] += 1
            _begin(trial, forks, lives.pop(0) if lives else {})
        if sum(kills.values()) < trial.kills and time.monotonic() > next_kill:
            role, number = rng.choice(victims)
            forks.kill(role, number)
            kills[role] += 1
            forks.start(role, number)
            next_kill = time.monotonic() + pause * rng.uniform(0.5, 1.5)
        time.sleep(0.01)
    left = len(lives)
    outcome.figures |= {"kills": dict(kills), "lives of the trainer": done["lives"] + 1, "deaths that never came": left}


def _begin(trial: Trial, forks: Forks, orders: dict) -> None:
    (Path(trial.folder) / "orders.json").write_text(json.dumps(orders))
    forks.start("trainer", 0)


def _judge(trial: Trial, outcome: Outcome) -> None:
    rows = [
        row
        for path in sorted((Path(trial.folder) / "checkpoints").glob("*.json"), key=lambda path: int(path.stem))
        for row in json.loads(path.read_text())
    ]
    trained = Counter((dataset, epoch, index) for dataset, epoch, index, _ in rows)
    expected = {("d", epoch, index) for epoch in range(trial.epochs) for index in range(trial.prompts)}
    missing, twice = expected - trained.keys(), {key for key, count in trained.items() if count != trial.group}
    if missing:
        outcome.violations.append(f"{len(missing)} prompts were never trained on, such as {min(missing)}")
    if twice:
        outcome.violations.append(f"{len(twice)} prompts were trained on more than once, such as {min(twice)}")
    generated = [length_of(*key, answer) for key in sorted(expected) for answer in range(trial.group)]
    outcome.figures["trained"], outcome.figures["KS p"] = (
        len(trained),
        round(ks([row[3] for row in rows], generated), 3),
    )
    if outcome.figures["KS p"] <= 0.05:
        outcome.violations.append(f"lengths trained on are not those generated: p = {outcome.figures['KS p']}")
    for kind in ("late", "torn"):
        path = Path(trial.folder) / f"{kind}.txt"
        if path.exists():
            outcome.violations += [f"{kind}: {line}" for line in path.read_text().splitlines()[:5]]


def ks(one: list, other: list) -> float:
    """p of the two-sample test of Kolmogorov and Smirnov, by its asymptotic series."""
    if not one or not other:
        return 0.0
    first, second = np.sort(one), np.sort(other)
    values = np.concatenate([first, second])
    gap = np.abs(
        np.searchsorted(first, values, "right") / len(first) - np.searchsorted(second, values, "right") / len(second)
    ).max()
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second))) * gap
    if root < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * root * root) for k in range(1, 101))))


if __name__ == "__main__":
    fork_for_ever(sys.argv[1])
