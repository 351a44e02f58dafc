"""memoire: SAC of memoire.rl, eight actor processes of one environment each, none of which waits for another."""

import gymnasium as gym
import settings
import torch
from memoire_side import Actors, Observed
from tasks import Run

import memoire
from memoire import rl

PUBLISH_INTERVAL = 50
"""Updates between two versions of the policy."""
LONGEST = 25
"""Steps after which an actor sends what it has of an episode: one takes seconds."""
LEAD = 1000
"""Steps that actors may be ahead of the learner, or behind it."""


def policy_of(env: gym.Env) -> rl.GaussianPolicy:
    return rl.GaussianPolicy(env.observation_space, env.action_space, settings.SAC_HIDDEN)


def act(url: str, number: int, run: Run) -> None:
    """An actor: plays with the newest policy until the run is over."""
    torch.set_num_threads(1)
    torch.manual_seed(100 * run.seed + number)
    env = run.make()
    policy = policy_of(env)
    with memoire.connect(url, timeout=60.0, when_full="block", name=f"actor-{number}") as client:
        model, writer = client.model("policy"), client.writer(env, longest=LONGEST)
        version = memoire.torch.load(model.wait(timeout=60.0), policy)
        obs, _ = env.reset(seed=1000 * run.seed + number)
        while not client.finished:
            if model.version > version:
                version = memoire.torch.load(model.newest(), policy)
            action = policy.act(obs[None])
            next_obs, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, model_version=version)
            obs = env.reset()[0] if terminated or truncated else next_obs


def learn(server: memoire.Server, agent: rl.SAC, run: Run, observed: Observed) -> None:
    """The learner, until the time is up."""
    memoire.torch.publish(server, "policy", agent.policy)
    updates = steps = 0
    for batch in server.batches(settings.SAC_BATCH, 60.0, ahead=1):
        if not observed.has_begun:
            observed.begin()
        batch = batch.to("cpu")
        agent.train(batch)
        updates += 1
        if updates % PUBLISH_INTERVAL == 0:
            memoire.torch.publish(server, "policy", agent.policy)
            steps = server.stats().totals.steps
        if not run.goes_on(steps, agent.policy.parameters):
            break
    run.report(updates=updates, **observed.facts())


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
    env, actors = run.make(), Actors(act, settings.SAC_ENVS, run)
    agent = rl.SAC(
        env.observation_space,
        env.action_space,
        policy=lambda **spaces: policy_of(env),
        hidden=settings.SAC_HIDDEN,
        gamma=settings.GAMMA,
        polyak=settings.POLYAK,
        rate=settings.SAC_RATE,
        alpha=settings.SAC_ALPHA,
        seed=run.seed,
    )
    table = memoire.Table(
        memoire.Schema.from_env(env),
        storage="episodes",
        capacity=settings.CAPACITY,
        sampler=memoire.Uniform(),
        discount=settings.GAMMA,
        min_size=settings.SAC_FIRST_UPDATE,
        samples_per_insert=settings.SAC_BATCH,
        samples_per_insert_tolerance=float(LEAD * settings.SAC_BATCH),
    )
    with memoire.Server("tcp://127.0.0.1:*", tables={"replay": table}, run="contest", seed=run.seed) as server:
        actors.begin(server)
        observed = Observed(server)
        learn(server, agent, run, observed)
        observed.close()
        server.finish()
        actors.join()


if __name__ == "__main__":
    main()
