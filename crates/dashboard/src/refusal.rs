//! Error responses over HTTP.

use axum::{
    Json,
    body::Body,
    extract::rejection::{BytesRejection, QueryRejection},
    http::{HeaderValue, StatusCode, header::WWW_AUTHENTICATE},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tonic::{Code, Status};

/// An error response of a handler.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    /// The problem, in one line.
    pub(crate) error: String,
}

/// The error response for the layer that checks tokens. This layer comes before the routes, so it also answers requests
/// to paths of the dashboard.
#[must_use]
pub fn refusal(status: Status) -> http::Response<Body> {
    Refusal::from(status).into_response()
}

impl Refusal {
    pub(crate) fn forbidden(error: impl Into<String>) -> Self {
        Self { status: StatusCode::FORBIDDEN, error: error.into() }
    }
}

#[derive(Serialize)]
struct ErrorJson {
    error: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self { status, error } = self;
        let mut response = (status, Json(ErrorJson { error })).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status: http_status(status.code()), error: status.message().to_owned() }
    }
}

impl From<QueryRejection> for Refusal {
    fn from(rejection: QueryRejection) -> Self {
        Self { status: rejection.status(), error: rejection.body_text() }
    }
}

impl From<BytesRejection> for Refusal {
    fn from(rejection: BytesRejection) -> Self {
        Self { status: rejection.status(), error: rejection.body_text() }
    }
}

/// Maps gRPC codes to HTTP codes.
fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable | Code::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Internal | Code::Unknown | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
