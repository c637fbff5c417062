//! An object store that calls a hook before each operation; the hook can make the operation fail.

use std::{fmt, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    path::Path,
};

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationKind {
    Create,
    Put,
    Get,
    Delete,
    List,
}

#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) kind: OperationKind,
    pub(crate) path: String,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", format!("{:?}", self.kind).to_lowercase(), self.path)
    }
}

/// Injected result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InjectedResult {
    Succeeds,
    /// It fails without an effect.
    FailsBefore,
    /// It takes effect but returns an error: the response is lost.
    FailsAfter,
    /// Half of the bytes are written, then it fails.
    Torn,
    /// It fails because the disk is full.
    DiskFull,
}

#[derive(Clone)]
pub(crate) struct Hook(Arc<dyn Fn(&Operation) -> InjectedResult + Send + Sync>);

impl Hook {
    pub(crate) fn new(hook: impl Fn(&Operation) -> InjectedResult + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn before(hook: impl Fn(&Operation) + Send + Sync + 'static) -> Self {
        Self::new(move |operation| {
            hook(operation);
            InjectedResult::Succeeds
        })
    }

    fn ask(&self, kind: OperationKind, path: &Path) -> InjectedResult {
        (self.0)(&Operation { kind, path: path.to_string() })
    }
}

pub(crate) struct Hooked {
    inner: Arc<dyn ObjectStore>,
    hook: Hook,
}

impl Hooked {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, hook: Hook) -> Self {
        Self { inner, hook }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hooked {}", self.inner)
    }
}

impl fmt::Display for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

fn failure(outcome: InjectedResult) -> object_store::Error {
    let source: Box<dyn std::error::Error + Send + Sync> = match outcome {
        InjectedResult::DiskFull => std::io::Error::from(std::io::ErrorKind::StorageFull).into(),
        _ => "injected by the test".into(),
    };
    object_store::Error::Generic { store: "hooked", source }
}

/// Runs an operation with the injected outcome.
async fn inject<T>(outcome: InjectedResult, work: impl Future<Output = Result<T>>) -> Result<T> {
    match outcome {
        InjectedResult::Succeeds => work.await,
        InjectedResult::FailsAfter => {
            work.await?;
            Err(failure(outcome))
        }
        _ => Err(failure(outcome)),
    }
}

#[async_trait]
impl ObjectStore for Hooked {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let kind = if options.mode == PutMode::Create {
            OperationKind::Create
        } else {
            OperationKind::Put
        };
        let outcome = self.hook.ask(kind, location);
        if outcome == InjectedResult::Torn {
            let bytes = Bytes::from(payload);
            let half = bytes.slice(..bytes.len() / 2);
            self.inner.put_opts(location, half.into(), options).await?;
            return Err(failure(outcome));
        }
        inject(outcome, self.inner.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let outcome = self.hook.ask(OperationKind::Put, location);
        inject(outcome, self.inner.put_multipart_opts(location, options)).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let outcome = self.hook.ask(OperationKind::Get, location);
        inject(outcome, self.inner.get_opts(location, options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let outcome = self.hook.ask(OperationKind::Get, location);
        inject(outcome, self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (inner, hook) = (Arc::clone(&self.inner), self.hook.clone());
        let delete = move |location: Result<Path>| {
            let (inner, hook) = (Arc::clone(&inner), hook.clone());
            async move {
                let location = location?;
                let outcome = hook.ask(OperationKind::Delete, &location);
                inject(outcome, inner.delete(&location)).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let outcome = self.hook.ask(OperationKind::List, &prefix.cloned().unwrap_or_default());
        match outcome {
            InjectedResult::Succeeds => self.inner.list(prefix),
            _ => stream::iter([Err(failure(outcome))]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let outcome = self.hook.ask(OperationKind::List, &prefix.cloned().unwrap_or_default());
        inject(outcome, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
