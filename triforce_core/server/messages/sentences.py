"""Readable sentences for the errors that pydantic finds in a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Wordings by pydantic's error type. Names in braces come from the error's context.
_WORDS = {
    "missing": "is missing",
    "unknown": "is not supported by this server{hint}",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_pattern_mismatch": "must match {pattern}",
    "union_tag_invalid": "has the type {tag!r}; known are {expected_tags}",
    "union_tag_not_found": "must be an object with a known type",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} entries or less",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} characters or less",
    "string_unicode": "is not UTF-8 text",
}
_OWN = "Value error, "


def sentence(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return a sentence for an error, and the name of the field it concerns, or None."""
    kind, context = error["type"], error.get("ctx") or {}
    where = [part for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        at = f" at character {where[0]}" if where and isinstance(where[0], int) else ""
        return f"the body is not JSON{at}: {context.get('error', 'it cannot be read')}", None
    if not where:
        return (
            "the body must be a JSON object, sent with the header Content-Type: application/json",
            None,
        )
    name = ".".join(map(str, where))
    if kind == "value_error":
        return f"{name}: {error['msg'].removeprefix(_OWN)}", name
    if kind == "too_long" and not context["max_length"]:
        return f"{name} must be empty", name
    if words := _WORDS.get(kind):
        return f"{name} {words.format_map(context)}", name
    return f"{name}: {error['msg']}", name
