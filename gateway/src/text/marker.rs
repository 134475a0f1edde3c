//! Marks in a stream of characters: text that may be the beginning of one is held back until it is certain.

/// Watches for the first of several marks.
#[derive(Debug)]
pub(super) struct MarkerWatch {
    marks: Vec<&'static str>,
    held: String,
}

impl MarkerWatch {
    pub(super) fn new(marks: impl IntoIterator<Item = &'static str>) -> Self {
        Self { marks: marks.into_iter().collect(), held: String::new() }
    }

    /// Whether the last text may be a mark's beginning.
    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// The length of such a text.
    pub(super) fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Counts the characters that may be a mark's beginning.
    pub(super) fn held(&self) -> usize {
        self.held.chars().count()
    }

    /// Calls `pass` with every character that is certainly not part of a mark. Returns the mark that is complete with `c`.
    pub(super) fn step(&mut self, c: char, mut pass: impl FnMut(char)) -> Option<&'static str> {
        self.held.push(c);
        loop {
            if let Some(mark) = self.marks.iter().find(|mark| **mark == self.held) {
                self.held.clear();
                return Some(mark);
            }
            if self.held.is_empty() || self.marks.iter().any(|mark| mark.starts_with(&self.held)) {
                return None;
            }
            pass(self.held.remove(0));
        }
    }

    /// Returns the text that is held back, since no more marks can come.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_behind_their_own_beginnings() {
        let mut watch = MarkerWatch::new(["<<x>", "</y>"]);
        let mut passed = String::new();
        let found: Vec<_> = "a<<<x>b</</y>c<".chars().filter_map(|c| watch.step(c, |c| passed.push(c))).collect();
        assert_eq!((found, passed.as_str(), watch.finish().as_str()), (vec!["<<x>", "</y>"], "a<b</c", "<"));
    }
}
