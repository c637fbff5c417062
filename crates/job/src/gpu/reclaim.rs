//! Whether the GPU memory of a rank that ended is free again.
//!
//! The driver frees a process's memory some time after the process ended. A new rank that allocates before that runs
//! out of memory, so it waits for ended processes that the driver still lists as holding memory. In a container the
//! driver reports the host's process ids, so every process of another container looks as if it had ended; a process for
//! which the timeout expired is therefore not waited for again.

use std::{collections::BTreeSet, time::Duration};

use super::GpuDevice;
use crate::time::Time;

/// Longest time that a rank waits for memory. Usually the driver needs a fraction of a second.
pub const RECLAIM_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two checks while a rank waits.
pub const RECLAIM_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A process that holds memory of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryHolder {
    /// Process id, as the driver reports it.
    pub pid: u32,
    /// Memory held, in bytes; `None` if the driver does not report it.
    pub bytes: Option<u64>,
    /// Whether the process runs, as far as this process can see.
    pub is_alive: bool,
}

/// Waits for the memory of one device that processes other than this agent's ranks hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReclaim {
    /// When the present wait began.
    since: Option<Time>,
    /// Process ids that were reported already: running processes, and ended ones for which the timeout expired.
    known: BTreeSet<u32>,
}

/// Result of one check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimCheck {
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// Time until the next check; `None`: the rank can use the device.
    pub check_again_after: Option<Duration>,
}

impl MemoryReclaim {
    /// Begins a new wait, for another rank process; the previous wait is over.
    pub fn reset(&mut self) {
        self.since = None;
    }

    /// Checks the processes that hold memory of the device.
    pub fn check(
        &mut self,
        now: Time,
        device: &GpuDevice,
        holders: &[MemoryHolder],
    ) -> ReclaimCheck {
        // The system may reuse the id of a process that is gone.
        self.known.retain(|pid| holders.iter().any(|holder| holder.pid == *pid));
        let unknown = || holders.iter().filter(|holder| !self.known.contains(&holder.pid));
        let others: Vec<_> = unknown().filter(|holder| holder.is_alive).cloned().collect();
        let ended: Vec<_> = unknown().filter(|holder| !holder.is_alive).cloned().collect();
        let mut warnings = Vec::new();
        for other in others {
            let MemoryHolder { pid, .. } = other;
            warnings.push(format!(
                "{device} is used by another program too: process {} of its memory; if a rank runs out of \
                 memory, end that program (`ps -fp {pid}` shows it) or leave the GPU out with CUDA_VISIBLE_DEVICES",
                holds(&other)
            ));
            self.known.insert(pid);
        }
        if ended.is_empty() {
            self.since = None;
            return ReclaimCheck { warnings, check_again_after: None };
        }
        let since = *self.since.get_or_insert(now);
        if now.since(since) < RECLAIM_TIMEOUT {
            return ReclaimCheck { warnings, check_again_after: Some(RECLAIM_POLL_INTERVAL) };
        }
        self.since = None;
        let processes: Vec<_> = ended.iter().map(holds).collect();
        warnings.push(format!(
            "{device} is not free after {} s: process {} of its memory, and has ended or belongs to another container; \
             the rank starts anyway; if it runs out of memory, see `nvidia-smi`",
            RECLAIM_TIMEOUT.as_secs(),
            processes.join(", process ")
        ));
        self.known.extend(ended.iter().map(|holder| holder.pid));
        ReclaimCheck { warnings, check_again_after: None }
    }
}

/// Process id and memory of a holder, for people.
fn holds(holder: &MemoryHolder) -> String {
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

    fn device() -> GpuDevice {
        GpuDevice { gpu: 3, uuid: Some("GPU-3".to_owned()), is_part: false }
    }

    fn ended(pid: u32) -> MemoryHolder {
        MemoryHolder { pid, bytes: Some(5 << 30), is_alive: false }
    }

    fn other(pid: u32) -> MemoryHolder {
        MemoryHolder { is_alive: true, ..ended(pid) }
    }

    fn free() -> ReclaimCheck {
        ReclaimCheck::default()
    }

    fn wait() -> ReclaimCheck {
        ReclaimCheck { check_again_after: Some(RECLAIM_POLL_INTERVAL), ..free() }
    }

    #[test]
    fn free_device_can_be_used_at_once() {
        assert_eq!(MemoryReclaim::default().check(at(0.0), &device(), &[]), free());
    }

    #[test]
    fn rank_waits_until_the_driver_has_freed_memory() {
        let mut reclaim = MemoryReclaim::default();
        assert_eq!(reclaim.check(at(0.0), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.check(at(0.1), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.check(at(0.2), &device(), &[]), free());
    }

    #[test]
    fn rank_waits_at_most_ten_seconds_and_only_once_for_each_process() {
        let mut reclaim = MemoryReclaim::default();
        assert_eq!(reclaim.check(at(0.0), &device(), &[ended(7)]), wait());
        assert_eq!(reclaim.check(at(9.9), &device(), &[ended(7)]), wait());
        let check = reclaim.check(at(10.0), &device(), &[ended(7)]);
        assert_eq!(check.check_again_after, None);
        assert!(check.warnings[0].contains("GPU 3 (GPU-3)"), "{check:?}");
        assert!(check.warnings[0].contains("process 7 holds 5120 MiB"), "{check:?}");

        assert_eq!(reclaim.check(at(20.0), &device(), &[ended(7)]), free());
        assert_eq!(reclaim.check(at(30.0), &device(), &[ended(7), ended(8)]), wait());
        assert_eq!(reclaim.check(at(39.9), &device(), &[ended(7), ended(8)]), wait());
        // The waiting rank has ended; the next one may wait as long.
        reclaim.reset();
        assert_eq!(reclaim.check(at(60.0), &device(), &[ended(7), ended(8)]), wait());
    }

    #[test]
    fn running_process_is_reported_once_and_not_waited_for() {
        let mut reclaim = MemoryReclaim::default();
        let check = reclaim.check(at(0.0), &device(), &[other(9)]);
        assert_eq!((check.warnings.len(), check.check_again_after), (1, None));
        assert!(check.warnings[0].contains("process 9 holds 5120 MiB"), "{check:?}");
        assert_eq!(reclaim.check(at(1.0), &device(), &[other(9)]), free());
    }

    #[test]
    fn reused_process_id_counts_as_another_process() {
        let mut reclaim = MemoryReclaim::default();
        reclaim.check(at(0.0), &device(), &[other(9)]);
        assert_eq!(reclaim.check(at(1.0), &device(), &[]), free());
        assert_eq!(reclaim.check(at(2.0), &device(), &[ended(9)]), wait());
    }
}
