"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen part of the tree. A key that is not declared is an error; so is a value of the wrong type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _a_truth_value_is_no_number(cls, values: Any) -> Any:
        """pydantic would take `true`, which YAML also reads from `yes` and `on`, for the number 1."""
        if isinstance(values, dict):
            for name, field in cls.model_fields.items():
                kinds = get_args(field.annotation) or (field.annotation,)
                if isinstance(values.get(name), bool) and bool not in kinds and (int in kinds or float in kinds):
                    raise ValueError(f"{name} must be a number, not {values[name]}")
        return values
