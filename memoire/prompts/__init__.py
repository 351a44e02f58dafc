"""Tables of prompts and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memoire.kinds import Kind, PoolPlace, TableSettings

if TYPE_CHECKING:
    from memoire import Schema
    from memoire.kinds import TablePool


class PromptsKind(Kind):
    """Prompts for language models, the columns being those of an answer."""

    name = holds = room = "prompts"
    weighed = "Scores of the groups that are ready."
    pool = "memoire.prompts.pool:PromptPool"
    figures = "memoire.prompts.table:PromptStats"
    saved = "memoire.prompts.pool:PromptRecord"
    answers = "memoire.prompts.handlers:answers"
    settings = "memoire.prompts.rows:PromptSettings"
    offers = ("HasRoom", "HasCalls", "SavesRows", "PromptPool")
    instead = "memoire.Prompts"
    is_once = may_wait = True
    no_pushes = "this table stores prompts, which are answered by ANSWERS: use memoire.Prompts"

    def schema_class(self) -> type[Schema]:
        """No column of an answer has a role."""
        from memoire.building import RowSchema

        return RowSchema

    def schema_from(self, given: Schema | Mapping[str, Any] | None) -> Schema:
        """The columns of an answer."""
        from memoire.building import row_schema_from

        return row_schema_from("schema", given)

    def make_pool(self, settings: TableSettings, place: PoolPlace) -> TablePool:
        """Refuse columns of which a request has no room for a value, too."""
        from .columns import check_requests

        check_requests(place.name, settings.schema, place.limits.tuning.request_bytes)
        return super().make_pool(settings, place)

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        is_bounded = settings.on_full == "oldest"
        return {"capacity": settings.capacity, "is_bounded": is_bounded, "settings": settings.own}


KIND: Final = PromptsKind()
