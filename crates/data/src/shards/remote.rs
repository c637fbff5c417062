//! Requests to a bucket: lists shards and reads byte ranges of them, with retries.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use futures::{TryStreamExt, stream::StreamExt};
use object_store::{
    BackoffConfig, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
    path::Path,
};
use tokio::time::{sleep, timeout};

use super::{
    Error, HEADER_BYTES, RetryPolicy, etag,
    retry::{Attempts, RequestFault},
    source::{KeyPattern, Keys, describe_contents},
};

/// Maximum number of headers that are read at a time: enough to hide the latency, without overloading the store.
const MAX_CONCURRENT_HEADERS: usize = 16;

/// One shard in a bucket, as it was when the data set was opened.
#[derive(Clone, Debug)]
pub(super) struct Object {
    /// URL for messages.
    pub(super) url: String,
    pub(super) meta: ObjectMeta,
}

impl Object {
    fn is_version_of(&self, served: &ObjectMeta) -> bool {
        let (listed, served_tag) = (&self.meta, &served.e_tag);
        match (&listed.e_tag, served_tag) {
            (Some(listed), Some(served)) => etag::bare(listed) == etag::bare(served),
            // Dates in HTTP have whole seconds only.
            _ => {
                listed.size == served.size
                    && listed.last_modified.timestamp() == served.last_modified.timestamp()
            }
        }
    }
}

/// Client for one bucket.
pub(super) struct BucketClient {
    bucket: String,
    endpoint: String,
    objects: Arc<dyn ObjectStore>,
    retry: RetryPolicy,
    tags_are_digests: AtomicBool,
}

impl BucketClient {
    /// Creates a client without connecting. `environment` contains the standard `AWS_*` variables.
    pub(super) fn new(
        bucket: &str,
        environment: &[(String, String)],
        retry: RetryPolicy,
    ) -> Result<Self, String> {
        // No retries here: `retry` implements them.
        let no_retries = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: retry.request_timeout,
        };
        let limits = (retry.request_timeout, retry.stall_timeout);
        let (objects, endpoint) = baton_s3::bucket(bucket, environment, limits, no_retries)?;
        Ok(Self {
            bucket: bucket.to_owned(),
            endpoint,
            objects: Arc::new(objects),
            retry,
            tags_are_digests: AtomicBool::new(true),
        })
    }

    /// URL of the server; distinguishes buckets of the same name on different servers.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The comparison of a download with the object's tag.
    pub(super) fn check(&self, object: &Object, parts: u64) -> etag::Check {
        let are_digests = self.tags_are_digests.load(Ordering::Relaxed);
        let tag = object.meta.e_tag.as_deref().filter(|_| are_digests);
        etag::Check::new(tag, parts)
    }

    /// Disables comparisons with tags, after two downloads were equal but did not match the tag.
    pub(super) fn tags_are_no_digests(&self) {
        self.tags_are_digests.store(false, Ordering::Relaxed);
    }

    fn url(&self, key: &str) -> String {
        format!("s3://{}/{key}", self.bucket)
    }

    /// The objects that `keys` selects, sorted by name.
    pub(super) async fn list(&self, source_text: &str, keys: &Keys) -> Result<Vec<Object>, Error> {
        let mut found = match keys {
            Keys::One(key) => self.find_one(source_text, key).await?,
            Keys::Matching(pattern) => self.find_matching(source_text, pattern).await?,
        };
        if found.is_empty() {
            let (folder, requested) = match keys {
                Keys::One(key) => key.rsplit_once('/').unwrap_or(("", key)),
                Keys::Matching(pattern) => (pattern.folder.as_str(), source_text),
            };
            let there = self.describe_folder(source_text, folder, requested).await?;
            return Err(Error::NothingMatches { source_text: source_text.to_owned(), there });
        }
        found.sort_by(|a, b| a.location.as_ref().cmp(b.location.as_ref()));
        let object = |meta: ObjectMeta| Object { url: self.url(meta.location.as_ref()), meta };
        Ok(found.into_iter().map(object).collect())
    }

    async fn find_one(&self, source_text: &str, key: &str) -> Result<Vec<ObjectMeta>, Error> {
        let path = parse(source_text, key)?;
        self.retried("look for", &self.url(key), async || match self.objects.head(&path).await {
            Ok(meta) => Ok(vec![meta]),
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        })
        .await
    }

    async fn find_matching(
        &self,
        source_text: &str,
        pattern: &KeyPattern,
    ) -> Result<Vec<ObjectMeta>, Error> {
        let folder = parse(source_text, &pattern.folder)?;
        let mut found = self
            .retried("list", &self.url(&pattern.folder), async || {
                if pattern.is_deep {
                    Ok(self.objects.list(Some(&folder)).try_collect().await?)
                } else {
                    Ok(self.objects.list_with_delimiter(Some(&folder)).await?.objects)
                }
            })
            .await?;
        found.retain(|meta: &ObjectMeta| pattern.matches(meta.location.as_ref()));
        Ok(found)
    }

    /// Describes the content of `folder`, or of its nearest parent that is not empty.
    async fn describe_folder(
        &self,
        source_text: &str,
        folder: &str,
        requested: &str,
    ) -> Result<String, Error> {
        let (mut folder, mut requested) = (folder, requested);
        loop {
            let path = parse(source_text, folder)?;
            let listed = self
                .retried("list", &self.url(folder), async || {
                    Ok(self.objects.list_with_delimiter(Some(&path)).await?)
                })
                .await?;
            let objects = listed.objects.iter().filter_map(|meta| meta.location.filename());
            let folders = listed.common_prefixes.iter().filter_map(Path::filename);
            let names: Vec<String> =
                objects.map(str::to_owned).chain(folders.map(|name| format!("{name}/"))).collect();
            if !names.is_empty() || folder.is_empty() {
                return Ok(describe_contents(&self.url(folder), requested, &names));
            }
            (folder, requested) = folder.rsplit_once('/').unwrap_or(("", folder));
        }
    }

    /// The headers of shards, in the order of `objects`.
    pub(super) async fn headers(&self, objects: &[Object]) -> Result<Vec<Vec<u8>>, Error> {
        futures::stream::iter(objects)
            .map(|object| {
                let end = (HEADER_BYTES as u64).min(object.meta.size);
                self.read(object, 0..end, self.retry.max_attempts_at_open)
            })
            .buffered(MAX_CONCURRENT_HEADERS)
            .try_collect()
            .await
    }

    /// A byte range of a shard, with the retries of a running job.
    pub(super) async fn fetch_range(
        &self,
        object: &Object,
        range: Range<u64>,
    ) -> Result<Vec<u8>, Error> {
        self.read(object, range, self.retry.max_attempts).await
    }

    async fn read(
        &self,
        object: &Object,
        range: Range<u64>,
        max_attempts: u32,
    ) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut attempts = Attempts::new(self.retry, max_attempts, Instant::now());
        // Servers refuse an empty range.
        while (bytes.len() as u64) < range.end - range.start {
            let len_before = bytes.len();
            let rest = range.start + len_before as u64..range.end;
            let request = self.append_range(object, rest, &mut bytes);
            let slow = |_| Err(RequestFault::Slow(self.retry.request_timeout));
            let outcome = timeout(self.retry.request_timeout, request).await.unwrap_or_else(slow);
            let Err(fault) = outcome else { break };
            if bytes.len() > len_before {
                attempts.progress(Instant::now());
            }
            self.pause("fetch", &object.url, &mut attempts, fault).await?;
        }
        Ok(bytes)
    }

    /// Sends one request and appends its bytes. Received bytes are kept if the request fails later.
    async fn append_range(
        &self,
        object: &Object,
        range: Range<u64>,
        bytes: &mut Vec<u8>,
    ) -> Result<(), RequestFault> {
        let options = GetOptions {
            if_match: object.meta.e_tag.clone(),
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let get = self.objects.get_opts(&object.meta.location, options);
        let answer = self.in_time(get).await?.map_err(|error| match error {
            object_store::Error::Precondition { .. } => RequestFault::Changed,
            error => RequestFault::Store(error),
        })?;
        // Some servers ignore `If-Match`.
        if !object.is_version_of(&answer.meta) {
            return Err(RequestFault::Changed);
        }
        let mut missing = range.end - range.start;
        let mut chunks = answer.into_stream();
        while let Some(chunk) = self.in_time(chunks.try_next()).await?? {
            let len = chunk.len().min(usize::try_from(missing).unwrap_or(usize::MAX));
            bytes.extend_from_slice(&chunk[..len]);
            missing -= len as u64;
        }
        if missing > 0 { Err(RequestFault::CutOff { missing }) } else { Ok(()) }
    }

    async fn in_time<T>(&self, future: impl Future<Output = T>) -> Result<T, RequestFault> {
        timeout(self.retry.stall_timeout, future)
            .await
            .map_err(|_| RequestFault::Stalled(self.retry.stall_timeout))
    }

    /// Sends a short request, with retries.
    async fn retried<T>(
        &self,
        operation: &'static str,
        url: &str,
        request: impl AsyncFn() -> Result<T, RequestFault>,
    ) -> Result<T, Error> {
        let mut attempts =
            Attempts::new(self.retry, self.retry.max_attempts_at_open, Instant::now());
        loop {
            let slow = |_| Err(RequestFault::Slow(self.retry.request_timeout));
            let outcome = timeout(self.retry.request_timeout, request()).await.unwrap_or_else(slow);
            match outcome {
                Ok(answer) => return Ok(answer),
                Err(fault) => self.pause(operation, url, &mut attempts, fault).await?,
            }
        }
    }

    /// Waits until the next attempt.
    ///
    /// # Errors
    /// The fault is permanent, or the attempts are used up.
    async fn pause(
        &self,
        operation: &'static str,
        url: &str,
        attempts: &mut Attempts,
        fault: RequestFault,
    ) -> Result<(), Error> {
        let Some(pause) = attempts.pause(&fault) else {
            return Err(attempts.give_up(operation, url, fault, Instant::now()));
        };
        // Others are over in a moment.
        if matches!(fault, RequestFault::Stalled(_)) {
            tracing::warn!("cannot {operation} {url}: {fault}; trying again");
        }
        sleep(pause).await;
        Ok(())
    }
}

fn parse(source_text: &str, key: &str) -> Result<Path, Error> {
    Path::parse(key).map_err(|error| Error::Source {
        source_text: source_text.to_owned(),
        problem: error.to_string(),
    })
}
