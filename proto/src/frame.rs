//! What a coordinator and an agent say to each other: types of [`baton_job::message`] as JSON.
//!
//! Both have to be of one version, so no version of them has to understand another. They have to
//! understand that they do not: an agent's first frame has its version where all versions look for it.

use baton_job::message::Report;
use serde::{Serialize, de::DeserializeOwned};

use crate::v1;

/// The version that an agent sends. Raise the protocol's number with every change of these messages: the
/// builds between two releases share the first part.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (protocol 2)");

impl v1::Frame {
    /// Carries what a coordinator says.
    ///
    /// # Errors
    /// JSON has no form for `message`.
    pub fn new(message: &impl Serialize) -> serde_json::Result<Self> {
        Ok(Self { hello: None, json: serde_json::to_vec(message)? })
    }

    /// Carries what an agent says.
    ///
    /// # Errors
    /// JSON has no form for `report`.
    pub fn report(report: &Report) -> serde_json::Result<Self> {
        let hello =
            matches!(report, Report::Hello(_)).then(|| v1::Hello { version: VERSION.to_owned() });
        Ok(Self { hello, ..Self::new(report)? })
    }

    /// What it carries.
    ///
    /// # Errors
    /// It carries something else.
    pub fn read<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_slice(&self.json)
    }

    /// Whether the agent whose first frame this is has this build's version.
    ///
    /// # Errors
    /// It has another one, or says none: one line for its user.
    pub fn check_version(&self) -> Result<(), String> {
        match self.hello.as_ref().map(|hello| hello.version.as_str()) {
            Some(VERSION) => Ok(()),
            other => Err(format!(
                "this agent is baton-worker {}, the coordinator is baton-coordinator {VERSION}: install the \
                 same version on all machines",
                other.unwrap_or("of an unknown version")
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_job::{
        Generation, NodeId, Rank,
        exit::{Class, Failure, Outcome},
        ids::LocalRank,
        message::{
            Activity, Beat, Commit, Directive, Gpu, Hello, Hold, Holding, Host, Launch, LoaderNews,
            Pulse, RankNews, RankPhase, Restore, Restored, Rollback, SaveProblem, SaveTimes,
            StateSource, StepNews, Vitals,
        },
    };
    use baton_recipe::{
        Epoch, Step,
        guard::{BatchMark, Diagnosis, Divergence},
        progress::{Accuracy, Extent, Progress},
    };
    use prost::Message;

    use super::*;

    /// No decimal form of 17 digits gives it back but its own.
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
        }
    }

    fn failure() -> Failure {
        Failure { class: Class::OutOfMemory, message: "no memory".to_owned() }
    }

    fn done() -> Outcome {
        Outcome::Failed { failure: failure() }
    }

    fn news() -> Vec<RankNews> {
        let restored = Restored { name: "a".to_owned(), lr: AWKWARD, ..Restored::default() };
        let best = Some((Step(3), accuracy()));
        let progress = Progress { best, skips: vec![BatchMark::default()], ..Progress::default() };
        let started = |source| RankNews::Started { source, progress: progress.clone() };
        vec![
            RankNews::Ready { address: "[::1]:1".to_owned(), step: Some(Step(1)) },
            RankNews::Met,
            started(StateSource::Fresh),
            started(StateSource::Survivor { rank: Rank(3) }),
            started(StateSource::Checkpoint(restored)),
            RankNews::Stepped(StepNews { loss: AWKWARD, ..StepNews::default() }),
            RankNews::Evaluated {
                step: Step(7),
                epoch: Epoch(1),
                accuracy: accuracy(),
                ema: Some(accuracy()),
                extent: Extent::Full,
            },
            RankNews::Diverged(diagnosis()),
            RankNews::EndsEarly { reason: "good enough".to_owned() },
            RankNews::Loader(LoaderNews {
                last_skipped: Some(String::new()),
                ..LoaderNews::default()
            }),
            RankNews::Pulse(Pulse { activity: Activity::Paused, ..Pulse::default() }),
            RankNews::Saved(commit()),
            RankNews::SaveWaits { step: Step(2), behind: Step(1), seconds: AWKWARD },
            RankNews::Stopping { step: Step(2) },
            RankNews::Copied { step: Step(2) },
            RankNews::SaveFailed(SaveProblem {
                message: "full".to_owned(),
                fence: Some(Generation(2)),
            }),
            RankNews::Lost { detail: "rank 1".to_owned() },
            RankNews::Done { outcome: Outcome::Completed, digest: "00".to_owned() },
            RankNews::Exited(failure()),
        ]
    }

    fn reports() -> Vec<Report> {
        let phases = [
            RankPhase::Joining,
            RankPhase::Ready { address: "a:1".to_owned(), step: None },
            RankPhase::Meeting,
            RankPhase::Training,
            RankPhase::Waiting,
            RankPhase::Diverged(diagnosis()),
            RankPhase::Done { outcome: done(), digest: "00".to_owned() },
        ];
        let ranks = (0..).map(Rank).zip(phases).collect();
        let holding = Holding { generation: Generation(2), ranks, commit: Some(commit()) };
        let gpu = Gpu { utilisation: Some(AWKWARD), ..Gpu::default() };
        let host = Host { cpu: AWKWARD, ..Host::default() };
        let beat = Beat {
            number: u64::MAX,
            round_trip: Some(Duration::new(1, 999_999_999)),
            vitals: Some(Vitals { host, gpus: vec![gpu] }),
        };
        let local_rank = LocalRank(1);
        let reason = "spot notice".to_owned();
        let news = news().into_iter().map(|news| Report::Rank {
            generation: Generation(1),
            rank: Rank(0),
            news,
        });
        news.chain([
            Report::Hello(Hello { node: NodeId("a".to_owned()), slots: 8, holding: Some(holding) }),
            Report::DrainRequested { reason: reason.clone(), seconds_left: Some(AWKWARD) },
            Report::Warm { local_rank },
            Report::WarmFailed { local_rank, failure: failure() },
            Report::Advised { reason },
            Report::GpuWarning { message: "Xid 79".to_owned() },
            Report::Beat(Beat::default()),
            Report::Beat(beat),
        ])
        .collect()
    }

    fn directives() -> Vec<Directive> {
        let (generation, reason) = (Generation(3), "spot notice".to_owned());
        let skip = Some(BatchMark { epoch: Epoch(1), cursor: 64 });
        let restore = Restore {
            path: Some("s3://a/b".to_owned()),
            rollbacks: vec![Rollback { generation, before: Step(7), skip }],
            ..Restore::default()
        };
        let hold = Hold { number: 1, paused: true };
        let ranks = vec![(Rank(8), LocalRank(0))];
        let replace = vec![LocalRank(1)];
        vec![
            Directive::Launch(Launch { generation, world_size: 9, ranks, replace, restore, hold }),
            Directive::Begin { generation, peers: ["a:1".to_owned(), "b:2".to_owned()].into() },
            Directive::Checkpoint { generation },
            Directive::Drain { generation, reason: reason.clone() },
            Directive::Hold(hold),
            Directive::Heard { number: u64::MAX },
            Directive::Warm { local_ranks: vec![LocalRank(0)] },
            Directive::Release { reason },
            Directive::Dismiss { outcome: done() },
        ]
    }

    /// What the peer's decoder sees.
    fn over_the_wire(frame: v1::Frame) -> v1::Frame {
        v1::Frame::decode(frame.encode_to_vec().as_slice()).unwrap()
    }

    #[test]
    fn all_that_is_said_is_heard_as_it_was_said() {
        for report in reports() {
            let frame = over_the_wire(v1::Frame::report(&report).unwrap());
            assert_eq!(frame.read::<Report>().unwrap(), report);
        }
        for directive in directives() {
            let frame = over_the_wire(v1::Frame::new(&directive).unwrap());
            assert_eq!(frame.read::<Directive>().unwrap(), directive);
        }
    }

    #[test]
    fn a_frame_that_is_torn_or_holds_something_else_is_an_error() {
        let whole = v1::Frame::new(&directives()[0]).unwrap();
        for length in 0..whole.json.len() {
            let torn = v1::Frame { json: whole.json[..length].to_vec(), ..whole.clone() };
            assert!(torn.read::<Directive>().is_err());
        }
        assert!(whole.read::<Report>().unwrap_err().to_string().contains("unknown variant"));
    }

    fn hello() -> v1::Frame {
        let hello = Hello { node: NodeId("a".to_owned()), slots: 1, holding: None };
        v1::Frame::report(&Report::Hello(hello)).unwrap()
    }

    #[test]
    fn versions_that_differ_are_both_named_with_a_remedy() {
        assert_eq!(hello().check_version(), Ok(()));
        let other = v1::Frame { hello: Some(v1::Hello { version: "0.0.9".into() }), ..hello() };
        let refusal = other.check_version().unwrap_err();
        assert!(refusal.contains("baton-worker 0.0.9"), "{refusal}");
        assert!(refusal.contains(VERSION) && refusal.contains("install the same"), "{refusal}");
        let silent = v1::Frame { hello: None, ..hello() };
        assert!(silent.check_version().unwrap_err().contains("unknown version"));
    }

    /// Field 1 of its first message, field 4 in there: so say the agents of protocol 1, so look its
    /// coordinators for it.
    #[test]
    fn an_agents_version_stands_where_every_version_looks_for_it() {
        let bytes = hello().encode_to_vec();
        let length = VERSION.len() as u8;
        assert_eq!(bytes[..4], [0x0a, length + 2, 0x22, length]);
        assert_eq!(&bytes[4..][..VERSION.len()], VERSION.as_bytes());

        let old = b"\x0a\x0c\x0a\x01a\x10\x01\x22\x050.1.0";
        let refusal = v1::Frame::decode(old.as_slice()).unwrap().check_version().unwrap_err();
        assert!(refusal.contains("baton-worker 0.1.0,"), "{refusal}");
    }
}
