use super::*;

fn prepared(schema: &Value) -> Value {
    let mut document = prepare(schema, Whitespace::None.into()).unwrap().document;
    document.as_object_mut().unwrap().remove("x-guidance");
    document
}

#[test]
fn what_constrains_nothing_is_left_out_and_the_rest_stays_in_order() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "title": "T", "type": "object",
        "properties": {
            "z": {"type": "string", "format": "int64", "description": "d", "discriminator": {"propertyName": "x"}},
            "a": {"type": "array", "uniqueItems": false, "maxItems": 3.0, "propertyNames": true},
        },
        "unevaluatedProperties": false, "then": {"type": "null"},
    });
    let expected = json!({
        "type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "array", "maxItems": 3}}, "additionalProperties": false,
        "$schema": "http://json-schema.org/draft-07/schema#",
    });
    assert_eq!(prepared(&schema).to_string(), expected.to_string());
    assert_eq!(prepared(&json!(true)), json!({}));
}

#[test]
fn references_of_every_kind_name_a_definition() {
    let schema = json!({
        "$id": "https://example.com/tree", "anyOf": [
            {"$ref": "#/$defs/a~1b"}, {"$ref": "#/%24defs/leaf%20node"}, {"$ref": "#twig"}, {"$ref": "#"},
            {"$ref": "https://example.com/tree#/$defs/twig"}, {"$ref": "other"},
        ],
        "$defs": {
            "a/b": {"type": "null"}, "leaf node": {"type": "string"}, "twig": {"$anchor": "twig", "type": "array", "items": {"$ref": "#"}},
            "named": {"$id": "other", "type": "boolean"}, "unused": {"not": {}},
        },
    });
    let rewritten = prepared(&schema);
    let target = |i: usize| {
        let reference = rewritten["anyOf"][i]["$ref"].as_str().unwrap();
        rewritten.pointer(reference.strip_prefix('#').unwrap()).unwrap()["type"].clone()
    };
    assert_eq!([0, 1, 2, 4, 5].map(target), [json!("null"), json!("string"), json!("array"), json!("array"), json!("boolean")]);
    assert_eq!(target(3), json!(null), "the root has no type");
    assert_eq!(rewritten["$defs"].as_object().unwrap().len(), 5, "what nobody refers to is gone");
}

#[test]
fn one_of_is_any_of_where_its_options_exclude_each_other() {
    let option = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]});
    let schema = json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": option("a"), "b": option("b")}});
    assert!(prepared(&schema).get("anyOf").is_some());
    let same = json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": option("a")}});
    assert_eq!(prepared(&same)["allOf"][0]["anyOf"].as_array().map(Vec::len), Some(2), "each without the other");
    let steps = json!({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]});
    assert!(prepared(&steps).get("anyOf").is_some());
    let strict = prepare(&steps, Terms { strict: true, ..Terms::default() }).unwrap();
    assert!(strict.document.get("oneOf").is_some());
    let both = json!({"anyOf": [true], "oneOf": [{"type": "null"}, {"type": "string"}]});
    assert_eq!(prepared(&both), json!({"anyOf": [true], "allOf": [{"anyOf": [{"type": "null"}, {"type": "string"}]}]}));
}

#[test]
fn what_cannot_be_kept_is_refused_with_its_path() {
    for (schema, path, word) in [
        (json!({"properties": {"tags": {"type": "array", "uniqueItems": true}}}), ".properties.tags.uniqueItems", "strict"),
        (json!({"anyOf": [{"type": "null"}, {"not": {"type": "integer"}}]}), ".anyOf[1].not", "supported of"),
        (json!({"if": {"uniqueItems": true}, "then": {}}), ".if", "condition"),
        (
            json!({"$ref": "#/$defs/x", "$defs": {"x": {"items": {"contains": {}, "maxContains": 1}}}}),
            ".$defs.x.items.maxContains",
            "not supported",
        ),
        (json!({"properties": {"a b": {"format": "iri"}}}), r#".properties["a b"].format"#, "`iri`"),
        (json!({"$ref": "http://elsewhere/schema"}), ".$ref", "names nothing"),
        (json!({"items": {"$ref": "#/$defs/none"}}), ".items.$ref", "names nothing"),
        (json!({"type": "text"}), ".type", "must be null, boolean"),
        (json!({"items": 3}), ".items", "a schema is"),
        (json!({"enum": []}), ".enum", "not empty"),
        (json!({"anyOf": []}), ".anyOf", "not empty"),
        (json!({"properties": []}), ".properties", "an object"),
        (json!({"minLength": -1}), ".minLength", "whole number"),
        (json!({"minimum": "1"}), ".minimum", "must be a number"),
        (json!({"multipleOf": 0}), ".multipleOf", "above 0"),
        (json!({"minItems": 3, "maxItems": 2}), ".minItems", "more than `maxItems`"),
        (json!({"const": 9_007_199_254_740_993_u64}), ".const", "too large"),
        (json!({"required": ["a"], "minProperties": 3}), ".minProperties", "not supported"),
        (json!({"unevaluatedProperties": false, "allOf": [{}]}), ".unevaluatedProperties", "not supported"),
        (json!({"x-guidance": {"lenient": true}}), ".x-guidance", "not supported"),
        (json!("text"), "", "a schema is"),
        (json!(false), "", "no value"),
    ] {
        let error = prepare(&schema, Terms { strict: true, ..Terms::default() }).unwrap_err();
        assert!(error.path == path && error.problem.contains(word), "{schema}: {} {error}", error.path);
    }
}
