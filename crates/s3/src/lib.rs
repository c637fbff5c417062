//! Clients for S3 buckets and for other servers with the S3 protocol, and a runtime to use them from synchronous
//! code.

#![forbid(unsafe_code)]

mod blocking;

use std::{env, time::Duration};

use object_store::{
    ClientConfigKey, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
};

pub use blocking::Blocking;

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
/// The timeouts are for one request and for establishing a connection.
///
/// # Errors
/// `environment` contains an invalid value.
pub fn bucket(
    name: &str,
    environment: &[(String, String)],
    (request_timeout, connect_timeout): (Duration, Duration),
    retry: RetryConfig,
) -> Result<(AmazonS3, String), object_store::Error> {
    let timeout =
        |key, limit: Duration| (AmazonS3ConfigKey::Client(key), format!("{}ms", limit.as_millis()));
    let timeouts = [
        timeout(ClientConfigKey::Timeout, request_timeout),
        timeout(ClientConfigKey::ConnectTimeout, connect_timeout),
    ];
    let supported = environment
        .iter()
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())));
    let builder = AmazonS3Builder::new().with_bucket_name(name).with_retry(retry);
    let settings = timeouts.into_iter().chain(supported);
    let builder = settings.fold(builder, |builder, (key, value)| builder.with_config(key, value));
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
        .iter()
        .find_map(|key| builder.get_config_value(key))
        .unwrap_or_default();
    // An explicit http:// endpoint is a deliberate choice, so allow plain HTTP for it.
    let is_http = endpoint.starts_with("http://");
    let builder = if is_http { builder.with_allow_http(true) } else { builder };
    Ok((builder.build()?, endpoint))
}
