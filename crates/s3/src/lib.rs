//! How a bucket is reached: S3, or what speaks its protocol.

#![forbid(unsafe_code)]

use std::{env, time::Duration};

use object_store::{
    ClientConfigKey, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
};

/// The `AWS_*` variables of this process: credentials, region, `AWS_ENDPOINT_URL` and so on, as
/// `object_store` knows them.
#[must_use]
pub fn environment() -> Vec<(String, String)> {
    let unicode = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    env::vars_os().filter_map(unicode).filter(|(name, _)| name.starts_with("AWS_")).collect()
}

/// A bucket's client, which is not connected yet, and the server's URL, empty for AWS itself.
///
/// # Errors
/// `environment` has a value that cannot be used.
pub fn bucket(
    name: &str,
    environment: &[(String, String)],
    (request, connect): (Duration, Duration),
    retry: RetryConfig,
) -> Result<(AmazonS3, String), object_store::Error> {
    let timeout =
        |key, limit: Duration| (AmazonS3ConfigKey::Client(key), format!("{}ms", limit.as_millis()));
    let timeouts = [
        timeout(ClientConfigKey::Timeout, request),
        timeout(ClientConfigKey::ConnectTimeout, connect),
    ];
    let known = environment
        .iter()
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())));
    let builder = AmazonS3Builder::new().with_bucket_name(name).with_retry(retry);
    let settings = timeouts.into_iter().chain(known);
    let builder = settings.fold(builder, |builder, (key, value)| builder.with_config(key, value));
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
        .iter()
        .find_map(|key| builder.get_config_value(key))
        .unwrap_or_default();
    // Whoever writes http:// there means it.
    let is_http = endpoint.starts_with("http://");
    let builder = if is_http { builder.with_allow_http(true) } else { builder };
    Ok((builder.build()?, endpoint))
}
