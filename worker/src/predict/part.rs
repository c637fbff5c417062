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
    while let Some(batch) = loader.next().transpose().map_err(Error::from)? {
        // All of its samples may be bad.
        let outputs = match batch.is_empty() {
            true => Vec::new(),
            false => learner.predict(&batch, EvaluatedWeights::Raw)?,
        };
        let lines: String = batch
            .samples
            .iter()
            .zip(outputs.chunks(columns.outputs))
            .map(|(sample, outputs)| columns.line(*sample, Known::Nothing, outputs) + "\n")
            .collect();
        file.write_all(lines.as_bytes()).map_err(failed)?;
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

/// The batch with which a part goes on, and the length of the file up to there. The last batch that has a line may be
/// incomplete, so it is predicted again, unless its last sample has a line.
fn continued(file: &File, plan: &PredictionPlan, part: u32) -> io::Result<(u64, u64)> {
    let batches = plan.batches_of(part);
    let (mut next, mut end, mut position) = (batches.start, 0, 0);
    let mut text = BufReader::new(file);
    let mut line = Vec::new();
    // The batch of the line before, and where its lines begin.
    let mut current: Option<(u64, u64)> = None;
    loop {
        line.clear();
        let read = text.read_until(b'\n', &mut line)? as u64;
        let sample = line.strip_suffix(b"\n").and_then(|line| {
            std::str::from_utf8(line).ok()?.split(',').next()?.parse::<u64>().ok()
        });
        let batch = sample.map(|sample| sample / plan.batch);
        let Some((sample, batch)) = sample.zip(batch).filter(|(_, batch)| batches.contains(batch))
        else {
            return Ok((next, end));
        };
        if current.is_none_or(|(current, _)| current != batch) {
            (next, end) = (batch, position);
            current = Some((batch, position));
        }
        position += read;
        if sample + 1 == ((batch + 1) * plan.batch).min(plan.samples) {
            (next, end) = (batch + 1, position);
        }
    }
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

    #[test]
    fn a_part_goes_on_behind_its_last_whole_batch() {
        let len = |samples: std::ops::Range<u64>| lines(samples).len() as u64;
        assert_eq!(continued_after(0, ""), (0, 0));
        assert_eq!(continued_after(0, &lines(0..4)), (1, len(0..4)));
        assert_eq!(continued_after(0, &lines(0..6)), (1, len(0..4)));
        assert_eq!(continued_after(0, &lines(0..12)), (3, len(0..12)));
        // The last batch has one sample.
        assert_eq!(continued_after(1, &lines(12..25)), (7, len(12..25)));
    }

    #[test]
    fn an_incomplete_line_and_what_belongs_to_no_batch_of_the_part_are_cut_off() {
        let len = lines(0..4).len() as u64;
        let cut = [lines(0..7), "7,1,0".to_owned()].concat();
        assert_eq!(continued_after(0, &cut), (1, len));
        let foreign = [lines(0..4), lines(12..13)].concat();
        assert_eq!(continued_after(0, &foreign), (1, len));
        let zeros = [lines(0..4).into_bytes(), vec![0; 100]].concat();
        assert_eq!(continued_after(0, std::str::from_utf8(&zeros).unwrap()), (1, len));
    }

    #[test]
    fn a_batch_whose_last_sample_is_bad_is_predicted_again() {
        let first = lines(0..4).len() as u64;
        assert_eq!(continued_after(0, &lines([0, 1, 2, 3, 4, 5, 6])), (1, first));
        // A later batch shows that it was complete.
        let both = lines([0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(continued_after(0, &(both.clone() + &lines([8]))), (2, both.len() as u64));
    }
}
