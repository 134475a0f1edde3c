//! The semantic cache's precision and recall by threshold, with a model's embeddings (`bench/semantic.py` makes them and runs this):
//! `semantic_curve --sentences` | `semantic_curve --embeddings FILE [--svg FILE] [--wrong]`
//!
//! - `--sentences` prints all sentences as a JSON list, and `--embeddings FILE` reads a model's embeddings of them: a list of lists of numbers
//! - `--svg FILE` draws the curves, `--wrong` lists the wrong hits at the default threshold

use std::{collections::BTreeMap, env, fmt::Write, fs, hint::black_box, time::Instant};
use tidemill_gateway::{
    cache::semantic::{THRESHOLD, question::Question},
    vectors::vector::Vector,
};

/// The set on which the rules, the cost of a word and the threshold were chosen.
const CHOSEN_ON: &str = include_str!("../tests/semantic/paraphrases.txt");
/// The set on which nothing was chosen.
const HELD_OUT: &str = include_str!("../tests/semantic/held-out.txt");
/// The vectors of a scan: as many as a tenant has by default.
const SCANNED: usize = 4096;

#[derive(Default)]
struct Group {
    language: &'static str,
    same: Vec<&'static str>,
    /// Sentences of different meaning, with their kinds.
    others: Vec<(&'static str, &'static str)>,
}

/// Two sentences.
struct Pair {
    language: &'static str,
    texts: [&'static str; 2],
    /// The kind of change; `None` if they mean the same.
    kind: Option<&'static str>,
    cosine: f32,
    /// The similarity, if one answer could serve both.
    similarity: Option<f32>,
}

/// The source of a similarity.
type Measure = fn(&Pair) -> Option<f32>;

fn groups(set: &'static str) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut language = "en";
    for line in set.lines() {
        match line.split_at_checked(2) {
            Some(("@ ", of)) => language = of,
            Some(("= ", text)) => groups.push(Group { language, same: vec![text], others: Vec::new() }),
            Some(("+ ", text)) => groups.last_mut().expect("a group begins with =").same.push(text),
            Some(("- ", rest)) => {
                groups.last_mut().expect("a group begins with =").others.push(rest.split_once(' ').expect("a kind and a sentence"))
            }
            _ => {}
        }
    }
    groups
}

fn sentences() -> Vec<&'static str> {
    let groups = [CHOSEN_ON, HELD_OUT].into_iter().flat_map(groups);
    groups.flat_map(|group| group.same.into_iter().chain(group.others.into_iter().map(|(_, text)| text))).collect()
}

/// The pairs of a set: each two of `=` and `+` in a group, and each of these with each `-`; or, of the first sentence only.
fn pairs(set: &'static str, first_only: bool, vectors: &BTreeMap<&str, Vector>) -> Vec<Pair> {
    let read = |text: &str| Question::read(text).expect("short sentences").with_vector(vectors[text].clone());
    let mut pairs = Vec::new();
    for Group { language, same, others } in groups(set) {
        for (at, &a) in same.iter().enumerate().take(if first_only { 1 } else { same.len() }) {
            let alike = same[at + 1..].iter().map(|&b| (b, None));
            let unlike = others.iter().map(|&(kind, b)| (b, Some(kind)));
            pairs.extend(alike.chain(unlike).map(|(b, kind)| {
                let (one, two) = (read(a), read(b));
                let cosine = one.cosine(&two).expect("both have vectors");
                let similarity = one.similarity(&two, cosine).filter(|_| one.exact == two.exact);
                Pair { language, texts: [a, b], kind, cosine, similarity }
            }));
        }
    }
    pairs
}

/// The numbers of right and wrong hits at a threshold.
fn hits<'a>(pairs: impl IntoIterator<Item = &'a Pair>, measure: Measure, threshold: f32) -> (usize, usize) {
    let hits = pairs.into_iter().filter(|pair| measure(pair).is_some_and(|similarity| similarity >= threshold));
    hits.fold((0, 0), |(right, wrong), pair| if pair.kind.is_none() { (right + 1, wrong) } else { (right, wrong + 1) })
}

fn precision((right, wrong): (usize, usize)) -> f64 {
    if right + wrong == 0 { 1.0 } else { right as f64 / (right + wrong) as f64 }
}

fn recall(pairs: &[Pair], measure: Measure, threshold: f32) -> f64 {
    let same = pairs.iter().filter(|pair| pair.kind.is_none()).count();
    hits(pairs, measure, threshold).0 as f64 / same as f64
}

fn thresholds() -> impl DoubleEndedIterator<Item = f32> {
    (70..=100).map(|hundredths| hundredths as f32 / 100.0)
}

const SIMILARITY: Measure = |pair| pair.similarity;
const COSINE: Measure = |pair| Some(pair.cosine);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let value = |option: &str| arguments.iter().position(|given| given == option).and_then(|at| arguments.get(at + 1));
    let has = |option: &str| arguments.iter().any(|given| given == option);
    if has("--sentences") {
        println!("{}", serde_json::to_string(&sentences()).expect("strings"));
        return;
    }
    let file = value("--embeddings").expect("--sentences, or --embeddings FILE: see the top of semantic_curve.rs");
    let embeddings: Vec<Vec<f32>> = serde_json::from_str(&fs::read_to_string(file).expect("a file")).expect("a list of lists of numbers");
    let vectors = sentences().into_iter().zip(embeddings).map(|(text, row)| (text, Vector::new(&row).expect("an embedding"))).collect();
    let sets = [("chosen on", pairs(CHOSEN_ON, false, &vectors)), ("held out", pairs(HELD_OUT, true, &vectors))];
    for (name, pairs) in &sets {
        let same = pairs.iter().filter(|pair| pair.kind.is_none()).count();
        println!("\n{name}: {same} pairs that mean the same, {} that do not", pairs.len() - same);
        table(pairs);
        parts(pairs, "language", |pair| pair.language);
        parts(pairs, "change", |pair| pair.kind.unwrap_or("none"));
        if has("--wrong") {
            let wrong = pairs.iter().filter(|pair| pair.kind.is_some() && pair.similarity.is_some_and(|found| found >= THRESHOLD));
            wrong.for_each(|pair| println!("  wrong {:.3} {:?}", pair.similarity.unwrap_or(0.0), pair.texts));
        }
    }
    scan(&vectors);
    if let Some(file) = value("--svg") {
        fs::write(file, svg(&sets)).expect("the drawing can be written");
    }
}

fn table(pairs: &[Pair]) {
    println!(
        "| threshold | precision | recall | right, wrong hits | precision, cosine alone | recall, cosine alone |\n|---|---|---|---|---|---|"
    );
    for threshold in thresholds().filter(|threshold| (threshold * 100.0).round() as i32 % 2 == 0) {
        let (right, wrong) = hits(pairs, SIMILARITY, threshold);
        println!(
            "| {threshold:.2}{} | {:.3} | {:.3} | {right}, {wrong} | {:.3} | {:.3} |",
            if threshold == THRESHOLD { " (default)" } else { "" },
            precision((right, wrong)),
            recall(pairs, SIMILARITY, threshold),
            precision(hits(pairs, COSINE, threshold)),
            recall(pairs, COSINE, threshold),
        );
    }
}

/// Prints the hits at the default threshold, of all pairs, by a part of them.
fn parts(pairs: &[Pair], name: &str, part: fn(&Pair) -> &'static str) {
    let mut parts: BTreeMap<&str, Vec<&Pair>> = BTreeMap::new();
    pairs.iter().for_each(|pair| parts.entry(part(pair)).or_default().push(pair));
    let told = parts.into_iter().map(|(part, pairs)| {
        let (right, wrong) = hits(pairs.iter().copied(), SIMILARITY, THRESHOLD);
        let same = pairs.iter().filter(|pair| pair.kind.is_none()).count();
        format!("{part} {right}/{same} right, {wrong}/{} wrong", pairs.len() - same)
    });
    println!("by {name}, at {THRESHOLD:.2}: {}", told.collect::<Vec<_>>().join("; "));
}

/// Prints the time in which a vector is compared with those of a full tenant.
fn scan(vectors: &BTreeMap<&str, Vector>) {
    let kept: Vec<&Vector> = vectors.values().cycle().take(SCANNED).collect();
    let began = Instant::now();
    let rounds = 100;
    for round in 0..rounds {
        black_box(kept.iter().map(|vector| vector.cosine(black_box(kept[round]))).fold(0.0, f32::max));
    }
    let micros = began.elapsed().as_secs_f64() * 1e6 / rounds as f64;
    println!("\na scan of {SCANNED} vectors of {} bytes: {micros:.0} µs", kept[0].bytes());
}

/// Precision over recall, with a line per set, and the default threshold as a dot.
fn svg(sets: &[(&str, Vec<Pair>)]) -> String {
    let (left, top, width, height) = (56.0, 24.0, 520.0, 300.0);
    let lowest = 0.5;
    let at = |recall: f64, precision: f64| (left + recall * width, top + (1.0 - precision.max(lowest)) / (1.0 - lowest) * height);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 600 376\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"600\" height=\"376\" fill=\"white\"/>\n",
    );
    for step in 0..=10 {
        let (x, _) = at(f64::from(step) / 10.0, 1.0);
        let (_, y) = at(0.0, lowest + f64::from(step) * 0.05);
        let (bottom, right) = (top + height, left + width);
        writeln!(svg, "<path d=\"M{x:.1} {top}V{bottom}M{left} {y:.1}H{right}\" stroke=\"#ddd\"/>").expect("a string");
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{:.1}</text>", bottom + 16.0, f64::from(step) / 10.0)
            .expect("a string");
        writeln!(svg, "<text x=\"50\" y=\"{:.1}\" text-anchor=\"end\">{:.2}</text>", y + 4.0, lowest + f64::from(step) * 0.05)
            .expect("a string");
    }
    let of_sets = sets.iter().zip(["#1f77b4", "#d62728"]);
    let lines = of_sets.flat_map(|((name, pairs), color)| [(name, pairs, color, SIMILARITY, ""), (name, pairs, color, COSINE, "4")]);
    for (row, (name, pairs, color, measure, dashes)) in lines.enumerate() {
        let place = |threshold| at(recall(pairs, measure, threshold), precision(hits(pairs, measure, threshold)));
        let points: Vec<_> = thresholds().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let dash = if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
        writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>", points.join(" "))
            .expect("a string");
        let what = if dashes.is_empty() { "" } else { ", cosine alone" };
        writeln!(svg, "<text x=\"70\" y=\"{}\" fill=\"{color}\">{name}{what}</text>", top + height - 66.0 + 18.0 * row as f64)
            .expect("a string");
        if dashes.is_empty() {
            let (x, y) = place(THRESHOLD);
            writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{color}\"/>").expect("a string");
        }
    }
    svg += "<text x=\"316\" y=\"364\" text-anchor=\"middle\">recall</text>\n\
            <text x=\"14\" y=\"174\" text-anchor=\"middle\" transform=\"rotate(-90 14 174)\">precision</text>\n</svg>\n";
    svg
}
