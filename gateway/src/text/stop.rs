//! Stop strings in a stream of text: text that may be the beginning of one is held back until it is certain.

/// Watches for a request's stop strings.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// Whether the stop string itself is sent as well.
    include: bool,
    held: String,
}

/// The result of further text.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send this text and continue.
    Continue(String),
    /// Send this text; it ends here, because of this stop string.
    Stopped { text: String, stop: String },
}

impl StopMatcher {
    /// Creates a matcher. Empty strings never match.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), include, held: String::new() }
    }

    /// Takes text. `armed` tells whether stop strings apply yet (the minimum of tokens is reached).
    pub fn push(&mut self, text: &str, armed: bool) -> Verdict {
        if self.stops.is_empty() || !armed {
            return Verdict::Continue(text.to_owned());
        }
        self.held.push_str(text);
        // The one that starts first; the longest if two start together, so that the answer does not depend on how the text was cut into
        // tokens.
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len()))) {
            let (end, stop) = (if self.include { at + stop.len() } else { at }, stop.clone());
            let mut text = std::mem::take(&mut self.held);
            text.truncate(end);
            return Verdict::Stopped { text, stop };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Verdict::Continue(std::mem::replace(&mut self.held, rest))
    }

    /// Ends the text for a different reason: text held back is part of it after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Panics if more text is held back than a stop string could need. Tests call it after every step.
    pub fn check_integrity(&self) {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        assert!(self.held.is_empty() || self.held.len() < longest, "`{}` is held back", self.held);
    }
}

/// The length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths.filter(|&length| length <= text.len()).find(|&length| text.ends_with(&stop[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], include: bool, parts: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect(), include);
        let mut out = String::new();
        for part in parts {
            match matcher.push(part, true) {
                Verdict::Continue(text) => {
                    out += &text;
                    matcher.check_integrity();
                }
                Verdict::Stopped { text, stop } => return (out + &text, Some(stop)),
            }
        }
        (out + &matcher.finish(), None)
    }

    #[test]
    fn a_stop_string_across_parts_never_shows() {
        assert_eq!(run(&["END"], false, &["one E", "N", "D two"]), ("one ".into(), Some("END".into())));
        assert_eq!(run(&["END"], true, &["one E", "N", "D two"]), ("one END".into(), Some("END".into())));
        assert_eq!(run(&["END"], false, &["one E", "N", "d two"]), ("one ENd two".into(), None));
        assert_eq!(run(&["END"], false, &["one EN"]), ("one EN".into(), None));
    }

    #[test]
    fn the_first_to_begin_wins() {
        assert_eq!(run(&["c", "bc"], false, &["abc"]), ("a".into(), Some("bc".into())));
        assert_eq!(run(&["\n", "\n\n"], false, &["a", "\n", "\nb"]), ("a".into(), Some("\n".into())));
    }

    #[test]
    fn nothing_counts_before_it_is_armed() {
        let mut matcher = StopMatcher::new(vec!["a".into()], false);
        assert_eq!(matcher.push("a", false), Verdict::Continue("a".into()));
        assert_eq!(matcher.push("ba", true), Verdict::Stopped { text: "b".into(), stop: "a".into() });
    }

    proptest! {
        #[test]
        fn one_stop_string_is_found_however_the_text_is_cut(text in "[ab潮]{0,24}", stop in "[ab潮]{1,3}", cuts in prop::collection::vec(0usize..24, 0..6)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| text.floor_char_boundary(cut.min(text.len()))).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let parts: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let (out, stopped) = run(&[&stop], false, &parts);
            match text.find(&stop) {
                Some(at) => prop_assert_eq!((out, stopped), (text[..at].to_owned(), Some(stop))),
                None => prop_assert_eq!((out, stopped), (text, None)),
            }
        }
    }
}
