//! Verification of a file, used by `baton data verify`.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use crate::{
    Beton, Decoder, Error, SampleFault, TextColumn,
    beton::{ArrayColumn, BytesColumn, FieldType, FloatColumn, ImageColumn},
};

/// Number of samples that a thread claims at a time.
const CHUNK_SAMPLES: u64 = 64;

/// Checks the samples of a file one by one.
pub struct Verifier<'a> {
    beton: &'a Beton,
    columns: Vec<Column>,
    /// Tokens and labels, if the file has texts for language models.
    texts: Option<TextColumn>,
    faults: Vec<Error>,
}

/// A field whose values can be invalid; integers in the rows cannot.
enum Column {
    Float(FloatColumn),
    Image(ImageColumn),
    Bytes(BytesColumn),
    Json(BytesColumn),
    Array(ArrayColumn),
}

impl<'a> Verifier<'a> {
    /// Checks the rows against the allocation table.
    ///
    /// # Errors
    /// They are so inconsistent that no sample can be checked.
    pub fn new(beton: &'a Beton) -> Result<Self, Error> {
        let (mut columns, mut faults) = (Vec::new(), Vec::new());
        for field in beton.fields() {
            let name = &field.name;
            let array = matches!(field.kind, FieldType::NdArray | FieldType::TorchTensor);
            faults.extend(beton.value_faults(field)?);
            columns.push(match field.kind {
                FieldType::Int => continue,
                FieldType::Float => Column::Float(beton.float_column(name)?),
                // Already among the faults.
                _ if array && field.array_type().is_err() => continue,
                FieldType::RgbImage => Column::Image(beton.image_column(name)?),
                FieldType::Bytes => Column::Bytes(beton.bytes_column(name)?),
                FieldType::Json => Column::Json(beton.bytes_column(name)?),
                FieldType::NdArray | FieldType::TorchTensor => {
                    Column::Array(beton.array_column(name)?)
                }
            });
        }
        Ok(Self { beton, columns, texts: TextColumn::find(beton).ok(), faults })
    }

    /// Faults found in the rows and the allocation table.
    #[must_use]
    pub fn faults(&self) -> &[Error] {
        &self.faults
    }

    /// Reads all values of a sample: images are decoded, JSON texts parsed, floating-point numbers must be finite as f32,
    /// the type used in training, and tokens, labels and numbers of a text must fit each other.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check(&self, sample: u64, buffers: &mut VerifyBuffers) -> Result<(), Error> {
        for column in &self.columns {
            match column {
                Column::Float(column) => {
                    self.beton.float_as_f32(column, sample)?;
                }
                Column::Image(column) => {
                    let image = self.beton.image(column, sample, &mut buffers.buffer)?;
                    let start = self.beton.image_location(column, sample)?.start;
                    let decoded = buffers.decoder.decode(&image);
                    decoded.map_err(|fault| self.beton.sample_error(sample, start, fault))?;
                }
                Column::Bytes(column) => {
                    self.beton.bytes(column, sample, &mut buffers.buffer)?;
                }
                Column::Json(column) => {
                    let text = self.beton.bytes(column, sample, &mut buffers.buffer)?;
                    serde_json::from_slice::<serde::de::IgnoredAny>(text).map_err(|error| {
                        let fault = SampleFault::Json(error.to_string());
                        self.beton.sample_error(sample, 0, fault)
                    })?;
                }
                Column::Array(column) => {
                    let VerifyBuffers { buffer, values, .. } = &mut *buffers;
                    self.beton.array_as_f32(column, sample, buffer, values)?;
                }
            }
        }
        if let Some(texts) = &self.texts {
            let VerifyBuffers { buffer, tokens, labels, .. } = buffers;
            texts.read(self.beton, sample, buffer, (tokens, labels))?;
        }
        Ok(())
    }

    /// Checks every sample with `threads` threads. `progress` is called with the number of newly checked samples,
    /// from any thread. The faults are in the order of the samples.
    #[must_use]
    pub fn check_all(&self, threads: usize, progress: impl Fn(u64) + Sync) -> Vec<Error> {
        let check = |buffers: &mut VerifyBuffers, sample| self.check(sample, buffers);
        visit_samples(
            self.beton.len(),
            threads,
            VerifyBuffers::new,
            check,
            progress,
            AfterFault::GoOn,
        )
    }
}

/// What follows the first fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterFault {
    GoOn,
    Stop,
}

/// Visits all samples with several threads, each with a state of its own, which `new` makes. `progress` is called with the number
/// of newly visited samples, from any thread. The errors are in the order of the samples.
pub(crate) fn visit_samples<W>(
    samples: u64,
    threads: usize,
    new: impl Fn() -> Result<W, Error> + Sync,
    visit: impl Fn(&mut W, u64) -> Result<(), Error> + Sync,
    progress: impl Fn(u64) + Sync,
    after_fault: AfterFault,
) -> Vec<Error> {
    let (next, found) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let stop = AtomicBool::new(false);
    let record = |sample: u64, error: Error| {
        found.lock().unwrap_or_else(PoisonError::into_inner).push((sample, error));
    };
    let work = || {
        let mut state = match new() {
            Ok(state) => state,
            Err(error) => return record(samples, error),
        };
        while !stop.load(Ordering::Relaxed) {
            let start = next.fetch_add(CHUNK_SAMPLES, Ordering::Relaxed);
            if start >= samples {
                return;
            }
            let end = samples.min(start + CHUNK_SAMPLES);
            for sample in start..end {
                if let Err(error) = visit(&mut state, sample) {
                    record(sample, error);
                    stop.fetch_or(after_fault == AfterFault::Stop, Ordering::Relaxed);
                }
            }
            progress(end - start);
        }
    };
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                if catch_unwind(AssertUnwindSafe(work)).is_err() {
                    stop.store(true, Ordering::Relaxed);
                    record(samples, Error::Panicked);
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_by_key(|(sample, _)| *sample);
    found.into_iter().map(|(_, error)| error).collect()
}

/// Decoder and buffers of a thread that checks samples.
pub struct VerifyBuffers {
    decoder: Decoder,
    buffer: Vec<u8>,
    values: Vec<f32>,
    tokens: Vec<i64>,
    labels: Vec<i64>,
}

impl VerifyBuffers {
    /// A decoder with empty buffers.
    ///
    /// # Errors
    /// libjpeg-turbo cannot be initialised.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            decoder: Decoder::new()?,
            buffer: Vec::new(),
            values: Vec::new(),
            tokens: Vec::new(),
            labels: Vec::new(),
        })
    }
}
