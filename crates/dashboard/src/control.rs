//! The routes that control the job, for operators.

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

/// Largest request body, bytes: a reason is one line.
pub(crate) const MAX_CONTROL_BODY_BYTES: usize = 4096;

/// The body of a control request from the dashboard's page or a tool. Extracting it checks the headers, so every
/// handler here takes it as an argument.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ControlRequest {
    /// Reason, as text; used by calls that have one.
    reason: String,
}

impl<S: Send + Sync> FromRequest<S> for ControlRequest {
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

/// The request is accepted; its result appears in the status and in the events.
#[derive(Serialize)]
pub(crate) struct Accepted {}

type ControlResult = Result<(StatusCode, Json<Accepted>), Refusal>;

const ACCEPTED: (StatusCode, Json<Accepted>) = (StatusCode::ACCEPTED, Json(Accepted {}));

pub(crate) async fn checkpoint<S: JobService>(
    State(jobs): State<Arc<S>>,
    _: ControlRequest,
) -> ControlResult {
    jobs.trigger_checkpoint(tonic::Request::new(v1::TriggerCheckpointRequest {})).await?;
    Ok(ACCEPTED)
}

pub(crate) async fn drain<S: JobService>(
    State(jobs): State<Arc<S>>,
    request: ControlRequest,
) -> ControlResult {
    jobs.drain(tonic::Request::new(v1::DrainRequest { reason: request.reason })).await?;
    Ok(ACCEPTED)
}

pub(crate) async fn pause<S: JobService>(
    State(jobs): State<Arc<S>>,
    request: ControlRequest,
) -> ControlResult {
    jobs.pause(tonic::Request::new(v1::PauseRequest { reason: request.reason })).await?;
    Ok(ACCEPTED)
}

pub(crate) async fn resume<S: JobService>(
    State(jobs): State<Arc<S>>,
    _: ControlRequest,
) -> ControlResult {
    jobs.resume(tonic::Request::new(v1::ResumeRequest {})).await?;
    Ok(ACCEPTED)
}

pub(crate) async fn stop<S: JobService>(
    State(jobs): State<Arc<S>>,
    _: ControlRequest,
) -> ControlResult {
    jobs.stop(tonic::Request::new(v1::StopRequest {})).await?;
    Ok(ACCEPTED)
}
