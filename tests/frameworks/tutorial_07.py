"""A pipeline in the words of TMRL 0.7, in one process: `python tutorial_07.py ready|own`.

ready: with TMRL's agent, networks and memory. own: with an agent, a network, a memory and a compressor of the script.
"""

import itertools
import os
import sys
from copy import deepcopy
from threading import Thread

import gymnasium
import numpy as np
import tmrl.config.config_constants as cfg
import torch
from tmrl.actor import TorchActorModule
from tmrl.custom.custom_algorithms import SpinupSacAgent
from tmrl.custom.custom_memories import GenericTorchMemory
from tmrl.custom.custom_models import MLPActorCritic, SquashedGaussianMLPActor
from tmrl.custom.utils.nn import copy_shared, no_grad
from tmrl.envs import GenericGymEnv
from tmrl.memory import TorchMemory
from tmrl.networking import RolloutWorker, Server, Trainer
from tmrl.training import TrainingAgent
from tmrl.training_offline import TorchTrainingOffline
from tmrl.util import cached_property, partial

CRC_DEBUG = True
LENGTH = 10
which = sys.argv[1]
weights = cfg.WEIGHTS_FOLDER / which
connection = {"security": cfg.SECURITY, "password": cfg.PASSWORD}


class Point(gymnasium.Env):
    """A point on a line, and a target. Every second episode terminates, at its fifth step; the other episodes go on
    until they are cut.

    An action is stored beside the position.
    """

    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Box(-9, 9, (1,))])
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, render_mode=None):
        self.default_action = np.zeros(1, np.float32)
        self.episodes = 0

    def observe(self, action):
        return np.array([self.position], np.float32), np.array(action, np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-3, 3)
        self.episodes += 1
        self.steps = 0
        return self.observe(self.default_action), {}

    def step(self, action):
        self.position += float(action[0])
        self.steps += 1
        terminated = self.steps == 5 and self.episodes % 2 == 0
        return self.observe(action), -abs(self.position), terminated, False, {"unused": 1}


gymnasium.register("Point-v0", Point)
env_cls = partial(GenericGymEnv, id="Point-v0", gym_kwargs={"render_mode": None})


class MyActor(TorchActorModule):
    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.layer = torch.nn.Linear(len(observation_space), action_space.shape[0])

    def forward(self, obs):
        return torch.tanh(self.layer(torch.cat(obs, -1)))

    def act(self, obs, test=False):
        with torch.no_grad():
            return self.forward(obs).squeeze(0).to(self.device).cpu().numpy()


def my_compressor(prev_act, obs, rew, terminated, truncated, info):
    assert truncated in (True, False) and "__no_done" not in info
    info = {name: value for name, value in info.items() if name != "unused"}
    return prev_act, obs[0], rew, terminated, truncated, info


class MyMemory(TorchMemory):
    def __init__(self, nb_steps, device, sample_preprocessor: callable = None, memory_size=1000, batch_size=16):
        super().__init__(device, nb_steps, sample_preprocessor, memory_size, batch_size, "", CRC_DEBUG)

    def append_buffer(self, buffer):
        columns = [list(column) for column in zip(*buffer.memory, strict=True)]
        act, obs, rew, terminated, truncated, info = columns
        columns.append([one or other for one, other in zip(terminated, truncated, strict=True)])
        self.data = [old + new for old, new in zip(self.data or [[]] * 7, columns, strict=True)]
        self.data = [column[-self.memory_size :] for column in self.data]

    def __len__(self):
        return max(0, len(self.data[0]) - 2) if self.data else 0

    def get_transition(self, item):
        item += 1
        while self.data[6][item]:  # a reset follows this item
            item -= 1
        act, obs, rew, terminated, truncated, info, _ = (column[item + 1] for column in self.data)
        # A reset that began the episode has the device's action; another sample has the action that led to the sample.
        return (self.data[1][item], self.data[0][item]), act, rew, (obs, act), terminated, truncated, info


class MyAgent(TrainingAgent):
    shown = cached_property(lambda self: no_grad(copy_shared(self.actor)))

    def __init__(self, observation_space=None, action_space=None, device=None, lr=1e-3):
        super().__init__(observation_space, action_space, device)
        self.actor = MyActor(observation_space, action_space).to(device)
        self.target = no_grad(deepcopy(self.actor))
        self.optimizer = torch.optim.Adam(itertools.chain(self.actor.parameters()), lr=lr)

    def get_actor(self):
        return self.shown

    def train(self, batch):
        (position, _), _, _, _, terminated, truncated = batch
        assert {terminated.dtype, truncated.dtype} == {torch.float32} and not (terminated * truncated).any()
        loss = (self.actor(batch[0]) + torch.sign(position)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "truncated": truncated.mean().item(), "terminated": terminated.mean().item()}


pipelines = {
    "ready": (
        partial(SquashedGaussianMLPActor),
        None,
        partial(GenericTorchMemory, memory_size=1e3, batch_size=16, crc_debug=CRC_DEBUG),
        partial(SpinupSacAgent, model_cls=MLPActorCritic, gamma=0.9, polyak=0.995, alpha=0.2, lr_actor=1e-3,
                lr_critic=1e-3, lr_entropy=1e-3, learn_entropy_coef=True, target_entropy=None),
    ),
    "own": (partial(MyActor), my_compressor, partial(MyMemory), partial(MyAgent)),
}  # fmt: skip
actor_module_cls, sample_compressor, memory_cls, training_agent_cls = pipelines[which]
training_cls = partial(
    TorchTrainingOffline,
    env_cls=(dummy := env_cls()) and (dummy.observation_space, dummy.action_space),
    memory_cls=memory_cls,
    training_agent_cls=training_agent_cls,
    epochs=2,
    rounds=2,
    steps=50,
    update_buffer_interval=10,
    update_model_interval=10,
    max_training_steps_per_env_step=1.0,
    start_training=40,
    device=None,
)

if __name__ == "__main__":
    assert not cfg.DEBUG_MODE
    my_server = Server(port=cfg.PORT, **connection)
    my_worker = RolloutWorker(
        env_cls=env_cls, actor_module_cls=actor_module_cls, sample_compressor=sample_compressor, device="cpu",
        server_ip="127.0.0.1", server_port=cfg.PORT, max_samples_per_episode=LENGTH,
        model_path=f"{weights}.tmod", model_history=-1, crc_debug=CRC_DEBUG, **connection,
    )  # fmt: skip
    my_trainer = Trainer(
        training_cls=training_cls, server_ip="127.0.0.1", server_port=cfg.PORT, model_path=f"{weights}_t.tmod",
        checkpoint_path=str(cfg.CHECKPOINTS_FOLDER / f"{which}_t.tcpt"), **connection,
    )  # fmt: skip
    Thread(target=my_worker.run, kwargs={"test_episode_interval": 10}, daemon=True).start()
    my_trainer.run()
    print("transitions compared:", my_trainer.training.memory.checks.passed)
    os._exit(0)
