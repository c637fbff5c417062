//! The notices by which providers announce the end of a machine, and what in a recipe takes longer than they leave.
//!
//! Sources of the deadlines: docs/machines.md. Serialized names are part of `baton recipe check --json`: they are added,
//! never renamed.

use baton_recipe::JobSpec;
use serde::Serialize;

/// A kind of notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Notice {
    /// A spot interruption notice of Amazon EC2.
    Ec2,
    /// A preemption of a spot machine of Google Compute Engine.
    Gce,
    /// The shutdown of a spot node under a Kubernetes pod.
    Kubernetes,
}

impl Notice {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Ec2, Self::Gce, Self::Kubernetes];

    /// The kind with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|notice| notice.name() == name)
    }

    /// Its name for `--notice`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ec2 => "ec2",
            Self::Gce => "gce",
            Self::Kubernetes => "kubernetes",
        }
    }

    /// Time between the notice and the end.
    #[must_use]
    pub fn deadline_seconds(self) -> f64 {
        match self {
            Self::Ec2 => 120.0,
            Self::Gce => 30.0,
            // A pod on a spot node of GKE gets 15 s, of which the agent needs some to end the ranks and report.
            Self::Kubernetes => 12.0,
        }
    }

    /// The deadline in a sentence.
    fn deadline(self) -> String {
        let title = match self {
            Self::Ec2 => "an EC2 spot notice",
            Self::Gce => "a GCE preemption notice",
            Self::Kubernetes => "a Kubernetes eviction",
        };
        format!("the {:.0} s of {title}", self.deadline_seconds())
    }
}

/// Something in a recipe that takes longer than a notice leaves.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MissedDeadline {
    /// `save` or `evaluation`.
    pub subject: &'static str,
    /// The kind of notice.
    pub notice: Notice,
    /// Time that it leaves.
    pub deadline_seconds: f64,
    /// Time that is needed: the recipe's limit for a save, the longest estimate for an evaluation.
    pub seconds: f64,
    /// Machines on which an evaluation takes longer.
    pub machines: Vec<&'static str>,
    /// One line for people.
    pub message: String,
}

/// How long an evaluation of the whole validation set takes on a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationTime {
    /// Name of the machine.
    pub machine: &'static str,
    /// Its estimated duration.
    pub seconds: f64,
}

/// The findings for one kind of notice. A save has no estimate, because the speed of the store is not known:
/// `cluster.drain_seconds` is compared, the time after which a save is given up.
#[must_use]
pub fn missed_deadlines(
    spec: &JobSpec,
    evaluations: &[EvaluationTime],
    notice: Notice,
) -> Vec<MissedDeadline> {
    let deadline_seconds = notice.deadline_seconds();
    let mut missed = Vec::new();
    let drain_seconds = spec.cluster.drain_seconds;
    if drain_seconds > deadline_seconds {
        missed.push(MissedDeadline {
            subject: "save",
            notice,
            deadline_seconds,
            seconds: drain_seconds,
            machines: Vec::new(),
            message: format!(
                "cluster.drain_seconds = {drain_seconds}: a save may take longer than {}, and is lost then: set it to \
                 at most {deadline_seconds:.0}, and save often (checkpoint.every_steps)",
                notice.deadline()
            ),
        });
    }
    let slow: Vec<EvaluationTime> =
        evaluations.iter().filter(|time| time.seconds > deadline_seconds).copied().collect();
    if let Some(seconds) = slow.iter().map(|time| time.seconds).reduce(f64::max) {
        let at: Vec<String> =
            slow.iter().map(|time| format!("{} ({:.0} s)", time.machine, time.seconds)).collect();
        missed.push(MissedDeadline {
            subject: "evaluation",
            notice,
            deadline_seconds,
            seconds,
            machines: slow.iter().map(|time| time.machine).collect(),
            message: format!(
                "an evaluation of the whole validation set takes longer than {} on {} by estimate: a notice \
                 interrupts it, and it is made again from its beginning; more or faster GPUs shorten it",
                notice.deadline(),
                at.join(", ")
            ),
        });
    }
    missed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::recipe;

    fn found(
        drain_seconds: f64,
        evaluations: &[EvaluationTime],
        notice: Notice,
    ) -> Vec<MissedDeadline> {
        let mut spec = recipe(&[], &[]);
        spec.cluster.drain_seconds = drain_seconds;
        missed_deadlines(&spec, evaluations, notice)
    }

    #[test]
    fn a_save_may_take_as_long_as_the_recipe_allows() {
        for (drain_seconds, missed) in [
            (100.0, &["gce", "kubernetes"][..]),
            (120.0, &["gce", "kubernetes"]),
            (120.5, &["ec2", "gce", "kubernetes"]),
            (30.0, &["kubernetes"]),
            (12.0, &[]),
        ] {
            let is_missed = |notice: &Notice| !found(drain_seconds, &[], *notice).is_empty();
            let names = Notice::ALL.into_iter().filter(is_missed).map(Notice::name);
            assert_eq!(names.collect::<Vec<_>>(), missed, "{drain_seconds}");
        }
        let message = found(100.0, &[], Notice::Gce).remove(0).message;
        assert!(message.starts_with("cluster.drain_seconds = 100: "), "{message}");
        assert!(message.contains("the 30 s of a GCE preemption notice"), "{message}");
        assert!(message.contains("set it to at most 30"), "{message}");
    }

    #[test]
    fn an_evaluation_names_the_machines_on_which_it_is_too_long() {
        let times = [("t4", 130.4), ("l4", 60.0), ("h200", 9.0)]
            .map(|(machine, seconds)| EvaluationTime { machine, seconds });
        let on_ec2 = found(12.0, &times, Notice::Ec2).remove(0);
        assert_eq!((on_ec2.subject, on_ec2.seconds), ("evaluation", 130.4));
        assert_eq!(on_ec2.machines, ["t4"]);
        let expected =
            "takes longer than the 120 s of an EC2 spot notice on t4 (130 s) by estimate";
        assert!(on_ec2.message.contains(expected), "{}", on_ec2.message);
        assert_eq!(found(12.0, &times, Notice::Gce)[0].machines, ["t4", "l4"]);
        assert_eq!(found(12.0, &times[2..], Notice::Kubernetes), []);
    }
}
