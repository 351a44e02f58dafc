"""How much memory do values of random lengths take beyond their own bytes?

A memory of one ragged column, in a process of its own for each pattern, is written over several times: one lane or eight,
of which the first keeps an episode open from the begin to the end; lengths that stay alike, grow, shrink, or are now and
then large. "Values" are the bytes of what is stored at the end, "room" what is held for it, "resident" by how much the
process has grown; what was given back, the C library may keep for later. Every value is compared with what was put in.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from _kit import end, memory, say, table

MIB = 1 << 20
ENTRIES, ADDED = 40_000, 240_000
MOST = 1.75
"""Times the bytes of the values that the room may be, with 4 MiB on top."""


def lengths(pattern, rng, step):
    """Bytes of the next value."""
    if pattern == "rarely large":
        return 200_000 if rng.random() < 0.001 else int(rng.integers(0, 600))
    middle = {"alike": 600, "growing": 60 + step // 150, "shrinking": 1660 - step // 150}[pattern.split(",")[0]]
    return int(rng.integers(0, 2 * middle))


def walk(pattern):
    import numpy as np

    from memoire import Column, Memory, Schema

    rng = np.random.default_rng(0)
    schema = Schema({"obs": Column(np.uint8, (None,), "state"), "size": np.int32, "fill": np.uint8})
    made = Memory(schema, ENTRIES, seed=0)
    lanes = 8 if "lanes" in pattern else 1
    for lane in range(lanes):
        made.open(lane)
    before, worst = memory(), 0.0
    for step in range(ADDED):
        size, fill = lengths(pattern, rng, step), step % 251
        # The first of several lanes gets an entry now and then, and its episode never ends.
        lane = step % lanes if lanes == 1 or step % 16 == 0 else 1 + step % 7
        made.add(lane, (np.full(size, fill, np.uint8), np.int32(size), np.uint8(fill)))
        if made.open_length(lane) > 300 and (lanes == 1 or lane > 0):
            made.close(lane, terminated=True)
            made.open(lane)
        if step > ADDED // 4 and step % 500 == 0:
            worst = max(worst, (made.ragged_room - 4 * MIB) / max(1, made.ragged_bytes))
    made.check_invariants()
    rows = np.flatnonzero(made.contents()["meta"]["episode"] >= 0)
    sizes, fills = np.empty(len(rows), np.int32), np.empty(len(rows), np.uint8)
    made.copy_rows("size", rows, sizes)
    made.copy_rows("fill", rows, fills)
    values = made.ragged("obs", rows)
    right = (values.lengths == sizes).all() and (values.values == np.repeat(fills, sizes)).all()
    total = values.nbytes
    del values
    facts = {"values": total / MIB, "room": made.ragged_room / MIB, "resident": (memory() - before) / MIB}
    return {**facts, "worst": worst, "entries": len(rows), "right": bool(right)}


PATTERNS = [
    *(f"{kind}, {lanes}" for lanes in ("one lane", "8 lanes") for kind in ("alike", "growing", "shrinking")),
    "rarely large",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--do", help="in a child: the pattern")
    given = parser.parse_args()
    if given.do:
        print(json.dumps(walk(given.do)))
        return 0
    rows, violations = [], []
    for pattern in PATTERNS:
        say(pattern)
        child = [sys.executable, str(Path(__file__).resolve()), "--do", pattern]
        told = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout)
        numbers = [f"{told[name]:.0f} MiB" for name in ("values", "room", "resident")]
        rows.append([pattern, f"{told['entries']:,}", *numbers, f"{told['worst']:.2f}"])
        if not told["right"]:
            violations.append(f"{pattern}: a value is not what was stored")
        if told["worst"] > MOST:
            violations.append(f"{pattern}: the room was {told['worst']:.2f} times the values")
    print(table(["lengths", "entries", "values", "room", "resident", "greatest room / values"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
