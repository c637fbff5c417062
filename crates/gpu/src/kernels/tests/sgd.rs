//! SGD with everything that is done in the same pass.

use super::super::Kernels;
use super::super::sgd::Sgd;
use super::*;

/// The buffers of an update.
#[derive(Clone)]
struct Case {
    weights: Stored,
    gradient: Stored,
    velocity: Option<Stored>,
    average: Option<Stored>,
    working: Option<Stored>,
    norm: f32,
    loss_scale: Option<f32>,
    rule: Sgd,
}

impl Case {
    fn new(len: usize, momentum: Option<bool>) -> Self {
        let mut random = fastrand::Rng::with_seed(len as u64);
        let mut values = |deviation| {
            let values: Vec<f32> = (0..len).map(|_| normal(&mut random, 0.0, deviation)).collect();
            Stored::of(Element::F32, &values)
        };
        Self {
            weights: values(0.1),
            gradient: values(0.01),
            velocity: momentum.map(|_| values(0.02)),
            average: None,
            working: None,
            norm: 2.0,
            loss_scale: None,
            rule: Sgd {
                len,
                decayed: len * 2 / 3,
                lr: 0.3,
                momentum: if momentum.is_some() { 0.9 } else { 0.0 },
                nesterov: momentum == Some(true),
                weight_decay: 1e-3,
                share: 0.01,
                ..Sgd::default()
            },
        }
    }

    fn run(mut self, kernels: &Kernels) -> Self {
        let address = |stored: &mut Option<Stored>| stored.as_mut().map_or(0, Stored::address);
        let rule = Sgd {
            weights: self.weights.address(),
            gradient: self.gradient.address(),
            velocity: address(&mut self.velocity),
            average: address(&mut self.average),
            working: address(&mut self.working),
            norm: std::ptr::from_ref(&self.norm) as u64,
            loss_scale: self.loss_scale.as_ref().map_or(0, |s| std::ptr::from_ref(s) as u64),
            ..self.rule
        };
        // SAFETY: every address is that of a buffer of as many values.
        unsafe { rule.run(kernels) }.unwrap();
        self
    }

    /// The same in plain f32, in the order of the trainer's CPU update; the bits must be equal.
    fn expected(&self) -> Self {
        let mut after = self.clone();
        let rule = &self.rule;
        let norm = f64::from(self.norm);
        let clip = if rule.clip > 0.0 { (rule.clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let factor = (clip / f64::from(self.loss_scale.unwrap_or(1.0))) as f32;
        let values = |stored: &Option<Stored>| stored.as_ref().map(Stored::values);
        let (mut weights, gradient) = (self.weights.values(), self.gradient.values());
        let (mut velocity, mut average) = (values(&self.velocity), values(&self.average));
        for at in 0..rule.len {
            let w = &mut weights[at];
            if norm.is_finite() {
                let decay = if at < rule.decayed { rule.weight_decay } else { 0.0 };
                let g = gradient[at] * factor + decay * *w;
                match &mut velocity {
                    None => *w -= rule.lr * g,
                    Some(velocity) => {
                        let v = &mut velocity[at];
                        *v = rule.momentum * *v + g;
                        *w -= rule.lr * if rule.nesterov { g + rule.momentum * *v } else { *v };
                    }
                }
            }
            if let Some(average) = &mut average {
                let a = &mut average[at];
                *a = if rule.share == 1.0 { *w } else { *a + rule.share * (*w - *a) };
            }
        }
        let stored = |values: Option<Vec<f32>>| values.map(|v| Stored::of(Element::F32, &v));
        after.working = self.working.as_ref().map(|w| Stored::of(w.element, &weights[..rule.cast]));
        after.weights = Stored::of(Element::F32, &weights);
        (after.velocity, after.average) = (stored(velocity), stored(average));
        after
    }

    fn with_average(mut self, share: f32) -> Self {
        let average: Vec<f32> = self.weights.values().iter().map(|w| w * 0.5).collect();
        self.average = Some(Stored::of(Element::F32, &average));
        self.rule.share = share;
        self
    }

    fn with_working(mut self, element: Element, cast: usize) -> Self {
        self.working = Some(Stored::zeros(element, cast));
        self.rule.cast = cast;
        self.rule.element = element;
        self
    }

    fn assert_as_expected(self) {
        let expected = self.expected();
        let found = self.run(&Kernels::on_host_with_order(7));
        assert!(found.weights == expected.weights, "weights, {:?}", expected.rule);
        assert!(found.velocity == expected.velocity, "velocity, {:?}", expected.rule);
        assert!(found.average == expected.average, "average, {:?}", expected.rule);
        assert!(found.working == expected.working, "working copy, {:?}", expected.rule);
    }
}

#[test]
fn weights_and_velocity_follow_torchs_formulas() {
    for len in [1, 2, 5, 1023, 100_000] {
        for momentum in [None, Some(false), Some(true)] {
            Case::new(len, momentum).assert_as_expected();
        }
    }
}

#[test]
fn clipping_and_loss_scale_are_read_on_the_device() {
    for norm in [0.5, 30.0] {
        for loss_scale in [None, Some(1024.0)] {
            let mut case = Case::new(777, Some(true));
            (case.norm, case.loss_scale) = (norm, loss_scale);
            case.rule.clip = 1.0;
            case.assert_as_expected();
        }
    }
}

#[test]
fn the_average_is_updated_in_the_same_pass() {
    for share in [0.001, 1.0] {
        Case::new(4099, Some(true)).with_average(share).assert_as_expected();
    }
}

#[test]
fn the_working_copy_is_rounded_to_nearest() {
    for element in [Element::Bf16, Element::F16] {
        // No, some, and all weights; the end is inside and between packs.
        for cast in [0, 3, 512, 1022, 1030] {
            let mut case = Case::new(1030, Some(true)).with_working(element, cast);
            // Halfway between two values, too large, and too small.
            let mut weights = case.weights.values();
            weights[..12].copy_from_slice(&[
                1.0 + 1.0 / 256.0,
                1.0 + 3.0 / 256.0,
                1.0 + 1.0 / 2048.0,
                1.0 + 3.0 / 2048.0,
                65_519.0,
                65_520.0,
                -3e38,
                1e-40,
                6e-8,
                -2.9e-8,
                6.1e-5,
                0.0,
            ]);
            case.weights = Stored::of(Element::F32, &weights);
            (case.rule.lr, case.rule.weight_decay) = (0.0, 0.0);
            case.assert_as_expected();
        }
    }
}

#[test]
fn every_f16_is_read_and_written_unchanged() {
    use super::super::batch_norm::{BatchNorm, Shape};

    // x is 0 and the output is the residual: 0 * x + r, without rounding.
    let finite: Vec<f32> = (0..=u16::MAX)
        .map(|bits| f16::from_bits(bits).to_f32())
        .filter(|v| v.is_finite())
        .collect();
    let mut residual = Stored::of(Element::F16, &finite);
    let mut x = Stored::zeros(Element::F16, finite.len());
    let mut y = Stored::zeros(Element::F16, finite.len());
    let shape = Shape { rows: finite.len(), channels: 1, element: Element::F16 };
    let mut of_channels = [0.0_f32; 6];
    let mut workspace = vec![0.0_f32; shape.workspace()];
    let [scale, shift, mean, inverse_deviation, batch_mean, batch_variance] =
        of_channels.each_mut().map(|value| std::ptr::from_mut(value) as u64);
    let forward = BatchNorm {
        shape,
        x: x.address(),
        residual: residual.address(),
        y: y.address(),
        scale,
        shift,
        mean,
        inverse_deviation,
        batch_mean,
        batch_variance,
        workspace: workspace.as_mut_ptr() as u64,
        epsilon: 1e-5,
        ..BatchNorm::default()
    };
    // SAFETY: every address is that of a buffer of the size that the shape states.
    unsafe { forward.forward(&Kernels::on_host()) }.unwrap();
    assert_eq!(y.values(), finite);
}

#[test]
fn a_gradient_that_is_not_finite_changes_only_the_average() {
    for norm in [f32::NAN, f32::INFINITY] {
        let mut case =
            Case::new(1001, Some(true)).with_average(0.25).with_working(Element::Bf16, 900);
        let mut gradient = case.gradient.values();
        gradient[17] = norm;
        case.gradient = Stored::of(Element::F32, &gradient);
        (case.norm, case.rule.clip) = (norm, 1.0);
        let found = case.clone().run(&Kernels::on_host());
        assert!(found.weights == case.weights && found.velocity == case.velocity);
        assert!(found.average != case.average);
        case.assert_as_expected();
    }
}

#[test]
fn a_buffer_that_is_not_aligned_to_16_bytes_is_updated_the_same() {
    let case = Case::new(1000, Some(true));
    let expected = case.expected().weights.values();
    // All weights except the first; their buffers then begin inside a block of 16 bytes.
    let mut shifted = case.clone();
    let mut velocity = shifted.velocity.take().unwrap();
    let rule = Sgd {
        weights: shifted.weights.address() + 4,
        gradient: shifted.gradient.address() + 4,
        velocity: velocity.address() + 4,
        norm: std::ptr::from_ref(&shifted.norm) as u64,
        len: 999,
        decayed: case.rule.decayed - 1,
        ..case.rule
    };
    // SAFETY: 999 values follow the first.
    unsafe { rule.run(&Kernels::on_host()) }.unwrap();
    let found = shifted.weights.values();
    assert_eq!(found[1..], expected[1..]);
    assert_eq!(found[0], case.weights.values()[0]);
}

#[test]
fn an_update_of_no_weights_does_nothing() {
    Case::new(0, Some(true)).assert_as_expected();
}
