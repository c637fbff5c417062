//! Quantised linear layers in a file beside the model, so that a model is quantised once.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, Write},
    os::unix::fs::FileExt,
    path::Path,
};

use safetensors::Dtype;

use super::{BLOCK, Nf4, SCALE_BLOCK};
use crate::{
    Error,
    decoder::BaseTensor,
    model::{CONFIG, LanguageModel},
    output::header,
    source::{WeightSource, open_file},
};

/// Version of the file, in its name; to be raised when quantised bytes change.
const VERSION: u32 = 1;
/// Number of hexadecimal digits of the model's digest in the file's name.
const DIGEST_DIGITS: usize = 16;
/// Bytes of the digest at the end of the file.
const DIGEST_BYTES: u64 = 32;
/// Name of the file's last tensor: the digest of all bytes before it.
const DIGEST: &str = "blake3";

/// The quantised linear layers of a model.
#[derive(Debug)]
pub enum Nf4Source<'a> {
    /// From the file.
    Cached(WeightSource),
    /// Quantised when they are read, because the file cannot be written.
    Model(&'a LanguageModel),
}

impl<'a> Nf4Source<'a> {
    /// Opens the file of the model with this digest. If there is none, or it is damaged, quantises all linear layers and
    /// writes it: one process of a machine, while the others wait. `note` gets one line for the log.
    ///
    /// # Errors
    /// The model cannot be read.
    pub fn open(
        model: &'a LanguageModel,
        digest: &str,
        note: &mut dyn FnMut(String),
    ) -> Result<Self, Error> {
        let folder = model.source.folder();
        let path = folder.join(name(digest));
        let layout = FileLayout { linears: model.decoder.linear_weights(), model: digest };
        if let Some(source) = opened(&path, &layout) {
            return Ok(Self::Cached(source));
        }
        // Best effort: without a lock, several processes write the same file.
        let lock = File::open(folder.join(CONFIG)).ok();
        let _locked = lock.as_ref().map(File::lock);
        if let Some(source) = opened(&path, &layout) {
            return Ok(Self::Cached(source));
        }
        note(format!("quantising {} once, into {}", folder.display(), path.display()));
        if let Err(error) = write(model, &layout, &path)? {
            note(format!(
                "{} cannot be written ({error}): every process quantises the model at its start",
                path.display()
            ));
            return Ok(Self::Model(model));
        }
        Ok(opened(&path, &layout).map_or(Self::Model(model), Self::Cached))
    }

    /// A linear layer's weight.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, tensor: &BaseTensor) -> Result<Nf4, Error> {
        let source = match self {
            Self::Model(model) => return quantized(model, tensor),
            Self::Cached(source) => source,
        };
        let part = |part: &StoredPart| source.bytes(&part.name(tensor));
        let floats = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let [packed, scales, outer_scales, offset] = &PARTS;
        Ok(Nf4 {
            packed: part(packed)?,
            scales: part(scales)?,
            outer_scales: floats(part(outer_scales)?),
            offset: floats(part(offset)?).first().copied().unwrap_or_default(),
        })
    }
}

fn name(digest: &str) -> String {
    let digits = digest.get(..DIGEST_DIGITS).unwrap_or(digest);
    format!("baton-nf4-v{VERSION}-{digits}.safetensors")
}

/// A stored part of a quantised tensor.
struct StoredPart {
    suffix: &'static str,
    dtype: Dtype,
    /// Number of elements for this number of weights.
    len: fn(usize) -> usize,
    bytes: fn(&Nf4) -> Vec<u8>,
}

const PARTS: [StoredPart; 4] = [
    StoredPart {
        suffix: "",
        dtype: Dtype::U8,
        len: |weights| weights.div_ceil(2),
        bytes: |nf4| nf4.packed.clone(),
    },
    StoredPart {
        suffix: ".scales",
        dtype: Dtype::U8,
        len: |weights| weights.div_ceil(BLOCK),
        bytes: |nf4| nf4.scales.clone(),
    },
    StoredPart {
        suffix: ".outer_scales",
        dtype: Dtype::F32,
        len: |weights| weights.div_ceil(BLOCK * SCALE_BLOCK),
        bytes: |nf4| nf4.outer_scales.iter().flat_map(|scale| scale.to_le_bytes()).collect(),
    },
    StoredPart {
        suffix: ".offset",
        dtype: Dtype::F32,
        len: |_| 1,
        bytes: |nf4| nf4.offset.to_le_bytes().to_vec(),
    },
];

impl StoredPart {
    fn name(&self, tensor: &BaseTensor) -> String {
        format!("{}{}", tensor.name, self.suffix)
    }
}

/// The file, if it is there, whole and of this model.
fn opened(path: &Path, layout: &FileLayout<'_>) -> Option<WeightSource> {
    let (file, length) = open_file(path, "").ok()?;
    let expected = layout.header();
    let mut found = vec![0; expected.len()];
    file.read_exact_at(&mut found, 0).ok().filter(|()| found == expected)?;
    let content = length.checked_sub(DIGEST_BYTES)?;
    let mut digest = blake3::Hasher::new();
    digest.update_reader(Read::take(&file, content)).ok()?;
    let mut stored = [0; DIGEST_BYTES as usize];
    file.read_exact_at(&mut stored, content).ok()?;
    if stored != *digest.finalize().as_bytes() {
        return None;
    }
    WeightSource::of_file(path).ok()
}

/// Writes the file. The inner error is one of writing, which is not fatal.
fn write(
    model: &LanguageModel,
    layout: &FileLayout<'_>,
    path: &Path,
) -> Result<io::Result<()>, Error> {
    // Always the same name, so that the next process replaces what a killed one has left.
    let partial = path.with_extension("partial");
    let written = write_to(model, layout, &partial);
    if let Ok(Ok(())) = written {
        return Ok(fs::rename(&partial, path).inspect_err(|_| remove(&partial)));
    }
    remove(&partial);
    written
}

/// Best effort: what is left is replaced by the next process.
fn remove(partial: &Path) {
    let _ = fs::remove_file(partial);
}

fn write_to(
    model: &LanguageModel,
    layout: &FileLayout<'_>,
    partial: &Path,
) -> Result<io::Result<()>, Error> {
    let create = || -> io::Result<BufWriter<File>> {
        // A link would lead elsewhere.
        remove(partial);
        let file = File::options().read(true).write(true).create_new(true).open(partial)?;
        let mut file = BufWriter::new(file);
        file.write_all(&layout.header())?;
        Ok(file)
    };
    let mut file = match create() {
        Ok(file) => file,
        Err(error) => return Ok(Err(error)),
    };
    for tensor in &layout.linears {
        let quantized = quantized(model, tensor)?;
        for part in &PARTS {
            if let Err(error) = file.write_all(&(part.bytes)(&quantized)) {
                return Ok(Err(error));
            }
        }
    }
    let finish = || -> io::Result<()> {
        let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut digest = blake3::Hasher::new();
        file.rewind()?;
        digest.update_reader(&file)?;
        file.write_all(digest.finalize().as_bytes())?;
        file.sync_all()
    };
    Ok(finish())
}

/// What the header of the file must say.
struct FileLayout<'a> {
    linears: Vec<BaseTensor>,
    /// Digest of the model.
    model: &'a str,
}

impl FileLayout<'_> {
    /// The parts of all tensors, an empty tensor named after the model, and the digest.
    fn header(&self) -> Vec<u8> {
        let parts =
            self.linears.iter().flat_map(|tensor| PARTS.iter().map(move |part| (tensor, part)));
        let parts = parts.map(|(tensor, part)| {
            (part.name(tensor), part.dtype, vec![(part.len)(tensor.values() as usize) as u64])
        });
        let model = (format!("model {}", self.model), Dtype::U8, vec![0]);
        header(parts.chain([model, (DIGEST.to_owned(), Dtype::U8, vec![DIGEST_BYTES])]))
    }
}

fn quantized(model: &LanguageModel, tensor: &BaseTensor) -> Result<Nf4, Error> {
    let (float, bytes) = model.source.read(&tensor.name)?;
    let values = float.decode(&bytes);
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(Nf4::quantize(&values)),
        false => Err(Error::new(
            model.source.folder(),
            format!("has a value in {} that is not finite: download the model again", tensor.name),
        )),
    }
}
