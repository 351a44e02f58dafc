"""TorchRL's inference server in a process of its own, with slots in shared memory, and clients that are processes."""

import multiprocessing
import time
from functools import cache

import torch
from tasks import INPUTS, LAYERS, OUTPUTS
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules.inference_server import ProcessInferenceServer, ProcessSlotTransport


def policy():
    torch.set_num_threads(1)
    parts = []
    for weight, bias in LAYERS:
        layer = torch.nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = torch.from_numpy(weight.T.copy()), torch.from_numpy(bias.copy())
        parts += [layer, torch.nn.Tanh()]
    return TensorDictModule(torch.nn.Sequential(*parts[:-1]), in_keys=["obs"], out_keys=["logits"])


def ask(pipe, client):
    torch.set_num_threads(1)
    row = TensorDict({"obs": torch.ones(INPUTS)})
    client(row)
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            client(row)
            took.append(time.perf_counter() - began)
        pipe.send(took)


@cache
def pipes_of(count):
    context = multiprocessing.get_context("spawn")
    request, response = TensorDict({"obs": torch.zeros(INPUTS)}), TensorDict({"logits": torch.zeros(OUTPUTS)})
    server = ProcessInferenceServer(
        policy_factory=policy,
        transport=ProcessSlotTransport(request, response, num_slots=count, ctx=context),
        request_spec=request,
        max_batch_size=count,  # it waits for no others: a batch is what has come
        policy_device="cpu",
        output_device="cpu",
        policy_version_key=None,
        mp_context=context,
    ).start()
    pipes = []
    for client in server.clients(count):
        here, there = context.Pipe()
        context.Process(target=ask, args=(there, client), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    return server, pipes


class Rows:
    """All clients ask for one row after the other; `times` has the seconds of each answer of the newest turn."""

    def __init__(self, count):
        self.server, self.pipes = pipes_of(count)

    def clock(self, count):
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(max(1, count // len(self.pipes)))
        self.times = [each for pipe in self.pipes for each in pipe.recv()]
        return time.perf_counter() - began

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        self.server.shutdown()
