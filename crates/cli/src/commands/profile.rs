//! `baton profile`

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use baton_checkpoint::profile::{RankProfile, StepPart, StepShares, merge};
use baton_job::{engine::MAX_PROFILED_STEPS, exit::Failure};
use serde::Serialize;

use super::checkpoint::folder::blocking;
use crate::{
    connect::{Coordinator, CoordinatorFlags},
    failure::{bad_input, failed},
    human, json,
    output::{self, refuse_special_file},
};

/// Record the next steps of all ranks, and show where their time goes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton profile                                  5 steps, to profile.json
  baton profile --steps 20 --out slow.json
  baton profile --json | jq .ranks[0].parts

The file shows what every thread and GPU of every rank did and when: the loader's threads, gradients with \
PyTorch's operations and kernels, the all-reduce, the update, evaluations and checkpoints. Open it on \
https://ui.perfetto.dev, which reads it in the browser and uploads nothing. The times of several machines are \
aligned by the ends of their all-reduces. Training goes on, with the same bits.")]
pub(crate) struct Args {
    #[command(flatten)]
    target: CoordinatorFlags,
    /// Number of steps, 1 to 50
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PROFILED_STEPS)))]
    steps: u32,
    /// The file to write; an older profile is replaced
    #[arg(long, value_name = "FILE", default_value = "profile.json")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The events of a profile begin before this many bytes.
const PREFIX_BYTES: u64 = 1 << 20;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct WrittenProfile {
    /// The file.
    file: String,
    /// Where the time of each rank's steps went.
    ranks: Vec<StepShares>,
    /// What a rank's profile lacks, and why.
    problems: Vec<String>,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let Args { target, steps, out, json } = args;
    check_out(&out)?;
    let mut coordinator = Coordinator::find(&target)?;
    let job = coordinator.name().await?;
    if !json {
        output::note(format_args!("{job}: recording {}", human::count(steps.into(), "step")));
    }
    let parts = coordinator.record_profile(steps).await?;
    let written = blocking(move || write(parts, &out)).await?;
    json::print(json, &written, describe);
    Ok(())
}

/// Refuses a file in a folder that does not exist, and to replace one that is not a profile, before anything is recorded.
fn check_out(out: &Path) -> Result<(), Failure> {
    refuse_special_file(out)?;
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        let (out, folder) = (out.display(), folder.display());
        return Err(bad_input(format!(
            "{out}: there is no folder {folder}: create it, or give another path with --out"
        )));
    }
    let Ok(existing) = File::open(out) else { return Ok(()) };
    let mut begin = Vec::new();
    let read = existing.take(PREFIX_BYTES).read_to_end(&mut begin);
    let begin = String::from_utf8_lossy(&begin);
    // Other profilers write the same format, without the first.
    let is_profile = ["\"baton\":", "\"traceEvents\":"].iter().all(|key| begin.contains(key));
    match read {
        Ok(_) if is_profile => Ok(()),
        _ => Err(bad_input(format!(
            "{} exists and is not a profile: remove it, or give another path with --out",
            out.display()
        ))),
    }
}

/// Merges the parts of ranks, each of them JSON, into the file.
fn write(parts: Vec<Vec<u8>>, out: &Path) -> Result<WrittenProfile, Failure> {
    let read = |part: &Vec<u8>| {
        serde_json::from_slice::<RankProfile>(part)
            .map_err(|error| failed(format!("a rank's profile is damaged: {error}; try again")))
    };
    let profiles = parts.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let ranks = profiles.iter().filter_map(RankProfile::shares).collect();
    let merged = merge(profiles);
    merged.write(out).map_err(|error| {
        failed(format!("{}: {error}; give another path with --out", out.display()))
    })?;
    let problems = merged.baton.iter().filter_map(|info| {
        let left_out = (info.left_out > 0).then(|| {
            let spans = human::count(info.left_out, "span");
            format!("{spans} left out, as there were too many: record fewer steps")
        });
        let unaligned = (!merged.clock_offsets.contains_key(&info.node)).then(|| {
            "its clock could not be compared with that of rank 0: record more steps".to_owned()
        });
        let problem = info.problem.clone().or(left_out).or(unaligned)?;
        Some(format!("rank {}: {problem}", info.rank))
    });
    Ok(WrittenProfile { file: out.display().to_string(), ranks, problems: problems.collect() })
}

/// One line per rank, and where the file is.
fn describe(written: &WrittenProfile) -> String {
    let rank = |shares: &StepShares| {
        let parts = shares.parts.iter();
        let parts =
            parts.map(|StepPart { name, share }| format!("{name} {}", human::percent(*share)));
        let parts: Vec<String> = parts.collect();
        let StepShares { rank, steps, seconds, .. } = shares;
        let (steps, parts) = (human::count(*steps as u64, "step"), parts.join(", "));
        format!("rank {rank}: {steps} of {:.1} ms: {parts}", 1e3 * seconds)
    };
    let problems = written.problems.iter().map(|problem| format!("warning: {problem}"));
    let file = format!("{}: open it on https://ui.perfetto.dev", written.file);
    written.ranks.iter().map(rank).chain(problems).chain([file]).collect::<Vec<_>>().join("\n")
}
