//! Time in which a job finds its place in the middle of an epoch of a million packed texts; `make bench-lora` runs it.
//!
//! A start reads the lengths of all texts and packs them, wherever it begins. The difference is what a resume needs:
//! the order of the epoch, the texts of the next batch, and the batch itself.

#![allow(clippy::print_stdout, reason = "it is run for what it prints")]

use std::{error::Error, path::PathBuf, sync::Arc, time::Instant};

use baton_data::{
    Dataset, Items, Loader, Options, Preprocessing, Request, SampleBlocks, SampleOrder, Source,
    write::TextWriter,
};
use baton_recipe::JobSpec;

const TEXTS: u64 = 1_000_000;
const BATCH: u64 = 16;
const ROUNDS: u32 = 5;
const RECIPE: &str = r#"
    name = "resume-skip"
    model = { arch = "causal_lm", path = "model" }
    data = { train = "train.beton", val = "train.beton", sequence = 256, packing = true }
    train = { epochs = 9, global_batch = 16, virtual_ranks = 1 }
    optimizer = { kind = "adamw" }
    schedule = { kind = "constant", lr = 1e-4 }
    loss = { kind = "next_token" }
"#;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("train.beton");
    let mut writer = TextWriter::create(&path, TEXTS)?;
    for text in 0..TEXTS {
        // Lengths of 8 to 120 tokens in no order.
        let length = 8 + text * 7_919 % 113;
        let tokens: Vec<u32> = (0..length).map(|at| ((text + at) % 1_000) as u32).collect();
        let labels: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        writer.push(&tokens, &labels)?;
    }
    writer.finish()?;

    let spec = JobSpec::from_toml(RECIPE, &[])?;
    let location = path.display().to_string();
    let started = Instant::now();
    let set = Dataset::open(Source::of_recipe(&spec, &location, PathBuf::new()))?;
    let items = Items::new(&spec, &location, &set)?;
    let sequences = items.count(set.len());
    println!(
        "{TEXTS} texts are {sequences} sequences, opened and packed in {:.2} s",
        started.elapsed().as_secs_f64()
    );
    let set = Arc::new(set);
    let order =
        SampleOrder::new(spec.data.order, spec.seed, 0, SampleBlocks::of_files(&[sequences]));
    for (place, cursor) in [("at the beginning", 0), ("in the middle", sequences / 2)] {
        let mut seconds = Vec::new();
        for epoch in 1..=ROUNDS {
            let started = Instant::now();
            let order = order.epoch(epoch);
            let positions = cursor..cursor + BATCH;
            let samples = positions.flat_map(|at| items.samples(epoch, order.at(at))).collect();
            let (resolution, resize, crop_ratio) = (1, spec.data.resize, 1.0);
            let preprocessing = Preprocessing::Evaluate { resolution, resize, crop_ratio };
            let request = Request { epoch, samples, preprocessing };
            let options = Options::new(1, 1);
            let mut loader = Loader::start(set.clone(), &options, std::iter::once(request));
            let batch = loader.next().transpose()?.ok_or("the loader ended")?;
            assert!(batch.len() as u64 > BATCH, "several texts share a sequence");
            seconds.push(started.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        println!("first batch {place} of an epoch: {:.6} s", seconds[seconds.len() / 2]);
    }
    Ok(())
}
