//! Which samples are for validation: a function of their key, so that samples with the same key are in the same set,
//! in whatever order they come and whatever else is in the files.

use baton_data::write::KeySplit;

use crate::samples::{LineFault, LineKeys};

/// The set that a key belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SampleSet {
    Train,
    Val,
}

/// How samples are divided.
#[derive(Clone, Debug)]
pub(crate) struct SampleSplit {
    split: KeySplit,
    /// The key of a line that decides; `None`: its whole text.
    by: Option<String>,
}

impl SampleSplit {
    /// `share` of the keys are for validation, on average.
    pub(crate) fn new(share: f64, by: Option<String>) -> Self {
        Self { split: KeySplit::new([share]), by }
    }

    pub(crate) fn by(&self) -> Option<&str> {
        self.by.as_deref()
    }

    /// The set of a line. `keys` were read with [`by`](Self::by).
    pub(crate) fn set(&self, line: &str, keys: &LineKeys) -> Result<SampleSet, LineFault> {
        use serde_json::Value;
        let Some(by) = &self.by else { return Ok(self.of_key(line.trim())) };
        match &keys.value {
            None | Some(Value::Null) => Err(LineFault::new(format!(
                "has no {by:?}, which decides whether a sample is for validation: give every line one, or another --by"
            ))),
            Some(Value::String(key)) => Ok(self.of_key(key)),
            Some(key) => Ok(self.of_key(&key.to_string())),
        }
    }

    fn of_key(&self, key: &str) -> SampleSet {
        if self.split.set(key) == 0 { SampleSet::Train } else { SampleSet::Val }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(split: &SampleSplit, line: &str) -> Result<SampleSet, LineFault> {
        split.set(line, &LineKeys::read(line, split.by()).unwrap())
    }

    #[test]
    fn the_share_is_kept_on_average() {
        let split = SampleSplit::new(0.1, None);
        let lines = (0..10_000).map(|number| format!(r#"{{"text": "{number}"}}"#));
        let val = lines.filter(|line| set(&split, line).unwrap() == SampleSet::Val).count();
        // Four standard deviations of a binomial variable.
        assert!((880..1_120).contains(&val), "{val}");
    }

    /// Existing sets were divided so.
    #[test]
    fn the_set_of_a_key_never_changes() {
        let split = SampleSplit::new(0.5, Some("module".to_owned()));
        let sets =
            (0..8).map(|number| set(&split, &format!(r#"{{"module": "m{number}"}}"#)).unwrap());
        let sets: String = sets.map(|set| if set == SampleSet::Val { 'v' } else { 't' }).collect();
        assert_eq!(sets, "vvtvvvvt");
    }

    #[test]
    fn samples_with_the_same_key_are_in_the_same_set() {
        let split = SampleSplit::new(0.5, Some("module".to_owned()));
        for number in 0..100 {
            let of = |rest: &str| {
                set(&split, &format!(r#"{{"text": "{rest}", "module": {number}}}"#)).unwrap()
            };
            assert_eq!(of("a"), of("b"));
        }
    }

    #[test]
    fn a_line_without_the_key_is_refused() {
        let split = SampleSplit::new(0.5, Some("module".to_owned()));
        for line in [r#"{"text": "a"}"#, r#"{"module": null}"#] {
            let reason = set(&split, line).unwrap_err().reason;
            assert!(reason.starts_with("has no \"module\", which decides"), "{reason}");
        }
    }
}
