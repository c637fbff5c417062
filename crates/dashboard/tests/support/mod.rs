//! A fake job with the coordinator's service.

use std::{
    pin::Pin,
    sync::{Mutex, MutexGuard},
};

use baton_proto::v1::{self, job_service_server::JobService, stream_metrics_response::Metrics};
use tokio::sync::broadcast;
use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream};
use tonic::{Request, Response, Status};

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Past messages, and the channel for new ones.
pub(crate) struct Channel<T> {
    past: Vec<T>,
    coming: Option<broadcast::Sender<T>>,
}

impl<T: Clone + Send + 'static> Channel<T> {
    fn new() -> Self {
        Self { past: Vec::new(), coming: Some(broadcast::channel(4096).0) }
    }

    pub(crate) fn add(&mut self, message: T) {
        self.past.push(message.clone());
        if let Some(coming) = &self.coming {
            coming.send(message).ok();
        }
    }

    /// Number of messages so far.
    pub(crate) fn count(&self) -> u64 {
        self.past.len() as u64
    }

    fn stream(
        &self,
        follow: bool,
        is_selected: impl Fn(&T) -> bool + Send + 'static,
    ) -> ResponseStream<T> {
        let past: Vec<_> =
            self.past.iter().filter(|message| is_selected(message)).cloned().collect();
        let past = tokio_stream::iter(past.into_iter().map(Ok));
        match &self.coming {
            Some(coming) if follow => {
                let coming = BroadcastStream::new(coming.subscribe());
                let coming = coming.filter_map(move |message| match message {
                    Ok(message) => is_selected(&message).then_some(Ok(message)),
                    Err(lagged) => Some(Err(Status::data_loss(lagged.to_string()))),
                });
                Box::pin(past.chain(coming))
            }
            _ => Box::pin(past),
        }
    }
}

/// State of the fake job.
pub(crate) struct Job {
    pub(crate) status: v1::GetStatusResponse,
    pub(crate) events: Channel<v1::WatchEventsResponse>,
    pub(crate) points: Channel<v1::StreamMetricsResponse>,
    pub(crate) lines: Channel<v1::StreamLogsResponse>,
    pub(crate) checkpoints: Vec<v1::CheckpointEntry>,
    /// Control requests so far, oldest first.
    pub(crate) requests: Vec<String>,
    /// If set, every call fails with this error.
    pub(crate) failure: Option<Status>,
}

/// The service.
pub(crate) struct Fake(Mutex<Job>);

impl Fake {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Job {
            status: v1::GetStatusResponse::default(),
            events: Channel::new(),
            points: Channel::new(),
            lines: Channel::new(),
            checkpoints: Vec::new(),
            requests: Vec::new(),
            failure: None,
        }))
    }

    pub(crate) fn job(&self) -> MutexGuard<'_, Job> {
        self.0.lock().unwrap()
    }

    fn available_job(&self) -> Result<MutexGuard<'_, Job>, Status> {
        let job = self.job();
        job.failure.clone().map_or(Ok(job), Err)
    }

    fn record<T: Default>(&self, request: String) -> Result<Response<T>, Status> {
        self.available_job()?.requests.push(request);
        Ok(Response::new(T::default()))
    }
}

impl Job {
    /// Ends the streams, like a coordinator that shuts down.
    pub(crate) fn disconnect(&mut self) {
        (self.events.coming, self.points.coming, self.lines.coming) = (None, None, None);
    }
}

/// The metric point of a step.
pub(crate) fn step_point(unix_millis: u64, step: u64) -> v1::StreamMetricsResponse {
    let step = v1::Step { step, ..Default::default() };
    v1::StreamMetricsResponse {
        unix_millis,
        generation: 1,
        metrics: Some(Metrics::Step(step)),
        ..Default::default()
    }
}

/// An event.
pub(crate) fn event(id: u64, message: &str) -> v1::WatchEventsResponse {
    v1::WatchEventsResponse { id, unix_millis: 1, message: message.into(), ..Default::default() }
}

/// A log line of a rank.
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
    type WatchEventsStream = ResponseStream<v1::WatchEventsResponse>;
    type StreamMetricsStream = ResponseStream<v1::StreamMetricsResponse>;
    type StreamLogsStream = ResponseStream<v1::StreamLogsResponse>;
    type RecordProfileStream = ResponseStream<v1::RecordProfileResponse>;

    async fn get_status(
        &self,
        _: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(self.available_job()?.status.clone()))
    }

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let v1::WatchEventsRequest { after_id: after, past_only } = request.into_inner();
        let job = self.available_job()?;
        if after > job.events.past.last().map_or(0, |event| event.id) {
            return Err(Status::out_of_range("there is no event with this id"));
        }
        Ok(Response::new(job.events.stream(!past_only, move |event| event.id > after)))
    }

    async fn stream_metrics(
        &self,
        request: Request<v1::StreamMetricsRequest>,
    ) -> Result<Response<Self::StreamMetricsStream>, Status> {
        let v1::StreamMetricsRequest { after_unix_millis: after, follow } = request.into_inner();
        let points = &self.available_job()?.points;
        Ok(Response::new(points.stream(follow, move |point| point.unix_millis > after)))
    }

    async fn stream_logs(
        &self,
        request: Request<v1::StreamLogsRequest>,
    ) -> Result<Response<Self::StreamLogsStream>, Status> {
        let v1::StreamLogsRequest { ranks, all_sources, tail, follow } = request.into_inner();
        let is_selected = move |line: &v1::StreamLogsResponse| match line.rank {
            Some(rank) => ranks.is_empty() || ranks.contains(&rank),
            None => all_sources,
        };
        let lines = &self.available_job()?.lines;
        let all = lines.past.iter().filter(|line| is_selected(line)).count();
        let skipped = if tail == 0 { 0 } else { all.saturating_sub(tail as usize) };
        Ok(Response::new(Box::pin(lines.stream(follow, is_selected).skip(skipped))))
    }

    async fn list_checkpoints(
        &self,
        _: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let checkpoints = self.available_job()?.checkpoints.clone();
        Ok(Response::new(v1::ListCheckpointsResponse { checkpoints }))
    }

    async fn get_recipe(
        &self,
        _: Request<v1::GetRecipeRequest>,
    ) -> Result<Response<v1::GetRecipeResponse>, Status> {
        let name = self.available_job()?.status.name.clone();
        let (toml, json) = ("[train]\nepochs = 16\n".into(), r#"{"train":{"epochs":16}}"#.into());
        Ok(Response::new(v1::GetRecipeResponse { name, toml, json, hash: "c0ffee".into() }))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.record(format!("drain {}", request.into_inner().reason))
    }

    async fn trigger_checkpoint(
        &self,
        _: Request<v1::TriggerCheckpointRequest>,
    ) -> Result<Response<v1::TriggerCheckpointResponse>, Status> {
        self.record("checkpoint".into())
    }

    async fn stop(
        &self,
        _: Request<v1::StopRequest>,
    ) -> Result<Response<v1::StopResponse>, Status> {
        self.record("stop".into())
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::PauseResponse>, Status> {
        self.record(format!("pause {}", request.into_inner().reason))
    }

    async fn resume(
        &self,
        _: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        self.record("resume".into())
    }

    async fn record_profile(
        &self,
        _: Request<v1::RecordProfileRequest>,
    ) -> Result<Response<Self::RecordProfileStream>, Status> {
        Err(Status::unimplemented("the dashboard records no profile"))
    }

    async fn submit_job(
        &self,
        _: Request<v1::SubmitJobRequest>,
    ) -> Result<Response<v1::SubmitJobResponse>, Status> {
        self.record("submit".into())
    }
}
