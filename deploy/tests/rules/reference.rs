//! The reference pages match the code from which they are generated: settings from the doc comments of the settings' structs, metrics
//! from their descriptions, commands from the programs' own help. The text between `<!-- made from SOURCE -->` and `<!-- /made -->` is
//! written by
//!
//! ```sh
//! make reference
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The environment variable with which pages are written instead of compared.
const RENEW: &str = "TIDEMILL_RENEW_REFERENCE";

/// Crates with settings for operators.
const CONFIGURED: [&str; 7] = ["coordinator", "net", "engine", "kvpool", "prefill", "decode", "tenancy"];

/// The structs whose keys have guides in [`GUIDES`].
const GUIDED: [&str; 5] = ["Flags", "DecodeFlags", "EngineFlags", "PoolFlags", "WorkerFlags"];
/// The guides to keys: (key, title, page). A key that ends in `_` is the prefix of several.
const GUIDES: [(&str, &str, &str); 32] = [
    ("admin_public", "Security", "security.md"),
    ("aliases", "Several coordinators", "coordinators.md"),
    ("batch_", "Batches", "batches.md"),
    ("bodies_bytes_max", "Security", "security.md"),
    ("clients_marks", "Security", "security.md"),
    ("connections_", "Security", "security.md"),
    ("cors_origins", "Security", "security.md"),
    ("draft_", "Speculation", "speculation.md"),
    ("drain_", "Draining", "drain.md"),
    ("hosts", "Security", "security.md"),
    ("kafka", "Kafka", "kafka.md"),
    ("kv_", "Sizing", "sizing.md"),
    ("model_name", "Several models", "several-models.md"),
    ("open", "Tenants", "tenants.md"),
    ("operators", "Operators", "operators.md"),
    ("peers", "Several coordinators", "coordinators.md"),
    ("probe_", "Probes", "probes.md"),
    ("quantize", "Checkpoints", "checkpoints.md"),
    ("quota_server", "A quota server", "quota-server.md"),
    ("quota_share", "Tenants", "tenants.md"),
    ("rdma_devices", "RDMA", "rdma.md"),
    ("regions", "Several regions", "regions.md"),
    ("retention", "Retention", "retention.md"),
    ("slo_", "Service classes", "classes.md"),
    ("speculation", "Speculation", "speculation.md"),
    ("stage", "Pipeline stages", "pipeline.md"),
    ("stage_", "Pipeline stages", "pipeline.md"),
    ("stages", "Pipeline stages", "pipeline.md"),
    ("store", "A database", "postgres.md"),
    ("tenants", "Tenants", "tenants.md"),
    ("tensor_parallel", "Tensor parallel", "tensor-parallel.md"),
    ("tls_", "TLS", "tls.md"),
];

#[test]
fn the_reference_says_what_the_code_says() {
    let renew = env::var_os(RENEW).is_some();
    for entry in fs::read_dir(root().join("docs/reference")).unwrap() {
        let path = entry.unwrap().path();
        let page = read(&path);
        let made = filled(&page);
        if renew {
            fs::write(&path, made).unwrap();
        } else if let Some((is, should)) = page.lines().zip(made.lines()).find(|(is, should)| is != should) {
            panic!("{} says\n{is}\nand the code says\n{should}\nRenew the page: make reference", path.display());
        } else {
            assert_eq!(page.len(), made.len(), "{} differs at its end. Renew it: make reference", path.display());
        }
    }
}

#[test]
fn every_section_of_a_config_file_is_in_the_reference() {
    let page = ["settings.md", "worker-settings.md"].map(|name| read(&root().join("docs/reference").join(name))).concat();
    for krate in CONFIGURED {
        for text in sources(krate) {
            for rest in text.split("\npub struct ").skip(1) {
                let name = rest.split(' ').next().unwrap();
                // A worker's `Flags` consist of sections, each of which is a separate struct.
                let is_settings = name.ends_with("Flags") && (name != "Flags" || krate == "coordinator");
                assert!(
                    !is_settings || page.contains(&format!("<!-- made from {krate}::{name} -->")),
                    "the settings' pages lack {krate}::{name}"
                );
            }
        }
    }
}

#[test]
fn every_metric_is_described_with_its_labels() {
    let described = metrics();
    for text in ["gateway", "coordinator"].into_iter().flat_map(sources) {
        for kind in ["counter", "gauge", "histogram"] {
            let open = format!("{kind}!(");
            for (at, _) in text.match_indices(&open).filter(|(at, _)| !text[..*at].ends_with("describe_")) {
                let call = text[at..].split(';').next().unwrap();
                let Some(name) = call.split('"').nth(1).filter(|name| name.starts_with("tidemill_")) else { continue };
                let metric = described.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("nothing describes {name}"));
                assert_eq!(metric.kind, kind, "{name}");
                for label in call.match_indices("\" =>").filter_map(|(end, _)| call[..end].rsplit('"').next()) {
                    assert!(metric.help.contains(&format!("`{label}`")), "the description of {name} does not say its label `{label}`");
                }
            }
        }
    }
}

#[test]
fn every_path_is_in_the_reference() {
    let page = read(&root().join("docs/reference/http.md"));
    let texts = sources("gateway");
    let routes = texts.iter().find(|text| text.contains("pub fn front_door(")).expect("a module has the routes of both ports");
    let paths = routes.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap().replace("{*", "{"));
    let missing: Vec<_> =
        paths.filter(|path| path != "/" && !path.starts_with("/console/") && !page.contains(&format!("`{path}`"))).collect();
    assert!(missing.is_empty(), "http.md lacks {missing:?}");
}

/// The page, with the text generated from the code between its marks.
fn filled(page: &str) -> String {
    let mut parts = page.split("<!-- made from ");
    let mut filled = parts.next().unwrap().to_owned();
    for part in parts {
        let (source, rest) = part.split_once(" -->").expect("the mark ends");
        let (_, behind) = rest.split_once("<!-- /made -->").unwrap_or_else(|| panic!("what is made from {source} has no end"));
        let made = match source.split_once("::") {
            Some((krate, name)) => settings(krate, name),
            None if source == "metrics" => metrics_table(),
            None => help(source),
        };
        write!(filled, "<!-- made from {source} -->\n{}\n<!-- /made -->{behind}", made.trim_end()).unwrap();
    }
    filled
}

/// The keys of a settings' struct as a table.
fn settings(krate: &str, name: &str) -> String {
    let start = format!("pub struct {name} {{\n");
    let texts = sources(krate);
    let found = texts.iter().find_map(|text| text.split_once(&start)).unwrap_or_else(|| panic!("{krate} has no settings {name}"));
    let (before, rest) = found;
    let attributes = before.rsplit("\n\n").next().unwrap();
    let has_defaults = attributes.lines().any(|line| line.starts_with("#[serde(") && line.contains("default"));
    let body = rest.split_once("\n}").unwrap().0;
    let mut table = String::from("| key | default | |\n|---|---|---|");
    let mut doc = String::new();
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            doc += text;
        } else if let Some((key, kind)) = line.strip_prefix("pub ").and_then(|field| field.split_once(": ")) {
            let key = key.trim_start_matches("r#");
            assert!(!doc.is_empty(), "{krate}::{name} says nothing of `{key}`");
            let (text, default) = match doc.rsplit_once('[') {
                Some((text, default)) if default.starts_with("default: ") => {
                    let default = default.trim_start_matches("default: ").trim_end_matches(']');
                    (text, if default == "none, required" { "required" } else { default })
                }
                _ if kind.starts_with("Option") || has_defaults => panic!("{krate}::{name} does not say the default of `{key}`"),
                _ => (doc.as_str(), "required"),
            };
            let is_meant = |of: &str| key == of || (of.ends_with('_') && key.starts_with(of));
            let guide = GUIDES.iter().filter(|_| GUIDED.contains(&name)).find(|(of, ..)| is_meant(of));
            let guide = guide.map_or(String::new(), |(_, title, page)| format!(" ([{title}](../guides/{page}))"));
            write!(table, "\n| `{key}` | {} | {}{guide} |", cell(default), cell(text)).unwrap();
            doc.clear();
        }
    }
    table
}

struct Metric {
    name: String,
    kind: String,
    help: String,
    /// The heading above the metric in the code.
    group: String,
}

fn metrics_table() -> String {
    let mut groups: Vec<(String, String)> = Vec::new();
    for Metric { name, kind, help, group } in metrics() {
        if groups.last().is_none_or(|(last, _)| *last != group) {
            groups.push((group, String::from("| metric | type | |\n|---|---|---|")));
        }
        write!(groups.last_mut().unwrap().1, "\n| `{name}` | {kind} | {} |", cell(&help)).unwrap();
    }
    groups.into_iter().map(|(group, table)| format!("## {group}\n\n{table}")).collect::<Vec<_>>().join("\n\n")
}

/// All metrics, in the order of the code: those that `describe_…!` names, and those rendered from reports.
fn metrics() -> Vec<Metric> {
    let texts = sources("gateway");
    let mut metrics = Vec::new();
    let text = texts.iter().find(|text| text.contains("fn describe()")).expect("a module describes the metrics");
    let describe = text.split_once("fn describe() {").unwrap().1.split_once("\n}").unwrap().0;
    let mut group = String::from("Metrics");
    for statement in describe.split(");\n") {
        if let Some((_, title)) = statement.rsplit_once("// ") {
            group = title.lines().next().unwrap().trim_end_matches('.').to_owned();
        }
        if let Some((_, call)) = statement.split_once("describe_") {
            let (kind, _) = call.split_once('!').unwrap();
            let [name, help] = strings(call)[..] else { panic!("a metric has a name and a description: {call}") };
            metrics.push(Metric { name: name.to_owned(), kind: kind.to_owned(), help: help.to_owned(), group: group.clone() });
        }
    }
    let text = texts.iter().find(|text| text.contains("const WORKER_FAMILIES")).expect("a module writes workers' reports out");
    let text = text.split("#[cfg(test)]").next().unwrap();
    for part in text.split("\nfn ").flat_map(|part| part.split("\npub(super) fn ")).flat_map(|part| part.split("\nconst ")) {
        // The common prefix of all names in this function, as in `tidemill_probe_{name}`.
        let prefix = part.split("TYPE tidemill_").nth(1).and_then(|rest| rest.split_once("{name}")).map_or("", |(prefix, _)| prefix);
        let group = match prefix {
            "" => "Workers, and the cluster as a whole",
            "probe_" => "Probes",
            _ => "The registry",
        };
        let words = strings(part);
        for at in 1..words.len().saturating_sub(1) {
            if let (name, kind @ ("gauge" | "counter"), help) = (words[at - 1], words[at], words[at + 1]) {
                let name = format!("tidemill_{prefix}{name}");
                metrics.push(Metric { name, kind: kind.to_owned(), help: help.to_owned(), group: group.to_owned() });
            }
        }
        if let Some((before, _)) = part.split_once(" histogram\"") {
            let name = before.rsplit("# TYPE ").next().unwrap().to_owned();
            let help = strings(part.split_once("let help = ").unwrap().1)[0].to_owned();
            metrics.push(Metric { name, kind: "histogram".into(), help, group: "Workers, and the cluster as a whole".into() });
        }
    }
    let mut order: BTreeMap<String, usize> = BTreeMap::new();
    for metric in &metrics {
        let next = order.len();
        order.entry(metric.group.clone()).or_insert(next);
    }
    metrics.sort_by_key(|metric| order[&metric.group]);
    let names: BTreeSet<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
    assert_eq!(names.len(), metrics.len(), "a metric is described twice");
    metrics
}

/// The string literals of a piece of code, without its comments.
fn strings(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
        found.extend(line.split('"').skip(1).step_by(2));
    }
    found
}

/// The help of a program and of all its commands, as a page.
fn help(program: &str) -> String {
    let program = program.strip_suffix(" --help").unwrap_or_else(|| panic!("nothing is made from {program}"));
    assert_eq!(program, "tidemill");
    let mut text = String::new();
    describe(&mut text, &[]);
    text
}

fn describe(text: &mut String, command: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill")).args(command).arg("-h").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let commands: Vec<&str> = match help.split_once("\nCommands:\n") {
        Some((_, list)) => list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next()).collect(),
        None => Vec::new(),
    };
    if !command.is_empty() {
        let about = help.lines().next().unwrap_or_default();
        let usage = help.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or_default();
        write!(text, "{} tidemill {}\n{about}: `{usage}`\n\n", "#".repeat(command.len() + 1), command.join(" ")).unwrap();
        let options = options(&help);
        if !options.is_empty() {
            *text += "| | |\n|---|---|\n";
            for (option, meaning) in options {
                writeln!(text, "| `{}` | {} |", cell(&option), cell(&meaning)).unwrap();
            }
            *text += "\n";
        }
    }
    for name in commands.into_iter().filter(|name| *name != "help") {
        describe(text, &[command, &[name]].concat());
    }
}

/// Arguments and options with their meanings, which are beside them or on the next line.
fn options(help: &str) -> Vec<(String, String)> {
    let mut options: Vec<(String, String)> = Vec::new();
    let rows = help.lines().skip_while(|line| !["Arguments:", "Options:"].contains(line)).filter(|line| line.starts_with("  "));
    for row in rows.map(str::trim) {
        match options.last_mut() {
            Some((_, meaning)) if meaning.is_empty() && !row.starts_with(['-', '<', '[']) => row.clone_into(meaning),
            _ => {
                let (option, meaning) = row.split_once("  ").unwrap_or((row, ""));
                options.push((option.to_owned(), meaning.trim().to_owned()));
            }
        }
    }
    options.retain(|(option, _)| !option.starts_with("-h"));
    options
}

/// Text escaped for a cell of a table.
fn cell(text: &str) -> String {
    text.trim().replace('|', "\\|")
}

/// The source files of a crate, by path.
fn sources(krate: &str) -> Vec<String> {
    let (mut files, mut dirs) = (BTreeSet::new(), vec![root().join(krate).join("src")]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                files.insert(path);
            }
        }
    }
    files.iter().map(|path| read(path)).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
