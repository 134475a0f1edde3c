//! A file of requests: one JSON object per line, with `custom_id`, `method`, `url` and `body`. All of it is checked before any of it runs,
//! and each problem is reported with its line, in OpenAI's codes.

use crate::base::json;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;

/// The endpoints that a batch may use.
pub const ENDPOINTS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
/// The maximum number of reported problems: a client sees further ones at its next attempt.
const PROBLEMS_MAX: usize = 100;
const CUSTOM_ID_BYTES_MAX: usize = 512;

/// A problem with a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    pub code: String,
    /// The line's number, from 1; `None` if the problem does not concern a line.
    pub line: Option<u64>,
    pub message: String,
    pub param: Option<String>,
}

impl Problem {
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), line: None, message: message.into(), param: None }
    }

    fn of(param: &str, code: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(code, message) }
    }
}

/// A request, and its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The line's number, from 1.
    pub number: u64,
    pub offset: u64,
    pub bytes: usize,
    pub custom_id: String,
}

/// A parsed line.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub custom_id: String,
    pub body: Map<String, Value>,
}

/// Parses a line. `endpoint` is the batch's.
pub fn parse(endpoint: &str, line: &[u8]) -> Result<Request, Problem> {
    let Ok(Value::Object(mut line)) = json::from_slice(line) else {
        return Err(Problem::new("invalid_json_line", "This line is not parseable as a JSON object."));
    };
    let custom_id = text(&line, "custom_id")?;
    if !(1..=CUSTOM_ID_BYTES_MAX).contains(&custom_id.len()) {
        return Err(Problem::of("custom_id", "invalid_value", format!("`custom_id` must have 1 to {CUSTOM_ID_BYTES_MAX} bytes.")));
    }
    let custom_id = custom_id.to_owned();
    let method = text(&line, "method")?;
    if method != "POST" {
        return Err(Problem::of("method", "invalid_value", format!("`method` is `{method}`: it must be `POST`.")));
    }
    let url = text(&line, "url")?;
    if url != endpoint {
        let message = format!("`url` is `{url}`, and this batch is for `{endpoint}`: a batch has one endpoint.");
        return Err(Problem::of("url", "url_mismatch", message));
    }
    match line.remove("body") {
        Some(Value::Object(body)) => Ok(Request { custom_id, body }),
        None | Some(Value::Null) => Err(missing("body")),
        Some(_) => Err(Problem::of("body", "invalid_value", "`body` must be an object: the request's body.")),
    }
}

fn text<'a>(line: &'a Map<String, Value>, field: &str) -> Result<&'a str, Problem> {
    match line.get(field) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Err(missing(field)),
        Some(_) => Err(Problem::of(field, "invalid_type", format!("`{field}` must be a string."))),
    }
}

fn missing(field: &str) -> Problem {
    Problem::of(field, "missing_required_parameter", format!("Missing required parameter: '{field}'."))
}

/// Reads a file line by line: its requests, or its problems.
#[derive(Debug)]
pub struct Check<'a> {
    endpoint: &'a str,
    lines_max: usize,
    offset: u64,
    number: u64,
    seen: HashSet<String>,
    lines: Vec<Line>,
    problems: Vec<Problem>,
}

impl<'a> Check<'a> {
    pub fn new(endpoint: &'a str, lines_max: usize) -> Self {
        Self { endpoint, lines_max, offset: 0, number: 0, seen: HashSet::new(), lines: Vec::new(), problems: Vec::new() }
    }

    /// Takes the next line, with its end. `None` for a line that is too long, of this many bytes.
    pub fn line(&mut self, line: Option<&[u8]>, bytes: usize) {
        let offset = self.offset;
        self.offset += bytes as u64;
        self.number += 1;
        let parsed = match line {
            // Editors leave empty lines.
            Some(line) if line.trim_ascii().is_empty() => return,
            Some(line) => parse(self.endpoint, line),
            None => Err(Problem::new("request_too_large", "This line is longer than a request's body may be.")),
        };
        let checked = parsed.and_then(|Request { custom_id, .. }| {
            if self.seen.insert(custom_id.clone()) {
                return Ok(custom_id);
            }
            let message = format!("The `custom_id` `{custom_id}` is another request's, too: each must be unique in a batch.");
            Err(Problem::of("custom_id", "duplicate_custom_id", message))
        });
        match checked {
            Ok(custom_id) if self.lines.len() < self.lines_max => self.lines.push(Line { number: self.number, offset, bytes, custom_id }),
            Ok(_) => self.problem(Problem::new("too_many_tasks", format!("A batch has at most {} requests.", self.lines_max))),
            Err(problem) => self.problem(problem),
        }
    }

    fn problem(&mut self, problem: Problem) {
        self.problems.push(Problem { line: Some(self.number), ..problem });
    }

    /// Whether no further line could be reported or run.
    pub fn is_hopeless(&self) -> bool {
        self.problems.len() >= PROBLEMS_MAX
    }

    /// Ends the check after the last line.
    pub fn finish(mut self) -> Result<Vec<Line>, Vec<Problem>> {
        if self.lines.is_empty() && self.problems.is_empty() {
            self.problems.push(Problem::new("empty_file", "The input file has no requests."));
        }
        if self.problems.is_empty() { Ok(self.lines) } else { Err(self.problems) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CHAT: &str = "/v1/chat/completions";

    fn request(custom_id: &str) -> Value {
        json!({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}})
    }

    fn check(file: &str) -> Result<Vec<Line>, Vec<(String, Option<u64>)>> {
        let mut check = Check::new(CHAT, 3);
        file.split_inclusive('\n').for_each(|line| check.line(Some(line.as_bytes()), line.len()));
        check.finish().map_err(|problems| problems.into_iter().map(|problem| (problem.code, problem.line)).collect())
    }

    #[test]
    fn lines_are_known_by_where_they_are() {
        let file = format!("{}\n\n{}", request("a"), request("b"));
        let lines = check(&file).unwrap();
        let at = |line: &Line| &file[line.offset as usize..line.offset as usize + line.bytes];
        assert_eq!(lines.iter().map(|line| (line.number, line.custom_id.as_str())).collect::<Vec<_>>(), [(1, "a"), (3, "b")]);
        assert_eq!(parse(CHAT, at(&lines[1]).as_bytes()).unwrap().custom_id, "b");
    }

    #[test]
    fn everything_that_is_wrong_is_told_with_its_line() {
        let with = |field: &str, value: Value| {
            let mut line = request(field);
            line[field] = value;
            line.to_string()
        };
        for (line, code, param) in [
            ("{".to_owned(), "invalid_json_line", None),
            ("[1]".to_owned(), "invalid_json_line", None),
            (with("custom_id", Value::Null), "missing_required_parameter", Some("custom_id")),
            (with("custom_id", json!(1)), "invalid_type", Some("custom_id")),
            (with("custom_id", json!("")), "invalid_value", Some("custom_id")),
            (with("method", json!("GET")), "invalid_value", Some("method")),
            (with("url", json!("/v1/embeddings")), "url_mismatch", Some("url")),
            (with("body", Value::Null), "missing_required_parameter", Some("body")),
            (with("body", json!("hi")), "invalid_value", Some("body")),
        ] {
            let problem = parse(CHAT, line.as_bytes()).unwrap_err();
            assert_eq!((problem.code.as_str(), problem.param.as_deref()), (code, param), "{line}");
        }
        let file = format!("{}\n{{\n{}\n", request("a"), request("a"));
        assert_eq!(check(&file).unwrap_err(), [("invalid_json_line".into(), Some(2)), ("duplicate_custom_id".into(), Some(3))]);
    }

    #[test]
    fn a_file_has_some_requests_and_not_too_many() {
        assert_eq!(check("\n \n").unwrap_err(), [("empty_file".into(), None)]);
        let file: String = ["a", "b", "c", "d"].map(|id| format!("{}\n", request(id))).concat();
        assert_eq!(check(&file).unwrap_err(), [("too_many_tasks".into(), Some(4))]);
        let mut check = Check::new(CHAT, 3);
        check.line(None, 1 << 30);
        assert_eq!(check.finish().unwrap_err()[0].code, "request_too_large");
    }

    #[test]
    fn problems_have_an_end() {
        let mut check = Check::new(CHAT, 3);
        let mut told = 0;
        while !check.is_hopeless() {
            check.line(Some(b"{"), 1);
            told += 1;
        }
        assert_eq!(told, PROBLEMS_MAX);
    }
}
