"""Is every episode returned once while a thousand observers come and go?

One agent keeps sixteen episodes running. Observers join it one after the other, a thousand in all, up to eight at a
time. Each of them leaves after some episodes: half of them are killed (SIGKILL), also in the middle of an episode, a
tenth are stopped (SIGSTOP) for longer than their lease and go on before they are killed, and the others close. No
episode may be returned twice or with entries of another one, none may be lost, and no future may fail. The agent's
memory, threads and descriptors must not grow.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
from _kit import TESTS, descriptors, end, memory, say, table, threads

import observer_child
from memoire.rl import Agent

AT_ONCE = 8
EPISODES = 16
LEASE = 2.0
GROWN = 64 << 20
"""Bytes by which the agent may grow."""
FACTORY = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from observer_child import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main("run", sys.argv[2])
    print(pid, flush=True)
"""
"""Imports everything once, and forks an observer for each line: a thousand interpreters would take half an hour."""


class Churn:
    """The observers that are there, and what becomes of them."""

    def __init__(self, url: str, joins: int, seed: int) -> None:
        command = [sys.executable, "-c", FACTORY, str(TESTS / "support"), url]
        self.factory = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.joined, self.killed, self.stopped = 0, 0, 0
        self._joins, self._rng = joins, random.Random(seed)
        self._there: dict[int, float] = {}  # and when each of them goes
        self._asleep: dict[int, float] = {}

    def turn(self) -> bool:
        """Let some come and go; False when all have been there."""
        now = time.monotonic()
        while self.joined < self._joins and len(self._there) < AT_ONCE:
            self.factory.stdin.write("one\n")
            self.factory.stdin.flush()
            self._there[int(self.factory.stdout.readline())] = now + self._rng.uniform(0.2, 1.5)
            self.joined += 1
        for pid in [pid for pid, at in self._there.items() if at <= now]:
            del self._there[pid]
            if self._rng.random() < 0.1:
                os_kill(pid, signal.SIGSTOP)
                self._asleep[pid] = now + 1.5 * LEASE
                self.stopped += 1
            else:
                os_kill(pid, self._rng.choice([signal.SIGKILL, signal.SIGTERM]))
                self.killed += 1
        for pid in [pid for pid, at in self._asleep.items() if at <= now]:
            del self._asleep[pid]
            os_kill(pid, signal.SIGCONT)
            self._there[pid] = now + 0.5
        return self.joined < self._joins or bool(self._there or self._asleep)

    def end(self) -> None:
        """End whatever is left."""
        for pid in [*self._there, *self._asleep]:
            os_kill(pid, signal.SIGKILL)
        self.factory.stdin.close()
        self.factory.kill()
        self.factory.wait(10)


def os_kill(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        say(f"observer {pid} had ended by itself")


def main() -> int:
    """Run the trial and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    violated: list[str] = []
    kit = observer_child
    with Agent("tcp://127.0.0.1:*", kit.INPUTS, kit.OUTPUTS, kit.act, kit.ENTRIES, lease=LEASE, attempts=50) as agent:
        churn = Churn(agent.endpoint, given.joins, given.seed)
        waiting: dict[object, int] = {}
        returned: list[int] = []
        mark, sizes = 0, None
        try:
            while churn.turn():
                while len(waiting) < EPISODES and churn.joined < given.joins:
                    mark += 1
                    waiting[agent.run_episode(steps=5, pause=0.02, mark=mark)] = mark
                done, _ = agent.wait(waiting, min_done=0)
                for future in done:
                    wanted = waiting.pop(future)
                    if future.exception() is not None:
                        violated.append(f"episode {wanted}: {future.exception()}")
                        continue
                    episode = future.result()
                    found = np.unique(episode.columns["obs"][:, 1]).tolist()
                    returned.append(wanted)
                    if found != [wanted] or len(episode) != 5:
                        violated.append(f"episode {wanted} came with entries of {found}, {len(episode)} of them")
                if sizes is None and churn.joined > given.joins // 5:
                    sizes = memory(), threads(), descriptors()
                time.sleep(0.01)
            for future in waiting:  # nobody is left for the last ones
                future.cancel()
            stats = agent.stats()
        finally:
            churn.end()
        grown = [after - before for after, before in zip((memory(), threads(), descriptors()), sizes, strict=True)]
    if len(returned) != len(set(returned)):
        violated.append(f"{len(returned) - len(set(returned))} episodes were returned twice")
    jobs = stats.jobs
    if jobs.done != len(returned) or jobs.lost or jobs.failed or stats.faults:
        violated.append(f"{len(returned)} episodes were returned, and {jobs}, faults {stats.faults}")
    if grown[0] > GROWN or grown[1] > 2 or grown[2] > 3 * AT_ONCE:
        violated.append(f"the agent has grown by {grown[0]} bytes, {grown[1]} threads, {grown[2]} descriptors")
    rows = [
        ["observers that joined", churn.joined],
        ["that were killed, SIGTERM among it", churn.killed],
        ["that were stopped for longer than their lease", churn.stopped],
        ["episodes returned, each once", len(returned)],
        ["leases that ended", jobs.expired],
        ["results that came too late", jobs.late],
        ["bytes by which the agent grew", grown[0]],
    ]
    print(table(["", "count"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
