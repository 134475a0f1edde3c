use super::*;
use fancy_regex::Regex;

/// The pattern of zod 4's `z.email()`.
const EMAIL: &str = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";
/// The pattern of zod 4's `z.iso.duration()`.
const DURATION: &str = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$";
/// The pattern of Pydantic 2.12's `Decimal`.
const DECIMAL: &str = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$";
const PASSWORD: &str = r"^(?=.*[A-Z])(?=.*\d)(?=.*[a-z])[A-Za-z\d@$!%*?&]{3,}$";

/// Returns every text of `characters` up to `length`.
fn texts(characters: &str, length: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut last = 0;
    for _ in 0..length {
        let longer = all[last..].iter().flat_map(|text| characters.chars().map(move |c| format!("{text}{c}")));
        let longer: Vec<String> = longer.collect();
        last = all.len();
        all.extend(longer);
    }
    all
}

fn matches(pattern: &Regex, text: &str) -> bool {
    pattern.is_match(text).unwrap()
}

#[test]
fn what_is_rewritten_without_look_around_matches_the_same_texts() {
    let mut accepted = 0;
    for (pattern, characters, length) in [
        (EMAIL, "a.@-", 8),
        (EMAIL, "a.@'é\n", 6),
        (DURATION, "P1TYMDWHS.", 5),
        (DURATION, "P1TMS", 7),
        (DECIMAL, "+-.01a", 6),
        (PASSWORD, "aA1@\n", 6),
        ("a(?=b)", "abc", 6),
        ("a(?!b)", "abc", 6),
        ("(?=ab)a", "abc", 5),
        ("^(?!a|b$)", "abc", 5),
        ("^(?!.*(.)b$)[abc]+$", "abc", 5),
        ("^(?:a(?=b)|b(?!b))+?c?$", "abc", 5),
        ("^(?:a(?!bb)b?){1,3}$", "abc", 7),
        ("^(?!(?!ab)a)a", "abc", 5),
        ("^(?=.*a$|b)b|(?!b)c$", "abc", 6),
        ("(?:^|b)(?=c)c(?!^)", "abc", 5),
        (r"^(?=[^\n]{1,3}\.?$)a(?:\.a)*\.?$", "a.", 8),
        ("^(?![äé])[à-ü]{2}$", "aäéà", 3),
        ("^(?=)$", "a", 2),
        ("^(?!)$", "a", 2),
    ] {
        let Some(patterns) = without_look_around(pattern, &mut Work::default()) else {
            assert!(pattern.contains(")+"), "{pattern} is not rewritten");
            continue;
        };
        assert!(patterns.iter().all(|pattern| !looks_around(pattern)), "{patterns:?}");
        let original = Regex::new(pattern).unwrap();
        let rewritten: Vec<Regex> = patterns.iter().map(|pattern| Regex::new(pattern).unwrap()).collect();
        for text in texts(characters, length) {
            let expected = matches(&original, &text);
            accepted += usize::from(expected);
            assert_eq!(rewritten.iter().all(|pattern| matches(pattern, &text)), expected, "{pattern} as {patterns:?}: {text:?}");
        }
    }
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn complements_and_intersections_are_expressions() {
    let sets: [&[&str]; 5] = [&["^a"], &["^ab?$", "b"], &["^(?:a|bc)*$", "c$"], &["^$"], &[r"^\d{1,3}$", "^[^x]*$"]];
    for patterns in sets {
        let patterns: Vec<String> = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let regexes: Vec<Regex> = patterns.iter().map(|pattern| Regex::new(pattern).unwrap()).collect();
        let none = Regex::new(&none_of(&patterns, &mut Work::default()).unwrap()).unwrap();
        let all = Regex::new(&all_of(&patterns, &mut Work::default()).unwrap()).unwrap();
        for text in texts("abc1x\n", 5) {
            assert_eq!(matches(&none, &text), !regexes.iter().any(|one| matches(one, &text)), "{patterns:?} {none} {text:?}");
            assert_eq!(matches(&all, &text), regexes.iter().all(|one| matches(one, &text)), "{patterns:?} {all} {text:?}");
        }
    }
    let words: Vec<String> = ["", "a.b", "é"].iter().map(|word| literal(word)).collect();
    let others = Regex::new(&none_of(&words, &mut Work::default()).unwrap()).unwrap();
    assert_eq!(
        ["", "a.b", "é", "axb", "a.", "e", "a.bc"].map(|text| matches(&others, text)),
        [false, false, false, true, true, true, true]
    );
}

#[test]
fn what_costs_too_much_or_looks_behind_is_left_alone() {
    let blown = format!("^(?!.*a.{{{}}}$)b", 40);
    let deep = format!("{}(?=a){}", "(".repeat(1000), ")".repeat(1000));
    let long = format!("^(?!a){}", "b?".repeat(5000));
    let repeated = "^(?!(?:(?:(?:a{1000}){1000}){1000}))".to_owned();
    for pattern in [r"(?<=a)b", r"(?<!a)b", r"^(?!a)\bb", "(?=a", "(?=a)+", r"^(a)(?=\1)", &blown, &deep, &long, &repeated] {
        let mut work = Work::default();
        assert_eq!(without_look_around(pattern, &mut work), None, "{pattern:.80}");
    }
}
