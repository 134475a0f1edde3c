//! The unit of KV: a block of 16 token positions, named by a hash of everything that determines its bytes.

use crate::ids::Epoch;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Token positions in a block. It is part of the layout fingerprint, so it changes only for a whole cluster at once.
pub const BLOCK_TOKENS: usize = 16;

/// A token's id in the model's vocabulary.
pub type Token = u32;

/// The number format of K and V.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    Bf16,
    /// 8-bit integers, with an f32 scale for each position and head.
    Int8,
}

impl KvDtype {
    pub const ALL: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8];

    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
        }
    }
}

/// Shape of one block: `[layer][K, V][kv head]`. Each head is `[16 positions][head_dim]` numbers (on a CPU transposed in K) after the
/// positions' scales, if there are any, on cache lines. A layer's slice is contiguous, so it can be shipped when that layer is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
    /// Latent attention: V is the first `latent` numbers of K, and only K is stored. `None` for ordinary attention, which stores both.
    pub latent: Option<usize>,
}

impl KvShape {
    /// Bytes of K or V of one head.
    fn head_bytes(&self) -> usize {
        let numbers = BLOCK_TOKENS * self.head_dim;
        let bytes = match self.dtype {
            KvDtype::F32 => 4 * numbers,
            KvDtype::F16 | KvDtype::Bf16 => 2 * numbers,
            KvDtype::Int8 => BLOCK_TOKENS * size_of::<f32>() + numbers,
        };
        bytes.next_multiple_of(CACHE_LINE)
    }

    /// Bytes of one layer's slice of a block (K and V, or a latent).
    pub fn layer_bytes(&self) -> usize {
        let parts = if self.latent.is_some() { 1 } else { 2 };
        parts * self.kv_heads * self.head_bytes()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }
}

const CACHE_LINE: usize = 64;

/// 128 bits of BLAKE3 over everything that determines a block's bytes except its tokens. Every chain starts from it, so a change of model,
/// dtype or block size never reads old bytes. All tensor-parallel shards of a model share it, and so they share one chain of keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutFingerprint(pub [u8; 16]);

impl LayoutFingerprint {
    /// `weights` is the digest of the model's weights and of the settings that change its arithmetic; `shape` is the whole model's.
    pub fn new(weights: &[u8; 32], shape: &KvShape) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tidemill kv layout v1");
        hasher.update(weights);
        for n in [BLOCK_TOKENS, shape.layers, shape.kv_heads, shape.head_dim] {
            hasher.update(&(n as u64).to_le_bytes());
        }
        hasher.update(&[match shape.dtype {
            KvDtype::F32 => 0,
            KvDtype::F16 => 1,
            KvDtype::Bf16 => 2,
            KvDtype::Int8 => 3,
        }]);
        if let Some(latent) = shape.latent {
            hasher.update(&(latent as u64).to_le_bytes());
        }
        Self(first_16(&hasher.finalize()))
    }
}

/// One of a model's equal tensor-parallel parts, which has its own KV heads of every block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Shard {
    pub index: u32,
    pub count: u32,
}

impl Shard {
    /// The only shard of a model that is not split.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    pub fn is_valid(self) -> bool {
        self.index < self.count
    }
}

/// The name of a full block: BLAKE3 over (parent's key, the 16 token ids), cut to 128 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockKey(pub [u8; 16]);

impl BlockKey {
    /// The parent of a sequence's first block. `salt` separates tenants: prompts cannot be probed without it.
    pub fn root(layout: &LayoutFingerprint, salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tidemill block chain v1");
        hasher.update(&layout.0);
        hasher.update(salt);
        Self(first_16(&hasher.finalize()))
    }

    /// The key of the block with `tokens` that follows this one.
    pub fn child(&self, tokens: &[Token; BLOCK_TOKENS]) -> Self {
        let mut input = [0u8; 16 + 4 * BLOCK_TOKENS];
        input[..16].copy_from_slice(&self.0);
        for (bytes, token) in input[16..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        Self(first_16(&blake3::hash(&input)))
    }

    /// The name of a block that holds one part of the recurrent state after this block, for a model with layers that keep such a state.
    pub fn state_part(&self, part: u32) -> Self {
        let mut input = [0u8; 16 + 5 + 4];
        input[..16].copy_from_slice(&self.0);
        input[16..21].copy_from_slice(b"state");
        input[21..].copy_from_slice(&part.to_le_bytes());
        Self(first_16(&blake3::hash(&input)))
    }

    /// The names of all parts of the state after this block, in order.
    pub fn state_parts(self, parts: usize) -> impl Iterator<Item = Self> {
        (0..parts as u32).map(move |part| self.state_part(part))
    }

    /// The name under which a pool node keeps a shard's part of this block. For a model that is not split, this is the block's own key.
    pub fn of_shard(&self, shard: Shard) -> Self {
        if shard == Shard::WHOLE {
            return *self;
        }
        let mut hasher = blake3::Hasher::new_derive_key("tidemill block shard v1");
        hasher.update(&self.0);
        hasher.update(&shard.index.to_le_bytes());
        hasher.update(&shard.count.to_le_bytes());
        Self(first_16(&hasher.finalize()))
    }
}

/// Length of the tenant's part, with which a salt begins. The rest is the tenant's own way to separate its requests.
pub const TENANT_SALT_BYTES: usize = 32;

/// Length of the account, with which a tenant's part begins. Tenants of one account share what each tenant has at most.
pub const ACCOUNT_SALT_BYTES: usize = 8;

/// The part of a salt that identifies the tenant. Without tenants, salts are shorter, and each counts as a tenant of its own.
pub fn tenant_part(salt: &[u8]) -> &[u8] {
    &salt[..salt.len().min(TENANT_SALT_BYTES)]
}

/// The owner of blocks, as far as a pool node knows: a digest of the account in the salt's [`tenant_part`]. A front door gives every tenant
/// an account of its own, but one to all tenants whose keys cost nothing, since one person may have any number of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Tenant(pub u64);

impl Tenant {
    pub fn of_salt(salt: &[u8]) -> Self {
        let digest = blake3::derive_key("tidemill account v1", &salt[..salt.len().min(ACCOUNT_SALT_BYTES)]);
        Self(u64::from_le_bytes(*digest.first_chunk().expect("a BLAKE3 key has 32 bytes")))
    }
}

/// A generation of trusted blocks. A worker that is found to compute wrongly ends an era: a block's key does not tell which worker computed
/// it, and other workers may have computed further blocks from a wrong one, so every earlier block is suspect. So does an operator who resets
/// the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Era(Option<[u8; 32]>);

impl Era {
    /// The era before any worker was found to compute wrongly.
    pub const FIRST: Self = Self(None);

    /// The era after these workers were found to compute wrongly. They are in ascending order, so that all coordinators that know of the
    /// same workers agree on the era.
    pub fn after(workers: impl IntoIterator<Item = Epoch>) -> Self {
        let mut workers = workers.into_iter().peekable();
        if workers.peek().is_none() {
            return Self::FIRST;
        }
        let mut hasher = blake3::Hasher::new_derive_key("tidemill era v1");
        for worker in workers {
            hasher.update(&worker.0.to_le_bytes());
        }
        Self(Some(*hasher.finalize().as_bytes()))
    }

    /// The era after an operator's reset of this number. 0 is none.
    pub fn reset(self, number: u64) -> Self {
        if number == 0 {
            return self;
        }
        let mut hasher = blake3::Hasher::new_derive_key("tidemill era of a reset v1");
        hasher.update(&number.to_le_bytes());
        if let Self(Some(era)) = &self {
            hasher.update(era);
        }
        Self(Some(*hasher.finalize().as_bytes()))
    }

    /// Changes a salt so that no block of an earlier era is found. The tenant's part stays as it is.
    pub fn salt(&self, salt: &[u8]) -> Vec<u8> {
        let Self(Some(era)) = self else { return salt.to_vec() };
        let mut hasher = blake3::Hasher::new_keyed(era);
        hasher.update(salt);
        [tenant_part(salt), hasher.finalize().as_bytes()].concat()
    }
}

/// The keys of all full blocks of one sequence, extended as tokens arrive.
#[derive(Clone, Debug)]
pub struct Chain {
    root: BlockKey,
    keys: Vec<BlockKey>,
}

impl Chain {
    pub fn new(layout: &LayoutFingerprint, salt: &[u8], tokens: &[Token]) -> Self {
        let mut chain = Self { root: BlockKey::root(layout, salt), keys: Vec::with_capacity(tokens.len() / BLOCK_TOKENS) };
        chain.extend_to(tokens);
        chain
    }

    /// Adds the keys of new full blocks. `tokens` is the whole sequence so far.
    pub fn extend_to(&mut self, tokens: &[Token]) {
        let (blocks, _) = tokens.as_chunks::<BLOCK_TOKENS>();
        for block in &blocks[self.keys.len()..] {
            let parent = self.keys.last().unwrap_or(&self.root);
            self.keys.push(parent.child(block));
        }
    }

    /// One key per full block, in order.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }
}

fn first_16(hash: &blake3::Hash) -> [u8; 16] {
    *hash.as_bytes().first_chunk().expect("a BLAKE3 hash has 32 bytes")
}

fn hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

impl fmt::Debug for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

impl fmt::Display for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_era_changes_every_salt_and_no_tenant() {
        let after = |workers: &[u64]| Era::after(workers.iter().map(|worker| Epoch(*worker)));
        let tenants: Vec<u8> = (0..40).collect();
        let mut salts: Vec<Vec<u8>> = Vec::new();
        for salt in [b"".as_slice(), b"theirs", &tenants] {
            assert_eq!(after(&[]).salt(salt), salt, "nobody was found: all blocks count");
            let resets = [after(&[]).reset(1), after(&[]).reset(2), after(&[3]).reset(1)];
            for era in [after(&[]), after(&[3]), after(&[4]), after(&[3, 4])].into_iter().chain(resets) {
                let salted = era.salt(salt);
                assert!(!salts.contains(&salted));
                assert!(salt != tenants || Tenant::of_salt(&salted) == Tenant::of_salt(salt));
                salts.push(salted);
            }
        }
        assert_eq!(after(&[3, 4]), after(&[3, 4]));
        assert_eq!(after(&[3]).reset(0), after(&[3]));
    }

    const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 8, dtype: KvDtype::F32, latent: None };

    #[test]
    fn a_chain_grows_to_the_same_keys_as_one_made_at_once() {
        let layout = LayoutFingerprint::new(&[7; 32], &SHAPE);
        let tokens: Vec<Token> = (0..100).collect();
        let whole = Chain::new(&layout, b"", &tokens);
        assert_eq!(whole.keys().len(), 6);
        let mut grown = Chain::new(&layout, b"", &[]);
        for n in 0..=tokens.len() {
            grown.extend_to(&tokens[..n]);
        }
        assert_eq!(grown.keys(), whole.keys());
    }

    #[test]
    fn a_key_commits_to_layout_salt_position_and_tokens() {
        let a = LayoutFingerprint::new(&[7; 32], &SHAPE);
        let b = LayoutFingerprint::new(&[7; 32], &KvShape { dtype: KvDtype::Bf16, ..SHAPE });
        let c = LayoutFingerprint::new(&[8; 32], &SHAPE);
        let tokens = [1; 32];
        let keys = [(&a, &b""[..]), (&b, b""), (&c, b""), (&a, b"tenant")].map(|(l, s)| Chain::new(l, s, &tokens).keys().to_vec());
        let mut all: Vec<_> = keys.concat();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 8, "equal tokens at another position, layout or salt have another key");
    }

    #[test]
    fn a_states_parts_have_names_of_their_own() {
        let key = BlockKey::root(&LayoutFingerprint::new(&[7; 32], &SHAPE), b"").child(&[1; BLOCK_TOKENS]);
        let mut names: Vec<BlockKey> =
            [key, key.child(&[0; BLOCK_TOKENS])].iter().flat_map(|key| key.state_parts(3)).chain([key]).collect();
        assert_eq!(key.state_parts(2).collect::<Vec<_>>(), names[..2]);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 7);
    }

    #[test]
    fn shards_share_a_chain_and_name_its_blocks_apart() {
        let key = BlockKey::root(&LayoutFingerprint::new(&[7; 32], &SHAPE), b"").child(&[1; BLOCK_TOKENS]);
        assert_eq!(key.of_shard(Shard::WHOLE), key);
        let shards = [(0, 2), (1, 2), (0, 4), (1, 4)].map(|(index, count)| Shard { index, count });
        let mut names = [&[key][..], &shards.map(|shard| key.of_shard(shard))].concat();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 5);
        assert!(!Shard { index: 2, count: 2 }.is_valid() && !Shard { index: 0, count: 0 }.is_valid());
    }

    #[test]
    fn block_bytes_are_layers_times_layer_bytes() {
        assert_eq!(SHAPE.layer_bytes(), 2 * 2 * 16 * 8 * 4);
        assert_eq!(SHAPE.block_bytes(), 2 * SHAPE.layer_bytes());
        let int8 = KvShape { head_dim: 128, dtype: KvDtype::Int8, ..SHAPE };
        assert_eq!(int8.layer_bytes(), 2 * 2 * 16 * (4 + 128));
        let latent = KvShape { layers: 61, kv_heads: 1, head_dim: 576, dtype: KvDtype::Bf16, latent: Some(512) };
        assert_eq!(latent.block_bytes(), 16 * 61 * 576 * 2);
        assert_ne!(LayoutFingerprint::new(&[7; 32], &latent), LayoutFingerprint::new(&[7; 32], &KvShape { latent: None, ..latent }));
    }
}
