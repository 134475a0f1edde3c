//! Expensive schemas, expressions and grammars: each gets an answer, within a budget, and the next request is served.

use crate::support::{Cluster, Script, decode, fixture, program};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use tidemill_gateway::features::grammars::{
    Grammars, Spent,
    helper::{
        CPU_S, Model, Question,
        handle::{AskError, Handle},
    },
};
use tidemill_proto::grammar::Grammar;

/// The most CPU time of a question, with a margin, since the kernel only checks a process's CPU time at its ticks.
const CPU_MAX: Duration = Duration::from_millis(CPU_S * 1000 + 250);

fn helper() -> Handle {
    // The vocabulary's size, padded as in the fixtures' engines.
    let model = Model { tokenizer: fixture("llama3").join("tokenizer.json"), width: 512 };
    Handle::start(program(), vec![model]).unwrap()
}

fn schema(schema: &Value) -> Question {
    Question::Schema { schema: schema.to_string(), terms: Default::default(), model: 0 }
}

fn grammar(grammar: Grammar) -> Question {
    Question::Grammar { grammar, model: 0 }
}

/// A schema that is compared with itself in (1 + √k)^16 ways.
fn compared_endlessly(k: usize) -> Value {
    let x = vec![json!({"$ref": "#/$defs/x"}); k];
    json!({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": x}}})
}

fn intersected(patterns: usize) -> Value {
    let all: Vec<_> = (10..10 + patterns).map(|n| json!({"type": "string", "pattern": format!(".*{n}.*")})).collect();
    json!({"allOf": all})
}

/// A schema with a faulty part among many, each with the same large definition.
fn faulty(properties: usize) -> Value {
    let mut all: Map<_, _> = (0..properties).map(|n| (format!("p{n}"), json!({}))).collect();
    let big: Map<_, _> = (0..2 * properties).map(|n| (format!("q{n}"), json!({}))).collect();
    all.insert("bad".into(), json!({"type": "string", "pattern": "("}));
    json!({"properties": all, "items": {"$ref": "#/$defs/big"}, "$defs": {"big": {"properties": big}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn what_took_a_coordinator_minutes_or_gigabytes_is_refused_and_the_next_request_is_served() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41, 42])).await;
    let client = reqwest::Client::builder().timeout(Duration::from_secs(30)).build().unwrap();
    let ask = async |path: &str, body: Value| {
        let response = client.post(format!("{}{path}", cluster.url)).json(&body).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    let schemas = [1, 2, 3, 4, 20].map(compared_endlessly).into_iter().chain([12, 14, 16, 20, 100].map(intersected)).chain([faulty(1000)]);
    for schema in schemas {
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}});
        let flat = json!({"type": "json_schema", "name": "s", "strict": true, "schema": schema});
        for (path, body, param) in [
            ("/v1/chat/completions", json!({"messages": messages, "response_format": format}), "response_format.json_schema.schema"),
            ("/v1/completions", json!({"prompt": "hi", "response_format": format}), "response_format.json_schema.schema"),
            (
                "/v1/messages",
                json!({"messages": messages, "max_tokens": 9, "output_config": {"format": flat}}),
                "output_config.format.schema",
            ),
            ("/v1/responses", json!({"input": "hi", "text": {"format": flat}}), "text.format.schema"),
        ] {
            let (status, answer) = ask(path, body).await;
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert!(status == 400 && message.contains(param), "{path} {:.80}: {status} {answer}", schema.to_string());
        }
        assert_eq!(reqwest::get(format!("{}/health", cluster.url)).await.unwrap().status(), 200);
    }
    let (_, answer) = ask("/v1/completions", json!({"prompt": "hi", "guided_json": faulty(1000)})).await;
    assert_eq!(answer["error"]["param"], "guided_json.properties.bad", "{answer}");
    let rules: String = (0..20_000).map(|n| format!("\nr{n} ::= \"a\"")).collect();
    let tools: Vec<_> = (0..40_000).map(|n| json!({"type": "function", "function": {"name": format!("f{n}")}})).collect();
    let choices: Vec<_> = (0..20_000).map(|n| n.to_string()).collect();
    let allowed: Vec<_> = (0..40_000).map(|n| json!({"type": "function", "name": format!("f{n}")})).collect();
    for (path, body, word) in [
        ("/v1/completions", json!({"prompt": "hi", "guided_choice": choices}), "guided_choice"),
        ("/v1/completions", json!({"prompt": "hi", "guided_grammar": format!("root ::= r0{rules}")}), "guided_grammar"),
        ("/v1/completions", json!({"prompt": "hi", "guided_regex": "a".repeat(300_000)}), "guided_regex"),
        ("/v1/chat/completions", json!({"messages": messages, "tools": tools}), "1024 is the most"),
        ("/tokenize", json!({"messages": messages, "tools": tools}), "1024 is the most"),
        (
            "/v1/responses",
            json!({"input": "hi", "tools": allowed, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": allowed}}),
            "1024 is the most",
        ),
    ] {
        let (status, answer) = ask(path, body).await;
        assert!(status == 400 && answer.to_string().contains(word), "{path} {word}: {status} {answer}");
    }
    let body = json!({"prompt": "hi", "max_tokens": 3, "guided_json": {"type": "object", "properties": {"a": {"type": "string"}}}});
    let (status, answer) = ask("/v1/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    cluster.stop().await;
}

/// The schema is not rewritten first, so only the process's limits stop it.
#[test]
fn what_the_compiler_does_not_bound_ends_at_the_limits_of_its_process() {
    let helper = helper();
    let before = helper.id();
    for patterns in [20, 100] {
        let mut session = helper.session().unwrap();
        let unbounded = grammar(Grammar::JsonSchema(intersected(patterns).to_string().into()));
        let started = Instant::now();
        assert!(matches!(session.ask(&unbounded), Err(AskError::Refused(error)) if error.to_string().contains("1 s of computing")));
        assert!(started.elapsed() < Duration::from_secs(60), "it does not go on for ever");
        assert!(session.ask(&schema(&json!({}))).is_err(), "the session is over");
    }
    let mut session = helper.session().unwrap();
    assert!(session.ask(&schema(&json!({"type": "string", "maxLength": 9}))).unwrap().contains("maxLength"));
    assert!(session.cpu() < CPU_MAX);
    assert_eq!(helper.id(), before, "it is still the same helper");
}

#[test]
fn a_request_has_one_second_for_all_that_it_asks() {
    let models = vec![Model { tokenizer: fixture("llama3").join("tokenizer.json"), width: 512 }];
    let grammars = Grammars::start(program(), models).unwrap();
    let endless = Grammar::JsonSchema(intersected(20).to_string().into());
    let plain = |n: usize| Grammar::Regex(format!("a{{{n}}}").into());
    let spent = Spent::default();
    let hearing = || grammars.hearing(Some("acme"), 0, Some(&spent));
    hearing().grammar(&plain(1)).unwrap();
    assert!(hearing().grammar(&endless).is_err());
    let started = Instant::now();
    let error = hearing().grammar(&plain(2)).unwrap_err().to_string();
    assert!(error.contains("1 s of computing"), "{error}");
    assert!(started.elapsed() < Duration::from_millis(500), "there is no process for it");
    hearing().grammar(&plain(1)).unwrap();
    let other = Spent::default();
    let mut other = grammars.hearing(Some("acme"), 0, Some(&other));
    other.grammar(&plain(2)).unwrap();
    assert!(other.grammar(&endless).is_err(), "known to take too much");
    other.grammar(&plain(3)).unwrap();
}

#[test]
fn a_session_ends_with_what_is_left_of_its_request() {
    let helper = helper();
    let long = grammar(Grammar::JsonSchema(intersected(12).to_string().into()));
    let takes = {
        let mut session = helper.session().unwrap();
        // It gets an answer, even if it is refused.
        assert!(!matches!(session.ask(&long), Err(AskError::Unavailable(_))));
        session.cpu()
    };
    let mut session = helper.session_within(takes / 4).unwrap();
    assert!(matches!(session.ask(&long), Err(AskError::Refused(error)) if error.to_string().contains("1 s of computing")));
    assert!(helper.session_within(Duration::ZERO).unwrap().ask(&long).is_err());
}

#[test]
fn a_helper_that_has_died_is_started_again() {
    let helper = helper();
    let question = schema(&json!({"type": "integer"}));
    helper.session().unwrap().ask(&question).unwrap();
    let dead = helper.id();
    assert!(Command::new("kill").args(["-9", &dead.to_string()]).status().unwrap().success());
    let again = Instant::now() + Duration::from_secs(30);
    let answered = loop {
        match helper.session().map_err(AskError::from).and_then(|mut session| session.ask(&question)) {
            Err(AskError::Unavailable(_)) if Instant::now() < again => thread::sleep(Duration::from_millis(50)),
            answer => break answer,
        }
    };
    assert!(answered.is_ok(), "{answered:?}");
    assert_ne!(helper.id(), dead);
}

#[test]
fn sessions_run_side_by_side() {
    let helper = helper();
    thread::scope(|scope| {
        for n in 0..16 {
            let helper = &helper;
            scope.spawn(move || {
                let mut session = helper.session().unwrap();
                for length in 0..10 {
                    let text = session.ask(&schema(&json!({"type": "string", "minLength": n, "maxLength": n + length}))).unwrap();
                    assert!(text.contains(&format!("\"maxLength\":{}", n + length)), "{text}");
                }
            });
        }
    });
}

const EXPRESSIONS: [&str; 17] = [
    ".*10.*",
    "^(a+)+$",
    "(a|a|ab)*b",
    "[a-z]{0,1000}",
    r"(\\w+\\s?){1,200}",
    "(.*a){20}",
    "(?=x)",
    "(",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"\\p{L}{2,400}",
    "(.{1,40}){1,40}",
    "((((a?){9}){9}){9}){9}",
    "[^a]*a.{18}",
    "^(?!.*a.{18}$)(?=b|c)",
    r"^(?!\.)(?!.*\.\.)[a-z.]*(?:c(?!d)){1,3}$",
    "(?<=x)",
    "",
];

/// Schemas that refer to, intersect and repeat one another.
fn any_schema() -> impl Strategy<Value = Value> {
    let expression = prop::sample::select(&EXPRESSIONS[..]);
    let count = prop_oneof![0..20_u64, Just(5000), Just(100_000), Just(u64::MAX)];
    let leaf = prop_oneof![
        3 => (0..4_u8).prop_map(|n| json!({"$ref": format!("#/$defs/x{n}")})),
        3 => expression.clone().prop_map(|pattern| json!({"type": "string", "pattern": pattern})),
        1 => (expression, count.clone(), count.clone()).prop_map(|(pattern, min, max)| json!({"pattern": pattern, "minLength": min, "maxLength": max})),
        1 => prop::sample::select(vec!["email", "uri", "date-time", "hostname", "ipv6", "duration"]).prop_map(|format| json!({"format": format})),
        1 => (any::<i32>(), 1..1_000_000_u32).prop_map(|(min, step)| json!({"type": "integer", "minimum": min, "multipleOf": step})),
        1 => (0..2000_u32).prop_map(|n| json!({"enum": (0..n).map(|n| format!("v{n}")).collect::<Vec<_>>()})),
        1 => any::<bool>().prop_map(Value::from),
    ];
    let schema = leaf.prop_recursive(6, 120, 8, move |inner| {
        let many = prop::collection::vec(inner.clone(), 1..9);
        let named = prop::collection::btree_map("[a-c]{1,3}", inner.clone(), 0..8).prop_map(|named| named.into_iter().collect::<Map<_, _>>());
        let patterns = prop::collection::btree_map(prop::sample::select(&EXPRESSIONS[..]).prop_map(str::to_owned), inner.clone(), 0..4)
            .prop_map(|named| named.into_iter().collect::<Map<_, _>>());
        prop_oneof![
            (prop::sample::select(vec!["allOf", "anyOf", "oneOf", "prefixItems"]), many).prop_map(|(key, all)| json!({key: all})),
            (named, patterns, inner.clone(), count.clone()).prop_map(|(named, patterns, rest, min)| {
                let required: Vec<_> = named.keys().take(min as usize % 4).cloned().collect();
                json!({"type": "object", "properties": named, "patternProperties": patterns, "additionalProperties": rest, "required": required})
            }),
            (inner.clone(), count.clone(), count.clone()).prop_map(|(items, min, max)| json!({"items": items, "minItems": min, "maxItems": max})),
            (prop::sample::select(vec!["not", "contains", "propertyNames"]), inner.clone()).prop_map(|(key, one)| json!({key: one})),
            (inner.clone(), inner.clone(), inner.clone()).prop_map(|(a, b, c)| json!({"if": a, "then": b, "else": c})),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| json!({"type": "object", "dependentSchemas": {"a": a, "b": b}})),
            (inner.clone(), count.clone())
                .prop_map(|(items, max)| json!({"type": "array", "uniqueItems": true, "items": items, "maxItems": max})),
            (inner.clone(), inner).prop_map(|(mut a, b)| {
                if let (Some(a), Value::Object(b)) = (a.as_object_mut(), b) {
                    a.extend(b);
                }
                a
            }),
        ]
    });
    (schema.clone(), prop::collection::vec(schema, 4)).prop_map(|(mut whole, definitions)| {
        let definitions: Map<_, _> = definitions.into_iter().enumerate().map(|(n, one)| (format!("x{n}"), one)).collect();
        if let Some(whole) = whole.as_object_mut() {
            whole.insert("$defs".into(), definitions.into());
        }
        whole
    })
}

fn any_expression() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(&EXPRESSIONS[..]).prop_map(str::to_owned);
    leaf.prop_recursive(6, 60, 4, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a}|{b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("{a}{b}")),
            (inner.clone(), 0..2000_u32, 0..2000_u32).prop_map(|(a, least, more)| format!("({a}){{{least},{}}}", least + more)),
            inner.prop_map(|a| format!("({a})*")),
        ]
    })
}

/// Rules that refer to one another in any way, including endless recursion.
fn any_lark() -> impl Strategy<Value = String> {
    let item = prop_oneof![
        2 => (0..6_u8).prop_map(|n| format!("r{n}")),
        2 => (0..4_u8).prop_map(|n| format!("T{n}")),
        1 => Just("\"a\"".to_owned()),
        1 => prop::sample::select(&EXPRESSIONS[..]).prop_map(|expression| format!("/{}/", expression.replace("\\\\", "\\"))),
        1 => any_schema().prop_map(|schema| format!("%json {schema}")),
    ];
    let repeated =
        (item, prop::sample::select(vec!["", "*", "+", "?", "{2,5}", "{0,100000}"])).prop_map(|(item, often)| format!("({item}){often}"));
    let rule = prop::collection::vec(prop::collection::vec(repeated, 0..4).prop_map(|items| items.join(" ")), 1..4)
        .prop_map(|all| all.join(" | "));
    let terminal = prop::collection::vec((any::<bool>(), prop::sample::select(&EXPRESSIONS[..])), 1..10).prop_map(|parts| {
        let part = |(not, expression): (bool, &str)| format!("{}/{}/", if not { "~" } else { "" }, expression.replace("\\\\", "\\"));
        parts.into_iter().map(part).collect::<Vec<_>>().join(" & ")
    });
    (prop::collection::vec(rule, 6), prop::collection::vec(terminal, 4)).prop_map(|(rules, terminals)| {
        let rules = rules.into_iter().enumerate().map(|(n, rule)| format!("r{n}: {rule}\n"));
        let terminals = terminals.into_iter().enumerate().map(|(n, terminal)| format!("T{n}: {terminal}\n"));
        format!("start: r0\n{}", rules.chain(terminals).collect::<String>())
    })
}

#[test]
fn whatever_a_client_writes_is_compiled_or_refused_within_its_budget() {
    let helper = helper();
    let before = helper.id();
    let question = prop_oneof![
        3 => any_schema().prop_map(|value| schema(&value)),
        1 => any_schema().prop_map(|value| grammar(Grammar::JsonSchema(value.to_string().into()))),
        1 => any_expression().prop_map(|text| grammar(Grammar::Regex(text.into()))),
        2 => any_lark().prop_map(|text| grammar(Grammar::Lark(text.into()))),
    ];
    let outcomes = std::cell::RefCell::new(BTreeMap::<&str, u32>::new());
    let mut runner = TestRunner::new(Config { cases: 120, failure_persistence: None, max_shrink_iters: 50, ..Config::default() });
    runner
        .run(&question, |question| {
            let mut session = helper.session().map_err(|error| TestCaseError::fail(error.to_string()))?;
            let outcome = match session.ask(&question) {
                Ok(_) => "compiled",
                Err(AskError::Refused(error)) if error.to_string().contains("s of computing") => "too much work",
                Err(AskError::Refused(_)) => "refused",
                Err(AskError::Unavailable(error)) => return Err(TestCaseError::fail(error.to_string())),
            };
            *outcomes.borrow_mut().entry(outcome).or_default() += 1;
            prop_assert!(session.cpu() < CPU_MAX, "{:?}", session.cpu());
            Ok(())
        })
        .unwrap();
    let outcomes = outcomes.into_inner();
    assert!(outcomes.contains_key("compiled") && outcomes.contains_key("refused"), "{outcomes:?}");
    assert_eq!(helper.id(), before, "the helper lives through all of it");
    println!("{outcomes:?}");
}
