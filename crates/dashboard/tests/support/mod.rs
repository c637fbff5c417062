//! A job that does what it is told to, behind the service that the coordinator has.

use std::{
    pin::Pin,
    sync::{Mutex, MutexGuard},
};

use baton_proto::v1::{self, job_service_server::JobService, stream_metrics_response::Metrics};
use tokio::sync::broadcast;
use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream};
use tonic::{Request, Response, Status};

type Told<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What was told so far, and who hears what comes.
pub(crate) struct Tape<T> {
    past: Vec<T>,
    coming: Option<broadcast::Sender<T>>,
}

impl<T: Clone + Send + 'static> Tape<T> {
    fn new() -> Self {
        Self { past: Vec::new(), coming: Some(broadcast::channel(4096).0) }
    }

    pub(crate) fn tell(&mut self, told: T) {
        self.past.push(told.clone());
        if let Some(coming) = &self.coming {
            coming.send(told).ok();
        }
    }

    /// How many were told.
    pub(crate) fn told(&self) -> u64 {
        self.past.len() as u64
    }

    fn stream(&self, follow: bool, wanted: impl Fn(&T) -> bool + Send + 'static) -> Told<T> {
        let past: Vec<_> = self.past.iter().filter(|told| wanted(told)).cloned().collect();
        let past = tokio_stream::iter(past.into_iter().map(Ok));
        match &self.coming {
            Some(coming) if follow => {
                let coming = BroadcastStream::new(coming.subscribe());
                let coming = coming.filter_map(move |told| match told {
                    Ok(told) => wanted(&told).then_some(Ok(told)),
                    Err(lagged) => Some(Err(Status::data_loss(lagged.to_string()))),
                });
                Box::pin(past.chain(coming))
            }
            _ => Box::pin(past),
        }
    }
}

/// Everything about the job.
pub(crate) struct Job {
    pub(crate) status: v1::GetStatusResponse,
    pub(crate) events: Tape<v1::WatchEventsResponse>,
    pub(crate) points: Tape<v1::StreamMetricsResponse>,
    pub(crate) lines: Tape<v1::StreamLogsResponse>,
    pub(crate) checkpoints: Vec<v1::CheckpointEntry>,
    /// What was asked of it, oldest first.
    pub(crate) wishes: Vec<String>,
    /// What every call is answered with, if it is to fail.
    pub(crate) failure: Option<Status>,
}

/// The service.
pub(crate) struct Fake(Mutex<Job>);

impl Fake {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Job {
            status: v1::GetStatusResponse::default(),
            events: Tape::new(),
            points: Tape::new(),
            lines: Tape::new(),
            checkpoints: Vec::new(),
            wishes: Vec::new(),
            failure: None,
        }))
    }

    pub(crate) fn job(&self) -> MutexGuard<'_, Job> {
        self.0.lock().unwrap()
    }

    fn asked(&self) -> Result<MutexGuard<'_, Job>, Status> {
        let job = self.job();
        job.failure.clone().map_or(Ok(job), Err)
    }

    fn wish<T: Default>(&self, wish: String) -> Result<Response<T>, Status> {
        self.asked()?.wishes.push(wish);
        Ok(Response::new(T::default()))
    }
}

impl Job {
    /// Ends the streams, as a coordinator that goes down does.
    pub(crate) fn hang_up(&mut self) {
        (self.events.coming, self.points.coming, self.lines.coming) = (None, None, None);
    }
}

/// Numbers of an update.
pub(crate) fn update(unix_millis: u64, step: u64) -> v1::StreamMetricsResponse {
    let step = v1::Step { step, ..Default::default() };
    v1::StreamMetricsResponse { unix_millis, generation: 1, metrics: Some(Metrics::Step(step)) }
}

/// An event.
pub(crate) fn event(id: u64, message: &str) -> v1::WatchEventsResponse {
    v1::WatchEventsResponse { id, unix_millis: 1, message: message.into(), ..Default::default() }
}

/// A line of a rank.
pub(crate) fn line(rank: u32, line: &str) -> v1::StreamLogsResponse {
    v1::StreamLogsResponse {
        unix_millis: 1,
        node_id: "node-0".into(),
        local_rank: Some(rank),
        rank: Some(rank),
        line: line.into(),
        left_out: 0,
    }
}

#[tonic::async_trait]
impl JobService for Fake {
    type WatchEventsStream = Told<v1::WatchEventsResponse>;
    type StreamMetricsStream = Told<v1::StreamMetricsResponse>;
    type StreamLogsStream = Told<v1::StreamLogsResponse>;

    async fn get_status(
        &self,
        _: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(self.asked()?.status.clone()))
    }

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let v1::WatchEventsRequest { after_id: after, past_only } = request.into_inner();
        let job = self.asked()?;
        if after > job.events.past.last().map_or(0, |event| event.id) {
            return Err(Status::out_of_range("no event has got that far"));
        }
        Ok(Response::new(job.events.stream(!past_only, move |event| event.id > after)))
    }

    async fn stream_metrics(
        &self,
        request: Request<v1::StreamMetricsRequest>,
    ) -> Result<Response<Self::StreamMetricsStream>, Status> {
        let v1::StreamMetricsRequest { after_unix_millis: after, follow } = request.into_inner();
        let points = &self.asked()?.points;
        Ok(Response::new(points.stream(follow, move |point| point.unix_millis > after)))
    }

    async fn stream_logs(
        &self,
        request: Request<v1::StreamLogsRequest>,
    ) -> Result<Response<Self::StreamLogsStream>, Status> {
        let v1::StreamLogsRequest { ranks, all_sources, tail, follow } = request.into_inner();
        let wanted = move |line: &v1::StreamLogsResponse| match line.rank {
            Some(rank) => ranks.is_empty() || ranks.contains(&rank),
            None => all_sources,
        };
        let lines = &self.asked()?.lines;
        let all = lines.past.iter().filter(|line| wanted(line)).count();
        let skipped = if tail == 0 { 0 } else { all.saturating_sub(tail as usize) };
        Ok(Response::new(Box::pin(lines.stream(follow, wanted).skip(skipped))))
    }

    async fn list_checkpoints(
        &self,
        _: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let checkpoints = self.asked()?.checkpoints.clone();
        Ok(Response::new(v1::ListCheckpointsResponse { checkpoints }))
    }

    async fn get_recipe(
        &self,
        _: Request<v1::GetRecipeRequest>,
    ) -> Result<Response<v1::GetRecipeResponse>, Status> {
        let name = self.asked()?.status.name.clone();
        let (toml, json) = ("[train]\nepochs = 16\n".into(), r#"{"train":{"epochs":16}}"#.into());
        Ok(Response::new(v1::GetRecipeResponse { name, toml, json, hash: "c0ffee".into() }))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.wish(format!("drain {}", request.into_inner().reason))
    }

    async fn trigger_checkpoint(
        &self,
        _: Request<v1::TriggerCheckpointRequest>,
    ) -> Result<Response<v1::TriggerCheckpointResponse>, Status> {
        self.wish("checkpoint".into())
    }

    async fn stop(
        &self,
        _: Request<v1::StopRequest>,
    ) -> Result<Response<v1::StopResponse>, Status> {
        self.wish("stop".into())
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::PauseResponse>, Status> {
        self.wish(format!("pause {}", request.into_inner().reason))
    }

    async fn resume(
        &self,
        _: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        self.wish("resume".into())
    }

    async fn submit_job(
        &self,
        _: Request<v1::SubmitJobRequest>,
    ) -> Result<Response<v1::SubmitJobResponse>, Status> {
        self.wish("submit".into())
    }
}
