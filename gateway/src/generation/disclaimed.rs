//! An answer with its operator's disclaimer: once, at the end of the model's text. An answer that was cut by safety checks gets none, and
//! neither does one that ends in tool calls, since it continues.

use crate::generation::piece::{Finish, FinishReason, Inspect, Piece};
use std::{ops::ControlFlow, sync::Arc};
use tidemill_safety::disclaimers::{Disclaimer, Reading};

/// The text before each disclaimer.
const BREAK: &str = "\n\n";

/// The disclaimers after answers.
#[derive(Clone, Debug)]
pub struct Disclaimed {
    /// The disclaimers, in their order.
    pub disclaimers: Arc<[Disclaimer]>,
    /// Called with the name of each disclaimer that was added.
    pub count: fn(&str),
}

impl Disclaimed {
    /// Makes the inspector of one choice.
    pub fn inspector(&self) -> Inspector {
        Inspector { reading: Reading::new(Arc::clone(&self.disclaimers)), count: self.count, calls: false }
    }
}

#[derive(Debug)]
pub struct Inspector {
    reading: Reading,
    count: fn(&str),
    /// Whether a tool was called.
    calls: bool,
}

impl Inspect for Inspector {
    fn inspect(&mut self, piece: &mut Piece) -> ControlFlow<Finish> {
        self.calls |= !piece.calls.is_empty();
        self.reading.push(&piece.text);
        let ends = |finish: &Finish| matches!(finish.reason, FinishReason::Stop | FinishReason::Length);
        if !self.calls && piece.finish.as_ref().is_some_and(ends) {
            for disclaimer in self.reading.finish() {
                piece.text += BREAK;
                piece.text += &disclaimer.text;
                (self.count)(&disclaimer.name);
            }
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::piece::CallDelta;

    fn said(pieces: Vec<Piece>) -> Vec<String> {
        let medical = Disclaimer::new("medical".into(), &["side effects".into()], "Ask a doctor.".into()).unwrap();
        let mut inspector = Disclaimed { disclaimers: [medical].into(), count: |_| {} }.inspector();
        let said = |mut piece: Piece| {
            assert!(inspector.inspect(&mut piece).is_continue());
            piece.text
        };
        pieces.into_iter().map(said).collect()
    }

    fn piece(text: &str, reason: Option<FinishReason>) -> Piece {
        Piece { text: text.into(), finish: reason.map(|reason| Finish { reason, stop_reason: None }), ..Piece::default() }
    }

    #[test]
    fn it_comes_once_at_the_end() {
        let pieces = |reason| vec![piece("Side ", None), piece("effects and side effects", None), piece(".", Some(reason))];
        let whole = ["Side ", "effects and side effects", ".\n\nAsk a doctor."];
        assert_eq!([said(pieces(FinishReason::Stop)), said(pieces(FinishReason::Length))], [whole, whole]);
        assert_eq!(said(vec![piece("No effects.", Some(FinishReason::Stop))]), ["No effects."]);
        assert_eq!(
            said(vec![piece("Side effects", Some(FinishReason::Stop))]),
            ["Side effects\n\nAsk a doctor."],
            "a match may end with it"
        );
    }

    #[test]
    fn it_does_not_come_after_a_cut_or_a_call() {
        assert_eq!(said(vec![piece("Side effects.", None), piece("", Some(FinishReason::ContentFilter))]), ["Side effects.", ""]);
        let call = Piece { calls: vec![CallDelta::default()], ..piece("Side effects.", None) };
        for reason in [FinishReason::ToolCalls, FinishReason::Length] {
            assert_eq!(said(vec![call.clone(), piece("", Some(reason))]), ["Side effects.", ""]);
        }
    }
}
