//! Recordings: long signals of one or several channels, as `.npy`, `.wav` and `.flac` files.

use std::{
    cmp::Ordering,
    fs::File,
    io::{BufReader, ErrorKind, Read},
    path::Path,
};

use super::{Error, draft::failed};

/// A recording in memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SignalRecording {
    pub(super) channels: usize,
    /// Number of positions in time.
    pub(super) len: usize,
    /// One channel after the other.
    pub(super) values: Vec<f32>,
}

/// Formats of files, by the ends of their names.
#[derive(Clone, Copy)]
enum Format {
    Npy,
    Wav,
    Flac,
}

impl Format {
    /// `None` for files of other kinds.
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "npy" => Some(Self::Npy),
            "wav" => Some(Self::Wav),
            "flac" => Some(Self::Flac),
            _ => None,
        }
    }
}

/// Ends of the names of files that can be read, as text.
pub(super) const RECORDING_FILES: &str = ".npy, .wav or .flac";

impl SignalRecording {
    /// Whether the name of this file is that of a recording.
    pub(super) fn is_named_by(path: &Path) -> bool {
        Format::of(path).is_some()
    }

    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        let read = match Format::of(path) {
            Some(Format::Wav) => read_wav(path)?,
            Some(Format::Flac) => read_flac(path)?,
            Some(Format::Npy) | None => read_npy(path)?,
        };
        read.map_err(refused)
    }

    /// Channels, positions in time and, if the file has it, positions per second, from the beginning of the file.
    pub(super) fn shape_of(path: &Path) -> Result<(usize, usize, Option<u32>), Error> {
        let refused = |reason: String| Error::Source { path: path.to_owned(), reason };
        match Format::of(path) {
            Some(Format::Wav) => {
                let reader = open_wav(path)?.map_err(refused)?;
                let spec = reader.spec();
                let len = reader.duration() as usize;
                Ok((spec.channels.into(), len, Some(spec.sample_rate)))
            }
            Some(Format::Flac) => {
                let (reader, len) = open_flac(path)?.map_err(refused)?;
                let info = reader.streaminfo();
                Ok((info.channels as usize, len, Some(info.sample_rate)))
            }
            Some(Format::Npy) | None => {
                let (_, header) = open_npy(path)?.map_err(refused)?;
                let (channels, len) = header.shape;
                Ok((channels, len, None))
            }
        }
    }

    /// One channel.
    pub(super) fn channel(&self, channel: usize) -> &[f32] {
        &self.values[channel * self.len..(channel + 1) * self.len]
    }
}

/// Length of the shortest header.
const MIN_WAV_HEADER_BYTES: u64 = 44;

type WavFile = hound::WavReader<BufReader<File>>;

/// Opens a `.wav` file that is as long as its header says.
fn open_wav(path: &Path) -> Result<Result<WavFile, String>, Error> {
    let file = File::open(path).map_err(failed("open", path))?;
    let bytes = file.metadata().map_err(failed("read", path))?.len();
    let reader = match hound::WavReader::new(BufReader::new(file)) {
        Ok(reader) => reader,
        Err(hound::Error::IoError(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            return Ok(Err("is cut off in its header".to_owned()));
        }
        Err(hound::Error::IoError(error)) => return Err(failed("read", path)(error)),
        Err(error) => return Ok(Err(wav_problem(&error))),
    };
    let samples = u64::from(reader.len()) * u64::from(reader.spec().bits_per_sample.div_ceil(8));
    Ok(if samples + MIN_WAV_HEADER_BYTES > bytes {
        Err(shorter_than(reader.len() as usize))
    } else {
        Ok(reader)
    })
}

fn wav_problem(error: &hound::Error) -> String {
    format!("is no .wav file that can be read ({error}): write it again, as 16-bit or 32-bit PCM")
}

fn shorter_than(values: usize) -> String {
    format!("has fewer than its {values} values: is it cut off?")
}

/// Samples in -1 to 1.
fn read_wav(path: &Path) -> Result<Result<SignalRecording, String>, Error> {
    let mut reader = match open_wav(path)? {
        Ok(reader) => reader,
        Err(reason) => return Ok(Err(reason)),
    };
    let (channels, len) = (usize::from(reader.spec().channels), reader.duration() as usize);
    let spec = reader.spec();
    let mut values = vec![0.0_f32; channels * len];
    let place = |position: usize| (position % channels) * len + position / channels;
    let read = match spec.sample_format {
        hound::SampleFormat::Float => {
            reader.samples::<f32>().enumerate().try_for_each(|(at, sample)| {
                values[place(at)] = sample?;
                Ok::<(), hound::Error>(())
            })
        }
        hound::SampleFormat::Int => {
            let scale = 2_f32.powi(1 - i32::from(spec.bits_per_sample));
            reader.samples::<i32>().enumerate().try_for_each(|(at, sample)| {
                values[place(at)] = sample? as f32 * scale;
                Ok(())
            })
        }
    };
    Ok(read
        .map(|()| SignalRecording { channels, len, values })
        .map_err(|error| wav_problem(&error)))
}

type FlacFile = claxon::FlacReader<File>;

/// Opens a `.flac` file; returns its positions in time too.
fn open_flac(path: &Path) -> Result<Result<(FlacFile, usize), String>, Error> {
    // It buffers its file.
    let reader = match claxon::FlacReader::new(File::open(path).map_err(failed("open", path))?) {
        Ok(reader) => reader,
        Err(error) => return flac_problem(error, path).map(Err),
    };
    let len = reader.streaminfo().samples;
    let Some(len) = len.and_then(|len| usize::try_from(len).ok()) else {
        let reason = "does not say how long it is: write it again with flac or libsndfile";
        return Ok(Err(reason.to_owned()));
    };
    Ok(Ok((reader, len)))
}

/// What is wrong with a file, or the error of the disk it is on.
fn flac_problem(error: claxon::Error, path: &Path) -> Result<String, Error> {
    match error {
        claxon::Error::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => {
            Ok("is cut off: copy it again".to_owned())
        }
        claxon::Error::IoError(error) => Err(failed("read", path)(error)),
        error => Ok(format!(
            "is no .flac file that can be read ({error}): write it again, with 16 or 24 bits"
        )),
    }
}

/// Samples in -1 to 1.
fn read_flac(path: &Path) -> Result<Result<SignalRecording, String>, Error> {
    let (mut reader, len) = match open_flac(path)? {
        Ok(opened) => opened,
        Err(reason) => return Ok(Err(reason)),
    };
    let info = reader.streaminfo();
    let scale = 2_f32.powi(1 - info.bits_per_sample as i32);
    // Each block has its own number of bits, which its reader does not compare.
    let most = 1_u32 << info.bits_per_sample.saturating_sub(1);
    let channels = info.channels as usize;
    // They grow with what is found: the header may be wrong.
    let mut values = vec![Vec::new(); channels];
    let (mut blocks, mut buffer) = (reader.blocks(), Vec::new());
    loop {
        let block = match blocks.read_next_or_eof(buffer) {
            Ok(Some(block)) => block,
            Ok(None) => break,
            // Tags of other programs, which libsndfile skips too.
            Err(claxon::Error::FormatError(_)) if values.iter().all(|found| found.len() == len) => {
                break;
            }
            Err(error) => return flac_problem(error, path).map(Err),
        };
        if block.channels() as usize != channels {
            return Ok(Err("has another number of channels in a part of it".to_owned()));
        }
        for (channel, values) in (0..).zip(&mut values) {
            let samples = block.channel(channel);
            if samples.iter().any(|sample| sample.unsigned_abs() > most) {
                let bits = info.bits_per_sample;
                return Ok(Err(format!("has values of more than the {bits} bits that it says")));
            }
            values.extend(samples.iter().map(|sample| *sample as f32 * scale));
        }
        buffer = block.into_buffer();
    }
    let found = values.first().map_or(0, Vec::len);
    Ok(match found.cmp(&len) {
        Ordering::Less => Err(shorter_than(channels * len)),
        Ordering::Equal => {
            // One channel is not copied.
            let all = if channels == 1 { values.swap_remove(0) } else { values.concat() };
            Ok(SignalRecording { channels, len, values: all })
        }
        Ordering::Greater => Err(format!("has more than the {len} positions that it says")),
    })
}

/// Opens a `.npy` file that is as long as its header says; the reader is behind the header.
fn open_npy(path: &Path) -> Result<Result<(BufReader<File>, NpyHeader), String>, Error> {
    let file = File::open(path).map_err(failed("open", path))?;
    let bytes = file.metadata().map_err(failed("read", path))?.len();
    let mut reader = BufReader::new(file);
    let header = match NpyHeader::read(&mut reader).map_err(failed("read", path))? {
        Ok(header) => header,
        Err(reason) => return Ok(Err(reason)),
    };
    let count = header.shape.0 * header.shape.1;
    let is_whole = (count * header.kind.bytes()) as u64 <= bytes;
    Ok(if is_whole { Ok((reader, header)) } else { Err(shorter_than(count)) })
}

fn read_npy(path: &Path) -> Result<Result<SignalRecording, String>, Error> {
    let (mut reader, header) = match open_npy(path)? {
        Ok(opened) => opened,
        Err(reason) => return Ok(Err(reason)),
    };
    let (channels, len) = header.shape;
    let (count, size) = (channels * len, header.kind.bytes());
    let mut values = Vec::new();
    if values.try_reserve_exact(count).is_err() {
        return Ok(Err(format!("has {count} values, more than memory holds")));
    }
    // In parts, so that memory does not hold the file twice.
    let mut part = vec![0; NPY_PART_BYTES.min(count * size)];
    while values.len() < count {
        let bytes = part.len().min((count - values.len()) * size);
        let part = &mut part[..bytes];
        if let Err(error) = reader.read_exact(part) {
            let cut_off = is_short(error).map(|()| Err(shorter_than(count)));
            return cut_off.map_err(failed("read", path));
        }
        header.kind.append(part, &mut values);
    }
    Ok(Ok(SignalRecording { channels, len, values }))
}

/// Bytes of a `.npy` file that are read at once, a multiple of the size of every number.
const NPY_PART_BYTES: usize = 1 << 20;

/// The header of a `.npy` file (NEP 1, versions 1 to 3).
#[derive(Debug, PartialEq, Eq)]
struct NpyHeader {
    kind: NumberKind,
    /// Channels and positions in time.
    shape: (usize, usize),
}

/// Element types of arrays, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberKind {
    F32,
    F64,
    I16,
    I32,
}

impl NumberKind {
    fn bytes(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 => 8,
        }
    }

    fn append(self, bytes: &[u8], values: &mut Vec<f32>) {
        fn all<const N: usize>(
            bytes: &[u8],
            values: &mut Vec<f32>,
            value: impl Fn([u8; N]) -> f32,
        ) {
            values.extend(bytes.as_chunks::<N>().0.iter().map(|chunk| value(*chunk)));
        }
        match self {
            Self::F32 => all(bytes, values, f32::from_le_bytes),
            Self::F64 => all(bytes, values, |chunk| f64::from_le_bytes(chunk) as f32),
            Self::I16 => all(bytes, values, |chunk| i16::from_le_bytes(chunk).into()),
            Self::I32 => all(bytes, values, |chunk| i32::from_le_bytes(chunk) as f32),
        }
    }
}

/// Most bytes of a header; numpy writes 118 for such arrays.
const MAX_NPY_HEADER_BYTES: usize = 64 << 10;

impl NpyHeader {
    fn read(reader: &mut impl Read) -> std::io::Result<Result<Self, String>> {
        let mut start = [0; 8];
        if let Err(error) = reader.read_exact(&mut start) {
            return is_short(error).map(|()| Err("is no .npy file".to_owned()));
        }
        let [magic @ .., major, _] = start;
        if &magic != b"\x93NUMPY" || !(1..=3).contains(&major) {
            return Ok(Err("is no .npy file".to_owned()));
        }
        let mut size = [0; 4];
        let size_bytes = if major == 1 { 2 } else { 4 };
        if let Err(error) = reader.read_exact(&mut size[..size_bytes]) {
            return is_short(error).map(|()| Err("is cut off in its header".to_owned()));
        }
        let size = u32::from_le_bytes(size) as usize;
        if size > MAX_NPY_HEADER_BYTES {
            return Ok(Err("has a header that is too long".to_owned()));
        }
        let mut header = vec![0; size];
        if let Err(error) = reader.read_exact(&mut header) {
            return is_short(error).map(|()| Err("is cut off in its header".to_owned()));
        }
        Ok(Self::parse(&String::from_utf8_lossy(&header)))
    }

    /// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 100), }`.
    fn parse(text: &str) -> Result<Self, String> {
        let after =
            |key: &str| text.split_once(key).map(|(_, rest)| rest.trim_start_matches([' ', ':']));
        let descr = after("'descr'").and_then(|rest| rest.strip_prefix('\'')?.split('\'').next());
        let kind = match descr {
            Some("<f4") => NumberKind::F32,
            Some("<f8") => NumberKind::F64,
            Some("<i2") => NumberKind::I16,
            Some("<i4") => NumberKind::I32,
            other => {
                return Err(format!(
                    "has values {}, and they can be <f4, <f8, <i2 or <i4: convert them with astype(\"<f4\")",
                    other.unwrap_or("of no plain type")
                ));
            }
        };
        let shape = after("'shape'").and_then(|rest| rest.strip_prefix('(')?.split(')').next());
        let shape =
            shape.unwrap_or_default().split(',').map(str::trim).filter(|axis| !axis.is_empty());
        let shape: Result<Vec<usize>, _> = shape.map(str::parse).collect();
        let shape = match shape.as_deref() {
            Ok([len]) => (1, *len),
            Ok([channels, len]) => (*channels, *len),
            _ => return Err("has another shape than (time) or (channels, time)".to_owned()),
        };
        let is_fortran = after("'fortran_order'").is_some_and(|rest| rest.starts_with("True"));
        if is_fortran && shape.0 != 1 {
            return Err("is in Fortran order: save it with np.ascontiguousarray".to_owned());
        }
        let bytes = shape.0.checked_mul(shape.1).and_then(|count| count.checked_mul(kind.bytes()));
        match bytes {
            Some(_) if shape.0 > 0 => Ok(Self { kind, shape }),
            _ => Err("has a shape that is empty or too large".to_owned()),
        }
    }
}

/// Whether reading ended early, in place of another error.
fn is_short(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::UnexpectedEof { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_numpy_are_read() {
        let parse = NpyHeader::parse;
        let header = |kind, shape| Ok(NpyHeader { kind, shape });
        let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 100), }      \n";
        assert_eq!(parse(text), header(NumberKind::F32, (3, 100)));
        let text = "{'descr': '<i2', 'fortran_order': True, 'shape': (100,), }\n";
        assert_eq!(parse(text), header(NumberKind::I16, (1, 100)));
        let refused = |text: &str| parse(text).unwrap_err();
        assert!(refused("{'descr': '>f4', 'shape': (3,)}").contains("has values >f4"));
        assert!(refused("{'descr': [('a', '<f4')], 'shape': (3,)}").contains("no plain type"));
        assert!(refused("{'descr': '<f4', 'shape': (3, 4, 5)}").contains("(channels, time)"));
        assert!(refused("{'descr': '<f4', 'shape': ()}").contains("(channels, time)"));
        assert!(
            refused("{'descr': '<f4', 'fortran_order': True, 'shape': (3, 4)}").contains("Fortran")
        );
        assert!(
            refused("{'descr': '<f8', 'shape': (9223372036854775807, 4)}").contains("too large")
        );
        assert!(refused("{'descr': '<f8', 'shape': (0, 4)}").contains("empty"));
    }
}
