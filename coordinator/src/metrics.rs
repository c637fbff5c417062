//! The job's numbers over its whole life, for whoever draws curves: kept in files of the run folder, sent to those who
//! follow.
//!
//! A thread of its own writes them, as the loop must not wait for a file that nobody needs.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use baton_job::{Generation, engine::Measured};
use baton_proto::v1::{StreamMetricsResponse, stream_metrics_response::Metrics as Of};
use baton_telemetry::{history::History, tensorboard::EventFile};
use tokio::sync::broadcast;
use tracing::warn;

use crate::clock::unix_millis;

/// Points that a slow follower may fall behind before it has to ask again.
const FOLLOW_BUFFER: usize = 1_024;
/// How long the end of a job waits for the files.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a point may wait to be written.
const FLUSH: Duration = Duration::from_secs(1);

/// Where numbers go, and where they are read.
pub(crate) struct Metrics {
    points: mpsc::Sender<Told>,
    kept: Arc<Kept>,
}

/// What the thread is told.
enum Told {
    Point(StreamMetricsResponse),
    /// Write all that came before, and say so.
    Finish(mpsc::Sender<()>),
}

struct Kept {
    history: Mutex<History>,
    coming: broadcast::Sender<StreamMetricsResponse>,
}

/// What was measured, and the feed of what will be, without a gap between.
pub(crate) struct Follow {
    pub(crate) past: Vec<StreamMetricsResponse>,
    pub(crate) coming: broadcast::Receiver<StreamMetricsResponse>,
}

impl Metrics {
    /// Opens what is kept in a run folder.
    pub(crate) fn open(run_dir: &Path) -> Result<Self> {
        let history = History::open(run_dir.join("metrics.jsonl"))?;
        if history.unreadable_lines() > 0 {
            let lines = history.unreadable_lines();
            warn!(lines, "metrics.jsonl has lines that cannot be read; they are passed over");
        }
        let folder = run_dir.join("tensorboard");
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let events = EventFile::create(&folder, unix_millis() / 1_000, &hostname)?;
        let (coming, _) = broadcast::channel(FOLLOW_BUFFER);
        let kept = Arc::new(Kept { history: Mutex::new(history), coming });
        let (points, received) = mpsc::channel();
        let keeper = kept.clone();
        thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || keeper.keep(&received, events))
            .context("cannot start a thread")?;
        Ok(Self { points, kept })
    }

    /// Takes a number.
    pub(crate) fn add(&self, unix_millis: u64, generation: Generation, measured: Measured) {
        let metrics = match measured {
            Measured::BeganAt(step) => Of::BeganAt(step.0),
            Measured::Step(news) => Of::Step(news.into()),
            Measured::Evaluation(evaluation) => Of::Evaluation(evaluation.into()),
        };
        let point =
            StreamMetricsResponse { unix_millis, generation: generation.0, metrics: Some(metrics) };
        // The thread ends after the last of those who could call this.
        let _ = self.points.send(Told::Point(point));
    }

    /// Everything, oldest first, also what was added just now.
    pub(crate) fn all(&self) -> Vec<StreamMetricsResponse> {
        self.finish();
        self.kept.lock().points(0)
    }

    /// Returns once what was added is in the files, or the disk has had its time.
    pub(crate) fn finish(&self) {
        let (done, finished) = mpsc::channel();
        if self.points.send(Told::Finish(done)).is_ok() {
            let _ = finished.recv_timeout(PATIENCE);
        }
    }

    /// What was measured later than this.
    pub(crate) fn follow(&self, after_unix_millis: u64) -> Follow {
        // Points are added and sent under the same lock.
        let history = self.kept.lock();
        Follow { past: history.points(after_unix_millis), coming: self.kept.coming.subscribe() }
    }
}

impl Kept {
    /// Writes until nobody can add any more.
    fn keep(&self, points: &mpsc::Receiver<Told>, mut events: EventFile) {
        let mut told = false;
        loop {
            let written = match points.recv_timeout(FLUSH) {
                Ok(Told::Point(point)) => self.write(point, &mut events),
                Ok(Told::Finish(done)) => {
                    let flushed = self.flush(&mut events);
                    // Whoever waited may have lost patience.
                    let _ = done.send(());
                    flushed
                }
                Err(RecvTimeoutError::Timeout) => self.flush(&mut events),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            // Once: a disk that is full stays so for a while, and training goes on.
            if let Err(error) = written
                && !std::mem::replace(&mut told, true)
            {
                warn!("{error:#}; curves may lack points from here on");
            }
        }
        if let Err(error) = self.flush(&mut events) {
            warn!("{error:#}");
        }
    }

    fn write(&self, point: StreamMetricsResponse, events: &mut EventFile) -> Result<()> {
        let in_events = events.add(&point);
        let mut history = self.lock();
        let in_history = history.add(point.clone());
        // No follower is no error.
        let _ = self.coming.send(point);
        drop(history);
        in_events?;
        Ok(in_history?)
    }

    fn flush(&self, events: &mut EventFile) -> Result<()> {
        events.flush()?;
        Ok(self.lock().flush()?)
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // A panic while a point is added costs no more than that point.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
