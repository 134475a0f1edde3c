//! A file of golden cases, to which operators add cases from users' feedback and overturned blocks.

use anyhow::Context;
use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};
use tidemill_eval::case::{self, Case};

/// Adds the cases that the file does not have yet, and creates the file if necessary. Returns the number of cases added.
pub fn add(path: &Path, cases: &[Case]) -> anyhow::Result<usize> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let known = case::read(&text).with_context(|| path.display().to_string())?;
    let known: BTreeSet<&str> = known.iter().map(|ready| ready.case.id.as_str()).collect();
    let new: Vec<&Case> = cases.iter().filter(|case| !known.contains(case.id.as_str())).collect();
    let lines: String = new.iter().map(|case| case::line(case)).collect();
    // Cases that cannot be read back must not be written.
    case::read(&lines).context("the new cases")?;
    let begins = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let mut file = OpenOptions::new().append(true).create(true).open(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(format!("{begins}{lines}").as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(new.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_eval::check::{Check, Texts};

    #[test]
    fn a_case_is_added_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("golden.jsonl");
        let case = |id: &str| Case {
            id: id.into(),
            prompt: Some("Hm?".into()),
            checks: vec![Check::Contains(Texts::One("x".into()))],
            ..Case::default()
        };
        assert_eq!(add(&path, &[case("a")]).unwrap(), 1);
        let written = fs::read_to_string(&path).unwrap();
        fs::write(&path, written.trim_end()).unwrap();
        assert_eq!(add(&path, &[case("a"), case("b")]).unwrap(), 1);
        assert_eq!(case::read(&fs::read_to_string(&path).unwrap()).unwrap().len(), 2);
        fs::write(&path, "no case").unwrap();
        assert!(add(&path, &[case("c")]).unwrap_err().to_string().contains("golden.jsonl"));
    }
}
