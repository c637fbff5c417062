//! Meanings and remedies of the driver's error numbers (NVIDIA's "XID Errors" catalogue).

use crate::{
    exit::{Class, Failure},
    time::Time,
};

/// An error number of the driver; the kernel's log shows it as `NVRM: Xid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Xid(pub u64);

/// A GPU has fallen off the bus.
pub const LOST: Xid = Xid(79);

/// An uncorrectable memory error.
pub const UNCORRECTABLE: Xid = Xid(48);

struct XidMeaning {
    /// What happened; continues a sentence that begins with the GPU's name.
    what: &'static str,
    remedy: &'static str,
    /// Whether it can end processes that use the GPU.
    is_fatal: bool,
}

impl Xid {
    fn meaning(self) -> XidMeaning {
        let fatal = |what, remedy| XidMeaning { what, remedy, is_fatal: true };
        let harmless = |what, remedy| XidMeaning { what, remedy, is_fatal: false };
        let reset =
            "drain the node, then reset the GPU or reboot; replace the node if it comes back";
        match self.0 {
            13 => fatal(
                "refused an instruction or an address of a kernel",
                "if it comes back only on this GPU, replace the node; otherwise the program is at fault",
            ),
            31 => fatal(
                "was accessed at an address that is not mapped",
                "if it comes back only on this GPU, replace the node; otherwise the program is at fault",
            ),
            43 => fatal(
                "stopped the work of a process after a fault in it",
                "the GPU itself is healthy; see the rank's log",
            ),
            45 => harmless(
                "was cleaned up after a process that ended in the middle of its work",
                "nothing to do, unless another Xid came first",
            ),
            48 => fatal("had a memory (ECC) error that cannot be corrected", reset),
            61 | 62 => fatal("has an internal controller that stopped", reset),
            63 => harmless(
                "has retired bad memory",
                "nothing to do now; it is replaced at the next reset",
            ),
            64 => fatal("could not retire bad memory", reset),
            74 => fatal(
                "has an error on NVLink",
                "see `nvidia-smi nvlink -e`; drain the node and replace it if it comes back",
            ),
            79 => fatal(
                "has fallen off the bus",
                "reboot the node, and replace it if that happens again",
            ),
            92 => harmless(
                "corrects memory (ECC) errors at a high rate",
                "results are correct; replace the node at the next opportunity",
            ),
            94 => fatal(
                "had a memory (ECC) error that affected only one process",
                "it is safe to continue; reset the GPU at the next opportunity",
            ),
            95 => fatal("had a memory (ECC) error that may have affected every process", reset),
            119 | 120 => {
                fatal("has a system processor (GSP) that does not answer or failed", reset)
            }
            // Reported, but never taken as the cause of a failure.
            _ => harmless(
                "has an error",
                "look it up in NVIDIA's Xid catalogue and in the kernel's log (`dmesg`)",
            ),
        }
    }

    /// One line for people: `GPU 3 (GPU-8a…) has fallen off the bus (Xid 79): reboot the node, …`
    #[must_use]
    pub fn describe(self, gpu: &str) -> String {
        let XidMeaning { what, remedy, .. } = self.meaning();
        format!("{gpu} {what} (Xid {}): {remedy}", self.0)
    }
}

/// The GPU error that may make a rank's process fail: the first fatal one since the process started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PossibleCause(Option<(Xid, String, Time)>);

/// Time after an error in which it may explain the end of a process, seconds. Long, because a hang is detected late.
const MAX_CAUSE_AGE_SECONDS: u64 = 600;

impl PossibleCause {
    /// Records an error of the GPU. The first fatal one is kept: later ones are usually its consequences.
    pub fn record(&mut self, now: Time, xid: Xid, gpu: &str) {
        let is_first = self.0.as_ref().is_none_or(|(_, _, at)| is_expired(now, *at));
        if is_first && xid.meaning().is_fatal {
            self.0 = Some((xid, gpu.to_owned(), now));
        }
    }

    /// The failure of the process, with the GPU error added if that may be the cause.
    #[must_use]
    pub fn explain(&self, now: Time, failure: Failure) -> Failure {
        let may_be_gpu = matches!(failure.class, Class::Crash | Class::Device);
        match &self.0 {
            Some((xid, gpu, at)) if may_be_gpu && !is_expired(now, *at) => {
                let message = format!("{}; {}", xid.describe(gpu), failure.message);
                Failure { class: Class::Device, message }
            }
            _ => failure,
        }
    }
}

/// Whether the process outlived the error by too long to fail because of it.
fn is_expired(now: Time, at: Time) -> bool {
    now.since(at).as_secs() >= MAX_CAUSE_AGE_SECONDS
}

/// Time in which the same error of the same GPU is not reported again, seconds: the driver reports some errors once for
/// each queue of a process.
const REPEAT_AFTER_SECONDS: u64 = 60;

/// Errors that were reported recently.
#[derive(Clone, Debug, Default)]
pub struct RecentXids(Vec<(Xid, String, Time)>);

impl RecentXids {
    /// Whether to report this error; records it as reported.
    pub fn is_new(&mut self, now: Time, xid: Xid, gpu: &str) -> bool {
        self.0.retain(|(_, _, at)| now.since(*at).as_secs() < REPEAT_AFTER_SECONDS);
        let known = self.0.iter().any(|(number, name, _)| *number == xid && name == gpu);
        if !known {
            self.0.push((xid, gpu.to_owned(), now));
        }
        !known
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const GPU: &str = "GPU 3 (GPU-8a)";

    fn killed() -> Failure {
        Failure { class: Class::Crash, message: "its process was killed (signal 9)".to_owned() }
    }

    fn explained(xids: &[u64], failure: Failure) -> Failure {
        let mut possible_cause = PossibleCause::default();
        for xid in xids {
            possible_cause.record(Time(0), Xid(*xid), GPU);
        }
        possible_cause.explain(Time(0).after(Duration::from_secs(1)), failure)
    }

    #[test]
    fn description_has_gpu_number_meaning_and_remedy() {
        let text = Xid(79).describe(GPU);
        assert!(
            text.starts_with("GPU 3 (GPU-8a) has fallen off the bus (Xid 79): reboot"),
            "{text}"
        );
        let text = Xid(9_999).describe(GPU);
        assert!(text.contains("(Xid 9999)") && text.contains("dmesg"), "{text}");
    }

    #[test]
    fn every_common_error_has_a_meaning() {
        let unknown = Xid(9_999).meaning().what;
        for number in [13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120] {
            assert_ne!(Xid(number).meaning().what, unknown, "{number}");
        }
    }

    #[test]
    fn failure_is_explained_by_the_first_fatal_error() {
        let failure = explained(&[63, 79, 45, 48], killed());
        assert_eq!(failure.class, Class::Device);
        assert!(failure.message.contains("has fallen off the bus (Xid 79)"), "{failure}");
        assert!(failure.message.ends_with("its process was killed (signal 9)"), "{failure}");
    }

    #[test]
    fn old_error_explains_nothing() {
        let at = |seconds| Time(0).after(Duration::from_secs(seconds));
        let mut possible_cause = PossibleCause::default();
        possible_cause.record(at(0), Xid(13), GPU);
        assert_ne!(possible_cause.explain(at(599), killed()), killed());
        assert_eq!(possible_cause.explain(at(600), killed()), killed());
        possible_cause.record(at(700), Xid(79), GPU);
        assert!(possible_cause.explain(at(701), killed()).message.contains("Xid 79"));
        assert_eq!(explained(&[9_999], killed()), killed());
    }

    #[test]
    fn failure_unrelated_to_the_gpu_is_not_changed() {
        assert_eq!(explained(&[], killed()), killed());
        assert_eq!(explained(&[45, 63, 92], killed()), killed());
        for class in [Class::BadInput, Class::OutOfMemory, Class::Diverged] {
            let failure = Failure { class, ..killed() };
            assert_eq!(explained(&[79], failure.clone()), failure);
        }
    }

    #[test]
    fn repeated_error_is_reported_once_a_minute() {
        let at = |seconds| Time(0).after(Duration::from_secs(seconds));
        let mut recent = RecentXids::default();
        assert!(recent.is_new(at(0), Xid(31), GPU));
        assert!(!recent.is_new(at(1), Xid(31), GPU));
        assert!(recent.is_new(at(1), Xid(45), GPU) && recent.is_new(at(1), Xid(31), "GPU 4"));
        assert!(recent.is_new(at(60), Xid(31), GPU));
    }
}
