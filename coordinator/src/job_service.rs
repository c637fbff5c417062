//! gRPC for people and their tools.

use std::sync::Arc;

use baton_checkpoint::{Entry, EntryState, Store};
use baton_job::{JobSpec, Time, engine::Event};
use baton_proto::v1::{self, job_service_server::JobService};
use tokio::sync::oneshot;
use tokio_stream::{Stream, StreamExt, wrappers::BroadcastStream};
use tonic::{Request, Response, Status};

use crate::{
    job::{Handle, Input, Snapshot},
    journal::LoggedEvent,
};

/// The service.
pub(crate) struct Jobs {
    pub(crate) job: Handle,
    pub(crate) job_id: String,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) store_location: String,
}

type Events = std::pin::Pin<Box<dyn Stream<Item = Result<v1::WatchEventsResponse, Status>> + Send>>;

#[tonic::async_trait]
impl JobService for Jobs {
    type WatchEventsStream = Events;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(self.status(&self.job.snapshot())))
    }

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let after = request.into_inner().after_id;
        let watch =
            self.ask(|answer| Input::Watch { after, answer }).await?.map_err(Status::internal)?;
        let seen = watch.past.last().map_or(after, |event| event.id);
        let past = tokio_stream::iter(watch.past.into_iter().map(|event| Ok(wire(event))));
        let coming = BroadcastStream::new(watch.coming).filter_map(move |event| match event {
            Ok(event) if event.id <= seen => None,
            Ok(event) => Some(Ok(wire(event))),
            Err(lagged) => Some(Err(Status::data_loss(format!(
                "{lagged}; watch again with after_id set to the last id you saw"
            )))),
        });
        Ok(Response::new(Box::pin(past.chain(coming))))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        let reason = match request.into_inner().reason {
            reason if reason.is_empty() => "asked by a user".to_owned(),
            reason => reason,
        };
        self.queue(Event::Drain { reason }.into())?;
        Ok(Response::new(v1::DrainResponse {}))
    }

    async fn trigger_checkpoint(
        &self,
        _request: Request<v1::TriggerCheckpointRequest>,
    ) -> Result<Response<v1::TriggerCheckpointResponse>, Status> {
        self.ask(|answer| Input::Checkpoint { answer })
            .await?
            .map_err(Status::failed_precondition)?;
        Ok(Response::new(v1::TriggerCheckpointResponse {}))
    }

    async fn stop(
        &self,
        _request: Request<v1::StopRequest>,
    ) -> Result<Response<v1::StopResponse>, Status> {
        self.queue(Event::Stop.into())?;
        Ok(Response::new(v1::StopResponse {}))
    }

    async fn list_checkpoints(
        &self,
        _request: Request<v1::ListCheckpointsRequest>,
    ) -> Result<Response<v1::ListCheckpointsResponse>, Status> {
        let location = self.store_location.clone();
        let entries = tokio::task::spawn_blocking(move || Store::open_existing(&location)?.list())
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let checkpoints = entries.into_iter().map(checkpoint_entry).collect();
        Ok(Response::new(v1::ListCheckpointsResponse { checkpoints }))
    }
}

fn checkpoint_entry(entry: Entry) -> v1::CheckpointEntry {
    let (manifest, damage) = match entry.state {
        EntryState::Whole(manifest) => (Some(manifest), String::new()),
        EntryState::Damaged(damage) => (None, damage),
        EntryState::Unfinished => (None, "its save was never finished".to_owned()),
    };
    v1::CheckpointEntry {
        name: entry.name,
        whole: manifest.is_some(),
        damage,
        epoch: manifest.as_ref().map_or(0, |manifest| manifest.progress.epoch.0),
        created_unix_seconds: manifest.as_ref().map_or(0, |manifest| manifest.created_unix_seconds),
        checkpoint: manifest.map(|manifest| manifest.to_commit().into()),
    }
}

impl Jobs {
    fn queue(&self, input: Input) -> Result<(), Status> {
        if self.job.send(input) { Ok(()) } else { Err(Status::unavailable("shutting down")) }
    }

    /// Queues a question for the loop and waits for its answer.
    async fn ask<T>(&self, input: impl FnOnce(oneshot::Sender<T>) -> Input) -> Result<T, Status> {
        let (sender, answer) = oneshot::channel();
        self.queue(input(sender))?;
        answer.await.map_err(|_| Status::unavailable("shutting down"))
    }

    fn status(&self, snapshot: &Snapshot) -> v1::GetStatusResponse {
        // The machine's clock as of now, not as of its last event.
        let now: Time = snapshot.now.after(snapshot.taken.elapsed());
        let mut response = baton_proto::status(&snapshot.status, now);
        response.job_id.clone_from(&self.job_id);
        response.name.clone_from(&self.spec.name);
        response.checkpoint_location.clone_from(&self.store_location);
        response.checkpoint_age_seconds = snapshot.saved.map(|saved| saved.elapsed().as_secs_f64());
        response
    }
}

fn wire(event: LoggedEvent) -> v1::WatchEventsResponse {
    let LoggedEvent { id, unix_millis, notice } = event;
    v1::WatchEventsResponse {
        id,
        unix_millis,
        kind: v1::watch_events_response::Kind::from(notice.kind).into(),
        generation: notice.generation.0,
        step: notice.step.map(|step| step.0),
        message: notice.message,
    }
}
