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

    /// Of these different keys the other files get their shares to within one key, and each at least one if there are enough, by
    /// the [hashes](Self::hash) of the keys, which it sorts. Equal keys stay in one file.
    pub(super) fn exact(hashes: &mut [u64], shares: impl IntoIterator<Item = f64>) -> Self {
        hashes.sort_unstable();
        let shares: Vec<f64> = shares.into_iter().collect();
        let (keys, others) = (hashes.len(), shares.len());
        let (mut sum, mut taken) = (0.0, 0);
        let mut limits = Vec::new();
        for (number, share) in shares.into_iter().enumerate() {
            sum += share;
            // The first file keeps at least one key.
            taken = match keys > others {
                true => ((sum * keys as f64).round() as usize)
                    .clamp(taken + 1, keys - (others - number)),
                false => 0,
            };
            limits.push(hashes.get(taken).copied().unwrap_or_default());
        }
        Self { limits }
    }

    /// What decides about a key.
    pub(super) fn hash(key: &str) -> u64 {
        let hash = blake3::hash(key.as_bytes());
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        u64::from_le_bytes(words[0])
    }

    /// The file of a key: 0 for the first one, 1 for the first of the others.
    #[must_use]
    pub fn set(&self, key: &str) -> usize {
        self.set_of_hash(Self::hash(key))
    }

    pub(super) fn set_of_hash(&self, hash: u64) -> usize {
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

    #[test]
    fn an_exact_split_gives_every_file_its_share_and_a_key() {
        let counts = |keys: u32, shares: [f64; 2]| {
            let keys: Vec<String> = (0..keys).map(|number| number.to_string()).collect();
            let mut hashes: Vec<u64> = keys.iter().map(|key| KeySplit::hash(key)).collect();
            let split = KeySplit::exact(&mut hashes, shares);
            let mut counts = [0; 3];
            keys.iter().for_each(|key| counts[split.set(key)] += 1);
            counts
        };
        assert_eq!(counts(100, [0.1, 0.2]), [70, 10, 20]);
        assert_eq!(counts(10, [0.25, 0.25]), [5, 3, 2]);
        assert_eq!(counts(100, [0.3, 0.001]), [69, 30, 1]);
        assert_eq!(counts(3, [0.9, 0.05]), [1, 1, 1]);
        assert_eq!(counts(2, [0.4, 0.4]), [2, 0, 0], "not enough for all");
        assert_eq!(counts(0, [0.4, 0.4]), [0, 0, 0]);
    }
}
