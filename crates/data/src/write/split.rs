//! Which file a sample is written to: a function of its key, so that samples with the same key are in the same file, in
//! whatever order they come and whatever else there is.

/// How samples are divided among a first file and others.
#[derive(Clone, Debug)]
pub struct KeySplit {
    /// Hashes below the first limit are for the first of the other files, and so on.
    limits: Vec<u64>,
}

impl KeySplit {
    /// On average the other files get these shares of the keys, and the first file the rest.
    #[must_use]
    pub fn new(shares: impl IntoIterator<Item = f64>) -> Self {
        let limit = |sum: &mut f64, share: f64| {
            *sum += share;
            // The cast saturates.
            Some((*sum * 2f64.powi(64)) as u64)
        };
        Self { limits: shares.into_iter().scan(0.0, limit).collect() }
    }

    /// The file of a key: 0 for the first one, 1 for the first of the others.
    #[must_use]
    pub fn set(&self, key: &str) -> usize {
        let hash = blake3::hash(key.as_bytes());
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        let hash = u64::from_le_bytes(words[0]);
        self.limits.iter().position(|limit| hash < *limit).map_or(0, |other| other + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_gets_its_share_on_average() {
        let split = KeySplit::new([0.1, 0.2]);
        let mut counts = [0; 3];
        (0..10_000).for_each(|number: u32| counts[split.set(&number.to_string())] += 1);
        // Four standard deviations of a binomial variable.
        assert!(
            (880..1_120).contains(&counts[1]) && (1_840..2_160).contains(&counts[2]),
            "{counts:?}"
        );
    }

    #[test]
    fn a_further_file_takes_no_key_from_another_one() {
        let (two, three) = (KeySplit::new([0.25]), KeySplit::new([0.25, 0.25]));
        for number in 0..1_000 {
            let key = number.to_string();
            assert_eq!(two.set(&key) == 1, three.set(&key) == 1);
        }
    }
}
