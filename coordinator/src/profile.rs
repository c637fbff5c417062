//! Records a profile for a user: asks the ranks, waits until each has written its part to the store, and sends the parts.

use std::sync::Arc;

use baton_proto::v1::RecordProfileResponse;
use futures::{Stream, TryStreamExt, stream};
use tonic::Status;

use crate::{
    clock::unix_millis,
    job::JobInput,
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
    let request = |answer| JobInput::Profile { name: name.clone(), steps, answer };
    let begun = served.ask(request).await?;
    let recorded = begun.map_err(Status::failed_precondition)?;
    let parts = async move {
        let recorded = recorded.await.map_err(|_| shutting_down())?;
        let ranks = recorded.map_err(|problem| {
            Status::aborted(format!("the profile is not recorded: {problem}"))
        })?;
        let files = served.in_store(move |store| store.profile_files(&name)).await?;
        if files.len() != ranks as usize {
            let (found, store) = (files.len(), &served.store_location);
            return Err(Status::data_loss(format!(
                "{found} parts of {ranks} ranks are in {store}: is checkpoint.dir the same folder on all machines?"
            )));
        }
        let parts = (0_u32..).zip(files).map(Ok::<_, Status>);
        let sent = stream::iter(parts).and_then(move |(part, file)| {
            let served = Arc::clone(&served);
            async move {
                let bytes = served.in_store(move |store| store.read_profile_file(&file)).await?;
                let piece = |data: &[u8]| Ok(RecordProfileResponse { part, data: data.to_vec() });
                Ok(stream::iter(bytes.chunks(PIECE_BYTES).map(piece).collect::<Vec<_>>()))
            }
        });
        Ok::<_, Status>(sent.try_flatten())
    };
    Ok(stream::once(parts).try_flatten())
}
