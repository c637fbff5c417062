//! Damaged files: clear errors, no panic, no allocation for a damaged size.

use std::{path::Path, process::Command};

use baton_data::{
    Beton, Dataset, Decoder, Error, FileFault, ImageBytes, ImageTransform, Mode, SampleBlocks,
    SampleFault, Source,
    augment::{Crop, Flip},
    beton::FieldType,
    verify::{Verifier, VerifyBuffers},
};
use baton_recipe::spec::{OnBadSample, Resize};

use crate::{
    allocations::largest_during,
    fixtures,
    sketch::{LABEL, PAGE_BYTES, Picture, ROW_BYTES, ROWS_START, Saved, beton, jpeg, raw},
};

/// Start of the pages of a sketch with three pictures.
const PAGES: usize = (ROWS_START + 3 * ROW_BYTES).next_multiple_of(PAGE_BYTES);

fn sketch() -> Vec<u8> {
    beton(&[raw(4, 3, 10), jpeg(), raw(5, 5, 30)])
}

fn table_start(file: &[u8]) -> usize {
    u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize
}

fn open(file: &[u8]) -> Result<Dataset, Error> {
    Saved::new(file).dataset()
}

/// The fault of a file with some of its bytes replaced.
fn fault(mut file: Vec<u8>, at: usize, bytes: &[u8]) -> FileFault {
    file[at..at + bytes.len()].copy_from_slice(bytes);
    match open(&file) {
        Err(Error::File { fault, .. }) => fault,
        other => panic!("{other:?}"),
    }
}

/// The position and fault of the refused sample of a file with some of its bytes replaced.
fn sample_fault(mut file: Vec<u8>, at: usize, bytes: &[u8]) -> (u64, SampleFault) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
    match open(&file) {
        Err(Error::Sample { sample, fault, .. }) => (sample, fault),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_file_is_reported() {
    let refused = Beton::open("/nowhere/set.beton").unwrap_err().to_string();
    assert!(refused.starts_with("cannot open /nowhere/set.beton: No such file"), "{refused}");
}

#[test]
fn an_empty_file_is_reported() {
    let refused = open(&[]).unwrap_err().to_string();
    assert!(refused.ends_with("set.beton: the file is empty: copy or write it again"), "{refused}");
}

#[test]
fn what_is_no_regular_file_is_refused_without_waiting_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.as_path(), Path::new("/"), Path::new("/dev/zero")] {
        let error = Beton::open(path).unwrap_err().to_string();
        assert!(error.contains("it is not a regular file"), "{error}");
    }
}

#[test]
fn a_file_without_samples_is_valid() {
    let set = open(&beton(&[])).unwrap();
    assert!(set.is_empty());
}

#[test]
fn faults_of_the_header_are_reported() {
    assert_eq!(fault(sketch(), 0, &[3, 0]), FileFault::Version(3));
    assert_eq!(fault(sketch(), 2, &[0, 0]), FileFault::NoFields);
    assert_eq!(fault(sketch(), 4, &[65]), FileFault::PageSize(65));
    assert_eq!(fault(sketch(), 16, &[0; 8]), FileFault::Unfinished);

    let (file, samples_at, table_at) = (sketch(), 8, 16);
    let file_bytes = file.len() as u64;
    let most = u64::MAX.to_le_bytes();
    let cut = FileFault::CutOff {
        section: "metadata rows",
        start: ROWS_START as u64,
        end: u64::MAX,
        file_bytes,
    };
    assert_eq!(fault(file.clone(), samples_at, &most), cut);
    let min_start = (ROWS_START + 3 * ROW_BYTES) as u64;
    let position = FileFault::TablePosition { start: u64::MAX, min_start, file_bytes };
    assert_eq!(fault(file.clone(), table_at, &most), position);
    let start = table_start(&file) as u64 + 1;
    let length = FileFault::TableLength { start, table_bytes: 3 * 24 - 1 };
    assert_eq!(fault(file, table_at, &start.to_le_bytes()), length);
}

#[test]
fn faults_of_the_fields_are_reported() {
    let unknown = FileFault::UnknownType { name: "image".to_owned(), type_id: 255 };
    assert_eq!(fault(sketch(), 24, &[255]), unknown);

    let saved = Saved::new(&sketch());
    let fields = |input: &str, label: &str| Source {
        input_field: input.to_owned(),
        label_field: label.to_owned(),
        ..Source::new(saved.location())
    };
    let refused = Dataset::open(fields("picture", "label")).unwrap_err().to_string();
    let expected = "no field \"picture\"; it has \"image\", \"label\": \
                set data.input_field and data.label_field";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = Dataset::open(fields("image", "image")).unwrap_err();
    let Error::File { fault, .. } = refused else { panic!("{refused}") };
    let (found, expected) = (FieldType::RgbImage, vec![FieldType::Int]);
    assert_eq!(fault, FileFault::WrongType { name: "image".to_owned(), found, expected });
}

#[test]
fn faults_of_the_allocation_table_are_reported() {
    let file = sketch();
    let second = table_start(&file) + 24;
    let strange = FileFault::TableSample { entry: 1, sample: 3, samples: 3 };
    assert_eq!(fault(file.clone(), second, &3_u64.to_le_bytes()), strange);

    let pointer = (PAGES + 36) as u64;
    let unresolved = (1, SampleFault::MissingAllocation { pointer });
    assert_eq!(sample_fault(file.clone(), second + 8, &[0; 8]), unresolved);
    assert_eq!(sample_fault(file.clone(), second + 16, &[0; 8]), unresolved);

    let (pages_start, pages_end) = (PAGES as u64, table_start(&file) as u64);
    let end = pointer + u64::from(u32::MAX);
    let outside = (1, SampleFault::OutsidePages { start: pointer, end, pages_start, pages_end });
    assert_eq!(sample_fault(file, second + 16, &[0xFF; 8]), outside);
}

#[test]
fn faults_of_a_row_are_reported() {
    let first = |at, bytes: &[u8]| {
        let (sample, fault) = sample_fault(sketch(), ROWS_START + at, bytes);
        assert_eq!(sample, 0);
        fault
    };
    assert_eq!(first(0, &[2]), SampleFault::Mode(2));
    assert_eq!(first(1, &[0, 0]), SampleFault::NoPixels { width: 0, height: 3 });
    assert_eq!(first(3, &[4, 0]), SampleFault::RawSize { stored: 36, width: 4, height: 4 });
    assert_eq!(
        first(5, &[1; 8]),
        SampleFault::MissingAllocation { pointer: 0x0101_0101_0101_0101 }
    );
}

#[test]
fn a_negative_label_is_reported() {
    let mut file = sketch();
    file[ROWS_START + ROW_BYTES + LABEL..][..8].copy_from_slice(&(-1_i64).to_le_bytes());
    let refused = Saved::new(&file).classes(1_000).unwrap_err().to_string();
    assert!(refused.contains("set.beton: sample 1, byte 0: label -1, "), "{refused}");
}

#[test]
fn a_sample_beyond_the_end_is_reported() {
    let set = open(&sketch()).unwrap();
    let refused = set.label(3).unwrap_err().to_string();
    assert!(refused.ends_with("sample 3, byte 0: there are only 3 samples"), "{refused}");
    assert!(set.label(u64::MAX).is_err());
}

/// Also between two entries of the allocation table, where only the missing pointer shows it.
#[test]
fn a_file_truncated_anywhere_is_refused() {
    let file = sketch();
    let saved = Saved::new(&[]);
    for end in 0..file.len() {
        saved.overwrite(&file[..end]);
        assert!(saved.dataset().is_err(), "cut at byte {end}");
    }
}

#[test]
fn files_of_ffcv_truncated_at_section_and_page_boundaries_are_refused() {
    for name in ["g_single", "k_two_workers"] {
        let file = fixtures::file(name);
        let samples = u64::from_le_bytes(file[8..16].try_into().unwrap()) as usize;
        let page = u32::from_le_bytes(file[4..8].try_into().unwrap()) as usize;
        let rows_end = ROWS_START + samples * ROW_BYTES;
        let boundaries = [
            0,
            24,
            24 + 1041,
            ROWS_START,
            rows_end,
            rows_end.next_multiple_of(page),
            table_start(&file),
            file.len() - 24,
            file.len(),
        ];
        let pages = (rows_end.next_multiple_of(page)..table_start(&file)).step_by(page);
        let saved = Saved::new(&[]);
        for end in boundaries
            .into_iter()
            .chain(pages)
            .flat_map(|end| [end.saturating_sub(1), end, end + 1])
        {
            if end < file.len() {
                saved.overwrite(&file[..end]);
                let refused = saved.dataset();
                assert!(refused.is_err(), "{name} cut at byte {end}");
            }
        }
    }
}

/// Reads everything in the file; errors are allowed.
fn read_everything(saved: &Saved) -> Result<(), Error> {
    let beton = Beton::open(saved.path())?;
    let _ = SampleBlocks::of_pages(&beton);
    let verifier = Verifier::new(&beton)?;
    let mut buffers = VerifyBuffers::new()?;
    for sample in 0..beton.len() {
        let _ = verifier.check(sample, &mut buffers);
    }
    saved.classes(3).map(|_| ())
}

/// Reading must not panic, nor allocate more memory than the file and one image justify.
fn survives(saved: &Saved, file: &[u8], what: &str) {
    saved.overwrite(file);
    let (largest, _) = largest_during(|| read_everything(saved));
    assert!(largest <= file.len() + 16_384, "{what}: {largest} bytes at once");
}

#[test]
fn any_flipped_bit_is_survived() {
    let valid = sketch();
    // The arguments of the descriptors are not read.
    let arguments = |at: &usize| (24 + 17..ROWS_START).contains(at) && (at - 24) % 1041 > 17;
    let saved = Saved::new(&[]);
    for at in (0..valid.len()).filter(|at| !arguments(at)) {
        for bit in 0..8 {
            let mut file = valid.clone();
            file[at] ^= 1 << bit;
            survives(&saved, &file, &format!("bit {bit} of byte {at}"));
        }
    }
}

#[test]
fn random_damage_is_survived() {
    let valid = sketch();
    let saved = Saved::new(&[]);
    // Knuth's linear congruential generator with a fixed seed, for reproducible damage.
    let mut state = 1_u64;
    let mut random = |bound: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    for round in 0..2_000 {
        let mut file = valid.clone();
        for _ in 0..1 + random(6) {
            // Half of the damage is in the first 24 bytes, where the sizes are.
            let part = if random(2) == 0 { 24 } else { file.len() };
            let (at, value) = (random(part), random(256));
            file[at] = value as u8;
        }
        file.truncate(valid.len() - random(4) * random(200));
        survives(&saved, &file, &format!("round {round}"));
    }
}

/// Row and JPEG agree on an image of 65,500 x 65,500 pixels, in 333 bytes: 13 GB of pixels.
#[test]
fn a_jpeg_with_a_false_size_is_refused() {
    let Picture { mut bytes, mode, .. } = jpeg();
    let header = bytes.windows(2).position(|marker| marker == [0xFF, 0xC0]).unwrap();
    let side = 65_500_u16;
    bytes[header + 5..header + 7].copy_from_slice(&side.to_be_bytes());
    bytes[header + 7..header + 9].copy_from_slice(&side.to_be_bytes());
    let file = beton(&[Picture { mode, width: side, height: side, bytes }]);
    let saved = Saved::new(&file);
    let beton = Beton::open(saved.path()).unwrap();
    let (mut decoder, mut buffer) = (Decoder::new().unwrap(), Vec::new());
    let image = beton.image(&beton.image_column("image").unwrap(), 0, &mut buffer).unwrap();
    let (largest, refused) = largest_during(|| decoder.decode(&image).map(|_| ()));
    assert!(matches!(refused, Err(SampleFault::TooFewBytes { .. })));
    assert!(largest < 100_000, "{largest} bytes at once");
}

/// Found by `make fuzz TARGET=fields`: a shape of almost 4 GiB, in a file of 130 KB.
#[test]
fn an_array_larger_than_the_pages_is_refused_without_allocating_memory() {
    let mut file = fixtures::file("f2_layouts");
    let (field, name) = (3, "arr_i16");
    let first_dimension = 24 + 1041 * field + 17;
    let dimensions = u64::from_le_bytes(file[first_dimension..][..8].try_into().unwrap());
    let saved = Saved::new(&file);
    let valid = Beton::open(saved.path()).unwrap().array_column(name).unwrap().value_bytes();
    let huge = dimensions * (u64::from(u32::MAX) / valid);
    file[first_dimension..][..8].copy_from_slice(&huge.to_le_bytes());
    saved.overwrite(&file);

    let beton = Beton::open(saved.path()).unwrap();
    let refused = beton.array_column(name).unwrap_err().to_string();
    assert!(refused.contains("too large for the pages of this file"), "{refused}");
    let (largest, faults) = largest_during(|| {
        let verifier = Verifier::new(&beton).unwrap();
        let mut buffers = VerifyBuffers::new().unwrap();
        for sample in 0..beton.len() {
            let _ = verifier.check(sample, &mut buffers);
        }
        verifier.faults().len()
    });
    assert_eq!(faults, 1, "the shape");
    assert!(largest < 1 << 20, "{largest} bytes at once");
    for on_bad_sample in [OnBadSample::Fail, OnBadSample::Skip] {
        let (input_field, label_field) = (name.to_owned(), "n".to_owned());
        let source = Source::new(saved.location());
        let refused = Dataset::open(Source { input_field, label_field, on_bad_sample, ..source });
        assert!(matches!(refused, Err(Error::File { fault: FileFault::ArrayType { .. }, .. })));
    }
}

/// Checks that a crop of a JPEG equals the same crop of its decoded pixels.
fn assert_crop_equals_pixels(jpeg: &[u8], width: u32, height: u32, crop: Crop, resolution: u32) {
    let mut decoder = Decoder::new().unwrap();
    let jpeg = ImageBytes { mode: Mode::Jpeg, width, height, bytes: jpeg };
    let transform = ImageTransform { crop, flip: Flip::Keep, resolution, resize: Resize::Fast };
    let mut rendered = vec![0; 3 * (resolution * resolution) as usize];
    decoder.render(&jpeg, &transform, &mut rendered).unwrap();
    let pixels = decoder.decode(&jpeg).unwrap().to_vec();
    let raw = ImageBytes { mode: Mode::Raw, bytes: &pixels, ..jpeg };
    let mut expected = vec![0; rendered.len()];
    decoder.render(&raw, &transform, &mut expected).unwrap();
    assert!(rendered == expected, "{transform:?}");
}

/// Found by `make fuzz TARGET=jpeg`: libjpeg-turbo ignores the scale of a lossless image, and wrote the whole image
/// into a buffer for an eighth of its width.
#[test]
fn a_lossless_jpeg_is_not_reduced_while_it_is_decoded() {
    let jpeg = include_bytes!("../fixtures/lossless-16x12.jpg");
    assert_crop_equals_pixels(jpeg, 16, 12, Crop { left: 2, top: 0, width: 12, height: 12 }, 1);
}

/// Found by `make fuzz TARGET=jpeg`: 4:4:4 with factors of 2x1 each has units of 16 columns, and the
/// library refused a region that starts at a multiple of 8.
#[test]
fn a_region_decodes_if_4_4_4_is_written_with_unusual_factors() {
    let jpeg = include_bytes!("../fixtures/wide-444-32x24.jpg");
    for left in 0..24 {
        assert_crop_equals_pixels(jpeg, 32, 24, Crop { left, top: 5, width: 8, height: 8 }, 8);
    }
}
