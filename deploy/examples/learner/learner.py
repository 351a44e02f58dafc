"""Learner to start your own from: learns CartPole from the steps of all actors, and publishes its network.

The chart passes all addresses in environment variables (docs/kubernetes.md). With learner.embedsServer the learner is
also the cluster's server, which draws batches fastest; else it reads over the network. Nothing else differs.
"""

import contextlib
import os
import signal
import threading
from pathlib import Path

import numpy as np

import memoire
from memoire.errors import Closed
from memoire.nodes.http import NodePages
from memoire.rl.demo.qlearning import DoubleQ

# The output of `memoire schema CartPole-v1`, written by hand: obs, action and reward of each step.
SCHEMA = memoire.Schema(
    {
        "obs": memoire.Column(np.float32, (4,), "state"),
        "action": memoire.Column(np.int64),
        "reward": memoire.Column(np.float32, (), "reward"),
    }
)
PARAMETERS = memoire.Parameters(multi_step=3, discount=0.99)
PUBLISH_EVERY = 5
SAVE_EVERY = 500
TIMEOUT = 600.0  # seconds without a batch: an autoscaler may have to start nodes for the actors


def source(environment: "os._Environ[str]") -> "memoire.Server | memoire.Reader":
    """Return the source of batches: a server in this process, or a reader of all servers of the cluster."""
    if "MEMOIRE_LISTEN" not in environment:
        return memoire.Reader([environment["MEMOIRE_ENDPOINT"]], timeout=TIMEOUT)
    state = environment.get("MEMOIRE_STATE_DIR")
    stored = None if state is None else memoire.State(state, snapshot_caches=True)
    return memoire.Server(
        environment["MEMOIRE_LISTEN"], SCHEMA, parameters=PARAMETERS, name=environment["MEMOIRE_NAME"], state=stored
    )


def main() -> None:
    state = os.environ.get("MEMOIRE_STATE_DIR")
    checkpoint = None if state is None else Path(state).with_name("network")  # beside the server's own folder
    learner = DoubleQ(4, 2)
    if checkpoint is not None and checkpoint.exists():
        learner.network.load(checkpoint.read_bytes())

    with NodePages.from_environment() as pages, source(os.environ) as cluster:
        # Ends the loop; in a separate thread, since the signal may arrive while the main thread holds a lock.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=cluster.close).start())
        pages.show(cluster)
        cluster.publish("policy", learner.network.to_bytes())
        with contextlib.suppress(Closed):
            for count, batch in enumerate(cluster.batches(learner.settings.batch_size, timeout=TIMEOUT)):
                batch.update_priorities(learner.learn(batch))
                if count % PUBLISH_EVERY == 0:
                    cluster.publish("policy", learner.network.to_bytes())
                if count % SAVE_EVERY == 0:
                    save(checkpoint, learner.network.to_bytes())
    save(checkpoint, learner.network.to_bytes())


def save(file: Path | None, content: bytes) -> None:
    """Replace the file atomically; do nothing if `file` is None, since there is no volume."""
    if file is None:
        return
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


if __name__ == "__main__":
    main()
