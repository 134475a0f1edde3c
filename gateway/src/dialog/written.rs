//! The strings that clients and tools have written into a dialog: all that can reach a template, except roles.

use super::{Dialog, Message};
use crate::text::tool::Tool;
use minijinja::{Value, value::ValueKind};
use std::{borrow::Cow, collections::BTreeMap, mem};

type Json = serde_json::Value;

impl Dialog {
    /// Calls `look` with every string, names of fields included.
    pub fn each_written(&self, look: &mut impl FnMut(&str)) {
        for message in &self.messages {
            let Message { role: _, content, reasoning, tool_calls, tool_call_id, name, others } = message;
            [content, reasoning, tool_call_id, name].into_iter().flatten().for_each(|text| look(text));
            for call in tool_calls {
                look(&call.id);
                look(&call.name);
                each_in_json(&call.arguments, look);
            }
            each_variable(others, look);
        }
        for tool in &self.tools {
            each_of_tool(tool, look);
        }
        self.reasoning.effort.iter().for_each(|effort| look(effort));
        each_variable(&self.template_kwargs, look);
    }

    /// Changes every string. Names of a message's own fields are changed by `rename`, since the fields are in the order of their names. The
    /// template's variables keep their names.
    pub fn change_written(&mut self, change: &mut impl FnMut(&mut String), rename: &mut impl FnMut(&mut String)) {
        for message in &mut self.messages {
            let Message { role: _, content, reasoning, tool_calls, tool_call_id, name, others } = message;
            [content, reasoning, tool_call_id, name].into_iter().flatten().for_each(&mut *change);
            for call in tool_calls {
                change(&mut call.id);
                change(&mut call.name);
                change_json(&mut call.arguments, change);
            }
            *others = mem::take(others).iter().map(|(name, value)| (changed_text(name, rename), changed(value, change))).collect();
        }
        for Tool { name, description, parameters, strict: _ } in &mut self.tools {
            change(name);
            description.iter_mut().for_each(&mut *change);
            parameters.iter_mut().for_each(|parameters| change_json(parameters, change));
        }
        self.reasoning.effort.iter_mut().for_each(&mut *change);
        self.template_kwargs.values_mut().for_each(|value| *value = changed(value, change));
    }

    /// The texts that safety checks read: all messages, and everything else that the model may see. The strings of one call, one tool or
    /// one set of variables are one text.
    pub fn shown_to_the_model(&self) -> Vec<Cow<'_, str>> {
        let mut texts = Vec::new();
        /// Passes every part of a value to the function that it is given.
        type Parts<'a> = dyn Fn(&mut dyn FnMut(&str)) + 'a;
        let gathered = |gather: &Parts<'_>| {
            let mut text = String::new();
            gather(&mut |part| {
                if !text.is_empty() {
                    text.push('\n');
                }
                text.push_str(part);
            });
            Some(text).filter(|text| !text.is_empty()).map(Cow::Owned)
        };
        for message in &self.messages {
            texts.extend(
                [&message.content, &message.reasoning, &message.name].into_iter().flatten().map(|text| Cow::Borrowed(text.as_str())),
            );
            for call in &message.tool_calls {
                texts.extend(gathered(&|mut look| {
                    look(&call.name);
                    each_in_json(&call.arguments, &mut look);
                }));
            }
            texts.extend(gathered(&|mut look| each_variable(&message.others, &mut look)));
        }
        texts.extend(self.tools.iter().filter_map(|tool| gathered(&|mut look| each_of_tool(tool, &mut look))));
        texts.extend(gathered(&|mut look| each_variable(&self.template_kwargs, &mut look)));
        texts
    }
}

fn each_of_tool(Tool { name, description, parameters, strict: _ }: &Tool, look: &mut impl FnMut(&str)) {
    look(name);
    description.iter().for_each(|description| look(description));
    parameters.iter().for_each(|parameters| each_in_json(parameters, look));
}

fn each_variable(variables: &BTreeMap<String, Value>, look: &mut impl FnMut(&str)) {
    for (name, value) in variables {
        look(name);
        each_in(value, look);
    }
}

fn each_in_json(value: &Json, look: &mut impl FnMut(&str)) {
    match value {
        Json::String(text) => look(text),
        Json::Array(items) => items.iter().for_each(|item| each_in_json(item, look)),
        Json::Object(fields) => fields.iter().for_each(|(name, field)| {
            look(name);
            each_in_json(field, look);
        }),
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

fn change_json(value: &mut Json, change: &mut impl FnMut(&mut String)) {
    match value {
        Json::String(text) => change(text),
        Json::Array(items) => items.iter_mut().for_each(|item| change_json(item, change)),
        Json::Object(fields) => {
            let mut take = |(mut name, mut field): (String, Json)| {
                change(&mut name);
                change_json(&mut field, change);
                (name, field)
            };
            *fields = mem::take(fields).into_iter().map(&mut take).collect();
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => {}
    }
}

fn each_in(value: &Value, look: &mut impl FnMut(&str)) {
    match value.kind() {
        ValueKind::String => value.as_str().into_iter().for_each(&mut *look),
        ValueKind::Seq => value.try_iter().into_iter().flatten().for_each(|item| each_in(&item, look)),
        ValueKind::Map => {
            for name in value.try_iter().into_iter().flatten() {
                name.as_str().into_iter().for_each(&mut *look);
                value.get_item(&name).iter().for_each(|field| each_in(field, look));
            }
        }
        _ => {}
    }
}

fn changed(value: &Value, change: &mut impl FnMut(&mut String)) -> Value {
    match value.kind() {
        ValueKind::String => value.as_str().map_or_else(|| value.clone(), |text| changed_text(text, change).into()),
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| changed(&item, change)).collect(),
        ValueKind::Map => {
            let names = value.try_iter().into_iter().flatten();
            let fields = names.filter_map(|name| {
                let field = changed(&value.get_item(&name).ok()?, change);
                Some((name.as_str().map_or_else(|| name.clone(), |name| changed_text(name, change).into()), field))
            });
            Value::from_pairs(fields)
        }
        _ => value.clone(),
    }
}

fn changed_text(text: &str, change: &mut impl FnMut(&mut String)) -> String {
    let mut text = text.to_owned();
    change(&mut text);
    text
}
