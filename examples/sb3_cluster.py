"""Stable-Baselines3's DQN that learns from three actors, of which it is one; needs pip install 'memoire-rl[sb3]'."""

from copy import deepcopy
from threading import Thread

import gymnasium
import torch
from stable_baselines3.common.callbacks import BaseCallback

import memoire
import memoire.torch
from memoire.sb3 import DQN, schema_of


class Publish(BaseCallback):
    """Callback that sends the newest network to the other actors every 100 steps."""

    def _on_step(self) -> bool:
        if self.n_calls % 100 == 1:
            memoire.torch.publish(self.model.replay_buffer.source, "policy", self.model.q_net)
        return True


@torch.no_grad()
def act(url: str, network: torch.nn.Module, epsilon: float) -> None:
    """Run another actor: here a thread, in a real cluster a separate program with the same network."""
    env, version = gymnasium.make("CartPole-v1"), 0
    with memoire.connect(url) as client:
        writer, policy, (obs, _) = client.writer(env), client.model("policy"), env.reset()
        while not client.finished:
            if policy.version > version:
                version = memoire.torch.load(policy.newest(), network)
            best = int(network(torch.as_tensor(obs)[None]).argmax())
            action = int(env.action_space.sample()) if torch.rand(()) < epsilon else best
            after, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, after, info)
            obs = env.reset()[0] if terminated or truncated else after


def main() -> None:
    env, sampler = gymnasium.make("CartPole-v1"), memoire.Prioritized(0.6, beta=0.4)
    with memoire.Server("tcp://127.0.0.1:0", schema_of(env), sampler=sampler, storage="episodes") as server:
        with memoire.connect(server.endpoint) as client:
            replay = {"writer": client.writer(num_envs=1, autoreset="disabled"), "source": server}
            model = DQN("MlpPolicy", env, learning_starts=200, train_freq=8, replay_buffer_kwargs=replay)
            actors = [Thread(target=act, args=(server.endpoint, deepcopy(model.q_net), e)) for e in (0.1, 0.3)]
            for actor in actors:
                actor.start()
            model.learn(800, callback=Publish())
            server.finish()
            for actor in actors:
                actor.join()
            client.update()
            print(f"{model.num_timesteps} steps of DQN and {server.total_steps - model.num_timesteps} of two others")


if __name__ == "__main__":
    main()
