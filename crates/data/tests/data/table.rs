//! Tables as data sets.

use std::{
    collections::BTreeSet,
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use baton_data::{
    Beton,
    write::{Encoding, Error, JpegSelection, TableField, TableOptions, WrittenTable, write_table},
};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(name: &str, table: &str) -> (Self, TableOptions) {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join(name);
        fs::write(&from, table).unwrap();
        let options = TableOptions {
            from,
            fields: Vec::new(),
            to: folder.path().join("train.beton"),
            others: Vec::new(),
            by: None,
            stratify: None,
            encoding: Encoding {
                choice: JpegSelection::Fraction { share: 0.0, seed: 0 },
                jpeg_quality: 90,
                max_resolution: None,
                keep_jpeg: false,
            },
            threads: NonZeroUsize::new(3).unwrap(),
            skips_bad_rows: false,
        };
        (Self(folder), options)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn fields(texts: &[&str]) -> Vec<TableField> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn write(options: &TableOptions) -> Result<WrittenTable, Error> {
    write_table(options, |_, _| {})
}

fn refusal(options: &TableOptions) -> String {
    let refused = write(options).unwrap_err().to_string();
    let folder = options.from.parent().unwrap();
    assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "nothing is written");
    refused.replace(&format!("{}/", folder.display()), "")
}

fn ints(path: &Path, field: &str) -> Vec<i64> {
    let set = Beton::open(path).unwrap();
    let column = set.int_column(field).unwrap();
    (0..set.len()).map(|sample| set.int(&column, sample).unwrap()).collect()
}

fn array(set: &Beton, field: &str, sample: u64) -> Vec<u8> {
    let column = set.array_column(field).unwrap();
    let mut bytes = vec![0; column.value_bytes() as usize];
    set.array(&column, sample, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_kind_of_column_becomes_a_field() {
    let table = "\u{feff}id\tsequence\tscore\tkind\ta\tb\n7\tCAB\t 0.5\tdog\t1\t2.5\n-8\tB\t-1e3\t\"a \"\"cat\"\"\"\t3\t4\n";
    let (folder, mut options) = Folder::new("some.tsv", table);
    options.fields = fields(&[
        "id=int",
        "label=float:score",
        "kind=class",
        "raw=text:kind",
        "features=floats:b,a",
        "codes=letters(ABC,4):sequence",
        "hot=onehot(ABC,3):sequence",
    ]);
    let written = write(&options).unwrap();
    assert_eq!((written.files.len(), written.skipped), (1, 0));
    let path = folder.path("train.beton");
    let set = Beton::open(&path).unwrap();
    assert_eq!(ints(&path, "id"), [7, -8]);
    let column = set.float_column("label").unwrap();
    assert_eq!([0, 1].map(|sample| set.float(&column, sample).unwrap()), [0.5, -1000.0]);
    assert_eq!(ints(&path, "kind"), [1, 0]);
    assert_eq!(
        fs::read_to_string(folder.path("train.beton.kind.classes.txt")).unwrap(),
        "a \"cat\"\ndog\n"
    );
    let column = set.bytes_column("raw").unwrap();
    let mut scratch = Vec::new();
    assert_eq!(set.bytes(&column, 1, &mut scratch).unwrap(), b"a \"cat\"");
    let floats = |bytes: Vec<u8>| -> Vec<f32> {
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    assert_eq!(floats(array(&set, "features", 0)), [2.5, 1.0]);
    assert_eq!(array(&set, "codes", 0), [3, 1, 2, 0]);
    assert_eq!(array(&set, "codes", 1), [2, 0, 0, 0]);
    assert_eq!(floats(array(&set, "hot", 0)), [0., 1., 0., 0., 0., 1., 1., 0., 0.]);
}

/// The refusal of a table that has a row without its key.
fn refused_without_a_key(options: &TableOptions) -> String {
    let (_folder, mut other) = Folder::new("t.csv", "row,patient\n1, \n2,p\n");
    other.fields.clone_from(&options.fields);
    other.by.clone_from(&options.by);
    refusal(&other)
}

#[test]
fn rows_with_the_same_key_are_in_one_file_and_no_row_is_lost() {
    let rows: String = (0..600).map(|row| format!("{row},p{}\n", row % 60)).collect();
    let (folder, mut options) = Folder::new("rows.csv", &format!("row,patient\n{rows}"));
    options.fields = fields(&["row=int", "patient=class"]);
    options.by = Some("patient".to_owned());
    assert!(refused_without_a_key(&options).contains("line 2: column \"patient\" is empty"));
    // A class of each patient could not be in every file.
    options.fields.pop();
    options.others = vec![(folder.path("val.beton"), 0.2), (folder.path("test.beton"), 0.1)];
    let written = write(&options).unwrap();
    let files =
        ["train.beton", "val.beton", "test.beton"].map(|name| ints(&folder.path(name), "row"));
    let sizes: Vec<u64> = written.files.iter().map(|(_, file)| file.samples).collect();
    assert_eq!(sizes, files.each_ref().map(|rows| rows.len() as u64));
    let patients =
        files.each_ref().map(|rows| rows.iter().map(|row| row % 60).collect::<BTreeSet<_>>());
    assert_eq!(patients.iter().map(BTreeSet::len).sum::<usize>(), 60, "a patient is in two files");
    let mut all = files.concat();
    all.sort_unstable();
    assert_eq!(all, (0..600).collect::<Vec<i64>>());
    assert!((300..520).contains(&sizes[0]), "{sizes:?}");
}

#[test]
fn a_bad_value_is_named_by_line_and_column_and_nothing_is_written() {
    let refused = |table: &str, field: &str| {
        let (_folder, mut options) = Folder::new("t.csv", table);
        options.fields = fields(&[field]);
        refusal(&options)
    };
    assert_eq!(
        refused("a\n1\n1.5\n", "a=int"),
        "t.csv, line 3: column \"a\": \"1.5\" is not a whole number"
    );
    assert_eq!(
        refused("a\n1\nNaN\n", "a=float"),
        "t.csv, line 3: column \"a\": \"NaN\" is not a finite number"
    );
    assert_eq!(refused("a,b\n1,\n", "b=float"), "t.csv, line 2: column \"b\" is empty");
    assert_eq!(refused("a,b\n1,\n", "b=class"), "t.csv, line 2: column \"b\" is empty");
    assert_eq!(
        refused("a\nAX\n", "a=letters(AB,9)"),
        "t.csv, line 2: column \"a\" has 'X', which is not in the alphabet"
    );
    assert_eq!(
        refused("a\nABA\n", "a=onehot(AB,2)"),
        "t.csv, line 2: column \"a\" has 3 letters, and the field 2"
    );
    assert_eq!(
        refused("a,b\n1,2\n3\n", "a=int"),
        "t.csv: line 3 has 1 columns, and the first line 2"
    );
    // To the end of the file, all is one cell.
    for (table, line) in [
        ("a,b\n1,x\n2,\"y\n3,z\n4,w\n", 3),
        ("a,b\n1,x\n2,\"y", 3),
        ("a,\"b\n1,x\n", 1),
        ("a,b\n1,\"x\"\"\n2,y\n", 2),
    ] {
        let error = refused(table, "a=int");
        let expected = format!("t.csv: line {line} opens a quote that is never closed");
        assert!(error.starts_with(&expected), "{table:?}: {error}");
    }
    let error = refused("a,b\n\"1,x\n2,y\n3,\"z\n", "a=int");
    assert!(error.contains("is each of its quotes closed?"), "{error}");
    assert_eq!(refused("a,b\n1,2\n", "c=int"), "t.csv: has no column \"c\"; its columns: a, b");
    assert_eq!(refused("a,a\n1,2\n", "a=int"), "t.csv: has several columns \"a\"");
    assert_eq!(
        refused("a\n1e39\n", "a=floats"),
        "t.csv, line 2: column \"a\": \"1e39\" is not a finite number"
    );
    assert_eq!(refused("a\n", "a=int"), "t.csv: has no rows, only names of columns");
    assert_eq!(
        refused("a\n\"x\ny\"\n", "a=class"),
        "t.csv, line 2: column \"a\": a class has a line break"
    );
    let wide = (0..100_000).map(|number| format!("c{number}")).collect::<Vec<_>>().join(",");
    let error = refused(&(wide + "\n"), "a=int");
    assert!(error.len() < 200 && error.ends_with("c9, …"), "{} bytes", error.len());
}

#[test]
fn lines_are_counted_however_they_end() {
    for (table, line) in [
        ("n,x|1,1|2,2|zz,3|", 4),
        ("n,x|zz,1|", 2),
        // Empty lines, and a cell of two lines.
        ("n,x|1,1||||zz,3|", 6),
        ("n,\"x|y\"|1,\"a|b\"|zz,3|", 5),
    ] {
        for end in ["\n", "\r\n", "\r"] {
            let (_folder, mut options) = Folder::new("t.csv", &table.replace('|', end));
            options.fields = fields(&["n=int"]);
            let refused = refusal(&options);
            assert!(refused.contains(&format!("line {line}: ")), "{table:?} {end:?}: {refused}");
        }
    }
    let (_folder, mut options) = Folder::new("t.csv", "n,x\r\n1,1\nzz,3\n");
    options.fields = fields(&["n=int"]);
    assert!(refusal(&options).contains("line 3: "), "mixed");
}

#[test]
fn bad_rows_are_left_out_on_request_counted_and_listed() {
    let (folder, mut options) = Folder::new("t.csv", "a\n1\nx\n3\n\"\"\n");
    options.fields = fields(&["a=int"]);
    options.skips_bad_rows = true;
    let written = write(&options).unwrap();
    assert_eq!(ints(&folder.path("train.beton"), "a"), [1, 3]);
    assert_eq!((written.skipped, written.first_skipped.len()), (2, 2));
    assert!(
        written.first_skipped[0]
            .ends_with("t.csv, line 3: column \"a\": \"x\" is not a whole number")
    );
    fs::write(&options.from, "a\nx\n").unwrap();
    let refused = write(&options).unwrap_err().to_string();
    assert!(refused.contains("all rows are bad, the first: "), "{refused}");
}

/// A table with a column of images and one of arrays, of rows that number from 0.
fn table_of_files(rows: u32) -> (Folder, TableOptions) {
    let mut table = "picture,signal,label\n".to_owned();
    (0..rows).for_each(|row| table += &format!("p/{row}.png,{row}.npy,{}\n", row % 3));
    let (folder, mut options) = Folder::new("t.csv", &table);
    fs::create_dir(folder.path("p")).unwrap();
    for row in 0..rows {
        let pixels = image::RgbImage::from_pixel(4, 3, image::Rgb([row as u8, 1, 2]));
        pixels.save(folder.path(&format!("p/{row}.png"))).unwrap();
        let values = [row as f32, 0.5, -1.0, 2.0];
        fs::write(folder.path(&format!("{row}.npy")), npy("(2, 2)", &values)).unwrap();
    }
    options.fields = fields(&["image=image:picture", "input=array(2,2):signal", "row=int:label"]);
    (folder, options)
}

fn npy(shape: &str, values: &[f32]) -> Vec<u8> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(118_u16.to_le_bytes());
    bytes.extend(format!("{header:<117}\n").into_bytes());
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    bytes
}

#[test]
fn images_and_arrays_are_read_from_the_files_that_a_table_names() {
    // More rows than all threads get at once.
    let (folder, mut options) = table_of_files(250);
    write(&options).unwrap();
    let path = folder.path("train.beton");
    let (set, opened) = (Beton::open(&path).unwrap(), fs::read(&path).unwrap());
    let column = set.image_column("image").unwrap();
    for row in [0, 1, 63, 64, 191, 192, 249] {
        let mut scratch = Vec::new();
        let image = set.image(&column, row, &mut scratch).unwrap();
        assert_eq!((image.width, image.height, image.bytes[0]), (4, 3, row as u8));
        assert_eq!(array(&set, "input", row)[..4], (row as f32).to_le_bytes());
    }
    options.threads = NonZeroUsize::MIN;
    write(&options).unwrap();
    assert!(fs::read(&path).unwrap() == opened, "one thread writes other bytes");
}

#[test]
fn a_file_that_cannot_be_used_is_named_by_line_and_column() {
    let refused = |change: &dyn Fn(&Folder)| {
        let (folder, options) = table_of_files(4);
        change(&folder);
        let refused = write(&options).unwrap_err().to_string();
        assert!(!options.to.exists());
        refused.replace(&format!("{}/", folder.path("").display()).replace("//", "/"), "")
    };
    assert_eq!(
        refused(&|folder| fs::remove_file(folder.path("p/2.png")).unwrap()),
        "t.csv, line 4: column \"picture\": p/2.png is not a file"
    );
    assert_eq!(
        refused(&|folder| fs::write(folder.path("p/2.png"), "text").unwrap()),
        "t.csv, line 4: column \"picture\": p/2.png is not an image of a known format"
    );
    let with_array =
        |bytes: Vec<u8>| refused(&|folder| fs::write(folder.path("1.npy"), &bytes).unwrap());
    let start = "t.csv, line 3: column \"signal\": 1.npy ";
    assert_eq!(
        with_array(npy("(4,)", &[0.0; 4])),
        format!("{start}has the shape (1, 4) in place of (2, 2)")
    );
    assert_eq!(
        refused(&|folder| {
            let huge = npy("(2, 5000000000)", &[]);
            fs::write(folder.path("1.npy"), &huge).unwrap();
            let file = fs::File::options().write(true).open(folder.path("1.npy")).unwrap();
            file.set_len(huge.len() as u64 + 40_000_000_000).unwrap();
        }),
        format!("{start}has the shape (2, 5000000000) in place of (2, 2)")
    );
    assert_eq!(
        with_array(npy("(2, 2)", &[0.0, 1.0, f32::NAN, 2.0])),
        format!("{start}has NaN at position 2")
    );
    assert_eq!(
        with_array(npy("(2, 2)", &[0.0; 3])),
        format!("{start}has fewer than its 4 values: is it cut off?")
    );
}

#[test]
fn sounds_become_spectrograms_of_one_channel_at_one_rate() {
    let (folder, mut options) = Folder::new("t.csv", "sound\n0.wav\n1.wav\n");
    options.fields = fields(&["input=mel(8000,64,32,5,4):sound"]);
    let wav = |name: &str, rate: u32, channels: u16, samples: &[f32]| {
        let spec = hound::WavSpec {
            channels,
            sample_rate: rate,
            bits_per_sample: 32,
            sample_format: hound::SampleFormat::Float,
        };
        let mut file = hound::WavWriter::create(folder.path(name), spec).unwrap();
        samples.iter().for_each(|sample| file.write_sample(*sample).unwrap());
        file.finalize().unwrap();
    };
    let tone: Vec<f32> = (0..100).map(|at| (at as f32 * 0.9).sin()).collect();
    wav("0.wav", 8000, 1, &tone);
    // The mean of the channels is the same tone.
    wav(
        "1.wav",
        8000,
        2,
        &tone.iter().flat_map(|value| [1.5 * value, 0.5 * value]).collect::<Vec<_>>(),
    );
    write(&options).unwrap();
    let set = Beton::open(folder.path("train.beton")).unwrap();
    assert_eq!(array(&set, "input", 0).len(), 5 * 4 * 4);
    let values = |sample| -> Vec<f32> {
        let bytes = array(&set, "input", sample);
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let differences = values(0).into_iter().zip(values(1)).map(|(a, b)| (a - b).abs());
    assert!(differences.fold(0.0, f32::max) < 1e-2);
    // 0.9 · 8000 / 2π = 1146 Hz is in the third of five bands.
    let frame: Vec<f32> = values(0).chunks(4).map(|band| band[1]).collect();
    assert!(frame.iter().all(|level| *level <= frame[2]), "{frame:?}");

    let refused = |options: &TableOptions| write(options).unwrap_err().to_string();
    wav("1.wav", 44100, 1, &tone);
    assert!(refused(&options).contains("1.wav has 44100 samples per second in place of 8000"));
    wav("1.wav", 8000, 1, &[0.0; 128]);
    assert!(refused(&options).contains("1.wav has 128 samples, and the field at most 127: cut it"));
    wav("1.wav", 8000, 1, &[f32::NAN; 8]);
    assert!(refused(&options).contains("1.wav has NaN at position 0"));
}

#[test]
fn rows_whose_files_cannot_be_used_are_left_out_on_request() {
    let (folder, mut options) = table_of_files(9);
    options.fields.extend(fields(&["kind=class:label"]));
    options.skips_bad_rows = true;
    fs::write(folder.path("p/4.png"), "text").unwrap();
    fs::remove_file(folder.path("5.npy")).unwrap();
    let written = write(&options).unwrap();
    assert_eq!(written.skipped, 2);
    assert!(written.first_skipped[0].contains("line 7"), "known before files are read");
    // Two faults in one row count once.
    fs::write(
        &options.from,
        fs::read_to_string(&options.from).unwrap().replace("4.npy,1", "4.npy,x"),
    )
    .unwrap();
    options.fields.swap(0, 2);
    assert_eq!(write(&options).unwrap().skipped, 2);
    options.fields.swap(0, 2);
    assert_eq!(write(&options).unwrap().skipped, 2);
    fs::write(
        &options.from,
        fs::read_to_string(&options.from).unwrap().replace("4.npy,x", "4.npy,1"),
    )
    .unwrap();
    assert!(written.first_skipped[1].contains("line 6"));
    assert_eq!(ints(&folder.path("train.beton"), "row"), [0, 1, 2, 0, 0, 1, 2]);
    for row in [1, 7] {
        fs::write(folder.path(&format!("p/{row}.png")), "text").unwrap();
    }
    let refused = write(&options).unwrap_err().to_string();
    assert!(refused.contains("all rows of class \"1\" of field \"kind\" are bad"), "{refused}");
}

#[test]
fn a_stratified_split_gives_every_file_its_share_of_every_class() {
    let rows: String = (0..400).map(|row| format!("{row},{}\n", u8::from(row % 40 == 0))).collect();
    let (folder, mut options) = Folder::new("t.csv", &format!("row,rare\n{rows}"));
    options.fields = fields(&["row=int", "label=class:rare"]);
    options.others = vec![(folder.path("val.beton"), 0.2)];
    options.stratify = Some("label".to_owned());
    write(&options).unwrap();
    let [train, val] = ["train.beton", "val.beton"].map(|name| folder.path(name));
    let count = |path: &Path| ints(path, "label").iter().filter(|label| **label == 1).count();
    assert_eq!([count(&train), count(&val)], [8, 2]);
    assert_eq!(ints(&val, "row").len(), 80);
    let mut all = [ints(&train, "row"), ints(&val, "row")].concat();
    all.sort_unstable();
    assert_eq!(all, (0..400).collect::<Vec<i64>>());

    options.stratify = Some("row".to_owned());
    assert!(write(&options).unwrap_err().to_string().contains("\"row\" is no class field"));
    options.stratify = Some("label".to_owned());
    options.by = Some("row".to_owned());
    assert!(
        write(&options).unwrap_err().to_string().contains("cannot be divided by their classes")
    );
}

#[test]
fn a_file_without_rows_and_a_class_that_training_would_not_see_are_refused() {
    let (folder, mut options) = Folder::new("t.csv", "a,who\nx,1\nx,2\ny,3\n");
    options.fields = fields(&["a=class"]);
    options.others = vec![(folder.path("val.beton"), 0.001)];
    assert!(refusal(&options).contains("no row is for"));
    // With a share of almost all, class y of one row goes to it sooner or later.
    let shares = [0.5, 0.6, 0.7, 0.8, 0.9];
    let missing = shares.map(|share| {
        options.others[0].1 = share;
        write(&options).err().map(|error| error.to_string()).unwrap_or_default()
    });
    assert!(missing.iter().any(|error| error.contains("has no row in")), "{missing:?}");
    options.others[0].1 = 1.5;
    assert!(write(&options).unwrap_err().to_string().contains("above 0, and below 1"));
    options.others = vec![(options.to.clone(), 0.5)];
    assert!(write(&options).unwrap_err().to_string().contains("would be written twice"));
    let again = folder.path("../").join(folder.path("").file_name().unwrap()).join("train.beton");
    options.others = vec![(again, 0.5)];
    assert!(write(&options).unwrap_err().to_string().contains("would be written twice"));
    let source = options.from.clone();
    options.from = folder.path("train.beton.a.classes.txt");
    fs::copy(&source, &options.from).unwrap();
    options.others = Vec::new();
    assert!(write(&options).unwrap_err().to_string().contains("is read, and would be replaced"));
    options.from = source;
    options.others = vec![(folder.path("train.beton.a.classes.txt"), 0.5)];
    assert!(write(&options).unwrap_err().to_string().contains("would be written twice"));
}

#[test]
fn quotes_and_line_breaks_in_cells_are_kept_to_the_last_row() {
    let (folder, mut options) = Folder::new("t.csv", "a,b\n1,\"x \"\"y\"\"\"\n2,\"z\nw\"");
    options.fields = fields(&["a=int", "b=text"]);
    write(&options).unwrap();
    assert_eq!(ints(&folder.path("train.beton"), "a"), [1, 2]);
}

#[test]
fn a_list_of_classes_that_cannot_be_written_leaves_the_older_file() {
    let (folder, mut options) = Folder::new("t.csv", "a\nx\ny\n");
    options.fields = fields(&["a=class"]);
    write(&options).unwrap();
    let before = fs::read(&options.to).unwrap();
    options.fields = fields(&["a=text"]);
    assert_eq!(write(&options).unwrap().other_classes, [folder.path("train.beton.a.classes.txt")]);
    options.fields = fields(&["a=class"]);
    assert!(write(&options).unwrap().other_classes.is_empty());
    fs::remove_file(folder.path("train.beton.a.classes.txt")).unwrap();
    fs::create_dir(folder.path("train.beton.a.classes.txt")).unwrap();
    fs::write(&options.from, "a\nx\n").unwrap();
    assert!(write(&options).unwrap_err().to_string().contains("is not a regular file"));
    assert_eq!(fs::read(&options.to).unwrap(), before);
}

#[test]
fn a_target_that_can_only_be_a_folder_is_refused_before_another_is_replaced() {
    let (folder, mut options) = Folder::new("t.csv", "a\n1\n2\n3\n4\n5\n6\n7\n8\n");
    options.fields = fields(&["a=int"]);
    options.others = vec![(folder.path("val.beton/"), 0.5)];
    assert!(
        refusal(&options).ends_with("val.beton/ does not name a file: give one, e.g. train.beton")
    );
}

#[test]
fn a_table_that_can_be_read_only_once_is_refused() {
    let (folder, mut options) = Folder::new("t.csv", "a\n1\n");
    options.fields = fields(&["a=int"]);
    options.from = folder.path("");
    let error = write(&options).unwrap_err().to_string();
    assert!(error.contains("is not a regular file; it is read more than once"), "{error}");
}

#[test]
fn a_field_that_is_no_kind_is_refused_with_all_kinds() {
    let refused = |text: &str| text.parse::<TableField>().unwrap_err();
    assert!(refused("label").starts_with("write NAME=KIND"));
    assert!(refused("label=double").contains("\"double\" is no kind: take int, float, class"));
    assert!(refused("label=letters(AAB,3)").contains("'A' is there twice"));
    assert!(refused("label=letters(AB,0)").contains("LENGTH is a whole number"));
    assert!(refused("a/b=class").contains("has no /"));
    assert!(refused("label=letters(,3)").contains("1 to 255 letters"));
    assert!(refused("label=array(x,3)").contains("CHANNELS is a whole number"));
    let (_folder, mut options) = Folder::new("t.csv", "a,b\n1,2\n");
    options.fields = fields(&["a=array(2,700000)", "b=array(2,700000)"]);
    assert!(write(&options).unwrap_err().to_string().contains("need 11200000 bytes, and a page"));
    for huge in [
        "a=array(9999999999,9999999999)",
        "a=onehot(AB,9999999999)",
        "a=mel(8,8,8,4000000000,4000000000)",
    ] {
        options.fields = fields(&[huge]);
        assert!(write(&options).unwrap_err().to_string().contains("and a page has"), "{huge}");
    }
    assert!(refused("label=vowels(AB,3)").contains("is no kind"));
    assert_eq!(refused("label=int:a,b"), "only floats takes several columns");
}

/// The table that `fixtures/table.py` wrote.
fn parquet(texts: &[&str]) -> (Folder, TableOptions) {
    let (folder, mut options) = Folder::new("t.parquet", "");
    fs::write(&options.from, include_bytes!("../fixtures/table.parquet")).unwrap();
    options.fields = fields(texts);
    (folder, options)
}

#[test]
fn every_kind_of_column_of_a_parquet_file_becomes_a_field() {
    let (folder, mut options) = parquet(&[
        "id=int",
        "kind=class",
        "score=float",
        "half=float",
        "big=int",
        "flag=class",
        "pair=floats:score,half",
        "wave=array(2,2)",
        "matrix=array(2,3)",
        "sound=array(1,2):audio.array",
        "raw=text:image.path",
        "image=image:image.bytes",
    ]);
    options.skips_bad_rows = true;
    let written = write(&options).unwrap();
    let skipped: Vec<String> = written
        .first_skipped
        .iter()
        .map(|reason| reason.replace(&format!("{}/", folder.0.path().display()), ""))
        .collect();
    assert_eq!(
        skipped,
        [
            "t.parquet, row 4: column \"image.bytes\" is empty",
            "t.parquet, row 5: column \"flag\" is empty",
            "t.parquet, row 6: column \"wave\" has NaN at position 1",
        ]
    );
    let path = folder.path("train.beton");
    let set = Beton::open(&path).unwrap();
    let rows: Vec<i64> = (0..70).filter(|row| ![3, 4, 5].contains(row)).collect();
    let of_rows = |value: fn(i64) -> i64| rows.iter().map(|row| value(*row)).collect::<Vec<_>>();
    assert_eq!(ints(&path, "id"), of_rows(|row| 10 * row - 5));
    assert_eq!(ints(&path, "kind"), of_rows(|row| 1 - row % 2));
    assert_eq!(ints(&path, "big"), of_rows(|row| 4_294_967_295 - row));
    assert_eq!(ints(&path, "flag"), of_rows(|row| 1 - row % 2));
    let score = set.float_column("score").unwrap();
    let half = set.float_column("half").unwrap();
    let raw = set.bytes_column("raw").unwrap();
    let image = set.image_column("image").unwrap();
    let floats = |field: &str, sample: u64| -> Vec<f32> {
        let bytes = array(&set, field, sample);
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    for (sample, row) in (0..).zip(&rows) {
        let (name, row) = (format!("{row}.png"), *row as f32);
        assert_eq!(set.float(&score, sample).unwrap(), f64::from(row / 10.0), "{name}");
        assert_eq!(set.float(&half, sample).unwrap(), f64::from(row / 4.0));
        assert_eq!(floats("pair", sample), [row / 10.0, row / 4.0]);
        assert_eq!(floats("wave", sample), [row, row + 0.5, row + 1.0, row + 1.5]);
        assert_eq!(floats("matrix", sample), [row, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(floats("sound", sample), [row / 2.0, -1.0]);
        assert_eq!(set.bytes(&raw, sample, &mut Vec::new()).unwrap(), name.as_bytes());
        let mut scratch = Vec::new();
        let image = set.image(&image, sample, &mut scratch).unwrap();
        assert_eq!((image.width, image.height), (4, 2));
    }
}

#[test]
fn what_a_parquet_file_cannot_give_is_refused_by_name() {
    let columns = "id, kind, score, half, big, long, flag, wave, matrix, image.bytes, …";
    for (field, expected) in [
        ("day=text", ": column \"day\" has dates or times: convert it to numbers or to texts"),
        ("price=float", ": column \"price\" has decimals: convert it to floats"),
        (
            "words=text",
            ": column \"words\" has lists, and only lists of numbers, and lists of these, can be used",
        ),
        (
            "deep=array(1,1)",
            ": column \"deep\" has lists, and only lists of numbers, and lists of these, can be used",
        ),
        ("id=int:image", &format!(": has no column \"image\"; its columns: {columns}")),
        ("long=int", ", row 1: column \"long\": \"18446744073709551615\" is not a whole number"),
        ("wave=float", ", row 1: column \"wave\" has lists of numbers, which only array takes"),
        ("image=class:image.bytes", ", row 1: column \"image.bytes\" has bytes that are no text"),
        ("half=int", ", row 2: column \"half\": \"0.25\" is not a whole number"),
        ("first=array(1,3)", ", row 1: column \"first\" has NaN at position 0"),
        ("first=array(1,2)", ", row 1: column \"first\" has a list of 3 numbers in place of 2"),
        ("none=array(1,1)", ", row 1: column \"none\" has a list of 0 numbers in place of 1"),
        ("matrix=array(3,2)", ", row 1: column \"matrix\" has 2 lists in place of 3"),
        ("ragged=array(2,3)", ", row 1: column \"ragged\" has a list of 2 numbers in place of 3"),
        ("turned=array(2,3)", ", row 1: column \"turned\" has 3 lists in place of 2"),
        ("ends=array(1,2)", ", row 1: column \"ends\" has 2 lists in place of 1"),
        ("starts=array(2,1)", ", row 1: column \"starts\" has a list of 0 numbers in place of 1"),
    ] {
        let (_folder, options) = parquet(&[field]);
        assert_eq!(refusal(&options), format!("t.parquet{expected}"), "{field}");
    }
}

/// Which file a row is in depends on its columns, and not on those that are asked for.
#[test]
fn rows_of_a_parquet_file_are_split_by_all_their_columns() {
    let ids = |texts: &[&str], by: Option<&str>, stratify: Option<&str>| {
        let (folder, mut options) = parquet(texts);
        // The hash of one of the two kinds is below this share.
        let share = if by.is_some() { 0.75 } else { 0.5 };
        options.others = vec![(folder.path("val.beton"), share)];
        options.by = by.map(str::to_owned);
        options.stratify = stratify.map(str::to_owned);
        write(&options).unwrap();
        ["train.beton", "val.beton"].map(|name| ints(&folder.path(name), "id"))
    };
    let whole = ids(&["id=int"], None, None);
    assert_eq!(whole.concat().len(), 70);
    assert!(whole.iter().all(|ids| ids.len() > 20), "{whole:?}");
    assert_eq!(ids(&["big=int", "id=int", "big2=int:big"], None, None), whole);
    let even: Vec<i64> = (0..70).filter(|row| row % 2 == 0).map(|row| 10 * row - 5).collect();
    let sets = ids(&["id=int"], Some("kind"), None);
    assert!(sets.contains(&even), "{sets:?}");
    let sets = ids(&["id=int", "kind=class"], None, Some("kind"));
    let halves = sets.map(|ids| (ids.len(), ids.iter().filter(|id| even.contains(id)).count()));
    assert!(halves.iter().all(|(all, even)| (34..=36).contains(all) && (17..=18).contains(even)));
}

#[test]
fn lists_may_end_where_pages_do() {
    let (folder, mut options) = Folder::new("t.parquet", "");
    fs::write(&options.from, include_bytes!("../fixtures/pairs.parquet")).unwrap();
    options.fields = fields(&["id=int", "pair=array(1,2)"]);
    write(&options).unwrap();
    let path = folder.path("train.beton");
    assert_eq!(ints(&path, "id"), [0, 1, 2, 3, 4, 5]);
    let set = Beton::open(&path).unwrap();
    for sample in 0..6 {
        let pair = [sample as f32, sample as f32 + 0.5].map(f32::to_le_bytes).concat();
        assert_eq!(array(&set, "pair", sample), pair);
    }
}

#[test]
fn a_text_that_begins_as_a_parquet_file_does_is_a_text() {
    let (folder, mut options) = Folder::new("t.csv", "PAR1,PAR2\n7,8\n");
    options.fields = fields(&["light=int:PAR1"]);
    write(&options).unwrap();
    assert_eq!(ints(&folder.path("train.beton"), "light"), [7]);
}

/// Formats without checksums do not show every damage: only panics, and errors without the name of the file, are looked for.
#[test]
fn a_damaged_parquet_file_ends_no_process() {
    let whole = include_bytes!("../fixtures/table.parquet");
    let texts =
        ["id=int", "kind=class", "wave=array(2,2)", "image=image:image.bytes", "half=float"];
    let (folder, mut options) = parquet(&texts);
    options.skips_bad_rows = true;
    for cut in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&options.from, &whole[..cut]).unwrap();
        let refused = write(&options).unwrap_err().to_string();
        assert!(refused.contains("cannot be read as Parquet"), "{refused}");
    }
    let mut refused = 0;
    for position in (4..whole.len()).step_by(61) {
        let mut damaged = whole.to_vec();
        damaged[position] ^= 1 << (position % 8);
        fs::write(&options.from, &damaged).unwrap();
        if let Err(error) = write(&options) {
            assert!(error.to_string().contains("t.parquet"), "{error}");
            refused += 1;
        }
        let _ = fs::remove_file(folder.path("train.beton"));
    }
    assert!(refused > 50, "{refused}");
}
