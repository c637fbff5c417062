//! The run that a client means. The file `coordinator.json` of a killed coordinator stays in its run folder, and another
//! job may serve at the address in it, so a client that has the address from there also sends the id of the run.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, sync::Arc, time::UNIX_EPOCH};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use tonic::{
    Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
};

use crate::{Bearer, Error};

/// Header with the id of the run that a call is for; a call without it is for any run.
pub const RUN_HEADER: &str = "baton-run";

/// Message of the answer to a call for another run.
pub const OTHER_RUN: &str = "this coordinator serves another run";

/// What tells a run folder from every other one, and from a copy of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    /// Inode number: a copy has another one, but not a folder that was moved or is mounted at several places.
    pub inode: u64,
    /// Id of the run: it stays the same when the coordinator is restarted, so that clients reconnect.
    pub run_id: String,
}

impl RunFolder {
    /// The identity of an existing folder.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(folder)?;
        let inode = metadata.ino();
        // File systems number their inodes alike, and use numbers again, so the number alone is not unique.
        let created = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let run_id = match created {
            Some(created) => format!("{inode}-{}", created.as_nanos()),
            None => format!("{inode}-device-{}", metadata.dev()),
        };
        Ok(Self { inode, run_id })
    }
}

/// Adds the client's token and, if it is known, the id of the run to every call.
#[derive(Clone, Debug)]
pub struct ForRun {
    bearer: Bearer,
    run_id: Option<MetadataValue<Ascii>>,
}

impl ForRun {
    /// Adds this id.
    ///
    /// # Errors
    /// The id is not valid in a header.
    pub fn new(bearer: Bearer, run_id: Option<&str>) -> Result<Self, Error> {
        let run_id = run_id.map(str::parse::<MetadataValue<Ascii>>).transpose();
        let run_id = run_id.map_err(|error| Error(format!("id of the run: {error}")))?;
        Ok(Self { bearer, run_id })
    }
}

impl Interceptor for ForRun {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        if let Some(run_id) = &self.run_id {
            request.metadata_mut().insert(RUN_HEADER, run_id.clone());
        }
        self.bearer.call(request)
    }
}

/// Refuses calls for another run than `run_id`; middleware for [`axum::middleware::from_fn_with_state`].
pub async fn same_run(State(run_id): State<Arc<str>>, request: Request, next: Next) -> Response {
    match request.headers().get(RUN_HEADER) {
        Some(asked) if asked.as_bytes() != run_id.as_bytes() => {
            Status::failed_precondition(OTHER_RUN).into_http()
        }
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_folder_keeps_its_identity_and_a_copy_has_another() {
        let parent = tempfile::tempdir().unwrap();
        let [first, moved, copy] = ["first", "moved", "copy"].map(|name| parent.path().join(name));
        fs::create_dir(&first).unwrap();
        let identity = RunFolder::of(&first).unwrap();
        fs::rename(&first, &moved).unwrap();
        assert_eq!(RunFolder::of(&moved).unwrap(), identity);
        fs::create_dir(&copy).unwrap();
        let of_copy = RunFolder::of(&copy).unwrap();
        assert!(of_copy.inode != identity.inode && of_copy.run_id != identity.run_id);
    }
}
