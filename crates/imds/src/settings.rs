//! Address, intervals and timeouts of the metadata service.

use std::{env, time::Duration};

use hyper::Uri;

const DISABLED: &str = "AWS_EC2_METADATA_DISABLED";
const ENDPOINT: &str = "AWS_EC2_METADATA_SERVICE_ENDPOINT";

/// Settings of [`watch`](crate::watch).
#[derive(Clone, Debug)]
pub struct Settings {
    /// Host and port of the service, `host:port`.
    pub address: String,
    /// Time between two polls.
    pub poll_interval: Duration,
    /// Timeout of one request, from connecting to the last byte.
    pub timeout: Duration,
    /// Time between two attempts until a metadata service has been found for the first time.
    pub discovery_interval: Duration,
    /// Length of an outage after which it is logged as a warning.
    pub warn_after: Duration,
}

/// The environment names an invalid address of the metadata service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ENDPOINT}={0:?} must be http://host[:port]; unset it to use the service of EC2")]
pub struct Error(String);

impl Settings {
    /// Settings from the environment of this process; see [`from_variables`](Self::from_variables).
    ///
    /// # Errors
    /// The endpoint is not `http://host[:port]`.
    pub fn from_environment() -> Result<Option<Self>, Error> {
        Self::from_variables(|name| env::var(name).ok())
    }

    /// Settings from the variables that AWS's own tools use too: `AWS_EC2_METADATA_SERVICE_ENDPOINT`, which is
    /// `http://host[:port]`, and `AWS_EC2_METADATA_DISABLED`. Returns `None` if the latter is `true`.
    ///
    /// # Errors
    /// The endpoint is not `http://host[:port]`.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, Error> {
        if variable(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let endpoint = variable(ENDPOINT).filter(|endpoint| !endpoint.is_empty());
        let endpoint = endpoint.unwrap_or_else(|| "http://169.254.169.254".to_owned());
        Ok(Some(Self {
            address: address_of(&endpoint).ok_or(Error(endpoint))?,
            poll_interval: Duration::from_secs(2),
            timeout: Duration::from_secs(1),
            discovery_interval: Duration::from_secs(60),
            warn_after: Duration::from_secs(10),
        }))
    }
}

/// Host and port of an endpoint; `None` if it is not plain HTTP or has a path.
fn address_of(endpoint: &str) -> Option<String> {
    let uri: Uri = endpoint.parse().ok()?;
    let is_plain = uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none();
    let host = uri.host().filter(|host| is_plain && !host.is_empty())?;
    Some(format!("{host}:{}", uri.port_u16().unwrap_or(80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(variables: &[(&str, &str)]) -> Result<Option<String>, String> {
        let settings = Settings::from_variables(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        });
        settings
            .map(|settings| settings.map(|settings| settings.address))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn address_comes_from_the_environment() {
        let is_at = |variables: &[_], expected: &str| {
            assert_eq!(address(variables), Ok(Some(expected.to_owned())));
        };
        is_at(&[], "169.254.169.254:80");
        is_at(&[(ENDPOINT, "")], "169.254.169.254:80");
        is_at(&[(ENDPOINT, "http://127.0.0.1:1338/")], "127.0.0.1:1338");
        is_at(&[(ENDPOINT, "http://[fd00:ec2::254]")], "[fd00:ec2::254]:80");
        is_at(&[(ENDPOINT, "http://metadata"), (DISABLED, "false")], "metadata:80");
    }

    #[test]
    fn service_can_be_disabled() {
        assert_eq!(address(&[(DISABLED, "True"), (ENDPOINT, "nonsense")]), Ok(None));
    }

    #[test]
    fn invalid_endpoint_is_refused_with_the_remedy() {
        for endpoint in
            ["nonsense", "https://host", "http://host/base", "http://", "http://host?a", "/"]
        {
            let error = address(&[(ENDPOINT, endpoint)]).expect_err(endpoint);
            assert!(error.contains(endpoint) && error.contains("must be http://host[:port]"));
        }
    }
}
