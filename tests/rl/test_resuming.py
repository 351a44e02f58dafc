"""Files of a former run are put aside, and never deleted."""

import pytest

from memoire.errors import ParameterError, StateLocked
from memoire.rl.trainer.saving import RESUMES, begin_fresh, checked_resume, lock_checkpoint, put_aside


def test_a_folder_that_a_trainer_has_is_not_put_aside(tmp_path):
    folder = tmp_path / "run.cpt"
    lock = lock_checkpoint(folder)
    for act in (lambda: put_aside(folder), lambda: lock_checkpoint(folder)):
        with pytest.raises(StateLocked, match=r"the checkpoint folder .* only one trainer may write it"):
            act()
    assert folder.is_dir() and [each.name for each in tmp_path.iterdir()] == ["run.cpt"]
    lock.release()
    assert put_aside(folder) == tmp_path / "run.cpt.former-1"


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


def test_a_run_begins_anew_only_after_a_yes(tmp_path):
    files = [tmp_path / "run.cpt", tmp_path / "run.pth", tmp_path / "absent"]
    for path in files[:2]:
        path.write_text("former")
    asked = []
    with pytest.raises(
        ParameterError, match="--fresh must be the answer yes at a terminal, or --yes beside it, got 'n'"
    ):
        begin_fresh(files, ask=lambda text: asked.append(text) or "n")
    assert len(asked) == 1 and "run.cpt" in asked[0] and "absent" not in asked[0]
    assert all(path.exists() for path in files[:2]), "nothing was changed"
    begin_fresh(files, ask=lambda text: "yes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.cpt.former-1", "run.pth.former-1"]
    begin_fresh(files, ask=lambda text: pytest.fail("there is nothing to ask for"))


def test_without_a_terminal_nobody_says_yes(tmp_path):
    (tmp_path / "run").write_text("former")

    def ask(text):
        raise EOFError

    with pytest.raises(ParameterError, match="--yes"):
        begin_fresh([tmp_path / "run"], ask=ask)
    begin_fresh([tmp_path / "run"], is_sure=True, ask=ask)
    assert not (tmp_path / "run").exists()
