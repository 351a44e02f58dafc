"""What learners and operators decide: parameters, runs, and that a server is drained. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memoire import arguments
from memoire.errors import MemoireError, ProtocolError
from memoire.pool.desk import Reply
from memoire.pool.tables import OpenTable
from memoire.replay.parameters import Parameters
from memoire.server.recovery import save_parameters
from memoire.server.state import ServerState
from memoire.wire import messages
from memoire.wire.frames import MessageHeader

from .feedback import FeedbackHandler
from .models import ModelsHandler


class ControlHandler:
    """Changes what everybody follows.

    Args:
        on_news: Called when clients should ask soon, once what is new is saved.
    """

    def __init__(
        self, state: ServerState, models: ModelsHandler, feedback: FeedbackHandler, on_news: Callable[[], None]
    ) -> None:
        self._state, self._models, self._feedback, self._on_news = state, models, feedback, on_news

    def control(self, now: float, header: MessageHeader, body: messages.Control, _: Any) -> Reply:
        """Carry out a CONTROL message of a learner or operator: parameters, run, finish and drain, in this order. If
        one of these is wrong, those before it have taken effect.
        """
        table = self._state.tables.numbered(header.table)
        try:
            if body.parameters:
                self.configure(table, body.parameters, discard_mismatched=body.discard_mismatched)
            if body.run:
                self.begin_run(body.run, now)
        except (MemoireError, TypeError) as error:
            raise ProtocolError("parameters", str(error)) from error
        if body.finish:
            self.finish()
        if body.drain:
            self.drain()
        taken = messages.Taken(parameters_version=table.parameters_version, finished=self._state.run.finished)
        return Reply(taken, until_saved=True)

    def configure(
        self, table: OpenTable, changes: Mapping[str, Any], *, discard_mismatched: bool = False
    ) -> Parameters:
        """Change a table's parameters for everyone; its clients hear of it in the reply to their next UPDATE.

        Raises:
            ParameterError: a value is out of its range, or caches are held that were made with another one;
                nothing was changed.
        """
        parameters = table.parameters.replace(**changes)
        if parameters != table.parameters:
            version = table.parameters_version + 1
            table.take_parameters(parameters, version, discard_mismatched=discard_mismatched)
            save_parameters(table, self._state.committer)
            self.announce()
        return parameters

    def announce(self) -> None:
        """Send clients NEWS, so that they send an UPDATE soon and get the changes. NEWS goes out when all changes so
        far are saved.
        """
        self._state.committer.after(self._on_news)

    def begin_run(self, name: str, now: float) -> None:
        """Count this run from now on, from zero or where it ended; the former one stays readable, with its caches gone.

        Raises:
            ParameterError: the name is invalid.
        """
        arguments.name("run", name)
        state = self._state
        if name == state.run.name:
            return
        former = state.runs.begin(name, now)
        state.committer.add_run(former.facts)
        state.committer.add_run(state.run.facts)
        for table in state.tables:
            if table.of_run is not None:
                table.of_run.clear()
            table.limiter.reset()
        self._models.begin_run()
        self._feedback.give_up_all(former)
        state.informed.clear()
        self.announce()

    def finish(self) -> None:
        """The run is over: clients hear of it in their next reply."""
        self._set_finished(True)

    def resume(self) -> None:
        """The run goes on, although it was declared over."""
        self._set_finished(False)

    def _set_finished(self, is_finished: bool) -> None:
        run = self._state.run
        if run.finished != is_finished:
            run.finished = is_finished
            self._state.informed.clear()
            self._state.committer.add_run(run.facts)
            self.announce()

    def drain(self) -> None:
        """Send all clients elsewhere: they hear of it in their next reply, when all that they said is acknowledged.

        New ones are taken only if nobody else takes them. A restart ends it.
        """
        self._state.leaving = True
        self.announce()
