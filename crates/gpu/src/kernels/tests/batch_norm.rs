//! BatchNorm, forward and backward.

use super::super::Kernels;
use super::super::batch_norm::{BatchNorm, Shape};
use super::*;

const EPSILON: f32 = 1e-5;

/// Operations after the normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Epilogue {
    residual: bool,
    relu: bool,
}

const EPILOGUES: [Epilogue; 4] = [
    Epilogue { residual: false, relu: false },
    Epilogue { residual: false, relu: true },
    Epilogue { residual: true, relu: false },
    Epilogue { residual: true, relu: true },
];

/// Inputs of a forward and a backward pass.
#[derive(Clone)]
struct Case {
    shape: Shape,
    epilogue: Epilogue,
    x: Stored,
    residual: Stored,
    y_gradient: Stored,
    scale: Vec<f32>,
    shift: Vec<f32>,
}

/// Results of both passes.
#[derive(Debug)]
struct Outcome {
    y: Stored,
    mean: Vec<f32>,
    inverse_deviation: Vec<f32>,
    batch_mean: Vec<f32>,
    batch_variance: Vec<f32>,
    x_gradient: Stored,
    residual_gradient: Stored,
    scale_gradient: Vec<f32>,
    shift_gradient: Vec<f32>,
}

impl Outcome {
    /// The bits of all results: NaNs too are compared by their bits.
    fn bits(&self) -> Vec<u32> {
        let of = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        [
            of(&self.y.values()),
            of(&self.mean),
            of(&self.inverse_deviation),
            of(&self.batch_mean),
            of(&self.batch_variance),
            of(&self.x_gradient.values()),
            of(&self.residual_gradient.values()),
            of(&self.scale_gradient),
            of(&self.shift_gradient),
        ]
        .concat()
    }
}

impl Case {
    /// A case in which every channel has a different mean and deviation.
    fn new(rows: usize, channels: usize, element: Element, epilogue: Epilogue) -> Self {
        let mut random = fastrand::Rng::with_seed((rows * 31 + channels) as u64);
        let shape = Shape { rows, channels, element };
        let of_channels: Vec<[f32; 2]> =
            (0..channels).map(|_| [normal(&mut random, 0.0, 2.0), 0.25 + random.f32()]).collect();
        let x = (0..rows * channels).map(|at| {
            let [mean, deviation] = of_channels[at % channels];
            normal(&mut random, mean, deviation)
        });
        let x: Vec<f32> = x.collect();
        let mut others = |deviation| -> Vec<f32> {
            (0..rows * channels).map(|_| normal(&mut random, 0.0, deviation)).collect()
        };
        let (residual, y_gradient) = (others(1.0), others(0.1));
        let mut parameters =
            |mean| -> Vec<f32> { (0..channels).map(|_| normal(&mut random, mean, 0.5)).collect() };
        Self {
            shape,
            epilogue,
            x: Stored::of(element, &x),
            residual: Stored::of(element, &residual),
            y_gradient: Stored::of(element, &y_gradient),
            scale: parameters(1.0),
            shift: parameters(0.0),
        }
    }

    fn run(&self, kernels: &Kernels) -> Outcome {
        let Self { shape, epilogue, mut x, mut residual, mut y_gradient, scale, shift } =
            self.clone();
        let Shape { rows, channels, element } = shape;
        let of_rows = || Stored::zeros(element, rows * channels);
        let of_channels = || vec![0.0_f32; channels];
        // NaN, because earlier values must not matter.
        let mut workspace = vec![f32::NAN; shape.workspace()];
        let mut outcome = Outcome {
            y: of_rows(),
            mean: of_channels(),
            inverse_deviation: of_channels(),
            batch_mean: of_channels(),
            batch_variance: of_channels(),
            x_gradient: of_rows(),
            residual_gradient: of_rows(),
            scale_gradient: of_channels(),
            shift_gradient: of_channels(),
        };
        let address = |values: &mut [f32]| values.as_mut_ptr() as u64;
        let forward = BatchNorm {
            shape,
            x: x.address(),
            residual: if epilogue.residual { residual.address() } else { 0 },
            y: outcome.y.address(),
            scale: scale.as_ptr() as u64,
            shift: shift.as_ptr() as u64,
            mean: address(&mut outcome.mean),
            inverse_deviation: address(&mut outcome.inverse_deviation),
            batch_mean: address(&mut outcome.batch_mean),
            batch_variance: address(&mut outcome.batch_variance),
            workspace: address(&mut workspace),
            epsilon: EPSILON,
            relu: epilogue.relu,
            ..BatchNorm::default()
        };
        let backward = BatchNorm {
            y: if epilogue.residual { forward.y } else { 0 },
            y_gradient: y_gradient.address(),
            x_gradient: outcome.x_gradient.address(),
            residual_gradient: if epilogue.residual {
                outcome.residual_gradient.address()
            } else {
                0
            },
            scale_gradient: address(&mut outcome.scale_gradient),
            shift_gradient: address(&mut outcome.shift_gradient),
            ..forward
        };
        // SAFETY: every address is that of a buffer of the size that the shape states.
        unsafe {
            forward.forward(kernels).unwrap();
            backward.backward(kernels).unwrap();
        }
        outcome
    }

    /// Compares with plain sums in f64, channel by channel. `y` decides where the ReLU passes gradients.
    fn check(&self, outcome: &Outcome) {
        let Shape { rows, channels, element } = self.shape;
        let wide =
            |stored: &Stored| -> Vec<f64> { stored.values().into_iter().map(f64::from).collect() };
        let [x, residual, y_gradient] = [&self.x, &self.residual, &self.y_gradient].map(wide);
        let found_y = wide(&outcome.y);
        let found_x_gradient = wide(&outcome.x_gradient);
        let found_residual_gradient = wide(&outcome.residual_gradient);
        let (count, step) = (rows as f64, step(element));
        let what = |name: &str, at: usize| {
            format!("{name}[{at}] of {:?}, {:?}", self.shape, self.epilogue)
        };
        for channel in 0..channels {
            let places = || (0..rows).map(|row| row * channels + channel);
            let mean = places().map(|at| x[at]).sum::<f64>() / count;
            let square = places().map(|at| (x[at] - mean).powi(2)).sum::<f64>();
            let deviation = (square / count + f64::from(EPSILON)).sqrt();
            let (scale, shift) = (f64::from(self.scale[channel]), f64::from(self.shift[channel]));
            let size = mean.abs() + deviation;
            let found_mean = f64::from(outcome.batch_mean[channel]);
            assert_near(found_mean, mean, 4e-6 * size, || what("mean", channel));
            assert_eq!(outcome.mean[channel].to_bits(), outcome.batch_mean[channel].to_bits());
            // For one row the result is NaN in torch too.
            let unbiased = square / (count - 1.0);
            let found_variance = f64::from(outcome.batch_variance[channel]);
            assert_near(found_variance, unbiased, 1e-5 * unbiased, || what("variance", channel));

            let through = |at: usize| !self.epilogue.relu || found_y[at] > 0.0;
            let gradient = |at: usize| if through(at) { y_gradient[at] } else { 0.0 };
            let normal = |at: usize| (x[at] - mean) / deviation;
            let sum = places().map(gradient).sum::<f64>();
            let product = places().map(|at| gradient(at) * normal(at)).sum::<f64>();
            let sizes =
                places().map(|at| y_gradient[at].abs() * (1.0 + normal(at).abs())).sum::<f64>();
            let found_sum = f64::from(outcome.shift_gradient[channel]);
            assert_near(found_sum, sum, 1e-5 * sizes, || what("shift's gradient", channel));
            let found_product = f64::from(outcome.scale_gradient[channel]);
            assert_near(found_product, product, 1e-5 * sizes, || what("scale's gradient", channel));

            for at in places() {
                let mut y = normal(at) * scale + shift;
                let mut size = (normal(at) * scale).abs() + shift.abs() + scale.abs();
                if self.epilogue.residual {
                    y += residual[at];
                    size += residual[at].abs();
                }
                if self.epilogue.relu {
                    y = y.max(0.0);
                }
                let near = step * y.abs() + 2e-6 * size * (1.0 + mean.abs() / deviation) + 1e-7;
                assert_near(found_y[at], y, near, || what("y", at));
                let derived =
                    scale / deviation * (gradient(at) - sum / count - normal(at) * product / count);
                let size = (scale / deviation).abs()
                    * (gradient(at).abs()
                        + (sum.abs() + (normal(at) * product).abs()) / count
                        + 0.1);
                let near = step * derived.abs() + 2e-5 * size + 1e-7;
                assert_near(found_x_gradient[at], derived, near, || what("x's gradient", at));
                if self.epilogue.residual {
                    let name = || what("residual's gradient", at);
                    assert_near(found_residual_gradient[at], gradient(at), 0.0, name);
                }
            }
        }
    }
}

fn assert_near(found: f64, expected: f64, within: f64, what: impl Fn() -> String) {
    let both_nan = found.is_nan() && expected.is_nan();
    assert!(
        both_nan || (found - expected).abs() <= within,
        "{}: {found} is not {expected} within {within}",
        what()
    );
}

#[test]
fn values_and_gradients_equal_those_of_plain_arithmetic() {
    // Odd numbers of channels and rows, one and many tiles and chunks, channels with and without whole packs.
    let sizes = [(2, 1), (3, 7), (9, 64), (50, 12), (1000, 3), (777, 40), (130, 520), (33, 2048)];
    let kernels = Kernels::on_host();
    for (rows, channels) in sizes {
        for element in ELEMENTS {
            for epilogue in EPILOGUES {
                let case = Case::new(rows, channels, element, epilogue);
                case.check(&case.run(&kernels));
            }
        }
    }
}

#[test]
fn many_rows_are_summed_as_exactly_as_few() {
    // The maximum number of chunks.
    let epilogue = Epilogue { residual: false, relu: true };
    for (channels, element) in [(64, Element::Bf16), (3, Element::F32)] {
        let case = Case::new(40_000, channels, element, epilogue);
        case.check(&case.run(&Kernels::on_host()));
    }
}

#[test]
fn a_mean_far_from_zero_does_not_hurt_the_variance() {
    let mut case = Case::new(5000, 8, Element::F32, EPILOGUES[0]);
    let mut random = fastrand::Rng::with_seed(3);
    let x: Vec<f32> = (0..5000 * 8).map(|_| normal(&mut random, 1000.0, 1.0)).collect();
    case.x = Stored::of(Element::F32, &x);
    let outcome = case.run(&Kernels::on_host());
    let values = case.x.values();
    for channel in 0..8 {
        let values = || values.iter().skip(channel).step_by(8).map(|x| f64::from(*x));
        let mean = values().sum::<f64>() / 5000.0;
        let variance = values().map(|x| (x - mean).powi(2)).sum::<f64>() / 4999.0;
        let found = f64::from(outcome.batch_variance[channel]);
        assert!((found / variance - 1.0).abs() < 2e-3, "{found} is not {variance}");
    }
}

#[test]
fn huge_values_stay_finite_as_long_as_their_squares_do() {
    let mut case = Case::new(64, 16, Element::F32, EPILOGUES[1]);
    let x: Vec<f32> = case.x.values().iter().map(|x| x * -1e17).collect();
    case.x = Stored::of(Element::F32, &x);
    let outcome = case.run(&Kernels::on_host());
    assert!(outcome.y.values().iter().all(|y| y.is_finite() && *y >= 0.0));
    assert!(outcome.batch_variance.iter().all(|variance| variance.is_finite()));
    assert!(outcome.y.values().iter().any(|y| *y > 0.5));
}

#[test]
fn a_single_row_has_no_variance_and_gives_the_shift() {
    for element in ELEMENTS {
        let case = Case::new(1, 24, element, EPILOGUES[0]);
        let outcome = case.run(&Kernels::on_host());
        assert!(outcome.batch_variance.iter().all(|variance| variance.is_nan()));
        assert_eq!(outcome.y, Stored::of(element, &case.shift));
        // As in torch: a constant has no gradient.
        assert!(outcome.x_gradient.values().iter().all(|gradient| gradient.abs() < 1e-4));
    }
}

#[test]
fn nan_and_infinity_stay_in_their_channel() {
    for element in ELEMENTS {
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut case = Case::new(300, 8, element, EPILOGUES[3]);
            let mut x = case.x.values();
            x[100 * 8 + 5] = wrong;
            case.x = Stored::of(element, &x);
            let outcome = case.run(&Kernels::on_host());
            for (at, y) in outcome.y.values().into_iter().enumerate() {
                assert_eq!(y.is_nan(), at % 8 == 5, "{element:?}, {wrong}, {at}: {y}");
            }
            assert!(outcome.batch_mean[5].is_nan() || outcome.batch_mean[5].is_infinite());
            assert!(outcome.x_gradient.values().iter().skip(5).step_by(8).all(|x| x.is_nan()));
        }
    }
}

#[test]
fn an_empty_matrix_changes_nothing() {
    for (rows, channels) in [(0, 16), (16, 0)] {
        let outcome =
            Case::new(rows, channels, Element::F32, EPILOGUES[3]).run(&Kernels::on_host());
        assert!(outcome.batch_mean.iter().all(|mean| *mean == 0.0));
    }
}

#[test]
fn bits_do_not_depend_on_the_order_of_threads_and_blocks() {
    for (rows, channels) in [(9000, 40), (700, 35), (64, 1024)] {
        for element in ELEMENTS {
            let case = Case::new(rows, channels, element, EPILOGUES[3]);
            let bits = case.run(&Kernels::on_host()).bits();
            for seed in [0, 1, 2] {
                let kernels = Kernels::on_host_with_order(seed);
                assert!(case.run(&kernels).bits() == bits, "{:?}, order {seed}", case.shape);
            }
        }
    }
}

#[test]
fn channels_without_whole_packs_give_the_same_result() {
    let epilogue = EPILOGUES[3];
    let case = Case::new(60, 16, Element::Bf16, epilogue);
    let whole = case.run(&Kernels::on_host());
    // With one channel less the narrow kernels run; they must agree with the wide ones.
    let without_last = |stored: &Stored| {
        let values = stored.values();
        let kept: Vec<f32> = values.chunks(16).flat_map(|row| row[..15].to_vec()).collect();
        Stored::of(Element::Bf16, &kept)
    };
    let narrow = Case {
        shape: Shape { channels: 15, ..case.shape },
        x: without_last(&case.x),
        residual: without_last(&case.residual),
        y_gradient: without_last(&case.y_gradient),
        scale: case.scale[..15].to_vec(),
        shift: case.shift[..15].to_vec(),
        epilogue,
    };
    let found = narrow.run(&Kernels::on_host());
    narrow.check(&found);
    let near = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()))
    };
    assert!(near(&found.batch_variance, &whole.batch_variance[..15]));
}
