"""memoire: PPO of memoire.rl with two collectors of eight environments each."""

import gymnasium as gym
import settings
import torch
from memoire_side import Actors, Observed
from tasks import Run

from memoire import rl

COLLECTORS = 2
LENGTH = 256


def collect(url: str, number: int, run: Run) -> None:
    """A collector, until the run is over."""
    envs = gym.vector.SyncVectorEnv([run.make] * (settings.PPO_ENVS // COLLECTORS))
    with rl.Collector(url, envs, seed=1000 * run.seed + 100 * number) as collector:
        collector.run()


def learn(learner: rl.OnPolicyLearner, run: Run, observed: Observed) -> None:
    """The learner, until the time is up."""
    ppo = rl.PPO(
        learner.net,
        settings.PPO_RATE,
        settings.PPO_EPOCHS,
        settings.PPO_MINIBATCH,
        clip=settings.PPO_CLIP,
        value_coef=2.0 * settings.PPO_VALUE,  # its loss is half of the mean square
        entropy_coef=settings.PPO_ENTROPY,
        lam=settings.PPO_LAMBDA,
        max_grad_norm=settings.PPO_MAX_GRAD_NORM,
        seed=run.seed,
    )
    while run.goes_on(learner.steps, learner.net.policy.parameters):
        rollouts = learner.collect(timeout=60.0)
        if not observed.has_begun:
            observed.begin()
        ppo.update(rollouts)
        learner.publish()
    run.report(updates=learner.iterations, **observed.facts())


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    env, collectors = run.make(), Actors(collect, COLLECTORS, run)
    net = rl.ActorCritic.mlp(env, hidden=settings.PPO_HIDDEN)
    policy = run.options.get("policy", "local")  # "local": collectors compute the actions; "remote": the learner does
    options = {"policy": policy, "discount": settings.PPO_GAMMA, "run": "contest"}
    with rl.OnPolicyLearner("tcp://127.0.0.1:*", env, net, settings.PPO_STEPS, LENGTH, **options) as learner:
        collectors.begin(learner.server)
        observed = Observed(learner.server)
        learn(learner, run, observed)
        observed.close()
        learner.server.finish()
        collectors.join()


if __name__ == "__main__":
    main()
