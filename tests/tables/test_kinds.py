"""Kinds of tables: each pool offers what its kind says, and nothing that it does not do."""

import inspect

import numpy as np
import pytest

from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.tables import base as interface
from memoire.tables import registry as kinds
from memoire.tables.registry import PoolPlace
from memoire.tables.table import OpenTable, Table

STORAGES = tuple(kinds.BUILT_IN)
CAPABILITIES = {
    base
    for kind in kinds.known()
    for each in kind.offers
    for base in getattr(interface, each).__mro__
    if inspect.isabstract(base)
}
USUAL = {"obs": np.float32, "action": np.int64, "reward": np.float32}
COLUMNS = {"prompts": {"answer": np.float32}, "keyed": None}


def opened(storage: str) -> OpenTable:
    settings = Table(COLUMNS.get(storage, USUAL), storage=storage)
    place = PoolPlace("own", 1 << 24, Limits(), seed=1)
    return OpenTable("own", settings, settings.kind.make_pool(settings, place))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pool_offers_what_its_kind_says_and_nothing_else(storage: str) -> None:
    table = opened(storage)
    offered = {each for each in CAPABILITIES if isinstance(table.pool, each)}
    said = {base for each in table.kind.offers for base in getattr(interface, each).__mro__ if base in CAPABILITIES}
    assert offered == said and type(table.pool) is table.kind.pool_class()
    others = {name for each in CAPABILITIES if each not in offered for name in vars(each) if not name.startswith("_")}
    owned = {name for each in offered for name in vars(each)} | set(vars(interface.TablePool))
    lies = {name for name in others - owned if callable(getattr(table.pool, name, None))}
    assert not lies, "members of what it does not do"


@pytest.mark.parametrize("storage", STORAGES)
def test_what_a_table_does_not_do_is_refused_with_the_kinds_that_do(storage: str) -> None:
    table = opened(storage)
    for capability in (each for each in CAPABILITIES if hasattr(each, "WANTED")):
        if isinstance(table.pool, capability):
            assert table.offered(capability) is table.asked(capability, "THIS") is table.pool
            continue
        names = kinds.names_of(capability)
        with pytest.raises(ParameterError, match=" or ".join(map(repr, names))) as refused:
            table.offered(capability)
        assert refused.value.value == storage and "{" not in str(refused.value)
        with pytest.raises(ProtocolError, match=f"stores {storage}; THIS is for {' and '.join(names)}"):
            table.asked(capability, "THIS")


def test_a_batch_of_a_table_without_batches_is_refused_with_the_call_to_use() -> None:
    with pytest.raises(ParameterError, match=r"'caches' or 'episodes' for a batch; here use take\(steps\)"):
        opened("rollouts").offered(interface.DrawsBatches)


def test_a_kind_that_takes_no_pushes_says_what_to_use() -> None:
    for storage in STORAGES:
        table = opened(storage)
        assert (table.pushes is None) == bool(table.kind.no_pushes)
