//! The time that blocks of each class take to be used again, and the value of keeping them.

/// Number of ages, in windows.
pub(super) const AGES: usize = 64;

/// The factor by which counts decay in each window, since traffic changes.
const KEPT: f64 = 0.99;

/// Weight of the pooled counts of all classes, in blocks. Blocks of one request share its fate, so this many are a few dozen
/// independent observations.
const PRIOR_BLOCKS: f64 = 500.0;

/// Counts for each class and age, and the resulting order.
///
/// Classes come in pairs: an even one for ends of chains, the odd one after it for their other blocks.
#[derive(Debug)]
pub(super) struct ReuseTimes {
    classes: Vec<Class>,
    window: u64,
    /// All cells, the least valuable first.
    cells: Vec<Cell>,
    /// The place of each cell in that order, by class and age.
    places: Vec<[usize; AGES]>,
}

/// Blocks of one class whose last use was `age` windows ago. The last age includes all older ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cell {
    pub(super) class: usize,
    pub(super) age: usize,
}

#[derive(Clone, Debug)]
struct Class {
    /// The number of blocks last used in each window, by window modulo [`AGES`].
    waiting: [u64; AGES],
    /// The number of blocks that reached the end of an age or were used again in it, by age.
    exposed: [f64; AGES],
    /// The number of blocks that were used again in an age, by age.
    reused: [f64; AGES],
}

impl ReuseTimes {
    /// Counts for this number of classes, which must be even.
    pub(super) fn new(classes: usize) -> Self {
        let class = Class { waiting: [0; AGES], exposed: [0.0; AGES], reused: [0.0; AGES] };
        let mut times = Self { classes: vec![class; classes], window: 0, cells: Vec::new(), places: vec![[0; AGES]; classes] };
        times.rank();
        times
    }

    /// Counts a block of this class that was used in this window, and waits for its next use.
    pub(super) fn used(&mut self, class: usize, window: u64) {
        if self.remembers(window) {
            self.classes[class].waiting[index(window)] += 1;
        }
    }

    /// Counts a reuse of a block of this class, last used in this window.
    pub(super) fn reused(&mut self, class: usize, window: u64) {
        if self.forget(class, window) {
            let age = (self.window - window) as usize;
            self.classes[class].reused[age] += 1.0;
            self.classes[class].exposed[age] += 1.0;
        }
    }

    /// Stops counting a block of this class, last used in this window, as waiting. Returns whether it was still counted.
    pub(super) fn forget(&mut self, class: usize, window: u64) -> bool {
        let remembers = self.remembers(window);
        if remembers {
            self.classes[class].waiting[index(window)] -= 1;
        }
        remembers
    }

    /// Whether blocks last used in this window are still counted.
    pub(super) fn remembers(&self, window: u64) -> bool {
        self.window - window < AGES as u64
    }

    /// Ends the window: all waiting blocks become one window older.
    pub(super) fn next_window(&mut self) {
        for class in &mut self.classes {
            for count in class.exposed.iter_mut().chain(&mut class.reused) {
                *count *= KEPT;
            }
            for age in 0..AGES.min(self.window as usize + 1) {
                class.exposed[age] += class.waiting[index(self.window - age as u64)] as f64;
            }
            class.waiting[index(self.window + 1)] = 0;
        }
        self.window += 1;
        self.rank();
    }

    /// All cells, the least valuable first.
    pub(super) fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// The cell's place in the order of [`cells`](Self::cells).
    pub(super) fn place(&self, cell: Cell) -> usize {
        self.places[cell.class][cell.age]
    }

    fn rank(&mut self) {
        let sum = |of: fn(&Class) -> &[f64; AGES], age: usize| self.classes.iter().map(|class| of(class)[age]).sum::<f64>();
        // With little counted yet, hazards are expected to fall with the square of age: the oldest leave first.
        let (mut pooled, mut expected) = ([0.0; AGES], 0.5);
        for (age, hazard) in pooled.iter_mut().enumerate() {
            *hazard = (sum(|class| &class.reused, age) + PRIOR_BLOCKS * expected) / (sum(|class| &class.exposed, age) + PRIOR_BLOCKS);
            expected = *hazard * ((age + 1) as f64 / (age + 2) as f64).powi(2);
        }
        let densities = |class: &Class| -> [f64; AGES] {
            let hazard = |age: usize| (class.reused[age] + PRIOR_BLOCKS * pooled[age]) / (class.exposed[age] + PRIOR_BLOCKS);
            let hazards = std::array::from_fn(hazard);
            std::array::from_fn(|age| hit_density(&hazards, age))
        };
        let mut ranked = Vec::with_capacity(self.classes.len() * AGES);
        for (pair, classes) in self.classes.chunks_exact(2).enumerate() {
            let (ends, others) = (densities(&classes[0]), densities(&classes[1]));
            for age in 0..AGES {
                // The end of a chain is useless without the blocks before it, so it is worth no more than they are.
                ranked.push((ends[age].min(others[age]), Cell { class: 2 * pair, age }));
                ranked.push((others[age], Cell { class: 2 * pair + 1, age }));
            }
        }
        ranked.sort_by(|(a, cell_a), (b, cell_b)| a.total_cmp(b).then(cell_b.age.cmp(&cell_a.age)));
        self.cells = ranked.into_iter().map(|(_, cell)| cell).collect();
        for (place, cell) in self.cells.iter().enumerate() {
            self.places[cell.class][cell.age] = place;
        }
    }
}

fn index(window: u64) -> usize {
    (window % AGES as u64) as usize
}

/// Hits per slot and window for a block of this age, if it is kept until its next use or until the best age to give up. `hazards`,
/// by age: the chance that a block of that age is used again within the window.
fn hit_density(hazards: &[f64; AGES], age: usize) -> f64 {
    let (mut left, mut hits, mut room, mut best) = (1.0, 0.0, 0.0, 0.0f64);
    for hazard in &hazards[age..] {
        hits += left * hazard;
        // On average a block is used in the middle of a window.
        room += left * (1.0 - hazard / 2.0);
        left *= 1.0 - hazard;
        best = best.max(hits / room);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn giving_up_comes_after_the_time_when_blocks_come_back() {
        let mut hazards = [0.0; AGES];
        hazards[3] = 0.5;
        let densities: Vec<f64> = (0..6).map(|age| hit_density(&hazards, age)).collect();
        assert!(densities.is_sorted_by(|a, b| a < b || *b == 0.0), "{densities:?}");
        assert!((densities[0] - 0.5 / 3.75).abs() < 1e-12 && densities[4] == 0.0);
    }

    #[test]
    fn a_class_is_worth_what_its_own_blocks_did() {
        let mut times = ReuseTimes::new(4);
        for window in 0..200 {
            for _ in 0..1000 {
                times.used(1, window);
                times.used(3, window);
            }
            if window >= 5 {
                (0..900).for_each(|_| times.reused(3, window - 5));
            }
            times.next_window();
        }
        let place = |class, age| times.place(Cell { class, age });
        assert!(place(1, 1) < place(3, 1), "class 1 is never used again");
        assert!(place(3, 8) < place(3, 3), "class 3 only five windows later");
        assert!(place(0, 1) < place(1, 1) && place(2, 1) < place(3, 1), "ends of chains first");
    }

    #[test]
    fn before_anything_is_counted_older_is_worth_less() {
        let times = ReuseTimes::new(4);
        let ages: Vec<usize> = times.cells().iter().map(|cell| cell.age).collect();
        assert!(ages.is_sorted_by(|a, b| a >= b) && ages.len() == 4 * AGES);
    }
}
