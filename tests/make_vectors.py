"""Golden vectors of docs/development/wire.md, which `python tests/make_vectors.py` writes into tests/vectors.

Each vector holds the frames of one message (<name>.0, <name>.1) or one container (<name>.payload); vectors.json
describes them. Containers are built byte by byte, not by memoire.wire.containers, so that both must agree with the
page.
"""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memoire.keyed import messages as keyed
from memoire.prompts import messages as prompt_messages
from memoire.replay.columns import Column
from memoire.replay.schema import RowSchema, Schema
from memoire.tables.rollouts import fragments
from memoire.wire import messages as wire
from memoire.wire.frames import NO_CLIENT, encode, name_hash, table_number
from memoire.wire.parts import ContainerKind, Part

FOLDER = Path(__file__).with_name("vectors")
SCHEMA = Schema({"obs": (np.uint8, (2,)), "action": np.int32, "reward": np.float32})
POINTS = Column(np.float32, (None, 3))
ROWS = RowSchema({"obs": (np.uint8, (2,)), "points": POINTS})
RAGGED = Schema({"cloud": Column(np.float32, (None, 3), "state"), "points": POINTS, "reward": np.float32})
CLIENT = bytes(range(16))
OTHER = bytes(range(16, 32))
Z = 0xFFFFFFFF
RATE = wire.ServerRate(12.0, True, 70, 35, 0.5, 30.0)
BAND = wire.ClusterRate(12.0, 70, 35, 128, 0.5, 0.5, 30.0)


def block(column: int, part: Part, dtype: str, values: Any) -> tuple[int, int, int, bytes]:
    """Return (column, part, rows, bytes) of a block whose first axis is its rows."""
    array = np.asarray(values, dtype)
    return column, int(part), len(array), array.tobytes()


def own(part: Part, dtype: str, values: Any) -> tuple[int, int, int, bytes]:
    return block(0xFFFF, part, dtype, values)


def container(
    kind: ContainerKind, samples: int, stack: int, steps: int, blocks: Any, sums: Any = (0.0, 0, 0.0)
) -> bytes:
    head = struct.pack("<IHHdQdQIIdQ", samples, stack, steps, *sums, 0, len(blocks), kind, 1700000000.5, 0)
    begin, table, body = 64 + 32 * len(blocks), b"", b""
    end = begin
    for column, part, rows, data in blocks:
        padding = -end % 64
        table += struct.pack("<HBBIQQQ", column, part, 0, rows, end + padding, len(data), len(data))
        body += bytes(padding) + data
        end += padding + len(data)
    return head + table + body


NUMBERS, WEIGHTS = [40, 41, 40], [2.0, 0.5, 2.0]
WINDOWS = [
    own(Part.PREV_INDEX, "<u4", [[Z, 0], [0, 1], [Z, 0]]),
    own(Part.NEXT_INDEX, "<u4", [[1, 2], [2, 3], [1, 2]]),
    own(Part.NUMBER, "<i8", NUMBERS),
    own(Part.WEIGHT, "<f8", WEIGHTS),
    own(Part.REWARD_SUM, "<f4", [1.5, -0.25, 1.5]),
    own(Part.DISCOUNT, "<f4", [0.25, 0.0, 0.25]),
    own(Part.STEPS, "<u4", [2, 1, 2]),
    own(Part.AGE, "<f4", [10.0, 9.5, 10.0]),
    own(Part.MODEL, "<i8", [7, 7, 7]),
]
COLUMNS = [
    block(0, Part.FRAMES, "u1", [[1, 2], [3, 4], [5, 6], [7, 8]]),
    block(1, Part.PREV, "<i4", [-1, 5, -1]),
    block(2, Part.PREV, "<f4", [1.0, -0.25, 1.0]),
]


def containers() -> dict[str, bytes]:
    drawn = [
        own(Part.CHANCE, "<f8", [0.25, 0.0625, 0.25]),
        own(Part.POPULATION, "<f8", [6, 6, 9]),
        own(Part.OWNER, "<u4", [0, 0, 1]),
        block(0xFFFF, Part.OWNERS, "u1", [list(CLIENT), list(OTHER)]),
    ]
    episode = [
        own(Part.AGE, "<f4", [3.0, 2.0, 1.0]),
        own(Part.MODEL, "<i8", [7, 7, 8]),
        own(Part.INIT_WEIGHT, "<f4", [1.0, 1.0, 0.5]),
        block(0, Part.PREV, "u1", [[1, 2], [3, 4], [5, 6]]),
        block(0, Part.FINAL, "u1", [[7, 8]]),
        block(1, Part.PREV, "<i4", [-1, 5, 6]),
        block(2, Part.PREV, "<f4", [1.0, -0.25, 0.5]),
    ]
    feedback = [
        own(Part.NUMBER, "<i8", NUMBERS),
        own(Part.OWNER, "<u4", [0, 0, 1]),
        block(0xFFFF, Part.OWNERS, "u1", [list(CLIENT), list(OTHER)]),
        own(Part.TD_ERROR, "<f4", [0.5, -2.0, 0.0]),
    ]
    # Ragged columns: "points", float32 with a free first axis of rows (3,), of which sample 0 has 2, sample 1 none and
    # sample 2 one; the state "cloud" has 1 and 2 of them in its two unique frames. Sample 1 ends with its episode.
    clouds = [
        (0, Part.FRAMES, 2, np.arange(1, 10, dtype="<f4").tobytes()),
        block(0, Part.FRAMES_LENGTHS, "<u4", [1, 2]),
        block(1, Part.PREV, "<f4", [[1, 0, 0], [2, 0, 0], [3, 0, 0]]),
        block(1, Part.PREV_LENGTHS, "<u4", [2, 0, 1]),
        block(2, Part.PREV, "<f4", [1.0, -0.25, 1.0]),
    ]
    ragged = [
        own(Part.PREV_INDEX, "<u4", [[0], [1], [0]]),
        own(Part.NEXT_INDEX, "<u4", [[1], [Z], [1]]),
        *WINDOWS[2:],
    ]
    # Two sequences of 3 entries; the three entries have 2, 0 and 1 points, the four clouds 1, 2, 0 and 0.
    ragged_sequences = [
        (0, Part.PREV_FRAMES, 4, np.arange(1, 10, dtype="<f4").tobytes()),
        block(0, Part.FRAMES_LENGTHS, "<u4", [1, 2, 0, 0]),
        block(1, Part.ENTRIES, "<f4", [[1, 0, 0], [2, 0, 0], [3, 0, 0]]),
        block(1, Part.ENTRIES_LENGTHS, "<u4", [2, 0, 1]),
        block(2, Part.ENTRIES, "<f4", [1.0, -0.25, 1.0]),
    ]
    ragged_episode = [
        *episode[:3],
        (0, Part.PREV, 3, np.arange(3, dtype="<f4").tobytes()),
        block(0, Part.PREV_LENGTHS, "<u4", [0, 1, 0]),
        (0, Part.FINAL, 1, np.arange(6, dtype="<f4").tobytes()),
        *clouds[2:],
    ]
    # Rows of an observation and a ragged column, for an inference node.
    rows = [block(0, Part.PREV, "u1", [[1, 2], [3, 4], [5, 6]]), *clouds[2:4]]
    # Sequences of 3 entries, stack 1: the second begins one entry later and ends with its episode after 2.
    sequences = [
        own(Part.PREV_INDEX, "<u4", [[0, 1, 2, 3], [1, 2, 3, Z]]),
        own(Part.ENTRY_INDEX, "<u4", [[0, 1, 2], [1, 2, Z]]),
        own(Part.BURN_IN, "<u4", [0, 1]),
        own(Part.NUMBER, "<i8", [40, 41]),
        own(Part.WEIGHT, "<f8", [2.0, 0.5]),
        own(Part.DISCOUNT, "<f4", [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]),
        own(Part.STEPS, "<u4", [3, 2]),
        own(Part.AGE, "<f4", [10.0, 9.5]),
        own(Part.MODEL, "<i8", [7, 7]),
        block(0, Part.PREV_FRAMES, "u1", [[1, 2], [3, 4], [5, 6], [7, 8]]),
        block(1, Part.ENTRIES, "<i4", [-1, 5, 6]),
        block(2, Part.ENTRIES, "<f4", [1.0, -0.25, 0.5]),
    ]
    drawn_sequences = [
        own(Part.CHANCE, "<f8", [0.25, 0.0625]),
        own(Part.POPULATION, "<f8", [6, 6]),
        own(Part.OWNER, "<u4", [0, 0]),
        block(0xFFFF, Part.OWNERS, "u1", [list(CLIENT)]),
    ]
    return {
        "cache": container(ContainerKind.CACHE, 3, 2, 2, WINDOWS + COLUMNS, (8.0, 6, 0.5)),
        "drawn": container(ContainerKind.DRAWN, 3, 2, 2, WINDOWS + drawn + COLUMNS),
        "episode": container(ContainerKind.EPISODE, 3, 1, 1, episode),
        "feedback": container(ContainerKind.FEEDBACK, 3, 1, 1, feedback),
        "rows": container(ContainerKind.ROWS, 3, 1, 1, rows),
        "ragged": container(ContainerKind.CACHE, 3, 1, 2, ragged + clouds, (8.0, 6, 0.5)),
        "ragged_drawn": container(ContainerKind.DRAWN, 3, 1, 2, ragged + drawn + clouds),
        "ragged_episode": container(ContainerKind.EPISODE, 3, 1, 1, ragged_episode),
        "ragged_sequences": container(
            ContainerKind.SEQUENCES, 2, 1, 3, sequences[:9] + ragged_sequences, (8.0, 6, 0.5)
        ),
        "sequences": container(ContainerKind.SEQUENCES, 2, 1, 3, sequences, (8.0, 6, 0.5)),
        "drawn_sequences": container(
            ContainerKind.DRAWN_SEQUENCES, 2, 1, 3, sequences[:9] + drawn_sequences + sequences[9:]
        ),
    }


def sums_row(client: bytes) -> bytes:
    return client + struct.pack("<QdQddII", 12, 8.0, 6, 0.5, 512.0, 256, 0)


def account_row(client: bytes) -> bytes:
    counts = (5, 2, 70, 9000, 1, 0, 1, 2, 9, 3, 4, 4, 5000, 3, 4096, 2, 3000, 512, 1, 1, 904, 2)
    return client + struct.pack(
        "<Q22QdddII", name_hash("server-0"), *counts, -1.5, 1700000000.25, 1700000000.5, 0xC0FFEE, 0
    )


def bodies() -> dict[str, tuple[wire.Body, bytes]]:
    """Map names to tail and payload of a message of each type, and of each use of UPDATED, NOTICE and DRAWN."""
    packed = containers()
    checksum = 0x5EED
    sums = sums_row(CLIENT) + sums_row(OTHER)
    return {
        "hello": (wire.Hello(label=0xC0FFEE, software="memoire 0.1.0", host="node-7", name="actor-0", pid=12, codecs=["zlib", "lz4"]), b""),
        "hello_reader": (
            wire.Hello(role="reader", table="demo", software="memoire 0.1.0", scalars={"loss": 0.25}, figures={"batches": 3.0}), b"",
        ),
        "welcome": (
            wire.Welcome(
                schema=SCHEMA.to_json(), parameters={"frame_stack": 2, "discount": [0.5], "prev": None},
                parameters_version=3, max_step=1000, run_name="ant-7", home_name="server-0", epoch=5,
                servers=["server-0", "server-1"],
                endpoints=wire.NodeEndpoints(request="tcp://p:5560", push="tcp://p:5561", publish="tcp://p:5562"),
                credit=1 << 26, models={"policy": 9}, codecs=["zlib"], limits={"message_bytes": 1 << 28},
                since=4, durable=True, leaving=["server-1"], table=table_number("demo"), table_name="demo",
                inference=["tcp://inference-0:5570", "tcp://*:5563"],
            ),
            b"",
        ),
        "welcome_agent": (
            wire.Welcome(schema=ROWS.to_json(), outputs=ROWS.to_json(), starts=ROWS.to_json(), entries=SCHEMA.to_json(), storage="inference"),
            b"",
        ),
        "update": (
            wire.Update(
                epoch=5, episodes=2, steps=70, caches=3, cache_bytes=4096, generated_bytes=9000, total_weight=8.0,
                positives=6, minimum=0.5, parameters_version=3, models={"policy": 8}, scalars={"return": 21.5},
                lines=[wire.Line(1, 1700000000.25, 0xC0FFEE, "hello")], ended=[wire.Ended(2, 1700000000.5, 35, -1.5)],
            ),
            b"",
        ),
        "updated": (
            wire.Updated(
                epoch=5, durable=True, episodes=2, steps=70, lines_through=1, ended_through=2, caches=2,
                received_bytes=4096, rejected={"schema": 1}, credit=1 << 26, parameters_version=3, run_name="ant-7",
            ),
            b"",
        ),
        "updated_feedback": (wire.Updated(epoch=5, feedback_through=1), packed["feedback"]),
        "updated_more_feedback": (
            wire.Updated(epoch=5, feedback_through=2, feedback_age=0.25, feedback_waiting=7),
            packed["feedback"],
        ),
        "update_feedback": (
            wire.Update(epoch=5, steps=70, applied=5, stale=2, gone=1, entries=64, feedback_through=2), b""
        ),
        "cache": (wire.Cache(since=4, number=3, pushed_bytes=4096), packed["cache"]),
        "episode": (
            wire.EpisodePush(since=4, number=4, pushed_bytes=5000, has_final=True, terminated=False, bootstrap=[0.5]),
            packed["episode"],
        ),
        "feedback": (wire.Feedback(), packed["feedback"]),
        "taken": (wire.Taken(samples=2, lost=1), b""),
        "notice": (wire.Notice(topic="policy", version=9, size=1 << 20, checksum=checksum, epoch=5), b""),
        "notice_inline": (wire.Notice(topic="policy", version=9, size=5, checksum=checksum, text=True), b"model"),
        "fetch": (wire.Fetch(topic="policy", version=9, offset=524288, size=524288), b""),
        "chunk": (wire.Chunk(topic="policy", version=9, size=5, checksum=checksum), b"model"),
        "publish": (wire.Publish(topic="policy", size=5, checksum=checksum), b"model"),
        "published": (wire.Published(topic="policy", received=5, version=9), b""),
        "sums": (wire.Sums(reserve=1024, part=1, of=3), b""),
        "summed": (wire.Summed(epoch=5, clients=sums, parameters=0x0123456789ABCDEF), b""),
        "draw": (wire.Draw(counts=CLIENT + struct.pack("<II", 2, 0) + OTHER + struct.pack("<II", 1, 0), reserve=1024), b""),
        "drawn": (wire.Drawn(epoch=5, clients=sums), packed["drawn"]),
        "drawn_nothing": (wire.Drawn(epoch=5, clients=sums_row(CLIENT), finished=True), b""),
        "prompts": (
            prompt_messages.PromptsRequest(
                call="list", states=[1, 3], tags={"level": "hard"}, since=77, consumer="reward", is_going_on=True, most=10,
                keys=[prompt_messages.PromptKey("math", 0, 17)], columns=5,
            ),
            b"",
        ),
        "answers": (
            prompt_messages.Answers(
                call="answer", count=2, seconds=60.0, version=9, leases=[41, 42],
                pieces=[prompt_messages.AnswerPiece("math", 0, 17, 41, 3, 0, True, 9, 3, [2], 12, "", False)],
            ),
            b"\x07\x00\x00\x00\x08\x00\x00\x00\x00\x00\x80?",
        ),
        "groups": (
            prompt_messages.Groups(
                call="add", dataset="math", epoch=1, new=[prompt_messages.NewPrompt(17, 4)], priority=0.5, is_evaluation=True,
                tags={"level": "hard"}, keys=[prompt_messages.PromptKey("math", 0, 17)], values=[0.25], shares={"math": 0.7},
            ),
            b"2+2?",
        ),
        "groups_draw": (
            prompt_messages.Groups(
                call="draw", session="a:0", step=7, is_before_first=True, count=48, wanted=64, replay=0.25, is_last=True,
                plan=prompt_messages.StepPlan(1, {"a": 48, "b": 16}, 64), version=9,
            ),
            b"",
        ),
        "prompted": (
            prompt_messages.Prompted(
                epoch=1, counts={"ready": 3}, done=1, flags=b"\x00\x02", wait="no prompt waits", cursor=78, sizes=[4],
                leases=[prompt_messages.LeasedPrompt("math", 0, 17, 41, 599.5, [1, 3], False, {"level": "hard"}, 4)],
                prompts=[
                    prompt_messages.PromptFacts("math", 0, 17, 6, "failed", -1, 0.5, 0.25, 9, 12, 1, False, {"level": "hard"}, [3, 0])
                ],
                columns=[prompt_messages.AnswerColumns(0, 3, 9, 3, [2], 12)], answered=1, is_closed=True, committed=6, is_over=True,
                groups=[prompt_messages.GroupFacts("math", 0, 17, [0, 1, 3], 12, 9, 0.25, 1.0, False)], is_empty=True,
                plan=prompt_messages.StepPlan(1, {"a": 48, "b": 16}),
            ),
            b"2+2?",
        ),
        "take": (fragments.Take(steps=800, least=512, release="publish", wanted=1024), b""),
        "rollouts": (
            fragments.RolloutsReply(
                epoch=5, held=224, clients=2, capacity=4096,
                fragments=[wire.FragmentRow(CLIENT, 7, len(packed["episode"]), True, False, True, [0.5])],
            ),
            packed["episode"],
        ),
        "find_rows": (keyed.FindRows(call="values", partition="train", fields=["responses"], after=2), keyed.pack(["p7", "p8", "p9"])),
        "find_rows_tags": (keyed.FindRows(call="tags", is_everywhere=True), b""),
        "change_rows": (
            keyed.ChangeRows(call="put", partition="train", upload=3),
            keyed.pack([keyed.PutRow("p7", {"status": b"\xa7running"}, {"score": b"\xcb?\xe0" + bytes(6)}, [keyed.StagedValue("responses", 0, 4)])]),
        ),
        "change_rows_stage": (keyed.ChangeRows(call="stage", upload=3, offset=0), b"\x93\x01\x02\x03"),
        "keyed_rows": (
            keyed.KeyedRows(epoch=5, rows=1, bytes=600, partitions=["train"]),
            keyed.pack([keyed.RowFacts("train", "p7", 1, {"status": b"\xa7running"}, ["score", "responses"])]),
        ),
        "keyed_rows_values": (keyed.KeyedRows(epoch=5, after=1, is_whole=False, rows=1, bytes=600), keyed.pack([keyed.RowValues(True, ["score"], {"score": b"\x01"})])),
        "infer": (wire.Infer(patience=2.0, min_version=9), packed["rows"]),
        "infer_for_job": (wire.Infer(patience=2.0, job=40), packed["rows"]),
        "inferred": (wire.Inferred(version=9, batch=48, waited=0.00390625), packed["rows"]),
        "work": (wire.WorkRequest(patience=5.0), b""),
        "work_going_on": (wire.WorkRequest(patience=0.0, job=40), b""),
        "job": (wire.Job(number=40, lease=10.0, options={"steps": 30, "greedy": False}), packed["rows"]),
        "job_none": (wire.Job(cancelled=True, leaving=True), b""),
        "result": (wire.Result(job=40, fragments=[wire.FragmentRow(CLIENT, 40, len(packed["episode"]), True, True, False, None)]), packed["episode"]),
        "result_failed": (wire.Result(job=40, status="failed", text="ValueError: no gate 7"), b""),
        "control": (wire.Control(parameters={"importance_exponent": 0.5}, finish=True), b""),
        "news": (wire.News(epoch=5), b""),
        "take_snapshot": (wire.TakeSnapshot(name="nightly", order=CLIENT), b""),
        "snapshot": (
            wire.SnapshotReply(name="nightly", state="done", path="/s/nightly.snapshot", bytes=9000, seconds=0.5, caches=2, samples=512),
            b"",
        ),
        "snapshot_failed": (wire.SnapshotReply(name="nightly", state="failed", text="No space left on device"), b""),
        "ledger": (wire.LedgerRequest(run="ant-7", after=CLIENT + bytes(8)), b""),
        "accounts": (
            wire.Accounts(run_name="ant-7", epoch=5, durable=True, runs=["ant-6", "ant-7"], accounts=account_row(CLIENT), more=True, time=1.5),
            b"",
        ),
        "inherit": (wire.Inherit(run_name="ant-7", finished=True, accounts=account_row(CLIENT) + account_row(OTHER)), b""),
        "refused": (wire.Refusal(code="too_large", text="too large", field="payload", limit=1024), b""),
        # Fields that the messages above leave out: each field of each body is in at least one message.
        "hello_takes": (wire.Hello(role="reader", inserted=70, takes={"message_bytes": 1 << 20, "tail_bytes": 1 << 16}), b""),
        "welcome_finished": (
            wire.Welcome(
                schema=SCHEMA.to_json(), software="memoire 0.1.0", finished=True, unmet=["tcp://a:5560"], pages=["http://a:7070"], granted_steps=800,
            ),
            b"",
        ),
        "update_leaving": (wire.Update(passed_steps=9, skipped=1, dropped_lines=2, leaving=True, finished=True), b""),
        "updated_leaving": (
            wire.Updated(
                lost=1, lost_bytes=4096, parameters={"cache_size": 32}, models={"policy": 9}, finished=True, time=1700000000.5,
                leaving=True, granted_steps=800, wait="samples_per_insert",
            ),
            b"",
        ),
        "episode_cut": (
            wire.EpisodePush(has_final=True, multiplier=2.0, update_value=False, update_weight=False, cut=True, bootstrap=[0.5]),
            packed["episode"],
        ),
        "taken_finished": (wire.Taken(samples=1, lost=0, parameters_version=3, finished=True), b""),
        "chunk_further": (
            wire.Chunk(
                topic="policy", version=9, size=10, checksum=checksum, offset=5, text=True, home=name_hash("server-0"), epoch=5,
            ),
            b"model",
        ),
        "publish_further": (wire.Publish(topic="policy", size=10, checksum=checksum, offset=5, text=True, version=9), b"model"),
        "sums_page": (wire.Sums(reserve=1024, elsewhere=7, wanted=256, band=BAND, after=CLIENT), b""),
        "summed_page": (wire.Summed(epoch=5, clients=sums, finished=True, is_whole=False, standing=RATE), b""),
        "draw_page": (
            wire.Draw(
                counts=CLIENT + struct.pack("<II", 2, 0), elsewhere=7, part=1, of=3, wanted=256, band=BAND, in_pages=True,
                packed=True,
            ),
            b"",
        ),
        "drawn_page": (
            wire.Drawn(epoch=5, clients=sums, is_whole=False, standing=RATE, parameters=0x0123456789ABCDEF), packed["drawn"]
        ),
        "prompts_fetch": (
            prompt_messages.PromptsRequest(
                call="fetch", keys=[prompt_messages.PromptKey("math", 0, 17)], columns=5, after=3, offset=4096, changed=77, rank=1, ranks=2
            ),
            b"",
        ),
        "groups_page": (prompt_messages.Groups(call="draw", session="a:0", step=7, after=48), b""),
        "prompted_part": (
            prompt_messages.Prompted(columns=[prompt_messages.AnswerColumns(0, 3, 9, 2, [], 4)], rest=8192, changed=77, is_whole=False), b"2+2?"
        ),
        "take_whole": (fragments.Take(steps=800, exact=False), b""),
        "rollouts_finished": (fragments.RolloutsReply(epoch=5, finished=True), b""),
        "find_rows_part": (keyed.FindRows(call="values", partition="train", after=1, known=3, version=9), keyed.pack(["p7", "p8"])),
        "keyed_rows_part": (
            keyed.KeyedRows(epoch=5, after=1, known=4, version=9, is_whole=False, rows=1, bytes=600),
            keyed.pack([keyed.RowValues(True, ["score", "text"], {"score": b"\x01"})]),
        ),
        "change_rows_further": (keyed.ChangeRows(call="stage", upload=3, offset=4), b"\x01\x02\x03"),
        "control_drain": (wire.Control(run="ant-8", drain=True, discard_mismatched=True), b""),
        "snapshot_episodes": (wire.SnapshotReply(name="nightly", state="done", episodes=2, entries=70), b""),
        "accounts_finished": (wire.Accounts(run_name="ant-7", epoch=5, durable=True, runs=[], accounts=b"", more=False, finished=True, applied=5, stale=2, guests=1, unfinished=3), b""),
        "refused_version": (wire.Refusal(code="version", text="another version", versions=[3]), b""),
    }  # fmt: skip


def header_of(name: str) -> dict[str, Any]:
    client = NO_CLIENT if name.startswith(("notice", "news")) else CLIENT
    return {
        "client": client, "sequence": 12, "run": name_hash("ant-7"), "home": name_hash("server-0"),
        "table": 1, "fingerprint": SCHEMA.fingerprint,
    }  # fmt: skip


def messages() -> dict[str, list[bytes]]:
    return {name: encode(body, payload=payload, **header_of(name)) for name, (body, payload) in bodies().items()}


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=str) if not isinstance(value, bytes) else value


def _hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _hex(inner) for key, inner in value.items()}
    return [_hex(inner) for inner in value] if isinstance(value, list | tuple) else value


def describe() -> dict[str, Any]:
    contents: dict[str, Any] = {"schema": json.loads(SCHEMA.to_json()), "messages": {}, "containers": {}}
    for name, (body, payload) in bodies().items():
        contents["messages"][name] = {
            "type": body.type.name, "header": _hex(header_of(name)), "tail": _hex(_plain(body)),
            "payload_bytes": len(payload),
        }  # fmt: skip
    for name, payload in containers().items():
        blocks = struct.unpack_from("<I", payload, 40)[0]
        rows = [struct.unpack_from("<HBBIQQQ", payload, 64 + 32 * i) for i in range(blocks)]
        contents["containers"][name] = {
            "kind": ContainerKind(struct.unpack_from("<I", payload, 44)[0]).name,
            "blocks": [
                {
                    "column": row[0],
                    "part": Part(row[1]).name,
                    "rows": row[3],
                    "hex": payload[row[4] : row[4] + row[5]].hex(),
                }
                for row in rows
            ],
        }
    return contents


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, frames in messages().items():
        for i, frame in enumerate(frames):
            (folder / f"{name}.{i}").write_bytes(frame)
    for name, payload in containers().items():
        (folder / f"{name}.payload").write_bytes(payload)
    (folder / "vectors.json").write_text(json.dumps(describe(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
