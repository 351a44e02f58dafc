"""Tests of torch: batches as tensors without copies, networks as models, and algorithms of Stable-Baselines3."""

import inspect
import pickle
from copy import copy
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import memoire.sb3
import memoire.torch
from memoire import Buffer, Column, Prioritized, Reader, Schema, Server, Uniform, connect
from memoire.errors import NotCopied, ParameterError, WrongModel, WrongType
from memoire.replay.parameters import NAMES
from memoire.sb3 import DQN, ReplayBuffer, schema_of

pytestmark = pytest.mark.torch

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU that torch can use: where there is one, run pytest -rs -k gpu tests/frameworks/test_torch.py",
)


def buffer_of():
    obs = {"image": (np.uint8, (2, 2)), "arm": (np.float32, (3,))}
    schema = Schema({"obs": obs, "action": np.int64, "reward": np.float32})
    buffer = Buffer(schema, 100, sampler=Prioritized(0.6), seed=1)
    writer = buffer.writer(num_envs=1, autoreset="disabled", check=False)
    for step in range(30):
        obs = {"image": np.full((1, 2, 2), step, np.uint8), "arm": np.full((1, 3), step, np.float32)}
        after = {name: part + 1 for name, part in obs.items()}
        writer.step(obs, np.array([step]), np.ones(1), np.array([step % 10 == 9]), np.zeros(1, bool), after)
    return buffer


def test_tensors_share_the_memory_of_the_batch_and_have_its_names_and_nesting():
    batch = buffer_of().sample(16)
    tensors = memoire.torch.TorchBatch(batch)
    assert set(tensors) == set(batch) - {"ids"} and tensors.ids is batch.ids
    for name, tensor in tensors.items():
        assert tensor.data_ptr() == batch[name].ctypes.data and tuple(tensor.shape) == batch[name].shape
    assert tensors.obs["image"].dtype == torch.uint8 and tensors.next_obs["arm"] is tensors["next_obs.arm"]
    tensors["reward"][0] = 7.0
    assert batch.reward[0] == 7.0
    with pytest.raises(AttributeError, match="has no 'other'. It has obs.image"):
        _ = tensors.other


def test_ragged_columns_come_as_padded_tensors_with_lengths():
    cloud = Column(np.float32, (None, 2), "state")
    buffer = Buffer(Schema({"obs": cloud, "action": np.int64, "reward": np.float32}), 100, seed=1)
    states = [np.full((step % 4, 2), step, np.float32) for step in range(31)]
    with buffer.writer() as writer:
        for step in range(30):
            writer.step(states[step], step, 1.0, False, False, states[step + 1])
    tensors = memoire.torch.TorchBatch(buffer.sample(16))
    assert tensors.obs.shape == (16, 3, 2) and tensors["next_obs_length"].dtype == torch.int32
    is_real = torch.arange(3) < tensors["obs_length"][:, None]
    assert torch.equal(tensors["obs_length"], tensors.action.int() % 4)
    assert (tensors.obs[..., 0] == torch.where(is_real, tensors.action[:, None], 0)).all()
    room = memoire.torch.pinned(buffer.sample(16))
    assert "reward" in room and "obs" not in room and "next_obs_length" not in room
    assert buffer.sample(16, out=room)["reward"] is room["reward"]


def test_errors_of_a_learner_become_priorities():
    buffer = buffer_of()
    tensors = memoire.torch.TorchBatch(buffer.sample(16))
    errors = torch.linspace(1, 2, 16, requires_grad=True)
    assert tensors.update_priorities(errors).applied == 16
    last = {int(number): error for number, error in zip(tensors.ids, errors.tolist(), strict=True)}
    for number, error in last.items():
        assert buffer.memory.weights([number])[0] == pytest.approx((error + 1e-6) ** 0.6, rel=1e-5)


def test_a_dtype_that_torch_does_not_have_is_named():
    with pytest.raises(ParameterError, match="one that torch has"):
        memoire.torch.as_tensor(np.zeros(2, [("a", "i4")]))


def test_batches_of_a_server_come_as_tensors_until_the_run_is_over():
    schema = Schema({"obs": (np.float32, (2,)), "reward": np.float32})
    with Server("tcp://127.0.0.1:0", schema) as server, connect(server.endpoint, seed=1) as client:
        client.memory.open()
        client.memory.extend(0, (np.ones((50, 2), np.float32), np.ones(50, np.float32)))
        client.memory.close(terminated=True)
        client.push_cache()
        batches = memoire.torch.batches(server, 8, 100.0)
        first = next(batches)
        assert first.obs.shape == (8, 2)
        assert first.update_priorities(torch.ones(8)).sent == 8
        server.finish()
        assert sum(1 for _ in batches) == 0
    with pytest.raises(ParameterError, match="ahead"):
        memoire.torch.batches(server, 8, ahead=-1)


def test_a_device_that_is_none_is_refused():
    for device, text in (("gpu", "one that torch knows"), (3.5, "one that torch knows")):
        with pytest.raises(ParameterError, match=f"device must be {text}"):
            buffer_of().sample(2).to(device)
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match="torch finds no GPU that it can use, got 'cuda'"):
            buffer_of().sample(2).to("cuda")


def test_a_batch_on_another_device_keeps_its_names_and_reports_from_there():
    moved = buffer_of().sample(4).to("cpu").to("meta")
    assert moved.device.type == "meta" and moved.obs["image"].device.type == "meta" and moved.source is not None


@needs_gpu
def test_batches_are_prefetched_onto_a_gpu():
    buffer = buffer_of()
    source = SimpleNamespace(batches=lambda batch_size, timeout=100.0: (buffer.sample(batch_size) for _ in range(5)))
    drawn = list(memoire.torch.batches(source, 32, device="cuda", ahead=2))
    assert len(drawn) == 5
    for batch in drawn:
        assert batch.reward.is_cuda
        np.testing.assert_array_equal(batch.action.cpu().numpy(), batch.source.action)


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def values(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_a_network_travels_from_a_server_to_an_actor():
    net, there = network(1), network(2)
    with Server("tcp://127.0.0.1:0", {"obs": np.float32}) as server, connect(server.endpoint) as client:
        assert memoire.torch.publish(server, "policy", net) == 1
        policy = client.model("policy")
        assert memoire.torch.load(policy.wait(timeout=100.0), there) == 1
        assert same(net, there)
        with torch.no_grad():
            net[0].weight += 1.0
        with Reader([server.endpoint]) as learner:
            assert memoire.torch.publish(learner, "policy", net.state_dict(), dtype=torch.bfloat16) == 2
        model = policy.wait(timeout=100.0, after=1)
        with pytest.raises(
            WrongModel, match=r"model 'policy' version 2 has '0.weight' as BF16\[8, 4\], but the network has F32"
        ):
            memoire.torch.load(model, there)
        assert memoire.torch.load(model, there, cast=True) == 2
        assert torch.equal(there[0].weight, net[0].weight.bfloat16().float())
        assert there[1].num_batches_tracked.dtype == torch.int64, "only floats are sent as another type"
        server.publish("policy", b"something else")
        with pytest.raises(WrongModel, match="version 3 holds no named arrays"):
            memoire.torch.load(policy.wait(timeout=100.0, after=2), there)


@pytest.mark.parametrize("dtype", sorted(memoire.torch.TYPES.values(), key=str), ids=str)
def test_every_dtype_travels_bit_by_bit(dtype):
    raw = torch.arange(64, dtype=torch.uint8) % 2
    state = {"a": raw.view(dtype), "one": raw.view(dtype)[0], "none": torch.empty(0, 3, dtype=dtype)}
    tensors = memoire.torch.tensors(memoire.torch.body_of(state))
    assert tensors.keys() == state.keys()
    for one, other in zip(tensors.values(), state.values(), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def test_tensors_that_are_views_or_shared_travel_as_what_they_show():
    wide = torch.arange(12.0).reshape(3, 4)
    state = {"turned": wide.T, "part": wide[:, 1], "wide": wide, "again": wide}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert memoire.torch.load(memoire.torch.body_of(state), target) == 0
    assert all(torch.equal(target[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("0.bias"), "lacks '0.bias'"),
        (lambda state: state.update(extra=torch.ones(1)), "has 'extra', which the network lacks"),
        (lambda state: state.update({"2.bias": torch.ones(2, dtype=torch.float64)}), r"'2.bias' as F64\[2\]"),
        (lambda state: state.update({"2.bias": torch.ones(2, 1)}), r"'2.bias' as F32\[2, 1\], .*Nothing was loaded"),
    ],
)
def test_a_network_of_another_form_is_refused_and_nothing_is_changed(change, text):
    net, state = network(2), dict(network(1).state_dict())
    change(state)
    before = values(net)
    with pytest.raises(WrongModel, match=text):
        memoire.torch.load(memoire.torch.body_of(state), net)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_what_is_no_network_is_refused():
    with pytest.raises(WrongType, match=r"net\['step'\] must be a tensor, got int"):
        memoire.torch.body_of({"step": 3})
    with pytest.raises(WrongType, match="net must be a torch.nn.Module or a state_dict, got Tensor"):
        memoire.torch.body_of(torch.ones(3))
    for odd in (torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(ParameterError, match=r"net\['x'\] must be a dense tensor with values"):
            memoire.torch.body_of({"x": odd})
    with pytest.raises(ParameterError, match="dtype must be a floating-point dtype"):
        memoire.torch.body_of(network(1), torch.int8)
    with pytest.raises(WrongType, match="model must be a model from client.model"):
        memoire.torch.load(None, network(1))


@pytest.mark.filterwarnings("ignore")  # torch warns while torch compiles
def test_the_wrapper_of_compile_is_looked_through():
    net, there = network(1), network(2)
    memoire.torch.load(memoire.torch.body_of(torch.compile(net)), torch.compile(there))
    assert same(net, there)


class TestStableBaselines:
    """Tests that take seconds each: a few hundred steps of a real environment."""

    @pytest.fixture(autouse=True)
    def one_thread(self):
        torch.set_num_threads(1)

    @pytest.mark.filterwarnings("ignore")
    def test_an_algorithm_trains_from_a_cluster(self):
        env = gymnasium.make("CartPole-v1")
        server = Server("tcp://127.0.0.1:0", schema_of(env), sampler=Prioritized(0.6, beta=0.4))
        client = connect(server.endpoint, seed=1, on_full="block")
        with server, client:
            server.configure(cache_size=32, samples_per_insert=8.0)
            client.sync()
            replay = {"writer": client.writer(num_envs=1, autoreset="disabled"), "source": server}
            model = DQN("MlpPolicy", env, learning_starts=200, train_freq=8, seed=1, replay_buffer_kwargs=replay)
            model.learn(400)
            client.update()
            assert server.total_steps == 400 and server.stats().feedback_given > 0
            with pytest.raises(ParameterError, match="Pass both writer= and source="):
                DQN("MlpPolicy", env, replay_buffer_kwargs={"source": server})

    def test_sequences_are_refused_by_algorithms_that_learn_from_transitions(self):
        env = gymnasium.make("CartPole-v1")
        spaces = env.observation_space, env.action_space
        with pytest.raises(ParameterError, match="sequence_length must be 0: Stable-Baselines3's algorithms"):
            ReplayBuffer(100, *spaces, sequence_length=4)
        source = Buffer(schema_of(env), 100, sampler=Prioritized(0.6), sequence_length=4)
        writer = source.writer(num_envs=1, autoreset="disabled", check=False)
        for step in range(20):
            obs, is_end = np.full((1, 4), step), np.zeros(1, bool)
            writer.step(obs, np.zeros(1, int), np.ones(1), is_end, is_end, obs.copy())
        drawn = SimpleNamespace(get_batch=lambda size, timeout: source.sample(size))
        with pytest.raises(ParameterError, match="got 4"):
            ReplayBuffer(100, *spaces, writer=writer, source=drawn).sample(8)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", ["SAC", "TD3", "DQN", "QRDQN"])
    def test_every_algorithm_learns_with_importance_and_reports_its_errors(self, name):
        env = "Pendulum-v1" if name in ("SAC", "TD3") else "CartPole-v1"
        replay = {"sampler": Prioritized(0.6, beta=0.4), "seed": 1}
        options = {"learning_starts": 50, "train_freq": 4, "batch_size": 32, "seed": 1, "gamma": 0.9}
        model = getattr(memoire.sb3, name)("MlpPolicy", env, replay_buffer_kwargs=replay, **options)
        before = values(model.policy)
        model.learn(250)
        model.learn(30)  # the environment is reset in the middle of an episode
        changed = [key for key, tensor in model.policy.state_dict().items() if not torch.equal(tensor, before[key])]
        assert len(changed) >= len(before) // 2
        buffer = model.replay_buffer
        assert buffer.memory.parameters.discount == (0.9,), "it is the algorithm's"
        assert len(buffer.memory) == 284 and len(np.unique(buffer.memory.memory.contents()["weights"])) > 50
        assert buffer.importance().shape == (32, 1)

    @pytest.mark.filterwarnings("ignore")
    def test_losses_are_those_of_stable_baselines_where_importance_is_one(self):
        """With uniform draws, the same batches teach the same as in Stable-Baselines3's own algorithms."""
        for name, env in (("SAC", "Pendulum-v1"), ("TD3", "Pendulum-v1"), ("DQN", "CartPole-v1")):
            options = {"learning_starts": 1000, "seed": 1, "replay_buffer_class": memoire.sb3.ReplayBuffer}
            ours = getattr(memoire.sb3, name)("MlpPolicy", env, **options, replay_buffer_kwargs={"sampler": Uniform()})
            theirs = getattr(stable_baselines3, name)("MlpPolicy", env, **options)
            ours.learn(120)
            theirs.policy.load_state_dict(ours.policy.state_dict())
            theirs.set_logger(ours.logger)
            drawn = [ours.replay_buffer.sample(32) for _ in range(4)]
            for model in (ours, theirs):
                turns = iter(drawn)
                model.replay_buffer = Replayed(turns)
                torch.manual_seed(3)
                model.train(4, batch_size=32)
            torch.testing.assert_close(ours.policy.state_dict(), theirs.policy.state_dict(), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_the_loop_of_cleanrl_runs_and_stores_what_the_buffer_of_stable_baselines_stores(self, num_envs):
        """At a termination, next_obs is the first observation of the next episode, and `infos` are Gymnasium's."""
        envs = SyncVectorEnv([lambda: Short()] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        spaces = envs.single_observation_space, envs.single_action_space
        options = {"device": "cpu", "n_envs": num_envs, "handle_timeout_termination": False}
        ours, theirs = (kind(6000, *spaces, **options) for kind in (ReplayBuffer, buffers.ReplayBuffer))
        envs.action_space.seed(0)
        obs, _ = envs.reset(seed=0)
        for _ in range(200):
            actions = envs.action_space.sample()
            next_obs, rewards, terminations, truncations, infos = envs.step(actions)
            real_next_obs = next_obs.copy()
            for index, truncated in enumerate(truncations):
                if truncated:
                    real_next_obs[index] = infos["final_obs"][index]
            for each in (ours, theirs):
                each.add(obs, real_next_obs, actions, rewards, terminations, infos)
            obs = next_obs

        ours_drawn, theirs_drawn = (self.table(each.sample(20_000))[0] for each in (ours, theirs))
        assert len(ours_drawn) > 150 * num_envs and ours_drawn == theirs_drawn, "with the newest step"

    BOX = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    OBS = {
        "box": BOX, "discrete": gymnasium.spaces.Discrete(7), "bits": gymnasium.spaces.MultiBinary(4),
        "dict": gymnasium.spaces.Dict({"a": BOX, "b": gymnasium.spaces.Discrete(5)}),
    }  # fmt: skip
    ACTIONS = (BOX, gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float64), gymnasium.spaces.MultiDiscrete([3, 4]))
    ENDS = {"done": 0.2, "cut, or done": 0.2, "cut and not done": 0.0, "done at each step": 1.0}

    def draws(self, space, count):
        if isinstance(space, gymnasium.spaces.Dict):
            return {name: self.draws(part, count) for name, part in space.spaces.items()}
        return np.stack([np.asarray(space.sample()) for _ in range(count)])

    def chosen(self, mask, ones, others):
        if isinstance(ones, dict):
            return {name: self.chosen(mask, ones[name], others[name]) for name in ones}
        return np.where(mask.reshape(-1, *[1] * (ones.ndim - 1)), ones, others)

    def table(self, samples):
        """Return the set of a batch's samples without unused values, and the form of each field."""

        def parts(value):
            return [each for part in value.values() for each in parts(part)] if isinstance(value, dict) else [value]

        forms = [type(samples)] + [
            [(each.dtype, each.shape[1:]) for each in parts(value)] for value in samples if value is not None
        ]
        used = [*parts(samples.observations), samples.actions, samples.rewards, samples.dones]
        after = [*parts(samples.next_observations), *([] if samples.discounts is None else [samples.discounts])]
        used += [each.reshape(len(each), -1) * (1 - samples.dones) for each in after]
        rows = torch.cat([each.reshape(len(each), -1).double() for each in used], dim=1)
        return {tuple(row) for row in rows.numpy().round(4).tolist()}, forms

    @pytest.mark.parametrize("ends", ENDS)
    @pytest.mark.parametrize(("num_envs", "n_steps"), [(1, 1), (3, 3)])
    @pytest.mark.parametrize("obs", OBS)
    def test_samples_are_those_of_the_buffers_of_stable_baselines_wherever_episodes_end(
        self, obs, num_envs, n_steps, ends
    ):
        """Episodes of one step, whose next_obs is the first observation of the next episode, agree as well."""
        rng, space = np.random.default_rng(1), self.OBS[obs]
        options = {"n_steps": n_steps, "gamma": 0.9} if n_steps > 1 else {}
        kind = {1: buffers.ReplayBuffer, 3: buffers.NStepReplayBuffer}[n_steps]
        if obs == "dict":
            kind, options = buffers.DictReplayBuffer, {}
        actions = self.ACTIONS[len(ends) % 3]
        for part in (space, actions):
            part.seed(1)
        ours, theirs = (cls(500, space, actions, "cpu", num_envs, **options) for cls in (ReplayBuffer, kind))
        now = self.draws(space, num_envs)
        for _ in range(40):
            after, fresh, action = (self.draws(each, num_envs) for each in (space, space, actions))
            done, rewards = rng.random(num_envs) < self.ENDS[ends], rng.normal(size=num_envs).astype(np.float32)
            cut = rng.random(num_envs) < 0.3 if "cut" in ends else np.zeros(num_envs, bool)
            if ends == "done at each step":
                after = fresh
            infos = [{"TimeLimit.truncated": bool(each)} for each in cut]
            for each in (ours, theirs):
                # Copies, because Stable-Baselines3 reshapes the arrays of the dicts that it receives.
                each.add(copy(now), copy(after), action, rewards, done.astype(np.float32), infos)
            now = self.chosen(done, fresh, after)
        drawn, expected = (self.table(each.sample(6000)) for each in (ours, theirs))
        assert drawn == expected and len(drawn[0]) > 30
        assert not options or (ours.n_steps, ours.gamma) == (theirs.n_steps, theirs.gamma)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("n_steps", [1, 3])
    @pytest.mark.parametrize("module", [stable_baselines3, memoire.sb3], ids=["theirs", "ours"])
    @pytest.mark.parametrize("name", ["SAC", "DQN"])
    def test_who_loads_draws_and_learns_what_the_one_that_saved_does(self, module, name, n_steps, tmp_path):
        kind, env = getattr(module, name), "CartPole-v1" if name == "DQN" else "Pendulum-v1"
        steps = {"n_steps": n_steps, "gamma": 0.99} if n_steps > 1 else {}
        options = {"replay_buffer_class": ReplayBuffer, "replay_buffer_kwargs": steps, "learning_starts": 20}
        model = kind("MlpPolicy", env, seed=1, train_freq=4, policy_kwargs={"net_arch": [8]}, **options).learn(230)
        model.save(tmp_path / "model.zip")
        model.save_replay_buffer(tmp_path / "replay.pkl")
        again = kind.load(tmp_path / "model.zip", env=model.env)
        again.load_replay_buffer(tmp_path / "replay.pkl")
        again.set_logger(model.logger)

        def go_on(each):
            """Add the rest of the open episode and further ones with training between; return weights and samples."""
            torch.manual_seed(5)
            rng, obs = np.random.default_rng(5), each.replay_buffer._last
            for turn in range(60):
                after = rng.normal(size=obs.shape).astype(np.float32)
                action = np.zeros((1, *each.action_space.shape), each.action_space.dtype)
                done, info = np.array([turn % 7 == 6]), [{"TimeLimit.truncated": turn % 2 == 0}]
                each.replay_buffer.add(obs, after, action, rng.normal(size=1), done, info)
                obs = rng.normal(size=obs.shape).astype(np.float32) if done[0] else after
                if turn % 5 == 0:
                    each.train(1, batch_size=8)
            samples = each.replay_buffer.sample(64)
            return [*values(each.policy).values(), *(array for array in samples if array is not None)]

        for one, other in zip(go_on(model), go_on(again), strict=True):
            assert torch.equal(one, other)
        assert len(again.replay_buffer.memory) == len(model.replay_buffer.memory) == again.replay_buffer.size() > 290
        again.learn(9, reset_num_timesteps=False)  # the reset ends the open episode

    @pytest.mark.filterwarnings("ignore")
    def test_the_file_of_another_replay_buffer_is_refused_and_changes_nothing(self, tmp_path):
        stable_baselines3.DQN("MlpPolicy", "CartPole-v1", buffer_size=9).save_replay_buffer(tmp_path / "theirs.pkl")
        model = memoire.sb3.DQN("MlpPolicy", "CartPole-v1")
        before = model.replay_buffer
        with pytest.raises(ParameterError, match=r"replay_buffer must be a memoire.sb3.ReplayBuffer.*got 'stable_base"):
            model.load_replay_buffer(tmp_path / "theirs.pkl")
        assert model.replay_buffer is before

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_rewards_under_vec_normalize_are_those_of_stable_baselines(self, n_steps):
        env = VecNormalize(DummyVecEnv([Short]), norm_obs=False, clip_reward=0.4)
        env.ret_rms.var = 0.25
        options = {"n_steps": n_steps, "gamma": 0.5}
        spaces = Short.observation_space, Short.action_space
        ours = ReplayBuffer(500, *spaces, **(options if n_steps > 1 else {}))
        theirs = buffers.NStepReplayBuffer(500, *spaces, **options)
        obs = env.venv.reset()
        for _ in range(200):
            after, rewards, dones, infos = env.venv.step(np.zeros(1, int))
            real = infos[0]["terminal_observation"][None] if dones[0] else after
            for each in (ours, theirs):
                each.add(obs, real, np.zeros((1, 1), int), rewards, dones, infos)
            obs = after
        both = ours.sample(8000, env), theirs.sample(8000, env)
        drawn = [torch.cat([each.observations, each.rewards], dim=1).numpy().round(5).tolist() for each in both]
        one, other = ({tuple(row) for row in rows} for rows in drawn)
        assert len(one) > 150 and one == other, "with the newest steps"
        source = SimpleNamespace(get_batch=lambda size, timeout: ours.memory.sample(size))
        if n_steps > 1:
            far = ReplayBuffer(500, *spaces, writer=object(), source=source, **options)
            with pytest.raises(ParameterError, match="multi_step must be 1 for rewards that VecNormalize clips"):
                far.sample(8, env)

    SIDES = {"gamma": 0.9, "n_steps": 3}

    def model_with(self, way, gamma, n_steps, tmp_path):
        """Return a DQN of gamma 0.9 and three steps whose replay gets these values in one of several ways."""
        env = gymnasium.make("CartPole-v1")
        if way in ("n_steps and gamma", "multi_step and discount"):
            settings = dict(zip(way.split(" and "), (n_steps, gamma), strict=True))
            return DQN("MlpPolicy", env, **self.SIDES, replay_buffer_kwargs=settings)
        if way == "load_replay_buffer":
            DQN("MlpPolicy", env, gamma=gamma, n_steps=n_steps).save_replay_buffer(tmp_path / "replay.pkl")
            model = DQN("MlpPolicy", env, **self.SIDES)
            before = model.replay_buffer
            try:
                model.load_replay_buffer(tmp_path / "replay.pkl")
            except ParameterError:
                assert model.replay_buffer is before
                raise
            return model
        if way == "load":
            model = DQN("MlpPolicy", env, gamma=gamma, n_steps=n_steps, replay_buffer_kwargs={"gamma": gamma})
            model.save(tmp_path / "model.zip")
            return DQN.load(tmp_path / "model.zip", env=env, custom_objects=self.SIDES)
        source = Buffer(schema_of(env), 100, sampler=Uniform(), discount=gamma, multi_step=n_steps)
        drawn = SimpleNamespace(parameters=source.parameters, get_batch=lambda size, timeout: source.sample(size))
        writer = source.writer(num_envs=1, autoreset="disabled")
        if way == "a source":
            return DQN("MlpPolicy", env, **self.SIDES, replay_buffer_kwargs={"writer": writer, "source": drawn})
        if way == "a source of a buffer alone":
            spaces = env.observation_space, env.action_space
            return ReplayBuffer(100, *spaces, writer=writer, source=drawn, **self.SIDES)
        model = DQN("MlpPolicy", env, **self.SIDES, learning_starts=10)
        model.learn(8)
        if way == "configure":
            model.replay_buffer.memory.configure(discount=gamma, multi_step=n_steps)
        else:
            model.gamma, model.n_steps = gamma, n_steps
        model.learn(8, reset_num_timesteps=False)
        return model

    WAYS = [
        "n_steps and gamma", "multi_step and discount", "load_replay_buffer", "load", "a source",
        "a source of a buffer alone", "configure", "attributes",
    ]  # fmt: skip

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("way", WAYS)
    def test_gamma_and_n_steps_of_the_algorithm_and_of_its_replay_are_equal_or_refused(self, way, tmp_path):
        model = self.model_with(way, 0.9, 3, tmp_path)
        replay = getattr(model, "replay_buffer", model)
        assert (replay.parameters.discount, replay.parameters.multi_step) == ((0.9,), 3)
        if way == "load":  # without n_steps, the replay follows the algorithm
            model = self.model_with(way, 0.9, 2, tmp_path)
            assert model.replay_buffer.parameters.multi_step == 3
        for gamma, n_steps, name in ((0.8, 3, "gamma|discount"), (0.9, 2, "n_steps|multi_step")):
            if (way, n_steps) != ("load", 2):
                with pytest.raises(ParameterError, match=name):
                    self.model_with(way, gamma, n_steps, tmp_path)

    OF_BOTH = {  # name: a value other than the algorithm's own
        "action_space": None, "buffer_size": 5, "device": "meta", "discount": 0.5,
        "gamma": 0.5, "multi_step": 2, "n_envs": 2, "n_steps": 2, "observation_space": None,
        "optimize_memory_usage": True,
    }  # fmt: skip
    OF_THE_BUFFER = {  # no algorithm has these settings; the buffer's seed is for other draws
        "burn_in", "cache_size", "compression", "fields", "frame_stack", "handle_timeout_termination",
        "importance_batches", "importance_exponent", "importance_final", "is_corrected", "max_age", "max_episode",
        "max_model_lag", "max_times_sampled", "min_size", "mix_lambda", "model_topic", "next", "normalize", "prev",
        "prioritization", "priority_epsilon", "priority_exponent", "reuse_cache", "reward_coeff", "rollout_length",
        "sampler", "samples_per_insert", "samples_per_insert_tolerance", "seed", "sequence_first", "sequence_length",
        "sequence_max_share", "sequence_overlap", "source", "start", "stratified", "timeout", "writer",
    }  # fmt: skip

    @pytest.mark.filterwarnings("ignore")
    def test_every_parameter_of_buffer_and_algorithm_and_of_buffer_and_source_is_equal_or_refused_by_name(self):
        names = {*inspect.signature(memoire.sb3.ReplayBuffer).parameters, *NAMES}
        assert names == self.OF_BOTH.keys() | self.OF_THE_BUFFER, "list a new parameter with those of both, or not"
        for name in ("DQN", "SAC", "TD3", "DDPG"):
            shared = names & set(inspect.signature(getattr(stable_baselines3, name)).parameters)
            assert shared - {"seed"} <= self.OF_BOTH.keys()
        env = gymnasium.make("CartPole-v1")
        options = {"gamma": 0.9, "n_steps": 3, "device": "cpu"}
        for name, value in self.OF_BOTH.items():
            with pytest.raises((ParameterError, TypeError), match=name.removesuffix("_factor")):
                memoire.sb3.DQN("MlpPolicy", env, **options, replay_buffer_kwargs={name: value})
        source = Buffer(memoire.sb3.schema_of(env), 100)
        kept = {"multi_step", "discount"}  # the test of each way compares the values
        for name in (NAMES | {"seed", "sampler"}) - kept:
            with pytest.raises(ParameterError, match=f"{name} must be left out with `source`"):
                replay = {"writer": object(), "source": source, name: 1}
                memoire.sb3.DQN("MlpPolicy", env, replay_buffer_kwargs=replay)

    def test_quantile_losses_are_those_of_sb3_contrib(self):
        torch.manual_seed(0)
        ours, theirs = torch.randn(16, 7), torch.randn(16, 7)
        losses = memoire.sb3.quantile_losses(ours, theirs)
        assert losses.shape == (16,)
        torch.testing.assert_close(losses.mean(), sb3_contrib.common.utils.quantile_huber_loss(ours, theirs))

    def test_settings_that_do_not_go_with_the_algorithm_are_refused(self):
        with pytest.raises(ParameterError, match="replay_buffer_class must be memoire.sb3.ReplayBuffer"):
            theirs = stable_baselines3.common.buffers.ReplayBuffer
            memoire.sb3.DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=theirs)
        with pytest.raises(TypeError, match="ReplayBuffer takes no 'n_step'. Did you mean 'multi_step' or 'n_steps'"):
            memoire.sb3.DQN("MlpPolicy", "CartPole-v1", replay_buffer_kwargs={"n_step": 3})

    def test_the_replay_of_a_cluster_is_saved_by_its_servers(self):
        env = gymnasium.make("CartPole-v1")
        replay = ReplayBuffer(10, env.observation_space, env.action_space, writer=object(), source=object())
        with pytest.raises(NotCopied, match=r"Its entries are at the servers: server.snapshot\(path\)"):
            pickle.dumps(replay)


class Short(gymnasium.Env):
    """Environment whose episodes last one to six steps, end either way, and never repeat an observation."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        chance, obs = self.np_random.random(2), self.np_random.random(2, np.float32)
        return obs, float(chance[1]), bool(chance[0] < 0.3), bool(chance[0] > 0.8), {}


class Replayed:
    """Batches that were drawn before, in the same order for each algorithm."""

    def __init__(self, batches):
        self.batches = batches

    def sample(self, batch_size, env=None):
        return next(self.batches)

    def importance(self):
        return torch.ones(32, 1)

    def update_priorities(self, td_errors):
        assert all(each.shape == (32, 1) for each in td_errors)
