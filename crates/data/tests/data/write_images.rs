//! Writing image files to data sets.

use std::{
    fs::{self, File},
    num::NonZeroUsize,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use baton_data::{
    Decoder, Mode,
    area::{AreaResizer, Pixels},
    write::{
        BadImage, Encoding, Error, JpegSelection, OnBadImage, Options, Source, Summary, WriteEvent,
        shard_path, write_images,
    },
};
use image::{DynamicImage, ImageFormat, RgbImage};
use tempfile::TempDir;

use crate::{fixtures::folder, sketch::Opened};

const PAGE: u32 = 64 << 10;

/// A temporary folder for sources and targets.
struct Workspace(TempDir);

/// Messages about bad images and kept files.
type Messages = Vec<String>;

impl Workspace {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn picture(&self, name: &str, width: u32, height: u32) {
        let pixels = picture(width, height);
        let path = self.put(name, b"");
        match path.extension().unwrap() == "jpg" {
            true => fs::write(path, jpeg(pixels)).unwrap(),
            false => pixels.save(path).unwrap(),
        }
    }

    /// `count` images of two classes, some JPEG.
    fn folder(&self, count: u32) -> Source {
        for number in 0..count {
            let (class, extension) = (number % 2, ["png", "jpg", "bmp"][number as usize % 3]);
            let name = format!("images/class-{class}/{number:03}.{extension}");
            self.picture(&name, 20 + 7 * number % 50, 15 + 5 * number % 60);
        }
        Source::open(self.path("images")).unwrap()
    }

    fn write(&self, source: &Source, options: &Options) -> (Result<Summary, Error>, Messages) {
        let mut messages = Vec::new();
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let written =
            write_images(source, &self.path("set.beton"), options, &mut |event| match event {
                WriteEvent::Bad { path, reason } => {
                    messages.push(format!("{} {reason}", name(path)))
                }
                WriteEvent::Kept { path, samples, .. } => {
                    messages.push(format!("{} {samples}", name(path)))
                }
                WriteEvent::Stored { .. } | WriteEvent::Wrote { .. } => {}
            });
        (written, messages)
    }

    fn written(&self, source: &Source, options: &Options) -> Summary {
        self.write(source, options).0.unwrap()
    }

    fn refused(&self, source: &Source, options: &Options) -> String {
        self.write(source, options).0.unwrap_err().to_string()
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.path("set.beton")).unwrap()
    }

    fn open(&self) -> Opened {
        Opened::new(&self.path("set.beton"))
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A smooth image, so that JPEG changes it only slightly.
fn picture(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        image::Rgb([(2 * x) as u8, (3 * y) as u8, (x + y) as u8])
    })
}

/// Encodes an image with the writer, the only available encoder.
fn jpeg(pixels: RgbImage) -> Vec<u8> {
    let workspace = Workspace::new();
    let path = workspace.put("images/a/0.png", b"");
    pixels.save(path).unwrap();
    workspace.written(&Source::open(workspace.path("images")).unwrap(), &options(share(1.0)));
    workspace.open().image(0).bytes.to_vec()
}

fn share(share: f64) -> JpegSelection {
    JpegSelection::Fraction { share, seed: 1 }
}

fn options(choice: JpegSelection) -> Options {
    Options {
        encoding: Encoding { choice, jpeg_quality: 90, max_resolution: None, keep_jpeg: false },
        image_field: "image".to_owned(),
        label_field: "label".to_owned(),
        page_bytes: PAGE,
        threads: NonZeroUsize::new(3).unwrap(),
        shards: None,
        others: Vec::new(),
        resume: false,
        on_bad_image: OnBadImage::Fail,
    }
}

#[test]
fn class_folders_are_read_like_in_torchvision() {
    let workspace = Workspace::new();
    for name in ["b/2.jpg", "b/10.JPG", "B/x/1.png", "B/x-y/1.png", "B/z.Tiff", "B/x/a/0.gif"] {
        workspace.put(&format!("set/{name}"), b"");
    }
    workspace.put("set/B/notes.txt", b"");
    workspace.put("set/README.md", b"");
    let source = Source::open(workspace.path("set")).unwrap();
    let names: Vec<_> = source
        .items
        .iter()
        .map(|item| {
            (item.path.strip_prefix(workspace.path("set")).unwrap().to_str().unwrap(), item.label)
        })
        .collect();
    let expected = [
        ("B/z.Tiff", 0),
        ("B/x/1.png", 0),
        ("B/x-y/1.png", 0),
        ("B/x/a/0.gif", 0),
        ("b/10.JPG", 1),
        ("b/2.jpg", 1),
    ];
    // "x" before "x-y" before "x/a": folders are compared as whole texts.
    assert_eq!(names, expected);
    assert_eq!(source.classes, Some(vec!["B".to_owned(), "b".to_owned()]));
}

#[test]
fn folders_without_classes_or_images_are_refused() {
    let workspace = Workspace::new();
    let refused = |name| Source::open(workspace.path(name)).unwrap_err().to_string();
    workspace.put("flat/1.jpg", b"");
    assert!(refused("flat").contains("there is no class folder in it"));
    workspace.put("empty/cat/notes.txt", b"");
    assert!(refused("empty").contains("empty/cat: this class has no image (bmp, gif, "));
    assert!(refused("nowhere").starts_with("cannot open "));
}

#[test]
fn lists_have_a_path_and_a_label_per_line() {
    let workspace = Workspace::new();
    let list = workspace
        .put("lists/a.tsv", b"path\tlabel\nx.png\t3\r\n\n/abs/a,b.png\t-1\ny, z.png , 5\n");
    let source = Source::open(&list).unwrap();
    let items: Vec<_> = source.items.iter().map(|item| (item.path.clone(), item.label)).collect();
    let expected = [
        (workspace.path("lists/x.png"), 3),
        (PathBuf::from("/abs/a,b.png"), -1),
        (workspace.path("lists/y, z.png"), 5),
    ];
    assert_eq!(items, expected);
    assert_eq!(source.classes, None);
}

#[test]
fn a_byte_order_mark_is_not_part_of_the_first_line() {
    let workspace = Workspace::new();
    for text in ["\u{feff}path,label\nx.png,3\n", "\u{feff}x.png,3\n", "\u{feff}\nx.png,3\n"] {
        let source = Source::open(workspace.put("list.csv", text.as_bytes())).unwrap();
        let items: Vec<_> = source.items.iter().map(|item| (&item.path, item.label)).collect();
        assert_eq!(items, [(&workspace.path("x.png"), 3)], "{text:?}");
    }
}

#[test]
fn invalid_lines_of_a_list_are_reported_with_their_number() {
    let workspace = Workspace::new();
    let refused = |text: &str| {
        let list = workspace.put("list.csv", text.as_bytes());
        Source::open(list).unwrap_err().to_string()
    };
    assert!(
        refused("a.png,1\nb.png\n")
            .ends_with("list.csv, line 2: no TAB and no comma: give `path<TAB>label`")
    );
    assert!(refused("a.png,1\n\nb.png,cat\n").ends_with("line 3: label \"cat\" is not an integer"));
    assert!(refused(",1\n").ends_with("line 1: no path before the label"));
    assert!(refused("\n").contains("the list has no images"));
    assert!(refused("a.png,1\n\0\n").contains("line 2: not UTF-8 text: give a folder"));
}

#[test]
fn a_large_file_that_is_no_list_is_refused_without_being_read() {
    let workspace = Workspace::new();
    let path = workspace.put("images.zip", b"");
    // More than the memory of a machine, but no blocks of the disk.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let error = Source::open(path).unwrap_err().to_string();
    assert!(error.contains("images.zip, line 1: not UTF-8 text"), "{error}");
}

/// An archive of files with these names and bytes.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn archives_of_samples_have_the_images_of_a_folder() {
    let workspace = Workspace::new();
    let folder = workspace.folder(12);
    workspace.written(&folder, &options(share(0.5)));
    let expected: Vec<_> =
        (0..12).map(|sample| workspace.open().image(sample).bytes.to_vec()).collect();

    let long = "a".repeat(120);
    for (number, items) in folder.items.chunks(5).enumerate() {
        let mut files = vec![("about.txt".to_owned(), b"not of a sample".to_vec())];
        for (sample, item) in items.iter().enumerate() {
            let kind = item.path.extension().unwrap().to_str().unwrap();
            let image = (format!("{long}/{sample}.{kind}"), fs::read(&item.path).unwrap());
            let label = (format!("{long}/{sample}.cls"), format!("{}\n", item.label).into_bytes());
            // In any order.
            files.extend(if sample % 2 == 0 { [image, label] } else { [label, image] });
            files.push((format!("{long}/{sample}.json"), b"{}".to_vec()));
        }
        let files: Vec<_> =
            files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        workspace.put(&format!("shards/{number}.tar"), &archive(&files));
    }
    let source = Source::open(workspace.path("shards")).unwrap();
    assert_eq!((source.items.len(), &source.classes), (12, &None));
    workspace.written(&source, &options(share(0.5)));
    let set = workspace.open();
    for (sample, (item, expected)) in (0..).zip(folder.items.iter().zip(expected)) {
        assert_eq!(set.label(sample), item.label);
        assert!(set.image(sample).bytes == expected, "image {sample}");
    }

    let first = Source::open(workspace.path("shards/0.tar")).unwrap();
    assert_eq!(first.items, source.items[..5]);
}

#[test]
fn an_archive_that_changes_while_it_is_read_gives_no_data_set() {
    let workspace = Workspace::new();
    workspace.picture("0.png", 20, 20);
    let image = fs::read(workspace.path("0.png")).unwrap();
    let of = |label: &[u8]| archive(&[("0.png", &image), ("0.cls", label)]);
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let put = |name: &str, bytes: &[u8]| {
        let path = workspace.put(name, bytes);
        File::options().append(true).open(&path).unwrap().set_modified(then).unwrap();
        path
    };
    let other = || workspace.put("b.tar", &of(b"2"));
    let replaced = || fs::rename(other(), workspace.path("a.tar")).unwrap();
    let written = || drop(workspace.put("a.tar", &of(b"2")));
    let cut = || drop(put("a.tar", &of(b"1")[..100]));
    let removed = || fs::remove_file(workspace.path("a.tar")).unwrap();
    let has_changed = "a.tar: has changed while it was read";
    let changes: [(&dyn Fn(), &str); 4] = [
        (&replaced, has_changed),
        (&written, has_changed),
        (&cut, has_changed),
        (&removed, "No such file"),
    ];
    for (change, expected) in changes {
        let path = put("a.tar", &of(b"1"));
        let source = Source::open(&path).unwrap();
        change();
        for on_bad_image in [OnBadImage::Fail, OnBadImage::Skip] {
            let options = Options { on_bad_image, ..options(share(0.5)) };
            let error = workspace.write(&source, &options).0.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(!workspace.path("set.beton").exists());
    }
}

#[test]
fn archives_with_a_gap_are_refused_with_the_name_of_the_sample() {
    let workspace = Workspace::new();
    let refused = |bytes: &[u8]| {
        let path = workspace.put("a.tar", bytes);
        let error = Source::open(&path).unwrap_err().to_string();
        error.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned()
    };
    let (image, label) = (("x/1.jpg", &[0; 700][..]), ("x/1.cls", &b"3"[..]));
    assert_eq!(refused(&archive(&[image])), "sample x/1 has no label: put one into x/1.cls");
    assert!(refused(&archive(&[label])).starts_with("sample x/1 has a label and no image (bmp, "));
    assert_eq!(
        refused(&archive(&[image, ("x/1.cls", b"cat")])),
        "x/1.cls: the label \"cat\" is not a whole number"
    );
    assert!(
        refused(&archive(&[image, label, ("x/1.png", b"")]))
            .contains("x/1.png: its sample has two")
    );
    assert!(refused(&archive(&[("notes.txt", b"")])).starts_with("has no image (bmp, "));
    assert_eq!(refused(&[b'x'; 2_000]), "is no tar archive, or is damaged");
    assert!(refused(&[&[0x1F, 0x8B][..], &[1; 600]].concat()).contains("is compressed"));
    let long = "0".repeat(64) + "7";
    assert!(refused(&archive(&[image, ("x/1.cls", long.as_bytes())])).contains("whole number"));
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    let name = std::ffi::OsStr::from_bytes(b"M\xE4r.jpg");
    builder.append_data(&mut header, Path::new(name), &b""[..]).unwrap();
    assert!(refused(&builder.into_inner().unwrap()).contains("its name is not UTF-8"));
    // A size of 2^64 - 1, in base 256.
    let mut huge = archive(&[image, label]);
    huge[124..136].copy_from_slice(&[&[0x80, 0, 0, 0][..], &[0xFF; 8]].concat());
    let sum: u32 = huge[..512].iter().map(|byte| u32::from(*byte)).sum::<u32>()
        - huge[148..156].iter().map(|byte| u32::from(*byte)).sum::<u32>()
        + 8 * 32;
    huge[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    assert_eq!(refused(&huge), "is no tar archive, or is damaged");
    let both = archive(&[image, label]).repeat(2);
    assert!(refused(&both).contains("has more behind its end"));
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    builder.append_link(&mut header, "x/1.jpg", "2.jpg").unwrap();
    assert!(refused(&builder.into_inner().unwrap()).starts_with("x/1.jpg: is a link, not a file"));
    let whole = archive(&[image, label, ("x/2.jpg", b"2"), ("x/2.cls", b"2")]);
    // In an image, between two samples, and just before the end.
    for len in [800, 512 + 1024 + 1024, whole.len() - 1024] {
        assert_eq!(refused(&whole[..len]), "is cut off: copy it again", "{len} bytes");
    }
}

#[test]
fn every_file_gets_its_share_of_every_class() {
    let workspace = Workspace::new();
    let mut source = workspace.folder(60);
    let mut options = options(share(0.0));
    let others = ["val.beton", "test.beton"].map(|name| workspace.path(name));
    options.others = others.iter().cloned().zip([0.2, 0.1]).collect();
    let summary = workspace.written(&source, &options);
    let paths: Vec<_> = summary.files.iter().map(|file| file.path.clone()).collect();
    assert_eq!(paths[1..], others);
    let read = |path: &PathBuf| -> Vec<(i64, Vec<u8>)> {
        let (set, samples) = (Opened::new(path), baton_data::Beton::open(path).unwrap().len());
        (0..samples).map(|sample| (set.label(sample), set.image(sample).bytes.to_vec())).collect()
    };
    let sets: Vec<_> = paths.iter().map(read).collect();
    for (set, expected) in sets.iter().zip([21, 6, 3]) {
        let ones = set.iter().filter(|(label, _)| *label == 1).count();
        assert_eq!((ones, set.len()), (expected, 2 * expected));
    }
    let mut all = sets.concat();
    let mut pixels = |item: &baton_data::write::Item| {
        let position = all.iter().position(|(label, bytes)| {
            let same = || image::open(&item.path).unwrap().into_rgb8().as_raw() == bytes;
            *label == item.label && same()
        });
        all.swap_remove(position.unwrap());
    };
    source
        .items
        .iter()
        .filter(|item| item.path.extension().unwrap() != "jpg")
        .for_each(&mut pixels);
    assert_eq!(all.len(), 20, "the JPEGs");

    // Paths below the source decide, not where it is.
    let before: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    fs::rename(workspace.path("images"), workspace.path("moved")).unwrap();
    source = Source::open(workspace.path("moved")).unwrap();
    workspace.written(&source, &options);
    assert!(paths.iter().zip(before).all(|(path, before)| fs::read(path).unwrap() == before));
}

#[test]
fn a_list_is_divided_the_same_however_its_path_is_written() {
    let workspace = Workspace::new();
    let folder = workspace.folder(20);
    let line = |item: &baton_data::write::Item| {
        let path = item.path.strip_prefix(workspace.path("")).unwrap();
        format!("{}\t{}\n", path.display(), item.label)
    };
    workspace.put("list.tsv", folder.items.iter().map(line).collect::<String>().as_bytes());
    let mut options = options(share(0.0));
    options.others = vec![(workspace.path("val.beton"), 0.3)];
    let written = ["list.tsv", "images/../list.tsv"].map(|list| {
        workspace.written(&Source::open(workspace.path(list)).unwrap(), &options);
        fs::read(workspace.path("val.beton")).unwrap()
    });
    assert!(written[0] == written[1]);
}

#[test]
fn a_list_of_classes_that_another_source_has_left_is_pointed_out() {
    let workspace = Workspace::new();
    let source = workspace.folder(4);
    assert_eq!(workspace.written(&source, &options(share(0.0))).other_classes, None);
    let mut source = source;
    source.classes = None;
    let left = workspace.written(&source, &options(share(0.0))).other_classes;
    assert_eq!(left, Some(workspace.path("set.beton.classes.txt")));
}

#[test]
fn divided_files_appear_together_or_not_at_all() {
    let workspace = Workspace::new();
    let source = workspace.folder(20);
    let mut options = options(share(0.0));
    options.others = vec![(workspace.path("val.beton"), 0.5)];
    let summary = workspace.written(&source, &options);
    let [train, val] = [0, 1].map(|file| summary.files[file].path.clone());
    let before = fs::read(&train).unwrap();
    let file_of = |set: &Path| {
        let bytes = Opened::new(set).image(0).bytes.to_vec();
        let is_it = |path: &&PathBuf| image::open(path).unwrap().into_rgb8().as_raw() == &bytes;
        source.items.iter().map(|item| &item.path).find(is_it).unwrap().clone()
    };
    let (in_train, in_val) = (file_of(&train), file_of(&val));
    picture(9, 9).save(in_train).unwrap();
    fs::write(in_val, "not an image").unwrap();
    assert!(workspace.refused(&source, &options).contains("1 image of"));
    assert!(fs::read(&train).unwrap() == before, "the older file is no longer there");
    let mut said = 0;
    let failed = write_images(&source, &train, &options, &mut |event| {
        said += u32::from(matches!(event, WriteEvent::Wrote { .. }));
    });
    assert_eq!((failed.is_err(), said), (true, 0), "nothing was written");

    options.shards = Some(2);
    assert!(workspace.refused(&source, &options).contains("shards cannot be divided"));
    options.shards = None;
    options.others[0].0 = workspace.path("set.beton");
    assert!(workspace.refused(&source, &options).contains("would be written twice"));
    let few = Workspace::new();
    few.picture("images/a/0.png", 9, 9);
    let source = Source::open(few.path("images")).unwrap();
    options.others[0].0 = few.path("val.beton");
    assert!(few.refused(&source, &options).contains("val.beton: each class has too few"));
    assert_eq!(few.names(), ["images"]);
}

#[test]
fn raw_images_keep_their_pixels_and_order() {
    let workspace = Workspace::new();
    let source = workspace.folder(20);
    let summary = workspace.written(&source, &options(share(0.0)));
    assert_eq!((summary.tally.samples, summary.tally.jpeg), (20, 0));
    let set = workspace.open();
    for (sample, item) in (0..).zip(&source.items) {
        let (image, label) = (set.image(sample), set.label(sample));
        assert_eq!((image.mode, label), (Mode::Raw, item.label));
        if item.path.extension().unwrap() != "jpg" {
            let pixels = image::open(&item.path).unwrap().into_rgb8();
            assert_eq!((image.width, image.height), pixels.dimensions());
            assert_eq!(image.bytes, pixels.as_raw());
        }
    }
    assert_eq!(fs::read_to_string(summary.classes.unwrap()).unwrap(), "class-0\nclass-1\n");
    assert_eq!(workspace.names(), ["images", "set.beton", "set.beton.classes.txt"]);
}

#[test]
fn jpegs_look_like_their_sources() {
    let workspace = Workspace::new();
    let source = workspace.folder(9);
    workspace.written(&source, &options(share(1.0)));
    let (set, mut decoder) = (workspace.open(), Decoder::new().unwrap());
    for (sample, item) in (0..).zip(&source.items) {
        let image = set.image(sample);
        assert_eq!(image.mode, Mode::Jpeg);
        if item.path.extension().unwrap() == "jpg" {
            continue;
        }
        let pixels = image::open(&item.path).unwrap().into_rgb8();
        let decoded = decoder.decode(&image).unwrap();
        let error: f64 = decoded
            .iter()
            .zip(pixels.as_raw())
            .map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2))
            .sum();
        let mean = error / decoded.len() as f64;
        // 33 dB.
        assert!(mean < 32.0, "{}: mean squared error {mean}", item.path.display());
    }
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let workspace = Workspace::new();
    let source = workspace.folder(40);
    let mut options = options(share(0.5));
    workspace.written(&source, &options);
    let expected = workspace.bytes();
    let modes: Vec<_> = (0..40).map(|sample| workspace.open().image(sample).mode).collect();
    assert!(modes.contains(&Mode::Jpeg) && modes.contains(&Mode::Raw));
    for threads in [1, 2, 16, 100] {
        options.threads = NonZeroUsize::new(threads).unwrap();
        workspace.written(&source, &options);
        assert!(workspace.bytes() == expected, "{threads} threads");
    }
    options.encoding.choice = JpegSelection::Fraction { share: 0.5, seed: 2 };
    workspace.written(&source, &options);
    assert!(workspace.bytes() != expected, "another seed selects other images");
}

#[test]
fn images_can_be_selected_by_raw_size() {
    let workspace = Workspace::new();
    let source = workspace.folder(20);
    let bytes = 3 * 40 * 40;
    workspace.written(&source, &options(JpegSelection::LargerThan { bytes }));
    let set = workspace.open();
    for sample in 0..20 {
        let image = set.image(sample);
        let is_large = 3 * u64::from(image.width) * u64::from(image.height) > bytes;
        assert_eq!(image.mode == Mode::Jpeg, is_large);
    }
}

#[test]
fn large_images_are_reduced_like_in_ffcv_and_small_ones_are_not_changed() {
    let workspace = Workspace::new();
    workspace.picture("images/a/large.png", 100, 33);
    workspace.picture("images/a/small.png", 10, 20);
    workspace.picture("images/a/thin.png", 300, 1);
    let source = Source::open(workspace.path("images")).unwrap();
    let mut options = options(share(0.0));
    options.encoding.max_resolution = Some(40);
    workspace.written(&source, &options);
    let set = workspace.open();
    let size = |sample| {
        let image = set.image(sample);
        (image.width, image.height)
    };
    assert_eq!([0, 1, 2].map(size), [(40, 13), (10, 20), (40, 1)]);

    let large = picture(100, 33);
    let source = Pixels { bytes: large.as_raw(), width: 100, height: 33, row_bytes: 300 };
    let mut expected = vec![0; 3 * 40 * 13];
    AreaResizer::default().resize(source, 40, 13, &mut expected).unwrap();
    assert_eq!(set.image(0).bytes, expected);
}

#[test]
fn source_jpegs_are_copied_if_nothing_has_to_change() {
    let workspace = Workspace::new();
    workspace.picture("images/a/0.jpg", 30, 20);
    workspace.picture("images/a/1.png", 30, 20);
    workspace.picture("images/a/2.jpg", 90, 20);
    workspace.put("images/a/3.jpg", &fs::read(folder().join("grey-16x8.jpg")).unwrap());
    let source = Source::open(workspace.path("images")).unwrap();
    let mut options = options(share(1.0));
    options.encoding.keep_jpeg = true;
    options.encoding.max_resolution = Some(50);
    let summary = workspace.written(&source, &options);
    assert_eq!((summary.tally.jpeg, summary.tally.untouched), (4, 1));
    let first = fs::read(workspace.path("images/a/0.jpg")).unwrap();
    assert_eq!(workspace.open().image(0).bytes, first);
    // The grey image now has three channels, as ffcv's readers require.
    let mut decoder = Decoder::new().unwrap();
    assert_eq!(decoder.decode(&workspace.open().image(3)).unwrap(), [100; 3 * 16 * 8]);
}

/// scripts/parity compares the conversions of every kind of pixel with Pillow's.
#[test]
fn grey_transparent_and_16_bit_pixels_are_converted_to_rgb() {
    let workspace = Workspace::new();
    let save = |name: &str, image: DynamicImage| {
        let path = workspace.put(&format!("images/a/{name}"), b"");
        image.save(path).unwrap();
    };
    save("0.png", DynamicImage::from(image::GrayImage::from_pixel(1, 1, image::Luma([9]))));
    save(
        "1.png",
        DynamicImage::from(image::RgbaImage::from_pixel(1, 1, image::Rgba([1, 2, 3, 0]))),
    );
    let deep = image::ImageBuffer::from_pixel(1, 1, image::Rgb([0x1234_u16, 0xFFFF, 0x00FF]));
    save("2.png", DynamicImage::from(deep));
    let deep = image::ImageBuffer::from_fn(2, 1, |x, _| image::Luma([[77_u16, 255][x as usize]]));
    save("3.png", DynamicImage::from(deep));
    workspace.put("images/a/4.jpg", &fs::read(folder().join("cmyk-16x8.jpg")).unwrap());
    let source = Source::open(workspace.path("images")).unwrap();
    workspace.written(&source, &options(share(0.0)));
    let set = workspace.open();
    let bytes = |sample| set.image(sample).bytes.to_vec();
    assert_eq!(bytes(0), [9, 9, 9]);
    assert_eq!(bytes(1), [1, 2, 3]);
    assert_eq!(bytes(2), [0x12, 0xFF, 0]);
    assert_eq!(bytes(3), [77, 77, 77, 255, 255, 255]);
    assert_eq!(bytes(4).len(), 3 * 16 * 8);
}

#[test]
fn grey_values_that_8_bits_cannot_hold_are_refused() {
    let workspace = Workspace::new();
    let path = workspace.put("images/a/x-ray.png", b"");
    let deep = image::ImageBuffer::from_pixel(1, 1, image::Luma([256_u16]));
    DynamicImage::from(deep).save(path).unwrap();
    let source = Source::open(workspace.path("images")).unwrap();
    let (outcome, _) = workspace.write(&source, &options(share(0.0)));
    let Err(Error::BadImages { count: 1, reason: BadImage::Grey16, .. }) = outcome else {
        panic!("{outcome:?}");
    };
}

fn with_bad_ones(workspace: &Workspace) -> Source {
    workspace.folder(6);
    let whole = fs::read(workspace.path("images/class-1/001.jpg")).unwrap();
    workspace.put("images/class-0/cut.jpg", &whole[..whole.len() / 2]);
    workspace.put("images/class-0/empty.png", b"");
    workspace.put("images/class-1/text.jpg", b"not an image");
    Source::open(workspace.path("images")).unwrap()
}

#[test]
fn all_bad_images_are_reported_and_then_the_write_fails() {
    let workspace = Workspace::new();
    let source = with_bad_ones(&workspace);
    let (outcome, messages) = workspace.write(&source, &options(share(0.5)));
    let Err(Error::BadImages { count: 3, first, reason: BadImage::Decode(_), .. }) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(first.ends_with("class-0/cut.jpg"));
    assert_eq!(messages.len(), 3);
    assert!(messages[0].starts_with("cut.jpg does not decode: "), "{messages:?}");
    assert_eq!(
        messages[1..],
        [
            "empty.png is not an image of a known format",
            "text.jpg is not an image of a known format"
        ]
    );
    assert_eq!(workspace.names(), ["images"]);
}

#[test]
fn bad_images_can_be_skipped() {
    let workspace = Workspace::new();
    let source = with_bad_ones(&workspace);
    let mut options = options(share(0.0));
    options.on_bad_image = OnBadImage::Skip;
    let summary = workspace.written(&source, &options);
    assert_eq!((summary.tally.samples, summary.tally.skipped), (6, 3));
    let set = workspace.open();
    let labels: Vec<_> = (0..6).map(|sample| set.label(sample)).collect();
    assert_eq!(labels, [0, 0, 0, 1, 1, 1]);

    let list = workspace.put("list.tsv", b"missing.png\t1\n");
    let (outcome, messages) = workspace.write(&Source::open(list).unwrap(), &options);
    assert!(matches!(outcome, Err(Error::BadImages { count: 1, .. })), "no file without samples");
    assert!(messages[0].starts_with("missing.png cannot be read: No such file"), "{messages:?}");
}

#[test]
fn images_too_large_for_page_or_format_are_reported_with_a_remedy() {
    let workspace = Workspace::new();
    workspace.picture("images/a/page.png", 200, 200);
    let mut options = options(share(0.0));
    let refused = workspace.refused(&Source::open(workspace.path("images")).unwrap(), &options);
    let messages = "needs 120000 bytes, but a page has 65536: write larger pages, store it as JPEG, or \
                set a maximal resolution";
    assert!(refused.contains(messages), "{refused}");

    let path = workspace.put("wide/a/wide.png", b"");
    image::GrayImage::new(70_000, 1).save_with_format(path, ImageFormat::Png).unwrap();
    let wide = Source::open(workspace.path("wide")).unwrap();
    let refused = workspace.refused(&wide, &options);
    let expected = "has 70000x1 pixels, but a side can have at most 65535";
    assert!(refused.contains(expected), "{refused}");
    options.encoding.max_resolution = Some(700);
    workspace.written(&wide, &options);
    assert_eq!(workspace.open().image(0).width, 700);
}

#[test]
fn an_image_may_fill_a_page_exactly() {
    let workspace = Workspace::new();
    // 3 * 128 * 128 = 49152 is not a power of two, but 49152 + 16384 is.
    workspace.picture("images/a/0.png", 128, 128);
    workspace.picture("images/a/1.png", 128, 128);
    let mut options = options(share(0.0));
    options.page_bytes = 1 << 16;
    workspace.written(&Source::open(workspace.path("images")).unwrap(), &options);
    let set = workspace.open();
    assert_eq!(set.image(1).bytes, picture(128, 128).as_raw());
    let rows_end: u64 = 24 + 2 * 1041 + 2 * 24;
    let expected = rows_end.next_multiple_of(1 << 16) + 2 * (1 << 16) + 2 * 24;
    assert_eq!(workspace.bytes().len() as u64, expected);
}

fn sharded(shards: u32, resume: bool) -> Options {
    Options { shards: Some(shards), resume, ..options(share(0.5)) }
}

#[test]
fn shards_are_contiguous_parts_of_the_single_file() {
    let workspace = Workspace::new();
    let source = workspace.folder(23);
    workspace.written(&source, &options(share(0.5)));
    let whole = workspace.open();
    let summary = workspace.written(&source, &sharded(5, false));
    assert_eq!(summary.files.len(), 5);
    let mut sample = 0;
    for (shard, file) in (0..).zip(&summary.files) {
        assert_eq!(file.path, shard_path(&workspace.path("set.beton"), shard, 5));
        assert_eq!(file.bytes, fs::metadata(&file.path).unwrap().len());
        let set = Opened::new(&file.path);
        assert!((4..=5).contains(&set.len()) && set.len() == file.samples);
        for in_shard in 0..set.len() {
            let (a, b) = (set.image(in_shard), whole.image(sample));
            assert_eq!((a.mode, a.bytes), (b.mode, b.bytes), "sample {sample}");
            assert_eq!(set.label(in_shard), whole.label(sample));
            sample += 1;
        }
    }
    assert_eq!(sample, 23);
    assert!(workspace.path("set-00004-of-00005.beton").exists());
}

#[test]
fn a_resumed_write_keeps_finished_shards_and_gives_the_same_data_set() {
    let workspace = Workspace::new();
    let mut source = workspace.folder(20);
    let shard = |number| fs::read(shard_path(&workspace.path("set.beton"), number, 4)).unwrap();
    let complete = workspace.written(&source, &sharded(4, false));
    let expected = [0, 1, 2, 3].map(shard);

    // Shard 1 is removed, shard 3 is truncated.
    fs::remove_file(&complete.files[1].path).unwrap();
    fs::write(&complete.files[3].path, b"short").unwrap();
    let (resumed, messages) = workspace.write(&source, &sharded(4, true));
    let resumed = resumed.unwrap();
    assert_eq!(messages, ["set-00000-of-00004.beton 5", "set-00002-of-00004.beton 5"]);
    assert_eq!(resumed.tally, complete.tally);
    assert_eq!([0, 1, 2, 3].map(shard), expected);

    // Without resume everything is written again.
    assert_eq!(workspace.write(&source, &sharded(4, false)).1, Messages::new());
    // A write with other options or another source cannot be resumed.
    let mut other = sharded(4, true);
    other.encoding.jpeg_quality = 80;
    let refused = workspace.refused(&source, &other);
    assert!(refused.contains("set.beton-write.json belongs to a different write"), "{refused}");
    assert!(refused.contains("its jpeg_quality was 90, now it is 80"), "{refused}");
    source.items.swap(0, 1);
    let refused = workspace.refused(&source, &sharded(4, true));
    assert!(
        refused.contains("different write: its images or labels have changed. Repeat"),
        "{refused}"
    );
}

#[test]
fn a_failed_write_can_be_resumed_with_bad_images_skipped() {
    let workspace = Workspace::new();
    workspace.folder(20);
    let path = workspace.path("images/class-1/019.jpg");
    let whole = fs::read(workspace.path("images/class-1/001.jpg")).unwrap();
    fs::write(workspace.path("images/class-1/019.jpg"), b"bad").unwrap();
    let source = Source::open(workspace.path("images")).unwrap();
    assert!(workspace.write(&source, &sharded(4, false)).0.is_err());
    assert!(!workspace.path("set-00003-of-00004.beton").exists());

    let skip = Options { on_bad_image: OnBadImage::Skip, ..sharded(4, true) };
    let (summary, messages) = workspace.write(&source, &skip);
    assert_eq!(summary.unwrap().tally.skipped, 1);
    assert_eq!(messages.len(), 3 + 1);
    // A shard with skipped images is not complete if bad images are errors.
    assert!(workspace.write(&source, &sharded(4, true)).0.is_err());
    fs::write(path, whole).unwrap();
}

#[test]
fn invalid_options_are_refused() {
    let workspace = Workspace::new();
    let source = workspace.folder(3);
    let refused = |change: fn(&mut Options)| {
        let mut options = options(share(0.5));
        change(&mut options);
        workspace.refused(&source, &options)
    };
    assert!(refused(|options| options.encoding.choice = share(1.5)).contains("0 to 1"));
    assert!(refused(|options| options.encoding.jpeg_quality = 0).contains("1 to 100"));
    assert!(refused(|options| options.encoding.max_resolution = Some(0)).contains("1 pixel"));
    assert!(refused(|options| options.shards = Some(4)).contains("take 1 to 3 shards"));
    assert!(refused(|options| options.resume = true).contains("only shards can be resumed"));
    assert!(
        refused(|options| options.image_field = "seventeen_letters".into()).contains("1 to 16")
    );
    assert!(refused(|options| options.label_field = "image".into()).contains("same name"));
    assert_eq!(workspace.names(), ["images"]);
}
