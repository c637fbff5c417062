//! An object store that asks before each operation, and may be told to fail.

use std::{fmt, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    path::Path,
};

/// What is about to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Create,
    Put,
    Get,
    Delete,
    List,
}

#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) path: String,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", format!("{:?}", self.kind).to_lowercase(), self.path)
    }
}

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Done,
    /// It fails and does nothing.
    FailsBefore,
    /// It is done, and fails nevertheless: the answer is lost.
    FailsAfter,
    /// Half of the bytes arrive, and it fails.
    Torn,
    /// It fails because the disk is full.
    Full,
}

#[derive(Clone)]
pub(crate) struct Hook(Arc<dyn Fn(&Operation) -> Fate + Send + Sync>);

impl Hook {
    pub(crate) fn new(hook: impl Fn(&Operation) -> Fate + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn before(hook: impl Fn(&Operation) + Send + Sync + 'static) -> Self {
        Self::new(move |operation| {
            hook(operation);
            Fate::Done
        })
    }

    fn ask(&self, kind: Kind, path: &Path) -> Fate {
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

fn failure(fate: Fate) -> object_store::Error {
    let source: Box<dyn std::error::Error + Send + Sync> = match fate {
        Fate::Full => std::io::Error::from(std::io::ErrorKind::StorageFull).into(),
        _ => "the test wants it so".into(),
    };
    object_store::Error::Generic { store: "hooked", source }
}

/// Does it as fate will have it.
async fn fated<T>(fate: Fate, work: impl Future<Output = Result<T>>) -> Result<T> {
    match fate {
        Fate::Done => work.await,
        Fate::FailsAfter => {
            work.await?;
            Err(failure(fate))
        }
        _ => Err(failure(fate)),
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
        let kind = if options.mode == PutMode::Create { Kind::Create } else { Kind::Put };
        let fate = self.hook.ask(kind, location);
        if fate == Fate::Torn {
            let bytes = Bytes::from(payload);
            let half = bytes.slice(..bytes.len() / 2);
            self.inner.put_opts(location, half.into(), options).await?;
            return Err(failure(fate));
        }
        fated(fate, self.inner.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let fate = self.hook.ask(Kind::Put, location);
        fated(fate, self.inner.put_multipart_opts(location, options)).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let fate = self.hook.ask(Kind::Get, location);
        fated(fate, self.inner.get_opts(location, options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let fate = self.hook.ask(Kind::Get, location);
        fated(fate, self.inner.get_ranges(location, ranges)).await
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
                let fate = hook.ask(Kind::Delete, &location);
                fated(fate, inner.delete(&location)).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let fate = self.hook.ask(Kind::List, &prefix.cloned().unwrap_or_default());
        match fate {
            Fate::Done => self.inner.list(prefix),
            _ => stream::iter([Err(failure(fate))]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let fate = self.hook.ask(Kind::List, &prefix.cloned().unwrap_or_default());
        fated(fate, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
