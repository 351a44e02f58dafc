"""memoire: actors of eight environments, two or, beside a GPU, eight; 10 batches at once, the target asked ahead."""

import gymnasium as gym
import numpy as np
import torch
from memoire_side import Actors, Observed
from settings import ALPHA, BATCH, BETA, GAMMA, MULTI_STEP, UPDATE_INTERVAL
from tasks import MAKERS, DoubleDqn, Run, epsilon_at, q_network, with_newest

import memoire

ENVS = 8
BATCHES = 10
"""Drawn at once, and told their priorities at once: a whole number of times between two copies of the target."""
PUBLISH_INTERVAL = 100
"""Updates between two versions of the network."""
LEAD = 1000
"""Steps that each actor may be ahead of the learner, or behind it."""
LONGEST = 25
"""Steps after which an actor sends what it has of an episode of Pong, which has a thousand."""


def act(url: str, number: int, run: Run) -> None:
    """An actor: plays with the newest network until the run is over."""
    torch.set_num_threads(1)
    same_step, stack = gym.vector.AutoresetMode.SAME_STEP, run.task.stack
    envs = gym.vector.SyncVectorEnv([MAKERS[run.game][1]] * ENVS, autoreset_mode=same_step)
    rng, actions = np.random.default_rng([run.seed, number]), int(envs.single_action_space.n)
    net, steps, version = q_network(run.make().observation_space.shape, actions), 0, 0
    longest, room = (LONGEST, 4 * LONGEST * ENVS) if stack > 1 else (None, None)
    told = {"seed": number, "timeout": 60.0, "when_full": "block", "name": f"actor-{number}", "capacity": room}
    with memoire.connect(url, **told) as client:
        policy, writer = client.model("policy"), client.writer(envs, longest=longest)
        version = memoire.torch.load(policy.wait(timeout=60.0), net)
        obs, _ = envs.reset(seed=1000 * run.seed + 100 * number)
        seen = np.stack([obs] * stack, 1) if stack > 1 else obs
        while not client.finished:
            if policy.version > version:
                version = memoire.torch.load(policy.newest(), net)
            with torch.no_grad():
                q = net(torch.from_numpy(seen).float()).numpy()
            is_random = rng.random(ENVS) < epsilon_at(run.task.players * steps)
            action = np.where(is_random, rng.integers(actions, size=ENVS), q.argmax(1))
            next_obs, reward, terminated, truncated, info = envs.step(action)
            value = q.max(1)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, value=value, model_version=version)
            obs, steps = next_obs, steps + ENVS
            seen = with_newest(seen, obs, terminated | truncated) if stack > 1 else obs


def sampler_of(run: Run) -> memoire.replay.sampling.Sampler:
    return memoire.Uniform() if run.options.get("sampler") == "uniform" else memoire.Prioritized(ALPHA, beta=BETA)


def table_of(env: gym.Env, run: Run) -> memoire.Table:
    """Whole episodes, each frame once, and so many samples for each step."""
    ratio = BATCH / UPDATE_INTERVAL
    columns = {
        "obs": memoire.Column(np.uint8, env.observation_space.shape, "state"),
        "action": np.int64,
        "reward": np.float32,
        "value": np.float32,
    }
    return memoire.Table(
        columns,
        storage="episodes",
        capacity=run.capacity,
        sampler=sampler_of(run),
        multi_step=MULTI_STEP,
        discount=GAMMA,
        frame_stack=run.task.stack,
        min_size=run.first_update,
        samples_per_insert=ratio,
        samples_per_insert_tolerance=LEAD * run.task.players * ratio,
    )


def learn(server: memoire.Server, dqn: DoubleDqn, run: Run, observed: Observed) -> None:
    """The learner, until the time is up."""
    memoire.torch.publish(server, "policy", dqn.net)
    steps = 0

    def prepared(batch):
        batch = batch.to(run.task.device)
        return batch, dqn.later(batch.next_obs)

    for drawn, known in memoire.prefetch(map(prepared, server.batches(BATCHES * BATCH, 60.0))):
        if not observed.has_begun:
            observed.begin()
        columns = drawn.importance, drawn.obs, drawn.action, drawn.reward, drawn.discount, drawn.next_obs
        drawn.update_priorities(dqn.update(*columns, known=known))
        if dqn.updates % PUBLISH_INTERVAL < BATCHES:
            memoire.torch.publish(server, "policy", dqn.net)
        if run.is_due:
            steps = server.stats().totals.steps
        if not run.goes_on(steps, dqn.net.parameters, dqn.updates):
            break
    run.report(updates=dqn.updates, **observed.facts())


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
    actors, dqn = Actors(act, run.task.players, run), DoubleDqn(run.make(), run.seed, run.task.device)
    tables = {"replay": table_of(MAKERS[run.game][1](), run)}
    with memoire.Server("tcp://127.0.0.1:*", tables=tables, run="contest", seed=run.seed) as server:
        actors.begin(server)
        observed = Observed(server)
        learn(server, dqn, run, observed)
        observed.close()
        server.finish()
        actors.join()


if __name__ == "__main__":
    main()
