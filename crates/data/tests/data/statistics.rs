//! Statistics of the values of a file.

use std::fs;

use baton_data::{
    Beton,
    statistics::{FieldStatistics, ValueStatistics, statistics},
};

use crate::sketch::{LABEL, ROW_BYTES, ROWS_START, beton, jpeg, raw};

fn of(bytes: &[u8], threads: usize) -> Result<Vec<FieldStatistics>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    fs::write(&path, bytes).unwrap();
    statistics(&Beton::open(&path).unwrap(), threads, |_| {}).map_err(|error| error.to_string())
}

#[test]
fn pixels_count_the_same_in_images_of_any_size() {
    // The grey JPEG has 128 pixels of 100.
    let file = beton(&[raw(4, 3, 10), jpeg(), raw(10, 6, 50)]);
    let found = of(&file, 2).unwrap();
    assert_eq!(of(&file, 1).unwrap(), found);
    let mean = (12.0 * 10.0 + 128.0 * 100.0 + 60.0 * 50.0) / 200.0;
    let square = |value: f64| (value - mean).powi(2);
    let std = ((12.0 * square(10.0) + 128.0 * square(100.0) + 60.0 * square(50.0)) / 200.0).sqrt();
    let ValueStatistics::Pixels { mean: means, std: stds } = &found[0].values else {
        panic!("{found:?}");
    };
    for channel in 0..3 {
        assert!((means[channel] - mean).abs() < 1e-12, "{means:?}");
        assert!((stds[channel] - std).abs() < 1e-9, "{stds:?}");
    }
}

#[test]
fn weights_make_the_classes_count_the_same() {
    let mut file = beton(&[raw(4, 3, 1), raw(4, 3, 2), raw(4, 3, 3), raw(4, 3, 4)]);
    let mut label = |sample: usize, value: i64| {
        let at = ROWS_START + sample * ROW_BYTES + LABEL;
        file[at..at + 8].copy_from_slice(&value.to_le_bytes());
        of(&file, 1).unwrap()[1..].to_vec()
    };
    label(1, 0);
    let found = label(3, 0);
    let expected = |class_counts, class_weights| {
        let values = ValueStatistics::Classes { class_counts, class_weights };
        vec![FieldStatistics { name: "label".to_owned(), values }]
    };
    assert_eq!(found, expected(vec![3, 0, 1], None), "class 1 has no samples");
    let weights = vec![4.0 / 6.0, 2.0];
    assert_eq!(label(2, 1), expected(vec![3, 1], Some(weights)));
    assert_eq!(label(2, -1), [], "values below 0 are no classes");
    assert_eq!(label(2, 1 << 40), [], "so are large ones");
}

#[test]
fn an_image_that_does_not_decode_is_named() {
    let mut broken = jpeg();
    broken.bytes.truncate(200);
    let error = of(&beton(&[raw(4, 3, 1), broken]), 2).unwrap_err();
    assert!(error.contains("sample 1"), "{error}");
}
