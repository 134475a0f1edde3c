//! Files and batches.

use crate::http::openapi::schema::{
    Kind::{Any, Bool, Either, File, Integer, List, Map, Named, Null, Text, Words},
    Object,
    Part::Own,
    answered, field, sent,
};

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "FileForm",
        "A file of requests.",
        &[Own(&[
            field("file", File, "The requests, one a line.").needed(),
            field("purpose", Words(&["batch"]), "`batch`.").needed(),
            field("expires_after[anchor]", Words(&["created_at"]), "The moment from which the file's life is counted.").not_null(),
            field("expires_after[seconds]", Integer, "The file's life.").not_null(),
        ])],
    ),
    answered(
        "FileObject",
        "A stored file.",
        &[Own(&[
            field("id", Text, "The id.").needed(),
            field("object", Text, "`file`.").needed(),
            field("bytes", Integer, "The size.").needed(),
            field("created_at", Integer, "The time in Unix seconds.").needed(),
            field("expires_at", Either(&[Integer, Null]), "The time of its end in Unix seconds.").needed(),
            field("filename", Text, "The name.").needed(),
            field("purpose", Text, "`batch` or `batch_output`.").needed(),
            field("status", Text, "`processed`.").needed(),
            field("status_details", Any, "Null.").needed(),
        ])],
    ),
    answered(
        "FileList",
        "A page of files.",
        &[Own(&[
            field("object", Text, "`list`.").needed(),
            field("data", List(&Named("FileObject")), "The files.").needed(),
            field("first_id", Either(&[Text, Null]), "The first one's id.").needed(),
            field("last_id", Either(&[Text, Null]), "The last one's id: `after` of the next page.").needed(),
            field("has_more", Bool, "Whether there is a next page.").needed(),
        ])],
    ),
    sent(
        "BatchRequest",
        "A batch to be answered within a day.",
        &[Own(&[
            field("input_file_id", Text, "The file of requests.").needed(),
            field("endpoint", Text, "The path that all its requests are for.").needed(),
            field("completion_window", Text, "`24h`.").needed(),
            field("metadata", Map(&Text), "The client's own notes: at most 16."),
            field("output_expires_after", Named("ExpiresAfter"), "The life of the answers' files."),
        ])],
    ),
    sent(
        "ExpiresAfter",
        "A file's life.",
        &[Own(&[
            field("anchor", Text, "The moment from which it is counted: `created_at`."),
            field("seconds", Integer, "The length.").needed(),
        ])],
    ),
    answered(
        "Batch",
        "A batch.",
        &[Own(&[
            field("id", Text, "The id.").needed(),
            field("object", Text, "`batch`.").needed(),
            field("endpoint", Text, "The path that its requests are for.").needed(),
            field("errors", Any, "The problems of its file, or null.").needed(),
            field("input_file_id", Text, "The file of requests.").needed(),
            field("completion_window", Text, "`24h`.").needed(),
            field(
                "status",
                Text,
                "`validating`, `in_progress`, `finalizing`, `completed`, `failed`, `expired`, `cancelling` or `cancelled`.",
            )
            .needed(),
            field("output_file_id", Either(&[Text, Null]), "The file of answers.").needed(),
            field("error_file_id", Either(&[Text, Null]), "The file of failures.").needed(),
            field("created_at", Integer, "The time in Unix seconds; so are all others.").needed(),
            field("in_progress_at", Either(&[Integer, Null]), "The time when it began.").needed(),
            field("expires_at", Either(&[Integer, Null]), "The time when it ends in any case.").needed(),
            field("finalizing_at", Either(&[Integer, Null]), "The time when all was answered.").needed(),
            field("completed_at", Either(&[Integer, Null]), "The time when it was complete.").needed(),
            field("failed_at", Either(&[Integer, Null]), "The time when it failed.").needed(),
            field("expired_at", Either(&[Integer, Null]), "The time when it had taken too long.").needed(),
            field("cancelling_at", Either(&[Integer, Null]), "The time when its client ended it.").needed(),
            field("cancelled_at", Either(&[Integer, Null]), "The time when it was over after that.").needed(),
            field("request_counts", Named("RequestCounts"), "The numbers of its requests.").needed(),
            field("metadata", Any, "The client's own notes, or null.").needed(),
        ])],
    ),
    answered(
        "RequestCounts",
        "The numbers of a batch's requests.",
        &[Own(&[
            field("total", Integer, "All.").needed(),
            field("completed", Integer, "Those that were answered.").needed(),
            field("failed", Integer, "Those that failed.").needed(),
        ])],
    ),
    answered(
        "BatchList",
        "A page of batches.",
        &[Own(&[
            field("object", Text, "`list`.").needed(),
            field("data", List(&Named("Batch")), "The batches.").needed(),
            field("first_id", Either(&[Text, Null]), "The first one's id.").needed(),
            field("last_id", Either(&[Text, Null]), "The last one's id: `after` of the next page.").needed(),
            field("has_more", Bool, "Whether there is a next page.").needed(),
        ])],
    ),
];
