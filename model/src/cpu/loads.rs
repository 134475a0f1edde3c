//! The choices of a layer's rows as work: for each chosen expert a load of rows, spread over ranks.
//!
//! **The spread** is made for each layer of each step, from the choices and the number of ranks alone: so every rank finds the same one by
//! itself. An expert has a *home*, the rank that packed it, in whose memory node its weights are. There its load begins, in pieces if it is
//! more than a rank's even share; then loads move from the rank that would end last to the one that would end first, as long as that helps.
//! Every rank may compute any expert, as all have their weights in one memory: what is a replica of a hot expert elsewhere is here a second
//! load of it.
//!
//! A row has the same bits on any rank, and outputs are added up in the order of experts, not of loads.

use super::router::Choice;
use crate::tensors::part_of;
use std::ops::Range;
use tidemill_proto::block::Shard;

/// The choices of all rows, in the order in which they are computed.
#[derive(Default)]
pub(super) struct Loads {
    /// The indices of the choices, sorted by expert and then by row.
    sorted: Vec<u32>,
    /// The end of each expert's choices in that order.
    ends: Vec<usize>,
    /// In the order of `sorted`.
    loads: Vec<Load>,
    /// The place of each choice's output.
    places: Vec<Place>,
}

/// Rows of one expert that are computed together.
pub(super) struct Load {
    pub(super) expert: usize,
    /// The places of its choices in the sorted order.
    range: Range<usize>,
    home: usize,
    rank: usize,
}

/// The place of an output: the rank that computes it, and its index among that rank's outputs, which are in the order of loads.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) index: u32,
}

/// The number of rows that take as long to compute as an expert's weights take to read.
const ROWS_OF_A_READ: usize = 8;
/// The same for weights in another memory node, which is assumed to be read at two thirds of the rate.
const ROWS_OF_A_FAR_READ: usize = 12;
/// If each thread's share of the work is at least this many times the largest load, whole loads are distributed among threads.
const LOADS_OF_A_THREAD: usize = 2;

impl Load {
    pub(super) fn rows(&self) -> usize {
        self.range.len()
    }

    /// The time that the load takes on a rank, in rows.
    fn time_on(&self, rank: usize) -> usize {
        self.rows().max(if rank == self.home { ROWS_OF_A_READ } else { ROWS_OF_A_FAR_READ })
    }
}

impl Loads {
    /// Sorts the choices and spreads them over ranks.
    pub(super) fn spread(&mut self, choices: &[Choice], experts: usize, ranks: usize) {
        self.sort(choices, experts);
        self.cut(experts, ranks);
        self.balance(ranks);
        let mut rows = vec![0; ranks];
        self.places.resize(choices.len(), Place::default());
        for load in &self.loads {
            for &choice in &self.sorted[load.range.clone()] {
                self.places[choice as usize] = Place { rank: load.rank as u32, index: rows[load.rank] };
                rows[load.rank] += 1;
            }
        }
    }

    fn sort(&mut self, choices: &[Choice], experts: usize) {
        let Self { sorted, ends, .. } = self;
        ends.clear();
        ends.resize(experts, 0);
        choices.iter().for_each(|choice| ends[choice.expert] += 1);
        let mut before = 0;
        for end in ends.iter_mut() {
            before += std::mem::replace(end, before);
        }
        sorted.resize(choices.len(), 0);
        for (nth, choice) in choices.iter().enumerate() {
            let place = &mut ends[choice.expert];
            sorted[*place] = nth as u32;
            *place += 1;
        }
    }

    /// Makes a load of each expert's rows at its home, or several if they are more than a rank's even share.
    fn cut(&mut self, experts: usize, ranks: usize) {
        let part = |index: usize| part_of(Shard { index: index as u32, count: ranks as u32 }, experts);
        let share = self.sorted.len().div_ceil(ranks).max(2 * ROWS_OF_A_READ);
        self.loads.clear();
        let mut start = 0;
        for (expert, &end) in self.ends.iter().enumerate() {
            let pieces = if end - start > share { (end - start).div_ceil(share / 2) } else { 1 };
            let rows = (end - start).div_ceil(pieces);
            let home = (0..ranks).find(|&rank| part(rank).contains(&expert)).expect("every expert has a home");
            while start < end {
                let range = start..end.min(start + rows);
                start = range.end;
                self.loads.push(Load { expert, range, home, rank: home });
            }
        }
    }

    /// Moves loads from the rank that would end last to the one that would end first, as long as that helps.
    fn balance(&mut self, ranks: usize) {
        let mut busy = vec![0; ranks];
        self.loads.iter().for_each(|load| busy[load.rank] += load.time_on(load.rank));
        // Each move brings the end closer, so this stops by itself; the bound is on the time that it takes.
        for _ in 0..self.loads.len() {
            let last = (0..ranks).max_by_key(|&rank| busy[rank]).expect("at least one rank");
            let first = (0..ranks).min_by_key(|&rank| busy[rank]).expect("at least one rank");
            let end = |load: &Load| (busy[last] - load.time_on(last)).max(busy[first] + load.time_on(first));
            let of_last = self.loads.iter_mut().filter(|load| load.rank == last);
            match of_last.min_by_key(|load| end(load)) {
                Some(load) if end(load) < busy[last] => {
                    busy[last] -= load.time_on(last);
                    busy[first] += load.time_on(first);
                    load.rank = first;
                }
                _ => return,
            }
        }
    }

    /// The loads of a rank, in the order of their outputs.
    pub(super) fn of_rank(&self, rank: usize) -> impl Iterator<Item = &Load> {
        self.loads.iter().filter(move |load| load.rank == rank)
    }

    /// The indices of a load's choices.
    pub(super) fn choices(&self, load: &Load) -> &[u32] {
        &self.sorted[load.range.clone()]
    }

    /// The places of all choices' outputs.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }
}

/// Whether threads that take one load at a time finish at about the same time.
pub(super) fn are_even<'a>(loads: impl Iterator<Item = &'a Load>, threads: usize) -> bool {
    let (sum, largest) = loads.map(|load| load.time_on(load.rank)).fold((0, 0), |(sum, largest), time| (sum + time, largest.max(time)));
    sum >= LOADS_OF_A_THREAD * threads * largest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads of this many rows of each expert.
    fn spread(rows: &[usize], ranks: usize) -> Loads {
        let experts = rows.iter().enumerate().flat_map(|(expert, rows)| std::iter::repeat_n(expert, *rows));
        let choices: Vec<Choice> = experts.map(|expert| Choice { expert, weight: 1.0 }).collect();
        let mut loads = Loads::default();
        loads.spread(&choices, rows.len(), ranks);
        loads
    }

    /// (expert, rows) of each rank's loads.
    fn by_rank(loads: &Loads, ranks: usize) -> Vec<Vec<(usize, usize)>> {
        (0..ranks).map(|rank| loads.of_rank(rank).map(|load| (load.expert, load.rows())).collect()).collect()
    }

    #[test]
    fn choices_are_sorted_by_expert_and_row() {
        let chosen = [2, 0, 2, 3, 0, 2].map(|expert| Choice { expert, weight: 1.0 });
        let mut loads = Loads::default();
        for _ in 0..2 {
            loads.spread(&chosen, 5, 1);
            let choices: Vec<_> = loads.of_rank(0).map(|load| (load.expert, loads.choices(load))).collect();
            assert_eq!(choices, [(0, &[1, 4][..]), (2, &[0, 2, 5]), (3, &[3])]);
            assert_eq!(loads.places().iter().map(|place| place.index).collect::<Vec<_>>(), [2, 0, 3, 5, 1, 4]);
        }
    }

    #[test]
    fn even_loads_stay_at_home() {
        assert_eq!(by_rank(&spread(&[20; 6], 2), 2), [[(0, 20), (1, 20), (2, 20)], [(3, 20), (4, 20), (5, 20)]]);
        assert_eq!(by_rank(&spread(&[30; 4], 4), 4), [[(0, 30)], [(1, 30)], [(2, 30)], [(3, 30)]]);
        // A step of one row that chose experts 1 and 4 of 6.
        assert_eq!(by_rank(&spread(&[0, 1, 0, 0, 1, 0], 2), 2), [[(1, 1)], [(4, 1)]]);
    }

    #[test]
    fn a_rank_without_work_takes_experts_of_others() {
        assert_eq!(by_rank(&spread(&[1, 1, 1, 1, 0, 0, 0, 0], 2), 2), [vec![(1, 1), (2, 1), (3, 1)], vec![(0, 1)]]);
    }

    #[test]
    fn a_hot_expert_is_computed_by_several_ranks() {
        let of_ranks = by_rank(&spread(&[400, 10, 10, 80], 4), 4);
        for loads in &of_ranks {
            let rows: usize = loads.iter().map(|(_, rows)| rows).sum();
            assert!(loads[0].0 == 0 && (110..140).contains(&rows), "an even share is 125: {of_ranks:?}");
        }
    }

    #[test]
    fn every_choice_has_a_place_of_its_own() {
        for ranks in 1..=5 {
            for rows in [&[7, 0, 31, 2, 9][..], &[100], &[0, 0, 1], &[1; 40], &[]] {
                let loads = spread(rows, ranks);
                let mut places: Vec<_> = loads.places().iter().map(|place| (place.rank, place.index)).collect();
                places.sort_unstable();
                let expected: Vec<_> = (0..ranks as u32)
                    .flat_map(|rank| (0..loads.of_rank(rank as usize).map(Load::rows).sum::<usize>() as u32).map(move |i| (rank, i)))
                    .collect();
                assert_eq!(places, expected, "{rows:?} on {ranks} ranks");
            }
        }
    }
}
