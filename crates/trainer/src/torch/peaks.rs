//! Measured peak rates of a device, to compare a step with.

use std::time::Instant;

use baton_recipe::spec::Compute;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::{failure::During, working};
use crate::learner::Error;

/// Rates that libtorch achieved on a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// Bytes read and written per second by a copy in the device's memory.
    pub copy_bytes_per_second: f64,
    /// Floating-point operations per second of a product of square matrices in the recipe's number format. For fp32
    /// this is without TF32, which libtorch uses for convolutions on GPUs that have it.
    pub flop_per_second: f64,
}

/// Number of measurements of each rate; the best one counts, because other programs may use the machine.
const TRIES: u32 = 5;

/// Measures both rates; takes about a second.
///
/// # Errors
/// Out of memory.
pub fn measure(device: Device, compute: Compute) -> Result<Peaks, Error> {
    // Large enough that a GPU's caches have no effect and launch times do not matter.
    let (values, side, repeats) = match device {
        Device::Cpu => (1_i64 << 24, 1_024_i64, 1_u32),
        _ => (1 << 28, 8_192, 10),
    };
    rates(device, working::kind(compute), values, side, repeats).during("measure the device")
}

fn rates(device: Device, kind: Kind, values: i64, side: i64, repeats: u32) -> tch::Result<Peaks> {
    let _no_grad = tch::no_grad_guard();
    // Random values: with zeros a GPU draws less power and runs faster than in training.
    let from = Tensor::f_randn([values], (Kind::Float, device))?;
    let mut to = from.f_empty_like()?;
    let copy = best_seconds(repeats, &mut to, |to| to.f_copy_(&from))?;
    let matrix = Tensor::f_randn([side, side], (Kind::Float, device))?.f_to_kind(kind)?;
    let mut product = matrix.f_empty_like()?;
    let multiply = best_seconds(repeats, &mut product, |product| {
        matrix.f_matmul_out(product, &matrix).map(|_| ())
    })?;
    Ok(Peaks {
        // 4 bytes per value, read and written.
        copy_bytes_per_second: 8.0 * values as f64 / copy,
        flop_per_second: 2.0 * (side as f64).powi(3) / multiply,
    })
}

/// Shortest time of one operation on `target`, seconds.
fn best_seconds(
    repeats: u32,
    target: &mut Tensor,
    mut operation: impl FnMut(&mut Tensor) -> tch::Result<()>,
) -> tch::Result<f64> {
    operation(target)?;
    wait(target)?;
    let mut best = f64::INFINITY;
    for _ in 0..TRIES {
        let start = Instant::now();
        for _ in 0..repeats {
            operation(target)?;
        }
        wait(target)?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(best)
}

/// Waits for all queued work: reading a value requires its result.
fn wait(tensor: &Tensor) -> tch::Result<f64> {
    tensor.f_reshape([-1])?.f_double_value(&[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_plausible() {
        let found = rates(Device::Cpu, Kind::Float, 1 << 20, 128, 1).unwrap();
        // Wide bounds: from far below any CPU to far above any GPU.
        assert!((1e6..1e15).contains(&found.copy_bytes_per_second), "{found:?}");
        assert!((1e6..1e18).contains(&found.flop_per_second), "{found:?}");
    }
}
