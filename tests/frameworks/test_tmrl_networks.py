"""Networks of memoire.tmrl share memory, stop learning, and act; batches become tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from memoire.errors import DataError  # noqa: E402
from memoire.rl import weights  # noqa: E402
from memoire.rl.batches import on_device  # noqa: E402
from memoire.rl.modelfiles import read_model  # noqa: E402
from memoire.tmrl.actor import ActorModule  # noqa: E402
from memoire.tmrl.nn import copy_shared, no_grad  # noqa: E402

pytestmark = pytest.mark.torch


class Net(ActorModule):
    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    def act(self, obs, test=False):
        return self.layer(obs).numpy()


def test_a_shared_copy_follows_and_is_not_trained():
    net = Net("obs", "act")
    copy = no_grad(copy_shared(net))
    assert (copy.observation_space, copy.action_space) == ("obs", "act")
    assert not any(each.requires_grad for each in copy.parameters())
    assert all(each.requires_grad for each in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net.layer(torch.ones(4, 3)).sum().backward()
    net.layer(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    for (name, mine), (_, theirs) in zip(net.state_dict().items(), copy.state_dict().items(), strict=True):
        if name.endswith("num_batches_tracked"):
            continue
        assert mine.data_ptr() == theirs.data_ptr() and torch.equal(mine, theirs), name


def test_an_actor_needs_its_act():
    with pytest.raises(NotImplementedError):
        ActorModule(None, None).act(None)


def test_batches_become_tensors_of_the_same_memory():
    arrays = (np.zeros((4, 2), np.float32), {"a": np.arange(4)})
    found = on_device(arrays, "cpu")
    found[0][1, 1] = 7.0
    assert arrays[0][1, 1] == 7.0 and found[1]["a"].dtype == torch.int64
    assert on_device(arrays, None) is arrays


def test_weights_of_torch_are_read_and_nothing_else(tmp_path):
    net, path = torch.nn.Linear(3, 2), tmp_path / "a.pth"
    torch.save(net.state_dict(), path)
    assert (weights.unpack(read_model(path))["weight"] == net.weight.detach().numpy()).all()
    torch.save(net, path)
    with pytest.raises(DataError, match="holds more than weights"):
        read_model(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(DataError, match="without tensors by name"):
        read_model(path)
