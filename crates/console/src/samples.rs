//! How many samples a recipe's training set has.

use baton_data::shards::{Error, Options, ShardSet};
use baton_recipe::JobSpec;

/// The size of a training set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Counted, or given by the user.
    Known(u64),
    /// And why.
    Unknown(String),
}

impl Samples {
    /// Of `spec`'s training set; see [`Self::at`].
    pub fn of(spec: &JobSpec, given: Option<u64>) -> Result<Self, String> {
        Self::at(&spec.data.train, given)
    }

    /// Takes the number given, else reads it from the headers of local files. Buckets are not asked:
    /// looking at a recipe needs neither network nor credentials.
    pub fn at(location: &str, given: Option<u64>) -> Result<Self, String> {
        if let Some(samples) = given {
            return Ok(Self::Known(samples));
        }
        if location.contains("://") && !location.starts_with("file://") {
            return Ok(Self::Unknown(format!("{location} is not asked")));
        }
        // Local files are never copied, so the cache stays unused.
        let options = Options::new("", 0);
        match ShardSet::open(location, &options).and_then(|set| set.samples()) {
            Ok(shards) => Ok(Self::Known(shards.iter().sum())),
            Err(Error::NothingMatches { .. }) => {
                Ok(Self::Unknown(format!("{location} is not here")))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}
