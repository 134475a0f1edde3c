//! The caller's trace: the header `traceparent` of W3C Trace Context, level 1 and the additions of later levels.

use super::span::SpanId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    pub trace: u128,
    pub span: SpanId,
    /// Whether the caller records its part of the trace.
    pub is_sampled: bool,
}

impl Parent {
    /// Parses the header; `None` if it is not valid: the standard requires such headers to be ignored.
    pub fn parse(header: &str) -> Option<Self> {
        let mut fields = header.trim().split('-');
        let [version, trace, span, flags] = [fields.next()?, fields.next()?, fields.next()?, fields.next()?];
        let version = hex(version, 2)?;
        // Version 0 has four fields; later ones may have more.
        if version == 0xff || version == 0 && fields.next().is_some() {
            return None;
        }
        let parent = Self { trace: hex(trace, 32)?, span: SpanId::from_bits(hex(span, 16)? as u64), is_sampled: hex(flags, 2)? & 1 == 1 };
        (parent.trace != 0 && parent.span != SpanId::from_bits(0)).then_some(parent)
    }
}

/// Reads `digits` lower-case hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_plain = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (text.len() == digits && is_plain).then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_the_standard_says() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let parent = Parent::parse(good).unwrap();
        assert_eq!((parent.trace, parent.is_sampled), (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, true));
        assert_eq!(Parent::parse("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"), Some(parent));
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ] {
            assert_eq!(Parent::parse(bad), None, "{bad}");
        }
    }
}
