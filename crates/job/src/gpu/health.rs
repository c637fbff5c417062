//! Whether a GPU may take part.
//!
//! A node with a GPU that cannot be trusted is not joined with the others: its ranks would be fewer than were paid
//! for without anybody knowing, and a GPU that fails often takes its neighbours on the bus with it. Whoever runs the
//! job decides: cure it, replace the node, or name the other GPUs in `CUDA_VISIBLE_DEVICES`.
//!
//! A rank that is started again, on a GPU that was well when its node joined, is refused only what no process can
//! use. An error that the hardware has contained there is told as an Xid when it happens; newer GPUs take the bad
//! memory out of use by themselves, and a node whose ranks go on failing is left out anyway.
//!
//! What the counters mean: NVIDIA's "GPU Memory Error Management" and "NVML API Reference".

use super::Device;
use crate::exit::{Class, Failure};

/// What the driver tells of a GPU; a part of one has the health of the whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The driver cannot reach it.
    pub lost: bool,
    /// The driver takes no more work for it.
    pub needs_reset: bool,
    /// Bad memory could not be replaced by spare memory.
    pub repair_failed: bool,
    /// Errors of its memory since the driver was loaded that could not be corrected.
    pub uncorrected_errors: u64,
    /// Bad memory will be replaced at the next reset.
    pub repair_pending: bool,
    /// It runs slower to cool down.
    pub too_hot: bool,
}

/// What is wrong with a GPU, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// No process can use it.
    Unusable,
    /// What it computes may be wrong.
    Untrusted,
    /// It works.
    Warning,
}

impl Health {
    /// What is wrong, and what to do.
    fn problems(&self, gpu: u32) -> Vec<(Severity, String)> {
        let reset = format!("reset it (`nvidia-smi --gpu-reset -i {gpu}`) or reboot the node");
        let mut problems = Vec::new();
        let mut add = |severity, text| problems.push((severity, text));
        if self.lost {
            let text = "has fallen off the bus or does not answer its driver: reboot the node, and replace it if that happens again";
            // Nothing else it tells can be believed.
            return vec![(Severity::Unusable, text.to_owned())];
        }
        if self.needs_reset {
            add(Severity::Unusable, format!("does not work until it is reset: {reset}"));
        }
        if self.repair_failed {
            let text = "has bad memory and no spare memory left to replace it: replace the GPU or the node";
            add(Severity::Untrusted, text.to_owned());
        }
        if self.uncorrected_errors > 0 {
            let errors = self.uncorrected_errors;
            let text = format!(
                "had {errors} uncorrectable memory (ECC) errors since its driver was loaded: {reset}"
            );
            // Newer GPUs contain them; where one was not, the driver says so by an Xid when it happens.
            add(Severity::Warning, text);
        }
        if self.repair_pending {
            add(
                Severity::Warning,
                format!(
                    "has bad memory that is replaced at its next reset: {reset} when it is idle"
                ),
            );
        }
        if self.too_hot {
            add(
                Severity::Warning,
                "runs slower to cool down: look after its fans and the room".to_owned(),
            );
        }
        problems
    }
}

/// Whether a node may join with these GPUs; what to warn of if it may.
///
/// # Errors
/// One of class [`Class::Device`] that names every GPU that must not, and what to do: another try may do once that is
/// done.
pub fn joining(gpus: &[(Device, Health)]) -> Result<Vec<String>, Failure> {
    let all = gpus.iter().flat_map(|(device, health)| {
        let problems = health.problems(device.gpu).into_iter();
        problems.map(move |(severity, text)| (severity, format!("{device} {text}")))
    });
    // Parts of one GPU share its health.
    let mut all: Vec<_> = all.collect();
    all.dedup_by(|one, other| one == other);
    let (warnings, refused): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(severity, _)| *severity == Severity::Warning);
    let lines = |problems: Vec<(Severity, String)>| {
        problems.into_iter().map(|(_, text)| text).collect::<Vec<_>>()
    };
    if refused.is_empty() {
        return Ok(lines(warnings));
    }
    let message = format!(
        "{}; or leave it out: name the other GPUs in CUDA_VISIBLE_DEVICES, by UUID (`nvidia-smi -L`)",
        lines(refused).join("; ")
    );
    Err(Failure { class: Class::Device, message })
}

/// Whether a rank may be started on a GPU of a node that has joined.
///
/// # Errors
/// No process can use it.
pub fn starting(device: &Device, health: &Health) -> Result<(), Failure> {
    let worst = health
        .problems(device.gpu)
        .into_iter()
        .find(|(severity, _)| *severity == Severity::Unusable);
    match worst {
        None => Ok(()),
        Some((_, text)) => {
            Err(Failure { class: Class::Device, message: format!("{device} {text}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(gpu: u32) -> Device {
        Device { gpu, uuid: Some(format!("GPU-{gpu}")), is_part: false }
    }

    fn well() -> Health {
        Health::default()
    }

    fn refused(gpu: u32, health: &Health) -> String {
        let failure = joining(&[(device(0), well()), (device(gpu), health.clone())]).unwrap_err();
        assert_eq!(failure.class, Class::Device);
        failure.message
    }

    #[test]
    fn a_healthy_node_joins_without_a_word() {
        assert_eq!(joining(&[(device(0), well()), (device(1), well())]), Ok(Vec::new()));
        assert_eq!(joining(&[]), Ok(Vec::new()));
    }

    #[test]
    fn a_node_with_a_gpu_that_cannot_be_trusted_does_not_join_and_says_which_and_what_to_do() {
        let lost = Health { lost: true, ..well() };
        let message = refused(3, &lost);
        assert!(message.contains("GPU 3 (GPU-3) has fallen off the bus"), "{message}");
        assert!(message.contains("CUDA_VISIBLE_DEVICES"), "{message}");

        let worn = Health { repair_failed: true, ..well() };
        assert!(refused(1, &worn).contains("replace the GPU"));
    }

    #[test]
    fn every_sick_gpu_is_named_at_once() {
        let lost = Health { lost: true, ..well() };
        let reset = Health { needs_reset: true, ..well() };
        let message = joining(&[(device(2), lost), (device(6), reset)]).unwrap_err().message;
        assert!(
            message.contains("GPU 2 (GPU-2)") && message.contains("GPU 6 (GPU-6)"),
            "{message}"
        );
    }

    #[test]
    fn what_can_wait_is_warned_of() {
        let hot = Health { too_hot: true, repair_pending: true, uncorrected_errors: 2, ..well() };
        let warnings = joining(&[(device(4), hot)]).unwrap();
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[0].contains("2 uncorrectable"), "{warnings:?}");
        assert!(warnings[0].contains("--gpu-reset -i 4"), "{warnings:?}");
        assert!(warnings.iter().all(|line| line.starts_with("GPU 4 (GPU-4) ")), "{warnings:?}");
    }

    #[test]
    fn a_rank_starts_again_on_a_gpu_whose_error_was_contained_but_not_on_a_lost_one() {
        let contained = Health { uncorrected_errors: 1, repair_failed: true, ..well() };
        assert_eq!(starting(&device(0), &contained), Ok(()));
        let lost = Health { lost: true, uncorrected_errors: 1, ..well() };
        let failure = starting(&device(0), &lost).unwrap_err();
        assert!(failure.message.contains("fallen off the bus"), "{failure}");
    }
}
