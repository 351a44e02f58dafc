"""The short form of the trial `killed_prompts`: each prompt is trained on once, whoever is killed. Simulated
trials of prompts have the planted mistakes."""

import pytest

from prompt_trial import Trial, ks, run

pytestmark = pytest.mark.processes


def test_each_prompt_is_trained_on_once_an_epoch_whoever_is_killed(tmp_path):
    outcome = run(Trial(str(tmp_path), seconds=60.0))
    assert outcome.violations == [], outcome.figures
    assert outcome.figures["trained"] == 80 and outcome.figures["polls"] > 0


def test_lengths_of_another_distribution_have_a_small_p():
    assert ks([1.0, 2.0, 3.0] * 100, [1.0, 2.0, 3.0] * 100) == 1.0
    assert ks(list(range(300)), [each + 60 for each in range(300)]) < 0.01
