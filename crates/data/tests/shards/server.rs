//! An S3 server in this process: `s3s` implements the protocol and checks signatures. The objects are kept in memory,
//! with tags and conditions like in S3.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};

use bytes::Bytes;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use md5::{Digest, Md5};
use s3s::{
    Body, S3, S3Request, S3Response, S3Result,
    auth::SimpleAuth,
    dto::{
        CommonPrefix, GetObjectInput, GetObjectOutput, HeadObjectInput, HeadObjectOutput,
        ListObjectsV2Input, ListObjectsV2Output, Object, StreamingBlob, Timestamp,
    },
    s3_error,
    service::S3ServiceBuilder,
};
use tokio::{net::TcpListener, runtime::Runtime};

pub(crate) const BUCKET: &str = "data";
pub(crate) const ACCESS_KEY: &str = "reader";
pub(crate) const SECRET_KEY: &str = "secret of the reader";

/// The server; it ends when it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) bucket: Bucket,
    _runtime: Runtime,
}

/// The only bucket of the server; clones refer to the same bucket.
#[derive(Clone, Default)]
pub(crate) struct Bucket {
    objects: Arc<Mutex<BTreeMap<String, Stored>>>,
    /// Simulates a server that ignores `If-Match`.
    pub(crate) ignores_conditions: Arc<AtomicBool>,
}

#[derive(Clone)]
struct Stored {
    bytes: Bytes,
    tag: String,
    modified: SystemTime,
}

impl Server {
    pub(crate) fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let bucket = Bucket::default();
        let mut builder = S3ServiceBuilder::new(bucket.clone());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = builder.build().into_shared();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let connection = auto::Builder::new(TokioExecutor::new());
                    let _ = connection.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Self { address, bucket, _runtime: runtime }
    }
}

impl Bucket {
    /// Stores an object with the tag that S3 computes for an upload in one request.
    pub(crate) fn put(&self, key: &str, bytes: Vec<u8>) {
        let tag = hex(&Md5::digest(&bytes));
        self.put_tagged(key, bytes, &tag);
    }

    /// Stores an object with the tag that S3 computes for an upload in parts of this size.
    pub(crate) fn put_in_parts(&self, key: &str, bytes: Vec<u8>, part_bytes: usize) {
        let digests: Vec<_> = bytes.chunks(part_bytes).flat_map(Md5::digest).collect();
        let tag = format!("{}-{}", hex(&Md5::digest(digests)), bytes.chunks(part_bytes).count());
        self.put_tagged(key, bytes, &tag);
    }

    /// Stores an object with a given tag.
    pub(crate) fn put_tagged(&self, key: &str, bytes: Vec<u8>, tag: &str) {
        let (tag, modified) = (format!("\"{tag}\""), SystemTime::now());
        let stored = Stored { bytes: bytes.into(), tag, modified };
        self.objects.lock().unwrap().insert(key.to_owned(), stored);
    }

    fn get(&self, bucket: &str, key: &str) -> S3Result<Stored> {
        if bucket != BUCKET {
            return Err(s3_error!(NoSuchBucket, "The specified bucket does not exist"));
        }
        let objects = self.objects.lock().unwrap();
        objects.get(key).cloned().ok_or_else(|| s3_error!(NoSuchKey, "no such key"))
    }
}

#[async_trait::async_trait]
impl S3 for Bucket {
    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let stored = self.get(&input.bucket, &input.key)?;
        let heeds_conditions = !self.ignores_conditions.load(Ordering::Relaxed);
        if heeds_conditions && input.if_match.is_some_and(|tag| tag != stored.tag) {
            return Err(s3_error!(PreconditionFailed, "a condition does not hold"));
        }
        let size = stored.bytes.len() as u64;
        let range = input.range.map(|range| range.check(size)).transpose()?;
        let content_range =
            range.as_ref().map(|range| format!("bytes {}-{}/{size}", range.start, range.end - 1));
        let bytes = match range {
            Some(range) => stored.bytes.slice(range.start as usize..range.end as usize),
            None => stored.bytes,
        };
        Ok(S3Response::new(GetObjectOutput {
            content_length: Some(bytes.len() as i64),
            content_range,
            body: Some(StreamingBlob::from(Body::from(bytes))),
            e_tag: Some(stored.tag),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let stored = self.get(&request.input.bucket, &request.input.key)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(stored.bytes.len() as i64),
            e_tag: Some(stored.tag),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..HeadObjectOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        if input.bucket != BUCKET {
            return Err(s3_error!(NoSuchBucket, "The specified bucket does not exist"));
        }
        let prefix = input.prefix.unwrap_or_default();
        let (mut contents, mut folders) = (Vec::new(), BTreeSet::new());
        for (key, stored) in self.objects.lock().unwrap().iter() {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let delimiter = input.delimiter.as_deref().filter(|delimiter| !delimiter.is_empty());
            if let Some((folder, _)) = delimiter.and_then(|delimiter| rest.split_once(delimiter)) {
                folders.insert(format!("{prefix}{folder}/"));
                continue;
            }
            contents.push(Object {
                key: Some(key.clone()),
                size: Some(stored.bytes.len() as i64),
                e_tag: Some(stored.tag.clone()),
                last_modified: Some(Timestamp::from(stored.modified)),
                ..Object::default()
            });
        }
        let folders = folders.into_iter().map(|prefix| CommonPrefix { prefix: Some(prefix) });
        Ok(S3Response::new(ListObjectsV2Output {
            key_count: Some(contents.len() as i32),
            contents: Some(contents),
            common_prefixes: Some(folders.collect()),
            is_truncated: Some(false),
            prefix: Some(prefix),
            ..ListObjectsV2Output::default()
        }))
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
