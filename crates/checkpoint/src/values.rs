//! Reading a checkpoint's values: all of a rank's share of the files, or one region.

use std::{num::NonZeroUsize, ops::Range, sync::Mutex};

use crate::{
    Error, Manifest, ShardEntry, Store,
    proof::in_parallel,
    shard::{LENGTH_BYTES, ShardHeader, slice_of},
};

/// Takes `(region, offset, values)`.
type Take<'a> = dyn FnMut(&str, usize, &[f32]) + Send + 'a;

/// Where a shard holds its slice of a region.
struct Place<'a> {
    region: &'a str,
    /// Its first value in the region.
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
            let places = self.places(manifest, shard)?;
            self.read_proven(manifest, shard, &mut |start, block| {
                // Poisoned by a panic elsewhere, which is told there.
                let Ok(mut into) = into.lock() else { return };
                let block_bytes = start..start + block.len() as u64;
                for Place { region, offset, bytes } in &places {
                    let here = bytes.start.max(block_bytes.start)..bytes.end.min(block_bytes.end);
                    if here.start < here.end {
                        let part =
                            &block[(here.start - start) as usize..(here.end - start) as usize];
                        let behind = (here.start - bytes.start) as usize / size_of::<f32>();
                        with_values(part, |values| into(region, offset + behind, values));
                    }
                }
            })
        });
        outcomes.into_iter().collect()
    }

    /// All values of the region called `name`. They are taken as they lie; see [`prove`](Self::prove).
    ///
    /// # Errors
    /// There is no such region, or a file does not hold its part of it.
    pub fn read_region(&self, manifest: &Manifest, name: &str) -> Result<Vec<f32>, Error> {
        let damaged = |problem: String| Error::Damaged { name: manifest.name(), problem };
        let region = manifest.regions.iter().find(|region| region.name == name);
        let len = region.ok_or_else(|| damaged(format!("it has no region {name}")))?.len;
        let mut values = Vec::with_capacity(len);
        for shard in &manifest.shards {
            let places = self.places(manifest, shard)?;
            for place in places.iter().filter(|place| place.region == name) {
                let bytes = place.bytes.clone();
                self.read_blocks(&manifest.path(shard), bytes, &mut |block| {
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
        let damaged = |problem: String| Error::Damaged {
            name: manifest.name(),
            problem: format!("{}: {problem}", shard.file),
        };
        let file = manifest.path(shard);
        let mut bytes = Vec::new();
        self.read_present(manifest, shard, 0..LENGTH_BYTES, &mut |block| bytes.extend(block))?;
        let end = ShardHeader::end(&bytes, shard.bytes).map_err(damaged)?;
        self.read_blocks(&file, LENGTH_BYTES..end, &mut |block| bytes.extend(block))?;
        let header = ShardHeader::parse(&bytes, shard.bytes).map_err(damaged)?;
        let places = manifest.regions.iter().map(|region| {
            let slice = slice_of(region.len, shard.rank, manifest.world_size);
            let bytes = header.place(&region.name, slice.len()).map_err(damaged)?;
            Ok(Place { region: &region.name, offset: slice.start, bytes })
        });
        places.collect()
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
