//! Records what this process does during some steps: the spans of its threads, and the operations of the learner's device.
//!
//! A part of the work is a span of `tracing` with the target [`TARGET`]. As long as nothing is recorded, a span costs the
//! check of one variable. The program that trains installs [`layer`]; then a trainer records when a user asks.

use std::{
    collections::BTreeMap,
    ffi::CString,
    mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_checkpoint::{
    Store,
    profile::{ALL_REDUCE_SPAN, ProfileInfo, RankProfile, TraceEvent},
};
use baton_gpu::Nvtx;
use baton_job::{
    Rank,
    message::{ProfileRequest, RankReport},
};
use baton_recipe::Step;
use serde_json::{Map, Value};
use tracing::{
    Metadata, Subscriber,
    callsite::rebuild_interest_cache,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span::{Attributes, Id},
    subscriber::Interest,
};
use tracing_subscriber::{
    Layer,
    filter::filter_fn,
    layer::{Context, Filter},
    registry::LookupSpan,
};

use crate::{Controls, Learner, learner};

/// Target of the spans that are recorded.
pub use baton_data::PROFILE_TARGET as TARGET;

/// Most spans of a profile; more would make a file that no browser opens.
const MAX_SPANS: usize = 500_000;

/// Longest wait for a profile at the end of a job, and time between two looks at it.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(2);
const WRITE_POLL_INTERVAL: Duration = Duration::from_millis(10);

static IS_RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDING: Mutex<Option<Recording>> = Mutex::new(None);

/// What was recorded so far.
#[derive(Debug)]
struct Recording {
    began: Instant,
    began_unix_nanos: u64,
    spans: Vec<RecordedSpan>,
    /// Names of threads and streams by their numbers.
    tracks: BTreeMap<u64, String>,
    /// Number under which the threads of all-reduces are shown: each step has a new one.
    all_reduce_track: Option<u64>,
    left_out: u64,
}

#[derive(Debug)]
struct RecordedSpan {
    name: String,
    category: &'static str,
    thread: u64,
    /// Nanoseconds since the recording began.
    start: i64,
    nanos: u64,
    args: Map<String, Value>,
}

impl Recording {
    fn add(&mut self, span: RecordedSpan) {
        if self.spans.len() < MAX_SPANS {
            self.spans.push(span);
        } else {
            self.left_out += 1;
        }
    }

    fn add_of_device(&mut self, DeviceSpan { name, start_unix_nanos, nanos, place }: DeviceSpan) {
        let start =
            start_unix_nanos.cast_signed().wrapping_sub(self.began_unix_nanos.cast_signed());
        let (category, thread) = match place {
            SpanPlace::Thread(thread) => {
                self.tracks.entry(thread).or_insert_with(|| "thread of libtorch".to_owned());
                ("op", thread)
            }
            SpanPlace::Stream { device, stream } => {
                // Numbers that no thread has.
                let thread = (1 << 32) + (u64::from(device) << 16) + stream;
                let name = || format!("GPU {device}, stream {stream}");
                self.tracks.entry(thread).or_insert_with(name);
                ("device", thread)
            }
        };
        self.add(RecordedSpan { name, category, thread, start, nanos, args: Map::new() });
    }

    fn into_profile(self, baton: ProfileInfo) -> RankProfile {
        let pid = u64::from(baton.rank.0);
        let names = self.tracks.iter().map(|(tid, name)| TraceEvent::thread_name(pid, *tid, name));
        let spans = self.spans.into_iter().map(|span| TraceEvent {
            name: span.name,
            ph: "X".to_owned(),
            cat: span.category.to_owned(),
            pid,
            tid: span.thread,
            ts: span.start as f64 / 1e3,
            dur: span.nanos as f64 / 1e3,
            args: span.args,
        });
        let events = names.chain(spans).collect();
        let (began_unix_nanos, left_out) = (self.began_unix_nanos, self.left_out);
        RankProfile { baton: ProfileInfo { began_unix_nanos, left_out, ..baton }, events }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<Recording>> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to record; ends a recording that was not taken.
fn start() {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    *lock() = Some(Recording {
        began: Instant::now(),
        began_unix_nanos: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
        spans: Vec::new(),
        tracks: BTreeMap::new(),
        all_reduce_track: None,
        left_out: 0,
    });
    IS_RECORDING.store(true, Ordering::Release);
    rebuild_interest_cache();
}

/// Ends the recording.
fn stop() -> Option<Recording> {
    IS_RECORDING.store(false, Ordering::Release);
    rebuild_interest_cache();
    lock().take()
}

/// The layer of a `tracing` subscriber that records spans while a profile is wanted.
pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    SpanLayer.with_filter(WhileRecording)
}

/// Environment variable that passes the spans to NVIDIA's tools, if it is 1.
const NVTX_VARIABLE: &str = "BATON_NVTX";

/// A layer that makes each span a range of NVTX, so that NVIDIA's tools show them beside kernels; `None` unless the environment
/// asks for it.
///
/// # Errors
/// NVTX's library is not there.
pub fn nvtx_layer<S: Subscriber + for<'a> LookupSpan<'a>>()
-> Result<Option<impl Layer<S>>, baton_gpu::Error> {
    let is_wanted = std::env::var_os(NVTX_VARIABLE).is_some_and(|value| value == "1");
    is_wanted.then(open_nvtx).transpose()
}

fn open_nvtx<S: Subscriber + for<'a> LookupSpan<'a>>() -> Result<impl Layer<S>, baton_gpu::Error> {
    let spans = filter_fn(|metadata| metadata.is_span() && metadata.target() == TARGET);
    Ok(NvtxLayer(Nvtx::open()?).with_filter(spans))
}

struct NvtxLayer(Nvtx);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for NvtxLayer {
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let name = context.span(id).map(|span| span.name()).unwrap_or_default();
        self.0.push(&CString::new(name).unwrap_or_default());
    }

    fn on_exit(&self, _id: &Id, _context: Context<'_, S>) {
        self.0.pop();
    }
}

struct WhileRecording;

impl<S> Filter<S> for WhileRecording {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        metadata.target() == TARGET && IS_RECORDING.load(Ordering::Acquire)
    }

    // The answer changes: `start` and `stop` make `tracing` ask again.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        match metadata.target() == TARGET && IS_RECORDING.load(Ordering::Acquire) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let is_recording = IS_RECORDING.load(Ordering::Acquire);
        Some(if is_recording { LevelFilter::TRACE } else { LevelFilter::OFF })
    }
}

struct SpanLayer;

/// What is known of a span before its end.
struct OpenSpan {
    began: Instant,
    args: Map<String, Value>,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut args = Args(Map::new());
        attributes.record(&mut args);
        span.extensions_mut().insert(OpenSpan { began: Instant::now(), args: args.0 });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let ended = Instant::now();
        let Some(span) = context.span(&id) else { return };
        let Some(OpenSpan { began, args }) = span.extensions_mut().remove() else { return };
        let mut recording = lock();
        let Some(recording) = recording.as_mut().filter(|recording| recording.began <= began)
        else {
            return;
        };
        let name = thread::current().name().unwrap_or("unnamed thread").to_owned();
        let thread = match name == ALL_REDUCE_SPAN {
            true => *recording.all_reduce_track.get_or_insert_with(own_thread),
            false => own_thread(),
        };
        recording.tracks.entry(thread).or_insert(name);
        let start = i64::try_from((began - recording.began).as_nanos()).unwrap_or(i64::MAX);
        let nanos = u64::try_from((ended - began).as_nanos()).unwrap_or(u64::MAX);
        let name = span.name().to_owned();
        recording.add(RecordedSpan { name, category: "baton", thread, start, nanos, args });
    }
}

/// The system's number of this thread, as libtorch's profiler has it.
fn own_thread() -> u64 {
    u64::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap_or(0)
}

/// The fields of a span.
struct Args(Map<String, Value>);

impl Visit for Args {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

/// An operation of the learner's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    /// What it is, in the words of the library.
    pub name: String,
    /// Its begin, nanoseconds since 1970-01-01 UTC.
    pub start_unix_nanos: u64,
    /// Its duration, nanoseconds.
    pub nanos: u64,
    /// Where it took place.
    pub place: SpanPlace,
}

/// Where a [`DeviceSpan`] took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanPlace {
    /// The thread with this number of the system.
    Thread(u64),
    /// A stream of a GPU.
    Stream {
        /// Number of the GPU.
        device: u32,
        /// Number of the stream.
        stream: u64,
    },
}

/// The thread that writes a profile. It returns a problem, if there was one.
type ProfileWriter = JoinHandle<Option<String>>;

/// The profile that is being recorded or written.
#[derive(Debug, Default)]
pub(crate) struct Profiling {
    current: Option<CurrentProfile>,
    /// Its name, and the thread that writes it.
    writing: Option<(String, Result<ProfileWriter, String>)>,
}

#[derive(Debug)]
struct CurrentProfile {
    request: ProfileRequest,
    made: u32,
    /// Whether the device's operations are recorded at the moment.
    records_device: bool,
    operations: Vec<DeviceSpan>,
    problem: Option<String>,
}

impl CurrentProfile {
    fn begin_device(&mut self, learner: &mut impl Learner) {
        match learner.begin_profile() {
            Ok(()) => self.records_device = true,
            Err(error) => self.note(&error),
        }
    }

    fn end_device(&mut self, learner: &mut impl Learner) {
        if mem::take(&mut self.records_device) {
            match learner.end_profile() {
                Ok(operations) => self.operations.extend(operations),
                Err(error) => self.note(&error),
            }
        }
    }

    fn note(&mut self, error: &learner::Error) {
        let text = || format!("it lacks operations of the device: {error}");
        self.problem.get_or_insert_with(text);
    }
}

impl Profiling {
    /// Begins to record before a step if that was requested.
    pub(crate) fn before_step(&mut self, learner: &mut impl Learner, controls: &Controls) {
        if self.current.is_none()
            && let Some(request) = controls.take_profile()
        {
            start();
            let (operations, problem) = (Vec::new(), None);
            self.current = Some(CurrentProfile {
                request,
                made: 0,
                records_device: false,
                operations,
                problem,
            });
        }
        if let Some(current) = &mut self.current
            && !current.records_device
            && current.problem.is_none()
        {
            current.begin_device(learner);
        }
    }

    /// Leaves out the device's operations until the next step: an evaluation may have millions.
    pub(crate) fn before_evaluation(&mut self, learner: &mut impl Learner) {
        if let Some(current) = &mut self.current {
            current.end_device(learner);
        }
    }

    /// Ends the recording after its last step, which is `step`, and begins to write it.
    pub(crate) fn after_step(
        &mut self,
        learner: &mut impl Learner,
        (rank, step): (Rank, Step),
        store: &Arc<Store>,
    ) {
        let Some(current) = &mut self.current else { return };
        current.made += 1;
        if current.made < current.request.steps {
            return;
        }
        current.end_device(learner);
        let Some(CurrentProfile { request, made, operations, problem, .. }) = self.current.take()
        else {
            return;
        };
        let recording = stop();
        let info = ProfileInfo {
            rank,
            node: request.node.to_string(),
            first_step: Step(step.0 + 1 - u64::from(made)),
            last_step: step,
            problem,
            ..ProfileInfo::default()
        };
        let (store, name) = (Arc::clone(store), request.name.clone());
        let write = move || {
            let Some(mut recording) = recording else {
                return Some("its recording was ended by another; this is a bug".to_owned());
            };
            operations.into_iter().for_each(|operation| recording.add_of_device(operation));
            let profile = recording.into_profile(info);
            store.write_profile(&request.name, &profile).err().map(|error| error.to_string())
        };
        let thread = thread::Builder::new().name("profile".to_owned()).spawn(write);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"));
        self.writing = Some((name, thread));
    }

    /// Reports the profile once it is written.
    pub(crate) fn collect(&mut self, report: &mut dyn FnMut(RankReport)) {
        let is_ended = |thread: &JoinHandle<_>| thread.is_finished();
        let ended = self.writing.take_if(|(_, thread)| thread.as_ref().map_or(true, is_ended));
        let Some((name, thread)) = ended else { return };
        let panicked = |_| Some("the thread that writes it panicked; this is a bug".to_owned());
        let problem = match thread {
            Ok(thread) => thread.join().unwrap_or_else(panicked),
            Err(problem) => Some(problem),
        };
        report(RankReport::Profiled { name, problem });
    }

    /// Waits until the profile is written, if one is being written, and reports it; not for ever: the job is over.
    pub(crate) fn finish(&mut self, report: &mut dyn FnMut(RankReport)) {
        let began = Instant::now();
        while self.writing.is_some() && began.elapsed() < LAST_WRITE_TIMEOUT {
            self.collect(report);
            thread::sleep(WRITE_POLL_INTERVAL);
        }
    }

    /// Ends a recording that the generation did not complete.
    pub(crate) fn abandon(&mut self, learner: &mut impl Learner) {
        self.writing = None;
        if let Some(mut current) = self.current.take() {
            drop(stop());
            current.end_device(learner);
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::trace_span;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn spans_are_ranges_of_nvtx() {
        baton_fake_gpu::run("profile::tests::spans_are_ranges_of_nvtx", |gpu| {
            let both = tracing_subscriber::registry().with(open_nvtx().unwrap()).with(layer());
            tracing::subscriber::with_default(both, || {
                let step = trace_span!(target: TARGET, "step", number = 7_u64).entered();
                drop(trace_span!(target: "baton::samples", "other").entered());
                drop(trace_span!(target: TARGET, "gradient").entered());
                drop(step);
                assert!(stop().is_none(), "nothing is recorded");
            });
            assert_eq!(gpu.ended_ranges(), ["step/gradient", "step"]);
        });
    }

    #[test]
    fn spans_are_recorded_only_between_start_and_stop() {
        let subscriber = tracing_subscriber::registry().with(layer());
        tracing::subscriber::with_default(subscriber, || {
            let part = |name: &'static str| trace_span!(target: TARGET, "part", name, size = 3_u64);
            let other = || trace_span!(target: "baton::samples", "other");
            drop(part("before").entered());
            assert!(part("before").is_disabled());
            start();
            drop(part("outer").in_scope(|| part("inner").entered().exit()));
            drop(other().entered());
            let recording = stop().unwrap();
            assert!(part("after").is_disabled() && stop().is_none());

            let names: Vec<(&str, &Value)> = recording
                .spans
                .iter()
                .map(|span| (span.name.as_str(), &span.args["name"]))
                .collect();
            // A span is recorded at its end.
            let [inner, outer] = ["inner", "outer"].map(Value::from);
            assert_eq!(names, [("part", &inner), ("part", &outer)]);
            let [inner, outer] = &recording.spans[..] else { panic!("two spans") };
            assert!(outer.start <= inner.start && inner.nanos <= outer.nanos);
            assert_eq!((outer.thread, outer.args["size"].as_u64()), (own_thread(), Some(3)));

            let profile =
                recording.into_profile(ProfileInfo { rank: Rank(5), ..ProfileInfo::default() });
            let names = profile.events.iter().map(|event| (event.ph.as_str(), event.pid));
            assert_eq!(names.collect::<Vec<_>>(), [("M", 5), ("X", 5), ("X", 5)]);
        });
    }
}
