"""Conversion of batches to torch tensors, and of networks to models: `pip install 'memoire-rl[torch]'`.

    for batch in memoire.torch.batches(server, 256, device="cuda"):     # or server.get_batch(256).to("cuda")
        td_errors = ...               # of batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
        (batch.importance * td_errors**2).mean().backward()
        batch.update_priorities(td_errors)
        memoire.torch.publish(server, "policy", net)

    memoire.torch.load(client.model("policy").wait(timeout=30), net)    # at an actor

Tensors on the CPU share the batch's memory. A model's body has a network's named arrays in the format of safetensors:
nothing is pickled, and a body that does not fit raises an error before the network is changed.
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


class BatchSource(Protocol):
    """Interface of objects that draw batches until a run is finished: a `Server`, a `Reader`, a client."""

    def batches(self, batch_size: Any, timeout: float = ..., /) -> Iterator[Any]:
        """Yield batches until the run is finished."""
        ...


def batches(
    source: BatchSource,
    batch_size: int | Mapping[str, int],
    timeout: float = 30.0,
    *,
    device: torch.device | str | None = None,
    ahead: int = 1,
) -> Iterator[TorchBatch]:
    """Iterate over batches of a server, reader or client as tensors, until the run is finished.

    Args:
        source: Server, reader or client that draws.
        batch_size, timeout: As in `source.batches`. A batch mixed from several tables is returned with joined rows.
        device: Target device; None is the CPU, without a copy.
        ahead: Number of batches to copy to a GPU in advance, at least 0. Batches copied early have the priorities of an
            earlier moment.

    Raises:
        MemoireTimeout: not enough samples came in time.
        ParameterError: `ahead` is negative, or torch has no such device on this machine.
    """
    if type(ahead) is not int or ahead < 0:
        raise ParameterError("ahead", ahead, "a whole number of at least 0")
    target = device_of(device)
    drawn = (batch.joined if isinstance(batch, MixedBatch) else batch for batch in source.batches(batch_size, timeout))
    if target.type != "cuda":
        return (TorchBatch(batch, target) for batch in drawn)
    return _prefetch(drawn, target, ahead)


def _prefetch(drawn: Iterator[Batch], device: torch.device, ahead: int) -> Iterator[TorchBatch]:
    """Copy batches to a GPU on a separate stream, and yield each after the current stream waits for its copy."""
    stream = torch.cuda.Stream(device)
    pending: deque[tuple[TorchBatch, torch.cuda.Event]] = deque()
    for batch in drawn:
        with torch.cuda.stream(stream):
            pending.append((TorchBatch(batch, device), stream.record_event()))
        if len(pending) > ahead:
            yield _wait_for_copy(*pending.popleft())
    while pending:
        yield _wait_for_copy(*pending.popleft())


def _wait_for_copy(batch: TorchBatch, copied: torch.cuda.Event) -> TorchBatch:
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)  # otherwise the allocator could reuse the tensor's memory too early
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
"""Dtypes of torch by their names in a body."""
NAMES = {dtype: name for name, dtype in TYPES.items()}


class ModelPublisher(Protocol):
    """Interface of objects that publish models: a `Server` or a `Reader`."""

    def publish(self, topic: str, content: bytes, /) -> int:
        """Publish a model on a topic, and return its version."""
        ...


def publish(
    where: ModelPublisher,
    topic: str,
    net: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """Publish a network's parameters and buffers as the newest model of a topic, and return its version.

    Tensors are copied from any device, so that training may continue at once. Wrappers of `torch.compile` and
    DistributedDataParallel are removed.

    Args:
        where: A `Server`, or a `Reader` of several servers.
        net: A module, or a state_dict.
        dtype: Dtype to send floating-point tensors in, such as torch.bfloat16 for half of the bytes; None keeps theirs.

    Raises:
        WrongType: a value of the state_dict is not a tensor.
        ParameterError: a tensor has a dtype or layout that a body cannot hold.
    """
    return where.publish(topic, body_of(net, dtype))


def load(model: Model | bytes, net: torch.nn.Module | dict[str, torch.Tensor], *, cast: bool = False) -> int:
    """Copy a published model's tensors into a network, on any devices, and return the model's version.

    All or nothing: names, shapes and dtypes are compared before the first tensor is changed.

    Args:
        model: Result of `newest()` or `wait()` of `client.model(topic)`; or a body alone, whose version is 0.
        net: A module of the same form, or the state_dict of one.
        cast: True allows floating-point tensors of another width, such as those sent as torch.bfloat16.

    Raises:
        WrongModel: the body is damaged, has no tensors, or has other tensors than the network.
    """
    state, title = _state_of(net), _describe(model)
    arrays = bodies.unpack(_body(model), title)
    bodies.check_fit(title, arrays, {name: _form(name, tensor) for name, tensor in state.items()}, free_dtypes=cast)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_tensor(arrays[name]))
    return model.version if isinstance(model, Model) else 0


def tensors(model: Model | bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a published model by name, on the CPU, to build a network of the same form.

    Raises:
        WrongModel: the body is damaged, or has no tensors.
    """
    return {name: _tensor(array) for name, array in bodies.unpack(_body(model), _describe(model)).items()}


def body_of(net: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> bytes:
    """Return the body that `publish` publishes, for a file or another channel. Raises as `publish`."""
    if dtype is not None and (dtype not in NAMES or not dtype.is_floating_point):
        raise ParameterError("dtype", str(dtype), "a floating-point dtype, such as torch.bfloat16")
    state = _state_of(net)
    if not isinstance(state, Mapping):
        raise WrongType("net", "a torch.nn.Module or a state_dict", f"{type(net).__name__}")
    return bodies.pack({name: _array(name, tensor, dtype) for name, tensor in state.items()})


def _state_of(net: Any) -> Any:
    """Return the state_dict of a network, without its wrappers; return other values unchanged."""
    net = getattr(net, "_orig_mod", net)  # torch.compile
    plain = net.module if isinstance(net, torch.nn.parallel.DistributedDataParallel) else net
    return plain.state_dict() if isinstance(plain, torch.nn.Module) else plain


def _describe(model: Any) -> str:
    return f"model {model.topic!r} version {model.version}" if isinstance(model, Model) else "this model"


def _body(model: Any) -> bytes:
    if isinstance(model, Model):
        return model.body
    if not isinstance(model, bytes | bytearray | memoryview):
        expected = "a model from client.model(topic).newest() or .wait(), or its body"
        raise WrongType("model", expected, type(model).__name__)
    return bytes(model)


def _form(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(tensor, torch.Tensor):
        raise WrongType(f"net[{name!r}]", "a tensor", type(tensor).__name__)
    if tensor.dtype not in NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
        expected = f"a dense tensor with values, of type {', '.join(NAMES.values())}"
        raise ParameterError(f"net[{name!r}]", f"{tensor.dtype}, {tensor.layout}, on {tensor.device}", expected)
    return NAMES[tensor.dtype], tuple(tensor.shape)


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> bodies.Array:
    _form(name, tensor)
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    row = tensor.detach().to("cpu", target).contiguous().reshape(-1)
    return bodies.Array(NAMES[target], tuple(tensor.shape), memoryview(row.view(torch.uint8).numpy()))


def _tensor(array: bodies.Array) -> torch.Tensor:
    if not array.data.nbytes:
        return torch.empty(array.shape, dtype=TYPES[array.dtype])
    return torch.from_numpy(np.array(array.data)).view(TYPES[array.dtype]).reshape(array.shape)
