//! Statistics of a file, shown by `baton data inspect`. Does not read pixels.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    Beton, Error, Mode, SampleBlocks,
    beton::{Field, FieldType},
};

/// Width of the bins of the histogram of resolutions, in pixels of the longer side.
const RESOLUTION_STEP: u32 = 64;

/// Statistics of a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Survey {
    /// Number of samples.
    pub samples: u64,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Size of a data page in bytes.
    pub page_bytes: u32,
    /// Number of data pages with samples.
    pub pages: u64,
    /// The fields in file order.
    pub fields: Vec<FieldSurvey>,
}

/// Statistics of a field.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldSurvey {
    /// Name of the field.
    pub name: String,
    /// ffcv's name of the type.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Statistics of the values.
    #[serde(flatten)]
    pub values: Values,
}

/// Statistics of the values of a field.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Values {
    /// Integers.
    Ints {
        /// Smallest value; absent if there are no samples.
        least: Option<i64>,
        /// Largest value.
        most: Option<i64>,
        /// Number of different values; absent if above 1,000.
        distinct: Option<u64>,
    },
    /// Floating-point numbers.
    Floats {
        /// Smallest finite value; absent if there are none.
        least: Option<f64>,
        /// Largest finite value.
        most: Option<f64>,
        /// Mean of the finite values.
        mean: Option<f64>,
        /// Standard deviation of the finite values: the error of always predicting the mean.
        deviation: Option<f64>,
        /// Number of values that are NaN or infinite.
        not_finite: u64,
    },
    /// Images.
    Images {
        /// Number stored as JPEG.
        jpeg: u64,
        /// Number stored raw.
        raw: u64,
        /// Number with an invalid row.
        broken: u64,
        /// Stored sizes in bytes.
        bytes: Sizes,
        /// Widths in pixels.
        width: Sizes,
        /// Heights in pixels.
        height: Sizes,
        /// Histogram of the longer side: start of each bin in pixels → number of images.
        longer_side: BTreeMap<u32, u64>,
    },
    /// Bytes or texts.
    Bytes {
        /// Sizes in bytes.
        bytes: Sizes,
    },
    /// Arrays.
    Arrays {
        /// Shape; absent if the descriptor cannot be read.
        shape: Option<Vec<u64>>,
        /// numpy's code of the element type.
        dtype: Option<&'static str>,
    },
}

/// Range and sum of sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// Smallest size; 0 if there are none.
    pub least: u64,
    /// Largest size.
    pub most: u64,
    /// Sum of the sizes.
    pub total: u64,
    #[serde(skip)]
    count: u64,
}

impl Sizes {
    fn add(&mut self, size: u64) {
        self.least = if self.count == 0 { size } else { self.least.min(size) };
        self.most = self.most.max(size);
        self.total = self.total.saturating_add(size);
        self.count += 1;
    }

    /// Mean size; 0 if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.total as f64 / self.count.max(1) as f64
    }
}

/// Maximum number of different integers that are counted.
const MAX_DISTINCT: usize = 1_000;

impl Survey {
    /// Computes the statistics of a file from its rows and allocation table.
    ///
    /// # Errors
    /// The rows or the allocation table cannot be read.
    pub fn of(beton: &Beton) -> Result<Self, Error> {
        let fields = beton.fields().iter().map(|field| FieldSurvey::of(beton, field));
        Ok(Self {
            samples: beton.len(),
            file_bytes: beton.file_bytes(),
            page_bytes: beton.page_bytes(),
            pages: SampleBlocks::of_pages(beton)?.blocks(),
            fields: fields.collect::<Result<_, _>>()?,
        })
    }
}

impl FieldSurvey {
    fn of(beton: &Beton, field: &Field) -> Result<Self, Error> {
        let samples = 0..beton.len();
        let name = field.name.clone();
        let values = match field.kind {
            FieldType::Int => {
                let column = beton.int_column(&name)?;
                let (mut least, mut most) = (None, None);
                let mut distinct = std::collections::BTreeSet::new();
                for sample in samples {
                    let value = beton.int(&column, sample)?;
                    least = Some(least.map_or(value, |least: i64| least.min(value)));
                    most = Some(most.map_or(value, |most: i64| most.max(value)));
                    if distinct.len() <= MAX_DISTINCT {
                        distinct.insert(value);
                    }
                }
                let count = distinct.len();
                let distinct = (count <= MAX_DISTINCT).then_some(count as u64);
                Values::Ints { least, most, distinct }
            }
            FieldType::Float => {
                let column = beton.float_column(&name)?;
                let mut floats = Floats::default();
                for sample in samples {
                    floats.add(beton.float(&column, sample)?);
                }
                floats.values()
            }
            FieldType::RgbImage => images(beton, &name)?,
            FieldType::Bytes | FieldType::Json => {
                let column = beton.bytes_column(&name)?;
                let mut bytes = Sizes::default();
                for sample in samples {
                    bytes.add(beton.bytes_len(&column, sample)?);
                }
                Values::Bytes { bytes }
            }
            FieldType::NdArray | FieldType::TorchTensor => {
                let array = field.array_type().ok();
                let dtype = array.as_ref().map(|array| array.dtype.code());
                Values::Arrays { shape: array.map(|array| array.shape), dtype }
            }
        };
        Ok(Self { name, kind: field.kind.name(), values })
    }
}

/// Running statistics of floating-point numbers.
#[derive(Default)]
struct Floats {
    count: u64,
    least: f64,
    most: f64,
    mean: f64,
    /// Sum of the squares of the distances from the mean.
    spread: f64,
    not_finite: u64,
}

impl Floats {
    /// Welford's method, 1962, which does not lose precision if values are close together.
    fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.not_finite += 1;
            return;
        }
        let is_first = self.count == 0;
        self.least = if is_first { value } else { self.least.min(value) };
        self.most = if is_first { value } else { self.most.max(value) };
        self.count += 1;
        let distance = value - self.mean;
        self.mean += distance / self.count as f64;
        self.spread += distance * (value - self.mean);
    }

    fn values(self) -> Values {
        let if_any = |value| (self.count > 0).then_some(value);
        Values::Floats {
            least: if_any(self.least),
            most: if_any(self.most),
            mean: if_any(self.mean),
            deviation: if_any((self.spread / self.count as f64).sqrt()),
            not_finite: self.not_finite,
        }
    }
}

fn images(beton: &Beton, name: &str) -> Result<Values, Error> {
    let column = beton.image_column(name)?;
    let (mut jpeg, mut raw, mut broken) = (0, 0, 0);
    let (mut bytes, mut width, mut height) = (Sizes::default(), Sizes::default(), Sizes::default());
    let mut longer_side = BTreeMap::new();
    for sample in 0..beton.len() {
        let Ok(location) = beton.image_location(&column, sample) else {
            broken += 1;
            continue;
        };
        match location.mode {
            Mode::Jpeg => jpeg += 1,
            Mode::Raw => raw += 1,
        }
        bytes.add(location.len);
        width.add(location.width.into());
        height.add(location.height.into());
        let side = location.width.max(location.height);
        *longer_side.entry(side / RESOLUTION_STEP * RESOLUTION_STEP).or_default() += 1;
    }
    Ok(Values::Images { jpeg, raw, broken, bytes, width, height, longer_side })
}
