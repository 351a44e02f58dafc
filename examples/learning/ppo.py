"""PPO in one file: two collectors without torch, and a learner that uses each step once.

    python examples/learning/ppo.py                    half a minute: CartPole-v1 to a mean return of 475
    python examples/learning/ppo.py --seed 3 --curve curve.csv

The example needs `pip install 'memoire-rl[rl]'`. Schulman et al., Proximal Policy Optimization Algorithms, 2017.
"""

import argparse
import multiprocessing

import gymnasium as gym
import numpy as np

from memoire import rl

WINDOW = 50
"""Number of newest episodes in the mean return that ends the run."""


def collect(url: str, seed: int) -> None:
    """Run a collector: step eight environments with the newest policy until the learner ends the run."""
    envs = gym.make_vec("CartPole-v1", num_envs=8)
    with rl.Collector(url, envs, seed=seed) as collector:
        collector.run()


def learn(learner: rl.OnPolicyLearner, seed: int, goal: float, curve: list[tuple[int, float]]) -> float:
    """Learn until the mean return of the newest episodes reaches the goal, or the time is up; return that mean."""
    ppo, seen = rl.PPO(learner.net, rate=1e-3, epochs=10, minibatch=256, seed=seed), 0
    while learner.recent_return < goal and not learner.is_over:
        ppo.update(learner.collect(timeout=60.0))  # 2048 steps, all made by the newest version
        learner.publish()
        _, first, ended = learner.server.episodes_after(seen)
        seen = first + len(ended) - 1 if ended else seen
        curve += [(learner.steps, episode.returned) for _, episode in ended]
    return float(np.mean([returned for _, returned in curve[-WINDOW:]]))


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="longest time of the run (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=475.0, help="mean return of 50 episodes that ends the run")
    parser.add_argument("--curve", help="file for the curve: a line `step,return` for each episode")
    args = parser.parse_args()
    torch.manual_seed(args.seed), torch.set_num_threads(1)
    space, curve = gym.make("CartPole-v1"), []
    net = rl.ActorCritic.mlp(space, hidden=(64, 64))
    with rl.OnPolicyLearner("tcp://127.0.0.1:*", space, net, 2048, 128, seconds=args.seconds, run="ppo") as learner:
        make = multiprocessing.get_context("spawn").Process
        urls = [(learner.server.endpoint, 1000 * args.seed + number) for number in range(2)]
        collectors = [make(target=collect, args=row, daemon=True) for row in urls]
        for each in collectors:
            each.start()
        mean = learn(learner, args.seed, args.goal, curve)
        learner.server.finish()
        for each in collectors:
            each.join(30.0)
    if args.curve:
        with open(args.curve, "w", encoding="utf-8") as file:
            file.writelines(f"{step},{returned:g}\n" for step, returned in curve)
    print(f"mean return of the last {WINDOW} episodes: {mean:.1f} after {learner.steps} steps of two collectors")


if __name__ == "__main__":
    main()
