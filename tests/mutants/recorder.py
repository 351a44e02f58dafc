"""Plugin of pytest that records the functions that each test enters: `-p recorder`."""

import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

import pytest
from calls import FOLDER, append, function_of, kernels_reached


class Recorder:
    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._outcome = "passed"

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        self._codes.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._codes, self._outcome = set(), "passed"
        kernels_reached()
        began = time.monotonic()
        threading.settrace(self._called)
        sys.settrace(self._called)
        yield
        sys.settrace(None)
        threading.settrace(None)
        append(
            {
                "test": item.nodeid,
                "seconds": round(time.monotonic() - began, 3),
                "outcome": self._outcome,
                "functions": sorted({name for code in set(self._codes) if (name := function_of(code))}),
                "kernels": kernels_reached(),
            }
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._outcome = report.outcome


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER and (not config.getoption("numprocesses", None) or hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder())
