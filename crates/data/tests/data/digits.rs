//! The data set in the repository.

use std::path::PathBuf;

use baton_data::{Dataset, Decoder, Mode};

pub(crate) fn open(name: &str) -> Dataset {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/digits");
    Dataset::open(folder.join(name), "image", "label").unwrap()
}

#[test]
fn the_digits_are_read() {
    let sets = [("digits-train.beton", 1_437, Mode::Jpeg), ("digits-val.beton", 360, Mode::Raw)];
    let mut decoder = Decoder::new().unwrap();
    for (name, samples, mode) in sets {
        let set = open(name);
        assert_eq!(set.len(), samples);
        set.check_labels(10).unwrap();
        let mut of_each_class = [0; 10];
        for sample in 0..samples {
            let image = set.image(sample).unwrap();
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
    let refused = open("digits-val.beton").check_labels(9).unwrap_err().to_string();
    assert!(refused.contains("digits-val.beton: sample "), "{refused}");
    let remedy = "label 9, but model.num_classes = 9: raise model.num_classes or mend the data set";
    assert!(refused.ends_with(remedy), "{refused}");
}
