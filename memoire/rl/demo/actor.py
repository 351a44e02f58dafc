"""Actor of the demo: steps a Gymnasium environment by the newest model, and records its entries.

    python -m memoire.rl.demo.actor tcp://proxy:5560 --env CartPole-v1

The program is an example of your own actors: `connect`, a writer for the environments, a model to follow, and a loop
that ends when the run is finished. The client counts entries, draws caches and pushes them.
"""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from memoire import Writer, connect
from memoire.building import ForkedGenerator
from memoire.errors import MemoireTimeout
from memoire.launching import LauncherLine, make_envs, sizes
from memoire.nodes.http import NodePages

from .qlearning import LearningSettings, Network, act

if TYPE_CHECKING:
    import gymnasium

POLICY = "policy"
"""Topic on which the learner publishes the network's weights."""
ANNEAL_STEPS = 1000
"""Steps of an actor over which the probability of random actions falls from 1 to epsilon."""
REPORT_STEPS = 10_000
"""Steps between two log lines of an actor."""
LAST_UPDATE_TIMEOUT = 2.0
"""Seconds for the last report of counts of a launched actor; the launcher waits no longer."""
LAST_UPDATE_TIMEOUT_ALONE = 24.0
"""Seconds for the last report of an actor without a launcher: within the 30 s that a Pod of the chart has to end."""
CAPACITY = 200_000
"""Entries of an actor's memory, ten seconds of steps on a fast machine: TD errors come half a second after a draw, and
have to find their entries in the memory.
"""
PATIENCE = 10.0
"""Default of the seconds to wait for the cluster."""


class Player:
    """Stepper of a vector environment with an epsilon-greedy policy; passes each step to a writer.

    Args:
        envs: Vector environment with discrete actions, in autoreset mode same_step.
        writer: Writer of a client or a buffer; None records nothing.
        network: Network of action values; the caller may load new weights between two steps.
        epsilon: Probability of a random action after the first `ANNEAL_STEPS` steps.
        seed: Seed of the environments and of exploration.
    """

    def __init__(
        self,
        envs: "gymnasium.vector.VectorEnv[Any, Any, Any]",
        writer: Writer | None,
        network: Network,
        *,
        epsilon: float,
        seed: int,
    ) -> None:
        self.envs, self.writer, self.network, self.epsilon = envs, writer, network, epsilon
        self.steps = 0
        self.chance = 1.0
        """Current probability of a random action."""
        self._random = ForkedGenerator(seed)
        self._obs, _ = envs.reset(seed=seed)

    def step(self, model_version: int = 0) -> None:
        """Step every environment once, and record the steps with this version."""
        self.chance = max(self.epsilon, 1.0 - self.steps / ANNEAL_STEPS)
        actions = act(self.network, self._obs, self.chance, self._random)
        next_obs, reward, terminated, truncated, info = self.envs.step(actions)
        if self.writer is not None:
            self.writer.step(
                self._obs, actions, reward, terminated, truncated, next_obs, info, model_version=model_version
            )
        self._obs = next_obs
        self.steps += self.envs.num_envs


def play(
    endpoint: str,
    env: str,
    *,
    num_envs: int,
    epsilon: float,
    seed: int,
    capacity: int,
    patience: float = PATIENCE,
    keys: str | None = None,
) -> int:
    """Run an actor until the run is finished, and return 0. The cluster's first answer may take `patience` seconds."""
    with (
        LauncherLine() as line,
        NodePages.from_environment() as pages,
        connect(endpoint, seed=seed, capacity=capacity, timeout=patience, keys=keys) as client,
    ):
        pages.show(client)
        envs = make_envs(env, num_envs)
        inputs, actions = sizes(envs)
        network = Network((inputs, *LearningSettings().hidden, actions), seed)
        player = Player(envs, client.writer(envs), network, epsilon=epsilon, seed=seed)
        policy, version, reported_steps = client.model(POLICY), 0, 0
        client.log(f"playing {env} in {num_envs} parallel environments, seed {seed}")
        line.ready(client=client.client_id.hex())
        while not (client.finished or line.stopping):
            newest = policy.newest()
            if newest is not None and newest.version != version:
                network.load(newest.body)
                version = newest.version
            player.step(version)
            if player.steps >= reported_steps + REPORT_STEPS:
                reported_steps = player.steps
                client.scalars({"epsilon": player.chance})
                client.log(f"{reported_steps:,} steps, now with model version {version}")
        envs.close()
        try:
            client.update(LAST_UPDATE_TIMEOUT if line.is_launched else LAST_UPDATE_TIMEOUT_ALONE)
        except MemoireTimeout as error:  # the cluster may end before the actor
            print(f"the last counts could not be reported: {error}", file=sys.stderr)
        stats = client.stats()
        counts = {"episodes": stats.episodes, "steps": stats.steps, "caches": stats.pushed_caches}
        line.report(client=stats.client, **counts)
        if not line.is_launched:
            print(json.dumps({"client": stats.client} | counts), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run an actor, and return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m memoire.rl.demo.actor", description=about)
    parser.add_argument("endpoint", help="address of a server, proxy or relay")
    parser.add_argument("--env", default="CartPole-v1", help="Gymnasium environment with discrete actions")
    parser.add_argument("--num-envs", type=int, default=4, help="number of parallel environments")
    parser.add_argument("--epsilon", type=float, default=0.05, help="probability of a random action")
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="capacity of the memory in entries")
    parser.add_argument("--seed", type=int, default=0, help="seed of environments, network and exploration")
    parser.add_argument("--patience", type=float, default=PATIENCE, metavar="SECONDS", help="wait for the cluster")
    parser.add_argument("--keys", metavar="FOLDER", help="keys of this process (default: $MEMOIRE_KEYS)")
    parser.add_argument("--nice", type=int, default=0, help="niceness of this process, 0 to 19")
    options = vars(parser.parse_args(arguments))
    os.nice(options.pop("nice"))
    return play(options.pop("endpoint"), **options)


if __name__ == "__main__":
    sys.exit(main())
