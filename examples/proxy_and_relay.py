"""Small cluster in one process: two servers, a proxy in front of the servers, a relay on a Unix socket, actors, a
reader.

actors ──ipc──▶ relay ──tcp──▶ proxy ──tcp──▶ two servers        reader ──tcp──▶ proxy
"""

import tempfile
from contextlib import ExitStack

import numpy as np

import memoire

schema = memoire.Schema(
    {"obs": memoire.Column(np.float32, (2,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
parameters = memoire.Parameters(cache_size=64)

with ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    servers = [
        stack.enter_context(memoire.Server("tcp://127.0.0.1:0", schema, parameters=parameters, name=name))
        for name in ("server-0", "server-1")
    ]
    proxy = stack.enter_context(memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint for server in servers]))
    relay = stack.enter_context(memoire.Proxy(f"ipc://{folder}/relay", [proxy.endpoint]))

    actors = [stack.enter_context(memoire.connect(relay.endpoint, seed=number)) for number in range(6)]
    for number, actor in enumerate(actors):
        writer = actor.writer()
        state = np.full(2, number, np.float32)
        writer.reset(state)
        for step in range(100):
            following = state.copy()
            writer.step(state, None, 1.0, step == 99, False, following, {})
            state = following
        actor.push_cache(timeout=10.0)
        actor.update(timeout=10.0)
        print(f"actor {number} is counted by {actor.home}")

    # One address is enough: the reader finds two servers, and draws as if from all actors' memories at once.
    reader = stack.enter_context(memoire.Reader([proxy.endpoint], seed=0))
    batch = reader.get_batch(128, timeout=10.0)
    owners = {int(value) for value in batch["obs"][:, 0]}
    print(f"a batch of {len(batch.ids)} from {len(owners)} actors, {sum(s.total_steps for s in servers)} steps counted")
