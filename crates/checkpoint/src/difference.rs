//! Comparison of the states of two checkpoints.

use std::{borrow::Cow, collections::HashMap};

use crate::{Error, FlatRegion, Manifest, Store, TensorInfo, export::contiguous};

/// Result of comparing the states of two checkpoints value by value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// Every region of either checkpoint, in the order of the first.
    pub regions: Vec<ComparedItem>,
    /// Every named tensor of either checkpoint, sorted by [`ValueDifference::largest_relative`], largest first.
    pub tensors: Vec<ComparedItem>,
}

/// Result for one region or tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedItem {
    /// Name of the region or tensor.
    pub name: String,
    /// Result of the comparison.
    pub finding: Comparison,
}

/// Result of comparing two regions or tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Comparison {
    /// All bits are equal.
    Same,
    /// Some bits differ.
    Different(ValueDifference),
    /// The shapes differ.
    OtherShape,
    /// Only the first checkpoint contains it.
    OnlyInFirst,
    /// Only the second checkpoint contains it.
    OnlyInSecond,
}

/// Size of the difference between two sequences of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueDifference {
    /// Number of values whose bits differ.
    pub different: u64,
    /// Number of all values.
    pub values: u64,
    /// Largest |a − b|; infinite if a or b is NaN.
    pub largest_absolute: f64,
    /// Largest |a − b| / max(|a|, |b|), 0 to 2; infinite if a or b is not finite.
    pub largest_relative: f64,
}

impl Difference {
    /// Compares two checkpoints, whatever their layouts. The weights of one checkpoint and one region of each are
    /// in memory at a time. Digests are not checked; see [`Store::verify`].
    ///
    /// # Errors
    /// A region cannot be read.
    pub fn between(a: (&Store, &Manifest), b: (&Store, &Manifest)) -> Result<Self, Error> {
        let mut difference = Self::default();
        let (mine, theirs) = (a.1.state_layout(), b.1.state_layout());
        let mut their_regions: HashMap<&str, Vec<f32>> = HashMap::new();
        // A region without values is not stored.
        let with_values = theirs.tensors.iter().filter(|tensor| tensor.len() != Some(0));
        for TensorInfo { region, .. } in with_values {
            if !their_regions.contains_key(region.as_str()) {
                their_regions.insert(region, b.0.read_region(b.1, region)?);
            }
        }
        let mut compare_tensor = |tensor: &TensorInfo, values: &[f32]| {
            let counterpart =
                theirs.tensors.iter().find(|counterpart| counterpart.name == tensor.name);
            let finding = match counterpart {
                None => Comparison::OnlyInFirst,
                Some(counterpart) if counterpart.shape != tensor.shape => Comparison::OtherShape,
                Some(counterpart) => {
                    let others = their_regions
                        .get(counterpart.region.as_str())
                        .map_or(&[][..], Vec::as_slice);
                    compare(&in_order(tensor, values), &in_order(counterpart, others))
                }
            };
            difference.tensors.push(ComparedItem { name: tensor.name.clone(), finding });
        };
        for FlatRegion { name, .. } in &mine.regions {
            let values = a.0.read_region(a.1, name)?;
            let finding = match theirs.region(name) {
                None => Comparison::OnlyInFirst,
                Some(_) => {
                    let others = match their_regions.get(name.as_str()) {
                        Some(others) => Cow::from(others),
                        None => b.0.read_region(b.1, name)?.into(),
                    };
                    let (mine, theirs) = (mine.tensors_in(name), theirs.tensors_in(name));
                    compare_regions((&mine, &values), (&theirs, &others))
                }
            };
            difference.regions.push(ComparedItem { name: name.clone(), finding });
            let tensors = mine.tensors.iter().filter(|tensor| tensor.region == *name);
            tensors.for_each(|tensor| compare_tensor(tensor, &values));
        }
        let elsewhere = mine.tensors.iter().filter(|tensor| mine.region(&tensor.region).is_none());
        elsewhere.for_each(|tensor| compare_tensor(tensor, &[]));
        let only_b =
            |name: &String| ComparedItem { name: name.clone(), finding: Comparison::OnlyInSecond };
        let regions = theirs.regions.iter().map(|region| &region.name);
        let added = regions.filter(|name| mine.region(name).is_none());
        difference.regions.extend(added.map(only_b));
        let tensors = theirs.tensors.iter().map(|tensor| &tensor.name);
        let added = tensors.filter(|name| !mine.tensors.iter().any(|tensor| tensor.name == **name));
        difference.tensors.extend(added.map(only_b));
        difference.tensors.sort_by(|a, b| b.finding.distance().total_cmp(&a.finding.distance()));
        Ok(difference)
    }

    /// Whether all bits are equal.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.regions.iter().chain(&self.tensors).all(|part| part.finding == Comparison::Same)
    }
}

impl Comparison {
    /// Sort key: the larger, the more different.
    fn distance(&self) -> f64 {
        match self {
            Self::Same => -1.0,
            Self::Different(difference) => difference.largest_relative,
            Self::OtherShape | Self::OnlyInFirst | Self::OnlyInSecond => f64::INFINITY,
        }
    }
}

/// The values of a tensor in the order of its shape; empty if the tensor is not inside its region.
fn in_order<'a>(tensor: &TensorInfo, region: &'a [f32]) -> Cow<'a, [f32]> {
    let end = tensor.len().and_then(|len| len.checked_add(tensor.offset));
    let values = end.and_then(|end| region.get(tensor.offset..end)).unwrap_or_default();
    contiguous(tensor, values)
}

/// Compares the contents of two regions with the same name.
fn compare_regions(a: (&[&TensorInfo], &[f32]), b: (&[&TensorInfo], &[f32])) -> Comparison {
    if a.0 == b.0 {
        return compare(a.1, b.1);
    }
    let [mine, theirs] = [a, b].map(|(tensors, region)| {
        let mut tensors = tensors.to_vec();
        tensors.sort_by_key(|tensor| &tensor.name);
        let shapes: Vec<_> = tensors.iter().map(|tensor| (&tensor.name, &tensor.shape)).collect();
        let values = tensors.iter().flat_map(|tensor| in_order(tensor, region).into_owned());
        (shapes, values.collect::<Vec<f32>>())
    });
    if mine.0 == theirs.0 { compare(&mine.1, &theirs.1) } else { Comparison::OtherShape }
}

fn compare(a: &[f32], b: &[f32]) -> Comparison {
    if a.len() != b.len() {
        return Comparison::OtherShape;
    }
    let mut difference = ValueDifference { values: a.len() as u64, ..ValueDifference::default() };
    for (a, b) in a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()) {
        difference.different += 1;
        let (a, b) = (f64::from(*a), f64::from(*b));
        let absolute = number_or_infinity((a - b).abs());
        let larger = a.abs().max(b.abs());
        // Zero and minus zero have different bits and the same value.
        let relative = if absolute == 0.0 { 0.0 } else { number_or_infinity(absolute / larger) };
        difference.largest_absolute = difference.largest_absolute.max(absolute);
        difference.largest_relative = difference.largest_relative.max(relative);
    }
    if difference.different == 0 { Comparison::Same } else { Comparison::Different(difference) }
}

/// Treats NaN as an infinite difference.
fn number_or_infinity(value: f64) -> f64 {
    if value.is_nan() { f64::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(a: &[f32], b: &[f32]) -> (u64, f64, f64) {
        match compare(a, b) {
            Comparison::Different(difference) => {
                (difference.different, difference.largest_absolute, difference.largest_relative)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bits_are_compared_and_distances_reported() {
        assert_eq!(compare(&[1.0, f32::NAN], &[1.0, f32::NAN]), Comparison::Same);
        assert_eq!(compare(&[1.0], &[1.0, 2.0]), Comparison::OtherShape);
        assert_eq!(difference(&[1.0, 2.0, 8.0], &[1.0, 1.0, 9.0]), (2, 1.0, 0.5));
        assert_eq!(difference(&[1.0], &[-1.0]), (1, 2.0, 2.0));
        assert_eq!(difference(&[0.0], &[-0.0]), (1, 0.0, 0.0));
    }

    #[test]
    fn nan_is_infinitely_far_away() {
        assert_eq!(difference(&[f32::NAN], &[1.0]), (1, f64::INFINITY, f64::INFINITY));
        assert_eq!(difference(&[f32::INFINITY], &[1.0]), (1, f64::INFINITY, f64::INFINITY));
        // Two NaNs that differ in their bits only.
        let other_nan = f32::from_bits(f32::NAN.to_bits() ^ 1);
        assert_eq!(difference(&[f32::NAN], &[other_nan]), (1, f64::INFINITY, f64::INFINITY));
    }
}
