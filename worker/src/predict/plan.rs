//! What a file of predictions is made of: the same for every process, and for every call that continues.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    ops::Range,
    path::Path,
};

use baton_data::Dataset;
use baton_job::exit::{Failure, bad_input, crash};
use baton_recipe::{
    JobSpec,
    data_summary::SetSummary,
    spec::{FieldDifference, OnBadSample},
};
use baton_trainer::Error;
use serde::{Deserialize, Serialize};

use super::{Args, unwritable};

/// Name of the file in the folder of the parts.
const FILE: &str = "plan.json";
/// Its name while it is written.
const DRAFT: &str = "plan.json.new";
/// Name of the locked file in the folder of the parts.
pub(super) const LOCK: &str = "lock";
/// Name of the file with the lines of all parts until it gets its own.
pub(super) const ALL: &str = "all.csv";

/// How the samples are divided into batches and parts, and from what they are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PredictionPlan {
    /// Number of parts: at most one for each batch.
    pub(super) parts: u32,
    /// libtorch threads of each process, which decide the last bits.
    pub(super) threads: u32,
    pub(super) samples: u64,
    /// Samples of a forward pass.
    pub(super) batch: u64,
    probabilities: bool,
    /// BLAKE3 digest of the file.
    weights: String,
    data: SetSummary,
    recipe: JobSpec,
    /// That of the file in `model.program`.
    program: Option<String>,
}

/// A part has at least one batch.
fn parts_of(ranks: u32, samples: u64, batch: u64) -> u32 {
    let batches = u32::try_from(samples.div_ceil(batch)).unwrap_or(u32::MAX);
    ranks.min(batches).max(1)
}

fn digest_of(path: &Path) -> Result<String, Failure> {
    let mut digest = blake3::Hasher::new();
    File::open(path)
        .and_then(|file| digest.update_reader(file).map(drop))
        .map_err(|error| bad_input(format!("{}: {error}", path.display())))?;
    Ok(digest.finalize().to_string())
}

fn program_digest(spec: &JobSpec) -> Result<Option<String>, Failure> {
    let program = spec.model.arch.is_program().then(|| digest_of(spec.model.program.as_ref()));
    program.transpose()
}

/// Refuses a folder that is not of predictions. One of predictions has a plan, unless it was just begun.
pub(super) fn refuse_other_folder(folder: &Path, out: &Path) -> Result<(), Failure> {
    let own = [FILE, DRAFT, LOCK];
    let is_own = |name: &OsStr| own.iter().any(|own| name == *own);
    let entries = folder.read_dir().map_err(|error| unwritable(folder, &error))?;
    match folder.join(FILE).exists() || entries.flatten().all(|entry| is_own(&entry.file_name())) {
        true => Ok(()),
        false => Err(bad_input(format!(
            "{} exists and is not a folder of `baton predict`: remove it, or give another --out than {}",
            folder.display(),
            out.display()
        ))),
    }
}

/// Removes a folder with what predictions left there, the plan after the parts: without it, they would seem to be a user's.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    for entry in folder.read_dir()? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("part-") || name == ALL {
            fs::remove_file(&path)?;
        }
    }
    for name in [FILE, LOCK] {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match fs::remove_dir(folder) {
        // A user has put something there.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

impl PredictionPlan {
    pub(super) fn new(args: &Args, spec: &JobSpec, set: &Dataset) -> Result<Self, Failure> {
        let data = set.summary().map_err(Error::from)?;
        Ok(Self {
            parts: parts_of(args.ranks, set.len(), spec.evaluation.batch.into()),
            threads: args.threads,
            samples: set.len(),
            batch: spec.evaluation.batch.into(),
            program: program_digest(spec)?,
            probabilities: args.probabilities,
            weights: digest_of(&args.weights)?,
            data,
            recipe: spec.clone(),
        })
    }

    /// Writes the plan into `folder`, or takes that of an earlier call, which may have other numbers of parts and threads.
    pub(super) fn kept_in(self, folder: &Path, out: &Path) -> Result<Self, Failure> {
        let path = folder.join(FILE);
        let Some(before) = Self::read(folder)? else {
            let text = serde_json::to_string(&self).map_err(|error| crash(error.to_string()))?;
            let draft = folder.join(DRAFT);
            let written = fs::write(&draft, text).and_then(|()| fs::rename(&draft, &path));
            return written.map(|()| self).map_err(|error| unwritable(&path, &error));
        };
        let differing = [
            ("the weights", before.weights != self.weights),
            ("the data", before.data != self.data || before.samples != self.samples),
            ("--probabilities", before.probabilities != self.probabilities),
            ("the recipe", self.has_other_recipe(&before)),
        ];
        match differing.iter().find(|(_, differs)| *differs) {
            None => Ok(before),
            Some((what, _)) => Err(bad_input(format!(
                "{} holds predictions of another command, {what} differed: remove it to begin again, or give another \
                 --out than {}",
                folder.display(),
                out.display()
            ))),
        }
    }

    fn has_other_recipe(&self, before: &Self) -> bool {
        let differences = before.recipe.differences(&self.recipe);
        before.program != self.program || differences.iter().any(FieldDifference::affects_weights)
    }

    /// That of an earlier call.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(crash(format!("{}: {error}", path.display()))),
        };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            bad_input(format!(
                "{} is damaged, {error}: remove {}",
                path.display(),
                folder.display()
            ))
        })
    }

    /// Whether bad samples have no line.
    pub(super) fn skips_bad_samples(&self) -> bool {
        self.recipe.data.on_bad_sample == OnBadSample::Skip
    }

    /// Numbers of the batches of a part.
    pub(super) fn batches_of(&self, part: u32) -> Range<u64> {
        let batches = self.samples.div_ceil(self.batch);
        let start = |part: u32| batches * u64::from(part) / u64::from(self.parts);
        start(part)..start(part + 1)
    }

    /// Number of samples of a part.
    pub(super) fn samples_of(&self, part: u32) -> u64 {
        let batches = self.batches_of(part);
        let position = |batch: u64| (batch * self.batch).min(self.samples);
        position(batches.end) - position(batches.start)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use baton_recipe::data_summary::ContentDigest;

    use super::*;

    const RECIPE: &str = "name = 'p'\n[model]\narch = 'resnet18'\nnum_classes = 3\n[data]\ntrain = 'a'\nval = 'b'\n\
                          [train]\nepochs = 1\nglobal_batch = 8\n[optimizer]\nkind = 'sgd'\n[schedule]\n\
                          kind = 'constant'\nlr = 0.1\n";

    /// A plan of a minimal recipe.
    pub(in crate::predict) fn plan_of(ranks: u32, samples: u64, batch: u64) -> PredictionPlan {
        PredictionPlan {
            parts: parts_of(ranks, samples, batch),
            threads: 1,
            samples,
            batch,
            probabilities: false,
            weights: String::new(),
            data: SetSummary { samples, bytes: 0, contents: ContentDigest::Files(String::new()) },
            recipe: JobSpec::from_toml(RECIPE, &[]).unwrap(),
            program: None,
        }
    }

    #[test]
    fn no_part_is_without_a_batch() {
        for (ranks, samples, parts) in [(2, 25, 2), (9, 25, 7), (2, 3, 1), (4, 0, 1)] {
            let plan = plan_of(ranks, samples, 4);
            assert_eq!(plan.parts, parts, "{ranks} ranks, {samples} samples");
            assert!((0..parts).all(|part| samples == 0 || plan.samples_of(part) > 0));
        }
    }

    #[test]
    fn a_folder_without_a_plan_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("part-0.csv");
        fs::write(&file, "mine").unwrap();
        let refusal = || refuse_other_folder(folder.path(), Path::new("out.csv")).err();
        let refused = refusal().unwrap().message;
        assert!(refused.contains("is not a folder of `baton predict`"), "{refused}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
        fs::write(folder.path().join(FILE), "{}").unwrap();
        assert!(refusal().is_none());
        fs::remove_file(folder.path().join(FILE)).unwrap();
        fs::rename(file, folder.path().join(LOCK)).unwrap();
        assert!(refusal().is_none());
    }

    #[test]
    fn parts_and_threads_remain_those_of_the_first_call() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out.csv.parts");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(LOCK), "").unwrap();
        let plan = || plan_of(2, 25, 4);
        let out = Path::new("out.csv");
        assert_eq!(plan().kept_in(&folder, out).unwrap().parts, 2);
        fs::write(folder.join("part-0.csv"), "0,1,0.5\n").unwrap();
        let other = PredictionPlan { parts: 5, threads: 7, ..plan() };
        assert_eq!(other.kept_in(&folder, out).unwrap(), plan());
        let other = PredictionPlan { weights: "others".to_owned(), ..plan() };
        let refused = other.kept_in(&folder, out).unwrap_err().message;
        assert!(refused.contains("the weights differed"), "{refused}");
        fs::write(folder.join("notes.txt"), "mine").unwrap();
        remove(&folder).unwrap();
        assert_eq!(folder.read_dir().unwrap().count(), 1);
        fs::remove_file(folder.join("notes.txt")).unwrap();
        remove(&folder).unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn a_setting_that_changes_no_prediction_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let plan = |changes: &[&str]| {
            let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
            let plan = plan_of(2, 25, 4);
            let recipe = JobSpec::from_toml(RECIPE, &changes).unwrap();
            PredictionPlan { recipe, ..plan }.kept_in(folder.path(), Path::new("out.csv"))
        };
        plan(&[]).unwrap();
        plan(&["cluster.device=cpu", "data.decode_threads=3"]).unwrap();
        assert!(plan(&["data.mean=[0.0, 0.0, 0.0]"]).is_err());
    }
}
