//! Traces in the format of Mooncake (FAST '25): one JSON object per line and request, in order of arrival.

use anyhow::{Context, ensure};
use serde::Deserialize;
use std::{
    collections::HashSet,
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

/// The number of tokens that one id in `hash_ids` stands for.
pub const TRACE_BLOCK_TOKENS: u64 = 512;

/// The longest accepted prompt, in tokens.
const INPUT_TOKENS_MAX: u64 = 1 << 24;

/// One line of a trace. A cache needs no times and no answers, so those may be missing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
pub struct Request {
    /// Milliseconds from the start.
    #[serde(default)]
    pub timestamp: Option<u64>,
    #[serde(rename = "output_length", default)]
    pub output_tokens: Option<u64>,
    #[serde(rename = "input_length")]
    pub input_tokens: u64,
    /// One id per block of the prompt; the last block may not be full. An id stands for the block and all before it.
    #[serde(rename = "hash_ids")]
    pub blocks: Vec<u64>,
}

/// Reads a trace. An error names the invalid line.
pub fn read(path: &Path) -> anyhow::Result<Vec<Request>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut requests = Vec::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let request = line.context("not text").and_then(|line| parse(&line));
        requests.push(request.with_context(|| format!("{}: line {number}", path.display()))?);
    }
    ensure!(!requests.is_empty(), "{} has no requests", path.display());
    Ok(requests)
}

fn parse(line: &str) -> anyhow::Result<Request> {
    let request: Request = serde_json::from_str(line)?;
    let Request { input_tokens, ref blocks, .. } = request;
    ensure!((1..=INPUT_TOKENS_MAX).contains(&input_tokens), "input_length must be from 1 to {INPUT_TOKENS_MAX}");
    let needed = input_tokens.div_ceil(TRACE_BLOCK_TOKENS);
    ensure!(blocks.len() as u64 == needed, "{input_tokens} tokens have {needed} blocks, but hash_ids has {}", blocks.len());
    ensure!(blocks.iter().collect::<HashSet<_>>().len() == blocks.len(), "an id comes twice in hash_ids");
    Ok(request)
}

pub fn unique_blocks(requests: &[Request]) -> usize {
    requests.iter().flat_map(|request| &request.blocks).collect::<HashSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_and_a_bad_one_is_refused() {
        let line = r#"{"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [3, 9]}"#;
        assert_eq!(parse(line).unwrap(), Request { timestamp: Some(0), output_tokens: Some(7), input_tokens: 513, blocks: vec![3, 9] });
        for (line, complaint) in [
            ("", "EOF"),
            (r#"{"hash_ids": []}"#, "input_length"),
            (r#"{"input_length": 513, "hash_ids": [3]}"#, "2 blocks"),
            (r#"{"input_length": 0, "hash_ids": []}"#, "from 1"),
            (r#"{"input_length": 600, "hash_ids": [3, 3]}"#, "twice"),
            (r#"{"input_length": 5, "hash_ids": [-3]}"#, "-3"),
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.contains(complaint), "{error}");
        }
    }
}
