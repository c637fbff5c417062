//! One part of the samples, predicted by one process.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _},
    path::Path,
};

use baton_console::parent::Parent;
use baton_data::{CpuShare, Dataset, Loader, Options, Preprocessing, Request};
use baton_job::{
    exit::{Failure, crash},
    ids::LocalRank,
};
use baton_recipe::JobSpec;
use baton_trainer::{
    Error, EvaluatedWeights,
    torch::{self, TorchLearner, weights::Head},
};
use rustix::process::Signal;

use super::{Args, locked, part_file, parts_folder, plan::PredictionPlan, unwritable};
use crate::predictions::{Known, PredictionColumns};

/// Predicts the rest of a part, and prints the number of samples after each batch.
pub(super) fn predict(
    args: &Args,
    spec: &JobSpec,
    columns: &PredictionColumns,
    set: Dataset,
    part: u32,
) -> Result<(), Failure> {
    Parent::follow(Signal::KILL, args.parent)?;
    let folder = parts_folder(&args.out);
    let path = part_file(&folder, part);
    let failed = |error: io::Error| unwritable(&path, &error);
    let Some(plan) = PredictionPlan::read(&folder)? else {
        return Err(crash(format!("{} has no plan", folder.display())));
    };
    let _lock = locked(&folder.join(format!("part-{part}.lock")), &args.out)?;
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = file.map_err(failed)?;
    let (next, end) = continued(&file, &plan, part).map_err(failed)?;
    file.set_len(end).map_err(failed)?;
    file.seek(SeekFrom::End(0)).map_err(failed)?;

    let slot = args.slot.unwrap_or_default();
    let device = torch::device::open(spec, LocalRank(slot))?;
    torch::device::set_threads(args.threads);
    let mut learner = TorchLearner::new(spec, set.input_type(), device)?;
    torch::weights::load(&mut learner, &args.weights, Head::FromFile)
        .map_err(baton_job::exit::bad_input)?;
    let preprocessing = Preprocessing::of_evaluation(spec);
    let (batch, samples) = (plan.batch, plan.samples);
    let requests = (next..plan.batches_of(part).end).map(move |number| Request {
        epoch: 0,
        samples: (number * batch..((number + 1) * batch).min(samples)).collect(),
        preprocessing: preprocessing.clone(),
    });
    let (threads, ahead) = (spec.data.decode_threads as usize, spec.data.prefetch_batches as usize);
    let cpus = match spec.data.pin_threads {
        true => CpuShare::of_rank(slot, args.ranks),
        false => CpuShare::default(),
    };
    let options = Options { cpus, ..Options::new(threads, ahead) };
    let mut loader = Loader::start(set.into(), &options, requests);
    let mut number_of = next..plan.batches_of(part).end;
    while let Some(batch) = loader.next().transpose().map_err(Error::from)? {
        // All of its samples may be bad.
        let outputs = match batch.is_empty() {
            true => Vec::new(),
            false => learner.predict(&batch, EvaluatedWeights::Raw)?,
        };
        let number = number_of.next().unwrap_or_default();
        let lines: String = batch
            .samples
            .iter()
            .zip(outputs.chunks(columns.outputs))
            .map(|(sample, outputs)| columns.line(*sample, Known::Nothing, outputs) + "\n")
            .collect();
        let end = batch_end(number, &lines);
        file.write_all((lines + &end).as_bytes()).map_err(failed)?;
        // The parent may be gone; then this process is being killed.
        let _ = writeln!(io::stdout(), "{}", batch.len());
        loader.recycle(batch);
    }
    file.sync_all().map_err(failed)
}

/// Number of samples of a part that are done.
pub(super) fn done(path: &Path, plan: &PredictionPlan, part: u32) -> io::Result<u64> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let (next, _) = continued(&file, plan, part)?;
    let batches = plan.batches_of(part);
    Ok(match next >= batches.end {
        true => plan.samples_of(part),
        false => (next - batches.start) * plan.batch,
    })
}

/// First letter of the line that ends a batch.
const BATCH_END: char = '#';

/// Whether a line of a part is no prediction.
pub(super) fn is_batch_end(line: &str) -> bool {
    line.starts_with(BATCH_END)
}

/// The line that ends a batch: its number and the BLAKE3 digest of both and its lines, without which a batch is predicted again.
fn batch_end(batch: u64, lines: &str) -> String {
    let mut digest = blake3::Hasher::new();
    digest.update(&batch.to_le_bytes()).update(lines.as_bytes());
    format!("{BATCH_END}{batch},{}\n", digest.finalize())
}

/// The batch with which a part goes on, and the length of the file up to there: behind the last batch up to which all are whole
/// and unchanged.
fn continued(file: &File, plan: &PredictionPlan, part: u32) -> io::Result<(u64, u64)> {
    let batches = plan.batches_of(part);
    let (mut next, mut end, mut position) = (batches.start, 0, 0);
    let mut text = BufReader::new(file);
    let (mut lines, mut line) = (String::new(), Vec::new());
    while next < batches.end {
        line.clear();
        position += text.read_until(b'\n', &mut line)? as u64;
        let Some(line) = std::str::from_utf8(&line).ok().filter(|line| line.ends_with('\n')) else {
            break;
        };
        if !is_batch_end(line) {
            lines.push_str(line);
        } else if line == batch_end(next, &lines) {
            (next, end) = (next + 1, position);
            lines.clear();
        } else {
            break;
        }
    }
    Ok((next, end))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::plan::tests::plan_of, *};

    /// 25 samples in batches of 4, two parts: batches 0 to 2 and 3 to 6.
    fn plan() -> PredictionPlan {
        plan_of(2, 25, 4)
    }

    fn lines(samples: impl IntoIterator<Item = u64>) -> String {
        samples.into_iter().map(|sample| format!("{sample},1,0.5\n")).collect()
    }

    fn continued_after(part: u32, text: &str) -> (u64, u64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part.csv");
        fs::write(&path, text).unwrap();
        continued(&File::open(&path).unwrap(), &plan(), part).unwrap()
    }

    #[test]
    fn the_parts_are_all_batches() {
        assert_eq!((plan().batches_of(0), plan().batches_of(1)), (0..3, 3..7));
        assert_eq!((plan().samples_of(0), plan().samples_of(1)), (12, 13));
    }

    /// Whole batches of the plan with these samples.
    fn batches(numbers: std::ops::Range<u64>) -> String {
        let batch = |number: u64| {
            let lines = lines(number * 4..((number + 1) * 4).min(25));
            lines.clone() + &batch_end(number, &lines)
        };
        numbers.map(batch).collect()
    }

    #[test]
    fn a_part_goes_on_behind_its_last_whole_batch() {
        let len = |numbers| batches(numbers).len() as u64;
        assert_eq!(continued_after(0, ""), (0, 0));
        assert_eq!(continued_after(0, &batches(0..1)), (1, len(0..1)));
        assert_eq!(continued_after(0, &(batches(0..1) + &lines(4..8))), (1, len(0..1)));
        assert_eq!(continued_after(0, &batches(0..3)), (3, len(0..3)));
        // The last batch has one sample.
        assert_eq!(continued_after(1, &batches(3..7)), (7, len(3..7)));
        // All samples of a batch may be bad.
        let empty = batches(0..1) + &batch_end(1, "");
        assert_eq!(continued_after(0, &empty), (2, empty.len() as u64));
    }

    #[test]
    fn a_batch_that_is_not_as_it_was_written_is_predicted_again() {
        let whole = batches(0..3);
        let first = (1, batches(0..1).len() as u64);
        let second = first.1 as usize;
        let removed = whole.lines().filter(|line| !line.starts_with("5,"));
        let changes = [
            whole[..whole.len() - 1].replace("\n6,1,", "\n6,2,"),
            removed.map(|line| format!("{line}\n")).collect(),
            batches(0..1) + &batches(2..3),
            batches(0..1) + &lines(12..13) + &batches(1..2),
            batches(0..1) + &"\0".repeat(100),
            whole[..second + 9].to_owned(),
        ];
        for change in changes {
            assert_eq!(continued_after(0, &change), first, "{change:?}");
        }
        // Lines of a version that did not mark batches.
        assert_eq!(continued_after(0, &lines(0..12)), (0, 0));
    }

    #[test]
    fn what_follows_the_last_batch_is_cut_off() {
        let whole = batches(0..3);
        assert_eq!(continued_after(0, &(whole.clone() + "99,1,0.5\n")), (3, whole.len() as u64));
    }
}
