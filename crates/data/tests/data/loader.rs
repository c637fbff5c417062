//! Running loaders.

use std::{
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_data::{
    Batch, Beton, Dataset, Decoder, Error, ImageTransform, InputType, Inputs, Loader, Options,
    Preprocessing, Request, SampleFault, Source,
    augment::{Flip, center_crop, random_crop, random_flip},
    random::{Draws, RandomPurpose},
};
use baton_recipe::spec::{Augment, OnBadSample, RandAugment, Resize};

use crate::{
    digits, fixtures,
    sketch::{ROWS_START, Saved, beton, raw},
};

const SEED: u64 = 11;

fn train_set() -> Arc<Dataset> {
    Arc::new(digits::open("digits-train.beton"))
}

fn train_view(resolution: u32) -> Preprocessing {
    augmented(resolution, Augment::default())
}

fn augmented(resolution: u32, augment: Augment) -> Preprocessing {
    Preprocessing::Train { seed: SEED, resolution, resize: Resize::Fast, augment, mean: [0; 3] }
}

fn request(epoch: u32, samples: impl IntoIterator<Item = u64>) -> Request {
    Request { epoch, samples: samples.into_iter().collect(), preprocessing: train_view(24) }
}

/// An infinite sequence of requests.
fn endless() -> impl Iterator<Item = Request> + Send {
    (0..).map(|number| request(number, (0..16).map(|i| u64::from(number) * 16 % 1_400 + i)))
}

fn all(loader: Loader) -> Vec<Batch> {
    loader.map(Result::unwrap).collect()
}

#[test]
fn pixels_do_not_depend_on_threads_or_prefetch() {
    let set = train_set();
    let requests = || endless().take(12);
    let one = all(Loader::start(set.clone(), &Options::new(1, 1), requests()));
    assert_eq!(one.len(), 12);
    for (threads, prefetch) in [(2, 1), (3, 2), (8, 5), (5, 100)] {
        let many = all(Loader::start(set.clone(), &Options::new(threads, prefetch), requests()));
        assert!(one == many, "{threads} threads, {prefetch} batches ahead");
    }
}

#[test]
fn batches_are_delivered_in_the_order_of_the_requests_whatever_their_sizes() {
    let sizes = [1, 40, 0, 3, 64, 0, 0, 2, 1, 17];
    let requests = sizes.map(|size| request(0, (0..size).rev()));
    let batches =
        all(Loader::start(train_set(), &Options::new(4, 3), requests.clone().into_iter()));
    for (batch, request) in batches.iter().zip(&requests) {
        assert_eq!(batch.samples, request.samples);
        assert_eq!(batch.labels.len(), request.samples.len());
        let (pixels, resolution) = batch.images().unwrap();
        assert_eq!(resolution, 24);
        assert_eq!(pixels.len(), request.samples.len() * 24 * 24 * 3);
    }
    assert_eq!(batches.len(), sizes.len());
}

#[test]
fn a_sample_equals_the_result_of_its_preprocessing() {
    let set = train_set();
    let (epoch, sample, resolution) = (3, 77, 20);
    let beton = Beton::open(digits::path("digits-train.beton")).unwrap();
    let mut buffer = Vec::new();
    let images = beton.image_column("image").unwrap();
    let image = beton.image(&images, sample, &mut buffer).unwrap();
    let augment = Augment::default();
    let draws = |operation| Draws::new(SEED, epoch, sample, operation);
    let crop = random_crop(&augment, 32, 32, draws(RandomPurpose::Crop));
    let flip = random_flip(&augment, epoch, |_| draws(RandomPurpose::Flip));
    for resize in [Resize::Fast, Resize::Area] {
        let train = Preprocessing::Train {
            seed: SEED,
            resolution,
            resize,
            augment: augment.clone(),
            mean: [0; 3],
        };
        let evaluate = Preprocessing::Evaluate { resolution, resize, crop_ratio: 0.5 };
        let cases = [(train, crop, flip), (evaluate, center_crop(0.5, 32, 32), Flip::Keep)];
        for (preprocessing, crop, flip) in cases {
            let request = Request { epoch, samples: vec![sample], preprocessing };
            let options = Options::new(1, 1);
            let batch = all(Loader::start(set.clone(), &options, [request].into_iter())).remove(0);
            let mut expected = vec![0; (resolution * resolution * 3) as usize];
            let transform = ImageTransform { crop, flip, resolution, resize };
            Decoder::new().unwrap().render(&image, &transform, &mut expected).unwrap();
            assert!(batch.images() == Some((expected.as_slice(), resolution)));
            assert_eq!(batch.labels, [set.label(sample).unwrap()]);
        }
    }
}

#[test]
fn changed_pixels_do_not_depend_on_threads() {
    let changes = Augment {
        shift: 3,
        rand_augment: Some(RandAugment::default()),
        brightness: 0.4,
        erase: 0.5,
        ..Augment::default()
    };
    let load = |augment: &Augment, threads| {
        let requests = [0..64, 64..128].map(|samples| Request {
            epoch: 1,
            samples: samples.collect(),
            preprocessing: augmented(24, augment.clone()),
        });
        all(Loader::start(train_set(), &Options::new(threads, 2), requests.into_iter()))
    };
    let changed = load(&changes, 1);
    assert!(changed == load(&changes, 5));
    let plain = load(&Augment::default(), 1);
    let each = 24 * 24 * 3;
    let images = |batches: &[Batch]| -> Vec<Vec<u8>> {
        let pixels = batches.iter().flat_map(|batch| batch.images().unwrap().0.chunks(each));
        pixels.map(<[u8]>::to_vec).collect()
    };
    let (changed, plain) = (images(&changed), images(&plain));
    let differing = changed.iter().zip(&plain).filter(|(changed, plain)| changed != plain);
    assert!(differing.count() > 120);
}

#[test]
fn epochs_differ_and_repeat() {
    let requests = [request(0, 0..64), request(1, 0..64), request(0, 0..64)];
    let batches = all(Loader::start(train_set(), &Options::new(2, 3), requests.into_iter()));
    assert!(batches[0].inputs != batches[1].inputs);
    assert!(batches[0] == batches[2]);
}

#[test]
fn a_sample_that_does_not_decode_ends_the_loader_at_its_batch() {
    let mut pictures = vec![raw(8, 8, 50); 12];
    for damaged in [5, 4, 10] {
        pictures[damaged].mode = 0;
    }
    let saved = Saved::new(&beton(&pictures));
    let set = Arc::new(saved.dataset().unwrap());
    for threads in [1, 4] {
        let requests = (0..4).map(|number| request(0, number * 3..number * 3 + 3));
        let mut loader = Loader::start(set.clone(), &Options::new(threads, 3), requests);
        assert_eq!(loader.next().unwrap().unwrap().samples, [0, 1, 2]);
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Sample { sample: 4, fault: SampleFault::NotJpeg, .. }));
        assert!(loader.next().is_none());
        assert!(loader.next().is_none());
    }
}

#[test]
fn a_sample_that_is_not_in_the_set_is_an_error() {
    let mut loader =
        Loader::start(train_set(), &Options::new(2, 1), [request(0, [0, 1_437])].into_iter());
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("sample 1437, byte 0: there are only 1437 samples"), "{error}");
}

#[test]
fn a_panic_in_the_requests_is_an_error_and_not_a_hang() {
    let requests = (0..).map(|number| match number {
        0 => request(0, 0..2),
        _ => panic!("planted"),
    });
    let mut loader = Loader::start(train_set(), &Options::new(2, 4), requests);
    let outcomes: Vec<_> = loader.by_ref().take(3).collect();
    assert!(matches!(outcomes.last(), Some(Err(Error::Panicked))));
    assert!(loader.next().is_none());
}

/// The threads hold references to the data set; there are none left when the threads have ended.
#[test]
fn dropping_the_loader_at_any_moment_ends_its_threads() {
    let set = train_set();
    for taken in [0, 1, 2, 7] {
        for threads in [1, 4] {
            let mut loader = Loader::start(set.clone(), &Options::new(threads, 3), endless());
            for _ in 0..taken {
                let batch = loader.next().unwrap().unwrap();
                loader.recycle(batch);
            }
            assert!(Arc::strong_count(&set) > 1);
            drop(loader);
            assert_eq!(Arc::strong_count(&set), 1, "{threads} threads, {taken} batches taken");
        }
    }
}

#[test]
fn no_more_batches_are_started_than_the_prefetch_option_allows() {
    let started = Arc::new(AtomicUsize::new(0));
    let counter = started.clone();
    let requests = endless().inspect(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let mut loader = Loader::start(train_set(), &Options::new(4, 2), requests);
    for taken in 1..50 {
        loader.next().unwrap().unwrap();
        assert!(started.load(Ordering::SeqCst) <= taken + 2);
    }
}

#[test]
fn waiting_time_is_measured() {
    let mut loader = Loader::start(train_set(), &Options::new(1, 1), endless());
    assert_eq!(loader.stats().waited, Duration::ZERO);
    loader.next().unwrap().unwrap();
    assert!(loader.stats().waited > Duration::ZERO);
}

/// Twelve pictures, some of which do not decode.
fn with_bad(bad: &[usize]) -> Saved {
    let mut pictures: Vec<_> = (0..12).map(|value| raw(8, 8, value)).collect();
    for index in bad {
        pictures[*index].mode = 0;
    }
    Saved::new(&beton(&pictures))
}

fn skipping(saved: &Saved) -> Arc<Dataset> {
    let source = Source { on_bad_sample: OnBadSample::Skip, ..Source::new(saved.location()) };
    Arc::new(Dataset::open(source).unwrap())
}

#[test]
fn a_file_that_is_cut_off_while_it_is_in_use_is_an_error_and_not_the_end_of_the_process() {
    for len in [0, ROWS_START as u64] {
        let saved = with_bad(&[]);
        let set = skipping(&saved);
        let file = File::options().write(true).open(saved.location()).unwrap();
        file.set_len(len).unwrap();
        let mut loader = Loader::start(set, &Options::new(1, 1), [request(0, 0..12)].into_iter());
        let error = loader.next().unwrap().err().unwrap();
        let is_shrunk = matches!(error, Error::Sample { fault: SampleFault::Shrunk { .. }, .. });
        assert!(is_shrunk, "cut to {len} bytes: {error}");
    }
}

#[test]
fn the_next_good_sample_replaces_a_bad_one() {
    let saved = with_bad(&[4, 5, 11]);
    for threads in [1, 3] {
        let requests = (0..4).map(|number| request(0, number * 3..number * 3 + 3));
        let mut loader = Loader::start(skipping(&saved), &Options::new(threads, 2), requests);
        let batches: Vec<_> = loader.by_ref().map(Result::unwrap).collect();
        let samples: Vec<_> = batches.iter().flat_map(|batch| batch.samples.clone()).collect();
        assert_eq!(samples, [0, 1, 2, 3, 6, 6, 6, 7, 8, 9, 10, 0]);
        assert!(batches.iter().all(|batch| batch.len() == 3));
        let stats = loader.stats();
        assert_eq!(stats.skipped, 4, "4 and 5, 5, and 11");
        assert!(stats.last_skipped.unwrap().contains("does not start with FF D8"));
    }
}

#[test]
fn evaluation_skips_bad_samples() {
    let saved = with_bad(&[0, 4]);
    let preprocessing =
        Preprocessing::Evaluate { resolution: 4, resize: Resize::Fast, crop_ratio: 1.0 };
    let request = Request { epoch: 0, samples: (0..6).collect(), preprocessing };
    let mut loader = Loader::start(skipping(&saved), &Options::new(2, 1), [request].into_iter());
    let batch = loader.next().unwrap().unwrap();
    assert_eq!(batch.samples, [1, 2, 3, 5]);
    assert_eq!(batch.labels, [1, 2, 3, 5]);
    let (pixels, _) = batch.images().unwrap();
    let expected: Vec<u8> = [1, 2, 3, 5].into_iter().flat_map(|value| [value; 48]).collect();
    assert_eq!(pixels, expected);
    assert_eq!(loader.stats().skipped, 2);
}

#[test]
fn a_data_set_without_any_good_sample_is_an_error_even_if_bad_ones_are_skipped() {
    let saved = with_bad(&(0..12).collect::<Vec<_>>());
    let mut loader =
        Loader::start(skipping(&saved), &Options::new(1, 1), [request(0, [3])].into_iter());
    assert!(matches!(loader.next().unwrap(), Err(Error::Sample { .. })));
}

#[test]
fn arrays_are_converted_to_floats_in_the_order_of_the_batch() {
    let saved = Saved::new(&fixtures::file("f2_layouts"));
    let source = Source {
        input_field: "arr_i16".to_owned(),
        label_field: "n".to_owned(),
        ..Source::new(saved.location())
    };
    let set = Arc::new(Dataset::open(source).unwrap());
    let requests = [request(0, [1, 0]), request(0, [8, 1, 3])];
    let batches = all(Loader::start(set.clone(), &Options::new(2, 2), requests.into_iter()));

    let beton = Beton::open(saved.path()).unwrap();
    let column = beton.array_column("arr_i16").unwrap();
    for batch in &batches {
        let Inputs::Arrays { values, shape } = &batch.inputs else { panic!("no arrays") };
        assert_eq!(InputType::Array(shape.clone()), *set.input_type());
        let mut expected = Vec::new();
        for sample in &batch.samples {
            let mut bytes = vec![0; 60];
            beton.array(&column, *sample, &mut bytes).unwrap();
            let (words, _) = bytes.as_chunks::<2>();
            expected.extend(words.iter().map(|word| f32::from(i16::from_le_bytes(*word))));
        }
        assert_eq!(*values, expected);
    }
    assert_eq!(batches[0].samples, [1, 0]);
}

/// A file truncated while a job uses it is an error with its name, not a signal.
#[test]
fn a_file_truncated_while_in_use_is_reported() {
    let saved = with_bad(&[]);
    let set = Arc::new(saved.dataset().unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(saved.path()).unwrap();
    file.set_len(2_500).unwrap();
    let mut loader = Loader::start(set, &Options::new(1, 1), [request(0, [9])].into_iter());
    let refused = loader.next().unwrap().unwrap_err().to_string();
    assert!(refused.contains("it was truncated while in use"), "{refused}");
}
