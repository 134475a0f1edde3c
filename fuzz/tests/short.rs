//! The short form of each target: a few hundred fixed cases, none of which finds anything.

use std::process::{Command, Output};

macro_rules! targets {
    ($($target:ident)+) => {
        const TARGETS: &[&str] = &[$(stringify!($target)),+];

        mod fixed_cases_find_nothing {
            $(
                #[test]
                fn $target() {
                    super::find_nothing(stringify!($target));
                }
            )+
        }
    };
}

targets! { frames registry members endpoints operators forms regions provider schemas expressions grammars templates bombs tokenizers checkpoints gguf settings disk }

#[test]
fn every_target_has_its_test() {
    let list = String::from_utf8(fuzz(&["--list"]).stdout).unwrap();
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, TARGETS);
}

fn fuzz(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidemill-fuzz")).args(arguments).output().unwrap()
}

fn find_nothing(target: &str) {
    let output = fuzz(&["--short", "--target", target]);
    let (said, found) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{found}\n{said}");
    let of_target = |line: &&str| line.contains(" findings, ") && line.split_whitespace().next() == Some(target);
    let line = said.lines().find(of_target).unwrap_or_else(|| panic!("{target} is not told of:\n{said}"));
    let cases = line.split_whitespace().nth(1).and_then(|cases| cases.parse::<u64>().ok());
    assert!(cases.is_some_and(|cases| cases >= 100), "{line}");
}
