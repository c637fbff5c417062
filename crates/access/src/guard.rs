//! Refuses calls without the right token, before any handler sees them.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::{Either, Ready, ready};
use http::{
    Request, Response,
    header::{AUTHORIZATION, ORIGIN},
};
use tonic::{Status, body::Body};
use tower_layer::Layer;
use tower_service::Service;

use crate::{
    Tokens,
    role::{Need, is_web, need_of},
};

/// How a refusal looks to a browser.
type WebRefusal = fn(Status) -> Response<Body>;

/// Around all services of a coordinator. Without tokens it lets everybody through, but for web pages that call gRPC:
/// a browser would let any page do that which borrows this machine's address (DNS rebinding).
#[derive(Clone, Debug)]
pub struct GuardLayer {
    tokens: Option<Arc<Tokens>>,
    web_refusal: WebRefusal,
}

impl GuardLayer {
    /// Lets through who has one of `tokens`; everybody, if there are none. Who asks for a page, or for what it shows, is
    /// refused with `web_refusal`.
    #[must_use]
    pub fn new(tokens: Option<Tokens>, web_refusal: WebRefusal) -> Self {
        Self { tokens: tokens.map(Arc::new), web_refusal }
    }
}

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;

    fn layer(&self, inner: S) -> Guard<S> {
        Guard { layer: self.clone(), inner }
    }
}

/// A service behind a [`GuardLayer`].
#[derive(Clone, Debug)]
pub struct Guard<S> {
    layer: GuardLayer,
    inner: S,
}

impl<S, B> Service<Request<B>> for Guard<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let path = request.uri().path();
        let is_web = is_web(path);
        let checked = match &self.layer.tokens {
            _ if !is_web && request.headers().contains_key(ORIGIN) => {
                Err(Status::permission_denied("a web page must not call this"))
            }
            Some(tokens) => {
                let authorization = request.headers().get(AUTHORIZATION);
                let authorization = authorization.and_then(|value| value.to_str().ok());
                check(tokens, path, authorization)
            }
            None => Ok(()),
        };
        match checked {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) if is_web => Either::Right(ready(Ok((self.layer.web_refusal)(status)))),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

/// Whether this call is allowed to who sends this header.
fn check(tokens: &Tokens, path: &str, authorization: Option<&str>) -> Result<(), Status> {
    let Need::Role(needed) = need_of(path) else { return Ok(()) };
    let Some(authorization) = authorization else {
        return Err(Status::unauthenticated(format!(
            "this coordinator wants a token of role {needed}: set BATON_TOKEN_FILE, or BATON_TOKEN"
        )));
    };
    let roles = tokens.roles_of(authorization);
    if roles.is_empty() {
        return Err(Status::unauthenticated("this coordinator does not know that token"));
    }
    match roles.iter().any(|role| role.covers(needed)) {
        true => Ok(()),
        false => Err(Status::permission_denied(format!(
            "this needs a token of role {needed}, and yours is that of a {}",
            roles[0]
        ))),
    }
}
