//! The allocation table: the only part of the file with the sizes of stored JPEGs.

use super::{ALLOCATION_BYTES, Beton, Field, FieldType};
use crate::{Error, FileFault, SampleFault, mapping::Mapping};

/// One entry of the table: position and size of a value of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) sample: u64,
    pub(crate) pointer: u64,
    pub(crate) size: u64,
}

/// The unordered table. It is mapped into memory only while it is needed.
pub(crate) struct Allocations(Mapping);

impl Allocations {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Allocation> {
        let (entries, _) = self.0.as_chunks::<{ ALLOCATION_BYTES as usize }>();
        entries.iter().map(|entry| {
            let (words, _) = entry.as_chunks::<8>();
            let [sample, pointer, size] = [words[0], words[1], words[2]].map(u64::from_le_bytes);
            Allocation { sample, pointer, size }
        })
    }
}

impl Beton {
    pub(crate) fn allocations(&self) -> Result<Allocations, Error> {
        let range = self.table_start..self.file_bytes;
        Mapping::new(&self.file, range).map(Allocations).map_err(Error::io("map", &self.path))
    }

    /// Stored sizes of the values of one field whose pointer is at `pointer_offset` in a row, bytes; 0 if the table
    /// has no entry. Uses 4 bytes per sample: a value fits into a page, and a page is below 4 GiB.
    pub(super) fn stored_sizes(&self, pointer_offset: u64) -> Result<Vec<u32>, Error> {
        let mut sizes = vec![0; self.samples as usize];
        for (entry, allocation) in (0..).zip(self.allocations()?.iter()) {
            let Allocation { sample, pointer, size } = allocation;
            if sample >= self.samples {
                let samples = self.samples;
                return Err(self.file_error(FileFault::TableSample { entry, sample, samples }));
            }
            if self.pointer(sample, pointer_offset)? == pointer {
                // An empty value of another field may share the pointer: then the larger size belongs to this field.
                let largest: &mut u32 = &mut sizes[sample as usize];
                *largest = u32::try_from(size).unwrap_or(u32::MAX).max(*largest);
            }
        }
        Ok(sizes)
    }

    pub(super) fn pointer(&self, sample: u64, pointer_offset: u64) -> Result<u64, Error> {
        self.cell(sample, pointer_offset).map(u64::from_le_bytes)
    }

    /// Compares the values of a field of bytes, texts, arrays or tensors with the allocation table. Returns a fault
    /// for each value that has no entry, has another size there, or is outside the pages. (For images only the table
    /// has the size: [`check_images`](Self::check_images) checks them.)
    ///
    /// # Errors
    /// The table cannot be read, or has an entry for a sample that does not exist.
    pub(crate) fn value_faults(&self, field: &Field) -> Result<Vec<Error>, Error> {
        let value_bytes = match field.kind {
            FieldType::Bytes | FieldType::Json => None,
            FieldType::NdArray | FieldType::TorchTensor => match field.array_type() {
                Ok(array) => Some(array.value_bytes()),
                Err(fault) => return Ok(vec![self.file_error(fault)]),
            },
            FieldType::Float | FieldType::Int | FieldType::RgbImage => return Ok(Vec::new()),
        };
        let mut faults = Vec::new();
        for (sample, stored) in (0..).zip(self.stored_sizes(field.offset)?) {
            let pointer = self.pointer(sample, field.offset)?;
            let size = match value_bytes {
                Some(bytes) => bytes,
                None => self.pointer(sample, field.offset + 8)?,
            };
            if let Err(fault) = self.check_value(pointer, u64::from(stored), size) {
                faults.push(self.sample_error(sample, pointer, fault));
            }
        }
        Ok(faults)
    }

    /// Returns the first of [`value_faults`](Self::value_faults) as an error.
    ///
    /// # Errors
    /// Those of `value_faults`, or the first fault itself.
    pub(crate) fn check_values(&self, field: &Field) -> Result<(), Error> {
        self.value_faults(field)?.into_iter().next().map_or(Ok(()), Err)
    }

    fn check_value(&self, pointer: u64, stored: u64, size: u64) -> Result<(), SampleFault> {
        match stored {
            // An empty value stores nothing, so its pointer has no meaning.
            _ if size == 0 => Ok(()),
            0 => Err(SampleFault::MissingAllocation { pointer }),
            stored if stored != size => Err(SampleFault::ValueSize { stored, size }),
            _ => self.check_paged(pointer, size),
        }
    }
}
