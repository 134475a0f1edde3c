//! Things that are stored for clients: conversations, facts, feedback and appeals.

use crate::http::openapi::schema::{
    Kind::{Any, Bool, Either, Integer, List, Map, Named, Null, Text, Words},
    Object, Part,
    Part::Own,
    answered, field, sent,
};

/// The fields of a conversation that clients set.
pub(super) const CHANGES: Part = Own(&[
    field("metadata", Map(&Text), "The client's own notes: at most 16."),
    field("title", Text, "The title; null removes it.").ours(),
    field("model", Text, "The model that is to answer; null removes it.").ours(),
    field("instructions", Text, "The system prompt; null removes it.").ours(),
]);

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "ConversationRequest",
        "A conversation's own fields, and its first items.",
        &[CHANGES, Own(&[field("items", List(&Named("InputItem")), "The items.")])],
    ),
    sent("ConversationChange", "Changes of a conversation: a missing field stays.", &[CHANGES]),
    sent(
        "BranchRequest",
        "A new conversation with the beginning of another.",
        &[Own(&[field("at", Text, "The last item that both have; all without it.").ours()]), CHANGES],
    ),
    sent("ItemsRequest", "Items to be added.", &[Own(&[field("items", List(&Named("InputItem")), "The items.").needed()])]),
    answered(
        "Conversation",
        "A stored conversation.",
        &[Own(&[
            field("id", Text, "The id.").needed(),
            field("object", Text, "`conversation`.").needed(),
            field("created_at", Integer, "The time in Unix seconds.").needed(),
            field("metadata", Map(&Text), "The client's own notes.").needed(),
            field("title", Either(&[Text, Null]), "The title.").needed().ours(),
            field("model", Either(&[Text, Null]), "The model that answered last, or that is to answer.").needed().ours(),
            field("instructions", Either(&[Text, Null]), "The system prompt.").needed().ours(),
            field("branched_from", Any, "The conversation with the same beginning, and the last common item.").ours(),
            field("summary", Any, "The newest summary of its beginning.").ours(),
            field("updated_at", Integer, "The time of the last change in Unix seconds.").needed().ours(),
            field("messages", Integer, "The number of messages.").needed().ours(),
            field("tokens", Integer, "The number of tokens.").needed().ours(),
        ])],
    ),
    answered(
        "ConversationList",
        "A page of conversations.",
        &[Own(&[
            field("object", Text, "`list`.").needed(),
            field("data", List(&Named("Conversation")), "The conversations.").needed(),
            field("first_id", Either(&[Text, Null]), "The first one's id.").needed(),
            field("last_id", Either(&[Text, Null]), "The last one's id: `after` of the next page.").needed(),
            field("has_more", Bool, "Whether there is a next page.").needed(),
        ])],
    ),
    answered(
        "Deleted",
        "The notice of a deletion.",
        &[Own(&[
            field("id", Text, "The id of what is gone.").needed(),
            field("object", Text, "Its kind.").needed(),
            field("deleted", Bool, "True.").needed(),
        ])],
    ),
    sent("MemoryRequest", "A fact about the user.", &[Own(&[field("text", Text, "The fact, in at most 1024 bytes.").needed().ours()])]),
    answered(
        "Memory",
        "A fact about the user.",
        &[Own(&[
            field("id", Text, "The id.").needed().ours(),
            field("object", Text, "`memory`.").needed().ours(),
            field("created_at", Integer, "The time in Unix seconds.").needed().ours(),
            field("text", Text, "The fact.").needed().ours(),
        ])],
    ),
    answered(
        "MemoryList",
        "A page of facts.",
        &[Own(&[
            field("object", Text, "`list`.").needed().ours(),
            field("data", List(&Named("Memory")), "The facts.").needed().ours(),
            field("first_id", Either(&[Text, Null]), "The first one's id.").needed().ours(),
            field("last_id", Either(&[Text, Null]), "The last one's id: `after` of the next page.").needed().ours(),
            field("has_more", Bool, "Whether there is a next page.").needed().ours(),
        ])],
    ),
    answered(
        "MemoriesDeleted",
        "The notice that all facts were deleted.",
        &[Own(&[
            field("object", Text, "`memories.deleted`.").needed().ours(),
            field("deleted", Integer, "The number of facts.").needed().ours(),
        ])],
    ),
    sent(
        "AppealRequest",
        "An appeal against a block.",
        &[Own(&[
            field("appeal_id", Text, "The id that came with the block.").needed().ours(),
            field("reason", Text, "The reason of the appeal.").needed().ours(),
        ])],
    ),
    answered(
        "Appeal",
        "An appeal that was filed.",
        &[Own(&[
            field("id", Text, "The id.").needed().ours(),
            field("object", Text, "`appeal`.").needed().ours(),
            field("status", Text, "`open`.").needed().ours(),
        ])],
    ),
    sent(
        "FeedbackRequest",
        "A user's opinion of an answer.",
        &[Own(&[
            field("response_id", Text, "The answer's id.").needed().ours(),
            field("rating", Words(&["up", "down"]), "The rating.").ours(),
            field("regenerate", Bool, "Whether the user asked for a new answer.").not_null().ours(),
            field("comment", Text, "The user's words.").ours(),
            field("user", Text, "A name for display, if several users share a key.").ours(),
        ])],
    ),
    answered(
        "Feedback",
        "An opinion that was taken.",
        &[Own(&[
            field("object", Text, "`feedback`.").needed().ours(),
            field("response_id", Text, "The answer's id.").needed().ours(),
            field("rating", Either(&[Text, Null]), "The rating.").needed().ours(),
            field("replaced", Bool, "Whether it stands in place of an earlier opinion.").needed().ours(),
        ])],
    ),
];
