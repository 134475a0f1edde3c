//! PTX text to modules of statements.

use crate::fault::{Fault, Kind};
use std::{collections::HashMap, fmt, sync::Arc};

/// The origin of an instruction in the sources.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Loc {
    pub(crate) file: Arc<str>,
    pub(crate) line: u32,
    /// The place where the function of that line was inlined.
    pub(crate) within: Option<(Arc<str>, u32)>,
    pub(crate) ptx_line: u32,
    pub(crate) text: Arc<str>,
}

impl fmt::Display for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)?;
        if let Some((file, line)) = &self.within {
            write!(f, " (inlined at {file}:{line})")?;
        }
        write!(f, ", PTX line {}: `{}`", self.ptx_line, self.text)
    }
}

#[derive(Debug)]
pub(crate) enum Item {
    Label(String),
    Open,
    Close,
    /// An instruction or a declaration, without its semicolon.
    Statement(String, Loc),
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Name, size, alignment.
    pub(crate) params: Vec<(String, usize, usize)>,
    pub(crate) threads_max: u32,
    pub(crate) body: Vec<Item>,
}

#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) entries: Vec<Entry>,
    /// Shared variables outside of kernels: name, size (`None`: dynamic), alignment.
    pub(crate) shared: Vec<(String, Option<usize>, usize)>,
}

fn bad(what: impl Into<String>) -> Fault {
    Fault::new(Kind::Unsupported, what)
}

/// The text between `open` and the matching `close`, and what follows; `text` begins after `open`.
fn balanced(text: &str, open: char, close: char) -> Result<(&str, &str), Fault> {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        depth += i32::from(c == open) - i32::from(c == close);
        if depth == 0 {
            return Ok((&text[..at], &text[at + 1..]));
        }
    }
    Err(bad(format!("PTX ends within {open}{close}")))
}

pub(crate) fn parse(text: &str) -> Result<Module, Fault> {
    // Comments become spaces, so that lines keep their numbers.
    let clean: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let mut files: HashMap<u32, Arc<str>> = HashMap::new();
    for line in &clean {
        if let Some(rest) = line.trim().strip_prefix(".file") {
            let (number, name) = rest.trim().split_once(['\t', ' ']).ok_or_else(|| bad("a .file without a name"))?;
            let name = name.trim().trim_matches('"');
            let name = name.rsplit('/').next().unwrap_or(name);
            files.insert(number.trim().parse().map_err(|_| bad("a .file without a number"))?, name.into());
        }
    }
    let text = clean.join("\n");
    let mut module = Module::default();
    let mut rest = &text[..];
    // Only declarations of shared memory matter in the text between kernels.
    while let Some(at) = rest.find(".entry") {
        declarations(&rest[..at], &mut module)?;
        let head = &rest[at + ".entry".len()..];
        let open = head.find(['(', '{']).ok_or_else(|| bad("an .entry without a body"))?;
        let name = head[..open].trim().to_owned();
        let (params, after) = if head[open..].starts_with('(') { balanced(&head[open + 1..], '(', ')')? } else { ("", &head[open..]) };
        let body_at = after.find('{').ok_or_else(|| bad("an .entry without a body"))?;
        let threads_max = after[..body_at].lines().find_map(|line| line.trim().strip_prefix(".maxntid"));
        let threads_max = threads_max.map_or(Ok(1024), |dims| dims.split(',').map(|d| d.trim().parse::<u32>()).product());
        let (body, after_body) = balanced(&after[body_at + 1..], '{', '}')?;
        let line = text[..text.len() - after.len() + body_at].matches('\n').count() as u32 + 1;
        module.entries.push(Entry {
            params: params.split(',').map(str::trim).filter(|p| !p.is_empty()).map(parameter).collect::<Result<_, _>>()?,
            threads_max: threads_max.map_err(|_| bad(format!("the .maxntid of {name}")))?,
            body: items(body, line, &files)?,
            name,
        });
        rest = after_body;
    }
    declarations(rest.split(".file").next().unwrap_or_default(), &mut module)?;
    Ok(module)
}

fn declarations(text: &str, module: &mut Module) -> Result<(), Fault> {
    for statement in text.split(';').map(str::trim) {
        let statement = statement.lines().last().unwrap_or_default().trim();
        if let Some(at) = statement.find(".shared") {
            module.shared.push(shared_variable(&statement[at + ".shared".len()..])?);
        }
    }
    Ok(())
}

/// Parses `.align 16 .b8 name[2304]`; empty brackets stand for a dynamic size.
pub(crate) fn shared_variable(declaration: &str) -> Result<(String, Option<usize>, usize), Fault> {
    let (mut alignment, mut element, mut name) = (1, 1, None);
    let mut words = declaration.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            ".align" => alignment = words.next().and_then(|n| n.parse().ok()).ok_or_else(|| bad(declaration))?,
            _ if word.starts_with('.') => element = size_of_type(&word[1..])?,
            _ => name = Some(word),
        }
    }
    let name = name.ok_or_else(|| bad(format!("`.shared {declaration}`")))?;
    let (name, count) =
        name.split_once('[').map_or((name, Some(1)), |(name, count)| (name, count.trim_end_matches(']').parse::<usize>().ok()));
    Ok((name.to_owned(), count.map(|count| count * element), alignment.max(element)))
}

/// Parses `.param .align 8 .b8 name[768]` or `.param .u64 name`.
fn parameter(text: &str) -> Result<(String, usize, usize), Fault> {
    let declaration = text.strip_prefix(".param").ok_or_else(|| bad(format!("the parameter `{text}`")))?;
    let (name, size, alignment) = shared_variable(declaration)?;
    Ok((name, size.ok_or_else(|| bad(format!("the parameter `{text}`")))?, alignment))
}

pub(crate) fn size_of_type(name: &str) -> Result<usize, Fault> {
    match name {
        "b8" | "u8" | "s8" => Ok(1),
        "b16" | "u16" | "s16" => Ok(2),
        "b32" | "u32" | "s32" | "f32" => Ok(4),
        "b64" | "u64" | "s64" | "f64" => Ok(8),
        _ => Err(bad(format!("the type .{name}"))),
    }
}

fn items(body: &str, first_line: u32, files: &HashMap<u32, Arc<str>>) -> Result<Vec<Item>, Fault> {
    let mut items = Vec::new();
    let mut loc = Loc::default();
    let mut open = String::new();
    for (i, line) in body.split('\n').enumerate() {
        let trimmed = line.trim();
        if open.trim().is_empty() && trimmed.starts_with(".loc") {
            loc = location(trimmed, files)?;
            continue;
        }
        loc.ptx_line = first_line + i as u32;
        for c in line.chars() {
            let empty = open.trim().is_empty();
            match c {
                '{' if empty => items.push(Item::Open),
                '}' if empty => items.push(Item::Close),
                ';' => {
                    let text = open.split_whitespace().collect::<Vec<_>>().join(" ");
                    let shown = if text.len() > 80 { format!("{}…", &text[..80]) } else { text.clone() };
                    items.push(Item::Statement(text, Loc { text: shown.into(), ..loc.clone() }));
                    open.clear();
                }
                ':' if open.trim().starts_with('$') => {
                    items.push(Item::Label(open.trim().to_owned()));
                    open.clear();
                }
                _ => open.push(c),
            }
        }
        open.push(' ');
    }
    Ok(items)
}

/// Parses `.loc 1 60 9, function_name $L, inlined_at 1 178 5`.
fn location(text: &str, files: &HashMap<u32, Arc<str>>) -> Result<Loc, Fault> {
    let pair = |text: &str| -> Option<(Arc<str>, u32)> {
        let mut numbers = text.split_whitespace().map(|n| n.parse::<u32>());
        let (file, line) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        Some((files.get(&file).cloned().unwrap_or_else(|| "?".into()), line))
    };
    let (file, line) = pair(text.trim_start_matches(".loc")).ok_or_else(|| bad(format!("`{text}`")))?;
    let within = text.split("inlined_at").nth(1).and_then(pair);
    Ok(Loc { file, line, within, ..Loc::default() })
}
