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
    source::{ArchivedFile, EXTENSIONS, Item, Source, is_image},
};

/// Longest label file, bytes.
const MAX_LABEL_BYTES: u64 = 64;
/// What ends an archive, at least: one block of zeros.
const END_BYTES: u64 = 512;

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
            archives.push(path);
        }
    }
    archives.sort();
    Ok(archives)
}

/// All images of archives, in the order of the archives and of their files.
pub(super) fn source(path: &Path, archives: &[PathBuf]) -> Result<Source, Error> {
    let mut items = Vec::new();
    for archive in archives {
        items.extend(read(archive)?);
    }
    if items.is_empty() {
        let images = EXTENSIONS.join(", ");
        return Err(refused(
            path,
            format!("has no image ({images}) with a .cls file of the same name"),
        ));
    }
    Ok(Source { path: path.to_owned(), items, classes: None })
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

fn read(path: &Path) -> Result<Vec<Item>, Error> {
    let file = File::open(path).map_err(failed("open", path))?;
    let bytes = file.metadata().map_err(failed("read", path))?.len();
    let cut_off = || refused(path, "is cut off: copy it again".to_owned());
    let mut archive = Archive::new(BufReader::new(file));
    let unreadable = |error: std::io::Error| refused(path, format!("is no tar archive: {error}"));
    let mut samples: BTreeMap<PathBuf, ArchivedSample> = BTreeMap::new();
    let mut end = 0;
    for (number, entry) in archive.entries_with_seek().map_err(unreadable)?.enumerate() {
        let mut entry = entry.map_err(unreadable)?;
        let (start, len) = (entry.raw_file_position(), entry.size());
        end = start.saturating_add(len.next_multiple_of(512));
        if end > bytes {
            return Err(cut_off());
        }
        if !matches!(entry.header().entry_type(), EntryType::Regular | EntryType::Continuous) {
            continue;
        }
        let name = entry.path().map_err(unreadable)?.into_owned();
        let Some((key, kind)) = key_and_kind(&name) else { continue };
        let is_label = kind.eq_ignore_ascii_case("cls");
        if !is_label && !is_image(OsStr::new(&kind)) {
            continue;
        }
        let wrong = |reason: String| refused(path, format!("{}: {reason}", name.display()));
        let sample = samples
            .entry(key)
            .or_insert_with(|| ArchivedSample { first: number, ..ArchivedSample::default() });
        let is_second = match is_label {
            true => {
                let mut text = String::new();
                let read = entry.by_ref().take(MAX_LABEL_BYTES).read_to_string(&mut text);
                let label = read.ok().and_then(|_| text.trim().parse().ok());
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
    // An archive that was cut between two files would otherwise only have fewer samples.
    let mut file = archive.into_inner();
    let mut mark = Vec::new();
    let read =
        file.seek(SeekFrom::Start(end)).and_then(|_| file.take(END_BYTES).read_to_end(&mut mark));
    read.map_err(failed("read", path))?;
    if mark.len() as u64 != END_BYTES || mark.iter().any(|byte| *byte != 0) {
        return Err(cut_off());
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
    samples.into_iter().map(item).collect()
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
