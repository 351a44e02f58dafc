"""A model on its way to whoever follows its topic: notices and chunks of a server that says anything at all.

The bytes are decisions (see `choices`). Nothing is ever delivered but whole bodies with the announced hash, the books of
what is kept stay right, and no more is held than the limits say.
"""

import random

from fuzz.choices import Choices
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.models.model import ModelAssembly, ModelStore, StaleVersion, check_topic, make
from memoire.models.topics import Topics
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse

REACHED = {"delivered", "nothing"}
LIMITS = Limits(model_bytes=1000, inline_model=100, model_chunk=30, model_window=3, model_spread=0.0)
BODY = bytes(range(200))
CHECKSUM = _bytes.checksum(BODY)


def seeds() -> list[bytes]:
    """Rows of decisions."""
    rng = random.Random(1)
    return [rng.randbytes(500) for _ in range(32)]


def _assemble(choices: Choices) -> None:
    """Chunks in any order, of any size."""
    try:
        made = ModelAssembly(
            "policy", 1, choices.pick((200, 200, 0, 1001, 2**53)), choices.pick((CHECKSUM, CHECKSUM, 0)),
            bool(choices.below(2)), byte_limit=LIMITS.model_bytes, early=4,
        )  # fmt: skip
    except ProtocolError:
        return
    for _ in range(12):
        at = made.offset if choices.below(3) else choices.integer(0, 2**53 - 1)
        try:
            model = made.add(at, BODY[at : at + choices.below(60)] if choices.below(8) else b"x" * choices.below(60))
        except ProtocolError:
            return
        if model is not None:
            assert _bytes.checksum(model.body) == model.checksum and len(model.body) == made.size
            return


def _store(choices: Choices) -> None:
    store = ModelStore(LIMITS.model_bytes, keep=2, clock=lambda: 1.0)
    for _ in range(10):
        topic = choices.pick(("a", "b", "c" * 255))
        try:
            model = make(topic, BODY[: choices.below(200)], 0)
            version = choices.integer(0, 2**53 - 1)
            (store.add(model, version), store.serve(topic, version)) if choices.below(3) else store.forget(topic)
        except (StaleVersion, ParameterError):
            pass
        store.check_invariants()
    try:
        check_topic(choices.text())
    except ParameterError:
        pass


def _follow(choices: Choices) -> str:
    """A subscriber, told anything."""
    asked = []
    now = [0.0]
    seen = []
    topics = Topics(
        LIMITS, lambda *question: asked.append(question), lambda topic, on: True, lambda function: function(),
        lambda model, *_: seen.append(model), lambda *_: None, rng=random.Random(0), clock=lambda: now[0],
    )  # fmt: skip
    topics.want("policy")
    for _ in range(40):
        now[0] += choices.pick((0.0, 0.0, 0.0, 0.01, 0.01, 1.0, 20.0))
        if asked and choices.below(8):
            topic, version, offset, _, done = asked.pop(0 if choices.below(6) else choices.below(len(asked)))
            done(_answer(choices, topic, version, offset))
        else:
            size = choices.pick((200, 200, 5, 0, 1001))
            told = {
                "topic": "policy",
                "version": choices.pick((1, 1, 2, 3, 2**53 - 1)),
                "size": size,
                "checksum": CHECKSUM,
            }
            notice = messages.Notice(**told, epoch=choices.below(3), text=bool(choices.below(2)))
            inline = BODY[:size] if choices.below(2) and size <= LIMITS.inline_model else None
            try:
                message = parse(encode(notice, payload=inline or None))
                topics.noticed(message.body, message.payload, choices.below(3))
            except ProtocolError:
                pass
        topics.turn()
    for model in seen:
        assert _bytes.checksum(model.body) == model.checksum
    return "delivered" if seen else "nothing"


def _answer(choices: Choices, topic: str, version: int, offset: int) -> object:
    if not choices.below(30):
        return ProtocolError("missing", "gone")
    body = BODY[offset : offset + (30 if choices.below(20) else choices.pick((7, 0)))]
    told = {
        "topic": topic,
        "version": version or choices.pick((1, 2, 2**53 - 1)),
        "size": 200 if choices.below(20) else 90,
    }
    chunk = messages.Chunk(
        **told, checksum=CHECKSUM, offset=offset if choices.below(20) else choices.integer(0, 2**53 - 1)
    )
    return parse(encode(chunk, payload=body or None))


def one(data: bytes) -> str:
    """One of each."""
    choices = Choices(data)
    _assemble(choices)
    _store(choices)
    return _follow(choices)
