//! `baton data inspect`

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use baton_data::survey::{FieldSurvey, Sizes, Survey, Values};
use baton_job::exit::Failure;
use baton_text::{TokenFile, Tokenizer};

use super::{failure, open, text_failure};
use crate::{
    clean, human,
    json::{self, InspectedData, SamplePart, SampleText},
    output,
    render::Paint,
};

/// Show what is in a .beton file: fields, sizes, modes and resolutions
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data inspect train.beton
  baton data inspect --json train.beton | jq .samples
  baton data inspect train.beton --tokenizer SmolLM2-135M-Instruct --show 3
      the first 3 samples that `baton data tokenize` wrote, as text; what the loss does not count is
      dim on a terminal, and in \u{27e6}brackets\u{27e7} elsewhere

Without --tokenizer, reads only the rows and the allocation table, so it is fast for any size of file. To check every
image, use `baton data verify`.")]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Show samples of tokens as text, with the tokenizer in this folder
    #[arg(long, value_name = "MODEL_FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Number of samples to show
    #[arg(long, value_name = "N", requires = "tokenizer", default_value_t = 1)]
    show: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let survey = Survey::of(&open(&args.file)?).map_err(failure)?;
    let texts = args.tokenizer.as_ref().map(|tokenizer| texts(args, tokenizer)).transpose()?;
    let inspected = InspectedData { survey, texts };
    if args.json {
        output::line(json::line(&inspected));
        return Ok(());
    }
    output::line(text(&inspected.survey).trim_end());
    for sample in inspected.texts.iter().flatten() {
        output::painted(painted(sample, Paint::detect()));
    }
    Ok(())
}

/// The first samples as text.
fn texts(args: &Args, tokenizer: &Path) -> Result<Vec<SampleText>, Failure> {
    let tokenizer = Tokenizer::load(tokenizer).map_err(text_failure)?;
    let file = TokenFile::open(&args.file).map_err(text_failure)?;
    let one = |number| {
        let sample = file.sample(number)?;
        let parts = sample.parts(&tokenizer)?;
        let parts = parts.into_iter().map(|part| SamplePart { text: part.text, loss: part.counts });
        Ok(SampleText {
            sample: number,
            tokens: sample.tokens.len() as u64,
            predicted: sample.predicted(),
            parts: parts.collect(),
        })
    };
    (0..file.beton().len().min(args.show)).map(one).collect::<Result<_, _>>().map_err(text_failure)
}

/// A sample for a terminal, or with brackets.
fn painted(sample: &SampleText, paint: Paint) -> String {
    let parts = sample.parts.iter().map(|part| {
        let text = clean::lines(&part.text);
        match (part.loss, paint) {
            (true, _) => text.into_owned(),
            (false, Paint::Colours) => paint.dim(&text),
            (false, Paint::Plain) => format!("\u{27e6}{text}\u{27e7}"),
        }
    });
    let parts: String = parts.collect();
    format!(
        "\nsample {}: {}, {} predicted\n{parts}",
        sample.sample,
        human::count(sample.tokens, "token"),
        sample.predicted
    )
}

/// The survey as text.
fn text(survey: &Survey) -> String {
    let mut text = format!(
        "{} in {}, {} of {}\n",
        human::count(survey.samples, "sample"),
        human::bytes(survey.file_bytes),
        human::count(survey.pages, "page"),
        human::bytes(survey.page_bytes.into()),
    );
    for field in &survey.fields {
        let FieldSurvey { name, kind, values } = field;
        // Writing to a string never fails.
        let _ = writeln!(text, "\n{name}  {kind}");
        for line in lines(values) {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

fn lines(values: &Values) -> Vec<String> {
    match values {
        Values::Ints { least: Some(least), most: Some(most), distinct } => {
            let distinct = match distinct {
                Some(number) => format!("{number} different"),
                None => "more than 1000 different".to_owned(),
            };
            vec![format!("{least} to {most}, {distinct}")]
        }
        Values::Floats { least, most, mean, deviation, not_finite } => {
            let mut lines = Vec::new();
            if let (Some(least), Some(most), Some(mean), Some(deviation)) =
                (least, most, mean, deviation)
            {
                let [least, most, mean, deviation] =
                    [least, most, mean, deviation].map(|value| human::number(*value));
                lines.push(format!(
                    "{least} to {most}, mean {mean}, standard deviation {deviation}"
                ));
            }
            if *not_finite > 0 {
                lines.push(format!("{not_finite} not finite: `baton data verify` lists them"));
            }
            if lines.is_empty() { vec!["no values".to_owned()] } else { lines }
        }
        Values::Ints { .. } => vec!["no values".to_owned()],
        Values::Bytes { bytes } => vec![stored(bytes)],
        Values::Arrays { shape: Some(shape), dtype: Some(dtype) } => {
            vec![format!("shape {shape:?}, dtype {dtype}")]
        }
        Values::Arrays { .. } => {
            vec!["its shape and dtype cannot be read; `baton data verify` shows why".to_owned()]
        }
        Values::Images { jpeg, raw, broken, bytes, width, height, longer_side } => {
            let mut lines = vec![format!("{jpeg} JPEG, {raw} raw"), stored(bytes)];
            if *broken > 0 {
                lines.push(format!("{broken} broken: `baton data verify` lists them"));
            }
            lines.push(format!(
                "{} to {} pixels wide, {} to {} high; mean {:.0} x {:.0}",
                width.least,
                width.most,
                height.least,
                height.most,
                width.mean(),
                height.mean()
            ));
            let most = longer_side.values().copied().max().unwrap_or(1);
            for (side, count) in longer_side {
                let bar = "#".repeat((40 * count).div_ceil(most) as usize);
                lines.push(format!("longer side from {side:>5}: {count:>9} {bar}"));
            }
            lines
        }
    }
}

fn stored(bytes: &Sizes) -> String {
    format!(
        "{} in total; {} to {}, mean {}",
        human::bytes(bytes.total),
        human::bytes(bytes.least),
        human::bytes(bytes.most),
        human::bytes(bytes.mean() as u64)
    )
}
