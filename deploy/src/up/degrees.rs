//! `--tensor-parallel` and `--pipeline` of `tidemill up`: the ranks or stages of prefill workers and of decode workers.

use std::str::FromStr;

/// The parts that each prefill worker and each decode worker splits its model into: `4`, or `prefill=4,decode=2`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Degrees {
    pub(super) prefill: usize,
    pub(super) decode: usize,
}

impl FromStr for Degrees {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let degree = |text: &str| {
            let degree = text.parse().ok().filter(|degree| *degree > 0);
            degree.ok_or_else(|| format!("`{text}` is not a number of parts: write 2, or prefill=4,decode=2"))
        };
        if !text.contains('=') {
            let degree = degree(text)?;
            return Ok(Self { prefill: degree, decode: degree });
        }
        let (mut prefill, mut decode) = (None, None);
        for part in text.split(',') {
            let of_role = match part.split_once('=') {
                Some(("prefill", _)) => &mut prefill,
                Some(("decode", _)) => &mut decode,
                _ => return Err(format!("`{part}` is neither prefill=N nor decode=N")),
            };
            let number = part.split_once('=').map_or(part, |(_, number)| number);
            if of_role.replace(degree(number)?).is_some() {
                return Err(format!("`{part}` is the second of its role"));
            }
        }
        Ok(Self { prefill: prefill.unwrap_or(1), decode: decode.unwrap_or(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_is_both_roles_and_each_may_have_its_own() {
        let parsed = |text: &str| text.parse::<Degrees>().map(|Degrees { prefill, decode }| (prefill, decode));
        assert_eq!(parsed("2"), Ok((2, 2)));
        assert_eq!(parsed("prefill=4,decode=2"), Ok((4, 2)));
        assert_eq!(parsed("decode=2"), Ok((1, 2)));
        for (wrong, word) in [("0", "`0`"), ("two", "`two`"), ("prefill=", "``"), ("pool=2", "`pool=2`"), ("decode=2,decode=4", "second")] {
            assert!(parsed(wrong).unwrap_err().contains(word), "{wrong}");
        }
    }
}
