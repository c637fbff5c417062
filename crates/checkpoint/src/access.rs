//! Where a store lies, and how a bucket is reached.
//!
//! A location is a folder, or `s3://bucket/prefix`.
//!
//! **Folders.** A file is written under a temporary name, fsynced, and renamed (or linked, where it must
//! not replace another); then its folder is fsynced. On EBS and local disks that outlives the machine, on
//! FSx for Lustre and NFS it has reached the servers, which rename in one piece too. Clients of NFS remember
//! what a folder held; what that means for the fence stands in `fence`. The file system must know hard
//! links.
//!
//! **Buckets.** S3, or what speaks its protocol and heeds `If-None-Match: *` on uploads. An object appears
//! whole or not at all, and is safe when the upload was answered. Uploads in parts that a kill left
//! unfinished are not seen here but are paid for: give the bucket a lifecycle rule that aborts them.

use std::time::Duration;

use object_store::{BackoffConfig, RetryConfig, aws::AmazonS3};

/// How a bucket is reached, and for how long it is asked.
#[derive(Clone, Debug)]
pub struct Access {
    /// The usual `AWS_*` variables: credentials, region, `AWS_ENDPOINT_URL`.
    pub environment: Vec<(String, String)>,
    /// Longest time for one request; none carries more than 16 MiB, but for shards above 160 GB.
    pub request: Duration,
    /// Longest time until a request that fails is given up. It is repeated after growing pauses.
    pub patience: Duration,
}

impl Default for Access {
    /// With the environment of this process.
    fn default() -> Self {
        Self {
            environment: baton_s3::environment(),
            request: Duration::from_secs(60),
            patience: Duration::from_secs(180),
        }
    }
}

/// Time to reach the server at all.
const CONNECT: Duration = Duration::from_secs(5);

/// What a location names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location<'a> {
    Folder(&'a str),
    Bucket { name: &'a str, prefix: &'a str },
}

impl<'a> Location<'a> {
    /// A store that is not known is refused, in words: a folder called `gs:` would be nobody's wish.
    pub(crate) fn of(location: &'a str) -> Result<Self, String> {
        match location.split_once("://") {
            None => Ok(Self::Folder(location)),
            Some(("s3", rest)) => {
                let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                if name.is_empty() {
                    return Err("it names no bucket".to_owned());
                }
                Ok(Self::Bucket { name, prefix })
            }
            Some((scheme, _)) => Err(format!("{scheme}:// is not known")),
        }
    }
}

impl Access {
    /// Prepares, but does not connect.
    pub(crate) fn bucket(&self, name: &str) -> Result<AmazonS3, object_store::Error> {
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100).min(self.patience / 1000),
                max_backoff: Duration::from_secs(10),
                base: 2.0,
            },
            max_retries: 20,
            retry_timeout: self.patience,
        };
        let limits = (self.request, CONNECT.min(self.request));
        baton_s3::bucket(name, &self.environment, limits, retry).map(|(objects, _)| objects)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_told_apart() {
        let bucket = |name, prefix| Ok(Location::Bucket { name, prefix });
        assert_eq!(Location::of("s3://bucket/runs/a"), bucket("bucket", "runs/a"));
        assert_eq!(Location::of("s3://bucket"), bucket("bucket", ""));
        assert_eq!(Location::of("runs/s3"), Ok(Location::Folder("runs/s3")));
        assert_eq!(Location::of("gs://bucket/runs"), Err("gs:// is not known".to_owned()));
        assert_eq!(Location::of("s3:///runs"), Err("it names no bucket".to_owned()));
    }
}
