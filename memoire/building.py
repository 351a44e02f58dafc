"""Public building blocks for programs and adapters around memoire, beside the names in `memoire` itself.

Rows and their schemas (`RowSchema`, `Fragment`), samplers of your own (`Sampler`), advantages of rollouts (`gae`,
`vtrace`), the keys of a process (`Keys`), checks of arguments whose errors name the expected values (`whole`, `one_of`,
`checked_names`), named arrays as bytes (`tensors`), files that are written atomically (`record_file`, `replace_file`),
and locks that stay consistent if Ctrl+C interrupts their owner (`Held`, `at_once`). See the docstring of each name.

Each name is imported at its first use.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memoire.version import imports_of as imports_of

if TYPE_CHECKING:
    from memoire._core import Condition as Condition
    from memoire._core import Held as Held
    from memoire._core import PriorityTree as PriorityTree
    from memoire._core import at_once as at_once
    from memoire._core import setting as setting
    from memoire.arguments import MAX_SECONDS as MAX_SECONDS
    from memoire.arguments import ClosingContext as ClosingContext
    from memoire.arguments import checked_names as checked_names
    from memoire.arguments import finite as finite
    from memoire.arguments import hint as hint
    from memoire.arguments import mapping as mapping
    from memoire.arguments import model_version as model_version
    from memoire.arguments import name as name
    from memoire.arguments import one_of as one_of
    from memoire.arguments import process_name as process_name
    from memoire.arguments import refuse_unknown as refuse_unknown
    from memoire.arguments import renamed as renamed
    from memoire.arguments import seconds as seconds
    from memoire.arguments import text as text
    from memoire.arguments import whole as whole
    from memoire.client.waiting import ModelHandle as ModelHandle
    from memoire.disk import record_file as record_file
    from memoire.disk.files import lock_folder as lock_folder
    from memoire.disk.record_file import CheckedFile as CheckedFile
    from memoire.disk.record_file import DamagedRecord as DamagedRecord
    from memoire.disk.record_file import FileKind as FileKind
    from memoire.disk.record_file import Record as Record
    from memoire.disk.record_log import RecordLog as RecordLog
    from memoire.disk.record_log import salvage_log as salvage_log
    from memoire.inference.computation import Function as Function
    from memoire.inference.computation import packed_row as packed_row
    from memoire.inference.computation import packed_rows as packed_rows
    from memoire.inference.computation import unpacked as unpacked
    from memoire.inference.policy import Pending as Pending
    from memoire.models import tensors as tensors
    from memoire.models.model import Model as Model
    from memoire.replay import conversion as conversion
    from memoire.replay import rollouts as rollouts
    from memoire.replay.batch import GatheredSamples as GatheredSamples
    from memoire.replay.batch import TorchBatch as TorchBatch
    from memoire.replay.batch import as_tensor as as_tensor
    from memoire.replay.batch import device_of as device_of
    from memoire.replay.batch import pinned as pinned
    from memoire.replay.columns import ENTRY_BYTES as ENTRY_BYTES
    from memoire.replay.conversion import is_finite as is_finite
    from memoire.replay.files import Fault as Fault
    from memoire.replay.files import FileLock as FileLock
    from memoire.replay.files import no_fault as no_fault
    from memoire.replay.files import remove_abandoned_in as remove_abandoned_in
    from memoire.replay.files import replace_file as replace_file
    from memoire.replay.files import sync as sync
    from memoire.replay.parameters import NAMES as NAMES
    from memoire.replay.parameters import Start as Start
    from memoire.replay.parameters import StrictAttributes as StrictAttributes
    from memoire.replay.parameters import reward_size as reward_size
    from memoire.replay.rollouts import Fragment as Fragment
    from memoire.replay.rollouts import gae as gae
    from memoire.replay.rollouts import vtrace as vtrace
    from memoire.replay.sampling import Annealing as Annealing
    from memoire.replay.sampling import ForkedGenerator as ForkedGenerator
    from memoire.replay.sampling import Sampler as Sampler
    from memoire.replay.sampling import importance as importance
    from memoire.replay.schema import NoColumns as NoColumns
    from memoire.replay.schema import RowSchema as RowSchema
    from memoire.replay.schema import row_schema_from as row_schema_from
    from memoire.replay.schema import schema_from as schema_from
    from memoire.security.access import is_loopback as is_loopback
    from memoire.security.keys import Keys as Keys
    from memoire.security.keys import KeysLike as KeysLike
    from memoire.wire._bytes import checksum as checksum


def lazy_imports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module whose imports under `if TYPE_CHECKING` happen at first use."""

    def imported(name: str) -> Any:
        home = imports_of(module).get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source = importlib.import_module(home)
        is_module = home == module or not hasattr(source, name)
        value = importlib.import_module(f"{home}.{name}") if is_module else getattr(source, name)
        setattr(sys.modules[module], name, value)
        return value

    return imported, lambda: sorted({*vars(sys.modules[module]), *imports_of(module)})


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports(__name__)  # type checkers see the imports above, and missing names
