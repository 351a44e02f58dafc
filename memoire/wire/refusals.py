"""Why a message is refused: the codes of REFUSED, and which of them end by themselves."""

from typing import Final

from memoire.errors import ProtocolError

from . import types
from .types import Type

CODES: Final = {
    "frames": "not one or two frames, or a payload that this type of message must or must not have",
    "short": "frame 0 is shorter than its header and tail",
    "long": "frame 0 is longer than its header and tail",
    "magic": "not a memoire message",
    "version": "another version of the protocol",
    "checksum": "header or tail changed on the way",
    "type": "a type of message this version does not have",
    "flags": "flags this version does not have",
    "tail": "a tail that is not this type's msgpack map",
    "size": "a payload of another size than the header says",
    "payload": "payload changed on the way",
    "too_large": "larger than this node, or the client that asks, allows",
    "topic": "topic frame and notice disagree",
    "unexpected": "a type of message that does not belong on this channel",
    "schema": "made for another schema",
    "table": "a table that this node does not have",
    "run": "made for another run",
    "container": "a payload whose head, table or blocks are not as docs/wire.md says",
    "index": "an index, count or step outside of what it points into",
    "value": "a weight, total or discount that is not finite or not in its range",
    "codec": "a compression that this node does not have, or compressed bytes that are damaged",
    "client": "a client id that this node does not know, or that may not be used here",
    "owner": "in the name of a client id that belongs to another key",
    "role": "sent by the key of a role that may not send this",
    "denied": "sent to a proxy that no server lets in",
    "revoked": "sent by a key that is not authorized any more",
    "passport": "passed on by a proxy that does not say for whom, or says it without being one",
    "parameters": "parameters that do not fit the schema",
    "busy": "too much is waiting already",
    "full": "no room among what stays here until it is cleared, such as keyed rows",
    "disk": "this node's state folder cannot be written, and nothing is acknowledged; the text says why and what to do",
    "closed": "this node is closing",
    "failed": "the function of this inference node raised an error, or its outputs do not fit their schema",
    "cancelled": "for a job that is not wanted any more, or that somebody else has",
    "session": "from a trainer whose place another one has taken, or that has not said where it goes on",
    "missing": "asked for something that is not stored here (any more)",
}
"""Every refusal code and what it says; a refusal's text adds which value and what was expected."""
PASSING: Final = ("busy", "closed", "denied", "disk")
"""Codes of refusals that end by themselves: what was asked is asked again."""
TOO_LARGE: Final = ("too_large", "tail")
"""Codes of refusals for a size: the same request would be refused again. "tail" is that of a list beyond its bound."""
FOR_INFERENCE: Final = frozenset({types.INFER, types.WORK, types.RESULT})
"""What only inference nodes and agents answer: nobody passes it on."""


def no_inference(kind: Type) -> ProtocolError:
    """Why a server or proxy refuses one of these."""
    text = f"{kind.name} was sent to a server or proxy. Ask the address of the inference node or agent itself"
    return ProtocolError("unexpected", text)
