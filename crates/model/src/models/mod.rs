//! The networks that a recipe can name.

mod resnet;

use std::{fmt, sync::LazyLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use self::resnet::Kind::{Basic, Bottleneck};
use crate::{Description, Options};

/// The networks, by the name in `model.arch`. To add one is to add a line.
static MODELS: &[Model] = &[
    image("resnet18", |options| resnet::images(options, Basic, [2, 2, 2, 2])),
    image("resnet34", |options| resnet::images(options, Basic, [3, 4, 6, 3])),
    image("resnet50", |options| resnet::images(options, Bottleneck, [3, 4, 6, 3])),
    image("resnet101", |options| resnet::images(options, Bottleneck, [3, 4, 23, 3])),
    image("resnet152", |options| resnet::images(options, Bottleneck, [3, 8, 36, 3])),
    signal("resnet34_1d", |options| resnet::signals(options, Basic, [3, 4, 6, 3])),
    // Softmax regression in plain Rust (`crates/trainer/src/linear.rs`): milliseconds per epoch, for
    // trying out everything around the training itself.
    Model { name: "linear", sees: Sees::Anything, describe: None },
];

/// What a network sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees {
    /// Images.
    Images,
    /// Arrays of shape (length) or (channels, length).
    Signals,
    /// Both.
    Anything,
}

#[derive(Debug)]
struct Model {
    name: &'static str,
    sees: Sees,
    /// Absent if it is not made of layers.
    describe: Option<Describe>,
}

type Describe = fn(&Options) -> Description;

const fn image(name: &'static str, describe: Describe) -> Model {
    Model { name, sees: Sees::Images, describe: Some(describe) }
}

const fn signal(name: &'static str, describe: Describe) -> Model {
    Model { name, sees: Sees::Signals, describe: Some(describe) }
}

/// A network of the registry.
#[derive(Clone, Copy)]
pub struct Arch(&'static Model);

impl Arch {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        MODELS.iter().map(Self)
    }

    /// The one with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|arch| arch.name() == name)
    }

    /// Its name in recipes and checkpoints.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// What it sees.
    #[must_use]
    pub fn sees(self) -> Sees {
        self.0.sees
    }

    /// Whether it is the softmax regression in plain Rust, which has no description.
    #[must_use]
    pub fn is_linear(self) -> bool {
        self.0.describe.is_none()
    }

    /// The network; absent for `linear`.
    #[must_use]
    pub fn describe(self, options: &Options) -> Option<Description> {
        self.0.describe.map(|describe| describe(options))
    }
}

impl PartialEq for Arch {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Arch {}

impl fmt::Debug for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Arch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        static NAMES: LazyLock<Vec<&str>> = LazyLock::new(|| Arch::all().map(Arch::name).collect());
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| D::Error::unknown_variant(&name, &NAMES))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

    use super::*;
    use crate::Input;

    #[test]
    fn an_unknown_name_is_refused_with_all_names() {
        let read = |name: &str| serde_json::from_str::<Arch>(&format!("{name:?}"));
        assert_eq!(read("resnet34_1d").unwrap(), Arch::named("resnet34_1d").unwrap());
        let error = read("resnet19").unwrap_err().to_string();
        assert!(error.contains("unknown variant `resnet19`"), "{error}");
        assert!(Arch::all().all(|arch| error.contains(arch.name())), "{error}");
    }

    #[test]
    fn batch_norm_needs_two_samples_where_one_pixel_is_left() {
        let options = Options { channels: 3, outputs: 2, zero_init_gamma: false, blur_pool: false };
        let network = Arch::named("resnet18").unwrap().describe(&options).unwrap();
        // Five halvings, each rounded up.
        for (resolution, least) in [(32, 2), (33, 1), (224, 1)] {
            assert_eq!(network.least_batch(Input::Image { resolution }), least, "{resolution}");
        }
        let signals = Options { channels: 1, ..options };
        let network = Arch::named("resnet34_1d").unwrap().describe(&signals).unwrap();
        for (length, least) in [(32, 2), (33, 1)] {
            assert_eq!(network.least_batch(Input::Signal { channels: 1, length }), least);
        }
    }
}
