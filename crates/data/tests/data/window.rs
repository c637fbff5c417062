//! Windows of recordings as data sets.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use baton_data::{
    Beton,
    write::{Error, LabelTable, LabelTimes, WindowOptions, write_windows},
};

/// A folder of recordings, and a table of labels beside it.
struct Study(tempfile::TempDir);

impl Study {
    fn new(labels: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("in")).unwrap();
        fs::write(folder.path().join("labels.csv"), labels).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn npy(&self, name: &str, kind: &str, shape: &str, bytes: &[u8]) {
        let mut header =
            format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
        header += &" ".repeat(127 - (10 + header.len()) % 64);
        header += "\n";
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.bytes());
        file.extend(bytes);
        fs::write(self.path("in").join(name), file).unwrap();
    }

    /// A recording of one channel.
    fn record(&self, name: &str, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.npy(name, "<f4", &format!("({},)", values.len()), &bytes);
    }

    fn options(&self, length: usize, stride: usize) -> WindowOptions {
        WindowOptions {
            from: self.path("in"),
            length,
            stride,
            rate: None,
            labels: LabelTable {
                path: self.path("labels.csv"),
                recording: "recording".to_owned(),
                label: "label".to_owned(),
                time: None,
                by: None,
            },
            to: self.path("train.beton"),
            others: Vec::new(),
            shuffle: None,
        }
    }

    fn refusal(&self, options: &WindowOptions) -> String {
        let refused = write_windows(options, |_, _| ()).unwrap_err().to_string();
        assert!(!options.to.exists(), "something was written");
        refused.replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// A window as it was written: recording, start, label, values.
type Window = (i64, i64, f64, Vec<f32>);

fn windows(path: &Path) -> Vec<Window> {
    let set = Beton::open(path).unwrap();
    let [recording, start] = ["recording", "start"].map(|name| set.int_column(name).unwrap());
    let (label, signal) = (set.float_column("label").unwrap(), set.array_column("signal").unwrap());
    let window = |sample| {
        let mut bytes = vec![0; signal.value_bytes() as usize];
        set.array(&signal, sample, &mut bytes).unwrap();
        let values = bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
        let [recording, start] =
            [&recording, &start].map(|column| set.int(column, sample).unwrap());
        (recording, start, set.float(&label, sample).unwrap(), values.collect())
    };
    (0..set.len()).map(window).collect()
}

#[test]
fn recordings_are_cut_into_windows_and_those_with_gaps_are_left_out() {
    let study = Study::new("recording,label\nb,2\na,1.5\n");
    study.record("a.npy", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    study.record("b.npy", &[0.0, 1.0, f32::NAN, 3.0, 4.0, 5.0, 6.0]);
    study.record("c.npy", &[0.0; 9]);
    let written = write_windows(&study.options(3, 2), |_, _| ()).unwrap();
    assert_eq!((written.with_gaps, written.without_label, written.unused_recordings), (2, 0, 1));
    let expected = [
        (0, 0, 1.5, vec![0.0, 1.0, 2.0]),
        (0, 2, 1.5, vec![2.0, 3.0, 4.0]),
        (1, 4, 2.0, vec![4.0, 5.0, 6.0]),
    ];
    assert_eq!(windows(&study.path("train.beton")), expected);
    assert_eq!(fs::read_to_string(written.recordings).unwrap(), "a\nb\nc\n");
}

/// Row i of `fixtures/table.py` has the path `i.png` and the half i / 4.
#[test]
fn labels_may_be_in_a_parquet_file() {
    let study = Study::new("");
    fs::write(study.path("labels.csv"), include_bytes!("../fixtures/table.parquet")).unwrap();
    (0..70).for_each(|row| study.record(&format!("{row}.png.npy"), &[0.0; 4][..2 + 2 * (row % 2)]));
    let mut options = study.options(2, 2);
    (options.labels.recording, options.labels.label) = ("image.path".to_owned(), "half".to_owned());
    write_windows(&options, |_, _| ()).unwrap();
    let found = windows(&study.path("train.beton"));
    assert_eq!(found.len(), 35 + 2 * 35);
    let names = fs::read_to_string(study.path("train.beton.recordings.txt")).unwrap();
    let names: Vec<&str> = names.lines().collect();
    for (recording, _, label, _) in found {
        let row: f64 = names[recording as usize].trim_end_matches(".png").parse().unwrap();
        assert_eq!(label, row / 4.0);
    }
}

#[test]
fn labels_that_change_belong_to_the_windows_near_them() {
    let study = Study::new("recording,glucose,t\nx,7,2\nx,5,0\nx,9,30\n");
    study.record("x.npy", &[0.0; 40]);
    let mut options = study.options(4, 4);
    options.labels.label = "glucose".to_owned();
    options.labels.time = Some(LabelTimes { column: "t".to_owned(), within: 3.0 });
    options.rate = Some(4.0);
    let written = write_windows(&options, |_, _| ()).unwrap();
    // The middles are at 0.5, 1.5, … 9.5 s.
    let labels: Vec<f64> =
        windows(&study.path("train.beton")).iter().map(|window| window.2).collect();
    assert_eq!(labels, [5.0, 7.0, 7.0, 7.0, 7.0]);
    assert_eq!(written.without_label, 5);
}

#[test]
fn channels_and_number_formats_are_kept_and_sounds_are_scaled() {
    let study = Study::new("recording,label\nfew,1\n");
    let values: Vec<u8> =
        [1_i16, 2, 3, -4, -5, -6].iter().flat_map(|value| value.to_le_bytes()).collect();
    study.npy("few.npy", "<i2", "(2, 3)", &values);
    write_windows(&study.options(2, 1), |_, _| ()).unwrap();
    let cut = |study: &Study| -> Vec<Vec<f32>> {
        windows(&study.path("train.beton")).into_iter().map(|window| window.3).collect()
    };
    assert_eq!(cut(&study), [[1.0, 2.0, -4.0, -5.0], [2.0, 3.0, -5.0, -6.0]]);

    let study = Study::new("recording,label\nsound,1\n");
    let spec = hound::WavSpec {
        channels: 2,
        sample_rate: 8_000,
        bits_per_sample: 16,
        sample_format: hound::SampleFormat::Int,
    };
    let mut wav = hound::WavWriter::create(study.path("in/sound.wav"), spec).unwrap();
    for sample in [16_384_i16, -32_768, 0, 8_192] {
        wav.write_sample(sample).unwrap();
    }
    wav.finalize().unwrap();
    write_windows(&study.options(2, 2), |_, _| ()).unwrap();
    assert_eq!(cut(&study), [[0.5, 0.0, -1.0, 0.25]]);

    fs::remove_file(study.path("train.beton")).unwrap();
    let error = study.refusal(&WindowOptions { rate: Some(44_100.0), ..study.options(2, 2) });
    assert_eq!(
        error,
        "in/sound.wav: has 8000 positions per second, and --rate says 44100: all must have the same"
    );
    // Without a rate, all have that of the first.
    fs::write(study.path("labels.csv"), "recording,label\nsound,1\nslow,2\n").unwrap();
    let spec = hound::WavSpec { sample_rate: 100, ..spec };
    let mut wav = hound::WavWriter::create(study.path("in/slow.wav"), spec).unwrap();
    (0..8).for_each(|sample| wav.write_sample(sample).unwrap());
    wav.finalize().unwrap();
    let error = study.refusal(&study.options(2, 2));
    assert!(
        error.contains("sound.wav: has 8000 positions per second, and others have 100"),
        "{error}"
    );

    let whole = fs::read(study.path("in/slow.wav")).unwrap();
    fs::write(study.path("in/slow.wav"), &whole[..whole.len() - 8]).unwrap();
    fs::write(study.path("labels.csv"), "recording,label\nslow,2\n").unwrap();
    let error = study.refusal(&study.options(2, 2));
    assert_eq!(error, "in/slow.wav: has fewer than its 8 values: is it cut off?");
}

/// 1000 positions of two channels in 24 bits, written by libsndfile.
#[test]
fn compressed_sounds_are_read_whole_or_refused() {
    let whole = include_bytes!("../fixtures/stereo.flac");
    let study = Study::new("recording,label\nsound,1\n");
    let put = |bytes: &[u8]| fs::write(study.path("in/sound.flac"), bytes).unwrap();
    put(whole);
    let options = WindowOptions { rate: Some(8_000.0), ..study.options(1000, 1000) };
    write_windows(&options, |_, _| ()).unwrap();
    let found = windows(&study.path("train.beton")).remove(0).3;
    let value = |range: i32, middle: i32, step: i32| {
        move |at: i32| ((at * step) % range - middle) as f32 * 4.0 / 8_388_608.0
    };
    let (left, right) = (value(2001, 1000, 37), value(701, 350, 11));
    let expected: Vec<f32> = (0..1000).map(left).chain((0..1000).map(right)).collect();
    assert!(found == expected);

    let before = fs::read(study.path("train.beton")).unwrap();
    put(&[&whole[..], b"TAG", &[0; 125]].concat());
    write_windows(&options, |_, _| ()).unwrap();
    assert!(fs::read(study.path("train.beton")).unwrap() == before);

    fs::remove_file(study.path("train.beton")).unwrap();
    put(&whole[..whole.len() - 100]);
    assert_eq!(study.refusal(&options), "in/sound.flac: is cut off: copy it again");
    let mut damaged = whole.to_vec();
    damaged[whole.len() - 200] ^= 1;
    put(&damaged);
    let start = "in/sound.flac: is no .flac file that can be read (";
    assert!(study.refusal(&options).starts_with(start), "{}", study.refusal(&options));
    put(b"RIFF is another format");
    assert!(study.refusal(&options).starts_with(start), "{}", study.refusal(&options));
    // The number of positions: the last 36 bits before the digest of 16 bytes; 0 is unknown.
    let mut unknown = whole.to_vec();
    unknown[22..26].fill(0);
    put(&unknown);
    let error = study.refusal(&options);
    assert!(error.starts_with("in/sound.flac: does not say how long it is: "), "{error}");
    // The bits of a sample, less one, begin with the last bit of byte 20.
    let mut narrower = whole.to_vec();
    narrower[20] &= !1;
    put(&narrower);
    let error = study.refusal(&options);
    assert_eq!(error, "in/sound.flac: has values of more than the 8 bits that it says");
    let mut longer = whole.to_vec();
    longer[25] ^= 1;
    put(&longer);
    let error = study.refusal(&options);
    assert_eq!(error, "in/sound.flac: has fewer than its 2002 values: is it cut off?");
    let mut shorter = whole.to_vec();
    shorter[24] = 0;
    put(&shorter);
    let error = study.refusal(&WindowOptions { rate: Some(8_000.0), ..study.options(100, 100) });
    assert_eq!(error, "in/sound.flac: has more than the 232 positions that it says");
    fs::write(study.path("in/sound.npy"), "").unwrap();
    assert!(study.refusal(&options).contains("has two recordings of the name \"sound\""));
}

#[test]
fn a_shuffle_keeps_every_window_and_nobody_is_in_two_files() {
    let rows: String =
        (0..40).map(|number| format!("r{number:02},{number},p{}\n", number % 20)).collect();
    let study = Study::new(&format!("recording,label,patient\n{rows}"));
    for number in 0..40 {
        let values: Vec<f32> = (0..50).map(|at| (1000 * number + at) as f32).collect();
        study.record(&format!("r{number:02}.npy"), &values);
    }
    let mut options = study.options(5, 5);
    options.labels.by = Some("patient".to_owned());
    options.others = vec![(study.path("val.beton"), 0.3)];
    write_windows(&options, |_, _| ()).unwrap();
    let in_order = ["train.beton", "val.beton"].map(|name| windows(&study.path(name)));
    options.shuffle = Some(1);
    write_windows(&options, |_, _| ()).unwrap();
    let shuffled = ["train.beton", "val.beton"].map(|name| windows(&study.path(name)));
    let bytes = fs::read(study.path("train.beton")).unwrap();
    write_windows(&options, |_, _| ()).unwrap();
    assert_eq!(fs::read(study.path("train.beton")).unwrap(), bytes, "the same again");

    for (in_order, shuffled) in in_order.iter().zip(&shuffled) {
        assert_ne!(in_order, shuffled);
        let by_place = |windows: &[Window]| -> BTreeMap<(i64, i64), Window> {
            windows.iter().map(|window| ((window.0, window.1), window.clone())).collect()
        };
        assert_eq!(by_place(in_order), by_place(shuffled));
        let far = shuffled.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        assert!(far > shuffled.len() * 3 / 4, "neighbours are of different recordings: {far}");
    }
    let [train, val] =
        shuffled.map(|set| set.iter().map(|window| window.0 % 20).collect::<Vec<_>>());
    assert!(val.len() >= 20 && train.iter().all(|patient| !val.contains(patient)));
    assert_eq!(train.len() + val.len(), 400);
}

#[test]
fn bad_recordings_and_labels_are_named_and_nothing_is_written() {
    let refused = |labels: &str, prepare: &dyn Fn(&Study)| {
        let study = Study::new(labels);
        prepare(&study);
        study.refusal(&study.options(2, 1))
    };
    let one = |study: &Study| study.record("a.npy", &[1.0, 2.0, 3.0]);
    let table = "recording,label\na,1\n";
    assert!(refused(table, &|_| ()).contains("has no recordings"));
    assert_eq!(
        refused("recording,label\nb,1\n", &one),
        "labels.csv: has labels of \"b\", and there is no such recording in in"
    );
    assert_eq!(
        refused("recording,label\na,high\n", &one),
        "labels.csv, line 2: column \"label\": \"high\" is not a finite number"
    );
    assert!(refused("recording,label\na,1\na,2\n", &one).contains("has a second label"));
    assert!(refused("recording,score\na,1\n", &one).contains("has no column \"label\""));
    assert!(refused(table, &|study| study.record("a.npy", &[1.0])).contains("no window is for"));
    assert!(
        refused(table, &|study| study.npy("a.npy", "<f4", "(3,)", &[0; 11]))
            .contains("is it cut off?")
    );
    assert!(
        refused(table, &|study| study.npy("a.npy", ">f4", "(3,)", &[0; 12]))
            .contains("has values >f4")
    );
    assert!(
        refused(table, &|study| fs::write(study.path("in/a.npy"), "text").unwrap())
            .contains("is no .npy file")
    );
    // Far more than there is memory.
    assert!(
        refused(table, &|study| study.npy("a.npy", "<f4", "(2, 100000000000)", &[0; 8]))
            .contains("has fewer than its 200000000000 values: is it cut off?")
    );
    let pipe = |study: &Study| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, study.path("in/a.npy"), mode).unwrap();
    };
    assert!(refused(table, &pipe).contains("has a, which is not a regular file"));
    let both = |study: &Study| {
        study.record("a.npy", &[1.0; 4]);
        study.npy("b.npy", "<f4", "(2, 2)", &[0; 16]);
    };
    let error = refused("recording,label\na,1\nb,1\n", &both);
    assert!(error.contains("b.npy: has 2 channels, and the first recording 1"), "{error}");
    let study = Study::new("recording,label,t\na,1,0\na,5,3\na,2,0\n");
    one(&study);
    let mut options = WindowOptions { rate: Some(1.0), ..study.options(2, 1) };
    options.labels.time = Some(LabelTimes { column: "t".to_owned(), within: 3.0 });
    assert_eq!(
        study.refusal(&options),
        "labels.csv: recording \"a\" has two labels at 0 s, 1 and 2: keep one"
    );
    let study = Study::new(table);
    one(&study);
    fs::create_dir(study.path("train.beton.recordings.txt")).unwrap();
    assert!(study.refusal(&study.options(2, 1)).contains("is not a regular file"));
    let options = WindowOptions { others: vec![(study.path("v"), 1.0)], ..study.options(2, 1) };
    let error = write_windows(&options, |_, _| ()).unwrap_err();
    assert!(matches!(error, Error::Option(_)), "{error}");
}
