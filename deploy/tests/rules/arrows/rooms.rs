//! The gateway's rooms, the top-level modules of its crate, use each other exactly as `docs/ARCHITECTURE.md` §7 lists. Neither rooms nor
//! files form cycles. Tests within files are left out, as the list of crates leaves out tests' dependencies.

use super::{Arrows, listed};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The text of each module, without its tests, by the module's path: `http::routes`.
type Sources = BTreeMap<String, String>;

#[test]
fn rooms_of_the_gateway_use_each_other_as_the_design_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let design = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let allowed = listed(&design, "Which of the gateway's rooms may use which");
    let files = arrows(&read(&root.join("gateway/src")));
    let found = rooms(&files);
    assert_eq!(allowed.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>(), "§7 lists the left, and the right are there");
    for (room, uses) in &found {
        let reasons: Vec<_> = uses.difference(&allowed[room]).flat_map(|used| between(&files, room, used)).collect();
        assert_eq!(uses, &allowed[room], "{room} uses the left, and §7 lists the right; not listed: {reasons:?}");
    }
    assert_eq!(circles(&found), Vec::<Vec<String>>::new(), "circles of rooms");
    assert_eq!(circles(&files), Vec::<Vec<String>>::new(), "circles of files");
}

#[test]
fn arrows_are_found_however_they_are_written() {
    let sources = [
        ("a", "use crate::{\n    b::{self, c::D as E},\n    d,\n};\npub(crate) use crate::e::F;"),
        ("b", "mod c;\nuse c::D;\n// use crate::d;\nfn f() { c::g() }"),
        ("b::c", "use super::super::d::{\n    X,\n    y::*,\n};"),
        ("d", "fn f() -> crate::a::T {}\n\n#[cfg(test)]\nmod tests {\n    use crate::e;\n}\n"),
        ("e", "use std::b::c;"),
    ];
    let sources: Sources = sources.iter().map(|(name, text)| ((*name).to_owned(), without_tests(text))).collect();
    let files = arrows(&sources);
    let uses = |name: &str| files[name].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!(uses("a"), ["b", "b::c", "d", "e"]);
    assert_eq!((uses("b"), uses("b::c"), uses("d"), uses("e")), (vec!["b::c"], vec!["d"], vec!["a"], vec![]));
    assert_eq!(circles(&files), [["a", "b", "b::c", "d"]]);
    assert_eq!(circles(&rooms(&files)), [["a", "b", "d"]]);
    assert_eq!(between(&files, "b", "d"), ["b::c → d"]);
}

/// Reads all files of a crate except its root and its tests.
fn read(src: &Path) -> Sources {
    let mut sources = Sources::new();
    let mut dirs = vec![src.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let module = path.strip_prefix(src).unwrap().with_extension("");
            let module = module.iter().map(|part| part.to_str().unwrap()).collect::<Vec<_>>().join("::");
            let is_source = path.extension().is_some_and(|extension| extension == "rs");
            if is_source && module != "lib" && !module.ends_with("::tests") {
                sources.insert(module, without_tests(&fs::read_to_string(&path).unwrap()));
            }
        }
    }
    sources
}

/// The text without comments, up to its inner module of tests.
fn without_tests(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let is_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].contains("mod ") && pair[1].ends_with('{');
    let end = lines.windows(2).position(is_tests).unwrap_or(lines.len());
    lines[..end].join("\n")
}

/// The modules that each module uses.
fn arrows(sources: &Sources) -> Arrows {
    let used = |module: &String, text: &String| {
        let paths = paths(text).into_iter().filter_map(|path| resolved(sources, module, &path));
        paths.filter(|used| used != module).collect()
    };
    sources.iter().map(|(module, text)| (module.clone(), used(module, text))).collect()
}

/// All paths in a text: those of `use` items, expanded, and those in code.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut code = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let item = line.trim_start();
        let item = item.strip_prefix("pub").map_or(item, |item| item.split_once(' ').map_or("", |(_, item)| item));
        let Some(start) = item.strip_prefix("use ") else {
            code.push(line);
            continue;
        };
        let mut tree = start.trim().to_owned();
        while !tree.ends_with(';') {
            let next = lines.next().expect("a `use` item ends");
            tree = format!("{tree} {}", next.trim());
        }
        paths.extend(tree.split_terminator(';').flat_map(spelt_out));
    }
    let words = code.iter().flat_map(|line| line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')));
    let inline = words.map(|word| word.trim_matches(':')).filter(|word| word.contains("::"));
    paths.extend(inline.map(|word| word.split("::").map(str::to_owned).collect()));
    paths
}

/// The paths of a tree such as `a::{b, c::{self, d as e}}`.
fn spelt_out(tree: &str) -> Vec<Vec<String>> {
    let Some((before, rest)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.split("::").map(|part| part.trim().to_owned()).collect()];
    };
    let start: Vec<_> = before.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in inner.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 { parts.push(String::new()) } else { parts.last_mut().unwrap().push(c) }
    }
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.flat_map(spelt_out).map(|end| start.iter().cloned().chain(end).collect()).collect()
}

/// The module that a path written in `module` refers to, if it is one of the sources: the longest prefix that names one.
fn resolved(sources: &Sources, module: &str, path: &[String]) -> Option<String> {
    let own: Vec<_> = module.split("::").map(str::to_owned).collect();
    let supers = path.iter().take_while(|part| *part == "super").count();
    let mut full = match path.first()?.as_str() {
        "crate" => path[1..].to_vec(),
        "super" => [&own[..own.len().checked_sub(supers)?], &path[supers..]].concat(),
        "self" => [&own[..], &path[1..]].concat(),
        // A child of this module; anything else belongs to a different crate, or was imported.
        child if sources.contains_key(&format!("{module}::{child}")) => [&own[..], path].concat(),
        _ => return None,
    };
    while !full.is_empty() {
        if sources.contains_key(&full.join("::")) {
            return Some(full.join("::"));
        }
        full.pop();
    }
    None
}

fn room(module: &str) -> &str {
    module.split("::").next().unwrap_or(module)
}

/// The rooms that each room uses, other than itself.
fn rooms(files: &Arrows) -> Arrows {
    let mut rooms = Arrows::new();
    for (module, uses) in files {
        let used = uses.iter().map(|used| room(used)).filter(|used| *used != room(module));
        rooms.entry(room(module).to_owned()).or_default().extend(used.map(str::to_owned));
    }
    rooms
}

/// The arrows between files that make one room use the other.
fn between(files: &Arrows, user: &str, used: &str) -> Vec<String> {
    let of_user = files.iter().filter(|(module, _)| room(module) == user);
    let arrows = of_user.flat_map(|(module, uses)| uses.iter().map(move |target| (module, target)));
    arrows.filter(|(_, target)| room(target) == used).map(|(module, target)| format!("{module} → {target}")).collect()
}

/// The cycles: groups whose members can all reach each other.
fn circles(arrows: &Arrows) -> Vec<Vec<String>> {
    let reached: BTreeMap<_, _> = arrows.keys().map(|start| (start, reached(arrows, start))).collect();
    let mut circles = BTreeSet::new();
    for start in arrows.keys().filter(|start| reached[start].contains(*start)) {
        let back = reached[start].iter().filter(|other| reached[other].contains(start));
        circles.insert(back.cloned().collect::<Vec<_>>());
    }
    circles.into_iter().collect()
}

/// All modules that can be reached from `start`.
fn reached(arrows: &Arrows, start: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        open.extend(arrows[module].iter().filter(|used| reached.insert((*used).clone())).map(String::as_str));
    }
    reached
}
