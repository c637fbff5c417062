//! Files of JSON lines → a `.beton` file of tokens, or one for training and one for validation.
//!
//! The files are read twice: to count the samples of each set, since a `.beton` file begins with a table of them, and to
//! encode them. Threads encode a group of lines at a time; the results are written in the order of the lines, so the
//! same input gives the same bytes.

mod count;
mod group;
mod statistics;

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use baton_data::write::{FinishedFile, MAX_TEXT_TOKENS, TextWriter};

pub use self::statistics::{LengthBin, TokenSetSize};
use self::{count::SampleCounts, group::LineGroups, statistics::TokenStatistics};
use crate::{
    ChatTemplate, EncodedSample, Encoder, Error, LossTokens, Tokenizer,
    samples::{LineKeys, TextFormat, parse},
    split::{SampleSet, SampleSplit},
};

/// What to tokenize, and how.
#[derive(Clone, Debug)]
pub struct TokenizeOptions {
    /// Files of JSON lines, in the order of the samples.
    pub from: Vec<PathBuf>,
    /// The file to be written.
    pub to: PathBuf,
    /// Samples for validation.
    pub val: Option<ValSet>,
    /// Format of all files; `None`: that of the first line of each file that has one.
    pub format: Option<TextFormat>,
    /// Where the chat template is from.
    pub template: TemplateSource,
    /// Which tokens the loss counts.
    pub loss: LossTokens,
    /// Maximum number of tokens of a sample, 2 to [`MAX_TEXT_TOKENS`].
    pub sequence: u32,
    /// What to do about lines that cannot be used.
    pub on_bad: OnBadLine,
    /// Number of threads.
    pub threads: NonZeroUsize,
}

/// A second file, of samples for validation, which are not in the first one.
#[derive(Clone, Debug)]
pub struct ValSet {
    /// The file to be written.
    pub to: PathBuf,
    /// Share of the samples, above 0 and below 1.
    pub share: f64,
    /// Key of a line: all lines with the same value are in the same set. `None`: the whole line.
    pub by: Option<String>,
}

/// Where a chat template is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateSource {
    /// The model folder, if it has one.
    Model,
    /// A file.
    File(PathBuf),
    /// There is none: prompts and completions are plain texts.
    Nothing,
}

impl TemplateSource {
    /// The chat template, and its file.
    ///
    /// # Errors
    /// It cannot be read, or is not valid Jinja.
    pub fn load(&self, tokenizer: &Tokenizer) -> Result<Option<(ChatTemplate, PathBuf)>, Error> {
        let (text, path) = match self {
            Self::Nothing => return Ok(None),
            Self::Model => match tokenizer.chat_template() {
                Some((text, path)) => (text.to_owned(), path.to_owned()),
                None => return Ok(None),
            },
            Self::File(path) => {
                (fs::read_to_string(path).map_err(Error::io("read", path))?, path.clone())
            }
        };
        let name = path.display().to_string();
        let template = ChatTemplate::new(&text, name, tokenizer.special_texts())?;
        Ok(Some((template, path)))
    }
}

/// What to do about a line that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBadLine {
    /// Stop; nothing is written.
    Fail,
    /// Leave it out.
    Skip,
}

/// What has happened.
#[derive(Debug)]
pub enum TokenizeEvent<'a> {
    /// The lines have been counted.
    Counted {
        /// Number of lines.
        lines: u64,
    },
    /// Lines have been encoded, or left out.
    Encoded {
        /// Number of lines.
        lines: u64,
    },
    /// A line has been left out.
    Skipped(&'a Error),
}

/// What has been written.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizedText {
    /// The file for training.
    pub train: TokenSetSize,
    /// The file for validation.
    pub val: Option<TokenSetSize>,
    /// Number of lines left out.
    pub skipped: u64,
    /// Formats of the files.
    pub formats: Vec<TextFormat>,
    /// The file of the chat template, if one was used.
    pub template: Option<PathBuf>,
    /// The token with which the template ends a message, if it does not end a generated text by the model's files.
    pub unknown_end: Option<String>,
}

/// Tokenizes files. `progress` is called for what happens.
///
/// # Errors
/// An option is invalid; a file cannot be read, or has a line that cannot be used; a set would be empty; a file cannot be
/// written. Files of an earlier run are then unchanged, except that the training set may be new and the validation set
/// old, if the latter cannot be written.
pub fn tokenize(
    tokenizer: &Tokenizer,
    options: &TokenizeOptions,
    progress: &mut dyn FnMut(TokenizeEvent<'_>),
) -> Result<TokenizedText, Error> {
    check(options)?;
    let (template, template_path) = options.template.load(tokenizer)?.unzip();
    let encoder = Encoder::new(tokenizer, template, options.loss, options.sequence as usize);
    let split = options.val.as_ref().map(|val| SampleSplit::new(val.share, val.by.clone()));
    let counts = SampleCounts::of(options, split.as_ref())?;
    for format in &counts.formats {
        encoder.check(*format)?;
    }
    progress(TokenizeEvent::Counted { lines: counts.lines });

    let mut train = TokenSet::create(&options.to, counts.train, options.sequence)?;
    let mut val = match &options.val {
        Some(val) => Some(TokenSet::create(&val.to, counts.val, options.sequence)?),
        None => None,
    };
    let mut skipped = 0;
    let mut first_skipped = None;
    // Of the first sample that is whole: all have the same template.
    let mut unknown_end = template_path.is_none().then_some(None);
    let encode = |line: &str, format| {
        let keys = LineKeys::read(line, split.as_ref().and_then(SampleSplit::by))?;
        keys.require(format)?;
        let set = split.as_ref().map_or(Ok(SampleSet::Train), |split| split.set(line, &keys))?;
        let sample = encoder.encode(&parse(line, format)?).map_err(group::fault)?;
        Ok((set, sample))
    };
    let mut groups = LineGroups::new(&options.from, &counts.formats);
    while let Some(lines) = groups.next()? {
        for result in group::map(&lines, options.threads, &encode)? {
            if let Ok((_, sample)) = &result
                && sample.whole_tokens == sample.tokens.len()
            {
                unknown_end.get_or_insert_with(|| tokenizer.unknown_end(sample));
            }
            match result {
                Ok((SampleSet::Train, sample)) => train.push(&sample)?,
                Ok((SampleSet::Val, sample)) => {
                    if let Some(val) = &mut val {
                        val.push(&sample)?;
                    }
                }
                Err(error) if options.on_bad == OnBadLine::Skip => {
                    progress(TokenizeEvent::Skipped(&error));
                    skipped += 1;
                    first_skipped.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        progress(TokenizeEvent::Encoded { lines: lines.len() as u64 });
    }
    for set in [Some(&train), val.as_ref()].into_iter().flatten() {
        set.require_samples(first_skipped.as_ref())?;
    }
    let mut finished = TokenSet::finish_all([Some(train), val].into_iter().flatten())?.into_iter();
    let Some(train) = finished.next() else {
        return Err(Error::Option("there is no file to write".to_owned()));
    };
    Ok(TokenizedText {
        train,
        val: finished.next(),
        skipped,
        formats: counts.formats,
        template: template_path,
        unknown_end: unknown_end.flatten(),
    })
}

fn check(options: &TokenizeOptions) -> Result<(), Error> {
    let refused = |reason: String| Err(Error::Option(reason));
    if !(2..=MAX_TEXT_TOKENS).contains(&options.sequence) {
        return refused(format!(
            "--sequence {}: must be 2 to {MAX_TEXT_TOKENS} tokens",
            options.sequence
        ));
    }
    if options.from.is_empty() {
        return refused("no file to read: give one with --from FILE".to_owned());
    }
    let targets: Vec<&Path> =
        [Some(options.to.as_path()), options.val.as_ref().map(|val| val.to.as_path())]
            .into_iter()
            .flatten()
            .collect();
    if let Some(val) = &options.val
        && !(val.share > 0.0 && val.share < 1.0)
    {
        return refused(format!("--val-share {}: must be above 0 and below 1", val.share));
    }
    if let [train, val] = targets[..]
        && is_same_file(train, val)
    {
        return refused(format!(
            "{} is to be both training and validation set: give two files",
            train.display()
        ));
    }
    for target in targets {
        if options.from.iter().any(|from| is_same_file(from, target)) {
            return refused(format!(
                "{} is read, so it cannot be written: give another file",
                target.display()
            ));
        }
    }
    Ok(())
}

/// Whether two paths name the same file, which need not exist.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let resolved = |path: &Path| -> Option<PathBuf> {
        let folder =
            path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        fs::canonicalize(path)
            .ok()
            .or_else(|| Some(fs::canonicalize(folder).ok()?.join(path.file_name()?)))
    };
    a == b || resolved(a).is_some_and(|a| Some(a) == resolved(b))
}

/// A file being written, and its statistics.
struct TokenSet {
    writer: TextWriter,
    statistics: TokenStatistics,
    path: PathBuf,
}

impl TokenSet {
    fn create(path: &Path, samples: u64, sequence: u32) -> Result<Self, Error> {
        let writer = TextWriter::create(path, samples)?;
        Ok(Self { writer, statistics: TokenStatistics::new(sequence), path: path.to_owned() })
    }

    fn push(&mut self, sample: &EncodedSample) -> Result<(), Error> {
        self.writer.push(&sample.tokens, &sample.labels)?;
        self.statistics.add(sample);
        Ok(())
    }

    fn require_samples(&self, first_skipped: Option<&Error>) -> Result<(), Error> {
        if self.statistics.samples() > 0 {
            return Ok(());
        }
        let cause = match first_skipped {
            Some(error) => format!("lines were skipped, the first one because of: {error}"),
            None => "change --val-share, or --by if there are only a few values".to_owned(),
        };
        Err(Error::Option(format!("{} would have no samples: {cause}", self.path.display())))
    }

    fn finish_all(sets: impl Iterator<Item = Self>) -> Result<Vec<TokenSetSize>, Error> {
        let (writers, rest): (Vec<_>, Vec<_>) =
            sets.map(|set| (set.writer, (set.statistics, set.path))).unzip();
        let finished = TextWriter::finish_all(writers)?.into_iter().zip(rest);
        let size = |(finished, (statistics, path)): (FinishedFile, (TokenStatistics, PathBuf))| {
            statistics.finished(path, finished.bytes)
        };
        Ok(finished.map(size).collect())
    }
}
