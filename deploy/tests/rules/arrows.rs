//! The workspace's dependency arrows are the ones that `docs/ARCHITECTURE.md` §7 lists, no more and no fewer. `rooms` checks those inside
//! the gateway.

mod rooms;

use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

type Arrows = BTreeMap<String, BTreeSet<String>>;

#[test]
fn crates_depend_on_each_other_as_the_design_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let design = fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let (allowed, found) = (listed(&design, "Who may depend on whom"), built(&root));
    for (krate, uses) in &found {
        let allowed = allowed.get(krate).unwrap_or_else(|| panic!("§7 does not say what {krate} may use"));
        assert_eq!(uses, allowed, "{krate} uses the left, and §7 lists the right");
    }
    assert_eq!(allowed.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>(), "§7 lists crates that there are not");
}

/// The arrows that the design's list with this heading allows each crate or room, from lines such as `a, b → c, d   words for people`.
fn listed(design: &str, heading: &str) -> Arrows {
    let (_, after) = design.split_once(heading).expect("the design has the list");
    let block = after.split("```").nth(1).expect("the list is a code block");
    let mut arrows = Arrows::new();
    for line in block.lines() {
        let Some((users, rest)) = line.split_once('→') else { continue };
        // The list ends at two spaces.
        let used = rest.trim_start().split("  ").next().unwrap_or_default();
        let names = |list: &str| list.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.starts_with("nothing")).collect();
        for user in users.split(',') {
            arrows.insert(user.trim().to_owned(), names(used));
        }
    }
    arrows
}

/// The dependencies of each crate of the workspace, without those of its tests.
fn built(root: &Path) -> Arrows {
    let output = Command::new(env!("CARGO")).args(["metadata", "--no-deps", "--offline", "--format-version=1"]).current_dir(root).output();
    let metadata: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let ours = |name: &Value| name.as_str().and_then(|name| name.strip_prefix("tidemill-")).map(str::to_owned);
    let packages = metadata["packages"].as_array().unwrap();
    let used = |package: &Value| {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        dependencies.filter(|dependency| dependency["kind"].is_null()).filter_map(|dependency| ours(&dependency["name"])).collect()
    };
    packages.iter().filter_map(|package| Some((ours(&package["name"])?, used(package)))).collect()
}
