//! The recall of the old message or fact that a question needs, by words, by vectors, and by both, with a model's embeddings (`bench/retrieval.py`
//! makes them and runs this): `retrieval_recall --texts` | `retrieval_recall --embeddings FILE [--missed]`
//!
//! - `--texts` prints all texts and questions as a JSON list, and `--embeddings FILE` reads a model's embeddings of them: a list of lists of
//!   numbers
//! - `--missed` lists the questions whose text is not among the first three by both

use std::{collections::BTreeMap, env, fs, sync::Arc};
use tidemill_gateway::{
    context::{
        bm25,
        ranking::{self, Meaning, WORDS},
    },
    vectors::vector::Vector,
};

/// The set on which the ranking was chosen, and the set on which nothing was.
const SETS: [(&str, &str); 2] =
    [("chosen on", include_str!("../tests/retrieval/chosen-on.txt")), ("held out", include_str!("../tests/retrieval/held-out.txt"))];
/// The numbers of texts that a prompt may be given.
const GIVEN: [usize; 3] = [1, 3, 5];
/// The constant of reciprocal rank fusion, as in its paper.
const RANK_OFFSET: f64 = 60.0;

/// One conversation's old messages, or one user's facts.
#[derive(Clone, Default)]
struct Pool {
    name: &'static str,
    texts: Vec<&'static str>,
    questions: Vec<Question>,
}

#[derive(Clone, Copy)]
struct Question {
    kind: &'static str,
    text: &'static str,
    /// The place of the text that it needs.
    needs: usize,
}

/// The place at which a question's text was found, if it was.
struct Asked {
    pool: &'static str,
    question: Question,
    found: Option<usize>,
}

type Vectors = BTreeMap<&'static str, Arc<Vector>>;
/// Ranks a pool's texts for a question.
type Measure = fn(&str, &[&str], &Meaning) -> Vec<usize>;

const MEASURES: [(&str, Measure); 4] = [
    ("words (BM25)", |question, texts, _| bm25::best(question, texts, texts.len())),
    ("vectors", |question, texts, meaning| ranking::fused(question, texts, meaning, 0.0, texts.len())),
    ("both, by ranks (RRF)", by_ranks),
    ("both, by scores (this)", |question, texts, meaning| ranking::best(question, texts, Some(meaning), texts.len())),
];

/// Reciprocal rank fusion (Cormack et al., 2009).
fn by_ranks(question: &str, texts: &[&str], meaning: &Meaning) -> Vec<usize> {
    let mut scores = vec![0.0; texts.len()];
    for ranked in [bm25::best(question, texts, texts.len()), ranking::fused(question, texts, meaning, 0.0, texts.len())] {
        ranked.into_iter().zip(1..).for_each(|(place, rank)| scores[place] += 1.0 / (RANK_OFFSET + f64::from(rank)));
    }
    let mut places: Vec<usize> = (0..texts.len()).collect();
    places.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(b.cmp(a)));
    places
}

fn pools(set: &'static str) -> Vec<Pool> {
    let mut pools: Vec<Pool> = Vec::new();
    for line in set.lines() {
        match line.split_at_checked(2) {
            Some(("@ ", name)) => pools.push(Pool { name, ..Pool::default() }),
            Some(("= ", text)) => pools.last_mut().expect("a pool begins with @").texts.push(text),
            Some(("? ", rest)) => {
                let pool = pools.last_mut().expect("a pool begins with @");
                let (kind, text) = rest.split_once(' ').expect("a kind and a question");
                pool.questions.push(Question { kind, text, needs: pool.texts.len() - 1 });
            }
            _ => {}
        }
    }
    pools
}

/// All texts of a set as one pool.
fn together(pools: &[Pool]) -> Vec<Pool> {
    let mut all = Pool { name: "all", ..Pool::default() };
    for pool in pools {
        let before = all.texts.len();
        all.questions.extend(pool.questions.iter().map(|question| Question { needs: before + question.needs, ..*question }));
        all.texts.extend(&pool.texts);
    }
    vec![all]
}

fn texts() -> Vec<&'static str> {
    let pools = SETS.into_iter().flat_map(|(_, set)| pools(set));
    pools.flat_map(|pool| pool.texts.into_iter().chain(pool.questions.into_iter().map(|question| question.text))).collect()
}

fn asked(pools: &[Pool], vectors: &Vectors, measure: Measure) -> Vec<Asked> {
    let of_pool = |pool: &Pool| {
        let found = |question: &Question| {
            let texts = pool.texts.iter().map(|text| Some(Arc::clone(&vectors[text]))).collect();
            let meaning = Meaning { question: Arc::clone(&vectors[question.text]), texts };
            let ranked = measure(question.text, &pool.texts, &meaning);
            Asked { pool: pool.name, question: *question, found: ranked.iter().position(|place| *place == question.needs) }
        };
        pool.questions.iter().map(found).collect::<Vec<_>>()
    };
    pools.iter().flat_map(of_pool).collect()
}

fn recall<'a>(asked: impl IntoIterator<Item = &'a Asked>, given: usize) -> f64 {
    let (mut all, mut found) = (0_u32, 0_u32);
    for one in asked {
        all += 1;
        found += u32::from(one.found.is_some_and(|place| place < given));
    }
    f64::from(found) / f64::from(all)
}

fn table(pools: &[Pool], vectors: &Vectors) {
    println!("| ranked by | recall@1 | recall@3 | recall@5 |\n|---|---:|---:|---:|");
    for (name, measure) in MEASURES {
        let asked = asked(pools, vectors, measure);
        println!("| {name} | {} |", GIVEN.map(|given| format!("{:.3}", recall(&asked, given))).join(" | "));
    }
}

/// Prints the recall among the first three, by a part of the questions.
fn parts(pools: &[Pool], vectors: &Vectors, name: &str, part: fn(&Asked) -> &'static str) {
    println!("recall@3 by {name}:");
    for (measured, measure) in MEASURES {
        let asked = asked(pools, vectors, measure);
        let mut parts: BTreeMap<&str, Vec<&Asked>> = BTreeMap::new();
        asked.iter().for_each(|one| parts.entry(part(one)).or_default().push(one));
        let told = parts.into_iter().map(|(part, of)| format!("{part} {:.2} of {}", recall(of.iter().copied(), 3), of.len()));
        println!("  {measured}: {}", told.collect::<Vec<_>>().join("; "));
    }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let has = |option: &str| arguments.iter().any(|given| given == option);
    if has("--texts") {
        println!("{}", serde_json::to_string(&texts()).expect("strings"));
        return;
    }
    let file = arguments.iter().position(|given| given == "--embeddings").and_then(|at| arguments.get(at + 1));
    let file = file.expect("--texts, or --embeddings FILE: see the top of retrieval_recall.rs");
    let embeddings: Vec<Vec<f32>> = serde_json::from_str(&fs::read_to_string(file).expect("a file")).expect("a list of lists of numbers");
    let vector = |row: Vec<f32>| Arc::new(Vector::new(&row).expect("an embedding"));
    let vectors: Vectors = texts().into_iter().zip(embeddings.into_iter().map(vector)).collect();
    for (name, set) in SETS {
        let pools = pools(set);
        let (texts, questions) =
            (pools.iter().map(|pool| pool.texts.len()).sum::<usize>(), pools.iter().map(|pool| pool.questions.len()).sum::<usize>());
        println!("\n{name}: {questions} questions, {texts} texts in {} pools", pools.len());
        table(&pools, &vectors);
        parts(&pools, &vectors, "kind", |asked| asked.question.kind);
        parts(&pools, &vectors, "pool", |asked| asked.pool);
        println!("\n{name}, all texts together:");
        table(&together(&pools), &vectors);
        if has("--missed") {
            let asked = asked(&pools, &vectors, MEASURES[3].1);
            let missed = asked.iter().filter(|one| one.found.is_none_or(|place| place >= 3));
            missed.for_each(|one| println!("  missed, at {:?}: {}", one.found, one.question.text));
        }
    }
    println!("\nweight of words: {WORDS}; recall@1 and @3 where it was chosen, at other weights:");
    let chosen_on = pools(SETS[0].1);
    for (weight, measure) in WEIGHTS {
        let asked = asked(&chosen_on, &vectors, measure);
        println!("  {weight}: {:.3}, {:.3}", recall(&asked, 1), recall(&asked, 3));
    }
}

const WEIGHTS: [(f64, Measure); 6] = [
    (0.0, |question, texts, meaning| ranking::fused(question, texts, meaning, 0.0, texts.len())),
    (0.25, |question, texts, meaning| ranking::fused(question, texts, meaning, 0.25, texts.len())),
    (0.5, |question, texts, meaning| ranking::fused(question, texts, meaning, 0.5, texts.len())),
    (1.0, |question, texts, meaning| ranking::fused(question, texts, meaning, 1.0, texts.len())),
    (2.0, |question, texts, meaning| ranking::fused(question, texts, meaning, 2.0, texts.len())),
    (4.0, |question, texts, meaning| ranking::fused(question, texts, meaning, 4.0, texts.len())),
];
