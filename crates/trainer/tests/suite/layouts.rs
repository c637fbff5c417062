//! A checkpoint restores into a learner with another state layout, on any number of ranks.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use baton_checkpoint::{ALIGNMENT, Float, Store};
use baton_collectives::BufferMut;
use baton_data::{Batch, InputType};
use baton_job::{
    Generation, JobId,
    exit::Outcome,
    message::{RankReport, Restore, StateSource},
};
use baton_recipe::JobSpec;
use baton_trainer::{
    BatchEvaluation, Controls, Error, EvaluatedWeights, GenerationContext, JobInputs, Learner,
    Trainer, TrainingJob, Update,
    learner::{self, Region, TensorLocation},
    linear::{HostLeaf, LinearLearner},
};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::local;

const REGIONS: [&str; 4] = ["weights", "momentum", "ema", "frozen"];

/// A learner with an extra state that no update changes.
#[derive(Debug)]
struct LaidOutLearner {
    inner: LinearLearner,
    values: [Vec<f32>; REGIONS.len()],
    locations: Vec<TensorLocation>,
}

/// Tensors with their length and whether they are frozen, at multiples of `align`; filled with values or with zeros.
#[derive(Clone, Debug)]
struct Model {
    tensors: Vec<(usize, bool)>,
    align: usize,
    is_filled: bool,
}

impl Model {
    fn build(&self, inner: LinearLearner) -> LaidOutLearner {
        let mut ends = [0usize; 2];
        let location = |(number, (len, frozen)): (usize, &(usize, bool))| {
            let end = &mut ends[usize::from(*frozen)];
            let offset = end.next_multiple_of(self.align);
            *end = offset + len;
            TensorLocation {
                name: format!("t{number}"),
                shape: vec![*len],
                region: if *frozen { "frozen" } else { "weights" },
                offset,
                channels_last: false,
                integers: None,
            }
        };
        let locations: Vec<TensorLocation> =
            self.tensors.iter().enumerate().map(location).collect();
        let [weights, frozen] = ends;
        let mut values = [weights, weights, weights, frozen].map(|len| vec![0.0; len]);
        for (number, location) in locations.iter().enumerate().filter(|_| self.is_filled) {
            let regions = if location.region == "frozen" { 3..4 } else { 0..3 };
            for region in regions {
                let span = location.offset..location.offset + location.shape[0];
                for (index, value) in values[region][span].iter_mut().enumerate() {
                    *value = tagged(region % 3, number, index);
                }
            }
        }
        LaidOutLearner { inner, values, locations }
    }
}

/// A value that is different for every region, tensor and index.
fn tagged(region: usize, number: usize, index: usize) -> f32 {
    (10_000 * region + 100 * number + index + 1) as f32
}

impl LaidOutLearner {
    /// The values of a tensor in a region that contains it.
    fn tensor(&self, region: usize, number: usize) -> &[f32] {
        let location = &self.locations[number];
        &self.values[region][location.offset..location.offset + location.shape[0]]
    }
}

impl Learner for LaidOutLearner {
    type Leaf = HostLeaf;
    type Loss = f64;

    fn new_leaf(&mut self) -> Result<HostLeaf, learner::Error> {
        self.inner.new_leaf()
    }

    fn gradient(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut HostLeaf,
    ) -> Result<f64, learner::Error> {
        self.inner.gradient(batch, scale, leaf)
    }

    fn measure(&mut self, sum: &mut HostLeaf) -> Result<(), learner::Error> {
        self.inner.measure(sum)
    }

    fn update(&mut self, sum: &mut HostLeaf, update: &Update) -> Result<(), learner::Error> {
        self.inner.update(sum, update)
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        weights: EvaluatedWeights,
        is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, learner::Error> {
        self.inner.evaluate(batch, weights, is_interrupted)
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        let regions = REGIONS.iter().zip(&mut self.values).map(|(name, values)| Region {
            name,
            buffer: BufferMut::Host(values),
            frozen: (*name == "frozen").then_some(Float::F32),
        });
        regions.filter(|region| region.frozen.is_none() || !region.buffer.is_empty()).collect()
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        self.locations.clone()
    }
}

fn folder() -> (TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    (folder, Arc::new(store))
}

/// A rank after its generation, the result, and the reports.
type RankResult = (Trainer<LaidOutLearner>, Result<Outcome, Error>, Vec<RankReport>);

/// Runs a generation that trains to the end, or has nothing left to do.
fn run(store: &Arc<Store>, model: &Model, ranks: u32, generation: u64) -> Vec<RankResult> {
    let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
    let text = format!(
        r#"
        name = "layouts"
        model = {{ arch = "linear", num_classes = 10 }}
        data = {{ train = "{digits}", val = "{digits}", pin_threads = false }}
        train = {{ epochs = 1, global_batch = 180, resolution = 8, virtual_ranks = 4 }}
        optimizer = {{ kind = "sgd" }}
        schedule = {{ kind = "constant", lr = 0.1 }}
        checkpoint = {{ every_steps = 1 }}
        "#
    );
    let spec = Arc::new(JobSpec::from_toml(&text, &[]).unwrap());
    let begin = |mut collective: local::LocalCollective| {
        let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
        let store = Arc::clone(store);
        let job =
            TrainingJob { id: JobId::default(), spec: spec.clone(), store, local: None, inputs };
        let (spec, model) = (spec.clone(), model.clone());
        let build = move || Ok(model.build(LinearLearner::new(&spec, &InputType::Image)?));
        let mut trainer = Trainer::new(job, Box::new(build)).unwrap();
        let restore = Restore::default();
        let mut reports = Vec::new();
        let ended = trainer.run(&mut GenerationContext {
            generation: Generation(generation),
            collective: &mut collective,
            restore: &restore,
            controls: &Controls::default(),
            report: &mut |report| reports.push(report),
        });
        (trainer, ended, reports)
    };
    thread::scope(|scope| {
        let members = local::group(ranks, Duration::from_secs(60));
        let threads: Vec<_> =
            members.into_iter().map(|member| scope.spawn(|| begin(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Lengths of tensors, with whether they were frozen before and are frozen after a restore.
fn models() -> impl Strategy<Value = [Vec<(usize, bool)>; 2]> {
    let tensors = proptest::collection::vec((1usize..40, any::<bool>(), any::<bool>()), 1..8);
    tensors.prop_map(|tensors| {
        let before = tensors.iter().map(|(len, before, _)| (*len, *before)).collect();
        [before, tensors.iter().map(|(len, _, after)| (*len, *after)).collect()]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_state_of_another_layout_is_restored_on_every_rank(
        [before, after] in models(),
        is_packed in any::<bool>(),
        writers in 1u32..5,
        readers in 1u32..5,
    ) {
        let (_folder, store) = folder();
        // A packed layout, from before alignment, never had frozen tensors.
        let is_packed = is_packed && before.iter().all(|(_, frozen)| !frozen);
        let align = if is_packed { 1 } else { ALIGNMENT };
        let old = Model { tensors: before.clone(), align, is_filled: true };
        for (_, ended, _) in run(&store, &old, writers, 1) {
            prop_assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        }
        let new = Model { tensors: after.clone(), align: ALIGNMENT, is_filled: false };
        for (mut trainer, ended, reports) in run(&store, &new, readers, 2) {
            prop_assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
            let RankReport::Started { source: StateSource::Checkpoint(restored), .. } = &reports[0] else {
                panic!("{reports:?}")
            };
            prop_assert!(restored.skipped.is_empty(), "{restored:?}");
            let learner = trainer.learner();
            let mut values = 0;
            for (number, ((len, was_frozen), (_, is_frozen))) in before.iter().zip(&after).enumerate() {
                let of = |region| (0..*len).map(|i| tagged(region, number, i)).collect::<Vec<_>>();
                if *is_frozen {
                    prop_assert_eq!(learner.tensor(3, number), of(0));
                    values += len;
                    continue;
                }
                prop_assert_eq!(learner.tensor(0, number), of(0));
                // A tensor that was frozen has zero moments, and its average is the tensor itself.
                let moments = if *was_frozen { vec![0.0; *len] } else { of(1) };
                prop_assert_eq!(learner.tensor(1, number), moments);
                prop_assert_eq!(learner.tensor(2, number), of(if *was_frozen { 0 } else { 2 }));
                values += if *was_frozen { 2 * len } else { 3 * len };
            }
            let nonzero = learner.values.iter().flatten().filter(|value| **value != 0.0).count();
            prop_assert_eq!(nonzero, values, "padding is zero");
        }
    }
}

#[test]
fn frozen_tensors_are_written_once_for_all_checkpoints_and_restored_on_every_rank() {
    let (folder, store) = folder();
    let model = Model { tensors: vec![(20, true), (5, false)], align: ALIGNMENT, is_filled: true };
    let mut saved = 0;
    for (_, ended, reports) in run(&store, &model, 2, 1) {
        assert!(matches!(ended, Ok(Outcome::Completed)), "{ended:?}");
        saved += reports.iter().filter(|report| matches!(report, RankReport::Saved(_))).count();
    }
    assert!(saved > 1, "{saved}");
    assert_eq!(fs::read_dir(folder.path().join("frozen")).unwrap().count(), 1);
    let blank = Model { is_filled: false, ..model };
    for (mut trainer, _, _) in run(&store, &blank, 3, 2) {
        assert_eq!(trainer.learner().tensor(3, 0)[19], tagged(0, 0, 19));
        assert_eq!(trainer.learner().tensor(2, 1)[4], tagged(2, 1, 4));
    }
}

#[test]
fn damage_to_frozen_tensors_is_reported_and_training_does_not_start_over() {
    let (folder, store) = folder();
    let model = Model { tensors: vec![(20, true)], align: ALIGNMENT, is_filled: true };
    run(&store, &model, 1, 1);
    let file = fs::read_dir(folder.path().join("frozen")).unwrap().next().unwrap().unwrap();
    let mut bytes = fs::read(file.path()).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file.path(), bytes).unwrap();
    let (_, ended, _) = run(&store, &model, 1, 2).remove(0);
    let error = ended.unwrap_err().to_string();
    assert!(error.contains("safetensors does not match its digest"), "{error}");
}

#[test]
fn another_model_is_refused_with_the_first_differences() {
    let (_folder, store) = folder();
    let model = |len, count| Model {
        tensors: vec![(len, false); count],
        align: ALIGNMENT,
        is_filled: true,
    };
    run(&store, &model(1, 5), 1, 1);
    let (_, ended, _) = run(&store, &model(2, 6), 1, 2).remove(0);
    let refused = ended.unwrap_err().to_string();
    let differences = "its t0 is [1], not [2]; its t1 is [1], not [2]; its t2 is [1], not [2]; and 3 more; model,";
    assert!(refused.contains(differences), "{refused}");
}
