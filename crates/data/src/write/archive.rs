//! Images in tar archives, as [WebDataset](https://github.com/webdataset/webdataset) packs them: the files of a sample have the
//! same name up to the first dot, as `0001.jpg` and `0001.cls`.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    io::{BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use tar::{Archive, EntryType};

use super::{
    Error,
    draft::failed,
    source::{ArchivedFile, EXTENSIONS, FileVersion, Item, Source, is_image},
};

/// Longest label file, bytes.
const MAX_LABEL_BYTES: u64 = 64;
/// What ends an archive, at least: one block of zeros.
const END_BYTES: usize = 512;
/// Bytes behind its end that are looked at: what programs add to fill a record of a tape, and more.
const MAX_FILL_BYTES: u64 = 1 << 20;
/// How compressed files begin: gzip, Zstandard, xz, bzip2.
const COMPRESSED: [&[u8]; 4] = [&[0x1F, 0x8B], &[0x28, 0xB5, 0x2F, 0xFD], b"\xFD7zXZ", b"BZh"];

/// Refuses a compressed file: in one, the images cannot be found without reading all before them.
pub(super) fn refuse_compressed(path: &Path) -> Result<(), Error> {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(6).read_to_end(&mut start));
    read.map_err(failed("open", path))?;
    match COMPRESSED.iter().any(|magic| start.starts_with(magic)) {
        true => Err(refused(path, "is compressed: decompress it first".to_owned())),
        false => Ok(()),
    }
}

/// Whether a file's name is that of a tar archive.
pub(super) fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("tar"))
}

/// The archives of a folder, by name; none if it has other folders, which are its classes.
pub(super) fn archives_in(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut archives = Vec::new();
    for entry in folder.read_dir().map_err(failed("read", folder))? {
        let path = entry.map_err(failed("read", folder))?.path();
        if path.is_dir() {
            return Ok(Vec::new());
        }
        if is_archive(&path) {
            if !path.is_file() {
                return Err(refused(&path, "is not a regular file: remove it".to_owned()));
            }
            archives.push(path);
        }
    }
    archives.sort();
    Ok(archives)
}

/// All images of archives, in the order of the archives and of their files.
pub(super) fn source(path: &Path, archives: &[PathBuf]) -> Result<Source, Error> {
    let (mut items, mut versions) = (Vec::new(), Vec::new());
    for archive in archives {
        let (version, of_archive) = read(archive)?;
        items.extend(of_archive);
        versions.push((archive.clone(), version));
    }
    if items.is_empty() {
        let images = EXTENSIONS.join(", ");
        return Err(refused(
            path,
            format!("has no image ({images}) with a .cls file of the same name"),
        ));
    }
    Ok(Source { path: path.to_owned(), items, classes: None, archives: versions })
}

/// What an archive has of a sample.
#[derive(Default)]
struct ArchivedSample {
    /// Path of the image in the archive, its position and size.
    image: Option<(PathBuf, u64, u64)>,
    label: Option<i64>,
    /// Position of its first file.
    first: usize,
}

/// The images of an archive, and the version of the file that they are in.
fn read(path: &Path) -> Result<(FileVersion, Vec<Item>), Error> {
    refuse_compressed(path)?;
    let file = File::open(path).map_err(failed("open", path))?;
    let metadata = file.metadata().map_err(failed("read", path))?;
    let (version, bytes) = (FileVersion::of(&metadata), metadata.len());
    let cut_off = || refused(path, "is cut off: copy it again".to_owned());
    let mut archive = Archive::new(BufReader::new(file));
    // The reader would quote the bytes that it cannot read.
    let unreadable = |_| refused(path, "is no tar archive, or is damaged".to_owned());
    let mut samples: BTreeMap<PathBuf, ArchivedSample> = BTreeMap::new();
    let mut end = 0;
    for (number, entry) in archive.entries_with_seek().map_err(unreadable)?.enumerate() {
        let mut entry = entry.map_err(unreadable)?;
        let is_sparse = entry.header().entry_type() == EntryType::GNUSparse;
        let stored = if is_sparse { entry.header().entry_size() } else { Ok(entry.size()) };
        let (start, len) = (entry.raw_file_position(), stored.map_err(unreadable)?);
        end = start.saturating_add(len.checked_next_multiple_of(512).unwrap_or(u64::MAX));
        if end > bytes {
            return Err(cut_off());
        }
        let name = entry.path().map_err(unreadable)?.into_owned();
        if name.to_str().is_none() {
            let reason = format!("{}: its name is not UTF-8: rename it", name.display());
            return Err(refused(path, reason));
        }
        let Some((key, kind)) = key_and_kind(&name) else { continue };
        let is_label = kind.eq_ignore_ascii_case("cls");
        if !is_label && !is_image(OsStr::new(&kind)) {
            continue;
        }
        let wrong = |reason: String| refused(path, format!("{}: {reason}", name.display()));
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => {}
            EntryType::Directory => continue,
            EntryType::GNUSparse => {
                let reason = "is stored with gaps: write the archive without --sparse";
                return Err(wrong(reason.to_owned()));
            }
            _ => {
                let reason = "is a link, not a file: write the archive with --dereference and \
                              --hard-dereference";
                return Err(wrong(reason.to_owned()));
            }
        }
        let sample = samples
            .entry(key)
            .or_insert_with(|| ArchivedSample { first: number, ..ArchivedSample::default() });
        let is_second = match is_label {
            true => {
                let mut text = Vec::new();
                let read = entry.by_ref().take(MAX_LABEL_BYTES).read_to_end(&mut text);
                read.map_err(|_| cut_off())?;
                let text = String::from_utf8_lossy(&text);
                let label = text.trim().parse().ok().filter(|_| len <= MAX_LABEL_BYTES);
                let label = label.ok_or_else(|| {
                    wrong(format!("the label {:?} is not a whole number", text.trim()))
                })?;
                sample.label.replace(label).is_some()
            }
            false => sample.image.replace((name.clone(), start, len)).is_some(),
        };
        if is_second {
            return Err(wrong(
                "its sample has two of them: give each sample its own name".to_owned(),
            ));
        }
    }
    // An archive that was cut between two files would otherwise only have fewer samples, as would two that were joined.
    let mut file = archive.into_inner();
    let mut rest = Vec::new();
    let read = file
        .seek(SeekFrom::Start(end))
        .and_then(|_| file.take(MAX_FILL_BYTES).read_to_end(&mut rest));
    read.map_err(failed("read", path))?;
    if rest.len() < END_BYTES {
        return Err(cut_off());
    }
    if rest.iter().any(|byte| *byte != 0) {
        let reason = "has more behind its end: if it is several archives, put them into one folder";
        return Err(refused(path, reason.to_owned()));
    }

    let archive: Arc<Path> = path.into();
    let mut samples: Vec<(PathBuf, ArchivedSample)> = samples.into_iter().collect();
    samples.sort_by_key(|(_, sample)| sample.first);
    let item = |(key, sample): (PathBuf, ArchivedSample)| match (sample.image, sample.label) {
        (Some((name, start, len)), Some(label)) => {
            let archived = Some(ArchivedFile { archive: archive.clone(), start, len });
            Ok(Item { path: path.join(name), archived, label })
        }
        (Some(_), None) => Err(refused(
            path,
            format!("sample {} has no label: put one into {0}.cls", key.display()),
        )),
        (None, _) => Err(refused(
            path,
            format!(
                "sample {} has a label and no image ({})",
                key.display(),
                EXTENSIONS.join(", ")
            ),
        )),
    };
    Ok((version, samples.into_iter().map(item).collect::<Result<_, _>>()?))
}

/// The name of a sample and the kind of its file: those before and after the first dot of the file's name.
fn key_and_kind(path: &Path) -> Option<(PathBuf, String)> {
    let name = path.file_name()?.to_str()?;
    let (key, kind) = name.split_once('.')?;
    // Hidden files, as those that macOS adds.
    (!key.is_empty()).then(|| (path.with_file_name(key), kind.to_owned()))
}

fn refused(path: &Path, reason: String) -> Error {
    Error::Source { path: path.to_owned(), reason }
}
