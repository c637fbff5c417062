//! Resolves a recipe from a file, the files that it is based on, and changes of single values.
//!
//! All of them are parsed with byte positions in one common numbering, so that an error in the merged recipe can name
//! the location where the value was written.

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

/// Most files of one recipe: the recipe's own file and its bases.
const MAX_RECIPE_FILES: usize = 8;

/// A valid recipe, and the origins of its values.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The recipe, with all defaults set.
    pub spec: JobSpec,
    /// The values that files and changes set, without defaults.
    pub set: toml::Table,
    /// The origin of each value, by its dotted path.
    pub origins: BTreeMap<String, ValueOrigin>,
}

/// Sections with a `kind`, and an example of each. An error about the type of such a section names only this program's
/// own type.
const TABLES: [(&str, &str); 2] =
    [("optimizer", "{kind = \"sgd\"}"), ("schedule", "{kind = \"constant\", lr = 0.1}")];

/// Origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// A file: the recipe's own file, or a base.
    File(PathBuf),
    /// A change such as `train.epochs=3`.
    Change(String),
}

/// A text that sets values.
struct RecipeSource {
    origin: ValueOrigin,
    text: String,
    /// Position of its first byte in the common numbering.
    start: usize,
}

impl Resolved {
    /// Reads a recipe and its bases with `read`, and applies `changes`, each `dotted.key=value` with a TOML
    /// value.
    ///
    /// A file names its base with `base = "other.toml"`, a path relative to the file itself. Tables are merged key by
    /// key; values of the file override those of the base. Other values are replaced, and so is a table whose `kind`
    /// the file changes. The name is never inherited, because two jobs with the same name would share a run folder.
    ///
    /// # Errors
    /// Files that cannot be read, bases in a cycle, unknown keys, wrong types, values that violate a rule.
    pub fn read(
        file: &Path,
        changes: &[String],
        read: impl Fn(&Path) -> io::Result<String>,
    ) -> Result<Self, Error> {
        let mut sources = Vec::new();
        add(
            &mut sources,
            ValueOrigin::File(file.to_owned()),
            read(file).map_err(Error::Unreadable)?,
        );
        while let Some((path, error)) = next_base(&sources)? {
            let text = read(&path).map_err(|why| error(why.to_string()))?;
            add(&mut sources, ValueOrigin::File(path), text);
        }
        let files = sources.len();
        for change in changes {
            let value = change.split_once('=').ok_or_else(|| Error::Override(change.clone()))?.1;
            add(&mut sources, ValueOrigin::Change(change.clone()), format!("v = {value}"));
        }
        // Leading spaces move the positions in each text to the common numbering.
        let padded: Vec<String> =
            sources.iter().map(|source| " ".repeat(source.start) + &source.text).collect();
        let mut table = DeTable::new();
        for text in padded[..files].iter().rev() {
            table.remove("name");
            let own = DeTable::parse(text).map_err(|error| located_error(&sources, &error))?;
            table = merged(table, own.into_inner());
            table.remove("base");
        }
        for (source, text) in sources.iter().zip(&padded).skip(files) {
            apply(&mut table, source, text)?;
        }
        Self::of_table(table, &sources)
    }

    fn of_table(table: DeTable<'_>, sources: &[RecipeSource]) -> Result<Self, Error> {
        let mut origins = BTreeMap::new();
        collect_origins(&table, "", sources, &mut origins);
        for (section, example) in TABLES {
            if let Some(value) = table.get(section)
                && !matches!(value.get_ref(), DeValue::Table(_))
            {
                let problem = format!("{section} must be a table, e.g. {example}");
                let location = location(sources, value.span().start);
                return Err(Error::Text { location, problem });
            }
        }
        let root = || Deserializer::from(Spanned::new(0..0, table.clone()));
        let locate = |error| located_error(sources, &error);
        let spec: JobSpec = serde_path_to_error::deserialize(root()).map_err(|error| {
            let field = error.path().to_string();
            let error = error.into_inner();
            match (wrong_type(error.message()), located_error(sources, &error)) {
                (Some(problem), Error::Text { location, .. }) => {
                    Error::Text { location, problem: format!("{field}: {problem}") }
                }
                (_, other) => other,
            }
        })?;
        let set = toml::Table::deserialize(root()).map_err(locate)?;
        let is_change = |field: &str| matches!(origins.get(field), Some(ValueOrigin::Change(_)));
        let mut violations = rules::violations(&spec);
        let ignored = model::ignored(&spec).into_iter();
        violations.extend(ignored.filter(|violation| is_change(violation.field.as_ref())));
        match violations.is_empty() {
            true => Ok(Self { spec, set, origins }),
            false => Err(Error::Invalid(violations)),
        }
    }
}

fn add(sources: &mut Vec<RecipeSource>, origin: ValueOrigin, text: String) {
    let start = sources.last().map_or(0, |last: &RecipeSource| last.start + last.text.len() + 1);
    sources.push(RecipeSource { origin, text, start });
}

/// The base that the last file names, and the error for the case that it cannot be read.
fn next_base(
    sources: &[RecipeSource],
) -> Result<Option<(PathBuf, impl Fn(String) -> Error + use<>)>, Error> {
    let Some(RecipeSource { origin: ValueOrigin::File(file), text, start }) = sources.last() else {
        return Ok(None);
    };
    let table = DeTable::parse(text).map_err(|error| {
        let at = start + error.span().map_or(0, |span| span.start);
        Error::Text { location: location(sources, at), problem: one_line(error.message()) }
    })?;
    let Some(base) = table.get_ref().get("base") else { return Ok(None) };
    let location = location(sources, start + base.span().start);
    let refuse = move |problem| Error::Text { location: location.clone(), problem };
    let DeValue::String(name) = base.get_ref() else {
        return Err(refuse(
            "base must be a path from this file to another recipe, e.g. base = \"other.toml\""
                .to_owned(),
        ));
    };
    let path = file.parent().unwrap_or(Path::new("")).join(name.as_ref());
    let files = sources.iter().filter_map(|source| match &source.origin {
        ValueOrigin::File(file) => Some(file),
        ValueOrigin::Change(_) => None,
    });
    let chain = || {
        let chain: Vec<_> =
            files.clone().chain([&path]).map(|file| file.display().to_string()).collect();
        chain.join(" -> ")
    };
    if files.clone().any(|file| *file == path) {
        return Err(refuse(format!("bases form a cycle, {}: remove one base", chain())));
    }
    if sources.len() == MAX_RECIPE_FILES {
        let max = MAX_RECIPE_FILES - 1;
        return Err(refuse(format!("more than {max} bases, {}: remove some", chain())));
    }
    let name = name.to_string();
    let unreadable = move |why| {
        refuse(format!(
            "base = {name:?} cannot be read: {why}; it is a path from this file's folder"
        ))
    };
    Ok(Some((path, unreadable)))
}

/// `base` with all values that `derived` sets.
fn merged<'i>(mut base: DeTable<'i>, derived: DeTable<'i>) -> DeTable<'i> {
    for (key, value) in derived {
        let (span, new) = (value.span(), value.into_inner());
        let old = base.remove(&key).map(Spanned::into_inner);
        let value = match (old, new) {
            (Some(DeValue::Table(old)), DeValue::Table(new)) if !changes_kind(&old, &new) => {
                DeValue::Table(merged(old, new))
            }
            (_, new) => new,
        };
        base.insert(key, Spanned::new(span, value));
    }
    base
}

/// Whether `new` changes the kind of the table, so that keys of `old` may be invalid.
fn changes_kind(old: &DeTable<'_>, new: &DeTable<'_>) -> bool {
    let kind = |table: &DeTable<'_>| {
        table.get("kind").and_then(|kind| kind.get_ref().as_str().map(str::to_owned))
    };
    new.contains_key("kind") && kind(new) != kind(old)
}

/// Most sections of a changed key: more than any value has. Each is a table in the one before, and a table that is
/// thousands deep overflows the stack of a program that visits it.
const MAX_SECTIONS: usize = 16;

/// Sets one value, and replaces any old one.
fn apply<'i>(table: &mut DeTable<'i>, source: &RecipeSource, padded: &'i str) -> Result<(), Error> {
    let ValueOrigin::Change(change) = &source.origin else { return Ok(()) };
    let malformed = || Error::Override(change.clone());
    let (path, text) = change.split_once('=').ok_or_else(malformed)?;
    let span = source.start..source.start;
    // A bare word is read as a string, so that `--set cluster.device=cpu` needs no inner quotes.
    let mut parsed = match DeTable::parse(padded) {
        Ok(parsed) => parsed.into_inner(),
        Err(error) if text.trim_start().starts_with(['[', '{', '"', '\'']) => {
            return Err(Error::Text {
                location: format!("override `{change}`: "),
                problem: format!("the value is not valid TOML: {}", one_line(error.message())),
            });
        }
        Err(_) => DeTable::new(),
    };
    let value = parsed.remove("v").unwrap_or_else(|| {
        Spanned::new(span.clone(), DeValue::String(Cow::Owned(text.to_owned())))
    });
    // `text` has further lines, with keys of their own.
    if !parsed.is_empty() {
        return Err(malformed());
    }
    let (sections, leaf): (Vec<&str>, &str) = match path.rsplit_once('.') {
        Some((sections, leaf)) => (sections.split('.').collect(), leaf),
        None => (Vec::new(), path),
    };
    if sections.len() > MAX_SECTIONS {
        return Err(Error::Text {
            location: format!("override `{}…`: ", path.chars().take(40).collect::<String>()),
            problem: format!(
                "its key has {} parts, but no recipe is that deep: see docs/recipes.md for the keys",
                sections.len() + 1
            ),
        });
    }
    if path == "base" {
        return Err(Error::Text {
            location: format!("override `{change}`: "),
            problem: "base can be set only in a file: give a file that has this base".to_owned(),
        });
    }
    let key = |name: &str| Spanned::new(span.clone(), Cow::Owned(name.to_owned()));
    let mut at = table;
    for section in sections {
        if !at.contains_key(section) {
            at.insert(key(section), Spanned::new(span.clone(), DeValue::Table(DeTable::new())));
        }
        let inner = at.get_mut(section).ok_or_else(malformed)?;
        // An error in a table with a `kind` has only the position of the table, so use that of the change.
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
    sources: &[RecipeSource],
    into: &mut BTreeMap<String, ValueOrigin>,
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

fn source_at(sources: &[RecipeSource], at: usize) -> Option<&RecipeSource> {
    sources.iter().rfind(|source| source.start <= at)
}

/// The location as a prefix of an error message.
fn location(sources: &[RecipeSource], at: usize) -> String {
    let Some(source) = source_at(sources, at) else { return String::new() };
    let before = source.text.get(..at - source.start).unwrap_or(&source.text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    match &source.origin {
        // Callers add the name of the recipe's own file.
        ValueOrigin::File(_) if source.start == 0 => format!("at line {line}, column {column}: "),
        ValueOrigin::File(file) => {
            format!("in base {} at line {line}, column {column}: ", file.display())
        }
        ValueOrigin::Change(change) => format!("override `{change}`: "),
    }
}

fn located_error(sources: &[RecipeSource], error: &toml::de::Error) -> Error {
    let location = error.span().map_or(String::new(), |span| location(sources, span.start));
    Error::Text { location, problem: one_line(error.message()) }
}

/// serde's words for a value of a wrong type, in those of recipes.
fn wrong_type(message: &str) -> Option<String> {
    let (found, expected) = message.strip_prefix("invalid type: ")?.split_once(", expected ")?;
    let found = match found {
        "sequence" => "an array",
        "map" => "a table or a date",
        other => other,
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "a table",
        other if other.starts_with("struct ") => "a table",
        other => other,
    };
    Some(format!("{found} in place of {expected}"))
}

/// Joins the lines of a message, because errors are logged as one line.
fn one_line(message: &str) -> String {
    message.replace('\n', " ")
}
