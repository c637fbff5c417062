//! Records a profile for a user: asks the ranks, waits until each has written its part to the store, and sends the parts.

use std::sync::Arc;

use baton_checkpoint::Store;
use baton_job::engine::JobEventKind;
use baton_proto::v1::RecordProfileResponse;
use futures::{Stream, TryStreamExt, stream};
use tokio::sync::broadcast::{self, error::RecvError};
use tonic::Status;

use crate::{
    clock::unix_millis,
    job::{JobInput, UserRequest},
    journal::LoggedEvent,
    served::{ServedJob, shutting_down},
};

/// Most bytes of a part in one message; gRPC's limit for a message is 4 MiB.
const PIECE_BYTES: usize = 1 << 20;

/// Asks the ranks for a profile of their next steps; the stream has the parts of all ranks once they are written.
///
/// # Errors
/// No profile can be recorded now.
pub(crate) async fn record(
    served: Arc<ServedJob>,
    steps: u32,
) -> Result<impl Stream<Item = Result<RecordProfileResponse, Status>>, Status> {
    let name = unix_millis().to_string();
    let mut events = served.job.events().ok_or_else(shutting_down)?;
    let ranks = served.job.snapshot().status.ranks.len();
    let request = UserRequest::Profile { name: name.clone(), steps };
    let possible = served.ask(|answer| JobInput::Request { request, answer }).await?;
    possible.map_err(Status::failed_precondition)?;
    let parts = async move {
        wait_until_recorded(&mut events, &name).await?;
        let location = served.store_location.clone();
        let (store, files) = blocking(move || {
            let store = Store::open_existing(&location)?;
            let files = store.profile_files(&name)?;
            Ok((Arc::new(store), files))
        })
        .await?;
        if files.len() != ranks {
            let (found, store) = (files.len(), store.location());
            return Err(Status::data_loss(format!(
                "{found} parts of {ranks} ranks are in {store}: is checkpoint.dir the same folder on all machines?"
            )));
        }
        let parts = (0_u32..).zip(files).map(Ok::<_, Status>);
        let sent = stream::iter(parts).and_then(move |(part, file)| {
            let store = Arc::clone(&store);
            async move {
                let bytes = blocking(move || store.read_profile_file(&file)).await?;
                let chunks: Vec<_> = bytes
                    .chunks(PIECE_BYTES)
                    .map(|data| Ok(RecordProfileResponse { part, data: data.to_vec() }))
                    .collect();
                Ok(stream::iter(chunks))
            }
        });
        Ok::<_, Status>(sent.try_flatten())
    };
    Ok(stream::once(parts).try_flatten())
}

/// Waits for the event that all ranks have written their parts.
async fn wait_until_recorded(
    events: &mut broadcast::Receiver<LoggedEvent>,
    name: &str,
) -> Result<(), Status> {
    let about = format!("profile {name}: ");
    loop {
        let event = match events.recv().await {
            Ok(LoggedEvent { event, .. }) => event,
            Err(RecvError::Closed) => return Err(shutting_down()),
            Err(RecvError::Lagged(_)) => {
                return Err(Status::data_loss(
                    "it is not known whether the profile is recorded: try again",
                ));
            }
        };
        match (event.kind, event.message.strip_prefix(&about)) {
            (JobEventKind::Profiled, Some(_)) => return Ok(()),
            (JobEventKind::ProfileFailed, Some(problem)) => {
                return Err(Status::aborted(format!("no profile: {problem}; try again")));
            }
            (JobEventKind::Ended, _) => {
                let message = event.message;
                return Err(Status::aborted(format!(
                    "no profile: the job ended before it had so many steps: {message}"
                )));
            }
            _ => {}
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, baton_checkpoint::Error> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| Status::internal(error.to_string()))?;
    done.map_err(|error| Status::unavailable(error.to_string()))
}
