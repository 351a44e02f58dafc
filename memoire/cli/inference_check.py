"""One row there and back: what `memoire doctor --inference` does once a node answers."""

import time
from collections.abc import Callable

import numpy as np

from memoire.inference.policy import RemotePolicy
from memoire.replay.row_schema import RowSchema
from memoire.security.keyfolder import Keys
from memoire.wire import messages


def ask_row(
    endpoint: str, told: messages.Welcome, *, timeout: float, keys: Keys | None, say: Callable[[str], object] = print
) -> None:
    """Ask for the outputs of a row of zeros, whose ragged columns have no element.

    Args:
        told: What the node said of itself.
        say: Takes each line of the findings.

    Raises:
        MemoireError: the node refused, or did not answer.
    """
    inputs, outputs = RowSchema.from_json(told.schema), RowSchema.from_json(told.outputs)
    for name, schema in (("inputs", inputs), ("outputs", outputs)):
        say(f"ok   {name}: {', '.join(f'{column} {form}' for column, form in schema.items())}")
    row = {
        name: [np.zeros((0, *column.element), column.dtype)]
        if column.is_ragged
        else np.zeros((1, *column.shape), column.dtype)
        for name, column in inputs.items()
    }
    with RemotePolicy(endpoint, inputs, outputs, timeout, keys=keys) as policy:
        began = time.monotonic()
        pending = policy.ask(row)
        pending.result()
        seconds = time.monotonic() - began
    say(f"ok   a row is answered within {1e3 * seconds:.1f} ms, by version {pending.version} of the weights")
