"""What request bodies have in common: unknown fields are rejected, and unions say one sentence."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

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


# The names of the penalty on tokens that occur in the text already.
REPEAT_PENALTIES = ("repeat_penalty", "repetition_penalty")
# Options that other servers have, and the values with which they request nothing here. What is
# cached is reused in any case.
REQUEST_NOTHING: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (True, False),
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "ignore_eos": (False,),
    "typical_p": (1,),
    "tfs_z": (1,),
}


class Strict(BaseModel):
    """A body, or a part of one.

    request_nothing: fields that it does not have, and the values with which they are accepted
    """

    model_config = ConfigDict(extra="forbid")
    request_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Remove null fields, since clients send null for options that they do not set, and fields
        that request nothing. Reject the first unknown one, with the nearest known name.
        """
        if not isinstance(given, dict):
            return given
        kept = {
            name: value
            for name, value in given.items()
            if value is not None and not cls._requests_nothing_by(name, given)
        }
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in kept.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.7)
                hint = f" (did you mean {near[0]}?)" if near else ""
                kind = PydanticCustomError("unknown", "{hint}", {"hint": hint})
                found = InitErrorDetails(type=kind, loc=(name,), input=value)
                raise ValidationError.from_exception_data(cls.__name__, [found])
        return kept

    @classmethod
    def _requests_nothing_by(cls, name: str, given: Mapping[str, Any]) -> bool:
        """Return whether a field is not known here, and requests nothing."""
        if name in cls.model_fields or not cls.request_nothing:
            return False
        if name == "repeat_last_n":
            # How many tokens a penalty looks at, which matters only if there is one.
            return all(given.get(each) in (None, 1) for each in REPEAT_PENALTIES)
        return given[name] in cls.request_nothing.get(name, ())
