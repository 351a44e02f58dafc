"""Tables of prompts for language models, and of the answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memoire.kinds import Kind, PoolPlace, TableSettings

if TYPE_CHECKING:
    from memoire import Schema
    from memoire.kinds import TablePool


class PromptsKind(Kind):
    """Kind of table that stores prompts for language models; its columns are those of an answer."""

    name = holds = room = "prompts"
    weighed = "Scores of the groups that are ready."
    pool = "memoire.prompts.pool:PromptPool"
    figures = "memoire.prompts.table:PromptStats"
    saved = "memoire.prompts.pool:PromptRecord"
    answers = "memoire.prompts.handlers:request_handlers"
    settings = "memoire.prompts.rows:PromptSettings"
    offers = ("HasRoom", "HasCalls", "SavesRows", "PromptPool")
    instead = "memoire.Prompts"
    is_once = may_wait = True
    no_pushes = "this table stores prompts, which workers answer through memoire.Prompts"

    def schema_class(self) -> type[Schema]:
        """Return a class of schemas whose columns have no roles."""
        from memoire.building import RowSchema

        return RowSchema

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """Return the schema of an answer's columns."""
        from memoire.building import row_schema_from

        return row_schema_from("schema", given)

    def make_pool(self, settings: TableSettings, place: PoolPlace) -> TablePool:
        """Make the pool of a table; refuse columns with values that do not fit into a request."""
        from .columns import check_requests

        check_requests(place.name, settings.schema, place.limits.tuning.request_bytes)
        return super().make_pool(settings, place)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        is_bounded = settings.on_full == "drop_oldest"
        return {"capacity": settings.capacity, "is_bounded": is_bounded, "settings": settings.own}


KIND: Final = PromptsKind()
