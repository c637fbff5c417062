//! The images to be written and their labels: a folder of class folders, a list, or tar archives.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
    time::UNIX_EPOCH,
};

use walkdir::WalkDir;

use super::{CHANGED_WHILE_READ, Error, archive, draft::failed, split::KeySplit};

/// Extensions of image files in class folders, in lower case: those of torchvision, and GIF.
pub const EXTENSIONS: [&str; 10] =
    ["bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"];

/// Longest line of a list, bytes: several times the longest path.
const MAX_LINE: u64 = 1 << 16;

/// Images to be written, in the order of the samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The folder, list or archive.
    pub path: PathBuf,
    /// The images.
    pub items: Vec<Item>,
    /// Names of the classes by label; `None` for a list and archives.
    pub classes: Option<Vec<String>>,
    /// The archives, and which versions of them hold the labels and positions of the items.
    pub(super) archives: Vec<(PathBuf, FileVersion)>,
}

/// One image to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The image file; relative if the source's path is relative. Of a file in an archive its name below the archive's path.
    pub path: PathBuf,
    /// Where the file is, if it is in an archive.
    pub archived: Option<ArchivedFile>,
    /// Class of the image.
    pub label: i64,
}

/// Tells whether a file has changed. Its inode is no part of it: a mount of a bucket gives it anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileVersion {
    bytes: u64,
    /// Since 1970.
    modified_nanos: u128,
}

impl FileVersion {
    pub(super) fn of(metadata: &fs::Metadata) -> Self {
        let modified = metadata.modified().ok();
        let since_epoch = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let modified_nanos = since_epoch.map_or(0, |time| time.as_nanos());
        Self { bytes: metadata.len(), modified_nanos }
    }
}

/// A file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchivedFile {
    /// The archive.
    pub archive: Arc<Path>,
    /// Position of its first byte.
    pub start: u64,
    /// Its size in bytes.
    pub len: u64,
}

impl Item {
    /// Reads the whole file into a buffer that is reused.
    pub(super) fn read(&self, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.clear();
        let Some(ArchivedFile { archive, start, len }) = &self.archived else {
            return File::open(&self.path)?.read_to_end(buffer).map(drop);
        };
        let mut file = File::open(archive)?;
        file.seek(SeekFrom::Start(*start))?;
        // A length that is too large ends at the end of the file.
        file.take(*len).read_to_end(buffer).map(drop)
    }
}

impl Source {
    /// Reads a folder of class folders, a folder of tar archives, one archive, or a list.
    ///
    /// # Errors
    /// The path does not exist, or its content cannot be used.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let found = fs::metadata(path).map_err(failed("open", path))?;
        let is_folder = found.is_dir();
        if !is_folder && !found.is_file() {
            let reason = "is neither a folder nor a regular file".to_owned();
            return Err(Error::Source { path: path.to_owned(), reason });
        }
        let archives = match is_folder {
            true => archive::archives_in(path)?,
            false if archive::is_archive(path) => vec![path.to_owned()],
            false => Vec::new(),
        };
        if !archives.is_empty() {
            return archive::source(path, &archives);
        }
        if is_folder { Self::folder(path) } else { Self::list(path) }
    }

    fn of_files(path: &Path, items: Vec<Item>, classes: Option<Vec<String>>) -> Self {
        Self { path: path.to_owned(), items, classes, archives: Vec::new() }
    }

    /// Refuses archives that have changed since their labels were read: images of one version may have got labels of another.
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
        for (path, version) in &self.archives {
            let found = fs::metadata(path).map_err(failed("read", path))?;
            if FileVersion::of(&found) != *version {
                return Err(Error::Source {
                    path: path.clone(),
                    reason: CHANGED_WHILE_READ.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Divides the images of each class among a first file and others with these shares. The paths of the images decide, from the
    /// source's folder on. Of each file, the positions of its images.
    pub(super) fn divided(&self, shares: &[f64]) -> Vec<Vec<usize>> {
        let keys: Vec<u64> =
            self.items.iter().map(|item| KeySplit::hash(&self.key(item))).collect();
        let mut hashes: BTreeMap<i64, Vec<u64>> = BTreeMap::new();
        for (item, hash) in self.items.iter().zip(&keys) {
            hashes.entry(item.label).or_default().push(*hash);
        }
        let split = |(label, mut hashes): (i64, Vec<u64>)| {
            (label, KeySplit::exact(&mut hashes, shares.iter().copied()))
        };
        let splits: BTreeMap<i64, KeySplit> = hashes.into_iter().map(split).collect();
        let mut divided = vec![Vec::new(); shares.len() + 1];
        for (position, (item, hash)) in self.items.iter().zip(keys).enumerate() {
            let set = splits.get(&item.label).map_or(0, |split| split.set_of_hash(hash));
            divided[set].push(position);
        }
        divided
    }

    fn key<'a>(&self, item: &'a Item) -> std::borrow::Cow<'a, str> {
        // Those of a list begin with its folder.
        let list_folder = self.path.parent().unwrap_or(Path::new(""));
        let below = item.path.strip_prefix(&self.path).or(item.path.strip_prefix(list_folder));
        below.unwrap_or(&item.path).to_string_lossy()
    }

    /// Reads a folder like torchvision's `ImageFolder`: each subfolder is a class, whose label is its position in the
    /// sorted list of names. The images of a class are those in its folder, sorted by name, then those in subfolders,
    /// sorted by their whole path. Links are followed; other files are skipped.
    ///
    /// # Errors
    /// There is no class folder, a class has no image, a name is not valid UTF-8, or a folder cannot be read.
    pub fn folder(path: &Path) -> Result<Self, Error> {
        let refused = |path: &Path, reason: String| Error::Source { path: path.to_owned(), reason };
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(path).map_err(failed("read", path))? {
            let entry = entry.map_err(failed("read", path))?;
            if entry.path().is_dir() {
                names.insert(entry.file_name());
            }
        }
        if names.is_empty() {
            let reason = "there is no class folder in it: give a folder with a folder of images \
                          per class, or a list file";
            return Err(refused(path, reason.to_owned()));
        }
        let (mut items, mut classes) = (Vec::new(), Vec::new());
        for (label, name) in (0..).zip(names) {
            let folder = path.join(&name);
            let images = images_below(&folder)?;
            if images.is_empty() {
                let reason = format!(
                    "this class has no image ({}): remove its folder or fill it",
                    EXTENSIONS.join(", ")
                );
                return Err(refused(&folder, reason));
            }
            items.extend(images.into_iter().map(|path| Item { path, archived: None, label }));
            let name = name.into_string().ok().filter(|name| !name.contains('\n'));
            let reason =
                || "the name of a class must be UTF-8 in one line: rename the folder".to_owned();
            classes.push(name.ok_or_else(|| refused(&folder, reason()))?);
        }
        Ok(Self::of_files(path, items, Some(classes)))
    }

    /// Reads a list with one line per image: its path, then a TAB or a comma, then its label, an integer. Paths are
    /// relative to the folder of the list. Without a TAB the last comma is the separator. Empty lines are skipped,
    /// and so are a header, which is a first line whose label is `label`, and a byte order mark before it.
    ///
    /// # Errors
    /// A line is invalid, or there are no images; the file cannot be read or is not valid UTF-8.
    pub fn list(path: &Path) -> Result<Self, Error> {
        archive::refuse_compressed(path)?;
        let mut file = BufReader::new(File::open(path).map_err(failed("open", path))?);
        let base = path.parent().unwrap_or(Path::new(""));
        let mut items = Vec::new();
        let mut bytes = Vec::new();
        for number in 1.. {
            // Another file may be one line of gigabytes.
            bytes.clear();
            let read = file.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes);
            if read.map_err(failed("read", path))? == 0 {
                break;
            }
            let refused =
                |reason: String| Error::Line { path: path.to_owned(), line: number, reason };
            let is_text = !bytes.contains(&0) && (bytes.len() as u64) < MAX_LINE;
            let line = str::from_utf8(&bytes).ok().filter(|_| is_text).ok_or_else(|| {
                refused(
                    "not UTF-8 text: give a folder of class folders, or a list with a line \
                     `path<TAB>label` per image"
                        .to_owned(),
                )
            })?;
            // Spreadsheets put a byte order mark in front.
            let line = line.strip_prefix('\u{feff}').filter(|_| number == 1).unwrap_or(line);
            if line.trim().is_empty() {
                continue;
            }
            let (name, label) = line
                .split_once('\t')
                .or_else(|| line.rsplit_once(','))
                .ok_or_else(|| refused("no TAB and no comma: give `path<TAB>label`".to_owned()))?;
            let (name, label) = (name.trim(), label.trim());
            if number == 1 && label == "label" {
                continue;
            }
            if name.is_empty() {
                return Err(refused("no path before the label".to_owned()));
            }
            let label =
                label.parse().map_err(|_| refused(format!("label {label:?} is not an integer")))?;
            items.push(Item { path: base.join(name), archived: None, label });
        }
        if items.is_empty() {
            let reason = "the list has no images: give `path<TAB>label` lines".to_owned();
            return Err(Error::Source { path: path.to_owned(), reason });
        }
        Ok(Self::of_files(path, items, None))
    }

    /// A digest of names, labels, sizes and modification times, to detect whether the source has changed. Files whose
    /// metadata cannot be read are included too.
    pub(super) fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for item in &self.items {
            let path = item.path.as_os_str().as_encoded_bytes();
            hasher.update(&(path.len() as u64).to_le_bytes());
            hasher.update(path);
            hasher.update(&item.label.to_le_bytes());
            if let Some(file) = &item.archived {
                hasher.update(&file.start.to_le_bytes());
            }
            let archive = item.archived.as_ref().map(|file| &*file.archive);
            let version = fs::metadata(archive.unwrap_or(&item.path));
            let version = version.map(|metadata| FileVersion::of(&metadata)).ok();
            let version = version.unwrap_or(FileVersion { bytes: u64::MAX, modified_nanos: 0 });
            hasher.update(&version.bytes.to_le_bytes());
            hasher.update(&version.modified_nanos.to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// The images of one class in torchvision's order.
fn images_below(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut images: Vec<(OsString, OsString)> = Vec::new();
    for entry in WalkDir::new(folder).follow_links(true) {
        let entry = entry.map_err(|error| Error::Source {
            path: error.path().unwrap_or(folder).to_owned(),
            reason: error.to_string(),
        })?;
        let path = entry.path();
        if entry.file_type().is_file()
            && path.extension().is_some_and(is_image)
            && let (Some(parent), Some(name)) = (path.parent(), path.file_name())
        {
            // Folders are compared as text, not part by part: "a-b" comes before "a/b".
            images.push((parent.as_os_str().to_owned(), name.to_owned()));
        }
    }
    images.sort();
    Ok(images.into_iter().map(|(folder, name)| Path::new(&folder).join(name)).collect())
}

pub(super) fn is_image(extension: &OsStr) -> bool {
    let extension = extension.to_string_lossy().to_lowercase();
    EXTENSIONS.contains(&extension.as_str())
}
