//! Checks of the documentation: links have targets, pages are short, the contents page lists them all, and results state their origin.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Component, Path, PathBuf},
};

/// The most lines of a page. A longer one must be split.
const LINES_MAX: usize = 600;

/// Pages of other projects that comments refer to.
const FOREIGN: [&str; 1] = ["docs/gguf.md"];

/// Directories without our own files.
const SKIPPED: [&str; 3] = ["node_modules", "target", "__pycache__"];

/// Extensions of files whose comments and strings refer to pages.
const NAMING: [&str; 9] = ["rs", "cu", "cuh", "py", "js", "sh", "toml", "html", "txt"];

#[test]
fn every_link_leads_to_a_file_and_every_anchor_to_a_heading() {
    let pages = pages();
    let anchors: HashMap<&Path, BTreeSet<String>> = pages.iter().map(|(path, text)| (path.as_path(), anchors(text))).collect();
    let mut broken = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { page.clone() } else { normal(&page.parent().unwrap().join(file)) };
            let leads = match anchors.get(target.as_path()) {
                Some(anchors) => anchor.is_empty() || anchors.contains(anchor),
                None => anchor.is_empty() && root().join(&target).exists(),
            };
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn pages_that_code_names_are_there() {
    let mut missing = Vec::new();
    for path in files(&NAMING) {
        let text = read(&path);
        for name in named(&text).filter(|name| !FOREIGN.contains(name)) {
            if !root().join(name).exists() {
                missing.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "pages that are not there:\n{}", missing.join("\n"));
}

/// Words that begin a fragment of a sentence. Where one begins a comment, the item's own name or a noun says more.
const FRAGMENTS: [&str; 10] = ["What", "Whatever", "Who", "Whoever", "Whose", "Where", "How", "When", "Of", "Nobody"];

#[test]
fn comments_stand_alone() {
    let mut found = Vec::new();
    for path in files(&["rs", "cu", "cuh"]) {
        let text = read(&path);
        let mut is_inside = false;
        for (number, line) in (1..).zip(text.lines()) {
            let comment = line.trim_start().strip_prefix("//").map(|comment| comment.trim_start_matches(['/', '!']).trim());
            let word = comment.unwrap_or_default().split([' ', ',', ':']).next().unwrap_or_default();
            if !is_inside && FRAGMENTS.contains(&word) {
                found.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
            is_inside = comment.is_some_and(|comment| !comment.is_empty());
        }
    }
    assert!(found.is_empty(), "comments that do not begin with their subject:\n{}", found.join("\n"));
}

#[test]
fn no_page_is_longer_than_a_reader_bears() {
    let long = pages().into_iter().map(|(path, text)| (path, text.lines().count())).filter(|(_, lines)| *lines > LINES_MAX);
    let long: Vec<_> = long.collect();
    assert!(long.is_empty(), "pages of more than {LINES_MAX} lines: {long:?}");
}

#[test]
fn every_page_is_reached_from_the_contents() {
    let pages = pages();
    let mut reached = BTreeSet::new();
    let mut next = vec![PathBuf::from("docs/README.md")];
    while let Some(page) = next.pop() {
        let Some(text) = pages.get(&page) else { continue };
        if reached.insert(page.clone()) {
            let files = links(text).into_iter().map(|link| link.split('#').next().unwrap_or_default().to_owned());
            next.extend(files.map(|file| normal(&page.parent().unwrap().join(file))));
        }
    }
    let lost: Vec<_> = pages.keys().filter(|page| page.starts_with("docs") && !reached.contains(*page)).collect();
    assert!(lost.is_empty(), "docs/README.md leads to all pages but {lost:?}");
}

#[test]
fn every_table_of_results_says_what_was_run() {
    let pages = pages();
    let results = pages.iter().filter(|(path, _)| path.starts_with("docs/results") || path.ends_with("docs/benchmarks.md"));
    for (page, text) in results {
        // `tidemill-bench report --into` writes the text between these marks, and its own line below.
        let (before, after) = (text.split("<!-- report -->").next().unwrap(), text.split("<!-- /report -->").nth(1).unwrap_or_default());
        for part in [before, after] {
            let mut paragraph = "";
            for block in part.split("\n\n").map(str::trim) {
                let is_measured = block.starts_with('|') && !block.starts_with("| machine |") && !block.starts_with("| page |");
                assert!(!is_measured || paragraph.starts_with("Run: "), "{}: no `Run:` before\n{block}", page.display());
                if block.starts_with("Run: ") {
                    let keys = ["machine: ", "commit: ", "date: ", "command: ", "goal: "];
                    let missing = keys.into_iter().find(|key| !block.contains(key));
                    assert_eq!(missing, None, "{}: {block}", page.display());
                }
                paragraph = block;
            }
        }
    }
}

pub(super) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All pages, by their paths from the root.
fn pages() -> BTreeMap<PathBuf, String> {
    files(&["md"]).into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// Files of these kinds, by their paths from the root.
fn files(kinds: &[&str]) -> Vec<PathBuf> {
    files_with(|path| path.extension().is_some_and(|kind| kinds.contains(&kind.to_str().unwrap())))
}

/// Files whose paths from the root are so, without hidden folders but CI's.
pub(super) fn files_with(is_so: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let (mut found, mut next) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(dir) = next.pop() {
        for entry in fs::read_dir(root().join(&dir)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let path = dir.join(&name);
            let kind = entry.file_type().unwrap();
            if kind.is_dir() && (!name.starts_with('.') || name == ".ci") && !SKIPPED.contains(&name.as_str()) {
                next.push(path);
            } else if kind.is_file() && is_so(&path) {
                found.push(path);
            }
        }
    }
    found
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// The lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        !is_code && !fence
    })
}

/// Targets of links and pictures within the repository.
fn links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    for line in prose(text) {
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("](") {
            let (target, behind) = after.split_once(')').unwrap_or((after, ""));
            let is_code = before.matches('`').count() % 2 == 1;
            if !is_code && !target.contains("://") && !target.starts_with("mailto:") {
                links.push(target.to_owned());
            }
            rest = behind;
        }
    }
    links
}

/// The anchors of a page: its headings, as GitHub names them, and explicit names.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() < line.len() && title.starts_with(' ') {
            let name = slug(title.trim());
            let mut anchor = name.clone();
            let mut again = 0;
            while !anchors.insert(anchor) {
                again += 1;
                anchor = format!("{name}-{again}");
            }
        }
        anchors.extend(line.split("<a name=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
    }
    anchors
}

fn slug(title: &str) -> String {
    let mut plain = String::new();
    let mut rest = title;
    // Only the text of a link counts.
    while let Some((before, after)) = rest.split_once("](") {
        plain += before;
        rest = after.split_once(')').map_or("", |(_, behind)| behind);
    }
    plain += rest;
    let kept = plain.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
    kept.replace(' ', "-")
}

/// Paths of pages that a text mentions, for example in comments.
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("docs/").filter_map(|(at, _)| {
        let before = text[..at].chars().next_back();
        let rest = &text[at..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c))).unwrap_or(rest.len());
        let name = rest[..end].trim_end_matches('.');
        (name.ends_with(".md") && !before.is_some_and(|c| c.is_ascii_alphanumeric() || "/.-_".contains(c))).then_some(name)
    })
}
