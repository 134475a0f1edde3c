//! An answer's pieces as blocks: thoughts, texts and calls, in the order of their start, of which the last may still grow. The shape of a block,
//! and the events by which it grows, are its protocol's.

use crate::generation::piece::{CallDelta, Piece};

/// The kind of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Thought,
    Text,
    Call { index: u32, id: String, name: String },
}

/// A protocol's blocks.
pub(super) trait Blocks {
    /// The kind of the block that still grows.
    fn open(&mut self) -> &mut Option<Kind>;
    fn opened(&mut self, kind: &Kind);
    /// Adds to the open block: some of a text, or of a call's arguments.
    fn grown(&mut self, kind: &Kind, text: &str);
    fn closed(&mut self, kind: Kind, status: &'static str);

    fn add(&mut self, piece: &Piece) {
        if !piece.reasoning.is_empty() {
            self.grow(Kind::Thought, &piece.reasoning);
        }
        if !piece.text.is_empty() {
            self.grow(Kind::Text, &piece.text);
        }
        for CallDelta { index, id, name, arguments } in &piece.calls {
            if !matches!(self.open(), Some(Kind::Call { index: open, .. }) if open == index) {
                let (id, name) = (id.clone().unwrap_or_default(), name.clone().unwrap_or_default());
                self.begin(Kind::Call { index: *index, id, name });
            }
            self.append(arguments);
        }
    }

    fn grow(&mut self, kind: Kind, text: &str) {
        if self.open().as_ref() != Some(&kind) {
            self.begin(kind);
        }
        self.append(text);
    }

    fn begin(&mut self, kind: Kind) {
        self.close("completed");
        self.opened(&kind);
        *self.open() = Some(kind);
    }

    fn append(&mut self, text: &str) {
        if let Some(kind) = self.open().take() {
            if !text.is_empty() {
                self.grown(&kind, text);
            }
            *self.open() = Some(kind);
        }
    }

    /// Ends the block that still grows, if there is one.
    fn close(&mut self, status: &'static str) {
        if let Some(kind) = self.open().take() {
            self.closed(kind, status);
        }
    }
}
