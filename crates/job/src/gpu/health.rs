//! Whether a GPU may be used.
//!
//! A node with an untrusted GPU does not join the job. Using only the other GPUs would silently run fewer ranks than
//! were paid for, and a failing GPU often breaks its neighbours on the bus. The user decides: repair it, replace the
//! node, or name the other GPUs in `CUDA_VISIBLE_DEVICES`.
//!
//! When a rank is started later, on a GPU that was healthy when its node joined, the GPU is refused only if no process
//! can use it. Other problems are handled elsewhere: the driver reports memory errors as Xids when they happen, newer
//! GPUs retire bad memory by themselves, and a node whose ranks fail repeatedly is quarantined.
//!
//! Source for the counters: NVIDIA's "GPU Memory Error Management" and "NVML API Reference".

use super::GpuDevice;
use crate::exit::{Class, Failure};

/// Health of a GPU as the driver reports it; a part (MIG) has the health of its GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// The driver cannot reach it.
    pub lost: bool,
    /// The driver accepts no more work for it.
    pub needs_reset: bool,
    /// Bad memory could not be replaced by spare memory.
    pub repair_failed: bool,
    /// Number of uncorrectable memory errors since the driver was loaded.
    pub uncorrected_errors: u64,
    /// Bad memory will be replaced at the next reset.
    pub repair_pending: bool,
    /// It runs slower to cool down.
    pub too_hot: bool,
}

/// Severity of a problem with a GPU, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// No process can use the GPU.
    Unusable,
    /// Its results may be wrong.
    Untrusted,
    /// It works.
    Warning,
}

impl GpuHealth {
    /// Problems of GPU number `gpu`, each with its remedy.
    fn problems(&self, gpu: u32) -> Vec<(Severity, String)> {
        let reset = format!("reset it (`nvidia-smi --gpu-reset -i {gpu}`) or reboot the node");
        let mut problems = Vec::new();
        let mut add = |severity, text| problems.push((severity, text));
        if self.lost {
            let text = "has fallen off the bus or does not answer its driver: reboot the node, and replace it if that happens again";
            // Its other values cannot be trusted.
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
            // Newer GPUs contain these errors; the driver reports an Xid when one happens.
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
                "runs slower to cool down: check its fans and the temperature of the room"
                    .to_owned(),
            );
        }
        problems
    }
}

/// Checks whether a node may join with these GPUs; returns warnings for the user if it may.
///
/// # Errors
/// A failure of class [`Class::Device`] that names every GPU that must not be used, with the remedy. The agent may be
/// started again after that.
pub fn check_joining(gpus: &[(GpuDevice, GpuHealth)]) -> Result<Vec<String>, Failure> {
    let all = gpus.iter().flat_map(|(device, health)| {
        let problems = health.problems(device.gpu).into_iter();
        problems.map(move |(severity, text)| (severity, format!("{device} {text}")))
    });
    // Parts of one GPU share its health, so their problems are equal.
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

/// Checks whether a rank may be started on a GPU of a node that has joined.
///
/// # Errors
/// No process can use the GPU.
pub fn check_start(device: &GpuDevice, health: &GpuHealth) -> Result<(), Failure> {
    let unusable = health
        .problems(device.gpu)
        .into_iter()
        .find(|(severity, _)| *severity == Severity::Unusable);
    match unusable {
        None => Ok(()),
        Some((_, text)) => {
            Err(Failure { class: Class::Device, message: format!("{device} {text}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(gpu: u32) -> GpuDevice {
        GpuDevice { gpu, uuid: Some(format!("GPU-{gpu}")), is_part: false }
    }

    fn healthy() -> GpuHealth {
        GpuHealth::default()
    }

    fn refused(gpu: u32, health: &GpuHealth) -> String {
        let failure =
            check_joining(&[(device(0), healthy()), (device(gpu), health.clone())]).unwrap_err();
        assert_eq!(failure.class, Class::Device);
        failure.message
    }

    #[test]
    fn healthy_node_joins_without_warnings() {
        assert_eq!(
            check_joining(&[(device(0), healthy()), (device(1), healthy())]),
            Ok(Vec::new())
        );
        assert_eq!(check_joining(&[]), Ok(Vec::new()));
    }

    #[test]
    fn node_with_an_untrusted_gpu_is_refused_with_gpu_and_remedy() {
        let lost = GpuHealth { lost: true, ..healthy() };
        let message = refused(3, &lost);
        assert!(message.contains("GPU 3 (GPU-3) has fallen off the bus"), "{message}");
        assert!(message.contains("CUDA_VISIBLE_DEVICES"), "{message}");

        let worn = GpuHealth { repair_failed: true, ..healthy() };
        assert!(refused(1, &worn).contains("replace the GPU"));
    }

    #[test]
    fn every_bad_gpu_is_named_at_once() {
        let lost = GpuHealth { lost: true, ..healthy() };
        let reset = GpuHealth { needs_reset: true, ..healthy() };
        let message = check_joining(&[(device(2), lost), (device(6), reset)]).unwrap_err().message;
        assert!(
            message.contains("GPU 2 (GPU-2)") && message.contains("GPU 6 (GPU-6)"),
            "{message}"
        );
    }

    #[test]
    fn minor_problems_are_warnings() {
        let hot =
            GpuHealth { too_hot: true, repair_pending: true, uncorrected_errors: 2, ..healthy() };
        let warnings = check_joining(&[(device(4), hot)]).unwrap();
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[0].contains("2 uncorrectable"), "{warnings:?}");
        assert!(warnings[0].contains("--gpu-reset -i 4"), "{warnings:?}");
        assert!(warnings.iter().all(|line| line.starts_with("GPU 4 (GPU-4) ")), "{warnings:?}");
    }

    #[test]
    fn rank_starts_on_a_gpu_with_contained_errors_but_not_on_a_lost_one() {
        let contained = GpuHealth { uncorrected_errors: 1, repair_failed: true, ..healthy() };
        assert_eq!(check_start(&device(0), &contained), Ok(()));
        let lost = GpuHealth { lost: true, uncorrected_errors: 1, ..healthy() };
        let failure = check_start(&device(0), &lost).unwrap_err();
        assert!(failure.message.contains("fallen off the bus"), "{failure}");
    }
}
