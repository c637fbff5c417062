//! What tells the data of two runs apart, without reading all of it.

use serde::{Deserialize, Serialize};

/// Summaries of the training and the validation set of a run. Checkpoints store them, and all ranks must have equal ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataSummary {
    /// Of the training set.
    pub train: SetSummary,
    /// Of the validation set.
    pub val: SetSummary,
}

/// Size and contents of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetSummary {
    /// Number of samples.
    pub samples: u64,
    /// Total size of the files, bytes.
    pub bytes: u64,
    /// The digest of the contents.
    pub contents: ContentDigest,
}

/// A digest, as 64 hexadecimal digits, of what is quick to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContentDigest {
    /// Of local files: all of small ones, and of large ones the rows (labels, sizes and positions of the values) and a
    /// part of the values.
    Files(String),
    /// Of the ETags of objects in a bucket.
    Objects(String),
}

impl SetSummary {
    /// How this set differs from the `expected` one, to follow the word "has"; `None` if no difference is known. The
    /// contents of files and objects cannot be compared with each other.
    #[must_use]
    pub fn difference(&self, expected: &Self) -> Option<String> {
        let differing = |found: u64, wanted: u64, unit| {
            (found != wanted).then(|| format!("{found} {unit} instead of {wanted}"))
        };
        let others = || match (&self.contents, &expected.contents) {
            (ContentDigest::Files(found), ContentDigest::Files(wanted))
            | (ContentDigest::Objects(found), ContentDigest::Objects(wanted)) => {
                (found != wanted).then(|| "other contents of the same size".to_owned())
            }
            _ => None,
        };
        differing(self.samples, expected.samples, "samples")
            .or_else(|| differing(self.bytes, expected.bytes, "bytes"))
            .or_else(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(samples: u64, bytes: u64, contents: ContentDigest) -> SetSummary {
        SetSummary { samples, bytes, contents }
    }

    #[test]
    fn the_first_difference_is_named() {
        let files = |digest: &str| ContentDigest::Files(digest.to_owned());
        let objects = |digest: &str| ContentDigest::Objects(digest.to_owned());
        let set = summary(360, 4096, files("a"));
        let difference = |other: SetSummary| other.difference(&set);
        assert_eq!(difference(set.clone()), None);
        let text = "8 samples instead of 360";
        assert_eq!(difference(summary(8, 1, files("b"))).as_deref(), Some(text));
        let text = "1 bytes instead of 4096";
        assert_eq!(difference(summary(360, 1, files("b"))).as_deref(), Some(text));
        let text = "other contents of the same size";
        assert_eq!(difference(summary(360, 4096, files("b"))).as_deref(), Some(text));
        assert_eq!(difference(summary(360, 4096, objects("b"))), None, "not comparable");
        let (ours, theirs) = (objects("a"), objects("b"));
        let difference = summary(360, 4096, ours).difference(&summary(360, 4096, theirs));
        assert_eq!(difference.as_deref(), Some(text));
    }

    #[test]
    fn the_saved_form_does_not_change() {
        let set = |contents| summary(3, 4096, contents);
        let train = set(ContentDigest::Files("ab".to_owned()));
        let data = DataSummary { train, val: set(ContentDigest::Objects("cd".to_owned())) };
        let saved = r#"{"train":{"samples":3,"bytes":4096,"contents":{"files":"ab"}},"val":{"samples":3,"bytes":4096,"contents":{"objects":"cd"}}}"#;
        assert_eq!(serde_json::to_string(&data).unwrap(), saved);
        assert_eq!(serde_json::from_str::<DataSummary>(saved).unwrap(), data);
    }
}
