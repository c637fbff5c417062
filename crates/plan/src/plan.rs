//! The whole recipe on a machine: memory, speed, time, money.

mod notes;

use baton_recipe::{
    JobSpec, Sees,
    dry_run::{DryRun, Stretch},
    progress::Agenda,
};
use serde::Serialize;

use crate::{
    Calibration, Error, Machine,
    memory::Memory,
    network::{Input, Network},
    roofline::{Roofline, total},
    update::{Limit, Loader, Update},
};

/// What is to be planned.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The recipe.
    pub spec: &'a JobSpec,
    /// Samples of its training set.
    pub samples: u64,
    /// Samples of its validation set.
    pub val_samples: u64,
    /// Channels and length of a sample, for networks of signals.
    pub signal: [u64; 2],
    /// What the machine costs, in place of the table.
    pub dollars_per_hour: Option<f64>,
    /// What was measured on this machine's GPU.
    pub calibration: Option<&'a Calibration>,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// As `--on` calls it.
    pub machine: &'static str,
    /// What is rented.
    pub instance: &'static str,
    /// Its GPUs.
    pub gpu: &'static str,
    /// How many it has.
    pub gpus: u32,
    /// How many of them train.
    pub ranks: u32,
    /// Memory of one GPU.
    pub gpu_memory_bytes: u64,
    /// Whether `memory` is within it.
    pub fits: bool,
    /// What one GPU needs, in the phase that needs most.
    pub memory: Memory,
    /// That phase.
    pub memory_phase: Stretch,
    /// Samples of a forward pass at the largest resolution, by the recipe.
    pub micro_batch: u64,
    /// The most that fit there; 0 if not even one does.
    pub largest_micro_batch: u64,
    /// Epochs of one resolution and one batch each.
    pub phases: Vec<Phase>,
    /// All evaluations.
    pub evaluation: Evaluation,
    /// What the CPUs decode; unknown for signals.
    pub loader: Option<Loader>,
    /// Trained on, over the time of training without evaluations.
    pub images_per_second: f64,
    /// What bounds most of the training time.
    pub limit: Limit,
    /// Of the whole recipe.
    pub seconds: f64,
    /// What that costs, by way of paying.
    pub costs: Vec<Cost>,
    /// Measured seconds for each one of the roofline, if a calibration was given.
    pub calibration: Option<f64>,
    /// What the reader should know or change.
    pub notes: Vec<String>,
}

/// Consecutive epochs of one resolution and one batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// The epochs.
    pub stretch: Stretch,
    /// One update of them.
    pub update: Update,
    /// All ranks together, the loader included.
    pub images_per_second: f64,
    /// What bounds it.
    pub limit: Limit,
    /// Samples of all its epochs.
    pub samples: u64,
    /// Of all its epochs.
    pub seconds: f64,
}

/// All evaluations of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Images in all.
    pub samples: u64,
    /// Forward passes over each: averaged weights and mirrored images double them.
    pub passes: u32,
    /// All ranks together, the loader included.
    pub images_per_second: f64,
    /// Of all of them.
    pub seconds: f64,
}

/// A way of paying.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// `on_demand`, `spot` or `given`.
    pub kind: &'static str,
    /// Of the machine.
    pub dollars_per_hour: f64,
    /// Of the whole recipe.
    pub dollars: f64,
}

impl Question<'_> {
    /// The recipe on `machine`.
    ///
    /// # Errors
    /// The network runs on CPUs only; the recipe cannot be run on so many samples; the calibration does
    /// not fit.
    pub fn plan(&self, machine: &Machine) -> Result<Plan, Error> {
        let spec = self.spec;
        let ranks = spec.max_ranks().min(machine.gpus);
        let run = DryRun::new(spec, self.samples).map_err(Error::Recipe)?;
        let mut roofline = Roofline::new(&machine.gpu, spec.precision.compute);
        let calibration = self.calibration.map(|c| c.factor(machine)).transpose()?;
        roofline.calibration = calibration.unwrap_or(1.0);
        let loader = Loader::new(spec, machine, ranks);
        let ceiling = loader.map_or(f64::INFINITY, |loader| loader.images_per_second);
        let mut phases = Vec::new();
        let mut most: Option<(Memory, Stretch)> = None;
        for stretch in &run.stretches {
            let network = self.network(stretch.resolution)?;
            let need = Memory::new(spec, &network, ranks, stretch.micro_batch);
            if most.as_ref().is_none_or(|(most, _)| need.total_bytes > most.total_bytes) {
                most = Some((need, *stretch));
            }
            let here = (machine, ranks);
            let update = Update::new(spec, &network, here, &roofline, stretch.micro_batch);
            phases.push(self.phase(*stretch, update, ceiling));
        }
        // A run has an epoch at least.
        let (memory, memory_phase) = most.ok_or(Error::Recipe(Vec::new()))?;
        let evaluation = self.evaluation(&run, &roofline, ranks, ceiling)?;
        let training: f64 = phases.iter().map(|phase| phase.seconds).sum();
        let seconds = training + evaluation.seconds;
        let largest = run.stretches.iter().max_by_key(|stretch| stretch.resolution);
        let resolution = largest.map_or(0, |stretch| stretch.resolution);
        let network = self.network(resolution)?;
        let room = machine.gpu.memory_bytes;
        let mut plan = Plan {
            machine: machine.name,
            instance: machine.instance,
            gpu: machine.gpu.name,
            gpus: machine.gpus,
            ranks,
            gpu_memory_bytes: room,
            fits: memory.total_bytes <= room,
            memory,
            memory_phase,
            micro_batch: largest.map_or(0, |stretch| stretch.micro_batch),
            largest_micro_batch: Memory::largest_micro_batch(spec, &network, ranks, room),
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
        let input = match self.spec.model.arch.sees() {
            Sees::Signals => Input::Signal { channels, length },
            _ => Input::Image { resolution: u64::from(resolution) },
        };
        Network::new(&self.spec.model, input).ok_or(Error::Linear)
    }

    fn phase(&self, stretch: Stretch, update: Update, ceiling: f64) -> Phase {
        let computed = stretch.global_batch as f64 / update.seconds;
        let of_epoch = Agenda::new(self.spec, self.samples).epoch_samples(stretch.first_epoch);
        let samples = of_epoch * u64::from(stretch.epochs);
        let images_per_second = computed.min(ceiling);
        Phase {
            limit: if ceiling < computed { Limit::Loader } else { update.limit() },
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
        ceiling: f64,
    ) -> Result<Evaluation, Error> {
        let evaluation = &self.spec.evaluation;
        let resolution = self.spec.evaluation_resolution();
        let batch = u64::from(evaluation.batch);
        let once = total(&roofline.evaluation(&self.network(resolution)?, batch)).total();
        let passes = (1 + u32::from(self.spec.ema.is_some())) * (1 + u32::from(evaluation.flip));
        let computed = f64::from(ranks) * batch as f64 / (once * f64::from(passes));
        let images_per_second = computed.min(ceiling);
        let part = (evaluation.subset * self.val_samples as f64).ceil() as u64;
        let samples = u64::from(run.full_evaluations) * self.val_samples
            + u64::from(run.subset_evaluations) * part;
        let seconds = samples as f64 / images_per_second;
        Ok(Evaluation { resolution, samples, passes, images_per_second, seconds })
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

/// What bounds the training for the longest.
fn limit(phases: &[Phase]) -> Limit {
    let time_of = |limit: Limit| -> f64 {
        phases.iter().filter(|phase| phase.limit == limit).map(|phase| phase.seconds).sum()
    };
    let limits = phases.iter().map(|phase| phase.limit);
    limits.max_by(|a, b| time_of(*a).total_cmp(&time_of(*b))).unwrap_or(Limit::Arithmetic)
}

#[cfg(test)]
mod tests;
