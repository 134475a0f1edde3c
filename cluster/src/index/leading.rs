//! The leading blocks of a prompt: their holders, run by run.

use tidemill_proto::{ids::Epoch, pool::Tier};

/// A pool node's copy of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    pub node: Epoch,
    pub tier: Tier,
}

/// The leading blocks of a prompt that have a holder. Consecutive blocks with the same holders form one run: mostly a few runs, even for a
/// long prompt.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leading {
    /// The blocks of each run, and the end of its holders in `holders`.
    runs: Vec<(u32, usize)>,
    holders: Vec<Holder>,
    /// The number of leading blocks that each engine has on its own device, by epoch.
    cached: Vec<(Epoch, u32)>,
}

impl Leading {
    /// The number of blocks of each run, and their common holders. A run without holders is only on engines' devices.
    pub fn runs(&self) -> impl Iterator<Item = (u32, &[Holder])> {
        let starts = [0].into_iter().chain(self.runs.iter().map(|(_, end)| *end));
        self.runs.iter().zip(starts).map(|(&(blocks, end), start)| (blocks, &self.holders[start..end]))
    }

    /// The runs that can be read, up to the first block that no pool node holds.
    pub fn readable(&self) -> impl Iterator<Item = (u32, &[Holder])> {
        self.runs().take_while(|(_, holders)| !holders.is_empty())
    }

    pub fn blocks(&self) -> u32 {
        self.runs.iter().map(|(blocks, _)| blocks).sum()
    }

    /// The number of leading blocks that an engine has on its own device.
    pub fn cached_by(&self, engine: Epoch) -> u32 {
        self.cached.binary_search_by_key(&engine, |(engine, _)| *engine).map_or(0, |at| self.cached[at].1)
    }

    /// Engines with leading blocks on their own devices, in order of epochs.
    pub fn cached(&self) -> impl Iterator<Item = (Epoch, u32)> {
        self.cached.iter().copied()
    }

    /// The first `end` of these blocks; the last of them counts only for those of its holders that are in `nodes`.
    pub(super) fn up_to(&self, end: u32, nodes: &[Epoch]) -> Self {
        let mut cut = Self::default();
        let mut left = end;
        for (blocks, holders) in self.runs() {
            let blocks = blocks.min(left);
            left -= blocks;
            let before = if left == 0 { blocks.saturating_sub(1) } else { blocks };
            if before > 0 {
                cut.push(before, holders.iter().copied());
            }
            if before < blocks {
                cut.push(1, holders.iter().copied().filter(|holder| nodes.contains(&holder.node)));
            }
        }
        cut
    }

    /// Appends a run.
    pub fn push(&mut self, blocks: u32, holders: impl IntoIterator<Item = Holder>) {
        self.holders.extend(holders);
        self.runs.push((blocks, self.holders.len()));
    }

    /// Extends the last run by one block.
    pub(super) fn extend_last(&mut self) {
        self.runs.last_mut().expect("there is a run").0 += 1;
    }

    pub(super) fn set_cached(&mut self, mut cached: Vec<(Epoch, u32)>) {
        cached.sort_unstable();
        self.cached = cached;
    }
}

/// Collects the holders of one block per item.
impl<H: IntoIterator<Item = Holder>> FromIterator<H> for Leading {
    fn from_iter<I: IntoIterator<Item = H>>(blocks: I) -> Self {
        let mut leading = Self::default();
        blocks.into_iter().for_each(|holders| leading.push(1, holders));
        leading
    }
}
