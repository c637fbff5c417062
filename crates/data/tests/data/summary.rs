//! The summary of a set, by which a job notices that its data were replaced.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
};

use baton_data::{Dataset, Source};
use baton_recipe::data_summary::SetSummary;

use crate::sketch::{LABEL, PAGE_BYTES, ROW_BYTES, ROWS_START, beton, jpeg, raw};

fn summary(location: &Path) -> SetSummary {
    Dataset::open(Source::new(location.to_str().unwrap())).unwrap().summary().unwrap()
}

fn write(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn every_byte_of_a_small_set_counts_but_not_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.beton");
    fs::write(&path, beton(&[raw(4, 3, 10), jpeg(), raw(5, 5, 30)])).unwrap();
    let before = summary(&path);
    assert_eq!((before.samples, before.bytes), (3, fs::metadata(&path).unwrap().len()));
    let moved = folder.path().join("b.beton");
    fs::rename(&path, &moved).unwrap();
    assert_eq!(summary(&moved), before);

    // A pixel: the first value of the first page.
    let pages = (ROWS_START + 3 * ROW_BYTES).next_multiple_of(PAGE_BYTES);
    write(&moved, pages as u64, &[77]);
    let after = summary(&moved);
    let text = "other contents of the same size";
    assert_eq!(after.difference(&before).as_deref(), Some(text));
}

#[test]
fn labels_and_most_values_of_a_large_set_count_and_the_order_of_its_files() {
    const LARGE: u64 = 64 << 20;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, first: u8| {
        let path = folder.path().join(name);
        let mut bytes = beton(&[raw(4, 3, first), raw(5, 5, 30)]);
        let table = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
        // A gap after the values makes the file large without using the disk.
        bytes[16..24].copy_from_slice(&(table + LARGE).to_le_bytes());
        let (head, rest) = bytes.split_at(table as usize);
        fs::write(&path, head).unwrap();
        write(&path, table + LARGE, rest);
        path
    };
    let (a, b) = (file("a.beton", 1), file("b.beton", 2));
    let before = summary(folder.path());
    assert_eq!((before.samples, before.bytes), (4, fs::metadata(&a).unwrap().len() * 2));
    assert_eq!(summary(folder.path()), before);

    fs::rename(&a, folder.path().join("c.beton")).unwrap();
    assert!(
        summary(folder.path()).difference(&before).is_some(),
        "the first sample is another one"
    );
    fs::rename(folder.path().join("c.beton"), &a).unwrap();

    let label = (ROWS_START + LABEL) as u64;
    write(&b, label, &[9]);
    assert!(summary(folder.path()).difference(&before).is_some(), "a label of the second file");
    fs::remove_file(&b).unwrap();
    file("b.beton", 2);
    assert_eq!(summary(folder.path()), before);

    let half = LARGE / 2;
    write(&b, half, &vec![1; half as usize]);
    assert!(summary(folder.path()).difference(&before).is_some(), "half of the second file");
}
