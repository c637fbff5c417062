//! Statistics of the values of a file, which are all read: what a recipe needs to know of its data.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde::Serialize;

use crate::{
    Beton, Decoder, Error, LARGEST_FIELD, PREDICTED_FIELD, TOKENS_FIELD,
    beton::{FieldType, ImageColumn},
    verify::{AfterFault, visit_samples},
    write::{RECORDING_FIELD, START_FIELD},
};

/// Most classes of a field.
const MAX_CLASSES: usize = 100_000;

/// Statistics of the values of a field.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldStatistics {
    /// Name of the field.
    pub name: String,
    /// The statistics.
    #[serde(flatten)]
    pub values: ValueStatistics,
}

/// Statistics of values.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ValueStatistics {
    /// Of an image field, over all pixels of all images in their stored sizes, in units of 0..255.
    Pixels {
        /// Mean of each channel: red, green, blue.
        mean: [f64; 3],
        /// Standard deviation of each channel.
        std: [f64; 3],
    },
    /// Of an Int field whose values may be classes, as none is below 0.
    Classes {
        /// Number of samples of each class.
        class_counts: Vec<u64>,
        /// Weights with which all classes count the same in sum, 1 on average over the samples; absent if a class has none.
        class_weights: Option<Vec<f64>>,
    },
}

/// The statistics of all image fields and of all fields of classes.
///
/// The result does not depend on the number of threads: pixels are summed as integers. `progress` is called with the number of
/// newly read samples, from any thread.
///
/// # Errors
/// A value cannot be read, or its image not be decoded.
pub fn statistics(
    beton: &Beton,
    threads: usize,
    progress: impl Fn(u64) + Sync,
) -> Result<Vec<FieldStatistics>, Error> {
    let images = beton.fields().iter().filter(|field| field.kind == FieldType::RgbImage);
    let columns = images.map(|field| beton.image_column(&field.name));
    let columns = columns.collect::<Result<Vec<_>, _>>()?;
    let sums = pixel_sums(beton, &columns, threads, progress)?;
    let mut sums = sums.into_iter();
    let mut found = Vec::new();
    for field in beton.fields() {
        let values = match field.kind {
            FieldType::RgbImage => sums.next().and_then(PixelSums::statistics),
            FieldType::Int if !is_bookkeeping(beton, &field.name) => classes(beton, &field.name)?,
            _ => None,
        };
        let name = field.name.clone();
        found.extend(values.map(|values| FieldStatistics { name, values }));
    }
    Ok(found)
}

/// Whether `baton data window` or `tokenize` writes this field beside the labels.
fn is_bookkeeping(beton: &Beton, name: &str) -> bool {
    let has = |other: &str| beton.fields().iter().any(|field| field.name == other);
    match name {
        RECORDING_FIELD | START_FIELD => has(RECORDING_FIELD) && has(START_FIELD),
        PREDICTED_FIELD | LARGEST_FIELD => has(TOKENS_FIELD),
        _ => false,
    }
}

/// Sums over the pixels of a field.
#[derive(Clone, Copy, Debug, Default)]
struct PixelSums {
    pixels: u64,
    values: [u64; 3],
    /// Sums of the squares.
    squares: [u128; 3],
}

impl PixelSums {
    fn of(rgb: &[u8]) -> Self {
        let (mut values, mut squares) = ([0_u64; 3], [0_u64; 3]);
        let (pixels, _) = rgb.as_chunks::<3>();
        for pixel in pixels {
            for (channel, value) in pixel.iter().enumerate() {
                values[channel] += u64::from(*value);
                squares[channel] += u64::from(*value) * u64::from(*value);
            }
        }
        Self { pixels: pixels.len() as u64, values, squares: squares.map(u128::from) }
    }

    fn add(&mut self, other: Self) {
        self.pixels += other.pixels;
        for channel in 0..3 {
            self.values[channel] += other.values[channel];
            self.squares[channel] += other.squares[channel];
        }
    }

    /// `None` without pixels.
    fn statistics(self) -> Option<ValueStatistics> {
        if self.pixels == 0 {
            return None;
        }
        let pixels = self.pixels as f64;
        let mean = self.values.map(|sum| sum as f64 / pixels);
        let std = std::array::from_fn(|channel| {
            // n Σx² - (Σx)², without rounding.
            let squares = u128::from(self.pixels) * self.squares[channel];
            let square = u128::from(self.values[channel]).pow(2);
            (squares.saturating_sub(square) as f64).sqrt() / pixels
        });
        Some(ValueStatistics::Pixels { mean, std })
    }
}

fn pixel_sums(
    beton: &Beton,
    columns: &[ImageColumn],
    threads: usize,
    progress: impl Fn(u64) + Sync,
) -> Result<Vec<PixelSums>, Error> {
    let sums = Mutex::new(vec![PixelSums::default(); columns.len()]);
    if columns.is_empty() {
        return Ok(Vec::new());
    }
    let start = || Ok((Decoder::new()?, Vec::new()));
    let visit = |(decoder, buffer): &mut (Decoder, Vec<u8>), sample| {
        for (number, column) in columns.iter().enumerate() {
            let image = beton.image(column, sample, buffer)?;
            let rgb = decoder.decode(&image).map_err(|fault| {
                let start = beton.image_location(column, sample).map_or(0, |at| at.start);
                beton.sample_error(sample, start, fault)
            })?;
            let of_image = PixelSums::of(rgb);
            sums.lock().unwrap_or_else(PoisonError::into_inner)[number].add(of_image);
        }
        Ok(())
    };
    let faults = visit_samples(beton.len(), threads, start, visit, progress, AfterFault::Stop);
    match faults.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(sums.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// The samples of each class, if the values are classes.
fn classes(beton: &Beton, field: &str) -> Result<Option<ValueStatistics>, Error> {
    let column = beton.int_column(field)?;
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for sample in 0..beton.len() {
        let class = usize::try_from(beton.int(&column, sample)?).ok();
        let Some(class) = class.filter(|class| *class < MAX_CLASSES) else { return Ok(None) };
        *counts.entry(class).or_default() += 1;
    }
    let Some((largest, _)) = counts.last_key_value() else { return Ok(None) };
    let class_counts: Vec<u64> =
        (0..=*largest).map(|class| counts.get(&class).copied().unwrap_or_default()).collect();
    let weight = |count: &u64| beton.len() as f64 / (class_counts.len() as f64 * *count as f64);
    let is_complete = class_counts.iter().all(|count| *count > 0);
    let class_weights = is_complete.then(|| class_counts.iter().map(weight).collect());
    Ok(Some(ValueStatistics::Classes { class_counts, class_weights }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_parts_are_those_of_the_whole() {
        let pixels: Vec<u8> = (0..3 * 40).map(|number| (number * 37 % 256) as u8).collect();
        let mut sums = PixelSums::default();
        pixels.chunks(3 * 7).for_each(|part| sums.add(PixelSums::of(part)));
        let Some(ValueStatistics::Pixels { mean, std }) = sums.statistics() else { unreachable!() };
        assert_eq!(PixelSums::default().statistics(), None);
        for channel in 0..3 {
            let values: Vec<f64> =
                pixels.iter().skip(channel).step_by(3).map(|value| f64::from(*value)).collect();
            let expected = values.iter().sum::<f64>() / 40.0;
            let squares = values.iter().map(|value| (value - expected).powi(2)).sum::<f64>();
            assert!((mean[channel] - expected).abs() < 1e-12);
            assert!((std[channel] - (squares / 40.0).sqrt()).abs() < 1e-9);
        }
    }
}
