//! Little-endian values one after the other, each checked against the bytes that are left.

/// The most bytes of a header: a vocabulary of 262,144 tokens and its merges take some 20 MB. Everything that is made of a header is bounded
/// by its bytes, and so by this.
pub(crate) const HEADER_BYTES_MAX: usize = 64 << 20;
/// The most bytes of a string: a chat template has some ten kB, a token some ten bytes.
const STRING_BYTES_MAX: usize = 16 << 20;

/// A position in a header.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Reads the header at the beginning of a file's bytes.
    pub(crate) fn new(file: &'a [u8]) -> Self {
        Self { bytes: &file[..file.len().min(HEADER_BYTES_MAX)], at: 0 }
    }

    /// Reads the same bytes from another position.
    pub(crate) fn at(self, at: usize) -> Self {
        Self { at: at.min(self.bytes.len()), ..self }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let bytes = self.bytes[self.at..].get(..len).ok_or_else(|| match self.bytes.len() {
            HEADER_BYTES_MAX => format!("its header is longer than the {HEADER_BYTES_MAX} bytes that are read"),
            end => format!("it ends at byte {end}, within its header"),
        })?;
        self.at += len;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(*self.take(N)?.first_chunk().expect("of this length"))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that take at least `bytes` each, at most as many as there is room for.
    pub(crate) fn count(&mut self, bytes: usize, things: &str) -> Result<usize, String> {
        let count = self.u64()?;
        match usize::try_from(count) {
            Ok(count) if count.checked_mul(bytes).is_some_and(|all| all <= self.left()) => Ok(count),
            _ => Err(format!("it claims {count} {things}, more than there is room for")),
        }
    }

    pub(crate) fn string(&mut self) -> Result<&'a str, String> {
        let len = self.count(1, "bytes of a text")?;
        if len > STRING_BYTES_MAX {
            return Err(format!("a text of {len} bytes is longer than the {STRING_BYTES_MAX} that are read"));
        }
        std::str::from_utf8(self.take(len)?).map_err(|error| format!("a text is not UTF-8: {error}"))
    }
}
