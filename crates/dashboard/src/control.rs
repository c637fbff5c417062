//! What an operator may do.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    extract::{FromRequest, Request, State},
    http::StatusCode,
};
use baton_proto::v1::{self, job_service_server::JobService};
use serde::{Deserialize, Serialize};

use crate::{refusal::Refusal, same_site};

/// The longest body: a reason is a line.
pub(crate) const MOST_BYTES: usize = 4096;

/// A request to steer, by our own page or by a tool. Every handler here takes one, so that none can forget to check.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Wish {
    /// Why, in words; shown where the call has a place for it.
    reason: String,
}

impl<S: Send + Sync> FromRequest<S> for Wish {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        same_site::check(request.uri(), request.headers())?;
        let body = Bytes::from_request(request, state).await?;
        if body.is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_slice(&body).map_err(|error| Refusal {
            status: StatusCode::BAD_REQUEST,
            error: format!("the body must be empty or {{\"reason\": \"...\"}}: {error}"),
        })
    }
}

/// It will happen; what comes of it is in status and events.
#[derive(Serialize)]
pub(crate) struct Begun {}

type Answer = Result<(StatusCode, Json<Begun>), Refusal>;

const BEGUN: (StatusCode, Json<Begun>) = (StatusCode::ACCEPTED, Json(Begun {}));

pub(crate) async fn checkpoint<S: JobService>(State(jobs): State<Arc<S>>, _: Wish) -> Answer {
    jobs.trigger_checkpoint(tonic::Request::new(v1::TriggerCheckpointRequest {})).await?;
    Ok(BEGUN)
}

pub(crate) async fn drain<S: JobService>(State(jobs): State<Arc<S>>, wish: Wish) -> Answer {
    jobs.drain(tonic::Request::new(v1::DrainRequest { reason: wish.reason })).await?;
    Ok(BEGUN)
}

pub(crate) async fn pause<S: JobService>(State(jobs): State<Arc<S>>, wish: Wish) -> Answer {
    jobs.pause(tonic::Request::new(v1::PauseRequest { reason: wish.reason })).await?;
    Ok(BEGUN)
}

pub(crate) async fn resume<S: JobService>(State(jobs): State<Arc<S>>, _: Wish) -> Answer {
    jobs.resume(tonic::Request::new(v1::ResumeRequest {})).await?;
    Ok(BEGUN)
}

pub(crate) async fn stop<S: JobService>(State(jobs): State<Arc<S>>, _: Wish) -> Answer {
    jobs.stop(tonic::Request::new(v1::StopRequest {})).await?;
    Ok(BEGUN)
}
