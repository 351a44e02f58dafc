"""All calls of those who use a table of prompts: givers, workers, listeners and trainers."""

from __future__ import annotations

from .answering import WorkerCalls
from .giving import GiverCalls
from .listening import ListenerCalls
from .training import TrainerCalls


class PromptCalls(GiverCalls, WorkerCalls, ListenerCalls, TrainerCalls):
    """See `memoire.Prompts`."""
