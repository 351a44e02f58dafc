"""What the API's questions and answers look like to FastAPI: types of parameters, and models that describe answers."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

MAX_ROWS = 1000
MAX_POINTS = 5000
MAX_NAMES = 256
YEAR_9999 = 253_402_300_799.0

Sort = Literal[
    "client", "name", "label", "host", "table", "home", "state", "first_seen", "last_seen", "episodes", "steps",
    "steps_per_second", "return_recent", "return_mean", "generated_bytes", "pushed_caches", "accepted_caches",
    "rejected_caches", "lost_caches", "skipped_caches", "received_bytes", "dropped_lines", "model_version", "model_lag",
]  # fmt: skip
Figure = Literal[
    "episodes", "steps", "steps_per_second", "return_recent", "return_mean", "generated_bytes", "pushed_caches",
    "accepted_caches", "rejected_caches", "lost_caches", "skipped_caches", "received_bytes", "dropped_lines",
    "model_lag",
]  # fmt: skip
State = Literal["active", "silent", "lost", "gone"]
Time = Annotated[float, Query(ge=0.0, le=YEAR_9999, allow_inf_nan=False, description="Seconds since 1970.")]
Text = Annotated[str, Query(max_length=256)]
Run = Annotated[str, Query(max_length=256, description="Name of a run; the one that is counted now by default.")]
Names = Annotated[list[str], Query(max_length=MAX_NAMES, description="Names of figures; all of them by default.")]
Limit = Annotated[int, Query(ge=1, le=MAX_ROWS)]
Offset = Annotated[int, Query(ge=0, le=1 << 31)]
Owner = Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="Id of whose entry is wanted, in hex.")]
Number = Annotated[int, Query(ge=0, le=1 << 62, description="Number of an entry of its owner.")]
Client = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Id of an actor in hex.")]


class ProblemAnswer(BaseModel):
    """What every refusal says."""

    error: str


class Token(BaseModel):
    """What a person who logs in knows."""

    token: str = Field(max_length=1024)


class LoginState(BaseModel):
    """Whether somebody is let in."""

    needs_token: bool
    is_let_in: bool
    software: str


class CsvTable(StreamingResponse):
    """A table."""

    media_type = "text/csv"


class Events(StreamingResponse):
    """An event file."""

    media_type = "application/octet-stream"


class RunFile(StreamingResponse):
    """A run in one file, see collect/run_file.py."""

    media_type = "application/gzip"


class Stream(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"
