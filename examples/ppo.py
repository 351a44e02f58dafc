"""PPO on rollouts of two collectors in separate processes: `pip install 'memoire-rl[rl]'`.

    python examples/ppo.py [GOAL] [ENV]      GOAL is the mean return of 50 episodes; at most two minutes

Collectors need no torch, and may run on other machines: `collect("tcp://learner:5560", ...)`.
"""

import multiprocessing
import sys

import gymnasium

from memoire import rl


def collect(url: str, env: str, seed: int) -> None:
    envs = gymnasium.make_vec(env, num_envs=8)
    with rl.Collector(url, envs, seed=seed) as collector:
        collector.run()  # until the run is finished


def learn(goal: float, env: str) -> bool:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    space = gymnasium.make(env)
    net = rl.ActorCritic.mlp(space, hidden=(64, 64))
    with rl.OnPolicyLearner("tcp://127.0.0.1:*", space, net, steps=2048, rollout_length=128, seconds=120.0) as learner:
        make = multiprocessing.get_context("spawn").Process
        children = [make(target=collect, args=(learner.server.endpoint, env, seed)) for seed in range(2)]
        for child in children:
            child.start()
        ppo = learner.keep(rl.PPO(learner.net, rate=1e-3, epochs=10, minibatch=256, seed=0))
        while learner.recent_return < goal and not learner.is_over:
            rollouts = learner.collect(timeout=60.0)  # exactly 2048 entries, each once, all made by the newest version
            figures = ppo.update(rollouts)
            learner.log(figures)
            learner.publish()
            print(f"{learner.steps:8,} steps  return {learner.recent_return:6.1f}  kl {figures['approx_kl']:.3f}")
        learner.server.finish()
        for child in children:
            child.join(30.0)
    print(f"the last 50 episodes returned {learner.recent_return:.1f} on average")
    return learner.recent_return >= goal


if __name__ == "__main__":
    GOAL = float(sys.argv[1]) if len(sys.argv) > 1 else 150.0
    sys.exit(0 if learn(GOAL, sys.argv[2] if len(sys.argv) > 2 else "CartPole-v1") else 1)
