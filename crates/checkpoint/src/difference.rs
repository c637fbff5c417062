//! How far the states of two checkpoints lie apart.

use std::{borrow::Cow, collections::HashMap};

use crate::{Error, Flat, Manifest, Store, TensorInfo, export::contiguous};

/// The states of two checkpoints, compared value by value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// Every region of either, in the order of the first.
    pub regions: Vec<Compared>,
    /// Every named tensor of either, the most different first by [`Spread::largest_relative`].
    pub tensors: Vec<Compared>,
}

/// One region or tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// What was found.
    pub finding: Finding,
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finding {
    /// All bits are the same.
    Same,
    /// Some are not.
    Different(Spread),
    /// They are of different shapes.
    OtherShape,
    /// Only the first checkpoint has it.
    OnlyInFirst,
    /// Only the second one has it.
    OnlyInSecond,
}

/// How different two runs of values are.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Values whose bits differ.
    pub different: u64,
    /// All values.
    pub values: u64,
    /// Largest |a − b|; infinite where one of the two is no number.
    pub largest_absolute: f64,
    /// Largest |a − b| / max(|a|, |b|), 0 to 2; infinite where one of the two is not finite.
    pub largest_relative: f64,
}

impl Difference {
    /// Compares two checkpoints, however their values are laid out. The weights of one and a region of each are
    /// in memory at a time. The files are taken as they lie; see [`Store::prove`].
    ///
    /// # Errors
    /// A region cannot be read.
    pub fn between(a: (&Store, &Manifest), b: (&Store, &Manifest)) -> Result<Self, Error> {
        let mut difference = Self::default();
        let (mine, theirs) = (a.1.places(), b.1.places());
        let mut held: HashMap<&str, Vec<f32>> = HashMap::new();
        for TensorInfo { region, .. } in &theirs.tensors {
            if !held.contains_key(region.as_str()) {
                held.insert(region, b.0.read_region(b.1, region)?);
            }
        }
        for Flat { name, .. } in &mine.regions {
            let values = a.0.read_region(a.1, name)?;
            let finding = match theirs.region(name) {
                None => Finding::OnlyInFirst,
                Some(_) => {
                    let others = match held.get(name.as_str()) {
                        Some(others) => Cow::from(others),
                        None => b.0.read_region(b.1, name)?.into(),
                    };
                    compare_regions((&mine.places(name), &values), (&theirs.places(name), &others))
                }
            };
            difference.regions.push(Compared { name: name.clone(), finding });
            for tensor in mine.tensors.iter().filter(|tensor| tensor.region == *name) {
                let twin = theirs.tensors.iter().find(|twin| twin.name == tensor.name);
                let finding = match twin {
                    None => Finding::OnlyInFirst,
                    Some(twin) if twin.shape != tensor.shape => Finding::OtherShape,
                    Some(twin) => {
                        let others = held.get(twin.region.as_str()).map_or(&[][..], Vec::as_slice);
                        compare(&in_order(tensor, &values), &in_order(twin, others))
                    }
                };
                difference.tensors.push(Compared { name: tensor.name.clone(), finding });
            }
        }
        let only_b =
            |name: &String| Compared { name: name.clone(), finding: Finding::OnlyInSecond };
        let regions = theirs.regions.iter().map(|region| &region.name);
        let added = regions.filter(|name| mine.region(name).is_none());
        difference.regions.extend(added.map(only_b));
        let tensors = theirs.tensors.iter().map(|tensor| &tensor.name);
        let added = tensors.filter(|name| !mine.tensors.iter().any(|tensor| tensor.name == **name));
        difference.tensors.extend(added.map(only_b));
        difference.tensors.sort_by(|a, b| b.finding.distance().total_cmp(&a.finding.distance()));
        Ok(difference)
    }

    /// Whether all bits are the same.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.regions.iter().chain(&self.tensors).all(|part| part.finding == Finding::Same)
    }
}

impl Finding {
    /// What differs most comes first.
    fn distance(&self) -> f64 {
        match self {
            Self::Same => -1.0,
            Self::Different(spread) => spread.largest_relative,
            Self::OtherShape | Self::OnlyInFirst | Self::OnlyInSecond => f64::INFINITY,
        }
    }
}

/// The values of a tensor in the order of its shape; none if it does not lie in its region.
fn in_order<'a>(tensor: &TensorInfo, region: &'a [f32]) -> Cow<'a, [f32]> {
    let end = tensor.len().and_then(|len| len.checked_add(tensor.offset));
    let values = end.and_then(|end| region.get(tensor.offset..end)).unwrap_or_default();
    contiguous(tensor, values)
}

/// Compares what lies in two regions of one name.
fn compare_regions(a: (&[&TensorInfo], &[f32]), b: (&[&TensorInfo], &[f32])) -> Finding {
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
    if mine.0 == theirs.0 { compare(&mine.1, &theirs.1) } else { Finding::OtherShape }
}

fn compare(a: &[f32], b: &[f32]) -> Finding {
    if a.len() != b.len() {
        return Finding::OtherShape;
    }
    let mut spread = Spread { values: a.len() as u64, ..Spread::default() };
    for (a, b) in a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()) {
        spread.different += 1;
        let (a, b) = (f64::from(*a), f64::from(*b));
        let absolute = number_or_infinity((a - b).abs());
        let larger = a.abs().max(b.abs());
        // Zero and minus zero have other bits and the same value.
        let relative = if absolute == 0.0 { 0.0 } else { number_or_infinity(absolute / larger) };
        spread.largest_absolute = spread.largest_absolute.max(absolute);
        spread.largest_relative = spread.largest_relative.max(relative);
    }
    if spread.different == 0 { Finding::Same } else { Finding::Different(spread) }
}

/// NaN is as far away as can be.
fn number_or_infinity(value: f64) -> f64 {
    if value.is_nan() { f64::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(a: &[f32], b: &[f32]) -> (u64, f64, f64) {
        match compare(a, b) {
            Finding::Different(spread) => {
                (spread.different, spread.largest_absolute, spread.largest_relative)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn bits_are_compared_and_distances_told() {
        assert_eq!(compare(&[1.0, f32::NAN], &[1.0, f32::NAN]), Finding::Same);
        assert_eq!(compare(&[1.0], &[1.0, 2.0]), Finding::OtherShape);
        assert_eq!(spread(&[1.0, 2.0, 8.0], &[1.0, 1.0, 9.0]), (2, 1.0, 0.5));
        assert_eq!(spread(&[1.0], &[-1.0]), (1, 2.0, 2.0));
        assert_eq!(spread(&[0.0], &[-0.0]), (1, 0.0, 0.0));
    }

    #[test]
    fn what_is_no_number_is_infinitely_far_away() {
        assert_eq!(spread(&[f32::NAN], &[1.0]), (1, f64::INFINITY, f64::INFINITY));
        assert_eq!(spread(&[f32::INFINITY], &[1.0]), (1, f64::INFINITY, f64::INFINITY));
        // The same value, told apart by nothing but the bits of NaN.
        let other_nan = f32::from_bits(f32::NAN.to_bits() ^ 1);
        assert_eq!(spread(&[f32::NAN], &[other_nan]), (1, f64::INFINITY, f64::INFINITY));
    }
}
