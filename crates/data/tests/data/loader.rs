//! Running loaders.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_data::{
    Batch, Dataset, Decoder, Error, Loader, Request, SampleFault, View,
    augment::{Flip, center_crop, random_crop, random_flip},
    random::{Draws, Operation},
};
use baton_job::spec::Augment;

use crate::{
    digits,
    sketch::{Saved, beton, raw},
};

const SEED: u64 = 11;

fn train_set() -> Arc<Dataset> {
    Arc::new(digits::open("digits-train.beton"))
}

fn train_view(resolution: u32) -> View {
    View::Train { seed: SEED, resolution, augment: Augment::default() }
}

fn request(epoch: u32, samples: impl IntoIterator<Item = u64>) -> Request {
    Request { epoch, samples: samples.into_iter().collect(), view: train_view(24) }
}

/// Batches without end.
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
    let one = all(Loader::start(set.clone(), 1, 1, requests()));
    assert_eq!(one.len(), 12);
    for (threads, prefetch) in [(2, 1), (3, 2), (8, 5), (5, 100)] {
        let many = all(Loader::start(set.clone(), threads, prefetch, requests()));
        assert!(one == many, "{threads} threads, {prefetch} batches ahead");
    }
}

#[test]
fn batches_come_in_the_order_of_the_requests_whatever_their_sizes() {
    let sizes = [1, 40, 0, 3, 64, 0, 0, 2, 1, 17];
    let requests = sizes.map(|size| request(0, (0..size).rev()));
    let batches = all(Loader::start(train_set(), 4, 3, requests.clone().into_iter()));
    for (batch, request) in batches.iter().zip(&requests) {
        assert_eq!(batch.samples, request.samples);
        assert_eq!(batch.labels.len(), request.samples.len());
        assert_eq!(batch.resolution, 24);
        assert_eq!(batch.images.len(), request.samples.len() * 24 * 24 * 3);
    }
    assert_eq!(batches.len(), sizes.len());
}

#[test]
fn a_sample_is_what_its_view_says() {
    let set = train_set();
    let (epoch, sample, resolution) = (3, 77, 20);
    let image = set.image(sample).unwrap();
    let augment = Augment::default();
    let draws = |operation| Draws::new(SEED, epoch, sample, operation);
    let crop = random_crop(&augment, 32, 32, draws(Operation::Crop));
    let flip = random_flip(&augment, draws(Operation::Flip));
    let frames = [
        (train_view(resolution), crop, flip),
        (View::Evaluate { resolution, crop_ratio: 0.5 }, center_crop(0.5, 32, 32), Flip::Keep),
    ];
    for (view, crop, flip) in frames {
        let request = Request { epoch, samples: vec![sample], view };
        let batch = all(Loader::start(set.clone(), 1, 1, [request].into_iter())).remove(0);
        let mut expected = vec![0; (resolution * resolution * 3) as usize];
        Decoder::new().unwrap().render(&image, crop, flip, resolution, &mut expected).unwrap();
        assert!(batch.images == expected);
        assert_eq!(batch.labels, [set.label(sample).unwrap()]);
    }
}

#[test]
fn epochs_differ_and_repeat() {
    let requests = [request(0, 0..64), request(1, 0..64), request(0, 0..64)];
    let batches = all(Loader::start(train_set(), 2, 3, requests.into_iter()));
    assert!(batches[0].images != batches[1].images);
    assert!(batches[0] == batches[2]);
}

#[test]
fn a_sample_that_does_not_decode_ends_the_loader_in_its_place() {
    let mut pictures = vec![raw(8, 8, 50); 12];
    for damaged in [5, 4, 10] {
        pictures[damaged].mode = 0;
    }
    let saved = Saved::new(&beton(&pictures));
    let set = Arc::new(Dataset::open(saved.path(), "image", "label").unwrap());
    for threads in [1, 4] {
        let requests = (0..4).map(|number| request(0, number * 3..number * 3 + 3));
        let mut loader = Loader::start(set.clone(), threads, 3, requests);
        assert_eq!(loader.next().unwrap().unwrap().samples, [0, 1, 2]);
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::Sample { sample: 4, fault: SampleFault::NotJpeg, .. }));
        assert!(loader.next().is_none());
        assert!(loader.next().is_none());
    }
}

#[test]
fn a_sample_that_is_not_in_the_set_is_an_error() {
    let mut loader = Loader::start(train_set(), 2, 1, [request(0, [0, 1_437])].into_iter());
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("sample 1437: there are only 1437 samples"), "{error}");
}

#[test]
fn a_panic_in_the_requests_is_an_error_not_a_wait_for_ever() {
    let requests = (0..).map(|number| match number {
        0 => request(0, 0..2),
        _ => panic!("planted"),
    });
    let mut loader = Loader::start(train_set(), 2, 4, requests);
    let outcomes: Vec<_> = loader.by_ref().take(3).collect();
    assert!(matches!(outcomes.last(), Some(Err(Error::Panicked))));
    assert!(loader.next().is_none());
}

/// The threads hold the data set: when they are gone, nobody else does.
#[test]
fn dropping_the_loader_at_any_moment_ends_its_threads() {
    let set = train_set();
    for taken in [0, 1, 2, 7] {
        for threads in [1, 4] {
            let mut loader = Loader::start(set.clone(), threads, 3, endless());
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
fn no_more_is_begun_than_was_asked_for() {
    let begun = Arc::new(AtomicUsize::new(0));
    let counter = begun.clone();
    let requests = endless().inspect(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let mut loader = Loader::start(train_set(), 4, 2, requests);
    for taken in 1..50 {
        loader.next().unwrap().unwrap();
        assert!(begun.load(Ordering::SeqCst) <= taken + 2);
    }
}

#[test]
fn waiting_is_measured() {
    let mut loader = Loader::start(train_set(), 1, 1, endless());
    assert_eq!(loader.waited(), Duration::ZERO);
    loader.next().unwrap().unwrap();
    assert!(loader.waited() > Duration::ZERO);
}
