"""Instructions of the hot calls, counted by valgrind and compared with the recorded counts.

Counts hardly depend on the load of a machine, so that CI can compare them. `make instructions` fails if a call exceeds
the record in docs/development/records/instructions.json by more than a tolerance; `--write` renews the record.
Instructions of
the C and mathematics libraries are not counted: their code depends on the processor. All other benchmarks measure
times.
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
RECORD = ROOT / "docs" / "development" / "records" / "instructions.json"
RENEW = "python benchmarks/instructions.py --write"
TOLERANCE = 0.05
COMPILED = ("_core", "_bytes", "_container", "_draw")
"""Names of memoire's compiled modules, whose instructions are `engine` in the record."""
LEAVES = 100_000
WARMUP_CALLS = 12  # calls before the counted calls: the interpreter adapts to code that has run eight times
RECEIVED = WARMUP_CALLS + 4  # caches that a pool holds
SKIP_STATUS = 77  # exit status if this machine cannot count instructions

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Row of the table: a name, and the call whose instructions are counted."""

    what: str
    make: Callable[[], Call]
    per_call: int = 1
    """Entries of one call, by which its instructions are divided."""
    calls: int = 4


# The counted calls


@cache
def workload(name: str) -> Workload:
    return w1(20_000) if name == "W1" else w2(2_000)


def writing(name: str, *, at_once: bool) -> Call:
    """Return a call that writes and closes an episode of EPISODE entries, entry by entry or all at once."""
    load = workload(name)
    memory = Memory(load.schema, load.ring, load.parameters, seed=0)
    block = load.episode(np.random.default_rng(0))
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
    """Return the writer of a client that has no thread and no server, with ample credit and no cache due."""
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
    answer = session.parse_welcome(Message(header, body, None), 0.0)
    assert answer is not None
    session.enter_home(answer, 0.0)
    waiting = ClientLock(1.0)
    pusher = Pusher(session, waiting, itertools.count(1), on_full="skip", block_timeout=1.0, clock=lambda: 1.0)
    local = LocalMemory(session, pusher, capacity=10_000, live=True, seed=0)
    return local.writer(None, None, "disabled", HandedModels(session).version_or_acting)


def stepping(environments: int | None, *, is_client: bool = False) -> Call:
    """Return a call of `writer.step` for STEPS steps of one Gymnasium environment, or of `envs` environments."""
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
    """Return a call of `buffer.sample`."""
    load = workload("W1")
    buffer = memoire.Buffer(load.schema, 20_000, seed=0)
    load.fill(buffer.memory, 0)
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
    load = workload(name)
    payload, layout = received(load, RECEIVED)[0], pool_of(load, reuse=False, count=RECEIVED).layout
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


# Counting: the script starts itself under valgrind, which counts between two client requests

REQUESTS = """
#include <valgrind/callgrind.h>
void memoire_begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void memoire_end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def count_here(library: str, only: str) -> None:
    """Run the cases whose names contain `only` under valgrind, and dump the counts of each."""
    requests = ctypes.PyDLL(library)
    for case in cases():
        if only not in case.what:
            continue
        call = case.make()
        for _ in range(WARMUP_CALLS):
            call()
        gc.collect()
        gc.disable()
        requests.memoire_begin()
        for _ in range(case.calls):
            call()
        requests.memoire_end(case.what.encode())
        gc.enable()


def counted(folder: Path, only: str) -> dict[str, Counter[tuple[str, str]]]:
    """Return the instructions of all calls of each case, by (file of the program or library, function)."""
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(REQUESTS, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    options = ("--tool=callgrind", "--instr-atstart=no", "--compress-strings=no", "--compress-pos=no", "--dump-line=no")
    command = ["valgrind", "-q", *options, f"--callgrind-out-file={folder}/out", sys.executable, __file__]
    command += ["--within", str(library), "--only", only]
    # Without a fixed hash seed, the order of sets and dicts of text would change from run to run.
    subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, check=True)
    dumps = [read_dump(path.read_text(encoding="utf-8", errors="replace")) for path in folder.glob("out.*")]
    return {name: counts for name, counts in dumps if name}


def read_dump(text: str) -> tuple[str, Counter[tuple[str, str]]]:
    """Return the name of a dump, and its instructions by (object, function), callees excluded."""
    named = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
    counts: Counter[tuple[str, str]] = Counter()
    where, function, is_callee = "", "", False
    for line in text.splitlines():
        if line.startswith("ob="):
            where = line[3:].rsplit("/", 1)[-1]
        elif line.startswith("fn="):
            function = line[3:]
        elif line.startswith("calls="):
            is_callee = True  # the next line has the cost of the callee, which is counted at the callee
        elif line[:1].isdigit():
            if not is_callee:
                counts[where, function] += int(line.split()[1])
            is_callee = False
    return named[1] if named else "", counts


def summed(case: Case, counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return the instructions of one call or entry: of memoire's compiled modules, and with Python's and NumPy's."""
    by_object: Counter[str] = Counter()
    for (where, _), count in counts.items():
        by_object[where] += count
    fixed = sum(count for where, count in by_object.items() if not re.match(r"(libc|libm|ld-linux.*|ld)[-.]", where))
    times = case.calls * case.per_call
    core = sum(by_object[f"{name}.abi3.so"] for name in COMPILED)
    return {"engine": round(core / times), "with Python": round(fixed / times)}


# Comparing


def machine() -> dict[str, str]:
    """Return the versions on which counts depend: the engine's on the compiler, those with Python on all."""
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "compiler": f"{platform.machine()}, {compiler}",
        "python": f"{platform.python_version()} ({platform.python_compiler()})",
        "numpy": installed("numpy"),
    }


def comparable(record: dict[str, Any], here: dict[str, str]) -> tuple[list[str], str]:
    """Return the kinds of counts of a record that this machine can compare, and the reason if these are not all."""
    others = [name for name in here if record["machine"][name] != here[name]]
    if not others:
        return ["engine", "with Python"], ""
    kinds = [] if "compiler" in others else ["engine"]
    what = ", ".join(f"{name} {record['machine'][name]}, here {here[name]}" for name in others)
    return kinds, f"{'nothing' if not kinds else 'only the engine'} was compared, the record is of {what}"


def too_many(record: dict[str, Any], results: dict[str, dict[str, int]], kinds: list[str]) -> list[str]:
    """Return a line for each count that exceeds the record by more than the tolerance."""
    wrong = []
    for what, counts in results.items():
        for kind in kinds:
            before = record["instructions"].get(what, {}).get(kind)
            if before is None:
                wrong.append(f"{what}: not in the record")
            elif counts[kind] > before * (1 + TOLERANCE) + 2:
                excess = counts[kind] / before - 1
                wrong.append(f"{what}: {counts[kind]} instructions ({kind}), {excess:.1%} more than {before}")
    return wrong


def table(results: dict[str, dict[str, int]], record: dict[str, dict[str, int]] | None = None) -> str:
    """Return a table of the results, with a column of the recorded counts if there is a record."""
    names = ["what", "engine", "with Python", *["recorded"] * (record is not None)]
    rows = [[what, *counts.values()] for what, counts in results.items()]
    if record is not None:
        rows = [[*row, record.get(row[0], {}).get("with Python", "")] for row in rows]
    return "\n".join([head(*names), *(cells(*row) for row in rows)])


def write(here: dict[str, str], results: dict[str, dict[str, int]]) -> None:
    """Renew the record and the page that shows it."""
    RECORD.write_text(json.dumps({"machine": here, "instructions": results}, indent=1) + "\n", encoding="utf-8")
    RECORD.with_suffix(".md").write_text(PAGE.format(table=table(results), **here), encoding="utf-8")
    print(f"\nwritten to {RECORD.relative_to(ROOT)} and the page beside it")


PAGE = """# benchmarks/instructions.py

How many instructions do the hot calls take, counted by valgrind's callgrind, for one call or entry?

{compiler}; Python {python}; NumPy {numpy}

*engine* counts memoire's compiled modules, *with Python* adds the interpreter and NumPy. Neither counts the C and
mathematics libraries, whose code depends on the processor. `make instructions` compares, CI runs it.

{table}
"""


def why_not() -> str:
    """Return the reason why instructions cannot be counted on this machine, or ""."""
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
    parser.add_argument("--only", default="", metavar="WORD", help="only the cases with this word in their name")
    parser.add_argument("--profile", action="store_true", help="also show the functions with the most instructions")
    parser.add_argument("--possible", action="store_true", help="only report whether instructions can be counted here")
    parser.add_argument("--within", metavar="LIBRARY", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.within:
        count_here(chosen.within, chosen.only)
        return 0
    if reason := why_not():
        print(f"instructions are not counted here: {reason}")
        return SKIP_STATUS
    if chosen.possible:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        dumps = counted(Path(folder), chosen.only)
    results = {case.what: summed(case, dumps[case.what]) for case in cases() if case.what in dumps}
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    print(table(results, record["instructions"]))
    if chosen.profile:
        for what, counts in dumps.items():
            print(f"\n{what}")
            for (where, function), count in counts.most_common(25):
                print(f"{count / sum(counts.values()):7.1%}  {count:10}  {function}  {where}")
    here = machine()
    if chosen.write:
        kept = record["instructions"] if chosen.only and record["machine"] == here else {}
        write(here, {case.what: (kept | results)[case.what] for case in cases() if case.what in kept | results})
        return 0
    kinds, left_out = comparable(record, here)
    if wrong := too_many(record, results, kinds):
        print("\nmore than was recorded:\n" + "\n".join(wrong))
        print(f"If the change is worth its cost, give the reason in the commit, and renew the record: {RENEW}")
    print(f"\n{left_out or 'everything was compared with the record'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
