//! Layers by the names of their parameters, for learning rates that fall from layer to layer.

use std::collections::{BTreeMap, BTreeSet};

/// For each parameter the number of layers above its own, given all names in the order of a state dict.
///
/// The layer of a parameter is the first numbered part of its name that has siblings, as `encoder.layer_3` in
/// `encoder.layer_3.mlp.0.weight` beside `encoder.layer_4`. All parameters before the first of these are one layer, such
/// as the stem and embeddings; all after the last one too, the head. Others belong to the layer before them.
#[must_use]
pub fn layers_above(names: &[&str]) -> Vec<u32> {
    let mut numbers: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for name in names {
        for part in NumberedPart::of(name) {
            numbers.entry((part.before, part.series)).or_default().insert(part.number);
        }
    }
    let layer = |name: &str| {
        let has_siblings = |part: &NumberedPart<'_>| {
            numbers.get(&(part.before, part.series)).is_some_and(|numbers| numbers.len() > 1)
        };
        NumberedPart::of(name)
            .find(has_siblings)
            .map(|part| (part.before.to_owned(), part.series.to_owned(), part.number.to_owned()))
    };
    let layers: Vec<_> = names.iter().map(|name| layer(name)).collect();
    let last = layers.iter().rposition(Option::is_some).unwrap_or(names.len());
    let mut known: BTreeMap<_, u32> = BTreeMap::new();
    let mut depths = Vec::with_capacity(names.len());
    let (mut depth, mut count) = (0, 0);
    for (position, layer) in layers.into_iter().enumerate() {
        if let Some(layer) = layer {
            depth = *known.entry(layer).or_insert_with(|| {
                // The first one is above the parameters before it, if there are any.
                count += u32::from(position > 0);
                count
            });
        } else if position > last {
            depth = count + 1;
        }
        depths.push(depth);
    }
    let top = depths.iter().copied().max().unwrap_or_default();
    depths.into_iter().map(|depth| top - depth).collect()
}

/// A part of a name that ends with a number.
struct NumberedPart<'a> {
    /// The parts before it.
    before: &'a str,
    /// The part without its number.
    series: &'a str,
    number: &'a str,
}

impl<'a> NumberedPart<'a> {
    fn of(name: &'a str) -> impl Iterator<Item = Self> {
        let mut start = 0;
        name.split('.').filter_map(move |part| {
            let before = &name[..start];
            start += part.len() + 1;
            let series = part.trim_end_matches(|letter: char| letter.is_ascii_digit());
            let number = &part[series.len()..];
            (!number.is_empty()).then_some(Self { before, series, number })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbered_part_with_siblings_is_the_layer() {
        let names = [
            "class_token",
            "conv_proj.weight",
            "encoder.pos_embedding",
            "encoder.layers.encoder_layer_0.mlp.0.weight",
            "encoder.layers.encoder_layer_0.mlp.3.weight",
            "encoder.layers.encoder_layer_1.ln_1.weight",
            "encoder.layers.encoder_layer_10.ln_1.weight",
            "encoder.ln.weight",
            "heads.head.weight",
        ];
        assert_eq!(layers_above(&names), [4, 4, 4, 3, 3, 2, 1, 0, 0]);
        let names = [
            "conv1.weight",
            "bn1.bias",
            "layer1.0.conv1.weight",
            "layer2.0.bn1.weight",
            "fc.weight",
        ];
        assert_eq!(layers_above(&names), [3, 3, 2, 1, 0]);
        let names = ["0.weight", "0.bias", "norm.weight", "2.weight"];
        assert_eq!(layers_above(&names), [1, 1, 1, 0]);
    }

    #[test]
    fn a_network_without_numbers_is_one_layer() {
        assert_eq!(layers_above(&["body.weight", "head.weight"]), [0, 0]);
        assert_eq!(layers_above(&["conv1.weight", "fc.weight"]), [0, 0]);
        assert_eq!(layers_above(&[]), [0_u32; 0]);
    }
}
