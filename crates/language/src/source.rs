//! The weights of a model: safetensors files in a folder, one or several with an index.
//!
//! Tensors are read one at a time, so that a model of any size needs little memory beyond the tensors themselves.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use baton_model::Float;
use safetensors::{Dtype, tensor::Metadata as Header};
use serde_json::Value;

use crate::{
    Error,
    decoder::{BaseTensor, HEAD},
};

/// The tensors of a model's files.
#[derive(Debug)]
pub struct WeightSource {
    folder: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, WeightLocation>,
}

#[derive(Clone, Debug)]
struct WeightLocation {
    file: usize,
    start: u64,
    len: u64,
    dtype: Dtype,
    shape: Vec<u64>,
}

/// Name of a model's only file of weights.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the list of a model's files of weights.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Longest header, and longest index: those of the largest published models have a few MB.
const MAX_TEXT_BYTES: u64 = 100 << 20;

impl WeightSource {
    /// Opens the files in `folder`.
    ///
    /// # Errors
    /// No such files, a missing shard, or a file that is not safetensors.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let mut source =
            Self { folder: folder.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let index = folder.join(INDEX);
        let names = if index.exists() { files_of_index(&index)? } else { vec![SINGLE.to_owned()] };
        for name in names {
            source.add(&folder.join(name))?;
        }
        Ok(source)
    }

    /// Opens a single file.
    ///
    /// # Errors
    /// It is not a safetensors file.
    pub(crate) fn of_file(path: &Path) -> Result<Self, Error> {
        let folder = path.parent().unwrap_or(path).to_owned();
        let mut source = Self { folder, files: Vec::new(), tensors: BTreeMap::new() };
        source.add(path)?;
        Ok(source)
    }

    fn add(&mut self, path: &Path) -> Result<(), Error> {
        let fail = |problem: String| Error::new(path, problem);
        let (file, bytes) = open_file(path, "download all files of the model again")?;
        let (header, start) = header(&file, bytes).map_err(&fail)?;
        let metadata: Header = serde_json::from_slice(&header)
            .map_err(|error| fail(format!("is not a valid safetensors file: {error}")))?;
        let number = self.files.len();
        let mut end = start;
        for (name, info) in metadata.tensors() {
            let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
            if to < from || start.checked_add(to).is_none_or(|end| end > bytes) {
                return Err(fail(format!(
                    "ends before tensor {name} does: download it again, it is not complete"
                )));
            }
            end = end.max(start + to);
            let shape = info.shape.iter().map(|dim| *dim as u64).collect();
            let location = WeightLocation {
                file: number,
                start: start + from,
                len: to - from,
                dtype: info.dtype,
                shape,
            };
            self.tensors.insert(name, location);
        }
        if end != bytes {
            return Err(fail(format!(
                "has {} bytes after its last tensor: download it again",
                bytes - end
            )));
        }
        self.files.push((path.to_owned(), file));
        Ok(())
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Number format of a tensor; `None` if there is no such tensor, or its format is not supported.
    #[must_use]
    pub fn float(&self, name: &str) -> Option<Float> {
        self.tensors.get(name)?.float()
    }

    /// Checks that the files have all tensors that a model needs, in these shapes, and no other ones.
    ///
    /// # Errors
    /// The first missing or superfluous tensor, or one of another shape or an unsupported type.
    pub fn check(&self, expected: &[BaseTensor]) -> Result<(), Error> {
        for BaseTensor { name, shape } in expected {
            let Some(location) = self.tensors.get(name) else {
                return Err(Error::new(
                    &self.folder,
                    format!(
                        "has no tensor {name}, which its config.json requires: download the model again"
                    ),
                ));
            };
            let (path, _) = &self.files[location.file];
            if location.shape != *shape {
                return Err(Error::new(
                    path,
                    format!(
                        "has {name} of shape {:?}, but config.json requires {shape:?}",
                        location.shape
                    ),
                ));
            }
            let float = location.float().ok_or_else(|| {
                let dtype = location.dtype;
                Error::new(
                    path,
                    format!("has {name} as {dtype:?}: only F32, F16 and BF16 are supported"),
                )
            })?;
            let values = shape.iter().product::<u64>();
            if values.checked_mul(float.bytes() as u64) != Some(location.len) {
                return Err(Error::new(
                    path,
                    format!("has {name} with a length that does not fit its shape"),
                ));
            }
        }
        let is_known = |name: &str| expected.iter().any(|tensor| tensor.name == name);
        // A head that is tied to the embedding may be stored nevertheless, and so may constants of older versions.
        let is_harmless = |name: &str| name == HEAD || name.ends_with(".rotary_emb.inv_freq");
        let other = self.tensors.iter().find(|(name, _)| !is_known(name) && !is_harmless(name));
        match other {
            None => Ok(()),
            Some((name, location)) => Err(Error::new(
                &self.files[location.file].0,
                format!(
                    "has a tensor {name}, which its config.json does not use: take the config.json that belongs to these weights"
                ),
            )),
        }
    }

    /// The format and the bytes of a tensor, little-endian.
    ///
    /// # Errors
    /// There is no such tensor, or the file cannot be read.
    pub fn read(&self, name: &str) -> Result<(Float, Vec<u8>), Error> {
        let float = self.float(name).ok_or_else(|| self.missing(name))?;
        Ok((float, self.bytes(name)?))
    }

    /// The bytes of a tensor of any format.
    pub(crate) fn bytes(&self, name: &str) -> Result<Vec<u8>, Error> {
        let location = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        let (path, file) = &self.files[location.file];
        let mut bytes = vec![0; location.len as usize];
        file.read_exact_at(&mut bytes, location.start)
            .map_err(|error| Error::new(path, format!("cannot be read: {error}")))?;
        Ok(bytes)
    }

    fn missing(&self, name: &str) -> Error {
        Error::new(&self.folder, format!("has no tensor {name}"))
    }

    /// Names and metadata of the files.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn metadata(&self) -> Result<Vec<(String, Metadata)>, Error> {
        let of = |(path, file): &(PathBuf, File)| {
            let metadata = file
                .metadata()
                .map_err(|error| Error::new(path, format!("cannot be read: {error}")))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), metadata))
        };
        self.files.iter().map(of).collect()
    }

    /// Adds the content of all files to a digest.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn hash(&self, hasher: &mut blake3::Hasher) -> Result<(), Error> {
        let mut buffer = vec![0; 1 << 20];
        for (path, file) in &self.files {
            let mut position = 0;
            loop {
                let read = file.read_at(&mut buffer, position);
                let read =
                    read.map_err(|error| Error::new(path, format!("cannot be read: {error}")))?;
                if read == 0 {
                    break;
                }
                hasher.update(&buffer[..read]);
                position += read as u64;
            }
        }
        Ok(())
    }
}

impl WeightLocation {
    fn float(&self) -> Option<Float> {
        Float::of_dtype(self.dtype)
    }
}

/// The header of a safetensors file of this size, as JSON, and the position of the data.
fn header(file: &File, bytes: u64) -> Result<(Vec<u8>, u64), String> {
    let mut length = [0; 8];
    let read = |buffer: &mut [u8], position| {
        file.read_exact_at(buffer, position)
            .map_err(|error| format!("is not a valid safetensors file: {error}"))
    };
    read(&mut length, 0)?;
    let header = u64::from_le_bytes(length);
    if header > MAX_TEXT_BYTES || header.saturating_add(8) > bytes {
        return Err("is not a valid safetensors file: its header is too long".to_owned());
    }
    let mut text = vec![0; header as usize];
    read(&mut text, 8)?;
    Ok((text, 8 + header))
}

/// The names of the files in an index, in alphabetical order.
fn files_of_index(path: &Path) -> Result<Vec<String>, Error> {
    let fail = |problem: String| Error::new(path, problem);
    let text = read_text(path)?;
    let index: Value =
        serde_json::from_str(&text).map_err(|error| fail(format!("is not valid JSON: {error}")))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| fail("has no weight_map".to_owned()))?;
    let mut names: Vec<String> =
        map.values().filter_map(Value::as_str).map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    // Only names beside the index, no paths to elsewhere.
    if let Some(name) = names.iter().find(|name| name.contains('/')) {
        return Err(fail(format!("names the file {name:?}, which is not in its folder")));
    }
    Ok(names)
}

/// Reads a text file of a model.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    let (file, _) = open_file(path, "name the folder of a model")?;
    let mut text = String::new();
    let read = file.take(MAX_TEXT_BYTES).read_to_string(&mut text);
    read.map_err(|error| Error::new(path, format!("cannot be read: {error}")))?;
    Ok(text)
}

/// Opens a file that is not a folder, pipe or device, of which some would block, and returns its size.
pub(crate) fn open_file(path: &Path, if_missing: &str) -> Result<(File, u64), Error> {
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Error::new(path, format!("does not exist: {if_missing}")),
        _ => Error::new(path, format!("cannot be opened: {error}")),
    };
    let metadata = fs::metadata(path).map_err(fail)?;
    if !metadata.is_file() {
        return Err(Error::new(path, "is not a regular file"));
    }
    Ok((File::open(path).map_err(fail)?, metadata.len()))
}
