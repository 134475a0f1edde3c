//! Deterministic automata over the few classes of characters that an expression tells apart.

use super::Work;
use regex_syntax::hir::{Class, Hir, HirKind};
use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
};

/// The most states of an automaton.
const STATES_MAX: usize = 4096;
/// The number after that of the last character.
const END: u32 = 0x11_0000;
const SURROGATES: (u32, u32) = (0xd800, 0xe000);

type Ranges = Vec<(u32, u32)>;

/// Characters in classes; an expression treats all characters of a class alike.
pub(super) struct Alphabet {
    /// The ranges of each class, excluding their ends.
    ranges: Vec<Ranges>,
    /// The classes of each set of characters that an expression names.
    sets: HashMap<Ranges, Vec<usize>>,
}

impl Alphabet {
    pub(super) fn of<'h>(expressions: impl Iterator<Item = &'h Hir>, work: &mut Work) -> Option<Self> {
        let mut sets = HashMap::new();
        for expression in expressions {
            collect(expression, &mut sets)?;
        }
        let mut bounds: BTreeSet<u32> = [0, SURROGATES.0, SURROGATES.1, END].into();
        sets.keys().flatten().for_each(|&(start, end)| bounds.extend([start, end]));
        work.pay(bounds.len().saturating_mul(sets.len()))?;
        let mut order: Vec<&Ranges> = sets.keys().collect();
        order.sort();
        let mut known: HashMap<Vec<bool>, usize> = HashMap::new();
        let mut ranges: Vec<Ranges> = Vec::new();
        let bounds: Vec<u32> = bounds.into_iter().collect();
        for pair in bounds.windows(2).filter(|pair| pair[0] != SURROGATES.0) {
            let within = |set: &&Ranges| {
                let after = set.partition_point(|&(start, _)| start <= pair[0]);
                after > 0 && pair[0] < set[after - 1].1
            };
            let class = *known.entry(order.iter().map(within).collect()).or_insert_with(|| {
                ranges.push(Vec::new());
                ranges.len() - 1
            });
            ranges[class].push((pair[0], pair[1]));
        }
        let mut by_set: HashMap<Ranges, Vec<usize>> = HashMap::new();
        for (signature, class) in known {
            for (set, _) in order.iter().zip(signature).filter(|(_, within)| *within) {
                by_set.entry((*set).clone()).or_default().push(class);
            }
        }
        Some(Self { ranges, sets: by_set })
    }

    pub(super) fn classes(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the ranges of some classes in order, excluding their ends.
    pub(super) fn ranges(&self, classes: &[usize]) -> Ranges {
        let mut all: Ranges = classes.iter().flat_map(|&class| self.ranges[class].iter().copied()).collect();
        all.sort_unstable();
        let mut merged: Ranges = Vec::new();
        for (start, end) in all {
            match merged.last_mut() {
                Some(last) if last.1 == start || (last.1, start) == SURROGATES => last.1 = end,
                _ => merged.push((start, end)),
            }
        }
        merged
    }
}

/// Collects the sets of characters that an expression names, or returns `None` if it is anchored or matches bytes.
fn collect(expression: &Hir, sets: &mut HashMap<Ranges, ()>) -> Option<()> {
    match expression.kind() {
        HirKind::Empty => {}
        HirKind::Literal(literal) => {
            for c in std::str::from_utf8(&literal.0).ok()?.chars() {
                sets.insert(vec![(c as u32, c as u32 + 1)], ());
            }
        }
        HirKind::Class(class) => drop(sets.insert(ranges(class)?, ())),
        HirKind::Look(_) => return None,
        HirKind::Repetition(repeated) => collect(&repeated.sub, sets)?,
        HirKind::Capture(capture) => collect(&capture.sub, sets)?,
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().try_for_each(|part| collect(part, sets))?,
    }
    Some(())
}

fn ranges(class: &Class) -> Option<Ranges> {
    match class {
        Class::Unicode(class) => Some(class.ranges().iter().map(|range| (range.start() as u32, range.end() as u32 + 1)).collect()),
        Class::Bytes(class) => {
            let is_ascii = class.ranges().iter().all(|range| range.end() < 0x80);
            is_ascii.then(|| class.ranges().iter().map(|range| (range.start().into(), u32::from(range.end()) + 1)).collect())
        }
    }
}

/// A complete deterministic automaton, which begins in state 0.
#[derive(Clone)]
pub(super) struct Dfa {
    /// The next state, by state and class of characters.
    pub(super) next: Vec<Vec<usize>>,
    pub(super) accepts: Vec<bool>,
}

impl Dfa {
    pub(super) fn any(classes: usize) -> Self {
        Self { next: vec![vec![0; classes]], accepts: vec![true] }
    }

    pub(super) fn none(classes: usize) -> Self {
        Self { next: vec![vec![0; classes]], accepts: vec![false] }
    }

    pub(super) fn empty_text(classes: usize) -> Self {
        Self { next: vec![vec![1; classes]; 2], accepts: vec![true, false] }
    }

    pub(super) fn not(mut self) -> Self {
        self.accepts.iter_mut().for_each(|accepts| *accepts = !*accepts);
        self
    }

    pub(super) fn combined(a: &Self, b: &Self, accepts: impl Fn(bool, bool) -> bool, work: &mut Work) -> Option<Self> {
        let classes = a.next[0].len();
        let next = |&(x, y): &(usize, usize), class: usize| (a.next[x][class], b.next[y][class]);
        Self::explored((0, 0), classes, next, |&(x, y)| accepts(a.accepts[x], b.accepts[y]), |_| 1, work)
    }

    /// Returns the language of one or more characters, followed by a text of this language.
    pub(super) fn after_something(&self, work: &mut Work) -> Option<Self> {
        let classes = self.next[0].len();
        let next = |states: &BTreeSet<usize>, class: usize| {
            states.iter().map(|&state| self.next[state][class]).chain([0]).collect::<BTreeSet<_>>()
        };
        Self::explored(BTreeSet::new(), classes, next, |states| states.iter().any(|&state| self.accepts[state]), BTreeSet::len, work)
    }

    /// Returns the language of a text that `expression` matches, followed by a text of this language.
    pub(super) fn after(&self, expression: &Hir, alphabet: &Alphabet, work: &mut Work) -> Option<Self> {
        let mut nfa = Nfa { edges: Vec::new(), skips: Vec::new() };
        let (start, end) = (nfa.state()?, nfa.state()?);
        nfa.build(expression, start, end, alphabet)?;
        work.pay(nfa.edges.len())?;
        // The states that it can be in: those of the expression, and after its end those of this automaton.
        type Sets = (BTreeSet<usize>, BTreeSet<usize>);
        let close = |states: BTreeSet<usize>, mut rest: BTreeSet<usize>| -> Sets {
            let mut all = states.clone();
            let mut waiting: Vec<usize> = states.into_iter().collect();
            while let Some(state) = waiting.pop() {
                if state == end {
                    rest.insert(0);
                }
                waiting.extend(nfa.skips[state].iter().copied().filter(|&skip| all.insert(skip)));
            }
            // The other states only lead on.
            all.retain(|&state| !nfa.edges[state].is_empty());
            (all, rest)
        };
        let next = |(states, rest): &Sets, class: usize| {
            let edges = states.iter().flat_map(|&state| &nfa.edges[state]).filter(|(classes, _)| classes.contains(&class));
            let states = edges.map(|&(_, to)| to).collect();
            close(states, rest.iter().map(|&state| self.next[state][class]).collect())
        };
        let first = close([start].into(), BTreeSet::new());
        let is_accepting = |(_, rest): &Sets| rest.iter().any(|&state| self.accepts[state]);
        Self::explored(first, alphabet.classes(), next, is_accepting, |(states, rest)| states.len() + rest.len(), work)
    }

    /// Builds the automaton of all states reached from `first`, and merges those that are equivalent.
    fn explored<S: Clone + Eq + Hash>(
        first: S,
        classes: usize,
        next_of: impl Fn(&S, usize) -> S,
        is_accepting: impl Fn(&S) -> bool,
        // The number of transitions of a state's parts.
        cost: impl Fn(&S) -> usize,
        work: &mut Work,
    ) -> Option<Self> {
        let mut numbers = HashMap::from([(first.clone(), 0)]);
        let mut states = vec![first];
        let (mut next, mut accepts) = (Vec::new(), Vec::new());
        while next.len() < states.len() {
            let state = states[next.len()].clone();
            work.pay(classes * cost(&state).max(1))?;
            accepts.push(is_accepting(&state));
            let row = (0..classes).map(|class| {
                let to = next_of(&state, class);
                *numbers.entry(to.clone()).or_insert_with(|| {
                    states.push(to);
                    states.len() - 1
                })
            });
            next.push(row.collect());
            if states.len() > STATES_MAX {
                return None;
            }
        }
        Self { next, accepts }.least(work)
    }

    /// Merges equivalent states (Moore's algorithm).
    fn least(self, work: &mut Work) -> Option<Self> {
        let classes = self.next[0].len();
        let mut block: Vec<usize> = self.accepts.iter().map(|&accepts| accepts.into()).collect();
        let mut count = 0;
        loop {
            work.pay(self.next.len() * classes / 4 + 1)?;
            let mut numbers = HashMap::new();
            let signatures = self.next.iter().enumerate().map(|(state, row)| {
                let signature: Vec<usize> = std::iter::once(block[state]).chain(row.iter().map(|&to| block[to])).collect();
                let number = numbers.len();
                // The first state is number 0.
                *numbers.entry(signature).or_insert(number)
            });
            let refined: Vec<usize> = signatures.collect();
            let is_done = numbers.len() == count;
            count = numbers.len();
            block = refined;
            if is_done {
                break;
            }
        }
        let mut least = Self { next: vec![Vec::new(); count], accepts: vec![false; count] };
        for (state, row) in self.next.iter().enumerate() {
            least.next[block[state]] = row.iter().map(|&to| block[to]).collect();
            least.accepts[block[state]] = self.accepts[state];
        }
        Some(least)
    }
}

/// The nondeterministic automaton of an expression (Thompson's construction).
struct Nfa {
    edges: Vec<Vec<(Vec<usize>, usize)>>,
    skips: Vec<Vec<usize>>,
}

impl Nfa {
    fn state(&mut self) -> Option<usize> {
        self.edges.push(Vec::new());
        self.skips.push(Vec::new());
        (self.edges.len() <= 4 * STATES_MAX).then_some(self.edges.len() - 1)
    }

    fn build(&mut self, expression: &Hir, from: usize, to: usize, alphabet: &Alphabet) -> Option<()> {
        match expression.kind() {
            HirKind::Empty => self.skips[from].push(to),
            HirKind::Literal(literal) => {
                let mut at = from;
                for c in std::str::from_utf8(&literal.0).ok()?.chars() {
                    let after = self.state()?;
                    self.edges[at].push((alphabet.sets[&vec![(c as u32, c as u32 + 1)]].clone(), after));
                    at = after;
                }
                self.skips[at].push(to);
            }
            HirKind::Class(class) => {
                // An empty set has no classes.
                let classes = alphabet.sets.get(&ranges(class)?).cloned().unwrap_or_default();
                self.edges[from].push((classes, to));
            }
            HirKind::Look(_) => return None,
            HirKind::Capture(capture) => self.build(&capture.sub, from, to, alphabet)?,
            HirKind::Concat(parts) => {
                let mut at = from;
                for part in parts {
                    let after = self.state()?;
                    self.build(part, at, after, alphabet)?;
                    at = after;
                }
                self.skips[at].push(to);
            }
            HirKind::Alternation(options) => {
                // Each option has a start of its own, so that a loop in one does not lead into another.
                for option in options {
                    let (start, end) = (self.state()?, self.state()?);
                    self.skips[from].push(start);
                    self.build(option, start, end, alphabet)?;
                    self.skips[end].push(to);
                }
            }
            HirKind::Repetition(repeated) => {
                let mut at = from;
                for _ in 0..repeated.min {
                    let after = self.state()?;
                    self.build(&repeated.sub, at, after, alphabet)?;
                    at = after;
                }
                match repeated.max {
                    None => {
                        let (start, end) = (self.state()?, self.state()?);
                        self.skips[at].push(start);
                        self.build(&repeated.sub, start, end, alphabet)?;
                        self.skips[end].push(start);
                        self.skips[start].push(to);
                    }
                    Some(most) => {
                        for _ in repeated.min..most {
                            let after = self.state()?;
                            self.skips[at].push(to);
                            self.build(&repeated.sub, at, after, alphabet)?;
                            at = after;
                        }
                        self.skips[at].push(to);
                    }
                }
            }
        }
        Some(())
    }
}
