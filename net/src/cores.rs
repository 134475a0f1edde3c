//! Lists of cores such as `0-1,4`, and pinning a process to them.

use crate::config::{ConfigError, invalid};
use std::{collections::BTreeSet, fmt, str::FromStr};

/// A set of at least one core, by the system's numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cores(BTreeSet<usize>);

impl Cores {
    /// Number of cores.
    #[allow(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Splits the cores into `parts` runs of neighbouring ones. If they do not divide evenly, the first parts get one more. Returns `None`
    /// if there are fewer cores than parts, or no parts.
    pub fn split(&self, parts: usize) -> Option<Vec<Cores>> {
        let each = self.len().checked_div(parts).filter(|&each| each > 0)?;
        let mut cores = self.0.iter().copied();
        let part = |i: usize| Cores(cores.by_ref().take(each + usize::from(i < self.len() % parts)).collect());
        Some((0..parts).map(part).collect())
    }

    /// The cores that this process may run on.
    #[cfg(target_os = "linux")]
    pub fn of_process() -> Result<Cores, ConfigError> {
        use nix::{
            sched::{CpuSet, sched_getaffinity},
            unistd::Pid,
        };
        let set = sched_getaffinity(Pid::from_raw(0)).map_err(|error| refused("those of this process", error))?;
        Ok(Cores((0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).collect()))
    }

    /// Pins the calling thread, and every thread that it starts later, to these cores. To be called before other threads exist.
    #[cfg(target_os = "linux")]
    pub fn stay(&self) -> Result<(), ConfigError> {
        use nix::{
            sched::{CpuSet, sched_setaffinity},
            unistd::Pid,
        };
        let allowed = Cores::of_process()?;
        if let Some(core) = self.0.difference(&allowed.0).next() {
            return Err(invalid("cores", self, format!("this process may not run on core {core}, only on {allowed}")));
        }
        let mut set = CpuSet::new();
        self.0.iter().try_for_each(|&core| set.set(core)).map_err(|error| refused(self, error))?;
        sched_setaffinity(Pid::from_raw(0), &set).map_err(|error| refused(self, error))
    }

    #[cfg(not(target_os = "linux"))]
    pub fn of_process() -> Result<Cores, ConfigError> {
        Err(invalid("cores", "those of this process", "only Linux reports them: leave it unset"))
    }

    #[cfg(not(target_os = "linux"))]
    pub fn stay(&self) -> Result<(), ConfigError> {
        Err(invalid("cores", self, "only Linux pins processes to cores: leave it unset"))
    }
}

#[cfg(target_os = "linux")]
fn refused(cores: impl ToString, error: nix::Error) -> ConfigError {
    invalid("cores", cores, format!("the system refuses it ({error}): leave it unset"))
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(list: &str) -> Result<Cores, String> {
        let number = |text: &str| match text.trim().parse::<usize>() {
            Ok(core) if core <= CORE_MAX => Ok(core),
            _ => Err(format!("`{text}` is not a core, from 0 to {CORE_MAX}, in a list such as 0-1,4")),
        };
        let mut cores = BTreeSet::new();
        for item in list.split(',') {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("`{item}` ends before it begins"));
            }
            for core in first..=last {
                if !cores.insert(core) {
                    return Err(format!("core {core} is in it twice"));
                }
            }
        }
        Ok(Cores(cores))
    }
}

/// The highest core number that the system calls accept.
const CORE_MAX: usize = 1023;

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |core: usize| self.0.contains(&core);
        let firsts = self.0.iter().filter(|core| !core.checked_sub(1).is_some_and(has));
        for (i, &first) in firsts.enumerate() {
            let last = (first..).take_while(|&core| has(core)).last().unwrap_or(first);
            f.write_str(if i > 0 { "," } else { "" })?;
            if last > first { write!(f, "{first}-{last}")? } else { write!(f, "{first}")? }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(list: &str) -> Cores {
        list.parse().unwrap()
    }

    #[test]
    fn a_list_of_numbers_and_ranges_reads_back() {
        for (list, numbers) in [("0", &[0][..]), ("0-1,4", &[0, 1, 4]), ("7,3-3", &[3, 7]), (" 2 , 5 - 6 ", &[2, 5, 6]), ("1023", &[1023])]
        {
            assert_eq!(cores(list).0.iter().copied().collect::<Vec<_>>(), numbers);
            assert_eq!(cores(&cores(list).to_string()), cores(list));
        }
        assert_eq!(cores("4,0,1,2,9-10").to_string(), "0-2,4,9-10");
    }

    #[test]
    fn what_is_no_list_is_told_why() {
        for (list, why) in [
            ("", "is not a core"),
            ("0,", "is not a core"),
            ("-1", "is not a core"),
            ("1024", "from 0 to 1023"),
            ("99999999999999999999", "is not a core"),
            ("3-1", "ends before it begins"),
            ("0-2,1", "core 1 is in it twice"),
            ("0x1", "is not a core"),
        ] {
            let error = list.parse::<Cores>().unwrap_err();
            assert!(error.contains(why), "{list}: {error}");
        }
    }

    #[test]
    fn parts_are_neighbours_and_share_evenly() {
        let split = |list: &str, parts| cores(list).split(parts).map(|parts| parts.iter().map(Cores::to_string).collect::<Vec<_>>());
        assert_eq!(split("0-1", 2).unwrap(), ["0", "1"]);
        assert_eq!(split("0-6", 3).unwrap(), ["0-2", "3-4", "5-6"]);
        assert_eq!(split("0-1", 3), None);
        assert_eq!(split("0-1", 0), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_and_those_it_starts_stay_and_other_cores_are_refused() {
        let all = Cores::of_process().unwrap();
        let one = all.split(all.len()).unwrap().pop().unwrap();
        let (one, seen) = std::thread::spawn(move || {
            one.stay().unwrap();
            let seen = std::thread::spawn(|| Cores::of_process().unwrap()).join().unwrap();
            if all.len() > 1 {
                let error = all.stay().unwrap_err().to_string();
                assert!(error.contains("cores") && error.contains("may not run on core"), "{error}");
            }
            (one, seen)
        })
        .join()
        .unwrap();
        assert_eq!(seen, one);
    }
}
