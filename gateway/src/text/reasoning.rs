//! Reasoning: a model's text between two marks before its answer. The marks are those of its chat template.

use super::{marker::MarkerWatch, template::ChatTemplate};
use crate::text::events::Events;

/// The marks in published templates.
const MARKS: [(&str, &str); 4] =
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>")];

/// A model's way to reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thought {
    pub begin: &'static str,
    pub end: &'static str,
    /// Whether the prompt has already started the reasoning.
    pub open: bool,
    /// Whether the answer may start with reasoning: not if the prompt already contains it, as it does for models that should not reason.
    /// Some do all the same.
    pub wanted: bool,
}

impl Thought {
    /// The reasoning in answers to this prompt; `None` for a model without marks for it.
    pub fn after(template: &ChatTemplate, prompt: &str) -> Option<Self> {
        let (begin, end) = Self::marks_in(template)?;
        let prompt = prompt.trim_end();
        Some(Self { begin, end, open: prompt.ends_with(begin), wanted: !prompt.ends_with(end) })
    }

    /// The marks between which a template puts reasoning.
    pub(super) fn marks_in(template: &ChatTemplate) -> Option<(&'static str, &'static str)> {
        MARKS.into_iter().find(|(begin, end)| template.mentions(begin) && template.mentions(end))
    }

    /// The marks of a template that looks for reasoning in an assistant's text.
    pub fn taken_out_by(template: &ChatTemplate) -> Option<(&'static str, &'static str)> {
        let splits = |end: &str| template.mentions(&format!("split('{end}')")) || template.mentions(&format!("split(\"{end}\")"));
        MARKS.into_iter().find(|(_, end)| splits(end))
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        [self.begin, self.end].into_iter()
    }
}

/// Splits reasoning off the beginning of an answer. White space beside its marks is dropped.
#[derive(Debug)]
pub(super) struct ThoughtSplitter {
    begin: &'static str,
    end_mark: &'static str,
    end: MarkerWatch,
    state: State,
    /// White space that may turn out to be before a mark.
    space: String,
}

#[derive(Debug)]
enum State {
    /// Only white space and this part of a mark so far.
    Before(String),
    /// In the reasoning; `true` if it has text.
    Thinking(bool),
    /// The reasoning has ended, followed only by white space.
    Between,
    Answer,
}

impl ThoughtSplitter {
    pub(super) fn new(thought: Thought) -> Self {
        let state = if thought.open { State::Thinking(false) } else { State::Before(String::new()) };
        Self { begin: thought.begin, end_mark: thought.end, end: MarkerWatch::new([thought.end]), state, space: String::new() }
    }

    pub(super) fn thinks(&self) -> bool {
        matches!(self.state, State::Thinking(_))
    }

    pub(super) fn held_bytes(&self) -> usize {
        if self.thinks() { self.end.held_bytes() } else { 0 }
    }

    /// Counts the characters that are held back and may be text.
    pub(super) fn held(&self) -> usize {
        match &self.state {
            State::Before(mark) => self.space.chars().count() + mark.chars().count(),
            State::Thinking(_) | State::Between | State::Answer => 0,
        }
    }

    /// Takes a character. `answer` gets the text outside reasoning.
    pub(super) fn step(&mut self, c: char, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
        match &mut self.state {
            State::Answer => answer(c, events),
            State::Between if c.is_whitespace() => {}
            State::Between => {
                self.state = State::Answer;
                answer(c, events);
            }
            State::Before(mark) if mark.is_empty() && c.is_whitespace() => self.space.push(c),
            State::Before(mark) => {
                mark.push(c);
                if mark == self.begin {
                    self.space.clear();
                    self.state = State::Thinking(false);
                } else if mark == self.end_mark {
                    // This space belongs to reasoning that the prompt has already ended.
                    self.space.clear();
                    self.state = State::Between;
                } else if !self.begin.starts_with(mark.as_str()) && !self.end_mark.starts_with(mark.as_str()) {
                    self.give_up(events, answer);
                }
            }
            State::Thinking(begun) => {
                let space = &mut self.space;
                let pass = |c: char| {
                    if c.is_whitespace() {
                        // It may still turn out to be before the end; at the beginning it is dropped.
                        if *begun {
                            space.push(c);
                        }
                    } else {
                        *begun = true;
                        space.push(c);
                        events.thought(space);
                        space.clear();
                    }
                };
                if self.end.step(c, pass).is_some() {
                    self.space.clear();
                    self.state = State::Between;
                }
            }
        }
    }

    /// Ends the text. If it was `cut`, it may end within a mark.
    pub(super) fn finish(&mut self, cut: bool, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
        match &self.state {
            State::Before(mark) if cut && is_begun(mark) => {}
            State::Before(_) => self.give_up(events, answer),
            State::Thinking(_) => events.thought(&(std::mem::take(&mut self.space) + &self.end.finish())),
            State::Between | State::Answer => {}
        }
    }

    /// Passes held text on, as it is not reasoning.
    fn give_up(&mut self, events: &mut Events, answer: &mut impl FnMut(char, &mut Events)) {
        let State::Before(mark) = std::mem::replace(&mut self.state, State::Answer) else { return };
        let held = std::mem::take(&mut self.space) + &mark;
        held.chars().for_each(|c| answer(c, events));
    }
}

/// Whether text that was cut ends within a mark: a single character may be anything.
pub(super) fn is_begun(mark: &str) -> bool {
    mark.chars().nth(1).is_some()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            config::ModelConfig,
            output::{OutputRules, Splitter},
        },
        *,
    };
    use crate::text::events::Event;

    fn split(open: bool, text: &str) -> Vec<Event> {
        split_cut(open, text, false)
    }

    fn split_cut(open: bool, text: &str, cut: bool) -> Vec<Event> {
        let thought = Thought { begin: "<think>", end: "</think>", open, wanted: true };
        let rules = OutputRules { thought: Some(thought), ..OutputRules::default() };
        let mut splitter = Splitter::new(&rules);
        let mut events = splitter.push(text);
        events.extend(splitter.finish(cut));
        events
    }

    fn thought(text: &str) -> Event {
        Event::Thought(text.into())
    }

    fn text(text: &str) -> Event {
        Event::Text(text.into())
    }

    #[test]
    fn a_thought_ends_where_its_mark_is_and_white_space_beside_marks_is_nothing() {
        assert_eq!(split(false, "\n<think>\n a b\n\nc \n</think>\n\nd e\n"), [thought("a b\n\nc"), text("d e\n")]);
        assert_eq!(split(true, "\na</thin</think>b"), [thought("a</thin"), text("b")]);
        assert_eq!(split(true, "</think>\n\n"), []);
        assert_eq!(split(false, "<think>\n\n</think>\n\nx"), [text("x")]);
    }

    #[test]
    fn what_begins_otherwise_is_text() {
        assert_eq!(split(false, "  <thing>x</think>"), [text("  <thing>x</think>")]);
        assert_eq!(split(false, "a <think>b</think>"), [text("a <think>b</think>")]);
        assert_eq!(split(false, " <th"), [text(" <th")]);
    }

    #[test]
    fn a_mark_that_was_cut_is_no_text() {
        assert_eq!(split_cut(false, "\n<thi", true), []);
        assert_eq!(split_cut(false, "<", true), [text("<")], "that may be anything");
    }

    #[test]
    fn a_mark_that_ends_a_thought_of_the_prompt_again_is_nothing() {
        assert_eq!(split(false, "\n</think>\n\nx"), [text("x")]);
        assert_eq!(split(false, "</thin>"), [text("</thin>")]);
    }

    #[test]
    fn a_thought_that_was_cut_is_all_thought() {
        assert_eq!(split(true, "a b \n</thi").into_iter().reduce(join), Some(thought("a b \n</thi")));
    }

    fn join(a: Event, b: Event) -> Event {
        match (a, b) {
            (Event::Thought(a), Event::Thought(b)) => Event::Thought(a + &b),
            (a, b) => panic!("{a:?}, {b:?}"),
        }
    }

    #[test]
    fn the_templates_own_marks_count() {
        let template = |source: &str| ChatTemplate::new(source.into(), &ModelConfig::default()).unwrap();
        let qwen = template("{% if '</think>' in x %}{% endif %}<think>\n");
        let open = Thought::after(&qwen, "user: <think>?\nassistant:\n<think>\n").unwrap();
        assert_eq!((open.begin, open.end, open.open), ("<think>", "</think>", true));
        let told_not_to = "assistant:\n<think>\n\n</think>\n\n";
        let closed = Thought::after(&qwen, told_not_to).unwrap();
        assert!(!closed.open && !closed.wanted && Thought::after(&qwen, "assistant:\n").unwrap().wanted);
        assert_eq!(Thought::after(&template("[THINK]{{ x }}[/THINK]"), "").unwrap().end, "[/THINK]");
        assert_eq!(Thought::after(&template("<think>"), ""), None, "a begin without an end is no block");
    }
}
