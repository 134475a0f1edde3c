//! The objects of both documents, by the part of the API that they belong to. Each table stands for the structs that read or write the
//! object: the test of `read` compares them.

mod answers;
mod batches;
mod chat;
mod generate;
mod items;
mod messages;
mod operators;
mod stored;
mod texts;

use super::schema::Object;

/// All objects. A document has those that its operations mention.
pub(super) fn all() -> impl Iterator<Item = &'static Object> {
    [
        answers::OBJECTS,
        batches::OBJECTS,
        chat::OBJECTS,
        generate::OBJECTS,
        items::OBJECTS,
        messages::OBJECTS,
        operators::OBJECTS,
        stored::OBJECTS,
        texts::OBJECTS,
    ]
    .into_iter()
    .flatten()
}
