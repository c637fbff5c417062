//! `baton data table`

use std::{path::PathBuf, time::Instant};

use baton_data::write::{TableField, TableOptions, write_table};
use baton_job::exit::Failure;

use super::{encoding::EncodingArgs, note_other_classes, split::SplitFiles, write_failure};
use crate::{
    commands::bar::{CommandProgress, ROWS},
    human,
    json::{self, WrittenTableFiles},
    output,
};

/// Write the columns of a CSV, TSV or Parquet file as a .beton file, and parts of its rows as others
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data table --from binding.csv --to train.beton --val val.beton --val-share 0.2 --by antigen \\
      --field 'heavy=letters(ACDEFGHIKLMNPQRSTVWY,140):heavy_chain' --field label=float:score
      sequences of amino acids of up to 140 letters with a number to predict; no antigen is in both files

  baton data table --from patients.tsv --to train.beton \\
      --field features=floats:age,weight,pulse --field label=class:diagnosis
      three numbers, and the class in text, whose names are listed in train.beton.label.classes.txt

  baton data table --from train-00000-of-00001.parquet --to train.beton \\
      --field image=image:image.bytes --field label=int
      a data set of Hugging Face

  baton data table --from photos.csv --to train.beton --val val.beton --val-share 0.1 \\
      --field image=image:file --field label=class:species --stratify label
      images in the files that a column names, a tenth of each species for validation

Kinds of fields; the column has the name of the field unless `:COLUMN` names another:
  int                      a whole number
  float                    a finite number
  class                    the position of the text among the column's texts, sorted
  text                     the text's bytes
  floats:COLUMN,COLUMN…    finite numbers, f32 of shape (columns)
  letters(ALPHABET,LENGTH) positions in the alphabet from 1 on, u8 of shape (LENGTH), 0 behind the text's end
  onehot(ALPHABET,LENGTH)  f32 of shape (letters of the alphabet, LENGTH)
  image                    the image in the file that the text names, from the table's folder on, or in the bytes of a
                           Parquet column
  array(CHANNELS,LENGTH)   the numbers in the .npy, .wav or .flac file that the text names, or in a list of a Parquet
                           column, f32 of that shape
  mel(RATE,TRANSFORM,HOP,BANDS,FRAMES)
                           the log-mel spectrogram of such a file, f32 of shape (BANDS, FRAMES), as torchaudio makes it

The first line of the table names its columns, or its Parquet schema does: image.bytes is the column `bytes` of the group
`image`. A hash decides in which file a row is, of the whole row or of its value in --by; so it does not depend on other rows,
except with --stratify. Every value is checked before a file gets its name.")]
pub(crate) struct Args {
    /// A table: a Parquet file, or text whose columns are separated by tabs if its name ends with .tsv, by commas otherwise
    #[arg(long, value_name = "TABLE")]
    from: PathBuf,
    /// A field of each sample; may be repeated
    #[arg(long = "field", value_name = "NAME=KIND[:COLUMN]", required = true)]
    fields: Vec<TableField>,
    #[command(flatten)]
    files: SplitFiles,
    /// Keep all rows with the same value in this column in the same file
    #[arg(long, value_name = "COLUMN")]
    by: Option<String>,
    /// Give each file its share of every class of this field
    #[arg(long, value_name = "NAME", conflicts_with = "by")]
    stratify: Option<String>,
    /// What to do about rows with a bad value
    #[arg(long, value_enum, default_value = "fail")]
    on_bad: BadRowPolicy,
    #[command(flatten)]
    encoding: EncodingArgs,
    /// Print one JSON object at the end, and nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum BadRowPolicy {
    /// Stop at the first one; nothing is written
    Fail,
    /// Leave them out, and report their number and the first ones
    Skip,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let as_json = args.json;
    let options = TableOptions {
        from: args.from,
        fields: args.fields,
        others: args.files.others(),
        to: args.files.to,
        by: args.by,
        stratify: args.stratify,
        encoding: args.encoding.encoding(),
        threads: args.encoding.threads(),
        skips_bad_rows: args.on_bad == BadRowPolicy::Skip,
    };
    let start = Instant::now();
    let mut progress = CommandProgress::new(ROWS, 0, as_json);
    let written = write_table(&options, |done, total| {
        if let Some(total) = total {
            progress.bar.set_length(total);
        }
        if progress.is_line_due(done) {
            output::note(format_args!("{} rows read", human::grouped(done)));
        }
    });
    progress.finish();
    let written = written.map_err(write_failure)?;
    written.other_classes.iter().for_each(|path| note_other_classes(path));
    let data = WrittenTableFiles::new(written, start.elapsed().as_secs_f64());
    json::print(as_json, &data, text);
    Ok(())
}

fn text(data: &WrittenTableFiles) -> String {
    let mut lines: Vec<String> = data
        .files
        .iter()
        .map(|file| {
            let (samples, bytes) = (human::count(file.samples, "sample"), human::bytes(file.bytes));
            format!("{}: {samples}, {bytes}", file.path)
        })
        .collect();
    lines.extend(
        data.classes
            .iter()
            .map(|classes| format!("classes of {}: {}", classes.field, classes.path)),
    );
    lines.extend(data.first_skipped.iter().map(|why| format!("skipped: {why}")));
    if data.skipped > 0 {
        lines.push(format!("skipped {}", human::count(data.skipped, "bad row")));
    }
    lines.join("\n")
}
