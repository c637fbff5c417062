//! `baton-worker eval`: measures the accuracy of exported weights on a validation set.

mod by_class;
mod predictions;

use std::path::{Path, PathBuf};

use baton_access::bounded::{MAX_RECIPE_BYTES, read_text};
use baton_console::json;
use baton_data::{Batch, Dataset, Items, Loader, Options, Preprocessing, Request, Source};
use baton_job::{
    exit::{Failure, bad_input},
    ids::LocalRank,
    message::GeneratedText,
};
use baton_recipe::{JobSpec, progress::Accuracy, task};
use baton_trainer::{
    BatchEvaluation, Error, EvaluatedWeights, Learner, combine_evaluations,
    torch::{self, TorchLearner, weights::Head},
    vocabulary,
};
use indicatif::ProgressBar;
use serde::Serialize;

use self::{
    by_class::{ByClass, ClassCounter},
    predictions::PredictionFile,
};
use crate::predictions::{Known, PredictionColumns};

/// Measure the accuracy of exported weights.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Weights in torchvision's names, or an adapter, as `baton checkpoint export` writes them [default: for a language
    /// model, its own weights without an adapter].
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Validation set.
    #[arg(long, value_name = "FILE")]
    data: String,
    /// Recipe the weights were trained with: architecture, classes, normalisation, resolution.
    #[arg(long, value_name = "FILE", default_value = "recipes/digits_cpu.toml")]
    recipe: PathBuf,
    /// Change one value of the recipe, e.g. --set evaluation.resolution=64. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// libtorch threads.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Print this many of the texts that a language model writes; the recipe needs evaluation.generate.
    #[arg(long, value_name = "N", default_value_t = 0)]
    show: usize,
    /// Write the prediction for every sample to this CSV file: sample, label, prediction, probability; of a regression
    /// sample, targets, predictions.
    #[arg(long, value_name = "FILE")]
    predictions: Option<PathBuf>,
    /// Write the probabilities of all classes there, too.
    #[arg(long, requires = "predictions")]
    probabilities: bool,
    /// Show precision, recall and F1 of each class, which classes are confused, and how calibrated probabilities are.
    #[arg(long)]
    by_class: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
struct EvaluatedFile {
    #[serde(flatten)]
    accuracy: Accuracy,
    /// All texts that a language model wrote.
    texts: Vec<GeneratedText>,
    /// With `--by-class`.
    #[serde(skip_serializing_if = "Option::is_none")]
    by_class: Option<ByClass>,
}

/// What is kept of single samples.
struct SampleOutputs {
    /// `None` if nothing is kept.
    columns: Option<PredictionColumns>,
    file: Option<PredictionFile>,
    classes: Option<ClassCounter>,
}

/// Evaluates and prints.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let spec = recipe(&args.recipe, &args.overrides)?;
    let is_language_model = spec.model.arch.is_causal_lm();
    if args.weights.is_none() && !is_language_model {
        return Err(bad_input(
            "a network has no weights of its own: give them with --weights FILE",
        ));
    }
    if args.show > 0 && spec.evaluation.generate.is_none() {
        return Err(bad_input(
            "--show needs texts: add --set 'evaluation.generate={}' or the section to the recipe",
        ));
    }
    let weights = args.weights.as_deref();
    weights.map_or(Ok(()), baton_checkpoint::check_weights_file).map_err(bad_input)?;
    let cache_dir = Source::new("").cache_dir;
    let source = Source::of_recipe(&spec, &args.data, cache_dir);
    let vocabulary = vocabulary(&spec)?;
    let set = Dataset::open(Source { vocabulary, ..source }).map_err(Error::from)?;
    Items::check(&spec, &args.data, &set).map_err(Error::from)?;
    let device = torch::device::open(&spec, LocalRank(0))?;
    torch::device::set_threads(args.threads);
    let mut learner = TorchLearner::new(&spec, set.input_type(), device)?;
    // The matrices of a new adapter change nothing.
    if let Some(weights) = weights {
        torch::weights::load(&mut learner, weights, Head::FromFile).map_err(bad_input)?;
    }
    let mut samples = SampleOutputs::new(args, &spec)?;
    let (evaluations, texts) = evaluate(&mut learner, set, &spec, &mut samples)?;
    samples.file.map_or(Ok(()), PredictionFile::finish)?;
    if evaluations.iter().all(|evaluation| evaluation.sums.count == 0) {
        let what = "no sample could be evaluated: all are bad; `baton data verify` says why";
        return Err(bad_input(format!("{}: {what}", args.data)));
    }
    let accuracy = combine_evaluations(&evaluations.iter().collect::<Vec<_>>(), &texts, &spec);
    let by_class = samples.classes.map(ClassCounter::finish);
    let evaluated = EvaluatedFile { accuracy, texts, by_class };
    json::print(args.json, &evaluated, |EvaluatedFile { accuracy, texts, by_class }| {
        let shown = accuracy.metrics.iter().map(task::display);
        let shown = shown.collect::<Vec<_>>().join(", ");
        let what = if is_language_model { "predicted tokens" } else { "samples" };
        let metrics = format!("{shown} on {} {what}", accuracy.samples);
        let texts = texts.iter().take(args.show).map(shown_text);
        let classes = by_class.as_ref().map(ByClass::text);
        std::iter::once(metrics).chain(classes).chain(texts).collect::<Vec<_>>().join("\n\n")
    });
    Ok(())
}

impl SampleOutputs {
    fn new(args: &Args, spec: &JobSpec) -> Result<Self, Failure> {
        if args.predictions.is_none() && !args.by_class {
            return Ok(Self { columns: None, file: None, classes: None });
        }
        let columns = PredictionColumns::of_recipe(spec, true, args.probabilities);
        let columns = columns.ok_or_else(|| {
            bad_input(
                "--predictions and --by-class need a classification or a regression: other networks give losses, not \
                 predictions",
            )
        })?;
        if (args.by_class || args.probabilities) && !columns.is_classification() {
            return Err(bad_input("--by-class and --probabilities need a classification"));
        }
        let create = |path: &PathBuf| PredictionFile::create(path, &columns.header());
        Ok(Self {
            file: args.predictions.as_ref().map(create).transpose()?,
            classes: args.by_class.then(|| ClassCounter::new(columns.outputs)),
            columns: Some(columns),
        })
    }

    /// Takes the outputs for a batch, and the targets of a regression, both of shape (samples, outputs).
    fn add(&mut self, batch: &Batch, targets: &[f32], outputs: &[f32]) -> Result<(), Failure> {
        let Some(columns) = &self.columns else { return Ok(()) };
        for (index, sample) in batch.samples.iter().enumerate() {
            let values = index * columns.outputs..(index + 1) * columns.outputs;
            let outputs = &outputs[values.clone()];
            let known = match batch.labels.get(index) {
                Some(label) => Known::Class(*label),
                None => Known::Values(&targets[values]),
            };
            if let Some(file) = &mut self.file {
                file.line(&columns.line(*sample, known, outputs))?;
            }
            if let (Some(classes), Known::Class(label)) = (&mut self.classes, known) {
                // The task has checked the label.
                classes.add(label as usize, &columns.probabilities(outputs));
            }
        }
        Ok(())
    }
}

/// A text that the model wrote, after what it was given.
fn shown_text(GeneratedText { sample, prompt, text, .. }: &GeneratedText) -> String {
    format!("sample {sample}:\n{prompt}\n>>>\n{text}")
}

fn evaluate(
    learner: &mut TorchLearner,
    set: Dataset,
    spec: &JobSpec,
    samples: &mut SampleOutputs,
) -> Result<(Vec<BatchEvaluation>, Vec<GeneratedText>), Failure> {
    let preprocessing = Preprocessing::of_evaluation(spec);
    let (len, evaluation) = (set.len(), spec.evaluation.clone());
    let [batches, text_batches] = evaluation.batches(len);
    let requests = (0..batches + text_batches).map(move |number| Request {
        epoch: 0,
        samples: evaluation.positions(number, len),
        preprocessing: preprocessing.clone(),
    });
    let (threads, ahead) = (spec.data.decode_threads as usize, spec.data.prefetch_batches as usize);
    let mut loader = Loader::start(set.into(), &Options::new(threads, ahead), requests);
    let bar = ProgressBar::new(len + spec.evaluation.texts(len));
    let (mut evaluations, mut written) = (Vec::new(), Vec::new());
    let weights = EvaluatedWeights::Raw;
    while let Some(batch) = loader.next().transpose().map_err(Error::from)? {
        if bar.position() < len && samples.columns.is_some() && !batch.is_empty() {
            let (evaluation, outputs) = learner.evaluate_samples(&batch, weights)?;
            samples.add(&batch, &evaluation.targets, &outputs)?;
            evaluations.push(evaluation);
        } else if bar.position() < len {
            evaluations.extend(learner.evaluate(&batch, weights, &mut || false)?);
        } else {
            let texts = learner.write_texts(&batch, weights, &mut || false)?;
            written.extend(texts.into_iter().flatten());
        }
        bar.inc(batch.len() as u64);
        loader.recycle(batch);
    }
    bar.finish_and_clear();
    Ok((evaluations, written))
}

/// Reads a recipe file, with values changed on the command line.
pub(crate) fn recipe(path: &Path, overrides: &[String]) -> Result<JobSpec, Failure> {
    JobSpec::read(path, overrides, |path| read_text(path, MAX_RECIPE_BYTES))
        .map_err(|error| bad_input(format!("{}: {error}", path.display())))
}
