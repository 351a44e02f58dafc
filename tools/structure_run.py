"""Run of three processes that lists the modules loaded by an actor and a proxy after a first push, model and priority.

    python tools/structure_run.py    prints {"actor": [...], "proxy": [...]} as JSON

The first process is the server and learner. The server's process starts a proxy and an actor, which connects to the
proxy. PYTHONPATH decides which memoire is loaded. Each wait has a timeout of `TIMEOUT` seconds.
"""

import json
import subprocess
import sys
import time

import numpy as np

import memoire

TIMEOUT = 60.0


def loaded() -> list[str]:
    """Return the names of memoire's modules in this process, compiled ones included."""
    return sorted(name for name in sys.modules if name.split(".")[0] == "memoire")


def act(endpoint: str) -> None:
    """Record steps until a cache is pushed, then receive a model and a priority."""
    ending = time.monotonic() + TIMEOUT
    with memoire.connect(endpoint, seed=1, timeout=TIMEOUT) as client:
        writer = client.writer(num_envs=1, autoreset="disabled")
        for step in range(40):
            obs = np.full((1, 4), step, np.float32)
            ends = np.array([step == 39])
            writer.step(obs, np.array([step]), np.ones(1), ends, np.array([False]), obs + 1, {})
        if not client.push_cache(timeout=TIMEOUT):
            raise SystemExit(f"no cache was pushed: {client.push_reason}")
        client.model("policy").wait(TIMEOUT)
        while not client.stats().applied:
            if time.monotonic() > ending:
                raise SystemExit("no priority was received")
            client.update(timeout=0.1)
        print(json.dumps(loaded()), flush=True)


def relay(server: str) -> None:
    """Run a proxy until standard input ends."""
    with memoire.Proxy("tcp://127.0.0.1:0", [server]) as proxy:
        print(proxy.endpoint, flush=True)
        sys.stdin.read()
        print(json.dumps(loaded()), flush=True)


def learn() -> None:
    """Serve a memory, publish a model and send priorities; print the modules of the actor and the proxy as JSON."""
    schema = memoire.Schema(
        {
            "obs": memoire.Column("float32", (4,), "state"),
            "action": memoire.Column("int64"),
            "reward": memoire.Column("float32", (), "reward"),
        }
    )
    with memoire.Server("tcp://127.0.0.1:0", schema, sampler=memoire.Prioritized(0.6, beta=0.4), seed=0) as server:
        proxy = start("proxy", server.endpoint)
        assert proxy.stdin is not None and proxy.stdout is not None
        actor = start("actor", proxy.stdout.readline().strip())
        try:
            batch = server.get_batch(8, timeout=TIMEOUT)
            server.publish("policy", b"weights")
            batch.update_priorities(np.full(8, 2.0, np.float32))
            of_actor, _ = actor.communicate(timeout=TIMEOUT)
            of_proxy, _ = proxy.communicate(timeout=TIMEOUT)
        finally:
            actor.kill()
            proxy.kill()
    print(json.dumps({"actor": json.loads(of_actor), "proxy": json.loads(of_proxy)}))


def start(role: str, endpoint: str) -> subprocess.Popen[str]:
    """Start this program in a role, with pipes to its standard input and output."""
    command = [sys.executable, __file__, role, endpoint]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        learn()
    else:
        {"actor": act, "proxy": relay}[sys.argv[1]](sys.argv[2])
