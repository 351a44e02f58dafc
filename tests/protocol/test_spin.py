"""Spin's models: each property holds, and fails without the rule that it needs. `make protocol` runs all models."""

import shutil

import pytest

from protocol.spin import CHECKS, MISSING, check

QUICK = [each for each in CHECKS if each.model == "finish"]


@pytest.mark.skipif(shutil.which("spin") is None, reason=MISSING)
@pytest.mark.parametrize("asked", QUICK, ids=str)
def test_a_model_has_its_property_and_not_without_its_rule(asked, tmp_path):
    verdict = check(asked, tmp_path)
    assert asked.holds == (not verdict.errors), verdict
    assert verdict.states > 1
