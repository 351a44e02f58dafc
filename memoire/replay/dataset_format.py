"""What an .npz file of a memory's episodes is made of: a ZIP archive of arrays that are not compressed.

    obs, action, ...        for each entry its columns, [*F]

    memory..about           JSON: the form's number, the schema, the parameters, the capacity, the state of the memory
    memory..episodes        a row for each episode: `EPISODE_ROW`
    memory..bootstrap_value for each episode the value of its final state, [*R]
    memory..init_w, ...     for each entry what is known of it beside its columns: `dataset.FACTS`, number and weight
    memory..final.obs, ...  for each episode whose final state is known that state, [*F]
    memory..state.pages ... the arrays of `memory_state`: where entries lie, and what later draws follow from

A ragged column has its elements one after the other, and beside it `NAME_length` with how many each value has.
"""

from typing import Final

import numpy as np

FORM: Final = 2
OWN: Final = "memory.."  # no column's name begins so
ABOUT: Final = OWN + "about"
EPISODES: Final = OWN + "episodes"
BOOTSTRAP_VALUE: Final = OWN + "bootstrap_value"
FINAL: Final = OWN + "final."
STATE: Final = OWN + "state."
EPISODE_ROW: Final = np.dtype(
    [
        ("length", "<i8"),
        ("multiplier", "<f8"),
        ("final", "<i8"),  # row of the final states; -1: nobody said
        ("terminated", "|i1"),  # 1, 0, or -1: nobody said how it ended
        ("update_value", "|u1"),
        ("update_weight", "|u1"),
        ("is_open", "|u1"),
    ]
)
