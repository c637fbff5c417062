//! Whether the memory of a rank that ended is free again.
//!
//! The driver takes a process's memory back after its end. A successor that allocates before that runs out of memory
//! on a GPU that is as good as free, so it waits: for processes that have ended and are still told to hold memory.
//! In a container the driver's process numbers are the host's, and every process of another container looks as if
//! it had ended; whoever was waited for in vain is therefore not waited for again.

use std::{collections::BTreeSet, time::Duration};

use super::Device;
use crate::time::Time;

/// The longest that a rank waits for memory. The driver needs a fraction of a second, or forever.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How often to look while a rank waits.
pub const LOOK: Duration = Duration::from_millis(100);

/// A process that holds memory of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Bytes, if the driver tells.
    pub bytes: Option<u64>,
    /// Whether it lives, as far as can be seen from here.
    pub lives: bool,
}

/// Who holds memory of one device, beside this node's ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaim {
    /// Since when a rank waits.
    since: Option<Time>,
    /// Whom nobody needs to hear of again: strangers that were told of, and those waited for in vain.
    known: BTreeSet<u32>,
}

/// What a look came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// What a user should know.
    pub warnings: Vec<String>,
    /// Look again so much later; none: the rank can have the device.
    pub again: Option<Duration>,
}

impl Reclaim {
    /// Another rank wants the device: whoever waited before it waits no more.
    pub fn begin(&mut self) {
        self.since = None;
    }

    /// A rank wants the device, and these processes hold memory of it.
    pub fn look(&mut self, now: Time, device: &Device, holders: &[Holder]) -> Look {
        // A number that is free again may be another process's next time.
        self.known.retain(|pid| holders.iter().any(|holder| holder.pid == *pid));
        let news = || holders.iter().filter(|holder| !self.known.contains(&holder.pid));
        let strangers: Vec<_> = news().filter(|holder| holder.lives).cloned().collect();
        let ended: Vec<_> = news().filter(|holder| !holder.lives).cloned().collect();
        let mut warnings = Vec::new();
        for stranger in strangers {
            let Holder { pid, .. } = stranger;
            warnings.push(format!(
                "{device} is used by another program too: process {} of its memory; if a rank runs out of \
                 memory, end that program (`ps -fp {pid}` tells whose it is) or leave the GPU out with CUDA_VISIBLE_DEVICES",
                holds(&stranger)
            ));
            self.known.insert(pid);
        }
        if ended.is_empty() {
            self.since = None;
            return Look { warnings, again: None };
        }
        let since = *self.since.get_or_insert(now);
        if now.since(since) < PATIENCE {
            return Look { warnings, again: Some(LOOK) };
        }
        self.since = None;
        let who: Vec<_> = ended.iter().map(holds).collect();
        warnings.push(format!(
            "{device} is not free after {} s: process {} of its memory, and has ended or belongs to another container; \
             going on, and if the rank runs out of memory see `nvidia-smi`",
            PATIENCE.as_secs(),
            who.join(", process ")
        ));
        self.known.extend(ended.iter().map(|holder| holder.pid));
        Look { warnings, again: None }
    }
}

fn holds(holder: &Holder) -> String {
    match holder.bytes {
        Some(bytes) => format!("{} holds {} MiB", holder.pid, bytes >> 20),
        None => format!("{} holds some", holder.pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Time {
        Time(0).after(Duration::from_secs_f64(seconds))
    }

    fn device() -> Device {
        Device { gpu: 3, uuid: Some("GPU-3".to_owned()), is_part: false }
    }

    fn ended(pid: u32) -> Holder {
        Holder { pid, bytes: Some(5 << 30), lives: false }
    }

    fn stranger(pid: u32) -> Holder {
        Holder { lives: true, ..ended(pid) }
    }

    fn free() -> Look {
        Look::default()
    }

    fn wait() -> Look {
        Look { again: Some(LOOK), ..free() }
    }

    #[test]
    fn a_free_device_is_given_at_once() {
        assert_eq!(Reclaim::default().look(at(0.0), &device(), &[]), free());
    }

    #[test]
    fn a_rank_waits_until_the_driver_has_the_dead_ones_memory_back() {
        let mut reclaim = Reclaim::default();
        assert_eq!(reclaim.look(at(0.0), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.look(at(0.1), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.look(at(0.2), &device(), &[]), free());
    }

    #[test]
    fn a_rank_waits_ten_seconds_at_most_and_nobody_is_waited_for_twice() {
        let mut reclaim = Reclaim::default();
        assert_eq!(reclaim.look(at(0.0), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.look(at(9.9), &device(), &[ended(7)]), wait());
        let look = reclaim.look(at(10.0), &device(), &[ended(7)]);
        assert_eq!(look.again, None);
        assert!(look.warnings[0].contains("GPU 3 (GPU-3)"), "{look:?}");
        assert!(look.warnings[0].contains("process 7 holds 5120 MiB"), "{look:?}");

        assert_eq!(reclaim.look(at(20.0), &device(), &[ended(7)]), free());
        assert_eq!(reclaim.look(at(30.0), &device(), &[ended(7), ended(8)]), wait());
        assert_eq!(reclaim.look(at(39.9), &device(), &[ended(7), ended(8)]), wait());
        // The rank that waited has ended, and its successor waits as long.
        reclaim.begin();
        assert_eq!(reclaim.look(at(60.0), &device(), &[ended(7), ended(8)]), wait());
    }

    #[test]
    fn a_stranger_is_told_of_once_and_holds_nobody_up() {
        let mut reclaim = Reclaim::default();
        let look = reclaim.look(at(0.0), &device(), &[stranger(9)]);
        assert_eq!((look.warnings.len(), look.again), (1, None));
        assert!(look.warnings[0].contains("process 9 holds 5120 MiB"), "{look:?}");
        assert_eq!(reclaim.look(at(1.0), &device(), &[stranger(9)]), free());
    }

    #[test]
    fn a_number_that_comes_back_is_another_process() {
        let mut reclaim = Reclaim::default();
        reclaim.look(at(0.0), &device(), &[stranger(9)]);
        assert_eq!(reclaim.look(at(1.0), &device(), &[]), free());
        assert_eq!(reclaim.look(at(2.0), &device(), &[ended(9)]), wait());
    }
}
