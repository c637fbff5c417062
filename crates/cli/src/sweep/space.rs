//! The trials of a sweep: which values of the recipe each of them has. Pure functions.

use std::collections::HashSet;

use baton_data::random::{Draws, RandomPurpose};

/// Most trials of a sweep.
const MAX_TRIALS: usize = 10_000;

/// Most random trials that are drawn, with those that are drawn again.
const MAX_DRAWS: u64 = 1_000_000;

/// What a trial sets: `KEY=VALUE` each, as in `baton up --set`.
pub(super) type TrialSettings = Vec<String>;

/// A key of the recipe, and the values to try.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SweepAxis {
    key: String,
    values: AxisValues,
}

#[derive(Clone, Debug, PartialEq)]
enum AxisValues {
    /// These, in this order.
    List(Vec<String>),
    /// Any number of a range.
    Range { low: f64, high: f64, is_logarithmic: bool },
}

/// Parses `KEY=VALUES`: values with commas between them, `0..4` for whole numbers, or `uniform(LOW,HIGH)` or
/// `loguniform(LOW,HIGH)`.
pub(super) fn axis(text: &str) -> Result<SweepAxis, String> {
    let Some((key, values)) = text.split_once('=') else {
        return Err(format!("--set {text}: write KEY=VALUE, or KEY=VALUE,VALUE"));
    };
    let (key, values) = (key.trim(), values.trim());
    let wrong = |problem: &str| format!("--set {text}: {problem}");
    if let Some(range) = range(values) {
        let values = range.map_err(|problem| wrong(&problem))?;
        return Ok(SweepAxis { key: key.to_owned(), values });
    }
    let mut list = Vec::new();
    for part in parts(values) {
        match whole_numbers(part).map_err(|problem| wrong(&problem))? {
            Some(numbers) => list.extend(numbers.map(|number| number.to_string())),
            None => list.push(part.to_owned()),
        }
    }
    if list.iter().any(String::is_empty) {
        return Err(wrong("a value is empty"));
    }
    let mut seen = HashSet::new();
    if let Some(again) = list.iter().find(|value| !seen.insert(value.as_str())) {
        return Err(wrong(&format!("{again} is there twice")));
    }
    Ok(SweepAxis { key: key.to_owned(), values: AxisValues::List(list) })
}

/// `uniform(LOW,HIGH)` or `loguniform(LOW,HIGH)`.
fn range(text: &str) -> Option<Result<AxisValues, String>> {
    let inside = text.strip_suffix(')')?;
    let (is_logarithmic, bounds) = match inside.strip_prefix("uniform(") {
        Some(bounds) => (false, bounds),
        None => (true, inside.strip_prefix("loguniform(")?),
    };
    let numbers = bounds.split_once(',').and_then(|(low, high)| {
        Some((low.trim().parse::<f64>().ok()?, high.trim().parse::<f64>().ok()?))
    });
    let lowest = if is_logarithmic { 0.0 } else { f64::NEG_INFINITY };
    Some(match numbers {
        Some((low, high)) if lowest < low && low < high && high.is_finite() => {
            Ok(AxisValues::Range { low, high, is_logarithmic })
        }
        _ if is_logarithmic => {
            Err("write loguniform(LOW,HIGH) with numbers 0 < LOW < HIGH".to_owned())
        }
        _ => Err("write uniform(LOW,HIGH) with numbers LOW < HIGH".to_owned()),
    })
}

/// `0..4`: the whole numbers from 0 to 4, both included.
fn whole_numbers(text: &str) -> Result<Option<std::ops::RangeInclusive<i64>>, String> {
    let Some((first, last)) = text.split_once("..") else { return Ok(None) };
    let (Ok(first), Ok(last)) = (first.parse::<i64>(), last.parse::<i64>()) else {
        return Ok(None);
    };
    match usize::try_from(last.saturating_sub(first)) {
        Ok(more) if more < MAX_TRIALS => Ok(Some(first..=last)),
        _ => Err(format!("{text} must be FIRST..LAST with at most {MAX_TRIALS} numbers")),
    }
}

/// Splits at the commas that are not inside brackets or quotes.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quote) = (Vec::new(), 0, 0_u32, None);
    for (position, letter) in text.char_indices() {
        match (quote, letter) {
            (Some(open), letter) if open == letter => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(letter),
            (None, '[' | '{' | '(') => depth += 1,
            (None, ']' | '}' | ')') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                parts.push(text[start..position].trim());
                start = position + 1;
            }
            (None, _) => {}
        }
    }
    parts.push(text[start..].trim());
    parts
}

/// Every combination of the values; those of the last axis change fastest.
pub(super) fn grid(axes: &[SweepAxis]) -> Result<Vec<TrialSettings>, String> {
    check_keys(axes)?;
    let mut trials = vec![TrialSettings::new()];
    for axis in axes {
        let AxisValues::List(values) = &axis.values else {
            let key = &axis.key;
            return Err(format!(
                "--set {key}: a range has no grid: add --random N, or list values"
            ));
        };
        if trials.len().saturating_mul(values.len()) > MAX_TRIALS {
            return Err(format!(
                "the grid has more than {MAX_TRIALS} trials: list fewer values, or choose some with --random N"
            ));
        }
        let longer = |trial: &TrialSettings, value: &String| {
            trial.iter().cloned().chain([format!("{}={value}", axis.key)]).collect()
        };
        trials = trials
            .iter()
            .flat_map(|trial| values.iter().map(move |value| longer(trial, value)))
            .collect();
    }
    Ok(trials)
}

/// `count` different trials, drawn at random. The same seed gives the same ones, and a larger count more of them.
pub(super) fn random(
    axes: &[SweepAxis],
    count: usize,
    seed: u64,
) -> Result<Vec<TrialSettings>, String> {
    check_keys(axes)?;
    let all: usize = axes.iter().fold(1, |all, axis| match &axis.values {
        AxisValues::List(values) => all.saturating_mul(values.len()),
        AxisValues::Range { .. } => usize::MAX,
    });
    if count > all.min(MAX_TRIALS) {
        return Err(format!("--random {count}: there are at most {} trials", all.min(MAX_TRIALS)));
    }
    let mut seen = HashSet::new();
    let drawn = (0..MAX_DRAWS).map(|number| {
        let mut draws = Draws::new(seed, 0, number, RandomPurpose::Trial);
        axes.iter().map(|axis| axis.draw(&mut draws)).collect::<TrialSettings>()
    });
    let trials: Vec<_> = drawn.filter(|trial| seen.insert(trial.clone())).take(count).collect();
    match trials.len() {
        found if found < count => Err(format!(
            "--random {count}: only {found} different trials were found: widen the ranges"
        )),
        _ => Ok(trials),
    }
}

impl SweepAxis {
    fn draw(&self, draws: &mut Draws) -> String {
        let value = match &self.values {
            AxisValues::List(values) => values[draws.below(values.len() as u64) as usize].clone(),
            AxisValues::Range { low, high, is_logarithmic: false } => {
                short(draws.between(*low, *high))
            }
            AxisValues::Range { low, high, is_logarithmic: true } => {
                short(draws.between(low.ln(), high.ln()).exp())
            }
        };
        format!("{}={value}", self.key)
    }
}

/// A number with four significant digits, as TOML has it.
fn short(value: f64) -> String {
    format!("{:?}", format!("{value:.3e}").parse::<f64>().unwrap_or(value))
}

/// Trials from JSON lines: an object with keys of the recipe for each.
pub(super) fn listed(text: &str, fixed: &[SweepAxis]) -> Result<Vec<TrialSettings>, String> {
    let base = grid(fixed)?;
    let [base] = base.as_slice() else {
        return Err("with --trials, --set takes one value: it holds for all trials".to_owned());
    };
    let mut trials: Vec<TrialSettings> = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let values: toml::Table = serde_json::from_str(line).map_err(|error| {
            format!("line {number} is no JSON object with values of the recipe: {error}")
        })?;
        let own = values.iter().map(|(key, value)| format!("{key}={value}"));
        let trial: TrialSettings = base.iter().cloned().chain(own).collect();
        if let Some(key) = repeated_key(trial.iter().map(String::as_str)) {
            return Err(format!("line {number}: {key} is also given with --set"));
        }
        trials.push(trial);
    }
    match trials.len() {
        0 => Err("there is no trial in it".to_owned()),
        1..=MAX_TRIALS => Ok(trials),
        _ => Err(format!("there are more than {MAX_TRIALS} trials")),
    }
}

fn check_keys(axes: &[SweepAxis]) -> Result<(), String> {
    match repeated_key(axes.iter().map(|axis| axis.key.as_str())) {
        Some(key) => Err(format!(
            "--set {key} is given twice: write all its values with commas between them"
        )),
        None => Ok(()),
    }
}

/// The first key that occurs twice.
fn repeated_key<'a>(settings: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    settings.map(key).find(|key| !seen.insert(*key))
}

/// The key of a setting.
pub(super) fn key(setting: &str) -> &str {
    setting.split_once('=').map_or(setting, |(key, _)| key).trim()
}

/// The value of a setting.
pub(super) fn value(setting: &str) -> &str {
    setting.split_once('=').map_or("", |(_, value)| value).trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(texts: &[&str]) -> Vec<SweepAxis> {
        texts.iter().map(|text| axis(text).unwrap()).collect()
    }

    fn joined(trials: &[TrialSettings]) -> Vec<String> {
        trials.iter().map(|trial| trial.join(" ")).collect()
    }

    #[test]
    fn a_grid_has_every_combination_and_the_last_key_changes_fastest() {
        let trials = grid(&axes(&["schedule.peak_lr=1e-3,3e-4", "train.epochs=2", "seed=0..2"]));
        let expected = [
            "schedule.peak_lr=1e-3 train.epochs=2 seed=0",
            "schedule.peak_lr=1e-3 train.epochs=2 seed=1",
            "schedule.peak_lr=1e-3 train.epochs=2 seed=2",
            "schedule.peak_lr=3e-4 train.epochs=2 seed=0",
            "schedule.peak_lr=3e-4 train.epochs=2 seed=1",
            "schedule.peak_lr=3e-4 train.epochs=2 seed=2",
        ];
        assert_eq!(joined(&trials.unwrap()), expected);
    }

    #[test]
    fn commas_in_brackets_and_quotes_do_not_separate_values() {
        let one = axis("augment.crop_scale=[0.5, 1.0],[0.8,1.0]").unwrap();
        let expected = ["augment.crop_scale=[0.5, 1.0]", "augment.crop_scale=[0.8,1.0]"];
        assert_eq!(joined(&grid(&[one]).unwrap()), expected);
        let two = axis("data.train=\"a,b\",'c,d',{x = 1, y = 2},-3..-2,a..b").unwrap();
        let expected = ["\"a,b\"", "'c,d'", "{x = 1, y = 2}", "-3", "-2", "a..b"];
        assert_eq!(two.values, AxisValues::List(expected.map(str::to_owned).to_vec()));
    }

    #[test]
    fn what_is_no_list_of_values_is_refused_by_name() {
        let refused = |text| axis(text).unwrap_err();
        assert_eq!(refused("seed"), "--set seed: write KEY=VALUE, or KEY=VALUE,VALUE");
        assert_eq!(refused("seed=1,,2"), "--set seed=1,,2: a value is empty");
        assert_eq!(refused("seed=0..2,1"), "--set seed=0..2,1: 1 is there twice");
        assert!(refused("seed=0..99999").contains("at most 10000 numbers"));
        assert!(refused("seed=4..0").contains("FIRST..LAST"));
        assert!(refused("schedule.peak_lr=loguniform(0,1)").contains("0 < LOW < HIGH"));
        assert!(refused("schedule.peak_lr=uniform(2,1)").contains("LOW < HIGH"));
        let ranges = axes(&["schedule.peak_lr=loguniform(1e-4,1e-2)"]);
        assert!(grid(&ranges).unwrap_err().contains("--random N"));
        let twice = axes(&["seed=1", "seed=2"]);
        assert!(grid(&twice).unwrap_err().starts_with("--set seed is given twice"));
        let large = axes(&["seed=0..999", "train.epochs=1..11"]);
        assert!(grid(&large).unwrap_err().contains("more than 10000 trials"));
    }

    #[test]
    fn random_trials_are_different_within_their_ranges_and_those_of_the_seed() {
        let space =
            axes(&["schedule.peak_lr=loguniform(1e-4,1e-2)", "seed=0,1", "loss.x=uniform(-1,1)"]);
        let trials = random(&space, 100, 7).unwrap();
        assert_eq!(trials[..40], random(&space, 40, 7).unwrap());
        assert_ne!(trials[..40], random(&space, 40, 8).unwrap());
        let number = |trial: &TrialSettings, position: usize| -> f64 {
            value(&trial[position]).parse().unwrap()
        };
        let small = trials.iter().filter(|trial| number(trial, 0) < 1e-3).count();
        assert!(
            (30..70).contains(&small),
            "half of a logarithmic range is below its middle: {small}"
        );
        for trial in &trials {
            assert!((1e-4..=1e-2).contains(&number(trial, 0)), "{trial:?}");
            assert!((-1.0..=1.0).contains(&number(trial, 2)), "{trial:?}");
            assert!(trial[0].len() <= "schedule.peak_lr=".len() + 9, "{trial:?}");
        }
        let few = axes(&["seed=0..3"]);
        let mut all = joined(&random(&few, 4, 0).unwrap());
        all.sort();
        assert_eq!(all, ["seed=0", "seed=1", "seed=2", "seed=3"]);
        assert!(random(&few, 5, 0).unwrap_err().contains("at most 4 trials"));
    }

    #[test]
    fn listed_trials_are_json_lines() {
        let text =
            "{\"optimizer.kind\": \"lars\", \"seed\": 1}\n\n{\"augment.crop_scale\": [0.5, 1.0]}\n";
        let trials = listed(text, &axes(&["train.epochs=2"])).unwrap();
        let expected = [
            "train.epochs=2 optimizer.kind=\"lars\" seed=1",
            "train.epochs=2 augment.crop_scale=[0.5, 1.0]",
        ];
        assert_eq!(joined(&trials), expected);
        let refused = |text: &str, fixed: &[&str]| listed(text, &axes(fixed)).unwrap_err();
        assert!(refused("{}\nseed=1", &[]).starts_with("line 2 is no JSON object"));
        assert!(refused("{\"seed\": null}", &[]).starts_with("line 1 is no JSON object"));
        assert!(refused("{\"seed\": 1}", &["seed=2"]).contains("seed is also given with --set"));
        assert!(refused("{}", &["seed=2,3"]).contains("--set takes one value"));
        assert_eq!(refused("\n", &[]), "there is no trial in it");
    }
}
