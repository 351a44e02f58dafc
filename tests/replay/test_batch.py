"""A batch is a mapping of arrays whose targets need no further thought."""

from typing import Any

import numpy as np
import pytest

from memoire.errors import ParameterError
from memoire.replay.batch import ID, Batch, GatheredSamples
from memoire.replay.schema import Schema

B = 3
SCHEMA = Schema(
    {
        "obs": {"image": (np.uint8, (2, 2)), "arm": (np.int64, np.float32)},
        "action": np.int64,
        "reward": np.float32,
        "logp": np.float32,
    }
)


def gathered_for(schema: Schema, frame_stack: int = 1, next_columns: tuple[str, ...] = ()) -> GatheredSamples:
    def side(names: tuple[str, ...], start: int) -> dict[str, Any]:
        columns = {}
        for name in names:
            lead = (B, frame_stack) if schema[name].role == "state" else (B,)
            shape = lead + schema[name].shape
            columns[name] = (np.arange(np.prod(shape)) + start).reshape(shape).astype(schema[name].dtype)
        return columns

    reward = np.arange(B, dtype=np.float32) + 0.5
    return GatheredSamples(
        prev=side(schema.names, 0),
        next=side(schema.states + next_columns, 100),
        reward=reward,
        discount=np.full(B, 0.5, np.float32),
        steps=np.ones(B, np.int32),
        weight=np.ones(B, np.float32),
        ids=np.arange(B),
        age=np.zeros(B, np.float32),
        model_version=np.zeros(B, np.int64),
    )


def batch_for(gathered: GatheredSamples, schema: Schema = SCHEMA, **options: Any) -> Batch:
    return Batch(schema, gathered, np.full(B, 0.25, np.float32), lambda ids, td: (ids, td), **options)


def test_keys_are_the_columns_and_what_a_learner_needs() -> None:
    batch = batch_for(gathered_for(SCHEMA), divisor=2.0, left_out=0.1)
    assert list(batch) == [
        "obs.image", "obs.arm.0", "obs.arm.1", "action", "logp", "reward", "discount",
        "next_obs.image", "next_obs.arm.0", "next_obs.arm.1", "importance", "ids", "steps", "age", "model_version",
    ]  # fmt: skip
    assert len(batch) == 15 and "weight" not in batch and "obs" not in set(batch)
    assert (batch.divisor, batch.left_out) == (2.0, 0.1)


def test_reward_is_the_windows_sum_and_never_the_entrys_own() -> None:
    gathered = gathered_for(SCHEMA)
    batch = batch_for(gathered)
    assert batch["reward"] is gathered.reward is batch.reward
    assert batch.gathered.prev["reward"].tolist() == [0, 1, 2]


def test_nested_observations_are_nested_again() -> None:
    gathered = gathered_for(SCHEMA)
    batch = batch_for(gathered)
    assert batch["obs"].keys() == {"image", "arm"} and isinstance(batch.obs["arm"], tuple)
    assert batch.next_obs["arm"][1] is batch["next_obs.arm.1"]
    assert np.shares_memory(batch["obs.image"], gathered.prev["obs.image"])


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_the_stack_axis_is_there_only_where_frames_are_stacked(frame_stack: int) -> None:
    schema = Schema({"obs": (np.uint8, (2, 2)), "reward": np.float32})
    batch = batch_for(gathered_for(schema, frame_stack), schema)
    shape = (B, 2, 2) if frame_stack == 1 else (B, frame_stack, 2, 2)
    assert batch.obs.shape == batch.next_obs.shape == shape
    assert batch.obs.flags.c_contiguous


def test_other_columns_of_the_next_side_are_called_next() -> None:
    batch = batch_for(gathered_for(SCHEMA, next_columns=("action",)))
    assert batch["next_action"].tolist() == batch.next_action.tolist() == [100, 101, 102]


def test_a_schema_without_reward_has_none() -> None:
    schema = Schema({"obs": np.float32})
    assert list(batch_for(gathered_for(schema), schema))[:3] == ["obs", "discount", "next_obs"]


def test_priorities_go_to_the_batchs_own_memory() -> None:
    gathered = gathered_for(SCHEMA)
    ids, td = batch_for(gathered).update_priorities([1, 2, 3])
    assert ids is gathered.ids and td == [1, 2, 3]


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    batch = batch_for(gathered_for(SCHEMA))
    with pytest.raises(KeyError, match="weights"):
        batch["weights"]
    with pytest.raises(
        AttributeError, match=r"this batch has no 'weight'\. Did you mean 'importance'\? It has obs\.image, "
    ):
        batch.weight
    assert not hasattr(batch, "next_action") and "obs.image" in batch and batch.get("nothing") is None


def test_out_is_filled_and_becomes_the_batchs() -> None:
    batch = batch_for(gathered_for(SCHEMA))
    expected = {name: array.copy() for name, array in batch.items()}
    out = {name: np.empty_like(batch[name]) for name in ("obs.image", "reward", "ids")}
    assert batch.copy_into(out) is batch
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array)
    assert all(batch[name] is array for name, array in out.items())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"weight": np.zeros(B)}, r"out\['weight'\] must be absent: the batch has no array of this name"),
        ({"reward": np.zeros(B)}, r"out\['reward'\] must be an array float32\[3\], got 'float64\[3\]'"),
        ({"reward": np.zeros(4, np.float32)}, r"out\['reward'\] must be an array float32\[3\], got 'float32\[4\]'"),
        ({"reward": [0, 0, 0]}, r"out\['reward'\] must be an array float32\[3\], got 'list'"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_and_nothing_is_copied(out: dict[str, Any], message: str) -> None:
    batch = batch_for(gathered_for(SCHEMA))
    ids = np.full(B, -1)
    with pytest.raises(ParameterError, match=message):
        batch.copy_into({"ids": ids, **out})
    assert ids.tolist() == [-1] * B and batch.ids is not ids


def test_it_prints_its_arrays() -> None:
    assert repr(batch_for(gathered_for(SCHEMA))).startswith("Batch(obs.image: uint8[3, 2, 2], obs.arm.0: int64[3], ")


def test_a_clusters_id_is_a_client_and_a_number() -> None:
    assert ID.itemsize == 24 and ID.names == ("client", "number")
