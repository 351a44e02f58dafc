"""Side of memoire: double DQN, SAC and PPO, with the share of time that the learner waits."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import settings
import torch
from settings import ALPHA, BATCH, BETA, GAMMA, MULTI_STEP, UPDATE_INTERVAL
from tasks import MAKERS, DoubleDqn, Run, epsilon_at, q_network, with_newest

import memoire
from memoire import Server, rl


class Actors:
    """Processes that call `act` with the server's address, their number and the run, until the run is over.

    The processes are forked before the server starts: all imports are done, and no thread is running yet.
    """

    def __init__(self, act: Callable[[str, int, Run], None], count: int, run: Run) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for number in range(count):
            ours, theirs = fork.Pipe()
            self.pipes.append(ours)
            self.processes.append(fork.Process(target=self._call, args=(act, theirs, number, run), daemon=True))
            self.processes[-1].start()

    @staticmethod
    def _call(act: Callable[[str, int, Run], None], pipe: Any, number: int, run: Run) -> None:
        act(pipe.recv(), number, run)

    @contextmanager
    def working_for(self, server: Server) -> Iterator[None]:
        """Give the actors the server's address; after the block, finish the run and join the actors."""
        for pipe in self.pipes:
            pipe.send(server.endpoint)
        yield
        server.finish()
        for process in self.processes:
            process.join(20.0)


class Waiting:
    """Share of its time that a learner waits, from its first batch on."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.first: tuple[float, float] | None = None

    def begin(self) -> None:
        """Begin to count at the learner's first batch; later calls do nothing."""
        if self.first is None:
            self.first = time.monotonic(), self.server.stats().waited

    def share(self) -> float:
        assert self.first is not None
        began, waited = self.first
        return round((self.server.stats().waited - waited) / (time.monotonic() - began), 4)


def server_of(run: Run, table: memoire.Table) -> Server:
    return Server("tcp://127.0.0.1:*", tables={"replay": table}, run="contest", seed=run.seed)


ENVS = 8
BATCHES = 10
"""Batches of one draw and of one update of priorities; divides the updates between two copies of the target."""
DQN_PUBLISH_INTERVAL = 100
"""Updates between two versions of the network."""
DQN_LEAD = 1000
"""Steps that each actor may be ahead of the learner or behind it."""
DQN_LONGEST = 25
"""Steps after which an actor sends a part of an episode of Pong, which has a thousand steps."""


def dqn_act(url: str, number: int, run: Run) -> None:
    """Run an actor, which plays with the newest network until the run is over."""
    same_step, stack = gym.vector.AutoresetMode.SAME_STEP, run.task.stack
    envs = gym.vector.SyncVectorEnv([MAKERS[run.game][1]] * ENVS, autoreset_mode=same_step)
    rng, actions = np.random.default_rng([run.seed, number]), int(envs.single_action_space.n)
    net, steps, version = q_network(run.make().observation_space.shape, actions), 0, 0
    longest, room = (DQN_LONGEST, 4 * DQN_LONGEST * ENVS) if stack > 1 else (None, None)
    options = {"seed": number, "timeout": 60.0, "on_full": "block", "name": f"actor-{number}", "capacity": room}
    with memoire.connect(url, **options) as client:
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


def table_of(env: gym.Env, run: Run) -> memoire.Table:
    """Return a table of episodes that stores each frame once and fixes the ratio of samples to steps."""
    ratio = BATCH / UPDATE_INTERVAL
    is_uniform = run.options.get("sampler") == "uniform"
    columns = {"obs": memoire.Column(np.uint8, env.observation_space.shape, "state"), "action": np.int64}
    return memoire.Table(
        columns | {"reward": np.float32, "value": np.float32},
        storage="episodes",
        capacity=run.capacity,
        sampler=memoire.Uniform() if is_uniform else memoire.Prioritized(ALPHA, beta=BETA),
        multi_step=MULTI_STEP,
        discount=GAMMA,
        frame_stack=run.task.stack,
        min_size=run.first_update,
        samples_per_insert=ratio,
        samples_per_insert_tolerance=DQN_LEAD * run.task.players * ratio,
    )


def dqn_learn(server: memoire.Server, dqn: DoubleDqn, run: Run) -> None:
    """Run the learner until the time is up."""
    memoire.torch.publish(server, "policy", dqn.net)
    waiting, steps = Waiting(server), 0

    def prepared(batch):
        batch = batch.to(run.task.device)
        return batch, dqn.later(batch.next_obs)

    for drawn, known in memoire.prefetch(map(prepared, server.batches(BATCHES * BATCH, 60.0))):
        waiting.begin()
        columns = drawn.importance, drawn.obs, drawn.action, drawn.reward, drawn.discount, drawn.next_obs
        drawn.update_priorities(dqn.update(*columns, known=known))
        if dqn.updates % DQN_PUBLISH_INTERVAL < BATCHES:
            memoire.torch.publish(server, "policy", dqn.net)
        if run.is_due:
            steps = server.stats().totals.steps
        if not run.goes_on(steps, dqn.net.parameters, dqn.updates):
            break
    run.report(updates=dqn.updates, waited=waiting.share())


def dqn(run: Run) -> None:
    """Actors of eight environments, two or, beside a GPU, eight; 10 batches at once, the target asked ahead."""
    actors, dqn = Actors(dqn_act, run.task.players, run), DoubleDqn(run.make(), run.task.device)
    with server_of(run, table_of(MAKERS[run.game][1](), run)) as server, actors.working_for(server):
        dqn_learn(server, dqn, run)


SAC_PUBLISH_INTERVAL = 50
"""Updates between two versions of the policy."""
SAC_LONGEST = 25
"""Steps after which an actor sends a part of an episode, since an episode takes seconds."""
SAC_LEAD = 1000
"""Steps that actors together may be ahead of the learner or behind it."""


def policy_of(env: gym.Env) -> rl.GaussianPolicy:
    return rl.GaussianPolicy(env.observation_space, env.action_space, settings.SAC_HIDDEN)


def sac_act(url: str, number: int, run: Run) -> None:
    """Run an actor, which plays with the newest policy until the run is over."""
    torch.manual_seed(100 * run.seed + number)
    env = run.make()
    policy = policy_of(env)
    with memoire.connect(url, timeout=60.0, on_full="block", name=f"actor-{number}") as client:
        model, writer = client.model("policy"), client.writer(env, longest=SAC_LONGEST)
        version = memoire.torch.load(model.wait(timeout=60.0), policy)
        obs, _ = env.reset(seed=1000 * run.seed + number)
        while not client.finished:
            if model.version > version:
                version = memoire.torch.load(model.newest(), policy)
            action = policy.act(obs[None])
            next_obs, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, model_version=version)
            obs = env.reset()[0] if terminated or truncated else next_obs


def sac_learn(server: memoire.Server, agent: rl.SAC, run: Run) -> None:
    """Run the learner until the time is up."""
    memoire.torch.publish(server, "policy", agent.policy)
    waiting, updates, steps = Waiting(server), 0, 0
    for batch in server.batches(settings.SAC_BATCH, 60.0, ahead=1):
        waiting.begin()
        batch = batch.to("cpu")
        agent.train(batch)
        updates += 1
        if updates % SAC_PUBLISH_INTERVAL == 0:
            memoire.torch.publish(server, "policy", agent.policy)
            steps = server.stats().totals.steps
        if not run.goes_on(steps, agent.policy.parameters):
            break
    run.report(updates=updates, waited=waiting.share())


def sac(run: Run) -> None:
    """SAC of memoire.rl, eight actor processes of one environment each, none of which waits for another."""
    env, actors = run.make(), Actors(sac_act, settings.SAC_ENVS, run)
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
        samples_per_insert_tolerance=float(SAC_LEAD * settings.SAC_BATCH),
    )
    with server_of(run, table) as server, actors.working_for(server):
        sac_learn(server, agent, run)


COLLECTORS, LENGTH = 2, 256


def collect(url: str, number: int, run: Run) -> None:
    """Run a collector until the run is over."""
    envs = gym.vector.SyncVectorEnv([run.make] * (settings.PPO_ENVS // COLLECTORS))
    with rl.Collector(url, envs, seed=1000 * run.seed + 100 * number) as collector:
        collector.run()


def ppo_learn(learner: rl.OnPolicyLearner, run: Run) -> None:
    """Run the learner until the time is up."""
    ppo = rl.PPO(
        learner.net,
        settings.PPO_RATE,
        settings.PPO_EPOCHS,
        settings.PPO_MINIBATCH,
        clip=settings.PPO_CLIP,
        value_coef=2.0 * settings.PPO_VALUE,  # the value loss is half of the mean square
        entropy_coef=settings.PPO_ENTROPY,
        lam=settings.PPO_LAMBDA,
        max_grad_norm=settings.PPO_MAX_GRAD_NORM,
        seed=run.seed,
    )
    waiting = Waiting(learner.server)
    while run.goes_on(learner.steps, learner.net.policy.parameters):
        rollouts = learner.collect(timeout=60.0)
        waiting.begin()
        ppo.update(rollouts)
        learner.publish()
    run.report(updates=learner.iterations, waited=waiting.share())


def ppo(run: Run) -> None:
    """PPO of memoire.rl with two collectors of eight environments each."""
    env, collectors = run.make(), Actors(collect, COLLECTORS, run)
    net = rl.ActorCritic.mlp(env, hidden=settings.PPO_HIDDEN)
    policy = run.options.get("policy", "local")  # "local": collectors compute the actions; "remote": the learner does
    options = {"policy": policy, "discount": settings.PPO_GAMMA, "run": "contest"}
    learner = rl.OnPolicyLearner("tcp://127.0.0.1:*", env, net, settings.PPO_STEPS, LENGTH, **options)
    with learner, collectors.working_for(learner.server):
        ppo_learn(learner, run)


if __name__ == "__main__":
    Run.learn(dqn, sac, ppo)
