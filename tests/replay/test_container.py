"""Memory limit of a container: files that hold the limit, refusals above it, and defaults that follow from it."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memoire.errors import ParameterError
from memoire.inference.node import Inference
from memoire.limits import Limits, MemoryLimits, MiB, Reservation
from memoire.proxy.proxy import Proxy
from memoire.replay.columns import Column
from memoire.replay.conversion import ENTRY_OVERHEAD
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memoire.rl.memory import GenericMemory
from memoire.server import build
from memoire.server.build import ServerOptions
from serverkit import server_options

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

SCHEMA = Schema({"obs": (np.uint8, (588,)), "reward": np.float32})
ENTRY = 588 + 4 + ENTRY_OVERHEAD
RAGGED = Schema({"obs": (np.uint8, (8,)), "tokens": Column(np.int32, (None,)), "reward": np.float32})
V1, V2 = "memory.limit_in_bytes", "memory.max"


def container(root: Path, groups: str, **files: str) -> MemoryLimits:
    """Return a container with `groups` in /proc/self/cgroup and a file per keyword (__ is a slash, -- is a dot)."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name.replace("__", "/").replace("--", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return MemoryLimits(root)


def of(root: Path, mib: int) -> MemoryLimits:
    """Return a container of `mib` MiB, as Docker makes one under version 2 of control groups."""
    return container(root, "0::/\n", **{"memory--max": str(mib * MiB)})


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory--max": "1000"}, 1000),
        ("0::/\n", {"memory--max": "max"}, None),
        ("0::/a/b\n", {"a__b__memory--max": "max", "a__memory--max": "700", "memory--max": "900"}, 700),
        ("0::/a/b\n", {"a__b__memory--max": "500", "a__memory--max": "700"}, 500),
        ("0::/of/the/host\n", {"memory--max": "800"}, 800),
        ("0::/../../x\n", {"memory--max": "800", "x__memory--max": "1"}, 800),
        ("4:memory:/a\n0::/\n", {"memory__a__memory--limit_in_bytes": "600", "unified__memory--max": "max"}, 600),
        ("4:cpu,memory:/\n", {"memory__memory--limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu:/\n", {"memory__memory--limit_in_bytes": "5"}, None),
        ("0::/\n", {"memory--max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_the_least_limit_of_the_groups_of_a_process_is_its_limit(tmp_path, groups, files, limit):
    actual = container(tmp_path, groups, **files).limit
    assert (actual and actual.size) == limit
    assert actual is None or int(actual.file.read_text()) == limit


def test_a_machine_that_has_no_such_files_has_no_limit(tmp_path):
    empty = Reservation(MemoryLimits(tmp_path))
    empty.reserve("capacity", 1 << 60, 1 << 60)
    assert empty.default("held_bytes", 5) == 5


def test_a_memory_above_the_limit_is_refused_and_both_sizes_are_named(tmp_path):
    place = of(tmp_path, 300)
    with pytest.raises(ParameterError) as refused:
        Memory(SCHEMA, 1_000_000, container=place)
    assert str(refused.value) == (
        "capacity=1000000 needs 671.4 MiB of memory, but the limit of this process's container is 300.0 MiB "
        f"({place.limit.file}). Set a smaller capacity, or raise the limit. Nothing was changed."
    )
    assert sum(place.sizes.values()) == 0
    trainer = GenericMemory(1_000_000, container=place)  # the size of a sample is known at the first append
    with pytest.raises(ParameterError, match="^capacity=1000000 needs 560.8 MiB"):
        trainer.append([(0, np.zeros(580, np.uint8), 0.0, False, False, {})])
    assert len(trainer) == sum(place.sizes.values()) == 0
    Memory(SCHEMA, 300 * MiB // ENTRY, container=place)


def test_what_is_asked_for_is_refused_if_all_buffers_and_servers_of_the_process_exceed_the_limit(tmp_path):
    place = of(tmp_path, 10)
    held = Memory(SCHEMA, 6 * MiB // ENTRY, container=place)
    others = {
        "capacity": lambda: Memory(SCHEMA, 6 * MiB // ENTRY, container=place),
        "ragged_limit": lambda: Memory(RAGGED, 10, ragged_limit=6 * MiB, container=place),
        "byte_limit": lambda: served(place, byte_limit=6 * MiB),
        "held_bytes": lambda: served(place, limits=Limits(held_bytes=6 * MiB)),
    }
    for name, make in others.items():
        with pytest.raises(
            ParameterError, match=rf"^{name}=.* needs .* may fill 6.0 MiB\. Set a smaller {name}, or raise the limit"
        ):
            make()
    del held
    for make in others.values():
        make()  # released objects reserve nothing


def test_a_size_that_is_changed_later_is_refused_likewise_and_nothing_is_changed(tmp_path):
    place = of(tmp_path, 10)
    tables = build.make_tables(served(place, byte_limit=4 * MiB, storage="episodes"))
    others = sum(place.sizes.values()) - 4 * MiB
    assert others > 1.5 * MiB  # other bytes are models, and messages on the way
    for change in (lambda: tables.limit_total_bytes(11 * MiB), lambda: tables.limit_bytes(tables.first, 11 * MiB)):
        with pytest.raises(ParameterError, match="needs 11.0 MiB"):
            change()
    with pytest.raises(ParameterError, match="at least"):
        tables.limit_bytes(tables.first, 1)
    assert (tables.first.pool.byte_limit, sum(place.sizes.values())) == (4 * MiB, 4 * MiB + others)
    tables.limit_total_bytes(5 * MiB)
    assert sum(place.sizes.values()) == 5 * MiB + others
    memory = Memory(RAGGED, 10, ragged_limit=MiB // 2, container=place)
    with pytest.raises(ParameterError, match="^ragged_limit=.* needs"):
        memory.limit_ragged(2 * MiB)
    assert memory.ragged_limit == MiB // 2


def test_defaults_are_a_part_of_what_the_limit_leaves(tmp_path):
    place = of(tmp_path, 300)
    first, second = served(place), served(place)
    names = "held_bytes", "message_bytes", "model_bytes"
    sizes = [[getattr(options.limits, name) / MiB for name in names] for options in (first, second)]
    beside = 150 / 4 + 4  # accounts and the newest log lines
    messages, models = (150 - beside) / 16, (150 - beside) * 3 / 4 / 8  # four messages, two models: a fourth each
    assert sizes[0] == pytest.approx([150, messages, models], rel=1e-6)
    assert sizes[1][0] == pytest.approx((150 - beside - 4 * messages - 2 * models) / 2, rel=1e-6)
    left = 300 * MiB - sum(place.sizes.values())
    memory = Memory(RAGGED, 10, container=place)  # without ragged_limit, values take half of the memory
    assert memory.ragged_limit == 0
    assert 0 <= sum(place.sizes.values()) - (300 * MiB - left) - left // 2 < MiB


NODES = {
    "byte_limit": lambda place, size: served(place, byte_limit=size),
    "held_bytes": lambda place, size: inference(place, limits=Limits(held_bytes=size)),
    "queue_bytes": lambda place, size: proxy(place, queue_bytes=size),
    "message_bytes": lambda place, size: served(place, limits=Limits(message_bytes=size // 4)),
    "model_bytes": lambda place, size: proxy(place, limits=Limits(model_bytes=size)),
    "model_bytes of a server": lambda place, size: served(place, limits=Limits(model_bytes=size // 2)),
    "model_bytes of inference": lambda place, size: inference(place, limits=Limits(model_bytes=size)),
}


@pytest.mark.parametrize("kind", NODES)
def test_what_a_node_may_take_by_its_settings_is_refused_above_the_limit_and_fits_by_default(tmp_path, kind):
    place, name = of(tmp_path, 300), kind.partition(" ")[0]
    with pytest.raises(ParameterError, match=rf"^{name}=\d+ needs \d+\.\d MiB .* is 300.0 MiB"):
        NODES[kind](place, 301 * MiB)
    gc.collect()
    assert sum(place.sizes.values()) == 0
    nodes = [make(place) for make in (served, proxy, inference)]
    assert 200 * MiB < sum(place.sizes.values()) <= 300 * MiB
    for each in nodes[1:]:
        each.close()
    del nodes, each
    assert sum(place.sizes.values()) == 0


def test_a_proxy_of_more_servers_than_its_container_has_room_for_keeps_those_that_it_has(tmp_path):
    with proxy(of(tmp_path, 300), queue_bytes=40 * MiB, limits=Limits(model_bytes=MiB)) as node:
        with pytest.raises(ParameterError, match="^queue_bytes=.* needs"):
            node.set_servers([f"tcp://127.0.0.1:{port}" for port in range(1, 9)])
        assert len(node.stats().backs) == 1


def contained(kind: type, place: MemoryLimits) -> type:
    """Return a subclass of this node class for nodes in the container."""
    return type("Contained", (kind,), {"_container": place})


def served(place: MemoryLimits, **changes: object) -> ServerOptions:
    return server_options(contained(ServerOptions, place), **changes)


def proxy(place: MemoryLimits, **changes: object) -> Proxy:
    return contained(Proxy, place)("inproc://a-proxy-in-a-container", ["tcp://127.0.0.1:1"], **changes)


def inference(place: MemoryLimits, **changes: object) -> Inference:
    rows, place_of_node = {"x": np.float32}, "inproc://an-inference-node-in-a-container"
    return contained(Inference, place)(place_of_node, rows, rows, lambda columns: columns, **changes)


REAL = """
import memoire, numpy as np, sys
from memoire.limits import Limits
schema = {"obs": (np.uint8, (588,)), "reward": np.float32}
try:
    memoire.Buffer(schema, 1_000_000)
except memoire.errors.ParameterError as error:
    print(error)
for limits in (Limits(model_bytes=301 << 20), Limits(held_bytes=301 << 20)):
    try:
        memoire.Inference("tcp://127.0.0.1:*", {"x": "f4"}, {"x": "f4"}, print, limits=limits)
    except memoire.errors.ParameterError as error:
        print(error)
try:
    memoire.Proxy("tcp://127.0.0.1:*", ["tcp://127.0.0.1:1"], queue_bytes=256 << 20)
except memoire.errors.ParameterError as error:
    print(error)
server = memoire.Server(None, schema)
print(server.limits.held_bytes)
buffer = memoire.Buffer(schema, 80_000)
for column in buffer.memory.contents()["columns"]:
    column[:] = 1
print("filled")
"""
"""Program for a container of 300 MiB, which prints refusals and then fills a buffer."""


def test_a_program_in_a_real_control_group_is_refused_and_not_killed(request):
    hosts = {Path("/sys/fs/cgroup/memory"): V1, Path("/sys/fs/cgroup"): V2}
    for mount, file_name in hosts.items():
        group = mount / f"memoire-test-{os.getpid()}"
        try:
            group.mkdir()
            request.addfinalizer(group.rmdir)
            with open(group / file_name, "r+") as file:  # the kernel makes the file, if at all
                file.write(str(300 * MiB))
            break
        except OSError as error:
            reason = error
    else:
        pytest.skip(f"this user can make no control group with a memory limit: {reason}")
    enter = f'echo $$ > {group}/cgroup.procs && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["sh", "-c", enter, REAL],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    refused, *nodes, held, filled = done.stdout.splitlines()
    for name, line in zip(["model_bytes", "held_bytes", "queue_bytes"], nodes, strict=True):
        assert re.match(rf"{name}=\d+ needs ", line) and f"300.0 MiB ({group / file_name})" in line
    assert "needs 671.4 MiB of memory" in refused and f"300.0 MiB ({group / file_name})" in refused
    assert (int(held), filled) == (150 * MiB, "filled")
