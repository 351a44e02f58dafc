"""PPO from pictures in one file: MiniGrid's DoorKey-5x5, where a key is fetched, a door opened and a goal reached.

    pip install 'memoire-rl[rl]' minigrid
    python examples/learning/door_key.py               until 95 of 100 episodes succeed, 600 s at most

Two collectors render the agent's view, 56 x 56 x 3 bytes, in eight environments each. The collectors do not need torch:
the learner computes the actions. Chevalier-Boisvert et al., Minigrid & Miniworld, 2023.
"""

import argparse
import multiprocessing
import sys

import gymnasium as gym
import minigrid
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

from memoire import rl

ENV, WINDOW = "MiniGrid-DoorKey-5x5-v0", 100
gym.register_envs(minigrid)


def collect(url: str, seed: int) -> None:
    """Run a collector with two groups of environments: one group steps while the other group waits for actions."""
    wrappers = (RGBImgPartialObsWrapper, ImgObsWrapper)
    groups = [gym.make_vec(ENV, num_envs=4, wrappers=wrappers) for _ in range(2)]
    with rl.Collector(url, groups, seed=seed) as collector:
        collector.run()


def network(space: gym.Env) -> rl.ActorCritic:
    """Return a network that reads tiles of 8 x 8 pixels, then neighbouring tiles; 64 features feed policy and value."""
    import torch

    class Seeing(rl.ActorCritic):
        def __init__(self, actions: int) -> None:
            super().__init__(64, actions, is_continuous=False)
            self.tiles = torch.nn.Conv2d(3, 32, 8, stride=8)
            self.places = torch.nn.Conv2d(32, 32, 3)
            self.features = torch.nn.Linear(32 * 5 * 5, 64)

        def forward(self, pictures):
            seen = torch.as_tensor(pictures).permute(0, 3, 1, 2).float() / 255.0
            places = torch.relu(self.places(torch.relu(self.tiles(seen))))
            return super().forward(torch.relu(self.features(places.flatten(1))))

    return Seeing(int(space.action_space.n))


def learn(seed: int, goal: float, seconds: float) -> float:
    """Learn until the share of successful newest episodes reaches the goal, or the time is up; return the share."""
    import torch

    torch.manual_seed(seed), torch.set_num_threads(1)
    space = ImgObsWrapper(RGBImgPartialObsWrapper(gym.make(ENV)))
    net, success = network(space), 0.0
    options = {"policy": "remote", "seconds": seconds, "run": "door-key"}
    with rl.OnPolicyLearner("tcp://127.0.0.1:*", space, net, 2048, 128, **options) as learner:
        make = multiprocessing.get_context("spawn").Process
        urls = [(learner.server.endpoint, 1000 * seed + number) for number in range(2)]
        collectors = [make(target=collect, args=row, daemon=True) for row in urls]
        for each in collectors:
            each.start()
        ppo = rl.PPO(learner.net, rate=1e-3, epochs=4, minibatch=256, entropy_coef=0.01, seed=seed)
        while success < goal and not learner.is_over:
            ppo.update(learner.collect(timeout=60.0))
            learner.publish()
            newest = [ended.returned for _, ended in learner.server.episodes(WINDOW)]
            success = sum(returned > 0.0 for returned in newest) / max(WINDOW, len(newest))
            print(f"{learner.steps:8,} steps, {100 * success:.0f} of the last {WINDOW} episodes succeed", flush=True)
        learner.server.finish()
        for each in collectors:
            each.join(30.0)
        print(f"success {success:.2f} after {learner.steps} steps of two collectors")
    return success


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time of the run (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.95, help="share of successful episodes that ends the run")
    args = parser.parse_args()
    return 0 if learn(args.seed, args.goal, args.seconds) >= args.goal else 1


if __name__ == "__main__":
    sys.exit(main())
