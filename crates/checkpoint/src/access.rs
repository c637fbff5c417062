//! Store locations, and settings for access to a bucket.
//!
//! A location is a folder, or `s3://bucket/prefix`.
//!
//! **Folders.** A file is written under a temporary name, fsynced, and renamed (or hard-linked, if it must
//! not replace an existing file); then its folder is fsynced. On EBS and local disks the file then survives a
//! machine failure; on FSx for Lustre and NFS it has reached the servers, which also rename atomically. NFS
//! clients cache folder listings; see module `fence` for the consequences. Without hard links, as on Google Drive, an
//! exclusively created empty file claims the name, and is then replaced.
//!
//! **Buckets.** S3, or a server with the S3 protocol that supports `If-None-Match: *` on uploads. Uploads are
//! atomic and durable once the server has acknowledged them. Multipart uploads that a killed process left
//! unfinished are invisible here but cost money: give the bucket a lifecycle rule that aborts them.

use std::time::Duration;

use object_store::{BackoffConfig, RetryConfig, aws::AmazonS3};

/// Credentials and timeouts for access to a bucket.
#[derive(Clone, Debug)]
pub struct BucketAccess {
    /// The standard `AWS_*` variables: credentials, region, `AWS_ENDPOINT_URL`.
    pub environment: Vec<(String, String)>,
    /// Timeout of one request. A request carries at most 16 MiB, unless a manifest is larger or a shard
    /// is larger than 160 GB.
    pub request_timeout: Duration,
    /// Time after which a failing request is no longer retried. The pauses between retries grow.
    pub retry_timeout: Duration,
}

impl Default for BucketAccess {
    /// Uses the environment variables of this process.
    fn default() -> Self {
        Self {
            environment: baton_s3::environment(),
            request_timeout: Duration::from_secs(60),
            retry_timeout: Duration::from_secs(180),
        }
    }
}

/// Timeout for establishing a connection to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A parsed store location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location<'a> {
    Folder(&'a str),
    Bucket { name: &'a str, prefix: &'a str },
}

impl<'a> Location<'a> {
    /// Parses a location. An unsupported URL scheme is an error: otherwise `gs://…` would create a folder `gs:`.
    pub(crate) fn of(location: &'a str) -> Result<Self, String> {
        match location.split_once("://") {
            None if location.is_empty() => Err("the path is empty".to_owned()),
            None => Ok(Self::Folder(location)),
            Some(("s3", rest)) => {
                let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                if name.is_empty() {
                    return Err("the bucket name is missing".to_owned());
                }
                Ok(Self::Bucket { name, prefix })
            }
            Some((scheme, _)) => Err(format!("{scheme}:// is not supported")),
        }
    }
}

impl BucketAccess {
    /// A client for the bucket, not connected yet.
    pub(crate) fn bucket(&self, name: &str) -> Result<AmazonS3, String> {
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100).min(self.retry_timeout / 1000),
                max_backoff: Duration::from_secs(10),
                base: 2.0,
            },
            max_retries: 20,
            retry_timeout: self.retry_timeout,
        };
        let limits = (self.request_timeout, CONNECT_TIMEOUT.min(self.request_timeout));
        baton_s3::bucket(name, &self.environment, limits, retry).map(|(objects, _)| objects)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_buckets_are_distinguished() {
        let bucket = |name, prefix| Ok(Location::Bucket { name, prefix });
        assert_eq!(Location::of("s3://bucket/runs/a"), bucket("bucket", "runs/a"));
        assert_eq!(Location::of("s3://bucket"), bucket("bucket", ""));
        assert_eq!(Location::of("runs/s3"), Ok(Location::Folder("runs/s3")));
        assert_eq!(Location::of(""), Err("the path is empty".to_owned()));
        assert_eq!(Location::of("gs://bucket/runs"), Err("gs:// is not supported".to_owned()));
        assert_eq!(Location::of("s3:///runs"), Err("the bucket name is missing".to_owned()));
    }
}
