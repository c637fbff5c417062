//! The metric points of the job, over all its runs: stored in files of the run folder and sent to followers.
//!
//! A separate thread writes the files, because the job loop must not wait for files that training does not need.

use std::{
    path::Path,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use baton_job::{Generation, JobId, engine::MetricPoint};
use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics as PointMetrics};
use baton_recipe::Step;
use baton_telemetry::{history::History, tensorboard::EventFile};
use parking_lot::Mutex;
use tokio::sync::broadcast;
use tracing::warn;

use crate::clock::unix_millis;

/// Points that a slow follower may fall behind before it has to call again. An agent may bring 4,096 at once.
const FOLLOW_BUFFER: usize = 8_192;
/// Longest wait for the files to be written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time before a point is flushed to the files.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// Stores metric points and reads them.
pub(crate) struct JobMetrics {
    commands: mpsc::Sender<WriterCommand>,
    store: Arc<MetricStore>,
}

/// A command to the writer thread.
enum WriterCommand {
    Point(StreamMetricsResponse),
    /// Flush all points received before, and confirm.
    Finish(mpsc::Sender<()>),
}

struct MetricStore {
    history: Mutex<History>,
    live: broadcast::Sender<StreamMetricsResponse>,
}

/// Past points, and the feed of the following ones, without a gap between them.
pub(crate) struct MetricSubscription {
    pub(crate) past: Vec<StreamMetricsResponse>,
    pub(crate) live: broadcast::Receiver<StreamMetricsResponse>,
}

/// The history of metrics in a run folder.
pub(crate) const METRICS_FILE: &str = "metrics.jsonl";

impl JobMetrics {
    /// Opens or creates the files in a run folder.
    pub(crate) fn open(run_dir: &Path) -> Result<Self> {
        let history = History::open(run_dir.join(METRICS_FILE))?;
        if history.unreadable_lines() > 0 {
            let lines = history.unreadable_lines();
            warn!(lines, "metrics.jsonl has lines that cannot be read; they are skipped");
        }
        let folder = run_dir.join("tensorboard");
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let events = EventFile::create(&folder, unix_millis() / 1_000, &hostname)?;
        let (live, _) = broadcast::channel(FOLLOW_BUFFER);
        let store = Arc::new(MetricStore { history: Mutex::new(history), live });
        let (commands, received) = mpsc::channel();
        let writer = store.clone();
        thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || writer.write_all(&received, events))
            .context("cannot start a thread")?;
        Ok(Self { commands, store })
    }

    /// Adds a point of a job.
    pub(crate) fn add(
        &self,
        unix_millis: u64,
        job: JobId,
        generation: Generation,
        point: MetricPoint,
    ) {
        let mut job_id = String::new();
        let metrics = match point {
            MetricPoint::BeganAt(step) => {
                job_id = job.to_string();
                PointMetrics::BeganAt(step.0)
            }
            MetricPoint::Step(step) => PointMetrics::Step(step.into()),
            MetricPoint::Evaluation(evaluation) => PointMetrics::Evaluation(evaluation.into()),
        };
        let point = StreamMetricsResponse {
            unix_millis,
            generation: generation.0,
            metrics: Some(metrics),
            job_id,
        };
        // The writer thread lives as long as `self`.
        let _ = self.commands.send(WriterCommand::Point(point));
    }

    /// All points, oldest first, including those just added.
    pub(crate) fn all(&self) -> Vec<StreamMetricsResponse> {
        self.finish();
        self.store.history.lock().points(0)
    }

    /// Step that training had reached at the newest point; 0 if there is none.
    pub(crate) fn reached(&self) -> Step {
        let points = self.store.history.lock().points(0);
        let mut steps = points.into_iter().rev().filter_map(|point| match point.metrics {
            Some(PointMetrics::BeganAt(step)) => Some(Step(step)),
            Some(PointMetrics::Step(metrics)) => Some(Step(metrics.step)),
            Some(PointMetrics::Evaluation(_)) | None => None,
        });
        steps.next().unwrap_or_default()
    }

    /// Returns once all added points are in the files, or after [`FINISH_TIMEOUT`].
    pub(crate) fn finish(&self) {
        let (done, finished) = mpsc::channel();
        if self.commands.send(WriterCommand::Finish(done)).is_ok() {
            let _ = finished.recv_timeout(FINISH_TIMEOUT);
        }
    }

    /// Points later than `after_unix_millis`, and the feed of the following ones.
    pub(crate) fn follow(&self, after_unix_millis: u64) -> MetricSubscription {
        // Points are added and sent under the same lock.
        let history = self.store.history.lock();
        MetricSubscription {
            past: history.points(after_unix_millis),
            live: self.store.live.subscribe(),
        }
    }
}

impl MetricStore {
    /// Writes points until [`JobMetrics`] is dropped.
    fn write_all(&self, commands: &mpsc::Receiver<WriterCommand>, mut events: EventFile) {
        let mut has_warned = false;
        loop {
            let written = match commands.recv_timeout(FLUSH_INTERVAL) {
                Ok(WriterCommand::Point(point)) => self.write(point, &mut events),
                Ok(WriterCommand::Finish(done)) => {
                    let flushed = self.flush(&mut events);
                    // The caller's wait may have timed out.
                    let _ = done.send(());
                    flushed
                }
                Err(RecvTimeoutError::Timeout) => self.flush(&mut events),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            // Warn only once: a full disk usually stays full, and training continues.
            if let Err(error) = written
                && !std::mem::replace(&mut has_warned, true)
            {
                warn!("{error:#}; curves may lack points from now on");
            }
        }
        if let Err(error) = self.flush(&mut events) {
            warn!("{error:#}");
        }
    }

    fn write(&self, point: StreamMetricsResponse, events: &mut EventFile) -> Result<()> {
        let mut history = self.history.lock();
        let in_history = history.add(point.clone());
        if matches!(in_history, Ok(false)) {
            // An agent that reconnects sends its newest steps again.
            return Ok(());
        }
        // It is not an error if there is no follower.
        let _ = self.live.send(point.clone());
        drop(history);
        events.add(&point)?;
        in_history?;
        Ok(())
    }

    fn flush(&self, events: &mut EventFile) -> Result<()> {
        events.flush()?;
        Ok(self.history.lock().flush()?)
    }
}
