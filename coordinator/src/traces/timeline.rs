//! Turns a job's records and events into spans.
//!
//! One trace covers the job from its first event to its end. Its root span `job` contains `generation` spans, which
//! contain `checkpoint` spans and job events as span events; `recovery` spans with their parts; and `pause` spans.
//! A span is exported when it ends. Ids are derived from the job's id, so that spans exported after a restart of the
//! coordinator join the same trace; spans open at the restart are restored from the event log.
//!
//! Names of spans and attributes are a promise to dashboards of traces (docs/watching.md): adding is allowed, renaming
//! is not. Texts in them may change at any time.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use baton_job::{
    Generation, JobId, Time,
    engine::{JobEventKind, Record, Recovery},
    exit::Outcome,
    message::Commit,
};
use baton_proto::v1::watch_events_response::Kind;
use opentelemetry::{
    InstrumentationScope, KeyValue, SpanId, TraceFlags, TraceId,
    trace::{Event, SpanContext, SpanKind, Status, TraceState},
};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::journal::LoggedEvent;

/// Most span events of a generation; later ones are dropped. This is the limit of the OpenTelemetry specification.
const MAX_EVENTS_PER_GENERATION: usize = 128;

/// The open spans of a job, and the job's identity.
#[derive(Debug)]
pub(crate) struct Timeline {
    job: JobId,
    /// How often the job has ended. A job can be resumed after its end.
    ends: u64,
    began: Option<Time>,
    generation: Option<OpenGeneration>,
    /// Size of the open generation, or of the one that opens next.
    size: GenerationSize,
    pause: Option<(Time, String)>,
}

#[derive(Debug)]
struct OpenGeneration {
    number: Generation,
    since: Time,
    events: Vec<Event>,
    dropped: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct GenerationSize {
    ranks: usize,
    nodes: usize,
}

impl Timeline {
    /// Restores the timeline from the records and events of the journal.
    pub(crate) fn new(job: JobId, records: &[Record], events: &[LoggedEvent]) -> Self {
        let mut this = Self {
            job,
            ends: 0,
            began: None,
            generation: None,
            size: GenerationSize::default(),
            pause: None,
        };
        for record in records {
            this.update_size(record);
        }
        for event in events {
            this.event(event);
        }
        this.pause = open_pause(records, events);
        this
    }

    /// The job's id, plus one for each end of the job.
    pub(crate) fn trace_id(&self) -> TraceId {
        TraceId::from(self.job.0.as_u128().wrapping_add(u128::from(self.ends)))
    }

    pub(crate) fn job(&self) -> JobId {
        self.job
    }

    /// Adds a job event, which may open or close spans.
    pub(crate) fn event(&mut self, logged: &LoggedEvent) {
        let LoggedEvent { unix_millis, event, .. } = logged;
        let at = Time(*unix_millis);
        // These may follow the end of the job, when agents leave and the driver reports errors of the ended ranks.
        if !matches!(event.kind, JobEventKind::NodeLost | JobEventKind::GpuWarning) {
            self.began.get_or_insert(at);
        }
        match event.kind {
            JobEventKind::GenerationOpened => {
                let number = event.generation;
                let (events, dropped) = (Vec::new(), 0);
                self.generation = Some(OpenGeneration { number, since: at, events, dropped });
            }
            JobEventKind::Ended => {
                self.ends += 1;
                (self.began, self.generation) = (None, None);
            }
            // These have their own spans.
            JobEventKind::Saved
            | JobEventKind::Recovered
            | JobEventKind::Paused
            | JobEventKind::Resumed => {}
            kind => {
                if let Some(open) = &mut self.generation {
                    open.add_event(at, kind, event.step.map(|step| step.0), &event.message);
                }
            }
        }
    }

    /// Adds a record of the engine and returns the spans that end with it.
    pub(crate) fn record(&mut self, now: Time, record: &Record) -> Vec<SpanData> {
        match record {
            Record::Created(_) => {
                self.began = Some(now);
                Vec::new()
            }
            Record::Opened { .. } => {
                let before = self.end_generation(now);
                self.update_size(record);
                before.into_iter().collect()
            }
            Record::Saved(commit) => vec![self.checkpoint(now, commit)],
            Record::Recovery(recovery) => self.recovery(now, recovery),
            Record::Paused { reason, .. } => {
                self.pause = Some((now, reason.clone()));
                Vec::new()
            }
            Record::Resumed { .. } => self.end_pause(now).into_iter().collect(),
            Record::Ended(outcome) => {
                let open = [self.end_generation(now), self.end_pause(now)];
                open.into_iter().flatten().chain([self.job_ended(now, outcome)]).collect()
            }
            // These appear as job events, or are internal.
            Record::Evaluated { .. }
            | Record::Best { .. }
            | Record::Diverged(_)
            | Record::Metered(_)
            | Record::Draining { .. }
            | Record::Paid { .. } => Vec::new(),
        }
    }

    fn update_size(&mut self, record: &Record) {
        if let Record::Opened { placements, .. } = record {
            let nodes: BTreeSet<_> = placements.iter().map(|placement| &placement.node).collect();
            self.size = GenerationSize { ranks: placements.len(), nodes: nodes.len() };
        }
    }

    // ---- spans ----

    fn job_ended(&self, now: Time, outcome: &Outcome) -> SpanData {
        let status = match outcome {
            Outcome::Failed { failure } => Status::error(failure.message.clone()),
            _ => Status::Ok,
        };
        let attributes = vec![KeyValue::new("baton.outcome", outcome.to_string())];
        let span = self.span("job", self.began.unwrap_or(now), now, attributes);
        let span_context = self.context(self.job_span());
        SpanData { span_context, parent_span_id: SpanId::INVALID, status, ..span }
    }

    fn end_generation(&mut self, now: Time) -> Option<SpanData> {
        let OpenGeneration { number, since, events, dropped } = self.generation.take()?;
        let attributes = vec![
            generation(number),
            count("baton.world_size", self.size.ranks as u64),
            count("baton.nodes", self.size.nodes as u64),
        ];
        let mut span_events = SpanEvents::default();
        (span_events.events, span_events.dropped_count) = (events, dropped);
        let span = self.span("generation", since, now, attributes);
        let span_context = self.context(self.generation_span(number));
        Some(SpanData { span_context, events: span_events, ..span })
    }

    fn end_pause(&mut self, now: Time) -> Option<SpanData> {
        let (since, reason) = self.pause.take()?;
        Some(self.span("pause", since, now, vec![KeyValue::new("baton.reason", reason)]))
    }

    fn checkpoint(&self, now: Time, commit: &Commit) -> SpanData {
        let mut attributes = vec![
            generation(commit.generation),
            count("baton.step", commit.step.0),
            count("baton.checkpoint.bytes", commit.bytes),
            KeyValue::new("baton.checkpoint.name", commit.name.clone()),
        ];
        let mut from = now;
        if let Some(took) = commit.took {
            let total = Duration::try_from_secs_f64(took.stall_seconds + took.seconds);
            from = before(now, total.unwrap_or_default());
            attributes.push(KeyValue::new("baton.checkpoint.stall_seconds", took.stall_seconds));
        }
        let span = self.span("checkpoint", from, now, attributes);
        SpanData { parent_span_id: self.generation_span(commit.generation), ..span }
    }

    fn recovery(&self, now: Time, recovery: &Recovery) -> Vec<SpanData> {
        let attributes = vec![
            generation(recovery.generation),
            KeyValue::new("baton.cause", recovery.cause.clone()),
            KeyValue::new("baton.planned", recovery.planned),
            count("baton.step", recovery.step_before.0),
            count("baton.lost_steps", recovery.lost_steps),
        ];
        let until = recovery.stepped_at.unwrap_or(now);
        let mut whole = self.span("recovery", recovery.lost_at, until, attributes);
        if recovery.stepped_at.is_none() {
            whole.status = Status::error("it did not reach its first step");
        }
        let parent_span_id = whole.span_context.span_id();
        let mut spans = vec![whole];
        let mut from = recovery.lost_at;
        for (name, took) in recovery.parts().named() {
            let Some(took) = took else { continue };
            let until = from.after(took);
            spans.push(SpanData { parent_span_id, ..self.span(name, from, until, Vec::new()) });
            from = until;
        }
        spans
    }

    /// A child of the job's span, with a random id.
    fn span(
        &self,
        name: &'static str,
        from: Time,
        until: Time,
        attributes: Vec<KeyValue>,
    ) -> SpanData {
        let identity = uuid::Uuid::new_v4().as_u64_pair().1;
        SpanData {
            span_context: self.context(SpanId::from(identity)),
            parent_span_id: self.job_span(),
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: Cow::Borrowed(name),
            start_time: system_time(from),
            end_time: system_time(until.max(from)),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::builder("baton").build(),
        }
    }

    fn context(&self, span: SpanId) -> SpanContext {
        let (flags, state) = (TraceFlags::SAMPLED, TraceState::NONE);
        SpanContext::new(self.trace_id(), span, flags, false, state)
    }

    fn job_span(&self) -> SpanId {
        self.generation_span(Generation(0))
    }

    /// The span id of a generation. The first generation is 1; 0 is the job.
    fn generation_span(&self, number: Generation) -> SpanId {
        SpanId::from(self.job.0.as_u64_pair().1.wrapping_add(number.0))
    }
}

impl OpenGeneration {
    fn add_event(&mut self, at: Time, kind: JobEventKind, step: Option<u64>, message: &str) {
        if self.events.len() == MAX_EVENTS_PER_GENERATION {
            self.dropped += 1;
            return;
        }
        let name = Kind::from(kind).name();
        let mut attributes = vec![KeyValue::new("message", message.to_owned())];
        attributes.extend(step.map(|step| count("baton.step", step)));
        self.events.push(Event::new(name, system_time(at), attributes, 0));
    }
}

/// The pause that is still open. Only the records show this: a drain ends a pause without a job event.
fn open_pause(records: &[Record], events: &[LoggedEvent]) -> Option<(Time, String)> {
    let last = records.iter().rev().find_map(|record| match record {
        Record::Paused { reason, .. } => Some(Some(reason.clone())),
        Record::Resumed { .. } | Record::Ended(_) => Some(None),
        _ => None,
    });
    let reason = last.flatten()?;
    let paused = events.iter().rev().find(|logged| logged.event.kind == JobEventKind::Paused)?;
    Some((Time(paused.unix_millis), reason))
}

fn generation(number: Generation) -> KeyValue {
    count("baton.generation", number.0)
}

fn count(name: &'static str, count: u64) -> KeyValue {
    KeyValue::new(name, i64::try_from(count).unwrap_or(i64::MAX))
}

fn before(time: Time, by: Duration) -> Time {
    Time(time.0.saturating_sub(u64::try_from(by.as_millis()).unwrap_or(u64::MAX)))
}

fn system_time(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(time.0)
}

#[cfg(test)]
mod tests {
    use baton_job::{
        engine::{JobEvent, JobOrigin},
        ids::{LocalRank, NodeId, Rank},
        message::{Restore, SaveTimes},
        plan::Placement,
    };
    use baton_recipe::Step;

    use super::*;

    fn logged(at: u64, kind: JobEventKind, number: u64) -> LoggedEvent {
        let message = format!("{kind:?} as text");
        let event = JobEvent { kind, generation: Generation(number), step: None, message };
        LoggedEvent { id: at, unix_millis: at, event }
    }

    fn opened(number: u64) -> Record {
        let placement = |rank: u32| Placement {
            rank: Rank(rank),
            node: NodeId(format!("node-{}", rank / 2)),
            local_rank: LocalRank(rank % 2),
        };
        Record::Opened {
            generation: Generation(number),
            placements: (0..4).map(placement).collect(),
        }
    }

    fn job() -> JobId {
        JobId(uuid::Uuid::from_u64_pair(7, 1_000))
    }

    fn started_timeline() -> Timeline {
        let mut timeline = Timeline::new(job(), &[], &[]);
        let origin = JobOrigin {
            job: job(),
            recipe: None,
            first_generation: Generation(1),
            restore: Restore::default(),
        };
        assert!(timeline.record(Time(100), &Record::Created(origin)).is_empty());
        assert!(timeline.record(Time(150), &opened(1)).is_empty());
        timeline.event(&logged(150, JobEventKind::GenerationOpened, 1));
        timeline
    }

    fn millis(time: SystemTime) -> u64 {
        time.duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
    }

    fn extent(span: &SpanData) -> (&str, u64, u64) {
        (span.name.as_ref(), millis(span.start_time), millis(span.end_time))
    }

    fn attribute(span: &SpanData, name: &str) -> String {
        let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == name);
        found.map_or_else(|| panic!("{name} in {span:?}"), |attribute| attribute.value.to_string())
    }

    #[test]
    fn the_spans_of_a_job_form_one_tree() {
        let mut timeline = started_timeline();
        timeline.event(&logged(200, JobEventKind::TrainingStarted, 1));
        let commit = Commit {
            name: "step-9".to_owned(),
            generation: Generation(1),
            step: Step(9),
            accuracy: None,
            bytes: 77,
            took: Some(SaveTimes { stall_seconds: 0.010, seconds: 0.040 }),
            fence_lost: false,
        };
        let saved = timeline.record(Time(300), &Record::Saved(commit));
        timeline.event(&logged(300, JobEventKind::Saved, 1));
        timeline.event(&logged(400, JobEventKind::RankFailed, 1));
        let first = timeline.record(Time(500), &opened(2));
        timeline.event(&logged(500, JobEventKind::GenerationOpened, 2));
        let end = timeline.record(Time(600), &Record::Ended(Outcome::Completed));

        assert_eq!(extent(&saved[0]), ("checkpoint", 250, 300));
        assert_eq!(attribute(&saved[0], "baton.checkpoint.bytes"), "77");
        assert_eq!(extent(&first[0]), ("generation", 150, 500));
        assert_eq!(attribute(&first[0], "baton.world_size"), "4");
        assert_eq!(attribute(&first[0], "baton.nodes"), "2");
        let names: Vec<&str> = first[0].events.iter().map(|event| event.name.as_ref()).collect();
        assert_eq!(names, ["training_started", "rank_failed"]);
        let [second, whole] = &end[..] else { panic!("{end:?}") };
        assert_eq!(extent(second), ("generation", 500, 600));
        assert_eq!(extent(whole), ("job", 100, 600));
        assert_eq!(whole.parent_span_id, SpanId::INVALID);
        let root = whole.span_context.span_id();
        assert_eq!((first[0].parent_span_id, second.parent_span_id), (root, root));
        assert_eq!(saved[0].parent_span_id, first[0].span_context.span_id());
        assert_ne!(first[0].span_context.span_id(), second.span_context.span_id());
        for span in saved.iter().chain(&first).chain(&end) {
            assert_eq!(span.span_context.trace_id(), TraceId::from(job().0.as_u128()));
            assert!(span.span_context.is_valid() && span.span_context.is_sampled());
        }
    }

    #[test]
    fn a_recovery_has_consecutive_spans_for_its_parts() {
        let recovery = Recovery {
            generation: Generation(2),
            cause: "rank 1 died".to_owned(),
            planned: false,
            lost_at: Time(1_000),
            launched_at: Some(Time(1_050)),
            torn_down_at: Some(Time(1_100)),
            ready_at: Some(Time(1_400)),
            met_at: None,
            started_at: Some(Time(1_600)),
            stepped_at: Some(Time(1_700)),
            step_before: Step(40),
            lost_steps: 3,
            metered_from: Duration::ZERO,
            metered: None,
            redo: Duration::ZERO,
        };
        let unfinished = Recovery { started_at: None, stepped_at: None, ..recovery.clone() };
        let mut timeline = started_timeline();

        let spans = timeline.record(Time(1_700), &Record::Recovery(recovery));

        let extents: Vec<_> = spans.iter().map(extent).collect();
        assert_eq!(
            extents,
            [
                ("recovery", 1_000, 1_700),
                ("detect", 1_000, 1_050),
                ("tear down", 1_050, 1_100),
                ("respawn", 1_100, 1_400),
                ("restore", 1_400, 1_600),
                ("first step", 1_600, 1_700),
            ]
        );
        assert_eq!(attribute(&spans[0], "baton.lost_steps"), "3");
        let whole = spans[0].span_context.span_id();
        assert!(spans[1..].iter().all(|part| part.parent_span_id == whole));

        let spans = timeline.record(Time(1_900), &Record::Recovery(unfinished));

        assert_eq!(extent(&spans[0]), ("recovery", 1_000, 1_900));
        assert!(matches!(spans[0].status, Status::Error { .. }));
    }

    #[test]
    fn spans_open_when_a_coordinator_died_are_ended_by_the_next() {
        let past = [
            logged(100, JobEventKind::NodeJoined, 0),
            logged(150, JobEventKind::GenerationOpened, 1),
            logged(160, JobEventKind::NodeLost, 1),
            logged(170, JobEventKind::Paused, 1),
        ];
        let paused = Record::Paused { reason: "lunch".to_owned(), at: Duration::ZERO };
        let resumed = Record::Resumed { at: Duration::ZERO };
        let mut timeline = Timeline::new(job(), &[opened(1), paused.clone()], &past);
        // Here a drain has ended the pause.
        let mut drained = Timeline::new(job(), &[opened(1), paused, resumed], &past);

        assert!(drained.record(Time(500), &Record::Ended(Outcome::Stopped))[0].name != "pause");
        let pause = timeline.record(Time(500), &Record::Resumed { at: Duration::ZERO });
        let end = timeline.record(Time(600), &Record::Ended(Outcome::Completed));

        assert_eq!(extent(&pause[0]), ("pause", 170, 500));
        assert_eq!(attribute(&pause[0], "baton.reason"), "lunch");
        let extents: Vec<_> = end.iter().map(extent).collect();
        assert_eq!(extents, [("generation", 150, 600), ("job", 100, 600)]);
        assert_eq!(end[0].events.len(), 1);
        assert_eq!(attribute(&end[0], "baton.world_size"), "4");
    }

    #[test]
    fn a_job_resumed_after_its_end_starts_another_trace() {
        let mut past = vec![
            logged(100, JobEventKind::NodeJoined, 0),
            logged(150, JobEventKind::GenerationOpened, 1),
            logged(300, JobEventKind::Ended, 1),
        ];
        let timeline = Timeline::new(job(), &[], &past);
        let before = Timeline::new(job(), &[], &past[..2]);
        assert_ne!(timeline.trace_id(), before.trace_id());

        past.push(logged(310, JobEventKind::NodeLost, 1));
        past.push(logged(320, JobEventKind::GpuWarning, 1));
        past.push(logged(900, JobEventKind::NodeJoined, 1));
        let drained = Outcome::Drained { reason: "spot".to_owned() };
        let mut timeline = Timeline::new(job(), &[], &past);
        let end = timeline.record(Time(950), &Record::Ended(drained));

        let extents: Vec<_> = end.iter().map(extent).collect();
        assert_eq!(extents, [("job", 900, 950)]);
    }

    #[test]
    fn a_generation_with_too_many_events_keeps_the_first_ones() {
        let mut timeline = started_timeline();
        for at in 200..400 {
            timeline.event(&logged(at, JobEventKind::Evaluated, 1));
        }

        let end = timeline.record(Time(500), &Record::Ended(Outcome::Stopped));

        assert_eq!((end[0].events.len(), end[0].events.dropped_count), (128, 72));
    }
}
