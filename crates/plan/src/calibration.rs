//! What somebody has measured, in place of what the roofline assumes.

use baton_recipe::{
    JobSpec,
    spec::{Arch, Compute},
};
use serde::Deserialize;

use crate::{
    Error,
    machine::Machine,
    network::{Input, Network},
    roofline::Roofline,
    update::Update,
};

/// What `baton-worker bench --json` prints, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Calibration {
    /// The network.
    pub arch: Arch,
    /// Side of the images in pixels.
    pub resolution: u32,
    /// Samples per step and rank.
    pub batch: u32,
    /// The number format.
    pub compute: Compute,
    /// Whether a GPU did it.
    pub on_gpu: bool,
    /// Median time of a step.
    pub step_seconds: f64,
    /// Of that for adding up gradients between ranks.
    pub all_reduce_seconds: f64,
}

impl Calibration {
    /// Reads the bench's output.
    ///
    /// # Errors
    /// It is something else, or of a CPU.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let refuse = |problem: String| Error::Calibration(problem);
        let read: Self = serde_json::from_str(text).map_err(|error| {
            refuse(format!("is not what `baton-worker bench --json` prints: {error}"))
        })?;
        if !read.on_gpu {
            return Err(refuse("was measured on a CPU, not a GPU".to_owned()));
        }
        let own = read.own_seconds();
        if !(own > 0.0 && own.is_finite()) {
            return Err(refuse(
                "leaves no time for a step beside its all-reduce: step_seconds must be above \
                 all_reduce_seconds"
                    .to_owned(),
            ));
        }
        Ok(read)
    }

    /// Of a step, without the all-reduce.
    #[must_use]
    pub fn own_seconds(&self) -> f64 {
        self.step_seconds - self.all_reduce_seconds
    }

    /// Samples per second of one GPU.
    #[must_use]
    pub fn images_per_second(&self) -> f64 {
        f64::from(self.batch) / self.own_seconds()
    }

    /// Measured time for each second that the roofline gives `machine`'s GPU.
    ///
    /// # Errors
    /// The bench's network, resolution or batch make no recipe.
    pub fn factor(&self, machine: &Machine) -> Result<f64, Error> {
        let spec = self.recipe()?;
        let input = Input::Image { resolution: u64::from(self.resolution) };
        let network = Network::new(&spec.model, input).ok_or(Error::Linear)?;
        let roofline = Roofline::new(&machine.gpu, self.compute);
        let alone = (machine, 1);
        let update = Update::new(&spec, &network, alone, &roofline, u64::from(self.batch));
        Ok(self.own_seconds() / update.seconds)
    }

    /// What the bench trains, as `worker/src/bench` makes it up.
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
