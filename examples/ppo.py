"""PPO on rollouts of collectors in processes of their own: `pip install 'memoire-rl[rl]'`.

python examples/ppo.py                             learns CartPole-v1 with two collectors, and says how long it took
python examples/ppo.py learn tcp://127.0.0.1:5560  only the learner
python examples/ppo.py collect tcp://127.0.0.1:5560   one collector, anywhere; needs no torch
"""

import argparse
import multiprocessing
import sys
import time

import gymnasium

from memoire import rl

ENV, GOAL, SECONDS = "CartPole-v1", 475.0, 120.0


def collect(url: str, env: str, seed: int) -> None:
    envs = gymnasium.make_vec(env, num_envs=8)
    with rl.Collector(url, envs, seed=seed) as collector:
        print(collector.run(), flush=True)


def learn(endpoint: str, env: str, goal: float, seconds: float, collectors: int) -> bool:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    began = time.monotonic()
    space = gymnasium.make(env)
    net = rl.ActorCritic.mlp(space, hidden=(64, 64))
    with rl.OnPolicyLearner(endpoint, space, net, steps=2048, length=128, seconds=seconds) as learner:
        context = multiprocessing.get_context("spawn")
        children = [
            context.Process(target=collect, args=(learner.server.endpoint, env, seed)) for seed in range(collectors)
        ]
        for child in children:
            child.start()
        ppo = learner.keep(rl.PPO(learner.net, rate=1e-3, epochs=10, minibatch=256, gamma=0.99, seed=0))
        while learner.recent_return < goal and not learner.is_over:
            rollouts = learner.collect(timeout=60.0)  # exactly 2048 entries, each once, all made by the newest version
            figures = ppo.update(rollouts)
            learner.log(figures)
            learner.publish()
            print(f"{learner.steps:8,} steps  return {learner.recent_return:6.1f}  kl {figures['approx_kl']:.3f}")
        learner.server.finish()
        for child in children:
            child.join(30.0)
    print(f"return {learner.recent_return:.1f} of the last 50 episodes after {time.monotonic() - began:.1f} s")
    return learner.recent_return >= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", nargs="?", choices=("all", "learn", "collect"), default="all")
    parser.add_argument("url", nargs="?", default="tcp://127.0.0.1:*")
    parser.add_argument("--env", default=ENV)
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.role == "collect":
        collect(given.url, given.env, given.seed)
        return 0
    collectors = 2 if given.role == "all" else 0
    return 0 if learn(given.url, given.env, given.goal, given.seconds, collectors) else 1


if __name__ == "__main__":
    sys.exit(main())
