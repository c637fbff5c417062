//! What the driver's error numbers mean (NVIDIA's "XID Errors" catalogue), and what to do.

use crate::{
    exit::{Class, Failure},
    time::Time,
};

/// An error number of the driver; the kernel's log has it as `NVRM: Xid`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Xid(pub u64);

/// The number of a GPU that has fallen off the bus.
pub const LOST: Xid = Xid(79);

/// The number of an error of the memory that could not be corrected.
pub const UNCORRECTABLE: Xid = Xid(48);

struct Meaning {
    /// Goes on from the GPU's name.
    what: &'static str,
    remedy: &'static str,
    /// Whether processes end of it.
    is_deadly: bool,
}

impl Xid {
    fn meaning(self) -> Meaning {
        let deadly = |what, remedy| Meaning { what, remedy, is_deadly: true };
        let harmless = |what, remedy| Meaning { what, remedy, is_deadly: false };
        let reset =
            "drain the node, then reset the GPU or reboot; replace the node if it comes back";
        match self.0 {
            13 => deadly(
                "refused an instruction or an address of a kernel",
                "if it comes back on this GPU alone, replace the node; else it is a fault of the program",
            ),
            31 => deadly(
                "was asked for memory that is not mapped",
                "if it comes back on this GPU alone, replace the node; else it is a fault of the program",
            ),
            43 => deadly(
                "stopped the work of a process after a fault in it",
                "the GPU itself is well; see the rank's log",
            ),
            45 => harmless(
                "was cleaned up after a process that ended in the middle of its work",
                "nothing to do, unless another Xid came first",
            ),
            48 => deadly("had a memory (ECC) error that cannot be corrected", reset),
            61 | 62 => deadly("has a controller inside that stopped", reset),
            63 => harmless(
                "has taken bad memory out of use",
                "nothing to do now; it is replaced at the next reset",
            ),
            64 => deadly("could not take bad memory out of use", reset),
            74 => deadly(
                "has an error on NVLink",
                "see `nvidia-smi nvlink -e`; drain the node and replace it if it comes back",
            ),
            79 => deadly(
                "has fallen off the bus",
                "reboot the node, and replace it if that happens again",
            ),
            92 => harmless(
                "corrects memory (ECC) errors at a high rate",
                "training is right; replace the node at the next chance",
            ),
            94 => deadly(
                "had a memory (ECC) error that hit one process alone",
                "going on is safe; reset the GPU at the next chance",
            ),
            95 => deadly("had a memory (ECC) error that may have hit every process", reset),
            119 | 120 => {
                deadly("has a system processor (GSP) that does not answer or failed", reset)
            }
            // Told, and blamed for nothing.
            _ => harmless(
                "has an error",
                "look it up in NVIDIA's Xid catalogue and in the kernel's log (`dmesg`)",
            ),
        }
    }

    /// `GPU 3 (GPU-8a…) has fallen off the bus (Xid 79): reboot the node, …`
    #[must_use]
    pub fn describe(self, gpu: &str) -> String {
        let Meaning { what, remedy, .. } = self.meaning();
        format!("{gpu} {what} (Xid {}): {remedy}", self.0)
    }
}

/// The errors of one rank's GPU during the life of its process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspicion(Option<(Xid, String, Time)>);

/// How long after an error a process may still end of it: a hang is known late.
const BLAMED_SECONDS: u64 = 600;

impl Suspicion {
    /// Notes an error of the GPU. The first that can end a process counts: others follow from it.
    pub fn note(&mut self, now: Time, xid: Xid, gpu: &str) {
        let is_free = self.0.as_ref().is_none_or(|(_, _, at)| is_over(now, *at));
        if is_free && xid.meaning().is_deadly {
            self.0 = Some((xid, gpu.to_owned(), now));
        }
    }

    /// The end of the process, with its cause if that was the GPU.
    #[must_use]
    pub fn explain(&self, now: Time, failure: Failure) -> Failure {
        let can_be_its = matches!(failure.class, Class::Crash | Class::Device);
        match &self.0 {
            Some((xid, gpu, at)) if can_be_its && !is_over(now, *at) => {
                let message = format!("{}; {}", xid.describe(gpu), failure.message);
                Failure { class: Class::Device, message }
            }
            _ => failure,
        }
    }
}

/// Who lived on so long does not end of it.
fn is_over(now: Time, at: Time) -> bool {
    now.since(at).as_secs() >= BLAMED_SECONDS
}

/// How long the same error of the same GPU is not told again: the driver tells some once for each of a process's
/// queues.
const QUIET_SECONDS: u64 = 60;

/// Which errors were told lately.
#[derive(Clone, Debug, Default)]
pub struct Told(Vec<(Xid, String, Time)>);

impl Told {
    /// Whether to tell this one.
    pub fn is_news(&mut self, now: Time, xid: Xid, gpu: &str) -> bool {
        self.0.retain(|(_, _, at)| now.since(*at).as_secs() < QUIET_SECONDS);
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
        let mut suspicion = Suspicion::default();
        for xid in xids {
            suspicion.note(Time(0), Xid(*xid), GPU);
        }
        suspicion.explain(Time(0).after(Duration::from_secs(1)), failure)
    }

    #[test]
    fn an_error_is_told_with_gpu_number_meaning_and_remedy() {
        let told = Xid(79).describe(GPU);
        assert!(
            told.starts_with("GPU 3 (GPU-8a) has fallen off the bus (Xid 79): reboot"),
            "{told}"
        );
        let told = Xid(9_999).describe(GPU);
        assert!(told.contains("(Xid 9999)") && told.contains("dmesg"), "{told}");
    }

    #[test]
    fn every_common_error_has_words_of_its_own() {
        let unknown = Xid(9_999).meaning().what;
        for number in [13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120] {
            assert_ne!(Xid(number).meaning().what, unknown, "{number}");
        }
    }

    #[test]
    fn a_death_is_explained_by_the_first_error_that_can_end_a_process() {
        let failure = explained(&[63, 79, 45, 48], killed());
        assert_eq!(failure.class, Class::Device);
        assert!(failure.message.contains("has fallen off the bus (Xid 79)"), "{failure}");
        assert!(failure.message.ends_with("its process was killed (signal 9)"), "{failure}");
    }

    #[test]
    fn an_error_that_a_process_has_outlived_explains_nothing() {
        let at = |seconds| Time(0).after(Duration::from_secs(seconds));
        let mut suspicion = Suspicion::default();
        suspicion.note(at(0), Xid(13), GPU);
        assert_ne!(suspicion.explain(at(599), killed()), killed());
        assert_eq!(suspicion.explain(at(600), killed()), killed());
        suspicion.note(at(700), Xid(79), GPU);
        assert!(suspicion.explain(at(701), killed()).message.contains("Xid 79"));
        assert_eq!(explained(&[9_999], killed()), killed());
    }

    #[test]
    fn a_death_that_has_nothing_to_do_with_the_gpu_keeps_its_words() {
        assert_eq!(explained(&[], killed()), killed());
        assert_eq!(explained(&[45, 63, 92], killed()), killed());
        for class in [Class::BadInput, Class::OutOfMemory, Class::Diverged] {
            let failure = Failure { class, ..killed() };
            assert_eq!(explained(&[79], failure.clone()), failure);
        }
    }

    #[test]
    fn a_storm_of_the_same_error_is_told_once_a_minute() {
        let at = |seconds| Time(0).after(Duration::from_secs(seconds));
        let mut told = Told::default();
        assert!(told.is_news(at(0), Xid(31), GPU));
        assert!(!told.is_news(at(1), Xid(31), GPU));
        assert!(told.is_news(at(1), Xid(45), GPU) && told.is_news(at(1), Xid(31), "GPU 4"));
        assert!(told.is_news(at(60), Xid(31), GPU));
    }
}
