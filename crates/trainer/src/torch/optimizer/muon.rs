//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>): a step whose singular values are all near 1.
//!
//! The quintic Newton-Schulz iteration `X ← a X + (b X Xᵀ + c (X Xᵀ)²) X` moves the singular values of `X` towards 1 and
//! keeps the directions. Its coefficients and the number of iterations are those of `torch.optim.Muon`; five iterations
//! end between 0.7 and 1.2, except for singular values that were nearly zero.

use baton_recipe::spec::Compute;
use tch::{Device, Kind, Tensor};

const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;
/// Least norm by which a matrix is divided.
const EPSILON: f64 = 1e-7;
/// Root mean square of the values of AdamW's steps, which those of Muon are scaled to (Liu et al. 2025, arXiv 2502.16982,
/// §2.2).
const ADAMW_RMS: f64 = 0.2;

/// Muon's constants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Muon {
    pub(super) momentum: f64,
    pub(super) nesterov: bool,
    /// Number format of the iteration.
    pub(super) kind: Kind,
}

/// Number format of the iteration: that of the network on a GPU, where bf16 stands for all 16-bit formats as the products
/// can be too small for fp16.
pub(super) fn kind(device: Device, compute: Compute) -> Kind {
    match (device, compute) {
        (Device::Cpu, _) | (_, Compute::Fp32) => Kind::Float,
        (_, Compute::Bf16 | Compute::Fp16) => Kind::BFloat16,
    }
}

impl Muon {
    /// The step without the learning rate, in the shape of `direction`, which is a matrix of `rows` rows in f32.
    pub(super) fn step(&self, direction: &Tensor, rows: i64) -> tch::Result<Tensor> {
        let matrix = direction.f_view([rows, -1])?;
        let columns = matrix.size2()?.1;
        let matrix = matrix.f_to_kind(self.kind)?;
        // The product with itself is then the smaller one.
        let is_tall = rows > columns;
        let matrix = if is_tall { matrix.f_tr()? } else { matrix };
        let mut matrix = matrix.f_div(&matrix.f_norm()?.f_clamp_min(EPSILON)?)?;
        let [a, b, c] = COEFFICIENTS;
        for _ in 0..ITERATIONS {
            let product = matrix.f_mm(&matrix.f_tr()?)?;
            let polynomial =
                (product.f_mul_scalar(b)?).f_add(&product.f_mm(&product)?.f_mul_scalar(c)?)?;
            matrix = matrix.f_mul_scalar(a)?.f_add(&polynomial.f_mm(&matrix)?)?;
        }
        let matrix = if is_tall { matrix.f_tr()? } else { matrix };
        let scale = ADAMW_RMS * (rows.max(columns) as f64).sqrt();
        matrix.f_to_kind(Kind::Float)?.f_mul_scalar(scale)?.f_reshape([-1])
    }
}
