//! References within a schema: pointers, anchors and ids. Nothing outside a schema is ever read.

use super::{PATH_SHOWN_MAX, SchemaError, escaped, path_of, refused};
use serde_json::Value;
use std::{cell::OnceCell, collections::BTreeMap, fmt::Write};

/// The most anchors and ids.
const ANCHORS_MAX: usize = 2000;
/// The most bytes of the path to a part of a schema. Schemas may nest 64 times, so at that depth their names have 20 letters.
const PLACE_BYTES_MAX: usize = 2048;

/// A schema whose references are resolved.
pub(super) struct References<'a> {
    root: &'a Value,
    /// Places with a name of their own: `#anchor`, or an id. They are collected when the first reference needs them.
    anchors: OnceCell<BTreeMap<String, String>>,
}

impl<'a> References<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, anchors: OnceCell::new() }
    }

    /// Collects the anchors at once, and returns the reason why they are too many.
    pub(super) fn collect(&self) -> Result<(), SchemaError> {
        let anchors = anchors(self.root)?;
        self.anchors.get_or_init(|| anchors);
        Ok(())
    }

    pub(super) fn root(&self) -> &'a Value {
        self.root
    }

    /// The place that a reference names.
    pub(super) fn place_of(&self, reference: &str) -> Option<String> {
        let (base, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let base = if base.is_empty() { "" } else { self.anchor(base)? };
        let place = match fragment.is_empty() || fragment.starts_with('/') {
            true => format!("{base}{}", percent_decoded(fragment)?),
            false => self.anchor(&format!("#{fragment}"))?.to_owned(),
        };
        self.root.pointer(&place).map(|_| place)
    }

    fn anchor(&self, name: &str) -> Option<&str> {
        self.anchors.get_or_init(|| anchors(self.root).unwrap_or_default()).get(name).map(String::as_str)
    }
}

/// The anchors and ids of a schema, and their places.
fn anchors(root: &Value) -> Result<BTreeMap<String, String>, SchemaError> {
    let mut anchors = BTreeMap::new();
    collect(root, &mut String::new(), &mut anchors)?;
    Ok(anchors)
}

fn collect(value: &Value, place: &mut String, anchors: &mut BTreeMap<String, String>) -> Result<(), SchemaError> {
    if place.len() > PLACE_BYTES_MAX {
        let path: String = path_of(place).chars().take(PATH_SHOWN_MAX).collect();
        let problem = format!("the way to this part has more than {PLACE_BYTES_MAX} bytes: use fewer levels, or shorter names");
        return Err(SchemaError { path, problem });
    }
    let length = place.len();
    match value {
        Value::Object(object) => {
            let mut named = Vec::new();
            if let Some(Value::String(anchor)) = object.get("$anchor") {
                named.push(("$anchor", format!("#{anchor}")));
            }
            for key in ["$id", "id"] {
                named.extend(object.get(key).and_then(Value::as_str).map(|id| (key, id.trim_end_matches('#').to_owned())));
            }
            for (key, name) in named {
                anchors.insert(name, place.clone());
                if anchors.len() > ANCHORS_MAX {
                    return Err(refused(place, key, format!("there are more than {ANCHORS_MAX} anchors and ids")));
                }
            }
            for (key, value) in object {
                let _ = write!(place, "/{}", escaped(key));
                collect(value, place, anchors)?;
                place.truncate(length);
            }
        }
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate() {
                let _ = write!(place, "/{i}");
                collect(value, place, anchors)?;
                place.truncate(length);
            }
        }
        _ => {}
    }
    Ok(())
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        match byte {
            b'%' => {
                let hex = std::str::from_utf8(after.get(..2)?).ok()?;
                bytes.push(u8::from_str_radix(hex, 16).ok()?);
                rest = &after[2..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}
