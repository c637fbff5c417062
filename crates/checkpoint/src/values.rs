//! Reading a checkpoint's values: all of a rank's share of the files, or one region.

use std::{num::NonZeroUsize, ops::Range, sync::Mutex};

use crate::{
    Error, FrozenEntry, Manifest, ShardEntry, Store,
    manifest::FileInfo,
    proof::in_parallel,
    shard::{LENGTH_BYTES, ShardHeader, slice_of},
};

/// Takes `(region, offset, values)`.
type Take<'a> = dyn FnMut(&str, usize, &[f32]) + Send + 'a;

/// Where a file holds its slice of a region.
struct Place<'a> {
    region: &'a str,
    /// Its first word in the region.
    offset: usize,
    bytes: Range<u64>,
}

impl Store {
    /// Hands every value of `shards`, which are some of `manifest`'s, to `into(region, offset, values)` as
    /// they are read, up to `jobs` files at a time, and compares digests. Memory holds a few blocks.
    ///
    /// What was handed over is worth something only if this returns `Ok`.
    ///
    /// # Errors
    /// As [`prove`](Self::prove); or a file does not hold its part of the regions.
    pub fn load(
        &self,
        manifest: &Manifest,
        shards: &[&ShardEntry],
        jobs: NonZeroUsize,
        into: &mut Take<'_>,
    ) -> Result<(), Error> {
        let into = Mutex::new(into);
        let outcomes = in_parallel(shards, jobs, |shard| {
            let (file, places) = (manifest.shard(shard), self.places(manifest, shard)?);
            self.load_file(&file, &places, &mut |region, offset, values| {
                // Poisoned by a panic elsewhere, which is told there.
                if let Ok(mut into) = into.lock() {
                    into(region, offset, values);
                }
            })
        });
        outcomes.into_iter().collect()
    }

    /// As [`load`](Self::load), everything that training left as it was, in 32-bit words.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_frozen(&self, manifest: &Manifest, into: &mut Take<'_>) -> Result<(), Error> {
        for frozen in &manifest.frozen {
            let (file, place) = self.frozen_place(manifest, frozen)?;
            self.load_file(&file, &[place], into)?;
        }
        Ok(())
    }

    fn load_file(
        &self,
        file: &FileInfo,
        places: &[Place<'_>],
        into: &mut dyn FnMut(&str, usize, &[f32]),
    ) -> Result<(), Error> {
        self.read_proven(file, &mut |start, block| {
            let block_bytes = start..start + block.len() as u64;
            for Place { region, offset, bytes } in places {
                let here = bytes.start.max(block_bytes.start)..bytes.end.min(block_bytes.end);
                if here.start < here.end {
                    let part = &block[(here.start - start) as usize..(here.end - start) as usize];
                    let behind = (here.start - bytes.start) as usize / size_of::<f32>();
                    with_values(part, |values| into(region, offset + behind, values));
                }
            }
        })
    }

    /// All values of the region called `name`, as f32. They are taken as they lie; see [`prove`](Self::prove).
    ///
    /// # Errors
    /// There is no such region, or a file does not hold its part of it.
    pub fn read_region(&self, manifest: &Manifest, name: &str) -> Result<Vec<f32>, Error> {
        if let Some(frozen) = manifest.frozen.iter().find(|frozen| frozen.region == name) {
            let (file, place) = self.frozen_place(manifest, frozen)?;
            let mut values = Vec::with_capacity(frozen.len);
            self.read_present(&file, place.bytes, &mut |block| {
                with_values(block, |words| values.extend(frozen.float.decode(words)));
            })?;
            return Ok(values);
        }
        let damaged = |problem: String| Error::Damaged { name: manifest.name(), problem };
        let region = manifest.regions.iter().find(|region| region.name == name);
        let len = region.ok_or_else(|| damaged(format!("it has no region {name}")))?.len;
        let mut values = Vec::with_capacity(len);
        for shard in &manifest.shards {
            let (file, places) = (manifest.shard(shard), self.places(manifest, shard)?);
            for place in places.iter().filter(|place| place.region == name) {
                let bytes = place.bytes.clone();
                self.read_blocks(&file.path, bytes, &mut |block| {
                    with_values(block, |part| values.extend_from_slice(part));
                })?;
            }
        }
        Ok(values)
    }

    /// Where a shard holds its part of each region.
    fn places<'a>(
        &self,
        manifest: &'a Manifest,
        shard: &ShardEntry,
    ) -> Result<Vec<Place<'a>>, Error> {
        let file = manifest.shard(shard);
        let header = self.header(&file)?;
        let places = manifest.regions.iter().map(|region| {
            let slice = slice_of(region.len, shard.rank, manifest.world_size);
            let bytes = header.place(&region.name, slice.len());
            let bytes = bytes.map_err(|problem| file.damaged(format!(": {problem}")))?;
            Ok(Place { region: &region.name, offset: slice.start, bytes })
        });
        places.collect()
    }

    /// Where the values of a frozen region lie.
    fn frozen_place<'a>(
        &self,
        manifest: &Manifest,
        frozen: &'a FrozenEntry,
    ) -> Result<(FileInfo, Place<'a>), Error> {
        let file = FileInfo::frozen(&manifest.name(), frozen);
        let FrozenEntry { region, float, len, .. } = frozen;
        let bytes = self.header(&file)?.place_of(region, *float, *len);
        let bytes = bytes.map_err(|problem| file.damaged(format!(": {problem}")))?;
        Ok((file, Place { region, offset: 0, bytes }))
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

/// The values that whole words are, in place wherever they lie in memory as they should.
fn with_values(bytes: &[u8], mut each: impl FnMut(&[f32])) {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) => each(values),
        Err(_) => {
            let words = bytes.as_chunks::<4>().0.iter();
            each(&words.map(|word| f32::from_le_bytes(*word)).collect::<Vec<f32>>());
        }
    }
}
