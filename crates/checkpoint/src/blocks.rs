//! Reads files in parts, so that memory does not grow with them.

use std::ops::Range;

use object_store::{ObjectStoreExt, path::Path};

use crate::{Error, Store};

/// What is read at once. A request to a bucket should be worth its latency, and a thread's memory small.
pub(crate) const BLOCK_BYTES: u64 = 8 << 20;

impl Store {
    /// Hands the bytes `range` of a file to `each`, in order. The memory of one block is in use at a time.
    pub(crate) fn read_blocks(
        &self,
        file: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let path = Path::from(file);
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(BLOCK_BYTES));
            let read = self.wait(self.objects().get_range(&path, start..end));
            let block = read.map_err(|source| self.failed("read", file, source))?;
            if block.len() as u64 != end - start {
                let text = format!("it ends before byte {end}");
                let source =
                    object_store::Error::Generic { store: "checkpoint", source: text.into() };
                return Err(self.failed("read", file, source));
            }
            each(&block);
            start = end;
        }
        Ok(())
    }
}
