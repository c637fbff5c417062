//! The credentials of a client: its token, its certificate, and the authorities that it trusts.

use std::{error, iter, time::Duration};

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
    transport::{ClientTlsConfig, Endpoint, Identity},
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

    /// Whether calls carry a token.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.bearer.0.is_some()
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

/// Why the TLS connection failed, with a remedy, if TLS is the cause of an error.
#[must_use]
pub fn tls_problem(error: &(dyn error::Error + 'static)) -> Option<String> {
    let cause = innermost(error);
    let lower = cause.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    // After a timeout or the end of the connection, there is no certificate that could be wrong.
    if has(&["tls handshake timeout", "tls handshake eof"])
        || !has(&["certificate", "tls", "handshake", "corrupt message", "fatal alert"])
    {
        return None;
    }
    let refuses_client =
        has(&["fatal alert"]) && !has(&["certificaterequired"]) && has(CLIENT_ALERTS);
    let remedy = if refuses_client {
        "the coordinator refuses the certificate of --client-cert: give one that the authority of the \
         coordinator's --tls-client-ca has issued and that is still valid"
    } else if has(&["certificate expired"]) {
        "start the coordinator with a new certificate, for example of `baton cert`, or set the clock of this machine"
    } else if has(&["certificate not valid yet"]) {
        "set the clock of this machine, or, if it is right, make a new certificate on a machine whose clock is right"
    } else if has(&["certificate not valid for name"]) {
        "use a name or address of the certificate in the URL, or make a certificate for this one, for example with \
         `baton cert --host`"
    } else {
        "give the certificate's authority with --tls-ca, and your own certificate with --client-cert if the \
         coordinator requires one"
    };
    Some(format!("the TLS connection failed ({cause}): {remedy}"))
}

/// Alerts by which a server refuses a client's certificate, in lower case.
const CLIENT_ALERTS: &[&str] = &["certificate", "unknownca", "decrypterror", "accessdenied"];

/// Checks that a certificate and its private key can be used, and belong together.
pub(crate) fn check_identity(identity: &Identity) -> Result<(), String> {
    let tls = ClientTlsConfig::new().identity(identity.clone());
    let checked = Endpoint::from_static("https://coordinator").tls_config(tls);
    checked.map(drop).map_err(|error| innermost(&error))
}

/// The innermost cause of an error: "connection refused" rather than "transport error".
#[must_use]
pub fn innermost(error: &(dyn error::Error + 'static)) -> String {
    let causes = iter::successors(Some(error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_broken_connection_is_no_problem_of_a_certificate() {
        let problem = |text: &str| tls_problem(&io::Error::other(text));
        for text in ["tls handshake eof", "TLS handshake timeout", "connection refused"] {
            assert_eq!(problem(text), None, "{text}");
        }
        let untrusted = problem("invalid peer certificate: UnknownIssuer").unwrap();
        assert!(untrusted.contains("--tls-ca"), "{untrusted}");
        let refused = problem("received fatal alert: UnknownCA").unwrap();
        assert!(refused.contains("refuses the certificate of --client-cert"), "{refused}");
        let expired =
            "invalid peer certificate: certificate expired: verification time 9 (UNIX), …";
        let expired = problem(expired).unwrap();
        assert!(expired.contains("start the coordinator with a new certificate"), "{expired}");
        let early =
            "invalid peer certificate: certificate not valid yet: verification time 9 (UNIX), …";
        let early = problem(early).unwrap();
        assert!(early.contains("set the clock of this machine"), "{early}");
        let name =
            "invalid peer certificate: certificate not valid for name \"a\"; certificate is …";
        let name = problem(name).unwrap();
        assert!(name.contains("baton cert --host"), "{name}");
    }
}
