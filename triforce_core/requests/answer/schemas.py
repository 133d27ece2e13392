"""What the JSON schema of a tool's parameters says of values that are written as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from triforce_core.requests.answer.arguments import dumped, loaded

# How many references in a row are followed.
_MOST_REFERENCES = 16
_TEXTS = frozenset({"string"})
_TEXTS_OR_NULL = frozenset({"string", "null"})
# Values as Python writes them, which some models do.
_PYTHONS = {"True": True, "False": False, "None": None}


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference within `root` stands for, other schemas as they are, and
    an empty schema, which allows any value, for what is no object.
    """
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def properties_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of the parameters by name."""
    found = resolved(root, root).get("properties")
    return dict(found) if isinstance(found, Mapping) else {}


def required_of(root: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the required parameters."""
    found = resolved(root, root).get("required")
    return frozenset(filter(_is_text, found if isinstance(found, list) else ()))


def is_written_as_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Return whether values are texts, or null, and so are written without quotes."""
    kinds = _kinds(schema, root)
    return bool(kinds) and "string" in kinds and kinds <= _TEXTS_OR_NULL


def choices(schema: object, root: Mapping[str, Any]) -> list[str] | None:
    """Return all values that a schema of texts allows, None if it does not list them."""
    given = resolved(schema, root)
    found = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(found, list):
        texts = ["null" if each is None else each for each in found]
        return texts if all(map(_is_text, texts)) else None
    parts = given.get("anyOf", given.get("oneOf"))
    if not isinstance(parts, list):
        return ["null"] if given.get("type") == "null" else None
    listed = [choices(part, root) for part in parts]
    return None if None in listed else [text for texts in listed for text in texts]


def typed(values: Mapping[str, str], root: Mapping[str, Any]) -> str:
    """Return arguments that were written as text, with the types that the tool's schema gives."""
    properties = properties_of(root)
    return dumped({key: _typed(text, properties.get(key), root) for key, text in values.items()})


def _typed(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    kinds = _kinds(schema, root)
    if kinds == _TEXTS:
        return text
    if is_written_as_text(schema, root):
        return None if text.strip() in ("null", "None") else text
    try:
        value = loaded(text)
    except ValueError:
        return _PYTHONS.get(text.strip(), text)
    fits = not kinds or "string" not in kinds or not kinds.isdisjoint(_kinds_of(value))
    return value if fits else text


def _kinds(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types that a schema allows, None if it allows any or is not understood."""
    given = resolved(schema, root)
    kind = given.get("type")
    if _is_text(kind):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(filter(_is_text, kind))
    if "const" in given:
        return _kinds_of(given["const"])
    if isinstance(given.get("enum"), list):
        return _union(map(_kinds_of, given["enum"]))
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := given.get(name), list) and depth < _MOST_REFERENCES:
            return _union(_kinds(part, root, depth + 1) for part in parts)
    if isinstance(parts := given.get("allOf"), list) and depth < _MOST_REFERENCES:
        return next(filter(None, (_kinds(part, root, depth + 1) for part in parts)), None)
    return None


def _union(each: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    found = list(each)
    return None if None in found else frozenset().union(*found)


def _kinds_of(value: object) -> frozenset[str]:
    """Return the types of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float):
        whole = {"integer"} if value.is_integer() else set()
        return frozenset({"number", *whole})
    kinds = {int: {"integer", "number"}, str: {"string"}, list: {"array"}, dict: {"object"}}
    return frozenset(kinds.get(type(value), {"null"}))


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)
