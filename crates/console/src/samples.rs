//! How many samples a training set has.

use std::path::{Path, PathBuf};

use baton_data::{
    Beton, Dataset, Error, Items, Source,
    shards::{self, Options, ShardSet},
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
    /// Size of the recipe's training set; see [`Self::at`]. Texts that share sequences count as these sequences.
    pub fn of(spec: &JobSpec, given: Option<u64>) -> Result<Self, String> {
        let location = &spec.data.train;
        match Self::at(location, given)? {
            Self::Known(samples) if given.is_none() && spec.model.arch.is_causal_lm() => {
                // Local files are never cached.
                let set = Dataset::open(Source::of_recipe(spec, location, PathBuf::new()));
                let items = set.and_then(|set| Items::new(spec, location, &set));
                items
                    .map(|items| Self::Known(items.count(samples)))
                    .map_err(|error| error.to_string())
            }
            found => Ok(found),
        }
    }

    /// Size of the data set at `location`: the given number, or else counted in local files. Buckets are not read, so
    /// that checking a recipe needs neither network nor credentials.
    ///
    /// # Errors
    /// The location is invalid, a folder without data, or a file that is damaged.
    pub fn at(location: &str, given: Option<u64>) -> Result<Self, String> {
        let is_remote = shards::is_remote(location).map_err(|error| error.to_string())?;
        if let Some(samples) = given {
            return Ok(Self::Known(samples));
        }
        if is_remote {
            return Ok(Self::Unknown(format!("{location} is not read")));
        }
        match count(location) {
            Ok(samples) => Ok(Self::Known(samples)),
            Err(Error::NothingMatches { .. }) if !is_there(location) => {
                Ok(Self::Unknown(format!("{location} does not exist on this machine")))
            }
            Err(Error::NothingMatches { .. }) => {
                Err(format!("{location} is a folder without .beton files"))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Mean number of tokens of the recipe's training items: texts, or sequences of several. `None` if its files are not on
/// this machine.
///
/// # Errors
/// A file is damaged, or a text is longer than a sequence.
pub fn mean_tokens(spec: &JobSpec) -> Result<Option<u64>, String> {
    let location = &spec.data.train;
    if !matches!(Samples::at(location, None)?, Samples::Known(_)) {
        return Ok(None);
    }
    let set = Dataset::open(Source::of_recipe(spec, location, PathBuf::new()));
    let mean = set.and_then(|set| {
        let tokens: u64 = set.text_sizes()?.iter().map(|size| u64::from(size.tokens)).sum();
        let items = Items::new(spec, location, &set)?.count(set.len());
        Ok(tokens.checked_div(items))
    });
    mean.map_err(|error| error.to_string())
}

/// Number of samples in local files, each of which is opened, because the header of a file that was cut off is intact.
fn count(location: &str) -> Result<u64, Error> {
    // Local files are never cached, so the options of the cache do not matter.
    let set = ShardSet::open(location, &Options::new("", 0))?;
    let samples = |shard| -> Result<u64, Error> { Ok(Beton::open(set.local(shard)?)?.len()) };
    (0..set.len()).map(samples).sum()
}

fn is_there(location: &str) -> bool {
    Path::new(location.strip_prefix("file://").unwrap_or(location)).exists()
}
