//! Updates on a CPU: every value is read and written once.
//!
//! An update is limited by memory bandwidth, so all operations on a block are done while it is in the cache. Plain
//! Rust: no operation here depends on the CPU's instruction set, and the result does not depend on the number of
//! threads.

use std::{
    array,
    borrow::Cow,
    iter::{repeat_n, zip},
    mem,
};

use tch::Tensor;

use super::{
    CLIP_EPSILON, Optimizer, Rates, Rule, Scaler, Segment,
    muon::{Muon, step_on_host},
};
use crate::torch::buffer::{read, write};

/// Number of values per block: 64 KiB of each buffer. Another number would change the bits of the gradient's norm.
const UPDATE_BLOCK_LEN: usize = 16 * 1024;

/// L2 norm of `gradient`, summed as if it contained zeros at `gaps` (offset, length). The sum is then bit-identical
/// whether frozen parameters have a range in the gradient, as in older versions, or not.
pub(super) fn norm(gradient: &[f32], gaps: &[(usize, usize)]) -> f64 {
    let mut pieces = Vec::new();
    let (mut done, mut gaps_len) = (0, 0);
    for (at, len) in gaps.iter().copied().chain([(gradient.len(), 0)]) {
        let at = at.min(gradient.len());
        pieces.push((done + gaps_len, &gradient[done..at]));
        (done, gaps_len) = (at, gaps_len + len);
    }
    let block = |number: usize| -> Cow<'_, [f32]> {
        let (start, end) = (
            number * UPDATE_BLOCK_LEN,
            (number * UPDATE_BLOCK_LEN + UPDATE_BLOCK_LEN).min(done + gaps_len),
        );
        let mut zeros = Vec::new();
        for (first, values) in &pieces {
            let (from, to) = (start.max(*first), end.min(first + values.len()));
            if from < to {
                let values = &values[from - first..to - first];
                if values.len() == end - start {
                    return Cow::Borrowed(values);
                }
                zeros.resize(end - start, 0.0);
                zeros[from - start..to - start].copy_from_slice(values);
            }
        }
        Cow::Owned(zeros)
    };
    let mut squares = vec![0.0; (done + gaps_len).div_ceil(UPDATE_BLOCK_LEN)];
    let blocks: Vec<_> = squares.iter_mut().enumerate().collect();
    in_parallel(blocks, threads(), &|(number, square)| *square = sum_of_squares(&block(number)));
    squares.iter().sum::<f64>().sqrt()
}

/// Splits the values into four parts that are read at the same time, with four sums each: reading one part after the
/// other reaches only half of the memory bandwidth.
fn sum_of_squares(values: &[f32]) -> f64 {
    let (groups, rest) = values.as_chunks::<4>();
    let run = groups.len() / 4;
    let [first, second, third, fourth] = [0, 1, 2, 3].map(|i| &groups[i * run..(i + 1) * run]);
    let mut sums = [[0.0_f32; 4]; 4];
    for (((a, b), c), d) in first.iter().zip(second).zip(third).zip(fourth) {
        for (sum, group) in sums.iter_mut().zip([a, b, c, d]) {
            *sum = array::from_fn(|lane| sum[lane] + group[lane] * group[lane]);
        }
    }
    let rest = groups[4 * run..].as_flattened().iter().chain(rest);
    let all = sums.into_iter().flatten().chain(rest.map(|value| value * value));
    all.map(f64::from).sum()
}

/// One block of every buffer that an update uses.
struct ParameterBlock<'a> {
    weights: &'a mut [f32],
    gradient: &'a [f32],
    /// First and second moment, if the rule has them.
    moments: [Option<&'a mut [f32]>; 2],
    average: Option<&'a mut [f32]>,
    /// Factor of the learning rate.
    rate: f32,
    /// The same of LARS and LAMB.
    layer_rate: f32,
    weight_decay: f32,
}

impl Optimizer {
    /// [`Self::update`] for a CPU.
    pub(in crate::torch) fn update_on_host(
        &mut self,
        weights: &mut Tensor,
        gradient: &Tensor,
        norm: &Tensor,
        rates: Rates,
    ) -> tch::Result<()> {
        let norm = f64::from(read(norm).first().copied().unwrap_or(f32::NAN));
        let (scale, skipped) = match self.scaler.as_ref().map(|scaler| read(&scaler.state)) {
            Some([scale, _, skipped]) => (*scale, *skipped),
            _ => (1.0, 0.0),
        };
        let clip = self.clip.map_or(1.0, |max_norm| (max_norm / (norm + CLIP_EPSILON)).min(1.0));
        let share = self.averaging_share(rates.step).map(|share| share as f32);
        if norm.is_finite() {
            let scalars = UpdateScalars {
                factor: (clip / f64::from(scale)) as f32,
                lr: rates.lr,
                updates: rates.step.0 as f64 + 1.0 - f64::from(skipped),
                share,
            };
            // Its values are not needed any more.
            let mut gradient = gradient.shallow_clone();
            self.update_weights(write(weights), write(&mut gradient), scalars);
        } else if let (Some(share), Some(average)) = (share, &mut self.average) {
            blend(write(&mut average.weights), read(weights), share);
        }
        if let Some(scaler) = &mut self.scaler {
            scaler.adjust(norm.is_finite());
        }
        Ok(())
    }

    fn update_weights(
        &mut self,
        weights: &mut [f32],
        gradient: &mut [f32],
        mut scalars: UpdateScalars,
    ) {
        let mut decays: Vec<f32> = self.segments.iter().map(|s| self.decay_of(*s) as f32).collect();
        match &mut self.rule {
            Rule::Lamb { betas, eps, mean, square } => {
                let moments = [write(mean), write(square)];
                let values = (&*weights, &mut *gradient);
                adam_step(&self.segments, values, moments, (*betas, *eps), &decays, &scalars);
                // The step contains the factor and the decay.
                scalars.factor = 1.0;
                decays.fill(0.0);
            }
            Rule::Muon { muon, betas, eps, mean, square } => {
                let (matrices, others): (Vec<Segment>, Vec<Segment>) =
                    self.segments.iter().copied().partition(|segment| segment.rows.is_some());
                let moments = [write(mean), write(square)];
                let values = (&*weights, &mut *gradient);
                let no_decay = vec![0.0; others.len()];
                adam_step(&others, values, moments, (*betas, *eps), &no_decay, &scalars);
                muon_step(*muon, &matrices, gradient, write(mean), scalars.factor);
                scalars.factor = 1.0;
            }
            Rule::Sgd { .. } | Rule::AdamW { .. } | Rule::Lars { .. } => {}
        }
        self.apply(weights, gradient, &decays, &scalars);
    }

    fn apply(
        &mut self,
        weights: &mut [f32],
        gradient: &[f32],
        decays: &[f32],
        scalars: &UpdateScalars,
    ) {
        let layer_rates = self.layer_rates(weights, gradient, scalars);
        let kernel = UpdateKernel::new(&self.rule, scalars);
        let (first, second) = match &mut self.rule {
            Rule::Sgd { velocity, .. } => (velocity.as_mut(), None),
            Rule::AdamW { mean, square, .. } => (Some(mean), Some(square)),
            Rule::Lars { velocity, .. } => (Some(velocity), None),
            // Their moments are part of the step already.
            Rule::Lamb { .. } | Rule::Muon { .. } => (None, None),
        };
        let segments = &self.segments;
        let mut moments = [first, second]
            .map(|moment| moment.map(|moment| blocks_mut(write(moment), segments).into_iter()));
        let average = scalars.share.and(self.average.as_mut());
        let mut average =
            average.map(|average| blocks_mut(write(&mut average.weights), segments).into_iter());
        let rates: Vec<f32> = segments.iter().map(|segment| segment.rate as f32).collect();
        let rates = zip(per_block(&rates, segments), per_block(&layer_rates, segments));
        let constants = zip(rates, per_block(decays, segments));
        let values = zip(blocks_mut(weights, segments), blocks(gradient, segments));
        let blocks = zip(values, constants)
            .map(|((weights, gradient), ((rate, layer_rate), weight_decay))| ParameterBlock {
                weights,
                gradient,
                moments: moments.each_mut().map(|moment| moment.as_mut().and_then(Iterator::next)),
                average: average.as_mut().and_then(Iterator::next),
                rate,
                layer_rate,
                weight_decay,
            })
            .collect();
        in_parallel(blocks, threads(), &|block| kernel.run(block, scalars));
    }

    /// The factor of the rate of each layer's weight, 1 for other parameters: `η ‖w‖ / (‖g‖ + λ ‖w‖)` with LARS, `‖w‖`
    /// divided by the norm of the step with LAMB.
    fn layer_rates(&self, weights: &[f32], gradient: &[f32], scalars: &UpdateScalars) -> Vec<f32> {
        let (trust, weight_decay, eps) = match self.rule {
            Rule::Lars { trust, eps, .. } => (trust, self.weight_decay, eps),
            Rule::Lamb { .. } => (1.0, 0.0, 0.0),
            _ => return vec![1.0; self.segments.len()],
        };
        let rate = |segment: &Segment| {
            let range = segment.start as usize..(segment.start + segment.len) as usize;
            let weight_norm = norm(&weights[range.clone()], &[]);
            let gradient_norm = norm(&gradient[range], &[]) * f64::from(scalars.factor);
            let denominator = gradient_norm + weight_decay * weight_norm + eps;
            let applies = segment.decays && weight_norm > 0.0 && gradient_norm > 0.0;
            if applies { (trust * weight_norm / denominator) as f32 } else { 1.0 }
        };
        self.segments.iter().map(rate).collect()
    }
}

/// Updates Adam's moments and replaces the gradient by the step without its rates: `m / (√s + ε) + λ w`, with both moments
/// divided by their bias corrections.
fn adam_step(
    segments: &[Segment],
    (weights, gradient): (&[f32], &mut [f32]),
    [mean, square]: [&mut [f32]; 2],
    (betas, eps): ([f64; 2], f64),
    decays: &[f32],
    scalars: &UpdateScalars,
) {
    let [bias1, bias2] = betas.map(|beta| (1.0 - libm::pow(beta, scalars.updates)) as f32);
    let [take_mean, take_square] = betas.map(|beta| (1.0 - beta) as f32);
    let (keep_square, eps, factor) = (betas[1] as f32, eps as f32, scalars.factor);
    let moments = zip(blocks_mut(mean, segments), blocks_mut(square, segments));
    let values = zip(blocks(weights, segments), blocks_mut(gradient, segments));
    let blocks = zip(zip(values, moments), per_block(decays, segments)).collect();
    in_parallel(blocks, threads(), &|(((weights, gradient), (mean, square)), decay)| {
        for ((w, g), (m, s)) in zip(zip(weights, gradient), zip(mean, square)) {
            let gradient = *g * factor;
            *m += take_mean * (gradient - *m);
            *s = keep_square * *s + take_square * (gradient * gradient);
            *g = (*m / bias1) / ((*s / bias2).sqrt() + eps) + decay * w;
        }
    });
}

/// Updates Muon's momentum and replaces the gradient by the step without its rate.
fn muon_step(
    muon: Muon,
    matrices: &[Segment],
    gradient: &mut [f32],
    mean: &mut [f32],
    factor: f32,
) {
    let (take, ahead) = ((1.0 - muon.momentum) as f32, muon.momentum as f32);
    let blocks = zip(blocks_mut(gradient, matrices), blocks_mut(mean, matrices)).collect();
    in_parallel(blocks, threads(), &|(gradient, mean)| {
        for (g, m) in zip(gradient, mean) {
            let gradient = *g * factor;
            *m += take * (gradient - *m);
            *g = if muon.nesterov { gradient + ahead * (*m - gradient) } else { *m };
        }
    });
    for Segment { start, len, rows, .. } in matrices {
        let values = &mut gradient[*start as usize..][..*len as usize];
        step_on_host(values, rows.map_or(1, |rows| rows as usize));
    }
}

/// Scalars of one update.
struct UpdateScalars {
    /// Factor of the gradient: clipping, and division by the loss scale.
    factor: f32,
    lr: f64,
    /// Number of updates including this one.
    updates: f64,
    /// Weight of the new weights in their average.
    share: Option<f32>,
}

/// A rule with its constants computed for one update.
#[derive(Clone, Copy)]
enum UpdateKernel {
    Sgd {
        lr: f32,
        momentum: f32,
        nesterov: bool,
    },
    AdamW {
        lr: f32,
        /// `1 - beta` for both moments, computed in f64 and then rounded: 1 minus an f32 of 0.999 is off by a relative
        /// 1e-5.
        take: [f32; 2],
        /// `beta2`: the share of the second moment that is kept.
        keep_square: f32,
        /// The learning rate, divided by the bias correction of the first moment.
        unbiased_lr: f32,
        /// Square root of the bias correction of the second moment.
        root_correction: f32,
        eps: f32,
    },
}

impl UpdateKernel {
    fn new(rule: &Rule, scalars: &UpdateScalars) -> Self {
        let lr = scalars.lr as f32;
        match *rule {
            Rule::Sgd { momentum, nesterov, .. } => {
                Self::Sgd { lr, momentum: momentum as f32, nesterov }
            }
            Rule::Lars { momentum, .. } => {
                Self::Sgd { lr, momentum: momentum as f32, nesterov: false }
            }
            // The step is the gradient of plain SGD. An L2 penalty is then the same as decoupled decay.
            Rule::Lamb { .. } | Rule::Muon { .. } => {
                Self::Sgd { lr, momentum: 0.0, nesterov: false }
            }
            Rule::AdamW { betas, eps, .. } => {
                let [bias1, bias2] = betas.map(|beta| 1.0 - libm::pow(beta, scalars.updates));
                Self::AdamW {
                    lr,
                    take: betas.map(|beta| (1.0 - beta) as f32),
                    keep_square: betas[1] as f32,
                    unbiased_lr: (scalars.lr / bias1) as f32,
                    root_correction: bias2.sqrt() as f32,
                    eps: eps as f32,
                }
            }
        }
    }

    fn run(&self, block: ParameterBlock<'_>, scalars: &UpdateScalars) {
        let ParameterBlock { weights, gradient, moments, average, rate, layer_rate, weight_decay } =
            block;
        let factor = scalars.factor;
        let average = average.zip(scalars.share);
        match (*self, moments) {
            (Self::Sgd { lr, .. }, [None, _]) => {
                let lr = lr * rate * layer_rate;
                sweep(weights, gradient, average, move |w, g| {
                    *w -= lr * (g * factor + weight_decay * *w);
                });
            }
            (Self::Sgd { lr, momentum, nesterov: true }, [Some(velocity), _]) => {
                let lr = lr * rate;
                sweep(weights, gradient.iter().zip(velocity), average, move |w, (g, v)| {
                    let g = g * factor + weight_decay * *w;
                    *v = momentum * *v + g;
                    *w -= lr * (g + momentum * *v);
                });
            }
            (Self::Sgd { lr, momentum, nesterov: false }, [Some(velocity), _]) => {
                let lr = lr * rate;
                sweep(weights, gradient.iter().zip(velocity), average, move |w, (g, v)| {
                    let g = g * factor + weight_decay * *w;
                    *v = momentum * *v + g * layer_rate;
                    *w -= lr * *v;
                });
            }
            (
                Self::AdamW {
                    lr,
                    take: [take_mean, take_square],
                    keep_square,
                    unbiased_lr,
                    root_correction,
                    eps,
                },
                [Some(mean), Some(square)],
            ) => {
                let (lr, unbiased_lr) = (lr * rate, unbiased_lr * rate);
                let shrink = 1.0 - lr * weight_decay;
                let others = gradient.iter().zip(mean).zip(square);
                sweep(weights, others, average, move |w, ((g, m), s)| {
                    let g = g * factor;
                    *m += take_mean * (g - *m);
                    *s = keep_square * *s + take_square * (g * g);
                    *w = *w * shrink - unbiased_lr * *m / (s.sqrt() / root_correction + eps);
                });
            }
            (Self::AdamW { .. }, _) => {}
        }
    }
}

impl Scaler {
    /// As `torch.amp.GradScaler.update`.
    fn adjust(&mut self, finite: bool) {
        let [scale, good, skipped] = write(&mut self.state) else { return };
        if finite {
            *good += 1.0;
            if *good >= self.rule.growth_interval as f32 {
                let grown = *scale * self.rule.growth as f32;
                *scale = if grown.is_finite() { grown } else { *scale };
                *good = 0.0;
            }
        } else {
            *scale *= self.rule.backoff as f32;
            *good = 0.0;
            *skipped += 1.0;
        }
    }
}

/// Calls `update` for every weight with its other values, and updates the average in the same pass: reading more
/// buffers in parallel uses the memory bandwidth better.
fn sweep<T>(
    weights: &mut [f32],
    others: impl IntoIterator<Item = T>,
    average: Option<(&mut [f32], f32)>,
    update: impl Fn(&mut f32, T),
) {
    let values = weights.iter_mut().zip(others);
    match average {
        None => values.for_each(|(weight, others)| update(weight, others)),
        Some((averages, 1.0)) => values.zip(averages).for_each(|((weight, others), average)| {
            update(weight, others);
            *average = *weight;
        }),
        Some((averages, share)) => values.zip(averages).for_each(|((weight, others), average)| {
            update(weight, others);
            *average += share * (*weight - *average);
        }),
    }
}

/// `average += share (weights - average)`
fn blend(average: &mut [f32], weights: &[f32], share: f32) {
    if share == 1.0 {
        average.copy_from_slice(weights);
        return;
    }
    for (average, weight) in average.iter_mut().zip(weights) {
        *average += share * (weight - *average);
    }
}

/// The blocks of a buffer, one segment after the other. There may be padding between segments.
fn blocks<'a>(values: &'a [f32], segments: &[Segment]) -> impl Iterator<Item = &'a [f32]> {
    let of = |segment: &Segment| {
        values[segment.start as usize..][..segment.len as usize].chunks(UPDATE_BLOCK_LEN)
    };
    segments.iter().flat_map(of)
}

/// The same, to be changed.
fn blocks_mut<'a>(mut values: &'a mut [f32], segments: &[Segment]) -> Vec<&'a mut [f32]> {
    let (mut blocks, mut end) = (Vec::new(), 0);
    for segment in segments {
        let (start, len) = (segment.start as usize, segment.len as usize);
        let (segment, rest) = mem::take(&mut values)[start - end..].split_at_mut(len);
        blocks.extend(segment.chunks_mut(UPDATE_BLOCK_LEN));
        (values, end) = (rest, start + len);
    }
    blocks
}

/// The value of its segment for each block.
fn per_block(values: &[f32], segments: &[Segment]) -> impl Iterator<Item = f32> {
    zip(values, segments).flat_map(|(value, segment)| {
        repeat_n(*value, (segment.len as usize).div_ceil(UPDATE_BLOCK_LEN))
    })
}

pub(super) fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Processes `items` in parallel, each thread a contiguous range of them.
pub(super) fn in_parallel<T: Send>(mut items: Vec<T>, threads: usize, work: &(impl Fn(T) + Sync)) {
    let share = items.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        while items.len() > share {
            let part = items.split_off(items.len() - share);
            scope.spawn(move || part.into_iter().for_each(work));
        }
        items.into_iter().for_each(work);
    });
}
