"""Largest requests of each kind, from peers that try how much memory a server takes for them.

A kind is a generator for one client. The generator yields (table, body, payload), and another client's id to speak for
that client. The generator receives the body of the reply, or None for a push, until the sender ends it; a refusal is a
reply like any other.
"""

import functools
import itertools

import numpy as np

from memoire.keyed import messages as keyed
from memoire.net import sockets
from memoire.prompts import messages as prompt_messages
from memoire.replay.batch import ID
from memoire.replay.memory import Memory
from memoire.replay.schema import RowSchema, Schema
from memoire.tables.table import Table
from memoire.wire import containers, messages
from memoire.wire._bytes import checksum
from memoire.wire.frames import encode, table_number
from memoire.wire.layout import usual_bytes

ANSWERS = RowSchema({"tokens": (np.int32, (None,)), "reward": np.float32})
FRAMES = Schema({"state": (np.uint8, (1024,)), "reward": np.float32})
SMALL = Schema({"state": np.uint8, "reward": np.float32})
TABLES = {
    "prompts": Table(ANSWERS, storage="prompts", group=8),
    "caches": Table(FRAMES, cache_size=8),
    "small caches": Table(SMALL, cache_size=8),
    "few frames": Table(FRAMES, cache_size=8),
    "episodes": Table(FRAMES, storage="episodes"),
    "rollouts": Table(FRAMES, storage="rollouts", on_full="drop_oldest"),
    "small rollouts": Table(SMALL, storage="rollouts", on_full="drop_oldest"),
    "rows": Table(storage="keyed"),
}
ASTRAL = chr(0x1F600)
"""Letter with which a text takes four bytes a character in memory, and one for plain characters on the wire."""
TAIL = 512 << 10


def _put(rows, upload=0):
    return "rows", keyed.ChangeRows(call="put", partition="p", upload=upload), keyed.pack(rows)


def stage_and_name_it_often(client, size):
    """Stage a piece, and put rows that each name all of it once more: 3.5 kB that stand for gigabytes."""
    staged = [keyed.StagedValue("x", 0, size)]
    for upload in itertools.count(1):
        yield "rows", keyed.ChangeRows(call="stage", upload=upload, offset=0), bytes(size)
        yield _put([keyed.PutRow(f"{client}-{upload}-{row}", {}, {}, staged) for row in range(200)], upload)


def upload_and_leave(client, size):
    """Stage values that no row names."""
    for upload in itertools.count(1):
        for piece in range(16):
            yield "rows", keyed.ChangeRows(call="stage", upload=upload, offset=piece * size), bytes(size)


def names_of_fields(client, size):
    """Put rows whose fields have long names and nothing else."""
    for number in itertools.count():
        fields = {f"{ASTRAL}{number}-{field}".ljust(256, "f"): b"" for field in range(min(1000, size // 1000))}
        count = max(1, size // 1600 // len(fields))
        yield _put([keyed.PutRow(f"{client}-{number}-{row}", {}, fields, []) for row in range(count)])


def rows_without_anything(client, size):
    for number in itertools.count():
        yield _put([keyed.PutRow(f"{client}{number}{row}", {}, {}, []) for row in range(size // 96)])


def keys_of_rows(client, size):
    for number in itertools.count():
        keys = [f"{ASTRAL}{client}-{number}-{row}".ljust(1024, "k") for row in range(max(1, size // 5000))]
        yield _put([keyed.PutRow(key, {}, {}, []) for key in keys])


def partitions(client, size):
    """Put into a new partition with each message."""
    for number in itertools.count():
        yield "rows", keyed.ChangeRows(call="put", partition=f"{ASTRAL}{client}-{number}".ljust(256, "p")), None


def tags_of_one_row(client, size):
    """Put one row with large tags, then write and request the row many times in one message."""
    yield _put([keyed.PutRow("k", {"t": bytes(size // 4)}, {}, [])])
    again = _put([keyed.PutRow("k", {}, {}, [])] * (size // 24))
    keys = keyed.pack(["k"] * (size // 24))
    while True:
        yield again
        for call in ("facts", "values"):
            yield "rows", keyed.FindRows(call=call, partition="p"), keys


def unread_rows(client, size):
    """Request a large row again and again, as a peer that reads no reply."""
    yield "", messages.Hello(role="reader", takes={"message_bytes": 2 * size}), None
    yield _put([keyed.PutRow("k", {}, {"x": bytes(size - 4000)}, [])])
    while True:
        yield "rows", keyed.FindRows(call="values", partition="p"), keyed.pack(["k"])


def given_prompts(client, size, payload=0):
    """Add prompts with the longest tags. Needs a trainer's key."""
    count = min(size // max(1, payload), 1 + size // 200_000)
    for number in itertools.count():
        new = [prompt_messages.NewPrompt(number * count + index, payload) for index in range(count)]
        tags = {f"{ASTRAL}{tag}".ljust(256, "t"): ASTRAL.ljust(256, "v") for tag in range(32)}
        body = prompt_messages.Groups(call="add", dataset=f"{client}", new=new, tags=tags)
        yield "prompts", body, bytes(payload * count) or None


def payloads_of_prompts(client, size):
    """Add prompts with payloads of a sixteenth of `size`. Needs a trainer's key."""
    return given_prompts(client, size, size // 16)


def finished_epochs(client, size):
    """Finish epochs of data sets that do not exist. Needs a trainer's key."""
    for number in itertools.count():
        body = prompt_messages.Groups(call="finish", dataset=f"{ASTRAL}{client}-{number}".ljust(256, "d"))
        yield "prompts", body, None


def _leased(client, prompts, count):
    new = [prompt_messages.NewPrompt(index, 0) for index in range(prompts)]
    yield "prompts", prompt_messages.Groups(call="add", dataset=f"{client}", new=new), None
    reply = yield "prompts", prompt_messages.Answers(call="lease", count=count), None
    return getattr(reply, "leases", [])


def _answered(lease, number, elements, size, *, is_last, columns):
    place = lease.dataset, lease.epoch, lease.index, lease.lease
    piece = prompt_messages.AnswerPiece(*place, 0, number, is_last, 1, columns, [elements], size, "", False)
    return "prompts", prompt_messages.Answers(call="answer", pieces=[piece]), bytes(size)


def pieces_of_answers(client, size):
    """Answer all prompts that a worker gets with pieces that do not end."""
    elements = size // 4 - 1000
    leases = yield from _leased(client, 64, 8)
    pieces = [0] * len(leases)
    while True:
        for place, lease in enumerate(leases):
            reply = yield _answered(lease, pieces[place], elements, 4 * elements, is_last=False, columns=1)
            pieces[place] += isinstance(reply, prompt_messages.Prompted)
        if not leases:
            yield "prompts", prompt_messages.PromptsRequest(call="counts"), None


def columns_asked_often(client, size):
    """Answer one prompt, then request the answer many times in one message."""
    elements = size // 4 - 1000
    for lease in (yield from _leased(client, 1, 1)):
        yield _answered(lease, 0, elements, 4 * elements + 4, is_last=True, columns=3)
    keys = [prompt_messages.PromptKey(f"{client}", 0, 0)] * (size // 200)
    while True:
        for call in ("fetch", "payloads"):
            yield "prompts", prompt_messages.PromptsRequest(call=call, keys=keys, columns=3), None


def _pushes(body, client, size, samples=0, compression="zlib", table="caches"):
    """Push caches or episodes of zeros, with so many samples or at most `size` bytes when unpacked."""
    entries = samples or size // 2400
    schema = TABLES[table].schema
    frame = np.zeros(schema["state"].shape, np.uint8)
    if body is messages.Cache:
        memory = Memory(schema, entries + 1, seed=0)
        memory.open()
        for _ in range(entries):
            memory.add(0, (frame, np.float32(1.0)))
        memory.close(terminated=True)
        payload = containers.build(memory, entries, now=0.0, compression=compression)
    else:
        ones, models = np.ones(entries, np.float32), np.ones(entries, np.int64)

        def fill(name, target):
            target.fill(0)

        payload = containers.pack_episode(schema, fill, ones, ones, models, now=0.0, compression=compression)
    for number in itertools.count(1):
        yield table, body(number=number, pushed_bytes=number * payload.nbytes), payload


def larger_caches(client, size):
    """Push caches much larger than usual in their table, as large as the server takes them."""
    most = sockets.largest_push(usual_bytes(FRAMES, TABLES["few frames"].parameters), size)
    return _pushes(messages.Cache, client, most, compression="none", table="few frames")


_caches, _episodes = (functools.partial(_pushes, body) for body in (messages.Cache, messages.EpisodePush))
_alone = {"samples": 1, "compression": "none"}
PUSHES = {
    "packed_caches": _caches,  # unpacked caches take thirty times as much
    "plain_caches": functools.partial(_caches, compression="none"),  # caches of the largest size
    "smallest_caches": functools.partial(_caches, table="small caches", **_alone),
    "larger_caches": larger_caches,
    "packed_episodes": functools.partial(_episodes, table="episodes"),  # unpacked episodes take a hundred times as much
    "packed_rollouts": functools.partial(_episodes, table="rollouts"),
    "smallest_rollouts": functools.partial(_episodes, table="small rollouts", **_alone),
}


def _newcomer(client, number):
    return client.to_bytes(8, "little") + number.to_bytes(8, "little")


def reports(client, size):
    """Send UPDATE of a new client each time, with the longest names of scalars and topics."""
    count = min(64, size // 2200)
    for number in itertools.count(1):
        names = [f"{ASTRAL}{number}-{name}".ljust(256, ASTRAL) for name in range(count)]
        body = messages.Update(steps=1, scalars=dict.fromkeys(names, 1.0), models=dict.fromkeys(names, 1))
        yield "caches", body, None, _newcomer(client, number)


def newcomers(client, size):
    """Send HELLO and a first report of a new client each time."""
    for number in itertools.count(1):
        body = messages.Hello(host=ASTRAL.ljust(256, ASTRAL), name="n" * 63)
        yield "caches", body, None, _newcomer(client, number)
        yield "caches", messages.Update(steps=1), None, _newcomer(client, number)


def log_lines(client, size):
    count = max(1, min(size, TAIL) // 70_000)
    length = min(16_000, size // 5)
    for number in itertools.count(1):
        lines = [messages.Line(number * count + line, 1.0, 1, ASTRAL * length) for line in range(count)]
        yield "caches", messages.Update(steps=1, lines=lines), None


def td_errors(client, size):
    """Send TD errors for clients that do not fetch them. Needs a learner's key."""
    owners = 4
    for number in range(owners):
        yield "caches", messages.Update(steps=1), None, _newcomer(client, number)
    count = size // 20
    for number in itertools.count():
        ids = np.empty(count, ID)
        ids["client"] = np.frombuffer(_newcomer(client, number % owners), "<u8")
        ids["number"] = np.arange(number * count, (number + 1) * count)
        yield "caches", messages.Feedback(), containers.pack_feedback(FRAMES, ids, np.ones(count, np.float32))


def models_that_do_not_end(client, size):
    """Publish first parts of models of a hundred topics. Needs a trainer's key."""
    body = bytes(size // 2)
    for number in itertools.count():
        topic = f"{client}-{number % 100}"
        yield "", messages.Publish(topic=topic, size=size, checksum=number + 1, offset=0), body


def models_of_many_topics(client, size):
    """Publish models of as many topics as possible. Needs a trainer's key."""
    body = bytes(size)
    whole = checksum(body)
    for number in itertools.count():
        yield "", messages.Publish(topic=f"{client}-{number}", size=size, checksum=whole), body


KINDS = PUSHES | {
    kind.__name__: kind
    for kind in (
        stage_and_name_it_often, upload_and_leave, names_of_fields, rows_without_anything, keys_of_rows, partitions,
        tags_of_one_row, unread_rows, given_prompts, payloads_of_prompts, finished_epochs, pieces_of_answers,
        columns_asked_often, reports, newcomers, log_lines, td_errors, models_that_do_not_end, models_of_many_topics,
    )
}  # fmt: skip
"""Requests by a server's peers: name -> generator."""
PUSHED = messages.Cache | messages.EpisodePush


def tables_of(kind, size):
    """Return the server's tables for requests of a kind; caches of so many bytes are the usual ones."""
    tables = {request[0] for request in itertools.islice(KINDS[kind](0, size), 1)} - {""}
    all_tables = TABLES | {"caches": Table(FRAMES, cache_size=size // 2400)}
    return {name: all_tables[name] for name in tables or {"prompts"}}


def frames_of(request, client, sequence):
    """Return the frames of a request that a kind yielded for the client of this number."""
    table, body, payload, *other = request
    facts = {"client": other[0] if other else client.to_bytes(16, "little"), "sequence": sequence}
    if isinstance(body, PUSHED):
        facts["fingerprint"] = TABLES[table].schema.fingerprint
    return encode(body, table=table_number(table) if table else 0, payload=payload, **facts)
