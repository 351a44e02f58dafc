"""How many instructions do the hot calls take, counted by valgrind, and are they more than were recorded?

Counts hardly depend on how busy a machine is, so that CI can compare them: `make instructions` fails where a call takes
more than the record in docs/benchmarks/instructions.json by more than a tolerance; `--write` renews the record. What
the C and mathematics libraries do is not counted: they choose by processor. Times are for the other benchmarks.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from measure import cells, head, installed
from peers.tasks import BATCH, EPISODE
from workloads import Workload, pool_of, received, w1, w2

import memoire
from memoire import _core
from memoire.client.pushes import LocalMemory, Pusher
from memoire.client.session import Session
from memoire.client.waiting import ClientLock, HandedModels
from memoire.limits import Limits
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.wire import _bytes, containers, messages
from memoire.wire.frames import Message, MessageHeader

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "benchmarks" / "instructions.json"
RENEW = "python benchmarks/instructions.py --write"
TOLERANCE = 0.05
COMPILED = ("_core", "_bytes", "_container", "_draw")
"""Names of our compiled modules, which are `engine` in the record."""
LEAVES = 100_000
WARM = 12  # calls before those that are counted: the interpreter adapts to what it has run eight times
RECEIVED = WARM + 4  # caches that are held
CANNOT = 77  # exit status where nothing could be counted here

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One row: what is counted."""

    what: str
    make: Callable[[], Call]
    per_call: int = 1
    """What is counted is divided by this: entries of one call."""
    calls: int = 4


# What is counted


@cache
def workload(name: str) -> Workload:
    return w1(20_000) if name == "W1" else w2(2_000)


def writing(name: str, *, at_once: bool) -> Call:
    """EPISODE entries, one call for each or one for all, and the end of their episode."""
    given = workload(name)
    memory = Memory(given.schema, given.ring, given.parameters, seed=0)
    block = given.episode(np.random.default_rng(0))
    steps = [tuple(column[step] for column in block) for step in range(EPISODE)]

    def writes() -> None:
        memory.open(0)
        if at_once:
            memory.extend(0, block)
        else:
            for values in steps:
                memory.add(0, values)
        memory.close(0)

    return writes


STEPS = 100


def client_writer(schema: memoire.Schema) -> Any:
    """The writer of a client that may go on for long, without its thread and without a home; no cache is due."""
    session = Session(b"1" * 16, "tcp://there", table="", label=1, limits=Limits(), rng=Random(1), now=0.0)
    session.hello("host", 1)
    parameters = Parameters(samples_per_insert=1e-6).to_wire()
    body = messages.Welcome(
        schema=schema.to_json(), run_name="run", home_name="home", epoch=1, since=1, table=1, table_name="table",
        storage="caches", parameters=parameters, granted_steps=1 << 40, credit=1 << 20,
    )  # fmt: skip
    header = MessageHeader(
        type=body.type, table=0, client=session.client, run=1, home=2, sequence=1, fingerprint=5, payload_bytes=0,
        payload_checksum=0,
    )  # fmt: skip
    answer = session.welcomed(Message(header, body, None), 0.0)
    assert answer is not None
    session.enter(answer, 0.0)
    waiting = ClientLock(1.0)
    pusher = Pusher(session, waiting, itertools.count(1), on_full="skip", block_timeout=1.0, clock=lambda: 1.0)
    local = LocalMemory(session, pusher, capacity=10_000, live=True, seed=0)
    return local.writer(None, None, "disabled", HandedModels(session).stamp)


def stepping(environments: int | None, *, is_client: bool = False) -> Call:
    """`writer.step` with what a Gymnasium environment returns, or with what so many at once return."""
    lead = () if environments is None else (environments,)
    schema = memoire.Schema(
        {
            "obs": memoire.Column("float32", (64,), "state"),
            "action": memoire.Column("float32", (8,)),
            "reward": np.float32,
        }
    )
    if is_client:
        writer = client_writer(schema)
    else:
        buffer = memoire.Buffer(schema, 10_000, seed=0)
        writer = buffer.writer(num_envs=environments, autoreset="disabled" if environments is None else "next_step")
    random = np.random.default_rng(0)
    seen = random.standard_normal((STEPS + 1, *lead, 64), dtype="float32")
    actions = random.standard_normal((STEPS, *lead, 8), dtype="float32")
    rewards = random.standard_normal((STEPS, *lead)) if lead else random.standard_normal(STEPS).tolist()
    never = np.zeros(lead, np.bool_) if lead else False
    frames, rest = list(seen), list(zip(actions, rewards, strict=True))
    info: dict[str, Any] = {}

    def steps() -> None:
        obs = frames[0]
        for number, (action, reward) in enumerate(rest, 1):
            following = frames[number]
            writer.step(obs, action, reward, never, never, following, info)
            obs = following
        writer.reset()

    return steps


def sampling() -> Call:
    """`buffer.sample`: the modern door to a draw."""
    given = workload("W1")
    buffer = memoire.Buffer(given.schema, 20_000, seed=0)
    given.fill(buffer.memory, 0)
    return partial(buffer.sample, BATCH)


def updating(name: str) -> Call:
    memory = workload(name).filled()
    errors = np.random.default_rng(3).uniform(0.1, 2.0, BATCH).astype(np.float32)
    return partial(memory.update_priorities, memory.draw(BATCH), errors)


def getting(name: str, *, reuse: bool) -> Call:
    return partial(pool_of(workload(name), reuse=reuse, count=RECEIVED).get, BATCH)


def building(name: str) -> Call:
    return lambda: containers.build(workload(name).filled(), BATCH, now=0.0)


def checking(name: str) -> Call:
    given = workload(name)
    payload, layout = received(given, RECEIVED)[0], pool_of(given, reuse=False, count=RECEIVED).layout
    checksum = _bytes.checksum(payload)
    return lambda: containers.check(payload, layout, checksum=checksum)


def with_tree(*, updates: bool) -> Call:
    tree, random = _core.PriorityTree(LEAVES), np.random.default_rng(4)
    tree.set(np.arange(LEAVES), random.uniform(0.1, 2.0, LEAVES))
    if not updates:
        return partial(tree.draw, random.random(BATCH))
    rows, turns = random.integers(0, LEAVES, BATCH), [random.uniform(0.1, 2.0, BATCH) for _ in range(16)]
    return lambda: tree.set(rows, turns.pop())


def cases() -> Iterator[Case]:
    for name in ("W1", "W2"):
        yield Case(f"add one entry, {name}", partial(writing, name, at_once=False), EPISODE, 2)
        extends = f"extend and close {EPISODE} entries, {name}: one entry"
        yield Case(extends, partial(writing, name, at_once=True), EPISODE, 2)
    yield Case("writer.step, one environment", partial(stepping, None), STEPS, 2)
    yield Case("writer.step, 8 environments", partial(stepping, 8), STEPS, 2)
    yield Case("writer.step of a client, one environment", partial(stepping, None, is_client=True), STEPS, 2)
    for name in ("W1", "W2"):
        yield Case(f"draw + gather {BATCH}, {name}", lambda name=name: partial(workload(name).filled().sample, BATCH))
    yield Case(f"buffer.sample of {BATCH}, W1", sampling)
    for name in ("W1", "W2"):
        yield Case(f"update {BATCH} priorities, {name}", partial(updating, name))
    for name in ("W1", "W2"):
        yield Case(f"build a cache of {BATCH}, {name}", partial(building, name))
        yield Case(f"check a cache of {BATCH}, {name}", partial(checking, name))
        yield Case(f"get_batch of {BATCH} from caches, {name}", partial(getting, name, reuse=False), calls=2)
        yield Case(f"get_batch of {BATCH} with reuse_cache, {name}", partial(getting, name, reuse=True))
    yield Case(f"draw {BATCH} of {LEAVES} leaves", partial(with_tree, updates=False))
    yield Case(f"update {BATCH} of {LEAVES} leaves", partial(with_tree, updates=True))
    data = np.random.default_rng(0).integers(0, 256, 157_000, dtype=np.uint8)
    yield Case("checksum of 157000 bytes", lambda: partial(_bytes.checksum, data))


# Counting: this script starts itself under valgrind, which counts between two requests of ours

REQUESTS = """
#include <valgrind/callgrind.h>
void memoire_begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void memoire_end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def count_here(library: str, only: str) -> None:
    """Under valgrind: run every case, with a dump of its counts for each."""
    requests = ctypes.PyDLL(library)
    for case in cases():
        if only not in case.what:
            continue
        call = case.make()
        for _ in range(WARM):
            call()
        gc.collect()
        gc.disable()
        requests.memoire_begin()
        for _ in range(case.calls):
            call()
        requests.memoire_end(case.what.encode())
        gc.enable()


def counted(folder: Path, only: str) -> dict[str, Counter[tuple[str, str]]]:
    """Instructions of each case by (file of the program or library, function), of all its calls together."""
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(REQUESTS, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    options = ("--tool=callgrind", "--instr-atstart=no", "--compress-strings=no", "--compress-pos=no", "--dump-line=no")
    command = ["valgrind", "-q", *options, f"--callgrind-out-file={folder}/out", sys.executable, __file__]
    command += ["--within", str(library), "--only", only]
    # Without a seed of its own, sets and dicts of text would lie differently each time.
    subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, check=True)
    dumps = [read_dump(path.read_text(encoding="utf-8", errors="replace")) for path in folder.glob("out.*")]
    return {name: counts for name, counts in dumps if name}


def read_dump(text: str) -> tuple[str, Counter[tuple[str, str]]]:
    """The name a dump was given, and its own instructions by (object, function)."""
    named = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
    counts: Counter[tuple[str, str]] = Counter()
    where, function, is_callee = "", "", False
    for line in text.splitlines():
        if line.startswith("ob="):
            where = line[3:].rsplit("/", 1)[-1]
        elif line.startswith("fn="):
            function = line[3:]
        elif line.startswith("calls="):
            is_callee = True  # the next line is what that call took: counted where it was spent
        elif line[:1].isdigit():
            if not is_callee:
                counts[where, function] += int(line.split()[1])
            is_callee = False
    return named[1] if named else "", counts


def summed(case: Case, counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Instructions of one call, or entry: of our compiled modules, and with Python's and NumPy's."""
    by_object: Counter[str] = Counter()
    for (where, _), count in counts.items():
        by_object[where] += count
    fixed = sum(count for where, count in by_object.items() if not re.match(r"(libc|libm|ld-linux.*|ld)[-.]", where))
    times = case.calls * case.per_call
    core = sum(by_object[f"{name}.abi3.so"] for name in COMPILED)
    return {"engine": round(core / times), "with Python": round(fixed / times)}


# Comparing


def machine() -> dict[str, str]:
    """What counts depend on: the first line for the engine's, all of it for those with Python."""
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "compiler": f"{platform.machine()}, {compiler}",
        "python": f"{platform.python_version()} ({platform.python_compiler()})",
        "numpy": installed("numpy"),
    }


def comparable(record: dict[str, Any], here: dict[str, str]) -> tuple[list[str], str]:
    """Which counts of a record can be compared with those of this machine, and why not all."""
    others = [name for name in here if record["machine"][name] != here[name]]
    if not others:
        return ["engine", "with Python"], ""
    kinds = [] if "compiler" in others else ["engine"]
    what = ", ".join(f"{name} {record['machine'][name]}, here {here[name]}" for name in others)
    return kinds, f"{'nothing' if not kinds else 'only the engine'} was compared, the record is of {what}"


def too_many(record: dict[str, Any], found: dict[str, dict[str, int]], kinds: list[str]) -> list[str]:
    """What takes more than was recorded."""
    wrong = []
    for what, counts in found.items():
        for kind in kinds:
            before = record["instructions"].get(what, {}).get(kind)
            if before is None:
                wrong.append(f"{what}: not in the record")
            elif counts[kind] > before * (1 + TOLERANCE) + 2:
                more = counts[kind] / before - 1
                wrong.append(f"{what}: {counts[kind]} instructions ({kind}), {more:.1%} more than {before}")
    return wrong


def table(found: dict[str, dict[str, int]], record: dict[str, dict[str, int]] | None = None) -> str:
    """Beside what is recorded, if that is given."""
    names = ["what", "engine", "with Python", *["recorded"] * (record is not None)]
    rows = [[what, *counts.values()] for what, counts in found.items()]
    if record is not None:
        rows = [[*row, record.get(row[0], {}).get("with Python", "")] for row in rows]
    return "\n".join([head(*names), *(cells(*row) for row in rows)])


def write(here: dict[str, str], found: dict[str, dict[str, int]]) -> None:
    """Renew the record and the page that shows it."""
    RECORD.write_text(json.dumps({"machine": here, "instructions": found}, indent=1) + "\n", encoding="utf-8")
    RECORD.with_suffix(".md").write_text(PAGE.format(table=table(found), **here), encoding="utf-8")
    print(f"\nwritten to {RECORD.relative_to(ROOT)} and the page beside it")


PAGE = """# benchmarks/instructions.py

How many instructions do the hot calls take, counted by valgrind's callgrind, for one call or entry?

{compiler}; Python {python}; NumPy {numpy}

*engine* is what memoire's compiled modules take, *with Python* adds the interpreter and NumPy; the C and mathematics
libraries, which choose their code by processor, are in neither. `make instructions` compares, CI runs it.

{table}
"""


def why_not() -> str:
    """What is missing here, or nothing."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (Debian, Ubuntu: apt-get install valgrind)"
    if shutil.which("cc") is None or not Path("/usr/include/valgrind/callgrind.h").exists():
        return "a C compiler and valgrind's headers are needed: /usr/include/valgrind/callgrind.h"
    if subprocess.run(["valgrind", "-q", "--tool=none", "true"], capture_output=True, check=False).returncode != 0:
        return "valgrind cannot run a program here"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"renew {RECORD.relative_to(ROOT)} and its page")
    parser.add_argument("--only", default="", metavar="WORD", help="only what has this word in its name")
    parser.add_argument("--profile", action="store_true", help="also show the functions in which most were spent")
    parser.add_argument("--possible", action="store_true", help="only say whether they can be counted here")
    parser.add_argument("--within", metavar="LIBRARY", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.within:
        count_here(chosen.within, chosen.only)
        return 0
    if reason := why_not():
        print(f"instructions are not counted here: {reason}")
        return CANNOT
    if chosen.possible:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        dumps = counted(Path(folder), chosen.only)
    found = {case.what: summed(case, dumps[case.what]) for case in cases() if case.what in dumps}
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    print(table(found, record["instructions"]))
    if chosen.profile:
        for what, counts in dumps.items():
            print(f"\n{what}")
            for (where, function), count in counts.most_common(25):
                print(f"{count / sum(counts.values()):7.1%}  {count:10}  {function}  {where}")
    here = machine()
    if chosen.write:
        kept = record["instructions"] if chosen.only and record["machine"] == here else {}
        write(here, {case.what: (kept | found)[case.what] for case in cases() if case.what in kept | found})
        return 0
    kinds, left_out = comparable(record, here)
    if wrong := too_many(record, found, kinds):
        print("\nmore than was recorded:\n" + "\n".join(wrong))
        print(f"Where that is worth it, say why in the commit, and renew the record: {RENEW}")
    print(f"\n{left_out or 'everything was compared with the record'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
