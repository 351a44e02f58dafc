"""Files of a former run are put aside, and never deleted."""

import pytest

from memoire.errors import ParameterError
from memoire.rl.resuming import RESUMES, checked_resume, put_aside


def test_a_folder_is_put_aside_under_the_next_free_name(tmp_path):
    for number in (1, 2):
        (tmp_path / "run.cpt").mkdir()
        (tmp_path / "run.cpt" / "samples").write_text(str(number))
        assert put_aside(tmp_path / "run.cpt") == tmp_path / f"run.cpt.former-{number}"
    assert (tmp_path / "run.cpt.former-1" / "samples").read_text() == "1"
    assert put_aside(tmp_path / "run.cpt") is None


def test_what_to_go_on_with_is_one_of_four():
    assert [checked_resume(each) for each in RESUMES] == ["all", "memory", "weights", "none"]
    with pytest.raises(ParameterError, match="resume must be one of 'all', 'memory', 'weights', 'none'"):
        checked_resume("everything")
