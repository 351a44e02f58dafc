"""Requests at their largest, kind by kind, of peers that try how much memory a server takes for them.

A kind is a generator for one client: it yields (table, body, payload), and is sent the body of the reply. It goes on
until whoever sends ends it; a refusal is a reply like any other.
"""

import itertools

import numpy as np

from memoire.replay.row_schema import RowSchema
from memoire.wire import keyed, messages

ANSWERS = RowSchema({"tokens": (np.int32, (None,)), "reward": np.float32})
ROWS = RowSchema({"points": (np.float32, (None,)), "x": np.float32})
ASTRAL = chr(0x1F600)
"""A letter with which a text takes four bytes for each of its characters in memory, and one on the wire."""
TAIL = 512 << 10


def stage_and_name_it_often(client, size):
    """A piece, and rows that each name all of it once more: 3.5 kB that stand for gigabytes."""
    for upload in itertools.count(1):
        yield "", messages.ChangeRows(call="stage", upload=upload, offset=0), bytes(size)
        rows = [
            keyed.PutRow(f"{client}-{upload}-{row}", {}, {}, [keyed.StagedValue("x", 0, size)]) for row in range(200)
        ]
        yield "", messages.ChangeRows(call="put", partition="p", upload=upload), keyed.pack(rows)


def upload_and_leave(client, size):
    """Uploads that no row names."""
    for upload in itertools.count(1):
        for piece in range(16):
            yield "", messages.ChangeRows(call="stage", upload=upload, offset=piece * size), bytes(size)


def names_of_fields(client, size):
    """Rows whose fields have long names and nothing else."""
    for number in itertools.count():
        fields = {f"{ASTRAL}{number}-{field}".ljust(256, "f"): b"" for field in range(min(1000, size // 1000))}
        count = max(1, size // 1600 // len(fields))
        rows = [keyed.PutRow(f"{client}-{number}-{row}", {}, fields, []) for row in range(count)]
        yield "", messages.ChangeRows(call="put", partition="p"), keyed.pack(rows)


def rows_without_anything(client, size):
    """Rows that have a key and nothing else."""
    for number in itertools.count():
        rows = [keyed.PutRow(f"{client}{number}{row}", {}, {}, []) for row in range(size // 96)]
        yield "", messages.ChangeRows(call="put", partition="p"), keyed.pack(rows)


def keys_of_rows(client, size):
    """Rows with the longest keys."""
    for number in itertools.count():
        keys = [f"{ASTRAL}{client}-{number}-{row}".ljust(1024, "k") for row in range(max(1, size // 5000))]
        yield (
            "",
            messages.ChangeRows(call="put", partition="p"),
            keyed.pack([keyed.PutRow(key, {}, {}, []) for key in keys]),
        )


def partitions(client, size):
    """A new partition with each message."""
    for number in itertools.count():
        yield "", messages.ChangeRows(call="put", partition=f"{ASTRAL}{client}-{number}".ljust(256, "p")), None


def tags_of_one_row(client, size):
    """One row with large tags, which is written and asked for again and again in one message."""
    tags = {"t": bytes(size // 4)}
    yield "", messages.ChangeRows(call="put", partition="p"), keyed.pack([keyed.PutRow("k", tags, {}, [])])
    again = keyed.pack([keyed.PutRow("k", {}, {}, [])] * (size // 24))
    keys = keyed.pack(["k"] * (size // 24))
    while True:
        yield "", messages.ChangeRows(call="put", partition="p"), again
        for call in ("facts", "values"):
            yield "", messages.FindRows(call=call, partition="p"), keys


def given_prompts(client, size, payload=0):
    """Prompts with the longest tags. The key of a trainer."""
    count = min(size // max(1, payload), 1 + size // 200_000)
    for number in itertools.count():
        new = [messages.NewPrompt(number * count + index, payload) for index in range(count)]
        tags = {f"{ASTRAL}{tag}".ljust(256, "t"): ASTRAL.ljust(256, "v") for tag in range(32)}
        body = messages.Groups(call="add", dataset=f"{client}", new=new, tags=tags)
        yield "prompts", body, bytes(payload * count) or None


def payloads_of_prompts(client, size):
    """Prompts of 64 KiB. The key of a trainer."""
    return given_prompts(client, size, size // 16)


def finished_epochs(client, size):
    """Epochs that are finished, of data sets that nobody has. The key of a trainer."""
    for number in itertools.count():
        body = messages.Groups(call="finish", dataset=f"{ASTRAL}{client}-{number}".ljust(256, "d"))
        yield "prompts", body, None


def pieces_of_answers(client, size):
    """Pieces of answers that do not end, for all prompts that a worker gets."""
    elements = size // 4 - 1000
    new = [messages.NewPrompt(index, 0) for index in range(64)]
    yield "prompts", messages.Groups(call="add", dataset=f"{client}", new=new), None
    told = yield "prompts", messages.Answers(call="lease", count=8), None
    leases = getattr(told, "leases", [])
    pieces = [0] * len(leases)
    while True:
        for place, lease in enumerate(leases):
            piece = messages.AnswerPiece(
                lease.dataset, lease.epoch, lease.index, lease.lease, 0, pieces[place], False, 1, 1, [elements],
                4 * elements, "", False,
            )  # fmt: skip
            told = yield "prompts", messages.Answers(call="answer", pieces=[piece]), bytes(4 * elements)
            pieces[place] += isinstance(told, messages.Prompted)
        if not leases:
            yield "prompts", messages.Prompts(call="counts"), None


def columns_asked_often(client, size):
    """One answer, asked for many times in one message."""
    elements = size // 4 - 1000
    yield "prompts", messages.Groups(call="add", dataset=f"{client}", new=[messages.NewPrompt(0, 0)]), None
    told = yield "prompts", messages.Answers(call="lease", count=1), None
    for lease in getattr(told, "leases", []):
        piece = messages.AnswerPiece(
            lease.dataset, lease.epoch, lease.index, lease.lease, 0, 0, True, 1, 3, [elements], 4 * elements + 4, "",
            False,
        )  # fmt: skip
        yield "prompts", messages.Answers(call="answer", pieces=[piece]), bytes(4 * elements + 4)
    keys = [messages.PromptKey(f"{client}", 0, 0)] * (size // 200)
    while True:
        for call in ("fetch", "payloads"):
            yield "prompts", messages.Prompts(call=call, keys=keys, columns=3), None


KINDS = {
    kind.__name__: kind
    for kind in (
        stage_and_name_it_often, upload_and_leave, names_of_fields, rows_without_anything, keys_of_rows, partitions,
        tags_of_one_row, given_prompts, payloads_of_prompts, finished_epochs, pieces_of_answers, columns_asked_often,
    )
}  # fmt: skip
