//! Examples to train and to evaluate the classifier with. A file has sections, `[category]` or `[harmless]`; a line stands for all
//! combinations of one choice from each `{a|b|c}`.

use crate::category::{Category, Unknown};

/// The training examples of the built-in classifier.
pub const TRAINING: &str = include_str!("../corpus/training.txt");
/// Other sentences, for its evaluation.
pub const HELD_OUT: &str = include_str!("../corpus/held-out.txt");
/// The maximum number of examples from one line: further ones are left out, evenly.
const CHOICES_MAX: usize = 48;

/// An example, and its category; `None` if it is harmless.
pub type Example = (String, Option<Category>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CorpusError {
    #[error("line {line}: {source}")]
    Section { line: usize, source: Unknown },
    #[error("line {0}: an example before any [section]")]
    NoSection(usize),
    #[error("line {0}: a `{{` without its `}}`")]
    Brace(usize),
}

pub fn examples(text: &str) -> Result<Vec<Example>, CorpusError> {
    let (mut examples, mut section) = (Vec::new(), None);
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
        } else if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = Some(match name {
                "harmless" => None,
                name => Some(name.parse().map_err(|source| CorpusError::Section { line: number, source })?),
            });
        } else {
            let label = section.ok_or(CorpusError::NoSection(number))?;
            examples.extend(choices(line).ok_or(CorpusError::Brace(number))?.into_iter().map(|text| (text, label)));
        }
    }
    Ok(examples)
}

fn choices(line: &str) -> Option<Vec<String>> {
    let mut parts: Vec<Vec<&str>> = Vec::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('{') {
        let (choice, after) = after.split_once('}')?;
        parts.extend([vec![before], choice.split('|').collect()]);
        rest = after;
    }
    parts.push(vec![rest]);
    let all: usize = parts.iter().map(Vec::len).product();
    let wanted = all.min(CHOICES_MAX);
    let choice = |n: usize| {
        // Spread evenly over all combinations; the factor visits every one once if all are wanted.
        let mut place = if all > wanted { n * all / wanted + n % (all / wanted) } else { n };
        let pick = |part: &Vec<&str>| {
            let picked = part[place % part.len()].to_owned();
            place /= part.len();
            picked
        };
        parts.iter().map(pick).collect()
    };
    Some((0..wanted).map(choice).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stands_for_all_its_choices() {
        let texts = |text: &str| examples(text).unwrap().into_iter().map(|(text, _)| text).collect::<Vec<_>>();
        assert_eq!(texts("[harmless]\n# no\n{a|b} {c|d}!"), ["a c!", "b c!", "a d!", "b d!"]);
        let many = texts("[hate]\n{1|2|3|4|5|6|7|8}{1|2|3|4|5|6|7|8}{1|2|3|4|5|6|7|8}");
        assert_eq!(many.len(), CHOICES_MAX);
        assert_eq!(many.iter().collect::<std::collections::BTreeSet<_>>().len(), CHOICES_MAX, "no two alike");
        assert_eq!(examples("[hate]\n{a"), Err(CorpusError::Brace(2)));
        assert_eq!(examples("a"), Err(CorpusError::NoSection(1)));
        assert!(examples("[good]").unwrap_err().to_string().contains("`good`"));
    }
}
