//! Text stays text: a client's or tool's text never becomes a special token, and never starts a turn.
//!
//! A chat template puts contents between marks, such as `<|im_end|>`, and most marks are tokens of their own. A content that spells out
//! such a mark must not get its token. Templates examine contents while they render (they trim them, split them, check their beginning), so
//! a content cannot be rendered separately. Instead a *seam*, a character that occurs nowhere else, is put inside every mark that a content
//! spells out, before the template is rendered. Afterwards the seams are removed, and the text is tokenized in pieces that are cut there:
//! the only complete marks in a piece are the template's own.
//!
//! A content may also end with the first part of a mark whose rest the template writes, or the other way round. So there are seams at the
//! edges of such contents as well. They become cuts only if a mark does lie across them, so that other prompts keep their tokens.
//!
//! A template that builds marks from clients' words (`'<|' ~ name ~ '|>'`) builds them itself: such a word is not part of a mark that is
//! spelled out, and templates compare words with others.
//!
//! Some templates delimit turns with marks for which their tokenizer has no tokens. The same letters are the same tokens there, whether the
//! template or a client wrote them: a space breaks these. Words without brackets (`USER:`) are left unchanged.

use super::sewn::Sewn;
use super::{template::ChatTemplate, tokenizer::Tokenizer};
use aho_corasick::{AhoCorasick, MatchKind};
use std::{
    borrow::Cow,
    collections::BTreeSet,
    ops::{Bound, RangeInclusive},
};

/// Characters that may serve as seams, since they have no meaning anywhere: plane 15, for private use.
const SEAMS: RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';
/// The roles that templates write into marks.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
/// The first byte of every seam's UTF-8.
const SEAM_LEAD: u8 = 0xF3;

/// The marks of a model.
#[derive(Debug)]
pub struct Marks {
    /// Finds all marks in a text, including overlapping ones; `None` if the model has none.
    find: Option<AhoCorasick>,
    /// Whether each mark, as `find` numbers them, is a token of the tokenizer.
    is_token: Vec<bool>,
    /// The marks that are tokens, and the same with their bytes in reverse order: sorted, so that those with a given first part follow it.
    tokens: BTreeSet<Box<[u8]>>,
    reversed_tokens: BTreeSet<Box<[u8]>>,
    /// The length of the longest proper prefix or suffix of a mark, in bytes.
    edge_bytes_max: usize,
    /// Whether the tokenizer normalizes text before it looks for marks.
    normalizes: bool,
}

/// The treatment of a content's edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edges {
    Guarded,
    /// No seams at the edges: the content is a name by which fields are sorted, so its first character must stay.
    Left,
}

impl Marks {
    pub fn new(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let source = template.map_or("", ChatTemplate::source);
        let tokens: BTreeSet<String> =
            tokenizer.added().filter(|added| added.special || is_mark(&added.content, source)).fold(BTreeSet::new(), |mut marks, added| {
                marks.insert(tokenizer.normalized(&added.content).into_owned());
                marks.insert(added.content.clone());
                marks
            });
        // A mark of one character cannot be cut.
        let tokens: Vec<String> = tokens.into_iter().filter(|mark| mark.chars().nth(1).is_some()).collect();
        let turns: BTreeSet<String> =
            delimiters(source).map(str::to_owned).chain(of_roles(source)).filter(|mark| tokenizer.id_of(mark).is_none()).collect();
        let is_token = tokens.iter().map(|_| true).chain(turns.iter().map(|_| false)).collect();
        let all: Vec<&str> = tokens.iter().chain(&turns).map(String::as_str).collect();
        let find = AhoCorasick::builder().match_kind(MatchKind::Standard).build(&all);
        Self {
            find: find.ok().filter(|_| !all.is_empty()),
            is_token,
            edge_bytes_max: tokens.iter().map(|mark| mark.len() - 1).max().unwrap_or(0),
            tokens: tokens.iter().map(|mark| mark.as_bytes().into()).collect(),
            reversed_tokens: tokens.iter().map(|mark| mark.bytes().rev().collect()).collect(),
            normalizes: tokenizer.normalizes_marks(),
        }
    }

    /// Whether [`guarded`](Self::guarded) might change this text.
    pub fn touch(&self, text: &str) -> bool {
        let Some(find) = &self.find else { return false };
        find.is_match(text)
            || self.begins_inside(text.trim_start())
            || self.ends_inside(text.trim_end())
            || self.normalizes && !text.is_ascii()
    }

    /// Returns a content that can be put into the template, with seams where it could be taken for a mark.
    pub fn guarded<'a>(&self, tokenizer: &Tokenizer, text: &'a str, seam: char, edges: Edges) -> Cow<'a, str> {
        let Some(find) = &self.find else { return Cow::Borrowed(text) };
        let normal = if self.normalizes { tokenizer.normalized(text) } else { Cow::Borrowed(text) };
        // Text that resembles a mark becomes one when the tokenizer normalizes it, so it is normalized now.
        let text = if normal != text && find.is_match(&*normal) { normal } else { Cow::Borrowed(text) };
        // A mark is broken after its first character.
        let mut places = BTreeSet::new();
        for found in find.find_overlapping_iter(&*text) {
            let first = text[found.range()].chars().next().map_or(0, char::len_utf8);
            let broken = if self.is_token[found.pattern().as_usize()] { seam } else { ' ' };
            places.insert((found.start() + first, broken));
        }
        let inner = text.trim();
        let start = text.len() - text.trim_start().len();
        if edges == Edges::Guarded {
            places.extend(self.begins_inside(inner).then_some((start, seam)));
            places.extend(self.ends_inside(inner).then_some((start + inner.len(), seam)));
        }
        if places.is_empty() {
            return text;
        }
        let mut guarded = String::with_capacity(text.len() + places.len() * seam.len_utf8());
        let mut from = 0;
        for (place, broken) in places {
            guarded.push_str(&text[from..place]);
            guarded.push(broken);
            from = place;
        }
        Cow::Owned(guarded + &text[from..])
    }

    /// Removes the seams from a template's rendering of guarded contents.
    pub fn sewn(&self, rendered: &str, seam: char) -> Sewn {
        let mut text = String::with_capacity(rendered.len());
        let mut seams = Vec::new();
        for part in rendered.split(seam) {
            text.push_str(part);
            seams.push(text.len());
        }
        // The last place is the end.
        seams.pop();
        let mut cuts = BTreeSet::new();
        if let Some(find) = &self.find {
            for found in find.find_overlapping_iter(&text) {
                let inside = seams.partition_point(|&seam| seam <= found.start());
                cuts.extend(seams[inside..].iter().take_while(|&&seam| seam < found.end()));
            }
        }
        Sewn { text, cuts: cuts.into_iter().collect() }
    }

    /// Whether a text starts with the rest of a mark.
    fn begins_inside(&self, text: &str) -> bool {
        let most = text.len().min(self.edge_bytes_max);
        let reversed: Vec<u8> = text.as_bytes()[..most].iter().rev().copied().collect();
        (1..=most).any(|end| text.is_char_boundary(end) && begins_another(&self.reversed_tokens, &reversed[most - end..]))
    }

    /// Whether a text ends with the first part of a mark.
    fn ends_inside(&self, text: &str) -> bool {
        let least = text.len().saturating_sub(self.edge_bytes_max);
        (least..text.len()).any(|start| text.is_char_boundary(start) && begins_another(&self.tokens, &text.as_bytes()[start..]))
    }
}

/// Whether one of these starts with `part`, and is longer.
fn begins_another(sorted: &BTreeSet<Box<[u8]>>, part: &[u8]) -> bool {
    let after = (Bound::Excluded(part), Bound::Unbounded);
    sorted.range::<[u8], _>(after).next().is_some_and(|next| next.starts_with(part))
}

/// Notes which seams a text rules out.
pub fn note_taken(text: &str, taken: &mut BTreeSet<char>) {
    if text.as_bytes().contains(&SEAM_LEAD) {
        taken.extend(text.chars().filter(|c| SEAMS.contains(c)));
    }
}

/// Returns a seam that occurs in no text; `None` if all do.
pub fn seam(taken: &BTreeSet<char>) -> Option<char> {
    SEAMS.into_iter().find(|seam| !taken.contains(seam))
}

/// Whether an added token that is not special concerns a dialog's form, rather than ordinary text like the HTML tags and runs of spaces in
/// some vocabularies.
fn is_mark(content: &str, template: &str) -> bool {
    let is_spoken = content.chars().any(|c| !c.is_whitespace() && c != '▁');
    is_spoken && (template.contains(content) || is_delimiter(content))
}

/// Finds the marks in brackets by which the template delimits turns.
fn delimiters(template: &str) -> impl Iterator<Item = &str> {
    let begins = template.char_indices().filter(|(_, c)| matches!(c, '<' | '['));
    begins.filter_map(|(start, c)| {
        let rest = &template[start..];
        let close = if c == '<' { '>' } else { ']' };
        let inner = rest.find(|c: char| c.is_whitespace() || c == close)?;
        let end = if rest.starts_with("<<") && rest[inner..].starts_with(">>") { inner + 2 } else { inner + 1 };
        rest.get(..end).filter(|mark| is_delimiter(mark))
    })
}

/// Lists the marks of a template that builds them from roles: `'<|' + message.role + '|>'`.
fn of_roles(template: &str) -> impl Iterator<Item = String> {
    let makes = template.contains("'<|'") || template.contains("\"<|\"");
    ROLES.iter().filter(move |_| makes).map(|role| format!("<|{role}|>"))
}

/// Whether a mark resembles a delimiter of turns: `<|…|>` (with bars of any width), `[NAME]`, `[/NAME]`, `<<…>>`, `<start_of_…>`,
/// `<end_of_…>`.
fn is_delimiter(mark: &str) -> bool {
    let within =
        |open: &str, close: &str| mark.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).filter(|name| !name.is_empty());
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    let wide = within("<|", "|>").or_else(|| within("<｜", "｜>")).or_else(|| within("<<", ">>"));
    let named = within("[", "]").map(|name| name.strip_prefix('/').unwrap_or(name));
    let is_turn = |name: &str| name.starts_with("start_of_") || name.starts_with("end_of_");
    wide.is_some()
        || named.is_some_and(|name| is_name(name) && name.starts_with(|c: char| c.is_ascii_uppercase()))
        || within("<", ">").is_some_and(is_turn)
}
