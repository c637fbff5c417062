//! Rotary positions.

use baton_language::{Rope, RopeScaling};
use tch::{Device, Kind, Tensor};

/// Cosines and sines for the tokens of a micro-batch.
#[derive(Debug)]
pub(super) struct RopeTable {
    pub(super) rope: Rope,
    /// (T, 1, D)
    cos: Tensor,
    /// (T, 1, D)
    sin: Tensor,
}

impl RopeTable {
    /// The table for texts of these lengths, each from a position on.
    pub(super) fn new(
        rope: Rope,
        head_dim: i64,
        (lengths, starts): (&[i64], &[i64]),
        (kind, device): (Kind, Device),
    ) -> tch::Result<Self> {
        let _no_grad = tch::no_grad_guard();
        // In the order and precision of transformers, so that the results are the same.
        let spans = || lengths.iter().zip(starts).map(|(length, start)| (*start, start + length));
        let longest = spans().map(|(_, end)| end).max().unwrap_or_default();
        let positions = Tensor::f_arange(longest, (Kind::Float, Device::Cpu))?;
        let frequencies = frequencies(rope, head_dim)?;
        let angles = positions.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        let integers = (Kind::Int64, Device::Cpu);
        let rows = spans().map(|(start, end)| Tensor::f_arange_start(start, end, integers));
        let rows = Tensor::f_cat(&rows.collect::<tch::Result<Vec<_>>>()?, 0)?;
        let of_tokens = |values: Tensor| {
            values.f_index_select(0, &rows)?.f_unsqueeze(1)?.f_to_kind(kind)?.f_to_device(device)
        };
        Ok(Self { rope, cos: of_tokens(angles.f_cos()?)?, sin: of_tokens(angles.f_sin()?)? })
    }
}

/// Angles per position, f32, (D / 2).
fn frequencies(rope: Rope, head_dim: i64) -> tch::Result<Tensor> {
    let exponents = Tensor::f_arange_start_step(0, head_dim, 2, (Kind::Float, Device::Cpu))?;
    let exponents = exponents.f_div_scalar(head_dim as f64)?;
    let wavelengths = Tensor::f_pow_scalar(rope.theta, &exponents)?;
    let frequencies = wavelengths.f_reciprocal()?;
    match rope.scaling {
        RopeScaling::None => Ok(frequencies),
        RopeScaling::Linear { factor } => frequencies.f_div_scalar(factor),
        RopeScaling::Llama3 { factor, low, high, original } => {
            let tau = std::f64::consts::TAU;
            let wavelengths = Tensor::f_full_like(&frequencies, tau)?.f_div(&frequencies)?;
            let long = wavelengths.f_gt(original / low)?;
            let divided = frequencies.f_div_scalar(factor)?;
            let scaled = divided.f_where_self(&long, &frequencies)?;
            // Between the two wavelengths: a weighted mean.
            let smooth = wavelengths.f_reciprocal()?.f_mul_scalar(original)?;
            let smooth = smooth.f_sub_scalar(low)?.f_div_scalar(high - low)?;
            let rest = smooth.f_neg()?.f_add_scalar(1.0)?;
            let mean = rest.f_mul(&divided)?.f_add(&smooth.f_mul(&scaled)?)?;
            let short = wavelengths.f_lt(original / high)?;
            let between = long.f_logical_or(&short)?.f_logical_not()?;
            mean.f_where_self(&between, &scaled)
        }
    }
}

/// Rotates queries or keys (T, heads, D) by their positions.
pub(super) fn rotate(x: &Tensor, table: &RopeTable) -> tch::Result<Tensor> {
    let half = x.size3()?.2 / 2;
    let turned = [x.f_narrow(-1, half, half)?.f_neg()?, x.f_narrow(-1, 0, half)?];
    let turned = Tensor::f_cat(&turned, -1)?;
    x.f_mul(&table.cos)?.f_add(&turned.f_mul(&table.sin)?)
}
