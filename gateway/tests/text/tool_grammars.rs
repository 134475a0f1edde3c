//! Grammars that force calls: any output under one is read as calls that follow their schemas. In every format, with marks as tokens or
//! spelled out.

use super::forced::{EOS, TEMPLATES, World};
use serde_json::{Value, json};
use tidemill_gateway::{
    generation::piece::FinishReason,
    text::{tool::Tool, tools::grammar::Forced},
};
use tidemill_grammar::Matcher;
use tidemill_proto::block::Token;

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {
            "n": {"type": "integer", "minimum": -9, "maximum": 99}, "e": {"enum": ["x", "y \"z\""]},
            "l": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/flag"}},
            "o": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 3}}, "additionalProperties": false},
        },
        "$defs": {"flag": {"type": "boolean"}},
    });
    let f = Tool { name: "f".into(), parameters: Some(parameters), strict: true, ..Tool::default() };
    vec![f, Tool { name: "get-time".into(), ..Tool::default() }]
}

fn keeps_to_its_schema(name: &str, arguments: &Value) -> bool {
    let fields = arguments.as_object().unwrap();
    let allowed = |(key, value): (&String, &Value)| match key.as_str() {
        // `-0` is an integer in JSON, and a float to readers.
        "n" => value.as_f64().is_some_and(|n| n.fract() == 0.0 && (-9.0..=99.0).contains(&n)),
        "e" => *value == json!("x") || *value == json!("y \"z\""),
        "l" => value.as_array().is_some_and(|list| list.len() <= 2 && list.iter().all(Value::is_boolean)),
        "o" => value.as_object().is_some_and(|o| o.iter().all(|(k, v)| k == "k" && v.as_str().is_some_and(|v| v.chars().count() <= 3))),
        _ => false,
    };
    match name {
        "f" => fields.contains_key("n") && fields.iter().all(allowed),
        "get-time" => fields.is_empty(),
        _ => false,
    }
}

fn check_calls(world: &World, tokens: &[Token], name: &str) -> usize {
    let piece = world.read(tokens);
    let said = world.text(tokens);
    assert_eq!(piece.finish.unwrap().reason, FinishReason::ToolCalls, "{name}: {said}");
    for call in &piece.calls {
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|error| panic!("{name}: {error}: {said}"));
        assert!(keeps_to_its_schema(call.name.as_deref().unwrap(), &arguments), "{name}: {said}");
    }
    piece.calls.len()
}

#[test]
fn whatever_is_drawn_under_a_forced_format_is_calls() {
    for (name, template) in TEMPLATES {
        for marks in [false, true] {
            let mut world = World::new(template, marks, true, Forced::Any, tools());
            let walks: Vec<_> = (0..40).filter_map(|_| world.walk("", 300)).collect();
            assert!(walks.len() >= 10, "{name}: {}", walks.len());
            let mut most = 0;
            for tokens in walks {
                most = most.max(check_calls(&world, &tokens, name));
                assert_eq!(world.read(&tokens).text, "", "{name}: {}", world.text(&tokens));
            }
            assert!(most > 1, "{name}: several calls");
        }
    }
}

/// Also where the client allows several calls: a grammar has room for one, and no more than one is read.
#[test]
fn a_tool_that_is_named_is_called_once() {
    for (name, template) in TEMPLATES {
        for (marks, parallel) in [(false, true), (true, true), (true, false)] {
            let mut world = World::new(template, marks, parallel, Forced::Named("get-time"), tools());
            let tokens = world.walk("", 100).unwrap_or_else(|| panic!("{name} ends"));
            for said in [tokens.clone(), [tokens.clone(), tokens].concat()] {
                let piece = world.read(&said);
                let arguments: Value = serde_json::from_str(&piece.calls[0].arguments).unwrap();
                assert_eq!((piece.calls.len(), piece.calls[0].name.as_deref(), arguments), (1, Some("get-time"), json!({})), "{name}");
            }
            let mut world = World::new(template, marks, parallel, Forced::Named("f"), tools());
            for _ in 0..5 {
                let Some(tokens) = world.walk("", 300) else { continue };
                assert_eq!(check_calls(&world, &tokens, name), 1, "{name}: {}", world.text(&tokens));
            }
        }
    }
}

#[test]
fn a_thought_may_come_first() {
    for (name, template) in TEMPLATES {
        for (open, marks) in [(false, false), (false, true), (true, false), (true, true)] {
            let template = format!("{template}{{# </think> #}}{{# <think> #}}{}", if open { "<think>\n" } else { "" });
            let mut world = World::new(&template, marks, true, Forced::Any, tools());
            let begin = if open { "" } else { "<think>" };
            let walks: Vec<_> = (0..10).filter_map(|_| world.walk(&format!("{begin}\nWhat? {{}} <\n</think>\n\n"), 300)).collect();
            assert!(!walks.is_empty(), "{name}");
            for tokens in walks {
                check_calls(&world, &tokens, name);
                assert_eq!(world.read(&tokens).reasoning, "What? {} <", "{name}: {}", world.text(&tokens));
            }
        }
    }
}

#[test]
fn strict_tools_keep_to_their_schemas_in_an_answer_that_is_free() {
    for (name, template) in &TEMPLATES[..6] {
        for marks in [false, true] {
            let mut world = World::new(template, marks, true, Forced::Nothing, tools());
            let bare = matches!(*name, "pythonic" | "llama_json");
            let free = world.text(&world.model.tokenizer.encode("Hello {}, how < are [you]?", false).unwrap());
            let compiled = world.compiler.compile(&world.constraint.grammar).unwrap();
            let tokens = world.model.tokenizer.encode(&free, false).unwrap();
            let mut matcher = Matcher::new(&compiled, &world.constraint, &tokens).unwrap();
            assert!(matcher.mask().unwrap().tokens().any(|token| token == EOS), "{name}: text alone is an answer");
            // At the start of a call, only a call may follow.
            let begin = match *name {
                "hermes" => "Look: <tool_call>\n{",
                "qwen_coder" => "Look: <tool_call>\n<function=",
                "mistral_list" => "Look: [TOOL_CALLS][{",
                "mistral" => "Look: [TOOL_CALLS]",
                "pythonic" => "[",
                _ => "{",
            };
            let mut read = 0;
            for _ in 0..30 {
                // Free text after the calls rarely ends by chance.
                let Some(tokens) = world.walk(begin, 150) else { continue };
                let piece = world.read(&tokens);
                assert!(!piece.calls.is_empty(), "{name}: {}", world.text(&tokens));
                assert!(bare || piece.text.starts_with("Look:"), "{name}: {}", world.text(&tokens));
                for call in &piece.calls {
                    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                    assert!(keeps_to_its_schema(call.name.as_deref().unwrap(), &arguments), "{name}: {}", world.text(&tokens));
                }
                read += 1;
            }
            assert!(read > 0 || !bare, "{name}");
        }
    }
}

#[test]
fn text_between_tags_may_be_any_text() {
    let template = TEMPLATES.iter().find(|(name, _)| *name == "qwen_coder").unwrap().1;
    let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]});
    let tool = Tool { name: "write".into(), parameters: Some(parameters), ..Tool::default() };
    for marks in [false, true] {
        let mut world = World::new(template, marks, false, Forced::Any, vec![tool.clone()]);
        let first = "<tool_call>\n<function=write>\n<parameter=s>\nline 1\n\"é\" </param>\n\n</parameter>\n";
        let tokens = world.walk(first, 60).expect("one way is left");
        let piece = world.read(&tokens);
        let arguments: Value = serde_json::from_str(&piece.calls[0].arguments).unwrap();
        assert_eq!(arguments, json!({"s": "line 1\n\"é\" </param>\n"}), "{}", world.text(&tokens));
    }
}
