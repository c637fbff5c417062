//! `baton data tokenize`

use std::{num::NonZeroUsize, path::PathBuf, time::Instant};

use baton_data::write::MAX_TEXT_TOKENS;
use baton_job::exit::Failure;
use baton_text::{
    LengthBin, LossTokens, OnBadLine, TemplateSource, TextFormat, TokenSetSize, TokenizeEvent,
    TokenizeOptions, TokenizedText, Tokenizer, ValSet, tokenize,
};

use super::{share, text_failure};
use crate::{
    commands::{
        bar::{CommandProgress, SAMPLES},
        threads,
    },
    human,
    json::{self, TokenizedData},
    output,
};

/// Turn instruction data or plain text into a .beton file of tokens, to train a language model on
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data tokenize --from train.jsonl --tokenizer SmolLM2-135M-Instruct --to train.beton
      the folder of a model from Hugging Face: tokenizer.json, tokenizer_config.json and, if it is
      there, chat_template.jinja

  baton data tokenize --from all.jsonl --tokenizer MODEL --to train.beton \\
      --val val.beton --val-share 0.1 --by module
      a tenth of the modules is for validation; no module is in both files

  baton data tokenize --from book.jsonl --tokenizer MODEL --to book.beton --sequence 2048
      plain text: {\"text\": \"...\"}; texts above 2048 tokens are cut, and counted

  baton data inspect train.beton --tokenizer MODEL --show 3
      shows the result: three samples as text

Formats, one JSON object per line; other keys are ignored:
  {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, {\"role\": \"assistant\", \"content\": \"...\"}]}
  {\"conversations\": [{\"from\": \"human\", \"value\": \"...\"}, {\"from\": \"gpt\", \"value\": \"...\"}]}
  {\"prompt\": \"...\", \"completion\": \"...\"}
  {\"instruction\": \"...\", \"input\": \"...\", \"output\": \"...\"}
  {\"text\": \"...\"}

Conversations are written by the model's chat template. So are prompts and instructions, as a
message of the user and one of the assistant; with --template none, or if the model has no
template, they are plain text (an instruction in Alpaca's prompt) that ends with the end-of-text
token.

The loss counts the assistant's messages with the end of their turns, or completions, or all of a
plain text. The same command writes the same bytes with any number of threads.")]
pub(crate) struct Args {
    /// Files of JSON lines, in the order of the samples; may be repeated
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    from: Vec<PathBuf>,
    /// Folder of the model that is to be trained, with its tokenizer.json
    #[arg(long, value_name = "MODEL_FOLDER")]
    tokenizer: PathBuf,
    /// File to write; an existing file is replaced at the end
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Maximum number of tokens of a sample; what is beyond is cut off and counted
    #[arg(long, value_name = "TOKENS", default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(2..=i64::from(MAX_TEXT_TOKENS)))]
    sequence: u32,
    /// Format of all files [default: by the keys of the first line of each that is not skipped]
    #[arg(long, value_enum)]
    format: Option<FormatName>,
    /// A Jinja file to use as chat template, or `none` [default: the model's]
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Which tokens the loss counts
    #[arg(long, value_enum, default_value = "completions")]
    loss: LossName,
    /// What to do about lines that cannot be used
    #[arg(long, value_enum, default_value = "fail")]
    on_bad: BadLinePolicy,
    /// A second file, for a share of the samples, which are then not in the first
    #[arg(long, value_name = "FILE", requires = "val_share")]
    val: Option<PathBuf>,
    /// Share of the samples for the second file, between 0 and 1
    #[arg(long, value_name = "SHARE", requires = "val", value_parser = share)]
    val_share: Option<f64>,
    /// Keep all lines with the same value of this key in the same file [default: lines with the same text]
    #[arg(long, value_name = "KEY", requires = "val")]
    by: Option<String>,
    /// Number of threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<NonZeroUsize>,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FormatName {
    /// "messages" with roles
    Messages,
    /// "conversations" from human and gpt
    Sharegpt,
    /// "prompt" and "completion"
    PromptCompletion,
    /// "instruction", "input" and "output"
    Alpaca,
    /// "text"
    Text,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LossName {
    /// Those that the model writes
    Completions,
    /// All
    All,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum BadLinePolicy {
    /// Stop at the first one; nothing is written
    Fail,
    /// Leave them out, and report their number and the first ones
    Skip,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let options = options(args);
    let tokenizer = Tokenizer::load(&args.tokenizer).map_err(text_failure)?;
    let start = Instant::now();
    let mut reporter = TokenizeReporter::new(args.json);
    let tokenized =
        tokenize(&tokenizer, &options, &mut |event: TokenizeEvent<'_>| reporter.show(event));
    let TokenizeReporter { progress, shown, .. } = reporter;
    progress.finish();
    let tokenized = tokenized.map_err(text_failure)?;
    let data = TokenizedData::new(&tokenized, &tokenizer, shown, start.elapsed().as_secs_f64());
    json::print(args.json, &data, |data| text(data, &tokenized));
    Ok(())
}

fn options(args: &Args) -> TokenizeOptions {
    let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let val = args.val.clone().zip(args.val_share);
    TokenizeOptions {
        from: args.from.clone(),
        to: args.to.clone(),
        val: val.map(|(to, share)| ValSet { to, share, by: args.by.clone() }),
        format: args.format.map(|format| match format {
            FormatName::Messages => TextFormat::Messages,
            FormatName::Sharegpt => TextFormat::ShareGpt,
            FormatName::PromptCompletion => TextFormat::PromptCompletion,
            FormatName::Alpaca => TextFormat::Alpaca,
            FormatName::Text => TextFormat::Text,
        }),
        template: match &args.template {
            None => TemplateSource::Model,
            Some(none) if none.as_os_str() == "none" => TemplateSource::Nothing,
            Some(path) => TemplateSource::File(path.clone()),
        },
        loss: match args.loss {
            LossName::Completions => LossTokens::Completions,
            LossName::All => LossTokens::All,
        },
        sequence: args.sequence,
        on_bad: match args.on_bad {
            BadLinePolicy::Fail => OnBadLine::Fail,
            BadLinePolicy::Skip => OnBadLine::Skip,
        },
        threads: args.threads.unwrap_or_else(cores),
    }
}

/// Maximum number of bad lines that are listed.
const MAX_SHOWN_SKIPPED: usize = 10;

/// Shows progress on standard error; the result goes to standard output.
struct TokenizeReporter {
    progress: CommandProgress,
    is_quiet: bool,
    done: u64,
    lines: u64,
    /// The first bad lines.
    shown: Vec<String>,
}

impl TokenizeReporter {
    fn new(is_quiet: bool) -> Self {
        let progress = CommandProgress::new(SAMPLES, 0, is_quiet);
        Self { progress, is_quiet, done: 0, lines: 0, shown: Vec::new() }
    }

    fn show(&mut self, event: TokenizeEvent<'_>) {
        match event {
            TokenizeEvent::Counted { lines } => {
                self.lines = lines;
                self.progress.bar.set_length(lines);
            }
            TokenizeEvent::Encoded { lines } => {
                self.done += lines;
                if self.progress.is_line_due(self.done) {
                    output::note(format_args!("{}/{} samples", self.done, self.lines));
                }
            }
            TokenizeEvent::Skipped(error) if self.shown.len() < MAX_SHOWN_SKIPPED => {
                if !self.is_quiet {
                    self.progress.note(format_args!("skipped: {error}"));
                }
                self.shown.push(error.to_string());
            }
            TokenizeEvent::Skipped(_) => {}
        }
    }
}

/// The result as text.
fn text(data: &TokenizedData, tokenized: &TokenizedText) -> String {
    let mut lines: Vec<String> = [Some(&tokenized.train), tokenized.val.as_ref()]
        .into_iter()
        .flatten()
        .flat_map(set)
        .collect();
    if data.skipped > 0 {
        let left_out = human::count(data.skipped, "bad line");
        let listed = data.first_skipped.len();
        let shown = if listed as u64 == data.skipped {
            String::new()
        } else {
            format!("; the first {listed} are listed above")
        };
        lines.push(format!("skipped {left_out}{shown}"));
    }
    let template = match &data.template {
        Some(template) => format!("chat template {template}"),
        None => "no chat template".to_owned(),
    };
    lines.push(format!(
        "{template}; the vocabulary has {} tokens; {}",
        human::grouped(data.vocab_size.into()),
        human::duration(data.seconds)
    ));
    if let Some(end) = &data.unknown_end {
        lines.push(format!(
            "note: messages end with {end}, but generated texts do not by the model's files, and would go on after it: add its \
             id to eos_token_id in the model's generation_config.json"
        ));
    }
    lines.join("\n")
}

/// Numbers of one file.
fn set(size: &TokenSetSize) -> Vec<String> {
    let share = |part: u64, whole: u64| human::percent(part as f64 / whole.max(1) as f64);
    let mut lines = vec![
        format!(
            "{}: {}, {}",
            size.path.display(),
            human::count(size.samples, "sample"),
            human::bytes(size.bytes)
        ),
        format!("  tokens     {:>15}", human::grouped(size.tokens)),
        format!(
            "  predicted  {:>15}  {}",
            human::grouped(size.predicted),
            share(size.predicted, size.tokens)
        ),
        format!(
            "  truncated  {:>15}  {} of the samples; {} tokens cut off",
            human::grouped(size.truncated),
            share(size.truncated, size.samples),
            human::grouped(size.tokens_cut)
        ),
        format!("  longest    {:>15}  before it was cut", human::grouped(size.longest)),
    ];
    let most = size.lengths.iter().map(|bin| bin.samples).max().unwrap_or(1).max(1);
    let is_used = |bin: &&LengthBin| bin.samples > 0;
    let first = size.lengths.iter().position(|bin| is_used(&bin)).unwrap_or_default();
    let end = size.lengths.iter().rposition(|bin| is_used(&bin)).map_or(0, |last| last + 1);
    for bin in size.lengths.get(first..end).unwrap_or_default() {
        let bar = "#".repeat((40 * bin.samples).div_ceil(most) as usize);
        lines.push(
            format!("  up to {:>6} tokens: {:>9} {bar}", bin.up_to, bin.samples)
                .trim_end()
                .to_owned(),
        );
    }
    lines
}
