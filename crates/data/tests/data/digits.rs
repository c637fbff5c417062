//! The data set of handwritten digits in the repository.

use std::path::PathBuf;

use baton_data::{Beton, Dataset, Decoder, Error, Labels, Mode, Source};

pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/digits").join(name)
}

fn try_open(name: &str, num_classes: u32) -> Result<Dataset, Error> {
    let location = path(name).to_str().unwrap().to_owned();
    Dataset::open(Source { labels: Labels::Classes(num_classes), ..Source::new(location) })
}

pub(crate) fn open(name: &str) -> Dataset {
    try_open(name, 10).unwrap()
}

#[test]
fn the_digits_are_read() {
    let sets = [("digits-train.beton", 1_437, Mode::Jpeg), ("digits-val.beton", 360, Mode::Raw)];
    let mut decoder = Decoder::new().unwrap();
    for (name, samples, mode) in sets {
        let (set, beton) = (open(name), Beton::open(path(name)).unwrap());
        let (images, mut buffer) = (beton.image_column("image").unwrap(), Vec::new());
        assert_eq!(set.len(), samples);
        let mut of_each_class = [0; 10];
        for sample in 0..samples {
            let image = beton.image(&images, sample, &mut buffer).unwrap();
            assert_eq!((image.mode, image.width, image.height), (mode, 32, 32));
            let pixels = decoder.decode(&image).unwrap();
            assert!(pixels.iter().any(|value| *value > 128), "{name}: sample {sample} is dark");
            of_each_class[set.label(sample).unwrap() as usize] += 1;
        }
        assert!(of_each_class.iter().all(|count| *count >= 27), "{name}: {of_each_class:?}");
    }
}

#[test]
fn a_model_with_too_few_outputs_is_refused() {
    let refused = try_open("digits-val.beton", 9).unwrap_err().to_string();
    assert!(refused.contains("digits-val.beton: sample "), "{refused}");
    let remedy = "label 9, but model.num_classes = 9: raise model.num_classes or fix the data set";
    assert!(refused.ends_with(remedy), "{refused}");
}
