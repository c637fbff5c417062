use proptest::{collection::vec, prelude::*};

use super::*;

fn order(kind: Order, samples: u64, seed: u64) -> SampleOrder {
    SampleOrder::new(kind, seed, 0, SampleBlocks::of_files(&[samples]))
}

fn random(samples: u64, seed: u64) -> SampleOrder {
    order(Order::Random, samples, seed)
}

fn epoch(order: &SampleOrder, epoch: u32) -> Vec<u64> {
    let order = order.epoch(epoch);
    (0..order.samples).map(|position| order.at(position)).collect()
}

fn is_permutation(values: &[u64]) -> bool {
    let mut seen = vec![false; values.len()];
    values.iter().all(|value| {
        seen.get_mut(*value as usize).is_some_and(|seen| !std::mem::replace(seen, true))
    })
}

#[test]
fn every_small_number_of_samples_gives_a_permutation() {
    for samples in 1..=600 {
        assert!(is_permutation(&epoch(&random(samples, 5), 2)), "{samples} samples");
    }
}

#[test]
fn imagenet_gives_a_permutation() {
    assert!(is_permutation(&epoch(&random(1_281_167, 42), 17)));
}

#[test]
fn the_largest_number_of_samples_stays_in_range() {
    for samples in [1 << 40, (1 << 62) + 12_345, u64::MAX - 1, u64::MAX] {
        let order = random(samples, 1);
        let positions = [0, 1, samples / 3, samples - 1];
        let order = order.epoch(0);
        let visited = positions.map(|position| order.at(position));
        assert!(visited.iter().all(|sample| *sample < samples));
        for (i, sample) in visited.iter().enumerate() {
            assert!(!visited[..i].contains(sample), "{samples} samples: {sample} twice");
        }
    }
}

#[test]
fn sequential_is_the_order_of_the_file_in_every_epoch() {
    let order = order(Order::Sequential, 5, 9);
    assert_eq!(epoch(&order, 0), [0, 1, 2, 3, 4]);
    assert_eq!(epoch(&order, 7), [0, 1, 2, 3, 4]);
}

#[test]
#[should_panic(expected = "position 5 of 5 samples")]
fn a_position_beyond_the_end_is_a_bug() {
    let _ = random(5, 0).epoch(0).at(5);
}

/// Checkpoints store a position, not a list: a changed order would repeat and skip samples.
/// The numbers were computed by another implementation, in Python.
#[test]
fn the_order_never_changes_between_versions() {
    assert_eq!(epoch(&random(10, 1), 0), [7, 5, 4, 0, 3, 2, 6, 9, 8, 1]);
}

/// Over many epochs every sample is equally often at every position.
#[test]
fn every_position_gets_every_sample_equally_often() {
    for samples in [2_u64, 3, 4, 5, 7, 12, 30] {
        let cells = (samples * samples) as usize;
        let expected = 2_000.0;
        let mut counts = vec![0_u32; cells];
        let order = random(samples, 3);
        for number in 0..(samples as u32 * expected as u32) {
            for (position, sample) in epoch(&order, number).into_iter().enumerate() {
                counts[position * samples as usize + sample as usize] += 1;
            }
        }
        let square = |count: u32| (f64::from(count) - expected).powi(2) / expected;
        let chi_square: f64 = counts.into_iter().map(square).sum();
        let freedom = ((samples - 1) * (samples - 1)) as f64;
        // Mean `freedom`, variance `2 freedom`; five deviations and a little for the skew.
        let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 10.0;
        assert!(chi_square < limit, "{samples} samples: {chi_square} above {limit}");
    }
}

/// Sample p + 1 does not follow sample p more often than any other does.
#[test]
fn neighbours_are_separated() {
    let order = random(10_000, 8);
    let together = (0..20)
        .map(|number| {
            let visited = epoch(&order, number);
            visited.windows(2).filter(|pair| pair[1] == pair[0] + 1).count()
        })
        .sum::<usize>();
    // One per epoch is expected; 20 epochs give 20, with a standard deviation of 4.5.
    assert!((2..=45).contains(&together), "{together} neighbours were not separated");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_seed_and_epoch_give_a_permutation(
        samples in 1_u64..5_000, seed: u64, number: u32,
    ) {
        prop_assert!(is_permutation(&epoch(&random(samples, seed), number)));
    }

    #[test]
    fn epochs_and_seeds_differ(samples in 50_u64..5_000, seed: u64, number in 0..u32::MAX) {
        let order = epoch(&random(samples, seed), number);
        prop_assert_ne!(&order, &epoch(&random(samples, seed), number + 1));
        prop_assert_ne!(&order, &epoch(&random(samples, seed.wrapping_add(1)), number));
    }
}

fn quasi(files: &[u64], window: u64, seed: u64) -> SampleOrder {
    SampleOrder::new(Order::QuasiRandom, seed, window, SampleBlocks::of_files(files))
}

/// Which file a sample is in.
fn file(files: &[u64], sample: u64) -> usize {
    let mut end = 0;
    files
        .iter()
        .position(|samples| {
            end += samples;
            sample < end
        })
        .unwrap()
}

/// Like [`the_order_never_changes_between_versions`]; the numbers were computed by the first version.
#[test]
fn quasi_random_order_never_changes_between_versions() {
    let order = quasi(&[3, 2, 4, 1], 4, 1);
    assert_eq!(epoch(&order, 0), [7, 9, 3, 5, 8, 4, 6, 0, 2, 1]);
}

#[test]
fn a_window_of_quasi_random_order_reads_only_its_blocks() {
    let files = [10; 20];
    let order = quasi(&files, 35, 7);
    for number in 0..5 {
        let visited = epoch(&order, number);
        let mut seen = std::collections::HashSet::new();
        // 35 samples need four blocks of ten.
        for window in visited.chunks(40) {
            let blocks: std::collections::HashSet<usize> =
                window.iter().map(|sample| file(&files, *sample)).collect();
            assert_eq!(blocks.len(), 4, "epoch {number}");
            assert!(blocks.into_iter().all(|block| seen.insert(block)), "a block is visited twice");
            let sorted = window.is_sorted();
            assert!(!sorted, "a window is shuffled");
        }
    }
}

/// A node with memory for two windows of a much larger data set reads every block once. In random order it would read
/// a block for nearly every sample.
#[test]
fn quasi_random_order_reads_every_block_once_if_two_windows_fit_into_memory() {
    let (blocks, each, window_blocks) = (200_u64, 50_u64, 8);
    let files = vec![each; blocks as usize];
    let reads = |order: &SampleOrder| {
        // The least recently used block is evicted when memory is full.
        let (mut memory, mut reads) = (std::collections::VecDeque::new(), 0_u64);
        for sample in epoch(order, 3) {
            let block = sample / each;
            if let Some(at) = memory.iter().position(|in_memory| *in_memory == block) {
                memory.remove(at);
            } else {
                reads += 1;
                if memory.len() == 2 * window_blocks as usize {
                    memory.pop_front();
                }
            }
            memory.push_back(block);
        }
        reads as f64 / blocks as f64
    };
    let near = reads(&quasi(&files, window_blocks * each, 5));
    let far = reads(&SampleOrder::new(Order::Random, 5, 0, SampleBlocks::of_files(&files)));
    assert!((near - 1.0).abs() < 1e-9, "amplification {near}");
    assert!(far > 40.0, "amplification {far}");
}

#[test]
fn blocks_are_listed_in_the_order_of_their_use() {
    let files = [7, 5, 9, 3, 8, 6];
    let order = quasi(&files, 10, 3).epoch(2);
    let visited: Vec<u64> = (0..38).map(|position| order.at(position)).collect();
    for position in 0..38 {
        let blocks = order.blocks_from(position).unwrap();
        let first = blocks
            .iter()
            .position(|block| *block as usize == file(&files, visited[position as usize]));
        // The block of this position is in the first listed window: at most ten samples, four blocks.
        assert!(first.is_some_and(|first| first < 4), "position {position}");
        let needed: std::collections::BTreeSet<u32> = visited[position as usize..]
            .iter()
            .map(|sample| file(&files, *sample) as u32)
            .collect();
        assert!(needed.iter().all(|block| blocks.contains(block)), "position {position}");
    }
}

#[test]
fn a_window_larger_than_the_set_shuffles_all_of_it() {
    let order = quasi(&[50, 50], 1_000, 3);
    let visited = epoch(&order, 0);
    let of_first = visited[..50].iter().filter(|sample| **sample < 50).count();
    assert!((10..=40).contains(&of_first), "{of_first} of the first block");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn quasi_random_order_visits_every_sample_once(
        files in vec(0_u64..60, 1..30), window in 0_u64..200, seed: u64, number: u32,
    ) {
        let order = quasi(&files, window, seed);
        let visited = epoch(&order, number);
        prop_assert_eq!(visited.len() as u64, files.iter().sum::<u64>());
        prop_assert!(is_permutation(&visited));
    }

    #[test]
    fn quasi_random_epochs_and_seeds_differ(
        files in vec(5_u64..60, 10..30), window in 0_u64..200, seed: u64, number in 0..u32::MAX,
    ) {
        let order = epoch(&quasi(&files, window, seed), number);
        prop_assert_ne!(&order, &epoch(&quasi(&files, window, seed), number + 1));
        prop_assert_ne!(&order, &epoch(&quasi(&files, window, seed.wrapping_add(1)), number));
    }
}
