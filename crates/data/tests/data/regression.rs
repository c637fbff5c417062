//! Labels that are target values.

use std::{path::Path, sync::Arc};

use baton_data::{
    Batch, Beton, Dataset, Error, Inputs, Labels, Loader, Options, Preprocessing, Request,
    SampleFault, Source,
    survey::{Survey, Values},
    synth::{INPUT_FIELD, Signals, Split, TARGET_FIELD},
    verify::Verifier,
    write::{Array, Field, FieldKind, Value, Writer},
};
use baton_recipe::spec::{Augment, AugmentSignal, OnBadSample, Resize};
use tempfile::TempDir;

use super::kit;

const SAMPLES: u64 = 5;

fn array(shape: &[u64], dtype: &str) -> Array {
    Array { shape: shape.to_vec(), dtype: dtype.to_owned() }
}

fn bytes<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// Writes a file whose inputs contain the sample's number, with labels of every kind. `ratio` is the value of the
/// Float field and the last element of the array `pose`.
fn write(path: &Path, ratio: impl Fn(u64) -> f64) {
    let fields = vec![
        Field::new("signal", FieldKind::NdArray(array(&[1, 3], "<f4"))),
        Field::new("count", FieldKind::Int),
        Field::new("ratio", FieldKind::Float),
        Field::new("pose", FieldKind::NdArray(array(&[2, 1], "<f8"))),
        Field::new("speed", FieldKind::TorchTensor(array(&[1], "<f4"))),
        Field::new("bins", FieldKind::NdArray(array(&[3], "<i2"))),
    ];
    let mut writer = Writer::create(path, fields, SAMPLES, 1 << 12).unwrap();
    for sample in 0..SAMPLES {
        let (n, ratio) = (sample as f32, ratio(sample));
        let signal = bytes(&[n; 3], f32::to_le_bytes);
        let pose = bytes(&[-f64::from(n), ratio], f64::to_le_bytes);
        let speed = bytes(&[n / 4.0], f32::to_le_bytes);
        let bins = bytes(&[1, -2, sample as i16], i16::to_le_bytes);
        let values = [
            Value::Array(&signal),
            Value::Int(10 - sample as i64),
            Value::Float(ratio),
            Value::Array(&pose),
            Value::Array(&speed),
            Value::Array(&bins),
        ];
        writer.push(&values).unwrap();
    }
    writer.finish().unwrap();
}

struct TestSet(TempDir);

impl TestSet {
    fn new(ratio: impl Fn(u64) -> f64) -> Self {
        let set_file = Self(tempfile::tempdir().unwrap());
        write(&set_file.path(), ratio);
        set_file
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("set.beton")
    }

    fn open(
        &self,
        label_field: &str,
        labels: Labels,
        on_bad_sample: OnBadSample,
    ) -> Result<Arc<Dataset>, Error> {
        let source = Source {
            input_field: "signal".to_owned(),
            label_field: label_field.to_owned(),
            labels,
            on_bad_sample,
            ..Source::new(self.path().to_str().unwrap())
        };
        Dataset::open(source).map(Arc::new)
    }

    fn refused(&self, label_field: &str, labels: Labels) -> String {
        self.open(label_field, labels, OnBadSample::Fail).unwrap_err().to_string()
    }
}

fn train_view() -> Preprocessing {
    Preprocessing::Train {
        seed: 0,
        resolution: 1,
        resize: Resize::Fast,
        augment: Augment::default(),
        mean: [0; 3],
    }
}

/// One batch of all samples.
fn batch(set: &Arc<Dataset>, epoch: u32, preprocessing: Preprocessing) -> Result<Batch, Error> {
    let request = Request { epoch, samples: (0..set.len()).collect(), preprocessing };
    Loader::start(set.clone(), &Options::new(2, 1), [request].into_iter()).next().unwrap()
}

#[test]
fn targets_are_read_from_numbers_and_from_arrays_of_every_kind() {
    let set_file = TestSet::new(|sample| sample as f64 / 8.0);
    type Targets = fn(f32) -> Vec<f32>;
    let cases: [(&str, u32, Targets); 5] = [
        ("count", 1, |n| vec![10.0 - n]),
        ("ratio", 1, |n| vec![n / 8.0]),
        ("pose", 2, |n| vec![-n, n / 8.0]),
        ("speed", 1, |n| vec![n / 4.0]),
        ("bins", 3, |n| vec![1.0, -2.0, n]),
    ];
    for (field, outputs, expected) in cases {
        let set = set_file.open(field, Labels::Values(outputs), OnBadSample::Fail).unwrap();
        assert_eq!(set.targets(3).unwrap(), expected(3.0));
        let batch = batch(&set, 7, train_view()).unwrap();
        let expected: Vec<f32> = (0..SAMPLES).flat_map(|sample| expected(sample as f32)).collect();
        assert_eq!(batch.targets, expected, "{field}");
        assert!(batch.labels.is_empty());
        assert_eq!((batch.len() as u64, batch.epoch), (SAMPLES, 7));
    }
    let classes = set_file.open("count", Labels::Classes(11), OnBadSample::Fail).unwrap();
    let batch = batch(&classes, 0, train_view()).unwrap();
    assert_eq!((batch.labels, batch.targets), (vec![10, 9, 8, 7, 6], vec![]));
}

#[test]
fn a_field_that_does_not_fit_the_model_is_refused_with_a_remedy() {
    let set_file = TestSet::new(|_| 0.0);
    let refused = set_file.refused("pose", Labels::Values(1));
    let expected = "field \"pose\" has 2 values per sample, but model.num_classes = 1: set \
                    model.num_classes = 2, or name another field in data.label_field";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = set_file.refused("ratio", Labels::Values(3));
    assert!(refused.contains("\"ratio\" has 1 value per sample"), "{refused}");
    let refused = set_file.refused("ratio", Labels::Classes(10));
    let expected = "field \"ratio\" is a FloatField, but classes need an IntField: name another field in \
                    data.label_field, or train a regression with loss.kind = \"mse\"";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = set_file.refused("nothing", Labels::Values(1));
    assert!(refused.contains("no field \"nothing\"; it has \"signal\""), "{refused}");
}

/// Sample 1 has a target outside the range of f32, sample 2 has NaN.
fn with_bad_targets() -> TestSet {
    TestSet::new(|sample| [0.0, 1e300, f64::NAN, 3.0, 4.0][sample as usize])
}

#[test]
fn a_target_that_is_not_finite_is_refused_before_training() {
    let set_file = with_bad_targets();
    let refused = set_file.open("ratio", Labels::Values(1), OnBadSample::Fail).unwrap_err();
    let Error::Sample { sample: 1, offset, fault: SampleFault::NotFinite { .. }, .. } = refused
    else {
        panic!("{refused}");
    };
    let file = std::fs::read(set_file.path()).unwrap();
    assert_eq!(file[offset as usize..][..8], 1e300_f64.to_le_bytes());
    let refused = refused.to_string();
    let start = format!("{}: sample 1, byte ", set_file.path().display());
    let end = "field \"ratio\" has the value inf as f32, but training needs finite numbers: fix the \
               data set, or set data.on_bad_sample = \"skip\"";
    assert!(refused.starts_with(&start) && refused.ends_with(end), "{refused}");
}

#[test]
fn a_target_in_the_pages_that_is_not_finite_is_reported_when_it_is_used() {
    let set = with_bad_targets().open("pose", Labels::Values(2), OnBadSample::Fail).unwrap();
    let message = batch(&set, 0, train_view()).unwrap_err().to_string();
    assert!(
        message.contains("sample 1") && message.contains("field \"pose\" has the value inf"),
        "{message}"
    );
}

#[test]
fn samples_with_bad_targets_are_skipped_like_other_bad_samples() {
    let set_file = with_bad_targets();
    for (field, outputs) in [("ratio", 1), ("pose", 2)] {
        let set = set_file.open(field, Labels::Values(outputs), OnBadSample::Skip).unwrap();
        let training = batch(&set, 0, train_view()).unwrap();
        assert_eq!(training.samples, [0, 3, 3, 3, 4]);
        let evaluate =
            Preprocessing::Evaluate { resolution: 1, resize: Resize::Fast, crop_ratio: 1.0 };
        let evaluation = batch(&set, 0, evaluate).unwrap();
        assert_eq!(evaluation.samples, [0, 3, 4]);
        let last: Vec<f32> =
            evaluation.targets.chunks(outputs as usize).map(|t| t[t.len() - 1]).collect();
        assert_eq!(last, [0.0, 3.0, 4.0]);
        assert_eq!(evaluation.len(), 3);
    }
}

#[test]
fn a_signal_that_is_not_finite_is_a_bad_sample() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.beton");
    let fields = vec![
        Field::new("signal", FieldKind::NdArray(array(&[2], "<f4"))),
        Field::new("target", FieldKind::Float),
    ];
    let mut writer = Writer::create(&path, fields, 3, 1 << 12).unwrap();
    for last in [1.0, f32::NEG_INFINITY, 3.0] {
        let signal = bytes(&[0.5, last], f32::to_le_bytes);
        writer.push(&[Value::Array(&signal), Value::Float(1.0)]).unwrap();
    }
    writer.finish().unwrap();

    let source = Source {
        input_field: "signal".to_owned(),
        label_field: "target".to_owned(),
        labels: Labels::Values(1),
        ..Source::new(path.to_str().unwrap())
    };
    let set = Arc::new(Dataset::open(source.clone()).unwrap());
    let message = batch(&set, 0, train_view()).unwrap_err().to_string();
    assert!(
        message.contains("sample 1") && message.contains("\"signal\" has the value -inf as f32"),
        "{message}"
    );
    let skipping = Source { on_bad_sample: OnBadSample::Skip, ..source };
    let set = Arc::new(Dataset::open(skipping).unwrap());
    let batch = batch(&set, 0, train_view()).unwrap();
    assert_eq!(batch.samples, [0, 2, 2]);
    let Inputs::Arrays { values, .. } = batch.inputs else { panic!("no arrays") };
    assert_eq!(values, [0.5, 1.0, 0.5, 3.0, 0.5, 3.0]);
}

#[test]
fn verifying_lists_every_number_that_is_not_finite() {
    let set_file = with_bad_targets();
    let beton = Beton::open(set_file.path()).unwrap();
    let verifier = Verifier::new(&beton).unwrap();
    let found = verifier.check_all(2, |_| {});
    let message: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(message.len(), 2, "{message:?}");
    assert!(
        message[0].contains("sample 1") && message[0].contains("\"ratio\" has the value inf"),
        "{message:?}"
    );
    assert!(
        message[1].contains("sample 2") && message[1].contains("\"ratio\" has the value NaN"),
        "{message:?}"
    );
}

#[test]
fn a_survey_contains_the_error_of_always_predicting_the_mean() {
    let set_file = TestSet::new(|sample| [1.0, 2.0, f64::INFINITY, 3.0, 6.0][sample as usize]);
    let survey = Survey::of(&Beton::open(set_file.path()).unwrap()).unwrap();
    let expected = Values::Floats {
        least: Some(1.0),
        most: Some(6.0),
        mean: Some(3.0),
        deviation: Some(3.5_f64.sqrt()),
        not_finite: 1,
    };
    assert_eq!(survey.fields[2].values, expected);

    let empty = TestSet::new(|_| f64::NAN);
    let survey = Survey::of(&Beton::open(empty.path()).unwrap()).unwrap();
    let Values::Floats { least, mean, not_finite, .. } = survey.fields[2].values else {
        panic!("{survey:?}");
    };
    assert_eq!((least, mean, not_finite), (None, None, SAMPLES));
}

#[test]
fn synthetic_signals_are_read_back_bit_identical_through_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("signals-train.beton");
    let signals = Signals { channels: 2, window: 30, seed: 4, ..Signals::default() };
    let mut progress = 0;
    let written = signals.write(Split::Train, 20, &path, || progress += 1).unwrap();
    assert_eq!((written.samples, progress), (20, 20));
    assert_eq!(written.bytes, std::fs::metadata(&path).unwrap().len());

    let location = path.to_str().unwrap();
    let data = format!(
        "data={{ train='{location}', val='{location}', input_field='{INPUT_FIELD}', \
         label_field='{TARGET_FIELD}' }}"
    );
    let model = "model={ arch='resnet34_1d', num_classes=1 }";
    let spec = kit::recipe(&[model, &data, "loss.kind=mse"], &[]);
    let source = Source::of_recipe(&spec, location, folder.path().to_owned());
    let set = Arc::new(Dataset::open(source).unwrap());
    let batch = batch(&set, 0, train_view()).unwrap();
    let Inputs::Arrays { values, shape } = &batch.inputs else { panic!("no arrays") };
    assert_eq!(shape, &[2, 30]);
    let mut signal = Vec::new();
    for sample in 0..20 {
        let target = signals.make(Split::Train, sample as u64, &mut signal);
        assert_eq!(values[sample * 60..][..60], signal);
        assert_eq!(batch.targets[sample], target as f32);
    }
    let beton = Beton::open(&path).unwrap();
    assert!(Verifier::new(&beton).unwrap().check_all(1, |_| {}).is_empty());
}

#[test]
fn signals_change_in_training_and_not_in_an_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("signals-train.beton");
    Signals { window: 30, ..Signals::default() }.write(Split::Train, 20, &path, || {}).unwrap();
    let location = path.to_str().unwrap();
    let source = Source {
        input_field: INPUT_FIELD.to_owned(),
        label_field: TARGET_FIELD.to_owned(),
        labels: Labels::Values(1),
        ..Source::new(location)
    };
    let set = Arc::new(Dataset::open(source).unwrap());
    let values = |epoch, preprocessing| {
        let Inputs::Arrays { values, .. } = batch(&set, epoch, preprocessing).unwrap().inputs
        else {
            panic!("no arrays")
        };
        values
    };
    let evaluation =
        Preprocessing::Evaluate { resolution: 1, resize: Resize::Fast, crop_ratio: 1.0 };
    let stored = values(0, evaluation);
    assert_eq!(values(0, train_view()), stored);

    let signal = AugmentSignal { noise: 0.1, ..AugmentSignal::default() };
    let augment = Augment { signal: Some(signal), ..Augment::default() };
    let noisy = Preprocessing::Train {
        seed: 0,
        resolution: 1,
        resize: Resize::Fast,
        augment,
        mean: [0; 3],
    };
    let first = values(0, noisy.clone());
    assert!(first.iter().zip(&stored).all(|(noisy, stored)| noisy != stored));
    assert_eq!(values(0, noisy.clone()), first);
    assert_ne!(values(1, noisy), first);
}
