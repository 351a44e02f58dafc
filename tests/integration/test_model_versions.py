"""Tests of the version of the acting model: stamped by a client's writer, and valid or refused at every entry point."""

import inspect
import itertools
import re
from contextlib import nullcontext

import numpy as np
import pytest

import memoire
from memoire import _core
from memoire.errors import ModelUnknown, NotEnoughSamples, ParameterError, Refused
from memoire.replay.memory import Memory
from test_signatures import calls

SCHEMA = memoire.Schema({"obs": (np.float32, (2,)), "action": np.float32, "reward": np.float32})
PROMPTS = {"answers": memoire.Table({"reward": np.float32}, storage="prompts", group=1, max_model_lag=2)}
ANY = "tcp://127.0.0.1:*"
WRONG = (-1, 1.5, True, None, 2**63, 2**53, float("nan"), "1", np.bool_(True), np.float64(1.0))
ONE = (np.zeros(2, np.float32), np.float32(0), np.float32(0))
SEVERAL = [np.stack([each] * 2) for each in ONE]


def step(writer, number=0, size=(), **options):
    obs = np.full((*size, 2), number, np.float32)
    ends = np.full(size, number % 5 == 4)
    ends = ends if size else bool(ends)
    writer.step(obs, np.zeros(size, np.float32), np.ones(size, np.float32), ends, ends & False, obs + 1, **options)
    if number % 5 == 4:
        writer.reset()


def memory(**options):
    store = Memory(SCHEMA, 100, memoire.Parameters(**options))
    store.open()
    store.open(1)
    return store


@pytest.fixture(scope="module")
def servers():
    """Yield a server of each storage, limited and not, by (storage, max_model_lag)."""
    nodes = {}
    for storage, lag in itertools.product(("caches", "episodes", "rollouts"), (None, 2)):
        room = {} if storage == "caches" else {"capacity": 1000}
        table = memoire.Table(SCHEMA, storage=storage, max_model_lag=lag, **room)
        nodes[storage, lag] = memoire.Server(ANY, tables={"t": table})
    nodes["prompts", 2] = memoire.Server(ANY, tables=PROMPTS)
    yield nodes
    for server in nodes.values():
        server.close(0.2)


def near(lag, version, **options):
    buffer = memoire.Buffer(SCHEMA, 100, max_model_lag=lag)
    step(buffer.writer(**options), size=(2,) if options else (), model_version=version)


def far(storage):
    def record(servers, lag, version):
        with memoire.connect(servers[storage, lag].endpoint) as client:
            step(client.writer(), model_version=version)

    return record


def pushed(servers, lag, version):
    with memoire.connect(servers["episodes", lag].endpoint) as client:
        columns = dict(zip(SCHEMA.entry_names, SEVERAL, strict=True))
        client.push_episode(columns, model_version=version)


VECTOR = {"num_envs": 2, "autoreset": "disabled"}
CALLS = {
    "memoire.replay.writer.Writer.step": [
        lambda _, lag, version: near(lag, version),
        lambda _, lag, version: near(lag, version, **VECTOR),
        *map(far, ("caches", "episodes", "rollouts")),
    ],
    "memoire.client.client.Client.push_episode": [
        pushed,
        lambda servers, lag, version: pushed(servers, lag, [1, version]),
    ],
    "memoire.replay.memory.Memory.add_many": [
        lambda _, lag, version: memory(max_model_lag=lag).add_many([0, 1], SEVERAL, 1.0, version)
    ],
    "memoire.replay.memory.Memory.extend": [
        lambda _, lag, version: memory(max_model_lag=lag).extend(0, SEVERAL, 1.0, version)
    ],
    "memoire._core.EntryStore.add": [
        lambda _, lag, version: memory(max_model_lag=lag).add(0, ONE, 1.0, version),
        lambda _, lag, version: memory(max_model_lag=lag).add(0, list(ONE), 1.0, version),
    ],
}
INNER = {  # functions called by public calls, or statistics of draws
    "memoire.client.episodes.OpenEpisodes.make_shipment", "memoire.client.waiting.HandedModels.version_or_acting",
    "memoire.replay.conversion.version_of", "memoire.replay.memory.Memory.checked_version",
    "memoire.replay.memory.Memory.add_many_changes", "memoire.replay.memory.Memory.add_entry_changes",
    "memoire.replay.memory.Memory.insert", "memoire.rl.demo.actor.Player.step", "memoire.wire.containers.pack_episode",
    "memoire.tables.inspection.FreshnessMonitor.record_rollouts",
}  # fmt: skip
SHOWN = re.compile(r"\.dashboard\.|\.__init__$")  # rows and records of the present state; a protocol


def test_every_door_for_a_model_version_is_tested_here():
    names = {name for name, function in calls() if "model_version" in inspect.signature(function).parameters}
    names |= {
        f"memoire._core.EntryStore.{name}"
        for name, member in vars(_core.EntryStore).items()
        if callable(member) and not name.startswith("_") and "model_version" in inspect.signature(member).parameters
    }
    assert {name for name in names if not SHOWN.search(name)} == CALLS.keys() | INNER


@pytest.mark.parametrize(("call", "number"), [(call, n) for call, uses in CALLS.items() for n in range(len(uses))])
def test_a_model_version_is_right_or_refused_at_every_door(call, number, servers):
    use = CALLS[call][number]
    for wrong in WRONG:
        for lag in (None, 2):
            with pytest.raises(
                ParameterError, match="^model_version must be a whole number from 0 to 9007199254740991"
            ):
                use(servers, lag, wrong)
    for right in (1, 2**53 - 1, np.int64(7)):
        use(servers, 2, right)
    use(servers, None, 0)
    with pytest.raises(ModelUnknown, match="max_model_lag=2 requires the version"):
        use(servers, 2, 0)


VERSIONS_OF_PROMPTS = {
    "memoire.prompts.worker.WorkerCalls.answer": lambda p, lease, v: p.answer(lease, 0, {"reward": 1.0}, v),
    "memoire.prompts.worker.WorkerCalls.answers": lambda p, lease, v: p.answers(lease, {0: {"reward": 1.0}}, v),
    "memoire.prompts.worker.WorkerCalls.answer_all": lambda p, lease, v: p.answer_all([(lease, {})], v),
    "memoire.prompts.worker.WorkerCalls.lease": lambda p, lease, v: p.lease(version=v, timeout=0.0),
    "memoire.prompts.calls.ProducerCalls.saw_model": lambda p, lease, v: p.saw_model(v),
    "memoire.prompts.trainer.TrainerCalls.rewind": lambda p, lease, v: p.rewind(-1, version=v),
    "memoire.prompts.trainer.TrainerCalls.resume": lambda p, lease, v: p.resume(-1, version=v),
}
OPTIONAL = ("lease", "rewind", "resume")  # calls whose version may be None


def test_every_call_for_prompts_with_a_version_is_tested_here():
    users = re.compile(r"memoire\.prompts\.\w+\.\w+Calls\.")
    names = {name for name, call in calls() if users.match(name) and "version" in inspect.signature(call).parameters}
    assert names == VERSIONS_OF_PROMPTS.keys()


@pytest.mark.parametrize("is_far", [False, True])
def test_versions_and_priorities_of_prompts_are_refused_near_and_far_alike(is_far, servers):
    server = servers["prompts", 2]
    far = memoire.Prompts(server.endpoint, "answers") if is_far else None
    with far or nullcontext(server.table("answers").calls()) as prompts:
        prompts.add([(0, b"?")], f"set-{is_far}")
        lease = prompts.lease(timeout=10.0)[0]
        for name, use in VERSIONS_OF_PROMPTS.items():
            for wrong in WRONG:
                if not (wrong is None and name.endswith(OPTIONAL)):
                    with pytest.raises(ParameterError, match="^version must be a whole number"):
                        use(prompts, lease, wrong)
        with pytest.raises(Refused, match="max_model_lag=2 needs each answer's model version, which is 0"):
            prompts.answer(lease, 0, {"reward": 1.0})
        assert prompts.answer(lease, 0, {"reward": 1.0}, 1)
        for wrong in (float("nan"), float("inf"), None, True, "1"):
            with pytest.raises(ParameterError, match="^priority must be a finite number"):
                prompts.add([(1, b"?")], "set", priority=wrong)
            with pytest.raises(ParameterError, match="^priority must be a finite number"):
                prompts.prioritise([lease.key], wrong)


def test_a_clients_writer_stamps_the_model_that_was_handed_out_last(cluster):
    server = cluster.server(schema=SCHEMA, max_model_lag=2, cache_size=5, sampler=memoire.Uniform())
    client = cluster.client(server)
    writer, model = client.writer(check=False), client.model("policy")
    with pytest.raises(ModelUnknown, match="newest\\(\\) or wait\\(\\)"):
        step(writer)
    for _ in range(3):
        server.publish("policy", b"weights")
    model.wait(10.0, after=2)
    for number in range(5):
        step(writer, number)
    server.publish("policy", b"weights")
    model.wait(10.0, after=3)
    for number in range(5):
        step(writer, number, **({"model_version": 2} if number == 0 else {}))
    assert set(server.get_batch(5, timeout=10.0).model_version.tolist()) <= {2, 3, 4}
    versions = client.memory.contents()["meta"]["model_version"][:10]
    assert versions.tolist() == [3] * 5 + [2] + [4] * 4
    for _ in range(4):
        server.publish("policy", b"weights")
    with pytest.raises(NotEnoughSamples, match="max_model_lag=2 excludes entries of models before 6"):
        server.get_batch(64, timeout=0.1)


def test_a_client_of_several_topics_asks_unless_the_table_names_one(cluster):
    for topic, expected in ((None, [1, 1]), ("policy", [0, 2])):
        server = cluster.server(schema=SCHEMA, model_topic=topic)
        client = cluster.client(server)
        for name in ("critic", "policy", "policy"):
            server.publish(name, b"weights")
        client.model("critic").wait(10.0)
        writer = client.writer(check=False)
        step(writer)
        client.model("policy").wait(10.0, after=1)
        if topic is None:
            with pytest.raises(ModelUnknown, match="topics 'critic', 'policy', and the table sets no model_topic"):
                step(writer)
            step(writer, model_version=1)
        else:
            step(writer)
        assert client.memory.contents()["meta"]["model_version"][:2].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"min_size": 40}, {"model_topic": "policy"}])
def test_who_waits_for_entries_of_newer_models_is_told_so_near_and_far_alike(options, cluster):
    server = cluster.server(schema=SCHEMA, max_model_lag=2, cache_size=5, sampler=memoire.Uniform(), **options)
    client = cluster.client(server)
    writer = client.writer(check=False)
    for number in range(20):
        step(writer, number, model_version=1)
    client.sync()
    for topic in ["policy"] * 6 + ["critic"] * 9 * ("model_topic" in options):
        server.publish(topic, b"weights")
    buffer = memoire.Buffer(SCHEMA, 100, max_model_lag=2, min_size=40)
    step(buffer.writer(), model_version=1)
    buffer.saw_model(6)
    calls = [lambda: server.get_batch(8, timeout=0.1), lambda: buffer.sample(8)]
    reader = cluster.reader([server])
    calls.append(lambda: reader.get_batch(8, timeout=0.3))
    for call in calls:
        with pytest.raises(NotEnoughSamples, match="and max_model_lag=2 excludes entries of models before 4"):
            call()
