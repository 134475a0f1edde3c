"""JSON Schemas for constrained answers: those that answers must follow, and those that must be refused.

Strings, lists and recursion are bounded where it does not matter, so that answers of a model with random weights end.
"""

import json
import random

from conftest import MODEL

# For `logit_bias`: no line breaks. A grammar allows one wherever JSON allows white space, with up to 40 spaces or tabs after it. Without them,
# an answer to a schema that bounds everything ends after so many tokens, whatever a model draws: its weights are random, and other
# arithmetic, as of AMX, draws other tokens.
ONE_LINE = {str(json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"][token]): -100 for token in ["Ċ", "č"]}

WORD = {"type": "string", "maxLength": 6}


def obj(required=(), extra=False, **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": extra}


def arr(items, most=3, least=0, **more):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def scalars():
    yield from ({"type": name} for name in ("null", "boolean", "integer", "number"))
    yield {"type": ["string", "null"], "maxLength": 4}
    yield {"type": ["boolean", "integer"], "minimum": 0, "maximum": 9}
    for low, high in [(0, 0), (0, 9), (-5, 5), (7, 1234), (-1000, -3), (999, 100001), (-12, 345), (1, 2), (10**6, 10**6 + 7), (-(2**31), 2**31 - 1)]:
        yield {"type": "integer", "minimum": low, "maximum": high}
        yield {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    yield {"type": "integer", "minimum": 17}
    yield {"type": "integer", "exclusiveMaximum": -2}
    for step, low, high in [(2, 0, 100), (5, -20, 20), (7, 1, 700), (25, 100, 1000)]:
        yield {"type": "integer", "multipleOf": step, "minimum": low, "maximum": high}
    for low, high in [(0, 1), (-1.5, 2.25), (0.001, 0.002), (99.5, 1000), (-7, -0.5), (3, 3)]:
        yield {"type": "number", "minimum": low, "maximum": high}
    yield {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    yield {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 10, "$schema": "http://json-schema.org/draft-04/schema#"}


def strings():
    for low, high in [(0, 0), (0, 1), (1, 1), (2, 5), (10, 12), (0, 30), (25, 25)]:
        yield {"type": "string", "minLength": low, "maxLength": high}
    for pattern in [
        "^[a-z]{3}$", "^(foo|bar)-[0-9]{2}$", r"^\d{4}-\d{2}$", "^a?b?c?$", r"^\w{1,8}$", "^[^x]{2,4}$", "^$", r"^\$[0-9]{1,3}\.[0-9]{2}$",
        "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$", r"^#[0-9a-fA-F]{6}$", r'^"[a-z]{1,3}"$', r"^[\u00e0-\u00ff]{2,4}$", r"^(\(\d{3}\))?\d{3}$", "^[äöü]{1,3}ß$",
        r"^/[a-z/]{1,6}$", r"^[\\/]{2}$",
    ]:
        yield {"type": "string", "pattern": pattern, "maxLength": 40}
    yield {"type": "string", "pattern": "ab", "maxLength": 8}
    yield {"type": "string", "pattern": "^[a-c]+$", "minLength": 3, "maxLength": 5}
    yield from ({"type": "string", "format": name, "maxLength": 60} for name in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"))
    yield {"type": "string", "format": "a note to people", "maxLength": 5}


def values():
    yield {"const": "only"}
    yield {"const": None}
    yield {"const": 12.5}
    yield {"const": {"a": [1, {"b": "c"}], "é": True}}
    yield {"enum": ["red", "green", "blue"]}
    yield {"enum": [1, 2.5, "three", None, False, [4], {"five": 5}]}
    yield {"enum": ["naïve", "日本", "emoji 🙂", "tab\tand \"quote\"", "back\\slash", "line\nbreak"]}
    yield {"enum": ["a", "ab", "abc", "abcd"]}
    yield {"enum": ["", " ", "  "]}
    yield {"enum": [-1, 0, 1, 10, 100]}
    yield {"type": "string", "enum": ["x", "y", 3]}
    yield {"enum": [f"choice number {i}" for i in range(60)]}
    yield {"const": "\u007f\u0001 control"}


def arrays():
    yield arr({"type": "boolean"}, 0)
    yield from (arr({"type": "boolean"}, most, least) for least, most in [(0, 1), (1, 1), (2, 4), (5, 5), (0, 8)])
    yield arr(WORD, 3)
    yield arr({"enum": ["a", 1, None]}, 4, 2)
    yield {"type": "array", "maxItems": 2, "items": {"type": ["null", "boolean"]}}
    yield {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["é"]}, {"type": "null"}], "items": False, "minItems": 3}
    yield {"type": "array", "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3}
    yield {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}
    yield {"type": "array", "maxItems": 1, "uniqueItems": True, "items": {"type": "boolean"}}
    yield arr(arr(arr({"type": "null"}, 2), 2), 2)
    yield arr(obj(["a"], a={"type": "boolean"}), 2, 1)


def objects():
    three = {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1, 2]}}
    for required in [(), ("a",), ("c",), ("a", "c"), ("a", "b", "c")]:
        yield obj(required, **three)
    yield obj(("a", "b", "c"), extra={"type": "null"}, **three) | {"maxProperties": 4, "title": "T"}
    yield obj()
    yield obj(["z", "y"], y=WORD, z=WORD)
    yield {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}
    yield {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2}
    yield {"type": "object", "patternProperties": {"^[a-c]{1,2}$": {"type": "null"}}, "additionalProperties": False, "maxProperties": 2}
    yield {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "null"}, "^b_[a-z]{1,3}$": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2}
    yield {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x", "other"], "additionalProperties": {"type": "boolean"}, "maxProperties": 2}
    yield {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1, "maxProperties": 1, "additionalProperties": False}
    yield {"type": "object", "properties": {"a": {"type": "boolean"}}, "unevaluatedProperties": False, "required": ["a"]}
    yield {"type": "object", "properties": {"a": {"type": "null"}, "gone": False}, "additionalProperties": False}
    yield obj(["very long property name, with punctuation: and \"quotes\""], **{"very long property name, with punctuation: and \"quotes\"": {"type": "null"}})
    yield obj(["", " "], **{"": {"type": "boolean"}, " ": {"type": "boolean"}})
    yield obj(["a", "aa", "aaa"], a={"type": "null"}, aa={"type": "null"}, aaa={"type": "null"})
    yield obj([f"p{i}" for i in range(0, 25, 2)], **{f"p{i}": {"type": "boolean"} for i in range(25)})


def combined():
    cat = obj(["kind", "lives"], kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9})
    dog = obj(["kind", "good"], kind={"const": "dog"}, good={"type": "boolean"})
    yield {"anyOf": [{"type": "null"}, {"type": "boolean"}]}
    yield {"anyOf": [cat, dog]}
    yield {"oneOf": [cat, dog]}
    yield {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": cat, "dog": dog}, "discriminator": {"propertyName": "kind"}}
    yield {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "integer", "minimum": 10, "maximum": 15}]}
    yield {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 3}, arr({"type": "null"}, 2)]}
    yield {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c", 4]}]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}
    yield {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}, {"pattern": "^[a-d]*$"}]}
    yield {"allOf": [obj(["a"], extra=True, a={"type": "null"}) | {"maxProperties": 2}, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]}
    yield {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "maxProperties": 2, "anyOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}]}
    yield {"anyOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"allOf": [{"type": "integer"}, {"minimum": 5, "maximum": 6}]}]}
    yield {"anyOf": [{"type": "string", "pattern": "^a{1,4}$"}, {"type": "string", "pattern": "^[ab]{1,2}$"}]}
    yield {"anyOf": [arr({"const": 1}, 2), arr({"const": 2}, 2)]}
    yield {"type": "object", "required": ["v"], "additionalProperties": False, "properties": {"v": {"oneOf": [{"type": "boolean"}, cat]}}}
    yield {"enum": [1, 2, 3, 4], "anyOf": [{"const": 2}, {"const": 4}, {"const": 9}]}
    yield {"type": ["object", "null"], "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    yield {"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}, False]}


def references():
    yield {"$ref": "#/$defs/word", "$defs": {"word": {"enum": ["one", "two"]}}}
    yield {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"type": "boolean"}}}
    yield obj(["x"], x={"$ref": "#/properties/y"}, y={"type": "null"})
    yield {"$defs": {"a/b": {"type": "boolean"}, "c d": {"type": "null"}, "e~f": {"const": 7}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%20d"}, {"$ref": "#/$defs/e~0f"}]}
    yield {"$ref": "#spot", "$defs": {"x": {"$anchor": "spot", "enum": ["here"]}}}
    yield {"$id": "https://example.com/root", "anyOf": [{"$ref": "https://example.com/root#/$defs/x"}], "$defs": {"x": {"type": "boolean"}}}
    node = obj(["value"], value={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})
    yield {"$ref": "#/$defs/node", "$defs": {"node": node}}
    yield {"$defs": {"tree": obj(["leaf"], leaf={"type": "boolean"}, branches=arr({"$ref": "#/$defs/tree"}, 2))}, "$ref": "#/$defs/tree"}
    yield obj(["n"], n={"enum": [1, 2]}, child={"$ref": "#"})
    yield {"$ref": "#/$defs/even", "$defs": {"even": {"anyOf": [{"const": "even"}, arr({"$ref": "#/$defs/odd"}, 1, 1)]}, "odd": {"anyOf": [{"const": "odd"}, arr({"$ref": "#/$defs/even"}, 1, 1)]}}}
    yield {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": {"type": "integer", "minimum": 2}, "b": {"type": "integer", "maximum": 4}}}
    yield {"$defs": {"unused": {"not": {}}}, "type": "boolean"}
    yield {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {"a": {"$ref": "#/$defs/k", "description": "a note beside a reference"}}, "$defs": {"k": {"enum": ["k"]}}}


def unicode():
    for name in ["é", "日本語", "🙂", "ключ", "a b", "quote\"d", "back\\slash", "new\nline", "ﬁ", "\u200b", "e\u0301"]:
        yield obj([name], **{name: {"enum": [name, "x" + name]}})
    yield {"type": "string", "pattern": "^[\u4e00-\u4e05]{1,2}$"}
    yield {"type": "string", "pattern": "^🙂{1,2}$"}


def nested():
    schema = {"type": "boolean"}
    for depth in range(1, 13):
        schema = obj(["d"], d=schema) if depth % 2 else arr(schema, 1, 1)
        yield schema


def everyday():
    yield obj(["name", "age", "email"], name={"type": "string", "minLength": 1, "maxLength": 12}, age={"type": "integer", "minimum": 0, "maximum": 150}, email={"type": "string", "format": "email", "maxLength": 30})
    yield obj(["city", "unit"], city=WORD, unit={"type": "string", "enum": ["celsius", "fahrenheit"]})
    line = obj(["sku", "count", "price"], sku={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, count={"type": "integer", "minimum": 1, "maximum": 99}, price={"type": "number", "minimum": 0, "maximum": 999})
    yield obj(["id", "lines", "paid"], id={"type": "string", "format": "uuid"}, lines=arr(line, 2, 1), paid={"type": "boolean"}, note={"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]})
    step = obj(["explanation", "output"], explanation=WORD, output=WORD)
    yield {"$defs": {"Step": step}, **obj(["steps", "final_answer"], steps=arr({"$ref": "#/$defs/Step"}, 3, 1), final_answer=WORD)}
    yield obj(["label", "score"], label={"enum": ["positive", "negative", "neutral"]}, score={"type": "number", "minimum": 0, "maximum": 1})
    yield obj(["date", "attendees"], date={"type": "string", "format": "date"}, attendees=arr(WORD, 3))
    yield obj(["x", "y"], x={"type": "integer", "minimum": -90, "maximum": 90}, y={"type": "integer", "minimum": -180, "maximum": 180})
    yield {"type": "object", "properties": {"tags": arr({"enum": ["a", "b", "c"]}, 3), "meta": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1}}, "required": ["tags", "meta"], "additionalProperties": False}


# As zod 4 (`z.toJSONSchema`) and Pydantic 2 write them.
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
ZOD_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def libraries():
    yield {"type": "string", "format": "time", "pattern": ZOD_TIME, "maxLength": 20}
    yield {"allOf": [{"type": "string", "format": "time"}, {"pattern": ZOD_TIME, "maxLength": 20}]}
    yield {"type": "string", "format": "email", "pattern": ZOD_EMAIL, "maxLength": 30}
    yield {"type": "string", "format": "email", "maxLength": 30, "allOf": [{"pattern": ZOD_EMAIL}, {"pattern": r"@example\.org$"}]}
    yield {"type": "string", "format": "duration", "pattern": ZOD_DURATION, "maxLength": 20}
    yield {"anyOf": [{"type": "number"}, {"type": "string", "pattern": PYDANTIC_DECIMAL, "maxLength": 8}]}
    yield {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!.*\s).{4,8}$"}
    yield {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "boolean"}, "required": ["a", "b"]}
    yield {"$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}}, "type": "object", "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": {"type": "null"}}
    yield {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "null"}, "maxProperties": 2}
    yield {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 3}, "additionalProperties": {"type": "null"}, "maxProperties": 2}
    yield {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"], "type": "string"}, "minItems": 1}
    yield {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2}
    yield obj(["rx", "n"], rx={"type": "string", "format": "regex", "maxLength": 6}, n={"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1})
    yield obj(["a"], a={"type": "null"}, never={"not": {}})
    yield {"type": "string", "not": {"enum": ["", "a"]}, "maxLength": 3}
    yield {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 4]}}
    kinds = [{"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": {"required": [f"of_{kind}"]}} for kind in "xyz"]
    yield obj(["kind"], kind={"enum": ["x", "y", "z", "w"]}, of_x={"type": "null"}, of_y={"type": "null"}, of_z={"type": "null"}) | {"allOf": kinds}
    yield obj(["kind"], kind={"type": "boolean"}, a={"type": "null"}, b={"type": "null"}) | {"if": {"properties": {"kind": {"const": True}}}, "then": {"required": ["a"]}, "else": {"required": ["b"]}}
    yield obj([], card={"type": "boolean"}, address={"type": "boolean"}) | {"dependentRequired": {"card": ["address"]}}
    yield arr({"enum": ["x", 1]}, 3) | {"contains": {"const": "x"}}
    yield {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "maxLength": 3}]}
    yield obj([], a={"type": "null"}, b={"type": "null"}) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}


def composed(count=60):
    """Schemas put together at random, the same in every run."""
    numbers = random.Random(7)

    def schema(depth):
        leaf = [
            {"type": "boolean"}, {"type": "null"}, {"enum": numbers.sample(["a", "é", 1, None, "long one"], 3)},
            {"type": "integer", "minimum": numbers.randint(-50, 0), "maximum": numbers.randint(0, 500)},
            {"type": "string", "minLength": 1, "maxLength": numbers.randint(1, 6)}, {"type": "string", "pattern": "^[a-f]{2,4}$"},
        ]
        if depth == 0 or numbers.random() < 0.25:
            return numbers.choice(leaf)
        kind = numbers.randrange(5)
        if kind == 0:
            return arr(schema(depth - 1), numbers.randint(1, 3), numbers.randint(0, 1))
        if kind == 1:
            return {"anyOf": [schema(depth - 1) for _ in range(numbers.randint(2, 3))]}
        names = numbers.sample(["id", "name", "ключ", "a b", "kind", "list", "x"], numbers.randint(1, 4))
        return obj([name for name in names if numbers.random() < 0.6], **{name: schema(depth - 1) for name in names})

    return [schema(3) for _ in range(count)]


FOLLOWED = [
    schema
    for family in (scalars, strings, values, arrays, objects, combined, references, unicode, nested, everyday, libraries, composed)
    for schema in family()
]

# Refused schemas, and the paths that their errors name.
REFUSED = [
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    ({"not": {"type": "integer"}}, ".not"),
    ({"if": {"multipleOf": 2}, "then": {"type": "integer"}}, ".if"),
    ({"type": "object", "propertyNames": {"type": "number"}}, ".propertyNames"),
    ({"type": "object", "propertyNames": {"format": "hostname"}}, ".propertyNames"),
    ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, ".maxContains"),
    ({"type": "object", "dependentRequired": {name: ["z"] for name in "abcdefg"}}, ".dependentRequired"),
    ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, ".unevaluatedProperties"),
    ({"$dynamicRef": "#node"}, ".$dynamicRef"),
    ({"$ref": "https://example.com/elsewhere.json"}, ".$ref"),
    ({"$ref": "#/$defs/missing"}, ".$ref"),
    (obj(["a"], a=arr({"type": "string", "format": "iri"})), ".properties.a.items.format"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"not": {"multipleOf": 3}}}}, ".$defs.x.not"),
    ({"type": "string", "pattern": "("}, ""),
    (obj(["a"], a={"type": "string", "pattern": "a(?<=b)"}), ".properties.a.pattern"),
    ({"type": "strnig"}, ".type"),
    ({"properties": []}, ".properties"),
    ({"items": 3}, ".items"),
    ({"minLength": -1}, ".minLength"),
    ({"enum": []}, ".enum"),
    ({"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}, ""),
    ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
    ({"const": 2**60}, ".const"),
    ({"type": "object", "minProperties": 3}, ".minProperties"),
    ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    (False, ""),
]
