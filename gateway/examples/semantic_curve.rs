//! The semantic cache's precision and recall by threshold, on `paraphrases.txt`:
//! `cargo run --release -p tidemill-gateway --example semantic_curve [-- OPTION…]`
//!
//! - `--svg FILE` draws the curves, `--wrong` lists what the default threshold gets wrong in the half for choosing
//! - `--search` tries weights in the half for choosing
//! - `--sentences` prints all sentences, one per line, and `--embeddings FILE` reads a model's embeddings of them: a JSON list of lists of
//!   numbers

use std::{collections::BTreeMap, env, fmt::Write, fs};
use tidemill_gateway::cache::semantic::{
    THRESHOLD,
    similarity::{Question, WEIGHTS, Weights},
};

const SET: &str = include_str!("paraphrases.txt");
/// The least precision of a threshold.
const PRECISION: f64 = 0.99;

#[derive(Default)]
struct Group {
    same: Vec<&'static str>,
    /// Sentences of different meaning, with their kinds.
    others: Vec<(&'static str, &'static str)>,
}

/// Two sentences.
struct Pair {
    group: usize,
    texts: [&'static str; 2],
    /// The kind of change; `None` if they mean the same.
    kind: Option<&'static str>,
    similarity: Option<f32>,
}

fn groups() -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for line in SET.lines() {
        match line.split_at_checked(2) {
            Some(("= ", text)) => groups.push(Group { same: vec![text], others: Vec::new() }),
            Some(("+ ", text)) => groups.last_mut().expect("a group begins with =").same.push(text),
            Some(("- ", rest)) => {
                groups.last_mut().expect("a group begins with =").others.push(rest.split_once(' ').expect("a kind and a sentence"))
            }
            _ => {}
        }
    }
    groups
}

/// All pairs in some groups, with their sentences read by `read`.
fn pairs<'a>(groups: impl Iterator<Item = (usize, &'a Group)>, read: &dyn Fn(&str) -> Option<Question>) -> Vec<Pair> {
    let similarity = |a: &str, b: &str| read(a)?.similarity(&read(b)?);
    let mut pairs = Vec::new();
    for (group, Group { same, others }) in groups {
        for (at, &a) in same.iter().enumerate() {
            let alike = same[at + 1..].iter().map(|&b| (b, None));
            let unlike = others.iter().map(|&(kind, b)| (b, Some(kind)));
            pairs.extend(alike.chain(unlike).map(|(b, kind)| Pair { group, texts: [a, b], kind, similarity: similarity(a, b) }));
        }
    }
    pairs
}

/// The numbers of right and wrong hits at a threshold.
fn hits<'a>(pairs: impl IntoIterator<Item = &'a Pair>, threshold: f32) -> (usize, usize) {
    let hits = pairs.into_iter().filter(|pair| pair.similarity.is_some_and(|similarity| similarity >= threshold));
    hits.fold((0, 0), |(right, wrong), pair| if pair.kind.is_none() { (right + 1, wrong) } else { (right, wrong + 1) })
}

fn precision((right, wrong): (usize, usize)) -> f64 {
    if right + wrong == 0 { 1.0 } else { right as f64 / (right + wrong) as f64 }
}

fn thresholds() -> impl DoubleEndedIterator<Item = f32> {
    (40..=100).map(|hundredths| hundredths as f32 / 100.0)
}

/// The lowest threshold from which precision is high enough, and stays so, in both quarters of a half: one that is only reached by both
/// together would be fitted to their contents.
fn chosen(pairs: &[Pair]) -> f32 {
    let quarter = |which: usize| pairs.iter().filter(move |pair| pair.group % 4 / 2 == which);
    let is_enough = |threshold| [0, 1].iter().all(|&which| precision(hits(quarter(which), threshold)) >= PRECISION);
    thresholds().rev().take_while(|&threshold| is_enough(threshold)).last().unwrap_or(1.0)
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let value = |option: &str| arguments.iter().position(|given| given == option).and_then(|at| arguments.get(at + 1));
    let has = |option: &str| arguments.iter().any(|given| given == option);
    let groups = groups();
    let sentences = || groups.iter().flat_map(|group| group.same.iter().copied().chain(group.others.iter().map(|(_, text)| *text)));
    if has("--sentences") {
        sentences().for_each(|sentence| println!("{sentence}"));
        return;
    }
    let half = |which: usize| groups.iter().enumerate().skip(which).step_by(2);
    if has("--search") {
        search(&|weights| pairs(half(0), &|text| Question::weighed(text, weights)));
        return;
    }
    let embeddings: Option<BTreeMap<&str, Vec<f32>>> = value("--embeddings").map(|file| {
        let embeddings: Vec<Vec<f32>> =
            serde_json::from_str(&fs::read_to_string(file).expect("a file")).expect("a list of lists of numbers");
        sentences().zip(embeddings).collect()
    });
    let read = |text: &str| match &embeddings {
        None => Question::read(text),
        Some(embeddings) => Some(Question::read(text)?.embedded(embeddings[text].clone())),
    };
    let halves = [("chosen on", pairs(half(0), &read)), ("held out", pairs(half(1), &read))];
    for (name, pairs) in &halves {
        let same = pairs.iter().filter(|pair| pair.kind.is_none()).count();
        println!("{name}: {} groups, {same} pairs that mean the same, {} that do not", groups.len() / 2, pairs.len() - same);
    }
    println!("\nthreshold   precision  recall  right/wrong hits (chosen on)   precision  recall  right/wrong hits (held out)");
    for threshold in thresholds().filter(|threshold| (threshold * 100.0).round() as i32 % 4 == 0 || *threshold == THRESHOLD) {
        let mut line = format!("{threshold:9.2}");
        for (_, pairs) in &halves {
            let (right, wrong) = hits(pairs, threshold);
            write!(line, "   {:9.4} {:7.3}  {right:6} /{wrong:4}          ", precision((right, wrong)), recall(pairs, threshold))
                .expect("a string");
        }
        println!("{}{}", line.trim_end(), if threshold == THRESHOLD { "   <- default" } else { "" });
    }
    println!("\nlowest threshold with a precision of {PRECISION} where it was chosen: {:.2}", chosen(&halves[0].1));
    let threshold = if embeddings.is_some() { chosen(&halves[0].1) } else { THRESHOLD };
    for (name, pairs) in &halves {
        let mut kinds: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for pair in pairs.iter().filter_map(|pair| Some((pair.kind?, pair.similarity))) {
            let (all, wrong) = kinds.entry(pair.0).or_default();
            *all += 1;
            *wrong += usize::from(pair.1.is_some_and(|similarity| similarity >= threshold));
        }
        let told: Vec<_> = kinds.iter().map(|(kind, (all, wrong))| format!("{kind} {wrong}/{all}")).collect();
        println!("{name}: wrong hits by what is changed, at {threshold:.2}: {}", told.join(", "));
        let guarded = pairs.iter().filter(|pair| pair.similarity.is_none());
        let (kept, lost): (Vec<_>, Vec<_>) = guarded.partition(|pair| pair.kind.is_some());
        println!("{name}: guards stop {} pairs that do not mean the same, and {} that do", kept.len(), lost.len());
    }
    across(&groups, &read, threshold);
    if has("--wrong") {
        let of = |right: bool| halves[0].1.iter().filter(move |pair| pair.kind.is_none() == right);
        let is_hit = |pair: &&Pair| pair.similarity.is_some_and(|similarity| similarity >= threshold);
        of(false).filter(is_hit).for_each(|pair| println!("wrong  {:?} {:?}", pair.similarity, pair.texts));
        of(true).filter(|pair| !is_hit(pair)).for_each(|pair| println!("missed {:?} {:?}", pair.similarity, pair.texts));
    }
    if let Some(file) = value("--svg") {
        fs::write(file, svg(&halves)).expect("the drawing can be written");
    }
}

fn recall(pairs: &[Pair], threshold: f32) -> f64 {
    hits(pairs, threshold).0 as f64 / pairs.iter().filter(|pair| pair.kind.is_none()).count() as f64
}

/// Compares sentences across groups, no two of which ask the same.
fn across(groups: &[Group], read: &dyn Fn(&str) -> Option<Question>, threshold: f32) {
    let read: Vec<Vec<_>> = groups.iter().map(|group| group.same.iter().filter_map(|text| read(text)).collect()).collect();
    let (mut all, mut wrong) = (0, 0);
    for (at, group) in read.iter().enumerate() {
        for (a, b) in group.iter().flat_map(|a| read[at + 1..].iter().flatten().map(move |b| (a, b))) {
            all += 1;
            wrong += usize::from(a.similarity(b).is_some_and(|similarity| similarity >= threshold));
        }
    }
    println!("questions of different groups: {wrong} wrong hits among {all} pairs");
}

fn search(pairs: &dyn Fn(Weights) -> Vec<Pair>) {
    let mut found = Vec::new();
    let each = |values: &'static [f32]| values.iter().copied();
    for common in each(&[0.1, 0.2, 0.3, 0.4, 0.6]) {
        for form in each(&[0.0, 0.2, 0.4, 0.6]) {
            for (letters, pair) in each(&[0.0, 0.2, 0.4]).flat_map(|letters| each(&[0.1, 0.2, 0.3]).map(move |pair| (letters, pair))) {
                for words_max in each(&[1.0, 1.5, 2.0, 3.0, 1000.0]) {
                    let weights = Weights { common, form, letters, pair, words_max };
                    let pairs = pairs(weights);
                    let threshold = chosen(&pairs);
                    found.push((recall(&pairs, threshold), threshold, hits(&pairs, threshold), weights));
                }
            }
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.iter().take(40).for_each(|(recall, threshold, hits, weights)| println!("{recall:.3} at {threshold:.2}, {hits:?}: {weights:?}"));
    println!("now: {WEIGHTS:?}");
}

/// Precision over recall, with a line per half, and the default threshold as a dot.
fn svg(halves: &[(&str, Vec<Pair>)]) -> String {
    let (left, top, width, height) = (56.0, 24.0, 520.0, 300.0);
    let lowest = 0.8;
    let at = |recall: f64, precision: f64| (left + recall * width, top + (1.0 - precision.max(lowest)) / (1.0 - lowest) * height);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 600 376\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"600\" height=\"376\" fill=\"white\"/>\n",
    );
    for step in 0..=10 {
        let (x, _) = at(f64::from(step) / 10.0, 1.0);
        let (_, y) = at(0.0, lowest + f64::from(step) * 0.02);
        let (bottom, right) = (top + height, left + width);
        writeln!(svg, "<path d=\"M{x:.1} {top}V{bottom}M{left} {y:.1}H{right}\" stroke=\"#ddd\"/>").expect("a string");
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{:.1}</text>", bottom + 16.0, f64::from(step) / 10.0)
            .expect("a string");
        writeln!(svg, "<text x=\"50\" y=\"{:.1}\" text-anchor=\"end\">{:.2}</text>", y + 4.0, lowest + f64::from(step) * 0.02)
            .expect("a string");
    }
    for ((name, pairs), (color, row)) in halves.iter().zip([("#1f77b4", 0.0), ("#d62728", 18.0)]) {
        let place = |threshold| at(recall(pairs, threshold), precision(hits(pairs, threshold)));
        let points: Vec<_> = thresholds().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let (x, y) = place(THRESHOLD);
        writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>", points.join(" ")).expect("a string");
        writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{color}\"/>").expect("a string");
        writeln!(svg, "<text x=\"70\" y=\"{}\" fill=\"{color}\">{name}</text>", top + height - 30.0 + row).expect("a string");
    }
    svg += "<text x=\"316\" y=\"364\" text-anchor=\"middle\">recall</text>\n\
            <text x=\"14\" y=\"174\" text-anchor=\"middle\" transform=\"rotate(-90 14 174)\">precision</text>\n</svg>\n";
    svg
}
