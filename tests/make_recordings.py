"""Recordings of a dashboard's input from clusters, in tests/recordings: `python tests/make_recordings.py [NAME ...]`.

tests/recordings/verdicts.json was written first: it describes each recording, and the verdicts that a person expects at
which second. A recording holds all calls of `Cluster` in order, as msgpack within xz. Each takes about a minute and a
half, and all are made at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import memoire
from memoire.dashboard.collect.aggregator import Aggregator
from memoire.dashboard.collect.cluster import Cluster
from memoire.dashboard.collect.counters import NodeAnswer
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings
from memoire.limits import wall_clock
from memoire.nodes.http import NodePages

FOLDER = Path(__file__).with_name("recordings")
EVERY = 5.0
"""Seconds between two polls: rates need two polls within ten seconds."""
EVENT = 30.0
"""Seconds after which the event of a recording happens, if it has one."""
SCHEMA = memoire.Schema(
    {
        "obs": memoire.Column(np.float32, (2,), "state"),
        "reward": memoire.Column(np.float32, (), "reward"),
    }
)
STEPS = 100.0
"""Entries that each actor records in a second."""
BATCH = 16


class Recorder(Cluster):
    """Cluster that records its calls and their arguments."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.told: list[tuple[str, Any, float]] = []

    def listed(self, urls: Any, now: float) -> None:
        self.told.append(("listed", list(urls), now))
        super().set_addresses(urls, now)

    def apply(self, answer: NodeAnswer) -> None:
        self.told.append(("apply", dataclasses.asdict(answer), 0.0))
        super().apply(answer)

    def look(self, now: float) -> Any:
        self.told.append(("look", None, now))
        return super().refresh(now)


def node(role: str, *arguments: str) -> None:
    """Run one process of a cluster: serve its pages, print its address and theirs, and go on until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with contextlib.ExitStack() as stack:
        peer: Any
        if role == "server":
            parameters = memoire.Parameters(cache_size=32)
            peer = stack.enter_context(
                memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="server-0", parameters=parameters)
            )
        else:
            peer = stack.enter_context(memoire.Proxy("tcp://127.0.0.1:0", [arguments[0]], name="proxy-0"))
        pages = stack.enter_context(NodePages("127.0.0.1:0", peer))
        print(json.dumps([peer.endpoint, pages.url]), flush=True)
        ended.wait()


def act(url: str, name: str, steps: str) -> None:
    """Record so many steps a second as an actor, in episodes of 50, until SIGTERM; then leave."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with memoire.connect(url, name=name, timeout=60.0) as client:
        writer = client.writer(check=False)
        print("[]", flush=True)
        began, number = time.monotonic(), 0
        while not ended.wait(max(0.0, began + number / float(steps) - time.monotonic())):
            for _ in range(10):
                number += 1
                obs = np.full(2, number, np.float32)
                writer.step(obs, None, 1.0, number % 50 == 0, False, obs + 1, {})


def learn(url: str, rate: str) -> None:
    """Draw so many samples a second as a learner, or as many as possible for "all", until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with memoire.Reader([url], name="learner-0", timeout=60.0) as reader:
        print("[]", flush=True)
        pause = 0.0 if rate == "all" else BATCH / float(rate)
        while not ended.wait(pause):
            with contextlib.suppress(memoire.errors.NotEnoughSamples, memoire.errors.MemoireTimeout):
                reader.get_batch(BATCH, timeout=5.0)


@contextlib.contextmanager
def child(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """Run a process of this script and yield it with its first line; kill the process at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def record(name: str) -> None:
    plan = json.loads((FOLDER / "verdicts.json").read_text(encoding="utf-8"))[name]
    with contextlib.ExitStack() as stack:
        _, (server, server_pages) = stack.enter_context(child("server"))
        proxy, (front, proxy_pages) = stack.enter_context(child("proxy", server))
        steps, number = ("20", 1) if name == "starved" else (str(STEPS), 3)
        actors = [stack.enter_context(child("act", front, f"actor-{n}", steps))[0] for n in range(number)]
        stack.enter_context(child("learn", server, {"starved": "all", "behind": "30"}.get(name, "190")))
        events = {
            "cut": lambda: proxy.send_signal(signal.SIGSTOP),
            "killed": lambda: actors[0].kill(),
            "gone": lambda: [each.terminate() for each in actors],
        }
        settings = Settings(nodes=(server_pages, proxy_pages), poll_every=EVERY, **plan["settings"])
        recorder = Recorder(settings)
        watch = Aggregator(settings, History(None), cluster=recorder)
        began = time.monotonic()
        while (passed := time.monotonic() - began) <= plan["last"] + 1.0:
            if passed >= EVENT and name in events:
                events.pop(name)()
            seen = watch.poll(EVERY)
            print(f"{name} {passed:.0f}: {', '.join(each.code for each in seen.verdicts)}", flush=True)
            time.sleep(max(0.0, EVERY - (time.monotonic() - began) % EVERY))
        watch.close()
    packed = lzma.compress(msgspec.msgpack.encode({"made": wall_clock(), "told": recorder.told}), preset=9)
    (FOLDER / f"{name}.xz").write_bytes(packed)
    print(f"{name}: {len(packed)} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.child:
        role, *rest = args.child
        {"act": act, "learn": learn}.get(role, lambda *words: node(role, *words))(*rest)
        return
    names = args.names or list(json.loads((FOLDER / "verdicts.json").read_text(encoding="utf-8")))
    threads = [threading.Thread(target=record, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
