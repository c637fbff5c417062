//! Refuses calls without a valid token, before they reach a handler.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::header::{AUTHORIZATION, ORIGIN},
    middleware::Next,
    response::Response,
};
use tonic::Status;

use crate::{
    Tokens,
    role::{RequiredAccess, call_name, is_web, required_access},
};

/// The access check of all services of a coordinator. Without tokens it allows all calls, except gRPC calls of web
/// pages: a page of another site could make them through a host name that resolves to this machine (DNS rebinding).
#[derive(Clone, Debug)]
pub struct AccessGuard {
    /// The valid tokens; if `None`, calls need no token.
    pub tokens: Option<Arc<Tokens>>,
    /// Builds the response to a refused request of the web dashboard.
    pub web_refusal: fn(Status) -> Response,
}

/// The access check as middleware, for [`axum::middleware::from_fn_with_state`].
pub async fn guard(State(guard): State<AccessGuard>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_web = is_web(path);
    let checked = match &guard.tokens {
        _ if !is_web && request.headers().contains_key(ORIGIN) => {
            Err(Status::permission_denied("web pages must not make gRPC calls"))
        }
        Some(tokens) => {
            let authorization = request.headers().get(AUTHORIZATION);
            check(tokens, path, authorization.and_then(|value| value.to_str().ok()))
        }
        None => Ok(()),
    };
    match checked {
        Ok(()) => next.run(request).await,
        Err(status) if is_web => (guard.web_refusal)(status),
        Err(status) => status.into_http(),
    }
}

/// Checks whether a call with this `authorization` header is allowed.
fn check(tokens: &Tokens, path: &str, authorization: Option<&str>) -> Result<(), Status> {
    let RequiredAccess::Role(needed) = required_access(path) else { return Ok(()) };
    let Some(authorization) = authorization else {
        return Err(Status::unauthenticated(format!(
            "this coordinator needs a token of role {needed}: set BATON_TOKEN_FILE, or BATON_TOKEN"
        )));
    };
    let roles = tokens.roles_of(authorization);
    if roles.is_empty() {
        return Err(Status::unauthenticated("this coordinator does not know that token"));
    }
    match roles.iter().any(|role| role.covers(needed)) {
        true => Ok(()),
        false => Err(Status::permission_denied(format!(
            "{} needs {} token; this one is {}",
            call_name(path),
            needed.possessive(),
            roles[0].possessive()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_call_the_role_that_it_needs_and_that_of_the_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "agent agent-0123456789\nviewer viewer-0123456789\n").unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).unwrap();
        let tokens = Tokens::read(&path).unwrap();
        let refusal = |path, role| {
            check(&tokens, path, Some(&format!("Bearer {role}-0123456789"))).unwrap_err()
        };

        let pause = refusal("/baton.v1.JobService/Pause", "agent");
        assert_eq!(pause.message(), "pause needs an operator's token; this one is an agent's");
        let attach = refusal("/baton.v1.NodeService/Attach", "viewer");
        assert_eq!(attach.message(), "attach needs an agent's token; this one is a viewer's");
    }
}
