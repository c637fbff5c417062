//! An S3 server in this process: `s3s` implements the protocol and checks signatures, objects are kept in memory,
//! listings have small pages, and every n-th request can be made to fail.

#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
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
        AbortMultipartUploadInput, AbortMultipartUploadOutput, CommonPrefix,
        CompleteMultipartUploadInput, CompleteMultipartUploadOutput, CreateMultipartUploadInput,
        CreateMultipartUploadOutput, DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput,
        DeleteObjectsOutput, DeletedObject, GetObjectInput, GetObjectOutput, HeadObjectInput,
        HeadObjectOutput, ListObjectsV2Input, ListObjectsV2Output, Object, PutObjectInput,
        PutObjectOutput, StreamingBlob, Timestamp, UploadPartInput, UploadPartOutput,
    },
    s3_error,
    service::S3ServiceBuilder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};

/// The only bucket.
pub const BUCKET: &str = "bucket";
/// The only user.
pub const ACCESS_KEY: &str = "user";
/// The user's secret.
pub const SECRET_KEY: &str = "secret of the user";
/// Maximum number of entries in one page of a listing.
const PAGE_ENTRIES: usize = 3;

/// Time between two looks of a delayed request.
const DELAY_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Status 500 without an effect.
    Internal,
    /// Status 503 with `SlowDown`, without an effect.
    Throttled,
    /// The request takes effect, and the connection breaks before the response.
    ResponseLost,
    /// There is no response and no effect.
    Stalled,
    /// There is no response and no effect until the server recovers.
    Delayed,
    /// The request takes this long, as with a server far away.
    Slow(Duration),
}

/// The server; it ends when it is dropped.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its bucket.
    pub bucket: Bucket,
    runtime: Option<Runtime>,
}

/// The bucket of a server; clones refer to the same one.
#[derive(Clone, Default)]
pub struct Bucket(Arc<BucketState>);

#[derive(Default)]
struct BucketState {
    objects: Mutex<BTreeMap<String, StoredObject>>,
    uploads: Mutex<BTreeMap<String, BTreeMap<i32, Bytes>>>,
    requests: AtomicUsize,
    fault: Mutex<Option<(Fault, usize)>>,
    /// Requests that got a fault.
    struck: AtomicUsize,
    cuts_next_response: AtomicBool,
    ignores_conditions: AtomicBool,
}

#[derive(Clone)]
struct StoredObject {
    bytes: Bytes,
    tag: String,
    modified: SystemTime,
}

impl Server {
    /// Starts on a free port.
    #[must_use]
    pub fn start() -> Self {
        Self::start_on("127.0.0.1")
    }

    /// Starts on a free port of this address.
    #[must_use]
    pub fn start_on(host: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        // Tests that are asynchronous start it too, so nothing may block on the runtime.
        let listener = std::net::TcpListener::bind((host, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let bucket = Bucket::default();
        let mut builder = S3ServiceBuilder::new(bucket.clone());
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = builder.build().into_shared();
        let state = Arc::clone(&bucket.0);
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((socket, _)) = listener.accept().await {
                let (service, state) = (service.clone(), Arc::clone(&state));
                tokio::spawn(async move {
                    let connection = TokioIo::new(FaultyConnection { socket, state });
                    let server = auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(connection, service).await;
                });
            }
        });
        Self { address, bucket, runtime: Some(runtime) }
    }

    /// From now on every `every`-th request gets the fault.
    pub fn faults(&self, fault: Fault, every: usize) {
        *self.bucket.0.fault.lock().unwrap() = Some((fault, every));
    }

    /// No request gets a fault any more.
    pub fn recovers(&self) {
        *self.bucket.0.fault.lock().unwrap() = None;
    }

    /// Number of requests that got a fault so far.
    #[must_use]
    pub fn struck(&self) -> usize {
        self.bucket.0.struck.load(Ordering::SeqCst)
    }

    /// Stores an object.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        self.bucket.put(key, bytes);
    }

    /// Flips a bit in the middle of an object.
    pub fn damage(&self, key: &str) {
        let mut objects = self.bucket.0.objects.lock().unwrap();
        let stored = objects.get_mut(key).unwrap();
        let mut bytes = stored.bytes.to_vec();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        stored.bytes = bytes.into();
    }

    /// Environment variables for processes that use this server.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }

    /// Location of a store in its bucket.
    #[must_use]
    pub fn location(&self) -> String {
        format!("s3://{BUCKET}/runs/first")
    }

    /// Keys and sizes of all objects.
    #[must_use]
    pub fn objects(&self) -> Vec<(String, usize)> {
        let objects = self.bucket.0.objects.lock().unwrap();
        objects.iter().map(|(key, stored)| (key.clone(), stored.bytes.len())).collect()
    }

    /// Number of uploads in parts that are neither complete nor given up.
    #[must_use]
    pub fn unfinished_uploads(&self) -> usize {
        self.bucket.0.uploads.lock().unwrap().len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A connection that breaks on request.
struct FaultyConnection {
    socket: TcpStream,
    state: Arc<BucketState>,
}

impl AsyncRead for FaultyConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for FaultyConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.state.cuts_next_response.swap(false, Ordering::SeqCst) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

impl Bucket {
    /// Stores an object with the tag that S3 computes for an upload in one request.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        self.0.store(key.to_owned(), bytes.into());
    }

    /// Stores an object with the tag that S3 computes for an upload in parts of this size.
    pub fn put_in_parts(&self, key: &str, bytes: Vec<u8>, part_bytes: usize) {
        let digests: Vec<_> = bytes.chunks(part_bytes).flat_map(Md5::digest).collect();
        let tag = format!("{}-{}", hex(&Md5::digest(digests)), bytes.chunks(part_bytes).count());
        self.put_tagged(key, bytes, &tag);
    }

    /// Stores an object with a given tag.
    pub fn put_tagged(&self, key: &str, bytes: Vec<u8>, tag: &str) {
        self.0.store_tagged(key.to_owned(), bytes.into(), tag);
    }

    /// Whether it ignores `If-Match`, as some servers do.
    pub fn ignores_conditions(&self, ignores: bool) {
        self.0.ignores_conditions.store(ignores, Ordering::Relaxed);
    }

    /// Handles a request, or injects a fault.
    async fn handle<T>(
        &self,
        bucket: &str,
        work: impl FnOnce(&BucketState) -> S3Result<T>,
    ) -> S3Result<S3Response<T>> {
        if bucket != BUCKET {
            return Err(s3_error!(NoSuchBucket, "The specified bucket\n does not exist"));
        }
        let state = &*self.0;
        let count = state.requests.fetch_add(1, Ordering::SeqCst) + 1;
        let fault = *state.fault.lock().unwrap();
        let fault = fault.filter(|(_, every)| count.is_multiple_of(*every)).map(|(fault, _)| fault);
        if fault.is_some() {
            state.struck.fetch_add(1, Ordering::SeqCst);
        }
        match fault {
            None => work(state).map(S3Response::new),
            Some(Fault::Internal) => Err(s3_error!(InternalError, "injected by the test")),
            Some(Fault::Throttled) => Err(s3_error!(SlowDown, "Please reduce your request rate.")),
            Some(Fault::Stalled) => pending().await,
            Some(Fault::Delayed) => {
                while state.fault.lock().unwrap().is_some_and(|(fault, _)| fault == Fault::Delayed)
                {
                    tokio::time::sleep(DELAY_POLL_INTERVAL).await;
                }
                work(state).map(S3Response::new)
            }
            Some(Fault::Slow(duration)) => {
                tokio::time::sleep(duration).await;
                work(state).map(S3Response::new)
            }
            Some(Fault::ResponseLost) => {
                let response = work(state);
                state.cuts_next_response.store(true, Ordering::SeqCst);
                response.map(S3Response::new)
            }
        }
    }
}

impl BucketState {
    fn store(&self, key: String, bytes: Bytes) -> String {
        let tag = hex(&Md5::digest(&bytes));
        self.store_tagged(key, bytes, &tag)
    }

    fn store_tagged(&self, key: String, bytes: Bytes, tag: &str) -> String {
        let tag = format!("\"{tag}\"");
        let stored = StoredObject { bytes, tag: tag.clone(), modified: SystemTime::now() };
        self.objects.lock().unwrap().insert(key, stored);
        tag
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn read(body: Option<StreamingBlob>) -> S3Result<Bytes> {
    let Some(body) = body else { return Ok(Bytes::new()) };
    let mut body = Body::from(body);
    body.store_all_unlimited().await.map_err(|error| s3_error!(InternalError, "{error}"))
}

#[async_trait::async_trait]
impl S3 for Bucket {
    async fn put_object(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = request.input;
        let bytes = read(input.body).await?;
        self.handle(&input.bucket, |state| {
            let is_there = state.objects.lock().unwrap().contains_key(&input.key);
            if input.if_none_match.is_some() && is_there {
                return Err(s3_error!(PreconditionFailed, "the object exists"));
            }
            let tag = state.store(input.key, bytes);
            Ok(PutObjectOutput { e_tag: Some(tag), ..PutObjectOutput::default() })
        })
        .await
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let upload = uuid::Uuid::new_v4().to_string();
            state.uploads.lock().unwrap().insert(upload.clone(), BTreeMap::new());
            Ok(CreateMultipartUploadOutput {
                bucket: Some(BUCKET.to_owned()),
                key: Some(input.key),
                upload_id: Some(upload),
                ..CreateMultipartUploadOutput::default()
            })
        })
        .await
    }

    async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let bytes = read(input.body).await?;
        self.handle(&input.bucket, |state| {
            let mut uploads = state.uploads.lock().unwrap();
            let no_upload = || s3_error!(NoSuchUpload, "no such upload");
            let upload = uploads.get_mut(&input.upload_id).ok_or_else(no_upload)?;
            upload.insert(input.part_number, bytes);
            let tag = Some(format!("\"part-{}\"", input.part_number));
            Ok(UploadPartOutput { e_tag: tag, ..UploadPartOutput::default() })
        })
        .await
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let upload = state.uploads.lock().unwrap().remove(&input.upload_id);
            let parts = upload.ok_or_else(|| s3_error!(NoSuchUpload, "no such upload"))?;
            let bytes: Vec<u8> = parts.values().flatten().copied().collect();
            let tag = state.store(input.key.clone(), bytes.into());
            Ok(CompleteMultipartUploadOutput {
                bucket: Some(BUCKET.to_owned()),
                key: Some(input.key),
                e_tag: Some(tag),
                ..CompleteMultipartUploadOutput::default()
            })
        })
        .await
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            state.uploads.lock().unwrap().remove(&input.upload_id);
            Ok(AbortMultipartUploadOutput::default())
        })
        .await
    }

    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let stored = state.objects.lock().unwrap().get(&input.key).cloned();
            let stored = stored.ok_or_else(|| s3_error!(NoSuchKey, "no such key"))?;
            let heeds_conditions = !state.ignores_conditions.load(Ordering::Relaxed);
            if heeds_conditions && input.if_match.is_some_and(|tag| tag != stored.tag) {
                return Err(s3_error!(PreconditionFailed, "a condition does not hold"));
            }
            let size = stored.bytes.len() as u64;
            let range = input.range.map(|range| range.check(size)).transpose()?;
            let content_range = range
                .as_ref()
                .map(|range| format!("bytes {}-{}/{size}", range.start, range.end - 1));
            let bytes = match range {
                Some(range) => stored.bytes.slice(range.start as usize..range.end as usize),
                None => stored.bytes,
            };
            Ok(GetObjectOutput {
                content_length: Some(bytes.len() as i64),
                content_range,
                body: Some(StreamingBlob::from(Body::from(bytes))),
                e_tag: Some(stored.tag),
                last_modified: Some(Timestamp::from(stored.modified)),
                ..GetObjectOutput::default()
            })
        })
        .await
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let stored = state.objects.lock().unwrap().get(&input.key).cloned();
            let stored = stored.ok_or_else(|| s3_error!(NoSuchKey, "no such key"))?;
            Ok(HeadObjectOutput {
                content_length: Some(stored.bytes.len() as i64),
                e_tag: Some(stored.tag),
                last_modified: Some(Timestamp::from(stored.modified)),
                ..HeadObjectOutput::default()
            })
        })
        .await
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            state.objects.lock().unwrap().remove(&input.key);
            Ok(DeleteObjectOutput::default())
        })
        .await
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let mut deleted = Vec::new();
            for object in input.delete.objects {
                state.objects.lock().unwrap().remove(&object.key);
                deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() });
            }
            Ok(DeleteObjectsOutput { deleted: Some(deleted), ..DeleteObjectsOutput::default() })
        })
        .await
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = request.input;
        self.handle(&input.bucket, |state| {
            let prefix = input.prefix.unwrap_or_default();
            let delimiter = input.delimiter.filter(|delimiter| !delimiter.is_empty());
            let objects = state.objects.lock().unwrap();
            let mut names: BTreeSet<String> = BTreeSet::new();
            for key in objects.keys() {
                let Some(rest) = key.strip_prefix(&prefix) else { continue };
                let split = delimiter.as_deref().and_then(|delimiter| rest.split_once(delimiter));
                names.insert(match split {
                    Some((folder, _)) => format!("{prefix}{folder}/"),
                    None => key.clone(),
                });
            }
            let after = input.continuation_token.unwrap_or_default();
            names.retain(|name| *name > after);
            let page: Vec<String> = names.iter().take(PAGE_ENTRIES).cloned().collect();
            let is_truncated = names.len() > page.len();
            let (mut contents, mut folders) = (Vec::new(), Vec::new());
            for name in &page {
                match objects.get(name) {
                    Some(stored) => contents.push(Object {
                        key: Some(name.clone()),
                        size: Some(stored.bytes.len() as i64),
                        e_tag: Some(stored.tag.clone()),
                        last_modified: Some(Timestamp::from(stored.modified)),
                        ..Object::default()
                    }),
                    None => folders.push(CommonPrefix { prefix: Some(name.clone()) }),
                }
            }
            Ok(ListObjectsV2Output {
                key_count: Some(page.len() as i32),
                next_continuation_token: page.last().cloned().filter(|_| is_truncated),
                contents: Some(contents),
                common_prefixes: Some(folders),
                is_truncated: Some(is_truncated),
                prefix: Some(prefix),
                ..ListObjectsV2Output::default()
            })
        })
        .await
    }
}
