//! The plan of a whole recipe on a machine: memory, speed, time, cost.

mod notes;

use baton_recipe::{
    InputKind, JobSpec,
    dry_run::{DryRun, Stretch},
    progress::TrainingPlan,
};
use serde::Serialize;

use crate::{
    Calibration, Error, Machine,
    memory::Memory,
    network::{InputShape, Network},
    roofline::{Roofline, total},
    update::{Bottleneck, LoaderEstimate, UpdateEstimate},
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
    /// Memory that a GPU needs, in the phase that needs the most.
    pub memory: Memory,
    /// The phase that needs this memory.
    pub memory_phase: Stretch,
    /// Micro-batch of the recipe at the largest resolution, samples.
    pub micro_batch: u64,
    /// The largest micro-batch that fits at this resolution; 0 if even one sample does not fit.
    pub largest_micro_batch: u64,
    /// The phases of the training.
    pub phases: Vec<PlannedPhase>,
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
pub struct PlannedPhase {
    /// The epochs.
    pub stretch: Stretch,
    /// One update of this phase.
    pub update: UpdateEstimate,
    /// Speed of all ranks together, limited by the loader too.
    pub images_per_second: f64,
    /// The bottleneck of this phase.
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
    /// Time of all evaluations.
    pub seconds: f64,
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
    /// The network runs on CPUs only; the recipe cannot run with this number of samples; the calibration cannot be
    /// used.
    pub fn plan(&self, machine: &Machine) -> Result<RecipePlan, Error> {
        let spec = self.spec;
        let ranks = spec.max_ranks().min(machine.gpus);
        let run = DryRun::new(spec, self.samples).map_err(Error::Recipe)?;
        let mut roofline = Roofline::new(&machine.gpu, spec.precision.compute);
        let calibration = self.calibration.map(|c| c.factor(machine)).transpose()?;
        roofline.calibration = calibration.unwrap_or(1.0);
        let loader = LoaderEstimate::new(spec, machine, ranks);
        let loader_limit = loader.map_or(f64::INFINITY, |loader| loader.images_per_second);
        let mut phases = Vec::new();
        let mut largest_need: Option<(Memory, Stretch)> = None;
        for stretch in &run.stretches {
            let network = self.network(stretch.resolution)?;
            let need = Memory::new(spec, &network, ranks, stretch.micro_batch);
            if largest_need
                .as_ref()
                .is_none_or(|(largest, _)| need.total_bytes > largest.total_bytes)
            {
                largest_need = Some((need, *stretch));
            }
            let hardware = (machine, ranks);
            let update =
                UpdateEstimate::new(spec, &network, hardware, &roofline, stretch.micro_batch);
            phases.push(self.phase(*stretch, update, loader_limit));
        }
        // A run has at least one epoch.
        let (memory, memory_phase) = largest_need.ok_or(Error::Recipe(Vec::new()))?;
        let evaluation = self.evaluation(&run, &roofline, ranks, loader_limit)?;
        let training: f64 = phases.iter().map(|phase| phase.seconds).sum();
        let seconds = training + evaluation.seconds;
        let largest = run.stretches.iter().max_by_key(|stretch| stretch.resolution);
        let resolution = largest.map_or(0, |stretch| stretch.resolution);
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
            memory_phase,
            micro_batch: largest.map_or(0, |stretch| stretch.micro_batch),
            largest_micro_batch: Memory::largest_micro_batch(
                spec,
                &network,
                ranks,
                gpu_memory_bytes,
            ),
            images_per_second: run.samples_seen as f64 / training,
            limit: limit(&phases),
            phases,
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

    fn network(&self, resolution: u32) -> Result<Network, Error> {
        let [channels, length] = self.signal;
        let input = match self.spec.model.arch.input_kind() {
            InputKind::Signals => InputShape::Signal { channels, length },
            _ => InputShape::Image { resolution: u64::from(resolution) },
        };
        Network::new(&self.spec.model, input).ok_or(Error::Linear)
    }

    fn phase(&self, stretch: Stretch, update: UpdateEstimate, loader_limit: f64) -> PlannedPhase {
        let computed = stretch.global_batch as f64 / update.seconds;
        let epoch_samples =
            TrainingPlan::new(self.spec, self.samples).epoch_samples(stretch.first_epoch);
        let samples = epoch_samples * u64::from(stretch.epochs);
        let images_per_second = computed.min(loader_limit);
        PlannedPhase {
            limit: if loader_limit < computed { Bottleneck::Loader } else { update.limit() },
            stretch,
            update,
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
        let pass_seconds = total(&roofline.evaluation(&self.network(resolution)?, batch)).total();
        let passes = (1 + u32::from(self.spec.ema.is_some())) * (1 + u32::from(evaluation.flip));
        let computed = f64::from(ranks) * batch as f64 / (pass_seconds * f64::from(passes));
        let images_per_second = computed.min(loader_limit);
        let subset = (evaluation.subset * self.val_samples as f64).ceil() as u64;
        let samples = u64::from(run.full_evaluations) * self.val_samples
            + u64::from(run.subset_evaluations) * subset;
        let seconds = samples as f64 / images_per_second;
        Ok(EvaluationEstimate { resolution, samples, passes, images_per_second, seconds })
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
fn limit(phases: &[PlannedPhase]) -> Bottleneck {
    let time_of = |limit: Bottleneck| -> f64 {
        phases.iter().filter(|phase| phase.limit == limit).map(|phase| phase.seconds).sum()
    };
    let limits = phases.iter().map(|phase| phase.limit);
    limits.max_by(|a, b| time_of(*a).total_cmp(&time_of(*b))).unwrap_or(Bottleneck::Arithmetic)
}

#[cfg(test)]
mod tests;
