"""Saved buffers with rewritten numbers and correct checksums: DataError, or a buffer that goes on working.

The bytes are decisions (see `choices`): the file, and its numbers to replace. If the columns and parameters stay as
they were, and the file is taken, each sample is a recorded one.
"""

import functools
import io
import json
import random
import zipfile
from typing import Any

import numpy as np

import memoire
from fuzz.choices import FLOATS, INTEGERS, Choices
from fuzz.engine import mutate_json
from memoire.errors import DataError, MemoireError, ParameterError, SchemaError
from memoire.replay.memory_state import ABOUT, ARRAYS, STATE
from memory_checks import check_memory

REACHED = {"taken", "DataError"}
SMALL = tuple(range(-3, 20))
_PLAIN = {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32}
_RAGGED = {"obs": memoire.Column(np.float32, (None,), "state"), "action": np.int64, "reward": np.float32}


def _step(writer: Any, step: int, members: int, is_ragged: bool) -> None:
    """Write one step that has the number `step` in all columns."""
    at, ends = step % 5, step % 5 == 4
    rows = [np.full(2 if not is_ragged else 1 + at % 3, step, np.float32) for _ in range(members)]
    after = [np.full(2 if not is_ragged else 1 + (at + 1) % 3, step + 1, np.float32) for _ in range(members)]
    if members == 1:
        writer.step(rows[0], step, float(step), ends and step % 2 == 0, ends and step % 2 == 1, after[0])
        return
    flags, values = np.full(members, ends), np.full(members, step)
    obs, last = (rows, after) if is_ragged else (np.stack(rows), np.stack(after))
    writer.step(obs, values, values.astype(float), flags & (step % 2 == 0), flags & (step % 2 == 1), last)
    if ends:
        writer.reset()


def _parts_of_buffer(schema: Any, members: int, **options: Any) -> dict[str, bytes]:
    buffer = memoire.Buffer(schema, 32, seed=1, **options)
    layout = {} if members == 1 else {"num_envs": members, "autoreset": "disabled"}
    writers = [buffer.writer(check=False, **layout) for _ in range(2)]
    for step in range(23):
        _step(writers[0], step, members, schema is _RAGGED)
        if step % 2:
            _step(writers[1], step // 2, members, schema is _RAGGED)
    buffer.sample(4).update_priorities(np.arange(4) if "sequence_length" not in options else np.ones((4, 4)))
    with zipfile.ZipFile(io.BytesIO(buffer.__reduce_ex__(4)[1][1])) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@functools.cache
def _templates() -> list[dict[str, bytes]]:
    return [
        _parts_of_buffer(_PLAIN, 1),
        _parts_of_buffer(_PLAIN, 3, multi_step=2, sampler=memoire.RankBased(), max_times_sampled=50),
        _parts_of_buffer(_RAGGED, 1, ragged_limit=3000, samples_per_insert_tolerance=1e6),
        _parts_of_buffer(_PLAIN, 2, sequence_length=4, sampler=memoire.Prioritized(0.5, beta=memoire.Linear(0, 1, 9))),
    ]


def seeds() -> list[bytes]:
    """Return rows of decisions; no decision leaves the file as it was."""
    rng = random.Random(5)
    return [b"", *(bytes([file]) for file in range(4)), *(rng.randbytes(rng.choice((8, 20, 60))) for _ in range(40))]


def _text(part: bytes) -> bytes:
    """Return the JSON text of a file's description of itself."""
    return np.load(io.BytesIO(part)).tobytes()


def _array(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(2, 0))
    return file.getvalue()


def _edit_array(part: bytes, dtype: Any, choices: Choices) -> bytes:
    array = np.load(io.BytesIO(part)).copy()
    if dtype is not None and array.nbytes % dtype.itemsize:
        return part
    typed = (array.view(dtype) if dtype is not None else array).reshape(-1)
    if choices.below(24) == 23:
        typed = np.concatenate([typed, typed[:1]]) if choices.below(2) else typed[1:]
        return _array(typed.view(np.uint8) if dtype is not None else typed)
    for _ in range(1 + choices.below(3)):
        if not len(typed):
            break
        row = choices.below(len(typed))
        field = typed[choices.pick(typed.dtype.names)] if typed.dtype.names else typed
        with np.errstate(all="ignore"):
            if field.dtype.kind == "f":
                field[row] = choices.pick((*FLOATS, 0.5, 2.0))
            else:
                number = choices.pick((*SMALL, *SMALL, *INTEGERS, -(2**31), -(2**63)))
                if choices.below(3) == 0:
                    number = int(field[row]) + choices.pick((-1, 1, 32, -32, 64))
                info = np.iinfo(field.dtype)
                field[row] = min(max(number, info.min), info.max)
    return _array(array)


def _crafted(choices: Choices) -> tuple[bytes, set[str], int]:
    """Return a file, the names of its changed parts, and the number of its template."""
    which = choices.below(4)
    parts, edited = dict(_templates()[which]), set[str]()
    while choices:
        names = sorted(name for name in parts if name.startswith(STATE)) if choices.below(3) else sorted(parts)
        name = choices.pick(names) if choices.below(3) else f"{ABOUT}.npy"
        if name == f"{ABOUT}.npy":
            text = mutate_json(_text(parts[name]), random.Random(choices.take(8)))
            parts[name] = _array(np.frombuffer(text, np.uint8))
        else:
            dtype = ARRAYS.get(name.removeprefix(STATE).removesuffix(".npy"))
            if name.startswith(STATE) and dtype is None:
                dtype = np.dtype("<i8")
            parts[name] = _edit_array(parts[name], dtype, choices)
        edited.add(name.removesuffix(".npy"))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue(), edited, which


def one(data: bytes) -> str:
    """Load a buffer, and go on with it as a learner and its actors do."""
    content, edited, which = _crafted(Choices(data))
    try:
        buffer = memoire.Buffer.load(io.BytesIO(content))
    except DataError:
        return "DataError"
    except (ParameterError, SchemaError) as error:
        return type(error).__name__
    is_as_recorded = all(name == ABOUT or name.startswith(STATE) for name in edited)
    _go_on(buffer, which, is_as_recorded and buffer.parameters.to_wire() == _parameters(which))
    return "taken"


def _parameters(which: int) -> Any:
    return json.loads(_text(_templates()[which][f"{ABOUT}.npy"]))["parameters"]


def _go_on(buffer: memoire.Buffer, which: int, is_as_recorded: bool) -> None:
    members = (1, 3, 1, 2)[which]
    check_memory(buffer.memory)
    layout = {} if members == 1 else {"num_envs": members, "autoreset": "disabled"}
    for number in range(3):
        _draw(buffer, is_as_recorded)
        try:
            writer = buffer.writer(resume=number < 2, check=False, **layout)
        except ParameterError:  # too many lanes, or other saved writers
            continue
        for step in range(100, 140):
            try:
                _step(writer, step, members, which == 2)
            except MemoireError:
                break
        check_memory(buffer.memory)
    _draw(buffer, is_as_recorded)
    check_memory(memoire.Buffer.load(io.BytesIO(buffer.__reduce_ex__(4)[1][1])).memory)


def _draw(buffer: memoire.Buffer, is_as_recorded: bool) -> None:
    try:
        batch = buffer.sample(8)
        buffer.sample_episodes(1)
    except MemoireError:
        return
    assert np.isfinite(batch.importance).all() and (batch.importance > 0).all()
    if is_as_recorded and batch.obs.ndim == 2:
        assert (batch.obs[:, 0] == batch.action).all()
        known = batch.discount.reshape(len(batch.ids), -1)[:, 0] > 0
        assert (batch.next_obs[known, 0] == batch.action[known] + batch.steps[known]).all()
    batch.update_priorities(np.ones(np.shape(batch.ids) if "mask" not in batch else batch.mask.shape))
