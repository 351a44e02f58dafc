"""Replies of a home, without one."""

from memoire.wire.frames import Message, MessageHeader

CLIENT = b"\7" * 16


def reply(body, *, run=0, home=0, fingerprint=0, payload=None):
    """What a client hears of this body."""
    header = MessageHeader(
        type=body.type, table=0, client=CLIENT, run=run, home=home, sequence=1, fingerprint=fingerprint,
        payload_bytes=0, payload_checksum=0,
    )  # fmt: skip
    return Message(header, body, payload)
