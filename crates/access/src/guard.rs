//! Refuses calls without the right token, before any handler sees them.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::{Either, Ready, ready};
use http::{Request, Response, header::AUTHORIZATION};
use tonic::{Status, body::Body};
use tower_layer::Layer;
use tower_service::Service;

use crate::{
    Tokens,
    role::{Need, need_of},
};

/// Around all services of a coordinator. Without tokens it lets everybody through.
#[derive(Clone, Debug)]
pub struct GuardLayer(Option<Arc<Tokens>>);

impl GuardLayer {
    /// Lets through who has one of `tokens`; everybody, if there are none.
    #[must_use]
    pub fn new(tokens: Option<Tokens>) -> Self {
        Self(tokens.map(Arc::new))
    }
}

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;

    fn layer(&self, inner: S) -> Guard<S> {
        Guard { tokens: self.0.clone(), inner }
    }
}

/// A service behind a [`GuardLayer`].
#[derive(Clone, Debug)]
pub struct Guard<S> {
    tokens: Option<Arc<Tokens>>,
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
        let Some(tokens) = &self.tokens else { return Either::Left(self.inner.call(request)) };
        let authorization = request.headers().get(AUTHORIZATION);
        let authorization = authorization.and_then(|value| value.to_str().ok());
        match check(tokens, request.uri().path(), authorization) {
            Ok(()) => Either::Left(self.inner.call(request)),
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
