//! Parses a recipe's `data.train`: a file, a folder or a pattern, on disk or in a bucket.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use glob::{MatchOptions, Pattern};

use super::Error;
use crate::installed;

/// `*` does not match `/`, as in a shell.
const MATCHING: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};

/// The files that are used if the source is a folder.
const FOLDER_PATTERN: &str = "*.beton";

/// Location of shards.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SourceLocation {
    /// A path, perhaps with wildcards.
    Disk(String),
    /// The keys of a bucket.
    Bucket { bucket: String, keys: Keys },
}

/// The selected keys of a bucket.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Keys {
    /// A single key.
    One(String),
    /// All keys that match.
    Matching(Box<KeyPattern>),
}

/// A pattern for keys, and the folder to list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeyPattern {
    /// The deepest folder without wildcards, without a trailing `/`; empty for the whole bucket.
    pub(super) folder: String,
    /// Whether keys in folders below `folder` may match.
    pub(super) is_deep: bool,
    pattern: Pattern,
}

impl KeyPattern {
    pub(super) fn matches(&self, key: &str) -> bool {
        self.pattern.matches_with(key, MATCHING)
    }
}

fn has_wildcard(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Parses `data.train`.
///
/// # Errors
/// It is empty, a URL of an unsupported scheme or without a bucket, or an invalid pattern.
pub(super) fn parse(text: &str) -> Result<SourceLocation, Error> {
    let refused =
        |problem: &str| Error::Source { source_text: text.to_owned(), problem: problem.to_owned() };
    let Some((scheme, rest)) = text.split_once("://") else {
        return match text {
            "" => Err(refused("it is empty; name a file, a pattern or an s3:// URL")),
            _ => Ok(SourceLocation::Disk(text.to_owned())),
        };
    };
    match scheme {
        "file" if rest.starts_with('/') => Ok(SourceLocation::Disk(rest.to_owned())),
        "file" => Err(refused("a file URL has three slashes, as in file:///data/train.beton")),
        "s3" | "s3a" => {
            let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
            if bucket.is_empty() || has_wildcard(bucket) {
                return Err(refused("the bucket must be named, as in s3://bucket/train-*.beton"));
            }
            let keys = keys(key).map_err(|error| refused(&error.to_string()))?;
            Ok(SourceLocation::Bucket { bucket: bucket.to_owned(), keys })
        }
        _ => Err(refused(
            "only paths, file:// and s3:// are supported; for another S3 server set AWS_ENDPOINT_URL",
        )),
    }
}

fn keys(key: &str) -> Result<Keys, glob::PatternError> {
    let is_folder = key.is_empty() || key.ends_with('/');
    if !is_folder && !has_wildcard(key) {
        return Ok(Keys::One(key.to_owned()));
    }
    let text = if is_folder { format!("{key}{FOLDER_PATTERN}") } else { key.to_owned() };
    let wildcard = text.find(['*', '?', '[']).unwrap_or(text.len());
    let folder_end = text[..wildcard].rfind('/');
    let rest = &text[folder_end.map_or(0, |end| end + 1)..];
    Ok(Keys::Matching(Box::new(KeyPattern {
        folder: text[..folder_end.unwrap_or(0)].to_owned(),
        is_deep: rest.contains('/'),
        pattern: Pattern::new(&text)?,
    })))
}

/// The files that a path or pattern selects, sorted. A path that does not exist may be that of data that came with the
/// programs.
///
/// # Errors
/// There are none, a folder cannot be read, or the pattern is invalid.
pub(super) fn list_disk(text: &str) -> Result<Vec<PathBuf>, Error> {
    let path = Path::new(text);
    if !path.exists()
        && let Some(installed) = installed(path).as_deref().and_then(Path::to_str)
    {
        return list_disk(installed);
    }
    // Try the text as a path first, because file names may contain brackets.
    let mut files = if path.is_dir() {
        let escaped = Pattern::escape(text.trim_end_matches('/'));
        list_pattern(text, &format!("{escaped}/{FOLDER_PATTERN}"))?
    } else if path.exists() {
        vec![path.to_owned()]
    } else if has_wildcard(text) {
        list_pattern(text, text)?
    } else {
        Vec::new()
    };
    if files.is_empty() {
        let source_text = text.to_owned();
        return Err(Error::NothingMatches { source_text, there: describe_disk(path) });
    }
    files.sort();
    Ok(files)
}

fn list_pattern(text: &str, pattern: &str) -> Result<Vec<PathBuf>, Error> {
    let found = glob::glob_with(pattern, MATCHING).map_err(|error| Error::Source {
        source_text: text.to_owned(),
        problem: error.to_string(),
    })?;
    let mut files = Vec::new();
    for file in found {
        let file = file.map_err(|error| {
            let path = error.path().to_owned();
            Error::io("list", path)(error.into())
        })?;
        if file.is_file() {
            files.push(file);
        }
    }
    Ok(files)
}

/// Describes the content of the deepest existing folder of `path`.
fn describe_disk(path: &Path) -> String {
    let folders = if path.is_dir() { Some(path) } else { None };
    for folder in folders.into_iter().chain(path.ancestors().skip(1)) {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let names = fs::read_dir(folder).and_then(|entries| {
            entries
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect::<io::Result<Vec<_>>>()
        });
        match names {
            Ok(names) => {
                // If a folder in the path does not exist, its name is probably misspelt.
                let requested = path.strip_prefix(folder).unwrap_or(path);
                let requested = requested.components().next().map(|part| part.as_os_str());
                let requested = requested.unwrap_or_default().to_string_lossy();
                return describe_contents(&folder.display().to_string(), &requested, &names);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return format!("{} cannot be read ({error})", folder.display()),
        }
    }
    "there is no such folder".to_owned()
}

/// Describes the content of a folder, the names most similar to `requested` first.
pub(super) fn describe_contents(folder: &str, requested: &str, names: &[String]) -> String {
    const MAX_SHOWN: usize = 3;
    if names.is_empty() {
        return format!("{folder} is empty or does not exist");
    }
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.sort_by_key(|name| (std::cmp::Reverse(similarity(requested, name)), *name));
    let shown = names.iter().take(MAX_SHOWN).map(|name| format!("\"{name}\"")).collect::<Vec<_>>();
    let shown = shown.join(", ");
    match names.len() {
        len if len > MAX_SHOWN => format!("{folder} has {shown} and {} more", len - MAX_SHOWN),
        _ => format!("{folder} has {shown}"),
    }
}

/// Number of bytes that two names have in common at the start and the end.
fn similarity(one: &str, other: &str) -> usize {
    let common =
        |pairs: &mut dyn Iterator<Item = (u8, u8)>| pairs.take_while(|(a, b)| a == b).count();
    let start = common(&mut one.bytes().zip(other.bytes()));
    let end = common(&mut one.bytes().rev().zip(other.bytes().rev()));
    start + end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(key: &str) -> KeyPattern {
        match keys(key).unwrap() {
            Keys::Matching(pattern) => *pattern,
            Keys::One(key) => panic!("{key} has no wildcard"),
        }
    }

    #[test]
    fn a_source_is_a_path_or_a_url() {
        assert_eq!(parse("a/b-*.beton").unwrap(), SourceLocation::Disk("a/b-*.beton".into()));
        assert_eq!(parse("file:///a/b.beton").unwrap(), SourceLocation::Disk("/a/b.beton".into()));
        let one =
            SourceLocation::Bucket { bucket: "b".into(), keys: Keys::One("x/y.beton".into()) };
        assert_eq!(parse("s3://b/x/y.beton").unwrap(), one);
        for wrong in ["", "s3://", "s3:///a", "s3://b*/a", "gs://b/a", "file://a", "s3://b/[a"] {
            assert!(matches!(parse(wrong), Err(Error::Source { .. })), "{wrong}");
        }
    }

    #[test]
    fn wildcards_do_not_match_slashes() {
        let shallow = pattern("imagenet/train-*.beton");
        assert_eq!((shallow.folder.as_str(), shallow.is_deep), ("imagenet", false));
        assert!(shallow.matches("imagenet/train-07.beton"));
        assert!(!shallow.matches("imagenet/train-07/x.beton"));
        assert!(!shallow.matches("imagenet/val-07.beton"));

        let deep = pattern("v?/train-[0-4].beton");
        assert_eq!((deep.folder.as_str(), deep.is_deep), ("", true));
        assert!(deep.matches("v2/train-4.beton"));
        assert!(!deep.matches("v2/train-5.beton"));
    }

    #[test]
    fn a_folder_selects_its_beton_files() {
        let folder = pattern("a/b/");
        assert_eq!(folder.folder, "a/b");
        assert!(folder.matches("a/b/x.beton"));
        assert!(!folder.matches("a/b/README.md"));
        assert!(pattern("").matches("x.beton"));
    }

    #[test]
    fn similar_names_are_listed_first() {
        let names = ["zebra", "train-01.beton", "train_01.beton", "a"].map(str::to_owned);
        assert_eq!(
            describe_contents("d", "trian-*.beton", &names),
            r#"d has "train-01.beton", "train_01.beton", "a" and 1 more"#
        );
        assert_eq!(describe_contents("d", "x", &[]), "d is empty or does not exist");
    }
}
