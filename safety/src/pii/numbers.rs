//! Personal numbers: cards, accounts, social security, telephones, addresses of machines. Each function reads from the start of a text and
//! returns the length of its finding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Digits in groups, as people write them.
#[derive(Debug, Default)]
struct Groups {
    digits: Vec<u8>,
    /// Digits of each group.
    sizes: Vec<usize>,
    /// The end of each group.
    ends: Vec<usize>,
    /// The separators between groups.
    separators: Vec<u8>,
}

/// The first few of some groups.
#[derive(Clone, Copy, Debug)]
struct Leading<'a> {
    digits: &'a [u8],
    sizes: &'a [usize],
    separators: &'a [u8],
    bytes: usize,
    is_all: bool,
}

/// The maximum number of digits of any of these numbers.
const DIGITS_MAX: usize = 19;

/// The groups of digits that follow, with one of `separators` between them.
fn groups(text: &[u8], separators: &[u8]) -> Groups {
    let mut found = Groups::default();
    let mut at = 0;
    loop {
        let size = text[at..].iter().take(DIGITS_MAX + 1).take_while(|byte| byte.is_ascii_digit()).count();
        if size == 0 || found.digits.len() + size > DIGITS_MAX {
            return found;
        }
        if at > 0 {
            found.separators.push(text[at - 1]);
        }
        found.digits.extend(text[at..at + size].iter().map(|byte| byte - b'0'));
        found.sizes.push(size);
        found.ends.push(at + size);
        match text.get(at + size) {
            Some(byte) if separators.contains(byte) => at += size + 1,
            _ => return found,
        }
    }
}

impl Groups {
    /// All groups, then fewer of them: an unrelated number may follow the wanted one.
    fn leading(&self) -> impl Iterator<Item = Leading<'_>> {
        (1..=self.sizes.len()).rev().map(|count| Leading {
            digits: &self.digits[..self.sizes[..count].iter().sum()],
            sizes: &self.sizes[..count],
            separators: &self.separators[..count - 1],
            bytes: self.ends[count - 1],
            is_all: count == self.sizes.len(),
        })
    }
}

impl Leading<'_> {
    fn is_uniform(&self) -> bool {
        self.separators.windows(2).all(|pair| pair[0] == pair[1])
    }
}

pub(super) fn card(text: &[u8]) -> Option<usize> {
    let found = groups(text, b" -");
    found.leading().find(is_card).map(|found| found.bytes)
}

fn is_card(found: &Leading<'_>) -> bool {
    let count = found.digits.len();
    let leading = |digits: usize| found.digits.iter().take(digits).fold(0_u32, |number, digit| number * 10 + u32::from(*digit));
    let network = match (leading(1), leading(2), leading(3), leading(4)) {
        (4, ..) => matches!(count, 13 | 16 | 19),
        (_, 51..=55, ..) | (_, _, _, 2221..=2720) => count == 16,
        (_, 34 | 37, ..) => count == 15,
        (_, 36 | 38 | 39, ..) | (_, _, 300..=305, _) => count == 14,
        (_, 62 | 65, ..) | (_, _, 644..=649, _) | (_, _, _, 6011 | 3528..=3589) => (16..=19).contains(&count),
        _ => false,
    };
    let grouped = match found.sizes {
        [_] => true,
        [4, 4, 4, 4] | [4, 4, 4, 4, 3] | [4, 6, 5] | [4, 6, 4] => found.is_uniform(),
        _ => false,
    };
    network && grouped && luhn(found.digits)
}

fn luhn(digits: &[u8]) -> bool {
    let weighed = |(place, digit): (usize, &u8)| match u32::from(*digit) * if place % 2 == 1 { 2 } else { 1 } {
        sum @ 10.. => sum - 9,
        sum => sum,
    };
    digits.iter().rev().enumerate().map(weighed).sum::<u32>() % 10 == 0
}

pub(super) fn ssn(text: &[u8]) -> Option<usize> {
    let found = groups(text, b" -");
    found.leading().find(is_ssn).map(|found| found.bytes)
}

fn is_ssn(found: &Leading<'_>) -> bool {
    let number = |digits: &[u8]| digits.iter().fold(0_u32, |number, digit| number * 10 + u32::from(*digit));
    // Separated by spaces, it may be part of a longer number.
    let grouped = found.sizes == [3, 2, 4] && found.is_uniform() && (found.is_all || found.separators[0] == b'-');
    grouped && {
        let (area, group, serial) = (number(&found.digits[..3]), number(&found.digits[3..5]), number(&found.digits[5..]));
        !matches!(area, 0 | 666 | 900..) && group != 0 && serial != 0
    }
}

/// International numbers (`+`, or 00 and groups), North American numbers, and numbers that start with a trunk 0, in groups.
pub(super) fn phone(text: &[u8]) -> Option<usize> {
    let (text, skipped, plus) = match text {
        [b'+', rest @ ..] => (rest, 1, true),
        _ => (text, 0, false),
    };
    // `(0)` in an international number, and an area code in parentheses, count as groups.
    let mut flat = Vec::with_capacity(text.len().min(LOOK_BYTES));
    let mut origins = Vec::new();
    let mut open = false;
    for (at, byte) in text.iter().enumerate().take(LOOK_BYTES) {
        match byte {
            b'(' if !open => open = true,
            b')' if open => open = false,
            b'(' | b')' => break,
            byte => {
                // A parenthesis separates as a space does.
                let parted = at > 0 && matches!(text[at - 1], b'(' | b')');
                if parted && byte.is_ascii_digit() && flat.last().is_some_and(u8::is_ascii_digit) {
                    flat.push(b' ');
                    origins.push(at);
                }
                flat.push(*byte);
                origins.push(at);
            }
        }
    }
    let found = groups(&flat, b" -./");
    let found = found.leading().find(|found| is_phone(found, plus))?;
    Some(skipped + origins[found.bytes - 1] + 1)
}

fn is_phone(found: &Leading<'_>, plus: bool) -> bool {
    let (count, first) = (found.digits.len(), found.digits[0]);
    let is_area = |digits: &[u8]| matches!(digits.first(), Some(2..));
    if plus {
        return first != 0 && (8..=15).contains(&count);
    }
    match (found.sizes, found.digits) {
        ([1, 3, 3, 4], [1, rest @ ..]) | ([3, 3, 4], rest) => is_area(rest) && is_area(&rest[3..]),
        // Two groups of two and one of four are a date.
        ([2, 2, 4, ..], _) => false,
        ([_, _, ..], [0, 0, country @ ..]) => !matches!(country.first(), Some(0)) && (10..=17).contains(&count),
        ([2..=5, rest @ ..], [0, ..]) => {
            let plain = found.separators.iter().all(|separator| matches!(separator, b' ' | b'-' | b'/'));
            !rest.is_empty() && plain && rest.iter().all(|size| *size >= 2) && (9..=12).contains(&count)
        }
        _ => false,
    }
}

/// The longest telephone number with all its separators.
const LOOK_BYTES: usize = 40;

pub(super) fn iban(text: &[u8]) -> Option<usize> {
    let country = text.first_chunk::<2>()?;
    let place = COUNTRIES.iter().position(|(code, _)| code.as_bytes() == country)?;
    let length = usize::from(COUNTRIES[place].1);
    let mut compact = Vec::with_capacity(length);
    let mut bytes = 0;
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b' ' if compact.len() % 4 == 0 && at > 0 && text[at - 1] != b' ' => {}
            byte if byte.is_ascii_uppercase() || byte.is_ascii_digit() => {
                compact.push(*byte);
                bytes = at + 1;
            }
            _ => break,
        }
        if compact.len() == length {
            break;
        }
    }
    let whole = compact.len() == length && compact[2..4].iter().all(u8::is_ascii_digit);
    let digit = |byte: &u8| u64::from(char::from(*byte).to_digit(36).unwrap_or(0));
    let rest = || {
        compact[4..].iter().chain(&compact[..4]).fold(0, |rest, byte| match digit(byte) {
            digit @ 10.. => (rest * 100 + digit) % 97,
            digit => (rest * 10 + digit) % 97,
        })
    };
    (whole && rest() == 1).then_some(bytes)
}

/// The countries of the IBAN registry, with the number of characters of an account there.
const COUNTRIES: [(&str, u8); 78] = [
    ("AD", 24),
    ("AE", 23),
    ("AL", 28),
    ("AT", 20),
    ("AZ", 28),
    ("BA", 20),
    ("BE", 16),
    ("BG", 22),
    ("BH", 22),
    ("BR", 29),
    ("BY", 28),
    ("CH", 21),
    ("CR", 22),
    ("CY", 28),
    ("CZ", 24),
    ("DE", 22),
    ("DK", 18),
    ("DO", 28),
    ("EE", 20),
    ("EG", 29),
    ("ES", 24),
    ("FI", 18),
    ("FO", 18),
    ("FR", 27),
    ("GB", 22),
    ("GE", 22),
    ("GI", 23),
    ("GL", 18),
    ("GR", 27),
    ("GT", 28),
    ("HR", 21),
    ("HU", 28),
    ("IE", 22),
    ("IL", 23),
    ("IQ", 23),
    ("IS", 26),
    ("IT", 27),
    ("JO", 30),
    ("KW", 30),
    ("KZ", 20),
    ("LB", 28),
    ("LC", 32),
    ("LI", 21),
    ("LT", 20),
    ("LU", 20),
    ("LV", 21),
    ("LY", 25),
    ("MC", 27),
    ("MD", 24),
    ("ME", 22),
    ("MK", 19),
    ("MR", 27),
    ("MT", 31),
    ("MU", 30),
    ("NL", 18),
    ("NO", 15),
    ("PK", 24),
    ("PL", 28),
    ("PS", 29),
    ("PT", 25),
    ("QA", 29),
    ("RO", 24),
    ("RS", 22),
    ("SA", 24),
    ("SC", 31),
    ("SD", 18),
    ("SE", 24),
    ("SI", 19),
    ("SK", 24),
    ("SM", 27),
    ("ST", 25),
    ("SV", 28),
    ("TL", 23),
    ("TN", 24),
    ("TR", 26),
    ("UA", 29),
    ("VA", 22),
    ("XK", 20),
];

/// The address of a machine, except loopback, unspecified and broadcast addresses.
pub(super) fn ip(text: &[u8]) -> Option<usize> {
    let is_address = |byte: &u8| byte.is_ascii_hexdigit() || matches!(byte, b'.' | b':');
    let run = text.iter().take(IPV6_BYTES_MAX + 1).take_while(|byte| is_address(byte)).count();
    // A sentence may end with it.
    let mut text = str::from_utf8(&text[..run]).ok()?;
    if let Some(rest) = text.strip_suffix('.').or_else(|| text.strip_suffix(':').filter(|rest| !rest.ends_with(':'))) {
        text = rest;
    }
    if let Some((address, port)) = text.split_once(':')
        && address.parse().is_ok_and(is_somebodys)
        && port.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Some(text.len());
    }
    let found: IpAddr = text.parse().ok()?;
    let somebodys = match found {
        IpAddr::V4(v4) => is_somebodys(v4),
        IpAddr::V6(v6) => {
            // `a::b` is C++.
            let groups: Vec<&str> = text.split(':').filter(|group| !group.is_empty()).collect();
            let telling =
                groups.len() > 2 || groups.iter().any(|group| group.len() >= 4 && group.bytes().any(|byte| byte.is_ascii_digit()));
            telling && !matches!(v6, Ipv6Addr::LOCALHOST | Ipv6Addr::UNSPECIFIED)
        }
    };
    somebodys.then_some(text.len())
}

fn is_somebodys(address: Ipv4Addr) -> bool {
    !(address.is_loopback() || address.is_unspecified() || address.is_broadcast() || address.octets()[0] == 0)
}

const IPV6_BYTES_MAX: usize = 45;
