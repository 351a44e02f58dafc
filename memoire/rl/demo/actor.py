"""The demo's actor: plays a Gymnasium environment with the newest model, and records what happens.

    python -m memoire.rl.demo.actor tcp://proxy:5560 --env CartPole-v1

Written like an actor of your own would be: `connect`, a writer for the environments, a model to follow, and a loop
that ends when the run is finished. Everything else (counting, drawing caches, pushing them) is the client's work.
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
ANNEAL = 1000
"""Steps of an actor over which its first, random actions give way to the network's."""
REPORT_STEPS = 10_000
"""Steps between two log lines of an actor."""
LAST_WORD = 2.0
"""Seconds in which an actor that ends tries to tell what it did last; a launcher waits no longer."""
LAST_WORD_ALONE = 24.0
"""The same of one that nobody launched: within the 30 s that a Pod of the chart has to end."""
CAPACITY = 200_000
"""Entries that an actor's memory holds: ten seconds of steps of a fast machine. What the learner says of an entry comes
half a second after it was drawn, and has to find it.
"""
PATIENCE = 10.0
"""Seconds to wait for the cluster, unless it is told otherwise."""


class Player:
    """Steps a vector environment with an epsilon-greedy policy and hands each step to a writer.

    Args:
        envs: Vector environment with discrete actions, in autoreset mode same_step.
        writer: Of a client or a buffer; None records nothing.
        network: Whose values the actions follow; whoever owns it may load new weights between two steps.
        epsilon: Chance of a random action, after the first `ANNEAL` steps.
        seed: Of the environments and of exploration.
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
        """Of a random action, now."""
        self._random = ForkedGenerator(seed)
        self._obs, _ = envs.reset(seed=seed)

    def step(self, model_version: int = 0) -> None:
        """Step every environment once."""
        self.chance = max(self.epsilon, 1.0 - self.steps / ANNEAL)
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
    """Play until the run is finished; the exit status. The cluster may take `patience` seconds to answer at first."""
    with (
        LauncherLine() as tether,
        NodePages.from_environment() as pages,
        connect(endpoint, seed=seed, capacity=capacity, timeout=patience, keys=keys) as client,
    ):
        pages.show(client)
        envs = make_envs(env, num_envs)
        inputs, actions = sizes(envs)
        network = Network((inputs, *LearningSettings().hidden, actions), seed)
        player = Player(envs, client.writer(envs), network, epsilon=epsilon, seed=seed)
        policy, version, told = client.model(POLICY), 0, 0
        client.log(f"plays {env} in {num_envs} environments side by side, seed {seed}")
        tether.ready(client=client.client_id.hex())
        while not (client.finished or tether.stopping):
            newest = policy.newest()
            if newest is not None and newest.version != version:
                network.load(newest.body)
                version = newest.version
            player.step(version)
            if player.steps >= told + REPORT_STEPS:
                told = player.steps
                client.scalars({"epsilon": player.chance})
                client.log(f"{told:,} steps, now with model version {version}")
        envs.close()
        try:
            client.update(LAST_WORD if tether.is_launched else LAST_WORD_ALONE)
        except MemoireTimeout as error:  # the cluster may be gone before us
            print(f"not everything could be told: {error}", file=sys.stderr)
        stats = client.stats()
        counts = {"episodes": stats.episodes, "steps": stats.steps, "caches": stats.pushed_caches}
        tether.report(client=stats.client, **counts)
        if not tether.is_launched:
            print(json.dumps({"client": stats.client} | counts), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run an actor from the command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m memoire.rl.demo.actor", description=about)
    parser.add_argument("endpoint", help="address of a server, proxy or relay")
    parser.add_argument("--env", default="CartPole-v1", help="Gymnasium environment with discrete actions")
    parser.add_argument("--num-envs", type=int, default=4, help="environments that are stepped side by side")
    parser.add_argument("--epsilon", type=float, default=0.05, help="chance of a random action")
    parser.add_argument("--capacity", type=int, default=CAPACITY, help="entries that the memory holds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE, metavar="SECONDS", help="to wait for the cluster")
    parser.add_argument("--keys", metavar="FOLDER", help="keys of this process (default: $MEMOIRE_KEYS)")
    parser.add_argument("--nice", type=int, default=0, help="let other processes of the machine go first, 0 to 19")
    given = vars(parser.parse_args(arguments))
    os.nice(given.pop("nice"))
    return play(given.pop("endpoint"), **given)


if __name__ == "__main__":
    sys.exit(main())
