//! Files written by `Writer` are read back completely, whatever their fields.

use std::{fs, path::Path};

use baton_data::{
    Beton, Mode,
    beton::FieldType,
    write::{Array, Error, Field, FieldKind, Value, Writer},
};
use proptest::{collection::vec, prelude::*};

use crate::sketch::Opened;

/// Small, so that a few values fill it.
const PAGE: u32 = 1_024;

/// A value that owns its bytes.
#[derive(Clone, Debug)]
enum Owned {
    Float(f64),
    Int(i64),
    Raw(u16, u16, Vec<u8>),
    Jpeg(u16, u16, Vec<u8>),
    Bytes(Vec<u8>),
    Json(String),
    Array(Vec<u8>),
}

impl Owned {
    fn value(&self) -> Value<'_> {
        let image = |mode, width: u16, height: u16, bytes| {
            let (width, height) = (width.into(), height.into());
            Value::Image { mode, width, height, bytes }
        };
        match self {
            Self::Float(value) => Value::Float(*value),
            Self::Int(value) => Value::Int(*value),
            Self::Raw(width, height, bytes) => image(Mode::Raw, *width, *height, bytes),
            Self::Jpeg(width, height, bytes) => image(Mode::Jpeg, *width, *height, bytes),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Json(text) => Value::Json(text),
            Self::Array(bytes) => Value::Array(bytes),
        }
    }
}

fn kind() -> impl Strategy<Value = FieldKind> {
    let array = (vec(0_u64..4, 0..3), 1_u64..5, prop::sample::select(vec!["<f4", "|u1", "<i2"]));
    let array = array.prop_map(|(mut shape, last, dtype)| {
        shape.push(last);
        Array { shape, dtype: dtype.to_owned() }
    });
    prop_oneof![
        Just(FieldKind::Float),
        Just(FieldKind::Int),
        Just(FieldKind::RgbImage),
        Just(FieldKind::Bytes),
        Just(FieldKind::Json),
        array.clone().prop_map(FieldKind::NdArray),
        array.prop_map(FieldKind::TorchTensor),
    ]
}

fn value(kind: &FieldKind) -> BoxedStrategy<Owned> {
    match kind {
        FieldKind::Float => any::<f64>().prop_map(Owned::Float).boxed(),
        FieldKind::Int => any::<i64>().prop_map(Owned::Int).boxed(),
        FieldKind::Bytes => vec(any::<u8>(), 0..120).prop_map(Owned::Bytes).boxed(),
        FieldKind::Json => any::<String>()
            .prop_map(|text| {
                Owned::Json(serde_json::json!({ "text": text, "n": [1, null] }).to_string())
            })
            .prop_filter("fits a page", |json| matches!(json, Owned::Json(text) if text.len() < 40))
            .boxed(),
        FieldKind::RgbImage => {
            let raw = (1_u16..8, 1_u16..6).prop_flat_map(|(width, height)| {
                let len = 3 * usize::from(width) * usize::from(height);
                vec(any::<u8>(), len).prop_map(move |bytes| Owned::Raw(width, height, bytes))
            });
            let jpeg = (1_u16..=65_535, 1_u16..=65_535, vec(any::<u8>(), 0..99)).prop_map(
                |(width, height, tail)| {
                    Owned::Jpeg(width, height, [&[0xFF, 0xD8][..], &tail].concat())
                },
            );
            prop_oneof![raw, jpeg].boxed()
        }
        FieldKind::NdArray(array) | FieldKind::TorchTensor(array) => {
            let item: u64 = array.dtype[2..].parse().unwrap();
            let len = item * array.shape.iter().product::<u64>();
            vec(any::<u8>(), len as usize).prop_map(Owned::Array).boxed()
        }
    }
}

fn table() -> impl Strategy<Value = (Vec<FieldKind>, Vec<Vec<Owned>>)> {
    vec(kind(), 1..5).prop_flat_map(|kinds| {
        let sample: Vec<_> = kinds.iter().map(value).collect();
        (Just(kinds), vec(sample, 0..40))
    })
}

fn fields(kinds: &[FieldKind]) -> Vec<Field> {
    kinds.iter().enumerate().map(|(i, kind)| Field::new(format!("f{i}"), kind.clone())).collect()
}

fn write(
    path: &Path,
    kinds: &[FieldKind],
    planned: u64,
    samples: &[Vec<Owned>],
) -> Result<u64, Error> {
    let mut writer = Writer::create(path, fields(kinds), planned, PAGE)?;
    for sample in samples {
        writer.push(&sample.iter().map(Owned::value).collect::<Vec<_>>())?;
    }
    Ok(writer.finish()?.bytes)
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// Reads a file independently of `Beton`, by the description of the format only, and compares it.
fn compare(path: &Path, kinds: &[FieldKind], samples: &[Vec<Owned>]) {
    let file = fs::read(path).unwrap();
    let beton = Beton::open(path).unwrap();
    assert_eq!(beton.len(), samples.len() as u64);
    let types: Vec<FieldType> = beton.fields().iter().map(|field| field.kind).collect();
    assert_eq!(types, kinds.iter().map(FieldKind::field_type).collect::<Vec<_>>());

    let table_start = word(&file[16..]) as usize;
    let table: Vec<[u64; 3]> = file[table_start..]
        .chunks_exact(24)
        .map(|entry| [word(entry), word(&entry[8..]), word(&entry[16..])])
        .collect();
    let mut positions: Vec<u64> = table.iter().map(|entry| entry[1]).collect();
    positions.sort_unstable();
    assert!(positions.windows(2).all(|pair| pair[0] != pair[1]), "two values have one position");
    assert!(table.is_sorted_by_key(|entry| entry[0]), "the table is in the order of the samples");

    // The length of a row is derived from the last cell; `Beton`'s offsets are tested with files of ffcv.
    let rows = 24 + 1041 * kinds.len();
    let row_bytes = {
        let size = |kind: &FieldKind| match kind {
            FieldKind::RgbImage => (13, 1),
            FieldKind::Bytes | FieldKind::Json => (16, 1),
            _ => (8, 8),
        };
        let last = beton.fields().last().unwrap().offset + size(kinds.last().unwrap()).0;
        last.next_multiple_of(kinds.iter().map(|kind| size(kind).1).max().unwrap()) as usize
    };
    let mut entries = table.iter();
    for (sample, values) in samples.iter().enumerate() {
        let mut pages = Vec::new();
        for (value, field) in values.iter().zip(beton.fields()) {
            let cell = &file[rows + sample * row_bytes + field.offset as usize..];
            let mut paged = |pointer: &[u8], expected: &[u8]| {
                let pointer = word(pointer);
                let entry = [sample as u64, pointer, expected.len() as u64];
                assert_eq!(entries.next(), Some(&entry));
                let start = pointer as usize;
                assert_eq!(&file[start..start + expected.len()], expected);
                pages.extend(
                    [start, start + expected.len().max(1) - 1].map(|at| at / PAGE as usize),
                );
            };
            match value {
                Owned::Float(value) => assert_eq!(cell[..8], value.to_le_bytes()),
                Owned::Int(value) => {
                    let column = beton.int_column(&field.name).unwrap();
                    assert_eq!(beton.int(&column, sample as u64).unwrap(), *value);
                }
                Owned::Array(bytes) => paged(cell, bytes),
                Owned::Bytes(bytes) => {
                    assert_eq!(word(&cell[8..]), bytes.len() as u64);
                    paged(cell, bytes);
                }
                Owned::Json(text) => {
                    let len = word(&cell[8..]) as usize;
                    let start = word(cell) as usize;
                    let (nul, stored) = file[start..start + len].split_last().unwrap();
                    assert!(*nul == 0 && stored.is_ascii());
                    let stored: serde_json::Value = serde_json::from_slice(stored).unwrap();
                    assert_eq!(stored, serde_json::from_str::<serde_json::Value>(text).unwrap());
                    paged(cell, &file[start..start + len]);
                }
                Owned::Raw(width, height, bytes) | Owned::Jpeg(width, height, bytes) => {
                    paged(&cell[5..], bytes);
                    let column = beton.image_column(&field.name).unwrap();
                    let mut buffer = Vec::new();
                    let image = beton.image(&column, sample as u64, &mut buffer).unwrap();
                    let is_raw = matches!(value, Owned::Raw(..));
                    assert_eq!(image.mode, if is_raw { Mode::Raw } else { Mode::Jpeg });
                    assert_eq!((image.width, image.height), ((*width).into(), (*height).into()));
                    assert_eq!(image.bytes, bytes);
                }
            }
        }
        assert!(pages.windows(2).all(|pair| pair[0] == pair[1]), "sample {sample} crosses pages");
    }
    assert_eq!(entries.next(), None);
    if table.is_empty() {
        assert_eq!(file.len(), rows + samples.len() * row_bytes);
    } else {
        assert!(table_start.is_multiple_of(PAGE as usize));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn written_values_are_read_back((kinds, samples) in table(), unused in 0_u64..300) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("set.beton");
        let bytes = write(&path, &kinds, samples.len() as u64 + unused, &samples).unwrap();
        prop_assert_eq!(bytes, fs::metadata(&path).unwrap().len());
        compare(&path, &kinds, &samples);
    }
}

#[test]
fn values_that_fill_a_page_exactly_are_alone_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let bytes = |len: u32| vec![Owned::Bytes(vec![7; len as usize])];
    let samples = [bytes(PAGE), bytes(PAGE), bytes(1), bytes(PAGE - 1), bytes(0), bytes(PAGE)];
    let kinds = [FieldKind::Bytes];
    let len = write(&path, &kinds, 6, &samples).unwrap();
    compare(&path, &kinds, &samples);
    let rows_end = 24 + 1041 + 6 * 16_u64;
    assert_eq!(len, rows_end.next_multiple_of(PAGE.into()) + 5 * u64::from(PAGE) + 6 * 24);

    // 3 * 341 + 1 is a page.
    let image = vec![Owned::Raw(341, 1, vec![9; 3 * 341]), Owned::Bytes(vec![5])];
    let kinds = [FieldKind::RgbImage, FieldKind::Bytes];
    write(&path, &kinds, 1, std::slice::from_ref(&image)).unwrap();
    compare(&path, &kinds, &[image]);
}

#[test]
fn files_without_samples_or_pages_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    for kinds in [[FieldKind::RgbImage, FieldKind::Int], [FieldKind::Int, FieldKind::Float]] {
        assert_eq!(write(&path, &kinds, 5, &[]).unwrap(), 24 + 2 * 1041);
        compare(&path, &kinds, &[]);
    }
    let sample = vec![Owned::Int(-3), Owned::Float(0.5)];
    let kinds = [FieldKind::Int, FieldKind::Float];
    assert_eq!(write(&path, &kinds, 1, std::slice::from_ref(&sample)).unwrap(), 24 + 2 * 1041 + 16);
    compare(&path, &kinds, &[sample]);
}

#[test]
fn invalid_samples_are_refused_and_the_file_continues_without_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let fields =
        vec![Field::new("image", FieldKind::RgbImage), Field::new("label", FieldKind::Int)];
    let mut writer = Writer::create(&path, fields, 2, PAGE).unwrap();
    let image = |width, height, bytes| Value::Image { mode: Mode::Raw, width, height, bytes };
    let (small, large) = (vec![1; 12], vec![1; 1_026]);
    let label = Value::Int(1);
    writer.push(&[image(2, 2, &small), label]).unwrap();

    let message = |outcome: Result<(), Error>| outcome.unwrap_err().to_string();
    assert_eq!(message(writer.push(&[label])), "sample 1 has 1 values for 2 fields");
    let cases = [
        (image(3, 2, &small), "12 bytes for 3x2 pixels"),
        (image(0, 2, &[]), "0x2 pixels, but a side has 1 to 65535"),
        (image(65_536, 2, &small), "65536x2 pixels, but a side has 1 to 65535"),
        (
            Value::Image { mode: Mode::Jpeg, width: 2, height: 2, bytes: &small },
            "a JPEG that does not start with FF D8",
        ),
        (label, "the value is of another type than RgbImage"),
    ];
    for (value, reason) in cases {
        let refused = message(writer.push(&[value, label]));
        assert_eq!(refused, format!("sample 1, field \"image\": {reason}"));
    }
    let refused = message(writer.push(&[image(342, 1, &large), label]));
    assert!(refused.starts_with("sample 1 needs 1026 bytes, but a page has 1024"), "{refused}");
    writer.push(&[image(1, 4, &small), label]).unwrap();
    let refused = message(writer.push(&[image(2, 2, &small), label]));
    assert!(refused.contains("planned for 2 samples"), "{refused}");

    assert!(!path.exists());
    assert_eq!(writer.finish().unwrap().samples, 2);
    let set = Opened::new(&path);
    assert_eq!((set.len(), set.image(1).height), (2, 4));
}

#[test]
fn an_unfinished_file_has_another_name_and_is_recognized_as_unfinished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let mut writer =
        Writer::create(&path, vec![Field::new("data", FieldKind::Bytes)], 9, PAGE).unwrap();
    for _ in 0..9 {
        writer.push(&[Value::Bytes(&[1; 900])]).unwrap();
    }
    assert!(!path.exists());
    // The file that a killed process would leave: eight pages are written.
    let left = folder.path().join(".set.beton.draft");
    assert!(fs::metadata(&left).unwrap().len() > 8 * u64::from(PAGE));
    let Err(baton_data::Error::File { fault, .. }) = Beton::open(&left) else { panic!() };
    assert!(fault.to_string().contains("the file was never finished"), "{fault}");
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn invalid_fields_and_page_sizes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let refused = |fields: Vec<Field>, page| {
        Writer::create(&path, fields, 1, page).map(|_| ()).unwrap_err().to_string()
    };
    let field = |name: &str, kind| vec![Field::new(name, kind)];
    assert!(refused(vec![], PAGE).contains("0 fields"));
    assert!(refused(field("a", FieldKind::Int), 1_000).contains("a page of 1000 bytes"));
    for name in ["", "seventeen_letters", "naïve", "a b"] {
        assert!(refused(field(name, FieldKind::Int), PAGE).contains("1 to 16"), "{name}");
    }
    let twice = vec![Field::new("a", FieldKind::Int), Field::new("a", FieldKind::Float)];
    assert!(refused(twice, PAGE).contains("another field has the same name"));
    let array = |shape: &[u64], dtype: &str| {
        let array = Array { shape: shape.to_vec(), dtype: dtype.to_owned() };
        refused(field("a", FieldKind::NdArray(array)), PAGE)
    };
    assert!(array(&[], "<f4").contains("1 to 32 axes"));
    assert!(array(&[2, 0], "<f4").contains("1 to 32 axes"));
    assert!(array(&[1; 33], "<f4").contains("1 to 32 axes"));
    for dtype in ["", "f4", "<f3", "<U4", "float32", "<f\u{e9}"] {
        assert!(array(&[2], dtype).contains("plain type"), "{dtype}");
    }
    assert!(array(&[u64::MAX, 2], "<f4").contains("plain type"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn malformed_json_and_arrays_of_another_size_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let array = Array { shape: vec![2, 3], dtype: "<f4".to_owned() };
    let fields =
        vec![Field::new("j", FieldKind::Json), Field::new("a", FieldKind::TorchTensor(array))];
    let mut writer = Writer::create(folder.path().join("x"), fields, 1, PAGE).unwrap();
    let refused = writer.push(&[Value::Json("{"), Value::Array(&[0; 24])]).unwrap_err();
    assert!(refused.to_string().starts_with("sample 0, field \"j\": JSON: "), "{refused}");
    let refused = writer.push(&[Value::Json("{}"), Value::Array(&[0; 23])]).unwrap_err();
    assert!(refused.to_string().contains("23 bytes for <f4 of shape [2, 3]"), "{refused}");
    writer.push(&[Value::Json("{}"), Value::Array(&[0; 24])]).unwrap();
}
