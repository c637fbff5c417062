//! Labels that are values.

use std::{path::Path, sync::Arc};

use baton_data::{
    Batch, Beton, Dataset, Error, Inputs, Labels, Loader, Options, Request, SampleFault, Source,
    View,
    survey::{Survey, Values},
    synth::{INPUT_FIELD, Part, Signals, TARGET_FIELD},
    verify::Verifier,
    write::{Array, Field, Kind, Value, Writer},
};
use baton_recipe::spec::{Augment, OnBadSample, Resize};
use tempfile::TempDir;

use super::kit;

const SAMPLES: u64 = 5;

fn array(shape: &[u64], dtype: &str) -> Array {
    Array { shape: shape.to_vec(), dtype: dtype.to_owned() }
}

fn bytes<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// A file whose input holds its sample's number, with labels of every kind. `ratio` is the Float field,
/// and the last element of the array `pose`.
fn write(path: &Path, ratio: impl Fn(u64) -> f64) {
    let fields = vec![
        Field::new("signal", Kind::NdArray(array(&[1, 3], "<f4"))),
        Field::new("count", Kind::Int),
        Field::new("ratio", Kind::Float),
        Field::new("pose", Kind::NdArray(array(&[2, 1], "<f8"))),
        Field::new("speed", Kind::TorchTensor(array(&[1], "<f4"))),
        Field::new("bins", Kind::NdArray(array(&[3], "<i2"))),
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

struct Place(TempDir);

impl Place {
    fn new(ratio: impl Fn(u64) -> f64) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        write(&place.path(), ratio);
        place
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

fn train_view() -> View {
    View::Train { seed: 0, resolution: 1, resize: Resize::Fast, augment: Augment::default() }
}

/// One batch of all samples.
fn batch(set: &Arc<Dataset>, epoch: u32, view: View) -> Result<Batch, Error> {
    let request = Request { epoch, samples: (0..set.len()).collect(), view };
    Loader::start(set.clone(), &Options::new(2, 1), [request].into_iter()).next().unwrap()
}

#[test]
fn targets_come_from_numbers_and_from_arrays_of_every_kind() {
    let place = Place::new(|sample| sample as f64 / 8.0);
    type Targets = fn(f32) -> Vec<f32>;
    let cases: [(&str, u32, Targets); 5] = [
        ("count", 1, |n| vec![10.0 - n]),
        ("ratio", 1, |n| vec![n / 8.0]),
        ("pose", 2, |n| vec![-n, n / 8.0]),
        ("speed", 1, |n| vec![n / 4.0]),
        ("bins", 3, |n| vec![1.0, -2.0, n]),
    ];
    for (field, outputs, expected) in cases {
        let set = place.open(field, Labels::Values(outputs), OnBadSample::Fail).unwrap();
        assert_eq!(set.targets(3).unwrap(), expected(3.0));
        let batch = batch(&set, 7, train_view()).unwrap();
        let expected: Vec<f32> = (0..SAMPLES).flat_map(|sample| expected(sample as f32)).collect();
        assert_eq!(batch.targets, expected, "{field}");
        assert!(batch.labels.is_empty());
        assert_eq!((batch.len() as u64, batch.epoch), (SAMPLES, 7));
    }
    let classes = place.open("count", Labels::Classes(11), OnBadSample::Fail).unwrap();
    let batch = batch(&classes, 0, train_view()).unwrap();
    assert_eq!((batch.labels, batch.targets), (vec![10, 9, 8, 7, 6], vec![]));
}

#[test]
fn a_field_that_does_not_fit_the_model_is_refused_with_a_remedy() {
    let place = Place::new(|_| 0.0);
    let refused = place.refused("pose", Labels::Values(1));
    let expected = "field \"pose\" has 2 values per sample, but model.num_classes = 1: set \
                    model.num_classes = 2, or name another field in data.label_field";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = place.refused("ratio", Labels::Values(3));
    assert!(refused.contains("\"ratio\" has 1 value per sample"), "{refused}");
    let refused = place.refused("ratio", Labels::Classes(10));
    let expected = "field \"ratio\" is a FloatField, but classes are an IntField: name another one in \
                    data.label_field, or learn its values with loss.kind = \"mse\"";
    assert!(refused.ends_with(expected), "{refused}");
    let refused = place.refused("nothing", Labels::Values(1));
    assert!(refused.contains("no field \"nothing\"; it has \"signal\""), "{refused}");
}

/// Sample 1 has a target that f32 cannot hold, sample 2 none at all.
fn with_bad_targets() -> Place {
    Place::new(|sample| [0.0, 1e300, f64::NAN, 3.0, 4.0][sample as usize])
}

#[test]
fn a_target_that_is_not_finite_is_refused_before_training() {
    let place = with_bad_targets();
    let refused = place.open("ratio", Labels::Values(1), OnBadSample::Fail).unwrap_err();
    let Error::Sample { sample: 1, offset, fault: SampleFault::NotFinite { .. }, .. } = refused
    else {
        panic!("{refused}");
    };
    let file = std::fs::read(place.path()).unwrap();
    assert_eq!(file[offset as usize..][..8], 1e300_f64.to_le_bytes());
    let refused = refused.to_string();
    let start = format!("{}: sample 1, byte ", place.path().display());
    let end = "field \"ratio\" holds inf as f32, but only finite numbers can be learned from: mend the \
               data set, or set data.on_bad_sample = \"skip\"";
    assert!(refused.starts_with(&start) && refused.ends_with(end), "{refused}");
}

#[test]
fn a_target_in_the_pages_that_is_not_finite_is_told_when_its_turn_comes() {
    let set = with_bad_targets().open("pose", Labels::Values(2), OnBadSample::Fail).unwrap();
    let told = batch(&set, 0, train_view()).unwrap_err().to_string();
    assert!(told.contains("sample 1") && told.contains("field \"pose\" holds inf"), "{told}");
}

#[test]
fn samples_with_bad_targets_are_skipped_where_bad_samples_are() {
    let place = with_bad_targets();
    for (field, outputs) in [("ratio", 1), ("pose", 2)] {
        let set = place.open(field, Labels::Values(outputs), OnBadSample::Skip).unwrap();
        let training = batch(&set, 0, train_view()).unwrap();
        assert_eq!(training.samples, [0, 3, 3, 3, 4]);
        let evaluate = View::Evaluate { resolution: 1, resize: Resize::Fast, crop_ratio: 1.0 };
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
        Field::new("signal", Kind::NdArray(array(&[2], "<f4"))),
        Field::new("target", Kind::Float),
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
    let told = batch(&set, 0, train_view()).unwrap_err().to_string();
    assert!(told.contains("sample 1") && told.contains("\"signal\" holds -inf as f32"), "{told}");
    let skipping = Source { on_bad_sample: OnBadSample::Skip, ..source };
    let set = Arc::new(Dataset::open(skipping).unwrap());
    let batch = batch(&set, 0, train_view()).unwrap();
    assert_eq!(batch.samples, [0, 2, 2]);
    let Inputs::Arrays { values, .. } = batch.inputs else { panic!("no arrays") };
    assert_eq!(values, [0.5, 1.0, 0.5, 3.0, 0.5, 3.0]);
}

#[test]
fn verifying_lists_every_number_that_is_not_finite() {
    let place = with_bad_targets();
    let beton = Beton::open(place.path()).unwrap();
    let verifier = Verifier::new(&beton).unwrap();
    let found = verifier.check_all(2, |_| {});
    let told: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains("sample 1") && told[0].contains("\"ratio\" holds inf"), "{told:?}");
    assert!(told[1].contains("sample 2") && told[1].contains("\"ratio\" holds NaN"), "{told:?}");
}

#[test]
fn a_survey_tells_what_always_saying_the_mean_would_cost() {
    let place = Place::new(|sample| [1.0, 2.0, f64::INFINITY, 3.0, 6.0][sample as usize]);
    let survey = Survey::of(&Beton::open(place.path()).unwrap()).unwrap();
    let expected = Values::Floats {
        least: Some(1.0),
        most: Some(6.0),
        mean: Some(3.0),
        deviation: Some(3.5_f64.sqrt()),
        not_finite: 1,
    };
    assert_eq!(survey.fields[2].values, expected);

    let empty = Place::new(|_| f64::NAN);
    let survey = Survey::of(&Beton::open(empty.path()).unwrap()).unwrap();
    let Values::Floats { least, mean, not_finite, .. } = survey.fields[2].values else {
        panic!("{survey:?}");
    };
    assert_eq!((least, mean, not_finite), (None, None, SAMPLES));
}

#[test]
fn made_up_signals_are_read_back_bit_by_bit_through_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("signals-train.beton");
    let signals = Signals { channels: 2, window: 30, seed: 4, ..Signals::default() };
    let mut progress = 0;
    let written = signals.write(Part::Train, 20, &path, || progress += 1).unwrap();
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
        let target = signals.make(Part::Train, sample as u64, &mut signal);
        assert_eq!(values[sample * 60..][..60], signal);
        assert_eq!(batch.targets[sample], target as f32);
    }
    let beton = Beton::open(&path).unwrap();
    assert!(Verifier::new(&beton).unwrap().check_all(1, |_| {}).is_empty());
}
