//! Softmax regression on pixels or on arrays, in plain Rust.
//!
//! It learns little but takes only milliseconds, so that everything around training (recovery, checkpoints, control)
//! can be tested quickly.
//!
//! Runs of earlier versions in `tests/compat` must end with the same bits: neither the names and sizes of regions and
//! tensors nor the order of any sum may change.

use std::ops::Range;

use baton_checkpoint::ALIGNMENT;
use baton_collectives::BufferMut;
use baton_data::{Batch, InputType, Inputs};
use baton_recipe::{JobSpec, spec::OptimizerSpec};

use crate::{
    Leaf, Learner, Sums,
    learner::{
        BatchEvaluation, Error, EvaluatedWeights, Region, SpanCompleted, Summand, TAIL,
        TensorLocation, Update, VOTE,
    },
};

/// Weights (classes × features), then one bias per class; SGD with momentum.
#[derive(Debug)]
pub struct LinearLearner {
    classes: usize,
    features: usize,
    mean: [f32; 3],
    std: [f32; 3],
    smoothing: f32,
    momentum: f32,
    nesterov: bool,
    weight_decay: f32,
    weights: Vec<f32>,
    velocity: Vec<f32>,
    /// The first half of the classes, so that tests of everything else have a span.
    span: Range<usize>,
}

impl LinearLearner {
    /// A model with zero weights for samples of this type.
    ///
    /// # Errors
    /// An optimizer other than SGD.
    pub fn new(spec: &JobSpec, input_type: &InputType) -> Result<Self, Error> {
        let OptimizerSpec::Sgd { momentum, nesterov, weight_decay, .. } = spec.optimizer else {
            return Err(Error::Recipe(
                "model.arch = linear supports only optimizer.kind = sgd: choose that".to_owned(),
            ));
        };
        let classes = spec.model.num_classes as usize;
        let features = match input_type {
            InputType::Image => (spec.train.resolution as usize).pow(2) * 3,
            InputType::Array(shape) => shape.iter().product::<u64>() as usize,
            // Not with this model: the recipe's rules refuse it.
            InputType::Tokens => 0,
        };
        let len = (classes * features).next_multiple_of(ALIGNMENT) + classes;
        Ok(Self {
            classes,
            features,
            mean: spec.data.mean,
            std: spec.data.std,
            smoothing: spec.loss.label_smoothing as f32,
            momentum: momentum as f32,
            nesterov,
            weight_decay: weight_decay as f32,
            weights: vec![0.0; len],
            velocity: vec![0.0; len],
            span: 0..classes / 2 * features,
        })
    }

    /// Index of the first bias. The values between weights and biases are padding: always zero.
    fn biases(&self) -> usize {
        (self.classes * self.features).next_multiple_of(ALIGNMENT)
    }

    /// Factor that keeps logits at the same magnitude, so that one learning rate fits every resolution.
    fn scale(&self) -> f32 {
        1.0 / (self.features as f32).sqrt()
    }

    /// Values of sample `index`: normalised pixels, or the array itself.
    fn values(&self, batch: &Batch, index: usize) -> Vec<f32> {
        let range = index * self.features..(index + 1) * self.features;
        match &batch.inputs {
            Inputs::Arrays { values, .. } => values[range].to_vec(),
            Inputs::Tokens { .. } => Vec::new(),
            Inputs::Images { pixels, .. } => {
                let channels = self.mean.iter().zip(&self.std).cycle();
                let normalised =
                    |(pixel, (mean, std)): (&u8, (&f32, &f32))| (f32::from(*pixel) - mean) / std;
                pixels[range].iter().zip(channels).map(normalised).collect()
            }
        }
    }

    fn probabilities(&self, values: &[f32]) -> Vec<f32> {
        let rows = self.weights.chunks_exact(self.features).take(self.classes);
        let biases = &self.weights[self.biases()..];
        let scale = self.scale();
        let dot = |row: &[f32]| row.iter().zip(values).map(|(w, x)| w * x).sum::<f32>() * scale;
        let logits: Vec<f32> = rows.zip(biases).map(|(row, bias)| dot(row) + bias).collect();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
        let total: f32 = exponentials.iter().sum();
        exponentials.iter().map(|value| value / total).collect()
    }

    fn label(&self, batch: &Batch, index: usize) -> Result<usize, Error> {
        let label = batch.labels[index];
        usize::try_from(label).ok().filter(|label| *label < self.classes).ok_or(Error::Label {
            sample: batch.samples[index],
            label,
            num_classes: self.classes as u32,
        })
    }

    /// Adds to `sums` the loss of a sample, and whether its label is among the top 1 and the top 5 predictions.
    fn add_sample(&self, probabilities: &[f32], label: usize, sums: &mut Sums) {
        let own = probabilities[label];
        // Among equal probabilities the first class ranks highest.
        let is_ahead = |(class, p): &(usize, &f32)| **p > own || (**p == own && *class < label);
        let ahead = probabilities.iter().enumerate().filter(is_ahead).count();
        let hit = |hit: bool| f64::from(u8::from(hit));
        sums.add(&Sums {
            loss: -f64::from(own.max(f32::MIN_POSITIVE).ln()),
            others: vec![hit(ahead == 0), hit(ahead < 5)],
            count: 1,
        });
    }
}

impl Learner for LinearLearner {
    type Leaf = HostLeaf;
    type Loss = f64;

    fn new_leaf(&mut self) -> Result<HostLeaf, Error> {
        Ok(HostLeaf(vec![0.0; self.weights.len() + TAIL]))
    }

    fn gradient(&mut self, batch: &Batch, scale: f32, leaf: &mut HostLeaf) -> Result<f64, Error> {
        self.gradient_in_spans(batch, scale, leaf, &mut |_| Ok(()))
    }

    fn spans(&self) -> &[Range<usize>] {
        std::slice::from_ref(&self.span)
    }

    fn gradient_in_spans(
        &mut self,
        batch: &Batch,
        scale: f32,
        leaf: &mut HostLeaf,
        completed: &mut SpanCompleted<'_, HostLeaf>,
    ) -> Result<f64, Error> {
        let mut sums = Sums::default();
        let (biases, classes) = (self.biases(), self.classes);
        let mut samples = Vec::new();
        for index in 0..batch.len() {
            let label = self.label(batch, index)?;
            let values = self.values(batch, index);
            let probabilities = self.probabilities(&values);
            self.add_sample(&probabilities, label, &mut sums);
            samples.push((label, values, probabilities));
        }
        leaf.0[..biases + classes].fill(0.0);
        for half in [0..classes / 2, classes / 2..classes] {
            if half.start > 0 {
                completed(leaf)?;
            }
            for (label, values, probabilities) in &samples {
                for class in half.clone() {
                    let hit = if class == *label { 1.0 - self.smoothing } else { 0.0 };
                    let smooth = self.smoothing / classes as f32;
                    let error = scale * (probabilities[class] - hit - smooth);
                    let row = &mut leaf.0[class * self.features..(class + 1) * self.features];
                    let per_feature = error * self.scale();
                    row.iter_mut().zip(values).for_each(|(g, x)| *g += per_feature * x);
                    leaf.0[biases + class] += error;
                }
            }
        }
        let top1 = sums.others.first().copied().unwrap_or_default();
        let written = [sums.loss as f32, top1 as f32, sums.count as f32];
        let tail = leaf.tail_start();
        leaf.0[tail..tail + VOTE.start].copy_from_slice(&written);
        Ok(sums.loss)
    }

    fn measure(&mut self, sum: &mut HostLeaf) -> Result<(), Error> {
        let (gradient, tail) = sum.0.split_at_mut(self.weights.len());
        let squares = gradient.iter().map(|value| f64::from(*value).powi(2));
        tail[VOTE.end] = squares.sum::<f64>().sqrt() as f32;
        Ok(())
    }

    fn update(&mut self, sum: &mut HostLeaf, update: &Update) -> Result<(), Error> {
        let lr = update.lr;
        let values = self.weights.iter_mut().zip(&mut self.velocity).zip(&sum.0);
        for ((weight, velocity), gradient) in values {
            let gradient = gradient + self.weight_decay * *weight;
            *velocity = self.momentum * *velocity + gradient;
            let direction =
                if self.nesterov { gradient + self.momentum * *velocity } else { *velocity };
            *weight -= lr as f32 * direction;
        }
        Ok(())
    }

    fn evaluate(
        &mut self,
        batch: &Batch,
        _weights: EvaluatedWeights,
        _is_interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Option<BatchEvaluation>, Error> {
        let mut sums = Sums::default();
        for index in 0..batch.len() {
            let probabilities = self.probabilities(&self.values(batch, index));
            self.add_sample(&probabilities, self.label(batch, index)?, &mut sums);
        }
        Ok(Some(BatchEvaluation { sums, ..BatchEvaluation::default() }))
    }

    fn regions(&mut self) -> Vec<Region<'_>> {
        vec![
            Region { name: "weights", buffer: BufferMut::Host(&mut self.weights), frozen: None },
            Region { name: "momentum", buffer: BufferMut::Host(&mut self.velocity), frozen: None },
        ]
    }

    fn tensors(&self) -> Vec<TensorLocation> {
        let location = |name: &str, shape: Vec<usize>, offset| TensorLocation {
            name: name.to_owned(),
            shape,
            region: "weights",
            offset,
            channels_last: false,
            integers: None,
        };
        vec![
            location("fc.weight", vec![self.classes, self.features], 0),
            location("fc.bias", vec![self.classes], self.biases()),
        ]
    }
}

/// A leaf in host memory, or some of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct HostLeaf(pub Vec<f32>);

impl HostLeaf {
    fn tail_start(&self) -> usize {
        self.0.len() - TAIL
    }
}

impl Summand for HostLeaf {
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a += b);
        Ok(())
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        BufferMut::Host(&mut self.0)
    }
}

impl Leaf for HostLeaf {
    type LeafSpan = Self;

    fn value_count(&self) -> usize {
        self.0.len()
    }

    fn span(&self, range: Range<usize>) -> Result<Self, Error> {
        Ok(Self(self.0[range].to_vec()))
    }

    fn put_back(&mut self, start: usize, span: Self) -> Result<(), Error> {
        self.0[start..start + span.0.len()].copy_from_slice(&span.0);
        Ok(())
    }

    fn set_vote(&mut self, vote: [f32; VOTE.end - VOTE.start]) -> Result<(), Error> {
        let start = self.tail_start();
        let tail = &mut self.0[start..];
        tail[VOTE].copy_from_slice(&vote);
        tail[VOTE.end..].fill(0.0);
        Ok(())
    }

    fn tail(&mut self) -> Result<[f32; TAIL], Error> {
        let mut tail = [0.0; TAIL];
        tail.copy_from_slice(&self.0[self.tail_start()..]);
        Ok(tail)
    }
}
