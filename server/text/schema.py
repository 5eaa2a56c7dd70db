"""JSON Schemas in the form that the grammar library takes: bounded, checked, and rid of what asks for nothing.

The library refuses most of what it does not implement. Refused here is the rest, so that an output always validates:

    class operators    "[a-z&&[^b]]" in a pattern is a set operation to the library and plain characters to ECMA 262
    minProperties      it counts a name that is repeated twice, where names are free
    endless schemas    those that no finite text satisfies, like an object that requires itself

`uniqueItems: false`, `propertyNames` and other keywords that say nothing, or nothing that other keywords could not say,
are put into those that the library knows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote

MAX_BYTES = 256 * 1024
MAX_DEPTH = 96
MAX_SCHEMAS = 10_000
MAX_PROPERTIES = 1000
MAX_REFERENCES = 1000
MAX_ITEMS = 10_000
MAX_STRING = 4096
# A multiple of n is told by an automaton of n states, and one of several numbers by one of their common multiple's.
MAX_MULTIPLE = 10_000

Schema: TypeAlias = dict[str, Any]

_ONE = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAP = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Formats that name a purpose and no shape.
_SHAPELESS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
_NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("$recursiveAnchor", False),
    ("dependencies", {}),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("uniqueItems", False),
)


class SchemaError(ValueError):
    """What cannot be honoured of a schema, and where it stands in it."""


def prepare(text: str) -> Schema:
    """The schema in `text`, ready for the library.

    Raises:
        SchemaError: it is no schema, too large, too deep, without any finite value, or has what is refused here.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise SchemaError(f"the schema is larger than {MAX_BYTES} bytes")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise SchemaError(f"the schema is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise SchemaError(f"the schema is not valid JSON: {error}") from None
    _check_size(schema)
    if schema is True:
        return {}
    if schema is False:
        raise SchemaError("the schema is false, which permits no value")
    if not isinstance(schema, dict):
        raise SchemaError(f"a schema is an object or a boolean, not {_kind(schema)}")
    schema.pop("x-guidance", None)  # the library's own options, which are the server's to set
    _Rewrite().schema(schema, "#")
    if not _Finite(schema).has_value():
        raise SchemaError("the schema permits no finite value: what it requires contains itself")
    return schema


def locate(schema: Schema, keyword: str) -> str:
    """Where `keyword` first stands in a prepared schema, as a JSON pointer; "" where it does not."""
    return next((where for where, node in _walk(schema, "#") if keyword in node), "")


def _kind(value: object) -> str:
    names = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_size(value: Any) -> None:
    """Without recursion, since it is what bounds the depth."""
    level = [value]
    count = 0
    for depth in range(MAX_DEPTH + 1):
        count += len(level)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str) and len(item) > MAX_STRING:
                raise SchemaError(f"a string of {len(item)} characters in the schema is over the limit of {MAX_STRING}")
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            break
        if depth == MAX_DEPTH:
            raise SchemaError(f"the schema is nested more than {MAX_DEPTH} deep")
        level = inner
    if count > 4 * MAX_SCHEMAS:
        raise SchemaError(f"the schema has more than {4 * MAX_SCHEMAS} values")


def _children(schema: Schema, where: str) -> Iterator[tuple[str, Any]]:
    """The subschemas of a schema and their places. Raises SchemaError where a keyword holds none."""
    for key, value in schema.items():
        place = f"{where}/{key}"
        if key in _MAP:
            if not isinstance(value, dict):
                raise SchemaError(f"{place} must be an object of schemas, not {_kind(value)}")
            yield from ((f"{place}/{name.replace('~', '~0').replace('/', '~1')}", item) for name, item in value.items())
        elif key in _LIST or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(f"{place} must be an array of schemas, not {_kind(value)}")
            yield from ((f"{place}/{index}", item) for index, item in enumerate(value))
        elif key in _ONE:
            yield place, value
        elif key == "dependencies" and isinstance(value, dict):
            yield from ((f"{place}/{name}", item) for name, item in value.items() if not isinstance(item, list))


def _walk(schema: Schema, where: str) -> Iterator[tuple[str, Schema]]:
    yield where, schema
    for place, child in _children(schema, where):
        if isinstance(child, dict):
            yield from _walk(child, place)


class _Rewrite:
    """Checks every subschema and rewrites it in place."""

    def __init__(self) -> None:
        self._count = 0
        self._multiples = 1
        self._squares = 0

    def schema(self, schema: Schema, where: str) -> None:
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise SchemaError(f"the schema has more than {MAX_SCHEMAS} subschemas")
        for keyword, value in _NEUTRAL:
            if keyword in schema and type(schema[keyword]) is type(value) and schema[keyword] == value:
                del schema[keyword]
        if "if" not in schema:
            schema.pop("then", None)
            schema.pop("else", None)
        if "contains" not in schema:
            schema.pop("minContains", None)
            schema.pop("maxContains", None)
        if schema.get("format") in _SHAPELESS:
            del schema["format"]
        self._strings(schema, where)
        self._numbers(schema, where)
        if "propertyNames" in schema:
            _name_properties(schema, where)
        self._objects(schema, where)
        self._arrays(schema, where)
        for place, child in _children(schema, where):
            if isinstance(child, dict):
                self.schema(child, place)
            elif not isinstance(child, bool):
                raise SchemaError(f"{place} must be a schema (an object or a boolean), not {_kind(child)}")

    def _arrays(self, schema: Schema, where: str) -> None:
        least = schema.get("minItems")
        if isinstance(least, int) and least > MAX_ITEMS:
            raise SchemaError(f"'minItems' of {least} at {where} is too many; {MAX_ITEMS} are possible")

    def _strings(self, schema: Schema, where: str) -> None:
        patterns = schema.get("patternProperties")
        named = list(patterns) if isinstance(patterns, dict) else []
        for pattern in [schema.get("pattern"), *named]:
            if isinstance(pattern, str) and (operator := _class_operator(pattern)):
                raise SchemaError(
                    f"'{operator}' inside a character class of the pattern at {where} is not supported: escape it"
                )

    def _numbers(self, schema: Schema, where: str) -> None:
        multiple = schema.get("multipleOf")
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or multiple <= 0:
            return  # absent, or for the library to refuse
        digits = int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)))
        self._multiples = math.lcm(self._multiples, digits)
        if self._multiples > MAX_MULTIPLE:
            raise SchemaError(
                f"'multipleOf' at {where} has too many digits: the least common multiple of all in a schema, decimal "
                f"points left out, may be up to {MAX_MULTIPLE}"
            )

    def _objects(self, schema: Schema, where: str) -> None:
        properties = schema.get("properties")
        if isinstance(properties, dict):
            self._squares += len(properties) ** 2  # as the time to compile them
            if self._squares > MAX_PROPERTIES**2:
                raise SchemaError(
                    f"the {len(properties)} properties at {where} are too many; {MAX_PROPERTIES} are possible in one "
                    "object, fewer where there are further large ones"
                )
        least, required = schema.get("minProperties"), schema.get("required")
        has_free_names = schema.get("additionalProperties") is not False or "patternProperties" in schema
        if isinstance(least, int) and has_free_names:
            num_required = len(required) if isinstance(required, list) else 0
            if least > num_required + 1:
                raise SchemaError(
                    f"'minProperties' of {least} at {where} is not supported where names are free, since one might be "
                    "repeated: list the names in 'required'"
                )


def _name_properties(schema: Schema, where: str) -> None:
    """Say `propertyNames` by `properties` or `patternProperties`."""
    names = schema["propertyNames"]
    asked = names if isinstance(names, dict) else {}
    rules = {key: value for key, value in asked.items() if key not in ("type", "title", "description")}
    if asked.get("type", "string") != "string" or not isinstance(names, dict | bool) or names is False:
        return  # for the library to refuse
    if not rules:
        del schema["propertyNames"]
        return
    if "properties" in schema or "patternProperties" in schema:
        return
    value = schema.get("additionalProperties", True)
    listed = [rules["const"]] if "const" in rules else rules.get("enum")
    if len(rules) == 1 and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        schema["properties"] = dict.fromkeys(listed, value)
    elif rules.keys() == {"pattern"}:
        schema["patternProperties"] = {rules["pattern"]: value}
    elif rules.keys() <= {"minLength", "maxLength"} and all(type(length) is int for length in rules.values()):
        least, most = rules.get("minLength", 0), rules.get("maxLength", "")
        schema["patternProperties"] = {f"^[\\s\\S]{{{least},{most}}}$": value}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _class_operator(pattern: str) -> str | None:
    """What inside a character class means one thing to ECMA 262 and another to the library: "[", "&&", "--" or "~~"."""
    plain = re.sub(r"\\.", "..", pattern, flags=re.DOTALL)
    for found in re.finditer(r"\[\^?\]?([^\]]*)", plain):
        if operator := re.search(r"\[|&&|--|~~", found[1]):
            return operator[0]
    return None


def _own_reference(schema: Schema) -> str | None:
    """What the schema refers to, where that is a place in the same document."""
    reference = schema.get("$ref")
    return reference if isinstance(reference, str) and reference.startswith("#") else None


class _Finite:
    """Whether a schema has a finite value: the least fixed point over its references.

    What it cannot see through (references other than into the schema itself) counts as finite.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known = {reference: False for _, node in _walk(root, "#") if (reference := _own_reference(node))}
        if len(self._known) > MAX_REFERENCES:
            raise SchemaError(f"the schema refers to {len(self._known)} places; {MAX_REFERENCES} are possible")

    def has_value(self) -> bool:
        targets = {reference: self._target(reference) for reference in self._known}
        users: dict[str, list[str]] = {reference: [] for reference in targets}
        for reference, target in targets.items():
            nodes = _walk(target, "") if isinstance(target, dict) else ()
            for used in {used for _, node in nodes if (used := _own_reference(node))}:
                users.setdefault(used, []).append(reference)
        pending = list(targets)
        while pending:
            reference = pending.pop()
            if not self._known[reference] and self._schema(targets[reference]):
                self._known[reference] = True
                pending += users[reference]
        return self._schema(self._root)

    def _schema(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        reference = _own_reference(schema)
        if reference and not self._known.get(reference, True):
            return False
        if any(not self._schema(part) for part in schema.get("allOf", ())):
            return False
        for key in ("anyOf", "oneOf"):
            if schema.get(key) and not any(self._schema(part) for part in schema[key]):
                return False
        kinds = schema.get("type")
        if kinds == "object":
            properties, required = schema.get("properties", {}), schema.get("required", ())
            names = required if isinstance(required, list) else ()
            return all(self._schema(properties[name]) for name in names if isinstance(name, str) and name in properties)
        if kinds == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
            first = schema.get("prefixItems", ())
            return self._schema(first[0] if first else schema.get("items", True))
        return True

    def _target(self, reference: str) -> Any:
        """What a reference points to; True where it points to nothing, which is for the library to refuse."""
        node: Any = self._root
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return True  # an anchor
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return True
        return node
