//! Which texts share a sequence.
//!
//! Short texts fill a sequence together, so that no computation is spent on padding; attention keeps them apart. The
//! pattern of lengths in every sequence is computed once, by best fit in order of decreasing length (Johnson 1973). An
//! epoch permutes the texts of equal length among their places. So every epoch has the same number of sequences and other
//! neighbours, and the texts of any sequence are found without computing those before it: a job resumes anywhere at once.
//!
//! A saved run resumes at a position of this order, so no change may alter it: the tests pin an example.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    order::Permutation,
    random::{Draws, RandomPurpose},
};

/// The sequences of all epochs of one data set.
#[derive(Debug)]
pub struct Packing {
    /// The places of each sequence.
    sequences: Vec<Vec<Place>>,
    classes: Vec<LengthClass>,
}

/// A place for a text.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Index of the texts of its length.
    class: u32,
    /// Number of the place among those of this length.
    number: u32,
}

/// The texts of one length.
#[derive(Debug)]
struct LengthClass {
    texts: Vec<u32>,
    /// `None`: the texts keep their places.
    permutation: Option<Permutation>,
}

impl Packing {
    /// Packs texts of these `lengths`, none above `sequence`, in tokens. Without a `seed`, all epochs are alike.
    #[must_use]
    pub fn new(lengths: &[u32], sequence: u32, seed: Option<u64>) -> Self {
        let mut of_length: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (text, length) in (0..).zip(lengths) {
            of_length.entry(*length).or_default().push(text);
        }
        let mut packing = Self { sequences: Vec::new(), classes: Vec::new() };
        // Free tokens and numbers of the sequences that have room.
        let mut open: BTreeSet<(u32, u32)> = BTreeSet::new();
        for (length, texts) in of_length.into_iter().rev() {
            let class = packing.classes.len() as u32;
            for number in 0..texts.len() as u32 {
                let best = open.range((length, 0)..).next().copied();
                let (room, index) = best.unwrap_or((sequence, packing.sequences.len() as u32));
                if best.is_some() {
                    open.remove(&(room, index));
                } else {
                    packing.sequences.push(Vec::new());
                }
                if let Some(places) = packing.sequences.get_mut(index as usize) {
                    places.push(Place { class, number });
                }
                open.insert((room.saturating_sub(length), index));
            }
            let permutation = seed.map(|seed| {
                let key = Draws::new(seed, 0, length.into(), RandomPurpose::Pack).bits();
                Permutation::new(texts.len() as u64, key)
            });
            packing.classes.push(LengthClass { texts, permutation });
        }
        packing
    }

    /// Number of sequences.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.sequences.len() as u64
    }

    /// Whether there are no sequences.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The texts of a sequence in an epoch, in their order; none if there is no such sequence.
    pub fn texts(&self, epoch: u32, sequence: u64) -> impl Iterator<Item = u64> {
        let places = self.sequences.get(sequence as usize).map_or(&[][..], Vec::as_slice);
        places.iter().map(move |place| {
            let class = &self.classes[place.class as usize];
            let number = u64::from(place.number);
            let number = class.permutation.as_ref().map_or(number, |one| one.at(epoch, number));
            class.texts[number as usize].into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(packing: &Packing, epoch: u32) -> Vec<Vec<u64>> {
        (0..packing.len()).map(|sequence| packing.texts(epoch, sequence).collect()).collect()
    }

    #[test]
    fn every_epoch_has_every_text_once_and_no_sequence_is_too_long() {
        let lengths: Vec<u32> = (0..500).map(|text| 2 + text * 7 % 61).collect();
        let packing = Packing::new(&lengths, 64, Some(3));
        let tokens: u32 = lengths.iter().sum();
        assert!(packing.len() <= u64::from(tokens.div_ceil(64)) + 2, "{} sequences", packing.len());
        for epoch in 0..3 {
            let sequences = all(&packing, epoch);
            let mut texts = sequences.concat();
            texts.sort_unstable();
            assert!(texts.into_iter().eq(0..500));
            for sequence in sequences {
                let tokens: u32 = sequence.iter().map(|text| lengths[*text as usize]).sum();
                assert!((1..=64).contains(&tokens), "{tokens} tokens");
            }
        }
        assert_ne!(all(&packing, 0), all(&packing, 1), "each epoch has other neighbours");
        let other = Packing::new(&lengths, 64, Some(4));
        assert_ne!(all(&packing, 0), all(&other, 0), "so has each seed");
    }

    #[test]
    fn the_best_fit_is_the_sequence_with_the_least_room() {
        // 9 alone; 7 + 3; 6 + 4, not 6 + 3.
        let packing = Packing::new(&[3, 4, 9, 6, 7], 10, None);
        assert_eq!(all(&packing, 0), [vec![2], vec![4, 0], vec![3, 1]]);
        assert_eq!(all(&packing, 5), all(&packing, 0));
    }

    #[test]
    fn the_packing_of_a_saved_run_stays() {
        let packing = Packing::new(&[5, 3, 5, 3, 5, 3, 5, 2], 8, Some(7));
        assert_eq!(all(&packing, 2), [[2, 1], [6, 5], [0, 3], [4, 7]]);
    }
}
