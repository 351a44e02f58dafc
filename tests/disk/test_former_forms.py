"""Files that an earlier form of memoire wrote are refused by name and stay as they are: tests/vectors/former."""

import shutil
from pathlib import Path

import pytest

from memoire.disk import snapshots as snapshot
from memoire.disk.state_folder import Store
from memoire.errors import DataError, StateForeign

FORMER = Path(__file__).parents[1] / "vectors" / "former"
"""A state folder and a snapshot of four episodes, written in form 2, whose checksums are XXH64."""


def test_a_state_folder_of_the_former_form_is_refused_by_name(tmp_path):
    folder = tmp_path / "state"
    shutil.copytree(FORMER / "state", folder)
    (folder / "database").rename(folder / "state.db")  # a name that no checkout may have
    before = (folder / "state.db").read_bytes()
    with pytest.raises(
        StateForeign, match="was written in form 2, this version of memoire reads and writes form 4"
    ) as found:
        Store(folder, "home")
    assert "Use the version of memoire that wrote it" in str(found.value)
    assert (folder / "state.db").read_bytes() == before


def test_a_snapshot_of_the_former_form_is_refused_by_name():
    with pytest.raises(DataError, match="is a snapshot of a server of form 2, .* this version of memoire reads form 6"):
        snapshot.facts(FORMER / "snapshot.memoire")
