//! `baton data inspect`

use std::{fmt::Write, path::PathBuf};

use baton_data::{
    Beton,
    survey::{FieldSurvey, Sizes, Survey, Values},
};
use baton_job::exit::Failure;

use super::failure;
use crate::{human, json};

/// Show what is in a .beton file: fields, sizes, modes and resolutions
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data inspect train.beton
  baton data inspect --json train.beton | jq .samples

Reads only the rows and the allocation table, so it is fast for any size of file. To check every
image, use `baton data verify`.")]
pub(crate) struct Args {
    /// The file
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let survey = Beton::open(&args.file).and_then(|beton| Survey::of(&beton)).map_err(failure)?;
    json::print(args.json, &survey, |survey| text(survey).trim_end().to_owned());
    Ok(())
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
