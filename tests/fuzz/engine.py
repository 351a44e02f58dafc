"""Random damage to the inputs of a target; everything follows from a seed, so that each finding can be repeated.

python -m fuzz.engine wire_message --rounds 100000 --seed 7       from the folder tests, or with it in PYTHONPATH
python -m fuzz.engine wire_message --input FILE                   one input again
"""

import argparse
import base64
import gc
import importlib
import json
import os
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOGETHER = {
    "texts": ("key_file", "settings_file", "schema_text", "table_file", "log_line", "http_request"),
    "messages": ("wire_message", "container", "model_body", "model_transfer"),
}
"""Modules that have several targets; every other module is a target itself."""
_ALONE = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"engine", "choices", *TOGETHER}
TARGETS = tuple(sorted(_ALONE.union(*TOGETHER.values())))
MAX_BYTES = 1 << 16
"""Bytes of the longest input that mutation makes."""

_INTEGERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_WORDS = (
    *(struct.pack("<Q", number)[:width] for number in _INTEGERS for width in (1, 2, 4, 8) if number >> 8 * width == 0),
    *(struct.pack(form, number) for number in _FLOATS for form in ("<d", ">d")),
    *(struct.pack("<f", number) for number in _FLOATS if number != 1e308),
)


_JSON: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**400, 0.5, 1e308, 5e-324, float("nan"), float("inf"), "", "a",
    "obs", "\ud800", "\u0000", "state", "<f4", [], {}, [None], [0], [[]], ["obs"], [0.5, 0.5], {"": None},
)  # fmt: skip


class Finding(AssertionError):
    """Input for which a target failed, and a call that tries the input again."""


def _flip(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.randrange(256)


def _overwrite(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    word = rng.choice(words)
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        at -= at % len(word)
    data[at : at + len(word)] = word


def _insert(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(words)


def _cut(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 4, 8, 64, len(data)))]


def _repeat(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    at, size = rng.randrange(len(data)), rng.choice((1, 4, 8, 32, 100))
    data[at:at] = data[at : at + size] * rng.choice((1, 1, 2, 30))


def _splice(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    other = rng.choice(pool)
    begin = rng.randrange(len(other) + 1)
    at = rng.randrange(len(data))
    data[at : at + rng.randrange(64)] = other[begin : begin + rng.choice((4, 16, 64, 1024))]


def _swap(data: bytearray, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    size = rng.choice((1, 4, 8, 32))
    one, other = rng.randrange(len(data)), rng.randrange(len(data))
    if abs(one - other) >= size and max(one, other) + size <= len(data):
        data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


_IN_PLACE = (_flip, _flip, _set, _set, _overwrite, _overwrite, _overwrite, _swap)
_WAYS = (*_IN_PLACE, _insert, _cut, _repeat, _splice, _splice)


def mutate(
    data: bytes, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes] = _WORDS, in_place: float = 0.2
) -> bytes:
    """Return an input that differs from `data` in one to eight places; never longer than `MAX_BYTES`.

    Args:
        pool: Further inputs, of which pieces are inserted.
        words: Bytes that are inserted, or written over others.
        in_place: Share of mutations that keep the length.
    """
    mutated = bytearray(data)
    ways = _IN_PLACE if rng.random() < in_place else _WAYS
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        if not mutated:
            mutated += rng.randbytes(rng.randrange(1, 64))
        rng.choice(ways)(mutated, rng, pool, words)
    return bytes((mutated[: len(data)] if ways is _IN_PLACE and data else mutated)[:MAX_BYTES])


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return JSON in which one value or key differs: still JSON, unlike most results of `mutate`."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [document]
    while waiting:
        node = waiting.pop()
        keys: Any = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    if not places:
        return data
    for _ in range(rng.choice((1, 1, 2))):
        within, key = rng.choice(places)
        is_there = key in within if isinstance(within, dict) else key < len(within)
        value = rng.choice((*_JSON, rng.choice(places)[0]))
        if is_there and type(within[key]) in (int, float) and rng.random() < 0.5:
            value = within[key] + rng.choice((-1, 1, 2, 32, -32, 2**32))
        if isinstance(within, dict) and rng.random() < 0.2:
            within[rng.choice(("", "\x00", "a.b", "obs", "é" * 300))] = value
        elif is_there and rng.random() < 0.1:
            del within[key]
        elif is_there:
            within[key] = value
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):  # the document contains itself
        return data


@dataclass
class Target:
    """Target in a module that has several; a module that is a target has the same names."""

    one: Callable[[bytes], str]
    seeds: Callable[[], list[bytes]]
    REACHED: set[str]
    WORDS: tuple[bytes, ...] = ()
    IS_JSON: bool = False
    IN_PLACE: float = 0.2


def target(*facts: Any, **named: Any) -> Callable[[Callable[[bytes], str]], Target]:
    """Return a decorator that makes a function a target with these facts."""
    return lambda one: Target(one, *facts, **named)


def load(name: str) -> Any:
    """Return the target of this name: a module, or an attribute of a module."""
    for module, names in TOGETHER.items():
        if name in names:
            return getattr(importlib.import_module(f"fuzz.{module}"), name)
    return importlib.import_module(f"fuzz.{name}")


def attempt(name: str, one: Callable[[bytes], str], data: bytes) -> str:
    """Try an input and return the verdict; raise Finding if the target fails."""
    try:
        return one(data)
    except Exception as error:
        text = base64.b64encode(zlib.compress(data)).decode()
        raise Finding(
            f"{name}: {error!r} from {len(data)} bytes; again: fuzz.engine.again({name!r}, {text!r})"
        ) from error


def again(name: str, text: str) -> str:
    """Try the input of a finding once more; errors of the target are raised."""
    verdict: str = load(name).one(zlib.decompress(base64.b64decode(text)))
    return verdict


def inputs(target: Any, name: str, rounds: int, seed: int | str) -> Iterator[bytes]:
    """Yield the seeds of a target, then `rounds` mutations of these seeds."""
    pool = target.seeds()
    yield from pool
    words = (*_WORDS, *getattr(target, "WORDS", ()) * 3)
    rng = random.Random(f"{name} {seed}")
    is_json, in_place = getattr(target, "IS_JSON", False), getattr(target, "IN_PLACE", 0.2)
    for _ in range(rounds):
        if is_json and rng.random() < 0.7:
            yield mutate_json(rng.choice(pool), rng)
        else:
            yield mutate(rng.choice(pool), rng, pool, words, in_place)


def hunt(name: str, rounds: int, seed: int | str = 0) -> Counter[str]:
    """Try so many inputs and return the count of each verdict; raise Finding at the first failure."""
    target = load(name)
    return Counter(attempt(name, target.one, data) for data in inputs(target, name, rounds, seed))


def _measured(name: str, rounds: int, seed: str) -> dict[str, Any]:
    """Hunt, and measure seconds, and the growth of memory in bytes after a tenth of the inputs."""
    target, began = load(name), time.monotonic()
    verdicts: Counter[str] = Counter()
    warm = 0
    for count, data in enumerate(inputs(target, name, rounds, seed), 1):
        verdicts[attempt(name, target.one, data)] += 1
        if count == max(1, rounds // 10):
            warm = _resident()
    grown = _resident() - warm
    return {"verdicts": verdicts, "inputs": verdicts.total(), "seconds": time.monotonic() - began, "grown": grown}


def _resident() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--json", action="store_true", help="say what came of it, and what it took, as JSON")
    parser.add_argument("--input", type=Path, help="try only the bytes of this file")
    args = parser.parse_args()
    if args.input:
        print(attempt(args.target, load(args.target).one, args.input.read_bytes()))
        return 0
    if args.json:
        print(json.dumps(_measured(args.target, args.rounds, args.seed)))
        return 0
    for verdict, count in hunt(args.target, args.rounds, args.seed).most_common():
        print(f"{count:9} {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
