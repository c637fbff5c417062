//! A folder that appears only when it is complete, and files of weights in it.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf, absolute},
};

use baton_model::Float;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::{
    Error,
    source::{INDEX, SINGLE},
};

/// Most bytes of values in one file of weights, as Hugging Face's tools write them.
pub const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// A folder that is written under a hidden name beside its place, and removed unless [`finish`](Self::finish) is called.
/// What a killed process left there is overwritten.
#[derive(Debug)]
pub struct NewFolder {
    target: PathBuf,
    temporary: PathBuf,
    is_finished: bool,
    /// The folder, locked.
    _lock: File,
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

impl NewFolder {
    /// Creates the folder. Its parent must exist.
    ///
    /// # Errors
    /// `target` exists and is not an empty folder, or its parent cannot be written.
    pub fn create(target: &Path) -> Result<Self, Error> {
        refuse_existing(target)?;
        let path = absolute(target).map_err(|error| Error::write(target, &error))?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::new(target, "cannot be a new folder: give another path"));
        };
        let temporary = parent.join(format!(".{}.partial", name.to_string_lossy()));
        let create = || {
            match fs::create_dir(&temporary) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let lock = File::open(&temporary)?;
            lock.try_lock()?;
            for entry in fs::read_dir(&temporary)? {
                fs::remove_file(entry?.path())?;
            }
            Ok(lock)
        };
        let lock = create().map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::NotFound if !parent.exists() => Error::new(
                target,
                format!("cannot be created: create the folder {} first", parent.display()),
            ),
            io::ErrorKind::WouldBlock => Error::new(
                target,
                "is being written by another process: wait for it, or give another path",
            ),
            _ => Error::write(target, &error),
        })?;
        Ok(Self { target: target.to_owned(), temporary, is_finished: false, _lock: lock })
    }

    /// Where the folder is until it is complete.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Where the folder will be.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<(), Error> {
        let write = || {
            let mut file = File::create(self.path().join(name))?;
            file.write_all(content)?;
            file.sync_all()
        };
        write().map_err(|error| self.failure(name, &error))
    }

    /// Copies files that exist in `folder`.
    ///
    /// # Errors
    /// A file cannot be copied, or is not a regular file.
    pub fn copy(&self, folder: &Path, names: &[&str]) -> Result<(), Error> {
        for name in names {
            let from = folder.join(name);
            match fs::metadata(&from) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Ok(found) if !found.is_file() => {
                    return Err(Error::new(&from, "is not a regular file"));
                }
                _ => {}
            }
            let bytes = fs::read(&from);
            let bytes =
                bytes.map_err(|error| Error::new(&from, format!("cannot be read: {error}")))?;
            self.write(name, &bytes)?;
        }
        Ok(())
    }

    /// Moves the complete folder to its place.
    ///
    /// # Errors
    /// Something is there now, or the folder cannot be moved.
    pub fn finish(mut self) -> Result<(), Error> {
        refuse_existing(&self.target)?;
        let moved = fs::rename(&self.temporary, &self.target).and_then(|()| {
            let parent = absolute(&self.target)?;
            parent.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
        });
        moved.map_err(|error| Error::write(&self.target, &error))?;
        self.is_finished = true;
        Ok(())
    }

    fn failure(&self, name: &str, error: &io::Error) -> Error {
        Error::write(&self.target.join(name), error)
    }

    /// Writes the tensors of a model, one at a time: `model.safetensors`, or several files with an index if there are
    /// more than `max_file_bytes`.
    ///
    /// `read` returns the values of a tensor, `progress` is called with the bytes written so far.
    ///
    /// # Errors
    /// Those of `read`; a value is too large for its format; a file cannot be written.
    pub fn write_weights(
        &self,
        tensors: &[NewTensor],
        max_file_bytes: u64,
        read: &mut dyn FnMut(&NewTensor) -> Result<Vec<f32>, Error>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let files = divide(tensors, max_file_bytes);
        let name = |file: usize| match files.len() {
            1 => SINGLE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", file + 1),
        };
        let (mut written, mut weight_map) = (0, Map::new());
        for (number, file) in files.iter().enumerate() {
            let name = name(number);
            for tensor in *file {
                weight_map.insert(tensor.name.clone(), name.clone().into());
            }
            self.write_file(&name, file, read, &mut |bytes| {
                written += bytes;
                progress(written);
            })?;
        }
        if files.len() > 1 {
            let index = json!({"metadata": {"total_size": written}, "weight_map": weight_map});
            self.write(INDEX, format!("{index:#}\n").as_bytes())?;
        }
        Ok(())
    }

    fn write_file(
        &self,
        name: &str,
        tensors: &[NewTensor],
        read: &mut dyn FnMut(&NewTensor) -> Result<Vec<f32>, Error>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Error> {
        let failure = |error: io::Error| self.failure(name, &error);
        let file = File::create(self.path().join(name)).map_err(failure)?;
        let mut file = BufWriter::new(file);
        let listed = tensors
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.float.dtype(), tensor.shape.clone()));
        file.write_all(&header(listed)).map_err(failure)?;
        for tensor in tensors {
            let values = read(tensor)?;
            let bytes = tensor.float.encode(&values).map_err(|value| {
                let (path, dtype) = (self.target.join(name), tensor.float.dtype());
                let problem = format!(
                    "cannot be written: {value} in {} is too large for {dtype:?}: choose --dtype bf16 or f32",
                    tensor.name
                );
                Error::new(&path, problem)
            })?;
            if bytes.len() as u64 != tensor.bytes() {
                let problem = format!("cannot be written: {} has another size", tensor.name);
                return Err(Error::new(&self.target, problem));
            }
            file.write_all(&bytes).map_err(failure)?;
            progress(bytes.len() as u64);
        }
        file.into_inner().map_err(|error| failure(error.into_error()))?.sync_all().map_err(failure)
    }
}

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Number format.
    pub float: Float,
}

impl NewTensor {
    /// Number of values.
    #[must_use]
    pub fn values(&self) -> u64 {
        self.shape.iter().fold(1, |product: u64, dim| product.saturating_mul(*dim))
    }

    /// Size, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.values().saturating_mul(self.float.bytes() as u64)
    }
}

fn refuse_existing(target: &Path) -> Result<(), Error> {
    let fail = |problem: &str| Err(Error::new(target, problem));
    match fs::read_dir(target).map(Iterator::count) {
        Ok(0) => Ok(()),
        Ok(_) => fail("exists and is not empty: remove it or give another folder"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            fail("exists and is not a folder: give another path")
        }
        Err(error) => Err(Error::new(target, format!("cannot be read: {error}"))),
    }
}

/// Groups of tensors, in order, of at most `max` bytes unless a single tensor is larger.
fn divide(tensors: &[NewTensor], max: u64) -> Vec<&[NewTensor]> {
    let (mut files, mut start, mut bytes) = (Vec::new(), 0, 0_u64);
    for (index, tensor) in tensors.iter().enumerate() {
        if index > start && bytes.saturating_add(tensor.bytes()) > max {
            files.push(&tensors[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes = bytes.saturating_add(tensor.bytes());
    }
    files.push(&tensors[start..]);
    files
}

/// The header of a safetensors file with tensors of these names, formats and shapes, one after the other.
pub(crate) fn header(tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>)>) -> Vec<u8> {
    let mut map = Map::new();
    // transformers refuses files that do not say so.
    map.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        map.insert(name, entry);
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // The values begin at a multiple of 8.
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}
