//! Texts as token ids.

use std::{path::Path, sync::Arc};

use baton_data::{
    Batch, Beton, Dataset, Error, Inputs, LABELS_FIELD, LARGEST_FIELD, Labels, Loader, Options,
    PREDICTED_FIELD, Preprocessing, Request, Source, TOKENS_FIELD, TextSize,
    verify::Verifier,
    write::{Error as WriteError, Field, FieldKind, TextWriter, Value, Writer},
};
use baton_recipe::spec::Resize;

/// Text `n` has the tokens 10n, 10n + 1, … and predicts all but the first two.
fn text(number: u32) -> (Vec<u32>, Vec<i32>) {
    let tokens: Vec<u32> = (10 * number..10 * number + 3 + number).collect();
    let labels = tokens.iter().enumerate();
    let labels = labels.map(|(at, token)| if at < 2 { -100 } else { *token as i32 }).collect();
    (tokens, labels)
}

fn write(path: &Path) {
    let mut writer = TextWriter::create(path, 4).unwrap();
    for number in 0..4 {
        let (tokens, labels) = text(number);
        writer.push(&tokens, &labels).unwrap();
    }
    writer.finish().unwrap();
}

fn open(path: &Path, vocabulary: u64) -> Result<Arc<Dataset>, Error> {
    let [input_field, label_field] = [TOKENS_FIELD, LABELS_FIELD].map(str::to_owned);
    let (labels, vocabulary) = (Labels::Tokens, Some(vocabulary));
    let location = path.to_str().unwrap();
    let source = Source { input_field, label_field, labels, vocabulary, ..Source::new(location) };
    Dataset::open(source).map(Arc::new)
}

fn batch(set: &Arc<Dataset>, samples: &[u64]) -> Batch {
    let preprocessing =
        Preprocessing::Evaluate { resolution: 1, resize: Resize::Fast, crop_ratio: 1.0 };
    let request = Request { epoch: 2, samples: samples.to_vec(), preprocessing };
    let requests = [request.clone(), request].into_iter();
    let mut loader = Loader::start(set.clone(), &Options::new(2, 2), requests);
    let first = loader.next().unwrap().unwrap();
    loader.recycle(first.clone());
    assert_eq!(loader.next().unwrap().unwrap(), first, "used memory leaves no trace");
    first
}

#[test]
fn texts_of_different_lengths_are_joined_in_the_order_of_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    write(&path);
    let set = open(&path, 37).unwrap();
    let size = |tokens, predicted| TextSize { tokens, predicted };
    assert_eq!(set.text_sizes().unwrap(), [size(3, 1), size(4, 2), size(5, 3), size(6, 4)]);
    let batch = batch(&set, &[2, 0]);
    let (second, labels) = text(2);
    let (first, first_labels) = text(0);
    let expected = [second, first].concat().into_iter().map(i64::from).collect();
    assert_eq!(batch.inputs, Inputs::Tokens { tokens: expected, lengths: vec![5, 3] });
    let expected: Vec<i64> = [labels, first_labels].concat().into_iter().map(i64::from).collect();
    assert_eq!((batch.labels, batch.samples, batch.epoch), (expected, vec![2, 0], 2));
}

#[test]
fn a_text_with_a_token_beyond_the_vocabulary_is_refused_when_the_set_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    write(&path);
    let refused = open(&path, 35).unwrap_err().to_string();
    let expected = "token 35 is not in the model's vocabulary of 35: run `baton data tokenize`";
    assert!(refused.contains("sample 3") && refused.contains(expected), "{refused}");
}

/// Writes one text whose fields contradict each other, and opens it.
fn damaged(tokens: &[u32], labels: &[i32], predicted: i64, largest: i64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let kinds = [FieldKind::Bytes, FieldKind::Bytes, FieldKind::Int, FieldKind::Int];
    let names = [TOKENS_FIELD, LABELS_FIELD, PREDICTED_FIELD, LARGEST_FIELD];
    let fields = names.into_iter().zip(kinds).map(|(name, kind)| Field::new(name, kind));
    let mut writer = Writer::create(&path, fields.collect(), 1, 1 << 12).unwrap();
    let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let labels: Vec<u8> = labels.iter().flat_map(|label| label.to_le_bytes()).collect();
    let values =
        [Value::Bytes(&tokens), Value::Bytes(&labels), Value::Int(predicted), Value::Int(largest)];
    writer.push(&values).unwrap();
    writer.finish().unwrap();
    let set = match open(&path, 100) {
        Ok(set) => set,
        Err(error) => return error.to_string(),
    };
    let preprocessing =
        Preprocessing::Evaluate { resolution: 1, resize: Resize::Fast, crop_ratio: 1.0 };
    let request = Request { epoch: 0, samples: vec![0], preprocessing };
    let mut loader = Loader::start(set, &Options::new(1, 1), std::iter::once(request));
    loader.next().unwrap().unwrap_err().to_string()
}

#[test]
fn a_text_whose_fields_contradict_each_other_is_refused() {
    for refused in [
        damaged(&[1, 2, 3], &[-100, 2], 1, 3),
        damaged(&[1, 2, 3], &[-100, 2, 3], 0, 3),
        damaged(&[1, 2, 3], &[-100, 2, 3], 3, 3),
        damaged(&[1, 2, 3], &[-100, 2, -100], 2, 3),
        damaged(&[1, 9, 3], &[-100, 9, 3], 2, 3),
        damaged(&[1, 2, 3], &[-100, 2, 50], 2, 3),
        damaged(&[1, 2, 3], &[-100, -1, 3], 2, 3),
        damaged(&[], &[], 0, 0),
    ] {
        assert!(refused.contains("run `baton data tokenize` again"), "{refused}");
    }
}

#[test]
fn verification_finds_damaged_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let mut writer = TextWriter::create(&path, 3).unwrap();
    for token in [700_001, 700_002, 700_003] {
        writer.push(&[5, token, 7], &[-100, -100, 7]).unwrap();
    }
    writer.finish().unwrap();
    let faults = || {
        let beton = Beton::open(&path).unwrap();
        let faults = Verifier::new(&beton).unwrap().check_all(1, |_| {});
        faults.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(faults().is_empty());
    let mut bytes = std::fs::read(&path).unwrap();
    let token = 700_002_u32.to_le_bytes();
    let at: Vec<usize> = (0..bytes.len() - 4).filter(|at| bytes[*at..at + 4] == token).collect();
    // In the row as the largest token too.
    let last = *at.last().unwrap();
    bytes[last..last + 4].copy_from_slice(&800_000_u32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let found = faults();
    assert!(found.len() == 1 && found[0].contains("sample 1"), "{found:?}");
}

#[test]
fn another_kind_of_file_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, "{}").unwrap();
    let error = TextWriter::create(&path, 1).err().unwrap().to_string();
    assert!(error.ends_with(
        "tokenizer.json exists and is not a .beton file: remove it, or give another path"
    ));
    std::fs::write(&path, "").unwrap();
    write(&path);
    write(&path);
}

#[test]
fn a_text_without_anything_to_predict_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = TextWriter::create(&folder.path().join("set.beton"), 1).unwrap();
    for (tokens, labels) in [(&[1, 2][..], &[1, -100][..]), (&[1, 2], &[1]), (&[], &[])] {
        let refused = writer.push(tokens, labels);
        assert!(matches!(refused, Err(WriteError::Field { .. })), "{refused:?}");
    }
}
