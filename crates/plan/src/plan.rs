//! The plan of a whole recipe on a machine: memory, speed, time, cost.

mod notes;

use baton_program::Program;
use baton_recipe::{
    InputKind, JobSpec,
    dry_run::{DryRun, EpochSegment},
    progress::{Extent, TrainingPlan},
};
use serde::Serialize;

use crate::{
    Calibration, Error, LanguagePlan, Machine,
    memory::Memory,
    network::{InputShape, Network},
    roofline::{Roofline, total},
    step::{Bottleneck, LoaderEstimate, StepEstimate},
};

/// What to plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The recipe.
    pub spec: &'a JobSpec,
    /// Number of samples in the training set.
    pub samples: u64,
    /// Number of samples in the validation set.
    pub val_samples: u64,
    /// Channels and length of a sample, for networks that train on signals.
    pub signal: [u64; 2],
    /// The program of `model.arch = "program"`.
    pub program: Option<&'a Program>,
    /// The model of `model.arch = "causal_lm"`.
    pub language: Option<LanguagePlan<'a>>,
    /// Price of the machine, dollars per hour, in place of the price list.
    pub dollars_per_hour: Option<f64>,
    /// Measurement on this machine's GPU.
    pub calibration: Option<&'a Calibration>,
}

/// Memory, time and cost of a recipe on one machine. Names of fields, here and in the types of fields, are part of the
/// output of `baton plan --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecipePlan {
    /// Name for `--on`.
    pub machine: &'static str,
    /// The rented instance type, or the share of one.
    pub instance: &'static str,
    /// Its GPU type.
    pub gpu: &'static str,
    /// Number of GPUs of the machine.
    pub gpus: u32,
    /// Number of ranks, which is the number of GPUs that train.
    pub ranks: u32,
    /// Memory of one GPU, bytes.
    pub gpu_memory_bytes: u64,
    /// Whether `memory` fits into `gpu_memory_bytes`.
    pub fits: bool,
    /// Memory that a GPU needs, in the epochs that need the most.
    pub memory: Memory,
    /// The epochs that need this memory.
    pub memory_segment: EpochSegment,
    /// Micro-batch of the recipe at the largest resolution, samples.
    pub micro_batch: u64,
    /// The largest micro-batch that fits at this resolution; 0 if even one sample does not fit.
    pub largest_micro_batch: u64,
    /// The segments of the training, in order.
    pub segments: Vec<PlannedSegment>,
    /// All evaluations together.
    pub evaluation: EvaluationEstimate,
    /// Speed of the data loader; unknown for signals.
    pub loader: Option<LoaderEstimate>,
    /// Images trained per second, without the time of evaluations.
    pub images_per_second: f64,
    /// The bottleneck during most of the training time.
    pub limit: Bottleneck,
    /// Time of the whole recipe.
    pub seconds: f64,
    /// Cost of the whole recipe, for each kind of price.
    pub costs: Vec<Cost>,
    /// Measured time divided by the roofline's time, if a calibration was given.
    pub calibration: Option<f64>,
    /// Problems and advice for the user.
    pub notes: Vec<String>,
}

/// Consecutive epochs with one resolution and one batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedSegment {
    /// The epochs.
    pub segment: EpochSegment,
    /// One step of these epochs.
    pub step: StepEstimate,
    /// Speed of all ranks together, limited by the loader too.
    pub images_per_second: f64,
    /// The bottleneck of these epochs.
    pub limit: Bottleneck,
    /// Samples of all its epochs.
    pub samples: u64,
    /// Time of all its epochs.
    pub seconds: f64,
}

/// All evaluations of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EvaluationEstimate {
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Images of all evaluations.
    pub samples: u64,
    /// Forward passes per image: averaged weights and mirrored images double them.
    pub passes: u32,
    /// Speed of all ranks together, limited by the loader too.
    pub images_per_second: f64,
    /// Most time in which a language model writes the texts of one evaluation of the whole validation set.
    pub generate_seconds: f64,
    /// Time of all evaluations.
    pub seconds: f64,
    /// Time of one evaluation of the whole validation set.
    pub longest_seconds: f64,
}

/// Cost of the recipe at one price.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Kind of price: `on_demand`, `spot` or `given`.
    pub kind: &'static str,
    /// Price of the machine.
    pub dollars_per_hour: f64,
    /// Cost of the whole recipe.
    pub dollars: f64,
}

impl PlanRequest<'_> {
    /// Plans the recipe on `machine`.
    ///
    /// # Errors
    /// The network runs on CPUs only; the program is missing or takes images of another size; the recipe cannot run
    /// with this number of samples; the calibration cannot be used.
    pub fn plan(&self, machine: &Machine) -> Result<RecipePlan, Error> {
        let spec = self.spec;
        let ranks = spec.max_ranks().min(machine.gpus);
        let run = DryRun::new(spec, self.samples).map_err(Error::Recipe)?;
        let mut roofline = Roofline::new(&machine.gpu, spec.precision.compute);
        let calibration = self.calibration.map(|c| c.factor(machine)).transpose()?;
        roofline.calibration = calibration.unwrap_or(1.0);
        let loader = self.takes_images().then(|| LoaderEstimate::new(spec, machine, ranks));
        let loader_limit = loader.map_or(f64::INFINITY, |loader| loader.images_per_second);
        let mut segments = Vec::new();
        let mut largest_need: Option<(Memory, EpochSegment)> = None;
        for segment in &run.segments {
            let network = self.network(segment.resolution)?;
            let need = Memory::new(spec, &network, ranks, segment.micro_batch);
            if largest_need
                .as_ref()
                .is_none_or(|(largest, _)| need.total_bytes > largest.total_bytes)
            {
                largest_need = Some((need, *segment));
            }
            let hardware = (machine, ranks);
            let network = self.mean_network(segment.resolution)?;
            let step = StepEstimate::new(spec, &network, hardware, &roofline, segment.micro_batch);
            segments.push(self.planned_segment(*segment, step, loader_limit));
        }
        // A run has at least one epoch.
        let (memory, memory_segment) = largest_need.ok_or(Error::Recipe(Vec::new()))?;
        let evaluation = self.evaluation(&run, &roofline, ranks, loader_limit)?;
        let training: f64 = segments.iter().map(|segment| segment.seconds).sum();
        let seconds = training + evaluation.seconds;
        let largest = run.segments.iter().max_by_key(|segment| segment.resolution);
        let resolution = largest.map_or(0, |segment| segment.resolution);
        let network = self.network(resolution)?;
        let gpu_memory_bytes = machine.gpu.memory_bytes;
        let mut plan = RecipePlan {
            machine: machine.name,
            instance: machine.instance,
            gpu: machine.gpu.name,
            gpus: machine.gpus,
            ranks,
            gpu_memory_bytes,
            fits: memory.total_bytes <= gpu_memory_bytes,
            memory,
            memory_segment,
            micro_batch: largest.map_or(0, |segment| segment.micro_batch),
            largest_micro_batch: Memory::largest_micro_batch(
                spec,
                &network,
                ranks,
                gpu_memory_bytes,
            ),
            images_per_second: run.samples_seen as f64 / training,
            limit: limit(&segments),
            segments,
            evaluation,
            loader,
            seconds,
            costs: self.costs(machine, seconds),
            calibration,
            notes: Vec::new(),
        };
        plan.notes = self.notes(&plan, machine, &run);
        Ok(plan)
    }

    /// Whether the network trains on images.
    #[must_use]
    pub fn takes_images(&self) -> bool {
        match self.spec.model.arch.input_kind() {
            InputKind::Images => true,
            InputKind::Signals | InputKind::Tokens => false,
            InputKind::Anything => {
                self.program.is_some_and(|program| program.image_input().is_some())
            }
        }
    }

    fn network(&self, resolution: u32) -> Result<Network, Error> {
        if self.spec.model.arch.is_program() {
            let program = self.program.ok_or(Error::ProgramNotRead)?;
            let compute = self.spec.precision.compute;
            return Ok(Network::of_program(program, compute, resolution)?);
        }
        if self.spec.model.arch.is_causal_lm() {
            let plan = self.language.ok_or(Error::ModelNotRead)?;
            let tokens = u64::from(self.spec.data.sequence);
            return Ok(Network::of_language_model(self.spec, plan, tokens));
        }
        let [channels, length] = self.signal;
        let input = match self.spec.model.arch.input_kind() {
            InputKind::Signals => InputShape::Signal { channels, length },
            _ => InputShape::Image { resolution: u64::from(resolution) },
        };
        Network::new(&self.spec.model, input).ok_or(Error::Linear)
    }

    /// The network for samples of the mean size, whose time counts.
    fn mean_network(&self, resolution: u32) -> Result<Network, Error> {
        match self.language {
            Some(plan) => Ok(Network::of_language_model(self.spec, plan, plan.mean_tokens)),
            None => self.network(resolution),
        }
    }

    fn planned_segment(
        &self,
        segment: EpochSegment,
        step: StepEstimate,
        loader_limit: f64,
    ) -> PlannedSegment {
        let computed = segment.global_batch as f64 / step.seconds;
        let epoch_samples =
            TrainingPlan::new(self.spec, self.samples).epoch_samples(segment.first_epoch);
        let samples = epoch_samples * u64::from(segment.epochs);
        let images_per_second = computed.min(loader_limit);
        PlannedSegment {
            limit: if loader_limit < computed { Bottleneck::Loader } else { step.limit() },
            segment,
            step,
            images_per_second,
            samples,
            seconds: samples as f64 / images_per_second,
        }
    }

    fn evaluation(
        &self,
        run: &DryRun,
        roofline: &Roofline,
        ranks: u32,
        loader_limit: f64,
    ) -> Result<EvaluationEstimate, Error> {
        let evaluation = &self.spec.evaluation;
        let resolution = self.spec.evaluation_resolution();
        let batch = u64::from(evaluation.batch);
        let pass_seconds =
            total(&roofline.evaluation(&self.mean_network(resolution)?, batch)).total();
        let passes = (1 + u32::from(self.spec.ema.is_some())) * (1 + u32::from(evaluation.flip));
        let computed = f64::from(ranks) * batch as f64 / (pass_seconds * f64::from(passes));
        let images_per_second = computed.min(loader_limit);
        let of = |extent| evaluation.samples_of(self.val_samples, extent);
        let (full, subset) = (of(Extent::Full), of(Extent::Subset));
        let samples =
            u64::from(run.full_evaluations) * full + u64::from(run.subset_evaluations) * subset;
        let generate = |samples| self.generate_seconds(roofline, ranks, samples);
        let (generate_full, generate_subset) = (generate(full), generate(subset));
        let generated = f64::from(run.full_evaluations) * generate_full
            + f64::from(run.subset_evaluations) * generate_subset;
        Ok(EvaluationEstimate {
            resolution,
            samples,
            passes,
            images_per_second,
            generate_seconds: generate_full,
            seconds: samples as f64 / images_per_second + generated,
            longest_seconds: full as f64 / images_per_second + generate_full,
        })
    }

    /// Time in which a language model writes the texts of an evaluation of `samples` samples, if none ends early.
    fn generate_seconds(&self, roofline: &Roofline, ranks: u32, samples: u64) -> f64 {
        let evaluation = &self.spec.evaluation;
        let (Some(generate), Some(plan)) = (&evaluation.generate, self.language) else {
            return 0.0;
        };
        // The texts of a batch are written together, one token of each at a time.
        let batch = u64::from(evaluation.batch).min(evaluation.texts(samples));
        let network = Network::of_language_model(self.spec, plan, 1);
        let token = total(&roofline.evaluation(&network, batch)).total();
        let [_, batches] = evaluation.batches(samples);
        let passes = 1 + u32::from(self.spec.ema.is_some());
        let turns = batches.div_ceil(u64::from(ranks.max(1))) as f64;
        turns * f64::from(passes) * f64::from(generate.max_tokens) * token
    }

    fn costs(&self, machine: &Machine, seconds: f64) -> Vec<Cost> {
        let cost = |kind, dollars_per_hour: f64| Cost {
            kind,
            dollars_per_hour,
            dollars: dollars_per_hour * seconds / 3_600.0,
        };
        match self.dollars_per_hour {
            Some(price) => vec![cost("given", price)],
            None => {
                let on_demand = cost("on_demand", machine.prices.on_demand);
                let spot = machine.prices.spot.map(|price| cost("spot", price));
                std::iter::once(on_demand).chain(spot).collect()
            }
        }
    }
}

/// The bottleneck during most of the training time.
fn limit(segments: &[PlannedSegment]) -> Bottleneck {
    let time_of = |limit: Bottleneck| -> f64 {
        segments
            .iter()
            .filter(|segment| segment.limit == limit)
            .map(|segment| segment.seconds)
            .sum()
    };
    let limits = segments.iter().map(|segment| segment.limit);
    limits.max_by(|a, b| time_of(*a).total_cmp(&time_of(*b))).unwrap_or(Bottleneck::Arithmetic)
}

#[cfg(test)]
mod tests;
