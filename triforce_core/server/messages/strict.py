"""What request bodies have in common: unknown fields are rejected, and unions say one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    WrapValidator,
    model_validator,
)

from triforce_core.requests.answer.arguments import check_depth


def _as_json(given: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for what JSON in UTF-8 does not have, though Python reads it."""
    check_depth(given)
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it is not UTF-8 text") from error
    except ValueError as error:
        raise ValueError("a number in it is not finite") from error
    return given


# An object of any content.
JsonObject = Annotated[dict[str, Any], AfterValidator(_as_json)]


def or_says(words: str) -> WrapValidator:
    """Return a validator that reports one sentence instead of an error for each type of a union."""

    def validated(given: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(given)
        except ValidationError as error:
            raise ValueError(words) from error

    return WrapValidator(validated)


def text_alone(*kinds: str) -> BeforeValidator:
    """Return a validator that rejects parts of a content that are not text, by their type.

    kinds: the types of parts that are text
    """

    def validated(content: object) -> object:
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in kinds:
                named = f"of type {kind!r}" if isinstance(kind, str) else "without a type"
                raise ValueError(f"parts {named} are not supported: the model takes text alone")
        return content

    return BeforeValidator(validated)


class Strict(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Remove null fields: clients send null for options that they do not set."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}
