//! Minimal beton files, built byte by byte.

use std::path::{Path, PathBuf};

use baton_data::{
    Beton, Dataset, Error, ImageBytes, Labels, Source,
    beton::{ImageColumn, IntColumn},
};
use tempfile::TempDir;

pub(crate) const PAGE_BYTES: usize = 64;
/// Header and the descriptors of `image` and `label`.
pub(crate) const ROWS_START: usize = 24 + 2 * 1041;
pub(crate) const ROW_BYTES: usize = 24;
/// Offset of the label in a row.
pub(crate) const LABEL: usize = 16;

/// An image to be stored.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    pub(crate) mode: u8,
    pub(crate) width: u16,
    pub(crate) height: u16,
    pub(crate) bytes: Vec<u8>,
}

/// A raw image whose bytes all have one value.
pub(crate) fn raw(width: u16, height: u16, value: u8) -> Picture {
    let bytes = vec![value; 3 * usize::from(width) * usize::from(height)];
    Picture { mode: 1, width, height, bytes }
}

/// A grey JPEG of 16 x 8 pixels.
pub(crate) fn jpeg() -> Picture {
    let bytes = include_bytes!("../fixtures/grey-16x8.jpg").to_vec();
    Picture { mode: 0, width: 16, height: 8, bytes }
}

/// A file with the fields `image` and `label`; the label of a sample is its position.
pub(crate) fn beton(pictures: &[Picture]) -> Vec<u8> {
    let pages_start = (ROWS_START + ROW_BYTES * pictures.len()).next_multiple_of(PAGE_BYTES);
    let pages: Vec<u8> = pictures.iter().flat_map(|picture| picture.bytes.clone()).collect();
    let table_start = pages_start + pages.len().next_multiple_of(PAGE_BYTES);

    let mut file = Vec::new();
    file.extend(2_u16.to_le_bytes());
    file.extend(2_u16.to_le_bytes());
    file.extend((PAGE_BYTES as u32).to_le_bytes());
    file.extend((pictures.len() as u64).to_le_bytes());
    file.extend((table_start as u64).to_le_bytes());
    for (type_id, name) in [(2, &b"image"[..]), (1, b"label")] {
        let start = file.len();
        file.push(type_id);
        file.extend(name);
        file.resize(start + 1041, 0);
    }
    let mut table = Vec::new();
    let mut pointer = pages_start;
    for (sample, picture) in pictures.iter().enumerate() {
        file.push(picture.mode);
        file.extend(picture.width.to_le_bytes());
        file.extend(picture.height.to_le_bytes());
        file.extend((pointer as u64).to_le_bytes());
        file.extend([0; 3]);
        file.extend((sample as u64).to_le_bytes());
        for word in [sample, pointer, picture.bytes.len()] {
            table.extend((word as u64).to_le_bytes());
        }
        pointer += picture.bytes.len();
    }
    file.resize(pages_start, 0);
    file.extend(pages);
    file.resize(table_start, 0);
    file.extend(table);
    file
}

/// A file with images and labels, for tests that check the stored values.
pub(crate) struct Opened {
    beton: Beton,
    images: ImageColumn,
    labels: IntColumn,
}

impl Opened {
    pub(crate) fn new(path: &Path) -> Self {
        let beton = Beton::open(path).unwrap();
        let images = beton.image_column("image").unwrap();
        beton.check_images(&images).unwrap();
        let labels = beton.int_column("label").unwrap();
        Self { beton, images, labels }
    }

    pub(crate) fn len(&self) -> u64 {
        self.beton.len()
    }

    /// Reads an image. Leaks its bytes, which is acceptable in a test.
    pub(crate) fn image(&self, sample: u64) -> ImageBytes<'static> {
        self.beton.image(&self.images, sample, Box::leak(Box::default())).unwrap()
    }

    pub(crate) fn label(&self, sample: u64) -> i64 {
        self.beton.int(&self.labels, sample).unwrap()
    }
}

/// A file that exists as long as this value.
pub(crate) struct Saved {
    folder: TempDir,
}

impl Saved {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let saved = Self { folder: tempfile::tempdir().unwrap() };
        saved.overwrite(bytes);
        saved
    }

    /// Replaces the file; the old one may still be mapped.
    pub(crate) fn overwrite(&self, bytes: &[u8]) {
        let draft = self.folder.path().join("draft");
        std::fs::write(&draft, bytes).unwrap();
        std::fs::rename(draft, self.path()).unwrap();
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("set.beton")
    }

    pub(crate) fn location(&self) -> String {
        self.path().to_str().unwrap().to_owned()
    }

    /// Opens the file as images with labels.
    pub(crate) fn dataset(&self) -> Result<Dataset, Error> {
        Dataset::open(Source::new(self.location()))
    }

    /// Opens the file as images with labels of `num_classes` classes.
    pub(crate) fn classes(&self, num_classes: u32) -> Result<Dataset, Error> {
        Dataset::open(Source {
            labels: Labels::Classes(num_classes),
            ..Source::new(self.location())
        })
    }
}
