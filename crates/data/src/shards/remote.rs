//! Shards in a bucket: listing them, and reading pieces of them until they come.

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
    Error, HEADER_BYTES, Patience, etag,
    retry::{Fault, Tries},
    source::{KeyPattern, Keys, there_is},
    statistics::Counters,
};

/// Headers read at the same moment: enough to hide the way to the store, few enough to be welcome.
const HEADERS_AT_ONCE: usize = 16;

/// One shard in a bucket, as it was when the data set was opened.
#[derive(Clone, Debug)]
pub(super) struct Object {
    /// As a person would write it.
    pub(super) url: String,
    pub(super) meta: ObjectMeta,
}

impl Object {
    fn is_version_of(&self, served: &ObjectMeta) -> bool {
        let (listed, served_tag) = (&self.meta, &served.e_tag);
        match (&listed.e_tag, served_tag) {
            (Some(listed), Some(served)) => etag::bare(listed) == etag::bare(served),
            // HTTP's dates have whole seconds only.
            _ => {
                listed.size == served.size
                    && listed.last_modified.timestamp() == served.last_modified.timestamp()
            }
        }
    }
}

/// A bucket.
pub(super) struct Remote {
    bucket: String,
    endpoint: String,
    objects: Arc<dyn ObjectStore>,
    patience: Patience,
    counters: Arc<Counters>,
    tags_are_digests: AtomicBool,
}

impl Remote {
    /// Prepares, but does not connect. `environment` has the usual `AWS_*` variables.
    pub(super) fn new(
        bucket: &str,
        environment: &[(String, String)],
        patience: Patience,
        counters: Arc<Counters>,
    ) -> Result<Self, object_store::Error> {
        // Retries live in `retry`.
        let retry = RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: patience.request,
        };
        let limits = (patience.request, patience.stall);
        let (objects, endpoint) = baton_s3::bucket(bucket, environment, limits, retry)?;
        Ok(Self {
            bucket: bucket.to_owned(),
            endpoint,
            objects: Arc::new(objects),
            patience,
            counters,
            tags_are_digests: AtomicBool::new(true),
        })
    }

    /// Tells buckets of the same name on different servers apart.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What to compare the parts of a download with.
    pub(super) fn check(&self, object: &Object, parts: u64) -> etag::Check {
        let are_digests = self.tags_are_digests.load(Ordering::Relaxed);
        let tag = object.meta.e_tag.as_deref().filter(|_| are_digests);
        etag::Check::new(tag, parts)
    }

    /// Two downloads agreed with each other, but not with the tag.
    pub(super) fn tags_are_no_digests(&self) {
        self.tags_are_digests.store(false, Ordering::Relaxed);
    }

    fn url(&self, key: &str) -> String {
        format!("s3://{}/{key}", self.bucket)
    }

    /// The objects meant, by name.
    pub(super) async fn list(&self, source_text: &str, keys: &Keys) -> Result<Vec<Object>, Error> {
        let mut found = match keys {
            Keys::One(key) => self.one(source_text, key).await?,
            Keys::Matching(pattern) => self.matching(source_text, pattern).await?,
        };
        if found.is_empty() {
            let (folder, wanted) = match keys {
                Keys::One(key) => key.rsplit_once('/').unwrap_or(("", key)),
                Keys::Matching(pattern) => (pattern.folder.as_str(), source_text),
            };
            let there = self.what_is_there(source_text, folder, wanted).await?;
            return Err(Error::NothingMatches { source_text: source_text.to_owned(), there });
        }
        found.sort_by(|a, b| a.location.as_ref().cmp(b.location.as_ref()));
        let object = |meta: ObjectMeta| Object { url: self.url(meta.location.as_ref()), meta };
        Ok(found.into_iter().map(object).collect())
    }

    async fn one(&self, source_text: &str, key: &str) -> Result<Vec<ObjectMeta>, Error> {
        let path = parse(source_text, key)?;
        self.retried("look for", &self.url(key), async || match self.objects.head(&path).await {
            Ok(meta) => Ok(vec![meta]),
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        })
        .await
    }

    async fn matching(
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

    /// Words for the deepest folder at or above `folder` that has anything.
    async fn what_is_there(
        &self,
        source_text: &str,
        folder: &str,
        wanted: &str,
    ) -> Result<String, Error> {
        let (mut folder, mut wanted) = (folder, wanted);
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
                return Ok(there_is(&self.url(folder), wanted, &names));
            }
            (folder, wanted) = folder.rsplit_once('/').unwrap_or(("", folder));
        }
    }

    /// The headers of shards, in their order.
    pub(super) async fn headers(&self, objects: &[Object]) -> Result<Vec<Vec<u8>>, Error> {
        futures::stream::iter(objects)
            .map(|object| {
                let end = (HEADER_BYTES as u64).min(object.meta.size);
                self.read(object, 0..end, self.patience.attempts_at_open)
            })
            .buffered(HEADERS_AT_ONCE)
            .try_collect()
            .await
    }

    /// Some bytes of a shard, with the patience of a running job.
    pub(super) async fn piece(&self, object: &Object, range: Range<u64>) -> Result<Vec<u8>, Error> {
        self.read(object, range, self.patience.attempts).await
    }

    async fn read(&self, object: &Object, range: Range<u64>, most: u32) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
        let mut tries = Tries::new(self.patience, most, Instant::now());
        // A server refuses an empty range.
        while (bytes.len() as u64) < range.end - range.start {
            let had = bytes.len();
            let rest = range.start + had as u64..range.end;
            let request = self.read_on(object, rest, &mut bytes);
            let slow = |_| Err(Fault::Slow(self.patience.request));
            let outcome = timeout(self.patience.request, request).await.unwrap_or_else(slow);
            self.counters.fetched_bytes.add((bytes.len() - had) as u64);
            let Err(fault) = outcome else { break };
            if bytes.len() > had {
                tries.progress(Instant::now());
            }
            self.pause("fetch", &object.url, &mut tries, fault).await?;
        }
        Ok(bytes)
    }

    /// One request, whose bytes are kept whatever happens to the rest of it.
    async fn read_on(
        &self,
        object: &Object,
        range: Range<u64>,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        let options = GetOptions {
            if_match: object.meta.e_tag.clone(),
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let get = self.objects.get_opts(&object.meta.location, options);
        let answer = self.in_time(get).await?.map_err(|error| match error {
            object_store::Error::Precondition { .. } => Fault::Changed,
            error => Fault::Store(error),
        })?;
        // Not every server heeds `If-Match`.
        if !object.is_version_of(&answer.meta) {
            return Err(Fault::Changed);
        }
        let mut missing = range.end - range.start;
        let mut chunks = answer.into_stream();
        while let Some(chunk) = self.in_time(chunks.try_next()).await?? {
            let wanted = chunk.len().min(usize::try_from(missing).unwrap_or(usize::MAX));
            bytes.extend_from_slice(&chunk[..wanted]);
            missing -= wanted as u64;
        }
        if missing > 0 { Err(Fault::CutOff { missing }) } else { Ok(()) }
    }

    async fn in_time<T>(&self, future: impl Future<Output = T>) -> Result<T, Fault> {
        timeout(self.patience.stall, future).await.map_err(|_| Fault::Stalled(self.patience.stall))
    }

    /// Repeats a short request.
    async fn retried<T>(
        &self,
        operation: &'static str,
        url: &str,
        request: impl AsyncFn() -> Result<T, Fault>,
    ) -> Result<T, Error> {
        let mut tries = Tries::new(self.patience, self.patience.attempts_at_open, Instant::now());
        loop {
            let slow = |_| Err(Fault::Slow(self.patience.request));
            let outcome = timeout(self.patience.request, request()).await.unwrap_or_else(slow);
            match outcome {
                Ok(answer) => return Ok(answer),
                Err(fault) => self.pause(operation, url, &mut tries, fault).await?,
            }
        }
    }

    /// Pauses until the next attempt.
    ///
    /// # Errors
    /// There shall be none.
    async fn pause(
        &self,
        operation: &'static str,
        url: &str,
        tries: &mut Tries,
        fault: Fault,
    ) -> Result<(), Error> {
        let Some(pause) = tries.pause(&fault) else {
            return Err(tries.give_up(operation, url, fault, Instant::now()));
        };
        self.counters.retries.add(1);
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
