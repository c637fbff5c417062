//! The credentials of a client: its token, its certificate, and the authorities that it trusts.

use std::{error, iter, time::Duration};

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
    transport::{ClientTlsConfig, Endpoint},
};

use crate::{Error, Token};

/// Adds the client's token, if there is one, to every call.
#[derive(Clone, Debug, Default)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    /// Adds this token.
    ///
    /// # Errors
    /// The token is not valid in a header; this cannot happen for a [`Token`].
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

/// Longest wait for the server in a TLS handshake. The endpoint's connect timeout does not cover the handshake.
const CLIENT_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The credentials of a client: its token, its certificate, and the authorities that it trusts.
#[derive(Clone, Debug, Default)]
pub struct ClientCredentials {
    pub(crate) tls: ClientTlsConfig,
    pub(crate) bearer: Bearer,
}

impl ClientCredentials {
    /// The interceptor for every client of the endpoint.
    #[must_use]
    pub fn bearer(&self) -> Bearer {
        self.bearer.clone()
    }

    /// Adds TLS to `endpoint` if its address begins with `https://`.
    ///
    /// # Errors
    /// The certificates are invalid.
    pub fn secure(&self, endpoint: Endpoint) -> Result<Endpoint, Error> {
        match endpoint.uri().scheme_str() {
            Some("https") => {
                let secured =
                    endpoint.tls_config(self.tls.clone().timeout(CLIENT_HANDSHAKE_TIMEOUT));
                secured.map_err(|error| Error(innermost(&error)))
            }
            _ => Ok(endpoint),
        }
    }
}

/// The problem with a certificate or with TLS, if it is the cause of a failed connection.
#[must_use]
pub fn tls_problem(error: &(dyn error::Error + 'static)) -> Option<String> {
    let cause = innermost(error);
    let is_about_tls = ["certificate", "tls", "handshake", "corrupt message"];
    let lower = cause.to_lowercase();
    // After a timeout of the handshake, there is no certificate that could be wrong.
    let is_timeout = lower.starts_with("tls handshake timeout");
    (!is_timeout && is_about_tls.iter().any(|word| lower.contains(word))).then_some(cause)
}

fn innermost(error: &(dyn error::Error + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}
