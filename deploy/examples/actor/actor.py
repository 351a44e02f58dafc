"""Actor to start your own from: plays CartPole with the newest network, and records the steps.

The chart passes all addresses in environment variables (docs/kubernetes.md). Replace CartPole with your environment,
and `Network` with your network: the learner publishes bytes, whose format only learner and actors need to know.
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
TIMEOUT = 300.0  # seconds for the cluster to come up


def main() -> None:
    ending = threading.Event()  # a container that ignores SIGTERM is killed, and loses steps not yet sent
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    index = os.environ.get("JOB_COMPLETION_INDEX")  # set in a Job's Pods: 0, 1, ...; other Pods get a random seed
    random = np.random.default_rng(None if index is None else int(index))
    network = Network((4, 128, 128, 2))

    endpoint = os.environ["MEMOIRE_ENDPOINT"]
    with NodePages.from_environment() as pages, memoire.connect(endpoint, timeout=TIMEOUT) as client:
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
