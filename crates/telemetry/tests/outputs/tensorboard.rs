use std::{collections::BTreeMap, fs, path::Path, process::Command};

use baton_proto::v1::{
    Accuracy, EvaluatedStep, Extent, Fit, GeneratedText, StreamMetricsResponse,
    stream_metrics_response::Metrics,
};
use baton_telemetry::tensorboard::EventFile;

use crate::sample;

/// An event, parsed without the code under test.
#[derive(Debug, Default, PartialEq)]
struct Event {
    wall_time: f64,
    step: u64,
    file_version: String,
    scalars: BTreeMap<String, f32>,
    session_status: Option<u64>,
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

fn checked(bytes: &[u8], masked: &[u8]) {
    let masked = u32::from_le_bytes(masked.try_into().unwrap()).wrapping_sub(0xa282_ead8);
    assert_eq!(masked.rotate_left(15), crc32c(bytes));
}

fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        checked(&bytes[..8], &bytes[8..12]);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        checked(&bytes[12..12 + length], &bytes[12 + length..16 + length]);
        records.push(&bytes[12..12 + length]);
        bytes = &bytes[16 + length..];
    }
    records
}

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Bytes(_) => panic!("a number"),
        }
    }

    fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(_) => panic!("bytes"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    number
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                fields.push((key >> 3, Field::Number(varint(&mut bytes))));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, Field::Bytes(&bytes[..length])));
        bytes = &bytes[length..];
    }
    fields
}

fn event(record: &[u8]) -> Event {
    let mut event = Event::default();
    for (number, field) in fields(record) {
        match number {
            1 => event.wall_time = f64::from_le_bytes(field.bytes().try_into().unwrap()),
            2 => event.step = field.number(),
            3 => event.file_version = field.text(),
            5 => event.scalars.extend(fields(field.bytes()).iter().map(|(_, value)| {
                let value = fields(value.bytes());
                let [(1, tag), (2, simple)] = &value[..] else { panic!("tag and value") };
                (tag.text(), f32::from_le_bytes(simple.bytes().try_into().unwrap()))
            })),
            7 => event.session_status = Some(fields(field.bytes())[0].1.number()),
            other => panic!("field {other}"),
        }
    }
    event
}

fn events_of(points: &[StreamMetricsResponse]) -> Vec<Event> {
    let folder = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(folder.path(), 1_763_000_000, "here").unwrap();
    for point in points {
        file.add(point).unwrap();
    }
    file.flush().unwrap();
    let bytes = fs::read(file.path()).unwrap();
    records(&bytes).into_iter().map(event).collect()
}

#[test]
fn a_file_begins_with_its_version() {
    let events = events_of(&[]);

    let file_version = "brain.Event:2".to_owned();
    let expected = Event { wall_time: 1_763_000_000.0, file_version, ..Event::default() };
    assert_eq!(events, [expected]);
}

#[test]
fn a_step_is_written_with_all_its_metrics() {
    let metrics = sample::step_metrics(700);
    let point = sample::point(700, 2, Metrics::Step(metrics.clone()));

    let events = events_of(std::slice::from_ref(&point));

    assert_eq!((events[1].step, events[1].wall_time), (700, point.unix_millis as f64 / 1e3));
    let tags = [
        "epoch",
        "gradient_norm",
        "loader_wait",
        "loss",
        "loss_scale",
        "lr",
        "resolution",
        "samples_per_second",
        "top1",
    ];
    assert!(events[1].scalars.keys().eq(tags.map(|tag| format!("train/{tag}")).iter()));
    assert_eq!(events[1].scalars["train/loss"], metrics.loss as f32);
    assert_eq!(events[1].scalars["train/resolution"], 160.0);
}

#[test]
fn evaluations_on_the_whole_set_and_on_a_subset_have_different_tags() {
    for (extent, part) in [(Extent::Full, "val"), (Extent::Subset, "val_subset")] {
        let evaluated = sample::evaluated(100, extent);

        let events = events_of(&[sample::point(100, 1, Metrics::Evaluation(evaluated.clone()))]);

        let tags = ["/loss", "/top1", "/top5", "_ema/loss", "_ema/top1", "_ema/top5"];
        assert!(events[1].scalars.keys().eq(tags.map(|tag| format!("{part}{tag}")).iter()));
        let top1 = evaluated.ema.unwrap().top1 as f32;
        assert_eq!(events[1].scalars[&format!("{part}_ema/top1")], top1);
    }
}

#[test]
fn a_regression_has_its_own_tags() {
    let fit = Some(Fit { mae: 0.25, pearson: 0.5, spearman: 0.75 });
    let accuracy = Some(Accuracy { loss: 0.125, fit, ..Accuracy::default() });
    let evaluated = EvaluatedStep { step: 9, accuracy, ..EvaluatedStep::default() };

    let events = events_of(&[sample::point(9, 1, Metrics::Evaluation(evaluated))]);

    let expected = [("loss", 0.125), ("mae", 0.25), ("pearson", 0.5), ("spearman", 0.75)];
    let expected = expected.map(|(name, value)| (format!("val/{name}"), value));
    assert_eq!(events[1].scalars, expected.into());
}

#[test]
fn a_restart_of_training_drops_later_steps_and_is_marked() {
    let events = events_of(&[sample::point(1_300, 3, Metrics::BeganAt(1_300))]);

    // TensorBoard drops the step of the START event and all later ones; step 1,300 is still valid.
    assert_eq!((events[1].step, events[1].session_status), (1_301, Some(1)));
    assert_eq!(events[2].step, 1_300);
    assert_eq!(events[2].scalars, [("run/generation".to_owned(), 3.0)].into());
}

/// What `scripts/check-tensorboard.py` prints about a folder.
fn read_by_tensorboard(folder: &Path) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = root.join(".tools/python");
    assert!(packages.is_dir(), "{} is missing: run `make tools` first", packages.display());
    let read = Command::new("python3")
        .arg(root.join("scripts/check-tensorboard.py"))
        .arg(folder)
        .env("PYTHONPATH", packages)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&read.stdout);
    assert!(read.status.success(), "{printed}{}", String::from_utf8_lossy(&read.stderr));
    printed.into_owned()
}

#[test]
fn tensorboard_itself_shows_generated_texts() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = EventFile::create(folder.path(), 1_763_000_000, "here").unwrap();
    for step in [100, 200] {
        let text = |sample| GeneratedText {
            sample,
            prompt: "def f(x):".to_owned(),
            reference: "return x".to_owned(),
            text: format!("x = {step}\nreturn 1"),
        };
        let texts = vec![text(3), text(9)];
        let evaluated = EvaluatedStep { texts, ..sample::evaluated(step, Extent::Full) };
        file.add(&sample::point(step, 1, Metrics::Evaluation(evaluated))).unwrap();
    }
    file.flush().unwrap();

    let printed = read_by_tensorboard(folder.path());

    let line = printed.lines().find(|line| line.starts_with("val/texts: at step 200 ")).unwrap();
    let text = r"**sample 9**, the model's text:\n\n    x = 200\n    return 1\n\nthe sample's own text:\n\n    return x\n";
    assert!(line.contains("**sample 3**") && line.contains(text), "{line}");
}

/// Both of its readers show each series without the steps that were rolled back.
#[test]
fn tensorboard_itself_reads_the_files_of_two_coordinators() {
    let folder = tempfile::tempdir().unwrap();
    sample::write_event_files(folder.path());

    let printed = read_by_tensorboard(folder.path());

    let loss = printed.lines().find(|line| line.starts_with("train/loss ")).unwrap();
    assert!(loss.contains(" 200 points, steps 10 to 2000,"), "{printed}");
}

#[test]
fn files_created_in_the_same_second_sort_in_the_order_of_creation() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("new/tensorboard");
    let created: Vec<_> = (0..3)
        .map(|_| EventFile::create(&dir, 1_763_000_000, "a/b.c").unwrap().path().to_owned())
        .collect();

    assert!(created.is_sorted_by(|a, b| a < b), "{created:?}");
    let name = created[0].file_name().and_then(|name| name.to_str()).unwrap();
    assert_eq!(name, "events.out.tfevents.1763000000.a-b-c.0000");
}

#[test]
fn the_error_names_a_folder_that_cannot_be_created() {
    let file = tempfile::NamedTempFile::new().unwrap();

    let problem = EventFile::create(&file.path().join("logs"), 0, "here").unwrap_err().to_string();

    let expected = format!("cannot create folder {}", Path::new(file.path()).display());
    assert!(problem.starts_with(&expected), "{problem}");
}
