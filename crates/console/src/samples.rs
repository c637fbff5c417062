//! How many samples a recipe's training set has.

use baton_data::{
    Error,
    shards::{Options, ShardSet},
};
use baton_recipe::JobSpec;

/// The size of a training set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Samples {
    /// Counted, or given by the user.
    Known(u64),
    /// Not known, with the reason.
    Unknown(String),
}

impl Samples {
    /// Size of the recipe's training set; see [`Self::at`].
    pub fn of(spec: &JobSpec, given: Option<u64>) -> Result<Self, String> {
        Self::at(&spec.data.train, given)
    }

    /// Size of the data set at `location`: the given number, or else read from the headers of local files. Buckets are
    /// not read, so that checking a recipe needs neither network nor credentials.
    pub fn at(location: &str, given: Option<u64>) -> Result<Self, String> {
        if let Some(samples) = given {
            return Ok(Self::Known(samples));
        }
        if location.contains("://") && !location.starts_with("file://") {
            return Ok(Self::Unknown(format!("{location} is not read")));
        }
        // Local files are never cached, so the options of the cache do not matter.
        let options = Options::new("", 0);
        match ShardSet::open(location, &options).and_then(|set| set.samples()) {
            Ok(shards) => Ok(Self::Known(shards.iter().sum())),
            Err(Error::NothingMatches { .. }) => {
                Ok(Self::Unknown(format!("{location} does not exist on this machine")))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}
