//! Reads files in parts, so that memory does not grow with them.

use std::{io, iter, ops::Range};

use futures::{StreamExt, stream};
use object_store::ObjectStoreExt;

use crate::{Error, Store, direct, file::of_disk};

/// What is read at once from a bucket: worth a request's latency.
const REQUEST_BYTES: u64 = 8 << 20;
const REQUESTS_AT_ONCE: usize = 4;

impl Store {
    /// Hands the bytes `range` of a file to `each`, in order, in blocks that are whole numbers of values.
    /// Memory holds a few blocks.
    pub(crate) fn read_blocks(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let read = match &self.folder {
            Some(folder) => {
                direct::read(&folder.join(file), range, each).map_err(|error| of_disk(file, error))
            }
            None => self.read_object(file, range, each),
        };
        read.map_err(|source| self.failed("read", file, source))
    }

    fn read_object(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), object_store::Error> {
        let path = object_store::path::Path::from(file);
        let requests = blocks(range, REQUEST_BYTES)
            .map(|block| async { (block.clone(), self.objects.get_range(&path, block).await) });
        let mut answers = stream::iter(requests).buffered(REQUESTS_AT_ONCE);
        while let Some((block, bytes)) = self.wait(answers.next()) {
            let bytes = bytes?;
            if bytes.len() as u64 != block.end - block.start {
                return Err(of_disk(file, io::ErrorKind::UnexpectedEof.into()));
            }
            each(&bytes);
        }
        Ok(())
    }
}

/// The range in parts of so many bytes, the last one shorter.
fn blocks(range: Range<u64>, bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    iter::from_fn(move || {
        let end = range.end.min(start.saturating_add(bytes));
        let block = (start < end).then_some(start..end);
        start = end;
        block
    })
}
