//! `baton recipe import`

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;
use baton_recipe::JobSpec;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{about, ffcv};
use crate::{failure::bad_input, json};

/// Turn a configuration of ffcv-imagenet into a recipe
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton recipe import rn50_configs/rn50_88_epochs.yaml --to rn50.toml
  baton recipe import rn50_88_epochs.yaml --to rn50.toml -- --data.train_dataset=/ssd/train.ffcv \\
      --data.val_dataset=/ssd/val.ffcv --training.epochs=40

What is not given is as in its train_imagenet.py. Files that FFCV wrote are read as they are. The learning rate, the
resolutions and the pixels are FFCV's; crops, flips and the order are repeatable here, and other ones.")]
pub(crate) struct Args {
    /// Configuration: a YAML file of rn18_configs or rn50_configs, or one like them
    #[arg(value_name = "FILE")]
    config: PathBuf,
    /// File to write [default: standard output]
    #[arg(long, value_name = "RECIPE")]
    to: Option<PathBuf>,
    /// Print one JSON object: the recipe as TOML, and the notes
    #[arg(long)]
    json: bool,
    /// Arguments of its script: --SECTION.KEY=VALUE
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

#[derive(Serialize)]
struct ImportedRecipe {
    toml: String,
    /// The file that was written.
    path: Option<PathBuf>,
    notes: Vec<String>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.config;
    let text = super::text(path).map_err(|error| about(path, error))?;
    let mut config: Map<String, Value> = serde_saphyr::from_str(&text).map_err(|error| {
        let error = error.to_string();
        about(
            path,
            format!(
                "is no configuration in YAML: {}",
                error.lines().next().unwrap_or_default().trim_start_matches("error: ")
            ),
        )
    })?;
    ffcv::apply(&mut config, &args.arguments).map_err(bad_input)?;
    let imported = ffcv::import(&name(path), config).map_err(|error| about(path, error))?;
    let comments = imported.notes.iter().map(|note| format!("# {note}\n"));
    let toml = format!(
        "# Imported from {} of ffcv-imagenet.\n{}\n{}",
        path.file_name().unwrap_or_default().display(),
        comments.collect::<String>(),
        imported.recipe
    );
    JobSpec::from_toml(&toml, &[]).map_err(|error| about(path, error))?;
    if let Some(to) = &args.to {
        let written = File::create_new(to).and_then(|mut file| file.write_all(toml.as_bytes()));
        written.map_err(|error| {
            bad_input(format!("{}: {error}; give another file with --to", to.display()))
        })?;
    }
    let answer = ImportedRecipe { toml, path: args.to.clone(), notes: imported.notes };
    json::print(args.json, &answer, summary);
    Ok(())
}

fn summary(ImportedRecipe { toml, path, notes }: &ImportedRecipe) -> String {
    let Some(path) = path else { return toml.trim_end().to_owned() };
    let notes: String = notes.iter().map(|note| format!("\n  {note}")).collect();
    format!("wrote {}{notes}", path.display())
}

/// The name of the job: that of the file, without letters that a run folder does not have.
fn name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    stem.chars().map(|letter| if is_plain(letter) { letter } else { '_' }).collect()
}
