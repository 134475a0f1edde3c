//! Token ids that several owners share, such as a prompt and the jobs made from it.

use crate::block::Token;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, ops::Deref, sync::Arc};

/// A list of token ids. Clones and prefixes share memory. On the wire it is a plain list.
#[derive(Clone)]
pub struct Tokens {
    shared: Arc<Vec<Token>>,
    /// The number of leading tokens of `shared` that belong to this list.
    len: usize,
}

impl Tokens {
    /// The first `len` tokens, or all if there are fewer.
    pub fn prefix(&self, len: usize) -> Self {
        Self { shared: Arc::clone(&self.shared), len: len.min(self.len) }
    }

    /// Appends a token. Copies the list first if its memory is shared.
    pub fn push(&mut self, token: Token) {
        let tokens = Arc::make_mut(&mut self.shared);
        tokens.truncate(self.len);
        tokens.push(token);
        self.len += 1;
    }
}

impl Default for Tokens {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl From<Vec<Token>> for Tokens {
    fn from(tokens: Vec<Token>) -> Self {
        Self { len: tokens.len(), shared: Arc::new(tokens) }
    }
}

impl FromIterator<Token> for Tokens {
    fn from_iter<I: IntoIterator<Item = Token>>(tokens: I) -> Self {
        tokens.into_iter().collect::<Vec<_>>().into()
    }
}

impl Deref for Tokens {
    type Target = [Token];

    fn deref(&self) -> &[Token] {
        &self.shared[..self.len]
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Tokens {}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (**self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame;

    #[test]
    fn on_the_wire_it_is_a_list() {
        for list in [vec![], vec![1, 250, 251, 70_000, u32::MAX]] {
            let frame = frame::encode(&list).unwrap();
            assert_eq!(frame::encode(&Tokens::from(list.clone())).unwrap(), frame);
            assert_eq!(frame::decode::<Tokens>(&frame[frame::HEADER_BYTES..]).unwrap().to_vec(), list);
        }
        let frame = frame::encode(&Tokens::from(vec![1, 2, 3]).prefix(2)).unwrap();
        assert_eq!(frame, frame::encode(&[1u32, 2].to_vec()).unwrap());
    }

    #[test]
    fn clones_and_prefixes_share_until_one_grows() {
        let all = Tokens::from(vec![1, 2, 3]);
        let mut prefix = all.prefix(2);
        assert!(std::ptr::eq(prefix.as_ptr(), all.as_ptr()) && std::ptr::eq(all.clone().as_ptr(), all.as_ptr()));
        prefix.push(9);
        assert_eq!((all.to_vec(), prefix.to_vec()), (vec![1, 2, 3], vec![1, 2, 9]));
        let before = prefix.as_ptr();
        drop(all);
        prefix = prefix.prefix(2);
        prefix.push(4);
        assert_eq!((prefix.to_vec(), prefix.as_ptr()), (vec![1, 2, 4], before), "what nobody shares grows in place");
    }
}
