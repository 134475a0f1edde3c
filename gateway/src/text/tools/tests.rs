//! Every format: its calls are read, however the text is cut into pieces.

use super::format::{Call, Script};
use super::{
    super::{
        config::ModelConfig,
        output::{OutputRules, Splitter},
    },
    *,
};
use crate::text::events::Event;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// An answer's text and calls, with arguments as text.
#[derive(Clone, Debug, Default, PartialEq)]
struct Read {
    text: String,
    calls: Vec<(String, String)>,
}

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"},
        "b": {"type": ["boolean", "null"]}, "any": {}, "m": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    }});
    let tool = |name: &str| Tool { name: name.into(), parameters: Some(parameters.clone()), ..Tool::default() };
    ["f", "get_weather", "mcp.look-up"].map(tool).into()
}

fn rules(format: &'static ToolFormat) -> OutputRules {
    OutputRules { calls: Some(Calls::new(format, &tools(), true, None)), ..OutputRules::default() }
}

fn read_pieces<'a>(format: &'static ToolFormat, pieces: impl IntoIterator<Item = &'a str>) -> Read {
    read_to(&rules(format), false, pieces)
}

/// Reads pieces to the end, or to where the text was cut.
fn read_to<'a>(rules: &OutputRules, cut: bool, pieces: impl IntoIterator<Item = &'a str>) -> Read {
    let mut splitter = Splitter::new(rules);
    let mut read = Read::default();
    let mut take = |events: Vec<Event>| {
        for event in events {
            match event {
                Event::Text(text) => read.text += &text,
                Event::Call(name) => read.calls.push((name, String::new())),
                Event::Arguments(json) => read.calls.last_mut().unwrap().1 += &json,
                Event::Thought(_) => unreachable!("no thoughts here"),
            }
        }
    };
    pieces.into_iter().for_each(|piece| take(splitter.push(piece)));
    take(splitter.finish(cut));
    read
}

fn read(format: &'static ToolFormat, text: &str) -> Read {
    read_pieces(format, [text])
}

fn reads(text: &str, calls: &[(&str, &str)]) -> Read {
    let calls = calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned()));
    Read { text: text.into(), calls: calls.collect() }
}

const ALL: [&ToolFormat; 7] =
    [&hermes::FORMAT, &llama_json::FORMAT, &pythonic::FORMAT, &qwen_coder::FORMAT, &mistral::LIST, &mistral::NAMED, &plain::FORMAT];

#[test]
fn hermes_calls() {
    let read = |text: &str| read(&hermes::FORMAT, text);
    let call = r#"<tool_call>
{"name": "f", "arguments": {"s": "}\"</tool_call>"}}
</tool_call>"#;
    let arguments = r#"{"s": "}\"</tool_call>"}"#;
    assert_eq!(read(call), reads("", &[("f", arguments)]));
    assert_eq!(read(&format!("Let me see.\n\n{call}\n{call}\n")), reads("Let me see.", &[("f", arguments), ("f", arguments)]));
    assert_eq!(read(&format!("{call} And then?\n")).text, " And then?\n");
    assert_eq!(read("<tool_call>{\"arguments\": {\"n\": 1}, \"id\": 7, \"name\": \"f\"}</tool_call>"), reads("", &[("f", "{\"n\": 1}")]));
    for nothing in ["", ", \"arguments\": {}", ", \"arguments\": null", ", \"arguments\": \"\"", ", \"arguments\": \"{}\""] {
        assert_eq!(read(&format!("<tool_call>\n{{\"name\": \"f\"{nothing}}}\n</tool_call>")), reads("", &[("f", "{}")]), "{nothing}");
    }
    assert_eq!(read(r#"<tool_call>{"name": "f", "arguments": "{\"n\": 2}"}</tool_call>"#), reads("", &[("f", r#"{"n": 2}"#)]));
    let two = r#"<tool_call>{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}</tool_call>"#;
    assert_eq!(read(two), reads("", &[("f", "{}"), ("g", "{}")]));
}

#[test]
fn what_is_no_call_is_text_to_the_last_character() {
    for text in [
        "<tool_call>",
        "<tool_call> hello",
        "a <tool_call>\n{\"name\": 3}\n</tool_call> b",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {'a': 1}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>[{\"name\": \"f\"}]</tool_call>",
        "a < b <tool <tool_calls> \n ",
    ] {
        assert_eq!(read(&hermes::FORMAT, text), reads(text, &[]));
    }
    for text in ["[f]", "[f](x)", "[g()]", "[f(1)]", "[]", "a [f()]", "[f(s=\"x\""] {
        assert_eq!(read(&pythonic::FORMAT, text), reads(text, &[]));
    }
    for text in [
        "{}",
        "{\"name\": \"Bob\", \"parameters\": {}}",
        "a {\"name\": \"f\", \"parameters\": {}}",
        "{\"a\": {\"name\": \"f\"}}",
        "{\"name\": \"f\"",
    ] {
        assert_eq!(read(&llama_json::FORMAT, text), reads(text, &[]));
    }
    for text in ["<function>", "<function=>x", "<tool_call>\n{}", "<tool_call>\n<function=f", "<function =f>"] {
        assert_eq!(read(&qwen_coder::FORMAT, text), reads(text, &[]));
    }
    for text in
        ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]f[X]{}", "[TOOL_CALLS]f g{}", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALL]f[ARGS]{}"]
    {
        assert_eq!(read(&mistral::NAMED, text), reads(text, &[]));
    }
}

#[test]
fn a_call_that_was_cut_or_not_closed_is_as_far_as_it_came() {
    let read = |text: &str| read(&hermes::FORMAT, text);
    assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"x"), reads("", &[("f", "{\"s\": \"x")]));
    assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": {\"b\": tru"), reads("", &[("f", "{\"b\": tru")]));
    assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}\n</tool_call>x"), reads("x", &[("f", "{\"n\": 1}")]));
    assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": {\"o\": {}\n</tool_call>x"), reads("x", &[("f", "{\"o\": {}\n")]));
    assert_eq!(read("<tool_call>{\"name\": \"f\", \"arguments\": {}} oops"), reads(" oops", &[("f", "{}")]));
    assert_eq!(read("<tool_call> no <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"), reads("<tool_call> no", &[("f", "{}")]));
}

#[test]
fn no_byte_of_a_mark_or_of_a_calls_beginning_is_text_where_an_answer_was_cut() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let whole = format!("Look:\n{call}\n{call}");
    let forced =
        |format| OutputRules { calls: rules(format).calls.map(|calls| Calls { forced_most: Some(8), ..calls }), ..OutputRules::default() };
    for end in (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)) {
        let Read { text, calls } = read_to(&rules(&hermes::FORMAT), true, [&whole[..end]]);
        let said = "Look:\n".split_at(end.min(6)).0;
        // A single character may be anything.
        assert!(text == said || text == said.trim_end() || text == "Look:\n<", "{text:?} of {:?}", &whole[..end]);
        assert_eq!(calls.iter().filter(|(name, _)| name == "f").count(), calls.len(), "{calls:?}");
        let begun = format!("{call}\n{call}");
        assert_eq!(read_to(&forced(&hermes::FORMAT), true, [&begun[..end.min(begun.len())]]).text, "");
    }
    for (format, cut) in [
        (&llama_json::FORMAT, "{\"name\": \"get_w"),
        (&llama_json::FORMAT, "<|python_tag|>{\"na"),
        (&mistral::NAMED, "[TOOL_CALLS]get_w"),
        (&mistral::LIST, "[TOOL_CALLS] [{\"name"),
        (&qwen_coder::FORMAT, "<tool_call>\n<function=get_w"),
        (&qwen_coder::FORMAT, "<functio"),
        (&pythonic::FORMAT, "<|python_start|>[get_w"),
    ] {
        assert_eq!(read_to(&rules(format), true, [cut]), Read::default(), "{cut}");
        assert_eq!(read_to(&forced(format), true, [cut]), Read::default(), "{cut}");
    }
    assert_eq!(read_to(&rules(&llama_json::FORMAT), true, ["{\"place\": \"Os"]).text, "{\"place\": \"Os", "an answer in JSON");
    assert_eq!(read_to(&rules(&hermes::FORMAT), true, ["2 <"]).text, "2 <");
}

#[test]
fn llama_calls() {
    let read = |text: &str| read(&llama_json::FORMAT, text);
    assert_eq!(read(r#"{"name": "f", "parameters": {"n": "1"}}"#), reads("", &[("f", r#"{"n": "1"}"#)]));
    assert_eq!(read(r#" {"type": "function", "name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}"#).calls.len(), 2);
    assert_eq!(read(r#"<|python_tag|>{"name": "new", "parameters": {}}"#), reads("", &[("new", "{}")]), "a mark means it");
    assert_eq!(read("<|python_tag|>print(1)"), reads("<|python_tag|>print(1)", &[]));
    assert_eq!(read(r#"{"name": "f", "parameters": {}} is how."#), reads(" is how.", &[("f", "{}")]));
}

#[test]
fn python_calls() {
    let read = |text: &str| read(&pythonic::FORMAT, text);
    let two = [("f", r#"{"s":"a)]","n":-1}"#), ("get_weather", r#"{"l":[true,null,{"k":"v"}]}"#)];
    let text = r#"[f(s="a)]", n=-1), get_weather(l=[True, None, {'k': "v"}])]"#;
    assert_eq!(read(text), reads("", &two));
    assert_eq!(read(&format!("Yes. <|python_start|>{text}<|python_end|>\n")), reads("Yes.", &two));
    assert_eq!(read("[mcp.look-up()]"), reads("", &[("mcp.look-up", "{}")]));
    assert_eq!(read("[f(), g()]"), reads(", g()]", &[("f", "{}")]), "no mark, and no such tool");
}

#[test]
fn qwen_coder_calls() {
    let read = |text: &str| read(&qwen_coder::FORMAT, text);
    let call = "<tool_call>\n<function=f>\n<parameter=s>\nline 1\n\"2\" </parameter> <b>\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n\
                <parameter=b>\nTrue\n</parameter>\n<parameter=any>\n[1]\n</parameter>\n<parameter=m>\nx\n</parameter>\n</function>\n</tool_call>";
    let arguments = r#"{"s": "line 1\n\"2\" </parameter> <b>\n", "n": 7, "b": true, "any": [1], "m": "x"}"#;
    assert_eq!(read(call), reads("", &[("f", arguments)]));
    assert_eq!(read("A.\n<function=f>\n</function>\nB."), reads("A.\nB.", &[("f", "{}")]), "the outer tags are often left out");
    assert_eq!(read("<function=f><parameter=n>many</parameter></function>"), reads("", &[("f", r#"{"n": "many"}"#)]));
    assert_eq!(read("<function=f>\n<parameter=s>\na\n</parameter>\n</tool_call>").calls, [("f".into(), r#"{"s": "a"}"#.into())]);
    assert_eq!(read("<function=f>\n<parameter=s>\na\n</para"), reads("", &[("f", "{\"s\": \"a\\n</para")]));
}

/// The schema tells strings without quotation marks from other values, however it is written.
#[test]
fn texts_between_tags_are_the_values_that_their_schema_allows() {
    let definitions = json!({
        "Year": {"enum": ["1999", "2000"], "type": "string"}, "Name": {"$anchor": "name", "type": "string"}, "Count": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
    });
    for (schema, text, expected) in [
        (json!({"$ref": "#/$defs/Year"}), "1999", json!("1999")),
        (json!({"allOf": [{"$ref": "#/$defs/Year"}]}), "1999", json!("1999")),
        (json!({"$ref": "#name"}), "true", json!("true")),
        (json!({"$ref": "#/properties/q"}), "12", json!("12")),
        (json!({"type": ["string", "null"]}), "1999", json!("1999")),
        (json!({"type": ["string", "null"]}), "null", json!(null)),
        (json!({"type": ["string", "null"]}), "True", json!("True")),
        (json!({"type": ["string", "null"], "enum": ["1", null]}), "1", json!("1")),
        (json!({"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}]}), "None", json!(null)),
        (json!({"anyOf": [{"const": "1"}, {"const": 2}]}), "1", json!("1")),
        (json!({"anyOf": [{"const": "1"}, {"const": 2}]}), "2", json!(2)),
        (json!({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Count"}]}), "3", json!(3)),
        (json!({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Count"}]}), "3.5", json!("3.5")),
        (json!({"anyOf": [{"type": "string"}, {"type": "array"}]}), "{}", json!("{}")),
        (json!({"anyOf": [{"type": "string"}, {"type": "array"}]}), "[1]", json!([1])),
        (json!({"$ref": "#/$defs/Count"}), "7", json!(7)),
        (json!({"$ref": "#/$defs/Count"}), "seven", json!("seven")),
        (json!({"$ref": "#/$defs/Loop"}), "5", json!(5)),
        (json!({"$ref": "#/$defs/none"}), "5", json!(5)),
        (json!({}), "5", json!(5)),
    ] {
        let parameters = json!({"properties": {"p": schema, "q": {"type": "string"}}, "$defs": definitions});
        let tool = Tool { name: "f".into(), parameters: Some(parameters), ..Tool::default() };
        let rules = OutputRules { calls: Some(Calls::new(&qwen_coder::FORMAT, &[tool], true, None)), ..OutputRules::default() };
        let read = read_to(&rules, false, [&*format!("<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>")]);
        let arguments: Value = serde_json::from_str(&read.calls[0].1).unwrap();
        assert_eq!(arguments, json!({"p": expected}), "{schema}: {text}");
    }
}

#[test]
fn mistral_calls() {
    for format in [&mistral::LIST, &mistral::NAMED] {
        let read = |text: &str| read(format, text);
        let two = [("f", r#"{"s": "[TOOL_CALLS]"}"#), ("g", "{}")];
        assert_eq!(
            read(r#"[TOOL_CALLS] [{"name": "f", "arguments": {"s": "[TOOL_CALLS]"}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]"#),
            reads("", &two)
        );
        assert_eq!(read(r#"Hm.[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}"#), reads("Hm.", &two));
        assert_eq!(read(r#"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"s": "[TOOL_CALLS]"} [TOOL_CALLS] g {}"#), reads("", &two));
    }
}

#[test]
fn a_templates_own_text_says_which_format_it_is() {
    let format = |source: &str| {
        let template = ChatTemplate::new(source.into(), &ModelConfig::default()).unwrap();
        ToolFormat::of(&template).map(|format| format.name)
    };
    for (source, expected) in [
        ("{{ '<tool_call>\\n' }}{{ '</tool_call>' }}", Some("hermes")),
        ("{{ '<tool_call>\\n<function=' }}{{ '<parameter=' }}{{ '</tool_call>' }}", Some("qwen_coder")),
        ("{{ '[TOOL_CALLS] [' }}", Some("mistral_list")),
        ("{{ '[TOOL_CALLS]' + x + '[ARGS]' }}", Some("mistral")),
        ("{{ '<|python_start|>' }}", Some("pythonic")),
        ("{{ '[func_name1(params_name1=params_value1)]' }}", Some("pythonic")),
        ("{{ '{\"name\": function name, \"parameters\": dictionary of argument name and its value}' }}", Some("llama_json")),
        ("{{ '<|python_tag|>' }}", Some("llama_json")),
        ("{{ '<tool_call>f<arg_key>' }}{{ '</tool_call>' }}", None),
        ("{{ messages }}", None),
    ] {
        assert_eq!(format(source), expected, "{source}");
    }
}

/// Writes calls as the model of this format does.
fn write(format: &ToolFormat, calls: &[(String, Map<String, Value>)]) -> String {
    let Script { begin, join, end, call } = &format.script;
    let written = calls.iter().map(|(name, arguments)| match call {
        Call::Around { before, between, after } => format!("{before}{name}{between}{}{after}", Value::Object(arguments.clone())),
        Call::Python => {
            let arguments: Vec<_> = arguments.iter().map(|(key, value)| format!("{key}={}", python(value))).collect();
            format!("{name}({})", arguments.join(", "))
        }
        Call::Tags { before, after } => {
            let parameter = |(key, value): (&String, &Value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("<parameter={key}>\n{text}\n</parameter>\n")
            };
            let parameters: String = arguments.iter().map(parameter).collect();
            format!("{before}<function={name}>\n{parameters}</function>{after}")
        }
    });
    format!("{begin}{}{end}", written.collect::<Vec<_>>().join(join))
}

fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Array(values) => format!("[{}]", values.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| format!("{}: {}", json!(key), python(value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Text that contains everything that could mislead a reader.
fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-z潮é🌊 \n\"\\\\{}\\[\\]();,:='/<>_|-]{0,6}",
        prop::sample::select(
            &[
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "</function>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "<|python_tag|>",
                "<|python_end|>",
                "{\"name\": \"f\"",
                "\\u00e9",
                "\\n",
                "]",
                "}}",
                "</tool_",
                "<think>",
                "get_weather(",
            ][..]
        )
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..5).prop_map(|parts| parts.concat())
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        (-1e6..1e6f64).prop_map(|x| Value::from((x * 8.0).round() / 8.0)),
        any_text().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(any_text(), inner, 0..4).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Arguments whose types follow [`tools`].
fn any_arguments() -> impl Strategy<Value = Map<String, Value>> {
    let object =
        prop::collection::btree_map("[a-z]{0,3}", any_value(), 0..3).prop_map(|fields| Value::Object(fields.into_iter().collect()));
    let list = prop::collection::vec(any_value(), 0..3).prop_map(Value::from);
    let fields = (
        prop::option::of(any_text()),
        prop::option::of(any::<i64>()),
        prop::option::of(object),
        prop::option::of(list),
        prop::option::of(any::<bool>()),
    );
    fields.prop_map(|(s, n, o, l, b)| {
        let fields = [("s", s.map(Value::from)), ("n", n.map(Value::from)), ("o", o), ("l", l), ("b", b.map(Value::from))];
        fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    })
}

fn any_calls() -> impl Strategy<Value = Vec<(String, Map<String, Value>)>> {
    let name = prop::sample::select(&["f", "get_weather", "mcp.look-up"][..]).prop_map(str::to_owned);
    prop::collection::vec((name, any_arguments()), 1..4)
}

fn cut<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect()
}

fn any_cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..12)
}

/// A text value ends at the format's end mark, so it cannot contain that mark.
fn writable(format: &ToolFormat, calls: &[(String, Map<String, Value>)]) -> bool {
    let ends = |value: &Value| value.to_string().contains("</parameter>");
    !matches!(format.script.call, Call::Tags { .. }) || !calls.iter().any(|(_, arguments)| arguments.values().any(ends))
}

proptest! {
    #[test]
    fn calls_come_out_as_they_were_written(
        format in prop::sample::select(&ALL[..]), before in "[a-zé🌊 .]{0,12}", calls in any_calls(), cuts in any_cuts(),
    ) {
        prop_assume!(writable(format, &calls));
        // If calls have no mark, they are the whole answer.
        let before = if format.bare.is_some() { String::new() } else { before };
        let text = before.clone() + &write(format, &calls);
        let read = read_pieces(format, cut(&text, &cuts));
        prop_assert_eq!(read.text, before.trim_end(), "{}: {}", format.name, text);
        let came: Vec<(String, Value)> = read.calls.iter().map(|(name, arguments)| (name.clone(), serde_json::from_str(arguments).unwrap())).collect();
        let sent: Vec<(String, Value)> = calls.into_iter().map(|(name, arguments)| (name, Value::Object(arguments))).collect();
        prop_assert_eq!(came, sent, "{}: {}", format.name, text);
    }

    #[test]
    fn however_any_text_is_cut_it_reads_the_same(
        format in prop::sample::select(&ALL[..]), parts in prop::collection::vec(any_text(), 0..4), calls in any_calls(), cuts in any_cuts(),
        damage in prop::option::of((any::<prop::sample::Index>(), "[\"{}<>,: a\\\\]")),
    ) {
        let mut text = parts.join(&write(format, &calls));
        if let (Some((at, other)), false) = (damage, text.is_empty()) {
            let at = text.floor_char_boundary(at.index(text.len()));
            let length = text[at..].chars().next().unwrap().len_utf8();
            text.replace_range(at..at + length, &other);
        }
        let whole = read(format, &text);
        prop_assert_eq!(&read_pieces(format, cut(&text, &cuts)), &whole);
        let characters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&read_pieces(format, characters.iter().map(String::as_str)), &whole);
        if whole.calls.is_empty() {
            prop_assert_eq!(whole.text, text, "nothing is lost");
        }
    }
}
