"""Tensors are the batch's own memory, and an algorithm of Stable-Baselines3 learns from a buffer and from a cluster."""

import numpy as np
import pytest

from memoire import Buffer, Column, MixedBatch, Prioritized, Schema, Server, connect
from memoire.errors import ParameterError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'memoire-rl[torch]'")

import memoire.torch  # noqa: E402


def filled(schema=None, **options):
    schema = schema or {
        "obs": {"image": (np.uint8, (2, 2)), "arm": (np.float32, (3,))},
        "action": np.int64,
        "reward": np.float32,
    }
    buffer = Buffer(Schema(schema), 100, sampler=Prioritized(0.6), seed=1, **options)
    writer = buffer.writer(num_envs=1, autoreset="disabled", check=False)
    for step in range(30):
        obs = {"image": np.full((1, 2, 2), step, np.uint8), "arm": np.full((1, 3), step, np.float32)}
        after = {name: part + 1 for name, part in obs.items()}
        writer.step(obs, np.array([step]), np.ones(1), np.array([step % 10 == 9]), np.zeros(1, bool), after)
    return buffer


def test_tensors_share_the_memory_of_the_batch_and_have_its_names_and_nesting():
    batch = filled().sample(16)
    made = memoire.torch.TorchBatch(batch)
    assert set(made) == set(batch) - {"ids"} and made.ids is batch.ids
    for name, tensor in made.items():
        assert tensor.data_ptr() == batch[name].ctypes.data and tuple(tensor.shape) == batch[name].shape
    assert made.obs["image"].dtype == torch.uint8 and made.next_obs["arm"] is made["next_obs.arm"]
    made["reward"][0] = 7.0
    assert batch.reward[0] == 7.0
    with pytest.raises(AttributeError, match="no 'other', but"):
        _ = made.other


@pytest.mark.parametrize("options", [{}, {"frame_stack": 3, "multi_step": 2}, {"sequence_length": 4}])
def test_arrays_cross_dlpack_without_a_copy(options):
    batch = filled(**options).sample(16)
    for name, array in batch.items():
        made = torch.from_dlpack(array)
        assert made.data_ptr() == array.ctypes.data and tuple(made.shape) == array.shape, name
    made = torch.from_dlpack(batch.obs["image"])
    made[0] = 77
    assert (batch["obs.image"][0] == 77).all()


def test_ragged_columns_come_as_padded_tensors_with_lengths():
    cloud = Column(np.float32, (None, 2), "state")
    buffer = Buffer(Schema({"obs": cloud, "action": np.int64, "reward": np.float32}), 100, seed=1)
    states = [np.full((step % 4, 2), step, np.float32) for step in range(31)]
    with buffer.writer() as writer:
        for step in range(30):
            writer.step(states[step], step, 1.0, False, False, states[step + 1])
    made = memoire.torch.TorchBatch(buffer.sample(16))
    assert made.obs.shape == (16, 3, 2) and made["next_obs_length"].dtype == torch.int32
    is_real = torch.arange(3) < made["obs_length"][:, None]
    assert torch.equal(made["obs_length"], made.action.int() % 4)
    assert (made.obs[..., 0] == torch.where(is_real, made.action[:, None], 0)).all()
    room = memoire.torch.pinned(buffer.sample(16))
    assert "reward" in room and "obs" not in room and "next_obs_length" not in room
    assert buffer.sample(16, out=room)["reward"] is room["reward"]


def test_errors_of_a_learner_become_priorities():
    buffer = filled()
    made = memoire.torch.TorchBatch(buffer.sample(16))
    errors = torch.linspace(1, 2, 16, requires_grad=True)
    assert made.update_priorities(errors) == (16, 0)
    last = {int(number): error for number, error in zip(made.ids, errors.tolist(), strict=True)}
    for number, error in last.items():
        assert buffer.memory.weights([number])[0] == pytest.approx((error + 1e-6) ** 0.6, rel=1e-5)


def test_pinned_arrays_are_filled_by_the_next_draw():
    buffer = filled()
    room = memoire.torch.pinned(buffer.sample(8))
    batch = buffer.sample(8, out=room)
    assert batch["obs.image"] is room["obs.image"]
    assert memoire.torch.as_tensor(batch.reward).is_pinned() == torch.cuda.is_available()


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
        assert first.update_priorities(torch.ones(8)) == 0
        server.finish()
        assert sum(1 for _ in batches) == 0
    with pytest.raises(ParameterError, match="ahead"):
        memoire.torch.batches(server, 8, ahead=-1)


def test_batches_mixed_of_several_tables_come_as_one():
    class Source:
        def batches(self, batch_size, timeout=100.0):
            yield MixedBatch({name: filled().sample(size) for name, size in batch_size.items()})

    batch = next(memoire.torch.batches(Source(), {"online": 24, "demo": 8}))
    assert len(batch.ids) == len(batch.importance) == 32
    assert batch.update_priorities(torch.ones(32)) == {"online": (24, 0), "demo": (8, 0)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_batches_are_prefetched_onto_a_gpu():
    buffer = filled()

    class Source:
        def batches(self, batch_size, timeout=100.0):
            return (buffer.sample(batch_size) for _ in range(5))

    drawn = list(memoire.torch.batches(Source(), 32, device="cuda", ahead=2))
    assert len(drawn) == 5
    for batch in drawn:
        assert batch.reward.is_cuda
        np.testing.assert_array_equal(batch.action.cpu().numpy(), batch.source.action)


class TestStableBaselines:
    """These take seconds each: a few hundred steps of a real environment."""

    @pytest.fixture(autouse=True)
    def one_thread(self):
        pytest.importorskip(
            "stable_baselines3", reason="stable-baselines3 is not installed: pip install 'memoire-rl[sb3]'"
        )
        torch.set_num_threads(1)

    @pytest.mark.filterwarnings("ignore")
    def test_dqn_learns_from_prioritized_replay(self):
        from memoire.sb3 import DQN

        replay = {"sampler": Prioritized(0.6, beta=0.4), "multi_step": 3, "discount": 0.99, "seed": 1}
        model = DQN("MlpPolicy", "CartPole-v1", learning_starts=50, train_freq=4, seed=1, replay_buffer_kwargs=replay)
        before = [each.clone() for each in model.q_net.parameters()]
        model.learn(400)
        buffer = model.replay_buffer
        assert buffer.size() == len(buffer.memory) == 400
        assert any((one != other).any() for one, other in zip(before, model.q_net.parameters(), strict=True))
        weights = buffer.memory.memory.contents()["weights"]
        assert len(np.unique(weights[weights > 0])) > 50, "what was drawn has priorities of its own"
        assert buffer.importance().shape == (model.batch_size, 1)

    @pytest.mark.filterwarnings("ignore")
    def test_what_the_algorithm_gets_is_what_the_environment_did(self):
        from stable_baselines3 import SAC

        from memoire.sb3 import ReplayBuffer

        model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=ReplayBuffer, learning_starts=1000, seed=0)
        model.learn(450)  # two episodes end, cut off after 200 steps
        samples = model.replay_buffer.sample(2000)
        assert samples.observations.shape == (2000, 3) and samples.actions.shape == (2000, 1)
        assert not samples.dones.any() and (samples.discounts == np.float32(0.99)).all(), "a time limit is no end"
        angle = torch.atan2(samples.observations[:, 1], samples.observations[:, 0])
        ahead = torch.atan2(samples.next_observations[:, 1], samples.next_observations[:, 0])
        turned = torch.remainder(ahead - angle + np.pi, 2 * np.pi) - np.pi
        torch.testing.assert_close(turned, samples.next_observations[:, 2] * 0.05, atol=1e-3, rtol=0)

    @pytest.mark.filterwarnings("ignore")
    def test_an_algorithm_trains_from_a_cluster(self):
        import gymnasium

        from memoire.sb3 import DQN, schema_of

        env = gymnasium.make("CartPole-v1")
        server = Server("tcp://127.0.0.1:0", schema_of(env), sampler=Prioritized(0.6, beta=0.4))
        client = connect(server.endpoint, seed=1, when_full="block")
        with server, client:
            server.configure(cache_size=32, samples_per_insert=8.0)
            client.sync()
            replay = {"writer": client.writer(num_envs=1, autoreset="disabled"), "source": server}
            model = DQN("MlpPolicy", env, learning_starts=200, train_freq=8, seed=1, replay_buffer_kwargs=replay)
            model.learn(400)
            client.update()
            assert server.total_steps == 400 and server.stats().feedback_given > 0
            with pytest.raises(ParameterError, match="given together"):
                DQN("MlpPolicy", env, replay_buffer_kwargs={"source": server})

    def test_sequences_are_refused_by_algorithms_that_learn_from_transitions(self):
        import gymnasium

        from memoire.sb3 import ReplayBuffer, schema_of

        env = gymnasium.make("CartPole-v1")
        spaces = env.observation_space, env.action_space
        with pytest.raises(ParameterError, match="sequence_length must be 0: Stable-Baselines3's algorithms"):
            ReplayBuffer(100, *spaces, sequence_length=4)
        source = Buffer(schema_of(env), 100, sampler=Prioritized(0.6), sequence_length=4)
        writer = source.writer(num_envs=1, autoreset="disabled", check=False)
        for step in range(20):
            writer.step(
                np.full((1, 4), step),
                np.zeros(1, int),
                np.ones(1),
                np.zeros(1, bool),
                np.zeros(1, bool),
                np.full((1, 4), step),
            )
        source.get_batch = lambda size, timeout: source.sample(size)
        with pytest.raises(ParameterError, match="got 4"):
            ReplayBuffer(100, *spaces, writer=writer, source=source).sample(8)
