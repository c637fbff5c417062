//! The trials of a sweep: their run folders and recipes.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
};

use baton_data::{Dataset, Source};
use baton_job::exit::Failure;
use baton_recipe::{JobSpec, data_summary::SetSummary};

use super::{folder::SweepFolder, record, space::TrialSettings, table::folder_name};
use crate::{commands::recipe, failure::bad_input};

/// A trial and how it is started.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) settings: TrialSettings,
    /// What `baton up` gets: the settings, and a place for checkpoints that no other trial has.
    pub(super) overrides: TrialSettings,
    pub(super) run_dir: PathBuf,
    /// Its recipe, without that place.
    pub(super) spec: JobSpec,
    /// The recipe without the seed, as JSON.
    pub(super) configuration: String,
}

impl Trial {
    /// # Errors
    /// The recipe does not accept the settings, or is not the one that the trial was trained with.
    fn new(
        recipe: &Path,
        dir: &Path,
        number: usize,
        settings: TrialSettings,
    ) -> Result<Self, Failure> {
        let name = folder_name(number);
        let read = |overrides: &TrialSettings| {
            recipe::read(recipe, overrides).map_err(|failure| Failure {
                message: format!("trial {name} ({}): {failure}", settings.join(" ")),
                ..failure
            })
        };
        let spec = read(&settings)?;
        let (mut overrides, mut trained) = (settings.clone(), spec.clone());
        if !spec.checkpoint.dir.is_empty() {
            let sweep = dir.file_name().unwrap_or_default().to_string_lossy();
            let place = spec.checkpoint.dir.trim_end_matches('/');
            let place = toml::Value::String(format!("{place}/{sweep}/{name}"));
            overrides.push(format!("checkpoint.dir={place}"));
            trained = read(&overrides)?;
        }
        let run_dir = dir.join(&name);
        if let Some(change) = record::changed_since(&run_dir, &trained) {
            return Err(bad_input(format!(
                "trial {name} in {} was trained with another recipe ({change}): choose another --dir",
                dir.display()
            )));
        }
        let configuration = JobSpec { seed: 0, ..spec.clone() }.to_json();
        Ok(Self { settings, overrides, run_dir, spec, configuration })
    }
}

/// The trials of earlier starts in this folder, and the wanted ones that are not among them. All are checked before the list
/// is written.
pub(super) fn trials(
    recipe: &Path,
    dir: &Path,
    wanted: Vec<TrialSettings>,
) -> Result<Vec<Trial>, Failure> {
    let mut folder = SweepFolder::open(dir)?;
    let known = folder.trials.len();
    let mut trials: Vec<Trial> = Vec::new();
    let mut recipes = HashSet::new();
    for settings in folder.trials.into_iter().chain(wanted) {
        let trial = Trial::new(recipe, dir, trials.len(), settings)?;
        // The same values may be written in another way, or be those of the recipe.
        if recipes.insert(trial.spec.to_json()) || trials.len() < known {
            trials.push(trial);
        }
    }
    let data = summaries(&trials);
    for (place, found) in &data {
        if let Some(difference) = folder.data.get(place).and_then(|then| found.difference(then)) {
            return Err(bad_input(format!(
                "{place} has {difference}, so its trials cannot be compared with those that {} has: choose another --dir",
                dir.display()
            )));
        }
    }
    if trials.len() > known || data.keys().any(|place| !folder.data.contains_key(place)) {
        folder.trials = trials.iter().map(|trial| trial.settings.clone()).collect();
        folder.data.extend(data);
        folder.save()?;
    }
    Ok(trials)
}

/// What the sets of samples of the trials hold, by their place on this machine. Those in a bucket, and those that cannot be
/// read, are left to the trials themselves.
fn summaries(trials: &[Trial]) -> BTreeMap<String, SetSummary> {
    let mut summaries = BTreeMap::new();
    for Trial { spec, .. } in trials {
        for place in [&spec.data.train, &spec.data.val] {
            if place.contains("://") || summaries.contains_key(place) {
                continue;
            }
            let source = Source::of_recipe(spec, place, Source::new("").cache_dir);
            let summary = Dataset::open(source).and_then(|set| set.summary());
            if let Ok(summary) = summary {
                summaries.insert(place.clone(), summary);
            }
        }
    }
    summaries
}
