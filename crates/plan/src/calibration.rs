//! Measured step times, used instead of the roofline's assumptions.

use baton_recipe::{
    JobSpec,
    spec::{Arch, Compute},
};
use serde::Deserialize;

use crate::{
    Error,
    machine::Machine,
    network::{InputShape, Network},
    roofline::Roofline,
    step::StepEstimate,
};

/// The fields of `baton-worker bench --json` that the plan uses.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Calibration {
    /// The network that was measured.
    pub arch: Arch,
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Samples per step and rank.
    pub batch: u32,
    /// The number format of the computation.
    pub compute: Compute,
    /// Whether it was measured on a GPU.
    pub on_gpu: bool,
    /// Median time of a step, seconds.
    pub step_seconds: f64,
    /// Part of it that the all-reduce of gradients takes, seconds.
    pub all_reduce_seconds: f64,
}

impl Calibration {
    /// Reads the bench's output.
    ///
    /// # Errors
    /// The text is not the bench's output, or it was measured on a CPU.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let invalid = |problem: String| Error::Calibration(problem);
        let calibration: Self = serde_json::from_str(text).map_err(|error| {
            invalid(format!("is not what `baton-worker bench --json` prints: {error}"))
        })?;
        if !calibration.on_gpu {
            return Err(invalid("was measured on a CPU, not a GPU".to_owned()));
        }
        let seconds = calibration.compute_seconds();
        if !(seconds > 0.0 && seconds.is_finite()) {
            return Err(invalid(
                "leaves no time for a step apart from its all-reduce: step_seconds must be above \
                 all_reduce_seconds"
                    .to_owned(),
            ));
        }
        Ok(calibration)
    }

    /// Time of a step without the all-reduce, seconds.
    #[must_use]
    pub fn compute_seconds(&self) -> f64 {
        self.step_seconds - self.all_reduce_seconds
    }

    /// Samples per second of one GPU.
    #[must_use]
    pub fn images_per_second(&self) -> f64 {
        f64::from(self.batch) / self.compute_seconds()
    }

    /// Measured time divided by the roofline's time for `machine`'s GPU.
    ///
    /// # Errors
    /// The bench's network, resolution or batch do not form a valid recipe.
    pub fn factor(&self, machine: &Machine) -> Result<f64, Error> {
        let spec = self.recipe()?;
        let input = InputShape::Image { resolution: u64::from(self.resolution) };
        let network = Network::new(&spec.model, input).ok_or(Error::Linear)?;
        let roofline = Roofline::new(&machine.gpu, self.compute);
        let one_rank = (machine, 1);
        let step = StepEstimate::new(&spec, &network, one_rank, &roofline, u64::from(self.batch));
        Ok(self.compute_seconds() / step.seconds)
    }

    /// The recipe that the bench trains; must match `worker/src/bench`.
    fn recipe(&self) -> Result<JobSpec, Error> {
        let text = r#"
            name = "bench"
            model = { arch = "resnet50", num_classes = 1000 }
            data = { train = "none", val = "none" }
            train = { epochs = 1, global_batch = 1, virtual_ranks = 1 }
            optimizer = { kind = "sgd", momentum = 0.9, weight_decay = 1e-4 }
            schedule = { kind = "constant", lr = 0.1 }
        "#;
        let compute = match self.compute {
            Compute::Fp32 => "fp32",
            Compute::Bf16 => "bf16",
            Compute::Fp16 => "fp16",
        };
        let changes = [
            format!("model.arch={}", self.arch.name()),
            format!("train.global_batch={}", self.batch),
            format!("train.resolution={}", self.resolution),
            format!("precision.compute={compute}"),
        ];
        JobSpec::from_toml(text, &changes).map_err(|error| Error::Calibration(error.to_string()))
    }
}
