"""A setting that is set as an attribute works, or is refused with what to write instead: on every public class."""

import re

import numpy as np
import pytest

import memoire
from classic_help import templates
from memoire import Buffer, Memory, Parameters, PrioritizedReplayBuffer, PriorityExperienceReplayBuffer
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.memory import ReplayMemory
from memoire.classic.server import ReplayMemoryServer
from memoire.errors import MemoireError, NotSettable
from memoire.limits import Limits
from netkit import SCHEMA, Cluster, in_thread

MEANT = ("multi_step", "n_step", "gamma", "alpha", "beta", "discount", "batch_size", "multistep", "max_age", "nonsense")
"""What people set, as they know it from elsewhere."""
FROZEN = {
    "Column": memoire.Column(np.float32),
    "Greedy": memoire.Greedy(),
    "Limits": Limits(),
    "Linear": memoire.Linear(0.0, 1.0, 9),
    "Parameters": Parameters(),
    "Prioritized": memoire.Prioritized(),
    "RankBased": memoire.RankBased(),
    "Table": memoire.Table(SCHEMA),
    "Uniform": memoire.Uniform(),
}
NO_SETTINGS = {"Batch", "Bind", "Conn", "InsecureWarning", "MemoireError", "MixedBatch", "Ragged", "Rollouts", "Schema", "Transition", "__version__", "connect"}  # fmt: skip


@pytest.fixture(scope="module")
def objects():
    cluster = Cluster()
    server = cluster.server()
    proxy = cluster.proxy([server])
    client = cluster.client(proxy)
    classic_server = ReplayMemoryServer(*templates(), 100, "inproc://pub", 4, context=cluster.context)
    worker, _ = in_thread(classic_server.rep_worker_main, "inproc://req", "Bind")
    classic = ReplayMemoryClient("inproc://pub", "inproc://req", "inproc://push", context=cluster.context)
    buffer = Buffer(SCHEMA, 100)
    rows = {"obs": np.float32}
    node = memoire.Inference("inproc://infer", rows, rows, dict, context=cluster.context)
    policy = memoire.RemotePolicy([node.endpoint], rows, rows, context=cluster.context)
    tables = {"t": memoire.Table({"reward": np.float32}, storage="prompts")}
    giver = memoire.Server("inproc://prompts", tables=tables, context=cluster.context)
    prompts = memoire.Prompts("inproc://prompts", context=cluster.context)
    yield {
        "Buffer": buffer,
        "Client": client,
        "Inference": node,
        "Memory": Memory(SCHEMA, 100),
        "PrioritizedReplayBuffer": PrioritizedReplayBuffer(8, 0.5),
        "PriorityExperienceReplayBuffer": PriorityExperienceReplayBuffer(8, 0.5),
        "Prompts": prompts,
        "Proxy": proxy,
        "RemotePolicy": policy,
        "Reader": cluster.reader([proxy]),
        "ReplayMemory": ReplayMemory(*templates(), 100),
        "ReplayMemoryClient": classic,
        "ReplayMemoryServer": classic_server,
        "Server": server,
        "Writer": buffer.writer(),
        "a table": server.table("default"),
        "a client's rem": classic.rem,
        "a server's rem": classic_server.rem,
        "a client's writer": client.writer(),
        **FROZEN,
    }
    for each in (prompts, giver, policy, node, classic, classic_server):
        each.close(0.2)
    worker.join(30.0)
    cluster.close()


def test_every_public_class_is_looked_at(objects):
    public = {name for name in re.findall(r"\b(?:[A-Z]\w+|connect)", str(memoire.__doc__)) if hasattr(memoire, name)}
    assert len(public) > 25 and public <= objects.keys() | NO_SETTINGS


def public_names(node):
    return {name for name in getattr(node, "__dict__", ()) if not name.startswith("_")}


def test_what_is_set_can_be_read_or_is_refused(objects):
    silent = []
    for called, node in objects.items():
        for name in MEANT:
            before = public_names(node)
            try:
                setattr(node, name, 0.25)
            except AttributeError:
                assert public_names(node) == before
                continue
            except MemoireError:  # such as of multi_step of the classic memory, which is set by it
                continue
            is_setting = isinstance(getattr(type(node), name, None), property) or name in before
            if not (is_setting and getattr(node, name) == 0.25):
                silent.append(f"{called}.{name}")
    assert not silent


@pytest.mark.parametrize(
    ("called", "name", "said"),
    [
        ("Buffer", "multi_step", r"multi_step of a Buffer cannot be set.*Write configure\(multi_step=\.\.\.\)"),
        ("Buffer", "n_step", r"Write configure\(multi_step=\.\.\.\)"),
        ("Buffer", "capacity", r"It is given when one is made: Buffer\(capacity=\.\.\.\)"),
        ("Buffer", "multistep", r"Did you mean multi_step\? Write configure"),
        ("Buffer", "zzz", "There is no such setting"),
        ("Memory", "gamma", r"Write configure\(discount=\.\.\.\)"),
        ("Server", "multi_step", r"Write configure\(multi_step=\.\.\.\)"),
        ("Server", "credit", r"Write configure_limits\(credit=\.\.\.\)"),
        ("Server", "run_name", "There is no such setting|Did you mean"),
        ("Reader", "beta", r"Write configure\(importance_exponent=\.\.\.\)"),
        ("Client", "on_full", r"Write configure_limits\(on_full=\.\.\.\)"),
        ("Client", "multi_step", "Parameters are the server's: write"),
        ("Client", "seed", r"It is given when one is made: Client\(seed=\.\.\.\)"),
        ("a table", "max_age", r"Write configure\(max_age=\.\.\.\)"),
        ("ReplayMemory", "gamma", r"Write rem\.discount_factor = "),
        ("ReplayMemoryServer", "n_caches", r"It is given when one is made: ReplayMemoryServer"),
        ("Parameters", "multi_step", r"It never changes. Write replace\(multi_step=\.\.\.\)"),
        ("Table", "capacity", r"Make another one: Table\(\.\.\., capacity=\.\.\.\)"),
    ],
)
def test_whoever_sets_it_is_told_what_to_write(objects, called, name, said):
    with pytest.raises(NotSettable, match=said):
        setattr(objects[called], name, 3)


@pytest.mark.parametrize("called", ["Buffer", "Memory", "Server", "a table"])
def test_what_they_are_told_works(objects, called):
    for name in ("multi_step", "discount", "priority_exponent", "importance_exponent", "mix_lambda"):
        objects[called].configure(**{name: 1})


def test_what_a_class_has_of_its_own_stays_settable(objects):
    objects["ReplayMemory"].multi_step = 3
    assert objects["ReplayMemory"].multi_step == 3
    objects["Writer"].longest = 7
    assert objects["Writer"].longest == 7
    objects["Client"].push_reason = ""

    class Mine(Buffer):
        def __init__(self):
            super().__init__(SCHEMA, 100)
            self.mine = 3

    mine = Mine()
    mine.mine, mine.other = 4, 5
    assert (mine.mine, mine.other) == (4, 5)
