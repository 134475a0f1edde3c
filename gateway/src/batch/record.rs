//! Lines of the files of answers and of errors.

use crate::base::json;
use serde::Deserialize;
use serde_json::{Value, json};

/// Makes a request's id, which is always the same, so that a request that runs again after a crash keeps its id.
pub fn request_id(batch: &str, line: u64) -> String {
    let hash = blake3::hash(format!("{batch} {line}").as_bytes()).to_hex();
    format!("batch_req_{}", &hash[..32])
}

/// The line of an answer, good or bad.
pub fn answer(id: &str, custom_id: &str, status: u16, request_id: &str, body: &Value) -> String {
    let response = json!({"status_code": status, "request_id": request_id, "body": body});
    line(&json!({"id": id, "custom_id": custom_id, "response": response, "error": null}))
}

/// The line of a request without an answer, with the reason.
pub fn unanswered(id: &str, custom_id: &str, code: &str, message: &str) -> String {
    let error = json!({"code": code, "message": message});
    line(&json!({"id": id, "custom_id": custom_id, "response": null, "error": error}))
}

/// Writes a line that is one for every reader: some also split at characters that JSON leaves as they are.
fn line(record: &Value) -> String {
    let record = record.to_string();
    let escaped = json::unbroken(record.as_bytes()).map(|bytes| String::from_utf8(bytes).expect("only characters were replaced"));
    escaped.unwrap_or(record) + "\n"
}

/// Reads the `custom_id` of a line; `None` if the line is torn.
pub fn custom_id(line: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Fields {
        custom_id: String,
    }
    let line = line.strip_suffix(b"\n")?;
    serde_json::from_slice::<Fields>(line).ok().map(|fields| fields.custom_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_known_by_their_custom_ids_unless_they_are_torn() {
        let records = [
            answer("batch_req_1", "a\n\"", 200, "req_1", &json!({"text": "two\nlines, and \u{2028} one"})),
            unanswered("batch_req_2", "a\n\"", "batch_expired", "too late"),
        ];
        for record in records {
            assert_eq!(record.matches(['\n', '\u{85}', '\u{2028}', '\u{2029}']).count(), 1);
            assert_eq!(custom_id(record.as_bytes()).as_deref(), Some("a\n\""));
            for end in 0..record.len() {
                assert_eq!(custom_id(&record.as_bytes()[..end]), None, "{end}");
            }
        }
    }

    #[test]
    fn a_request_keeps_its_id() {
        assert_eq!(request_id("batch_1", 7), request_id("batch_1", 7));
        assert_ne!(request_id("batch_1", 7), request_id("batch_1", 8));
        assert_eq!(request_id("batch_1", 7).len(), "batch_req_".len() + 32);
    }
}
