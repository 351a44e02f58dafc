"""Batches as torch tensors, and networks as models: `pip install 'memoire-rl[torch]'`.

    for batch in memoire.torch.batches(server, 256, device="cuda"):     # or server.get_batch(256).to("cuda")
        td_errors = ...               # of batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
        (batch.importance * td_errors**2).mean().backward()
        batch.update_priorities(td_errors)
        memoire.torch.publish(server, "policy", net)

    memoire.torch.load(client.model("policy").wait(timeout=30), net)    # at an actor

On the CPU tensors are the batch's own memory. A network travels as named arrays, in the format of safetensors: nothing
in it is pickled, and a body that does not fit is refused before anything is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from memoire import Batch, MixedBatch
from memoire.building import Model
from memoire.building import TorchBatch as TorchBatch
from memoire.building import as_tensor as as_tensor
from memoire.building import device_of as device_of
from memoire.building import pinned as pinned
from memoire.building import tensors as bodies

from .errors import NotInstalled, ParameterError, WrongType

with NotInstalled.explained("pip install 'memoire-rl[torch]'"):
    import torch


class Source(Protocol):
    """Whatever draws batches until a run is over: a `Server`, a `Reader`, a client."""

    def batches(self, batch_size: Any, timeout: float = ..., /) -> Iterator[Any]:
        """One batch after the other."""
        ...


def batches(
    source: Source,
    batch_size: int | Mapping[str, int],
    timeout: float = 30.0,
    *,
    device: torch.device | str | None = None,
    ahead: int = 1,
) -> Iterator[TorchBatch]:
    """Batches of a server, reader or client as tensors, until the run is over.

    Args:
        source: Who draws.
        batch_size, timeout: As its `batches` takes them; of a batch mixed of several tables the joined rows come.
        device: Where to; None is the CPU, without a copy.
        ahead: Batches that are on their way to the device while the learner works on one. At least 0. Their
            priorities are those of the moment of the draw.

    Raises:
        MemoireTimeout: not enough samples came in time.
    """
    if type(ahead) is not int or ahead < 0:
        raise ParameterError("ahead", ahead, "a whole number of at least 0")
    place = device_of(device)
    drawn = (batch.joined if isinstance(batch, MixedBatch) else batch for batch in source.batches(batch_size, timeout))
    if place.type != "cuda":
        return (TorchBatch(batch, place) for batch in drawn)
    return _prefetched(drawn, place, ahead)


def _prefetched(drawn: Iterator[Batch], place: torch.device, ahead: int) -> Iterator[TorchBatch]:
    """Copies go on a stream of their own; the learner's waits for the one batch that it gets."""
    stream = torch.cuda.Stream(place)
    waiting: deque[tuple[TorchBatch, torch.cuda.Event]] = deque()
    for batch in drawn:
        with torch.cuda.stream(stream):
            moved = TorchBatch(batch, place)
            waiting.append((moved, stream.record_event()))
        if len(waiting) > ahead:
            yield _ready(*waiting.popleft())
    while waiting:
        yield _ready(*waiting.popleft())


def _ready(batch: TorchBatch, copied: torch.cuda.Event) -> TorchBatch:
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)  # or its memory could be given to the next copy too early
    return batch


# Networks

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by what bodies call them."""
NAMES = {dtype: name for name, dtype in TYPES.items()}


class Publisher(Protocol):
    """Whatever publishes models: a `Server` or a `Reader`."""

    def publish(self, topic: str, content: bytes, /) -> int:
        """Returns the version."""
        ...


def publish(
    where: Publisher, topic: str, net: torch.nn.Module | Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
) -> int:
    """Publish a network's parameters and buffers as the newest model of a topic; returns its version.

    Tensors are copied from wherever they are, so that training may go on at once. The wrappers of `torch.compile` and
    DistributedDataParallel are looked through.

    Args:
        where: A `Server`, or a `Reader` of several.
        net: A module, or a state_dict.
        dtype: What floating-point tensors are sent as, such as torch.bfloat16 for half of the bytes; None keeps them.

    Raises:
        WrongType, ParameterError: something in it is no tensor, or one that has no place in a body.
    """
    return where.publish(topic, body_of(net, dtype))


def load(model: Model | bytes, net: torch.nn.Module | dict[str, torch.Tensor], *, cast: bool = False) -> int:
    """Put a published model's tensors into a network, on whatever device each of them is; returns its version.

    All or nothing: names, shapes and dtypes are compared before anything is changed.

    Args:
        model: What `client.model(topic)` gave: `newest()` or `wait()`. Or the body alone, whose version is 0.
        net: A module of the same form, or the state_dict of one.
        cast: Whether floating-point tensors may have another width, as those that were sent as torch.bfloat16.

    Raises:
        WrongModel: the body is damaged, or holds no tensors, or others than the network has.
    """
    state, what = _state_of(net), _called(model)
    found = bodies.unpack(_body(model), what)
    bodies.check_fit(what, found, {name: _form(name, tensor) for name, tensor in state.items()}, free_dtypes=cast)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_tensor(found[name]))
    return model.version if isinstance(model, Model) else 0


def tensors(model: Model | bytes) -> dict[str, torch.Tensor]:
    """The tensors of a published model, by name, on the CPU: for a network that is made after them.

    Raises:
        WrongModel: the body is damaged, or holds no tensors.
    """
    return {name: _tensor(array) for name, array in bodies.unpack(_body(model), _called(model)).items()}


def body_of(net: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> bytes:
    """What `publish` publishes: for a file, or a channel of your own."""
    if dtype is not None and (dtype not in NAMES or not dtype.is_floating_point):
        raise ParameterError("dtype", str(dtype), "a floating-point dtype, such as torch.bfloat16")
    state = _state_of(net)
    if not isinstance(state, Mapping):
        raise WrongType("net", "a torch.nn.Module or a state_dict", f"{type(net).__name__}")
    return bodies.pack({name: _array(name, tensor, dtype) for name, tensor in state.items()})


def _state_of(net: Any) -> Any:
    """The state_dict of a network, also of one in a wrapper; anything else as it is."""
    net = getattr(net, "_orig_mod", net)  # torch.compile
    plain = net.module if isinstance(net, torch.nn.parallel.DistributedDataParallel) else net
    return plain.state_dict() if isinstance(plain, torch.nn.Module) else plain


def _called(model: Any) -> str:
    return f"model {model.topic!r} version {model.version}" if isinstance(model, Model) else "this model"


def _body(model: Any) -> bytes:
    if isinstance(model, Model):
        return model.body
    if not isinstance(model, bytes | bytearray | memoryview):
        expected = "what client.model(topic).newest() or .wait() gave, or its body"
        raise WrongType("model", expected, type(model).__name__)
    return bytes(model)


def _form(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a tensor as bodies say them."""
    if not isinstance(tensor, torch.Tensor):
        raise WrongType(f"net[{name!r}]", "a tensor", type(tensor).__name__)
    if tensor.dtype not in NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
        expected = f"a dense tensor with values, of type {', '.join(NAMES.values())}"
        raise ParameterError(f"net[{name!r}]", f"{tensor.dtype}, {tensor.layout}, on {tensor.device}", expected)
    return NAMES[tensor.dtype], tuple(tensor.shape)


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> bodies.Array:
    _form(name, tensor)
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    row = tensor.detach().to("cpu", wanted).contiguous().reshape(-1)
    return bodies.Array(NAMES[wanted], tuple(tensor.shape), memoryview(row.view(torch.uint8).numpy()))


def _tensor(array: bodies.Array) -> torch.Tensor:
    if not array.data.nbytes:
        return torch.empty(array.shape, dtype=TYPES[array.dtype])
    return torch.from_numpy(np.array(array.data)).view(TYPES[array.dtype]).reshape(array.shape)
