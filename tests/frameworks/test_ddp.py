"""Where ranks lie, and by what they talk: NCCL refuses two ranks on one GPU."""

import pytest

from memoire.rl import World

pytestmark = pytest.mark.torch
GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("devices", "here", "device", "backend"),
    [(0, 2, "cpu", GLOO), (1, 2, "cpu", GLOO), (2, 2, "cuda:1", NCCL), (8, 2, "cuda:1", NCCL)],
)
def test_nccl_is_chosen_if_each_rank_of_a_machine_has_a_gpu(devices, here, device, backend):
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(here)}
    assert World.placed(said, devices) == (World(3, 4, device), backend)


def test_one_learner_needs_no_torchrun():
    assert World.placed({}, 0) == (World(), GLOO) and World.placed({}, 1)[0].device == "cuda:0"
