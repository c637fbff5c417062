//! Large objects in parts, several at once: no request takes long, and the memory in flight is bounded.

use std::{collections::VecDeque, iter, ops::Range};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload, Result,
    path::Path,
};

const PART_BYTES: usize = 16 << 20;
const PARTS_AT_ONCE: usize = 8;
/// S3 takes no more for one object.
const MOST_PARTS: usize = 10_000;
const UPLOAD_ATTEMPTS: u32 = 2;

/// Writes an object that appears in one piece. The memory of `payload` is read where it lies.
pub(crate) async fn upload(
    objects: &dyn ObjectStore,
    path: &Path,
    payload: PutPayload,
) -> Result<()> {
    let len = payload.content_length();
    if len <= PART_BYTES {
        return objects.put(path, payload).await.map(drop);
    }
    let part_bytes = PART_BYTES.max(len.div_ceil(MOST_PARTS));
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
            // What cannot be taken back is left to the bucket's lifecycle rule.
            let _ = upload.abort().await;
        }
        // The answer to the completion may be lost, and who asks again hears of no such upload.
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
    parts.buffer_unordered(PARTS_AT_ONCE).try_collect().await
}

/// The whole object, in one request, if it is no larger than `most`.
pub(crate) async fn whole(objects: &dyn ObjectStore, path: &Path, most: u64) -> Result<Bytes> {
    let object = objects.get(path).await?;
    refuse_larger(object.meta.size, most)?;
    object.bytes().await
}

fn refuse_larger(size: u64, most: u64) -> Result<()> {
    if size <= most {
        return Ok(());
    }
    let text = format!("it has {size} bytes, more than the {most} expected");
    Err(object_store::Error::Generic { store: "checkpoint", source: text.into() })
}

/// The whole object, in parts, if it is no larger than `most`.
pub(crate) async fn download(objects: &dyn ObjectStore, path: &Path, most: u64) -> Result<Bytes> {
    let range = Some(GetRange::Bounded(0..PART_BYTES as u64));
    let first = objects.get_opts(path, GetOptions { range, ..GetOptions::default() }).await?;
    let size = first.meta.size;
    refuse_larger(size, most)?;
    let first = first.bytes().await?;
    if first.len() as u64 == size {
        return Ok(first);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
    bytes.extend_from_slice(&first);
    drop(first);
    let mut rest = stream::iter(ranges(bytes.len() as u64, size))
        .map(|range| objects.get_range(path, range))
        .buffered(PARTS_AT_ONCE);
    while let Some(part) = rest.try_next().await? {
        bytes.extend_from_slice(&part);
    }
    Ok(bytes.into())
}

fn ranges(start: u64, end: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let starts = (start..end).step_by(PART_BYTES);
    starts.map(move |start| start..end.min(start + PART_BYTES as u64))
}

/// The payload in parts of so many bytes, the last one shorter.
fn parts(payload: PutPayload, part_bytes: usize) -> impl Iterator<Item = PutPayload> + Send {
    let mut pieces: VecDeque<Bytes> = payload.into_iter().collect();
    iter::from_fn(move || {
        let (mut part, mut room) = (Vec::new(), part_bytes);
        while room > 0
            && let Some(mut piece) = pieces.pop_front()
        {
            if piece.len() > room {
                pieces.push_front(piece.split_off(room));
            }
            room -= piece.len();
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
        fn parts_hold_every_byte_in_order_and_where_it_lay(
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
