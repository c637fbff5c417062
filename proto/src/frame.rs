//! Frames between a coordinator and an agent: messages of [`baton_job::message`] as JSON.
//!
//! Both must have the same version, so no version has to read the messages of another. But every version must be able
//! to detect a different one: an agent's first frame has the version in a field that never changes.

use baton_job::message::AgentReport;
use serde::{Serialize, de::DeserializeOwned};

use crate::v1;

/// Version that must be equal on both sides. Increase the protocol number with every change of these messages, and the
/// numerics number with every change that changes a bit of a result: builds between two releases have the same package
/// version.
const PROTOCOL_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (protocol 8, numerics 2)");

impl v1::Frame {
    /// A frame with a message of a coordinator.
    ///
    /// # Errors
    /// `message` cannot be serialized as JSON.
    pub fn new(message: &impl Serialize) -> serde_json::Result<Self> {
        Ok(Self { hello: None, json: serde_json::to_vec(message)? })
    }

    /// A frame with an agent's report. With a hello, it also has the version and the git `revision` of the build.
    ///
    /// # Errors
    /// `report` cannot be serialized as JSON.
    pub fn report(report: &AgentReport, revision: &str) -> serde_json::Result<Self> {
        let hello = matches!(report, AgentReport::Hello(_)).then(|| v1::Hello {
            version: PROTOCOL_VERSION.to_owned(),
            revision: revision.to_owned(),
        });
        Ok(Self { hello, ..Self::new(report)? })
    }

    /// The message in this frame.
    ///
    /// # Errors
    /// The frame has another message, or none.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_slice(&self.json)
    }

    /// Checks, given an agent's first frame, that the agent has the version of this build.
    ///
    /// # Errors
    /// The agent has another version, or sends none. The text is one line for the user.
    pub fn check_version(&self) -> Result<(), String> {
        let other = match self.hello.as_ref().map(|hello| hello.version.as_str()) {
            Some(PROTOCOL_VERSION) => return Ok(()),
            // Releases before protocol 3 sent only the version of the package.
            Some(version) if !version.contains("protocol") => {
                format!("{version} (no protocol named)")
            }
            Some(version) => version.to_owned(),
            None => "of an unknown version".to_owned(),
        };
        Err(format!(
            "this agent is baton-worker {other}, the coordinator is baton-coordinator {PROTOCOL_VERSION}: install the \
             same version on all machines"
        ))
    }

    /// The git revision of the agent's build if it differs from `revision`. Such builds work together if their versions
    /// are equal.
    #[must_use]
    pub fn other_revision(&self, revision: &str) -> Option<&str> {
        self.hello.as_ref().map(|hello| hello.revision.as_str()).filter(|other| *other != revision)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_job::{
        Generation, MeshSecret, NodeId, Rank,
        exit::{Class, Failure, Outcome},
        ids::LocalRank,
        message::{
            Activity, AgentHeartbeat, Commit, Directive, GeneratedText, GpuStats, Hello, HostStats,
            Launch, LoaderReport, MachineStats, PauseState, RankHeartbeat, RankPhase, RankReport,
            Restore, Restored, Rollback, RunningRanks, SaveProblem, SaveTimes, StateSource,
            StepReport,
        },
    };
    use baton_recipe::{
        Epoch, Step,
        guard::{BatchMark, Diagnosis, Divergence},
        progress::{Accuracy, Extent, Progress},
    };
    use prost::Message;

    use super::*;

    /// A number that needs 17 decimal digits.
    const AWKWARD: f64 = 0.1 + 0.2;

    fn accuracy() -> Accuracy {
        let tiny = [("mae", f64::MIN_POSITIVE), ("pearson", -0.0), ("spearman", 5e-324)];
        let [mae, pearson, spearman] = tiny;
        let metrics = [("loss", AWKWARD), ("top1", f64::MAX), mae, pearson, spearman];
        Accuracy::new(u64::MAX, metrics)
    }

    fn commit() -> Commit {
        Commit {
            name: "é \"\n".to_owned(),
            generation: Generation(u64::MAX),
            step: Step(7),
            accuracy: Some(accuracy()),
            bytes: 1 << 60,
            took: Some(SaveTimes { stall_seconds: AWKWARD, seconds: 1e300 }),
            fence_lost: true,
        }
    }

    fn diagnosis() -> Diagnosis {
        Diagnosis {
            divergence: Divergence::LossRose { mean: AWKWARD, bound: 0.7 },
            step: Step(7),
            batch: BatchMark { epoch: Epoch(1), cursor: 64 },
            lr: 0.1,
            loss: Some(AWKWARD),
            gradient_norm: None,
            samples: vec![u64::MAX],
            evaluated: Some(Step(5)),
        }
    }

    fn failure() -> Failure {
        Failure { class: Class::OutOfMemory, message: "no memory".to_owned() }
    }

    fn failed() -> Outcome {
        Outcome::Failed { failure: failure() }
    }

    fn rank_reports() -> Vec<RankReport> {
        let restored = Restored { name: "a".to_owned(), lr: AWKWARD, ..Restored::default() };
        let best = Some((Step(3), accuracy()));
        let progress = Progress { best, skips: vec![BatchMark::default()], ..Progress::default() };
        let started = |source| RankReport::Started { source, progress: progress.clone() };
        vec![
            RankReport::Ready { address: "[::1]:1".to_owned(), step: Some(Step(1)) },
            RankReport::Met,
            started(StateSource::fresh()),
            started(StateSource::Survivor { rank: Rank(3) }),
            started(StateSource::Checkpoint(restored)),
            RankReport::Stepped(StepReport { loss: AWKWARD, ..StepReport::default() }),
            RankReport::Evaluated {
                step: Step(7),
                epoch: Epoch(1),
                accuracy: accuracy(),
                ema: Some(accuracy()),
                extent: Extent::Full,
                texts: vec![GeneratedText { sample: 3, ..GeneratedText::default() }],
            },
            RankReport::Diverged(diagnosis()),
            RankReport::EndsEarly { reason: "good enough".to_owned() },
            RankReport::Loader(LoaderReport {
                last_skipped: Some(String::new()),
                ..LoaderReport::default()
            }),
            RankReport::Heartbeat(RankHeartbeat {
                activity: Activity::Paused,
                ..RankHeartbeat::default()
            }),
            RankReport::Saved(commit()),
            RankReport::SaveWaits { step: Step(2), behind: Step(1), seconds: AWKWARD },
            RankReport::Stopping { step: Step(2) },
            RankReport::Copied { step: Step(2) },
            RankReport::SaveFailed(SaveProblem {
                message: "full".to_owned(),
                fence: Some(Generation(2)),
                exists: true,
            }),
            RankReport::SavedLocally { step: Step(2), seconds: AWKWARD },
            RankReport::LocalSaveFailed { message: "full".to_owned() },
            RankReport::Profiled { name: "1".to_owned(), problem: Some("full".to_owned()) },
            RankReport::Lost { detail: "rank 1".to_owned(), unreached: vec![Rank(1)] },
            RankReport::Done { outcome: Outcome::Completed, digest: "00".to_owned() },
            RankReport::Exited(failure()),
        ]
    }

    fn reports() -> Vec<AgentReport> {
        let phases = [
            RankPhase::Joining,
            RankPhase::Ready { address: "a:1".to_owned(), step: None },
            RankPhase::Meeting,
            RankPhase::Training,
            RankPhase::Waiting,
            RankPhase::Diverged(diagnosis()),
            RankPhase::Done { outcome: failed(), digest: "00".to_owned() },
        ];
        let ranks = (0..).map(Rank).zip(phases).collect();
        let (commit, steps) = (Some(commit()), vec![StepReport::default()]);
        let evaluations = Vec::new();
        let holders = [LocalRank(0), LocalRank(2)].into();
        let running =
            RunningRanks { generation: Generation(2), ranks, holders, commit, steps, evaluations };
        let gpu = GpuStats { utilisation: Some(AWKWARD), ..GpuStats::default() };
        let host = HostStats { cpu: AWKWARD, ..HostStats::default() };
        let heartbeat = AgentHeartbeat {
            number: u64::MAX,
            round_trip: Some(Duration::new(1, 999_999_999)),
            stats: Some(MachineStats { host, gpus: vec![gpu] }),
        };
        let local_rank = LocalRank(1);
        let reason = "spot notice".to_owned();
        let rank_reports = rank_reports().into_iter().map(|report| AgentReport::Rank {
            generation: Generation(1),
            rank: Rank(0),
            report,
        });
        rank_reports
            .chain([
                AgentReport::Hello(Hello {
                    node: NodeId("a".to_owned()),
                    slots: 8,
                    job: Some(baton_job::JobId::default()),
                    pause: PauseState { number: u64::MAX, paused: true },
                    running: Some(running),
                }),
                AgentReport::NodeDeparting { reason: reason.clone(), seconds_left: Some(AWKWARD) },
                AgentReport::Warm { local_rank },
                AgentReport::WarmFailed { local_rank, failure: failure() },
                AgentReport::CheckpointAdvised { reason },
                AgentReport::GpuWarning { message: "Xid 79".to_owned() },
                AgentReport::Heartbeat(AgentHeartbeat::default()),
                AgentReport::Heartbeat(heartbeat),
            ])
            .collect()
    }

    fn directives() -> Vec<Directive> {
        let (generation, reason) = (Generation(3), "spot notice".to_owned());
        let skip = Some(BatchMark { epoch: Epoch(1), cursor: 64 });
        let restore = Restore {
            path: Some("s3://a/b".to_owned()),
            rollbacks: vec![Rollback {
                generation,
                before: Step(7),
                suspect_from: Some(Step(5)),
                skip,
            }],
            continued: vec![baton_job::JobId::default()],
            ..Restore::default()
        };
        let pause = PauseState { number: 1, paused: true };
        let ranks = vec![(Rank(8), LocalRank(0))];
        let replace = vec![LocalRank(1)];
        vec![
            Directive::Launch(Launch { generation, world_size: 9, ranks, replace, restore, pause }),
            Directive::Begin {
                generation,
                peers: ["a:1".to_owned(), "b:2".to_owned()].into(),
                secret: MeshSecret::new([0xff; MeshSecret::BYTES]),
            },
            Directive::Checkpoint { generation },
            Directive::Drain { generation, reason: reason.clone() },
            Directive::Profile { generation, name: "1".to_owned(), steps: 5 },
            Directive::Pause(pause),
            Directive::HeartbeatAck { number: u64::MAX },
            Directive::Warm { local_ranks: vec![LocalRank(0)] },
            Directive::Release { reason },
            Directive::Dismiss { outcome: failed() },
        ]
    }

    /// The frame as the receiver decodes it.
    fn over_the_wire(frame: v1::Frame) -> v1::Frame {
        v1::Frame::decode(frame.encode_to_vec().as_slice()).unwrap()
    }

    #[test]
    fn every_message_is_received_unchanged() {
        for report in reports() {
            let frame = over_the_wire(v1::Frame::report(&report, "").unwrap());
            assert_eq!(frame.read::<AgentReport>().unwrap(), report);
        }
        for directive in directives() {
            let frame = over_the_wire(v1::Frame::new(&directive).unwrap());
            assert_eq!(frame.read::<Directive>().unwrap(), directive);
        }
    }

    #[test]
    fn a_truncated_frame_or_one_with_another_message_is_an_error() {
        let whole = v1::Frame::new(&directives()[0]).unwrap();
        for length in 0..whole.json.len() {
            let truncated = v1::Frame { json: whole.json[..length].to_vec(), ..whole.clone() };
            assert!(truncated.read::<Directive>().is_err());
        }
        assert!(whole.read::<AgentReport>().unwrap_err().to_string().contains("unknown variant"));
    }

    fn hello() -> v1::Frame {
        let hello = Hello::new(NodeId("a".to_owned()), 1, None);
        v1::Frame::report(&AgentReport::Hello(hello), "1a2b").unwrap()
    }

    #[test]
    fn the_error_names_both_versions_and_a_remedy() {
        assert_eq!(hello().check_version(), Ok(()));
        let older = v1::Hello { version: "0.0.9".into(), ..v1::Hello::default() };
        let other = v1::Frame { hello: Some(older), ..hello() };
        let refusal = other.check_version().unwrap_err();
        assert!(refusal.contains("baton-worker 0.0.9"), "{refusal}");
        assert!(
            refusal.contains(PROTOCOL_VERSION) && refusal.contains("install the same"),
            "{refusal}"
        );
        let unversioned = v1::Frame { hello: None, ..hello() };
        assert!(unversioned.check_version().unwrap_err().contains("unknown version"));
    }

    #[test]
    fn another_build_of_the_same_version_is_reported_and_not_refused() {
        let hello = hello();
        assert_eq!(hello.check_version(), Ok(()));
        assert_eq!(hello.other_revision("1a2b"), None);
        assert_eq!(hello.other_revision("3c4d"), Some("1a2b"));
    }

    /// Field 1 of the first message and in it field 4: agents of protocol 1 write the version there, and its
    /// coordinators read it there.
    #[test]
    fn an_agents_version_is_in_the_field_that_every_version_reads() {
        let bytes = hello().encode_to_vec();
        let length = PROTOCOL_VERSION.len() as u8;
        let revision = 2 + "1a2b".len() as u8;
        assert_eq!(bytes[..4], [0x0a, length + 2 + revision, 0x22, length]);
        assert_eq!(&bytes[4..][..PROTOCOL_VERSION.len()], PROTOCOL_VERSION.as_bytes());

        let old = b"\x0a\x0c\x0a\x01a\x10\x01\x22\x050.1.0";
        let refusal = v1::Frame::decode(old.as_slice()).unwrap().check_version().unwrap_err();
        assert!(refusal.contains("baton-worker 0.1.0 (no protocol named),"), "{refusal}");
    }
}
