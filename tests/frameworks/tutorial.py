"""The tutorial of TMRL as one script, in the words of its text: `python tutorial.py server|worker|trainer|all`.

Only the imports, the drone's window and the numbers of epochs differ, which the environment may set.
"""

import itertools
import os
import sys
from copy import deepcopy
from threading import Thread

import gymnasium.spaces as spaces
import numpy as np
import tmrl.config.config_constants as cfg
import torch
import torch.nn.functional as F  # noqa: N812
from rtgym import DEFAULT_CONFIG_DICT, DummyRCDrone, RealTimeGymInterface
from tmrl.actor import ActorModule
from tmrl.envs import GenericGymEnv
from tmrl.memory_dataloading import MemoryDataloading
from tmrl.networking import RolloutWorker, Server, Trainer
from tmrl.nn import copy_shared, no_grad
from tmrl.training import TrainingAgent
from tmrl.training_offline import TrainingOffline
from tmrl.util import cached_property, partial, prod
from torch.optim import Adam


class DummyRCDroneInterface(RealTimeGymInterface):
    def __init__(self):
        self.rc_drone = None
        self.target = np.array([0.0, 0.0], dtype=np.float32)
        self.initialized = False

    def get_observation_space(self):
        pos_x_space = spaces.Box(low=-1.0, high=1.0, shape=(1,))
        pos_y_space = spaces.Box(low=-1.0, high=1.0, shape=(1,))
        tar_x_space = spaces.Box(low=-0.5, high=0.5, shape=(1,))
        tar_y_space = spaces.Box(low=-0.5, high=0.5, shape=(1,))
        return spaces.Tuple((pos_x_space, pos_y_space, tar_x_space, tar_y_space))

    def get_action_space(self):
        return spaces.Box(low=-2.0, high=2.0, shape=(2,))

    def get_default_action(self):
        return np.array([0.0, 0.0], dtype="float32")

    def send_control(self, control):
        vel_x = control[0]
        vel_y = control[1]
        self.rc_drone.send_control(vel_x, vel_y)

    def reset(self):
        if not self.initialized:
            self.rc_drone = DummyRCDrone()
            self.initialized = True
        pos_x, pos_y = self.rc_drone.get_observation()
        self.target[0] = np.random.uniform(-0.5, 0.5)
        self.target[1] = np.random.uniform(-0.5, 0.5)
        return [pos_x, pos_y, self.target[0], self.target[1]]

    def get_obs_rew_done_info(self):
        pos_x, pos_y = self.rc_drone.get_observation()
        tar_x = self.target[0]
        tar_y = self.target[1]
        obs = [pos_x, pos_y, tar_x, tar_y]
        rew = -np.linalg.norm(np.array([pos_x, pos_y], dtype=np.float32) - self.target)
        done = rew > -0.01
        info = {}
        return obs, rew, done, info

    def wait(self):
        self.send_control(self.get_default_action())


my_config = DEFAULT_CONFIG_DICT.copy()
my_config["interface"] = DummyRCDroneInterface
my_config["time_step_duration"] = float(os.environ.get("TUTORIAL_STEP", "0.05"))
my_config["start_obs_capture"] = my_config["time_step_duration"]
my_config["time_step_timeout_factor"] = 1.0
my_config["ep_max_length"] = 100
my_config["act_buf_len"] = 4
my_config["reset_act_buf"] = False
my_config["benchmark"] = True
my_config["benchmark_polyak"] = 0.2

env_cls = partial(GenericGymEnv, id="real-time-gym-v0", gym_kwargs={"config": my_config})

LOG_STD_MAX = 2
LOG_STD_MIN = -20


def mlp(sizes, activation, output_activation=torch.nn.Identity):
    layers = []
    for j in range(len(sizes) - 1):
        act = activation if j < len(sizes) - 2 else output_activation
        layers += [torch.nn.Linear(sizes[j], sizes[j + 1]), act()]
    return torch.nn.Sequential(*layers)


class MyActorModule(ActorModule):
    def __init__(self, observation_space, action_space, hidden_sizes=(256, 256), activation=torch.nn.ReLU):
        super().__init__(observation_space, action_space)
        dim_obs = sum(prod(s for s in space.shape) for space in observation_space)
        dim_act = action_space.shape[0]
        act_limit = action_space.high[0]
        self.net = mlp([dim_obs] + list(hidden_sizes), activation, activation)
        self.mu_layer = torch.nn.Linear(hidden_sizes[-1], dim_act)
        self.log_std_layer = torch.nn.Linear(hidden_sizes[-1], dim_act)
        self.act_limit = act_limit

    def forward(self, obs, test=False, with_logprob=True):
        net_out = self.net(torch.cat(obs, -1))
        mu = self.mu_layer(net_out)
        log_std = self.log_std_layer(net_out)
        log_std = torch.clamp(log_std, LOG_STD_MIN, LOG_STD_MAX)
        std = torch.exp(log_std)
        pi_distribution = torch.distributions.normal.Normal(mu, std)
        pi_action = mu if test else pi_distribution.rsample()
        if with_logprob:
            logp_pi = pi_distribution.log_prob(pi_action).sum(axis=-1)
            logp_pi -= (2 * (np.log(2) - pi_action - F.softplus(-2 * pi_action))).sum(axis=1)
        else:
            logp_pi = None
        pi_action = torch.tanh(pi_action)
        pi_action = self.act_limit * pi_action
        pi_action = pi_action.squeeze()
        return pi_action, logp_pi

    def act(self, obs, test=False):
        with torch.no_grad():
            a, _ = self.forward(obs, test, False)
            return a.numpy()


actor_module_cls = partial(MyActorModule)


def my_sample_compressor(act, obs, rew, done, info):
    act_mod, obs_mod, rew_mod, done_mod, info_mod = act, obs, rew, done, info
    obs_mod = obs_mod[:4]  # the tutorial removes the action buffer from observations
    return act_mod, obs_mod, rew_mod, done_mod, info_mod


my_run_name = "tutorial"
weights_folder = cfg.WEIGHTS_FOLDER
checkpoints_folder = cfg.CHECKPOINTS_FOLDER
server_ip = "127.0.0.1"


class MyMemoryDataloading(MemoryDataloading):
    def __init__(
        self,
        device=None,
        nb_steps=None,
        obs_preprocessor: callable = None,
        sample_preprocessor: callable = None,
        memory_size=1000000,
        batch_size=32,
        dataset_path="",
        act_buf_len=my_config["act_buf_len"],
    ):
        self.act_buf_len = act_buf_len
        super().__init__(
            device=device,
            nb_steps=nb_steps,
            obs_preprocessor=obs_preprocessor,
            sample_preprocessor=sample_preprocessor,
            memory_size=memory_size,
            batch_size=batch_size,
            dataset_path=dataset_path,
        )

    def append_buffer(self, buffer):
        parts = [
            [b[0] for b in buffer.memory],
            *([b[1][i] for b in buffer.memory] for i in range(4)),
            [b[2] for b in buffer.memory],
            [b[3] for b in buffer.memory],
            [b[4] for b in buffer.memory],
        ]
        if self.__len__() > 0:
            for i, part in enumerate(parts):
                self.data[i] += part
        else:
            self.data += parts
        to_trim = self.__len__() - self.memory_size
        if to_trim > 0:
            self.data = [part[to_trim:] for part in self.data]

    def __len__(self):
        if len(self.data) == 0:
            return 0
        result = len(self.data[0]) - self.act_buf_len - 1
        return max(result, 0)

    def get_transition(self, item):
        idx_last = item + self.act_buf_len - 1
        idx_now = item + self.act_buf_len
        actions = self.data[0][item : (item + self.act_buf_len + 1)]
        last_act_buf = actions[:-1]
        new_act_buf = actions[1:]
        last_obs = (*(self.data[i][idx_last] for i in range(1, 5)), *last_act_buf)
        new_obs = (*(self.data[i][idx_now] for i in range(1, 5)), *new_act_buf)
        new_act = self.data[0][idx_now]
        rew = np.float32(self.data[5][idx_now])
        done = self.data[6][idx_now]
        info = self.data[7][idx_now]
        return last_obs, new_act, rew, new_obs, done, info


memory_cls = partial(MyMemoryDataloading, act_buf_len=my_config["act_buf_len"])


class MyCriticModule(torch.nn.Module):
    def __init__(self, observation_space, action_space, hidden_sizes=(256, 256), activation=torch.nn.ReLU):
        super().__init__()
        obs_dim = sum(prod(s for s in space.shape) for space in observation_space)
        act_dim = action_space.shape[0]
        self.q = mlp([obs_dim + act_dim] + list(hidden_sizes) + [1], activation)

    def forward(self, obs, act):
        x = torch.cat((*obs, act), -1)
        q = self.q(x)
        return torch.squeeze(q, -1)


class MyActorCriticModule(torch.nn.Module):
    def __init__(self, observation_space, action_space, hidden_sizes=(256, 256), activation=torch.nn.ReLU):
        super().__init__()
        self.actor = MyActorModule(observation_space, action_space, hidden_sizes, activation)
        self.q1 = MyCriticModule(observation_space, action_space, hidden_sizes, activation)
        self.q2 = MyCriticModule(observation_space, action_space, hidden_sizes, activation)


class MyTrainingAgent(TrainingAgent):
    model_nograd = cached_property(lambda self: no_grad(copy_shared(self.model)))

    def __init__(
        self,
        observation_space=None,
        action_space=None,
        device=None,
        model_cls=MyActorCriticModule,
        gamma=0.99,
        polyak=0.995,
        alpha=0.2,
        lr_actor=1e-3,
        lr_critic=1e-3,
        lr_entropy=1e-3,
        learn_entropy_coef=True,
        target_entropy=None,
    ):
        super().__init__(observation_space=observation_space, action_space=action_space, device=device)
        model = model_cls(observation_space, action_space)
        self.model = model.to(device)
        self.model_target = no_grad(deepcopy(self.model))
        self.gamma = gamma
        self.polyak = polyak
        self.alpha = alpha
        self.lr_actor = lr_actor
        self.lr_critic = lr_critic
        self.lr_entropy = lr_entropy
        self.learn_entropy_coef = learn_entropy_coef
        self.target_entropy = target_entropy
        self.q_params = itertools.chain(self.model.q1.parameters(), self.model.q2.parameters())
        self.pi_optimizer = Adam(self.model.actor.parameters(), lr=self.lr_actor)
        self.q_optimizer = Adam(self.q_params, lr=self.lr_critic)
        if self.target_entropy is None:
            self.target_entropy = -np.prod(action_space.shape).astype(np.float32)
        else:
            self.target_entropy = float(self.target_entropy)
        if self.learn_entropy_coef:
            self.log_alpha = torch.log(torch.ones(1, device=self.device) * self.alpha).requires_grad_(True)
            self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=self.lr_entropy)
        else:
            self.alpha_t = torch.tensor(float(self.alpha)).to(self.device)

    def get_actor(self):
        return self.model_nograd.actor

    def train(self, batch):
        o, a, r, o2, d = batch
        pi, logp_pi = self.model.actor(o)
        loss_alpha = None
        if self.learn_entropy_coef:
            alpha_t = torch.exp(self.log_alpha.detach())
            loss_alpha = -(self.log_alpha * (logp_pi + self.target_entropy).detach()).mean()
        else:
            alpha_t = self.alpha_t
        if loss_alpha is not None:
            self.alpha_optimizer.zero_grad()
            loss_alpha.backward()
            self.alpha_optimizer.step()
        q1 = self.model.q1(o, a)
        q2 = self.model.q2(o, a)
        with torch.no_grad():
            a2, logp_a2 = self.model.actor(o2)
            q1_pi_targ = self.model_target.q1(o2, a2)
            q2_pi_targ = self.model_target.q2(o2, a2)
            q_pi_targ = torch.min(q1_pi_targ, q2_pi_targ)
            backup = r + self.gamma * (1 - d) * (q_pi_targ - alpha_t * logp_a2)
        loss_q1 = ((q1 - backup) ** 2).mean()
        loss_q2 = ((q2 - backup) ** 2).mean()
        loss_q = loss_q1 + loss_q2
        self.q_optimizer.zero_grad()
        loss_q.backward()
        self.q_optimizer.step()
        for p in self.q_params:
            p.requires_grad = False
        q1_pi = self.model.q1(o, pi)
        q2_pi = self.model.q2(o, pi)
        q_pi = torch.min(q1_pi, q2_pi)
        loss_pi = (alpha_t * logp_pi - q_pi).mean()
        self.pi_optimizer.zero_grad()
        loss_pi.backward()
        self.pi_optimizer.step()
        for p in self.q_params:
            p.requires_grad = True
        with torch.no_grad():
            for p, p_targ in zip(self.model.parameters(), self.model_target.parameters()):
                p_targ.data.mul_(self.polyak)
                p_targ.data.add_((1 - self.polyak) * p.data)
        ret_dict = dict(loss_actor=loss_pi.detach(), loss_critic=loss_q.detach())
        if self.learn_entropy_coef:
            ret_dict["loss_entropy_coef"] = loss_alpha.detach()
            ret_dict["entropy_coef"] = alpha_t.item()
        return ret_dict


training_agent_cls = partial(
    MyTrainingAgent,
    model_cls=MyActorCriticModule,
    gamma=0.99,
    polyak=0.995,
    alpha=0.2,
    lr_actor=1e-3,
    lr_critic=1e-3,
    lr_entropy=1e-3,
    learn_entropy_coef=False,
    target_entropy=None,
)

training_cls = partial(
    TrainingOffline,
    env_cls=env_cls,
    memory_cls=memory_cls,
    training_agent_cls=training_agent_cls,
    epochs=int(os.environ.get("TUTORIAL_EPOCHS", "10")),
    rounds=int(os.environ.get("TUTORIAL_ROUNDS", "10")),
    steps=int(os.environ.get("TUTORIAL_STEPS", "1000")),
    update_buffer_interval=100,
    update_model_interval=int(os.environ.get("TUTORIAL_STEPS", "1000")),
    max_training_steps_per_env_step=2.0,
    start_training=int(os.environ.get("TUTORIAL_START", "500")),
    device=None,
)


def make_server():
    return Server(min_samples_per_server_packet=100)


def make_worker():
    return RolloutWorker(
        env_cls=env_cls,
        actor_module_cls=actor_module_cls,
        sample_compressor=my_sample_compressor,
        device="cpu",
        server_ip=server_ip,
        min_samples_per_worker_packet=100,
        max_samples_per_episode=1000,
        model_path=str(weights_folder / (my_run_name + ".pth")),
        model_path_history=str(weights_folder / (my_run_name + "_")),
        model_history=10,
    )


def make_trainer():
    return Trainer(
        training_cls=training_cls,
        server_ip=server_ip,
        model_path=str(weights_folder / (my_run_name + "_t.pth")),
        checkpoint_path=str(checkpoints_folder / (my_run_name + "_t.cpt")),
    )


def run_worker(worker):
    worker.run(test_episode_interval=10)


def run_trainer(trainer):
    trainer.run()


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else "all"
    if role == "server":
        my_server = make_server()
        my_server.wait()
    elif role == "worker":
        run_worker(make_worker())
    elif role == "trainer":
        run_trainer(make_trainer())
    else:
        my_server = make_server()
        my_worker = make_worker()
        my_trainer = make_trainer()
        daemon_thread_worker = Thread(target=run_worker, args=(my_worker,), kwargs={}, daemon=True)
        daemon_thread_worker.start()
        run_trainer(my_trainer)
