//! The networks that a recipe can name.

mod resnet;

use std::{fmt, sync::LazyLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use self::resnet::BlockKind::{Basic, Bottleneck};
use crate::{NetworkDescription, NetworkOptions};

/// The networks, with their names in `model.arch`. A new network needs one more line here.
static MODELS: &[Model] = &[
    image("resnet18", |options| resnet::images(options, Basic, [2, 2, 2, 2])),
    image("resnet34", |options| resnet::images(options, Basic, [3, 4, 6, 3])),
    image("resnet50", |options| resnet::images(options, Bottleneck, [3, 4, 6, 3])),
    image("resnet101", |options| resnet::images(options, Bottleneck, [3, 4, 23, 3])),
    image("resnet152", |options| resnet::images(options, Bottleneck, [3, 8, 36, 3])),
    signal("resnet34_1d", |options| resnet::signals(options, Basic, [3, 4, 6, 3])),
    // Softmax regression in plain Rust (`crates/trainer/src/linear.rs`): it takes milliseconds per epoch, for tests of
    // everything except the training computation.
    Model { name: "linear", input: InputKind::Anything, describe: None },
    // A program that `torch.export` wrote; `crates/program` describes it.
    Model { name: PROGRAM, input: InputKind::Anything, describe: None },
    // A language model in the form of Hugging Face; `crates/language` describes it.
    Model { name: CAUSAL_LM, input: InputKind::Tokens, describe: None },
];

const PROGRAM: &str = "program";
const CAUSAL_LM: &str = "causal_lm";

/// The kind of input that a network accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputKind {
    /// Images.
    Images,
    /// Arrays of shape (length) or (channels, length).
    Signals,
    /// Images or arrays.
    Anything,
    /// Token ids.
    Tokens,
}

#[derive(Debug)]
struct Model {
    name: &'static str,
    input: InputKind,
    /// Absent if the network is not described by layers.
    describe: Option<Describe>,
}

type Describe = fn(&NetworkOptions) -> NetworkDescription;

const fn image(name: &'static str, describe: Describe) -> Model {
    Model { name, input: InputKind::Images, describe: Some(describe) }
}

const fn signal(name: &'static str, describe: Describe) -> Model {
    Model { name, input: InputKind::Signals, describe: Some(describe) }
}

/// A network in the registry, `MODELS`.
#[derive(Clone, Copy)]
pub struct Arch(&'static Model);

impl Arch {
    /// All networks in the registry.
    pub fn all() -> impl Iterator<Item = Self> {
        MODELS.iter().map(Self)
    }

    /// The network with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|arch| arch.name() == name)
    }

    /// Its name in recipes and checkpoints.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// The kind of input that it accepts.
    #[must_use]
    pub fn input_kind(self) -> InputKind {
        self.0.input
    }

    /// Whether it is the softmax regression in plain Rust, which has no description.
    #[must_use]
    pub fn is_linear(self) -> bool {
        self.0.describe.is_none() && !self.is_program() && !self.is_causal_lm()
    }

    /// Whether it is a program in a file.
    #[must_use]
    pub fn is_program(self) -> bool {
        self.name() == PROGRAM
    }

    /// Whether it is a language model in a folder.
    #[must_use]
    pub fn is_causal_lm(self) -> bool {
        self.name() == CAUSAL_LM
    }

    /// The description of the network; absent for `linear`, `program` and `causal_lm`.
    #[must_use]
    pub fn describe(self, options: &NetworkOptions) -> Option<NetworkDescription> {
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
    use crate::InputShape;

    #[test]
    fn an_unknown_name_is_rejected_with_a_list_of_all_names() {
        let read = |name: &str| serde_json::from_str::<Arch>(&format!("{name:?}"));
        assert_eq!(read("resnet34_1d").unwrap(), Arch::named("resnet34_1d").unwrap());
        let error = read("resnet19").unwrap_err().to_string();
        assert!(error.contains("unknown variant `resnet19`"), "{error}");
        assert!(Arch::all().all(|arch| error.contains(arch.name())), "{error}");
    }

    #[test]
    fn the_weights_of_all_layers_but_the_last_are_hidden() {
        let options =
            NetworkOptions { channels: 3, outputs: 2, zero_init_gamma: false, blur_pool: false };
        for name in ["resnet50", "resnet34_1d"] {
            let network = Arch::named(name).unwrap().describe(&options).unwrap();
            let weights = network.parameters.iter().filter(|tensor| tensor.decays);
            let others: Vec<&str> = weights
                .filter(|tensor| !tensor.is_hidden)
                .map(|tensor| tensor.name.as_str())
                .collect();
            assert_eq!(others, ["fc.weight"], "{name}");
            assert!(network.parameters.iter().all(|tensor| tensor.decays || !tensor.is_hidden));
        }
    }

    #[test]
    fn batch_norm_needs_two_samples_where_one_pixel_is_left() {
        let options =
            NetworkOptions { channels: 3, outputs: 2, zero_init_gamma: false, blur_pool: false };
        let network = Arch::named("resnet18").unwrap().describe(&options).unwrap();
        // The size is halved five times, each time rounded up.
        for (resolution, min) in [(32, 2), (33, 1), (224, 1)] {
            assert_eq!(network.min_batch(InputShape::Image { resolution }), min, "{resolution}");
        }
        let signals = NetworkOptions { channels: 1, ..options };
        let network = Arch::named("resnet34_1d").unwrap().describe(&signals).unwrap();
        for (length, min) in [(32, 2), (33, 1)] {
            assert_eq!(network.min_batch(InputShape::Signal { channels: 1, length }), min);
        }
    }
}
