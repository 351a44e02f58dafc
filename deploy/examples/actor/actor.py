"""An actor to begin yours with: plays CartPole with the newest network, and records what happens.

The chart says by the environment where everything is (docs/kubernetes.md). Put your environment where CartPole is, and
your network where `Network` is: the learner publishes bytes, and what they mean is between the two.
"""

import os
import signal
import threading

import gymnasium as gym
import numpy as np

import memoire
from memoire.nodes.http import NodePages
from memoire.rl.demo.qlearning import Network, act

EPSILON = 0.05
PATIENCE = 300.0  # seconds for the cluster to come up


def main() -> None:
    ending = threading.Event()  # a container that does not listen to SIGTERM is killed, with what it had yet to tell
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    index = os.environ.get("JOB_COMPLETION_INDEX")  # of a Job's Pods, 0, 1, ...; others are seeded by chance
    random = np.random.default_rng(None if index is None else int(index))
    network = Network((4, 128, 128, 2))

    endpoint = os.environ["MEMOIRE_ENDPOINT"]
    with NodePages.from_environment() as pages, memoire.connect(endpoint, timeout=PATIENCE) as client:
        pages.show(client)
        envs = gym.make_vec(
            "CartPole-v1", num_envs=4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
        )
        writer, policy, version = client.writer(envs), client.model("policy"), 0
        obs, _ = envs.reset(seed=int(random.integers(1 << 31)))
        while not (client.finished or ending.is_set()):
            newest = policy.newest()
            if newest is not None and newest.version != version:
                network.load(newest.body)
                version = newest.version
            action = act(network, obs, EPSILON if version else 1.0, random)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, model_version=version)
            obs = next_obs
        print(f"ends after {client.stats().steps} steps, with model version {version}", flush=True)


if __name__ == "__main__":
    main()
