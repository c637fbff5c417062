//! Clients for S3 buckets and for other servers with the S3 protocol, and a runtime to use them from synchronous
//! code.

#![forbid(unsafe_code)]

mod blocking;
mod message;

use std::{env, time::Duration};

use object_store::{
    ClientConfigKey, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
};
use url::Url;

pub use blocking::Blocking;
pub use message::{BucketRefusal, CLOCK_REMEDY, ROLE, brief, hide_password, refusal};

/// The `AWS_*` environment variables of this process: credentials, region, `AWS_ENDPOINT_URL` and others that
/// `object_store` supports.
#[must_use]
pub fn environment() -> Vec<(String, String)> {
    let unicode = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    env::vars_os().filter_map(unicode).filter(|(name, _)| name.starts_with("AWS_")).collect()
}

/// A client for the bucket `name`, not connected yet, and the server's URL, which is empty for AWS itself.
/// The timeouts are for one request and for establishing a connection. Empty variables count as unset.
///
/// # Errors
/// One line: `name` or `environment` contains an invalid value. `object_store` would panic at some of them.
pub fn bucket(
    name: &str,
    environment: &[(String, String)],
    (request_timeout, connect_timeout): (Duration, Duration),
    retry: RetryConfig,
) -> Result<(AmazonS3, String), String> {
    if !is_host_name(name) {
        return Err(format!("{name:?} is not the name of a bucket"));
    }
    let timeout =
        |key, limit: Duration| (AmazonS3ConfigKey::Client(key), format!("{}ms", limit.as_millis()));
    let timeouts = [
        timeout(ClientConfigKey::Timeout, request_timeout),
        timeout(ClientConfigKey::ConnectTimeout, connect_timeout),
    ];
    let mut builder = AmazonS3Builder::new().with_bucket_name(name).with_retry(retry);
    for (key, value) in timeouts {
        builder = builder.with_config(key, value);
    }
    for (variable, value) in environment.iter().filter(|(_, value)| !value.is_empty()) {
        if let Ok(key) = variable.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, valid(variable, key, value)?);
        }
    }
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
        .iter()
        .find_map(|key| builder.get_config_value(key))
        .unwrap_or_default();
    // An explicit http:// endpoint is a deliberate choice, so allow plain HTTP for it.
    let is_http = endpoint.starts_with("http://");
    let builder = if is_http { builder.with_allow_http(true) } else { builder };
    Ok((builder.build().map_err(|error| brief(&error))?, endpoint))
}

/// The value of an environment variable, if requests can be made with it.
fn valid(variable: &str, key: AmazonS3ConfigKey, value: &str) -> Result<String, String> {
    if !value.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        // The value may be a secret.
        return Err(format!("{variable} contains a line break or another unusual character"));
    }
    match key {
        AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint => {
            endpoint(value).ok_or_else(|| {
                let shown = value.rsplit_once('@').map_or(value, |(_password, host)| host);
                format!("{variable} = {shown:?} is not a URL such as https://host:9000")
            })
        }
        AmazonS3ConfigKey::Region | AmazonS3ConfigKey::DefaultRegion if !is_host_name(value) => {
            Err(format!("{variable} = {value:?} is not a region such as us-east-1"))
        }
        _ => Ok(value.to_owned()),
    }
}

/// The URL as requests need it, with unusual characters escaped.
fn endpoint(text: &str) -> Option<String> {
    let url = Url::parse(text).ok()?;
    let is_web = matches!(url.scheme(), "http" | "https") && url.has_host();
    is_web.then(|| url.as_str().trim_end_matches('/').to_owned())
}

/// Whether the text can be a part of a URL's host.
fn is_host_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(name: &str, variable: &str, value: &str) -> Result<String, String> {
        let second = Duration::from_secs(1);
        let environment = [(variable.to_owned(), value.to_owned())];
        bucket(name, &environment, (second, second), RetryConfig::default())
            .map(|(_, endpoint)| endpoint)
    }

    #[test]
    fn a_value_that_no_request_can_be_made_with_is_one_line_with_its_name() {
        for value in
            ["nonsense", "host:9000", "ftp://host", "http://", "http://1.2.3.999", "http://a b"]
        {
            assert_eq!(
                opened("bucket", "AWS_ENDPOINT_URL", value),
                Err(format!("AWS_ENDPOINT_URL = {value:?} is not a URL such as https://host:9000"))
            );
        }
        let hidden = opened("bucket", "AWS_ENDPOINT_URL_S3", "user:pass/word@host:9000");
        let shown = "AWS_ENDPOINT_URL_S3 = \"host:9000\" is not a URL such as https://host:9000";
        assert_eq!(hidden, Err(shown.to_owned()));
        for (variable, value, problem) in [
            ("AWS_REGION", "a b", "is not a region"),
            ("AWS_SESSION_TOKEN", "secret\n", "AWS_SESSION_TOKEN contains a line break"),
        ] {
            let refused = opened("bucket", variable, value).unwrap_err();
            assert!(refused.contains(problem) && !refused.contains("secret"), "{refused}");
        }
        let refused = opened("my bucket", "AWS_REGION", "").unwrap_err();
        assert_eq!(refused, "\"my bucket\" is not the name of a bucket");
    }

    #[test]
    fn an_empty_variable_counts_as_unset_and_an_endpoint_may_have_a_path() {
        let endpoint = |value| opened("bucket", "AWS_ENDPOINT_URL", value).unwrap();
        assert_eq!(endpoint(""), "");
        assert_eq!(endpoint("http://127.0.0.1:9000"), "http://127.0.0.1:9000");
        assert_eq!(endpoint("https://host/a b/"), "https://host/a%20b");
    }
}
