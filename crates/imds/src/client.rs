//! Asking the metadata service, by IMDSv2.
//!
//! Each request has a connection of its own, because EC2 closes it after every answer anyway.

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
const TOKEN: HeaderName = HeaderName::from_static("x-aws-ec2-metadata-token");
const TOKEN_LIFE: HeaderName = HeaderName::from_static("x-aws-ec2-metadata-token-ttl-seconds");

/// How long a token shall live, in seconds: as long as AWS allows.
const LIFE_SECONDS: u64 = 21_600;

/// More than this is not read of any answer.
const LIMIT_BYTES: usize = 64 * 1024;

/// Proves to the service that whoever asks is on the instance.
#[derive(Debug)]
pub(crate) struct Token {
    value: HeaderValue,
    renewal: Instant,
}

/// A request that brought nothing.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {cause}")]
pub(crate) struct Failure {
    path: &'static str,
    cause: Box<dyn Error + Send + Sync>,
    /// If it was answered.
    status: Option<StatusCode>,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Token {
    fn new(answer: &Answer, now: Instant) -> Option<Self> {
        let mut value = HeaderValue::from_bytes(answer.body.trim_ascii()).ok()?;
        value.set_sensitive(true);
        let life = answer.headers.get(TOKEN_LIFE).and_then(|life| life.to_str().ok()?.parse().ok());
        let life = Duration::from_secs(life.unwrap_or(LIFE_SECONDS).min(LIFE_SECONDS));
        let renewal = now + life - (life / 10).min(Duration::from_secs(60));
        (!value.is_empty()).then_some(Self { value, renewal })
    }

    /// Whether it will do for the next requests; otherwise it ends soon.
    pub(crate) fn is_good(&self, now: Instant) -> bool {
        now < self.renewal
    }
}

impl Failure {
    fn refused(path: &'static str, status: StatusCode) -> Self {
        Self { path, cause: format!("answered {status}").into(), status: Some(status) }
    }

    /// Whether a new token may help.
    pub(crate) fn is_unauthorized(&self) -> bool {
        self.status == Some(StatusCode::UNAUTHORIZED)
    }

    /// Whether something like EC2's service is there. One that gives no tokens belongs to another cloud, or
    /// is turned off; one that is overloaded may be EC2's.
    pub(crate) fn is_from_service(&self) -> bool {
        let is_overloaded = |status: StatusCode| status.is_server_error() || status == 429;
        self.path != TOKEN_PATH || self.status.is_some_and(is_overloaded)
    }
}

/// Asks for a token.
pub(crate) async fn token(settings: &Settings) -> Result<Token, Failure> {
    let now = Instant::now();
    let life = (TOKEN_LIFE, HeaderValue::from(LIFE_SECONDS));
    let answer = ask(settings, Method::PUT, TOKEN_PATH, life).await?;
    let token = if answer.status == StatusCode::OK { Token::new(&answer, now) } else { None };
    token.ok_or_else(|| Failure::refused(TOKEN_PATH, answer.status))
}

/// Asks for a document; `None` if there is none. Of a long one only the beginning is read.
pub(crate) async fn get(
    settings: &Settings,
    path: &'static str,
    token: &Token,
) -> Result<Option<Vec<u8>>, Failure> {
    let answer = ask(settings, Method::GET, path, (TOKEN, token.value.clone())).await?;
    match answer.status {
        StatusCode::OK => Ok(Some(answer.body)),
        StatusCode::NOT_FOUND => Ok(None),
        status => Err(Failure::refused(path, status)),
    }
}

async fn ask(
    settings: &Settings,
    method: Method,
    path: &'static str,
    header: (HeaderName, HeaderValue),
) -> Result<Answer, Failure> {
    let answer = timeout(settings.timeout, exchange(&settings.address, method, path, header)).await;
    let late = || format!("no answer within {} ms", settings.timeout.as_millis()).into();
    let answer = answer.unwrap_or_else(|_| Err(late()));
    answer.map_err(|cause| Failure { path, cause, status: None })
}

async fn exchange(
    address: &str,
    method: Method,
    path: &'static str,
    (name, value): (HeaderName, HeaderValue),
) -> Result<Answer, Box<dyn Error + Send + Sync>> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, address)
        .header(name, value)
        .body(Empty::<Bytes>::new())?;
    let socket = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    // It ends with the sender and the body, also if they are given up.
    tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let (head, mut rest) = response.into_parts();
    let mut body = Vec::new();
    while body.len() < LIMIT_BYTES
        && let Some(frame) = rest.frame().await
    {
        if let Ok(data) = frame?.into_data() {
            body.extend_from_slice(&data);
        }
    }
    body.truncate(LIMIT_BYTES);
    Ok(Answer { status: head.status, headers: head.headers, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &str, life: Option<&str>) -> Answer {
        let mut headers = HeaderMap::new();
        if let Some(life) = life {
            headers.insert(TOKEN_LIFE, life.parse().unwrap());
        }
        Answer { status: StatusCode::OK, headers, body: body.into() }
    }

    #[test]
    fn token_is_good_until_shortly_before_its_end() {
        let now = Instant::now();
        let seconds = |seconds| now + Duration::from_secs(seconds);
        for (life, good, bad) in [
            (Some("21600"), 21_539, 21_540),
            (Some("20"), 17, 18),
            (None, 21_539, 21_540),
            (Some("soon"), 21_539, 21_540),
            (Some("18446744073709551615"), 21_539, 21_540),
        ] {
            let token = Token::new(&answer("AQAEAA==\n", life), now).unwrap();
            assert!(token.is_good(seconds(good)) && !token.is_good(seconds(bad)), "{life:?}");
        }
    }

    #[test]
    fn token_is_no_page_and_no_secret_of_the_log() {
        let now = Instant::now();
        assert!(Token::new(&answer("", None), now).is_none());
        assert!(Token::new(&answer("<html>\n<body>", None), now).is_none());
        let token = Token::new(&answer("AQAEAA==", None), now).unwrap();
        assert!(!format!("{token:?}").contains("AQAEAA"));
    }
}
