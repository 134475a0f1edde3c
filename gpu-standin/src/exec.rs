//! Runs kernels, block after block, warp by warp: 32 lanes per operation, so that decoding an instruction is paid once
//! for all of them.
//!
//! - [`warp`]: a warp's registers, its instructions, the divergence and reconvergence of its lanes; [`alu`]: pure computation;
//!   [`tensor`]: products of fragments
//! - [`shared`]: a block's shared memory; [`barriers`]: barriers for some of its warps
//!
//! Blocks run one after the other in random order, and so do a block's warps between two barriers. Results that hardware leaves to timing
//! are errors here.

pub(crate) mod alu;
pub(crate) mod barriers;
pub(crate) mod shared;
pub(crate) mod tensor;
pub(crate) mod warp;

use crate::{
    fault::{Fault, Kind},
    memory::Memory,
    options::Random,
    ptx::program::{Kernel, SHARED_START, Special},
};
use barriers::Barriers;
use shared::Shared;
use warp::{State, Warp};

/// A kernel with its arguments.
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) grid: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) params: &'a [u8],
    /// The launch's number, which identifies it.
    pub(crate) number: u64,
}

/// The state that the warps of a block share.
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) memory: &'a mut Memory,
    pub(crate) shared: Shared,
    pub(crate) params: &'a [u8],
    pub(crate) launch: u64,
    pub(crate) index: u64,
    /// The number of barriers passed.
    pub(crate) interval: u32,
    pub(crate) barriers: Barriers,
    /// The registers per lane of each warp that asked for a different number.
    pub(crate) registers: Vec<Option<u32>>,
}

impl Block<'_> {
    /// Checks that warps do not ask for more registers than their block has, as they would wait forever. A block begins with the most that
    /// all of its lanes can have.
    fn check_registers(&self) -> Result<(), Fault> {
        const OF_A_MULTIPROCESSOR: u32 = 65536;
        const UNIT: u32 = 8;
        const PER_LANE_MAX: u32 = 255 / UNIT * UNIT;
        let warps = self.registers.len() as u32;
        let first = (OF_A_MULTIPROCESSOR / (32 * warps) / UNIT * UNIT).min(PER_LANE_MAX);
        let wanted: u32 = self.registers.iter().map(|of_warp| of_warp.unwrap_or(first)).sum();
        if wanted <= first * warps {
            return Ok(());
        }
        let what =
            format!("setmaxnreg asks for {} registers in all, and the block has {}: it waits forever", 32 * wanted, 32 * first * warps);
        Err(Fault::new(Kind::Divergence, what))
    }
}

pub(crate) fn run(launch: &Launch<'_>, memory: &mut Memory, random: &mut Random) -> Result<(), Fault> {
    let Launch { kernel, grid, threads, shared_bytes, params, number } = launch;
    let name = &kernel.name;
    let count: u32 = threads.iter().product();
    if count == 0 || count > kernel.threads_max || grid.contains(&0) || grid[1] > 65535 || grid[2] > 65535 {
        let what = format!("{name} is launched on a grid of {grid:?} with {threads:?} threads; it takes up to {}", kernel.threads_max);
        return Err(Fault::new(Kind::Unsupported, what));
    }
    let mut ranges = kernel.shared.clone();
    ranges.push((kernel.dynamic_at, kernel.dynamic_at + shared_bytes));
    debug_assert!(ranges.iter().all(|r| r.0 >= SHARED_START));
    let warp_count = count.div_ceil(32) as usize;
    let mut block = Block {
        kernel,
        memory,
        shared: Shared::new(&ranges, warp_count),
        params,
        launch: *number,
        index: 0,
        interval: 0,
        barriers: Barriers::new(),
        registers: vec![None; warp_count],
    };
    let mut warps: Vec<Warp> = (0..warp_count).map(|i| Warp::new(kernel, i, count, *threads, *grid)).collect();

    let blocks: u64 = grid.iter().map(|&n| u64::from(n)).product();
    let mut order: Vec<u64> = (0..blocks).collect();
    random.shuffle(&mut order);
    for (turn, index) in order.into_iter().enumerate() {
        if turn > 0 {
            block.shared.clear();
            block.barriers.clear();
            block.registers.fill(None);
        }
        (block.index, block.interval) = (index, 0);
        let at =
            [index % u64::from(grid[0]), index / u64::from(grid[0]) % u64::from(grid[1]), index / u64::from(grid[0]) / u64::from(grid[1])];
        warps.iter_mut().for_each(|warp| warp.begin(kernel, at.map(|x| x as u32)));
        run_block(&mut block, &mut warps, random).map_err(|fault| fault.at(format!("kernel {name}, block {at:?} of {grid:?}")))?;
    }
    kernel.spare_registers().extend(warps.into_iter().map(|warp| warp.registers));
    Ok(())
}

fn run_block(block: &mut Block<'_>, warps: &mut [Warp], random: &mut Random) -> Result<(), Fault> {
    let mut order: Vec<usize> = (0..warps.len()).collect();
    loop {
        random.shuffle(&mut order);
        for &i in &order {
            warps[i].run(block)?;
        }
        let released = block.barriers.released();
        if !released.is_empty() {
            released.into_iter().for_each(|i| warps[i].pass_barrier());
            continue;
        }
        let pending = block.barriers.pending();
        if !pending.is_empty() {
            return Err(Fault::new(Kind::Divergence, pending));
        }
        let waiting: Vec<(usize, usize)> = warps
            .iter()
            .enumerate()
            .filter_map(|(i, warp)| if let State::AtBarrier(pc) = warp.state { Some((i, pc)) } else { None })
            .collect();
        let Some(&(first, pc)) = waiting.first() else { return block.check_registers() };
        let place = |pc: usize| block.kernel.place(pc);
        if waiting.len() < warps.len() {
            let missing = (0..warps.len()).find(|i| !waiting.iter().any(|w| w.0 == *i)).unwrap_or_default();
            let what = format!("warp {first} waits at a barrier, and warp {missing} has ended");
            return Err(Fault::new(Kind::Divergence, what).at(place(pc)));
        }
        if let Some((other, other_pc)) = waiting.iter().find(|w| w.1 != pc) {
            let what = format!("warps {first} and {other} wait at different barriers");
            return Err(Fault::new(Kind::Divergence, what).at(place(pc)).at(place(*other_pc)));
        }
        block.shared.pass_barrier();
        block.interval += 1;
        warps.iter_mut().for_each(Warp::pass_barrier);
    }
}

/// A special register's values, lane by lane.
pub(crate) fn special(which: Special, first_thread: u32, threads: [u32; 3], grid: [u32; 3], at: [u32; 3]) -> [u32; 32] {
    std::array::from_fn(|lane| {
        let thread = first_thread + lane as u32;
        match which {
            Special::TidX => thread % threads[0],
            Special::TidY => thread / threads[0] % threads[1],
            Special::TidZ => thread / threads[0] / threads[1],
            Special::NtidX => threads[0],
            Special::NtidY => threads[1],
            Special::NtidZ => threads[2],
            Special::CtaX => at[0],
            Special::CtaY => at[1],
            Special::CtaZ => at[2],
            Special::NctaX => grid[0],
            Special::NctaY => grid[1],
            Special::NctaZ => grid[2],
            Special::Lane => lane as u32,
        }
    })
}
