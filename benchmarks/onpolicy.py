"""Entries a second from actors to an on-policy learner, each taken once, beside Reverb's queue.

Actors, in processes of their own, record steps of eight environments as fast as they may, in fragments of 128. The
learner takes 1024 entries at a time, in order of arrival. The server of each side is in the learner's process.
"""

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from measure import TCP, Embedded, Report
from peers.tasks import EPISODE, Task

import memoire

LENGTH, TAKEN = 128, 1024
"""Entries of a fragment, and entries of a take."""
STEPS = 7 * LENGTH
"""Steps of an episode, whole fragments: no fragment waits for the next turn."""
ENVS = 8
"""Number of environments of an actor."""
COUNT, PEER_COUNT = 240, 24
"""Takes of a turn of memoire, and of Reverb, whose turns would otherwise take most of the time."""
PEER_TIMEOUT = 60.0
"""Seconds in which the peer has to start, or to take a turn."""
FACTS = f"""Entries have an observation of 64 float32, an action of 8, a reward, the action's log probability, and
how the episode ended. Each actor has {ENVS} artificial environments. Reverb has a trajectory writer for each
environment, an item for each fragment, and a data set that draws batches of {TAKEN // LENGTH} fragments."""


def record(pipe: Connection, endpoint: str, rank: int) -> None:
    """Run an actor, which records the entries of as many takes as each order says."""
    task = Task("W1", EPISODE)
    frames, actions, rewards = (
        [np.stack([array[place]] * ENVS) for place in range(STEPS + 1)]
        for array in (task.frames, task.actions, task.rewards)
    )
    going, place = np.zeros(ENVS, np.bool_), 0
    with (
        memoire.connect(endpoint, table="rollouts", timeout=60) as client,
        client.writer(num_envs=ENVS, autoreset="disabled") as writer,
    ):
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            while client.room <= 0:  # entries that are recorded without room are left out
                client.update(timeout=60.0)
            for _ in range(count * TAKEN // ENVS):
                obs, following = frames[place], frames[place + 1]
                action, reward, place = actions[place], rewards[place], (place + 1) % STEPS
                ended = going if place else ~going
                writer.step(obs, action, reward, going, ended, following, logp=reward)
            writer.cut()  # a pause without room also cuts, and shifts the ends of later fragments


def embedded(actors: int) -> Embedded:
    """Return memoire's side with so many actors."""
    columns: dict[str, Any] = {"obs": (np.float32, (64,)), "action": (np.float32, (8,))}
    schema = memoire.Schema(columns | {"reward": np.float32, "logp": np.float32})
    table = memoire.Table(schema, storage="rollouts", rollout_length=LENGTH, capacity=64 * TAKEN)
    server = memoire.Server(TCP, tables={"rollouts": table})
    return Embedded(server, partial(server.table("rollouts").take, TAKEN, timeout=60.0), COUNT, record, actors)


def main() -> None:
    report = Report.begin(__doc__, FACTS, peers=True, patience=PEER_TIMEOUT)
    for actors in (each for each in (1, 4) if report.wants(f"{each} actors")):
        ours = embedded(actors)
        theirs = report.peer_group.sides({"reverb": ("Fragments", "W1", LENGTH, ENVS, actors)}, most=PEER_COUNT)
        aims = dict.fromkeys(theirs, f"rollouts-{actors}-reverb")
        settings: dict[str, Any] = {"unit": " entries/s", "per_call": TAKEN, "rounds": 3 if report.quick else 5}
        report.compare(f"rollouts, {actors} actors", ours, theirs, aims=aims, **settings)
        report.peer_group.stop()
        ours.close()
    report.finish("onpolicy")


if __name__ == "__main__":
    main()
