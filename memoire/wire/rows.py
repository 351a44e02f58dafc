"""Packed rows of messages: sums, requested counts and accounts, one row for each client. A row is a NumPy record.

One function unpacks each kind of row and checks the values of its columns.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_RETURN: Final = 1e280
"""Largest absolute return of one episode: sums over all episodes of all clients stay finite."""
MAX_RETURNS: Final = 1e300
"""Largest absolute sum of the returns of one client's episodes."""

ACCOUNT_KEY_BYTES: Final = 32
"""Bytes of the key at the beginning of an `ACCOUNT` row: client, home and since."""

CLIENT_SUMS: Final = np.dtype(
    [
        ("client", "<u8", (2,)),  # the client id's 16 bytes
        ("sequence", "<u8"),  # number of the message with the sums: of two servers' rows the newest counts
        ("total_weight", "<f8"),  # S_c
        ("positives", "<u8"),  # N_c
        ("minimum", "<f8"),  # smallest positive weight; 0 if no weight is positive
        ("drawn_between", "<f8"),  # D_c, scaled: u_c / drawn_between is the cap of its share
        ("reserved", "<u4"),  # u_c: unused samples reserved for this reader
        ("flags", "<u4"),  # 1: reuse_cache: the client can serve any count
    ]
)
CLIENT_COUNTS: Final = np.dtype([("client", "<u8", (2,)), ("count", "<u4"), ("zero", "<u4")])
ACCOUNT: Final = np.dtype(
    [
        ("client", "<u8", (2,)),
        ("home", "<u8"),  # hash of the counting server's name
        ("since", "<u8"),  # the server's epoch at the opening of the account, unique per account
        ("episodes", "<u8"),  # up to stale: cumulative since the client began, of which `merge` takes the newest
        ("steps", "<u8"),
        ("generated_bytes", "<u8"),
        ("skipped", "<u8"),
        ("dropped_lines", "<u8"),
        ("lines_through", "<u8"),
        ("ended_through", "<u8"),
        ("applied", "<u8"),
        ("stale", "<u8"),
        ("lost_feedback", "<u8"),  # from this column on: counts of one account; `merge` adds rows
        ("pushed_caches", "<u8"),
        ("pushed_bytes", "<u8"),
        ("received_caches", "<u8"),
        ("received_bytes", "<u8"),
        ("accepted_caches", "<u8"),
        ("accepted_bytes", "<u8"),
        ("accepted_samples", "<u8"),
        ("rejected_caches", "<u8"),
        ("lost_caches", "<u8"),
        ("lost_bytes", "<u8"),
        ("returns_count", "<u8"),
        ("returns_sum", "<f8"),
        ("first_seen", "<f8"),  # unix
        ("last_seen", "<f8"),
        ("label", "<u4"),
        ("flags", "<u4"),  # 1: the client left
    ]
)
_ACCOUNT_COUNTS: Final = [
    name for name in ACCOUNT.names or () if ACCOUNT[name] == np.dtype("<u8") and name not in ("home", "since")
]


def unpack_sums(packed: bytes) -> NDArray[np.void]:
    """Return rows of `CLIENT_SUMS`, [C], read-only. Raises ValueError unless totals are finite and not negative."""
    rows = _unpack(packed, CLIENT_SUMS)
    for name in ("total_weight", "minimum", "drawn_between"):
        if len(rows) and not (rows[name].min() >= 0.0 and rows[name].max() < np.inf):  # NaN is neither
            raise ValueError(f"{name} of a client is negative or not finite")
    return rows


def unpack_counts(packed: bytes) -> NDArray[np.void]:
    """Return rows of `CLIENT_COUNTS`, [C], read-only. Raises ValueError if a client occurs more than once."""
    rows = _unpack(packed, CLIENT_COUNTS)
    if rows["zero"].any():
        raise ValueError("the padding of a row of client counts must be 0")
    row, size = CLIENT_COUNTS.itemsize, CLIENT_COUNTS["client"].itemsize
    if len({packed[at : at + size] for at in range(0, len(packed), row)}) != len(rows):
        raise ValueError("a client occurs twice in the client counts")
    return rows


def sums_of(packed: bytes) -> NDArray[np.void]:
    """Return rows of `CLIENT_SUMS`, [C], read-only, of a parsed message; parsing has checked them."""
    return np.frombuffer(packed, CLIENT_SUMS)


def counts_of(packed: bytes) -> NDArray[np.void]:
    """Return rows of `CLIENT_COUNTS`, [C], read-only, of a parsed message; parsing has checked them."""
    return np.frombuffer(packed, CLIENT_COUNTS)


def unpack_accounts(packed: bytes) -> NDArray[np.void]:
    """Return rows of `ACCOUNT`, [A] for A accounts, read-only.

    Raises ValueError unless counts are below 2**53, times finite and sums of returns within `MAX_RETURNS`.
    """
    rows = _unpack(packed, ACCOUNT)
    for name in _ACCOUNT_COUNTS:
        if (rows[name] >= 2**53).any():
            raise ValueError(f"{name} of a client is not below 2**53")
    if (rows["since"] >= 2**63).any():
        raise ValueError("since of a client is not below 2**63")
    for name in ("returns_sum", "first_seen", "last_seen"):
        if not np.isfinite(rows[name]).all():
            raise ValueError(f"{name} of a client is not finite")
    if (np.abs(rows["returns_sum"]) > MAX_RETURNS).any():
        raise ValueError(f"returns_sum of a client is beyond {MAX_RETURNS:g}")
    if (rows["flags"] > 1).any():
        raise ValueError("a client has flags that this version does not know")
    return rows


def _unpack(packed: bytes, row: np.dtype[np.void]) -> NDArray[np.void]:
    if len(packed) % row.itemsize:
        raise ValueError(f"{len(packed)} bytes are no whole number of rows of {row.itemsize}")
    return np.frombuffer(packed, row)
