//! Reads files in blocks, so that memory use does not depend on their size.

use std::{io, ops::Range};

use futures::{StreamExt, stream};
use object_store::ObjectStoreExt;

use crate::{Error, Store, direct, file::to_storage_error};

/// Bytes per read request to a bucket: large enough that latency does not dominate.
const REQUEST_BYTES: u64 = 8 << 20;
/// Enough for a copy between buckets to use the whole network bandwidth; 64 MiB are then in memory.
const MAX_CONCURRENT_REQUESTS: usize = 8;

impl Store {
    /// Passes the bytes `range` of a file to `each`, in order, in blocks that do not split values.
    /// A few blocks are in memory at a time.
    pub(crate) fn read_blocks(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let read = match &self.folder {
            Some(folder) => direct::read(&folder.join(file), range, each)
                .map_err(|error| to_storage_error(file, error)),
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
        let starts = range.clone().step_by(REQUEST_BYTES as usize);
        let blocks = starts.map(|start| start..range.end.min(start + REQUEST_BYTES));
        let requests =
            blocks.map(async |block| (block.clone(), self.objects.get_range(&path, block).await));
        let mut responses = stream::iter(requests).buffered(MAX_CONCURRENT_REQUESTS);
        while let Some((block, bytes)) = self.wait(responses.next()) {
            let bytes = bytes?;
            if bytes.len() as u64 != block.end - block.start {
                return Err(to_storage_error(file, io::ErrorKind::UnexpectedEof.into()));
            }
            each(&bytes);
        }
        Ok(())
    }
}
