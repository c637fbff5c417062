//! `baton data verify`

use std::{
    collections::HashSet,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use baton_data::verify::Verifier;
use baton_job::exit::Failure;

use super::{failure, open};
use crate::{
    commands::{
        bar::{SAMPLES, bar},
        threads,
    },
    failure::bad_input,
    human, json, output,
};

/// Maximum number of faults shown without --all.
const MAX_SHOWN_FAULTS: usize = 20;

/// Read every value of every sample, decode every image, and list what is bad
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton data verify train.beton
  baton data verify --all --json train-*.beton

A number that is NaN, infinite or out of the range of f32 is bad in every field, because training cannot use it.
Exit code 0 if nothing is bad, 2 otherwise. To train on the good samples, set
data.on_bad_sample = \"skip\" in the recipe.")]
pub(crate) struct Args {
    /// Files to verify
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Decoding threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<NonZeroUsize>,
    /// List every bad sample, not just the first 20
    #[arg(long)]
    all: bool,
    /// Print one JSON object per file
    #[arg(long)]
    json: bool,
}

/// The result for one file.
#[derive(Debug, serde::Serialize)]
struct VerifiedFile {
    file: String,
    samples: u64,
    bad: u64,
    faults: Vec<String>,
    /// Why nothing of it can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl VerifiedFile {
    fn unreadable(path: &Path, error: &Failure) -> Self {
        let (file, error) = (path.display().to_string(), Some(error.message.clone()));
        Self { file, samples: 0, bad: 0, faults: Vec::new(), error }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut bad = 0;
    let mut unreadable: Vec<Failure> = Vec::new();
    for path in &args.files {
        let verified = match verify(path, args) {
            Ok(verified) => verified,
            // Of many shards, the others may be damaged too.
            Err(error) => {
                if args.json {
                    output::line(json::line(&VerifiedFile::unreadable(path, &error)));
                } else if args.files.len() > 1 {
                    output::line(&error.message);
                }
                unreadable.push(error);
                continue;
            }
        };
        bad += verified.bad;
        if args.json {
            output::line(json::line(&verified));
            continue;
        }
        for fault in &verified.faults {
            output::line(fault);
        }
        let left_out = verified.bad - verified.faults.len() as u64;
        if left_out > 0 {
            output::line(format_args!("and {left_out} more; --all lists them"));
        }
        let samples = human::count(verified.samples, "sample");
        output::line(match verified.bad {
            0 => format!("{}: {samples}, no faults", verified.file),
            bad => format!("{}: {samples}, {}", verified.file, human::count(bad, "fault")),
        });
    }
    if let Some(first) = unreadable.first() {
        let number = human::count(unreadable.len() as u64, "file");
        return Err(match args.files.len() {
            1 => first.clone(),
            _ => bad_input(format!("{number} cannot be read, the first: {}", first.message)),
        });
    }
    match bad {
        0 => Ok(()),
        _ => Err(bad_input(format!(
            "{} found: write the data again, or set data.on_bad_sample = \"skip\" in the recipe",
            human::count(bad, "fault")
        ))),
    }
}

fn verify(path: &Path, args: &Args) -> Result<VerifiedFile, Failure> {
    let beton = open(path)?;
    let verifier = Verifier::new(&beton).map_err(failure)?;
    let bar = bar(SAMPLES, beton.len());
    let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.threads.map_or_else(cores, NonZeroUsize::get);
    let found = verifier.check_all(threads, |samples| bar.inc(samples));
    bar.finish_and_clear();
    let in_rows = verifier.faults().iter().map(ToString::to_string);
    // A fault found in the rows is found again when the value is read.
    let mut faults = without_repetitions(in_rows.chain(found.iter().map(ToString::to_string)));
    let bad = faults.len() as u64;
    if !args.all {
        faults.truncate(MAX_SHOWN_FAULTS);
    }
    let file = path.display().to_string();
    Ok(VerifiedFile { file, samples: beton.len(), bad, faults, error: None })
}

fn without_repetitions(faults: impl Iterator<Item = String>) -> Vec<String> {
    let mut known = HashSet::new();
    faults.filter(|fault| known.insert(fault.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_very_many_faults_is_listed_once() {
        // Comparing each with all others would take minutes.
        let faults = || (0..300_000).map(|sample| format!("sample {sample}"));
        let listed = without_repetitions(faults().chain(faults()));
        assert!(listed.iter().cloned().eq(faults()));
    }
}
