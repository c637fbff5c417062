//! `baton checkpoint merge`

use std::path::{Path, PathBuf};

use baton_checkpoint::{
    Manifest, Store,
    export::{WeightValues, Weights},
};
use baton_job::exit::Failure;
use baton_language::{LanguageModel, NewFolder, merge::Merge, output::MAX_FILE_BYTES};
use baton_recipe::JobSpec;

use super::folder::{FolderFlags, is_newest, store_failure, with_picked, with_store};
use crate::{
    commands::{
        bar::{BYTES, CommandProgress},
        dtype::Dtype,
        model::language_failure,
    },
    failure::bad_input,
    human, json,
};

/// Write a language model with the weights of a checkpoint, as a folder that other programs read
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint merge --to tuned                         the newest checkpoint, into its recipe's model
  baton checkpoint merge step-0000000440-gen-000003 --to tuned --model SmolLM2-135M-Instruct
  baton checkpoint merge --to tuned --dtype bf16            half the size of f32

With an adapter ([adapter] in the recipe), every adapted weight becomes W + scale * B * A, computed in f32. \
Without, all weights are those of the checkpoint. Description, tokenizer and chat template are copied from the \
model, which must be the one that was trained: its digest is in the checkpoint.

The folder appears when it is complete. Weights above 5 GB are divided into several files with an index. \
transformers, vLLM and llama.cpp's converter read it, and so does model.path of another recipe.

Exit code 1 after a merge: newer checkpoints were not merged because they are damaged.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
    /// Name of the checkpoint [default: the newest complete one]
    name: Option<String>,
    /// Folder of the model that was trained [default: model.path of the checkpoint's recipe]
    #[arg(long, value_name = "MODEL_FOLDER")]
    model: Option<PathBuf>,
    /// The folder to write; it must not exist, or be empty
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// Merge the moving average of the weights instead of the weights
    #[arg(long)]
    ema: bool,
    /// The type of the weights [default: each as in the model]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let folder = args.folder.find().await?;
    let is_json = args.json;
    let (_, damaged, merged) = with_store(folder.location.clone(), move |store| {
        with_picked(store, &folder, args.name.as_deref(), |manifest| merge(store, manifest, &args))
    })
    .await?;
    json::print(is_json, &merged, |merged| {
        let json::MergedModel { path, step, bytes, .. } = merged;
        format!("wrote {path}: the model of step {step} ({})", human::bytes(*bytes))
    });
    is_newest(&merged.checkpoint, &damaged, "merged")
}

fn merge(store: &Store, manifest: &Manifest, args: &Args) -> Result<json::MergedModel, Failure> {
    let (spec, model) = model(manifest, args.model.as_deref())?;
    let folder = NewFolder::create(&args.to).map_err(language_failure)?;
    let weights = if args.ema { Weights::Averaged } else { Weights::Raw };
    let values = WeightValues::read(store, manifest, weights, &args.to).map_err(store_failure)?;
    let merge = Merge::new(&model, args.dtype.map(Dtype::float));
    let mut progress = CommandProgress::new(BYTES, merge.bytes(), args.json);
    let mut trained = |name: &str| values.get(name).map(|values| values.into_owned());
    let written =
        merge.write(&folder, MAX_FILE_BYTES, &mut trained, &mut |bytes| progress.show_bytes(bytes));
    progress.finish();
    written.and_then(|()| folder.finish()).map_err(language_failure)?;
    Ok(json::MergedModel {
        checkpoint: manifest.name(),
        path: args.to.display().to_string(),
        model: spec.model.path,
        step: manifest.step.0,
        dtype: args.dtype.map_or("same", Dtype::name),
        averaged: args.ema,
        adapter: spec.adapter.is_some(),
        bytes: merge.bytes(),
    })
}

/// The recipe of a checkpoint with the path of the model in `folder`, if given, and this model, which must be the one
/// that was trained.
fn model(manifest: &Manifest, folder: Option<&Path>) -> Result<(JobSpec, LanguageModel), Failure> {
    let mut spec = language_recipe(manifest)?;
    if let Some(folder) = folder {
        let path = folder.to_str();
        let path = path.ok_or_else(|| bad_input("--model: the path is not UTF-8"))?;
        path.clone_into(&mut spec.model.path);
    }
    let hint = |error: &baton_language::Error| match folder {
        None => format!("model.path of the recipe: {error}; --model FOLDER names another folder"),
        Some(_) => error.to_string(),
    };
    let model = LanguageModel::of_recipe(&spec).map_err(|error| bad_input(hint(&error)))?;
    let (found, path) = (model.digest().map_err(language_failure)?, &spec.model.path);
    match &manifest.program {
        Some(trained) if *trained == found => Ok((spec, model)),
        Some(trained) => Err(bad_input(format!(
            "{path} is not the model that was trained: its digest is {found}, but checkpoint {} was trained from \
             {trained}; name the folder of that model with --model",
            manifest.name()
        ))),
        None => Err(bad_input(format!(
            "checkpoint {} does not name its model, so nothing can be merged",
            manifest.name()
        ))),
    }
}

/// The recipe of a checkpoint of a language model.
pub(super) fn language_recipe(manifest: &Manifest) -> Result<JobSpec, Failure> {
    let of = |problem: String| bad_input(format!("checkpoint {} {problem}", manifest.name()));
    // Not all old recipes can be read, so first what this is about.
    if manifest.arch != "causal_lm" {
        return Err(of(format!("is of {:?}, no language model", manifest.arch)));
    }
    JobSpec::from_json(&manifest.recipe)
        .map_err(|error| of(format!("has a recipe that cannot be read: {error}")))
}
