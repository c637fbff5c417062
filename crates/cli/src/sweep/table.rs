//! The results of a sweep as tables: for people, as CSV, as JSON and as a web page. Pure functions. Times and prices are not in
//! the CSV, so that it has the same bytes however often the sweep was interrupted.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
};

use baton_job::exit::Failure;
use baton_proto::v1::Metric;
use baton_recipe::task;
use comfy_table::{Table, presets};
use serde::Serialize;

use super::{
    halving::{Decision, mean_score},
    record::{EvaluatedTrial, SavedEnd, TrialRecord},
    space::{TrialSettings, key, value},
};
use crate::{failure::failed, human, render};

/// The key in which trials of one configuration differ.
const SEED_KEY: &str = "seed";

/// The state of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SweepResults {
    /// Name of the recipe.
    pub(super) name: String,
    /// The keys in which trials differ, in the order in which they were given.
    keys: Vec<String>,
    /// The trials, in order.
    pub(super) trials: Vec<TrialResult>,
    /// The configurations, the best first.
    configurations: Vec<Configuration>,
    hours: f64,
    dollars: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct TrialResult {
    settings: TrialSettings,
    pub(super) state: String,
    has_failed: bool,
    /// The last evaluation; of one that was not continued, that by which it was compared.
    result: Option<EvaluatedTrial>,
    best: Option<EvaluatedTrial>,
    /// Step and metric of each evaluation that counts.
    pub(super) curve: Vec<(u64, f64)>,
}

/// Trials that differ in their seeds only.
#[derive(Clone, Debug, PartialEq)]
struct Configuration {
    trials: Vec<usize>,
    /// How many evaluations it was allowed to make, if it was not continued.
    dropped_after: Option<usize>,
    has_failed: bool,
    /// Mean over the trials with a result, such that more is better.
    score: f64,
    mean: Option<f64>,
    /// Sample standard deviation over the trials with a result, if there are at least two.
    deviation: Option<f64>,
    best: Option<f64>,
}

/// The number of the configuration of each trial: the same for those whose recipes without the seed are the same.
pub(super) fn configurations<'a>(recipes: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let mut known: HashMap<&str, usize> = HashMap::new();
    let mut numbers = Vec::new();
    for recipe in recipes {
        let next = known.len();
        numbers.push(*known.entry(recipe).or_insert(next));
    }
    numbers
}

impl SweepResults {
    pub(super) fn new(
        name: &str,
        (trials, of_trials): (&[TrialSettings], &[usize]),
        records: &[TrialRecord],
        decisions: &[Decision],
        failures: &BTreeMap<usize, String>,
    ) -> Self {
        let results = trials.iter().zip(records).zip(decisions).enumerate().map(
            |(number, ((settings, record), decision))| {
                TrialResult::new(settings, record, *decision, failures.get(&number))
            },
        );
        let results: Vec<TrialResult> = results.collect();
        let count = of_trials.iter().max().map_or(0, |last| last + 1);
        let members = |wanted: usize| {
            (0..trials.len()).filter(|trial| of_trials[*trial] == wanted).collect::<Vec<_>>()
        };
        let mut configurations: Vec<Configuration> = (0..count)
            .map(|number| Configuration::new(members(number), &results, decisions))
            .collect();
        configurations.sort_by(Configuration::compare);
        let priced: Vec<f64> = records.iter().filter_map(|record| record.dollars).collect();
        Self {
            name: name.to_owned(),
            keys: differing_keys(trials),
            trials: results,
            configurations,
            hours: records.iter().map(|record| record.hours).sum(),
            dollars: (!priced.is_empty()).then(|| priced.iter().sum()),
        }
    }

    /// How many of these trials have failed in the table: what one did after it was dropped does not count.
    pub(super) fn failed(&self, failures: &BTreeMap<usize, String>) -> usize {
        failures.keys().filter(|trial| self.trials[**trial].has_failed).count()
    }

    /// The table of configurations, and what they cost.
    pub(super) fn text(&self) -> String {
        if self.metric().is_none() {
            return "no trial has been evaluated yet".to_owned();
        }
        let mut table = Table::new();
        let header = self.header().into_iter().map(|name| name.to_uppercase());
        table.load_preset(presets::NOTHING).set_header(header).add_rows(self.rows());
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        format!("{}\n\n{}", table.trim_fmt(), self.cost())
    }

    /// Names of the columns of the table of configurations.
    pub(super) fn header(&self) -> Vec<String> {
        let metric = self.metric().map(|metric| task::title(&metric.name)).unwrap_or_default();
        let keys = self.shown_keys().into_iter().cloned();
        let others = [metric.as_str(), "±", "best", "trials", "state"].map(str::to_owned);
        keys.chain(others).collect()
    }

    /// The table of configurations, the best first.
    pub(super) fn rows(&self) -> Vec<Vec<String>> {
        self.configurations.iter().map(|configuration| self.row(configuration)).collect()
    }

    fn row(&self, configuration: &Configuration) -> Vec<String> {
        let shown = |value: Option<f64>| match (value, self.metric()) {
            (Some(value), Some(metric)) => render::value(&Metric { value, ..metric.clone() }),
            _ => "-".to_owned(),
        };
        let first = &self.trials[configuration.trials[0]];
        let keys = self.shown_keys().into_iter().map(|key| first.setting(key).to_owned());
        let others = [
            shown(configuration.mean),
            shown(configuration.deviation),
            shown(configuration.best),
            numbers(&configuration.trials),
            self.state(configuration),
        ];
        keys.chain(others).collect()
    }

    /// `4 trials of digits_cpu: 2 h 18 min of training, $4.10`
    pub(super) fn cost(&self) -> String {
        let dollars = self.dollars.map(|dollars| format!(", ${dollars:.2}")).unwrap_or_default();
        let trials = human::count(self.trials.len() as u64, "trial");
        format!(
            "{trials} of {}: {} of training{dollars}",
            self.name,
            human::duration(self.hours * 3_600.0)
        )
    }

    /// The states of the trials of a configuration.
    fn state(&self, configuration: &Configuration) -> String {
        let mut states: Vec<(&str, usize)> = Vec::new();
        for trial in &configuration.trials {
            let state = self.trials[*trial].state.as_str();
            match states.iter_mut().find(|(known, _)| *known == state) {
                Some((_, count)) => *count += 1,
                None => states.push((state, 1)),
            }
        }
        match states.as_slice() {
            [(state, _)] => (*state).to_owned(),
            several => {
                let each = several.iter().map(|(state, count)| format!("{count} {state}"));
                each.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// A line per trial, in order.
    pub(super) fn csv(&self) -> Result<String, Failure> {
        let names: Vec<&str> = self.metrics().iter().map(|metric| metric.name.as_str()).collect();
        let keys = self.keys.iter().map(String::as_str);
        let header = std::iter::once("trial").chain(keys).chain(["state", "step"]);
        let header = header.chain(names.iter().copied()).chain(["best_step", "best"]);
        let mut csv = csv::Writer::from_writer(Vec::new());
        csv.write_record(header).map_err(failed)?;
        for (number, trial) in self.trials.iter().enumerate() {
            let shown = |value: Option<String>| value.unwrap_or_default();
            let mut line = vec![folder_name(number)];
            line.extend(self.keys.iter().map(|key| trial.setting(key).to_owned()));
            line.push(trial.state.clone());
            line.push(shown(trial.result.as_ref().map(|found| found.step.to_string())));
            line.extend(names.iter().map(|name| {
                let mut metrics = trial.result.iter().flat_map(|found| &found.metrics);
                let found = metrics.find(|metric| metric.name == *name);
                shown(found.map(|metric| metric.value.to_string()))
            }));
            line.push(shown(trial.best.as_ref().map(|best| best.step.to_string())));
            let best = trial.best.as_ref().and_then(EvaluatedTrial::value);
            line.push(shown(best.map(|value| value.to_string())));
            csv.write_record(line).map_err(failed)?;
        }
        let bytes = csv.into_inner().map_err(failed)?;
        String::from_utf8(bytes).map_err(failed)
    }

    /// `baton sweep --json`.
    pub(super) fn json(&self) -> SweepJson<'_> {
        let trials = self.trials.iter().enumerate().map(|(number, trial)| TrialJson {
            trial: folder_name(number),
            settings: trial.settings.iter().map(|setting| (key(setting), value(setting))).collect(),
            state: &trial.state,
            step: trial.result.as_ref().map(|found| found.step),
            metrics: trial
                .result
                .as_ref()
                .map(|found| found.metrics.as_slice())
                .unwrap_or_default(),
            best_step: trial.best.as_ref().map(|best| best.step),
            best: trial.best.as_ref().and_then(EvaluatedTrial::value),
        });
        let configurations = self.configurations.iter().map(|configuration| ConfigurationJson {
            settings: self
                .shown_keys()
                .into_iter()
                .map(|key| (key.as_str(), self.trials[configuration.trials[0]].setting(key)))
                .collect(),
            trials: configuration.trials.iter().map(|trial| folder_name(*trial)).collect(),
            mean: configuration.mean,
            standard_deviation: configuration.deviation,
            best: configuration.best,
        });
        SweepJson {
            recipe: &self.name,
            metric: self.metric().map(|metric| metric.name.as_str()),
            configurations: configurations.collect(),
            trials: trials.collect(),
            hours: self.hours,
            dollars: self.dollars,
        }
    }

    /// The metric that decides.
    pub(super) fn metric(&self) -> Option<&Metric> {
        self.metrics().first()
    }

    /// The metrics of any trial: all have the same ones.
    fn metrics(&self) -> &[Metric] {
        let with_result = self.trials.iter().find_map(|trial| trial.result.as_ref());
        with_result.map(|found| found.metrics.as_slice()).unwrap_or_default()
    }

    /// The keys in which configurations differ.
    fn shown_keys(&self) -> Vec<&String> {
        self.keys.iter().filter(|key| *key != SEED_KEY || self.trials.len() == 1).collect()
    }
}

impl TrialResult {
    fn new(
        settings: &TrialSettings,
        record: &TrialRecord,
        decision: Decision,
        failure: Option<&String>,
    ) -> Self {
        let counted = match decision {
            Decision::Dropped { after } => {
                &record.evaluations[..after.min(record.evaluations.len())]
            }
            _ => &record.evaluations,
        };
        // What it did after the comparison does not count: it might have been stopped before.
        let dropped = match decision {
            Decision::Dropped { after } if counted.len() == after => Some(after),
            _ => None,
        };
        let state = match (&record.end, failure, dropped) {
            (_, _, Some(after)) => {
                format!("dropped after {}", human::count(after as u64, "evaluation"))
            }
            (SavedEnd::Diverged(_), _, _) => "diverged".to_owned(),
            (SavedEnd::LimitReached(_), _, _) => "budget used up".to_owned(),
            (_, Some(failure), _) => format!("failed: {failure}"),
            (SavedEnd::Completed, _, _) => "completed".to_owned(),
            (SavedEnd::Open, _, _) if record.position.is_some() => "begun".to_owned(),
            (SavedEnd::Open, _, _) => "waiting".to_owned(),
        };
        let is_failure = failure.is_some() || matches!(record.end, SavedEnd::Diverged(_));
        let better = |best: Option<EvaluatedTrial>, now: &EvaluatedTrial| match best {
            Some(best) if best.score() >= now.score() || now.score().is_nan() => Some(best),
            _ => Some(now.clone()),
        };
        Self {
            settings: settings.clone(),
            has_failed: is_failure && dropped.is_none(),
            state,
            result: counted.last().cloned(),
            best: counted.iter().fold(None, better),
            curve: counted.iter().filter_map(|found| Some((found.step, found.value()?))).collect(),
        }
    }

    /// All its settings.
    pub(super) fn label(&self) -> String {
        self.settings.join(" ")
    }

    fn setting(&self, wanted: &str) -> &str {
        self.settings.iter().find(|setting| key(setting) == wanted).map_or("", |found| value(found))
    }
}

impl Configuration {
    fn new(trials: Vec<usize>, results: &[TrialResult], decisions: &[Decision]) -> Self {
        let found = || trials.iter().filter_map(|trial| results[*trial].result.as_ref());
        let values: Vec<f64> = found().filter_map(EvaluatedTrial::value).collect();
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let deviation = mean.filter(|_| values.len() > 1).map(|mean| {
            let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
            (squares / (values.len() - 1) as f64).sqrt()
        });
        let bests = trials.iter().filter_map(|trial| results[*trial].best.as_ref());
        let best = bests.max_by(|one, other| one.score().total_cmp(&other.score()));
        let dropped_after = trials.iter().find_map(|trial| match decisions[*trial] {
            Decision::Dropped { after } => Some(after),
            _ => None,
        });
        Self {
            dropped_after,
            has_failed: trials.iter().any(|trial| results[*trial].has_failed),
            score: mean_score(found().map(EvaluatedTrial::score)),
            mean,
            deviation,
            best: best.and_then(EvaluatedTrial::value),
            trials,
        }
    }

    /// The better one first: without failures, continued longest, with the best mean.
    fn compare(&self, other: &Self) -> Ordering {
        let continued = |one: &Self| one.dropped_after.unwrap_or(usize::MAX);
        let failed = self.has_failed.cmp(&other.has_failed);
        let better = failed.then(continued(other).cmp(&continued(self)));
        better.then(other.score.total_cmp(&self.score)).then(self.trials[0].cmp(&other.trials[0]))
    }
}

/// The keys that do not have the same value in all trials, or all keys of a single one.
fn differing_keys(trials: &[TrialSettings]) -> Vec<String> {
    let mut keys: Vec<&str> = Vec::new();
    for setting in trials.iter().flatten() {
        if !keys.contains(&key(setting)) {
            keys.push(key(setting));
        }
    }
    let of = |trial: &TrialSettings, wanted: &str| {
        trial.iter().find(|setting| key(setting) == wanted).cloned()
    };
    let differs = |wanted: &&str| {
        trials.len() == 1 || trials.iter().any(|trial| of(trial, wanted) != of(&trials[0], wanted))
    };
    keys.into_iter().filter(differs).map(str::to_owned).collect()
}

/// The name of a trial's run folder.
pub(super) fn folder_name(trial: usize) -> String {
    format!("{trial:03}")
}

/// Numbers of trials: `000-004`, or `000, 003`.
fn numbers(trials: &[usize]) -> String {
    match trials {
        [first, .., last] if last - first + 1 == trials.len() => {
            format!("{}-{}", folder_name(*first), folder_name(*last))
        }
        _ => trials.iter().map(|trial| folder_name(*trial)).collect::<Vec<_>>().join(", "),
    }
}

/// `baton sweep --json`.
#[derive(Debug, Serialize)]
pub(super) struct SweepJson<'a> {
    /// Name of the recipe.
    recipe: &'a str,
    /// Name of the metric that decides; `null` before the first evaluation.
    metric: Option<&'a str>,
    /// The best first.
    configurations: Vec<ConfigurationJson<'a>>,
    /// In order.
    trials: Vec<TrialJson<'a>>,
    /// Hours of training, of all trials together.
    hours: f64,
    /// What they cost; `null` without `limits.dollars_per_hour`.
    dollars: Option<f64>,
}

/// Trials that differ in their seeds only.
#[derive(Debug, Serialize)]
struct ConfigurationJson<'a> {
    /// Values of the keys in which configurations differ.
    settings: BTreeMap<&'a str, &'a str>,
    /// Names of the trials.
    trials: Vec<String>,
    /// Mean of the metric over the trials with a result.
    mean: Option<f64>,
    /// Sample standard deviation, of two or more.
    standard_deviation: Option<f64>,
    /// The best value of any evaluation.
    best: Option<f64>,
}

#[derive(Debug, Serialize)]
struct TrialJson<'a> {
    /// Its run folder, below that of the sweep.
    trial: String,
    /// Values that the recipe has in this trial.
    settings: BTreeMap<&'a str, &'a str>,
    /// `waiting`, `begun`, `completed`, `dropped after N evaluations`, `diverged`, `budget used up`, `failed: …`.
    state: &'a str,
    /// Training steps before the evaluation whose metrics follow.
    step: Option<u64>,
    /// Metrics of the last evaluation that counts; the first one decides.
    metrics: &'a [Metric],
    /// Training steps before the best evaluation.
    best_step: Option<u64>,
    /// Its metric.
    best: Option<f64>,
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn trials(texts: &[&str]) -> Vec<TrialSettings> {
        texts.iter().map(|text| text.split(' ').map(str::to_owned).collect()).collect()
    }

    /// A trial with these accuracies.
    fn record(accuracies: &[f64], end: SavedEnd) -> TrialRecord {
        let evaluated = |(number, accuracy): (usize, &f64)| EvaluatedTrial {
            step: 10 * (number as u64 + 1),
            metrics: vec![
                ("top1".to_owned(), *accuracy).into(),
                ("loss".to_owned(), 1.0 - accuracy).into(),
            ],
        };
        TrialRecord {
            evaluations: accuracies.iter().enumerate().map(evaluated).collect(),
            position: Some((10 * accuracies.len() as u64, 0)),
            end,
            failure: None,
            hours: 0.5,
            dollars: Some(1.25),
        }
    }

    fn results() -> SweepResults {
        let settings = trials(&[
            "a=[1,\"x\"] seed=0 b=9",
            "a=[1,\"x\"] seed=1 b=9",
            "a=2 seed=0 b=9",
            "a=2 seed=1 b=9",
            "a=3 seed=0 b=9",
            "a=3 seed=1 b=9",
            "a=4 seed=0 b=9",
        ]);
        let dropped = Decision::Dropped { after: 1 };
        let records = [
            record(&[0.5, 0.75], SavedEnd::Completed),
            record(&[0.5, 0.875, 0.625], SavedEnd::Completed),
            record(&[0.9, 0.1], SavedEnd::Open),
            record(&[0.9], SavedEnd::Open),
            record(&[0.95], SavedEnd::Diverged("NaN".to_owned())),
            record(&[], SavedEnd::Open),
            record(&[0.7], SavedEnd::Completed),
        ];
        let (train, ended) = (Decision::Train { until: None }, Decision::Ended);
        let decisions = [ended, ended, dropped, dropped, ended, train, ended];
        let failures = BTreeMap::from([(5, "no memory".to_owned())]);
        SweepResults::new(
            "digits",
            (&settings, &[0, 0, 1, 1, 2, 2, 3]),
            &records,
            &decisions,
            &failures,
        )
    }

    #[test]
    fn the_best_mean_is_first_then_what_was_dropped_then_what_failed() {
        assert_snapshot!(results().text());
    }

    #[test]
    fn csv_has_a_line_per_trial_and_nothing_that_a_clock_decides() {
        assert_snapshot!(results().csv().unwrap());
    }

    #[test]
    fn json_has_trials_and_configurations() {
        assert_snapshot!(serde_json::to_string_pretty(&results().json()).unwrap());
    }

    /// Whether it fails before it is stopped is a matter of time.
    #[test]
    fn what_a_trial_does_after_it_was_dropped_is_not_in_the_table() {
        let settings = trials(&["a=1", "a=2", "a=3"]);
        let diverged = || SavedEnd::Diverged("NaN".to_owned());
        let records = |end: SavedEnd| {
            [
                record(&[0.5, 0.9], end),
                record(&[0.5, 0.75], SavedEnd::Completed),
                record(&[], diverged()),
            ]
        };
        let dropped = Decision::Dropped { after: 1 };
        let decisions = [dropped, Decision::Ended, dropped];
        let results = |end: SavedEnd, failures: &BTreeMap<usize, String>| {
            let (trials, records) = ((&settings[..], &[0, 1, 2][..]), records(end));
            SweepResults::new("x", trials, &records, &decisions, failures)
        };
        let expected = "trial,a,state,step,top1,loss,best_step,best\n\
                        000,1,dropped after 1 evaluation,10,0.5,0.5,10,0.5\n\
                        001,2,completed,20,0.75,0.25,20,0.75\n\
                        002,3,diverged,,,,,\n";
        let (none, failed) = (BTreeMap::new(), BTreeMap::from([(0, "no memory".to_owned())]));
        assert_eq!(results(SavedEnd::Open, &none).csv().unwrap(), expected);
        assert_eq!(results(diverged(), &none).csv().unwrap(), expected);
        let with_failure = results(SavedEnd::Open, &failed);
        assert_eq!(
            (with_failure.csv().unwrap(), with_failure.failed(&failed)),
            (expected.to_owned(), 0)
        );
        let others = BTreeMap::from([(0, "no memory".to_owned()), (2, "no memory".to_owned())]);
        assert_eq!(results(SavedEnd::Open, &others).failed(&others), 1);
    }

    #[test]
    fn before_the_first_evaluation_there_is_no_table() {
        let settings = trials(&["seed=0", "seed=1"]);
        let (records, decisions) = (vec![TrialRecord::default(); 2], [Decision::Wait; 2]);
        let numbers = [0, 0];
        let trials = (&settings[..], &numbers[..]);
        let results = SweepResults::new("digits", trials, &records, &decisions, &BTreeMap::new());
        assert_eq!(results.header()[0], "");
        assert_eq!(results.text(), "no trial has been evaluated yet");
        assert_eq!(
            results.csv().unwrap(),
            "trial,seed,state,step,best_step,best\n000,0,waiting,,,\n001,1,waiting,,,\n"
        );
    }

    #[test]
    fn smaller_is_better_for_a_loss() {
        let settings = trials(&["a=1", "a=2"]);
        let loss = |value: f64| TrialRecord {
            evaluations: vec![EvaluatedTrial {
                step: 1,
                metrics: vec![("loss".to_owned(), value).into()],
            }],
            ..TrialRecord::default()
        };
        let decisions = [Decision::Ended; 2];
        let records = [loss(0.5), loss(0.25)];
        let results =
            SweepResults::new("x", (&settings, &[0, 1]), &records, &decisions, &BTreeMap::new());
        assert_eq!(results.rows()[0][..2], ["2", "0.2500"]);
    }

    #[test]
    fn trials_of_the_same_recipe_but_for_the_seed_are_one_configuration() {
        assert_eq!(configurations(["a", "b", "a", "c"].into_iter()), [0, 1, 0, 2]);
        assert_eq!(numbers(&[0, 1, 2]), "000-002");
        assert_eq!(numbers(&[0, 2]), "000, 002");
        assert_eq!(numbers(&[7]), "007");
    }
}
