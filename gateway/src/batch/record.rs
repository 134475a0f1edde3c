//! Lines of the files of answers and of errors.

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
    json!({"id": id, "custom_id": custom_id, "response": response, "error": null}).to_string() + "\n"
}

/// The line of a request without an answer, with the reason.
pub fn unanswered(id: &str, custom_id: &str, code: &str, message: &str) -> String {
    let error = json!({"code": code, "message": message});
    json!({"id": id, "custom_id": custom_id, "response": null, "error": error}).to_string() + "\n"
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
            answer("batch_req_1", "a\n\"", 200, "req_1", &json!({"text": "two\nlines"})),
            unanswered("batch_req_2", "a\n\"", "batch_expired", "too late"),
        ];
        for record in records {
            assert_eq!(record.matches('\n').count(), 1);
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
