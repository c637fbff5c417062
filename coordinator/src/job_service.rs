//! The gRPC service for users and their tools.

use std::sync::Arc;

use baton_checkpoint::{Entry, Store};
use baton_job::{Time, shortened};
use baton_proto::{
    refusal,
    v1::{self, job_service_server::JobService},
};
use baton_recipe::{
    JobSpec,
    spec::{self, Violation},
};
use futures::TryStreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{BroadcastStream, errors::BroadcastStreamRecvError},
};
use tonic::{Request, Response, Status};

use crate::{
    job::{JobInput, UserRequest, WatchError},
    journal::LoggedEvent,
    logs::{LogBuffer, LogFilter},
    profile,
    served::{CurrentJob, ServedJob},
};

/// Most responses that are streamed at the same time. A client that does not read one makes the coordinator keep the
/// past metrics for it, which may be a megabyte.
const MAX_RESPONSE_STREAMS: usize = 256;

/// Implements `JobService`.
#[derive(Clone)]
pub(crate) struct JobApi {
    current: CurrentJob,
    logs: LogBuffer,
    started_unix_seconds: u64,
    /// One permit for each streamed response.
    streams: Arc<Semaphore>,
}

impl JobApi {
    pub(crate) fn new(current: CurrentJob, logs: LogBuffer, started_unix_seconds: u64) -> Self {
        let streams = Arc::new(Semaphore::new(MAX_RESPONSE_STREAMS));
        Self { current, logs, started_unix_seconds, streams }
    }
}

type ResponseStream<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl JobService for JobApi {
    type WatchEventsStream = ResponseStream<v1::WatchEventsResponse>;
    type StreamMetricsStream = ResponseStream<v1::StreamMetricsResponse>;
    type StreamLogsStream = ResponseStream<v1::StreamLogsResponse>;
    type RecordProfileStream = ResponseStream<v1::RecordProfileResponse>;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        let started = self.started_unix_seconds;
        let response = match self.current.get() {
            Some(served) => status(&served, started),
            None => idle(started),
        };
        Ok(Response::new(response))
    }

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let v1::WatchEventsRequest { after_id, past_only } = request.into_inner();
        let permit = self.stream_permit()?;
        let stream = match self.current.get() {
            Some(served) => events(&served, after_id, past_only).await?,
            None if past_only => Box::pin(tokio_stream::empty()),
            None => self
                .wait_for_job(move |served| async move { events(&served, after_id, false).await }),
        };
        Ok(Response::new(counted(stream, permit)))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        self.request(UserRequest::Drain { reason: shown_reason(&request.into_inner().reason) })
            .await?;
        Ok(Response::new(v1::DrainResponse {}))
    }

    async fn trigger_checkpoint(
        &self,
        _request: Request<v1::TriggerCheckpointRequest>,
    ) -> Result<Response<v1::TriggerCheckpointResponse>, Status> {
        self.request(UserRequest::Checkpoint).await?;
        Ok(Response::new(v1::TriggerCheckpointResponse {}))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::PauseResponse>, Status> {
        self.request(UserRequest::Pause { reason: shown_reason(&request.into_inner().reason) })
            .await?;
        Ok(Response::new(v1::PauseResponse {}))
    }

    async fn resume(
        &self,
        _request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::ResumeResponse>, Status> {
        self.request(UserRequest::Resume).await?;
        Ok(Response::new(v1::ResumeResponse {}))
    }

    async fn stop(
        &self,
        _request: Request<v1::StopRequest>,
    ) -> Result<Response<v1::StopResponse>, Status> {
        self.request(UserRequest::Stop).await?;
        Ok(Response::new(v1::StopResponse {}))
    }

    async fn list_checkpoints(
        &self,
        _request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let entries = self.current.job()?.in_store(Store::list).await?;
        let checkpoints = entries.into_iter().map(checkpoint_entry).collect();
        Ok(Response::new(v1::ListCheckpointsResponse { checkpoints }))
    }

    async fn stream_metrics(
        &self,
        request: Request<v1::StreamMetricsRequest>,
    ) -> Result<Response<Self::StreamMetricsStream>, Status> {
        let v1::StreamMetricsRequest { after_unix_millis, follow } = request.into_inner();
        let permit = self.stream_permit()?;
        let stream = match self.current.get() {
            Some(served) => points(&served, after_unix_millis, follow),
            None if follow => self.wait_for_job(move |served| async move {
                Ok(points(&served, after_unix_millis, true))
            }),
            None => Box::pin(tokio_stream::empty()),
        };
        Ok(Response::new(counted(stream, permit)))
    }

    async fn stream_logs(
        &self,
        request: Request<v1::StreamLogsRequest>,
    ) -> Result<Response<Self::StreamLogsStream>, Status> {
        let v1::StreamLogsRequest { ranks, all_sources, tail, follow } = request.into_inner();
        let permit = self.stream_permit()?;
        let filter = LogFilter { ranks, all_sources };
        let tail = usize::try_from(tail).unwrap_or(usize::MAX);
        let lines = self.logs.follow(&filter, tail);
        let past = tokio_stream::iter(lines.past.into_iter().map(|line| Ok((*line).clone())));
        if !follow {
            return Ok(Response::new(counted(Box::pin(past), permit)));
        }
        let mut missed = 0;
        let live = BroadcastStream::new(lines.live).filter_map(move |line| match line {
            Ok(line) if !filter.includes(&line) => None,
            Ok(line) => {
                let mut line = (*line).clone();
                line.left_out = line.left_out.saturating_add(std::mem::take(&mut missed));
                Some(Ok(line))
            }
            Err(BroadcastStreamRecvError::Lagged(lines)) => {
                missed += lines;
                None
            }
        });
        Ok(Response::new(counted(Box::pin(past.chain(live)), permit)))
    }

    async fn get_recipe(
        &self,
        _request: Request<v1::GetRecipeRequest>,
    ) -> Result<Response<v1::GetRecipeResponse>, Status> {
        let served = self.current.job()?;
        let spec = &served.spec;
        Ok(Response::new(v1::GetRecipeResponse {
            name: spec.name.clone(),
            toml: spec.to_toml(),
            json: spec.to_json(),
            hash: spec.recipe_hash(),
        }))
    }

    async fn record_profile(
        &self,
        request: Request<v1::RecordProfileRequest>,
    ) -> Result<Response<Self::RecordProfileStream>, Status> {
        let permit = self.stream_permit()?;
        let parts = profile::record(self.current.job()?, request.into_inner().steps).await?;
        Ok(Response::new(counted(Box::pin(parts), permit)))
    }

    async fn submit_job(
        &self,
        request: Request<v1::SubmitJobRequest>,
    ) -> Result<Response<v1::SubmitJobResponse>, Status> {
        let v1::SubmitJobRequest { recipe, overrides } = request.into_inner();
        let spec = JobSpec::from_toml(&recipe, &overrides);
        let spec = spec.map_err(invalid_recipe)?;
        let served = self.current.submit(spec.to_toml(), spec).await?;
        let (job_id, name) = (served.job_id.to_string(), served.spec.name.clone());
        Ok(Response::new(v1::SubmitJobResponse { job_id, name }))
    }
}

/// `stream`, which keeps its permit until it is dropped.
fn counted<T: 'static>(
    stream: ResponseStream<T>,
    permit: OwnedSemaphorePermit,
) -> ResponseStream<T> {
    Box::pin(stream.map(move |item| {
        let _held = &permit;
        item
    }))
}

impl JobApi {
    /// Counts a streamed response, unless there are too many.
    fn stream_permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_RESPONSE_STREAMS} streams are open, the most that a coordinator serves at once: close some, or try again \
                 later"
            ))
        })
    }

    /// A stream that waits until there is a job and then opens the job's stream.
    fn wait_for_job<T, F>(
        &self,
        open: impl FnOnce(Arc<ServedJob>) -> F + Send + 'static,
    ) -> ResponseStream<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<ResponseStream<T>, Status>> + Send + 'static,
    {
        let current = self.current.clone();
        let opened = async move { open(current.wait().await?).await };
        Box::pin(futures::stream::once(opened).try_flatten())
    }

    async fn request(&self, request: UserRequest) -> Result<(), Status> {
        let possible =
            self.current.job()?.ask(|answer| JobInput::Request { request, answer }).await?;
        possible.map_err(Status::failed_precondition)
    }
}

/// The error response for an invalid recipe, with all its violations.
fn invalid_recipe(error: spec::Error) -> Status {
    let message = error.to_string();
    let fields = match error {
        spec::Error::Invalid(violations) => violations
            .into_iter()
            .map(|Violation { field, value, rule }| {
                (field.into_owned(), format!("is {value}: {rule}"))
            })
            .collect(),
        spec::Error::Override(_) => vec![("overrides".to_owned(), message.clone())],
        spec::Error::Unreadable(_)
        | spec::Error::Text { .. }
        | spec::Error::Json(_)
        | spec::Error::Saved(_)
        | spec::Error::SavedNotFinite(_) => {
            vec![("recipe".to_owned(), message.clone())]
        }
    };
    refusal::invalid(message, fields)
}

/// A job's events after an id and, unless `past_only`, the following ones.
async fn events(
    served: &ServedJob,
    after: u64,
    past_only: bool,
) -> Result<ResponseStream<v1::WatchEventsResponse>, Status> {
    let watch = served.ask(|answer| JobInput::Watch { after, answer }).await?;
    let watch = watch.map_err(|error| match error {
        WatchError::OutOfRange { newest } => {
            let problem =
                format!("this job has no event {after}; its newest is {newest}: begin with 0");
            refusal::out_of_range("after_id", &problem)
        }
        WatchError::Unreadable(problem) => Status::internal(problem),
    })?;
    let seen = watch.past.last().map_or(after, |event| event.id);
    let past = tokio_stream::iter(watch.past.into_iter().map(|event| Ok(event_message(event))));
    if past_only {
        return Ok(Box::pin(past));
    }
    let live = BroadcastStream::new(watch.live).filter_map(move |event| match event {
        Ok(event) if event.id <= seen => None,
        Ok(event) => Some(Ok(event_message(event))),
        Err(BroadcastStreamRecvError::Lagged(missed)) => Some(Err(Status::data_loss(format!(
            "{missed} events were missed; watch again with after_id set to the last id you received"
        )))),
    });
    Ok(Box::pin(past.chain(live)))
}

/// A job's metric points later than a time and, if `follow`, the following ones.
fn points(
    served: &ServedJob,
    after: u64,
    follow: bool,
) -> ResponseStream<v1::StreamMetricsResponse> {
    let metrics = served.metrics.follow(after);
    let past = tokio_stream::iter(metrics.past.into_iter().map(Ok));
    if !follow {
        return Box::pin(past);
    }
    let live = BroadcastStream::new(metrics.live).map(|point| {
        point.map_err(|BroadcastStreamRecvError::Lagged(missed)| {
            Status::data_loss(format!(
                "{missed} points were missed; call again with after_unix_millis of the last point you received"
            ))
        })
    });
    Box::pin(past.chain(live))
}

/// A user's reason as one line of limited length: it is stored, and shown to people.
fn shown_reason(reason: &str) -> String {
    const MAX_REASON_CHARS: usize = 300;
    let line = reason.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() {
        "requested by a user".to_owned()
    } else {
        shortened(&line, MAX_REASON_CHARS)
    }
}

fn idle(coordinator_started_unix_seconds: u64) -> v1::GetStatusResponse {
    v1::GetStatusResponse {
        phase: v1::get_status_response::Phase::Idle.into(),
        reason: "waiting for a job: submit one with `baton submit RECIPE`".to_owned(),
        coordinator_started_unix_seconds,
        coordinator_version: baton_build_info::VERSION.to_owned(),
        ..v1::GetStatusResponse::default()
    }
}

/// The current status of the job.
pub(crate) fn status(served: &ServedJob, started_unix_seconds: u64) -> v1::GetStatusResponse {
    let snapshot = served.job.snapshot();
    // The engine's clock as of now, not as of its last event.
    let now: Time = snapshot.now.after(snapshot.taken.elapsed());
    let job = baton_proto::JobInfo {
        id: served.job_id,
        name: &served.spec.name,
        checkpoint_location: &served.store_location,
        checkpoint_age_seconds: snapshot.saved.map(|saved| saved.elapsed().as_secs_f64()),
        coordinator_started_unix_seconds: started_unix_seconds,
        coordinator_version: baton_build_info::VERSION,
    };
    baton_proto::status(&snapshot.status, now, job)
}

fn checkpoint_entry(entry: Entry) -> v1::CheckpointEntry {
    let damage = entry.state.problem().unwrap_or_default();
    let manifest = entry.state.manifest();
    v1::CheckpointEntry {
        name: entry.name,
        complete: manifest.is_some(),
        damage,
        epoch: manifest.map_or(0, |manifest| manifest.progress.epoch.0),
        created_unix_seconds: manifest.map_or(0, |manifest| manifest.created_unix_seconds),
        checkpoint: manifest.map(|manifest| manifest.to_commit().into()),
    }
}

/// The message for an event.
pub(crate) fn event_message(event: LoggedEvent) -> v1::WatchEventsResponse {
    let LoggedEvent { id, unix_millis, event } = event;
    v1::WatchEventsResponse {
        id,
        unix_millis,
        kind: v1::watch_events_response::Kind::from(event.kind).into(),
        generation: event.generation.0,
        step: event.step.map(|step| step.0),
        message: event.message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_limited_length() {
        assert_eq!(shown_reason("lunch\n 00:00 forged\tline "), "lunch 00:00 forged line");
        assert_eq!(shown_reason(" \n"), "requested by a user");
        assert_eq!(shown_reason(&"x".repeat(60_000)).chars().count(), 301);
    }
}
