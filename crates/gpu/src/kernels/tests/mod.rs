//! Tests of the kernels' source on the host, compared with plain arithmetic in f64.

mod batch_norm;
mod sgd;

use half::{bf16, f16};

use super::{Element, KernelTarget, Kernels};

const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

impl Kernels {
    /// Kernels on the host whose threads and blocks run in an order that depends on `seed`.
    fn on_host_with_order(seed: u64) -> Self {
        Self(KernelTarget::Host { seed })
    }
}

/// Values in the format of an element, 16 bytes aligned.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    element: Element,
    len: usize,
    words: Vec<u128>,
}

impl Stored {
    fn zeros(element: Element, len: usize) -> Self {
        Self { element, len, words: vec![0; (len * element.bytes()).div_ceil(16)] }
    }

    /// `values`, rounded to nearest.
    fn of(element: Element, values: &[f32]) -> Self {
        let bytes: Vec<u8> = match element {
            Element::F32 => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            Element::Bf16 => {
                values.iter().flat_map(|value| bf16::from_f32(*value).to_ne_bytes()).collect()
            }
            Element::F16 => {
                values.iter().flat_map(|value| f16::from_f32(*value).to_ne_bytes()).collect()
            }
        };
        let words = bytes.chunks(16).map(|chunk| {
            let mut word = [0; 16];
            word[..chunk.len()].copy_from_slice(chunk);
            u128::from_ne_bytes(word)
        });
        Self { element, len: values.len(), words: words.collect() }
    }

    fn values(&self) -> Vec<f32> {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let values = bytes.chunks_exact(self.element.bytes()).map(|bytes| match *bytes {
            [a, b] if self.element == Element::Bf16 => bf16::from_ne_bytes([a, b]).to_f32(),
            [a, b] => f16::from_ne_bytes([a, b]).to_f32(),
            [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
            _ => panic!("no such element"),
        });
        values.take(self.len).collect()
    }

    fn address(&mut self) -> u64 {
        self.words.as_mut_ptr() as u64
    }
}

/// Distance from 1 to the next value of the format.
fn step(element: Element) -> f64 {
    match element {
        Element::F32 => f64::from(f32::EPSILON),
        Element::Bf16 => bf16::EPSILON.to_f64(),
        Element::F16 => f16::EPSILON.to_f64(),
    }
}

/// Approximately normally distributed values.
fn normal(random: &mut fastrand::Rng, mean: f32, deviation: f32) -> f32 {
    let sum: f32 = (0..12).map(|_| random.f32()).sum();
    mean + deviation * (sum - 6.0)
}
