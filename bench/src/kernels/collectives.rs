//! The cost of a split model's layers beside their products: the gathers of tensor-parallel ranks, by the model's own exchange,
//! and the link between pipeline stages, on loopback.
//!
//! A row's limit is the time in which memory moves the bytes. Small gathers stay in caches, which are faster; what slows them down is
//! the meeting of the ranks.

use super::Bench;
use anyhow::Context;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tidemill_model::Gathers;
use tidemill_net::{
    identity::{self, Identity},
    link::{Endpoint, Receiver, Sender},
};
use tidemill_proto::{
    block::BLOCK_TOKENS,
    frame::Preamble,
    stage::{BATCH_ROWS, Batch, Bytes, FromStage, StageChunk, ToStage},
};
use tokio::runtime::Runtime;

/// The widths of a layer.
#[derive(Clone, Copy)]
struct Layer {
    label: &'static str,
    /// Numbers of all heads together.
    heads: usize,
    hidden: usize,
    intermediate: usize,
}

const LAYERS: [Layer; 2] = [
    // huggingface.co/Qwen/Qwen2.5-1.5B
    Layer { label: "1.5b", heads: 12 * 128, hidden: 1536, intermediate: 8960 },
    // huggingface.co/meta-llama/Llama-3.1-8B
    Layer { label: "8b", heads: 32 * 128, hidden: 4096, intermediate: 14_336 },
];

const RANKS: [usize; 3] = [1, 2, 4];
/// Rows of decode steps, and of a prefill chunk.
const ROWS: [usize; 3] = [1, 16, 512];
/// Positions before each row of a decode step, for the block tables that go along to a stage.
const CONTEXT: usize = 512;
/// The bytes that a run moves at least, so that starting it costs little.
const RUN_BYTES: usize = 64 << 20;

impl Layer {
    /// The widths of a layer's gathers.
    fn gathers(self) -> [usize; 4] {
        [self.heads, self.hidden, self.intermediate, self.hidden]
    }

    /// Bytes that each rank puts together for `rows` rows.
    fn gathered_bytes(self, rows: usize) -> usize {
        rows * self.gathers().iter().sum::<usize>() * size_of::<f32>()
    }
}

pub(super) fn measure(bench: &mut Bench) -> anyhow::Result<()> {
    let layers = if bench.quick { &LAYERS[..1] } else { &LAYERS[..] };
    for &layer in layers {
        for ranks in RANKS {
            gathers(bench, layer, ranks)?;
        }
    }
    layers.iter().try_for_each(|&layer| hops(bench, layer))
}

/// The gathers of one layer. A single rank copies its own columns, which a model that is not split leaves out.
fn gathers(bench: &mut Bench, layer: Layer, ranks: usize) -> anyhow::Result<()> {
    let cpu = &bench.machine.cpu;
    let mut group = Gathers::new(Some(cpu.isa()), ranks, (cpu.threads() / ranks).max(1))?;
    for rows in ROWS {
        let bytes = layer.gathered_bytes(rows);
        // Each rank reads the columns of all and writes them.
        let moved = 2 * ranks * bytes;
        let times = if bench.quick { 1 } else { RUN_BYTES.div_ceil(moved) };
        let shape = format!("{} ranks={ranks} m={rows}, {}", layer.label, kib(bytes * (ranks - 1) / ranks));
        bench.layers("gather", shape, moved, times, |_| |_: &_| group.run(rows, &layer.gathers(), times));
    }
    Ok(())
}

/// A batch to a stage and back, as the head sends it, with a stage that computes nothing.
fn hops(bench: &mut Bench, layer: Layer) -> anyhow::Result<()> {
    let runtime = Runtime::new()?;
    let mut link = runtime.block_on(Link::open())?;
    for rows in [1, 16, BATCH_ROWS] {
        let bytes = rows * layer.hidden * size_of::<f32>();
        let shape = format!("{} m={rows}, {}", layer.label, kib(2 * bytes));
        // Both processes' memory, there and back.
        let moved = 4 * bytes;
        let times = if bench.quick { 1 } else { (RUN_BYTES / 16).div_ceil(moved) };
        let mut broken = None;
        bench.layers("stage hop", shape, moved, times, |_| {
            let (runtime, link, broken) = (&runtime, &mut link, &mut broken);
            move |_: &_| {
                for _ in 0..times {
                    if let Err(error) = runtime.block_on(link.there_and_back(rows, bytes)) {
                        *broken = Some(error);
                    }
                }
            }
        });
        broken.map_or(Ok(()), Err).context("a link on loopback broke")?;
    }
    Ok(())
}

fn kib(bytes: usize) -> String {
    format!("{:.0} KiB", bytes as f64 / 1024.0)
}

/// The head's link to a stage that gives back what it gets.
struct Link {
    /// Keep the sockets open.
    _ends: [Endpoint; 2],
    sender: Sender<ToStage>,
    receiver: Receiver<FromStage>,
}

impl Link {
    async fn open() -> anyhow::Result<Self> {
        let pki = tempfile::tempdir().context("cannot make a directory for certificates")?;
        identity::create(pki.path())?;
        let identity = Identity::load(pki.path())?;
        let stage = Endpoint::bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0), &identity)?;
        let (addr, mut listener) = (stage.local_addr(), stage.listen());
        tokio::spawn(async move {
            if let Some(connection) = listener.accept().await
                && let Ok((mut sender, mut receiver)) = connection.accept::<FromStage, ToStage>(Preamble::Stage).await
            {
                while let Ok(Some(ToStage::Step(Batch { rows, .. }))) = receiver.recv().await {
                    if sender.send(&FromStage::Rows(rows)).await.is_err() {
                        return;
                    }
                }
            }
        });
        let head = Endpoint::bind_client(SocketAddr::new(addr.ip(), 0), &identity)?;
        let connection = head.connect(addr).await?;
        let (sender, receiver) = connection.open(Preamble::Stage).await?;
        Ok(Self { _ends: [stage, head], sender, receiver })
    }

    async fn there_and_back(&mut self, rows: usize, bytes: usize) -> anyhow::Result<()> {
        let table: Vec<u32> = (0..=(CONTEXT / BLOCK_TOKENS) as u32).collect();
        let chunk = StageChunk { tokens: vec![1], start: CONTEXT as u32, blocks: table, wanted: 1 };
        self.sender.send(&ToStage::Step(Batch { chunks: vec![chunk; rows], rows: Bytes(vec![1; bytes]) })).await?;
        self.receiver.recv().await?.context("the stage ended")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_gathers_what_the_guide_says() {
        // docs/guides/tensor-parallel.md: 26,624 numbers, 104 KiB.
        let of_8b = LAYERS[1];
        assert_eq!(of_8b.gathers().iter().sum::<usize>(), 26_624);
        assert_eq!(of_8b.gathered_bytes(1), 104 << 10);
    }

    #[test]
    fn a_batch_comes_back_over_the_link() {
        let runtime = Runtime::new().unwrap();
        runtime.block_on(async {
            let mut link = Link::open().await.unwrap();
            for rows in [1, 64] {
                link.there_and_back(rows, rows * 4096 * 4).await.unwrap();
            }
        });
    }
}
