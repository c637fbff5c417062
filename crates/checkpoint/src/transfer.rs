//! Transfers of objects: large objects are uploaded in parts, several at a time, so that each request is short.
//! Small objects are read in one request.

use std::{collections::VecDeque, iter};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload, Result, path::Path};

const PART_BYTES: usize = 16 << 20;
const MAX_CONCURRENT_PARTS: usize = 8;
/// S3's limit on the number of parts of one object.
const MAX_PARTS: usize = 10_000;
const UPLOAD_ATTEMPTS: u32 = 2;

/// Writes an object, which appears atomically. `payload` is not copied.
pub(crate) async fn upload(
    objects: &dyn ObjectStore,
    path: &Path,
    payload: PutPayload,
) -> Result<()> {
    let len = payload.content_length();
    if len <= PART_BYTES {
        return objects.put(path, payload).await.map(drop);
    }
    let part_bytes = PART_BYTES.max(len.div_ceil(MAX_PARTS));
    let mut attempt = 1;
    loop {
        let mut upload = objects.put_multipart(path).await?;
        let sent = send(&mut *upload, parts(payload.clone(), part_bytes)).await;
        let is_sent = sent.is_ok();
        let outcome = match sent {
            Ok(()) => upload.complete().await.map(drop),
            failed => failed,
        };
        if outcome.is_err() {
            // Best effort: the bucket's lifecycle rule removes uploads that could not be aborted.
            let _ = upload.abort().await;
        }
        // The response to the completion may be lost, and a retry of it would fail with "no such upload". So upload
        // everything again.
        if outcome.is_ok() || !is_sent || attempt == UPLOAD_ATTEMPTS {
            return outcome;
        }
        attempt += 1;
    }
}

async fn send(
    upload: &mut dyn MultipartUpload,
    parts: impl Iterator<Item = PutPayload> + Send,
) -> Result<()> {
    let parts = stream::iter(parts).map(|part| upload.put_part(part));
    parts.buffer_unordered(MAX_CONCURRENT_PARTS).try_collect().await
}

/// The complete object, in one request, if it is no larger than `max_bytes`.
pub(crate) async fn whole(objects: &dyn ObjectStore, path: &Path, max_bytes: u64) -> Result<Bytes> {
    let object = objects.get(path).await?;
    let size = object.meta.size;
    if size <= max_bytes {
        return object.bytes().await;
    }
    let text = format!("it has {size} bytes, more than the limit of {max_bytes}");
    Err(object_store::Error::Generic { store: "checkpoint", source: text.into() })
}

/// Splits the payload into parts of `part_bytes` bytes; the last part may be shorter.
fn parts(payload: PutPayload, part_bytes: usize) -> impl Iterator<Item = PutPayload> + Send {
    let mut pieces: VecDeque<Bytes> = payload.into_iter().collect();
    iter::from_fn(move || {
        let (mut part, mut remaining) = (Vec::new(), part_bytes);
        while remaining > 0
            && let Some(mut piece) = pieces.pop_front()
        {
            if piece.len() > remaining {
                pieces.push_front(piece.split_off(remaining));
            }
            remaining -= piece.len();
            part.push(piece);
        }
        (!part.is_empty()).then(|| part.into_iter().collect())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_contain_every_byte_in_order_without_copies(
            lens in proptest::collection::vec(0usize..20, 0..8),
            part_bytes in 1usize..30,
        ) {
            let whole = Bytes::from((0..lens.iter().sum::<usize>() as u8).collect::<Vec<u8>>());
            let mut rest = whole.clone();
            let payload: PutPayload = lens.iter().map(|len| rest.split_to(*len)).collect();
            let parts: Vec<PutPayload> = parts(payload, part_bytes).collect();
            let last = parts.len().saturating_sub(1);
            for part in &parts[..last] {
                prop_assert_eq!(part.content_length(), part_bytes);
            }
            let mut next = 0;
            for piece in parts.iter().flat_map(|part| part.iter()) {
                prop_assert_eq!(piece, &whole[next..next + piece.len()]);
                prop_assert!(piece.is_empty() || piece.as_ptr() == whole[next..].as_ptr());
                next += piece.len();
            }
            prop_assert_eq!(next, whole.len());
        }
    }
}
