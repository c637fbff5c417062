//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>): a step whose singular values are all near 1.
//!
//! The quintic Newton-Schulz iteration `X ← a X + (b X Xᵀ + c (X Xᵀ)²) X` moves the singular values of `X` towards 1 and
//! keeps the directions. Its coefficients and the number of iterations are those of `torch.optim.Muon`; five iterations
//! end between 0.7 and 1.2, except for singular values that were nearly zero.
//!
//! On a CPU the products are plain Rust in a fixed order: every rank computes them for itself, and a library that chooses
//! instructions by the processor would let ranks on unlike machines drift apart.

use std::iter::zip;

use baton_recipe::spec::Compute;
use tch::{Kind, Tensor};
use wide::f32x8;

use super::host::{in_parallel, norm, threads};

const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;
/// Least norm by which a matrix is divided.
const EPSILON: f64 = 1e-7;
/// Root mean square of the values of AdamW's steps, which those of Muon are scaled to (Liu et al. 2025, arXiv 2502.16982,
/// §2.2).
const ADAMW_RMS: f64 = 0.2;
/// Rows and columns of a product that are summed at the same time, in registers.
const TILE_ROWS: usize = 4;
const TILE_COLUMNS: usize = 8;

/// Muon's constants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Muon {
    pub(super) momentum: f64,
    pub(super) nesterov: bool,
    /// Number format of the iteration on a GPU.
    pub(super) kind: Kind,
}

/// The number format of the network, where bf16 stands for all 16-bit formats: products can be too small for fp16.
pub(super) fn kind(compute: Compute) -> Kind {
    match compute {
        Compute::Fp32 => Kind::Float,
        Compute::Bf16 | Compute::Fp16 => Kind::BFloat16,
    }
}

/// Factor of the step of such a matrix.
fn scale(rows: usize, columns: usize) -> f64 {
    ADAMW_RMS * (rows.max(columns) as f64).sqrt()
}

impl Muon {
    /// The step without the learning rate, for a matrix of `rows` rows in f32, as one dimension.
    pub(super) fn step_on_device(&self, direction: &Tensor, rows: i64) -> tch::Result<Tensor> {
        let matrix = direction.f_view([rows, -1])?.f_to_kind(self.kind)?;
        let columns = matrix.size2()?.1;
        // The product with itself is then the smaller one.
        let is_tall = rows > columns;
        let matrix = if is_tall { matrix.f_tr()? } else { matrix };
        let mut matrix = matrix.f_div(&matrix.f_norm()?.f_clamp_min(EPSILON)?)?;
        let [a, b, c] = COEFFICIENTS;
        for _ in 0..ITERATIONS {
            let product = matrix.f_mm(&matrix.f_tr()?)?;
            let square = product.f_mm(&product)?.f_mul_scalar(c)?;
            let polynomial = product.f_mul_scalar(b)?.f_add(&square)?;
            matrix = matrix.f_mul_scalar(a)?.f_add(&polynomial.f_mm(&matrix)?)?;
        }
        let matrix = if is_tall { matrix.f_tr()? } else { matrix };
        let scale = scale(rows as usize, columns as usize);
        matrix.f_to_kind(Kind::Float)?.f_mul_scalar(scale)?.f_reshape([-1])
    }
}

/// Replaces a matrix of `rows` rows by the step without the learning rate.
pub(super) fn step_on_host(values: &mut [f32], rows: usize) {
    let columns = values.len() / rows;
    let is_tall = rows > columns;
    let (m, n) = (rows.min(columns), rows.max(columns));
    let factor = (1.0 / norm(values, &[]).max(EPSILON)) as f32;
    let mut matrix = if is_tall { transposed(values, n, m) } else { values.to_vec() };
    matrix.iter_mut().for_each(|value| *value *= factor);
    let [a, b, c] = COEFFICIENTS.map(|coefficient| coefficient as f32);
    for _ in 0..ITERATIONS {
        let mut polynomial = product(&matrix, &transposed(&matrix, m, n), m);
        let square = product(&polynomial, &polynomial, m);
        zip(&mut polynomial, square).for_each(|(one, two)| *one = b * *one + c * two);
        let change = product(&polynomial, &matrix, m);
        zip(&mut matrix, change).for_each(|(value, change)| *value = a * *value + change);
    }
    let matrix = if is_tall { transposed(&matrix, m, n) } else { matrix };
    let scale = scale(rows, columns) as f32;
    zip(values, matrix).for_each(|(value, step)| *value = scale * step);
}

/// The transpose of a matrix of `rows` rows and `columns` columns.
fn transposed(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| matrix[row * columns + column]))
        .collect()
}

/// The product of a matrix of `rows` rows with another one. Each value is summed in the order of the inner dimension, so it
/// does not depend on the number of threads.
fn product(one: &[f32], other: &[f32], rows: usize) -> Vec<f32> {
    let inner = one.len() / rows;
    let columns = other.len() / inner;
    // In the order in which they are read.
    let panel = |start: usize| -> Vec<f32x8> {
        let end = columns.min(start + TILE_COLUMNS);
        let values = |row: &[f32]| {
            let mut values = [0.0; TILE_COLUMNS];
            values[..end - start].copy_from_slice(&row[start..end]);
            f32x8::new(values)
        };
        other.chunks(columns).map(values).collect()
    };
    let panels: Vec<_> = (0..columns).step_by(TILE_COLUMNS).map(panel).collect();
    let mut result = vec![0.0; rows * columns];
    let bands = zip(result.chunks_mut(TILE_ROWS * columns), one.chunks(TILE_ROWS * inner));
    in_parallel(bands.collect(), threads(), &|(result, one): (&mut [f32], &[f32])| {
        let mut band = vec![[0.0; TILE_ROWS]; inner];
        for (row, values) in one.chunks(inner).enumerate() {
            zip(&mut band, values).for_each(|(factors, value)| factors[row] = *value);
        }
        for (panel, start) in zip(&panels, (0..columns).step_by(TILE_COLUMNS)) {
            let mut sums = [f32x8::ZERO; TILE_ROWS];
            for (factors, values) in zip(&band, panel) {
                for (sum, factor) in zip(&mut sums, factors) {
                    *sum += *values * f32x8::splat(*factor);
                }
            }
            for (result, sums) in zip(result.chunks_mut(columns), sums) {
                let end = columns.min(start + TILE_COLUMNS);
                result[start..end].copy_from_slice(&sums.as_array()[..end - start]);
            }
        }
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the given shape, without a pattern.
    fn matrix(rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(|i| ((i * i) as f32 * 0.37 + 1.0).sin()).collect()
    }

    #[test]
    fn the_product_is_that_of_libtorch() {
        for (rows, inner, columns) in [(1, 1, 1), (4, 16, 16), (5, 7, 33), (9, 40, 3)] {
            let (one, other) = (matrix(rows, inner), matrix(inner, columns));
            let tensor = |values: &[f32], rows: usize| {
                Tensor::from_slice(values).view([rows as i64, -1]).to_kind(Kind::Double)
            };
            let expected = tensor(&one, rows).mm(&tensor(&other, inner));
            let found = tensor(&product(&one, &other, rows), rows);
            let error = (found - expected).abs().max().double_value(&[]);
            assert!(error < 1e-5, "{rows} x {inner} x {columns}: {error}");
        }
    }

    #[test]
    fn steps_are_orthogonal_and_the_same_on_both_devices() {
        for (rows, columns) in [(3, 40), (40, 3), (16, 16), (1, 9), (9, 1)] {
            let direction = matrix(rows, columns);
            let muon = |kind| Muon { momentum: 0.9, nesterov: true, kind };
            let mut host = direction.clone();
            step_on_host(&mut host, rows);
            let on_device = |kind| {
                let step = muon(kind).step_on_device(&Tensor::from_slice(&direction), rows as i64);
                Vec::<f32>::try_from(step.unwrap()).unwrap()
            };
            let largest = host.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            for (kind, limit) in [(Kind::Float, 1e-4), (Kind::BFloat16, 0.2)] {
                let errors = zip(&host, on_device(kind)).map(|(one, other)| (one - other).abs());
                let error = errors.fold(0.0_f32, f32::max) / largest;
                assert!(error < limit, "{rows} x {columns}, {kind:?}: {error}");
            }
            let step = Tensor::from_slice(&host).view([rows as i64, -1]);
            let (_, singular, _) = step.svd(true, false);
            let singular = singular / scale(rows, columns);
            let range = (singular.min().double_value(&[]), singular.max().double_value(&[]));
            assert!(range.0 > 0.3 && range.1 < 1.3, "{rows} x {columns}: {range:?}");
        }
    }
}
