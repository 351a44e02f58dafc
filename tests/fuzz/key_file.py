"""The text of keys and of passports: keys that say the same again, or one error that repeats nothing secret.

1 byte   even: a file of keys; odd: a passport
"""

import base64
import re

from memoire.errors import ProtocolError
from memoire.security import roles as permissions
from memoire.security.keys import make, read_blocks
from memoire.security.roles import Peer, passport, read_passport

REACHED = {"keys", "no key", "passport", "no passport"}
WORDS = (
    b"-----BEGIN MEMOIRE PUBLIC KEY-----\n", b"-----END MEMOIRE SECRET KEY-----\n", b"Name: ", b"Role: ", b"actor", b"server", b"\n\n",
    b"# comment\n", b"=", b"\r\n", b"\x0c", b"\x1c", b"../x", b"MEMP", b"\xff",
)  # fmt: skip
KEYS = [make(role, "some") for role in permissions.ROLES]


def seeds() -> list[bytes]:
    """Files of each kind of key, and every role's passport."""
    texts = [key.text(secret=is_secret) for key in KEYS for is_secret in (True, False)]
    files = [*texts, "# both\n" + texts[0] + "\n" + texts[3], ""]
    return [*(b"\0" + text.encode() for text in files), *(b"\1" + passport(Peer(r, "a-1")) for r in permissions.ROLES)]


def one(data: bytes) -> str:
    """Read it, and what it says when it is written again."""
    if data[:1] and data[0] % 2:
        try:
            peer = read_passport(data[1:])
        except ProtocolError as error:
            assert error.code == "passport"
            return "no passport"
        assert read_passport(passport(peer)) == peer
        return "passport"
    try:
        found = read_blocks(data[1:])
    except ValueError as error:
        # What looks like a key in the text may be one, or most of one.
        text = re.sub(rb"Name: .*", b"", data[1:])  # which are no secret
        assert not [word for word in re.findall(rb"[A-Za-z0-9+/]{20,}", text) if word.decode() in str(error)]
        return "no key"
    for key in found:
        (again,) = read_blocks(key.text(secret=key.secret is not None).encode())
        assert (again.public, again.secret, again.peer) == (key.public, key.secret, key.peer)
        if key.secret:
            assert base64.b64encode(key.secret).decode() not in repr(key)
    return "keys"
