//! A limit on the time that a client may take to send a request.

use std::time::Duration;

use axum::{
    body::{Body, HttpBody},
    extract::Request,
    middleware::Next,
    response::Response,
};
use futures::StreamExt;
use tokio::time::{Instant, timeout_at};

/// Longest time from the head of a request to the end of its body. The largest body is a recipe.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Services whose clients keep sending: agents, and tools that ask which services there are.
const STREAMED_BY_CLIENTS: [&str; 2] = ["/baton.v1.NodeService/", "/grpc.reflection."];

/// The limit as middleware, for [`axum::middleware::from_fn`].
pub(crate) async fn limit(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if STREAMED_BY_CLIENTS.iter().any(|service| path.starts_with(service)) {
        return next.run(request).await;
    }
    next.run(request.map(|body| ending_by(Instant::now() + BODY_TIMEOUT, body))).await
}

/// A body that fails if it has not ended at the deadline.
fn ending_by(deadline: Instant, body: Body) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let chunks = Some(body.into_data_stream());
    Body::from_stream(futures::stream::unfold(chunks, move |chunks| async move {
        let mut chunks = chunks?;
        match timeout_at(deadline, chunks.next()).await {
            Ok(chunk) => Some((chunk?, Some(chunks))),
            Err(_) => Some((Err(axum::Error::new("the request's body came too slowly")), None)),
        }
    }))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::to_bytes;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_fails_at_the_deadline() {
        let start = Instant::now();
        let trickle = futures::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            Some((Ok::<_, Infallible>("."), ()))
        });

        let read = to_bytes(ending_by(start + BODY_TIMEOUT, Body::from_stream(trickle)), 1_000);

        assert!(read.await.is_err());
        assert_eq!(start.elapsed().as_secs(), BODY_TIMEOUT.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_ends_in_time_is_unchanged() {
        let parts = futures::stream::iter(["two ", "parts"]).map(Ok::<_, Infallible>);
        let body = ending_by(Instant::now() + BODY_TIMEOUT, Body::from_stream(parts));
        assert_eq!(to_bytes(body, 1_000).await.unwrap(), "two parts");
    }
}
