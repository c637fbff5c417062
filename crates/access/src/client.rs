//! What a client shows and whom it trusts.

use std::{error, iter, time::Duration};

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
    transport::{ClientTlsConfig, Endpoint},
};

use crate::{Error, Token};

/// Puts a token, if there is one, into every call.
#[derive(Clone, Debug, Default)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    /// Of this token.
    ///
    /// # Errors
    /// A header cannot carry it; no [`Token`] is like that.
    pub fn new(token: Option<&Token>) -> Result<Self, Error> {
        let value = token.map(|token| token.bearer().parse::<MetadataValue<Ascii>>()).transpose();
        let mut value = value.map_err(|error| Error(format!("token: {error}")))?;
        if let Some(value) = &mut value {
            value.set_sensitive(true);
        }
        Ok(Self(value))
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// Longest wait for the other side of a TLS handshake: the deadline of a connection ends before it begins.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// What a client shows, and whom it trusts.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    pub(crate) tls: ClientTlsConfig,
    pub(crate) bearer: Bearer,
}

impl Credentials {
    /// Goes into every client that is made over the endpoint.
    #[must_use]
    pub fn bearer(&self) -> Bearer {
        self.bearer.clone()
    }

    /// `endpoint`, with TLS if its address begins with `https://`.
    ///
    /// # Errors
    /// The certificates are none.
    pub fn secure(&self, endpoint: Endpoint) -> Result<Endpoint, Error> {
        match endpoint.uri().scheme_str() {
            Some("https") => {
                let secured = endpoint.tls_config(self.tls.clone().timeout(HANDSHAKE));
                secured.map_err(|error| Error(innermost(&error)))
            }
            _ => Ok(endpoint),
        }
    }
}

/// What is wrong with the coordinator's certificate or with ours, if that is why there is no connection.
#[must_use]
pub fn tls_problem(error: &(dyn error::Error + 'static)) -> Option<String> {
    let cause = innermost(error);
    let is_about_tls = ["certificate", "tls", "handshake", "corrupt message"];
    let lower = cause.to_lowercase();
    // One that says nothing has shown no certificate to find fault with; so tonic tells it.
    let is_silent = lower.starts_with("tls handshake timeout");
    (!is_silent && is_about_tls.iter().any(|word| lower.contains(word))).then_some(cause)
}

fn innermost(error: &(dyn error::Error + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}
