"""A model's body of named arrays: WrongModel, or arrays that make the same body again."""

from memoire.errors import WrongModel
from memoire.models.tensors import ITEM_BYTES, Array, pack, unpack

REACHED = {"taken", "refused"}
WORDS = (
    b'"F32"',
    b'"BF16"',
    b'"BOOL"',
    b'"shape"',
    b'"data_offsets"',
    b"[0,24]",
    b"[2,3]",
    b"[]",
    b"-1",
    b"9" * 300,
    b"NaN",
    b"{",
)


def _array(dtype: str, *shape: int) -> Array:
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return Array(dtype, shape, memoryview(bytes(size)))


def seeds() -> list[bytes]:
    """Bodies of each type, one without numbers, and headers that say too much."""
    deep = b"[" * 100_000
    return [
        pack({"w": _array("F32", 2, 3), "b": _array("BF16", 3), "seen": _array("I64")}),
        pack({name: _array(name, 2) for name in ITEM_BYTES}),
        pack({"none": _array("U8", 0, 2**40)}),
        pack({str(place): _array("U8") for place in range(500)}),
        len(deep).to_bytes(8, "little") + b"{" + deep,
        b"\x80\x04K\x01.",
    ]


def one(data: bytes) -> str:
    """Read it; what is taken makes a body that is read as the same."""
    try:
        arrays = unpack(data)
    except WrongModel as error:
        str(error)
        return "refused"
    assert sum(each.data.nbytes for each in arrays.values()) <= len(data)
    try:
        again = unpack(pack(arrays))
    except ValueError:  # a name that is no text: JSON may say half of a character
        return "taken"
    assert {name: (a.dtype, a.shape, bytes(a.data)) for name, a in again.items()} == {
        name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()
    }
    return "taken"
