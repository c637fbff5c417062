//! The record of a write's finished shards: a small file in the same folder.
//!
//! Unknown fields are refused, so an older version never resumes the write of a newer one.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Error, ImageCounts, Options, Source,
    draft::{failed, replace},
};
use crate::with_suffix;

/// Key of the source's digest in the record.
const SOURCE_DIGEST: &str = "source_digest";

/// The file `TARGET-write.json`. It is written before the first shard, and again after each shard.
#[derive(Debug)]
pub(super) struct WriteProgress {
    path: PathBuf,
    record: ProgressRecord,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProgressRecord {
    /// All parameters on which the bytes of the shards depend.
    write: BTreeMap<String, Value>,
    /// Finished shards by number.
    done: BTreeMap<usize, DoneShard>,
}

/// A finished shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DoneShard {
    /// Size of the shard, in bytes.
    pub(super) bytes: u64,
    /// Numbers and sizes of its images.
    pub(super) tally: ImageCounts,
}

impl WriteProgress {
    /// Creates a new record, or resumes with the record of the same write.
    pub(super) fn open(source: &Source, target: &Path, options: &Options) -> Result<Self, Error> {
        let path = with_suffix(target, "-write.json");
        let write = parameters(source, options)?;
        if options.resume
            && let Some(record) = read(&path)?
        {
            if let Some(name) = first_difference(&record.write, &write) {
                let value = |write: &BTreeMap<String, Value>| match write.get(name) {
                    Some(value) => value.to_string(),
                    None => "nothing".to_owned(),
                };
                let (was, is) = (value(&record.write), value(&write));
                let what = match name {
                    SOURCE_DIGEST => "its images or labels have changed".to_owned(),
                    _ => format!("its {name} was {was}, now it is {is}"),
                };
                return Err(Error::DifferentWrite { path, what });
            }
            return Ok(Self { path, record });
        }
        let progress = Self { path, record: ProgressRecord { write, done: BTreeMap::new() } };
        progress.save()?;
        Ok(progress)
    }

    /// The record of a finished shard, if its file still has the same size.
    pub(super) fn done(&self, shard: usize, path: &Path) -> Option<DoneShard> {
        let done = *self.record.done.get(&shard)?;
        let is_there = fs::metadata(path).is_ok_and(|metadata| metadata.len() == done.bytes);
        is_there.then_some(done)
    }

    /// Records a finished shard.
    pub(super) fn add(&mut self, shard: usize, done: DoneShard) -> Result<(), Error> {
        self.record.done.insert(shard, done);
        self.save()
    }

    fn save(&self) -> Result<(), Error> {
        let text = serde_json::to_string_pretty(&self.record);
        let text = text.map_err(|error| failed("encode", &self.path)(error.into()))?;
        replace(&self.path, &(text + "\n"))
    }
}

fn read(path: &Path) -> Result<Option<ProgressRecord>, Error> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path)(error)),
    };
    let record = serde_json::from_str(&text);
    record.map(Some).map_err(|error| Error::DifferentWrite {
        path: path.to_owned(),
        what: format!("it cannot be parsed ({error})"),
    })
}

fn parameters(source: &Source, options: &Options) -> Result<BTreeMap<String, Value>, Error> {
    let encoding = serde_json::to_value(options.encoding)
        .map_err(|error| Error::Option(format!("the options cannot be encoded: {error}")))?;
    let mut write = BTreeMap::from([
        ("images".to_owned(), Value::from(source.items.len())),
        (SOURCE_DIGEST.to_owned(), Value::from(source.digest())),
        ("image_field".to_owned(), Value::from(options.image_field.as_str())),
        ("label_field".to_owned(), Value::from(options.label_field.as_str())),
        ("page_bytes".to_owned(), Value::from(options.page_bytes)),
        ("shards".to_owned(), Value::from(options.shards)),
    ]);
    if let Value::Object(encoding) = encoding {
        write.extend(encoding);
    }
    Ok(write)
}

fn first_difference<'a>(
    was: &'a BTreeMap<String, Value>,
    is: &'a BTreeMap<String, Value>,
) -> Option<&'a str> {
    let names = is.keys().chain(was.keys());
    names.map(String::as_str).find(|name| was.get(*name) != is.get(*name))
}
