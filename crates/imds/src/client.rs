//! Client of the instance metadata service (IMDSv2).
//!
//! Each request opens a new connection, because EC2 closes the connection after every response.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use http_body_util::{BodyExt, Empty};
use hyper::{
    Method, Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{HOST, HeaderMap, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use crate::Settings;

const TOKEN_PATH: &str = "/latest/api/token";
const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-aws-ec2-metadata-token");
const TOKEN_TTL_HEADER: HeaderName =
    HeaderName::from_static("x-aws-ec2-metadata-token-ttl-seconds");

/// Requested lifetime of a token, in seconds: the maximum that AWS allows.
const TOKEN_TTL_SECONDS: u64 = 21_600;

/// Maximum number of bytes that are read of a response body.
const MAX_BODY_BYTES: usize = 64 * 1024;

/// Session token that the service requires with every request for a document.
#[derive(Debug)]
pub(crate) struct MetadataToken {
    value: HeaderValue,
    renew_at: Instant,
}

/// A failed request.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {cause}")]
pub(crate) struct RequestError {
    path: &'static str,
    cause: Box<dyn Error + Send + Sync>,
    /// Status of the response, if there was one.
    status: Option<StatusCode>,
}

struct Response {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl MetadataToken {
    fn new(response: &Response, now: Instant) -> Option<Self> {
        let mut value = HeaderValue::from_bytes(response.body.trim_ascii()).ok()?;
        value.set_sensitive(true);
        let ttl =
            response.headers.get(TOKEN_TTL_HEADER).and_then(|ttl| ttl.to_str().ok()?.parse().ok());
        let ttl = Duration::from_secs(ttl.unwrap_or(TOKEN_TTL_SECONDS).min(TOKEN_TTL_SECONDS));
        let renew_at = now + ttl - (ttl / 10).min(Duration::from_secs(60));
        (!value.is_empty()).then_some(Self { value, renew_at })
    }

    /// Whether it can still be used: false shortly before it expires.
    pub(crate) fn is_valid(&self, now: Instant) -> bool {
        now < self.renew_at
    }
}

impl RequestError {
    fn refused(path: &'static str, status: StatusCode) -> Self {
        Self { path, cause: format!("answered {status}").into(), status: Some(status) }
    }

    /// Whether the service refused the token, so that a new one may help.
    pub(crate) fn is_unauthorized(&self) -> bool {
        self.status == Some(StatusCode::UNAUTHORIZED)
    }

    /// Whether the error came from a service like EC2's. A service that issues no tokens belongs to another cloud or is
    /// turned off; an overloaded one may be EC2's.
    pub(crate) fn is_from_service(&self) -> bool {
        let is_overloaded = |status: StatusCode| status.is_server_error() || status == 429;
        self.path != TOKEN_PATH || self.status.is_some_and(is_overloaded)
    }
}

/// Requests a token.
pub(crate) async fn token(settings: &Settings) -> Result<MetadataToken, RequestError> {
    let now = Instant::now();
    let ttl = (TOKEN_TTL_HEADER, HeaderValue::from(TOKEN_TTL_SECONDS));
    let response = send(settings, Method::PUT, TOKEN_PATH, ttl).await?;
    let token =
        if response.status == StatusCode::OK { MetadataToken::new(&response, now) } else { None };
    token.ok_or_else(|| RequestError::refused(TOKEN_PATH, response.status))
}

/// Requests a document; `None` if it does not exist. At most [`MAX_BODY_BYTES`] are read.
pub(crate) async fn get(
    settings: &Settings,
    path: &'static str,
    token: &MetadataToken,
) -> Result<Option<Vec<u8>>, RequestError> {
    let response = send(settings, Method::GET, path, (TOKEN_HEADER, token.value.clone())).await?;
    match response.status {
        StatusCode::OK => Ok(Some(response.body)),
        StatusCode::NOT_FOUND => Ok(None),
        status => Err(RequestError::refused(path, status)),
    }
}

async fn send(
    settings: &Settings,
    method: Method,
    path: &'static str,
    header: (HeaderName, HeaderValue),
) -> Result<Response, RequestError> {
    let response =
        timeout(settings.timeout, exchange(&settings.address, method, path, header)).await;
    let late = || format!("no answer within {} ms", settings.timeout.as_millis()).into();
    let response = response.unwrap_or_else(|_| Err(late()));
    response.map_err(|cause| RequestError { path, cause, status: None })
}

async fn exchange(
    address: &str,
    method: Method,
    path: &'static str,
    (name, value): (HeaderName, HeaderValue),
) -> Result<Response, Box<dyn Error + Send + Sync>> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, address)
        .header(name, value)
        .body(Empty::<Bytes>::new())?;
    let socket = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    // The task ends when the sender and the body are dropped, even after a timeout.
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let (head, mut rest) = response.into_parts();
    let mut body = Vec::new();
    while body.len() < MAX_BODY_BYTES
        && let Some(frame) = rest.frame().await
    {
        if let Ok(data) = frame?.into_data() {
            body.extend_from_slice(&data);
        }
    }
    body.truncate(MAX_BODY_BYTES);
    Ok(Response { status: head.status, headers: head.headers, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(body: &str, ttl: Option<&str>) -> Response {
        let mut headers = HeaderMap::new();
        if let Some(ttl) = ttl {
            headers.insert(TOKEN_TTL_HEADER, ttl.parse().unwrap());
        }
        Response { status: StatusCode::OK, headers, body: body.into() }
    }

    #[test]
    fn token_is_valid_until_shortly_before_it_expires() {
        let now = Instant::now();
        let seconds = |seconds| now + Duration::from_secs(seconds);
        for (ttl, good, bad) in [
            (Some("21600"), 21_539, 21_540),
            (Some("20"), 17, 18),
            (None, 21_539, 21_540),
            (Some("soon"), 21_539, 21_540),
            (Some("18446744073709551615"), 21_539, 21_540),
        ] {
            let token = MetadataToken::new(&response("AQAEAA==\n", ttl), now).unwrap();
            assert!(token.is_valid(seconds(good)) && !token.is_valid(seconds(bad)), "{ttl:?}");
        }
    }

    #[test]
    fn error_page_is_not_a_token_and_debug_output_hides_the_token() {
        let now = Instant::now();
        assert!(MetadataToken::new(&response("", None), now).is_none());
        assert!(MetadataToken::new(&response("<html>\n<body>", None), now).is_none());
        let token = MetadataToken::new(&response("AQAEAA==", None), now).unwrap();
        assert!(!format!("{token:?}").contains("AQAEAA"));
    }
}
