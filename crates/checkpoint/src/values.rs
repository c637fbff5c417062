//! Reads the values of a checkpoint: complete shards, or one region.

use std::{num::NonZeroUsize, ops::Range, sync::Mutex};

use crate::{
    Error, Float, FrozenEntry, Manifest, ShardEntry, Store,
    manifest::FileInfo,
    shard::{LENGTH_BYTES, ShardHeader, slice_of},
    verify::in_parallel,
};

/// Receives `(region, offset, values)`.
type ValueSink<'a> = dyn FnMut(&str, usize, &[f32]) + Send + 'a;

/// Position of a region's slice in a file.
struct FileSlice<'a> {
    region: &'a str,
    /// Position of the first word in the region.
    offset: usize,
    /// Byte range in the file.
    bytes: Range<u64>,
}

impl Store {
    /// Passes every value of `shards`, a subset of the shards of `manifest`, to `into(region, offset, values)` as
    /// they are read, up to `jobs` files at a time, and compares digests. A few blocks are in memory at a time.
    ///
    /// The passed values are valid only if this returns `Ok`.
    ///
    /// # Errors
    /// Those of [`verify`](Self::verify); or a file does not contain its part of the regions.
    pub fn load(
        &self,
        manifest: &Manifest,
        shards: &[&ShardEntry],
        jobs: NonZeroUsize,
        into: &mut ValueSink<'_>,
    ) -> Result<(), Error> {
        let into = Mutex::new(into);
        let outcomes = in_parallel(shards, jobs, |shard| {
            let (file, slices) = (manifest.shard(shard), self.slices(manifest, shard)?);
            self.load_file(&file, &slices, &mut |region, offset, values| {
                // The lock is poisoned only after a panic in another thread, which is reported there.
                if let Ok(mut into) = into.lock() {
                    into(region, offset, values);
                }
            })
        });
        outcomes.into_iter().collect()
    }

    /// Like [`load`](Self::load), for all frozen regions, in 32-bit words.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_frozen(&self, manifest: &Manifest, into: &mut ValueSink<'_>) -> Result<(), Error> {
        for frozen in &manifest.frozen {
            let (file, slice) = self.frozen_slice(manifest, frozen)?;
            self.load_file(&file, &[slice], into)?;
        }
        Ok(())
    }

    fn load_file(
        &self,
        file: &FileInfo,
        slices: &[FileSlice<'_>],
        into: &mut dyn FnMut(&str, usize, &[f32]),
    ) -> Result<(), Error> {
        self.read_verified(file, &mut |start, block| {
            let block_bytes = start..start + block.len() as u64;
            for FileSlice { region, offset, bytes } in slices {
                let overlap = bytes.start.max(block_bytes.start)..bytes.end.min(block_bytes.end);
                if overlap.start < overlap.end {
                    let part =
                        &block[(overlap.start - start) as usize..(overlap.end - start) as usize];
                    let skipped = (overlap.start - bytes.start) as usize / size_of::<f32>();
                    with_values(part, |values| into(region, offset + skipped, values));
                }
            }
        })
    }

    /// All values of the region `name`, as f32. Digests are not checked; see [`verify`](Self::verify).
    ///
    /// # Errors
    /// There is no such region, or a file does not contain its part of it.
    pub fn read_region(&self, manifest: &Manifest, name: &str) -> Result<Vec<f32>, Error> {
        if let Some(frozen) = manifest.frozen.iter().find(|frozen| frozen.region == name) {
            let (file, slice) = self.frozen_slice(manifest, frozen)?;
            let mut values = Vec::with_capacity(frozen.len);
            self.read_present(&file, slice.bytes, &mut |block| {
                with_values(block, |words| {
                    values.extend(frozen.float.decode(bytemuck::cast_slice(words)))
                });
            })?;
            return Ok(values);
        }
        let damaged = |problem: String| Error::Damaged { name: manifest.name(), problem };
        let region = manifest.regions.iter().find(|region| region.name == name);
        let len = region.ok_or_else(|| damaged(format!("it has no region {name}")))?.len;
        let mut values = Vec::with_capacity(len);
        for shard in &manifest.shards {
            let (file, slices) = (manifest.shard(shard), self.slices(manifest, shard)?);
            for slice in slices.iter().filter(|slice| slice.region == name) {
                let bytes = slice.bytes.clone();
                self.read_blocks(&file.path, bytes, &mut |block| {
                    with_values(block, |part| values.extend_from_slice(part));
                })?;
            }
        }
        Ok(values)
    }

    /// The slice of each region in a shard.
    fn slices<'a>(
        &self,
        manifest: &'a Manifest,
        shard: &ShardEntry,
    ) -> Result<Vec<FileSlice<'a>>, Error> {
        let file = manifest.shard(shard);
        let header = self.header(&file)?;
        let slices = manifest.regions.iter().map(|region| {
            let slice = slice_of(region.len, shard.rank, manifest.world_size);
            let bytes = header.byte_range(&region.name, Float::F32, slice.len());
            let bytes = bytes.map_err(|problem| file.damaged(format!(": {problem}")))?;
            Ok(FileSlice { region: &region.name, offset: slice.start, bytes })
        });
        slices.collect()
    }

    /// The file of a frozen region, and the position of its values.
    fn frozen_slice<'a>(
        &self,
        manifest: &Manifest,
        frozen: &'a FrozenEntry,
    ) -> Result<(FileInfo, FileSlice<'a>), Error> {
        let file = FileInfo::frozen(&manifest.name(), frozen);
        let FrozenEntry { region, float, len, .. } = frozen;
        let bytes = self.header(&file)?.byte_range(region, *float, *len);
        let bytes = bytes.map_err(|problem| file.damaged(format!(": {problem}")))?;
        Ok((file, FileSlice { region, offset: 0, bytes }))
    }

    fn header(&self, file: &FileInfo) -> Result<ShardHeader, Error> {
        let damaged = |problem: String| file.damaged(format!(": {problem}"));
        let mut bytes = Vec::new();
        self.read_present(file, 0..LENGTH_BYTES, &mut |block| bytes.extend(block))?;
        let end = ShardHeader::end(&bytes, file.bytes).map_err(damaged)?;
        self.read_blocks(&file.path, LENGTH_BYTES..end, &mut |block| bytes.extend(block))?;
        ShardHeader::parse(&bytes, file.bytes).map_err(damaged)
    }
}

/// Passes bytes as f32 values; copies them only if the memory is not aligned.
fn with_values(bytes: &[u8], mut each: impl FnMut(&[f32])) {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) => each(values),
        Err(_) => {
            let words = bytes.as_chunks::<4>().0.iter();
            each(&words.map(|word| f32::from_le_bytes(*word)).collect::<Vec<f32>>());
        }
    }
}
