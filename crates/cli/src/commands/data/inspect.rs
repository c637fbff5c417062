//! `baton data inspect`

use std::{
    fmt::Write,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use baton_data::{
    statistics::{FieldStatistics, ValueStatistics, statistics},
    survey::{FieldSurvey, Sizes, Survey, Values},
};
use baton_job::exit::Failure;
use baton_text::{TokenFile, Tokenizer};

use super::{failure, open, text_failure};
use crate::{
    clean,
    commands::bar::{SAMPLES, bar},
    human,
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
  baton data inspect --values train.beton
      data.mean and data.std of the recipe, and how many samples each class has
  baton data inspect train.beton --tokenizer SmolLM2-135M-Instruct --show 3
      the first 3 samples that `baton data tokenize` wrote, as text; what the loss does not count is
      dim on a terminal, and in \u{27e6}brackets\u{27e7} elsewhere

Without --values and --tokenizer, reads only the rows and the allocation table, so it is fast for any size of file. To check every
image, use `baton data verify`.")]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Also decode every image and count every class, and show the settings of a recipe that follow
    #[arg(long)]
    values: bool,
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
    let beton = open(&args.file)?;
    let survey = Survey::of(&beton).map_err(failure)?;
    let texts = args.tokenizer.as_ref().map(|tokenizer| texts(args, tokenizer)).transpose()?;
    let values = args.values.then(|| {
        let bar = bar(SAMPLES, beton.len());
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let found = statistics(&beton, threads, |samples| bar.inc(samples));
        bar.finish_and_clear();
        found.map_err(failure)
    });
    let inspected = InspectedData { survey, values: values.transpose()?, texts };
    if args.json {
        output::line(json::line(&inspected));
        return Ok(());
    }
    output::line(text(&inspected.survey).trim_end());
    for field in inspected.values.iter().flatten() {
        output::line(value_lines(field));
    }
    for sample in inspected.texts.iter().flatten() {
        output::painted(painted(sample, Paint::detect()));
    }
    Ok(())
}

/// Most classes whose counts are shown.
const MAX_SHOWN_CLASSES: usize = 1_000;

/// The statistics of a field, with the settings that follow.
fn value_lines(field: &FieldStatistics) -> String {
    let numbers = |values: &[f64], digits: usize| {
        let values: Vec<String> = values.iter().map(|value| format!("{value:.digits$}")).collect();
        values.join(", ")
    };
    let name = &field.name;
    match &field.values {
        ValueStatistics::Pixels { mean, std } => {
            let deviations = match std.iter().all(|std| *std >= 0.001) {
                true => format!("data.std = [{}]", numbers(std, 3)),
                false => "one channel is the same everywhere, and has no data.std".to_owned(),
            };
            let mean = numbers(mean, 3);
            format!("\npixels of {name}, for a recipe:\n  data.mean = [{mean}]\n  {deviations}")
        }
        ValueStatistics::Classes { class_counts, class_weights } => {
            let mut text = format!("\nclasses of {name}:");
            for (class, count) in class_counts.iter().enumerate().take(MAX_SHOWN_CLASSES) {
                // Writing to a string never fails.
                let _ = write!(text, "\n  {class}: {}", human::count(*count, "sample"));
            }
            if class_counts.len() > MAX_SHOWN_CLASSES {
                text.push_str("\n  and more: --json has all");
            }
            match class_weights {
                None => text.push_str("\n  a class has no samples, so there are no weights"),
                Some(weights) if weights.len() <= MAX_SHOWN_CLASSES => {
                    let _ = write!(
                        text,
                        "\n  so that all classes count the same, in a recipe:\n  loss.class_weights = [{}]",
                        numbers(weights, 6)
                    );
                }
                Some(_) => {}
            }
            text
        }
    }
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
