//! From what is written to a recipe: a file, the files that it is based on, and changes of single values.
//!
//! All of them are parsed with positions in one common numbering of bytes, so that whatever is wrong with
//! the merged recipe is shown where it was written.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io, mem,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeTable, DeValue, Deserializer},
};

use super::{Error, JobSpec, model, rules};

/// Most files of one recipe: its own and its bases.
const MOST_FILES: usize = 8;

/// A valid recipe, and where its values come from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The recipe, every default filled in.
    pub spec: JobSpec,
    /// What its files and changes set, without defaults.
    pub set: toml::Table,
    /// Who set each value, by its dotted path.
    pub origins: BTreeMap<String, Origin>,
}

/// Who sets a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file: the recipe's own, or a base.
    File(PathBuf),
    /// A change such as `train.epochs=3`.
    Change(String),
}

/// What sets values, and the position of its first byte.
struct Source {
    origin: Origin,
    text: String,
    start: usize,
}

impl Resolved {
    /// Reads a recipe and its bases with `read`, and applies `changes`, each `dotted.key=value` with a TOML
    /// value.
    ///
    /// A file names its base by `base = "other.toml"`, a path relative to the file itself. Tables are
    /// merged key by key and the file wins; other values are replaced, and so is a table whose `kind` the
    /// file changes. The name is never inherited, as two jobs of one name would share a run folder.
    ///
    /// # Errors
    /// Files that cannot be read, bases in a circle, unknown keys, wrong types, values against a rule.
    pub fn read(
        file: &Path,
        changes: &[String],
        read: impl Fn(&Path) -> io::Result<String>,
    ) -> Result<Self, Error> {
        let mut sources = Vec::new();
        add(&mut sources, Origin::File(file.to_owned()), read(file).map_err(Error::Unreadable)?);
        while let Some((path, error)) = next_base(&sources)? {
            let text = read(&path).map_err(|why| error(why.to_string()))?;
            add(&mut sources, Origin::File(path), text);
        }
        let files = sources.len();
        for change in changes {
            let value = change.split_once('=').ok_or_else(|| Error::Override(change.clone()))?.1;
            add(&mut sources, Origin::Change(change.clone()), format!("v = {value}"));
        }
        // Spaces before a text move its positions to where it starts.
        let placed: Vec<String> =
            sources.iter().map(|source| " ".repeat(source.start) + &source.text).collect();
        let mut table = DeTable::new();
        for text in placed[..files].iter().rev() {
            table.remove("name");
            let own = DeTable::parse(text).map_err(|error| written(&sources, &error))?;
            table = merged(table, own.into_inner());
            table.remove("base");
        }
        for (source, text) in sources.iter().zip(&placed).skip(files) {
            apply(&mut table, source, text)?;
        }
        Self::of_table(table, &sources)
    }

    fn of_table(table: DeTable<'_>, sources: &[Source]) -> Result<Self, Error> {
        let mut origins = BTreeMap::new();
        collect_origins(&table, "", sources, &mut origins);
        let root = || Deserializer::from(Spanned::new(0..0, table.clone()));
        let in_place = |error| written(sources, &error);
        let spec = JobSpec::deserialize(root()).map_err(in_place)?;
        let set = toml::Table::deserialize(root()).map_err(in_place)?;
        let is_change = |field| matches!(origins.get(field), Some(Origin::Change(_)));
        let mut violations = rules::violations(&spec);
        let ignored = model::ignored(&spec).into_iter();
        violations.extend(ignored.filter(|violation| is_change(violation.field)));
        match violations.is_empty() {
            true => Ok(Self { spec, set, origins }),
            false => Err(Error::Invalid(violations)),
        }
    }
}

fn add(sources: &mut Vec<Source>, origin: Origin, text: String) {
    let start = sources.last().map_or(0, |last: &Source| last.start + last.text.len() + 1);
    sources.push(Source { origin, text, start });
}

/// The base that the last file names, and what to say if it cannot be read.
fn next_base(
    sources: &[Source],
) -> Result<Option<(PathBuf, impl Fn(String) -> Error + use<>)>, Error> {
    let Some(Source { origin: Origin::File(file), text, start }) = sources.last() else {
        return Ok(None);
    };
    let table = DeTable::parse(text).map_err(|error| {
        let at = start + error.span().map_or(0, |span| span.start);
        Error::Text { place: place(sources, at), problem: one_line(error.message()) }
    })?;
    let Some(base) = table.get_ref().get("base") else { return Ok(None) };
    let place = place(sources, start + base.span().start);
    let refuse = move |problem| Error::Text { place: place.clone(), problem };
    let DeValue::String(name) = base.get_ref() else {
        return Err(refuse(
            "base must be a path from this file to another recipe, e.g. base = \"other.toml\""
                .to_owned(),
        ));
    };
    let path = file.parent().unwrap_or(Path::new("")).join(name.as_ref());
    let files = sources.iter().filter_map(|source| match &source.origin {
        Origin::File(file) => Some(file),
        Origin::Change(_) => None,
    });
    let chain = || {
        let chain: Vec<_> =
            files.clone().chain([&path]).map(|file| file.display().to_string()).collect();
        chain.join(" -> ")
    };
    if files.clone().any(|file| *file == path) {
        return Err(refuse(format!("bases go in a circle, {}: remove one base", chain())));
    }
    if sources.len() == MOST_FILES {
        let most = MOST_FILES - 1;
        return Err(refuse(format!("more than {most} bases, {}: remove some", chain())));
    }
    let name = name.to_string();
    let unreadable = move |why| {
        refuse(format!(
            "base = {name:?} cannot be read: {why}; it is a path from this file's folder"
        ))
    };
    Ok(Some((path, unreadable)))
}

/// `base` with everything that `heir` sets.
fn merged<'i>(mut base: DeTable<'i>, heir: DeTable<'i>) -> DeTable<'i> {
    for (key, value) in heir {
        let (span, above) = (value.span(), value.into_inner());
        let below = base.remove(&key).map(Spanned::into_inner);
        let value = match (below, above) {
            (Some(DeValue::Table(below)), DeValue::Table(above))
                if !changes_kind(&below, &above) =>
            {
                DeValue::Table(merged(below, above))
            }
            (_, above) => above,
        };
        base.insert(key, Spanned::new(span, value));
    }
    base
}

/// Whether keys of `below` may be foreign to `above`.
fn changes_kind(below: &DeTable<'_>, above: &DeTable<'_>) -> bool {
    let kind = |table: &DeTable<'_>| {
        table.get("kind").and_then(|kind| kind.get_ref().as_str().map(str::to_owned))
    };
    above.contains_key("kind") && kind(above) != kind(below)
}

/// Sets one value, whatever was there.
fn apply<'i>(table: &mut DeTable<'i>, source: &Source, placed: &'i str) -> Result<(), Error> {
    let Origin::Change(change) = &source.origin else { return Ok(()) };
    let malformed = || Error::Override(change.clone());
    let (path, text) = change.split_once('=').ok_or_else(malformed)?;
    let span = source.start..source.start;
    // A bare word is taken as a string, so that `--set cluster.device=cpu` needs no inner quotes.
    let value = DeTable::parse(placed)
        .ok()
        .and_then(|parsed| parsed.into_inner().remove("v"))
        .unwrap_or_else(|| {
            Spanned::new(span.clone(), DeValue::String(Cow::Owned(text.to_owned())))
        });
    let (sections, leaf) = match path.rsplit_once('.') {
        Some((sections, leaf)) => (sections.split('.').collect(), leaf),
        None => (Vec::new(), path),
    };
    if path == "base" {
        return Err(Error::Text {
            place: format!("override `{change}`: "),
            problem: "base is said in a file: name a file that has this base".to_owned(),
        });
    }
    let key = |name: &str| Spanned::new(span.clone(), Cow::Owned(name.to_owned()));
    let mut at = table;
    for section in sections {
        if !at.contains_key(section) {
            at.insert(key(section), Spanned::new(span.clone(), DeValue::Table(DeTable::new())));
        }
        let inner = at.get_mut(section).ok_or_else(malformed)?;
        // Of a table with kinds, an error knows no more than its place.
        if inner.get_ref().get("kind").is_some() {
            let value = mem::replace(inner.get_mut(), DeValue::Boolean(false));
            *inner = Spanned::new(span.clone(), value);
        }
        at = match inner.get_mut() {
            DeValue::Table(inner) => inner,
            _ => return Err(malformed()),
        };
    }
    at.remove(leaf);
    at.insert(key(leaf), value);
    Ok(())
}

fn collect_origins(
    table: &DeTable<'_>,
    section: &str,
    sources: &[Source],
    into: &mut BTreeMap<String, Origin>,
) {
    for (key, value) in table {
        let path = format!("{section}{}", key.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) => collect_origins(inner, &format!("{path}."), sources, into),
            _ => {
                if let Some(source) = source_at(sources, value.span().start) {
                    into.insert(path, source.origin.clone());
                }
            }
        }
    }
}

fn source_at(sources: &[Source], at: usize) -> Option<&Source> {
    sources.iter().rfind(|source| source.start <= at)
}

/// Names the place in front of what is wrong there.
fn place(sources: &[Source], at: usize) -> String {
    let Some(source) = source_at(sources, at) else { return String::new() };
    let before = source.text.get(..at - source.start).unwrap_or(&source.text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    match &source.origin {
        // Callers name the file that they asked for.
        Origin::File(_) if source.start == 0 => format!("at line {line}, column {column}: "),
        Origin::File(file) => {
            format!("in base {} at line {line}, column {column}: ", file.display())
        }
        Origin::Change(change) => format!("override `{change}`: "),
    }
}

fn written(sources: &[Source], error: &toml::de::Error) -> Error {
    let place = error.span().map_or(String::new(), |span| place(sources, span.start));
    Error::Text { place, problem: one_line(error.message()) }
}

/// A daemon's error is one line.
fn one_line(message: &str) -> String {
    message.replace('\n', " ")
}
