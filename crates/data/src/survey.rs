//! What is in a file, counted: what `baton data inspect` shows. No pixel is read.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    Beton, Error, Layout, Mode,
    beton::{Field, FieldType},
};

/// Width of a class of the histogram of resolutions, in pixels of the longer side.
const RESOLUTION_STEP: u32 = 64;

/// A file in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Survey {
    /// Number of samples.
    pub samples: u64,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Size of a data page in bytes.
    pub page_bytes: u32,
    /// Data pages that hold samples.
    pub pages: u64,
    /// The fields in file order.
    pub fields: Vec<FieldSurvey>,
}

/// A field in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldSurvey {
    /// Its name.
    pub name: String,
    /// Its type, as ffcv calls it.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What its values are.
    #[serde(flatten)]
    pub values: Values,
}

/// What the values of a field are.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Values {
    /// Whole numbers.
    Ints {
        /// The least; absent if there are no samples.
        least: Option<i64>,
        /// The largest.
        most: Option<i64>,
        /// How many different ones there are, if no more than a thousand.
        distinct: Option<u64>,
    },
    /// Floating-point numbers.
    Floats {
        /// The least of the finite ones; absent if there are none.
        least: Option<f64>,
        /// The largest.
        most: Option<f64>,
        /// Their mean.
        mean: Option<f64>,
        /// Their standard deviation: the error of whoever always says the mean.
        deviation: Option<f64>,
        /// How many are NaN or infinite.
        not_finite: u64,
    },
    /// Images.
    Images {
        /// Those stored as JPEG.
        jpeg: u64,
        /// Those stored raw.
        raw: u64,
        /// Those whose row cannot be right.
        broken: u64,
        /// Stored bytes.
        bytes: Sizes,
        /// Widths in pixels.
        width: Sizes,
        /// Heights in pixels.
        height: Sizes,
        /// How many images have a longer side from so many pixels on, up to the next entry.
        longer_side: BTreeMap<u32, u64>,
    },
    /// Bytes or texts.
    Bytes {
        /// Their lengths.
        bytes: Sizes,
    },
    /// Arrays.
    Arrays {
        /// Shape of each; absent where its description cannot be read.
        shape: Option<Vec<u64>>,
        /// numpy's code of the element type.
        dtype: Option<&'static str>,
    },
}

/// The range of some sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// The least; 0 if there are none.
    pub least: u64,
    /// The largest.
    pub most: u64,
    /// All together.
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

    /// The mean; 0 if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.total as f64 / self.count.max(1) as f64
    }
}

/// Most different whole numbers that are counted.
const MOST_DISTINCT: usize = 1_000;

impl Survey {
    /// Counts what is in a file, by its rows and allocation table.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn of(beton: &Beton) -> Result<Self, Error> {
        let fields = beton.fields().iter().map(|field| FieldSurvey::of(beton, field));
        Ok(Self {
            samples: beton.len(),
            file_bytes: beton.file_bytes(),
            page_bytes: beton.page_bytes(),
            pages: Layout::of_pages(beton)?.blocks(),
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
                    if distinct.len() <= MOST_DISTINCT {
                        distinct.insert(value);
                    }
                }
                let count = distinct.len();
                let distinct = (count <= MOST_DISTINCT).then_some(count as u64);
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

/// Floating-point numbers seen so far.
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
    /// Welford 1962, which loses no digits where values lie close together.
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
        let Ok(place) = beton.image_place(&column, sample) else {
            broken += 1;
            continue;
        };
        match place.mode {
            Mode::Jpeg => jpeg += 1,
            Mode::Raw => raw += 1,
        }
        bytes.add(place.len);
        width.add(place.width.into());
        height.add(place.height.into());
        let side = place.width.max(place.height);
        *longer_side.entry(side / RESOLUTION_STEP * RESOLUTION_STEP).or_default() += 1;
    }
    Ok(Values::Images { jpeg, raw, broken, bytes, width, height, longer_side })
}
